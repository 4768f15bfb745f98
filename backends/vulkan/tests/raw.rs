//! A device over an app's own Vulkan objects: its queue behind its lock, its buffers, its timelines.
use allhands_contract::*;
use allhands_vulkan::{
    QueueLock, RawHandles, VulkanDevice, adapters,
    ash::{self, khr, vk},
};
use std::{
    any::Any,
    ffi::CString,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

mod common;
use common::*;

const SIZE: usize = 16_384;

/// A lock that counts how often it is taken.
#[derive(Default)]
struct Counted(Mutex<()>, AtomicU64);

impl QueueLock for Counted {
    fn with(&self, f: &mut dyn FnMut()) {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.with(f);
    }
}

/// What an app has.
struct App {
    entry: ash::Entry,
    instance: ash::Instance,
    physical: vk::PhysicalDevice,
    device: ash::Device,
    queue: vk::Queue,
    family: u32,
    software: bool,
    extensions: Vec<CString>,
    lock: Arc<Counted>,
    gone: Arc<AtomicBool>,
}

impl App {
    /// On the first physical device; none without one.
    fn new(index: usize) -> Arc<App> {
        // SAFETY, here and below: handles are used with what they were made of, while it lives; structures outlive the
        // calls they are passed to; nothing is used by two threads at once.
        unsafe {
            let entry = ash::Entry::load().unwrap();
            let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_2);
            let instance =
                entry.create_instance(&vk::InstanceCreateInfo::default().application_info(&application), None).unwrap();
            let physical = instance.enumerate_physical_devices().unwrap()[index];
            let kind = instance.get_physical_device_properties(physical).device_type;
            let software = kind == vk::PhysicalDeviceType::CPU;
            let family = instance
                .get_physical_device_queue_family_properties(physical)
                .iter()
                .position(|f| f.queue_flags.contains(vk::QueueFlags::COMPUTE))
                .unwrap() as u32;
            let has = instance.enumerate_device_extension_properties(physical).unwrap();
            let extensions: Vec<CString> = [khr::external_memory_fd::NAME, ash::ext::external_memory_host::NAME]
                .into_iter()
                .filter(|name| has.iter().any(|e| e.extension_name_as_c_str() == Ok(name)))
                .map(CString::from)
                .collect();
            let names: Vec<_> = extensions.iter().map(|e| e.as_ptr()).collect();
            let queues = [vk::DeviceQueueCreateInfo::default().queue_family_index(family).queue_priorities(&[1.0])];
            let mut features = vk::PhysicalDeviceVulkan12Features::default().timeline_semaphore(true);
            let info = vk::DeviceCreateInfo::default()
                .queue_create_infos(&queues)
                .enabled_extension_names(&names)
                .push_next(&mut features);
            let device = instance.create_device(physical, &info, None).unwrap();
            let queue = device.get_device_queue(family, 0);
            let (lock, gone) = Default::default();
            Arc::new(App { entry, instance, physical, device, queue, family, software, extensions, lock, gone })
        }
    }
    fn lend(self: &Arc<Self>, owner: bool) -> Arc<VulkanDevice> {
        let handles = RawHandles {
            entry: self.entry.clone(),
            instance: self.instance.clone(),
            physical: self.physical,
            device: self.device.clone(),
            queue: self.queue,
            family: self.family,
            extensions: self.extensions.clone(),
            bits64: (false, false),
            lock: self.lock.clone(),
            owner: owner.then(|| self.clone() as Arc<dyn Any + Send + Sync>),
        };
        // SAFETY: the handles belong together, have what is asked, and live as long as the owner, or as the test
        // sees to.
        unsafe { VulkanDevice::from_raw(handles) }.unwrap_or_else(|e| panic!("{e}"))
    }
    /// A buffer with memory.
    fn buffer(&self) -> (vk::Buffer, vk::DeviceMemory) {
        // SAFETY: as in `new`.
        unsafe {
            let usage = vk::BufferUsageFlags::TRANSFER_SRC
                | vk::BufferUsageFlags::TRANSFER_DST
                | vk::BufferUsageFlags::STORAGE_BUFFER;
            let info = vk::BufferCreateInfo::default().size(SIZE as u64).usage(usage);
            let buffer = self.device.create_buffer(&info, None).unwrap();
            let needs = self.device.get_buffer_memory_requirements(buffer);
            let info = vk::MemoryAllocateInfo::default()
                .allocation_size(needs.size)
                .memory_type_index(needs.memory_type_bits.trailing_zeros());
            let memory = self.device.allocate_memory(&info, None).unwrap();
            self.device.bind_buffer_memory(buffer, memory, 0).unwrap();
            (buffer, memory)
        }
    }
    fn destroy(&self, (buffer, memory): (vk::Buffer, vk::DeviceMemory)) {
        // SAFETY: as in `new`; nothing that was submitted uses them.
        unsafe {
            self.device.destroy_buffer(buffer, None);
            self.device.free_memory(memory, None);
        }
    }
    fn semaphore(&self, value: u64) -> vk::Semaphore {
        let mut of_type =
            vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE).initial_value(value);
        // SAFETY: as in `new`.
        unsafe { self.device.create_semaphore(&vk::SemaphoreCreateInfo::default().push_next(&mut of_type), None) }
            .unwrap()
    }
}

