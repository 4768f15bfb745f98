//! Bytes arrive, in order, and only where they were sent.
use super::{Outcome, Test, rig::*, table};
use crate::*;
use std::sync::Arc;

pub(super) const TESTS: &[Test] = table![
    host_reads_and_writes_any_bytes,
    copies_between_all_kinds_of_memory,
    copies_of_no_bytes_do_nothing,
    copies_of_many_megabytes,
    independent_copies_all_arrive,
    barriers_order_copies,
    submissions_run_in_order,
    kernels_see_copies_and_copies_see_kernels,
    lists_without_work_complete,
];

fn host_reads_and_writes_any_bytes(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    for memory in kinds(device) {
        let mut want = pattern(1, 1001);
        let buffer = rig.buffer(1001, memory)?;
        let size = said("size", device.size(buffer))?;
        ensure(size == 1001, || format!("a buffer has the 1001 bytes that were asked for, not {size}"))?;
        rig.write(buffer, &want)?;
        for (seed, (offset, size)) in
            [(0, 1), (1, 2), (3, 5), (30, 0), (511, 257), (1000, 1), (1001, 0)].into_iter().enumerate()
        {
            let bytes = pattern(10 + seed as u64, size);
            let range = Range::new(buffer, offset as u64, size as u64);
            said("write", device.write(range, &bytes))?;
            want[offset..][..size].copy_from_slice(&bytes);
            let mut got = vec![0; size];
            said("read", device.read(range, &mut got))?;
            same(&format!("{size} bytes at {offset} of {memory:?} memory"), &got, &bytes)?;
        }
        rig.holds(&format!("{memory:?} memory after writes of single bytes"), buffer, &want)?;
    }
    passed()
}

fn copies_between_all_kinds_of_memory(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let unit = device.limits().copy_granularity;
    let size = 200 * unit + 8192;
    for (i, from) in kinds(device).into_iter().filter(|m| *m != Memory::Download).enumerate() {
        for (j, to) in kinds(device).into_iter().filter(|m| *m != Memory::Upload).enumerate() {
            let (src, dst) = (rig.buffer(size, from)?, rig.buffer(size, to)?);
            let sent = pattern(100 + i as u64, size as usize);
            let mut want = pattern(200 + j as u64, size as usize);
            rig.write(src, &sent)?;
            rig.write(dst, &want)?;
            let mut ops = Vec::new();
            // Each after the one before it in the destination, with a gap of guard bytes between.
            let mut end = 0;
            for (offset, gap, n) in [(0, 1, 1), (1, 1, 2), (7, 2, 63), (200, 1, 3), (3, 5, 65), (64, 3, 1), (5, 1, 4)] {
                let (offset, n) = (offset * unit, n * unit);
                let at = end + gap * unit;
                ops.push(copy(src, offset, dst, at, n));
                want[at as usize..][..n as usize].copy_from_slice(&sent[offset as usize..][..n as usize]);
                end = at + n;
            }
            let rest = size - end - 2 * unit;
            ops.push(copy(src, unit, dst, end + unit, rest));
            want[(end + unit) as usize..][..rest as usize].copy_from_slice(&sent[unit as usize..][..rest as usize]);
            rig.run(&ops)?;
            rig.holds(&format!("copies from {from:?} to {to:?}"), dst, &want)?;
            rig.holds(&format!("the source of copies from {from:?} to {to:?}"), src, &sent)?;
        }
    }
    passed()
}

fn copies_of_no_bytes_do_nothing(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let (a, b) = (pattern(1, 256), pattern(2, 256));
    let (src, dst) = (rig.holding(&a)?, rig.holding(&b)?);
    rig.run(&[copy(src, 0, dst, 0, 0), copy(src, 256, dst, 128, 0), copy(src, 128, dst, 256, 0)])?;
    rig.holds("the destination of copies of no bytes", dst, &b)?;
    rig.holds("the source of copies of no bytes", src, &a)?;
    passed()
}

fn copies_of_many_megabytes(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let unit = device.limits().copy_granularity;
    let size = (17 << 20) + 3 * unit;
    let sent = pattern(1, size as usize);
    let src = rig.holding(&sent)?;
    let dst = rig.holding(&vec![0x5a; size as usize])?;
    rig.run(&[copy(src, 0, dst, unit, size - 2 * unit)])?;
    let mut want = vec![0x5a; size as usize];
    want[unit as usize..(size - unit) as usize].copy_from_slice(&sent[..(size - 2 * unit) as usize]);
    rig.holds("a copy of 17 MiB", dst, &want)?;
    passed()
}

fn independent_copies_all_arrive(device: &Arc<dyn Device>) -> Outcome {
    const BLOCK: u64 = 256;
    const COUNT: u64 = 1000;
    let rig = Rig::new(device)?;
    let sent = pattern(1, (BLOCK * COUNT) as usize);
    let src = rig.holding(&sent)?;
    let dst = rig.holding(&pattern(2, sent.len()))?;
    // 387 and COUNT have no common factor, so every block goes somewhere else.
    let ops: Vec<Op> = (0..COUNT).map(|i| copy(src, i * BLOCK, dst, i * 387 % COUNT * BLOCK, BLOCK)).collect();
    rig.run(&ops)?;
    let mut want = vec![0; sent.len()];
    for (i, block) in sent.chunks(BLOCK as usize).enumerate() {
        want[i * 387 % COUNT as usize * BLOCK as usize..][..BLOCK as usize].copy_from_slice(block);
    }
    rig.holds("a thousand copies without barriers", dst, &want)?;
    passed()
}

