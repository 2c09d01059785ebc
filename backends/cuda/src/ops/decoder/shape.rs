//! The common shape of all layers of a launch, and the kernel's tile configuration for it.

use super::{
    body::{Body, Layer},
    dtype_of,
    experts::Choice,
    name_of, params,
    product::{OUTPUTS, PRODUCTS, Product, Run, SLOT_COLUMNS, STEP, WARPS, needs_planes, packing, takes},
    refused,
};
use crate::{
    arch::DeviceSpec,
    collective::{PART_BYTES, RESULT_SETS},
    driver::kernel_spec::KernelSpec,
    ops::{
        gemm::fused_linear::{Epilogue, NormSpan, RopeParams},
        operand, type_name, weight_type,
    },
};
use dsrun_core::{
    DType, Error, Result, TensorDesc, WeightFormat, WeightType,
    kernels::CallDesc,
    op::{AttentionMask, RopePairing},
};
use std::ops::{Range, RangeInclusive};

/// The capacity of the layer table in shared memory is a multiple of this number, so that models of similar depth share a kernel.
const LAYER_STEP: usize = 16;
/// The largest head size: keys, or values, stay in registers.
pub(super) const MAX_HEAD: usize = 256;
/// The largest head size for which registers hold keys and values together, and two tiles of eight query heads.
const MAX_DOUBLE_HEAD: usize = 128;
/// The largest head size for which consumer warps have enough registers without taking some from the producer warps (`wide`).
const MAX_NARROW_HEAD: usize = 64;
/// Up to this many elements of all query heads, every block merges the attention splits for itself.
const MERGED_BY_ALL: usize = 1024;
/// The maximum number of inputs of a norm: each thread keeps 32 in registers.
const NORMED_INPUTS: usize = 32 * WARPS * 32;
const _: () = assert!(NORMED_INPUTS * ELEMENT <= PART_BYTES, "other ranks have room for a result");
/// The maximum number of query heads of a tile; half as many for large heads.
const TILE_HEADS: usize = 16;
/// The maximum number of splits of a sequence's keys.
const MAX_SPLITS: usize = 16;
/// Bytes of an activation.
const ELEMENT: usize = 2;
/// The range of bytes of a ring slot, and the step in which sizes are tried.
const SLOT_BYTES: RangeInclusive<usize> = 16 << 10..=32 << 10;
const SLOT_STEP: usize = 1 << 10;
/// Ring bytes that every device has room for.
const SMALL_RING: usize = 96 << 10;
/// The range of the number of slots.
const SLOTS: Range<usize> = 4..33;
/// The maximum bytes of one bulk copy: shorter copies allow a steadier pace per SM.
const COPY_BYTES: usize = 8 << 10;

/// The names of the kernel constants of each product: outputs and inputs of its runs, and its teams.
const RUN_CONSTANTS: [[&str; 3]; PRODUCTS + 1] = [
    ["ROWS_0", "COLUMNS_0", "TEAMS_0"],
    ["ROWS_1", "COLUMNS_1", "TEAMS_1"],
    ["ROWS_2", "COLUMNS_2", "TEAMS_2"],
    ["ROWS_3", "COLUMNS_3", "TEAMS_3"],
    ["ROWS_4", "COLUMNS_4", "TEAMS_4"],
];

