//! What a call returns: an operation on its way.
use crate::{
    Error, Result,
    contract::{Clock, Device, Point, Spin, Wake},
    schedule::Algorithm,
    staging::Pool,
};
use std::{
    fmt,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

/// What a clock still adds up.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// A call on its way, or a group of calls. Owns all that it needs: dropping it neither waits nor cancels.
#[derive(Clone)]
pub struct Pending {
    last: Arc<Operation>,
    /// The others of its group, in the order in which they run.
    before: Vec<Arc<Operation>>,
}

impl Pending {
    pub(crate) fn of(operation: Arc<Operation>) -> Self {
        Pending { last: operation, before: Vec::new() }
    }
    /// All of them as one; `None` if there is none.
    pub(crate) fn all(mut calls: Vec<Pending>) -> Option<Self> {
        let last = calls.pop()?;
        Some(Pending { last: last.last, before: calls.into_iter().map(|p| p.last).collect() })
    }
    /// Waits until every local rank's input may be overwritten and its output read. Ends with an error at the latest
    /// when the call has made no progress for the length of its deadline.
    pub fn wait(&self) -> Result<()> {
        self.operations().try_for_each(|o| {
            let start = Instant::now();
            if let Some(spin) = &o.spin {
                spin.look(|| o.over.load(SeqCst));
            }
            o.wait_until(None, Progress::finished)?;
            o.spin.iter().for_each(|spin| spin.took(start.elapsed()));
            Ok(())
        })
    }
    /// The same, for so long at most; false if it was not done by then.
    pub fn wait_for(&self, timeout: Duration) -> Result<bool> {
        self.until(self.last.clock.now() + timeout.min(FOREVER), Progress::finished)
    }
    /// Whether it is done. Does not wait.
    pub fn is_done(&self) -> Result<bool> {
        let done = |o: &Arc<Operation>| {
            let state = o.lock();
            state.error.clone().map_or(Ok(state.finished()), Err)
        };
        self.operations().try_fold(true, |all, o| Ok(all & done(o)?))
    }
    /// Waits until the last submission of every local rank is in its queue; false if some was not by `deadline`.
    pub fn enqueued(&self, deadline: Instant) -> Result<bool> {
        self.until(deadline, Progress::enqueued)
    }
    /// The timeline and value that `rank`'s next submission waits for, to come after this call. `None` while the last
    /// submission of the rank is held back: no queue may wait for it yet. Also `None` for a rank that there is not.
    pub fn point(&self, rank: u32) -> Option<Point> {
        let point = *self.last.points.get(rank as usize)?;
        self.operations().all(|o| o.lock().unsubmitted[rank as usize] == 0).then_some(point)
    }
    /// How it is done; of a group, its last call.
    pub fn report(&self) -> &Report {
        &self.last.report
    }
    fn operations(&self) -> impl Iterator<Item = &Arc<Operation>> {
        self.before.iter().chain([&self.last])
    }
    fn until(&self, deadline: Instant, reached: fn(&Progress) -> bool) -> Result<bool> {
        for operation in self.operations() {
            if !operation.wait_until(Some(deadline), reached)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// How a call is carried out.
#[derive(Clone, Debug)]
pub struct Report {
    /// The algorithm; `None` where nothing moves.
    pub algorithm: Option<Algorithm>,
    /// The path that data takes between ranks: `peer`, `shared-host`, `copied`, `mixed`, or `none` for one rank;
    /// `direct` where host workers read and write the callers' memory.
    pub path: String,
    /// How ranks learn of each other's progress: `native`, `relay`, `mixed` or `none`.
    pub sync: String,
    /// Who reduces.
    pub reduced_on: ReducedOn,
    /// Submissions to the ranks' devices.
    pub submits: u32,
    /// Pieces that follow each other through staging.
    pub chunks: u64,
}

/// Who makes the reduction of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReducedOn {
    /// Nothing is reduced.
    None,
    /// The ranks' devices.
    Device,
    /// Host workers.
    Host,
}

impl fmt::Display for ReducedOn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ReducedOn::None => "none",
            ReducedOn::Device => "device",
            ReducedOn::Host => "host",
        })
    }
}

