//! Timelines, what is under way, and waiting for it.
//!
//! A timeline is a hal fence. A queue runs its submissions in order, so of any set of points the one submitted first
//! is reached first: waiting for any of them is waiting for that one, or for a wake.
use crate::{api::ProxyApi, gpu::Gpu, memory::Buffer};
use allhands_contract::{Result, Spin, Waited};
use std::{
    collections::VecDeque,
    mem::ManuallyDrop,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use wgpu_hal::{CommandEncoder as _, Device as _, Queue as _};

pub(crate) struct Timeline<A: ProxyApi> {
    fence: ManuallyDrop<A::Fence>,
    gpu: Arc<Gpu<A>>,
    submitted: AtomicU64,
    reached: AtomicU64,
}

impl<A: ProxyApi> Timeline<A> {
    pub fn new(gpu: &Arc<Gpu<A>>) -> Result<Arc<Self>> {
        // SAFETY: hal asks nothing of the caller.
        let fence = gpu.call(0, || unsafe { gpu.device().create_fence() })?;
        Ok(Arc::new(Timeline {
            fence: ManuallyDrop::new(fence),
            gpu: gpu.clone(),
            submitted: AtomicU64::new(0),
            reached: AtomicU64::new(0),
        }))
    }
    #[cfg(test)]
    pub fn fence(&self) -> &A::Fence {
        &self.fence
    }
    /// The highest value submitted for it.
    pub fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }
    pub fn value(&self) -> Result<u64> {
        // SAFETY: the fence is of this device.
        let value = self.gpu.call(0, || unsafe { self.gpu.device().get_fence_value(&self.fence) })?;
        Ok(self.reached.fetch_max(value, Ordering::AcqRel).max(value))
    }
    fn is_at(&self, value: u64) -> Result<bool> {
        Ok(self.reached.load(Ordering::Acquire) >= value || self.value()? >= value)
    }
}

impl<A: ProxyApi> Drop for Timeline<A> {
    fn drop(&mut self) {
        // SAFETY: this is the drop, so it is not used again.
        let fence = unsafe { ManuallyDrop::take(&mut self.fence) };
        // SAFETY: submissions that signal it own it until they have completed, and waiters own it while they wait.
        self.gpu.destroy(move |device| unsafe { device.destroy_fence(fence) });
    }
}

/// Recorded commands and all that they use.
pub(crate) struct Commands<A: ProxyApi> {
    pub gpu: Arc<Gpu<A>>,
    pub recorded: Option<(A::CommandEncoder, A::CommandBuffer)>,
    pub groups: Vec<A::BindGroup>,
    /// Named to stay alive.
    pub _buffers: Vec<Arc<Buffer<A>>>,
    pub dispatches: u64,
    pub copies: u64,
}

impl<A: ProxyApi> Commands<A> {
    /// Destroys them, and returns the encoder for another use. They do not run any more, or never did.
    fn recycle(&mut self) -> Option<A::CommandEncoder> {
        let (mut encoder, buffer) = self.recorded.take()?;
        let groups = std::mem::take(&mut self.groups);
        let done = self.gpu.destroy(|device| {
            // SAFETY: the encoder is closed, its only command buffer is given back, and the device is done with both
            // and with the groups.
            unsafe {
                encoder.reset_all(std::iter::once(buffer));
                groups.into_iter().for_each(|g| device.destroy_bind_group(g));
            }
        });
        if done {
            return Some(encoder);
        }
        std::mem::forget(encoder); // its pool may be in use, and hal is not called any more
        None
    }
}

impl<A: ProxyApi> Drop for Commands<A> {
    fn drop(&mut self) {
        self.recycle();
    }
}

/// A submission that has not been seen to complete.
struct Flight<A: ProxyApi> {
    timeline: Arc<Timeline<A>>,
    value: u64,
    commands: Option<Commands<A>>,
}

/// The right to submit; one thread has it at a time.
pub(crate) type Turn<'a> = MutexGuard<'a, ()>;