/// The shape that all layers of a launch share, and their number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Layers of the launch.
    pub(super) layers: usize,
    /// Element type of activations.
    pub(super) dtype: DType,
    /// Constants of the kernel: element types of activations (`X`), of weights and biases of norms (`G`, `SHIFT`) and of
    /// biases of products (`BIAS`), the kind of norm (`NORM`: 1 RMS, 2 layer), whether heads are rotated (`ROPE`), whether layers
    /// have windows (`WINDOWS`), whether scores have a soft cap (`SOFTCAP`), and the MLP's `FUNCTION`.
    pub(super) constants: Vec<(&'static str, String)>,
    /// The weight format of the MLP.
    pub(super) format: WeightFormat,
    /// Whether only the MLP has that format, and the products of attention are dense.
    pub(super) dense_attention: bool,
    /// Whether the MLP is gated.
    pub(super) gated: bool,
    /// Elements of a token.
    pub(super) hidden: usize,
    /// The inner size of the MLP; with experts, of all chosen experts together.
    pub(super) inner: usize,
    pub(super) experts: Option<Choice>,
    /// KV heads.
    pub(super) kv_heads: usize,
    /// Query heads of each.
    pub(super) group: usize,
    /// Elements of a head.
    pub(super) head: usize,
    /// Rotated pairs of a head.
    pub(super) pairs: usize,
    /// Slots of a page.
    pub(super) slots: usize,
    /// Whether attention is causal.
    pub(super) causal: bool,
    /// The number of kinds of attention.
    pub(super) kinds: usize,
    /// Whether the results of attention and MLP have norms.
    pub(super) post_norms: bool,
    /// Whether heads have sinks.
    pub(super) sinks: bool,
    /// Whether the MLP is beside attention.
    pub(super) parallel: bool,
    /// Whether rotated pairs are neighbours, instead of in halves of a head.
    pub(super) neighbours: bool,
    /// The number of ranks that these results are summed over.
    pub(super) ranks: usize,
}

/// The tile configuration of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TileConfig {
    pub(super) blocks: usize,
    slot: usize,
    slots: usize,
    /// Of each product.
    runs: Vec<Run>,
    /// Teams of warps that take runs in turn.
    teams: Vec<usize>,
    tile_heads: usize,
    splits: usize,
    /// Whether the blocks of a head merge its splits of attention for all other blocks.
    merged: bool,
    /// Whether consumer warps take registers from the producer warps.
    wide: bool,
    /// Copies of a run.
    copies: usize,
    /// The number of ring slots, if the ring buffers of all blocks together hold a whole layer.
    pub(super) held: Option<usize>,
    /// Bytes of shared memory.
    shared: usize,
}

impl TileConfig {
    /// Threads of a block.
    pub(super) fn threads(&self) -> usize {
        // `setmaxnreg` moves registers between groups of four warps.
        let beside = if self.wide { 4 } else { 1 };
        (WARPS + beside) * 32
    }
}

