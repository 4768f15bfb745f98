//! All types and their arithmetic, bit by bit: the same bits by every exact algorithm, ranks that contribute nothing,
//! scales, wire types, memory that starts and ends anywhere, and groups of calls.
use crate::{
    common::{self, Bench, How, builder, decode, encode, fold, hard, ranks, value},
    proven,
};
use allhands::{
    Algorithm, Buffer, Collective, Communicator, DataType, Device, Part, ReduceOp, Shape, Span, contract::Range,
    schedule::algorithms, trace::Trace,
};
use std::sync::Arc;

const FLOATS: [DataType; 4] = [DataType::F32, DataType::F16, DataType::Bf16, DataType::F64];
const EXACT: [Algorithm; 3] = [Algorithm::OneShot, Algorithm::TwoShot, Algorithm::Host];

fn traced(devices: &[Arc<dyn Device>]) -> (Communicator, Arc<Trace>) {
    let trace = Arc::new(Trace::default());
    (builder(devices).trace(trace.clone()).build().unwrap(), trace)
}

fn run(comm: &Communicator, bench: &Bench, algorithm: Option<Algorithm>) {
    run_against(comm, bench, algorithm, &bench.expected());
}
fn run_against(comm: &Communicator, bench: &Bench, algorithm: Option<Algorithm>, want: &[Vec<u64>]) {
    let call = comm.call(bench.shape.collective.clone(), bench.op, bench.parts()).algorithm(algorithm);
    let what = || format!("{:?} {} {:?} {:?} by {algorithm:?}", bench.shape, bench.dtype, bench.op, bench.how);
    call.wire(bench.how.wire).start().unwrap_or_else(|e| panic!("{}: {e}", what())).wait().unwrap();
    bench.verify_against(want).unwrap_or_else(|e| panic!("{}: {e}", what()));
}

fn all_reduce(ranks: usize, count: u64, in_place: bool) -> Shape {
    Shape { collective: Collective::AllReduce, ranks: ranks as u32, count, in_place }
}

/// Raw bits equal the reference's, whatever the algorithm, the count and the place, and again the second time. So the
/// first elements of a long vector have the bits that a short one has.
#[test]
fn every_float_has_the_same_bits_by_every_exact_algorithm() {
    for n in common::sizes(&[2, 3, 5, 8]).into_iter().map(|n| n as usize) {
        let devices = ranks(n);
        let comm = builder(&devices).build().unwrap();
        for dtype in FLOATS {
            for op in ReduceOp::ALL {
                for (k, count) in [3, 1_001, 20_003, 300_001].into_iter().enumerate() {
                    if count > 20_003 && (op != ReduceOp::Sum || n > 3)
                        || (n == 8 || common::quick()) && op != ReduceOp::Sum && k > 1
                    {
                        continue;
                    }
                    let (mut first, mut want) = (None::<Vec<Vec<u64>>>, None);
                    for (a, algorithm) in EXACT.into_iter().enumerate() {
                        let shape = all_reduce(n, count, (k + a) % 2 == 0);
                        let bench = Bench::new(&devices, &shape, dtype, Some(op), |r, i| hard(dtype, r, i, 7));
                        let want = want.get_or_insert_with(|| bench.expected());
                        run_against(&comm, &bench, Some(algorithm), want);
                        let outputs = bench.outputs();
                        assert!(outputs.iter().all(|o| *o == outputs[0]), "{dtype} {op}: ranks differ");
                        assert_eq!(first.get_or_insert_with(|| outputs.clone()), &outputs, "{dtype} {op} {algorithm}");
                    }
                    let again = Bench::new(&devices, &all_reduce(n, count, false), dtype, Some(op), |r, i| {
                        hard(dtype, r, i, 7)
                    });
                    run_against(&comm, &again, None, &want.unwrap());
                }
            }
        }
    }
}

