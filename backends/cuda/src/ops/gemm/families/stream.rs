//! GEMV with dense weights of any type on CUDA cores at memory bandwidth: `linear/stream.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{kernel_spec::KernelSpec, launch::LaunchOp},
    ops::{
        elementwise::weight_words,
        gemm::{
            families::skinny::{takes, vector_elements},
            family::{Description, Family},
            problem::{Problem, ProductPlan},
        },
        type_name,
        weight::format_name,
    },
};
use dsrun_core::{DType, Result};
use std::fmt::Display;

/// The maximum number of inputs that a block keeps in shared memory, as f32, besides its ring buffers.
const STAGED: usize = 7168;
/// Resident blocks of an SM.
const BLOCKS: usize = 6;
/// Warps of a block.
const WARPS: usize = 4;

/// See `linear/stream.cu`.
pub(in crate::ops::gemm) struct Stream;

impl Family for Stream {
    fn description(&self) -> Description {
        Description {
            kernel: "stream",
            rows: "1".to_owned(),
            devices: "sm_80 and up",
            operands: "any dense",
            fused: "an RMS norm".to_owned(),
            method: "a ring buffer of asynchronous copies feeds CUDA cores",
        }
    }

    fn supports(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool {
        takes(problem, device)
            && problem.rows() == 1
            && device.has_half_mma()
            && problem.inputs() > 0
            && problem.is_indexable()
    }

    fn plan(&self, problem: &Problem<'_>, device: &DeviceSpec) -> Result<ProductPlan> {
        let (format, x) = (problem.weight.format, problem.x.dtype);
        let (outputs, inputs, vector) = (problem.outputs(), problem.inputs(), vector_elements(format));
        let weight_vectors = inputs.div_ceil(vector);
        // Resident warps of the device; fewer than two thirds of them would not saturate memory.
        let most = device.sm_count * BLOCKS * WARPS;
        let split =
            [1, 2].into_iter().find(|split| outputs * split * 2 >= most || weight_vectors < 64 * split);
        let split = split.unwrap_or(WARPS);
        // The number of groups of warps with which all loop equally often.
        let rounds = outputs.div_ceil((most / split).max(1)).max(1);
        let blocks = outputs.div_ceil(rounds).div_ceil(WARPS / split);
        let x_vectors = inputs.is_multiple_of(vector.max(16 / x.bytes())) && x.bytes() * vector >= 16;
        let norm_weight = problem.rms_norm().map_or(DType::F32, |(_, weight)| weight.dtype);
        let defines: [(_, &dyn Display); 10] = [
            ("X", &type_name(x)?),
            ("Y", &type_name(problem.y.dtype)?),
            ("BIAS", &problem.bias_name()?),
            ("G", &type_name(norm_weight)?),
            ("FORMAT", &format_name(format)?),
            ("SPLIT", &split),
            ("X_VECTORS", &i32::from(x_vectors)),
            ("STAGED", &(if inputs <= STAGED { weight_vectors } else { 0 })),
            ("WHOLE", &i32::from(weight_vectors.is_multiple_of(32 * split))),
            ("NORM", &i32::from(problem.fused.norm.is_some())),
        ];
        let spec = KernelSpec::new("linear/stream.cu", "stream", defines);
        let norm = problem.fused.norm;
        Ok(ProductPlan::of_one(spec, move |args, function| {
            let parameters = weight_words(args.sizes().rows(args.x), Some(args.weight));
            let parameters = parameters.address(args.bias).rows(args.y);
            let (eps, weight_offset) = norm.map_or((0.0, 0.0), |norm| norm.eps_and_offset());
            let norm_weight =
                norm.and_then(|norm| norm.weight()).map_or(0, |weight| args.frame.address(weight));
            let parameters = parameters.address(norm_weight).float(eps).float(weight_offset);
            Ok(LaunchOp::kernel(function, [blocks, 1, 1], WARPS * 32, parameters))
        }))
    }
}
