//! The configuration of a model, read from `config.json` or from the metadata of a GGUF file.
//!
//! [`DecoderConfig`] is the same for all file formats, with every default filled in, so building a program does not depend
//! on the source of the configuration. This module contains it and the code that the readers of all families share; the
//! readers themselves are in `families`, one file per family.
//!
//! A model with an ignored setting still generates text, but of worse quality, which is hard to notice. Therefore a field
//! that no reader reads is an error, unless it is on a list of fields that are known not to change the result. A field
//! with the value `null` counts as absent.

pub(crate) mod encoder;
mod error;
pub(crate) mod fields;
pub(crate) mod gguf;
pub(crate) mod hugging_face;
pub(crate) mod latent;
pub(crate) mod latent_fields;
pub(crate) mod mixture;
pub(crate) mod mixture_fields;
mod quantisation;
pub(crate) mod rope;

use dsrun_core::op::{Nonlinearity, RopePairing};
use latent::LatentNames;
use mixture::MixtureNames;
use rope::RopesByKind;
use std::sync::Arc;

pub use encoder::{Classifier, Encoder};
pub use error::ConfigError;
pub use latent::Latent;
pub use mixture::{Mixture, SharedExpert};
pub use quantisation::{Gptq, Quantisation, Scheme};
pub use rope::{Rope, RopeScaling};

/// The result of reading a configuration.
pub type Result<T, E = ConfigError> = std::result::Result<T, E>;

/// The kind of norm that a model uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// RMS norm with a weight.
    Rms {
        /// The number added to every weight: 1 in files that store `weight - 1`.
        weight_offset: f32,
    },
    /// Layer norm.
    Layer {
        /// Whether the norm has a weight.
        weight: bool,
        /// Whether the norm has a bias.
        bias: bool,
    },
}

impl Norm {
    /// A layer norm with a weight and a bias.
    pub const LAYER: Self = Self::Layer { weight: true, bias: true };
}

/// The attention settings of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerAttention {
    /// The sliding window: the number of keys that a query attends to, its own included; `None` for full attention.
    pub window: Option<u32>,
    /// The chunk size, in layers whose queries attend to the keys of their own chunk only; `None` in other layers.
    pub chunk: Option<u32>,
    /// How the factor of queries grows with their position; `None` for a factor of 1.
    pub temperature: Option<Temperature>,
    /// The rotary embedding of queries and keys; `None` in layers without one.
    pub rope: Option<Arc<Rope>>,
    /// The factor that multiplies attention scores.
    pub scale: f32,
}

impl LayerAttention {
    /// Full attention without a rotary embedding.
    pub const fn full(scale: f32) -> Self {
        Self { window: None, chunk: None, temperature: None, rope: None, scale }
    }
}

/// The temperature tuning of attention: a query at position `p` is multiplied by `1 + growth * ln(1 + floor((p + offset) / interval))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// The number of positions that share a factor.
    pub interval: usize,
    /// The number added to every position.
    pub offset: usize,
    /// The factor of the logarithm.
    pub growth: f32,
}

impl Temperature {
    /// Returns the factors of the first `positions` positions.
    pub(crate) fn factors(&self, positions: usize) -> Vec<f32> {
        let factor = |position: usize| {
            let intervals = ((position + self.offset) / self.interval.max(1)) as f64;
            (1.0 + f64::from(self.growth) * intervals.ln_1p()) as f32
        };
        (0..positions).map(factor).collect()
    }
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
    /// The output projection of attention.
    pub output: bool,
    /// The gate of the MLP.
    pub gate: bool,
    /// The up projection of a gated MLP, or the first projection of an MLP without a gate.
    pub up: bool,
    /// The down projection of the MLP.
    pub down: bool,
    /// The LM head.
    pub head: bool,
}

impl Biases {
    /// Every projection of a layer has a bias.
    pub const ALL: Self = Self::of(true, true);

    /// Sets the biases of all projections of attention, and those of all projections of the MLP.
    pub const fn of(attention: bool, mlp: bool) -> Self {
        Self {
            query: attention,
            key: attention,
            value: attention,
            output: attention,
            gate: mlp,
            up: mlp,
            down: mlp,
            head: false,
        }
    }
}