/// On a device that has kernels for a type, it is the device that reduces it.
#[test]
fn devices_reduce_the_types_that_they_have_kernels_for() {
    let devices = ranks(2);
    let comm = builder(&devices).build().unwrap();
    for dtype in DataType::ALL {
        for op in ReduceOp::ALL {
            let has = devices.iter().all(|d| d.limits().reduces(op, dtype));
            let has = has && (op != ReduceOp::Average || dtype.is_float());
            let narrow = !matches!(dtype, DataType::F64 | DataType::I64 | DataType::U64);
            assert!(has || !narrow || op == ReduceOp::Average, "no kernel for {op} of {dtype}");
            let bench = Bench::new(&devices, &all_reduce(2, 77, false), dtype, Some(op), |r, i| {
                value(dtype, Some(op), r, i, 1)
            });
            let call = comm.call(Collective::AllReduce, Some(op), bench.parts());
            let pending = call.algorithm(Some(Algorithm::OneShot)).start().unwrap();
            pending.wait().unwrap();
            bench.verify().unwrap();
            let on = pending.report().reduced_on.to_string();
            if !has {
                assert_eq!(on, "host", "{op} of {dtype}");
            } else if comm.arithmetic(0).allows(dtype) && comm.arithmetic(1).allows(dtype) {
                assert_eq!(on, "device", "{op} of {dtype}");
            }
        }
    }
}

/// A rank that contributes nothing is left out, though its memory is full of NaN.
#[test]
fn absent_ranks_are_left_out() {
    let nan = |dtype: DataType| {
        if dtype.is_float() { common::mask(dtype) } else { 0x5a5a_5a5a_5a5a_5a5a & common::mask(dtype) }
    };
    for n in common::sizes(&[2, 3, 5]).into_iter().map(|n| n as usize) {
        let devices = ranks(n);
        let (comm, trace) = traced(&devices);
        let mut turn = 0;
        for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce { root: 0 }] {
            for &algorithm in algorithms(&collective) {
                for in_place in [false, true] {
                    for (d, dtype) in DataType::ALL.into_iter().enumerate() {
                        for (o, op) in ReduceOp::ALL.into_iter().enumerate() {
                            turn += 1;
                            if (d + 2 * o + turn / 50) % 5 != 0 {
                                continue;
                            }
                            // One, all but one, all.
                            let absent: Vec<bool> = match turn % 3 {
                                0 => (0..n).map(|r| r == turn % n).collect(),
                                1 => (0..n).map(|r| r != turn % n).collect(),
                                _ => vec![true; n],
                            };
                            let shape = Shape { collective: collective.clone(), ranks: n as u32, count: 103, in_place };
                            let give = |r: u32, i| match absent[r as usize] {
                                true => nan(dtype),
                                false => value(dtype, Some(op), r, i, turn as u64),
                            };
                            let mut bench = Bench::new(&devices, &shape, dtype, Some(op), give);
                            bench.how = How { absent: absent.clone(), ..How::default() };
                            run(&comm, &bench, Some(algorithm));
                        }
                    }
                }
            }
        }
        // The bits are those of leaving it out, for hard values too, and longer than what stands in for it.
        for dtype in FLOATS {
            let count = if dtype == DataType::F32 { 150_001 } else { 2_001 };
            let give = |r: u32, i| if r == 0 { nan(dtype) } else { hard(dtype, r, i, 3) };
            let mut bench = Bench::new(&devices, &all_reduce(n, count, true), dtype, Some(ReduceOp::Sum), give);
            bench.how.absent = (0..n).map(|r| r == 0).collect();
            run(&comm, &bench, None);
        }
        proven(&trace);
    }
}