/// What the relay and the caller share of a call.
pub(crate) struct Operation {
    /// Of all that the communicator has started.
    pub number: u64,
    /// For messages: collective, size and sequence number.
    pub what: String,
    pub deadline: Duration,
    pub started: Instant,
    /// What ranks wait for before their data is there.
    pub after: Vec<(Arc<dyn Device>, Point)>,
    /// Of each local rank: its last submission.
    pub points: Vec<Point>,
    pub report: Report,
    pub clock: Clock,
    /// Staging lives as long as its last use.
    pub _pool: Option<Arc<Pool>>,
    begun: AtomicBool,
    /// Nothing of it is pending any more: it is finished, or has failed.
    over: AtomicBool,
    /// Where a caller sees the end sooner that way.
    spin: Option<Arc<Spin>>,
    state: Mutex<Progress>,
    changed: Condvar,
}

/// Submissions of each rank that have not been made, and that have not completed.
pub(crate) struct Progress {
    unsubmitted: Vec<u32>,
    incomplete: Vec<u32>,
    error: Option<Error>,
}

impl Progress {
    fn finished(&self) -> bool {
        self.incomplete.iter().all(|n| *n == 0)
    }
    fn enqueued(&self) -> bool {
        self.unsubmitted.iter().all(|n| *n == 0)
    }
}

impl Operation {
    /// `submissions`: how many each local rank will make. The rest is as the fields say.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        number: u64,
        what: String,
        deadline: Duration,
        after: Vec<(Arc<dyn Device>, Point)>,
        points: Vec<Point>,
        submissions: Vec<u32>,
        report: Report,
        clock: Clock,
        pool: Option<Arc<Pool>>,
        spin: Option<Arc<Spin>>,
    ) -> Arc<Self> {
        let operation = Arc::new(Operation {
            number,
            what,
            deadline: deadline.min(FOREVER),
            started: clock.now(),
            after,
            points,
            report,
            _pool: pool,
            begun: AtomicBool::new(false),
            over: AtomicBool::new(false),
            spin,
            state: Mutex::new(Progress { unsubmitted: submissions.clone(), incomplete: submissions, error: None }),
            changed: Condvar::new(),
            clock: clock.clone(),
        });
        let observer: Arc<dyn Wake> = operation.clone();
        clock.observe(Arc::downgrade(&observer));
        operation
    }
    /// A submission of an actor is in its queue. Host workers do not count.
    pub fn submitted(&self, actor: usize) {
        let mut state = self.lock();
        if let Some(n) = state.unsubmitted.get_mut(actor) {
            *n -= 1;
            if *n == 0 {
                self.changed.notify_all();
            }
        }
    }
    /// A submission of an actor has completed.
    pub fn completed(&self, actor: usize) {
        let mut state = self.lock();
        if let Some(n) = state.incomplete.get_mut(actor) {
            *n -= 1;
            if *n == 0 && state.finished() {
                self.over.store(true, SeqCst);
                self.changed.notify_all();
            }
        }
    }
    /// It will not be done.
    pub fn fail(&self, error: Error) {
        let mut state = self.lock();
        if !state.finished() && state.error.is_none() {
            state.error = Some(error);
            self.over.store(true, SeqCst);
            self.changed.notify_all();
        }
    }
    /// Whether all that its ranks wait for has come. A timeline that is gone is waited for no longer.
    pub fn may_run(&self) -> bool {
        self.begun.load(SeqCst) || self.after.iter().all(|(d, p)| d.value(p.timeline).map_or(true, |v| v >= p.value))
    }
    /// Its time begins to run; true the first time.
    pub fn begins(&self) -> bool {
        !self.begun.swap(true, SeqCst)
    }
    /// For messages: of each rank the submissions that it has finished.
    pub fn arrived(&self) -> String {
        let state = self.lock();
        let late: Vec<String> = (0..state.incomplete.len())
            .map(|r| match (state.incomplete[r], state.unsubmitted[r]) {
                (0, _) => format!("rank {r} is done"),
                (n, 0) => format!("rank {r} has {n} submissions in its queue"),
                (n, held) => format!("rank {r} has {} submissions in its queue and {held} held back", n - held),
            })
            .collect();
        late.join(", ")
    }
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// `None`: without a deadline of the caller's own. The call's own deadline ends it: the relay sees to that.
    fn wait_until(&self, deadline: Option<Instant>, reached: fn(&Progress) -> bool) -> Result<bool> {
        let mut state = self.lock();
        loop {
            if reached(&state) {
                return Ok(true);
            }
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            state = match deadline {
                Some(deadline) if self.clock.now() >= deadline => return Ok(false),
                Some(deadline) => self.clock.wait(&self.changed, state, deadline),
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

impl Wake for Operation {
    fn wake(&self) {
        let _state = self.lock();
        self.changed.notify_all();
    }
}
