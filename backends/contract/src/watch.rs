//! Who wants to know that a buffer goes. Prepared commands keep the memory of their buffers, so whoever keeps commands
//! for calls to come must hear of it.
use crate::BufferId;
use std::sync::{Mutex, PoisonError, Weak};

/// Is told of buffers that are destroyed.
pub trait Watch: Send + Sync {
    /// `buffer` was destroyed: its handle is stale. Called on the thread that did it, under no lock of the device.
    fn destroyed(&self, buffer: BufferId);
}

/// Who watches a device: for its implementation.
#[derive(Default)]
pub struct Watchers(Mutex<Vec<Weak<dyn Watch>>>);

impl Watchers {
    /// One more, for as long as it lives.
    pub fn add(&self, watcher: Weak<dyn Watch>) {
        let mut watchers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watchers.retain(|w| w.strong_count() > 0);
        watchers.push(watcher);
    }
    /// Tells all.
    pub fn destroyed(&self, buffer: BufferId) {
        let watchers = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        watchers.iter().filter_map(Weak::upgrade).for_each(|w| w.destroyed(buffer));
    }
}
