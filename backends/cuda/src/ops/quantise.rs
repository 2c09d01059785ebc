//! Quantisation of activations, alone or fused with the preceding norm or activation.

use crate::{
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{self, Pointer, declaration, kernel_struct},
        launch::LaunchOp,
    },
    ops::{
        KernelPlan, WIDE,
        frame::Frame,
        norm::front::Norm,
        operand,
        params::{ExtentParams, MatrixParams},
        result, type_name,
    },
};
use dsrun_core::{
    DType, Result,
    kernels::CallDesc,
    op::{Activation, GateLayout, GatedActivation, Op},
    region::Region,
};
use std::fmt::Display;

/// The op before the quantisation. Numbers are indices of the call's operands.
#[derive(Clone, Copy, Debug)]
enum Front {
    Nothing,
    Norm(Norm),
    Activation(Activation),
    /// A gated activation, with the index of up if that is a separate tensor.
    Gate(GatedActivation, Option<usize>),
}

/// The maximum number of threads of a block, and of elements that a thread keeps in registers.
const THREADS: usize = 1024;
const OWN: usize = 4 * WIDE;

kernel_struct! {
    /// Parameters of `quantise_rows`.
    struct QuantiseRowsParams {
        extent: ExtentParams = "Extent",
        /// Columns of the result.
        columns: i64 = "i64",
        x: MatrixParams = "Matrix<const X>",
        /// The up operand, if it is a separate tensor; absent otherwise.
        up: MatrixParams = "Matrix<const X>",
        /// Of the norm; may be null.
        weight: Pointer = "const WEIGHT*",
        /// Of the norm; may be null.
        bias: Pointer = "const BIAS*",
        y: MatrixParams = "Matrix<signed char>",
        scales: Pointer = "float*",
        eps: f32 = "float",
        /// Added to every weight.
        weight_offset: f32 = "float",
        /// The upper limit of the gate and of the magnitude of up; 0 for none.
        limit: f32 = "float",
    }
}

/// The generated header of the kernel's parameters.
pub(super) fn params_header() -> (String, String) {
    kernel_struct::params_header("quant/quant", &[declaration::<QuantiseRowsParams>()])
}

pub(super) fn quant_per_token(call: &CallDesc) -> Result<KernelPlan> {
    recipe(Front::Nothing, call)
}

/// The plan of a norm or an activation whose result is quantised; `None` if the region is something else.
pub(super) fn region(region: &Region, call: &CallDesc) -> Result<Option<KernelPlan>> {
    let [first, second] = region.calls() else { return Ok(None) };
    let handed_on = first.results.first().copied();
    let quantises = matches!(second.op, Op::QuantPerToken(_))
        && second.operands.first().copied() == Some(handed_on)
        && region.results() == second.results;
    // Maps an operand of the first call to the operand of the region.
    let outside = |index: usize| {
        let value = first.operands.get(index).copied().flatten()?;
        (value.index() < region.operands()).then_some(value.index())
    };
    let absent = |index: usize| first.operands.get(index).is_none_or(Option::is_none);
    if !quantises || outside(0) != Some(0) {
        return Ok(None);
    }
    let front = match &first.op {
        Op::RmsNorm(op) => match outside(1) {
            Some(gain) if operand(call, gain)?.shape == operand(call, 0)?.shape[1..] => {
                Front::Norm(Norm::Rms(*op, gain))
            }
            _ => return Ok(None),
        },
        Op::LayerNorm(op) => Front::Norm(Norm::Layer(*op, outside(1), outside(2))),
        Op::Activation(op) if absent(1) => Front::Activation(*op),
        Op::GatedActivation(op) if absent(2) && op.up_offset == 0.0 => Front::Gate(*op, outside(1)),
        _ => return Ok(None),
    };
    recipe(front, call).map(Some)
}

fn recipe(front: Front, call: &CallDesc) -> Result<KernelPlan> {
    let (x, y) = (operand(call, 0)?, result(call, 0)?);
    let columns = y.shape[1];
    let dtype = |index: Option<usize>| index.map_or(Ok(DType::F32), |index| Ok(operand(call, index)?.dtype));
    let (mut number, mut function, mut layout) = (0, 1, 0);
    let (mut weight, mut bias, mut up) = (None, None, None);
    let [mut eps, mut weight_offset, mut limit] = [0.0f32; 3];
    match front {
        Front::Nothing => {}
        Front::Norm(norm) => {
            (weight, bias) = (norm.weight(), norm.bias());
            (number, eps, weight_offset) = match norm {
                Norm::Rms(op, _) => (1, op.eps, op.weight_offset),
                Norm::Layer(op, ..) => (2, op.eps, 0.0),
            };
        }
        Front::Activation(op) => (number, function, limit) = (3, op.function as u32, op.limit),
        Front::Gate(op, other) => {
            (number, function, limit, up) = (4, op.function as u32, op.limit, other);
            layout = match op.layout {
                GateLayout::Separate => 1,
                GateLayout::Concatenated => 2,
                GateLayout::Interleaved => 3,
            };
        }
    }
    let whole = |index: Option<usize>| match index {
        Some(index) => operand(call, index).map(|tensor| tensor.strides[0].is_multiple_of(WIDE)),
        None => Ok(true),
    };
    let wide = columns.is_multiple_of(WIDE)
        && columns <= THREADS * OWN
        && x.strides[0].is_multiple_of(WIDE)
        && y.strides[0].is_multiple_of(WIDE)
        && whole(up)?;
    let items = if wide { columns / WIDE } else { columns };
    // Short rows use few threads, so that many blocks fit on an SM.
    let most = if items > 1024 { THREADS } else { 512 };
    let each = items.div_ceil(most).max(1);
    let threads = items.div_ceil(each).next_multiple_of(32).max(32);
    let own = if wide { each } else { 0 };
    let defines: [(_, &dyn Display); 7] = [
        ("X", &type_name(x.dtype)?),
        ("WEIGHT", &type_name(dtype(weight)?)?),
        ("BIAS", &type_name(dtype(bias)?)?),
        ("FRONT", &number),
        ("FUNCTION", &function),
        ("LAYOUT", &layout),
        ("OWN", &own),
    ];
    let spec = KernelSpec::new("quant/quant.cu", "quantise_rows", defines);
    Ok(KernelPlan::of_one(spec, move |frame: &Frame, function| {
        let (x, y, scales) = (frame.tensor(0)?, frame.result(0)?, frame.result(1)?);
        let address = |index: Option<usize>| index.map_or(0, |index| frame.address(index));
        let up = up.and_then(|up| frame.optional(up));
        let mut bounds = vec![x, y, scales];
        bounds.extend(up);
        let (rows, columns) = (y.size(0), y.size(1));
        let params = QuantiseRowsParams {
            extent: ExtentParams::of(rows, &bounds),
            columns: columns as i64,
            x: MatrixParams::of(x),
            up: MatrixParams::optional(up),
            weight: address(weight),
            bias: address(bias),
            y: MatrixParams::of(y),
            scales: scales.address,
            eps,
            weight_offset,
            limit,
        };
        Ok(LaunchOp::kernel(function, [rows, 1, 1], threads, &params))
    }))
}
