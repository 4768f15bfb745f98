//! A tree of Debian packages unpacked into a directory of our own, by a private apt: its lists, its caches and its record
//! of what is installed (nothing) all lie in that directory, so neither root nor an up-to-date machine is needed.
//!
//! Starting from an empty record, apt names every library that a driver needs, whatever the machine happens to have;
//! so the same files are used everywhere, and removing a package from the machine breaks nothing.

use crate::json::quote;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// apt-get itself runs on these, so every machine has them, and a process wants only one copy.
const THE_MACHINES_OWN: [&str; 3] = ["libc6", "libgcc-s1", "libstdc++6"];

/// Debian's own keys, which its package `debian-archive-keyring` puts on every machine of theirs.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// apt's configuration, in which `@` stands for its directory. apt reads it after the machine's own, so that it can clear
/// the hooks and the extra indexes that those name.
const CONFIGURATION: &str = r#"
Dir::State "@";
Dir::State::lists "@/lists";
Dir::State::status "@/status";
Dir::Cache "@";
Dir::Cache::archives "@/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Dir::Log "@";
APT::Sandbox::User "root";
APT::Immediate-Configure "false";
APT::Install-Recommends "false";
APT::Keep-Downloaded-Packages "true";
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::Retries "2";
Acquire::http::Timeout "30";
Acquire::https::Timeout "30";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Post-Invoke;
#clear DPkg::Pre-Install-Pkgs;
#clear Acquire::IndexTargets::deb::DEP-11;
#clear Acquire::IndexTargets::deb::DEP-11-icons;
#clear Acquire::IndexTargets::deb::DEP-11-icons-small;
#clear Acquire::IndexTargets::deb::DEP-11-icons-hidpi;
"#;

/// A validation layer's manifest, in which `@` stands for its library.
const LAYER_MANIFEST: &str = r#"{"file_format_version":"1.2.0","layer":{"name":"VK_LAYER_KHRONOS_validation",
"type":"GLOBAL","library_path":@,"api_version":"1.4.0","implementation_version":"1",
"description":"Khronos validation","instance_extensions":[
{"name":"VK_EXT_debug_report","spec_version":"9"},{"name":"VK_EXT_debug_utils","spec_version":"1"},
{"name":"VK_EXT_validation_features","spec_version":"2"},{"name":"VK_EXT_layer_settings","spec_version":"2"}],
"device_extensions":[]}}
"#;

/// Packages of one release, unpacked together.
pub struct Tree {
    directory: PathBuf,
    /// `None`: the machine's own release.
    suite: Option<String>,
}

impl Tree {
    /// The tree kept in `directory`, made when there is none yet.
    pub fn open(directory: PathBuf) -> Result<Self, String> {
        Self::of(directory, None)
    }

    /// The same for a release of Debian that need not be the machine's, from the mirror that the machine uses. Its
    /// programs run here only through the tree's own dynamic linker.
    pub fn of_suite(directory: PathBuf, suite: &str) -> Result<Self, String> {
        Self::of(directory, Some(suite.to_owned()))
    }

    fn of(directory: PathBuf, suite: Option<String>) -> Result<Self, String> {
        for part in ["apt/lists/partial", "apt/archives/partial", "files"] {
            let part = directory.join(part);
            fs::create_dir_all(&part).map_err(|e| format!("cannot create {}: {e}", part.display()))?;
        }
        Ok(Self { directory, suite })
    }

    /// Unpacks `packages` and all that they depend on, unless that has been done under this `name` before.
    pub fn provide(&self, name: &str, packages: &[&str]) -> Result<(), String> {
        self.once(name, &["install", "--download-only"], packages)
    }

    /// Unpacks `packages` without what they depend on, unless that has been done under this `name` before.
    pub fn provide_alone(&self, name: &str, packages: &[&str]) -> Result<(), String> {
        self.once(name, &["download"], packages)
    }

