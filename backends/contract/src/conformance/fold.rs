//! The reference for reductions, in scalar code that follows the rules of [`ReduceOp`] word for word. It knows
//! nothing of how a backend computes. Elements are their bits, in a u64.
use crate::{DataType, ReduceOp};

/// What a fold gives, and whether a device that flushes subnormals may give something else.
#[derive(Clone, Copy, Debug)]
pub(super) struct Folded {
    pub bits: u64,
    pub subnormal: bool,
}

/// `finish(fold(sources))`.
pub(super) fn fold(op: ReduceOp, dtype: DataType, sources: &[u64], finish: Option<u32>) -> Folded {
    if dtype.is_float() {
        floats(op, dtype, sources, finish, &[])
    } else {
        Folded { bits: integers(op, dtype, sources, finish), subnormal: false }
    }
}

/// The sum of products with `scales`.
pub(super) fn scaled(dtype: DataType, sources: &[u64], scales: &[f32]) -> Folded {
    floats(ReduceOp::Sum, dtype, sources, None, scales)
}

/// `finish(fold(sources))` of f32 that crosses as `wire`.
pub(super) fn crossed(op: ReduceOp, wire: DataType, sources: &[u64], finish: Option<u32>) -> Folded {
    let rounded: Vec<u64> = sources.iter().map(|x| through(wire, *x)).collect();
    let folded = fold(op, DataType::F32, &rounded, finish);
    Folded { bits: through(wire, folded.bits), ..folded }
}

/// An f32 that has been `wire`.
pub(super) fn through(wire: DataType, bits: u64) -> u64 {
    encode(DataType::F32, decode(wire, saturate(wire, bits)))
}

/// An f32 as `wire`: what is finite stays finite.
pub(super) fn saturate(wire: DataType, bits: u64) -> u64 {
    let (x, (sign, infinity, _)) = (decode(DataType::F32, bits), layout(wire));
    let h = encode(wire, x);
    if x.is_finite() && h & (sign - 1) == infinity { h - 1 } else { h }
}

fn integers(op: ReduceOp, dtype: DataType, sources: &[u64], finish: Option<u32>) -> u64 {
    use DataType::{I8, I32, I64};
    let signed = matches!(dtype, I8 | I32 | I64);
    let bits = dtype.size() as u32 * 8;
    let wide = |x: &u64| {
        let x = x << (64 - bits);
        if signed { ((x as i64) >> (64 - bits)) as u64 } else { x >> (64 - bits) }
    };
    let less = |a: u64, b: u64| if signed { (a as i64) < b as i64 } else { a < b };
    let mut values = sources.iter().map(wide);
    let first = values.next().unwrap_or_default();
    let folded = values.fold(first, |a, x| match op {
        ReduceOp::Sum | ReduceOp::Average => a.wrapping_add(x),
        ReduceOp::Product => a.wrapping_mul(x),
        ReduceOp::Min => {
            if less(x, a) {
                x
            } else {
                a
            }
        }
        ReduceOp::Max => {
            if less(a, x) {
                x
            } else {
                a
            }
        }
    });
    let finished = match (op, finish) {
        (ReduceOp::Average, Some(n)) if signed => (folded as i64 / i64::from(n)) as u64,
        (ReduceOp::Average, Some(n)) => folded / u64::from(n),
        _ => folded,
    };
    finished & (u64::MAX >> (64 - bits))
}

fn floats(op: ReduceOp, dtype: DataType, sources: &[u64], finish: Option<u32>, scales: &[f32]) -> Folded {
    if matches!(op, ReduceOp::Min | ReduceOp::Max) {
        return extremes(op, dtype, sources);
    }
    // f64 holds every value of the smaller types, and `round` takes each step back to the accumulator's type: a sum,
    // product or quotient of two f32 in f64 and then in f32 is the one that f32 arithmetic gives.
    let small = dtype != DataType::F64;
    let mut subnormal = false;
    let mut round = |x: f64| {
        let x = if small { f64::from(x as f32) } else { x };
        let least = if small { f64::from(f32::MIN_POSITIVE) } else { f64::MIN_POSITIVE };
        subnormal |= x.abs() <= least && x != 0.0;
        x
    };
    let mut values = Vec::new();
    for (i, bits) in sources.iter().enumerate() {
        let x = round(decode(dtype, *bits));
        values.push(scales.get(i).map_or(x, |scale| round(x * f64::from(*scale))));
    }
    let mut folded = values.first().copied().unwrap_or_default();
    for x in values.into_iter().skip(1) {
        folded = round(if op == ReduceOp::Product { folded * x } else { folded + x });
    }
    if let (ReduceOp::Average, Some(n)) = (op, finish) {
        let share = round(1.0 / f64::from(n));
        folded = round(folded * share);
    }
    Folded { bits: encode(dtype, folded), subnormal }
}

/// By the bits: as integers of sign and magnitude, in which -0 comes just before +0.
fn extremes(op: ReduceOp, dtype: DataType, sources: &[u64]) -> Folded {
    let (sign, infinity, nan) = layout(dtype);
    let magnitude = |x: u64| x & (sign - 1);
    if sources.iter().any(|x| magnitude(*x) > infinity) {
        return Folded { bits: nan, subnormal: false };
    }
    let key = |x: &u64| if x & sign == 0 { magnitude(*x) as i64 } else { !(magnitude(*x) as i64) };
    let chosen = match op {
        ReduceOp::Min => sources.iter().copied().min_by_key(key),
        _ => sources.iter().copied().max_by_key(key),
    };
    let subnormal = dtype != DataType::F16 && sources.iter().any(|x| is_subnormal(dtype, *x));
    Folded { bits: chosen.unwrap_or_default(), subnormal }
}

