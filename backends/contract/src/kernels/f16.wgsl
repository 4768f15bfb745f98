// f16 by integers: what hardware packs is not rounded alike everywhere.

fn decode(h: u32) -> u32 {
    let sign = (h & 0x8000u) << 16u;
    let magnitude = h & 0x7fffu;
    // A subnormal is its fraction times 2^-24: exact, and normal as an f32.
    let small = bitcast<u32>(f32(magnitude) * bitcast<f32>(0x33800000u));
    let large = (magnitude << 13u) + select(0x38000000u, 0x70000000u, magnitude >= 0x7c00u);
    return sign | select(large, small, magnitude < 0x400u);
}
fn encode(a: u32) -> u32 {
    let sign = (a >> 16u) & 0x8000u;
    let magnitude = a & 0x7fffffffu;
    let large = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13u) & 1u)) >> 13u;
    let fraction = (magnitude & 0x7fffffu) | 0x800000u;
    let shift = 126u - max(min(magnitude >> 23u, 112u), 101u);
    let small = (fraction + (1u << (shift - 1u)) - 1u + ((fraction >> shift) & 1u)) >> shift;
    let finite = select(large, small, magnitude < 0x38800000u);
    let h = select(finite, 0x7c00u, magnitude >= 0x47800000u);
    return select(sign | h, 0x7e00u, magnitude > 0x7f800000u);
}
