//! Prefill attention on tensor cores: sequences of at least [`PROMPT`] queries in a call, or the only sequence of a large call.
//! On a device opened to be batch-invariant it runs every sequence: a row's keys are processed in steps that begin at multiples of the
//! same number, whatever other rows its tile has.
//!
//! | device | head sizes | kernel |
//! |---|---|---|
//! | sm_90 | values of 64, 80, 96 or 128; keys a multiple of 16 up to 128; pages that divide 128, or are its multiples | `prompt_wgmma` |
//! | sm_80 and up; sm_75 for f16 | multiples of 8 up to 256 | `prompt_mma` |
//!
//! Everything else runs on the general kernel: other types, odd sizes or strides, scales that are not positive.

use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp, MAX_GRID},
        tensor_map::TensorMap,
    },
    ops::{
        attention::{
            Args, Kinds, head_stride,
            params::{AttentionParams, PromptWgmmaParams},
        },
        bound::Bound,
        params::Strides,
        type_name,
    },
};
use dsrun_core::{DType, Result};
use std::sync::Arc;

/// The largest head size: the sums of a row are in registers.
const MAX_HEAD: usize = 256;
/// The minimum number of queries of a prefill. Fewer would fill too little of a tile.
const PROMPT: usize = 16;
/// In a call planned for one sequence and at least this many rows, the sequence always runs as a prefill: a call planned for so
/// many rows usually has many, and then a single launch suffices.
pub(super) const LONE: usize = 64;

/// Rows of a tile of `prompt_wgmma`, and keys per iteration.
const WGMMA_ROWS: usize = 128;
/// Elements of a swizzled row in its shared memory, and bytes of 128 such rows.
const HALF: usize = 64;
const HALF_BYTES: usize = 128 * 128;
/// Stages of its ring buffers of keys and values, and its query buffers.
const STAGES: usize = 2;
const TILES: usize = 2;
/// Its threads: three warpgroups.
const WGMMA_THREADS: usize = 384;
/// Threads of `prompt_mma`.
const MMA_THREADS: usize = 128;
/// The maximum number of query heads of a KV head in a tile.
const MAX_HEADS: usize = 16;

/// The kernel for the prefills of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KernelKind {
    Wgmma,
    /// 16-row tiles of a warp, keys per iteration.
    Mma(usize, usize),
}

/// The plan for the prefills of a call.
#[derive(Clone, Debug)]
pub(super) struct Prompts {
    way: KernelKind,
    kernel: KernelSpec,
    /// The minimum number of queries of a sequence that runs here.
    pub(super) fewest: usize,
    /// Query heads and queries in a tile.
    heads: usize,
    tokens: usize,
    /// The maximum number of tiles, times KV heads and tiles per head group.
    items: usize,
    blocks: usize,
    kinds: Kinds,
}

impl Prompts {
    /// Plans the prefills of a call on tensor cores, if there can be any and a kernel supports them.
    pub(super) fn plan(kinds: &Kinds, device: &DeviceSpec) -> Result<Option<Self>> {
        // With as many sequences as tokens, nearly all sequences have a single token.
        let any = kinds.tokens >= PROMPT && kinds.tokens > kinds.sequences || device.batch_invariant;
        let half = kinds.query == DType::F16 || (kinds.query == DType::BF16 && device.has_half_mma());
        let fits = half && kinds.query == kinds.cache && kinds.query_vectors && kinds.cache_vectors;
        let largest = kinds.key_size.max(kinds.value_size);
        if !(any && fits && largest <= MAX_HEAD && kinds.scale > 0.0) {
            return Ok(None);
        }
        let way = KernelKind::choose(kinds, device);
        let alone = kinds.sequences == 1 && kinds.tokens >= LONE;
        let fewest = if alone || device.batch_invariant { 1 } else { PROMPT };
        let group = kinds.group();
        let heads = (1..=MAX_HEADS.min(group)).rev().find(|heads| group.is_multiple_of(*heads)).unwrap_or(1);
        let tokens = way.rows() / heads;
        let tiles = kinds.tokens / tokens + kinds.sequences.min(kinds.tokens / fewest);
        let items = tiles.saturating_mul(kinds.kv_heads * (group / heads));
        let blocks = if way == KernelKind::Wgmma { items.min(device.sm_count) } else { items };
        if items > i32::MAX as usize || kinds.kv_heads > MAX_GRID {
            return Ok(None);
        }
        let mut defines: Vec<(&'static str, String)> = vec![
            ("Q", type_name(kinds.query)?.to_owned()),
            ("K", type_name(kinds.cache)?.to_owned()),
            ("HALF", i32::from(kinds.query == DType::F16).to_string()),
            ("TOKENS", tokens.to_string()),
            ("HEADS", heads.to_string()),
            ("SLOTS", kinds.slots.to_string()),
            ("PROMPT", fewest.to_string()),
            ("VECTORS", i32::from(kinds.result_vectors).to_string()),
        ];
        defines.extend(kinds.defines());
        match way {
            KernelKind::Mma(row_tiles, keys) => {
                defines.extend([("ROW_TILES", row_tiles.to_string()), ("KEYS", keys.to_string())]);
            }
            KernelKind::Wgmma => defines.push(("WHOLE", i32::from(whole(kinds)).to_string())),
        }
        let (unit, entry) = way.kernel();
        let kernel = KernelSpec::of(unit, entry, defines).with_shared(way.shared(kinds));
        Ok(Some(Self { way, kernel, fewest, heads, tokens, items, blocks, kinds: kinds.clone() }))
    }

