//! Which algorithm, and how long a message is cut: by the cost model, from measured latency and bandwidth.
use crate::{
    call::Checked,
    contract::{DataType, Device, ReduceOp},
    execute::Plan,
    link::Link,
    plans::{Chunking, Form, Plans},
    schedule::{
        Algorithm, Collective, Path, Schedule, Shape, algorithms, build,
        cost::{self, Model, Speed},
        direct, lower,
    },
    speed,
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    thread,
};

/// Bytes that all ranks' data of a chunk has at most, up to [`CHUNKS`] chunks a message: then chunks grow.
const CHUNK: u64 = 512 << 10;
const CHUNKS: u64 = 128;
/// Chunks that lie between a push and the step that needs it: from 2 on a hop hides behind a chunk.
const DISTANCE: u32 = 2;
/// The range of [`Tuner::switch_points`].
pub(crate) const LEAST_BYTES: u64 = 4;
const MOST_BYTES: u64 = 256 << 20;
/// A hop is never free, however it was measured.
const LEAST_HOP: f64 = 1e-6;

/// Knows the machine, and remembers what it chose.
pub(crate) struct Tuner {
    /// Ranks, then host workers.
    speeds: Vec<Speed>,
    hops: Vec<f64>,
    /// Whether ranks leave host workers by a signal: neither that nor a worker that waits for them costs a hop.
    pub departs: bool,
    chosen: Mutex<HashMap<Choice, Algorithm>>,
}

/// Calls that are done alike.
#[derive(PartialEq, Eq, Hash)]
struct Choice {
    collective: Collective,
    in_place: bool,
    any_order: bool,
    form: Form,
    element: u64,
    bytes: u64,
}

