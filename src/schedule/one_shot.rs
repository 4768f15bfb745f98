//! Publish once, read all others, reduce: one dependent step, (n-1) messages in. Always best for two ranks, and for
//! little data. Folds in rank order, once.
use super::{
    pipeline::{Draft, Part},
    *,
};

pub(super) fn steps(shape: &Shape, part: Part) -> Draft<'_> {
    let mut draft = Draft::new(shape);
    let d = &mut draft;
    match &shape.collective {
        Collective::AllReduce => reduce(d, shape, part, 0..shape.ranks),
        Collective::Reduce { root } => reduce(d, shape, part, *root..*root + 1),
        Collective::ReduceScatter => {
            let blocks = Blocks::new(shape, part);
            let slots = blocks.publish(d, 0..shape.ranks);
            for r in 0..shape.ranks {
                let from =
                    |p: u32| if p == r { blocks.user(Place::Input(r), r) } else { blocks.slot(slots[p as usize], r) };
                let out = Region::new(Place::Output(r), part.start, part.len);
                d.reduce(1, r, (0..shape.ranks).map(from).collect(), vec![out], true);
            }
        }
        Collective::AllGather => gather(d, shape, part, 0..shape.ranks),
        Collective::Gather { root } => gather(d, shape, part, *root..*root + 1),
        Collective::Broadcast { root } => {
            let part_of = |place| Region::new(place, part.start, part.len);
            let slot = d.slot(*root, part.len);
            let mut dsts = vec![part_of(Place::Output(*root))];
            if shape.ranks > 1 {
                dsts.insert(0, Region::new(slot, 0, part.len));
            }
            d.copy(0, *root, part_of(Place::Input(*root)), dsts);
            for r in (0..shape.ranks).filter(|r| r != root) {
                d.copy(1, r, Region::new(slot, 0, part.len), vec![part_of(Place::Output(r))]);
            }
        }
        Collective::Scatter { root } => {
            let blocks = Blocks::new(shape, part);
            let slots = blocks.publish(d, *root..*root + 1);
            for r in 0..shape.ranks {
                let own = r == *root;
                let src = if own { blocks.user(Place::Input(r), r) } else { blocks.slot(slots[0], r) };
                d.copy(u32::from(!own), r, src, vec![Region::new(Place::Output(r), part.start, part.len)]);
            }
        }
        Collective::AllToAll => {
            let blocks = Blocks::new(shape, part);
            let slots = blocks.publish(d, 0..shape.ranks);
            for r in 0..shape.ranks {
                for p in 0..shape.ranks {
                    let src = if p == r { blocks.user(Place::Input(r), r) } else { blocks.slot(slots[p as usize], r) };
                    d.copy(1, r, src, vec![blocks.user(Place::Output(r), p)]);
                }
            }
        }
        Collective::SendRecv(list) => send_recv(d, shape, part, list),
        Collective::Barrier => {} // nothing moves; `barrier` orders
    }
    draft
}

/// All arrive, then each waits for all others.
pub(super) fn barrier(shape: &Shape) -> Schedule {
    let others = |r| (0..shape.ranks).filter(move |p| *p != r).map(|actor| StepId { actor, index: 0 });
    let steps = |r| match shape.ranks {
        1 => vec![Step::default()],
        _ => vec![Step::default(), Step { after: others(r).collect(), actions: Vec::new() }],
    };
    Schedule { shape: shape.clone(), slots: Vec::new(), steps: (0..shape.ranks).map(steps).collect() }
}

/// Where the blocks of a part lie: in the user's memory a `count` apart, in a slot one behind the other.
pub(super) struct Blocks<'a> {
    shape: &'a Shape,
    part: Part,
    stride: u64,
}

