//! What the tests of calls share: devices by name, data, and the direct definition of each collective.
#![allow(dead_code)] // Each test binary uses its part.

use allhands::{
    Buffer, Collective, Communicator, DataType, Device, Part, ReduceOp, Shape, contract::Element, devices,
    schedule::Transfer,
};
use half::{bf16, f16};
use std::{
    io::Write,
    sync::{Arc, Mutex},
};

/// The devices of the cell, `ALLHANDS_DEVICES` (a list of names; `cpu` if unset). Each must exist.
pub fn names() -> Vec<String> {
    let list = std::env::var("ALLHANDS_DEVICES").unwrap_or_default();
    let list = if list.is_empty() { "cpu".into() } else { list };
    list.split(',').map(str::to_string).collect()
}

/// Devices for `n` ranks, which go round the list. Opened once in the process, so that the tests that run side by
/// side share them.
pub fn ranks(n: usize) -> Vec<Arc<dyn Device>> {
    static OPEN: Mutex<Vec<Arc<dyn Device>>> = Mutex::new(Vec::new());
    let names = names();
    let mut open = OPEN.lock().unwrap();
    while open.len() < n {
        let name = &names[open.len() % names.len()];
        open.push(devices::open(&name.parse().unwrap()).unwrap_or_else(|e| panic!("{name} must be there: {e}")));
    }
    open[..n].to_vec()
}

/// Whether the cell wants a slice of each test (`ALLHANDS_QUICK`), enough to see that its driver or path works.
pub fn quick() -> bool {
    std::env::var("ALLHANDS_QUICK").is_ok_and(|v| !v.is_empty() && v != "0")
}

/// Numbers of ranks to test with: these; few in a slice; or the one that the cell asks for (`ALLHANDS_RANKS`).
pub fn sizes(all: &[u32]) -> Vec<u32> {
    match std::env::var("ALLHANDS_RANKS").map(|n| n.parse()) {
        Ok(Ok(n)) => vec![n],
        _ if quick() => all.iter().copied().filter(|n| [2, 3].contains(n)).collect(),
        _ => all.to_vec(),
    }
}

/// Prints where probes begin and end, for who watches the process (`ALLHANDS_WATCHED`): what a driver or a layer says
/// there is of paths that may fail.
struct Probes;

impl log::Log for Probes {
    fn enabled(&self, of: &log::Metadata<'_>) -> bool {
        of.target() == "allhands::probe"
    }
    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            // Around the harness, which captures what tests print, and in line with what layers say.
            let _ = writeln!(std::io::stderr(), "allhands::probe {}", record.args());
        }
    }
    fn flush(&self) {}
}

pub fn builder(devices: &[Arc<dyn Device>]) -> allhands::Builder {
    if std::env::var_os("ALLHANDS_WATCHED").is_some() && log::set_logger(&Probes).is_ok() {
        log::set_max_level(log::LevelFilter::Debug);
    }
    devices.iter().fold(Communicator::builder(), |b, d| b.rank(d.clone()))
}

