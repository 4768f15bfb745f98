//! What can go wrong on a device. Each names the device, what was wrong, and what would be right.
use crate::{DataType, DeviceId, Range, ReduceOp};

/// The result of asking a device.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a device refused or failed. Nothing has been written when a call is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device lacks a feature.
    #[error("{device} has no {what}; {instead}")]
    Unsupported {
        /// Which device.
        device: DeviceId,
        /// The missing feature.
        what: &'static str,
        /// What to use in its stead.
        instead: &'static str,
    },
    /// The device has no kernel for a pair.
    #[error("{device} has no kernel for {op} on {dtype}; the host algorithm reduces it")]
    NoKernel {
        /// Which device.
        device: DeviceId,
        /// The reduction.
        op: ReduceOp,
        /// The type.
        dtype: DataType,
    },
    /// A handle of another device.
    #[error("{handle} belongs to another device than {device}; pass it to the device that made it")]
    Foreign {
        /// The device that was asked.
        device: DeviceId,
        /// The handle.
        handle: String,
    },
    /// A handle whose resource was destroyed.
    #[error("{handle} was destroyed; keep its owner until the last call that names it is made")]
    Stale {
        /// The handle.
        handle: String,
    },
    /// A range beyond the end of its buffer.
    #[error("bytes {}..{} of {:?} on {device}, which has {size}", .range.offset, .range.offset.saturating_add(.range.size), .range.buffer)]
    OutOfRange {
        /// Which device.
        device: DeviceId,
        /// The range.
        range: Range,
        /// The buffer's size in bytes.
        size: u64,
    },
    /// Two ranges that must not overlap do.
    #[error("{a:?} and {b:?} overlap on {device}, and nothing orders them")]
    Overlap {
        /// Which device.
        device: DeviceId,
        /// One.
        a: Range,
        /// The other.
        b: Range,
    },
    /// A request that no device could carry out.
    #[error("{device}: {what}")]
    Invalid {
        /// Which device.
        device: DeviceId,
        /// What was wrong, and what would be right.
        what: String,
    },
    /// A driver refused what it said it could do, or what an import needs does not hold. Another way is taken.
    #[error("{device} could not {what}: {why}")]
    Refused {
        /// Which device.
        device: DeviceId,
        /// What was asked of it.
        what: &'static str,
        /// What the driver said, or what did not hold.
        why: String,
    },
    /// No memory.
    #[error("{device} has no room for {bytes} bytes")]
    OutOfMemory {
        /// Which device.
        device: DeviceId,
        /// How much was asked for.
        bytes: u64,
    },
    /// The device is gone, with what its driver said. Nothing on it works any more.
    #[error("{device} is lost: {why}; build a new communicator over the devices that still answer")]
    Lost {
        /// Which device.
        device: DeviceId,
        /// What the driver said.
        why: String,
    },
    /// A device could not be opened.
    #[error("{what}")]
    Open {
        /// Which was wanted, why it could not be had, and what there is.
        what: String,
    },
}
