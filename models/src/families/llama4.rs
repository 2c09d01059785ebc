//! Llama 4, text only: layers that attend within chunks, and experts of which each token chooses one.
//!
//! In three layers of four, queries attend to the keys of their own chunk; they and the keys are rotated and then divided by their
//! root mean square. The other layers attend to all keys without a rotary embedding, and multiply queries by a factor that grows with
//! their position. The sigmoid of the router's largest logit multiplies the input of that expert; a shared expert without a gate is
//! added. Layers that are not in `moe_layers` have an MLP of width `intermediate_size_mlp`.
//!
//! Defaults: `num_attention_heads` 40, `num_key_value_heads` 8, `head_dim` 128, `max_position_embeddings` 131072, `rms_norm_eps`
//! 1e-5, `rope_theta` 500000, `no_rope_layer_interval` 4, `attention_chunk_size`, `floor_scale` and `intermediate_size` 8192,
//! `attn_scale` 0.1, `num_local_experts` 16, `interleave_moe_layer_step` 1.
//!
//! `llama4` is a checkpoint that also takes images: only its text model is read.
//!
//! GGUF files hold the text model, and neither the size of chunks nor the temperature, which are those of the defaults, nor which layers
//! have a rotary embedding: every fourth has none. Heads are normalised unless there are 128 experts, as in llama.cpp.

use super::{
    architecture::{Architecture, Gguf},
    llama::LLAMA,
    smollm3::{every_but, leave_unrotated, rotated_layers},
};
use crate::{
    config::{
        Biases, ConfigError, DecoderConfig, FieldNames, Mixture, Result, SharedExpert, Temperature,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults, TextModel, expect},
        limits,
        mixture::{MixtureNames, SOFTMAX},
        mixture_fields::{self, MixtureDefaults},
        rope::{
            Rope,
            json::{self as rope, RopeDefaults},
        },
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::{
    Result as CoreResult,
    op::{MoeRoute, Nonlinearity, RopePairing, RouterScore},
    program::ValueId,
};
use serde_json::Value;

const NAMES: FieldNames = FieldNames {
    intermediate: "intermediate_size_mlp",
    window: "attention_chunk_size",
    mixture: MixtureNames { shared: "intermediate_size", ..MixtureNames::MIXTRAL },
    ..FieldNames::HUGGING_FACE
};

/// The size of chunks, where files do not give it.
const CHUNK: u32 = 8192;

/// The temperature, where files do not give it.
const TEMPERATURE: Temperature = Temperature { interval: 8192, offset: 1, growth: 0.1 };

const ROUTER: MoeRoute = MoeRoute { score: RouterScore::Sigmoid, ..SOFTMAX };

/// The text model, and the text model inside a model that takes images.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    TEXT,
    Architecture {
        name: "llama4",
        config: |fields| {
            let read = |text: &Fields<'_>| config(text, "llama4");
            hugging_face::text_model(fields, &[TextModel { name: TEXT.name, harmless: TEXT.harmless, read }])
        },
        harmless: hugging_face::IMAGES,
        tensors: Names {
            prefixes: &["language_model.model.", "model.language_model.", "model."],
            no_weights: &["vision_model.", "multi_modal_projector."],
            ..TEXT.tensors
        },
        ..TEXT
    },
];

const TEXT: Architecture = Architecture {
    name: "llama4_text",
    config: |fields| config(fields, "llama4_text"),
    harmless: &["cache_implementation", "for_llm_compressor", "output_router_logits", "router_jitter_noise"],
    tensors: Names {
        own: &[
            TensorName::of(&[Part::Gate], "layers.{}.feed_forward.gate_proj"),
            TensorName::of(&[Part::Up], "layers.{}.feed_forward.up_proj"),
            TensorName::of(&[Part::Down], "layers.{}.feed_forward.down_proj"),
            TensorName::of(&[Part::Router], "layers.{}.feed_forward.router"),
            TensorName::of(
                &[Part::ExpertGate, Part::ExpertUp],
                "layers.{}.feed_forward.experts.gate_up_proj",
            )
            .with_suffixes(["", ""])
            .transposed(),
            TensorName::of(&[Part::ExpertDown], "layers.{}.feed_forward.experts.down_proj")
                .with_suffixes(["", ""])
                .transposed(),
            TensorName::of(&[Part::SharedGate], "layers.{}.feed_forward.shared_expert.gate_proj"),
            TensorName::of(&[Part::SharedUp], "layers.{}.feed_forward.shared_expert.up_proj"),
            TensorName::of(&[Part::SharedDown], "layers.{}.feed_forward.shared_expert.down_proj"),
        ],
        ..Names::HUGGING_FACE
    },
    blocks: Blocks { layer, ..LLAMA.blocks },
    gguf: Some(Gguf { name: "llama4", config: from_gguf, tensors: Names::GGUF, export: None }),
    writable: false,
};

