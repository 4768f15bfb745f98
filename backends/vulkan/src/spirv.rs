//! What WGSL cannot say of its arithmetic, added to the SPIR-V that naga makes of it.
//!
//! WGSL lets a compiler flush subnormals, believe that there are no NaNs, and fuse a product with a sum. SPIR-V can
//! forbid each: by execution modes of the entry point (SPV_KHR_float_controls), for each width of floats that the
//! module has, and by a decoration of every result that is not to be fused. A module is a header and a sequence of instructions in a fixed order of sections, so
//! new ones are put at the ends of theirs.

/// Which rules a device offers for floats of 32 and of 64 bits.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct FloatControls {
    pub bits32: Rules,
    pub bits64: Rules,
}

/// Which rules a device offers for floats of one width.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Rules {
    /// NaN, infinities and the sign of zero are kept.
    pub keep_nan: bool,
    /// Subnormals are kept.
    pub keep_subnormals: bool,
    /// Results are rounded to nearest, ties to even.
    pub round_to_even: bool,
}

const HEADER: usize = 5;
const OP_EXTENSION: u16 = 10;
const OP_ENTRY_POINT: u16 = 15;
const OP_EXECUTION_MODE: u16 = 16;
const OP_CAPABILITY: u16 = 17;
const OP_TYPE_FLOAT: u16 = 22;
const OP_DECORATE: u16 = 71;
const NO_CONTRACTION: u32 = 42;
/// Each is a capability and an execution mode: number of the one, number of the other.
const DENORM_PRESERVE: (u32, u32) = (4464, 4459);
const SIGNED_ZERO_INF_NAN_PRESERVE: (u32, u32) = (4466, 4461);
const ROUNDING_MODE_RTE: (u32, u32) = (4467, 4462);

/// Adds to `module` every rule that the device offers, and forbids contraction of all its float arithmetic. `None` if it is not a
/// module with an entry point.
pub(crate) fn harden(module: &[u32], controls: FloatControls) -> Option<Vec<u32>> {
    // Ends of the sections that grow.
    let (mut capabilities, mut extensions, mut modes, mut decorations) = (HEADER, HEADER, HEADER, None);
    let (mut entry, mut results, mut widths) = (None, Vec::new(), Vec::new());
    let mut at = HEADER;
    while at < module.len() {
        let (opcode, length) = (module[at] as u16, (module[at] >> 16) as usize);
        let words = module.get(at..at + length).filter(|w| !w.is_empty())?;
        let end = at + length;
        match opcode {
            OP_CAPABILITY => (capabilities, extensions) = (end, end),
            OP_EXTENSION => extensions = end,
            OP_ENTRY_POINT => (entry, modes) = (words.get(2).copied(), end),
            OP_EXECUTION_MODE => modes = end,
            _ if is_type_or_global(opcode) => {
                decorations = decorations.or(Some(at));
                widths.extend(words.get(2).filter(|_| opcode == OP_TYPE_FLOAT));
            }
            _ if is_float_arithmetic(opcode) => results.push(*words.get(2)?),
            _ => {}
        }
        at = end;
    }
    let (entry, decorations) = (entry?, decorations?);
    let rules: Vec<(u32, u32, u32)> = [(32, controls.bits32), (64, controls.bits64)]
        .into_iter()
        .filter(|(width, _)| widths.contains(width))
        .flat_map(|(width, offered)| offered.list().map(move |(capability, mode)| (capability, mode, width)))
        .collect();
    let mut hardened = module[..capabilities].to_vec();
    for (i, (capability, ..)) in rules.iter().enumerate() {
        if rules[..i].iter().all(|(earlier, ..)| earlier != capability) {
            instruction(&mut hardened, OP_CAPABILITY, &[*capability]);
        }
    }
    hardened.extend(&module[capabilities..extensions]);
    if !rules.is_empty() {
        instruction(&mut hardened, OP_EXTENSION, &text("SPV_KHR_float_controls"));
    }
    hardened.extend(&module[extensions..modes]);
    rules.iter().for_each(|(_, mode, width)| instruction(&mut hardened, OP_EXECUTION_MODE, &[entry, *mode, *width]));
    hardened.extend(&module[modes..decorations]);
    results.iter().for_each(|id| instruction(&mut hardened, OP_DECORATE, &[*id, NO_CONTRACTION]));
    hardened.extend(&module[decorations..]);
    Some(hardened)
}

impl Rules {
    /// Capability and execution mode of each.
    fn list(self) -> impl Iterator<Item = (u32, u32)> {
        let all = [
            (self.keep_subnormals, DENORM_PRESERVE),
            (self.keep_nan, SIGNED_ZERO_INF_NAN_PRESERVE),
            (self.round_to_even, ROUNDING_MODE_RTE),
        ];
        all.into_iter().filter_map(|(offered, rule)| offered.then_some(rule))
    }
}

fn instruction(words: &mut Vec<u32>, opcode: u16, operands: &[u32]) {
    words.push((operands.len() as u32 + 1) << 16 | u32::from(opcode));
    words.extend(operands);
}

