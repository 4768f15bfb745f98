//! What is measured: a collective, its sizes as nccl-tests has them, and where each rank's data lies.
use allhands::{Collective, DataType, Transfer};
use std::{fmt, str::FromStr};

/// A collective, by its name on the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    SendRecv,
    Barrier,
}
use Kind::*;

impl Kind {
    /// All of them, in the order in which help lists them.
    pub const ALL: [Kind; 10] =
        [AllReduce, ReduceScatter, AllGather, Broadcast, Reduce, Gather, Scatter, AllToAll, SendRecv, Barrier];

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            AllReduce => "all_reduce",
            ReduceScatter => "reduce_scatter",
            AllGather => "all_gather",
            Broadcast => "broadcast",
            Reduce => "reduce",
            Gather => "gather",
            Scatter => "scatter",
            AllToAll => "all_to_all",
            SendRecv => "sendrecv",
            Barrier => "barrier",
        }
    }
    /// Whether it takes a reduction.
    pub fn reduces(self) -> bool {
        matches!(self, AllReduce | ReduceScatter | Reduce)
    }
    /// Whether one rank is special.
    pub fn rooted(self) -> bool {
        matches!(self, Broadcast | Reduce | Gather | Scatter)
    }
    /// Whether the output may lie over the input.
    pub fn in_place(self) -> bool {
        !matches!(self, SendRecv | Barrier)
    }
    /// Whether all ranks' outputs are the same.
    pub fn same_everywhere(self) -> bool {
        matches!(self, AllReduce | AllGather | Broadcast)
    }
    /// Whether the size column is of `ranks` blocks of `count` elements.
    fn blocks(self) -> bool {
        matches!(self, ReduceScatter | AllGather | Gather | Scatter | AllToAll)
    }
}

