//! The variables by which a process finds its drivers, and how it is started among them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the caller's shell may say about drivers, which is no business of a run that sets up its own.
const FOREIGN: [&str; 9] = ["VK_", "ALLHANDS_", "MESA_", "LP_", "LVP_", "RADV_", "LIBGL_", "EGL_", "WGPU_"];

/// The variables by which a process finds its drivers, and those alone.
#[derive(Clone, Default)]
pub struct Environment {
    variables: BTreeMap<&'static str, OsString>,
    /// The Vulkan drivers' manifests, in order.
    manifests: Vec<PathBuf>,
    /// What a program is started with, before its own name: empty for most.
    starter: Vec<OsString>,
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
        // What is measured here is no guide to the user's own devices.
        environment.set("ALLHANDS_CACHE", directory.join("measurements"));
        environment.set("__EGL_VENDOR_LIBRARY_DIRS", &nothing);
        environment.set("VK_DRIVER_FILES", nothing.join("none.json"));
        environment.set("VK_ICD_FILENAMES", nothing.join("none.json"));
        Ok(environment)
    }

    /// Keeps compiled shaders apart under a name of their own. Mesa's key of a shader does not say everything that
    /// went into it.
    pub fn separate_shaders(&mut self, name: &str) {
        if let Some(shared) = self.variables.get_mut("MESA_SHADER_CACHE_DIR") {
            shared.push("-");
            shared.push(name);
        }
    }

    /// Sets or replaces one variable.
    pub fn set(&mut self, name: &'static str, value: impl Into<OsString>) {
        self.variables.insert(name, value.into());
    }

    /// Adds a Vulkan driver after those that an instance finds already.
    pub fn add_vulkan_driver(&mut self, manifest: PathBuf) -> Result<(), String> {
        self.manifests.push(manifest);
        let list = joined(&self.manifests)?;
        // Loaders older than 1.3.207 know only the second name.
        self.set("VK_DRIVER_FILES", list.clone());
        self.set("VK_ICD_FILENAMES", list);
        Ok(())
    }

    /// Looks for libraries in `directories` first.
    pub fn search_libraries(&mut self, directories: &[PathBuf]) {
        let mut all = directories.to_vec();
        if let Some(inherited) = std::env::var_os("LD_LIBRARY_PATH") {
            all.extend(std::env::split_paths(&inherited));
        }
        // Only a ':' in a path fails the joining, and then no library path can name it at all.
        if let Ok(joined) = joined(&all) {
            self.set("LD_LIBRARY_PATH", joined);
        }
    }

    /// Starts programs with another C library than the machine's: `loader` is its dynamic loader, and all libraries
    /// come from `directories`.
    pub fn start_with(&mut self, loader: &Path, directories: &[PathBuf]) -> Result<(), String> {
        self.starter = vec![loader.into(), "--library-path".into(), joined(directories)?];
        Ok(())
    }

    /// `command` as it runs here: with these variables and without what the caller's shell says about drivers.
    pub fn apply(&self, command: Command) -> Command {
        let mut command = match self.starter.split_first() {
            None => command,
            Some((first, rest)) => {
                let mut started = Command::new(first);
                started.args(rest).arg(command.get_program()).args(command.get_args());
                started.env_remove("LD_LIBRARY_PATH");
                started
            }
        };
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if FOREIGN.iter().any(|prefix| text.starts_with(prefix)) {
                command.env_remove(&name);
            }
        }
        command.env_remove("DISPLAY").env_remove("WAYLAND_DISPLAY");
        command.envs(&self.variables);
        command
    }

    /// The variables, as a shell reads them, and as a comment what else a program needs.
    pub fn exports(&self) -> impl Iterator<Item = String> {
        let quoted = |value: &OsString| format!("'{}'", value.to_string_lossy().replace('\'', r"'\''"));
        let starter = (!self.starter.is_empty()).then(|| {
            let words: Vec<_> = self.starter.iter().map(quoted).collect();
            format!("# A program is started by this driver's own loader: {} PROGRAM ARGUMENTS", words.join(" "))
        });
        self.variables.iter().map(move |(name, value)| format!("export {name}={}", quoted(value))).chain(starter)
    }
}

fn joined(paths: &[PathBuf]) -> Result<OsString, String> {
    std::env::join_paths(paths).map_err(|e| format!("the target directory cannot be named in a list: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_are_listed_in_the_order_they_were_added() {
        let mut environment = Environment::default();
        environment.add_vulkan_driver("/a.json".into()).unwrap();
        environment.add_vulkan_driver("/b c.json".into()).unwrap();
        let exports: Vec<_> = environment.exports().collect();
        assert_eq!(
            exports,
            ["export VK_DRIVER_FILES='/a.json:/b c.json'", "export VK_ICD_FILENAMES='/a.json:/b c.json'"]
        );
        assert!(environment.add_vulkan_driver("/c:d.json".into()).is_err());
    }

    #[test]
    fn shaders_can_be_kept_apart() {
        let mut environment = Environment::default();
        environment.set("MESA_SHADER_CACHE_DIR", "/a/cache");
        environment.separate_shaders("128");
        assert_eq!(environment.exports().collect::<Vec<_>>(), ["export MESA_SHADER_CACHE_DIR='/a/cache-128'"]);
    }

    #[test]
    fn a_starter_comes_before_the_program() {
        let mut environment = Environment::default();
        let mut command = Command::new("/bin/program");
        command.arg("argument");
        assert_eq!(environment.apply(command).get_program(), "/bin/program");
        environment.start_with(Path::new("/ld.so"), &["/lib".into(), "/usr/lib".into()]).unwrap();
        let mut command = Command::new("/bin/program");
        command.arg("argument");
        let command = environment.apply(command);
        assert_eq!(command.get_program(), "/ld.so");
        let arguments: Vec<_> = command.get_args().collect();
        assert_eq!(arguments, ["--library-path", "/lib:/usr/lib", "/bin/program", "argument"]);
    }
}
