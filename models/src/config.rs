//! What a decoder is: sizes and switches, read from `config.json` or from the metadata of a GGUF file.
//!
//! [`DecoderConfig`] says everything in one way, whatever the file calls it and whatever it leaves out, so programs are
//! built from it without asking where it came from.
//!
//! A configuration that is followed in part gives a model that talks, only worse, and nobody notices. So the readers take
//! no field for granted: one that would change the result and is not understood is an error that names it. Fields that
//! are known to change nothing stand in a list; a field that stands nowhere is refused as well, with a hint. A field of
//! value `null` counts as left out.

mod error;
mod fields;
mod gguf;
mod hugging_face;
mod quantisation;
mod rope;

use dsrun_core::op::Nonlinearity;

pub use error::ConfigError;
pub(crate) use gguf::ROPE_DIVISORS;
pub use quantisation::{Gptq, Quantisation, Scheme};
pub use rope::{Rope, RopeScaling};

/// The result of reading a configuration.
pub type Result<T, E = ConfigError> = std::result::Result<T, E>;

/// The model families that are understood.
///
/// They share one forward pass; what differs is which of its switches a family has, and what a field means that a file
/// leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 1 to 3.x, SmolLM2, and everything published in its form.
    Llama,
    /// Mistral 7B: Llama with a sliding window in every layer.
    Mistral,
    /// Qwen 2 and 2.5: Llama with biases on queries, keys and values, and windows in some layers.
    Qwen2,
    /// Qwen 3 (dense): norms on queries and keys, and windows in some layers.
    Qwen3,
    /// GPT-2: layer norms, biases everywhere, learned positions.
    Gpt2,
    /// OPT: as GPT-2; the 350m model has its norms behind attention and MLP, and a smaller embedding.
    Opt,
}

impl Architecture {
    /// Every architecture.
    pub const ALL: [Self; 6] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3, Self::Gpt2, Self::Opt];

    /// The name that files use (`model_type`, `general.architecture`).
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gpt2 => "gpt2",
            Self::Opt => "opt",
        }
    }

    /// The architecture of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|architecture| architecture.name() == name)
    }
}

/// How the features of a row are normed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// By their root mean square, times a factor each.
    Rms,
    /// By mean and variance.
    Layer {
        /// Whether a factor and a bias for each feature follow.
        affine: bool,
    },
}

/// What scores of queries and keys are divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreDivisors {
    /// The square root of the head size.
    pub head_dim: bool,
    /// The number of the layer, counted from 1.
    pub layer: bool,
}

/// Which projections of a layer have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// The query projection.
    pub query: bool,
    /// The key projection.
    pub key: bool,
    /// The value projection.
    pub value: bool,
    /// The projection behind attention.
    pub output: bool,
    /// The gate of the MLP.
    pub gate: bool,
    /// The other half of the gated MLP, or the first projection of one without a gate.
    pub up: bool,
    /// The projection back to the hidden size.
    pub down: bool,
}

impl Biases {
    /// Every projection has one.
    pub const ALL: Self =
        Self { query: true, key: true, value: true, output: true, gate: true, up: true, down: true };
}

/// A decoder, all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// The family.
    pub architecture: Architecture,
    /// Features of a token between the layers.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Features of a head; even if they are rotated. `heads * head_dim` need not be `hidden`.
    pub head_dim: usize,
    /// Features between the two halves of an MLP.
    pub intermediate: usize,
    /// Whether the MLP's activation is gated.
    pub gated: bool,
    /// Rows of the embedding. Tokenizers may have fewer tokens.
    pub vocabulary: usize,
    /// Features of the embedding. Where they are not `hidden`, a projection follows the embedding and one precedes the head.
    pub embedding: usize,
    /// The kind of every norm.
    pub norm: Norm,
    /// Added to the mean square, or the variance, in every norm.
    pub eps: f32,
    /// Whether a norm stands behind the sum with the residual, rather than in front of attention and MLP.
    pub norm_after: bool,
    /// Whether a norm follows the last layer.
    pub final_norm: bool,
    /// The rotary embedding. Without one, a learned vector for each of `context` positions is added to the embedding.
    pub rope: Option<Rope>,
    /// What the scores of queries and keys are divided by.
    pub score_divisors: ScoreDivisors,
    /// For each layer, how many keys a query sees, its own included; `None` for all before it.
    pub windows: Vec<Option<u32>>,
    /// Which projections have a bias.
    pub biases: Biases,
    /// Whether every query and key head is normed before it is rotated.
    pub qk_norm: bool,
    /// Whether the embedding also turns hidden states into logits.
    pub tied: bool,
    /// The function in the MLP.
    pub activation: Nonlinearity,
    /// How many tokens the model was made for, prompt and answer together.
    pub context: usize,
    /// The token that begins a sequence, where the file says.
    pub bos: Option<u32>,
    /// The tokens that end a sequence, where the file says.
    pub eos: Vec<u32>,
}

/// The largest values taken seriously. They are far above any model, and low enough that no product of two overflows and
/// that nothing is allocated out of proportion to a file.
pub(crate) mod limits {
    pub(crate) const HIDDEN: usize = 1 << 20;
    pub(crate) const LAYERS: usize = 1 << 12;
    pub(crate) const HEADS: usize = 1 << 14;
    pub(crate) const HEAD_DIM: usize = 1 << 13;
    pub(crate) const INTERMEDIATE: usize = 1 << 23;
    pub(crate) const VOCABULARY: usize = 1 << 24;
    pub(crate) const CONTEXT: usize = i32::MAX as usize;
}

