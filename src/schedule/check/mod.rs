//! Proves that a program of copies and folds does what its collectives promise, in every order that its
//! dependencies and queues allow: no deadlock, no race, nothing undefined read, each contribution exactly once and in
//! a known order, the same expression on every rank.
//!
//! A [`Program`] knows memory only as numbers, so what a schedule plans and what an execution recorded go through the
//! same proof. A [`Sequence`] makes one of schedules that follow each other.
//!
//! | file | idea |
//! |---|---|
//! | [`sequence`](Sequence) | schedules, call after call -> a program; which actor may touch which memory |
//! | [`order`](Order) | what happens before what, by vector clocks |
//! | `race` | conflicting accesses that nothing orders |
//! | `value` | what each element holds, as an expression of the ranks' contributions |
//! | [`fault`](Fault) | what can be wrong |

mod fault;
mod order;
mod race;
mod sequence;
#[cfg(test)]
mod tests;
mod value;

use super::{Shape, StepId};
pub use fault::{Fault, Wrong};
pub use order::Order;
pub use sequence::{Gate, Sequence, check, check_sequence};

/// A piece of memory: an index into [`Program::memories`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct MemoryId(pub u32);

/// Units `start..start + len` of a memory: elements where a schedule is checked, bytes where a trace is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Extent {
    /// Which memory.
    pub memory: MemoryId,
    /// First unit.
    pub start: u64,
    /// Units.
    pub len: u64,
}

impl Extent {
    /// One past the last unit.
    pub fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// A memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Memory {
    /// What a fault calls it.
    pub name: String,
    /// Units.
    pub len: u64,
}

/// What becomes of the sources.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// The one source is moved.
    Copy,
    /// They are folded in order.
    Fold,
    /// They are folded in order, and the result is final: average divides.
    Finish,
}

/// A copy or a fold. Every extent has the same length.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Work {
    /// What it does.
    pub kind: Kind,
    /// Work of one node runs group after group; within a group it is unordered.
    pub group: u32,
    /// What is read. A source of a fold may be exactly a destination.
    pub srcs: Vec<Extent>,
    /// What is written.
    pub dsts: Vec<Extent>,
}

/// What happens at a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The caller of `rank` has written its input for `call`; its output holds nothing.
    Begin {
        /// Index into [`Program::calls`].
        call: usize,
        /// Whose caller.
        rank: u32,
    },
    /// The caller of `rank` reads its output of `call`, and overwrites its input and its output.
    End {
        /// Index into [`Program::calls`].
        call: usize,
        /// Whose caller.
        rank: u32,
    },
    /// Copies and folds.
    Work(Vec<Work>),
}

/// What a fault calls a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Label {
    /// A step of a schedule.
    Step {
        /// Of which call.
        call: usize,
        /// Which step.
        step: StepId,
    },
    /// Anything else.
    Text(String),
}

/// Something that happens, in order after the node of the same actor before it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// An in-order queue. Its nodes run in the order in which they stand in [`Program::nodes`], which is that of their
    /// submission: ranks that share a queue are one actor.
    pub actor: u32,
    /// Its name. Unused for [`Event::Begin`] and [`Event::End`].
    pub label: Label,
    /// Indices of nodes that come first.
    pub after: Vec<usize>,
    /// What happens.
    pub event: Event,
}

/// In which order contributions are folded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FoldOrder {
    /// `((x0 + x1) + x2) + ...`, whether in one fold or in a chain of them.
    Rank,
    /// Any, as long as every rank has the same.
    Any,
}

/// One collective of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Call {
    /// What is asked.
    pub shape: Shape,
    /// Units an element: 1, or its bytes.
    pub unit: u64,
    /// What order is promised.
    pub order: FoldOrder,
    /// Where each rank's input lies, piece after piece. A rank that has none though the collective reduces it
    /// contributes nothing: [`Program::neutral`] stands in for it.
    pub inputs: Vec<Vec<Extent>>,
    /// Where each rank's output lies, piece after piece.
    pub outputs: Vec<Vec<Extent>>,
}

