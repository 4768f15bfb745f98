//! What really ran, for the checker: each submission with the operations that were prepared for it and the waits
//! that were enforced before it. A test turns a trace into a [`Program`] and proves it like a schedule.
use crate::{
    call::Checked,
    contract::{BufferId, DataType, Op, Range},
    schedule::{
        Actor, Algorithm, Place, Region, Shape,
        check::{Call, Event, Extent, FoldOrder, Kind, Label, Memory, MemoryId, Node, Program, Work},
    },
    span::Span,
};
use std::{
    collections::{HashMap, HashSet},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Records what a communicator submits. Given to its builder.
#[derive(Default)]
pub struct Trace {
    record: Mutex<Record>,
    submitted: Condvar,
}

/// A submission that is not made in this time never will be.
const PATIENCE: Duration = Duration::from_secs(10);

/// What was recorded.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// The calls, in order.
    pub calls: Vec<CallRecord>,
    /// The submissions: `(actor, value of its timeline)`.
    pub submissions: HashMap<(Actor, u64), SubmissionRecord>,
    /// What an imported buffer is a view of.
    pub aliases: HashMap<BufferId, BufferId>,
    /// What stands in for ranks that contribute nothing.
    pub neutral: HashSet<BufferId>,
}

/// One call.
#[derive(Clone, Debug)]
pub struct CallRecord {
    /// Of what.
    pub shape: Shape,
    /// Of which elements.
    pub dtype: DataType,
    /// By which algorithm.
    pub algorithm: Algorithm,
    /// Each rank's input and output; in place, twice the one span.
    pub spans: Vec<(Span, Span)>,
    /// Which ranks contribute nothing; empty: all do something.
    pub absent: Vec<bool>,
    /// Its submissions of each actor: the first value of the actor's timeline, and how many there are.
    pub values: Vec<(u64, u32)>,
}

/// One submission.
#[derive(Clone, Debug, Default)]
pub struct SubmissionRecord {
    /// What was prepared for it.
    pub ops: Vec<Op>,
    /// How many times longer an element is in the caller's memory than in staging.
    pub widening: u64,
    /// The waits that were enforced before it: actors and values. `None`: it was never submitted.
    pub waits: Option<Vec<(Actor, u64)>>,
}

