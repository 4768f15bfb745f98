//! The reductions as WGSL, written once for every backend that has shaders.
//!
//! A compute shader is made of a common frame (`reduce.wgsl`), a body for its [`Layout`], and two functions on the bits
//! of an element, for its pair of [`ReduceOp`] and [`DataType`]: `fold(a, b)` and `finish(a)`. They keep the rules of [`ReduceOp`] whatever a
//! shader compiler assumes: WGSL lets it believe that there are no NaNs and no signed zeros, so both are told apart,
//! and ordered, by their bits as integers. Between folds the accumulator is an f32, rounded after every addition;
//! average multiplies in [`finish`](Params::reciprocal), after the last.
//!
//! What the shader is given beside its four storage buffers is [`Params`], as immediates (push constants).
use crate::{DataType, ReduceOp};

/// The name of the entry point.
pub const ENTRY: &str = "reduce";
/// Invocations of a workgroup, along x.
pub const WORKGROUP: u32 = 256;
/// Storage buffers bound, all read and written: `@group(0)`, bindings 0 to 3.
pub const BINDINGS: usize = 4;
/// Most sources of one dispatch.
pub const SOURCES: usize = 8;
/// Most stores of one dispatch.
pub const STORES: usize = 4;
/// Bytes of [`Params`].
pub const PARAMS_SIZE: u32 = size_of::<Params>() as u32;

/// The immediates of a dispatch.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Elements.
    pub count: u32,
    /// Invocations in all: each takes every `stride`-th element.
    pub stride: u32,
    /// What average multiplies by: see [`reciprocal`].
    pub reciprocal: u32,
    /// The first word of each store in its binding.
    pub store: [u32; STORES],
    /// The first word of each source in its binding.
    pub source: [u32; SOURCES],
}

/// Which binding each source and each store lies in. A shader is made for one layout, so that it is straight code.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    /// Of the sources, in the order in which they are folded: 1 to [`SOURCES`].
    pub sources: Vec<u8>,
    /// Of the stores: 1 to [`STORES`].
    pub stores: Vec<u8>,
}

/// The bits that [`Params::reciprocal`] takes: of the f32 nearest to `1 / ranks` on the last fold, else of 1.
pub fn reciprocal(finish: Option<u32>) -> u32 {
    (1.0 / finish.unwrap_or(1) as f32).to_bits()
}

/// Every pair that has a shader. Integer average sums in 64 bits, which WGSL lacks.
pub fn all() -> impl Iterator<Item = (ReduceOp, DataType)> {
    let types = [DataType::F32, DataType::I32, DataType::U32];
    types.into_iter().flat_map(|t| ReduceOp::ALL.into_iter().map(move |op| (op, t))).filter(|&(op, t)| exists(op, t))
}

fn exists(op: ReduceOp, dtype: DataType) -> bool {
    match dtype {
        DataType::F32 => true,
        DataType::I32 | DataType::U32 => op != ReduceOp::Average,
        _ => false,
    }
}

/// The shader that reduces `dtype` by `op`, if there is one, for buffers bound as `layout` says.
pub fn source(op: ReduceOp, dtype: DataType, layout: &Layout) -> Option<String> {
    if !exists(op, dtype) {
        return None;
    }
    let mut body = Vec::new();
    for (i, binding) in layout.sources.iter().enumerate() {
        let word = format!("words{binding}[params.source[{i}] + i]");
        body.push(if i == 0 { format!("var bits = {word};") } else { format!("bits = fold(bits, {word});") });
    }
    body.push("bits = finish(bits);".into());
    for (i, binding) in layout.stores.iter().enumerate() {
        body.push(format!("words{binding}[params.store[{i}] + i] = bits;"));
    }
    let body: Vec<String> = body.iter().map(|line| format!("        {line}")).collect();
    let (fold, finish) = match dtype {
        DataType::F32 => {
            (fold_f32(op).to_string(), FINISH_F32.replace("SCALE", if op == ReduceOp::Average { SCALE } else { KEEP }))
        }
        _ => (fold_integer(op, dtype), "fn finish(a: u32) -> u32 { return a; }\n".into()),
    };
    let frame = include_str!("kernels/reduce.wgsl").replace("WORKGROUP", &WORKGROUP.to_string());
    Some(format!("{}\n{fold}\n{finish}", frame.replace("BODY", &body.join("\n"))))
}

fn fold_f32(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Sum | ReduceOp::Average => {
            "fn fold(a: u32, b: u32) -> u32 { return bitcast<u32>(bitcast<f32>(a) + bitcast<f32>(b)); }"
        }
        ReduceOp::Product => {
            "fn fold(a: u32, b: u32) -> u32 { return bitcast<u32>(bitcast<f32>(a) * bitcast<f32>(b)); }"
        }
        ReduceOp::Min => concat!(
            "fn key(a: u32) -> u32 { return a ^ select(0x80000000u, 0xffffffffu, (a >> 31u) == 1u); }\n",
            "fn fold(a: u32, b: u32) -> u32 {\n",
            "    if is_nan(a) || is_nan(b) { return 0x7fc00000u; }\n",
            "    return select(b, a, key(a) <= key(b));\n",
            "}",
        ),
        ReduceOp::Max => concat!(
            "fn key(a: u32) -> u32 { return a ^ select(0x80000000u, 0xffffffffu, (a >> 31u) == 1u); }\n",
            "fn fold(a: u32, b: u32) -> u32 {\n",
            "    if is_nan(a) || is_nan(b) { return 0x7fc00000u; }\n",
            "    return select(b, a, key(a) >= key(b));\n",
            "}",
        ),
    }
}

/// The multiplication stands on its own: nothing precedes it that it could be fused with.
const SCALE: &str = "let a = bitcast<u32>(bitcast<f32>(bits) * bitcast<f32>(params.reciprocal));";
const KEEP: &str = "let a = bits;";
const FINISH_F32: &str = "
fn is_nan(a: u32) -> bool { return (a & 0x7fffffffu) > 0x7f800000u; }
fn finish(bits: u32) -> u32 {
    SCALE
    return select(a, 0x7fc00000u, is_nan(a));
}
";

fn fold_integer(op: ReduceOp, dtype: DataType) -> String {
    let least = if op == ReduceOp::Min { "min" } else { "max" };
    let fold = match op {
        ReduceOp::Sum | ReduceOp::Average => "a + b".to_string(),
        ReduceOp::Product => "a * b".to_string(),
        ReduceOp::Min | ReduceOp::Max if dtype == DataType::I32 => {
            format!("bitcast<u32>({least}(bitcast<i32>(a), bitcast<i32>(b)))")
        }
        ReduceOp::Min | ReduceOp::Max => format!("{least}(a, b)"),
    };
    format!("fn fold(a: u32, b: u32) -> u32 {{ return {fold}; }}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reciprocal_is_the_nearest() {
        for ranks in 1..1000u32 {
            assert_eq!(f32::from_bits(reciprocal(Some(ranks))), (1.0 / f64::from(ranks)) as f32);
        }
        assert_eq!(f32::from_bits(reciprocal(None)), 1.0);
    }

    #[test]
    fn there_is_a_source_for_exactly_the_pairs_listed() {
        for dtype in DataType::ALL {
            for op in ReduceOp::ALL {
                let layout = Layout { sources: vec![0, 1], stores: vec![2] };
                assert_eq!(source(op, dtype, &layout).is_some(), all().any(|pair| pair == (op, dtype)), "{op} {dtype}");
            }
        }
    }
}
