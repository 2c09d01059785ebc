//! Attention, paged and unpaged: both run a general kernel for short sequences, followed by a prefill kernel if prefills
//! are possible. In paged attention with prefills, sequences of one token run on the decode kernel of [`super::decode`]. Large keys
//! that begin with their values, the latents of multi-head latent attention, have kernels of their own: [`super::latent`].

mod decode;
mod latent;
mod params;
mod prefill;
mod quantised;

use crate::{
    arch::DeviceSpec,
    driver::{
        context::Context,
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp, MAX_GRID},
    },
    ops::{KernelPlan, attention::decode::Decode, bound::Bound, frame::Frame, operand, result, type_name},
};
use dsrun_core::{
    DType, Error, Result, TensorDesc,
    kernels::CallDesc,
    op::{Attention, AttentionMask, PagedAttention},
};
pub(super) use params::params_headers;
use params::{AttentionParams, PlainAttentionParams};
use prefill::Prompts;
pub(super) use quantised::region;
use std::sync::Arc;

/// The maximum number of rows (queries times query heads) of a tile: they are in registers.
const MAX_ROWS: usize = 8;
/// The largest head size: the accumulators are in registers and shared memory.
const MAX_HEAD: usize = 1024;
/// The same for heads of more than [`LONG_HEAD`] elements.
const MAX_ROWS_OF_LONG: usize = 2;
const LONG_HEAD: usize = 256;
/// The maximum number of splits of a sequence's keys.
const MAX_SPLITS: usize = 32;
/// Threads of a block.
const THREADS: usize = 128;
/// Blocks per SM for tiles that are rare.
const RARE: usize = 4;

/// The tile configuration of the general kernel for a call.
#[derive(Clone, Copy, Debug)]
struct TileConfig {
    /// Query heads in a tile.
    heads: usize,
    /// Queries in a tile.
    tokens: usize,
    /// Query heads of a KV head.
    group: usize,
    kv_heads: usize,
    /// The maximum number of tiles, and the number of tiles that have separate blocks; each block loops over the rest.
    tiles: usize,
    at_once: usize,
    splits: usize,
    key_size: usize,
    value_size: usize,
    /// The minimum number of queries of a sequence, and the number from which on the prefill kernel runs (0: never).
    fewest: usize,
    prompt: usize,
    mask: usize,
    paged: bool,
}

impl TileConfig {
    /// Sequences of at least `prompt` queries run on the prefill kernel, if given.
    fn new(kinds: &Kinds, prompt: Option<usize>, device: &DeviceSpec) -> Self {
        let (group, tokens, sequences) = (kinds.group(), kinds.tokens, kinds.sequences);
        let most = if kinds.key_size.max(kinds.value_size) > LONG_HEAD { MAX_ROWS_OF_LONG } else { MAX_ROWS };
        let heads = (1..=most.min(group)).rev().find(|heads| group.is_multiple_of(*heads)).unwrap_or(1);
        // At most one token per sequence: larger tiles would be mostly empty.
        let single = tokens <= sequences && !device.batch_invariant;
        let in_tile = if single { 1 } else { (most / heads).max(1) };
        let mut tiles = tokens.min((tokens / in_tile).saturating_add(sequences));
        if let Some(prompt) = prompt {
            tiles = tiles.min(sequences.saturating_mul((prompt - 1).div_ceil(in_tile)));
        }
        Self {
            heads,
            tokens: in_tile,
            group,
            kv_heads: kinds.kv_heads,
            tiles,
            at_once: tiles,
            splits: 1,
            key_size: kinds.key_size,
            value_size: kinds.value_size,
            fewest: 1,
            prompt: prompt.unwrap_or(0),
            mask: kinds.mask_number(),
            paged: kinds.paged,
        }
    }

    fn parts(&self) -> usize {
        self.group / self.heads
    }

    /// The number of blocks of one split.
    fn blocks(&self) -> usize {
        self.tiles.saturating_mul(self.kv_heads * self.parts())
    }

    /// Bytes of the splits' unnormalised results.
    fn partial_bytes(&self) -> usize {
        if self.splits == 1 {
            return 0;
        }
        self.blocks() * self.splits * self.heads * self.tokens * (self.value_size + 2) * 4
    }
}

