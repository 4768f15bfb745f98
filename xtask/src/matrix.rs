//! `cargo xtask test-matrix`: everything is built once, and the same test programs then run in one cell after another,
//! each with its own drivers and devices. A cell that cannot be set up has failed, with the reason.

mod cells;
mod report;
mod runner;
mod validation;
mod work;

use crate::drivers::{self, Driver};
use crate::workspace::{Binary, Workspace};
use cells::{CELLS, Cell, Level};
use report::Outcome;
use runner::{Runner, Tally};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

/// Runs the cells that `arguments` choose; true if all passed.
pub fn run(arguments: &[String]) -> Result<bool, String> {
    let request = Request::read(arguments)?;
    let workspace = Workspace::find()?;
    let there: Vec<_> = CELLS.iter().filter(|cell| workspace.packages.iter().any(|p| p == cell.backend)).collect();
    if request.list {
        for cell in there {
            println!("{:<22} {:<9} {}", cell.name, cell.level.name(), cell.what);
        }
        return Ok(true);
    }
    if let Some(name) = request.only.iter().find(|name| there.iter().all(|cell| cell.name != **name)) {
        return Err(format!("there is no cell `{name}`; --list shows them all"));
    }
    let chosen: Vec<_> = there.into_iter().filter(|cell| request.wants(cell)).collect();
    let reports = workspace.target.join("test-matrix");
    std::fs::create_dir_all(&reports).map_err(|e| format!("cannot create {}: {e}", reports.display()))?;

    let started = Instant::now();
    println!("Building every test and example once (minutes in a fresh clone, seconds later).");
    // What is downloaded meanwhile costs no time of its own.
    let (built, unobtainable) = thread::scope(|scope| {
        let drivers = scope.spawn(|| unobtainable(&chosen, &workspace));
        (workspace.build_tests(), drivers.join())
    });
    let binaries = match built {
        Ok(binaries) => binaries,
        Err(e) => {
            println!("The build failed, so nothing ran: {e}\n0 passed, 1 failed");
            return Ok(false);
        }
    };
    let unobtainable = unobtainable.map_err(|_| "setting up the drivers panicked")?;
    println!("Built, with drivers at hand, in {} s.", started.elapsed().as_secs());

    let matrix = Matrix { workspace, binaries, unobtainable, reports, level: request.level };
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..request.jobs {
            scope.spawn(|| {
                while let Some((n, cell)) = {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    chosen.get(n).map(|cell| (n, *cell))
                } {
                    let started = Instant::now();
                    let tally = matrix.run(cell);
                    let outcome = Outcome { cell, tally, seconds: started.elapsed().as_secs_f64() };
                    runner::print_line(&outcome.line());
                    outcomes.lock().unwrap_or_else(PoisonError::into_inner).push((n, outcome));
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    outcomes.sort_by_key(|(n, _)| *n);
    let outcomes: Vec<_> = outcomes.into_iter().map(|(_, outcome)| outcome).collect();
    report::write(&outcomes, &matrix.reports.join("report.json"))?;
    report::print(&outcomes, &matrix.reports, started.elapsed());
    Ok(outcomes.iter().all(|outcome| outcome.tally.failed == 0))
}

/// Sets up the drivers of all these cells, and gives the reasons for those that cannot be.
fn unobtainable(cells: &[&Cell], workspace: &Workspace) -> BTreeMap<&'static str, String> {
    let wanted: BTreeMap<&str, &Driver> =
        cells.iter().flat_map(|cell| cell.drivers).map(|driver| (driver.name, *driver)).collect();
    let reason = |driver| drivers::set_up(&[driver], &workspace.target).err();
    wanted.into_iter().filter_map(|(name, driver)| Some((name, reason(driver)?))).collect()
}

/// What all cells share.
struct Matrix {
    workspace: Workspace,
    binaries: Vec<Binary>,
    /// Drivers that were tried in vain, and why.
    unobtainable: BTreeMap<&'static str, String>,
    reports: PathBuf,
    level: Level,
}

impl Matrix {
    fn run(&self, cell: &Cell) -> Tally {
        let missing = cell.drivers.iter().find_map(|driver| self.unobtainable.get(driver.name));
        let environment = match missing {
            Some(reason) => Err(reason.clone()),
            None => drivers::set_up(cell.drivers, &self.workspace.target),
        };
        let environment = match environment {
            Ok(environment) => environment,
            Err(reason) if cell.optional => return Tally::left_out(reason),
            Err(reason) => return Tally::not_set_up(reason),
        };
        Runner::new(&self.workspace, &self.binaries, cell, self.level, environment, &self.reports).map_or_else(
            Tally::not_set_up,
            |mut runner| {
                (cell.work)(&mut runner);
                runner.finish()
            },
        )
    }
}

#[derive(Debug)]
struct Request {
    level: Level,
    jobs: usize,
    list: bool,
    only: Vec<String>,
}

impl Request {
    fn read(arguments: &[String]) -> Result<Self, String> {
        let mut request = Self { level: Level::Standard, jobs: 2, list: false, only: Vec::new() };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--quick" => request.level = Level::Quick,
                "--extended" => request.level = Level::Extended,
                "--list" => request.list = true,
                "--jobs" => {
                    let jobs = rest.next().and_then(|word| word.parse().ok()).filter(|jobs| *jobs > 0);
                    request.jobs = jobs.ok_or("--jobs needs a number from 1")?;
                }
                "--only" => {
                    let names = rest.next().ok_or("--only needs the name of a cell; --list shows them")?;
                    request.only.extend(names.split(',').map(str::to_owned));
                }
                other => {
                    return Err(format!("test-matrix does not know `{other}`; `cargo xtask help` shows its options"));
                }
            }
        }
        Ok(request)
    }

    fn wants(&self, cell: &Cell) -> bool {
        if self.only.is_empty() { cell.level <= self.level } else { self.only.iter().any(|name| name == cell.name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Request, String> {
        Request::read(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    fn chosen(line: &str) -> Vec<&'static str> {
        let request = read(line).unwrap();
        CELLS.iter().filter(|cell| request.wants(cell)).map(|cell| cell.name).collect()
    }

    #[test]
    fn each_level_has_the_cells_of_those_before_it() {
        assert_eq!(chosen("--quick"), ["host", "cpu", "llvmpipe"]);
        let standard = chosen("");
        assert!(standard.contains(&"mixed-drivers") && !standard.contains(&"perf-full"));
        assert_eq!(chosen("--extended").len(), CELLS.len());
        assert_eq!(chosen("--only perf-full,cpu"), ["cpu", "perf-full"]);
    }

    #[test]
    fn options_are_checked() {
        assert_eq!(read("--jobs 3").unwrap().jobs, 3);
        for line in ["--jobs", "--jobs 0", "--jobs x", "--only", "--fast"] {
            assert!(read(line).is_err(), "{line}");
        }
    }
}
