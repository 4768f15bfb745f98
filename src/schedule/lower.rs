//! Links -> physical. A logical schedule says that one actor writes a slot and others read it; lowering says where the
//! bytes lie and who carries them, so that every crossing is an action of some actor:
//!
//! | reader reaches writer by | the writer stores to | the reader reads |
//! |---|---|---|
//! | [`Path::SharedHost`] | one [`Home::Shared`] slot, for all such readers | the same |
//! | [`Path::Peer`] | an [`Home::Inbox`] slot at each reader, by a copy | its inbox |
//! | [`Path::Copied`] | one [`Home::Download`] slot ([`Home::Mapped`] if it has such memory) | [`Home::Upload`] or [`Home::Mapped`], filled by its own host worker |
//! | itself | a [`Home::Device`] slot | the same |
//!
//! Host workers read what ranks have published where it lies, and store for each reader. Only copies touch inboxes,
//! uploads and downloads, so a rank's folds go through its [`Home::Device`] scratch before or after. Only what someone
//! reads is stored for him. A rank's fold of more sources than its device takes becomes a chain, in the same order. One
//! that would reach more buffers than every device binds goes through scratch too.
use super::{
    order::{self, Work},
    *,
};
use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

/// How the ranks of a machine reach each other, and what their devices can do.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Links {
    /// Ranks.
    pub ranks: u32,
    /// How the reader (row) reaches what the writer (column) stored: `paths[reader * ranks + writer]`. The diagonal
    /// is unused.
    pub paths: Vec<Path>,
    /// Whether the rank's device has host-visible memory that its kernels can use.
    pub mapped: Vec<bool>,
    /// The most sources of one kernel of the rank's device; at least 2.
    pub max_sources: Vec<u32>,
}

impl Links {
    /// The same path for every pair, and alike devices.
    pub fn uniform(ranks: u32, path: Path, mapped: bool, max_sources: u32) -> Self {
        let n = ranks as usize;
        Links { ranks, paths: vec![path; n * n], mapped: vec![mapped; n], max_sources: vec![max_sources; n] }
    }
    /// How `reader` reaches what `writer` stored.
    pub fn path(&self, reader: u32, writer: u32) -> Path {
        self.paths[(reader * self.ranks + writer) as usize]
    }
    /// Whether all ranks share one host allocation.
    fn all_shared(&self) -> bool {
        let pairs = (0..self.ranks).flat_map(|r| (0..self.ranks).map(move |w| (r, w))).filter(|(r, w)| r != w);
        self.ranks > 1 && pairs.into_iter().all(|(r, w)| self.path(r, w) == Path::SharedHost)
    }
}

/// Buffers that a kernel of any device can reach.
const BUFFERS: usize = 4;

/// Makes a logical schedule physical. Host workers have the actor of their rank plus `ranks`; memory that a worker
/// shares with all ranks belongs to that rank.
///
/// # Panics
/// If `links` are of another number of ranks.
pub fn lower(schedule: &Schedule, links: &Links) -> Schedule {
    lower_as(schedule, links, &Form::default())
}

/// What else decides how a schedule is lowered.
#[derive(Clone, Default, PartialEq, Eq, Hash, Debug)]
pub struct Form {
    /// Whether elements are narrower in staging than in the caller's memory: [`build_narrow`] made the schedule, and no
    /// copy goes from one to the other.
    pub narrow: bool,
    /// The ranks whose kernels keep off the caller's memory, because it starts or ends amid one of the units that they
    /// write: only copies touch it. Empty: none.
    pub staged: Vec<bool>,
    /// Whether host workers reach the callers' memory of every rank: then [`Algorithm::Host`] is
    /// [`direct`](super::direct).
    pub direct: bool,
}

/// The same in a form.
///
/// # Panics
/// If `links` are of another number of ranks.
pub fn lower_as(schedule: &Schedule, links: &Links, form: &Form) -> Schedule {
    assert_eq!(schedule.shape.ranks, links.ranks, "links of another number of ranks");
    if schedule.shape.collective == Collective::Barrier {
        return schedule.clone();
    }
    let order = order::linear(schedule);
    let flows = flows(schedule, &order);
    let shared = links.all_shared();
    let mut lowering =
        Lowering { schedule, links, form, shared, slots: Vec::new(), replicas: HashMap::new(), works: Vec::new() };
    for &id in &order {
        let actions = &schedule.steps[id.actor as usize][id.index as usize].actions;
        if id.actor < links.ranks {
            lowering.rank_step(id, actions, &flows);
        } else {
            lowering.worker_step(id, actions, &flows);
        }
    }
    let mut out = order::schedule(&schedule.shape, lowering.slots, lowering.works);
    place(&mut out);
    out
}

