//! `cargo xtask install --prefix DIR`: installs the programs, the plugins and the C headers.
//!
//! | what | where |
//! |---|---|
//! | programs: `dsrun`, and the conformance suite's | `DIR/bin` |
//! | plugins: libraries and manifests | `DIR/lib/dsrun/backends.d` |
//! | `dsrun.h`, `dsrun.hpp` | `DIR/include` |
//!
//! A plugin is a folder of `plugins/`: a package of the workspace, or one with a Makefile that knows `make install PREFIX=`.
//! A file is copied to a temporary name and then renamed, so that running programs are not affected.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs, process};

use anyhow::{Context, Result, bail, ensure};
use cargo_metadata::{Artifact, Message, TargetKind};
use serde::Deserialize;

use crate::workspace::{Workspace, cargo};

/// The folder, below the prefix, in which programs in `bin` look for plugins.
const PLUGINS: &str = "lib/dsrun/backends.d";

/// The folder of the C headers in the repository.
const HEADERS: &str = "plugins/sdk/include";

/// The build profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// For users: `cargo build --release`.
    Release,
    /// The profile of tests: `cargo build --workspace --all-targets`.
    Dev,
}

impl Profile {
    /// The profile with this name.
    pub(crate) fn from_name(name: &str) -> Result<Self> {
        match name {
            "release" => Ok(Self::Release),
            "dev" => Ok(Self::Dev),
            other => bail!("no profile is named `{other}`; there are release and dev"),
        }
    }
}

/// Builds and installs, and returns the paths of the installed files.
pub(crate) fn run(prefix: &Path, profile: Profile) -> Result<Vec<PathBuf>> {
    let workspace = Workspace::load()?;
    // Absolute, because cargo and make run in other folders.
    let prefix =
        std::path::absolute(prefix).with_context(|| format!("`{}` is not a path", prefix.display()))?;
    // Fail before the build, which takes minutes.
    fs::create_dir_all(prefix.join(PLUGINS))
        .with_context(|| format!("cannot create {}", prefix.join(PLUGINS).display()))?;
    let artifacts = build(&workspace, profile)?;
    let mut installed = Vec::new();
    for artifact in &artifacts {
        if let Some(program) = program(artifact, &workspace) {
            installed.push(place(&program, &prefix.join("bin"))?);
        }
    }
    ensure!(
        installed.iter().any(|path| path.file_stem().is_some_and(|name| name == "dsrun")),
        "cargo did not say where it put the program"
    );
    for folder in plugin_folders(workspace.root())? {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if folder.join("Makefile").is_file() {
            make(&folder, &prefix, &workspace)?;
            installed.extend(made(&folder, &prefix)?);
            continue;
        }
        // The SDK is no plugin, and the template no member of the workspace.
        let Some(library) = library(&artifacts, &folder, &workspace) else { continue };
        let manifest = folder.join(format!("{name}.dsrun.toml"));
        ensure!(manifest.is_file(), "{} is missing: every plugin needs a manifest", manifest.display());
        installed.push(place(&library, &prefix.join(PLUGINS))?);
        installed.push(place(&manifest, &prefix.join(PLUGINS))?);
    }
    for header in ["dsrun.h", "dsrun.hpp"] {
        installed.push(place(&workspace.root().join(HEADERS).join(header), &prefix.join("include"))?);
    }
    // Cargo reports artifacts in any order.
    installed.sort();
    Ok(installed)
}

/// The step of `cargo xtask ci`: installs the build of the tests twice, and tests that the installed program loads the plugins.
pub(crate) fn check(workspace: &Workspace) -> Result<String> {
    let prefix = workspace.metadata.target_directory.as_std_path().join("installed");
    let installed = run(&prefix, Profile::Dev)?;
    ensure!(run(&prefix, Profile::Dev)? == installed, "a second installation installs other files");
    let output = Command::new(prefix.join("bin/dsrun"))
        .args(["backends", "--explain", "--json"])
        .env_remove("DSRUN_BACKEND_FILES")
        .env_remove("DSRUN_BACKEND_PATH")
        .stdin(Stdio::null())
        .output()
        .context("the installed program cannot be started")?;
    ensure!(output.status.success(), "the installed program ended with {}", output.status);
    let explained: Explained = serde_json::from_slice(&output.stdout)
        .context("`dsrun backends --explain --json` does not print JSON")?;
    let folder = prefix.join(PLUGINS);
    for manifest in
        installed.iter().filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
    {
        let plugin = explained.plugins.iter().find(|plugin| plugin.manifest.as_ref() == Some(manifest));
        let plugin =
            plugin.with_context(|| format!("the installed program does not see {}", manifest.display()))?;
        let loaded = explained.loaded.iter().find(|loaded| loaded.name == plugin.name);
        let loaded =
            loaded.with_context(|| format!("plugin {} in {} is not ready", plugin.name, folder.display()))?;
        // A missing device is fine; a plugin that does not load is an error.
        let fine = !loaded.devices.is_empty()
            || loaded.error.as_deref().is_some_and(|error| !error.contains("process"));
        ensure!(fine, "plugin {}: {}", plugin.name, loaded.error.as_deref().unwrap_or("has no device"));
    }
    let plugins = explained.loaded.len();
    Ok(format!("{} files installed; the installed program loads {plugins} plugins", installed.len()))
}

