//! GEMM of up to 16 rows at memory bandwidth, with fused norm and epilogue: `linear/decode_gemm.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, Parameters},
    },
    ops::{
        gemm::{
            families::staged_activations::{
                NORMED_ROWS, norm_defines, norm_words, own_vectors, pitch, takes_norm,
            },
            family::{Description, Family},
            fused_linear::Epilogue,
            problem::{Problem, ProductPlan},
        },
        type_name,
    },
};
use dsrun_core::{DType, Error, Result};
use std::fmt::Display;

/// The maximum number of rows.
const ROWS: usize = 16;
/// The maximum number of vectors of a row that a thread keeps in registers for the norm; large, because an SM has a single block.
const HELD: usize = 32;
/// Warps that multiply.
const WARPS: usize = 8;
/// Inputs of a k tile.
const K_TILE: usize = 64;
/// Bytes of a stage of the rings of all warps.
const STAGE: usize = WARPS * 16 * K_TILE * 2;
/// The maximum number of stages: 112 KiB in flight.
const STAGES: usize = 8;
/// Split-K is worth its sums in scratch memory if it increases the share of busy SMs by this much.
const WORTH: f64 = 0.04;

/// The tile configuration of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileConfig {
    tiles: usize,
    /// Blocks that share the inputs of a tile (split-K).
    slices: usize,
    /// Inputs of a slice.
    slice: usize,
    stages: usize,
    blocks: usize,
    /// Bytes of shared memory of a block.
    shared: usize,
}

/// The average share of busy SMs until the last block is done.
fn busy(tiles: usize, slices: usize, sm_count: usize) -> f64 {
    let groups = (sm_count / slices).clamp(1, tiles.max(1));
    (tiles * slices) as f64 / (tiles.div_ceil(groups) * sm_count) as f64
}

impl TileConfig {
    /// The tile configuration of a problem; `None` if its epilogue is not supported or its activations do not fit.
    fn of(problem: &Problem<'_>, device: &DeviceSpec) -> Option<Self> {
        Self::new(problem.rows(), problem.inputs(), problem.tiles()?, device)
    }

    fn new(rows: usize, inputs: usize, tiles: usize, device: &DeviceSpec) -> Option<Self> {
        let sm_count = device.sm_count;
        let most_shared = device.shared_memory();
        // Activations may take a third of a block's shared memory.
        let room = most_shared / 3;
        let least = (rows * pitch(inputs * 2)).div_ceil(room);
        let most = if rows == 1 { least } else { least + 8 };
        let mut best: Option<(usize, f64)> = None;
        for slices in least..=most.min(sm_count) {
            let slice = inputs.div_ceil(32 * slices) * 32;
            if (slices - 1) * slice >= inputs || rows * pitch(slice * 2) > room {
                continue;
            }
            let busy = busy(tiles, slices, sm_count);
            if best.is_none_or(|(_, before)| busy > before + WORTH) {
                best = Some((slices, busy));
            }
        }
        let (slices, _) = best?;
        let slice = inputs.div_ceil(32 * slices) * 32;
        // Two sets of sums: 8 warps, 20 floats a row.
        let beside = rows * pitch(slice * 2) + 2 * WARPS * rows * 20 * 4;
        let stages = most_shared.saturating_sub(beside) / STAGE;
        if stages < 3 {
            return None;
        }
        let rounds = tiles.div_ceil((sm_count / slices).max(1)).max(1);
        let needed = rounds * slice.div_ceil(WARPS * K_TILE) + 1;
        let stages = stages.min(STAGES).min(needed.max(3));
        let groups = (sm_count / slices).clamp(1, tiles.max(1));
        // Prevents two large blocks on one SM, where they would share its bandwidth while another SM is idle.
        let alone = if groups * slices * 2 > sm_count { most_shared / 2 + 1024 } else { 0 };
        let shared = (stages * STAGE + beside).max(alone);
        Some(Self { tiles, slices, slice, stages, blocks: groups * slices, shared })
    }
}

/// See `linear/decode_gemm.cu`.
pub(in crate::ops::gemm) struct DecodeGemm;

