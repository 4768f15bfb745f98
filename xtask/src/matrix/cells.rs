//! The cells of the test matrix, as data: which drivers a process finds, which devices the collectives run on, and what
//! is run there.

use super::runner::{Check, Runner};
use super::validation;
use crate::drivers::{Driver, GLES, LLVMPIPE, VALIDATION};
use crate::json::Value;
use std::process::Command;
use std::time::Duration;

/// The collectives that the command line measures.
const COLLECTIVES: [&str; 10] = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "sendrecv",
    "barrier",
];
/// No single program takes nearly as long on two slow cores: one that does hangs.
pub const LIMIT: Duration = Duration::from_secs(300);

/// One cell: an environment and what runs in it.
pub struct Cell {
    /// For `--only`, logs and reports.
    pub name: &'static str,
    /// One line for a reader.
    pub what: &'static str,
    /// What must be set up first.
    pub drivers: &'static [&'static Driver],
    /// The devices that must exist; ranks go round them. Empty: not a cell of devices.
    pub devices: &'static str,
    /// Further variables.
    pub variables: &'static [(&'static str, &'static str)],
    /// The smallest run that has this cell.
    pub level: Level,
    /// What runs.
    pub work: fn(&mut Runner),
}

/// How much is run: each level has the cells of those before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// While one works.
    Quick,
    /// Before a change is merged.
    Standard,
    /// Before a release.
    Extended,
}

impl Level {
    /// As in the options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Standard => "standard",
            Self::Extended => "extended",
        }
    }
}

/// All cells, in the order they run.
pub const CELLS: &[Cell] = &[
    Cell {
        name: "host",
        what: "unit tests, schedule proofs, conformance of the cpu device, doctests, examples; no driver",
        drivers: &[],
        devices: "",
        variables: &[],
        level: Level::Quick,
        work: host,
    },
    Cell {
        name: "cpu",
        what: "collectives on cpu devices",
        drivers: &[],
        devices: "cpu",
        variables: &[],
        level: Level::Quick,
        work: collectives,
    },
    Cell {
        name: "llvmpipe",
        what: "collectives and conformance on the distribution's software Vulkan driver",
        drivers: &[&LLVMPIPE],
        devices: "proxy-vulkan:0",
        variables: &[],
        level: Level::Quick,
        work: devices,
    },
    Cell {
        name: "gles",
        what: "collectives and conformance on the distribution's software OpenGL ES driver",
        drivers: &[&GLES],
        devices: "proxy-gles:0",
        variables: &[],
        level: Level::Standard,
        work: devices,
    },
    Cell {
        name: "mixed",
        what: "collectives over a cpu, a Vulkan and an OpenGL ES device together",
        drivers: &[&LLVMPIPE, &GLES],
        devices: "cpu,proxy-vulkan:0,proxy-gles:0",
        variables: &[],
        level: Level::Standard,
        work: collectives,
    },
    Cell {
        name: "validation",
        what: "the Vulkan work under the Khronos validation layer, which must report a seeded mistake and nothing else",
        drivers: &[&LLVMPIPE, &VALIDATION],
        devices: "proxy-vulkan:0",
        variables: &[],
        level: Level::Standard,
        work: validation::watched,
    },
    Cell {
        name: "perf",
        what: "the command line: every collective, type, operation and rank count, each result checked",
        drivers: &[&LLVMPIPE],
        devices: "",
        variables: &[],
        level: Level::Standard,
        work: perf,
    },
    Cell {
        name: "llvmpipe-subgroup-4",
        what: "as llvmpipe, with 128-bit vectors and so subgroups of 4",
        drivers: &[&LLVMPIPE],
        devices: "proxy-vulkan:0",
        variables: &[("LP_NATIVE_VECTOR_WIDTH", "128"), ("MESA_SHADER_CACHE_DISABLE", "1")],
        level: Level::Extended,
        work: devices,
    },
    Cell {
        name: "llvmpipe-subgroup-16",
        what: "as llvmpipe, with 512-bit vectors and so subgroups of 16",
        drivers: &[&LLVMPIPE],
        devices: "proxy-vulkan:0",
        variables: &[("LP_NATIVE_VECTOR_WIDTH", "512"), ("MESA_SHADER_CACHE_DISABLE", "1")],
        level: Level::Extended,
        work: devices,
    },
];

