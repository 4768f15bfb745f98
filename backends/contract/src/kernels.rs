//! The reductions as WGSL, written once for every backend that has shaders.
//!
//! A compute shader is made of a common frame (`reduce.wgsl`), the arithmetic of its accumulator (`f32.wgsl`, `f64.wgsl`,
//! `integer.wgsl`), the code of its elements (`f16.wgsl`, `bf16.wgsl`; `wire.wgsl`), and a body of straight code for
//! its [`Layout`]. They keep the rules of [`ReduceOp`] whatever a shader compiler assumes: WGSL lets it believe that
//! there are no NaNs and no signed zeros, so both are told apart, and ordered, by their bits as integers. Between
//! folds the accumulator is rounded after every addition; average multiplies by a
//! [`reciprocal`](Params::reciprocal) after the last.
//!
//! What the shader is given beside its four storage buffers is [`Params`], as immediates (push constants).
//! [`dispatch`] makes both of a [`Kernel`].
use crate::{DataType, Kernel, Range, ReduceOp};
use std::fmt::Write;

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
/// Most loads and stores of one turn of a shader's loop: of [`SOURCES`] and [`STORES`] of two words each.
pub const ACCESSES: usize = 2 * (SOURCES + STORES);
/// Bytes of [`Params`].
pub const PARAMS_SIZE: u32 = size_of::<Params>() as u32;

/// The immediates of a dispatch.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Turns of all loops together: a word of packed elements each, or an element.
    pub turns: u32,
    /// Invocations in all: each takes every `stride`-th turn.
    pub stride: u32,
    /// Elements, where a turn may have one that is not there: in a [`Layout::wire`].
    pub elements: u32,
    /// 0, which no compiler knows.
    pub zero: u32,
    /// What average multiplies by: the f32 nearest to 1 / ranks on the last fold, else 1. Of f64: low word first.
    pub reciprocal: [u32; 2],
    /// The first word of each store in its binding.
    pub store: [u32; STORES],
    /// The first word of each source in its binding.
    pub source: [u32; SOURCES],
    /// What each source is multiplied by, as the bits of an f32.
    pub scale: [u32; SOURCES],
}

/// Where a source or a store lies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Bound {
    /// Its binding.
    pub binding: u8,
    /// Whether it holds elements of the wire's type.
    pub narrow: bool,
}

/// What a shader is made for, beside its operation and its type: so it is straight code.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    /// The sources, in the order in which they are folded: 1 to [`SOURCES`].
    pub sources: Vec<Bound>,
    /// The stores: 1 to [`STORES`].
    pub stores: Vec<Bound>,
    /// Whether sources have scales.
    pub scaled: bool,
    /// The type that f32 crosses as.
    pub wire: Option<DataType>,
}

/// The shader's layout and its immediates. Of more than [`STORES`] stores it takes the first. `place` tells the binding
/// of a range, and the range's first word in it; `most` is how many workgroups a dispatch can have. So many are to be
/// dispatched: [`workgroups`].
pub fn dispatch(k: &Kernel, most: u32, place: impl Fn(&Range) -> (u8, u32)) -> (Layout, Params) {
    let narrow = k.wire.as_ref();
    let bound = |list: &[Range], narrow: Option<&[bool]>| -> Vec<Bound> {
        let is_narrow = |i: usize| narrow.is_some_and(|n| n[i]);
        list.iter().enumerate().map(|(i, r)| Bound { binding: place(r).0, narrow: is_narrow(i) }).collect()
    };
    let stores = &k.stores[..k.stores.len().min(STORES)];
    let layout = Layout {
        sources: bound(&k.sources, narrow.map(|w| &w.sources[..])),
        stores: bound(stores, narrow.map(|w| &w.stores[..])),
        scaled: !k.scales.is_empty(),
        wire: narrow.map(|w| w.dtype),
    };
    let elements = k.elements();
    let turns = elements.div_ceil(lanes(k.dtype, layout.wire)) as u32;
    let mut params =
        Params { turns, elements: elements as u32, reciprocal: reciprocal(k.dtype, k.finish), ..Params::default() };
    params.stride = workgroups(&params, most) * WORKGROUP;
    stores.iter().zip(&mut params.store).for_each(|(r, at)| *at = place(r).1);
    k.sources.iter().zip(&mut params.source).for_each(|(r, at)| *at = place(r).1);
    k.scales.iter().zip(&mut params.scale).for_each(|(scale, bits)| *bits = scale.to_bits());
    (layout, params)
}