impl Family for DecodeGemm {
    fn description(&self) -> Description {
        Description {
            kernel: "decode_gemm",
            rows: format!("1 to {ROWS}"),
            devices: "sm_80 and up",
            operands: "f16 or bf16 throughout; inputs a multiple of 32",
            fused: format!("a norm of up to {NORMED_ROWS} rows; every epilogue but norms of heads"),
            method: "a ring buffer of asynchronous copies feeds tensor cores",
        }
    }

    fn supports(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool {
        device.custom_gemm
            && device.has_half_mma()
            && (1..=ROWS).contains(&problem.rows())
            && problem.is_half()
            && problem.inputs() > 0
            && problem.inputs().is_multiple_of(32)
            && problem.outputs() > 0
            && problem.is_indexable()
            && problem.x.strides[0].is_multiple_of(8)
            && takes_norm(problem)
            && TileConfig::of(problem, device).is_some()
    }

    fn plan(&self, problem: &Problem<'_>, device: &DeviceSpec) -> Result<ProductPlan> {
        let config =
            TileConfig::of(problem, device).ok_or_else(|| Error::internal("no tiles for decode_gemm"))?;
        let (rows, inputs, outputs) = (problem.rows(), problem.inputs(), problem.outputs());
        // Recognises the output projection of one token's attention: a residual, no norm, and at most as many inputs as outputs.
        let adds_only = problem.fused.norm.is_none() && matches!(problem.fused.epilogue, Epilogue::Sum(..));
        let follows_attention = rows == 1 && adds_only && inputs <= outputs;
        let defines: [(_, &dyn Display); 9] = [
            ("WARPS", &WARPS),
            ("X", &type_name(problem.x.dtype)?),
            ("HALF", &i32::from(problem.x.dtype == DType::F16)),
            ("TOKENS", &rows),
            ("SLICES", &config.slices),
            ("SLICE", &config.slice),
            ("X_PITCH", &pitch(config.slice * 2)),
            ("STAGES", &config.stages),
            ("PACED", &i32::from(follows_attention)),
        ];
        let mut spec =
            KernelSpec::new("linear/decode_gemm.cu", "decode_gemm", defines).with_shared(config.shared);
        spec.defines.extend(norm_defines(problem)?);
        spec.defines.extend(problem.epilogue_defines()?);
        spec.defines.push(("OWN", own_vectors([rows, inputs], WARPS, HELD).to_string()));
        let items = 8 * rows;
        let (workspace, persistent) = match config.slices {
            1 => (0, 0),
            slices => (config.tiles * slices * items * 8, config.tiles * items.div_ceil(32) * 4),
        };
        let fused = problem.fused;
        let plan = ProductPlan::of_one(spec, move |args, function| {
            let weight = args.weight;
            let parameters = Parameters::default()
                .extent(args.x.size(0), &args.bounds)
                .size(config.tiles)
                .size(weight.layout.columns)
                .rows(args.x)
                .address(weight.address())
                .size(weight.layout.row_bytes)
                .size(usize::from(weight.immutable))
                .words(norm_words(&fused, args.frame))
                .address(args.workspace)
                .address(args.frame.persistent)
                .structure(&fused.epilogue_params(args.frame, args.y, true)?);
            Ok(LaunchOp::kernel(function, [config.blocks, 1, 1], WARPS * 32, parameters))
        });
        Ok(ProductPlan { workspace, persistent, ..plan })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::one_row(1, 4096, 384)]
    #[case::one_long_row(1, 14_336, 256)]
    #[case::tiny(1, 576, 36)]
    #[case::eight_rows(8, 14_336, 256)]
    #[case::most_rows(16, 4096, 1792)]
    #[case::odd_rows(11, 1600, 100)]
    #[case::long_rows(16, 20_480, 320)]
    fn slices_cover_the_inputs_and_fit(#[case] rows: usize, #[case] inputs: usize, #[case] tiles: usize) {
        let device = DeviceSpec::usual(90, 132);
        let config = TileConfig::new(rows, inputs, tiles, &device).unwrap();
        assert!(
            config.slices * config.slice >= inputs && (config.slices - 1) * config.slice < inputs,
            "{config:?}"
        );
        assert!(config.slice.is_multiple_of(32), "{config:?}");
        assert!(config.blocks <= 132 && config.blocks.is_multiple_of(config.slices), "{config:?}");
        assert!(config.shared <= device.shared_memory(), "{config:?}");
        assert!(config.stages >= 3, "{config:?}");
    }
}
