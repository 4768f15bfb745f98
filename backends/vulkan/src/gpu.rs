//! An open VkDevice and its queue, ours or an app's. All calls into the driver go through here and are counted; what
//! the driver answers becomes an [`Error`]; a loss is kept, and everything asked after it gets the same answer.
//! Whatever is made on the device keeps it alive, so it is destroyed last.
use crate::{
    doors::{Door, Doors},
    instance::{Instance, Physical, dotted},
    pipelines::Pipelines,
};
use allhands_contract::{DeviceId, Error, Result, SharedKind};
use ash::{ext, khr, prelude::VkResult, vk};
use gpu_allocator::{
    AllocationSizes,
    vulkan::{Allocator, AllocatorCreateDesc},
};
use std::{
    any::Any,
    ffi::{CStr, CString},
    mem::ManuallyDrop,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// The lock that an app takes around its own submits to a queue that it lends. It is held around ours, and around
/// nothing else.
pub trait QueueLock: Send + Sync {
    /// Calls `f` while holding the lock.
    fn with(&self, f: &mut dyn FnMut());
}

impl QueueLock for Mutex<()> {
    fn with(&self, f: &mut dyn FnMut()) {
        let _held = self.lock().unwrap_or_else(PoisonError::into_inner);
        f();
    }
}

/// Vulkan objects that an app owns and lends: see [`VulkanDevice::from_raw`](crate::VulkanDevice::from_raw).
pub struct RawHandles {
    /// The loader.
    pub entry: ash::Entry,
    /// The instance, made for Vulkan 1.2 or later.
    pub instance: ash::Instance,
    /// The physical device.
    pub physical: vk::PhysicalDevice,
    /// The device.
    pub device: ash::Device,
    /// A queue of the device.
    pub queue: vk::Queue,
    /// The queue's family.
    pub family: u32,
    /// The extensions that the device was made with.
    pub extensions: Vec<CString>,
    /// Whether it was made with the features `shaderInt64` and `shaderFloat64`: without them there are no kernels for
    /// types of 64 bits.
    pub bits64: (bool, bool),
    /// Taken around vkQueueSubmit.
    pub lock: Arc<dyn QueueLock>,
    /// Dropped when nothing here uses the objects any more.
    pub owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// How one kind of file descriptor crosses.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Crossing {
    pub export: bool,
    pub import: bool,
    /// Whether the allocation must be made for one buffer.
    pub dedicated: bool,
}

/// What the device's extensions and queries grant.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Caps {
    pub opaque_fd: Crossing,
    pub dma_buf: Crossing,
    pub host_import: bool,
    pub timeline: Crossing,
    /// VK_QUEUE_FAMILY_FOREIGN_EXT may be named.
    pub foreign: bool,
    /// What exportable memory is made for: kinds that one allocation can leave as.
    pub export_types: vk::ExternalMemoryHandleTypeFlags,
}

/// What every buffer of ours is made for.
pub(crate) const USAGE: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::TRANSFER_SRC.as_raw()
        | vk::BufferUsageFlags::TRANSFER_DST.as_raw()
        | vk::BufferUsageFlags::STORAGE_BUFFER.as_raw(),
);

/// The handle type of a file descriptor.
pub(crate) fn handle_type(kind: SharedKind) -> vk::ExternalMemoryHandleTypeFlags {
    match kind {
        SharedKind::DmaBuf => vk::ExternalMemoryHandleTypeFlags::DMA_BUF_EXT,
        SharedKind::OpaqueFd => vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD,
        SharedKind::Host => vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT,
    }
}

