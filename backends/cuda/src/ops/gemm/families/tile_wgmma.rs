//! GEMM of more than 128 rows at tensor core speed on Hopper, with a fused epilogue: `linear/tile_wgmma.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, Parameters},
    },
    ops::gemm::{
        families::{
            batch_wgmma,
            bulk_copies::{ALIGNMENT, ORDER, RING, ROW_BYTES, activations, ordered_weights, weights},
            cublaslt,
        },
        family::{Description, Family},
        fused_linear::Epilogue,
        problem::{Problem, ProductPlan},
    },
};
use dsrun_core::{DType, Result, op::GateLayout};
use std::fmt::Display;

/// Consumer warpgroups, each for 64 rows of a tile.
const GROUPS: usize = 2;
/// Rows of a tile.
const ROWS: usize = GROUPS * 64;
/// Threads of a block: the consumer warpgroups and a producer warpgroup.
const THREADS: usize = (GROUPS + 1) * 128;
/// Inputs of a k tile.
const K_TILE: usize = ROW_BYTES / 2;
/// Possible outputs of a tile; the one that keeps all SMs busy to the end is chosen.
const OUTPUTS: [usize; 4] = [256, 224, 192, 128];
/// Blocks of a cluster, which share weights by multicast.
const CLUSTER: usize = 2;
const MOST_STAGES: usize = 8;
/// Results per store.
const VECTOR: usize = 8;
/// Bytes of device memory that an SM reads or writes in a cycle: about 4 TB/s over 132 SMs at 1.8 GHz.
const MOVED: usize = 16;
/// The cost of the end of a tile, in k tiles.
const END: usize = 2;
/// The cost of another launch after cuBLASLt's, in units of 4 cycles: about 1 microsecond.
const LAUNCH: usize = 512;
/// Up to this many rows, a product with a residual is faster here than with cuBLASLt, which is slightly better at more rows, if that
/// needs one launch. Measured on an H200.
const MOST_ROWS: usize = 1024;
/// The same for a product alone, for which cuBLASLt has to clear a counter first.
const MOST_ROWS_ALONE: usize = 2048;
/// Rows of a step with prompts, whose tiles all numbers of rows have on a batch-invariant device. Only speed depends on it.
const OF_PROMPTS: usize = 1024;
/// The minimum percentage of busy SMs for either.
const BUSY: usize = 85;

/// The tile configuration of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileConfig {
    /// Outputs of a tile.
    outputs: usize,
    /// Whether weights are loaded in an order that gives lanes neighbouring results, [`ORDER`] at a time.
    ordered: bool,
    stages: usize,
    /// The average percentage of SMs that have work.
    busy: usize,
    /// The work of the busiest SM, in units of 4 cycles.
    cost: usize,
}

impl TileConfig {
    /// The tile configuration that minimises the work of the busiest SM, and of a launch for heads of this size if tiles do not consist of
    /// whole ones.
    fn new(
        rows: usize,
        outputs: usize,
        inputs: usize,
        gated: bool,
        head: Option<usize>,
        sm_count: usize,
    ) -> Self {
        let clusters = (sm_count / CLUSTER).max(1);
        let k_tiles = inputs.div_ceil(K_TILE) + END;
        let tiles = |in_tile: usize| rows.div_ceil(ROWS * CLUSTER) * outputs.div_ceil(in_tile);
        // That launch reads and writes 2 bytes of each result, and a tile's rows take 4 cycles for one output of a k tile.
        let apart = rows * outputs / (sm_count * MOVED).max(1);
        let cost = |in_tile: &usize| {
            let heads = if head.is_some_and(|size| !in_tile.is_multiple_of(size)) { apart } else { 0 };
            tiles(*in_tile).div_ceil(clusters) * k_tiles * in_tile + heads
        };
        let results = if gated { outputs / 2 } else { outputs };
        let outputs = OUTPUTS.into_iter().min_by_key(cost).unwrap_or(OUTPUTS[0]);
        let cost = tiles(outputs).div_ceil(clusters) * k_tiles * outputs;
        let stages = (RING / ((ROWS + outputs) * ROW_BYTES)).min(MOST_STAGES);
        let pairs = tiles(outputs);
        let busy = 100 * pairs / (pairs.div_ceil(clusters) * clusters).max(1);
        let ordered = results.is_multiple_of(ORDER) && (outputs / 2).is_multiple_of(ORDER);
        Self { outputs, ordered, stages, busy, cost }
    }

