//! Shared readers for the configuration in GGUF metadata.
//!
//! Metadata keys start with the name of the architecture. Some facts are not in the metadata but follow from the list of
//! tensors: biases, a separate output matrix, divisors of rotary frequencies.

use super::{
    Biases, ConfigError, DecoderConfig, FieldNames, LayerAttention, Norm, Result, Rope, RopeScaling,
    fields::is_positive,
    hugging_face::score_scale,
    limits,
    rope::{BETA_FAST, BETA_SLOW, yarn_attention_factor},
};
use crate::{
    gguf::{FromValue, GgufFile, Value},
    weights::TensorSource,
};
use dsrun_core::op::{Nonlinearity, RopePairing};
use std::{cell::RefCell, collections::HashSet};

/// How hidden states are pooled into the vector of a text.
pub(crate) const POOLING: &str = "pooling_type";

/// Keys that have no effect on the program. [`crate::sentence_transformers::TextEmbedding`] reads [`POOLING`].
const NO_EFFECT: &[&str] = &["rope.scaling.finetuned", "tensor_data_layout", POOLING];

/// Counts of parts that these models do not have; some converters write them as 0.
const ZERO: &[&str] = &["expert_count", "expert_used_count", "leading_dense_block_count"];

/// The tensor of divisors of rotary frequencies.
const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// The tensors of LongRoPE's divisors, for short and for long contexts.
const LONG_ROPE_DIVISORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

/// The keys of YaRN's attention factor. llama.cpp's converter writes that of OLMo 3 under both, or under the second alone.
pub(crate) const YARN_ATTENTION: [&str; 2] = ["rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"];

/// The tensors that are part of the configuration and not weights.
pub(crate) const CONFIG_TENSORS: &[&str] = &[ROPE_DIVISORS, LONG_ROPE_DIVISORS[0], LONG_ROPE_DIVISORS[1]];

/// The value of a key, if it is there.
pub(crate) fn whole_key<'a, T: FromValue<'a>>(file: &'a GgufFile, key: &str) -> Result<Option<T>> {
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

/// The keys of an architecture, with a record of those that were read.
pub(crate) struct Keys<'a> {
    file: &'a GgufFile,
    /// The value of `general.architecture`.
    name: &'static str,
    read: RefCell<HashSet<String>>,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(file: &'a GgufFile, name: &'static str) -> Self {
        Self { file, name, read: RefCell::default() }
    }

    pub(crate) fn path(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }

    pub(crate) fn get<T: FromValue<'a>>(&self, key: &str) -> Result<Option<T>> {
        self.read.borrow_mut().insert(key.to_owned());
        whole_key(self.file, &self.path(key))
    }

    pub(crate) fn size(&self, key: &str, most: usize) -> Result<Option<usize>> {
        let size: Option<usize> = self.get(key)?;
        match size {
            Some(size) if size == 0 || size > most => {
                Err(ConfigError::value(self.path(key), size, format!("a whole number from 1 to {most}")))
            }
            size => Ok(size),
        }
    }

    pub(crate) fn required_size(&self, key: &str, most: usize) -> Result<usize> {
        self.size(key, most)?.ok_or_else(|| ConfigError::Missing { field: self.path(key) })
    }

    pub(crate) fn positive(&self, key: &str) -> Result<Option<f32>> {
        let number: Option<f32> = self.get(key)?;
        match number {
            Some(number) if !is_positive(f64::from(number)) => {
                Err(ConfigError::value(self.path(key), number, "a number above 0"))
            }
            number => Ok(number),
        }
    }

    /// Returns an error for a key that no reader has read, unless it is known not to change the result.
    pub(crate) fn refuse_unread(&self) -> Result<()> {
        let (prefix, read) = (self.path(""), self.read.borrow());
        for (key, value) in self.file.metadata().iter() {
            let Some(rest) = key.strip_prefix(&prefix) else { continue };
            let known = read.contains(rest) || NO_EFFECT.contains(&rest);
            let zero = ZERO.contains(&rest) && matches!(value, Value::Unsigned(0) | Value::Signed(0));
            if !known && !zero {
                let (field, value) = (key.chars().take(80).collect(), shown(value));
                return Err(ConfigError::Unknown { field, value, architecture: self.name });
            }
        }
        Ok(())
    }

    pub(crate) fn has(&self, tensor: &str) -> bool {
        self.file.tensor(tensor).is_some()
    }

    /// Reads the number of rows of the embedding.
    fn vocabulary(&self) -> Result<usize> {
        if let Some(size) = self.size(FieldNames::GGUF.vocabulary, limits::VOCABULARY)? {
            return Ok(size);
        }
        let rows = self.file.tensor("token_embd.weight").and_then(|tensor| tensor.shape.first().copied());
        rows.ok_or_else(|| ConfigError::Missing { field: self.path("vocab_size") })
    }

    /// Reads a tensor of divisors of rotary frequencies, one for each rotated pair.
    fn divisors(&self, tensor: &str, pairs: usize) -> Result<Option<Vec<f32>>> {
        let Some(found) = self.file.tensor(tensor) else { return Ok(None) };
        if found.shape != [pairs] {
            let expected = format!("of shape [{pairs}], one for each rotated pair of a head");
            return Err(ConfigError::value(tensor, format!("of shape {:?}", found.shape), expected));
        }
        let unreadable = |error: dsrun_core::Error| ConfigError::value(tensor, error, "readable");
        let weight_type = self.file.tensor_type(tensor).map_err(unreadable)?;
        let mut divisors = vec![0.0; pairs];
        let row = self.file.rows(tensor, 0, 1).map_err(unreadable)?;
        weight_type.format.decode_row(&row, &mut divisors).map_err(unreadable)?;
        Ok(Some(divisors))
    }

    /// Reads the tokens that end a text or a turn of a conversation.
    fn end_tokens(&self) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
            tokens.extend(whole_key::<u32>(self.file, key)?.filter(|token| !tokens.contains(token)));
        }
        Ok(tokens)
    }
}

