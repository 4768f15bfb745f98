//! What happens before what. Each node has a vector clock: how many nodes of each actor have happened once it has. So
//! whether one node precedes another is one comparison.
use super::{Event, Fault, Program};
use crate::schedule::Collective;

/// The happens-before relation of a program without cycles.
pub struct Order {
    actors: usize,
    clocks: Vec<u32>,
    place: Vec<(u32, u32)>,
    /// The nodes in one of the orders in which they may happen.
    pub sorted: Vec<usize>,
}

impl Order {
    /// Of `program`, or the cycle that it has.
    pub fn of(program: &Program) -> Result<Order, Fault> {
        let nodes = &program.nodes;
        let actors = nodes.iter().map(|n| n.actor as usize + 1).max().unwrap_or(0);
        let mut last = vec![None; actors];
        let mut place: Vec<(u32, u32)> = Vec::with_capacity(nodes.len());
        let mut previous = Vec::with_capacity(nodes.len());
        for (i, node) in nodes.iter().enumerate() {
            let before: Option<usize> = last[node.actor as usize].replace(i);
            place.push((node.actor, before.map_or(0, |b| place[b].1 + 1)));
            previous.push(before);
        }
        let before = |i: usize| nodes[i].after.iter().copied().chain(previous[i]);
        let mut waits: Vec<u32> = (0..nodes.len()).map(|i| before(i).count() as u32).collect();
        let mut followers = vec![Vec::new(); nodes.len()];
        for i in 0..nodes.len() {
            before(i).for_each(|b| followers[b].push(i));
        }
        let mut clocks = vec![0; nodes.len() * actors];
        let mut sorted: Vec<usize> = (0..nodes.len()).filter(|&i| waits[i] == 0).collect();
        let mut next = 0;
        while let Some(&i) = sorted.get(next) {
            next += 1;
            for b in before(i) {
                for a in 0..actors {
                    clocks[i * actors + a] = clocks[i * actors + a].max(clocks[b * actors + a]);
                }
            }
            clocks[i * actors + place[i].0 as usize] = place[i].1 + 1;
            for &f in &followers[i] {
                waits[f] -= 1;
                if waits[f] == 0 {
                    sorted.push(f);
                }
            }
        }
        if sorted.len() < nodes.len() {
            return Err(Fault::Deadlock { cycle: cycle(program, &waits, before) });
        }
        Ok(Order { actors, clocks, place, sorted })
    }
    /// Whether node `a` has happened whenever node `b` begins.
    pub fn before(&self, a: usize, b: usize) -> bool {
        let (actor, index) = self.place[a];
        a != b && self.clocks[b * self.actors + actor as usize] > index
    }
    /// Whether every rank's end of a barrier follows every rank's begin.
    pub(super) fn barriers(&self, program: &Program) -> Result<(), Fault> {
        let all = program.nodes.iter().enumerate();
        for (call, c) in program.calls.iter().enumerate().filter(|(_, c)| c.shape.collective == Collective::Barrier) {
            let of_call = |event: &Event| match *event {
                Event::Begin { call: k, rank } if k == call => Some((rank, false)),
                Event::End { call: k, rank } if k == call => Some((rank, true)),
                _ => None,
            };
            let mut at = vec![[0; 2]; c.shape.ranks as usize];
            for (i, node) in all.clone() {
                if let Some((rank, end)) = of_call(&node.event) {
                    at[rank as usize][end as usize] = i;
                }
            }
            for rank in 0..c.shape.ranks {
                for missing in 0..c.shape.ranks {
                    if !self.before(at[missing as usize][0], at[rank as usize][1]) {
                        return Err(Fault::Barrier { call, rank, missing });
                    }
                }
            }
        }
        Ok(())
    }
}

/// Every node that never became ready waits for another such node; following them must come round.
fn cycle<I: Iterator<Item = usize>>(program: &Program, waits: &[u32], before: impl Fn(usize) -> I) -> Vec<String> {
    let mut path: Vec<usize> = waits.iter().position(|&w| w > 0).into_iter().collect();
    while let Some(stuck) = path.last().and_then(|&i| before(i).find(|&b| waits[b] > 0)) {
        if let Some(first) = path.iter().position(|&p| p == stuck) {
            path.drain(..first);
            break;
        }
        path.push(stuck);
    }
    path.into_iter().map(|i| program.name(i)).collect()
}
