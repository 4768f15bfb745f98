//! The validation cell. First the canary shows that the layer sees a mistake of each kind that matters, then the Vulkan
//! work runs under it, and every message that the allowlist does not explain is a failure.

use super::runner::{Runner, SUITE, Test};
use super::work;
use crate::process::Finished;
use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

/// One line a message: its identifier, then why it is no mistake of ours. `#` begins a comment.
const ALLOWLIST: &str = include_str!("../../validation-allowlist.txt");
/// What the loader prints as it puts the layer between a program and a device.
const INSERTED: &str = "Inserted device layer \"VK_LAYER_KHRONOS_validation\"";
/// Has the layer pass on the handles of the driver.
const OWN_HANDLES: (&str, &str) = ("VK_LAYER_UNIQUE_HANDLES", "0");
/// For the suite: one number of ranks, as more raise no other messages and a watched call costs several others; and one
/// test at a time, with marks around its probes, so that a message is known to be of a probe.
const WATCHED: &[(&str, &str)] = &[("ALLHANDS_RANKS", "3"), ("ALLHANDS_WATCHED", "1"), ("RUST_TEST_THREADS", "1")];
const HAZARD: &str = "SYNC-HAZARD-READ-AFTER-WRITE";

/// What the cell runs.
pub fn watched(runner: &mut Runner) {
    let allowed = match allowlist(ALLOWLIST) {
        Ok(allowed) => allowed,
        Err(e) => return runner.fail("allowlist", &e),
    };
    let Some(canary) = runner.binaries.iter().find(|b| b.kind == "example" && b.name == "validation_canary") else {
        return runner.fail("canary", "the example validation_canary was not built");
    };
    for (mode, expected) in [("clean", None), ("within", Some(HAZARD)), ("across", Some(HAZARD))] {
        let mut command = Command::new(&canary.path);
        command.arg(mode);
        runner.check(&format!("canary {mode}"), command, Duration::from_secs(60), &|finished| {
            let (seen, _) = seen(finished)?;
            match (expected, seen.len()) {
                (None, 0) => Ok(()),
                (Some(hazard), 1) if seen.contains_key(hazard) => Ok(()),
                (None, _) => Err(format!("the layer reported a mistake where there is none: {seen:?}")),
                (Some(hazard), _) => Err(format!("the seeded {hazard} was not what the layer reported: {seen:?}")),
            }
        });
    }
    let names = work::device_tests(runner);
    let own = names.iter().map(|name| Test::all(runner.cell.backend, name));
    for test in own.chain([SUITE]) {
        let name = test.name;
        let watched: &[_] = match name {
            _ if test.package.is_empty() => WATCHED,
            // What an app lends: a test of values that a driver gives twice, which the layer else puts its own in place of.
            "raw" => &[OWN_HANDLES],
            _ => &[],
        };
        let Some(finished) = runner.required(&test, &[], watched, work::LIMIT) else { continue };
        match seen(&finished) {
            Ok((mut seen, probed)) => {
                if !probed.is_empty() {
                    runner.note(&format!("{name}: messages inside probes: {}", list(&probed)));
                }
                seen.retain(|id, _| !allowed.contains_key(id.as_str()));
                match seen.is_empty() {
                    true => runner.pass(),
                    false => runner.fail(&format!("{name}: validation messages"), &list(&seen)),
                }
            }
            Err(e) => runner.fail(&format!("{name}: validation messages"), &e),
        }
    }
}

fn list(messages: &Messages) -> String {
    messages.iter().map(|(id, (n, text))| format!("\n      {n} x {id}: {text}")).collect()
}

/// Messages by identifier: how many, and the first one's text.
type Messages = BTreeMap<String, (u32, String)>;

