//! The chunks of a long message, one behind the other. An algorithm is a [`Draft`] of one chunk whose moves have a
//! level: what depends on a move has a higher one. Chunk `k` does level `l` at time `k + l * distance`, and what an
//! actor does at one time is one step: so a step pushes chunk `k + distance` while it reduces chunk `k`, and a hop
//! has `distance` chunks' time to hide in. With m chunks and s levels that is `m + (s - 1) * distance` steps.
use super::{order::Work, *};

/// How a long message is cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Chunking {
    /// Elements of `count` (of each message, in [`Collective::SendRecv`]) that a chunk covers. 0: all in one.
    pub chunk: u64,
    /// Chunks that lie between a step and one that depends on it. At least 1; from 2 on a hop hides behind a chunk.
    pub distance: u32,
}

impl Chunking {
    /// One chunk.
    pub const WHOLE: Chunking = Chunking { chunk: 0, distance: 1 };
}

/// The schedule of a collective by an algorithm, or `None` where the algorithm makes no sense for it. Every slot is
/// logical: [`lower::lower`] makes it fit for a machine. A single rank has nothing to exchange: every algorithm but
/// [`Algorithm::Host`] is then the same.
pub fn build(shape: &Shape, algorithm: Algorithm, chunking: Chunking) -> Option<Schedule> {
    draft(shape, algorithm, chunking, false)
}

/// The same for elements that are narrower in staging than in the caller's memory: what a copy would move from or to
/// the caller's memory is a fold of one source, which converts. In place too, where `build` leaves alone what lies
/// where it should: there it is rounded.
pub fn build_narrow(shape: &Shape, algorithm: Algorithm, chunking: Chunking) -> Option<Schedule> {
    draft(shape, algorithm, chunking, true)
}

fn draft(shape: &Shape, algorithm: Algorithm, chunking: Chunking, narrow: bool) -> Option<Schedule> {
    if !algorithms(&shape.collective).contains(&algorithm) {
        return None;
    }
    let steps: fn(&Shape, Part) -> Draft = match algorithm {
        Algorithm::Host if shape.collective == Collective::Barrier => return Some(host::barrier(shape)),
        _ if shape.collective == Collective::Barrier => return Some(one_shot::barrier(shape)),
        Algorithm::Host => host::steps,
        _ if shape.ranks == 1 => one_shot::steps,
        Algorithm::OneShot => one_shot::steps,
        Algorithm::TwoShot => two_shot::steps,
        Algorithm::Ring => ring::steps,
        Algorithm::Tree => tree::steps,
    };
    let total = shape.span();
    let chunk = if chunking.chunk == 0 { total } else { chunking.chunk.min(total) };
    let parts = (0..total.checked_div(chunk).map_or(0, |_| total.div_ceil(chunk)))
        .map(|k| Part { start: k * chunk, len: chunk.min(total - k * chunk) });
    let mut drafts: Vec<Draft<'_>> = parts.map(|part| steps(shape, part)).collect();
    drafts.iter_mut().for_each(if narrow { Draft::convert } else { Draft::leave_alone });
    Some(pipeline(shape, drafts, chunking.distance.max(1)))
}

/// The elements of `count` that a chunk covers: of each block, where the collective has blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub start: u64,
    pub len: u64,
}

/// What the actors do for one chunk.
pub(super) struct Draft<'a> {
    shape: &'a Shape,
    slots: Vec<Slot>,
    moves: Vec<(u32, Actor, Action)>,
}

impl<'a> Draft<'a> {
    pub fn new(shape: &'a Shape) -> Self {
        Draft { shape, slots: Vec::new(), moves: Vec::new() }
    }
    /// A slot of `owner`. The slots of all chunks are made in the same order.
    pub fn slot(&mut self, owner: Actor, len: u64) -> Place {
        let home = if owner < self.shape.ranks { Home::Outbox } else { Home::Worker };
        self.slots.push(Slot { owner, home, len, offset: 0 });
        Place::Slot(self.slots.len() as u32 - 1)
    }
    /// A copy.
    pub fn copy(&mut self, level: u32, actor: Actor, src: Region, dsts: Vec<Region>) {
        self.push(level, actor, Action::Copy { src, dsts });
    }
    /// A fold.
    pub fn reduce(&mut self, level: u32, actor: Actor, srcs: Vec<Region>, dsts: Vec<Region>, finish: bool) {
        self.push(level, actor, Action::Reduce { srcs, dsts, finish });
    }
    /// Leaves out destinations that are the source: in place, a block may already lie where it should.
    fn leave_alone(&mut self) {
        let at = |region: &Region| self.shape.physical(*region);
        for (_, _, action) in &mut self.moves {
            if let Action::Copy { src, dsts } = action {
                dsts.retain(|dst| at(dst).is_none() || at(dst) != at(src));
            }
        }
        self.moves.retain(|(_, _, action)| !action.destinations().is_empty());
    }
    /// Makes folds of one source of the copies that touch the caller's memory.
    fn convert(&mut self) {
        for (_, _, action) in &mut self.moves {
            if let Action::Copy { src, dsts } = action
                && std::iter::once(&*src).chain(&*dsts).any(|r| !matches!(r.place, Place::Slot(_)))
            {
                *action = Action::Reduce { srcs: vec![*src], dsts: std::mem::take(dsts), finish: false };
            }
        }
    }
    fn push(&mut self, level: u32, actor: Actor, action: Action) {
        if !action.is_empty() && !action.destinations().is_empty() {
            self.moves.push((level, actor, action));
        }
    }
}