impl Tuner {
    /// `worker`: what the host workers run on; measured once in a process.
    pub fn new(links: &[Link], ranks: &[Speed], worker: &dyn Device) -> crate::Result<Self> {
        static WORKER: OnceLock<Speed> = OnceLock::new();
        let worker = match WORKER.get() {
            Some(speed) => *speed,
            None => *WORKER.get_or_init({
                let speed = speed::one(worker)?;
                move || speed
            }),
        };
        let n = ranks.len();
        // The host workers share the host's cores.
        let cores = thread::available_parallelism().map_or(1.0, |cores| cores.get() as f64);
        let share = (cores / n as f64).min(1.0);
        let worker = Speed { copy: worker.copy * share, reduce: worker.reduce * share, ..worker };
        // Of each rank, the latency of a hop: the mean over its links of what is left without the submissions.
        let mut hop = vec![(LEAST_HOP, 1.0); n];
        for link in links {
            let (from, to) = (link.from as usize, link.to as usize);
            let crossings = if link.path == Path::Copied { 2.0 } else { 1.0 };
            let rest = link.latency.as_secs_f64() - ranks[from].submit - ranks[to].submit;
            for rank in [from, to] {
                hop[rank] = (hop[rank].0 + (rest / crossings).max(LEAST_HOP), hop[rank].1 + 1.0);
            }
        }
        let hop = |actor: usize| hop[actor % n].0 / hop[actor % n].1;
        let hops = (0..2 * n).flat_map(|from| (0..2 * n).map(move |to| hop(from).max(hop(to)))).collect();
        let speeds = ranks.iter().copied().chain(std::iter::repeat_n(worker, n)).collect();
        Ok(Tuner { speeds, hops, departs: false, chosen: Mutex::default() })
    }
    /// The plan of a call, by `forced` or by the cheapest algorithm; `None` if the collective has no such algorithm.
    pub fn plan(
        &self,
        plans: &Plans,
        links: &lower::Links,
        call: &Checked,
        forced: Option<Algorithm>,
        direct: bool,
    ) -> Option<Arc<Plan>> {
        let element = call.dtype.size();
        let form = Form { direct, ..call.form() };
        let plan = |algorithm| plans.get(links, &call.shape, algorithm, chunking(&call.shape, element), &form);
        if let Some(algorithm) = forced {
            return plan(algorithm);
        }
        let choice = Choice {
            collective: call.shape.collective.clone(),
            in_place: call.shape.in_place,
            any_order: any_order(call.op, call.dtype) && !call.in_rank_order(),
            form: form.clone(),
            element,
            bytes: call.bytes().next_power_of_two(),
        };
        let mut chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(algorithm) = chosen.get(&choice) {
            return plan(*algorithm);
        }
        let candidates = candidates(&call.shape.collective, choice.any_order, direct);
        let priced = candidates.filter_map(plan).map(|p| (self.cost(&p.schedule, element, p.direct), p));
        let (_, best) = priced.min_by(|a, b| a.0.total_cmp(&b.0))?;
        chosen.insert(choice, best.algorithm);
        Some(best)
    }
    /// From how many bytes on which algorithm is the cheapest, out of place.
    pub fn switch_points(
        &self,
        links: &lower::Links,
        collective: &Collective,
        op: Option<ReduceOp>,
        dtype: DataType,
        reaches: bool,
    ) -> Vec<(u64, Algorithm)> {
        let element = dtype.size();
        let mut points: Vec<(u64, Algorithm)> = Vec::new();
        for bytes in (LEAST_BYTES.ilog2()..=MOST_BYTES.ilog2()).map(|power| 1_u64 << power) {
            let count = bytes.div_ceil(element);
            let shape = Shape { collective: collective.clone(), ranks: links.ranks, count, in_place: false };
            let priced = candidates(collective, any_order(op, dtype), reaches).filter_map(|algorithm| {
                let own = if reaches && algorithm == Algorithm::Host { direct(&shape, false) } else { None };
                let is_direct = own.is_some();
                let lowered = || Some(lower::lower(&build(&shape, algorithm, chunking(&shape, element))?, links));
                let schedule = own.or_else(lowered)?;
                Some((self.cost(&schedule, element, is_direct), algorithm))
            });
            let Some((_, best)) = priced.min_by(|a, b| a.0.total_cmp(&b.0)) else { continue };
            if points.last().is_none_or(|(_, last)| *last != best) {
                points.push((bytes, best));
            }
        }
        points
    }
    /// Seconds that a lowered schedule takes; `direct`: one that [`direct`] gave.
    fn cost(&self, schedule: &Schedule, element: u64, direct: bool) -> f64 {
        let mut model = Model { element, speeds: self.speeds.clone(), hops: self.hops.clone() };
        if !(direct && self.departs) {
            return cost::cost(schedule, &model);
        }
        let mut schedule = schedule.clone();
        let ranks = schedule.shape.ranks as usize;
        schedule.steps[..ranks].iter_mut().for_each(|steps| steps.truncate(1));
        model.hops.fill(LEAST_HOP);
        cost::cost(&schedule, &model)
    }
}

/// The algorithms to choose from. Where host workers reach the callers' memory, they do any collective.
fn candidates(collective: &Collective, any_order: bool, direct: bool) -> impl Iterator<Item = Algorithm> {
    let listed = algorithms(collective);
    let host = (direct && !listed.contains(&Algorithm::Host)).then_some(Algorithm::Host);
    listed.iter().copied().chain(host).filter(move |a| any_order || a.in_rank_order())
}

/// Whether the order of the fold does not show in the bits.
fn any_order(op: Option<ReduceOp>, dtype: DataType) -> bool {
    op.is_none_or(|op| matches!(op, ReduceOp::Min | ReduceOp::Max) || !dtype.is_float())
}

fn chunking(shape: &Shape, element: u64) -> Chunking {
    let blocks = match shape.collective {
        Collective::AllReduce | Collective::Broadcast { .. } | Collective::Reduce { .. } => 1,
        _ => u64::from(shape.ranks),
    };
    let bytes = match &shape.collective {
        Collective::SendRecv(list) => list.iter().map(|t| t.count).max().unwrap_or(0) * element,
        _ => shape.count * element * blocks,
    };
    let chunk = CHUNK.max(bytes.div_ceil(CHUNKS)) / blocks / element;
    if bytes <= CHUNK { Chunking::WHOLE } else { Chunking { chunk: chunk.next_multiple_of(64), distance: DISTANCE } }
}
