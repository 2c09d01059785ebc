//! The step `template`: a copy of `plugins/template`, made as its README says, compiles with its tests.
//!
//! It is only checked, in the profile of this workspace, so that the metadata of dependencies that the step `clippy` made serves
//! here too: building them once more takes minutes. The same tests run as the test `template` of `dsrun-conformance`.

use std::fs;
use std::path::Path;

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
    let own = fs::read_to_string(root.join("Cargo.toml")).context("the workspace has no Cargo.toml")?;
    let text = with_profiles(&text, &own)?.replace(SOURCES, &format!("{}/", root.display()));
    fs::write(&manifest, text).context("cannot write the copy's Cargo.toml")?;
    for arguments in [&["fmt", "--check"][..], &["check", "--all-targets", "--offline", "--quiet"]] {
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
    Ok("a copy of the template for backends in Rust compiles with its tests".to_owned())
}

/// A manifest with the profiles of another one for its own.
fn with_profiles(text: &str, other: &str) -> Result<String> {
    let (mut manifest, other): (toml::Table, toml::Table) = (text.parse()?, other.parse()?);
    let profiles = other.get("profile").context("the workspace's Cargo.toml has no profiles")?;
    manifest.insert("profile".to_owned(), profiles.clone());
    Ok(toml::to_string(&manifest)?)
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
    fn profiles_are_those_of_the_other_manifest() {
        let own = "[profile.dev]\nopt-level = 3\n[dependencies]\na = \"1\"\n";
        let taken = with_profiles(own, "[profile.dev]\nopt-level = 1\n[dependencies]\nb = \"1\"\n").unwrap();
        let expected = "[profile.dev]\nopt-level = 1\n[dependencies]\na = \"1\"\n";
        assert_eq!(taken.parse::<toml::Table>().unwrap(), expected.parse::<toml::Table>().unwrap());
        assert!(with_profiles(own, "").is_err());
    }

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
