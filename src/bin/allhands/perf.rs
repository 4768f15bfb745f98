//! `allhands perf`: sweeps over ranks, types, reductions and sizes, every result checked.
use crate::{
    Failure,
    args::{self, Auto, Backend, List},
    bound::Bounds,
    chart,
    kind::{Job, Kind},
    measure::{Bench, Case, Flip, Sample, Settings},
    row::{HEAD, Results, Row},
    say,
};
use allhands::{
    Algorithm, Communicator, DataType, Device, Path, ReduceOp, Sync, devices::DeviceName, schedule::algorithms,
};
use indicatif::{ProgressBar, ProgressStyle};
use std::{path::PathBuf, sync::Arc, time::Duration};

#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub struct Perf {
    /// all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, all_to_all, sendrecv or barrier
    collective: Kind,
    /// Smallest size in bytes; K, M and G are powers of 1024
    #[arg(short = 'b', long, value_parser = args::size, default_value = "1K")]
    minbytes: u64,
    /// Largest size [default: 4M, or the smallest if that is larger]
    #[arg(short = 'e', long, value_parser = args::size)]
    maxbytes: Option<u64>,
    /// Factor from one size to the next [default: 2]
    #[arg(short = 'f', long, conflicts_with = "stepbytes")]
    stepfactor: Option<u64>,
    /// Bytes from one size to the next
    #[arg(short = 'i', long, value_parser = args::size)]
    stepbytes: Option<u64>,
    /// Timed repetitions of each row
    #[arg(short = 'n', long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Untimed calls before them
    #[arg(short = 'w', long = "warmup_iters", alias = "warmup-iters", default_value_t = 5)]
    warmup_iters: u32,
    /// Whether every timed repetition is checked
    #[arg(short = 'c', long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    check: u8,
    /// Element types, or all
    #[arg(short = 'd', long, value_parser = args::types, default_value = "f32")]
    datatype: List<DataType>,
    /// Reductions, or all: sum, product, min, max, average
    #[arg(short = 'o', long, value_parser = args::ops, default_value = "sum")]
    op: List<ReduceOp>,
    /// The root of broadcast, reduce, gather and scatter
    #[arg(short = 'r', long, default_value_t = 0)]
    root: u32,
    /// Numbers of ranks, as 1,2,3 [default: that of devices, at least 2]
    #[arg(short = 'g', long, value_parser = args::list::<u32>)]
    ngpus: Option<List<u32>>,
    /// 1: wait for each call before the next is made. 0: make several, each on buffers of its own, then wait
    #[arg(short = 'z', long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    blocking: u8,
    /// Seconds without progress after which a call fails [default: the library's]
    #[arg(short = 'T', long, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: Option<u64>,
    /// Writes the results as JSON
    #[arg(short = 'J', long = "output_file", alias = "output-file")]
    output_file: Option<PathBuf>,
    /// Devices that ranks go round: cpu, proxy-vulkan:N, proxy-gles:N
    #[arg(long, value_parser = args::list::<DeviceName>, conflicts_with = "backend")]
    devices: Option<List<DeviceName>>,
    /// The devices, if none are named: auto (every Vulkan GPU, else the host), proxy (those through wgpu-hal), cpu
    #[arg(long, value_enum, default_value = "auto", hide_possible_values = true)]
    backend: Backend,
    /// How ranks learn of each other's progress: auto, native or relay
    #[arg(long, value_parser = args::auto::<Sync>, default_value = "auto")]
    sync: Auto<Sync>,
    /// How data crosses: auto, peer, shared-host or copied
    #[arg(long, value_parser = args::auto::<Path>, default_value = "auto")]
    path: Auto<Path>,
    /// auto, one-shot, two-shot, host, ring or tree
    #[arg(long, value_parser = args::auto::<Algorithm>, default_value = "auto")]
    algorithm: Auto<Algorithm>,
    /// Draws bus bandwidth and latency over size, a line for each number of ranks
    #[arg(long)]
    svg: Option<PathBuf>,
    /// For tests of the check itself: flips bit BIT of element INDEX of rank RANK's first result
    #[arg(long, hide = true, value_name = "RANK:INDEX:BIT")]
    flip: Option<Flip>,
}

const AFTER_HELP: &str = "\
Sizes are nccl-tests': of the larger buffer. For reduce_scatter, all_gather, gather, scatter and all_to_all that is a
block for each rank, rounded down to whole elements; `count` is the call's.
  algbw = size / time. busbw = algbw times, for n ranks: 2(n-1)/n for all_reduce; (n-1)/n for reduce_scatter, all_gather,
  gather, scatter and all_to_all; 1 for broadcast, reduce and sendrecv, where each rank sends to the next.
