//! Products of 17 to 256 rows of f16 or bf16 with packed integers, on Hopper: `linear/packed_wgmma.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, Parameters},
        tensor_map::TensorMap,
    },
    ops::{
        gemm::linear::{Layer, Layered, function, is_half},
        type_name,
        weight::{Packing, UNIT},
    },
};
use dsrun_core::{DType, Error, Result, TensorDesc, WeightType};
use std::{fmt::Display, ops::RangeInclusive};

/// Rows that the kernel takes. With more, weights are converted so often that unpacking them once is faster.
const ROWS: RangeInclusive<usize> = 17..=256;
/// The most rows of a tile, the fewest, and what they are a multiple of.
const MOST_TOKENS: usize = 128;
const FEWEST_TOKENS: usize = 32;
const TOKEN_UNIT: usize = 16;
/// Rows of a tile up to which a warpgroup has the registers to convert 64 inputs at a time.
const FEW_TOKENS: usize = 64;
/// Outputs of a warpgroup.
const OUTPUTS: usize = 64;
/// Results of a warp, which are all there or none.
const RESULTS: usize = 16;
/// Inputs of a turn.
const DEPTH: usize = 128;
/// Warpgroups that multiply, and threads of a block with those that fetch.
const WARPGROUPS: usize = 4;
const THREADS: usize = (WARPGROUPS + 1) * 128;
/// Shared memory for the ring, and to begin it at a multiple of 1024.
const ROOM: usize = 224 << 10;
const ALIGNMENT: usize = 1024;
const MOST_STAGES: usize = 24;
/// How many clusters of so many blocks find multiprocessors at a time, of an H200's 132 as the driver says.
fn clusters(blocks: usize, sm_count: usize) -> usize {
    let of_132 = match blocks {
        3 => 39,
        4 => 30,
        _ => 132 / blocks,
    };
    sm_count * of_132 / 132
}

/// Whether the kernel takes such rows and weights.
pub(in crate::ops) fn takes(x: &TensorDesc, weight: &WeightType, device: &DeviceSpec) -> bool {
    device.capability == 90
        && Packing::of(weight.format).is_some()
        && ROWS.contains(&x.shape[0])
        && is_half(x.dtype)
        && weight.columns() > 0
        && weight.rows() > 0
        && weight.rows().is_multiple_of(RESULTS)
        && weight.rows().max(weight.columns()) < 1 << 30
        && x.strides[0].is_multiple_of(8)
}

/// Whether it takes a layer: results are written two at a time.
pub(super) fn fits(layer: &Layer<'_>, device: &DeviceSpec) -> bool {
    let pairs = |rows: &TensorDesc| rows.strides[0].is_multiple_of(2);
    !layer.bytes
        && layer.norm.is_none()
        && takes(layer.x, layer.weight, device)
        && pairs(layer.y)
        && layer.residual.is_none_or(pairs)
}

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileConfig {
    /// Rows of a tile, and tiles of rows.
    tokens: usize,
    row_tiles: usize,
    /// Warpgroups that share the outputs of a tile, and tiles of outputs.
    groups: usize,
    tiles: usize,
    /// Warpgroups that share the turns of a tile, and blocks that do.
    shares: usize,
    split: usize,
    stages: usize,
    shared: usize,
}

impl TileConfig {
    fn new(rows: usize, outputs: usize, inputs: usize, packing: Packing, sm_count: usize) -> Self {
        let row_tiles = rows.div_ceil(MOST_TOKENS);
        let tokens = rows.div_ceil(row_tiles).next_multiple_of(TOKEN_UNIT).max(FEWEST_TOKENS);
        let turns = inputs.div_ceil(DEPTH);
        let cuts = [1, 2, 4].into_iter().flat_map(|groups| [1, 2, 3, 4].map(|split| (groups, split)));
        let tiles = |groups: usize| outputs.div_ceil(groups * OUTPUTS);
        // Clusters that begin when others have ended would take twice the time; a share of one turn is not worth its sums.
        let cuts = cuts.filter(|&(groups, split)| {
            split == 1
                || (tiles(groups) * row_tiles <= clusters(split, sm_count)
                    && turns >= 2 * split * (WARPGROUPS / groups))
        });
        // In fifths of what 64 outputs of a turn take, as measured: a turn has rows of x too, and a block waits for its first
        // turn, exchanges sums and writes results.
        let time = |&(groups, split): &(usize, usize)| {
            let waves = (tiles(groups) * row_tiles * split).div_ceil(sm_count);
            waves * (turns.div_ceil(split) * (5 * groups + 2) + 20 * split + 80)
        };
        let (groups, split) = cuts.min_by_key(time).unwrap_or((1, 1));
        let (shares, tiles) = (WARPGROUPS / groups, tiles(groups));
        let numbers = match packing.group {
            0 => 0,
            group => groups * OUTPUTS / UNIT * (DEPTH / group) * packing.line(),
        };
        let slot = tokens * DEPTH * 2 + groups * OUTPUTS * DEPTH * packing.bits / 8 + numbers;
        let slot = slot.next_multiple_of(ALIGNMENT);
        let stages = (ROOM / slot).min(MOST_STAGES).min(turns.max(shares));
        // Sums of eight rows: of all shares but the first, and then of all blocks.
        let (eights, eight) = (tokens / 8, groups * OUTPUTS * 8 * 4);
        let between = if split == 1 { 0 } else { eights.div_ceil(split) * split * eight };
        let sums = between.max((shares - 1) * eights * eight);
        let shared = ALIGNMENT + (stages * slot).max(sums);
        Self { tokens, row_tiles, groups, tiles, shares, split, stages, shared }
    }
}

