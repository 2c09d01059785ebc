//! The layers of a decoder. Read this first to add a model.
//!
//! In the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) a layer is `x + attention(norm(x))`, then
//! `x + mlp(norm(x))`: RMS norms, rotated queries and keys, a gated MLP. GPT-2 and OPT are older: layer norms, biases
//! everywhere, a learned vector for each position, an MLP without a gate; and OPT-350m norms behind the sums. The families
//! differ in switches of [`DecoderConfig`] only. Everything is written as plain primitives, one op per line of the formula:
//! fusing, sharding and quantising are passes over the program, not the model's business.
//!
//! Matrices have the format that the file has, or the one that [`Storage`](crate::step::Storage) asks for. Vectors (norms
//! and biases) are held as f32 whatever the file has: f32 represents all of them exactly, they are read once per row, and
//! kernels need only one kind.

use crate::{
    config::{DecoderConfig, Norm},
    declare::Declare,
    step::{DecoderStep, Heads, ProgramOptions},
    tensor_names::Part,
};
use dsrun_core::{
    Error, Result,
    op::{Activation, Add, GateLayout, GatedActivation, LayerNorm, Linear, RmsNorm, Rope, RopePairing},
    program::{Program, ValueId},
};

/// Builds the program of a model out of the tensors that `weights` finds.
pub(crate) fn program<'a>(
    config: &'a DecoderConfig,
    options: ProgramOptions,
    mut weights: Declare<'a>,
) -> Result<Program> {
    let mut step = DecoderStep::begin(config.architecture.name(), config.vocabulary, options)?;
    let rotation = match &config.rope {
        Some(rope) => {
            let frequencies = rope.inverse_frequencies(config.head_dim);
            let frequencies = weights.constant(&mut step.program, "inverse_frequencies", frequencies)?;
            Some(Rotation { frequencies, pairing: rope.pairing })
        }
        None => None,
    };
    let mut model = Decoder { config, options, step, weights, rotation, layer: 0 };
    let embedding = model.matrix(Part::Embedding, [config.vocabulary, config.embedding])?;
    let mut x = model.embed(embedding)?;
    for layer in 0..config.layers {
        model.layer = layer;
        x = model.residual(x, Part::AttentionNorm, Decoder::attention)?;
        x = model.residual(x, Part::MlpNorm, Decoder::mlp)?;
    }
    let last = model.last()?;
    let head = match config.tied {
        true => embedding,
        false => model.matrix(Part::Head, [config.vocabulary, config.embedding])?,
    };
    let wanted = model.step.wanted(x)?;
    let wanted = model.behind_layers(wanted, last)?;
    let logits = model.step.logits(wanted, head)?;
    let hidden = model.behind_layers(x, last)?;
    model.step.finish(logits, hidden)
}

/// The weights between the last layer and the head, where a model has some.
#[derive(Clone, Copy)]
struct Last {
    norm: Option<NormWeights>,
    project: Option<ValueId>,
}

/// Factors and bias of a norm, where it has them.
type NormWeights = [Option<ValueId>; 2];

struct Decoder<'a> {
    config: &'a DecoderConfig,
    options: ProgramOptions,
    step: DecoderStep,
    weights: Declare<'a>,
    /// How queries and keys are rotated, in models that do; shared by all layers.
    rotation: Option<Rotation>,
    /// The layer that is being built.
    layer: usize,
}

#[derive(Clone, Copy)]
struct Rotation {
    frequencies: ValueId,
    pairing: RopePairing,
}

