//! The building blocks that families write their layers with: each is a method of [`Builder`].
//!
//! A block adds plain primitives to the program, one op per line of its formula. Fusing, sharding and quantising are passes
//! over the program and do not concern the model.
//!
//! Matrices keep the format of the file, or get the one that [`Storage`](crate::step::Storage) asks for. Vectors (norm
//! weights and biases) are stored as f32 whatever the file has: f32 represents all of them exactly, they are read once per
//! row, and kernels need to support only one type.

mod attention;
mod embedding;
mod encoder;
mod feed_forward;
mod latent;
mod norm;

use crate::{
    config::{DecoderConfig, Rope},
    declare::Declare,
    step::{ProgramOptions, StepBuilder},
    tensor_names::Part,
};
use dsrun_core::{
    DType, Result,
    op::{Add, Linear},
    program::{Program, ValueId},
};
use norm::NormWeights;
use std::sync::Arc;

/// A function that adds a part of the model to the program and returns its result.
pub(crate) type Block = fn(&mut Builder<'_>, ValueId) -> Result<ValueId>;

/// The two blocks that a family defines; final norm and head are the same in all families.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    /// Takes the embedding matrix and returns the input of the first layer.
    pub(crate) embed: Block,
    /// Takes the input of a layer and returns its output.
    pub(crate) layer: Block,
}

/// Builds the program of a decoder (embedding, layers, final norm, head), or of an encoder (embedding, layers, and a classification
/// head if there is one).
pub(crate) fn program(blocks: Blocks, options: ProgramOptions, mut weights: Declare<'_>) -> Result<Program> {
    let config = weights.config;
    let mut step = match config.encoder {
        None => StepBuilder::begin(config.architecture, config.vocabulary, options)?,
        Some(_) => StepBuilder::begin_encoder(config.architecture, options)?,
    };
    let mut frequencies = Vec::new();
    for (index, rope) in config.ropes().into_iter().enumerate() {
        let name = if index == 0 { "inverse_frequencies" } else { &format!("inverse_frequencies.{index}") };
        let values = rope.inverse_frequencies(options.context.unwrap_or(config.context));
        frequencies.push((rope, weights.constant(&mut step.program, name, values)?));
    }
    let query_frequencies = latent::query_frequencies(config, options, &mut step, &mut weights)?;
    let mut build = Builder { config, options, step, weights, frequencies, query_frequencies, layer: 0 };
    let embedding = build.matrix(Part::Embedding)?;
    let mut x = (blocks.embed)(&mut build, embedding)?;
    for layer in 0..config.layers {
        build.layer = config.encoder.map_or(layer, |encoder| layer / encoder.layers_per_group);
        x = (blocks.layer)(&mut build, x)?;
    }
    if config.encoder.is_some() {
        return build.finish_encoder(x);
    }
    let weights = build.final_weights()?;
    let head = if config.tied { embedding } else { build.matrix(Part::Head)? };
    let wanted = build.step.wanted(x)?;
    let wanted = build.finish(wanted, weights)?;
    let bias = build.bias(Part::Head)?;
    let logits = build.step.logits(wanted, [Some(head), bias], [config.logit_scale, config.logit_cap])?;
    let hidden = build.finish(x, weights)?;
    build.step.finish(logits, hidden)
}

/// The weights between the last layer and the head.
#[derive(Clone, Copy)]
struct FinalWeights {
    /// The final norm, if the model has one.
    norm: Option<NormWeights>,
    /// The projection to the width of the embedding, if that differs from the hidden size.
    project: Option<ValueId>,
}

/// A program under construction.
///
/// The methods add calls to the program and declare the weights that these calls need for the current layer.
pub(crate) struct Builder<'a> {
    pub(crate) config: &'a DecoderConfig,
    pub(crate) options: ProgramOptions,
    step: StepBuilder,
    weights: Declare<'a>,
    /// The distinct rotary embeddings of the model with their frequency vectors, which layers share.
    frequencies: Vec<(&'a Arc<Rope>, ValueId)>,
    /// The frequencies of whole query heads, in models whose heads end with the part that is rotated.
    query_frequencies: Option<ValueId>,
    /// The index of the current layer.
    layer: usize,
}

impl Builder<'_> {
    /// Declares a matrix of the model or of the current layer.
    pub(crate) fn matrix(&mut self, part: Part) -> Result<ValueId> {
        self.weights.matrix(&mut self.step.program, part, self.layer)
    }

    /// Multiplies `x` by a matrix and adds the bias if the configuration has one.
    pub(crate) fn linear(&mut self, x: ValueId, part: Part) -> Result<ValueId> {
        self.linear_to(x, part, self.options.activation)
    }

    /// As [`Self::linear`], with results of this type.
    pub(crate) fn linear_to(&mut self, x: ValueId, part: Part, dtype: DType) -> Result<ValueId> {
        let (weight, bias) = (self.matrix(part)?, self.bias(part)?);
        self.step.program.call(Linear { dtype }, [Some(x), Some(weight), bias])
    }

    /// Declares the bias of a matrix, if the configuration has one.
    pub(crate) fn bias(&mut self, part: Part) -> Result<Option<ValueId>> {
        let [outputs, _] = part.shape(self.config);
        let has_bias = part.has_bias(self.config);
        let program = &mut self.step.program;
        has_bias.then(|| self.weights.bias(program, part, self.layer, outputs)).transpose()
    }

    /// Declares a vector of the current layer.
    pub(crate) fn vector(&mut self, part: Part) -> Result<ValueId> {
        let [size, _] = part.shape(self.config);
        self.weights.vector(&mut self.step.program, part, self.layer, size)
    }

    /// Computes the residual sum `x + scale * branch(x)`, with the scale of the configuration.
    pub(crate) fn residual(
        &mut self,
        x: ValueId,
        branch: impl FnOnce(&mut Self, ValueId) -> Result<ValueId>,
    ) -> Result<ValueId> {
        let y = branch(self, x)?;
        self.add(x, y, self.config.residual_scale)
    }

    /// Computes `x + attended + mlp`, for families whose attention and MLP stand beside each other.
    pub(crate) fn parallel_residual(
        &mut self,
        x: ValueId,
        attended: ValueId,
        mlp: ValueId,
    ) -> Result<ValueId> {
        self.step.program.call(Add { alpha: 1.0 }, [Some(x), Some(attended), Some(mlp), None])
    }

    /// Computes `a + alpha * b`.
    pub(crate) fn add(&mut self, a: ValueId, b: ValueId, alpha: f32) -> Result<ValueId> {
        self.step.program.call(Add { alpha }, [Some(a), Some(b), None, None])
    }

    fn final_weights(&mut self) -> Result<FinalWeights> {
        let config = self.config;
        let norm =
            config.final_norm.then(|| self.norm_weights(Part::FinalNorm, config.hidden)).transpose()?;
        let narrows = config.embedding != config.hidden;
        let project = narrows.then(|| self.matrix(Part::ProjectOut)).transpose()?;
        Ok(FinalWeights { norm, project })
    }

    /// Applies the final norm and the projection to the width of the embedding, where the model has them.
    fn finish(&mut self, mut x: ValueId, weights: FinalWeights) -> Result<ValueId> {
        if let Some(norm) = weights.norm {
            x = self.normed(x, norm)?;
        }
        if let Some(project) = weights.project {
            let linear = Linear { dtype: self.options.activation };
            x = self.step.program.call(linear, [Some(x), Some(project), None])?;
        }
        Ok(x)
    }
}
