//! Latent attention: the sizes of what is cached in place of keys and values.

use super::{ConfigError, DecoderConfig, Result, Rope, fields::Fields, gguf::Keys, limits};
use dsrun_core::op::RopePairing;

/// The sizes of multi-head latent attention.
///
/// Keys and values of all heads are linear functions of one latent. A key has a second part, which is rotated and which all
/// heads share. The cache holds the latent and that part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    /// Features between the two projections of queries; `None` if there is only one.
    pub query_rank: Option<usize>,
    /// Features of the latent.
    pub rank: usize,
    /// Features of a query or key head that are not rotated; even. The head size of the model is their sum with the others.
    pub plain: usize,
    /// Features of a query head that are rotated, and of the part of keys that heads share.
    pub rotated: usize,
    /// Features of a value head.
    pub value: usize,
    /// Added to the mean square in the norms of the latent and of queries between their projections.
    pub eps: f32,
}

impl Latent {
    /// Features of a token in the cache.
    pub const fn cached(&self) -> usize {
        self.rank + self.rotated
    }

    /// Checks the sizes, for a model of this configuration.
    pub(super) fn validate(&self, names: &LatentNames, config: &DecoderConfig) -> Result<()> {
        let sizes = [
            (names.query_rank, self.query_rank.unwrap_or(1), limits::HIDDEN),
            (names.rank, self.rank, limits::HEAD_DIM),
            (names.plain, self.plain, limits::HEAD_DIM),
            (names.rotated, self.rotated, limits::HEAD_DIM),
            (names.value, self.value, limits::HEAD_DIM),
        ];
        for (field, size, most) in sizes {
            if size == 0 || size > most {
                return Err(ConfigError::value(field, size, format!("a whole number from 1 to {most}")));
            }
        }
        for (field, size) in [(names.plain, self.plain), (names.rotated, self.rotated)] {
            if !size.is_multiple_of(2) {
                return Err(ConfigError::value(field, size, "even: elements are rotated in pairs"));
            }
        }
        if config.head_dim != self.plain + self.rotated {
            let expected = format!("{} ({} and {})", self.plain + self.rotated, names.plain, names.rotated);
            return Err(ConfigError::value("the head size", config.head_dim, expected));
        }
        if config.kv_heads != 1 {
            return Err(ConfigError::value("the number of cached heads", config.kv_heads, "1"));
        }
        if !self.eps.is_finite() || self.eps <= 0.0 {
            return Err(ConfigError::value("the eps of the norms of latents", self.eps, "a number above 0"));
        }
        let whole = |layer: &super::LayerAttention| {
            layer.window.is_none() && layer.rope.as_ref().is_some_and(|rope| rope.dimensions == self.rotated)
        };
        match config.attention.iter().all(whole) && !config.sinks {
            true => Ok(()),
            false => {
                let expected = "without windows and sinks, with the rotated part rotated as a whole";
                Err(ConfigError::value("latent attention", "something else", expected))
            }
        }
    }
}

/// The names of the fields of latent attention in one kind of file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LatentNames {
    pub(crate) query_rank: &'static str,
    pub(crate) rank: &'static str,
    pub(crate) plain: &'static str,
    pub(crate) rotated: &'static str,
    pub(crate) value: &'static str,
}

impl LatentNames {
    pub(super) const PLAIN: Self = Self {
        query_rank: "latent.query_rank",
        rank: "latent.rank",
        plain: "latent.plain",
        rotated: "latent.rotated",
        value: "latent.value",
    };

    /// The names in `config.json`.
    pub(crate) const HUGGING_FACE: Self = Self {
        query_rank: "q_lora_rank",
        rank: "kv_lora_rank",
        plain: "qk_nope_head_dim",
        rotated: "qk_rope_head_dim",
        value: "v_head_dim",
    };

    /// The keys of GGUF metadata, without the prefix of the architecture. What is not rotated is the difference of two sizes.
    pub(crate) const GGUF: Self = Self {
        query_rank: "attention.q_lora_rank",
        rank: "attention.kv_lora_rank",
        plain: "attention.key_length_mla",
        rotated: "rope.dimension_count",
        value: "attention.value_length_mla",
    };
}

impl DecoderConfig {
    /// Gives every layer latent attention with this rotary embedding, which rotates neighbours, and multiplies scores by
    /// `factor`.
    pub(crate) fn attend_to_latents(&mut self, latent: Latent, rope: Rope, factor: f64) {
        self.latent = Some(latent);
        self.kv_heads = 1;
        self.head_dim = latent.plain + latent.rotated;
        self.rotate_all(Rope { pairing: RopePairing::Neighbours, ..rope });
        self.scale_scores(self.head_dim as f64 / (factor * factor));
    }
}

/// The eps of the norms of latents, which no field holds.
const EPS: f32 = 1e-6;

/// Reads the sizes of latent attention from `config.json`, with the defaults of DeepSeek.
pub(crate) fn read(fields: &Fields<'_>) -> Result<Latent> {
    let names = LatentNames::HUGGING_FACE;
    let size = |field: &str, most: usize, default: usize| Ok(fields.size(field, 1, most)?.unwrap_or(default));
    let query_rank = fields.size(names.query_rank, 1, limits::HIDDEN)?;
    Ok(Latent {
        query_rank: query_rank.or((!fields.is_null(names.query_rank)).then_some(1536)),
        rank: size(names.rank, limits::HEAD_DIM, 512)?,
        plain: size(names.plain, limits::HEAD_DIM, 128)?,
        rotated: size(names.rotated, limits::HEAD_DIM, 64)?,
        value: size(names.value, limits::HEAD_DIM, 128)?,
        eps: EPS,
    })
}

/// Reads the sizes of latent attention from the metadata of a GGUF file, whose head size has been read.
pub(crate) fn from_gguf(keys: &Keys<'_>, head_dim: usize) -> Result<Latent> {
    let names = LatentNames::GGUF;
    let rotated = keys.required_size(names.rotated, limits::HEAD_DIM)?;
    let plain = head_dim.checked_sub(rotated).filter(|plain| *plain > 0).ok_or_else(|| {
        let expected = format!("below {head_dim} ({})", keys.path(names.plain));
        ConfigError::value(keys.path(names.rotated), rotated, expected)
    })?;
    let latent = Latent {
        query_rank: keys.size(names.query_rank, limits::HIDDEN)?,
        rank: keys.required_size(names.rank, limits::HEAD_DIM)?,
        plain,
        rotated,
        value: keys.required_size(names.value, limits::HEAD_DIM)?,
        eps: EPS,
    };
    // The sizes of the one cached head follow from the others.
    for (key, size) in [("attention.key_length", latent.cached()), ("attention.value_length", latent.rank)] {
        if let Some(found) = keys.size(key, limits::HEAD_DIM)?.filter(|found| *found != size) {
            let reason = format!("it must be {size}, as cached heads hold latents");
            return Err(ConfigError::unsupported(keys.path(key), found, reason));
        }
    }
    Ok(latent)
}