/// The parts of the output of `dsrun backends --explain --json` that the step uses.
#[derive(Debug, Deserialize)]
struct Explained {
    plugins: Vec<Found>,
    loaded: Vec<Loaded>,
}

#[derive(Debug, Deserialize)]
struct Found {
    name: String,
    manifest: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Loaded {
    name: String,
    #[serde(default)]
    devices: Vec<String>,
    error: Option<String>,
}

/// The message that says what was installed and what to do next.
pub(crate) fn report(installed: &[PathBuf], prefix: &Path) -> String {
    let mut text: String = installed.iter().map(|path| format!("installed {}\n", path.display())).collect();
    let programs = std::path::absolute(prefix.join("bin")).unwrap_or_else(|_| prefix.join("bin"));
    let found =
        env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|folder| folder == programs));
    text += &format!("`{} backends --explain` shows the plugins\n", programs.join("dsrun").display());
    if !found {
        text += &format!("{} is not in PATH\n", programs.display());
    }
    text
}

/// Builds the programs and the plugins that are packages.
fn build(workspace: &Workspace, profile: Profile) -> Result<Vec<Artifact>> {
    let mut command = cargo();
    command.args(["build", "--message-format=json-render-diagnostics"]).current_dir(workspace.root());
    match profile {
        Profile::Dev => _ = command.args(["--workspace", "--all-targets"]),
        Profile::Release => {
            command.arg("--release");
            for package in workspace.metadata.workspace_packages() {
                let folder = workspace.folder(package);
                if folder.starts_with("plugins/") || has_programs(&folder) {
                    command.args(["--package", package.name.as_str()]);
                }
            }
        }
    }
    let mut child = command.stdout(Stdio::piped()).spawn().context("cargo could not be started")?;
    let output = child.stdout.take().context("cargo has no output")?;
    let mut artifacts = Vec::new();
    for message in Message::parse_stream(std::io::BufReader::new(output)) {
        if let Message::CompilerArtifact(artifact) = message.context("cargo's messages cannot be read")? {
            artifacts.push(artifact);
        }
    }
    let status = child.wait().context("cargo cannot be waited for")?;
    ensure!(status.success(), "cargo could not build the programs and plugins; it ended with {status}");
    Ok(artifacts)
}

/// Rooms whose programs are for users.
fn has_programs(folder: &str) -> bool {
    let for_developers = ["tools/test-support", "tools/xtask"].contains(&folder);
    (folder.starts_with("tools/") && !for_developers) || folder == "conformance-tests"
}

/// The executable of an artifact, if it is a program for users.
fn program(artifact: &Artifact, workspace: &Workspace) -> Option<PathBuf> {
    let package = workspace.metadata.packages.iter().find(|package| package.id == artifact.package_id)?;
    let wanted = artifact.target.kind.contains(&TargetKind::Bin) && !artifact.profile.test;
    let program = artifact.executable.as_ref().filter(|_| wanted && has_programs(&workspace.folder(package)));
    program.map(|path| path.clone().into_std_path_buf())
}

/// The library of the plugin in a folder, if that is a package of the workspace.
fn library(artifacts: &[Artifact], folder: &Path, workspace: &Workspace) -> Option<PathBuf> {
    let manifest = folder.join("Cargo.toml");
    let members = &workspace.metadata.workspace_members;
    let of_folder = |artifact: &&Artifact| {
        members.contains(&artifact.package_id) && artifact.manifest_path.as_std_path() == manifest
    };
    let is_plugin =
        |artifact: &&Artifact| artifact.target.kind.contains(&TargetKind::CDyLib) && !artifact.profile.test;
    let artifact = artifacts.iter().filter(of_folder).find(is_plugin)?;
    let dynamic = |path: &Path| path.extension() == Some(env::consts::DLL_EXTENSION.as_ref());
    artifact.filenames.iter().map(|path| path.clone().into_std_path_buf()).find(|path| dynamic(path))
}