pub(crate) struct Queue<A: ProxyApi> {
    gpu: Arc<Gpu<A>>,
    turn: Mutex<()>,
    flights: Mutex<VecDeque<Flight<A>>>,
    encoders: Mutex<Vec<A::CommandEncoder>>,
    wakes: Mutex<u64>,
    /// Notified, under the lock of `wakes`, at a wake and at a submit.
    stirred: Condvar,
    /// None on a device that is the processor.
    spin: Option<Spin>,
    pub submits: AtomicU64,
    pub dispatches: AtomicU64,
    pub copies: AtomicU64,
}

/// Encoders kept for another use.
const SPARE_ENCODERS: usize = 32;
/// How long closing a device waits for what is under way.
const PATIENCE: Duration = Duration::from_secs(5);

impl<A: ProxyApi> Queue<A> {
    pub fn new(gpu: Arc<Gpu<A>>, software: bool) -> Self {
        Queue {
            gpu,
            turn: Mutex::default(),
            flights: Mutex::default(),
            encoders: Mutex::default(),
            wakes: Mutex::default(),
            stirred: Condvar::new(),
            spin: (!software).then(Spin::default),
            submits: AtomicU64::new(0),
            dispatches: AtomicU64::new(0),
            copies: AtomicU64::new(0),
        }
    }

    /// An encoder, closed.
    pub fn encoder(&self) -> Result<A::CommandEncoder> {
        if let Some(encoder) = lock(&self.encoders).pop() {
            return Ok(encoder);
        }
        let desc = wgpu_hal::CommandEncoderDescriptor { label: None, queue: self.gpu.queue() };
        // SAFETY: the queue is this device's.
        self.gpu.call(0, || unsafe { self.gpu.device().create_command_encoder(&desc) })
    }
    /// Takes back an encoder, closed.
    pub fn give_back(&self, encoder: A::CommandEncoder) {
        let mut spare = lock(&self.encoders);
        if spare.len() < SPARE_ENCODERS {
            spare.push(encoder);
        }
    }
    /// Destroys commands that do not run.
    pub fn discard(&self, mut commands: Commands<A>) {
        if let Some(encoder) = commands.recycle() {
            self.give_back(encoder);
        }
    }

