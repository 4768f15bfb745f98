//! Buffers and the memory under them. Types of memory are chosen by their properties; what the host can see is
//! coherent and stays mapped for as long as the buffer lives.
//!
//! | kind | memory |
//! |---|---|
//! | `Device` | local to the device, and not in the host's view if that can be had; else the host takes the short way |
//! | `Upload` `Download` | the host's, never the device's own behind a small window |
//! | `Mapped` | local to the device, all of it in the host's view |
//!
//! A buffer that stays here is a piece of a larger allocation. One that may leave has an allocation of its own; for
//! `Upload` and `Download` that is anonymous pages of ours, imported: other devices can then import them too, which
//! what a driver maps does not promise. Where a driver lets no type that the host sees leave as a descriptor, such a
//! buffer leaves as its mapping alone, which the host reads and writes.
use crate::{
    doors::Door,
    gpu::{Gpu, USAGE, handle_type},
    instance::Physical,
    share,
};
use allhands_contract::{BufferDesc, Error, HostRegion, Memory, Result, SharedKind};
use ash::{
    prelude::VkResult,
    vk::{self, MemoryPropertyFlags as Flags},
};
use gpu_allocator::{
    AllocationError, MemoryLocation,
    vulkan::{Allocation, AllocationCreateDesc, AllocationScheme},
};
use std::{
    any::Any,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Buffers are made in units of so many bytes, so that the words around an unaligned end are there.
const UNIT: u64 = 16;

/// What holds a buffer's bytes.
pub(crate) enum Backing {
    /// A piece of a larger allocation.
    Pooled(Allocation),
    /// An allocation of its own.
    Own {
        memory: vk::DeviceMemory,
        size: u64,
        memory_type: u32,
        dedicated: bool,
        exports: vk::ExternalMemoryHandleTypeFlags,
    },
    /// Host pages: ours, or another's.
    Pages { memory: vk::DeviceMemory, region: Arc<HostRegion> },
    /// An app's.
    App { _owner: Option<Arc<dyn Any + Send + Sync>> },
}

pub(crate) struct Buffer {
    pub gpu: Arc<Gpu>,
    pub raw: vk::Buffer,
    /// Bytes that were asked for.
    pub size: u64,
    /// Bytes that it really has.
    pub capacity: u64,
    pub memory: Memory,
    pub exportable: bool,
    backing: Option<Backing>,
    host: Option<Mapping>,
    /// An app's buffer that was given back: nothing may touch it any more.
    pub revoked: AtomicBool,
}

#[derive(Clone, Copy)]
pub(crate) struct Mapping(pub NonNull<u8>);
// SAFETY: it is only an address. Who reads or writes there orders its accesses, as `Device` asks of its caller.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Properties that no buffer here is made for.
const ODD: Flags = Flags::from_raw(
    Flags::PROTECTED.as_raw()
        | Flags::LAZILY_ALLOCATED.as_raw()
        | Flags::DEVICE_COHERENT_AMD.as_raw()
        | Flags::DEVICE_UNCACHED_AMD.as_raw()
        | Flags::RDMA_CAPABLE_NV.as_raw(),
);
const HOST: Flags = Flags::from_raw(Flags::HOST_VISIBLE.as_raw() | Flags::HOST_COHERENT.as_raw());

/// The type in `bits` that suits `memory` best; `None` if none will do.
pub(crate) fn memory_type(physical: &Physical, memory: Memory, bits: u32) -> Option<u32> {
    let all = &physical.memory;
    let heap = |t: &vk::MemoryType| all.memory_heaps[t.heap_index as usize].size;
    let local = |t: &&vk::MemoryType| t.property_flags.contains(Flags::DEVICE_LOCAL);
    let types = all.memory_types[..all.memory_type_count as usize].iter();
    // A window of 256 MB into the device's memory is too precious, and too slow for the host to read.
    let largest = types.clone().filter(local).map(heap).max().unwrap_or(0);
    let wide = |t: &vk::MemoryType| heap(t) >= largest / 4 * 3;
    let score = |t: &vk::MemoryType| {
        let has = |flags| t.property_flags.contains(flags);
        let preferences = match memory {
            Memory::Device => has(Flags::DEVICE_LOCAL).then(|| [wide(t), !has(Flags::HOST_VISIBLE)]),
            Memory::Upload => has(HOST).then(|| [!has(Flags::DEVICE_LOCAL), !has(Flags::HOST_CACHED)]),
            Memory::Download => has(HOST).then(|| [!has(Flags::DEVICE_LOCAL), has(Flags::HOST_CACHED)]),
            Memory::Mapped => (has(HOST | Flags::DEVICE_LOCAL) && wide(t)).then(|| [true, !has(Flags::HOST_CACHED)]),
        };
        preferences.map(|[first, second]| 2 * u32::from(first) + u32::from(second))
    };
    let allowed = types.enumerate().filter(|(i, t)| bits & 1 << i != 0 && !t.property_flags.intersects(ODD));
    // Of equals the first: drivers list the better one earlier.
    allowed.filter_map(|(i, t)| Some((score(t)?, std::cmp::Reverse(i)))).max().map(|(_, i)| i.0 as u32)
}

/// Whether the host reads and writes a buffer of a kind and type without staging: of `Device` memory where that is as
/// good as its own.
pub(crate) fn is_seen(physical: &Physical, memory: Memory, memory_type: u32) -> bool {
    let flags = physical.memory.memory_types[memory_type as usize].property_flags;
    memory != Memory::Device || flags.contains(HOST | Flags::HOST_CACHED)
}

/// Which memory types the host sees coherently.
pub(crate) fn coherent_types(physical: &Physical) -> impl Iterator<Item = u32> + '_ {
    (0..physical.memory.memory_type_count)
        .filter(|i| physical.memory.memory_types[*i as usize].property_flags.contains(HOST))
}

