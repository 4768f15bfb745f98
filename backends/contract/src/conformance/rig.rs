//! What tests share: a device with a timeline and buffers that are given back at the end, data, and comparisons.
use super::{Outcome, Ran};
use crate::*;
use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    sync::Arc,
    time::Duration,
};

/// The result of a step of a test.
pub(super) type Check<T = ()> = std::result::Result<T, String>;

/// How long a test waits for work that was submitted. A bound for broken devices, not a demand on slow ones.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Whether few kernels stand for all (`ALLHANDS_QUICK`), where another device runs the same ones in full.
pub(super) fn sliced() -> bool {
    std::env::var("ALLHANDS_QUICK").is_ok_and(|v| !v.is_empty() && v != "0")
}

/// A device under test.
pub(super) struct Rig<'a> {
    pub device: &'a Arc<dyn Device>,
    pub timeline: TimelineId,
    submitted: Cell<u64>,
    buffers: RefCell<Vec<BufferId>>,
    timelines: RefCell<Vec<TimelineId>>,
}

impl<'a> Rig<'a> {
    pub fn new(device: &'a Arc<dyn Device>) -> Check<Self> {
        let timeline = said("create_timeline", device.create_timeline(false))?;
        let (submitted, buffers, timelines) = (Cell::new(0), RefCell::default(), RefCell::new(vec![timeline]));
        Ok(Rig { device, timeline, submitted, buffers, timelines })
    }

    /// A buffer that is destroyed with the rig.
    pub fn buffer(&self, size: u64, memory: Memory) -> Check<BufferId> {
        said("create_buffer", self.buffer_of(size, memory))
    }
    /// The same, where a refusal is an answer.
    pub fn buffer_of(&self, size: u64, memory: Memory) -> Result<BufferId> {
        Ok(self.keep(self.device.create_buffer(&BufferDesc { size, memory, exportable: false })?))
    }
    /// A buffer of device memory that holds `content`.
    pub fn holding(&self, content: &[u8]) -> Check<BufferId> {
        let buffer = self.buffer(content.len() as u64, Memory::Device)?;
        self.write(buffer, content)?;
        Ok(buffer)
    }
    /// Has `buffer` destroyed with the rig.
    pub fn keep(&self, buffer: BufferId) -> BufferId {
        self.buffers.borrow_mut().push(buffer);
        buffer
    }
    /// Another timeline.
    pub fn timeline(&self) -> Check<TimelineId> {
        let timeline = said("create_timeline", self.device.create_timeline(false))?;
        self.timelines.borrow_mut().push(timeline);
        Ok(timeline)
    }
    pub fn write(&self, buffer: BufferId, content: &[u8]) -> Check {
        said("write", self.device.write(Range::new(buffer, 0, content.len() as u64), content))
    }
    pub fn read(&self, buffer: BufferId, size: usize) -> Check<Vec<u8>> {
        // Not what is to be read, so that a read which does nothing is seen.
        let mut bytes = pattern(0xdead, size);
        said("read", self.device.read(Range::new(buffer, 0, size as u64), &mut bytes))?;
        Ok(bytes)
    }
    /// That `buffer` holds `want` from its start.
    pub fn holds(&self, what: &str, buffer: BufferId, want: &[u8]) -> Check {
        same(what, &self.read(buffer, want.len())?, want)
    }

    /// Commands of `ops` between what the host's accesses before and after them need.
    pub fn prepare(&self, ops: &[Op]) -> Check<CommandsId> {
        said("prepare", self.device.prepare(&with_host(self.device, ops)?))
    }
    /// The next point of the rig's own timeline.
    pub fn next(&self) -> Point {
        self.submitted.set(self.submitted.get() + 1);
        Point { timeline: self.timeline, value: self.submitted.get() }
    }
    pub fn submit(&self, commands: Option<CommandsId>, waits: &[Point], signal: Point) -> Check {
        said("submit", self.device.submit(&[Submission { commands, waits, signal }]))
    }
    /// Waits until `point`, whose submission has been made, is reached.
    pub fn wait(&self, point: Point) -> Check {
        wait(self.device, point)
    }
    /// Prepares `ops`, submits them, and waits.
    pub fn run(&self, ops: &[Op]) -> Check {
        let commands = self.prepare(ops)?;
        let point = self.next();
        self.submit(Some(commands), &[], point)?;
        self.wait(point)?;
        self.device.destroy_commands(commands);
        Ok(())
    }
}

