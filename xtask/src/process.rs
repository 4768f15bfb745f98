//! Running a child: its output to a log and to a watcher line by line, and no longer than it may take.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// How often the watcher hears from a silent child.
const TICK: Duration = Duration::from_millis(200);
/// How long output may still arrive from a child that has ended: a grandchild can hold the pipe open for ever.
const DRAIN: Duration = Duration::from_secs(2);

/// How a child ended, and what it said.
pub struct Finished {
    /// `None`: it could not be started, ran past its time, or could not be waited for; `reason` tells.
    pub status: Option<ExitStatus>,
    /// Why it is not a success.
    pub reason: Option<String>,
    /// Both output streams, line by line, in order of arrival.
    pub lines: Vec<String>,
}

impl Finished {
    /// The last few lines, for a report.
    pub fn tail(&self) -> String {
        let said: Vec<_> = self.lines.iter().map(|l| l.trim_end()).filter(|l| !l.is_empty()).collect();
        said[said.len().saturating_sub(8)..].join("\n      ")
    }
}

/// Runs `command` for at most `limit`. `watch` is called with each line, and with `None` now and then between lines.
pub fn run(mut command: Command, limit: Duration, log: &mut File, watch: &mut dyn FnMut(Option<&str>)) -> Finished {
    let arguments: Vec<_> = command.get_args().map(|a| a.to_string_lossy()).collect();
    // A log that cannot be written loses a convenience, not a result.
    let _ = writeln!(log, "\n$ {} {}", command.get_program().to_string_lossy(), arguments.join(" "));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut finished = Finished { status: None, reason: None, lines: Vec::new() };
    let started = Instant::now();
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(e) => {
            finished.reason = Some(format!("could not be started: {e}"));
            return finished;
        }
    };
    let (sender, lines) = mpsc::channel();
    for stream in [child.stdout.take().map(boxed), child.stderr.take().map(boxed)].into_iter().flatten() {
        let sender = sender.clone();
        thread::spawn(move || {
            for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    break;
                }
            }
        });
    }
    drop(sender);
    let mut ended: Option<Instant> = None;
    loop {
        match lines.recv_timeout(TICK) {
            Ok(line) => {
                let _ = writeln!(log, "{line}");
                watch(Some(&line));
                finished.lines.push(line);
            }
            Err(RecvTimeoutError::Timeout) => watch(None),
            Err(RecvTimeoutError::Disconnected) if ended.is_some() => break,
            Err(RecvTimeoutError::Disconnected) => thread::sleep(TICK / 20),
        }
        if let Some(end) = ended {
            if end.elapsed() > DRAIN {
                break;
            }
        } else if let Ok(Some(status)) = child.try_wait() {
            finished.status = Some(status);
            finished.reason = (!status.success()).then(|| describe(status));
            ended = Some(Instant::now());
        } else if started.elapsed() > limit {
            // Either call can fail only where the child has just ended by itself.
            let _ = child.kill();
            let _ = child.wait();
            finished.reason = Some(format!("killed: still running after {} s", limit.as_secs()));
            ended = Some(Instant::now());
        }
    }
    if let Some(reason) = &finished.reason {
        let _ = writeln!(log, "[{reason}]");
    }
    finished
}

fn boxed<R: Read + Send + 'static>(stream: R) -> Box<dyn Read + Send> {
    Box::new(stream)
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Finished {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, limit, &mut File::options().write(true).open("/dev/null").unwrap(), &mut |_| ())
    }

    #[test]
    fn both_streams_and_the_exit_code_are_kept() {
        let finished = shell("echo out; echo err >&2; exit 3", Duration::from_secs(60));
        let mut lines = finished.lines.clone();
        lines.sort();
        assert_eq!(lines, ["err", "out"]);
        assert_eq!(finished.reason.as_deref(), Some("exit code 3"));
    }

    #[test]
    fn a_hung_child_is_killed_and_its_last_lines_are_kept() {
        let finished = shell("echo last words; exec sleep 1000", Duration::from_millis(300));
        assert!(finished.status.is_none());
        assert!(finished.reason.as_deref().unwrap().contains("still running"));
        assert_eq!(finished.tail(), "last words");
    }
}
