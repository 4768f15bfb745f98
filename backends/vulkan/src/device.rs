//! The device: handles and checks in front of memory, recording and the queue.
use crate::{
    doors::Doors,
    gpu::{Gpu, RawHandles},
    instance::{Instance, Physical, Selector},
    memory::{Buffer, is_seen, memory_type},
    queue::{Batch, Queue, lock},
    record::{Commands, Windows, record},
    share,
    timeline::{Origin, Timeline},
};
use allhands_contract::*;
use ash::vk;
use std::{
    any::Any,
    collections::BTreeMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// A VkDevice with one queue: opened here, or an app's.
pub struct VulkanDevice {
    // The tables come before the queue, which waits for what is under way when it is dropped, and all before `gpu`.
    buffers: Mutex<Slab<Arc<Buffer>>>,
    timelines: Mutex<Slab<Arc<Timeline>>>,
    commands: Mutex<Slab<Arc<Commands>>>,
    queue: Queue,
    /// For `read` and `write`, where there is a second one: nothing there waits at a gate.
    side: Option<Queue>,
    /// Of `read` and `write`.
    transfers: Arc<Timeline>,
    gpu: Arc<Gpu>,
    info: Info,
    limits: Limits,
    windows: Windows,
    prepares: AtomicU64,
    watchers: Watchers,
}

/// Bytes that a read or a write stages at a time.
const STAGE: u64 = 16 << 20;
/// How long a read or a write waits for the queue.
const PATIENCE: Duration = Duration::from_secs(60);

impl VulkanDevice {
    /// Opens a device on the physical device that `selector` names. One can be opened any number of times.
    ///
    /// # Errors
    /// [`Error::Open`] says what was wanted, why it could not be had, and what there is.
    pub fn open(selector: &Selector) -> Result<Arc<Self>> {
        Self::open_with(selector, Arc::default())
    }
    /// The same with `doors`, by which a test makes its driver fail.
    pub fn open_with(selector: &Selector, doors: Arc<Doors>) -> Result<Arc<Self>> {
        let instance = Instance::shared().map_err(|what| Error::Open { what })?;
        let physical = instance.select(selector)?;
        Self::over(Gpu::open(instance, physical, doors, None)?)
    }
    /// A device over Vulkan objects that an app owns.
    ///
    /// # Safety
    /// - The handles belong together and are valid; instance, physical device and device are of Vulkan 1.2 or later,
    ///   the feature `timelineSemaphore` is enabled, and so are the extensions listed.
    /// - They stay valid until the device, its siblings and all memory exported from it are dropped: forever, or
    ///   until the owner given is dropped.
    /// - The family computes; whoever else uses the queue holds the lock given.
    pub unsafe fn from_raw(handles: RawHandles) -> Result<Arc<Self>> {
        // SAFETY: by this function's contract.
        Self::over(unsafe { Gpu::from_raw(handles, Arc::default()) }?)
    }

    /// An app's buffer. It is neither destroyed nor waited for: give it back with
    /// [`destroy_buffer`](Device::destroy_buffer) before it is destroyed, after which commands that use it are
    /// refused, whatever took its place since; what was submitted before has to complete first. `owner` is kept while
    /// anything here may use the buffer.
    ///
    /// # Safety
    /// - `buffer` is of this VkDevice, has `size` bytes, is bound to memory, and is made for storage and for transfers both
    ///   ways, for one queue family at a time, which is this device's.
    /// - It is alive until it was given back and what uses it has completed, or until `owner` is dropped.
    pub unsafe fn adopt_buffer(
        &self,
        buffer: vk::Buffer,
        size: u64,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<BufferId> {
        self.gpu.status()?;
        // SAFETY: by this function's contract.
        let buffer = unsafe { Buffer::adopt(&self.gpu, buffer, size, owner) };
        Ok(lock(&self.buffers).insert(self.info.id, buffer))
    }
    /// An app's timeline semaphore, for waits and signals.
    ///
    /// # Safety
    /// - `semaphore` is a timeline semaphore of this VkDevice.
    /// - It is alive until its handle was destroyed here and what names it has completed, or until `owner` is dropped.
    /// - Signals from here and from elsewhere only rise.
    pub unsafe fn adopt_timeline(
        &self,
        semaphore: vk::Semaphore,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<TimelineId> {
        self.gpu.status()?;
        // SAFETY: by this function's contract.
        let timeline = unsafe { Timeline::adopt(&self.gpu, semaphore, owner) }?;
        Ok(lock(&self.timelines).insert(self.info.id, timeline))
    }

    /// The VkBuffer behind a handle, for an app's own commands on this VkDevice.
    pub fn raw_buffer(&self, buffer: BufferId) -> Result<vk::Buffer> {
        Ok(self.buffer(buffer)?.raw)
    }
    /// The VkSemaphore behind a handle, for an app's own submissions on this VkDevice.
    pub fn raw_timeline(&self, timeline: TimelineId) -> Result<vk::Semaphore> {
        Ok(self.timeline(timeline)?.lend())
    }
    /// By which a test makes the driver fail.
    pub fn doors(&self) -> &Arc<Doors> {
        &self.gpu.doors
    }

    fn over(gpu: Arc<Gpu>) -> Result<Arc<Self>> {
        let Physical { name, driver, index, .. } = &gpu.physical;
        for memory in [Memory::Device, Memory::Upload, Memory::Download] {
            if memory_type(&gpu.physical, memory, u32::MAX).is_none() {
                let what = format!("vulkan:{index} ({name}) could not be opened: it has no {memory:?} memory");
                return Err(Error::Open { what });
            }
        }
        let windows = Windows::of(&gpu.physical.limits);
        let limits = Limits {
            gated: true,
            // Seen on an H200: memory that was read earlier in the same submit is read as it was then, whatever the
            // host wrote since, although the list acquires it from the host after the gate.
            gates_see_host_writes: gpu.physical.software(),
            resubmit: true,
            submit_blocks: false,
            mapped: memory_type(&gpu.physical, Memory::Mapped, u32::MAX).is_some(),
            host_reads_mapped: memory_type(&gpu.physical, Memory::Mapped, u32::MAX).is_some_and(|t| {
                let flags = gpu.physical.memory.memory_types[t as usize].property_flags;
                flags.contains(vk::MemoryPropertyFlags::HOST_CACHED)
            }),
            unified: memory_type(&gpu.physical, Memory::Device, u32::MAX)
                .is_some_and(|t| is_seen(&gpu.physical, Memory::Device, t)),
            polls: !gpu.physical.software(),
            max_sources: kernels::SOURCES as u32,
            max_bindings: kernels::BINDINGS as u32,
            max_kernel_elements: windows.elements(),
            write_granularity: 4,
            copy_granularity: 1,
            longest_wait: Duration::MAX,
            memory_export: gpu.caps.exports(),
            memory_import: gpu.caps.imports(),
            timeline_export: gpu.caps.timeline.export,
            timeline_import: gpu.caps.timeline.import,
            kernels: kernels::all(gpu.physical.int64, gpu.physical.float64).collect(),
        };
        let info = Info {
            id: gpu.id,
            name: name.clone(),
            driver: driver.clone(),
            backend: "vulkan",
            address: gpu.physical.pci.clone(),
        };
        Ok(Arc::new(VulkanDevice {
            buffers: Mutex::default(),
            timelines: Mutex::default(),
            commands: Mutex::default(),
            queue: Queue::new(&gpu, gpu.queue())?,
            side: gpu.side().map(|raw| Queue::new(&gpu, raw)).transpose()?,
            transfers: Timeline::new(&gpu, false)?,
            info,
            limits,
            windows,
            prepares: AtomicU64::new(0),
            watchers: Watchers::default(),
            gpu,
        }))
    }

    fn buffer(&self, id: BufferId) -> Result<Arc<Buffer>> {
        self.find(&self.buffers, id.device, id.index, id.generation, &id)
    }
    fn timeline(&self, id: TimelineId) -> Result<Arc<Timeline>> {
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
        if device != self.info.id {
            return Err(Error::Foreign { device: self.info.id, handle: format!("{handle:?}") });
        }
        lock(table).get(index, generation).cloned().ok_or_else(|| Error::Stale { handle: format!("{handle:?}") })
    }
    fn unsupported<T>(&self, what: &'static str, instead: &'static str) -> Result<T> {
        Err(Error::Unsupported { device: self.info.id, what, instead })
    }
    fn within(&self, range: Range, len: usize) -> Result<Arc<Buffer>> {
        let buffer = self.buffer(range.buffer)?;
        if range.offset.checked_add(range.size).is_none_or(|end| end > buffer.size) {
            return Err(Error::OutOfRange { device: self.info.id, range, size: buffer.size });
        }
        if range.size != len as u64 {
            return Err(self.gpu.invalid(format!("a range of {} bytes and a slice of {len}", range.size)));
        }
        Ok(buffer)
    }

    /// Copies between two buffers and waits until it is done.
    fn transfer(&self, src: (&Arc<Buffer>, u64), dst: (&Arc<Buffer>, u64), size: u64) -> Result<()> {
        let [from, to] = [0, 1].map(|index| BufferId { device: self.info.id, index, generation: 0 });
        let (range, target) = (Range::new(from, src.1, size), Range::new(to, dst.1, size));
        let ops = [
            Op::Acquire { range, from: Domain::Host },
            Op::Copy { src: range, dst: target },
            Op::Release { range: target, to: Domain::Host },
        ];
        let buffers = BTreeMap::from([(from, src.0.clone()), (to, dst.0.clone())]);
        let commands = Some(record(&self.gpu, self.windows, buffers, &ops)?);
        let queue = self.side.as_ref().unwrap_or(&self.queue);
        let point = {
            let mut turn = queue.turn();
            let value = self.transfers.submitted() + 1;
            turn.batches.push(Batch { commands, waits: 0, timeline: self.transfers.clone(), value });
            queue.submit(&mut turn)?;
            [(self.transfers.clone(), value)]
        };
        let deadline = Instant::now() + PATIENCE;
        loop {
            match queue.wait_any(&point, queue.wakes(), deadline)? {
                Waited::Reached => return Ok(()),
                Waited::Woken => {}
                Waited::TimedOut => {
                    let what = format!("a copy to or from the host waited {PATIENCE:?} behind work that does not end");
                    return Err(self.gpu.invalid(what));
                }
            }
        }
    }
    fn stage(&self, memory: Memory, size: usize) -> Result<Arc<Buffer>> {
        Buffer::new(&self.gpu, &BufferDesc { size: STAGE.min(size as u64), memory, exportable: false })
    }
    fn invalid_signal<T>(&self, value: u64, before: u64) -> Result<T> {
        Err(self.gpu.invalid(format!("a signal of {value} after one of {before}; timelines only rise")))
    }
    /// What has completed keeps nothing: after the last submission nobody else would notice.
    fn let_go(&self) {
        // A loss is kept, and then the queue keeps what it has.
        let _ = self.queue.retire();
    }
    /// Commands whose buffers are all still to be had.
    fn commands(&self, id: CommandsId) -> Result<Arc<Commands>> {
        let commands = self.find(&self.commands, id.device, id.index, id.generation, &id)?;
        let gone = |b: &&Arc<Buffer>| b.revoked.load(Ordering::Acquire);
        if commands.has_app_buffers && commands.buffers().iter().any(|b| gone(&b)) {
            return Err(Error::Stale { handle: format!("a buffer of {id:?}") });
        }
        Ok(commands)
    }
}

impl Device for VulkanDevice {
    fn info(&self) -> &Info {
        &self.info
    }
    fn limits(&self) -> &Limits {
        &self.limits
    }
    fn counters(&self) -> Counters {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            submits: load(&self.queue.submits),
            dispatches: load(&self.queue.dispatches),
            copies: load(&self.queue.copies),
            prepares: load(&self.prepares),
            allocated: load(&self.gpu.allocated),
            driver_calls: load(&self.gpu.calls),
            ..Counters::default()
        }
    }
    fn status(&self) -> Result<()> {
        self.gpu.status()
    }
    fn sibling(&self) -> Result<Arc<dyn Device>> {
        let (gpu, doors) = (&self.gpu, self.gpu.doors.clone());
        let sibling = Gpu::open(gpu.instance.clone(), gpu.physical.clone(), doors, gpu.owner.clone())?;
        Ok(Self::over(sibling)?)
    }

    fn create_buffer(&self, desc: &BufferDesc) -> Result<BufferId> {
        self.gpu.status()?;
        if desc.size == 0 {
            return Err(self.gpu.invalid("a buffer of no bytes; make it at least one"));
        }
        if desc.memory == Memory::Mapped && !self.limits.mapped {
            return self.unsupported("device-local memory that the host sees", "use Device with Upload and Download");
        }
        if desc.memory == Memory::Device && desc.exportable && self.gpu.caps.export_types.is_empty() {
            return self.unsupported("export of device memory", "use Upload, Download or Mapped");
        }
        self.queue.retire()?; // what it frees may be what is needed
        let buffer = Buffer::new(&self.gpu, desc)?;
        Ok(lock(&self.buffers).insert(self.info.id, buffer))
    }
    fn destroy_buffer(&self, id: BufferId) {
        if id.device == self.info.id {
            let gone = lock(&self.buffers).remove(id.index, id.generation);
            gone.iter().filter(|b| b.is_app()).for_each(|b| b.revoked.store(true, Ordering::Release));
            if gone.is_some() {
                self.watchers.destroyed(id);
            }
            drop(gone);
            self.let_go();
        }
    }
    fn watch(&self, watcher: Weak<dyn Watch>) {
        self.watchers.add(watcher);
    }
    fn size(&self, buffer: BufferId) -> Result<u64> {
        Ok(self.buffer(buffer)?.size)
    }
    fn read(&self, from: Range, to: &mut [u8]) -> Result<()> {
        self.gpu.status()?;
        let buffer = self.within(from, to.len())?;
        if to.is_empty() || buffer.load(from.offset, to) {
            return Ok(());
        }
        let stage = self.stage(Memory::Download, to.len())?;
        for (piece, i) in to.chunks_mut(STAGE as usize).zip(0..) {
            self.transfer((&buffer, from.offset + i * STAGE), (&stage, 0), piece.len() as u64)?;
            stage.load(0, piece);
        }
        Ok(())
    }
    fn write(&self, to: Range, from: &[u8]) -> Result<()> {
        self.gpu.status()?;
        let buffer = self.within(to, from.len())?;
        if from.is_empty() || buffer.store(to.offset, from) {
            return Ok(());
        }
        let stage = self.stage(Memory::Upload, from.len())?;
        for (piece, i) in from.chunks(STAGE as usize).zip(0..) {
            stage.store(0, piece);
            self.transfer((&stage, 0), (&buffer, to.offset + i * STAGE), piece.len() as u64)?;
        }
        Ok(())
    }
    fn export(&self, id: BufferId, kind: SharedKind) -> Result<SharedMemory> {
        self.gpu.status()?;
        let buffer = self.buffer(id)?;
        if !self.limits.memory_export.contains(&kind) {
            return self.unsupported("export of memory in this form", "see its limits for the forms it has");
        }
        let own = kind == SharedKind::Host && self.limits.unified;
        if !buffer.exportable && !own {
            return Err(self.gpu.invalid(format!("{id:?} was not made exportable; ask for that when it is made")));
        }
        share::export(&buffer, kind)
    }
    fn import(&self, memory: &SharedMemory) -> Result<BufferId> {
        self.gpu.status()?;
        if !self.limits.memory_import.contains(&memory.kind()) {
            return self.unsupported("import of memory in this form", "see its limits for the forms it has");
        }
        self.queue.retire()?;
        let buffer = share::import(&self.gpu, memory)?;
        Ok(lock(&self.buffers).insert(self.info.id, buffer))
    }

    fn create_timeline(&self, shareable: bool) -> Result<TimelineId> {
        self.gpu.status()?;
        if shareable && !self.limits.timeline_export {
            return self.unsupported("timelines that can be exported", "make a plain one and let the host relay");
        }
        let timeline = Timeline::new(&self.gpu, shareable)?;
        Ok(lock(&self.timelines).insert(self.info.id, timeline))
    }
    fn destroy_timeline(&self, id: TimelineId) {
        if id.device == self.info.id {
            let gone = lock(&self.timelines).remove(id.index, id.generation);
            drop(gone);
            self.let_go();
        }
    }
    fn export_timeline(&self, id: TimelineId) -> Result<SharedTimeline> {
        self.gpu.status()?;
        let timeline = self.timeline(id)?;
        if !self.limits.timeline_export {
            return self.unsupported("timelines that can be exported", "let the host relay");
        }
        match timeline.origin {
            Origin::Ours { shareable: true } => timeline.export(),
            _ => Err(self.gpu.invalid(format!("{id:?} was not made shareable; ask for that when it is made"))),
        }
    }
    fn import_timeline(&self, timeline: &SharedTimeline) -> Result<TimelineId> {
        self.gpu.status()?;
        if !self.limits.timeline_import {
            return self.unsupported("import of timelines", "let the host relay");
        }
        let timeline = Timeline::import(&self.gpu, timeline)?;
        Ok(lock(&self.timelines).insert(self.info.id, timeline))
    }
    fn value(&self, timeline: TimelineId) -> Result<u64> {
        self.gpu.status()?;
        let value = self.timeline(timeline)?.value()?;
        self.queue.retire()?;
        Ok(value)
    }
    fn signal(&self, point: Point) -> Result<()> {
        self.gpu.status()?;
        self.timeline(point.timeline)?.signal(point.value)?;
        self.queue.stir();
        Ok(())
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
            let size = buffer.size;
            buffers.insert(id, buffer);
            Ok(size)
        })?;
        let commands = record(&self.gpu, self.windows, buffers, ops)?;
        self.prepares.fetch_add(1, Ordering::Relaxed);
        Ok(lock(&self.commands).insert(self.info.id, commands))
    }
    fn destroy_commands(&self, id: CommandsId) {
        if id.device == self.info.id {
            let gone = lock(&self.commands).remove(id.index, id.generation);
            drop(gone);
        }
    }
    fn submit(&self, submissions: &[Submission<'_>]) -> Result<()> {
        self.gpu.status()?;
        self.queue.retire()?;
        let mut turn = self.queue.turn();
        // Everything is checked before anything is submitted.
        for s in submissions {
            let timeline = self.timeline(s.signal.timeline)?;
            timeline.check_ours()?;
            let earlier = turn.batches.iter().rev().find(|b| Arc::ptr_eq(&b.timeline, &timeline)).map(|b| b.value);
            let before = earlier.unwrap_or_else(|| timeline.submitted());
            if s.signal.value <= before {
                return self.invalid_signal(s.signal.value, before);
            }
            for wait in s.waits {
                let timeline = self.timeline(wait.timeline)?;
                turn.waits.push((timeline, wait.value));
            }
            let commands = s.commands.map(|id| self.commands(id)).transpose()?;
            turn.batches.push(Batch { commands, waits: s.waits.len(), timeline, value: s.signal.value });
        }
        self.queue.submit(&mut turn)
    }
}
