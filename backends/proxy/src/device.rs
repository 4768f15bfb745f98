//! The device: handles and checks in front of memory, recording and the queue.
use crate::{
    Backend,
    api::{self, ProxyApi},
    gpu::Gpu,
    memory::Buffer,
    queue::{Commands, Queue, Timeline, lock},
    record::{Windows, record},
};
use allhands_contract::*;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use wgpu_hal::Adapter as _;
use wgpu_types as wgt;

/// One hal device and its queue.
pub(crate) struct ProxyDevice<A: ProxyApi> {
    // The tables come before the queue, which waits for what is under way when it is dropped, and all before `gpu`.
    buffers: Mutex<Slab<Arc<Buffer<A>>>>,
    timelines: Mutex<Slab<Arc<Timeline<A>>>>,
    commands: Mutex<Slab<Commands<A>>>,
    /// Of `read` and `write`.
    transfers: Arc<Timeline<A>>,
    queue: Queue<A>,
    gpu: Arc<Gpu<A>>,
    adapter: usize,
    info: Info,
    limits: Limits,
    windows: Windows,
    max_buffer_size: u64,
    prepares: AtomicU64,
    watchers: Watchers,
}

/// Bytes that a read or a write stages at a time.
const STAGE: u64 = 16 << 20;
/// How long a read or a write waits for the queue.
const PATIENCE: Duration = Duration::from_secs(60);
/// What a kernel reads and writes at a time.
const WORD: u64 = 4;

