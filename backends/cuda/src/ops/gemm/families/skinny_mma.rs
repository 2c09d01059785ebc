//! Skinny GEMM of up to 64 rows on tensor cores at memory bandwidth: `linear/skinny_mma.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, MAX_GRID},
    },
    ops::{
        gemm::{
            family::{Description, Family},
            problem::{Problem, ProductPlan},
        },
        type_name,
    },
};
use dsrun_core::{DType, Result};
use std::fmt::Display;

/// The maximum number of rows.
const ROWS: usize = 64;
/// Threads of a block.
const THREADS: usize = 256;

/// Whether the kernel supports these activations and weights.
pub(super) fn multiplies(problem: &Problem<'_>, device: &DeviceSpec) -> bool {
    device.has_half_mma()
        && problem.is_half()
        && problem.inputs().is_multiple_of(32)
        && problem.x.strides[0].is_multiple_of(8)
}

/// See `linear/skinny_mma.cu`.
pub(in crate::ops::gemm) struct SkinnyMma;

impl Family for SkinnyMma {
    fn description(&self) -> Description {
        Description {
            kernel: "skinny_mma",
            rows: format!("5 to 16; to {ROWS} without cuBLASLt"),
            devices: "sm_80 and up",
            operands: "f16 or bf16 throughout; inputs a multiple of 32, rows at multiples of 16 bytes",
            fused: "nothing".to_owned(),
            method: "mma.sync",
        }
    }

    fn supports(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool {
        let most = if device.batch_invariant { MAX_GRID * ROWS } else { ROWS };
        problem.is_bare() && problem.rows() <= most && multiplies(problem, device)
    }

    fn plan(&self, problem: &Problem<'_>, device: &DeviceSpec) -> Result<ProductPlan> {
        let tiles = match device.batch_invariant {
            true => ROWS / 8,
            false => problem.rows().div_ceil(8).next_power_of_two(),
        };
        let unroll = (problem.inputs() / 32).div_ceil(8).next_power_of_two().clamp(1, 4);
        let defines: [(_, &dyn Display); 6] = [
            ("X", &type_name(problem.x.dtype)?),
            ("Y", &type_name(problem.y.dtype)?),
            ("BIAS", &problem.bias_name()?),
            ("HALF", &i32::from(problem.x.dtype == DType::F16)),
            ("TILES", &tiles),
            ("UNROLL", &unroll),
        ];
        let spec = KernelSpec::new("linear/skinny_mma.cu", "skinny_mma", defines);
        Ok(ProductPlan::of_one(spec, move |args, function| {
            let parameters = args
                .sizes()
                .rows(args.x)
                .address(args.weight.address())
                .size(args.weight.layout.row_bytes)
                .address(args.bias)
                .rows(args.y);
            let grid = [args.y.size(1).div_ceil(16), args.y.size(0).div_ceil(tiles * 8), 1];
            Ok(LaunchOp::kernel(function, grid, THREADS, parameters))
        }))
    }
}
