//! `allhands`: what this machine's devices can do together, how fast, and whether every bit is right.
//!
//! | file | idea |
//! |---|---|
//! | `info` | devices, and how each pair of them reaches each other |
//! | `perf` | sweeps, with nccl-tests' flags and columns |
//! | `plan` | a schedule as text or a picture, without devices |
//! | `prove` | whether cards can write into each other's memory, each pair in a child process |
//! | `rounds` | all-reduces as another program asks for them: our side of a comparison |
//! | `staging` | what long messages leave behind for short ones |
//! | `args` | what words mean |
//! | `kind` | collectives: sizes, bandwidth factors, where data lies |
//! | `reference` `verify` | what goes in, what must come out, and whether it did |
//! | `measure` `bound` | the calls of a row, and the time that they cannot beat |
//! | `row` `chart` | results as text, JSON and SVG |
mod args;
mod bound;
mod chart;
mod info;
mod kind;
mod measure;
mod perf;
mod plan;
mod prove;
mod reference;
mod rounds;
mod row;
mod staging;
mod verify;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use std::{fmt::Display, io::Write, process::ExitCode};

/// Collectives over all the GPUs of a machine, whatever their vendor.
#[derive(Parser)]
#[command(version, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the devices and how each pair of them reaches each other
    Info(info::Info),
    /// Measure and check a collective
    Perf(Box<perf::Perf>),
    /// Show the schedule of a collective, with its cost
    Plan(plan::Plan),
    /// Prove peer access between cards, and keep the result
    Prove(prove::Prove),
    /// Rounds of all-reduces, as asked for on standard input
    #[command(hide = true)]
    Rounds(rounds::Rounds),
    /// What long messages leave behind for short ones
    #[command(hide = true)]
    Staging(staging::Staging),
}

impl Command {
    /// The number of wrong elements.
    fn run(&self) -> Result<u64, Failure> {
        match self {
            Command::Info(info) => info.run().map(|()| 0),
            Command::Perf(perf) => perf.run(),
            Command::Plan(plan) => plan.run().map(|()| 0),
            Command::Prove(prove) => prove.run().map(|()| 0),
            Command::Rounds(rounds) => rounds.run(),
            Command::Staging(staging) => staging.run().map(|()| 0),
        }
    }
}

/// Why there is no result.
#[derive(Debug)]
enum Failure {
    /// The command line asks for what cannot be.
    Usage(String),
    /// Something failed.
    Run(String),
}

impl From<allhands::Error> for Failure {
    fn from(error: allhands::Error) -> Self {
        Failure::Run(error.to_string())
    }
}

/// Prints a line of results.
fn say(line: impl Display) -> Result<(), Failure> {
    writeln!(std::io::stdout(), "{line}").map_err(|e| Failure::Run(format!("standard output: {e}")))
}

/// Of a run in which elements were wrong.
const WRONG: u8 = 7;

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let wrong = match Cli::try_parse() {
        Ok(cli) => cli.command.run(),
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            say(e.to_string().trim_end()).map(|()| 0)
        }
        Err(e) => Err(Failure::Usage(one_line(&e.to_string()))),
    };
    let (code, text) = match wrong {
        Ok(0) => return ExitCode::SUCCESS,
        Ok(n) => (WRONG, format!("{n} elements or guard bytes are wrong")),
        Err(Failure::Usage(text)) => (2, text),
        Err(Failure::Run(text)) => (1, text),
    };
    eprintln!("allhands: {text}");
    ExitCode::from(code)
}

/// What clap says is wrong, without the usage that it shows below.
fn one_line(message: &str) -> String {
    let what = message.trim_start_matches("error: ").split("\n\n").next().unwrap_or_default();
    what.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn bad_arguments_take_one_line() {
        for words in [&["perf"][..], &["perf", "allreduce"], &["plan", "all_reduce"], &["info", "--devices", "gpu"]] {
            let error = Cli::try_parse_from(std::iter::once("allhands").chain(words.iter().copied())).err().unwrap();
            let line = one_line(&error.to_string());
            assert!(!line.contains('\n') && !line.contains("Usage") && line.len() > 20, "{line}");
        }
    }
}
