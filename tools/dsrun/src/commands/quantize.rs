//! `dsrun quantize`: a model, rounded by a policy, as a folder that other programs open too.

use super::{print, print_json};
use crate::{
    arguments::Quantize,
    interrupt,
    session::{calibrated, calibration, find_files, open_device},
    terminal::Terminal,
};
use anyhow::{Context, Result, bail};
use dsrun_core::device::Device;
use dsrun_engine::{
    EngineOptions, EnginePlan, Figures, Mixture, Precision, calibration_sequences, check_budget, mixture,
    sensitivity,
};
use dsrun_models::{
    export::{Export, ExportError, Written},
    model::Model,
};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The file beside the weights that says what became of which.
const POLICY_FILE: &str = "dsrun-policy.toml";

/// Tokens of the sequence that shows what rounding a weight does.
const SENSITIVITY_TOKENS: usize = 256;

/// What was written.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    folder: PathBuf,
    bytes: u64,
    /// Size and error of a mixture that was chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    mixture: Option<Figures>,
    weights: Vec<Written>,
    left_out: Vec<String>,
}

pub(crate) fn run(command: &Quantize, terminal: &Terminal) -> Result<()> {
    let output = command.output.as_path();
    if output.symlink_metadata().is_ok() {
        bail!("{} is there already\nhint: choose another name, or remove it", output.display());
    }
    let (parent, name) = place(output)?;
    let hint = "there is nothing to round; name a model that has weights";
    let files = find_files(&command.model, command.offline, hint, terminal)?;
    let model = Model::from_files(&files)?;
    let device = open_device(&command.device)?;
    let mixture = command.budget.map(|bits| choose(&model, &device, bits, terminal)).transpose()?;
    let policy = match (&mixture, &command.policy) {
        (Some(mixture), _) => mixture.policy.clone(),
        (None, policy) => policy.clone().unwrap_or_default(),
    };
    let heading = mixture.as_ref().map(|mixture| heading(&command.model, mixture)).unwrap_or_default();
    let text = format!("{heading}{}", policy.to_toml()?);
    if command.policy_only {
        return write_policy(parent, output, &text);
    }
    // A plan holds the program after the pass that quantises; nothing is loaded. Fused, weights would be concatenated.
    let options = EngineOptions { quantize: Some(policy), fuse: false, ..EngineOptions::default() };
    let options = calibrated(&model, &device, &options, terminal)?;
    let plan = EnginePlan::new(&model, &*device, &options)?;
    let dense = Precision::from(command.dtype).dtype();
    let export = Export { model: &model, files: &files, program: plan.program(), dense };

    interrupt::listen()?;
    let folder = partial_folder(parent, &name)?;
    let policy_file = folder.path().join(POLICY_FILE);
    fs::write(&policy_file, text).with_context(|| policy_file.display().to_string())?;
    // (A bar of nothing would look full until the first rows are there.)
    let bar = terminal.bar("quantising", Some(1));
    let mut bytes = 0;
    let written = export.write(folder.path(), &mut |done, total| {
        bytes = total;
        bar.set_length(total);
        bar.set_position(done);
        if interrupt::happened() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    // On an error the folder is removed as it goes out of scope.
    let (weights, left_out) = match written {
        Err(ExportError::Stopped) => bail!("stopped; nothing was written"),
        other => other?,
    };
    fs::rename(folder.path(), output)
        .with_context(|| format!("cannot give {} its name", output.display()))?;
    // It has another name now: there is nothing left to remove.
    let _ = folder.keep();
    for line in &left_out {
        terminal.note(line);
    }
    let report = Report {
        model: model.name().to_owned(),
        folder: output.to_owned(),
        bytes,
        mixture: mixture.map(|mixture| mixture.figures),
        weights,
        left_out,
    };
    if command.json { print_json(&report) } else { show(&report) }
}

/// Chooses a mixture, and shows what it is worth.
fn choose(model: &Model, device: &Arc<dyn Device>, bits: f64, terminal: &Terminal) -> Result<Mixture> {
    check_budget(model, bits)?;
    let seen = calibration(model, device, terminal)?;
    terminal.note("rounding one weight after the other, to see what that does to the model");
    let sequences = calibration_sequences(model, SENSITIVITY_TOKENS.min(model.config().context))?;
    let tokens = sequences.first().context("the calibration text has no tokens in this vocabulary")?;
    let counted = |heading: &'static str| {
        let bar = terminal.counter(heading);
        let ended = bar.clone();
        let advance = move |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        };
        (advance, ended)
    };
    let (mut advance, bar) = counted("rounding");
    let moved = sensitivity(model, device.clone(), tokens, &mut advance);
    bar.finish_and_clear();
    let (mut advance, bar) = counted("measuring");
    let mixture = mixture(model, &seen, &moved?, bits, &mut advance);
    bar.finish_and_clear();
    let mixture = mixture?;
    terminal.note(&figures(&mixture));
    Ok(mixture)
}