#[test]
fn an_absent_rank_needs_no_input() {
    let devices = ranks(3);
    let comm = builder(&devices).build().unwrap();
    let data: Vec<Buffer> = (0..3).map(|r| Buffer::from_slice(&devices[r], &[r as i32 + 1, -5]).unwrap()).collect();
    let out: Vec<Buffer> = (0..3).map(|r| Buffer::from_slice(&devices[r], &[99_i32; 2]).unwrap()).collect();
    let part = |r: usize| match r {
        1 => Part::output(out[1].span()).absent(),
        _ => Part::new(data[r].span(), out[r].span()),
    };
    comm.all_reduce((0..3).map(part), ReduceOp::Sum).unwrap().wait().unwrap();
    out.iter().for_each(|b| assert_eq!(b.read::<i32>().unwrap(), [4, -10]));
    // Of a reduce, a rank that neither gives nor gets brings nothing at all.
    let part = |r: usize| match r {
        1 => Part::none().absent(),
        _ => Part::new(data[r].span(), out[r].span()),
    };
    comm.reduce((0..3).map(part), ReduceOp::Max, 2).unwrap().wait().unwrap();
    assert_eq!(out[2].read::<i32>().unwrap(), [3, -5]);
}

#[test]
fn scales_are_rounded_before_they_are_added() {
    const SCALES: [f32; 5] = [0.1, -3.7, 1.000_000_1, 0.333_333_34, 1e-3];
    for n in common::sizes(&[1, 2, 3, 5]).into_iter().map(|n| n as usize) {
        let devices = ranks(n);
        let (comm, trace) = traced(&devices);
        for dtype in FLOATS {
            for algorithm in [None, Some(Algorithm::OneShot), Some(Algorithm::TwoShot), Some(Algorithm::Host)] {
                for (count, absent) in [(5, false), (1_003, true), (1_003, false)] {
                    let give = |r, i| hard(dtype, r, i, 11);
                    let shape = all_reduce(n, count, count == 5);
                    let mut bench = Bench::new(&devices, &shape, dtype, Some(ReduceOp::Sum), give);
                    bench.how.scales = SCALES.into_iter().cycle().take(n).collect();
                    // What stands in for an absent rank is not scaled: -0 would become 0.
                    bench.how.absent = (0..n).map(|r| absent && r == 1).collect();
                    run(&comm, &bench, algorithm);
                    if n == 3 && count > 5 && !absent {
                        // The data tells rounding from fusing.
                        let bits = |r: usize, i: usize| decode(dtype, bench.inputs[r][i]) as f32;
                        let differs = |i: usize| {
                            let first = bits(0, i) * SCALES[0];
                            let [a, b] = [bits(1, i).mul_add(SCALES[1], first), bits(1, i) * SCALES[1] + first];
                            a.to_bits() != b.to_bits()
                        };
                        assert!(dtype == DataType::F64 || (0..count as usize).any(differs), "{dtype}");
                    }
                }
            }
        }
        proven(&trace);
    }
}

/// What crosses narrow is rounded, wherever it comes from and arrives; finite values stay finite.
#[test]
fn f32_crosses_as_narrower_types() {
    const HARD: [f32; 12] = [
        70_000.0,
        -70_000.0,
        65_519.0,
        f32::MAX,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        0.0,
        -0.0,
        1e-6,
        3.1e-8,
        1.0,
    ];
    for n in common::sizes(&[1, 2, 3, 5]).into_iter().map(|n| n as usize) {
        let devices = ranks(n);
        let (comm, trace) = traced(&devices);
        let last = n as u32 - 1;
        let collectives = [
            Collective::AllReduce,
            Collective::ReduceScatter,
            Collective::Reduce { root: last },
            Collective::AllGather,
            Collective::Broadcast { root: last },
            Collective::Gather { root: 0 },
            Collective::Scatter { root: 0 },
            Collective::AllToAll,
        ];
        for wire in [DataType::F16, DataType::Bf16] {
            for collective in &collectives {
                let exact = |a: &&Algorithm| !collective.reduces() || a.in_rank_order();
                for &algorithm in algorithms(collective).iter().filter(exact) {
                    for (k, count) in [1, 7, 1_003].into_iter().enumerate() {
                        let in_place = (k + algorithm as usize + wire as usize).is_multiple_of(2);
                        let op = collective.reduces().then(|| ReduceOp::ALL[(k + algorithm as usize) % 5]);
                        let shape = Shape { collective: collective.clone(), ranks: n as u32, count, in_place };
                        let give = |r: u32, i: u64| match common::hash(u64::from(r) << 32 | i) {
                            h if h % 3 == 0 => u64::from(HARD[h as usize / 3 % HARD.len()].to_bits()),
                            _ => hard(DataType::F32, r, i, 5),
                        };
                        let mut bench = Bench::new(&devices, &shape, DataType::F32, op, give);
                        bench.how.wire = Some(wire);
                        run(&comm, &bench, Some(algorithm));
                    }
                }
            }
            // Long ones, with scales and without a rank.
            for algorithm in EXACT {
                let shape = all_reduce(n, 200_001, true);
                let give = |r, i| hard(DataType::F32, r, i, 9);
                let mut bench = Bench::new(&devices, &shape, DataType::F32, Some(ReduceOp::Sum), give);
                bench.how = How {
                    wire: Some(wire),
                    scales: (0..n).map(|r| 0.3 + r as f32).collect(),
                    absent: (0..n).map(|r| r == 1).collect(),
                };
                run(&comm, &bench, Some(algorithm));
            }
        }
        proven(&trace);
    }
}

