//! Small-message latency and large-message bandwidth of all_reduce, and the time to make a communicator, on each
//! device of `ALLHANDS_DEVICES`. `ALLHANDS_DEVICES=cpu,proxy-vulkan:0 cargo bench -p allhands-benches --bench calls`
mod common;

use allhands::{Communicator, ReduceOp};
use common::{names, open, ranks};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// From making a call to knowing that it is done.
fn latency(c: &mut Criterion) {
    let mut group = c.benchmark_group("latency");
    for name in names() {
        for n in [2, 4] {
            for bytes in [4_u64, 16 << 10] {
                let (comm, buffers) = ranks(&name, n, bytes / 4);
                group.bench_function(BenchmarkId::new(format!("{name} x {n}"), bytes), |b| {
                    b.iter(|| comm.all_reduce(&buffers, ReduceOp::Max).and_then(|call| call.wait()).unwrap());
                });
            }
        }
    }
}

/// Bytes of one rank's buffer over the time of a call.
fn bandwidth(c: &mut Criterion) {
    let mut group = c.benchmark_group("bandwidth");
    for name in names() {
        for n in [2, 4] {
            for bytes in [1_u64 << 20, 16 << 20] {
                let (comm, buffers) = ranks(&name, n, bytes / 4);
                group.throughput(Throughput::Bytes(bytes));
                group.bench_function(BenchmarkId::new(format!("{name} x {n}"), bytes), |b| {
                    b.iter(|| comm.all_reduce(&buffers, ReduceOp::Max).and_then(|call| call.wait()).unwrap());
                });
            }
        }
    }
}

/// Sibling devices, tests, proofs, measurements: what is kept on disk makes it faster.
fn build(c: &mut Criterion) {
    let mut group = c.benchmark_group("build");
    for name in names() {
        for n in [2, 8] {
            let devices: Vec<_> = (0..n).map(|_| open(&name)).collect();
            group.bench_function(BenchmarkId::new(&name, n), |b| {
                b.iter(|| devices.iter().fold(Communicator::builder(), |b, d| b.rank(d.clone())).build().unwrap());
            });
        }
    }
}

criterion_group! { name = benches; config = common::quick(); targets = latency, bandwidth, build }
criterion_main!(benches);
