//! Rotary embedding of queries or keys.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{self, Pointer, declaration, kernel_struct},
        launch::LaunchOp,
    },
    ops::{
        KernelPlan, THREADS, WIDE, operand,
        params::{ExtentParams, MatrixParams},
        plane, result, type_of,
    },
};
use dsrun_core::{
    Result,
    kernels::CallDesc,
    op::{Rope, RopePairing},
};

kernel_struct! {
    /// Parameters of `rope` and `rope_wide`.
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

/// The maximum number of blocks of `rope_wide`; more vectors are taken in turns.
const MAX_BLOCKS: usize = 1 << 20;

/// The generated header of the kernels' parameters.
pub(super) fn params_header() -> (String, String) {
    kernel_struct::params_header("elementwise/rope", &[declaration::<RopeParams>()])
}

pub(in crate::ops) fn rope(op: &Rope, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let (heads, scale) = (op.heads as usize, op.scale);
    let wide = is_wide(op, call, device)?;
    let neighbours = i32::from(op.pairing == RopePairing::Neighbours);
    let defines: [(_, &dyn std::fmt::Display); 2] = [("X", &type_of(call, 0)?), ("NEIGHBOURS", &neighbours)];
    let entry = if wide { "rope_wide" } else { "rope" };
    let spec = KernelSpec::new("elementwise/rope.cu", entry, defines);
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
        let items = heads * (size - pairs);
        let grid = match wide {
            true => [(rows * items / WIDE).div_ceil(THREADS).min(MAX_BLOCKS), 1, 1],
            false => plane(rows, items),
        };
        Ok(LaunchOp::kernel(function, grid, THREADS, &params))
    }))
}

/// Whether heads and their rotated parts consist of vectors of [`WIDE`] elements, of which all multiprocessors have a block.
fn is_wide(op: &Rope, call: &CallDesc, device: &DeviceSpec) -> Result<bool> {
    let (x, pairs, y) = (operand(call, 0)?, operand(call, 2)?.shape[0], result(call, 0)?);
    if y.shape.iter().product::<usize>() < 2 * WIDE * THREADS * device.sm_count {
        return Ok(false);
    }
    let whole = |size: usize| size.is_multiple_of(WIDE);
    let heads = whole(y.shape[1] / (op.heads as usize).max(1)) && whole(pairs);
    Ok(op.pairing == RopePairing::Halves && heads && whole(x.strides[0]) && whole(y.strides[0]))
}
