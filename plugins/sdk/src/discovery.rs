//! Finding plugins, without running any of their code.
//!
//! A plugin is found through its manifest (`NAME.dsrun.toml`, see [`Manifest`]), or, where there is none, by the file name of
//! its library (`libdsrun_backend_NAME.so`). The places, in order:
//!
//! 1. files the user names;
//! 2. `DSRUN_BACKEND_FILES`: if set, these files and no other place;
//! 3. the folders of `DSRUN_BACKEND_PATH`;
//! 4. `../lib/dsrun/backends.d` beside the folder of the program;
//! 5. `dsrun/backends.d` in the user's data folder (`XDG_DATA_HOME`, or `~/.local/share`);
//! 6. `/usr/local/share/dsrun/backends.d` and `/usr/share/dsrun/backends.d`.
//!
//! The current directory is never searched, so a relative path in a variable is refused. A program that runs with more rights
//! than its user ignores the variables. The first plugin of a name wins; at one place a manifest wins over a library. What is
//! wrong with one plugin is written down in the [`Report`] and touches no other.

mod manifest;
mod places;

use crate::{PluginBackend, find_library};
use dsrun_core::{
    Code, Error, Result,
    device::{Backend, DeviceInfo},
};
pub use manifest::Manifest;
pub use places::{Origin, Places};
use serde::Serialize;
use std::{
    fmt,
    path::{Path, PathBuf},
};

/// The end of a manifest's file name.
pub const MANIFEST_SUFFIX: &str = ".dsrun.toml";

/// How the file name of a library without a manifest begins, behind the platform's own prefix; its backend's name follows.
const LIBRARY_STEM: &str = "dsrun_backend_";

/// Where was looked and what was found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Every place, in the order in which they were tried.
    pub places: Vec<Place>,
    /// Every plugin, in the order in which they were found.
    pub plugins: Vec<Plugin>,
}

/// A place where plugins may be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Why it was looked at.
    pub origin: Origin,
    /// The folder or file.
    pub path: PathBuf,
    /// What came of it.
    pub outcome: PlaceOutcome,
}

/// What came of looking at a place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlaceOutcome {
    /// It holds this many plugins, broken ones included.
    Searched(usize),
    /// It does not exist.
    Absent,
    /// It was not searched, or not to the end, for this reason.
    Failed(String),
}

/// A plugin that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plugin {
    /// What users select it by: from the manifest, or from the file name.
    pub name: String,
    /// Its version, if a manifest says it.
    pub version: Option<String>,
    /// What it is, if a manifest says it.
    pub description: Option<String>,
    /// The manifest, if it has one.
    pub manifest: Option<PathBuf>,
    /// The library, as far as it is known.
    pub library: Option<PathBuf>,
    /// Why it was looked for where it is.
    pub origin: Origin,
    /// Whether it can be loaded, as far as can be told without doing so.
    pub state: State,
}

/// Whether a plugin can be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Nothing speaks against loading it.
    Ready,
    /// Another plugin of this name was found before: the one of this file.
    Shadowed(PathBuf),
    /// It cannot be used, for this reason.
    Broken(String),
}

/// What loading a plugin gave.
#[derive(Clone, Debug, Serialize)]
pub struct Probe {
    /// The name it was found under.
    pub name: String,
    /// Its devices, or why there are none.
    pub devices: std::result::Result<Vec<String>, String>,
}

/// Looks for plugins. Runs no code of theirs.
pub fn discover(places: &Places) -> Report {
    let mut report = Report::default();
    for (origin, path) in &places.files {
        let outcome = match places::refuse_relative(*origin, path) {
            Some(reason) => PlaceOutcome::Failed(reason),
            None if !path.exists() => PlaceOutcome::Absent,
            None => {
                let plugin = examine(path, *origin);
                report.add(plugin);
                PlaceOutcome::Searched(1)
            }
        };
        report.places.push(Place { origin: *origin, path: path.clone(), outcome });
    }
    for (origin, path) in &places.folders {
        let outcome = match places::refuse_relative(*origin, path) {
            Some(reason) => PlaceOutcome::Failed(reason),
            None => report.search(path, *origin),
        };
        report.places.push(Place { origin: *origin, path: path.clone(), outcome });
    }
    report
}

