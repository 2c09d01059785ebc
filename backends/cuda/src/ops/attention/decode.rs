//! Paged attention of single tokens: `attention/decode.cu`, and for many tiles `attention/decode_even.cu`.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp, MAX_GRID, Parameters},
    },
    ops::{
        KernelPlan,
        attention::{
            params::{AttentionParams, DecodeEvenParams, DecodeParams, QuantisedRows},
            values_of,
        },
        bound::Bound,
        frame::Frame,
        operand, result, type_name,
    },
};
use dsrun_core::{
    DType, Error, Result, TensorDesc,
    kernels::CallDesc,
    op::{AttentionMask, PagedAttention},
};
use std::{fmt::Display, sync::Arc};

/// The maximum number of query heads of a tile: rows of a product.
const ROWS: usize = 16;
/// The same for heads of more than [`LONG`] elements, whose accumulators would not fit into registers otherwise.
const ROWS_OF_LONG: usize = 8;
const LONG: usize = 128;
/// The largest head size: the accumulators are in registers.
const MAX_HEAD: usize = 256;
/// The maximum number of splits of a sequence's keys.
const MAX_SPLITS: usize = 32;
/// The maximum number of splits that merge through distributed shared memory: the portable cluster size.
const MAX_CLUSTER: usize = 8;
/// Blocks per SM that keep enough reads in flight.
const BLOCKS: usize = 2;
/// The share of the places for those blocks that clusters are given, as numerator and denominator. A cluster needs all its places in
/// one group of SMs (GPC) at once; if there are clusters for all places, some of them only start when others have ended.
const FILLED: (usize, usize) = (3, 4);
/// The maximum number of bytes of keys and values in flight in a block; three such blocks fit on an SM.
const UNDER_WAY: usize = 64 << 10;
/// The number of such blocks.
const AT_ONCE: usize = 3;
/// Bytes of shared memory that the driver reserves per block.
const RESERVED: usize = 1 << 10;
/// The maximum bytes prefetched into the L2 before the preceding kernel ends, about half of an H200's L2, and the maximum units
/// per warp.
const AHEAD: usize = 26 << 20;
const MOST_AHEAD: usize = 4;
/// The maximum number of units in flight in a warp.
const STAGES: usize = 2;
/// Threads of a block.
const THREADS: usize = 128;

/// The number of tiles per SM from which on `decode_even` is used.
const MANY: usize = 16;
/// Up to this number of units in the longest possible sequence, tiles are even enough for `decode`.
const LONG_UNITS: usize = 256;
/// The maximum number of rows, or sequences, of its prefix sum in shared memory.
const MOST_ENTRIES: usize = 1024;
/// Its warps: fewer for large units, so that each warp has enough units in flight.
const WARPS: [usize; 2] = [8, 4];
const LARGE_UNIT: usize = 8 << 10;
/// The maximum bytes of keys and values in flight in its block, and units in flight per warp.
const RING: usize = 128 << 10;
const MOST_STAGES: usize = 8;
/// The maximum number of units of all tiles together.
const MOST_UNITS: usize = 1 << 30;

/// Whether vectors of 16 bytes can be loaded: the head size and all strides but the last are multiples of 8.
fn vectors(tensor: &TensorDesc, size: usize) -> bool {
    let (_, outer) = tensor.strides.split_last().unwrap_or((&1, &[]));
    size.is_multiple_of(8) && outer.iter().all(|stride| stride.is_multiple_of(8))
}

/// The additional parameter of a kernel besides `AttentionParams`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    /// The maximum number of splits of a tile: `decode`.
    Splits(usize),
    /// Columns of the grid: `decode_even`.
    Columns(usize),
}

