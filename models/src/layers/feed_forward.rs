//! MLPs with and without a gate.

use super::Builder;
use crate::tensor_names::Part;
use dsrun_core::{
    Result,
    op::{Activation, GateLayout, GatedActivation},
    program::ValueId,
};

impl Builder<'_> {
    /// Computes `down(f(up(x)))`.
    pub(crate) fn mlp(&mut self, x: ValueId) -> Result<ValueId> {
        let up = self.linear(x, Part::Up)?;
        let activation = Activation { function: self.config.activation, limit: 0.0 };
        let activated = self.step.program.call(activation, [Some(up), None])?;
        self.linear(activated, Part::Down)
    }

    /// Computes `down(f(gate(x)) * up(x))`.
    pub(crate) fn gated_mlp(&mut self, x: ValueId) -> Result<ValueId> {
        let gate = self.linear(x, Part::Gate)?;
        let up = self.linear(x, Part::Up)?;
        let function = self.config.activation;
        let gated = GatedActivation { function, layout: GateLayout::Separate, limit: 0.0, up_offset: 0.0 };
        let gated = self.step.program.call(gated, [Some(gate), Some(up), None])?;
        self.linear(gated, Part::Down)
    }
}
