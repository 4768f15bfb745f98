//! Running the programs of one cell and counting what they report.

use super::cells::{Cell, Level};
use crate::drivers::Environment;
use crate::process::{self, Finished};
use crate::workspace::{Binary, Workspace};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A further condition on something that ran; the error is the reason of the failure.
pub type Check<'a, T> = &'a dyn Fn(&T) -> Result<(), String>;

/// Tests counted.
#[derive(Default)]
pub struct Tally {
    pub passed: u32,
    pub failed: u32,
    /// Ignored, or not applicable to the device.
    pub skipped: u32,
    /// Each failure and its reason.
    pub failures: Vec<String>,
    /// Why nothing ran, where that is allowed.
    pub left_out: Option<String>,
}

impl Tally {
    /// A cell that never ran has failed once.
    pub fn not_set_up(reason: String) -> Self {
        Self { failed: 1, failures: vec![reason], ..Self::default() }
    }

    /// An optional cell that never ran.
    pub fn left_out(reason: String) -> Self {
        Self { skipped: 1, left_out: Some(reason), ..Self::default() }
    }

    /// Reads a test harness's lines.
    fn of(lines: &[String]) -> (Self, bool) {
        let mut tally = Self::default();
        let mut concluded = false;
        for line in lines {
            if let Some((_, counts)) = line.split_once("test result: ") {
                concluded = true;
                for part in counts.split(['.', ';']) {
                    if let Some((count, what)) = part.trim().split_once(' ')
                        && let Ok(count) = count.parse::<u32>()
                    {
                        match what {
                            "passed" => tally.passed += count,
                            "failed" => tally.failed += count,
                            "ignored" => tally.skipped += count,
                            _ => (),
                        }
                    }
                }
            } else if ["not applicable", "NotApplicable("].iter().any(|words| line.contains(words)) {
                tally.skipped += 1;
            } else if let Some(name) = line.strip_prefix("test ").and_then(|l| l.strip_suffix(" ... FAILED")) {
                tally.failures.push(name.to_owned());
            }
        }
        (tally, concluded)
    }
}

/// An integration test of the workspace.
pub struct Test<'a> {
    pub package: &'a str,
    pub name: &'a str,
    /// What of it: all if `None`.
    pub filter: Option<&'a str>,
}

impl<'a> Test<'a> {
    /// All of it.
    pub fn all(package: &'a str, name: &'a str) -> Self {
        Self { package, name, filter: None }
    }
}

/// How many bits llvmpipe's vectors have. Shaders compiled for one width must not be found by another.
pub const WIDTH: &str = "LP_NATIVE_VECTOR_WIDTH";

/// The collectives, on the devices of the cell.
pub const SUITE: Test<'static> = Test { package: "", name: "suite", filter: None };

/// Runs programs in one cell.
pub struct Runner<'a> {
    pub workspace: &'a Workspace,
    pub binaries: &'a [Binary],
    /// Where logs and reports go.
    pub reports: &'a Path,
    pub cell: &'a Cell,
    /// How much is run.
    pub level: Level,
    environment: Environment,
    log: File,
    tally: Tally,
}

impl<'a> Runner<'a> {
    /// A runner whose programs see `environment`, the cell's devices and the cell's variables.
    pub fn new(
        workspace: &'a Workspace,
        binaries: &'a [Binary],
        cell: &'a Cell,
        level: Level,
        mut environment: Environment,
        reports: &'a Path,
    ) -> Result<Self, String> {
        if !cell.devices.is_empty() {
            environment.set("ALLHANDS_DEVICES", cell.devices);
        }
        let path = reports.join(format!("{}.log", cell.name));
        let mut log = File::create(&path).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
        for line in environment.exports() {
            // As in `process`: a lost log line is no lost result.
            let _ = writeln!(log, "{line}");
        }
        Ok(Self { workspace, binaries, reports, cell, level, environment, log, tally: Tally::default() })
    }

    /// What was counted in all.
    pub fn finish(self) -> Tally {
        self.tally
    }

    /// Runs an integration test with the variables of a variant and others that force a choice; that it is missing or runs
    /// no test is a failure. Gives its output, for a further look.
    pub fn required(
        &mut self,
        test: &Test,
        variant: &[(&'static str, &'static str)],
        forced: &[(&'static str, &'static str)],
        limit: Duration,
    ) -> Option<Finished> {
        let Test { package, name, filter } = *test;
        let found = self.binaries.iter().find(|b| b.test && b.kind == "test" && b.package == package && b.name == name);
        let Some(binary) = found else {
            let file = Path::new(package).join("tests").join(name);
            self.fail(name, &format!("{}.rs is not there to be run", file.display()));
            return None;
        };
        let mut label = binary.label();
        let plain = self.environment.clone();
        let full = if package.is_empty() { self.cell.full } else { self.cell.full_conformance };
        if !full {
            self.environment.set("ALLHANDS_QUICK", "1");
        }
        for (name, value) in variant.iter().chain(forced) {
            self.environment.set(name, value);
            if *name == WIDTH {
                self.environment.separate_shaders(value);
            }
        }
        for (name, value) in [variant.first(), forced.first()].into_iter().flatten() {
            label += &format!(" {}={value}", name.trim_start_matches("ALLHANDS_").to_lowercase());
        }
        let before = self.tally.passed + self.tally.failed;
        let mut command = Command::new(&binary.path);
        command.args(filter);
        let finished = self.harness(&label, command, limit);
        self.environment = plain;
        if before == self.tally.passed + self.tally.failed {
            self.fail(name, "ran no test");
        }
        Some(finished)
    }

