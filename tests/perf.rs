//! `allhands perf` looks at every bit: one that is wrong is reported with its place and value, and by the exit status.
use std::process::{Command, Output};

const OF_WRONG: i32 = 7;

fn perf(arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_allhands"));
    command.arg("perf").args(arguments.split(' ')).args(["-n", "3", "-w", "1", "--devices", "cpu"]);
    command.output().unwrap()
}

/// The number behind `what` in the report of the first wrong element, up to what ends it.
fn after<'a>(report: &'a str, what: &str, end: &str) -> &'a str {
    let (_, rest) = report.split_once(what).unwrap_or_else(|| panic!("no {what:?} in {report}"));
    rest.split(end).next().unwrap()
}

/// What the report says was got, and what it says should have been, as bits.
fn reported(sweep: &str, flip: (u32, u64, u32), kind: &str) -> (u64, u64) {
    let (rank, index, bit) = flip;
    let output = perf(&format!("{sweep} --flip {rank}:{index}:{bit}"));
    let (text, report) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(OF_WRONG), "{report}");
    assert!(text.contains("# Wrong elements: 1 FAILED"), "{text}");
    let first = report.lines().find(|line| line.contains("first wrong")).unwrap_or_else(|| panic!("{report}"));
    assert!(first.contains(kind) && first.contains("out of place, repetition 0"), "{first}");
    assert_eq!(after(first, "rank ", " "), rank.to_string(), "{first}");
    assert_eq!(after(first, "index ", ":"), index.to_string(), "{first}");
    let bits = |what| u64::from_str_radix(after(after(first, what, ")"), "(0x", ")"), 16).unwrap();
    (bits("got "), bits("want "))
}

#[test]
fn one_flipped_bit_is_reported_with_its_place_and_value() {
    let sweep = "all_reduce -g 3 -b 4K -e 4K";
    let mut wanted = None;
    for (rank, bit) in [(0, 0), (1, 22), (2, 31)] {
        let (got, want) = reported(sweep, (rank, 1023, bit), "all_reduce of f32, sum, 3 ranks, 4096 bytes");
        assert_eq!(got ^ want, 1 << bit);
        assert_eq!(*wanted.get_or_insert(want), want, "every rank is to have the same sum");
    }
}

#[test]
fn so_it_is_where_data_only_moves_and_in_other_types() {
    let (got, want) = reported("all_gather -g 2 -b 64 -e 64 -d u8", (1, 33, 7), "all_gather of u8, none, 2 ranks");
    assert_eq!(got ^ want, 0x80);
    let (got, want) = reported("reduce_scatter -g 2 -b 64 -e 64 -d f64 -o max", (0, 2, 52), "reduce_scatter of f64");
    assert_eq!(got ^ want, 1 << 52);
}

#[test]
fn without_one_all_is_right() {
    let output = perf("all_reduce -g 3 -b 4K -e 4K");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("# Wrong elements: 0 OK"));
    let nowhere = perf("all_reduce -g 3 -b 4K -e 4K --flip 3:0:0");
    assert_eq!(nowhere.status.code(), Some(2), "{}", String::from_utf8_lossy(&nowhere.stderr));
}