/// The messages of a watched run, and apart from them those that were raised while a path that may fail was probed.
fn seen(finished: &Finished) -> Result<(Messages, Messages), String> {
    if !finished.lines.iter().any(|line| line.contains(INSERTED)) {
        return Err("the validation layer was not there: the loader put it before no device".into());
    }
    let (mut seen, mut probed) = (Messages::new(), Messages::new());
    let mut probes = 0_u32;
    for (n, line) in finished.lines.iter().enumerate() {
        match line.split_once("allhands::probe ").map(|(_, mark)| mark.starts_with("begins")) {
            Some(true) => probes += 1,
            Some(false) => probes = probes.saturating_sub(1),
            None => (),
        }
        let Some((id, text)) = message(line) else { continue };
        let seen = if probes > 0 { &mut probed } else { &mut seen };
        // Version 1.4 of the layer says what is wrong on the line after.
        let more = if text.contains(':') { "" } else { finished.lines.get(n + 1).map_or("", String::as_str) };
        seen.entry(id.to_owned()).or_insert_with(|| (0, format!("{text} {more}").chars().take(600).collect())).0 += 1;
    }
    Ok((seen, probed))
}

/// `...Validation Error: [ VUID-... ] TEXT`, wherever in a line it begins. A message without an identifier in that place
/// (`NAME(ERROR / SPEC): msgNum: TEXT`) is a message all the same.
fn message(line: &str) -> Option<(&str, &str)> {
    for mark in ["Validation Error: [ ", "Validation Warning: [ ", "Validation Performance Warning: [ "] {
        if let Some(message) = line.split_once(mark).and_then(|(_, rest)| rest.split_once(" ]")) {
            return Some(message);
        }
    }
    let (head, text) = line.split_once("): msgNum: ")?;
    let (id, _severity) = head.rsplit_once('(')?;
    Some((id.rsplit(' ').next()?, text))
}

fn allowlist(text: &str) -> Result<BTreeMap<&str, &str>, String> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| line.split_once(' ').ok_or_else(|| format!("`{line}` is allowed without a reason")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_found_wherever_they_begin() {
        let line = "test a ... S-X(ERROR / SPEC): msgNum: -4 - Validation Error: [ S-X ] Object 0";
        assert_eq!(message(line), Some(("S-X", " Object 0")));
        assert_eq!(message("Validation Warning: [ V-2 ] | it"), Some(("V-2", " | it")));
        assert_eq!(message("test a ... S-X(WARN / PERF): msgNum: 5 - text"), Some(("S-X", "5 - text")));
        assert_eq!(message("WARNING | LAYER:  env var (a) defined"), None);
    }

    #[test]
    fn a_run_without_the_layer_proves_nothing() {
        let finished = Finished { status: None, reason: None, lines: vec!["test result: ok. 1 passed".into()] };
        assert!(seen(&finished).is_err());
    }

    #[test]
    fn the_words_of_a_message_may_be_on_the_next_line() {
        let lines = [INSERTED, "Validation Error: [ S-X ] | MessageID = 0x1", "vkCmdDispatch(): hazard", "Objects: 3"];
        let finished = Finished { status: None, reason: None, lines: lines.map(str::to_owned).into() };
        let (seen, probed) = seen(&finished).unwrap();
        assert_eq!((seen["S-X"].0, probed.len()), (1, 0));
        assert!(seen["S-X"].1.ends_with("vkCmdDispatch(): hazard"));
    }

    #[test]
    fn messages_inside_probes_are_filed_apart() {
        let lines = [
            INSERTED,
            "Validation Error: [ A ] one: 1",
            "test a ... allhands::probe begins: peer with relay between ranks 0 and 1",
            "Validation Error: [ A ] one: 2",
            "Validation Error: [ B ] two: 1",
            "allhands::probe ended",
            "Validation Error: [ C ] three: 1",
        ];
        let finished = Finished { status: None, reason: None, lines: lines.map(str::to_owned).into() };
        let (seen, probed) = seen(&finished).unwrap();
        assert_eq!(seen.keys().collect::<Vec<_>>(), ["A", "C"]);
        assert_eq!(probed.keys().collect::<Vec<_>>(), ["A", "B"]);
    }

    #[test]
    fn the_allowlist_needs_reasons() {
        assert_eq!(allowlist("# none\n\nVUID-1 the layer is wrong\n").unwrap()["VUID-1"], "the layer is wrong");
        assert!(allowlist("VUID-1").is_err());
        assert!(allowlist(ALLOWLIST).is_ok());
    }
}
