//! The tokenizer that a GGUF file carries.

use super::error::Result;
use super::{FromValue, GgufFile};
use crate::tokenizer::GgufVocabulary;

impl GgufFile {
    /// The vocabulary: what the file has under `tokenizer.ggml`.
    ///
    /// What a kind of tokenizer does not need is empty. Whether the parts fit together is checked when a tokenizer is
    /// made of them.
    ///
    /// # Errors
    /// If the kind of tokenizer or the tokens are missing, or a value has the wrong type.
    pub fn vocabulary(&self) -> Result<GgufVocabulary> {
        let metadata = self.metadata();
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        Ok(GgufVocabulary {
            model: metadata.require(&key("model"))?,
            pre_tokenizer: metadata.get(&key("pre"))?,
            tokens: metadata.require(&key("tokens"))?,
            token_types: self.list(&key("token_type"))?,
            scores: self.list(&key("scores"))?,
            merges: self.list(&key("merges"))?,
            bos: metadata.get(&key("bos_token_id"))?,
            eos: metadata.get(&key("eos_token_id"))?,
            unk: metadata.get(&key("unknown_token_id"))?,
            pad: metadata.get(&key("padding_token_id"))?,
            add_bos: metadata.get(&key("add_bos_token"))?,
            add_eos: metadata.get(&key("add_eos_token"))?,
            add_space_prefix: metadata.get(&key("add_space_prefix"))?,
        })
    }

    /// The chat template, in Jinja, if the file has one.
    ///
    /// # Errors
    /// If it is not a text.
    pub fn chat_template(&self) -> Result<Option<&str>> {
        self.metadata().get("tokenizer.chat_template")
    }

    fn list<'a, T>(&'a self, key: &str) -> Result<Vec<T>>
    where
        Vec<T>: FromValue<'a>,
    {
        Ok(self.metadata().get(key)?.unwrap_or_default())
    }
}
