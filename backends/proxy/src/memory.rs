//! Buffers. What the host can see stays mapped for as long as the buffer lives, coherently.
use crate::{api::ProxyApi, gpu::Gpu};
use allhands_contract::{BufferDesc, Error, Memory, Result};
use std::{
    mem::ManuallyDrop,
    ptr::{self, NonNull},
    sync::{Arc, atomic::Ordering},
};
use wgpu_hal::{self as hal, Device as _};
use wgpu_types::BufferUses;

/// Buffers are made in units of so many bytes, so that the words around an unaligned end are there.
const UNIT: u64 = 16;

pub(crate) struct Buffer<A: ProxyApi> {
    raw: ManuallyDrop<A::Buffer>,
    gpu: Arc<Gpu<A>>,
    desc: BufferDesc,
    /// Bytes that it really has.
    pub capacity: u64,
    mapping: Option<Mapping>,
}

struct Mapping(NonNull<u8>);
// SAFETY: it is only an address. Who reads or writes there orders its accesses, as `Device` asks of its caller.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// What the device may do with a kind of memory.
pub(crate) fn device_uses(memory: Memory) -> BufferUses {
    match memory {
        Memory::Device | Memory::Mapped => BufferUses::COPY_SRC | BufferUses::COPY_DST | BufferUses::STORAGE_READ_WRITE,
        Memory::Upload => BufferUses::COPY_SRC,
        Memory::Download => BufferUses::COPY_DST,
    }
}

/// How the host maps it. What it writes it may also read back; GL would not let it without asking.
fn host_uses(memory: Memory) -> BufferUses {
    match memory {
        Memory::Device => BufferUses::empty(),
        Memory::Download => BufferUses::MAP_READ,
        Memory::Upload | Memory::Mapped => BufferUses::MAP_READ | BufferUses::MAP_WRITE,
    }
}

impl<A: ProxyApi> Buffer<A> {
    pub fn new(gpu: &Arc<Gpu<A>>, desc: &BufferDesc) -> Result<Arc<Self>> {
        let full = Error::OutOfMemory { device: gpu.id, bytes: desc.size };
        let capacity = desc.size.checked_next_multiple_of(UNIT).ok_or(full)?;
        let host = host_uses(desc.memory);
        let (raw, mapping) = gpu.call(desc.size, || {
            // SAFETY: the size is not zero and within the adapter's limit, which the device checked.
            let raw = unsafe {
                A::create_buffer(
                    gpu.device(),
                    &hal::BufferDescriptor {
                        label: None,
                        size: capacity,
                        usage: device_uses(desc.memory) | host,
                        memory_flags: if host.is_empty() {
                            hal::MemoryFlags::empty()
                        } else {
                            hal::MemoryFlags::PREFER_COHERENT
                        },
                    },
                )
            }?;
            if host.is_empty() {
                return Ok((raw, None));
            }
            // SAFETY: it was made mappable, and the range is all of it. That host and device do not race is what
            // `Device` asks of its caller.
            match unsafe { gpu.device().map_buffer(&raw, 0..capacity) } {
                Ok(mapping) => Ok((raw, Some(mapping))),
                Err(_) => {
                    // SAFETY: it is not mapped, and nothing uses it.
                    unsafe { gpu.device().destroy_buffer(raw) };
                    Err(hal::DeviceError::OutOfMemory)
                }
            }
        })?;
        let coherent = mapping.as_ref().is_none_or(|m| m.is_coherent);
        gpu.allocated.fetch_add(capacity, Ordering::Relaxed);
        let buffer = Arc::new(Buffer {
            raw: ManuallyDrop::new(raw),
            gpu: gpu.clone(),
            desc: *desc,
            capacity,
            mapping: mapping.map(|m| Mapping(m.ptr)),
        });
        if !coherent {
            return Err(Error::Unsupported {
                device: gpu.id,
                what: "coherent host-visible memory",
                instead: "use another backend for this device",
            });
        }
        Ok(buffer)
    }

    pub fn raw(&self) -> &A::Buffer {
        &self.raw
    }
    pub fn desc(&self) -> &BufferDesc {
        &self.desc
    }
    /// Where the host sees it.
    pub fn host(&self) -> Option<NonNull<u8>> {
        self.mapping.as_ref().map(|m| m.0)
    }

    /// Copies bytes out of a mapped buffer. False if it is not mapped.
    pub fn load(&self, offset: u64, to: &mut [u8]) -> bool {
        let Some(start) = self.within(offset, to.len()) else { return false };
        // SAFETY: `within` gave as many mapped bytes; `to` is the caller's own, so they do not overlap. No device
        // writes them now: that is what `Device` asks of its caller.
        unsafe { ptr::copy_nonoverlapping(start, to.as_mut_ptr(), to.len()) };
        true
    }
    /// Copies bytes into a mapped buffer. False if the host cannot write it.
    pub fn store(&self, offset: u64, from: &[u8]) -> bool {
        if !host_uses(self.desc.memory).contains(BufferUses::MAP_WRITE) {
            return false;
        }
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

impl<A: ProxyApi> Drop for Buffer<A> {
    fn drop(&mut self) {
        self.gpu.allocated.fetch_sub(self.capacity, Ordering::Relaxed);
        // SAFETY: this is the drop, so it is not used again.
        let raw = unsafe { ManuallyDrop::take(&mut self.raw) };
        let mapped = self.mapping.is_some();
        self.gpu.destroy(move |device| {
            // SAFETY: submissions that use the buffer own it until they have completed, exported regions own it too;
            // so nothing uses it, nor its mapping.
            unsafe {
                if mapped {
                    device.unmap_buffer(&raw);
                }
                device.destroy_buffer(raw);
            }
        });
    }
}
