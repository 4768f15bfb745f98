//! Who makes dma-bufs besides Vulkan drivers, and what the kernel says of one.
//!
//! Numbers and layouts are of the kernel's interface: linux/dma-buf.h, dma-heap.h, udmabuf.h, drm.h, drm_mode.h.

use rustix::{
    fs::{Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, open},
    ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};
use std::{
    error::Error,
    ffi::c_void,
    fs, io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

/// One way to have the kernel make a dma-buf.
pub struct Exporter {
    /// Who makes it.
    pub name: &'static str,
    /// One of so many bytes, a multiple of the page; an error where the kernel does not offer it.
    pub make: fn(u64) -> io::Result<OwnedFd>,
}

/// All that a common kernel has.
pub const ALL: &[Exporter] = &[
    Exporter { name: "/dev/udmabuf", make: of_memfd },
    Exporter { name: "/dev/dma_heap/system", make: of_system_heap },
    Exporter { name: "vgem", make: of_vgem },
];

/// The kernel's name for who exported a dma-buf; an error if it is none.
pub fn exporter_of(fd: BorrowedFd<'_>) -> Result<String, Box<dyn Error>> {
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let name = about.lines().find_map(|line| line.strip_prefix("exp_name:"));
    name.map(|name| name.trim().to_owned()).ok_or_else(|| "the descriptor is no dma-buf".into())
}

/// What the host sees in a dma-buf.
pub fn host_view(fd: BorrowedFd<'_>, size: u64) -> io::Result<Vec<u8>> {
    const READ: u64 = 1;
    const END: u64 = 4;
    let sync = |mut flags: u64| call(fd, opcode::write::<u64>(b'b', 0), &mut flags);
    // SAFETY: a new mapping, which the kernel places where nothing is.
    let start = unsafe { mmap(std::ptr::null_mut(), size as usize, ProtFlags::READ, MapFlags::SHARED, fd, 0) }?;
    let seen = sync(READ).and_then(|_| {
        let mut bytes = vec![0; size as usize];
        // SAFETY: so many bytes are mapped there, and no device writes them between the two calls.
        unsafe { start.cast::<u8>().copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        sync(END | READ).map(|_| bytes)
    });
    // SAFETY: the whole mapping, to which nothing refers any more.
    unsafe { munmap(start, size as usize) }?;
    seen
}

/// Memory that can be mapped and is no dma-buf.
pub fn memfd(size: u64) -> io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, memfd_create};
    let fd = memfd_create("no dma-buf", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?;
    ftruncate(&fd, size)?;
    Ok(fd)
}

fn of_memfd(size: u64) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Create {
        memfd: u32,
        flags: u32,
        offset: u64,
        size: u64,
    }
    const CLOEXEC: u32 = 1;
    let maker = device("/dev/udmabuf")?;
    let pages = memfd(size)?;
    fcntl_add_seals(&pages, SealFlags::SHRINK)?;
    let mut create = Create { memfd: pages.as_raw_fd() as u32, flags: CLOEXEC, offset: 0, size };
    let fd = call(&maker, opcode::write::<Create>(b'u', 0x42), &mut create)?;
    Ok(owned(fd))
}

fn of_system_heap(size: u64) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Allocate {
        size: u64,
        fd: u32,
        fd_flags: u32,
        heap_flags: u64,
    }
    let heap = device("/dev/dma_heap/system")?;
    let mut allocate = Allocate { size, fd: 0, fd_flags: (OFlags::RDWR | OFlags::CLOEXEC).bits(), heap_flags: 0 };
    call(&heap, opcode::read_write::<Allocate>(b'H', 0), &mut allocate)?;
    Ok(owned(allocate.fd as i32))
}

/// A buffer of the virtual GEM driver: a DRM device that is memory and nothing else.
fn of_vgem(size: u64) -> io::Result<OwnedFd> {
    #[repr(C)]
    #[derive(Default)]
    struct CreateDumb {
        height: u32,
        width: u32,
        bits_per_pixel: u32,
        flags: u32,
        handle: u32,
        pitch: u32,
        size: u64,
    }
    #[repr(C)]
    struct ToFd {
        handle: u32,
        flags: u32,
        fd: i32,
    }
    let card = device(&vgem_card()?)?;
    let mut dumb = CreateDumb { height: 1, width: (size / 4) as u32, bits_per_pixel: 32, ..Default::default() };
    call(&card, opcode::read_write::<CreateDumb>(b'd', 0xb2), &mut dumb)?;
    let mut to_fd = ToFd { handle: dumb.handle, flags: (OFlags::RDWR | OFlags::CLOEXEC).bits(), fd: -1 };
    call(&card, opcode::read_write::<ToFd>(b'd', 0x2d), &mut to_fd)?;
    Ok(owned(to_fd.fd))
}

fn vgem_card() -> io::Result<String> {
    for entry in fs::read_dir("/sys/class/drm")?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let of_vgem = fs::canonicalize(entry.path().join("device")).is_ok_and(|device| device.ends_with("vgem"));
        if name.starts_with("card") && of_vgem {
            return Ok(format!("/dev/dri/{name}"));
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "no DRM device is vgem's"))
}

fn device(path: &str) -> io::Result<OwnedFd> {
    Ok(open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel has just made it for us, and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// An ioctl that reads and writes `argument`, and what it returns.
fn call<T>(fd: impl std::os::fd::AsFd, request: Opcode, argument: &mut T) -> io::Result<i32> {
    struct Call<'a, T>(Opcode, &'a mut T);
    // SAFETY: every request here is of the size of its argument, a struct of integers, and the kernel keeps no pointer.
    unsafe impl<T> Ioctl for Call<'_, T> {
        type Output = i32;
        const IS_MUTATING: bool = true;
        fn opcode(&self) -> Opcode {
            self.0
        }
        fn as_ptr(&mut self) -> *mut c_void {
            std::ptr::from_mut(self.1).cast()
        }
        unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<i32> {
            Ok(out)
        }
    }
    // SAFETY: as above.
    Ok(unsafe { ioctl(fd, Call(request, argument)) }?)
}
