//! The description of a GEMM by which kernels are selected: shapes, types, and the fused norm and epilogue.

use crate::{
    driver::{
        context::Context,
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp, Parameters},
    },
    ops::{
        WIDE,
        bound::Bound,
        frame::Frame,
        gemm::fused_linear::{Epilogue, FusedLinear, Norm},
        operand, result, type_name,
        weight::{CudaWeight, Packing},
        weight_type,
    },
};
use dsrun_core::{
    DType, Error, Result, TensorDesc, WeightFormat, WeightType,
    kernels::CallDesc,
    op::{GateLayout, RmsNorm, RopePairing},
};
use std::sync::Arc;

/// The computation of one launch: `y = epilogue(norm(x) w^T + bias)`.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a> {
    /// The norm and the epilogue, with the indices of the call's operands.
    pub(super) fused: FusedLinear,
    pub(super) call: &'a CallDesc,
    /// Activations `[rows, inputs]`: an operand of the call, or a norm's result in scratch memory.
    pub(super) x: &'a TensorDesc,
    /// The weight `[outputs, inputs]`.
    pub(super) weight: &'a WeightType,
    /// The first result of the call, or the product in scratch memory.
    pub(super) y: &'a TensorDesc,
    /// Whether `y` is scratch memory, where rows past the extent may be written.
    pub(super) scratch: bool,
    /// The element type of the bias, if there is one.
    pub(super) bias: Option<DType>,
    /// The residual of the epilogue, if it has one.
    pub(super) residual: Option<&'a TensorDesc>,
    /// The key and value sizes of a head, and its rotated pairs, if the epilogue splits into heads.
    pub(super) head_sizes: Option<[usize; 3]>,
}

impl<'a> Problem<'a> {
    /// The problem of a whole fused linear layer. Fails for heads that no kernel supports.
    pub(super) fn new(fused: FusedLinear, call: &'a CallDesc) -> Result<Self> {
        let residual = match fused.epilogue {
            Epilogue::Sum(_, residual) => Some(operand(call, residual)?),
            _ => None,
        };
        Ok(Self {
            fused,
            call,
            x: operand(call, fused.x)?,
            weight: weight_type(call, fused.weight)?,
            y: result(call, 0)?,
            scratch: false,
            bias: fused.bias.map(|bias| operand(call, bias)).transpose()?.map(|bias| bias.dtype),
            residual,
            head_sizes: fused.head_sizes(call)?,
        })
    }

