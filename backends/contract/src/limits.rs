//! Who a device is, and what it can do.
use crate::{DataType, DeviceId, ReduceOp, SharedKind};
use std::time::Duration;

/// Who a device is: for people and for tables, never for decisions.
#[derive(Clone, Debug)]
pub struct Info {
    /// Unique in the process.
    pub id: DeviceId,
    /// The device's own name.
    pub name: String,
    /// Driver and version.
    pub driver: String,
    /// `cpu`, `vulkan`, `proxy-vulkan`, `proxy-gles`, ...
    pub backend: &'static str,
    /// Where it sits, as its driver tells: a PCI address.
    pub address: Option<String>,
}

/// What a device can do.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Whether a submission may wait for a value that nobody has signalled or submitted yet, and whether `signal`
    /// is to be had. False on every wgpu-hal queue, whose submissions are chained by binary semaphores.
    pub gated: bool,
    /// Whether a submission that waits at a gate sees what the host wrote after it was submitted. Where not, what reads
    /// host writes is submitted after them.
    pub gates_see_host_writes: bool,
    /// Whether prepared commands may be submitted again. If not, a submit uses them up.
    pub resubmit: bool,
    /// Whether a submit does the work on the caller's thread (GLES, the host worker).
    pub submit_blocks: bool,
    /// Whether there is [`Memory::Mapped`](crate::Memory).
    pub mapped: bool,
    /// Whether the host reads that memory at full speed: on an integrated device, or one that is the CPU. Over a bus
    /// such reads are a hundred times slower than a copy into host memory.
    pub host_reads_mapped: bool,
    /// Whether device memory is the host's own, at its full speed: then every buffer that was made here can be exported
    /// as [`SharedKind::Host`], exportable or not, and its pages are the buffer's.
    pub unified: bool,
    /// Whether who looks again and again sees an end sooner than who sleeps, and takes no core from the work: not on a
    /// device that is the processor. See [`Spin`](crate::Spin).
    pub polls: bool,
    /// Most sources of one kernel.
    pub max_sources: u32,
    /// Most buffers that one kernel binds, stores and sources together: at least 4.
    pub max_bindings: u32,
    /// Most elements of one kernel store.
    pub max_kernel_elements: u64,
    /// Kernels write whole units of so many bytes: a store's offset and size are multiples of it, and two unordered
    /// writers never share one.
    pub write_granularity: u64,
    /// Offset and size of a copy are multiples of it (4 on wgpu-hal).
    pub copy_granularity: u64,
    /// The longest that one wait may last: it holds a lock that others need. Longer waits repeat it.
    pub longest_wait: Duration,
    /// Forms in which memory can be exported.
    pub memory_export: Vec<SharedKind>,
    /// Forms in which memory can be imported.
    pub memory_import: Vec<SharedKind>,
    /// Whether timelines can be exported.
    pub timeline_export: bool,
    /// Whether timelines can be imported.
    pub timeline_import: bool,
    /// The pairs that it has kernels for.
    pub kernels: Vec<(ReduceOp, DataType)>,
}

impl Limits {
    /// Whether there is a kernel for `op` on `dtype`.
    pub fn reduces(&self, op: ReduceOp, dtype: DataType) -> bool {
        self.kernels.contains(&(op, dtype))
    }
}

/// What a device has been asked to do since it was opened, counted by the device itself.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counters {
    /// Submissions handed to the driver.
    pub submits: u64,
    /// Kernels started.
    pub dispatches: u64,
    /// Copies made.
    pub copies: u64,
    /// Command lists prepared.
    pub prepares: u64,
    /// Bytes of buffers that are alive.
    pub allocated: u64,
    /// Buffers made and imported, where the device counts them.
    pub buffers: u64,
    /// Calls into the driver, where the device counts them.
    pub driver_calls: u64,
}
