//! What goes in and what must come out: inputs drawn from (rank, index, repetition), and the reference that folds
//! them in rank order by the rules of [`allhands::ReduceOp`].
use crate::kind::{Job, Kind};
use allhands::{DataType, ReduceOp};
use std::fmt::Display;

/// An element that can be drawn and folded. Drawn floats are finite, of both signs, of magnitude 1/4 to 4: their folds
/// are finite up to 60 ranks, so the reference needs no rule for NaN.
pub trait Value: bytemuck::Pod + PartialEq + Display {
    const TYPE: DataType;
    /// What an output holds before a call: a NaN, or an unlikely integer.
    const POISON: Self;
    fn draw(hash: u32) -> Self;
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn average(sources: &[&[Self]], out: &mut [Self]);
    fn as_f64(self) -> f64;
}

/// Elements folded at a time: the accumulators stay in the first-level cache.
const BLOCK: usize = 1024;

impl Value for f32 {
    const TYPE: DataType = DataType::F32;
    const POISON: f32 = f32::from_bits(0x7fc0_dead);
    fn draw(hash: u32) -> f32 {
        f32::from_bits(hash & 0x807f_ffff | (125 + (hash >> 23 & 3)) << 23)
    }
    fn add(self, other: f32) -> f32 {
        self + other
    }
    fn multiply(self, other: f32) -> f32 {
        self * other
    }
    fn least(self, other: f32) -> f32 {
        if other < self { other } else { self }
    }
    fn average(sources: &[&[f32]], out: &mut [f32]) {
        fold_with(sources, out, f32::add);
        let share = 1.0 / sources.len() as f32;
        out.iter_mut().for_each(|x| *x *= share);
    }
    fn as_f64(self) -> f64 {
        self.into()
    }
}

macro_rules! integers {
    ($($t:ident $wide:ident $name:ident),*) => {$(impl Value for $t {
        const TYPE: DataType = DataType::$name;
        const POISON: $t = 0xdead_beef_u32 as $t;
        fn draw(hash: u32) -> $t {
            hash as $t
        }
        fn add(self, other: $t) -> $t {
            self.wrapping_add(other)
        }
        fn multiply(self, other: $t) -> $t {
            self.wrapping_mul(other)
        }
        fn least(self, other: $t) -> $t {
            self.min(other)
        }
        fn average(sources: &[&[$t]], out: &mut [$t]) {
            let ranks = sources.len() as $wide;
            let mut sums = [0; BLOCK];
            for (block, out) in out.chunks_mut(BLOCK).enumerate() {
                let sums = &mut sums[..out.len()];
                sums.fill(0);
                for source in sources {
                    sums.iter_mut().zip(&source[block * BLOCK..]).for_each(|(s, x)| *s += *x as $wide);
                }
                out.iter_mut().zip(sums).for_each(|(o, s)| *o = (*s / ranks) as $t);
            }
        }
        fn as_f64(self) -> f64 {
            self.into()
        }
    })*};
}
integers!(i32 i64 I32, u32 u64 U32);

/// Fills a rank's input for one repetition.
pub fn draw<T: Value>(rank: u32, repetition: u32, out: &mut [T]) {
    let seed = mix(rank.wrapping_mul(0x9e37_79b9) ^ mix(repetition.wrapping_add(0x85eb_ca6b)));
    out.iter_mut().enumerate().for_each(|(i, x)| *x = T::draw(mix((i as u32).wrapping_mul(0x9e37_79b1) ^ seed)));
}

/// `out[i]` = the fold of `sources[..][i]` in order.
pub fn fold<T: Value>(op: ReduceOp, sources: &[&[T]], out: &mut [T]) {
    match op {
        ReduceOp::Sum => fold_with(sources, out, T::add),
        ReduceOp::Product => fold_with(sources, out, T::multiply),
        ReduceOp::Min => fold_with(sources, out, T::least),
        ReduceOp::Max => fold_with(sources, out, |a, b| if a.least(b) == a { b } else { a }),
        ReduceOp::Average => T::average(sources, out),
    }
}

/// How far a result in another order than the ranks' may lie from the fold. With u = 2^-24, a sum of n values in any
/// order is within (n-1) u S of the exact one, S the sum of magnitudes; so two orders differ by at most n 2^-23 S. An
/// average by that over n and its own rounding, which n over n-1 covers for n > 1; a product by n 2^-23 of itself.
pub fn tolerances<T: Value>(op: ReduceOp, sources: &[&[T]], folded: &[T]) -> Vec<f64> {
    let unit = sources.len() as f64 * f64::from(f32::EPSILON);
    let magnitude = |i: usize| sources.iter().map(|s| s[i].as_f64().abs()).sum::<f64>();
    let one = |i| match op {
        ReduceOp::Product => unit * T::as_f64(folded[i]).abs(),
        ReduceOp::Average => unit * magnitude(i) / sources.len() as f64,
        _ => unit * magnitude(i),
    };
    (0..folded.len()).map(one).collect()
}

/// What the call must leave in `rank`'s output. `folded` is the fold of all inputs where the collective reduces.
pub fn expect<T: Value>(job: &Job, rank: u32, inputs: &[&[T]], folded: &[T], out: &mut [T]) {
    let (rank, count, root) = (rank as usize, job.count as usize, job.root as usize);
    let block = |data: &[T], i: usize| -> std::ops::Range<usize> {
        debug_assert!((i + 1) * count <= data.len());
        i * count..(i + 1) * count
    };
    match job.kind {
        Kind::AllReduce | Kind::Reduce => out.copy_from_slice(folded),
        Kind::ReduceScatter => out.copy_from_slice(&folded[block(folded, rank)]),
        Kind::Broadcast => out.copy_from_slice(inputs[root]),
        Kind::Scatter => out.copy_from_slice(&inputs[root][block(inputs[root], rank)]),
        Kind::AllGather | Kind::Gather => {
            inputs.iter().enumerate().for_each(|(i, input)| out[i * count..][..count].copy_from_slice(input));
        }
        Kind::AllToAll => {
            let from =
                |(i, input): (usize, &&[T])| out[i * count..][..count].copy_from_slice(&input[block(input, rank)]);
            inputs.iter().enumerate().for_each(from);
        }
        Kind::SendRecv => out.copy_from_slice(inputs[(rank + inputs.len() - 1) % inputs.len()]),
        Kind::Barrier => {}
    }
}

