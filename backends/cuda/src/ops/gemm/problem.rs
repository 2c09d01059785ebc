//! A product as its kernels are chosen: shapes, types, and the norm and the epilogue that belong to the same launch.

use crate::{
    driver::{
        context::Context,
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp, Parameters},
    },
    ops::{
        WIDE,
        frame::{Bound, Frame},
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

/// What one launch is to compute: `y = epilogue(norm(x) w^T + bias)`.
pub(super) struct Problem<'a> {
    /// The norm and the epilogue, with the numbers of the call's operands.
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
    /// The tensor that an epilogue adds the product to.
    pub(super) residual: Option<&'a TensorDesc>,
    /// Sizes of a head's key and value, and rotated pairs, if the epilogue makes heads.
    pub(super) head_sizes: Option<[usize; 3]>,
}

impl<'a> Problem<'a> {
    /// The whole of a fused linear layer. Fails for heads that no kernel takes.
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

    /// The problem that remains when a launch of its own has written the norm of `x` to `normed`.
    pub(super) fn without_norm<'b>(&self, normed: &'b TensorDesc) -> Problem<'b>
    where
        'a: 'b,
    {
        Problem { fused: FusedLinear { norm: None, ..self.fused }, x: normed, ..*self }
    }

    /// The problem that remains when the product goes to scratch memory, and a launch of its own applies the epilogue to it.
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

    /// Columns of `y` that the product makes: half of the outputs if they are gated.
    pub(super) fn results(&self) -> usize {
        if matches!(self.fused.epilogue, Epilogue::Gate(_)) { self.outputs() / 2 } else { self.outputs() }
    }

    /// Whether activations are signed bytes with a scale for each row.
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

    /// Whether kernels that count outputs and inputs in 32 bits can take the weight.
    pub(super) fn is_indexable(&self) -> bool {
        self.outputs().max(self.inputs()) < 1 << 30
    }

    /// The packing of the weight; `None` for dense weights.
    pub(super) fn packing(&self) -> Option<Packing> {
        Packing::of(self.weight.format)
    }

    /// The packing of a weight of signed bytes with one scale for each output, where activations are bytes too.
    pub(super) fn int8_packing(&self) -> Option<Packing> {
        self.packing().filter(|packing| self.is_int8() && packing.is_channelwise_int8())
    }

    /// Whether there is neither a norm nor an epilogue.
    pub(super) fn is_bare(&self) -> bool {
        self.fused.norm.is_none() && matches!(self.fused.epilogue, Epilogue::Nothing)
    }

    /// Whether nothing but a residual is added to the product, unscaled.
    pub(super) fn is_unscaled_sum(&self) -> bool {
        self.fused.norm.is_none() && matches!(self.fused.epilogue, Epilogue::Sum(op, _) if op.alpha == 1.0)
    }

    /// Whether the epilogue is a gate whose two halves lie one behind the other.
    pub(super) fn is_gated_by_halves(&self) -> bool {
        matches!(self.fused.epilogue, Epilogue::Gate(op) if op.layout == GateLayout::Concatenated)
    }

    /// The RMS norm of whole rows in front, with its weight.
    pub(super) fn rms_norm(&self) -> Option<(RmsNorm, &'a TensorDesc)> {
        let Some(Norm::Rms(op, weight)) = self.fused.norm else { return None };
        self.call.tensor(weight).filter(|weight| weight.shape == [self.inputs()]).map(|weight| (op, weight))
    }

    /// Whether a norm in front, if there is one, covers whole rows.
    pub(super) fn norms_whole_rows(&self) -> bool {
        match self.fused.norm {
            Some(Norm::Rms(..)) => self.rms_norm().is_some(),
            Some(Norm::Layer(_, Some(weight), _)) => {
                self.call.tensor(weight).is_some_and(|weight| weight.shape == [self.inputs()])
            }
            Some(Norm::Layer(_, None, _)) | None => true,
        }
    }

    /// Tiles of 16 outputs, paired as `linear/epilogue.cuh` does; `None` for heads that are normed or cross a tile.
    pub(super) fn tiles(&self) -> Option<usize> {
        if self.is_gated_by_halves() {
            return Some(self.results().div_ceil(8));
        }
        let whole = self.head_sizes.is_none_or(|[size, value_size, pairs]| {
            size.is_multiple_of(16) && value_size.is_multiple_of(16) && pairs.is_multiple_of(8)
        });
        (whole && !self.fused.norms_heads()).then_some(self.outputs().div_ceil(16))
    }

    /// The size of heads that a lane can finish 8 elements at a time: keys and values of one size, without norms, rotated by whole
    /// halves if at all, at multiples of 16 bytes.
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

    /// The value of `BIAS` in the kernels.
    pub(super) fn bias_name(&self) -> Result<&'static str> {
        self.bias.map_or(Ok("f32"), type_name)
    }

    /// The constants of `linear/epilogue.cuh`.
    pub(super) fn epilogue_defines(&self) -> Result<Vec<(&'static str, String)>> {
        self.fused.epilogue_defines(self.call, self.y.dtype)
    }
}

