//! A program that does a piece of work each time it is asked, and sleeps in between.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// How long one answer may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// The program, running.
pub struct Turns {
    /// What messages and tables call it.
    pub name: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    /// What it said of itself at the start.
    pub greeting: String,
}

/// One line of answers: words `key=value`.
#[derive(Clone, Debug)]
pub struct Answer(BTreeMap<String, String>);

impl Turns {
    /// Starts it and waits for its first line.
    pub fn start(name: &str, mut command: Command) -> Result<Self, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("{name} could not be started: {e}"))?;
        let (sender, lines) = mpsc::channel();
        if let Some(output) = child.stdout.take() {
            thread::spawn(move || {
                BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
            });
        }
        let input = child.stdin.take();
        let mut turns = Turns { name: name.into(), child, input, lines, greeting: String::new() };
        turns.greeting = turns.line()?;
        Ok(turns)
    }

    /// Asks for one piece of work, and waits for the answer.
    pub fn ask(&mut self, request: &str) -> Result<Answer, String> {
        let sent = self.input.as_mut().map(|input| writeln!(input, "{request}").and_then(|()| input.flush()));
        if !matches!(sent, Some(Ok(()))) {
            return Err(format!("{} has ended", self.name));
        }
        let line = self.line()?;
        let word = |word: &str| word.split_once('=').map(|(key, value)| (key.into(), value.into()));
        Ok(Answer(line.split_whitespace().filter_map(word).collect()))
    }

    fn line(&mut self) -> Result<String, String> {
        self.lines.recv_timeout(PATIENCE).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("{} has not answered in {} s", self.name, PATIENCE.as_secs()),
            RecvTimeoutError::Disconnected => format!("{} has ended", self.name),
        })
    }
}

impl Drop for Turns {
    /// It ends when nobody can ask any more; if it does not, it is stopped.
    fn drop(&mut self) {
        self.input = None;
        for _ in 0..100 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
        // Either fails only where the child has just ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Answer {
    /// A number.
    pub fn number(&self, key: &str) -> Result<f64, String> {
        let text = self.text(key);
        text.parse().map_err(|_| format!("{key} is {text:?}, which is no number"))
    }
    /// A word; empty if it is not there.
    pub fn text(&self, key: &str) -> &str {
        self.0.get(key).map_or("", String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn each_request_gets_its_answer() {
        let mut turns = Turns::start("echo", shell("echo hello; while read n; do echo \"n=$n word=x\"; done")).unwrap();
        assert_eq!(turns.greeting, "hello");
        for n in [3.0, 4.5] {
            let answer = turns.ask(&n.to_string()).unwrap();
            assert_eq!((answer.number("n"), answer.text("word")), (Ok(n), "x"));
            assert!(answer.number("word").is_err() && answer.number("none").is_err());
        }
    }

    #[test]
    fn a_program_that_ends_is_an_error() {
        assert!(Turns::start("nothing", shell("exit 3")).err().unwrap().contains("nothing has ended"));
        let mut turns = Turns::start("once", shell("echo hello; read n")).unwrap();
        assert!(turns.ask("1").is_err());
    }
}
