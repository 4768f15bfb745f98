//! Every collective, on the devices of the cell (`ALLHANDS_DEVICES`), against its definition; and what ran, as it was
//! recorded, through the checker.
mod common;
#[path = "suite/steady.rs"]
mod steady;
#[path = "suite/types.rs"]
mod types;

use allhands::{
    Algorithm, Buffer, Collective, DataType, Part, Path, ReduceOp, Shape, Span, Transfer,
    contract::Range,
    schedule::{algorithms, check::Fault},
    trace::Trace,
};
use common::{Bench, builder, hard_float, ranks, value};
use std::sync::Arc;

const TYPES: [DataType; 10] = allhands::TYPES;

fn proven(trace: &Trace) {
    let record = trace.record();
    let calls = record.calls.len();
    if let Err(fault) = record.program().check() {
        panic!("what ran does not hold ({calls} calls): {fault}");
    }
}

/// Runs a collective for several numbers of ranks, counts and algorithms, in place and out of place.
fn every(collective: impl Fn(u32) -> Vec<Collective>, ops: &[Option<ReduceOp>]) {
    for n in common::sizes(&[1, 2, 3, 5]) {
        let devices = ranks(n as usize);
        let trace = Arc::new(Trace::default());
        let comm = builder(&devices).trace(trace.clone()).build().unwrap();
        let mut seed = 0;
        for collective in collective(n) {
            let wanted: Vec<Option<Algorithm>> =
                std::iter::once(None).chain(algorithms(&collective).iter().copied().map(Some)).collect();
            let can_be_in_place = !matches!(collective, Collective::SendRecv(_) | Collective::Barrier);
            let n64 = u64::from(n);
            let counts = [0, 1, n64 - 1, n64, n64 + 1, 101, 3_001];
            for (k, count) in counts.into_iter().enumerate().filter(|(k, _)| !common::quick() || k % 3 == 0) {
                for in_place in [false, true].into_iter().filter(|p| !p || can_be_in_place) {
                    for &algorithm in &wanted {
                        // Each pair of type and operation with each algorithm, spread over the counts.
                        for (t, dtype) in TYPES.into_iter().enumerate() {
                            for (o, &op) in ops.iter().enumerate() {
                                if !(t * ops.len() + o + 2 * k + usize::from(in_place)).is_multiple_of(13) {
                                    continue;
                                }
                                seed += 1;
                                let shape = Shape { collective: collective.clone(), ranks: n, count, in_place };
                                let give = |r, i| value(dtype, op, r, i, seed);
                                let bench = Bench::shifted(&devices, &shape, dtype, op, seed % 5, give);
                                let what = format!("{shape:?} {dtype} {op:?} by {algorithm:?}");
                                let call = comm.call(collective.clone(), op, bench.parts()).algorithm(algorithm);
                                call.start().unwrap_or_else(|e| panic!("{what}: {e}")).wait().unwrap();
                                bench.verify().unwrap_or_else(|e| panic!("{what}: {e}"));
                            }
                        }
                    }
                }
            }
        }
        proven(&trace);
    }
}

const REDUCTIONS: [Option<ReduceOp>; 5] =
    [Some(ReduceOp::Sum), Some(ReduceOp::Product), Some(ReduceOp::Min), Some(ReduceOp::Max), Some(ReduceOp::Average)];

fn roots(n: u32) -> Vec<u32> {
    if n > 1 { vec![0, n - 1] } else { vec![0] }
}

