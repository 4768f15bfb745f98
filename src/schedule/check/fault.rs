//! What can be wrong with a program: who, where, what.
use std::fmt;

/// Why a program was refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// It is no program at all.
    Malformed {
        /// What is wrong.
        what: String,
    },
    /// A range beyond the end of its memory.
    OutOfBounds {
        /// Who.
        who: String,
        /// Which memory.
        memory: String,
        /// First unit of the range.
        start: u64,
        /// Units of the range.
        len: u64,
        /// Units of the memory.
        limit: u64,
    },
    /// An actor touches memory in a way that it cannot or must not.
    Forbidden {
        /// Who.
        who: String,
        /// Which memory.
        memory: String,
        /// What it may not do.
        what: &'static str,
    },
    /// Nodes that wait for each other.
    Deadlock {
        /// Each waits for the next, the last for the first.
        cycle: Vec<String>,
    },
    /// Two accesses, one a write, that nothing orders.
    Race {
        /// Who writes or reads.
        first: String,
        /// Who else.
        second: String,
        /// Where.
        memory: String,
        /// First unit that both touch.
        start: u64,
        /// One past the last.
        end: u64,
    },
    /// Something is read that nobody wrote.
    Undefined {
        /// Who reads.
        who: String,
        /// Where.
        memory: String,
        /// First unit.
        at: u64,
    },
    /// A result that is not what the collective promises.
    Result {
        /// Of which call.
        call: usize,
        /// On which rank.
        rank: u32,
        /// First unit of the output that is wrong.
        at: u64,
        /// In what way.
        wrong: Wrong,
        /// What lies there.
        got: String,
    },
    /// Two ranks have the same contributions in another order, so their bits may differ.
    Differs {
        /// Of which call.
        call: usize,
        /// One rank.
        rank: u32,
        /// First unit of the output that differs.
        at: u64,
        /// What lies there.
        got: String,
        /// What lies there on a rank looked at before.
        other: String,
    },
    /// A rank leaves a barrier that another has not reached.
    Barrier {
        /// Of which call.
        call: usize,
        /// Who leaves.
        rank: u32,
        /// Who has not come.
        missing: u32,
    },
}

/// In what way a result is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wrong {
    /// Nobody wrote it.
    Undefined,
    /// A contribution is missing.
    Missing {
        /// Whose.
        rank: u32,
    },
    /// A contribution is there more than once.
    Repeated {
        /// Whose.
        rank: u32,
    },
    /// A contribution that does not belong there.
    Stranger {
        /// Whose.
        rank: u32,
    },
    /// A contribution to another call.
    Stale {
        /// Whose.
        rank: u32,
        /// To which call.
        call: usize,
    },
    /// Another element of a contribution.
    Element {
        /// Whose.
        rank: u32,
        /// Which unit of its input is there.
        got: i64,
        /// Which should be.
        want: i64,
    },
    /// Not folded from rank 0 to the last.
    Order,
    /// The last fold did not finish it.
    Unfinished,
    /// Finished where nothing is reduced, or before its last fold, or twice.
    Finished,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::Undefined => write!(f, "nobody wrote it"),
            Wrong::Missing { rank } => write!(f, "rank {rank}'s contribution is missing"),
            Wrong::Repeated { rank } => write!(f, "rank {rank}'s contribution is there more than once"),
            Wrong::Stranger { rank } => write!(f, "rank {rank}'s contribution does not belong there"),
            Wrong::Stale { rank, call } => write!(f, "rank {rank}'s contribution is that of call {call}"),
            Wrong::Element { rank, got, want } => {
                write!(f, "it is element {got} of rank {rank}'s input and should be {want}")
            }
            Wrong::Order => write!(f, "the fold is not in rank order"),
            Wrong::Unfinished => write!(f, "the last fold did not finish it"),
            Wrong::Finished => write!(f, "it was finished too early, too often, or without need"),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Malformed { what } => f.write_str(what),
            Fault::OutOfBounds { who, memory, start, len, limit } => {
                write!(f, "{who}: {len} from {start} of {memory}, which has {limit}")
            }
            Fault::Forbidden { who, memory, what } => write!(f, "{who}: {memory} {what}"),
            Fault::Deadlock { cycle } => write!(f, "deadlock: {} waits for the first again", cycle.join(" waits for ")),
            Fault::Race { first, second, memory, start, end } => {
                write!(f, "race: {first} and {second} touch {start}..{end} of {memory}, and nothing orders them")
            }
            Fault::Undefined { who, memory, at } => write!(f, "{who} reads {memory} at {at}, which nobody wrote"),
            Fault::Result { call, rank, at, wrong, got } => {
                write!(f, "call {call}, rank {rank}, output at {at}: {wrong} (there is {got})")
            }
            Fault::Differs { call, rank, at, got, other } => {
                write!(f, "call {call}, rank {rank}, output at {at}: {got}, but {other} on another rank")
            }
            Fault::Barrier { call, rank, missing } => {
                write!(f, "call {call}: rank {rank} leaves the barrier before rank {missing} has come")
            }
        }
    }
}

impl std::error::Error for Fault {}
