//! GEMM of 17 to 128 rows at memory bandwidth on Hopper, with a fused epilogue: `linear/batch_wgmma.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, Parameters},
    },
    ops::{
        gemm::{
            families::{
                bulk_copies::{
                    ALIGNMENT, OUTPUTS, RING, ROW_BYTES, activations, packed_weights, paired_weights, weights,
                },
                tile_wgmma,
            },
            family::{Description, Family},
            fused_linear::Epilogue,
            problem::{Problem, ProductPlan},
        },
        type_name,
    },
};
use dsrun_core::{DType, Result, op::GateLayout};
use std::{fmt::Display, ops::RangeInclusive};

/// Supported rows; fewer are faster in other families. Measured on an H200: `decode_gemm` is as fast with 4 rows, and takes up to 1.8
/// times as long with 16.
pub(super) const ROWS: RangeInclusive<usize> = 5..=128;
/// The minimum number of rows of bytes.
const FEWEST_BYTE_ROWS: usize = 17;
/// Rows are padded to a multiple of this.
const ROW_UNIT: usize = 16;
/// The minimum number of rows after padding.
const FEWEST_ROWS: usize = 32;
/// Results that a warp writes together: the number of results must be a multiple of this.
const RESULTS: usize = 16;
/// Threads of the consumer warpgroup.
const MULTIPLIERS: usize = 128;
/// Threads of a block: a consumer warpgroup and a producer warp.
const THREADS: usize = MULTIPLIERS + 32;
/// Clusters of four that are resident on an H200 with one block per SM.
const CLUSTERS_OF_FOUR: usize = 30;
/// Shared memory for the ring buffer of a block if two blocks share an SM.
const RING_OF_PAIR: usize = 110 << 10;
const MOST_STAGES: usize = 24;

/// The tile configuration of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileConfig {
    /// Rows after padding.
    rows: usize,
    /// Parts of a tile, of [`OUTPUTS`] outputs each.
    parts: usize,
    tiles: usize,
    /// Blocks that split the inputs of a tile (split-K).
    split: usize,
    stages: usize,
    /// Whether sums from other blocks have separate buffers, instead of reusing the ring buffer.
    apart: bool,
    /// Bytes of shared memory of a block.
    shared: usize,
}

impl TileConfig {
    /// The tile configuration of a product; `bytes` is the size of a row of inputs.
    fn new(rows: usize, outputs: usize, bytes: usize, gated: bool, device: &DeviceSpec) -> Self {
        let sm_count = device.sm_count;
        let rows = rows.next_multiple_of(ROW_UNIT).max(FEWEST_ROWS);
        // Small tiles for few outputs; a gated tile contains both halves.
        let parts = if gated || outputs.div_ceil(OUTPUTS) > sm_count { 2 } else { 1 };
        let tiles = outputs.div_ceil(parts * OUTPUTS);
        let split = match tiles {
            // Many rows, which are those of another kernel, have no split.
            _ if tiles * 2 > sm_count || device.batch_invariant => 1,
            _ if tiles > CLUSTERS_OF_FOUR => 2,
            _ => 4,
        };
        let split = split.min(bytes.div_ceil(ROW_BYTES));
        let slot = (parts * OUTPUTS + rows) * ROW_BYTES;
        let room = if tiles * split <= sm_count { RING } else { RING_OF_PAIR };
        // Sums of eight rows at a time, from every block of the cluster.
        let sums = match split {
            1 => 0,
            _ => (rows / 8).div_ceil(split) * split * parts * MULTIPLIERS * 16,
        };
        // Separate buffers if they need no more than one stage; otherwise the memory of the ring buffer after it is drained.
        let apart = sums <= slot;
        let stages = ((room - if apart { sums } else { 0 }) / slot).min(MOST_STAGES);
        let shared = ALIGNMENT + if apart { stages * slot + sums } else { (stages * slot).max(sums) };
        Self { rows, parts, tiles, split, stages, apart, shared }
    }

