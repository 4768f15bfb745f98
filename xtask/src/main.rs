//! The project's own commands: `cargo xtask demo`, `cargo xtask test-matrix`, `cargo xtask vm-test`, `cargo xtask perf`,
//! `cargo xtask drivers`.
//! Nothing but the standard library, so that the first of them answers in seconds.

mod demo;
mod drivers;
mod json;
mod matrix;
mod perf;
mod process;
mod vm;
mod workspace;

use std::process::ExitCode;

const USAGE: &str = "\
cargo xtask demo                 shows what this machine can do: devices, a checked all-reduce sweep, a chart
cargo xtask test-matrix          runs every test, cell by cell: each driver and backend, validation, the command line
    --quick                      fewer cells: the host, cpu devices, one software driver
    --extended                   all cells
    --list                       names the cells and the smallest run that has each; runs nothing
    --only CELL[,CELL...]        these cells alone
    --jobs N                     so many cells at a time; 2 unless said
cargo xtask vm-test [STEP...]    real dma-bufs: boots a virtual machine, whose kernel makes them, and runs the tests that
                                 need them (x86-64 hosts with Debian's packages)
cargo xtask perf --against mpi   all-reduces by us, on a software driver, and by Open MPI, taking turns: ratios, a chart
    --sizes 4K,64K,1M,16M        of one rank's data
    --ranks 2,4
    --backend vulkan,proxy       ours
    --rounds N                   5 unless said
    --program target/debug/allhands  ours, built already
    --in-place                   out of place unless said
    --check                      a bar that is missed is an error
cargo xtask perf --against nccl  the same by NCCL, on all NVIDIA GPUs of a machine that has CUDA, with peer access and without
    --sizes, --rounds, --program as above
    --devices vulkan:0,vulkan:1  ours
cargo xtask perf --staging       what a long message leaves behind for the short ones after it; takes the arguments of
                                 `allhands staging` (--help shows them)
cargo xtask drivers [NAME...]    unpacks software drivers and layers (llvmpipe and gles unless named) and prints the
                                 environment in which a program finds them
    --list                       names them all
No command needs root, and none installs anything: drivers are unpacked below the target directory.
With ALLHANDS_DRIVERS=none no driver is looked for.
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = match arguments.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("help", &[][..]),
    };
    let result = match command {
        "demo" => no_arguments(rest).and_then(|()| demo::run()),
        "test-matrix" => matrix::run(rest),
        "vm-test" => vm::run(rest),
        "perf" => perf::run(rest),
        "drivers" => show_drivers(rest),
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            Ok(true)
        }
        other => Err(format!("there is no command `{other}`\n\n{USAGE}")),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::from(2)
        }
    }
}

fn no_arguments(arguments: &[String]) -> Result<(), String> {
    match arguments.first() {
        None => Ok(()),
        Some(argument) => Err(format!("`{argument}` means nothing here\n\n{USAGE}")),
    }
}

fn show_drivers(names: &[String]) -> Result<bool, String> {
    if names == ["--list"] {
        for driver in drivers::ALL {
            println!("{:<15} {}", driver.name, driver.what);
        }
        return Ok(true);
    }
    let known = |name: &str| {
        let found = drivers::ALL.into_iter().find(|driver| driver.name == name);
        found.ok_or_else(|| {
            let all = drivers::ALL.map(|driver| driver.name).join(", ");
            format!("there is no driver `{name}`: the known ones are {all}")
        })
    };
    let names: Vec<_> = if names.is_empty() { vec!["llvmpipe", "gles"] } else { names.iter().map(|n| &**n).collect() };
    let wanted = names.into_iter().map(known).collect::<Result<Vec<_>, _>>()?;
    for line in drivers::set_up(&wanted, &workspace::Workspace::find()?.target)?.exports() {
        println!("{line}");
    }
    Ok(true)
}
