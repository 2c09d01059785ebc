//! Encoders of the fixtures, with a tokenizer.

use serde_json::{Map, Value, json};
use std::{fs, path::Path};
use tempfile::TempDir;

/// Copies an encoder of the fixtures into a temporary folder, with a tokenizer that has a token for each letter from `a` to `z`.
pub(super) fn encoder(name: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tests/fixtures/encoders").join(name);
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), folder.path().join(file)).expect("the fixture is copied");
    }
    let special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"];
    let letters = ('a'..='z').map(String::from);
    let tokens = special.into_iter().map(str::to_owned).chain(letters);
    let vocabulary: Map<String, Value> = tokens.enumerate().map(|(id, token)| (token, id.into())).collect();
    let token = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let ids = |id: usize| json!({"id": special[id], "ids": [id], "tokens": [special[id]]});
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [token("[CLS]"), text("A"), token("[SEP]")],
            "pair": [token("[CLS]"), text("A"), token("[SEP]"), text("B"), token("[SEP]")],
            "special_tokens": {"[CLS]": ids(1), "[SEP]": ids(2)},
        },
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).expect("the file is written");
    folder
}
