//! `dsrun pull` and `dsrun models`: manage the models on this machine.

use super::{print, print_json};
use crate::{
    arguments::{Models, ModelsCommand, Pull},
    session::find_files,
    terminal::{FetchBar, Terminal},
};
use anyhow::Result;
use dsrun_engine::Bytes;
use dsrun_models::fetch::{CachedModel, FetchOptions, WeightFiles, list_cached, remove};
use serde_json::json;

/// Fetches a model and prints the path of its weights: the file of a GGUF model or the first of its parts, or the folder of
/// safetensors.
pub(crate) fn pull(command: &Pull, terminal: &Terminal) -> Result<()> {
    let hint = "a preset has no files to fetch; run it with random weights, such as by `dsrun bench latency --weights random`";
    let files = find_files(&command.model, command.offline, hint, terminal)?;
    let path = match &files.weights {
        WeightFiles::Gguf(paths) => paths.first().unwrap_or(&files.directory),
        WeightFiles::Safetensors(_) => &files.directory,
    };
    print(&path.display().to_string())
}

pub(crate) fn run(command: &Models, terminal: &Terminal) -> Result<()> {
    let options = FetchOptions::from_env()?;
    if let Some(ModelsCommand::Remove { name }) = &command.command {
        remove(name, &options, &mut FetchBar::new(terminal))?;
        terminal.note(&format!("removed {name}"));
        return Ok(());
    }
    let models = list_cached(&options)?;
    if command.json {
        return print_json(&models.iter().map(as_json).collect::<Vec<_>>());
    }
    if models.is_empty() {
        terminal.note("no model is cached; dsrun pull fetches one");
        return Ok(());
    }
    let width = models.iter().map(|model| model.name.len()).max().unwrap_or(0);
    for model in models {
        let state = if model.complete { "" } else { ", not complete" };
        let size = Bytes(model.bytes).to_string();
        print(&format!("{:width$}  {size:>10}  {}{state}", model.name, model.source))?;
    }
    Ok(())
}

fn as_json(model: &CachedModel) -> serde_json::Value {
    json!({
        "name": model.name,
        "path": model.path,
        "bytes": model.bytes,
        "files": model.files,
        "source": model.source,
        "complete": model.complete,
    })
}
