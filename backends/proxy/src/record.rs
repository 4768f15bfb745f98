//! A list of operations into a command buffer.
//!
//! hal's barriers are of whole buffers and name usages. What a group of operations did to a buffer is kept, and an
//! [`Op::Barrier`], or the list's end, orders that ahead of every use. Barriers that stand
//! together are issued as one.
use crate::{
    api::ProxyApi,
    gpu::Gpu,
    memory::{Buffer, device_uses},
    queue::{Commands, Queue},
};
use allhands_contract::{BufferId, Error, Kernel, Memory, Op, Range, Result, kernels};
use std::{collections::BTreeMap, num::NonZeroU64, sync::Arc};
use wgpu_hal::{self as hal, CommandEncoder as _, Device as _};
use wgpu_types::BufferUses;

/// How storage buffers may be bound.
#[derive(Clone, Copy)]
pub(crate) struct Windows {
    /// What an offset is a multiple of.
    pub alignment: u64,
    /// Most bytes.
    pub size: u64,
    /// Most workgroups of a dispatch.
    pub workgroups: u32,
}

/// Records `ops`, which [`check_ops`](allhands_contract::check_ops) has passed. `buffers` has every buffer they name.
pub(crate) fn record<A: ProxyApi>(
    queue: &Queue<A>,
    gpu: &Arc<Gpu<A>>,
    windows: Windows,
    buffers: BTreeMap<BufferId, Arc<Buffer<A>>>,
    ops: &[Op],
) -> Result<Commands<A>> {
    let mut encoder = queue.encoder()?;
    // SAFETY: encoders of the pool and new ones are closed.
    gpu.call(0, || unsafe { encoder.begin_encoding(None) })?;
    let mut recorder = Recorder {
        gpu,
        windows,
        buffers,
        commands: Commands {
            gpu: gpu.clone(),
            recorded: None,
            groups: Vec::new(),
            _buffers: Vec::new(),
            dispatches: 0,
            copies: 0,
        },
        touched: BTreeMap::new(),
        together: Vec::new(),
        barriers: BTreeMap::new(),
        encoder: &mut encoder,
        in_pass: false,
    };
    let done = ops.iter().try_for_each(|op| recorder.op(op)).and_then(|()| recorder.finish());
    let Recorder { mut commands, buffers, .. } = recorder;
    match done {
        Ok(buffer) => {
            commands.recorded = Some((encoder, buffer));
            commands._buffers = buffers.into_values().collect();
            Ok(commands)
        }
        Err(why) => {
            let done = gpu.destroy(|device| {
                // SAFETY: the encoder is recording, and will not be submitted; so nothing uses the groups.
                unsafe {
                    encoder.discard_encoding();
                    commands.groups.drain(..).for_each(|g| device.destroy_bind_group(g));
                }
            });
            match done {
                true => queue.give_back(encoder),
                false => std::mem::forget(encoder), // hal is not called any more
            }
            Err(why)
        }
    }
}

struct Recorder<'a, A: ProxyApi> {
    gpu: &'a Arc<Gpu<A>>,
    windows: Windows,
    buffers: BTreeMap<BufferId, Arc<Buffer<A>>>,
    commands: Commands<A>,
    /// What was done since the last barrier.
    touched: BTreeMap<BufferId, BufferUses>,
    /// The ranges used since then, windows as a whole, and whether they are written.
    together: Vec<(Range, bool)>,
    /// Barriers not issued yet: from, to.
    barriers: BTreeMap<BufferId, (BufferUses, BufferUses)>,
    encoder: &'a mut A::CommandEncoder,
    in_pass: bool,
}

/// Whatever a device does with memory: more than some buffers allow, but the memory may be another's next.
const DEVICE: BufferUses = BufferUses::COPY_SRC.union(BufferUses::COPY_DST).union(BufferUses::STORAGE_READ_WRITE);
/// Whatever the host does with it.
const HOST: BufferUses = BufferUses::MAP_READ.union(BufferUses::MAP_WRITE);

