//! The trait that every backend implements.
use crate::*;
use std::{
    sync::{Arc, Weak},
    time::Instant,
};

/// One submit: optional commands, what they wait for, and what is signalled after them.
#[derive(Clone, Copy, Debug)]
pub struct Submission<'a> {
    /// What to run; `None` only waits and signals.
    pub commands: Option<CommandsId>,
    /// Points of this device's timelines that are reached before the commands start. Empty unless
    /// [`Limits::gated`]: on other devices the caller waits first, and submits then.
    pub waits: &'a [Point],
    /// Reached after the commands are complete and their writes visible. Above every value submitted for it so far.
    pub signal: Point,
}

/// How a wait ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Waited {
    /// A point was reached.
    Reached,
    /// [`Device::wake`] was called.
    Woken,
    /// The deadline came.
    TimedOut,
}

/// One in-order queue of one physical device, and the memory that it can see. Dyn-compatible, so that any mix of
/// backends forms one communicator.
///
/// # What a caller may rely on
/// - **Order.** Submissions run in the order in which they were submitted; each sees the writes of those before it.
///   [`Op`]s between two barriers are independent.
/// - **Lifetime.** Whatever a submission uses stays alive until it has completed, whatever the caller destroys. A
///   destroyed handle is stale at once. Prepared commands keep their buffers alive.
/// - **Errors before effects.** A call that returns an error has written nothing and submitted nothing. A call that
///   fails because the device is gone returns [`Error::Lost`], and so do all calls after it.
/// - **Handles.** A handle of another device gives [`Error::Foreign`], a destroyed one [`Error::Stale`].
/// - **Threads.** Every method may be called from any thread at any time. None but `wait_any`, `read`, `write` and,
///   where [`Limits::submit_blocks`], `submit` blocks on the device.
///
/// # What a caller owes
/// - The host touches memory only while no unfinished submission does; a list that reads what the host wrote starts
///   with [`Op::Acquire`], one that the host reads after ends with [`Op::Release`].
/// - Timelines only rise. A wait names a value whose submission has been made, unless [`Limits::gated`].
pub trait Device: Send + Sync {
    /// Who it is.
    fn info(&self) -> &Info;
    /// What it can do.
    fn limits(&self) -> &Limits;
    /// What it has done so far.
    fn counters(&self) -> Counters;
    /// The clock that its deadlines are read off.
    fn clock(&self) -> Clock {
        Clock::real()
    }
    /// Whether it still answers; [`Error::Lost`] if not.
    fn status(&self) -> Result<()>;
    /// Another, throwaway device on the same physical device: proofs run there, never on the one in use.
    fn sibling(&self) -> Result<Arc<dyn Device>>;

    /// Makes a buffer. Its content is undefined.
    fn create_buffer(&self, desc: &BufferDesc) -> Result<BufferId>;
    /// Its handle is stale at once; the memory goes when its last use has completed.
    fn destroy_buffer(&self, buffer: BufferId);
    /// Tells `watcher` of every buffer that is destroyed from now on. Commands keep their buffers' memory, so whoever
    /// keeps commands listens.
    fn watch(&self, watcher: Weak<dyn Watch>);
    /// Bytes of a buffer, as asked for.
    fn size(&self, buffer: BufferId) -> Result<u64>;
    /// Copies bytes to the host, from any kind of memory.
    fn read(&self, from: Range, to: &mut [u8]) -> Result<()>;
    /// Copies bytes from the host, to any kind of memory.
    fn write(&self, to: Range, from: &[u8]) -> Result<()>;
    /// The memory of a buffer that was made exportable, in one of [`Limits::memory_export`]; where [`Limits::unified`], of
    /// any that was made here, as host pages.
    fn export(&self, buffer: BufferId, kind: SharedKind) -> Result<SharedMemory>;
    /// A buffer over another device's memory. Success proves nothing: only reading a pattern back does.
    fn import(&self, memory: &SharedMemory) -> Result<BufferId>;

    /// Makes a timeline at value 0. `shareable` only where [`Limits::timeline_export`].
    fn create_timeline(&self, shareable: bool) -> Result<TimelineId>;
    /// Its handle is stale at once; it goes when its last use has completed.
    fn destroy_timeline(&self, timeline: TimelineId);
    /// A timeline that was made shareable, for other devices of the same driver.
    fn export_timeline(&self, timeline: TimelineId) -> Result<SharedTimeline> {
        let _ = timeline;
        let device = self.info().id;
        Err(Error::Unsupported { device, what: "timelines that can be exported", instead: "let the host relay" })
    }
    /// A timeline that is another device's: for waits and values, not to be signalled here. Success proves nothing.
    fn import_timeline(&self, timeline: &SharedTimeline) -> Result<TimelineId> {
        let _ = timeline;
        let device = self.info().id;
        Err(Error::Unsupported { device, what: "import of timelines", instead: "let the host relay" })
    }
    /// Its value now.
    fn value(&self, timeline: TimelineId) -> Result<u64>;
    /// Raises it from the host. Only where [`Limits::gated`]. A value not above the present one is refused.
    fn signal(&self, point: Point) -> Result<()>;
    /// Waits until one of `points` is reached, [`wakes`](Self::wakes) differs from `wakes`, or `deadline` has come.
    /// With no points it waits for the other two. May end early with [`Waited::TimedOut`] after
    /// [`Limits::longest_wait`].
    fn wait_any(&self, points: &[Point], wakes: u64, deadline: Instant) -> Result<Waited>;
    /// Counts the calls of [`wake`](Self::wake). Read it before looking at what a wake would announce.
    fn wakes(&self) -> u64;
    /// Ends every `wait_any` under way.
    fn wake(&self);

    /// Checks `ops` and makes commands of them.
    fn prepare(&self, ops: &[Op]) -> Result<CommandsId>;
    /// Its handle is stale at once; it goes when its last use has completed. Commands that a submit used up are
    /// destroyed by it.
    fn destroy_commands(&self, commands: CommandsId);
    /// Queues `submissions` in order. If it fails, those before the one that failed may run.
    fn submit(&self, submissions: &[Submission<'_>]) -> Result<()>;
}

const _: fn(&dyn Device) = |_| {}; // dyn-compatible
