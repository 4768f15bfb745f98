//! `allhands staging`: what a long message leaves behind for the short ones after it, as when a model reads a prompt and
//! then writes word by word.
//!
//! Where every signal of a timeline costs in proportion to the imported memory that is resident, staging left over from
//! one long message slows down thousands of short calls. This runs short calls, a long one, and short calls again, with
//! the staging that the library has and with one that only grows; then short and long ones by turns, which must allocate
//! nothing once both have run. Two cpu ranks stand for such a device, on a virtual clock, which
//! adds up what each of them spends: the same figures on any machine.
use crate::{Failure, args, say};
use allhands::{
    Algorithm, Buffer, Collective, Communicator, DataType, Device, Part, Path, ReduceOp, Span,
    contract::Clock,
    devices::{self, DeviceName},
};
use allhands_cpu::{CpuDevice, Emulation, Options};
use std::{fmt, sync::Arc, time::Duration};

#[derive(clap::Args, Debug)]
pub struct Staging {
    /// Where the ranks are [default: cpu ranks on a virtual clock that imitate a costly device]
    #[arg(long)]
    device: Option<DeviceName>,
    /// How many ranks
    #[arg(short = 'g', long, default_value_t = 2)]
    ranks: usize,
    /// Bytes of a short message
    #[arg(long, value_parser = args::size, default_value = "20K")]
    short: u64,
    /// Bytes of the long messages, each followed by short ones
    #[arg(long, value_parser = args::size, value_delimiter = ',', default_value = "10M,256M")]
    long: Vec<u64>,
    /// Bytes of the longer of those that take turns
    #[arg(long, value_parser = args::size, default_value = "2M")]
    turns: u64,
    /// How many short messages follow each other; staging goes after 64 of them, less than one in a hundred of 6500
    #[arg(short = 'n', long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    calls: u64,
}

/// What a signal costs for each MiB: ten of them turn a call of some 30 us into one of 770.
const VISIBILITY: Duration = Duration::from_micros(74);
const SUBMIT: Duration = Duration::from_micros(8);
/// Runs of short calls without a long one before them.
const CONTROLS: usize = 3;
/// By then calls that take turns have all the memory that they need.
const SETTLED: u64 = 8;

/// Times of short calls.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Times {
    p50: Duration,
    p99: Duration,
    max: Duration,
}

/// What was measured with one kind of staging.
struct Outcome {
    before: Times,
    /// After each long message.
    after: Vec<Times>,
}

/// A communicator, and a buffer for each rank.
struct Rig {
    comm: Communicator,
    buffers: Vec<Buffer>,
    clock: Clock,
}

impl Staging {
    pub fn run(&self) -> Result<(), Failure> {
        let mut missed = Vec::new();
        say(format_args!(
            "p50 / p99 / longest of {} all-reduces of {} bytes, {} ranks",
            self.calls, self.short, self.ranks
        ))?;
        let controls = self.controls()?;
        for times in &controls {
            say(format_args!("{:<54} {times}", "control"))?;
        }
        for grow_only in [false, true] {
            let name = if grow_only { "one pool that only grows" } else { "given back" };
            let outcome = self.outcome(grow_only)?;
            say(format_args!("{:<54} {}", format!("{name}: before"), outcome.before))?;
            for (bytes, after) in self.long.iter().zip(&outcome.after) {
                let flat = after.flat(&outcome.before, &controls);
                say(format_args!("{:<54} {after}", format!("{name}: after one of {bytes} bytes")))?;
                if flat == grow_only && self.device.is_none() {
                    missed.push(format!(
                        "{name}: after {bytes} bytes short calls are {}",
                        if flat { "as before" } else { "slower" }
                    ));
                }
            }
        }
        let made = self.by_turns()?;
        let told =
            made.map_or("a number of buffers that these devices do not count".into(), |n| format!("{n} buffers"));
        let Staging { calls, short, turns, .. } = self;
        say(format_args!(
            "{calls} calls of {short} and {turns} bytes by turns: after the first {SETTLED} they made {told}"
        ))?;
        if let Some(made @ 1..) = made {
            missed.push(format!("calls by turns made {made} buffers"));
        }
        if missed.is_empty() { Ok(()) } else { Err(Failure::Run(missed.join("; "))) }
    }

