//! Handles. Each carries its device and a generation, so a handle of another device or of a dropped resource is
//! recognised and refused: it can never name a stranger.
use std::sync::atomic::{AtomicU32, Ordering};

/// Unique in the process and never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct DeviceId(u32);

impl DeviceId {
    /// A new id. Called once by each device that is opened.
    pub fn unique() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        DeviceId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl std::fmt::Display for DeviceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "device #{}", self.0)
    }
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
        pub struct $name {
            /// The device that made it, the only one that accepts it.
            pub device: DeviceId,
            /// Place in the device's table.
            pub index: u32,
            /// Which of the resources that had this place.
            pub generation: u32,
        }
        impl From<(DeviceId, u32, u32)> for $name {
            fn from((device, index, generation): (DeviceId, u32, u32)) -> Self {
                $name { device, index, generation }
            }
        }
    )*};
}
handles! {
    /// A buffer of one device.
    BufferId,
    /// A timeline of one device.
    TimelineId,
    /// Prepared commands of one device.
    CommandsId,
}

/// A contiguous piece of one buffer, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Range {
    /// The buffer.
    pub buffer: BufferId,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

impl Range {
    /// `size` bytes of `buffer` from `offset`.
    pub fn new(buffer: BufferId, offset: u64, size: u64) -> Self {
        Range { buffer, offset, size }
    }
    /// One past the last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.size
    }
    /// Whether both name a byte in common.
    pub fn overlaps(&self, other: &Range) -> bool {
        self.buffer == other.buffer && self.offset < other.end() && other.offset < self.end()
    }
}

/// A moment of a timeline: reached once the timeline's value is at least `value`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Point {
    /// The timeline.
    pub timeline: TimelineId,
    /// The value.
    pub value: u64,
}
