//! Submissions that wait for what nobody has signalled yet: they cost the caller nothing, and run in order later.
use super::{Outcome, Test, rig::*, table, timelines::ends};
use crate::*;
use std::{sync::Arc, sync::mpsc, thread};

pub(super) const TESTS: &[Test] = table![
    submissions_wait_for_their_gate,
    submissions_wait_for_all_their_points,
    gated_submissions_return_at_once_and_run_in_order,
    gates_opened_out_of_order_keep_the_order,
    gates_open_from_another_thread,
    what_waits_at_a_gate_outlives_its_handles,
];

/// A timeline that the host raises. It is opened wide at the end, so that a failed test leaves no queue stuck.
pub(super) struct Gate<'a> {
    device: &'a Arc<dyn Device>,
    pub timeline: TimelineId,
}

impl<'a> Gate<'a> {
    pub fn new(rig: &Rig<'a>) -> Check<Self> {
        Ok(Gate { device: rig.device, timeline: rig.timeline()? })
    }
    pub fn at(&self, value: u64) -> Point {
        Point { timeline: self.timeline, value }
    }
    pub fn open(&self, value: u64) -> Check {
        said("signal", self.device.signal(self.at(value)))
    }
}

impl Drop for Gate<'_> {
    fn drop(&mut self) {
        // It fails only where the device is gone, which the test has then said.
        let _ = self.device.signal(self.at(1 << 40));
    }
}

/// That `point` is not reached, by every way of asking.
pub(super) fn unreached(device: &Arc<dyn Device>, what: &str, point: Point) -> Check {
    let value = said("value", device.value(point.timeline))?;
    ensure(value < point.value, || format!("{what}: {point:?} was not to be reached, and the value is {value}"))?;
    ends(what, device.wait_any(&[point], device.wakes(), device.clock().now()), Waited::TimedOut)
}

fn submissions_wait_for_their_gate(device: &Arc<dyn Device>) -> Outcome {
    if !device.limits().gated {
        return not_applicable("not gated");
    }
    let rig = Rig::new(device)?;
    let gate = Gate::new(&rig)?;
    let (a, b) = (pattern(1, 256), pattern(2, 256));
    let (x, y) = (rig.holding(&a)?, rig.holding(&b)?);
    for value in 1..4 {
        let commands = rig.prepare(&[copy(x, 0, y, 0, 256)])?;
        let point = rig.next();
        rig.submit(Some(commands), &[gate.at(value)], point)?;
        unreached(device, "a submission whose gate is shut", point)?;
        gate.open(value)?;
        rig.wait(point)?;
        rig.holds("what a gated copy wrote", y, &a)?;
        device.destroy_commands(commands);
    }
    // An open gate holds nobody up.
    let point = rig.next();
    rig.submit(None, &[gate.at(3), gate.at(1)], point)?;
    rig.wait(point)?;
    passed()
}

fn submissions_wait_for_all_their_points(device: &Arc<dyn Device>) -> Outcome {
    if !device.limits().gated {
        return not_applicable("not gated");
    }
    let rig = Rig::new(device)?;
    let (one, two) = (Gate::new(&rig)?, Gate::new(&rig)?);
    let first = rig.next();
    rig.submit(None, &[], first)?;
    let point = rig.next();
    rig.submit(None, &[first, one.at(1), two.at(1)], point)?;
    rig.wait(first)?;
    unreached(device, "a submission of two shut gates", point)?;
    two.open(1)?;
    unreached(device, "a submission with a shut gate", point)?;
    one.open(1)?;
    rig.wait(point)?;
    passed()
}