impl Report {
    /// The plugins of a folder: those with manifests, then the libraries that no manifest names.
    fn search(&mut self, folder: &Path, origin: Origin) -> PlaceOutcome {
        let entries = match std::fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return PlaceOutcome::Absent,
            Err(error) => return PlaceOutcome::Failed(error.to_string()),
        };
        let mut failure = None;
        let mut files: Vec<PathBuf> = Vec::new();
        for entry in entries {
            match entry {
                Ok(entry) => files.push(entry.path()),
                Err(error) => failure = Some(error.to_string()),
            }
        }
        files.sort();
        let mut found: Vec<(i32, Plugin)> = Vec::new();
        for manifest in files.iter().filter(|file| is_manifest(file)) {
            let (priority, plugin) = examine_manifest(manifest, origin);
            found.push((priority, plugin));
        }
        for library in files.iter().filter(|file| library_name(file).is_some()) {
            let named = found.iter().any(|(_, plugin)| plugin.library.as_deref() == Some(library));
            if !named {
                found.push((0, examine_library(library, origin)));
            }
        }
        // A stable order: manifests stay before libraries and by name where the priority is the same.
        found.sort_by_key(|(priority, plugin)| (plugin.manifest.is_none(), std::cmp::Reverse(*priority)));
        let count = found.len();
        found.into_iter().for_each(|(_, plugin)| self.add(plugin));
        failure.map_or(PlaceOutcome::Searched(count), PlaceOutcome::Failed)
    }

    fn add(&mut self, mut plugin: Plugin) {
        let same = |other: &&Plugin| other.state == State::Ready && other.name == plugin.name;
        if plugin.state == State::Ready
            && let Some(first) = self.plugins.iter().find(same)
        {
            plugin.state = State::Shadowed(first.file().to_owned());
        }
        self.plugins.push(plugin);
    }

    /// Loads the plugin of a name.
    ///
    /// # Errors
    /// [`Code::Unavailable`] if there is none, or none that can be loaded: with the reasons, or with the places that were looked
    /// at.
    pub fn load(&self, name: &str) -> Result<PluginBackend> {
        if let Some(plugin) = self.ready().find(|plugin| plugin.name == name) {
            return plugin.load();
        }
        let reasons: Vec<String> =
            self.plugins.iter().filter(|plugin| plugin.name == name).filter_map(Plugin::problem).collect();
        let message = if reasons.is_empty() {
            let tried: Vec<String> =
                self.places.iter().map(|place| place.path.display().to_string()).collect();
            format!("there is no plugin `{name}` in {}", tried.join(", "))
        } else {
            format!("the plugin `{name}` cannot be used: {}", reasons.join("; "))
        };
        Err(Error::new(Code::Unavailable, message))
    }

    /// The plugins that can be loaded, as far as can be told.
    pub fn ready(&self) -> impl Iterator<Item = &Plugin> {
        self.plugins.iter().filter(|plugin| plugin.state == State::Ready)
    }

    /// Loads every plugin that can be loaded and asks for its devices. This runs their code; what goes wrong in one is in its
    /// answer.
    pub fn probe(&self) -> Vec<Probe> {
        let one = |plugin: &Plugin| {
            let devices = plugin.load().and_then(|backend| backend.devices());
            let name = |device: DeviceInfo| device.name;
            let devices = devices.map(|devices| devices.into_iter().map(name).collect());
            Probe { name: plugin.name.clone(), devices: devices.map_err(|error| error.to_string()) }
        };
        self.ready().map(one).collect()
    }
}

impl Plugin {
    /// The manifest, or else the library.
    pub fn file(&self) -> &Path {
        self.manifest.as_deref().or(self.library.as_deref()).unwrap_or(Path::new(""))
    }

    /// Why it cannot be used, with the file.
    pub fn problem(&self) -> Option<String> {
        match &self.state {
            State::Ready => None,
            State::Shadowed(by) => Some(format!("{}: {} comes first", self.file().display(), by.display())),
            State::Broken(reason) => Some(format!("{}: {reason}", self.file().display())),
        }
    }