/// The package whose integration tests need a device.
const PROXY: &str = "backends/proxy";

/// The test programs that a cell of GPU devices runs, as package and name: those that must be there, then whatever else
/// the device's package has, so that a new test file is run without being named here.
pub fn device_tests(runner: &Runner) -> Vec<(&'static str, String)> {
    let mut tests = vec![(PROXY, "conformance".to_owned()), ("", "suite".to_owned())];
    for binary in runner.binaries.iter().filter(|b| b.kind == "test" && b.package == PROXY && b.name != "conformance") {
        tests.push((PROXY, binary.name.clone()));
    }
    tests
}

fn collectives(runner: &mut Runner) {
    runner.required_harness("", "suite", LIMIT);
}

fn devices(runner: &mut Runner) {
    for (package, name) in device_tests(runner) {
        runner.required_harness(package, &name, LIMIT);
    }
}

/// Whatever tests no other cell runs.
fn host(runner: &mut Runner) {
    for binary in runner.binaries.iter().filter(|binary| binary.test) {
        let elsewhere = binary.package == PROXY || (binary.package.is_empty() && binary.name == "suite");
        if binary.kind != "test" || !elsewhere {
            runner.harness(&binary.label(), Command::new(&binary.path), LIMIT);
        }
    }
    let mut doctests = runner.workspace.cargo();
    doctests.args(["test", "--doc", "--workspace", "--"]);
    runner.harness("doctests", doctests, LIMIT);
    for binary in runner.binaries.iter().filter(|b| b.kind == "example" && !b.test && b.package.is_empty()) {
        runner.check(&binary.label(), Command::new(&binary.path), LIMIT, &|_| Ok(()));
    }
}

fn perf(runner: &mut Runner) {
    let sweep = "-g 1,2,3,4,5,8 -d all -o all -b 4 -e 1M -f 4 -n 2 -w 1";
    for backend in ["cpu", "proxy"] {
        for collective in COLLECTIVES {
            let arguments = format!("{collective} {sweep} --backend {backend}");
            measure(runner, &format!("perf {collective} {backend}"), &arguments, &|_| Ok(()));
        }
    }
    let one_shot = "all_reduce -g 2,4 -b 4 -e 1M -f 4 -n 2 -w 1 --backend proxy --algorithm one-shot";
    measure(runner, "perf all_reduce proxy one-shot", one_shot, &|rows| {
        let elsewhere = rows.iter().filter_map(|row| row.get("reduced_on")?.text()).find(|place| *place != "device");
        match elsewhere {
            Some(place) => Err(format!("a one-shot all_reduce was reduced on `{place}`, not on the device")),
            None if rows.iter().all(|row| row.get("reduced_on").is_some()) => Ok(()),
            None => Err("a row does not say where it was reduced".into()),
        }
    });
}

/// One run of `allhands perf`: it must exit 0 and report rows, none of them with a wrong element.
fn measure(runner: &mut Runner, label: &str, arguments: &str, rows: Check<[Value]>) {
    let Some(program) = runner.binaries.iter().find(|b| b.kind == "bin" && b.name == "allhands" && !b.test) else {
        return runner.fail(label, "cargo built no `allhands` program");
    };
    let report = runner.reports.join(format!("{}.json", label.replace(' ', "-")));
    // A report left from an earlier run must not stand for this one.
    let _ = std::fs::remove_file(&report);
    let mut command = Command::new(&program.path);
    command.arg("perf").args(arguments.split(' ')).arg("-J").arg(&report);
    runner.check(label, command, LIMIT, &|_| {
        let text = std::fs::read_to_string(&report).map_err(|e| format!("it wrote no {}: {e}", report.display()))?;
        let value = Value::parse(&text).ok_or_else(|| format!("{} is not JSON", report.display()))?;
        let measured = value.get("rows").map(Value::items).unwrap_or_default();
        if measured.is_empty() {
            return Err("it measured nothing".into());
        }
        match value.get("wrong") {
            Some(Value::Number(0.0)) => rows(measured),
            other => Err(format!("wrong elements: {other:?}")),
        }
    });
}