impl Caps {
    fn of(instance: &ash::Instance, physical: &Physical, has: impl Fn(&CStr) -> bool) -> Self {
        let buffers = |kind| {
            let info = vk::PhysicalDeviceExternalBufferInfo::default().usage(USAGE).handle_type(handle_type(kind));
            let mut answer = vk::ExternalBufferProperties::default();
            // SAFETY: the physical device is of this instance and has Vulkan 1.1.
            unsafe { instance.get_physical_device_external_buffer_properties(physical.handle, &info, &mut answer) };
            answer.external_memory_properties
        };
        let crossing = |p: vk::ExternalMemoryProperties| {
            let has = |flag| p.external_memory_features.contains(flag);
            Crossing {
                export: has(vk::ExternalMemoryFeatureFlags::EXPORTABLE),
                import: has(vk::ExternalMemoryFeatureFlags::IMPORTABLE),
                dedicated: has(vk::ExternalMemoryFeatureFlags::DEDICATED_ONLY),
            }
        };
        let mut caps = Caps { foreign: has(ext::queue_family_foreign::NAME), ..Caps::default() };
        let mut compatible = vk::ExternalMemoryHandleTypeFlags::empty();
        if has(khr::external_memory_fd::NAME) {
            let opaque = buffers(SharedKind::OpaqueFd);
            compatible = opaque.compatible_handle_types;
            caps.opaque_fd = crossing(opaque);
            if has(ext::external_memory_dma_buf::NAME) {
                caps.dma_buf = crossing(buffers(SharedKind::DmaBuf));
            }
        }
        // One allocation leaves in both forms only where they are compatible; dma-bufs serve every driver.
        let (opaque, dma_buf) = (handle_type(SharedKind::OpaqueFd), handle_type(SharedKind::DmaBuf));
        caps.export_types = match (caps.dma_buf.export, caps.opaque_fd.export) {
            (true, true) if compatible.contains(dma_buf) => opaque | dma_buf,
            (true, _) => dma_buf,
            (false, true) => opaque,
            (false, false) => vk::ExternalMemoryHandleTypeFlags::empty(),
        };
        // SwiftShader imports host pages, and says that it does not.
        caps.host_import = has(ext::external_memory_host::NAME)
            && physical.host_alignment.is_power_of_two()
            && (physical.driver_id == vk::DriverId::GOOGLE_SWIFTSHADER || crossing(buffers(SharedKind::Host)).import);
        if has(khr::external_semaphore_fd::NAME) {
            let mut of_type = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
            let info = vk::PhysicalDeviceExternalSemaphoreInfo::default()
                .handle_type(vk::ExternalSemaphoreHandleTypeFlags::OPAQUE_FD)
                .push_next(&mut of_type);
            let mut answer = vk::ExternalSemaphoreProperties::default();
            // SAFETY: as above, and it has timeline semaphores: that was looked at before.
            unsafe { instance.get_physical_device_external_semaphore_properties(physical.handle, &info, &mut answer) };
            let has = |flag| answer.external_semaphore_features.contains(flag);
            caps.timeline.export = has(vk::ExternalSemaphoreFeatureFlags::EXPORTABLE);
            caps.timeline.import = has(vk::ExternalSemaphoreFeatureFlags::IMPORTABLE);
        }
        caps
    }
    /// How memory leaves.
    pub fn exports(&self) -> Vec<SharedKind> {
        let fds = [SharedKind::DmaBuf, SharedKind::OpaqueFd];
        fds.into_iter().filter(|k| self.export_types.contains(handle_type(*k))).chain([SharedKind::Host]).collect()
    }
    /// How memory comes in.
    pub fn imports(&self) -> Vec<SharedKind> {
        let kinds = [
            (SharedKind::DmaBuf, self.dma_buf.import),
            (SharedKind::OpaqueFd, self.opaque_fd.import),
            (SharedKind::Host, self.host_import),
        ];
        kinds.into_iter().filter_map(|(kind, can)| can.then_some(kind)).collect()
    }
}

pub(crate) struct Gpu {
    pub id: DeviceId,
    pub physical: Physical,
    pub instance: Arc<Instance>,
    pub caps: Caps,
    pub family: u32,
    pub doors: Arc<Doors>,
    pub pipelines: Pipelines,
    /// Bytes of its buffers.
    pub allocated: AtomicU64,
    pub calls: AtomicU64,
    pub owner: Option<Arc<dyn Any + Send + Sync>>,
    /// Command buffers are made, recorded and freed under this lock.
    pub pool: Mutex<vk::CommandPool>,
    pub allocator: ManuallyDrop<Mutex<Allocator>>,
    memory_fd: khr::external_memory_fd::Device,
    semaphore_fd: khr::external_semaphore_fd::Device,
    memory_host: ext::external_memory_host::Device,
    device: ash::Device,
    queue: vk::Queue,
    /// Another queue of the family, on which reads and writes of the host pass what waits at a gate.
    side: Option<vk::Queue>,
    /// Held around a submit to either: some drivers do not stand two at once.
    lock: Arc<dyn QueueLock>,
    /// Whether the VkDevice is destroyed with this.
    owned: bool,
    lost: OnceLock<String>,
    abandoned: AtomicBool,
}

