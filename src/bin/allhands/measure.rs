//! One row's calls: filled, poisoned, timed, and every repetition checked to the last bit.
use crate::{
    Failure,
    kind::Job,
    reference::{self, Value},
    verify::{GUARD, Image, Wrong},
};
use allhands::{Algorithm, Buffer, Communicator, DataType, Part, Pending, ReduceOp, Report, Span};
use std::time::{Duration, Instant};

/// How often, and how.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub iters: u32,
    pub warmup: u32,
    /// Whether every timed repetition is checked.
    pub check: bool,
    /// Whether each call is waited for before the next is made.
    pub blocking: bool,
}

/// A door for tests: one bit of a result is flipped before it is checked, and must then be reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flip {
    pub rank: u32,
    /// Element of the rank's output.
    pub index: u64,
    /// Of the element, the lowest first.
    pub bit: u64,
}

impl std::str::FromStr for Flip {
    type Err = &'static str;
    /// `RANK:INDEX:BIT`.
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let numbers: Option<Vec<u64>> = s.split(':').map(|word| word.parse().ok()).collect();
        match numbers.as_deref() {
            Some(&[rank, index, bit]) if rank <= u32::MAX.into() => Ok(Flip { rank: rank as u32, index, bit }),
            _ => Err("right is RANK:INDEX:BIT"),
        }
    }
}

/// What the repetitions of a row gave.
pub struct Sample {
    /// Of one call, on average.
    pub time: Duration,
    /// From making each call to knowing that it is done, ascending.
    pub latencies: Vec<Duration>,
    /// `None` where nothing was checked.
    pub wrong: Option<Wrong>,
    pub report: Report,
}

/// Buffers and images, reused from row to row.
pub struct Bench {
    settings: Settings,
    /// Once, in the first result that is checked.
    flip: Option<Flip>,
    /// A set for each call that may be in flight.
    sets: Vec<Set>,
    scratch: Scratch,
}

/// The memory of one call.
#[derive(Default)]
struct Set {
    ranks: Vec<Seat>,
}

/// The memory of one rank in one call.
#[derive(Default)]
struct Seat {
    /// What the input's buffer was filled with; in place, the one buffer.
    written: Image,
    /// Input (or the one buffer), output.
    buffers: [Option<Buffer>; 2],
}

#[derive(Default)]
struct Scratch {
    got: Image,
    want: Image,
    folded: Image,
    /// Rank 0's result, where others must have the same bits.
    first: Image,
}

/// A row of one placement.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    pub comm: &'a Communicator,
    pub job: Job,
    pub op: Option<ReduceOp>,
    pub in_place: bool,
}

/// Bytes of buffers and calls that may be in flight without waiting.
const FLIGHT_BYTES: u64 = 256 << 20;
const FLIGHT_CALLS: u64 = 32;

impl Bench {
    pub fn new(settings: Settings, flip: Option<Flip>) -> Self {
        Bench { settings, flip, sets: Vec::new(), scratch: Scratch::default() }
    }

