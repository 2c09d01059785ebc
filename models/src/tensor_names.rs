//! The matrices and vectors of a model: their shapes and names, and their places in files.

use crate::config::{DecoderConfig, Encoder, Latent, Mixture, gguf::CONFIG_TENSORS};

/// A matrix of a model, or a vector such as the weight of a norm.
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
    AttentionPostNorm,
    MlpNorm,
    Gate,
    Up,
    Down,
    MlpPostNorm,
    Sinks,
    QueryDown,
    QueryDownNorm,
    QueryUp,
    Latent,
    KeyRest,
    LatentNorm,
    KeyUp,
    ValueUp,
    Router,
    SelectionBias,
    ExpertGate,
    ExpertUp,
    ExpertDown,
    SharedRouter,
    SharedGate,
    SharedUp,
    SharedDown,
    TokenTypes,
    EmbeddingNorm,
    Pooler,
    PoolerNorm,
    Classifier,
}

impl Part {
    /// Every part.
    const ALL: [Self; 42] = [
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
        Self::AttentionPostNorm,
        Self::MlpNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
        Self::MlpPostNorm,
        Self::Sinks,
        Self::QueryDown,
        Self::QueryDownNorm,
        Self::QueryUp,
        Self::Latent,
        Self::KeyRest,
        Self::LatentNorm,
        Self::KeyUp,
        Self::ValueUp,
        Self::Router,
        Self::SelectionBias,
        Self::ExpertGate,
        Self::ExpertUp,
        Self::ExpertDown,
        Self::SharedRouter,
        Self::SharedGate,
        Self::SharedUp,
        Self::SharedDown,
        Self::TokenTypes,
        Self::EmbeddingNorm,
        Self::Pooler,
        Self::PoolerNorm,
        Self::Classifier,
    ];

