//! Faults planted by hand, each seen by its name.
use super::*;
use crate::schedule::{Action, Collective, Home, Place, Region, Schedule, Slot, Step};

fn region(place: Place, start: u64, len: u64) -> Region {
    Region::new(place, start, len)
}
fn copy(src: Region, dst: Region) -> Action {
    Action::Copy { src, dsts: vec![dst] }
}
fn step(after: &[(u32, u32)], actions: Vec<Action>) -> Step {
    Step { after: after.iter().map(|&(actor, index)| StepId { actor, index }).collect(), actions }
}
fn outbox(owner: u32, len: u64) -> Slot {
    Slot { owner, home: Home::Outbox, len, offset: 0 }
}
fn shape(collective: Collective, ranks: u32, count: u64) -> Shape {
    Shape { collective, ranks, count, in_place: false }
}

/// Each publishes four elements, each folds all.
fn all_reduce(ranks: u32) -> Schedule {
    let steps = (0..ranks).map(|r| {
        let others: Vec<_> = (0..ranks).filter(|&p| p != r).map(|p| (p, 0)).collect();
        let srcs = (0..ranks).map(|p| region(if p == r { Place::Input(r) } else { Place::Slot(p) }, 0, 4)).collect();
        let dsts = vec![region(Place::Output(r), 0, 4)];
        vec![
            step(&[], vec![copy(region(Place::Input(r), 0, 4), region(Place::Slot(r), 0, 4))]),
            step(&others, vec![Action::Reduce { srcs, dsts, finish: true }]),
        ]
    });
    Schedule {
        shape: shape(Collective::AllReduce, ranks, 4),
        slots: (0..ranks).map(|r| outbox(r, 4)).collect(),
        steps: steps.collect(),
    }
}
/// The root publishes and copies its own; the others read.
fn broadcast(ranks: u32) -> Schedule {
    let input = region(Place::Input(0), 0, 4);
    let root = vec![
        step(&[], vec![copy(input, region(Place::Slot(0), 0, 4))]),
        step(&[], vec![copy(input, region(Place::Output(0), 0, 4))]),
    ];
    let read = |r| vec![step(&[(0, 0)], vec![copy(region(Place::Slot(0), 0, 4), region(Place::Output(r), 0, 4))])];
    Schedule {
        shape: shape(Collective::Broadcast { root: 0 }, ranks, 4),
        slots: vec![outbox(0, 4)],
        steps: std::iter::once(root).chain((1..ranks).map(read)).collect(),
    }
}
fn in_rank_order(schedule: &Schedule) -> Result<(), Fault> {
    Sequence::repeat(schedule, FoldOrder::Rank, 4, 2).check()
}
fn fold(s: &mut Schedule, rank: usize) -> (&mut Vec<Region>, &mut bool) {
    match &mut s.steps[rank][1].actions[0] {
        Action::Reduce { srcs, finish, .. } => (srcs, finish),
        Action::Copy { .. } => panic!("the second step folds"),
    }
}
fn wrong(schedule: &Schedule) -> Wrong {
    match in_rank_order(schedule) {
        Err(Fault::Result { wrong, .. }) => wrong,
        other => panic!("{other:?}"),
    }
}

#[test]
fn right_ones_are_proven() {
    for ranks in 1..=5 {
        for banks in 1..=3 {
            Sequence::repeat(&all_reduce(ranks), FoldOrder::Rank, 5, banks).check().unwrap();
            check(&broadcast(ranks), 5, banks).unwrap();
            check_sequence(&[&broadcast(ranks), &all_reduce(ranks), &broadcast(ranks)], banks).unwrap();
        }
    }
}

#[test]
fn a_flat_broadcast_needs_the_bank_gate() {
    let s = broadcast(3);
    for banks in 1..=4 {
        let mut q = Sequence::repeat(&s, FoldOrder::Any, 6, banks);
        q.check().unwrap();
        q.gate = Gate::None;
        let fault = q.check().unwrap_err();
        assert!(matches!(&fault, Fault::Race { memory, .. } if memory.starts_with("slot 0")), "{fault}");
        q.gate = Gate::AllBut(0); // the one that publishes
        assert!(matches!(q.check(), Err(Fault::Race { .. })));
        q.gate = Gate::AllBut(1); // a reader follows the root, which has waited
        q.check().unwrap();
    }
}