/// Elements of each arena, in one bank.
pub fn arenas(schedule: &Schedule) -> BTreeMap<(Actor, Home), u64> {
    let mut sizes = BTreeMap::new();
    for slot in &schedule.slots {
        let size = sizes.entry((slot.owner, slot.home)).or_insert(0);
        *size = (*size).max((slot.offset + slot.len).next_multiple_of(SLOT_ALIGNMENT));
    }
    sizes
}

/// For each actor, its steps as submissions: runs of which only the first step waits for another actor.
pub fn batches(schedule: &Schedule) -> Vec<Vec<Range<usize>>> {
    let of = |steps: &Vec<Step>| {
        let starts = (0..steps.len()).filter(|&i| i == 0 || !steps[i].after.is_empty());
        let mut runs: Vec<Range<usize>> = starts.map(|start| start..steps.len()).collect();
        for i in 1..runs.len() {
            runs[i - 1].end = runs[i].start;
        }
        runs
    };
    schedule.steps.iter().map(of).collect()
}

/// A destination of a logical step: step, action, destination.
type Written = (StepId, usize, usize);
/// For each destination, who reads which elements of it.
type Flows = HashMap<Written, Vec<(Actor, Range<u64>)>>;

/// Follows each read of a slot back to what wrote it.
fn flows(schedule: &Schedule, order: &[StepId]) -> Flows {
    let mut flows = Flows::new();
    let mut history: Vec<Vec<(Written, Range<u64>)>> = vec![Vec::new(); schedule.slots.len()];
    for &id in order {
        let actions = &schedule.steps[id.actor as usize][id.index as usize].actions;
        for source in actions.iter().flat_map(Action::sources) {
            let Place::Slot(slot) = source.place else { continue };
            let mut missing = Vec::from([range_of(source)]);
            for (written, range) in history[slot as usize].iter().rev() {
                let mut rest = Vec::new();
                for want in missing {
                    let common = want.start.max(range.start)..want.end.min(range.end);
                    if common.is_empty() {
                        rest.push(want);
                        continue;
                    }
                    rest.extend([want.start..common.start, common.end..want.end].into_iter().filter(|r| !r.is_empty()));
                    flows.entry(*written).or_default().push((id.actor, common));
                }
                missing = rest;
                if missing.is_empty() {
                    break;
                }
            }
        }
        for (a, action) in actions.iter().enumerate() {
            for (d, dst) in action.destinations().iter().enumerate() {
                let Place::Slot(slot) = dst.place else { continue };
                let list = &mut history[slot as usize];
                list.retain(|(_, old)| old.start < dst.start || dst.end() < old.end);
                list.push(((id, a, d), dst.start..dst.end()));
            }
        }
    }
    flows
}

/// What physically stands for a logical slot, or part of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
enum Replica {
    /// What the owner reads itself.
    Own(u32),
    /// What all that share host memory read.
    Shared(u32),
    /// What host workers fetch.
    Published(u32),
    /// What host workers have brought to a rank.
    Received(u32, u32),
    /// What a peer has pushed to a rank.
    Inbox(u32, u32),
    /// A rank's device memory, within what one logical step has become.
    Scratch(u32),
}

struct Lowering<'a> {
    schedule: &'a Schedule,
    links: &'a Links,
    form: &'a Form,
    shared: bool,
    slots: Vec<Slot>,
    replicas: HashMap<Replica, u32>,
    works: Vec<Work>,
}

