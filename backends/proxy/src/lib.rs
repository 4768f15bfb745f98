//! Devices over anything `wgpu-hal` drives: Vulkan and GLES here.
//!
//! A proxy device asks no more of a driver than wgpu does, so it runs wherever wgpu runs, and is the ground that the
//! faster backends are measured against. Everything is generic over [`wgpu_hal::Api`]; what differs between APIs, how
//! to wait for one of several things, is a small trait.
//!
//! | file | idea |
//! |---|---|
//! | `api` | what an API adds to hal: its name, its instance, and a wait that a wake can end |
//! | `vulkan` `gles` | that, for each |
//! | `gpu` | an open hal device; turns hal's errors and panics into [`Lost`](allhands_contract::Error::Lost); destroyed last |
//! | `memory` | buffers; timelines are in `queue` |
//! | `pipelines` | the kernels, compiled at first use |
//! | `record` | a list of operations into a command buffer |
//! | `queue` | submissions, what they keep alive, and waiting for them |
//! | `device` | the [`Device`] that ties these together |
//!
//! A kernel is compiled when first prepared, and some drivers finish that at its first run: use it once before timing.
//! The ranges of one kernel must fit four windows of the adapter's largest storage binding (at least 128 MiB), or it is
//! refused.
//!
//! What it does not do: waits on its queue (hal chains submissions by binary semaphores, so a wait for something not
//! yet submitted would block the next submit), commands that can be submitted twice, memory import, sharing of
//! timelines. Host-visible memory must be coherent, as it is on every Vulkan driver; a GL without persistent coherent
//! mapping is refused.

use allhands_contract::{Device, Result};
use std::sync::Arc;

mod api;
mod device;
mod gles;
mod gpu;
mod memory;
mod pipelines;
mod queue;
mod record;
mod vulkan;

/// An API that hal drives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Backend {
    /// `proxy-vulkan`.
    Vulkan,
    /// `proxy-gles`: OpenGL ES 3.1 or OpenGL 4.3 over EGL, without a window. All devices of an adapter share one
    /// context and one lock, and a submit does its work on the caller's thread.
    Gles,
}

impl Backend {
    /// Both.
    pub const ALL: [Backend; 2] = [Backend::Vulkan, Backend::Gles];
    /// The name in tables and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Backend::Vulkan => "proxy-vulkan",
            Backend::Gles => "proxy-gles",
        }
    }
}

/// A physical device, as one API shows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AdapterInfo {
    /// The API.
    pub backend: Backend,
    /// What [`open`] takes.
    pub index: usize,
    /// The device's own name.
    pub name: String,
    /// Driver and version.
    pub driver: String,
    /// Whether it is a program on the CPU.
    pub software: bool,
}

/// The physical devices that `backend` shows, in the driver's order. Empty where there is no loader or no driver.
/// They are looked for once in a process.
pub fn adapters(backend: Backend) -> Vec<AdapterInfo> {
    match backend {
        Backend::Vulkan => api::infos::<wgpu_hal::api::Vulkan>(),
        Backend::Gles => api::infos::<wgpu_hal::api::Gles>(),
    }
}

/// Opens a device on adapter `index` of `backend`. One adapter can be opened any number of times.
///
/// # Errors
/// [`Error::Open`](allhands_contract::Error::Open) says what was wanted, why it could not be had, and what there is.
pub fn open(backend: Backend, index: usize) -> Result<Arc<dyn Device>> {
    Ok(match backend {
        Backend::Vulkan => device::ProxyDevice::<wgpu_hal::api::Vulkan>::open(index)?,
        Backend::Gles => device::ProxyDevice::<wgpu_hal::api::Gles>::open(index)?,
    })
}
