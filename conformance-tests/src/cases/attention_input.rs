//! Cases of the region `attention_input`: a product that becomes queries, and keys and values in their cache.

use super::{
    linear::bias_type,
    norm::Head,
    plane::{ROWS, drawn_layout},
    region::{Layer, format, op, rounded},
    wanted::is_wanted,
};
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand},
    draw::Draw,
    gate::Gate,
    oracle::{Real, cache, chain},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    op::{RmsNorm, Rope, RopePairing},
    region::well_known::{self, AttentionInput, Heads},
};

/// Rows and hidden size; query heads, KV heads, head size and rotated pairs; layout of the activations.
pub(super) type HeadsOf = ([usize; 2], [usize; 4], Layout);

const fn layout(gap: usize, extent: Option<usize>) -> Layout {
    Layout { gap, offset: 1, bounded: extent.is_some(), extent }
}

const HEADS: &[(&str, HeadsOf)] = &[
    ("no_rows", ([0, 64], [2, 1, 16, 8], layout(0, None))),
    ("one_row", ([1, 96], [3, 1, 32, 16], layout(0, None))),
    ("seven_rows", ([7, 64], [4, 4, 16, 8], layout(0, None))),
    ("grouped", ([5, 160], [6, 2, 64, 32], layout(0, None))),
    ("head_80", ([3, 64], [2, 2, 80, 40], layout(0, None))),
    ("head_96_partly", ([4, 96], [2, 1, 96, 16], layout(0, None))),
    ("head_128", ([2, 128], [2, 1, 128, 64], layout(0, None))),
    ("many_rows", ([67, 64], [2, 1, 16, 8], layout(0, None))),
    ("batch_extent", ([40, 128], [6, 2, 128, 64], layout(0, Some(33)))),
    ("strided", ([6, 64], [2, 1, 16, 8], layout(16, None))),
    ("extent", ([9, 64], [3, 1, 16, 8], layout(8, Some(6)))),
    ("extent_of_nothing", ([6, 64], [2, 1, 16, 8], layout(0, Some(0)))),
];

const HALVES: Variant =
    Variant { layer_norm: false, bias: false, head_norms: None, pairing: Some(RopePairing::Halves) };

/// Cases with many rows or outputs.
const MANY_HEADS: &[(&str, HeadsOf, Variant)] = &[
    // More rows than a device has resident blocks, so that each block loops.
    ("rows_in_turns", ([4301, 32], [2, 1, 32, 16], layout(8, Some(4290))), HALVES),
    (
        "rows_in_turns_neighbours",
        ([4301, 32], [2, 1, 32, 16], layout(0, None)),
        Variant { pairing: Some(RopePairing::Neighbours), head_norms: Some(NormSpan::EachHead), ..HALVES },
    ),
    (
        "rows_in_turns_normed_together",
        ([4301, 32], [3, 3, 32, 16], layout(0, Some(4299))),
        Variant { head_norms: Some(NormSpan::AllHeads), ..HALVES },
    ),
    // Norms over more heads than a block has, and blocks with heads of both queries and keys.
    (
        "many_normed_together",
        ([9, 32], [23, 23, 64, 32], layout(0, Some(7))),
        Variant { head_norms: Some(NormSpan::AllHeads), ..HALVES },
    ),
    (
        "grouped_normed_together",
        ([5, 32], [40, 8, 128, 64], layout(8, None)),
        Variant { bias: true, head_norms: Some(NormSpan::AllHeads), ..HALVES },
    ),
    (
        "rows_in_turns_unturned",
        ([4301, 32], [2, 1, 16, 8], layout(0, Some(4300))),
        Variant { pairing: None, ..HALVES },
    ),
    // So many outputs that a device may finish heads in the epilogue of the product.
    ("tiles", ([150, 32], [44, 11, 128, 64], layout(0, Some(141))), HALVES),
    (
        "tiles_bias",
        ([260, 32], [29, 29, 64, 32], layout(8, None)),
        Variant { bias: true, layer_norm: true, ..HALVES },
    ),
    (
        "tiles_unturned",
        ([140, 32], [88, 22, 64, 32], layout(0, Some(0))),
        Variant { pairing: None, ..HALVES },
    ),
    (
        "tiles_unturned_bias",
        ([140, 32], [88, 22, 64, 32], layout(0, Some(139))),
        Variant { pairing: None, bias: true, ..HALVES },
    ),
    ("tiles_f32_bias", ([140, 8], [29, 29, 64, 32], layout(0, Some(131))), Variant { bias: true, ..HALVES }),
    // The same for the rows of a decode batch, from few outputs to many.
    ("sequences", ([29, 160], [8, 2, 128, 64], layout(0, Some(26))), HALVES),
    ("sequences_bias", ([17, 72], [9, 3, 64, 32], layout(8, None)), Variant { bias: true, ..HALVES }),
    ("sequences_f32_bias", ([17, 72], [9, 3, 64, 32], layout(8, None)), Variant { bias: true, ..HALVES }),
    ("sequences_half_the_device", ([70, 96], [32, 4, 64, 32], layout(0, Some(65))), HALVES),
    ("sequences_a_tile_each", ([48, 32], [36, 3, 128, 64], layout(8, Some(47))), HALVES),
    ("sequences_two_tiles_each", ([128, 32], [60, 4, 128, 64], layout(0, None)), HALVES),
    ("sequences_unturned", ([33, 64], [6, 3, 64, 32], layout(0, None)), Variant { pairing: None, ..HALVES }),
];

