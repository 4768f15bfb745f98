//! Which devices the tests run on, and what they share.
#![allow(dead_code)] // each test binary has its own copy of this module
use allhands_contract::*;
use allhands_vulkan::{Selector, VulkanDevice, adapters};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The physical devices that `ALLHANDS_DEVICES` lists (`vulkan:0,vulkan:1`; other backends' names are passed over);
/// without it, all that are found. Each must open.
pub fn selectors() -> Vec<Selector> {
    let Ok(list) = std::env::var("ALLHANDS_DEVICES") else {
        return adapters().iter().map(|a| Selector::Index(a.index)).collect();
    };
    let ours = list.split(',').map(str::trim).filter_map(|name| match name.split_once(':') {
        Some(("vulkan", selector)) => Some(selector.parse().expect("every text is a selector")),
        _ => (name == "vulkan").then_some(Selector::Index(0)),
    });
    ours.collect()
}

pub fn open(selector: &Selector) -> Arc<VulkanDevice> {
    VulkanDevice::open(selector).unwrap_or_else(|e| panic!("{e}"))
}

/// The right to count what the process has open: tests that open something take turns.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `test` on each, alone, naming it where it fails.
pub fn with_devices(test: impl Fn(Arc<VulkanDevice>)) {
    let _alone = alone();
    for selector in selectors() {
        let device = open(&selector);
        println!("{selector:?}: {}, {}", device.info().name, device.info().driver);
        test(device);
    }
}

/// Bytes that depend on `seed` and on their address, never zeros.
pub fn pattern(seed: u64, size: usize) -> Vec<u8> {
    let byte = |i: u64| (seed.wrapping_mul(0x9e37_79b9) ^ i.wrapping_mul(0x85eb_ca6b) ^ i >> 9) as u8 | 1;
    (0..size as u64).map(byte).collect()
}

pub fn buffer(device: &dyn Device, size: usize, memory: Memory, exportable: bool) -> BufferId {
    device.create_buffer(&BufferDesc { size: size as u64, memory, exportable }).unwrap()
}

pub fn whole(device: &dyn Device, buffer: BufferId) -> Range {
    Range::new(buffer, 0, device.size(buffer).unwrap())
}

pub fn read(device: &dyn Device, buffer: BufferId) -> Vec<u8> {
    let range = whole(device, buffer);
    let mut bytes = vec![0; range.size as usize];
    device.read(range, &mut bytes).unwrap();
    bytes
}

pub fn wait(device: &dyn Device, point: Point) {
    let deadline = Instant::now() + Duration::from_secs(60);
    assert_eq!(device.wait_any(&[point], device.wakes(), deadline), Ok(Waited::Reached));
}

/// Prepares `ops`, submits them on a timeline of their own, and waits.
pub fn run(device: &dyn Device, ops: &[Op]) {
    let timeline = device.create_timeline(false).unwrap();
    let commands = device.prepare(ops).unwrap();
    let signal = Point { timeline, value: 1 };
    device.submit(&[Submission { commands: Some(commands), waits: &[], signal }]).unwrap();
    wait(device, signal);
    device.destroy_commands(commands);
    device.destroy_timeline(timeline);
}

/// File descriptors that this process has open.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
