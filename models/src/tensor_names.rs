//! What files call the tensors of a decoder, and how they lie in them.

use crate::config::{Architecture, ROPE_DIVISORS};

/// A matrix or vector of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    Embedding,
    Positions,
    ProjectIn,
    ProjectOut,
    FinalNorm,
    Head,
    AttentionNorm,
    Query,
    Key,
    Value,
    QueryNorm,
    KeyNorm,
    Output,
    MlpNorm,
    Gate,
    Up,
    Down,
}

/// Who named the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    /// We did: as in programs, each in one piece. For weights that are made up.
    Plain,
    /// Hugging Face transformers, in safetensors files.
    HuggingFace {
        /// Whose names.
        architecture: Architecture,
        /// Whether the prefix of the inner model is left out, as in files saved without the head.
        bare: bool,
    },
    /// llama.cpp, in GGUF files.
    Gguf(Architecture),
}

/// Where a part is in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The tensor, without `.weight` or `.bias`.
    pub(crate) tensor: String,
    /// Which of its outputs are the part's.
    pub(crate) cut: Cut,
    /// Whether its matrix is stored as `[inputs, outputs]`.
    pub(crate) transposed: bool,
}

/// Which outputs of a tensor are a part's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// All.
    Whole,
    /// One third: 0, 1 or 2.
    Third(usize),
    /// All but so many at the start.
    Behind(usize),
}

impl Cut {
    /// The outputs of the whole tensor, and where those of a part that has `outputs` start.
    pub(crate) const fn of(self, outputs: usize) -> (usize, usize) {
        match self {
            Self::Whole => (outputs, 0),
            Self::Third(index) => (3 * outputs, index * outputs),
            Self::Behind(start) => (start + outputs, start),
        }
    }
}

impl Part {
    /// Every part.
    const ALL: [Self; 17] = [
        Self::Embedding,
        Self::Positions,
        Self::ProjectIn,
        Self::ProjectOut,
        Self::FinalNorm,
        Self::Head,
        Self::AttentionNorm,
        Self::Query,
        Self::Key,
        Self::Value,
        Self::QueryNorm,
        Self::KeyNorm,
        Self::Output,
        Self::MlpNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// The part, and its layer, that has this name in programs.
    pub(crate) fn of_value(name: &str) -> Option<(Self, usize)> {
        let layer = match name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
            Some((layer, _)) => layer.parse().ok()?,
            None => 0,
        };
        let part = Self::ALL.into_iter().find(|part| part.value_name(layer) == name)?;
        Some((part, layer))
    }

    /// The name in programs; `{}` is the number of the layer.
    const fn plain(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Positions => "positions",
            Self::ProjectIn => "project_in",
            Self::ProjectOut => "project_out",
            Self::FinalNorm => "final_norm",
            Self::Head => "head",
            Self::AttentionNorm => "layers.{}.attention_norm",
            Self::Query => "layers.{}.query",
            Self::Key => "layers.{}.key",
            Self::Value => "layers.{}.value",
            Self::QueryNorm => "layers.{}.query_norm",
            Self::KeyNorm => "layers.{}.key_norm",
            Self::Output => "layers.{}.output",
            Self::MlpNorm => "layers.{}.mlp_norm",
            Self::Gate => "layers.{}.gate",
            Self::Up => "layers.{}.up",
            Self::Down => "layers.{}.down",
        }
    }

    const fn llama(self) -> &'static str {
        match self {
            Self::Embedding => "embed_tokens",
            Self::FinalNorm => "norm",
            Self::Head => "lm_head",
            Self::AttentionNorm => "layers.{}.input_layernorm",
            Self::Query => "layers.{}.self_attn.q_proj",
            Self::Key => "layers.{}.self_attn.k_proj",
            Self::Value => "layers.{}.self_attn.v_proj",
            Self::QueryNorm => "layers.{}.self_attn.q_norm",
            Self::KeyNorm => "layers.{}.self_attn.k_norm",
            Self::Output => "layers.{}.self_attn.o_proj",
            Self::MlpNorm => "layers.{}.post_attention_layernorm",
            Self::Gate => "layers.{}.mlp.gate_proj",
            Self::Up => "layers.{}.mlp.up_proj",
            Self::Down => "layers.{}.mlp.down_proj",
            Self::Positions | Self::ProjectIn | Self::ProjectOut => self.plain(),
        }
    }

    const fn gpt2(self) -> &'static str {
        match self {
            Self::Embedding => "wte",
            Self::Positions => "wpe",
            Self::FinalNorm => "ln_f",
            Self::Head => "lm_head",
            Self::AttentionNorm => "h.{}.ln_1",
            Self::Query | Self::Key | Self::Value => "h.{}.attn.c_attn",
            Self::Output => "h.{}.attn.c_proj",
            Self::MlpNorm => "h.{}.ln_2",
            Self::Up => "h.{}.mlp.c_fc",
            Self::Down => "h.{}.mlp.c_proj",
            Self::ProjectIn | Self::ProjectOut | Self::QueryNorm | Self::KeyNorm | Self::Gate => self.plain(),
        }
    }

    const fn opt(self) -> &'static str {
        match self {
            Self::Embedding => "decoder.embed_tokens",
            Self::Positions => "decoder.embed_positions",
            Self::ProjectIn => "decoder.project_in",
            Self::ProjectOut => "decoder.project_out",
            Self::FinalNorm => "decoder.final_layer_norm",
            Self::Head => "lm_head",
            Self::AttentionNorm => "decoder.layers.{}.self_attn_layer_norm",
            Self::Query => "decoder.layers.{}.self_attn.q_proj",
            Self::Key => "decoder.layers.{}.self_attn.k_proj",
            Self::Value => "decoder.layers.{}.self_attn.v_proj",
            Self::Output => "decoder.layers.{}.self_attn.out_proj",
            Self::MlpNorm => "decoder.layers.{}.final_layer_norm",
            Self::Up => "decoder.layers.{}.fc1",
            Self::Down => "decoder.layers.{}.fc2",
            Self::QueryNorm | Self::KeyNorm | Self::Gate => self.plain(),
        }
    }

    const fn gguf(self) -> &'static str {
        match self {
            Self::Embedding => "token_embd",
            Self::Positions => "position_embd",
            Self::FinalNorm => "output_norm",
            Self::Head => "output",
            Self::AttentionNorm => "blk.{}.attn_norm",
            Self::Query => "blk.{}.attn_q",
            Self::Key => "blk.{}.attn_k",
            Self::Value => "blk.{}.attn_v",
            Self::QueryNorm => "blk.{}.attn_q_norm",
            Self::KeyNorm => "blk.{}.attn_k_norm",
            Self::Output => "blk.{}.attn_output",
            Self::MlpNorm => "blk.{}.ffn_norm",
            Self::Gate => "blk.{}.ffn_gate",
            Self::Up => "blk.{}.ffn_up",
            Self::Down => "blk.{}.ffn_down",
            Self::ProjectIn | Self::ProjectOut => self.plain(),
        }
    }

    /// Which third of a fused projection it is.
    const fn third(self) -> Option<usize> {
        match self {
            Self::Query => Some(0),
            Self::Key => Some(1),
            Self::Value => Some(2),
            _ => None,
        }
    }

    /// The name in programs.
    pub(crate) fn value_name(self, layer: usize) -> String {
        numbered(self.plain(), layer)
    }
}

