//! RMS norm and layer norm.

pub(super) mod front;

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{self, Pointer, declaration, kernel_struct},
        launch::{Function, LaunchOp, MAX_GRID},
    },
    ops::{
        KernelPlan, THREADS, WIDE,
        bound::Bound,
        evenly,
        frame::Frame,
        norm::front::Norm,
        operand,
        params::{ExtentParams, MatrixParams},
        result, type_name, type_of, type_or_first,
    },
};
use dsrun_core::{
    Result, TensorDesc,
    kernels::CallDesc,
    op::{Add, LayerNorm, RmsNorm},
};
use std::sync::Arc;

/// Threads per SM, limited by registers, of the kernels that process [`WIDE`] elements at a time.
const AT_ONCE: usize = 1024;
/// Vectors of [`WIDE`] elements of a row that a thread of `layer_norm_wide` keeps in registers.
const VECTORS: usize = 4;

kernel_struct! {
    /// Parameters of `rms_norm` and `rms_norm_wide`.
    struct RmsNormParams {
        extent: ExtentParams = "Extent",
        /// Elements of a group, which is normalised by itself.
        width: i64 = "i64",
        x: MatrixParams = "Matrix<const X>",
        weight: Pointer = "const WEIGHT*",
        y: MatrixParams = "Matrix<X>",
        eps: f32 = "float",
        /// Added to every weight.
        weight_offset: f32 = "float",
    }
}

kernel_struct! {
    /// Parameters of `layer_norm` and `layer_norm_wide`.
    struct LayerNormParams {
        extent: ExtentParams = "Extent",
        width: i64 = "i64",
        x: MatrixParams = "Matrix<const X>",
        /// May be null.
        weight: Pointer = "const WEIGHT*",
        /// May be null.
        bias: Pointer = "const BIAS*",
        y: MatrixParams = "Matrix<X>",
        eps: f32 = "float",
    }
}

kernel_struct! {
    /// Parameters of `add_rms_norm`.
    struct AddRmsNormParams {
        extent: ExtentParams = "Extent",
        /// Elements of a group, which is normalised by itself.
        width: i64 = "i64",
        a: MatrixParams = "Matrix<const X>",
        b: MatrixParams = "Matrix<const X>",
        weight: Pointer = "const WEIGHT*",
        /// The sum.
        r: MatrixParams = "Matrix<X>",
        y: MatrixParams = "Matrix<X>",
        alpha: f32 = "float",
        eps: f32 = "float",
        /// Added to every weight.
        weight_offset: f32 = "float",
    }
}

impl RmsNormParams {
    fn of(op: &RmsNorm, extent: ExtentParams, x: MatrixParams, weight: &Bound, y: MatrixParams) -> Self {
        let (width, weight) = (weight.size(0) as i64, weight.address);
        Self { extent, width, x, weight, y, eps: op.eps, weight_offset: op.weight_offset }
    }
}

/// The generated header of these structs.
pub(super) fn params_header() -> (String, String) {
    let declarations =
        [declaration::<RmsNormParams>(), declaration::<LayerNormParams>(), declaration::<AddRmsNormParams>()];
    kernel_struct::params_header("norm/norm", &declarations)
}

fn spec(entry: &'static str, [x, weight, bias]: [&str; 3]) -> KernelSpec {
    KernelSpec::new(
        "norm/norm.cu",
        entry,
        [("X", &x as _), ("WEIGHT", &weight), ("BIAS", &bias), ("VECTORS", &VECTORS)],
    )
}

/// With `wide`, the kernel processes [`WIDE`] elements at a time.
fn rms_norm_spec(x: &str, weight: &str, wide: bool) -> KernelSpec {
    spec(if wide { "rms_norm_wide" } else { "rms_norm" }, [x, weight, "f32"])
}

/// With `wide`, the kernel processes [`WIDE`] elements at a time.
fn layer_norm_spec(x: &str, weight: &str, bias: &str, wide: bool) -> KernelSpec {
    spec(if wide { "layer_norm_wide" } else { "layer_norm" }, [x, weight, bias])
}

