//! What is in the machine: a ramdisk with a shell, drivers, kernel modules and our programs, and the script that runs these.
//!
//! The script is the machine's first process. It frames what each step prints with lines that begin with [`MARK`], and
//! turns the machine off after the last one.

use super::cpio::Archive;
use super::{Drivers, Step};
use crate::drivers::tree::Tree;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How the script's own lines begin.
pub const MARK: &str = "vm-test:";

const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LINKER: &str = "usr/lib64/ld-linux-x86-64.so.2";
/// In the order in which they need each other. vgem makes dma-bufs that fences can be attached to.
const MODULES: [&str; 4] = ["drm", "drm_kms_helper", "drm_shmem_helper", "vgem/vgem"];

/// The dynamic linker of the packages' own release, and where it looks: their programs do not run with the machine's.
pub struct Linker {
    linker: PathBuf,
    libraries: PathBuf,
}

impl Linker {
    /// That of `tree`.
    pub fn of(tree: &Tree) -> Result<Self, String> {
        Ok(Self { linker: tree.installed(LINKER)?, libraries: tree.installed(LIBRARIES)? })
    }

    /// A command that runs `program`.
    pub fn run(&self, program: &Path) -> Command {
        let mut command = Command::new(&self.linker);
        command.arg("--library-path").arg(&self.libraries).arg(program);
        command
    }

