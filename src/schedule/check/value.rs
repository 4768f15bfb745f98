//! What each unit of memory holds, as an expression: a rank's contribution to a call, a fold of expressions in order,
//! or a finished fold. Once there is no race, any one order of the nodes shows what all orders give.
//!
//! Expressions are interned, and mean a whole range: a [`Value`] at address `x` is its expression at element
//! `x + shift`. So a chunk is one entry however long it is, and two values are equal if their numbers are.
use super::{Call, Event, Extent, Fault, FoldOrder, Kind, MemoryId, Order, Program, Wrong};
use crate::schedule::Collective;
use std::collections::{HashMap, HashSet};

/// The first wrong value, if there is one.
pub fn check(program: &Program, order: &Order) -> Result<(), Fault> {
    let mut state = State {
        program,
        memories: vec![Cells::default(); program.memories.len()],
        exprs: Exprs::default(),
        agreed: vec![Cells::default(); program.calls.len()],
        proven: HashSet::new(),
        finished: vec![None; program.calls.len()],
    };
    for memory in &program.neutral {
        let (end, value) =
            (program.memories[memory.0 as usize].len, Value { expr: state.exprs.id(Expr::Neutral), shift: 0 });
        state.memories[memory.0 as usize].set(0, end, &[Cell { start: 0, end, value }]);
    }
    for &node in &order.sorted {
        match &program.nodes[node].event {
            Event::Begin { call, rank } => state.begin(*call, *rank),
            Event::End { call, rank } => state.end(*call, *rank)?,
            Event::Work(work) => {
                let mut in_order: Vec<_> = work.iter().collect();
                in_order.sort_by_key(|w| w.group);
                for w in in_order {
                    state.work(node, w.kind, &w.srcs, &w.dsts)?;
                }
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Value {
    expr: u32,
    shift: i64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cell {
    start: u64,
    end: u64,
    value: Value,
}

/// Disjoint ranges in order of address. What lies between them is undefined.
#[derive(Clone, Default)]
struct Cells(Vec<Cell>);

impl Cells {
    /// Replaces whatever lies in `start..end`.
    fn set(&mut self, start: u64, end: u64, cells: &[Cell]) {
        if start == end {
            return;
        }
        let from = self.0.partition_point(|c| c.end <= start);
        let to = from + self.0[from..].partition_point(|c| c.start < end);
        let left = self.0[from..to].first().filter(|c| c.start < start).map(|c| Cell { end: start, ..*c });
        let right = self.0[from..to].last().filter(|c| c.end > end).map(|c| Cell { start: end, ..*c });
        self.0.splice(from..to, left.into_iter().chain(cells.iter().copied()).chain(right));
    }
    /// What lies in `start..end`, or the first address that holds nothing.
    fn get(&self, start: u64, end: u64) -> Result<Vec<Cell>, u64> {
        let from = self.0.partition_point(|c| c.end <= start);
        let mut at = start;
        let mut found = Vec::with_capacity(1);
        for c in self.0[from..].iter().take_while(|c| c.start < end) {
            if c.start > at {
                return Err(at);
            }
            found.push(Cell { start: at, end: c.end.min(end), value: c.value });
            at = c.end.min(end);
        }
        if at < end { Err(at) } else { Ok(found) }
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Expr {
    Leaf {
        call: usize,
        rank: u32,
    },
    /// What no fold changes with.
    Neutral,
    /// Each part with its shift against the first.
    Fold(Vec<(u32, i64)>),
    Finish(u32),
}

#[derive(Default)]
struct Exprs {
    list: Vec<Expr>,
    ids: HashMap<Expr, u32>,
}

impl Exprs {
    fn id(&mut self, expr: Expr) -> u32 {
        let next = self.list.len() as u32;
        *self.ids.entry(expr).or_insert_with_key(|e| {
            self.list.push(e.clone());
            next
        })
    }
    /// A fold whose first part is an unfinished fold is the longer fold: both go from left to right.
    fn fold(&mut self, parts: &[Value]) -> Value {
        let all = parts[0];
        let parts: Vec<Value> = parts.iter().copied().filter(|p| self.list[p.expr as usize] != Expr::Neutral).collect();
        let first = parts.first().copied().unwrap_or(all);
        if parts.len() <= 1 {
            return first;
        }
        let mut list = match &self.list[first.expr as usize] {
            Expr::Fold(inner) => inner.clone(),
            _ => vec![(first.expr, 0)],
        };
        list.extend(parts[1..].iter().map(|p| (p.expr, p.shift - first.shift)));
        Value { expr: self.id(Expr::Fold(list)), shift: first.shift }
    }
    fn finish(&mut self, value: Value) -> Value {
        Value { expr: self.id(Expr::Finish(value.expr)), ..value }
    }
    /// Its leaves as call, rank and shift. Says whether there is a finish inside.
    fn leaves(&self, expr: u32, shift: i64, out: &mut Vec<(usize, u32, i64)>) -> bool {
        match &self.list[expr as usize] {
            Expr::Leaf { call, rank } => {
                out.push((*call, *rank, shift));
                false
            }
            Expr::Neutral => false,
            Expr::Fold(parts) => parts.iter().fold(false, |f, &(e, s)| self.leaves(e, shift + s, out) | f),
            Expr::Finish(e) => {
                self.leaves(*e, shift, out);
                true
            }
        }
    }
    fn show(&self, expr: u32, element: i64) -> String {
        match &self.list[expr as usize] {
            Expr::Leaf { call, rank } => format!("x{rank}[{element}] of call {call}"),
            Expr::Neutral => "nothing".into(),
            Expr::Finish(e) => format!("finish({})", self.show(*e, element)),
            Expr::Fold(parts) => {
                let parts: Vec<_> = parts.iter().map(|&(e, s)| self.show(e, element + s)).collect();
                format!("({})", parts.join(" + "))
            }
        }
    }
}

/// What a range of an output should hold; output unit `o` comes from input unit `o + shift`.
#[derive(Clone, Copy)]
struct Want {
    start: u64,
    end: u64,
    /// `None`: the reduction of all ranks.
    rank: Option<u32>,
    shift: i64,
}

/// A piece of a rank's output. Unit `o` lies at `o + offset`.
#[derive(Clone, Copy)]
struct Output {
    call: usize,
    rank: u32,
    memory: MemoryId,
    offset: i64,
}

struct State<'a> {
    program: &'a Program,
    memories: Vec<Cells>,
    exprs: Exprs,
    /// What the ranks that have ended found, by unit of the output.
    agreed: Vec<Cells>,
    /// Reductions known to be right but for their order.
    proven: HashSet<(usize, u32)>,
    /// The reduction of each call in rank order.
    finished: Vec<Option<u32>>,
}

impl State<'_> {
    fn begin(&mut self, call: usize, rank: u32) {
        let c = &self.program.calls[call];
        let expr = self.exprs.id(Expr::Leaf { call, rank });
        for e in &c.outputs[rank as usize] {
            self.memories[e.memory.0 as usize].set(e.start, e.end(), &[]);
        }
        for (at, e) in logical(&c.inputs[rank as usize]) {
            let value = Value { expr, shift: at as i64 - e.start as i64 };
            self.memories[e.memory.0 as usize].set(e.start, e.end(), &[Cell { start: e.start, end: e.end(), value }]);
        }
    }

    fn work(&mut self, node: usize, kind: Kind, srcs: &[Extent], dsts: &[Extent]) -> Result<(), Fault> {
        let mut read = Vec::with_capacity(srcs.len());
        for e in srcs {
            let mut cells =
                self.memories[e.memory.0 as usize].get(e.start, e.end()).map_err(|at| Fault::Undefined {
                    who: self.program.name(node),
                    memory: self.program.memories[e.memory.0 as usize].name.clone(),
                    at,
                })?;
            for c in &mut cells {
                *c = moved(c, e.start, 0);
            }
            read.push(cells);
        }
        let result = if kind == Kind::Copy { read.swap_remove(0) } else { self.fold(&read, kind) };
        for e in dsts {
            let cells: Vec<Cell> = result.iter().map(|c| moved(c, 0, e.start)).collect();
            self.memories[e.memory.0 as usize].set(e.start, e.end(), &cells);
        }
        Ok(())
    }
    /// Of sources that all start at 0.
    fn fold(&mut self, read: &[Vec<Cell>], kind: Kind) -> Vec<Cell> {
        let mut ends: Vec<u64> = read.iter().flatten().map(|c| c.end).collect();
        ends.sort_unstable();
        ends.dedup();
        let mut at = vec![0; read.len()];
        let mut start = 0;
        let mut out = Vec::with_capacity(ends.len());
        for end in ends {
            let parts: Vec<Value> = read.iter().zip(&at).map(|(cells, &i)| cells[i].value).collect();
            let mut value = self.exprs.fold(&parts);
            if kind == Kind::Finish {
                value = self.exprs.finish(value);
            }
            out.push(Cell { start, end, value });
            for (cells, i) in read.iter().zip(&mut at) {
                *i += (cells[*i].end == end) as usize;
            }
            start = end;
        }
        out
    }

    fn end(&mut self, call: usize, rank: u32) -> Result<(), Fault> {
        let program = self.program;
        let c = &program.calls[call];
        let wants = wants(c, rank);
        let room: u64 = c.outputs[rank as usize].iter().map(|e| e.len).sum();
        if wants.iter().map(|w| w.end - w.start).sum::<u64>() != room {
            return Err(Fault::Malformed { what: format!("call {call}: rank {rank}'s output has {room} units") });
        }
        for (at, e) in logical(&c.outputs[rank as usize]) {
            let output = Output { call, rank, memory: e.memory, offset: e.start as i64 - at as i64 };
            for want in &wants {
                let (start, end) = (want.start.max(at), want.end.min(at + e.len));
                if start < end {
                    self.range(output, want, start, end)?;
                }
            }
        }
        for e in c.inputs[rank as usize].iter().chain(&c.outputs[rank as usize]) {
            self.memories[e.memory.0 as usize].set(e.start, e.end(), &[]);
        }
        Ok(())
    }
    /// Units `start..end` of an output.
    fn range(&mut self, output: Output, want: &Want, start: u64, end: u64) -> Result<(), Fault> {
        let Output { call, rank, memory, offset } = output;
        let address = |o: u64| (o as i64 + offset) as u64;
        let wrong = |at, wrong, got| Err(Fault::Result { call, rank, at, wrong, got });
        let cells = match self.memories[memory.0 as usize].get(address(start), address(end)) {
            Ok(cells) => cells,
            Err(at) => return wrong((at as i64 - offset) as u64, Wrong::Undefined, "nothing".into()),
        };
        if want.rank.is_none() && !self.program.calls[call].inputs.iter().any(|input| !input.is_empty()) {
            return Ok(()); // The reduction of nothing has no elements to tell apart.
        }
        for cell in cells {
            let at = (cell.start as i64 - offset) as u64;
            let value = Value { shift: cell.value.shift + offset, ..cell.value };
            if let Some(w) = self.judge(call, want, value, at as i64) {
                return wrong(at, w, self.exprs.show(value.expr, at as i64 + value.shift));
            }
            if want.rank.is_none() && self.program.calls[call].shape.collective == Collective::AllReduce {
                let end = (cell.end as i64 - offset) as u64;
                self.agree(call, rank, Cell { start: at, end, value })?;
            }
        }
        Ok(())
    }
    /// What is wrong with a value, which is given by unit of the output and starts at unit `at`.
    fn judge(&mut self, call: usize, want: &Want, value: Value, at: i64) -> Option<Wrong> {
        let c = &self.program.calls[call];
        let exact = match want.rank {
            Some(rank) => Some(self.exprs.id(Expr::Leaf { call, rank })),
            None if c.order == FoldOrder::Rank => Some(self.finished(call)),
            None => None,
        };
        let known = exact.map_or(self.proven.contains(&(call, value.expr)), |e| e == value.expr);
        if known && value.shift == want.shift {
            return None;
        }
        let mut leaves = Vec::new();
        let (body, finished) = match self.exprs.list[value.expr as usize] {
            Expr::Finish(body) => (body, true),
            _ => (value.expr, false),
        };
        let inner = self.exprs.leaves(body, value.shift, &mut leaves);
        for &(k, rank, shift) in &leaves {
            if k != call {
                return Some(Wrong::Stale { rank, call: k });
            }
            if want.rank.is_some_and(|r| r != rank) {
                return Some(Wrong::Stranger { rank });
            }
            if shift != want.shift {
                return Some(Wrong::Element { rank, got: at + shift, want: at + want.shift });
            }
        }
        let ranks = want.rank.map_or(0..c.shape.ranks, |r| r..r + 1);
        for rank in ranks.filter(|r| !c.inputs[*r as usize].is_empty()) {
            match leaves.iter().filter(|l| l.1 == rank).count() {
                0 => return Some(Wrong::Missing { rank }),
                1 => {}
                _ => return Some(Wrong::Repeated { rank }),
            }
        }
        if inner || (finished && want.rank.is_some()) {
            return Some(Wrong::Finished);
        }
        if !finished && want.rank.is_none() {
            return Some(Wrong::Unfinished);
        }
        if exact.is_some() {
            return Some(Wrong::Order);
        }
        self.proven.insert((call, value.expr));
        None
    }
    fn finished(&mut self, call: usize) -> u32 {
        if let Some(expr) = self.finished[call] {
            return expr;
        }
        let inputs = &self.program.calls[call].inputs;
        let present = (0..).zip(inputs).filter(|(_, input)| !input.is_empty()).map(|(rank, _)| rank);
        let leaves: Vec<Value> =
            present.map(|rank| Value { expr: self.exprs.id(Expr::Leaf { call, rank }), shift: 0 }).collect();
        let fold = self.exprs.fold(&leaves);
        let expr = self.exprs.finish(fold).expr;
        self.finished[call] = Some(expr);
        expr
    }
    /// The same expression as on the ranks that ended before.
    fn agree(&mut self, call: usize, rank: u32, cell: Cell) -> Result<(), Fault> {
        match self.agreed[call].get(cell.start, cell.end) {
            Err(_) => self.agreed[call].set(cell.start, cell.end, &[cell]),
            Ok(others) => {
                if let Some(other) = others.iter().find(|o| o.value != cell.value) {
                    let show = |v: Value| self.exprs.show(v.expr, other.start as i64 + v.shift);
                    let (got, other_) = (show(cell.value), show(other.value));
                    return Err(Fault::Differs { call, rank, at: other.start, got, other: other_ });
                }
            }
        }
        Ok(())
    }
}

/// Pieces, each with its first unit of the whole.
fn logical(pieces: &[Extent]) -> impl Iterator<Item = (u64, &Extent)> {
    pieces.iter().scan(0, |at, e| Some((std::mem::replace(at, *at + e.len), e)))
}

fn moved(c: &Cell, from: u64, to: u64) -> Cell {
    let delta = to as i64 - from as i64;
    let value = Value { shift: c.value.shift - delta, ..c.value };
    Cell { start: (c.start as i64 + delta) as u64, end: (c.end as i64 + delta) as u64, value }
}

/// What a rank's output should hold, from the definition of each collective.
fn wants(call: &Call, rank: u32) -> Vec<Want> {
    let (count, ranks, unit) = (call.shape.count, call.shape.ranks as u64, call.unit);
    let want = |start: u64, len: u64, from: Option<u32>, input: u64| Want {
        start: start * unit,
        end: (start + len) * unit,
        rank: from,
        shift: (input * unit) as i64 - (start * unit) as i64,
    };
    let r = rank as u64;
    let blocks = |input: u64| (0..ranks).map(|b| want(b * count, count, Some(b as u32), input)).collect();
    match &call.shape.collective {
        Collective::AllReduce => vec![want(0, count, None, 0)],
        Collective::Reduce { root } if *root == rank => vec![want(0, count, None, 0)],
        Collective::ReduceScatter => vec![want(0, count, None, r * count)],
        Collective::Broadcast { root } => vec![want(0, count, Some(*root), 0)],
        Collective::Scatter { root } => vec![want(0, count, Some(*root), r * count)],
        Collective::AllGather => blocks(0),
        Collective::Gather { root } if *root == rank => blocks(0),
        Collective::AllToAll => blocks(r * count),
        Collective::SendRecv(list) => {
            let mut sent = vec![0; ranks as usize];
            let mut received = 0;
            let mut wants = Vec::new();
            for t in list.iter() {
                if t.to == rank {
                    wants.push(want(received, t.count, Some(t.from), sent[t.from as usize]));
                    received += t.count;
                }
                sent[t.from as usize] += t.count;
            }
            wants
        }
        Collective::Reduce { .. } | Collective::Gather { .. } | Collective::Barrier => Vec::new(),
    }
}