impl Trace {
    /// What was recorded, once all that was prepared has been submitted: a rank may be done before the last host
    /// worker has been given its work.
    pub fn record(&self) -> Record {
        let held_back = |r: &mut Record| r.submissions.values().any(|s| s.waits.is_none());
        let waited = self.submitted.wait_timeout_while(self.lock(), PATIENCE, held_back);
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }
    pub(crate) fn call(&self, call: &Checked, algorithm: Algorithm, values: Vec<(u64, u32)>) {
        let spans = call.ranks.iter().map(|r| (r.input.clone(), r.output.clone())).collect();
        let (shape, dtype, absent) = (call.shape.clone(), call.dtype, call.absent.clone());
        self.lock().calls.push(CallRecord { shape, dtype, algorithm, spans, absent, values });
    }
    /// `ops`: with the ranges that are meant, before they are made as long as what the device writes.
    pub(crate) fn prepared(&self, actor: Actor, value: u64, ops: &[Op], widening: u64) {
        let mut record = self.lock();
        let submission = record.submissions.entry((actor, value)).or_default();
        (submission.ops, submission.widening) = (ops.to_vec(), widening);
    }
    pub(crate) fn neutral(&self, buffer: Option<BufferId>) {
        self.lock().neutral.extend(buffer);
    }
    pub(crate) fn submitted(&self, actor: Actor, value: u64, waits: &[(usize, u64)]) {
        let waits = waits.iter().map(|&(a, v)| (a as Actor, v)).collect();
        self.lock().submissions.entry((actor, value)).or_default().waits = Some(waits);
        self.submitted.notify_all();
    }
    pub(crate) fn alias(&self, view: BufferId, of: BufferId) {
        self.lock().aliases.insert(view, of);
    }
    fn lock(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Record {
    /// What the checker proves: the submissions that were made, ordered by their queues and by the waits that were
    /// enforced and by nothing else. Units are bytes.
    pub fn program(&self) -> Program {
        let mut build = Build { record: self, program: Program::default(), ids: HashMap::new() };
        // A wait may name a submission of a call further down: nodes are numbered first.
        let mut index: HashMap<(Actor, u64), usize> = HashMap::new();
        let mut next = 0;
        for call in &self.calls {
            for (actor, &(first, count)) in (0..).zip(&call.values) {
                let caller = usize::from(actor < call.shape.ranks);
                next += caller;
                for value in first..first + u64::from(count) {
                    index.insert((actor, value), next);
                    next += 1;
                }
                next += caller;
            }
        }
        for (k, call) in self.calls.iter().enumerate() {
            for (actor, &(first, count)) in (0..).zip(&call.values) {
                let caller = |event| Node { actor, label: Label::Text(String::new()), after: Vec::new(), event };
                if actor < call.shape.ranks {
                    build.program.nodes.push(caller(Event::Begin { call: k, rank: actor }));
                }
                for value in first..first + u64::from(count) {
                    let node = build.submission(actor, value, &index);
                    build.program.nodes.push(node);
                }
                if actor < call.shape.ranks {
                    build.program.nodes.push(caller(Event::End { call: k, rank: actor }));
                }
            }
            let call = build.call(call);
            build.program.calls.push(call);
        }
        build.program
    }
}

struct Build<'a> {
    record: &'a Record,
    program: Program,
    ids: HashMap<(BufferId, u64), MemoryId>,
}

impl Build<'_> {
    fn submission(&mut self, actor: Actor, value: u64, index: &HashMap<(Actor, u64), usize>) -> Node {
        let Some(submission) = self.record.submissions.get(&(actor, value)) else {
            let label = Label::Text(format!("submission {value} of actor {actor}, which was not recorded"));
            return Node { actor, label, after: Vec::new(), event: Event::Work(Vec::new()) };
        };
        let mut work = Vec::new();
        let mut group = 0;
        for op in &submission.ops {
            let kind = match op {
                Op::Barrier => {
                    group += 1;
                    continue;
                }
                Op::Copy { .. } => Kind::Copy,
                Op::Kernel(k) if k.finish.is_some() => Kind::Finish,
                Op::Kernel(_) => Kind::Fold,
                Op::Acquire { .. } | Op::Release { .. } => continue,
            };
            let (sources, stores) = op.accesses();
            // Where staging is narrow, only kernels touch the caller's memory, and say which range is which.
            let wire = match op {
                Op::Kernel(k) => k.wire.as_ref(),
                _ => None,
            };
            let copies = matches!(op, Op::Copy { .. });
            let mut extents = |ranges: &[Range], narrow: Option<&Vec<bool>>| {
                let times = |i: usize| if copies || narrow.is_some_and(|n| n[i]) { submission.widening } else { 1 };
                ranges.iter().enumerate().map(|(i, r)| self.extent(*r, times(i))).collect()
            };
            let srcs = extents(sources, wire.map(|w| &w.sources));
            work.push(Work { kind, group, srcs, dsts: extents(stores, wire.map(|w| &w.stores)) });
        }
        let waits = submission.waits.iter().flatten();
        let after = waits.filter_map(|wait| index.get(wait).copied()).collect();
        let label = Label::Text(format!("submission {value} of actor {actor}"));
        Node { actor, label, after, event: Event::Work(work) }
    }
    fn call(&mut self, call: &CallRecord) -> Call {
        let unit = call.dtype.size();
        let mut memory = |rank: u32, place: Place, len: u64| -> Vec<Extent> {
            let Some((memory, start)) = call.shape.physical(Region::new(place, 0, len)) else { return Vec::new() };
            let (input, output) = &call.spans[rank as usize];
            let mut ranges = Vec::new();
            (if memory.output { output } else { input }).ranges(start * unit, len * unit, &mut ranges);
            ranges.into_iter().map(|r| self.extent(r, 1)).collect()
        };
        let ranks = 0..call.shape.ranks;
        let present = |r: u32| call.absent.get(r as usize) != Some(&true);
        let input = |r| if present(r) { memory(r, Place::Input(r), call.shape.input_len(r)) } else { Vec::new() };
        let inputs = ranks.clone().map(input).collect();
        let outputs = ranks.map(|r| memory(r, Place::Output(r), call.shape.output_len(r))).collect();
        let order = if call.algorithm.in_rank_order() { FoldOrder::Rank } else { FoldOrder::Any };
        Call { shape: call.shape.clone(), unit, order, inputs, outputs }
    }
    /// The range in the memory that it is a view of, `times` as long: so one element has as many units wherever it
    /// lies. Memory is another one with each factor: calls of unlike wire types are proven each for itself.
    fn extent(&mut self, range: Range, times: u64) -> Extent {
        let owner = *self.record.aliases.get(&range.buffer).unwrap_or(&range.buffer);
        let memories = &mut self.program.memories;
        let neutral = &mut self.program.neutral;
        let memory = *self.ids.entry((owner, times)).or_insert_with(|| {
            memories.push(Memory { name: format!("buffer {} of {}", owner.index, owner.device), len: 0 });
            let id = MemoryId(memories.len() as u32 - 1);
            neutral.extend(self.record.neutral.contains(&owner).then_some(id));
            id
        });
        let len = &mut memories[memory.0 as usize].len;
        *len = (*len).max(range.end() * times);
        Extent { memory, start: range.offset * times, len: range.size * times }
    }
}
