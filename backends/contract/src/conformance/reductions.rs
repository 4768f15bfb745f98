//! Every kernel gives the bits that the reference gives.
use super::{Outcome, Ran, Test, fold::*, rig::*, table};
use crate::*;
use std::sync::Arc;

pub(super) const TESTS: &[Test] = table![
    kernels_give_the_reference_results,
    kernels_fold_any_count_of_elements,
    kernels_fold_any_number_of_sources,
    kernels_store_in_place_and_to_several_stores,
    kernels_write_only_their_range,
    kernels_read_from_many_buffers,
    kernels_finish_only_when_asked,
    kernels_round_scaled_sources,
    kernels_round_what_crosses_narrow,
    kernels_keep_subnormals,
    kernels_reach_their_last_element,
];

fn kernels_give_the_reference_results(device: &Arc<dyn Device>) -> Outcome {
    for &(op, dtype) in &device.limits().kernels {
        let count = if dtype.size() == 1 { 65536 } else { 4096 };
        for sources in [1, 2, 3] {
            Case::new(op, dtype, count, sources.min(device.limits().max_sources)).check(device)?;
        }
    }
    any_kernel(device)
}

fn kernels_fold_any_count_of_elements(device: &Arc<dyn Device>) -> Outcome {
    let limits = device.limits();
    for &(op, dtype) in &limits.kernels {
        // One operation of each type goes to large counts.
        let large = limits.kernels.iter().find(|k| k.1 == dtype) == Some(&(op, dtype));
        let counts = [0, 1, 2, 3, 4, 5, 7, 63, 64, 65, 255, 256, 257, 65535, 65536, 65537, 1_000_003];
        for count in counts.into_iter().filter(|c| *c < 300 || large) {
            // A store is of whole units.
            let count = (count * dtype.size()).next_multiple_of(unit(limits, dtype)) / dtype.size();
            Case::new(op, dtype, count.min(limits.max_kernel_elements), 2.min(limits.max_sources)).check(device)?;
        }
    }
    any_kernel(device)
}

fn kernels_fold_any_number_of_sources(device: &Arc<dyn Device>) -> Outcome {
    let limits = device.limits();
    for (op, dtype) in pairs(limits) {
        for sources in 1..=limits.max_sources.min(16) {
            Case::new(op, dtype, 256, sources).check(device)?;
        }
        Case::new(op, dtype, 256, limits.max_sources.min(300)).check(device)?;
    }
    any_kernel(device)
}

fn kernels_store_in_place_and_to_several_stores(device: &Arc<dyn Device>) -> Outcome {
    let limits = device.limits();
    for (op, dtype) in pairs(limits) {
        let case = Case::new(op, dtype, 520, limits.max_sources.min(4));
        for in_place in 0..case.sources as usize {
            Case { in_place: Some(in_place), ..case }.check(device)?;
        }
        Case { stores: 3, ..case }.check(device)?;
        Case { stores: 2, in_place: Some(0), ..case }.check(device)?;
    }
    any_kernel(device)
}

fn kernels_write_only_their_range(device: &Arc<dyn Device>) -> Outcome {
    for (op, dtype) in pairs(device.limits()) {
        let unit = unit(device.limits(), dtype);
        for units in [1, 3, 63, 65] {
            for gap in [1, 2, 3, 5, 64] {
                let case = Case::new(op, dtype, units * unit / dtype.size(), 2.min(device.limits().max_sources));
                Case { gap: gap * unit, stores: 2, ..case }.check(device)?;
            }
        }
    }
    any_kernel(device)
}

fn kernels_read_from_many_buffers(device: &Arc<dyn Device>) -> Outcome {
    let limits = device.limits();
    for (op, dtype) in pairs(limits) {
        for buffers in 1..=limits.max_bindings.min(8) {
            let sources = limits.max_sources.min(buffers);
            Case { buffers, ..Case::new(op, dtype, 260, sources) }.check(device)?;
            Case { buffers, ..Case::new(op, dtype, 260, limits.max_sources.min(9)) }.check(device)?;
        }
    }
    any_kernel(device)
}

