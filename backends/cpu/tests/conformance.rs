//! The suite of the contract, on a device in each mode and on one that is restricted to what wgpu-hal offers.
use allhands_contract::{
    Clock, Device, Limits,
    conformance::{Ran, run_all},
};
use allhands_cpu::{CpuDevice, Mode, Options};
use std::sync::Arc;

/// Runs the suite; no test may fail, and what is not applicable must be so for a reason that `may_lack` grants.
fn conforms(options: Options, may_lack: fn(&str) -> bool) {
    let device: Arc<dyn Device> = CpuDevice::open(options).expect("a cpu device");
    let mut failed = Vec::new();
    run_all(&device, |name, outcome| match outcome {
        Ok(Ran::Passed) => println!("{name}: passed"),
        Ok(Ran::NotApplicable(why)) if may_lack(why) => println!("{name}: not applicable, {why}"),
        Ok(Ran::NotApplicable(why)) => failed.push(format!("{name}: not asked, {why}")),
        Err(why) => failed.push(format!("{name}: {why}")),
    });
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn a_threaded_device_conforms() {
    conforms(Options::default(), |why| why.contains("clock") || why.contains("every pair"));
}

#[test]
fn a_device_on_a_virtual_clock_lacks_nothing() {
    conforms(Options { clock: Clock::manual(), ..Options::default() }, |why| why.contains("every pair"));
}

#[test]
fn an_inline_device_conforms() {
    conforms(Options { mode: Mode::Inline, ..Options::default() }, |why| {
        ["clock", "gated", "every pair"].iter().any(|word| why.contains(word))
    });
}

#[test]
fn a_device_restricted_to_what_wgpu_hal_offers_conforms() {
    let restrict = |limits: &mut Limits| {
        limits.gated = false;
        limits.resubmit = false;
        (limits.mapped, limits.unified) = (false, false);
        limits.max_sources = 2;
        limits.max_bindings = 4;
        limits.write_granularity = 4;
        limits.copy_granularity = 4;
        limits.memory_export.clear();
        limits.memory_import.clear();
    };
    conforms(Options { restrict: Some(restrict), ..Options::default() }, |_| true);
}