impl FromStr for Kind {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let wanted = s.replace('-', "_");
        let names = || Kind::ALL.map(Kind::name).join(", ");
        Kind::ALL
            .into_iter()
            .find(|k| k.name() == wanted)
            .ok_or_else(|| format!("{s:?} is no collective; right are {}", names()))
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A collective over so many ranks and elements.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Job {
    pub kind: Kind,
    pub ranks: u32,
    pub root: u32,
    /// Elements as the call takes them: a block where there are blocks.
    pub count: u64,
}

impl Job {
    /// The job whose larger buffer has at most `bytes` bytes, as in nccl-tests (which rounds a block down to 16 bytes;
    /// here it is whole elements, so that odd lengths are measured too).
    pub fn of_bytes(kind: Kind, ranks: u32, root: u32, bytes: u64, dtype: DataType) -> Job {
        let elements = bytes / dtype.size();
        let count = match kind {
            Barrier => 0,
            _ if kind.blocks() => elements / u64::from(ranks),
            _ => elements,
        };
        Job { kind, ranks, root, count }
    }
    /// What the library is asked for.
    pub fn collective(&self) -> Collective {
        let root = self.root;
        match self.kind {
            AllReduce => Collective::AllReduce,
            ReduceScatter => Collective::ReduceScatter,
            AllGather => Collective::AllGather,
            Broadcast => Collective::Broadcast { root },
            Reduce => Collective::Reduce { root },
            Gather => Collective::Gather { root },
            Scatter => Collective::Scatter { root },
            AllToAll => Collective::AllToAll,
            SendRecv => Collective::SendRecv(self.transfers().into()),
            Barrier => Collective::Barrier,
        }
    }
    /// Each rank sends to the next.
    fn transfers(&self) -> Vec<Transfer> {
        let transfer = |from| Transfer { from, to: (from + 1) % self.ranks, count: self.count };
        (0..self.ranks).map(transfer).collect()
    }
    /// Elements of the larger buffer: the size column.
    pub fn elements(&self) -> u64 {
        if self.kind.blocks() { self.count * u64::from(self.ranks) } else { self.count }
    }
    /// Elements of a rank's input; `None` where it has none.
    pub fn input(&self, rank: u32) -> Option<u64> {
        let root = rank == self.root;
        match self.kind {
            ReduceScatter | AllToAll => Some(self.elements()),
            Scatter => root.then(|| self.elements()),
            Broadcast => root.then_some(self.count),
            Barrier => None,
            AllReduce | AllGather | Reduce | Gather | SendRecv => Some(self.count),
        }
    }
    /// Elements of a rank's output; `None` where it has none.
    pub fn output(&self, rank: u32) -> Option<u64> {
        let root = rank == self.root;
        match self.kind {
            AllGather | AllToAll => Some(self.elements()),
            Gather => root.then(|| self.elements()),
            Reduce => root.then_some(self.count),
            Barrier => None,
            AllReduce | ReduceScatter | Broadcast | Scatter | SendRecv => Some(self.count),
        }
    }
    /// In place: the first elements of a rank's input and of its output within the one buffer.
    pub fn in_place_at(&self, rank: u32) -> (u64, u64) {
        let block = u64::from(rank) * self.count;
        match self.kind {
            ReduceScatter => (0, block),
            AllGather => (block, 0),
            Gather if rank == self.root => (block, 0),
            Scatter if rank == self.root => (0, block),
            _ => (0, 0),
        }
    }
    /// Bus bandwidth over algorithm bandwidth: what crosses a rank's link, as a share of the size.
    pub fn bus_factor(&self) -> f64 {
        let others = f64::from(self.ranks - 1) / f64::from(self.ranks);
        match self.kind {
            AllReduce => 2.0 * others,
            ReduceScatter | AllGather | AllToAll | Gather | Scatter => others,
            Broadcast | Reduce | SendRecv => 1.0,
            Barrier => 0.0,
        }
    }
    /// What the busiest rank must at least read and write, as a multiple of the size: it reads its input and what it
    /// receives, writes its output and, once, what it publishes. For n ranks and one size:
    ///
    /// | collective | reads | writes |
    /// |---|---|---|
    /// | all_reduce | 1 + 2(n-1)/n | 1 + 1 |
    /// | reduce_scatter | 1 + (n-1)/n | 1/n + (n-1)/n |
    /// | all_gather | 1/n + (n-1)/n | 1 + 1/n |
    /// | broadcast, at the root | 1 | 1 + 1 |
    /// | reduce, at the root | 1 + 1 | 1 |
    /// | gather, scatter, at the root | 1 | 1 |
    /// | all_to_all | 1 + (n-1)/n | 1 + (n-1)/n |
    /// | sendrecv | 1 + 1 | 1 + 1 |
    ///
    /// One rank alone reads its input and writes its output: 2.
    pub fn traffic(&self) -> f64 {
        let others = f64::from(self.ranks - 1) / f64::from(self.ranks);
        match self.kind {
            Barrier => 0.0,
            _ if self.ranks == 1 => 2.0,
            AllReduce => 3.0 + 2.0 * others,
            ReduceScatter => 2.0 + others,
            AllGather => 3.0 - others,
            Broadcast | Reduce => 3.0,
            Gather | Scatter => 2.0,
            AllToAll => 2.0 + 2.0 * others,
            SendRecv => 4.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_with_either_dash() {
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
            assert_eq!(kind.name().replace('_', "-").parse(), Ok(kind));
        }
        assert!("allreduce".parse::<Kind>().unwrap_err().contains("all_reduce"));
    }

    #[test]
    fn sizes_are_those_of_the_larger_buffer() {
        let job = |kind| Job::of_bytes(kind, 3, 1, 100, DataType::F32);
        for (kind, count, elements) in
            [(AllReduce, 25, 25), (ReduceScatter, 8, 24), (AllGather, 8, 24), (Gather, 8, 24), (SendRecv, 25, 25)]
        {
            assert_eq!((job(kind).count, job(kind).elements()), (count, elements), "{kind}");
        }
        for kind in Kind::ALL.into_iter().filter(|k| *k != Barrier) {
            let job = job(kind);
            let largest = (0..3).flat_map(|r| [job.input(r), job.output(r)]).flatten().max();
            assert_eq!(largest, Some(job.elements()), "{kind}");
        }
        assert_eq!(job(Scatter).input(0), None);
        assert_eq!(job(Gather).output(1), Some(24));
        assert_eq!(job(ReduceScatter).in_place_at(2), (0, 16));
        assert_eq!(job(Gather).in_place_at(0), (0, 0));
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let factor = |kind, ranks| Job { kind, ranks, root: 0, count: 1 }.bus_factor();
        assert_eq!(factor(AllReduce, 4), 1.5);
        for kind in [ReduceScatter, AllGather, AllToAll, Gather, Scatter] {
            assert_eq!(factor(kind, 4), 0.75, "{kind}");
        }
        for kind in [Broadcast, Reduce, SendRecv] {
            assert_eq!(factor(kind, 4), 1.0, "{kind}");
        }
        assert_eq!(factor(AllReduce, 1), 0.0);
    }
}