#[test]
fn what_crosses_narrow_is_within_its_bound() {
    let n = 5;
    let devices = ranks(n);
    let comm = builder(&devices).build().unwrap();
    for (wire, unit) in [(DataType::Bf16, 2f64.powi(-8)), (DataType::F16, 2f64.powi(-11))] {
        // Between 2^-2 and 2^2, of both signs.
        let give = |r: u32, i: u64| {
            let h = common::hash(u64::from(r) << 40 ^ i);
            u64::from(h & 0x807f_ffff | (125 + (h >> 23 & 3)) << 23)
        };
        let mut bench = Bench::new(&devices, &all_reduce(n, 10_000, false), DataType::F32, Some(ReduceOp::Sum), give);
        bench.how.wire = Some(wire);
        run(&comm, &bench, None);
        let got = bench.outputs();
        let mut worst: f64 = 0.0;
        for i in 0..10_000 {
            let given = || bench.inputs.iter().map(|v| decode(DataType::F32, v[i]));
            let (sum, size) = (given().sum::<f64>(), given().map(f64::abs).sum::<f64>());
            worst = worst.max((decode(DataType::F32, got[0][i]) - sum).abs() / (unit * (size + sum.abs())));
        }
        println!("f32 as {wire}: the worst error is {worst:.3} of the bound");
        // To first order, so a little beyond is granted; and the bound is not an empty one.
        assert!(worst < 1.0 + 4.0 * unit && worst > 0.1, "{wire}: {worst}");
    }
}

