//! How fast a device is by itself: what the cost model needs besides the links.
use crate::{
    contract::{
        BufferDesc, BufferId, DataType, Device, Kernel, Memory, Op, Point, Range, ReduceOp, Result, Submission,
        TimelineId, Waited,
    },
    schedule::cost::Speed,
};
use std::time::{Duration, Instant};

const BYTES: u64 = 1 << 20;
const ROUNDS: usize = 5;
/// A device that does not answer in this time is measured as slow, not waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// Times a few submissions, which also warms the device up. For a throwaway device.
pub(crate) fn measure(device: &dyn Device) -> Result<Speed> {
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
        let submit = self.best(&[])?;
        let copy = self.best(&[Op::Copy { src: a, dst: b }])?;
        let (op, dtype) = (ReduceOp::Sum, DataType::F32);
        let reduce = if self.device.limits().reduces(op, dtype) {
            let kernel = Kernel { stores: vec![b], sources: vec![a, b], op, dtype, finish: Some(2) };
            let time = self.best(&[Op::Kernel(kernel)])?;
            2.0 * BYTES as f64 / (time - submit).max(1e-9)
        } else {
            f64::MIN_POSITIVE
        };
        Ok(Speed { submit, copy: BYTES as f64 / (copy - submit).max(1e-9), reduce, overlap: false })
    }
    /// Seconds from submit to the end of a wait: the best of a few, after one to warm up.
    fn best(&mut self, ops: &[Op]) -> Result<f64> {
        let mut best = f64::INFINITY;
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
                best = best.min(start.elapsed().as_secs_f64());
            }
            if self.device.limits().resubmit {
                self.device.destroy_commands(commands);
            }
        }
        Ok(best)
    }
}
