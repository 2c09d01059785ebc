//! Int8 GEMM of any number of rows: `linear/int8_mma.cu`; and code shared with `int8_wgmma`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, MAX_GRID},
    },
    ops::{
        THREADS,
        gemm::{
            family::{Description, Family},
            problem::{Args, Problem, ProductPlan},
        },
        type_name,
        weight::Packing,
    },
};
use dsrun_core::{Error, Result};
use std::fmt::Display;

/// Outputs and rows of a block.
const TILE: [usize; 2] = [64, 128];

/// The packing of a problem's weight.
pub(super) fn packing(problem: &Problem<'_>) -> Result<Packing> {
    let missing =
        || Error::internal("linear_w8a8 needs weights of signed bytes with a scale for each output");
    problem.int8_packing().ok_or_else(missing)
}

/// The constants of `linear/int8.cuh`, besides the type of scales.
pub(super) fn defines(problem: &Problem<'_>) -> Result<Vec<(&'static str, String)>> {
    Ok([
        ("BIAS", problem.bias_name()?.to_owned()),
        ("Y", type_name(problem.y.dtype)?.to_owned()),
        ("ADDED", i32::from(problem.residual.is_some()).to_string()),
    ]
    .into())
}

/// `struct Results` of `linear/int8.cuh`; `limit` is that of a gate.
pub(super) fn results(args: &Args<'_>, limit: f32) -> [u64; 8] {
    let added = args.residual_rows();
    let alpha_and_limit = u64::from(1.0f32.to_bits()) | u64::from(limit.to_bits()) << 32;
    let y_row = args.y.stride(0) as u64;
    let scales = args.weight.scales();
    [args.scales, scales, args.bias, args.y.address, y_row, added.0, added.1 as u64, alpha_and_limit]
}

/// Whether rows of activations begin at multiples of 16 bytes and are not empty.
pub(super) fn is_aligned(problem: &Problem<'_>) -> bool {
    problem.x.strides[0].is_multiple_of(16) && problem.inputs() > 0
}

/// See `linear/int8_mma.cu`.
pub(in crate::ops::gemm) struct Int8Mma;

impl Family for Int8Mma {
    fn description(&self) -> Description {
        Description {
            kernel: "int8_mma",
            rows: "any".to_owned(),
            devices: "all",
            operands: "bytes times bytes",
            fused: "a sum".to_owned(),
            method: "mma.sync",
        }
    }

    fn supports(&self, problem: &Problem<'_>, _: &DeviceSpec) -> bool {
        problem.int8_packing().is_some() && (problem.is_bare() || problem.is_unscaled_sum())
    }

    fn plan(&self, problem: &Problem<'_>, _: &DeviceSpec) -> Result<ProductPlan> {
        let vectors = is_aligned(problem) && problem.inputs().is_multiple_of(16);
        let own: [(_, &dyn Display); 2] =
            [("X_VECTORS", &i32::from(vectors)), ("W_SCALE", &type_name(packing(problem)?.scale)?)];
        let mut spec = KernelSpec::new("linear/int8_mma.cu", "int8_mma", own);
        spec.defines.extend(defines(problem)?);
        Ok(ProductPlan::of_one(spec, |args, function| {
            let parameters = args
                .sizes()
                .rows(args.x)
                .address(args.weight.address())
                .size(args.weight.layout.row_bytes)
                .words(results(args, 0.0));
            let [outputs, rows] = TILE;
            let grid = [args.y.size(1).div_ceil(outputs), args.y.size(0).div_ceil(rows).min(MAX_GRID), 1];
            Ok(LaunchOp::kernel(function, grid, THREADS, parameters))
        }))
    }
}
