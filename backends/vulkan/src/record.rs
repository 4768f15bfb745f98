//! A list of operations into a command buffer, recorded once and submitted as often as wanted.
//!
//! Barriers that stand together are issued as one, before the next thing that does work. A list begins with a full
//! one: the queue starts submissions in order, and only a barrier has one see what those before it wrote.
//!
//! What another device touches as a file descriptor belongs to one owner at a time, so an acquire takes it from the
//! foreign queue family and a release gives it back. Host pages change no owner: for them, as for the host itself,
//! writes are made visible to and from the host, also where the host writes after the submit, at a gate.
use crate::{gpu::Gpu, memory::Buffer, queue::lock};
use allhands_contract::{BufferId, Domain, Kernel, Memory, Op, Range, Result, kernels};
use ash::vk::{self, AccessFlags as Access, PipelineStageFlags as Stage};
use std::{collections::BTreeMap, sync::Arc};

/// Recorded commands and all that they use.
pub(crate) struct Commands {
    gpu: Arc<Gpu>,
    pub raw: vk::CommandBuffer,
    /// The sets of the kernels; null without any.
    sets: vk::DescriptorPool,
    buffers: Vec<Arc<Buffer>>,
    /// Whether some of the buffers are an app's.
    pub has_app_buffers: bool,
    pub dispatches: u64,
    pub copies: u64,
}

impl Commands {
    /// What they use.
    pub fn buffers(&self) -> &[Arc<Buffer>] {
        &self.buffers
    }
}

impl Drop for Commands {
    fn drop(&mut self) {
        if self.gpu.is_abandoned() {
            return;
        }
        let pool = lock(&self.gpu.pool);
        // SAFETY: submissions of the commands own them until they have completed; the pool is locked.
        unsafe {
            self.gpu.vk().free_command_buffers(*pool, &[self.raw]);
            self.gpu.vk().destroy_descriptor_pool(self.sets, None);
        }
    }
}

/// Most workgroups of a dispatch; each invocation takes more than one element instead. A few hundred fill any device,
/// and fewer are better where they read memory of the host.
const WORKGROUPS: u32 = 1024;
/// Most turns that an invocation takes at loops: some software drivers end them, without a word, after 65,535 in all.
const TURNS: u64 = 32_768 / (1 + kernels::ACCESSES) as u64;
const WORD: u64 = 4;

/// How storage buffers may be bound, and how large a dispatch may be.
#[derive(Clone, Copy)]
pub(crate) struct Windows {
    /// What an offset is a multiple of.
    alignment: u64,
    /// Most bytes.
    size: u64,
    workgroups: u32,
}

impl Windows {
    pub fn of(limits: &vk::PhysicalDeviceLimits) -> Self {
        Windows {
            alignment: limits.min_storage_buffer_offset_alignment.max(WORD),
            size: u64::from(limits.max_storage_buffer_range) / WORD * WORD,
            workgroups: limits.max_compute_work_group_count[0].min(WORKGROUPS),
        }
    }
    /// Most elements of a kernel.
    pub fn elements(&self) -> u64 {
        let invocations = u64::from(self.workgroups) * u64::from(kernels::WORKGROUP);
        // Of the widest type, so that a range of any fits a window.
        ((self.size - self.alignment) / 8).min(invocations * TURNS)
    }
}

/// Records `ops`, which [`check_ops`](allhands_contract::check_ops) has passed. `buffers` has every buffer they name.
pub(crate) fn record(
    gpu: &Arc<Gpu>,
    windows: Windows,
    buffers: BTreeMap<BufferId, Arc<Buffer>>,
    ops: &[Op],
) -> Result<Arc<Commands>> {
    let kernels = ops.iter().filter(|op| matches!(op, Op::Kernel(_))).count() as u32;
    let pool = lock(&gpu.pool);
    let info = vk::CommandBufferAllocateInfo::default().command_pool(*pool).command_buffer_count(1);
    // SAFETY: the pool is this device's, and locked here until the recording has ended.
    let raw = gpu.check("prepare commands", 0, unsafe { gpu.vk().allocate_command_buffers(&info) })?[0];
    let commands = Commands {
        gpu: gpu.clone(),
        raw,
        sets: vk::DescriptorPool::null(),
        has_app_buffers: buffers.values().any(|b| b.is_app()),
        buffers: Vec::new(),
        dispatches: 0,
        copies: 0,
    };
    let mut recorder = Recorder { gpu, windows, buffers, commands, barrier: Barrier::default(), together: Vec::new() };
    let done = recorder.all(ops, kernels);
    drop(pool); // which an unfinished list takes when it is dropped
    done?;
    let Recorder { mut commands, buffers, .. } = recorder;
    commands.buffers = buffers.into_values().collect();
    Ok(Arc::new(commands))
}

