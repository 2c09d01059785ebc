//! What files call the tensors of a decoder.

/// A matrix or vector of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    Embedding,
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

/// Who named the tensors of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    /// Hugging Face transformers, in safetensors files.
    HuggingFace,
    /// llama.cpp, in GGUF files.
    Gguf,
}

impl Part {
    /// The names in programs, in safetensors files and in GGUF files; `{}` is the number of the layer.
    const fn names(self) -> [&'static str; 3] {
        match self {
            Self::Embedding => ["embedding", "model.embed_tokens", "token_embd"],
            Self::FinalNorm => ["final_norm", "model.norm", "output_norm"],
            Self::Head => ["head", "lm_head", "output"],
            Self::AttentionNorm => {
                ["layers.{}.attention_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"]
            }
            Self::Query => ["layers.{}.query", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"],
            Self::Key => ["layers.{}.key", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"],
            Self::Value => ["layers.{}.value", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"],
            Self::QueryNorm => {
                ["layers.{}.query_norm", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"]
            }
            Self::KeyNorm => ["layers.{}.key_norm", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"],
            Self::Output => ["layers.{}.output", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"],
            Self::MlpNorm => {
                ["layers.{}.mlp_norm", "model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"]
            }
            Self::Gate => ["layers.{}.gate", "model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"],
            Self::Up => ["layers.{}.up", "model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"],
            Self::Down => ["layers.{}.down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"],
        }
    }

    /// The name in programs.
    pub(crate) fn value_name(self, layer: usize) -> String {
        numbered(self.names()[0], layer)
    }
}

impl Naming {
    /// The name of a part in a file, without `.weight` or `.bias`. Parts outside of the layers ignore the number.
    pub(crate) fn tensor(self, part: Part, layer: usize) -> String {
        let [_, hugging_face, gguf] = part.names();
        numbered(if self == Self::Gguf { gguf } else { hugging_face }, layer)
    }

    /// Whether a tensor of a file is no weight of the model: tables of rotary embeddings, which follow from the
    /// configuration, and their divisors, which are read as part of it.
    pub(crate) fn is_no_weight(self, tensor: &str) -> bool {
        match self {
            Self::HuggingFace => tensor.ends_with("rotary_emb.inv_freq"),
            Self::Gguf => tensor == crate::config::ROPE_DIVISORS,
        }
    }
}

fn numbered(pattern: &str, layer: usize) -> String {
    pattern.replacen("{}", &layer.to_string(), 1)
}
