//! The canary of the validation runs: Vulkan work with a barrier left out on purpose, which a watching validation layer
//! must report. Should it stay silent, then its silence about the library means nothing either.
//!
//! `validation_canary within` leaves a barrier out inside one command buffer, `across` between two submissions to one
//! queue, and `clean` leaves none out, so nothing may be reported. Exit 0: the work ran, whatever a layer said of it.

use ash::vk;
use std::error::Error;

const SIZE: vk::DeviceSize = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let mode = std::env::args().nth(1).unwrap_or_default();
    if !["clean", "within", "across"].contains(&mode.as_str()) {
        return Err("say which barrier to leave out: clean, within or across".into());
    }
    // SAFETY: the loader that the system's search path names is a Vulkan loader.
    let entry = unsafe { ash::Entry::load() }?;
    let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_1);
    let info = vk::InstanceCreateInfo::default().application_info(&application);
    // SAFETY: `info` and what it points to outlive the call.
    let instance = unsafe { entry.create_instance(&info, None) }?;
    // SAFETY: the instance lives until after the call, and nothing made from it outlives the call.
    let outcome = unsafe { run(&instance, &mode) };
    // SAFETY: `run` destroyed all that it made of the instance.
    unsafe { instance.destroy_instance(None) };
    outcome
}

/// Fills one buffer and copies it to another.
///
/// # Safety
/// `instance` is valid.
unsafe fn run(instance: &ash::Instance, mode: &str) -> Result<(), Box<dyn Error>> {
    // SAFETY, here and below: every handle was made by the device or instance it is used with and is still alive, each
    // structure outlives the call it is passed to, and the queue is used and idled by this thread alone. The missing
    // barrier makes the copied bytes unspecified, and nobody reads them.
    unsafe {
        let physical = *instance.enumerate_physical_devices()?.first().ok_or("no Vulkan device")?;
        let name = instance.get_physical_device_properties(physical);
        println!("{mode} on {}", name.device_name_as_c_str()?.to_string_lossy());
        let family = instance
            .get_physical_device_queue_family_properties(physical)
            .iter()
            .position(|f| f.queue_flags.intersects(vk::QueueFlags::COMPUTE | vk::QueueFlags::GRAPHICS))
            .ok_or("no queue that fills buffers")? as u32;
        let queues = [vk::DeviceQueueCreateInfo::default().queue_family_index(family).queue_priorities(&[1.0])];
        let device =
            instance.create_device(physical, &vk::DeviceCreateInfo::default().queue_create_infos(&queues), None)?;
        let queue = device.get_device_queue(family, 0);

        let usage = vk::BufferUsageFlags::TRANSFER_SRC | vk::BufferUsageFlags::TRANSFER_DST;
        let description = vk::BufferCreateInfo::default().size(SIZE).usage(usage);
        let buffers = [device.create_buffer(&description, None)?, device.create_buffer(&description, None)?];
        let mut memories = Vec::new();
        for buffer in buffers {
            let needs = device.get_buffer_memory_requirements(buffer);
            let allocation = vk::MemoryAllocateInfo::default()
                .allocation_size(needs.size)
                .memory_type_index(needs.memory_type_bits.trailing_zeros());
            let memory = device.allocate_memory(&allocation, None)?;
            device.bind_buffer_memory(buffer, memory, 0)?;
            memories.push(memory);
        }

        let pool =
            device.create_command_pool(&vk::CommandPoolCreateInfo::default().queue_family_index(family), None)?;
        let count = if mode == "across" { 2 } else { 1 };
        let commands = device.allocate_command_buffers(
            &vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(count),
        )?;
        for &command in &commands {
            device.begin_command_buffer(command, &vk::CommandBufferBeginInfo::default())?;
        }
        let (first, last) = (commands[0], commands[commands.len() - 1]);
        device.cmd_fill_buffer(first, buffers[0], 0, SIZE, 0x5eed_5eed);
        if mode == "clean" {
            let barrier = vk::MemoryBarrier::default()
                .src_access_mask(vk::AccessFlags::TRANSFER_WRITE)
                .dst_access_mask(vk::AccessFlags::TRANSFER_READ);
            let stage = vk::PipelineStageFlags::TRANSFER;
            device.cmd_pipeline_barrier(first, stage, stage, vk::DependencyFlags::empty(), &[barrier], &[], &[]);
        }
        device.cmd_copy_buffer(last, buffers[0], buffers[1], &[vk::BufferCopy::default().size(SIZE)]);
        for &command in &commands {
            device.end_command_buffer(command)?;
        }
        for command in &commands {
            let submission = vk::SubmitInfo::default().command_buffers(std::slice::from_ref(command));
            device.queue_submit(queue, &[submission], vk::Fence::null())?;
        }
        device.queue_wait_idle(queue)?;

        device.destroy_command_pool(pool, None);
        buffers.iter().for_each(|&buffer| device.destroy_buffer(buffer, None));
        memories.iter().for_each(|&memory| device.free_memory(memory, None));
        device.destroy_device(None);
    }
    Ok(())
}
