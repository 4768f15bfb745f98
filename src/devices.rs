//! The devices of this machine, by name.
use crate::{Error, Result, contract::Device};
use allhands_cpu::{CpuDevice, Options};
use std::{fmt, str::FromStr, sync::Arc};

/// Which device: `cpu`, `proxy-vulkan:0`, `proxy-gles:0`. The number is the adapter's place in its driver's list.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceName {
    /// The host.
    Cpu,
    /// An adapter through wgpu-hal's Vulkan.
    ProxyVulkan(usize),
    /// An adapter through wgpu-hal's GLES.
    ProxyGles(usize),
}

impl FromStr for DeviceName {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let wrong = || {
            Error::Parse(format!("{s:?} names no device; right are cpu, proxy-vulkan[:N] and proxy-gles[:N], N from 0"))
        };
        let (kind, index) = match s.split_once(':') {
            Some((kind, index)) => (kind, Some(index.parse().map_err(|_| wrong())?)),
            None => (s, None),
        };
        match (kind, index) {
            ("cpu", None) => Ok(DeviceName::Cpu),
            ("proxy-vulkan", i) => Ok(DeviceName::ProxyVulkan(i.unwrap_or(0))),
            ("proxy-gles", i) => Ok(DeviceName::ProxyGles(i.unwrap_or(0))),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Cpu => f.write_str("cpu"),
            DeviceName::ProxyVulkan(i) => write!(f, "proxy-vulkan:{i}"),
            DeviceName::ProxyGles(i) => write!(f, "proxy-gles:{i}"),
        }
    }
}

/// Opens a device. Each call opens another one: a rank of its own, with a queue of its own.
pub fn open(name: DeviceName) -> Result<Arc<dyn Device>> {
    match name {
        DeviceName::Cpu => Ok(CpuDevice::open(Options::default())?),
        #[cfg(feature = "proxy")]
        DeviceName::ProxyVulkan(i) => Ok(allhands_proxy::open(allhands_proxy::Backend::Vulkan, i)?),
        #[cfg(feature = "proxy")]
        DeviceName::ProxyGles(i) => Ok(allhands_proxy::open(allhands_proxy::Backend::Gles, i)?),
        #[cfg(not(feature = "proxy"))]
        _ => Err(Error::Parse(format!("{name} needs the cargo feature `proxy`"))),
    }
}

/// The GPUs that can be opened here (software drivers are GPUs too), Vulkan first. The host is always there besides.
pub fn found() -> Vec<DeviceName> {
    #[cfg(feature = "proxy")]
    {
        use allhands_proxy::{Backend, adapters};
        let count = |backend| adapters(backend).len();
        let vulkan = (0..count(Backend::Vulkan)).map(DeviceName::ProxyVulkan);
        vulkan.chain((0..count(Backend::Gles)).map(DeviceName::ProxyGles)).collect()
    }
    #[cfg(not(feature = "proxy"))]
    Vec::new()
}
