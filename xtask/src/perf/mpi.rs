//! Against Open MPI, on a software driver: every rank of either side is the CPU's.
//!
//! Open MPI comes from Debian's packages, unpacked below the target directory. It runs as it does by default and with
//! `mpi_yield_when_idle`, and the faster of the two counts.

use super::{Options, Turns, chart, compile, median, size, turns::Answer, write};
use crate::drivers::{self, Environment, tree::Tree};
use crate::json::quote;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Ours, as asked for; the first is what a caller gets who asks for none.
const ALGORITHMS: [&str; 3] = ["auto", "one-shot", "two-shot"];

/// Open MPI, unpacked, and the program that calls it.
struct Mpi {
    tree: Tree,
    mpirun: PathBuf,
    program: PathBuf,
}

/// A side of the comparison: a program, and what it is asked for beside size and repetitions.
struct Contender {
    program: usize,
    name: String,
    algorithm: &'static str,
    backend: Option<String>,
}

/// What a contender needed at a size, over all rounds: medians, in microseconds.
struct Row {
    ranks: u32,
    bytes: u64,
    name: String,
    backend: Option<String>,
    auto: bool,
    how: String,
    whole: f64,
    own: f64,
    net: f64,
    /// Ours only: an empty submit-and-wait.
    empty: f64,
    /// Ours only: bytes a second that a plain copy reads and writes.
    copy: f64,
    rounds: Vec<f64>,
}

/// What must hold at a size.
enum Bar {
    /// Of Open MPI's time.
    Share(f64),
    /// Empty submit-and-waits.
    Empty(f64),
}

pub fn run(options: &Options) -> Result<bool, String> {
    let (target, ours) = super::ours(options)?;
    let environment = drivers::set_up(&[&drivers::LLVMPIPE], &target)?;
    let mpi = Mpi::set_up(&target)?;
    let mut rows = Vec::new();
    let mut wrong = 0.0;
    let mut named = Vec::new();
    for &ranks in &options.ranks {
        let (found, bad) = compare(options, ranks, &ours, &environment, &mpi, &mut named)?;
        rows.extend(found);
        wrong += bad;
    }
    named.sort();
    named.dedup();
    println!("\n{}", named.join("\n"));
    println!("f32, sum, {}; {} rounds", if options.in_place { "in place" } else { "out of place" }, options.rounds);
    print(&rows);
    let verdicts = judge(&rows);
    verdicts.iter().for_each(|(_, text)| println!("{text}"));
    write(&target, "mpi", &json(&rows), &picture(&rows, &named))?;
    if wrong > 0.0 {
        println!("{wrong} elements are wrong");
    }
    Ok(wrong == 0.0 && (!options.check || verdicts.iter().all(|(met, _)| *met)))
}

/// All contenders at all sizes, a round at a time.
fn compare(
    options: &Options,
    ranks: u32,
    ours: &Path,
    environment: &Environment,
    mpi: &Mpi,
    named: &mut Vec<String>,
) -> Result<(Vec<Row>, f64), String> {
    let mut programs = Vec::new();
    let mut contenders = Vec::new();
    for backend in &options.backends {
        let mut command = Command::new(ours);
        command.args(["rounds", "--backend", backend, "-g", &ranks.to_string()]);
        programs.push(Turns::start(backend, environment.apply(command))?);
        for algorithm in ALGORITHMS {
            let name = format!("{backend} {algorithm}");
            contenders.push(Contender { program: programs.len() - 1, name, algorithm, backend: Some(backend.clone()) });
        }
    }
    for (name, yields) in [("mpi", false), ("mpi, yielding", true)] {
        programs.push(Turns::start(name, mpi.command(ranks, yields))?);
        contenders.push(Contender { program: programs.len() - 1, name: name.into(), algorithm: "", backend: None });
    }
    named.extend(programs.iter().map(|p| p.greeting.clone()));

    let mut rows = Vec::new();
    let mut wrong = 0.0;
    for &bytes in options.sizes.as_deref().unwrap_or(&[4 << 10, 64 << 10, 1 << 20, 16 << 20]) {
        let place = if options.in_place { "in" } else { "out" };
        // On two cores the dispatches take ten times as long as what is measured, and vary by a tenth.
        let repetitions = (80_u64 << 20).div_ceil(bytes).clamp(5, 300);
        let mut answers: Vec<Vec<Answer>> = contenders.iter().map(|_| Vec::new()).collect();
        for round in 0..options.rounds as usize {
            // Nobody always follows the same one.
            for turn in 0..contenders.len() {
                let number = (turn + round) % contenders.len();
                let contender = &contenders[number];
                let request = format!("{bytes} {repetitions} {place} {}", contender.algorithm);
                let answer = programs[contender.program].ask(request.trim())?;
                wrong += answer.number("wrong")?;
                answers[number].push(answer);
            }
            eprintln!("{ranks} ranks, {}: round {} of {}", size(bytes), round + 1, options.rounds);
        }
        for (contender, answers) in contenders.iter().zip(&answers) {
            rows.push(Row::new(ranks, bytes, contender, answers)?);
        }
    }
    Ok((rows, wrong))
}

