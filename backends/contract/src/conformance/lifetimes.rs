//! Who a device is, what stays alive, and what it counts.
use super::{Outcome, Test, rig::*, table};
use crate::*;
use std::sync::{Arc, Mutex, PoisonError};

pub(super) const BASICS: &[Test] = table![it_says_who_it_is, its_limits_make_sense];

pub(super) const TESTS: &[Test] = table![
    what_is_in_flight_outlives_its_handles,
    prepared_commands_keep_their_buffers,
    whoever_watches_hears_of_destroyed_buffers,
    commands_run_as_often_as_the_limits_say,
    work_is_counted,
    memory_is_counted_and_comes_back,
    siblings_are_devices_of_their_own,
];

fn it_says_who_it_is(device: &Arc<dyn Device>) -> Outcome {
    let info = device.info();
    for (what, text) in [("name", &*info.name), ("driver", &*info.driver), ("backend", info.backend)] {
        ensure(!text.trim().is_empty(), || format!("a device has a {what}"))?;
    }
    said("status", device.status())?;
    let rig = Rig::new(device)?;
    let (buffer, commands) = (rig.buffer(64, Memory::Device)?, rig.prepare(&[])?);
    let ids = [rig.timeline.device, buffer.device, commands.device];
    device.destroy_commands(commands);
    ensure(ids == [info.id; 3], || format!("handles are of {}, not {ids:?}", info.id))?;
    passed()
}

fn its_limits_make_sense(device: &Arc<dyn Device>) -> Outcome {
    let limits = device.limits();
    for (what, unit) in [("write", limits.write_granularity), ("copy", limits.copy_granularity)] {
        ensure(unit.is_power_of_two() && unit <= 256, || format!("a {what} granularity of {unit} bytes"))?;
    }
    ensure(!limits.longest_wait.is_zero(), || "waits of no length make no progress".into())?;
    for (i, kernel) in limits.kernels.iter().enumerate() {
        ensure(!limits.kernels[..i].contains(kernel), || format!("{kernel:?} is listed twice"))?;
    }
    if !limits.kernels.is_empty() {
        ensure(limits.max_sources >= 2, || "a kernel folds at least two sources".into())?;
        ensure(limits.max_bindings >= 4, || "a kernel binds at least four buffers".into())?;
        ensure(limits.max_kernel_elements >= 1 << 16, || "a kernel of fewer than 65536 elements".into())?;
    }
    passed()
}

fn what_is_in_flight_outlives_its_handles(device: &Arc<dyn Device>) -> Outcome {
    const SIZE: usize = 4 << 20;
    let rig = Rig::new(device)?;
    let dst = rig.holding(&pattern(3, SIZE))?;
    for round in 0..3 {
        let a = pattern(10 + round, SIZE);
        let (src, through) = (rig.holding(&a)?, rig.buffer(SIZE as u64, Memory::Device)?);
        let timeline = rig.timeline()?;
        let size = SIZE as u64;
        let commands = rig.prepare(&[copy(src, 0, through, 0, size), Op::Barrier, copy(through, 0, dst, 0, size)])?;
        let point = rig.next();
        rig.submit(Some(commands), &[], Point { timeline, value: 1 })?;
        device.destroy_buffer(through);
        device.destroy_buffer(src);
        device.destroy_commands(commands);
        device.destroy_timeline(timeline);
        rig.submit(None, &[], point)?;
        rig.wait(point)?;
        rig.holds("a copy out of buffers destroyed after the submit", dst, &a)?;
    }
    passed()
}

fn prepared_commands_keep_their_buffers(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let a = pattern(1, 4096);
    let (src, dst) = (rig.holding(&a)?, rig.holding(&pattern(2, 4096))?);
    let commands = rig.prepare(&[copy(src, 0, dst, 0, 4096)])?;
    device.destroy_buffer(src);
    let others = (0..4).map(|_| rig.holding(&pattern(3, 4096))).collect::<Check<Vec<_>>>()?;
    let point = rig.next();
    rig.submit(Some(commands), &[], point)?;
    rig.wait(point)?;
    rig.holds("a copy out of a buffer destroyed after the prepare", dst, &a)?;
    others.iter().try_for_each(|b| rig.holds("a buffer made since", *b, &pattern(3, 4096)))?;
    device.destroy_commands(commands);
    passed()
}

fn whoever_watches_hears_of_destroyed_buffers(device: &Arc<dyn Device>) -> Outcome {
    #[derive(Default)]
    struct Heard(Mutex<Vec<BufferId>>);
    impl Watch for Heard {
        fn destroyed(&self, buffer: BufferId) {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
        }
    }
    let (rig, heard) = (Rig::new(device)?, Arc::new(Heard::default()));
    let (kept, gone) = (rig.holding(&pattern(1, 256))?, rig.holding(&pattern(2, 256))?);
    let watcher: Arc<dyn Watch> = heard.clone();
    device.watch(Arc::downgrade(&watcher));
    device.destroy_buffer(gone);
    device.destroy_buffer(gone); // stale, so it is not told twice
    let told = heard.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    ensure(told == [gone], || format!("told of {told:?}, not of {gone:?} alone"))?;
    rig.holds("a buffer that stayed", kept, &pattern(1, 256))?;
    passed()
}

