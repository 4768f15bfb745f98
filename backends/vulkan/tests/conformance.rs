//! The contract's suite, on every device that is found or that `ALLHANDS_DEVICES` lists.
use allhands_contract::{Device, conformance};
use std::sync::{Arc, Mutex};

mod common;

/// Runs the suite, and returns what failed.
fn failures(device: &Arc<dyn Device>) -> Vec<String> {
    let name = format!("{} {} ({})", device.info().backend, device.info().id, device.info().name);
    let mut failed = Vec::new();
    conformance::run_all(device, |test, outcome| match outcome {
        Ok(ran) => println!("{name}: {test}: {ran:?}"),
        Err(why) => {
            println!("{name}: {test}: FAILED: {why}");
            failed.push(format!("{name}: {test}: {why}"));
        }
    });
    failed
}

fn at_once(devices: Vec<Arc<dyn Device>>) -> Vec<String> {
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for device in &devices {
            scope.spawn(|| failed.lock().unwrap().extend(failures(device)));
        }
    });
    failed.into_inner().unwrap()
}

#[test]
fn every_device_passes_the_suite() {
    let devices = common::selectors().into_iter().map(|selector| common::open(&selector) as Arc<dyn Device>);
    let failed: Vec<String> = devices.flat_map(|device| failures(&device)).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn all_devices_and_their_siblings_pass_it_at_once() {
    let mut devices: Vec<Arc<dyn Device>> = Vec::new();
    for selector in common::selectors() {
        let device = common::open(&selector);
        devices.extend([device.sibling().unwrap(), device]);
    }
    let failed = at_once(devices);
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
