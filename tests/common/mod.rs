//! What the tests of calls share: devices by name, data, and the direct definition of each collective.
#![allow(dead_code)] // Each test binary uses its part.

use allhands::{
    Buffer, Collective, Communicator, DataType, Device, Part, ReduceOp, Shape, contract::Element, devices,
    schedule::Transfer,
};
use std::sync::{Arc, Mutex};

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
        open.push(devices::open(name.parse().unwrap()).unwrap_or_else(|e| panic!("{name} must be there: {e}")));
    }
    open[..n].to_vec()
}

pub fn builder(devices: &[Arc<dyn Device>]) -> allhands::Builder {
    devices.iter().fold(Communicator::builder(), |b, d| b.rank(d.clone()))
}

pub fn hash(mut x: u64) -> u32 {
    x = (x ^ x >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ x >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    (x ^ x >> 33) as u32
}

/// Element `index` of what `rank` gives, as bits. Floats are small integers, or small powers of two for a product:
/// their reductions are exact in any order.
pub fn value(dtype: DataType, op: Option<ReduceOp>, rank: u32, index: u64, seed: u64) -> u32 {
    let h = hash(seed << 48 ^ u64::from(rank) << 40 ^ index);
    match (dtype, op) {
        (DataType::F32, Some(ReduceOp::Product)) => [1.0_f32, 2.0, -1.0, 0.5][h as usize % 4].to_bits(),
        (DataType::F32, _) => ((h % 129) as f32 - 64.0).to_bits(),
        _ => h,
    }
}

/// Floats of all magnitudes, with special values here and there: only the fold in rank order gives these bits.
pub fn hard_float(rank: u32, index: u64, seed: u64) -> u32 {
    let h = hash(seed << 48 ^ u64::from(rank) << 40 ^ index);
    const SPECIAL: [u32; 8] =
        [0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0xffc1_2345, 0x8000_0000, 0, 0x7f7f_ffff, 0xff7f_ffff];
    if h % 11 == 0 { SPECIAL[h as usize / 11 % 8] } else { (h & 0x807f_ffff) | (120 + h % 16) << 23 }
}

/// The fold of one element, by the crate's rules.
pub fn fold(dtype: DataType, op: ReduceOp, values: impl Iterator<Item = u32> + Clone) -> u32 {
    let n = values.clone().count();
    match dtype {
        DataType::F32 => {
            let floats = values.map(f32::from_bits);
            let less = |a: f32, b: f32| (a < b) || (a == b && a.is_sign_negative() && !b.is_sign_negative());
            let result = floats
                .reduce(|a, b| match op {
                    ReduceOp::Sum | ReduceOp::Average => a + b,
                    ReduceOp::Product => a * b,
                    _ if a.is_nan() || b.is_nan() => f32::NAN,
                    ReduceOp::Min => if less(b, a) { b } else { a },
                    ReduceOp::Max => if less(a, b) { b } else { a },
                })
                .unwrap();
            let result = if op == ReduceOp::Average { result * (1.0 / n as f32) } else { result };
            if result.is_nan() { 0x7fc0_0000 } else { result.to_bits() }
        }
        DataType::I32 => {
            let ints = values.map(|v| v as i32);
            match op {
                ReduceOp::Sum => ints.reduce(i32::wrapping_add).unwrap() as u32,
                ReduceOp::Product => ints.reduce(i32::wrapping_mul).unwrap() as u32,
                ReduceOp::Min => ints.min().unwrap() as u32,
                ReduceOp::Max => ints.max().unwrap() as u32,
                ReduceOp::Average => (ints.map(i64::from).sum::<i64>() / n as i64) as u32,
            }
        }
        DataType::U32 => match op {
            ReduceOp::Sum => values.reduce(u32::wrapping_add).unwrap(),
            ReduceOp::Product => values.reduce(u32::wrapping_mul).unwrap(),
            ReduceOp::Min => values.min().unwrap(),
            ReduceOp::Max => values.max().unwrap(),
            ReduceOp::Average => (values.map(u64::from).sum::<u64>() / n as u64) as u32,
        },
        other => panic!("no reference for {other}"),
    }
}

/// What each rank must have, from what each gave: the definition of each collective.
pub fn expected(shape: &Shape, dtype: DataType, op: Option<ReduceOp>, inputs: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let (n, c) = (shape.ranks as usize, shape.count as usize);
    let reduce = |start: usize, len: usize| -> Vec<u32> {
        (start..start + len).map(|i| fold(dtype, op.unwrap(), inputs.iter().map(move |v| v[i]))).collect()
    };
    let gathered = || inputs.concat();
    (0..n)
        .map(|r| match &shape.collective {
            Collective::AllReduce => reduce(0, c),
            Collective::ReduceScatter => reduce(r * c, c),
            Collective::AllGather => gathered(),
            Collective::Broadcast { root } => inputs[*root as usize].clone(),
            Collective::Reduce { root } if *root as usize == r => reduce(0, c),
            Collective::Gather { root } if *root as usize == r => gathered(),
            Collective::Reduce { .. } | Collective::Gather { .. } | Collective::Barrier => Vec::new(),
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
const POISON: u32 = 0x7fc0_dead;

/// One call's memory: each rank's input and output, with guards around, poisoned, and inputs written.
pub struct Bench {
    pub shape: Shape,
    pub dtype: DataType,
    pub op: Option<ReduceOp>,
    pub inputs: Vec<Vec<u32>>,
    buffers: Vec<(Buffer, Option<Buffer>)>,
}

impl Bench {
    pub fn new(
        devices: &[Arc<dyn Device>],
        shape: &Shape,
        dtype: DataType,
        op: Option<ReduceOp>,
        value: impl Fn(u32, u64) -> u32,
    ) -> Self {
        let inputs: Vec<Vec<u32>> =
            (0..shape.ranks).map(|r| (0..shape.input_len(r)).map(|i| value(r, i)).collect()).collect();
        let buffer = |device: &Arc<dyn Device>, len: u64, data: &[u32], at: u64| {
            let buffer = Buffer::new(device, dtype, len + 2 * GUARD).unwrap();
            let mut words = vec![POISON; (len + 2 * GUARD) as usize];
            words[(GUARD + at) as usize..][..data.len()].copy_from_slice(data);
            buffer.write_bytes(0, bytemuck::cast_slice(&words)).unwrap();
            buffer
        };
        let buffers = (0..shape.ranks)
            .map(|r| {
                let (device, input) = (&devices[r as usize], &inputs[r as usize]);
                let (i, o) = (shape.input_len(r), shape.output_len(r));
                if shape.in_place {
                    let start = (-shape.in_place_offset(r)).max(0) as u64;
                    (buffer(device, i.max(o), input, start), None)
                } else {
                    (buffer(device, i, input, 0), Some(buffer(device, o, &[], 0)))
                }
            })
            .collect();
        Bench { shape: shape.clone(), dtype, op, inputs, buffers }
    }
    pub fn parts(&self) -> Vec<Part> {
        (0..self.shape.ranks)
            .zip(&self.buffers)
            .map(|(r, (input, output))| {
                let (i, o) = (self.shape.input_len(r), self.shape.output_len(r));
                match output {
                    _ if i + o == 0 => Part::none(),
                    None => Part::in_place(input.slice(GUARD, i.max(o))),
                    Some(output) => Part::new(input.slice(GUARD, i), output.slice(GUARD, o)),
                }
            })
            .collect()
    }
    /// The outputs are what the definition says, the guards are unharmed, and inputs of their own are as they were.
    pub fn verify(&self) -> Result<(), String> {
        let want = expected(&self.shape, self.dtype, self.op, &self.inputs);
        for (r, (input, output)) in self.buffers.iter().enumerate() {
            let read = |b: &Buffer| {
                let mut words = vec![0_u32; b.len() as usize];
                b.read_bytes(0, bytemuck::cast_slice_mut(&mut words)).unwrap();
                let inner = words[GUARD as usize..words.len() - GUARD as usize].to_vec();
                let guards = words[..GUARD as usize].iter().chain(&words[words.len() - GUARD as usize..]);
                (inner, guards.clone().all(|w| *w == POISON))
            };
            let (memory, whole) = read(input);
            let (got, whole_output) = match output {
                Some(output) => {
                    if memory != self.inputs[r] {
                        return Err(format!("rank {r}: its input was changed"));
                    }
                    read(output)
                }
                None => {
                    let start = self.shape.in_place_offset(r as u32).max(0) as usize;
                    let len = self.shape.output_len(r as u32) as usize;
                    (memory[start.min(memory.len())..][..len].to_vec(), true)
                }
            };
            if !whole || !whole_output {
                return Err(format!("rank {r}: bytes outside its buffers were changed"));
            }
            if let Some(i) = (0..want[r].len()).find(|&i| got[i] != want[r][i]) {
                return Err(format!("rank {r} element {i}: got {:#010x}, want {:#010x}", got[i], want[r][i]));
            }
        }
        Ok(())
    }
}

pub fn bytes_of<T: Element>(data: &[T]) -> &[u8] {
    bytemuck::cast_slice(data)
}
