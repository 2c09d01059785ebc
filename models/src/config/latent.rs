//! Multi-head latent attention: the sizes of the cached latent.

use super::error::ConfigError;

/// The largest accepted size of a part of a head, or between the two query projections.
const MOST: usize = 1 << 20;

/// The sizes of multi-head latent attention.
///
/// Keys and values of all heads are linear functions of one latent. A key has a second, rotated part that all heads share.
/// The KV cache holds the latent and the rotated part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    /// Features between the two projections of queries; `None` if there is only one.
    pub query_rank: Option<usize>,
    /// Features of the latent.
    pub rank: usize,
    /// Features of a query or key head that are not rotated; even. The head size is `plain + rotated`.
    pub plain: usize,
    /// Rotated features of a query head, and of the shared part of keys.
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

    /// Checks everything that building a program relies on, for heads of this size.
    pub(super) fn validate(&self, names: &LatentNames, head_dim: usize) -> Result<(), ConfigError> {
        let sizes = [
            (names.query_rank, self.query_rank.unwrap_or(1)),
            (names.rank, self.rank),
            (names.plain, self.plain),
            (names.rotated, self.rotated),
            (names.value, self.value),
        ];
        for (field, size) in sizes {
            if size == 0 || size > MOST {
                return Err(ConfigError::value(field, size, format!("a whole number from 1 to {MOST}")));
            }
        }
        for (field, size) in [(names.plain, self.plain), (names.rotated, self.rotated)] {
            if !size.is_multiple_of(2) {
                return Err(ConfigError::value(field, size, "even: elements are rotated in pairs"));
            }
        }
        if head_dim != self.plain + self.rotated {
            let expected = format!("{} ({} and {})", self.plain + self.rotated, names.plain, names.rotated);
            return Err(ConfigError::value("the head size", head_dim, expected));
        }
        if !self.eps.is_finite() || self.eps <= 0.0 {
            return Err(ConfigError::value("the eps of the norms of latents", self.eps, "a number above 0"));
        }
        Ok(())
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