/// The tile configuration of a decode kernel.
struct TileConfig {
    unit: &'static str,
    entry: &'static str,
    /// The constants specific to this kernel.
    own: Vec<(&'static str, usize)>,
    stages: usize,
    shared: usize,
    grid: [usize; 3],
    threads: usize,
    number: Number,
    workspace: usize,
    persistent: usize,
}

/// The sizes of a call that determine its tile configuration.
struct Sizes {
    /// Rows, or sequences.
    entries: usize,
    /// KV heads times tiles per head group.
    columns: usize,
    /// Query heads of a tile.
    heads: usize,
    value_size: usize,
    /// Slots of a page.
    slots: usize,
    /// Bytes of keys and values that a warp processes at a time.
    unit: usize,
}

impl Sizes {
    /// Splits the keys of tiles until there are enough blocks.
    fn split(&self, device: &DeviceSpec) -> TileConfig {
        let blocks = self.entries * self.columns;
        // No more blocks than are resident: a second wave costs more than a few idle SMs. If one block per SM is enough for clusters,
        // there is no second one, so that blocks of the neighbouring GEMM kernels fit beside it.
        let alone = device.has_clusters() && blocks * MAX_CLUSTER <= device.sm_count;
        let most = match device.has_clusters() {
            true if alone => device.sm_count,
            true => device.sm_count * BLOCKS * FILLED.0 / FILLED.1,
            false => device.sm_count * BLOCKS,
        };
        let splits = (most / blocks.max(1)).clamp(1, MAX_SPLITS);
        let cluster = if device.has_clusters() { splits.min(MAX_CLUSTER) } else { 1 };
        let splits = splits / cluster * cluster;
        let in_block = THREADS / 32 * self.unit;
        // Shared memory for merging the warps of a block, and the blocks of a cluster.
        let of_cluster = if cluster > 1 { (self.heads * self.value_size / 4 + cluster) * 24 } else { 0 };
        let beside = THREADS / 32 * self.heads * (self.value_size + 6) * 4 + of_cluster;
        let room = device.shared_memory().saturating_sub(beside).min(UNDER_WAY);
        // If all blocks are resident at once, each may have more units in flight.
        let at_once = splits == 1 && blocks <= device.sm_count * BLOCKS;
        let share = (device.shared_memory() / BLOCKS).saturating_sub(beside + RESERVED);
        let stages = match at_once && share / in_block > STAGES {
            true => STAGES + 1,
            false => (room / in_block).clamp(1, STAGES),
        };
        // Blocks that may be resident before the preceding kernel ends, and what they prefetch into the L2.
        let first = device.sm_count * AT_ONCE;
        let fetches = splits == 1 && device.has_clusters() && self.slots.is_multiple_of(16);
        let ahead = if fetches { (AHEAD / (blocks.min(first) * in_block).max(1)).min(MOST_AHEAD) } else { 0 };
        let merged = splits > cluster;
        let left = splits / cluster * self.heads * (self.value_size + 4) * 4;
        TileConfig {
            unit: "attention/decode.cu",
            entry: "decode",
            own: vec![("CLUSTER", cluster), ("AHEAD", ahead), ("FIRST", first)],
            stages,
            shared: stages * in_block,
            grid: [self.columns, self.entries, splits],
            threads: THREADS,
            number: Number::Splits(splits),
            workspace: if merged { blocks * left } else { 0 },
            persistent: if merged { blocks * cluster * 4 } else { 0 },
        }
    }

