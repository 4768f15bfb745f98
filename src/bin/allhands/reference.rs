//! What goes in and what must come out: inputs drawn from (rank, index, repetition), and the reference that folds
//! them in rank order by the rules of [`allhands::ReduceOp`].
use crate::kind::{Job, Kind};
use allhands::{DataType, ReduceOp};
use half::{bf16, f16};
use std::fmt::Display;

/// An element that can be drawn and folded. Drawn floats are finite, of both signs, of magnitude 1/4 to 4: their folds
/// are finite in f32 up to 60 ranks, so the reference needs no rule for NaN.
pub trait Value: bytemuck::Pod + PartialEq + Display {
    const TYPE: DataType;
    /// What an output holds before a call: a NaN, or an unlikely integer.
    const POISON: Self;
    /// The distance from 1 to the next value; of an integer 0.
    const EPSILON: f64;
    /// What a fold accumulates in: f32 (f64 for f64); the integer itself, or 64 bits of it for an average.
    type Accumulator: Copy + Default;
    fn draw(hash: u32) -> Self;
    fn load(self) -> Self::Accumulator;
    fn add(a: Self::Accumulator, b: Self::Accumulator) -> Self::Accumulator;
    fn multiply(a: Self::Accumulator, b: Self::Accumulator) -> Self::Accumulator;
    fn divide(a: Self::Accumulator, ranks: usize) -> Self::Accumulator;
    /// Rounds, or wraps.
    fn store(a: Self::Accumulator) -> Self;
    fn is_less(self, other: Self) -> bool;
    fn as_f64(self) -> f64;
}

/// Elements folded at a time: the accumulators stay in the first-level cache.
const BLOCK: usize = 1024;

macro_rules! floats {
    ($($t:ident $name:ident in $acc:ident, poison $poison:literal, $draw:expr, $load:expr, $store:expr;)*) => {$(
        impl Value for $t {
            const TYPE: DataType = DataType::$name;
            const POISON: $t = $t::from_bits($poison);
            const EPSILON: f64 = 1.0 / (1_u64 << ($t::MANTISSA_DIGITS - 1)) as f64;
            type Accumulator = $acc;
            fn draw(hash: u32) -> $t {
                $t::from_bits($draw(hash))
            }
            fn load(self) -> $acc {
                $load(self)
            }
            fn add(a: $acc, b: $acc) -> $acc {
                a + b
            }
            fn multiply(a: $acc, b: $acc) -> $acc {
                a * b
            }
            fn divide(a: $acc, ranks: usize) -> $acc {
                a * (1.0 / ranks as $acc)
            }
            fn store(a: $acc) -> $t {
                $store(a)
            }
            fn is_less(self, other: $t) -> bool {
                self < other
            }
            fn as_f64(self) -> f64 {
                self.into()
            }
        }
    )*};
}
floats! {
    f32 F32 in f32, poison 0x7fc0_dead, |h: u32| h & 0x807f_ffff | (125 + (h >> 23 & 3)) << 23, |x| x, |x| x;
    f16 F16 in f32, poison 0x7ead, |h: u32| (h & 0x83ff | (13 + (h >> 16 & 3)) << 10) as u16, f16::to_f32, f16::from_f32;
    bf16 Bf16 in f32, poison 0x7fad, |h: u32| (h & 0x807f | (125 + (h >> 16 & 3)) << 7) as u16, bf16::to_f32, bf16::from_f32;
    f64 F64 in f64, poison 0x7ff8_dead_dead_dead, |h: u32| {
        let (high, low) = (u64::from(h), u64::from(mix(h)));
        (high & 1) << 63 | (1021 + (high >> 1 & 3)) << 52 | (high >> 3 & 0xf_ffff) << 32 | low
    }, |x| x, |x| x;
}

