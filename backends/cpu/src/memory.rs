//! Pages, and the buffers over them.
//!
//! Other devices and the host reach the same pages, so no Rust reference to them is ever made: everything goes
//! through [`Address`], and timelines order who writes when.
use allhands_contract::{HostRegion, Memory};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::{
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// A byte of memory that others reach too. Kept beside what keeps the memory mapped.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Address(pub *mut u8);

// SAFETY: an address gives no access by itself; whoever dereferences it states what orders the access.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// Anonymous private pages, zero until written.
pub(crate) struct Pages {
    start: NonNull<u8>,
    mapped: usize,
    counted: Counted,
}

impl Pages {
    /// Room for `size` bytes, counted in `total` for as long as it lasts; `None` if there is none.
    pub fn new(size: u64, total: &Arc<AtomicU64>) -> Option<Pages> {
        let mapped = usize::try_from(size).ok()?; // the kernel rounds up to whole pages, here and when it unmaps
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory in use.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        Some(Pages { start: NonNull::new(start.ok()?.cast())?, mapped, counted: Counted::new(size, total) })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and whole, and every user of its addresses holds the pages by an `Arc`.
        if let Err(error) = unsafe { munmap(self.start.as_ptr().cast(), self.mapped) } {
            log::error!("unmapping {} bytes: {error}", self.mapped);
        }
    }
}

// SAFETY: as for `Address`: the start is only an address, and the pages belong to no thread.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

/// A share of a total that is given back when this goes.
struct Counted {
    bytes: u64,
    total: Arc<AtomicU64>,
}

impl Counted {
    fn new(bytes: u64, total: &Arc<AtomicU64>) -> Self {
        total.fetch_add(bytes, Ordering::Relaxed);
        Counted { bytes, total: total.clone() }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// What a buffer's handle names. Commands hold it until they have run.
pub(crate) struct Buffer {
    pub size: u64,
    pub memory: Memory,
    pub exportable: bool,
    /// Whether it was made by `import`.
    pub imported: bool,
    backing: Backing,
}

enum Backing {
    Pages(Arc<Pages>),
    Region { region: Arc<HostRegion>, _resident: Counted },
}

impl Buffer {
    /// A buffer over pages of its own.
    pub fn new(pages: Pages, memory: Memory, exportable: bool) -> Self {
        let size = pages.counted.bytes;
        Buffer { size, memory, exportable, imported: false, backing: Backing::Pages(Arc::new(pages)) }
    }
    /// A buffer over another's pages, counted in `resident` for as long as it lasts.
    pub fn import(region: Arc<HostRegion>, resident: &Arc<AtomicU64>) -> Self {
        let size = region.len() as u64;
        let backing = Backing::Region { region, _resident: Counted::new(size, resident) };
        Buffer { size, memory: Memory::Mapped, exportable: false, imported: true, backing }
    }
    /// An import that lies: it has pages of its own.
    pub fn import_zeros(pages: Pages) -> Self {
        Buffer { imported: true, ..Buffer::new(pages, Memory::Mapped, false) }
    }
    /// The byte at `offset`, which is at most the size.
    pub fn at(&self, offset: u64) -> Address {
        let start = match &self.backing {
            Backing::Pages(pages) => pages.start.as_ptr(),
            Backing::Region { region, .. } => region.as_ptr(),
        };
        Address(start.wrapping_add(offset as usize))
    }
    /// Its pages, for others; `None` for an imported buffer.
    pub fn region(&self) -> Option<HostRegion> {
        let Backing::Pages(pages) = &self.backing else { return None };
        // SAFETY: the owner keeps the pages mapped, readable and writable, and the file's head promises that no
        // reference to them is made.
        Some(unsafe { HostRegion::new(pages.start, self.size as usize, Box::new(pages.clone())) })
    }
}
