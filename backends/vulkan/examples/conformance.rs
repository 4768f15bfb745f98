//! The contract's suite on one Vulkan device: `conformance [DEVICE [PREFIX]...]`.
//!
//! The device is a number, a PCI address, a UUID or a name. Tests whose names begin with a prefix are left out: some take
//! too long under emulation. Exit code 1 if any fails.

use allhands_contract::conformance::{self, Ran};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let selector = arguments.next().unwrap_or_else(|| "0".into());
    let left_out: Vec<String> = arguments.collect();
    let device = match allhands_vulkan::open(&selector) {
        Ok(device) => device,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::FAILURE;
        }
    };
    println!("{} ({})", device.info().name, device.info().driver);
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for test in conformance::tests() {
        if left_out.iter().any(|prefix| test.name.starts_with(prefix.as_str())) {
            println!("{}: left out", test.name);
            skipped += 1;
            continue;
        }
        let outcome = conformance::run(test, &device);
        let count = match &outcome {
            Ok(Ran::Passed) => &mut passed,
            Ok(Ran::NotApplicable(_)) => &mut skipped,
            Err(_) => &mut failed,
        };
        *count += 1;
        match outcome {
            Ok(ran) => println!("{}: {ran:?}", test.name),
            Err(why) => println!("{}: FAILED: {why}", test.name),
        }
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
