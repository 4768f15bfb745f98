//! A collective as data: who does what after whom. Pure: nothing here knows that a device exists.
//!
//! | file | idea |
//! |---|---|
//! | `one_shot` `two_shot` `host` `ring` `tree` | an algorithm each: `(Shape, Part) -> Schedule` over one chunk |
//! | `direct` | host workers on the callers' own memory, where it is the host's |
//! | `pipeline` | the chunks of a long message, one behind the other |
//! | `order` | which step follows which, derived from what they read and write |
//! | [`lower`] | links -> physical: where each slot lies and who carries what |
//! | [`check`] | proves a sequence of calls: no race, no deadlock, each contribution once, the same bits |
//! | [`simulate`] | runs a schedule on vectors, in an order drawn from a seed |
//! | [`cost`] | how long it takes, from latency and bandwidth |
//! | [`draw`] | the picture |

pub mod check;
pub mod cost;
mod direct;
pub mod draw;
mod host;
pub mod lower;
mod one_shot;
mod order;
mod pipeline;
mod ring;
pub mod simulate;
mod tree;
mod two_shot;

pub use direct::direct;
pub use pipeline::{Chunking, build, build_narrow};

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
    /// What it does. Empty only where it orders: in a barrier, and where a rank comes to host workers that touch its
    /// memory, and leaves them.
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

impl Path {
    /// Every path, best first.
    pub const ALL: [Path; 3] = [Path::Peer, Path::SharedHost, Path::Copied];
    /// The name on the command line and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Path::Peer => "peer",
            Path::SharedHost => "shared-host",
            Path::Copied => "copied",
        }
    }
}

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
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

/// A piece of the caller's memory. In place, a rank's input and output are one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct UserMemory {
    /// Whose caller's.
    pub rank: u32,
    /// Whether it is an output apart from the input. False for an input, and in place.
    pub output: bool,
}

impl Schedule {
    /// Whether host workers touch the callers' memory, as in what [`direct`] makes.
    pub fn is_direct(&self) -> bool {
        let workers = self.steps.iter().skip(self.shape.ranks as usize);
        self.slots.is_empty() && workers.flatten().any(|step| !step.actions.is_empty())
    }
}

impl Region {
    /// Elements `start..start + len` of `place`.
    pub const fn new(place: Place, start: u64, len: u64) -> Self {
        Region { place, start, len }
    }
    /// The first element after it.
    pub const fn end(&self) -> u64 {
        self.start + self.len
    }
    /// `len` elements of it, from its element `offset` on.
    pub const fn part(&self, offset: u64, len: u64) -> Self {
        Region { place: self.place, start: self.start + offset, len }
    }
}

impl Action {
    /// What it reads.
    pub fn sources(&self) -> &[Region] {
        match self {
            Action::Copy { src, .. } => std::slice::from_ref(src),
            Action::Reduce { srcs, .. } => srcs,
        }
    }
    /// What it writes.
    pub fn destinations(&self) -> &[Region] {
        match self {
            Action::Copy { dsts, .. } | Action::Reduce { dsts, .. } => dsts,
        }
    }
    /// All its regions, to be changed: sources, then destinations.
    pub fn regions_mut(&mut self) -> impl Iterator<Item = &mut Region> {
        let (srcs, dsts) = match self {
            Action::Copy { src, dsts } => (std::slice::from_mut(src), dsts),
            Action::Reduce { srcs, dsts, .. } => (srcs.as_mut_slice(), dsts),
        };
        srcs.iter_mut().chain(dsts)
    }
    /// Elements of each of its regions.
    pub fn len(&self) -> u64 {
        self.sources().first().map_or(0, |r| r.len)
    }
    /// Whether it moves nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Collective {
    /// The name on the command line and in tables.
    pub const fn name(&self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllGather => "all_gather",
            Collective::Broadcast { .. } => "broadcast",
            Collective::Reduce { .. } => "reduce",
            Collective::Gather { .. } => "gather",
            Collective::Scatter { .. } => "scatter",
            Collective::AllToAll => "all_to_all",
            Collective::SendRecv(_) => "send_recv",
            Collective::Barrier => "barrier",
        }
    }
    /// Whether it reduces.
    pub const fn reduces(&self) -> bool {
        matches!(self, Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce { .. })
    }
    /// Its root, if it has one.
    pub const fn root(&self) -> Option<u32> {
        use Collective::*;
        match *self {
            Broadcast { root } | Reduce { root } | Gather { root } | Scatter { root } => Some(root),
            _ => None,
        }
    }
}

