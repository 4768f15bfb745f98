//! From a lowered schedule to command lists and submissions.
//!
//! A [`Plan`] is a lowered schedule cut into batches: runs of consecutive steps of one actor in which only the first
//! waits for others. One batch is one submission. Plans know nothing of buffers, so they are kept and used again;
//! [`record`] gives a batch the buffers of a call.
use crate::{
    call::Checked,
    contract::{BufferId, Domain, Kernel, Limits, Op, Range, ReduceOp, Wire},
    pending::ReducedOn,
    schedule::{Action, Actor, Algorithm, Home, Place, Region, Schedule, lower},
    staging::{Needs, Pool, domain},
};
use std::collections::{BTreeSet, HashMap};

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
    /// Whether host workers read and write the callers' memory.
    pub direct: bool,
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
        let n = schedule.shape.ranks;
        let direct = schedule.is_direct();
        let mut left: Vec<Vec<Batch>> = Vec::new();
        for (actor, batches) in (0..).zip(&ranges) {
            let of_actor = (0..).zip(batches).map(|(ordinal, steps)| {
                let after = &schedule.steps[actor as usize][steps.start].after;
                let mut waits: Vec<_> =
                    after.iter().map(|d| (d.actor, place[d.actor as usize][d.index as usize])).collect();
                waits.sort();
                waits.dedup();
                let (acquires, releases) = match direct && actor < n {
                    true if ordinal == 0 => (Vec::new(), by_workers(&schedule, Place::Input(actor), Action::sources)),
                    true => (by_workers(&schedule, Place::Output(actor), Action::destinations), Vec::new()),
                    false => shared.crossings(&schedule, actor, steps.clone()),
                };
                Batch { actor, ordinal, waits, steps: steps.clone(), acquires, releases }
            });
            left.push(of_actor.collect());
        }
        let submissions = left.iter().map(|b| b.len() as u32).collect();
        let reduces = |actors: &[Vec<crate::schedule::Step>]| {
            // What does not finish a reduction may only convert.
            let finishes = |a: &Action| matches!(a, Action::Reduce { finish: true, .. });
            actors.iter().flatten().flat_map(|s| &s.actions).any(finishes)
        };
        let reduced_on = match (reduces(&schedule.steps[..n as usize]), reduces(&schedule.steps[n as usize..])) {
            (true, _) => ReducedOn::Device,
            (false, true) => ReducedOn::Host,
            (false, false) => ReducedOn::None,
        };
        let arenas = lower::arenas(&schedule).into_iter().collect();
        Plan { batches: in_order(left), submissions, reduced_on, direct, arenas, schedule, algorithm, chunks }
    }
    /// Bytes that each arena needs in one bank, for elements of so many bytes.
    pub fn needs(&self, element: u64) -> Needs {
        self.arenas.iter().map(|(arena, elements)| (*arena, elements * element)).collect()
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

/// What host workers touch of a place of the caller's.
fn by_workers(schedule: &Schedule, place: Place, regions: fn(&Action) -> &[Region]) -> Vec<Region> {
    let workers = &schedule.steps[schedule.shape.ranks as usize..];
    let all = workers.iter().flatten().flat_map(|s| &s.actions).flat_map(regions);
    all.filter(|region| region.place == place).copied().collect()
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

/// The memory of a call, as the actor of a batch reaches it.
pub(crate) struct Reached<'a> {
    /// Staging, and which bank of it.
    pub pool: Option<(&'a Pool, u64)>,
    /// What an absent rank brings.
    pub neutral: Option<Range>,
    /// What a host worker calls the callers' buffers.
    pub views: &'a HashMap<BufferId, BufferId>,
}

/// The operations of a batch over the buffers of a call.
pub(crate) fn record(plan: &Plan, batch: &Batch, call: &Checked, reached: &Reached<'_>, limits: &Limits) -> Vec<Op> {
    let resolve = Resolve { plan, call, reached, actor: batch.actor };
    let mut ops = Vec::new();
    if let Some(range) = reached.neutral {
        ops.push(Op::Acquire { range, from: Domain::Host });
    }
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
                        cut(&[resolve.ranges(*src), resolve.ranges(*dst)], &[1, 1], u64::MAX, |pieces| {
                            ops.push(Op::Copy { src: pieces[0], dst: pieces[1] });
                        });
                    }
                }
                Action::Reduce { srcs, dsts, finish } => {
                    let regions = || dsts.iter().chain(srcs);
                    let ranges: Vec<_> = regions().map(|r| resolve.ranges(*r)).collect();
                    let sizes: Vec<_> = regions().map(|r| resolve.size(r)).collect();
                    // Where contributions have scales, they are folded in one go, in the order of the ranks.
                    debug_assert!(!finish || call.scales.is_empty() || srcs.len() == call.scales.len());
                    let scales = if *finish { call.scales.clone() } else { Vec::new() };
                    let narrow = |regions: &[Region]| regions.iter().map(in_slot).collect();
                    let wire = call.wire.map(|dtype| Wire { dtype, stores: narrow(dsts), sources: narrow(srcs) });
                    // One source is only converted, and the sum of one is what it is.
                    let op = call.op.filter(|_| *finish || srcs.len() > 1).unwrap_or(ReduceOp::Sum);
                    cut(&ranges, &sizes, limits.max_kernel_elements & !63, |pieces| {
                        let (stores, sources) = pieces.split_at(dsts.len());
                        ops.push(Op::Kernel(Kernel {
                            stores: stores.to_vec(),
                            sources: sources.to_vec(),
                            op,
                            dtype: call.dtype,
                            finish: finish.then_some(call.shape.ranks),
                            scales: scales.clone(),
                            wire: wire.clone(),
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

/// Makes the ranges of kernels as long as the whole units that a device writes. Borders within staging leave room for
/// it, and where the caller's memory does not, no kernel touches it.
pub(crate) fn widen(ops: &mut [Op], limits: &Limits) {
    for op in ops {
        if let Op::Kernel(k) = op {
            for range in k.stores.iter_mut().chain(&mut k.sources) {
                range.size = range.size.next_multiple_of(limits.write_granularity);
            }
        }
    }
}

fn in_slot(region: &Region) -> bool {
    matches!(region.place, Place::Slot(_))
}

/// From regions to physical ranges.
struct Resolve<'a> {
    plan: &'a Plan,
    call: &'a Checked,
    reached: &'a Reached<'a>,
    actor: Actor,
}

impl Resolve<'_> {
    /// Bytes of an element.
    fn size(&self, region: &Region) -> u64 {
        if in_slot(region) { self.call.staged_size() } else { self.call.dtype.size() }
    }
    fn ranges(&self, region: Region) -> Vec<Range> {
        let size = self.size(&region);
        let (start, bytes) = (region.start * size, region.len * size);
        match (region.place, self.call.shape.physical(region)) {
            (Place::Slot(slot), _) => {
                let slot = self.plan.schedule.slots[slot as usize];
                // A plan with slots has needs, and a call with needs has a pool.
                let Some((pool, bank)) = self.reached.pool else { return Vec::new() };
                vec![pool.range(bank, (slot.owner, slot.home), self.actor, slot.offset * size + start, bytes)]
            }
            (Place::Input(r), _) if self.call.absent.get(r as usize) == Some(&true) => {
                // The same again and again. An absent rank has something to bring.
                let Some(neutral) = self.reached.neutral else { return Vec::new() };
                let pieces = (0..bytes).step_by(neutral.size as usize);
                pieces.map(|at| Range { size: neutral.size.min(bytes - at), ..neutral }).collect()
            }
            (_, Some((memory, first))) => {
                let rank = &self.call.ranks[memory.rank as usize];
                let span = if memory.output { &rank.output } else { &rank.input };
                let mut pieces = Vec::new();
                span.ranges(first * size, bytes, &mut pieces);
                if self.actor >= self.call.shape.ranks {
                    pieces.iter_mut().for_each(|p| p.buffer = self.reached.views[&p.buffer]);
                }
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

/// Cuts lists of ranges of as many elements, of `sizes` bytes each, into pieces, so that each piece is one range in
/// every list and no longer than `longest` elements.
fn cut(lists: &[Vec<Range>], sizes: &[u64], longest: u64, mut piece: impl FnMut(&[Range])) {
    let total = |(list, size): (&Vec<Range>, &u64)| list.iter().map(|r| r.size).sum::<u64>() / size;
    let elements = lists.iter().zip(sizes).map(total).next().unwrap_or(0);
    debug_assert!(lists.iter().zip(sizes).all(|l| total(l) == elements));
    let mut at = vec![(0usize, 0u64); lists.len()]; // which range, and how far in it
    let mut done = 0;
    let mut pieces = Vec::with_capacity(lists.len());
    while done < elements {
        let mut len = longest.min(elements - done);
        for ((list, size), (index, inside)) in lists.iter().zip(sizes).zip(&mut at) {
            while list[*index].size == *inside {
                (*index, *inside) = (*index + 1, 0);
            }
            len = len.min((list[*index].size - *inside) / size);
        }
        pieces.clear();
        for ((list, size), (index, inside)) in lists.iter().zip(sizes).zip(&mut at) {
            let range = list[*index];
            pieces.push(Range::new(range.buffer, range.offset + *inside, len * size));
            *inside += len * size;
        }
        piece(&pieces);
        done += len;
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
        cut(&lists, &[4, 4], 4, |p| pieces.push((p[0], p[1])));
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
