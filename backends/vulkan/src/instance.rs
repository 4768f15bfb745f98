//! The loader, the instance, and the physical devices that it shows.
//!
//! A process has one instance, made when it is first needed and never destroyed: with its last instance the loader
//! unloads the drivers, and not all survive that, least of all while threads end or another instance is made. A
//! physical device is named by place, PCI address, name or UUID; by UUID alone nothing is ever told apart, because
//! copies of a driver share one.
use crate::spirv::{FloatControls, Rules};
use allhands_contract::{Error, Result};
use ash::{ext, vk};
use std::{
    ffi::{CStr, CString},
    str::FromStr,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

/// Which physical device is wanted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Selector {
    /// Place in the driver's order.
    Index(usize),
    /// PCI address, `0000:01:00.0`.
    Pci(String),
    /// Device UUID in hexadecimal digits, hyphens or not.
    Uuid([u8; 16]),
    /// A name, or a part of it, in any case.
    Name(String),
}

impl FromStr for Selector {
    type Err = std::convert::Infallible;
    /// A number is a place; eight digits, colons and a point a PCI address; 32 hexadecimal digits a UUID; all else a name.
    fn from_str(s: &str) -> std::result::Result<Self, Self::Err> {
        let s = s.trim();
        if let Ok(index) = s.parse() {
            return Ok(Selector::Index(index));
        }
        let digits: String = s.chars().filter(|c| *c != '-').collect();
        if digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            let byte = |i: usize| u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).unwrap_or_default();
            return Ok(Selector::Uuid(std::array::from_fn(byte)));
        }
        let is_pci = s.bytes().filter(|b| *b == b':').count() == 2
            && s.bytes().all(|b| b.is_ascii_hexdigit() || b == b':' || b == b'.');
        Ok(if is_pci { Selector::Pci(s.to_ascii_lowercase()) } else { Selector::Name(s.to_string()) })
    }
}

/// A physical device, as its driver shows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AdapterInfo {
    /// Place in the driver's order.
    pub index: usize,
    /// The device's own name.
    pub name: String,
    /// Driver and version.
    pub driver: String,
    /// The version of Vulkan that it speaks: major, minor, patch.
    pub api: (u32, u32, u32),
    /// PCI address, where the driver tells it.
    pub pci: Option<String>,
    /// Whether it is a program on the CPU.
    pub software: bool,
    /// Device UUID. Copies of a driver have the same.
    pub uuid: [u8; 16],
    /// Driver UUID.
    pub driver_uuid: [u8; 16],
}

/// An instance, the process's or an app's, which neither is destroyed here.
pub(crate) struct Instance {
    _entry: ash::Entry,
    pub raw: ash::Instance,
}

/// The version that is asked for, unless the loader is older.
const API: u32 = vk::API_VERSION_1_3;

impl Instance {
    /// The process's own; an error if there is no loader, or one that is too old.
    pub fn shared() -> std::result::Result<Arc<Self>, String> {
        static SHARED: Mutex<Option<Arc<Instance>>> = Mutex::new(None);
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(instance) = &*shared {
            return Ok(instance.clone());
        }
        let entry = loader()?.clone();
        // SAFETY: the entry is a loader's.
        let version = unsafe { entry.try_enumerate_instance_version() }.ok().flatten().unwrap_or(vk::API_VERSION_1_0);
        if version < vk::API_VERSION_1_2 {
            return Err(format!("the Vulkan loader speaks {}; 1.2 is needed", dotted(version)));
        }
        let application = vk::ApplicationInfo::default().application_name(c"allhands").api_version(version.min(API));
        let info = vk::InstanceCreateInfo::default().application_info(&application);
        // SAFETY: `info` and what it points to outlive the call.
        let raw = unsafe { entry.create_instance(&info, None) }.map_err(|e| match e {
            vk::Result::ERROR_INCOMPATIBLE_DRIVER => "no Vulkan driver was found".to_string(),
            e => format!("the Vulkan loader makes no instance: {e:?}"),
        })?;
        let instance = Arc::new(Instance { _entry: entry, raw });
        *shared = Some(instance.clone());
        Ok(instance)
    }
    /// An app's, which keeps it.
    pub fn lent(entry: ash::Entry, raw: ash::Instance) -> Arc<Self> {
        Arc::new(Instance { _entry: entry, raw })
    }
    /// Every physical device that it shows.
    pub fn physicals(&self) -> std::result::Result<Vec<Physical>, String> {
        // SAFETY: the instance is alive.
        let handles = unsafe { self.raw.enumerate_physical_devices() };
        let handles = handles.map_err(|e| format!("the Vulkan loader lists no devices: {e:?}"))?;
        Ok(handles.into_iter().enumerate().map(|(i, handle)| Physical::of(&self.raw, handle, i)).collect())
    }
    /// The physical device that `selector` names.
    pub fn select(&self, selector: &Selector) -> Result<Physical> {
        let all = self.physicals().map_err(|what| Error::Open { what })?;
        let matches = |p: &Physical| match selector {
            Selector::Index(index) => p.index == *index,
            Selector::Pci(pci) => p.pci.as_ref() == Some(pci),
            Selector::Uuid(uuid) => p.device_uuid == *uuid,
            Selector::Name(name) => p.name.to_lowercase().contains(&name.to_lowercase()),
        };
        let there: Vec<String> = all.iter().map(|p| format!("vulkan:{} ({})", p.index, p.name)).collect();
        let there = if there.is_empty() { "no Vulkan driver that shows a device".into() } else { there.join(", ") };
        let mut found = all.into_iter().filter(matches);
        match (found.next(), found.next()) {
            (Some(physical), None) => Ok(physical),
            (None, _) => Err(Error::Open { what: format!("{selector:?} was asked for; there is: {there}") }),
            (Some(_), Some(_)) => Err(Error::Open {
                what: format!("{selector:?} names more than one; ask by index or PCI address. There is: {there}"),
            }),
        }
    }
}

