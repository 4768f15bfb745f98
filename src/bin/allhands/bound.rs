//! The time that no collective can beat: what must be moved, at the speed of a plain copy, and one submission.
use crate::kind::Job;
use allhands::{
    DataType, Device,
    contract::{BufferDesc, Error, Memory, Op, Point, Range, Submission, Waited},
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
    ) -> Result<Duration, Error> {
        let size = job.elements() * dtype.size();
        let mut bound = Duration::ZERO;
        for (name, device) in devices {
            let plain = match self.0.get(&(name.clone(), size)) {
                Some(plain) => *plain,
                None => measure(&**device, size)?,
            };
            self.0.insert((name, size), plain);
            bound = bound.max(plain.empty + plain.copy.mul_f64(job.traffic() / 2.0));
        }
        Ok(bound)
    }
}

fn measure(device: &dyn Device, size: u64) -> Result<Plain, Error> {
    let timeline = device.create_timeline(false)?;
    let mut point = Point { timeline, value: 0 };
    let desc = BufferDesc { size: size.max(4).next_multiple_of(4), memory: Memory::Device, exportable: false };
    let buffers = (|| Ok((device.create_buffer(&desc)?, device.create_buffer(&desc)?)))();
    let plain = buffers.and_then(|(src, dst)| {
        let copies = if size == 0 { 0 } else { (COPIED / size).clamp(1, COPIES) };
        let copy = Op::Copy { src: Range::new(src, 0, desc.size), dst: Range::new(dst, 0, desc.size) };
        let ops: Vec<Op> = (0..copies).flat_map(|_| [copy.clone(), Op::Barrier]).collect();
        let empty = best(device, &mut point, &[])?;
        let all = if ops.is_empty() { empty } else { best(device, &mut point, &ops)? };
        device.destroy_buffer(src);
        device.destroy_buffer(dst);
        Ok(Plain { empty, copy: all.saturating_sub(empty) / copies.max(1) as u32 })
    });
    device.destroy_timeline(timeline);
    plain
}

/// The shortest time from submitting `ops` to knowing that they are done, after a first one that does not count.
fn best(device: &dyn Device, point: &mut Point, ops: &[Op]) -> Result<Duration, Error> {
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
                    return Err(Error::Invalid { device: device.info().id, what });
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
