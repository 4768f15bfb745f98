//! Folds of two sources, of each type that a device has kernels for, on each device of `ALLHANDS_DEVICES`; the
//! throughput is of the bytes that they read. `ALLHANDS_DEVICES=cpu,proxy-vulkan:0 cargo bench -p allhands-benches --bench kernels`
mod common;

use allhands::{
    DataType, Device, ReduceOp,
    contract::{BufferDesc, Kernel, Memory, Op, Point, Range, Result, Submission, TimelineId, Waited},
};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::time::{Duration, Instant};

const BYTES: u64 = 4 << 20;

/// Submits `ops` and waits for their end.
fn run(device: &dyn Device, timeline: TimelineId, value: &mut u64, ops: &[Op]) -> Result<()> {
    let commands = device.prepare(ops)?;
    *value += 1;
    let signal = Point { timeline, value: *value };
    device.submit(&[Submission { commands: Some(commands), waits: &[], signal }])?;
    let deadline = Instant::now() + Duration::from_secs(60);
    while device.wait_any(&[signal], device.wakes(), deadline)? != Waited::Reached {
        assert!(Instant::now() < deadline, "{} does not answer", device.info().name);
    }
    if device.limits().resubmit {
        device.destroy_commands(commands);
    }
    Ok(())
}

fn kernels(c: &mut Criterion) {
    let mut group = c.benchmark_group("kernels");
    for name in common::names() {
        let device = common::open(&name);
        let desc = BufferDesc { size: BYTES, memory: Memory::Device, exportable: false };
        let made = || -> Result<_> {
            let buffers = [device.create_buffer(&desc)?, device.create_buffer(&desc)?];
            for buffer in buffers {
                device.write(Range::new(buffer, 0, BYTES), &vec![0x3c; BYTES as usize])?;
            }
            Ok((buffers.map(|b| Range::new(b, 0, BYTES)), device.create_timeline(false)?))
        };
        let ([a, b], timeline) = made().unwrap();
        let mut value = 0;
        group.throughput(Throughput::Bytes(2 * BYTES));
        for dtype in DataType::ALL {
            for op in [ReduceOp::Sum, ReduceOp::Max].into_iter().filter(|op| device.limits().reduces(*op, dtype)) {
                let (stores, sources, scales) = (vec![b], vec![a, b], Vec::new());
                let kernel = Op::Kernel(Kernel { stores, sources, op, dtype, finish: None, scales, wire: None });
                group.bench_function(BenchmarkId::new(format!("{name} {op}"), dtype), |bench| {
                    bench.iter(|| run(&*device, timeline, &mut value, std::slice::from_ref(&kernel)).unwrap());
                });
            }
        }
    }
}

criterion_group! { name = benches; config = common::quick(); targets = kernels }
criterion_main!(benches);
