//! Carries out checked calls: schedules, lowered to the links, through staging. It does every call over any devices.
//! (A vendor's own library would be a second engine beside it, taken where it is faster.)
use crate::{
    Arithmetic, Error, Result,
    call::Checked,
    contract::{Clock, DataType, Device, ReduceOp, Spin, Watch},
    execute::{Batch, Plan, Reached, record, widen},
    link::{Found, Link, Sync},
    neutral::Neutral,
    pending::{Operation, Pending, ReducedOn, Report},
    plans::{Chunking, Form, Plans},
    reach,
    recipes::{Recipe, Recipes},
    relay::{Relay, Work},
    schedule::{Algorithm, Collective, Path, Shape, algorithms, cost::Speed, lower},
    staging::{Devices, Staging, Turn},
    trace::Trace,
    tuner::{self, Tuner},
};
use allhands_cpu::{CpuDevice, Mode, Options};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// What a caller may choose.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    /// `None`: the fastest that gives the same bits for every message size.
    pub algorithm: Option<Algorithm>,
    /// How long a call may be without progress.
    pub deadline: Duration,
}

/// What an engine is made of.
pub(crate) struct Setup {
    pub devices: Vec<Arc<dyn Device>>,
    pub found: Found,
    pub clock: Clock,
    pub trace: Option<Arc<Trace>>,
    /// A wait to leave out, counted over all waits of the communicator: the planted bug that a trace must show.
    pub skip_wait: Option<u64>,
}

impl Setup {
    /// For a proof: two ranks, from the first to the second by the first way, nothing measured yet.
    pub fn of_proof(devices: Vec<Arc<dyn Device>>, ways: [(Path, Sync); 2], clock: Clock) -> Self {
        let link = |(from, (path, sync))| Link::untried(from, 1 - from, path, sync);
        let speeds = vec![Speed { submit: 1e-5, launch: 0.0, copy: 1e9, reduce: 1e9, overlap: false }; devices.len()];
        let arithmetic = vec![Arc::default(); devices.len()];
        let reach = vec![Err("a proof of links".into()); devices.len()];
        let found =
            Found { links: (0..).zip(ways).map(link).collect(), speeds, arithmetic, reach, measuring: Duration::ZERO };
        Setup { devices, found, clock, trace: None, skip_wait: None }
    }
}

/// Devices, the links between them, and what is kept from call to call.
pub(crate) struct Scheduled {
    devices: Devices,
    links: lower::Links,
    path: String,
    sync: String,
    relay: Arc<Relay>,
    plans: Plans,
    recipes: Arc<Recipes>,
    tuner: Tuner,
    arithmetic: Vec<Arc<Arithmetic>>,
    /// Whether host workers reach the memory of every rank's device.
    reaches: bool,
    /// For callers that wait, where that pays on every rank's device.
    spin: Option<Arc<Spin>>,
    clock: Clock,
    trace: Option<Arc<Trace>>,
    skip_wait: Option<u64>,
    waits: AtomicU64,
    neutral: Neutral,
    /// Held while a call is queued, so that calls run in one order.
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    staging: Staging,
    calls: u64,
}

