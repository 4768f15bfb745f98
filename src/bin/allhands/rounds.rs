//! `allhands rounds`: our side of a comparison with another library. Each line on standard input asks for one round of
//! all-reduces, `BYTES REPETITIONS in|out ALGORITHM [alone]`, and gets one line of results; between rounds nothing runs, so that
//! another program can take turns with this one.
//!
//! A repetition is an application's: on every rank's queue a dispatch writes the input, the all-reduce follows, a
//! dispatch reads the output, ordered by timelines alone. The same two dispatches without the all-reduce are timed too.
//! `alone`: calls without anything around them, each waited for (`start`: until it returned), and then one after the
//! other.
use crate::{
    Failure,
    args::{self, Auto, Backend, List},
    say,
};
use allhands::{
    Algorithm, Buffer, Collective, Communicator, DataType, Device, Part, Pending, ReduceOp,
    contract::{CommandsId, Kernel, Op, Point, Range, Submission, Waited},
    devices::DeviceName,
};
use std::{
    collections::BTreeMap,
    io::BufRead,
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

#[derive(clap::Args, Debug)]
pub struct Rounds {
    /// Whose first device all ranks are on
    #[arg(long, value_enum, default_value = "auto")]
    backend: Backend,
    /// Devices that ranks go round, instead
    #[arg(long, value_parser = args::list::<DeviceName>)]
    devices: Option<List<DeviceName>>,
    /// How many ranks
    #[arg(short = 'g', long)]
    ranks: usize,
    /// Ranks of one name share one device: two of one GPU make it switch between them for every hop
    #[arg(long)]
    share: bool,
}

/// What a line asks for.
struct Request {
    bytes: u64,
    repetitions: u32,
    in_place: bool,
    algorithm: Option<Algorithm>,
    alone: bool,
}

/// A rank, and the timeline that its own dispatches signal.
struct Rank {
    device: Arc<dyn Device>,
    point: Point,
}

/// The memory of one rank for messages of one length.
struct Seat {
    /// What the input is written from: they take turns, so that an old result is a wrong one.
    templates: [Buffer; 2],
    input: Buffer,
    /// `None`: in place.
    output: Option<Buffer>,
    /// Where the output is read to.
    seen: Buffer,
    /// Kept where the device lets commands be submitted again: the two writes and the read.
    kept: Option<[CommandsId; 3]>,
}

/// A seat for each rank, and the results that the two templates give.
struct Table {
    seats: Vec<Seat>,
    sums: [Vec<f32>; 2],
}

const PATIENCE: Duration = Duration::from_secs(60);
/// The plain copy is the best of so many attempts, each of so many bytes at least.
const ATTEMPTS: usize = 5;
const COPIED: usize = 32 << 20;

impl Rounds {
    pub fn run(&self) -> Result<u64, Failure> {
        let names = match &self.devices {
            Some(List(names)) => names.clone(),
            None => self.backend.devices()?.into_iter().take(1).collect(),
        };
        let opened = match self.share {
            true => args::open(&names, names.len())?.into_iter().cycle().take(self.ranks).collect(),
            false => args::open(&names, self.ranks)?,
        };
        let comm = opened.iter().fold(Communicator::builder(), |b, d| b.rank(d.clone())).build()?;
        let mut ranks = Vec::new();
        for device in opened {
            let timeline = device.create_timeline(false).map_err(allhands::Error::from)?;
            ranks.push(Rank { device, point: Point { timeline, value: 0 } });
        }
        let info = ranks[0].device.info();
        say(format_args!("{}: {}, {}", names[0], info.name, info.driver))?;
        let mut tables: BTreeMap<(u64, bool), Table> = BTreeMap::new();
        let mut wrong = 0;
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|e| Failure::Run(format!("standard input: {e}")))?;
            let request = Request::parse(&line)?;
            let table = match tables.remove(&(request.bytes, request.in_place)) {
                Some(table) => table,
                None => Table::new(&ranks, &request)?,
            };
            let round = if request.alone { alone } else { around };
            wrong += round(&comm, &mut ranks, &table, &request)?;
            tables.insert((request.bytes, request.in_place), table);
        }
        Ok(wrong)
    }
}

impl Request {
    fn parse(line: &str) -> Result<Self, Failure> {
        let usage = |why: String| Failure::Usage(format!("{line:?} asks for no round: {why}"));
        let words: Vec<&str> = line.split_whitespace().collect();
        let (&[bytes, repetitions, place, algorithm], rest) = words
            .split_first_chunk()
            .ok_or_else(|| usage("right is BYTES REPETITIONS in|out ALGORITHM [alone]".into()))?;
        let repetitions: u32 = repetitions.parse().map_err(|e| usage(format!("{repetitions}: {e}")))?;
        let alone = rest == ["alone"];
        if !["in", "out"].contains(&place) || alone && place == "in" {
            return Err(usage(
                "calls are made `in` or `out` of place; alone only out, so that sums stay what they are".into(),
            ));
        }
        let Auto(algorithm) = args::auto(algorithm).map_err(usage)?;
        Ok(Request {
            bytes: args::size(bytes).map_err(usage)?.next_multiple_of(4).max(4),
            repetitions: repetitions.max(1),
            in_place: place == "in",
            algorithm,
            alone,
        })
    }
}