fn kernels_finish_only_when_asked(device: &Arc<dyn Device>) -> Outcome {
    for (op, dtype) in pairs(device.limits()) {
        for finish in [None, Some(1), Some(2), Some(3), Some(7), Some(8), Some(1000)] {
            Case { finish, ..Case::new(op, dtype, 4096, 2.min(device.limits().max_sources)) }.check(device)?;
        }
    }
    any_kernel(device)
}

fn kernels_round_scaled_sources(device: &Arc<dyn Device>) -> Outcome {
    let limits = device.limits();
    let rig = Rig::new(device)?;
    const SCALES: [f32; 3] = [0.1, -3.7, 1.000_000_1];
    for &(op, dtype) in limits.kernels.iter().filter(|k| k.0 == ReduceOp::Sum && k.1.is_float()) {
        let (width, count) = (dtype.size() as usize, 2048);
        let columns: Vec<Vec<u64>> = (0..3.min(limits.max_sources)).map(|s| column(dtype, s, count)).collect();
        let bytes = |c: &Vec<u64>| c.iter().flat_map(|x| x.to_le_bytes()[..width].to_vec()).collect::<Vec<u8>>();
        // All in one buffer: a device may bind few.
        let arena = rig.holding(&columns.iter().flat_map(bytes).collect::<Vec<u8>>())?;
        let result = rig.holding(&vec![0xa5; count * width])?;
        let size = (count * width) as u64;
        let sources = (0..columns.len() as u64).map(|s| Range::new(arena, s * size, size)).collect();
        let (stores, scales) = (vec![Range::new(result, 0, size)], SCALES[..columns.len()].to_vec());
        rig.run(&[Op::Kernel(Kernel { stores, sources, op, dtype, finish: None, scales, wire: None })])?;
        let got = rig.read(result, count * width)?;
        let flushes = flushes(device, dtype)?;
        for (i, got) in got.chunks(width).enumerate() {
            let given: Vec<u64> = columns.iter().map(|c| c[i]).collect();
            let want = scaled(dtype, &given, &SCALES[..given.len()]);
            ensure(*got == want.bits.to_le_bytes()[..width] || want.subnormal && flushes, || {
                format!("element {i} of a scaled sum of {dtype}: got {got:x?}, want {:#x}, of {given:x?}", want.bits)
            })?;
        }
    }
    any_kernel(device)
}

fn kernels_round_what_crosses_narrow(device: &Arc<dyn Device>) -> Outcome {
    let limits = device.limits();
    let rig = Rig::new(device)?;
    let flushes = flushes(device, DataType::F32)?;
    let mut asked = false;
    for (wire, op) in [DataType::F16, DataType::Bf16].into_iter().flat_map(|w| ReduceOp::ALL.map(|op| (w, op))) {
        if !limits.reduces(op, wire) || !limits.reduces(op, DataType::F32) || limits.max_sources < 2 {
            continue;
        }
        asked = true;
        // Odd, so that the last narrow word is half empty. A narrow source and a wide one; a narrow store and a wide one.
        let count = 2047;
        let [wide, other] = [0, 1].map(|s| column(DataType::F32, s, count));
        let crossing: Vec<u64> = other.iter().map(|x| saturate(wire, *x)).collect();
        let bytes =
            |c: &[u64], width: usize| c.iter().flat_map(|x| x.to_le_bytes()[..width].to_vec()).collect::<Vec<u8>>();
        let narrow_size = (count as u64 * 2).next_multiple_of(limits.write_granularity);
        let mut halves = bytes(&crossing, 2);
        halves.resize(narrow_size as usize, 0);
        let (a, b) = (rig.holding(&bytes(&wide, 4))?, rig.holding(&halves)?);
        let (c, d) = (rig.holding(&vec![0xa5; count * 4 + 8])?, rig.holding(&vec![0xa5; narrow_size as usize + 8])?);
        let kernel = Kernel {
            stores: vec![Range::new(c, 0, count as u64 * 4), Range::new(d, 0, narrow_size)],
            sources: vec![Range::new(a, 0, count as u64 * 4), Range::new(b, 0, narrow_size)],
            op,
            dtype: DataType::F32,
            finish: Some(3),
            scales: Vec::new(),
            wire: Some(Wire { dtype: wire, stores: vec![false, true], sources: vec![false, true] }),
        };
        rig.run(&[Op::Kernel(kernel)])?;
        let (full, half) = (rig.read(c, count * 4 + 8)?, rig.read(d, narrow_size as usize + 8)?);
        let untouched = full[count * 4..].iter().chain(&half[narrow_size as usize..]).all(|b| *b == 0xa5);
        ensure(untouched, || format!("{op} of f32 as {wire} stores beyond its ranges"))?;
        for i in 0..count {
            let want = crossed(op, wire, &[wide[i], other[i]], Some(3));
            let right = full[i * 4..][..4] == want.bits.to_le_bytes()[..4]
                && half[i * 2..][..2] == saturate(wire, want.bits).to_le_bytes()[..2];
            ensure(right || want.subnormal && flushes, || {
                let (got, given) = (&full[i * 4..][..4], [wide[i], other[i]]);
                format!("element {i}, {op} of f32 as {wire}: got {got:x?}, want {:#x}, of {given:x?}", want.bits)
            })?;
        }
    }
    match asked {
        true => any_kernel(device),
        false => Ok(Ran::NotApplicable("nothing crosses narrow".into())),
    }
}

