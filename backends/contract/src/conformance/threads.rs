//! Calls from many threads at once, and devices side by side.
use super::{Outcome, Test, rig::*, table};
use crate::*;
use std::{sync::Arc, thread};

pub(super) const TESTS: &[Test] = table![threads_share_a_device, devices_work_side_by_side, waits_and_wakes_mix];

/// `rounds` of copies whose results depend on `seed`, each looked at.
fn work(device: &Arc<dyn Device>, seed: u64, rounds: u64) -> Check {
    const SIZE: usize = 4096;
    let rig = Rig::new(device)?;
    let (up, down) = (rig.buffer(SIZE as u64, Memory::Upload)?, rig.buffer(SIZE as u64, Memory::Download)?);
    let mut through = rig.buffer(SIZE as u64, Memory::Device)?;
    for round in 0..rounds {
        if round % 16 == 15 {
            device.destroy_buffer(through);
            through = rig.buffer(SIZE as u64, Memory::Device)?;
        }
        let content = pattern(seed * 10_000 + round, SIZE);
        let size = SIZE as u64;
        rig.write(up, &content)?;
        rig.run(&[copy(up, 0, through, 0, size), Op::Barrier, copy(through, 0, down, 0, size)])?;
        rig.holds(&format!("round {round} of thread {seed}"), down, &content)?;
    }
    Ok(())
}

fn all<'s>(threads: Vec<thread::ScopedJoinHandle<'s, Check>>) -> Check {
    threads.into_iter().try_for_each(|t| t.join().map_err(|_| "a thread panicked")?)
}

fn threads_share_a_device(device: &Arc<dyn Device>) -> Outcome {
    thread::scope(|scope| all((1..=2).map(|seed| scope.spawn(move || work(device, seed, 200))).collect()))?;
    passed()
}

fn devices_work_side_by_side(device: &Arc<dyn Device>) -> Outcome {
    let other = said("sibling", device.sibling())?;
    thread::scope(|scope| {
        all([device, &other].into_iter().zip(1..).map(|(d, seed)| scope.spawn(move || work(d, seed, 100))).collect())
    })?;
    passed()
}

fn waits_and_wakes_mix(device: &Arc<dyn Device>) -> Outcome {
    thread::scope(|scope| {
        let worker = scope.spawn(move || work(device, 3, 100));
        while !worker.is_finished() {
            device.wake();
            thread::yield_now();
        }
        all(vec![worker])
    })?;
    passed()
}
