//! Submissions, what they keep alive, and waiting for them.
//!
//! A submit is one vkQueueSubmit, whatever it is of. The queue runs in order, so once the signal of a submission is
//! reached, all before it are complete; what they used is let go of when that is noticed. Beside the
//! timelines of callers a queue has one of its own, which a wake raises: every wait for others includes it.
//!
//! A device that is the processor itself is waited for in another way: Mesa spins through a wait for any of several
//! timelines, and takes the core that the work needs. There a wait is for the one flight that comes first, in short
//! slices; and while that flight stands at a gate, for what opens gates, which all passes through here.
use crate::{doors::Door, gpu::Gpu, record::Commands, timeline::Timeline};
use allhands_contract::{Result, Spin, Waited};
use ash::vk;
use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// One submission with its handles resolved.
pub(crate) struct Batch {
    pub commands: Option<Arc<Commands>>,
    /// How many of the turn's waits are its.
    pub waits: usize,
    pub timeline: Arc<Timeline>,
    pub value: u64,
}

/// The right to submit, and the lists that a submit is made of, kept for the next one: a submit allocates nothing.
#[derive(Default)]
pub(crate) struct Turn {
    pub batches: Vec<Batch>,
    pub waits: Vec<(Arc<Timeline>, u64)>,
    semaphores: Vec<vk::Semaphore>,
    values: Vec<u64>,
    stages: Vec<vk::PipelineStageFlags>,
    buffers: Vec<vk::CommandBuffer>,
    timelines: Vec<vk::TimelineSemaphoreSubmitInfo<'static>>,
    infos: Vec<vk::SubmitInfo<'static>>,
}

/// A submission that has not been seen to complete.
struct Flight {
    timeline: Arc<Timeline>,
    value: u64,
    _commands: Option<Arc<Commands>>,
    waits: usize,
}

#[derive(Default)]
struct Flights {
    flights: VecDeque<Flight>,
    /// What they wait for, in order.
    waits: VecDeque<(Arc<Timeline>, u64)>,
}

pub(crate) struct Queue {
    gpu: Arc<Gpu>,
    raw: vk::Queue,
    turn: Mutex<Turn>,
    flights: Mutex<Flights>,
    wakes: Mutex<u64>,
    /// At the number of wakes; none on a device that is the processor.
    bell: Option<Arc<Timeline>>,
    /// Notified, under the lock of `wakes`, at a wake, a submit and a signal by the host.
    stirred: Condvar,
    spin: Spin,
    pub submits: AtomicU64,
    pub dispatches: AtomicU64,
    pub copies: AtomicU64,
}

/// How long closing a device waits for what is under way.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest single wait in the driver, so that a loss elsewhere is noticed.
const SLICE: Duration = Duration::from_secs(10);
/// The same where no wake can end it.
const SHORT_SLICE: Duration = Duration::from_millis(1);
/// With so many flights the driver is asked which have landed.
const MANY: usize = 64;

impl Queue {
    pub fn new(gpu: &Arc<Gpu>, raw: vk::Queue) -> Result<Self> {
        Ok(Queue {
            gpu: gpu.clone(),
            raw,
            turn: Mutex::default(),
            flights: Mutex::default(),
            wakes: Mutex::default(),
            bell: if gpu.physical.software() { None } else { Some(Timeline::new(gpu, false)?) },
            stirred: Condvar::new(),
            spin: Spin::default(),
            submits: AtomicU64::new(0),
            dispatches: AtomicU64::new(0),
            copies: AtomicU64::new(0),
        })
    }

