//! From a lowered schedule to command lists and submissions.
//!
//! A [`Plan`] is a lowered schedule cut into batches: runs of consecutive steps of one actor in which only the first
//! waits for others. One batch is one submission. Plans know nothing of buffers, so they are kept and used again;
//! [`record`] gives a batch the buffers of a call.
use crate::{
    call::Checked,
    contract::{DataType, Domain, Kernel, Limits, Op, Range, ReduceOp},
    pending::ReducedOn,
    schedule::{Action, Actor, Algorithm, Home, Place, Region, Schedule, lower},
    staging::{Needs, Pool, domain},
};
use std::collections::BTreeSet;

/// What is kept of a call's shape, for calls like it.
pub(crate) struct Plan {
    pub schedule: Schedule,
    pub algorithm: Algorithm,
    pub chunks: u64,
    /// In an order in which each comes after all that it waits for: queued in this order, no queue can deadlock,
    /// whichever actors share it.
    pub batches: Vec<Batch>,
    /// Submissions of each actor.
    pub submissions: Vec<u32>,
    pub reduced_on: ReducedOn,
    /// Elements that each arena needs in one bank.
    arenas: Vec<((Actor, Home), u64)>,
}

/// One submission of one actor.
pub(crate) struct Batch {
    pub actor: Actor,
    /// Which of the actor's: 0, 1, ...
    pub ordinal: u32,
    /// The batches that come first: an actor and an ordinal.
    pub waits: Vec<(Actor, u32)>,
    steps: std::ops::Range<usize>,
    /// Regions that others wrote and this batch reads; that this batch writes and others read.
    acquires: Vec<Region>,
    releases: Vec<Region>,
}

impl Plan {
    pub fn new(schedule: Schedule, algorithm: Algorithm, chunks: u64) -> Self {
        let ranges = lower::batches(&schedule);
        // Which batch a step is in.
        let place: Vec<Vec<u32>> = ranges
            .iter()
            .map(|batches| (0..).zip(batches).flat_map(|(i, steps)| steps.clone().map(move |_| i)).collect())
            .collect();
        let shared = Shared::of(&schedule);
        let mut left: Vec<Vec<Batch>> = Vec::new();
        for (actor, batches) in (0..).zip(&ranges) {
            let of_actor = (0..).zip(batches).map(|(ordinal, steps)| {
                let after = &schedule.steps[actor as usize][steps.start].after;
                let mut waits: Vec<_> =
                    after.iter().map(|d| (d.actor, place[d.actor as usize][d.index as usize])).collect();
                waits.sort();
                waits.dedup();
                let (acquires, releases) = shared.crossings(&schedule, actor, steps.clone());
                Batch { actor, ordinal, waits, steps: steps.clone(), acquires, releases }
            });
            left.push(of_actor.collect());
        }
        let submissions = left.iter().map(|b| b.len() as u32).collect();
        let n = schedule.shape.ranks as usize;
        let reduces = |actors: &[Vec<crate::schedule::Step>]| {
            actors.iter().flatten().flat_map(|s| &s.actions).any(|a| matches!(a, Action::Reduce { .. }))
        };
        let reduced_on = match (reduces(&schedule.steps[..n]), reduces(&schedule.steps[n..])) {
            (true, _) => ReducedOn::Device,
            (false, true) => ReducedOn::Host,
            (false, false) => ReducedOn::None,
        };
        let arenas = lower::arenas(&schedule).into_iter().collect();
        Plan { batches: in_order(left), submissions, reduced_on, arenas, schedule, algorithm, chunks }
    }
    /// Bytes that each arena needs in one bank.
    pub fn needs(&self, dtype: DataType) -> Needs {
        self.arenas.iter().map(|(arena, elements)| (*arena, elements * dtype.size())).collect()
    }
    /// Submissions to the ranks' devices.
    pub fn rank_submissions(&self) -> u32 {
        self.submissions[..self.schedule.shape.ranks as usize].iter().sum()
    }
}