    /// Finds the part and its layer by the name in programs.
    pub(crate) fn of_value(name: &str) -> Option<(Self, usize)> {
        let layer = match name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
            Some((layer, _)) => layer.parse().ok()?,
            None => 0,
        };
        let part = Self::ALL.into_iter().find(|part| part.value_name(layer) == name)?;
        Some((part, layer))
    }

    /// Returns the pattern of the name in programs; `{}` stands for the index of the layer.
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
            Self::AttentionPostNorm => "layers.{}.attention_post_norm",
            Self::MlpNorm => "layers.{}.mlp_norm",
            Self::Gate => "layers.{}.gate",
            Self::Up => "layers.{}.up",
            Self::Down => "layers.{}.down",
            Self::MlpPostNorm => "layers.{}.mlp_post_norm",
            Self::Sinks => "layers.{}.sinks",
            Self::QueryDown => "layers.{}.query_down",
            Self::QueryDownNorm => "layers.{}.query_down_norm",
            Self::QueryUp => "layers.{}.query_up",
            Self::Latent => "layers.{}.latent",
            Self::KeyRest => "layers.{}.key_rest",
            Self::LatentNorm => "layers.{}.latent_norm",
            Self::KeyUp => "layers.{}.key_up",
            Self::ValueUp => "layers.{}.value_up",
            Self::Router => "layers.{}.router",
            Self::SelectionBias => "layers.{}.selection_bias",
            Self::ExpertGate => "layers.{}.expert_gate",
            Self::ExpertUp => "layers.{}.expert_up",
            Self::ExpertDown => "layers.{}.expert_down",
            Self::SharedRouter => "layers.{}.shared_router",
            Self::SharedGate => "layers.{}.shared_gate",
            Self::SharedUp => "layers.{}.shared_up",
            Self::SharedDown => "layers.{}.shared_down",
            Self::TokenTypes => "token_types",
            Self::EmbeddingNorm => "embedding_norm",
            Self::Pooler => "pooler",
            Self::PoolerNorm => "pooler_norm",
            Self::Classifier => "classifier",
        }
    }

    /// Returns the name in programs.
    pub(crate) fn value_name(self, layer: usize) -> String {
        numbered(self.plain(), layer)
    }

    /// Returns the shape of a matrix, `[outputs, inputs]`, for matrices of experts that of one of them; for the norm of a
    /// whole row and other vectors, `[features, 1]`.
    pub(crate) const fn shape(self, config: &DecoderConfig) -> [usize; 2] {
        let DecoderConfig { hidden, intermediate, embedding, .. } = *config;
        let (experts, of_expert, of_shared) = match &config.mixture {
            Some(Mixture { experts, intermediate, shared: Some(shared), .. }) => {
                (*experts, *intermediate, shared.intermediate)
            }
            Some(Mixture { experts, intermediate, .. }) => (*experts, *intermediate, 0),
            None => (0, 0, 0),
        };
        let (width, kv_width) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let latent = match config.latent {
            Some(latent) => latent,
            None => {
                Latent { query_rank: None, rank: 0, plain: 0, rotated: 0, value: config.head_dim, eps: 0.0 }
            }
        };
        let query_rank = match latent.query_rank {
            Some(rank) => rank,
            None => 0,
        };
        let (token_types, labels) = match config.encoder {
            Some(Encoder { token_types, classifier: Some(classifier), .. }) => {
                (token_types, classifier.labels)
            }
            Some(Encoder { token_types, .. }) => (token_types, 0),
            None => (0, 0),
        };
        match self {
            Self::Embedding | Self::Head => [config.vocabulary, embedding],
            // The vectors that an encoder adds to the embedding are as wide as that.
            Self::Positions if config.encoder.is_some() => [config.context, embedding],
            Self::Positions => [config.context, hidden],
            Self::ProjectIn => [hidden, embedding],
            Self::ProjectOut => [embedding, hidden],
            Self::Query => [width, hidden],
            Self::Key | Self::Value => [kv_width, hidden],
            Self::Output => [hidden, config.heads * latent.value],
            Self::Gate | Self::Up => [intermediate, hidden],
            Self::Down => [hidden, intermediate],
            Self::QueryNorm => [width, 1],
            Self::KeyNorm => [kv_width, 1],
            Self::FinalNorm
            | Self::AttentionNorm
            | Self::AttentionPostNorm
            | Self::MlpNorm
            | Self::MlpPostNorm => [hidden, 1],
            Self::Sinks => [config.heads, 1],
            Self::QueryDown => [query_rank, hidden],
            Self::QueryDownNorm => [query_rank, 1],
            Self::QueryUp => [width, query_rank],
            Self::Latent => [latent.rank, hidden],
            Self::KeyRest => [latent.rotated, hidden],
            Self::LatentNorm => [latent.rank, 1],
            Self::KeyUp => [config.heads * latent.rank, latent.plain],
            Self::ValueUp => [config.heads * latent.value, latent.rank],
            Self::Router => [experts, hidden],
            Self::SelectionBias => [experts, 1],
            Self::ExpertGate | Self::ExpertUp => [of_expert, hidden],
            Self::ExpertDown => [hidden, of_expert],
            Self::SharedRouter => [1, hidden],
            Self::SharedGate | Self::SharedUp => [of_shared, hidden],
            Self::SharedDown => [hidden, of_shared],
            Self::TokenTypes => [token_types, embedding],
            Self::EmbeddingNorm => [embedding, 1],
            Self::Pooler => [hidden, hidden],
            Self::PoolerNorm => [hidden, 1],
            Self::Classifier => [labels, hidden],
        }
    }

    /// Whether each expert has a matrix of its own.
    pub(crate) const fn is_of_experts(self) -> bool {
        matches!(self, Self::ExpertGate | Self::ExpertUp | Self::ExpertDown)
    }

    /// Whether each head has a matrix of its own.
    pub(crate) const fn is_of_heads(self) -> bool {
        matches!(self, Self::KeyUp | Self::ValueUp)
    }

    /// Whether a matrix has a bias.
    pub(crate) const fn has_bias(self, config: &DecoderConfig) -> bool {
        let biases = &config.biases;
        match self {
            Self::Query => biases.query,
            Self::Key => biases.key,
            Self::Value => biases.value,
            Self::Output => biases.output,
            Self::Gate => biases.gate,
            Self::Up => biases.up,
            Self::Down => biases.down,
            Self::Head => biases.head,
            Self::ProjectIn => config.encoder.is_some(),
            Self::Pooler => {
                matches!(config.encoder, Some(Encoder { classifier: Some(classifier), .. }) if classifier.bias)
            }
            Self::Classifier => true,
            Self::QueryDown | Self::Latent | Self::KeyRest => biases.key,
            Self::Router => matches!(&config.mixture, Some(mixture) if mixture.router_bias),
            Self::ExpertGate | Self::ExpertUp | Self::ExpertDown => {
                matches!(&config.mixture, Some(mixture) if mixture.biases)
            }
            _ => false,
        }
    }
}