/// A norm as a separate launch, whose result in scratch memory is the input of the next launch.
pub(super) struct InFront {
    pub(super) spec: KernelSpec,
    norm: Norm,
    wide: bool,
    sm_count: usize,
}

/// The norm of `x` at the start of a fused op, written to `y`.
pub(super) fn in_front(
    norm: Norm,
    x: &TensorDesc,
    y: &TensorDesc,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<InFront> {
    let wide = match norm {
        Norm::Rms(_, gain) => wide_norm(x, y, operand(call, gain)?.shape[0]),
        Norm::Layer(..) => wide_norm(x, y, x.shape[1]),
    };
    let x = type_name(x.dtype)?;
    let spec = match norm {
        Norm::Rms(_, gain) => rms_norm_spec(x, type_of(call, gain)?, wide),
        Norm::Layer(_, gain, shift) => {
            let name = |index: Option<usize>| index.map_or(Ok("f32"), |index| type_of(call, index));
            layer_norm_spec(x, name(gain)?, name(shift)?, wide)
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
        let extent = ExtentParams::of(rows, &[x, frame.result(0)?]);
        let (x, y) = (MatrixParams::of(x), MatrixParams::of(y));
        let shape = |width, vectors| {
            let vectors = self.wide.then_some(vectors);
            shape(rows, columns, width, vectors, self.sm_count)
        };
        match self.norm {
            Norm::Rms(op, weight) => {
                let weight = frame.tensor(weight)?;
                let params = RmsNormParams::of(&op, extent, x, weight, y);
                let (grid, threads) = shape(weight.size(0), 1);
                Ok(LaunchOp::kernel(function, grid, threads, &params))
            }
            Norm::Layer(op, weight, bias) => {
                let optional = |index: Option<usize>| index.map_or(0, |index| frame.address(index));
                let (weight, bias) = (optional(weight), optional(bias));
                let params =
                    LayerNormParams { extent, width: columns as i64, x, weight, bias, y, eps: op.eps };
                let (grid, threads) = shape(columns, VECTORS);
                Ok(LaunchOp::kernel(function, grid, threads, &params))
            }
        }
    }
}

/// Blocks and threads of norms: a block per group of a row.
pub(super) fn grid(rows: usize, columns: usize, width: usize) -> [usize; 3] {
    if columns == 0 {
        return [0; 3];
    }
    [columns / width.max(1), rows.min(MAX_GRID), 1]
}

/// Blocks and threads of a norm; threads that take this many vectors of [`WIDE`] elements belong to blocks that loop over rows.
fn shape(
    rows: usize,
    columns: usize,
    width: usize,
    vectors: Option<usize>,
    sm_count: usize,
) -> ([usize; 3], usize) {
    let Some(vectors) = vectors else { return (grid(rows, columns, width), threads(width)) };
    let threads = threads((width / WIDE).div_ceil(vectors));
    let groups = (columns / width.max(1)).max(1);
    let at_once = (sm_count * (AT_ONCE / threads)).div_ceil(groups);
    (grid(evenly(rows, at_once), columns, width), threads)
}

/// Threads for a group of this many elements.
pub(super) fn threads(width: usize) -> usize {
    width.next_multiple_of(32).clamp(32, if width > 2048 { 1024 } else { THREADS })
}

pub(super) fn rms_norm(op: &RmsNorm, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let op = *op;
    let wide = wide_norm(operand(call, 0)?, result(call, 0)?, operand(call, 1)?.shape[0]);
    let spec = rms_norm_spec(type_of(call, 0)?, type_of(call, 1)?, wide);
    let sm_count = device.sm_count;
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, weight, y) = (frame.tensor(0)?, frame.tensor(1)?, frame.result(0)?);
        let (rows, width) = (y.size(0), weight.size(0));
        let extent = ExtentParams::of(rows, &[x, y]);
        let params = RmsNormParams::of(&op, extent, MatrixParams::of(x), weight, MatrixParams::of(y));
        let (grid, threads) = shape(rows, y.size(1), width, wide.then_some(1), sm_count);
        Ok(LaunchOp::kernel(function, grid, threads, &params))
    }))
}

