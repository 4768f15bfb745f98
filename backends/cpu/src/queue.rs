//! The in-order queue of a device, its timelines, and what runs its submissions.
//!
//! One lock guards the tables, the timelines and the queue. Two condition variables stand on it: `reached` tells
//! those who wait for timelines, `work` tells the worker and whoever is held up in the middle of a submission.
use crate::{
    Emulation, Faults, PathFault,
    commands::{Commands, Step},
    faults,
    memory::Buffer,
};
use allhands_contract::{Clock, DeviceId, Error, Result, Slab, Wake};
use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// A timeline. Written only under the queue's lock, which orders it: the atomics are here to be shared, no more.
#[derive(Default)]
pub(crate) struct Timeline {
    value: AtomicU64,
    submitted: AtomicU64,
}

impl Timeline {
    /// Its value now.
    pub fn value(&self) -> u64 {
        self.value.load(Relaxed)
    }
    /// The highest value that anybody has signalled or submitted.
    pub fn submitted(&self) -> u64 {
        self.submitted.load(Relaxed)
    }
    /// Notes that `value` will be signalled.
    pub fn submit(&self, value: u64) {
        self.submitted.fetch_max(value, Relaxed);
    }
    /// Raises it.
    pub fn signal(&self, value: u64) {
        self.submit(value);
        self.value.fetch_max(value, Relaxed);
    }
}

/// A submission, resolved. It keeps alive all that it uses.
pub(crate) struct Job {
    pub commands: Option<Arc<Commands>>,
    pub waits: Vec<(Arc<Timeline>, u64)>,
    pub signal: (Arc<Timeline>, u64),
}

/// What the queue's lock guards.
#[derive(Default)]
pub(crate) struct State {
    pub buffers: Slab<Arc<Buffer>>,
    pub timelines: Slab<Arc<Timeline>>,
    pub commands: Slab<Arc<Commands>>,
    pub jobs: VecDeque<Job>,
    pub wakes: u64,
    /// Whether the device has been dropped.
    pub closed: bool,
}

/// What a device and its worker share.
pub(crate) struct Queue {
    pub id: DeviceId,
    pub clock: Clock,
    pub emulation: Emulation,
    pub faults: Arc<Faults>,
    pub counts: Counts,
    pub reached: Condvar,
    pub work: Condvar,
    state: Mutex<State>,
}

/// The device's counters, and the bytes that it keeps.
#[derive(Default)]
pub(crate) struct Counts {
    pub submits: AtomicU64,
    pub dispatches: AtomicU64,
    pub copies: AtomicU64,
    pub prepares: AtomicU64,
    pub buffers: AtomicU64,
    pub allocated: Arc<AtomicU64>,
    /// Bytes of imported buffers that are alive.
    pub resident: Arc<AtomicU64>,
}

/// Below this a real sleep overshoots by more than it lasts.
const SHORTEST_SLEEP: Duration = Duration::from_micros(200);

impl Queue {
    pub fn new(id: DeviceId, clock: Clock, emulation: Emulation, faults: Arc<Faults>) -> Arc<Self> {
        let queue = Arc::new(Queue {
            id,
            clock,
            emulation,
            faults,
            counts: Counts::default(),
            reached: Condvar::new(),
            work: Condvar::new(),
            state: Mutex::default(),
        });
        let watcher: Arc<dyn Wake> = queue.clone();
        queue.clock.observe(Arc::downgrade(&watcher));
        queue.faults.watch(Arc::downgrade(&watcher));
        queue
    }

    /// The state. A panic under it leaves it valid: nothing there is done by halves.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// [`Error::Lost`] if the device is lost.
    pub fn alive(&self) -> Result<()> {
        self.faults.look(|f| f.lost.clone()).map_or(Ok(()), |why| Err(Error::Lost { device: self.id, why }))
    }