/// What the norms of queries and keys cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormSpan {
    EachHead,
    AllHeads,
}

/// The attributes that cases of `attention_input` vary.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variant {
    layer_norm: bool,
    pub(super) bias: bool,
    head_norms: Option<NormSpan>,
    pairing: Option<RopePairing>,
}

impl Variant {
    /// Variant `number` of [`Self::COUNT`].
    pub(super) fn number(number: usize) -> Self {
        let pairings = [Some(RopePairing::Halves), Some(RopePairing::Neighbours), None];
        let pairing = pairings[number % 3];
        let [layer_norm, bias] = [3, 6].map(|unit| number / unit % 2 == 1);
        let head_norms = [None, Some(NormSpan::EachHead), Some(NormSpan::AllHeads)][number / 12 % 3];
        Self { layer_norm, bias, head_norms, pairing }
    }

    pub(super) const COUNT: usize = 36;

    /// The label of the variant.
    fn label(self) -> String {
        let norm = if self.layer_norm { "layer_norm" } else { "rms_norm" };
        let bias = if self.bias { "_bias" } else { "" };
        let head_norms = match self.head_norms {
            None => "",
            Some(NormSpan::EachHead) => "_head_norms",
            Some(NormSpan::AllHeads) => "_norms_over_heads",
        };
        format!("{norm}{bias}{head_norms}_{}", self.pairing.map_or("no_rope", RopePairing::name))
    }
}

pub(super) fn cases(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for number in 0..Variant::COUNT {
        let variant = Variant::number(number);
        let heads = ([6, 64], [4, 2, 16, 8], layout(0, Some(5)));
        let id = format!("attention_input/{dtype}/{}", variant.label());
        if is_wanted(&id) {
            let random = Random::named(&id);
            cases.push(attention_case(id, dtype, heads, variant, random, number));
        }
    }
    for (number, (label, heads)) in HEADS.iter().copied().enumerate() {
        // Steps of 7 go through all variants before one is repeated.
        let variant = Variant::number(7 * number);
        let id = format!("attention_input/{dtype}/{label}");
        if is_wanted(&id) {
            let random = Random::named(&id);
            cases.push(attention_case(id, dtype, heads, variant, random, number));
        }
    }
    for (label, heads, variant) in MANY_HEADS.iter().copied() {
        let id = format!("attention_input/{dtype}/{label}");
        if is_wanted(&id) {
            let random = Random::named(&id);
            cases.push(attention_case(id, dtype, heads, variant, random, 0));
        }
    }
    cases
}

pub(super) fn drawn(dtype: DType, draw: &mut Draw) -> Case {
    let head = draw.pick(&[16, 2, 6, 64, 80, 96, 128]);
    let (kv_heads, groups, pairs) = (1 + draw.below(3), 1 + draw.below(4), head / 2 - draw.below(2));
    let (rows, hidden) = (draw.pick(ROWS).min(40), 32 * (1 + draw.below(4)));
    let layout = drawn_layout(draw, rows);
    let heads = ([rows, hidden], [kv_heads * groups, kv_heads, head, pairs], layout);
    let (variant, number) = (Variant::number(draw.below(Variant::COUNT)), draw.below(60));
    attention_case(draw.id(), dtype, heads, variant, draw.values(), number)
}

