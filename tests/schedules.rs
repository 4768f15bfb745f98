//! Every schedule is proven: all collectives, algorithms, numbers of ranks, counts, lowerings and numbers of banks, and
//! every pair of collectives that follow each other. Simulation then shows the same on numbers.
mod forms;

use allhands::schedule::{
    Action, Chunking, Collective, Place, Region, Schedule, algorithms, build, build_narrow,
    check::{Fault, FoldOrder, Gate, Sequence},
    direct,
    simulate::{Op, simulate},
};
use forms::{Form, collectives, in_place, messages, promised, shape};
use std::time::Instant;

const WHOLE: Chunking = Chunking::WHOLE;
const LONG: u64 = 101;
/// Enough for several host workers, and for blocks with borders at multiples of 64.
const LARGE: u64 = 20_011;

/// What is left out, and why nothing is lost:
/// - More than two banks only up to 5 ranks: a bank gate names every actor alike, so more ranks show nothing that
///   five do not, and more banks only loosen it.
/// - Roots in the middle and at the end only up to 8 ranks, then one in the middle: ranks are numbered from the root.
/// - Chunks at distance 1 and 3 only up to 5 ranks: the number of ranks does not enter the pipeline.
fn prove(name: &str, make: impl Fn(u32, u64, u32) -> Vec<Collective>) {
    let (start, mut proven, mut schedules) = (Instant::now(), 0, 0);
    for n in 1..=17 {
        for (count, chunking) in sizes(n) {
            for root in roots(n) {
                for collective in make(n, count, root) {
                    for shape in in_place(&collective).iter().map(|p| shape(collective.clone(), n, count, *p)) {
                        for schedule in [false, true].into_iter().filter_map(|narrow| direct(&shape, narrow)) {
                            schedules += 1;
                            if let Err(fault) = Sequence::repeat(&schedule, FoldOrder::Rank, 3, 1).check() {
                                panic!("{shape:?} directly: {fault}");
                            }
                            proven += 1;
                        }
                    }
                    for (&algorithm, &in_place) in product(algorithms(&collective), in_place(&collective)) {
                        let shape = shape(collective.clone(), n, count, in_place);
                        let logical = build(&shape, algorithm, chunking).expect("algorithms() lists it");
                        let narrow = build_narrow(&shape, algorithm, chunking).expect("algorithms() lists it");
                        let all = Form::ALL.into_iter().map(|form| (form, &logical));
                        let mut seen = Vec::new();
                        for (form, logical) in all.chain([(Form::Narrow, &narrow)]) {
                            let schedule = form.of(logical);
                            assert!(form != Form::Narrow || converts(&schedule), "{shape:?} {algorithm}");
                            schedules += 1;
                            // Small ones are the same in several forms; what only moves has no kernels to be staged.
                            if seen.contains(&schedule) {
                                continue;
                            }
                            for banks in 1..=if n <= 5 { 4 } else { 2 } {
                                let calls = banks + 2;
                                let order = promised(algorithm);
                                if let Err(fault) = Sequence::repeat(&schedule, order, calls, banks).check() {
                                    panic!("{shape:?} {algorithm} {chunking:?} {form:?}, {banks} banks: {fault}");
                                }
                                proven += 1;
                            }
                            seen.push(schedule);
                        }
                    }
                }
            }
        }
    }
    println!("{name}: {proven} sequences of {schedules} schedules proven in {:.1?}", start.elapsed());
}

/// Whether no copy touches the caller's memory, so that what is narrow in staging is wide there.
fn converts(schedule: &Schedule) -> bool {
    let actions = || schedule.steps.iter().flatten().flat_map(|s| &s.actions);
    let wide = |r: &Region| !matches!(r.place, Place::Slot(_));
    let copies = actions().filter(|a| matches!(a, Action::Copy { .. }));
    !copies.flat_map(|a| a.sources().iter().chain(a.destinations())).any(wide)
}

fn sizes(n: u32) -> Vec<(u64, Chunking)> {
    let n64 = u64::from(n);
    let mut counts = vec![0, 1, n64 - 1, n64, n64 + 1, LONG];
    counts.sort_unstable();
    counts.dedup();
    let mut sizes: Vec<_> = counts.into_iter().chain([LARGE]).map(|c| (c, WHOLE)).collect();
    // Eight chunks each, the last shorter; in chunks of 13, most blocks of many ranks are empty or of one element.
    sizes.push((LONG, Chunking { chunk: 13, distance: 2 }));
    let distances = if n <= 5 { 1..=3 } else { 2..=2 };
    sizes.extend(distances.map(|distance| (LARGE, Chunking { chunk: 2_560, distance })));
    sizes
}

