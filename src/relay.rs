//! The CPU proxy: carries progress from rank to rank, opens gates, submits what is held.
//!
//! Each actor (a rank, or a host worker) has one timeline; a submission raises it by one. The *board* has a word for
//! each actor: how far its timeline is known to be. Each device has a *lane*: a thread that blocks in the device's
//! `wait_any`, writes what it finds on the board, and acts on what others wrote there.
//!
//! How a submission waits for another actor depends on the devices:
//! - **the same queue, or native sync**: it waits on the other's timeline, its own or imported. No CPU takes part.
//! - **gated**: it is in the device's queue at once and waits on a *gate*, a timeline of that device which follows the
//!   other actor's. Only the other actor's lane raises it, and never under a lock of a queue.
//! - **held** (every wgpu-hal queue, host workers, and calls in which a device would read at a gate what the host had not
//!   written yet, if it cannot): it stays in the lane until the board says that its waits are
//!   met. A gate there would block the next submission of anybody, the app's too.
//!
//! The host worker of a rank runs on the rank's lane: its device executes inside `submit`. A lane with nothing
//! pending sleeps until it is given work.
mod direct;
mod failure;

use crate::{
    Error, Result,
    contract::{Clock, CommandsId, Device, Point, Submission, TimelineId, Waited},
    exit::{self, AtWork},
    pending::Operation,
    recipes::Recipe,
    staging::Devices,
    trace::Trace,
};
use std::{
    collections::{HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// One submission of one actor, on its way to the device.
pub(crate) struct Work {
    pub actor: usize,
    /// Of the actor's timeline, once it is complete.
    pub value: u64,
    pub commands: Option<CommandsId>,
    /// Actors and the values of their timelines that come first.
    pub waits: Vec<(usize, u64)>,
    /// Points of timelines of the device itself, which the caller named.
    pub after: Vec<Point>,
    pub operation: Arc<Operation>,
    /// Keeps the commands until they are submitted.
    pub recipe: Arc<Recipe>,
    /// Of a host worker: its lane may wait for the ranks itself.
    pub gathers: bool,
    /// Of a rank: no submission, the host signals its departure.
    pub departs: bool,
}

pub(crate) struct Relay {
    actors: Vec<Actor>,
    lanes: Vec<Lane>,
    /// Of each actor, how far its timeline is known to be.
    board: Vec<AtomicU64>,
    /// When a submission last completed, in nanoseconds since `start`.
    progress: AtomicU64,
    start: Instant,
    clock: Clock,
    failure: OnceLock<Error>,
    /// One lock for each gated queue in the process, in one order: see [`Relay::enqueue`].
    queues: Vec<Arc<Mutex<()>>>,
    trace: Option<Arc<Trace>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Actor {
    device: Arc<dyn Device>,
    timeline: TimelineId,
    lane: usize,
    rank: usize,
    /// The value of its last submission.
    issued: AtomicU64,
    /// What the host signals where the rank leaves without a submission, and the last value that it will.
    departure: Option<TimelineId>,
    departing: AtomicU64,
    /// How it waits for each actor.
    edges: Vec<Edge>,
}

enum Edge {
    /// On the other's own timeline: both are of one device.
    Own,
    /// On the other's timeline, imported.
    Native(TimelineId),
    /// On a timeline of this device that follows the other's.
    Gate(Gate),
    /// In its lane.
    Held,
}

struct Gate {
    timeline: TimelineId,
    /// The highest value that a submission waits for.
    wanted: AtomicU64,
    /// How far it is open. Several lanes may open it: it is signalled under this lock, because values only rise.
    opened: Mutex<u64>,
}

struct Lane {
    device: Arc<dyn Device>,
    actors: Vec<usize>,
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    /// Of each actor of the lane: not yet submitted, in order; then submitted and not known to be complete.
    held: Vec<VecDeque<Work>>,
    flying: Vec<VecDeque<(u64, Arc<Operation>)>>,
    /// Of each actor of the lane: what leaves without a submission.
    departures: Vec<VecDeque<Work>>,
    mode: Mode,
    /// A bit for each actor (modulo 64) whose progress a held submission waits for.
    awaits: u64,
    closing: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Running,
    /// Nothing is pending: on the lane's condition variable.
    Idle,
    /// In the device's `wait_any`.
    Waiting,
}

/// What a lane does next.
enum Next {
    Submit(Box<Work>),
    Wait(Vec<Point>, Instant),
    Gather(Vec<(usize, u64)>, Instant),
    Rouse(Vec<usize>),
    Idle,
    Exit,
}

impl Relay {
    /// Makes the timelines and starts a lane for each device. `native(waiting, other)`: whether these ranks have
    /// native sync. A rank's timeline is exportable only if it has a native pair.
    pub fn start(
        devices: &Devices,
        native: impl Fn(usize, usize) -> bool,
        clock: Clock,
        trace: Option<Arc<Trace>>,
    ) -> Result<Arc<Self>> {
        let ranks = devices.ranks.len();
        let mut lanes: Vec<Lane> = Vec::new();
        let mut actors = Vec::new();
        for actor in 0..devices.actors() as usize {
            let (device, rank) = (devices.of(actor as u32), actor % ranks);
            let home = &devices.ranks[rank];
            let lane = lanes.iter().position(|l| l.device.info().id == home.info().id).unwrap_or(lanes.len());
            if lane == lanes.len() {
                lanes.push(Lane::new(home.clone()));
            }
            lanes[lane].add(actor);
            let shareable = (0..ranks).any(|other| actor < ranks && (native(actor, other) || native(other, actor)));
            let timeline = device.create_timeline(shareable)?;
            let (issued, departing) = (AtomicU64::new(0), AtomicU64::new(0));
            let (departure, edges, limits) = (None, Vec::new(), device.limits());
            actors.push(Actor { device: device.clone(), timeline, lane, rank, issued, departure, departing, edges });
            if actor < ranks && !shareable && limits.gated && limits.gates_see_host_writes && limits.unified {
                actors[actor].departure = Some(device.create_timeline(false)?);
            }
        }
        for actor in 0..actors.len() {
            let device = actors[actor].device.clone();
            let edge = |(other, to): (usize, &Actor)| -> Result<Edge> {
                Ok(if to.device.info().id == device.info().id {
                    Edge::Own
                } else if !device.limits().gated {
                    Edge::Held
                } else if actor < ranks && other < ranks && native(actor, other) {
                    Edge::Native(device.import_timeline(&to.device.export_timeline(to.timeline)?)?)
                } else {
                    let timeline = device.create_timeline(false)?;
                    Edge::Gate(Gate { timeline, wanted: AtomicU64::new(0), opened: Mutex::default() })
                })
            };
            for other in 0..actors.len() {
                let made = edge((other, &actors[other]))?;
                actors[actor].edges.push(made);
            }
        }
        let relay = Arc::new(Relay {
            board: actors.iter().map(|_| AtomicU64::new(0)).collect(),
            progress: AtomicU64::new(0),
            start: clock.now(),
            failure: OnceLock::new(),
            queues: queue_locks(&lanes),
            actors,
            lanes,
            clock,
            trace,
            threads: Mutex::default(),
        });
        for (index, lane) in relay.lanes.iter().enumerate() {
            exit::guard(&*lane.device);
            let own = relay.clone();
            let run = move || {
                let at_work = AtWork::on(&own.lanes[index].device);
                own.run(index, &at_work);
                drop(own); // At work still: this may be the last that uses the devices.
            };
            match thread::Builder::new().name(format!("allhands lane {index}")).spawn(run) {
                Ok(thread) => relay.threads().push(thread),
                Err(e) => {
                    relay.close();
                    return Err(Error::Thread { device: lane.device.info().id, why: e.to_string() });
                }
            }
        }
        Ok(relay)
    }
    /// The first failure in flight, if there was one.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }
    /// The value of each actor's last submission.
    pub fn issued(&self) -> Vec<u64> {
        self.actors.iter().map(|a| a.issued.load(SeqCst)).collect()
    }
    /// Where an actor is at `value`; `departs`: which it will reach by a departure.
    pub fn point(&self, actor: usize, value: u64, departs: bool) -> Point {
        let Actor { timeline, departure, departing, .. } = &self.actors[actor];
        let timeline = match departure {
            Some(departure) if departs || departing.load(SeqCst) == value => *departure,
            _ => *timeline,
        };
        Point { timeline, value }
    }
    /// Whether every actor is known to be as far as `values`.
    pub fn reached(&self, values: &[u64]) -> bool {
        self.board.iter().zip(values).all(|(board, value)| board.load(SeqCst) >= *value)
    }
    /// No more work will come: each lane ends once all that is pending is done or has failed. If nothing is, they have
    /// ended when this returns; else they are not waited for, because what is pending may wait for what the caller
    /// does next.
    pub fn close(&self) {
        // After a failure a lane may be stuck in its driver; at the process's end lanes stay where they are.
        let mut pending = self.failure().is_some() || exit::is_near();
        for lane in &self.lanes {
            lane.kick(|state| {
                state.closing = true;
                pending |= state.held.iter().any(|q| !q.is_empty()) || state.flying.iter().any(|q| !q.is_empty());
            });
        }
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads.into_iter().filter(|t| !pending && t.thread().id() != thread::current().id()) {
            // What goes wrong on a lane is caught there.
            let _ = thread.join();
        }
    }
    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues the submissions of one call, each after all that it waits for. Calls of one communicator come one at a
    /// time, under its lock.
    ///
    /// Two communicators over the same gated devices could each queue first on one device and second on the other,
    /// and wait for each other for ever. So a call holds the locks of all its gated queues, taken in one order
    /// throughout the process, while it is queued. Held submissions wait for nothing in their queue: no order needed.
    pub fn enqueue(&self, work: Vec<Work>) -> Result<()> {
        let _queues: Vec<_> = self.queues.iter().map(|q| q.lock().unwrap_or_else(PoisonError::into_inner)).collect();
        let hold = work.iter().any(|w| self.reads_host_writes_to_come(w)) || self.holds_gated();
        // Who gathers sees to the ranks' lanes too, or wakes them.
        let direct = work.iter().any(|w| w.gathers);
        let mut gated: Vec<(usize, Vec<Work>)> = Vec::new();
        let mut touched = vec![false; self.lanes.len()];
        let (mut departures, mut gathering) = (Vec::new(), Vec::new());
        for mut work in work {
            let actor = &self.actors[work.actor];
            actor.issued.store(work.value, SeqCst);
            if work.departs {
                departures.push(work);
                continue;
            }
            touched[actor.lane] |= !direct || work.gathers || hold;
            if work.gathers {
                gathering.push(work);
                continue;
            }
            if hold || !actor.device.limits().gated {
                work.waits.extend(self.last_departure(work.actor).map(|point| (work.actor, point.value)));
                let lane = &self.lanes[actor.lane];
                lane.lock().held[lane.place(work.actor)].push_back(work);
                continue;
            }
            match gated.iter_mut().find(|(a, _)| self.actors[*a].device.info().id == actor.device.info().id) {
                Some((_, list)) => list.push(work),
                None => gated.push((work.actor, vec![work])),
            }
        }
        let mut result = Ok(());
        for (_, list) in gated {
            result = result.and_then(|()| self.submit_gated(list));
        }
        // Only now: a lane that cannot gather rouses those of the ranks, which have to find what was submitted.
        for work in gathering {
            let lane = &self.lanes[self.actors[work.actor].lane];
            lane.lock().held[lane.place(work.actor)].push_back(work);
        }
        if direct {
            // Only now: what was submitted comes after departures of earlier calls. The workers may be done already.
            departures.into_iter().for_each(|work| self.add_departure(work));
            result = result.and(self.guard(0, || self.depart()));
        }
        for (index, lane) in self.lanes.iter().enumerate().filter(|(i, _)| touched[*i]) {
            let submitted = self.guard(lane.actors[0], || self.submit_ready(&mut lane.lock(), index));
            result = result.and(submitted);
            lane.kick(|_| ());
        }
        if let Some(failure) = self.failure() {
            self.drain();
            return Err(failure.clone());
        }
        result
    }
    /// Whether a host worker will write, after this could be queued, what its device would not see at a gate.
    fn reads_host_writes_to_come(&self, work: &Work) -> bool {
        let limits = self.actors[work.actor].device.limits();
        // Ranks come first, then as many host workers.
        let to_come =
            |&(other, value): &(usize, u64)| other >= self.actors.len() / 2 && self.board[other].load(SeqCst) < value;
        limits.gated && !limits.gates_see_host_writes && work.waits.iter().any(to_come)
    }
    /// Whether something that could wait at a gate is held. What is called after it is held too: nothing in a queue
    /// then waits for what is in none, and communicators that share queues cannot wait for each other.
    fn holds_gated(&self) -> bool {
        self.lanes.iter().any(|lane| {
            let state = lane.lock();
            let mut held = lane.actors.iter().zip(&state.held).filter(|(_, queue)| !queue.is_empty());
            held.any(|(actor, _)| self.actors[*actor].device.limits().gated)
        })
    }
    /// One submit for a gated queue: what it waits for need not have happened.
    fn submit_gated(&self, list: Vec<Work>) -> Result<()> {
        let device = &self.actors[list[0].actor].device;
        let mut points: Vec<Vec<Point>> = Vec::with_capacity(list.len());
        for work in &list {
            let mut waits = work.after.clone();
            waits.extend(self.last_departure(work.actor));
            waits.extend(work.waits.iter().filter_map(|&(other, value)| self.gate(work.actor, other, value)));
            points.push(waits);
            self.record(work);
        }
        let submissions: Vec<Submission<'_>> =
            list.iter().zip(&points).map(|(work, waits)| self.submission(work, waits)).collect();
        for work in &list {
            let lane = &self.lanes[self.actors[work.actor].lane];
            lane.lock().flying[lane.place(work.actor)].push_back((work.value, work.operation.clone()));
        }
        self.guard(list[0].actor, || device.submit(&submissions))?;
        list.iter().for_each(|work| self.submitted(work));
        Ok(())
    }
    /// What a gated submission of `actor` waits on to come after `value` of `other`; `None` if that is reached.
    fn gate(&self, actor: usize, other: usize, value: u64) -> Option<Point> {
        if self.board[other].load(SeqCst) >= value {
            return None;
        }
        let gate = match &self.actors[actor].edges[other] {
            Edge::Gate(gate) => gate,
            Edge::Native(timeline) => return Some(Point { timeline: *timeline, value }),
            Edge::Own | Edge::Held => {
                let own = Point { timeline: self.actors[other].timeline, value };
                let point = self.departure_to(other, value).unwrap_or(own);
                // A departure may have come in between, and its timeline is not the rank's own.
                return (self.board[other].load(SeqCst) < value).then_some(point);
            }
        };
        gate.wanted.fetch_max(value, SeqCst);
        // The other's lane writes the board and then reads what is wanted. Either it sees this, or this sees that.
        (self.board[other].load(SeqCst) < value).then_some(Point { timeline: gate.timeline, value })
    }
    fn submission<'a>(&self, work: &Work, waits: &'a [Point]) -> Submission<'a> {
        let signal = Point { timeline: self.actors[work.actor].timeline, value: work.value };
        Submission { commands: work.commands, waits, signal }
    }
    fn submitted(&self, work: &Work) {
        work.operation.submitted(work.actor);
    }
    /// Submits what is held and ready, on devices whose submit returns at once.
    fn submit_ready(&self, state: &mut State, lane: usize) -> crate::contract::Result<()> {
        for (place, &actor) in self.lanes[lane].actors.iter().enumerate() {
            if self.actors[actor].device.limits().submit_blocks {
                continue;
            }
            while let Some(work) = self.take_ready(state, place)? {
                self.record(&work);
                state.flying[place].push_back((work.value, work.operation.clone()));
                self.actors[actor].device.submit(&[self.submission(&work, &[])])?;
                self.submitted(&work);
            }
        }
        Ok(())
    }
    fn take_ready(&self, state: &mut State, place: usize) -> crate::contract::Result<Option<Work>> {
        match state.held[place].front() {
            Some(work) if self.is_ready(work)? => Ok(state.held[place].pop_front()),
            _ => Ok(None),
        }
    }
    /// An error where a timeline that the caller has it wait for is gone.
    fn is_ready(&self, work: &Work) -> crate::contract::Result<bool> {
        let device = &self.actors[work.actor].device;
        if !work.waits.iter().all(|&(other, value)| self.board[other].load(SeqCst) >= value) {
            return Ok(false);
        }
        work.after.iter().try_fold(true, |ready, p| Ok(ready && device.value(p.timeline)? >= p.value))
    }

    /// The thread of a lane.
    fn run(&self, index: usize, at_work: &AtWork) {
        let lane = &self.lanes[index];
        loop {
            let wakes = lane.device.wakes();
            at_work.pause();
            let step = self.guard(lane.actors[0], || {
                self.collect(lane)?;
                match self.next(index)? {
                    Next::Submit(work) => self.submit_blocking(lane, *work)?,
                    Next::Wait(points, deadline) => {
                        let waited = lane.device.wait_any(&points, wakes, deadline);
                        lane.lock().mode = Mode::Running;
                        if waited? == Waited::TimedOut {
                            self.check_deadline();
                        }
                    }
                    Next::Gather(waits, deadline) => self.gather(&waits, deadline)?,
                    Next::Rouse(lanes) => lanes.into_iter().for_each(|other| self.lanes[other].kick(|_| ())),
                    Next::Idle => at_work.rest(|| lane.sleep()),
                    Next::Exit => return Ok(false),
                }
                Ok(true)
            });
            match step {
                Ok(true) => {}
                Ok(false) => return,
                // The failure is recorded and all that was pending has ended with it.
                Err(_) => lane.lock().mode = Mode::Running,
            }
        }
    }
    /// Reads the lane's timelines and passes on what has completed.
    fn collect(&self, lane: &Lane) -> crate::contract::Result<()> {
        let mut rose = false;
        for (place, &actor) in lane.actors.iter().enumerate() {
            if lane.lock().flying[place].is_empty() {
                continue;
            }
            let value = self.actors[actor].device.value(self.actors[actor].timeline)?;
            if value > self.board[actor].load(SeqCst) {
                self.touch();
                self.publish(actor, value)?;
                rose = true;
            }
            // Even if another lane has published it: it may not have come to this yet.
            let mut state = lane.lock();
            while let Some((_, operation)) = state.flying[place].pop_front_if(|(v, _)| *v <= value) {
                operation.completed(actor);
            }
        }
        if rose { self.depart() } else { Ok(()) }
    }
    /// Writes the board, opens the gates that wait for it and wakes the lanes that hold something for it.
    fn publish(&self, actor: usize, value: u64) -> crate::contract::Result<()> {
        self.board[actor].fetch_max(value, SeqCst);
        for other in &self.actors {
            let Edge::Gate(gate) = &other.edges[actor] else { continue };
            let mut opened = gate.opened();
            if gate.wanted.load(SeqCst) > *opened && value > *opened {
                other.device.signal(Point { timeline: gate.timeline, value })?;
                *opened = value;
            }
        }
        let bit = 1 << (actor % 64);
        // Its own lane too: it may be another that found out.
        self.lanes.iter().for_each(|lane| lane.kick_if(|state| state.awaits & bit != 0));
        Ok(())
    }
    fn next(&self, index: usize) -> crate::contract::Result<Next> {
        let lane = &self.lanes[index];
        let mut state = lane.lock();
        self.submit_ready(&mut state, index)?;
        for (place, &actor) in lane.actors.iter().enumerate() {
            if !self.actors[actor].device.limits().submit_blocks {
                continue; // Only under the lock, so that a caller's thread and this one keep the order.
            }
            if let Some(work) = self.take_ready(&mut state, place)? {
                self.record(&work);
                return Ok(Next::Submit(Box::new(work)));
            }
        }
        if let Some((waits, deadline)) = self.gathers(lane, &state) {
            return Ok(Next::Gather(waits, deadline));
        }
        let rouses = self.rouses(&mut state);
        if !rouses.is_empty() {
            return Ok(Next::Rouse(rouses));
        }
        let (mut points, mut awaits, mut deadline) = (Vec::new(), 0, None::<Instant>);
        for (place, &actor) in lane.actors.iter().enumerate() {
            if let Some((value, operation)) = state.flying[place].front() {
                points.push(Point { timeline: self.actors[actor].timeline, value: *value });
                points.extend(self.awaited(operation, lane));
                deadline = earlier(deadline, self.deadline(operation));
            }
            if let Some(work) = state.held[place].front() {
                points.extend(self.awaited(&work.operation, lane));
                for &(other, value) in &work.waits {
                    if self.board[other].load(SeqCst) < value {
                        awaits |= 1 << (other % 64);
                    }
                }
                deadline = earlier(deadline, self.deadline(&work.operation));
            }
        }
        state.awaits = awaits;
        // A lane that writes the board reads `awaits` after: whatever it wrote before that is looked at here.
        let held = || state.held.iter().filter_map(VecDeque::front);
        let missed = held().try_fold(false, |missed, work| Ok(missed || self.is_ready(work)?))?;
        Ok(match deadline {
            _ if missed => {
                drop(state);
                return self.next(index);
            }
            Some(deadline) => {
                state.mode = Mode::Waiting;
                Next::Wait(points, deadline)
            }
            None if state.closing => Next::Exit,
            None => {
                state.mode = Mode::Idle;
                Next::Idle
            }
        })
    }
    /// On a device that works inside submit: outside the lane's lock, so that callers are not kept.
    fn submit_blocking(&self, lane: &Lane, work: Work) -> crate::contract::Result<()> {
        lane.lock().flying[lane.place(work.actor)].push_back((work.value, work.operation.clone()));
        self.actors[work.actor].device.submit(&[self.submission(&work, &[])])?;
        self.submitted(&work);
        Ok(())
    }
    /// When the operation has been without progress for too long. Its time does not run while its data is awaited.
    fn deadline(&self, operation: &Operation) -> Instant {
        if !operation.may_run() {
            return self.clock.now() + operation.deadline;
        }
        if operation.begins() {
            self.touch();
        }
        let progress = self.start + Duration::from_nanos(self.progress.load(SeqCst));
        progress.max(operation.started) + operation.deadline
    }
    /// What the operation's caller has it wait for on the lane's device and has not come, so that the lane sees it come.
    fn awaited(&self, operation: &Operation, lane: &Lane) -> Vec<Point> {
        let to_come = |point: &Point| lane.device.value(point.timeline).is_ok_and(|value| value < point.value);
        let here = operation.after.iter().filter(|(device, _)| device.info().id == lane.device.info().id);
        if operation.may_run() { Vec::new() } else { here.map(|(_, point)| *point).filter(to_come).collect() }
    }
    fn touch(&self) {
        self.progress.store((self.clock.now() - self.start).as_nanos() as u64, SeqCst);
    }
    fn record(&self, work: &Work) {
        if let Some(trace) = &self.trace {
            trace.submitted(work.actor as u32, work.value, &work.waits);
        }
    }
}

impl Gate {
    fn opened(&self) -> MutexGuard<'_, u64> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.device.destroy_timeline(self.timeline);
        self.departure.iter().for_each(|timeline| self.device.destroy_timeline(*timeline));
        for edge in &self.edges {
            if let Edge::Native(timeline) | Edge::Gate(Gate { timeline, .. }) = edge {
                self.device.destroy_timeline(*timeline);
            }
        }
    }
}