impl<'a> Blocks<'a> {
    pub fn new(shape: &'a Shape, part: Part) -> Self {
        // Borders inside staging stay aligned; whole blocks that are aligned anyway keep their distance, so that
        // neighbours make one copy.
        let stride = if part.len.is_multiple_of(64) { part.len } else { part.len.next_multiple_of(SLOT_ALIGNMENT) };
        Blocks { shape, part, stride }
    }
    /// Block `b` of the part in an input or an output.
    pub fn user(&self, place: Place, b: u32) -> Region {
        Region::new(place, u64::from(b) * self.shape.count + self.part.start, self.part.len)
    }
    /// Block `b` of the part in a slot that holds a block for each rank.
    pub fn slot(&self, place: Place, b: u32) -> Region {
        Region::new(place, u64::from(b) * self.stride, self.part.len)
    }
    /// Elements of such a slot.
    pub fn len(&self) -> u64 {
        self.stride * u64::from(self.shape.ranks)
    }
    /// Each of `senders` publishes what is for others: returns their slots.
    fn publish(&self, d: &mut Draft<'_>, senders: std::ops::Range<u32>) -> Vec<Place> {
        let mut slots = Vec::new();
        for r in senders {
            let slot = d.slot(r, self.len());
            for b in (0..self.shape.ranks).filter(|b| *b != r) {
                d.copy(0, r, self.user(Place::Input(r), b), vec![self.slot(slot, b)]);
            }
            slots.push(slot);
        }
        slots
    }
}

fn reduce(d: &mut Draft<'_>, shape: &Shape, part: Part, readers: std::ops::Range<u32>) {
    let slots = publish(d, shape, part, &readers);
    for r in readers {
        let own = Region::new(Place::Input(r), part.start, part.len);
        let from = |p: u32| if p == r { own } else { Region::new(slots[p as usize], 0, part.len) };
        let out = Region::new(Place::Output(r), part.start, part.len);
        d.reduce(1, r, (0..shape.ranks).map(from).collect(), vec![out], true);
    }
}

fn gather(d: &mut Draft<'_>, shape: &Shape, part: Part, readers: std::ops::Range<u32>) {
    let slots = publish(d, shape, part, &readers);
    for r in readers {
        let own = Region::new(Place::Input(r), part.start, part.len);
        for p in 0..shape.ranks {
            let src = if p == r { own } else { Region::new(slots[p as usize], 0, part.len) };
            d.copy(1, r, src, vec![Region::new(Place::Output(r), u64::from(p) * shape.count + part.start, part.len)]);
        }
    }
}

/// Each rank whose input another one reads publishes it: returns a slot for each rank.
fn publish(d: &mut Draft<'_>, shape: &Shape, part: Part, readers: &std::ops::Range<u32>) -> Vec<Place> {
    let mut slots = Vec::new();
    for r in 0..shape.ranks {
        let slot = d.slot(r, part.len);
        if readers.clone().any(|p| p != r) {
            d.copy(0, r, Region::new(Place::Input(r), part.start, part.len), vec![Region::new(slot, 0, part.len)]);
        }
        slots.push(slot);
    }
    slots
}

fn send_recv(d: &mut Draft<'_>, shape: &Shape, part: Part, list: &[Transfer]) {
    let ranks = shape.ranks as usize;
    let of = |t: &Transfer| part.len.min(t.count.saturating_sub(part.start));
    let mut staged = vec![0u64; ranks];
    let mut places = Vec::new();
    let (mut sent, mut received) = (vec![0; ranks], vec![0; ranks]);
    for t in list {
        let (from, to, at) = (t.from as usize, t.to as usize, staged[t.from as usize]);
        if from != to {
            staged[from] += of(t).next_multiple_of(SLOT_ALIGNMENT);
        }
        places.push((sent[from] + part.start, at, received[to] + part.start));
        sent[from] += t.count;
        received[to] += t.count;
    }
    let slots: Vec<Place> = (0..shape.ranks).map(|r| d.slot(r, staged[r as usize])).collect();
    for (t, (src, at, dst)) in list.iter().zip(places) {
        let input = Region::new(Place::Input(t.from), src, of(t));
        let output = Region::new(Place::Output(t.to), dst, of(t));
        if t.from == t.to {
            d.copy(0, t.from, input, vec![output]);
        } else {
            let slot = Region::new(slots[t.from as usize], at, of(t));
            d.copy(0, t.from, input, vec![slot]);
            d.copy(1, t.to, slot, vec![output]);
        }
    }
}