    /// Runs a case on elements of `T`.
    pub fn run<T: Value>(&mut self, case: Case<'_>) -> Result<Sample, Failure> {
        let Settings { iters, warmup, check, blocking } = self.settings;
        let job = &case.job;
        let call_bytes = 2 * u64::from(job.ranks) * Image::size::<T>(job.elements());
        let depth = if blocking { 1 } else { (FLIGHT_BYTES / call_bytes).clamp(1, FLIGHT_CALLS.min(iters.into())) };
        if self.sets.len() < depth as usize {
            self.sets.resize_with(depth as usize, Set::default);
        }
        let Bench { sets, scratch, flip, .. } = self;
        let sets = &mut sets[..depth as usize];
        for set in &mut *sets {
            set.fill::<T>(case, u32::MAX, &mut scratch.want)?;
        }
        for _ in 0..warmup {
            sets[0].start::<T>(case)()?.wait()?;
        }

        let mut wrong = Wrong::default();
        let mut latencies = Vec::with_capacity(iters as usize);
        let mut total = Duration::ZERO;
        let mut report = None;
        let mut done = 0;
        while done < iters {
            let sets = &mut sets[..depth.min(u64::from(iters - done)) as usize];
            if check {
                for (set, repetition) in sets.iter_mut().zip(done..) {
                    set.fill::<T>(case, repetition, &mut scratch.want)?;
                }
                case.comm.poison_staging(poison::<T>())?;
            }
            let calls: Vec<_> = sets.iter().map(|set| set.start::<T>(case)).collect();
            let mut pending: Vec<(Instant, Pending)> = Vec::with_capacity(calls.len());
            let start = Instant::now();
            for call in calls {
                pending.push((Instant::now(), call()?));
            }
            for (made, call) in &pending {
                call.wait()?;
                latencies.push(made.elapsed());
            }
            total += start.elapsed();
            report = pending.pop().map(|(_, call)| call.report().clone()).or(report);
            if check {
                if let Some(flip) = flip.take() {
                    sets[0].flip::<T>(case, flip)?;
                }
                for (set, repetition) in sets.iter().zip(done..) {
                    let algorithm = report.as_ref().and_then(|r| r.algorithm);
                    let of = set.check::<T>(case, algorithm, scratch)?;
                    wrong.absorb(of, || format!("repetition {repetition}"));
                }
            }
            done += sets.len() as u32;
        }
        latencies.sort();
        let report = report.ok_or_else(|| Failure::Usage("at least one iteration is needed".into()))?;
        Ok(Sample { time: total / iters, latencies, wrong: check.then_some(wrong), report })
    }
}

impl Set {
    /// Draws inputs, poisons outputs, and writes both.
    fn fill<T: Value>(&mut self, case: Case<'_>, repetition: u32, poisoned: &mut Image) -> Result<(), Failure> {
        let job = &case.job;
        if self.ranks.len() < job.ranks as usize {
            self.ranks.resize_with(job.ranks as usize, Seat::default);
        }
        for (seat, rank) in self.ranks.iter_mut().zip(0..job.ranks) {
            let (input, output) = (job.input(rank), job.output(rank));
            let elements = if case.in_place { input.max(output) } else { input };
            let Seat { written, buffers: [first, second] } = seat;
            let device = case.comm.device(rank);
            if let Some(elements) = elements {
                written.reset::<T>(elements);
                let data = written.data_mut::<T>();
                if input != Some(elements) {
                    data.fill(T::POISON);
                }
                if let Some(input) = input {
                    let at = if case.in_place { job.in_place_at(rank).0 } else { 0 };
                    reference::draw(rank, repetition, &mut data[at as usize..][..input as usize]);
                }
                put(device, first, written)?;
            }
            if let (false, Some(output)) = (case.in_place, output) {
                poisoned.reset::<T>(output);
                poisoned.data_mut::<T>().fill(T::POISON);
                put(device, second, poisoned)?;
            }
        }
        Ok(())
    }

    /// The call, ready to be made.
    fn start<T: Value>(&self, case: Case<'_>) -> impl FnOnce() -> allhands::Result<Pending> {
        let Case { comm, job, op, in_place } = case;
        let span = |buffer: &Option<Buffer>, elements: Option<u64>| {
            let id = buffer.as_ref()?.id();
            Some(Span::of(id, T::TYPE, GUARD as u64 / T::TYPE.size(), elements?))
        };
        let part = |(seat, rank): (&Seat, u32)| {
            let (input, output) = (job.input(rank), job.output(rank));
            let [first, second] = &seat.buffers;
            if in_place {
                let whole = span(first, input.max(output));
                return whole.map_or_else(Part::none, Part::in_place);
            }
            match (span(first, input), span(second, output)) {
                (Some(input), Some(output)) => Part::new(input, output),
                (Some(input), None) => Part::input(input),
                (None, Some(output)) => Part::output(output),
                (None, None) => Part::none(),
            }
        };
        let parts: Vec<Part> = self.ranks.iter().zip(0..job.ranks).map(part).collect();
        let collective = job.collective();
        move || comm.call(collective, op, parts).start()
    }

