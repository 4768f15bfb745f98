//! The kernels against a scalar reference, bit by bit, on every device that is found (or that `ALLHANDS_DEVICES`
//! lists).
use allhands_contract::*;
use std::time::{Duration, Instant};

mod common;

/// Values whose sums, products and order are delicate. Subnormals are left out: a device may flush them.
const DELICATE: [u32; 20] = [
    0x0000_0000, // 0
    0x8000_0000, // -0
    0x3f80_0000, // 1
    0xbf80_0000, // -1
    0x7f80_0000, // infinity
    0xff80_0000, // -infinity
    0x7fc0_0000, // the canonical NaN
    0x7fc0_1234, // another quiet one
    0x7f80_0001, // a signalling one
    0xffc0_0000, // negative ones
    0xff80_0001,
    0x7f7f_ffff, // the greatest
    0xff7f_ffff,
    0x4b80_0000, // 2^24: adding 1 is a tie
    0x3f80_0001,
    0x3380_0000,
    0x4640_e400,
    0x7fff_ffff,
    0xffff_ffff,
    0x5f00_0000,
];

fn hash(x: u64) -> u64 {
    let x = (x ^ x >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ x >> 32
}

/// Element `i` of source `s`.
fn input(dtype: DataType, s: u64, i: u64) -> u32 {
    let h = hash(s << 40 | i);
    match dtype {
        DataType::F32 if h.is_multiple_of(3) => DELICATE[(h >> 8) as usize % DELICATE.len()],
        DataType::F32 => {
            // Exponents from 2^-20 to 2^20, so that no partial result is subnormal.
            let exponent = 107 + (h >> 32) % 41;
            (h as u32 & 0x807f_ffff) | (exponent as u32) << 23
        }
        _ if h.is_multiple_of(5) => [0, 1, u32::MAX, i32::MAX as u32, i32::MIN as u32][(h >> 8) as usize % 5],
        _ => h as u32,
    }
}

fn reference(op: ReduceOp, dtype: DataType, values: &[u32], finish: Option<u32>) -> u32 {
    match dtype {
        DataType::F32 => {
            let less = |a: u32, b: u32| {
                let (a, b) = (f32::from_bits(a), f32::from_bits(b));
                a < b || (a == b && a.is_sign_negative() && b.is_sign_positive())
            };
            let fold = |a: u32, b: u32| {
                let (x, y) = (f32::from_bits(a), f32::from_bits(b));
                match op {
                    ReduceOp::Sum | ReduceOp::Average => (x + y).to_bits(),
                    ReduceOp::Product => (x * y).to_bits(),
                    _ if x.is_nan() || y.is_nan() => f32::NAN.to_bits(),
                    ReduceOp::Min => {
                        if less(b, a) {
                            b
                        } else {
                            a
                        }
                    }
                    ReduceOp::Max => {
                        if less(a, b) {
                            b
                        } else {
                            a
                        }
                    }
                }
            };
            let mut x = f32::from_bits(values.iter().copied().reduce(fold).unwrap());
            if let (ReduceOp::Average, Some(ranks)) = (op, finish) {
                x *= (1.0 / f64::from(ranks)) as f32;
            }
            if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }
        }
        _ => {
            let signed = dtype == DataType::I32;
            let less = |a: u32, b: u32| if signed { (a as i32) < b as i32 } else { a < b };
            let fold = |a: u32, b: u32| match op {
                ReduceOp::Sum | ReduceOp::Average => a.wrapping_add(b),
                ReduceOp::Product => a.wrapping_mul(b),
                ReduceOp::Min => {
                    if less(b, a) {
                        b
                    } else {
                        a
                    }
                }
                ReduceOp::Max => {
                    if less(a, b) {
                        b
                    } else {
                        a
                    }
                }
            };
            values.iter().copied().reduce(fold).unwrap()
        }
    }
}

fn create(device: &dyn Device, bytes: u64) -> BufferId {
    device.create_buffer(&BufferDesc { size: bytes, memory: Memory::Device, exportable: false }).unwrap()
}

fn run(device: &dyn Device, timeline: TimelineId, value: &mut u64, ops: &[Op]) {
    let commands = device.prepare(ops).unwrap();
    *value += 1;
    let signal = Point { timeline, value: *value };
    device.submit(&[Submission { commands: Some(commands), waits: &[], signal }]).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    assert_eq!(device.wait_any(&[signal], device.wakes(), deadline).unwrap(), Waited::Reached);
}

