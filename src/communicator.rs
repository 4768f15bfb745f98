//! Ranks that work together, and what is asked of them.
use crate::{
    Arithmetic, Error, Result,
    call::{self, Part},
    contract::{Clock, DataType, Device, ReduceOp},
    engine::{Request, Scheduled, Setup},
    group,
    link::{self, Forced, Found, Link, Sync},
    pending::Pending,
    schedule::{Algorithm, Collective, Path, Transfer},
    trace::Trace,
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};

/// How long a call may be without progress, unless it or its communicator says otherwise.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// A number of ranks, each with a device, that carry out collectives together. All ranks are in this process: a call
/// takes what each of them brings.
///
/// `&self` from any thread; calls run in the order in which they were made. Dropping it lets what is pending go on; if
/// nothing is, its threads and its memory are gone when the drop returns.
pub struct Communicator {
    devices: Vec<Arc<dyn Device>>,
    found: Found,
    engine: Scheduled,
    settings: Settings,
}

/// What those that are split off inherit.
#[derive(Clone)]
struct Settings {
    algorithm: Option<Algorithm>,
    deadline: Duration,
    clock: Clock,
    grow_only: bool,
}

/// One of the communicators that [`Communicator::split`] makes.
pub struct Split {
    /// The colour that its ranks gave.
    pub color: u32,
    /// Its ranks in the communicator that was split: rank r is `ranks[r]` there.
    pub ranks: Vec<u32>,
    /// The new one.
    pub communicator: Communicator,
}

/// What a communicator is made of.
#[derive(Default)]
pub struct Builder {
    devices: Vec<Option<Arc<dyn Device>>>,
    path: Option<Path>,
    sync: Option<Sync>,
    algorithm: Option<Algorithm>,
    deadline: Option<Duration>,
    clock: Clock,
    trace: Option<Arc<Trace>>,
    skip_wait: Option<u64>,
    grow_only: bool,
}

impl Builder {
    /// The next rank, on a device. A device may have several ranks.
    pub fn rank(mut self, device: Arc<dyn Device>) -> Self {
        self.devices.push(Some(device));
        self
    }
    /// So many ranks in all, those that have a device being the first.
    pub fn ranks(mut self, ranks: u32) -> Self {
        self.devices.resize(ranks as usize, None);
        self
    }
    /// A path to use for every pair, instead of the best one. It must pass its proof.
    pub fn path(mut self, path: Option<Path>) -> Self {
        self.path = path;
        self
    }
    /// A sync to use for every pair, instead of the best one. It must pass its proof.
    pub fn sync(mut self, sync: Option<Sync>) -> Self {
        self.sync = sync;
        self
    }
    /// An algorithm to use for every call, instead of the fastest that gives the same bits for every message size.
    pub fn algorithm(mut self, algorithm: Option<Algorithm>) -> Self {
        self.algorithm = algorithm;
        self
    }
    /// How long a call may be without progress: [`DEADLINE`] unless given. It does not run while a rank's data is
    /// awaited ([`Part::after`]).
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }
    /// What deadlines are read off: the clock that the devices have, for tests.
    #[doc(hidden)]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }
    /// Records what is submitted, for tests.
    #[doc(hidden)]
    pub fn trace(mut self, trace: Arc<Trace>) -> Self {
        self.trace = Some(trace);
        self
    }
    /// Leaves out one wait, for the test that a trace shows it.
    #[doc(hidden)]
    pub fn skip_wait(mut self, number: u64) -> Self {
        self.skip_wait = Some(number);
        self
    }
    /// Staging of one pool that only grows and is never given back, to compare the usual policy with.
    #[doc(hidden)]
    pub fn grow_only_staging(mut self, grow_only: bool) -> Self {
        self.grow_only = grow_only;
        self
    }
    /// Finds, proves and measures how the ranks reach each other, and starts their relay. The environment variables
    /// `ALLHANDS_PATH` and `ALLHANDS_SYNC` force a choice where the builder does not.
    pub fn build(self) -> Result<Communicator> {
        let ranks = self.devices.len() as u32;
        if ranks == 0 {
            return Err(Error::NoRanks);
        }
        let local = |(rank, device): (usize, Option<_>)| device.ok_or(Error::NotLocal { rank: rank as u32, ranks });
        let devices = self.devices.into_iter().enumerate().map(local).collect::<Result<Vec<Arc<dyn Device>>>>()?;
        for device in &devices {
            device.status()?;
        }
        let forced = Forced {
            path: self.path.map_or_else(|| from_environment("ALLHANDS_PATH"), |p| Ok(Some(p)))?,
            sync: self.sync.map_or_else(|| from_environment("ALLHANDS_SYNC"), |s| Ok(Some(s)))?,
        };
        let found = link::find(&devices, forced, &self.clock)?;
        let deadline = self.deadline.unwrap_or(DEADLINE);
        let settings = Settings { algorithm: self.algorithm, deadline, clock: self.clock, grow_only: self.grow_only };
        Communicator::over(devices, found, settings, self.trace, self.skip_wait)
    }
}

