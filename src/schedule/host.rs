//! Ranks publish, host workers reduce, ranks read: best for a few KB, where the CPU reaches the memory directly, and
//! for types that a device has no kernel for. A worker folds all contributions in rank order, once; ranks only copy.
use super::{
    one_shot::Blocks,
    pipeline::{Draft, Part},
    *,
};

/// Below so many elements one worker is faster than several that have to be woken.
const SHARED_FROM: u64 = 16 << 10;
/// Host memory is saturated by so many.
const MOST_WORKERS: u32 = 4;

pub(super) fn steps(shape: &Shape, part: Part) -> Draft<'_> {
    let mut draft = Draft::new(shape);
    match &shape.collective {
        Collective::ReduceScatter => reduce_scatter(&mut draft, shape, part),
        Collective::Reduce { root } => reduce(&mut draft, shape, part, *root..*root + 1),
        _ => reduce(&mut draft, shape, part, 0..shape.ranks),
    }
    draft
}

/// All arrive at a worker, and leave after it.
pub(super) fn barrier(shape: &Shape) -> Schedule {
    let worker = shape.ranks;
    let arrive = (0..worker).map(|actor| StepId { actor, index: 0 }).collect();
    let leave = Step { after: vec![StepId { actor: worker, index: 0 }], actions: Vec::new() };
    let mut steps = vec![vec![Step::default(), leave]; worker as usize];
    steps.push(vec![Step { after: arrive, actions: Vec::new() }]);
    Schedule { shape: shape.clone(), slots: Vec::new(), steps }
}

/// How many workers share so many elements.
pub(super) fn workers(shape: &Shape, elements: u64) -> u32 {
    if elements < SHARED_FROM { 1 } else { shape.ranks.min(MOST_WORKERS) }
}

fn reduce(d: &mut Draft<'_>, shape: &Shape, part: Part, readers: std::ops::Range<u32>) {
    let workers = workers(shape, part.len);
    let user = |place| Region::new(place, part.start, part.len);
    let slots: Vec<Place> = (0..shape.ranks).map(|r| d.slot(r, part.len)).collect();
    for r in 0..shape.ranks {
        d.copy(0, r, user(Place::Input(r)), vec![Region::new(slots[r as usize], 0, part.len)]);
    }
    for w in 0..workers {
        let (start, len) = block(part.len, workers, w);
        let result = Region::new(d.slot(shape.ranks + w, len), 0, len);
        d.reduce(1, shape.ranks + w, slots.iter().map(|s| Region::new(*s, start, len)).collect(), vec![result], true);
        for r in readers.clone() {
            d.copy(2, r, result, vec![user(Place::Output(r)).part(start, len)]);
        }
    }
}

fn reduce_scatter(d: &mut Draft<'_>, shape: &Shape, part: Part) {
    let blocks = Blocks::new(shape, part);
    let workers = workers(shape, part.len * u64::from(shape.ranks));
    let slots: Vec<Place> = (0..shape.ranks).map(|r| d.slot(r, blocks.len())).collect();
    for r in 0..shape.ranks {
        for b in 0..shape.ranks {
            d.copy(0, r, blocks.user(Place::Input(r), b), vec![blocks.slot(slots[r as usize], b)]);
        }
    }
    let results: Vec<Place> = (0..workers).map(|w| d.slot(shape.ranks + w, blocks.len())).collect();
    for b in 0..shape.ranks {
        let w = b % workers;
        let result = blocks.slot(results[w as usize], b);
        d.reduce(1, shape.ranks + w, slots.iter().map(|s| blocks.slot(*s, b)).collect(), vec![result], true);
        d.copy(2, b, result, vec![Region::new(Place::Output(b), part.start, part.len)]);
    }
}
