//! Values rise, waits end for the right reason, and a wake is never lost.
use super::{Outcome, Test, gates::Gate, rig::*, table};
use crate::*;
use std::{sync::Arc, thread, time::Duration};

pub(super) const TESTS: &[Test] = table![
    values_start_at_zero_and_rise_with_completion,
    values_may_skip,
    timelines_are_independent,
    reached_points_end_a_wait_at_once,
    a_wait_for_any_ends_with_one,
    past_deadlines_end_a_wait,
    virtual_deadlines_end_a_wait,
    wakes_end_waits_and_are_not_lost,
    the_host_signals_only_upwards,
];

fn values_start_at_zero_and_rise_with_completion(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let value = || said("value", device.value(rig.timeline));
    ensure(value()? == 0, || "a new timeline is at 0".into())?;
    for _ in 0..10 {
        let point = rig.next();
        rig.submit(None, &[], point)?;
        rig.wait(point)?;
        let value = value()?;
        ensure(value == point.value, || format!("{} was submitted last, so the value is not {value}", point.value))?;
    }
    passed()
}

fn values_may_skip(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    for value in [7, 8, 1000, u64::from(u32::MAX) + 2] {
        let point = Point { timeline: rig.timeline, value };
        rig.submit(None, &[], point)?;
        rig.wait(Point { value: value - 1, ..point })?;
        rig.wait(point)?;
    }
    passed()
}

fn timelines_are_independent(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let timelines = (0..3).map(|_| rig.timeline()).collect::<Check<Vec<_>>>()?;
    let points: Vec<Point> = (0..30).map(|i| Point { timeline: timelines[i % 3], value: 10 * i as u64 + 5 }).collect();
    let submissions: Vec<Submission> =
        points.iter().map(|signal| Submission { commands: None, waits: &[], signal: *signal }).collect();
    said("submit", device.submit(&submissions))?;
    points.iter().rev().try_for_each(|p| rig.wait(*p))?;
    for (timeline, last) in timelines.iter().zip(&points[27..]) {
        let value = said("value", device.value(*timeline))?;
        ensure(value == last.value, || format!("{last:?} was submitted last, so the value is not {value}"))?;
    }
    let value = said("value", device.value(rig.timeline))?;
    ensure(value == 0, || format!("nothing was submitted for a timeline at {value}"))?;
    passed()
}

fn reached_points_end_a_wait_at_once(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    rig.run(&[])?;
    let now = device.clock().now();
    for value in [0, 1] {
        let point = Point { timeline: rig.timeline, value };
        ends("a wait for what was reached", device.wait_any(&[point], device.wakes(), now), Waited::Reached)?;
    }
    passed()
}

fn a_wait_for_any_ends_with_one(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let (one, two) = (rig.timeline()?, rig.timeline()?);
    let point = |timeline| Point { timeline, value: 1 };
    if device.limits().gated {
        let points = [point(one), point(two), point(rig.timeline)];
        let past = device.clock().now();
        ends("a wait for none", device.wait_any(&points, device.wakes(), past), Waited::TimedOut)?;
        rig.submit(None, &[], point(two))?;
        rig.wait(point(two))?;
        ends("a wait for one of three", device.wait_any(&points, device.wakes(), past), Waited::Reached)?;
        for pair in [[point(two), point(one)], [point(one), point(two)]] {
            ends("a wait for one of two", device.wait_any(&pair, device.wakes(), past), Waited::Reached)?;
        }
        let others = [point(one), point(rig.timeline)];
        ends("a wait for the others", device.wait_any(&others, device.wakes(), past), Waited::TimedOut)?;
        return passed();
    }
    let points = [point(one), point(two)];
    let submissions = points.map(|signal| Submission { commands: None, waits: &[], signal });
    said("submit", device.submit(&submissions))?;
    let deadline = device.clock().now() + PATIENCE;
    while said("wait_any", device.wait_any(&points, device.wakes(), deadline))? != Waited::Reached {
        ensure(device.clock().now() < deadline, || "no point was reached".into())?;
    }
    let reached = points.iter().any(|p| device.value(p.timeline) == Ok(1));
    ensure(reached, || "a wait for any ended, and none was reached".into())?;
    points.iter().try_for_each(|p| rig.wait(*p))?;
    passed()
}

