//! How long a lowered schedule takes, from latency and bandwidth (Hockney's model: a + n/B for each hop).
//!
//! Each actor runs its submissions in order. A submission starts when the one before it has ended and when every
//! submission that its steps follow has ended and a hop's latency has passed; it takes the time of a submit, and for
//! each step the bytes of its copies and those of its folds over the actor's bandwidths. Links that several actors share are not modelled: the bandwidths
//! given should be those that an actor gets while the others work too.
use super::{lower::batches, *};
use std::ops::Range;

/// What an actor can do.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Speed {
    /// Seconds from a submit to the start of its work.
    pub submit: f64,
    /// Seconds that a fold takes whatever its length.
    pub launch: f64,
    /// Bytes a second that a copy stores: to all its destinations, taken together.
    pub copy: f64,
    /// Bytes a second that a fold reads: from all its sources, taken together.
    pub reduce: f64,
    /// Whether the copies and the folds of one step run at the same time, as on a card whose bus goes both ways.
    pub overlap: bool,
}

/// What a machine can do.
#[derive(Clone, PartialEq, Debug)]
pub struct Model {
    /// Bytes of an element.
    pub element: u64,
    /// Of each actor: ranks, then their host workers.
    pub speeds: Vec<Speed>,
    /// Seconds from the end of a step to its effect on another actor: `hops[from * actors + to]`.
    pub hops: Vec<f64>,
}

impl Model {
    /// Alike ranks, alike host workers, and one latency between any two.
    pub fn uniform(ranks: u32, element: u64, rank: Speed, worker: Speed, hop: f64) -> Self {
        let n = ranks as usize;
        Model { element, speeds: [vec![rank; n], vec![worker; n]].concat(), hops: vec![hop; 4 * n * n] }
    }
    fn seconds(&self, actor: usize, step: &Step) -> f64 {
        let speed = &self.speeds[actor];
        let (mut copies, mut folds) = (0.0, 0.0);
        for action in &step.actions {
            let bytes = (action.len() * self.element) as f64;
            match action {
                Action::Copy { dsts, .. } => copies += bytes * dsts.len() as f64 / speed.copy,
                Action::Reduce { srcs, .. } => folds += speed.launch + bytes * srcs.len() as f64 / speed.reduce,
            }
        }
        if speed.overlap { copies.max(folds) } else { copies + folds }
    }
}

/// When everything happens, in seconds from the start of the call.
#[derive(Clone, PartialEq, Debug)]
pub struct Timeline {
    /// Of each actor, its steps.
    pub steps: Vec<Vec<Range<f64>>>,
    /// Of each actor, its submissions: from the submit to the end of its last step.
    pub submissions: Vec<Vec<Range<f64>>>,
}

impl Timeline {
    /// When the last actor is done.
    pub fn end(&self) -> f64 {
        self.submissions.iter().filter_map(|s| s.last()).map(|s| s.end).fold(0.0, f64::max)
    }
}

/// Seconds from the first submit to the end of the last step of any actor.
pub fn cost(schedule: &Schedule, model: &Model) -> f64 {
    timeline(schedule, model).end()
}

