//! What is wrong is refused with the right error, before anything is written.
use super::{Outcome, Test, rig::*, table};
use crate::*;
use std::sync::Arc;

pub(super) const TESTS: &[Test] = table![
    overlapping_ranges_are_refused,
    ranges_outside_their_buffer_are_refused,
    ranges_of_broken_units_are_refused,
    malformed_kernels_are_refused,
    missing_kernels_are_refused,
    foreign_handles_are_refused,
    stale_handles_are_refused,
    a_reused_place_is_not_reached_by_its_old_handle,
    what_the_limits_lack_is_refused,
    refused_submissions_signal_nothing,
];

/// That `ops` are refused, and that the buffers still hold what they held.
fn refuses(
    rig: &Rig,
    what: &str,
    ops: &[Op],
    want: &str,
    is: impl FnOnce(&Error) -> bool,
    held: &[(BufferId, &[u8])],
) -> Check {
    refused(what, want, rig.device.prepare(ops), is)?;
    held.iter().try_for_each(|(buffer, bytes)| rig.holds(&format!("a buffer after {what} was refused"), *buffer, bytes))
}

fn overlapping_ranges_are_refused(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let (a, b) = (pattern(1, 1024), pattern(2, 1024));
    let (x, y) = (rig.holding(&a)?, rig.holding(&b)?);
    let held: [(BufferId, &[u8]); 2] = [(x, &a), (y, &b)];
    let overlap = |e: &Error| matches!(e, Error::Overlap { .. });
    let mut lists = vec![
        ("a copy onto itself", vec![copy(x, 0, x, 0, 256)]),
        ("a copy onto its own end", vec![copy(x, 0, x, 128, 256)]),
        ("two copies into one range", vec![copy(x, 0, y, 0, 256), copy(x, 512, y, 128, 256)]),
        ("a copy of what another writes", vec![copy(x, 0, y, 0, 256), copy(y, 128, x, 512, 256)]),
        ("a copy over what another reads", vec![copy(x, 0, y, 0, 256), copy(y, 512, x, 128, 256)]),
    ];
    if let Some(&(op, dtype)) = device.limits().kernels.first() {
        let range = |buffer, offset| Range::new(buffer, offset, 256);
        let kernel = |stores, sources| {
            Op::Kernel(Kernel { stores, sources, op, dtype, finish: Some(2), scales: Vec::new(), wire: None })
        };
        lists.extend([
            ("a store beside its source", vec![kernel(vec![range(x, 128)], vec![range(x, 0)])]),
            ("stores that meet", vec![kernel(vec![range(x, 0), range(x, 128)], vec![range(y, 0)])]),
            ("one store twice", vec![kernel(vec![range(x, 0); 2], vec![range(y, 0)])]),
            ("a kernel over a copy", vec![copy(x, 0, y, 0, 256), kernel(vec![range(y, 0)], vec![range(x, 512)])]),
        ]);
    }
    for (what, ops) in &lists {
        refuses(&rig, what, ops, "Overlap", overlap, &held)?;
    }
    // The same in order, and reads of one range by many, are right.
    rig.run(&[copy(x, 0, y, 0, 256), Op::Barrier, copy(y, 128, x, 512, 256)])?;
    rig.run(&[copy(x, 0, y, 0, 256), copy(x, 0, y, 256, 256), copy(x, 128, y, 512, 256)])?;
    passed()
}

