//! ERNIE 4.5 without experts and Seed-OSS: Llama with other defaults and biases.
//!
//! | default of | ernie4_5 | seed_oss |
//! |---|---|---|
//! | `num_attention_heads`, `num_key_value_heads` | 16, 2 | 80, 8 |
//! | `head_dim` | 128 | 128 |
//! | `max_position_embeddings`, `rms_norm_eps` | 131072, 1e-5 | 524288, 1e-6 |
//! | `rope_theta` | 500000, pairs of neighbours | 10000 |
//! | biases | none, or everywhere (`use_bias`) | of queries, keys and values |
//! | tied embedding | yes | no |

use super::{
    architecture::{Architecture, Gguf},
    llama::LLAMA,
};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Result, Rope,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults},
        rope::json::{self as rope, RopeDefaults},
    },
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::op::{Nonlinearity, RopePairing};

const NAMES: FieldNames = FieldNames::HUGGING_FACE;

/// ERNIE 4.5 and Seed-OSS.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "ernie4_5",
        config: ernie,
        harmless: &[],
        gguf: Some(Gguf {
            name: "ernie4_5",
            config: |keys| from_gguf(keys, "ernie4_5", RopePairing::Neighbours),
            tensors: Names::GGUF,
            export: None,
        }),
        writable: false,
        ..LLAMA
    },
    Architecture {
        name: "seed_oss",
        config: seed,
        harmless: &["residual_dropout"],
        gguf: Some(Gguf {
            name: "seed_oss",
            config: |keys| from_gguf(keys, "seed_oss", RopePairing::Halves),
            tensors: Names {
                own: &[TensorName::of(&[Part::MlpNorm], "blk.{}.post_attention_norm")],
                ..Names::GGUF
            },
            export: None,
        }),
        writable: false,
        ..LLAMA
    },
];

fn ernie(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        heads: Some(16),
        kv_heads: Some(2),
        head_dim: Some(128),
        context: 131_072,
        eps: 1e-5,
        tied: true,
        ..Defaults::LLAMA
    };
    let mut config = hugging_face::decoder(fields, "ernie4_5", &NAMES, &defaults)?;
    let biased = fields.flag("use_bias")?.unwrap_or(false);
    config.biases = Biases::of(biased, biased);
    let rope = rope::read(fields, RopeDefaults { theta: 500_000.0, ..RopeDefaults::of(&config) })?;
    config.rotate_all(Rope { pairing: RopePairing::Neighbours, ..rope });
    config.checked(&NAMES)
}

fn seed(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        heads: Some(80),
        kv_heads: Some(8),
        head_dim: Some(128),
        context: 524_288,
        ..Defaults::LLAMA
    };
    let mut config = hugging_face::decoder(fields, "seed_oss", &NAMES, &defaults)?;
    let attention = fields.flag("attention_bias")?.unwrap_or(true);
    let output = fields.flag("attention_out_bias")?.unwrap_or(false);
    let mlp = fields.flag("mlp_bias")?.unwrap_or(false);
    config.biases = Biases { output, ..Biases::of(attention, mlp) };
    config.rotate_all(rope::read(fields, RopeDefaults::of(&config))?);
    config.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>, architecture: &'static str, pairing: RopePairing) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, architecture, &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, pairing, false)?);
    config.checked(&FieldNames::GGUF)
}
