//! A collective as data: who does what after whom. Pure: nothing here knows that a device exists.
//!
//! | file | idea |
//! |---|---|
//! | `one_shot` `two_shot` `host` `ring` `tree` | an algorithm each: `(Shape, Part) -> Schedule` over one chunk |
//! | `pipeline` | the chunks of a long message, one behind the other |
//! | [`lower`] | links -> physical: where each slot lies and who carries what |
//! | [`check`] | proves a sequence of calls: no race, no deadlock, each contribution once, the same bits |
//! | [`simulate`] | runs a schedule on vectors, in an order drawn from a seed |
//! | [`cost`] | how long it takes, from latency and bandwidth |
//! | [`draw`] | the picture |

pub mod check;
pub mod cost;
pub mod draw;
mod host;
pub mod lower;
mod one_shot;
mod pipeline;
mod ring;
pub mod simulate;
mod tree;
mod two_shot;

/// A rank (`actor < ranks`), or the host worker of rank `actor - ranks`.
pub type Actor = u32;

/// A step of an actor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct StepId {
    /// Whose.
    pub actor: Actor,
    /// Its place in the actor's list.
    pub index: u32,
}

/// Where a region lies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Place {
    /// What the rank's caller gave.
    Input(u32),
    /// Where the rank's caller wants the result.
    Output(u32),
    /// A piece of staging: an index into [`Schedule::slots`].
    Slot(u32),
}

/// Elements `start..start + len` of a place.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Region {
    /// Where.
    pub place: Place,
    /// First element.
    pub start: u64,
    /// Elements.
    pub len: u64,
}

/// What a step does. Every region of an action has the same length.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Moves `src` to each of `dsts`.
    Copy {
        /// From.
        src: Region,
        /// To.
        dsts: Vec<Region>,
    },
    /// Folds `srcs` in order and puts the result in each of `dsts`.
    Reduce {
        /// What is folded, in this order. One may be exactly a destination.
        srcs: Vec<Region>,
        /// Where it goes.
        dsts: Vec<Region>,
        /// Whether this is the last fold of the elements: average divides here.
        finish: bool,
    },
}

/// Follows the actor's step before it and all of `after`. Its actions are unordered and do not conflict.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Step {
    /// Steps of other actors that come first.
    pub after: Vec<StepId>,
    /// What it does. Empty only where it orders (a barrier).
    pub actions: Vec<Action>,
}

/// What is asked, with what it needs to know of all ranks. Counts and offsets are NCCL's.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Collective {
    /// `count` elements in, the reduction of all ranks' out, everywhere.
    AllReduce,
    /// `ranks * count` in; rank r gets the reduction of block r, `count` elements. In place: output = input + r * count.
    ReduceScatter,
    /// `count` in, `ranks * count` out: block r is rank r's. In place: input = output + r * count.
    AllGather,
    /// The root's `count` elements, everywhere.
    Broadcast {
        /// Who has them.
        root: u32,
    },
    /// As all-reduce, but only the root has an output.
    Reduce {
        /// Who gets the result.
        root: u32,
    },
    /// As all-gather, but only the root has an output.
    Gather {
        /// Who gets the blocks.
        root: u32,
    },
    /// The root's input holds `ranks * count`; rank r gets block r. Others have no input. In place at the root:
    /// output = input + root * count.
    Scatter {
        /// Who has the blocks.
        root: u32,
    },
    /// `ranks * count` in and out: block s of rank r's input becomes block r of rank s's output.
    AllToAll,
    /// Messages. A rank's input is the messages it sends, in list order; its output those it receives, in list
    /// order. `count` of the shape is unused. A rank may send to itself. Never in place.
    SendRecv(std::sync::Arc<[Transfer]>),
    /// Nobody leaves before all have come. Moves nothing.
    Barrier,
}

/// One message of [`Collective::SendRecv`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Transfer {
    /// Sender.
    pub from: u32,
    /// Receiver.
    pub to: u32,
    /// Elements.
    pub count: u64,
}

/// A collective over so many ranks and elements.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    /// What.
    pub collective: Collective,
    /// Ranks, at least 1.
    pub ranks: u32,
    /// Elements, in the sense of [`Collective`].
    pub count: u64,
    /// Whether every rank's output lies over its input, as [`Collective`] says.
    pub in_place: bool,
}

/// How it is done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Algorithm {
    /// Each publishes all, each reads what it needs of all others and reduces. One dependent step.
    OneShot,
    /// Direct reduce-scatter, then direct all-gather. Two dependent steps.
    TwoShot,
    /// Ranks publish, host workers reduce, ranks read.
    Host,
    /// Neighbours only.
    Ring,
    /// Recursive halving and doubling; binomial for a root.
    Tree,
}

/// How data crosses from one rank to another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Path {
    /// The writer stores into the reader's device memory.
    Peer,
    /// One host allocation that both have imported; no CPU touches the data.
    SharedHost,
    /// Each has its own host-visible staging; the reader's host worker carries.
    Copied,
}

/// What kind of memory a slot is. A logical schedule has only [`Home::Outbox`] and [`Home::Worker`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Home {
    /// Logical: the owner writes it, anyone reads it. Lowering replaces it.
    Outbox,
    /// Logical: a host worker writes it, anyone reads it. Lowering replaces it.
    Worker,
    /// The owner's own memory: no other actor touches it.
    Device,
    /// Of rank `owner`: host workers write it, the owner copies out of it. No kernel touches it.
    Upload,
    /// Of rank `owner`: the owner copies into it, host workers read it. No kernel touches it.
    Download,
    /// Of rank `owner`: the owner's copies and kernels, and host workers, read and write it.
    Mapped,
    /// One host allocation that every rank has imported: any actor reads and writes it.
    Shared,
    /// Device memory of rank `owner` that other ranks write into by copies.
    Inbox,
}

/// A piece of staging.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slot {
    /// Whose memory it is.
    pub owner: Actor,
    /// What kind.
    pub home: Home,
    /// Elements.
    pub len: u64,
    /// First element within the owner's arena of that kind, in one bank; assigned by lowering, 0 before. Slots of
    /// one arena do not overlap within a schedule, and start at multiples of [`SLOT_ALIGNMENT`] elements.
    pub offset: u64,
}

/// Slots start at multiples of so many elements: 256 bytes for the smallest type.
pub const SLOT_ALIGNMENT: u64 = 256;

/// Who does what after whom.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Schedule {
    /// For what.
    pub shape: Shape,
    /// Its staging.
    pub slots: Vec<Slot>,
    /// The steps of each actor: of the ranks first, then of as many host workers as it uses.
    pub steps: Vec<Vec<Step>>,
}