/// Copies between random blocks of two buffers, each of which depends on those before it; and what they leave.
fn dependent(buffers: [BufferId; 2], content: &mut [Vec<u8>; 2], count: u64) -> Vec<Op> {
    let block = 64;
    let blocks = content[0].len() / block;
    let mut ops = Vec::new();
    for i in 0..count {
        let pick = |salt| hash(i * 4 + salt) as usize;
        let (from, to) = (pick(0) % 2, pick(1) % 2);
        let src = pick(2) % blocks;
        // Never onto itself.
        let dst = if from == to { (src + 1 + pick(3) % (blocks - 1)) % blocks } else { pick(3) % blocks };
        ops.push(copy(buffers[from], (src * block) as u64, buffers[to], (dst * block) as u64, block as u64));
        let bytes = content[from][src * block..][..block].to_vec();
        content[to][dst * block..][..block].copy_from_slice(&bytes);
    }
    ops
}

fn barriers_order_copies(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let mut content = [pattern(1, 256), pattern(2, 256)];
    let buffers = [rig.holding(&content[0])?, rig.holding(&content[1])?];
    let ops = dependent(buffers, &mut content, 100);
    let ops: Vec<Op> = ops.into_iter().flat_map(|op| [op, Op::Barrier]).collect();
    rig.run(&ops)?;
    rig.holds("copies between barriers", buffers[0], &content[0])?;
    rig.holds("copies between barriers", buffers[1], &content[1])?;
    passed()
}

fn submissions_run_in_order(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let mut content = [pattern(3, 256), pattern(4, 256)];
    let buffers = [rig.holding(&content[0])?, rig.holding(&content[1])?];
    let ops = dependent(buffers, &mut content, 60);
    let commands = ops.iter().map(|op| rig.prepare(std::slice::from_ref(op))).collect::<Check<Vec<_>>>()?;
    // Some alone, some together; the last point is above all the others.
    for group in commands.chunks(7).flat_map(|c| c.split_at_checked(3).map_or(vec![c], |(a, b)| vec![a, b])) {
        let submissions: Vec<Submission> =
            group.iter().map(|c| Submission { commands: Some(*c), waits: &[], signal: rig.next() }).collect();
        said("submit", device.submit(&submissions))?;
    }
    let last = rig.next();
    rig.submit(None, &[], last)?;
    rig.wait(last)?;
    rig.holds("copies in submissions of their own", buffers[0], &content[0])?;
    rig.holds("copies in submissions of their own", buffers[1], &content[1])?;
    commands.into_iter().for_each(|c| device.destroy_commands(c));
    passed()
}

fn kernels_see_copies_and_copies_see_kernels(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let Some(&(op, dtype)) = device.limits().kernels.iter().find(|(op, _)| *op == ReduceOp::Max) else {
        return not_applicable("no kernel for max");
    };
    // Positive numbers of any type whose order is that of their bytes: equal bytes, none above 0x7b.
    let bytes = |seed: u64| -> Vec<u8> {
        (0..1024u64 / 8).flat_map(|i| [(hash(seed * 1000 + i) % 0x70 + 1) as u8; 8]).collect()
    };
    let (a, b) = (bytes(1), bytes(2));
    let (upload, download) = (rig.buffer(1024, Memory::Upload)?, rig.buffer(1024, Memory::Download)?);
    let (x, y) = (rig.holding(&pattern(9, 1024))?, rig.holding(&b)?);
    rig.write(upload, &a)?;
    rig.write(download, &pattern(8, 1024))?;
    let all = |buffer| Range::new(buffer, 0, 1024);
    let kernel = Kernel {
        stores: vec![all(x)],
        sources: vec![all(x), all(y)],
        op,
        dtype,
        finish: Some(2),
        scales: Vec::new(),
        wire: None,
    };
    rig.run(&[
        copy(upload, 0, x, 0, 1024),
        Op::Barrier,
        Op::Kernel(kernel),
        Op::Barrier,
        copy(x, 0, download, 0, 1024),
    ])?;
    let want: Vec<u8> = a.iter().zip(&b).map(|(a, b)| *a.max(b)).collect();
    rig.holds("copy, kernel, copy", download, &want)?;
    passed()
}

fn lists_without_work_complete(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    rig.run(&[])?;
    rig.run(&[Op::Barrier, Op::Barrier])?;
    let point = rig.next();
    rig.submit(None, &[], point)?;
    rig.wait(point)?;
    said("submit of nothing", device.submit(&[]))?;
    passed()
}

/// The kinds of memory that the device has.
fn kinds(device: &Arc<dyn Device>) -> Vec<Memory> {
    let mut kinds = vec![Memory::Device, Memory::Upload, Memory::Download];
    kinds.extend(device.limits().mapped.then_some(Memory::Mapped));
    kinds
}