fn roots(n: u32) -> Vec<u32> {
    let mut roots = if n <= 8 { vec![0, n / 2, n - 1] } else { vec![n / 2] };
    roots.dedup();
    roots
}

fn product<'a, A, B>(a: &'a [A], b: &'a [B]) -> impl Iterator<Item = (&'a A, &'a B)> {
    a.iter().flat_map(move |a| b.iter().map(move |b| (a, b)))
}

/// Of a collective without a root: only once, whatever the roots.
fn rootless(collective: Collective) -> impl Fn(u32, u64, u32) -> Vec<Collective> {
    move |n, _, root| if root == roots(n)[0] { vec![collective.clone()] } else { vec![] }
}

#[test]
fn all_reduce() {
    prove("all_reduce", rootless(Collective::AllReduce));
}
#[test]
fn reduce_scatter() {
    prove("reduce_scatter", rootless(Collective::ReduceScatter));
}
#[test]
fn all_gather() {
    prove("all_gather", rootless(Collective::AllGather));
}
#[test]
fn broadcast() {
    prove("broadcast", |_, _, root| vec![Collective::Broadcast { root }]);
}
#[test]
fn reduce() {
    prove("reduce", |_, _, root| vec![Collective::Reduce { root }]);
}
#[test]
fn gather() {
    prove("gather", |_, _, root| vec![Collective::Gather { root }]);
}
#[test]
fn scatter() {
    prove("scatter", |_, _, root| vec![Collective::Scatter { root }]);
}
#[test]
fn all_to_all() {
    prove("all_to_all", rootless(Collective::AllToAll));
}
#[test]
fn send_recv() {
    prove("send_recv", |n, count, root| {
        let lists = if root == roots(n)[0] { messages(n, count) } else { vec![] };
        lists.into_iter().map(Collective::SendRecv).collect()
    });
}
#[test]
fn barrier() {
    prove("barrier", rootless(Collective::Barrier));
}

/// Every collective and algorithm, lowered alike, in place or not as it falls; beside the logical ones, all directly.
fn all_schedules(n: u32, count: u64, form: Form) -> Vec<(Schedule, FoldOrder)> {
    let mut out = Vec::new();
    for (i, collective) in collectives(n, n / 2, count).into_iter().enumerate() {
        for (j, &algorithm) in algorithms(&collective).iter().enumerate() {
            let in_place = (i + j) % 2 == 1 && in_place(&collective).len() > 1;
            let chunk = if count == LONG { 26 } else { 0 };
            let shape = shape(collective.clone(), n, count, in_place);
            let logical = build(&shape, algorithm, Chunking { chunk, distance: 2 }).expect("algorithms() lists it");
            out.push((form.of(&logical), promised(algorithm)));
        }
        let here = i % 2 == 1 && in_place(&collective).len() > 1;
        let shape = shape(collective, n, count, here);
        let direct = if form == Form::Logical { direct(&shape, false) } else { None };
        out.extend(direct.map(|schedule| (schedule, FoldOrder::Rank)));
    }
    out
}

#[test]
fn any_collective_may_follow_any_other() {
    let (start, mut proven) = (Instant::now(), 0);
    for n in [2, 3, 5] {
        for count in [0, u64::from(n) + 1, LONG] {
            for form in Form::ALL {
                let all = all_schedules(n, count, form);
                for ((a, x), (b, y)) in product(&all, &all) {
                    for banks in 1..=2 {
                        let calls = vec![(a, *x), (b, *y), (a, *x), (b, *y)];
                        if let Err(fault) = (Sequence { calls, banks, gate: Gate::All }).check() {
                            let names = (&a.shape, &b.shape);
                            panic!("{names:?} {form:?}, {banks} banks: {fault}");
                        }
                        proven += 1;
                    }
                }
            }
        }
    }
    println!("pairs: {proven} sequences proven in {:.1?}", start.elapsed());
}

