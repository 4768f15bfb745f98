//! How fast a device is by itself: what the cost model needs besides the links.
use crate::{
    contract::{
        BufferDesc, BufferId, DataType, Device, Kernel, Memory, Op, Point, Range, ReduceOp, Result, Submission,
        TimelineId, Waited,
    },
    schedule::cost::Speed,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const BYTES: u64 = 1 << 20;
const LEAST: u64 = 256;
const ROUNDS: usize = 5;
/// A device that does not answer in this time is measured as slow, not waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// Times a few submissions of each while the others do the same, which also warms them up. For throwaway devices.
pub(crate) fn measure(devices: &[Arc<dyn Device>]) -> Result<Vec<Speed>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = devices.iter().map(|device| scope.spawn(|| one(&**device))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// The same, of one that has the machine for itself.
pub(crate) fn one(device: &dyn Device) -> Result<Speed> {
    let desc = BufferDesc { size: BYTES, memory: Memory::Device, exportable: false };
    let buffers = [device.create_buffer(&desc)?, device.create_buffer(&desc)?];
    let timeline = device.create_timeline(false)?;
    let result = Bench { device, timeline, value: 0 }.all(buffers);
    buffers.into_iter().for_each(|b| device.destroy_buffer(b));
    device.destroy_timeline(timeline);
    result
}

struct Bench<'a> {
    device: &'a dyn Device,
    timeline: TimelineId,
    value: u64,
}

impl Bench<'_> {
    fn all(&mut self, buffers: [BufferId; 2]) -> Result<Speed> {
        let [a, b] = buffers.map(|b| Range::new(b, 0, BYTES));
        // Something to read: pages that were never written cost less.
        self.device.write(a, &vec![0x3f; BYTES as usize])?;
        self.device.write(b, &vec![0x3f; BYTES as usize])?;
        let submit = self.typical(&[])?;
        let copy = self.typical(&[Op::Copy { src: a, dst: b }])?;
        let (op, dtype) = (ReduceOp::Sum, DataType::F32);
        let (mut launch, mut reduce) = (0.0, f64::MIN_POSITIVE);
        if self.device.limits().reduces(op, dtype) {
            let mut time = |size: u64| {
                let [a, b] = [a, b].map(|range| Range { size, ..range });
                let (scales, wire) = (Vec::new(), None);
                let kernel = Kernel { stores: vec![b], sources: vec![a, b], op, dtype, finish: Some(2), scales, wire };
                self.typical(&[Op::Kernel(kernel)])
            };
            let (least, most) = (time(LEAST)?, time(BYTES)?);
            launch = (least - submit).max(0.0);
            reduce = 2.0 * (BYTES - LEAST) as f64 / (most - least).max(1e-9);
        }
        Ok(Speed { submit, launch, copy: BYTES as f64 / (copy - submit).max(1e-9), reduce, overlap: false })
    }
    /// Seconds from submit to the end of a wait: the median of a few, after one to warm up.
    fn typical(&mut self, ops: &[Op]) -> Result<f64> {
        let mut times = Vec::with_capacity(ROUNDS);
        for round in 0..=ROUNDS {
            let commands = self.device.prepare(ops)?;
            self.value += 1;
            let signal = Point { timeline: self.timeline, value: self.value };
            let start = Instant::now();
            self.device.submit(&[Submission { commands: Some(commands), waits: &[], signal }])?;
            let deadline = start + PATIENCE;
            while Instant::now() < deadline {
                if self.device.wait_any(&[signal], self.device.wakes(), deadline)? == Waited::Reached {
                    break;
                }
            }
            if round > 0 {
                times.push(start.elapsed().as_secs_f64());
            }
            if self.device.limits().resubmit {
                self.device.destroy_commands(commands);
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[ROUNDS / 2])
    }
}
