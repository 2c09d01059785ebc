//! The configuration that a GGUF file carries: metadata keys that start with the name of the architecture, and what
//! the list of tensors says without them (biases, a separate output matrix, divisors of rotary frequencies).
//!
//! Files of architecture `llama` have the rows of the query and key matrices in another order than the Hugging Face
//! originals: the two elements of a rotated pair are neighbours. The rows are used as they lie, and the rotation pairs
//! neighbours, so quantised blocks are read without being touched.

use super::{
    Architecture, Biases, ConfigError, DecoderConfig, FieldNames, Result, Rope, RopeScaling,
    fields::is_positive, limits,
};
use crate::{
    gguf::{FromValue, GgufFile, Value},
    weights::TensorSource,
};
use dsrun_core::op::{Nonlinearity, RopePairing};

/// The architectures that are read from GGUF files. (Mistral's files say `llama`.)
const ARCHITECTURES: [Architecture; 3] = [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3];

/// Keys that are read, without the architecture in front.
const READ: &[&str] = &[
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
];

/// Keys that change nothing.
const NO_EFFECT: &[&str] =
    &["rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"];

/// Counts of things that these models do not have; some converters write them as 0.
const ZERO: &[&str] = &["expert_count", "expert_used_count", "leading_dense_block_count", "pooling_type"];

