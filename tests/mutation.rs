//! Breaks every schedule in ways that an implementation could, and asks of each mutant that the checker refuses it, or
//! that it is no different: the same bytes move, and whatever had an order has it still. That is found out here, by
//! transitive closure over all pairs of nodes, and shares nothing with the checker's clocks and sweeps.
//!
//! | column | the mutant |
//! |---|---|
//! | rejected | was refused by the checker |
//! | same | has the same happens-before relation (a queue may add to it) |
//! | commutes | orders all conflicting pairs of nodes alike; those that changed touch nothing in common |
//! | alike | reads elsewhere what is the same: every node writes the same bytes, and all conflicts are ordered |
//! | survived | is none of these |
//!
//! `alike` is found only where data lies in several places, in a broadcast along a ring or a tree, or in staging that
//! a writer fills twice because its readers are reached by different paths.
//!
//! **Two ranks on one queue.** Calls are submitted one after the other, and in a call one rank after the other. On a
//! *gated* device the queue then stands still at the first step that waits for one submitted behind it: a deadlock
//! that the checker must see. If it does not deadlock, a queue only adds order, which is why the mutant is `same`.
//! Where submissions are *held* until their waits are met they enter the queue in an order that their dependencies
//! allow, and no order of that kind may be refused.
mod forms;
#[path = "mutation/independent.rs"]
mod independent;

use allhands::schedule::{
    Action, Actor, Chunking, Place, Region, Schedule, StepId, algorithms, build,
    check::{FoldOrder, Gate, Label, Order, Program, Sequence},
    direct,
};
use forms::{Form, collectives, in_place, promised, shape};
use independent::{Closure, conflict, written};
use std::{collections::BTreeMap, time::Instant};

const BANKS: u32 = 2;
const CALLS: u32 = 4;
/// Mutants of each kind and schedule, spread over all places where it applies.
const SITES: usize = 12;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Kind {
    DropDependency,
    WeakenDependency,
    SwapSource,
    SwapDestination,
    ShiftSource,
    SwapOrder,
    FlipFinish,
    SkipAction,
    SkipDestination,
    CutShort,
    MoveStep,
    DropCarry,
    OneQueue,
    DropGate,
}

const KINDS: [Kind; 14] = {
    use Kind::*;
    [
        DropDependency,
        WeakenDependency,
        SwapSource,
        SwapDestination,
        ShiftSource,
        SwapOrder,
        FlipFinish,
        SkipAction,
        SkipDestination,
        CutShort,
        MoveStep,
        DropCarry,
        OneQueue,
        DropGate,
    ]
};

/// Where a schedule is broken: `i` and `j` are what the kind needs to know within the step.
#[derive(Clone, Copy, Debug)]
struct Site {
    kind: Kind,
    actor: Actor,
    step: usize,
    i: usize,
    j: usize,
}

fn sites(s: &Schedule, order: FoldOrder) -> Vec<Site> {
    let mut sites = Vec::new();
    let ranks = s.shape.ranks;
    for (actor, steps) in s.steps.iter().enumerate() {
        let actor = actor as Actor;
        let mut add = |kind, step, i, j| sites.push(Site { kind, actor, step, i, j });
        if !steps.is_empty() {
            add(Kind::DropGate, 0, 0, 0);
        }
        for other in actor + 1..ranks {
            add(Kind::OneQueue, 0, other as usize, 0);
        }
        for (k, step) in steps.iter().enumerate() {
            for (d, id) in step.after.iter().enumerate() {
                add(Kind::DropDependency, k, d, 0);
                if id.index > 0 {
                    add(Kind::WeakenDependency, k, d, 0);
                }
            }
            if k + 1 < steps.len() {
                add(Kind::MoveStep, k, 0, 0);
            }
            for (i, action) in step.actions.iter().enumerate() {
                add(if actor < ranks { Kind::SkipAction } else { Kind::DropCarry }, k, i, 0);
                if action.len() > 1 {
                    add(Kind::CutShort, k, i, 0);
                }
                let staged = |r: &Region| matches!(r.place, Place::Slot(_)) && s.slots.len() > 1;
                for (j, r) in action.sources().iter().enumerate() {
                    if staged(r) {
                        add(Kind::SwapSource, k, i, j);
                    }
                    if r.start > 0 || r.end() < room(s, r.place) {
                        add(Kind::ShiftSource, k, i, j);
                    }
                    // Where any order is allowed, another order is right if all ranks get its result.
                    if j > 0 && order == FoldOrder::Rank {
                        add(Kind::SwapOrder, k, i, j);
                    }
                }
                if let Action::Reduce { .. } = action {
                    add(Kind::FlipFinish, k, i, 0);
                }
                for (j, r) in action.destinations().iter().enumerate() {
                    if action.destinations().len() > 1 {
                        add(Kind::SkipDestination, k, i, j);
                    }
                    if staged(r) {
                        add(Kind::SwapDestination, k, i, j + action.sources().len());
                    }
                }
            }
        }
    }
    sites
}