/// Where a product's tensors are when it is bound.
pub(super) struct Args<'a> {
    pub(super) frame: &'a Frame,
    pub(super) x: &'a Bound,
    pub(super) weight: &'a CudaWeight,
    pub(super) y: &'a Bound,
    /// The address of the bias, or 0.
    pub(super) bias: u64,
    /// The address of the scales of the rows of `x`, or 0.
    pub(super) scales: u64,
    /// As [`Problem::residual`]. It may be `y` itself.
    pub(super) residual: Option<&'a Bound>,
    /// Tensors whose extents bound the rows.
    pub(super) bounds: Vec<&'a Bound>,
    pub(super) workspace: u64,
    functions: &'a [Arc<Function>],
    pub(super) context: &'a Context,
}

impl<'a> Args<'a> {
    /// The tensors of a product from `x` to `y`, with the functions of its plan's kernels.
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

    /// The function of a kernel of the plan.
    pub(super) fn function(&self, index: usize) -> Result<&'a Arc<Function>> {
        self.functions.get(index).ok_or_else(|| Error::internal(format!("no function for kernel {index}")))
    }

    /// The first parameters of kernels that take any weight: rows, outputs and inputs.
    pub(super) fn sizes(&self) -> Parameters {
        let layout = &self.weight.layout;
        let parameters = Parameters::default().extent(self.y.size(0), &self.bounds);
        parameters.size(layout.rows).size(layout.columns)
    }

    /// The address of the residual and the distance between its rows, or zeros.
    pub(super) fn residual_rows(&self) -> (u64, usize) {
        self.residual.map_or((0, 0), |residual| (residual.address, residual.stride(0)))
    }
}

/// Makes the launches of a product.
pub(super) type MakeProduct = Box<dyn Fn(&Args<'_>) -> Result<Vec<LaunchOp>> + Send + Sync>;

/// How a family runs a problem.
pub(super) struct ProductPlan {
    pub(super) kernels: Vec<KernelSpec>,
    /// Bytes of scratch memory.
    pub(super) workspace: usize,
    /// Bytes of zeroed memory of each bound call.
    pub(super) persistent: usize,
    /// Whether the bits of a row's result are independent of the number of rows.
    pub(super) batch_invariant: bool,
    pub(super) launches: MakeProduct,
}

impl ProductPlan {
    /// A plan of one launch without scratch memory, whose rows are independent of their number.
    pub(super) fn of_one(
        spec: KernelSpec,
        launch: impl Fn(&Args<'_>, &Arc<Function>) -> Result<Option<LaunchOp>> + Send + Sync + 'static,
    ) -> Self {
        let launches: MakeProduct =
            Box::new(move |args| Ok(launch(args, args.function(0)?)?.into_iter().collect()));
        Self { kernels: vec![spec], workspace: 0, persistent: 0, batch_invariant: true, launches }
    }

    /// The same plan, where the order of a sum depends on the number of rows.
    #[must_use]
    pub(super) fn batch_dependent(self) -> Self {
        Self { batch_invariant: false, ..self }
    }
}