#[test]
fn a_missing_dependency_is_a_race() {
    let mut s = all_reduce(3);
    s.steps[1][1].after.pop();
    let fault = in_rank_order(&s).unwrap_err();
    assert_eq!(
        fault.to_string(),
        "race: step 1 of actor 1 in call 0 and step 0 of actor 2 in call 0 touch 0..4 of slot 2 in bank 0, and \
         nothing orders them"
    );
}

#[test]
fn work_of_one_step_races_with_itself() {
    let mut s = broadcast(2);
    let moved = s.steps[1][0].actions[0].clone();
    s.steps[1][0].actions.push(moved);
    assert!(matches!(in_rank_order(&s), Err(Fault::Race { .. })));
    // A copy onto itself, and a fold into half of its source.
    let mut s = all_reduce(2);
    s.steps[0][0].actions[0] = copy(region(Place::Slot(0), 0, 4), region(Place::Slot(0), 0, 4));
    assert!(matches!(in_rank_order(&s), Err(Fault::Race { .. })));
    let mut s = all_reduce(2);
    let (srcs, _) = fold(&mut s, 0);
    *srcs = vec![region(Place::Input(0), 0, 3), region(Place::Output(0), 0, 3)];
    let Action::Reduce { dsts, .. } = &mut s.steps[0][1].actions[0] else { panic!() };
    *dsts = vec![region(Place::Output(0), 1, 3)];
    assert!(matches!(in_rank_order(&s), Err(Fault::Race { .. })));
}

#[test]
fn waiting_for_each_other_is_a_deadlock() {
    let mut s = all_reduce(2);
    s.steps[0][0].after.push(StepId { actor: 1, index: 1 });
    let Err(Fault::Deadlock { cycle }) = in_rank_order(&s) else { panic!() };
    assert!(cycle.iter().any(|n| n == "step 0 of actor 0 in call 0"), "{cycle:?}");
    // Two ranks whose steps are queued one rank after the other: the first waits for what stands behind it.
    let s = all_reduce(2);
    let mut program = Sequence::repeat(&s, FoldOrder::Rank, 1, 1).program().unwrap();
    program.nodes.iter_mut().for_each(|n| n.actor = 0);
    assert!(matches!(program.check(), Err(Fault::Deadlock { .. })));
}

#[test]
fn contributions_are_counted_and_ordered() {
    let mut s = all_reduce(3);
    fold(&mut s, 2).0.remove(1);
    assert_eq!(wrong(&s), Wrong::Missing { rank: 1 });
    let mut s = all_reduce(3);
    fold(&mut s, 2).0[1] = region(Place::Slot(0), 0, 4);
    assert_eq!(wrong(&s), Wrong::Repeated { rank: 0 });
    let mut s = all_reduce(3);
    fold(&mut s, 2).0.push(region(Place::Slot(1), 0, 4));
    assert_eq!(wrong(&s), Wrong::Repeated { rank: 1 });
    let mut s = all_reduce(3);
    fold(&mut s, 1).0.swap(0, 2);
    assert_eq!(wrong(&s), Wrong::Order);
    let Err(Fault::Differs { rank: 1, .. }) = check(&s, 2, 1) else { panic!("another order on rank 1") };
    (0..3).for_each(|r| {
        fold(&mut s, r).0.sort_by_key(|r| {
            std::cmp::Reverse(match r.place {
                Place::Input(r) | Place::Output(r) | Place::Slot(r) => r,
            })
        })
    });
    check(&s, 2, 1).unwrap();
    assert_eq!(wrong(&s), Wrong::Order);
}

#[test]
fn a_chain_of_folds_is_one_fold_from_the_left_only() {
    for (left, good) in [(true, true), (false, false)] {
        let mut s = all_reduce(3);
        let tmp = s.slots.len() as u32;
        s.slots.push(outbox(0, 4));
        let (at, input) = (region(Place::Slot(tmp), 0, 4), region(Place::Input(0), 0, 4));
        let (x1, x2) = (region(Place::Slot(1), 0, 4), region(Place::Slot(2), 0, 4));
        let (inner, outer) = if left { (vec![input, x1], vec![at, x2]) } else { (vec![x1, x2], vec![input, at]) };
        s.steps[0][1].actions = vec![Action::Reduce { srcs: inner, dsts: vec![at], finish: false }];
        let dsts = vec![region(Place::Output(0), 0, 4)];
        s.steps[0].push(step(&[], vec![Action::Reduce { srcs: outer, dsts, finish: true }]));
        assert_eq!(in_rank_order(&s).is_ok(), good);
        assert_eq!(check(&s, 3, 1).is_ok(), good, "rank 0 alone has the other order");
    }
}