    /// Waits for the right to submit.
    pub fn turn(&self) -> Turn<'_> {
        lock(&self.turn)
    }
    /// Submits. `value` is above all submitted for the timeline.
    pub fn submit(
        &self,
        _turn: &Turn<'_>,
        commands: Option<Commands<A>>,
        timeline: &Arc<Timeline<A>>,
        value: u64,
    ) -> Result<()> {
        self.gpu.status()?;
        let recorded = commands.as_ref().and_then(|c| c.recorded.as_ref()).map(|(_, buffer)| buffer);
        let buffers: Vec<&A::CommandBuffer> = recorded.into_iter().collect();
        // SAFETY: the command buffer was made on this device and is submitted once; what it uses is kept by `Flight`
        // until the value is reached; the fence is this device's and the value above those submitted for it.
        let done = self.gpu.guard(|| unsafe { self.gpu.queue().submit(&buffers, &[], (&timeline.fence, value)) })?;
        if let Err(why) = done {
            // hal has chained the next submit to this one already, so there is no going on without it.
            return Err(self.gpu.lose(format!("a submit failed: {why}")));
        }
        self.submits.fetch_add(1, Ordering::Relaxed);
        if let Some(c) = &commands {
            self.dispatches.fetch_add(c.dispatches, Ordering::Relaxed);
            self.copies.fetch_add(c.copies, Ordering::Relaxed);
        }
        lock(&self.flights).push_back(Flight { timeline: timeline.clone(), value, commands });
        timeline.submitted.store(value, Ordering::Release);
        let _wakes = lock(&self.wakes);
        self.stirred.notify_all();
        Ok(())
    }

    /// Lets go of what has completed.
    pub fn retire(&self) -> Result<()> {
        let mut done = Vec::new();
        {
            let mut flights = lock(&self.flights);
            while let Some(first) = flights.front() {
                if !first.timeline.is_at(first.value)? {
                    break;
                }
                done.extend(flights.pop_front());
            }
        }
        done.into_iter().filter_map(|f| f.commands).for_each(|c| self.discard(c));
        Ok(())
    }

    /// How often [`wake`](Self::wake) was called.
    pub fn wakes(&self) -> u64 {
        *lock(&self.wakes)
    }
    /// Ends every wait under way.
    pub fn wake(&self) {
        let mut wakes = lock(&self.wakes);
        *wakes += 1;
        // A failure is kept in `lost`, where the waiters find it.
        let _ = self.gpu.guard(|| A::ring(&self.gpu, *wakes));
        self.stirred.notify_all();
    }

    /// [`Device::wait_any`](allhands_contract::Device::wait_any).
    pub fn wait_any(&self, points: &[(Arc<Timeline<A>>, u64)], wakes: u64, deadline: Instant) -> Result<Waited> {
        let start = Instant::now();
        let come = || points.iter().try_fold(false, |come, (timeline, value)| Ok(come || timeline.is_at(*value)?));
        loop {
            self.gpu.status()?;
            if let Some(spin) = &self.spin {
                // What goes wrong while it looks goes wrong again below.
                spin.look(|| come().unwrap_or(true) || *lock(&self.wakes) != wakes);
            }
            if come()? {
                self.retire()?;
                self.spin.iter().for_each(|spin| spin.took(start.elapsed()));
                return Ok(Waited::Reached);
            }
            let left = {
                let now = lock(&self.wakes);
                if *now != wakes {
                    return Ok(Waited::Woken);
                }
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(Waited::TimedOut);
                }
                if !points.iter().any(|(timeline, value)| timeline.submitted() >= *value) {
                    // Only a wake or a submit can bring the end nearer, and both notify under this lock.
                    drop(self.stirred.wait_timeout(now, left).unwrap_or_else(PoisonError::into_inner));
                    continue;
                }
                left
            };
            if let Some((timeline, value)) = self.first_of(points) {
                let wait = || A::wait(&self.gpu, &timeline.fence, value, wakes, left.min(A::LONGEST_WAIT));
                if self.gpu.call(0, wait)? {
                    timeline.reached.fetch_max(value, Ordering::AcqRel);
                }
            }
        }
    }

    /// The first flight that reaches one of `points`; none if it has completed since.
    fn first_of(&self, points: &[(Arc<Timeline<A>>, u64)]) -> Option<(Arc<Timeline<A>>, u64)> {
        let flights = lock(&self.flights);
        let reaches = |f: &&Flight<A>| points.iter().any(|(t, v)| Arc::ptr_eq(t, &f.timeline) && f.value >= *v);
        flights.iter().find(reaches).map(|f| (f.timeline.clone(), f.value))
    }
}

impl<A: ProxyApi> Queue<A> {
    /// Waits, even if the device was declared lost, until nothing runs on it any more; failing that, abandons it.
    fn settle(&self) {
        let deadline = Instant::now() + PATIENCE;
        let last = lock(&self.flights).back().map(|f| (f.timeline.clone(), f.value));
        let Some((timeline, value)) = last else { return };
        while !self.gpu.is_abandoned() {
            let left = deadline.saturating_duration_since(Instant::now());
            let slice = Some(left.min(A::LONGEST_WAIT));
            // SAFETY: the fence is of this device, and the value was submitted for it.
            match self.gpu.guard(|| unsafe { self.gpu.device().wait(&timeline.fence, value, slice) }) {
                // The queue is in order; and on a device that its driver lost nothing runs.
                Ok(Ok(true) | Err(wgpu_hal::DeviceError::Lost)) | Err(_) => return,
                Ok(Ok(false)) if !left.is_zero() => {}
                Ok(_) => {
                    log::error!("{}: closed while its work is stuck; what that uses is leaked", self.gpu.id);
                    self.gpu.abandon();
                }
            }
        }
    }
}

impl<A: ProxyApi> Drop for Queue<A> {
    fn drop(&mut self) {
        self.settle();
        let flights = std::mem::take(self.flights.get_mut().unwrap_or_else(PoisonError::into_inner));
        let encoders = std::mem::take(self.encoders.get_mut().unwrap_or_else(PoisonError::into_inner));
        drop(flights);
        let mut encoders = Some(encoders);
        self.gpu.destroy(|_| drop(encoders.take()));
        std::mem::forget(encoders);
    }
}

/// A panic elsewhere must not become a second one here: what these locks guard is valid at every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