/// Every batch after those that it waits for. The schedule is free of cycles: the checker has shown it.
fn in_order(mut left: Vec<Vec<Batch>>) -> Vec<Batch> {
    left.iter_mut().for_each(|batches| batches.reverse());
    let mut done = vec![0; left.len()];
    let mut order = Vec::new();
    loop {
        let before = order.len();
        for actor in 0..left.len() {
            while let Some(batch) = left[actor].pop_if(|b| b.waits.iter().all(|(a, o)| done[*a as usize] > *o)) {
                done[actor] += 1;
                order.push(batch);
            }
        }
        if order.len() == before {
            debug_assert!(left.iter().all(Vec::is_empty), "a schedule with a cycle");
            return order;
        }
    }
}

/// Of each slot, who writes it and who reads it.
struct Shared {
    writers: Vec<BTreeSet<Actor>>,
    readers: Vec<BTreeSet<Actor>>,
}

impl Shared {
    fn of(schedule: &Schedule) -> Self {
        let empty = || vec![BTreeSet::new(); schedule.slots.len()];
        let mut shared = Shared { writers: empty(), readers: empty() };
        for (actor, step) in (0..).zip(&schedule.steps).flat_map(|(a, steps)| steps.iter().map(move |s| (a, s))) {
            for action in &step.actions {
                let slots = |regions: &[Region], of: &mut Vec<BTreeSet<Actor>>| {
                    for region in regions {
                        if let Place::Slot(slot) = region.place {
                            of[slot as usize].insert(actor);
                        }
                    }
                };
                slots(action.sources(), &mut shared.readers);
                slots(action.destinations(), &mut shared.writers);
            }
        }
        shared
    }
    fn crossings(
        &self,
        schedule: &Schedule,
        actor: Actor,
        steps: std::ops::Range<usize>,
    ) -> (Vec<Region>, Vec<Region>) {
        let others = |by: &[BTreeSet<Actor>], region: &&Region| match region.place {
            Place::Slot(slot) => by[slot as usize].iter().any(|a| *a != actor),
            _ => false,
        };
        let actions = || schedule.steps[actor as usize][steps.clone()].iter().flat_map(|s| &s.actions);
        let mut acquires: Vec<Region> = Vec::new();
        for region in actions().flat_map(Action::sources).filter(|r| others(&self.writers, r)) {
            if !acquires.contains(region) {
                acquires.push(*region);
            }
        }
        let releases = actions().flat_map(Action::destinations).filter(|r| others(&self.readers, r));
        (acquires, releases.copied().collect())
    }
}

/// The operations of a batch over the buffers of a call.
pub(crate) fn record(
    plan: &Plan,
    batch: &Batch,
    call: &Checked,
    pool: Option<(&Pool, u64)>,
    limits: &Limits,
) -> Vec<Op> {
    let resolve = Resolve { plan, call, pool, actor: batch.actor };
    let mut ops = Vec::new();
    for region in &batch.acquires {
        let from = resolve.domain(*region);
        ops.extend(resolve.ranges(*region).into_iter().map(|range| Op::Acquire { range, from }));
    }
    for (i, step) in plan.schedule.steps[batch.actor as usize][batch.steps.clone()].iter().enumerate() {
        if i > 0 {
            ops.push(Op::Barrier);
        }
        for action in &step.actions {
            match action {
                Action::Copy { src, dsts } => {
                    for dst in dsts {
                        cut(&[resolve.ranges(*src), resolve.ranges(*dst)], u64::MAX, |pieces| {
                            ops.push(Op::Copy { src: pieces[0], dst: pieces[1] });
                        });
                    }
                }
                Action::Reduce { srcs, dsts, finish } => {
                    let ranges: Vec<_> = dsts.iter().chain(srcs).map(|r| resolve.ranges(*r)).collect();
                    let longest = limits.max_kernel_elements * call.dtype.size();
                    cut(&ranges, longest, |pieces| {
                        let (stores, sources) = pieces.split_at(dsts.len());
                        ops.push(Op::Kernel(Kernel {
                            stores: stores.to_vec(),
                            sources: sources.to_vec(),
                            // A schedule that reduces is of a collective that reduces: its call has an operation.
                            op: call.op.unwrap_or(ReduceOp::Sum),
                            dtype: call.dtype,
                            finish: finish.then_some(call.shape.ranks),
                        }));
                    });
                }
            }
        }
    }
    for region in &batch.releases {
        let to = resolve.domain(*region);
        ops.extend(resolve.ranges(*region).into_iter().map(|range| Op::Release { range, to }));
    }
    ops
}

