//! Software drivers for machines that have none: unpacked below the target directory, never installed.
//!
//! A [`Driver`] is data: the packages that hold it and the environment in which a process finds it. [`known`] lists them;
//! another one is another constant there, with a few lines that say where its files lie.

mod environment;
mod known;
pub mod tree;

pub use environment::Environment;
pub use known::*;

use std::path::{Path, PathBuf};
use tree::Tree;

/// Set to `none`, this variable makes every driver unobtainable, and hides those that the machine has.
pub const SWITCH: &str = "ALLHANDS_DRIVERS";

/// A driver (or a layer above one) that can be set up without touching the machine.
pub struct Driver {
    /// What the command line and the reports call it.
    pub name: &'static str,
    /// One line for a reader.
    pub what: &'static str,
    parts: &'static [Part],
    environment: fn(&Trees, &mut Environment) -> Result<(), String>,
}

/// Packages to unpack.
struct Part {
    release: Release,
    /// With all that they depend on; else the named ones alone.
    closure: bool,
    packages: &'static [&'static str],
}

/// Whose packages. The order is that in which their libraries are looked for, last first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Release {
    /// The machine's own, from the sources that it has.
    Stock,
    /// Newer packages built for the machine's own release of Debian.
    Backports,
    /// Debian's newest, with a C library of its own.
    Sid,
}

/// The trees below one directory, one a release.
struct Trees<'a>(&'a Path);

impl Trees<'_> {
    fn of(&self, release: Release) -> Result<Tree, String> {
        match release {
            Release::Stock => Tree::open(self.0.join("stock")),
            Release::Backports => Tree::of_suite(self.0.join("backports"), &format!("{}-backports", codename()?)),
            Release::Sid => Tree::of_suite(self.0.join("sid"), "sid"),
        }
    }
}

/// Sets up `drivers` below `target`/drivers, which needs the network only the first time. In which order a Vulkan instance
/// shows several is its loader's to choose: Debian 12's shows the last named first.
/// An error says what failed and what would be right.
pub fn set_up(drivers: &[&Driver], target: &Path) -> Result<Environment, String> {
    let directory = target.join("drivers");
    let mut environment = Environment::bare(&directory)?;
    if drivers.is_empty() {
        return Ok(environment);
    }
    if none_wanted() {
        return Err(format!("{SWITCH}=none: no driver may be used"));
    }
    let trees = Trees(&directory);
    for driver in drivers {
        driver.unpack(&trees).and_then(|()| (driver.environment)(&trees, &mut environment)).map_err(|e| {
            let packages: Vec<_> = driver.parts.iter().flat_map(|part| part.packages).copied().collect();
            format!(
                "the driver `{}` could not be set up: {e}\n    It is unpacked from the packages {}, with apt-get and the \
                 sources in /etc/apt: those must be reachable (behind a proxy, set http_proxy), and about 1 GB \
                 be free below {}. To start afresh, remove {}.",
                driver.name,
                packages.join(", "),
                target.display(),
                directory.display()
            )
        })?;
    }
    let mut releases: Vec<_> = drivers.iter().flat_map(|driver| driver.parts).map(|part| part.release).collect();
    releases.sort_by(|a, b| b.cmp(a));
    releases.dedup();
    let mut libraries: Vec<PathBuf> = Vec::new();
    for &release in &releases {
        libraries.extend(trees.of(release)?.library_directories());
    }
    if releases.contains(&Release::Sid) {
        if releases.len() > 1 {
            return Err("a driver with a C library of its own cannot share a process with another release's".into());
        }
        environment.start_with(&trees.of(Release::Sid)?.loader()?, &libraries)?;
    } else {
        environment.search_libraries(&libraries);
    }
    Ok(environment)
}

impl Driver {
    fn unpack(&self, trees: &Trees) -> Result<(), String> {
        for part in self.parts {
            let tree = trees.of(part.release)?;
            let name = part.packages.join("+");
            if part.closure {
                tree.provide(&name, part.packages)?;
            } else {
                tree.provide_alone(&name, part.packages)?;
            }
        }
        Ok(())
    }
}

/// This machine's release of Debian, e.g. `bookworm`.
fn codename() -> Result<String, String> {
    let text =
        std::fs::read_to_string("/etc/os-release").map_err(|e| format!("the machine does not name its system: {e}"))?;
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).map(|value| value.trim_matches('"'));
    match (value("ID="), value("VERSION_CODENAME=")) {
        (Some("debian"), Some(codename)) => Ok(codename.to_owned()),
        (id, _) => Err(format!("it is Debian's, and this machine runs {}", id.unwrap_or("a nameless system"))),
    }
}

/// Whether the user asked for a machine without drivers.
pub fn none_wanted() -> bool {
    std::env::var_os(SWITCH).is_some_and(|value| value == "none")
}
