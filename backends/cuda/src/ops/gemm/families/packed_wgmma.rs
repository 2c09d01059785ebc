//! GEMM of 17 to 256 rows of f16 or bf16 with packed integers on Hopper: `linear/packed_wgmma.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, Parameters},
        tensor_map::TensorMap,
    },
    ops::{
        gemm::{
            family::{Description, Family},
            problem::{Problem, ProductPlan},
        },
        type_name,
        weight::{Offset, Packing, UNIT},
    },
};
use dsrun_core::{DType, Error, Result, TensorDesc};
use std::{fmt::Display, ops::RangeInclusive};

/// Supported rows. With more, weights would be converted so often that unpacking them once is faster.
const ROWS: RangeInclusive<usize> = 17..=256;
/// The maximum number of rows of a tile.
const MOST_TOKENS: usize = 128;
/// The minimum number of rows of a tile.
const FEWEST_TOKENS: usize = 32;
/// The rows of a tile are a multiple of this.
const TOKEN_UNIT: usize = 16;
/// Up to this many rows of a tile, a warpgroup has enough registers to convert 64 inputs at a time.
const FEW_TOKENS: usize = 64;
/// Outputs of a warpgroup.
const OUTPUTS: usize = 64;
/// Results that a warp writes together: the number of results must be a multiple of this.
const RESULTS: usize = 16;
/// Inputs of a k tile.
const K_TILE: usize = 128;
/// Consumer warpgroups.
const WARPGROUPS: usize = 4;
/// Threads of a block: consumer warpgroups and a producer warpgroup.
const THREADS: usize = (WARPGROUPS + 1) * 128;
/// Bytes of shared memory for the ring.
const RING: usize = 224 << 10;
/// Alignment of the ring buffer.
const ALIGNMENT: usize = 1024;
const MOST_STAGES: usize = 24;

/// The number of resident clusters of this many blocks, from the driver's numbers for the 132 SMs of an H200.
fn clusters(blocks: usize, sm_count: usize) -> usize {
    let of_132 = match blocks {
        3 => 39,
        4 => 30,
        _ => 132 / blocks,
    };
    sm_count * of_132 / 132
}

/// Whether the kernel supports these activations and weights, regardless of the epilogue.
pub(super) fn multiplies(problem: &Problem<'_>, device: &DeviceSpec) -> bool {
    device.has_wgmma()
        && problem.packing().is_some_and(|packing| packing.offset != Offset::Floats)
        && (ROWS.contains(&problem.rows()) || device.batch_invariant)
        && problem.has_half_activations()
        && problem.inputs() > 0
        && problem.outputs() > 0
        && problem.outputs().is_multiple_of(RESULTS)
        && problem.is_indexable()
        && problem.x.strides[0].is_multiple_of(8)
}

/// The tile configuration of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileConfig {
    /// Rows of a tile.
    tokens: usize,
    /// Tiles of rows.
    row_tiles: usize,
    /// Warpgroups that divide the outputs of a tile.
    groups: usize,
    /// Tiles of outputs.
    tiles: usize,
    /// Warpgroups that divide the k tiles of a tile.
    shares: usize,
    /// Blocks that divide the k tiles of a tile (split-K).
    split: usize,
    stages: usize,
    /// Bytes of shared memory of a block.
    shared: usize,
}

/// How warpgroups and blocks divide the outputs and inputs of a product: warpgroups for different outputs, and blocks for different
/// inputs.
fn division(row_tiles: usize, outputs: usize, inputs: usize, sm_count: usize) -> (usize, usize) {
    let k_tiles = inputs.div_ceil(K_TILE);
    let divisions = [1, 2, 4].into_iter().flat_map(|groups| [1, 2, 3, 4].map(|split| (groups, split)));
    let tiles = |groups: usize| outputs.div_ceil(groups * OUTPUTS) * row_tiles;
    // A second wave of clusters would double the time; a share of a single k tile is not worth its sums.
    let divisions = divisions.filter(|&(groups, split)| {
        split == 1
            || (tiles(groups) <= clusters(split, sm_count) && k_tiles >= 2 * split * (WARPGROUPS / groups))
    });
    // In units of a fifth of the measured time of 64 outputs of a k tile. It includes the rows of x, the wait for the first k
    // tile, the exchange of sums and the writing of results.
    let time = |&(groups, split): &(usize, usize)| {
        let waves = (tiles(groups) * split).div_ceil(sm_count);
        waves * (k_tiles.div_ceil(split) * (5 * groups + 2) + 20 * split + 80)
    };
    divisions.min_by_key(time).unwrap_or((1, 1))
}