impl Buffer {
    pub fn new(gpu: &Arc<Gpu>, desc: &BufferDesc) -> Result<Arc<Self>> {
        const WHAT: &str = "create a buffer";
        let full = Error::OutOfMemory { device: gpu.id, bytes: desc.size };
        let capacity = desc.size.checked_next_multiple_of(UNIT).ok_or(full.clone())?;
        if capacity > gpu.physical.max_allocation {
            return Err(full);
        }
        let passed = gpu.pass(Door::BufferCreate);
        gpu.check(WHAT, desc.size, passed)?;
        let host_memory = matches!(desc.memory, Memory::Upload | Memory::Download);
        if desc.exportable && host_memory && gpu.caps.host_import {
            match share::own_pages(gpu, capacity).and_then(|region| share::import_pages(gpu, region, capacity)) {
                Ok(draft) => return Ok(draft.finish(desc.size, desc.memory, true)),
                // Memory of the driver's own can still be had, which others may be able to import.
                Err(why @ (Error::Lost { .. } | Error::OutOfMemory { .. })) => return Err(why),
                Err(why) => log::debug!("{why}; the driver's memory is used"),
            }
        }
        let plan = |exports| {
            let draft = Draft::new(gpu, WHAT, capacity, exports)?;
            let needs = draft.needs();
            let memory_type = memory_type(&gpu.physical, desc.memory, needs.memory_type_bits);
            Ok(memory_type.map(|memory_type| (draft, needs, memory_type, exports)))
        };
        let (none, wanted) = (Default::default(), gpu.caps.export_types);
        let planned = match plan(if desc.exportable { wanted } else { none })? {
            None if desc.exportable && desc.memory != Memory::Device => plan(none)?,
            planned => planned,
        };
        let (draft, needs, memory_type, exports) =
            planned.ok_or_else(|| gpu.refused(WHAT, format!("it has no {:?} memory", desc.memory)))?;
        let draft = if desc.exportable {
            draft.allocate_own(WHAT, needs, memory_type, exports, is_seen(&gpu.physical, desc.memory, memory_type))?
        } else {
            draft.allocate_pooled(needs, memory_type, desc.memory)?
        };
        Ok(draft.finish(desc.size, desc.memory, desc.exportable))
    }

