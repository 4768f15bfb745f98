//! Time, real or virtual. Deadlines are tested on a virtual clock: no test waits for one.
use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

/// Whom a virtual clock tells that time has moved.
pub trait Wake: Send + Sync {
    /// Time has moved: look at the deadlines again.
    fn wake(&self);
}

/// Where deadlines are read off. A clone shows the same time.
#[derive(Clone, Default)]
pub struct Clock(Option<Arc<Virtual>>);

struct Virtual {
    start: Instant,
    state: Mutex<(Duration, Vec<Weak<dyn Wake>>)>,
}

impl Clock {
    /// The machine's clock.
    pub fn real() -> Self {
        Clock(None)
    }
    /// A clock that stands still until it is told to [`advance`](Self::advance).
    pub fn manual() -> Self {
        Clock(Some(Arc::new(Virtual { start: Instant::now(), state: Mutex::default() })))
    }
    /// Whether it moves by itself.
    pub fn is_real(&self) -> bool {
        self.0.is_none()
    }
    /// Now.
    pub fn now(&self) -> Instant {
        match &self.0 {
            None => Instant::now(),
            Some(v) => v.start + lock(&v.state).0,
        }
    }
    /// Moves a virtual clock on and wakes whoever waits by it.
    ///
    /// # Panics
    /// On the machine's clock.
    pub fn advance(&self, by: Duration) {
        let v = self.0.as_ref().expect("the machine's clock cannot be moved");
        let observers = {
            let mut state = lock(&v.state);
            state.0 += by;
            state.1.retain(|o| o.strong_count() > 0);
            state.1.clone()
        };
        observers.iter().filter_map(Weak::upgrade).for_each(|o| o.wake());
    }
    /// Has `observer` told whenever a virtual clock moves. It must take the lock of its condition variable before
    /// it notifies, or a waiter that is about to sleep can miss it.
    pub fn observe(&self, observer: Weak<dyn Wake>) {
        if let Some(v) = &self.0 {
            lock(&v.state).1.push(observer);
        }
    }
    /// Waits on `condvar` until it is notified or, on the machine's clock, `deadline` has come. On a virtual clock
    /// only a notification ends it: whoever calls is an observer. Callers loop in both cases.
    pub fn wait<'a, T>(&self, condvar: &Condvar, guard: MutexGuard<'a, T>, deadline: Instant) -> MutexGuard<'a, T> {
        if self.is_real() {
            let left = deadline.saturating_duration_since(Instant::now());
            condvar.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0
        } else {
            condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
        }
    }
}

/// A panic elsewhere must not become a second one here: the state behind these locks is valid at every step.
fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for Clock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.is_real() { "Clock::real" } else { "Clock::manual" })
    }
}
