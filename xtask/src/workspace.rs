//! Where the workspace and its build products lie, and how they are built: once, for every cell of the matrix.

use crate::json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The workspace that this program is part of.
pub struct Workspace {
    /// The directory of the root manifest.
    pub root: PathBuf,
    /// cargo's target directory, wherever the user put it.
    pub target: PathBuf,
    /// The directories of its packages, relative to the root: empty for the root package.
    pub packages: Vec<String>,
}

/// One executable of the workspace.
pub struct Binary {
    /// The directory of its package, relative to the root: empty for the root package.
    pub package: String,
    /// `lib`, `bin`, `test`, `example`.
    pub kind: String,
    /// The target's name.
    pub name: String,
    /// Whether it is a test harness.
    pub test: bool,
    /// The file.
    pub path: PathBuf,
}

impl Binary {
    /// What logs and tables call it.
    pub fn label(&self) -> String {
        let package = if self.package.is_empty() { "allhands" } else { &self.package };
        format!("{package}:{}:{}", self.kind, self.name)
    }
}

impl Workspace {
    /// Asks cargo where things are.
    pub fn find() -> Result<Self, String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_path_buf();
        let metadata = output(cargo(&root).args(["metadata", "--no-deps", "--format-version", "1"]))?;
        let metadata = Value::parse(&metadata).ok_or("`cargo metadata` did not answer in JSON")?;
        let target = metadata.get("target_directory").and_then(|target| target.text().map(PathBuf::from));
        let target = target.ok_or("`cargo metadata` did not name the target directory")?;
        let packages = metadata.get("packages").map(Value::items).unwrap_or_default();
        let packages = packages.iter().filter_map(|package| directory(package, &root)).collect();
        Ok(Self { root, target, packages })
    }

    /// A cargo command in the root.
    pub fn cargo(&self) -> Command {
        cargo(&self.root)
    }

    /// Builds every test, example and program of the workspace; cargo's own messages go to the terminal.
    pub fn build_tests(&self) -> Result<Vec<Binary>, String> {
        self.build(&["test", "--workspace", "--no-run"])
    }

    /// Builds the command line and gives its path.
    pub fn build_program(&self) -> Result<PathBuf, String> {
        let built = self.build(&["build", "--package", "allhands", "--features", "cli", "--bin", "allhands"])?;
        built.into_iter().find(|b| b.name == "allhands").map(|b| b.path).ok_or("cargo built no `allhands`".into())
    }

    fn build(&self, arguments: &[&str]) -> Result<Vec<Binary>, String> {
        let messages = output(self.cargo().args(arguments).arg("--message-format=json-render-diagnostics"))?;
        Ok(messages.lines().filter_map(|line| self.binary(&Value::parse(line)?)).collect())
    }

    fn binary(&self, message: &Value) -> Option<Binary> {
        let target = message.get("target")?;
        Some(Binary {
            path: PathBuf::from(message.get("executable")?.text()?),
            package: directory(message, &self.root)?,
            kind: target.get("kind")?.items().first()?.text()?.to_owned(),
            name: target.get("name")?.text()?.to_owned(),
            test: matches!(message.get("profile")?.get("test")?, Value::Bool(true)),
        })
    }
}

/// The directory, relative to the root, of a package that has a `manifest_path`.
fn directory(value: &Value, root: &Path) -> Option<String> {
    let manifest = Path::new(value.get("manifest_path")?.text()?);
    Some(manifest.parent()?.strip_prefix(root).ok()?.to_str()?.to_owned())
}

fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    command.current_dir(root).stdin(Stdio::null());
    command
}

fn output(command: &mut Command) -> Result<String, String> {
    let output = command.stderr(Stdio::inherit()).output().map_err(|e| format!("cargo cannot be run: {e}"))?;
    if !output.status.success() {
        let arguments: Vec<_> = command.get_args().map(|a| a.to_string_lossy()).collect();
        return Err(format!("`cargo {}` failed ({})", arguments.join(" "), output.status));
    }
    String::from_utf8(output.stdout).map_err(|e| format!("cargo's output is not UTF-8: {e}"))
}