/// Workgroups of a dispatch, along x, where there can be `most`.
pub fn workgroups(params: &Params, most: u32) -> u32 {
    params.turns.div_ceil(WORKGROUP).min(most)
}

fn reciprocal(dtype: DataType, finish: Option<u32>) -> [u32; 2] {
    let ranks = finish.unwrap_or(1);
    if dtype == DataType::F64 {
        let bits = (1.0 / f64::from(ranks)).to_bits();
        return [bits as u32, (bits >> 32) as u32];
    }
    [(1.0 / ranks as f32).to_bits(), 0]
}

/// Elements of a turn.
const fn lanes(dtype: DataType, wire: Option<DataType>) -> u64 {
    match (dtype, wire) {
        (_, Some(_)) | (DataType::F16 | DataType::Bf16, _) => 2,
        (DataType::I8 | DataType::U8, _) => 4,
        _ => 1,
    }
}

/// Every pair that has a shader, on a device with 64-bit integers and with both these and f64.
pub fn all(int64: bool, float64: bool) -> impl Iterator<Item = (ReduceOp, DataType)> {
    let has = move |t: &DataType| match t {
        DataType::I64 | DataType::U64 => int64,
        DataType::F64 => int64 && float64,
        _ => true,
    };
    let ops = |t: DataType| ReduceOp::ALL.into_iter().map(move |op| (op, t));
    DataType::ALL.into_iter().filter(has).flat_map(ops).filter(|&(op, t)| exists(op, t))
}

/// Integer average sums in 64 bits, which not every device has, and divides: it is the host's.
fn exists(op: ReduceOp, dtype: DataType) -> bool {
    op != ReduceOp::Average || dtype.is_float()
}

/// The shader that reduces `dtype` by `op`, if there is one, for buffers bound as `layout` says.
pub fn source(op: ReduceOp, dtype: DataType, layout: &Layout) -> Option<String> {
    if !exists(op, dtype) {
        return None;
    }
    let frame = include_str!("kernels/reduce.wgsl").replace("WORKGROUP", &WORKGROUP.to_string());
    let mut text = frame.replace("BODY", body(op, dtype, layout).trim_end());
    let integer = |unsigned, ordered| {
        include_str!("kernels/integer.wgsl").replace("UNSIGNED", unsigned).replace("ORDERED", ordered)
    };
    if dtype.size() == 8 {
        text += "fn join(low: u32, high: u32) -> u64 { return u64(low) | (u64(high) << 32u); }\n";
    }
    text += &match dtype {
        DataType::F32 | DataType::F16 | DataType::Bf16 => include_str!("kernels/f32.wgsl").into(),
        DataType::F64 => include_str!("kernels/f64.wgsl").into(),
        DataType::I8 | DataType::I32 => integer("u32", "i32"),
        DataType::U8 | DataType::U32 => integer("u32", "u32"),
        DataType::I64 => integer("u64", "i64"),
        DataType::U64 => integer("u64", "u64"),
    };
    let infinity = match layout.wire.unwrap_or(dtype) {
        DataType::F16 => {
            text += include_str!("kernels/f16.wgsl");
            "0x7c00"
        }
        DataType::Bf16 => {
            text += include_str!("kernels/bf16.wgsl");
            "0x7f80"
        }
        _ => "",
    };
    if layout.wire.is_some() {
        text += &include_str!("kernels/wire.wgsl").replace("INFINITY", infinity);
    }
    Some(text)
}

