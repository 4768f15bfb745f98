//! The plans that are kept, so that a call like an earlier one builds nothing.
pub(crate) use crate::schedule::{Chunking, lower::Form};
use crate::{
    execute::Plan,
    schedule::{Algorithm, Shape, build, build_narrow, direct, lower},
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

/// How many are kept. The one that was not used for longest goes first.
const KEPT: usize = 128;

/// What a plan is made for.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    shape: Shape,
    algorithm: Algorithm,
    chunking: Chunking,
    form: Form,
}

#[derive(Default)]
pub(crate) struct Plans(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    plans: HashMap<Key, (u64, Arc<Plan>)>,
    uses: u64,
}

impl Plans {
    /// `None` where the collective has no such algorithm.
    pub fn get(
        &self,
        links: &lower::Links,
        shape: &Shape,
        algorithm: Algorithm,
        chunking: Chunking,
        form: &Form,
    ) -> Option<Arc<Plan>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.uses += 1;
        let (uses, key) = (kept.uses, Key { shape: shape.clone(), algorithm, chunking, form: form.clone() });
        if let Some((used, plan)) = kept.plans.get_mut(&key) {
            *used = uses;
            return Some(plan.clone());
        }
        let direct = if form.direct && algorithm == Algorithm::Host { direct(shape, form.narrow) } else { None };
        let whole = chunking.chunk == 0 || direct.is_some();
        let schedule = match direct {
            Some(schedule) => schedule,
            None => {
                let logical = if form.narrow { build_narrow } else { build }(shape, algorithm, chunking)?;
                lower::lower_as(&logical, links, form)
            }
        };
        let chunks = if whole { shape.count.min(1) } else { shape.count.div_ceil(chunking.chunk) };
        let plan = Arc::new(Plan::new(schedule, algorithm, chunks));
        if kept.plans.len() >= KEPT {
            let oldest = kept.plans.iter().min_by_key(|(_, (used, _))| *used).map(|(key, _)| key.clone());
            oldest.and_then(|key| kept.plans.remove(&key));
        }
        kept.plans.insert(key, (uses, plan.clone()));
        Some(plan)
    }
}
