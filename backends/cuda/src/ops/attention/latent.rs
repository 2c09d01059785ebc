//! Paged attention over latents, large keys that begin with their values: `attention/latent.cu`.
//!
//! In a call with at most as many tokens as sequences each row is a tile, whose keys may be split. In other calls the sequences of
//! one token run like that, and all others in tiles of several tokens, by another launch.

use super::{
    Kinds,
    params::{AttentionParams, LatentParams},
    prefill::LONE,
};
use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, MAX_GRID},
    },
    ops::{KernelPlan, frame::Frame, type_name},
};
use dsrun_core::{DType, Error, Result, op::PagedAttention};
use std::ops::RangeInclusive;

const UNIT: &str = "attention/latent.cu";
/// The head sizes; smaller heads have faster kernels.
const KEY_SIZES: RangeInclusive<usize> = 257..=576;
const MAX_VALUE: usize = 512;
/// Rows of a product, and the maximum number of products of a tile.
const ROWS: usize = 16;
const MAX_ROW_TILES: usize = 4;
/// Keys per iteration.
const KEYS: usize = 32;
/// Stages of the ring buffer.
const STAGES: RangeInclusive<usize> = 2..=4;
/// Bytes of shared memory that the driver reserves per block.
const RESERVED: usize = 1 << 10;
/// The maximum number of splits of a tile's keys.
const MAX_SPLITS: usize = 256;
/// Warps of a block of `latent_combine`, and values that it merges.
const MERGERS: usize = 8;
const MERGED_VALUES: usize = 128;

/// The tiles of a launch: the values of `FIND` in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Find {
    /// Tiles of sequences with at least this many queries.
    Tiles(usize),
    /// Each row.
    Rows,
    /// The row of each sequence that has only one.
    Singles,
}

/// The tile configuration of a launch.
#[derive(Clone, Debug)]
struct TileConfig {
    find: Find,
    /// Query heads and queries of a tile.
    heads: usize,
    tokens: usize,
    row_tiles: usize,
    stages: usize,
    /// Blocks that share an SM.
    blocks: usize,
    shared: usize,
    grid: [usize; 3],
    /// Bytes of partial results.
    workspace: usize,
}

/// Warps of a block that has this many products of 16 rows.
fn warps(row_tiles: usize) -> usize {
    if row_tiles == 1 { 4 } else { 8 }
}

/// Bytes of a row of queries or keys in shared memory.
fn pitch(kinds: &Kinds) -> usize {
    kinds.key_size.next_multiple_of(64) * 2
}

/// Bytes of shared memory of a block.
fn shared(kinds: &Kinds, row_tiles: usize, stages: usize) -> usize {
    let (rows, key_warps) = (row_tiles * ROWS, warps(row_tiles) / row_tiles);
    let weights = KEYS * 2 + 16;
    // Maxima for each part of the keys, factors and final maxima.
    let of_rows = (key_warps + 2) * 4;
    rows * (pitch(kinds) + weights + of_rows) + stages * KEYS * (pitch(kinds) + 1)
}

/// The stages of the ring buffer and the number of blocks per SM with which a tile fits.
fn ring(kinds: &Kinds, row_tiles: usize, device: &DeviceSpec) -> Option<(usize, usize)> {
    // More warps than those of two small blocks do not have enough registers.
    let most = if row_tiles == 1 { 2 } else { 1 };
    let stages = |blocks: usize| {
        let room = device.shared_memory() / blocks - RESERVED;
        STAGES.rev().find(|stages| shared(kinds, row_tiles, *stages) <= room)
    };
    (1..=most).rev().find_map(|blocks| stages(blocks).map(|stages| (stages, blocks)))
}