/// A tensor may lie in several allocations, cut at any element, also amid a word.
#[test]
fn narrow_spans_are_cut_anywhere() {
    const COUNT: u64 = 5_003;
    let n = 3;
    let devices = ranks(n);
    let (comm, trace) = traced(&devices);
    for dtype in [DataType::U8, DataType::F16, DataType::I8, DataType::Bf16] {
        let size = dtype.size();
        let op = ReduceOp::Sum;
        for algorithm in Algorithm::ALL {
            let mut buffers: Vec<Vec<(Buffer, u64, u64)>> = Vec::new();
            let mut spans = Vec::new();
            for (r, device) in (0..).zip(&devices) {
                let borders = [0, 1 + 37 * r, 2_000 + r, 2_001 + r, 5_002, COUNT];
                let mut own = Vec::new();
                let mut pieces = Vec::new();
                for (k, border) in (0..).zip(borders.windows(2)) {
                    // Between bytes that are none of the span's.
                    let (before, len) = ((k + r) % 5, border[1] - border[0]);
                    let buffer = Buffer::new(device, dtype, before + len + 3).unwrap();
                    let mut bytes = vec![0xa5_u8; ((before + len + 3) * size) as usize];
                    for i in 0..len {
                        let bits = value(dtype, Some(op), r as u32, border[0] + i, 1).to_le_bytes();
                        bytes[((before + i) * size) as usize..][..size as usize]
                            .copy_from_slice(&bits[..size as usize]);
                    }
                    buffer.write_bytes(0, &bytes).unwrap();
                    pieces.push(Range::new(buffer.id(), before * size, len * size));
                    own.push((buffer, before, border[0]));
                }
                spans.push(Span::new(dtype, pieces));
                buffers.push(own);
            }
            let parts = spans.into_iter().map(Part::in_place);
            let call = comm.call(Collective::AllReduce, Some(op), parts).algorithm(Some(algorithm));
            call.start().unwrap().wait().unwrap();
            for (r, own) in buffers.iter().enumerate() {
                for (buffer, before, first) in own {
                    let mut got = vec![0; (buffer.len() * size) as usize];
                    buffer.read_bytes(0, &mut got).unwrap();
                    let mut want = vec![0xa5_u8; got.len()];
                    for i in 0..buffer.len() - before - 3 {
                        let given: Vec<_> = (0..n as u32).map(|s| value(dtype, Some(op), s, first + i, 1)).collect();
                        let bits = fold(dtype, op, &given, &How::default()).to_le_bytes();
                        want[((before + i) * size) as usize..][..size as usize].copy_from_slice(&bits[..size as usize]);
                    }
                    assert!(got == want, "{dtype} by {algorithm}: the piece of rank {r} from element {first}");
                }
            }
        }
    }
    proven(&trace);
}

/// Beyond what one binding reaches, and from beyond 1 GiB.
#[test]
fn spans_are_large_and_far_out() {
    const MIB: u64 = 1 << 20;
    let devices = ranks(2);
    let comm = builder(&devices).build().unwrap();
    // Far out: one large buffer, both ranks in it where they share a device.
    let far = match Buffer::new(&devices[0], DataType::U8, 1200 * MIB) {
        Ok(buffer) => buffer,
        Err(e) => return println!("not run: {e}"),
    };
    let near = Buffer::new(&devices[1], DataType::U8, 4 * MIB).unwrap();
    for dtype in [DataType::U8, DataType::F16, DataType::F32] {
        let (size, count) = (dtype.size(), 100_003);
        for (algorithm, shift) in [(Algorithm::OneShot, 0), (Algorithm::TwoShot, 1), (Algorithm::Host, 3)] {
            let data = |r: u32| -> Vec<u8> {
                let bits = (0..count).map(|i| value(dtype, Some(ReduceOp::Sum), r, i, 2).to_le_bytes());
                bits.flat_map(|b| b[..size as usize].to_vec()).collect()
            };
            let at = [1100 * MIB + shift * size, MIB + 3 * size];
            far.write_bytes(at[0], &data(0)).unwrap();
            near.write_bytes(at[1], &data(1)).unwrap();
            let part = |b: &Buffer, at| Part::in_place(Span::new(dtype, [Range::new(b.id(), at, count * size)]));
            let parts = [part(&far, at[0]), part(&near, at[1])];
            let call = comm.call(Collective::AllReduce, Some(ReduceOp::Sum), parts).algorithm(Some(algorithm));
            call.start().unwrap().wait().unwrap();
            let mut got = vec![0; (count * size) as usize];
            far.read_bytes(at[0], &mut got).unwrap();
            let wrong = got.chunks(size as usize).zip(0..).find(|(b, i)| {
                let given = [0, 1].map(|r| value(dtype, Some(ReduceOp::Sum), r, *i, 2));
                b[..] != fold(dtype, ReduceOp::Sum, &given, &How::default()).to_le_bytes()[..size as usize]
            });
            assert!(wrong.is_none(), "{dtype} by {algorithm}: element {}", wrong.unwrap().1);
        }
    }
    drop(far);
    // Large: more than 128 MiB in one span.
    let count = 34 * MIB + 5;
    let pattern = |r: u32| -> Vec<u32> { (0..MIB as u32).map(|i| i.wrapping_mul(2_654_435_761) ^ r << 7).collect() };
    let large: Vec<Buffer> = devices.iter().map(|d| Buffer::new(d, DataType::U32, count).unwrap()).collect();
    for (r, buffer) in (0..).zip(&large) {
        let block = pattern(r);
        (0..34).for_each(|k| buffer.write_bytes(k * 4 * MIB, common::bytes_of(&block)).unwrap());
        buffer.write_bytes(34 * 4 * MIB, common::bytes_of(&block[..5])).unwrap();
    }
    comm.all_reduce(&large, ReduceOp::Sum).unwrap().wait().unwrap();
    let want: Vec<u32> = pattern(0).iter().zip(pattern(1)).map(|(a, b)| a.wrapping_add(b)).collect();
    for buffer in &large {
        let mut got = vec![0_u32; MIB as usize];
        for k in [0, 1, 17, 31, 32, 33] {
            buffer.read_bytes(k * 4 * MIB, bytemuck::cast_slice_mut(&mut got)).unwrap();
            assert!(got == want, "block {k}");
        }
        buffer.read_bytes(34 * 4 * MIB, bytemuck::cast_slice_mut(&mut got[..5])).unwrap();
        assert_eq!(got[..5], want[..5]);
    }
}

