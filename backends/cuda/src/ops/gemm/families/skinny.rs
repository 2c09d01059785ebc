//! Skinny GEMM of up to 16 rows with dense weights of any type on CUDA cores: `linear/skinny.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{kernel_spec::KernelSpec, launch::LaunchOp},
    ops::{
        elementwise::weight_words,
        gemm::{
            families::skinny_mma,
            family::{Description, Family},
            fused_linear::Epilogue,
            problem::{Problem, ProductPlan},
        },
        type_name,
        weight::format_name,
    },
};
use dsrun_core::{Result, WeightFormat};
use std::fmt::Display;

/// The maximum number of rows.
pub(super) const ROWS: usize = 16;
/// The maximum number of rows of a block. For more, `skinny_mma` is faster, with the norm as a separate launch.
const ROW_TILE: usize = 4;
/// Warps of a block.
const WARPS: usize = 4;
/// Warps per SM that saturate memory.
const WARPS_OF_SM: usize = 16;

/// Elements of a dense weight in 16 bytes.
pub(super) fn vector_elements(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Dense(dtype) => 16 / dtype.bytes(),
        _ => 1,
    }
}

/// Whether the CUDA core kernels for few rows support a problem: no epilogue, and at most an RMS norm of whole rows.
pub(super) fn takes(problem: &Problem<'_>, device: &DeviceSpec) -> bool {
    let normed = device.custom_gemm && problem.rows() <= ROW_TILE && problem.rms_norm().is_some();
    matches!(problem.fused.epilogue, Epilogue::Nothing)
        && (problem.fused.norm.is_none() || normed)
        && !problem.is_int8()
        && !problem.is_quantised()
}

/// See `linear/skinny.cu`.
pub(in crate::ops::gemm) struct Skinny;

impl Family for Skinny {
    fn description(&self) -> Description {
        Description {
            kernel: "skinny",
            rows: format!("to {ROWS}; to {ROW_TILE} where `skinny_mma` runs"),
            devices: "all",
            operands: "any dense",
            fused: format!("an RMS norm of up to {ROW_TILE} rows"),
            method: "CUDA cores, a few rows at a time",
        }
    }

    fn supports(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool {
        let most = if skinny_mma::multiplies(problem, device) { ROW_TILE } else { ROWS };
        takes(problem, device) && problem.rows() <= most
    }

    fn plan(&self, problem: &Problem<'_>, device: &DeviceSpec) -> Result<ProductPlan> {
        let (format, x) = (problem.weight.format, problem.x.dtype);
        let vector = vector_elements(format).max(16 / x.bytes());
        let rows = problem.rows().next_power_of_two().clamp(1, ROW_TILE);
        let weight_vectors = problem.inputs().div_ceil(vector_elements(format));
        // Several outputs per warp if reading x is expensive compared with the weights.
        let outputs = if rows == 4 { 2 } else { 1 };
        let wanted = device.sm_count * WARPS_OF_SM;
        let split = [1, 2, 4]
            .into_iter()
            .find(|split| problem.outputs() / outputs * split >= wanted || weight_vectors < 64 * split)
            .unwrap_or(WARPS);
        let unroll = weight_vectors.div_ceil(32 * split).next_power_of_two().clamp(1, 8 / outputs);
        let x_vectors =
            problem.x.strides[0].is_multiple_of(16 / x.bytes()) && problem.inputs().is_multiple_of(vector);
        let norm = problem.rms_norm();
        let norm_weight = norm.map_or(Ok("f32"), |(_, weight)| type_name(weight.dtype))?;
        let defines: [(_, &dyn Display); 11] = [
            ("X", &type_name(x)?),
            ("Y", &type_name(problem.y.dtype)?),
            ("BIAS", &problem.bias_name()?),
            ("G", &norm_weight),
            ("FORMAT", &format_name(format)?),
            ("TOKENS", &rows),
            ("ROWS", &outputs),
            ("SPLIT", &split),
            ("UNROLL", &unroll),
            ("X_VECTORS", &i32::from(x_vectors)),
            ("NORM", &i32::from(norm.is_some())),
        ];
        let spec = KernelSpec::new("linear/skinny.cu", "skinny", defines);
        let norm = problem.fused.norm;
        let outputs_of_block = WARPS / split * outputs;
        Ok(ProductPlan::of_one(spec, move |args, function| {
            let parameters = weight_words(args.sizes().rows(args.x), Some(args.weight));
            let mut parameters = parameters.address(args.bias).rows(args.y);
            if let Some(norm) = norm {
                let (eps, weight_offset) = norm.eps_and_offset();
                let weight = norm.weight().map_or(0, |weight| args.frame.address(weight));
                parameters = parameters.address(weight).float(eps).float(weight_offset);
            }
            let grid = [args.y.size(1).div_ceil(outputs_of_block), args.y.size(0).div_ceil(rows), 1];
            Ok(LaunchOp::kernel(function, grid, WARPS * 32, parameters))
        }))
    }
}
