//! `cargo xtask vm-test`: real dma-bufs.
//!
//! Software drivers import dma-bufs, but only a kernel with udmabuf makes them, and few machines without a GPU run one. So
//! the tests that need them run in a virtual machine, on a kernel that does: QEMU in software emulation, which needs no
//! right and no hardware; the kernel, Mesa and QEMU itself are packages of one release, unpacked below the target
//! directory.
//!
//! A green import proves little, as llvmpipe also takes a memfd for a dma-buf. So a step passes only if it also *said*
//! what it had to show, like the name of the kernel's exporter.

mod cpio;
mod guest;

use crate::drivers::{self, tree::Tree};
use crate::process;
use crate::workspace::{Binary, Workspace};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The first whose kernels have udmabuf built in.
const SUITE: &str = "trixie";
const PACKAGES: [&str; 6] =
    ["linux-image-amd64", "qemu-system-x86", "mesa-vulkan-drivers", "libvulkan1", "virgl-server", "busybox-static"];
/// Emulation is some ten times slower than the machine, and the machine may be busy.
const LIMIT: Duration = Duration::from_secs(900);

/// One program that runs in the machine.
struct Step {
    name: &'static str,
    drivers: Drivers,
    /// As [`Binary::label`] has it.
    program: &'static str,
    arguments: &'static str,
    /// Variables, besides those by which it finds its drivers.
    environment: &'static str,
    /// Each is in a line that it prints; `*` stands for anything.
    shows: &'static [&'static str],
}

/// Which Vulkan devices a step sees.
enum Drivers {
    /// `vulkan:0` and `vulkan:1`, of two copies of one driver.
    TwoLlvmpipes,
    /// In the loader's order: llvmpipe, and a driver that has its work done by another process, with llvmpipe.
    LlvmpipeAndVenus,
}

const PROBE: &str = "backends/vulkan:example:dma_buf";
const PROGRAM: &str = "allhands:bin:allhands";

const STEPS: [Step; 8] = [
    Step {
        name: "dma-buf",
        drivers: Drivers::TwoLlvmpipes,
        program: PROBE,
        arguments: "",
        environment: "",
        shows: &[
            "ok: dma-buf of `udmabuf`, exported by llvmpipe*[vulkan:0], imported by llvmpipe*[vulkan:1]: both ways",
            "ok: dma-buf of `udmabuf`, exported by llvmpipe*[vulkan:1], imported by llvmpipe*[vulkan:0]: both ways",
            "ok: dma-buf of `udmabuf`, exported by /dev/udmabuf, imported by llvmpipe*and llvmpipe",
            "ok: dma-buf of `system`, exported by /dev/dma_heap/system, imported by llvmpipe*and llvmpipe",
            "ok: dma-buf of `drm`, exported by vgem, imported by llvmpipe*and llvmpipe",
            "refused: llvmpipe*[vulkan:0]*no dma-buf: memfd",
        ],
    },
    Step {
        name: "dma-buf-venus",
        drivers: Drivers::LlvmpipeAndVenus,
        program: PROBE,
        arguments: "",
        environment: "",
        shows: &[
            "ok: dma-buf of `udmabuf`, exported by venus*imported by llvmpipe*: both ways",
            "refused: venus*imports no dma-bufs, so none of llvmpipe",
        ],
    },
    Step {
        name: "info",
        drivers: Drivers::TwoLlvmpipes,
        program: PROGRAM,
        arguments: "info --devices vulkan:0,vulkan:1",
        environment: "",
        shows: &["exports dma-buf", "imports dma-buf", "peer, relay: "],
    },
    Step {
        name: "all-reduce",
        drivers: Drivers::TwoLlvmpipes,
        program: PROGRAM,
        arguments: "perf all_reduce --devices vulkan:0,vulkan:1 --path peer --algorithm one-shot -b 4 -e 1M -f 16 -n 3 -w 1 -c 1",
        environment: "RUST_LOG=warn,allhands_vulkan=debug",
        shows: &["imports a dma-buf of `udmabuf`", " f32 *sum * 0 * 0 * one-shot *peer "],
    },
    Step {
        name: "info-venus",
        drivers: Drivers::LlvmpipeAndVenus,
        program: PROGRAM,
        arguments: "info --devices vulkan:0,vulkan:1",
        environment: "",
        shows: &["imports dma-buf", "peer, relay: refused", "peer one way, relay: *(1->0)"],
    },
    Step {
        name: "all-reduce-venus",
        drivers: Drivers::LlvmpipeAndVenus,
        program: PROGRAM,
        arguments: "perf all_reduce --devices vulkan:0,vulkan:1 --algorithm one-shot -b 4 -e 1M -f 16 -n 3 -w 1 -c 1",
        environment: "",
        shows: &["rank * on * venus", "rank * on * llvmpipe", " f32 *sum * 0 * 0 * one-shot "],
    },
    Step {
        name: "sharing",
        drivers: Drivers::TwoLlvmpipes,
        program: "backends/vulkan:test:sharing",
        arguments: "--test-threads 1",
        environment: "",
        shows: &["test descriptors_carry_memory_to_a_sibling ... ok", "test result: ok"],
    },
    // What it asks does not depend on who else is there, so one device will do. Compiling every kernel takes many minutes
    // in emulation, and has nothing to do with how memory crosses.
    Step {
        name: "conformance",
        drivers: Drivers::TwoLlvmpipes,
        program: "backends/vulkan:example:conformance",
        arguments: "0 kernels_",
        environment: "",
        shows: &["devices_share_exported_memory: Passed", "passed, 0 failed"],
    },
];