    fn once(&self, name: &str, fetch: &[&str], packages: &[&str]) -> Result<(), String> {
        let stamp = self.directory.join("complete").join(name);
        let wanted = [fetch, packages].concat().join(" ");
        if fs::read_to_string(&stamp).is_ok_and(|done| done == wanted) {
            return Ok(());
        }
        // Held until dropped: two runs at once must not unpack into each other.
        let _lock = fs::File::create(self.directory.join("lock"))
            .and_then(|file| file.lock().map(|()| file))
            .map_err(|e| format!("cannot lock {}: {e}", self.directory.display()))?;
        if fs::read_to_string(&stamp).is_ok_and(|done| done == wanted) {
            return Ok(());
        }
        eprintln!("  unpacking {name} into {} (nothing is installed)", self.directory.display());
        self.download(fetch, packages).or_else(|first| {
            eprintln!("  that failed; trying once more: {}", first.lines().last().unwrap_or_default().trim());
            std::thread::sleep(Duration::from_secs(3));
            self.download(fetch, packages)
        })?;
        self.unpack()?;
        write(&stamp, &wanted)
    }

    /// The directories that hold the tree's libraries.
    pub fn library_directories(&self) -> Vec<PathBuf> {
        let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
        ["usr/lib", "lib"].map(|base| self.directory.join("files").join(base).join(&triplet)).to_vec()
    }

    /// The library (or directory of libraries) called `name`, e.g. `libvulkan_lvp.so`.
    pub fn library(&self, name: &str) -> Result<PathBuf, String> {
        let directories = self.library_directories();
        directories.iter().map(|d| d.join(name)).find(|path| path.exists()).ok_or_else(|| {
            let places: Vec<_> = directories.iter().map(|d| d.display().to_string()).collect();
            format!("the packages were unpacked, but {name} is in none of {}", places.join(", "))
        })
    }

    /// A file by the path that it would have if it were installed, e.g. `usr/share/glvnd`.
    pub fn installed(&self, path: &str) -> Result<PathBuf, String> {
        let found = self.directory.join("files").join(path);
        if found.exists() {
            Ok(found)
        } else {
            Err(format!("the packages were unpacked, but {} is missing", found.display()))
        }
    }

    /// The dynamic loader of the tree's own C library.
    pub fn loader(&self) -> Result<PathBuf, String> {
        let name = if cfg!(target_arch = "x86_64") { "ld-linux-x86-64.so.2" } else { "ld-linux-aarch64.so.1" };
        self.installed(&format!("usr/lib64/{name}")).or_else(|_| self.library(name))
    }

    /// A copy of a library of this tree under another name.
    pub fn copy_of(&self, library: &Path, name: &str) -> Result<PathBuf, String> {
        let copy = self.directory.join("copies").join(name);
        let age = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
        if age(&copy) < age(library) {
            let draft = copy.with_extension(format!("{}.new", std::process::id()));
            fs::create_dir_all(self.directory.join("copies"))
                .and_then(|()| fs::copy(library, &draft))
                .and_then(|_| fs::rename(&draft, &copy))
                .map_err(|e| format!("cannot copy {} to {}: {e}", library.display(), copy.display()))?;
        }
        Ok(copy)
    }

    /// A Vulkan driver's manifest, in a directory of its own.
    pub fn driver_manifest(&self, name: &str, library: &Path) -> Result<PathBuf, String> {
        let manifest = self.directory.join("manifests").join(name).join(format!("{name}.json"));
        let library = quote(&library.display().to_string());
        let icd = format!("{{\"library_path\":{library},\"api_version\":\"1.3.0\"}}");
        write(&manifest, &format!("{{\"file_format_version\":\"1.0.0\",\"ICD\":{icd}}}\n"))?;
        Ok(manifest)
    }

    /// The manifest, in the directory `name`, of a validation layer that came without one.
    pub fn layer_manifest(&self, name: &str, layer: &str, library: &Path) -> Result<PathBuf, String> {
        let manifest = self.directory.join("manifests").join(name).join(format!("{layer}.json"));
        write(&manifest, &LAYER_MANIFEST.replace('@', &quote(&library.display().to_string())))?;
        Ok(manifest)
    }