/// Elements of a place.
fn room(s: &Schedule, place: Place) -> u64 {
    match place {
        Place::Input(r) => s.shape.input_len(r),
        Place::Output(r) => s.shape.output_len(r),
        Place::Slot(i) => s.slots[i as usize].len,
    }
}

/// Another slot, and if there is one, such that neither its kind nor its length gives the mutant away.
fn other_slot(s: &Schedule, r: &Region) -> Place {
    let Place::Slot(x) = r.place else { unreachable!("only staging is swapped") };
    let (n, slot) = (s.slots.len() as u32, s.slots[x as usize]);
    let others = || (1..n).map(|d| (x + d) % n);
    let fits = |y: &u32| s.slots[*y as usize].home == slot.home && s.slots[*y as usize].len >= r.end();
    let same_owner = others().filter(fits).find(|y| s.slots[*y as usize].owner == slot.owner);
    Place::Slot(same_owner.or_else(|| others().find(fits)).unwrap_or((x + 1) % n))
}

fn break_at(s: &Schedule, site: Site) -> Schedule {
    let mut m = s.clone();
    let Site { kind, actor, step: k, i, j } = site;
    let steps = &mut m.steps[actor as usize];
    match kind {
        Kind::DropDependency => drop(steps[k].after.remove(i)),
        Kind::WeakenDependency => steps[k].after[i].index -= 1,
        Kind::SwapSource | Kind::SwapDestination => {
            let region = steps[k].actions[i].regions_mut().nth(j).expect("the site is there");
            region.place = other_slot(s, region);
        }
        Kind::ShiftSource => {
            let region = steps[k].actions[i].regions_mut().nth(j).expect("the site is there");
            region.start = if region.end() < room(s, region.place) { region.start + 1 } else { region.start - 1 };
        }
        Kind::SwapOrder => {
            let Action::Reduce { srcs, .. } = &mut steps[k].actions[i] else {
                unreachable!("only folds have an order")
            };
            srcs.swap(j - 1, j);
        }
        Kind::FlipFinish => {
            let Action::Reduce { finish, .. } = &mut steps[k].actions[i] else { unreachable!("only folds finish") };
            *finish = !*finish;
        }
        Kind::SkipAction | Kind::DropCarry => {
            steps[k].actions.remove(i);
            if steps[k].actions.is_empty() {
                remove_step(&mut m, StepId { actor, index: k as u32 });
            }
        }
        Kind::SkipDestination => match &mut steps[k].actions[i] {
            Action::Copy { dsts, .. } | Action::Reduce { dsts, .. } => drop(dsts.remove(j)),
        },
        Kind::CutShort => steps[k].actions[i].regions_mut().for_each(|r| r.len -= 1),
        Kind::MoveStep => {
            steps.swap(k, k + 1);
            let k = k as u32;
            for id in m.steps.iter_mut().flatten().flat_map(|s| &mut s.after).filter(|id| id.actor == actor) {
                id.index = if id.index == k {
                    k + 1
                } else if id.index == k + 1 {
                    k
                } else {
                    id.index
                };
            }
        }
        Kind::OneQueue | Kind::DropGate => {}
    }
    m
}

