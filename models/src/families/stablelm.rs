//! StableLM 2 and 3B: Llama's layer with layer norms and a rotary embedding of a part of each head.
//!
//! With `use_parallel_residual`, attention and MLP stand beside each other behind one norm.
//!
//! Defaults: `num_attention_heads` and `num_key_value_heads` 32, `max_position_embeddings` 4096, `layer_norm_eps` 1e-5,
//! `partial_rotary_factor` 0.25, no biases.

use super::{
    architecture::{Architecture, Gguf},
    llama::{self, LLAMA},
};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Norm, Result,
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

const NAMES: FieldNames =
    FieldNames { head_dim: None, eps: Some("layer_norm_eps"), ..FieldNames::HUGGING_FACE };

/// StableLM.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "stablelm",
    config,
    // Files of the first release repeat some fields under older names.
    harmless: &["norm_eps", "num_heads", "rope_pct"],
    blocks: Blocks { layer, ..LLAMA.blocks },
    gguf: Some(Gguf { name: "stablelm", config: from_gguf, tensors: Names::GGUF, export: None }),
    writable: false,
    ..LLAMA
}];

/// Computes Llama's layer, or `x + attention(norm(x)) + mlp(norm(x))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    if !build.config.parallel {
        return llama::layer(build, x);
    }
    let normed = build.norm(x, Part::AttentionNorm)?;
    let heads = build.heads(normed)?;
    let heads = build.rotate(heads)?;
    let attended = build.attend(heads)?;
    let mlp = build.gated_mlp(normed)?;
    build.parallel_residual(x, attended, mlp)
}

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults =
        Defaults { heads: Some(32), kv_heads: Some(32), context: 4096, eps: 1e-5, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, "stablelm", &NAMES, &defaults)?;
    config.norm = Norm::LAYER;
    let biases = Biases::of(fields.flag("use_qkv_bias")?.unwrap_or(false), false);
    config.biases = Biases { output: false, ..biases };
    config.parallel = fields.flag("use_parallel_residual")?.unwrap_or(false);
    let defaults = RopeDefaults { partial: Some(0.25), ..RopeDefaults::of(&config) };
    config.rotate_all(rope::read(fields, defaults)?);
    expect(fields, "qk_layernorm", false.into(), "norms of heads are not supported (false)")?;
    expect_one(fields, "rotary_scaling_factor")?;
    config.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let names = &FieldNames::GGUF_LAYER_NORM;
    let mut config = gguf::decoder(keys, "stablelm", names, Nonlinearity::Silu)?;
    config.norm = Norm::LAYER;
    config.parallel = keys.get::<bool>("use_parallel_residual")?.unwrap_or(false);
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Halves, true)?);
    config.checked(names)
}
