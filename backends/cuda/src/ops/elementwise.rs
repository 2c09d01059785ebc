//! Elementwise ops and lookups: sums, casts, gathered rows, activations, rotary embedding and embedding.

mod activation;
mod embed;
mod rope;

use crate::{
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{Pointer, declaration, kernel_struct, params_header},
        launch::{Function, LaunchOp, Parameters},
    },
    ops::{
        KernelPlan, THREADS, WIDE,
        bound::Bound,
        frame::Frame,
        operand,
        operands::bits_of,
        params::{ExtentParams, MatrixParams, WeightParams},
        plane, result, type_name, type_of, type_or_first,
        weight::CudaWeight,
        wide,
    },
};
use dsrun_core::{
    Result,
    kernels::CallDesc,
    op::{Add, Cast, Columns},
};
use std::sync::Arc;

pub(super) use activation::{activation, gated_activation};
pub(super) use embed::embed;
pub(super) use rope::rope;

kernel_struct! {
    /// Parameters of `add` and `add_wide`.
    struct AddParams {
        extent: ExtentParams = "Extent",
        a: MatrixParams = "Matrix<const X>",
        b: MatrixParams = "Matrix<const X>",
        /// May be absent.
        c: MatrixParams = "Matrix<const X>",
        /// May be null.
        bias: Pointer = "const BIAS*",
        y: MatrixParams = "Matrix<X>",
        columns: i64 = "i64",
        alpha: f32 = "float",
    }
}

kernel_struct! {
    /// Parameters of `cast`.
    struct CastParams {
        extent: ExtentParams = "Extent",
        x: MatrixParams = "Matrix<const X>",
        y: MatrixParams = "Matrix<Y>",
        columns: i64 = "i64",
    }
}

kernel_struct! {
    /// Parameters of `gather_rows`.
    struct GatherRowsParams {
        extent: ExtentParams = "Extent",
        /// The rows of `x`.
        source: ExtentParams = "Extent",
        x: MatrixParams = "Matrix<const X>",
        index: Pointer = "const int*",
        y: MatrixParams = "Matrix<X>",
        columns: i64 = "i64",
    }
}

/// The generated headers of these kernels' parameters.
pub(super) fn params_headers() -> Vec<(String, String)> {
    vec![
        params_header("elementwise/add", &[declaration::<AddParams>()]),
        params_header("elementwise/cast", &[declaration::<CastParams>()]),
        params_header("elementwise/gather_rows", &[declaration::<GatherRowsParams>()]),
        activation::params_header(),
        embed::params_header(),
        rope::params_header(),
    ]
}

/// The operands at these indices that are present.
fn present<const N: usize>(frame: &Frame, indices: [usize; N]) -> Vec<&Bound> {
    indices.into_iter().filter_map(|index| frame.optional(index)).collect()
}

pub(super) fn add(op: &Add, call: &CallDesc) -> Result<KernelPlan> {
    let alpha = op.alpha;
    let mut planes = vec![operand(call, 0)?, operand(call, 1)?, result(call, 0)?];
    planes.extend(call.tensor(2));
    let wide = wide(&planes);
    let entry = if wide { "add_wide" } else { "add" };
    let types: [(_, &dyn std::fmt::Display); 2] =
        [("X", &type_of(call, 0)?), ("BIAS", &type_or_first(call, 3)?)];
    let spec = KernelSpec::new("elementwise/add.cu", entry, types);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (a, b, y) = (frame.tensor(0)?, frame.tensor(1)?, frame.result(0)?);
        let (rows, columns) = (y.size(0), y.size(1));
        let mut bounds = present(frame, [0, 1, 2]);
        bounds.push(y);
        let params = AddParams {
            extent: ExtentParams::of(rows, &bounds),
            a: MatrixParams::of(a),
            b: MatrixParams::of(b),
            c: MatrixParams::optional(frame.optional(2)),
            bias: frame.address(3),
            y: MatrixParams::of(y),
            columns: columns as i64,
            alpha,
        };
        let items = if wide { columns / WIDE } else { columns };
        Ok(LaunchOp::kernel(function, plane(rows, items), THREADS, &params))
    }))
}

pub(super) fn cast(op: &Cast, call: &CallDesc) -> Result<KernelPlan> {
    copy(type_of(call, 0)?, type_name(op.dtype)?, 0)
}

/// A range of columns, copied by the cast kernel.
pub(super) fn columns(op: &Columns, call: &CallDesc) -> Result<KernelPlan> {
    let (name, start) = (type_of(call, 0)?, op.start as usize * operand(call, 0)?.dtype.bytes());
    copy(name, name, start)
}

/// The kernel that copies a plane of elements of this many bytes.
pub(super) fn copy_of_plane(bytes: usize) -> Result<KernelSpec> {
    let name = bits_of(bytes)?;
    Ok(KernelSpec::new("elementwise/cast.cu", "cast", [("X", &name), ("Y", &name)]))
}

/// A launch of [`copy_of_plane`].
pub(super) fn copy_plane(
    function: &Arc<Function>,
    extent: ExtentParams,
    [x, y]: [MatrixParams; 2],
    columns: usize,
) -> Option<LaunchOp> {
    let rows = extent.rows as usize;
    let params = CastParams { extent, x, y, columns: columns as i64 };
    LaunchOp::kernel(function, plane(rows, columns), THREADS, &params)
}

/// A copy of the columns from byte `start` on, rounded to the type `to`.
fn copy(from: &'static str, to: &'static str, start: usize) -> Result<KernelPlan> {
    let spec = KernelSpec::new("elementwise/cast.cu", "cast", [("X", &from), ("Y", &to)]);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, y) = (frame.tensor(0)?, frame.result(0)?);
        let (rows, columns) = (y.size(0), y.size(1));
        let first = MatrixParams::of(x);
        let params = CastParams {
            extent: ExtentParams::of(rows, &[x, y]),
            x: MatrixParams { first: first.first + start as u64, ..first },
            y: MatrixParams::of(y),
            columns: columns as i64,
        };
        Ok(LaunchOp::kernel(function, plane(rows, columns), THREADS, &params))
    }))
}

pub(super) fn gather_rows(call: &CallDesc) -> Result<KernelPlan> {
    let spec = KernelSpec::new("elementwise/gather_rows.cu", "gather_rows", [("X", &type_of(call, 0)?)]);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, index, y) = (frame.tensor(0)?, frame.tensor(1)?, frame.result(0)?);
        let (rows, columns) = (y.size(0), y.size(1));
        let params = GatherRowsParams {
            extent: ExtentParams::of(rows, &[index, y]),
            source: ExtentParams::of(x.size(0), &[x]),
            x: MatrixParams::of(x),
            index: index.address,
            y: MatrixParams::of(y),
            columns: columns as i64,
        };
        Ok(LaunchOp::kernel(function, plane(rows, columns), THREADS, &params))
    }))
}

/// Appends a weight to kernel parameters.
pub(super) fn weight_words(parameters: Parameters, weight: Option<&CudaWeight>) -> Parameters {
    parameters.structure(&weight.map(WeightParams::of).unwrap_or_default())
}
