//! Vulkan. A fence of hal is a timeline semaphore, so a wait takes it together with a private one that a wake
//! signals, and ends on either.
//!
//! Two cases wait for the fence alone, in short slices: a driver without timeline semaphores, and one that runs on
//! the CPU (Mesa's spins through a wait for any of several, and takes the core its own work needs).
use crate::{
    Backend,
    api::{HalResult, ProxyApi, System},
    gpu::Gpu,
};
use ash::vk;
use std::{sync::OnceLock, time::Duration};
use wgpu_hal::{self as hal, Device as _, api::Vulkan, vulkan::Fence};
use wgpu_types as wgt;

/// How long a wait lasts that no bell can end.
const SLICE: Duration = Duration::from_millis(1);

impl ProxyApi for Vulkan {
    const BACKEND: Backend = Backend::Vulkan;
    const SUBMIT_BLOCKS: bool = false;
    const LONGEST_WAIT: Duration = Duration::MAX;
    const BEFORE_COPIES: wgt::BufferUses = wgt::BufferUses::empty();
    type Bell = Option<Bell>;

    fn system() -> &'static OnceLock<System<Vulkan>> {
        static SYSTEM: OnceLock<System<Vulkan>> = OnceLock::new();
        &SYSTEM
    }

    unsafe fn create_buffer(device: &Self::Device, desc: &hal::BufferDescriptor<'_>) -> HalResult<Self::Buffer> {
        // SAFETY: by this function's contract.
        unsafe { device.create_buffer(desc) }
    }

    fn make_bell(device: &Self::Device, software: bool) -> HalResult<Option<Bell>> {
        if software {
            return Ok(None);
        }
        // SAFETY: hal asks nothing of the caller.
        Ok(match unsafe { device.create_fence() }? {
            Fence::TimelineSemaphore(semaphore) => Some(Bell { semaphore, calls: Calls::of(device) }),
            pool => {
                // SAFETY: it was made by this device a moment ago and nothing uses it.
                unsafe { device.destroy_fence(pool) };
                None
            }
        })
    }

    unsafe fn destroy_bell(device: &Self::Device, bell: &Option<Bell>) {
        if let Some(bell) = bell {
            // SAFETY: the semaphore is this device's, and by this function's contract nobody waits on it.
            unsafe { device.destroy_fence(Fence::TimelineSemaphore(bell.semaphore)) };
        }
    }

    fn ring(gpu: &Gpu<Vulkan>, wakes: u64) {
        if let Some(bell) = gpu.bell() {
            // SAFETY: the semaphore is a timeline of this device that only this function signals, each time with a
            // higher value.
            if let Err(why) = unsafe { bell.calls.signal(gpu.device().raw_device(), bell.semaphore, wakes) } {
                log::debug!("vkSignalSemaphore: {why}");
            }
        }
    }

    fn wait(gpu: &Gpu<Vulkan>, fence: &Fence, value: u64, wakes: u64, timeout: Duration) -> HalResult<bool> {
        let (Some(bell), Fence::TimelineSemaphore(semaphore)) = (gpu.bell(), fence) else {
            // SAFETY: the fence is of this device, and `value` has been submitted for it.
            return unsafe { gpu.device().wait(fence, value, Some(timeout.min(SLICE))) };
        };
        let semaphores = [*semaphore, bell.semaphore];
        let values = [value, wakes.saturating_add(1)];
        let info =
            vk::SemaphoreWaitInfo::default().flags(vk::SemaphoreWaitFlags::ANY).semaphores(&semaphores).values(&values);
        let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: both are timeline semaphores of this device, alive because `gpu` and the caller's timeline are.
        match unsafe { bell.calls.wait(gpu.device().raw_device(), &info, timeout) } {
            Ok(()) => {
                // SAFETY: the fence is of this device.
                Ok(unsafe { gpu.device().get_fence_value(fence) }? >= value)
            }
            Err(vk::Result::TIMEOUT) => Ok(false),
            Err(vk::Result::ERROR_OUT_OF_HOST_MEMORY | vk::Result::ERROR_OUT_OF_DEVICE_MEMORY) => {
                Err(hal::DeviceError::OutOfMemory)
            }
            Err(vk::Result::ERROR_DEVICE_LOST) => Err(hal::DeviceError::Lost),
            Err(_) => Err(hal::DeviceError::Unexpected),
        }
    }
}

