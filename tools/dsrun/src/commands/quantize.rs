//! `dsrun quantize`: quantises a model by a policy and writes it as a folder that other programs can load.

use super::{print, print_json};
use crate::{
    arguments::Quantize,
    devices::open_device,
    interrupt::{self, Termination},
    session::{calibrated, calibration, find_files},
    terminal::Terminal,
};
use anyhow::{Context, Result, bail};
use dsrun_core::device::Device;
use dsrun_engine::{
    Bytes, EngineOptions, EnginePlan, FormatFigures, MixedPrecision, Precision, calibration_sequences,
    check_budget, mixed_precision, sensitivity,
};
use dsrun_models::{
    export::{Export, ExportError, Written},
    fetch::{ModelFiles, WeightFiles},
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

/// The file beside the weights with the policy they were rounded by.
const POLICY_FILE: &str = "dsrun-policy.toml";

/// Tokens of the sequence that sensitivities are measured on.
const SENSITIVITY_TOKENS: usize = 256;

/// The report of a written model.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    folder: PathBuf,
    bytes: u64,
    /// Bytes of the files that the model came from.
    source_bytes: u64,
    /// Bits of a weight on average, over all weights: those of the embedding and those that stay as they are included.
    bits_per_weight: f64,
    /// Size and error of the formats that were chosen, with `--budget`.
    #[serde(skip_serializing_if = "Option::is_none")]
    mixed_precision: Option<FormatFigures>,
    weights: Vec<Written>,
    left_out: Vec<String>,
}

