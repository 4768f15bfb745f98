//! What an API adds to hal: its name, the process's one instance of it, and a wait that a wake can end.
use crate::{AdapterInfo, Backend, gpu::Gpu};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::OnceLock,
    time::Duration,
};
use wgpu_hal::{self as hal, Instance as _};
use wgpu_types as wgt;

/// What a call of hal returns.
pub(crate) type HalResult<R> = Result<R, hal::DeviceError>;

/// A hal API that a proxy device runs on.
pub(crate) trait ProxyApi: hal::Api {
    const BACKEND: Backend;
    /// Whether a submit does the work.
    const SUBMIT_BLOCKS: bool;
    /// The longest that one wait of hal may last.
    const LONGEST_WAIT: Duration;
    /// What a barrier ahead of copies is to name beside the copies' own usages.
    const BEFORE_COPIES: wgt::BufferUses;
    /// What a wake rings so that a wait under way ends.
    type Bell: Send + Sync;

    /// Where this API's instance and adapters are kept.
    fn system() -> &'static OnceLock<System<Self>>;
    /// Makes a buffer, and notices if there is no room for it.
    ///
    /// # Safety
    /// As for hal's `create_buffer`.
    unsafe fn create_buffer(device: &Self::Device, desc: &hal::BufferDescriptor<'_>) -> HalResult<Self::Buffer>;
    /// Makes a bell on an open device.
    fn make_bell(device: &Self::Device, software: bool) -> HalResult<Self::Bell>;
    /// Destroys it.
    ///
    /// # Safety
    /// Nobody waits on it, now or later.
    unsafe fn destroy_bell(device: &Self::Device, bell: &Self::Bell);
    /// Ends the waits that were given a `wakes` below this one. Each call has a higher `wakes`.
    fn ring(gpu: &Gpu<Self>, wakes: u64);
    /// Waits until `fence`, for which `value` has been submitted, reaches it (then true), the bell rings past
    /// `wakes`, or `timeout` is over, or for a shorter while.
    fn wait(gpu: &Gpu<Self>, fence: &Self::Fence, value: u64, wakes: u64, timeout: Duration) -> HalResult<bool>;
}

/// An API's instance and what it found. Lives as long as the process: drivers outlive badly what they are unloaded
/// under.
pub(crate) struct System<A: hal::Api> {
    pub adapters: Vec<hal::ExposedAdapter<A>>,
    // Adapters do not keep their instance alive in every API.
    _instance: Option<A::Instance>,
}

/// The adapters of an API. None where it has no loader or no driver.
pub(crate) fn adapters<A: ProxyApi>() -> &'static [hal::ExposedAdapter<A>] {
    &A::system().get_or_init(find).adapters
}

fn find<A: ProxyApi>() -> System<A> {
    let desc = hal::InstanceDescriptor {
        name: "allhands",
        flags: wgt::InstanceFlags::empty(),
        memory_budget_thresholds: wgt::MemoryBudgetThresholds::default(),
        backend_options: wgt::BackendOptions::default(),
        telemetry: None,
        display: None,
    };
    let found = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: hal asks nothing of `init`'s caller; the instance is kept with its adapters.
        let instance = unsafe { A::Instance::init(&desc) }?;
        // SAFETY: the instance is alive, and no surface is given.
        let adapters = unsafe { instance.enumerate_adapters(None) };
        Ok::<_, hal::InstanceError>((instance, adapters))
    }));
    match found {
        Ok(Ok((instance, adapters))) => System { adapters, _instance: Some(instance) },
        Ok(Err(why)) => {
            log::info!("{}: {why}", A::BACKEND.name());
            System { adapters: Vec::new(), _instance: None }
        }
        Err(_) => {
            log::warn!("{}: looking for adapters panicked; there are none", A::BACKEND.name());
            System { adapters: Vec::new(), _instance: None }
        }
    }
}

/// What [`crate::adapters`] returns.
pub(crate) fn infos<A: ProxyApi>() -> Vec<AdapterInfo> {
    adapters::<A>()
        .iter()
        .enumerate()
        .map(|(index, exposed)| AdapterInfo {
            backend: A::BACKEND,
            index,
            name: exposed.info.name.clone(),
            driver: [&*exposed.info.driver, &*exposed.info.driver_info].join(" ").trim().to_string(),
            software: exposed.info.device_type == wgt::DeviceType::Cpu,
        })
        .collect()
}
