//! The cells of the test matrix, as data: which drivers a process finds, which devices the collectives run on, and what
//! is run there.

use super::runner::{Runner, WIDTH};
use super::{validation, work};
use crate::drivers::{self, Driver};

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
    /// The package whose devices they are, and whose tests run: the cell is there if the package is.
    pub backend: &'static str,
    /// Variables of an environment, and of another in which all runs again.
    pub variants: &'static [Variables],
    /// The paths that are forced, one after the other, on the collectives.
    pub paths: &'static [&'static str],
    /// Whether the collectives' loops run in full; else they run in their fast slice.
    pub full: bool,
    /// The same of the backend's own tests.
    pub full_conformance: bool,
    /// Whether the cell may be left out where its drivers are not to be had.
    pub optional: bool,
    /// The smallest run that has this cell.
    pub level: Level,
    /// What runs.
    pub work: fn(&mut Runner),
}

/// Names and values.
pub type Variables = &'static [(&'static str, &'static str)];

/// How much is run: each level has the cells of those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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

/// The package of devices over wgpu-hal.
pub const PROXY: &str = "backends/proxy";
/// The package of devices over Vulkan itself.
pub const VULKAN: &str = "backends/vulkan";

/// What most cells have in common.
const CELL: Cell = Cell {
    name: "",
    what: "",
    drivers: &[],
    devices: "",
    backend: PROXY,
    variants: &[&[]],
    paths: &["auto"],
    full: false,
    full_conformance: false,
    optional: false,
    level: Level::Standard,
    work: work::devices,
};

const FOUR_OF_PROXY: &str = "proxy-vulkan:0,proxy-vulkan:1,proxy-vulkan:2,proxy-vulkan:3";
const FOUR_OF_VULKAN: &str = "vulkan:0,vulkan:1,vulkan:2,vulkan:3";
/// Of the ways that software drivers have; the relay carries progress, as none of them shares timelines.
const EVERY_PATH: &[&str] = &["auto", "copied", "shared-host"];

