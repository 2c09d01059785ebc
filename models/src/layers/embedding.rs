//! The input of the first layer.

use super::Builder;
use crate::tensor_names::Part;
use dsrun_core::{DType, Result, program::ValueId};
use half::{bf16, f16};

impl Builder<'_> {
    /// Looks up the embeddings of the step's tokens.
    pub(crate) fn embed(&mut self, table: ValueId) -> Result<ValueId> {
        self.step.embed(table, None)
    }

    /// Looks up the embeddings of the step's tokens, multiplied by the square root of the hidden size.
    pub(crate) fn embed_by_width(&mut self, table: ValueId) -> Result<ValueId> {
        self.embed_times(table, (self.config.hidden as f64).sqrt() as f32)
    }

    /// Looks up the embeddings of the step's tokens, multiplied by the factor of the configuration.
    pub(crate) fn embed_scaled(&mut self, table: ValueId) -> Result<ValueId> {
        self.embed_times(table, self.config.embedding_scale)
    }

    /// The factor is rounded to the type of activations, as it was in training and as transformers does.
    fn embed_times(&mut self, table: ValueId, factor: f32) -> Result<ValueId> {
        let factor = match self.options.activation {
            DType::BF16 => bf16::from_f32(factor).to_f32(),
            DType::F16 => f16::from_f32(factor).to_f32(),
            _ => factor,
        };
        let x = self.embed(table)?;
        self.add(x, x, factor - 1.0)
    }

    /// Looks up the embeddings of the step's tokens and adds the learned vectors of their positions.
    pub(crate) fn embed_with_positions(&mut self, table: ValueId) -> Result<ValueId> {
        let positions = self.matrix(Part::Positions)?;
        self.step.embed(table, Some(positions))
    }

    /// Looks up the learned vectors of the positions of the step's tokens.
    pub(crate) fn embed_positions(&mut self, table: ValueId) -> Result<ValueId> {
        self.step.embed_positions(table)
    }
}