impl Algorithm {
    /// Whether it folds contributions in the order of the ranks, each result once: then a result has the same bits for
    /// every message size. The others have an order of their own, the same on all ranks.
    pub const fn in_rank_order(self) -> bool {
        matches!(self, Algorithm::OneShot | Algorithm::TwoShot | Algorithm::Host)
    }
    /// Every algorithm, in the order in which tables list them.
    pub const ALL: [Algorithm; 5] =
        [Algorithm::OneShot, Algorithm::TwoShot, Algorithm::Host, Algorithm::Ring, Algorithm::Tree];
    /// The name on the command line and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::OneShot => "one-shot",
            Algorithm::TwoShot => "two-shot",
            Algorithm::Host => "host",
            Algorithm::Ring => "ring",
            Algorithm::Tree => "tree",
        }
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::fmt::Display for Collective {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// The algorithms that can do `collective`.
pub const fn algorithms(collective: &Collective) -> &'static [Algorithm] {
    use Algorithm::*;
    match collective {
        Collective::AllReduce | Collective::Reduce { .. } => &Algorithm::ALL,
        Collective::ReduceScatter => &[OneShot, Host, Ring],
        Collective::AllGather => &[OneShot, Ring],
        Collective::Broadcast { .. } => &[OneShot, TwoShot, Ring, Tree],
        Collective::Barrier => &[OneShot, Host],
        Collective::Gather { .. } | Collective::Scatter { .. } | Collective::AllToAll | Collective::SendRecv(_) => {
            &[OneShot]
        }
    }
}

impl Shape {
    /// Elements of the rank's input; 0 where it has none.
    pub fn input_len(&self, rank: u32) -> u64 {
        let (one, all) = (self.count, self.count * u64::from(self.ranks));
        match &self.collective {
            Collective::AllReduce | Collective::AllGather | Collective::Reduce { .. } | Collective::Gather { .. } => {
                one
            }
            Collective::ReduceScatter | Collective::AllToAll => all,
            Collective::Broadcast { root } if *root == rank => one,
            Collective::Scatter { root } if *root == rank => all,
            Collective::SendRecv(list) => list.iter().filter(|t| t.from == rank).map(|t| t.count).sum(),
            Collective::Broadcast { .. } | Collective::Scatter { .. } | Collective::Barrier => 0,
        }
    }
    /// Elements of the rank's output; 0 where it has none.
    pub fn output_len(&self, rank: u32) -> u64 {
        let (one, all) = (self.count, self.count * u64::from(self.ranks));
        match &self.collective {
            Collective::AllReduce
            | Collective::ReduceScatter
            | Collective::Broadcast { .. }
            | Collective::Scatter { .. } => one,
            Collective::AllGather | Collective::AllToAll => all,
            Collective::Reduce { root } if *root == rank => one,
            Collective::Gather { root } if *root == rank => all,
            Collective::SendRecv(list) => list.iter().filter(|t| t.to == rank).map(|t| t.count).sum(),
            Collective::Reduce { .. } | Collective::Gather { .. } | Collective::Barrier => 0,
        }
    }
    /// Where, in place, the rank's output starts relative to its input, in elements: NCCL's rules, as [`Collective`]
    /// tells them. Positive where the output lies inside the input, negative where the input lies inside the output.
    pub fn in_place_offset(&self, rank: u32) -> i64 {
        let block = (self.count * u64::from(rank)) as i64;
        match &self.collective {
            Collective::ReduceScatter => block,
            Collective::AllGather => -block,
            Collective::Scatter { root } if *root == rank => block,
            Collective::Gather { root } if *root == rank => -block,
            _ => 0,
        }
    }
    /// Where the region lies in the caller's memory: which piece, and the first element in it. `None` for staging.
    /// In place, both `Input(r)` and `Output(r)` lie in `UserMemory { rank: r, output: false }`, which is as long as
    /// the longer of the two.
    pub fn physical(&self, region: Region) -> Option<(UserMemory, u64)> {
        let (rank, output) = match region.place {
            Place::Input(rank) => (rank, false),
            Place::Output(rank) => (rank, true),
            Place::Slot(_) => return None,
        };
        if !self.in_place {
            return Some((UserMemory { rank, output }, region.start));
        }
        let offset = self.in_place_offset(rank);
        let shift = if output { offset.max(0) } else { (-offset).max(0) } as u64;
        Some((UserMemory { rank, output: false }, region.start + shift))
    }
    /// Elements that chunks divide: `count`, or the longest message.
    fn span(&self) -> u64 {
        match &self.collective {
            Collective::SendRecv(list) => list.iter().map(|t| t.count).max().unwrap_or(0),
            Collective::Barrier => 0,
            _ => self.count,
        }
    }
}