fn ranges_outside_their_buffer_are_refused(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let (a, b) = (pattern(1, 1024), pattern(2, 1024));
    let (x, y) = (rig.holding(&a)?, rig.holding(&b)?);
    let held: [(BufferId, &[u8]); 2] = [(x, &a), (y, &b)];
    let outside = |e: &Error| matches!(e, Error::OutOfRange { .. });
    let unit = device.limits().copy_granularity;
    let wrapping = u64::MAX - u64::MAX % unit;
    for offset in [1024 - 256 + unit, 1024, 2048, wrapping, wrapping - 256] {
        let what = format!("256 bytes at {offset} of 1024");
        refuses(&rig, &what, &[copy(x, offset, y, 0, 256)], "OutOfRange", outside, &held)?;
        refuses(&rig, &what, &[copy(x, 0, y, offset, 256)], "OutOfRange", outside, &held)?;
        // One that is right before it changes nothing.
        let ops = [copy(x, 0, y, 0, 256), Op::Barrier, copy(x, 0, y, offset, 256)];
        refuses(&rig, &what, &ops, "OutOfRange", outside, &held)?;
        let range = Range::new(x, offset, 256);
        for op in [Op::Acquire { range, from: Domain::Host }, Op::Release { range, to: Domain::Host }] {
            refuses(&rig, &what, &[op], "OutOfRange", outside, &held)?;
        }
        let mut bytes = pattern(3, 256);
        refused(&format!("a write of {what}"), "OutOfRange", device.write(range, &bytes), outside)?;
        refused(&format!("a read of {what}"), "OutOfRange", device.read(range, &mut bytes), outside)?;
        same("the target of a refused read", &bytes, &pattern(3, 256))?;
        held.iter().try_for_each(|(buffer, bytes)| rig.holds("a buffer after a refused write", *buffer, bytes))?;
    }
    let invalid = |e: &Error| matches!(e, Error::Invalid { .. });
    let range = Range::new(x, 0, 256);
    refused("a write of 128 bytes to 256", "Invalid", device.write(range, &a[..128]), invalid)?;
    refused("a read of 256 bytes into 512", "Invalid", device.read(range, &mut [0; 512]), invalid)?;
    rig.holds("a buffer after a refused write", x, &a)?;
    refused("a buffer of no bytes", "an error", rig.buffer_of(0, Memory::Device), |_| true)?;
    passed()
}

fn ranges_of_broken_units_are_refused(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let limits = device.limits();
    let (a, b) = (pattern(1, 1024), pattern(2, 1024));
    let (x, y) = (rig.holding(&a)?, rig.holding(&b)?);
    let held: [(BufferId, &[u8]); 2] = [(x, &a), (y, &b)];
    let invalid = |e: &Error| matches!(e, Error::Invalid { .. });
    let unequal = Op::Copy { src: Range::new(x, 0, 256), dst: Range::new(y, 0, 128) };
    refuses(&rig, "a copy of 256 bytes into 128", &[unequal], "Invalid", invalid, &held)?;
    for odd in 1..limits.copy_granularity {
        for (from, to, size) in [(odd, 0, 256), (0, odd, 256), (0, 0, odd), (odd, odd, 256)] {
            let what = format!("a copy of {size} bytes from {from} to {to}");
            refuses(&rig, &what, &[copy(x, from, y, to, size)], "Invalid", invalid, &held)?;
        }
    }
    for &(op, dtype) in &limits.kernels {
        for odd in 1..limits.write_granularity.max(dtype.size()) {
            for (from, to, size) in [(odd, 0, 256), (0, odd, 256), (0, 0, odd)] {
                let (stores, sources) = (vec![Range::new(y, to, size)], vec![Range::new(x, from, size)]);
                let what = format!("{op} on {dtype} of {size} bytes from {from} to {to}");
                let ops = [Op::Kernel(Kernel {
                    stores,
                    sources,
                    op,
                    dtype,
                    finish: Some(2),
                    scales: Vec::new(),
                    wire: None,
                })];
                refused(&what, "Invalid", device.prepare(&ops), invalid)?;
            }
        }
    }
    held.iter().try_for_each(|(buffer, bytes)| rig.holds("a buffer after refusals", *buffer, bytes))?;
    passed()
}

