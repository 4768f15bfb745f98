//! Buffers, and memory that crosses from one device to another.
use crate::DeviceId;
use std::{any::Any, os::fd::OwnedFd, ptr::NonNull, sync::Arc};

/// Who can reach a buffer, and how.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Memory {
    /// Read and written by kernels and copies; the host reaches it only through `read` and `write`, which stage.
    Device,
    /// The host writes, the device copies from it. No kernel binds it (GLES cannot).
    Upload,
    /// The device copies into it, the host reads. No kernel binds it.
    Download,
    /// Device-local and host-visible: kernels, copies and the host. Only where [`Limits::mapped`](crate::Limits).
    Mapped,
}

/// What buffer is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BufferDesc {
    /// Bytes; rounded up by the device to what it needs. Not zero.
    pub size: u64,
    /// Who reaches it.
    pub memory: Memory,
    /// Whether it will be exported.
    pub exportable: bool,
}

/// In what form memory leaves a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum SharedKind {
    /// A dma-buf file descriptor: any driver that imports dma-bufs.
    DmaBuf,
    /// An opaque file descriptor: the same driver only.
    OpaqueFd,
    /// Host pages, within this process.
    Host,
}

/// Memory on its way from the device that exported it to those that import it. A clone names the same memory.
#[derive(Clone, Debug)]
pub struct SharedMemory {
    /// The device that exported it.
    pub from: DeviceId,
    /// Bytes of the buffer that it is.
    pub size: u64,
    /// How it is reached.
    pub handle: SharedHandle,
}

/// How shared memory is reached.
#[derive(Clone, Debug)]
pub enum SharedHandle {
    /// Host pages, within this process.
    Host(Arc<HostRegion>),
    /// A file descriptor that only the exporter's driver understands.
    OpaqueFd(SharedFd),
    /// A dma-buf.
    DmaBuf(SharedFd),
}

/// Memory behind a file descriptor, and what an importer has to repeat of how it was made.
#[derive(Clone, Debug)]
pub struct SharedFd {
    /// Closed with its last clone; importers duplicate it.
    pub fd: Arc<OwnedFd>,
    /// Bytes of the whole allocation.
    pub allocation_size: u64,
    /// Where in the allocation the buffer starts.
    pub offset: u64,
    /// Which of the exporter's memory types it is of. Means something to the same driver only.
    pub memory_type: u32,
    /// Whether the allocation was made for this one buffer.
    pub dedicated: bool,
    /// Of the exporter. Equal ones do not mean one device: copies of a driver share it.
    pub device_uuid: [u8; 16],
    /// Of the exporter's driver.
    pub driver_uuid: [u8; 16],
}

impl SharedMemory {
    /// All of `region`.
    pub fn host(from: DeviceId, region: Arc<HostRegion>) -> Self {
        SharedMemory { from, size: region.len() as u64, handle: SharedHandle::Host(region) }
    }
    /// In what form it is.
    pub fn kind(&self) -> SharedKind {
        match self.handle {
            SharedHandle::Host(_) => SharedKind::Host,
            SharedHandle::OpaqueFd(_) => SharedKind::OpaqueFd,
            SharedHandle::DmaBuf(_) => SharedKind::DmaBuf,
        }
    }
    /// The pages, if it is of [`SharedKind::Host`].
    pub fn region(&self) -> Option<&Arc<HostRegion>> {
        match &self.handle {
            SharedHandle::Host(region) => Some(region),
            _ => None,
        }
    }
}

/// A timeline on its way from the device that exported it to those that wait for it. A clone names the same one.
#[derive(Clone, Debug)]
pub struct SharedTimeline {
    /// The device that exported it.
    pub from: DeviceId,
    /// A file descriptor that only the exporter's driver understands.
    pub fd: Arc<OwnedFd>,
    /// Of the exporter.
    pub device_uuid: [u8; 16],
    /// Of the exporter's driver.
    pub driver_uuid: [u8; 16],
}

/// Pages of this process that devices and the host share. Whoever holds it keeps them mapped.
pub struct HostRegion {
    start: NonNull<u8>,
    len: usize,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the region is an address and a length; it gives no access by itself. Whoever dereferences the pointer
// states in its own unsafe block what orders its access against the others.
unsafe impl Send for HostRegion {}
// SAFETY: as above.
unsafe impl Sync for HostRegion {}

impl HostRegion {
    /// `len` bytes from `start`, kept alive by `owner`.
    ///
    /// # Safety
    /// - The bytes stay mapped, readable and writable until `owner` is dropped.
    /// - No Rust reference to them exists while the region does: all access is through raw pointers, ordered by
    ///   timelines.
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: Box<dyn Any + Send + Sync>) -> Self {
        HostRegion { start, len, _owner: owner }
    }
    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl std::fmt::Debug for HostRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostRegion({:p}, {} bytes)", self.start, self.len)
    }
}
