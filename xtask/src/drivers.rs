//! Software drivers for machines that have none: unpacked below the target directory, never installed.
//!
//! A [`Driver`] is data: the packages that hold it and the environment in which a process finds it. Another one is
//! another constant, with a few lines that say where its files lie.

mod tree;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tree::Tree;

/// Set to `none`, this variable makes every driver unobtainable, and hides those that the machine has.
pub const SWITCH: &str = "ALLHANDS_DRIVERS";

/// A driver (or a layer above one) that can be set up without touching the machine.
pub struct Driver {
    /// What the command line and the reports call it.
    pub name: &'static str,
    packages: &'static [&'static str],
    environment: fn(&Tree, &mut Environment) -> Result<(), String>,
}

/// Mesa's software Vulkan driver, of the machine's own release.
pub const LLVMPIPE: Driver = Driver {
    name: "llvmpipe",
    packages: &["mesa-vulkan-drivers", "libvulkan1"],
    environment: |tree, environment| {
        tree.library("libvulkan.so.1")?;
        environment.vulkan_driver(&tree.manifest("usr/share/vulkan/icd.d", "lvp_icd", "libvulkan_lvp.so")?);
        Ok(())
    },
};

/// Mesa's software OpenGL ES driver, through EGL without a display.
pub const GLES: Driver = Driver {
    name: "gles",
    packages: &["libegl1", "libegl-mesa0", "libgl1-mesa-dri", "libgles2"],
    environment: |tree, environment| {
        tree.library("libEGL.so.1")?;
        tree.library("dri/swrast_dri.so")?;
        environment.set("LIBGL_DRIVERS_PATH", tree.library("dri")?);
        environment.set("__EGL_VENDOR_LIBRARY_DIRS", tree.installed("usr/share/glvnd/egl_vendor.d")?);
        environment.set("EGL_PLATFORM", "surfaceless");
        Ok(())
    },
};

/// The Khronos validation layer, switched on, with synchronisation validation within and across submissions.
pub const VALIDATION: Driver = Driver {
    name: "validation",
    packages: &["vulkan-validationlayers"],
    environment: |tree, environment| {
        let name = "VkLayer_khronos_validation";
        let manifest = tree.manifest("usr/share/vulkan/explicit_layer.d", name, &format!("lib{name}.so"))?;
        let directory = manifest.parent().unwrap_or(Path::new("/"));
        environment.set("VK_LAYER_PATH", directory);
        // Without an action of its own, the layer prints nothing in a program that listens for messages itself.
        let settings = directory.join("vk_layer_settings.txt");
        let text = "khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG\n\
                    khronos_validation.report_flags = error,warn\n";
        tree::write(&settings, text)?;
        environment.set("VK_LAYER_SETTINGS_PATH", settings);
        environment.set("VK_INSTANCE_LAYERS", "VK_LAYER_KHRONOS_validation");
        // Version 1.3 of the layer reads the first variable, 1.4 the other two.
        environment.set(
            "VK_LAYER_ENABLES",
            "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT:\
             VALIDATION_CHECK_ENABLE_SYNCHRONIZATION_VALIDATION_QUEUE_SUBMIT",
        );
        environment.set("VK_LAYER_VALIDATE_SYNC", "1");
        environment.set("VK_LAYER_SYNCVAL_SHADER_ACCESSES_HEURISTIC", "1");
        // The loader then names each layer it inserts, which proves that a run was watched.
        environment.set("VK_LOADER_DEBUG", "layer");
        Ok(())
    },
};

/// Sets up `drivers` below `target`/drivers, which needs the network only the first time.
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
    let tree = Tree::open(directory.join("stock"))?;
    for driver in drivers {
        tree.provide(driver.name, driver.packages)
            .and_then(|()| (driver.environment)(&tree, &mut environment))
            .map_err(|e| {
                format!(
                    "the driver `{}` could not be set up: {e}\n    It is unpacked from the packages {}, with apt-get and the \
                     sources in /etc/apt: those must be reachable (behind a proxy, set http_proxy), and about 400 MB \
                     be free below {}. To start afresh, remove {}.",
                    driver.name,
                    driver.packages.join(", "),
                    target.display(),
                    directory.display()
                )
            })?;
    }
    environment.search_libraries(&tree.library_directories());
    Ok(environment)
}

/// Whether the user asked for a machine without drivers.
pub fn none_wanted() -> bool {
    std::env::var_os(SWITCH).is_some_and(|value| value == "none")
}

/// The variables by which a process finds its drivers, and those alone.
#[derive(Clone, Default)]
pub struct Environment {
    variables: BTreeMap<&'static str, OsString>,
}

impl Environment {
    /// An environment in which no driver is found; caches and run-time files lie in `directory`.
    pub fn bare(directory: &Path) -> Result<Self, String> {
        let mut environment = Self::default();
        let runtime = directory.join("run");
        let nothing = directory.join("nothing");
        for path in [&runtime, &nothing] {
            fs::create_dir_all(path).map_err(|e| format!("cannot create {}: {e}", path.display()))?;
        }
        // The specification of XDG_RUNTIME_DIR asks for it, and libraries warn otherwise.
        fs::set_permissions(&runtime, fs::Permissions::from_mode(0o700))
            .map_err(|e| format!("cannot restrict {}: {e}", runtime.display()))?;
        environment.set("XDG_RUNTIME_DIR", runtime);
        environment.set("MESA_SHADER_CACHE_DIR", directory.join("shader-cache"));
        environment.set("__EGL_VENDOR_LIBRARY_DIRS", &nothing);
        environment.set("VK_DRIVER_FILES", nothing.join("none.json"));
        environment.set("VK_ICD_FILENAMES", nothing.join("none.json"));
        Ok(environment)
    }

    /// Sets or replaces one variable.
    pub fn set(&mut self, name: &'static str, value: impl Into<OsString>) {
        self.variables.insert(name, value.into());
    }

    /// Starts `command` with these variables and without what the caller's shell says about drivers.
    pub fn apply(&self, command: &mut Command) {
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if ["VK_", "ALLHANDS_", "MESA_", "LP_", "LIBGL_", "EGL_", "WGPU_"].iter().any(|p| text.starts_with(p)) {
                command.env_remove(&name);
            }
        }
        command.env_remove("DISPLAY").env_remove("WAYLAND_DISPLAY");
        command.envs(&self.variables);
    }

    /// The variables, as a shell reads them.
    pub fn exports(&self) -> impl Iterator<Item = String> {
        let quoted = |value: &OsString| value.to_string_lossy().replace('\'', r"'\''");
        self.variables.iter().map(move |(name, value)| format!("export {name}='{}'", quoted(value)))
    }

    /// Loaders older than 1.3.207 know only the second name.
    fn vulkan_driver(&mut self, manifest: &Path) {
        self.set("VK_DRIVER_FILES", manifest);
        self.set("VK_ICD_FILENAMES", manifest);
    }

    fn search_libraries(&mut self, directories: &[PathBuf]) {
        let mut all = directories.to_vec();
        if let Some(inherited) = std::env::var_os("LD_LIBRARY_PATH") {
            all.extend(std::env::split_paths(&inherited));
        }
        // Only a ':' in a path fails the joining, and then no library path can name it at all.
        if let Ok(joined) = std::env::join_paths(all) {
            self.set("LD_LIBRARY_PATH", joined);
        }
    }
}