/// The configuration of a decoder, or of an encoder, with all defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// The name of the architecture: `model_type` in `config.json`.
    pub architecture: &'static str,
    /// The hidden size: features of a token between the layers.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of additional layers in the file (multi-token prediction), which are not read.
    pub unread_layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Features of a head. `heads * head_dim` need not be `hidden`.
    pub head_dim: usize,
    /// The inner size of an MLP.
    pub intermediate: usize,
    /// Rows of the embedding. Tokenizers may have fewer tokens.
    pub vocabulary: usize,
    /// Features of the embedding.
    ///
    /// If they differ from `hidden`, one projection follows the embedding and another precedes the head.
    pub embedding: usize,
    /// The kind of every norm.
    pub norm: Norm,
    /// Epsilon: added to the mean square, or the variance, in every norm.
    pub eps: f32,
    /// Whether norms follow the residual sums instead of preceding attention and MLP (OPT-350m).
    pub norm_after: bool,
    /// Whether attention and MLP stand beside each other, in families whose files specify it.
    pub parallel: bool,
    /// Whether a norm follows the last layer.
    pub final_norm: bool,
    /// The attention settings of each layer.
    pub attention: Vec<LayerAttention>,
    /// The sizes of multi-head latent attention, in models that cache a latent instead of keys and values.
    pub latent: Option<Latent>,
    /// Whether query and key heads are normalised, in families whose files specify it.
    pub head_norms: bool,
    /// Whether each head has an attention sink: an additional score in its softmax that belongs to no key.
    pub sinks: bool,
    /// Which projections have a bias.
    pub biases: Biases,
    /// Whether the LM head is tied to the embedding.
    pub tied: bool,
    /// The settings of an encoder; `None` for a decoder.
    pub encoder: Option<Encoder>,
    /// The mixture of experts that replaces the MLP in some layers.
    pub mixture: Option<Mixture>,
    /// The factor that multiplies embeddings.
    pub embedding_scale: f32,
    /// The factor that multiplies the results of attention and MLP before they are added to the residual.
    pub residual_scale: f32,
    /// The factor that multiplies logits.
    pub logit_scale: f32,
    /// The bound `c` of attention scores, which become `c * tanh(score / c)`; 0 for none.
    pub score_cap: f32,
    /// The bound `c` of logits, which become `c * tanh(logit / c)`; 0 for none.
    pub logit_cap: f32,
    /// The activation function of the MLP.
    pub activation: Nonlinearity,
    /// The context length that the model was trained for, in tokens.
    pub context: usize,
    /// The token that begins a sequence, if the file specifies it.
    pub bos: Option<u32>,
    /// The tokens that end a sequence, if the file specifies them.
    pub eos: Vec<u32>,
}

/// The largest values that are accepted.
///
/// They are far above those of any model, and low enough that the product of two does not overflow and that nothing is
/// allocated out of proportion to a file.
pub(crate) mod limits {
    pub(crate) const HIDDEN: usize = 1 << 20;
    pub(crate) const LAYERS: usize = 1 << 12;
    pub(crate) const HEADS: usize = 1 << 14;
    pub(crate) const HEAD_DIM: usize = 1 << 13;
    pub(crate) const INTERMEDIATE: usize = 1 << 23;
    pub(crate) const VOCABULARY: usize = 1 << 24;
    pub(crate) const CONTEXT: usize = i32::MAX as usize;
    /// Where attention has a temperature, each position has a factor in memory; the longest published context is 10 million.
    pub(crate) const TEMPERED_CONTEXT: usize = 1 << 24;
}

impl DecoderConfig {
    /// Checks everything that building a program relies on.
    ///
    /// # Errors
    /// Names the field. The readers call this; it is for configurations made by hand.
    pub fn validate(&self) -> Result<()> {
        self.validate_as(&FieldNames::PLAIN)
    }

    /// Returns the configuration if it is valid. Errors use the `names` of the file that it was read from.
    pub(crate) fn checked(self, names: &FieldNames) -> Result<Self> {
        self.validate_as(names).map(|()| self)
    }