#[test]
fn a_reduction_is_finished_once_and_last() {
    let mut s = all_reduce(2);
    *fold(&mut s, 0).1 = false;
    assert_eq!(wrong(&s), Wrong::Unfinished);
    let mut s = all_reduce(2);
    let out = region(Place::Output(1), 0, 4);
    s.steps[1].push(step(&[], vec![Action::Reduce { srcs: vec![out], dsts: vec![out], finish: true }]));
    assert_eq!(wrong(&s), Wrong::Finished);
    let mut s = broadcast(2);
    let (src, out) = (region(Place::Slot(0), 0, 4), region(Place::Output(1), 0, 4));
    s.steps[1][0].actions = vec![Action::Reduce { srcs: vec![src], dsts: vec![out], finish: true }];
    assert_eq!(wrong(&s), Wrong::Finished);
}

#[test]
fn elements_are_told_apart() {
    // The middle elements change places.
    let mut s = broadcast(2);
    let (slot, out) = (Place::Slot(0), Place::Output(1));
    let pieces = [(0, 0), (1, 2), (2, 1), (3, 3)];
    s.steps[1][0].actions = pieces.map(|(a, b)| copy(region(slot, a, 1), region(out, b, 1))).to_vec();
    assert_eq!(wrong(&s), Wrong::Element { rank: 0, got: 2, want: 1 });
    // A part of the output that nobody writes.
    let mut s = broadcast(2);
    s.steps[1][0].actions = vec![copy(region(slot, 0, 3), region(out, 0, 3))];
    assert_eq!(wrong(&s), Wrong::Undefined);
    let Err(Fault::Result { rank: 1, at: 3, .. }) = check(&s, 1, 1) else { panic!() };
}

#[test]
fn a_stale_value_names_its_call() {
    let fresh = broadcast(2);
    let mut stale = broadcast(2);
    stale.steps[0].remove(0); // publishes nothing: readers get what the call before published
    stale.steps[1][0].after.clear();
    let Err(Fault::Result { call: 1, rank: 1, wrong, .. }) = check_sequence(&[&fresh, &stale], 1) else { panic!() };
    assert_eq!(wrong, Wrong::Stale { rank: 0, call: 0 });
}

#[test]
fn reading_what_nobody_wrote() {
    let mut s = all_reduce(2);
    s.steps[1].remove(0);
    s.steps[0][1].after = vec![StepId { actor: 1, index: 0 }];
    let fault = in_rank_order(&s).unwrap_err();
    assert_eq!(fault.to_string(), "step 1 of actor 0 in call 0 reads slot 1 in bank 0 at 0, which nobody wrote");
}

#[test]
fn a_caller_overwrites_its_input_when_its_own_rank_is_done() {
    // Rank 1 reads rank 0's input where it lies: right until rank 0's caller goes on.
    let s = broadcast(2);
    let mut program = Sequence::repeat(&s, FoldOrder::Rank, 1, 1).program().unwrap();
    let input = program.calls[0].inputs[0][0];
    let publish = program.nodes.iter().position(|n| matches!(n.event, Event::Work(_))).unwrap();
    let reader = program.nodes.iter_mut().find(|n| n.after == [publish]).unwrap();
    let Event::Work(work) = &mut reader.event else { panic!("it copies") };
    work[0].srcs[0] = input;
    let fault = program.check().unwrap_err().to_string();
    assert!(fault.contains("the caller of rank 0 after call 0 and step 0 of actor 1 in call 0"), "{fault}");
    // With rank 0's caller behind it, it is right.
    let reader = program.nodes.iter().position(|n| n.after == [publish]).unwrap();
    let end = program.nodes.iter().position(|n| n.event == Event::End { call: 0, rank: 0 }).unwrap();
    program.nodes[end].after.push(reader);
    program.check().unwrap();
}