impl Lane {
    fn new(device: Arc<dyn Device>) -> Self {
        let state = State {
            held: Vec::new(),
            flying: Vec::new(),
            departures: Vec::new(),
            mode: Mode::Running,
            awaits: 0,
            closing: false,
        };
        Lane { device, actors: Vec::new(), state: Mutex::new(state), work: Condvar::new() }
    }
    fn add(&mut self, actor: usize) {
        self.actors.push(actor);
        let mut state = self.lock();
        state.held.push(VecDeque::new());
        state.flying.push(VecDeque::new());
        state.departures.push(VecDeque::new());
    }
    fn place(&self, actor: usize) -> usize {
        // Few actors share a lane, and each was added to it.
        self.actors.iter().position(|a| *a == actor).unwrap_or(0)
    }
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Changes the state and has the lane look at it, wherever it is.
    fn kick(&self, change: impl FnOnce(&mut State)) {
        self.kick_if(|state| {
            change(state);
            true
        });
    }
    fn kick_if(&self, change: impl FnOnce(&mut State) -> bool) {
        let mut state = self.lock();
        if !change(&mut state) {
            return;
        }
        match std::mem::replace(&mut state.mode, Mode::Running) {
            Mode::Running => {}
            Mode::Idle => self.work.notify_one(),
            Mode::Waiting => {
                drop(state);
                self.device.wake();
            }
        }
    }
    fn sleep(&self) {
        let mut state = self.lock();
        while state.mode == Mode::Idle {
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn earlier(a: Option<Instant>, b: Instant) -> Option<Instant> {
    Some(a.map_or(b, |a| a.min(b)))
}

/// The locks of the gated queues among the lanes, by device, lowest first: the same lock for the same device in every
/// communicator of the process.
fn queue_locks(lanes: &[Lane]) -> Vec<Arc<Mutex<()>>> {
    static ALL: Mutex<Option<HashMap<crate::contract::DeviceId, Weak<Mutex<()>>>>> = Mutex::new(None);
    let mut ids: Vec<_> = lanes.iter().filter(|l| l.device.limits().gated).map(|l| l.device.info().id).collect();
    ids.sort();
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    all.retain(|_, lock| lock.strong_count() > 0);
    let mut lock_of = |id| {
        all.get(&id).and_then(Weak::upgrade).unwrap_or_else(|| {
            let lock = Arc::new(Mutex::new(()));
            all.insert(id, Arc::downgrade(&lock));
            lock
        })
    };
    ids.into_iter().map(&mut lock_of).collect()
}
