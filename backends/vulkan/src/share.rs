//! Memory that crosses between devices: out as a file descriptor or as host pages, and in.
//!
//! That an import succeeds says little: some drivers take whatever descriptor they are given. So what can be
//! checked is checked before the driver is asked (what the descriptor is, how large, whose), and every refusal keeps
//! its reason. Each import is given a duplicate of the descriptor.
use crate::{
    doors::Door,
    fd::{give, own},
    gpu::{Gpu, handle_type},
    memory::{Backing, Buffer, Draft, Mapping, coherent_types, memory_type},
    timeline::same_driver,
};
use allhands_contract::{BufferDesc, HostRegion, Memory, Result, SharedFd, SharedHandle, SharedKind, SharedMemory};
use ash::vk;
use rustix::{
    fs::{SeekFrom, seek},
    mm::{MapFlags, ProtFlags, mmap_anonymous, munmap},
};
use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    ptr::NonNull,
    sync::Arc,
};

const IMPORT: &str = "import memory";
/// Pages of ours are aligned for every device known; alignments are powers of two, so the largest is a common multiple.
const PAGES: u64 = 64 << 10;

/// The memory of `buffer` as `kind`, which the device exports.
pub(crate) fn export(buffer: &Arc<Buffer>, kind: SharedKind) -> Result<SharedMemory> {
    const WHAT: &str = "export memory";
    let gpu = &buffer.gpu;
    let passed = gpu.pass(Door::Export);
    gpu.check(WHAT, 0, passed)?;
    if let SharedKind::Host = kind {
        return Ok(SharedMemory::host(gpu.id, export_pages(buffer)?));
    }
    let (memory, allocation_size, memory_type, dedicated) = match buffer.backing() {
        Backing::Own { memory, size, memory_type, dedicated, exports } if exports.contains(handle_type(kind)) => {
            (*memory, *size, *memory_type, *dedicated)
        }
        _ => return Err(gpu.refused(WHAT, format!("{:?} memory leaves as host pages", buffer.memory))),
    };
    let info = vk::MemoryGetFdInfoKHR::default().memory(memory).handle_type(handle_type(kind));
    // SAFETY: the memory was allocated to be exported in this form.
    let fd = gpu.check(WHAT, 0, unsafe { gpu.memory_fd().get_memory_fd(&info) })?;
    let fd = SharedFd {
        fd: Arc::new(own(gpu, WHAT, fd)?),
        allocation_size,
        offset: 0,
        memory_type,
        dedicated,
        device_uuid: gpu.physical.device_uuid,
        driver_uuid: gpu.physical.driver_uuid,
    };
    let handle = if kind == SharedKind::DmaBuf { SharedHandle::DmaBuf(fd) } else { SharedHandle::OpaqueFd(fd) };
    Ok(SharedMemory { from: gpu.id, size: buffer.size, handle })
}

fn export_pages(buffer: &Arc<Buffer>) -> Result<Arc<HostRegion>> {
    let not_seen = || buffer.gpu.refused("export memory", "the host does not see it");
    let start = buffer.host().ok_or_else(not_seen)?;
    let owner: Box<dyn std::any::Any + Send + Sync> = match buffer.backing() {
        // Pages outlive the device.
        Backing::Pages { region, .. } => Box::new(region.clone()),
        _ => Box::new(buffer.clone()),
    };
    // SAFETY: the bytes stay mapped while the owner lives; this crate makes raw accesses to them alone.
    Ok(Arc::new(unsafe { HostRegion::new(start, buffer.size as usize, owner) }))
}