    fn of(problem: &Problem<'_>, device: &DeviceSpec) -> Self {
        let gated = problem.is_gated_by_halves();
        let head = problem.head_halves();
        // All numbers of rows have the tiles of a step with long prompts, so that heads fit into those of all or none.
        let rows = if device.batch_invariant { OF_PROMPTS } else { problem.rows() };
        Self::new(rows, problem.outputs(), problem.inputs(), gated, head, device.sm_count)
    }

    /// Blocks for so many rows, each of which loops over tiles.
    fn blocks(&self, rows: usize, outputs: usize, sm_count: usize) -> usize {
        let pairs = rows.div_ceil(ROWS * CLUSTER) * outputs.div_ceil(self.outputs);
        pairs.min((sm_count / CLUSTER).max(1)) * CLUSTER
    }

    /// Whether a product is faster than with cuBLASLt and the launches that it needs after it, if there is cuBLASLt.
    fn pays(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool {
        let rows = problem.rows();
        let most = if problem.residual.is_some() { MOST_ROWS } else { MOST_ROWS_ALONE };
        // One launch reads a product of f32 and writes results of 2 bytes, for which the product is written in 4 bytes instead of 2.
        let moved = rows * problem.outputs() * 8 / (device.sm_count * MOVED * 4).max(1);
        let saved = cublaslt::launches_after(problem) * (LAUNCH + moved);
        let idle = self.cost * (100 - self.busy) / 100;
        rows <= most && self.busy >= BUSY || saved > idle || !device.blas
    }

    /// Whether the kernel supports the heads of a problem: tiles consist of whole heads.
    fn takes_heads(&self, problem: &Problem<'_>) -> bool {
        problem.head_halves().is_some_and(|size| {
            self.ordered && size.is_multiple_of(2 * ORDER) && self.outputs.is_multiple_of(size)
        })
    }

    fn spec(&self, problem: &Problem<'_>) -> Result<KernelSpec> {
        let limited = match problem.fused.epilogue {
            Epilogue::Activation(op) => op.limit > 0.0,
            Epilogue::Gate(op) => op.limit > 0.0,
            _ => false,
        };
        let defines: [(_, &dyn Display); 9] = [
            ("GROUPS", &GROUPS),
            ("OUTPUTS", &self.outputs),
            ("STAGES", &self.stages),
            ("ORDERED", &i32::from(self.ordered)),
            ("HALF", &i32::from(problem.x.dtype == DType::F16)),
            ("WIDE_Y", &i32::from(problem.y.dtype == DType::F32)),
            ("BIAS", &problem.bias_name()?),
            ("BIASED", &i32::from(problem.bias.is_some())),
            ("LIMITED", &i32::from(limited)),
        ];
        let mut spec = KernelSpec::new("linear/tile_wgmma.cu", "tile_wgmma", defines);
        spec.defines.extend(problem.epilogue_defines()?);
        spec.defines.extend(problem.head_halves().map(|size| ("HEAD", size.to_string())));
        Ok(spec.with_shared(ALIGNMENT + self.stages * (ROWS + self.outputs) * ROW_BYTES))
    }
}

/// Whether the kernel supports a problem, whatever its number of rows.
pub(super) fn takes(problem: &Problem<'_>, device: &DeviceSpec) -> bool {
    let takes_epilogue = match problem.fused.epilogue {
        Epilogue::Nothing | Epilogue::Sum(..) | Epilogue::Activation(_) => true,
        Epilogue::Gate(op) => op.layout == GateLayout::Concatenated,
        Epilogue::Heads(_) => TileConfig::of(problem, device).takes_heads(problem),
    };
    let vectors = |stride: usize| stride.is_multiple_of(VECTOR);
    let is_wide = problem.y.dtype == DType::F32 && problem.is_bare();
    device.has_wgmma()
        && device.custom_gemm
        && problem.fused.norm.is_none()
        && problem.is_half()
        && (problem.y.dtype == problem.x.dtype || is_wide)
        && problem.inputs() > 0
        && problem.is_indexable()
        && problem.results() > 0
        && vectors(problem.results())
        && vectors(problem.x.strides[0])
        && vectors(problem.y.strides[0])
        && problem.residual.is_none_or(|residual| vectors(residual.strides[0]))
        && takes_epilogue
}

/// See `linear/tile_wgmma.cu`.
pub(in crate::ops::gemm) struct TileWgmma;

impl Family for TileWgmma {
    fn description(&self) -> Description {
        Description {
            kernel: "tile_wgmma",
            rows: format!(
                "more than {}; to {MOST_ROWS} with a sum and to {MOST_ROWS_ALONE} without a gate, with tiles for {BUSY}% of the \
                 device, and more where cuBLASLt needs a launch after it",
                batch_wgmma::ROWS.end()
            ),
            devices: "sm_90",
            operands: "f16 or bf16 throughout, results too, a multiple of 8",
            fused: "every epilogue but interleaved gates; heads of 64 or 128 elements, rotated by halves or not at all".to_owned(),
            method: "as `batch_wgmma`, in larger tiles",
        }
    }