fn every_kernel(device: &dyn Device) {
    const GUARD: u32 = 0xdead_beef;
    let timeline = device.create_timeline(false).unwrap();
    let mut value = 0;
    // Elements of one word; the suite of the contract has a reference for all.
    for &(op, dtype) in device.limits().kernels.iter().filter(|k| k.1.size() == 4) {
        for (count, sources, stores, finish) in
            [(1, 1, 1, Some(1)), (5, 2, 1, None), (1000, 3, 4, Some(3)), (777, 8, 6, Some(7)), (300_001, 2, 1, Some(2))]
        {
            let size = count * 4;
            let pitch = size + 12; // so that the offsets are odd multiples of a word
            let arena = create(device, pitch * sources);
            let result = create(device, pitch * stores + 4);
            let range = |buffer, i: u64| Range::new(buffer, 4 + i * pitch, size);
            let mut words = vec![GUARD; (pitch * sources / 4) as usize];
            for s in 0..sources {
                for i in 0..count {
                    words[(1 + s * pitch / 4 + i) as usize] = input(dtype, s, i);
                }
            }
            device.write(Range::new(arena, 0, pitch * sources), bytemuck::cast_slice(&words)).unwrap();
            let blank = vec![GUARD; (pitch * stores / 4 + 1) as usize];
            device.write(Range::new(result, 0, pitch * stores + 4), bytemuck::cast_slice(&blank)).unwrap();
            let kernel = Kernel {
                stores: (0..stores).map(|i| range(result, i)).collect(),
                sources: (0..sources).map(|i| range(arena, i)).collect(),
                op,
                dtype,
                finish,
                scales: Vec::new(),
                wire: None,
            };
            run(device, timeline, &mut value, &[Op::Kernel(kernel)]);
            let mut got = blank.clone();
            device.read(Range::new(result, 0, pitch * stores + 4), bytemuck::cast_slice_mut(&mut got)).unwrap();
            let mut want = blank;
            for i in 0..count {
                let values: Vec<u32> = (0..sources).map(|s| input(dtype, s, i)).collect();
                for s in 0..stores {
                    want[(1 + s * pitch / 4 + i) as usize] = reference(op, dtype, &values, finish);
                }
            }
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(got, want, "{op} {dtype}, {sources} sources, {stores} stores: word {i}, {got:#x} {want:#x}");
            }
            device.destroy_buffer(arena);
            device.destroy_buffer(result);
        }
    }
}

/// A kernel in place, whose source is exactly its store, then a copy behind a barrier, over and over.
fn chains(device: &dyn Device) {
    let timeline = device.create_timeline(false).unwrap();
    let mut value = 0;
    let (a, b) = (create(device, 4096), create(device, 4096));
    device.write(Range::new(a, 0, 4096), bytemuck::cast_slice(&[1u32; 1024])).unwrap();
    device.write(Range::new(b, 0, 4096), bytemuck::cast_slice(&[1u32; 1024])).unwrap();
    let (whole_a, whole_b) = (Range::new(a, 0, 4096), Range::new(b, 0, 4096));
    let double = Kernel {
        stores: vec![whole_a],
        sources: vec![whole_a, whole_b],
        op: ReduceOp::Sum,
        dtype: DataType::U32,
        finish: None,
        scales: Vec::new(),
        wire: None,
    };
    let mut ops = Vec::new();
    for _ in 0..20 {
        ops.extend([Op::Kernel(double.clone()), Op::Barrier, Op::Copy { src: whole_a, dst: whole_b }, Op::Barrier]);
    }
    run(device, timeline, &mut value, &ops);
    let mut got = [0u32; 1024];
    device.read(whole_a, bytemuck::cast_slice_mut(&mut got)).unwrap();
    assert_eq!(got, [1 << 20; 1024]);
}

#[test]
fn kernels_match_the_reference() {
    common::with_devices(|device| every_kernel(&**device));
}

#[test]
fn kernels_and_copies_follow_each_other() {
    common::with_devices(|device| chains(&**device));
}
/// Ranges of one buffer that lie further apart than one binding reaches.
fn far_apart(device: &dyn Device) {
    const MIB: u64 = 1 << 20;
    let timeline = device.create_timeline(false).unwrap();
    let mut value = 0;
    let buffer = create(device, 300 * MIB);
    let ranges = [0, 140 * MIB + 4, 299 * MIB + 36].map(|offset| Range::new(buffer, offset, 4000));
    for (i, range) in ranges.iter().enumerate() {
        device.write(*range, bytemuck::cast_slice(&[i as u32 + 1; 1000])).unwrap();
    }
    let kernel = Kernel {
        stores: vec![ranges[2]],
        sources: ranges.to_vec(),
        op: ReduceOp::Sum,
        dtype: DataType::I32,
        finish: None,
        scales: Vec::new(),
        wire: None,
    };
    run(device, timeline, &mut value, &[Op::Kernel(kernel)]);
    let mut got = [0u32; 1000];
    device.read(ranges[2], bytemuck::cast_slice_mut(&mut got)).unwrap();
    assert_eq!(got, [6; 1000]);
    device.destroy_buffer(buffer);
}

#[test]
fn a_kernel_reaches_over_a_large_buffer() {
    common::with_devices(|device| far_apart(&**device));
}

#[test]
fn an_adapter_is_opened_from_many_threads() {
    common::with_devices(|device| {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| chains(&*device.sibling().unwrap()));
            }
        });
    });
}