fn malformed_kernels_are_refused(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let limits = device.limits();
    let Some(&(op, dtype)) = limits.kernels.first() else { return not_applicable("no kernels") };
    let (a, b) = (pattern(1, 1024), pattern(2, 1024));
    let (x, y) = (rig.holding(&a)?, rig.holding(&b)?);
    let kernel = |stores, sources| {
        Op::Kernel(Kernel { stores, sources, op, dtype, finish: Some(2), scales: Vec::new(), wire: None })
    };
    let range = |buffer, size| Range::new(buffer, 0, size);
    let mut lists = vec![
        ("a kernel without stores".into(), kernel(vec![], vec![range(x, 256)])),
        ("a kernel without sources".into(), kernel(vec![range(y, 256)], vec![])),
        ("a store of another size".into(), kernel(vec![range(y, 128)], vec![range(x, 256)])),
    ];
    if limits.max_sources < 4096 {
        let sources = vec![range(x, 256); limits.max_sources as usize + 1];
        lists.push((format!("a kernel of {} sources", sources.len()), kernel(vec![range(y, 256)], sources)));
    }
    if limits.max_bindings <= limits.max_sources.min(64) {
        let sources = (0..limits.max_bindings).map(|_| Ok(range(rig.holding(&a)?, 256))).collect::<Check<Vec<_>>>()?;
        lists.push((format!("a kernel of {} buffers", sources.len() + 1), kernel(vec![range(y, 256)], sources)));
    }
    let unit = limits.write_granularity.max(dtype.size());
    let size = limits.max_kernel_elements.saturating_add(1).saturating_mul(dtype.size()).checked_next_multiple_of(unit);
    if let Some(size) = size.filter(|s| *s <= 128 << 20) {
        let (from, to) = (rig.buffer(size, Memory::Device)?, rig.buffer(size, Memory::Device)?);
        lists.push((format!("a kernel of {size} bytes"), kernel(vec![range(to, size)], vec![range(from, size)])));
    }
    for (what, op) in lists {
        let held: [(BufferId, &[u8]); 2] = [(x, &a), (y, &b)];
        refuses(&rig, &what, &[op], "Invalid", |e| matches!(e, Error::Invalid { .. }), &held)?;
    }
    passed()
}

fn missing_kernels_are_refused(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let (a, b) = (pattern(1, 1024), pattern(2, 1024));
    let (x, y) = (rig.holding(&a)?, rig.holding(&b)?);
    let mut missing = 0;
    for (op, dtype) in ReduceOp::ALL.into_iter().flat_map(|op| DataType::ALL.map(|d| (op, d))) {
        if device.limits().reduces(op, dtype) {
            continue;
        }
        missing += 1;
        let (stores, sources) = (vec![Range::new(y, 0, 256)], vec![Range::new(x, 0, 256)]);
        let ops = [Op::Kernel(Kernel { stores, sources, op, dtype, finish: Some(2), scales: Vec::new(), wire: None })];
        let held: [(BufferId, &[u8]); 2] = [(x, &a), (y, &b)];
        let is = |e: &Error| matches!(e, Error::NoKernel { op: o, dtype: d, .. } if (*o, *d) == (op, dtype));
        refuses(&rig, &format!("{op} on {dtype}"), &ops, "NoKernel", is, &held)?;
    }
    if missing == 0 { not_applicable("it has a kernel for every pair") } else { passed() }
}

