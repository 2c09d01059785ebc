//! Activations, and gated activations.

use super::present;
use crate::{
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{self, Pointer, declaration, kernel_struct},
        launch::LaunchOp,
    },
    ops::{
        KernelPlan, THREADS, WIDE, operand,
        params::{ExtentParams, MatrixParams},
        plane, result, type_of, type_or_first, wide,
    },
};
use dsrun_core::{
    Result,
    kernels::CallDesc,
    op::{Activation, GateLayout, GatedActivation},
};

kernel_struct! {
    /// Parameters of `activation`.
    struct ActivationParams {
        extent: ExtentParams = "Extent",
        x: MatrixParams = "Matrix<const X>",
        /// May be null.
        bias: Pointer = "const BIAS*",
        y: MatrixParams = "Matrix<X>",
        columns: i64 = "i64",
        /// The upper limit of inputs; 0 for none.
        limit: f32 = "float",
    }
}

kernel_struct! {
    /// Parameters of `gated_activation` and `gated_activation_wide`.
    struct GatedActivationParams {
        extent: ExtentParams = "Extent",
        gate: MatrixParams = "Matrix<const X>",
        /// Absent if gate and up are columns of one tensor.
        up: MatrixParams = "Matrix<const X>",
        /// Of gate and up, in the layout of their columns; may be null.
        bias: Pointer = "const BIAS*",
        y: MatrixParams = "Matrix<X>",
        /// Columns of the result.
        columns: i64 = "i64",
        /// The upper limit of the gate and of the magnitude of up; 0 for none.
        limit: f32 = "float",
        /// Added to up.
        up_offset: f32 = "float",
    }
}

/// The generated header of these kernels' parameters.
pub(super) fn params_header() -> (String, String) {
    let declarations = [declaration::<ActivationParams>(), declaration::<GatedActivationParams>()];
    kernel_struct::params_header("elementwise/activation", &declarations)
}

pub(in crate::ops) fn activation(op: &Activation, call: &CallDesc) -> Result<KernelPlan> {
    let (function, limit) = (op.function as u32, op.limit);
    let defines: [(_, &dyn std::fmt::Display); 3] =
        [("X", &type_of(call, 0)?), ("BIAS", &type_or_first(call, 1)?), ("FUNCTION", &function)];
    let spec = KernelSpec::new("elementwise/activation.cu", "activation", defines);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, y) = (frame.tensor(0)?, frame.result(0)?);
        let (rows, columns) = (y.size(0), y.size(1));
        let params = ActivationParams {
            extent: ExtentParams::of(rows, &[x, y]),
            x: MatrixParams::of(x),
            bias: frame.address(1),
            y: MatrixParams::of(y),
            columns: columns as i64,
            limit,
        };
        Ok(LaunchOp::kernel(function, plane(rows, columns), THREADS, &params))
    }))
}

pub(in crate::ops) fn gated_activation(op: &GatedActivation, call: &CallDesc) -> Result<KernelPlan> {
    let (function, limit, up_offset) = (op.function as u32, op.limit, op.up_offset);
    let layout = match op.layout {
        GateLayout::Separate => 1,
        GateLayout::Concatenated => 2,
        GateLayout::Interleaved => 3,
    };
    let mut planes = vec![operand(call, 0)?, result(call, 0)?];
    planes.extend(call.tensor(1));
    let wide = wide(&planes);
    let entry = if wide { "gated_activation_wide" } else { "gated_activation" };
    let defines: [(_, &dyn std::fmt::Display); 4] = [
        ("X", &type_of(call, 0)?),
        ("BIAS", &type_or_first(call, 2)?),
        ("FUNCTION", &function),
        ("LAYOUT", &layout),
    ];
    let spec = KernelSpec::new("elementwise/activation.cu", entry, defines);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (gate, y) = (frame.tensor(0)?, frame.result(0)?);
        let (rows, columns) = (y.size(0), y.size(1));
        let mut bounds = present(frame, [0, 1]);
        bounds.push(y);
        let params = GatedActivationParams {
            extent: ExtentParams::of(rows, &bounds),
            gate: MatrixParams::of(gate),
            up: MatrixParams::optional(frame.optional(1)),
            bias: frame.address(2),
            y: MatrixParams::of(y),
            columns: columns as i64,
            limit,
            up_offset,
        };
        let items = if wide { columns / WIDE } else { columns };
        Ok(LaunchOp::kernel(function, plane(rows, items), THREADS, &params))
    }))
}