/// Lanes that share a key: enough for 8 elements each, a power of two. Heads of 32 or fewer elements, which are rare, leave lanes idle
/// rather than have kernels of their own.
fn lanes(size: usize) -> usize {
    size.div_ceil(8).next_power_of_two().clamp(8, 32)
}

fn vectors(tensor: &TensorDesc, size: usize) -> bool {
    let unit = 16 / tensor.dtype.bytes();
    let (_, outer) = tensor.strides.split_last().unwrap_or((&1, &[]));
    size.is_multiple_of(8) && outer.iter().all(|stride| stride.is_multiple_of(unit))
}

/// The head stride of a cache, if the heads of all pages form one dimension of constant stride.
fn head_stride(cache: &TensorDesc) -> Option<usize> {
    let (&[pages, heads, slots, _], &[page, head, slot, _]) = (&*cache.shape, &*cache.strides) else {
        return None;
    };
    match (pages > 1, heads > 1) {
        (true, true) => (page == heads * head).then_some(head),
        (true, false) => Some(page),
        (false, true) => Some(head),
        // A dimension of size 1 has no stride, but one must be given.
        (false, false) => Some(slots * slot),
    }
}

/// The types and sizes that the kernels are specialised for.
#[derive(Clone, Debug)]
struct Kinds {
    tokens: usize,
    sequences: usize,
    query_heads: usize,
    kv_heads: usize,
    query: DType,
    cache: DType,
    key_size: usize,
    value_size: usize,
    /// Whether the value of a key is its first elements.
    shared_values: bool,
    /// Slots of a page; 1 without pages.
    slots: usize,
    scale: f32,
    softcap: f32,
    window: u32,
    mask: AttentionMask,
    paged: bool,
    /// Whether rows of queries, and of keys and values, can be read 16 bytes at a time.
    query_vectors: bool,
    cache_vectors: bool,
    /// Whether the heads of all pages of keys, and of values, form one dimension of constant stride.
    cache_even: bool,
    /// Whether rows of results can be written 16 bytes at a time.
    result_vectors: bool,
    alibi: bool,
}

impl Kinds {
    /// Query heads of a KV head.
    fn group(&self) -> usize {
        (self.query_heads / self.kv_heads.max(1)).max(1)
    }

    /// The number of the mask in kernels.
    fn mask_number(&self) -> usize {
        match self.mask {
            AttentionMask::Causal => 1,
            AttentionMask::Bidirectional => 2,
            AttentionMask::Explicit => 3,
        }
    }

    /// The constants common to the kernels that are specialised for all of a call.
    fn defines(&self) -> Vec<(&'static str, String)> {
        let switch = |name, on: bool| (name, i32::from(on).to_string());
        vec![
            ("KEY_SIZE", self.key_size.to_string()),
            ("VALUE_SIZE", self.value_size.to_string()),
            ("MASK", self.mask_number().to_string()),
            switch("PAGED", self.paged),
            switch("SOFTCAP", self.softcap > 0.0),
            switch("WINDOW", self.window > 0),
            switch("ALIBI", self.alibi),
        ]
    }
}

/// The bound operands of the kernels.
struct Args<'a> {
    params: AttentionParams,
    keys: &'a Bound,
    values: &'a Bound,
    workspace: u64,
    persistent: u64,
}

/// The general kernel. One kernel serves many sizes of heads and tiles, and masks: they are parameters.
fn spec(kinds: &Kinds, cut: &TileConfig) -> Result<KernelSpec> {
    let (key_size, value_size) = (kinds.key_size, kinds.value_size);
    if !(1..=MAX_HEAD).contains(&key_size) || !(1..=MAX_HEAD).contains(&value_size) {
        let message =
            format!("heads have {key_size} and {value_size} elements; CUDA has kernels for 1 to {MAX_HEAD}");
        return Err(Error::unsupported(message));
    }
    let lanes = lanes(key_size.max(value_size));
    let pieces = |size: usize| size.div_ceil(lanes * 8);
    let extras = kinds.mask == AttentionMask::Explicit || kinds.softcap > 0.0 || kinds.alibi;
    let defines = [
        ("Q", type_name(kinds.query)?.to_owned()),
        ("K", type_name(kinds.cache)?.to_owned()),
        ("LANES", lanes.to_string()),
        ("KEY_PIECES", pieces(key_size).to_string()),
        ("VALUE_PIECES", pieces(value_size).to_string()),
        ("ROWS", (cut.heads * cut.tokens).to_string()),
        ("QUERY_VECTORS", kinds.query_vectors.to_string()),
        ("CACHE_VECTORS", kinds.cache_vectors.to_string()),
        ("SHARED_VALUES", kinds.shared_values.to_string()),
        ("EXTRAS", i32::from(extras).to_string()),
    ];
    Ok(KernelSpec::of("attention/attention.cu", "attention", defines.to_vec()))
}

