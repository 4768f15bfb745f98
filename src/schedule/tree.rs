//! Logarithmic depth. All-reduce is recursive halving and doubling (Rabenseifner; Thakur, Rabenseifner and Gropp, 2005):
//! 2 log2 n hops that move 2(n-1)/n of the data; where n is no power of two, the ranks above the largest one, m, first
//! give theirs to rank r - m and get the result last. Reduce and broadcast are binomial trees over r - root modulo n.
//!
//! **Order.** All-reduce: a pair of ranks `v < w` whose groups meet folds `v's + w's`, first ranks m/2 apart, then m/4
//! and so on; before that `x[r] + x[r+m]`. Reduce: a node folds `own + child(+1) + child(+2) + child(+4) ...` in one
//! fold.
use super::{
    pipeline::{Draft, Part},
    *,
};

pub(super) fn steps(shape: &Shape, part: Part) -> Draft<'_> {
    let mut draft = Draft::new(shape);
    match shape.collective {
        Collective::Broadcast { root } => broadcast(&mut draft, shape, part, root),
        Collective::Reduce { root } => reduce(&mut draft, shape, part, root),
        _ => all_reduce(&mut draft, shape, part),
    }
    draft
}

fn all_reduce(d: &mut Draft<'_>, shape: &Shape, part: Part) {
    let n = shape.ranks;
    let rounds = n.ilog2();
    let m = 1 << rounds;
    let extra = n - m;
    // Offset and length, within the part, of what rank v still holds after `round` halvings.
    let held = |v: u32, round: u32| {
        let width = m >> round;
        let first = v / width * width;
        let start = block(part.len, m, first).0;
        let (last, len) = block(part.len, m, first + width - 1);
        (start, last + len - start)
    };
    let partner = |v: u32, round: u32| v ^ (m >> (round + 1));
    let user = |place, (start, len): (u64, u64)| Region::new(place, part.start + start, len);

    let whole = (0, part.len);
    let folded: Vec<Place> = (m..n).map(|r| d.slot(r, part.len)).collect();
    for (r, slot) in (m..n).zip(&folded) {
        d.copy(0, r, user(Place::Input(r), whole), vec![Region::new(*slot, 0, part.len)]);
    }
    // For each rank and halving: what it gives its partner, and what it keeps.
    let mut halves: Vec<Vec<[Region; 2]>> = Vec::new();
    for v in 0..m {
        let both = |round| [held(partner(v, round), round + 1), held(v, round + 1)];
        halves.push((0..rounds).map(|i| both(i).map(|(_, len)| Region::new(d.slot(v, len), 0, len))).collect());
    }
    let results: Vec<Place> = (0..m).map(|v| d.slot(v, part.len)).collect();
    let first = u32::from(extra > 0);
    for v in 0..m {
        let mine = &halves[v as usize];
        // Ranks with a second contribution fold it in; the others' own half stays in their input.
        let has_extra = v < extra;
        let [given, kept] = [held(partner(v, 0), 1), held(v, 1)];
        if has_extra {
            for (range, dst) in [given, kept].into_iter().zip(mine[0]) {
                let other = Region::new(folded[v as usize], range.0, range.1);
                d.reduce(first, v, vec![user(Place::Input(v), range), other], vec![dst], false);
            }
        } else {
            d.copy(first, v, user(Place::Input(v), given), vec![mine[0][0]]);
        }
        for round in 0..rounds {
            let w = partner(v, round);
            let own = if round == 0 && !has_extra { user(Place::Input(v), kept) } else { mine[round as usize][1] };
            let theirs = halves[w as usize][round as usize][0];
            let (start, _) = held(v, round + 1);
            let fold = |range: (u64, u64)| {
                let [a, b] = [own, theirs].map(|r| r.part(range.0 - start, range.1));
                if v < w { vec![a, b] } else { vec![b, a] }
            };
            let level = first + 1 + round;
            if round + 1 < rounds {
                let next = [held(partner(v, round + 1), round + 2), held(v, round + 2)];
                for (range, dst) in next.into_iter().zip(mine[round as usize + 1]) {
                    d.reduce(level, v, fold(range), vec![dst], false);
                }
            } else {
                let range = held(v, rounds);
                let dsts = vec![user(Place::Output(v), range), Region::new(results[v as usize], range.0, range.1)];
                d.reduce(level, v, fold(range), dsts, true);
            }
        }
        for round in (0..rounds).rev() {
            let w = partner(v, round);
            let range = held(w, round + 1);
            let mut dsts = vec![user(Place::Output(v), range)];
            if round > 0 || has_extra {
                dsts.push(Region::new(results[v as usize], range.0, range.1));
            }
            let src = Region::new(results[w as usize], range.0, range.1);
            d.copy(first + 2 * rounds - round, v, src, dsts);
        }
    }
    for r in m..n {
        let src = Region::new(results[(r - m) as usize], 0, part.len);
        d.copy(first + 2 * rounds + 1, r, src, vec![user(Place::Output(r), whole)]);
    }
}

fn reduce(d: &mut Draft<'_>, shape: &Shape, part: Part, root: u32) {
    let n = shape.ranks;
    let slots: Vec<Region> = (0..n).map(|v| Region::new(d.slot((v + root) % n, part.len), 0, part.len)).collect();
    let mut height = vec![0; n as usize];
    for v in (0..n).rev() {
        let r = (v + root) % n;
        let own = Region::new(Place::Input(r), part.start, part.len);
        height[v as usize] = children(v, n).map(|c| height[c as usize] + 1).max().unwrap_or(0);
        let level = height[v as usize];
        let dst = if v == 0 { Region::new(Place::Output(r), part.start, part.len) } else { slots[v as usize] };
        if level == 0 {
            d.copy(level, r, own, vec![dst]);
        } else {
            let srcs = std::iter::once(own).chain(children(v, n).map(|c| slots[c as usize])).collect();
            d.reduce(level, r, srcs, vec![dst], v == 0);
        }
    }
}

fn broadcast(d: &mut Draft<'_>, shape: &Shape, part: Part, root: u32) {
    let n = shape.ranks;
    let slots: Vec<Region> = (0..n).map(|v| Region::new(d.slot((v + root) % n, part.len), 0, part.len)).collect();
    for v in 0..n {
        let r = (v + root) % n;
        let user = |place| Region::new(place, part.start, part.len);
        // The parent is v without its lowest bit.
        let src = if v == 0 { user(Place::Input(r)) } else { slots[(v & (v - 1)) as usize] };
        let mut dsts = vec![user(Place::Output(r))];
        if children(v, n).next().is_some() {
            dsts.push(slots[v as usize]);
        }
        d.copy(v.count_ones(), r, src, dsts);
    }
}

/// The children of node `v` in a binomial tree of `n`, nearest first.
fn children(v: u32, n: u32) -> impl Iterator<Item = u32> {
    (0..v.trailing_zeros().min(31)).map(move |j| v + (1 << j)).take_while(move |c| *c < n)
}