    /// An app's.
    ///
    /// # Safety
    /// As [`VulkanDevice::adopt_buffer`](crate::VulkanDevice::adopt_buffer).
    pub unsafe fn adopt(
        gpu: &Arc<Gpu>,
        raw: vk::Buffer,
        size: u64,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Arc<Self> {
        Arc::new(Buffer {
            gpu: gpu.clone(),
            raw,
            size,
            capacity: 0,
            memory: Memory::Device,
            exportable: false,
            backing: Some(Backing::App { _owner: owner }),
            host: None,
            revoked: AtomicBool::new(false),
        })
    }

    pub fn backing(&self) -> &Backing {
        self.backing.as_ref().expect("is there until the drop")
    }
    /// Where the host sees it.
    pub fn host(&self) -> Option<NonNull<u8>> {
        self.host.map(|m| m.0)
    }
    pub fn is_app(&self) -> bool {
        matches!(self.backing(), Backing::App { .. })
    }
    /// Whether it crosses to other devices as a descriptor, so that it changes owners.
    pub fn crosses(&self) -> bool {
        matches!(self.backing(), Backing::Own { exports, .. } if !exports.is_empty())
    }

    /// Copies bytes of a mapped buffer to the host. False if the host cannot see it.
    pub fn load(&self, offset: u64, to: &mut [u8]) -> bool {
        let Some(start) = self.within(offset, to.len()) else { return false };
        // SAFETY: the range is inside the mapping, which lives; `to` is the caller's own, so they do not overlap. No
        // device writes there now: that is what `Device` asks of its caller.
        unsafe { ptr::copy_nonoverlapping(start, to.as_mut_ptr(), to.len()) };
        true
    }
    /// Copies bytes into a mapped buffer. False if the host cannot see it.
    pub fn store(&self, offset: u64, from: &[u8]) -> bool {
        let Some(start) = self.within(offset, from.len()) else { return false };
        // SAFETY: as in `load`, the other way round.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), start, from.len()) };
        true
    }
    fn within(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let start = self.host()?;
        assert!(offset.checked_add(len as u64).is_some_and(|end| end <= self.capacity), "checked by the device");
        // SAFETY: the offset is inside the mapping.
        Some(unsafe { start.as_ptr().add(offset as usize) })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.gpu.allocated.fetch_sub(self.capacity, Ordering::Relaxed);
        let backing = self.backing.take();
        if self.gpu.is_abandoned() {
            std::mem::forget(backing);
            return;
        }
        release(&self.gpu, self.raw, backing);
    }
}

/// Destroys a buffer and gives its memory back.
fn release(gpu: &Gpu, raw: vk::Buffer, backing: Option<Backing>) {
    if let Some(Backing::App { .. }) = backing {
        return;
    }
    // SAFETY: submissions that use the buffer own it until they have completed, exported regions own what they need;
    // so nothing uses it, nor its memory as far as it is this device's.
    unsafe {
        gpu.vk().destroy_buffer(raw, None);
        match backing {
            Some(Backing::Own { memory, .. } | Backing::Pages { memory, .. }) => gpu.vk().free_memory(memory, None),
            Some(Backing::Pooled(piece)) => {
                let mut allocator = crate::queue::lock(&gpu.allocator);
                if let Err(why) = allocator.free(piece) {
                    log::error!("{}: memory was not given back: {why}", gpu.id);
                }
            }
            Some(Backing::App { .. }) | None => {}
        }
    }
}

/// A buffer on its way: destroyed if it does not get there.
pub(crate) struct Draft {
    gpu: Arc<Gpu>,
    raw: vk::Buffer,
    capacity: u64,
    backing: Option<Backing>,
    host: Option<Mapping>,
    arrived: bool,
}

impl Draft {
    pub fn new(
        gpu: &Arc<Gpu>,
        what: &'static str,
        capacity: u64,
        external: vk::ExternalMemoryHandleTypeFlags,
    ) -> Result<Self> {
        let mut crossing = vk::ExternalMemoryBufferCreateInfo::default().handle_types(external);
        let mut info = vk::BufferCreateInfo::default().size(capacity).usage(USAGE);
        if !external.is_empty() {
            info = info.push_next(&mut crossing);
        }
        // SAFETY: the size is not zero; the handle types are ones that the device was asked about.
        let raw = gpu.check(what, capacity, unsafe { gpu.vk().create_buffer(&info, None) })?;
        Ok(Draft { gpu: gpu.clone(), raw, capacity, backing: None, host: None, arrived: false })
    }
    pub fn needs(&self) -> vk::MemoryRequirements {
        // SAFETY: the buffer is this device's.
        unsafe { self.gpu.vk().get_buffer_memory_requirements(self.raw) }
    }
    pub fn raw(&self) -> vk::Buffer {
        self.raw
    }