/// Stays loaded once it is, as its instance stays.
fn loader() -> std::result::Result<&'static ash::Entry, String> {
    static LOADER: OnceLock<std::result::Result<ash::Entry, String>> = OnceLock::new();
    // SAFETY: the library that the system's search path names is a Vulkan loader.
    let load = || unsafe { ash::Entry::load() }.map_err(|e| format!("no Vulkan loader was found: {e}"));
    LOADER.get_or_init(load).as_ref().map_err(String::clone)
}

/// A physical device, and what it says of itself.
#[derive(Clone)]
pub(crate) struct Physical {
    pub handle: vk::PhysicalDevice,
    pub index: usize,
    pub name: String,
    pub driver: String,
    pub driver_id: vk::DriverId,
    pub api: u32,
    pub pci: Option<String>,
    pub kind: vk::PhysicalDeviceType,
    pub device_uuid: [u8; 16],
    pub driver_uuid: [u8; 16],
    pub limits: vk::PhysicalDeviceLimits,
    pub memory: vk::PhysicalDeviceMemoryProperties,
    pub families: Vec<vk::QueueFamilyProperties>,
    pub extensions: Vec<CString>,
    /// Whether it has timeline semaphores.
    pub timelines: bool,
    pub floats: FloatControls,
    /// Whether shaders have integers of 64 bits, and floats.
    pub int64: bool,
    pub float64: bool,
    /// What addresses and sizes of imported host memory are multiples of.
    pub host_alignment: u64,
    pub max_allocation: u64,
}