    fn validate_as(&self, names: &FieldNames) -> Result<()> {
        let (of_expert, of_shared) = self.mixture.as_ref().map_or((1, 1), |mixture| {
            (mixture.intermediate, mixture.shared.map_or(1, |shared| shared.intermediate))
        });
        let sizes = [
            (names.hidden, self.hidden, limits::HIDDEN),
            (names.layers, self.layers, limits::LAYERS),
            (names.heads, self.heads, limits::HEADS),
            (names.kv_heads, self.kv_heads, limits::HEADS),
            (names.head_dim.unwrap_or("the head size"), self.head_dim, limits::HEAD_DIM),
            (names.intermediate, self.intermediate, limits::INTERMEDIATE),
            (names.vocabulary, self.vocabulary, limits::VOCABULARY),
            (names.embedding, self.embedding, limits::HIDDEN),
            (names.context, self.context, limits::CONTEXT),
            (names.mixture.intermediate, of_expert, limits::INTERMEDIATE),
            (names.mixture.shared, of_shared, limits::INTERMEDIATE),
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
        if !self.eps.is_finite() || self.eps <= 0.0 {
            return Err(ConfigError::value(names.eps.unwrap_or("eps"), self.eps, "a number above 0"));
        }
        if self.attention.len() != self.layers {
            let expected = format!("one for each of {} layers", self.layers);
            return Err(ConfigError::value("attention", format!("{} long", self.attention.len()), expected));
        }
        let too_long = |window: &u32| *window == 0 || *window as usize > limits::CONTEXT;
        let mut windows = self.attention.iter().flat_map(|layer| [layer.window, layer.chunk]).flatten();
        if let Some(window) = windows.find(too_long) {
            return Err(ConfigError::value(names.window, window, format!("from 1 to {}", limits::CONTEXT)));
        }
        let mut temperatures = self.attention.iter().filter_map(|layer| layer.temperature).peekable();
        if temperatures.peek().is_some() && self.context > limits::TEMPERED_CONTEXT {
            let expected = format!("at most {} where attention has a temperature", limits::TEMPERED_CONTEXT);
            return Err(ConfigError::value(names.context, self.context, expected));
        }
        for temperature in temperatures {
            if temperature.interval == 0 || !temperature.growth.is_finite() {
                let expected = "an interval above 0 and a finite growth";
                return Err(ConfigError::value(
                    "the temperature of attention",
                    format!("{temperature:?}"),
                    expected,
                ));
            }
        }
        if let Some(scale) = self.attention.iter().map(|layer| layer.scale).find(|scale| !scale.is_finite()) {
            return Err(ConfigError::value("the scale of attention scores", scale, "a finite number"));
        }
        for scale in [self.embedding_scale, self.residual_scale, self.logit_scale] {
            if !scale.is_finite() || scale == 0.0 {
                return Err(ConfigError::value("a factor of the model", scale, "a number other than 0"));
            }
        }
        for cap in [self.score_cap, self.logit_cap] {
            if !cap.is_finite() || cap < 0.0 {
                return Err(ConfigError::value("a soft cap", cap, "a number above 0, or 0 for none"));
            }
        }
        if let Some(latent) = &self.latent {
            latent.validate(&names.latent, self.head_dim)?;
            self.validate_latent_layers(latent)?;
        }
        if let Some(encoder) = &self.encoder {
            encoder.validate(self)?;
        }
        if let Some(mixture) = &self.mixture {
            mixture.validate(&names.mixture, self.layers)?;
        }
        self.ropes().into_iter().try_for_each(|rope| rope.validate(names.head_dim, self.head_dim))
    }

    /// Checks that every layer has the form of attention that latents have.
    fn validate_latent_layers(&self, latent: &Latent) -> Result<()> {
        let whole = |layer: &LayerAttention| {
            layer.window.is_none()
                && layer.chunk.is_none()
                && layer.rope.as_ref().is_some_and(|rope| rope.dimensions == latent.rotated)
        };
        if self.kv_heads == 1 && !self.sinks && self.attention.iter().all(whole) {
            return Ok(());
        }
        let expected = "one cached head without windows and sinks, with the rotated part rotated as a whole";
        Err(ConfigError::value("latent attention", "something else", expected))
    }

    /// Returns the distinct rotary embeddings of the model, in the order of the layers.
    pub fn ropes(&self) -> Vec<&Arc<Rope>> {
        let mut found: Vec<&Arc<Rope>> = Vec::new();
        for rope in self.attention.iter().filter_map(|layer| layer.rope.as_ref()) {
            if !found.contains(&rope) {
                found.push(rope);
            }
        }
        found
    }

    /// Returns the mixture of experts of a layer; `None` in layers with an MLP.
    pub fn mixture_of(&self, layer: usize) -> Option<&Mixture> {
        self.mixture.as_ref().filter(|mixture| mixture.layers.get(layer) == Some(&true))
    }

    /// Returns the width of the hidden states that embeddings are made of: those that a head for tokens reads.
    pub fn embedding_width(&self) -> usize {
        if self.encoder.is_some() { self.hidden } else { self.embedding }
    }

    /// Gives every layer this rotary embedding.
    pub(crate) fn rotate_all(&mut self, rope: Rope) {
        let rope = Arc::new(rope);
        for layer in &mut self.attention {
            layer.rope = Some(rope.clone());
        }
    }

    /// Gives layers with a sliding window one rotary embedding, and those with full attention another.
    pub(crate) fn rotate_by_kind(&mut self, ropes: RopesByKind) {
        let (full, sliding) = (Arc::new(ropes.full), Arc::new(ropes.sliding));
        for layer in &mut self.attention {
            layer.rope = Some(if layer.window.is_some() { sliding.clone() } else { full.clone() });
        }
    }

    /// Takes the rotary embedding from layers without a sliding window.
    pub(crate) fn rotate_windows_only(&mut self) {
        for layer in &mut self.attention {
            layer.rope.take_if(|_| layer.window.is_none());
        }
    }

    /// Gives every layer latent attention with this rotary embedding, which rotates neighbours, and multiplies scores by
    /// `factor`.
    pub(crate) fn attend_to_latents(&mut self, latent: Latent, rope: Rope, factor: f64) {
        self.latent = Some(latent);
        self.kv_heads = 1;
        self.head_dim = latent.plain + latent.rotated;
        self.rotate_all(Rope { pairing: RopePairing::Neighbours, ..rope });
        self.scale_scores(self.head_dim as f64 / (factor * factor));
    }

    /// Divides the attention scores of all layers by the square root of `divisor`.
    pub(crate) fn scale_scores(&mut self, divisor: f64) {
        let scale = hugging_face::score_scale(divisor);
        self.attention.iter_mut().for_each(|layer| layer.scale = scale);
    }

    /// Sets the sliding window of each layer.
    pub(crate) fn set_windows(&mut self, windows: Vec<Option<u32>>) {
        for (layer, window) in self.attention.iter_mut().zip(windows) {
            layer.window = window;
        }
    }
}

/// The names of common fields in one kind of file. Readers read by them, and errors quote them.
pub(crate) struct FieldNames {
    pub(crate) hidden: &'static str,
    pub(crate) layers: &'static str,
    pub(crate) heads: &'static str,
    pub(crate) kv_heads: &'static str,
    /// `None` if the head size follows from other fields.
    pub(crate) head_dim: Option<&'static str>,
    pub(crate) intermediate: &'static str,
    pub(crate) vocabulary: &'static str,
    pub(crate) embedding: &'static str,
    pub(crate) context: &'static str,
    /// `None` if no field holds it.
    pub(crate) eps: Option<&'static str>,
    pub(crate) activation: &'static str,
    pub(crate) window: &'static str,
    pub(crate) latent: LatentNames,
    pub(crate) mixture: MixtureNames,
}

impl FieldNames {
    const PLAIN: Self = Self {
        hidden: "hidden",
        layers: "layers",
        heads: "heads",
        kv_heads: "kv_heads",
        head_dim: Some("head_dim"),
        intermediate: "intermediate",
        vocabulary: "vocabulary",
        embedding: "embedding",
        context: "context",
        eps: Some("eps"),
        activation: "activation",
        window: "window",
        latent: LatentNames::PLAIN,
        mixture: MixtureNames {
            experts: "mixture.experts",
            top_k: "mixture.route.top_k",
            intermediate: "mixture.intermediate",
            shared: "mixture.shared.intermediate",
            groups: "mixture.route.groups",
            top_groups: "mixture.route.top_groups",
        },
    };