/// When everything happens. Steps that wait for each other in a circle never start: they have no entry.
///
/// # Panics
/// If the schedule has actors that the model has not.
pub fn timeline(schedule: &Schedule, model: &Model) -> Timeline {
    let batches = batches(schedule);
    let actors = model.speeds.len();
    let none = || schedule.steps.iter().map(|s| Vec::with_capacity(s.len())).collect::<Vec<Vec<Range<f64>>>>();
    let mut out = Timeline { steps: none(), submissions: none() };
    // A submission announces its end: others see its steps only then.
    let mut ends: Vec<Vec<f64>> = vec![Vec::new(); schedule.steps.len()];
    let mut moved = true;
    while std::mem::take(&mut moved) {
        for actor in 0..schedule.steps.len() {
            while let Some(batch) = batches[actor].get(out.submissions[actor].len()) {
                let seen = |id: &StepId| {
                    let end = ends[id.actor as usize].get(id.index as usize);
                    end.map(|end| end + model.hops[id.actor as usize * actors + actor])
                };
                let own = out.submissions[actor].last().map_or(0.0, |s| s.end);
                let after = &schedule.steps[actor][batch.start].after;
                let Some(start) = after.iter().map(seen).try_fold(own, |m, t| t.map(|t| m.max(t))) else { break };
                let mut now = start + model.speeds[actor].submit;
                for step in &schedule.steps[actor][batch.clone()] {
                    let end = now + model.seconds(actor, step);
                    out.steps[actor].push(now..end);
                    now = end;
                }
                ends[actor].resize(batch.end, now);
                out.submissions[actor].push(start..now);
                moved = true;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANK: Speed = Speed { submit: 10.0, launch: 0.0, copy: 100.0, reduce: 200.0, overlap: true };
    const WORKER: Speed = Speed { submit: 1.0, launch: 0.0, copy: 400.0, reduce: 400.0, overlap: false };

    fn one_shot(path: Path) -> f64 {
        let shape = Shape { collective: Collective::AllReduce, ranks: 2, count: 1000, in_place: false };
        let schedule = build(&shape, Algorithm::OneShot, Chunking::WHOLE).unwrap();
        let links = lower::Links::uniform(2, path, true, 8);
        cost(&lower::lower(&schedule, &links), &Model::uniform(2, 4, RANK, WORKER, 3.0))
    }

    #[test]
    fn one_shot_by_hand() {
        let (publish, reduce) = (10.0 + 40.0, 10.0 + 40.0);
        assert_eq!(one_shot(Path::SharedHost), publish + 3.0 + reduce);
        assert_eq!(one_shot(Path::Copied), publish + 3.0 + (1.0 + 10.0) + 3.0 + reduce);
    }

    #[test]
    fn a_fold_has_to_be_launched() {
        let at = |launch| {
            let shape = Shape { collective: Collective::AllReduce, ranks: 2, count: 1000, in_place: false };
            let schedule = build(&shape, Algorithm::OneShot, Chunking::WHOLE).unwrap();
            let schedule = lower::lower(&schedule, &lower::Links::uniform(2, Path::SharedHost, true, 8));
            cost(&schedule, &Model::uniform(2, 4, Speed { launch, ..RANK }, WORKER, 3.0))
        };
        assert_eq!(at(5.0), at(0.0) + 5.0);
    }

    #[test]
    fn a_step_may_push_while_it_folds() {
        let shape = Shape { collective: Collective::AllReduce, ranks: 2, count: 2000, in_place: false };
        let schedule = build(&shape, Algorithm::OneShot, Chunking { chunk: 1000, distance: 1 }).unwrap();
        let schedule = lower::lower(&schedule, &lower::Links::uniform(2, Path::SharedHost, true, 8));
        let at = |overlap| cost(&schedule, &Model::uniform(2, 4, Speed { overlap, ..RANK }, WORKER, 3.0));
        assert_eq!(at(true), 50.0 + 3.0 + 50.0 + 3.0 + 50.0);
        assert_eq!(at(false), 50.0 + 3.0 + 90.0 + 3.0 + 50.0);
    }

    #[test]
    fn steps_of_one_submission_pay_one_submit() {
        let shape = Shape { collective: Collective::Barrier, ranks: 2, count: 0, in_place: false };
        let mut schedule = build(&shape, Algorithm::OneShot, Chunking::WHOLE).unwrap();
        let model = Model::uniform(2, 4, RANK, WORKER, 3.0);
        assert_eq!(cost(&schedule, &model), 10.0 + 3.0 + 10.0);
        schedule.steps[0].insert(1, Step::default());
        schedule.steps[1][1].after[0].index = 1;
        assert_eq!(cost(&schedule, &model), 10.0 + 3.0 + 10.0);
    }
}
