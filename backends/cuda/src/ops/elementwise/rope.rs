//! Rotary embedding of queries or keys.

use crate::{
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{self, Pointer, declaration, kernel_struct},
        launch::LaunchOp,
    },
    ops::{
        KernelPlan, THREADS,
        params::{ExtentParams, MatrixParams},
        plane, type_of,
    },
};
use dsrun_core::{
    Result,
    kernels::CallDesc,
    op::{Rope, RopePairing},
};

kernel_struct! {
    /// Parameters of `rope`.
    struct RopeParams {
        extent: ExtentParams = "Extent",
        x: MatrixParams = "Matrix<const X>",
        y: MatrixParams = "Matrix<X>",
        positions: Pointer = "const int*",
        /// The angle of each pair at position 1.
        frequencies: Pointer = "const float*",
        heads: i64 = "i64",
        /// Elements of a head.
        size: i64 = "i64",
        /// Rotated pairs of a head.
        pairs: i64 = "i64",
        scale: f32 = "float",
    }
}

/// The generated header of the kernel's parameters.
pub(super) fn params_header() -> (String, String) {
    kernel_struct::params_header("elementwise/rope", &[declaration::<RopeParams>()])
}

pub(in crate::ops) fn rope(op: &Rope, call: &CallDesc) -> Result<KernelPlan> {
    let (heads, scale) = (op.heads as usize, op.scale);
    let neighbours = i32::from(op.pairing == RopePairing::Neighbours);
    let defines: [(_, &dyn std::fmt::Display); 2] = [("X", &type_of(call, 0)?), ("NEIGHBOURS", &neighbours)];
    let spec = KernelSpec::new("elementwise/rope.cu", "rope", defines);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, positions, frequencies) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let y = frame.result(0)?;
        let (rows, size, pairs) = (y.size(0), y.size(1) / heads.max(1), frequencies.size(0));
        let params = RopeParams {
            extent: ExtentParams::of(rows, &[x, positions, y]),
            x: MatrixParams::of(x),
            y: MatrixParams::of(y),
            positions: positions.address,
            frequencies: frequencies.address,
            heads: heads as i64,
            size: size as i64,
            pairs: pairs as i64,
            scale,
        };
        Ok(LaunchOp::kernel(function, plane(rows, heads * (size - pairs)), THREADS, &params))
    }))
}