impl Drop for App {
    fn drop(&mut self) {
        // SAFETY: nothing of it is used any more.
        unsafe {
            self.device.destroy_device(None);
            self.instance.destroy_instance(None);
        }
        self.gone.store(true, Ordering::Release);
    }
}

fn with_apps(test: impl Fn(Arc<App>)) {
    adapters().iter().for_each(|adapter| test(App::new(adapter.index)));
}

#[test]
fn a_lent_device_conforms_and_takes_the_lock_for_submits_alone() {
    with_apps(|app| {
        let device = app.lend(true);
        let before = (app.lock.1.load(Ordering::Relaxed), device.counters());
        run(&*device, &[]);
        let after = (app.lock.1.load(Ordering::Relaxed), device.counters());
        assert_eq!((after.0 - before.0, after.1.submits - before.1.submits), (1, 1));
        let device: Arc<dyn Device> = device;
        let mut failed = Vec::new();
        let gates = ["what_waits_at_a_gate_outlives_its_handles"];
        conformance::run_all(&device, |test, outcome| {
            // Where memory of the device is staged and the app has lent its only queue, the host's writes wait there.
            if let (Err(why), false) = (outcome, gates.contains(&test)) {
                failed.push(format!("{test}: {why}"));
            }
        });
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    });
}

#[test]
fn either_may_be_dropped_first() {
    with_apps(|app| {
        let gone = app.gone.clone();
        // The app keeps itself.
        let device = app.lend(false);
        let sibling = device.sibling().unwrap();
        run(&*sibling, &[]);
        drop(device);
        drop(sibling);
        assert!(!gone.load(Ordering::Acquire));
        // The device keeps the app, and so do its sibling and pages that came of it.
        let device = app.lend(true);
        let sibling = device.sibling().unwrap();
        drop(app);
        run(&*device, &[]);
        drop(device);
        assert!(!gone.load(Ordering::Acquire));
        run(&*sibling, &[]);
        drop(sibling);
        assert!(gone.load(Ordering::Acquire));
    });
}

#[test]
fn adopted_buffers_and_timelines_are_used_and_left_alone() {
    with_apps(|app| {
        for buffer_first in [true, false] {
            let device = app.lend(false);
            let (theirs, semaphore) = (app.buffer(), app.semaphore(41));
            // SAFETY: both are the app's, are made for it, and are destroyed below after they were given back.
            let (adopted, timeline) = unsafe {
                let adopted = device.adopt_buffer(theirs.0, SIZE as u64, None).unwrap();
                (adopted, device.adopt_timeline(semaphore, None).unwrap())
            };
            assert_eq!(device.value(timeline), Ok(41));
            assert_eq!((device.raw_buffer(adopted), device.raw_timeline(timeline)), (Ok(theirs.0), Ok(semaphore)));
            device.write(whole(&*device, adopted), &pattern(1, SIZE)).unwrap();
            let ours = buffer(&*device, SIZE, Memory::Device, false);
            let ops = [Op::Copy { src: whole(&*device, adopted), dst: whole(&*device, ours) }];
            let commands = device.prepare(&ops).unwrap();
            let (low, signal) = (Point { timeline, value: 41 }, Point { timeline, value: 42 });
            let submission = |signal| Submission { commands: Some(commands), waits: &[], signal };
            assert!(matches!(device.submit(&[submission(low)]), Err(Error::Invalid { .. })));
            device.submit(&[submission(signal)]).unwrap();
            wait(&*device, signal);
            // SAFETY: the semaphore is the app's.
            assert_eq!(unsafe { app.device.get_semaphore_counter_value(semaphore) }, Ok(42));
            assert!(read(&*device, ours) == pattern(1, SIZE));
            device.signal(Point { timeline, value: 50 }).unwrap();
            if buffer_first {
                device.destroy_commands(commands);
                device.destroy_buffer(adopted);
                device.destroy_timeline(timeline);
                app.destroy(theirs);
                // SAFETY: nothing uses it any more.
                unsafe { app.device.destroy_semaphore(semaphore, None) };
                drop(device);
            } else {
                drop(device);
                app.destroy(theirs);
                // SAFETY: as above.
                unsafe { app.device.destroy_semaphore(semaphore, None) };
            }
        }
    });
}

