//! Quantised activations: by themselves, and behind the norm or activation that makes them, in one launch.

use crate::{
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, Parameters},
    },
    ops::{KernelPlan, WIDE, frame::Frame, norm::front::Norm, operand, result, type_name},
};
use dsrun_core::{
    DType, Result,
    kernels::CallDesc,
    op::{Activation, GateLayout, GatedActivation, Op},
    region::Region,
};
use std::fmt::Display;

/// What is in front. Numbers are those of the call's operands.
#[derive(Clone, Copy, Debug)]
enum Front {
    Nothing,
    Norm(Norm),
    Activation(Activation),
    /// With the other half, where that is a tensor of its own.
    Gate(GatedActivation, Option<usize>),
}

/// The most threads of a block, and the most elements of a thread that stay in registers.
const THREADS: usize = 1024;
const OWN: usize = 4 * WIDE;

pub(super) fn quant_per_token(call: &CallDesc) -> Result<KernelPlan> {
    recipe(Front::Nothing, call)
}

/// The recipe for a norm or an activation and what quantises its result; none if the region is something else.
pub(super) fn region(region: &Region, call: &CallDesc) -> Result<Option<KernelPlan>> {
    let [first, second] = region.calls() else { return Ok(None) };
    let handed_on = first.results.first().copied();
    let quantises = matches!(second.op, Op::QuantPerToken(_))
        && second.operands.first().copied() == Some(handed_on)
        && region.results() == second.results;
    // The operand of the region that an operand of the first call is.
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
        Op::GatedActivation(op) if absent(2) => Front::Gate(*op, outside(1)),
        _ => return Ok(None),
    };
    recipe(front, call).map(Some)
}

fn recipe(front: Front, call: &CallDesc) -> Result<KernelPlan> {
    let (x, y) = (operand(call, 0)?, result(call, 0)?);
    let columns = y.shape[1];
    let dtype = |index: Option<usize>| index.map_or(Ok(DType::F32), |index| Ok(operand(call, index)?.dtype));
    let (mut number, mut function, mut layout) = (0, 1, 0);
    let (mut gain, mut shift, mut other) = (None, None, None);
    let [mut eps, mut offset, mut limit] = [0.0f32; 3];
    match front {
        Front::Nothing => {}
        Front::Norm(norm) => {
            (gain, shift) = (norm.weight(), norm.bias());
            (number, eps, offset) = match norm {
                Norm::Rms(op, _) => (1, op.eps, op.weight_offset),
                Norm::Layer(op, ..) => (2, op.eps, 0.0),
            };
        }
        Front::Activation(op) => (number, function, limit) = (3, op.function as u32, op.limit),
        Front::Gate(op, up) => {
            (number, function, limit, other) = (4, op.function as u32, op.limit, up);
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
        && whole(other)?;
    let items = if wide { columns / WIDE } else { columns };
    // Short rows take few threads, so that many blocks fit on a multiprocessor.
    let most = if items > 1024 { THREADS } else { 512 };
    let each = items.div_ceil(most).max(1);
    let threads = items.div_ceil(each).next_multiple_of(32).max(32);
    let own = if wide { each } else { 0 };
    let defines: [(_, &dyn Display); 7] = [
        ("X", &type_name(x.dtype)?),
        ("G", &type_name(dtype(gain)?)?),
        ("SHIFT", &type_name(dtype(shift)?)?),
        ("FRONT", &number),
        ("FUNCTION", &function),
        ("LAYOUT", &layout),
        ("OWN", &own),
    ];
    let spec = KernelSpec::new("quant/quant.cu", "quantise_rows", defines);
    let words = |low: f32, high: f32| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
    let numbers = [words(eps, offset), words(limit, 0.0)];
    Ok(KernelPlan::of_one(spec, move |frame: &Frame, function| {
        let (x, y, scales) = (frame.tensor(0)?, frame.result(0)?, frame.result(1)?);
        let address = |index: Option<usize>| index.map_or(0, |index| frame.address(index));
        let mut bounds = vec![x, y, scales];
        bounds.extend(other.and_then(|other| frame.optional(other)));
        let (rows, columns) = (y.size(0), y.size(1));
        let parameters = Parameters::default()
            .extent(rows, &bounds)
            .size(columns)
            .rows(x)
            .optional_rows(other.and_then(|other| frame.optional(other)))
            .words([address(gain), address(shift), numbers[0], numbers[1]])
            .rows(y)
            .address(scales.address);
        Ok(LaunchOp::kernel(function, [rows, 1, 1], threads, parameters))
    }))
}