impl DecoderConfig {
    /// Reads the content of a `config.json` file.
    ///
    /// # Errors
    /// Names the field that is missing, out of range, contradicts another, or is not understood.
    pub fn from_json_bytes(bytes: &[u8]) -> Result<Self> {
        hugging_face::read(bytes)
    }

    /// Reads the metadata of a GGUF file and looks at the names of its tensors.
    ///
    /// # Errors
    /// As [`Self::from_json_bytes`].
    pub fn from_gguf(file: &crate::gguf::GgufFile) -> Result<Self> {
        gguf::read(file)
    }

    /// Checks everything that building a program relies on.
    ///
    /// # Errors
    /// Names the field. The readers call this; it is for configurations made by hand.
    pub fn validate(&self) -> Result<()> {
        self.validate_as(&FieldNames::PLAIN)
    }

    fn validate_as(&self, names: &FieldNames) -> Result<()> {
        let sizes = [
            (names.hidden, self.hidden, limits::HIDDEN),
            (names.layers, self.layers, limits::LAYERS),
            (names.heads, self.heads, limits::HEADS),
            (names.kv_heads, self.kv_heads, limits::HEADS),
            (names.head_dim, self.head_dim, limits::HEAD_DIM),
            (names.intermediate, self.intermediate, limits::INTERMEDIATE),
            (names.vocabulary, self.vocabulary, limits::VOCABULARY),
            (names.embedding, self.embedding, limits::HIDDEN),
            (names.context, self.context, limits::CONTEXT),
        ];
        for (field, size, most) in sizes {
            if size == 0 || size > most {
                return Err(ConfigError::value(field, size, format!("a whole number from 1 to {most}")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a divisor of {} ({})", self.heads, names.heads);
            return Err(ConfigError::value(names.kv_heads, self.kv_heads, expected));
        }
        if self.rope.is_some() && !self.head_dim.is_multiple_of(2) {
            return Err(ConfigError::value(
                names.head_dim,
                self.head_dim,
                "even: its elements are rotated in pairs",
            ));
        }
        if !self.eps.is_finite() || self.eps <= 0.0 {
            return Err(ConfigError::value(names.eps, self.eps, "a number above 0"));
        }
        if self.windows.len() != self.layers {
            let expected = format!("one for each of {} layers", self.layers);
            return Err(ConfigError::value(names.windows, format!("{} long", self.windows.len()), expected));
        }
        let too_long = |window: &u32| *window == 0 || *window as usize > limits::CONTEXT;
        if let Some(window) = self.windows.iter().flatten().find(|window| too_long(window)) {
            return Err(ConfigError::value(names.windows, window, format!("from 1 to {}", limits::CONTEXT)));
        }
        self.rope.as_ref().map_or(Ok(()), |rope| rope.validate(self.head_dim))
    }

    /// What scores are multiplied by in a layer, counted from 0.
    pub fn score_scale(&self, layer: usize) -> f32 {
        let ScoreDivisors { head_dim, layer: by_layer } = self.score_divisors;
        let divisor = if head_dim { (self.head_dim as f64).sqrt() } else { 1.0 };
        (1.0 / if by_layer { divisor * (layer + 1) as f64 } else { divisor }) as f32
    }
}

/// What a kind of file calls the sizes, so that an error names what its reader finds in the file.
struct FieldNames {
    hidden: &'static str,
    layers: &'static str,
    heads: &'static str,
    kv_heads: &'static str,
    head_dim: &'static str,
    intermediate: &'static str,
    vocabulary: &'static str,
    embedding: &'static str,
    context: &'static str,
    eps: &'static str,
    windows: &'static str,
}

impl FieldNames {
    const PLAIN: Self = Self {
        hidden: "hidden",
        layers: "layers",
        heads: "heads",
        kv_heads: "kv_heads",
        head_dim: "head_dim",
        intermediate: "intermediate",
        vocabulary: "vocabulary",
        embedding: "embedding",
        context: "context",
        eps: "eps",
        windows: "windows",
    };

    const LLAMA: Self = Self {
        hidden: "hidden_size",
        layers: "num_hidden_layers",
        heads: "num_attention_heads",
        kv_heads: "num_key_value_heads",
        head_dim: "head_dim",
        intermediate: "intermediate_size",
        vocabulary: "vocab_size",
        embedding: "hidden_size",
        context: "max_position_embeddings",
        eps: "rms_norm_eps",
        windows: "sliding_window",
    };

    const GPT2: Self = Self {
        hidden: "n_embd",
        layers: "n_layer",
        heads: "n_head",
        kv_heads: "n_head",
        intermediate: "n_inner",
        embedding: "n_embd",
        context: "n_positions",
        eps: "layer_norm_epsilon",
        ..Self::LLAMA
    };

    const OPT: Self = Self {
        kv_heads: "num_attention_heads",
        intermediate: "ffn_dim",
        embedding: "word_embed_proj_dim",
        ..Self::LLAMA
    };

    /// Without the name of the architecture in front.
    const GGUF: Self = Self {
        hidden: "embedding_length",
        layers: "block_count",
        heads: "attention.head_count",
        kv_heads: "attention.head_count_kv",
        head_dim: "attention.key_length",
        intermediate: "feed_forward_length",
        vocabulary: "vocab_size",
        embedding: "embedding_length",
        context: "context_length",
        eps: "attention.layer_norm_rms_epsilon",
        windows: "attention.sliding_window",
    };
}
