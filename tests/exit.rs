//! Programs that end: whatever is pending, dropped or not, no lane is in a driver when that driver's own handlers of
//! `exit` run. Each case is a process of its own, this program started again.
mod common;
#[macro_use]
#[path = "common/delegate.rs"]
mod delegate;

use allhands::{
    Buffer, Device, Part, ReduceOp,
    contract::{Limits, Point, Result, Waited},
};
use allhands_cpu::{CpuDevice, Options, at_exit};
use common::builder;
use std::{
    process::Command,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

/// The calls of its driver that have not returned, and whether the driver has ended.
static INSIDE: AtomicU32 = AtomicU32::new(0);
static ENDED: AtomicBool = AtomicBool::new(false);
/// A lane that does not wait in so long never will.
const PATIENCE: Duration = Duration::from_secs(60);
/// Those of them that wait.
static WAITING: Mutex<u32> = Mutex::new(0);
static BEGUN: Condvar = Condvar::new();

/// A device whose driver does not stand a call once it has ended.
struct Fragile {
    inner: Arc<dyn Device>,
}

struct Inside;

impl Inside {
    fn enter() -> Self {
        INSIDE.fetch_add(1, SeqCst);
        if ENDED.load(SeqCst) {
            eprintln!("a call after the driver's end");
            std::process::abort();
        }
        Inside
    }
}
impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, SeqCst);
    }
}

impl Device for Fragile {
    fn sibling(&self) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(Fragile { inner: self.inner.sibling()? }))
    }
    fn wait_any(&self, points: &[Point], wakes: u64, deadline: Instant) -> Result<Waited> {
        let _inside = Inside::enter();
        *WAITING.lock().unwrap() += 1;
        BEGUN.notify_all();
        let waited = self.inner.wait_any(points, wakes, deadline);
        *WAITING.lock().unwrap() -= 1;
        waited
    }
    fn destroy_timeline(&self, timeline: allhands::contract::TimelineId) {
        let _inside = Inside::enter();
        self.inner.destroy_timeline(timeline);
    }
    delegate!(info limits counters status create_buffer destroy_buffer watch size read write export import create_timeline);
    delegate!(value signal wakes wake prepare destroy_commands submit);
}

/// The driver's own handler, registered before any of the library's.
extern "C" fn driver_ends() {
    ENDED.store(true, SeqCst);
    let inside = INSIDE.load(SeqCst);
    if inside > 0 {
        eprintln!("{inside} calls are in the driver as it ends");
        std::process::abort();
    }
}

/// What a program does last.
fn program(case: &str) {
    at_exit(driver_ends);
    // Where host workers reach the callers' memory, the lane of a rank that has arrived sleeps.
    let direct = case.contains("direct");
    let restrict = if direct { None } else { Some((|limits| limits.unified = false) as fn(&mut Limits)) };
    let open = || -> Arc<dyn Device> {
        Arc::new(Fragile { inner: CpuDevice::open(Options { restrict, ..Options::default() }).unwrap() })
    };
    let devices = [open(), open()];
    let buffers: Vec<Buffer> = devices.iter().map(|d| Buffer::from_slice(d, &[1_u32; 64]).unwrap()).collect();
    let comm = builder(&devices).build().unwrap();
    comm.all_reduce(&buffers, ReduceOp::Sum).unwrap().wait().unwrap();
    if case.contains("pending") {
        // Waits for what nobody will ever signal.
        let never = Point { timeline: devices[0].create_timeline(false).unwrap(), value: 1 };
        let parts = [Part::from(&buffers[0]).after([never]), Part::from(&buffers[1])];
        comm.all_reduce(parts, ReduceOp::Sum).unwrap();
        let lanes = if direct { 1 } else { 2 };
        let all = BEGUN.wait_timeout_while(WAITING.lock().unwrap(), PATIENCE, |waiting| *waiting < lanes).unwrap();
        assert!(!all.1.timed_out(), "each lane that has something to wait for waits in its driver");
    }
    if case.contains("dropped") {
        drop(comm);
        if !case.contains("pending") {
            assert_eq!(Arc::strong_count(&devices[0]), 2, "nothing but the buffer keeps a device when drop returns");
        }
    } else {
        std::mem::forget(comm);
    }
}

#[test]
fn lanes_are_out_of_the_driver_when_it_ends() {
    const CASE: &str = "ALLHANDS_TEST_EXIT";
    if let Ok(case) = std::env::var(CASE) {
        program(&case);
        std::process::exit(0);
    }
    for case in
        ["dropped", "kept", "pending dropped", "pending kept", "direct, pending dropped", "direct, pending kept"]
    {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.env(CASE, case).arg("--nocapture").output().unwrap();
        assert!(output.status.success(), "{case}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
}
