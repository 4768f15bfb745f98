//! What a call costs before it is submitted, where its plan is not kept: building a schedule, and lowering it.
//! `cargo bench -p allhands-benches --bench schedules`
mod common;

use allhands::{
    Algorithm, Collective, Path, Shape,
    schedule::{Chunking, build, lower},
};
use criterion::{BenchmarkId, criterion_group, criterion_main};
use std::hint::black_box;

fn schedules(c: &mut criterion::Criterion) {
    let mut group = c.benchmark_group("schedules");
    for ranks in [2, 8] {
        for (algorithm, chunks) in [(Algorithm::OneShot, 1), (Algorithm::TwoShot, 1), (Algorithm::TwoShot, 64)] {
            let shape = Shape { collective: Collective::AllReduce, ranks, count: 1 << 20, in_place: true };
            let chunking = Chunking { chunk: shape.count / chunks, distance: 2 };
            let what = format!("{algorithm} of {chunks} chunks over {ranks}");
            group.bench_function(BenchmarkId::new("build", &what), |b| {
                b.iter(|| build(black_box(&shape), algorithm, chunking));
            });
            let Some(schedule) = build(&shape, algorithm, chunking) else { continue };
            for path in [Path::SharedHost, Path::Copied] {
                let links = lower::Links::uniform(ranks, path, true, 8);
                group.bench_function(BenchmarkId::new(format!("lower to {path}"), &what), |b| {
                    b.iter(|| lower::lower(black_box(&schedule), &links));
                });
            }
        }
    }
}

criterion_group! { name = benches; config = common::quick(); targets = schedules }
criterion_main!(benches);
