//! The contract, call by call.
use crate::{
    Mode, Options, PathFault,
    commands::Commands,
    kernels,
    memory::{Buffer, Pages},
    queue::{Job, Queue, State, Timeline},
};
use allhands_contract::*;
use std::{
    fmt::Debug,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, atomic::Ordering::Relaxed},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// The host as a device. Dropping it runs what can run without waiting, and forgets the rest.
pub struct CpuDevice {
    info: Info,
    limits: Limits,
    options: Options,
    queue: Arc<Queue>,
    /// The thread of a [`Mode::Threaded`] device.
    worker: Option<JoinHandle<()>>,
    /// Whose turn it is to run on a [`Mode::Inline`] device.
    turn: Mutex<()>,
    watchers: Watchers,
}

impl CpuDevice {
    /// Opens one. It fails only if there is no thread to be had.
    pub fn open(options: Options) -> Result<Arc<CpuDevice>> {
        let id = DeviceId::unique();
        let queue = Queue::new(id, options.clock.clone(), options.emulation, options.faults.clone());
        let worker = match options.mode {
            Mode::Inline => None,
            Mode::Threaded => {
                let queue = queue.clone();
                let thread = std::thread::Builder::new().name(format!("allhands {id}"));
                let failed = |e| Error::Open { what: format!("a thread for a cpu device: {e}") };
                Some(thread.spawn(move || queue.serve()).map_err(failed)?)
            }
        };
        let info = Info {
            id,
            name: processor().unwrap_or_else(|| "cpu".into()),
            driver: concat!("allhands-cpu ", env!("CARGO_PKG_VERSION")).into(),
            backend: "cpu",
            address: None,
        };
        let mut limits = limits(options.mode);
        // An emulated device has a bus.
        limits.unified = options.emulation == crate::Emulation::default();
        if let Some(restrict) = options.restrict {
            restrict(&mut limits);
        }
        Ok(Arc::new(CpuDevice {
            info,
            limits,
            options,
            queue,
            worker,
            turn: Mutex::default(),
            watchers: Watchers::default(),
        }))
    }

    /// The options that it was opened with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    fn id(&self) -> DeviceId {
        self.info.id
    }
    /// The state of a device that still answers.
    fn state(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.queue.lock();
        self.queue.alive()?;
        Ok(state)
    }
    fn invalid<T>(&self, what: String) -> Result<T> {
        Err(Error::Invalid { device: self.id(), what })
    }
    fn find<T: Clone>(&self, table: &Slab<T>, handle: impl Handle) -> Result<T> {
        let (device, index, generation) = handle.parts();
        if device != self.id() {
            return Err(Error::Foreign { device: self.id(), handle: format!("{handle:?}") });
        }
        table.get(index, generation).cloned().ok_or_else(|| Error::Stale { handle: format!("{handle:?}") })
    }
    /// Takes a resource out of its table; the last owner drops it, outside the lock.
    fn take<T>(&self, table: impl FnOnce(&mut State) -> &mut Slab<T>, handle: impl Handle) -> Option<T> {
        let (device, index, generation) = handle.parts();
        if device == self.id() { table(&mut self.queue.lock()).remove(index, generation) } else { None }
    }
    /// The buffer of a range that lies inside it.
    fn buffer_of(&self, range: Range) -> Result<Arc<Buffer>> {
        let buffer = self.find(&self.state()?.buffers, range.buffer)?;
        if range.offset.checked_add(range.size).is_none_or(|end| end > buffer.size) {
            return Err(Error::OutOfRange { device: self.id(), range, size: buffer.size });
        }
        Ok(buffer)
    }
    fn add(&self, buffer: Buffer) -> Result<BufferId> {
        let id = self.state()?.buffers.insert(self.id(), Arc::new(buffer));
        self.queue.counts.buffers.fetch_add(1, Relaxed);
        Ok(id)
    }
    fn pages(&self, size: u64) -> Result<Pages> {
        Pages::new(size, &self.queue.counts.allocated).ok_or(Error::OutOfMemory { device: self.id(), bytes: size })
    }

    /// Checks and resolves all of `submissions` before any takes effect.
    fn resolve(&self, state: &State, submissions: &[Submission<'_>]) -> Result<Vec<Job>> {
        let mut jobs: Vec<Job> = Vec::with_capacity(submissions.len());
        for (index, s) in submissions.iter().enumerate() {
            if !self.limits.gated && !s.waits.is_empty() {
                return self.invalid("a submission with waits; wait on the host first, and submit then".into());
            }
            let used = |earlier: &Submission<'_>| !self.limits.resubmit && earlier.commands == s.commands;
            let commands = match s.commands {
                Some(id) if submissions[..index].iter().any(used) => {
                    return Err(Error::Stale { handle: format!("{id:?}") });
                }
                commands => commands.map(|id| self.find(&state.commands, id)).transpose()?,
            };
            let point = |p: &Point| Ok((self.find(&state.timelines, p.timeline)?, p.value));
            let waits = s.waits.iter().map(point).collect::<Result<Vec<_>>>()?;
            let signal = point(&s.signal)?;
            let earlier = jobs.iter().filter(|j| Arc::ptr_eq(&j.signal.0, &signal.0)).map(|j| j.signal.1).max();
            let submitted = signal.0.submitted().max(earlier.unwrap_or(0));
            if signal.1 <= submitted {
                return self.invalid(format!("signals {:?}, which is not above {submitted}", s.signal));
            }
            jobs.push(Job { commands, waits, signal });
        }
        Ok(jobs)
    }
}