    /// Plants a wrong bit in a result.
    fn flip<T: Value>(&self, case: Case<'_>, Flip { rank, index, bit }: Flip) -> Result<(), Failure> {
        let Case { job, in_place, .. } = case;
        let nowhere = || Failure::Usage(format!("--flip: rank {rank} has no bit {bit} of element {index}"));
        let seat = self.ranks.get(rank as usize).filter(|_| rank < job.ranks).ok_or_else(nowhere)?;
        let there = job.output(rank).is_some_and(|len| index < len) && bit < 8 * T::TYPE.size();
        let buffer = seat.buffers[usize::from(!in_place)].as_ref().filter(|_| there).ok_or_else(nowhere)?;
        let first = if in_place { job.in_place_at(rank).1 } else { 0 };
        let at = GUARD as u64 + (first + index) * T::TYPE.size() + bit / 8;
        let mut byte = [0];
        buffer.read_bytes(at, &mut byte)?;
        Ok(buffer.write_bytes(at, &[byte[0] ^ 1 << (bit % 8)])?)
    }

    /// Reads every buffer back and compares it, guards and all, with what it must hold.
    fn check<T: Value>(
        &self,
        case: Case<'_>,
        algorithm: Option<Algorithm>,
        scratch: &mut Scratch,
    ) -> Result<Wrong, Failure> {
        let Case { job, op, in_place, .. } = case;
        let Scratch { got, want, folded, first } = scratch;
        let place = |rank| if in_place { job.in_place_at(rank) } else { (0, 0) };
        let inputs: Vec<&[T]> = (self.ranks.iter().zip(0..job.ranks))
            .map(|(seat, rank)| match job.input(rank) {
                Some(len) => &seat.written.data::<T>()[place(rank).0 as usize..][..len as usize],
                None => &[],
            })
            .collect();
        let mut bounds = None;
        let folded: &[T] = match op {
            Some(op) => {
                folded.reset::<T>(inputs[0].len() as u64);
                reference::fold(op, &inputs, folded.data_mut::<T>());
                if reordered(op, T::TYPE, algorithm) {
                    bounds = Some(reference::tolerances(op, &inputs, folded.data::<T>()));
                }
                folded.data::<T>()
            }
            None => &[],
        };

        let mut wrong = Wrong::default();
        for (seat, rank) in self.ranks.iter().zip(0..job.ranks) {
            let [source, result] = &seat.buffers;
            let of = |what: &'static str| move || format!("rank {rank} {what}");
            if let (false, Some(_), Some(buffer)) = (in_place, job.input(rank), source) {
                get(buffer, &seat.written, got)?;
                wrong.absorb(got.compare::<T>(&seat.written, |_| None), of("input"));
            }
            let (buffer, whole) =
                if in_place { (source, job.input(rank).max(job.output(rank))) } else { (result, job.output(rank)) };
            let (Some(buffer), Some(whole)) = (buffer, whole) else { continue };
            if in_place {
                want.copy(&seat.written);
            } else {
                want.reset::<T>(whole);
            }
            let at = place(rank).1 as usize;
            let len = job.output(rank).unwrap_or(0) as usize;
            if len > 0 {
                reference::expect(&job, rank, &inputs, folded, &mut want.data_mut::<T>()[at..at + len]);
            }
            get(buffer, want, got)?;
            // The fold's element that lies at an index of the buffer.
            let folded_at = if folded.len() > len { rank as usize * len } else { 0 };
            let tolerance = |i: usize| {
                let inside = (at..at + len).contains(&i);
                bounds.as_ref().filter(|_| inside).map(|b| b[i - at + folded_at])
            };
            wrong.absorb(got.compare::<T>(want, tolerance), of("output"));
            if bounds.is_some() && job.kind.same_everywhere() {
                if rank == 0 {
                    first.copy(got);
                } else {
                    wrong.absorb(got.compare::<T>(first, |_| None), of("output, against rank 0's"));
                }
            }
        }
        Ok(wrong)
    }
}

