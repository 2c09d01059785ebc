//! Finds the backend that `--backend` names: a linked one or a plugin. The error for a missing backend lists the searched
//! places and the commands that install it.

use anyhow::{Context, Result, anyhow};
use dsrun_core::{device::Backend, registry::Registry};
use dsrun_plugin_sdk::discovery::{Origin, PlaceOutcome, Places, Report, discover};
use std::{
    cmp::Reverse,
    path::{Path, PathBuf},
    sync::Arc,
};
use tracing::info;

/// The source folder that this program was built from. It need not exist where the program runs.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The backends that are linked into this program.
pub(crate) fn registry() -> Result<Registry> {
    let mut registry = Registry::new();
    registry.register(Arc::new(dsrun_cpu::CpuBackend::new()))?;
    Ok(registry)
}

/// Finds a backend by name, or [the default](default_backend) without a name. A path names the manifest or the library of a plugin.
pub(crate) fn find_backend(name: Option<&str>) -> Result<Arc<dyn Backend>> {
    let Some(name) = name else { return default_backend() };
    let missing = match registry()?.backend(Some(name)) {
        Ok(backend) => return Ok(backend.clone()),
        Err(missing) => missing,
    };
    if name.contains(std::path::is_separator) {
        return load_path(name);
    }
    let report = discover(&Places::of_process([]));
    if report.plugins.iter().any(|plugin| plugin.name == name) {
        let hint = "hint: `dsrun backends --explain` describes each plugin";
        return Ok(Arc::new(report.load(name).with_context(|| format!("{missing}\n{hint}"))?));
    }
    let sources = Path::new(SOURCES).canonicalize().ok();
    Err(anyhow!("{}\n{}", missing.message(), advice(name, &report, sources.as_deref())))
}

/// The backend that is used if none is named: of the plugins that rank as a default and find a device, the one of the highest
/// rank; the first one that is linked in, if there is no such plugin.
fn default_backend() -> Result<Arc<dyn Backend>> {
    let report = discover(&Places::of_process([]));
    let mut ranked: Vec<_> = report.ready().filter(|plugin| plugin.default_rank > 0).collect();
    // The sort is stable: of equal ranks the plugin that was found first is tried first.
    ranked.sort_by_key(|plugin| Reverse(plugin.default_rank));
    for plugin in ranked {
        let backend = plugin.load().and_then(|backend| Ok((backend.devices()?.is_empty(), backend)));
        match backend {
            Ok((false, backend)) => return Ok(Arc::new(backend)),
            Ok((true, _)) => info!("{} is not the default backend: it finds no device", plugin.name),
            Err(error) => info!("{} is not the default backend: {error}", plugin.name),
        }
    }
    Ok(registry()?.backend(None)?.clone())
}

fn load_path(name: &str) -> Result<Arc<dyn Backend>> {
    let path = std::path::absolute(name).with_context(|| format!("{name} is not a path"))?;
    let report = discover(&Places::of_process([path]));
    let plugin = report.plugins.iter().find(|plugin| plugin.origin == Origin::Argument);
    let plugin = plugin.with_context(|| format!("there is no plugin {name}"))?;
    Ok(Arc::new(plugin.load()?))
}

/// The places that were searched for a plugin, and how to install it.
fn advice(name: &str, report: &Report, sources: Option<&Path>) -> String {
    let mut text = String::from("plugins were searched for in these folders (the first match wins):\n");
    for place in &report.places {
        let outcome = match &place.outcome {
            PlaceOutcome::Searched(0) => "no plugins".to_owned(),
            PlaceOutcome::Searched(count) => format!("{count} other plugins"),
            PlaceOutcome::Absent => "does not exist".to_owned(),
            PlaceOutcome::Failed(reason) => reason.clone(),
        };
        text += &format!("  {} ({}): {outcome}\n", place.path.display(), place.origin.name());
    }
    text += "`dsrun backends --explain` lists the plugins in them\n";
    let folder = report.places.iter().find(|place| place.origin == Origin::Program);
    // The program in `DIR/bin` searches `DIR/lib/dsrun/backends.d`.
    let prefix =
        folder.and_then(|place| place.path.ancestors().nth(3)).map_or_else(|| "DIR".to_owned(), quoted);
    match sources.filter(|sources| has_plugin(sources, name)) {
        Some(sources) => {
            text += &format!(
                "hint: install it from the sources:\n  cd {} && cargo xtask install --prefix {prefix}",
                quoted(sources)
            );
        }
        None => {
            text += &format!(
                "hint: copy the plugin's library and its manifest, {name}.dsrun.toml, into one of these folders, or name its \
                 file: --backend path/to/library\n\
                 hint: the plugins of dsrun itself come with `cargo xtask install --prefix {prefix}` in its source folder"
            );
        }
    }
    text
}

/// Whether the sources contain a plugin of this name.
fn has_plugin(sources: &Path, name: &str) -> bool {
    let plain = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    let folder: PathBuf = sources.join("plugins").join(name);
    plain && folder.join(format!("{name}.dsrun.toml")).is_file()
}

/// A path, quoted so that a shell reads it as one word.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_plugin_sdk::discovery::Place;

    fn report() -> Report {
        let place = |origin, path: &str, outcome| Place { origin, path: path.into(), outcome };
        Report {
            places: vec![
                place(Origin::PathVariable, "plugins", PlaceOutcome::Failed("is relative".into())),
                place(Origin::Program, "/opt/my dsrun/lib/dsrun/backends.d", PlaceOutcome::Absent),
                place(Origin::System, "/usr/share/dsrun/backends.d", PlaceOutcome::Searched(2)),
            ],
            plugins: Vec::new(),
        }
    }

    #[test]
    fn advice_names_every_place_and_the_command() {
        let sources = Path::new(SOURCES);
        let text = advice("example-c", &report(), Some(sources));
        for part in [
            "plugins (DSRUN_BACKEND_PATH): is relative",
            "backends.d (beside the program): does not exist",
            "2 other",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(text.ends_with("cargo xtask install --prefix '/opt/my dsrun'"), "{text}");
    }

    #[test]
    fn advice_for_a_foreign_plugin_does_not_name_the_sources() {
        for name in ["abacus", "../example-c", ""] {
            let text = advice(name, &report(), Some(Path::new(SOURCES)));
            assert!(text.contains("copy the plugin's library") && !text.contains("cd "), "{text}");
        }
    }
}