impl Device for CpuDevice {
    fn info(&self) -> &Info {
        &self.info
    }
    fn limits(&self) -> &Limits {
        &self.limits
    }
    fn counters(&self) -> Counters {
        let c = &self.queue.counts;
        Counters {
            submits: c.submits.load(Relaxed),
            dispatches: c.dispatches.load(Relaxed),
            copies: c.copies.load(Relaxed),
            prepares: c.prepares.load(Relaxed),
            allocated: c.allocated.load(Relaxed),
            buffers: c.buffers.load(Relaxed),
            ..Counters::default()
        }
    }
    fn clock(&self) -> Clock {
        self.options.clock.clone()
    }
    fn status(&self) -> Result<()> {
        self.queue.alive()
    }
    fn sibling(&self) -> Result<Arc<dyn Device>> {
        self.queue.alive()?;
        Ok(CpuDevice::open(self.options.clone())?)
    }

    fn create_buffer(&self, desc: &BufferDesc) -> Result<BufferId> {
        self.queue.alive()?;
        if desc.size == 0 {
            return self.invalid("a buffer of 0 bytes; make one of at least 1".into());
        }
        if desc.memory == Memory::Mapped && !self.limits.mapped {
            return Err(Error::Unsupported {
                device: self.id(),
                what: "mapped memory",
                instead: "copy through Upload and Download memory",
            });
        }
        self.add(Buffer::new(self.pages(desc.size)?, desc.memory, desc.exportable))
    }
    fn destroy_buffer(&self, buffer: BufferId) {
        if self.take(|s| &mut s.buffers, buffer).is_some() {
            self.watchers.destroyed(buffer);
        }
    }
    fn watch(&self, watcher: Weak<dyn Watch>) {
        self.watchers.add(watcher);
    }
    fn size(&self, buffer: BufferId) -> Result<u64> {
        Ok(self.find(&self.state()?.buffers, buffer)?.size)
    }
    fn read(&self, from: Range, to: &mut [u8]) -> Result<()> {
        let buffer = self.buffer_of(from)?;
        if to.len() as u64 != from.size {
            return self.invalid(format!("reads {} bytes into {}", from.size, to.len()));
        }
        // SAFETY: the range is inside the buffer, which is held; the caller reads only what no unfinished submission
        // writes.
        unsafe { std::ptr::copy_nonoverlapping(buffer.at(from.offset).0, to.as_mut_ptr(), to.len()) };
        Ok(())
    }
    fn write(&self, to: Range, from: &[u8]) -> Result<()> {
        let buffer = self.buffer_of(to)?;
        if from.len() as u64 != to.size {
            return self.invalid(format!("writes {} bytes into {}", from.len(), to.size));
        }
        // SAFETY: the range is inside the buffer, which is held; the caller writes only what no unfinished
        // submission touches.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), buffer.at(to.offset).0, from.len()) };
        Ok(())
    }
    fn export(&self, buffer: BufferId, kind: SharedKind) -> Result<SharedMemory> {
        let found = self.find(&self.state()?.buffers, buffer)?;
        if !self.limits.memory_export.contains(&kind) {
            let what = match kind {
                SharedKind::DmaBuf => "memory to export as a dma-buf",
                SharedKind::OpaqueFd => "memory to export as an opaque file descriptor",
                SharedKind::Host => "memory to export as host pages",
            };
            return Err(Error::Unsupported { device: self.id(), what, instead: "see its limits for what it exports" });
        }
        match found.region() {
            Some(region) if found.exportable || self.limits.unified => {
                Ok(SharedMemory::host(self.id(), Arc::new(region)))
            }
            _ => self.invalid(format!("{buffer:?} was not made exportable; ask for that when it is made")),
        }
    }
    fn import(&self, memory: &SharedMemory) -> Result<BufferId> {
        self.queue.alive()?;
        let region = memory.region().filter(|_| self.limits.memory_import.contains(&SharedKind::Host));
        let Some(region) = region else {
            return Err(Error::Unsupported {
                device: self.id(),
                what: "import of memory in this form",
                instead: "copy through memory of its own",
            });
        };
        let buffer = match self.options.faults.look(|f| f.imports.clone()) {
            PathFault::Refuse(reason) => return self.invalid(reason),
            PathFault::Zeros => Buffer::import_zeros(self.pages(memory.size)?),
            _ => Buffer::import(region.clone(), &self.queue.counts.resident),
        };
        self.add(buffer)
    }