    fn supports(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool {
        let rows = problem.rows();
        if rows <= *batch_wgmma::ROWS.end() || rows >= 1 << 30 {
            return false;
        }
        if device.batch_invariant {
            return batch_wgmma::for_all_rows(problem, device);
        }
        let pays = || TileConfig::of(problem, device).pays(problem, device);
        problem.y.dtype == problem.x.dtype
            && takes(problem, device)
            && (problem.is_gated_by_halves() || pays())
    }

    fn plan(&self, problem: &Problem<'_>, device: &DeviceSpec) -> Result<ProductPlan> {
        let config = TileConfig::of(problem, device);
        let (fused, outputs, sm_count) = (problem.fused, problem.outputs(), device.sm_count);
        Ok(ProductPlan::of_one(config.spec(problem)?, move |args, function| {
            let (x, weight) = (args.x, args.weight);
            // Half a tile of weights: one half per block of the cluster, or gate and up.
            let at_once = config.outputs / 2;
            let weight_map = match config.ordered {
                true => ordered_weights(weight, at_once)?,
                false => weights(weight, at_once)?,
            };
            let x_map = activations(x, weight.layout.columns, ROWS)?;
            let parameters = Parameters::default()
                .extent(x.size(0), &args.bounds)
                .size(weight.layout.columns)
                .structure(&fused.epilogue_params(args.frame, args.y, true)?)
                .words(x_map.words())
                .words(weight_map.words());
            let blocks = config.blocks(x.size(0), outputs, sm_count);
            Ok(LaunchOp::kernel(function, [blocks, 1, 1], THREADS, parameters))
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::query_key_value(512, 6144, 4096)]
    #[case::output(512, 4096, 4096)]
    #[case::gate(512, 28_672, 4096)]
    #[case::many_rows(2048, 4096, 14_336)]
    #[case::one_tile(129, 8, 8)]
    fn clusters_are_whole_and_resident_together(
        #[case] rows: usize,
        #[case] outputs: usize,
        #[case] inputs: usize,
    ) {
        let config = TileConfig::new(rows, outputs, inputs, false, None, 132);
        let blocks = config.blocks(rows, outputs, 132);
        assert!(blocks > 0 && blocks <= 132 && blocks.is_multiple_of(CLUSTER), "{blocks} of {config:?}");
    }

    #[rstest]
    #[case::all_even(2048, 28_672, true)]
    #[case::halves_of_a_tile(512, 28_672, true)]
    #[case::halves_of_the_outputs(2048, 28_704, true)]
    #[case::outputs(2048, 6152, false)]
    fn ordered_tiles_have_whole_groups(#[case] rows: usize, #[case] outputs: usize, #[case] gated: bool) {
        let config = TileConfig::new(rows, outputs, 4096, gated, None, 132);
        let results = if gated { outputs / 2 } else { outputs };
        let whole = results.is_multiple_of(ORDER) && (config.outputs / 2).is_multiple_of(ORDER);
        assert!(whole || !config.ordered, "{config:?}");
    }

    /// 16 tiles of 192 outputs for each run of rows take as long as 24 of 128.
    #[test]
    fn tiles_consist_of_whole_heads_where_those_cost_no_more() {
        let outputs = |head| TileConfig::new(2048, 3072, 4096, false, head, 132).outputs;
        assert_eq!([None, Some(64), Some(128)].map(outputs), [192, 192, 128]);
    }

    #[test]
    fn rings_fit() {
        for outputs in OUTPUTS {
            let stages = (RING / ((ROWS + outputs) * ROW_BYTES)).min(MOST_STAGES);
            assert!(stages >= 4 && (outputs / 2 * ROW_BYTES).is_multiple_of(ALIGNMENT));
        }
    }
}
