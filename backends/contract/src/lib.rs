//! What allhands asks of a device.
//!
//! A [`Device`] is one in-order queue of one physical device with the memory that it can see. It makes buffers and
//! timelines, prepares lists of [`Op`]s once and submits them as often as it is told. It knows nothing of ranks,
//! collectives or other devices: the collective layer above drives any mix of devices through this one trait.
//!
//! | file | idea |
//! |---|---|
//! | [`device`](Device) | the trait, and what an implementation promises |
//! | `ids` | handles: `Copy`, and of one device, so that a stranger's handle is recognised |
//! | `op` | what a device is asked to do |
//! | `limits` | who a device is and what it can do |
//! | `memory` | buffers, and memory that crosses from one device to another |
//! | `data` | element types and reductions: what may be asked, and its exact meaning |
//! | `spin` | to look for a while before one sleeps |
//! | `watch` | who wants to know that a buffer goes |
//! | `clock` | real and virtual time, for deadlines |
//! | `error` | what can go wrong, each with the device, the reason and what would be right |
//! | [`kernels`] | the reductions as WGSL, written once for every backend that has shaders |
//! | [`conformance`] | the suite that every backend passes |

mod clock;
pub mod conformance;
mod data;
mod device;
mod error;
mod ids;
pub mod kernels;
mod limits;
mod memory;
mod op;
mod slab;
mod spin;
mod watch;

pub use clock::{Clock, Wake};
pub use data::{DataType, Element, ReduceOp};
pub use device::{Device, Submission, Waited};
pub use error::{Error, Result};
pub use ids::{BufferId, CommandsId, DeviceId, Point, Range, TimelineId};
pub use limits::{Counters, Info, Limits};
pub use memory::{BufferDesc, HostRegion, Memory, SharedFd, SharedHandle, SharedKind, SharedMemory, SharedTimeline};
pub use op::{Domain, Kernel, Op, Wire, check_ops};
pub use slab::Slab;
pub use spin::Spin;
pub use watch::{Watch, Watchers};