    /// The remaining problem if a separate launch writes the norm of `x` to `normed`.
    pub(super) fn without_norm<'b>(&self, normed: &'b TensorDesc) -> Problem<'b>
    where
        'a: 'b,
    {
        Problem { fused: FusedLinear { norm: None, ..self.fused }, x: normed, ..*self }
    }

    /// The remaining problem if the product is written to scratch memory, and a separate launch applies the epilogue.
    pub(super) fn without_epilogue<'b>(&self, product: &'b TensorDesc) -> Problem<'b>
    where
        'a: 'b,
    {
        let fused = FusedLinear { epilogue: Epilogue::Nothing, ..self.fused };
        Problem { fused, y: product, scratch: true, residual: None, head_sizes: None, ..*self }
    }

    pub(super) fn rows(&self) -> usize {
        self.x.shape[0]
    }

    pub(super) fn outputs(&self) -> usize {
        self.weight.rows()
    }

    pub(super) fn inputs(&self) -> usize {
        self.weight.columns()
    }

    /// The number of results per row: half of the outputs if they are gated.
    pub(super) fn results(&self) -> usize {
        if matches!(self.fused.epilogue, Epilogue::Gate(_)) { self.outputs() / 2 } else { self.outputs() }
    }

    /// Whether activations are int8 with a scale per row.
    pub(super) fn is_int8(&self) -> bool {
        self.fused.scales.is_some()
    }

    pub(super) fn is_quantised(&self) -> bool {
        self.weight.format.is_quantised()
    }

    /// Whether activations and weights have the same type.
    pub(super) fn is_uniform(&self) -> bool {
        self.weight.format == WeightFormat::Dense(self.x.dtype)
    }

    /// Whether activations and weights are f16, or both are bf16.
    pub(super) fn is_half(&self) -> bool {
        self.has_half_activations() && self.is_uniform()
    }

    pub(super) fn has_half_activations(&self) -> bool {
        matches!(self.x.dtype, DType::F16 | DType::BF16)
    }

    /// Whether the weight is small enough for kernels with 32-bit indices of outputs and inputs.
    pub(super) fn is_indexable(&self) -> bool {
        self.outputs().max(self.inputs()) < 1 << 30
    }

    /// The packing of the weight; `None` for dense weights.
    pub(super) fn packing(&self) -> Option<Packing> {
        Packing::of(self.weight.format)
    }

    /// The packing of the weight if weight and activations are int8, with one scale per output.
    pub(super) fn int8_packing(&self) -> Option<Packing> {
        self.packing().filter(|packing| self.is_int8() && packing.is_channelwise_int8())
    }

    /// Whether the problem has neither a norm nor an epilogue.
    pub(super) fn is_bare(&self) -> bool {
        self.fused.norm.is_none() && matches!(self.fused.epilogue, Epilogue::Nothing)
    }

    /// Whether the epilogue is an unscaled residual sum.
    pub(super) fn is_unscaled_sum(&self) -> bool {
        self.fused.norm.is_none() && matches!(self.fused.epilogue, Epilogue::Sum(op, _) if op.alpha == 1.0)
    }

    /// Whether the epilogue is a gated activation whose gate and up outputs are concatenated.
    pub(super) fn is_gated_by_halves(&self) -> bool {
        matches!(self.fused.epilogue, Epilogue::Gate(op) if op.layout == GateLayout::Concatenated)
    }

    /// The preceding norm with its weight, if it is an RMS norm of whole rows.
    pub(super) fn rms_norm(&self) -> Option<(RmsNorm, &'a TensorDesc)> {
        let Some(Norm::Rms(op, weight)) = self.fused.norm else { return None };
        self.call.tensor(weight).filter(|weight| weight.shape == [self.inputs()]).map(|weight| (op, weight))
    }

    /// Whether there is no preceding norm, or one of whole rows.
    pub(super) fn norms_whole_rows(&self) -> bool {
        match self.fused.norm {
            Some(Norm::Rms(..)) => self.rms_norm().is_some(),
            Some(Norm::Layer(_, Some(weight), _)) => {
                self.call.tensor(weight).is_some_and(|weight| weight.shape == [self.inputs()])
            }
            Some(Norm::Layer(_, None, _)) | None => true,
        }
    }

    /// The number of tiles of 16 outputs, paired as in `linear/epilogue.cuh`; `None` if heads have norms or cross tiles.
    pub(super) fn tiles(&self) -> Option<usize> {
        if self.is_gated_by_halves() {
            return Some(self.results().div_ceil(8));
        }
        let whole = self.head_sizes.is_none_or(|[size, value_size, pairs]| {
            size.is_multiple_of(16) && value_size.is_multiple_of(16) && pairs.is_multiple_of(8)
        });
        (whole && !self.fused.norms_heads()).then_some(self.outputs().div_ceil(16))
    }

    /// The head size, if a lane can finish 8 elements at a time: keys and values of equal size, without norms, either unrotated
    /// or rotated as two halves, aligned to 16 bytes.
    pub(super) fn head_halves(&self) -> Option<usize> {
        let (Epilogue::Heads(heads), Some([size, value_size, pairs])) =
            (self.fused.epilogue, self.head_sizes)
        else {
            return None;
        };
        let rotated = match heads.rope {
            Some(rope) => rope.pairing == RopePairing::Halves && pairs * 2 == size,
            None => true,
        };
        let whole = |strides: &[usize]| strides.iter().all(|stride| stride.is_multiple_of(WIDE));
        let caches = heads
            .caches
            .iter()
            .all(|cache| self.call.tensor(*cache).is_some_and(|cache| whole(&cache.strides[..3])));
        let fits = rotated && value_size == size && whole(&self.y.strides[..1]) && caches;
        (fits && !self.fused.norms_heads()).then_some(size)
    }

    /// The value of `BIAS` in the kernels. If there is no bias, any type will do: that which biases mostly have, so that one kernel
    /// serves both.
    pub(super) fn bias_name(&self) -> Result<&'static str> {
        let usual = if self.x.dtype.is_float() { self.x.dtype } else { self.y.dtype };
        type_name(self.bias.unwrap_or(usual))
    }

    /// The constants of `linear/epilogue.cuh`.
    pub(super) fn epilogue_defines(&self) -> Result<Vec<(&'static str, String)>> {
        self.fused.epilogue_defines(self.call, self.y.dtype)
    }
}