/// Runs all steps, or those named; true if each went well.
pub fn run(names: &[String]) -> Result<bool, String> {
    if let Some(unknown) = names.iter().find(|name| STEPS.iter().all(|step| step.name != **name)) {
        let known: Vec<_> = STEPS.iter().map(|step| step.name).collect();
        return Err(format!("there is no step `{unknown}`: the known ones are {}", known.join(", ")));
    }
    if std::env::consts::ARCH != "x86_64" {
        return Err("the machine is an x86-64 one, and so must be this".into());
    }
    if drivers::none_wanted() {
        return Err(format!("{}=none: no driver may be used", drivers::SWITCH));
    }
    let steps = STEPS.iter().filter(|step| names.is_empty() || names.iter().any(|name| name == step.name));
    let workspace = Workspace::find()?;
    println!("[1/3] Setting the machine up");
    let directory = workspace.target.join("vm");
    let tree = Tree::of_suite(directory.join(SUITE), SUITE)?;
    tree.provide("machine", &PACKAGES).map_err(|e| {
        format!(
            "the machine could not be set up: {e}\n    It takes the packages {} of Debian's release `{SUITE}`, with apt-get \
             and the mirror in /etc/apt, and about 2 GB below {}.",
            PACKAGES.join(", "),
            directory.display()
        )
    })?;
    println!("[2/3] Building the tests and the command line");
    let binaries = workspace.build_tests()?;
    let steps: Vec<(&Step, PathBuf)> =
        steps.map(|step| Ok((step, program(&binaries, step)?))).collect::<Result<_, String>>()?;
    let ramdisk = directory.join("ramdisk.cpio");
    guest::ramdisk(&ramdisk, &tree, &steps)?;

    let log = directory.join("log.txt");
    println!("[3/3] Booting it, in software emulation; all that it prints goes to {}", log.display());
    let mut file = File::create(&log).map_err(|e| format!("cannot write {}: {e}", log.display()))?;
    let started = Instant::now();
    let finished = process::run(machine(&tree, &ramdisk)?, LIMIT, &mut file, &mut |line| {
        if let Some(said) = line.and_then(|line| line.trim_end().strip_prefix(guest::MARK)) {
            println!("  {:>5.1} s {said}", started.elapsed().as_secs_f64());
        }
    });
    println!();
    let mut passed = 0;
    for (step, _) in &steps {
        let verdict = judge(step, &finished.lines);
        println!(
            "{:<15} {}",
            step.name,
            verdict.as_ref().map_or_else(|why| format!("FAILED: {why}"), |_| "passed".into())
        );
        for line in verdict.iter().flatten() {
            println!("    {line}");
        }
        passed += usize::from(verdict.is_ok());
    }
    if passed < steps.len() {
        println!(
            "\nThe last that the machine said ({}):",
            finished.reason.as_deref().unwrap_or("it turned itself off")
        );
        println!("      {}", finished.tail());
    }
    println!("{passed} passed, {} failed", steps.len() - passed);
    Ok(passed == steps.len())
}