impl Row {
    fn new(ranks: u32, bytes: u64, contender: &Contender, answers: &[Answer]) -> Result<Self, String> {
        let all = |key: &str| answers.iter().map(|a| a.number(key)).collect::<Result<Vec<_>, _>>();
        let ours = |key: &str| if contender.backend.is_some() { all(key) } else { Ok(Vec::new()) };
        let rounds = all("net")?;
        Ok(Row {
            ranks,
            bytes,
            name: contender.name.clone(),
            backend: contender.backend.clone(),
            auto: contender.algorithm == ALGORITHMS[0],
            how: answers.last().map_or(String::new(), |a| a.text("how").into()),
            whole: median(all("whole")?),
            own: median(all("own")?),
            net: median(rounds.iter().copied()),
            empty: median(ours("empty")?),
            copy: ours("copy")?.into_iter().fold(f64::NAN, f64::max),
            rounds,
        })
    }
}

impl Bar {
    /// What is asked at a size, if anything.
    fn of(ranks: u32, bytes: u64) -> Option<Bar> {
        match bytes >> 10 {
            4 if ranks == 2 => Some(Bar::Empty(3.0)),
            64 => Some(Bar::Share(1.5)),
            1024 | 16384 => Some(Bar::Share(0.6)),
            _ => None,
        }
    }
}

/// Of the rows of the same ranks and size: Open MPI's time, as it was the faster.
fn theirs(rows: &[Row], r: &Row) -> f64 {
    let alike = rows.iter().filter(|o| (o.ranks, o.bytes, &o.backend) == (r.ranks, r.bytes, &None));
    alike.map(|o| o.net).fold(f64::INFINITY, f64::min)
}

fn print(rows: &[Row]) {
    println!(
        "\nTimes in us, medians. all-reduce: the whole less the dispatches around it. bound: reading every rank's input and \
         writing every\nrank's output, 2 x ranks x size bytes, at the speed at which all cores together copy as much memory; \
         as a share of the time.\n"
    );
    println!(
        "{:>5} {:>8}  {:<22} {:>10} {:>10} {:>10} {:>8} {:>7} {:>8}  how",
        "ranks", "size", "", "whole", "dispatches", "all-reduce", "of MPI's", "bound", "empty"
    );
    for r in rows {
        let alike = rows.iter().filter(|o| (o.ranks, o.bytes) == (r.ranks, r.bytes));
        let copy = alike.map(|o| o.copy).fold(f64::NAN, f64::max);
        let bound = 2e6 * f64::from(r.ranks) * r.bytes as f64 / copy;
        let empty = if r.empty.is_finite() { format!("{:.1}", r.empty) } else { "-".into() };
        println!(
            "{:>5} {:>8}  {:<22} {:>10.1} {:>10.1} {:>10.1} {:>8.2} {:>6.1}% {empty:>8}  {}",
            r.ranks,
            size(r.bytes),
            r.name,
            r.whole,
            r.own,
            r.net,
            r.net / theirs(rows, r),
            100.0 * bound / r.net,
            r.how
        );
    }
    println!();
}

/// Whether each bar is met by the backend that is the faster over all sizes, and how to say so.
fn judge(rows: &[Row]) -> Vec<(bool, String)> {
    let is_auto = |r: &&Row, backend: &str| r.auto && r.backend.as_deref() == Some(backend);
    let slowness =
        |backend: &str| -> f64 { rows.iter().filter(|r| is_auto(r, backend)).map(|r| r.net.max(1.0).ln()).sum() };
    let backends = rows.iter().filter_map(|r| r.backend.as_deref());
    let Some(ours) = backends.min_by(|a, b| slowness(a).total_cmp(&slowness(b))) else { return Vec::new() };
    let verdict = |r: &Row| {
        let (what, one, most) = match Bar::of(r.ranks, r.bytes)? {
            Bar::Share(most) => ("of Open MPI's time", theirs(rows, r), most),
            Bar::Empty(most) => ("empty submit-and-waits", r.empty, most),
        };
        let (least, greatest) = r.rounds.iter().fold((f64::MAX, f64::MIN), |(l, g), v| (l.min(*v), g.max(*v)));
        let met = r.net / one <= most;
        let text = format!(
            "{:<6} {} ranks, {}, {}: {:.2} {what} (rounds {:.2} to {:.2}); at most {most}",
            if met { "met" } else { "MISSED" },
            r.ranks,
            size(r.bytes),
            r.name,
            r.net / one,
            least / one,
            greatest / one
        );
        Some((met, text))
    };
    rows.iter().filter(|r| is_auto(r, ours)).filter_map(verdict).collect()
}

