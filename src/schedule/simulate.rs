//! Runs a sequence of schedules on vectors, in an order drawn from a seed: what the proof says of expressions, seen on
//! numbers. Staging and outputs are poisoned, and callers overwrite their buffers as soon as their rank is done.
use super::check::{Event, Extent, Fault, Kind, Order, Program, Sequence};

/// What memory holds before anything is written to it.
pub const POISON: i64 = i64::MIN / 64 + 12_345;

/// What a reduction does to numbers.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// Accumulator and next source.
    pub fold: fn(i64, i64) -> i64,
    /// Of the last fold.
    pub finish: fn(i64) -> i64,
}

/// Runs `sequence` on `inputs[call][rank]` and gives `[call][rank]` the outputs, or says why it got stuck.
pub fn simulate(
    sequence: &Sequence<'_>,
    inputs: &[Vec<Vec<i64>>],
    seed: u64,
    op: Op,
) -> Result<Vec<Vec<Vec<i64>>>, Fault> {
    let program = sequence.program()?;
    let nodes = &program.nodes;
    let mut previous = vec![None; nodes.len()];
    let mut last = std::collections::HashMap::new();
    for (i, node) in nodes.iter().enumerate() {
        previous[i] = last.insert(node.actor, i);
    }
    let before = |i: usize| nodes[i].after.iter().copied().chain(previous[i]);
    let mut waits: Vec<usize> = (0..nodes.len()).map(|i| before(i).count()).collect();
    let mut followers = vec![Vec::new(); nodes.len()];
    for i in 0..nodes.len() {
        before(i).for_each(|b| followers[b].push(i));
    }
    let mut ready: Vec<usize> = (0..nodes.len()).filter(|&i| waits[i] == 0).collect();
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut memory: Vec<Vec<i64>> = program.memories.iter().map(|m| vec![POISON; m.len as usize]).collect();
    let mut outputs: Vec<Vec<Vec<i64>>> = program.calls.iter().map(|c| vec![Vec::new(); c.outputs.len()]).collect();
    let mut done = 0;
    while !ready.is_empty() {
        let i = ready.swap_remove(random.below(ready.len()));
        run(&program, i, &mut memory, inputs, &mut outputs, op, &mut random);
        done += 1;
        for &f in &followers[i] {
            waits[f] -= 1;
            if waits[f] == 0 {
                ready.push(f);
            }
        }
    }
    if done < nodes.len() {
        // What is stuck here is stuck in every order, and the order of the program names the cycle.
        Order::of(&program)?;
    }
    Ok(outputs)
}

fn run(
    program: &Program,
    node: usize,
    memory: &mut [Vec<i64>],
    inputs: &[Vec<Vec<i64>>],
    outputs: &mut [Vec<Vec<i64>>],
    op: Op,
    random: &mut Random,
) {
    match &program.nodes[node].event {
        Event::Begin { call, rank } => {
            let (c, r) = (&program.calls[*call], *rank as usize);
            c.outputs[r].iter().for_each(|e| slice(memory, e).fill(POISON));
            let mut given = &inputs[*call][r][..];
            for e in &c.inputs[r] {
                let (piece, rest) = given.split_at(e.len as usize);
                slice(memory, e).copy_from_slice(piece);
                given = rest;
            }
        }
        Event::End { call, rank } => {
            let (c, r) = (&program.calls[*call], *rank as usize);
            outputs[*call][r] = c.outputs[r].iter().flat_map(|e| slice(memory, e).to_vec()).collect();
            c.inputs[r].iter().chain(&c.outputs[r]).for_each(|e| slice(memory, e).fill(POISON));
        }
        Event::Work(work) => {
            let mut order: Vec<_> = work.iter().map(|w| (w.group, random.next(), w)).collect();
            order.sort_by_key(|w| (w.0, w.1));
            for (.., w) in order {
                let mut value = slice(memory, &w.srcs[0]).to_vec();
                for src in &w.srcs[1..] {
                    value.iter_mut().zip(slice(memory, src)).for_each(|(a, b)| *a = (op.fold)(*a, *b));
                }
                if w.kind == Kind::Finish {
                    value.iter_mut().for_each(|a| *a = (op.finish)(*a));
                }
                w.dsts.iter().for_each(|d| slice(memory, d).copy_from_slice(&value));
            }
        }
    }
}

fn slice<'a>(memory: &'a mut [Vec<i64>], e: &Extent) -> &'a mut [i64] {
    &mut memory[e.memory.0 as usize][e.start as usize..e.end() as usize]
}

/// Xorshift: the same seed gives the same order everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}