/// Which extensions a device of ours is made with, where it has them.
const WANTED: [&CStr; 5] = [
    khr::external_memory_fd::NAME,
    ext::external_memory_dma_buf::NAME,
    ext::external_memory_host::NAME,
    ext::queue_family_foreign::NAME,
    khr::external_semaphore_fd::NAME,
];

fn refuse(physical: &Physical, why: impl std::fmt::Display) -> Error {
    Error::Open { what: format!("vulkan:{} ({}) could not be opened: {why}", physical.index, physical.name) }
}

/// What a physical device lacks for kernels, if anything.
fn lacks(physical: &Physical) -> Option<&'static str> {
    use allhands_contract::kernels::{BINDINGS, PARAMS_SIZE, WORKGROUP};
    let limits = &physical.limits;
    let needs = [
        (limits.max_push_constants_size >= PARAMS_SIZE, "room for a kernel's parameters"),
        (limits.max_per_stage_descriptor_storage_buffers >= BINDINGS as u32, "four storage buffers"),
        (limits.max_compute_work_group_invocations >= WORKGROUP, "workgroups of 256"),
        (limits.max_compute_work_group_size[0] >= WORKGROUP, "workgroups of 256"),
    ];
    needs.into_iter().find_map(|(holds, what)| (!holds).then_some(what))
}

/// Makes a VkDevice with two queues of a family, or one where there are no two, and the wanted extensions.
pub(crate) fn make_device(instance: &Instance, physical: &Physical) -> Result<(ash::Device, u32, Vec<&'static CStr>)> {
    if physical.api < vk::API_VERSION_1_2 {
        return Err(refuse(physical, format_args!("it speaks Vulkan {}; 1.2 is needed", dotted(physical.api))));
    }
    if let Some(what) = lacks(physical) {
        return Err(refuse(physical, format_args!("it lacks {what}")));
    }
    let Some(family) = physical.family() else { return Err(refuse(physical, "it has no queue that computes")) };
    let enabled: Vec<&CStr> = WANTED.into_iter().filter(|e| physical.has(e)).collect();
    let names: Vec<*const std::ffi::c_char> = enabled.iter().map(|e| e.as_ptr()).collect();
    let priorities = [1.0; 2];
    let priorities = &priorities[..queues_of(physical, family)];
    let queues = [vk::DeviceQueueCreateInfo::default().queue_family_index(family).queue_priorities(priorities)];
    let mut features = vk::PhysicalDeviceVulkan12Features::default().timeline_semaphore(physical.timelines);
    let shaders = vk::PhysicalDeviceFeatures::default().shader_int64(physical.int64).shader_float64(physical.float64);
    let info = vk::DeviceCreateInfo::default()
        .queue_create_infos(&queues)
        .enabled_features(&shaders)
        .enabled_extension_names(&names)
        .push_next(&mut features);
    // SAFETY: `info` and what it points to outlive the call; extensions, feature and family are ones it has.
    let device = unsafe { instance.raw.create_device(physical.handle, &info, None) };
    Ok((device.map_err(|e| refuse(physical, format_args!("vkCreateDevice: {e:?}")))?, family, enabled))
}

/// How many queues of a family are taken.
fn queues_of(physical: &Physical, family: u32) -> usize {
    (physical.families[family as usize].queue_count as usize).min(2)
}

