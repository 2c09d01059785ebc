//! What layers of one launch have in common, and how the kernel is cut to it.

use super::{
    super::{KernelSpec, Machine, band::shared_memory},
    UNIT,
};
use std::ops::Range;

/// Products of a layer: query, key and value; output; the first half of the MLP; the second.
pub(super) const PRODUCTS: usize = 4;
/// Warps of a block that multiply; one more copies.
pub(super) const WARPS: usize = 8;
/// The most layers of a launch: their table is in shared memory.
pub(super) const MAX_LAYERS: usize = 64;
/// 64-bit words of `struct Layer`.
pub(super) const LAYER_WORDS: usize = 14;
/// The largest head: its keys and values stay in registers.
pub(super) const MAX_HEAD: usize = 64;
/// The most inputs that are normed: they stay in registers.
const NORMED_INPUTS: usize = 4096;
/// The most query heads of a tile.
const TILE_HEADS: usize = 16;
/// The most splits of a sequence's keys.
const MAX_SPLITS: usize = 16;
/// Bytes of a slot of the ring of weights: the most, and in what steps they are tried.
const SLOT_BYTES: usize = 32 << 10;
const SLOT_STEP: usize = 1 << 10;
/// The fewest slots, and one more than the most.
const SLOTS: Range<usize> = 4..33;
/// The most bytes of weights of a layer with which this is known to pay. On an H200 layers of 7 MB take half the time of five
/// launches and those of 61 MB two thirds; those of 122 MB would gain a twentieth at best.
const LAYER_BYTES: usize = 80 << 20;
/// Pieces of weights that are fetched into the L2 ahead of the ring, where a layer is more than the rings hold.
const AHEAD: usize = 2;

/// What all layers of a launch have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Constants of the kernel: element types of activations (`X`), of gains and shifts of norms (`G`, `SHIFT`) and of biases
    /// (`BIAS`), the kind of norm (`NORM`: 1 RMS, 2 layer), whether heads are turned (`ROPE`), and the MLP's `FUNCTION`.
    pub constants: Vec<(&'static str, String)>,
    /// Whether the MLP is gated.
    pub gated: bool,
    /// Elements of a token.
    pub hidden: usize,
    /// Elements between the halves of the MLP.
    pub inner: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads of each.
    pub group: usize,
    /// Elements of a head.
    pub head: usize,
    /// Pairs of a head that are turned.
    pub pairs: usize,
    /// Slots of a page.
    pub slots: usize,
    /// Whether keys behind the token are not seen.
    pub causal: bool,
}

/// A product: inputs, outputs, outputs of a tile, and inputs that are taken together.
struct Product {
    inputs: usize,
    outputs: usize,
    tile: usize,
    unit: usize,
}

impl Product {
    fn tiles(&self) -> usize {
        self.outputs / self.tile
    }

    /// How many inputs of a tile a slot takes, and how many slots the tile takes.
    fn columns(&self, slot: usize) -> (usize, usize) {
        let most = (slot / (self.tile * 2) / self.unit * self.unit).max(self.unit);
        if most >= self.inputs {
            return (self.inputs, 1);
        }
        let pieces = self.inputs.div_ceil(most);
        let columns = self.inputs.div_ceil(pieces).next_multiple_of(self.unit);
        (columns, self.inputs.div_ceil(columns))
    }
}

/// How the kernel is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) blocks: usize,
    slot: usize,
    slots: usize,
    /// Inputs of the products in a slot.
    columns: [usize; PRODUCTS],
    tile_heads: usize,
    splits: usize,
    ahead: usize,
    /// Bytes of shared memory.
    shared: usize,
}

impl Shape {
    fn products(&self) -> [Product; PRODUCTS] {
        let query = self.kv_heads * self.group * self.head;
        let up = if self.gated { 2 * self.inner } else { self.inner };
        let wide = |inputs, outputs| Product { inputs, outputs, tile: 16, unit: 64 };
        let narrow = |inputs, outputs| Product { inputs, outputs, tile: 8, unit: 128 };
        let keys = self.kv_heads * self.head;
        [
            wide(self.hidden, query + 2 * keys),
            narrow(query, self.hidden),
            wide(self.hidden, up),
            narrow(self.inner, self.hidden),
        ]
    }

