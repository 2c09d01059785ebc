//! The input of the first layer.

use super::Builder;
use crate::tensor_names::Part;
use dsrun_core::{Result, program::ValueId};

impl Builder<'_> {
    /// Looks up the embeddings of the step's tokens.
    pub(crate) fn embed(&mut self, table: ValueId) -> Result<ValueId> {
        self.step.embed(table, None)
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