impl<A: ProxyApi> ProxyDevice<A> {
    pub fn open(index: usize) -> Result<Arc<Self>> {
        let wanted = format!("{}:{index}", A::BACKEND.name());
        let refuse = |why: String| Error::Open { what: format!("{wanted} could not be opened: {why}") };
        let adapters = api::adapters::<A>();
        let exposed = adapters.get(index).ok_or_else(|| {
            let there = match adapters.len() {
                0 => format!("no {} driver was found", if A::BACKEND == Backend::Vulkan { "Vulkan" } else { "EGL" }),
                n => (0..n)
                    .map(|i| format!("{}:{i} ({})", A::BACKEND.name(), adapters[i].info.name))
                    .collect::<Vec<_>>()
                    .join(", "),
            };
            Error::Open { what: format!("{wanted} was asked for; there is: {there}") }
        })?;
        let (features, has) = (exposed.features, &exposed.capabilities.limits);
        let lacks = [
            (!features.contains(wgt::Features::IMMEDIATES), "immediates"),
            (has.max_immediate_size < kernels::PARAMS_SIZE, "room for a kernel's parameters"),
            (has.max_storage_buffers_per_shader_stage < kernels::BINDINGS as u32, "four storage buffers"),
            (has.max_compute_invocations_per_workgroup < kernels::WORKGROUP, "workgroups of 256"),
            (has.max_compute_workgroup_size_x < kernels::WORKGROUP, "workgroups of 256"),
        ];
        if let Some((_, what)) = lacks.iter().find(|(lacking, _)| *lacking) {
            return Err(refuse(format!("{} lacks {what}", exposed.info.name)));
        }
        let mapped = features.contains(wgt::Features::MAPPABLE_PRIMARY_BUFFERS);
        let int64 = features.contains(wgt::Features::SHADER_INT64);
        let useful = wgt::Features::MAPPABLE_PRIMARY_BUFFERS | wgt::Features::SHADER_INT64;
        let wanted_features = features & (wgt::Features::IMMEDIATES | useful);
        let id = DeviceId::unique();
        let software = exposed.info.device_type == wgt::DeviceType::Cpu;
        let opened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // SAFETY: features and limits are no more than the adapter has.
            let open = unsafe { exposed.adapter.open(wanted_features, has, &wgt::MemoryHints::MemoryUsage) }?;
            Gpu::new(id, open, software)
        }));
        let gpu = match opened {
            Ok(Ok(gpu)) => Arc::new(gpu),
            Ok(Err(why)) => return Err(refuse(why.to_string())),
            Err(_) => return Err(refuse("its driver interface panicked".into())),
        };
        for memory in [Memory::Upload, Memory::Download] {
            Buffer::new(&gpu, &BufferDesc { size: WORD, memory, exportable: true })
                .map_err(|why| refuse(format!("no coherent {memory:?} memory: {why}")))?;
        }
        let windows = Windows {
            alignment: u64::from(has.min_storage_buffer_offset_alignment).max(WORD),
            size: has.max_storage_buffer_binding_size.min(1 << 32) & !(WORD - 1),
            workgroups: has.max_compute_workgroups_per_dimension.min(65_535),
        };
        // An invocation takes at most 32,768 turns of its loops in all, and `count` and `stride` fit 32 bits.
        let turns = 32_768 / (1 + kernels::ACCESSES) as u64;
        let invocations = u64::from(windows.workgroups) * u64::from(kernels::WORKGROUP);
        let limits = Limits {
            gated: false,
            gates_see_host_writes: false,
            resubmit: false,
            submit_blocks: A::SUBMIT_BLOCKS,
            mapped,
            host_reads_mapped: mapped
                && matches!(exposed.info.device_type, wgt::DeviceType::Cpu | wgt::DeviceType::IntegratedGpu),
            unified: false,
            polls: !software,
            max_sources: kernels::SOURCES as u32,
            max_bindings: kernels::BINDINGS as u32,
            // Of the widest type, so that a range of any fits a window.
            max_kernel_elements: ((windows.size - windows.alignment) / 8).min(invocations * turns),
            write_granularity: WORD,
            copy_granularity: 1,
            longest_wait: A::LONGEST_WAIT,
            memory_export: vec![SharedKind::Host],
            memory_import: vec![],
            timeline_export: false,
            timeline_import: false,
            // hal does not let f64 through to a driver.
            kernels: kernels::all(int64, false).collect(),
        };
        let about = &api::infos::<A>()[index];
        Ok(Arc::new(ProxyDevice {
            buffers: Mutex::default(),
            timelines: Mutex::default(),
            commands: Mutex::default(),
            transfers: Timeline::new(&gpu)?,
            queue: Queue::new(gpu.clone(), software),
            adapter: index,
            info: Info {
                id,
                name: about.name.clone(),
                driver: about.driver.clone(),
                backend: A::BACKEND.name(),
                address: None,
            },
            limits,
            windows,
            max_buffer_size: has.max_buffer_size,
            prepares: AtomicU64::new(0),
            watchers: Watchers::default(),
            gpu,
        }))
    }

    #[cfg(test)]
    pub fn gpu(&self) -> &Gpu<A> {
        &self.gpu
    }
    fn buffer(&self, id: BufferId) -> Result<Arc<Buffer<A>>> {
        self.find(&self.buffers, id.device, id.index, id.generation, &id)
    }
    fn timeline(&self, id: TimelineId) -> Result<Arc<Timeline<A>>> {
        self.find(&self.timelines, id.device, id.index, id.generation, &id)
    }
    fn find<T: Clone>(
        &self,
        table: &Mutex<Slab<T>>,
        device: DeviceId,
        index: u32,
        generation: u32,
        handle: &dyn std::fmt::Debug,
    ) -> Result<T> {
        self.own(device, handle)?;
        lock(table).get(index, generation).cloned().ok_or_else(|| Error::Stale { handle: format!("{handle:?}") })
    }
    fn own(&self, device: DeviceId, handle: &dyn std::fmt::Debug) -> Result<()> {
        if device == self.info.id {
            return Ok(());
        }
        Err(Error::Foreign { device: self.info.id, handle: format!("{handle:?}") })
    }
    fn invalid<T>(&self, what: impl Into<String>) -> Result<T> {
        Err(Error::Invalid { device: self.info.id, what: what.into() })
    }
    fn unsupported<T>(&self, what: &'static str, instead: &'static str) -> Result<T> {
        Err(Error::Unsupported { device: self.info.id, what, instead })
    }
    fn within(&self, range: Range, len: usize) -> Result<Arc<Buffer<A>>> {
        let buffer = self.buffer(range.buffer)?;
        let size = buffer.desc().size;
        if range.offset.checked_add(range.size).is_none_or(|end| end > size) {
            return Err(Error::OutOfRange { device: self.info.id, range, size });
        }
        if range.size != len as u64 {
            return self.invalid(format!("a range of {} bytes and a slice of {len}", range.size));
        }
        Ok(buffer)
    }

    /// Copies whole words between two buffers and waits until it is done.
    fn transfer(
        &self,
        src: &Arc<Buffer<A>>,
        src_offset: u64,
        dst: &Arc<Buffer<A>>,
        dst_offset: u64,
        size: u64,
    ) -> Result<()> {
        let [from, to] = [0, 1].map(|index| BufferId { device: self.info.id, index, generation: 0 });
        let (from, to) = (Range::new(from, src_offset, size), Range::new(to, dst_offset, size));
        let ops = [Op::Copy { src: from, dst: to }, Op::Release { range: to, to: Domain::Host }];
        let buffers = BTreeMap::from([(from.buffer, src.clone()), (to.buffer, dst.clone())]);
        let commands = record(&self.queue, &self.gpu, self.windows, buffers, &ops)?;
        let value = {
            let turn = self.queue.turn();
            let value = self.transfers.submitted() + 1;
            self.queue.submit(&turn, Some(commands), &self.transfers, value)?;
            value
        };
        let deadline = Instant::now() + PATIENCE;
        let point = [(self.transfers.clone(), value)];
        loop {
            match self.queue.wait_any(&point, self.queue.wakes(), deadline)? {
                Waited::Reached => return Ok(()),
                Waited::Woken => {}
                Waited::TimedOut => return Err(self.gpu.lose(format!("a copy took longer than {PATIENCE:?}"))),
            }
        }
    }
    fn stage(&self, memory: Memory, size: u64) -> Result<Arc<Buffer<A>>> {
        Buffer::new(&self.gpu, &BufferDesc { size, memory, exportable: false })
    }
    /// Reads through a staging buffer.
    fn read_staged(&self, buffer: &Arc<Buffer<A>>, offset: u64, to: &mut [u8]) -> Result<()> {
        let stage = self.stage(Memory::Download, (to.len() as u64 + 2 * WORD).min(STAGE + 2 * WORD))?;
        for (i, piece) in to.chunks_mut(STAGE as usize).enumerate() {
            let (start, end) = words(offset + i as u64 * STAGE, piece.len());
            self.transfer(buffer, start, &stage, 0, end - start)?;
            stage.load(offset + i as u64 * STAGE - start, piece);
        }
        Ok(())
    }
    /// Writes through a staging buffer.
    fn write_staged(&self, buffer: &Arc<Buffer<A>>, offset: u64, from: &[u8]) -> Result<()> {
        let stage = self.stage(Memory::Upload, (from.len() as u64 + 2 * WORD).min(STAGE + 2 * WORD))?;
        for (i, piece) in from.chunks(STAGE as usize).enumerate() {
            let at = offset + i as u64 * STAGE;
            let (start, end) = words(at, piece.len());
            // The words that the ends share with bytes that stay.
            for (shared, edge) in [(start != at, start), (end != at + piece.len() as u64, end - WORD)] {
                if shared {
                    let mut word = [0; WORD as usize];
                    if !buffer.load(edge, &mut word) {
                        self.read_staged(buffer, edge, &mut word)?;
                    }
                    stage.store(edge - start, &word);
                }
            }
            stage.store(at - start, piece);
            self.transfer(&stage, 0, buffer, start, end - start)?;
        }
        Ok(())
    }
}