/// Runs a round, prints its line, and gives the number of wrong elements.
fn around(comm: &Communicator, ranks: &mut [Rank], table: &Table, request: &Request) -> Result<u64, Failure> {
    let mut times = [const { Vec::new() }; 4];
    let (mut wrong, mut report) = (0, None);
    // The first repetition of each warms up.
    for repetition in 0..=request.repetitions {
        let which = repetition as usize % 2;
        // Either is timed after the same: what a check of the results leaves in the caches would else be one's alone.
        repeat(ranks, table, which, None)?;
        let (whole, pending) = repeat(ranks, table, which, Some((comm, request.algorithm)))?;
        wrong += table.wrong(which)?;
        report = pending.map(|p| p.report().clone());
        repeat(ranks, table, which, None)?;
        let own = repeat(ranks, table, which, None)?.0;
        let empty = nothing(&mut ranks[0])?;
        if repetition > 0 {
            times.iter_mut().zip([whole, own, whole - own, empty]).for_each(|(all, one)| all.push(one));
        }
    }
    let [whole, own, net, empty] = times.map(median);
    let copy = plain_copy(request.bytes as usize * ranks.len());
    let Some(report) = report else { return Ok(wrong) };
    let algorithm = report.algorithm.map_or("none", |a| a.name());
    let how = format!("{algorithm}/{}/{}/{}", report.reduced_on, report.path, report.sync);
    say(format_args!(
        "whole={whole:.3} own={own:.3} net={net:.3} empty={empty:.3} copy={copy:.0} wrong={wrong} how={how}"
    ))?;
    Ok(wrong)
}

/// The same for calls with nothing around them.
fn alone(comm: &Communicator, ranks: &mut [Rank], table: &Table, request: &Request) -> Result<u64, Failure> {
    let call = || {
        let parts = table.seats.iter().map(|s| Part::new(s.input.span(), s.output.as_ref().unwrap_or(&s.input).span()));
        comm.call(Collective::AllReduce, Some(ReduceOp::Sum), parts).algorithm(request.algorithm).start()
    };
    let mut wrong = 0;
    let (mut starts, mut calls) = (Vec::new(), Vec::new());
    repeat(ranks, table, 0, None)?; // writes the inputs
    for repetition in 0..=request.repetitions {
        let start = Instant::now();
        let pending = call()?;
        let returned = since(start);
        pending.wait()?;
        if repetition > 0 {
            starts.push(returned);
            calls.push(since(start));
        }
    }
    repeat(ranks, table, 0, None)?; // reads the outputs
    wrong += table.wrong(0)?;
    repeat(ranks, table, 1, None)?;
    let start = Instant::now();
    let train = (0..request.repetitions).map(|_| call()).collect::<allhands::Result<Vec<_>>>()?;
    train.iter().try_for_each(Pending::wait)?;
    let train = since(start) / f64::from(request.repetitions);
    repeat(ranks, table, 1, None)?;
    wrong += table.wrong(1)?;
    say(format_args!("call={:.3} start={:.3} train={train:.3} wrong={wrong}", median(calls), median(starts)))?;
    Ok(wrong)
}

/// One repetition, from the first submission until the host knows that every rank has read its output.
fn repeat(
    ranks: &mut [Rank],
    table: &Table,
    which: usize,
    call: Option<(&Communicator, Option<Algorithm>)>,
) -> allhands::Result<(f64, Option<Pending>)> {
    let seats = &table.seats;
    let mut commands = Vec::with_capacity(ranks.len());
    for (rank, seat) in ranks.iter().zip(seats) {
        commands.push(match seat.kept {
            Some(kept) => [kept[which], kept[2]],
            None => {
                [rank.device.prepare(&seat.write(which, &rank.device))?, rank.device.prepare(&seat.read(&rank.device))?]
            }
        });
    }
    let start = Instant::now();
    for (rank, [write, _]) in ranks.iter_mut().zip(&commands) {
        rank.submit(Some(*write), &[])?;
    }
    let pending = match call {
        None => None,
        Some((comm, algorithm)) => {
            let part = |(rank, seat): (&Rank, &Seat)| match &seat.output {
                Some(output) => Part::new(seat.input.span(), output.span()).after([rank.point]),
                None => Part::in_place(seat.input.span()).after([rank.point]),
            };
            let parts: Vec<Part> = ranks.iter().zip(seats).map(part).collect();
            Some(comm.call(Collective::AllReduce, Some(ReduceOp::Sum), parts).algorithm(algorithm).start()?)
        }
    };
    for (number, (rank, [_, read])) in (0..).zip(ranks.iter_mut().zip(&commands)) {
        let mut waits = Vec::new();
        if let Some(pending) = &pending {
            // A held submission has no point until it is in its queue.
            if pending.point(number).is_none() {
                pending.enqueued(start + PATIENCE)?;
            }
            // Other queues run in order, which is wait enough.
            waits.extend(pending.point(number).filter(|_| rank.device.limits().gated));
        }
        rank.submit(Some(*read), &waits)?;
    }
    ranks.iter().try_for_each(Rank::wait)?;
    let time = since(start);
    if let Some(pending) = &pending {
        pending.wait()?;
    }
    Ok((time, pending))
}

