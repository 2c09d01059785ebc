//! Decoder layers whose MLP is a mixture of experts.

use super::{
    body::read_sum_over_ranks,
    product::{OUTPUTS, packing},
    refused,
};
use crate::ops::{
    body::{BodyReader, made, value},
    experts::{ExpertLinear, Mixture, RouterKernel},
    gemm::fused_linear::{Epilogue, FusedLinear, Norm},
};
use dsrun_core::{
    DType, Result, WeightFormat, WeightType,
    op::{MoeRoute, Op},
};

/// The router of a mixture of experts, and the experts' up projection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Experts {
    pub(super) route: MoeRoute,
    /// The number of experts.
    pub(super) count: usize,
    /// The weight of the router's product, and the type of its logits.
    pub(super) router: usize,
    pub(super) logits: DType,
    /// Router bias, selection bias, and factors of experts.
    pub(super) vectors: [Option<usize>; 3],
    /// The weight of the up projection.
    pub(super) second: usize,
    /// The biases of the router's product, and of the up projection.
    pub(super) router_bias: Option<usize>,
    pub(super) second_bias: Option<usize>,
}

impl Experts {
    /// Reads a mixture of experts with input `middle`, including the preceding norm and router product and the following residual
    /// sum. Returns both halves of the MLP, the router, whether the result is summed over ranks, and the residual sum.
    pub(super) fn read(
        reader: &mut BodyReader<'_>,
        middle: usize,
    ) -> Option<(FusedLinear, FusedLinear, Option<Self>, bool, usize)> {
        let (norm, x, normed) = Norm::read(reader)??;
        let (linear, product) = reader.take(|op| if let Op::Linear(op) = op { Some(*op) } else { None })?;
        let mixture = Mixture::read(reader)?;
        let over_ranks = read_sum_over_ranks(reader, mixture.result);
        let (add, sum) = reader.take(|op| if let Op::Add(op) = op { Some(*op) } else { None })?;
        let [logits, bias, selection_bias, scale, chosen] = mixture.router;
        let flows = (x, mixture.x) == (middle, normed)
            && value(product, 0) == Some(normed)
            && logits == made(product, 0)
            && [value(sum, 0), value(sum, 1)] == [Some(middle), over_ranks.or(Some(mixture.result))];
        let plain = [value(sum, 2), value(sum, 3), chosen].into_iter().all(|value| value.is_none());
        let biases = [mixture.gate, mixture.up].map(|layer| layer.bias.is_some());
        let taken = flows
            && plain
            && mixture.group.first_expert == 0
            && mixture.gate.op == mixture.up.op
            && biases[0] == biases[1];
        let half = |norm, x, layer: ExpertLinear, epilogue| FusedLinear {
            norm,
            x,
            scales: None,
            weight: layer.weight,
            bias: layer.bias,
            product: layer.op.dtype,
            epilogue,
        };
        let up = half(Some(norm), middle, mixture.gate, Epilogue::Gate(mixture.activation));
        let down = half(None, mixture.x, mixture.down, Epilogue::Sum(add, middle));
        let experts = Self {
            route: mixture.route,
            count: mixture.group.count as usize,
            router: value(product, 1)?,
            logits: linear.dtype,
            vectors: [bias, selection_bias, scale],
            second: mixture.up.weight,
            router_bias: value(product, 2),
            second_bias: mixture.up.bias,
        };
        taken.then_some((up, down, Some(experts), over_ranks.is_some(), made(sum, 0)?))
    }

    /// The router's configuration; `None` if there are too many experts.
    pub(super) fn kernel(&self) -> Option<RouterKernel> {
        RouterKernel::new(&self.route, self.count, self.vectors[1].is_some(), false)
    }

    /// All optional vectors.
    pub(super) fn all_vectors(&self) -> [Option<usize>; 5] {
        let [bias, selection_bias, scale] = self.vectors;
        [bias, selection_bias, scale, self.router_bias, self.second_bias]
    }

    /// The operands besides the hidden state, and besides the weights and biases of gate and down projection.
    pub(super) fn operands(&self) -> impl Iterator<Item = usize> {
        [self.router, self.second].into_iter().chain(self.all_vectors().into_iter().flatten())
    }
}

/// The expert counts of a layer, and the configuration of its router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) count: usize,
    /// The number of experts per token.
    pub(super) chosen: usize,
    /// Whether logits are rounded to the type of activations.
    pub(super) rounded: bool,
    /// Words of shared memory that the router needs.
    pub(super) words: usize,
}

impl Choice {
    /// The expert counts and the kernel constants of the router, given the weights of the router, the up projection and both
    /// halves of the MLP, and the type of activations.
    ///
    /// # Errors
    /// If the kernel does not support their sizes or types.
    pub(super) fn of(
        experts: &Experts,
        [router, second]: [&WeightType; 2],
        [gate, down]: [&WeightType; 2],
        dtype: DType,
    ) -> Result<(Self, Vec<(&'static str, String)>)> {
        let dense = WeightFormat::Dense(dtype);
        let taken = gate.format == dense || packing(gate.format).is_some();
        let alike = second == gate
            && taken
            && *router == WeightType { format: dense, shape: vec![experts.count, gate.columns()] };
        if !alike || !experts.count.is_multiple_of(OUTPUTS) || !down.columns().is_multiple_of(16) {
            return Err(refused(
                "a router must have dense weights, and experts dense weights of the same type, mxfp4, or integers of 4 bits in groups of 128 or of 8 bits",
            ));
        }
        let logits = [DType::F32, dtype].contains(&experts.logits);
        let Some(kernel) = experts.kernel().filter(|kernel| logits && kernel.is_one_warp()) else {
            return Err(refused(format!(
                "a router of {} experts with logits of {}",
                experts.count, experts.logits
            )));
        };
        let (chosen, rounded) = (experts.route.top_k as usize, experts.logits != DType::F32);
        Ok((
            Self { count: experts.count, chosen, rounded, words: kernel.words },
            [kernel.constants, kernel.of_rule].concat(),
        ))
    }
}
