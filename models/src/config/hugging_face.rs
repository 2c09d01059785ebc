//! Shared readers for the fields of `config.json`.
//!
//! The formats of Hugging Face transformers up to version 4, and from version 5 on, are supported. An absent field has the
//! default of transformers, which differs between architectures: readers pass their [`Defaults`].

use super::{
    Biases, ConfigError, DecoderConfig, FieldNames, LayerAttention, Norm, Result,
    fields::{Fields, shortened},
    limits,
};
use dsrun_core::op::Nonlinearity;
use serde_json::{Map, Value};

/// Fields that do not change the logits of any architecture, whatever their value.
const NO_EFFECT: &[&str] = &[
    // The origin of the file.
    "_name_or_path",
    "architectures",
    "custom_pipelines",
    "finetuning_task",
    "is_llama_config",
    "task_specific_params",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    // Training.
    "_num_labels",
    "attention_dropout",
    "gradient_checkpointing",
    "hidden_dropout",
    "initializer_range",
    "label2id",
    "id2label",
    "num_labels",
    "pretraining_tp",
    "problem_type",
    "router_aux_loss_coef",
    // Run-time options of transformers.
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_flash_attn_2_enabled",
    "attn_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "return_dict_in_generate",
    "output_scores",
    "tf_legacy_loss",
    "torch_dtype",
    "torchscript",
    "use_bfloat16",
    "use_cache",
    // Which shorter vectors a model that embeds texts was trained for: [`crate::sentence_transformers::ShorterVectors`] reads them.
    "is_matryoshka",
    "matryoshka_dimensions",
    // Present in SmolLM2's files, but no code reads it.
    "rope_interleaved",
    // Sampling, in files older than generation_config.json.
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_sequence_length",
    "min_length",
    "model_max_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "pad_token_id",
    "prefix",
    "remove_invalid_values",
    "repetition_penalty",
    "sep_token_id",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
];

/// Switches of other families that old files contain. Only these values, which have no effect, are accepted.
const FIXED: &[(&str, bool)] = &[
    ("add_cross_attention", false),
    ("bias", false),
    ("is_decoder", false),
    ("is_encoder_decoder", false),
    ("learned_embeddings", true),
    ("qkv_bias", false),
    ("scale_embeddings", false),
    ("tie_encoder_decoder", false),
    ("use_mrope", false),
];

/// Returns an error for a field that no reader has read, unless it is known not to change the result.
///
/// `harmless` lists such fields of this architecture, in addition to [`NO_EFFECT`].
pub(crate) fn refuse_unread(
    fields: &Fields<'_>,
    architecture: &'static str,
    harmless: &[&str],
) -> Result<()> {
    fields.refuse_unread(architecture, |field, value| {
        let known = NO_EFFECT.contains(&field) || harmless.contains(&field);
        let fixed = FIXED.iter().any(|(name, wanted)| *name == field && *value == Value::Bool(*wanted));
        // An empty collection has no effect.
        let empty = value.as_object().is_some_and(Map::is_empty);
        // [`super::Quantisation`] reads `quantization_config`.
        known || fixed || empty || field == "quantization_config"
    })
}

/// The defaults of optional fields.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    /// The number of query heads; `None` if the field is required.
    pub(crate) heads: Option<usize>,
    /// The number of key and value heads; `None` for the number of query heads.
    pub(crate) kv_heads: Option<usize>,
    /// The head size; `None` for the hidden size divided by the number of query heads.
    pub(crate) head_dim: Option<usize>,
    /// The width of the MLP as a multiple of the hidden size; `None` if the field is required.
    pub(crate) mlp_ratio: Option<usize>,
    /// The number of rows of the embedding; `None` if the field is required.
    pub(crate) vocabulary: Option<usize>,
    pub(crate) context: usize,
    pub(crate) eps: f32,
    pub(crate) tied: bool,
    pub(crate) activation: Nonlinearity,
}

impl Defaults {
    /// The defaults of Llama.
    pub(crate) const LLAMA: Self = Self {
        heads: None,
        kv_heads: None,
        head_dim: None,
        mlp_ratio: None,
        vocabulary: None,
        context: 2048,
        eps: 1e-6,
        tied: false,
        activation: Nonlinearity::Silu,
    };
}

