//! Schedules that follow each other, as a program.
//!
//! - **Order.** A step follows its actor's step before it and the steps it names. Calls of one actor are in order.
//!   Call k uses bank `k % banks` of the staging, and the first step of a call on each actor follows, on *every* actor,
//!   its last step of call `k - banks` or earlier: the bank gate.
//! - **Callers.** Every call is given the same input and output. A caller has written its input before its rank's
//!   first step; after its rank's last step it reads its output and overwrites both, whatever other ranks do.
//! - **Memory.** A logical slot is a memory of its own in each bank. The others lie at their offset in one arena for
//!   each owner, kind and bank, so that calls share bytes as they do when they run.
use super::{Call, Event, Extent, Fault, FoldOrder, Kind, Label, Memory, MemoryId, Node, Program, Work};
use crate::schedule::{
    Action, Actor, Collective, Home, Place, Region, SLOT_ALIGNMENT, Schedule, Shape, Slot, StepId, UserMemory,
};
use std::collections::HashMap;

/// Whose first step of a call waits for the call that had its bank before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gate {
    /// Every actor's.
    All,
    /// Every actor's but this one's.
    AllBut(Actor),
    /// Nobody's.
    None,
}

/// Calls that follow each other on one communicator.
#[derive(Clone, Debug)]
pub struct Sequence<'a> {
    /// What is called, and what order of folding it promises.
    pub calls: Vec<(&'a Schedule, FoldOrder)>,
    /// Sets of staging, at least 1.
    pub banks: u32,
    /// Who waits for a bank.
    pub gate: Gate,
}

/// Proves `calls` calls of one schedule back to back; contributions may be folded in any order.
pub fn check(schedule: &Schedule, calls: u32, banks: u32) -> Result<(), Fault> {
    Sequence::repeat(schedule, FoldOrder::Any, calls, banks).check()
}

/// Proves one call of each schedule, back to back; contributions may be folded in any order.
pub fn check_sequence(schedules: &[&Schedule], banks: u32) -> Result<(), Fault> {
    let calls = schedules.iter().map(|&s| (s, FoldOrder::Any)).collect();
    Sequence { calls, banks, gate: Gate::All }.check()
}

impl<'a> Sequence<'a> {
    /// One schedule, again and again.
    pub fn repeat(schedule: &'a Schedule, order: FoldOrder, calls: u32, banks: u32) -> Self {
        Sequence { calls: vec![(schedule, order); calls as usize], banks, gate: Gate::All }
    }
    /// The proof, or the first fault found.
    pub fn check(&self) -> Result<(), Fault> {
        self.program()?.check()
    }
    /// The program that runs. An actor's nodes of a call stand together, calls in order.
    pub fn program(&self) -> Result<Program, Fault> {
        let mut seen: Vec<&Schedule> = Vec::new();
        for &(s, _) in &self.calls {
            if !seen.iter().any(|o| std::ptr::eq(*o, s)) {
                permitted(s)?;
                seen.push(s);
            }
        }
        let mut build = Build { program: Program::default(), ids: HashMap::new() };
        // The last step of each actor in the calls up to and with each call.
        let mut lasts: Vec<Vec<Option<usize>>> = Vec::new();
        for (k, &(schedule, order)) in self.calls.iter().enumerate() {
            let gate = k.checked_sub(self.banks as usize).map_or(&[][..], |g| &lasts[g]);
            let gate: Vec<usize> = gate.iter().flatten().copied().collect();
            let mut last = lasts.last().cloned().unwrap_or_default();
            last.resize(last.len().max(schedule.steps.len()), None);
            self.call(&mut build, k, schedule, order, &gate, &mut last);
            lasts.push(last);
        }
        Ok(build.program)
    }

