//! `cargo xtask perf --against PEER`: the same all-reduces by us and by another library, taking turns in one run, as ratios.
//!
//! Each side is a program that stays up and runs a round when a line on its standard input asks for one; between rounds it
//! sleeps. What a round is stands at `allhands rounds`.

mod chart;
mod mpi;
mod nccl;
mod turns;

pub use turns::Turns;

use crate::drivers::tree;
use crate::workspace::Workspace;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

/// What the command line says.
pub struct Options {
    /// Bytes of one rank's data; `None`: the peer's own list.
    sizes: Option<Vec<u64>>,
    ranks: Vec<u32>,
    /// As `allhands rounds --backend` names them.
    backends: Vec<String>,
    /// As `allhands rounds --devices` names them.
    devices: Option<String>,
    /// `allhands`, where it is built already.
    program: Option<PathBuf>,
    rounds: u32,
    in_place: bool,
    /// Whether a bar that is missed is an error.
    check: bool,
}

/// Runs the comparison; false if a result was wrong, or a bar was missed that was to be met.
pub fn run(arguments: &[String]) -> Result<bool, String> {
    if let Some((_, rest)) = arguments.split_first().filter(|(first, _)| *first == "--staging") {
        return staging(rest);
    }
    let mut options = Options {
        sizes: None,
        ranks: vec![2, 4],
        backends: vec!["vulkan".into(), "proxy".into()],
        devices: None,
        program: None,
        rounds: 5,
        in_place: false,
        check: false,
    };
    let mut peer = None;
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        match word.as_str() {
            "--against" => peer = Some(value()?.as_str()),
            "--sizes" => options.sizes = Some(value()?.split(',').map(bytes).collect::<Result<_, _>>()?),
            "--ranks" => options.ranks = list(value()?)?,
            "--backend" => options.backends = list(value()?)?,
            "--devices" => options.devices = Some(value()?.clone()),
            "--program" => options.program = Some(value()?.into()),
            "--rounds" => options.rounds = value()?.parse().map_err(|e| format!("--rounds: {e}"))?,
            "--in-place" => options.in_place = true,
            "--check" => options.check = true,
            other => return Err(format!("`cargo xtask perf` knows no `{other}`")),
        }
    }
    match peer {
        Some("mpi") => mpi::run(&options),
        Some("nccl") => nccl::run(&options),
        Some(other) => Err(format!("there is no comparison with `{other}`; there is one with mpi and one with nccl")),
        None => Err("say what to measure: --against mpi, --against nccl, or --staging".into()),
    }
}

/// What long messages leave behind for short ones: `allhands staging`, which needs no peer.
fn staging(arguments: &[String]) -> Result<bool, String> {
    let program = Workspace::find()?.build_program()?;
    let status = Command::new(&program).arg("staging").args(arguments).status();
    Ok(status.map_err(|e| format!("{} could not be started: {e}", program.display()))?.success())
}

/// The target directory, and our program. One that is named needs no cargo, which a machine with the right GPUs may lack.
fn ours(options: &Options) -> Result<(PathBuf, PathBuf), String> {
    if let Some(program) = &options.program {
        let here = std::env::current_dir().map_err(|e| format!("the working directory: {e}"))?;
        return Ok((here.join("target"), here.join(program)));
    }
    let workspace = Workspace::find()?;
    let program = workspace.build_program()?;
    Ok((workspace.target, program))
}

/// Compiles the program that calls a peer's library: `file`, with `source` in it, below the target directory.
fn compile(compiler: &str, target: &Path, file: &str, source: &str, arguments: &[OsString]) -> Result<PathBuf, String> {
    let source_file = target.join("peers").join(file);
    let program = source_file.with_extension("");
    tree::write(&source_file, source)?;
    let output = Command::new(compiler)
        .args(["-O2", "-Wall", "-o"])
        .args([&program, &source_file])
        .args(arguments)
        .output()
        .map_err(|e| format!("a compiler is needed, and `{compiler}` cannot be run: {e}"))?;
    if output.status.success() {
        return Ok(program);
    }
    Err(format!("{compiler} failed on {}:\n{}", source_file.display(), String::from_utf8_lossy(&output.stderr)))
}

/// Keeps a report for programs and its chart, and says where.
fn write(target: &Path, name: &str, json: &str, svg: &str) -> Result<(), String> {
    let directory = target.join("perf");
    std::fs::create_dir_all(&directory).map_err(|e| format!("cannot create {}: {e}", directory.display()))?;
    for (kind, text) in [("json", json), ("svg", svg)] {
        let path = directory.join(format!("{name}.{kind}"));
        std::fs::write(&path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}

fn list<T: FromStr<Err: std::fmt::Display>>(text: &str) -> Result<Vec<T>, String> {
    text.split(',').map(|word| word.parse().map_err(|e| format!("{word:?}: {e}"))).collect()
}

/// Bytes, with K or M behind the number or nothing.
fn bytes(word: &str) -> Result<u64, String> {
    let (digits, unit) = match word.as_bytes() {
        [.., b'K' | b'k'] => (&word[..word.len() - 1], 10),
        [.., b'M' | b'm'] => (&word[..word.len() - 1], 20),
        _ => (word, 0),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{word:?} is no size; right are 4096, 64K, 1M"))?;
    Ok(number << unit)
}

/// As people write it.
fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

/// The middle one; of none, not a number.
fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