/// Nodes, the memory they touch, and what they are for. Every call has one begin and one end for each rank.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Program {
    /// What happens.
    pub nodes: Vec<Node>,
    /// What for.
    pub calls: Vec<Call>,
    /// Where.
    pub memories: Vec<Memory>,
    /// Memory full of what no fold changes with. Nobody writes it.
    pub neutral: Vec<MemoryId>,
}

impl Program {
    /// The proof, or the first fault found.
    pub fn check(&self) -> Result<(), Fault> {
        self.well_formed()?;
        let order = Order::of(self)?;
        order.barriers(self)?;
        race::check(self, &order)?;
        value::check(self, &order)
    }
    /// What a fault calls a node.
    pub fn name(&self, node: usize) -> String {
        match (&self.nodes[node].event, &self.nodes[node].label) {
            (Event::Begin { call, rank }, _) => format!("the caller of rank {rank} before call {call}"),
            (Event::End { call, rank }, _) => format!("the caller of rank {rank} after call {call}"),
            (_, Label::Step { call, step }) => format!("step {} of actor {} in call {call}", step.index, step.actor),
            (_, Label::Text(text)) => text.clone(),
        }
    }

    fn well_formed(&self) -> Result<(), Fault> {
        let malformed = |what: String| Err(Fault::Malformed { what });
        let mut seen: Vec<[u32; 2]> = Vec::new();
        let first: Vec<usize> =
            self.calls.iter().scan(0, |sum, c| Some(std::mem::replace(sum, *sum + c.shape.ranks as usize))).collect();
        seen.resize(self.calls.iter().map(|c| c.shape.ranks as usize).sum(), [0; 2]);
        for call in &self.calls {
            for extent in call.inputs.iter().chain(&call.outputs).flatten() {
                self.inside(extent, || "a caller".into())?;
            }
            if [&call.inputs, &call.outputs].iter().any(|m| m.len() != call.shape.ranks as usize) {
                return malformed("a call without memory for each of its ranks".into());
            }
        }
        for (i, node) in self.nodes.iter().enumerate() {
            if node.after.iter().any(|&n| n >= self.nodes.len()) {
                return malformed(format!("{} follows what does not exist", self.name(i)));
            }
            match &node.event {
                Event::Begin { call, rank } | Event::End { call, rank } => {
                    if self.calls.get(*call).is_none_or(|c| *rank >= c.shape.ranks) {
                        return malformed(format!("{}: no such call or rank", self.name(i)));
                    }
                    seen[first[*call] + *rank as usize][matches!(node.event, Event::End { .. }) as usize] += 1;
                }
                Event::Work(work) => {
                    for w in work {
                        let len = w.srcs.first().map_or(0, |e| e.len);
                        let one = w.kind != Kind::Copy || w.srcs.len() == 1;
                        if len == 0 || w.dsts.is_empty() || !one || w.srcs.iter().chain(&w.dsts).any(|e| e.len != len) {
                            return malformed(format!("{}: ranges of work that do not fit", self.name(i)));
                        }
                        for extent in w.srcs.iter().chain(&w.dsts) {
                            self.inside(extent, || self.name(i))?;
                        }
                    }
                }
            }
        }
        if seen.iter().any(|s| *s != [1, 1]) {
            return malformed("a caller that does not begin and end each of its calls once".into());
        }
        Ok(())
    }
    fn inside(&self, extent: &Extent, who: impl Fn() -> String) -> Result<(), Fault> {
        let memory = self.memories.get(extent.memory.0 as usize);
        match extent.start.checked_add(extent.len) {
            Some(end) if memory.is_some_and(|m| end <= m.len) => Ok(()),
            _ => Err(Fault::OutOfBounds {
                who: who(),
                memory: memory.map_or("no memory".into(), |m| m.name.clone()),
                start: extent.start,
                len: extent.len,
                limit: memory.map_or(0, |m| m.len),
            }),
        }
    }
}
