//! What a call costs in calls of the driver.
use allhands_contract::*;

mod common;
use common::*;

#[test]
fn a_submit_is_one_call_of_the_driver_whatever_it_is_of() {
    with_devices(|device| {
        let device: &dyn Device = &*device;
        let (x, y) = (buffer(device, 4096, Memory::Device, false), buffer(device, 4096, Memory::Device, false));
        let ops = [Op::Copy { src: whole(device, x), dst: whole(device, y) }];
        let commands = [device.prepare(&ops).unwrap(), device.prepare(&[]).unwrap()];
        let (gate, timeline) = (device.create_timeline(false).unwrap(), device.create_timeline(false).unwrap());
        for round in 0..10 {
            let waits = [Point { timeline: gate, value: round + 1 }];
            let submission = |i: u64| Submission {
                commands: (i < 3).then(|| commands[i as usize % 2]),
                waits: if i == 0 { &waits } else { &[] },
                signal: Point { timeline, value: 4 * round + i + 1 },
            };
            let submissions = [0, 1, 2, 3].map(submission);
            let before = device.counters();
            device.submit(&submissions).unwrap();
            let after = device.counters();
            assert_eq!(after.driver_calls - before.driver_calls, 1, "round {round}");
            assert_eq!(after.submits - before.submits, 4);
            device.signal(waits[0]).unwrap();
            wait(device, submissions[3].signal);
            // To open a gate is to look at it and to signal it; to wait is to wait and to look, and to look first
            // where that is quicker.
            assert_eq!(device.value(timeline), Ok(4 * round + 4));
        }
        let before = device.counters().driver_calls;
        assert_eq!(
            device.wait_any(&[Point { timeline, value: 3 }], device.wakes(), std::time::Instant::now()),
            Ok(Waited::Reached)
        );
        assert_eq!(device.counters().driver_calls, before, "what was seen to be reached is not asked for again");
    });
}