impl<A: ProxyApi> Recorder<'_, A> {
    fn op(&mut self, op: &Op) -> Result<()> {
        match op {
            Op::Acquire { range, .. } => {
                self.barrier(range.buffer, HOST, DEVICE);
                Ok(())
            }
            Op::Release { range, .. } => {
                self.barrier(range.buffer, DEVICE, HOST);
                Ok(())
            }
            Op::Barrier => {
                self.full_barrier();
                Ok(())
            }
            Op::Copy { src, dst } => self.copy(src, dst),
            Op::Kernel(kernel) => self.kernel(kernel),
        }
    }

    /// Ends the list with a barrier: hal orders submissions, but what one wrote it makes visible to the next only
    /// where a barrier says so.
    fn finish(&mut self) -> Result<A::CommandBuffer> {
        self.full_barrier();
        self.flush()?;
        self.leave_pass()?;
        // SAFETY: the encoder is recording and no pass is open.
        self.gpu.call(0, || unsafe { self.encoder.end_encoding() })
    }

    /// What was done so far, ahead of whatever comes.
    fn full_barrier(&mut self) {
        self.together.clear();
        for (buffer, done) in std::mem::take(&mut self.touched) {
            self.barrier(buffer, done, DEVICE | A::BEFORE_COPIES);
        }
    }
    fn memory(&self, range: &Range) -> Memory {
        self.buffers[&range.buffer].desc().memory
    }
    fn barrier(&mut self, buffer: BufferId, from: BufferUses, to: BufferUses) {
        let both = self.barriers.entry(buffer).or_insert((BufferUses::empty(), BufferUses::empty()));
        both.0 |= from;
        both.1 |= to;
    }
    fn touch(&mut self, range: &Range, uses: BufferUses) -> Result<()> {
        let memory = self.memory(range);
        if !device_uses(memory).contains(uses) {
            let what = format!("{memory:?} memory is not for {uses:?}: {range:?}");
            return Err(Error::Invalid { device: self.gpu.id, what });
        }
        *self.touched.entry(range.buffer).or_insert(BufferUses::empty()) |= uses;
        Ok(())
    }

    /// Issues the barriers that wait.
    fn flush(&mut self) -> Result<()> {
        let waiting = std::mem::take(&mut self.barriers);
        if waiting.is_empty() {
            return Ok(());
        }
        let barriers = waiting.iter().map(|(buffer, (from, to))| hal::BufferBarrier {
            buffer: self.buffers[buffer].raw(),
            usage: hal::StateTransition { from: *from, to: *to },
        });
        // SAFETY: the encoder is recording, and the commands keep the buffers alive.
        self.gpu.guard(|| unsafe { self.encoder.transition_buffers(barriers) })
    }

    fn enter_pass(&mut self) -> Result<()> {
        if !std::mem::replace(&mut self.in_pass, true) {
            let desc = hal::ComputePassDescriptor { label: None, timestamp_writes: None };
            // SAFETY: the encoder is recording and no pass is open.
            self.gpu.guard(|| unsafe { self.encoder.begin_compute_pass(&desc) })?;
        }
        Ok(())
    }
    fn leave_pass(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.in_pass, false) {
            // SAFETY: a pass is open.
            self.gpu.guard(|| unsafe { self.encoder.end_compute_pass() })?;
        }
        Ok(())
    }

    /// A kernel's window may span bytes that another operation of the same group writes. To the device, and to
    /// validation, a kernel uses its whole windows: where they meet what another uses, the two are put in order.
    fn keep_apart(&mut self, accesses: &[(Range, bool)]) {
        let meets = |(a, a_written): &(Range, bool), (b, b_written): &(Range, bool)| {
            (*a_written || *b_written) && a.overlaps(b)
        };
        if accesses.iter().any(|a| self.together.iter().any(|b| meets(a, b))) {
            self.full_barrier();
        }
        self.together.extend(accesses);
    }

    fn copy(&mut self, src: &Range, dst: &Range) -> Result<()> {
        self.keep_apart(&[(*src, false), (*dst, true)]);
        self.touch(src, BufferUses::COPY_SRC)?;
        self.touch(dst, BufferUses::COPY_DST)?;
        let Some(size) = NonZeroU64::new(src.size) else { return Ok(()) };
        self.flush()?;
        self.leave_pass()?;
        let region = hal::BufferCopy { src_offset: src.offset, dst_offset: dst.offset, size };
        let (src, dst) = (self.buffers[&src.buffer].raw(), self.buffers[&dst.buffer].raw());
        // SAFETY: the encoder records outside of a pass; both ranges are inside their buffers, do not overlap, and
        // are of memory that may be copied this way.
        self.gpu.guard(|| unsafe { self.encoder.copy_buffer_to_buffer(src, dst, std::iter::once(region)) })?;
        self.commands.copies += 1;
        Ok(())
    }

    fn kernel(&mut self, k: &Kernel) -> Result<()> {
        let (stores, rest) = k.stores.split_at(k.stores.len().min(kernels::STORES));
        let bound = self.bind(stores, &k.sources)?;
        let written = |window: &Range| (*window, stores.iter().any(|store| store.overlaps(window)));
        self.keep_apart(&bound.0.iter().map(written).collect::<Vec<_>>());
        for range in k.stores.iter().chain(&k.sources) {
            self.touch(range, BufferUses::STORAGE_READ_WRITE)?;
        }
        if k.elements() == 0 {
            return Ok(());
        }
        let (shape, params) = kernels::dispatch(k, self.windows.workgroups, |range| bound.place(range));
        let pipeline = self.gpu.pipelines.get(self.gpu, k.op, k.dtype, shape)?;
        let workgroups = kernels::workgroups(&params, self.windows.workgroups);
        let group = self.group(&bound)?;
        self.flush()?;
        self.enter_pass()?;
        let layout = self.gpu.pipelines.layout();
        // SAFETY: a pass is open; pipeline, layout and group fit each other and live as long as the commands; the
        // immediates are the layout's; the workgroups are within the adapter's limit.
        self.gpu.guard(|| unsafe {
            self.encoder.set_compute_pipeline(&pipeline);
            self.encoder.set_bind_group(layout, 0, &group, &[]);
            self.encoder.set_immediates(layout, 0, bytemuck::cast_slice(std::slice::from_ref(&params)));
            self.encoder.dispatch_workgroups([workgroups, 1, 1]);
        })?;
        self.commands.groups.push(group);
        self.commands.dispatches += 1;
        if !rest.is_empty() {
            for store in rest {
                let alike = stores.iter().find(|s| s.size == store.size).ok_or_else(|| {
                    let what = "a narrow store, or a wide one, beyond the first four and none alike among them".into();
                    Error::Invalid { device: self.gpu.id, what }
                })?;
                self.barrier(alike.buffer, BufferUses::STORAGE_READ_WRITE, DEVICE | A::BEFORE_COPIES);
                self.copy(alike, store)?;
            }
        }
        Ok(())
    }

    /// Covers the ranges with as few windows as hold them.
    fn bind(&self, stores: &[Range], sources: &[Range]) -> Result<Bound> {
        let Windows { alignment, size, .. } = self.windows;
        let mut ranges: Vec<&Range> = stores.iter().chain(sources).collect();
        ranges.sort_by_key(|r| (r.buffer, r.offset));
        let mut windows: Vec<Range> = Vec::new();
        for range in ranges {
            match windows.last_mut() {
                Some(last) if last.buffer == range.buffer && range.end() - last.offset <= size => {
                    last.size = last.size.max(range.end() - last.offset);
                }
                _ => {
                    let offset = range.offset - range.offset % alignment;
                    windows.push(Range::new(range.buffer, offset, range.end() - offset));
                }
            }
        }
        // In the order of first use, whatever the buffers are: so that kernels of one shape are one pipeline.
        let first = |w: &Range| {
            sources
                .iter()
                .chain(stores)
                .position(|r| w.buffer == r.buffer && w.offset <= r.offset && r.end() <= w.end())
        };
        windows.sort_by_key(first);
        if windows.len() > kernels::BINDINGS {
            let what = format!(
                "the ranges of one kernel take {} windows of at most {size} bytes; at most {} are bound",
                windows.len(),
                kernels::BINDINGS
            );
            return Err(Error::Invalid { device: self.gpu.id, what });
        }
        Ok(Bound(windows))
    }

    fn group(&self, bound: &Bound) -> Result<A::BindGroup> {
        // A binding that the kernel does not use takes the first window again.
        let binding = |i: usize| {
            let window = bound.0.get(i).unwrap_or(&bound.0[0]);
            hal::BufferBinding::new_unchecked(
                self.buffers[&window.buffer].raw(),
                window.offset,
                NonZeroU64::new(window.size),
            )
        };
        let buffers: [_; kernels::BINDINGS] = std::array::from_fn(binding);
        let entries: [_; kernels::BINDINGS] =
            std::array::from_fn(|i| hal::BindGroupEntry { binding: i as u32, resource_index: i as u32, count: 1 });
        let desc = hal::BindGroupDescriptor {
            label: None,
            layout: self.gpu.pipelines.bindings(),
            buffers: &buffers,
            samplers: &[],
            textures: &[],
            entries: &entries,
            acceleration_structures: &[],
            external_textures: &[],
        };
        // SAFETY: the entries are the layout's; each window is inside its buffer, starts where the adapter wants it,
        // is no larger than it allows, and is not empty.
        self.gpu.call(0, || unsafe { self.gpu.device().create_bind_group(&desc) })
    }
}

/// The windows that a kernel binds, in the order of the bindings.
struct Bound(Vec<Range>);

impl Bound {
    /// The binding that has a range, and the range's first word in it.
    fn place(&self, range: &Range) -> (u8, u32) {
        let holds = |w: &Range| w.buffer == range.buffer && w.offset <= range.offset && range.end() <= w.end();
        let binding = self.0.iter().position(holds).expect("every range was covered");
        (binding as u8, ((range.offset - self.0[binding].offset) / 4) as u32)
    }
}