    fn of(problem: &Problem<'_>, device: &DeviceSpec) -> Self {
        let bytes = problem.inputs() * problem.x.dtype.bytes();
        let gated = problem.is_gated_by_halves();
        Self::new(problem.rows(), problem.outputs(), bytes, gated, device)
    }

    fn spec(&self, problem: &Problem<'_>) -> Result<KernelSpec> {
        let scale = match problem.int8_packing() {
            Some(packing) => type_name(packing.scale)?,
            None => "f32",
        };
        let defines: [(_, &dyn Display); 10] = [
            ("APART", &i32::from(self.apart)),
            ("INTEGERS", &i32::from(problem.is_int8())),
            ("W_SCALE", &scale),
            ("TOKENS", &self.rows),
            ("PARTS", &self.parts),
            ("SPLIT", &self.split),
            ("STAGES", &self.stages),
            ("HALF", &i32::from(problem.x.dtype == DType::F16)),
            ("WIDE_Y", &i32::from(problem.y.dtype == DType::F32)),
            ("BIAS", &problem.bias_name()?),
        ];
        let mut spec = KernelSpec::new("linear/batch_wgmma.cu", "batch_wgmma", defines);
        spec.defines.extend(problem.epilogue_defines()?);
        spec.defines.extend(head(problem).map(|size| ("HEAD", size.to_string())));
        Ok(spec.with_shared(self.shared))
    }
}

/// The head size, if the kernel splits the product into heads.
fn head(problem: &Problem<'_>) -> Option<usize> {
    let size = problem.head_halves().filter(|size| size.is_multiple_of(OUTPUTS))?;
    let cache = problem.fused.cache_type(problem.call)?;
    [cache, problem.y.dtype].iter().all(|dtype| dtype.bytes() == 2).then_some(size)
}

/// Whether the kernel supports the epilogue.
fn takes_epilogue(problem: &Problem<'_>) -> bool {
    match problem.fused.epilogue {
        Epilogue::Nothing | Epilogue::Sum(..) | Epilogue::Activation(_) => true,
        Epilogue::Gate(op) => op.layout == GateLayout::Concatenated,
        Epilogue::Heads(_) => head(problem).is_some(),
    }
}

/// Whether the kernel supports a problem, whatever its number of rows.
fn takes(problem: &Problem<'_>, device: &DeviceSpec) -> bool {
    let multiplies = match problem.int8_packing() {
        Some(_) => problem.x.strides[0].is_multiple_of(16),
        None => device.custom_gemm && problem.is_half() && problem.x.strides[0].is_multiple_of(8),
    };
    let pairs = |stride: usize| stride.is_multiple_of(2);
    device.has_wgmma()
        && problem.fused.norm.is_none()
        && multiplies
        && problem.inputs() > 0
        && problem.is_indexable()
        && problem.results() > 0
        && problem.results().is_multiple_of(RESULTS)
        && pairs(problem.y.strides[0])
        && problem.residual.is_none_or(|residual| pairs(residual.strides[0]))
        && takes_epilogue(problem)
}

/// Whether this kernel without splits and `tile_wgmma` run a problem for all numbers of rows: both sum up 16 inputs at a time, in order,
/// and end alike, so a row has the same bits in either.
pub(super) fn for_all_rows(problem: &Problem<'_>, device: &DeviceSpec) -> bool {
    !problem.is_int8() && takes(problem, device) && tile_wgmma::takes(problem, device)
}

/// See `linear/batch_wgmma.cu`.
pub(in crate::ops::gemm) struct BatchWgmma;

