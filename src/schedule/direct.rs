//! Where the ranks' memory is the host's own: every rank arrives, host workers read and write the callers' memory
//! themselves, each a part of the elements, and every rank leaves. The data is passed over once, and nothing is staged.
//! A reduction folds all contributions in rank order, once: the bits are those of [`Algorithm::Host`], which it is a
//! form of.
use super::*;

/// The schedule, fit for a machine as it is. `narrow`: every contribution is rounded to what it would cross as. `None`
/// for a barrier, and where a block's place is another's source: an all-to-all in place.
pub fn direct(shape: &Shape, narrow: bool) -> Option<Schedule> {
    match shape.collective {
        Collective::Barrier => return None,
        Collective::AllToAll if shape.in_place && shape.ranks > 1 => return None,
        _ => {}
    }
    let n = shape.ranks;
    let actions = actions(shape, narrow);
    let elements = actions.iter().map(Action::len).sum();
    let workers = host::workers(shape, elements);
    let mut steps = vec![Vec::new(); n as usize];
    let uses = |r: u32| shape.input_len(r) + shape.output_len(r) > 0;
    let first = |actor| StepId { actor, index: 0 };
    let arrivals: Vec<StepId> = (0..n).filter(|r| uses(*r)).map(first).collect();
    for worker in 0..workers {
        let part = |action: &Action| {
            let (start, len) = block(action.len(), workers, worker);
            let mut action = action.clone();
            action.regions_mut().for_each(|region| *region = region.part(start, len));
            (len > 0).then_some(action)
        };
        let actions: Vec<Action> = actions.iter().filter_map(part).collect();
        steps.push(match actions.is_empty() {
            true => Vec::new(),
            false => vec![Step { after: arrivals.clone(), actions }],
        });
    }
    let busy: Vec<StepId> = (n..n + workers).filter(|w| !steps[*w as usize].is_empty()).map(first).collect();
    if !busy.is_empty() {
        for r in (0..n).filter(|r| uses(*r)) {
            steps[r as usize] = vec![Step::default(), Step { after: busy.clone(), actions: Vec::new() }];
        }
    }
    Some(Schedule { shape: shape.clone(), slots: Vec::new(), steps })
}

/// What has to be done, from the callers' memory to the callers' memory.
fn actions(shape: &Shape, narrow: bool) -> Vec<Action> {
    let (n, count) = (shape.ranks, shape.count);
    let whole = |place| Region::new(place, 0, count);
    let block = |place, b: u32| Region::new(place, u64::from(b) * count, count);
    let reduce = |srcs: Vec<Region>, dsts: Vec<Region>| Action::Reduce { srcs, dsts, finish: true };
    let copy = |src: Region, dsts: Vec<Region>| Action::Copy { src, dsts };
    let all = |region: &dyn Fn(u32) -> Region| (0..n).map(region).collect::<Vec<_>>();
    let mut actions = match &shape.collective {
        Collective::AllReduce => {
            vec![reduce(all(&|r| whole(Place::Input(r))), all(&|r| whole(Place::Output(r))))]
        }
        Collective::Reduce { root } => {
            vec![reduce(all(&|r| whole(Place::Input(r))), vec![whole(Place::Output(*root))])]
        }
        Collective::ReduceScatter => {
            (0..n).map(|b| reduce(all(&|r| block(Place::Input(r), b)), vec![whole(Place::Output(b))])).collect()
        }
        Collective::AllGather => {
            (0..n).map(|b| copy(whole(Place::Input(b)), all(&|r| block(Place::Output(r), b)))).collect()
        }
        Collective::Broadcast { root } => vec![copy(whole(Place::Input(*root)), all(&|r| whole(Place::Output(r))))],
        Collective::Gather { root } => {
            (0..n).map(|b| copy(whole(Place::Input(b)), vec![block(Place::Output(*root), b)])).collect()
        }
        Collective::Scatter { root } => {
            (0..n).map(|b| copy(block(Place::Input(*root), b), vec![whole(Place::Output(b))])).collect()
        }
        Collective::AllToAll => {
            let pairs = (0..n).flat_map(|r| (0..n).map(move |s| (r, s)));
            pairs.map(|(r, s)| copy(block(Place::Input(r), s), vec![block(Place::Output(s), r)])).collect()
        }
        Collective::SendRecv(list) => messages(n, list),
        Collective::Barrier => Vec::new(),
    };
    for action in &mut actions {
        if let Action::Copy { src, dsts } = action {
            if narrow {
                *action = Action::Reduce { srcs: vec![*src], dsts: std::mem::take(dsts), finish: false };
            } else {
                // In place, a block may already lie where it should.
                dsts.retain(|dst| shape.physical(*dst) != shape.physical(*src));
            }
        }
    }
    actions.retain(|action| !action.is_empty() && !action.destinations().is_empty());
    actions
}

/// Each message from where its sender keeps it to where its receiver wants it: one behind the other, in list order.
fn messages(ranks: u32, list: &[Transfer]) -> Vec<Action> {
    let (mut sent, mut received) = (vec![0; ranks as usize], vec![0; ranks as usize]);
    let next = |ends: &mut Vec<u64>, rank: u32, count: u64| {
        let end = &mut ends[rank as usize];
        *end += count;
        *end - count
    };
    let one = |t: &Transfer| Action::Copy {
        src: Region::new(Place::Input(t.from), next(&mut sent, t.from, t.count), t.count),
        dsts: vec![Region::new(Place::Output(t.to), next(&mut received, t.to, t.count), t.count)],
    };
    list.iter().map(one).collect()
}