impl Physical {
    pub fn of(instance: &ash::Instance, handle: vk::PhysicalDevice, index: usize) -> Self {
        // SAFETY: the handle is of this living instance, here and in all calls below.
        let basic = unsafe { instance.get_physical_device_properties(handle) };
        // SAFETY: as above.
        let extensions = unsafe { instance.enumerate_device_extension_properties(handle) }.unwrap_or_default();
        let extensions: Vec<CString> =
            extensions.iter().filter_map(|e| e.extension_name_as_c_str().ok().map(CStr::to_owned)).collect();
        let text = |chars: std::result::Result<&CStr, std::ffi::FromBytesUntilNulError>| {
            chars.map(|c| c.to_string_lossy().into_owned()).unwrap_or_default()
        };
        let mut physical = Physical {
            handle,
            index,
            name: text(basic.device_name_as_c_str()),
            driver: format!("driver version {:#x}", basic.driver_version),
            driver_id: vk::DriverId::default(),
            api: basic.api_version,
            pci: None,
            kind: basic.device_type,
            device_uuid: [0; 16],
            driver_uuid: [0; 16],
            limits: basic.limits,
            // SAFETY: as above.
            memory: unsafe { instance.get_physical_device_memory_properties(handle) },
            // SAFETY: as above.
            families: unsafe { instance.get_physical_device_queue_family_properties(handle) },
            extensions,
            timelines: false,
            floats: FloatControls::default(),
            int64: false,
            float64: false,
            host_alignment: 0,
            max_allocation: u64::MAX,
        };
        if basic.api_version < vk::API_VERSION_1_2 {
            return physical;
        }
        let mut v11 = vk::PhysicalDeviceVulkan11Properties::default();
        let mut v12 = vk::PhysicalDeviceVulkan12Properties::default();
        let mut pci = vk::PhysicalDevicePCIBusInfoPropertiesEXT::default();
        let mut host = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
        let mut all = vk::PhysicalDeviceProperties2::default().push_next(&mut v11).push_next(&mut v12);
        let has_pci = physical.has(ext::pci_bus_info::NAME);
        if has_pci {
            all = all.push_next(&mut pci);
        }
        if physical.has(ext::external_memory_host::NAME) {
            all = all.push_next(&mut host);
        }
        // SAFETY: the device has Vulkan 1.2 and the extensions whose structures are chained.
        unsafe { instance.get_physical_device_properties2(handle, &mut all) };
        let mut f12 = vk::PhysicalDeviceVulkan12Features::default();
        let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut f12);
        // SAFETY: the device has Vulkan 1.2.
        unsafe { instance.get_physical_device_features2(handle, &mut features) };
        let (int64, float64) = (features.features.shader_int64, features.features.shader_float64);
        let driver = format!("{} {}", text(v12.driver_name_as_c_str()), text(v12.driver_info_as_c_str()));
        if !driver.trim().is_empty() {
            physical.driver = driver.trim().to_string();
        }
        if has_pci {
            let (domain, bus, device, function) = (pci.pci_domain, pci.pci_bus, pci.pci_device, pci.pci_function);
            physical.pci = Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"));
        }
        physical.driver_id = v12.driver_id;
        physical.device_uuid = v11.device_uuid;
        physical.driver_uuid = v11.driver_uuid;
        physical.max_allocation = v11.max_memory_allocation_size;
        physical.host_alignment = host.min_imported_host_pointer_alignment;
        physical.timelines = f12.timeline_semaphore == vk::TRUE;
        physical.floats = FloatControls {
            bits32: Rules {
                keep_nan: v12.shader_signed_zero_inf_nan_preserve_float32 == vk::TRUE,
                keep_subnormals: v12.shader_denorm_preserve_float32 == vk::TRUE,
                round_to_even: v12.shader_rounding_mode_rte_float32 == vk::TRUE,
            },
            bits64: Rules {
                keep_nan: v12.shader_signed_zero_inf_nan_preserve_float64 == vk::TRUE,
                keep_subnormals: v12.shader_denorm_preserve_float64 == vk::TRUE,
                round_to_even: v12.shader_rounding_mode_rte_float64 == vk::TRUE,
            },
        };
        physical.int64 = int64 == vk::TRUE;
        physical.float64 = float64 == vk::TRUE;
        physical
    }
    pub fn has(&self, extension: &CStr) -> bool {
        self.extensions.iter().any(|e| **e == *extension)
    }
    pub fn software(&self) -> bool {
        self.kind == vk::PhysicalDeviceType::CPU
    }
    /// The family whose queue is best used: compute alone before graphics and compute.
    pub fn family(&self) -> Option<u32> {
        let can = |f: &vk::QueueFamilyProperties, no: vk::QueueFlags| {
            f.queue_count > 0 && f.queue_flags.contains(vk::QueueFlags::COMPUTE) && !f.queue_flags.intersects(no)
        };
        let find = |no| self.families.iter().position(|f| can(f, no));
        find(vk::QueueFlags::GRAPHICS).or_else(|| find(vk::QueueFlags::empty())).map(|f| f as u32)
    }
    pub fn info(&self) -> AdapterInfo {
        AdapterInfo {
            index: self.index,
            name: self.name.clone(),
            driver: self.driver.clone(),
            api: (vk::api_version_major(self.api), vk::api_version_minor(self.api), vk::api_version_patch(self.api)),
            pci: self.pci.clone(),
            software: self.software(),
            uuid: self.device_uuid,
            driver_uuid: self.driver_uuid,
        }
    }
}

/// A version of Vulkan as people write it.
pub(crate) fn dotted(api: u32) -> String {
    format!("{}.{}", vk::api_version_major(api), vk::api_version_minor(api))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_are_told_apart() {
        let parse = |s: &str| s.parse::<Selector>().unwrap();
        assert_eq!(parse("3"), Selector::Index(3));
        assert_eq!(parse("0000:0A:00.0"), Selector::Pci("0000:0a:00.0".into()));
        assert_eq!(parse("00112233-4455-6677-8899-aabbccddeeff"), parse("00112233445566778899AABBCCDDEEFF"));
        assert!(matches!(parse("00112233-4455-6677-8899-aabbccddeeff"), Selector::Uuid(u) if u[1] == 0x11));
        assert_eq!(parse("llvmpipe"), Selector::Name("llvmpipe".into()));
    }
}
