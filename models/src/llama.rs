//! The Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3. Read this first to add a model.
//!
//! A layer is `x + attention(norm(x))`, then `x + mlp(norm(x))`. The families differ in switches of
//! [`DecoderConfig`](crate::config::DecoderConfig) only. Everything is written as plain primitives, one op per line of the
//! formula: fusing, sharding and quantising are passes over the program, not the model's business.
//!
//! Matrices have the format that the file has, or the one that [`Storage`](crate::step::Storage) asks for. Vectors (norms
//! and biases) are held as f32 whatever the file has: f32 represents all of them exactly, they are read once per row, and
//! kernels need only one kind.

use crate::{
    config::DecoderConfig,
    declare::Declare,
    step::{DecoderStep, Heads, ProgramOptions},
    tensor_names::Part,
};
use dsrun_core::{
    Error, Result,
    op::{Add, GateLayout, GatedActivation, Linear, RmsNorm, Rope},
    program::{Program, ValueId},
};

/// Builds the program of a model out of the tensors that `weights` finds.
pub(crate) fn program<'a>(
    config: &'a DecoderConfig,
    options: ProgramOptions,
    mut weights: Declare<'a>,
) -> Result<Program> {
    let vocabulary = [config.vocabulary, config.hidden];
    let mut step = DecoderStep::begin(config.architecture.name(), config.vocabulary, options)?;
    let frequencies = config.rope.inverse_frequencies(config.head_dim);
    let frequencies = weights.constant(&mut step.program, "inverse_frequencies", frequencies)?;
    let embedding = weights.matrix(&mut step.program, Part::Embedding, 0, vocabulary)?;
    let mut x = step.embed(embedding)?;

    let mut model = Llama { config, options, step, weights, frequencies, layer: 0 };
    for layer in 0..config.layers {
        model.layer = layer;
        let normed = model.norm(x, Part::AttentionNorm, config.hidden)?;
        let attended = model.attention(normed)?;
        x = model.add(x, attended)?;
        let normed = model.norm(x, Part::MlpNorm, config.hidden)?;
        let processed = model.mlp(normed)?;
        x = model.add(x, processed)?;
    }
    let x = model.norm(x, Part::FinalNorm, config.hidden)?;

    let Llama { mut step, mut weights, .. } = model;
    let head = match config.tied {
        true => embedding,
        false => weights.matrix(&mut step.program, Part::Head, 0, vocabulary)?,
    };
    step.finish(x, head)
}

struct Llama<'a> {
    config: &'a DecoderConfig,
    options: ProgramOptions,
    step: DecoderStep,
    weights: Declare<'a>,
    /// The rotary frequencies, shared by all layers.
    frequencies: ValueId,
    /// The layer that is being built.
    layer: usize,
}

impl Llama<'_> {
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
        query = self.rotate(query, heads)?;
        key = self.rotate(key, kv_heads)?;
        let window = self.config.windows.get(self.layer).copied().flatten();
        let attended = self.step.attention(Heads { query, key, value, heads, kv_heads, head_dim, window })?;
        self.linear(attended, Part::Output, [hidden, width], biases.output)
    }

    fn mlp(&mut self, x: ValueId) -> Result<ValueId> {
        let DecoderConfig { hidden, intermediate, biases, activation, .. } = *self.config;
        let gate = self.linear(x, Part::Gate, [intermediate, hidden], biases.gate)?;
        let up = self.linear(x, Part::Up, [intermediate, hidden], biases.up)?;
        let gated = GatedActivation { function: activation, layout: GateLayout::Separate, limit: 0.0 };
        let gated = self.step.program.call(gated, [Some(gate), Some(up), None])?;
        self.linear(gated, Part::Down, [hidden, intermediate], biases.down)
    }

    fn linear(&mut self, x: ValueId, part: Part, shape: [usize; 2], bias: bool) -> Result<ValueId> {
        let program = &mut self.step.program;
        let weight = self.weights.matrix(program, part, self.layer, shape)?;
        let bias = bias.then(|| self.weights.bias(program, part, self.layer, shape[0])).transpose()?;
        program.call(Linear { dtype: self.options.activation }, [Some(x), Some(weight), bias])
    }

    /// Norms runs of `width` features: all of a row, or each head.
    fn norm(&mut self, x: ValueId, part: Part, width: usize) -> Result<ValueId> {
        let program = &mut self.step.program;
        let weight = self.weights.vector(program, part, self.layer, width)?;
        program.call(RmsNorm { eps: self.config.eps, weight_offset: 0.0 }, [x, weight].map(Some))
    }

    fn rotate(&mut self, x: ValueId, heads: usize) -> Result<ValueId> {
        let heads =
            u32::try_from(heads).map_err(|_| Error::invalid(format!("{heads} heads are too many")))?;
        let rope = Rope { heads, pairing: self.config.rope.pairing, scale: 1.0 };
        self.step.program.call(rope, [x, self.step.positions, self.frequencies].map(Some))
    }

    fn add(&mut self, a: ValueId, b: ValueId) -> Result<ValueId> {
        self.step.program.call(Add { alpha: 1.0 }, [Some(a), Some(b), None, None])
    }
}