    fn create_timeline(&self, shareable: bool) -> Result<TimelineId> {
        let mut state = self.state()?;
        if shareable && !self.limits.timeline_export {
            return Err(Error::Unsupported {
                device: self.id(),
                what: "timelines that can be exported",
                instead: "make a plain one and relay it",
            });
        }
        Ok(state.timelines.insert(self.id(), Arc::new(Timeline::default())))
    }
    fn destroy_timeline(&self, timeline: TimelineId) {
        drop(self.take(|s| &mut s.timelines, timeline));
    }
    fn value(&self, timeline: TimelineId) -> Result<u64> {
        let state = self.state()?;
        Ok(self.find(&state.timelines, timeline)?.value())
    }
    fn signal(&self, point: Point) -> Result<()> {
        {
            let state = self.state()?;
            let timeline = self.find(&state.timelines, point.timeline)?;
            if !self.limits.gated {
                return Err(Error::Unsupported {
                    device: self.id(),
                    what: "timelines that the host can signal",
                    instead: "submit without commands",
                });
            }
            if point.value <= timeline.value() {
                return self.invalid(format!("signals {point:?}, which is not above {}", timeline.value()));
            }
            timeline.signal(point.value);
        }
        self.queue.work.notify_all();
        self.queue.reached.notify_all();
        Ok(())
    }
    fn wait_any(&self, points: &[Point], wakes: u64, deadline: Instant) -> Result<Waited> {
        let clock = &self.queue.clock;
        let deadline = clock.now().checked_add(self.limits.longest_wait).map_or(deadline, |end| end.min(deadline));
        let mut state = self.state()?;
        let timelines = points.iter().map(|p| Ok((self.find(&state.timelines, p.timeline)?, p.value)));
        let timelines = timelines.collect::<Result<Vec<_>>>()?;
        loop {
            self.queue.alive()?;
            if timelines.iter().any(|(timeline, value)| timeline.value() >= *value) {
                return Ok(Waited::Reached);
            }
            if state.wakes != wakes {
                return Ok(Waited::Woken);
            }
            if clock.now() >= deadline {
                return Ok(Waited::TimedOut);
            }
            state = clock.wait(&self.queue.reached, state, deadline);
        }
    }
    fn wakes(&self) -> u64 {
        self.queue.lock().wakes
    }
    fn wake(&self) {
        self.queue.lock().wakes += 1;
        self.queue.reached.notify_all();
    }

