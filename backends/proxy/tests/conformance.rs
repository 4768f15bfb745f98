//! The contract's suite, on every device that is found or that `ALLHANDS_DEVICES` lists.
use allhands_contract::{Device, conformance};
use std::sync::{Arc, Mutex};

mod common;

/// Runs the suite, and returns what failed.
fn failures(device: &Arc<dyn Device>) -> Vec<String> {
    let name = format!("{} {}", device.info().backend, device.info().id);
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

#[test]
fn every_device_passes_the_suite() {
    common::with_devices(|device| {
        let failed = failures(device);
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    });
}

#[test]
fn two_devices_of_one_adapter_pass_it_at_once() {
    common::with_devices(|first| {
        let second = first.sibling().unwrap();
        let failed = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for device in [first, &second] {
                scope.spawn(|| failed.lock().unwrap().extend(failures(device)));
            }
        });
        let failed = failed.into_inner().unwrap();
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    });
}