fn fold_with<T: Value>(sources: &[&[T]], out: &mut [T], f: impl Fn(T, T) -> T) {
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let part = block * BLOCK..block * BLOCK + out.len();
        out.copy_from_slice(&sources[0][part.clone()]);
        for source in &sources[1..] {
            out.iter_mut().zip(&source[part.clone()]).for_each(|(o, x)| *o = f(*o, *x));
        }
    }
}

/// A finaliser of 32-bit hashes: every input bit reaches every output bit.
fn mix(mut x: u32) -> u32 {
    x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_depend_on_rank_index_and_repetition() {
        let mut all = Vec::new();
        for (rank, repetition) in [(0, 0), (1, 0), (0, 1), (2, 7)] {
            let mut data = [0u32; 500];
            draw(rank, repetition, &mut data);
            all.extend(data);
        }
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 2000);
        let mut floats = [0f32; 1000];
        draw(3, 1, &mut floats);
        assert!(floats.iter().all(|x| (0.25..4.0).contains(&x.abs())));
        assert!((400..600).contains(&floats.iter().filter(|x| **x < 0.0).count()));
    }

    #[test]
    fn folds_follow_the_rules() {
        fn folded<T: Value>(op: ReduceOp, sources: &[&[T]]) -> Vec<T> {
            let mut out = vec![T::POISON; sources[0].len()];
            fold(op, sources, &mut out);
            out
        }
        // In rank order: (1e8 + 1) - 1e8 is 0 in f32.
        assert_eq!(folded(ReduceOp::Sum, &[&[1e8f32], &[1.0], &[-1e8]]), [0.0]);
        assert_eq!(folded(ReduceOp::Average, &[&[1f32], &[1.0], &[0.5]]), [2.5 * (1.0f32 / 3.0)]);
        assert_eq!(folded(ReduceOp::Max, &[&[1f32, -3.0], &[2.0, -4.0]]), [2.0, -3.0]);
        assert_eq!(folded(ReduceOp::Sum, &[&[i32::MAX], &[1]]), [i32::MIN]);
        assert_eq!(folded(ReduceOp::Average, &[&[i32::MAX, -3], &[i32::MAX, 0]]), [i32::MAX, -1]);
        assert_eq!(folded(ReduceOp::Average, &[&[u32::MAX], &[u32::MAX - 1]]), [u32::MAX - 1]);
        assert_eq!(folded(ReduceOp::Product, &[&[0x10001u32], &[0x10001]]), [0x20001]);
        assert_eq!(folded(ReduceOp::Min, &[&[5i32], &[-7]]), [-7]);
        // Longer than a block.
        let long: Vec<u32> = (0..3000).collect();
        assert!(folded(ReduceOp::Sum, &[&long, &long]).iter().enumerate().all(|(i, x)| *x == 2 * i as u32));
        assert!(folded(ReduceOp::Average, &[&long, &long]).iter().enumerate().all(|(i, x)| *x == i as u32));
    }

    #[test]
    fn blocks_go_where_they_belong() {
        let job = |kind| Job { kind, ranks: 2, root: 1, count: 1 };
        let inputs: [&[u32]; 2] = [&[10, 11], &[20, 21]];
        let expected = |kind, rank, len| {
            let mut out = vec![0; len];
            expect(&job(kind), rank, &inputs, &[30, 32], &mut out);
            out
        };
        assert_eq!(expected(Kind::AllToAll, 0, 2), [10, 20]);
        assert_eq!(expected(Kind::AllToAll, 1, 2), [11, 21]);
        assert_eq!(expected(Kind::Scatter, 0, 1), [20]);
        assert_eq!(expected(Kind::ReduceScatter, 1, 1), [32]);
        let mut out = [0; 2];
        expect(&job(Kind::AllGather), 0, &[&[1u32], &[2]], &[], &mut out);
        assert_eq!(out, [1, 2]);
        expect(&Job { count: 2, ..job(Kind::SendRecv) }, 0, &inputs, &[], &mut out);
        assert_eq!(out, [20, 21]);
    }

    #[test]
    fn another_order_is_within_tolerance() {
        let mut data = vec![vec![0f32; 4000]; 7];
        data.iter_mut().enumerate().for_each(|(rank, d)| draw(rank as u32, 0, d));
        let forth: Vec<&[f32]> = data.iter().map(Vec::as_slice).collect();
        let back: Vec<&[f32]> = forth.iter().rev().copied().collect();
        let (mut a, mut b) = (vec![0f32; 4000], vec![0f32; 4000]);
        for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Average] {
            fold(op, &forth, &mut a);
            fold(op, &back, &mut b);
            let bounds = tolerances(op, &forth, &a);
            assert!((0..4000).all(|i| f64::from((a[i] - b[i]).abs()) <= bounds[i]), "{op}");
            assert!(a != b, "{op}");
            assert!((0..4000).any(|i| f64::from((a[i] * 1.0001 - b[i]).abs()) > bounds[i]), "{op}");
        }
    }
}
