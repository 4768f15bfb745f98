//! What is kept of calls: one like an earlier one, over the same memory, plans nothing and prepares nothing.
//!
//! A [`Kept`] call has its plan, and for each bank of staging that it has run in a [`Recipe`]: the command lists of its
//! batches. Both go when a buffer that they name is destroyed, because commands keep the memory of their buffers.
//! Devices whose commands are used up by a submit have nothing to keep but the plan.
use crate::{
    call::Checked,
    contract::{BufferId, CommandsId, Device, Op, Watch},
    execute::Plan,
    schedule::Algorithm,
    staging::{Needs, Pool, Turn},
};
use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// Calls that are kept. The one that was not used for longest goes first.
const KEPT: usize = 512;

/// The calls of a communicator. It watches the devices of the ranks.
#[derive(Default)]
pub(crate) struct Recipes {
    kept: Mutex<HashMap<u64, Arc<Kept>>>,
    uses: AtomicU64,
}

/// A call that was made before.
pub(crate) struct Kept {
    call: Checked,
    algorithm: Option<Algorithm>,
    pub plan: Arc<Plan>,
    pub needs: Needs,
    used: AtomicU64,
    /// By pool and bank; one without staging has neither.
    recipes: Mutex<Vec<(Option<(Weak<Pool>, u64)>, Arc<Recipe>)>>,
}

/// Command lists for the batches of a plan, in their order. Dropped, they are destroyed.
#[derive(Default)]
pub(crate) struct Recipe {
    /// `None`: the batch only waits and signals.
    pub commands: Vec<Option<CommandsId>>,
    /// Of each batch.
    devices: Vec<Arc<dyn Device>>,
    /// What host workers call the callers' memory.
    views: Vec<(Arc<dyn Device>, BufferId)>,
    /// What the lists name.
    buffers: Vec<BufferId>,
    /// For a trace: the operations with the ranges that are meant.
    pub exact: Vec<Vec<Op>>,
}

impl Recipes {
    /// The call, if it was made before.
    pub fn find(&self, call: &Checked, algorithm: Option<Algorithm>) -> Option<Arc<Kept>> {
        let kept = self.lock().get(&fingerprint(call, algorithm))?.clone();
        let same = kept.algorithm == algorithm && kept.call.is_same(call);
        kept.used.store(self.uses.fetch_add(1, Relaxed), Relaxed);
        same.then_some(kept)
    }
    /// Keeps it.
    pub fn add(&self, call: &Checked, algorithm: Option<Algorithm>, plan: Arc<Plan>) -> Arc<Kept> {
        let needs = plan.needs(call.staged_size());
        let used = AtomicU64::new(self.uses.fetch_add(1, Relaxed));
        let call = call.without_points();
        let key = fingerprint(&call, algorithm);
        let kept = Arc::new(Kept { call, algorithm, plan, needs, used, recipes: Mutex::default() });
        let mut all = self.lock();
        let full = all.len() >= KEPT && !all.contains_key(&key);
        let oldest = all.iter().filter(|_| full).min_by_key(|(_, k)| k.used.load(Relaxed)).map(|(key, _)| *key);
        let gone = (oldest.and_then(|key| all.remove(&key)), all.insert(key, kept.clone()));
        drop(all);
        drop(gone);
        kept
    }
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Kept>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch for Recipes {
    fn destroyed(&self, buffer: BufferId) {
        let (mut calls, mut recipes) = (Vec::new(), Vec::new());
        self.lock().retain(|_, kept| {
            let stays = !kept.call.names(buffer);
            if stays {
                recipes.extend(kept.lock().extract_if(.., |(_, r)| r.buffers.contains(&buffer)));
            } else {
                calls.push(kept.clone());
            }
            stays
        });
        // `calls` and `recipes` are dropped here, outside the lock: that frees what they kept.
    }
}

impl Kept {
    /// The command lists for a turn at staging.
    pub fn recipe(&self, turn: Option<&Turn>) -> Option<Arc<Recipe>> {
        let fits = |place: &Option<(Weak<Pool>, u64)>| match (place, turn) {
            (None, None) => true,
            (Some((pool, bank)), Some(turn)) => *bank == turn.bank && std::ptr::eq(pool.as_ptr(), &*turn.pool),
            _ => false,
        };
        self.lock().iter().find(|(place, _)| fits(place)).map(|(_, recipe)| recipe.clone())
    }
    /// Keeps them, if they can be used again.
    pub fn keep(&self, turn: Option<&Turn>, recipe: &Arc<Recipe>) {
        if recipe.devices.iter().all(|d| d.limits().resubmit) {
            let place = turn.map(|t| (Arc::downgrade(&t.pool), t.bank));
            self.lock().push((place, recipe.clone()));
        }
    }
    fn lock(&self) -> MutexGuard<'_, Vec<(Option<(Weak<Pool>, u64)>, Arc<Recipe>)>> {
        self.recipes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recipe {
    /// The next batch's: `ops`, prepared by `device` unless there are none.
    pub fn add(&mut self, device: &Arc<dyn Device>, ops: &[Op]) -> crate::contract::Result<()> {
        let commands = if ops.is_empty() { None } else { Some(device.prepare(ops)?) };
        self.commands.push(commands);
        self.devices.push(device.clone());
        for op in ops {
            let (reads, writes) = op.accesses();
            self.buffers.extend(reads.iter().chain(writes).map(|range| range.buffer));
        }
        self.buffers.sort_unstable();
        self.buffers.dedup();
        Ok(())
    }
    /// What `worker` calls `buffer` of `device`, whose memory is the host's own.
    pub fn view(&mut self, worker: &Arc<dyn Device>, view: BufferId) {
        self.views.push((worker.clone(), view));
    }
}

impl Drop for Recipe {
    fn drop(&mut self) {
        for (device, commands) in self.devices.iter().zip(&self.commands) {
            commands.iter().for_each(|c| device.destroy_commands(*c));
        }
        for (device, view) in &self.views {
            device.destroy_buffer(*view);
        }
    }
}

/// Of what tells calls apart, most of it.
fn fingerprint(call: &Checked, algorithm: Option<Algorithm>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (&call.shape, call.op, call.dtype, call.wire, algorithm).hash(&mut hasher);
    for rank in &call.ranks {
        rank.input.pieces.first().hash(&mut hasher);
        rank.output.pieces.first().hash(&mut hasher);
    }
    hasher.finish()
}
