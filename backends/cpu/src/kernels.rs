//! The reductions, bit for bit: the reference for every other backend.
//!
//! A fold goes tile by tile, so that the accumulators stay in the first-level cache: the first source is loaded into
//! them, each further source is folded in, and the finished tile is written to every store. Sums, products and averages
//! of floats accumulate in f32 (f64 for f64) and round once. Minima and maxima compare integer keys that are in the
//! order of the floats, with -0 below +0 and NaN beyond the end.
use crate::{
    stream,
    wire::{As, Half, Place, Same, Wire},
};
use allhands_contract::{DataType, ReduceOp};
use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use std::marker::PhantomData;

/// What a fold works on.
pub(crate) struct Ranges {
    pub stores: Vec<Place>,
    pub sources: Vec<Place>,
    /// What each source is multiplied by; empty: none is.
    pub scales: Vec<f32>,
    /// Elements.
    pub count: usize,
    /// The ranks that an average divides by.
    pub finish: Option<u32>,
}

/// `store[i] = finish(fold(sources[0][i], sources[1][i], ...))` for `count` elements.
///
/// # Safety
/// - `count` elements at every address are mapped, and writable at the stores.
/// - Nobody else writes them meanwhile, and nobody else reads the stores.
/// - A store is exactly a source, or overlaps none; stores do not overlap. There is a source.
pub(crate) type Fold = unsafe fn(&Ranges);

/// The kernel for `op` on `dtype`, if there is one; `wire`: the type that f32 crosses as.
pub(crate) fn find(op: ReduceOp, dtype: DataType, wire: Option<DataType>) -> Option<Fold> {
    Some(match (dtype, wire) {
        (DataType::F32, None) => of::<f32, Same>(op),
        (DataType::F32, Some(DataType::F16)) => of::<f32, As<f16>>(op),
        (DataType::F32, Some(DataType::Bf16)) => of::<f32, As<bf16>>(op),
        (_, Some(_)) => return None,
        (DataType::F16, _) => of::<f16, Same>(op),
        (DataType::Bf16, _) => of::<bf16, Same>(op),
        (DataType::F64, _) => of::<f64, Same>(op),
        (DataType::I8, _) => of::<i8, Same>(op),
        (DataType::U8, _) => of::<u8, Same>(op),
        (DataType::I32, _) => of::<i32, Same>(op),
        (DataType::U32, _) => of::<u32, Same>(op),
        (DataType::I64, _) => of::<i64, Same>(op),
        (DataType::U64, _) => of::<u64, Same>(op),
    })
}

fn of<T: Number, W: Wire<T>>(op: ReduceOp) -> Fold {
    match op {
        ReduceOp::Sum => fold::<Sum<T>, W>,
        ReduceOp::Product => fold::<Product<T>, W>,
        ReduceOp::Min => fold::<Min<T>, W>,
        ReduceOp::Max => fold::<Max<T>, W>,
        ReduceOp::Average => fold::<Average<T>, W>,
    }
}

/// Elements of a tile: short, so that loads of the next are under way while the last is stored.
pub(crate) const TILE: usize = 64;

// Shared memory is only ever read and written through its addresses: no reference to it is made. The loops are over
// local arrays, which overlap nothing, so that the compiler makes vector code of them in a debug build too.
unsafe fn fold<R: Reduction, W: Wire<R::Item>>(ranges: &Ranges) {
    let finish = R::finish(ranges.finish);
    let mut accumulators = [R::Accumulator::default(); TILE];
    let mut items = [R::Item::zeroed(); TILE];
    for start in (0..ranges.count).step_by(TILE) {
        let elements = TILE.min(ranges.count - start);
        let (accumulators, items) = (&mut accumulators[..elements], &mut items[..elements]);
        for (n, source) in ranges.sources.iter().enumerate() {
            // SAFETY: the caller's promise: the tile is mapped and nobody writes it.
            unsafe {
                match (n, ranges.scales.get(n)) {
                    (0, None) => W::load(*source, start, accumulators, |_, item| R::load(item)),
                    (_, None) => W::load(*source, start, accumulators, |a, item| R::fold(a, R::load(item))),
                    (0, Some(by)) => W::load(*source, start, accumulators, |_, item| R::scale(R::load(item), *by)),
                    (_, Some(by)) => {
                        W::load(*source, start, accumulators, |a, item| R::fold(a, R::scale(R::load(item), *by)))
                    }
                }
            }
        }
        items.iter_mut().zip(accumulators).for_each(|(item, a)| *item = W::round(R::store(*a, finish)));
        for store in &ranges.stores {
            // SAFETY: the caller's promise, as above; a source that is exactly this store has been read.
            unsafe { W::store(items, *store, start) };
        }
    }
    stream::done();
}