/// Whether a norm of groups of `width` elements can process [`WIDE`] elements at a time. This does not depend on the number of
/// rows, so that the order of sums, and thereby the result's bits, do not either.
pub(super) fn wide_norm(x: &TensorDesc, y: &TensorDesc, width: usize) -> bool {
    [x, y].iter().all(|plane| plane.strides[0].is_multiple_of(WIDE)) && width.is_multiple_of(WIDE)
}

pub(super) fn layer_norm(op: &LayerNorm, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let (eps, sm_count) = (op.eps, device.sm_count);
    let (x, y) = (operand(call, 0)?, result(call, 0)?);
    let wide = wide_norm(x, y, x.shape[1]);
    let spec = layer_norm_spec(type_name(x.dtype)?, type_or_first(call, 1)?, type_or_first(call, 2)?, wide);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, y) = (frame.tensor(0)?, frame.result(0)?);
        let (rows, width) = (y.size(0), y.size(1));
        let params = LayerNormParams {
            extent: ExtentParams::of(rows, &[x, y]),
            width: width as i64,
            x: MatrixParams::of(x),
            weight: frame.address(1),
            bias: frame.address(2),
            y: MatrixParams::of(y),
            eps,
        };
        let (grid, threads) = shape(rows, width, width, wide.then_some(VECTORS), sm_count);
        Ok(LaunchOp::kernel(function, grid, threads, &params))
    }))
}

/// The region `r = a + alpha * b`, `y = rms_norm(r, weight)`.
pub(super) fn add_rms_norm(add: &Add, norm: &RmsNorm, call: &CallDesc) -> Result<KernelPlan> {
    let (alpha, eps, weight_offset) = (add.alpha, norm.eps, norm.weight_offset);
    operand(call, 1)?;
    let spec = spec("add_rms_norm", [type_of(call, 0)?, type_of(call, 2)?, "f32"]);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (a, b, weight) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (r, y) = (frame.result(0)?, frame.result(1)?);
        let (rows, columns, width) = (y.size(0), y.size(1), weight.size(0));
        let params = AddRmsNormParams {
            extent: ExtentParams::of(rows, &[a, b, r, y]),
            width: width as i64,
            a: MatrixParams::of(a),
            b: MatrixParams::of(b),
            weight: weight.address,
            r: MatrixParams::of(r),
            y: MatrixParams::of(y),
            alpha,
            eps,
            weight_offset,
        };
        Ok(LaunchOp::kernel(function, grid(rows, columns, width), threads(width), &params))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::a_row_each(512, 4096, 4096, Some(1))]
    #[case::in_turns(2048, 4096, 4096, Some(1))]
    #[case::short_rows(20_000, 576, 576, Some(1))]
    #[case::a_warp_each(20_000, 768, 768, Some(VECTORS))]
    #[case::heads(8192, 4096, 128, Some(1))]
    #[case::long_rows(8192, 32_768, 32_768, Some(1))]
    #[case::element_by_element(8192, 4095, 4095, None)]
    #[case::nothing(8192, 0, 8, Some(1))]
    fn blocks_cover_the_groups(
        #[case] rows: usize,
        #[case] columns: usize,
        #[case] width: usize,
        #[case] vectors: Option<usize>,
    ) {
        let ([groups, blocks, _], threads) = shape(rows, columns, width, vectors, 132);
        assert_eq!(groups, columns / width);
        // Rows are taken in turns, so that any number of blocks covers them.
        assert!(groups == 0 || (1..=rows.min(MAX_GRID)).contains(&blocks), "{blocks}");
        assert!(threads.is_multiple_of(32) && (32..=1024).contains(&threads), "{threads}");
    }
}
