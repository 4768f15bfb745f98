//! What runs in a cell: the test programs, the collectives' suite by each path, the command line's measurements.

use super::cells::{Level, PROXY, VULKAN};
use super::runner::{Check, Runner, SUITE, Test};
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
pub const LIMIT: Duration = Duration::from_secs(600);
/// The same for a sweep over everything.
const SWEEP_LIMIT: Duration = Duration::from_secs(3600);

/// The collectives on the cell's devices.
pub fn collectives(runner: &mut Runner) {
    present(runner);
    for variables in runner.cell.variants {
        suite(runner, variables);
    }
}

/// The tests of the cell's backend, then the collectives.
pub fn devices(runner: &mut Runner) {
    present(runner);
    for variables in runner.cell.variants {
        for name in device_tests(runner) {
            runner.required(&Test::all(runner.cell.backend, &name), variables, &[], LIMIT);
        }
        runner.required(&Test::all("", "caps"), variables, &[], LIMIT);
        if runner.cell.backend == VULKAN {
            starts(runner, variables);
        }
        suite(runner, variables);
    }
}

/// Starts over every fault that a driver may have: a slice of them, and all in an extended run.
fn starts(runner: &mut Runner, variables: &[(&'static str, &'static str)]) {
    let all: &[_] = if runner.level == Level::Extended { &[("ALLHANDS_QUICK", "0")] } else { &[] };
    runner.required(&Test::all("", "starts"), variables, all, SWEEP_LIMIT);
}

/// The names of the test programs of the cell's backend: the one that must be there, then whatever else the package has,
/// so that a new test file is run without being named here.
pub fn device_tests(runner: &Runner) -> Vec<String> {
    let own = runner.binaries.iter().filter(|b| b.kind == "test" && b.package == runner.cell.backend);
    let mut names = vec!["conformance".to_owned()];
    names.extend(own.map(|binary| binary.name.clone()).filter(|name| name != "conformance"));
    names
}

