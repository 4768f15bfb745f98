//! Calls whose data only host workers touch, on devices of which the host needs no queue to see and be seen. Two ways
//! round are left out, because a thread that is woken costs more than a few KB do:
//! - A worker's lane waits on the ranks' timelines itself, if it has nothing else to see to.
//! - A rank leaves by a *departure*, a timeline that the host signals; nothing is submitted. What the rank submits next
//!   waits for it.
use super::*;

/// The longest that a lane is away from its own device.
const AWAY: Duration = Duration::from_millis(100);

impl Relay {
    /// Whether ranks can leave by a departure.
    pub fn has_departures(&self) -> bool {
        self.ranks().all(|actor| actor.departure.is_some())
    }
    fn ranks(&self) -> impl Iterator<Item = &Actor> {
        self.actors[..self.actors.len() / 2].iter()
    }
    /// Has a rank leave once its waits are met.
    pub(super) fn add_departure(&self, work: Work) {
        let actor = &self.actors[work.actor];
        actor.departing.store(work.value, SeqCst);
        // Queues may wait for it already: it takes no queue to come.
        work.operation.submitted(work.actor);
        let lane = &self.lanes[actor.lane];
        lane.lock().departures[lane.place(work.actor)].push_back(work);
    }
    /// Of an actor, the departure that its next submission comes after, if that is still to come.
    pub(super) fn last_departure(&self, actor: usize) -> Option<Point> {
        let value = self.actors[actor].departing.load(SeqCst);
        self.actors[actor]
            .departure
            .filter(|_| value > self.board[actor].load(SeqCst))
            .map(|timeline| Point { timeline, value })
    }
    /// The departure that raises an actor to `value`, if it is one and still to come.
    pub(super) fn departure_to(&self, actor: usize, value: u64) -> Option<Point> {
        let (timeline, lane) = (self.actors[actor].departure?, &self.lanes[self.actors[actor].lane]);
        let comes = lane.lock().departures[lane.place(actor)].iter().any(|work| work.value == value);
        comes.then_some(Point { timeline, value })
    }
    /// Lets go of the ranks whose waits are met.
    pub(super) fn depart(&self) -> crate::contract::Result<()> {
        for lane in &self.lanes {
            for place in 0..lane.actors.len() {
                while let Some(work) = self.depart_first(lane, place)? {
                    self.publish(work.actor, work.value)?;
                    work.operation.completed(work.actor);
                }
            }
        }
        Ok(())
    }
    /// Lets go of the rank whose departure is the first, if its waits are met. Several lanes may do this at once, and
    /// values only rise: so a departure stays the first until it is signalled and on the board.
    fn depart_first(&self, lane: &Lane, place: usize) -> crate::contract::Result<Option<Work>> {
        let queue = &mut lane.lock().departures[place];
        let met = |work: &&Work| work.waits.iter().all(|&(a, v)| self.board[a].load(SeqCst) >= v);
        let Some(work) = queue.front().filter(met) else { return Ok(None) };
        self.record(work);
        self.leave(work)?;
        self.board[work.actor].fetch_max(work.value, SeqCst);
        Ok(queue.pop_front())
    }
    /// Signals a departure.
    pub(super) fn leave(&self, work: &Work) -> crate::contract::Result<()> {
        let Actor { device, departure, .. } = &self.actors[work.actor];
        departure.map_or(Ok(()), |timeline| device.signal(Point { timeline, value: work.value }))
    }

    /// What a worker of this lane waits for, if the lane may wait for it itself: it has nothing else to see to.
    pub(super) fn gathers(&self, lane: &Lane, state: &State) -> Option<(Vec<(usize, u64)>, Instant)> {
        let held = || state.held.iter().flatten();
        let first = held().next().filter(|work| work.gathers)?;
        let of_first = |operation: &Arc<Operation>| Arc::ptr_eq(operation, &first.operation);
        let alone = held().all(|w| of_first(&w.operation)) && state.flying.iter().flatten().all(|f| of_first(&f.1));
        let shared = first.waits.iter().any(|(other, _)| self.actors[*other].lane != self.actors[first.actor].lane);
        // While it is away nobody tells it of a rank of its own that is not in the call.
        let away = |actor: &usize| *actor >= self.actors.len() / 2 || first.waits.iter().any(|(of, _)| of == actor);
        let alone = alone && lane.actors.iter().all(away);
        let runs = first.operation.may_run() && alone && shared && held().count() == 1;
        runs.then(|| (first.waits.clone(), self.deadline(&first.operation)))
    }
    /// The lanes that have to see to what a worker of this lane waits for after all.
    pub(super) fn rouses(&self, state: &mut State) -> Vec<usize> {
        let mut lanes = Vec::new();
        for work in state.held.iter_mut().filter_map(|q| q.front_mut()).filter(|w| w.gathers) {
            work.gathers = false;
            lanes.extend(work.waits.iter().map(|(other, _)| self.actors[*other].lane));
        }
        lanes
    }
    /// Waits for them, on their devices.
    pub(super) fn gather(&self, waits: &[(usize, u64)], deadline: Instant) -> crate::contract::Result<()> {
        let home = self.clock.now() + AWAY;
        for &(other, value) in waits {
            let Actor { device, timeline, lane: theirs, .. } = &self.actors[other];
            while self.board[other].load(SeqCst) < value {
                let wakes = device.wakes();
                if self.failure().is_some() || exit::is_near() {
                    return Ok(());
                }
                let point = Point { timeline: *timeline, value };
                if device.value(point.timeline)? < value
                    && device.wait_any(&[point], wakes, deadline.min(home))? == Waited::TimedOut
                {
                    self.check_deadline();
                    return Ok(());
                }
                self.collect(&self.lanes[*theirs])?;
            }
        }
        Ok(())
    }
}