impl Drop for Rig<'_> {
    fn drop(&mut self) {
        self.buffers.borrow().iter().for_each(|b| self.device.destroy_buffer(*b));
        self.timelines.borrow().iter().for_each(|t| self.device.destroy_timeline(*t));
    }
}

/// Waits until `point`, whose submission has been made, is reached.
pub(super) fn wait(device: &Arc<dyn Device>, point: Point) -> Check {
    let deadline = device.clock().now() + PATIENCE;
    loop {
        let wakes = device.wakes();
        let waited = said("wait_any", device.wait_any(&[point], wakes, deadline))?;
        // It may end a wait early, and others may wake it.
        if waited == Waited::Reached {
            break;
        }
        ensure(device.clock().now() < deadline, || format!("{point:?} was submitted and not reached in {PATIENCE:?}"))?;
    }
    let value = said("value", device.value(point.timeline))?;
    ensure(value >= point.value, || format!("{point:?} is reached, so the value is not {value}"))
}

/// `ops` with every buffer they touch acquired from the host before and released to it after.
pub(super) fn with_host(device: &Arc<dyn Device>, ops: &[Op]) -> Check<Vec<Op>> {
    let touched = |written: bool| -> Check<Vec<Range>> {
        let ranges = ops.iter().flat_map(|op| match written {
            true => op.accesses().1,
            false => op.accesses().0,
        });
        let buffers: BTreeSet<BufferId> = ranges.map(|r| r.buffer).collect();
        buffers.into_iter().map(|b| Ok(Range::new(b, 0, said("size", device.size(b))?))).collect()
    };
    let acquires = touched(false)?.into_iter().map(|range| Op::Acquire { range, from: Domain::Host });
    let releases = touched(true)?.into_iter().map(|range| Op::Release { range, to: Domain::Host });
    Ok(acquires.chain(ops.iter().cloned()).chain(releases).collect())
}

pub(super) fn copy(src: BufferId, src_offset: u64, dst: BufferId, dst_offset: u64, size: u64) -> Op {
    Op::Copy { src: Range::new(src, src_offset, size), dst: Range::new(dst, dst_offset, size) }
}

/// A hash of `x`; the finaliser of SplitMix64.
pub(super) fn hash(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// `size` bytes that depend on `seed` and on their address.
pub(super) fn pattern(seed: u64, size: usize) -> Vec<u8> {
    let start = hash(seed);
    let mut bytes = vec![0; size];
    for (word, i) in bytes.chunks_mut(8).zip(0..) {
        word.copy_from_slice(&hash(start.wrapping_add(i)).to_le_bytes()[..word.len()]);
    }
    bytes
}

pub(super) fn said<T>(what: &str, result: Result<T>) -> Check<T> {
    result.map_err(|e| format!("{what} was to succeed; it said: {e}"))
}

pub(super) fn ensure(holds: bool, words: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(words()) }
}

pub(super) fn same(what: &str, got: &[u8], want: &[u8]) -> Check {
    ensure(got.len() == want.len(), || format!("{what}: {} bytes instead of {}", got.len(), want.len()))?;
    if got == want {
        return Ok(());
    }
    let wrong = got.iter().zip(want).filter(|(g, w)| g != w).count();
    // They differ in length or in a byte, and the length was looked at above.
    let at = got.iter().zip(want).position(|(g, w)| g != w).unwrap_or_default();
    let end = want.len().min(at + 8);
    Err(format!("{what}: {wrong} bytes wrong; from byte {at} got {:02x?}, want {:02x?}", &got[at..end], &want[at..end]))
}

/// That `result` is the error that `is` recognises.
pub(super) fn refused<T: std::fmt::Debug>(
    what: &str,
    want: &str,
    result: Result<T>,
    is: impl FnOnce(&Error) -> bool,
) -> Check {
    match result {
        Err(e) if is(&e) => Ok(()),
        Err(e) => Err(format!("{what} was to be refused as {want}; it was refused as {e:?}")),
        Ok(x) => Err(format!("{what} was to be refused as {want}; it gave {x:?}")),
    }
}

pub(super) fn passed() -> Outcome {
    Ok(Ran::Passed)
}

pub(super) fn not_applicable(why: impl Into<String>) -> Outcome {
    Ok(Ran::NotApplicable(why.into()))
}