impl Lowering<'_> {
    /// Where a write of logical slot `slot` has to go for `reader` to see it.
    fn target(&self, slot: u32, reader: Actor) -> Replica {
        let (owner, ranks) = (self.schedule.slots[slot as usize].owner, self.links.ranks);
        match (owner < ranks, reader < ranks) {
            (true, true) if reader == owner => Replica::Own(slot),
            (true, true) => match self.links.path(reader, owner) {
                Path::SharedHost => Replica::Shared(slot),
                Path::Peer => Replica::Inbox(slot, reader),
                Path::Copied => Replica::Published(slot),
            },
            _ if self.shared => Replica::Shared(slot),
            (true, false) => Replica::Published(slot),
            (false, _) => Replica::Received(slot, reader),
        }
    }
    fn home(&self, replica: Replica) -> (Actor, Home) {
        let rank = |slot: u32| self.schedule.slots[slot as usize].owner % self.links.ranks;
        let host = |rank: u32, else_: Home| if self.links.mapped[rank as usize] { Home::Mapped } else { else_ };
        match replica {
            Replica::Own(slot) => (rank(slot), Home::Device),
            Replica::Shared(slot) => (rank(slot), Home::Shared),
            Replica::Published(slot) => (rank(slot), host(rank(slot), Home::Download)),
            Replica::Received(_, reader) => (reader, host(reader, Home::Upload)),
            Replica::Inbox(_, reader) => (reader, Home::Inbox),
            Replica::Scratch(rank) => (rank, Home::Device),
        }
    }
    /// Whether a kernel of the rank that owns the slot may touch it.
    fn kernel(&self, replica: Replica) -> bool {
        !matches!(self.home(replica).1, Home::Upload | Home::Download | Home::Inbox)
    }
    /// Elements `range` of the logical slot, in its replica.
    fn region(&mut self, replica: Replica, range: Range<u64>) -> Region {
        let (owner, home) = self.home(replica);
        let slots = &mut self.slots;
        let slot = *self.replicas.entry(replica).or_insert_with(|| {
            slots.push(Slot { owner, home, len: 0, offset: 0 });
            slots.len() as u32 - 1
        });
        Region::new(Place::Slot(slot), range.start, range.end - range.start)
    }
    /// The replicas that a write of `dst` must reach, with the elements that each needs.
    fn targets(&self, dst: Region, slot: u32, readers: &[(Actor, Range<u64>)]) -> Vec<(Range<u64>, Replica)> {
        let mut wanted: Vec<(Replica, Range<u64>)> =
            readers.iter().map(|(reader, range)| (self.target(slot, *reader), range.clone())).collect();
        wanted.sort_by_key(|(replica, range)| (*replica, range.start));
        let mut out: Vec<(Range<u64>, Replica)> = Vec::new();
        for (replica, range) in wanted {
            debug_assert!(dst.start <= range.start && range.end <= dst.end());
            match out.last_mut() {
                Some((last, same)) if *same == replica && range.start <= last.end => last.end = last.end.max(range.end),
                _ => out.push((range, replica)),
            }
        }
        out
    }

    fn worker_step(&mut self, id: StepId, actions: &[Action], flows: &Flows) {
        let mut done = Vec::new();
        for (a, action) in actions.iter().enumerate() {
            let mut srcs = Vec::new();
            for source in action.sources() {
                srcs.extend(slot_of(source).map(|slot| self.region(self.target(slot, id.actor), range_of(source))));
            }
            let mut stores = Stores::default();
            for (d, dst) in action.destinations().iter().enumerate() {
                let readers = flows.get(&(id, a, d)).map_or(&[][..], Vec::as_slice);
                for (range, replica) in slot_of(dst).map_or(Vec::new(), |slot| self.targets(*dst, slot, readers)) {
                    stores.add(range.start - dst.start..range.end - dst.start, self.region(replica, range));
                }
            }
            done.extend(stores.actions(|offset, len, dsts| {
                let srcs: Vec<Region> = srcs.iter().map(|s| s.part(offset, len)).collect();
                match action {
                    Action::Copy { .. } => Action::Copy { src: srcs[0], dsts },
                    Action::Reduce { finish, .. } => Action::Reduce { srcs, dsts, finish: *finish },
                }
            }));
        }
        self.push(id.actor, vec![done]);
    }

    /// A rank's step becomes up to four kinds of step: its worker carries to it; it copies, and brings what it will
    /// fold to where kernels can read it; it folds; it copies what it folded to where others can reach it.
    /// They are one submission.
    fn rank_step(&mut self, id: StepId, actions: &[Action], flows: &Flows) {
        let rank = id.actor;
        let mut carried = Vec::new();
        let mut steps: Vec<Vec<Action>> = Vec::new();
        let mut put = |index: usize, action: Action| {
            steps.resize_with(steps.len().max(index + 1), Vec::new);
            steps[index].push(action);
        };
        let staged = self.form.staged.get(rank as usize) == Some(&true);
        let mut used = 0;
        let mut scratch = |this: &mut Self, len: u64| {
            let start = used;
            used += len.next_multiple_of(SLOT_ALIGNMENT);
            this.region(Replica::Scratch(rank), start..start + len)
        };
        for (a, action) in actions.iter().enumerate() {
            let (fold, finish) = match action {
                Action::Copy { .. } => (false, false),
                Action::Reduce { finish, .. } => (true, *finish),
            };
            let mut first = 0;
            let mut srcs = Vec::new();
            for source in action.sources() {
                let Some(slot) = slot_of(source) else {
                    let mut region = *source;
                    if fold && staged {
                        region = scratch(self, source.len);
                        put(0, Action::Copy { src: *source, dsts: vec![region] });
                        first = 1;
                    }
                    srcs.push(region);
                    continue;
                };
                let mut from = self.target(slot, rank);
                if let Replica::Published(_) = from {
                    from = Replica::Received(slot, rank);
                    let src = self.region(Replica::Published(slot), range_of(source));
                    let carry = Action::Copy { src, dsts: vec![self.region(from, range_of(source))] };
                    if !carried.contains(&carry) {
                        carried.push(carry);
                    }
                }
                let mut region = self.region(from, range_of(source));
                if fold && self.home(from).1 == Home::Upload {
                    let local = scratch(self, region.len);
                    put(0, Action::Copy { src: region, dsts: vec![local] });
                    (region, first) = (local, 1);
                }
                srcs.push(region);
            }

            let mut direct = Vec::new();
            let mut stores = Stores::default();
            for (d, dst) in action.destinations().iter().enumerate() {
                let Some(slot) = slot_of(dst) else {
                    if fold && !staged {
                        direct.push(*dst)
                    } else {
                        stores.add(0..dst.len, *dst)
                    }
                    continue;
                };
                let readers = flows.get(&(id, a, d)).map_or(&[][..], Vec::as_slice);
                for (range, replica) in self.targets(*dst, slot, readers) {
                    if fold && self.kernel(replica) {
                        let whole = self.region(replica, range_of(dst));
                        direct.extend(Some(whole).filter(|w| !direct.contains(w)));
                    } else {
                        stores.add(range.start - dst.start..range.end - dst.start, self.region(replica, range));
                    }
                }
            }
            if !fold {
                stores
                    .actions(|offset, len, dsts| Action::Copy { src: srcs[0].part(offset, len), dsts })
                    .for_each(|c| put(0, c));
                continue;
            }
            let most = self.links.max_sources[rank as usize].max(2) as usize;
            let chained = srcs.len() > most || direct.is_empty();
            if self.buffers(srcs.iter().chain(&direct), chained) > BUFFERS {
                // What else the kernel would touch is copied from and to device memory.
                for src in &mut srcs {
                    if !self.is_beyond(src) {
                        continue;
                    }
                    let local = scratch(self, src.len);
                    put(0, Action::Copy { src: *src, dsts: vec![local] });
                    (*src, first) = (local, first.max(1));
                }
                let beyond = direct.extract_if(.., |dst| self.is_beyond(dst));
                beyond.for_each(|dst| stores.add(0..dst.len, dst));
            }
            let narrow = self.form.narrow;
            let nothing_to_copy_from = narrow && !stores.0.is_empty() && !direct.iter().any(|r| slot_of(r).is_some());
            if direct.is_empty() || nothing_to_copy_from {
                direct.push(scratch(self, action.len()));
            }
            let mut accumulator = None;
            while srcs.len() > most {
                let partial = *accumulator.get_or_insert_with(|| scratch(self, action.len()));
                let rest = srcs.split_off(most);
                put(first, Action::Reduce { srcs, dsts: vec![partial], finish: false });
                srcs = std::iter::once(partial).chain(rest).collect();
                first += 1;
            }
            // What others need is read back from device memory where there is some.
            direct.sort_by_key(|r| match r.place {
                Place::Slot(slot) => self.slots[slot as usize].home,
                Place::Input(_) | Place::Output(_) if narrow => Home::Inbox, // last
                Place::Input(_) | Place::Output(_) => Home::Device,
            });
            let result = direct[0];
            put(first, Action::Reduce { srcs, dsts: direct, finish });
            let pushes = stores.actions(|offset, len, dsts| Action::Copy { src: result.part(offset, len), dsts });
            pushes.for_each(|c| put(first + 1, c));
        }
        self.push(self.links.ranks + rank, vec![carried]);
        self.push(rank, steps);
    }

    /// The buffers that a kernel touches; `device`: device memory of its own too.
    fn buffers<'a>(&self, regions: impl Iterator<Item = &'a Region>, device: bool) -> usize {
        let mut buffers: Vec<_> = regions.map(|r| buffer(&self.slots, r)).collect();
        let own = device && !buffers.iter().any(|b| matches!(b, Buffer::Staging(_, Home::Device)));
        buffers.sort();
        buffers.dedup();
        buffers.len() + usize::from(own)
    }
    /// Whether it lies in none of the four buffers that a kernel can do with: the caller's input and output, device
    /// memory of its own, and what all ranks share.
    fn is_beyond(&self, region: &Region) -> bool {
        matches!(buffer(&self.slots, region), Buffer::Staging(_, Home::Inbox | Home::Mapped))
    }

    fn push(&mut self, actor: Actor, mut steps: Vec<Vec<Action>>) {
        steps.retain(|actions| !actions.is_empty());
        if !steps.is_empty() {
            self.works.push(Work { actor, steps });
        }
    }
}

