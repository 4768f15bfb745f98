//! How a device runs.
use crate::Faults;
use allhands_contract::{Clock, Limits};
use std::{sync::Arc, time::Duration};

/// On whose thread submissions run.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Mode {
    /// On the device's own, in order: `submit` returns at once, and the device is gated.
    #[default]
    Threaded,
    /// On the caller's, inside `submit`, which takes no waits: the host worker.
    Inline,
}

/// How a device is opened. The default is a plain rank at full speed.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// On whose thread submissions run.
    pub mode: Mode,
    /// What deadlines and emulated time are read off.
    pub clock: Clock,
    /// The slowness of another device that this one imitates.
    pub emulation: Emulation,
    /// What a test makes go wrong; shared with siblings.
    pub faults: Arc<Faults>,
    /// Takes away what another device would lack (gates, resubmission, kernels, a form of import, ...). The device
    /// then refuses what its limits do not grant. It must not add anything.
    pub restrict: Option<fn(&mut Limits)>,
}

/// Costs of a real device. On the machine's clock the device spends that time; a virtual clock it moves on by as
/// much. All are off by default.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Emulation {
    /// From the start of each submission to its first operation.
    pub submit_latency: Duration,
    /// Bytes a second that operations read from and write to imported memory.
    pub link_bandwidth: Option<u64>,
    /// For each signal of a timeline and each MiB of imported memory that is resident, in use or not: some drivers
    /// make all of it visible each time.
    pub visibility_per_mib: Duration,
}

impl Emulation {
    /// How long `bytes` take to cross a link.
    pub(crate) fn crossing(&self, bytes: u64) -> Duration {
        let nanos = |bandwidth: u64| u128::from(bytes) * 1_000_000_000 / u128::from(bandwidth.max(1));
        self.link_bandwidth.map_or(Duration::ZERO, |b| Duration::from_nanos(nanos(b).try_into().unwrap_or(u64::MAX)))
    }
    /// What a signal costs while `resident` imported bytes are there.
    pub(crate) fn visibility(&self, resident: u64) -> Duration {
        let nanos = self.visibility_per_mib.as_nanos() * u128::from(resident) / (1 << 20);
        Duration::from_nanos(nanos.try_into().unwrap_or(u64::MAX))
    }
}