    pub(super) fn kernel(&self) -> KernelSpec {
        self.kernel.clone()
    }

    /// The launch; `counter` is the address of a zeroed word.
    pub(super) fn step(
        &self,
        function: &Arc<Function>,
        at: &Args<'_>,
        counter: u64,
    ) -> Result<Option<LaunchOp>> {
        let parts = (self.kinds.group() / self.heads) as i64;
        let attention = AttentionParams { parts, ..at.params };
        let blocks = [self.blocks.min(self.items), 1, 1];
        if self.way != KernelKind::Wgmma {
            return Ok(LaunchOp::kernel(function, blocks, MMA_THREADS, &attention));
        }
        let params = PromptWgmmaParams {
            query_map: self.query_map(&attention)?,
            key_map: self.cache_map(at.keys, self.kinds.key_size, attention.key_strides)?,
            value_map: self.cache_map(at.values, self.kinds.value_size, attention.value_strides)?,
            attention,
            counter,
        };
        Ok(LaunchOp::kernel(function, blocks, WGMMA_THREADS, &params))
    }

    /// The tensor map of queries, in boxes of half a row.
    fn query_map(&self, attention: &AttentionParams) -> Result<TensorMap> {
        let (size, heads) = (self.kinds.key_size as u64, (self.kinds.kv_heads * self.kinds.group()) as u64);
        TensorMap::of_halves(
            self.kinds.query,
            attention.query.first,
            [size, heads, self.kinds.tokens as u64],
            [size, attention.query.stride as u64],
            [HALF as u32, self.heads as u32, self.tokens as u32],
        )
    }

    /// The tensor map of keys or values of a page: boxes of both halves of 8 slots, or of 64 elements of the slots of a page or
    /// of 128 rows.
    fn cache_map(&self, cache: &Bound, size: usize, strides: Strides) -> Result<TensorMap> {
        let Strides { page, head, slot } = strides;
        let [page, head, slot] = [page, head, slot].map(|stride| stride as u64);
        let (slots, pages) = match self.kinds.paged {
            true => (self.kinds.slots as u64, cache.size(0) as u64),
            false => (self.kinds.tokens as u64, 1),
        };
        let (kind, heads) = (self.kinds.cache, self.kinds.kv_heads as u64);
        if let (true, Some(head)) = (whole(&self.kinds), head_stride(&cache.desc)) {
            // Dimensions: element, slot, half, group of 8 slots, head of all pages.
            let halves = size / HALF;
            let sizes = [HALF as u64, 8, halves as u64, slots / 8, heads * pages];
            let strides = [slot, HALF as u64, 8 * slot, head as u64];
            let box_sizes = [HALF as u32, 8, halves as u32, self.box_slots() / 8, 1];
            return TensorMap::of_halves(kind, cache.address, sizes, strides, box_sizes);
        }
        // What there is one of has no stride, but one must be named.
        let page = if page == 0 { slot * slots } else { page };
        // Dimensions: element, slot, head, page.
        let (sizes, strides) = ([size as u64, slots, heads, pages], [slot, head, page]);
        TensorMap::of_halves(kind, cache.address, sizes, strides, [HALF as u32, self.box_slots(), 1, 1])
    }

    /// Keys per copy.
    fn box_slots(&self) -> u32 {
        if self.kinds.paged { self.kinds.slots.min(WGMMA_ROWS) as u32 } else { WGMMA_ROWS as u32 }
    }
}

/// Whether a copy loads whole rows of a page's keys or values, which halves the number of copies.
fn whole(kinds: &Kinds) -> bool {
    let sizes = [kinds.key_size, kinds.value_size];
    kinds.paged && kinds.cache_even && sizes.iter().all(|size| size.is_multiple_of(HALF))
}