/// Block `b` of `len` elements in `n`: its first element and its length. Sizes are near equal; borders are multiples
/// of 64 elements where each block has at least as many, else of 4: so blocks of the narrowest type are whole words,
/// but for the end.
pub fn block(len: u64, n: u32, b: u32) -> (u64, u64) {
    let unit = if len >= 64 * u64::from(n) { 64 } else { 4 };
    // The nearest unit, so that the last block does not get all that is left over.
    let border =
        |b: u32| if b == n { len } else { ((len * u64::from(b) / u64::from(n) + unit / 2) / unit * unit).min(len) };
    (border(b), border(b + 1) - border(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_all_and_are_near_equal() {
        for n in 1..=17 {
            for len in [0, 1, u64::from(n) - 1, 100, 64 * u64::from(n) - 1, 64 * u64::from(n), 5000] {
                let blocks: Vec<_> = (0..n).map(|b| block(len, n, b)).collect();
                assert!(blocks.windows(2).all(|w| w[0].0 + w[0].1 == w[1].0), "{len} in {n}");
                assert_eq!((blocks[0].0, blocks[n as usize - 1].0 + blocks[n as usize - 1].1), (0, len));
                let unit = if len >= 64 * u64::from(n) { 64 } else { 4 };
                let aligned = |start: u64| start.is_multiple_of(unit) || start == len;
                assert!(blocks.iter().all(|b| aligned(b.0) && b.1.abs_diff(len / u64::from(n)) <= unit));
            }
        }
    }

    #[test]
    fn in_place_is_where_nccl_says() {
        let shape = |collective| Shape { collective, ranks: 4, count: 10, in_place: true };
        let at = |s: &Shape, place| s.physical(Region::new(place, 3, 1)).unwrap();
        let memory = UserMemory { rank: 2, output: false };
        for (collective, input, output) in [
            (Collective::AllReduce, 3, 3),
            (Collective::ReduceScatter, 3, 23),
            (Collective::AllGather, 23, 3),
            (Collective::Scatter { root: 2 }, 3, 23),
            (Collective::Gather { root: 2 }, 23, 3),
            (Collective::Gather { root: 1 }, 3, 3),
        ] {
            let s = shape(collective);
            assert_eq!(
                [at(&s, Place::Input(2)), at(&s, Place::Output(2))],
                [(memory, input), (memory, output)],
                "{s:?}"
            );
        }
    }
}
