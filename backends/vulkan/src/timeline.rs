//! Timelines: semaphores of Vulkan that hold a number. Ours, an app's, or another device's.
//!
//! One is made exportable only where the query for timelines grants it: to ask a driver that does not is, on one of
//! them, a crash.
use crate::{
    doors::Door,
    fd::{give, own},
    gpu::Gpu,
};
use allhands_contract::{Result, SharedTimeline};
use ash::vk;
use std::{
    any::Any,
    os::fd::AsFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// Where a timeline comes from.
pub(crate) enum Origin {
    Ours { shareable: bool },
    Imported,
    App { _owner: Option<Arc<dyn Any + Send + Sync>> },
}

pub(crate) struct Timeline {
    pub raw: vk::Semaphore,
    gpu: Arc<Gpu>,
    pub origin: Origin,
    /// The highest value submitted or signalled here. Held while the host signals.
    submitted: Mutex<u64>,
    /// The highest value seen.
    reached: AtomicU64,
    /// Whether an app has it too, and may signal it unseen.
    lent: AtomicBool,
}

impl Timeline {
    pub fn new(gpu: &Arc<Gpu>, shareable: bool) -> Result<Arc<Self>> {
        let passed = gpu.pass(Door::TimelineCreate);
        gpu.check("create a timeline", 0, passed)?;
        Self::make(gpu, shareable, Origin::Ours { shareable })
    }
    fn make(gpu: &Arc<Gpu>, exportable: bool, origin: Origin) -> Result<Arc<Self>> {
        let mut of_type = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let mut export =
            vk::ExportSemaphoreCreateInfo::default().handle_types(vk::ExternalSemaphoreHandleTypeFlags::OPAQUE_FD);
        let mut info = vk::SemaphoreCreateInfo::default().push_next(&mut of_type);
        if exportable {
            info = info.push_next(&mut export);
        }
        // SAFETY: the device has timeline semaphores, and exports them if that is asked: the caller looked.
        let raw = gpu.check("create a timeline", 0, unsafe { gpu.vk().create_semaphore(&info, None) })?;
        Ok(Arc::new(Timeline::over(gpu, raw, origin, 0)))
    }
    fn over(gpu: &Arc<Gpu>, raw: vk::Semaphore, origin: Origin, value: u64) -> Self {
        let (submitted, reached) = (Mutex::new(value), AtomicU64::new(value));
        Timeline { raw, gpu: gpu.clone(), origin, submitted, reached, lent: AtomicBool::new(false) }
    }
    /// An app's.
    ///
    /// # Safety
    /// `raw` is a timeline semaphore of the device, and lives as long as this.
    pub unsafe fn adopt(
        gpu: &Arc<Gpu>,
        raw: vk::Semaphore,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Arc<Self>> {
        let timeline = Timeline::over(gpu, raw, Origin::App { _owner: owner }, 0);
        *timeline.submitted.lock().unwrap_or_else(PoisonError::into_inner) = timeline.value()?;
        Ok(Arc::new(timeline))
    }

    /// Another device's, of the same driver.
    pub fn import(gpu: &Arc<Gpu>, shared: &SharedTimeline) -> Result<Arc<Self>> {
        const WHAT: &str = "import a timeline";
        if !same_driver(gpu, &shared.driver_uuid) {
            return Err(gpu.refused(WHAT, "it is another driver's, which alone understands it"));
        }
        let passed = gpu.pass(Door::TimelineImport);
        let lies = gpu.check(WHAT, 0, passed)?;
        let timeline = Self::make(gpu, false, Origin::Imported)?;
        if lies {
            return Ok(timeline);
        }
        let imported = give(gpu, WHAT, shared.fd.as_fd(), |fd| {
            let info = vk::ImportSemaphoreFdInfoKHR::default()
                .semaphore(timeline.raw)
                .handle_type(vk::ExternalSemaphoreHandleTypeFlags::OPAQUE_FD)
                .fd(fd);
            // SAFETY: the semaphore is new and unused, the descriptor open and the driver's to keep; imports of this
            // handle type are granted, the caller looked.
            unsafe { gpu.semaphore_fd().import_semaphore_fd(&info) }
        })?;
        gpu.check(WHAT, 0, imported)?;
        Ok(timeline)
    }
    /// For other devices of the same driver.
    pub fn export(&self) -> Result<SharedTimeline> {
        const WHAT: &str = "export a timeline";
        let gpu = &self.gpu;
        let passed = gpu.pass(Door::TimelineExport);
        gpu.check(WHAT, 0, passed)?;
        let info = vk::SemaphoreGetFdInfoKHR::default()
            .semaphore(self.raw)
            .handle_type(vk::ExternalSemaphoreHandleTypeFlags::OPAQUE_FD);
        // SAFETY: it was made exportable in this form: the caller looked.
        let fd = gpu.check(WHAT, 0, unsafe { gpu.semaphore_fd().get_semaphore_fd(&info) })?;
        let physical = &gpu.physical;
        Ok(SharedTimeline {
            from: gpu.id,
            fd: Arc::new(own(gpu, WHAT, fd)?),
            device_uuid: physical.device_uuid,
            driver_uuid: physical.driver_uuid,
        })
    }

    /// The value now.
    pub fn value(&self) -> Result<u64> {
        // SAFETY: the semaphore is a living timeline of this device.
        let answer = unsafe { self.gpu.vk().get_semaphore_counter_value(self.raw) };
        let value = self.gpu.check("read a timeline", 0, answer)?;
        Ok(self.reached.fetch_max(value, Ordering::AcqRel).max(value))
    }
    /// The highest value seen so far; costs nothing.
    pub fn reached(&self) -> u64 {
        self.reached.load(Ordering::Acquire)
    }
    pub fn is_at(&self, value: u64) -> Result<bool> {
        Ok(self.reached() >= value || self.value()? >= value)
    }
    pub fn submitted(&self) -> u64 {
        *self.submitted.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn set_submitted(&self, value: u64) {
        let mut submitted = self.submitted.lock().unwrap_or_else(PoisonError::into_inner);
        *submitted = value.max(*submitted);
    }
    /// Whether all that raises it goes through the device.
    pub fn is_ours(&self) -> bool {
        matches!(self.origin, Origin::Ours { .. }) && !self.lent.load(Ordering::Relaxed)
    }
    /// The handle, for an app.
    pub fn lend(&self) -> vk::Semaphore {
        self.lent.store(true, Ordering::Relaxed);
        self.raw
    }
    /// Whether it may be signalled here.
    pub fn check_ours(&self) -> Result<()> {
        match self.origin {
            Origin::Imported => Err(self.gpu.invalid("an imported timeline is signalled by the device that made it")),
            _ => Ok(()),
        }
    }

    /// Raises it from the host. What does not rise is refused before the driver sees it: some lose the device over it.
    pub fn signal(&self, value: u64) -> Result<()> {
        self.check_ours()?;
        let mut submitted = self.submitted.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.value()?;
        if *submitted > now {
            return Err(self.gpu.invalid(format!(
                "a signal of {value} at {now} by the host, while the queue has yet to signal {submitted}"
            )));
        }
        if value <= now {
            return Err(self.gpu.invalid(format!("a signal of {value} at {now}; timelines only rise")));
        }
        let info = vk::SemaphoreSignalInfo::default().semaphore(self.raw).value(value);
        // SAFETY: the semaphore is a living timeline of this device; the value is above its own, and no signal of it
        // is pending.
        self.gpu.check("signal a timeline", 0, unsafe { self.gpu.vk().signal_semaphore(&info) })?;
        *submitted = value;
        Ok(())
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        if !matches!(self.origin, Origin::App { .. }) && !self.gpu.is_abandoned() {
            // SAFETY: submissions and waits that name it own it while they last.
            unsafe { self.gpu.vk().destroy_semaphore(self.raw, None) }
        }
    }
}

/// Whether descriptors of a driver with this UUID are understood here. Drivers without a device have none.
pub(crate) fn same_driver(gpu: &Gpu, driver_uuid: &[u8; 16]) -> bool {
    *driver_uuid == gpu.physical.driver_uuid && *driver_uuid != [0; 16]
}
