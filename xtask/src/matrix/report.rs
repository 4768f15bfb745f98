//! What the matrix says at the end: a table for people, JSON for programs, and one closing line.

use super::cells::Cell;
use super::runner::Tally;
use crate::json::quote;
use std::path::Path;
use std::time::Duration;

/// One cell that ran, or could not.
pub struct Outcome<'a> {
    pub cell: &'a Cell,
    pub tally: Tally,
    pub seconds: f64,
}

impl Outcome<'_> {
    /// The cell's row in the table.
    pub fn line(&self) -> String {
        let Tally { passed, failed, skipped, .. } = self.tally;
        let verdict = match &self.tally.left_out {
            _ if failed > 0 => "FAILED",
            Some(_) => "skipped",
            None => "ok",
        };
        row([
            self.cell.name,
            &self.drivers(),
            if self.cell.devices.is_empty() { "-" } else { self.cell.devices },
            &passed.to_string(),
            &failed.to_string(),
            &skipped.to_string(),
            &format!("{:.1}", self.seconds),
            verdict,
        ])
    }

    fn drivers(&self) -> String {
        match self.cell.drivers {
            [] => "-".into(),
            drivers => drivers.iter().map(|driver| driver.name).collect::<Vec<_>>().join("+"),
        }
    }
}

/// Writes the report for programs.
pub fn write(outcomes: &[Outcome], path: &Path) -> Result<(), String> {
    let cells: Vec<_> = outcomes
        .iter()
        .map(|outcome| {
            let Tally { passed, failed, skipped, failures, left_out } = &outcome.tally;
            let failures: Vec<_> = failures.iter().map(|failure| quote(failure)).collect();
            format!(
                "{{\"cell\":{},\"drivers\":{},\"devices\":{},\"passed\":{passed},\"failed\":{failed},\"skipped\":{skipped},\
                 \"seconds\":{:.3},\"failures\":[{}],\"left_out\":{}}}",
                quote(outcome.cell.name),
                quote(&outcome.drivers()),
                quote(outcome.cell.devices),
                outcome.seconds,
                failures.join(","),
                left_out.as_deref().map_or("null".into(), quote)
            )
        })
        .collect();
    let (passed, failed, skipped) = totals(outcomes);
    let text = format!(
        "{{\"passed\":{passed},\"failed\":{failed},\"skipped\":{skipped},\"cells\":[\n{}\n]}}\n",
        cells.join(",\n")
    );
    std::fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
}

/// Prints the failures, the table and, last of all, the totals.
pub fn print(outcomes: &[Outcome], reports: &Path, elapsed: Duration) {
    for outcome in outcomes.iter().filter(|outcome| outcome.tally.failed > 0) {
        println!("\n{} failed:", outcome.cell.name);
        for failure in &outcome.tally.failures {
            println!("    {failure}");
        }
    }
    for outcome in outcomes {
        if let Some(reason) = &outcome.tally.left_out {
            println!("\n{} was left out, as it may be: {reason}", outcome.cell.name);
        }
    }
    println!("\n{}", row(["cell", "drivers", "devices", "passed", "failed", "skipped", "seconds", ""]));
    for outcome in outcomes {
        println!("{}", outcome.line());
    }
    println!("\n{} s in all; logs and report.json are in {}", elapsed.as_secs(), reports.display());
    match totals(outcomes) {
        (passed, failed, 0) => println!("{passed} passed, {failed} failed"),
        (passed, failed, skipped) => println!("{passed} passed, {failed} failed, {skipped} skipped"),
    }
}

fn row([cell, drivers, devices, passed, failed, skipped, seconds, verdict]: [&str; 8]) -> String {
    format!("{cell:<18} {drivers:<25} {devices:<44.44} {passed:>6} {failed:>6} {skipped:>7} {seconds:>7}  {verdict}")
}

fn totals(outcomes: &[Outcome]) -> (u32, u32, u32) {
    let sum = |count: fn(&Tally) -> u32| outcomes.iter().map(|outcome| count(&outcome.tally)).sum();
    (sum(|t| t.passed), sum(|t| t.failed), sum(|t| t.skipped))
}