#[test]
fn all_reduce() {
    every(|_| vec![Collective::AllReduce], &REDUCTIONS);
}
#[test]
fn reduce_scatter() {
    every(|_| vec![Collective::ReduceScatter], &REDUCTIONS);
}
#[test]
fn reduce() {
    every(|n| roots(n).into_iter().map(|root| Collective::Reduce { root }).collect(), &REDUCTIONS);
}
#[test]
fn all_gather() {
    every(|_| vec![Collective::AllGather], &[None]);
}
#[test]
fn broadcast() {
    every(|n| roots(n).into_iter().map(|root| Collective::Broadcast { root }).collect(), &[None]);
}
#[test]
fn gather() {
    every(|n| roots(n).into_iter().map(|root| Collective::Gather { root }).collect(), &[None]);
}
#[test]
fn scatter() {
    every(|n| roots(n).into_iter().map(|root| Collective::Scatter { root }).collect(), &[None]);
}
#[test]
fn all_to_all() {
    every(|_| vec![Collective::AllToAll], &[None]);
}
#[test]
fn barrier() {
    every(|_| vec![Collective::Barrier], &[None]);
}
#[test]
fn send_recv() {
    let lists = |n: u32| {
        let shift = (0..n).map(|r| Transfer { from: r, to: (r + 1) % n, count: 7 + u64::from(r) }).collect();
        let to_all = (0..n).flat_map(|a| (0..n).map(move |b| Transfer { from: a, to: b, count: u64::from(a + 2 * b) }));
        vec![Collective::SendRecv(shift), Collective::SendRecv(to_all.collect())]
    };
    every(lists, &[None]);
}

#[test]
fn long_messages_go_in_chunks() {
    for n in common::sizes(&[2, 3]) {
        let devices = ranks(n as usize);
        let trace = Arc::new(Trace::default());
        let comm = builder(&devices).trace(trace.clone()).build().unwrap();
        let collectives = [
            (Collective::AllReduce, 700_001),
            (Collective::ReduceScatter, 200_003),
            (Collective::AllGather, 200_003),
            (Collective::Broadcast { root: 1 }, 700_001),
            (Collective::Reduce { root: 0 }, 300_007),
            (Collective::AllToAll, 150_001),
            (Collective::Gather { root: n - 1 }, 150_001),
        ];
        for (collective, count) in collectives {
            let op = collective.reduces().then_some(ReduceOp::Sum);
            let mut want = None;
            for &algorithm in algorithms(&collective) {
                for in_place in [false, true] {
                    let shape = Shape { collective: collective.clone(), ranks: n, count, in_place };
                    let bench =
                        Bench::new(&devices, &shape, DataType::F32, op, |r, i| value(DataType::F32, op, r, i, 9));
                    let pending =
                        comm.call(collective.clone(), op, bench.parts()).algorithm(Some(algorithm)).start().unwrap();
                    pending.wait().unwrap();
                    // Host workers pass over the callers' memory in one piece.
                    let report = pending.report();
                    assert_eq!(report.chunks > 1, report.path != "direct", "{shape:?}: {report:?}");
                    let want = want.get_or_insert_with(|| bench.expected());
                    bench.verify_against(want).unwrap_or_else(|e| panic!("{shape:?} by {algorithm}: {e}"));
                }
            }
        }
        proven(&trace);
    }
}

/// Floats that only the fold in rank order gets right: the same bits by each of these algorithms, on every device.
#[test]
fn the_same_bits_by_every_exact_algorithm() {
    for n in common::sizes(&[2, 3, 5]) {
        let devices = ranks(n as usize);
        let comm = builder(&devices).build().unwrap();
        for op in ReduceOp::ALL {
            for count in [5, 1_000, 140_001] {
                let mut want = None;
                for algorithm in [None, Some(Algorithm::OneShot), Some(Algorithm::TwoShot), Some(Algorithm::Host)] {
                    let shape = Shape { collective: Collective::AllReduce, ranks: n, count, in_place: count == 5 };
                    let bench = Bench::new(&devices, &shape, DataType::F32, Some(op), |r, i| hard_float(r, i, 3));
                    let call = comm.call(Collective::AllReduce, Some(op), bench.parts()).algorithm(algorithm);
                    call.start().unwrap().wait().unwrap();
                    let want = want.get_or_insert_with(|| bench.expected());
                    bench
                        .verify_against(want)
                        .unwrap_or_else(|e| panic!("{op} of {count} by {algorithm:?} over {n}: {e}"));
                }
            }
        }
    }
}