fn holds(window: &Range, range: &Range) -> bool {
    window.buffer == range.buffer && window.offset <= range.offset && range.end() <= window.end()
}

/// Barriers not issued yet.
#[derive(Default)]
struct Barrier {
    from: Stage,
    to: Stage,
    written: Access,
    used: Access,
    transfers: Vec<vk::BufferMemoryBarrier<'static>>,
}

struct Recorder<'a> {
    gpu: &'a Arc<Gpu>,
    windows: Windows,
    buffers: BTreeMap<BufferId, Arc<Buffer>>,
    commands: Commands,
    barrier: Barrier,
    /// What was used since the last full barrier, and whether it was written.
    together: Vec<(Range, bool)>,
}

/// What our own operations are.
const WORK: Stage = Stage::from_raw(Stage::COMPUTE_SHADER.as_raw() | Stage::TRANSFER.as_raw());
const WRITES: Access = Access::from_raw(Access::SHADER_WRITE.as_raw() | Access::TRANSFER_WRITE.as_raw());
const USES: Access = Access::from_raw(WRITES.as_raw() | Access::SHADER_READ.as_raw() | Access::TRANSFER_READ.as_raw());

impl Recorder<'_> {
    fn all(&mut self, ops: &[Op], kernels: u32) -> Result<()> {
        let gpu = self.gpu;
        if kernels > 0 {
            let sizes = [vk::DescriptorPoolSize::default()
                .ty(vk::DescriptorType::STORAGE_BUFFER)
                .descriptor_count(kernels * kernels::BINDINGS as u32)];
            let info = vk::DescriptorPoolCreateInfo::default().max_sets(kernels).pool_sizes(&sizes);
            // SAFETY: neither count is zero.
            let pool = unsafe { gpu.vk().create_descriptor_pool(&info, None) };
            self.commands.sets = gpu.check("prepare commands", 0, pool)?;
        }
        let info = vk::CommandBufferBeginInfo::default().flags(vk::CommandBufferUsageFlags::SIMULTANEOUS_USE);
        // SAFETY: the command buffer is new, and its pool is locked.
        let begun = unsafe { gpu.vk().begin_command_buffer(self.commands.raw, &info) };
        gpu.check("prepare commands", 0, begun)?;
        self.order(
            Stage::ALL_COMMANDS,
            Access::MEMORY_WRITE,
            Stage::ALL_COMMANDS,
            Access::MEMORY_READ | Access::MEMORY_WRITE,
        );
        ops.iter().try_for_each(|op| self.op(op))?;
        self.flush();
        // SAFETY: the command buffer is recording.
        let ended = unsafe { gpu.vk().end_command_buffer(self.commands.raw) };
        gpu.check("prepare commands", 0, ended)
    }

    fn op(&mut self, op: &Op) -> Result<()> {
        match op {
            Op::Acquire { range, from } => self.cross(range, *from, true),
            Op::Release { range, to } => self.cross(range, *to, false),
            Op::Barrier => self.separate(),
            Op::Copy { src, dst } => self.copy(src, dst)?,
            Op::Kernel(kernel) => self.kernel(kernel)?,
        }
        Ok(())
    }

    /// To the device, and to validation, a kernel uses the whole of its windows. Where these meet what an independent
    /// operation uses, the two are put in order after all.
    fn keep_apart(&mut self, accesses: &[(Range, bool)]) {
        let meets = |(a, a_written): &(Range, bool), (b, b_written): &(Range, bool)| {
            (*a_written || *b_written) && a.overlaps(b)
        };
        if accesses.iter().any(|a| self.together.iter().any(|b| meets(a, b))) {
            self.separate();
        }
        self.together.extend(accesses);
    }
    fn separate(&mut self) {
        self.together.clear();
        self.order(WORK, WRITES, WORK, USES);
    }

    fn order(&mut self, from: Stage, written: Access, to: Stage, used: Access) {
        let b = &mut self.barrier;
        (b.from, b.written, b.to, b.used) = (b.from | from, b.written | written, b.to | to, b.used | used);
    }

    fn cross(&mut self, range: &Range, domain: Domain, acquire: bool) {
        let buffer = &self.buffers[&range.buffer];
        if domain == Domain::Host || !buffer.crosses() {
            return match acquire {
                // After the waits of the submission too, not only after the host: where the list was submitted before
                // the host wrote, it is the wait at a gate that says when.
                true => self.order(Stage::HOST | Stage::ALL_COMMANDS, Access::HOST_WRITE, WORK, USES),
                false => self.order(WORK, WRITES, Stage::HOST, Access::HOST_READ | Access::HOST_WRITE),
            };
        }
        if range.size == 0 {
            return;
        }
        let theirs = match domain == Domain::Foreign && self.gpu.caps.foreign {
            true => vk::QUEUE_FAMILY_FOREIGN_EXT,
            false => vk::QUEUE_FAMILY_EXTERNAL,
        };
        let (from, to) = if acquire { (theirs, self.gpu.family) } else { (self.gpu.family, theirs) };
        let (written, used) = if acquire { (Access::empty(), USES) } else { (WRITES, Access::empty()) };
        self.barrier.transfers.push(
            vk::BufferMemoryBarrier::default()
                .src_access_mask(written)
                .dst_access_mask(used)
                .src_queue_family_index(from)
                .dst_queue_family_index(to)
                .buffer(buffer.raw)
                .offset(range.offset)
                .size(range.size),
        );
        self.order(Stage::ALL_COMMANDS, Access::empty(), Stage::ALL_COMMANDS, Access::empty());
    }

    /// Issues the barriers that wait.
    fn flush(&mut self) {
        let Barrier { from, to, written, used, transfers } = std::mem::take(&mut self.barrier);
        if from.is_empty() {
            return;
        }
        let all = [vk::MemoryBarrier::default().src_access_mask(written).dst_access_mask(used)];
        // SAFETY: the command buffer is recording; the commands keep the buffers alive.
        unsafe {
            let (raw, none) = (self.commands.raw, vk::DependencyFlags::empty());
            self.gpu.vk().cmd_pipeline_barrier(raw, from, to, none, &all, &transfers, &[]);
        }
    }

    fn refuse<T>(&self, range: &Range, use_: &str) -> Result<T> {
        let memory = self.buffers[&range.buffer].memory;
        Err(self.gpu.invalid(format!("{memory:?} memory is not for {use_}: {range:?}")))
    }

    fn copy(&mut self, src: &Range, dst: &Range) -> Result<()> {
        let memory = |range: &Range| self.buffers[&range.buffer].memory;
        if memory(src) == Memory::Download {
            return self.refuse(src, "copies out of it");
        }
        if memory(dst) == Memory::Upload {
            return self.refuse(dst, "copies into it");
        }
        if src.size == 0 {
            return Ok(());
        }
        self.keep_apart(&[(*src, false), (*dst, true)]);
        self.flush();
        let regions = [vk::BufferCopy { src_offset: src.offset, dst_offset: dst.offset, size: src.size }];
        let (src, dst) = (self.buffers[&src.buffer].raw, self.buffers[&dst.buffer].raw);
        // SAFETY: the command buffer is recording; both ranges are inside their buffers and do not overlap.
        unsafe { self.gpu.vk().cmd_copy_buffer(self.commands.raw, src, dst, &regions) };
        self.commands.copies += 1;
        Ok(())
    }

    fn kernel(&mut self, k: &Kernel) -> Result<()> {
        for range in k.stores.iter().chain(&k.sources) {
            if matches!(self.buffers[&range.buffer].memory, Memory::Upload | Memory::Download) {
                return self.refuse(range, "kernels");
            }
        }
        // More stores than a kernel takes are copies of the first.
        let (stores, rest) = k.stores.split_at(k.stores.len().min(kernels::STORES));
        if k.elements() == 0 {
            return Ok(());
        }
        let bound = self.cover(stores, &k.sources)?;
        let place = |range: &Range| {
            let binding = bound.iter().position(|w| holds(w, range)).expect("every range was covered");
            (binding as u8, ((range.offset - bound[binding].offset) / WORD) as u32)
        };
        let (shape, params) = kernels::dispatch(k, self.windows.workgroups, place);
        let workgroups = kernels::workgroups(&params, self.windows.workgroups);
        let pipeline = self.gpu.pipelines.get(self.gpu, k.op, k.dtype, shape)?;
        let written = |w: &Range| stores.iter().any(|s| holds(w, s));
        self.keep_apart(&bound.iter().map(|w| (*w, written(w))).collect::<Vec<_>>());
        let set = self.set(&bound)?;
        self.flush();
        let (gpu, raw) = (self.gpu, self.commands.raw);
        let (layout, stage) = (gpu.pipelines.layout, vk::ShaderStageFlags::COMPUTE);
        // SAFETY: the command buffer is recording; pipeline, layout and set fit each other and live as long as the
        // commands; the constants are the layout's; the workgroups are within the device's limit.
        unsafe {
            gpu.vk().cmd_bind_pipeline(raw, vk::PipelineBindPoint::COMPUTE, pipeline);
            gpu.vk().cmd_bind_descriptor_sets(raw, vk::PipelineBindPoint::COMPUTE, layout, 0, &[set], &[]);
            gpu.vk().cmd_push_constants(raw, layout, stage, 0, bytemuck::bytes_of(&params));
            gpu.vk().cmd_dispatch(raw, workgroups, 1, 1);
        }
        self.commands.dispatches += 1;
        for store in rest {
            let Some(alike) = stores.iter().find(|s| s.size == store.size) else {
                return Err(self
                    .gpu
                    .invalid("a narrow store, or a wide one, beyond the first four and none alike among them"));
            };
            self.copy(alike, store)?;
        }
        Ok(())
    }

    /// As few windows as hold all ranges, in the order of first use, so that kernels of one shape are one pipeline.
    fn cover(&self, stores: &[Range], sources: &[Range]) -> Result<Vec<Range>> {
        let Windows { alignment, size, .. } = self.windows;
        let mut sorted: Vec<&Range> = stores.iter().chain(sources).collect();
        sorted.sort_by_key(|r| (r.buffer, r.offset));
        let mut windows: Vec<Range> = Vec::new();
        for range in sorted {
            match windows.last_mut() {
                Some(last) if last.buffer == range.buffer && range.end() - last.offset <= size => {
                    last.size = last.size.max(range.end() - last.offset);
                }
                _ => {
                    let offset = range.offset / alignment * alignment;
                    windows.push(Range::new(range.buffer, offset, range.end() - offset));
                }
            }
        }
        windows.sort_by_key(|w| sources.iter().chain(stores).position(|r| holds(w, r)));
        if windows.len() > kernels::BINDINGS {
            return Err(self.gpu.invalid(format!(
                "the ranges of one kernel take {} windows of at most {size} bytes; at most {} are bound",
                windows.len(),
                kernels::BINDINGS
            )));
        }
        Ok(windows)
    }

    fn set(&self, bound: &[Range]) -> Result<vk::DescriptorSet> {
        let gpu = self.gpu;
        let layouts = [gpu.pipelines.bindings];
        let info = vk::DescriptorSetAllocateInfo::default().descriptor_pool(self.commands.sets).set_layouts(&layouts);
        // SAFETY: the pool has room for a set of every kernel in the list.
        let set = gpu.check("prepare commands", 0, unsafe { gpu.vk().allocate_descriptor_sets(&info) })?[0];
        // A binding that the kernel does not use takes the first window again.
        let infos: [_; kernels::BINDINGS] = std::array::from_fn(|i| {
            let window = bound.get(i).unwrap_or(&bound[0]);
            [vk::DescriptorBufferInfo {
                buffer: self.buffers[&window.buffer].raw,
                offset: window.offset,
                range: window.size,
            }]
        });
        let writes: [_; kernels::BINDINGS] = std::array::from_fn(|i| {
            vk::WriteDescriptorSet::default()
                .dst_set(set)
                .dst_binding(i as u32)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .buffer_info(&infos[i])
        });
        // SAFETY: each window is inside its buffer, starts where the device wants it, is no larger than it allows,
        // and is not empty; the set is not in use.
        unsafe { gpu.vk().update_descriptor_sets(&writes, &[]) };
        Ok(set)
    }
}
