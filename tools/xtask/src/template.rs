//! The step `template`: a copy of `plugins/template`, made as its README says, builds and passes its tests.

use std::path::Path;
use std::{env, fs};

use anyhow::{Context, Result, ensure};

use crate::workspace::{Workspace, cargo};

/// The path from the template to the sources of dsrun, as written in its manifest.
const SOURCES: &str = "../../";

/// The step of `cargo xtask ci`.
pub(crate) fn check(workspace: &Workspace) -> Result<String> {
    let root = workspace.root();
    let target = workspace.metadata.target_directory.as_std_path();
    // Always the same path, so that cargo reuses its build output.
    let copy = target.join("template");
    if copy.exists() {
        fs::remove_dir_all(&copy).with_context(|| format!("cannot remove {}", copy.display()))?;
    }
    copy_folder(&root.join("plugins/template"), &copy)?;
    // Use the versions that are already downloaded.
    fs::copy(root.join("Cargo.lock"), copy.join("Cargo.lock")).context("cannot copy Cargo.lock")?;
    let manifest = copy.join("Cargo.toml");
    let text = fs::read_to_string(&manifest).context("the template has no Cargo.toml")?;
    ensure!(
        text.contains(SOURCES),
        "the Cargo.toml of the template has no path to the sources that begins with `{SOURCES}`"
    );
    fs::write(&manifest, text.replace(SOURCES, &format!("{}/", root.display())))
        .context("cannot write the copy's Cargo.toml")?;
    let offline = ["test", "build"].map(|task| [task, "--offline", "--quiet"]);
    for arguments in [&["fmt", "--check"][..], &offline[0], &offline[1]] {
        let status = cargo()
            .args(arguments)
            .env("CARGO_TARGET_DIR", target)
            .current_dir(&copy)
            .status()
            .context("cargo could not be started")?;
        ensure!(
            status.success(),
            "`cargo {}` in {} ended with {status}",
            arguments.join(" "),
            copy.display()
        );
    }
    let library = format!("{}dsrun_backend_my_backend{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX);
    ensure!(target.join("debug").join(&library).is_file(), "the copy did not build {library}");
    Ok("the template for backends in Rust builds, and its ops pass the suite".to_owned())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    let copy = || -> std::io::Result<()> {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from)? {
            let (entry, kind) = entry.and_then(|entry| entry.file_type().map(|kind| (entry, kind)))?;
            let target = to.join(entry.file_name());
            if kind.is_dir() {
                copy_folder(&entry.path(), &target).map_err(std::io::Error::other)?;
            } else {
                fs::copy(entry.path(), target)?;
            }
        }
        Ok(())
    };
    copy().with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_copied_whole() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        fs::create_dir_all(from.join("a/b")).unwrap();
        fs::write(from.join("a/b/c"), "text").unwrap();
        copy_folder(&from, &to).unwrap();
        assert_eq!(fs::read_to_string(to.join("a/b/c")).unwrap(), "text");
        let message = format!("{:#}", copy_folder(&folder.path().join("none"), &to).unwrap_err());
        assert!(message.contains("none"), "{message}");
    }
}