    fn call(
        &self,
        build: &mut Build,
        k: usize,
        schedule: &Schedule,
        order: FoldOrder,
        gate: &[usize],
        last: &mut [Option<usize>],
    ) {
        let shape = &schedule.shape;
        let bank = k as u32 % self.banks;
        let (inputs, outputs): (Vec<_>, Vec<_>) = (0..shape.ranks).map(|r| build.caller(shape, r)).unzip();
        let slots: Vec<Extent> =
            schedule.slots.iter().enumerate().map(|(i, s)| build.slot(i as u32, s, bank)).collect();
        let mut next = build.program.nodes.len();
        let first: Vec<usize> = (schedule.steps.iter().enumerate())
            .map(|(actor, steps)| {
                let caller = actor < shape.ranks as usize;
                let first = next + caller as usize;
                next = first + steps.len() + caller as usize;
                first
            })
            .collect();
        let place = |r: &Region| {
            let whole = match r.place {
                Place::Input(rank) => &inputs[rank as usize],
                Place::Output(rank) => &outputs[rank as usize],
                Place::Slot(slot) => &slots[slot as usize],
            };
            Extent { memory: whole.memory, start: whole.start + r.start, len: r.len }
        };
        for (actor, steps) in schedule.steps.iter().enumerate() {
            let actor = actor as Actor;
            let caller = |event| Node { actor, label: Label::Text(String::new()), after: Vec::new(), event };
            if actor < shape.ranks {
                build.program.nodes.push(caller(Event::Begin { call: k, rank: actor }));
            }
            for (i, step) in steps.iter().enumerate() {
                let mut after: Vec<usize> =
                    step.after.iter().map(|s| first[s.actor as usize] + s.index as usize).collect();
                let gated = self.gate == Gate::All || matches!(self.gate, Gate::AllBut(a) if a != actor);
                if i == 0 && gated {
                    after.extend(gate);
                }
                let event = Event::Work(step.actions.iter().map(|a| work(a, place)).collect());
                let label = Label::Step { call: k, step: StepId { actor, index: i as u32 } };
                last[actor as usize] = Some(build.program.nodes.len());
                build.program.nodes.push(Node { actor, label, after, event });
            }
            if actor < shape.ranks {
                build.program.nodes.push(caller(Event::End { call: k, rank: actor }));
            }
        }
        let one = |e: Vec<Extent>| e.into_iter().map(|e| vec![e]).collect();
        build.program.calls.push(Call {
            shape: shape.clone(),
            unit: 1,
            order,
            inputs: one(inputs),
            outputs: one(outputs),
        });
    }
}

fn work(action: &Action, place: impl Fn(&Region) -> Extent) -> Work {
    let list = |r: &[Region]| r.iter().map(&place).collect();
    let kind = match action {
        Action::Copy { .. } => Kind::Copy,
        Action::Reduce { finish: true, .. } => Kind::Finish,
        Action::Reduce { finish: false, .. } => Kind::Fold,
    };
    Work { kind, group: 0, srcs: list(action.sources()), dsts: list(action.destinations()) }
}

#[derive(PartialEq, Eq, Hash)]
enum Key {
    User(UserMemory),
    Slot { index: u32, bank: u32 },
    Arena { owner: Actor, home: Home, bank: u32 },
}

struct Build {
    program: Program,
    ids: HashMap<Key, MemoryId>,
}

impl Build {
    /// `len` units from `start` of a memory, which becomes long enough.
    fn extent(&mut self, key: Key, start: u64, len: u64, name: impl FnOnce() -> String) -> Extent {
        let memories = &mut self.program.memories;
        let memory = *self.ids.entry(key).or_insert_with(|| {
            memories.push(Memory { name: name(), len: 0 });
            MemoryId(memories.len() as u32 - 1)
        });
        let room = &mut memories[memory.0 as usize].len;
        *room = (*room).max(start + len);
        Extent { memory, start, len }
    }
    fn slot(&mut self, index: u32, slot: &Slot, bank: u32) -> Extent {
        let Slot { owner, home, len, offset } = *slot;
        match home {
            Home::Outbox | Home::Worker => {
                self.extent(Key::Slot { index, bank }, 0, len, || format!("slot {index} in bank {bank}"))
            }
            _ => {
                let name = || format!("the {home:?} staging of actor {owner} in bank {bank}");
                self.extent(Key::Arena { owner, home, bank }, offset, len, name)
            }
        }
    }
    fn caller(&mut self, shape: &Shape, rank: u32) -> (Extent, Extent) {
        let mut whole = |place, len, name: &str| {
            let (memory, start) = shape.physical(Region::new(place, 0, len)).expect("a caller's place has memory");
            self.extent(Key::User(memory), start, len, || format!("the {name} of rank {rank}"))
        };
        let input = whole(Place::Input(rank), shape.input_len(rank), "input");
        (input, whole(Place::Output(rank), shape.output_len(rank), "output"))
    }
}

