//! Running the programs of one cell and counting what they report.

use super::cells::Cell;
use crate::drivers::Environment;
use crate::process::{self, Finished};
use crate::workspace::{Binary, Workspace};
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::Command;
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
}

impl Tally {
    /// A cell that never ran has failed once.
    pub fn not_set_up(reason: String) -> Self {
        Self { failed: 1, failures: vec![reason], ..Self::default() }
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

/// Runs programs in one cell.
pub struct Runner<'a> {
    pub workspace: &'a Workspace,
    pub binaries: &'a [Binary],
    /// Where logs and reports go.
    pub reports: &'a Path,
    cell: &'a Cell,
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
        mut environment: Environment,
        reports: &'a Path,
    ) -> Result<Self, String> {
        if !cell.devices.is_empty() {
            environment.set("ALLHANDS_DEVICES", cell.devices);
        }
        for (name, value) in cell.variables {
            environment.set(name, value);
        }
        let path = reports.join(format!("{}.log", cell.name));
        let mut log = File::create(&path).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
        for line in environment.exports() {
            // As in `process`: a lost log line is no lost result.
            let _ = writeln!(log, "{line}");
        }
        Ok(Self { workspace, binaries, reports, cell, environment, log, tally: Tally::default() })
    }

    /// What was counted in all.
    pub fn finish(self) -> Tally {
        self.tally
    }

    /// Runs the integration test `name` of `package`; that it is missing or runs no test is a failure.
    /// Gives its output, for a further look.
    pub fn required_harness(&mut self, package: &str, name: &str, limit: Duration) -> Option<Finished> {
        let found = self.binaries.iter().find(|b| b.test && b.kind == "test" && b.package == package && b.name == name);
        let Some(binary) = found else {
            let file = Path::new(package).join("tests").join(name);
            self.fail(name, &format!("{}.rs is not there to be run", file.display()));
            return None;
        };
        let before = self.tally.passed + self.tally.failed;
        let finished = self.harness(&binary.label(), Command::new(&binary.path), limit);
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

    /// Counts a success that is not a test's own.
    pub fn pass(&mut self) {
        self.tally.passed += 1;
    }

    fn start(&mut self, label: &str, mut command: Command, limit: Duration) -> Finished {
        self.environment.apply(&mut command);
        let live = std::io::stdout().is_terminal();
        let (started, cell) = (Instant::now(), self.cell.name);
        let (mut done, mut shown) = (0, started);
        process::run(command, limit, &mut self.log, &mut |line| {
            done += u32::from(line.is_some_and(|line| line.ends_with("... ok")));
            if live && shown.elapsed() > Duration::from_millis(100) {
                shown = Instant::now();
                print!("\r\x1b[K  {cell:<14} {label:.50}  {done} passed so far, {} s", started.elapsed().as_secs());
                let _ = std::io::stdout().flush();
            }
        })
    }

    fn say(&self, label: &str, verdict: &str, started: Instant) {
        let clear = if std::io::stdout().is_terminal() { "\r\x1b[K" } else { "" };
        println!("{clear}  {:<14} {label:<46} {verdict} in {:.1} s", self.cell.name, started.elapsed().as_secs_f64());
    }
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
