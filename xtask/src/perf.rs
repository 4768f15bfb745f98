//! `cargo xtask perf --against PEER`: the same all-reduces by us and by another library, taking turns in one run, as ratios.
//!
//! Each side is a program that stays up and runs a round when a line on its standard input asks for one; between rounds it
//! sleeps. What a round is stands at `allhands rounds`.

mod chart;
mod mpi;
mod turns;

pub use turns::Turns;

use crate::workspace::Workspace;
use std::process::Command;
use std::str::FromStr;

/// What the command line says.
pub struct Options {
    /// Bytes of one rank's data.
    sizes: Vec<u64>,
    ranks: Vec<u32>,
    /// As `allhands rounds --backend` names them.
    backends: Vec<String>,
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
        sizes: vec![4 << 10, 64 << 10, 1 << 20, 16 << 20],
        ranks: vec![2, 4],
        backends: vec!["vulkan".into(), "proxy".into()],
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
            "--sizes" => options.sizes = value()?.split(',').map(bytes).collect::<Result<_, _>>()?,
            "--ranks" => options.ranks = list(value()?)?,
            "--backend" => options.backends = list(value()?)?,
            "--rounds" => options.rounds = value()?.parse().map_err(|e| format!("--rounds: {e}"))?,
            "--in-place" => options.in_place = true,
            "--check" => options.check = true,
            other => return Err(format!("`cargo xtask perf` knows no `{other}`")),
        }
    }
    match peer {
        Some("mpi") => mpi::run(&options),
        Some(other) => Err(format!("there is no comparison with `{other}`; there is one with mpi")),
        None => Err("say what to measure: --against mpi, or --staging".into()),
    }
}

/// What long messages leave behind for short ones: `allhands staging`, which needs no peer.
fn staging(arguments: &[String]) -> Result<bool, String> {
    let program = Workspace::find()?.build_program()?;
    let status = Command::new(&program).arg("staging").args(arguments).status();
    Ok(status.map_err(|e| format!("{} could not be started: {e}", program.display()))?.success())
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
