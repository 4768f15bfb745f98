//! Two accesses to the same memory, one of them a write, that nothing orders. One sweep over each memory; a read is
//! compared with the writes that overlap it, a write with everything.
use super::{Event, Extent, Fault, Kind, Order, Program};

#[derive(Clone, Copy)]
struct Access {
    start: u64,
    end: u64,
    node: usize,
    /// The group and the place of the work in its node; a caller's accesses have none.
    work: Option<(u32, u32)>,
    write: bool,
    /// Whether it may be both source and destination of its work.
    fold: bool,
}

/// The first race, if there is one.
pub fn check(program: &Program, order: &Order) -> Result<(), Fault> {
    for (memory, mut accesses) in gather(program).into_iter().enumerate() {
        accesses.sort_unstable_by_key(|a| (a.start, a.node));
        let (mut reads, mut writes): (Vec<Access>, Vec<Access>) = (Vec::new(), Vec::new());
        for b in accesses {
            let clash = |open: &mut Vec<Access>| {
                open.retain(|a| a.end > b.start);
                open.iter().find(|a| !ordered(order, a, &b)).copied()
            };
            let mut found = clash(&mut writes);
            if b.write {
                found = found.or_else(|| clash(&mut reads));
            }
            if let Some(a) = found {
                return Err(Fault::Race {
                    first: program.name(a.node),
                    second: program.name(b.node),
                    memory: program.memories[memory].name.clone(),
                    start: b.start,
                    end: a.end.min(b.end),
                });
            }
            if b.write { writes.push(b) } else { reads.push(b) }
        }
    }
    Ok(())
}

fn gather(program: &Program) -> Vec<Vec<Access>> {
    let mut by_memory = vec![Vec::new(); program.memories.len()];
    let mut add = |e: &Extent, node, work, write, fold| {
        if e.len > 0 {
            by_memory[e.memory.0 as usize].push(Access { start: e.start, end: e.end(), node, work, write, fold });
        }
    };
    for (node, n) in program.nodes.iter().enumerate() {
        match &n.event {
            Event::Begin { call, rank } | Event::End { call, rank } => {
                let call = &program.calls[*call];
                for e in call.inputs[*rank as usize].iter().chain(&call.outputs[*rank as usize]) {
                    add(e, node, None, true, false);
                }
            }
            Event::Work(work) => {
                for (i, w) in work.iter().enumerate() {
                    let (at, fold) = (Some((w.group, i as u32)), w.kind != Kind::Copy);
                    w.srcs.iter().for_each(|e| add(e, node, at, false, fold));
                    w.dsts.iter().for_each(|e| add(e, node, at, true, fold));
                }
            }
        }
    }
    by_memory
}

fn ordered(order: &Order, a: &Access, b: &Access) -> bool {
    if a.node != b.node {
        return order.before(a.node, b.node) || order.before(b.node, a.node);
    }
    match (a.work, b.work) {
        (Some(x), Some(y)) if x == y => a.fold && a.write != b.write && (a.start, a.end) == (b.start, b.end),
        (Some((x, _)), Some((y, _))) => x != y,
        _ => true,
    }
}