    /// Every library that `file` loads at its start.
    fn needs(&self, file: &Path) -> Result<Vec<PathBuf>, String> {
        let mut command = Command::new(&self.linker);
        command.arg("--library-path").arg(&self.libraries).arg("--list").arg(file);
        let output = command.output().map_err(|e| format!("{} cannot be run: {e}", self.linker.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() || text.contains("not found") {
            return Err(format!("the machine would not have all libraries of {}:\n{text}", file.display()));
        }
        // name => /path (address)
        let paths = text.lines().filter_map(|line| line.split_whitespace().skip_while(|word| *word != "=>").nth(1));
        Ok(paths.map(PathBuf::from).collect())
    }
}

/// The kernel, and the directory of its modules.
pub fn kernel(tree: &Tree) -> Result<(PathBuf, PathBuf), String> {
    let only = |directory: &str, prefix: &str| -> Result<PathBuf, String> {
        let directory = tree.installed(directory)?;
        let listing = fs::read_dir(&directory).map_err(|e| format!("cannot read {}: {e}", directory.display()))?;
        let mut names: Vec<_> = listing.flatten().map(|entry| entry.file_name()).collect();
        names.retain(|name| name.to_string_lossy().starts_with(prefix));
        // An update leaves its predecessor beside it.
        names.sort();
        let last = names.pop().ok_or_else(|| format!("{} holds no kernel", directory.display()))?;
        Ok(directory.join(last))
    };
    Ok((only("boot", "vmlinuz-")?, only("usr/lib/modules", "")?))
}

/// Writes the ramdisk for `steps`, each with the program that it runs.
pub fn ramdisk(path: &Path, tree: &Tree, steps: &[(&Step, PathBuf)]) -> Result<(), String> {
    let linker = Linker::of(tree)?;
    let (_, modules) = kernel(tree)?;
    let mut needed = BTreeSet::new();
    let mut parts: Vec<(String, PathBuf)> =
        vec![("usr/bin/busybox".into(), tree.installed("usr/bin/busybox")?), (LINKER.into(), tree.installed(LINKER)?)];
    for library in ["libvulkan.so.1", "libvulkan_lvp.so", "libvulkan_virtio.so"] {
        parts.push((format!("{LIBRARIES}/{library}"), tree.library(library)?));
    }
    // A second copy of a driver is a second driver to the process, with devices of its own.
    parts.push(("drivers/libvulkan_lvp_copy.so".into(), tree.library("libvulkan_lvp.so")?));
    for program in ["usr/bin/virgl_test_server", "usr/libexec/virgl_render_server"] {
        parts.push((program.into(), tree.installed(program)?));
    }
    for (step, program) in steps {
        parts.push((place(step), program.clone()));
    }
    for (_, file) in parts.iter().filter(|(name, _)| !name.ends_with("busybox") && name != LINKER) {
        needed.extend(linker.needs(file)?);
    }
    for library in needed {
        let name = library.file_name().unwrap_or_default().to_string_lossy().into_owned();
        parts.push((format!("{LIBRARIES}/{name}"), library));
    }
    for (i, module) in MODULES.iter().enumerate() {
        let name = module.rsplit('/').next().unwrap_or(module);
        let file = modules.join(format!("kernel/drivers/gpu/drm/{module}.ko.xz"));
        parts.push((format!("modules/{i}-{name}.ko.xz"), file));
    }
    let write = || -> io::Result<()> {
        let mut archive = Archive::create(path)?;
        for directory in ["proc", "sys", "dev", "tmp"] {
            archive.directory(directory)?;
        }
        for (link, to) in [("bin", "usr/bin"), ("sbin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")] {
            archive.link(link, to)?;
        }
        for (name, file) in &parts {
            archive.copy(name, file)?;
        }
        for (name, library) in [
            ("llvmpipe", format!("/{LIBRARIES}/libvulkan_lvp.so")),
            ("copy", "/drivers/libvulkan_lvp_copy.so".into()),
            ("venus", format!("/{LIBRARIES}/libvulkan_virtio.so")),
        ] {
            let icd = format!(r#"{{"library_path": "{library}", "api_version": "1.3.0"}}"#);
            let text = format!(r#"{{"file_format_version": "1.0.0", "ICD": {icd}}}"#);
            archive.file(&format!("drivers/{name}.json"), text.as_bytes())?;
        }
        archive.file("init", script(steps.iter().map(|(step, _)| *step)).as_bytes())?;
        archive.finish()
    };
    write().map_err(|e| format!("cannot write {}: {e}", path.display()))
}

fn place(step: &Step) -> String {
    format!("test/{}", step.program.replace([':', '/'], "-"))
}

const START: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp XDG_RUNTIME_DIR=/tmp RUST_BACKTRACE=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
# An exported allocation takes several descriptors in the driver's process.
ulimit -n 65536
for module in /modules/*; do unxz -c $module > /tmp/module.ko && insmod /tmp/module.ko; done
rm /tmp/module.ko

now() { cut -d ' ' -f 1 /proc/uptime; }
step() {
    name=$1; shift
    echo "vm-test: begin $name $(now)"
    # To a pipe, as programs draw progress bars on a terminal.
    { "$@" 2>&1 < /dev/null; echo $? > /tmp/code; } | cat
    echo "vm-test: end $name $(cat /tmp/code) $(now)"
}
# Venus's other half: it executes what the driver in the test's process sends over a socket, with the driver that it finds.
serve_venus() {
    [ -S /tmp/venus ] && return
    RENDER_SERVER_EXEC_PATH=/usr/libexec/virgl_render_server VK_DRIVER_FILES=/drivers/llvmpipe.json \
        virgl_test_server --venus --no-virgl --multi-clients --socket-path /tmp/venus > /tmp/venus.log 2>&1 &
    tries=0
    while [ ! -S /tmp/venus ] && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
}

echo "vm-test: kernel $(uname -r), $(nproc) processors, up after $(now) s"
"#;

const END: &str = "echo \"vm-test: off $(now)\"\npoweroff -f\n";

fn script<'a>(steps: impl Iterator<Item = &'a Step>) -> String {
    let mut script = START.to_owned();
    for step in steps {
        let drivers = match step.drivers {
            Drivers::TwoLlvmpipes => "VK_DRIVER_FILES=/drivers/llvmpipe.json:/drivers/copy.json",
            Drivers::LlvmpipeAndVenus => {
                script += "serve_venus\n";
                "VK_DRIVER_FILES=/drivers/llvmpipe.json:/drivers/venus.json VN_DEBUG=vtest VTEST_SOCKET_NAME=/tmp/venus"
            }
        };
        // Writing to a `String` cannot fail.
        let _ = writeln!(
            script,
            "step {} env {drivers} {} /{} {}",
            step.name,
            step.environment,
            place(step),
            step.arguments
        );
    }
    script + END
}