#[test]
fn memory_has_bounds_and_owners() {
    let mut s = all_reduce(2);
    s.steps[0][0].actions[0] = copy(region(Place::Input(0), 2, 4), region(Place::Slot(0), 0, 4));
    assert!(matches!(in_rank_order(&s), Err(Fault::OutOfBounds { limit: 4, .. })));
    let mut s = all_reduce(2);
    s.steps[0][0].actions[0] = copy(region(Place::Input(1), 0, 4), region(Place::Slot(0), 0, 4));
    assert!(matches!(in_rank_order(&s), Err(Fault::Forbidden { what: "is another rank's", .. })));
    for (home, kernel_reads) in
        [(Home::Device, true), (Home::Upload, false), (Home::Download, false), (Home::Inbox, true)]
    {
        let mut s = all_reduce(2);
        s.slots[0].home = home;
        assert!(matches!(in_rank_order(&s), Err(Fault::Forbidden { .. })), "rank 1 reads rank 0's {home:?}");
        let mut s = all_reduce(1);
        s.slots[0].home = home;
        s.steps[0].remove(0);
        let Action::Reduce { srcs, .. } = &mut s.steps[0][0].actions[0] else { panic!() };
        srcs[0].place = Place::Slot(0);
        assert_eq!(matches!(in_rank_order(&s), Err(Fault::Undefined { .. })), kernel_reads, "{home:?}");
    }
    let mut s = all_reduce(2);
    s.slots.iter_mut().for_each(|s| (s.home, s.owner) = (Home::Shared, 0));
    assert!(matches!(in_rank_order(&s), Err(Fault::Malformed { .. })), "two slots at one offset");
    s.slots[1].offset = crate::schedule::SLOT_ALIGNMENT;
    in_rank_order(&s).unwrap();
    s.slots[1].offset += 4;
    assert!(matches!(in_rank_order(&s), Err(Fault::Malformed { .. })), "not aligned");
}

#[test]
fn a_barrier_holds_everybody() {
    let mut s = Schedule { shape: shape(Collective::Barrier, 3, 0), slots: vec![], steps: vec![] };
    let others = |r| (0..3).filter(|&p| p != r).map(|p| (p, 0)).collect::<Vec<_>>();
    s.steps = (0..3).map(|r| vec![step(&[], vec![]), step(&others(r), vec![])]).collect();
    check(&s, 3, 1).unwrap();
    s.steps[1][1].after.pop();
    assert_eq!(check(&s, 3, 1), Err(Fault::Barrier { call: 0, rank: 1, missing: 2 }));
}

#[test]
fn a_trace_may_lie_in_pieces_and_run_in_groups() {
    let memory = |len| Memory { name: "a buffer".into(), len };
    let extent = |m, start, len| Extent { memory: MemoryId(m), start, len };
    let moved = |group, from, to| Work { kind: Kind::Copy, group, srcs: vec![from], dsts: vec![to] };
    let node = |event| Node { actor: 0, label: Label::Text("a submission".into()), after: vec![], event };
    let build = |groups: [u32; 4]| Program {
        neutral: Vec::new(),
        memories: vec![memory(64), memory(64)],
        calls: vec![Call {
            shape: shape(Collective::AllGather, 1, 6),
            unit: 4,
            order: FoldOrder::Rank,
            inputs: vec![vec![extent(0, 40, 16), extent(0, 0, 8)]],
            outputs: vec![vec![extent(1, 8, 24)]],
        }],
        nodes: vec![
            node(Event::Begin { call: 0, rank: 0 }),
            node(Event::Work(vec![
                moved(groups[0], extent(0, 40, 16), extent(1, 40, 16)),
                moved(groups[1], extent(1, 40, 16), extent(1, 8, 16)),
                moved(groups[2], extent(0, 0, 8), extent(1, 40, 8)),
                moved(groups[3], extent(1, 40, 8), extent(1, 24, 8)),
            ])),
            node(Event::End { call: 0, rank: 0 }),
        ],
    };
    build([0, 1, 2, 3]).check().unwrap();
    let race = build([0, 1, 1, 2]).check().unwrap_err();
    assert!(race.to_string().starts_with("race: a submission and a submission touch 40..48 of a buffer"), "{race}");
    assert!(build([2, 3, 0, 1]).check().is_ok());
    let mut cut = build([0, 1, 2, 3]);
    cut.calls[0].outputs[0][0].len = 20;
    assert!(matches!(cut.check(), Err(Fault::Malformed { .. })));
    cut.nodes.pop();
    assert!(matches!(cut.check(), Err(Fault::Malformed { .. })), "no end");
}