    /// Waits for the right to submit; its lists are empty.
    pub fn turn(&self) -> MutexGuard<'_, Turn> {
        let mut turn = lock(&self.turn);
        turn.batches.clear();
        turn.waits.clear();
        turn
    }

    /// Submits the turn's batches, which were checked: signals rise, nothing is of another device.
    pub fn submit(&self, turn: &mut Turn) -> Result<()> {
        self.gpu.status()?;
        if turn.batches.is_empty() {
            return Ok(());
        }
        turn.gather();
        // SAFETY: the infos point into the turn's lists, which do not move while it is borrowed; the flights below
        // keep what they name until it has completed.
        let answer = unsafe { self.gpu.queue_submit(self.raw, &turn.infos) };
        self.gpu.check("submit", 0, answer)?;
        self.submits.fetch_add(turn.batches.len() as u64, Ordering::Relaxed);
        let mut flights = lock(&self.flights);
        flights.waits.extend(turn.waits.drain(..));
        for Batch { commands, waits, timeline, value } in turn.batches.drain(..) {
            timeline.set_submitted(value);
            if let Some(c) = &commands {
                self.dispatches.fetch_add(c.dispatches, Ordering::Relaxed);
                self.copies.fetch_add(c.copies, Ordering::Relaxed);
            }
            flights.flights.push_back(Flight { timeline, value, _commands: commands, waits });
        }
        drop(flights);
        self.stir();
        Ok(())
    }

    /// Lets go of what is known to have completed, a few at a time: a long train of calls is not gone through at each.
    pub fn retire(&self) -> Result<()> {
        let Flights { flights, waits } = &mut *lock(&self.flights);
        loop {
            if flights.len() > MANY {
                flights[MANY / 2].timeline.value()?;
            }
            let has_landed = |f: &Flight| f.timeline.reached() >= f.value;
            let landed = flights.iter().take(MANY).rposition(has_landed).map_or(0, |last| last + 1);
            waits.drain(..flights.drain(..landed).map(|f| f.waits).sum::<usize>());
            if landed < MANY {
                return Ok(());
            }
        }
    }

    /// How often [`wake`](Self::wake) was called.
    pub fn wakes(&self) -> u64 {
        *lock(&self.wakes)
    }
    /// Ends every wait under way.
    pub fn wake(&self) {
        let mut wakes = lock(&self.wakes);
        *wakes += 1;
        if let Some(bell) = &self.bell {
            // A failure is a loss, which is kept, and found by the waiters.
            let _ = bell.signal(*wakes);
        }
        self.stirred.notify_all();
    }
    /// Has waits look again at what may have changed by a submit or by the host.
    pub fn stir(&self) {
        let _wakes = lock(&self.wakes);
        self.stirred.notify_all();
    }

    /// [`Device::wait_any`](allhands_contract::Device::wait_any).
    pub fn wait_any(&self, points: &[(Arc<Timeline>, u64)], wakes: u64, deadline: Instant) -> Result<Waited> {
        if points.is_empty() {
            return self.wait_for_wake(wakes, deadline);
        }
        let start = Instant::now();
        loop {
            self.gpu.status()?;
            if any(points, |t, v| Ok(t.reached() >= v))? {
                self.retire()?;
                self.spin.took(start.elapsed());
                return Ok(Waited::Reached);
            }
            let passed = self.gpu.pass(Door::Wait);
            self.gpu.check("wait", 0, passed)?;
            let came = || any(points, Timeline::is_at);
            // What goes wrong while it looks goes wrong again below.
            let look = || came().unwrap_or(true) || self.wakes() != wakes;
            if (self.bell.is_none() || self.spin.look(look)) && came()? {
                continue;
            }
            if self.wakes() != wakes {
                return Ok(Waited::Woken);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Waited::TimedOut);
            }
            match &self.bell {
                Some(bell) => self.sleep(points.iter().chain([&(bell.clone(), wakes + 1)]), left.min(SLICE))?,
                None => self.doze(points, wakes, left)?,
            }
        }
    }

    /// Waits in the driver for any of `points`.
    fn sleep<'a>(&self, points: impl Iterator<Item = &'a (Arc<Timeline>, u64)>, time: Duration) -> Result<()> {
        let (semaphores, values): (Vec<_>, Vec<_>) = points.map(|(t, v)| (t.raw, *v)).unzip();
        let info =
            vk::SemaphoreWaitInfo::default().flags(vk::SemaphoreWaitFlags::ANY).semaphores(&semaphores).values(&values);
        // SAFETY: the semaphores are timelines of this device, which the caller keeps alive.
        match unsafe { self.gpu.vk().wait_semaphores(&info, time.as_nanos() as u64) } {
            Ok(()) | Err(vk::Result::TIMEOUT) => Ok(()),
            Err(e) => self.gpu.check("wait", 0, Err(e)),
        }
    }

    /// Waits until one of `points` may have been reached, for a wake or for a while, and has the driver wait for one
    /// timeline at most.
    fn doze(&self, points: &[(Arc<Timeline>, u64)], wakes: u64, time: Duration) -> Result<()> {
        let now = lock(&self.wakes);
        // What was signalled before this lock was taken has notified nobody.
        if *now != wakes || any(points, Timeline::is_at)? {
            return Ok(());
        }
        let nearest = {
            let Flights { flights, waits } = &*lock(&self.flights);
            let reaches = |f: &Flight| points.iter().any(|(t, v)| Arc::ptr_eq(t, &f.timeline) && f.value >= *v);
            let first = flights.iter().position(reaches);
            let before = flights.iter().take(first.map_or(0, |i| i + 1)).map(|f| f.waits).sum();
            let mut gates = waits.iter().take(before).filter(|(t, v)| t.submitted() < *v).peekable();
            match first {
                Some(i) if gates.peek().is_none() => Ok((flights[i].timeline.clone(), flights[i].value)),
                _ => Err(gates.chain(points).all(|(t, _)| t.is_ours())),
            }
        };
        match nearest {
            Ok(flight) => {
                drop(now);
                self.sleep([&flight].into_iter(), time.min(SHORT_SLICE))
            }
            Err(all_ours) => {
                let slice = if all_ours { SLICE } else { SHORT_SLICE };
                drop(self.stirred.wait_timeout(now, time.min(slice)).unwrap_or_else(PoisonError::into_inner));
                Ok(())
            }
        }
    }

    /// A wait for nothing but a wake, of which the driver need not know.
    fn wait_for_wake(&self, wakes: u64, deadline: Instant) -> Result<Waited> {
        let mut now = lock(&self.wakes);
        loop {
            self.gpu.status()?;
            let left = deadline.saturating_duration_since(Instant::now());
            match (*now != wakes, left.is_zero()) {
                (true, _) => return Ok(Waited::Woken),
                (_, true) => return Ok(Waited::TimedOut),
                _ => now = self.stirred.wait_timeout(now, left.min(SLICE)).unwrap_or_else(PoisonError::into_inner).0,
            }
        }
    }

    /// Waits, even if the device was declared lost, until nothing runs on it any more; failing that, abandons it.
    fn settle(&self) {
        let last = lock(&self.flights).flights.back().map(|f| (f.timeline.clone(), f.value));
        let Some((timeline, value)) = last else { return };
        let (semaphores, values) = ([timeline.raw], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        // SAFETY: the semaphore is a timeline of this device, which is held here.
        match unsafe { self.gpu.vk().wait_semaphores(&info, PATIENCE.as_nanos() as u64) } {
            // The queue is in order; and on a device that its driver lost nothing runs.
            Ok(()) | Err(vk::Result::ERROR_DEVICE_LOST) => {}
            Err(e) => {
                log::error!("{}: closed while its work is stuck ({e:?}); what that uses is leaked", self.gpu.id);
                self.gpu.abandon();
            }
        }
    }
}