/// An empty submission, and waiting for it.
fn nothing(rank: &mut Rank) -> allhands::Result<f64> {
    let start = Instant::now();
    rank.submit(None, &[])?;
    rank.wait()?;
    Ok(since(start))
}

impl Rank {
    fn submit(&mut self, commands: Option<CommandsId>, waits: &[Point]) -> allhands::Result<()> {
        self.point.value += 1;
        Ok(self.device.submit(&[Submission { commands, waits, signal: self.point }])?)
    }
    fn wait(&self) -> allhands::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.device.wait_any(&[self.point], self.device.wakes(), deadline)? != Waited::Reached {
            if Instant::now() >= deadline {
                return Err(allhands::Error::Option {
                    what: "a round",
                    why: format!("it did not end in {PATIENCE:?}"),
                });
            }
        }
        Ok(())
    }
}

impl Table {
    fn new(ranks: &[Rank], request: &Request) -> allhands::Result<Self> {
        let count = request.bytes / 4;
        let data = |rank: u64, which: u64| (0..count).map(move |i| ((i * 31 + rank * 17 + which * 7) % 127) as f32);
        let mut sums = [(); 2].map(|()| vec![0.0; count as usize]);
        let mut seats = Vec::new();
        for (number, rank) in (0..).zip(ranks) {
            let device = &rank.device;
            for (sum, which) in sums.iter_mut().zip(0..) {
                sum.iter_mut().zip(data(number, which)).for_each(|(sum, v)| *sum += v); // whole numbers: exact
            }
            let template = |which| Buffer::from_slice(device, &data(number, which).collect::<Vec<_>>());
            let buffer = || Buffer::new(device, DataType::F32, count);
            let output = if request.in_place { None } else { Some(buffer()?) };
            let mut seat =
                Seat { templates: [template(0)?, template(1)?], input: buffer()?, output, seen: buffer()?, kept: None };
            if device.limits().resubmit {
                let ops = [seat.write(0, device), seat.write(1, device), seat.read(device)];
                seat.kept = Some([device.prepare(&ops[0])?, device.prepare(&ops[1])?, device.prepare(&ops[2])?]);
            }
            seats.push(seat);
        }
        Ok(Table { seats, sums })
    }
    /// Elements of all ranks' outputs that are not what they must be after a repetition.
    fn wrong(&self, which: usize) -> allhands::Result<u64> {
        let mut wrong = 0;
        for seat in &self.seats {
            let seen = seat.seen.read::<f32>()?;
            wrong += seen.iter().zip(&self.sums[which]).filter(|(got, want)| got != want).count() as u64;
        }
        Ok(wrong)
    }
}

impl Seat {
    fn write(&self, which: usize, device: &Arc<dyn Device>) -> Vec<Op> {
        moved(&self.templates[which], &self.input, device)
    }
    fn read(&self, device: &Arc<dyn Device>) -> Vec<Op> {
        moved(self.output.as_ref().unwrap_or(&self.input), &self.seen, device)
    }
}

/// Dispatches that read one buffer and write another.
fn moved(from: &Buffer, to: &Buffer, device: &Arc<dyn Device>) -> Vec<Op> {
    let most = (device.limits().max_kernel_elements & !63) * 4;
    let starts = (0..from.len() * 4).step_by(most as usize);
    let kernel = |offset: u64| {
        let range = |buffer: &Buffer| Range::new(buffer.id(), offset, most.min(buffer.len() * 4 - offset));
        Op::Kernel(Kernel {
            stores: vec![range(to)],
            sources: vec![range(from)],
            op: ReduceOp::Sum,
            dtype: DataType::F32,
            finish: None,
            scales: Vec::new(),
            wire: None,
        })
    };
    starts.map(kernel).collect()
}

/// The middle one.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Since `start`, in microseconds.
fn since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

/// Bytes a second that the cores together read and write when they copy `bytes`.
fn plain_copy(bytes: usize) -> f64 {
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    let share = (bytes / cores).max(64);
    let times = COPIED.div_ceil(share);
    let barrier = Barrier::new(cores);
    let one = || {
        let (from, mut to) = (vec![1_u8; share], vec![2_u8; share]);
        let attempt = |_| {
            barrier.wait();
            let start = Instant::now();
            for _ in 0..times {
                std::hint::black_box(&mut to).copy_from_slice(std::hint::black_box(&from));
            }
            start.elapsed().as_secs_f64()
        };
        [(); ATTEMPTS].map(attempt)
    };
    let of_each: Vec<[f64; ATTEMPTS]> = thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(one)).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    // An attempt takes as long as its slowest core.
    let slowest = |attempt: usize| of_each.iter().map(|times| times[attempt]).fold(0.0, f64::max);
    2.0 * (share * times * cores) as f64 / (0..ATTEMPTS).map(slowest).fold(f64::MAX, f64::min)
}