impl Decoder<'_> {
    /// The embeddings of the step's tokens, with those of their positions where these are learned.
    fn embed(&mut self, table: ValueId) -> Result<ValueId> {
        let DecoderConfig { hidden, embedding, context, .. } = *self.config;
        let positions = match self.rotation {
            Some(_) => None,
            None => Some(self.matrix(Part::Positions, [context, hidden])?),
        };
        if embedding == hidden {
            return self.step.embed(table, positions);
        }
        let narrow = self.step.embed(table, None)?;
        let x = self.linear(narrow, Part::ProjectIn, [hidden, embedding], false)?;
        let Some(positions) = positions else { return Ok(x) };
        let positions = self.step.embed_positions(positions)?;
        self.add(x, positions)
    }

    /// A branch of a layer with its norm and its sum.
    fn residual(
        &mut self,
        x: ValueId,
        norm: Part,
        branch: fn(&mut Self, ValueId) -> Result<ValueId>,
    ) -> Result<ValueId> {
        let hidden = self.config.hidden;
        if self.config.norm_after {
            let y = branch(self, x)?;
            let sum = self.add(x, y)?;
            return self.norm(sum, norm, hidden);
        }
        let normed = self.norm(x, norm, hidden)?;
        let y = branch(self, normed)?;
        self.add(x, y)
    }

    fn last(&mut self) -> Result<Last> {
        let DecoderConfig { hidden, embedding, final_norm, .. } = *self.config;
        let norm = final_norm.then(|| self.norm_weights(Part::FinalNorm, hidden)).transpose()?;
        let narrows = embedding != hidden;
        let project = narrows.then(|| self.matrix(Part::ProjectOut, [embedding, hidden])).transpose()?;
        Ok(Last { norm, project })
    }

    /// What is between the last layer and the head.
    fn behind_layers(&mut self, mut x: ValueId, last: Last) -> Result<ValueId> {
        if let Some(norm) = last.norm {
            x = self.normed(x, norm)?;
        }
        if let Some(project) = last.project {
            let linear = Linear { dtype: self.options.activation };
            x = self.step.program.call(linear, [Some(x), Some(project), None])?;
        }
        Ok(x)
    }

    fn attention(&mut self, x: ValueId) -> Result<ValueId> {
        let DecoderConfig { hidden, heads, kv_heads, head_dim, biases, .. } = *self.config;
        let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let mut query = self.linear(x, Part::Query, [width, hidden], biases.query)?;
        let mut key = self.linear(x, Part::Key, [kv_width, hidden], biases.key)?;
        let value = self.linear(x, Part::Value, [kv_width, hidden], biases.value)?;
        if self.config.qk_norm {
            query = self.norm(query, Part::QueryNorm, head_dim)?;
            key = self.norm(key, Part::KeyNorm, head_dim)?;
        }
        if let Some(rotation) = self.rotation {
            query = self.rotate(query, heads, rotation)?;
            key = self.rotate(key, kv_heads, rotation)?;
        }
        let window = self.config.windows.get(self.layer).copied().flatten();
        let scale = self.config.score_scale(self.layer);
        let heads = Heads { query, key, value, heads, kv_heads, head_dim, scale, window };
        let attended = self.step.attention(heads)?;
        self.linear(attended, Part::Output, [hidden, width], biases.output)
    }

    fn mlp(&mut self, x: ValueId) -> Result<ValueId> {
        let DecoderConfig { hidden, intermediate, biases, activation: function, .. } = *self.config;
        let activated = if self.config.gated {
            let gate = self.linear(x, Part::Gate, [intermediate, hidden], biases.gate)?;
            let up = self.linear(x, Part::Up, [intermediate, hidden], biases.up)?;
            let gated = GatedActivation { function, layout: GateLayout::Separate, limit: 0.0 };
            self.step.program.call(gated, [Some(gate), Some(up), None])?
        } else {
            let up = self.linear(x, Part::Up, [intermediate, hidden], biases.up)?;
            self.step.program.call(Activation { function, limit: 0.0 }, [Some(up), None])?
        };
        self.linear(activated, Part::Down, [hidden, intermediate], biases.down)
    }

    fn matrix(&mut self, part: Part, shape: [usize; 2]) -> Result<ValueId> {
        self.weights.matrix(&mut self.step.program, part, self.layer, shape)
    }

    fn linear(&mut self, x: ValueId, part: Part, shape: [usize; 2], bias: bool) -> Result<ValueId> {
        let weight = self.matrix(part, shape)?;
        let program = &mut self.step.program;
        let bias = bias.then(|| self.weights.bias(program, part, self.layer, shape[0])).transpose()?;
        program.call(Linear { dtype: self.options.activation }, [Some(x), Some(weight), bias])
    }

    /// Norms runs of `width` features: all of a row, or each head.
    fn norm(&mut self, x: ValueId, part: Part, width: usize) -> Result<ValueId> {
        let weights = self.norm_weights(part, width)?;
        self.normed(x, weights)
    }

    fn norm_weights(&mut self, part: Part, width: usize) -> Result<NormWeights> {
        let program = &mut self.step.program;
        let (has_weight, has_bias) = match self.config.norm {
            Norm::Rms => (true, false),
            Norm::Layer { affine } => (affine, affine),
        };
        let weight = has_weight.then(|| self.weights.vector(program, part, self.layer, width)).transpose()?;
        let bias = has_bias.then(|| self.weights.bias(program, part, self.layer, width)).transpose()?;
        Ok([weight, bias])
    }

    fn normed(&mut self, x: ValueId, [weight, bias]: NormWeights) -> Result<ValueId> {
        let (program, eps) = (&mut self.step.program, self.config.eps);
        match self.config.norm {
            Norm::Rms => program.call(RmsNorm { eps, weight_offset: 0.0 }, [Some(x), weight]),
            Norm::Layer { .. } => program.call(LayerNorm { eps }, [Some(x), weight, bias]),
        }
    }

    fn rotate(&mut self, x: ValueId, heads: usize, rotation: Rotation) -> Result<ValueId> {
        let heads =
            u32::try_from(heads).map_err(|_| Error::invalid(format!("{heads} heads are too many")))?;
        let rope = Rope { heads, pairing: rotation.pairing, scale: 1.0 };
        self.step.program.call(rope, [x, self.step.positions, rotation.frequencies].map(Some))
    }

    fn add(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.step.program.call(Add { alpha: 1.0 }, [Some(a), Some(b), None, None])
    }
}
