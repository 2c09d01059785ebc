//! GEMM of up to 32 rows with packed integers on CUDA cores: `linear/packed_plain.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{kernel_spec::KernelSpec, launch::LaunchOp},
    ops::{
        elementwise::weight_words,
        gemm::{
            family::{Description, Family},
            problem::{Problem, ProductPlan},
        },
        type_name,
        weight::{UNIT, format_name},
    },
};
use dsrun_core::Result;
use std::fmt::Display;

/// The maximum number of rows: for more, unpacking the weights for cuBLASLt is faster.
pub(super) const ROWS: usize = 32;
/// The maximum number of rows of a block.
const ROW_TILE: usize = 4;
/// Warps of a block.
const WARPS: usize = 4;

/// See `linear/packed_plain.cu`.
pub(in crate::ops::gemm) struct PackedPlain;

impl Family for PackedPlain {
    fn description(&self) -> Description {
        Description {
            kernel: "packed_plain",
            rows: format!("to {ROWS}"),
            devices: "all",
            operands: "integers; any activations",
            fused: "nothing".to_owned(),
            method: "CUDA cores, a few rows at a time",
        }
    }

    fn supports(&self, problem: &Problem<'_>, _: &DeviceSpec) -> bool {
        problem.is_bare() && !problem.is_int8() && problem.is_quantised() && problem.rows() <= ROWS
    }

    fn plan(&self, problem: &Problem<'_>, _: &DeviceSpec) -> Result<ProductPlan> {
        let rows = problem.rows().next_power_of_two().clamp(1, ROW_TILE);
        let defines: [(_, &dyn Display); 5] = [
            ("X", &type_name(problem.x.dtype)?),
            ("Y", &type_name(problem.y.dtype)?),
            ("BIAS", &problem.bias_name()?),
            ("FORMAT", &format_name(problem.weight.format)?),
            ("TOKENS", &rows),
        ];
        let spec = KernelSpec::new("linear/packed_plain.cu", "packed_plain", defines);
        Ok(ProductPlan::of_one(spec, move |args, function| {
            let parameters = weight_words(args.sizes().rows(args.x), Some(args.weight));
            let parameters = parameters.address(args.bias).rows(args.y);
            let grid = [args.y.size(1).div_ceil(WARPS * UNIT), args.y.size(0).div_ceil(rows), 1];
            Ok(LaunchOp::kernel(function, grid, WARPS * 32, parameters))
        }))
    }
}
