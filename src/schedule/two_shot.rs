//! Direct reduce-scatter, then direct all-gather: two dependent steps, 2(n-1)/n messages in. Each rank reduces its
//! block of all contributions in rank order, once, and every rank reads that one result. Reduce ends at the root; a
//! broadcast scatters among the other ranks in place of reducing.
use super::{
    pipeline::{Draft, Part},
    *,
};

pub(super) fn steps(shape: &Shape, part: Part) -> Draft<'_> {
    let mut draft = Draft::new(shape);
    match &shape.collective {
        Collective::Reduce { root } => reduce(&mut draft, shape, part, *root..*root + 1),
        Collective::Broadcast { root } => broadcast(&mut draft, shape, part, *root),
        _ => reduce(&mut draft, shape, part, 0..shape.ranks),
    }
    draft
}

fn reduce(d: &mut Draft<'_>, shape: &Shape, part: Part, readers: std::ops::Range<u32>) {
    let n = shape.ranks;
    let piece = |b| block(part.len, n, b);
    let user = |place, b| Region::new(place, part.start + piece(b).0, piece(b).1);
    let inputs: Vec<Place> = (0..n).map(|r| d.slot(r, part.len)).collect();
    let results: Vec<Place> = (0..n).map(|r| d.slot(r, piece(r).1)).collect();
    for r in 0..n {
        for b in (0..n).filter(|b| *b != r) {
            let staged = Region::new(inputs[r as usize], piece(b).0, piece(b).1);
            d.copy(0, r, user(Place::Input(r), b), vec![staged]);
        }
        let from = |p: u32| match p == r {
            true => user(Place::Input(r), r),
            false => Region::new(inputs[p as usize], piece(r).0, piece(r).1),
        };
        let mut dsts = Vec::new();
        if readers.contains(&r) {
            dsts.push(user(Place::Output(r), r));
        }
        if readers.clone().any(|p| p != r) {
            dsts.push(Region::new(results[r as usize], 0, piece(r).1));
        }
        d.reduce(1, r, (0..n).map(from).collect(), dsts, true);
    }
    for r in readers {
        for b in (0..n).filter(|b| *b != r) {
            d.copy(2, r, Region::new(results[b as usize], 0, piece(b).1), vec![user(Place::Output(r), b)]);
        }
    }
}

fn broadcast(d: &mut Draft<'_>, shape: &Shape, part: Part, root: u32) {
    let readers: Vec<u32> = (0..shape.ranks).filter(|r| *r != root).collect();
    let piece = |b: usize| block(part.len, readers.len() as u32, b as u32);
    let user = |place, b| Region::new(place, part.start + piece(b).0, piece(b).1);
    let source = d.slot(root, part.len);
    let pieces: Vec<Place> = readers.iter().enumerate().map(|(b, r)| d.slot(*r, piece(b).1)).collect();
    let whole = |place| Region::new(place, part.start, part.len);
    let published = vec![Region::new(source, 0, part.len), whole(Place::Output(root))];
    d.copy(0, root, whole(Place::Input(root)), published);
    for (own, &r) in readers.iter().enumerate() {
        let mut dsts = vec![user(Place::Output(r), own)];
        if readers.len() > 1 {
            dsts.push(Region::new(pieces[own], 0, piece(own).1));
        }
        d.copy(1, r, Region::new(source, piece(own).0, piece(own).1), dsts);
        for b in (0..readers.len()).filter(|b| *b != own) {
            d.copy(2, r, Region::new(pieces[b], 0, piece(b).1), vec![user(Place::Output(r), b)]);
        }
    }
}
