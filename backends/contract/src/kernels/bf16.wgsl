// bf16 by integers.

fn decode(h: u32) -> u32 { return h << 16u; }
fn encode(a: u32) -> u32 {
    let rounded = (a + 0x7fffu + ((a >> 16u) & 1u)) >> 16u;
    return select(rounded, 0x7fc0u, (a & 0x7fffffffu) > 0x7f800000u);
}