    fn prepare(&self, ops: &[Op]) -> Result<CommandsId> {
        let inline = self.options.mode == Mode::Inline;
        let mut state = self.state()?;
        let commands = Commands::new(self.id(), &self.limits, ops, inline, |buffer| self.find(&state.buffers, buffer))?;
        if let PathFault::Refuse(reason) = self.options.faults.look(|f| f.copies.clone())
            && commands.steps.iter().any(|step| step.carries)
        {
            return self.invalid(reason);
        }
        self.queue.counts.prepares.fetch_add(1, Relaxed);
        Ok(state.commands.insert(self.id(), Arc::new(commands)))
    }
    fn destroy_commands(&self, commands: CommandsId) {
        drop(self.take(|s| &mut s.commands, commands));
    }
    fn submit(&self, submissions: &[Submission<'_>]) -> Result<()> {
        let inline = self.options.mode == Mode::Inline;
        let _turn = inline.then(|| self.turn.lock().unwrap_or_else(PoisonError::into_inner));
        let mut state = self.state()?;
        let jobs = self.resolve(&state, submissions)?;
        for (job, submission) in jobs.iter().zip(submissions) {
            job.signal.0.submit(job.signal.1);
            if let (Some(id), false) = (submission.commands, self.limits.resubmit) {
                state.commands.remove(id.index, id.generation); // the job holds them too: nothing is dropped here
            }
        }
        self.queue.counts.submits.fetch_add(jobs.len() as u64, Relaxed);
        if !inline {
            state.jobs.extend(jobs);
            drop(state);
            self.queue.work.notify_all();
            return Ok(());
        }
        drop(state);
        jobs.into_iter().try_for_each(|job| self.queue.run(job))
    }
}

impl Drop for CpuDevice {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.work.notify_all();
        if let Some(worker) = self.worker.take()
            && worker.thread().id() != std::thread::current().id()
            && worker.join().is_err()
        {
            log::error!("the worker of {} panicked", self.id());
        }
    }
}

impl Debug for CpuDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuDevice").field("id", &self.id()).field("options", &self.options).finish_non_exhaustive()
    }
}

/// What the three kinds of handle have in common.
trait Handle: Debug + Copy {
    fn parts(self) -> (DeviceId, u32, u32);
}
macro_rules! handles {
    ($($handle:ident)*) => {$(
        impl Handle for $handle {
            fn parts(self) -> (DeviceId, u32, u32) {
                (self.device, self.index, self.generation)
            }
        }
    )*};
}
handles!(BufferId TimelineId CommandsId);

fn limits(mode: Mode) -> Limits {
    let pairs = ReduceOp::ALL.into_iter().flat_map(|op| DataType::ALL.map(|dtype| (op, dtype)));
    Limits {
        gated: mode == Mode::Threaded,
        resubmit: true,
        submit_blocks: mode == Mode::Inline,
        mapped: true,
        host_reads_mapped: true,
        gates_see_host_writes: true,
        unified: true,
        polls: false,
        max_sources: 64,
        max_bindings: 256,
        max_kernel_elements: 1 << 48,
        write_granularity: 1,
        copy_granularity: 1,
        longest_wait: Duration::from_secs(3600),
        memory_export: vec![SharedKind::Host],
        memory_import: vec![SharedKind::Host],
        timeline_export: false,
        timeline_import: false,
        kernels: pairs.filter(|(op, dtype)| kernels::find(*op, *dtype, None).is_some()).collect(),
    }
}

/// The processor's own name.
fn processor() -> Option<String> {
    let all = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = all.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'))?.1.trim();
    Some(name.to_owned()).filter(|n| !n.is_empty())
}