Inputs depend on rank, index and repetition. Outputs and staging are poisoned before each timed repetition, and each is
checked: all bits, unwritten parts, and 256 guard bytes around every buffer. Float sum, product and average by ring or
tree have another order than the reference, and round at each hop; they may differ from it by n times the distance from 1
to the next value (2^-23 for f32, 2^-10 f16, 2^-7 bf16, 2^-52 f64) of the sum of magnitudes (of the product),
and must still be the same bits on all ranks.
p50 and p99 are of single calls out of place, from making the call to knowing that it is done. `bound` is the share of
the time that cannot be beaten: what the busiest rank must read and write, at the speed of a plain copy of the same size
on the same device in this run, plus an empty submission. It must read its input and what it receives, and write its
output and, once, what it sends; in units of the size: all_reduce 3 + 2(n-1)/n, reduce_scatter 2 + (n-1)/n, all_gather
3 - (n-1)/n, broadcast and reduce 3, gather and scatter 2, all_to_all 2 + 2(n-1)/n, sendrecv 4.
Exit status: 0; 1 on failure; 2 on bad arguments; 7 if any element is wrong.";

impl Perf {
    /// Runs the sweep. The number of wrong elements.
    pub fn run(&self) -> Result<u64, Failure> {
        self.check_algorithm()?;
        let cases = self.cases()?;
        let names = match &self.devices {
            Some(List(names)) => names.clone(),
            None => self.backend.devices()?,
        };
        let ranks = self.ranks(names.len())?;
        let devices = args::open(&names, ranks.iter().copied().max().unwrap_or(0) as usize)?;
        self.print_preamble(&names, &devices)?;

        let bar = ProgressBar::new((ranks.len() * cases.len()) as u64);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} rows, {elapsed} {msg}") {
            bar.set_style(style);
        }
        let mut bench = Bench::new(self.settings(), self.flip);
        let mut bounds = Bounds::default();
        let mut results = Results { collective: self.collective.name(), rows: Vec::new(), wrong: 0 };
        for &n in &ranks {
            let comm = self.communicator(&devices[..n as usize])?;
            for &(dtype, op, bytes) in &cases {
                let job = Job::of_bytes(self.collective, n, self.root, bytes, dtype);
                let redop = op.map_or("none", ReduceOp::name);
                bar.set_message(format!("{n} ranks, {dtype} {redop}, {bytes} bytes"));
                let case = Case { comm: &comm, job, op, in_place: false };
                let apart = run(&mut bench, case, dtype)?;
                let over = match job.kind.in_place() {
                    true => Some(run(&mut bench, Case { in_place: true, ..case }, dtype)?),
                    false => None,
                };
                // Zipped with the names, the devices are those that differ.
                let named = names.iter().map(DeviceName::to_string).zip(&devices).take(n as usize);
                let bound = bounds.of(&job, dtype, named)?;
                let row = Row::new(&job, dtype, redop, &apart, over.as_ref(), bound);
                bar.suspend(|| say(&row))?;
                bar.inc(1);
                if results.wrong == 0
                    && let Some(first) = first_wrong(&apart, over.as_ref())
                {
                    let what = format!("{} of {dtype}, {redop}, {n} ranks, {} bytes", job.kind, row.size);
                    bar.suspend(|| eprintln!("allhands: first wrong: {what}, {first}"));
                }
                results.wrong += row.wrong();
                results.rows.push(row);
            }
        }
        bar.finish_and_clear();
        self.print_summary(&results)?;
        self.write_files(&results, &names)?;
        Ok(results.wrong)
    }

    fn settings(&self) -> Settings {
        Settings { iters: self.iters, warmup: self.warmup_iters, check: self.check == 1, blocking: self.blocking == 1 }
    }

    /// The numbers of ranks.
    fn ranks(&self, devices: usize) -> Result<Vec<u32>, Failure> {
        let ranks = self.ngpus.as_ref().map_or_else(|| vec![devices.max(2) as u32], |list| list.0.clone());
        let least = ranks.iter().copied().min().unwrap_or(0);
        if least == 0 {
            return Err(Failure::Usage("-g: a communicator needs at least one rank".into()));
        }
        if self.collective.rooted() && self.root >= least {
            return Err(Failure::Usage(format!("-r: root {} is no rank of {least}", self.root)));
        }
        Ok(ranks)
    }

    /// What is measured for each number of ranks: type, reduction, bytes.
    fn cases(&self) -> Result<Vec<(DataType, Option<ReduceOp>, u64)>, Failure> {
        let sizes = self.sizes()?;
        // A barrier has no elements.
        let types = if self.collective == Kind::Barrier { &[DataType::F32][..] } else { &self.datatype.0 };
        let ops: Vec<Option<ReduceOp>> =
            if self.collective.reduces() { self.op.0.iter().copied().map(Some).collect() } else { vec![None] };
        let pairs = types.iter().flat_map(|t| ops.iter().map(|op| (*t, *op)));
        let pairs = pairs.filter(|(dtype, op)| allhands::supported(*op, *dtype));
        Ok(pairs.flat_map(|(dtype, op)| sizes.iter().map(move |bytes| (dtype, op, *bytes))).collect())
    }

    /// The sizes of the sweep in bytes.
    fn sizes(&self) -> Result<Vec<u64>, Failure> {
        if self.collective == Kind::Barrier {
            return Ok(vec![0]);
        }
        let first = self.minbytes;
        let last = self.maxbytes.unwrap_or(first.max(4 << 20));
        if first > last {
            return Err(Failure::Usage(format!("-b {first} is larger than -e {last}")));
        }
        let next: Box<dyn Fn(u64) -> Option<u64>> = match (self.stepbytes, self.stepfactor.unwrap_or(2)) {
            (Some(0), _) | (None, 0 | 1) if first < last => {
                return Err(Failure::Usage("sizes do not grow: -i must be above 0, -f above 1".into()));
            }
            (Some(step), _) => Box::new(move |s: u64| s.checked_add(step.max(1))),
            // From nothing a factor leads nowhere: one element of the smallest size comes next.
            (None, factor) => Box::new(move |s: u64| s.max(1).checked_mul(factor.max(2))),
        };
        Ok(std::iter::successors(Some(first), |&s| next(s)).take_while(|s| *s <= last).collect())
    }

    fn check_algorithm(&self) -> Result<(), Failure> {
        let collective = Job { kind: self.collective, ranks: 2, root: 0, count: 0 }.collective();
        let have = algorithms(&collective);
        match self.algorithm.0.filter(|a| !have.contains(a)) {
            None => Ok(()),
            Some(a) => {
                let have: Vec<&str> = have.iter().map(|a| a.name()).collect();
                let text = format!("{} has no {a} algorithm; it has {}", self.collective, have.join(", "));
                Err(Failure::Usage(text))
            }
        }
    }

    fn communicator(&self, devices: &[Arc<dyn Device>]) -> Result<Communicator, Failure> {
        let mut builder = Communicator::builder().path(self.path.0).sync(self.sync.0).algorithm(self.algorithm.0);
        if let Some(seconds) = self.timeout {
            builder = builder.deadline(Duration::from_secs(seconds));
        }
        for device in devices {
            builder = builder.rank(device.clone());
        }
        Ok(builder.build()?)
    }

    fn print_preamble(&self, names: &[DeviceName], devices: &[Arc<dyn Device>]) -> Result<(), Failure> {
        let checked = if self.check == 1 { "every repetition checked" } else { "nothing checked" };
        say(format_args!(
            "# {}: {} repetitions after {} warm-ups, {checked}",
            self.collective, self.iters, self.warmup_iters
        ))?;
        for (rank, (device, name)) in devices.iter().zip(names.iter().cycle()).enumerate() {
            say(format_args!("# rank {rank:>2} on {name}: {}, {}", device.info().name, device.info().driver))?;
        }
        say(HEAD)
    }

    fn print_summary(&self, results: &Results) -> Result<(), Failure> {
        let sides = results.rows.iter().flat_map(|r| [Some(r.out_of_place), r.in_place]).flatten();
        let bandwidths: Vec<f64> = sides.map(|s| s.bus_bw).collect();
        let verdict = match (self.check, results.wrong) {
            (0, _) => "not checked".into(),
            (_, 0) => "0 OK".into(),
            (_, n) => format!("{n} FAILED"),
        };
        say(format_args!("# Wrong elements: {verdict}"))?;
        let mean = bandwidths.iter().sum::<f64>() / bandwidths.len().max(1) as f64;
        say(format_args!("# Average bus bandwidth: {mean:.3} GB/s"))
    }

    fn write_files(&self, results: &Results, names: &[DeviceName]) -> Result<(), Failure> {
        let write = |path: &PathBuf, text: String| {
            std::fs::write(path, text).map_err(|e| Failure::Run(format!("{}: {e}", path.display())))
        };
        if let Some(path) = &self.output_file {
            let json = serde_json::to_string_pretty(results).map_err(|e| Failure::Run(e.to_string()))?;
            write(path, json + "\n")?;
        }
        if let Some(path) = &self.svg {
            let names: Vec<String> = names.iter().map(DeviceName::to_string).collect();
            write(path, chart::draw(results, &names.join(", ")))?;
        }
        Ok(())
    }
}