macro_rules! integers {
    ($($t:ident $name:ident in $wide:ident;)*) => {$(impl Value for $t {
        const TYPE: DataType = DataType::$name;
        const POISON: $t = 0xdead_beef_u32 as $t;
        const EPSILON: f64 = 0.0;
        type Accumulator = $wide;
        fn draw(hash: u32) -> $t {
            (u64::from(mix(hash)) << 32 | u64::from(hash)) as $t
        }
        fn load(self) -> $wide {
            self as $wide
        }
        fn add(a: $wide, b: $wide) -> $wide {
            a.wrapping_add(b)
        }
        fn multiply(a: $wide, b: $wide) -> $wide {
            a.wrapping_mul(b)
        }
        fn divide(a: $wide, ranks: usize) -> $wide {
            a / ranks as $wide
        }
        fn store(a: $wide) -> $t {
            a as $t
        }
        fn is_less(self, other: $t) -> bool {
            self < other
        }
        fn as_f64(self) -> f64 {
            self as f64
        }
    })*};
}
integers! {
    i8 I8 in i64; i32 I32 in i64; i64 I64 in i64;
    u8 U8 in u64; u32 U32 in u64; u64 U64 in u64;
}

/// Fills a rank's input for one repetition.
pub fn draw<T: Value>(rank: u32, repetition: u32, out: &mut [T]) {
    let seed = mix(rank.wrapping_mul(0x9e37_79b9) ^ mix(repetition.wrapping_add(0x85eb_ca6b)));
    out.iter_mut().enumerate().for_each(|(i, x)| *x = T::draw(mix((i as u32).wrapping_mul(0x9e37_79b1) ^ seed)));
}

/// `out[i]` = the fold of `sources[..][i]` in order.
pub fn fold<T: Value>(op: ReduceOp, sources: &[&[T]], out: &mut [T]) {
    let ranks = sources.len();
    match op {
        ReduceOp::Sum => accumulate(sources, out, T::add, |a| a),
        ReduceOp::Product => accumulate(sources, out, T::multiply, |a| a),
        ReduceOp::Average => accumulate(sources, out, T::add, |a| T::divide(a, ranks)),
        ReduceOp::Min => choose(sources, out, |a, b| if b.is_less(a) { b } else { a }),
        ReduceOp::Max => choose(sources, out, |a, b| if a.is_less(b) { b } else { a }),
    }
}

/// How far a result in another order than the ranks' may lie from the fold. With u half the distance from 1 to the
/// next value of the type (every hop rounds to it), a sum of n values in any order is within (n-1) u S of the exact one, S
/// the sum of magnitudes; so two orders differ by at most 2 n u S. An average by that over n and its own rounding, which n
/// over n-1 covers for n > 1; a product by 2 n u of itself.
pub fn tolerances<T: Value>(op: ReduceOp, sources: &[&[T]], folded: &[T]) -> Vec<f64> {
    let unit = sources.len() as f64 * T::EPSILON;
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

fn accumulate<T: Value>(
    sources: &[&[T]],
    out: &mut [T],
    f: impl Fn(T::Accumulator, T::Accumulator) -> T::Accumulator,
    finish: impl Fn(T::Accumulator) -> T::Accumulator,
) {
    let mut sums = [T::Accumulator::default(); BLOCK];
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let part = block * BLOCK..block * BLOCK + out.len();
        let sums = &mut sums[..out.len()];
        sums.iter_mut().zip(&sources[0][part.clone()]).for_each(|(s, x)| *s = x.load());
        for source in &sources[1..] {
            sums.iter_mut().zip(&source[part.clone()]).for_each(|(s, x)| *s = f(*s, x.load()));
        }
        out.iter_mut().zip(sums).for_each(|(o, s)| *o = T::store(finish(*s)));
    }
}

fn choose<T: Value>(sources: &[&[T]], out: &mut [T], f: impl Fn(T, T) -> T) {
    out.copy_from_slice(&sources[0][..out.len()]);
    for source in &sources[1..] {
        out.iter_mut().zip(*source).for_each(|(o, x)| *o = f(*o, *x));
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