/// Whatever tests no other cell runs.
pub fn host(runner: &mut Runner) {
    for binary in runner.binaries.iter().filter(|binary| binary.test) {
        let elsewhere = [PROXY, VULKAN].contains(&&*binary.package)
            || (binary.package.is_empty() && ["suite", "starts"].contains(&&*binary.name));
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

/// The same where a memfd passes for a dma-buf, which must not have gone untested.
pub fn memfd(runner: &mut Runner) {
    devices(runner);
    let test = Test { filter: Some("a_memfd_passes_for_a_dma_buf"), ..Test::all(VULKAN, "sharing") };
    let finished = runner.required(&test, &[], &[], LIMIT);
    if finished.is_some_and(|finished| finished.lines.iter().any(|line| line.contains("imports no dma-bufs"))) {
        runner.fail("memfd", "this driver was to import a memfd as a dma-buf, and says that it imports none");
    }
}

/// The one test that needs a compiler and no memory.
pub fn pipelines(runner: &mut Runner) {
    let test = Test { filter: Some("every_kernel_compiles"), ..Test::all(VULKAN, "compile") };
    let Some(finished) = runner.required(&test, &[], &[], LIMIT) else { return };
    let compiled = |line: &String| line.contains("GFX1100") && line.contains("pipelines");
    if !finished.lines.iter().any(compiled) {
        runner.fail("compile", "no pipeline was compiled for GFX1100");
    }
}

/// Real dma-bufs: the virtual machine is a run of its own, with its own report.
pub fn machine(runner: &mut Runner) {
    match crate::vm::run(&[]) {
        Ok(true) => runner.pass(),
        Ok(false) => runner.fail("vm-test", "the lines above say what went wrong"),
        Err(e) => runner.fail("vm-test", &e),
    }
}

/// A slice of what the command line measures: wide in collectives and ranks, or in types and operations, not in both.
pub fn perf(runner: &mut Runner) {
    for backend in ["cpu", "proxy"] {
        for collective in COLLECTIVES {
            let sweep = format!("{collective} -g 2,3,5 -d f32,u32 -o sum,max -b 4 -e 256K -f 16 -n 2 -w 1");
            measure(
                runner,
                &format!("perf {collective} {backend}"),
                &format!("{sweep} --backend {backend}"),
                LIMIT,
                &|_| Ok(()),
            );
        }
        let wide = format!("all_reduce -g 3 -d all -o all -b 4K -e 4K -n 2 -w 1 --backend {backend}");
        measure(runner, &format!("perf all_reduce {backend} all types"), &wide, LIMIT, &|_| Ok(()));
    }
    one_shot(runner, "all_reduce -g 2,4 -b 4 -e 256K -f 16 -n 2 -w 1");
}

/// All that the command line measures.
pub fn perf_full(runner: &mut Runner) {
    for backend in ["cpu", "proxy"] {
        for collective in COLLECTIVES {
            let sweep =
                format!("{collective} -g 1,2,3,4,5,8 -d all -o all -b 4 -e 1M -f 4 -n 2 -w 1 --backend {backend}");
            measure(runner, &format!("perf {collective} {backend} full"), &sweep, SWEEP_LIMIT, &|_| Ok(()));
        }
    }
    one_shot(runner, "all_reduce -g 2,4 -d all -b 4 -e 1M -f 4 -n 2 -w 1");
}

/// Each of the cell's devices is opened once, however few ranks the tests make.
fn present(runner: &mut Runner) {
    let devices = runner.cell.devices;
    let count = devices.split(',').count();
    let arguments = format!("all_reduce -g {count} -b 64 -e 64 -n 1 -w 0 --devices {devices}");
    measure(runner, "every device", &arguments, LIMIT, &|_| Ok(()));
}

/// The collectives' suite by each of the cell's paths, and in an extended run with eight ranks.
fn suite(runner: &mut Runner, variables: &[(&'static str, &'static str)]) {
    for path in runner.cell.paths {
        let forced: &[_] = if *path == "auto" { &[] } else { &[("ALLHANDS_PATH", *path)] };
        runner.required(&SUITE, variables, forced, LIMIT);
    }
    if runner.level == Level::Extended {
        runner.required(&SUITE, variables, &[("ALLHANDS_RANKS", "8")], SWEEP_LIMIT);
    }
}

fn one_shot(runner: &mut Runner, sweep: &str) {
    let arguments = format!("{sweep} --backend proxy --algorithm one-shot");
    measure(runner, "perf all_reduce proxy one-shot", &arguments, SWEEP_LIMIT, &|rows| {
        // Not every device has doubles; and of the widest types the smallest size holds no element.
        let none = |row: &&Value| matches!(row.get("count"), Some(Value::Number(0.0)));
        let rows = || rows.iter().filter(|row| row.get("type").and_then(Value::text) != Some("f64") && !none(row));
        let elsewhere = rows().filter_map(|row| row.get("reduced_on")?.text()).find(|place| *place != "device");
        match elsewhere {
            Some(place) => Err(format!("a one-shot all_reduce was reduced on `{place}`, not on the device")),
            None if rows().all(|row| row.get("reduced_on").is_some()) => Ok(()),
            None => Err("a row does not say where it was reduced".into()),
        }
    });
}

/// One run of `allhands perf`: it must exit 0 and report rows, none of them with a wrong element.
fn measure(runner: &mut Runner, label: &str, arguments: &str, limit: Duration, rows: Check<[Value]>) {
    let Some(program) = runner.binaries.iter().find(|b| b.kind == "bin" && b.name == "allhands" && !b.test) else {
        return runner.fail(label, "cargo built no `allhands` program");
    };
    let report = runner.reports.join(format!("{}-{}.json", runner.cell.name, label.replace(' ', "-")));
    // A report left from an earlier run must not stand for this one.
    let _ = std::fs::remove_file(&report);
    let mut command = Command::new(&program.path);
    command.arg("perf").args(arguments.split(' ')).arg("-J").arg(&report);
    runner.check(label, command, limit, &|_| {
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
