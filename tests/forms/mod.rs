//! What the schedule tests share: every collective, and every form that a schedule takes on its way to a machine.
#![allow(dead_code, reason = "each test uses a part")]
use allhands::schedule::{
    Algorithm, Collective, Path, Schedule, Shape, Transfer,
    check::FoldOrder,
    direct,
    lower::{self, Links, lower, lower_as},
};
use std::sync::Arc;

/// A schedule as an algorithm writes it, or as one kind of machine runs it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Form {
    Logical,
    CopiedMapped,
    CopiedUnmapped,
    Shared,
    Peer,
    Mixed,
    /// As `Mixed`, but some ranks' kernels keep off the caller's memory.
    Staged,
    /// As `Mixed`, of a schedule that converts. Not one of `ALL`.
    Narrow,
    /// Host workers on the callers' memory, whatever the algorithm. Not one of `ALL`.
    Direct,
}

impl Form {
    pub const ALL: [Form; 7] =
        [Form::Logical, Form::CopiedMapped, Form::CopiedUnmapped, Form::Shared, Form::Peer, Form::Mixed, Form::Staged];

    pub fn of(self, logical: &Schedule) -> Schedule {
        let n = logical.shape.ranks;
        // Four sources a kernel, so that longer folds go through scratch.
        let uniform = |path, mapped| Links::uniform(n, path, mapped, 4);
        match self {
            Form::Logical => logical.clone(),
            Form::CopiedMapped => lower(logical, &uniform(Path::Copied, true)),
            Form::CopiedUnmapped => lower(logical, &uniform(Path::Copied, false)),
            Form::Shared => lower(logical, &uniform(Path::SharedHost, true)),
            Form::Peer => lower(logical, &uniform(Path::Peer, false)),
            Form::Mixed => lower(logical, &mixed(n)),
            Form::Staged => {
                let form =
                    lower::Form { narrow: false, staged: (0..n).map(|r| r % 4 < 2).collect(), ..Default::default() };
                lower_as(logical, &mixed(n), &form)
            }
            Form::Narrow => lower_as(logical, &mixed(n), &lower::Form { narrow: true, ..Default::default() }),
            Form::Direct => direct(&logical.shape, false).expect("asked only where there is one"),
        }
    }
}

/// Every kind of path, in both directions of some pairs and in one of others; every kind of device.
fn mixed(n: u32) -> Links {
    let paths = [Path::Peer, Path::SharedHost, Path::Copied];
    let path = |reader: u32, writer: u32| paths[((reader * 5 + writer * 7 + reader * writer) % 3) as usize];
    Links {
        ranks: n,
        paths: (0..n * n).map(|i| path(i / n, i % n)).collect(),
        mapped: (0..n).map(|r| r % 3 != 1).collect(),
        max_sources: (0..n).map(|r| 2 + r % 4).collect(),
    }
}

/// One-shot, two-shot and host fold in rank order, once. Ring and tree have an order of their own.
pub fn promised(algorithm: Algorithm) -> FoldOrder {
    match algorithm {
        Algorithm::OneShot | Algorithm::TwoShot | Algorithm::Host => FoldOrder::Rank,
        Algorithm::Ring | Algorithm::Tree => FoldOrder::Any,
    }
}

/// Whether an output may lie over the input.
pub fn in_place(collective: &Collective) -> &'static [bool] {
    match collective {
        Collective::SendRecv(_) | Collective::Barrier => &[false],
        _ => &[false, true],
    }
}

pub fn shape(collective: Collective, ranks: u32, count: u64, in_place: bool) -> Shape {
    Shape { collective, ranks, count, in_place }
}

/// Lists of messages: to the right neighbour, to itself, all to the last rank with two from the first, and empty ones.
pub fn messages(n: u32, count: u64) -> Vec<Arc<[Transfer]>> {
    let message = |from, to, count| Transfer { from, to, count };
    let last = n - 1;
    vec![
        (0..n).map(|r| message(r, (r + 1) % n, count)).collect(),
        (0..n).map(|r| message(r, r, count + u64::from(r))).collect(),
        (0..n).map(|r| message(r, last, count + u64::from(r % 3))).chain([message(0, last, 2)]).collect(),
        (0..n).map(|r| message(last - r, r, if r % 2 == 0 { 0 } else { count })).collect(),
        Arc::new([]),
    ]
}

/// Every collective that a call can name, with this root.
pub fn collectives(n: u32, root: u32, count: u64) -> Vec<Collective> {
    use Collective::*;
    vec![
        AllReduce,
        ReduceScatter,
        AllGather,
        Broadcast { root },
        Reduce { root },
        Gather { root },
        Scatter { root },
        AllToAll,
        SendRecv(messages(n, count).swap_remove(2)),
        Barrier,
    ]
}