    /// Runs a program that takes arguments and reports as Rust's test harness does.
    pub fn harness(&mut self, label: &str, mut command: Command, limit: Duration) -> Finished {
        let started = Instant::now();
        // Else what does not apply to a device is said by passing tests, and stays unseen.
        command.arg("--show-output");
        let finished = self.start(label, command, limit);
        let (mut tally, concluded) = Tally::of(&finished.lines);
        for name in &mut tally.failures {
            *name = format!("{label}: {name}");
        }
        let unexplained = finished.reason.as_deref().filter(|_| tally.failed == 0);
        let unexplained = unexplained.or((!concluded).then_some("ended without a result"));
        if let Some(reason) = unexplained {
            tally.failed += 1;
            tally.failures.push(format!("{label}: {reason}; it said last:\n      {}", finished.tail()));
        }
        self.say(
            label,
            &format!("{} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped),
            started,
        );
        self.tally.passed += tally.passed;
        self.tally.failed += tally.failed;
        self.tally.skipped += tally.skipped;
        self.tally.failures.append(&mut tally.failures);
        finished
    }

    /// Runs a program that is one test by itself: it passes by exiting 0 and then satisfying `check`.
    pub fn check(&mut self, label: &str, command: Command, limit: Duration, check: Check<Finished>) {
        let started = Instant::now();
        let finished = self.start(label, command, limit);
        let verdict = match &finished.reason {
            Some(reason) => Err(format!("{reason}; it said last:\n      {}", finished.tail())),
            None => check(&finished),
        };
        self.say(label, if verdict.is_ok() { "passed" } else { "FAILED" }, started);
        match verdict {
            Ok(()) => self.tally.passed += 1,
            Err(reason) => self.fail(label, &reason),
        }
    }

    /// Counts a failure that is not a test's own.
    pub fn fail(&mut self, label: &str, reason: &str) {
        self.tally.failed += 1;
        self.tally.failures.push(format!("{label}: {reason}"));
    }

    /// Says something that is neither, to the terminal and the log.
    pub fn note(&mut self, text: &str) {
        print_line(&format!("  {:<18} {text}", self.cell.name));
        // As in `process`: a lost log line is no lost result.
        let _ = writeln!(self.log, "{text}");
    }

    /// Counts a success that is not a test's own.
    pub fn pass(&mut self) {
        self.tally.passed += 1;
    }

    fn start(&mut self, label: &str, command: Command, limit: Duration) -> Finished {
        let command = self.environment.apply(command);
        let (started, cell) = (Instant::now(), self.cell.name);
        let (mut done, mut shown) = (0, started);
        let finished = process::run(command, limit, &mut self.log, &mut |line| {
            done += u32::from(line.is_some_and(|line| line.ends_with("... ok")));
            if shown.elapsed() > Duration::from_millis(100) {
                shown = Instant::now();
                show(cell, Some(format!("{cell} {label}: {done} passed, {} s", started.elapsed().as_secs())));
            }
        });
        show(cell, None);
        finished
    }

    fn say(&self, label: &str, verdict: &str, started: Instant) {
        let seconds = started.elapsed().as_secs_f64();
        print_line(&format!("  {:<18} {label:<54} {verdict} in {seconds:.1} s", self.cell.name));
    }
}

/// Prints a line above the one that tells what is running.
pub fn print_line(line: &str) {
    let clear = if std::io::stdout().is_terminal() { "\r\x1b[K" } else { "" };
    println!("{clear}{line}");
}

/// What is running, on one line that is written over and over: none where output is no terminal.
fn show(cell: &'static str, text: Option<String>) {
    static RUNNING: Mutex<BTreeMap<&str, String>> = Mutex::new(BTreeMap::new());
    if !std::io::stdout().is_terminal() {
        return;
    }
    let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    match text {
        Some(text) => running.insert(cell, text),
        None => running.remove(cell),
    };
    let line = running.values().map(String::as_str).collect::<Vec<_>>().join("; ");
    print!("\r\x1b[K  {line:.110}");
    // What cannot be shown is no result.
    let _ = std::io::stdout().flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(text: &str) -> (u32, u32, u32, Vec<String>, bool) {
        let (tally, concluded) = Tally::of(&text.lines().map(str::to_owned).collect::<Vec<_>>());
        (tally.passed, tally.failed, tally.skipped, tally.failures, concluded)
    }

    #[test]
    fn results_of_several_harnesses_add_up() {
        let text = "test a ... ok\ntest b::c ... FAILED\n\
            test result: FAILED. 1 passed; 1 failed; 2 ignored; 0 measured; 7 filtered out; finished in 0.01s\n\
            cpu: gated: not applicable, one queue\ncpu: f64: NotApplicable(\"no kernel\")\n\
            test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s";
        assert_eq!(count(text), (5, 1, 4, vec!["b::c".to_owned()], true));
    }

    #[test]
    fn a_harness_that_was_cut_off_has_no_result() {
        assert_eq!(count("running 3 tests\ntest a ... ok"), (0, 0, 0, vec![], false));
    }
}