impl Naming {
    /// The naming of transformers' files of an architecture; `has` tells which tensors a file has.
    pub(crate) fn hugging_face(architecture: Architecture, has: impl Fn(&str) -> bool) -> Self {
        let bare = Self::HuggingFace { architecture, bare: true };
        let embedding = format!("{}.weight", bare.place(Part::Embedding, 0).tensor);
        Self::HuggingFace { architecture, bare: has(&embedding) }
    }

    /// Where a part is in a file. Parts outside of the layers ignore the number.
    pub(crate) fn place(self, part: Part, layer: usize) -> Place {
        let whole = |tensor: String| Place { tensor, cut: Cut::Whole, transposed: false };
        match self {
            Self::Plain => whole(part.value_name(layer)),
            Self::HuggingFace { architecture, bare } => {
                let (name, prefix) = match architecture {
                    Architecture::Gpt2 => (part.gpt2(), "transformer."),
                    Architecture::Opt => (part.opt(), "model."),
                    _ => (part.llama(), "model."),
                };
                let prefix = if bare || part == Part::Head { "" } else { prefix };
                let place = whole(format!("{prefix}{}", numbered(name, layer)));
                match (architecture, part) {
                    (Architecture::Gpt2, Part::Query | Part::Key | Part::Value) => {
                        Place { cut: part.third().map_or(Cut::Whole, Cut::Third), transposed: true, ..place }
                    }
                    (Architecture::Gpt2, Part::Output | Part::Up | Part::Down) => {
                        Place { transposed: true, ..place }
                    }
                    // The first two rows were for padding.
                    (Architecture::Opt, Part::Positions) => Place { cut: Cut::Behind(2), ..place },
                    _ => place,
                }
            }
            Self::Gguf(Architecture::Gpt2) if part.third().is_some() => {
                let cut = part.third().map_or(Cut::Whole, Cut::Third);
                Place { cut, ..whole(numbered("blk.{}.attn_qkv", layer)) }
            }
            Self::Gguf(_) => whole(numbered(part.gguf(), layer)),
        }
    }

    /// Whether a tensor of a file is no weight of the model: tables of rotary embeddings, which follow from the
    /// configuration, their divisors, which are read as part of it, masks, and numbers of versions.
    pub(crate) fn is_no_weight(self, tensor: &str) -> bool {
        match self {
            Self::Plain => false,
            Self::HuggingFace { architecture: Architecture::Gpt2, .. } => {
                tensor.ends_with(".attn.bias") || tensor.ends_with(".attn.masked_bias")
            }
            Self::HuggingFace { architecture: Architecture::Opt, .. } => tensor.ends_with("decoder.version"),
            Self::HuggingFace { .. } => tensor.ends_with("rotary_emb.inv_freq"),
            Self::Gguf(_) => tensor == ROPE_DIVISORS,
        }
    }
}

fn numbered(pattern: &str, layer: usize) -> String {
    pattern.replacen("{}", &layer.to_string(), 1)
}