impl KernelKind {
    fn choose(kinds: &Kinds, device: &DeviceSpec) -> Self {
        let pages = !kinds.paged
            || (kinds.slots.is_multiple_of(8)
                && (WGMMA_ROWS.is_multiple_of(kinds.slots) || kinds.slots.is_multiple_of(WGMMA_ROWS)));
        let sizes = kinds.key_size <= 128
            && kinds.key_size.is_multiple_of(16)
            && [64, 80, 96, 128].contains(&kinds.value_size);
        match kinds.key_size.max(kinds.value_size) {
            _ if device.has_wgmma() && pages && sizes => Self::Wgmma,
            // Devices before Ampere have 64 KiB of shared memory.
            ..=128 if !device.has_half_mma() => Self::Mma(1, 64),
            _ if !device.has_half_mma() => Self::Mma(1, 16),
            // Limited by registers.
            ..=64 => Self::Mma(2, 64),
            65..=128 => Self::Mma(2, 32),
            _ => Self::Mma(1, 32),
        }
    }

    fn kernel(self) -> (&'static str, &'static str) {
        match self {
            Self::Wgmma => ("attention/prompt_wgmma.cu", "prompt_wgmma"),
            Self::Mma(..) => ("attention/prompt_mma.cu", "prompt_mma"),
        }
    }

    /// Rows of a tile.
    fn rows(self) -> usize {
        match self {
            Self::Wgmma => WGMMA_ROWS,
            Self::Mma(row_tiles, _) => row_tiles * 64,
        }
    }

    /// Bytes of shared memory.
    fn shared(self, kinds: &Kinds) -> usize {
        match self {
            Self::Wgmma => {
                let [key, value] =
                    [kinds.key_size, kinds.value_size].map(|size| size.div_ceil(HALF) * HALF_BYTES);
                // Plus 1024 bytes for alignment.
                1024 + TILES * key.max(value) + STAGES * (key + value)
            }
            Self::Mma(_, keys) => {
                let [key, value] =
                    [kinds.key_size, kinds.value_size].map(|size| size.next_multiple_of(16) * 2 + 16);
                (self.rows() + keys) * key + keys * value
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn kinds(group: usize, size: usize, slots: usize) -> Kinds {
        let (key_size, value_size) = (size, size);
        Kinds { query_heads: group * 2, key_size, value_size, slots, ..super::super::tests::kinds() }
    }

    fn device(capability: u32) -> DeviceSpec {
        DeviceSpec::usual(capability, 132)
    }

    #[rstest]
    #[case::one_of_several(4, 512)]
    #[case::alone(1, 512)]
    #[case::alone_and_short(1, 48)]
    fn tiles_cover_all_queries(#[case] sequences: usize, #[case] tokens: usize) {
        let kinds = Kinds { sequences, tokens, ..kinds(4, 128, 16) };
        let plan = Prompts::plan(&kinds, &device(90)).unwrap().unwrap();
        // One sequence has all queries but those that make the others prompts.
        let prompts = sequences.min(tokens / plan.fewest);
        let rest = tokens - (prompts - 1) * plan.fewest;
        let tiles = (prompts - 1) * plan.fewest.div_ceil(plan.tokens) + rest.div_ceil(plan.tokens);
        assert!(plan.items >= tiles * kinds.kv_heads * (kinds.group() / plan.heads), "{plan:?}");
    }

    /// Which of the kernels can run a call, if one of them can.
    #[rstest]
    #[case::llama(90, kinds(4, 128, 16), Some("prompt_wgmma"))]
    #[case::odd_pages(90, kinds(4, 128, 24), Some("prompt_mma"))]
    #[case::large_head(90, kinds(1, 256, 16), Some("prompt_mma"))]
    #[case::group_of_seven(80, kinds(7, 64, 16), Some("prompt_mma"))]
    #[case::prime_group(90, kinds(71, 64, 16), Some("prompt_wgmma"))]
    #[case::turing(75, kinds(1, 256, 16), Some("prompt_mma"))]
    #[case::turing_has_no_bf16(75, Kinds { query: DType::BF16, cache: DType::BF16, ..kinds(1, 64, 16) }, None)]
    #[case::no_scale(90, Kinds { scale: 0.0, ..kinds(4, 128, 16) }, None)]
    #[case::two_types(90, Kinds { cache: DType::F32, ..kinds(4, 128, 16) }, None)]
    fn kernels_fit(#[case] capability: u32, #[case] kinds: Kinds, #[case] expected: Option<&str>) {
        let plan = Prompts::plan(&kinds, &device(capability)).unwrap();
        assert_eq!(plan.as_ref().map(|plan| plan.way.kernel().1), expected);
        // Shared memory of a block on the smallest device of the architecture.
        let most = match capability {
            75 => 64 << 10,
            80 => 99 << 10,
            _ => 227 << 10,
        };
        assert!(
            plan.is_none_or(|plan| plan.kernel.shared <= most && plan.heads * plan.tokens <= plan.way.rows())
        );
    }
}
