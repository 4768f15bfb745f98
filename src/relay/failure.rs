//! What goes wrong in flight: it becomes the failure of the communicator, ends all that is pending with the first cause,
//! and leaves every queue able to run dry.
use super::*;

impl Relay {
    /// Fails if a call is late, of any lane. Those behind it are late as well, and a rank that has done its part of the
    /// first has the next at the front of its lane: the first is the one to be named.
    pub(super) fn check_deadline(&self) {
        let late_of = |lane: &Lane| {
            let state = lane.lock();
            let flying = state.flying.iter().filter_map(|q| q.front().map(|f| f.1.clone()));
            let held = state.held.iter().filter_map(|q| q.front().map(|w| w.operation.clone()));
            flying.chain(held).filter(|o| self.deadline(o) <= self.clock.now()).min_by_key(|o| o.number)
        };
        if let Some(operation) = self.lanes.iter().filter_map(late_of).min_by_key(|o| o.number) {
            let (what, deadline, arrived) = (operation.what.clone(), operation.deadline, operation.arrived());
            self.fail(Error::Timeout { what, deadline, arrived });
        }
    }

    /// Runs `f`; what goes wrong in it, a panic included, becomes the failure of the communicator.
    pub(super) fn guard<T>(&self, actor: usize, f: impl FnOnce() -> crate::contract::Result<T>) -> Result<T> {
        let why = match catch_unwind(AssertUnwindSafe(f)) {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
                format!("its driver panicked: {}", text.unwrap_or("without a message"))
            }
        };
        let error = Error::Failed { rank: self.actors[actor].rank as u32, why };
        self.fail(error.clone());
        Err(error)
    }
    /// Ends all that is pending with the first cause.
    pub(super) fn fail(&self, error: Error) {
        if self.failure.set(error).is_ok() {
            log::error!("{}", self.failure().map(ToString::to_string).unwrap_or_default());
        }
        self.drain();
    }
    /// Ends what is pending, and opens every gate: the queues of the devices are others' too and must run dry. What
    /// still runs there keeps its memory alive.
    pub(super) fn drain(&self) {
        let Some(failure) = self.failure() else { return };
        for lane in &self.lanes {
            let (mut ended, mut departures) = (Vec::new(), Vec::new());
            lane.kick(|state| {
                ended.extend(state.held.iter_mut().flat_map(|q| q.drain(..)).map(|w| (w.operation, Some(w.recipe))));
                ended.extend(state.flying.iter_mut().flat_map(|q| q.drain(..)).map(|(_, o)| (o, None)));
                departures.extend(state.departures.iter_mut().flat_map(|q| q.drain(..)));
            });
            for work in departures {
                // A device that is gone needs no rank to leave.
                let _ = self.leave(&work);
                work.operation.fail(failure.clone());
            }
            ended.iter().for_each(|(operation, _)| operation.fail(failure.clone()));
        }
        let native = self.actors.iter().any(|other| other.edges.iter().any(|e| matches!(e, Edge::Native(_))));
        for actor in &self.actors {
            if native && actor.device.limits().gated {
                // What was never submitted is signalled in its stead; refused where all was.
                let signal = Point { timeline: actor.timeline, value: actor.issued.load(SeqCst) };
                let _ = actor.device.submit(&[Submission { commands: None, waits: &[], signal }]);
            }
            for (other, edge) in self.actors.iter().zip(&actor.edges) {
                let Edge::Gate(gate) = edge else { continue };
                let (value, mut opened) = (other.issued.load(SeqCst), gate.opened());
                if value > *opened {
                    // A device that is gone needs no gate opened.
                    let _ = actor.device.signal(Point { timeline: gate.timeline, value });
                    *opened = value;
                }
            }
        }
    }
}
