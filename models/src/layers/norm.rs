//! RMS norm and layer norm.

use super::Builder;
use crate::{config::Norm, tensor_names::Part};
use dsrun_core::{
    Result,
    op::{LayerNorm, RmsNorm},
    program::ValueId,
};

/// The weight and the bias of a norm, if it has them.
pub(super) type NormWeights = [Option<ValueId>; 2];

impl Builder<'_> {
    /// Normalises every row of `x`.
    pub(crate) fn norm(&mut self, x: ValueId, part: Part) -> Result<ValueId> {
        let [width, _] = part.shape(self.config);
        self.norm_runs(x, part, width)
    }

    /// Normalises every run of `width` consecutive features of `x` separately.
    pub(super) fn norm_runs(&mut self, x: ValueId, part: Part, width: usize) -> Result<ValueId> {
        let weights = self.norm_weights(part, width)?;
        self.normed(x, weights)
    }

    pub(super) fn norm_weights(&mut self, part: Part, width: usize) -> Result<NormWeights> {
        let program = &mut self.step.program;
        let (has_weight, has_bias) = match self.config.norm {
            Norm::Rms { .. } => (true, false),
            Norm::Layer { weight, bias } => (weight, bias),
        };
        let weight = has_weight.then(|| self.weights.vector(program, part, self.layer, width)).transpose()?;
        let bias = has_bias.then(|| self.weights.bias(program, part, self.layer, width)).transpose()?;
        Ok([weight, bias])
    }

    pub(super) fn normed(&mut self, x: ValueId, [weight, bias]: NormWeights) -> Result<ValueId> {
        let (program, eps) = (&mut self.step.program, self.config.eps);
        match self.config.norm {
            Norm::Rms { weight_offset } => program.call(RmsNorm { eps, weight_offset }, [Some(x), weight]),
            Norm::Layer { .. } => program.call(LayerNorm { eps }, [Some(x), weight, bias]),
        }
    }
}
