// f32 that crosses narrow: what is finite stays finite.

fn narrow(a: u32) -> u32 {
    let h = encode(a);
    let overflows = (h & 0x7fffu) == INFINITYu && (a & 0x7fffffffu) < 0x7f800000u;
    return select(h, h - 1u, overflows);
}
fn through(a: u32) -> u32 { return decode(narrow(a)); }