/// The types of a layer's weights, vectors and caches, which must be the same in all layers of a launch.
#[derive(PartialEq)]
struct LayerTypes<'a> {
    weights: [&'a WeightType; PRODUCTS],
    /// The weights of the router and of the experts' up projection.
    expert_weights: Option<[&'a WeightType; 2]>,
    vectors: Vec<Option<&'a TensorDesc>>,
    caches: [&'a TensorDesc; 2],
}

impl<'a> LayerTypes<'a> {
    fn of(layer: &Layer, call: &'a CallDesc) -> Result<Self> {
        let products = layer.products();
        let optional = |value: Option<usize>| value.map(|value| operand(call, value)).transpose();
        let mut vectors = Vec::new();
        for product in products {
            vectors.push(optional(product.bias)?);
            vectors.push(optional(product.norm.and_then(|norm| norm.weight()))?);
            vectors.push(optional(product.norm.and_then(|norm| norm.bias()))?);
        }
        for (_, weight) in layer.heads.norms.iter().flatten() {
            vectors.push(Some(operand(call, *weight)?));
        }
        for norm in layer.post_norms.iter().flatten() {
            vectors.push(optional(norm.weight())?);
        }
        let experts = layer.experts;
        for vector in experts.iter().flat_map(|experts| experts.all_vectors()).chain([layer.attention.sinks])
        {
            vectors.push(optional(vector)?);
        }
        let expert_weights = experts
            .map(|experts| Ok([weight_type(call, experts.router)?, weight_type(call, experts.second)?]));
        let weight = |index: usize| weight_type(call, products[index].weight);
        let [keys, values] = layer.heads.caches;
        Ok(Self {
            weights: [weight(0)?, weight(1)?, weight(2)?, weight(3)?],
            expert_weights: expert_weights.transpose()?,
            vectors,
            caches: [operand(call, keys)?, operand(call, values)?],
        })
    }
}

/// The common element type of optional vectors; f32 if all are absent.
fn common_type<const N: usize>(call: &CallDesc, vectors: [Option<usize>; N]) -> Result<String> {
    let names = vectors.into_iter().flatten().map(|value| name_of(call, Some(value)));
    let names = names.collect::<Result<Vec<_>>>()?;
    let first = names.first().copied().unwrap_or("f32");
    match names.iter().find(|name| **name != first) {
        Some(other) => Err(refused(format!("their vectors are of {first} and of {other}"))),
        None => Ok(first.to_owned()),
    }
}

impl Shape {
    /// The shape of layers in a call.
    ///
    /// # Errors
    /// If the kernel does not support their sizes or types.
    pub(super) fn of(body: &Body, call: &CallDesc) -> Result<Self> {
        let layer = body.first();
        let types = LayerTypes::of(layer, call)?;
        for other in &body.layers[1..] {
            if LayerTypes::of(other, call)? != types {
                return Err(refused("they differ in the types of their weights"));
            }
        }
        let [input, output, up, down] = layer.products();
        let [input_weight, output_weight, up_weight, down_weight] = types.weights;
        let [keys, values] = types.caches;
        let (slots, head, kv_heads) = (keys.shape[2], keys.shape[3], keys.shape[1]);
        let (dtype, format, op) = (keys.dtype, up_weight.format, layer.attention.op);
        let result = call.results.get(body.result).ok_or_else(|| Error::internal("there is no token"))?;
        if result.shape[0] != 1 || operand(call, layer.attention.start)?.shape[0] != 1 {
            return Err(refused(format!("there are {} tokens, must be one", result.shape[0])));
        }
        let one_type = matches!(dtype, DType::F16 | DType::BF16)
            && [input, output, up, down].iter().all(|product| product.product == dtype)
            && [values.dtype, result.dtype] == [dtype; 2]
            && (body.embedding.is_some() || dtype_of(call, body.x)? == dtype);
        let count = layer.experts.map_or(1, |experts| experts.count.max(1));
        let copies = [1, 1, count, count];
        let taken = |(weight, copies): (&&WeightType, usize)| {
            takes(weight.format, dtype, [weight.rows() / copies, weight.columns()], copies > 1)
        };
        let dense_attention =
            matches!(input_weight.format, WeightFormat::Dense(_)) && packing(format).is_some();
        let formats = types.weights.map(|weight| weight.format);
        let alike = formats == [format; PRODUCTS]
            || dense_attention
                && formats == [formats[0], formats[0], format, format]
                && !needs_planes(packing(format));
        if !one_type || !alike || !types.weights.iter().zip(copies).all(taken) {
            return Err(refused(
                "activations, caches and weights must be f16 or bf16, or weights one integer format, or those of the MLP mxfp4",
            ));
        }
        let group = (op.query_heads / op.kv_heads.max(1)) as usize;
        let ropes = body.kinds.iter().filter_map(|kind| kind.rope);
        let frequencies = ropes.map(|rope| operand(call, rope.frequencies)).collect::<Result<Vec<_>>>()?;
        if body.kinds.len() > params::KINDS || frequencies.iter().any(|other| other != &frequencies[0]) {
            return Err(refused(format!(
                "their attention is of {} kinds, must be of {} at most, which rotate as many elements",
                body.kinds.len(),
                params::KINDS
            )));
        }
        let rotated = body.layers.iter().find(|layer| layer.heads.rope.is_some()).unwrap_or(layer);
        let of_neighbours = |rope: RopeParams| rope.pairing == RopePairing::Neighbours;
        let neighbours = rotated.heads.rope.is_some_and(of_neighbours);
        if body.kinds.iter().filter_map(|kind| kind.rope).any(|rope| of_neighbours(rope) != neighbours) {
            return Err(refused("their heads are rotated in different pairs"));
        }
        let (heads, pairs) = match rotated.input.heads(call)? {
            Some([heads, own, key, value, pairs]) if [own, key, value] == [kv_heads, head, head] => {
                (heads, pairs)
            }
            _ => return Err(refused("keys and values must have heads of one size")),
        };
        let whole = |cache: &&TensorDesc| cache.strides[..3].iter().all(|stride| stride.is_multiple_of(8));
        let paged = [op.kv_heads as usize, op.query_heads as usize, kv_heads * group]
            == [kv_heads, heads, heads]
            && values.shape[3] == head
            && (16..=MAX_HEAD).contains(&head)
            && head.is_multiple_of(16)
            && 2 * pairs <= head
            && pairs.is_multiple_of(8)
            && slots > 0
            && slots.is_multiple_of(16)
            && types.caches.iter().all(whole);
        if !paged {
            let message =
                format!("{heads} heads of {head} over {kv_heads} KV heads in pages of {slots} tokens");
            return Err(refused(message));
        }
        let gated = matches!(up.epilogue, Epilogue::Gate(_));
        let (hidden, inner) = (input_weight.columns(), down_weight.columns());
        let up_rows = match layer.experts {
            Some(_) => count * inner,
            None if gated => 2 * inner,
            None => inner,
        };
        let expected = [
            ((heads + 2 * kv_heads) * head, hidden),
            (hidden, heads * head),
            (up_rows, hidden),
            (count * hidden, inner),
        ];
        let sizes = [input_weight, output_weight, up_weight, down_weight]
            .iter()
            .zip(expected)
            .all(|(weight, expected)| (weight.rows(), weight.columns()) == expected);
        let [first_norm, second_norm] = [input.norm, up.norm];
        let kind =
            |norm: Option<crate::ops::gemm::fused_linear::Norm>| norm.map_or(0, |norm| norm.scalars()[0]);
        let post_norms = layer.post_norms.map_or([None; 2], |norms| norms.map(Some));
        // Only RMS norms follow attention and MLP, and precede them then.
        let mut whole_norms = kind(first_norm) == kind(second_norm)
            && (layer.post_norms.is_none() || kind(first_norm) < 2 && post_norms.map(kind) == [1; 2]);
        for norm in [first_norm, second_norm].into_iter().chain(post_norms).flatten() {
            for vector in [norm.weight(), norm.bias()].into_iter().flatten() {
                whole_norms &= operand(call, vector)?.shape == [hidden];
            }
        }
        if !sizes || !whole_norms {
            return Err(refused("the sizes of their products and norms do not follow from each other"));
        }
        let [first_post, second_post] = post_norms;
        let weights = [first_norm, second_norm, first_post, second_post]
            .map(|norm| norm.and_then(|norm| norm.weight()));
        let biases = [first_norm, second_norm].map(|norm| norm.and_then(|norm| norm.bias()));
        let head_norms = layer.heads.norms.map_or([None; 2], |norms| norms.map(|(_, weight)| Some(weight)));
        // A lane must have both elements of a rotated pair of a head that it normalises.
        let pairs_in_lane = pairs == 0 || 2 * pairs == head && head.is_multiple_of(64) && !neighbours;
        if layer.heads.norms.is_some() && !(pairs_in_lane && head.is_multiple_of(32)) {
            return Err(refused(format!(
                "heads of {head} with {pairs} rotated pairs have norms of their own"
            )));
        }
        let over_all_heads = input.norm_span(call)? == Some(NormSpan::AllHeads);
        let router = match layer.experts {
            Some(experts) => {
                let weights =
                    types.expert_weights.ok_or_else(|| Error::internal("experts without a router"))?;
                Some(Choice::of(&experts, weights, [up_weight, down_weight], dtype)?)
            }
            None => None,
        };
        let [router_bias, second_bias] =
            layer.experts.map_or([None; 2], |experts| [experts.router_bias, experts.second_bias]);
        let mut constants = vec![
            ("X", type_name(dtype)?.to_owned()),
            ("G", common_type(call, weights)?),
            ("SHIFT", common_type(call, biases)?),
            (
                "BIAS",
                common_type(call, [input.bias, output.bias, up.bias, down.bias, router_bias, second_bias])?,
            ),
            ("NORM", kind(first_norm).to_string()),
            ("ROPE", i32::from(rotated.heads.rope.is_some()).to_string()),
            ("WINDOWS", i32::from(body.kinds.iter().any(|kind| kind.op.window > 0)).to_string()),
            ("SOFTCAP", i32::from(op.softcap > 0.0).to_string()),
            ("FUNCTION", up.function().to_string()),
            ("HEAD_NORMS", i32::from(layer.heads.norms.is_some()).to_string()),
            ("OVER_ALL_HEADS", i32::from(over_all_heads).to_string()),
            ("HEAD_NORM", common_type(call, head_norms)?),
        ];
        let (layers, causal) = (body.layers.len(), op.mask == AttentionMask::Causal);
        let experts = router.map(|(choice, router)| {
            constants.extend(router);
            choice
        });
        Ok(Self {
            layers,
            dtype,
            constants,
            format,
            dense_attention,
            gated,
            hidden,
            inner: experts.map_or(1, |experts| experts.chosen) * inner,
            experts,
            kv_heads,
            group,
            head,
            pairs,
            slots,
            causal,
            kinds: body.kinds.len(),
            post_norms: layer.post_norms.is_some(),
            sinks: layer.attention.sinks.is_some(),
            parallel: layer.parallel,
            neighbours,
            ranks: call.comm.as_ref().map_or(1, |comm| comm.ranks()),
        })
    }

    /// Whether layers have additional operands.
    pub(super) fn has_extras(&self) -> bool {
        self.post_norms || self.kinds > 1 || self.sinks
    }

    /// Whether every block keeps the token, because it adds whole results to it.
    fn keeps_token(&self) -> bool {
        self.post_norms || self.ranks > 1
    }

    /// The capacity of the layer table in shared memory.
    fn table_layers(&self) -> usize {
        self.layers.next_multiple_of(LAYER_STEP)
    }

    fn products(&self) -> Vec<Product> {
        let query = self.kv_heads * self.group * self.head;
        let up = if self.gated { 2 * self.inner } else { self.inner };
        let (keys, packing) = (self.kv_heads * self.head, packing(self.format));
        let of_attention = packing.filter(|_| !self.dense_attention);
        // In the product of query, key and value, the halves of rotated elements and of a head must be whole runs.
        let turned =
            if self.pairs > 0 && self.head.is_multiple_of(4 * OUTPUTS) { self.pairs } else { self.head / 2 };
        let product = |packing, inputs, outputs, runs| {
            let together = if outputs == query + 2 * keys { turned } else { outputs };
            let slot_columns = SLOT_COLUMNS[0];
            Product { inputs, outputs, runs, packing, together, slot_columns, of_experts: false, piece: None }
        };
        // Tiles have two runs if results are computed from pairs.
        let pairs = |paired: bool| if paired { 2 } else { 1 };
        let halves = !self.neighbours && self.constants.contains(&("ROPE", "1".to_owned()));
        let mut products = vec![
            product(of_attention, self.hidden, query + 2 * keys, pairs(halves)),
            product(of_attention, query, self.hidden, 1),
            product(packing, self.hidden, up, pairs(self.gated)),
            product(packing, self.inner, self.hidden, 1),
        ];
        if let Some(Choice { count, chosen, .. }) = self.experts {
            let inner = self.inner / chosen;
            products[2].together = inner;
            products[3].piece = Some(inner);
            for product in &mut products[2..] {
                product.of_experts = true;
            }
            products.push(product(None, self.hidden, count, 1));
        }
        products
    }

    /// The kernel's tile configuration for a device; `None` if its blocks cannot hold such layers.
    pub(super) fn tiles(&self, device: &DeviceSpec) -> Option<TileConfig> {
        SLOT_COLUMNS.into_iter().find_map(|columns| {
            let mut products = self.products();
            products.iter_mut().for_each(|product| product.slot_columns = columns);
            self.tiles_of(&products, device)
        })
    }

    /// The tile configuration for products with a certain size of slots.
    fn tiles_of(&self, products: &[Product], device: &DeviceSpec) -> Option<TileConfig> {
        let bytes: usize = products.iter().map(Product::bytes).sum();
        if self.hidden > NORMED_INPUTS {
            return None;
        }
        // If the ring buffers hold the layers, prefer the longest runs; otherwise the least waste of the ring buffer, then the
        // largest slots.
        let held = bytes <= device.sm_count * SMALL_RING;
        let used = |slot: &usize| match held {
            true => 0,
            false => products.iter().map(|product| product.bytes_in_slots(*slot)).sum::<usize>(),
        };
        let slot = SLOT_BYTES.rev().step_by(SLOT_STEP).min_by_key(used)?;
        let runs: Vec<Run> = products.iter().map(|product| product.run(slot)).collect();
        let slot = products.iter().zip(&runs).map(|(product, run)| product.slot_bytes(*run)).max()?;
        let slot = slot.next_multiple_of(128);
        if products.iter().zip(&runs).any(|(product, run)| !product.takes_rows_of_experts(*run)) {
            return None;
        }
        // Every block must have tiles of the first half of the MLP: there it observes that all other blocks have finished older
        // work.
        let tiles = products[2].tiles(runs[2]);
        let most = device.sm_count.min(tiles);
        let most_heads = if self.head > MAX_DOUBLE_HEAD { TILE_HEADS / 2 } else { TILE_HEADS };
        let tile_heads = (1..=most_heads).rev().find(|heads| self.group.is_multiple_of(*heads))?;
        let parts = self.kv_heads * (self.group / tile_heads);
        // As in the kernel, plus 2 KiB for its static shared memory, and the sines of another kind of attention.
        let rounded = |bytes: usize| bytes.next_multiple_of(128);
        let planes = needs_planes(packing(self.format));
        let staged = |product: &Product| match planes {
            false => rounded(product.inputs * ELEMENT),
            true => {
                let inputs = product.inputs.next_multiple_of(STEP);
                rounded(3 * (inputs + 64) + inputs / (STEP / 2) * 4)
            }
        };
        let inputs = products.iter().map(staged).max()?;
        let teams = products.iter().zip(&runs).map(|(product, run)| product.teams(*run, most));
        let teams: Vec<usize> = teams.collect();
        let sums = products.iter().zip(&teams).map(|(product, teams)| product.sums(*teams)).max()?;
        let heads = staged(&products[1]) + rounded(WARPS * tile_heads * (self.head + 6) * 4);
        let beside = inputs.max(heads)
            + WARPS * sums * 4
            + rounded(SLOTS.end * 16)
            + rounded(self.table_layers() * size_of::<params::Layer>())
            + if self.has_extras() {
                rounded(self.table_layers() * size_of::<params::ExtraLayer>())
            } else {
                0
            }
            + if self.keeps_token() { rounded(self.hidden * ELEMENT) } else { 0 }
            + (self.kinds - 1) * rounded(self.head / 2 * size_of::<[f32; 2]>())
            + self.experts.map_or(0, |experts| {
                let table = self.table_layers() * size_of::<params::ExpertLayer>();
                let plain = if planes { rounded(self.hidden * ELEMENT) } else { 0 };
                rounded(table) + plain + rounded(experts.words * size_of::<u32>())
            });
        let left = device.shared_memory().checked_sub(beside + (2 << 10))?;
        let slots = (left / slot).min(SLOTS.end - 1);
        let whole = bytes <= slots * slot * most;
        // If the ring buffers hold a whole layer, use only as many blocks as divide the largest number of tiles evenly, since
        // every block reads the same exchanged results. Otherwise all blocks are needed for bandwidth.
        let blocks = if whole { tiles.div_ceil(tiles.div_ceil(most.max(1)).max(1)) } else { most };
        if slots < SLOTS.start || parts == 0 || parts > blocks {
            return None;
        }
        Some(TileConfig {
            blocks,
            slot,
            slots,
            runs,
            teams,
            tile_heads,
            splits: (blocks / parts).clamp(1, MAX_SPLITS),
            merged: products[1].inputs > MERGED_BY_ALL,
            wide: self.head > MAX_NARROW_HEAD && device.has_wgmma(),
            copies: if whole { 1 } else { slot.div_ceil(COPY_BYTES).next_power_of_two().clamp(1, 4) },
            held: whole.then_some(slots),
            shared: slots * slot + beside,
        })
    }

    pub(super) fn spec(&self, cut: &TileConfig) -> KernelSpec {
        let half = self.constants.contains(&("X", "f16".to_owned()));
        let numbers = [
            ("HALF", usize::from(half)),
            ("MIDDLE", if self.gated { 3 } else { 2 }),
            ("HIDDEN", self.hidden),
            ("INNER", self.inner),
            ("HEADS", self.kv_heads * self.group),
            ("KV_HEADS", self.kv_heads),
            ("HEAD", self.head),
            ("PAIRS", self.pairs),
            ("SLOTS", self.slots),
            ("EXPERTS", self.experts.map_or(0, |experts| experts.count)),
            ("CHOSEN", self.experts.map_or(1, |experts| experts.chosen)),
            ("ROUNDED_LOGITS", usize::from(self.experts.is_some_and(|experts| experts.rounded))),
            ("TABLE_LAYERS", self.table_layers()),
            ("CAUSAL", usize::from(self.causal)),
            ("KINDS", self.kinds),
            ("POST_NORMS", usize::from(self.post_norms)),
            ("SINKS", usize::from(self.sinks)),
            ("PARALLEL", usize::from(self.parallel)),
            ("NEIGHBOURS", usize::from(self.neighbours)),
            ("DENSE_ATTENTION", usize::from(self.dense_attention)),
            ("RANKS", self.ranks),
            ("RESULT_SETS", RESULT_SETS),
            ("PART_BYTES", PART_BYTES),
            ("TILE_HEADS", cut.tile_heads),
            ("PARTS_OF_GROUP", self.group / cut.tile_heads),
            ("SPLITS", cut.splits),
            ("MERGED", usize::from(cut.merged)),
            ("WIDE", usize::from(cut.wide)),
            ("GRID", cut.blocks),
            ("WARPS", WARPS),
            ("RING_SLOTS", cut.slots),
            ("SLOT_BYTES", cut.slot),
            ("COPIES", cut.copies),
        ];
        let mut defines = self.constants.clone();
        // Every kernel has the router's product, with no outputs if there are no experts.
        let none = Run { outputs: OUTPUTS, inputs: self.hidden };
        let runs = cut.runs.iter().chain([&none]).zip(cut.teams.iter().chain([&1]));
        for (names, (run, teams)) in RUN_CONSTANTS.into_iter().zip(runs) {
            let values = [run.outputs, run.inputs, *teams];
            defines.extend(names.into_iter().zip(values.map(|value| value.to_string())));
        }
        match packing(self.format) {
            None => defines.push(("BITS", "0".to_owned())),
            Some(packing) => defines.extend(packing.defines()),
        }
        defines.extend(numbers.map(|(name, value)| (name, value.to_string())));
        KernelSpec::of(super::UNIT, "layers", defines).with_shared(cut.shared).launched_together()
    }

    /// Bytes that blocks exchange after the last layer: the result of its MLP, if that has a norm and is not summed over ranks.
    pub(super) fn final_exchange(&self) -> usize {
        if self.post_norms && self.ranks == 1 { (self.hidden * ELEMENT).next_multiple_of(256) } else { 0 }
    }

    /// Bytes that blocks exchange in a layer (`LAYER_BYTES` of the kernel), and bytes of the attention splits.
    pub(super) fn exchange(&self, cut: &TileConfig) -> (usize, usize) {
        let query = self.kv_heads * self.group * self.head;
        let merged = if cut.merged { query } else { 0 };
        // A logit has the size of two activations.
        let logits = 2 * self.experts.map_or(0, |experts| experts.count);
        let keys = 2 * self.kv_heads * self.head;
        let rows = [self.hidden, query + keys, self.hidden, self.inner, merged, logits];
        let splits = self.kv_heads * self.group * cut.splits * (self.head + 4) * 4;
        (rows.map(|row| (row * 2).next_multiple_of(256)).iter().sum(), splits)
    }
}

#[cfg(test)]
mod tests;