fn commands_run_as_often_as_the_limits_say(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let (src, dst) = (rig.buffer(256, Memory::Upload)?, rig.holding(&pattern(0, 256))?);
    let commands = rig.prepare(&[copy(src, 0, dst, 0, 256)])?;
    for round in 1..4 {
        let content = pattern(round, 256);
        rig.write(src, &content)?;
        let point = rig.next();
        let submission = Submission { commands: Some(commands), waits: &[], signal: point };
        if round > 1 && !device.limits().resubmit {
            let stale = |e: &Error| matches!(e, Error::Stale { .. });
            refused("commands that a submit used up", "Stale", device.submit(&[submission]), stale)?;
            rig.holds("what the first submit wrote", dst, &pattern(1, 256))?;
            return passed();
        }
        said("submit", device.submit(&[submission]))?;
        rig.wait(point)?;
        rig.holds(&format!("what submit {round} of the same commands wrote"), dst, &content)?;
    }
    // Twice in one submit.
    let (one, two) = (rig.next(), rig.next());
    let submission = |signal| Submission { commands: Some(commands), waits: &[], signal };
    said("submit", device.submit(&[submission(one), submission(two)]))?;
    rig.wait(two)?;
    device.destroy_commands(commands);
    passed()
}

fn work_is_counted(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let (x, y) = (rig.holding(&pattern(1, 1024))?, rig.holding(&pattern(2, 1024))?);
    let mut ops = vec![copy(x, 0, y, 0, 256), copy(x, 256, y, 256, 256), Op::Barrier];
    let kernel = device.limits().kernels.first();
    ops.extend(kernel.map(|&(op, dtype)| {
        let (stores, sources) = (vec![Range::new(y, 512, 256)], vec![Range::new(x, 512, 256)]);
        Op::Kernel(Kernel { stores, sources, op, dtype, finish: Some(2), scales: Vec::new(), wire: None })
    }));
    for _ in 0..2 {
        let before = device.counters();
        rig.run(&ops)?;
        let after = device.counters();
        for (what, risen, want) in [
            ("submits", after.submits - before.submits, 1),
            ("prepares", after.prepares - before.prepares, 1),
            ("copies", after.copies - before.copies, 2),
            ("dispatches", after.dispatches - before.dispatches, u64::from(kernel.is_some())),
        ] {
            ensure(risen == want, || format!("the counter of {what} was to rise by {want}; it rose by {risen}"))?;
        }
    }
    passed()
}

fn memory_is_counted_and_comes_back(device: &Arc<dyn Device>) -> Outcome {
    const SIZE: u64 = 1 << 20;
    // Whatever the device keeps for itself, it has after this.
    let use_some = || -> Check<u64> {
        let rig = Rig::new(device)?;
        let (x, y) = (rig.holding(&pattern(1, SIZE as usize))?, rig.holding(&pattern(2, SIZE as usize))?);
        let most = device.counters().allocated;
        rig.run(&[copy(x, 0, y, 0, SIZE)])?;
        rig.holds("a copy", y, &pattern(1, SIZE as usize))?;
        Ok(most)
    };
    use_some()?;
    Rig::new(device)?.run(&[])?;
    let before = device.counters().allocated;
    for _ in 0..10 {
        let most = use_some()?;
        ensure(most >= before + 2 * SIZE, || format!("{before} bytes and two buffers of {SIZE} are not {most}"))?;
        Rig::new(device)?.run(&[])?;
        let after = device.counters().allocated;
        ensure(after == before, || format!("{before} bytes were allocated before and {after} are after"))?;
    }
    passed()
}

fn siblings_are_devices_of_their_own(device: &Arc<dyn Device>) -> Outcome {
    let other = said("sibling", device.sibling())?;
    ensure(other.info().id != device.info().id, || "a sibling has an id of its own".into())?;
    ensure(other.info().name == device.info().name, || "a sibling is the same physical device".into())?;
    let before = device.counters();
    let rig = Rig::new(&other)?;
    let (x, y) = (rig.holding(&pattern(1, 256))?, rig.holding(&pattern(2, 256))?);
    rig.run(&[copy(x, 0, y, 0, 256)])?;
    rig.holds("a copy on a sibling", y, &pattern(1, 256))?;
    ensure(device.counters() == before, || "a sibling's work is not counted here".into())?;
    drop(rig);
    // It goes, and this one stays.
    drop(other);
    said("status", device.status())?;
    Rig::new(device)?.run(&[])?;
    passed()
}
