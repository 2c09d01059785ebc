//! The configuration that a GGUF file carries: metadata keys that start with the name of the architecture, and what
//! the list of tensors says without them (biases, a separate output matrix, divisors of rotary frequencies).

mod gpt2;
mod llama;

use super::{Architecture, ConfigError, DecoderConfig, Result, fields::is_positive, limits};
use crate::gguf::{FromValue, GgufFile, Value};

pub(crate) use llama::ROPE_DIVISORS;

/// The architectures that are read from GGUF files. (Mistral's files say `llama`; there are none of OPT.)
const ARCHITECTURES: [Architecture; 4] =
    [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3, Architecture::Gpt2];

/// Keys that change nothing.
const NO_EFFECT: &[&str] =
    &["rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"];

/// Counts of things that these models do not have; some converters write them as 0.
const ZERO: &[&str] = &["expert_count", "expert_used_count", "leading_dense_block_count", "pooling_type"];

/// Reads the metadata of a file and looks at the names of its tensors.
pub(super) fn read(file: &GgufFile) -> Result<DecoderConfig> {
    let name: &str = whole_key(file, "general.architecture")?
        .ok_or_else(|| ConfigError::Missing { field: "general.architecture".into() })?;
    let architecture = ARCHITECTURES
        .into_iter()
        .find(|architecture| architecture.name() == name)
        .ok_or_else(|| ConfigError::architecture("general.architecture", name, &ARCHITECTURES))?;
    let keys = Keys { file, architecture };
    match architecture {
        Architecture::Gpt2 => gpt2::read(&keys),
        _ => llama::read(&keys),
    }
}

/// The tokens that end a text and those that end a turn of a conversation.
fn end_tokens(file: &GgufFile) -> Result<Vec<u32>> {
    let mut tokens = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        tokens.extend(whole_key::<u32>(file, key)?.filter(|token| !tokens.contains(token)));
    }
    Ok(tokens)
}

/// The value of a key, if it is there.
fn whole_key<'a, T: FromValue<'a>>(file: &'a GgufFile, key: &str) -> Result<Option<T>> {
    let Some(value) = file.metadata().value(key) else { return Ok(None) };
    let converted = T::from_value(value).ok_or_else(|| ConfigError::value(key, shown(value), T::EXPECTED));
    converted.map(Some)
}

/// A value for messages.
fn shown(value: Value<'_>) -> String {
    match value {
        Value::Unsigned(value) => value.to_string(),
        Value::Signed(value) => value.to_string(),
        Value::F32(value) => value.to_string(),
        Value::F64(value) => value.to_string(),
        Value::Bool(value) => value.to_string(),
        Value::String(text) => format!("{:?}", text.chars().take(80).collect::<String>()),
        Value::Array(array) => format!("an array of {}", array.len()),
    }
}

/// The keys of an architecture.
#[derive(Clone, Copy)]
struct Keys<'a> {
    file: &'a GgufFile,
    architecture: Architecture,
}

impl<'a> Keys<'a> {
    fn path(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name())
    }

    fn get<T: FromValue<'a>>(&self, key: &str) -> Result<Option<T>> {
        whole_key(self.file, &self.path(key))
    }

    fn size(&self, key: &str, most: usize) -> Result<Option<usize>> {
        let size: Option<usize> = self.get(key)?;
        match size {
            Some(size) if size == 0 || size > most => {
                Err(ConfigError::value(self.path(key), size, format!("a whole number from 1 to {most}")))
            }
            size => Ok(size),
        }
    }

    fn required_size(&self, key: &str, most: usize) -> Result<usize> {
        self.size(key, most)?.ok_or_else(|| ConfigError::Missing { field: self.path(key) })
    }

    fn positive(&self, key: &str) -> Result<Option<f32>> {
        let number: Option<f32> = self.get(key)?;
        match number {
            Some(number) if !is_positive(f64::from(number)) => {
                Err(ConfigError::value(self.path(key), number, "a number above 0"))
            }
            number => Ok(number),
        }
    }

    /// Refuses keys of the architecture that are not `read` and not known to change nothing.
    fn refuse_unknown(&self, read: &[&str]) -> Result<()> {
        let prefix = self.path("");
        for (key, value) in self.file.metadata().iter() {
            let Some(rest) = key.strip_prefix(&prefix) else { continue };
            let known = read.contains(&rest) || NO_EFFECT.contains(&rest);
            let zero = ZERO.contains(&rest) && matches!(value, Value::Unsigned(0) | Value::Signed(0));
            if !known && !zero {
                let (field, value) = (key.chars().take(80).collect(), shown(value));
                return Err(ConfigError::Unknown { field, value, architecture: self.architecture.name() });
            }
        }
        Ok(())
    }

    fn has(&self, tensor: &str) -> bool {
        self.file.tensor(tensor).is_some()
    }

    /// The rows of the embedding.
    fn vocabulary(&self) -> Result<usize> {
        if let Some(size) = self.size("vocab_size", limits::VOCABULARY)? {
            return Ok(size);
        }
        let rows = self.file.tensor("token_embd.weight").and_then(|tensor| tensor.shape.first().copied());
        rows.ok_or_else(|| ConfigError::Missing { field: self.path("vocab_size") })
    }

    /// What every norm adds.
    fn eps(&self, key: &str) -> Result<f32> {
        self.positive(key)?.ok_or_else(|| ConfigError::Missing { field: self.path(key) })
    }

    /// The token that begins a text.
    fn bos(&self) -> Result<Option<u32>> {
        whole_key(self.file, "tokenizer.ggml.bos_token_id")
    }
}
