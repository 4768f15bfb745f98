//! What a call costs the host once things have settled: calls into the driver, counted where its functions are looked
//! up, and allocations, counted in the allocator. Alone in its binary: the allocator is the process's.
mod common;

use allhands::{Algorithm, Buffer, Collective, DataType, Device, ReduceOp};
use common::{builder, ranks};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// A call of two ranks may cost so much, on whichever software driver and by whichever algorithm: driver calls of both
/// ranks' devices, which only native Vulkan counts, and allocations of all threads. A device that records anew for every
/// submit is allowed more of them.
const DRIVER_CALLS: f64 = 96.0;
const ALLOCATIONS: f64 = 96.0;
const ALLOCATIONS_RECORDING: f64 = 320.0;

static COUNT: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: the system's allocator, whose contract is the caller's, does everything.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Whether a wait looks at a timeline again and again before it sleeps, as it does where a sleep costs as much: how
/// often is the machine's affair.
fn spins() -> bool {
    #[cfg(feature = "vulkan")]
    if common::names().iter().any(|name| name.starts_with("vulkan")) {
        return allhands_vulkan::adapters().iter().any(|adapter| !adapter.software);
    }
    false
}

#[test]
fn a_settled_call_costs_the_host_little() {
    const WARM: u64 = 50;
    const CALLS: u64 = 400;
    let devices = ranks(2);
    let comm = builder(&devices).build().unwrap();
    let buffers: Vec<Buffer> = devices.iter().map(|d| Buffer::new(d, DataType::F32, 4_096).unwrap()).collect();
    let records = devices.iter().any(|d| !d.limits().resubmit);
    let most = if records { ALLOCATIONS_RECORDING } else { ALLOCATIONS };
    let driver_calls = |devices: &[Arc<dyn Device>]| devices.iter().map(|d| d.counters().driver_calls).sum::<u64>();
    for algorithm in [Algorithm::OneShot, Algorithm::TwoShot, Algorithm::Host] {
        let call = || {
            let call = comm.call(Collective::AllReduce, Some(ReduceOp::Sum), &buffers).algorithm(Some(algorithm));
            call.start().unwrap().wait().unwrap();
        };
        (0..WARM).for_each(|_| call());
        let before = (driver_calls(&devices), COUNT.load(Relaxed));
        (0..CALLS).for_each(|_| call());
        let after = (driver_calls(&devices), COUNT.load(Relaxed));
        let a_call = |n: u64| n as f64 / CALLS as f64;
        let (calls, allocations) = (a_call(after.0 - before.0), a_call(after.1 - before.1));
        println!("all_reduce by {algorithm}: {calls:.1} driver calls, {allocations:.1} allocations");
        assert!(calls <= DRIVER_CALLS || spins(), "{algorithm}: {calls} driver calls, {DRIVER_CALLS} allowed");
        assert!(allocations <= most, "{algorithm}: {allocations} allocations, {most} allowed");
    }
}