/// The name of a tensor in files, with the parts that it holds.
#[derive(Debug)]
pub(crate) struct TensorName {
    /// The parts, concatenated along the outputs.
    parts: &'static [Part],
    /// The name without suffix; the first `{}` stands for the index of the layer, a second one for that of the expert.
    name: &'static str,
    /// The suffixes of a matrix or vector, and of the bias of a matrix.
    suffixes: [&'static str; 2],
    transposed: bool,
    /// Which outputs of the parts take turns, if not all outputs of one part come before those of the next.
    turns: Option<Turns>,
    /// The number of unused rows before the first part.
    skipped: usize,
    /// Whether the name has the prefix of the others.
    prefixed: bool,
}

/// Outputs of several parts that take turns.
#[derive(Clone, Copy, Debug)]
enum Turns {
    /// One output of each part.
    Outputs,
    /// The outputs of one head of each part.
    Heads,
}

impl TensorName {
    /// Names a tensor that holds these parts.
    pub(crate) const fn of(parts: &'static [Part], name: &'static str) -> Self {
        let suffixes = [".weight", ".bias"];
        Self { parts, name, suffixes, transposed: false, turns: None, skipped: 0, prefixed: true }
    }

    /// Says that the names end with these suffixes instead of `.weight` and `.bias`.
    pub(crate) const fn with_suffixes(self, suffixes: [&'static str; 2]) -> Self {
        Self { suffixes, ..self }
    }

    /// Says that the outputs of the parts take turns.
    pub(crate) const fn interleaved(self) -> Self {
        Self { turns: Some(Turns::Outputs), ..self }
    }

    /// Says that the heads of the parts take turns.
    pub(crate) const fn interleaved_heads(self) -> Self {
        Self { turns: Some(Turns::Heads), ..self }
    }

    /// Says that the tensor is stored as `[inputs, outputs]`.
    pub(crate) const fn transposed(self) -> Self {
        Self { transposed: true, ..self }
    }

    /// Says that the name has no prefix, as those of heads.
    pub(crate) const fn without_prefix(self) -> Self {
        Self { prefixed: false, ..self }
    }

    /// Says that the tensor begins with this many unused rows.
    pub(crate) const fn after_unused(self, skipped: usize) -> Self {
        Self { skipped, ..self }
    }
}

/// The tensor names of an architecture in one file format.
#[derive(Debug)]
pub(crate) struct Names {
    /// The possible prefixes of all names but that of the head, the usual one first.
    pub(crate) prefixes: &'static [&'static str],
    /// The names that only this family has.
    pub(crate) own: &'static [TensorName],
    /// The names that it shares with other families, used for parts that are not in `own`.
    pub(crate) shared: &'static [TensorName],
    /// Substrings of the names of tensors that are not weights of the decoder.
    pub(crate) no_weights: &'static [&'static str],
    /// The names of files in another form. A file whose first layer has this part under its name there has these names.
    pub(crate) other: Option<(Part, &'static Self)>,
}

impl Names {
    /// The names that Hugging Face transformers uses for Llama.
    pub(crate) const HUGGING_FACE: Self = Self {
        prefixes: &["model.", ""],
        own: &[],
        shared: &[
            TensorName::of(&[Part::Embedding], "embed_tokens"),
            TensorName::of(&[Part::FinalNorm], "norm"),
            TensorName::of(&[Part::Head], "lm_head"),
            TensorName::of(&[Part::AttentionNorm], "layers.{}.input_layernorm"),
            TensorName::of(&[Part::Query], "layers.{}.self_attn.q_proj"),
            TensorName::of(&[Part::Key], "layers.{}.self_attn.k_proj"),
            TensorName::of(&[Part::Value], "layers.{}.self_attn.v_proj"),
            TensorName::of(&[Part::QueryNorm], "layers.{}.self_attn.q_norm"),
            TensorName::of(&[Part::KeyNorm], "layers.{}.self_attn.k_norm"),
            TensorName::of(&[Part::Output], "layers.{}.self_attn.o_proj"),
            TensorName::of(&[Part::QueryDown], "layers.{}.self_attn.q_a_proj"),
            TensorName::of(&[Part::QueryDownNorm], "layers.{}.self_attn.q_a_layernorm"),
            TensorName::of(&[Part::QueryUp], "layers.{}.self_attn.q_b_proj"),
            TensorName::of(&[Part::Latent, Part::KeyRest], "layers.{}.self_attn.kv_a_proj_with_mqa"),
            TensorName::of(&[Part::LatentNorm], "layers.{}.self_attn.kv_a_layernorm"),
            TensorName::of(&[Part::KeyUp, Part::ValueUp], "layers.{}.self_attn.kv_b_proj"),
            TensorName::of(&[Part::MlpNorm], "layers.{}.post_attention_layernorm"),
            TensorName::of(&[Part::Gate], "layers.{}.mlp.gate_proj"),
            TensorName::of(&[Part::Up], "layers.{}.mlp.up_proj"),
            TensorName::of(&[Part::Down], "layers.{}.mlp.down_proj"),
            TensorName::of(&[Part::Router], "layers.{}.mlp.gate"),
            TensorName::of(&[Part::ExpertGate], "layers.{}.mlp.experts.{}.gate_proj"),
            TensorName::of(&[Part::ExpertUp], "layers.{}.mlp.experts.{}.up_proj"),
            TensorName::of(&[Part::ExpertDown], "layers.{}.mlp.experts.{}.down_proj"),
        ],
        // Tables of rotary embeddings follow from the configuration.
        no_weights: &["rotary_emb.inv_freq"],
        other: None,
    };