/// The whole words around `len` bytes from `offset`.
fn words(offset: u64, len: usize) -> (u64, u64) {
    (offset - offset % WORD, (offset + len as u64).next_multiple_of(WORD))
}

impl<A: ProxyApi> Device for ProxyDevice<A> {
    fn info(&self) -> &Info {
        &self.info
    }
    fn limits(&self) -> &Limits {
        &self.limits
    }
    fn counters(&self) -> Counters {
        Counters {
            submits: self.queue.submits.load(Ordering::Relaxed),
            dispatches: self.queue.dispatches.load(Ordering::Relaxed),
            copies: self.queue.copies.load(Ordering::Relaxed),
            prepares: self.prepares.load(Ordering::Relaxed),
            allocated: self.gpu.allocated.load(Ordering::Relaxed),
            ..Counters::default()
        }
    }
    fn status(&self) -> Result<()> {
        self.gpu.status()
    }
    fn sibling(&self) -> Result<Arc<dyn Device>> {
        Ok(Self::open(self.adapter)?)
    }

    fn create_buffer(&self, desc: &BufferDesc) -> Result<BufferId> {
        self.gpu.status()?;
        if desc.size == 0 {
            return self.invalid("a buffer of no bytes; make it at least one");
        }
        if desc.memory == Memory::Mapped && !self.limits.mapped {
            return self.unsupported("device-local memory that the host sees", "use Device with Upload and Download");
        }
        if desc.memory == Memory::Device && desc.exportable {
            return self.unsupported("export of device memory", "use Upload, Download or Mapped");
        }
        if desc.size > self.max_buffer_size {
            return Err(Error::OutOfMemory { device: self.info.id, bytes: desc.size });
        }
        self.queue.retire()?; // what it frees may be what is needed
        let buffer = Buffer::new(&self.gpu, desc)?;
        Ok(lock(&self.buffers).insert(self.info.id, buffer))
    }
    fn destroy_buffer(&self, id: BufferId) {
        if id.device == self.info.id {
            let gone = lock(&self.buffers).remove(id.index, id.generation);
            if gone.is_some() {
                self.watchers.destroyed(id);
            }
        }
    }
    fn watch(&self, watcher: Weak<dyn Watch>) {
        self.watchers.add(watcher);
    }
    fn size(&self, buffer: BufferId) -> Result<u64> {
        Ok(self.buffer(buffer)?.desc().size)
    }
    fn read(&self, from: Range, to: &mut [u8]) -> Result<()> {
        self.gpu.status()?;
        let buffer = self.within(from, to.len())?;
        if to.is_empty() || buffer.load(from.offset, to) {
            return Ok(());
        }
        self.read_staged(&buffer, from.offset, to)
    }
    fn write(&self, to: Range, from: &[u8]) -> Result<()> {
        self.gpu.status()?;
        let buffer = self.within(to, from.len())?;
        if from.is_empty() || buffer.store(to.offset, from) {
            return Ok(());
        }
        self.write_staged(&buffer, to.offset, from)
    }
    fn export(&self, id: BufferId, kind: SharedKind) -> Result<SharedMemory> {
        self.gpu.status()?;
        let buffer = self.buffer(id)?;
        if kind != SharedKind::Host {
            return self.unsupported("export of file descriptors", "export host pages");
        }
        let Some(start) = buffer.host().filter(|_| buffer.desc().exportable) else {
            return self.invalid(format!("{id:?} was not made exportable"));
        };
        let size = buffer.desc().size as usize;
        // SAFETY: the bytes stay mapped while the buffer lives, which the region owns; this crate only makes raw
        // accesses to them. Download memory is readable only, and whoever gets it must not write: `Memory` says so.
        let region = unsafe { HostRegion::new(start, size, Box::new(buffer)) };
        Ok(SharedMemory::host(self.info.id, Arc::new(region)))
    }
    fn import(&self, _: &SharedMemory) -> Result<BufferId> {
        self.unsupported("memory import", "let the host carry, or import this device's memory elsewhere")
    }