    /// Distributes the keys of all tiles evenly over warps.
    fn even(&self, device: &DeviceSpec) -> TileConfig {
        let warps = WARPS[usize::from(self.unit > LARGE_UNIT)];
        let stages = (RING / (warps * self.unit)).clamp(1, MOST_STAGES);
        let workers = device.sm_count * warps;
        // `PLACE` of the kernel: 4 floats per lane and step, then two per head.
        let eights = self.heads.div_ceil(8);
        let place = eights * (self.value_size.div_ceil(16) * 128 + 16) * 4;
        TileConfig {
            unit: "attention/decode_even.cu",
            entry: "decode_even",
            own: vec![("WARPS", warps), ("ENTRIES", self.entries)],
            stages,
            shared: stages * warps * self.unit,
            grid: [device.sm_count, 1, 1],
            threads: warps * 32,
            number: Number::Columns(self.columns),
            workspace: workers * 2 * place,
            persistent: workers * 4,
        }
    }
}

/// A planned launch of one of the two kernels.
pub(super) struct Decode {
    pub(super) spec: KernelSpec,
    grid: [usize; 3],
    threads: usize,
    number: Number,
    parts: usize,
    op: PagedAttention,
    pub(super) workspace: usize,
    pub(super) persistent: usize,
}

impl Decode {
    /// Plans a decode kernel, if it supports the types and heads: for all rows, or only for sequences of one row.
    pub(super) fn plan(
        op: &PagedAttention,
        call: &CallDesc,
        y: &TensorDesc,
        device: &DeviceSpec,
        singles: bool,
    ) -> Result<Option<Self>> {
        let (query, keys, values) = (operand(call, 0)?, operand(call, 1)?, values_of(op, call)?);
        let (tokens, sequences) = (query.shape[0], operand(call, 3)?.shape[0]);
        let (key_size, value_size) = (keys.shape[3], values.shape[3]);
        let takes = device.has_half_mma()
            && matches!(query.dtype, DType::F16 | DType::BF16)
            && keys.dtype == query.dtype
            && (8..=MAX_HEAD).contains(&key_size)
            && (8..=MAX_HEAD).contains(&value_size)
            && vectors(query, key_size)
            && vectors(keys, key_size)
            && vectors(&values, value_size)
            && keys.shape[2] > 0
            && op.mask != AttentionMask::Explicit;
        if !takes || (if singles { sequences } else { tokens }) > MAX_GRID {
            return Ok(None);
        }
        let group = (op.query_heads / op.kv_heads.max(1)).max(1) as usize;
        let most = if key_size.max(value_size) > LONG { ROWS_OF_LONG } else { ROWS };
        let heads = (1..=most.min(group)).rev().find(|heads| group.is_multiple_of(*heads)).unwrap_or(1);
        let parts = group / heads;
        let columns = op.kv_heads as usize * parts;
        let entries = if singles { sequences } else { tokens };
        let unit = 16 * (key_size.next_multiple_of(64) + value_size.next_multiple_of(64)) * 2;
        let sizes = Sizes { entries, columns, heads, value_size, slots: keys.shape[2], unit };
        let units = operand(call, 6)?.shape[1].saturating_mul(keys.shape[2]).div_ceil(16).max(1);
        let even = device.has_large_sms()
            && entries * columns >= MANY * device.sm_count
            && units > LONG_UNITS
            && entries <= MOST_ENTRIES
            && units.saturating_mul(entries * columns) <= MOST_UNITS
            && op.mask == AttentionMask::Causal
            && keys.shape[2].is_multiple_of(16)
            && y.strides[0].is_multiple_of(8);
        let cut = if even { sizes.even(device) } else { sizes.split(device) };
        let mask = if op.mask == AttentionMask::Causal { 1 } else { 2 };
        let defines: [(_, &dyn Display); 14] = [
            ("Q", &type_name(query.dtype)?),
            ("K", &type_name(keys.dtype)?),
            ("HALF", &i32::from(query.dtype == DType::F16)),
            ("KEY_SIZE", &key_size),
            ("VALUE_SIZE", &value_size),
            ("HEADS", &heads),
            ("SLOTS", &keys.shape[2]),
            ("STAGES", &cut.stages),
            ("MASK", &mask),
            ("WINDOW", &i32::from(op.window > 0)),
            ("SOFTCAP", &i32::from(op.softcap > 0.0)),
            ("ALIBI", &i32::from(call.tensor(8).is_some())),
            ("SINGLES", &i32::from(singles)),
            ("QUANTISED", &0),
        ];
        let mut spec = KernelSpec::new(cut.unit, cut.entry, defines).with_shared(cut.shared);
        spec.defines.extend(cut.own.iter().map(|(name, value)| (*name, value.to_string())));
        Ok(Some(Self {
            spec,
            grid: cut.grid,
            threads: cut.threads,
            number: cut.number,
            parts,
            op: *op,
            workspace: cut.workspace,
            persistent: cut.persistent,
        }))
    }

    /// The number of blocks that write a row of the result; `None` if a row is also split over keys.
    pub(super) fn blocks_of_row(&self) -> Option<usize> {
        (self.spec.entry == "decode" && self.grid[2] == 1).then_some(self.grid[0])
    }

    /// Makes the last of the `blocks` blocks of a row quantise it.
    pub(super) fn quantise(&mut self, blocks: usize) {
        for (_, value) in self.spec.defines.iter_mut().filter(|(name, _)| *name == "QUANTISED") {
            *value = blocks.to_string();
        }
    }

    /// The launch that writes the results of a call, with its scratch and zeroed memory.
    pub(super) fn step(
        &self,
        frame: &Frame,
        function: &Arc<Function>,
        workspace: u64,
        persistent: u64,
    ) -> Result<Option<LaunchOp>> {
        let (y, log) = (frame.result(0)?, frame.result(1)?);
        self.launch(frame, function, (y, Some(log)), [workspace, persistent], QuantisedRows::default())
    }

