//! What a program orders and what it writes, worked out node by node and pair by pair: slow, plain, and without the
//! checker's clocks, sweeps and expressions.
use allhands::schedule::{
    Collective,
    check::{Event, Extent, Kind, Program},
};
use std::collections::BTreeMap;

/// Which nodes have happened before each node, one bit each.
pub struct Closure(Vec<Vec<u64>>);

impl Closure {
    /// `None` if there is a cycle.
    pub fn of(p: &Program) -> Option<Closure> {
        let n = p.nodes.len();
        let mut queue = BTreeMap::new();
        let previous: Vec<Option<usize>> = p.nodes.iter().enumerate().map(|(i, x)| queue.insert(x.actor, i)).collect();
        let mut before: Vec<Option<Vec<u64>>> = vec![None; n];
        loop {
            let (mut open, mut moved) = (false, false);
            for i in 0..n {
                if before[i].is_some() {
                    continue;
                }
                let all = || p.nodes[i].after.iter().copied().chain(previous[i]);
                if all().any(|b| before[b].is_none()) {
                    open = true;
                    continue;
                }
                let mut bits = vec![0; n.div_ceil(64)];
                for b in all() {
                    bits.iter_mut().zip(before[b].as_ref().expect("it was looked at")).for_each(|(x, y)| *x |= y);
                    bits[b / 64] |= 1 << (b % 64);
                }
                (before[i], moved) = (Some(bits), true);
            }
            if !open {
                return Some(Closure(before.into_iter().flatten().collect()));
            }
            if !moved {
                return None;
            }
        }
    }
    pub fn before(&self, a: usize, b: usize) -> bool {
        self.0[b][a / 64] >> (a % 64) & 1 == 1
    }
}

/// What a node touches, and whether it writes it.
fn touches(p: &Program, node: usize) -> Vec<(Extent, bool)> {
    match &p.nodes[node].event {
        Event::Begin { call, rank } | Event::End { call, rank } => {
            let (c, r) = (&p.calls[*call], *rank as usize);
            c.inputs[r].iter().chain(&c.outputs[r]).map(|e| (*e, true)).collect()
        }
        Event::Work(work) => work
            .iter()
            .flat_map(|w| w.srcs.iter().map(|e| (*e, false)).chain(w.dsts.iter().map(|e| (*e, true))))
            .collect(),
    }
}

/// What each node writes, if every element of every contribution is another number.
pub fn written(p: &Program, closure: &Closure) -> Vec<Vec<u64>> {
    let mut order: Vec<usize> = (0..p.nodes.len()).collect();
    order.sort_by_key(|&i| closure.0[i].iter().map(|w| w.count_ones()).sum::<u32>());
    let mut memory: Vec<Vec<u64>> = p.memories.iter().map(|m| vec![0; m.len as usize]).collect();
    let mut written = vec![Vec::new(); p.nodes.len()];
    let mix = |a: u64, b: u64| (a.rotate_left(5) ^ b).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for i in order {
        let mut store = |memory: &mut Vec<Vec<u64>>, e: &Extent, value: &[u64]| {
            memory[e.memory.0 as usize][e.start as usize..e.end() as usize].copy_from_slice(value);
            written[i].extend_from_slice(value);
        };
        match &p.nodes[i].event {
            Event::Begin { call, rank } | Event::End { call, rank } => {
                let (c, r) = (&p.calls[*call], *rank as usize);
                let begin = matches!(p.nodes[i].event, Event::Begin { .. });
                for e in c.outputs[r].iter().chain(&c.inputs[r]) {
                    let seed = mix(mix(*call as u64 + 1, r as u64 + 1), u64::from(begin));
                    let value: Vec<u64> = (0..e.len).map(|x| mix(seed, x + 1)).collect();
                    store(&mut memory, e, &value);
                }
            }
            Event::Work(work) => {
                let load = |e: &Extent| memory[e.memory.0 as usize][e.start as usize..e.end() as usize].to_vec();
                let mut results = Vec::new();
                for w in work {
                    let mut value = load(&w.srcs[0]);
                    for src in &w.srcs[1..] {
                        value.iter_mut().zip(load(src)).for_each(|(a, b)| *a = mix(*a, b));
                    }
                    if w.kind == Kind::Finish {
                        value.iter_mut().for_each(|a| *a = mix(*a, 1));
                    }
                    results.push(value);
                }
                for (w, value) in work.iter().zip(results) {
                    w.dsts.iter().for_each(|e| store(&mut memory, e, &value));
                }
            }
        }
    }
    written
}

/// Whether the order of two nodes can be seen: they touch the same memory and one writes, or a barrier promises it.
pub fn conflict(p: &Program, a: usize, b: usize) -> bool {
    if let (Event::Begin { call: x, .. }, Event::End { call: y, .. }) = (&p.nodes[a].event, &p.nodes[b].event)
        && x == y
        && p.calls[*x].shape.collective == Collective::Barrier
    {
        return true;
    }
    let overlap = |x: &Extent, y: &Extent| x.memory == y.memory && x.start < y.end() && y.start < x.end();
    touches(p, a).iter().any(|(x, v)| touches(p, b).iter().any(|(y, w)| (*v || *w) && overlap(x, y)))
}
