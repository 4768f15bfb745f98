//! The end of the process. `exit` runs the destructors of drivers and layers while other threads still run, and a lane
//! that calls a driver then crashes in it. So lanes are *at work* except while they sleep, and a handler of `exit` has
//! those at work stop where they are in no driver, and stay there.
//!
//! Handlers run in the reverse of the order in which they were registered. Ours is registered whenever a device of
//! another driver comes into use: by then that driver and its layers have registered theirs.
use crate::contract::Device;
use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

/// How long the process's end is held up by a lane that is stuck in its driver.
const PATIENCE: Duration = Duration::from_secs(10);

static ENDING: AtomicBool = AtomicBool::new(false);
static LANES: Mutex<Lanes> = Mutex::new(Lanes { at_work: Vec::new(), drivers: Vec::new() });
/// Notified, under the lock, when a lane is no longer at work.
static LEFT: Condvar = Condvar::new();

struct Lanes {
    /// The device of each lane at work.
    at_work: Vec<Weak<dyn Device>>,
    /// For which there is a handler.
    drivers: Vec<String>,
}

/// That a lane is at work on its device.
pub(crate) struct AtWork(Weak<dyn Device>);

impl AtWork {
    /// Begins; at the end of the process it does not return.
    pub fn on(device: &Arc<dyn Device>) -> Self {
        let this = AtWork(Arc::downgrade(device));
        this.enter();
        this
    }
    /// Sleeps, which is no work.
    pub fn rest(&self, sleep: impl FnOnce()) {
        self.leave();
        sleep();
        self.enter();
    }
    /// Goes on, or stays here for good if the process ends. To be asked after the device's wakes were counted.
    pub fn pause(&self) {
        if is_near() {
            self.rest(|| {});
        }
    }
    fn enter(&self) {
        let mut lanes = lock();
        while is_near() {
            lanes = LEFT.wait(lanes).unwrap_or_else(PoisonError::into_inner);
        }
        lanes.at_work.push(self.0.clone());
    }
    fn leave(&self) {
        let mut lanes = lock();
        if let Some(place) = lanes.at_work.iter().position(|d| d.ptr_eq(&self.0)) {
            lanes.at_work.swap_remove(place);
        }
        LEFT.notify_all();
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Whether the process ends.
pub(crate) fn is_near() -> bool {
    ENDING.load(SeqCst)
}

/// Sees to it that no lane is at work any more when the driver of this device, which is open, ends.
pub(crate) fn guard(device: &dyn Device) {
    let driver = format!("{} {}", device.info().backend, device.info().driver);
    let mut lanes = lock();
    if !lanes.drivers.contains(&driver) {
        lanes.drivers.push(driver);
        allhands_cpu::at_exit(stop_lanes);
    }
}

extern "C" fn stop_lanes() {
    ENDING.store(true, SeqCst);
    let at_work = lock().at_work.clone();
    // Those that wait in a driver; not under the lock, which a lane takes to stop.
    at_work.iter().filter_map(Weak::upgrade).for_each(|device| device.wake());
    let _ = LEFT.wait_timeout_while(lock(), PATIENCE, |lanes| !lanes.at_work.is_empty());
}

fn lock() -> MutexGuard<'static, Lanes> {
    LANES.lock().unwrap_or_else(PoisonError::into_inner)
}
