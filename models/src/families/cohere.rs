//! Command R, Command R7B and Command A: attention and a gated MLP beside each other behind one layer norm without a bias.
//!
//! The rotary embedding pairs neighbours, and logits are multiplied by `logit_scale`. In Cohere 2 (R7B, A), three layers of four have a
//! sliding window and a rotary embedding, and the others neither, or those that `layer_types` lists.
//!
//! Defaults: `num_attention_heads` 64, `num_key_value_heads` the number of query heads, `max_position_embeddings` 8192, `layer_norm_eps`
//! 1e-5, `rope_theta` 500000 in `rope_parameters`, `logit_scale` 1/16, `sliding_window` 4096, `sliding_window_pattern` 4, tied
//! embedding, no biases.

use super::{
    architecture::{Architecture, Gguf},
    llama::LLAMA,
};
use crate::{
    config::{
        Biases, ConfigError, DecoderConfig, FieldNames, Norm, Result, Rope,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults, expect, expect_one},
        rope::json::{self as rope, RopeDefaults},
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part},
};
use dsrun_core::{
    Result as CoreResult,
    op::{Nonlinearity, RopePairing},
    program::ValueId,
};
use serde_json::Value;

const NAMES: FieldNames = FieldNames { eps: Some("layer_norm_eps"), ..FieldNames::HUGGING_FACE };

const NORM: Norm = Norm::Layer { weight: true, bias: false };

/// Cohere's first and second generation.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    COHERE,
    Architecture {
        name: "cohere2",
        config: cohere2,
        harmless: &["cache_implementation", "use_parallel_embedding"],
        gguf: Some(Gguf { name: "cohere2", config: cohere2_from_gguf, tensors: Names::GGUF, export: None }),
        ..COHERE
    },
];

const COHERE: Architecture = Architecture {
    name: "cohere",
    config: cohere,
    harmless: &[],
    blocks: Blocks { layer, ..LLAMA.blocks },
    gguf: Some(Gguf {
        name: "command-r",
        config: |keys| decoder_from_gguf(keys, "cohere")?.checked(&FieldNames::GGUF_LAYER_NORM),
        tensors: Names::GGUF,
        export: None,
    }),
    writable: false,
    ..LLAMA
};

/// Computes `x + attention(norm(x)) + mlp(norm(x))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let normed = build.norm(x, Part::AttentionNorm)?;
    let heads = build.heads(normed)?;
    let heads = build.rotate(heads)?;
    let attended = build.attend(heads)?;
    let mlp = build.gated_mlp(normed)?;
    build.parallel_residual(x, attended, mlp)
}

fn decoder(fields: &Fields<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let defaults = Defaults { heads: Some(64), context: 8192, eps: 1e-5, tied: true, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, architecture, &NAMES, &defaults)?;
    config.norm = NORM;
    config.biases = Biases::of(fields.flag("attention_bias")?.unwrap_or(false), false);
    config.logit_scale = fields.positive("logit_scale")?.unwrap_or(0.0625) as f32;
    let defaults = RopeDefaults { theta: 500_000.0, ..RopeDefaults::of(&config) };
    let rope = rope::read(fields, defaults)?;
    config.rotate_all(Rope { pairing: RopePairing::Neighbours, ..rope });
    Ok(config)
}

fn cohere(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let reason = "norms of heads with weights of their own are not supported (false)";
    expect(fields, "use_qk_norm", false.into(), reason)?;
    decoder(fields, "cohere")?.checked(&NAMES)
}

fn cohere2(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let mut config = decoder(fields, "cohere2")?;
    // Published files say in words of their own what transformers computes whatever they say.
    for (field, wanted) in [
        ("order_of_interleaved_layers", Value::from("local_attn_first")),
        ("position_embedding_type", "rope_gptj".into()),
        ("use_embedding_sharing", config.tied.into()),
        ("use_gated_activation", true.into()),
        ("use_parallel_block", true.into()),
        ("use_qk_norm", false.into()),
    ] {
        let reason = format!("it must be {wanted}");
        expect(fields, field, wanted, &reason)?;
    }
    expect_one(fields, "rotary_pct")?;
    let window = hugging_face::required_sliding_window(fields, 4096)?;
    let period = fields.size("sliding_window_pattern", 1, usize::MAX)?.unwrap_or(4);
    let reason = format!("it must be {period}, as sliding_window_pattern");
    expect(fields, "layer_switch", period.into(), &reason)?;
    let sliding = |layer: usize| !(layer + 1).is_multiple_of(period);
    config.set_windows(hugging_face::windows(fields, config.layers, Some(window), sliding)?);
    config.rotate_windows_only();
    config.checked(&NAMES)
}

fn decoder_from_gguf(keys: &Keys<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    const LOGIT_SCALE: &str = "logit_scale";
    let mut config = gguf::decoder(keys, architecture, &FieldNames::GGUF_LAYER_NORM, Nonlinearity::Silu)?;
    config.norm = NORM;
    let missing = || ConfigError::Missing { field: keys.path(LOGIT_SCALE) };
    config.logit_scale = keys.positive(LOGIT_SCALE)?.ok_or_else(missing)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Neighbours, false)?);
    Ok(config)
}

fn cohere2_from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = decoder_from_gguf(keys, "cohere2")?;
    config.set_windows(gguf::windows(keys, config.layers, 4)?);
    config.rotate_windows_only();
    config.checked(&FieldNames::GGUF_LAYER_NORM)
}
