//! Ranks that work together, and what is asked of them.
use crate::{
    Error, Result,
    call::{self, Part},
    contract::{Clock, Device, ReduceOp},
    engine::{Request, Scheduled, Setup},
    link::{self, Forced, Link, Sync},
    pending::Pending,
    schedule::{Algorithm, Collective, Path, Transfer},
    trace::Trace,
};
use std::{sync::Arc, time::Duration};

/// How long a call may be without progress, unless it or its communicator says otherwise.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// A number of ranks, each with a device, that carry out collectives together. All ranks are in this process: a call
/// takes what each of them brings.
///
/// `&self` from any thread; calls run in the order in which they were made. Dropping it lets what is pending go on.
pub struct Communicator {
    devices: Vec<Arc<dyn Device>>,
    links: Vec<Link>,
    engine: Scheduled,
    algorithm: Option<Algorithm>,
    deadline: Duration,
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
        let (mut links, speeds) = link::find(&devices, forced, &self.clock)?;
        let engine = loop {
            let setup = Setup {
                devices: devices.clone(),
                links: links.clone(),
                speeds: speeds.clone(),
                clock: self.clock.clone(),
                trace: self.trace.clone(),
                skip_wait: self.skip_wait,
            };
            match Scheduled::new(setup).and_then(|engine| engine.warm().map(|()| engine)) {
                Ok(engine) => break engine,
                Err(error) if link::demote(&mut links, &error) => log::warn!("{error}; the next path is taken"),
                Err(error) => return Err(error),
            }
        };
        Ok(Communicator {
            devices,
            links,
            engine,
            algorithm: self.algorithm,
            deadline: self.deadline.unwrap_or(DEADLINE),
        })
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
        &self.links
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
        let request = Request { algorithm: self.algorithm, deadline: self.deadline };
        Call { communicator: self, collective, op, parts, request }
    }
}

/// A call that is being made.
#[must_use = "a call does nothing until it is started"]
pub struct Call<'a> {
    communicator: &'a Communicator,
    collective: Collective,
    op: Option<ReduceOp>,
    parts: Vec<Part>,
    request: Request,
}

impl Call<'_> {
    /// An algorithm to use for this call.
    pub fn algorithm(mut self, algorithm: Option<Algorithm>) -> Self {
        self.request.algorithm = algorithm.or(self.request.algorithm);
        self
    }
    /// How long this call may be without progress.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.request.deadline = deadline;
        self
    }
    /// Checks it, starts it, and returns at once. If it is refused, nothing has been written.
    pub fn start(self) -> Result<Pending> {
        let checked = call::check(&self.communicator.devices, self.collective, self.op, self.parts)?;
        self.communicator.engine.start(&checked, &self.request)
    }
}
