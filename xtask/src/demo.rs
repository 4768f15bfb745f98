//! `cargo xtask demo`: the first thing that a newcomer runs. It shows the devices, measures a checked all-reduce and draws
//! a chart, on the machine's own drivers, else on a software driver unpacked for it, else on the CPU.

use crate::drivers::{self, Environment};
use crate::workspace::Workspace;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the ranks of the demo run on.
struct Ground {
    /// As `allhands perf --backend` names it.
    backend: &'static str,
    /// `None`: as the user's shell has it.
    environment: Option<Environment>,
    /// How to say so.
    sentence: String,
}

/// Runs the demo; true if every part of it went well.
pub fn run() -> Result<bool, String> {
    let workspace = Workspace::find()?;
    println!("Allhands: all the GPUs of a machine at work on one buffer.\n");
    println!("[1/4] Building the command line (some minutes the first time, seconds later)");
    let program = workspace.build_program()?;

    println!("[2/4] Looking for a Vulkan driver");
    let ground = Ground::find(&workspace.target)?;
    println!("  {}", ground.sentence);

    println!("[3/4] What there is: `allhands info`\n");
    let shown = ground.run(&program, &["info"])?;

    println!("\n[4/4] An all-reduce over 2 and 4 ranks, every result checked: `allhands perf all_reduce`\n");
    let chart = workspace.target.join("demo/all_reduce.svg");
    let directory = chart.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(directory).map_err(|e| format!("cannot create {}: {e}", directory.display()))?;
    let mut arguments: Vec<_> = "perf all_reduce -g 2,4 -b 4 -e 16M -f 4 -n 5 -w 1 -c 1 --backend".split(' ').collect();
    let path = chart.display().to_string();
    arguments.extend([ground.backend, "--svg", &path]);
    let measured = ground.run(&program, &arguments)?;

    if !(shown && measured) {
        println!("\nA part of the demo failed: the lines above say which. `cargo xtask test-matrix` looks closer.");
        return Ok(false);
    }
    println!("\nThe chart of that run: {}", chart.display());
    println!("Next:");
    println!("  cargo xtask test-matrix                      every test, on every driver and backend");
    println!("  {} perf --help", program.display());
    println!("                                               other collectives, types, sizes, devices");
    if ground.backend == "proxy" && ground.environment.is_some() {
        println!(
            "  eval \"$(cargo xtask drivers)\"                lets this shell's programs find the unpacked driver"
        );
    }
    println!("  cargo doc --open --package allhands          how to call it from a program");
    Ok(true)
}

impl Ground {
    fn find(target: &Path) -> Result<Self, String> {
        if let Some(driver) = machines_driver().filter(|_| !drivers::none_wanted()) {
            return Ok(Self {
                backend: "auto",
                environment: None,
                sentence: format!("This machine has its own: {}", driver.display()),
            });
        }
        println!("  This machine has none; a software driver will do:");
        Ok(match drivers::set_up(&[&drivers::LLVMPIPE], target) {
            Ok(environment) => Self {
                backend: "proxy",
                environment: Some(environment),
                sentence:
                    "llvmpipe, Mesa's software driver, unpacked below the target directory; nothing was installed.\n  \
                           Its numbers are those of a CPU that plays GPU: they show that it works, not how fast."
                        .into(),
            },
            Err(reason) => Self {
                backend: "cpu",
                environment: Some(Environment::bare(&target.join("drivers"))?),
                sentence: format!(
                    "There is no driver to be had, so the ranks run on the CPU.\n  The reason: {reason}\n  \
                     All that follows is real work, without a GPU."
                ),
            },
        })
    }

    fn run(&self, program: &Path, arguments: &[&str]) -> Result<bool, String> {
        let mut command = Command::new(program);
        command.args(arguments);
        if let Some(environment) = &self.environment {
            command = environment.apply(command);
        }
        let status = command.status().map_err(|e| format!("{} could not be started: {e}", program.display()))?;
        if !status.success() {
            println!("`allhands {}` ended with {status}", arguments.join(" "));
        }
        Ok(status.success())
    }
}

/// A driver's manifest where the Vulkan loader looks for one.
fn machines_driver() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    for name in ["VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES"] {
        if let Some(files) = variable(name) {
            return std::env::split_paths(&files).find(|path| path.exists());
        }
    }
    let home = PathBuf::from(variable("HOME").unwrap_or_default());
    let list = |name, default: &str| -> Vec<PathBuf> {
        std::env::split_paths(&variable(name).unwrap_or(default.into())).collect()
    };
    let mut places = list("XDG_CONFIG_DIRS", "/etc/xdg");
    places.extend(list("XDG_DATA_DIRS", "/usr/local/share:/usr/share"));
    places.push(variable("XDG_CONFIG_HOME").map_or(home.join(".config"), PathBuf::from));
    places.push(variable("XDG_DATA_HOME").map_or(home.join(".local/share"), PathBuf::from));
    places.push("/etc".into());
    places
        .iter()
        .filter_map(|place| std::fs::read_dir(place.join("vulkan/icd.d")).ok())
        .flat_map(|listing| listing.flatten().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "json"))
}
