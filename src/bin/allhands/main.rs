//! `allhands`: what this machine's devices can do together, how fast, and whether every bit is right.
//!
//! | file | idea |
//! |---|---|
//! | `info` | devices, and how each pair of them reaches each other |
//! | `perf` | sweeps, with nccl-tests' flags and columns |
//! | `plan` | a schedule as text or a picture, without devices |
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
mod reference;
mod row;
mod verify;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

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

/// Of a run in which elements were wrong.
const WRONG: u8 = 7;

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let wrong = match Cli::parse().command {
        Command::Info(info) => info.run().map(|()| 0),
        Command::Perf(perf) => perf.run(),
        Command::Plan(plan) => plan.run().map(|()| 0),
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
