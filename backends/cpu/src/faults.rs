//! The doors through which a test makes a device fail. A device on which none is open pays one atomic load.
use allhands_contract::Wake;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// What is wrong with a path that data takes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum PathFault {
    /// Nothing.
    #[default]
    None,
    /// Zeros arrive.
    Zeros,
    /// One bit, in the middle of what arrives, is flipped.
    Corrupt,
    /// Nothing arrives before the fault is changed.
    Stall,
    /// Each operation takes so much longer, on the device's clock.
    Delay(Duration),
    /// It cannot be had, for this reason.
    Refuse(String),
}

/// What a test makes go wrong with a device and its siblings. Every change takes effect at once, also on what is
/// under way.
#[derive(Debug, Default)]
pub struct Faults {
    /// Whether anything below differs from its default.
    armed: AtomicBool,
    set: Mutex<Set>,
    watchers: Mutex<Vec<Weak<dyn Wake>>>,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Set {
    pub stalled: bool,
    pub lost: Option<String>,
    pub imports: PathFault,
    pub copies: PathFault,
}

impl Faults {
    /// Stops the queue before its next submission. On an inline device the next `submit` blocks.
    pub fn stall(&self) {
        self.change(|s| s.stalled = true);
    }
    /// Lets the queue go on.
    pub fn release(&self) {
        self.change(|s| s.stalled = false);
    }
    /// Loses the device: what is queued is never run, waits end, and every call fails.
    pub fn lose(&self, why: impl Into<String>) {
        let why = why.into();
        self.change(|s| s.lost = Some(why));
    }
    /// Makes the device answer again, with an empty queue and its timelines where they stood.
    pub fn revive(&self) {
        self.change(|s| s.lost = None);
    }
    /// What is wrong with imported memory. `Zeros`: an import made from now on succeeds, and lies over other bytes.
    /// `Refuse`: an import made from now on fails. The others befall every copy and kernel that touches an imported
    /// buffer.
    pub fn set_imports(&self, fault: PathFault) {
        self.change(|s| s.imports = fault);
    }
    /// What is wrong with carrying: every copy on an inline device, and on others every copy from `Mapped`, `Upload`
    /// or imported memory. `Refuse`: commands with such a copy cannot be prepared.
    pub fn set_copies(&self, fault: PathFault) {
        self.change(|s| s.copies = fault);
    }
    /// Imports fail from now on, for this reason.
    pub fn refuse_imports(&self, reason: impl Into<String>) {
        self.set_imports(PathFault::Refuse(reason.into()));
    }

    /// Asks something of what is set; of nothing if nothing is.
    pub(crate) fn look<T>(&self, question: impl FnOnce(&Set) -> T) -> T {
        if self.armed.load(Ordering::Acquire) { question(&lock(&self.set)) } else { question(&Set::default()) }
    }
    /// Has `watcher` told of every change.
    pub(crate) fn watch(&self, watcher: Weak<dyn Wake>) {
        let mut watchers = lock(&self.watchers);
        watchers.retain(|w| w.strong_count() > 0);
        watchers.push(watcher);
    }

    fn change(&self, edit: impl FnOnce(&mut Set)) {
        {
            let mut set = lock(&self.set);
            edit(&mut set);
            self.armed.store(*set != Set::default(), Ordering::Release);
        }
        let watchers: Vec<Arc<dyn Wake>> = lock(&self.watchers).iter().filter_map(Weak::upgrade).collect();
        watchers.iter().for_each(|w| w.wake());
    }
}

/// A panic in a test must not become a second one here: what these locks guard is valid at every step.
fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
