//! GLES. Every device of an adapter shares one GL context behind one lock, which hal's wait holds while it waits: so
//! a wait is cut into short slices, and a wake is noticed between two of them.
use crate::{
    Backend,
    api::{HalResult, ProxyApi, System},
    gpu::Gpu,
};
use glow::HasContext as _;
use std::{
    sync::{Mutex, OnceLock, PoisonError},
    time::Duration,
};
use wgpu_hal::{self as hal, Device as _, api::Gles};
use wgpu_types as wgt;

/// How long one wait holds the context.
const SLICE: Duration = Duration::from_millis(1);

impl ProxyApi for Gles {
    const BACKEND: Backend = Backend::Gles;
    const SUBMIT_BLOCKS: bool = true;
    const LONGEST_WAIT: Duration = Duration::from_millis(10);
    // GL orders a buffer copy after a shader's writes by GL_BUFFER_UPDATE_BARRIER_BIT, which hal issues for MAP_READ;
    // for the copy usages it issues the pixel transfers' bit.
    const BEFORE_COPIES: wgt::BufferUses = wgt::BufferUses::MAP_READ;
    type Bell = ();

    fn system() -> &'static OnceLock<System<Gles>> {
        static SYSTEM: OnceLock<System<Gles>> = OnceLock::new();
        &SYSTEM
    }

    unsafe fn create_buffer(device: &Self::Device, desc: &hal::BufferDescriptor<'_>) -> HalResult<Self::Buffer> {
        // hal does not look whether GL had the memory. One buffer at a time, so that GL's error is of this one.
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the lock has made the context current.
        let error = || unsafe { device.context().lock().get_error() };
        // Errors that others left; of a lost context there is no end.
        (0..16).any(|_| error() == glow::NO_ERROR);
        // SAFETY: by this function's contract.
        let buffer = unsafe { device.create_buffer(desc) }?;
        match error() {
            glow::OUT_OF_MEMORY => {
                // SAFETY: it was made by this device a moment ago and nothing uses it.
                unsafe { device.destroy_buffer(buffer) };
                Err(hal::DeviceError::OutOfMemory)
            }
            _ => Ok(buffer),
        }
    }

    fn make_bell(_: &Self::Device, _: bool) -> HalResult<()> {
        Ok(())
    }
    unsafe fn destroy_bell(_: &Self::Device, _: &()) {}
    fn ring(_: &Gpu<Gles>, _: u64) {}
    fn wait(gpu: &Gpu<Gles>, fence: &Self::Fence, value: u64, _: u64, timeout: Duration) -> HalResult<bool> {
        // SAFETY: the fence is of this device.
        unsafe { gpu.device().wait(fence, value, Some(timeout.min(SLICE))) }
    }
}