/// Calls of all kinds and sizes, queued without waiting: banks are reused between unlike collectives, and the data of
/// one call is never another's.
#[test]
fn calls_follow_each_other_without_waiting() {
    for n in common::sizes(&[2, 3, 5]) {
        let devices = ranks(n as usize);
        let trace = Arc::new(Trace::default());
        let comm = builder(&devices).trace(trace.clone()).build().unwrap();
        let kinds = [
            Collective::AllReduce,
            Collective::Broadcast { root: n - 1 },
            Collective::ReduceScatter,
            Collective::AllGather,
            Collective::Reduce { root: 0 },
            Collective::AllToAll,
            Collective::Barrier,
            Collective::Gather { root: 0 },
        ];
        let mut benches = Vec::new();
        let mut pending = Vec::new();
        for k in 0..60_u64 {
            let collective = kinds[common::hash(k) as usize % kinds.len()].clone();
            let op = collective.reduces().then_some(ReduceOp::Sum);
            let choices = algorithms(&collective);
            let algorithm = choices[common::hash(k + 1_000) as usize % choices.len()];
            let count = [3, 64, 1_000, 20_000][common::hash(k + 2_000) as usize % 4];
            let in_place = k % 2 == 0 && collective != Collective::Barrier;
            let shape = Shape { collective: collective.clone(), ranks: n, count, in_place };
            let bench = Bench::new(&devices, &shape, DataType::I32, op, |r, i| value(DataType::I32, op, r, i, k));
            pending.push(comm.call(collective, op, bench.parts()).algorithm(Some(algorithm)).start().unwrap());
            benches.push(bench);
        }
        for (k, (pending, bench)) in pending.iter().zip(&benches).enumerate() {
            pending.wait().unwrap();
            bench.verify().unwrap_or_else(|e| panic!("call {k}, {:?}: {e}", bench.shape));
        }
        proven(&trace);
    }
}

/// A tensor may lie in several allocations, cut anywhere.
#[test]
fn a_span_of_several_buffers_is_one_range() {
    let n = 3;
    let devices = ranks(n);
    let comm = builder(&devices).build().unwrap();
    const COUNT: u64 = 10_000;
    let cuts = |rank: u64| [1 + rank * 37, 4_000 + rank, 9_999];
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot, Algorithm::Host, Algorithm::Ring, Algorithm::Tree] {
        let mut buffers: Vec<Vec<Buffer>> = Vec::new();
        let mut spans = Vec::new();
        for (r, device) in (0..).zip(&devices) {
            let borders: Vec<u64> = [0].into_iter().chain(cuts(r)).chain([COUNT]).collect();
            let mut own = Vec::new();
            let mut pieces = Vec::new();
            for (k, border) in borders.windows(2).enumerate() {
                let data: Vec<u32> = (border[0]..border[1]).map(|i| common::hash(i + r * COUNT)).collect();
                // Behind some words that are none of the span's.
                let buffer = Buffer::new(device, DataType::U32, k as u64 + data.len() as u64).unwrap();
                buffer.write_bytes(k as u64 * 4, common::bytes_of(&data)).unwrap();
                pieces.push(Range::new(buffer.id(), k as u64 * 4, data.len() as u64 * 4));
                own.push(buffer);
            }
            spans.push(Span::new(DataType::U32, pieces));
            buffers.push(own);
        }
        let parts = spans.into_iter().map(Part::in_place);
        let call = comm.call(Collective::AllReduce, Some(ReduceOp::Sum), parts).algorithm(Some(algorithm));
        call.start().unwrap().wait().unwrap();
        for (r, own) in (0..).zip(&buffers) {
            let mut got: Vec<u32> = Vec::new();
            own.iter().enumerate().for_each(|(k, b)| got.extend(&b.read::<u32>().unwrap()[k..]));
            let want =
                (0..COUNT).map(|i| (0..n as u64).fold(0, |a, s| u32::wrapping_add(a, common::hash(i + s * COUNT))));
            let wrong = got.iter().zip(want).position(|(a, b)| *a != b);
            assert_eq!((got.len() as u64, wrong), (COUNT, None), "rank {r} by {algorithm}");
        }
    }
}