    /// The names that llama.cpp uses.
    pub(crate) const GGUF: Self = Self {
        prefixes: &[""],
        own: &[],
        shared: &[
            TensorName::of(&[Part::Embedding], "token_embd"),
            TensorName::of(&[Part::Positions], "position_embd"),
            TensorName::of(&[Part::FinalNorm], "output_norm"),
            TensorName::of(&[Part::Head], "output"),
            TensorName::of(&[Part::AttentionNorm], "blk.{}.attn_norm"),
            TensorName::of(&[Part::Query], "blk.{}.attn_q"),
            TensorName::of(&[Part::Key], "blk.{}.attn_k"),
            TensorName::of(&[Part::Value], "blk.{}.attn_v"),
            TensorName::of(&[Part::QueryNorm], "blk.{}.attn_q_norm"),
            TensorName::of(&[Part::KeyNorm], "blk.{}.attn_k_norm"),
            TensorName::of(&[Part::Output], "blk.{}.attn_output"),
            TensorName::of(&[Part::QueryDown], "blk.{}.attn_q_a"),
            TensorName::of(&[Part::QueryDownNorm], "blk.{}.attn_q_a_norm"),
            TensorName::of(&[Part::QueryUp], "blk.{}.attn_q_b"),
            TensorName::of(&[Part::Latent, Part::KeyRest], "blk.{}.attn_kv_a_mqa"),
            TensorName::of(&[Part::LatentNorm], "blk.{}.attn_kv_a_norm"),
            TensorName::of(&[Part::KeyUp], "blk.{}.attn_k_b"),
            TensorName::of(&[Part::ValueUp], "blk.{}.attn_v_b"),
            TensorName::of(&[Part::AttentionPostNorm], "blk.{}.post_attention_norm"),
            TensorName::of(&[Part::MlpNorm], "blk.{}.ffn_norm"),
            TensorName::of(&[Part::Gate], "blk.{}.ffn_gate"),
            TensorName::of(&[Part::Up], "blk.{}.ffn_up"),
            TensorName::of(&[Part::Down], "blk.{}.ffn_down"),
            TensorName::of(&[Part::MlpPostNorm], "blk.{}.post_ffw_norm"),
            TensorName::of(&[Part::Sinks], "blk.{}.attn_sinks"),
            TensorName::of(&[Part::Router], "blk.{}.ffn_gate_inp"),
            TensorName::of(&[Part::SelectionBias], "blk.{}.exp_probs_b").with_suffixes([".bias", ""]),
            TensorName::of(&[Part::ExpertGate], "blk.{}.ffn_gate_exps"),
            TensorName::of(&[Part::ExpertUp], "blk.{}.ffn_up_exps"),
            TensorName::of(&[Part::ExpertDown], "blk.{}.ffn_down_exps"),
            TensorName::of(&[Part::SharedRouter], "blk.{}.ffn_gate_inp_shexp"),
            TensorName::of(&[Part::SharedGate], "blk.{}.ffn_gate_shexp"),
            TensorName::of(&[Part::SharedUp], "blk.{}.ffn_up_shexp"),
            TensorName::of(&[Part::SharedDown], "blk.{}.ffn_down_shexp"),
        ],
        no_weights: CONFIG_TENSORS,
        other: None,
    };

    /// Finds out which prefix a file uses; `has` tells whether it contains a tensor.
    pub(crate) fn of_file(&'static self, has: impl Fn(&str) -> bool) -> Naming {
        let embedding = |prefix| {
            let tensor = self.find(Part::Embedding).map_or("", |tensor| tensor.name);
            format!("{prefix}{tensor}.weight")
        };
        let found = self.prefixes.iter().find(|prefix| has(&embedding(**prefix)));
        let prefix = found.copied().unwrap_or(self.prefixes[0]);
        let has_part = |(part, names): &(Part, &'static Self)| {
            let tensor = names.find(*part);
            tensor.is_some_and(|tensor| {
                has(&format!("{prefix}{}{}", numbered(tensor.name, 0), tensor.suffixes[0]))
            })
        };
        let names = self.other.filter(has_part).map_or(self, |(_, names)| names);
        Naming::File { names, prefix }
    }

