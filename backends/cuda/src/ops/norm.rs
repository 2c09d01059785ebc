//! Norms over the features of a row.

pub(super) mod front;

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp, MAX_GRID, Parameters},
    },
    ops::{
        KernelPlan, THREADS, WIDE, evenly,
        frame::{Bound, Frame},
        norm::front::Norm,
        operand, result, type_name, type_of, type_or_f32,
    },
};
use dsrun_core::{
    Result, TensorDesc,
    kernels::CallDesc,
    op::{Add, LayerNorm, RmsNorm},
};
use std::sync::Arc;

/// Threads that a multiprocessor has registers for, of the kernel that takes [`WIDE`] elements at a time.
const AT_ONCE: usize = 1024;

/// `wide` takes [`WIDE`] elements at a time.
fn rms_norm_spec(x: &str, weight: &str, wide: bool) -> KernelSpec {
    let entry = if wide { "rms_norm_wide" } else { "rms_norm" };
    KernelSpec::new("norm/norm.cu", entry, [("T0", &x), ("T1", &weight), ("T2", &"f32")])
}

fn layer_norm_spec(x: &str, weight: &str, bias: &str) -> KernelSpec {
    KernelSpec::new("norm/norm.cu", "layer_norm", [("T0", &x), ("T1", &weight), ("T2", &bias)])
}

/// A norm whose result goes to scratch memory, for what is behind it.
pub(super) struct InFront {
    pub(super) spec: KernelSpec,
    norm: Norm,
    wide: bool,
    sm_count: usize,
}

/// The norm of `x` that a chain begins with, into `y`.
pub(super) fn in_front(
    norm: Norm,
    x: &TensorDesc,
    y: &TensorDesc,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<InFront> {
    let wide = match norm {
        Norm::Rms(_, gain) => wide_norm(x, y, operand(call, gain)?.shape[0]),
        Norm::Layer(..) => false,
    };
    let x = type_name(x.dtype)?;
    let spec = match norm {
        Norm::Rms(_, gain) => rms_norm_spec(x, type_of(call, gain)?, wide),
        Norm::Layer(_, gain, shift) => {
            let name = |index: Option<usize>| index.map_or(Ok("f32"), |index| type_of(call, index));
            layer_norm_spec(x, name(gain)?, name(shift)?)
        }
    };
    Ok(InFront { spec, norm, wide, sm_count: device.sm_count })
}

impl InFront {
    pub(super) fn step(
        &self,
        frame: &Frame,
        x: &Bound,
        y: &Bound,
        function: &Arc<Function>,
    ) -> Result<Option<LaunchOp>> {
        let (rows, columns) = (x.size(0), x.size(1));
        let parameters = Parameters::default().extent(rows, &[x, frame.result(0)?]);
        let optional = |index: Option<usize>| index.map_or(0, |index| frame.address(index));
        let (width, parameters) = match self.norm {
            Norm::Rms(op, gain) => {
                let gain = frame.tensor(gain)?;
                let parameters = parameters.size(gain.size(0)).float(op.eps).float(op.weight_offset);
                (gain.size(0), parameters.rows(x).address(gain.address).rows(y))
            }
            Norm::Layer(op, gain, shift) => {
                let parameters = parameters.size(columns).float(op.eps).rows(x);
                (columns, parameters.address(optional(gain)).address(optional(shift)).rows(y))
            }
        };
        let (grid, threads) = shape(rows, columns, width, self.wide, self.sm_count);
        Ok(LaunchOp::kernel(function, grid, threads, parameters))
    }
}

/// Blocks and threads of norms: a block per group of a row.
pub(super) fn grid(rows: usize, columns: usize, width: usize) -> [usize; 3] {
    if columns == 0 {
        return [0; 3];
    }
    [columns / width.max(1), rows.min(MAX_GRID), 1]
}

/// Blocks and threads of a norm that may take [`WIDE`] elements at a time: then its blocks take rows in turns.
fn shape(rows: usize, columns: usize, width: usize, wide: bool, sm_count: usize) -> ([usize; 3], usize) {
    if !wide {
        return (grid(rows, columns, width), threads(width));
    }
    let threads = threads(width / WIDE);
    let groups = (columns / width.max(1)).max(1);
    let at_once = (sm_count * (AT_ONCE / threads)).div_ceil(groups);
    (grid(evenly(rows, at_once), columns, width), threads)
}

/// Threads for a group of so many elements.
pub(super) fn threads(width: usize) -> usize {
    width.next_multiple_of(32).clamp(32, if width > 2048 { 1024 } else { THREADS })
}

pub(super) fn rms_norm(op: &RmsNorm, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let (eps, offset) = (op.eps, op.weight_offset);
    let wide = wide_norm(operand(call, 0)?, result(call, 0)?, operand(call, 1)?.shape[0]);
    let spec = rms_norm_spec(type_of(call, 0)?, type_of(call, 1)?, wide);
    let sm_count = device.sm_count;
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, weight, y) = (frame.tensor(0)?, frame.tensor(1)?, frame.result(0)?);
        let (rows, width) = (y.size(0), weight.size(0));
        let parameters = Parameters::default().extent(rows, &[x, y]).size(width).float(eps).float(offset);
        let parameters = parameters.rows(x).address(weight.address).rows(y);
        let (grid, threads) = shape(rows, y.size(1), width, wide, sm_count);
        Ok(LaunchOp::kernel(function, grid, threads, parameters))
    }))
}