#[test]
fn an_owner_is_kept_while_its_buffer_is_used() {
    with_apps(|app| {
        let device = app.lend(false);
        let theirs = app.buffer();
        let owner = Arc::new(());
        // SAFETY: the buffer is destroyed at the end.
        let adopted = unsafe { device.adopt_buffer(theirs.0, SIZE as u64, Some(owner.clone())) }.unwrap();
        let ours = buffer(&*device, SIZE, Memory::Device, false);
        let ops = [Op::Copy { src: whole(&*device, ours), dst: whole(&*device, adopted) }];
        let commands = device.prepare(&ops).unwrap();
        device.destroy_buffer(adopted);
        assert_eq!(Arc::strong_count(&owner), 2, "the commands keep it");
        device.destroy_commands(commands);
        assert_eq!(Arc::strong_count(&owner), 1);
        drop(device);
        app.destroy(theirs);
    });
}

/// A driver may give a new buffer the value that a destroyed one had; what was prepared for the old one, or names it,
/// must not reach the new one.
#[test]
fn a_handle_value_that_comes_back_is_not_written_through_the_old_buffer() {
    with_apps(|app| {
        let device = app.lend(false);
        let ours = buffer(&*device, SIZE, Memory::Device, false);
        device.write(whole(&*device, ours), &pattern(1, SIZE)).unwrap();
        let old = app.buffer();
        // SAFETY: it is given back below, before it is destroyed.
        let adopted = unsafe { device.adopt_buffer(old.0, SIZE as u64, None) }.unwrap();
        let range = whole(&*device, adopted);
        let ops = [Op::Copy { src: whole(&*device, ours), dst: range }];
        let commands = device.prepare(&ops).unwrap();
        device.destroy_buffer(adopted);
        app.destroy(old);
        // The same value, which software drivers take from the allocator, unless a layer numbers handles itself.
        let mut new = vec![app.buffer()];
        while new.last().is_some_and(|b| b.0 != old.0) && new.len() < 1_000 {
            new.push(app.buffer());
        }
        let reused = new[new.len() - 1];
        let set = |name| std::env::var(name).is_ok_and(|v| !v.is_empty());
        let numbered = set("VK_INSTANCE_LAYERS") && !set("VK_LAYER_UNIQUE_HANDLES");
        println!("  the value came back: {}", reused.0 == old.0);
        assert!(reused.0 == old.0 || numbered || !app.software, "the test did not provoke what it is about");
        // SAFETY: it is given back below, before it is destroyed.
        let fresh = unsafe { device.adopt_buffer(reused.0, SIZE as u64, None) }.unwrap();
        device.write(whole(&*device, fresh), &pattern(2, SIZE)).unwrap();
        let timeline = device.create_timeline(false).unwrap();
        let signal = Point { timeline, value: 1 };
        let stale = |result: Result<()>| assert!(matches!(result, Err(Error::Stale { .. })), "{result:?}");
        stale(device.submit(&[Submission { commands: Some(commands), waits: &[], signal }]));
        stale(device.prepare(&ops).map(drop));
        stale(device.write(range, &pattern(3, SIZE)));
        run(&*device, &[]);
        assert!(read(&*device, fresh) == pattern(2, SIZE), "the new buffer holds what was written to it");
        drop(device);
        new.into_iter().for_each(|b| app.destroy(b));
    });
}
