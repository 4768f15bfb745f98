//! Which step follows which. The algorithms and the lowering say what moves and in what order one actor alone would
//! do it; a step waits for another's exactly where the two touch the same staging and one of them writes. So nothing
//! races, and nothing deadlocks: every dependency points back along that order. A transitive reduction then drops
//! what other dependencies or the actor's own order imply.
use super::*;

/// Steps of an actor that are submitted together: the first waits for all that any of them waits for.
pub(super) struct Work {
    pub actor: Actor,
    pub steps: Vec<Vec<Action>>,
}

/// Makes a schedule of `works`, in whose order the result would be right if each ended before the next began.
/// Adjacent actions are joined, and slots that nothing touches left out.
pub(super) fn schedule(shape: &Shape, slots: Vec<Slot>, works: Vec<Work>) -> Schedule {
    let actors = works.iter().map(|w| w.actor + 1).max().unwrap_or(0).max(shape.ranks) as usize;
    let mut out = Schedule { shape: shape.clone(), slots, steps: vec![Vec::new(); actors] };
    let mut history: Vec<Vec<Access>> = vec![Vec::new(); out.slots.len()];
    let mut clocks: Vec<Vec<Clock>> = vec![Vec::new(); actors];
    for Work { actor, steps } in works {
        let mut after = vec![None; actors];
        for (slot, region, write) in steps.iter().flatten().flat_map(accesses) {
            for earlier in &history[slot as usize] {
                let by = earlier.step.actor as usize;
                if (write || earlier.write) && by != actor as usize && overlap(&earlier.region, &region) {
                    after[by] = after[by].max(Some(earlier.step.index));
                }
            }
        }
        for actions in steps {
            let step = StepId { actor, index: out.steps[actor as usize].len() as u32 };
            for (slot, region, write) in actions.iter().flat_map(accesses) {
                let list = &mut history[slot as usize];
                if write {
                    // What follows this write follows those accesses too. A step's own reads must stay: they run
                    // beside the write, not before it.
                    list.retain(|e| e.step == step || !within(&e.region, &region));
                }
                list.push(Access { step, region, write });
            }
            let (after, clock) = reduce(step, &std::mem::replace(&mut after, vec![None; actors]), &clocks);
            clocks[actor as usize].push(clock);
            out.steps[actor as usize].push(Step { after, actions: join(actions) });
        }
    }
    drop_unused(&mut out);
    out
}

/// The steps in an order in which each comes after all that it follows; equal depth by actor.
pub(super) fn linear(schedule: &Schedule) -> Vec<StepId> {
    let mut depth: Vec<Vec<u32>> = schedule.steps.iter().map(|s| Vec::with_capacity(s.len())).collect();
    let total: usize = schedule.steps.iter().map(Vec::len).sum();
    let mut order: Vec<(u32, StepId)> = Vec::with_capacity(total);
    let mut moved = true;
    while std::mem::take(&mut moved) {
        for (actor, steps) in schedule.steps.iter().enumerate() {
            while let Some(step) = steps.get(depth[actor].len()) {
                let known = |id: &StepId| depth[id.actor as usize].get(id.index as usize).copied();
                let Some(latest) = step.after.iter().map(known).try_fold(None, |m, d| d.map(|d| Some(d).max(m))) else {
                    break;
                };
                let own = depth[actor].last().copied();
                let this = latest.max(own).map_or(0, |d| d + 1);
                order.push((this, StepId { actor: actor as Actor, index: depth[actor].len() as u32 }));
                depth[actor].push(this);
                moved = true;
            }
        }
    }
    order.sort();
    order.into_iter().map(|(_, id)| id).collect()
}

/// For each actor, how many of its steps have ended when this one has.
type Clock = Vec<u32>;

#[derive(Clone)]
struct Access {
    step: StepId,
    region: Region,
    write: bool,
}

/// The slots that an action touches, where, and whether it writes there.
fn accesses(action: &Action) -> impl Iterator<Item = (u32, Region, bool)> {
    let reads = action.sources().iter().map(|r| (r, false));
    let all = reads.chain(action.destinations().iter().map(|r| (r, true)));
    all.filter_map(|(region, write)| match region.place {
        Place::Slot(slot) => Some((slot, *region, write)),
        Place::Input(_) | Place::Output(_) => None,
    })
}

fn overlap(a: &Region, b: &Region) -> bool {
    a.start < b.end() && b.start < a.end()
}

fn within(inner: &Region, outer: &Region) -> bool {
    outer.start <= inner.start && inner.end() <= outer.end()
}