fn foreign_handles_are_refused(device: &Arc<dyn Device>) -> Outcome {
    let other = said("sibling", device.sibling())?;
    let (rig, far) = (Rig::new(device)?, Rig::new(&other)?);
    // The same places in both devices' tables.
    let (a, b) = (pattern(1, 256), pattern(2, 256));
    let (x, y) = (rig.holding(&a)?, far.holding(&b)?);
    let commands = far.prepare(&[])?;
    let foreign = |e: &Error| matches!(e, Error::Foreign { .. });
    let range = Range::new(y, 0, 256);
    let mut bytes = pattern(3, 256);
    refused("size of a foreign buffer", "Foreign", device.size(y), foreign)?;
    refused("a write to a foreign buffer", "Foreign", device.write(range, &bytes), foreign)?;
    refused("a read of a foreign buffer", "Foreign", device.read(range, &mut bytes), foreign)?;
    for ops in [
        vec![copy(y, 0, x, 0, 256)],
        vec![copy(x, 0, y, 0, 256)],
        vec![Op::Acquire { range, from: Domain::Host }],
        vec![Op::Release { range, to: Domain::Foreign }],
    ] {
        refused(&format!("{ops:?} of a foreign buffer"), "Foreign", device.prepare(&ops), foreign)?;
    }
    for kind in &device.limits().memory_export {
        refused("export of a foreign buffer", "Foreign", device.export(y, *kind).map(|_| ()), foreign)?;
    }
    let point = Point { timeline: far.timeline, value: 1 };
    refused("value of a foreign timeline", "Foreign", device.value(far.timeline), foreign)?;
    let past = device.clock().now();
    refused("a wait for a foreign point", "Foreign", device.wait_any(&[point], device.wakes(), past), foreign)?;
    let submission = Submission { commands: None, waits: &[], signal: point };
    refused("a foreign signal", "Foreign", device.submit(&[submission]), foreign)?;
    let signal = Point { timeline: rig.timeline, value: 1 };
    let submission = Submission { commands: Some(commands), waits: &[], signal };
    refused("foreign commands", "Foreign", device.submit(&[submission]), foreign)?;
    if device.limits().gated {
        refused("a host signal of a foreign timeline", "Foreign", device.signal(point), foreign)?;
        let submission = Submission { commands: None, waits: &[point], signal };
        refused("a foreign wait", "Foreign", device.submit(&[submission]), foreign)?;
    }
    // Nothing to destroy here: what has the same place stays.
    device.destroy_buffer(y);
    device.destroy_timeline(far.timeline);
    device.destroy_commands(commands);
    rig.holds("a buffer after foreign calls", x, &a)?;
    far.holds("a buffer after calls to another device", y, &b)?;
    rig.run(&[])?;
    far.run(&[])?;
    other.destroy_commands(commands);
    passed()
}

fn stale_handles_are_refused(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let a = pattern(1, 256);
    let (x, gone) = (rig.holding(&a)?, rig.holding(&pattern(2, 256))?);
    let commands = rig.prepare(&[])?;
    let timeline = rig.timeline()?;
    device.destroy_buffer(gone);
    device.destroy_commands(commands);
    device.destroy_timeline(timeline);
    let stale = |e: &Error| matches!(e, Error::Stale { .. });
    let range = Range::new(gone, 0, 256);
    let mut bytes = pattern(3, 256);
    refused("size of a destroyed buffer", "Stale", device.size(gone), stale)?;
    refused("a write to a destroyed buffer", "Stale", device.write(range, &bytes), stale)?;
    refused("a read of a destroyed buffer", "Stale", device.read(range, &mut bytes), stale)?;
    for ops in [vec![copy(gone, 0, x, 0, 256)], vec![copy(x, 0, gone, 0, 256)]] {
        refused("a copy with a destroyed buffer", "Stale", device.prepare(&ops), stale)?;
    }
    for kind in &device.limits().memory_export {
        refused("export of a destroyed buffer", "Stale", device.export(gone, *kind).map(|_| ()), stale)?;
    }
    let point = Point { timeline, value: 1 };
    refused("value of a destroyed timeline", "Stale", device.value(timeline), stale)?;
    let past = device.clock().now();
    refused("a wait for a destroyed timeline", "Stale", device.wait_any(&[point], device.wakes(), past), stale)?;
    let submission = Submission { commands: None, waits: &[], signal: point };
    refused("a signal of a destroyed timeline", "Stale", device.submit(&[submission]), stale)?;
    let signal = Point { timeline: rig.timeline, value: 1 };
    let submission = Submission { commands: Some(commands), waits: &[], signal };
    refused("destroyed commands", "Stale", device.submit(&[submission]), stale)?;
    if device.limits().gated {
        refused("a host signal of a destroyed timeline", "Stale", device.signal(point), stale)?;
    }
    // To destroy it again is to do nothing.
    device.destroy_buffer(gone);
    device.destroy_timeline(timeline);
    device.destroy_commands(commands);
    rig.holds("a buffer after stale calls", x, &a)?;
    rig.run(&[])?;
    passed()
}