/// From regions to physical ranges.
struct Resolve<'a> {
    plan: &'a Plan,
    call: &'a Checked,
    pool: Option<(&'a Pool, u64)>,
    actor: Actor,
}

impl Resolve<'_> {
    fn ranges(&self, region: Region) -> Vec<Range> {
        let size = self.call.dtype.size();
        let (start, bytes) = (region.start * size, region.len * size);
        match (region.place, self.call.shape.physical(region)) {
            (Place::Slot(slot), _) => {
                let slot = self.plan.schedule.slots[slot as usize];
                // A plan with slots has needs, and a call with needs has a pool.
                let Some((pool, bank)) = self.pool else { return Vec::new() };
                vec![pool.range(bank, (slot.owner, slot.home), self.actor, slot.offset * size + start, bytes)]
            }
            (_, Some((memory, first))) => {
                let rank = &self.call.ranks[memory.rank as usize];
                let span = if memory.output { &rank.output } else { &rank.input };
                let mut pieces = Vec::new();
                span.ranges(first * size, bytes, &mut pieces);
                pieces
            }
            (_, None) => Vec::new(),
        }
    }
    fn domain(&self, region: Region) -> Domain {
        match region.place {
            Place::Slot(slot) => domain(self.plan.schedule.slots[slot as usize].home),
            _ => Domain::Host,
        }
    }
}

/// Cuts lists of ranges of the same total size into pieces, so that each piece is one range in every list and no
/// longer than `longest` bytes.
fn cut(lists: &[Vec<Range>], longest: u64, mut piece: impl FnMut(&[Range])) {
    let total: u64 = lists[0].iter().map(|r| r.size).sum();
    debug_assert!(lists.iter().all(|l| l.iter().map(|r| r.size).sum::<u64>() == total));
    let mut at = vec![(0usize, 0u64); lists.len()]; // which range, and how far in it
    let mut done = 0;
    let mut pieces = Vec::with_capacity(lists.len());
    while done < total {
        let mut size = longest.min(total - done);
        for (list, (index, inside)) in lists.iter().zip(&mut at) {
            while list[*index].size == *inside {
                (*index, *inside) = (*index + 1, 0);
            }
            size = size.min(list[*index].size - *inside);
        }
        pieces.clear();
        for (list, (index, inside)) in lists.iter().zip(&mut at) {
            let range = list[*index];
            pieces.push(Range::new(range.buffer, range.offset + *inside, size));
            *inside += size;
        }
        piece(&pieces);
        done += size;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{BufferId, DeviceId};

    #[test]
    fn pieces_are_cut_at_every_border() {
        let device = DeviceId::unique();
        let range = |index, offset, size| Range::new(BufferId { device, index, generation: 0 }, offset, size);
        let mut pieces = Vec::new();
        let lists = [vec![range(0, 0, 12), range(1, 4, 20)], vec![range(2, 8, 32)]];
        cut(&lists, 16, |p| pieces.push((p[0], p[1])));
        assert_eq!(
            pieces,
            [
                (range(0, 0, 12), range(2, 8, 12)),
                (range(1, 4, 16), range(2, 20, 16)),
                (range(1, 20, 4), range(2, 36, 4)),
            ]
        );
    }
}