impl TileConfig {
    /// The tiles of a launch; `None` if they do not fit into shared memory, or into a grid.
    fn new(kinds: &Kinds, find: Find, device: &DeviceSpec) -> Option<Self> {
        let largest =
            [MAX_ROW_TILES, 2, 1].into_iter().find(|tiles| ring(kinds, *tiles, device).is_some())?;
        let group = kinds.group();
        let heads = (1..=group.min(largest * ROWS)).rev().find(|heads| group.is_multiple_of(*heads))?;
        let (tokens, row_tiles) = match find {
            Find::Tiles(_) => (largest * ROWS / heads, largest),
            _ => (1, heads.div_ceil(ROWS).next_power_of_two()),
        };
        let (stages, blocks) = ring(kinds, row_tiles, device)?;
        let columns = kinds.kv_heads * (group / heads);
        let resident = blocks * device.sm_count;
        let grid = match find {
            Find::Tiles(fewest) => {
                let tiles = kinds.tokens / tokens + kinds.sequences.min(kinds.tokens / fewest);
                [tiles.checked_mul(columns).filter(|tiles| *tiles <= i32::MAX as usize)?, 1, 1]
            }
            Find::Rows | Find::Singles => {
                let entries = if find == Find::Rows { kinds.tokens } else { kinds.sequences };
                let splits = (resident / (entries * columns).max(1)).clamp(1, MAX_SPLITS);
                [columns, Some(entries).filter(|entries| *entries <= MAX_GRID)?, splits]
            }
        };
        let [columns, entries, splits] = grid;
        let partial = entries * columns * splits * heads * (kinds.value_size + 4) * 4;
        Some(Self {
            find,
            heads,
            tokens,
            row_tiles,
            stages,
            blocks,
            shared: shared(kinds, row_tiles, stages),
            grid,
            workspace: if splits > 1 { partial } else { 0 },
        })
    }

    fn splits(&self) -> usize {
        self.grid[2]
    }

    /// Tiles per group of query heads of a KV head.
    fn parts(&self, kinds: &Kinds) -> usize {
        kinds.group() / self.heads
    }

    fn defines(&self, kinds: &Kinds) -> Result<Vec<(&'static str, String)>> {
        let (find, fewest) = match self.find {
            Find::Tiles(fewest) => (0, fewest),
            Find::Rows => (1, 1),
            Find::Singles => (2, 1),
        };
        let numbers = [
            ("HALF", usize::from(kinds.query == DType::F16)),
            ("FIND", find),
            ("PROMPT", fewest),
            ("TOKENS", self.tokens),
            ("HEADS", self.heads),
            ("ROW_TILES", self.row_tiles),
            ("WARPS", warps(self.row_tiles)),
            ("KEYS", KEYS),
            ("STAGES", self.stages),
            ("BLOCKS", self.blocks),
            ("SLOTS", kinds.slots),
            ("SPLIT", usize::from(self.splits() > 1)),
            ("VECTORS", usize::from(kinds.result_vectors)),
        ];
        let name = type_name(kinds.query)?;
        let mut defines = vec![("Q", name.to_owned()), ("K", name.to_owned())];
        defines.extend(numbers.map(|(name, number)| (name, number.to_string())));
        defines.extend(kinds.defines());
        Ok(defines)
    }

    /// The kernel of the tiles, and that which merges their splits.
    fn kernels(&self, kinds: &Kinds) -> Result<Vec<KernelSpec>> {
        let defines = self.defines(kinds)?;
        let mut kernels = vec![KernelSpec::of(UNIT, "latent", defines.clone()).with_shared(self.shared)];
        if self.splits() > 1 {
            kernels.push(KernelSpec::of(UNIT, "latent_combine", defines));
        }
        Ok(kernels)
    }
}