fn past_deadlines_end_a_wait(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let past = device.clock().now();
    ends("a wait for nothing until now", device.wait_any(&[], device.wakes(), past), Waited::TimedOut)?;
    if device.limits().gated {
        let point = Point { timeline: rig.timeline, value: 1 };
        ends("a wait until now", device.wait_any(&[point], device.wakes(), past), Waited::TimedOut)?;
        rig.run(&[])?;
        let point = Point { value: 2, ..point };
        ends("a wait for the next value until now", device.wait_any(&[point], device.wakes(), past), Waited::TimedOut)?;
    }
    if device.clock().is_real() {
        let soon = device.clock().now() + Duration::from_millis(2);
        ends("a wait of 2 ms for nothing", device.wait_any(&[], device.wakes(), soon), Waited::TimedOut)?;
    }
    passed()
}

fn virtual_deadlines_end_a_wait(device: &Arc<dyn Device>) -> Outcome {
    let clock = device.clock();
    if clock.is_real() {
        return not_applicable("its clock is the machine's");
    }
    const HOUR: Duration = Duration::from_secs(3600);
    let deadline = clock.now() + HOUR;
    thread::scope(|scope| {
        let wakes = device.wakes();
        let waiter = scope.spawn(move || device.wait_any(&[], wakes, deadline));
        clock.advance(HOUR);
        let waited = waiter.join().map_err(|_| "wait_any panicked")?;
        ends("a wait of an hour that has gone by", waited, Waited::TimedOut)
    })?;
    passed()
}

fn wakes_end_waits_and_are_not_lost(device: &Arc<dyn Device>) -> Outcome {
    let rig = Rig::new(device)?;
    let (never, shut) = (rig.next(), Gate::new(&rig)?);
    // For nothing; for what nobody will signal; for a submission at a shut gate.
    let mut waits = vec![vec![]];
    if device.limits().gated {
        let gated = Point { timeline: rig.timeline()?, value: 1 };
        rig.submit(None, &[shut.at(1)], gated)?;
        waits.extend([vec![never], vec![gated]]);
    }
    // A device may end a wait early; it may not end one for a wake that was not made.
    let until_woken = |points: &[Point], wakes| -> Check {
        let deadline = device.clock().now() + PATIENCE;
        loop {
            match said("wait_any", device.wait_any(points, wakes, deadline))? {
                Waited::Woken => break Ok(()),
                Waited::TimedOut if device.clock().now() < deadline => {}
                other => break Err(format!("a wait that only a wake ends gave {other:?}")),
            }
        }
    };
    let before = device.wakes();
    device.wake();
    ensure(device.wakes() == before + 1, || format!("a wake counts {before} up to {}", device.wakes()))?;
    waits.iter().try_for_each(|points| until_woken(points, before))?; // made before the wait
    let past = device.clock().now();
    ends("a wait after the wake was seen", device.wait_any(&[], device.wakes(), past), Waited::TimedOut)?;
    // Often enough that some wakes come before, some during and some after the start of a wait.
    for _ in 0..100 {
        let before = device.wakes();
        thread::scope(|scope| {
            let waiters: Vec<_> =
                waits.iter().cycle().take(3).map(|points| scope.spawn(move || until_woken(points, before))).collect();
            thread::yield_now();
            device.wake();
            waiters.into_iter().try_for_each(|w| w.join().map_err(|_| "wait_any panicked")?)
        })?;
    }
    passed()
}

fn the_host_signals_only_upwards(device: &Arc<dyn Device>) -> Outcome {
    if !device.limits().gated {
        return not_applicable("not gated");
    }
    let rig = Rig::new(device)?;
    let point = |value| Point { timeline: rig.timeline, value };
    for value in [1, 2, 10] {
        said("signal", device.signal(point(value)))?;
        let now = said("value", device.value(rig.timeline))?;
        ensure(now == value, || format!("the host signalled {value}, so the value is not {now}"))?;
        ends("a wait", device.wait_any(&[point(value)], device.wakes(), device.clock().now()), Waited::Reached)?;
    }
    for value in [0, 9, 10] {
        refused(&format!("a signal of {value} at 10"), "an error", device.signal(point(value)), |_| true)?;
        let now = said("value", device.value(rig.timeline))?;
        ensure(now == 10, || format!("a refused signal leaves 10, not {now}"))?;
    }
    let timeline = rig.timeline()?;
    thread::scope(|scope| {
        scope.spawn(|| device.signal(Point { timeline, value: 1 }));
        rig.wait(Point { timeline, value: 1 })
    })?;
    passed()
}

/// That a wait ended as it was to end.
pub(super) fn ends(what: &str, waited: Result<Waited>, want: Waited) -> Check {
    let got = said(what, waited)?;
    ensure(got == want, || format!("{what} was to end with {want:?}; it ended with {got:?}"))
}