/// Not a demand, but a thing to know: where it does not pass, equality above left subnormals out.
fn kernels_keep_subnormals(device: &Arc<dyn Device>) -> Outcome {
    let mut flushed = Vec::new();
    for dtype in DataType::ALL.into_iter().filter(|d| device.limits().kernels.iter().any(|k| k.1 == *d)) {
        if flushes(device, dtype)? {
            flushed.push(dtype.name());
        }
    }
    match flushed.is_empty() {
        true => any_kernel(device),
        false => not_applicable(format!("it flushes subnormals of {}", flushed.join(", "))),
    }
}

/// Large enough for every loop limit, and each element looked at.
fn kernels_reach_their_last_element(device: &Arc<dyn Device>) -> Outcome {
    let limits = device.limits();
    let Some(&(op, dtype)) = limits.kernels.iter().find(|(_, d)| matches!(d, DataType::U32 | DataType::I32)) else {
        return not_applicable("no kernel for integers of 32 bits");
    };
    let rig = Rig::new(device)?;
    let mut count = limits.max_kernel_elements.min(16 << 20);
    let (src, dst) = loop {
        let desc = BufferDesc { size: count * dtype.size(), memory: Memory::Device, exportable: false };
        match (device.create_buffer(&desc), device.create_buffer(&desc)) {
            (Ok(a), Ok(b)) => break (rig.keep(a), rig.keep(b)),
            (a, b) if count > 1024 => {
                [a, b].into_iter().flatten().for_each(|x| device.destroy_buffer(x));
                count /= 2;
            }
            (a, b) => return Err(format!("buffers of {count} elements were to be made, not {a:?} and {b:?}")),
        }
    };
    let content = pattern(5, (count * dtype.size()) as usize);
    rig.write(src, &content)?;
    rig.write(dst, &vec![0x5a; content.len()])?;
    let all = |buffer| Range::new(buffer, 0, content.len() as u64);
    // The fold of one source is that source.
    let kernel = Kernel {
        stores: vec![all(dst)],
        sources: vec![all(src)],
        op,
        dtype,
        finish: None,
        scales: Vec::new(),
        wire: None,
    };
    rig.run(&[Op::Kernel(kernel)])?;
    rig.holds(&format!("{op} of one source of {count} {dtype}"), dst, &content)?;
    passed()
}

fn any_kernel(device: &Arc<dyn Device>) -> Outcome {
    match device.limits().kernels.is_empty() {
        false => Ok(Ran::Passed),
        true => not_applicable("no kernels"),
    }
}