fn program(binaries: &[Binary], step: &Step) -> Result<PathBuf, String> {
    // A program's own unit tests have its name too.
    let is = |binary: &&Binary| binary.label() == step.program && binary.test == step.program.contains(":test:");
    let found = binaries.iter().find(is);
    found.map(|binary| binary.path.clone()).ok_or_else(|| format!("cargo built no {}", step.program))
}

/// Only software emulation: that /dev/kvm opens does not mean that a kernel boots on it.
fn machine(tree: &Tree, ramdisk: &Path) -> Result<Command, String> {
    let mut command = guest::Linker::of(tree)?.run(&tree.installed("usr/bin/qemu-system-x86_64")?);
    for directory in ["usr/share/qemu", "usr/share/seabios"] {
        command.arg("-L").arg(tree.installed(directory)?);
    }
    command.args("-nodefaults -no-user-config -display none -serial stdio -no-reboot".split(' '));
    command.args("-machine q35 -accel tcg,thread=multi -cpu max -smp 2 -m 4096".split(' '));
    command.arg("-kernel").arg(guest::kernel(tree)?.0).arg("-initrd").arg(ramdisk);
    command.args(["-append", "console=ttyS0 quiet panic=-1 udmabuf.size_limit_mb=4096"]);
    Ok(command)
}

/// The lines that show what the step had to show, or what is wrong with it.
fn judge<'a>(step: &Step, lines: &'a [String]) -> Result<Vec<&'a str>, String> {
    let mark = |what: &str| format!("{} {what} {} ", guest::MARK, step.name);
    let at = |what: &str| lines.iter().position(|line| line.starts_with(&mark(what)));
    let begin = at("begin").ok_or("it never began")?;
    let end = at("end").ok_or("it never ended")?;
    let code = lines[end].split(' ').nth(3).unwrap_or_default();
    if code != "0" {
        return Err(format!("it ended with {code}"));
    }
    let said = &lines[begin..end];
    let shown = |text: &&str| {
        let line = said.iter().find(|line| contains(line, text));
        line.map(|line| line.trim()).ok_or_else(|| format!("it said nowhere: {text}"))
    };
    step.shows.iter().map(shown).collect()
}

fn contains(line: &str, pattern: &str) -> bool {
    let mut rest = Some(line);
    for part in pattern.split('*') {
        rest = rest.and_then(|rest| rest.split_once(part)).map(|(_, rest)| rest);
    }
    rest.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Step = Step {
        name: "a",
        drivers: Drivers::TwoLlvmpipes,
        program: "p",
        arguments: "",
        environment: "",
        shows: &["of*udmabuf"],
    };

    fn verdict(log: &str) -> Result<Vec<String>, String> {
        let lines: Vec<String> = log.lines().map(str::to_owned).collect();
        judge(&STEP, &lines).map(|shown| shown.into_iter().map(str::to_owned).collect())
    }

    #[test]
    fn a_step_passes_if_it_ended_well_and_showed_what_it_had_to() {
        let log = "vm-test: begin a 6.0\n of `udmabuf`\r\nvm-test: end a 0 7.0";
        assert_eq!(verdict(log).unwrap(), ["of `udmabuf`"]);
    }

    #[test]
    fn success_without_the_thing_shown_is_a_failure() {
        // Another step's lines do not count.
        let log = "vm-test: begin a 6.0\nudmabuf of memfd\nvm-test: end a 0 7.0\nvm-test: begin b 7.0\nof udmabuf";
        assert!(verdict(log).unwrap_err().contains("udmabuf"));
    }

    #[test]
    fn a_bad_end_or_none_is_a_failure() {
        assert!(verdict("vm-test: begin a 6.0\nudmabuf\nvm-test: end a 101 7.0").unwrap_err().contains("101"));
        assert!(verdict("vm-test: begin a 6.0\nudmabuf\nKernel panic").unwrap_err().contains("never ended"));
        assert!(verdict("Kernel panic").unwrap_err().contains("never began"));
    }
}
