//! The host as a device.
//!
//! A [`CpuDevice`] has four parts to play: a rank like any other; the host worker that carries and reduces over the
//! mapped memory of other ranks, which it imports; the reference whose bits every other backend must equal; and the
//! test double that stalls, lies and gets lost on demand, on a clock that a test moves.
//!
//! | file | idea |
//! |---|---|
//! | `options` | how a device runs: its mode, its clock, what slowness it imitates |
//! | `faults` | the doors through which a test makes it fail |
//! | `device` | the contract, call by call |
//! | `queue` | the in-order queue, its timelines and its worker |
//! | `commands` | operations, checked once and resolved to addresses |
//! | `kernels` | the reductions, bit for bit |
//! | `stream` | stores past the caches |
//! | `wire` | how elements lie in memory, and floats of 16 bits |
//! | `memory` | pages, and the buffers over them |
//! | `exit` | what is to be done at the process's end |

mod commands;
mod device;
mod exit;
mod faults;
mod kernels;
mod memory;
mod options;
mod queue;
mod stream;
#[cfg(test)]
mod tests;
mod wire;

pub use device::CpuDevice;
pub use exit::at_exit;
pub use faults::{Faults, PathFault};
pub use options::{Emulation, Mode, Options};