    fn allocate_pooled(mut self, needs: vk::MemoryRequirements, memory_type: u32, memory: Memory) -> Result<Self> {
        let location = if memory == Memory::Device { MemoryLocation::GpuOnly } else { MemoryLocation::CpuToGpu };
        let desc = AllocationCreateDesc {
            name: "buffer",
            // Of the one type that was chosen.
            requirements: vk::MemoryRequirements { memory_type_bits: 1 << memory_type, ..needs },
            location,
            linear: true,
            allocation_scheme: AllocationScheme::GpuAllocatorManaged,
        };
        let piece = crate::queue::lock(&self.gpu.allocator).allocate(&desc).map_err(|e| match e {
            // Of the one type that was chosen there is no more, so no other is compatible.
            AllocationError::OutOfMemory | AllocationError::NoCompatibleMemoryTypeFound => {
                Error::OutOfMemory { device: self.gpu.id, bytes: self.capacity }
            }
            e => self.gpu.refused("create a buffer", e.to_string()),
        })?;
        // SAFETY: it is bound to the buffer, which `release` destroys before the piece is freed.
        let (block, offset) = (unsafe { piece.memory() }, piece.offset());
        if is_seen(&self.gpu.physical, memory, memory_type) {
            self.host = piece.mapped_ptr().map(|p| Mapping(p.cast()));
        }
        let mapped = self.host.is_some();
        self.backing = Some(Backing::Pooled(piece));
        self.bind("create a buffer", block, offset)?;
        if memory != Memory::Device && !mapped {
            return Err(self.gpu.refused("create a buffer", "its host-visible memory is not mapped"));
        }
        Ok(self)
    }

    fn allocate_own(
        mut self,
        what: &'static str,
        needs: vk::MemoryRequirements,
        memory_type: u32,
        exports: vk::ExternalMemoryHandleTypeFlags,
        mapped: bool,
    ) -> Result<Self> {
        let caps = &self.gpu.caps;
        let wants = |kind, dedicated| exports.contains(handle_type(kind)) && dedicated;
        let dedicated =
            wants(SharedKind::OpaqueFd, caps.opaque_fd.dedicated) || wants(SharedKind::DmaBuf, caps.dma_buf.dedicated);
        let mut export = vk::ExportMemoryAllocateInfo::default().handle_types(exports);
        let mut alone = vk::MemoryDedicatedAllocateInfo::default().buffer(self.raw);
        let mut info = vk::MemoryAllocateInfo::default().allocation_size(needs.size).memory_type_index(memory_type);
        if !exports.is_empty() {
            info = info.push_next(&mut export);
        }
        if dedicated {
            info = info.push_next(&mut alone);
        }
        // SAFETY: the type is one of the device's; the handle types are ones that it exports.
        let memory = self.gpu.check(what, needs.size, unsafe { self.gpu.vk().allocate_memory(&info, None) })?;
        self.backing = Some(Backing::Own { memory, size: needs.size, memory_type, dedicated, exports });
        self.bind(what, memory, 0)?;
        if mapped {
            // SAFETY: the memory is host-visible, not mapped yet, and unmapped by being freed.
            let start = unsafe { self.gpu.vk().map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty()) };
            let start = self.gpu.check(what, needs.size, start)?;
            self.host = NonNull::new(start.cast()).map(Mapping);
        }
        Ok(self)
    }

    /// Binds what an import of `size` bytes gave, and has `backing` own it. On failure nothing is left.
    pub fn bind_import(
        mut self,
        what: &'static str,
        memory: VkResult<vk::DeviceMemory>,
        size: u64,
        offset: u64,
        backing: impl FnOnce(vk::DeviceMemory) -> Backing,
        host: Option<Mapping>,
    ) -> Result<Self> {
        let memory = self.gpu.check(what, size, memory)?;
        self.backing = Some(backing(memory));
        self.host = host;
        self.bind(what, memory, offset)?;
        Ok(self)
    }

    fn bind(&self, what: &'static str, memory: vk::DeviceMemory, offset: u64) -> Result<()> {
        // SAFETY: the buffer is not bound yet; the memory has room for it at that offset, which is aligned.
        let bound = unsafe { self.gpu.vk().bind_buffer_memory(self.raw, memory, offset) };
        self.gpu.check(what, self.capacity, bound)
    }

    pub fn finish(mut self, size: u64, memory: Memory, exportable: bool) -> Arc<Buffer> {
        self.arrived = true;
        self.gpu.allocated.fetch_add(self.capacity, Ordering::Relaxed);
        Arc::new(Buffer {
            gpu: self.gpu.clone(),
            raw: self.raw,
            size,
            capacity: self.capacity,
            memory,
            exportable,
            backing: self.backing.take(),
            host: self.host,
            revoked: AtomicBool::new(false),
        })
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.arrived {
            release(&self.gpu, self.raw, self.backing.take());
        }
    }
}
