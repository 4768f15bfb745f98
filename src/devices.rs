//! The devices of this machine, by name.
use crate::{Error, Result, contract::Device};
use allhands_cpu::{CpuDevice, Options};
use std::{fmt, str::FromStr, sync::Arc};

/// Which device: `cpu`, `vulkan:0`, `proxy-vulkan:0`, `proxy-gles:0`. The number is the device's place in its driver's
/// list. A Vulkan device can be named by its PCI address, its UUID or its name as well.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum DeviceName {
    /// The host.
    Cpu,
    /// A physical device, natively on Vulkan: index, PCI address, UUID or name.
    Vulkan(String),
    /// An adapter through wgpu-hal's Vulkan.
    ProxyVulkan(usize),
    /// An adapter through wgpu-hal's GLES.
    ProxyGles(usize),
}

impl FromStr for DeviceName {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let (kind, which) = s.split_once(':').unwrap_or((s, "0"));
        match (kind, which.parse()) {
            ("cpu", _) if s == "cpu" => Ok(DeviceName::Cpu),
            ("vulkan", _) if !which.is_empty() => Ok(DeviceName::Vulkan(which.into())),
            ("proxy-vulkan", Ok(index)) => Ok(DeviceName::ProxyVulkan(index)),
            ("proxy-gles", Ok(index)) => Ok(DeviceName::ProxyGles(index)),
            _ => Err(Error::Parse(format!(
                "{s:?} names no device; right are cpu, vulkan[:N, PCI address, UUID or name], proxy-vulkan[:N] and \
                 proxy-gles[:N], N from 0"
            ))),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::Vulkan(which) => write!(f, "vulkan:{which}"),
            DeviceName::ProxyVulkan(i) => write!(f, "proxy-vulkan:{i}"),
            DeviceName::ProxyGles(i) => write!(f, "proxy-gles:{i}"),
        }
    }
}

/// Opens a device. Each call opens another one: a rank of its own, with a queue of its own. Ranks that are to share one
/// GPU are better off with one device, cloned: a GPU switches between two for every hop, which costs an H200 100 to 200
/// microseconds.
pub fn open(name: &DeviceName) -> Result<Arc<dyn Device>> {
    match name {
        DeviceName::Cpu => Ok(CpuDevice::open(Options::default())?),
        #[cfg(feature = "vulkan")]
        DeviceName::Vulkan(which) => Ok(allhands_vulkan::open(which)?),
        #[cfg(feature = "proxy")]
        DeviceName::ProxyVulkan(i) => Ok(allhands_proxy::open(allhands_proxy::Backend::Vulkan, *i)?),
        #[cfg(feature = "proxy")]
        DeviceName::ProxyGles(i) => Ok(allhands_proxy::open(allhands_proxy::Backend::Gles, *i)?),
        #[cfg(not(all(feature = "vulkan", feature = "proxy")))]
        other => Err(Error::Parse(format!("{other} needs the cargo feature `vulkan` or `proxy`"))),
    }
}

/// The GPUs that can be opened here, software ones too, each by the best way that reaches it: natively on Vulkan, else
/// through wgpu-hal. The host is always there besides.
pub fn found() -> Vec<DeviceName> {
    let all = every();
    let best = |name: &DeviceName| match name {
        DeviceName::ProxyVulkan(i) => !all.contains(&DeviceName::Vulkan(i.to_string())),
        DeviceName::ProxyGles(_) => !all.iter().any(|d| !matches!(d, DeviceName::ProxyGles(_))),
        _ => true,
    };
    all.iter().filter(|name| best(name)).cloned().collect()
}

/// Every way to open a GPU here: a GPU is named once for each backend that reaches it.
pub fn every() -> Vec<DeviceName> {
    #[allow(unused_mut)] // without backends
    let mut names = Vec::new();
    #[cfg(feature = "vulkan")]
    names.extend(allhands_vulkan::adapters().into_iter().map(|a| DeviceName::Vulkan(a.index.to_string())));
    #[cfg(feature = "proxy")]
    {
        use allhands_proxy::{Backend, adapters};
        names.extend((0..adapters(Backend::Vulkan).len()).map(DeviceName::ProxyVulkan));
        names.extend((0..adapters(Backend::Gles).len()).map(DeviceName::ProxyGles));
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written_alike() {
        for name in ["cpu", "vulkan:0", "vulkan:0000:81:00.0", "proxy-vulkan:1", "proxy-gles:0"] {
            assert_eq!(name.parse::<DeviceName>().unwrap().to_string(), name);
        }
        for name in ["", "gpu", "cpu:0", "vulkan:", "proxy-vulkan:x"] {
            assert!(name.parse::<DeviceName>().is_err(), "{name}");
        }
    }
}