/// The rows of a tile for so many rows, if tiles have at most `most`.
fn tokens(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(TOKEN_UNIT).max(FEWEST_TOKENS)
}

impl TileConfig {
    fn of(problem: &Problem<'_>, packing: Packing, device: &DeviceSpec) -> Self {
        let (rows, shape) = (problem.rows(), [problem.outputs(), problem.inputs()]);
        if device.batch_invariant {
            // Inputs are divided alike for all numbers of rows. In larger tiles, groups of inputs are not summed up by themselves.
            let division = division(1, shape[0], shape[1], device.sm_count);
            return Self::divided(rows, FEW_TOKENS, shape, packing, division);
        }
        Self::new(rows, shape, packing, device.sm_count)
    }

    fn new(rows: usize, shape: [usize; 2], packing: Packing, sm_count: usize) -> Self {
        let division = division(rows.div_ceil(MOST_TOKENS), shape[0], shape[1], sm_count);
        Self::divided(rows, MOST_TOKENS, shape, packing, division)
    }

    fn divided(
        rows: usize,
        most_tokens: usize,
        [outputs, inputs]: [usize; 2],
        packing: Packing,
        (groups, split): (usize, usize),
    ) -> Self {
        let (row_tiles, tokens) = (rows.div_ceil(most_tokens), tokens(rows, most_tokens));
        let k_tiles = inputs.div_ceil(K_TILE);
        let (shares, tiles) = (WARPGROUPS / groups, outputs.div_ceil(groups * OUTPUTS));
        let numbers = match packing.group {
            0 => 0,
            group => groups * OUTPUTS / UNIT * (K_TILE / group) * packing.line(),
        };
        let slot = tokens * K_TILE * 2 + groups * OUTPUTS * K_TILE * packing.bits / 8 + numbers;
        let slot = slot.next_multiple_of(ALIGNMENT);
        let stages = (RING / slot).min(MOST_STAGES).min(k_tiles.max(shares));
        // Sums of eight rows at a time: of all shares but the first, and then of all blocks.
        let (eights, eight) = (tokens / 8, groups * OUTPUTS * 8 * 4);
        let between = if split == 1 { 0 } else { eights.div_ceil(split) * split * eight };
        let sums = between.max((shares - 1) * eights * eight);
        let shared = ALIGNMENT + (stages * slot).max(sums);
        Self { tokens, row_tiles, groups, tiles, shares, split, stages, shared }
    }
}

/// See `linear/packed_wgmma.cu`.
pub(in crate::ops::gemm) struct PackedWgmma;

impl Family for PackedWgmma {
    fn description(&self) -> Description {
        Description {
            kernel: "packed_wgmma",
            rows: format!("{} to {}", ROWS.start(), ROWS.end()),
            devices: "sm_90",
            operands: "integers, outputs a multiple of 16; f16 or bf16 rows at multiples of 16 bytes",
            fused: "a sum".to_owned(),
            method: "TMA copies; integers are converted in registers for wgmma",
        }
    }

    fn supports(&self, problem: &Problem<'_>, device: &DeviceSpec) -> bool {
        // Results are written two at a time.
        let pairs = |rows: &TensorDesc| rows.strides[0].is_multiple_of(2);
        (problem.is_bare() || problem.is_unscaled_sum())
            && multiplies(problem, device)
            && pairs(problem.y)
            && problem.residual.is_none_or(pairs)
    }