/// The folders of `plugins/`, by name.
fn plugin_folders(root: &Path) -> Result<Vec<PathBuf>> {
    let plugins = root.join("plugins");
    let entries = fs::read_dir(&plugins).with_context(|| format!("cannot list {}", plugins.display()))?;
    let mut folders = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("cannot list {}", plugins.display()))?.path();
        if path.is_dir() {
            folders.push(path);
        }
    }
    folders.sort();
    Ok(folders)
}

/// Builds and installs a plugin with its Makefile.
fn make(folder: &Path, prefix: &Path, workspace: &Workspace) -> Result<()> {
    let name = folder.file_name().unwrap_or_default();
    let built = workspace.metadata.target_directory.as_std_path().join("plugins").join(name);
    let argument = |name: &str, path: &Path| format!("{name}={}", path.display());
    let status = Command::new("make")
        .args(["--silent", "install"])
        .arg(argument("PREFIX", prefix))
        .arg(argument("BUILD", &built))
        .arg(argument("INCLUDE", &workspace.root().join(HEADERS)))
        .current_dir(folder)
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("make, which builds {}, could not be started", folder.display()))?;
    ensure!(status.success(), "make ended with {status} in {}", folder.display());
    Ok(())
}

/// The files that a Makefile must have installed: the library and the manifest.
fn made(folder: &Path, prefix: &Path) -> Result<Vec<PathBuf>> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let library = format!(
        "{}dsrun_backend_{}{}",
        env::consts::DLL_PREFIX,
        name.replace('-', "_"),
        env::consts::DLL_SUFFIX
    );
    let files = [library, format!("{name}.dsrun.toml")].map(|file| prefix.join(PLUGINS).join(file));
    for file in &files {
        ensure!(file.is_file(), "`make install` in {} did not write {}", folder.display(), file.display());
    }
    Ok(files.to_vec())
}

/// Copies a file into a folder atomically.
fn place(file: &Path, folder: &Path) -> Result<PathBuf> {
    let name = file.file_name().with_context(|| format!("{} has no name", file.display()))?;
    let target = folder.join(name);
    let beside = folder.join(format!(".{}.{}", name.to_string_lossy(), process::id()));
    let copy = || {
        fs::create_dir_all(folder)?;
        fs::copy(file, &beside)?;
        fs::rename(&beside, &target)
    };
    copy().with_context(|| format!("cannot copy {} to {}", file.display(), target.display()))?;
    Ok(target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_placed_again_over_the_old_one_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let (file, prefix) = (folder.path().join("program"), folder.path().join("a/bin"));
        for text in ["one", "two"] {
            fs::write(&file, text).unwrap();
            let placed = place(&file, &prefix).unwrap();
            assert_eq!(placed, prefix.join("program"));
            assert_eq!(fs::read_to_string(placed).unwrap(), text);
        }
        assert_eq!(fs::read_dir(&prefix).unwrap().count(), 1);
    }

    #[test]
    fn what_cannot_be_placed_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("program");
        fs::write(&file, "one").unwrap();
        let message = format!("{:#}", place(&file, &file.join("bin")).unwrap_err());
        assert!(message.contains("program/bin/program"), "{message}");
        assert!(place(&folder.path().join("none"), folder.path()).is_err());
    }

    #[test]
    fn the_report_names_every_file() {
        let text = report(&["/opt/d/bin/dsrun".into()], Path::new("/opt/d"));
        assert!(text.contains("installed /opt/d/bin/dsrun\n"), "{text}");
        assert!(
            text.contains("`/opt/d/bin/dsrun backends --explain`") && text.contains("not in PATH"),
            "{text}"
        );
    }

    #[test]
    fn programs_for_users_are_those_of_the_tools_and_the_suite() {
        for (folder, wanted) in [
            ("tools/dsrun", true),
            ("conformance-tests", true),
            ("tools/test-support", false),
            ("tools/xtask", false),
            ("core", false),
        ] {
            assert_eq!(has_programs(folder), wanted, "{folder}");
        }
    }
}
