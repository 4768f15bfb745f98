//! Devices over Vulkan itself.
//!
//! A Vulkan device has what the contract has room for: submissions that wait for what nobody has signalled yet, commands
//! that are recorded once and submitted again, memory and timelines that cross to other devices. It needs Vulkan 1.2
//! with timeline semaphores, and takes what else a driver grants.
//!
//! | file | idea |
//! |---|---|
//! | `instance` | the loader, and the physical devices it shows |
//! | `gpu` | an open VkDevice, ours or an app's; counts every call into the driver; destroyed last |
//! | `memory` | buffers, and which memory they are of |
//! | `share` | memory that crosses: dma-buf, opaque descriptor, host pages |
//! | `fd` | a descriptor on its way into a driver and out of it |
//! | `timeline` | timelines: ours, an app's, another device's |
//! | `pipelines` | the kernels, compiled at first use |
//! | `spirv` | what WGSL cannot say of its arithmetic |
//! | `record` | a list of operations into a command buffer |
//! | `queue` | submissions, what they keep alive, and waiting for them |
//! | `device` | the [`Device`] that ties these together |
//! | `doors` | faults on purpose, for tests |
//!
//! What it does not do: it asks no driver for what the driver's own query denies, with one exception that is stated where it
//! is made, and it believes nothing beyond: an import that succeeds is proven by whoever relies on it.
//!
//! ```no_run
//! # fn main() -> allhands_contract::Result<()> {
//! for adapter in allhands_vulkan::adapters() {
//!     println!("vulkan:{} {} ({})", adapter.index, adapter.name, adapter.driver);
//! }
//! let device = allhands_vulkan::open("0000:01:00.0")?; // or an index, a name, a UUID
//! # let _ = device;
//! # Ok(())
//! # }
//! ```

use allhands_contract::{Device, Error, Result};
use std::sync::Arc;

mod device;
mod doors;
mod fd;
mod gpu;
mod instance;
mod memory;
mod pipelines;
mod queue;
mod record;
mod share;
mod spirv;
mod timeline;

pub use ash;
pub use device::VulkanDevice;
pub use doors::{Door, Doors, Fault};
pub use gpu::{QueueLock, RawHandles};
pub use instance::{AdapterInfo, Selector};

/// The physical devices that there are, in the loader's order. Empty where there is no loader or no driver.
pub fn adapters() -> Vec<AdapterInfo> {
    let physicals = instance::Instance::shared().and_then(|instance| instance.physicals());
    physicals.unwrap_or_default().iter().map(|p| p.info()).collect()
}

/// Opens a device on the physical device that `selector` names: an index, a PCI address, a UUID or a name.
///
/// # Errors
/// [`Error::Open`] says what was wanted, why it could not be had, and what there is.
pub fn open(selector: &str) -> Result<Arc<dyn Device>> {
    let Ok(selector) = selector.parse();
    Ok(VulkanDevice::open(&selector)?)
}

/// Has the driver compile every kernel, also where it has no memory to run one in (a driver without a device). How
/// many pipelines that were.
///
/// # Errors
/// [`Error::Open`] if there is no such device; [`Error::Open`] with the kernel and the driver's words if one does not compile.
pub fn compile_all(selector: &Selector) -> Result<usize> {
    let instance = instance::Instance::shared().map_err(|what| Error::Open { what })?;
    let physical = instance.select(selector)?;
    let (device, ..) = gpu::make_device(&instance, &physical)?;
    let compiled = pipelines::Pipelines::new(&device, physical.floats).and_then(|mut pipelines| {
        let compiled = pipelines.compile_all(&device, &physical);
        // SAFETY: it was made on this device, and nothing was made with it.
        unsafe { pipelines.destroy(&device) };
        compiled
    });
    // SAFETY: all that was made on it is destroyed.
    unsafe { device.destroy_device(None) };
    compiled.map_err(|why| Error::Open { what: format!("vulkan:{} ({}): {why}", physical.index, physical.name) })
}