impl Turn {
    /// Lays the batches out as the driver reads them.
    fn gather(&mut self) {
        let Turn { batches, waits, semaphores, values, stages, buffers, timelines, infos } = self;
        semaphores.clear();
        values.clear();
        stages.clear();
        buffers.clear();
        timelines.clear();
        infos.clear();
        // All of each list first: what is pointed to must not move afterwards. Waits come before signals.
        for (timeline, value) in waits.iter() {
            semaphores.push(timeline.raw);
            values.push(*value);
            stages.push(vk::PipelineStageFlags::ALL_COMMANDS);
        }
        for batch in batches.iter() {
            semaphores.push(batch.timeline.raw);
            values.push(batch.value);
            buffers.extend(batch.commands.as_ref().map(|c| c.raw));
        }
        let (mut wait, mut signal, mut buffer) = (0, waits.len(), 0);
        for batch in batches.iter() {
            timelines.push(vk::TimelineSemaphoreSubmitInfo {
                wait_semaphore_value_count: batch.waits as u32,
                p_wait_semaphore_values: values[wait..].as_ptr(),
                signal_semaphore_value_count: 1,
                p_signal_semaphore_values: &values[signal],
                ..Default::default()
            });
            let count = usize::from(batch.commands.is_some());
            infos.push(vk::SubmitInfo {
                wait_semaphore_count: batch.waits as u32,
                p_wait_semaphores: semaphores[wait..].as_ptr(),
                p_wait_dst_stage_mask: stages[wait..].as_ptr(),
                command_buffer_count: count as u32,
                p_command_buffers: buffers[buffer..].as_ptr(),
                signal_semaphore_count: 1,
                p_signal_semaphores: &semaphores[signal],
                ..Default::default()
            });
            (wait, signal, buffer) = (wait + batch.waits, signal + 1, buffer + count);
        }
        for (info, timeline) in infos.iter_mut().zip(timelines.iter()) {
            info.p_next = std::ptr::from_ref(timeline).cast();
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.settle();
    }
}

fn any(points: &[(Arc<Timeline>, u64)], look: impl Fn(&Timeline, u64) -> Result<bool>) -> Result<bool> {
    for (timeline, value) in points {
        if look(timeline, *value)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A panic elsewhere must not become a second one here: what these locks guard is valid at every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
