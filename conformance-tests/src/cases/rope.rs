//! Cases of `rope`.

use super::plane::drawn_layout;
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand},
    draw::Draw,
    gate::Gate,
    oracle::rope,
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    op::{Rope, RopePairing},
};

/// Label, rows, heads, head size, rotated pairs, first position and layout of each case.
type Shape = (&'static str, usize, usize, usize, usize, i32, Layout);

const fn layout(gap: usize, extent: Option<usize>) -> Layout {
    Layout { gap, offset: 0, bounded: extent.is_some(), extent }
}

const SHAPES: &[Shape] = &[
    ("no_rows", 0, 2, 64, 32, 0, layout(0, None)),
    ("one_pair", 1, 1, 2, 1, 5, layout(0, None)),
    ("one_token", 1, 9, 64, 32, 0, layout(0, None)),
    ("head_80", 5, 3, 80, 40, 17, layout(0, None)),
    ("head_96_partly", 7, 2, 96, 16, 1000, layout(0, None)),
    ("head_128", 33, 4, 128, 64, 4000, layout(32, None)),
    ("odd_head", 4, 3, 7, 3, 11, layout(5, None)),
    ("head_256", 3, 2, 256, 128, 9, layout(0, None)),
    ("head_512_partly", 2, 2, 512, 200, 77, layout(4, None)),
    (FAST, 7, 2, 16, 6, 3, layout(0, None)),
    ("nothing_rotated", 3, 2, 8, 0, 3, layout(0, None)),
    ("far_positions", 6, 2, 64, 32, 131_000, layout(0, None)),
    ("farthest_exact_positions", 3, 1, 64, 32, (1 << 24) - 3, layout(0, None)),
    ("extent", 6, 3, 32, 16, 40, layout(8, Some(4))),
    ("extent_of_nothing", 6, 3, 32, 16, 40, layout(0, Some(0))),
];

/// The label of the case with frequencies above 1 and below 0.
const FAST: &str = "fast_and_backwards";
/// The label of the case whose rows are all at position 0.
const AT_ZERO: &str = "special_at_zero";

/// Shapes just over sizes at which kernels change.
const THRESHOLDS: &[Shape] = &[
    ("rows_1025", 1025, 1, 2, 1, 0, layout(0, None)),
    ("rows_65537", 65_537, 1, 2, 1, 0, layout(0, None)),
    ("heads_257", 2, 257, 4, 2, 7, layout(0, None)),
    ("heads_1025", 1, 1025, 2, 1, 7, layout(0, None)),
    ("many_rows", 1030, 12, 64, 24, 3, layout(8, Some(1027))),
];

pub(super) fn rope(dtype: DType) -> Vec<Case> {
    let of = |pairing: &RopePairing| {
        let pairing = *pairing;
        let one = move |(number, shape): (usize, &Shape)| {
            let id = format!("rope_{}/{dtype}/{}", pairing.name(), shape.0);
            let random = Random::named(&id);
            rope_case(dtype, id, random, pairing, *shape, Values::USUAL[number % 3])
        };
        // At position 0 the sine is 0, and what it multiplies may be NaN or infinite all the same.
        let special = [
            ("special_rare", Values::Rare, 3),
            ("special_zeros", Values::Zeros, 3),
            (AT_ZERO, Values::Special, 0),
        ];
        let special = special.into_iter().map(move |(label, values, first)| {
            let id = format!("rope_{}/{dtype}/{label}", pairing.name());
            let random = Random::named(&id);
            rope_case(dtype, id, random, pairing, (label, 9, 2, 16, 8, first, layout(0, None)), values)
        });
        let over = THRESHOLDS.iter().map(move |shape| {
            let id = format!("rope_{}/{dtype}/{}", pairing.name(), shape.0);
            let random = Random::named(&id);
            rope_case(dtype, id, random, pairing, *shape, Values::Uniform)
        });
        SHAPES.iter().enumerate().map(one).chain(special).chain(over)
    };
    RopePairing::ALL.iter().flat_map(of).collect()
}

pub(super) fn drawn_rope(dtype: DType, draw: &mut Draw) -> Case {
    let pairing = draw.pick(RopePairing::ALL);
    let (rows, heads) = (draw.pick(&[1, 0, 2, 7, 16, 17, 33]), draw.pick(&[1, 2, 3, 8]));
    let head = draw.pick(&[2, 7, 16, 64, 80, 96, 128, 256]);
    let pairs = draw.pick(&[1, 0, head / 4, head / 2]);
    let first = draw.pick(&[0, 1, 17, 1000, 131_000, (1 << 24) - 100]);
    let layout = Layout { offset: 0, ..drawn_layout(draw, rows) };
    let (values, random) = (draw.pick(&Values::USUAL), draw.values());
    rope_case(dtype, draw.id(), random, pairing, ("", rows, heads, head, pairs, first, layout), values)
}

fn rope_case(
    dtype: DType,
    id: String,
    mut random: Random,
    pairing: RopePairing,
    (label, rows, heads, head, pairs, first, layout): Shape,
    values: Values,
) -> Case {
    let features = heads * head;
    let x = random.tensor(dtype, &[rows, features], values);
    let skipped = |row: usize| row % 5 == 3;
    let step = i32::from(label != AT_ZERO);
    let position = |row: usize| if skipped(row) { -1 } else { first + step * row as i32 };
    let positions: Vec<i32> = (0..rows).map(position).collect();
    let base = random.pick(&[10_000f64, 500_000.0]);
    let usual = |pair: usize| base.powf(-(pair as f64) / pairs as f64);
    let fast = |pair: usize| [-0.75, 1.5, -2.25, 0.0, 3.0, -0.01][pair % 6];
    let frequencies: Vec<f64> =
        (0..pairs).map(|pair| if label == FAST { fast(pair) } else { usual(pair) }).collect();
    let frequencies = Tensor::floats(DType::F32, &[pairs], &frequencies);
    let scale = if label == AT_ZERO { 1.0 } else { random.pick(&[1.0f32, 1.0, 1.25]) };
    let (values, frequency) = (x.values(), frequencies.values());
    let mut elements = Vec::new();
    for (index, values) in values.chunks(head).enumerate() {
        let row = index / heads;
        let rotated = rope::rope(values, positions[row], &frequency, pairing, f64::from(scale));
        elements.extend(rotated.into_iter().enumerate().map(|(at, real)| match real {
            _ if skipped(row) => Element::Untouched,
            Some(real) => Element::Real(real),
            None => Element::Bits(x.bits[index * head + at]),
        }));
    }
    let expected = Expected::new(elements).gated(Gate::default());
    let expected = expected.laid(Layout { offset: 2, ..layout }, features);
    let operands = vec![
        Operand::laid(x, layout),
        Operand::laid(Tensor::vector(&positions), Layout { gap: 0, ..layout }),
        Operand::tensor(frequencies),
    ];
    let op = Rope { heads: heads as u32, pairing, scale };
    Case::new(id, CallCase::new(op, operands, vec![expected]))
}