/// Reads the fields that all families have.
///
/// The other settings get basic values, for the family to change: RMS norms, full attention without rotary
/// embedding, no biases.
pub(crate) fn decoder(
    fields: &Fields<'_>,
    architecture: &'static str,
    names: &FieldNames,
    defaults: &Defaults,
) -> Result<DecoderConfig> {
    let size = |field: &str, default: Option<usize>, most: usize| match default {
        Some(default) => Ok(fields.size(field, 1, most)?.unwrap_or(default)),
        None => fields.required_size(field, most),
    };
    let hidden = size(names.hidden, None, limits::HIDDEN)?;
    let layers = size(names.layers, None, limits::LAYERS)?;
    let heads = size(names.heads, defaults.heads, limits::HEADS)?;
    // Null means the number of query heads, even if the default of the field is different.
    let kv_heads = defaults.kv_heads.filter(|_| !fields.is_null(names.kv_heads)).unwrap_or(heads);
    let head_dim = head_dim(fields, names, defaults, hidden, heads)?;
    let eps = names.eps.map(|field| fields.positive(field)).transpose()?.flatten();
    let attention = LayerAttention::full(score_scale(head_dim as f64));
    Ok(DecoderConfig {
        architecture,
        hidden,
        layers,
        unread_layers: 0,
        heads,
        kv_heads: size(names.kv_heads, Some(kv_heads), limits::HEADS)?,
        head_dim,
        intermediate: size(
            names.intermediate,
            defaults.mlp_ratio.map(|ratio| ratio * hidden),
            limits::INTERMEDIATE,
        )?,
        vocabulary: size(names.vocabulary, defaults.vocabulary, limits::VOCABULARY)?,
        embedding: size(names.embedding, Some(hidden), limits::HIDDEN)?,
        norm: Norm::Rms { weight_offset: 0.0 },
        eps: eps.map_or(defaults.eps, |eps| eps as f32),
        norm_after: false,
        parallel: false,
        final_norm: true,
        attention: vec![attention; layers],
        latent: None,
        head_norms: false,
        sinks: false,
        biases: Biases::default(),
        encoder: None,
        mixture: None,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        score_cap: 0.0,
        logit_cap: 0.0,
        tied: fields.flag("tie_word_embeddings")?.unwrap_or(defaults.tied),
        activation: activation(fields, names.activation, defaults.activation)?,
        context: size(names.context, Some(defaults.context), limits::CONTEXT)?,
        bos: fields.tokens("bos_token_id")?.first().copied(),
        eos: fields.tokens("eos_token_id")?,
    })
}

/// Returns the factor that divides attention scores by the square root of `divisor`.
pub(crate) fn score_scale(divisor: f64) -> f32 {
    (1.0 / divisor.sqrt()) as f32
}

fn head_dim(
    fields: &Fields<'_>,
    names: &FieldNames,
    defaults: &Defaults,
    hidden: usize,
    heads: usize,
) -> Result<usize> {
    if let Some(field) = names.head_dim {
        if let Some(head_dim) = fields.size(field, 1, limits::HEAD_DIM)? {
            return Ok(head_dim);
        }
        if let Some(default) = defaults.head_dim {
            if fields.is_null(field) {
                let expected = format!("a whole number (it is {default} if left out)");
                return Err(ConfigError::value(fields.path(field), "null", expected));
            }
            return Ok(default);
        }
    }
    if hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    let no_field = names.head_dim.map(|field| format!(", as there is no {field}")).unwrap_or_default();
    let expected = format!("a divisor of {hidden} ({}){no_field}", names.hidden);
    Err(ConfigError::value(fields.path(names.heads), heads, expected))
}

/// Reads `sliding_window`: the number of keys that a query attends to, its own included; `None` for full attention.
pub(crate) fn sliding_window(fields: &Fields<'_>, default: Option<u32>) -> Result<Option<u32>> {
    match fields.size("sliding_window", 0, limits::CONTEXT)? {
        Some(0) => {
            let expected = "a whole number from 1, or null for none";
            Err(ConfigError::value(fields.path("sliding_window"), 0, expected))
        }
        Some(window) => Ok(u32::try_from(window).ok()),
        None if fields.is_null("sliding_window") => Ok(None),
        None => Ok(default),
    }
}

/// Reads `sliding_window` in families where it must not be null.
pub(crate) fn required_sliding_window(fields: &Fields<'_>, default: u32) -> Result<u32> {
    sliding_window(fields, Some(default))?
        .ok_or_else(|| ConfigError::value(fields.path("sliding_window"), "null", "a whole number from 1"))
}

/// Reads the sliding window of each layer.
///
/// `layer_types` gives the kind of each layer; without it, the layers for which `sliding` is true have the window.
pub(crate) fn windows(
    fields: &Fields<'_>,
    layers: usize,
    window: Option<u32>,
    sliding: impl Fn(usize) -> bool,
) -> Result<Vec<Option<u32>>> {
    limited_layers(fields, layers, window, "sliding_attention", sliding)
}