/// A buffer over another device's memory.
pub(crate) fn import(gpu: &Arc<Gpu>, shared: &SharedMemory) -> Result<Arc<Buffer>> {
    let passed = gpu.pass(Door::Import);
    if gpu.check(IMPORT, shared.size, passed)? {
        let desc = BufferDesc { size: shared.size, memory: Memory::Device, exportable: false };
        return Buffer::new(gpu, &desc);
    }
    if shared.size == 0 {
        return Err(gpu.refused(IMPORT, "it has no bytes"));
    }
    match &shared.handle {
        SharedHandle::Host(region) => {
            let draft = import_pages(gpu, region.clone(), shared.size)?;
            Ok(draft.finish(shared.size, Memory::Mapped, false))
        }
        SharedHandle::OpaqueFd(fd) => {
            if !same_driver(gpu, &fd.driver_uuid) {
                return Err(gpu.refused(IMPORT, "it is another driver's opaque descriptor, which alone understands it"));
            }
            import_fd(gpu, SharedKind::OpaqueFd, fd, shared.size, 1 << fd.memory_type)
        }
        SharedHandle::DmaBuf(fd) => {
            let what = what_is(fd.fd.as_fd());
            if !(what.starts_with("dma-buf") || what == "memfd (test)" && gpu.doors.memfd()) {
                return Err(gpu.refused(IMPORT, format!("the descriptor is no dma-buf: {what}")));
            }
            if !gpu.caps.foreign && !same_driver(gpu, &fd.driver_uuid) {
                return Err(gpu.refused(IMPORT, "it is another driver's, and VK_EXT_queue_family_foreign is missing"));
            }
            let mut properties = vk::MemoryFdPropertiesKHR::default();
            let (kind, raw) = (handle_type(SharedKind::DmaBuf), fd.fd.as_raw_fd());
            // SAFETY: the descriptor is open; imports of dma-bufs are granted, the caller looked.
            let answer = unsafe { gpu.memory_fd().get_memory_fd_properties(kind, raw, &mut properties) };
            gpu.check(IMPORT, 0, answer)?;
            log::debug!("{} imports a {what}, {} bytes, that {} exported", gpu.id, shared.size, shared.from);
            import_fd(gpu, SharedKind::DmaBuf, fd, shared.size, properties.memory_type_bits)
        }
    }
}

fn import_fd(gpu: &Arc<Gpu>, kind: SharedKind, shared: &SharedFd, size: u64, bits: u32) -> Result<Arc<Buffer>> {
    let end = shared.offset.checked_add(size).filter(|end| *end <= shared.allocation_size);
    if end.is_none() {
        let why = format!("{size} bytes at {} of an allocation of {}", shared.offset, shared.allocation_size);
        return Err(gpu.refused(IMPORT, why));
    }
    // Opaque descriptors may hold more than the memory, or tell no size at all.
    let real = seek(&shared.fd, SeekFrom::End(0)).ok();
    if real.is_some_and(|real| real < shared.allocation_size) || (kind == SharedKind::DmaBuf && real.is_none()) {
        let real = real.map_or("tells no size".into(), |r| format!("has {r} bytes"));
        return Err(gpu.refused(IMPORT, format!("the descriptor {real}, the memory {}", shared.allocation_size)));
    }
    let draft = Draft::new(gpu, IMPORT, size, handle_type(kind))?;
    let needs = draft.needs();
    let room = shared.allocation_size - shared.offset;
    if needs.size > room || !shared.offset.is_multiple_of(needs.alignment) {
        let why = format!("a buffer here takes {} bytes aligned to {}; there are {room}", needs.size, needs.alignment);
        return Err(gpu.refused(IMPORT, why));
    }
    let bits = bits & needs.memory_type_bits;
    let memory_type = memory_type(&gpu.physical, Memory::Device, bits)
        .or_else(|| (bits != 0).then(|| bits.trailing_zeros()))
        .ok_or_else(|| gpu.refused(IMPORT, "no memory type suits both the descriptor and a buffer"))?;
    let caps = if kind == SharedKind::DmaBuf { gpu.caps.dma_buf } else { gpu.caps.opaque_fd };
    let dedicated = caps.dedicated || (shared.dedicated && kind == SharedKind::OpaqueFd);
    let memory = give(gpu, IMPORT, shared.fd.as_fd(), |fd| {
        let mut from = vk::ImportMemoryFdInfoKHR::default().handle_type(handle_type(kind)).fd(fd);
        let mut alone = vk::MemoryDedicatedAllocateInfo::default().buffer(draft.raw());
        let mut info = vk::MemoryAllocateInfo::default()
            .allocation_size(shared.allocation_size)
            .memory_type_index(memory_type)
            .push_next(&mut from);
        if dedicated {
            info = info.push_next(&mut alone);
        }
        // SAFETY: the descriptor is open and the driver's to keep; the type is one that both it and the buffer allow.
        unsafe { gpu.vk().allocate_memory(&info, None) }
    })?;
    let (size_of_all, exports) = (shared.allocation_size, handle_type(kind));
    let backing = |memory| Backing::Own { memory, size: size_of_all, memory_type, dedicated, exports };
    let draft = draft.bind_import(IMPORT, memory, size_of_all, shared.offset, backing, None)?;
    Ok(draft.finish(size, Memory::Device, false))
}