/// A reduction of a type of element.
trait Reduction {
    type Item: Pod;
    type Accumulator: Copy + Default;
    type Finish: Copy;
    fn load(item: Self::Item) -> Self::Accumulator;
    fn fold(a: Self::Accumulator, b: Self::Accumulator) -> Self::Accumulator;
    /// Only sums of floats have scales.
    #[inline(always)]
    fn scale(a: Self::Accumulator, _: f32) -> Self::Accumulator {
        a
    }
    fn finish(ranks: Option<u32>) -> Self::Finish;
    fn store(a: Self::Accumulator, finish: Self::Finish) -> Self::Item;
}

/// What the five reductions ask of a type of element.
trait Number: Pod {
    /// What sums and products accumulate in.
    type Accumulator: Copy + Default;
    fn load(self) -> Self::Accumulator;
    fn add(a: Self::Accumulator, b: Self::Accumulator) -> Self::Accumulator;
    fn scale(a: Self::Accumulator, by: f32) -> Self::Accumulator;
    fn multiply(a: Self::Accumulator, b: Self::Accumulator) -> Self::Accumulator;
    fn store(a: Self::Accumulator) -> Self;

    /// What averages accumulate in, and what they are divided by.
    type Wide: Copy + Default;
    fn load_wide(self) -> Self::Wide;
    fn add_wide(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// Nearest `1/ranks` for a float, `ranks` itself for an integer.
    fn share(ranks: u32) -> Self::Wide;
    fn store_share(a: Self::Wide, share: Self::Wide) -> Self;

    /// Integers in the order of the elements.
    type Key: Copy + Ord + Default;
    /// NaN is below all.
    fn low_key(self) -> Self::Key;
    /// NaN is above all.
    fn high_key(self) -> Self::Key;
    fn from_key(key: Self::Key) -> Self;
}

macro_rules! reduction {
    ($name:ident, $accumulator:ident, $load:ident, $fold:expr, $store:ident $(, $scale:expr)?) => {
        struct $name<T>(PhantomData<T>);
        impl<T: Number> Reduction for $name<T> {
            type Item = T;
            type Accumulator = T::$accumulator;
            type Finish = ();
            #[inline(always)]
            fn load(item: T) -> Self::Accumulator {
                item.$load()
            }
            #[inline(always)]
            fn fold(a: Self::Accumulator, b: Self::Accumulator) -> Self::Accumulator {
                $fold(a, b)
            }
            $(#[inline(always)]
            fn scale(a: Self::Accumulator, by: f32) -> Self::Accumulator {
                $scale(a, by)
            })?
            fn finish(_: Option<u32>) {}
            #[inline(always)]
            fn store(a: Self::Accumulator, (): ()) -> T {
                T::$store(a)
            }
        }
    };
}
reduction!(Sum, Accumulator, load, T::add, store, T::scale);
reduction!(Product, Accumulator, load, T::multiply, store);
reduction!(Min, Key, low_key, Ord::min, from_key);
reduction!(Max, Key, high_key, Ord::max, from_key);

struct Average<T>(PhantomData<T>);
impl<T: Number> Reduction for Average<T> {
    type Item = T;
    type Accumulator = T::Wide;
    type Finish = T::Wide;
    #[inline(always)]
    fn load(item: T) -> T::Wide {
        item.load_wide()
    }
    #[inline(always)]
    fn fold(a: T::Wide, b: T::Wide) -> T::Wide {
        T::add_wide(a, b)
    }
    fn finish(ranks: Option<u32>) -> T::Wide {
        T::share(ranks.unwrap_or(1)) // a share of 1 leaves every value as it is
    }
    #[inline(always)]
    fn store(a: T::Wide, share: T::Wide) -> T {
        T::store_share(a, share)
    }
}

/// From the bits of a float to an integer in its order, and back: a set sign reverses the order of the others.
macro_rules! flip {
    ($key:ty, $bits:expr) => {{
        let bits = $bits as $key;
        bits ^ ((bits >> (<$key>::BITS - 1)) & <$key>::MAX)
    }};
}

macro_rules! floats {
    ($($float:ident, accumulator $acc:ident, bits $bits:ident, quiet NaN $nan:literal, $load:expr, $store:expr;)*) => {$(
        impl Number for $float {
            type Accumulator = $acc;
            #[inline(always)]
            fn load(self) -> $acc {
                $load(self)
            }
            #[inline(always)]
            fn scale(a: $acc, by: f32) -> $acc {
                a * $acc::from(by)
            }
            #[inline(always)]
            fn add(a: $acc, b: $acc) -> $acc {
                a + b
            }
            #[inline(always)]
            fn multiply(a: $acc, b: $acc) -> $acc {
                a * b
            }
            #[inline(always)]
            fn store(a: $acc) -> Self {
                if a.is_nan() { $float::from_bits($nan) } else { $store(a) }
            }

            type Wide = $acc;
            #[inline(always)]
            fn load_wide(self) -> $acc {
                $load(self)
            }
            #[inline(always)]
            fn add_wide(a: $acc, b: $acc) -> $acc {
                a + b
            }
            fn share(ranks: u32) -> $acc {
                1.0 / ranks as $acc
            }
            #[inline(always)]
            fn store_share(a: $acc, share: $acc) -> Self {
                <Self as Number>::store(a * share)
            }

            type Key = $bits;
            #[inline(always)]
            fn low_key(self) -> $bits {
                if self.load().is_nan() { $bits::MIN } else { flip!($bits, self.to_bits()) }
            }
            #[inline(always)]
            fn high_key(self) -> $bits {
                if self.load().is_nan() { $bits::MAX } else { flip!($bits, self.to_bits()) }
            }
            #[inline(always)]
            fn from_key(key: $bits) -> Self {
                let float = $float::from_bits(flip!($bits, key) as _);
                if float.load().is_nan() { $float::from_bits($nan) } else { float }
            }
        }
    )*};
}
floats! {
    f32, accumulator f32, bits i32, quiet NaN 0x7fc0_0000, |x| x, |x| x;
    f64, accumulator f64, bits i64, quiet NaN 0x7ff8_0000_0000_0000, |x| x, |x| x;
    f16, accumulator f32, bits i16, quiet NaN 0x7e00, Half::decode, f16::encode;
    bf16, accumulator f32, bits i16, quiet NaN 0x7fc0, Half::decode, bf16::encode;
}

macro_rules! integers {
    ($($integer:ident, wide $wide:ident;)*) => {$(
        impl Number for $integer {
            type Accumulator = $integer;
            #[inline(always)]
            fn load(self) -> Self {
                self
            }
            #[inline(always)]
            fn add(a: Self, b: Self) -> Self {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn scale(a: Self, _: f32) -> Self {
                a // only floats have scales
            }
            #[inline(always)]
            fn multiply(a: Self, b: Self) -> Self {
                a.wrapping_mul(b)
            }
            #[inline(always)]
            fn store(a: Self) -> Self {
                a
            }

            type Wide = $wide;
            #[inline(always)]
            fn load_wide(self) -> $wide {
                self as $wide
            }
            #[inline(always)]
            fn add_wide(a: $wide, b: $wide) -> $wide {
                a.wrapping_add(b)
            }
            fn share(ranks: u32) -> $wide {
                ranks as $wide
            }
            #[inline(always)]
            fn store_share(a: $wide, share: $wide) -> Self {
                (a / share) as $integer
            }

            type Key = $integer;
            #[inline(always)]
            fn low_key(self) -> Self {
                self
            }
            #[inline(always)]
            fn high_key(self) -> Self {
                self
            }
            #[inline(always)]
            fn from_key(key: Self) -> Self {
                key
            }
        }
    )*};
}
integers! {
    i8, wide i64; i32, wide i64; i64, wide i64;
    u8, wide u64; u32, wide u64; u64, wide u64;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Address;
    use allhands_contract::Element;

    /// Runs a kernel; the result is stored over the first source and beside it, there past the caches if it can be.
    fn run<T: Element>(op: ReduceOp, sources: &[Vec<T>], finish: Option<u32>) -> Vec<T> {
        let mut data = sources.to_vec();
        let mut beside = vec![T::zeroed(); data[0].len()];
        let place = |v: &mut Vec<T>| Place { start: Address(v.as_mut_ptr().cast()), narrow: false, streams: false };
        let sources: Vec<Place> = data.iter_mut().map(place).collect();
        let aside = Place { streams: beside.as_ptr().addr().is_multiple_of(stream::ALIGNED), ..place(&mut beside) };
        let stores = vec![aside, sources[0]];
        let ranges = Ranges { stores, sources, scales: Vec::new(), count: beside.len(), finish };
        // SAFETY: every address is of a vector of `beside.len()` elements that nobody else uses.
        unsafe { find(op, T::TYPE, None).unwrap()(&ranges) };
        assert_eq!(bytemuck::cast_slice::<T, u8>(&data[0]), bytemuck::cast_slice::<T, u8>(&beside), "{op}");
        beside
    }

    const SPECIAL: [u32; 16] = [
        0x0000_0000, // +0
        0x8000_0000, // -0
        0x0000_0001, // the least subnormal
        0x807f_ffff, // the greatest negative subnormal
        0x7f80_0000, // +inf
        0xff80_0000, // -inf
        0x7fc0_0000, // the canonical NaN
        0xffff_ffff, // a negative NaN with a payload
        0x7f80_0001, // a signalling NaN
        0x7f7f_ffff, // the greatest
        0x3f80_0000, // 1
        0xbf80_0001, // -1 and a bit
        0x4b80_0000, // 2^24
        0x3f7f_ffff, // 1 less a bit
        0x3eaa_aaab, // 1/3
        0xc2c8_0000, // -100
    ];

    /// The rules for f32, one value after the other.
    fn by_the_rules(op: ReduceOp, values: &[f32], finish: Option<u32>) -> u32 {
        let extreme = |above| {
            if values.iter().any(|v| v.is_nan()) {
                return f32::NAN;
            }
            values.iter().copied().reduce(|a, b| if b.total_cmp(&a) == above { b } else { a }).unwrap()
        };
        let sum = || values.iter().copied().reduce(|a, b| a + b).unwrap();
        let result = match op {
            ReduceOp::Sum => sum(),
            ReduceOp::Product => values.iter().copied().reduce(|a, b| a * b).unwrap(),
            ReduceOp::Min => extreme(std::cmp::Ordering::Less),
            ReduceOp::Max => extreme(std::cmp::Ordering::Greater),
            ReduceOp::Average => finish.map_or_else(sum, |n| sum() * (1.0 / n as f32)),
        };
        if result.is_nan() { 0x7fc0_0000 } else { result.to_bits() }
    }

    #[test]
    fn f32_follows_the_rules_bit_for_bit() {
        // Every triple of special values, so that lengths go over many blocks and end within one.
        let n = SPECIAL.len();
        let column = |stride: usize| (0..n * n * n).map(|i| f32::from_bits(SPECIAL[i / stride % n])).collect();
        let columns: [Vec<f32>; 3] = [column(1), column(n), column(n * n)];
        for used in 1..=3 {
            for len in [1, 7, TILE - 1, TILE, TILE + 1, n * n * n] {
                let sources: Vec<Vec<f32>> = columns[..used].iter().map(|c| c[..len].to_vec()).collect();
                for (op, finish) in ReduceOp::ALL.into_iter().flat_map(|op| [(op, None), (op, Some(3))]) {
                    for (i, got) in run(op, &sources, finish).into_iter().enumerate() {
                        let values: Vec<f32> = sources.iter().map(|s| s[i]).collect();
                        let want = by_the_rules(op, &values, finish);
                        assert_eq!(got.to_bits(), want, "{op} of {values:?}, finish {finish:?}: got {got}");
                    }
                }
            }
        }
    }

    #[test]
    fn f64_accumulates_in_f64_and_orders_by_bits() {
        let run = |op, a: f64, b: f64| run(op, &[vec![a], vec![b]], Some(3))[0].to_bits();
        let nan = 0x7ff8_0000_0000_0000;
        assert_eq!(run(ReduceOp::Sum, 1e300, 1.0), 1e300f64.to_bits());
        assert_eq!(run(ReduceOp::Sum, 1.0, f64::EPSILON), (1.0 + f64::EPSILON).to_bits());
        assert_eq!(run(ReduceOp::Average, 1.0, 1.0), (2.0 * (1.0 / 3.0f64)).to_bits());
        assert_eq!(run(ReduceOp::Sum, f64::INFINITY, f64::NEG_INFINITY), nan);
        for (a, b) in [(0.0, -0.0), (-0.0, 0.0)] {
            assert_eq!(run(ReduceOp::Min, a, b), (-0.0f64).to_bits());
            assert_eq!(run(ReduceOp::Max, a, b), 0.0f64.to_bits());
        }
        for op in [ReduceOp::Min, ReduceOp::Max] {
            assert_eq!(run(op, -1.0, f64::from_bits(u64::MAX)), nan);
            assert_eq!(run(op, f64::from_bits(0x7ff0_0000_0000_0001), f64::INFINITY), nan);
        }
    }

    #[test]
    fn integers_wrap_and_averages_truncate() {
        use ReduceOp::*;
        fn one<T: Element>(op: ReduceOp, values: &[T], finish: Option<u32>) -> T {
            run(op, &values.iter().map(|v| vec![*v]).collect::<Vec<_>>(), finish)[0]
        }
        assert_eq!(one(Sum, &[i32::MAX, 1], None), i32::MIN);
        assert_eq!(one(Product, &[u32::MAX, u32::MAX], None), 1);
        assert_eq!(one(Product, &[i8::MIN, -1], None), i8::MIN);
        assert_eq!(one(Min, &[3u8, 200, 7], None), 3);
        assert_eq!(one(Max, &[-3i64, i64::MIN, -7], None), -3);
        assert_eq!(one(Max, &[1u64, u64::MAX], None), u64::MAX);
        // The sum of an average does not wrap in the type itself ...
        assert_eq!(one(Average, &[i32::MAX, i32::MAX, i32::MAX], Some(3)), i32::MAX);
        assert_eq!(one(Average, &[u8::MAX, u8::MAX], Some(2)), u8::MAX);
        // ... but in 64 bits, and the division truncates towards zero.
        assert_eq!(one(Average, &[i64::MAX, 1], Some(2)), i64::MIN / 2);
        assert_eq!(one(Average, &[u64::MAX, 3], Some(2)), 1);
        assert_eq!(one(Average, &[-7i32, 0], Some(2)), -3);
        assert_eq!(one(Average, &[-7i8, 1, 1], Some(3)), -1);
        assert_eq!(one(Average, &[i32::MAX, 1], None), i32::MIN);
    }

    #[test]
    fn no_element_is_touched_beyond_the_count() {
        let mut store = vec![7i32; TILE + 8];
        let source = vec![1i32; TILE + 8];
        let place = |start: *mut i32| Place { start: Address(start.cast()), narrow: false, streams: false };
        let (to, from) = (place(store.as_mut_ptr()), place(source.as_ptr().cast_mut()));
        for count in [0, 3, TILE + 5] {
            let (stores, sources) = (vec![to], vec![from, from]);
            let ranges = Ranges { stores, sources, scales: Vec::new(), count, finish: None };
            // SAFETY: `count` elements of vectors that nobody else uses; sources are not written.
            unsafe { find(ReduceOp::Sum, DataType::I32, None).unwrap()(&ranges) };
            let touched = store.iter().take_while(|v| **v == 2).count();
            assert_eq!((touched, store[count..].iter().all(|v| *v == 7)), (count, true));
        }
    }
}
