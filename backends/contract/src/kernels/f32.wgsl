// An accumulator is the bits of an f32. NaN and signed zero are told apart, and ordered, as integers.

fn is_nan(a: u32) -> bool { return (a & 0x7fffffffu) > 0x7f800000u; }
fn key(a: u32) -> u32 { return a ^ select(0x80000000u, 0xffffffffu, (a >> 31u) == 1u); }

fn sum(a: u32, b: u32) -> u32 { return bitcast<u32>(bitcast<f32>(a) + bitcast<f32>(b)); }
fn product(a: u32, b: u32) -> u32 { return bitcast<u32>(bitcast<f32>(a) * bitcast<f32>(b)); }
// No branches: SwiftShader's compiler takes minutes over a chain of early returns.
fn least(a: u32, b: u32) -> u32 {
    return select(select(b, a, key(a) <= key(b)), 0x7fc00000u, is_nan(a) | is_nan(b));
}
fn greatest(a: u32, b: u32) -> u32 {
    return select(select(b, a, key(a) >= key(b)), 0x7fc00000u, is_nan(a) | is_nan(b));
}
// Going through an integer that no compiler knows, the product cannot be fused with the addition that follows.
fn scaled(a: u32, scale: u32) -> u32 { return product(a, scale) ^ params.zero; }
// Nothing precedes this multiplication that it could be fused with.
fn divide(a: u32) -> u32 { return product(a, params.reciprocal.x); }
fn finish(a: u32) -> u32 { return select(a, 0x7fc00000u, is_nan(a)); }