/// Reads the keys that all families have.
///
/// The other settings get basic values, for the family to change: RMS norms, full attention without rotary
/// embedding. Projections have the biases that are among the tensors of the first layer.
pub(crate) fn decoder(
    keys: &Keys<'_>,
    architecture: &'static str,
    names: &FieldNames,
    activation: Nonlinearity,
) -> Result<DecoderConfig> {
    let hidden = keys.required_size(names.hidden, limits::HIDDEN)?;
    let heads = keys.required_size(names.heads, limits::HEADS)?;
    let layers = keys.required_size(names.layers, limits::LAYERS)?;
    let head_dim = head_dim(keys, names, hidden, heads)?;
    let eps = names.eps.unwrap_or_default();
    let bias = |part: &str| keys.has(&format!("blk.0.{part}.bias"));
    let attention = LayerAttention::full(score_scale(head_dim as f64));
    Ok(DecoderConfig {
        architecture,
        hidden,
        layers,
        unread_layers: 0,
        heads,
        kv_heads: keys.size(names.kv_heads, limits::HEADS)?.unwrap_or(heads),
        head_dim,
        intermediate: keys.required_size(names.intermediate, limits::INTERMEDIATE)?,
        vocabulary: keys.vocabulary()?,
        embedding: hidden,
        norm: Norm::Rms { weight_offset: 0.0 },
        eps: keys.positive(eps)?.ok_or_else(|| ConfigError::Missing { field: keys.path(eps) })?,
        norm_after: false,
        parallel: false,
        final_norm: true,
        attention: vec![attention; layers],
        latent: None,
        head_norms: false,
        sinks: false,
        biases: Biases {
            query: bias("attn_q"),
            key: bias("attn_k"),
            value: bias("attn_v"),
            output: bias("attn_output"),
            gate: bias("ffn_gate"),
            up: bias("ffn_up"),
            down: bias("ffn_down"),
            head: keys.has("output.bias"),
        },
        encoder: None,
        mixture: None,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        score_cap: 0.0,
        logit_cap: 0.0,
        tied: !keys.has("output.weight"),
        activation,
        context: keys.required_size(names.context, limits::CONTEXT)?,
        bos: whole_key(keys.file, "tokenizer.ggml.bos_token_id")?,
        eos: keys.end_tokens()?,
    })
}

fn head_dim(keys: &Keys<'_>, names: &FieldNames, hidden: usize, heads: usize) -> Result<usize> {
    const KEY: &str = "attention.key_length";
    let key = names.head_dim.unwrap_or(KEY);
    if key != KEY {
        return keys.required_size(key, limits::HEAD_DIM);
    }
    let head_dim = match keys.size(KEY, limits::HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let expected =
                format!("a divisor of {hidden} (embedding_length), as there is no attention.key_length");
            return Err(ConfigError::value(keys.path("attention.head_count"), heads, expected));
        }
    };
    match keys.size("attention.value_length", limits::HEAD_DIM)? {
        Some(other) if other != head_dim => {
            let reason = format!("it must be the size of a head, {head_dim}");
            Err(ConfigError::unsupported(keys.path("attention.value_length"), other, reason))
        }
        _ => Ok(head_dim),
    }
}

/// Reads the length of the sliding window; `None` if the model has none.
pub(crate) fn sliding_window(keys: &Keys<'_>) -> Result<Option<u32>> {
    Ok(keys.get::<u32>(FieldNames::GGUF.window)?.filter(|window| *window != 0))
}

/// Returns an error if the file has a sliding window without saying which layers have it.
pub(crate) fn no_window(keys: &Keys<'_>, context: usize) -> Result<()> {
    match sliding_window(keys)? {
        Some(window) if (window as usize) < context => {
            let reason =
                "GGUF files do not say which layers have a window; use the model's safetensors files";
            Err(ConfigError::unsupported(keys.path(FieldNames::GGUF.window), window, reason))
        }
        _ => Ok(()),
    }
}