    /// Loads it.
    ///
    /// # Errors
    /// As [`PluginBackend::load`]; if it cannot be used; or if it calls itself otherwise than its manifest or file name
    /// does. A library somebody named by a path, with a file name that names no backend, may call itself what it likes.
    pub fn load(&self) -> Result<PluginBackend> {
        let library = match (&self.state, &self.library) {
            (State::Ready, Some(library)) => library,
            _ => {
                let reason = self.problem().unwrap_or_else(|| "it has no library".to_owned());
                return Err(Error::new(Code::Unavailable, reason));
            }
        };
        let backend = PluginBackend::load(library)?;
        let named = self.manifest.is_some() || library_name(library).is_some();
        if named && backend.info().name != self.name {
            let message = format!(
                "calls itself `{}`, but {} calls it `{}`: mend the one or the other",
                backend.info().name,
                self.file().display(),
                self.name
            );
            return Err(Error::new(Code::Unavailable, message).at(&library.display().to_string()));
        }
        Ok(backend)
    }
}

fn is_manifest(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(MANIFEST_SUFFIX))
}

/// The backend's name in the file name of a library.
fn library_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_prefix(std::env::consts::DLL_PREFIX)?.strip_suffix(std::env::consts::DLL_SUFFIX)?;
    let name = name.strip_prefix(LIBRARY_STEM)?.replace('_', "-");
    (!name.is_empty()).then_some(name)
}

/// The manifest beside a library that names it.
fn manifest_of(library: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(library.parent()?).ok()?;
    let mut manifests: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| is_manifest(path))
        .filter(|path| {
            Manifest::read(path)
                .and_then(|manifest| manifest.library(path))
                .is_ok_and(|named| named == library)
        })
        .collect();
    manifests.sort();
    manifests.into_iter().next()
}

/// A file somebody named: a manifest, or a library.
fn examine(path: &Path, origin: Origin) -> Plugin {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    match is_manifest(&path).then(|| path.clone()).or_else(|| manifest_of(&path)) {
        Some(manifest) => examine_manifest(&manifest, origin).1,
        None => examine_library(&path, origin),
    }
}

fn examine_library(path: &Path, origin: Origin) -> Plugin {
    let stem = || path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let name = library_name(path).or_else(stem).unwrap_or_default();
    Plugin {
        name: name.trim_start_matches(std::env::consts::DLL_PREFIX).to_owned(),
        version: None,
        description: None,
        manifest: None,
        library: Some(path.to_owned()),
        origin,
        state: State::Ready,
    }
}

/// The plugin of a manifest, with its priority.
fn examine_manifest(path: &Path, origin: Origin) -> (i32, Plugin) {
    let file_name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut plugin = Plugin {
        name: file_name.trim_end_matches(MANIFEST_SUFFIX).to_owned(),
        version: None,
        description: None,
        manifest: Some(path.to_owned()),
        library: None,
        origin,
        state: State::Ready,
    };
    let manifest = match Manifest::read(path) {
        Ok(manifest) => manifest,
        Err(error) => {
            plugin.state = State::Broken(error.to_string());
            return (0, plugin);
        }
    };
    plugin.name.clone_from(&manifest.name);
    plugin.version = Some(manifest.version.clone());
    plugin.description.clone_from(&manifest.description);
    let checked = manifest.library(path).and_then(|library| {
        // Known from here on, so that it is not taken for a plugin of its own.
        plugin.library = Some(library.clone());
        manifest.check(&library, &find_library)
    });
    if let Err(error) = checked {
        plugin.state = State::Broken(error.to_string());
    }
    (manifest.priority, plugin)
}

impl fmt::Display for Report {
    /// For people: every place, every plugin, and what is wrong.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "places, in the order they are searched:")?;
        for place in &self.places {
            let outcome = match &place.outcome {
                PlaceOutcome::Searched(1) => "1 plugin".to_owned(),
                PlaceOutcome::Searched(count) => format!("{count} plugins"),
                PlaceOutcome::Absent => "does not exist".to_owned(),
                PlaceOutcome::Failed(reason) => reason.clone(),
            };
            writeln!(f, "  {} ({}): {outcome}", place.path.display(), place.origin.name())?;
        }
        writeln!(f, "plugins:{}", if self.plugins.is_empty() { " none" } else { "" })?;
        for plugin in &self.plugins {
            let version = plugin.version.as_deref().unwrap_or("version unknown");
            match plugin.problem() {
                None => writeln!(f, "  {} {version}: ready, {}", plugin.name, plugin.file().display())?,
                Some(problem) => writeln!(f, "  {} {version}: {problem}", plugin.name)?,
            }
        }
        Ok(())
    }
}
