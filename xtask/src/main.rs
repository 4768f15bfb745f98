//! The project's own commands: `cargo xtask demo`, `cargo xtask test-matrix`, `cargo xtask drivers`.
//! Nothing but the standard library, so that the first of them answers in seconds.

mod demo;
mod drivers;
mod json;
mod matrix;
mod process;
mod workspace;

use std::process::ExitCode;

const USAGE: &str = "\
cargo xtask demo                 shows what this machine can do: devices, a checked all-reduce sweep, a chart
cargo xtask test-matrix          runs every test, cell by cell: each driver and backend, validation, the command line
    --quick                      fewer cells: the host, cpu devices, one software driver
    --extended                   all cells
    --list                       names the cells and the smallest run that has each; runs nothing
    --only CELL[,CELL...]        these cells alone
cargo xtask drivers [NAME...]    unpacks software drivers (llvmpipe, gles, validation) and prints the environment
                                 in which a program finds them
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
    let all = [&drivers::LLVMPIPE, &drivers::GLES, &drivers::VALIDATION];
    if let Some(unknown) = names.iter().find(|name| all.iter().all(|driver| driver.name != **name)) {
        return Err(format!("there is no driver `{unknown}`: the known ones are llvmpipe, gles, validation"));
    }
    // A layer slows every program down, so it is set up only when named.
    let wanted: Vec<_> = all
        .into_iter()
        .filter(
            |driver| {
                if names.is_empty() { driver.name != "validation" } else { names.iter().any(|n| n == driver.name) }
            },
        )
        .collect();
    for line in drivers::set_up(&wanted, &workspace::Workspace::find()?.target)?.exports() {
        println!("{line}");
    }
    Ok(true)
}
