//! An open hal device. Every call into hal goes through here, so that an error or a panic inside it becomes
//! [`Error::Lost`], now and for every call after; and everything made on the device keeps it alive, so that it is
//! destroyed last.
use crate::{
    api::{HalResult, ProxyApi},
    pipelines::Pipelines,
};
use allhands_contract::{DeviceId, Error, Result};
use std::{
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};
use wgpu_hal as hal;

pub(crate) struct Gpu<A: ProxyApi> {
    pub id: DeviceId,
    /// Bytes of its buffers.
    pub allocated: AtomicU64,
    pub pipelines: Pipelines<A>,
    bell: ManuallyDrop<A::Bell>,
    queue: ManuallyDrop<A::Queue>,
    device: ManuallyDrop<A::Device>,
    lost: OnceLock<String>,
    /// Whether hal can no longer be called at all, not even to destroy.
    abandoned: AtomicBool,
}

impl<A: ProxyApi> Gpu<A> {
    /// Takes over an open device.
    pub fn new(id: DeviceId, open: hal::OpenDevice<A>, software: bool) -> HalResult<Self> {
        // On an error below the device is leaked: hal wants what was made on it destroyed first.
        let device = ManuallyDrop::new(open.device);
        let queue = ManuallyDrop::new(open.queue);
        let pipelines = Pipelines::new(&*device)?;
        let bell = ManuallyDrop::new(A::make_bell(&device, software)?);
        Ok(Gpu {
            id,
            allocated: AtomicU64::new(0),
            pipelines,
            bell,
            queue,
            device,
            lost: OnceLock::new(),
            abandoned: AtomicBool::new(false),
        })
    }
    pub fn device(&self) -> &A::Device {
        &self.device
    }
    pub fn queue(&self) -> &A::Queue {
        &self.queue
    }
    pub fn bell(&self) -> &A::Bell {
        &self.bell
    }

    /// An error if the device is lost.
    pub fn status(&self) -> Result<()> {
        match self.lost.get() {
            None => Ok(()),
            Some(why) => Err(Error::Lost { device: self.id, why: why.clone() }),
        }
    }
    /// Declares the device lost, and returns the error that says so. The first reason stays.
    pub fn lose(&self, why: impl Into<String>) -> Error {
        let why = self.lost.get_or_init(|| why.into());
        log::error!("{} is lost: {why}", self.id);
        Error::Lost { device: self.id, why: why.clone() }
    }
    /// From now on hal is not called any more, and what is left is leaked: the work under way may still use it.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Calls hal. Running out of memory is an error of the call, for `bytes`; everything else loses the device.
    pub fn call<R>(&self, bytes: u64, f: impl FnOnce() -> HalResult<R>) -> Result<R> {
        self.status()?;
        self.guard(f)?.map_err(|e| match e {
            hal::DeviceError::OutOfMemory => Error::OutOfMemory { device: self.id, bytes },
            other => self.lose(other.to_string()),
        })
    }

    /// Runs `f`, and loses the device if it panics.
    pub fn guard<R>(&self, f: impl FnOnce() -> R) -> Result<R> {
        // Whatever `f` left half done is not looked at again: the device is lost and abandoned.
        catch_unwind(AssertUnwindSafe(f)).map_err(|panic| {
            self.abandon();
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            self.lose(format!("its driver interface panicked: {}", text.unwrap_or("no reason given")))
        })
    }

    /// Destroys something, unless hal is not to be called any more: then it is leaked. Whether it was destroyed.
    pub fn destroy(&self, f: impl FnOnce(&A::Device)) -> bool {
        !self.is_abandoned() && self.guard(|| f(&self.device)).is_ok()
    }
}

impl<A: ProxyApi> Drop for Gpu<A> {
    fn drop(&mut self) {
        if self.is_abandoned() {
            return;
        }
        let (pipelines, bell) = (&mut self.pipelines, &self.bell);
        let (queue, device) = (&mut self.queue, &mut self.device);
        let done = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: whatever was submitted has completed and whatever was made on the device is destroyed, because
            // each keeps this value alive; so nothing uses the pipelines or the bell.
            unsafe {
                pipelines.destroy(device);
                A::destroy_bell(device, bell);
            }
            // SAFETY: neither is touched again: this is the drop of the value that holds them.
            unsafe {
                ManuallyDrop::drop(queue);
                ManuallyDrop::drop(device);
            }
        }));
        if done.is_err() {
            log::error!("{}: closing it panicked", self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{adapters, api::ProxyApi, device::ProxyDevice};
    use allhands_contract::*;
    use std::time::{Duration, Instant};

    fn a_panic_loses_the_device<A: ProxyApi>() {
        if adapters(A::BACKEND).is_empty() {
            return println!("not run on {}: there is none", A::BACKEND.name());
        }
        let device = ProxyDevice::<A>::open(0).unwrap();
        let buffer = device.create_buffer(&BufferDesc { size: 4, memory: Memory::Device, exportable: false }).unwrap();
        let timeline = device.create_timeline(false).unwrap();
        let point = Point { timeline, value: 1 };
        let range = Range::new(buffer, 0, 4);
        device.submit(&[Submission { commands: None, waits: &[], signal: point }]).unwrap();
        let lost = device.gpu().guard(|| panic!("no lock")).unwrap_err();
        assert!(matches!(&lost, Error::Lost { why, .. } if why.contains("no lock")), "{lost}");
        let deadline = Instant::now() + Duration::from_secs(60);
        let after = [
            device.status(),
            device.read(range, &mut [0; 4]),
            device.write(range, &[0; 4]),
            device.submit(&[Submission { commands: None, waits: &[], signal: Point { timeline, value: 2 } }]),
            device.wait_any(&[point], 0, deadline).map(|_| ()),
            device.prepare(&[]).map(|_| ()),
            device.value(timeline).map(|_| ()),
            device.create_timeline(false).map(|_| ()),
            device.create_buffer(&BufferDesc { size: 4, memory: Memory::Upload, exportable: false }).map(|_| ()),
        ];
        for (i, result) in after.into_iter().enumerate() {
            assert_eq!(result, Err(lost.clone()), "call {i}");
        }
        device.sibling().unwrap().status().unwrap();
    }

    fn exported_memory_outlives_the_device<A: ProxyApi>() {
        if adapters(A::BACKEND).is_empty() {
            return println!("not run on {}: there is none", A::BACKEND.name());
        }
        let device = ProxyDevice::<A>::open(0).unwrap();
        let desc = BufferDesc { size: 4096, memory: Memory::Upload, exportable: true };
        let shared = device.export(device.create_buffer(&desc).unwrap(), SharedKind::Host).unwrap();
        drop(device);
        let region = shared.region().unwrap();
        // SAFETY: the region keeps its bytes mapped, and no device uses them.
        unsafe { region.as_ptr().write_bytes(7, region.len()) };
    }

    #[test]
    fn a_panic_inside_hal_loses_the_device() {
        a_panic_loses_the_device::<wgpu_hal::api::Vulkan>();
        a_panic_loses_the_device::<wgpu_hal::api::Gles>();
    }

    #[test]
    fn exported_memory_outlives_its_device() {
        exported_memory_outlives_the_device::<wgpu_hal::api::Vulkan>();
        exported_memory_outlives_the_device::<wgpu_hal::api::Gles>();
    }
}