impl Gpu {
    /// A device of our own. `owner` keeps the instance, if that is an app's.
    pub fn open(
        instance: Arc<Instance>,
        physical: Physical,
        doors: Arc<Doors>,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Arc<Self>> {
        let lacking = [
            (physical.api >= vk::API_VERSION_1_2 && !physical.timelines, "it lacks timeline semaphores"),
            (physical.memory.memory_type_count == 0, "it has no memory: a driver without a device"),
        ];
        if let Some((_, why)) = lacking.iter().find(|(lacks, _)| *lacks) {
            return Err(refuse(&physical, why));
        }
        let (device, family, enabled) = make_device(&instance, &physical)?;
        // SAFETY: the device was made with so many queues of that family.
        let queue = |i| unsafe { device.get_device_queue(family, i) };
        let (queue, side) = (queue(0), (queues_of(&physical, family) > 1).then(|| queue(1)));
        let raw = Raw { device, queue, side, family, lock: Arc::new(Mutex::new(())), owned: true, owner };
        Self::new(instance, physical, raw, &enabled, doors)
    }

    /// # Safety
    /// As [`VulkanDevice::from_raw`](crate::VulkanDevice::from_raw).
    pub unsafe fn from_raw(handles: RawHandles, doors: Arc<Doors>) -> Result<Arc<Self>> {
        let RawHandles { entry, instance, physical, device, queue, family, extensions, bits64, lock, owner } = handles;
        let mut physical = Physical::of(&instance, physical, 0);
        (physical.int64, physical.float64) = (physical.int64 && bits64.0, physical.float64 && bits64.1);
        if let Some(what) = lacks(&physical) {
            return Err(refuse(&physical, format_args!("it lacks {what}")));
        }
        let raw = Raw { device, queue, side: None, family, lock, owned: false, owner };
        let enabled: Vec<&CStr> = extensions.iter().map(|e| &**e).collect();
        Self::new(Instance::lent(entry, instance), physical, raw, &enabled, doors)
    }

    fn new(
        instance: Arc<Instance>,
        physical: Physical,
        raw: Raw,
        enabled: &[&CStr],
        doors: Arc<Doors>,
    ) -> Result<Arc<Self>> {
        let caps = Caps::of(&instance.raw, &physical, |name| enabled.contains(&name));
        let Raw { device, queue, side, family, lock, owned, owner } = raw;
        let made = make_parts(&instance, &physical, &device, family);
        let (allocator, pool, pipelines) = match made {
            Ok(parts) => parts,
            Err(why) => {
                if owned {
                    // SAFETY: what was made on it is destroyed.
                    unsafe { device.destroy_device(None) };
                }
                return Err(refuse(&physical, why));
            }
        };
        Ok(Arc::new(Gpu {
            id: DeviceId::unique(),
            caps,
            family,
            doors,
            pipelines,
            allocated: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            owner,
            pool: Mutex::new(pool),
            allocator: ManuallyDrop::new(Mutex::new(allocator)),
            memory_fd: khr::external_memory_fd::Device::new(&instance.raw, &device),
            semaphore_fd: khr::external_semaphore_fd::Device::new(&instance.raw, &device),
            memory_host: ext::external_memory_host::Device::new(&instance.raw, &device),
            device,
            queue,
            side,
            lock,
            owned,
            lost: OnceLock::new(),
            abandoned: AtomicBool::new(false),
            instance,
            physical,
        }))
    }

    /// The device, for one call, which is counted.
    pub fn vk(&self) -> &ash::Device {
        self.calls.fetch_add(1, Ordering::Relaxed);
        &self.device
    }
    /// The calls of VK_KHR_external_memory_fd, for one call. Only where [`Caps`] grants one.
    pub fn memory_fd(&self) -> &khr::external_memory_fd::Device {
        self.calls.fetch_add(1, Ordering::Relaxed);
        &self.memory_fd
    }
    /// The calls of VK_KHR_external_semaphore_fd, for one call. Only where [`Caps`] grants one.
    pub fn semaphore_fd(&self) -> &khr::external_semaphore_fd::Device {
        self.calls.fetch_add(1, Ordering::Relaxed);
        &self.semaphore_fd
    }
    /// The calls of VK_EXT_external_memory_host, for one call. Only where [`Caps`] grants one.
    pub fn memory_host(&self) -> &ext::external_memory_host::Device {
        self.calls.fetch_add(1, Ordering::Relaxed);
        &self.memory_host
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
    /// Goes through a door of the tests; whether what comes after is to lie.
    pub fn pass(&self, door: Door) -> VkResult<bool> {
        self.doors.pass(door)
    }
    /// What a driver's answer means: out of memory (for `bytes`), a loss, or a refusal.
    pub fn check<T>(&self, what: &'static str, bytes: u64, answer: VkResult<T>) -> Result<T> {
        answer.map_err(|e| match e {
            vk::Result::ERROR_OUT_OF_DEVICE_MEMORY | vk::Result::ERROR_OUT_OF_HOST_MEMORY => {
                Error::OutOfMemory { device: self.id, bytes }
            }
            vk::Result::ERROR_DEVICE_LOST => self.lose(format!("its driver said so when asked to {what}")),
            e => self.refused(what, format!("its driver said {e:?}")),
        })
    }
    pub fn refused(&self, what: &'static str, why: impl Into<String>) -> Error {
        Error::Refused { device: self.id, what, why: why.into() }
    }
    pub fn invalid(&self, what: impl Into<String>) -> Error {
        Error::Invalid { device: self.id, what: what.into() }
    }

    /// The queue for the host's reads and writes, if there is another than the main one.
    pub fn side(&self) -> Option<vk::Queue> {
        self.side
    }
    pub fn queue(&self) -> vk::Queue {
        self.queue
    }
    /// Submits to one of the queues, under the lock.
    ///
    /// # Safety
    /// `infos` are valid for the queue, and what they name lives until they have completed.
    pub unsafe fn queue_submit(&self, queue: vk::Queue, infos: &[vk::SubmitInfo<'_>]) -> VkResult<()> {
        self.pass(Door::Submit)?;
        let mut answer = Ok(());
        // SAFETY: by this function's contract; whoever else uses the queues, here or in an app, holds the lock.
        self.lock.with(&mut || answer = unsafe { self.vk().queue_submit(queue, infos, vk::Fence::null()) });
        answer
    }

    /// From now on nothing is destroyed any more: work that does not end may still use it.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }
}

/// What a device is made from.
struct Raw {
    device: ash::Device,
    queue: vk::Queue,
    side: Option<vk::Queue>,
    family: u32,
    lock: Arc<dyn QueueLock>,
    owned: bool,
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

type Parts = (Allocator, vk::CommandPool, Pipelines);

fn make_parts(
    instance: &Instance,
    physical: &Physical,
    device: &ash::Device,
    family: u32,
) -> std::result::Result<Parts, String> {
    let allocator = Allocator::new(&AllocatorCreateDesc {
        instance: instance.raw.clone(),
        device: device.clone(),
        physical_device: physical.handle,
        debug_settings: Default::default(),
        buffer_device_address: false,
        allocation_sizes: AllocationSizes::new(64 << 20, 16 << 20),
    })
    .map_err(|e| e.to_string())?;
    // SAFETY: the device has a queue of that family.
    let pool =
        unsafe { device.create_command_pool(&vk::CommandPoolCreateInfo::default().queue_family_index(family), None) }
            .map_err(|e| format!("vkCreateCommandPool: {e:?}"))?;
    match Pipelines::new(device, physical.floats) {
        Ok(pipelines) => Ok((allocator, pool, pipelines)),
        Err(why) => {
            // SAFETY: nothing was made of it.
            unsafe { device.destroy_command_pool(pool, None) };
            Err(why)
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.is_abandoned() {
            // The device stays, and so does what it was made from.
            std::mem::forget((self.instance.clone(), self.owner.clone()));
            return;
        }
        let pool = *self.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: whatever was submitted has completed and whatever was made on the device is destroyed, because each
        // keeps this value alive; the allocator is dropped once, before its device.
        unsafe {
            ManuallyDrop::drop(&mut self.allocator);
            self.pipelines.destroy(&self.device);
            self.device.destroy_command_pool(pool, None);
            if self.owned {
                self.device.destroy_device(None);
            }
        }
    }
}