/// What each actor may do with each kind of memory, and that every region lies within its place.
fn permitted(schedule: &Schedule) -> Result<(), Fault> {
    let ranks = schedule.shape.ranks;
    let malformed = |what: String| Err(Fault::Malformed { what });
    if schedule.steps.len() < ranks as usize {
        return malformed(format!("{ranks} ranks, but only {} have steps", schedule.steps.len()));
    }
    arenas(schedule)?;
    for (actor, steps) in schedule.steps.iter().enumerate() {
        let actor = actor as Actor;
        for (index, step) in steps.iter().enumerate() {
            let who = || format!("step {index} of actor {actor}");
            let known = |s: &StepId| schedule.steps.get(s.actor as usize).is_some_and(|l| (s.index as usize) < l.len());
            if let Some(s) = step.after.iter().find(|s| !known(s)) {
                return malformed(format!(
                    "{} follows step {} of actor {}, which is not there",
                    who(),
                    s.index,
                    s.actor
                ));
            }
            // A barrier's steps order, and so do those of ranks whose memory host workers touch.
            let orders = schedule.shape.collective == Collective::Barrier || schedule.is_direct();
            if step.actions.is_empty() && !orders {
                return malformed(format!("{} does nothing", who()));
            }
            for action in &step.actions {
                let fold = matches!(action, Action::Reduce { .. });
                let reads = action.sources().iter().map(|r| (r, false));
                for (region, write) in reads.chain(action.destinations().iter().map(|r| (r, true))) {
                    let name = || format!("{:?}", region.place);
                    let limit = limit(schedule, region.place);
                    if region.start.checked_add(region.len).is_none_or(|end| end > limit) {
                        let (start, len) = (region.start, region.len);
                        return Err(Fault::OutOfBounds { who: who(), memory: name(), start, len, limit });
                    }
                    if let Some(what) = forbidden(schedule, actor, region.place, write, fold) {
                        return Err(Fault::Forbidden { who: who(), memory: name(), what });
                    }
                }
            }
        }
    }
    Ok(())
}

fn limit(schedule: &Schedule, place: Place) -> u64 {
    match place {
        Place::Slot(i) => schedule.slots.get(i as usize).map_or(0, |s| s.len),
        Place::Input(r) if r < schedule.shape.ranks => schedule.shape.input_len(r),
        Place::Output(r) if r < schedule.shape.ranks => schedule.shape.output_len(r),
        Place::Input(_) | Place::Output(_) => 0,
    }
}

/// Why `actor` may not read or write a place. A host worker's fold is no kernel: it is the host that runs it.
fn forbidden(schedule: &Schedule, actor: Actor, place: Place, write: bool, fold: bool) -> Option<&'static str> {
    let worker = actor >= schedule.shape.ranks;
    let kernel = fold && !worker;
    let slot = match place {
        Place::Input(_) | Place::Output(_) if schedule.is_direct() => {
            return (!worker).then_some("is for host workers alone in this schedule");
        }
        Place::Input(r) | Place::Output(r) => return (r != actor).then_some("is another rank's"),
        Place::Slot(i) => &schedule.slots[i as usize],
    };
    let mine = slot.owner == actor;
    let (fine, why) = match slot.home {
        Home::Outbox => (mine || !write, "is written by its owner alone"),
        Home::Worker => (worker || !write, "is written by host workers alone"),
        Home::Device => (mine, "is touched by its owner alone"),
        Home::Upload if write => (worker, "is written by host workers alone"),
        Home::Upload => (mine && !kernel, "is read by its owner's copies alone"),
        Home::Download if write => (mine && !kernel, "is written by its owner's copies alone"),
        Home::Download => (worker, "is read by host workers alone"),
        Home::Mapped => (mine || worker, "is touched by its owner and by host workers alone"),
        Home::Shared => (true, ""),
        Home::Inbox if write => (!worker && !fold, "is written by ranks' copies alone"),
        Home::Inbox => (mine, "is read by its owner alone"),
    };
    (!fine).then_some(why)
}

/// Slots of one arena do not overlap, and start at multiples of [`SLOT_ALIGNMENT`].
fn arenas(schedule: &Schedule) -> Result<(), Fault> {
    let lowered = |s: &&Slot| !matches!(s.home, Home::Outbox | Home::Worker) && s.len > 0;
    let mut slots: Vec<&Slot> = schedule.slots.iter().filter(lowered).collect();
    slots.sort_unstable_by_key(|s| (s.owner, s.home, s.offset));
    let malformed = |what: &str, s: &Slot| {
        let what = format!("the slot at {} of actor {}'s {:?} staging {what}", s.offset, s.owner, s.home);
        Err(Fault::Malformed { what })
    };
    for (i, s) in slots.iter().enumerate() {
        if s.offset % SLOT_ALIGNMENT != 0 {
            return malformed("is not aligned", s);
        }
        if slots.get(i + 1).is_some_and(|t| (t.owner, t.home) == (s.owner, s.home) && t.offset < s.offset + s.len) {
            return malformed("overlaps the next", s);
        }
    }
    Ok(())
}
