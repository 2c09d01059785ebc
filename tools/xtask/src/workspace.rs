//! The workspace: the output of `cargo metadata`, and helpers for paths and files.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use anyhow::{Context, Result};
use cargo_metadata::{Metadata, MetadataCommand, Package};

/// The platforms that the README lists. Dependencies of other platforms only, such as browsers and phones, are left out of the
/// metadata.
const PLATFORMS: &[&str] = &[
    "x86_64-unknown-linux-gnu",
    "aarch64-unknown-linux-gnu",
    "x86_64-apple-darwin",
    "aarch64-apple-darwin",
    "x86_64-pc-windows-msvc",
];

/// The workspace that contains this program.
pub(crate) struct Workspace {
    /// All packages that one of [`PLATFORMS`] needs, including external ones.
    pub(crate) metadata: Metadata,
}

impl Workspace {
    /// Runs `cargo metadata` for the workspace that contains the current directory.
    pub(crate) fn load() -> Result<Self> {
        let filters =
            PLATFORMS.iter().flat_map(|platform| ["--filter-platform".to_owned(), (*platform).to_owned()]);
        let metadata = MetadataCommand::new()
            .cargo_path(cargo_path())
            .other_options(filters.collect::<Vec<_>>())
            .exec()
            .context("`cargo metadata` failed; run it in the repository to see why")?;
        Ok(Self { metadata })
    }

    /// The folder of the root `Cargo.toml`.
    pub(crate) fn root(&self) -> &Path {
        self.metadata.workspace_root.as_std_path()
    }

    /// The folder of a workspace package relative to the root, with `/` on every platform.
    pub(crate) fn folder(&self, package: &Package) -> String {
        let manifest = package.manifest_path.as_std_path();
        let folder = manifest.parent().unwrap_or(manifest);
        display_relative(folder, self.root())
    }
}

/// The cargo that started this program, so that all steps use the same toolchain.
fn cargo_path() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// A command that runs this cargo with an empty standard input.
///
/// It lacks the variables by which cargo describes this package to this program. Build scripts of dependencies read
/// them, so cargo would build those again after every change between a shell and a step.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(cargo_path());
    for (name, _) in env::vars_os() {
        if name
            .to_str()
            .is_some_and(|name| ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|part| name.starts_with(part)))
        {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// `path` relative to `root`, with `/` on every platform; the whole path if it is not inside `root`.
pub(crate) fn display_relative(path: &Path, root: &Path) -> String {
    let relative = path.strip_prefix(root).unwrap_or(path);
    relative.components().map(|part| part.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

/// All files under `folder` whose name ends in `.extension`, sorted; an empty list if the folder does not exist.
pub(crate) fn files_with_extension(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut pending = vec![folder.to_path_buf()];
    while let Some(current) = pending.pop() {
        if !current.is_dir() {
            continue;
        }
        let entries = fs::read_dir(&current).with_context(|| format!("cannot list {}", current.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", current.display()))?;
            let path = entry.path();
            // Symbolic links are not followed: they could leave the repository or form a loop.
            let kind = entry.file_type().with_context(|| format!("cannot examine {}", path.display()))?;
            if kind.is_dir() {
                pending.push(path);
            } else if kind.is_file() && path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Fails with a headline and a line for each problem, if there are problems.
pub(crate) fn fail_on(problems: &[String], headline: &str) -> Result<()> {
    if problems.is_empty() {
        return Ok(());
    }
    anyhow::bail!("{headline}\n  - {}", problems.join("\n  - "))
}