fn json(rows: &[Row]) -> String {
    let number = |v: f64| if v.is_finite() { format!("{v:.3}") } else { "null".into() };
    let row = |r: &Row| {
        let rounds: Vec<_> = r.rounds.iter().map(|v| number(*v)).collect();
        format!(
            "{{\"ranks\":{},\"size\":{},\"name\":{},\"how\":{},\"whole_us\":{},\"dispatches_us\":{},\"all_reduce_us\":{},\
             \"empty_us\":{},\"copy_bytes_s\":{},\"rounds_us\":[{}]}}",
            r.ranks,
            r.bytes,
            quote(&r.name),
            quote(&r.how),
            number(r.whole),
            number(r.own),
            number(r.net),
            number(r.empty),
            number(r.copy),
            rounds.join(",")
        )
    };
    format!("{{\"rows\":[\n{}\n]}}\n", rows.iter().map(row).collect::<Vec<_>>().join(",\n"))
}

/// A panel for each number of ranks, a line for each contender.
fn picture(rows: &[Row], named: &[String]) -> String {
    let mut ranks: Vec<u32> = rows.iter().map(|r| r.ranks).collect();
    ranks.dedup();
    let panel = |ranks: &u32| {
        let points = rows.iter().filter(|r| r.ranks == *ranks).map(|r| (r.name.as_str(), r.bytes, r.net));
        chart::Panel::new(&format!("{ranks} ranks: time of an all-reduce, us"), points)
    };
    let panels: Vec<_> = ranks.iter().map(panel).collect();
    chart::draw("all_reduce, sum of f32, against Open MPI", &named.join("; "), &panels)
}

impl Mpi {
    fn set_up(target: &Path) -> Result<Self, String> {
        let tree = Tree::open(target.join("peers/openmpi"))?;
        // Of the development package the headers will do: what it depends on is compilers.
        tree.provide("openmpi", &["openmpi-bin"])
            .and_then(|()| tree.provide_alone("headers", &["libopenmpi-dev"]))
            .map_err(|e| format!("Open MPI could not be unpacked from openmpi-bin and libopenmpi-dev: {e}"))?;
        let include = tree.library("openmpi/include")?;
        let arguments = [
            "-march=native".into(),
            "-I".into(),
            include.into(),
            tree.library("libmpi.so.40")?.into(),
            // The libraries that it needs in turn are found when it runs.
            "-Wl,--allow-shlib-undefined".into(),
        ];
        let program = compile("cc", target, "mpi_all_reduce.c", include_str!("mpi.c"), &arguments)?;
        Ok(Mpi { mpirun: tree.installed("usr/bin/mpirun.openmpi")?, tree, program })
    }

    /// `ranks` processes that talk through shared memory.
    fn command(&self, ranks: u32, yields: bool) -> Command {
        let mut command = Command::new(&self.mpirun);
        command.args(["--oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", "self,vader"]);
        if yields {
            command.args(["--mca", "mpi_yield_when_idle", "1"]);
        }
        command.args(["-n", &ranks.to_string()]).arg(&self.program);
        let mut environment = Environment::default();
        environment.search_libraries(&self.tree.library_directories());
        let mut command = environment.apply(command);
        if let Ok(prefix) = self.tree.installed("usr") {
            command.env("OPAL_PREFIX", prefix);
        }
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        // Compression is for launching on many machines, and its library was not unpacked.
        command.env("PMIX_MCA_pcompress_base_silence_warning", "1");
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ranks: u32, bytes: u64, backend: Option<&str>, net: f64) -> Row {
        let backend = backend.map(String::from);
        Row {
            ranks,
            bytes,
            name: backend.clone().unwrap_or("mpi".into()),
            auto: backend.is_some(),
            backend,
            how: String::new(),
            whole: net,
            own: 0.0,
            net,
            empty: 10.0,
            copy: 1e9,
            rounds: vec![net],
        }
    }

    #[test]
    fn the_faster_backend_is_held_to_the_bars() {
        let rows = |bytes, slow, fast, mpi| {
            [
                row(2, bytes, Some("slow"), slow),
                row(2, bytes, Some("fast"), fast),
                row(2, bytes, None, mpi),
                row(2, bytes, None, 2.0 * mpi),
            ]
        };
        let all: Vec<Row> = [
            rows(4 << 10, 1e3, 29.0, 1.0),     // at most 3 empty ones of 10
            rows(64 << 10, 1e3, 151.0, 100.0), // at most 1.5 of 100
            rows(1 << 20, 1e3, 60.0, 100.0),   // at most 0.6 of 100
            rows(16 << 20, 50.0, 61.0, 100.0),
            rows(8 << 20, 1e3, 1e3, 1.0), // no bar
        ]
        .into_iter()
        .flatten()
        .collect();
        let verdicts = judge(&all);
        assert!(verdicts.iter().all(|(_, text)| text.contains("fast")));
        assert_eq!(verdicts.iter().map(|v| v.0).collect::<Vec<_>>(), [true, false, true, false]);
        assert!(judge(&[row(4, 4 << 10, Some("fast"), 1.0)]).is_empty());
    }
}