pub fn hash(mut x: u64) -> u32 {
    x = (x ^ x >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ x >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    (x ^ x >> 33) as u32
}

/// Element `index` of what `rank` gives, as bits. Floats are small integers, or small powers of two for a product:
/// their reductions are exact in any order, in every type.
pub fn value(dtype: DataType, op: Option<ReduceOp>, rank: u32, index: u64, seed: u64) -> u64 {
    let h = hash(seed << 48 ^ u64::from(rank) << 40 ^ index);
    let x = match op {
        Some(ReduceOp::Product) => [1.0, 2.0, -1.0, 0.5][h as usize % 4],
        _ => f64::from(h % 33) - 16.0,
    };
    if dtype.is_float() { encode(dtype, x) } else { (u64::from(hash(u64::from(h))) << 32 | u64::from(h)) & mask(dtype) }
}

/// Floats of all magnitudes, with special values here and there: only the fold in rank order gives these bits.
pub fn hard_float(rank: u32, index: u64, seed: u64) -> u64 {
    hard(DataType::F32, rank, index, seed)
}

/// The same of any type of float: infinities, NaN of both signs, zeros, the greatest, halfway cases of the sums, and
/// subnormals where every device keeps them: those of f16 are normal numbers to its accumulator.
pub fn hard(dtype: DataType, rank: u32, index: u64, seed: u64) -> u64 {
    let h = u64::from(hash(seed << 48 ^ u64::from(rank) << 40 ^ index));
    let sign = 1 << (dtype.size() * 8 - 1);
    let (infinity, fraction, middle) = match dtype {
        DataType::F16 => (0x7c00, 10, 15),
        DataType::Bf16 => (0x7f80, 7, 127),
        DataType::F32 => (0x7f80_0000, 23, 127),
        _ => (0x7ff0 << 48, 52, 1023),
    };
    let special = [infinity, infinity | 1, infinity | 1 << (fraction - 1), 0, infinity - 1];
    let random = u64::from(hash(h)) << 32 | u64::from(hash(h ^ 0x5555));
    let low = random & ((1 << fraction) - 1);
    match h % 11 {
        0 => special[h as usize / 11 % 5] | if h >> 20 & 1 == 0 { sign } else { 0 },
        1 if dtype == DataType::F16 => low | random & sign,
        // Few bits at the ends: sums that lie halfway between two values.
        2 => (middle + h / 11 % 4) << fraction | low & 3 | random & sign,
        _ => (middle - 7 + h / 11 % 14) << fraction | low | random & sign,
    }
}

pub fn mask(dtype: DataType) -> u64 {
    u64::MAX >> (64 - dtype.size() * 8)
}

/// To the nearest, ties to even. `x` is an f32 unless the type is f64.
pub fn encode(dtype: DataType, x: f64) -> u64 {
    match dtype {
        DataType::F64 if x.is_nan() => 0x7ff8 << 48,
        DataType::F64 => x.to_bits(),
        DataType::F32 if x.is_nan() => 0x7fc0_0000,
        DataType::F32 => u64::from((x as f32).to_bits()),
        DataType::F16 if x.is_nan() => 0x7e00,
        DataType::F16 => u64::from(f16::from_f32(x as f32).to_bits()),
        _ if x.is_nan() => 0x7fc0,
        _ => u64::from(bf16::from_f32(x as f32).to_bits()),
    }
}

pub fn decode(dtype: DataType, bits: u64) -> f64 {
    match dtype {
        DataType::F64 => f64::from_bits(bits),
        DataType::F32 => f64::from(f32::from_bits(bits as u32)),
        DataType::F16 => f64::from(f16::from_bits(bits as u16).to_f32()),
        _ => f64::from(bf16::from_bits(bits as u16).to_f32()),
    }
}

/// An f32 that has crossed as `wire`.
pub fn through(wire: DataType, x: f64) -> f64 {
    let y = decode(wire, encode(wire, x));
    let greatest = if wire == DataType::F16 { 65504.0 } else { f64::from(f32::from_bits(0x7f7f_0000)) };
    if x.is_finite() && y.is_infinite() { greatest.copysign(x) } else { y }
}

/// What a call asks for beside its operation.
#[derive(Clone, Default, Debug)]
pub struct How {
    pub scales: Vec<f32>,
    pub absent: Vec<bool>,
    pub wire: Option<DataType>,
}

/// The fold of one element of each rank, by the crate's rules.
pub fn fold(dtype: DataType, op: ReduceOp, values: &[u64], how: &How) -> u64 {
    let n = values.len();
    let present = values.iter().copied().enumerate().filter(|(r, _)| how.absent.get(*r) != Some(&true));
    if !dtype.is_float() {
        return integers(dtype, op, present.map(|(_, v)| v), n);
    }
    // The accumulator is an f32, in which the operations of two f32 in f64 are rounded right.
    let round = |x: f64| if dtype == DataType::F64 { x } else { f64::from(x as f32) };
    let less = |a: f64, b: f64| (a < b) || (a == b && a.is_sign_negative() && !b.is_sign_negative());
    let load = |(r, bits): (usize, u64)| {
        let x = decode(dtype, bits);
        let x = how.wire.map_or(x, |wire| through(wire, x));
        how.scales.get(r).map_or(x, |s| round(x * f64::from(*s)))
    };
    let folded = present.map(load).reduce(|a, b| match op {
        ReduceOp::Sum | ReduceOp::Average => round(a + b),
        ReduceOp::Product => round(a * b),
        _ if a.is_nan() || b.is_nan() => f64::NAN,
        ReduceOp::Min => {
            if less(b, a) {
                b
            } else {
                a
            }
        }
        ReduceOp::Max => {
            if less(a, b) {
                b
            } else {
                a
            }
        }
    });
    let nothing = match op {
        ReduceOp::Sum | ReduceOp::Average => 0.0,
        ReduceOp::Product => 1.0,
        ReduceOp::Min => f64::INFINITY,
        ReduceOp::Max => f64::NEG_INFINITY,
    };
    let result = folded.unwrap_or(nothing);
    let result = if op == ReduceOp::Average { round(result * round(1.0 / n as f64)) } else { result };
    encode(dtype, how.wire.map_or(result, |wire| through(wire, result)))
}

fn integers(dtype: DataType, op: ReduceOp, values: impl Iterator<Item = u64>, n: usize) -> u64 {
    let shift = 64 - dtype.size() * 8;
    if matches!(dtype, DataType::I8 | DataType::I32 | DataType::I64) {
        let ints = values.map(|v| ((v << shift) as i64) >> shift);
        let (least, greatest) = (i64::MIN >> shift, i64::MAX >> shift);
        (match op {
            ReduceOp::Sum => ints.fold(0, i64::wrapping_add),
            ReduceOp::Product => ints.fold(1, i64::wrapping_mul),
            ReduceOp::Min => ints.min().unwrap_or(greatest),
            ReduceOp::Max => ints.max().unwrap_or(least),
            ReduceOp::Average => ints.fold(0, i64::wrapping_add) / n as i64,
        }) as u64
            & mask(dtype)
    } else {
        (match op {
            ReduceOp::Sum => values.fold(0, u64::wrapping_add),
            ReduceOp::Product => values.fold(1, u64::wrapping_mul),
            ReduceOp::Min => values.min().unwrap_or(mask(dtype)),
            ReduceOp::Max => values.max().unwrap_or(0),
            ReduceOp::Average => values.fold(0, u64::wrapping_add) / n as u64,
        }) & mask(dtype)
    }
}

/// What each rank must have, from what each gave: the definition of each collective.
pub fn expected(shape: &Shape, dtype: DataType, op: Option<ReduceOp>, inputs: &[Vec<u64>], how: &How) -> Vec<Vec<u64>> {
    let (n, c) = (shape.ranks as usize, shape.count as usize);
    let mut column = vec![0; n];
    let mut reduce = |start: usize, len: usize| -> Vec<u64> {
        let mut one = |i: usize| {
            column.iter_mut().zip(inputs).for_each(|(x, v)| *x = v[i]);
            fold(dtype, op.unwrap(), &column, how)
        };
        (start..start + len).map(&mut one).collect()
    };
    if shape.collective == Collective::AllReduce {
        return vec![reduce(0, c); n];
    }
    let crossed: Vec<Vec<u64>>;
    let mut inputs = inputs;
    if let (None, Some(wire)) = (op, how.wire) {
        let cross = |x: &u64| encode(dtype, through(wire, decode(dtype, *x)));
        crossed = inputs.iter().map(|v| v.iter().map(cross).collect()).collect();
        inputs = &crossed;
    }
    let gathered = || inputs.concat();
    (0..n)
        .map(|r| match &shape.collective {
            Collective::ReduceScatter => reduce(r * c, c),
            Collective::AllGather => gathered(),
            Collective::Broadcast { root } => inputs[*root as usize].clone(),
            Collective::Reduce { root } if *root as usize == r => reduce(0, c),
            Collective::Gather { root } if *root as usize == r => gathered(),
            Collective::AllReduce | Collective::Reduce { .. } | Collective::Gather { .. } | Collective::Barrier => {
                Vec::new()
            }
            Collective::Scatter { root } => inputs[*root as usize][r * c..][..c].to_vec(),
            Collective::AllToAll => inputs.iter().flat_map(|v| &v[r * c..][..c]).copied().collect(),
            Collective::SendRecv(list) => {
                let sent = |t: &Transfer, k: usize| {
                    let before = list[..k].iter().filter(|u| u.from == t.from).map(|u| u.count as usize).sum::<usize>();
                    inputs[t.from as usize][before..][..t.count as usize].to_vec()
                };
                list.iter().enumerate().filter(|(_, t)| t.to as usize == r).flat_map(|(k, t)| sent(t, k)).collect()
            }
        })
        .collect()
}

const GUARD: u64 = 64;
const POISON: [u8; 4] = 0x7fc0_dead_u32.to_ne_bytes();

/// One call's memory: each rank's input and output, with guards around, poisoned, and inputs written.
pub struct Bench {
    pub shape: Shape,
    pub dtype: DataType,
    pub op: Option<ReduceOp>,
    pub how: How,
    pub inputs: Vec<Vec<u64>>,
    /// Elements by which what is given lies off the grid.
    shift: u64,
    buffers: Vec<(Buffer, Option<Buffer>)>,
}

impl Bench {
    pub fn new(
        devices: &[Arc<dyn Device>],
        shape: &Shape,
        dtype: DataType,
        op: Option<ReduceOp>,
        value: impl Fn(u32, u64) -> u64,
    ) -> Self {
        Bench::shifted(devices, shape, dtype, op, 0, value)
    }
    pub fn shifted(
        devices: &[Arc<dyn Device>],
        shape: &Shape,
        dtype: DataType,
        op: Option<ReduceOp>,
        shift: u64,
        value: impl Fn(u32, u64) -> u64,
    ) -> Self {
        let inputs: Vec<Vec<u64>> =
            (0..shape.ranks).map(|r| (0..shape.input_len(r)).map(|i| value(r, i)).collect()).collect();
        let size = dtype.size() as usize;
        let buffer = |device: &Arc<dyn Device>, len: u64, data: &[u64], at: u64, shift: u64| {
            let buffer = Buffer::new(device, dtype, len + shift + 2 * GUARD).unwrap();
            let mut bytes = poison(buffer.len() as usize * size);
            let first = (GUARD + shift + at) as usize * size;
            for (to, x) in bytes[first..].chunks_mut(size).zip(data) {
                to.copy_from_slice(&x.to_le_bytes()[..size]);
            }
            buffer.write_bytes(0, &bytes).unwrap();
            buffer
        };
        let buffers = (0..shape.ranks)
            .map(|r| {
                let (device, input) = (&devices[r as usize], &inputs[r as usize]);
                let (i, o) = (shape.input_len(r), shape.output_len(r));
                if shape.in_place {
                    let start = (-shape.in_place_offset(r)).max(0) as u64;
                    (buffer(device, i.max(o), input, start, shift), None)
                } else {
                    (buffer(device, i, input, 0, shift), Some(buffer(device, o, &[], 0, shift)))
                }
            })
            .collect();
        Bench { shape: shape.clone(), dtype, op, how: How::default(), inputs, shift, buffers }
    }
    pub fn parts(&self) -> Vec<Part> {
        let first = GUARD + self.shift;
        let part = |r: u32, (input, output): &(Buffer, Option<Buffer>)| {
            let (i, o) = (self.shape.input_len(r), self.shape.output_len(r));
            match output {
                _ if i + o == 0 => Part::none(),
                None => Part::in_place(input.slice(first, i.max(o))),
                Some(output) => Part::new(input.slice(first, i), output.slice(first, o)),
            }
        };
        let asked = |r: u32, part: Part| {
            let part = self.how.scales.get(r as usize).map_or(part.clone(), |s| part.scale(*s));
            if self.how.absent.get(r as usize) == Some(&true) { part.absent() } else { part }
        };
        (0..self.shape.ranks).zip(&self.buffers).map(|(r, b)| asked(r, part(r, b))).collect()
    }
    /// What is in the outputs.
    pub fn outputs(&self) -> Vec<Vec<u64>> {
        let own = |r: usize| self.output(r).unwrap();
        (0..self.buffers.len()).map(own).collect()
    }
    fn read(&self, buffer: &Buffer) -> (Vec<u64>, bool) {
        let size = self.dtype.size() as usize;
        let mut bytes = vec![0; buffer.len() as usize * size];
        buffer.read_bytes(0, &mut bytes).unwrap();
        let (first, last) = ((GUARD + self.shift) as usize * size, bytes.len() - GUARD as usize * size);
        let guard = poison(bytes.len());
        let whole = bytes[..first] == guard[..first] && bytes[last..] == guard[last..];
        let element = |b: &[u8]| {
            let mut bits = [0; 8];
            bits[..size].copy_from_slice(b);
            u64::from_le_bytes(bits)
        };
        (bytes[first..last].chunks(size).map(element).collect(), whole)
    }
    /// A rank's output, if nothing else was changed.
    fn output(&self, r: usize) -> Result<Vec<u64>, String> {
        let (input, output) = &self.buffers[r];
        let (memory, whole) = self.read(input);
        let (got, whole_output) = match output {
            Some(output) => {
                if memory != self.inputs[r] {
                    return Err(format!("rank {r}: its input was changed"));
                }
                self.read(output)
            }
            None => {
                let start = self.shape.in_place_offset(r as u32).max(0) as usize;
                let len = self.shape.output_len(r as u32) as usize;
                (memory[start.min(memory.len())..][..len].to_vec(), true)
            }
        };
        if whole && whole_output { Ok(got) } else { Err(format!("rank {r}: bytes outside its buffers were changed")) }
    }
    /// The outputs are what the definition says, the guards are unharmed, and inputs of their own are as they were.
    pub fn verify(&self) -> Result<(), String> {
        self.verify_against(&self.expected())
    }
    /// What the definition says.
    pub fn expected(&self) -> Vec<Vec<u64>> {
        expected(&self.shape, self.dtype, self.op, &self.inputs, &self.how)
    }
    /// The same as `verify`, where the definition was asked already.
    pub fn verify_against(&self, want: &[Vec<u64>]) -> Result<(), String> {
        for (r, want) in want.iter().enumerate() {
            let got = self.output(r)?;
            if let Some(i) = (0..want.len()).find(|&i| got[i] != want[i]) {
                let given: Vec<_> = self.inputs.iter().map(|v| v.get(i)).collect();
                return Err(format!("rank {r} element {i}: got {:#x}, want {:#x}, of {given:x?}", got[i], want[i]));
            }
        }
        Ok(())
    }
}

fn poison(len: usize) -> Vec<u8> {
    POISON.iter().copied().cycle().take(len).collect()
}

pub fn bytes_of<T: Element>(data: &[T]) -> &[u8] {
    bytemuck::cast_slice(data)
}