/// A mixture beside the formats that everything could have.
fn figures(mixture: &Mixture) -> String {
    let line = |name: &str, figures: &Figures| {
        let (error, divergence) = (figures.error * 100.0, figures.divergence);
        format!("\n{name:>24} {:>12.3} {error:>9.3} {divergence:>12.4}", figures.bits)
    };
    let mut text = format!("{:>24} bits a weight   error %   divergence", "");
    for (format, of_format) in &mixture.everywhere {
        text.push_str(&line(&format!("{format} everywhere"), of_format));
    }
    text.push_str(&line("mixture", &mixture.figures));
    text
}

/// What a policy that was chosen begins with.
fn heading(model: &str, mixture: &Mixture) -> String {
    let lines = format!("Chosen for {model} on a short text.\n{}", figures(mixture));
    lines.lines().map(|line| format!("# {line}\n").replace("# \n", "#\n")).collect()
}

/// The folder that something is to be written in, and its name there.
fn place(output: &Path) -> Result<(&Path, String)> {
    let name = output.file_name().with_context(|| format!("{} has no name", output.display()))?;
    let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        bail!("{} is no folder to write in", parent.display());
    }
    Ok((parent, name.to_string_lossy().into_owned()))
}

fn write_policy(parent: &Path, output: &Path, text: &str) -> Result<()> {
    let cannot = || format!("cannot write {}", output.display());
    let mut file = tempfile::NamedTempFile::new_in(parent).with_context(cannot)?;
    file.write_all(text.as_bytes()).with_context(cannot)?;
    file.persist_noclobber(output).with_context(cannot)?;
    let hint = "--quantize, `quantize --policy` and `serve` take it";
    print(&format!("wrote {}: {hint}", output.display()))
}

/// A folder beside the one to come, which is removed unless it is kept.
fn partial_folder(parent: &Path, name: &str) -> Result<tempfile::TempDir> {
    let prefix = format!(".{name}.partial-");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As any folder: by default only its maker could read it.
        builder.permissions(fs::Permissions::from_mode(0o755));
    }
    builder.tempdir_in(parent).with_context(|| format!("cannot write in {}", parent.display()))
}

fn show(report: &Report) -> Result<()> {
    // Matrices of a layer stand in one line.
    let mut columns: Vec<&str> = Vec::new();
    let mut layers: BTreeMap<usize, Vec<(&str, &Written)>> = BTreeMap::new();
    let mut others = Vec::new();
    for weight in &report.weights {
        let place = weight.name.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
        match place.and_then(|(layer, part)| Some((layer.parse().ok()?, part))) {
            Some((layer, part)) => {
                if !columns.contains(&part) {
                    columns.push(part);
                }
                layers.entry(layer).or_default().push((part, weight));
            }
            None => others.push(weight),
        }
    }
    let heads: String = columns.iter().map(|column| format!("{column:>8}")).collect();
    print("error of each matrix: root of the squared differences over that of the squares, in percent")?;
    print(&format!("layer{heads}  format"))?;
    for (layer, parts) in &layers {
        let errors: String = columns
            .iter()
            .map(|column| {
                let found = parts.iter().find(|(part, _)| part == column);
                format!("{:>8}", found.map_or_else(String::new, |(_, weight)| percent(weight)))
            })
            .collect();
        let mut formats: Vec<&str> = parts.iter().map(|(_, weight)| &*weight.format).collect();
        formats.sort_unstable();
        formats.dedup();
        print(&format!("{layer:>5}{errors}  {}", formats.join(", ")))?;
    }
    for weight in others {
        print(&format!("{}: {} ({})", weight.name, percent(weight), weight.format))?;
    }
    print(&format!("{} MB in {}", report.bytes / 1_000_000, report.folder.display()))
}

fn percent(weight: &Written) -> String {
    weight.error.map_or_else(|| "kept".to_owned(), |error| format!("{:.3}", error * 100.0))
}