fn attention_case(
    id: String,
    dtype: DType,
    ([rows, hidden], sizes, layout): HeadsOf,
    variant: Variant,
    mut random: Random,
    number: usize,
) -> Case {
    let x = random.tensor(dtype, &[rows, hidden], Values::USUAL[number % 3]);
    let norm = Head::random(&mut random, dtype, hidden, variant.layer_norm);
    let outputs = outputs(sizes);
    let bias = bias_type(&id, dtype, variant.bias);
    let layer = Layer::random(&mut random, format(number, dtype), [outputs, hidden], bias);
    let heads = HeadsCase::random(&mut random, dtype, (rows, sizes, layout), variant, number);
    let products: Vec<Vec<Real>> = x.values().chunks(hidden).map(|x| layer.of(&norm.of(x))).collect();
    let results = heads.expected(&products);
    let input = AttentionInput { norm: norm.norm, dtype, bias: variant.bias, heads: heads.attributes() };
    let mut operands = vec![Operand::laid(x, layout)];
    operands.extend(norm.operands());
    operands.extend(layer.operands());
    operands.extend(heads.operands());
    Case::new(id, CallCase::new(op(well_known::attention_input(input)), operands, results))
}

/// The number of columns of queries, keys and values together.
pub(super) fn outputs([heads, kv_heads, head, _]: [usize; 4]) -> usize {
    (heads + 2 * kv_heads) * head
}

/// The operands that turn a product into queries, keys and values.
pub(super) struct HeadsCase {
    dtype: DType,
    rows: usize,
    sizes: [usize; 4],
    layout: Layout,
    pairing: Option<RopePairing>,
    /// The weights of the norms of queries and keys, which cover as many elements.
    norms: Option<[Tensor; 2]>,
    scale: f32,
    frequencies: Tensor,
    positions: Vec<i32>,
    slots: Vec<i32>,
    block: usize,
    caches: [Tensor; 2],
}

const HEAD_NORM: RmsNorm = RmsNorm { eps: 1e-6, weight_offset: 0.0 };

impl HeadsCase {
    pub(super) fn random(
        random: &mut Random,
        dtype: DType,
        (rows, sizes, layout): (usize, [usize; 4], Layout),
        variant: Variant,
        number: usize,
    ) -> Self {
        let [query_heads, kv_heads, head, pairs] = sizes;
        let norms = variant.head_norms.map(|span| {
            [query_heads, kv_heads].map(|heads| {
                let heads = if span == NormSpan::AllHeads { heads } else { 1 };
                random.tensor(dtype, &[heads * head], Values::Uniform)
            })
        });
        let scale = random.pick(&[1.0f32, 1.25]);
        let frequencies: Vec<f64> =
            (0..pairs).map(|pair| 10_000f64.powf(-(pair as f64) / pairs as f64)).collect();
        // Every fourth row is padding, without position and slot. Another row has a position and no slot.
        let padded = |row: usize| row % 4 == 2;
        let (pages, block) = (3 + rows / 4, 4);
        let free = random.shuffled(pages * block);
        let slot = |row: usize| if padded(row) || row % 8 == 5 { -1 } else { free[row] as i32 };
        let position = |row: usize| if padded(row) { -1 } else { 40 + row as i32 };
        // A cache of another type than the activations adds a second rounding.
        let cache_type = match dtype {
            DType::F32 if number % 5 == 4 => DType::F16,
            _ if number % 5 == 4 => DType::F32,
            _ => dtype,
        };
        let shape = [pages, kv_heads, block, head];
        Self {
            dtype,
            rows,
            sizes,
            layout,
            pairing: variant.pairing,
            norms,
            scale,
            frequencies: Tensor::floats(DType::F32, &[pairs], &frequencies),
            positions: (0..rows).map(position).collect(),
            slots: (0..rows).map(slot).collect(),
            block,
            caches: [(); 2].map(|()| random.tensor(cache_type, &shape, Values::Uniform)),
        }
    }