fn is_subnormal(dtype: DataType, bits: u64) -> bool {
    let (sign, infinity, _) = layout(dtype);
    let magnitude = bits & (sign - 1);
    magnitude != 0 && magnitude & infinity == 0
}

/// The sign bit, infinity, and the canonical NaN.
pub(super) fn layout(dtype: DataType) -> (u64, u64, u64) {
    match dtype {
        DataType::F16 => (0x8000, 0x7c00, 0x7e00),
        DataType::Bf16 => (0x8000, 0x7f80, 0x7fc0),
        DataType::F64 => (1 << 63, 0x7ff << 52, 0xfff << 51),
        _ => (1 << 31, 0xff << 23, 0x1ff << 22),
    }
}

fn decode(dtype: DataType, bits: u64) -> f64 {
    match dtype {
        DataType::F64 => f64::from_bits(bits),
        DataType::F32 => f64::from(f32::from_bits(bits as u32)),
        DataType::Bf16 => f64::from(f32::from_bits((bits as u32) << 16)),
        _ => {
            let (exponent, fraction) = ((bits >> 10 & 31) as i32, (bits & 1023) as f64);
            let magnitude = match exponent {
                31 if fraction != 0.0 => f64::NAN,
                31 => f64::INFINITY,
                0 => fraction * power(-24),
                _ => (1024.0 + fraction) * power(exponent - 25),
            };
            if bits & 0x8000 == 0 { magnitude } else { -magnitude }
        }
    }
}

/// 2 to the power of `exponent`, which is that of a normal number.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// To nearest, ties to even. `x` is a value of the accumulator's type.
fn encode(dtype: DataType, x: f64) -> u64 {
    let (sign, infinity, nan) = layout(dtype);
    if x.is_nan() {
        return nan;
    }
    let magnitude = match dtype {
        DataType::F64 => return x.to_bits(),
        DataType::F32 => return u64::from((x as f32).to_bits()),
        DataType::Bf16 => {
            let bits = u64::from((x.abs() as f32).to_bits());
            (bits + 0x7fff + (bits >> 16 & 1)) >> 16
        }
        _ => {
            // Its unit in the last place: 2^-24 for subnormals, above that 2^-10 of its power of two.
            let exponent = ((x.to_bits() >> 52 & 0x7ff) as i32 - 1023).clamp(-14, 16);
            let units = (x.abs() * power(10 - exponent)).round_ties_even() as u64;
            // A carry out of the fraction counts the exponent up by itself.
            units.saturating_add(((exponent + 14) as u64) << 10).min(infinity)
        }
    };
    magnitude | if x.is_sign_negative() { sign } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_codes_round_trip_and_round_to_even() {
        for bits in 0..0x10000u64 {
            for dtype in [DataType::F16, DataType::Bf16] {
                let (sign, infinity, nan) = layout(dtype);
                let want = if bits & (sign - 1) > infinity { nan } else { bits };
                assert_eq!(encode(dtype, decode(dtype, bits)), want, "{dtype} {bits:04x}");
            }
        }
        for (x, want) in [(65519.0, 0x7bff), (65520.0, 0x7c00), (-1e30, 0xfc00), (2049.0, 0x6800), (2051.0, 0x6802)] {
            assert_eq!(encode(DataType::F16, x), want, "{x}");
        }
        assert_eq!(encode(DataType::F16, 2f64.powi(-25)), 0);
        assert_eq!(encode(DataType::F16, 1.5 * 2f64.powi(-25)), 1);
        assert_eq!(encode(DataType::Bf16, 1.0 + 2f64.powi(-8)), 0x3f80);
        assert_eq!(encode(DataType::Bf16, f64::from(f32::MAX)), 0x7f80);
    }

    #[test]
    fn the_rules() {
        use DataType::*;
        use ReduceOp::*;
        let bits = |op, dtype, sources: &[u64], finish| fold(op, dtype, sources, finish).bits;
        assert_eq!(bits(Sum, I8, &[127, 1], None), 0x80);
        assert_eq!(bits(Average, I8, &[0xff, 0xfe, 0xfe], Some(2)), 0xfe); // -5 / 2 towards zero
        assert_eq!(bits(Average, U8, &[255, 255], Some(2)), 255); // 64 bits do not wrap here
        assert_eq!(bits(Average, U8, &[255, 255], None), 254);
        assert_eq!(bits(Min, F32, &[0, 1 << 31], None), 1 << 31);
        assert_eq!(bits(Max, F32, &[1 << 31, 0], None), 0);
        assert_eq!(bits(Max, F32, &[1 << 31, 0xffff_ffff], None), 0x7fc0_0000);
        assert_eq!(bits(Sum, F32, &[1 << 31], None), 1 << 31);
        let f = |x: f32| u64::from(x.to_bits());
        assert_eq!(bits(Average, F32, &[f(1.0), f(1.0), f(5.0)], Some(3)), f(7.0 * (1.0f32 / 3.0)));
        assert_eq!(bits(Sum, F32, &[f(1e8), f(1.0), f(-1e8)], None), f(0.0));
        assert!(fold(Product, F32, &[f(1e-20), f(1e-20)], None).subnormal);
        assert_eq!(bits(Max, I32, &[0xffff_ffff, 1], None), 1);
        assert_eq!(bits(Max, U32, &[0xffff_ffff, 1], None), 0xffff_ffff);
    }
}
