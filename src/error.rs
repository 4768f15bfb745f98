//! What can go wrong in a call. Each says what was wrong, on which rank and device, and what would be right.
use crate::{contract, schedule::Algorithm};
use allhands_contract::{DataType, DeviceId};
use std::{sync::Arc, time::Duration};

/// The result of a call on a communicator.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call was refused, or how it failed. A call that is refused has written nothing, and the communicator can be
/// used again. After a failure in flight ([`Timeout`](Error::Timeout), [`Failed`](Error::Failed)) every later call
/// gets [`Poisoned`](Error::Poisoned) with the first cause, and the outputs of the calls in flight are undefined.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A communicator of no ranks.
    #[error("a communicator needs at least one rank; add one with Builder::rank")]
    NoRanks,
    /// A rank that no device was given for.
    #[error("rank {rank} of {ranks} has no device; every rank must be local to this process")]
    NotLocal {
        /// Which rank.
        rank: u32,
        /// How many there are.
        ranks: u32,
    },
    /// Another number of parts than of local ranks.
    #[error("{got} parts were given for {want} local ranks; give one for each, in rank order")]
    Parts {
        /// Parts given.
        got: usize,
        /// Parts wanted.
        want: usize,
    },
    /// A span of the wrong length.
    #[error("rank {rank} on {device}: its {what} has {got} elements and must have {want}")]
    Length {
        /// Which rank.
        rank: u32,
        /// Its device.
        device: DeviceId,
        /// `input`, `output`, `buffer`.
        what: &'static str,
        /// Elements given.
        got: u64,
        /// Elements wanted.
        want: String,
    },
    /// A rank lacks a span that the collective needs.
    #[error("rank {rank} on {device} has no {what}, which {collective} needs there")]
    Missing {
        /// Which rank.
        rank: u32,
        /// Its device.
        device: DeviceId,
        /// `input` or `output`.
        what: &'static str,
        /// What was called.
        collective: &'static str,
    },
    /// Ranks with unlike element types.
    #[error("rank {} has {} and rank {} has {}; a call is of one type", .a.0, .a.1, .b.0, .b.1)]
    Types {
        /// A rank and its type.
        a: (u32, DataType),
        /// Another rank and its type.
        b: (u32, DataType),
    },
    /// Some ranks in place, others not.
    #[error("rank {} works in place and rank {} does not; all ranks must do the same", .ranks.0, .ranks.1)]
    MixedInPlace {
        /// One that does, one that does not.
        ranks: (u32, u32),
    },
    /// An output over another span.
    #[error(
        "rank {rank} on {device}: its output overlaps {other}; it must lie apart, or exactly where in place puts it"
    )]
    Overlap {
        /// Which rank.
        rank: u32,
        /// Its device.
        device: DeviceId,
        /// What it overlaps.
        other: String,
    },
    /// A piece whose start or length is not a whole number of elements.
    #[error("rank {rank} on {device}: a piece at byte {offset} of {size} bytes; both must be multiples of {align}")]
    Misaligned {
        /// Which rank.
        rank: u32,
        /// Its device.
        device: DeviceId,
        /// First byte.
        offset: u64,
        /// Bytes.
        size: u64,
        /// What they must be multiples of.
        align: u64,
    },
    /// An option that makes no sense here.
    #[error("{what} is not to be had here: {why}")]
    Option {
        /// `a scale`, `an absent rank`, `a wire type`.
        what: &'static str,
        /// Why, and what there is.
        why: String,
    },
    /// A root that is no rank.
    #[error("root {root} of {ranks} ranks; the last is rank {}", .ranks - 1)]
    Root {
        /// The rank named.
        root: u32,
        /// How many there are.
        ranks: u32,
    },
    /// An algorithm that the collective does not have.
    #[error("{collective} has no {algorithm} algorithm; it has {have}")]
    NoAlgorithm {
        /// The collective.
        collective: &'static str,
        /// The algorithm asked for.
        algorithm: Algorithm,
        /// Those it has.
        have: String,
    },
    /// A span, or a point to wait for, of another device than the rank's.
    #[error("rank {rank} is on {device}, but {what} belongs to {other}; make it on the rank's device")]
    Foreign {
        /// Which rank.
        rank: u32,
        /// Its device.
        device: DeviceId,
        /// What is foreign.
        what: &'static str,
        /// Whose it is.
        other: DeviceId,
    },
    /// A span of a buffer that was dropped.
    #[error("rank {rank} on {device}: its {what} names a buffer that was dropped; keep the buffer until the call")]
    Dropped {
        /// Which rank.
        rank: u32,
        /// Its device.
        device: DeviceId,
        /// `input`, `output`.
        what: &'static str,
    },
    /// A span beyond the end of its buffer.
    #[error("rank {rank}: {source}")]
    Span {
        /// Which rank.
        rank: u32,
        /// What its device says.
        source: contract::Error,
    },
    /// No path between two ranks could be proven, or not the one that was forced.
    #[error("ranks {} and {} reach each other by no path that was tried: {why}", .ranks.0, .ranks.1)]
    Path {
        /// The pair.
        ranks: (u32, u32),
        /// What was tried, and why it lost.
        why: String,
    },
    /// A word that names no device, path, ...
    #[error("{0}")]
    Parse(String),
    /// The system has no thread left for the relay.
    #[error("no thread to carry for {device}: {why}")]
    Thread {
        /// Whose thread.
        device: DeviceId,
        /// What the system said.
        why: String,
    },
    /// A device refused before anything was written.
    #[error(transparent)]
    Device(#[from] contract::Error),
    /// No progress for the length of the deadline.
    #[error("{what} made no progress for {deadline:?}; {arrived}")]
    Timeout {
        /// Collective and sequence number.
        what: String,
        /// The deadline.
        deadline: Duration,
        /// For each rank the step it has finished, and who is late.
        arrived: String,
    },
    /// A device failed, or panicked, with work in flight.
    #[error("rank {rank}: {why}")]
    Failed {
        /// Whose device.
        rank: u32,
        /// What it said.
        why: String,
    },
    /// An earlier call failed in flight.
    #[error("this communicator failed earlier: {first}; build a new one over the devices that still answer")]
    Poisoned {
        /// The first cause.
        first: Arc<Error>,
    },
}