/// The kernels that are asked in every form, all of which a driver compiles anew: all kernels; in a slice of the suite
/// ([`sliced`]) one of each type, and one of each operation.
fn pairs(limits: &Limits) -> Vec<(ReduceOp, DataType)> {
    if !sliced() {
        return limits.kernels.clone();
    }
    let mut pairs = Vec::new();
    for (i, dtype) in DataType::ALL.into_iter().enumerate() {
        let of_type: Vec<_> = limits.kernels.iter().filter(|k| k.1 == dtype).collect();
        pairs.extend(of_type.get(i % of_type.len().max(1)).copied().copied());
    }
    for kernel in &limits.kernels {
        if pairs.iter().all(|p| p.0 != kernel.0) {
            pairs.push(*kernel);
        }
    }
    pairs
}

/// What offsets and sizes of kernel ranges are multiples of.
fn unit(limits: &Limits, dtype: DataType) -> u64 {
    limits.write_granularity.max(dtype.size())
}

/// One kernel, over sources and stores laid out with gaps of guard bytes.
#[derive(Clone, Copy, Debug)]
struct Case {
    op: ReduceOp,
    dtype: DataType,
    count: u64,
    sources: u32,
    /// Of which the first is `sources[in_place]` where that is given.
    stores: u32,
    in_place: Option<usize>,
    finish: Option<u32>,
    /// Bytes before each range.
    gap: u64,
    /// Over how many buffers the ranges are dealt in turn.
    buffers: u32,
}

impl Case {
    fn new(op: ReduceOp, dtype: DataType, count: u64, sources: u32) -> Self {
        let finish = (op == ReduceOp::Average).then_some(sources.max(3));
        Case { op, dtype, count, sources, stores: 1, in_place: None, finish, gap: 16, buffers: 1 }
    }

    fn check(self, device: &Arc<dyn Device>) -> Check {
        let rig = Rig::new(device)?;
        let Case { op, dtype, finish, .. } = self;
        let (width, unit) = (dtype.size() as usize, unit(device.limits(), dtype));
        let size = (self.count * dtype.size()).next_multiple_of(unit);
        let count = size as usize / width;
        let ranges = self.sources + self.stores - u32::from(self.in_place.is_some());
        let buffers = self.buffers.min(ranges);
        let step = self.gap.next_multiple_of(unit) + size;
        let rounds = u64::from(ranges.div_ceil(buffers));
        let mut content: Vec<Vec<u8>> = Vec::new();
        let mut ids = Vec::new();
        for b in 0..buffers {
            content.push(pattern(900 + u64::from(b), (rounds * step + self.gap) as usize));
            ids.push(rig.buffer(content[b as usize].len() as u64, Memory::Device)?);
        }
        let place = |i: u32| ((i % buffers) as usize, u64::from(i / buffers) * step + step - size);
        let range = |i| Range::new(ids[place(i).0], place(i).1, size);

        let mut elements: Vec<Vec<u64>> = Vec::new();
        for s in 0..self.sources {
            let column = column(dtype, s, count);
            let (buffer, offset) = place(s);
            for (to, x) in content[buffer][offset as usize..].chunks_mut(width).zip(&column) {
                to.copy_from_slice(&x.to_le_bytes()[..width]);
            }
            elements.push(column);
        }
        ids.iter().zip(&content).try_for_each(|(id, bytes)| rig.write(*id, bytes))?;

        let mut stores: Vec<u32> = self.in_place.map(|i| i as u32).into_iter().collect();
        stores.extend(self.sources..ranges);
        let sources = (0..self.sources).map(range).collect();
        let kernel = Kernel {
            stores: stores.iter().map(|i| range(*i)).collect(),
            sources,
            op,
            dtype,
            finish,
            scales: Vec::new(),
            wire: None,
        };
        rig.run(&[Op::Kernel(kernel)])?;

        let got = ids.iter().zip(&content).map(|(id, c)| rig.read(*id, c.len())).collect::<Check<Vec<_>>>()?;
        let mut exempt = None; // asked only where it matters
        let mut column = vec![0; self.sources as usize];
        for i in 0..count {
            column.iter_mut().zip(&elements).for_each(|(x, e)| *x = e[i]);
            let want = fold(op, dtype, &column, finish);
            for &store in &stores {
                let (buffer, offset) = place(store);
                let at = offset as usize + i * width;
                let mut bytes = [0; 8];
                bytes[..width].copy_from_slice(&got[buffer][at..][..width]);
                let bits = u64::from_le_bytes(bytes);
                if bits != want.bits && want.subnormal && exempt.is_none() {
                    exempt = Some(flushes(device, dtype)?);
                }
                ensure(bits == want.bits || want.subnormal && exempt == Some(true), || {
                    format!("element {i} of {self:?}: got {bits:#x}, want {:#x}, folded of {column:x?}", want.bits)
                })?;
                content[buffer][at..][..width].copy_from_slice(&bytes[..width]);
            }
        }
        // Where stores are is as it was read, so what differs is a source or a guard.
        for (got, want) in got.iter().zip(&content) {
            same(&format!("bytes that {self:?} does not store to"), got, want)?;
        }
        Ok(())
    }
}