/// The tensor of divisors of rotary frequencies.
pub(crate) const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// Reads the metadata of a file and looks at the names of its tensors.
pub(super) fn read(file: &GgufFile) -> Result<DecoderConfig> {
    let name: &str = whole_key(file, "general.architecture")?
        .ok_or_else(|| ConfigError::Missing { field: "general.architecture".into() })?;
    let architecture = ARCHITECTURES
        .into_iter()
        .find(|architecture| architecture.name() == name)
        .ok_or_else(|| ConfigError::Architecture {
            field: "general.architecture",
            found: name.chars().take(80).collect(),
        })?;
    let keys = Keys { file, architecture };
    keys.refuse_unknown()?;

    let has = |tensor: &str| file.tensor(tensor).is_some();
    let hidden = keys.required_size("embedding_length", limits::HIDDEN)?;
    let heads = keys.required_size("attention.head_count", limits::HEADS)?;
    let layers = keys.required_size("block_count", limits::LAYERS)?;
    let context = keys.required_size("context_length", limits::CONTEXT)?;
    let head_dim = keys.head_dim(hidden, heads)?;
    let vocabulary = match keys.size("vocab_size", limits::VOCABULARY)? {
        Some(size) => size,
        None => file
            .tensor("token_embd.weight")
            .and_then(|tensor| tensor.shape.first().copied())
            .ok_or_else(|| ConfigError::Missing { field: keys.path("vocab_size") })?,
    };
    keys.no_window(context)?;
    let always = architecture == Architecture::Qwen2;
    let bias = |part: &str| has(&format!("blk.0.{part}.bias"));
    let config = DecoderConfig {
        architecture,
        hidden,
        layers,
        heads,
        kv_heads: keys.size("attention.head_count_kv", limits::HEADS)?.unwrap_or(heads),
        head_dim,
        intermediate: keys.required_size("feed_forward_length", limits::INTERMEDIATE)?,
        vocabulary,
        eps: keys
            .positive("attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| ConfigError::Missing { field: keys.path("attention.layer_norm_rms_epsilon") })?,
        rope: keys.rope(head_dim)?,
        windows: vec![None; layers],
        biases: Biases {
            query: always || bias("attn_q"),
            key: always || bias("attn_k"),
            value: always || bias("attn_v"),
            output: bias("attn_output"),
            gate: bias("ffn_gate"),
            up: bias("ffn_up"),
            down: bias("ffn_down"),
        },
        qk_norm: architecture == Architecture::Qwen3,
        tied: !has("output.weight"),
        activation: Nonlinearity::Silu,
        context,
        bos: whole_key(file, "tokenizer.ggml.bos_token_id")?,
        eos: end_tokens(file)?,
    };
    config.validate_as(&FieldNames::GGUF)?;
    Ok(config)
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

    fn refuse_unknown(&self) -> Result<()> {
        let prefix = self.path("");
        for (key, value) in self.file.metadata().iter() {
            let Some(rest) = key.strip_prefix(&prefix) else { continue };
            let known = READ.contains(&rest) || NO_EFFECT.contains(&rest);
            let zero = ZERO.contains(&rest) && matches!(value, Value::Unsigned(0) | Value::Signed(0));
            if !known && !zero {
                let (field, value) = (key.chars().take(80).collect(), shown(value));
                return Err(ConfigError::Unknown { field, value, architecture: self.architecture.name() });
            }
        }
        Ok(())
    }

    fn head_dim(&self, hidden: usize, heads: usize) -> Result<usize> {
        let head_dim = match self.size("attention.key_length", limits::HEAD_DIM)? {
            Some(head_dim) => head_dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let expected =
                    format!("a divisor of {hidden} (embedding_length), as there is no attention.key_length");
                return Err(ConfigError::value(self.path("attention.head_count"), heads, expected));
            }
        };
        for key in ["attention.value_length", "rope.dimension_count"] {
            if let Some(other) = self.size(key, limits::HEAD_DIM)?.filter(|other| *other != head_dim) {
                let reason = format!("it must be the size of a head, {head_dim}");
                return Err(ConfigError::unsupported(self.path(key), other, reason));
            }
        }
        Ok(head_dim)
    }

    /// The format has a key for the size of a window, but does not say which layers have one.
    fn no_window(&self, context: usize) -> Result<()> {
        match self.get::<usize>("attention.sliding_window")? {
            Some(window) if window != 0 && window < context => {
                let reason =
                    "GGUF files do not say which layers have a window; use the model's safetensors files";
                Err(ConfigError::unsupported(self.path("attention.sliding_window"), window, reason))
            }
            _ => Ok(()),
        }
    }

    fn rope(&self, head_dim: usize) -> Result<Rope> {
        let pairing = if self.architecture == Architecture::Llama {
            RopePairing::Neighbours
        } else {
            RopePairing::Halves
        };
        let theta = self.positive("rope.freq_base")?.map_or(10_000.0, f64::from);
        let factor = match self.positive("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.positive("rope.scale_linear")?,
        };
        let scaling = match (self.get::<&str>("rope.scaling.type")?, factor) {
            (Some("none"), _) | (None, None) => RopeScaling::None,
            (Some("linear") | None, Some(factor)) => RopeScaling::Linear { factor: f64::from(factor) },
            (Some("linear"), None) => {
                return Err(ConfigError::Missing { field: self.path("rope.scaling.factor") });
            }
            (Some(other), _) => {
                let (kind, reason) =
                    (shown(Value::String(other)), "rotary embeddings can be scaled as none or linear");
                return Err(ConfigError::unsupported(self.path("rope.scaling.type"), kind, reason));
            }
        };
        let scaling = match (self.divisors(head_dim)?, scaling) {
            (None, scaling) => scaling,
            (Some(divisors), RopeScaling::None) => RopeScaling::Divisors(divisors),
            (Some(_), _) => {
                return Err(ConfigError::Contradiction {
                    first: self.path("rope.scaling.type"),
                    second: format!("the tensor {ROPE_DIVISORS}"),
                });
            }
        };
        Ok(Rope { theta, scaling, pairing })
    }

    /// The divisors of the rotary frequencies, one for each pair of a head.
    fn divisors(&self, head_dim: usize) -> Result<Option<Vec<f32>>> {
        let Some(tensor) = self.file.tensor(ROPE_DIVISORS) else { return Ok(None) };
        if tensor.shape != [head_dim / 2] {
            let expected = format!("of shape [{}], half of a head", head_dim / 2);
            return Err(ConfigError::value(ROPE_DIVISORS, format!("of shape {:?}", tensor.shape), expected));
        }
        let unreadable = |error: dsrun_core::Error| ConfigError::value(ROPE_DIVISORS, error, "readable");
        let weight_type = self.file.tensor_type(ROPE_DIVISORS).map_err(unreadable)?;
        let mut divisors = vec![0.0; head_dim / 2];
        let row = self.file.rows(ROPE_DIVISORS, 0, 1).map_err(unreadable)?;
        weight_type.format.decode_row(&row, &mut divisors).map_err(unreadable)?;
        Ok(Some(divisors))
    }
}