    /// A copy, in a directory of its own, of a Vulkan layer's manifest that names its library by absolute path.
    /// Releases differ in what follows `name`: the architecture, or nothing.
    pub fn manifest(&self, directory: &str, name: &str, library: &str) -> Result<PathBuf, String> {
        let directory = self.installed(directory)?;
        let original = fs::read_dir(&directory)
            .map_err(|e| format!("cannot read {}: {e}", directory.display()))?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.file_name().and_then(|file| file.to_str()).is_some_and(|file| file.starts_with(name)))
            .ok_or_else(|| {
                format!("the packages were unpacked, but {}/{name}*.json is missing", directory.display())
            })?;
        let text = fs::read_to_string(&original).map_err(|e| format!("cannot read {}: {e}", original.display()))?;
        let named = text
            .split('"')
            .find(|word| word.ends_with(library))
            .ok_or_else(|| format!("{} does not name {library}", original.display()))?;
        let absolute = format!("\"{}\"", self.library(library)?.display());
        let copy = self.directory.join("manifests").join(name).join(format!("{name}.json"));
        write(&copy, &text.replace(&format!("\"{named}\""), &absolute))?;
        Ok(copy)
    }

    fn download(&self, fetch: &[&str], packages: &[&str]) -> Result<(), String> {
        let apt = self.directory.join("apt");
        let config = apt.join("apt.conf");
        write(&apt.join("status"), "")?;
        let mut text = CONFIGURATION.replace('@', &apt.display().to_string());
        if let Some(suite) = &self.suite {
            let sources = apt.join("sources.list");
            write(&sources, &format!("deb [signed-by={KEYRING}] {} {suite} main\n", debian_mirror()?))?;
            let only = "Dir::Etc::sourceparts \"/dev/null\";\nDir::Etc::preferencesparts \"/dev/null\";\n";
            text += &format!("Dir::Etc::sourcelist \"{}\";\n{only}", sources.display());
        }
        write(&config, &text)?;
        let apt_get = |arguments: &[&str]| {
            let mut command = Command::new("apt-get");
            // `download` leaves what it fetches in the working directory.
            command.current_dir(apt.join("archives")).arg("-c").arg(&config).args(["-q", "-y"]).args(arguments);
            output_of(command)
        };
        // One unreachable source among several fails the update, yet the rest may hold all that is needed.
        let updated = apt_get(&["update"]);
        let fetched = apt_get(&[fetch, packages].concat());
        fetched.map(drop).map_err(|e| updated.err().map_or(e.clone(), |update| format!("{update}\n    {e}")))
    }

    fn unpack(&self) -> Result<(), String> {
        let archives = self.directory.join("apt/archives");
        let listing = fs::read_dir(&archives).map_err(|e| format!("cannot read {}: {e}", archives.display()))?;
        let wanted = |path: &PathBuf| is_archive(path) && (self.suite.is_some() || !is_the_machines_own(path));
        for archive in listing.flatten().map(|entry| entry.path()).filter(wanted) {
            let mark = self.directory.join("unpacked").join(archive.file_name().unwrap_or_default());
            if mark.exists() {
                continue;
            }
            let mut command = Command::new("dpkg-deb");
            command.arg("-x").arg(&archive).arg(self.directory.join("files"));
            output_of(command)?;
            write(&mark, "")?;
        }
        Ok(())
    }
}

/// Writes a small file whole: a process that reads it meanwhile sees the old text or the new.
pub fn write(path: &Path, text: &str) -> Result<(), String> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    let draft = path.with_extension(format!("{}.new", std::process::id()));
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))
        .and_then(|()| fs::write(&draft, text))
        .and_then(|()| fs::rename(&draft, path))
        .map_err(|e| format!("cannot write {}: {e}", path.display()))
}

fn is_archive(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "deb")
}

fn is_the_machines_own(archive: &Path) -> bool {
    let name = archive.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    THE_MACHINES_OWN.contains(&name.split('_').next().unwrap_or_default())
}

/// Where the machine's own apt finds Debian.
fn debian_mirror() -> Result<String, String> {
    let mut command = Command::new("apt-get");
    command.args(["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]);
    let uris = output_of(command)?;
    let debian = uris.lines().find(|uri| uri.ends_with("/debian/")).map(str::to_owned);
    debian.ok_or_else(|| "the sources in /etc/apt name no mirror of Debian (none ends in /debian/)".into())
}

/// What it prints on its standard output.
fn output_of(mut command: Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let shown: Vec<_> = command.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
    let output = command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("LC_ALL", "C")
        .env_remove("APT_CONFIG")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("{program} cannot be run here: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let told = |line: &&str| ["E: ", "W: ", "dpkg"].iter().any(|mark| line.starts_with(mark));
    let mut lines: Vec<_> = text.lines().filter(told).collect();
    if lines.is_empty() {
        lines = text.lines().filter(|line| !line.trim().is_empty()).collect();
    }
    let tail = lines[lines.len().saturating_sub(8)..].join("\n    ");
    Err(format!("`{program} {}` failed ({}):\n    {tail}", shown.join(" "), output.status))
}
