//! The time that no collective can beat: what must be moved, at the speed of a plain copy, and one submission.
use crate::kind::Job;
use allhands::{
    Buffer, DataType, Device, Result,
    contract::{Error, Op, Point, Range, Submission, Waited},
};
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

/// Copies measured so far, by device and bytes.
#[derive(Default)]
pub struct Bounds(HashMap<(String, u64), Plain>);

/// What a device does when nothing else runs.
#[derive(Clone, Copy)]
struct Plain {
    /// An empty submission, and waiting for it.
    empty: Duration,
    /// A copy from its own memory to its own memory.
    copy: Duration,
}

/// The best of so many counts.
const ATTEMPTS: u32 = 5;
/// Small copies are timed many at once, one after the other.
const COPIED: u64 = 16 << 20;
const COPIES: u64 = 32;
const DEADLINE: Duration = Duration::from_secs(30);

impl Bounds {
    /// `bytes read and written / (2 * size / time of a copy of that size) + an empty submit-and-wait`, on the slowest
    /// of the named devices, each measured alone. The bytes are [`Job::traffic`], out of place.
    pub fn of<'a>(
        &mut self,
        job: &Job,
        dtype: DataType,
        devices: impl IntoIterator<Item = (String, &'a Arc<dyn Device>)>,
    ) -> Result<Duration> {
        let size = job.elements() * dtype.size();
        let mut bound = Duration::ZERO;
        for (name, device) in devices {
            let plain = match self.0.get(&(name.clone(), size)) {
                Some(plain) => *plain,
                None => measure(device, size)?,
            };
            self.0.insert((name, size), plain);
            bound = bound.max(plain.empty + plain.copy.mul_f64(job.traffic() / 2.0));
        }
        Ok(bound)
    }
}

fn measure(device: &Arc<dyn Device>, size: u64) -> Result<Plain> {
    let buffer = || Buffer::new(device, DataType::U8, size.max(4).next_multiple_of(4));
    let (src, dst) = (buffer()?, buffer()?);
    let copy = Op::Copy { src: Range::new(src.id(), 0, src.len()), dst: Range::new(dst.id(), 0, dst.len()) };
    let copies = COPIED.checked_div(size).map_or(0, |n| n.clamp(1, COPIES));
    let ops: Vec<Op> = (0..copies).flat_map(|_| [copy.clone(), Op::Barrier]).collect();

    let timeline = device.create_timeline(false)?;
    let mut point = Point { timeline, value: 0 };
    let times = best(&**device, &mut point, &[]).and_then(|empty| Ok((empty, best(&**device, &mut point, &ops)?)));
    device.destroy_timeline(timeline);
    let (empty, all) = times?;
    Ok(Plain { empty, copy: all.saturating_sub(empty) / copies.max(1) as u32 })
}

/// The shortest time from submitting `ops` to knowing that they are done, after a first one that does not count.
fn best(device: &dyn Device, point: &mut Point, ops: &[Op]) -> Result<Duration> {
    let mut best = Duration::MAX;
    let mut commands = None;
    for attempt in 0..=ATTEMPTS {
        if !ops.is_empty() && (commands.is_none() || !device.limits().resubmit) {
            commands = Some(device.prepare(ops)?);
        }
        point.value += 1;
        let start = Instant::now();
        device.submit(&[Submission { commands, waits: &[], signal: *point }])?;
        let deadline = start + DEADLINE;
        loop {
            let wakes = device.wakes();
            match device.wait_any(&[*point], wakes, deadline)? {
                Waited::Reached => break,
                Waited::TimedOut if Instant::now() >= deadline => {
                    let what = format!("a plain copy did not end within {DEADLINE:?}");
                    return Err(Error::Invalid { device: device.info().id, what }.into());
                }
                Waited::TimedOut | Waited::Woken => {}
            }
        }
        if attempt > 0 {
            best = best.min(start.elapsed());
        }
    }
    if let Some(commands) = commands.filter(|_| device.limits().resubmit) {
        device.destroy_commands(commands);
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::Kind;
    use allhands_cpu::{CpuDevice, Options};

    #[test]
    fn a_copy_is_measured_once_and_leaves_nothing() {
        let plain = Options::default();
        let once = Options { restrict: Some(|l| (l.resubmit, l.gated) = (false, false)), ..Options::default() };
        for options in [plain, once] {
            let device: Arc<dyn Device> = CpuDevice::open(options).unwrap();
            let mut bounds = Bounds::default();
            let job = Job { kind: Kind::AllReduce, ranks: 2, root: 0, count: 5 };
            let bound =
                |bounds: &mut Bounds, job: Job| bounds.of(&job, DataType::F32, [("cpu".into(), &device)]).unwrap();
            let first = bound(&mut bounds, job);
            assert!(first > Duration::ZERO);
            let copies = device.counters().copies;
            assert_eq!(copies, COPIES * u64::from(ATTEMPTS + 1));
            assert_eq!(bound(&mut bounds, job), first);
            assert_eq!(device.counters().copies, copies);
            assert_eq!(device.counters().allocated, 0);

            let barrier = Job { kind: Kind::Barrier, count: 0, ..job };
            assert_eq!(bound(&mut bounds, barrier), bounds.0[&("cpu".into(), 0)].empty);
        }
    }
}