/// A broadcast has no flow back to its root: without the gate the root overwrites what others have not read yet.
#[test]
fn banks_need_their_gate() {
    for form in Form::ALL {
        for &algorithm in algorithms(&Collective::Broadcast { root: 0 }) {
            let shape = shape(Collective::Broadcast { root: 0 }, 3, LONG, false);
            let schedule = form.of(&build(&shape, algorithm, WHOLE).expect("algorithms() lists it"));
            for banks in 1..=4 {
                let mut sequence = Sequence::repeat(&schedule, FoldOrder::Rank, banks + 2, banks);
                sequence.check().expect("it is right with the gate");
                sequence.gate = Gate::None;
                let fault = sequence.check();
                assert!(matches!(fault, Err(Fault::Race { .. })), "{algorithm} {form:?}, {banks} banks: {fault:?}");
            }
        }
    }
}

/// The outputs by the definition of the collective.
fn defined(schedule: &Schedule, inputs: &[Vec<i64>], op: Op) -> Vec<Vec<i64>> {
    let (n, count) = (schedule.shape.ranks as usize, schedule.shape.count as usize);
    let block = |rank: usize, b: usize| inputs[rank][b * count..(b + 1) * count].to_vec();
    let reduced = |from: usize| -> Vec<i64> {
        let element = |i| (0..n).map(|r| inputs[r][from + i]).reduce(op.fold).map(op.finish).expect("a rank");
        (0..count).map(element).collect()
    };
    let gathered = || (0..n).flat_map(|r| block(r, 0)).collect::<Vec<_>>();
    let only = |root: u32, r: usize, value: Vec<i64>| if r == root as usize { value } else { Vec::new() };
    let output = |r: usize| match &schedule.shape.collective {
        Collective::AllReduce => reduced(0),
        Collective::ReduceScatter => reduced(r * count),
        Collective::AllGather => gathered(),
        Collective::Broadcast { root } => block(*root as usize, 0),
        Collective::Reduce { root } => only(*root, r, reduced(0)),
        Collective::Gather { root } => only(*root, r, gathered()),
        Collective::Scatter { root } => block(*root as usize, r),
        Collective::AllToAll => (0..n).flat_map(|s| block(s, r)).collect(),
        Collective::Barrier => Vec::new(),
        Collective::SendRecv(list) => {
            let mut sent: Vec<&[i64]> = inputs.iter().map(Vec::as_slice).collect();
            let mut received = Vec::new();
            for t in list.iter() {
                let (message, rest) = sent[t.from as usize].split_at(t.count as usize);
                sent[t.from as usize] = rest;
                if t.to as usize == r {
                    received.extend_from_slice(message);
                }
            }
            received
        }
    };
    (0..n).map(output).collect()
}

#[test]
fn simulation_gives_what_the_definition_says() {
    // Where the order is promised, an operation that shows it.
    let ordered = Op { fold: |a, b| a.wrapping_mul(3).wrapping_add(b), finish: |a| a ^ 0x5a5a };
    let any = Op { fold: |a, b| a.wrapping_add(b), finish: |a| a ^ 0x5a5a };
    let (start, mut runs) = (Instant::now(), 0);
    for n in 1..=7 {
        for count in [0, 1, u64::from(n) + 1, LONG] {
            for form in Form::ALL {
                for (schedule, order) in all_schedules(n, count, form) {
                    let op = if order == FoldOrder::Rank { ordered } else { any };
                    for (seed, banks) in [(1, 1), (2, 2), (3, 3)] {
                        let element = |call: u64, r: u32, i: u64| ((call * 64 + u64::from(r)) * 4096 + i) as i64 * 7919;
                        let input = |call, r| (0..schedule.shape.input_len(r)).map(|i| element(call, r, i)).collect();
                        let inputs: Vec<Vec<Vec<i64>>> =
                            (0..4).map(|call| (0..n).map(|r| input(call, r)).collect()).collect();
                        let sequence = Sequence::repeat(&schedule, order, 4, banks);
                        let outputs = simulate(&sequence, &inputs, seed, op).expect("it does not get stuck");
                        for (got, given) in outputs.iter().zip(&inputs) {
                            assert_eq!(*got, defined(&schedule, given, op), "{:?} {form:?}", schedule.shape);
                        }
                        runs += 1;
                    }
                }
            }
        }
    }
    println!("{runs} runs of 4 calls simulated in {:.1?}", start.elapsed());
}
