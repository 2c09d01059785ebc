//! Discovery of plugins, which runs none of their code.
//!
//! A plugin is found by its manifest (`NAME.dsrun.toml`, see [`Manifest`]) or, without a manifest, by the file name of its
//! library (`libdsrun_backend_NAME.so`). The places, in the order of the search:
//!
//! 1. files that the user names;
//! 2. `DSRUN_BACKEND_FILES`: if set, these files and no further places;
//! 3. the folders of `DSRUN_BACKEND_PATH`;
//! 4. `../lib/dsrun/backends.d` beside the folder of the program;
//! 5. `dsrun/backends.d` in the user's data folder (`XDG_DATA_HOME`, or `~/.local/share`);
//! 6. `/usr/local/share/dsrun/backends.d` and `/usr/share/dsrun/backends.d`.
//!
//! The current directory is never searched, so a relative path in a variable is refused. A program that runs with more rights
//! than its user ignores the variables. The first plugin of a name wins; in one place a manifest precedes a library. The
//! [`Report`] has the problems of each plugin, which do not affect others.

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

/// The suffix of the file name of a manifest.
pub const MANIFEST_SUFFIX: &str = ".dsrun.toml";

/// The stem of the file name of a library, between the prefix of the platform and the name of the backend.
const LIBRARY_STEM: &str = "dsrun_backend_";

/// The searched places and the plugins found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The places, in the order of the search.
    pub places: Vec<Place>,
    /// The plugins, in the order in which they were found.
    pub plugins: Vec<Plugin>,
}

/// A searched place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Why the place was searched.
    pub origin: Origin,
    /// The folder or file.
    pub path: PathBuf,
    /// The outcome of the search.
    pub outcome: PlaceOutcome,
}

/// The outcome of searching a place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlaceOutcome {
    /// The place has this many plugins, including broken ones.
    Searched(usize),
    /// The place does not exist.
    Absent,
    /// The search was skipped or stopped for this reason.
    Failed(String),
}

/// A plugin that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plugin {
    /// The name that users select it by: of the manifest, or from the file name.
    pub name: String,
    /// The version, if it has a manifest.
    pub version: Option<String>,
    /// The description, if its manifest has one.
    pub description: Option<String>,
    /// The rank as the default backend that its manifest gives; 0 for never.
    pub default_rank: i32,
    /// The file of the manifest, if it has one.
    pub manifest: Option<PathBuf>,
    /// The file of the library, if known.
    pub library: Option<PathBuf>,
    /// Why its place was searched.
    pub origin: Origin,
    /// Whether it can be loaded, as far as is known without running its code.
    pub state: State,
}

/// The state of a plugin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The plugin can be loaded.
    Ready,
    /// Another plugin of this name precedes it, the one of this file.
    Shadowed(PathBuf),
    /// The plugin cannot be loaded for this reason.
    Broken(String),
}

/// The result of loading a plugin.
#[derive(Clone, Debug, Serialize)]
pub struct Probe {
    /// The name of the plugin.
    pub name: String,
    /// The names of its devices, or the error.
    pub devices: std::result::Result<Vec<String>, String>,
}

/// Searches places for plugins, without running their code.
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
    /// Searches a folder: first manifests, then libraries that no manifest names.
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
        // The sort is stable: plugins of equal priority stay in the order of manifests before libraries, then of names.
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

    /// Loads the plugin of this name.
    ///
    /// # Errors
    /// [`Code::Unavailable`] with the searched places if there is no such plugin, or with the reasons if it cannot be loaded.
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
            format!("the plugin `{name}` cannot be loaded: {}", reasons.join("; "))
        };
        Err(Error::new(Code::Unavailable, message))
    }

    /// The plugins that can be loaded.
    pub fn ready(&self) -> impl Iterator<Item = &Plugin> {
        self.plugins.iter().filter(|plugin| plugin.state == State::Ready)
    }

    /// Loads every plugin that can be loaded and lists its devices. This runs the code of plugins.
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
    /// The file of the manifest, or else of the library.
    pub fn file(&self) -> &Path {
        self.manifest.as_deref().or(self.library.as_deref()).unwrap_or(Path::new(""))
    }

    /// The file and the reason why the plugin cannot be loaded; `None` if it can.
    pub fn problem(&self) -> Option<String> {
        match &self.state {
            State::Ready => None,
            State::Shadowed(by) => Some(format!("{}: {} precedes it", self.file().display(), by.display())),
            State::Broken(reason) => Some(format!("{}: {reason}", self.file().display())),
        }
    }

    /// Loads the plugin.
    ///
    /// # Errors
    /// As [`PluginBackend::load`], if it cannot be loaded, or if its name differs from that of its manifest or file. A library
    /// that the user names by a path may have any name if its file name has none.
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
                "has the name `{}`, but {} names it `{}`; make the names equal",
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

/// The name of the backend in the file name of a library.
fn library_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_prefix(std::env::consts::DLL_PREFIX)?.strip_suffix(std::env::consts::DLL_SUFFIX)?;
    let name = name.strip_prefix(LIBRARY_STEM)?.replace('_', "-");
    (!name.is_empty()).then_some(name)
}

/// The manifest in the folder of a library that names the library.
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

/// Examines a file that the user names, a manifest or a library.
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
        default_rank: 0,
        manifest: None,
        library: Some(path.to_owned()),
        origin,
        state: State::Ready,
    }
}

/// Examines a manifest, and returns the plugin with its priority.
fn examine_manifest(path: &Path, origin: Origin) -> (i32, Plugin) {
    let file_name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut plugin = Plugin {
        name: file_name.trim_end_matches(MANIFEST_SUFFIX).to_owned(),
        version: None,
        description: None,
        default_rank: 0,
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
    plugin.default_rank = manifest.default_rank;
    let checked = manifest.library(path).and_then(|library| {
        // Set even if the plugin is broken, so that the library is not examined as a plugin without a manifest.
        plugin.library = Some(library.clone());
        manifest.check(&library, &find_library)
    });
    if let Err(error) = checked {
        plugin.state = State::Broken(error.to_string());
    }
    (manifest.priority, plugin)
}

impl fmt::Display for Report {
    /// Writes every place and plugin, with problems, for people to read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "places, in the order of the search:")?;
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