/// A string as SPIR-V holds one: bytes from the low end of each word, and at least one zero after them.
fn text(s: &str) -> Vec<u32> {
    let mut bytes = s.as_bytes().to_vec();
    bytes.resize(bytes.len() / 4 * 4 + 4, 0);
    bytes.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect()
}

/// OpType..., OpConstant..., OpSpecConstant..., OpUndef, OpVariable: what follows the decorations.
fn is_type_or_global(opcode: u16) -> bool {
    matches!(opcode, 1 | 19..=39 | 41..=46 | 48..=52 | 59)
}

/// FNegate, FAdd, FSub, FMul, FDiv, FRem, FMod, products of vectors and matrices, Dot.
fn is_float_arithmetic(opcode: u16) -> bool {
    matches!(opcode, 127 | 129 | 131 | 133 | 136 | 140..=148)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const RULES: Rules = Rules { keep_nan: true, keep_subnormals: true, round_to_even: true };
    const ALL: FloatControls = FloatControls { bits32: RULES, bits64: RULES };

    /// One compute shader: two additions, of which one of integers, and a product.
    fn module() -> Vec<u32> {
        let mut words = vec![0x0723_0203, 0x0001_0300, 0, 100, 0];
        let mut op = |opcode, operands: &[u32]| instruction(&mut words, opcode, operands);
        op(17, &[1]); // Shader
        op(14, &[0, 1]); // OpMemoryModel
        op(15, &[5, 7, 0x6e69_616d, 0]); // OpEntryPoint GLCompute %7 "main"
        op(16, &[7, 17, 256, 1, 1]); // LocalSize
        op(71, &[9, 33, 0]); // OpDecorate
        op(19, &[1]); // OpTypeVoid
        op(22, &[2, 32]); // OpTypeFloat
        op(54, &[1, 7, 0, 3]); // OpFunction
        op(129, &[2, 20, 10, 11]); // OpFAdd
        op(128, &[3, 21, 12, 13]); // OpIAdd
        op(133, &[2, 22, 20, 11]); // OpFMul
        words
    }

    fn instructions(words: &[u32]) -> Vec<(u16, Vec<u32>)> {
        let (mut at, mut found) = (HEADER, Vec::new());
        while at < words.len() {
            let length = (words[at] >> 16) as usize;
            found.push((words[at] as u16, words[at + 1..at + length].to_vec()));
            at += length;
        }
        found
    }

    #[test]
    fn rules_go_to_the_ends_of_their_sections() {
        let hardened = instructions(&harden(&module(), ALL).unwrap());
        let opcodes: Vec<u16> = hardened.iter().map(|i| i.0).collect();
        assert_eq!(
            opcodes,
            [17, 17, 17, 17, 10, 14, 15, 16, 16, 16, 16, 71, 71, 71, 19, 22, 54, 129, 128, 133],
            "capabilities, extension, memory model, entry point, modes, decorations, types, function"
        );
        let modes: Vec<&[u32]> = hardened.iter().filter(|i| i.0 == 16).map(|i| &*i.1).collect();
        assert_eq!(modes[1..], [[7, 4459, 32], [7, 4461, 32], [7, 4462, 32]]);
        let decorated: Vec<&[u32]> = hardened.iter().filter(|i| i.0 == 71).map(|i| &*i.1).collect();
        assert_eq!(decorated[1..], [[20, 42], [22, 42]], "the integer addition is left alone");
        assert_eq!(hardened[4].1, text("SPV_KHR_float_controls"));
    }

    #[test]
    fn only_what_is_offered_is_asked_for() {
        let only = |controls| {
            let hardened = instructions(&harden(&module(), controls).unwrap());
            let mut counts = HashMap::new();
            hardened.iter().for_each(|i| *counts.entry(i.0).or_insert(0) += 1);
            (counts[&17], counts.get(&10).copied().unwrap_or(0), counts[&16])
        };
        assert_eq!(only(FloatControls::default()), (1, 0, 1));
        let nan = Rules { keep_nan: true, ..Default::default() };
        assert_eq!(only(FloatControls { bits32: nan, ..Default::default() }), (2, 1, 2));
        assert_eq!(only(FloatControls { bits64: RULES, ..Default::default() }), (1, 0, 1), "it has no f64");
        assert_eq!(only(ALL), (4, 1, 4));
    }

    #[test]
    fn what_is_no_module_is_refused() {
        assert_eq!(harden(&module()[..HEADER], ALL), None);
        let mut broken = module();
        let last = broken.len() - 5;
        broken[last] = 0; // an instruction of no length
        assert_eq!(harden(&broken, ALL), None);
        assert_eq!(harden(&module()[..module().len() - 1], ALL), None);
    }

    #[test]
    fn strings_end_with_a_zero() {
        assert_eq!(text("abc"), [0x0063_6261]);
        assert_eq!(text("abcd"), [0x6463_6261, 0]);
    }
}
