//! `cargo xtask test-matrix`: everything is built once, and the same test programs then run in one cell after another,
//! each with its own drivers and devices. A cell that cannot be set up has failed, with the reason.

mod cells;
mod report;
mod runner;
mod validation;

use crate::drivers;
use crate::workspace::Workspace;
use cells::{CELLS, Cell, Level};
use report::Outcome;
use runner::Runner;
use std::collections::BTreeSet;
use std::time::Instant;

/// Runs the cells that `arguments` choose; true if all passed.
pub fn run(arguments: &[String]) -> Result<bool, String> {
    let request = Request::read(arguments)?;
    if request.list {
        for cell in CELLS {
            println!("{:<22} {:<9} {}", cell.name, cell.level.name(), cell.what);
        }
        return Ok(true);
    }
    let chosen: Vec<_> = CELLS.iter().filter(|cell| request.wants(cell)).collect();
    let workspace = Workspace::find()?;
    let reports = workspace.target.join("test-matrix");
    std::fs::create_dir_all(&reports).map_err(|e| format!("cannot create {}: {e}", reports.display()))?;

    let started = Instant::now();
    println!("Building every test and example once (minutes in a fresh clone, seconds later).");
    let binaries = match workspace.build_tests() {
        Ok(binaries) => binaries,
        Err(e) => {
            println!("The build failed, so nothing ran: {e}\n0 passed, 1 failed");
            return Ok(false);
        }
    };
    println!("Built in {} s.", started.elapsed().as_secs());
    let wanted: BTreeSet<_> = chosen.iter().flat_map(|cell| cell.drivers).map(|driver| driver.name).collect();
    if !wanted.is_empty() {
        println!("Drivers: {}.", wanted.into_iter().collect::<Vec<_>>().join(", "));
    }

    let mut outcomes = Vec::new();
    for cell in chosen {
        let started = Instant::now();
        let tally = drivers::set_up(cell.drivers, &workspace.target)
            .and_then(|environment| Runner::new(&workspace, &binaries, cell, environment, &reports))
            .map_or_else(runner::Tally::not_set_up, |mut runner| {
                (cell.work)(&mut runner);
                runner.finish()
            });
        let outcome = Outcome { cell, tally, seconds: started.elapsed().as_secs_f64() };
        println!("{}", outcome.line());
        outcomes.push(outcome);
    }
    report::write(&outcomes, &reports.join("report.json"))?;
    report::print(&outcomes, &reports, started.elapsed());
    Ok(outcomes.iter().all(|outcome| outcome.tally.failed == 0))
}

struct Request {
    level: Level,
    list: bool,
    only: Vec<String>,
}

impl Request {
    fn read(arguments: &[String]) -> Result<Self, String> {
        let mut request = Self { level: Level::Standard, list: false, only: Vec::new() };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--quick" => request.level = Level::Quick,
                "--extended" => request.level = Level::Extended,
                "--list" => request.list = true,
                "--only" => {
                    let names = rest.next().ok_or("--only needs the name of a cell; --list shows them")?;
                    request.only.extend(names.split(',').map(str::to_owned));
                }
                other => {
                    return Err(format!("test-matrix does not know `{other}`; `cargo xtask help` shows its options"));
                }
            }
        }
        match request.only.iter().find(|name| CELLS.iter().all(|cell| cell.name != **name)) {
            Some(name) => Err(format!("there is no cell `{name}`; --list shows them all")),
            None => Ok(request),
        }
    }

    fn wants(&self, cell: &Cell) -> bool {
        if self.only.is_empty() { cell.level <= self.level } else { self.only.iter().any(|name| name == cell.name) }
    }
}