    /// The launch that writes `y` and, if needed, the log-sum-exp of the scores, with its scratch and zeroed memory. The rows of
    /// `y` are quantised if [`Self::quantise`] was called.
    pub(super) fn launch(
        &self,
        frame: &Frame,
        function: &Arc<Function>,
        (y, log): (&Bound, Option<&Bound>),
        [partial, counters]: [u64; 2],
        quantised: QuantisedRows,
    ) -> Result<Option<LaunchOp>> {
        let attention = AttentionParams::paged(&self.op, frame, y, log)?;
        let attention = AttentionParams { parts: self.parts as i64, ..attention };
        let parameters: Parameters = match self.number {
            Number::Splits(splits) => {
                (&DecodeParams { attention, splits: splits as i64, partial, counters, quantised }).into()
            }
            Number::Columns(columns) => {
                (&DecodeEvenParams { attention, columns: columns as i64, partial, counters }).into()
            }
        };
        Ok(LaunchOp::kernel(function, self.grid, self.threads, parameters))
    }
}

/// Plans a call as a single decode kernel, if by its sizes every sequence has at most one token, and the kernel supports the
/// types and heads.
pub(super) fn plan(op: &PagedAttention, call: &CallDesc, device: &DeviceSpec) -> Result<Option<KernelPlan>> {
    if operand(call, 0)?.shape[0] > operand(call, 3)?.shape[0] {
        return Ok(None);
    }
    let Some(decode) = Decode::plan(op, call, result(call, 0)?, device, false)? else { return Ok(None) };
    Ok(Some(KernelPlan {
        kernels: vec![decode.spec.clone()],
        workspace: decode.workspace,
        persistent: decode.persistent,
        // The split of keys depends on the maximum number of sequences.
        batch_invariant: false,
        launches: Box::new(move |frame, functions, _| {
            let function =
                functions.first().ok_or_else(|| Error::internal("a decode plan without a kernel"))?;
            Ok(decode.step(frame, function, frame.workspace, frame.persistent)?.into_iter().collect())
        }),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const MACHINE: DeviceSpec = DeviceSpec::usual(90, 132);

    /// Tiles of a model with 8 KV heads of 128 elements, each of 4 query heads.
    fn sizes(entries: usize) -> Sizes {
        Sizes { entries, columns: 8, heads: 4, value_size: 128, slots: 16, unit: 8 << 10 }
    }

    #[rstest]
    #[case::one_row(1)]
    #[case::two_rows(2)]
    #[case::three_rows(3)]
    #[case::few_rows(8)]
    #[case::enough_rows(32)]
    #[case::many_rows(128)]
    fn tiles_are_split_into_whole_clusters(#[case] rows: usize) {
        let cut = sizes(rows).split(&MACHINE);
        let [columns, entries, splits] = cut.grid;
        let cluster = cut.own.iter().find(|(name, _)| *name == "CLUSTER").map_or(1, |(_, cluster)| *cluster);
        assert_eq!((columns, entries, cut.number), (8, rows, Number::Splits(splits)));
        assert!((1..=MAX_SPLITS).contains(&splits) && splits.is_multiple_of(cluster), "{splits}, {cluster}");
        assert!(columns * rows * splits <= MACHINE.sm_count * BLOCKS * 3 / 4 || splits == 1, "{splits}");
        assert!(cut.stages > 0 && cut.shared <= MACHINE.shared_memory(), "{}", cut.shared);
        // Splits that do not fit a cluster meet in memory.
        assert_eq!(cut.workspace > 0, splits > cluster);
        assert_eq!(cut.persistent > 0, splits > cluster);
    }

    #[rstest]
    #[case::usual(8 << 10, 4)]
    #[case::small_heads(4 << 10, 16)]
    #[case::large_heads(16 << 10, 8)]
    fn rings_of_even_shares_fit(#[case] unit: usize, #[case] heads: usize) {
        let cut = Sizes { unit, heads, ..sizes(MOST_ENTRIES) }.even(&MACHINE);
        assert!(cut.stages > 0 && cut.threads.is_multiple_of(32));
        // What a step's entries are added up in takes 12 bytes for each.
        assert!(cut.shared + 12 * MOST_ENTRIES + 1024 <= 227 << 10, "{}", cut.shared);
        assert_eq!(cut.persistent, 132 * (cut.threads / 32) * 4);
    }
}
