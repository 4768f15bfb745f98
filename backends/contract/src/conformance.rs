//! The suite that every backend passes.
//!
//! A [`Test`] is a function over a device. It needs nothing but the trait, makes what it uses, gives it back, and
//! says in its failure what was expected. Data is a hash of seed and address, so that a byte in the wrong place, from
//! another attempt or never written is seen. Where a device lacks what a test is about, the test says so: it is
//! [`Ran::NotApplicable`], never passed.
//!
//! | module | asks |
//! |---|---|
//! | `copies` | bytes arrive, in order, and only where they were sent |
//! | `reductions` | every kernel gives the bits that `fold`, the reference in scalar code, gives |
//! | `refusals` | what is wrong is refused with the right error, before anything is written |
//! | `timelines` | values, waits, deadlines, wakes |
//! | `gates` | submissions that wait for what nobody has signalled yet |
//! | `lifetimes` | handles, destruction in flight, counters, siblings |
//! | `threads` | calls from many threads, devices side by side |
//! | `sharing` | memory that host and devices share |
//!
//! A backend's integration test calls [`run_all`] and prints a line for each test.
use crate::Device;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

mod copies;
mod fold;
mod gates;
mod lifetimes;
mod reductions;
mod refusals;
mod rig;
mod sharing;
mod threads;
mod timelines;

/// That a test did not fail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ran {
    /// The device did what the contract says.
    Passed,
    /// The device has not what the test is about; why.
    NotApplicable(String),
}

/// How a test ended; on failure, what was expected and what came.
pub type Outcome = std::result::Result<Ran, String>;

/// One question to a device.
#[derive(Clone, Copy, Debug)]
pub struct Test {
    /// What it asks; unique.
    pub name: &'static str,
    /// Asks it. The device must not be in use by others, except by other tests that do not look at its counters.
    pub run: fn(&Arc<dyn Device>) -> Outcome,
}

/// Every test, in the order in which they are best read when several fail: what others build on comes first.
pub fn tests() -> impl Iterator<Item = &'static Test> {
    let modules: [&'static [Test]; 9] = [
        lifetimes::BASICS,
        copies::TESTS,
        timelines::TESTS,
        refusals::TESTS,
        reductions::TESTS,
        sharing::TESTS,
        gates::TESTS,
        lifetimes::TESTS,
        threads::TESTS,
    ];
    modules.into_iter().flatten()
}

/// Runs every test on `device`, telling `report` of each as it ends. A panic is a failure of its test.
pub fn run_all(device: &Arc<dyn Device>, mut report: impl FnMut(&'static str, &Outcome)) {
    tests().for_each(|test| report(test.name, &run(test, device)));
}

/// Runs one test on `device`. A panic is a failure.
pub fn run(test: &Test, device: &Arc<dyn Device>) -> Outcome {
    catch_unwind(AssertUnwindSafe(|| (test.run)(device))).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str);
        let words = words.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("a panic: {}", words.unwrap_or("without words")))
    })
}

/// A table of tests named after their functions.
macro_rules! table {
    ($($name:ident),* $(,)?) => { &[$($crate::conformance::Test { name: stringify!($name), run: $name }),*] };
}
use table;