fn a_reused_place_is_not_reached_by_its_old_handle(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let stale = |e: &Error| matches!(e, Error::Stale { .. });
    let content = pattern(1, 256);
    let old = rig.holding(&pattern(2, 256))?;
    let timeline = rig.timeline()?;
    device.destroy_buffer(old);
    device.destroy_timeline(timeline);
    // One of these takes the place that became free.
    let new = (0..4).map(|_| rig.holding(&content)).collect::<Check<Vec<_>>>()?;
    let timelines = (0..4).map(|_| rig.timeline()).collect::<Check<Vec<_>>>()?;
    ensure(!new.contains(&old) && !timelines.contains(&timeline), || "a handle is never given out twice".into())?;
    refused("a write by an old handle", "Stale", device.write(Range::new(old, 0, 256), &pattern(3, 256)), stale)?;
    refused("a copy by an old handle", "Stale", device.prepare(&[copy(new[0], 0, old, 0, 256)]), stale)?;
    refused("a value by an old handle", "Stale", device.value(timeline), stale)?;
    device.destroy_buffer(old);
    device.destroy_timeline(timeline);
    new.iter().try_for_each(|b| rig.holds("a buffer in a reused place", *b, &content))?;
    for timeline in timelines {
        let point = Point { timeline, value: 1 };
        rig.submit(None, &[], point)?;
        rig.wait(point)?;
    }
    passed()
}

fn what_the_limits_lack_is_refused(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let limits = device.limits();
    let unsupported = |e: &Error| matches!(e, Error::Unsupported { .. });
    if !limits.mapped {
        refused("Mapped memory", "Unsupported", rig.buffer_of(256, Memory::Mapped), unsupported)?;
    }
    if !limits.timeline_export {
        refused("a shareable timeline", "Unsupported", device.create_timeline(true), unsupported)?;
    }
    let buffer = rig.buffer(4096, Memory::Device)?;
    for kind in [SharedKind::DmaBuf, SharedKind::OpaqueFd, SharedKind::Host] {
        let what = format!("export as {kind:?} of a buffer that was not made exportable");
        let exported = device.export(buffer, kind).map(|_| ());
        if limits.unified && kind == SharedKind::Host {
            exported.map_err(|e| format!("{what} was to succeed, as its memory is the host's own; it said: {e}"))?;
        } else if limits.memory_export.contains(&kind) {
            refused(&what, "an error", exported, |_| true)?;
        } else {
            refused(&what, "Unsupported", exported, unsupported)?;
        }
    }
    if !limits.gated {
        let point = Point { timeline: rig.timeline, value: 1 };
        refused("a signal from the host", "Unsupported", device.signal(point), unsupported)?;
        rig.run(&[])?;
        let submission = Submission { commands: None, waits: &[point], signal: rig.next() };
        refused("a submission with waits", "an error", device.submit(&[submission]), |_| true)?;
    }
    passed()
}

fn refused_submissions_signal_nothing(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let content = pattern(1, 256);
    let (x, y) = (rig.holding(&content)?, rig.holding(&pattern(2, 256))?);
    let commands = rig.prepare(&[copy(y, 0, x, 0, 256)])?;
    let timeline = rig.timeline()?;
    device.destroy_timeline(timeline);
    let signal = Point { timeline, value: 1 };
    let submission = Submission { commands: Some(commands), waits: &[], signal };
    let stale = |e: &Error| matches!(e, Error::Stale { .. });
    refused("a signal of a destroyed timeline", "Stale", device.submit(&[submission]), stale)?;
    // What ran before this has completed once this has.
    rig.run(&[])?;
    rig.holds("a buffer whose overwriting was refused", x, &content)?;
    // They were not used up.
    let point = rig.next();
    rig.submit(Some(commands), &[], point)?;
    rig.wait(point)?;
    rig.holds("a buffer whose overwriting was accepted", x, &pattern(2, 256))?;
    device.destroy_commands(commands);
    let gone = rig.prepare(&[])?;
    device.destroy_commands(gone);
    let point = rig.next();
    let submission = Submission { commands: Some(gone), waits: &[], signal: point };
    refused("destroyed commands", "Stale", device.submit(&[submission]), stale)?;
    rig.submit(None, &[], point)?; // its value is still free
    rig.wait(point)?;
    passed()
}