    fn create_timeline(&self, shareable: bool) -> Result<TimelineId> {
        if shareable {
            return self.unsupported("shareable timelines", "let the host relay");
        }
        let timeline = Timeline::new(&self.gpu)?;
        Ok(lock(&self.timelines).insert(self.info.id, timeline))
    }
    fn destroy_timeline(&self, id: TimelineId) {
        if id.device == self.info.id {
            let gone = lock(&self.timelines).remove(id.index, id.generation);
            drop(gone);
        }
    }
    fn value(&self, timeline: TimelineId) -> Result<u64> {
        self.gpu.status()?;
        let value = self.timeline(timeline)?.value()?;
        self.queue.retire()?;
        Ok(value)
    }
    fn signal(&self, point: Point) -> Result<()> {
        self.timeline(point.timeline)?;
        self.unsupported("timelines that the host signals", "submit without commands")
    }
    fn wait_any(&self, points: &[Point], wakes: u64, deadline: Instant) -> Result<Waited> {
        let points = points.iter().map(|p| Ok((self.timeline(p.timeline)?, p.value))).collect::<Result<Vec<_>>>()?;
        self.queue.wait_any(&points, wakes, deadline)
    }
    fn wakes(&self) -> u64 {
        self.queue.wakes()
    }
    fn wake(&self) {
        self.queue.wake();
    }