pub(crate) fn run(command: &Quantize, terminal: &Terminal) -> Result<()> {
    let output = command.output.as_path();
    if output.symlink_metadata().is_ok() {
        bail!("{} exists already\nhint: choose another name, or remove it", output.display());
    }
    let (parent, name) = parent_and_name(output)?;
    let hint = "a preset has no weights to quantise; name a model with weights";
    let files = find_files(&command.model, command.offline, hint, terminal)?;
    let model = Model::from_files(&files)?;
    let device = open_device(&command.device)?;
    let mixed = command.budget.map(|bits| choose_formats(&model, &device, bits, terminal)).transpose()?;
    let policy = match (&mixed, &command.policy) {
        (Some(mixed), _) => mixed.policy.clone(),
        (None, policy) => policy.clone().unwrap_or_default(),
    };
    let heading = mixed.as_ref().map(|mixed| heading(&command.model, mixed)).unwrap_or_default();
    let text = format!("{heading}{}", policy.to_toml()?);
    if command.policy_only {
        return write_policy(parent, output, &text);
    }
    // A plan has the quantised program without loading weights. Fusion is off because it concatenates weights.
    let options = EngineOptions { quantize: Some(policy), fuse: false, ..EngineOptions::default() };
    let options = calibrated(&model, &device, &options, terminal)?;
    let plan = EnginePlan::new(&model, &*device, &options)?;
    let dense = Precision::from(command.dtype).dtype();
    let export = Export { model: &model, files: &files, program: plan.program(), dense };

    interrupt::listen(Termination::Stops)?;
    let folder = partial_folder(parent, &name)?;
    let policy_file = folder.path().join(POLICY_FILE);
    fs::write(&policy_file, text).with_context(|| policy_file.display().to_string())?;
    // A bar of length 0 would look full until the first rows are written.
    let bar = terminal.bar("quantising", Some(1));
    let mut bytes = 0;
    let written = export.write(folder.path(), &mut |done, total| {
        bytes = total;
        bar.set_length(total);
        bar.set_position(done);
        if interrupt::happened() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    // On an error the folder is removed when it goes out of scope.
    let (weights, left_out) = match written {
        Err(ExportError::Stopped) => bail!("stopped; nothing was written"),
        other => other?,
    };
    fs::rename(folder.path(), output)
        .with_context(|| format!("cannot give {} its name", output.display()))?;
    // The folder has been renamed: there is nothing left to remove.
    let _ = folder.keep();
    for line in &left_out {
        terminal.note(line);
    }
    let source_bytes = source_bytes(&files);
    if bytes > source_bytes {
        terminal.note(&larger_than_source(bytes, source_bytes));
    }
    let report = Report {
        model: model.name().to_owned(),
        folder: output.to_owned(),
        bytes,
        source_bytes,
        bits_per_weight: bytes as f64 * 8.0 / elements(&model).max(1) as f64,
        mixed_precision: mixed.map(|mixed| mixed.figures),
        weights,
        left_out,
    };
    if command.json { print_json(&report) } else { show(&report) }
}

/// Bytes of the files with the weights of a model.
fn source_bytes(files: &ModelFiles) -> u64 {
    let paths = match &files.weights {
        WeightFiles::Gguf(paths) | WeightFiles::Safetensors(paths) => paths,
    };
    paths.iter().filter_map(|path| Some(fs::metadata(path).ok()?.len())).sum()
}

/// Weights of a model.
fn elements(model: &Model) -> usize {
    let weights = model.weights();
    let of_tensor = |name: &str| weights.tensor_type(name).ok()?.elements().ok();
    weights.names().into_iter().filter_map(of_tensor).sum()
}

/// The warning that a result is larger than what it was made from.
fn larger_than_source(bytes: u64, source: u64) -> String {
    format!(
        "the result has {}, more than the {} that the model came from: its weights are quantised already, and those that are \
         not rounded again are written as floats\nhint: quantise the original model, in 16 bits or more",
        Bytes(bytes),
        Bytes(source)
    )
}

/// Chooses formats for a budget, and shows their size and error.
fn choose_formats(
    model: &Model,
    device: &Arc<dyn Device>,
    bits: f64,
    terminal: &Terminal,
) -> Result<MixedPrecision> {
    check_budget(model, bits)?;
    let seen = calibration(model, device, terminal)?;
    terminal.note("measuring the sensitivity of the model to rounding each weight");
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
    let divergences = sensitivity(model, device.clone(), tokens, &mut advance);
    bar.finish_and_clear();
    let (mut advance, bar) = counted("measuring");
    let mixed = mixed_precision(model, &seen, &divergences?, bits, &mut advance);
    bar.finish_and_clear();
    let mixed = mixed?;
    terminal.note(&figures(&mixed));
    Ok(mixed)
}

/// A table of mixed precision beside the uniform formats.
fn figures(mixed: &MixedPrecision) -> String {
    let line = |name: &str, figures: &FormatFigures| {
        let (error, divergence) = (figures.error * 100.0, figures.divergence);
        format!("\n{name:>24} {:>12.3} {error:>9.3} {divergence:>12.4}", figures.bits)
    };
    let mut text = format!("{:>24} bits a weight   error %   divergence", "");
    for (format, of_format) in &mixed.uniform {
        text.push_str(&line(&format!("{format} everywhere"), of_format));
    }
    text.push_str(&line("mixed precision", &mixed.figures));
    text
}

/// The comment at the beginning of a policy that was chosen for a budget.
fn heading(model: &str, mixed: &MixedPrecision) -> String {
    let lines = format!("Chosen for {model} on a short text.\n{}", figures(mixed));
    lines.lines().map(|line| format!("# {line}\n").replace("# \n", "#\n")).collect()
}

/// The folder to write in, and the name to write there.
fn parent_and_name(output: &Path) -> Result<(&Path, String)> {
    let name = output.file_name().with_context(|| format!("{} has no name", output.display()))?;
    let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        bail!("{} is not a folder", parent.display());
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

/// A temporary folder beside the output, which is removed unless it is kept.
fn partial_folder(parent: &Path, name: &str) -> Result<tempfile::TempDir> {
    let prefix = format!(".{name}.partial-");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // Like any new folder: by default a temporary one is readable by its owner only.
        builder.permissions(fs::Permissions::from_mode(0o755));
    }
    builder.tempdir_in(parent).with_context(|| format!("cannot write in {}", parent.display()))
}

fn show(report: &Report) -> Result<()> {
    // One line for the matrices of a layer.
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
    print(&format!(
        "{} in {}, {:.2} bits a weight with the embedding and all that is kept; the source has {}",
        Bytes(report.bytes),
        report.folder.display(),
        report.bits_per_weight,
        Bytes(report.source_bytes)
    ))
}

fn percent(weight: &Written) -> String {
    weight.error.map_or_else(|| "kept".to_owned(), |error| format!("{:.3}", error * 100.0))
}