/// Where the elements of an action go: destinations by range, relative to the action's regions.
#[derive(Default)]
struct Stores(BTreeMap<(u64, u64), Vec<Region>>);

impl Stores {
    fn add(&mut self, range: Range<u64>, dst: Region) {
        self.0.entry((range.start, range.end - range.start)).or_default().push(dst);
    }
    fn actions(self, mut make: impl FnMut(u64, u64, Vec<Region>) -> Action) -> impl Iterator<Item = Action> {
        self.0.into_iter().map(move |((offset, len), dsts)| make(offset, len, dsts))
    }
}

/// Where a region lies, as far as bindings go.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Buffer {
    Input(u32),
    /// In place too: for a rank that contributes nothing something else stands in for its input.
    Output(u32),
    Staging(Actor, Home),
}

fn buffer(slots: &[Slot], region: &Region) -> Buffer {
    match region.place {
        Place::Input(rank) => Buffer::Input(rank),
        Place::Output(rank) => Buffer::Output(rank),
        Place::Slot(slot) => {
            let Slot { owner, home, .. } = slots[slot as usize];
            // That is one buffer for all.
            Buffer::Staging(if home == Home::Shared { 0 } else { owner }, home)
        }
    }
}

fn slot_of(region: &Region) -> Option<u32> {
    match region.place {
        Place::Slot(slot) => Some(slot),
        Place::Input(_) | Place::Output(_) => None,
    }
}