fn from_environment<T: std::str::FromStr<Err = Error>>(name: &str) -> Result<Option<T>> {
    match std::env::var(name) {
        Ok(value) if !value.is_empty() && value != "auto" => value.parse().map(Some),
        _ => Ok(None),
    }
}

impl Communicator {
    /// Begins to make one.
    pub fn builder() -> Builder {
        Builder::default()
    }
    /// How many ranks there are.
    pub fn ranks(&self) -> u32 {
        self.devices.len() as u32
    }
    /// The device of a rank.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn device(&self, rank: u32) -> &Arc<dyn Device> {
        &self.devices[rank as usize]
    }
    /// How each ordered pair of ranks reaches each other, and what was tried.
    pub fn links(&self) -> &[Link] {
        &self.found.links
    }
    /// What the self-test found of the arithmetic of a rank's device.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn arithmetic(&self, rank: u32) -> &Arithmetic {
        &self.found.arithmetic[rank as usize]
    }
    /// Whether host workers read and write the memory of a rank's device themselves; if not, why not. Where they do for
    /// every rank, the host algorithm passes over the data once, and [`Report::path`](crate::Report) says `direct`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn host_reaches(&self, rank: u32) -> std::result::Result<(), &str> {
        self.found.reach[rank as usize].as_ref().copied().map_err(String::as_str)
    }
    /// How long it took to measure the devices and the pairs, beyond proving that they work. Zero where measurements that
    /// were kept by another process could be used, and where [`Communicator::split`] made this from another.
    pub fn measuring(&self) -> Duration {
        self.found.measuring
    }
    /// From how many bytes on which algorithm is taken when none is named, ascending from 4: for calls out of place of
    /// `dtype`, with a sum where they reduce. The bytes are those of the elements that [`Collective`] counts.
    pub fn switch_points(&self, collective: &Collective, dtype: DataType) -> Vec<(u64, Algorithm)> {
        self.engine.switch_points(collective, dtype)
    }
    /// Makes smaller communicators, as `MPI_Comm_split` does: one of the ranks of each colour, ordered by their keys
    /// and, where these are equal (or `keys` is empty), as they are ordered here. A rank without a colour is in none.
    /// They come in the order of their colours.
    ///
    /// They share the devices, and what was found of them: nothing is proven or measured again. Calls on this
    /// communicator and on those may be under way at the same time, from any threads.
    pub fn split(&self, colors: &[Option<u32>], keys: &[i32]) -> Result<Vec<Split>> {
        let want = self.devices.len();
        for got in [colors.len()].into_iter().chain((!keys.is_empty()).then_some(keys.len())) {
            if got != want {
                return Err(Error::Parts { got, want });
            }
        }
        let mut groups: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (rank, color) in (0..).zip(colors) {
            if let Some(color) = color {
                groups.entry(*color).or_default().push(rank);
            }
        }
        let make = |(color, mut ranks): (u32, Vec<u32>)| {
            ranks.sort_by_key(|r| keys.get(*r as usize)); // stable
            Ok(Split { color, communicator: self.of_ranks(&ranks)?, ranks })
        };
        groups.into_iter().map(make).collect()
    }
    fn of_ranks(&self, ranks: &[u32]) -> Result<Communicator> {
        let place = |old: u32| ranks.iter().position(|r| *r == old).map(|r| r as u32);
        let renumbered = |l: &Link| Some(l.between(place(l.from)?, place(l.to)?));
        let mut links: Vec<Link> = self.found.links.iter().filter_map(renumbered).collect();
        links.sort_by_key(|l| (l.from, l.to));
        let old = || ranks.iter().map(|r| *r as usize);
        let found = Found {
            links,
            speeds: old().map(|r| self.found.speeds[r]).collect(),
            arithmetic: old().map(|r| self.found.arithmetic[r].clone()).collect(),
            reach: old().map(|r| self.found.reach[r].clone()).collect(),
            measuring: Duration::ZERO,
        };
        let devices = old().map(|r| self.devices[r].clone()).collect();
        Communicator::over(devices, found, self.settings.clone(), None, None)
    }
    fn over(
        devices: Vec<Arc<dyn Device>>,
        mut found: Found,
        settings: Settings,
        trace: Option<Arc<Trace>>,
        skip_wait: Option<u64>,
    ) -> Result<Communicator> {
        let engine = loop {
            let setup = Setup {
                devices: devices.clone(),
                found: found.clone(),
                clock: settings.clock.clone(),
                trace: trace.clone(),
                skip_wait,
            };
            let warm = |engine: Scheduled| {
                if settings.grow_only {
                    engine.only_grow();
                }
                engine.warm().map(|()| engine)
            };
            match Scheduled::new(setup).and_then(warm) {
                Ok(engine) => break engine,
                Err(error) if link::demote(&mut found.links, &error) => log::warn!("{error}; the next path is taken"),
                Err(error) => return Err(error),
            }
        };
        Ok(Communicator { devices, found, engine, settings })
    }
    /// Bytes of staging that calls may still get.
    pub fn staging_bytes(&self) -> u64 {
        self.engine.staging_bytes()
    }
    /// Fills staging with a pattern, so that a read of what was never written shows. Only while nothing is pending.
    #[doc(hidden)]
    pub fn poison_staging(&self, pattern: u32) -> Result<()> {
        self.engine.poison_staging(pattern)
    }

    /// The reduction of all ranks' data, everywhere. Starts at once and returns at once, like every call here.
    pub fn all_reduce<P: Into<Part>>(&self, parts: impl IntoIterator<Item = P>, op: ReduceOp) -> Result<Pending> {
        self.call(Collective::AllReduce, Some(op), parts).start()
    }
    /// Block r of the reduction, at rank r.
    pub fn reduce_scatter<P: Into<Part>>(&self, parts: impl IntoIterator<Item = P>, op: ReduceOp) -> Result<Pending> {
        self.call(Collective::ReduceScatter, Some(op), parts).start()
    }
    /// All ranks' data, in rank order, everywhere.
    pub fn all_gather<P: Into<Part>>(&self, parts: impl IntoIterator<Item = P>) -> Result<Pending> {
        self.call(Collective::AllGather, None, parts).start()
    }
    /// The root's data, everywhere.
    pub fn broadcast<P: Into<Part>>(&self, parts: impl IntoIterator<Item = P>, root: u32) -> Result<Pending> {
        self.call(Collective::Broadcast { root }, None, parts).start()
    }
    /// The reduction of all ranks' data, at the root.
    pub fn reduce<P: Into<Part>>(
        &self,
        parts: impl IntoIterator<Item = P>,
        op: ReduceOp,
        root: u32,
    ) -> Result<Pending> {
        self.call(Collective::Reduce { root }, Some(op), parts).start()
    }
    /// All ranks' data, in rank order, at the root.
    pub fn gather<P: Into<Part>>(&self, parts: impl IntoIterator<Item = P>, root: u32) -> Result<Pending> {
        self.call(Collective::Gather { root }, None, parts).start()
    }
    /// Block r of the root's data, at rank r.
    pub fn scatter<P: Into<Part>>(&self, parts: impl IntoIterator<Item = P>, root: u32) -> Result<Pending> {
        self.call(Collective::Scatter { root }, None, parts).start()
    }
    /// Block s of rank r's data becomes block r of rank s's.
    pub fn all_to_all<P: Into<Part>>(&self, parts: impl IntoIterator<Item = P>) -> Result<Pending> {
        self.call(Collective::AllToAll, None, parts).start()
    }
    /// Messages. A rank's input is what it sends and its output what it receives, each in the order of the list.
    pub fn send_recv<P: Into<Part>>(
        &self,
        parts: impl IntoIterator<Item = P>,
        messages: &[Transfer],
    ) -> Result<Pending> {
        self.call(Collective::SendRecv(messages.into()), None, parts).start()
    }
    /// Done once every rank has come.
    pub fn barrier(&self) -> Result<Pending> {
        self.call(Collective::Barrier, None, self.devices.iter().map(|_| Part::none())).start()
    }
    /// Any of these, with choices.
    pub fn call<P: Into<Part>>(
        &self,
        collective: Collective,
        op: Option<ReduceOp>,
        parts: impl IntoIterator<Item = P>,
    ) -> Call<'_> {
        let parts = parts.into_iter().map(Into::into).collect();
        let wire = None;
        let request = Request { algorithm: self.settings.algorithm, deadline: self.settings.deadline };
        Call { communicator: self, collective, op, parts, wire, request }
    }
    /// Several calls as one: those of [`all_reduce`](Self::all_reduce), [`broadcast`](Self::broadcast) and
    /// [`reduce`](Self::reduce) that are alike (type, operation, root, choices) become a single call over all their
    /// elements, so that many small tensors cost no more than one; the others run one after the other. A result has
    /// the bits that the call alone would give it. All calls are checked before any is started. They may be carried
    /// out in any order, so none may write what another reads or writes ([`Error::Overlap`]).
    pub fn group<'a>(&'a self, calls: impl IntoIterator<Item = Call<'a>>) -> Result<Pending> {
        let mut checked = Vec::new();
        for call in calls {
            if !std::ptr::eq(call.communicator, self) {
                return Err(Error::Option { what: "a group", why: "its calls are of several communicators".into() });
            }
            let (parts, request) = (call.parts, call.request);
            let call = call::check_wired(&self.devices, call.collective, call.op, parts, call.wire)?;
            checked.push((call, request));
        }
        let merged = group::merge(checked, &self.devices)?;
        merged.iter().try_for_each(|(call, request)| self.engine.check(call, request))?;
        let started = merged.iter().map(|(call, request)| self.engine.start(call, request));
        Pending::all(started.collect::<Result<_>>()?).map_or_else(|| self.group_of_none(), Ok)
    }
    /// What a group without calls is: done at once.
    fn group_of_none(&self) -> Result<Pending> {
        self.call(Collective::SendRecv([].into()), None, self.devices.iter().map(|_| Part::none())).start()
    }
}

