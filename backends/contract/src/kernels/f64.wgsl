// An accumulator is the bits of an f64. NaN and signed zero are told apart, and ordered, as integers.

fn is_nan(a: u64) -> bool { return (a & 0x7ffffffffffffffflu) > 0x7ff0000000000000lu; }
fn key(a: u64) -> u64 { return a ^ select(0x8000000000000000lu, 0xfffffffffffffffflu, (a >> 63u) == 1lu); }

fn sum(a: u64, b: u64) -> u64 { return bitcast<u64>(bitcast<f64>(a) + bitcast<f64>(b)); }
fn product(a: u64, b: u64) -> u64 { return bitcast<u64>(bitcast<f64>(a) * bitcast<f64>(b)); }
// No branches: SwiftShader's compiler takes minutes over a chain of early returns.
fn least(a: u64, b: u64) -> u64 {
    return select(select(b, a, key(a) <= key(b)), 0x7ff8000000000000lu, is_nan(a) | is_nan(b));
}
fn greatest(a: u64, b: u64) -> u64 {
    return select(select(b, a, key(a) >= key(b)), 0x7ff8000000000000lu, is_nan(a) | is_nan(b));
}
// Going through an integer that no compiler knows, the product cannot be fused with the addition that follows.
fn scaled(a: u64, scale: u32) -> u64 {
    return product(a, bitcast<u64>(f64(bitcast<f32>(scale)))) ^ u64(params.zero);
}
fn divide(a: u64) -> u64 { return product(a, join(params.reciprocal.x, params.reciprocal.y)); }
fn finish(a: u64) -> u64 { return select(a, 0x7ff8000000000000lu, is_nan(a)); }