impl Family for BatchWgmma {
    fn description(&self) -> Description {
        Description {
            kernel: "batch_wgmma",
            rows: format!("{} to {}; of bytes, {FEWEST_BYTE_ROWS} to {}", ROWS.start(), ROWS.end(), ROWS.end()),
            devices: "sm_90",
            operands: "f16 or bf16 throughout, or bytes times bytes; rows of activations at multiples of 16 bytes, results a \
                       multiple of 16",
            fused: "every epilogue but interleaved gates; heads of a multiple of 64 elements, rotated by halves or not at all".to_owned(),
            method: "TMA copies feed wgmma; weights are loaded before the preceding kernel has finished",
        }
    }

    fn supports(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool {
        if device.batch_invariant {
            return problem.rows() <= *ROWS.end() && for_all_rows(problem, device);
        }
        ROWS.contains(&problem.rows())
            && (problem.rows() >= FEWEST_BYTE_ROWS || !problem.is_int8())
            && takes(problem, device)
    }

    fn plan(&self, problem: &Problem<'_>, device: &DeviceSpec) -> Result<ProductPlan> {
        let config = TileConfig::of(problem, device);
        let (fused, head, int8) = (problem.fused, head(problem), problem.is_int8());
        Ok(ProductPlan::of_one(config.spec(problem)?, move |args, function| {
            let (x, weight) = (args.x, args.weight);
            let weight_map = match head {
                Some(head) => paired_weights(weight, head)?,
                None if int8 => packed_weights(weight, OUTPUTS)?,
                None => weights(weight, OUTPUTS)?,
            };
            let mut parameters = Parameters::default()
                .extent(x.size(0), &args.bounds)
                .size(weight.layout.columns)
                .size(usize::from(weight.immutable))
                .structure(&fused.epilogue_params(args.frame, args.y, true)?);
            if int8 {
                parameters = parameters.words([args.scales, weight.scales()]);
            }
            let x_map = activations(x, weight.layout.columns, config.rows)?;
            let parameters = parameters.words(x_map.words()).words(weight_map.words());
            Ok(LaunchOp::kernel(function, [config.tiles * config.split, 1, 1], THREADS, parameters))
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const DEVICE: DeviceSpec = DeviceSpec::usual(90, 132);

    #[rstest]
    #[case::query_key_value(32, 6144, 4096, false)]
    #[case::gate(128, 28_672, 4096, true)]
    #[case::down(128, 4096, 14_336, false)]
    #[case::few_outputs(32, 576, 1536, false)]
    #[case::one_k_tile(32, 16, 16, false)]
    fn tiles_cover_the_product(
        #[case] rows: usize,
        #[case] outputs: usize,
        #[case] inputs: usize,
        #[case] gated: bool,
    ) {
        let config = TileConfig::new(rows, outputs, inputs * 2, gated, &DEVICE);
        assert!(config.rows >= rows && config.tiles * config.parts * OUTPUTS >= outputs, "{config:?}");
        // Every block of a tile has inputs, and a gate has both halves in a tile.
        assert!(
            config.split <= (inputs * 2).div_ceil(ROW_BYTES) && (!gated || config.parts == 2),
            "{config:?}"
        );
    }

    #[test]
    fn rings_fit() {
        for rows in ROWS {
            for outputs in [16, 1024, 4096, 8448, 8464, 128_256] {
                for gated in [false, true] {
                    let config = TileConfig::new(rows, outputs, 4096, gated, &DEVICE);
                    let slot = (config.parts * OUTPUTS + config.rows) * ROW_BYTES;
                    assert!(config.stages >= 3 && config.rows >= rows, "{config:?}");
                    // The shared memory of an SM holds what the kernel has beside the ring, and the driver's share for each block.
                    let (of_kernel, of_driver) = (2 << 10, 1 << 10);
                    let blocks = if config.tiles * config.split <= 132 { 1 } else { 2 };
                    assert!(config.stages * slot + ALIGNMENT <= config.shared, "{config:?}");
                    assert!(blocks * (config.shared + of_kernel + of_driver) <= 228 << 10, "{config:?}");
                }
            }
        }
    }
}