/// Where the first wrong element of a row was, and what it was.
fn first_wrong(apart: &Sample, over: Option<&Sample>) -> Option<String> {
    let first = |sample: &Sample, how: &str| Some(format!("{how}, {}", sample.wrong.as_ref()?.first.as_ref()?));
    first(apart, "out of place").or_else(|| first(over?, "in place"))
}

fn run(bench: &mut Bench, case: Case<'_>, dtype: DataType) -> Result<Sample, Failure> {
    match dtype {
        DataType::F32 => bench.run::<f32>(case),
        DataType::F16 => bench.run::<half::f16>(case),
        DataType::Bf16 => bench.run::<half::bf16>(case),
        DataType::F64 => bench.run::<f64>(case),
        DataType::I8 => bench.run::<i8>(case),
        DataType::U8 => bench.run::<u8>(case),
        DataType::I32 => bench.run::<i32>(case),
        DataType::U32 => bench.run::<u32>(case),
        DataType::I64 => bench.run::<i64>(case),
        DataType::U64 => bench.run::<u64>(case),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        perf: Perf,
    }

    fn parse(line: &str) -> Result<Perf, String> {
        let words = std::iter::once("perf").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|l| l.perf).map_err(|e| e.to_string())
    }
    fn sizes(line: &str) -> Vec<u64> {
        parse(line).unwrap().sizes().unwrap()
    }

    #[test]
    fn flags_of_nccl_tests_are_read() {
        let perf =
            parse("all-reduce -b 8 -e 128M -f 4 -n 7 -w 2 -c 0 -d all -o prod,max -g 1,2,3 -z 0 -T 5 -J out.json");
        let perf = perf.unwrap();
        assert_eq!(perf.collective, Kind::AllReduce);
        assert_eq!((perf.iters, perf.warmup_iters, perf.check, perf.blocking, perf.timeout), (7, 2, 0, 0, Some(5)));
        assert_eq!(perf.ngpus, Some(List(vec![1, 2, 3])));
        assert_eq!(perf.op.0, [ReduceOp::Product, ReduceOp::Max]);
        assert!(parse("all_reduce --warmup_iters 3 --output_file x --stepfactor 2 --minbytes 1G").is_ok());
        let perf = parse("barrier --devices cpu,proxy-vulkan:1 --path copied --algorithm auto --sync relay").unwrap();
        assert_eq!(perf.devices, Some(List(vec![DeviceName::Cpu, DeviceName::ProxyVulkan(1)])));
        assert_eq!((perf.path.0, perf.algorithm.0), (Some(Path::Copied), None));
        for wrong in [
            "",
            "allreduce",
            "all_reduce -n 0",
            "all_reduce -d f33",
            "all_reduce -f 2 -i 4",
            "all_reduce -c 2",
            "all_reduce --devices gpu",
            "all_reduce --devices cpu --backend cpu",
            "all_reduce --path quick",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sweeps_have_the_sizes_asked_for() {
        assert_eq!(sizes("all_reduce -b 1K -e 4K"), [1024, 2048, 4096]);
        assert_eq!(sizes("all_reduce -b 0 -e 8 -f 4"), [0, 4]);
        assert_eq!(sizes("all_reduce -b 100 -e 300 -i 100"), [100, 200, 300]);
        assert_eq!(sizes("all_reduce -b 64M"), [64 << 20]);
        assert_eq!(sizes("all_reduce -b 64 -e 64 -f 1"), [64]);
        assert_eq!(sizes("barrier -b 1K -e 4K"), [0]);
        for wrong in ["all_reduce -b 2K -e 1K", "all_reduce -e 2K -f 1", "all_reduce -e 2K -i 0"] {
            assert!(matches!(parse(wrong).unwrap().sizes(), Err(Failure::Usage(_))), "{wrong}");
        }
    }

    #[test]
    fn an_algorithm_that_the_collective_lacks_is_refused() {
        assert!(parse("all_to_all --algorithm tree").unwrap().check_algorithm().is_err());
        assert!(parse("all_reduce --algorithm tree").unwrap().check_algorithm().is_ok());
    }
}
