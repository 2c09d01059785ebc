//! GEMM of any size and type on CUDA cores: `linear/tiled.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, MAX_GRID},
    },
    ops::{
        THREADS,
        elementwise::weight_words,
        gemm::{
            family::{Description, Family},
            problem::{Problem, ProductPlan},
        },
        type_name,
        weight::format_name,
    },
};
use dsrun_core::Result;
use std::fmt::Display;

/// Outputs and rows of a block.
const TILE: usize = 64;

/// See `linear/tiled.cu`.
pub(in crate::ops::gemm) struct Tiled;

impl Family for Tiled {
    fn description(&self) -> Description {
        Description {
            kernel: "tiled",
            rows: "any".to_owned(),
            devices: "all",
            operands: "any but bytes times bytes",
            fused: "nothing".to_owned(),
            method: "CUDA cores, weights widened to f32",
        }
    }

    fn supports(&self, problem: &Problem<'_>, _: &DeviceSpec) -> bool {
        problem.is_bare() && !problem.is_int8()
    }

    fn plan(&self, problem: &Problem<'_>, _: &DeviceSpec) -> Result<ProductPlan> {
        let defines: [(_, &dyn Display); 4] = [
            ("X", &type_name(problem.x.dtype)?),
            ("Y", &type_name(problem.y.dtype)?),
            ("BIAS", &problem.bias_name()?),
            ("FORMAT", &format_name(problem.weight.format)?),
        ];
        let spec = KernelSpec::new("linear/tiled.cu", "tiled", defines);
        Ok(ProductPlan::of_one(spec, |args, function| {
            let parameters = weight_words(args.sizes().rows(args.x), Some(args.weight));
            let parameters = parameters.address(args.bias).rows(args.y);
            let grid = [args.y.size(1).div_ceil(TILE), args.y.size(0).div_ceil(TILE).min(MAX_GRID), 1];
            Ok(LaunchOp::kernel(function, grid, THREADS, parameters))
        }))
    }
}