/// The record is worth something: an executor that leaves out any one wait of a call is found out, whether or not
/// the data happens to be right.
#[test]
fn a_wait_that_is_left_out_is_found_in_the_trace() {
    let devices = ranks(3);
    let run = |collective: Collective, algorithm, skip: Option<u64>| {
        let trace = Arc::new(Trace::default());
        let mut build = builder(&devices).path(Some(Path::Copied)).trace(trace.clone());
        if let Some(skip) = skip {
            build = build.skip_wait(skip);
        }
        let comm = build.build().unwrap();
        let op = collective.reduces().then_some(ReduceOp::Sum);
        let shape = Shape { collective: collective.clone(), ranks: 3, count: 101, in_place: false };
        let bench = Bench::new(&devices, &shape, DataType::U32, op, |r, i| value(DataType::U32, op, r, i, 1));
        comm.call(collective, op, bench.parts()).algorithm(Some(algorithm)).start().unwrap().wait().unwrap();
        drop(comm);
        let record = trace.record();
        let waits = record.submissions.values().flat_map(|s| s.waits.iter().flatten()).count() as u64;
        (waits, record.program().check())
    };
    let mut tried = 0;
    for (collective, algorithm) in [
        (Collective::AllReduce, Algorithm::OneShot),
        (Collective::AllReduce, Algorithm::TwoShot),
        (Collective::AllReduce, Algorithm::Host),
        (Collective::AllReduce, Algorithm::Ring),
        (Collective::AllGather, Algorithm::OneShot),
        (Collective::Broadcast { root: 1 }, Algorithm::Tree),
    ] {
        let (waits, sound) = run(collective.clone(), algorithm, None);
        sound.unwrap_or_else(|e| panic!("{collective:?} by {algorithm}: {e}"));
        assert!(waits > 0);
        for skip in 0..waits {
            let (left, found) = run(collective.clone(), algorithm, Some(skip));
            assert_eq!(left, waits - 1);
            assert!(
                matches!(found, Err(Fault::Race { .. } | Fault::Undefined { .. })),
                "wait {skip} of {waits} left out of {collective:?} by {algorithm}: {found:?}"
            );
            tried += 1;
        }
    }
    println!("{tried} waits left out, {tried} found");
}

/// Under `one-shot` it is the devices that reduce, and their own counters say so.
#[test]
fn the_device_reduces_what_the_report_says_it_does() {
    let devices = ranks(2);
    let comm = builder(&devices).build().unwrap();
    let dispatches = || devices.iter().map(|d| d.counters().dispatches).collect::<Vec<_>>();
    let shape = Shape { collective: Collective::AllReduce, ranks: 2, count: 999, in_place: false };
    for (algorithm, by_device) in [(Algorithm::OneShot, true), (Algorithm::Host, false)] {
        let op = Some(ReduceOp::Sum);
        let bench = Bench::new(&devices, &shape, DataType::F32, op, |r, i| value(DataType::F32, op, r, i, 5));
        let before = dispatches();
        let pending = comm.call(Collective::AllReduce, op, bench.parts()).algorithm(Some(algorithm)).start().unwrap();
        pending.wait().unwrap();
        bench.verify().unwrap();
        assert_eq!(pending.report().reduced_on.to_string(), if by_device { "device" } else { "host" });
        // Tests that run beside this one share the devices: the counters can only be bounded from below.
        if by_device {
            assert!(dispatches().iter().zip(&before).all(|(now, then)| now > then), "a device reduced nothing");
        }
    }
}