/// Without the step; what followed it follows what it followed.
fn remove_step(s: &mut Schedule, gone: StepId) {
    let removed = s.steps[gone.actor as usize].remove(gone.index as usize);
    let before = gone.index.checked_sub(1).map(|index| StepId { index, ..gone });
    let inherited: Vec<StepId> = removed.after.iter().copied().chain(before).collect();
    for (actor, steps) in s.steps.iter_mut().enumerate() {
        for step in steps {
            if step.after.contains(&gone) {
                step.after.retain(|id| *id != gone);
                step.after.extend(inherited.iter().filter(|id| id.actor != actor as Actor));
            }
            for id in step.after.iter_mut().filter(|id| id.actor == gone.actor && id.index > gone.index) {
                id.index -= 1;
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Rejected,
    Same,
    Commutes,
    Alike,
    Survived,
}

/// The schedule as it was, with what is worked out once for all its mutants.
struct Original<'a> {
    sequence: Sequence<'a>,
    program: Program,
    closure: Closure,
}

impl<'a> Original<'a> {
    fn new(schedule: &'a Schedule, order: FoldOrder) -> Self {
        let sequence = Sequence::repeat(schedule, order, CALLS, BANKS);
        let program = sequence.program().expect("the original is right");
        program.check().expect("the original is right");
        let closure = Closure::of(&program).expect("the original has no cycle");
        Original { sequence, program, closure }
    }
    fn judge(&self, site: Site) -> Verdict {
        let broken = break_at(self.sequence.calls[0].0, site);
        let mut sequence = Sequence::repeat(&broken, self.sequence.calls[0].1, CALLS, BANKS);
        if site.kind == Kind::DropGate {
            sequence.gate = Gate::AllBut(site.actor);
        }
        let Ok(mut mutant) = sequence.program() else { return Verdict::Rejected };
        if site.kind == Kind::OneQueue {
            let other = site.i as u32;
            mutant.nodes.iter_mut().filter(|n| n.actor == other).for_each(|n| n.actor = site.actor);
        }
        if mutant.check().is_err() {
            return Verdict::Rejected;
        }
        self.compare(site, &mutant)
    }
    /// The checker has let it through: was it right?
    fn compare(&self, site: Site, mutant: &Program) -> Verdict {
        let Some(closure) = Closure::of(mutant) else { return Verdict::Survived };
        let n = self.program.nodes.len();
        if mutant.nodes.len() != n {
            return Verdict::Survived;
        }
        let place = |i: usize| match self.program.nodes[i].label {
            Label::Step { step, .. } if site.kind == Kind::MoveStep && step.actor == site.actor => {
                match step.index as usize {
                    k if k == site.step => i + 1,
                    k if k == site.step + 1 => i - 1,
                    _ => i,
                }
            }
            _ => i,
        };
        if (0..n).any(|i| self.program.nodes[i].event != mutant.nodes[place(i)].event) {
            let ordered = |a, b| !conflict(mutant, a, b) || closure.before(a, b) || closure.before(b, a);
            let alike = written(&self.program, &self.closure) == written(mutant, &closure);
            let no_race = || (0..n).all(|b| (0..b).all(|a| ordered(a, b)));
            return if alike && no_race() { Verdict::Alike } else { Verdict::Survived };
        }
        let mut verdict = Verdict::Same;
        for b in 0..n {
            for a in 0..n {
                let (was, is) = (self.closure.before(a, b), closure.before(place(a), place(b)));
                if was == is || (is && site.kind == Kind::OneQueue) {
                    continue;
                }
                if conflict(&self.program, a, b) {
                    return Verdict::Survived;
                }
                verdict = Verdict::Commutes;
            }
        }
        verdict
    }
}

/// Every schedule of 2 to 5 ranks: with blocks that are empty or uneven, with several host workers, and in chunks.
fn each_schedule(form: Form, mut f: impl FnMut(String, &Schedule, FoldOrder)) {
    for n in 2..=5 {
        let n64 = u64::from(n);
        let chunks = Chunking { chunk: 10, distance: 2 };
        let large = if n % 2 == 0 { 16_500 } else { 2 * n64 + 1 };
        for (count, chunking) in [(n64 - 1, Chunking::WHOLE), (large, Chunking::WHOLE), (35, chunks)] {
            for (i, collective) in collectives(n, n / 2, count).into_iter().enumerate() {
                let kinds = in_place(&collective).len();
                // Directly there is one way, in one piece.
                let all = algorithms(&collective);
                let all = if form == Form::Direct { &all[..usize::from(chunking.chunk == 0)] } else { all };
                for &algorithm in all {
                    for &in_place in in_place(&collective) {
                        // Both ways only where it is small.
                        if n > 3 && kinds > 1 && in_place != (i as u64 + count).is_multiple_of(2) {
                            continue;
                        }
                        let shape = shape(collective.clone(), n, count, in_place);
                        if form == Form::Direct && direct(&shape, false).is_none() {
                            continue;
                        }
                        let logical = build(&shape, algorithm, chunking).expect("algorithms() lists it");
                        f(
                            format!("{collective} {algorithm}"),
                            &form.of(&logical),
                            if form == Form::Direct { FoldOrder::Rank } else { promised(algorithm) },
                        );
                    }
                }
            }
        }
    }
}

fn mutate(form: Form) {
    let start = Instant::now();
    let mut table: BTreeMap<(String, Kind), [u32; 5]> = BTreeMap::new();
    let mut survivors = Vec::new();
    each_schedule(form, |name, schedule, order| {
        let original = Original::new(schedule, order);
        let all = sites(schedule, order);
        for kind in KINDS {
            let places: Vec<&Site> = all.iter().filter(|s| s.kind == kind).collect();
            let stride = places.len().div_ceil(SITES).max(1);
            for (k, site) in places.iter().step_by(stride).enumerate() {
                // Within its stride each place has its turn in some schedule.
                let site = places.get(k * stride + (schedule.slots.len() + k) % stride).unwrap_or(site);
                let verdict = original.judge(**site);
                table.entry((name.clone(), kind)).or_default()[verdict as usize] += 1;
                if verdict == Verdict::Survived {
                    survivors.push(format!("{name} {:?} {site:?}", schedule.shape));
                }
            }
        }
    });
    let head = ["tried", "rejected", "same", "commutes", "alike", "survived"];
    println!("{:50}{}", format!("{form:?}"), head.map(|h| format!("{h:>9}")).concat());
    let mut sums: BTreeMap<Kind, [u32; 5]> = BTreeMap::new();
    for ((name, kind), row) in &table {
        print(name, *kind, row);
        sums.entry(*kind).or_default().iter_mut().zip(row).for_each(|(a, b)| *a += b);
    }
    sums.iter().for_each(|(kind, row)| print("in all", *kind, row));
    println!("{form:?} in {:.1?}", start.elapsed());
    assert!(survivors.is_empty(), "{} survived, such as {:#?}", survivors.len(), &survivors[..survivors.len().min(12)]);
    for kind in KINDS {
        let has = match form {
            Form::Direct => {
                use Kind::*;
                !matches!(kind, SwapSource | SwapDestination | SkipAction | WeakenDependency | DropGate)
            }
            Form::CopiedMapped | Form::CopiedUnmapped | Form::Mixed => true,
            _ => kind != Kind::DropCarry,
        };
        assert!(!has || sums.get(&kind).is_some_and(|s| s[0] > 0), "no {kind:?} was rejected");
    }
}

fn print(name: &str, kind: Kind, row: &[u32; 5]) {
    let columns: String = row.iter().map(|n| format!("{n:9}")).collect();
    println!("{name:32}{:18}{:9}{columns}", format!("{kind:?}"), row.iter().sum::<u32>());
}

#[test]
fn logical() {
    mutate(Form::Logical);
}
#[test]
fn copied_mapped() {
    mutate(Form::CopiedMapped);
}
#[test]
fn copied_unmapped() {
    mutate(Form::CopiedUnmapped);
}
#[test]
fn shared() {
    mutate(Form::Shared);
}
#[test]
fn peer() {
    mutate(Form::Peer);
}
#[test]
fn mixed() {
    mutate(Form::Mixed);
}

#[test]
fn directly() {
    mutate(Form::Direct);
}

#[test]
fn held_submissions_may_share_a_queue() {
    each_schedule(Form::Mixed, |name, schedule, order| {
        let program = Sequence::repeat(schedule, order, CALLS, BANKS).program().expect("the original is right");
        let sorted = Order::of(&program).expect("the original has no cycle").sorted;
        let mut place = vec![0; sorted.len()];
        sorted.iter().enumerate().for_each(|(to, from)| place[*from] = to);
        let mut queued = program.clone();
        queued.nodes = sorted.iter().map(|&i| program.nodes[i].clone()).collect();
        for node in &mut queued.nodes {
            node.after.iter_mut().for_each(|a| *a = place[*a]);
            node.actor = if node.actor < schedule.shape.ranks { 0 } else { 1 };
        }
        queued.check().unwrap_or_else(|fault| panic!("{name} {:?}: {fault}", schedule.shape));
    });
}
