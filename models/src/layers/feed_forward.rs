//! MLPs with and without a gate, and mixtures of experts.

use super::Builder;
use crate::{config::Mixture, tensor_names::Part};
use dsrun_core::{
    DType, Error, Result,
    op::{
        Activation, GateLayout, GatedActivation, GroupedLinear, MoeCombine, MoeGroup, MoeRoute, RouterNorm,
        RouterScore,
    },
    program::ValueId,
};

/// The experts of the tokens of a step, with their weights and the tables that the experts' linear layers share.
#[derive(Clone, Copy)]
struct Routed {
    experts: ValueId,
    weights: ValueId,
    order: ValueId,
    starts: ValueId,
}

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
        let gated = self.gated(gate, up, [0.0, 0.0])?;
        self.linear(gated, Part::Down)
    }

    /// Computes the mixture of experts of the layer, or its gated MLP if it has none.
    pub(crate) fn experts_or_mlp(&mut self, x: ValueId) -> Result<ValueId> {
        match self.config.mixture_of(self.layer) {
            Some(mixture) => self.experts(x, mixture),
            None => self.gated_mlp(x),
        }
    }

    /// Computes `sum_j weight_j * expert_j(x) (+ shared(x))` over the experts `j` that the router chooses.
    fn experts(&mut self, x: ValueId, mixture: &Mixture) -> Result<ValueId> {
        let count = u32::try_from(mixture.experts)
            .map_err(|_| Error::invalid(format!("{} experts are too many", mixture.experts)))?;
        let logits = self.linear_to(x, Part::Router, DType::F32)?;
        let selection_bias = mixture.selection_bias.then(|| self.vector(Part::SelectionBias)).transpose()?;
        let program = &mut self.step.program;
        let operands = [Some(logits), None, selection_bias, None, None];
        let [experts, weights] = pair(program.calls(mixture.route, operands)?)?;
        let [order, starts] = pair(program.calls(MoeGroup { count, first_expert: 0 }, [Some(experts)])?)?;
        let mut routed = Routed { experts, weights, order, starts };
        let combine = MoeCombine { count, first_expert: 0 };
        let mut inputs = x;
        if mixture.weighted_inputs {
            inputs = program.call(combine, [x, weights, experts].map(Some))?;
            // The softmax over the one chosen expert: its output has the weight 1.
            let one = MoeRoute {
                score: RouterScore::SoftmaxOfSelected,
                norm: RouterNorm::None,
                scale: 1.0,
                ..mixture.route
            };
            let operands = [Some(logits), None, None, None, Some(experts)];
            [_, routed.weights] = pair(program.calls(one, operands)?)?;
        }
        let gate = self.grouped_linear(inputs, Part::ExpertGate, count, routed)?;
        let up = self.grouped_linear(inputs, Part::ExpertUp, count, routed)?;
        let gated = self.gated(gate, up, [mixture.limit, mixture.up_offset])?;
        let down = self.grouped_linear(gated, Part::ExpertDown, count, routed)?;
        let y = self.step.program.call(combine, [down, routed.weights, experts].map(Some))?;
        let Some(shared) = mixture.shared else { return Ok(y) };
        let gate = self.linear(x, Part::SharedGate)?;
        let up = self.linear(x, Part::SharedUp)?;
        let gated = self.gated(gate, up, [0.0, 0.0])?;
        let mut other = self.linear(gated, Part::SharedDown)?;
        if shared.gated {
            // A router of one expert, whose weight is the sigmoid of the logit.
            let route = MoeRoute { score: RouterScore::Sigmoid, ..crate::config::mixture::SOFTMAX };
            let logit = self.linear_to(x, Part::SharedRouter, DType::F32)?;
            let program = &mut self.step.program;
            let [expert, weight] = pair(program.calls(route, [Some(logit), None, None, None, None])?)?;
            let scale = MoeCombine { count: 1, first_expert: 0 };
            other = program.call(scale, [other, weight, expert].map(Some))?;
        }
        self.add(y, other, 1.0)
    }

    /// Computes `f(gate) * (up + offset)`, with bounds.
    fn gated(&mut self, gate: ValueId, up: ValueId, [limit, up_offset]: [f32; 2]) -> Result<ValueId> {
        let function = self.config.activation;
        let gated = GatedActivation { function, layout: GateLayout::Separate, limit, up_offset };
        self.step.program.call(gated, [Some(gate), Some(up), None])
    }

    /// Multiplies the inputs of each token's experts by their matrices, and adds their biases if they have some.
    fn grouped_linear(&mut self, x: ValueId, part: Part, count: u32, routed: Routed) -> Result<ValueId> {
        let weight = self.matrix(part)?;
        let bias = self.bias(part)?;
        let op = GroupedLinear { dtype: self.options.activation, count, first_expert: 0 };
        let Routed { experts, order, starts, .. } = routed;
        let operands = [Some(x), Some(weight), Some(experts), bias, Some(order), Some(starts)];
        self.step.program.call(op, operands)
    }
}

/// The results of an op that has two.
fn pair(results: Vec<ValueId>) -> Result<[ValueId; 2]> {
    results.try_into().map_err(|results: Vec<ValueId>| {
        Error::internal(format!("an op has {} results, not 2", results.len()))
    })
}