/// The grid: tiles, KV heads times tiles per head group, splits.
fn grid(cut: &TileConfig) -> [usize; 3] {
    [cut.at_once.min(cut.tiles), (cut.kv_heads * cut.parts()).min(MAX_GRID), cut.splits]
}

/// The launch of the general kernel.
fn decode(cut: &TileConfig, function: &Arc<Function>, at: &Args<'_>) -> Option<LaunchOp> {
    let params = PlainAttentionParams {
        attention: AttentionParams { parts: cut.parts() as i64, ..at.params },
        splits: cut.splits as i64,
        partial: at.workspace,
        counters: at.persistent,
        heads: cut.heads as i64,
        tile_tokens: cut.tokens as i64,
        key_size: cut.key_size as i64,
        value_size: cut.value_size as i64,
        fewest: cut.fewest as i64,
        prompt: cut.prompt as i64,
        mask: cut.mask as i64,
        paged: i64::from(cut.paged),
    };
    LaunchOp::kernel(function, grid(cut), THREADS, &params)
}

/// The plan of a call. `places` finds its operands and passes them to the function that makes the launches.
fn recipe(
    kinds: Kinds,
    splits: impl Fn(&TileConfig) -> usize,
    device: &DeviceSpec,
    singles: impl FnOnce() -> Result<Option<Decode>>,
    places: impl Fn(&Frame, &dyn Fn(&Args<'_>) -> Result<Vec<LaunchOp>>) -> Result<Vec<LaunchOp>>
    + Send
    + Sync
    + 'static,
) -> Result<KernelPlan> {
    let prompts = Prompts::plan(&kinds, device)?;
    let prompt = prompts.as_ref().map(|prompts| prompts.fewest);
    // With prefills, single tokens run on the decode kernel.
    let singles = if prompt.is_some_and(|fewest| fewest > 1) { singles()? } else { None };
    let mut cut = TileConfig::new(&kinds, prompt, device);
    let any = cut.tiles > 0;
    // The number of splits depends on the number of sequences.
    cut.splits = if device.batch_invariant { 1 } else { splits(&cut) };
    if singles.is_some() {
        // Single tokens run elsewhere, so few sequences are left for the general kernel.
        cut.fewest = 2;
        cut.at_once = (device.sm_count * RARE).div_ceil((cut.kv_heads * cut.parts()).max(1));
    }
    let own = spec(&kinds, &cut)?;
    let mut kernels: Vec<KernelSpec> = any.then_some(own).into_iter().collect();
    kernels.extend(prompts.as_ref().map(Prompts::kernel));
    kernels.extend(singles.as_ref().map(|singles| singles.spec.clone()));
    let workspace = cut.partial_bytes().next_multiple_of(256);
    let counters = if cut.splits > 1 { (cut.blocks() * 4).next_multiple_of(256) } else { 0 };
    // After the counters of the splits comes that of the prefill kernel.
    let persistent = counters + if prompts.is_some() { 256 } else { 0 };
    Ok(KernelPlan {
        kernels,
        workspace: workspace + singles.as_ref().map_or(0, |singles| singles.workspace),
        persistent: persistent + singles.as_ref().map_or(0, |singles| singles.persistent),
        // Otherwise the kernel of a row depends on the number of rows of its sequence, and the split of keys on that of sequences.
        batch_invariant: device.batch_invariant,
        launches: Box::new(move |frame: &Frame, functions: &[Arc<Function>], _: &Context| {
            places(frame, &|at| {
                let mut functions = functions.iter();
                let mut next =
                    || functions.next().ok_or_else(|| Error::internal("an attention plan without a kernel"));
                let mut steps = Vec::new();
                if any {
                    steps.extend(decode(&cut, next()?, at));
                }
                if let Some(prompts) = &prompts {
                    steps.extend(prompts.step(next()?, at, at.persistent + counters as u64)?);
                }
                if let Some(singles) = &singles {
                    let (workspace, persistent) =
                        (frame.workspace + workspace as u64, frame.persistent + persistent as u64);
                    steps.extend(singles.step(frame, next()?, workspace, persistent)?);
                }
                Ok(steps)
            })
        }),
    })
}

/// The cache of values: an operand of its own, or the first elements of the keys.
fn values_of(op: &PagedAttention, call: &CallDesc) -> Result<TensorDesc> {
    if op.value_size == 0 {
        return Ok(operand(call, 2)?.clone());
    }
    let mut values = operand(call, 1)?.clone();
    values.shape[3] = op.value_size as usize;
    Ok(values)
}

pub(super) fn paged(op: &PagedAttention, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let (query, keys) = (operand(call, 0)?, operand(call, 1)?);
    let values = values_of(op, call)?;
    let (key_size, value_size) = (keys.shape[3], values.shape[3]);
    result(call, 1)?;
    let kinds = Kinds {
        tokens: query.shape[0],
        sequences: operand(call, 3)?.shape[0],
        query_heads: op.query_heads as usize,
        kv_heads: op.kv_heads as usize,
        query: query.dtype,
        cache: keys.dtype,
        key_size,
        value_size,
        shared_values: op.value_size > 0,
        slots: keys.shape[2],
        scale: op.scale,
        softcap: op.softcap,
        window: op.window,
        mask: op.mask,
        paged: true,
        query_vectors: vectors(query, key_size),
        cache_vectors: vectors(keys, key_size) && vectors(&values, value_size),
        cache_even: head_stride(keys).is_some() && head_stride(&values).is_some(),
        result_vectors: result(call, 0)?.strides[0].is_multiple_of(8),
        alibi: call.tensor(8).is_some(),
    };
    if !device.batch_invariant {
        if let Some(plan) = latent::plan(op, &kinds, device)? {
            return Ok(plan);
        }
        if let Some(plan) = decode::plan(op, call, device)? {
            return Ok(plan);
        }
    }
    // Four blocks of 128 threads per SM keep enough loads in flight.
    let wanted = device.sm_count * 4;
    let splits = |cut: &TileConfig| wanted.div_ceil(cut.blocks().max(1)).clamp(1, MAX_SPLITS);
    let singles = || Decode::plan(op, call, result(call, 0)?, device, true);
    let op = *op;
    recipe(kinds, splits, device, singles, move |frame, launch| {
        launch(&Args {
            params: AttentionParams::paged(&op, frame, frame.result(0)?, Some(frame.result(1)?))?,
            keys: frame.tensor(1)?,
            values: frame.optional(2).unwrap_or(frame.tensor(1)?),
            workspace: frame.workspace,
            persistent: frame.persistent,
        })
    })
}

pub(super) fn unpaged(op: &Attention, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let (query, key, value) = (operand(call, 0)?, operand(call, 1)?, operand(call, 2)?);
    let heads = (op.kv_heads as usize).max(1);
    let (key_size, value_size) = (key.shape[1] / heads, value.shape[1] / heads);
    let kinds = Kinds {
        tokens: query.shape[0],
        sequences: operand(call, 3)?.shape[0],
        query_heads: op.query_heads as usize,
        kv_heads: op.kv_heads as usize,
        query: query.dtype,
        cache: key.dtype,
        key_size,
        value_size,
        shared_values: false,
        slots: 1,
        scale: op.scale,
        softcap: op.softcap,
        window: op.window,
        mask: op.mask,
        paged: false,
        query_vectors: vectors(query, key_size),
        cache_vectors: vectors(key, key_size) && vectors(value, value_size),
        cache_even: false,
        result_vectors: result(call, 0)?.strides[0].is_multiple_of(8),
        alibi: call.tensor(5).is_some(),
    };
    let op = *op;
    recipe(
        kinds,
        |_| 1,
        device,
        || Ok(None),
        move |frame, launch| {
            launch(&Args {
                params: AttentionParams::unpaged(&op, frame)?,
                keys: frame.tensor(1)?,
                values: frame.tensor(2)?,
                workspace: frame.workspace,
                persistent: frame.persistent,
            })
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const DEVICE: DeviceSpec = DeviceSpec::usual(90, 132);

    /// A call of a model with heads of 64 elements.
    pub(super) fn kinds() -> Kinds {
        Kinds {
            tokens: 512,
            sequences: 4,
            query_heads: 8,
            kv_heads: 2,
            query: DType::F16,
            cache: DType::F16,
            key_size: 64,
            value_size: 64,
            shared_values: false,
            slots: 16,
            scale: 0.1,
            softcap: 0.0,
            window: 0,
            mask: AttentionMask::Causal,
            paged: true,
            query_vectors: true,
            cache_vectors: true,
            cache_even: true,
            result_vectors: true,
            alibi: false,
        }
    }

    #[rstest]
    #[case::dense([3, 2, 16, 64], [2048, 1024, 64, 1], Some(1024))]
    #[case::room_between_pages([3, 2, 16, 64], [4096, 1024, 64, 1], None)]
    #[case::room_between_slots([3, 2, 16, 64], [4096, 2048, 128, 1], Some(2048))]
    #[case::one_head([3, 1, 16, 64], [4096, 1024, 64, 1], Some(4096))]
    #[case::one_page([1, 2, 16, 64], [0, 1024, 64, 1], Some(1024))]
    #[case::one_of_both([1, 1, 16, 64], [0, 0, 64, 1], Some(1024))]
    fn heads_follow_heads(
        #[case] shape: [usize; 4],
        #[case] strides: [usize; 4],
        #[case] expected: Option<usize>,
    ) {
        let cache = TensorDesc { strides: strides.to_vec(), ..TensorDesc::dense(DType::F16, &shape) };
        assert_eq!(head_stride(&cache), expected);
    }

    #[rstest]
    #[case(512)]
    #[case(20)]
    fn prompts_that_run_elsewhere_need_no_tiles(#[case] tokens: usize) {
        let kinds = Kinds { tokens, ..kinds() };
        let cut = TileConfig::new(&kinds, Some(16), &DEVICE);
        assert!(cut.tiles <= TileConfig::new(&kinds, None, &DEVICE).tiles);
        // As many sequences as there may be, of as many queries as stay here.
        let longest = 15.min(tokens / kinds.sequences);
        assert!(cut.tiles >= kinds.sequences * longest.div_ceil(cut.tokens));
        assert_eq!(TileConfig::new(&kinds, Some(1), &DEVICE).tiles, 0);
    }

    #[rstest]
    #[case::decoding(32, 8, 1, 1)]
    #[case::prompt(32, 8, 512, 1)]
    #[case::one_head_each(12, 12, 64, 2)]
    #[case::large_group(71, 1, 3, 3)]
    #[case::group_of_sixteen(32, 2, 1, 1)]
    fn tiles_fit_and_cover_all_queries(
        #[case] query_heads: usize,
        #[case] kv_heads: usize,
        #[case] tokens: usize,
        #[case] sequences: usize,
    ) {
        let kinds = Kinds { tokens, sequences, query_heads, kv_heads, ..kinds() };
        let cut = TileConfig::new(&kinds, None, &DEVICE);
        assert!(cut.heads * cut.tokens <= MAX_ROWS && cut.group.is_multiple_of(cut.heads));
        // One sequence has all queries but one of each other sequence.
        let others = sequences - 1;
        assert!(cut.tiles >= others + (tokens - others).div_ceil(cut.tokens), "{cut:?}");
    }

    #[rstest]
    #[case(64)]
    #[case(80)]
    #[case(128)]
    #[case(256)]
    #[case(3)]
    fn lanes_cover_a_head(#[case] size: usize) {
        let lanes = lanes(size);
        assert!(lanes.is_power_of_two() && lanes <= 32 && lanes * 8 >= size, "{lanes}");
    }
}