/// A timeline semaphore that the host signals at every wake.
pub(crate) struct Bell {
    semaphore: vk::Semaphore,
    calls: Calls,
}

/// The two entry points, in core since Vulkan 1.2 and an extension before.
enum Calls {
    Core,
    Extension(ash::khr::timeline_semaphore::Device),
}

impl Calls {
    fn of(device: &hal::vulkan::Device) -> Self {
        let extension = ash::khr::timeline_semaphore::NAME;
        if device.enabled_device_extensions().contains(&extension) {
            let instance = device.shared_instance().raw_instance();
            Calls::Extension(ash::khr::timeline_semaphore::Device::new(instance, device.raw_device()))
        } else {
            Calls::Core
        }
    }

    /// # Safety
    /// `semaphore` is a timeline semaphore of `device`, and `value` is above every value signalled for it.
    unsafe fn signal(&self, device: &ash::Device, semaphore: vk::Semaphore, value: u64) -> ash::prelude::VkResult<()> {
        let info = vk::SemaphoreSignalInfo::default().semaphore(semaphore).value(value);
        match self {
            // SAFETY: by this function's contract.
            Calls::Core => unsafe { device.signal_semaphore(&info) },
            // SAFETY: as above.
            Calls::Extension(calls) => unsafe { calls.signal_semaphore(&info) },
        }
    }

    /// # Safety
    /// `info` names living timeline semaphores of `device`.
    unsafe fn wait(
        &self,
        device: &ash::Device,
        info: &vk::SemaphoreWaitInfo<'_>,
        timeout: u64,
    ) -> ash::prelude::VkResult<()> {
        match self {
            // SAFETY: by this function's contract.
            Calls::Core => unsafe { device.wait_semaphores(info, timeout) },
            // SAFETY: as above.
            Calls::Extension(calls) => unsafe { calls.wait_semaphores(info, timeout) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api,
        queue::{Queue, Timeline},
    };
    use allhands_contract::{DeviceId, Waited};
    use std::{sync::Arc, time::Instant};
    use wgpu_hal::Adapter as _;

    /// A device that waits with a bell, whatever the adapter is; none where there is no Vulkan.
    fn queue_with_bell() -> Option<(Arc<Gpu<Vulkan>>, Queue<Vulkan>)> {
        let exposed = api::adapters::<Vulkan>().first()?;
        let (features, limits) = (wgt::Features::IMMEDIATES, &exposed.capabilities.limits);
        // SAFETY: features and limits are no more than the adapter has.
        let open = unsafe { exposed.adapter.open(features, limits, &wgt::MemoryHints::MemoryUsage) }.unwrap();
        let gpu = Arc::new(Gpu::new(DeviceId::unique(), open, false).unwrap());
        assert!(gpu.bell().is_some());
        Some((gpu.clone(), Queue::new(gpu, true)))
    }

    #[test]
    fn a_wake_ends_a_wait_for_a_fence() {
        let Some((gpu, queue)) = queue_with_bell() else {
            return println!("not run: there is no Vulkan");
        };
        // A timeline semaphore may be waited for before it is submitted, so this wait has only the bell to end it.
        let timeline = Timeline::new(&gpu).unwrap();
        for wakes in 0..3 {
            let waiting = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    waiting.wait();
                    queue.wake();
                });
                waiting.wait();
                let reached = Vulkan::wait(&gpu, timeline.fence(), 1, wakes, Duration::MAX).unwrap();
                assert!(!reached);
            });
            assert_eq!(queue.wakes(), wakes + 1);
        }
    }

    #[test]
    fn a_submission_ends_it_too() {
        let Some((gpu, queue)) = queue_with_bell() else {
            return println!("not run: there is no Vulkan");
        };
        let timeline = Timeline::new(&gpu).unwrap();
        for value in [3, 4, 9] {
            queue.submit(&queue.turn(), None, &timeline, value).unwrap();
            let deadline = Instant::now() + Duration::from_secs(60);
            assert_eq!(queue.wait_any(&[(timeline.clone(), value)], 0, deadline).unwrap(), Waited::Reached);
            assert_eq!(timeline.value().unwrap(), value);
        }
    }
}
