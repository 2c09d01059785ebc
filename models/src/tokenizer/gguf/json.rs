//! The vocabulary of a GGUF file as a `tokenizer.json` file.

use super::{GgufVocabulary, TOKEN_TYPE_CONTROL, TOKEN_TYPE_UNKNOWN, TOKEN_TYPE_USER_DEFINED};
use crate::tokenizer::pre_tokenizer::PreTokenizer;
use serde_json::{Map, Value, json};

impl GgufVocabulary {
    /// A `tokenizer.json` that gives the same tokens; `None` if this is no byte-level vocabulary with merges, of a known split.
    pub(crate) fn to_json(&self) -> Option<Value> {
        if self.model != "gpt2" {
            return None;
        }
        let split = PreTokenizer::by_name(self.pre_tokenizer.as_deref().unwrap_or("default")).ok()?;
        let added = (0..).zip(&self.tokens).filter_map(|(id, content): (u32, &String)| {
            let special = match self.token_types.get(id as usize).copied()? {
                TOKEN_TYPE_CONTROL | TOKEN_TYPE_UNKNOWN => true,
                TOKEN_TYPE_USER_DEFINED => false,
                _ => return None,
            };
            Some(json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special,
            }))
        });
        let words: Map<String, Value> =
            (0u32..).zip(&self.tokens).map(|(id, token)| (token.clone(), id.into())).collect();
        let splits = split.patterns.iter().map(|pattern| {
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
        });
        let bytes =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let splits: Vec<Value> = splits.chain([bytes.clone()]).collect();
        Some(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": null,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
            "post_processor": self.around(split.adds_bos),
            "decoder": bytes,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": split.whole_words, "vocab": words, "merges": self.merges,
            },
        }))
    }

    /// The step that puts special tokens around a text.
    fn around(&self, adds_bos: bool) -> Value {
        let text = |wanted: bool, id: Option<u32>| {
            let id = id.filter(|_| wanted)?;
            Some((id, self.tokens.get(id as usize)?))
        };
        let before = text(self.add_bos.unwrap_or(adds_bos), self.bos);
        let behind = text(self.add_eos.unwrap_or(false), self.eos);
        if before.is_none() && behind.is_none() {
            return Value::Null;
        }
        let special = |(_, text): (u32, &String)| json!({"SpecialToken": {"id": text, "type_id": 0}});
        let sequence = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
        let tokens = before
            .into_iter()
            .chain(behind)
            .map(|(id, text)| (text.clone(), json!({"id": text, "ids": [id], "tokens": [text]})));
        let single = before.map(special).into_iter().chain([sequence("A")]).chain(behind.map(special));
        let single: Vec<Value> = single.collect();
        let pair: Vec<Value> = single.iter().cloned().chain([sequence("B")]).collect();
        json!({
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": tokens.collect::<Map<_, _>>(),
        })
    }
}