/// Reads the window, or chunk size, of each layer: `span` in layers whose kind is `limited`.
///
/// `layer_types` gives the kind of each layer; without it, the layers for which `is_limited` is true are of that kind.
pub(crate) fn limited_layers(
    fields: &Fields<'_>,
    layers: usize,
    span: Option<u32>,
    limited: &str,
    is_limited: impl Fn(usize) -> bool,
) -> Result<Vec<Option<u32>>> {
    let Some(types) = fields.texts("layer_types")? else {
        return Ok((0..layers).map(|layer| span.filter(|_| is_limited(layer))).collect());
    };
    if types.len() != layers {
        let expected = format!("one for each of {layers} layers (num_hidden_layers)");
        return Err(ConfigError::value(
            fields.path("layer_types"),
            format!("{} long", types.len()),
            expected,
        ));
    }
    let of_layer = |(layer, kind): (usize, &&str)| match *kind {
        "full_attention" => Ok(None),
        kind if kind == limited && span.is_some() => Ok(span),
        kind if kind == limited => Err(window_contradiction(layer, kind)),
        other => {
            let reason = format!("layers can be full_attention or {limited}");
            let field = fields.path(&format!("layer_types[{layer}]"));
            Err(ConfigError::unsupported(field, shortened(&other.into()), reason))
        }
    };
    types.iter().enumerate().map(of_layer).collect()
}

/// Returns the error for a layer whose entry in `layer_types` contradicts the other fields.
pub(crate) fn window_contradiction(layer: usize, kind: &str) -> ConfigError {
    ConfigError::Contradiction {
        first: format!("layer_types[{layer}] = \"{kind}\""),
        second: "what the other fields (sliding_window, use_sliding_window, attention_chunk_size) say".into(),
    }
}

/// Fields of models that also take images which do not concern the text model.
pub(crate) const IMAGES: &[&str] = &[
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_config",
    "vision_feature_layer",
];

/// A text model that a model which also takes images may have.
pub(crate) struct TextModel {
    /// Its `model_type`.
    pub(crate) name: &'static str,
    /// Fields of its configuration that have no effect.
    pub(crate) harmless: &'static [&'static str],
    /// The reader of its configuration.
    pub(crate) read: fn(&Fields<'_>) -> Result<DecoderConfig>,
}

/// Reads the text model from the configuration of a model that also takes images. Without a `model_type` it is the last of `models`.
pub(crate) fn text_model(fields: &Fields<'_>, models: &[TextModel]) -> Result<DecoderConfig> {
    let missing = || ConfigError::Missing { field: "text_config".into() };
    let text = fields.object("text_config")?.ok_or_else(missing)?;
    let found = match text.text("model_type")? {
        Some(name) => models.iter().find(|model| model.name == name),
        None => models.last(),
    };
    let names: Vec<_> = models.iter().map(|model| model.name).collect();
    let Some(model) = found else {
        let name = text.value("model_type").map(shortened).unwrap_or_default();
        let reason = format!("the text model must be {}", names.join(" or "));
        return Err(ConfigError::unsupported(text.path("model_type"), name, reason));
    };
    let mut config = (model.read)(&text)?;
    refuse_unread(&text, config.architecture, model.harmless)?;
    config.tied = fields.flag("tie_word_embeddings")?.unwrap_or(config.tied);
    config.bos = fields.tokens("bos_token_id")?.first().copied().or(config.bos);
    let eos = fields.tokens("eos_token_id")?;
    Ok(if eos.is_empty() { config } else { DecoderConfig { eos, ..config } })
}

/// Returns an error if a field has a value other than `wanted`, the only supported one.
pub(crate) fn expect(fields: &Fields<'_>, field: &str, wanted: Value, reason: &str) -> Result<()> {
    match fields.value(field) {
        Some(value) if *value != wanted => {
            Err(ConfigError::unsupported(fields.path(field), shortened(value), reason))
        }
        _ => Ok(()),
    }
}

/// Returns an error if a field is a number other than 1, the only supported one.
pub(crate) fn expect_one(fields: &Fields<'_>, field: &str) -> Result<()> {
    match fields.value(field) {
        Some(value) if value.as_f64() != Some(1.0) => {
            Err(ConfigError::unsupported(fields.path(field), shortened(value), "it must be 1"))
        }
        _ => Ok(()),
    }
}

/// Reads the activation function of the MLP.
pub(crate) fn activation(fields: &Fields<'_>, field: &str, default: Nonlinearity) -> Result<Nonlinearity> {
    match fields.text(field)? {
        None => Ok(default),
        Some("silu" | "swish") => Ok(Nonlinearity::Silu),
        Some("gelu") => Ok(Nonlinearity::GeluErf),
        Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => Ok(Nonlinearity::GeluTanh),
        Some("relu") => Ok(Nonlinearity::Relu),
        Some("quick_gelu") => Ok(Nonlinearity::QuickGelu),
        Some(other) => {
            let reason = "supported: silu, gelu, gelu_pytorch_tanh, gelu_new, gelu_fast, quick_gelu, relu";
            Err(ConfigError::unsupported(fields.path(field), shortened(&other.into()), reason))
        }
    }
}