/// A call that is being made.
#[must_use = "a call does nothing until it is started"]
pub struct Call<'a> {
    communicator: &'a Communicator,
    collective: Collective,
    op: Option<ReduceOp>,
    parts: Vec<Part>,
    wire: Option<DataType>,
    request: Request,
}

impl Call<'_> {
    /// An algorithm to use for this call.
    pub fn algorithm(mut self, algorithm: Option<Algorithm>) -> Self {
        self.request.algorithm = algorithm.or(self.request.algorithm);
        self
    }
    /// Lets f32 cross as f16 or bf16, in half the bytes; `None`, as it is from the start: exactly. Every contribution, a
    /// rank's own too, is rounded to the type before it is reduced, and the result is, wherever it arrives: so every
    /// rank has the same bits, and they are the same by one-shot, two-shot and host, the algorithms that reductions
    /// have then. What is too large becomes the greatest finite value (65504, 3.39e38); infinities stay, and NaN.
    ///
    /// A rounding is off by at most 2^-8 of the value for bf16, and 2^-11 for f16 (or 2^-25, below 2^-14). So a sum of n
    /// is within `u (S + |R|)` of what exact f32 gives, to first order, with u that share, S the sum of magnitudes and
    /// R the result; and a copy within u of what was sent.
    pub fn wire(mut self, dtype: Option<DataType>) -> Self {
        self.wire = dtype;
        self
    }
    /// How long this call may be without progress.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.request.deadline = deadline;
        self
    }
    /// Checks it, starts it, and returns at once. If it is refused, nothing has been written.
    pub fn start(self) -> Result<Pending> {
        let devices = &self.communicator.devices;
        let checked = call::check_wired(devices, self.collective, self.op, self.parts, self.wire)?;
        self.communicator.engine.start(&checked, &self.request)
    }
}