/// Reads the sliding window of each layer.
///
/// The file lists the layers that have it, or says that all but every n-th have it; `period` is the default of n.
pub(crate) fn windows(keys: &Keys<'_>, layers: usize, period: u32) -> Result<Vec<Option<u32>>> {
    const KEY: &str = "attention.sliding_window_pattern";
    let window = sliding_window(keys)?;
    let sliding: Vec<bool> = match keys.file.metadata().value(&keys.path(KEY)) {
        Some(Value::Array(_)) => keys.get(KEY)?.unwrap_or_default(),
        _ => {
            let period = keys.get::<u32>(KEY)?.unwrap_or(period) as usize;
            // With a period of 0, every layer has the window.
            (1..=layers).map(|layer| period == 0 || !layer.is_multiple_of(period)).collect()
        }
    };
    if sliding.len() != layers {
        let expected = format!("one truth value for each of {layers} layers");
        return Err(ConfigError::value(keys.path(KEY), format!("{} long", sliding.len()), expected));
    }
    Ok(sliding.into_iter().map(|sliding| window.filter(|_| sliding)).collect())
}

/// Reads the rotary embedding; `partial` says whether the family may rotate a part of each head.
pub(crate) fn rope(
    keys: &Keys<'_>,
    config: &DecoderConfig,
    pairing: RopePairing,
    partial: bool,
) -> Result<Rope> {
    let head_dim = config.head_dim;
    let dimensions = keys.size("rope.dimension_count", limits::HEAD_DIM)?.unwrap_or(head_dim);
    if dimensions != head_dim && !partial {
        let reason = format!("it must be the size of a head, {head_dim}");
        return Err(ConfigError::unsupported(keys.path("rope.dimension_count"), dimensions, reason));
    }
    let theta = keys.positive("rope.freq_base")?.map_or(10_000.0, f64::from);
    let factor = match (keys.positive("rope.scaling.factor")?, keys.positive("rope.scale_linear")?) {
        (None, factor) | (factor, _) => factor.map(f64::from),
    };
    let missing = |key: &str| ConfigError::Missing { field: keys.path(key) };
    let kind = keys.get::<&str>("rope.scaling.type")?;
    let original_context = keys.size("rope.scaling.original_context_length", limits::CONTEXT)?;
    let original_context = original_context.unwrap_or(config.context);
    let mut scale = 1.0;
    let scaling = match (kind, factor) {
        // The divisors of LongRoPE are tensors.
        (Some("none" | "longrope"), _) | (None, None) => RopeScaling::None,
        (Some("linear") | None, Some(factor)) => RopeScaling::Linear { factor },
        (Some("yarn"), Some(factor)) => {
            let number = |key: &str| keys.positive(key).map(|number| number.map(f64::from));
            let attention = match (number(YARN_ATTENTION[0])?, number(YARN_ATTENTION[1])?) {
                (Some(one), Some(other)) if one != other => {
                    let [first, second] = YARN_ATTENTION.map(|key| keys.path(key));
                    return Err(ConfigError::Contradiction { first, second });
                }
                (one, other) => one.or(other),
            };
            scale = attention.unwrap_or_else(|| yarn_attention_factor(factor)) as f32;
            RopeScaling::Yarn {
                factor,
                beta_fast: number("rope.scaling.yarn_beta_fast")?.unwrap_or(BETA_FAST),
                beta_slow: number("rope.scaling.yarn_beta_slow")?.unwrap_or(BETA_SLOW),
                truncate: true,
                original_context,
            }
        }
        (Some("linear" | "yarn"), None) => return Err(missing("rope.scaling.factor")),
        (Some(other), _) => {
            let kind = shown(Value::String(other));
            let reason = "rotary embeddings can be scaled as none, linear, yarn or longrope";
            return Err(ConfigError::unsupported(keys.path("rope.scaling.type"), kind, reason));
        }
    };
    let pairs = dimensions / 2;
    let [short, long] = LONG_ROPE_DIVISORS.map(|tensor| keys.divisors(tensor, pairs));
    let of_tensors = match (keys.divisors(ROPE_DIVISORS, pairs)?, short?, long?) {
        (None, None, None) if kind == Some("longrope") => return Err(missing(LONG_ROPE_DIVISORS[1])),
        (None, None, None) => return Ok(Rope { theta, dimensions, scaling, pairing, scale }),
        (Some(divisors), None, None) => RopeScaling::Divisors(divisors),
        (None, Some(short), Some(long)) => {
            scale = keys.positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
            RopeScaling::Long { short, long, original_context }
        }
        (None, _, _) => {
            let [first, second] = LONG_ROPE_DIVISORS.map(|tensor| format!("the tensor {tensor}"));
            return Err(ConfigError::Contradiction { first, second: format!("a file without {second}") });
        }
        (Some(_), _, _) => {
            let [first, second] =
                [ROPE_DIVISORS, LONG_ROPE_DIVISORS[1]].map(|name| format!("the tensor {name}"));
            return Err(ConfigError::Contradiction { first, second });
        }
    };
    if scaling != RopeScaling::None {
        return Err(ConfigError::Contradiction {
            first: keys.path("rope.scaling.type"),
            second: "the tensors of divisors of rotary frequencies".to_owned(),
        });
    }
    Ok(Rope { theta, dimensions, scaling: of_tensors, pairing, scale })
}