/// All cells, in the order they start: long ones before short ones, so that none is left alone at the end.
pub const CELLS: &[Cell] = &[
    Cell {
        name: "host",
        what: "unit tests, schedule proofs, conformance of the cpu device, doctests, examples; no driver",
        backend: "",
        level: Level::Quick,
        work: work::host,
        ..CELL
    },
    Cell {
        name: "cpu",
        what: "collectives on cpu devices",
        devices: "cpu",
        backend: "",
        full: true,
        level: Level::Quick,
        work: work::collectives,
        ..CELL
    },
    Cell {
        name: "llvmpipe",
        what: "collectives and conformance on the distribution's software Vulkan driver",
        drivers: &[&drivers::LLVMPIPE],
        devices: "proxy-vulkan:0",
        full: true,
        level: Level::Quick,
        full_conformance: true,
        ..CELL
    },
    Cell {
        name: "subgroups",
        what: "as llvmpipe, with subgroups of 4 and then of 16",
        drivers: &[&drivers::LLVMPIPE],
        devices: "proxy-vulkan:0",
        variants: &[&[(WIDTH, "128")], &[(WIDTH, "512")]],
        ..CELL
    },
    Cell {
        name: "vulkan",
        what: "Vulkan natively on the distribution's software driver, by each path",
        drivers: &[&drivers::LLVMPIPE],
        devices: "vulkan:0",
        backend: VULKAN,
        paths: EVERY_PATH,
        full_conformance: true,
        ..CELL
    },
    Cell {
        name: "mesa25",
        what: "collectives and conformance on a newer llvmpipe",
        drivers: &[&drivers::MESA25],
        devices: "proxy-vulkan:0",
        optional: true,
        ..CELL
    },
    Cell {
        name: "validation",
        what: "as validation-new, under the distribution's layer",
        drivers: &[&drivers::LLVMPIPE, &drivers::VALIDATION],
        devices: "proxy-vulkan:0",
        work: validation::watched,
        level: Level::Extended,
        ..CELL
    },
    Cell {
        name: "gles",
        what: "collectives and conformance on the distribution's software OpenGL ES driver",
        drivers: &[&drivers::GLES],
        devices: "proxy-gles:0",
        full_conformance: true,
        ..CELL
    },
    Cell {
        name: "vulkan-swiftshader",
        what: "Vulkan natively on a driver of another vendor, by each path",
        drivers: &[&drivers::SWIFTSHADER],
        devices: "vulkan:0",
        backend: VULKAN,
        paths: EVERY_PATH,
        ..CELL
    },
    Cell {
        name: "validation-new",
        what: "the Vulkan work under the newest Khronos validation layer, which must report a seeded mistake and nothing else",
        drivers: &[&drivers::LLVMPIPE, &drivers::VALIDATION_NEW],
        devices: "proxy-vulkan:0",
        work: validation::watched,
        ..CELL
    },
    Cell {
        name: "swiftshader",
        what: "collectives and conformance on a Vulkan driver of another vendor",
        drivers: &[&drivers::SWIFTSHADER],
        devices: "proxy-vulkan:0",
        ..CELL
    },
    Cell {
        name: "vulkan-validation",
        what: "the native Vulkan work under the same layer",
        drivers: &[&drivers::LLVMPIPE, &drivers::VALIDATION_NEW],
        devices: "vulkan:0",
        backend: VULKAN,
        work: validation::watched,
        ..CELL
    },
    Cell {
        name: "mixed-drivers",
        what: "collectives over llvmpipe, SwiftShader, an OpenGL ES device and the host together",
        drivers: &[&drivers::LLVMPIPE, &drivers::SWIFTSHADER, &drivers::GLES],
        devices: "proxy-vulkan:0,proxy-vulkan:1,proxy-gles:0,cpu",
        work: work::collectives,
        ..CELL
    },
    Cell {
        name: "copies",
        what: "collectives over four physical devices that share one UUID",
        drivers: &[&drivers::COPIES],
        devices: FOUR_OF_PROXY,
        work: work::collectives,
        ..CELL
    },
    Cell {
        name: "vulkan-copies",
        what: "Vulkan natively over four physical devices that share one UUID",
        drivers: &[&drivers::COPIES],
        devices: FOUR_OF_VULKAN,
        backend: VULKAN,
        work: work::collectives,
        ..CELL
    },
    Cell {
        name: "vulkan-mixed",
        what: "collectives over two drivers natively, one through wgpu-hal, and the host together",
        drivers: &[&drivers::LLVMPIPE, &drivers::SWIFTSHADER],
        devices: "vulkan:0,vulkan:1,proxy-vulkan:0,cpu",
        backend: VULKAN,
        work: work::collectives,
        ..CELL
    },
    Cell {
        name: "perf",
        what: "the command line: every collective, several types, operations and rank counts, each result checked",
        drivers: &[&drivers::LLVMPIPE],
        work: work::perf,
        ..CELL
    },
    Cell {
        name: "radv-null",
        what: "every native pipeline compiled to RDNA3 code, by AMD's driver without its hardware",
        drivers: &[&drivers::RADV_NULL],
        backend: VULKAN,
        work: work::pipelines,
        ..CELL
    },
    Cell {
        name: "vulkan-mesa25",
        what: "Vulkan natively on a driver that takes a memfd for a dma-buf, by each path",
        drivers: &[&drivers::MESA25],
        devices: "vulkan:0",
        backend: VULKAN,
        paths: EVERY_PATH,
        optional: true,
        work: work::memfd,
        level: Level::Extended,
        ..CELL
    },
    Cell {
        name: "subgroups-full",
        what: "as subgroups, with the collectives in full",
        drivers: &[&drivers::LLVMPIPE],
        devices: "proxy-vulkan:0",
        variants: &[&[(WIDTH, "128")], &[(WIDTH, "512")]],
        full: true,
        level: Level::Extended,
        ..CELL
    },
    Cell {
        name: "mesa26",
        what: "collectives and conformance on the newest llvmpipe, with a C library of its own",
        drivers: &[&drivers::MESA26],
        devices: "proxy-vulkan:0",
        level: Level::Extended,
        ..CELL
    },
    Cell {
        name: "vulkan-mesa26",
        what: "Vulkan natively on the newest llvmpipe, by each path",
        drivers: &[&drivers::MESA26],
        devices: "vulkan:0",
        backend: VULKAN,
        paths: EVERY_PATH,
        level: Level::Extended,
        ..CELL
    },
    Cell {
        name: "perf-full",
        what: "the command line: every collective, type, operation and rank count, each result checked",
        drivers: &[&drivers::LLVMPIPE],
        level: Level::Extended,
        work: work::perf_full,
        ..CELL
    },
    Cell {
        name: "vm",
        what: "real dma-bufs, in a virtual machine",
        backend: VULKAN,
        level: Level::Extended,
        work: work::machine,
        ..CELL
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_fit_the_table() {
        let names: BTreeSet<_> = CELLS.iter().map(|cell| cell.name).collect();
        assert_eq!(names.len(), CELLS.len());
        assert!(names.iter().all(|name| !name.is_empty() && name.len() <= 20 && !name.contains([',', ' ', '/'])));
    }

    #[test]
    fn a_cell_has_the_drivers_of_its_devices() {
        for cell in CELLS {
            let drivers: Vec<_> = cell.drivers.iter().map(|driver| driver.name).collect();
            let vulkan = ["llvmpipe", "swiftshader", "mesa25", "mesa26"].iter().filter(|d| drivers.contains(d)).count()
                + if drivers.contains(&"copies") { 4 } else { 0 };
            for device in cell.devices.split(',').filter(|device| *device != "cpu" && !device.is_empty()) {
                let (kind, index) = device.split_once(':').unwrap();
                let index: usize = index.parse().unwrap();
                match kind {
                    "proxy-gles" => assert!(index == 0 && drivers.contains(&"gles"), "{}", cell.name),
                    "vulkan" => assert!(index < vulkan && cell.backend == VULKAN, "{}", cell.name),
                    kind => assert!(kind == "proxy-vulkan" && index < vulkan, "{}", cell.name),
                }
            }
            assert!(!cell.variants.is_empty() && !cell.paths.is_empty(), "{} would run nothing", cell.name);
        }
    }

    #[test]
    fn only_the_backports_may_be_missing() {
        for cell in CELLS.iter().filter(|cell| cell.optional) {
            assert!(cell.drivers.iter().any(|driver| driver.name == "mesa25"), "{}", cell.name);
        }
    }
}