    fn columns(&self) -> [usize; 3] {
        let [heads, kv_heads, head, _] = self.sizes;
        [heads, kv_heads, kv_heads].map(|heads| heads * head)
    }

    pub(super) fn attributes(&self) -> Heads {
        let [heads, kv_heads, ..] = self.sizes;
        let rope = |heads: usize, pairing| Rope { heads: heads as u32, pairing, scale: self.scale };
        Heads {
            columns: self.columns().map(|columns| columns as u32),
            head_norms: self.norms.is_some().then_some([HEAD_NORM; 2]),
            ropes: self.pairing.map(|pairing| [rope(heads, pairing), rope(kv_heads, pairing)]),
        }
    }

    /// The rotated queries (`which` 0) or keys (1) of a row of the product.
    fn rotated(&self, features: &[Real], which: usize, position: i32) -> Vec<Real> {
        let head = self.sizes[2];
        let mut features = features.to_vec();
        if let Some(weights) = &self.norms {
            let weight = weights[which].values();
            let normed = features
                .chunks(weight.len())
                .flat_map(|x| chain::rms_norm(x, &weight, f64::from(HEAD_NORM.eps), 0.0));
            features = normed.collect();
        }
        if let Some(pairing) = self.pairing {
            if self.norms.is_some() {
                features = features.into_iter().map(chain::stored).collect();
            }
            let (frequencies, scale) = (self.frequencies.values(), f64::from(self.scale));
            let rotate = |x: &[Real]| chain::rope(x, position, &frequencies, pairing, scale);
            features = features.chunks(head).flat_map(rotate).collect();
        }
        features
    }

    /// The expected results for the rows of a product.
    pub(super) fn expected(&self, products: &[Vec<Real>]) -> Vec<Expected> {
        let (columns, head, layout) = (self.columns(), self.sizes[2], self.layout);
        let shape = [self.caches[0].shape[0], self.sizes[1], self.block, head];
        let mut queries = Vec::new();
        let mut written = [(); 2].map(|()| vec![Element::Untouched; self.caches[0].bits.len()]);
        for (row, product) in products.iter().enumerate() {
            let product: Vec<Real> = product.iter().copied().map(chain::stored).collect();
            let (query, rest) = product.split_at(columns[0]);
            let (key, value) = rest.split_at(columns[1]);
            let position = self.positions[row];
            // With rotation, a row without a position is not written; without rotation, positions do not matter.
            let written_row = self.pairing.is_none() || position >= 0;
            let element = |real| if written_row { Element::Real(real) } else { Element::Untouched };
            queries.extend(self.rotated(query, 0, position).into_iter().map(element));
            let place = cache::place(self.slots[row], shape[0], self.block);
            let Some((page, place)) = place.filter(|_| row < layout.real_rows(self.rows)) else { continue };
            let key = self.rotated(key, 1, position).into_iter().map(chain::stored).collect::<Vec<_>>();
            for (elements, features) in written.iter_mut().zip([key.as_slice(), value]) {
                for (column, real) in features.iter().enumerate() {
                    let at = cache::element(shape, page, column / head, place, column % head);
                    elements[at] = Element::Real(*real);
                }
            }
        }
        let gate = Gate { exponential: self.pairing.is_some(), ..rounded(self.dtype) };
        let query_layout = Layout { offset: layout.offset + 1, ..layout };
        let mut results = vec![Expected::new(queries).gated(gate).laid(query_layout, columns[0])];
        results.extend(written.map(|elements| Expected::new(elements).gated(gate)));
        results
    }

    pub(super) fn operands(self) -> Vec<Option<Operand>> {
        let vectors = Layout { gap: 0, offset: 0, ..self.layout };
        let mut operands: Vec<_> = self.norms.into_iter().flatten().map(Operand::tensor).collect();
        if self.pairing.is_some() {
            operands.push(Operand::laid(Tensor::vector(&self.positions), vectors));
            operands.push(Operand::tensor(self.frequencies));
        }
        operands.extend(self.caches.map(|cache| Operand::laid(cache, Layout::strided(self.layout.gap, 0))));
        operands.push(Operand::laid(Tensor::vector(&self.slots), vectors));
        operands
    }
}