/// Whether the result is folded in another order than the ranks' and rounds otherwise for it.
fn reordered(op: ReduceOp, dtype: DataType, algorithm: Option<Algorithm>) -> bool {
    matches!(algorithm, Some(Algorithm::Ring | Algorithm::Tree))
        && dtype.is_float()
        && matches!(op, ReduceOp::Sum | ReduceOp::Product | ReduceOp::Average)
}

fn poison<T: Value>() -> u32 {
    bytemuck::pod_read_unaligned(&[bytemuck::bytes_of(&T::POISON), &[0; 4]].concat()[..4])
}

/// Writes an image, into a larger buffer if need be.
fn put(
    device: &std::sync::Arc<dyn allhands::Device>,
    buffer: &mut Option<Buffer>,
    image: &Image,
) -> Result<(), Failure> {
    let bytes = image.bytes();
    let fits = |b: &&mut Buffer| b.len() >= bytes.len() as u64;
    let buffer = match buffer.as_mut().filter(fits) {
        Some(_) => buffer.as_ref(),
        None => {
            *buffer = None; // The old one goes before the new one comes.
            *buffer = Some(Buffer::new(device, DataType::U8, bytes.len() as u64)?);
            buffer.as_ref()
        }
    };
    buffer.map_or(Ok(()), |b| Ok(b.write_bytes(0, bytes)?))
}

/// Reads as much as `like` has.
fn get(buffer: &Buffer, like: &Image, into: &mut Image) -> Result<(), Failure> {
    into.resize_like(like);
    Ok(buffer.read_bytes(0, into.bytes_mut())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::Kind;
    use allhands::devices::{DeviceName, open};

    fn communicator(ranks: u32) -> Communicator {
        let device = |_| open(&DeviceName::Cpu).unwrap();
        (0..ranks).map(device).fold(Communicator::builder(), |b, d| b.rank(d)).build().unwrap()
    }

    #[test]
    fn what_was_not_written_or_should_not_have_been_is_seen() {
        let comm = communicator(2);
        for (kind, in_place) in Kind::ALL.into_iter().flat_map(|k| [(k, false), (k, true)]) {
            if kind == Kind::Barrier || in_place && !kind.in_place() {
                continue;
            }
            let job = Job::of_bytes(kind, 2, 1, 480, DataType::F32);
            let case = Case { comm: &comm, job, op: kind.reduces().then_some(ReduceOp::Sum), in_place };
            let (mut set, mut scratch) = (Set::default(), Scratch::default());
            set.fill::<f32>(case, 3, &mut scratch.want).unwrap();
            let wrong = set.check::<f32>(case, None, &mut scratch).unwrap();
            assert!(wrong.count >= job.count, "{kind}, in place {in_place}: nothing ran, but {wrong:?}");

            set.start::<f32>(case)().unwrap().wait().unwrap();
            let wrong = set.check::<f32>(case, None, &mut scratch).unwrap();
            assert_eq!(wrong, Wrong::default(), "{kind}, in place {in_place}");

            let buffers = set.ranks.iter().flat_map(|seat| &seat.buffers).flatten();
            for (count, buffer) in buffers.enumerate() {
                buffer.write_bytes(GUARD as u64 - 1, &[0]).unwrap();
                let wrong = set.check::<f32>(case, None, &mut scratch).unwrap();
                assert_eq!(wrong.count, count as u64 + 1, "{kind}, in place {in_place}: {wrong:?}");
            }
        }
    }

    #[test]
    fn calls_in_flight_are_all_checked() {
        let comm = communicator(3);
        let settings = Settings { iters: 70, warmup: 1, check: true, blocking: false };
        let job = Job::of_bytes(Kind::AllReduce, 3, 0, 4000, DataType::I32);
        let case = Case { comm: &comm, job, op: Some(ReduceOp::Average), in_place: true };
        let sample = Bench::new(settings, None).run::<i32>(case).unwrap();
        assert_eq!(sample.wrong, Some(Wrong::default()));
        assert_eq!(sample.latencies.len(), 70);
        assert!(sample.latencies.is_sorted() && sample.time > Duration::ZERO);
    }
}
