//! From `--backend` to a backend: one that is linked in, or a plugin. If there is none, the error says where it was looked for
//! and what to type to get it.

use crate::session::registry;
use anyhow::{Context, Result, anyhow};
use dsrun_core::{
    device::Backend,
    discovery::{Origin, PlaceOutcome, Places, Report, discover},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Where this program was built from. The folder need not exist where it runs.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Finds a backend by name; the default without one. A path names a plugin's manifest or library.
pub(crate) fn find_backend(name: Option<&str>) -> Result<Arc<dyn Backend>> {
    let registry = registry()?;
    let (name, missing) = match (name, registry.backend(name)) {
        (_, Ok(backend)) => return Ok(backend.clone()),
        (None, Err(missing)) => return Err(missing.into()),
        (Some(name), Err(missing)) => (name, missing),
    };
    if name.contains(std::path::is_separator) {
        return load_path(name);
    }
    let report = discover(&Places::of_process([]));
    if report.plugins.iter().any(|plugin| plugin.name == name) {
        let hint = "hint: `dsrun backends --explain` says more about each plugin";
        return Ok(Arc::new(report.load(name).with_context(|| format!("{missing}\n{hint}"))?));
    }
    let sources = Path::new(SOURCES).canonicalize().ok();
    Err(anyhow!("{}\n{}", missing.message(), advice(name, &report, sources.as_deref())))
}

fn load_path(name: &str) -> Result<Arc<dyn Backend>> {
    let path = std::path::absolute(name).with_context(|| format!("{name} is no path"))?;
    let report = discover(&Places::of_process([path]));
    let plugin = report.plugins.iter().find(|plugin| plugin.origin == Origin::Argument);
    let plugin = plugin.with_context(|| format!("there is no plugin {name}"))?;
    Ok(Arc::new(plugin.load()?))
}

/// Where a plugin was looked for, and how to get it.
fn advice(name: &str, report: &Report, sources: Option<&Path>) -> String {
    let mut text = String::from("plugins were looked for in (the first one wins):\n");
    for place in &report.places {
        let outcome = match &place.outcome {
            PlaceOutcome::Searched(0) => "no plugins".to_owned(),
            PlaceOutcome::Searched(count) => format!("{count} other plugins"),
            PlaceOutcome::Absent => "does not exist".to_owned(),
            PlaceOutcome::Failed(reason) => reason.clone(),
        };
        text += &format!("  {} ({}): {outcome}\n", place.path.display(), place.origin.name());
    }
    text += "`dsrun backends --explain` tells what is there\n";
    let folder = report.places.iter().find(|place| place.origin == Origin::Program);
    // `DIR/lib/dsrun/backends.d` is where the program in `DIR/bin` looks.
    let prefix =
        folder.and_then(|place| place.path.ancestors().nth(3)).map_or_else(|| "DIR".to_owned(), quoted);
    match sources.filter(|sources| has_plugin(sources, name)) {
        Some(sources) => {
            text += &format!(
                "hint: this installs it from the sources here:\n  cd {} && cargo xtask install --prefix {prefix}",
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

/// Whether the sources have a plugin of this name.
fn has_plugin(sources: &Path, name: &str) -> bool {
    let plain = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    let folder: PathBuf = sources.join("plugins").join(name);
    plain && folder.join(format!("{name}.dsrun.toml")).is_file()
}

/// A path that a shell takes as one word.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_core::discovery::Place;

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
    fn a_plugin_of_somebody_else_is_no_plugin_of_ours() {
        for name in ["abacus", "../example-c", ""] {
            let text = advice(name, &report(), Some(Path::new(SOURCES)));
            assert!(text.contains("copy the plugin's library") && !text.contains("cd "), "{text}");
        }
    }
}