    /// How the kernel is cut for a machine; none if it has no such layers, or gains nothing.
    pub(super) fn cut(&self, machine: &Machine) -> Option<Cut> {
        let products = self.products();
        let bytes: usize = products.iter().map(|product| product.inputs * product.outputs * 2).sum();
        if bytes > LAYER_BYTES || self.hidden > NORMED_INPUTS {
            return None;
        }
        // All blocks have a share of the first half of the MLP: there they see that all others are past what is older.
        let tiles = products[2].tiles();
        let most = machine.processors.min(tiles);
        let tile_heads = (1..=TILE_HEADS).rev().find(|heads| self.group.is_multiple_of(*heads))?;
        let parts = self.kv_heads * (self.group / tile_heads);
        let most_inputs = products.iter().map(|product| product.inputs).max()?;
        // As in the kernel, and 2 KiB for what it keeps beside.
        let rounded = |bytes: usize| bytes.next_multiple_of(128);
        let beside = rounded(most_inputs * 2)
            + rounded(WARPS * 16 * (WARPS + 4) * 4)
            + rounded(WARPS * tile_heads * (self.head + 6) * 4)
            + rounded(SLOTS.end * 16)
            + rounded(MAX_LAYERS * LAYER_WORDS * 8);
        let left = shared_memory(machine.capability).checked_sub(beside + (2 << 10))?;
        // Whole tiles in a slot if they fit; else what wastes least of the ring.
        let largest = products.iter().map(|product| product.tile * product.inputs * 2).max()?;
        let slot = if largest <= SLOT_BYTES {
            largest
        } else {
            let used = |slot: &usize| {
                let bytes = |product: &Product| product.columns(*slot).1 * *slot * product.tiles();
                products.iter().map(bytes).sum::<usize>()
            };
            (SLOT_BYTES / 2..=SLOT_BYTES).step_by(SLOT_STEP).min_by_key(used)?
        };
        let slots = (left / slot).min(SLOTS.end - 1);
        let whole = bytes <= slots * slot * most;
        // Where rings hold a whole layer, no more blocks than most tiles come out even for: fewer ask for the same results. Else
        // all are needed to read.
        let blocks = if whole { tiles.div_ceil(tiles.div_ceil(most.max(1)).max(1)) } else { most };
        if slots < SLOTS.start || parts == 0 || parts > blocks {
            return None;
        }
        Some(Cut {
            blocks,
            slot,
            slots,
            columns: products.map(|product| product.columns(slot).0),
            tile_heads,
            splits: (blocks / parts).clamp(1, MAX_SPLITS),
            ahead: if whole { 0 } else { slots + AHEAD },
            shared: slots * slot + beside,
        })
    }

    /// The kernel on a machine; none if it has no such layers, or gains nothing.
    pub fn kernel(&self, machine: &Machine) -> Option<KernelSpec> {
        self.cut(machine).map(|cut| self.spec(&cut))
    }

    pub(super) fn spec(&self, cut: &Cut) -> KernelSpec {
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
            ("CAUSAL", usize::from(self.causal)),
            ("TILE_HEADS", cut.tile_heads),
            ("PARTS_OF_GROUP", self.group / cut.tile_heads),
            ("SPLITS", cut.splits),
            ("GRID", cut.blocks),
            ("WARPS", WARPS),
            ("RING_SLOTS", cut.slots),
            ("SLOT_BYTES", cut.slot),
            ("AHEAD", cut.ahead),
            ("COLUMNS_0", cut.columns[0]),
            ("COLUMNS_1", cut.columns[1]),
            ("COLUMNS_2", cut.columns[2]),
            ("COLUMNS_3", cut.columns[3]),
        ];
        let mut defines = self.constants.clone();
        defines.extend(numbers.map(|(name, value)| (name, value.to_string())));
        KernelSpec { unit: UNIT, entry: "layers", defines, shared: cut.shared }
    }

    /// Bytes of what blocks leave for each other in a layer (`LAYER_BYTES` of the kernel), and of the splits of attention.
    pub(super) fn exchange(&self, cut: &Cut) -> (usize, usize) {
        let query = self.kv_heads * self.group * self.head;
        let rows = [self.hidden, query + 2 * self.kv_heads * self.head, self.hidden, self.inner];
        let splits = self.kv_heads * self.group * cut.splits * (self.head + 4) * 4;
        (rows.map(|row| (row * 2).next_multiple_of(256)).iter().sum(), splits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const MACHINE: Machine = Machine { capability: 90, processors: 132, blas: true, skinny: true };

    /// Hidden, inner, KV heads, query heads of each, whether the MLP is gated.
    fn shape([hidden, inner, kv_heads, group]: [usize; 4], gated: bool) -> Shape {
        let (head, pairs, slots) = (64, 32, 16);
        let constants = vec![("X", "bf16".to_owned())];
        Shape { constants, gated, hidden, inner, kv_heads, group, head, pairs, slots, causal: true }
    }

    #[rstest]
    #[case::smollm2([576, 1536, 3, 3], true)]
    #[case::gpt2_xl([1600, 6400, 25, 1], false)]
    #[case::gpt2([768, 3072, 12, 1], false)]
    #[case::narrow([64, 128, 1, 1], true)]
    fn cuts_fit_and_cover_all_inputs(#[case] sizes: [usize; 4], #[case] gated: bool) {
        let shape = shape(sizes, gated);
        let cut = shape.cut(&MACHINE).unwrap();
        assert!(cut.shared <= shared_memory(90), "{cut:?}");
        assert!(cut.blocks <= MACHINE.processors && cut.blocks <= shape.products()[2].tiles(), "{cut:?}");
        assert!(shape.kv_heads * cut.splits <= cut.blocks, "{cut:?}");
        for (product, columns) in shape.products().iter().zip(cut.columns) {
            assert!(columns * product.tile * 2 <= cut.slot, "{cut:?}");
            assert!(columns == product.inputs || columns.is_multiple_of(product.unit), "{cut:?}");
        }
    }

    #[test]
    fn large_layers_are_left_to_launches_of_their_own() {
        assert_eq!(shape([2048, 8192, 8, 4], true).cut(&MACHINE), None);
    }
}
