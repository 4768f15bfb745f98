//! Waiting for what comes soon: to look again and again for a while, before one sleeps. On a GPU an end is seen after some
//! 10 microseconds that way, and after 35 to 45 by a sleep.
use std::{
    sync::{
        LazyLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// How long to look, learnt from how long such waits took. Where they take longer than can be looked through, nobody looks;
/// nor do more threads of the process at once than leave a core to whoever has something to do.
#[derive(Debug)]
pub struct Spin {
    /// A moving mean, in nanoseconds.
    typical: AtomicU64,
}

/// The longest look.
const LONGEST: Duration = Duration::from_micros(400);
const FIRST: Duration = Duration::from_micros(50);

static LOOKING: AtomicUsize = AtomicUsize::new(0);
static CORES: LazyLock<usize> = LazyLock::new(|| thread::available_parallelism().map_or(1, |cores| cores.get()));

impl Default for Spin {
    fn default() -> Self {
        Spin { typical: AtomicU64::new(FIRST.as_nanos() as u64) }
    }
}

impl Spin {
    /// How long a look may be: twice what is typical.
    fn budget(&self) -> Duration {
        let budget = 2 * Duration::from_nanos(self.typical.load(Relaxed));
        if budget > LONGEST { Duration::ZERO } else { budget }
    }
    /// Looks until `done` or for as long as it may pay; whether it is done. `done` is asked at least once.
    pub fn look(&self, mut done: impl FnMut() -> bool) -> bool {
        if done() {
            return true;
        }
        let budget = self.budget();
        let others = LOOKING.fetch_add(1, Relaxed);
        let start = Instant::now();
        let mut is_done = false;
        while !is_done && others + 1 < *CORES && start.elapsed() < budget {
            std::hint::spin_loop();
            is_done = done();
        }
        LOOKING.fetch_sub(1, Relaxed);
        is_done
    }
    /// What was waited for came after so long, looked for or slept through.
    pub fn took(&self, wait: Duration) {
        // One wait for something else, as for the next call, does not end all looking.
        let wait = wait.min(4 * LONGEST).as_nanos() as u64;
        let typical = self.typical.load(Relaxed);
        self.typical.store(typical - typical / 8 + wait / 8, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_as_long_as_waits_were() {
        let spin = Spin::default();
        assert_eq!(spin.budget(), 2 * FIRST);
        (0..100).for_each(|_| spin.took(Duration::from_micros(150)));
        assert!((290..=300).contains(&spin.budget().as_micros()));
        (0..100).for_each(|_| spin.took(Duration::from_secs(1)));
        assert_eq!(spin.budget(), Duration::ZERO);
        assert!(!spin.look(|| false) && spin.look(|| true));
        (0..100).for_each(|_| spin.took(Duration::from_micros(20)));
        assert!(spin.budget().as_micros() <= 40);
    }

    #[test]
    fn a_look_ends_when_it_is_done() {
        let (spin, mut looks) = (Spin::default(), 0);
        (0..100).for_each(|_| spin.took(Duration::from_micros(150)));
        let done = spin.look(|| {
            looks += 1;
            looks == 3
        });
        // On one core it does not look.
        assert!(done || *CORES == 1 || looks < 3, "{looks}");
    }
}