/// The elements of source `s`: hard values, in all pairs of the first two sources; bits of any kind; and numbers of
/// like size, whose sum depends on the order.
fn column(dtype: DataType, s: u32, count: usize) -> Vec<u64> {
    let mask = u64::MAX >> (64 - dtype.size() * 8);
    let hard = hard(dtype);
    let n = hard.len();
    // Exponents next to that of one; any sign and fraction.
    let (sign, infinity, _) = layout(dtype);
    let (least, middle) = (infinity & !(infinity << 1), infinity >> 1 & infinity);
    let like = |random: u64| (middle - (random >> 40 & 3) * least) | random & (least - 1) | random & sign;
    let element = |i: usize| {
        let random = hash(i as u64 * 1009 + u64::from(s));
        match random >> 61 {
            _ if i < n * n && s == 0 => hard[i % n],
            _ if i < n * n && s == 1 => hard[i / n],
            0 => hard[random as usize % n],
            2.. if dtype.is_float() => like(random),
            _ => random & mask,
        }
    };
    (0..count).map(element).collect()
}

/// Values at the borders of what a type holds; all of the smallest types.
fn hard(dtype: DataType) -> Vec<u64> {
    if dtype.size() == 1 {
        return (0..256).collect();
    }
    if !dtype.is_float() {
        let mask = u64::MAX >> (64 - dtype.size() * 8);
        let top = mask ^ (mask >> 1);
        return vec![0, 1, 2, 3, mask, mask - 1, top, top - 1, top + 1, top - 2, mask >> 9, 10007];
    }
    let (sign, infinity, nan) = layout(dtype);
    let least = infinity & !(infinity << 1); // the least normal number
    let one = infinity >> 1 & infinity;
    let nans = [nan, nan | 1, infinity + 1];
    let numbers = [0, 1, least - 1, least, least + 1, one, one + 1, infinity - 1, infinity];
    nans.into_iter().chain(numbers).flat_map(|x| [x, x | sign]).collect()
}

/// Whether the device takes subnormals of `dtype` for zero.
fn flushes(device: &Arc<dyn Device>, dtype: DataType) -> Check<bool> {
    let limits = device.limits();
    // f16 is decoded to normal numbers, and integers have none.
    if !dtype.is_float() || dtype == DataType::F16 || limits.max_sources < 2 {
        return Ok(false);
    }
    let rig = Rig::new(device)?;
    let (width, size) = (dtype.size() as usize, 64.max(unit(limits, dtype)));
    let content = 3u64.to_le_bytes()[..width].repeat(size as usize / width);
    // The product of two subnormals is zero on any device.
    for &(op, _) in limits.kernels.iter().filter(|k| k.1 == dtype && k.0 != ReduceOp::Product) {
        let (src, dst) = (rig.holding(&content)?, rig.holding(&content)?);
        let all = |buffer| Range::new(buffer, 0, size);
        let kernel = Kernel {
            stores: vec![all(dst)],
            sources: vec![all(src); 2],
            op,
            dtype,
            finish: None,
            scales: Vec::new(),
            wire: None,
        };
        rig.run(&[Op::Kernel(kernel)])?;
        if rig.read(dst, content.len())?.iter().all(|b| *b == 0) {
            return Ok(true);
        }
    }
    Ok(false)
}
