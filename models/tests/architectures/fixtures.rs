//! The fixtures as values. Tests of other crates include this file with `#[path]`.
#![allow(dead_code, reason = "each test uses a part")]

use safetensors::SafeTensors;
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The folder of all fixtures.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures")
}

/// The names of the fixtures in safetensors format, sorted.
pub(crate) fn names() -> Vec<String> {
    folders(&root(), |folder| folder.join("config.json").is_file())
}

/// The names of the fixtures of encoders, with the folder that holds them, sorted.
pub(crate) fn encoder_names() -> Vec<String> {
    let names = folders(&root().join("encoders"), |folder| folder.join("config.json").is_file());
    names.into_iter().map(|name| format!("encoders/{name}")).collect()
}

/// The names of the GGUF fixtures, sorted.
pub(crate) fn gguf_names() -> Vec<String> {
    folders(&root().join("gguf"), |folder| folder.join("model.gguf").is_file())
}

fn folders(root: &Path, is_one: impl Fn(&Path) -> bool) -> Vec<String> {
    let entries = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<String> = entries
        .filter(|path| is_one(path))
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    assert!(!names.is_empty(), "no fixtures in {}", root.display());
    names
}

/// The folder of a fixture.
pub(crate) fn folder(name: &str) -> PathBuf {
    root().join(name)
}

/// The file of a GGUF fixture.
pub(crate) fn gguf(name: &str) -> PathBuf {
    root().join("gguf").join(name).join("model.gguf")
}

/// The safetensors fixture that a GGUF fixture is made of.
pub(crate) fn source(name: &str) -> String {
    let expected = json(&root().join("gguf").join(name).join("expected.json"));
    expected["source"].as_str().unwrap().to_owned()
}

/// The parsed `config.json` of a fixture.
pub(crate) fn config(name: &str) -> Value {
    json(&folder(name).join("config.json"))
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A copy of a fixture with another configuration. The weights are the fixture's own files.
pub(crate) fn with_config(name: &str, config: &Value) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder(name)).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap();
        if file.to_str().unwrap().starts_with("model") {
            fs::copy(&path, copy.path().join(file)).unwrap();
        }
    }
    fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
    copy
}

/// What a changed field does to the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    Changes,
    None,
    Error,
}

/// One field of a fixture's configuration with another value.
#[derive(Clone, Debug)]
pub(crate) struct Flip {
    pub(crate) fixture: String,
    pub(crate) pointer: String,
    pub(crate) value: Value,
    pub(crate) effect: Effect,
    /// Tensors of the file become superfluous.
    pub(crate) leaves_tensors: bool,
    /// Readers disagree on it.
    pub(crate) disputed: bool,
    /// Why it has no effect, or another remark.
    pub(crate) note: String,
}

impl Flip {
    /// The configuration of the fixture with the field changed, or added.
    pub(crate) fn apply(&self) -> Value {
        let mut config = config(&self.fixture);
        let (parent, field) = self.pointer.rsplit_once('/').unwrap();
        let parent = config.pointer_mut(parent).unwrap();
        parent[field] = self.value.clone();
        config
    }
}

/// All changes that `switches.json` lists.
pub(crate) fn flips() -> Vec<Flip> {
    let switches = json(&root().join("switches.json"));
    let of_fixture = |(fixture, flips): (&String, &Value)| -> Vec<Flip> {
        let read = |flip: &Value| Flip {
            fixture: fixture.clone(),
            pointer: flip["pointer"].as_str().unwrap().to_owned(),
            value: flip["value"].clone(),
            effect: match flip["effect"].as_str().unwrap() {
                "changes" => Effect::Changes,
                "none" => Effect::None,
                "error" => Effect::Error,
                other => panic!("unknown effect {other}"),
            },
            leaves_tensors: flip.get("unused_tensors").is_some(),
            disputed: flip.get("disputed").is_some(),
            note: flip.get("note").and_then(Value::as_str).unwrap_or_default().to_owned(),
        };
        flips.as_array().unwrap().iter().map(read).collect()
    };
    switches.as_object().unwrap().iter().flat_map(of_fixture).collect()
}

/// Texts and the tokens that the `tokenizers` library makes of them with a GGUF fixture's vocabulary.
pub(crate) fn tokenized(name: &str) -> Vec<(String, Vec<u32>)> {
    let expected = json(&root().join("gguf").join(name).join("expected.json"));
    let sample = |sample: &Value| {
        let ids = sample["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32);
        (sample["text"].as_str().unwrap().to_owned(), ids.collect())
    };
    expected["tokenizer"].as_array().unwrap().iter().map(sample).collect()
}

/// A prompt with what transformers makes of it.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<u32>,
    /// `[tokens, vocabulary]`.
    pub(crate) logits: Vec<f32>,
    /// A bound on the distance between float32 and float64.
    pub(crate) float32_error_below: f32,
    /// The greedy continuation.
    pub(crate) continuation: Vec<u32>,
    /// By how much each token of it was the best.
    pub(crate) margins: Vec<f32>,
}

/// The expected answers in a fixture's folder.
pub(crate) fn expected(folder: &Path) -> Vec<Sequence> {
    let expected = json(&folder.join("expected.json"));
    let bytes = fs::read(folder.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tokens =
        |value: &Value| value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let sequence = |sequence: &Value| {
        let logits = tensors.tensor(sequence["logits"].as_str().unwrap()).unwrap();
        let values = logits.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        let margins = sequence["continuation"]["margins"].as_array().unwrap();
        Sequence {
            tokens: tokens(&sequence["tokens"]),
            logits: values.collect(),
            float32_error_below: sequence["float32_error_below"].as_f64().unwrap() as f32,
            continuation: tokens(&sequence["continuation"]["tokens"]),
            margins: margins.iter().map(|margin| margin.as_f64().unwrap() as f32).collect(),
        }
    };
    expected["sequences"].as_array().unwrap().iter().map(sequence).collect()
}