/// Many small tensors are one call; what is unlike runs beside it; and nothing starts if one of them is wrong.
#[test]
fn groups_of_calls_are_one_operation() {
    for n in common::sizes(&[2, 3]).into_iter().map(|n| n as usize) {
        let devices = ranks(n);
        let (comm, trace) = traced(&devices);
        for algorithm in [None, Some(Algorithm::OneShot), Some(Algorithm::TwoShot), Some(Algorithm::Host)] {
            let before = trace.record().calls.len();
            let mut benches = Vec::new();
            for k in 0..24_u64 {
                let dtype = [DataType::F32, DataType::F16, DataType::U8][k as usize % 3];
                let (collective, op) = match k % 8 {
                    6 => (Collective::Broadcast { root: 0 }, None),
                    7 => (Collective::AllGather, None),
                    _ => (Collective::AllReduce, Some(ReduceOp::Sum)),
                };
                let shape = Shape { collective, ranks: n as u32, count: k * 7 % 41, in_place: false };
                let give = |r, i| value(dtype, op, r, i, k);
                benches.push(Bench::shifted(&devices, &shape, dtype, op, k % 4, give));
            }
            let call = |b: &Bench| {
                let fits = algorithms(&b.shape.collective).contains(&algorithm.unwrap_or(Algorithm::OneShot));
                comm.call(b.shape.collective.clone(), b.op, b.parts()).algorithm(algorithm.filter(|_| fits))
            };
            let pending = comm.group(benches.iter().map(call)).unwrap();
            pending.wait().unwrap();
            assert!(pending.is_done().unwrap() && (0..n as u32).all(|r| pending.point(r).is_some()));
            for (k, bench) in benches.iter().enumerate() {
                bench.verify().unwrap_or_else(|e| panic!("call {k} by {algorithm:?}: {e}"));
            }
            // Of each type: the sums, the broadcasts, and each all-gather.
            assert_eq!(trace.record().calls.len() - before, 3 + 3 + 3);
        }
        proven(&trace);
        comm.group([]).unwrap().wait().unwrap();
    }
}

/// The encodings that the tests go by are right where it is known.
#[test]
fn the_reference_rounds_as_ieee_says() {
    for (x, want) in [(65_519.0, 0x7bff), (65_520.0, 0x7c00), (2_049.0, 0x6800), (2_051.0, 0x6802), (f64::NAN, 0x7e00)]
    {
        assert_eq!(encode(DataType::F16, x), want, "{x}");
    }
    assert_eq!(common::through(DataType::F16, 70_000.0), 65_504.0);
    assert_eq!(common::through(DataType::F16, f64::NEG_INFINITY), f64::NEG_INFINITY);
}