/// The steps of `wanted` (the latest of each actor) that the others and the step before do not imply.
fn reduce(step: StepId, wanted: &[Option<u32>], clocks: &[Vec<Clock>]) -> (Vec<StepId>, Clock) {
    let own = &clocks[step.actor as usize];
    let mut clock = own.last().cloned().unwrap_or_else(|| vec![0; wanted.len()]);
    let ids = wanted.iter().enumerate().filter_map(|(a, i)| i.map(|i| StepId { actor: a as Actor, index: i }));
    let mut after: Vec<StepId> = ids.filter(|id| clock[id.actor as usize] <= id.index).collect();
    let of = |id: &StepId| &clocks[id.actor as usize][id.index as usize];
    let implied = |id: &StepId| after.iter().any(|other| other != id && of(other)[id.actor as usize] > id.index);
    let kept: Vec<StepId> = after.iter().filter(|id| !implied(id)).copied().collect();
    after = kept;
    for id in &after {
        clock.iter_mut().zip(of(id)).for_each(|(a, b)| *a = (*a).max(*b));
    }
    clock[step.actor as usize] = step.index + 1;
    (after, clock)
}

/// Joins each action to the one before it where every region goes on where that one's ended.
fn join(actions: Vec<Action>) -> Vec<Action> {
    let mut out: Vec<Action> = Vec::with_capacity(actions.len());
    let follows = |a: &[Region], b: &[Region]| {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.place == b.place && a.end() == b.start)
    };
    for action in actions {
        let joins = out.last().is_some_and(|last| {
            let same = match (last, &action) {
                (Action::Copy { .. }, Action::Copy { .. }) => true,
                (Action::Reduce { finish: a, .. }, Action::Reduce { finish: b, .. }) => a == b,
                _ => false,
            };
            same && follows(last.sources(), action.sources()) && follows(last.destinations(), action.destinations())
        });
        match out.last_mut() {
            Some(last) if joins => last.regions_mut().for_each(|r| r.len += action.len()),
            _ => out.push(action),
        }
    }
    out
}

fn drop_unused(schedule: &mut Schedule) {
    let mut used = vec![false; schedule.slots.len()];
    let actions = || schedule.steps.iter().flatten().flat_map(|s| &s.actions);
    actions().flat_map(accesses).for_each(|(slot, ..)| used[slot as usize] = true);
    let mut renumbered = vec![0; used.len()];
    let kept = (0..used.len()).filter(|&slot| used[slot]);
    kept.enumerate().for_each(|(to, from)| renumbered[from] = to as u32);
    let mut keep = used.iter();
    schedule.slots.retain(|_| keep.next() == Some(&true));
    for region in schedule.steps.iter_mut().flatten().flat_map(|s| &mut s.actions).flat_map(Action::regions_mut) {
        if let Place::Slot(slot) = &mut region.place {
            *slot = renumbered[*slot as usize];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(from: u32, to: u32) -> Action {
        let at = |slot| Region::new(Place::Slot(slot), 0, 8);
        Action::Copy { src: at(from), dsts: vec![at(to)] }
    }
    fn run(works: Vec<(Actor, Action)>) -> Schedule {
        let shape = Shape { collective: Collective::AllReduce, ranks: 3, count: 8, in_place: false };
        let slots = vec![Slot { owner: 0, home: Home::Outbox, len: 8, offset: 0 }; 6];
        schedule(&shape, slots, works.into_iter().map(|(actor, a)| Work { actor, steps: vec![vec![a]] }).collect())
    }

    #[test]
    fn a_step_follows_what_it_reads_and_what_it_overwrites() {
        let s = run(vec![(0, copy(0, 1)), (1, copy(1, 2)), (0, copy(0, 1))]);
        assert_eq!(s.steps[1][0].after, [StepId { actor: 0, index: 0 }]);
        assert_eq!(s.steps[0][1].after, [StepId { actor: 1, index: 0 }]);
    }

    #[test]
    fn steps_submitted_together_wait_together() {
        let shape = Shape { collective: Collective::AllReduce, ranks: 2, count: 8, in_place: false };
        let slots = vec![Slot { owner: 0, home: Home::Outbox, len: 8, offset: 0 }; 4];
        let first = Work { actor: 0, steps: vec![vec![copy(0, 1)]] };
        let both = Work { actor: 1, steps: vec![vec![copy(2, 3)], vec![copy(1, 2)]] };
        let s = schedule(&shape, slots, vec![first, both]);
        assert_eq!(s.steps[1][0].after, [StepId { actor: 0, index: 0 }]);
        assert!(s.steps[1][1].after.is_empty());
    }

    #[test]
    fn implied_dependencies_are_dropped() {
        // Actor 2 reads what 0 and then 1 wrote; 1 has read what 0 wrote, and 2's second step adds nothing.
        let s = run(vec![
            (0, copy(0, 1)),
            (1, copy(1, 2)),
            (
                2,
                Action::Reduce {
                    srcs: vec![Region::new(Place::Slot(1), 0, 8), Region::new(Place::Slot(2), 0, 8)],
                    dsts: vec![Region::new(Place::Slot(3), 0, 8)],
                    finish: true,
                },
            ),
            (2, copy(1, 4)),
        ]);
        assert_eq!(s.steps[2][0].after, [StepId { actor: 1, index: 0 }]);
        assert!(s.steps[2][1].after.is_empty());
        assert_eq!(s.slots.len(), 5);
    }
}