fn gated_submissions_return_at_once_and_run_in_order(device: &Arc<dyn Device>) -> Outcome {
    if !device.limits().gated {
        return not_applicable("not gated");
    }
    let rig = Rig::new(device)?;
    let gate = Gate::new(&rig)?;
    let contents: Vec<Vec<u8>> = (0..5).map(|i| pattern(i, 256)).collect();
    let buffers = contents.iter().map(|c| rig.holding(c)).collect::<Check<Vec<_>>>()?;
    let commands =
        (0..4).map(|i| rig.prepare(&[copy(buffers[i], 0, buffers[i + 1], 0, 256)])).collect::<Check<Vec<_>>>()?;
    let (done, submitted) = mpsc::channel::<()>();
    let last = thread::scope(|scope| {
        // Lets a submit that blocks go on after a while, so that it fails instead of standing for ever.
        let gate = &gate;
        let blocked = scope.spawn(move || {
            let blocked = submitted.recv_timeout(PATIENCE / 6) == Err(mpsc::RecvTimeoutError::Timeout);
            if blocked { gate.open(8).map(|()| blocked) } else { Ok(blocked) }
        });
        let mut last = None;
        for (i, commands) in commands.iter().enumerate() {
            let point = rig.next();
            rig.submit(Some(*commands), &[gate.at(i as u64 + 1)], point)?;
            last = Some(point);
        }
        drop(done);
        let blocked = blocked.join().map_err(|_| "signal panicked")??;
        ensure(!blocked, || {
            "a submit behind a shut gate was to return at once; it returned once the gate opened".into()
        })?;
        last.ok_or("nothing was submitted".to_string())
    })?;
    unreached(device, "four gated submissions", Point { value: last.value - 3, ..last })?;
    gate.open(2)?;
    rig.wait(Point { value: last.value - 2, ..last })?;
    unreached(device, "the third of four gates", Point { value: last.value - 1, ..last })?;
    gate.open(4)?;
    rig.wait(last)?;
    // In order, the first content goes through them all.
    buffers.iter().try_for_each(|b| rig.holds("what four gated copies passed on", *b, &contents[0]))?;
    commands.into_iter().for_each(|c| device.destroy_commands(c));
    passed()
}

fn gates_opened_out_of_order_keep_the_order(device: &Arc<dyn Device>) -> Outcome {
    if !device.limits().gated {
        return not_applicable("not gated");
    }
    let rig = Rig::new(device)?;
    let (one, two) = (Gate::new(&rig)?, Gate::new(&rig)?);
    let (a, b) = (rig.timeline()?, rig.timeline()?);
    let point = |timeline| Point { timeline, value: 1 };
    let (first, second) = ([one.at(1)], [two.at(1)]);
    let submissions = [
        Submission { commands: None, waits: &first, signal: point(a) },
        Submission { commands: None, waits: &second, signal: point(b) },
    ];
    said("submit", device.submit(&submissions))?;
    two.open(1)?;
    unreached(device, "the second of two submissions, whose gate alone is open", point(b))?;
    unreached(device, "the first of two submissions, whose gate is shut", point(a))?;
    one.open(1)?;
    rig.wait(point(b))?;
    rig.wait(point(a))?;
    passed()
}

fn gates_open_from_another_thread(device: &Arc<dyn Device>) -> Outcome {
    if !device.limits().gated {
        return not_applicable("not gated");
    }
    let rig = Rig::new(device)?;
    let gate = Gate::new(&rig)?;
    let last = (1..=20)
        .map(|i| {
            let point = rig.next();
            rig.submit(None, &[gate.at(i)], point).map(|()| point)
        })
        .collect::<Check<Vec<_>>>()?;
    thread::scope(|scope| {
        let opener = scope.spawn(|| (1..=20).try_for_each(|i| gate.open(i)));
        last.iter().try_for_each(|p| rig.wait(*p))?;
        opener.join().map_err(|_| "signal panicked")?
    })?;
    passed()
}

fn what_waits_at_a_gate_outlives_its_handles(device: &Arc<dyn Device>) -> Outcome {
    if !device.limits().gated {
        return not_applicable("not gated");
    }
    let rig = Rig::new(device)?;
    let gate = Gate::new(&rig)?;
    let a = pattern(1, 4096);
    let (src, through, dst) = (rig.holding(&a)?, rig.holding(&pattern(2, 4096))?, rig.holding(&pattern(3, 4096))?);
    let commands = rig.prepare(&[copy(src, 0, through, 0, 4096), Op::Barrier, copy(through, 0, dst, 0, 4096)])?;
    let point = rig.next();
    let timeline = rig.timeline()?;
    rig.submit(Some(commands), &[gate.at(1)], Point { timeline, value: 1 })?;
    rig.submit(None, &[], point)?;
    device.destroy_commands(commands);
    device.destroy_buffer(src);
    device.destroy_buffer(through);
    device.destroy_timeline(timeline);
    // What may take their places, were they free.
    let others = (0..4).map(|i| rig.holding(&pattern(10 + i, 4096))).collect::<Check<Vec<_>>>()?;
    gate.open(1)?;
    rig.wait(point)?;
    rig.holds("a copy out of buffers destroyed while it waited", dst, &a)?;
    for (i, other) in others.iter().enumerate() {
        rig.holds("a buffer made after others were destroyed", *other, &pattern(10 + i as u64, 4096))?;
    }
    passed()
}