/// Whether a norm of groups of `width` elements can take [`WIDE`] of them at a time. However many rows there are: the order of
/// its sums, and so its bits, must not depend on them.
pub(super) fn wide_norm(x: &TensorDesc, y: &TensorDesc, width: usize) -> bool {
    [x, y].iter().all(|plane| plane.strides[0].is_multiple_of(WIDE)) && width.is_multiple_of(WIDE)
}

pub(super) fn layer_norm(op: &LayerNorm, call: &CallDesc) -> Result<KernelPlan> {
    let eps = op.eps;
    let spec = layer_norm_spec(type_of(call, 0)?, type_or_f32(call, 1)?, type_or_f32(call, 2)?);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, y) = (frame.tensor(0)?, frame.result(0)?);
        let (rows, width) = (y.size(0), y.size(1));
        let parameters = Parameters::default().extent(rows, &[x, y]).size(width).float(eps).rows(x);
        let parameters = parameters.address(frame.address(1)).address(frame.address(2)).rows(y);
        Ok(LaunchOp::kernel(function, grid(rows, width, width), threads(width), parameters))
    }))
}

/// The region `r = a + alpha * b`, `y = rms_norm(r, weight)`.
pub(super) fn add_rms_norm(add: &Add, norm: &RmsNorm, call: &CallDesc) -> Result<KernelPlan> {
    let (alpha, eps, offset) = (add.alpha, norm.eps, norm.weight_offset);
    operand(call, 1)?;
    let types: [(_, &dyn std::fmt::Display); 3] =
        [("T0", &type_of(call, 0)?), ("T1", &type_of(call, 2)?), ("T2", &"f32")];
    let spec = KernelSpec::new("norm/norm.cu", "add_rms_norm", types);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (a, b, weight) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (r, y) = (frame.result(0)?, frame.result(1)?);
        let (rows, columns, width) = (y.size(0), y.size(1), weight.size(0));
        let parameters = Parameters::default()
            .extent(rows, &[a, b, r, y])
            .size(columns)
            .size(width)
            .float(alpha)
            .float(eps)
            .float(offset)
            .rows(a)
            .rows(b)
            .address(weight.address)
            .rows(r)
            .rows(y);
        Ok(LaunchOp::kernel(function, grid(rows, columns, width), threads(width), parameters))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::a_row_each(512, 4096, 4096, true)]
    #[case::in_turns(2048, 4096, 4096, true)]
    #[case::short_rows(20_000, 576, 576, true)]
    #[case::heads(8192, 4096, 128, true)]
    #[case::long_rows(8192, 32_768, 32_768, true)]
    #[case::element_by_element(8192, 4095, 4095, false)]
    #[case::nothing(8192, 0, 8, true)]
    fn blocks_cover_the_groups(
        #[case] rows: usize,
        #[case] columns: usize,
        #[case] width: usize,
        #[case] wide: bool,
    ) {
        let ([groups, blocks, _], threads) = shape(rows, columns, width, wide, 132);
        assert_eq!(groups, columns / width);
        // Rows are taken in turns, so that any number of blocks covers them.
        assert!(groups == 0 || (1..=rows.min(MAX_GRID)).contains(&blocks), "{blocks}");
        assert!(threads.is_multiple_of(32) && (32..=1024).contains(&threads), "{threads}");
    }
}