    fn prepare(&self, ops: &[Op]) -> Result<CommandsId> {
        self.gpu.status()?;
        let mut buffers = BTreeMap::new();
        check_ops(self.info.id, &self.limits, ops, |id| {
            let buffer = self.buffer(id)?;
            let size = buffer.desc().size;
            buffers.insert(id, buffer);
            Ok(size)
        })?;
        let commands = record(&self.queue, &self.gpu, self.windows, buffers, ops)?;
        self.prepares.fetch_add(1, Ordering::Relaxed);
        Ok(lock(&self.commands).insert(self.info.id, commands))
    }
    fn destroy_commands(&self, id: CommandsId) {
        if id.device == self.info.id {
            let gone = lock(&self.commands).remove(id.index, id.generation);
            gone.into_iter().for_each(|c| self.queue.discard(c));
        }
    }
    fn submit(&self, submissions: &[Submission<'_>]) -> Result<()> {
        self.queue.retire()?;
        let turn = self.queue.turn();
        // Everything is checked before anything is submitted.
        let mut signals: Vec<(Arc<Timeline<A>>, u64)> = Vec::with_capacity(submissions.len());
        for (i, s) in submissions.iter().enumerate() {
            if !s.waits.is_empty() {
                return self.unsupported("waits on its queue", "wait for them with wait_any, then submit");
            }
            let timeline = self.timeline(s.signal.timeline)?;
            let before = signals.iter().rev().find(|(t, _)| Arc::ptr_eq(t, &timeline)).map(|(_, value)| *value);
            let before = before.unwrap_or_else(|| timeline.submitted());
            if s.signal.value <= before {
                return self
                    .invalid(format!("a signal of {} after one of {before}; timelines only rise", s.signal.value));
            }
            signals.push((timeline, s.signal.value));
            if let Some(id) = s.commands {
                self.own(id.device, &id)?;
                let used = submissions[..i].iter().any(|earlier| earlier.commands == Some(id));
                if used || lock(&self.commands).get(id.index, id.generation).is_none() {
                    return Err(Error::Stale { handle: format!("{id:?}") });
                }
            }
        }
        for (s, (timeline, value)) in submissions.iter().zip(&signals) {
            let commands = s.commands.and_then(|id| lock(&self.commands).remove(id.index, id.generation));
            if s.commands.is_some() && commands.is_none() {
                return self.invalid("commands were destroyed while they were being submitted");
            }
            self.queue.submit(&turn, commands, timeline, *value)?;
        }
        Ok(())
    }
}
