//! The workspace as the checks see it: what `cargo metadata` says, and where the files are.

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result};
use cargo_metadata::{Metadata, MetadataCommand, Package};

/// The platforms the README speaks of. What only another platform would build (a browser's, a phone's) is left out of
/// the metadata: it is in the lock file and nowhere else.
const PLATFORMS: &[&str] = &[
    "x86_64-unknown-linux-gnu",
    "aarch64-unknown-linux-gnu",
    "x86_64-apple-darwin",
    "aarch64-apple-darwin",
    "x86_64-pc-windows-msvc",
];

/// The workspace this program was built from.
pub(crate) struct Workspace {
    /// All packages, external ones included, that one of [`PLATFORMS`] needs.
    pub(crate) metadata: Metadata,
}

impl Workspace {
    /// Asks cargo about the workspace that contains the current directory.
    pub(crate) fn load() -> Result<Self> {
        let filters =
            PLATFORMS.iter().flat_map(|platform| ["--filter-platform".to_owned(), (*platform).to_owned()]);
        let metadata = MetadataCommand::new()
            .cargo_path(cargo())
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

/// The cargo that started this program, so that a `+toolchain` given once holds for every step.
pub(crate) fn cargo() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// `path` relative to `root`, with `/` on every platform; the whole path when it lies elsewhere.
pub(crate) fn display_relative(path: &Path, root: &Path) -> String {
    let relative = path.strip_prefix(root).unwrap_or(path);
    relative.components().map(|part| part.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

/// All files under `folder` whose name ends in `.extension`, sorted; none when the folder does not exist.
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
            // A link is not followed: it could lead out of the repository or round in a circle.
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

/// One line per problem under a headline, as the error of a check.
pub(crate) fn fail_on(problems: &[String], headline: &str) -> Result<()> {
    if problems.is_empty() {
        return Ok(());
    }
    anyhow::bail!("{headline}\n  - {}", problems.join("\n  - "))
}
