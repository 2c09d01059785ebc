//! The files of the tokenizer, taken along or made from those of a GGUF file.

use super::{Export, Result, config::write_json, io_error};
use crate::{gguf::GgufFile, tokenizer::GgufVocabulary};
use serde_json::{Value, json};
use std::path::Path;

/// What belongs to tokenizer and sampling, where it is there.
const FILES: &[&str] = &[
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// Writes the files; gives what could not be written, in words.
pub(super) fn write(export: &Export<'_>, folder: &Path) -> Result<Vec<String>> {
    let Some(path) = export.gguf_path() else {
        for name in FILES {
            let from = export.files.directory.join(name);
            if from.is_file() {
                std::fs::copy(&from, folder.join(name)).map_err(io_error(&from))?;
            }
        }
        return Ok(Vec::new());
    };
    let file = GgufFile::open(path).map_err(crate::model::ModelError::from)?;
    if !export.model.eos().is_empty() {
        let defaults = json!({"bos_token_id": export.model.config().bos, "eos_token_id": export.model.eos()});
        write_json(&folder.join("generation_config.json"), &defaults)?;
    }
    let vocabulary = file.vocabulary().map_err(crate::model::ModelError::from)?;
    let template = file.chat_template().map_err(crate::model::ModelError::from)?;
    let Some(tokenizer) = vocabulary.to_json() else {
        let kind = &vocabulary.model;
        return Ok(vec![format!(
            "tokenizer.json is not written: a vocabulary of kind \"{kind}\" cannot be turned into one; copy the files of the \
             original model"
        )]);
    };
    write_json(&folder.join("tokenizer.json"), &tokenizer)?;
    write_json(
        &folder.join("tokenizer_config.json"),
        &settings(&vocabulary, template, export.model.config().context),
    )?;
    Ok(Vec::new())
}

/// `tokenizer_config.json`.
fn settings(vocabulary: &GgufVocabulary, template: Option<&str>, context: usize) -> Value {
    let text = |id: Option<u32>| id.and_then(|id| vocabulary.tokens.get(id as usize));
    let mut settings = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": false,
    });
    for (field, id) in
        [("bos_token", vocabulary.bos), ("eos_token", vocabulary.eos), ("pad_token", vocabulary.pad)]
    {
        if let Some(text) = text(id) {
            settings[field] = text.as_str().into();
        }
    }
    if let Some(template) = template {
        settings["chat_template"] = template.into();
    }
    settings
}