/// The bound tensors of a product.
pub(super) struct Args<'a> {
    pub(super) frame: &'a Frame,
    pub(super) x: &'a Bound,
    pub(super) weight: &'a CudaWeight,
    pub(super) y: &'a Bound,
    /// The address of the bias, or 0.
    pub(super) bias: u64,
    /// The address of the scales of the rows of `x`, or 0.
    pub(super) scales: u64,
    /// Same as [`Problem::residual`]. It may be `y` itself.
    pub(super) residual: Option<&'a Bound>,
    /// Tensors whose extents bound the rows.
    pub(super) bounds: Vec<&'a Bound>,
    pub(super) workspace: u64,
    functions: &'a [Arc<Function>],
    pub(super) context: &'a Context,
}

impl<'a> Args<'a> {
    /// The bound tensors of a product from `x` to `y`, with the loaded kernels of its plan.
    pub(super) fn new(
        fused: &FusedLinear,
        frame: &'a Frame,
        [x, y]: [&'a Bound; 2],
        workspace: u64,
        functions: &'a [Arc<Function>],
        context: &'a Context,
    ) -> Result<Self> {
        let residual = match fused.epilogue {
            Epilogue::Sum(_, residual) => Some(frame.tensor(residual)?),
            _ => None,
        };
        let mut bounds = fused.row_operands(frame)?;
        bounds.extend([x, y]);
        Ok(Self {
            frame,
            x,
            weight: frame.weight(fused.weight)?,
            y,
            bias: fused.bias.map_or(0, |bias| frame.address(bias)),
            scales: fused.scales.map_or(0, |scales| frame.address(scales)),
            residual,
            bounds,
            workspace,
            functions,
            context,
        })
    }

    /// A loaded kernel of the plan.
    pub(super) fn function(&self, index: usize) -> Result<&'a Arc<Function>> {
        self.functions.get(index).ok_or_else(|| Error::internal(format!("no function for kernel {index}")))
    }

    /// The first parameters of kernels for arbitrary weights: rows, outputs and inputs.
    pub(super) fn sizes(&self) -> Parameters {
        let layout = &self.weight.layout;
        let parameters = Parameters::default().extent(self.y.size(0), &self.bounds);
        parameters.size(layout.rows).size(layout.columns)
    }

    /// The address and row stride of the residual, or zeros.
    pub(super) fn residual_rows(&self) -> (u64, usize) {
        self.residual.map_or((0, 0), |residual| (residual.address, residual.stride(0)))
    }
}

/// A function that makes the launches of a bound product.
pub(super) type MakeProduct = Box<dyn Fn(&Args<'_>) -> Result<Vec<LaunchOp>> + Send + Sync>;

/// A family's plan for a problem.
pub(super) struct ProductPlan {
    pub(super) kernels: Vec<KernelSpec>,
    /// Bytes of scratch memory.
    pub(super) workspace: usize,
    /// Bytes of zeroed memory of each bound call.
    pub(super) persistent: usize,
    pub(super) launches: MakeProduct,
}

impl ProductPlan {
    /// A plan of one launch without scratch memory.
    pub(super) fn of_one(
        spec: KernelSpec,
        launch: impl Fn(&Args<'_>, &Arc<Function>) -> Result<Option<LaunchOp>> + Send + Sync + 'static,
    ) -> Self {
        let launches: MakeProduct =
            Box::new(move |args| Ok(launch(args, args.function(0)?)?.into_iter().collect()));
        Self { kernels: vec![spec], workspace: 0, persistent: 0, launches }
    }
}