    /// Runs what is queued, in order, until the device is dropped; then what can still run, and ends.
    pub fn serve(&self) {
        loop {
            let mut state = self.lock();
            let job = loop {
                let ready = |job: &Job| job.waits.iter().all(|(timeline, value)| timeline.value() >= *value);
                if state.jobs.front().is_some_and(ready)
                    && let Some(job) = state.jobs.pop_front()
                {
                    break job;
                }
                if state.closed {
                    return;
                }
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            if let Err(reason) = self.run(job) {
                log::debug!("a submission ended early: {reason}");
                if self.lock().closed {
                    return; // what follows counts on what was cut short
                }
            }
        }
    }

    /// Runs a submission whose waits are met. An error means that it has not been signalled and never will be.
    pub fn run(&self, job: Job) -> Result<()> {
        self.hold(|f| f.stalled)?;
        self.spend(self.emulation.submit_latency)?;
        for step in job.commands.iter().flat_map(|c| &c.steps) {
            self.step(step)?;
        }
        // Freed before the signal, so that whoever waits for it finds the memory gone.
        drop(job.commands);
        self.spend(self.emulation.visibility(self.counts.resident.load(Relaxed)))?;
        {
            let _state = self.lock();
            self.alive()?;
            job.signal.0.signal(job.signal.1);
        }
        self.reached.notify_all();
        Ok(())
    }

    fn step(&self, step: &Step) -> Result<()> {
        let stalls = |path: bool, fault: &PathFault| path && *fault == PathFault::Stall;
        self.hold(|f| stalls(step.imports, &f.imports) || stalls(step.carries, &f.copies))?;
        let on = |path: bool, fault: &PathFault| if path { fault.clone() } else { PathFault::None };
        let faults = self.faults.look(|f| [on(step.imports, &f.imports), on(step.carries, &f.copies)]);
        for fault in &faults {
            if let PathFault::Delay(time) = fault {
                self.spend(*time)?;
            }
        }
        self.spend(self.emulation.crossing(step.crossing))?;
        // SAFETY: the job holds the commands, and the queue runs one job at a time, in order.
        unsafe {
            if faults[1] == PathFault::Zeros {
                step.zero();
            } else {
                step.run();
            }
            if faults.contains(&PathFault::Corrupt) {
                step.corrupt();
            }
        }
        let counter = if step.is_copy() { &self.counts.copies } else { &self.counts.dispatches };
        counter.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Stands still while `fault` says so. An error if the device is lost or dropped.
    fn hold(&self, fault: impl Fn(&faults::Set) -> bool) -> Result<()> {
        if !self.faults.look(|f| fault(f) || f.lost.is_some()) {
            return Ok(());
        }
        let mut state = self.lock();
        loop {
            self.going(&state)?;
            if !self.faults.look(&fault) {
                return Ok(());
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Spends emulated time: moves a virtual clock on, or lets real time pass.
    fn spend(&self, time: Duration) -> Result<()> {
        if time.is_zero() {
            return Ok(());
        }
        if !self.clock.is_real() {
            self.clock.advance(time);
            return Ok(());
        }
        let end = Instant::now() + time;
        let mut state = self.lock();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left < SHORTEST_SLEEP {
                break;
            }
            self.going(&state)?;
            state = self.clock.wait(&self.work, state, end - SHORTEST_SLEEP);
        }
        drop(state);
        while Instant::now() < end {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// An error if the device is lost or dropped.
    fn going(&self, state: &State) -> Result<()> {
        self.alive()?;
        if state.closed {
            return Err(Error::Lost { device: self.id, why: "it was dropped".into() });
        }
        Ok(())
    }
}

impl Wake for Queue {
    /// The clock moved or a fault changed. A lost device forgets what is queued there and then.
    fn wake(&self) {
        let forgotten = {
            let mut state = self.lock();
            if self.alive().is_err() { std::mem::take(&mut state.jobs) } else { VecDeque::new() }
        };
        self.reached.notify_all();
        self.work.notify_all();
        drop(forgotten); // outside the lock: the last owner of imported memory may be another device's
    }
}
