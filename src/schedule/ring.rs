//! Neighbours only: each rank writes its own outbox and reads its left neighbour's. For links that are shared, and any
//! number of ranks. All-reduce has 2(n-1) hops, reduce-scatter and all-gather n-1, each of 1/n of the data; reduce and
//! broadcast are a chain of n-1 hops that begins behind, or at, the root.
//!
//! **Order.** Block b of an all-reduce is `((x[b] + x[b+1]) + ...) + x[b-1]`, of a reduce-scatter
//! `((x[b+1] + x[b+2]) + ...) + x[b]`, a reduce `((x[root+1] + ...) + x[root-1]) + x[root]`, indices modulo n, rounded
//! at each hop.
use super::{
    pipeline::{Draft, Part},
    *,
};

pub(super) fn steps(shape: &Shape, part: Part) -> Draft<'_> {
    let mut draft = Draft::new(shape);
    let d = &mut draft;
    match shape.collective {
        Collective::ReduceScatter => reduce_scatter(d, shape, part),
        Collective::AllGather => all_gather(d, shape, part),
        Collective::Broadcast { root } => broadcast(d, shape, part, root),
        Collective::Reduce { root } => reduce(d, shape, part, root),
        _ => all_reduce(d, shape, part),
    }
    draft
}

fn all_reduce(d: &mut Draft<'_>, shape: &Shape, part: Part) {
    let n = shape.ranks;
    let piece = |b| block(part.len, n, b);
    let user = |place, b| Region::new(place, part.start + piece(b).0, piece(b).1);
    let slots = outboxes(d, n, |r, t| piece((r + 2 * n - t) % n).1, 2 * (n - 1));
    // What rank r sends at hop t is block r - t: its contribution, then partial sums, then results.
    let sent = |r: u32, t: u32| Region::new(slots[r as usize][t as usize], 0, piece((r + 2 * n - t) % n).1);
    for r in 0..n {
        let left = (r + n - 1) % n;
        for t in 0..2 * n - 1 {
            let b = (r + 2 * n - t) % n;
            let mut dsts = Vec::new();
            if t + 1 >= n {
                dsts.push(user(Place::Output(r), b));
            }
            if t < 2 * (n - 1) {
                dsts.push(sent(r, t));
            }
            match t {
                0 => d.copy(t, r, user(Place::Input(r), b), dsts),
                _ if t < n => d.reduce(t, r, vec![sent(left, t - 1), user(Place::Input(r), b)], dsts, t == n - 1),
                _ => d.copy(t, r, sent(left, t - 1), dsts),
            }
        }
    }
}

fn reduce_scatter(d: &mut Draft<'_>, shape: &Shape, part: Part) {
    let n = shape.ranks;
    let slots = outboxes(d, n, |_, _| part.len, n - 1);
    let sent = |r: u32, t: u32| Region::new(slots[r as usize][t as usize], 0, part.len);
    for r in 0..n {
        for t in 0..n {
            let b = (r + n - 1 - t) % n;
            let own = Region::new(Place::Input(r), u64::from(b) * shape.count + part.start, part.len);
            let last = t == n - 1;
            let dst = if last { Region::new(Place::Output(r), part.start, part.len) } else { sent(r, t) };
            match t {
                0 => d.copy(t, r, own, vec![dst]),
                _ => d.reduce(t, r, vec![sent((r + n - 1) % n, t - 1), own], vec![dst], last),
            }
        }
    }
}

fn all_gather(d: &mut Draft<'_>, shape: &Shape, part: Part) {
    let n = shape.ranks;
    let slots = outboxes(d, n, |_, _| part.len, n - 1);
    let sent = |r: u32, t: u32| Region::new(slots[r as usize][t as usize], 0, part.len);
    for r in 0..n {
        let out = |b: u32| Region::new(Place::Output(r), u64::from(b) * shape.count + part.start, part.len);
        let own = Region::new(Place::Input(r), part.start, part.len);
        d.copy(0, r, own, vec![sent(r, 0)]);
        d.copy(1, r, own, vec![out(r)]);
        for t in 1..n {
            let mut dsts = vec![out((r + n - t) % n)];
            if t < n - 1 {
                dsts.push(sent(r, t));
            }
            d.copy(t, r, sent((r + n - 1) % n, t - 1), dsts);
        }
    }
}

fn broadcast(d: &mut Draft<'_>, shape: &Shape, part: Part, root: u32) {
    let n = shape.ranks;
    let user = |place| Region::new(place, part.start, part.len);
    let mut src = user(Place::Input(root));
    for hop in 0..n {
        let r = (root + hop) % n;
        let sent = Region::new(d.slot(r, part.len), 0, part.len);
        let mut dsts = vec![user(Place::Output(r))];
        if hop < n - 1 {
            dsts.push(sent);
        }
        d.copy(hop, r, src, dsts);
        src = sent;
    }
}

fn reduce(d: &mut Draft<'_>, shape: &Shape, part: Part, root: u32) {
    let n = shape.ranks;
    let mut partial = None;
    for hop in 0..n {
        let r = (root + 1 + hop) % n;
        let own = Region::new(Place::Input(r), part.start, part.len);
        let sent = Region::new(d.slot(r, part.len), 0, part.len);
        match partial {
            None => d.copy(hop, r, own, vec![sent]),
            Some(partial) if r == root => {
                d.reduce(hop, r, vec![partial, own], vec![Region::new(Place::Output(r), part.start, part.len)], true);
            }
            Some(partial) => d.reduce(hop, r, vec![partial, own], vec![sent], false),
        }
        partial = Some(sent);
    }
}

/// For each rank a slot a hop.
fn outboxes(d: &mut Draft<'_>, n: u32, len: impl Fn(u32, u32) -> u64, hops: u32) -> Vec<Vec<Place>> {
    (0..n).map(|r| (0..hops).map(|t| d.slot(r, len(r, t))).collect()).collect()
}