fn pipeline(shape: &Shape, drafts: Vec<Draft<'_>>, distance: u32) -> Schedule {
    let count = drafts.iter().map(|d| d.slots.len()).max().unwrap_or(0);
    // First and last level at which a chunk uses each slot.
    let mut life = vec![(u32::MAX, 0); count];
    for (level, _, action) in drafts.iter().flat_map(|d| &d.moves) {
        for region in action.sources().iter().chain(action.destinations()) {
            if let Place::Slot(slot) = region.place {
                let (first, last) = &mut life[slot as usize];
                (*first, *last) = ((*first).min(*level), (*last).max(*level));
            }
        }
    }
    // A slot is in use for `distance` times a level; `distance` more (at least 2) and the chunk that takes it over
    // waits for readers that are as far behind as the peers whose data it waits for anyway.
    let copies: Vec<u32> = life
        .iter()
        .map(|&(first, last)| (last.saturating_sub(first) * distance + distance.max(2)).min(drafts.len() as u32))
        .collect();
    let mut base = vec![0; count];
    let mut slots = Vec::new();
    for slot in 0..count {
        let all = || drafts.iter().filter_map(|d| d.slots.get(slot));
        let len = all().map(|s| s.len).max().unwrap_or(0);
        debug_assert!(all().all(|s| all().next().is_some_and(|f| (f.owner, f.home) == (s.owner, s.home))));
        base[slot] = slots.len() as u32;
        slots.extend(all().next().into_iter().flat_map(|s| (0..copies[slot]).map(move |_| Slot { len, ..*s })));
    }
    let mut moves = Vec::new();
    for (k, draft) in drafts.into_iter().enumerate() {
        for (level, actor, mut action) in draft.moves {
            for region in action.regions_mut() {
                if let Place::Slot(slot) = &mut region.place {
                    *slot = base[*slot as usize] + k as u32 % copies[*slot as usize];
                }
            }
            moves.push((k as u32 + level * distance, actor, action));
        }
    }
    moves.sort_by_key(|(time, actor, _)| (*time, *actor));
    let mut works: Vec<Work> = Vec::new();
    let mut last = None;
    for (time, actor, action) in moves {
        match works.last_mut() {
            Some(work) if last == Some((time, actor)) => work.steps[0].push(action),
            _ => works.push(Work { actor, steps: vec![vec![action]] }),
        }
        last = Some((time, actor));
    }
    order::schedule(shape, slots, works)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_reduce(algorithm: Algorithm, chunk: u64, distance: u32) -> Schedule {
        let shape = Shape { collective: Collective::AllReduce, ranks: 4, count: 6400, in_place: true };
        build(&shape, algorithm, Chunking { chunk, distance }).unwrap()
    }

    #[test]
    fn chunks_overlap() {
        for (algorithm, levels) in [(Algorithm::OneShot, 2), (Algorithm::TwoShot, 3), (Algorithm::Ring, 7)] {
            for distance in 1..=3 {
                let schedule = all_reduce(algorithm, 100, distance);
                assert_eq!(schedule.steps[0].len() as u32, 64 + (levels - 1) * distance, "{algorithm} {distance}");
            }
        }
    }

    #[test]
    fn slots_are_reused_as_the_distance_demands() {
        for (distance, copies) in [(1, 3), (2, 4), (3, 6)] {
            let schedule = all_reduce(Algorithm::OneShot, 100, distance);
            assert_eq!(
                schedule.slots,
                (0..4)
                    .flat_map(|owner| vec![Slot { owner, home: Home::Outbox, len: 100, offset: 0 }; copies])
                    .collect::<Vec<_>>()
            );
        }
        assert_eq!(all_reduce(Algorithm::OneShot, 3200, 2).slots.len(), 8, "no more than there are chunks");
    }

    #[test]
    fn reuse_costs_no_dependency_where_all_read_all() {
        let schedule = all_reduce(Algorithm::OneShot, 100, 2);
        assert!(schedule.steps.iter().flatten().all(|s| s.after.is_empty() || s.after.len() == 3));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let shape = |collective| Shape { collective, ranks: 4, count: 8, in_place: false };
        assert_eq!(build(&shape(Collective::AllToAll), Algorithm::Ring, Chunking::WHOLE), None);
        assert_eq!(build(&shape(Collective::Barrier), Algorithm::Tree, Chunking::WHOLE), None);
        let empty = Shape { count: 0, ..shape(Collective::AllReduce) };
        assert!(
            build(&empty, Algorithm::Ring, Chunking { chunk: 3, distance: 2 }).unwrap().steps.iter().all(Vec::is_empty)
        );
    }
}