/// The plan of a call; `None` if these kernels do not support it.
pub(super) fn plan(op: &PagedAttention, kinds: &Kinds, device: &DeviceSpec) -> Result<Option<KernelPlan>> {
    let takes = device.has_half_mma()
        && kinds.shared_values
        && matches!(kinds.query, DType::F16 | DType::BF16)
        && kinds.cache == kinds.query
        && KEY_SIZES.contains(&kinds.key_size)
        && kinds.value_size <= MAX_VALUE
        && kinds.value_size.is_multiple_of(ROWS)
        && kinds.query_vectors
        && kinds.cache_vectors;
    if !takes {
        return Ok(None);
    }
    let finds = match (kinds.tokens, kinds.sequences) {
        (tokens, sequences) if tokens <= sequences => vec![Find::Rows],
        // A call planned for so many rows usually has many: then one launch suffices.
        (LONE.., 1) => vec![Find::Tiles(1)],
        _ => vec![Find::Singles, Find::Tiles(2)],
    };
    let launches: Option<Vec<TileConfig>> =
        finds.into_iter().map(|find| TileConfig::new(kinds, find, device)).collect();
    let Some(launches) = launches else { return Ok(None) };
    let mut kernels = Vec::new();
    for config in &launches {
        kernels.extend(config.kernels(kinds)?);
    }
    let (op, kinds) = (*op, kinds.clone());
    Ok(Some(KernelPlan {
        kernels,
        workspace: launches.iter().map(|config| config.workspace).sum(),
        persistent: 0,
        // The split of keys depends on the maximum number of sequences.
        batch_invariant: false,
        launches: Box::new(move |frame: &Frame, functions, _| {
            let attention = AttentionParams::paged(&op, frame, frame.result(0)?, Some(frame.result(1)?))?;
            let mut functions = functions.iter();
            let mut next =
                || functions.next().ok_or_else(|| Error::internal("an attention plan without a kernel"));
            let mut steps = Vec::new();
            // Only one of the launches has splits.
            for config in &launches {
                let params = LatentParams {
                    attention: AttentionParams { parts: config.parts(&kinds) as i64, ..attention },
                    splits: config.splits() as i64,
                    partial: frame.workspace,
                };
                let threads = warps(config.row_tiles) * 32;
                steps.extend(LaunchOp::kernel(next()?, config.grid, threads, &params));
                if config.splits() > 1 {
                    let [columns, entries, _] = config.grid;
                    let parts = kinds.value_size.div_ceil(MERGED_VALUES);
                    let grid = [columns * config.heads * parts, entries, 1];
                    steps.extend(LaunchOp::kernel(next()?, grid, MERGERS * 32, &params));
                }
            }
            Ok(steps)
        }),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// A step of DeepSeek's attention with this many query heads.
    fn kinds(query_heads: usize, tokens: usize, sequences: usize) -> Kinds {
        let (kv_heads, key_size, value_size) = (1, 576, 512);
        let shared_values = true;
        let other = super::super::tests::kinds();
        Kinds { query_heads, kv_heads, tokens, sequences, key_size, value_size, shared_values, ..other }
    }

    #[rstest]
    #[case::lite(16)]
    #[case::large(128)]
    #[case::odd(20)]
    #[case::prime(71)]
    fn tiles_fit_every_device(
        #[case] heads: usize,
        #[values((80, 108), (86, 84), (90, 132), (120, 170))] (capability, sm_count): (u32, usize),
        #[values(Find::Rows, Find::Singles, Find::Tiles(2))] find: Find,
    ) {
        let device = DeviceSpec::usual(capability, sm_count);
        let kinds = kinds(heads, 600, 8);
        let config = TileConfig::new(&kinds, find, &device).unwrap();
        assert!(config.blocks * (config.shared + RESERVED) <= device.shared_memory(), "{config:?}");
        assert!(
            config.heads * config.tokens <= config.row_tiles * ROWS && heads.is_multiple_of(config.heads)
        );
        // Warps share rows and keys evenly, down to products of 8 keys.
        let key_warps = warps(config.row_tiles) / config.row_tiles;
        assert!(KEYS.is_multiple_of(key_warps * 8) && KEYS.is_multiple_of(warps(config.row_tiles)));
    }

    #[rstest]
    #[case::one_sequence(600, 1, 1)]
    #[case::several(600, 8, 2)]
    fn tiles_cover_all_queries(#[case] tokens: usize, #[case] sequences: usize, #[case] fewest: usize) {
        let device = DeviceSpec::usual(90, 132);
        let config = TileConfig::new(&kinds(16, tokens, sequences), Find::Tiles(fewest), &device).unwrap();
        // One sequence has all queries but the fewest of each other one.
        let rest = tokens - (sequences - 1) * fewest;
        let tiles = (sequences - 1) * fewest.div_ceil(config.tokens) + rest.div_ceil(config.tokens);
        assert!(config.grid[0] >= tiles, "{config:?}");
    }

    #[rstest]
    #[case::decoding(8, 8, &["latent", "latent_combine"])]
    #[case::many(600, 600, &["latent"])]
    #[case::prompt(600, 1, &["latent"])]
    #[case::both(600, 8, &["latent", "latent_combine", "latent"])]
    fn steps_have_the_launches_they_need(
        #[case] tokens: usize,
        #[case] sequences: usize,
        #[case] expected: &[&str],
    ) {
        let op = PagedAttention {
            query_heads: 16,
            kv_heads: 1,
            scale: 0.1,
            softcap: 0.0,
            window: 0,
            mask: dsrun_core::op::AttentionMask::Causal,
            value_size: 512,
        };
        let device = DeviceSpec::usual(90, 132);
        let planned = plan(&op, &kinds(16, tokens, sequences), &device).unwrap().unwrap();
        let entries: Vec<&str> = planned.kernels.iter().map(|kernel| kernel.entry).collect();
        assert_eq!(entries, expected);
        assert_eq!(planned.workspace > 0, expected.contains(&"latent_combine"));
    }
}