    /// Short calls of communicators that never had a long one.
    fn controls(&self) -> Result<Vec<Times>, Failure> {
        (0..CONTROLS).map(|_| self.rig(false)?.short_calls(self)).collect()
    }
    /// Short calls before and after each long one.
    fn outcome(&self, grow_only: bool) -> Result<Outcome, Failure> {
        let rig = self.rig(grow_only)?;
        let before = rig.short_calls(self)?;
        let mut after = Vec::new();
        for bytes in &self.long {
            rig.call(*bytes)?;
            after.push(rig.short_calls(self)?);
        }
        Ok(Outcome { before, after })
    }
    /// How many buffers short and longer calls by turns make, once they have settled; `None` if nobody counts.
    fn by_turns(&self) -> Result<Option<u64>, Failure> {
        let rig = self.rig(false)?;
        let made = || rig.buffers.iter().map(|b| b.device().counters().buffers).sum::<u64>();
        let mut settled = 0;
        for call in 0..self.calls {
            if call == SETTLED {
                settled = made();
            }
            rig.call(if call % 2 == 0 { self.short } else { self.turns })?;
        }
        Ok(if made() > 0 { Some(made() - settled) } else { None })
    }
    fn rig(&self, grow_only: bool) -> Result<Rig, Failure> {
        let clock = if self.device.is_some() { Clock::real() } else { Clock::manual() };
        let emulation = Emulation { submit_latency: SUBMIT, visibility_per_mib: VISIBILITY, ..Emulation::default() };
        let open = |_| -> allhands::Result<Arc<dyn Device>> {
            match &self.device {
                Some(name) => devices::open(name),
                None => Ok(CpuDevice::open(Options { clock: clock.clone(), emulation, ..Options::default() })?),
            }
        };
        let ranks = (0..self.ranks).map(open).collect::<allhands::Result<Vec<_>>>()?;
        let mut builder = Communicator::builder().clock(clock.clone()).grow_only_staging(grow_only);
        if self.device.is_none() {
            // Measured speeds are no guide on a clock that stands still between submissions.
            builder = builder.path(Some(Path::SharedHost)).algorithm(Some(Algorithm::OneShot));
        }
        let comm = ranks.iter().fold(builder, |b, d| b.rank(d.clone())).build()?;
        let most =
            self.long.iter().chain([&self.short, &self.turns]).max().map_or(4, |bytes| bytes.next_multiple_of(4));
        let buffer = |device| Buffer::new(device, DataType::F32, most / 4);
        let buffers = ranks.iter().map(buffer).collect::<allhands::Result<_>>()?;
        Ok(Rig { comm, buffers, clock })
    }
}

impl Rig {
    /// One call, and how long it took.
    fn call(&self, bytes: u64) -> allhands::Result<Duration> {
        let part = |buffer: &Buffer| Part::in_place(Span::of(buffer.id(), DataType::F32, 0, bytes.div_ceil(4)));
        let parts: Vec<Part> = self.buffers.iter().map(part).collect();
        let start = self.clock.now();
        self.comm.call(Collective::AllReduce, Some(ReduceOp::Max), parts).start()?.wait()?;
        Ok(self.clock.now() - start)
    }
    /// So many short calls, the results of the last of them checked.
    fn short_calls(&self, settings: &Staging) -> Result<Times, Failure> {
        let values = || (0..).map(|rank| rank as f32).zip(&self.buffers);
        let mut times = (1..settings.calls).map(|_| self.call(settings.short)).collect::<allhands::Result<Vec<_>>>()?;
        for (value, buffer) in values() {
            buffer.write(&vec![value; settings.short.div_ceil(4) as usize])?;
        }
        times.push(self.call(settings.short)?);
        let most = (self.buffers.len() - 1) as f32;
        for (rank, buffer) in values() {
            let mut got = vec![0.0_f32; settings.short.div_ceil(4) as usize];
            buffer.read_bytes(0, bytemuck::cast_slice_mut(&mut got))?;
            if let Some(index) = got.iter().position(|v| *v != most) {
                return Err(Failure::Run(format!("rank {rank}, element {index}: {} instead of {most}", got[index])));
            }
        }
        times.sort();
        let at = |percent: usize| times[(times.len() * percent).div_ceil(100) - 1];
        Ok(Times { p50: at(50), p99: at(99), max: at(100) })
    }
}

impl Times {
    /// Whether these, after a long message, are what they were before: the median within a twentieth, the 99th percentile
    /// no longer than that of the slowest control.
    fn flat(&self, before: &Times, controls: &[Times]) -> bool {
        self.p50 <= before.p50.mul_f64(1.05) && controls.iter().any(|c| self.p99 <= c.p99)
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [p50, p99, max] = [self.p50, self.p99, self.max].map(|t| t.as_secs_f64() * 1e6);
        write!(f, "{p50:>10.1} {p99:>10.1} {max:>10.1} us")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A long message costs at most the calls until its staging is given back: fewer than one in a hundred of these.
    const CALLS: u64 = 7000;

    fn settings(calls: u64, long: u64) -> Staging {
        Staging { device: None, ranks: 2, short: 20 << 10, long: vec![long], turns: 2 << 20, calls }
    }

    #[test]
    fn short_calls_are_as_fast_after_a_long_one_as_before() {
        let settings = settings(CALLS, 256 << 20);
        let controls = settings.controls().unwrap();
        let Outcome { before, after } = settings.outcome(false).unwrap();
        assert!(before.p50 >= 4 * SUBMIT, "{before}");
        assert!(after[0].flat(&before, &controls), "before {before}, after {}", after[0]);
    }

    #[test]
    fn with_staging_that_only_grows_they_are_not() {
        let Outcome { before, after } = settings(200, 256 << 20).outcome(true).unwrap();
        assert!(after[0].p50 > 10 * before.p50, "before {before}, after {}", after[0]);
    }

    #[test]
    fn calls_by_turns_allocate_nothing() {
        assert_eq!(settings(10_000, 0).by_turns().unwrap(), Some(0));
    }
}