pub(super) fn plan(layer: &Layer<'_>, device: &DeviceSpec) -> Result<Layered> {
    let packing = Packing::of(layer.weight.format);
    let packing =
        packing.ok_or_else(|| Error::internal("a product of integers with weights that are none"))?;
    let (outputs, inputs) = (layer.outputs(), layer.inputs());
    let cut = TileConfig::new(layer.rows(), outputs, inputs, packing, device.sm_count);
    let defines: [(_, &dyn Display); 10] = [
        ("TOKENS", &cut.tokens),
        ("GROUPS", &cut.groups),
        ("SPLIT", &cut.split),
        ("STAGES", &cut.stages),
        ("AT_ONCE", &(if cut.tokens <= FEW_TOKENS { 4 } else { 2 })),
        ("HALF", &i32::from(layer.x.dtype == DType::F16)),
        ("BIAS", &layer.bias_name()?),
        ("Y", &type_name(layer.y.dtype)?),
        ("WIDE_Y", &i32::from(layer.y.dtype == DType::F32)),
        ("ADDED", &i32::from(layer.residual.is_some())),
    ];
    let spec = KernelSpec::new("linear/packed_wgmma.cu", "packed_wgmma", defines);
    let mut spec = spec.with_shared(cut.shared);
    spec.defines.extend(packing.defines());
    Ok(Layered {
        kernels: vec![spec],
        workspace: 0,
        batch_invariant: false,
        launches: Box::new(move |places, functions, _| {
            let (x, weight) = (places.x, places.weight);
            let [unit, number_unit] = [weight.layout.row_bytes, weight.layout.scale_bytes];
            let [units, unit_outputs] = [outputs.div_ceil(UNIT), cut.groups * OUTPUTS / UNIT];
            let sizes = [inputs as u64 * 2, x.size(0) as u64];
            let x_map =
                TensorMap::bytes(x.address, sizes, [x.stride(0) as u64 * 2], [128, cut.tokens as u32], true)?;
            // Lines of integers, 16 bytes of 8 rows each, and of numbers, a group of 8 rows each.
            let lines = |address: u64, unit: usize, line: usize, of_turn: usize| {
                let sizes = [line as u64, (unit / line) as u64, units as u64];
                let boxed = [line as u32, of_turn as u32, unit_outputs as u32];
                TensorMap::bytes(address, sizes, [line as u64, unit as u64], boxed, false)
            };
            let weight_map = lines(weight.address(), unit, 128, packing.bits)?;
            let number_map = match packing.group {
                0 => [0; 16],
                group => lines(weight.scales(), number_unit, packing.line(), DEPTH / group)?.words(),
            };
            let added = places.residual.map_or((0, 0), |added| (added.address, added.stride(0) as u64));
            let y = (places.y.address, places.y.stride(0) as u64);
            let results = [weight.scales(), number_unit as u64, places.bias, y.0, y.1, added.0, added.1];
            let parameters = Parameters::default()
                .extent(x.size(0), places.bounds)
                .size(outputs)
                .size(inputs)
                .size(cut.row_tiles)
                .size(usize::from(weight.immutable))
                .words(results)
                .words(x_map.words())
                .words(weight_map.words())
                .words(number_map);
            let blocks = cut.tiles * cut.row_tiles * cut.split;
            Ok(LaunchOp::kernel(function(functions, 0)?, [blocks, 1, 1], THREADS, parameters)
                .into_iter()
                .collect())
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::weight::Offset;
    use rstest::rstest;

    /// Layers of a large model and of small ones.
    #[rstest]
    #[case(6144, 4096)]
    #[case(4096, 4096)]
    #[case(28_672, 4096)]
    #[case(4096, 14_336)]
    #[case(576, 576)]
    #[case(16, 8)]
    #[case(1536, 130)]
    fn cuts_fit(#[case] outputs: usize, #[case] inputs: usize) {
        for rows in ROWS {
            for (bits, group) in [(4, 0), (4, 32), (4, 128), (8, 0), (8, 16), (8, 64)] {
                let packing = Packing { bits, group, offset: Offset::Minimum, scale: DType::F32 };
                let cut = TileConfig::new(rows, outputs, inputs, packing, 132);
                assert!(cut.tokens * cut.row_tiles >= rows && cut.tokens <= MOST_TOKENS, "{cut:?}");
                assert!(cut.tiles * cut.groups * OUTPUTS >= outputs, "{cut:?}");
                assert!(cut.groups * cut.shares == WARPGROUPS, "{cut:?}");
                assert!(cut.stages >= cut.shares.max(2) && cut.shared <= ALIGNMENT + ROOM, "{cut:?}");
                assert!(cut.split == 1 || cut.tiles * cut.row_tiles * cut.split <= 132, "{cut:?}");
            }
        }
    }
}