    /// The names that Llama has in `config.json`, which most families share.
    pub(crate) const HUGGING_FACE: Self = Self {
        hidden: "hidden_size",
        layers: "num_hidden_layers",
        heads: "num_attention_heads",
        kv_heads: "num_key_value_heads",
        head_dim: Some("head_dim"),
        intermediate: "intermediate_size",
        vocabulary: "vocab_size",
        embedding: "hidden_size",
        context: "max_position_embeddings",
        eps: Some("rms_norm_eps"),
        activation: "hidden_act",
        window: "sliding_window",
        latent: LatentNames::HUGGING_FACE,
        mixture: MixtureNames::MIXTRAL,
    };

    /// The keys of GGUF metadata, without the prefix of the architecture.
    pub(crate) const GGUF: Self = Self {
        hidden: "embedding_length",
        layers: "block_count",
        heads: "attention.head_count",
        kv_heads: "attention.head_count_kv",
        head_dim: Some("attention.key_length"),
        intermediate: "feed_forward_length",
        vocabulary: "vocab_size",
        embedding: "embedding_length",
        context: "context_length",
        eps: Some("attention.layer_norm_rms_epsilon"),
        activation: "",
        window: "attention.sliding_window",
        latent: LatentNames::GGUF,
        mixture: MixtureNames::GGUF,
    };

    /// The keys in GGUF files of models with layer norms.
    pub(crate) const GGUF_LAYER_NORM: Self = Self { eps: Some("attention.layer_norm_epsilon"), ..Self::GGUF };
}