impl Scheduled {
    pub fn new(setup: Setup) -> Result<Self> {
        let n = setup.devices.len() as u32;
        let worker = |_: &Arc<dyn Device>| -> Result<Arc<dyn Device>> {
            let options = Options { mode: Mode::Inline, clock: setup.clock.clone(), ..Options::default() };
            Ok(CpuDevice::open(options)?)
        };
        let workers: Vec<Arc<dyn Device>> = setup.devices.iter().map(worker).collect::<Result<_>>()?;
        let mut paths = vec![Path::Copied; (n * n) as usize];
        for link in &setup.found.links {
            paths[(link.to * n + link.from) as usize] = link.path;
        }
        let links = lower::Links {
            ranks: n,
            paths,
            mapped: setup.devices.iter().map(|d| d.limits().mapped && d.limits().host_reads_mapped).collect(),
            max_sources: setup.devices.iter().map(|d| d.limits().max_sources).collect(),
        };
        let mut tuner = Tuner::new(&setup.found.links, &setup.found.speeds, &*workers[0])?;
        // A worker folds the contributions of all ranks at once.
        let folds = workers[0].limits().max_sources >= n;
        let reaches = folds && setup.found.reach.iter().all(|r| r.is_ok());
        let polls = setup.devices.iter().all(|d| d.limits().polls);
        let devices = Devices { ranks: setup.devices, workers };
        let recipes = Arc::new(Recipes::default());
        let watcher: Arc<dyn Watch> = recipes.clone();
        devices.ranks.iter().for_each(|device| device.watch(Arc::downgrade(&watcher)));
        let native = |waiting: usize, other: usize| {
            let pair = |l: &&Link| l.to as usize == waiting && l.from as usize == other;
            setup.found.links.iter().find(pair).is_some_and(|l| l.sync == Sync::Native)
        };
        let relay = Relay::start(&devices, native, setup.clock.clone(), setup.trace.clone())?;
        tuner.departs = relay.has_departures();
        Ok(Scheduled {
            tuner,
            relay,
            arithmetic: setup.found.arithmetic,
            reaches,
            spin: polls.then(Arc::default),
            plans: Plans::default(),
            recipes,
            path: common(setup.found.links.iter().map(|l| l.path.name())),
            sync: common(setup.found.links.iter().map(|l| l.sync.name())),
            devices,
            links,
            clock: setup.clock,
            trace: setup.trace,
            skip_wait: setup.skip_wait,
            waits: AtomicU64::new(0),
            neutral: Neutral::default(),
            queue: Mutex::default(),
        })
    }
    /// Makes the staging of short messages, so that what a device refuses shows before the first call.
    pub fn warm(&self) -> Result<()> {
        let shape = Shape { collective: Collective::AllGather, ranks: self.links.ranks, count: 1, in_place: false };
        if let Some(plan) = self.plans.get(&self.links, &shape, Algorithm::OneShot, Chunking::WHOLE, &Form::default()) {
            let needs = plan.needs(crate::contract::DataType::F32.size());
            if !needs.is_empty() {
                self.lock().staging.turn(&self.devices, &self.links, &needs, self.trace.as_deref())?;
            }
        }
        Ok(())
    }
    /// Sees to it that staging is never given back.
    pub fn only_grow(&self) {
        self.lock().staging.only_grow();
    }
    /// Bytes in the pools.
    pub fn staging_bytes(&self) -> u64 {
        self.lock().staging.bytes()
    }
    /// Forms of memory that staging could not be had in where it then was had in another, and why.
    pub fn refused(&self) -> Vec<String> {
        self.lock().staging.refused()
    }
    /// Fills the pools with a pattern.
    pub fn poison_staging(&self, pattern: u32) -> Result<()> {
        self.lock().staging.poison(&self.devices, pattern)
    }
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Whether the call could be started: what depends on its request.
    pub fn check(&self, call: &Checked, request: &Request) -> Result<()> {
        if let Some(first) = self.relay.failure() {
            return Err(Error::Poisoned { first: Arc::new(first.clone()) });
        }
        self.plan(call, request.algorithm, false).map(drop)
    }
    /// How the call is done: its plan is kept for calls like it.
    fn plan(&self, call: &Checked, wanted: Option<Algorithm>, direct: bool) -> Result<Arc<Plan>> {
        let collective = &call.shape.collective;
        let have = algorithms(collective);
        if let Some(algorithm) = wanted.filter(|a| call.in_rank_order() && !a.in_rank_order()) {
            let what = if call.scales.is_empty() { "a wire type" } else { "a scale" };
            let why =
                format!("{algorithm} folds partial results, and it takes the contributions: one-shot, two-shot, host");
            return Err(Error::Option { what, why });
        }
        // A reduction that some device has no kernel for is the host's, for every rank, whatever was wanted. So is one
        // that takes one fold of more contributions than a device's kernel does.
        let more = self.links.max_sources.iter().any(|most| *most < self.links.ranks);
        let chained = more && call.in_one_fold() && wanted.is_none_or(Algorithm::in_rank_order);
        let lacking = call.op.is_some_and(|op| self.needs_host(op, call.dtype));
        let host = (chained || lacking) && wanted.is_none_or(|a| have.contains(&a));
        let forced = if host { Some(Algorithm::Host) } else { wanted };
        let no = || Error::NoAlgorithm {
            collective: collective.name(),
            algorithm: forced.unwrap_or(Algorithm::Host),
            have: have.iter().map(|a| a.name()).collect::<Vec<_>>().join(", "),
        };
        self.tuner.plan(&self.plans, &self.links, call, forced, direct).ok_or_else(no)
    }
    /// Whether a rank's device lacks the kernel, or its arithmetic is not to be trusted with the type. Then all ranks
    /// leave the reduction to the host.
    fn needs_host(&self, op: ReduceOp, dtype: DataType) -> bool {
        let lacks = |d: &Arc<dyn Device>| !d.limits().reduces(op, dtype);
        crate::call::needs_host(op, dtype)
            || self.devices.ranks.iter().any(lacks)
            || self.arithmetic.iter().any(|a| !a.allows(dtype))
    }
    /// From how many bytes on which algorithm is taken.
    pub fn switch_points(&self, collective: &Collective, dtype: DataType) -> Vec<(u64, Algorithm)> {
        let op = collective.reduces().then_some(ReduceOp::Sum);
        if op.is_some_and(|op| self.needs_host(op, dtype)) {
            return vec![(tuner::LEAST_BYTES, Algorithm::Host)];
        }
        self.tuner.switch_points(&self.links, collective, op, dtype, self.reaches)
    }
    /// Prepares every batch of a plan. If one is refused, none is left behind.
    fn prepare(&self, plan: &Plan, call: &Checked, turn: Option<&Turn>) -> Result<Recipe> {
        let mut recipe = Recipe::default();
        let exported = if plan.direct { reach::export(call, &self.devices.ranks)? } else { HashMap::new() };
        for batch in &plan.batches {
            let device = self.devices.of(batch.actor);
            let works = batch.actor >= call.shape.ranks;
            let absent = match works {
                true => plan.direct && call.absent.contains(&true),
                false => !plan.direct && call.absent.get(batch.actor as usize) == Some(&true),
            };
            let neutral = if absent { Some(self.neutral.range(device, &call.neutral())?) } else { None };
            let mut views = HashMap::new();
            for (buffer, memory) in exported.iter().filter(|_| works) {
                let view = device.import(memory)?;
                recipe.view(device, view);
                self.trace.iter().for_each(|trace| trace.alias(view, *buffer));
                views.insert(*buffer, view);
            }
            let reached = Reached { pool: turn.map(|t| (&*t.pool, t.bank)), neutral, views: &views };
            let mut ops = record(plan, batch, call, &reached, device.limits());
            if self.departs(plan, batch) {
                ops.clear(); // What comes after the departure sees what the host wrote.
            }
            if let Some(trace) = &self.trace {
                recipe.exact.push(ops.clone());
                trace.neutral(neutral.map(|range| range.buffer));
            }
            widen(&mut ops, device.limits());
            recipe.add(device, &ops)?;
        }
        Ok(recipe)
    }
    /// Whether this wait is the planted bug.
    fn keep_wait(&self) -> bool {
        self.skip_wait.is_none_or(|skip| self.waits.fetch_add(1, Relaxed) != skip)
    }
    /// Starts a call, after all that its ranks wait for. Calls run in the order in which they are started.
    pub fn start(&self, call: &Checked, request: &Request) -> Result<Pending> {
        if let Some(first) = self.relay.failure() {
            return Err(Error::Poisoned { first: Arc::new(first.clone()) });
        }
        let kept = match self.recipes.find(call, request.algorithm) {
            Some(kept) => kept,
            None => {
                let direct = self.reaches && reach::export(call, &self.devices.ranks).is_ok();
                self.recipes.add(call, request.algorithm, self.plan(call, request.algorithm, direct)?)
            }
        };
        let (plan, needs) = (&*kept.plan, &kept.needs);
        let mut queue = self.lock();
        let trace = self.trace.as_deref();
        let turn =
            if needs.is_empty() { None } else { Some(queue.staging.turn(&self.devices, &self.links, needs, trace)?) };
        let recipe = match kept.recipe(turn.as_ref()) {
            Some(recipe) => recipe,
            None => {
                let recipe = Arc::new(self.prepare(plan, call, turn.as_ref())?);
                kept.keep(turn.as_ref(), &recipe);
                recipe
            }
        };
        // Of each actor: the values that its timeline has before and after the call.
        let before = self.relay.issued();
        let submissions = |actor: usize| plan.submissions.get(actor).copied().unwrap_or(0);
        let first: Vec<u64> = before.iter().map(|v| v + 1).collect();
        let last: Vec<u64> = before.iter().enumerate().map(|(a, v)| v + u64::from(submissions(a))).collect();

        let n = self.devices.ranks.len();
        let departs = plan.direct && self.relay.has_departures();
        let after = call.ranks.iter().zip(&self.devices.ranks);
        let operation = Operation::new(
            queue.calls,
            format!("{} #{} of {} elements", call.shape.collective.name(), queue.calls, call.shape.count),
            request.deadline,
            after.flat_map(|(r, d)| r.after.iter().map(|p| (d.clone(), *p))).collect(),
            (0..n).map(|a| self.relay.point(a, last[a], departs && submissions(a) > 0)).collect(),
            (0..n).map(submissions).collect(),
            self.report(plan),
            self.clock.clone(),
            turn.as_ref().map(|t| t.pool.clone()),
            self.spin.clone(),
        );
        // The first submission of each actor follows all that used the bank before.
        let bank: Vec<(usize, u64)> = match &turn {
            Some(turn) if trace.is_some() || !self.relay.reached(&turn.after) => {
                turn.after.iter().copied().enumerate().filter(|(_, value)| *value > 0).collect()
            }
            _ => Vec::new(),
        };
        let mut work = Vec::with_capacity(plan.batches.len());
        for (batch, commands) in plan.batches.iter().zip(&recipe.commands) {
            let actor = batch.actor as usize;
            let mut waits: Vec<(usize, u64)> =
                batch.waits.iter().map(|&(a, ordinal)| (a as usize, first[a as usize] + u64::from(ordinal))).collect();
            let mut after = Vec::new();
            if batch.ordinal == 0 {
                waits.extend(bank.iter().filter(|(other, _)| *other != actor));
                after.extend(call.ranks.get(actor).iter().flat_map(|r| &r.after).copied());
            }
            waits.retain(|_| self.keep_wait());
            let value = first[actor] + u64::from(batch.ordinal);
            let (commands, operation) = (*commands, operation.clone());
            let (gathers, recipe) = (departs && actor >= n, recipe.clone());
            let departs = self.departs(plan, batch);
            work.push(Work { actor, value, commands, waits, after, operation, recipe, gathers, departs });
        }
        if let Some(trace) = trace {
            let values = (0..before.len()).map(|a| (first[a], submissions(a))).collect();
            trace.call(call, plan.algorithm, values);
            let widening = call.wire.map_or(1, |w| call.dtype.size() / w.size());
            for (batch, ops) in plan.batches.iter().zip(&recipe.exact) {
                trace.prepared(batch.actor, first[batch.actor as usize] + u64::from(batch.ordinal), ops, widening);
            }
        }
        if let Some(turn) = turn {
            turn.take(last);
        }
        queue.calls += 1;
        self.relay.enqueue(work)?;
        Ok(Pending::of(operation))
    }
    /// Whether a batch is that with which a rank leaves host workers, and takes no submission.
    fn departs(&self, plan: &Plan, batch: &Batch) -> bool {
        plan.direct && batch.actor < self.links.ranks && batch.ordinal > 0 && self.relay.has_departures()
    }
    fn report(&self, plan: &Plan) -> Report {
        let moves = plan.schedule.shape.collective == Collective::Barrier || plan.chunks > 0;
        Report {
            algorithm: moves.then_some(plan.algorithm),
            path: if plan.direct { "direct".into() } else { self.path.clone() },
            sync: self.sync.clone(),
            reduced_on: if moves { plan.reduced_on } else { ReducedOn::None },
            submits: plan.rank_submissions() - plan.batches.iter().filter(|b| self.departs(plan, b)).count() as u32,
            chunks: plan.chunks,
        }
    }
}

impl Drop for Scheduled {
    /// What is pending goes on: its lanes end when it has.
    fn drop(&mut self) {
        self.relay.close();
    }
}

/// The one name that all have, or `mixed`, or `none`.
fn common(mut names: impl Iterator<Item = &'static str>) -> String {
    let first = names.next();
    if names.any(|n| Some(n) != first) { "mixed".into() } else { first.unwrap_or("none").into() }
}