fn range_of(region: &Region) -> Range<u64> {
    region.start..region.end()
}

/// Cuts each slot to the elements that are used, and lays the slots of each arena out.
fn place(schedule: &mut Schedule) {
    let mut hull = vec![(u64::MAX, 0); schedule.slots.len()];
    let actions = || schedule.steps.iter().flatten().flat_map(|s| &s.actions);
    for region in actions().flat_map(|a| a.sources().iter().chain(a.destinations())) {
        if let Some(slot) = slot_of(region) {
            let (start, end) = &mut hull[slot as usize];
            (*start, *end) = ((*start).min(region.start), (*end).max(region.end()));
        }
    }
    for region in schedule.steps.iter_mut().flatten().flat_map(|s| &mut s.actions).flat_map(Action::regions_mut) {
        if let Place::Slot(slot) = region.place {
            region.start -= hull[slot as usize].0;
        }
    }
    let mut ends: BTreeMap<(Actor, Home), u64> = BTreeMap::new();
    for (slot, (first, last)) in schedule.slots.iter_mut().zip(hull) {
        let end = ends.entry((slot.owner, slot.home)).or_default();
        (slot.len, slot.offset) = (last - first, *end);
        *end += slot.len.next_multiple_of(SLOT_ALIGNMENT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lowered(algorithm: Algorithm, ranks: u32, links: &Links) -> Schedule {
        let shape = Shape { collective: Collective::AllReduce, ranks, count: 1000, in_place: false };
        lower(&build(&shape, algorithm, Chunking::WHOLE).unwrap(), links)
    }

    #[test]
    fn each_reader_is_served_by_its_own_path() {
        let mut links = Links::uniform(4, Path::Copied, false, 8);
        (links.paths[4], links.paths[8]) = (Path::Peer, Path::SharedHost); // ranks 1 and 2 read rank 0
        let schedule = lowered(Algorithm::OneShot, 4, &links);
        let Action::Copy { dsts, .. } = &schedule.steps[0][0].actions[0] else { panic!("no copy") };
        let slot = |r: &Region| schedule.slots[slot_of(r).unwrap() as usize];
        let homes: Vec<_> = dsts.iter().map(slot).map(|s| (s.owner, s.home)).collect();
        assert_eq!(homes, [(0, Home::Shared), (0, Home::Download), (1, Home::Inbox)]);
        assert_eq!(arenas(&schedule)[&(1, Home::Inbox)], 1024);
        assert_eq!(arenas(&schedule)[&(1, Home::Upload)], 2048, "what ranks 2 and 3 sent");
    }

    #[test]
    fn no_kernel_reaches_more_buffers_than_every_device_binds() {
        let paths = [Path::Peer, Path::SharedHost, Path::Copied];
        for (n, seed) in (2..=5_u32).flat_map(|n| (0..60_u32).map(move |seed| (n, seed))) {
            let draw = |i: u32, of: u32| ((i + 1).wrapping_mul(0x9e37_79b1 ^ seed.wrapping_mul(0x85eb_ca6b)) >> 9) % of;
            let links = Links {
                ranks: n,
                paths: (0..n * n).map(|i| paths[draw(i, 3) as usize % 3]).collect(),
                mapped: (0..n).map(|r| draw(r, 7) % 2 == 0).collect(),
                max_sources: (0..n).map(|r| 2 + draw(r, 5)).collect(),
            };
            for (collective, in_place) in
                [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce { root: 1 }]
                    .into_iter()
                    .flat_map(|c| [(c.clone(), false), (c, true)])
            {
                let shape = Shape { collective, ranks: n, count: 1000, in_place };
                for algorithm in algorithms(&shape.collective) {
                    let schedule = lower(&build(&shape, *algorithm, Chunking::WHOLE).unwrap(), &links);
                    for action in schedule.steps[..n as usize].iter().flatten().flat_map(|step| &step.actions) {
                        let Action::Reduce { srcs, dsts, .. } = action else { continue };
                        let regions = srcs.iter().chain(dsts);
                        let buffers: std::collections::BTreeSet<_> =
                            regions.map(|r| buffer(&schedule.slots, r)).collect();
                        assert!(buffers.len() <= BUFFERS, "{algorithm} {shape:?} {links:?}: {buffers:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn only_what_is_read_crosses() {
        let schedule = lowered(Algorithm::TwoShot, 4, &Links::uniform(4, Path::Peer, false, 8));
        // Three quarters come in to be reduced, then three results.
        assert_eq!(arenas(&schedule), (0..4).map(|r| ((r, Home::Inbox), 6 * 256)).collect());
    }

    #[test]
    fn many_sources_become_a_chain_in_order() {
        let schedule = lowered(Algorithm::OneShot, 5, &Links::uniform(5, Path::SharedHost, false, 3));
        let folds: Vec<_> = schedule.steps[0][1..].iter().map(|s| &s.actions[..]).collect();
        let [[Action::Reduce { srcs: a, dsts, finish: false }], [Action::Reduce { srcs: b, finish: true, .. }]] =
            folds[..]
        else {
            panic!("{folds:?}")
        };
        assert_eq!((a.len(), b.len(), a[0].place, b[0]), (3, 3, Place::Input(0), dsts[0]));
        assert!(schedule.steps[0][2].after.is_empty());
        assert_eq!(batches(&schedule)[0], [0..1, 1..3]);
    }

    #[test]
    fn workers_store_for_each_reader() {
        let schedule = lowered(Algorithm::Host, 3, &Links::uniform(3, Path::Peer, false, 2));
        let arenas: Vec<_> = arenas(&schedule).into_keys().collect();
        assert_eq!(arenas, (0..3).flat_map(|r| [(r, Home::Upload), (r, Home::Download)]).collect::<Vec<_>>());
        let shared = lowered(Algorithm::Host, 3, &Links::uniform(3, Path::SharedHost, false, 2));
        assert!(shared.slots.iter().all(|s| s.home == Home::Shared) && shared.slots.len() == 4);
    }
}