    fn find(&self, part: Part) -> Option<&TensorName> {
        self.own.iter().chain(self.shared).find(|tensor| tensor.parts.contains(&part))
    }
}

/// The tensor names of one weight source.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Naming {
    /// The names in programs, one tensor per part: for random weights.
    Plain,
    /// The names in a file.
    File {
        /// The names of the architecture.
        names: &'static Names,
        /// The prefix that the file uses.
        prefix: &'static str,
    },
}

/// The place of a part in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The name of the tensor without its suffix. In matrices of experts that are tensors of their own, `{}` stands for the
    /// index of the expert; without it, the tensor holds all experts, its first dimension.
    pub(crate) tensor: String,
    /// The suffixes of the tensor, and of the bias.
    suffixes: [&'static str; 2],
    /// The number of outputs of the tensor before those of the part.
    pub(crate) before: usize,
    /// The number of outputs of the tensor after those of the part.
    pub(crate) after: usize,
    /// Whether its matrix is stored as `[inputs, outputs]`.
    pub(crate) transposed: bool,
    /// How outputs of several parts take turns.
    pub(crate) interleaved: Option<Interleaved>,
}

/// How outputs of several parts take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interleaved {
    /// The number of parts.
    pub(crate) parts: usize,
    /// Which of them the part is.
    pub(crate) part: usize,
    /// The number of consecutive outputs of one part.
    pub(crate) run: usize,
}

impl Place {
    /// Returns the name of the tensor.
    pub(crate) fn weight(&self) -> String {
        format!("{}{}", self.tensor, self.suffixes[0])
    }

    /// Returns the name of the bias.
    pub(crate) fn bias(&self) -> String {
        format!("{}{}", self.tensor, self.suffixes[1])
    }

    /// Returns the number of outputs of the tensor, of which the part has `own`.
    pub(crate) fn all(&self, own: usize) -> usize {
        self.before + own + self.after
    }

    /// Whether each expert is a tensor of its own.
    pub(crate) fn is_per_expert(&self) -> bool {
        self.tensor.contains("{}")
    }
}

impl Naming {
    /// Returns the place of a part in the source. Parts outside of the layers ignore `layer`.
    pub(crate) fn place(self, part: Part, layer: usize, config: &DecoderConfig) -> Place {
        let plain = Place {
            tensor: part.value_name(layer),
            suffixes: [".weight", ".bias"],
            before: 0,
            after: 0,
            transposed: false,
            interleaved: None,
        };
        let Self::File { names, prefix } = self else { return plain };
        let Some(tensor) = names.find(part) else { return plain };
        // The head stands beside the model that has the layers, which may be a part of a larger one.
        let outer = prefix.strip_suffix("model.").filter(|outer| outer.ends_with('.')).unwrap_or_default();
        let prefix = match part {
            Part::Head => outer,
            _ if !tensor.prefixed => "",
            _ => prefix,
        };
        let outputs = |parts: &[Part]| parts.iter().map(|part| part.shape(config)[0]).sum::<usize>();
        let index = tensor.parts.iter().position(|other| *other == part).unwrap_or_default();
        Place {
            tensor: format!("{prefix}{}", numbered(tensor.name, layer)),
            suffixes: tensor.suffixes,
            interleaved: tensor.turns.map(|turns| Interleaved {
                parts: tensor.parts.len(),
                part: index,
                run: match turns {
                    Turns::Outputs => 1,
                    Turns::Heads => config.head_dim,
                },
            }),
            before: tensor.skipped + outputs(&tensor.parts[..index]),
            after: outputs(&tensor.parts[index + 1..]),
            transposed: tensor.transposed,
        }
    }

    /// Whether a tensor is not a weight of the decoder.
    ///
    /// Such tensors are tables that follow from the configuration, divisors that are read as part of it, masks, version
    /// numbers, and parts of a model for other kinds of input.
    pub(crate) fn is_no_weight(self, tensor: &str) -> bool {
        match self {
            Self::Plain => false,
            Self::File { names, .. } => names.no_weights.iter().any(|part| tensor.contains(part)),
        }
    }
}

/// Puts the index of a layer or expert in the place of the first `{}`.
pub(crate) fn numbered(pattern: &str, layer: usize) -> String {
    pattern.replacen("{}", &layer.to_string(), 1)
}