    fn plan(&self, problem: &Problem<'_>, device: &DeviceSpec) -> Result<ProductPlan> {
        let packing =
            problem.packing().ok_or_else(|| Error::internal("packed_wgmma needs packed integers"))?;
        let (outputs, inputs) = (problem.outputs(), problem.inputs());
        let config = TileConfig::of(problem, packing, device);
        let defines: [(_, &dyn Display); 10] = [
            ("TOKENS", &config.tokens),
            ("GROUPS", &config.groups),
            ("SPLIT", &config.split),
            ("STAGES", &config.stages),
            ("AT_ONCE", &(if config.tokens <= FEW_TOKENS { 4 } else { 2 })),
            ("HALF", &i32::from(problem.x.dtype == DType::F16)),
            ("BIAS", &problem.bias_name()?),
            ("Y", &type_name(problem.y.dtype)?),
            ("WIDE_Y", &i32::from(problem.y.dtype == DType::F32)),
            ("ADDED", &i32::from(problem.residual.is_some())),
        ];
        let spec = KernelSpec::new("linear/packed_wgmma.cu", "packed_wgmma", defines);
        let mut spec = spec.with_shared(config.shared);
        spec.defines.extend(packing.defines());
        Ok(ProductPlan::of_one(spec, move |args, function| {
            let (x, weight) = (args.x, args.weight);
            let [unit, number_unit] = [weight.layout.row_bytes, weight.layout.scale_bytes];
            let [units, unit_outputs] = [outputs.div_ceil(UNIT), config.groups * OUTPUTS / UNIT];
            let sizes = [inputs as u64 * 2, x.size(0) as u64];
            let x_map = TensorMap::bytes(
                x.address,
                sizes,
                [x.stride(0) as u64 * 2],
                [128, config.tokens as u32],
                true,
            )?;
            // Lines of integers, each 16 bytes of 8 rows; and lines of scales, each a group of 8 rows.
            let lines = |address: u64, unit: usize, line: usize, of_k_tile: usize| {
                let sizes = [line as u64, (unit / line) as u64, units as u64];
                let boxed = [line as u32, of_k_tile as u32, unit_outputs as u32];
                TensorMap::bytes(address, sizes, [line as u64, unit as u64], boxed, false)
            };
            let weight_map = lines(weight.address(), unit, 128, packing.bits)?;
            let number_map = match packing.group {
                0 => [0; 16],
                group => lines(weight.scales(), number_unit, packing.line(), K_TILE / group)?.words(),
            };
            let added = args.residual_rows();
            let y = (args.y.address, args.y.stride(0) as u64);
            let results = [weight.scales(), number_unit as u64, args.bias, y.0, y.1, added.0, added.1 as u64];
            let parameters = Parameters::default()
                .extent(x.size(0), &args.bounds)
                .size(outputs)
                .size(inputs)
                .size(config.row_tiles)
                .size(usize::from(weight.immutable))
                .words(results)
                .words(x_map.words())
                .words(weight_map.words())
                .words(number_map);
            let blocks = config.tiles * config.row_tiles * config.split;
            Ok(LaunchOp::kernel(function, [blocks, 1, 1], THREADS, parameters))
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// Tiles of layers of a large model and of small ones cover them and fit.
    #[rstest]
    #[case(6144, 4096)]
    #[case(4096, 4096)]
    #[case(28_672, 4096)]
    #[case(4096, 14_336)]
    #[case(576, 576)]
    #[case(16, 8)]
    #[case(1536, 130)]
    fn tiles_fit(#[case] outputs: usize, #[case] inputs: usize) {
        for rows in ROWS {
            for (bits, group) in [(4, 0), (4, 32), (4, 128), (8, 0), (8, 16), (8, 64)] {
                let packing = Packing { bits, group, offset: Offset::Minimum, scale: DType::F32 };
                let config = TileConfig::new(rows, [outputs, inputs], packing, 132);
                assert!(
                    config.tokens * config.row_tiles >= rows && config.tokens <= MOST_TOKENS,
                    "{config:?}"
                );
                assert!(config.tiles * config.groups * OUTPUTS >= outputs, "{config:?}");
                assert!(config.groups * config.shares == WARPGROUPS, "{config:?}");
                assert!(
                    config.stages >= config.shares.max(2) && config.shared <= ALIGNMENT + RING,
                    "{config:?}"
                );
                assert!(
                    config.split == 1 || config.tiles * config.row_tiles * config.split <= 132,
                    "{config:?}"
                );
            }
        }
    }
}