/// Computes `x + attention(norm(x))`, then `x + experts(norm(x))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let x = build.norm(x, Part::AttentionNorm)?;
        let mut heads = build.heads(x)?;
        if build.rotates() {
            heads = build.rotate(heads)?;
            if build.config.head_norms {
                heads = build.norm_heads_without_weights(heads)?;
            }
        }
        let heads = build.tune_temperature(heads)?;
        build.attend(heads)
    })?;
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        build.experts_or_mlp(x)
    })
}

fn config(fields: &Fields<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let defaults = Defaults {
        heads: Some(40),
        kv_heads: Some(8),
        head_dim: Some(128),
        context: 131_072,
        eps: 1e-5,
        ..Defaults::LLAMA
    };
    let mut config = hugging_face::decoder(fields, architecture, &NAMES, &defaults)?;
    config.biases = Biases::of(fields.flag("attention_bias")?.unwrap_or(false), false);
    config.head_norms = fields.flag("use_qk_norm")?.unwrap_or(true);
    let defaults = RopeDefaults { theta: 500_000.0, ..RopeDefaults::of(&config) };
    config.rotate_all(Rope { pairing: RopePairing::Neighbours, ..rope::read(fields, defaults)? });
    let rotated = rotated_layers(fields, config.layers)?;
    leave_unrotated(&mut config, &rotated);
    let chunk = fields.size(NAMES.window, 1, limits::CONTEXT)?;
    let chunk = chunk.and_then(|chunk| u32::try_from(chunk).ok());
    let chunk = if fields.is_null(NAMES.window) { None } else { chunk.or(Some(CHUNK)) };
    let is_chunked = |layer: usize| rotated[layer];
    let chunks = hugging_face::limited_layers(fields, config.layers, chunk, "chunked_attention", is_chunked)?;
    // Some files have the number 4 here, which means true.
    let tuned = match fields.value("attn_temperature_tuning") {
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        _ => fields.flag("attn_temperature_tuning")?.unwrap_or(true),
    };
    let interval = fields.size("floor_scale", 1, limits::CONTEXT)?.unwrap_or(TEMPERATURE.interval);
    let growth = fields.positive("attn_scale")?.map_or(TEMPERATURE.growth, |growth| growth as f32);
    let temperature = tuned.then_some(Temperature { interval, growth, ..TEMPERATURE });
    attend(&mut config, &chunks, temperature);

    let defaults = MixtureDefaults { experts: Some(16), top_k: Some(1), intermediate: Some(8192) };
    let mut mixture = mixture_fields::read(fields, &NAMES.mixture, defaults, ROUTER, config.layers)?;
    expect(fields, NAMES.mixture.top_k, 1.into(), "the router of Llama 4 chooses 1 expert")?;
    weigh_inputs(&mut mixture);
    let step = fields.size("interleave_moe_layer_step", 1, usize::MAX)?.unwrap_or(1);
    mixture.layers = match fields.indices("moe_layers", config.layers)? {
        Some(listed) => (0..config.layers).map(|layer| listed.contains(&layer)).collect(),
        None => (1..=config.layers).map(|layer| layer.is_multiple_of(step)).collect(),
    };
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&NAMES)
}

/// Makes weights multiply what experts get, and adds a shared expert of their size.
fn weigh_inputs(mixture: &mut Mixture) {
    mixture.weighted_inputs = true;
    mixture.shared = Some(SharedExpert { intermediate: mixture.intermediate, gated: false });
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    const STEP: &str = "interleave_moe_layer_step";
    let names = &FieldNames::GGUF;
    let mut config = gguf::decoder(keys, "llama4_text", names, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Neighbours, false)?);
    let rotated = every_but(config.layers, 4);
    leave_unrotated(&mut config, &rotated);
    // 0 stands for full attention in all layers, of which the file does not say how they are rotated.
    if let Some(chunk) = keys.get::<u32>(names.window)?.filter(|chunk| *chunk != CHUNK) {
        let reason = format!("layers with a rotary embedding attend within chunks of {CHUNK}");
        return Err(ConfigError::unsupported(keys.path(names.window), chunk, reason));
    }
    let chunks: Vec<_> = rotated.iter().map(|rotated| rotated.then_some(CHUNK)).collect();
    attend(&mut config, &chunks, Some(TEMPERATURE));

    let mut mixture = mixture_fields::from_gguf(keys, None, ROUTER, config.layers)?;
    if mixture.route.top_k != 1 {
        let reason = "the router of Llama 4 chooses 1 expert";
        return Err(ConfigError::unsupported(keys.path(names.mixture.top_k), mixture.route.top_k, reason));
    }
    config.head_norms = mixture.experts != 128;
    weigh_inputs(&mut mixture);
    let step = keys.required_size(STEP, limits::LAYERS)?;
    mixture.layers = (1..=config.layers).map(|layer| layer.is_multiple_of(step)).collect();
    DecoderConfig { mixture: Some(mixture), ..config }.checked(names)
}

/// Sets the chunks, and the temperature of layers without a rotary embedding.
fn attend(config: &mut DecoderConfig, chunks: &[Option<u32>], temperature: Option<Temperature>) {
    for (layer, chunk) in config.attention.iter_mut().zip(chunks) {
        layer.chunk = *chunk;
        layer.temperature = temperature.filter(|_| layer.rope.is_none());
    }
}