/// `size` bytes of `region` as memory of this device.
pub(crate) fn import_pages(gpu: &Arc<Gpu>, region: Arc<HostRegion>, size: u64) -> Result<Draft> {
    let alignment = gpu.physical.host_alignment;
    let address = region.as_ptr() as u64;
    // Whole pages around the bytes are mapped if the bytes are; larger units need not be.
    let (base, end) = (address & !(alignment - 1), (address + size).next_multiple_of(alignment));
    if alignment > rustix::param::page_size() as u64 && (base != address || end > address + region.len() as u64) {
        let why = format!("{size} bytes at {address:#x}; address and size must be multiples of {alignment}");
        return Err(gpu.refused(IMPORT, why));
    }
    let pages = base as *mut std::ffi::c_void;
    let mut properties = vk::MemoryHostPointerPropertiesEXT::default();
    let call = gpu.memory_host();
    // SAFETY: the pages are mapped while the region lives; imports of host pages are granted, the caller looked.
    let answer = unsafe {
        (call.fp().get_memory_host_pointer_properties_ext)(
            call.device(),
            vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT,
            pages,
            &mut properties,
        )
    };
    gpu.check(IMPORT, size, answer.result())?;
    let draft = Draft::new(gpu, IMPORT, size, vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT)?;
    let needs = draft.needs();
    let (offset, room) = (address - base, end - address);
    if needs.size > room || !offset.is_multiple_of(needs.alignment) {
        let why = format!("a buffer takes {} bytes aligned to {}; there are {room}", needs.size, needs.alignment);
        return Err(gpu.refused(IMPORT, why));
    }
    let bits = properties.memory_type_bits & needs.memory_type_bits;
    let coherent = coherent_types(&gpu.physical).filter(|i| bits & 1 << i != 0).fold(0, |all, i| all | 1 << i);
    let memory_type = memory_type(&gpu.physical, Memory::Download, coherent)
        .ok_or_else(|| gpu.refused(IMPORT, format!("no coherent memory type suits the pages (types {bits:#b})")))?;
    let mut from = vk::ImportMemoryHostPointerInfoEXT::default()
        .handle_type(vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT)
        .host_pointer(pages);
    let info = vk::MemoryAllocateInfo::default()
        .allocation_size(end - base)
        .memory_type_index(memory_type)
        .push_next(&mut from);
    let host = NonNull::new(region.as_ptr()).map(Mapping);
    // SAFETY: the pages are mapped while the region lives, which the backing keeps for longer than the memory; the type
    // is one that both they and the buffer allow.
    let memory = unsafe { gpu.vk().allocate_memory(&info, None) };
    draft.bind_import(IMPORT, memory, end - base, offset, move |memory| Backing::Pages { memory, region }, host)
}

/// Anonymous pages, present from the start: some drivers refuse shared ones, and some trip over absent ones.
pub(crate) fn own_pages(gpu: &Gpu, size: u64) -> Result<Arc<HostRegion>> {
    struct Pages(Mapping, usize);
    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: it is the whole mapping, and its owner goes last.
            let gone = unsafe { munmap(self.0.0.as_ptr().cast(), self.1) };
            debug_assert!(gone.is_ok(), "a mapping of ours can be unmapped");
        }
    }
    let alignment = gpu.physical.host_alignment.max(PAGES);
    let refuse = |why: String| gpu.refused("make host pages", why);
    let len = size.checked_next_multiple_of(alignment).ok_or_else(|| refuse(format!("{size} bytes are too many")))?;
    let mapped = (len + alignment) as usize;
    let (access, how) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::POPULATE);
    // SAFETY: a new mapping, which the kernel places where nothing is.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, access, how) }
        .map_err(|e| refuse(format!("no pages for {size} bytes: {e}")))?;
    let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| refuse("no pages".into()))?;
    let pages = Pages(Mapping(start), mapped);
    let skip = (start.as_ptr() as usize).next_multiple_of(alignment as usize) - start.as_ptr() as usize;
    // SAFETY: `len` bytes from there are inside the mapping, which is longer by an alignment and lives as long as
    // `pages`; nothing refers to them.
    Ok(Arc::new(unsafe { HostRegion::new(start.add(skip), len as usize, Box::new(pages)) }))
}

/// What a descriptor is, as the kernel tells it. Only a dma-buf is called one: drivers take others without a word.
pub(crate) fn what_is(fd: BorrowedFd<'_>) -> String {
    let raw = fd.as_raw_fd();
    let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{raw}")).unwrap_or_default();
    if let Some(exporter) = about.lines().find_map(|line| line.strip_prefix("exp_name:")) {
        return format!("dma-buf of `{}`", exporter.trim());
    }
    match std::fs::read_link(format!("/proc/self/fd/{raw}")) {
        Ok(path) => match path.to_string_lossy() {
            name if name.starts_with("/dmabuf") => "dma-buf".into(),
            name if name.starts_with("/memfd:") => "memfd (test)".into(),
            name => name.into_owned(),
        },
        Err(why) => format!("unknown ({why})"),
    }
}