/// One turn: each source's elements are loaded, decoded and folded; the result is encoded and stored.
fn body(op: ReduceOp, dtype: DataType, layout: &Layout) -> String {
    use DataType::*;
    let lanes = lanes(dtype, layout.wire) as usize;
    let bits = 32 / lanes;
    let mut out = String::new();
    let mut line = |text: String| {
        let _ = writeln!(out, "        {text}"); // a String takes all that is written to it
    };
    let fold = match op {
        ReduceOp::Sum | ReduceOp::Average => "sum",
        ReduceOp::Product => "product",
        ReduceOp::Min => "least",
        ReduceOp::Max => "greatest",
    };
    let wide = |s: &Bound| layout.wire.is_some() && !s.narrow;
    for (n, s) in layout.sources.iter().enumerate() {
        let (words, first) = (format!("words{}", s.binding), format!("params.source[{n}]"));
        if dtype.size() < 8 && !wide(s) {
            line(format!("let w{n} = {words}[{first} + i];"));
        }
        for lane in 0..lanes {
            let part = match lanes {
                1 => format!("w{n}"),
                _ => format!("((w{n} >> {}u) & {}u)", lane * bits, (1u64 << bits) - 1),
            };
            let mut x = match dtype {
                // The last element stands in for one that is not there.
                _ if wide(s) => {
                    format!("through({words}[{first} + min(2u * i + {lane}u, params.elements - 1u)])")
                }
                _ if layout.wire.is_some() => format!("decode({part})"),
                F16 | Bf16 => format!("decode({part})"),
                I8 => format!("bitcast<u32>(bitcast<i32>(w{n} << {}u) >> 24u)", 24 - lane * bits),
                U8 | F32 | I32 | U32 => part,
                F64 | I64 | U64 => format!("join({words}[{first} + 2u * i], {words}[{first} + 2u * i + 1u])"),
            };
            if layout.scaled {
                x = format!("scaled({x}, params.scale[{n}])");
            }
            line(if n == 0 { format!("var a{lane} = {x};") } else { format!("a{lane} = {fold}(a{lane}, {x});") });
        }
    }
    let average = op == ReduceOp::Average;
    for lane in 0..lanes {
        let a = if average { format!("divide(a{lane})") } else { format!("a{lane}") };
        line(format!("let r{lane} = finish({a});"));
    }
    let packed = |encode: &dyn Fn(usize) -> String| -> String {
        (0..lanes).map(|lane| format!("({} << {}u)", encode(lane), lane * bits)).collect::<Vec<_>>().join(" | ")
    };
    match dtype {
        _ if layout.wire.is_some() => {
            (0..lanes).for_each(|lane| line(format!("let n{lane} = narrow(r{lane});")));
            line(format!("let word = {};", packed(&|lane| format!("n{lane}"))));
        }
        F16 | Bf16 => line(format!("let word = {};", packed(&|lane| format!("encode(r{lane})")))),
        I8 | U8 => line(format!("let word = {};", packed(&|lane| format!("(r{lane} & 255u)")))),
        F32 | I32 | U32 => line("let word = r0;".into()),
        F64 | I64 | U64 => {}
    }
    for (n, s) in layout.stores.iter().enumerate() {
        let to = |at: &str| format!("words{}[params.store[{n}] + {at}]", s.binding);
        if dtype.size() == 8 {
            line(format!("{} = u32(r0 & 0xfffffffflu);", to("2u * i")));
            line(format!("{} = u32(r0 >> 32u);", to("2u * i + 1u")));
        } else if wide(s) {
            line(format!("{} = decode(n0);", to("2u * i")));
            line(format!("if 2u * i + 1u < params.elements {{ {} = decode(n1); }}", to("2u * i + 1u")));
        } else {
            line(format!("{} = word;", to("i")));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reciprocal_is_the_nearest() {
        for ranks in 1..1000u32 {
            let [low, high] = reciprocal(DataType::F64, Some(ranks));
            let wide = f64::from_bits(u64::from(high) << 32 | u64::from(low));
            assert_eq!(wide, 1.0 / f64::from(ranks));
            assert_eq!(f32::from_bits(reciprocal(DataType::F32, Some(ranks))[0]), wide as f32);
        }
        assert_eq!(f32::from_bits(reciprocal(DataType::F16, None)[0]), 1.0);
    }

    #[test]
    fn there_is_a_source_for_exactly_the_pairs_listed() {
        let bound = |binding| Bound { binding, narrow: false };
        let layout = Layout { sources: vec![bound(0), bound(1)], stores: vec![bound(2)], scaled: false, wire: None };
        for dtype in DataType::ALL {
            for op in ReduceOp::ALL {
                let listed = all(true, true).any(|pair| pair == (op, dtype));
                assert_eq!(source(op, dtype, &layout).is_some(), listed, "{op} {dtype}");
            }
        }
        assert!(all(false, true).all(|(_, dtype)| dtype.size() < 8));
    }
}
