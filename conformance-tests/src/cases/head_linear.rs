//! Cases of `head_linear`.

use super::{
    cache::element,
    linear::{columns_of, random_weight},
    moe::{formats, other},
    plane::drawn_layout,
};
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand},
    draw::Draw,
    gate::Gate,
    oracle::linear,
    random::{Random, Values},
};
use dsrun_core::{DType, WeightFormat, op::HeadLinear};

/// The label of a case; rows; heads, the inputs and outputs of one, and its elements that are copied; the layout.
type Shape = (&'static str, usize, [usize; 4], Layout);

const fn layout(gap: usize, bounded: bool, extent: Option<usize>) -> Layout {
    Layout { gap, offset: 0, bounded, extent }
}

const PLAIN: Layout = layout(0, false, None);

const SHAPES: &[Shape] = &[
    ("no_rows", 0, [2, 32, 16, 8], PLAIN),
    ("one_head", 3, [1, 32, 16, 8], PLAIN),
    ("one_row", 1, [4, 64, 33, 8], PLAIN),
    ("no_rest", 5, [3, 32, 48, 0], PLAIN),
    ("latent", 7, [4, 128, 96, 64], PLAIN),
    ("odd", 33, [3, 96, 7, 5], layout(5, false, None)),
    ("many_rows", 70, [5, 32, 17, 3], PLAIN),
    ("many_latents", 18, [2, 64, 24, 8], PLAIN),
    ("extent", 9, [2, 64, 16, 4], layout(8, true, Some(6))),
    ("extent_of_nothing", 6, [2, 32, 8, 2], layout(0, true, Some(0))),
];

pub(super) fn head_linear(dtype: DType) -> Vec<Case> {
    let of = |format: WeightFormat| {
        let one = move |(label, rows, sizes, layout): &Shape| {
            let id = format!("head_linear_{format}/{dtype}/{label}");
            let random = Random::named(&id);
            case(dtype, id, random, format, (*rows, *sizes, *layout), Values::HeavyTailed)
        };
        SHAPES.iter().map(one)
    };
    let kinds = [
        ("special_rare", Values::Rare),
        ("special_zeros", Values::Zeros),
        ("special_subnormals", Values::Subnormal),
    ];
    let special = kinds.into_iter().map(|(label, values)| {
        let format = WeightFormat::Dense(dtype);
        let id = format!("head_linear_{format}/{dtype}/{label}");
        let random = Random::named(&id);
        case(dtype, id, random, format, (21, [3, 40, 17, 8], layout(3, false, None)), values)
    });
    formats(dtype).into_iter().flat_map(of).chain(special).collect()
}

pub(super) fn drawn_head_linear(dtype: DType, draw: &mut Draw) -> Case {
    let format = draw.pick(&formats(dtype));
    let rows = draw.pick(&[1, 0, 2, 7, 16, 33, 61]);
    let (heads, rest) = (draw.pick(&[2, 1, 3, 8, 16]), draw.pick(&[8, 0, 1, 33, 64]));
    let (inputs, outputs) = (draw.pick(&[32, 1, 7, 64, 128]), draw.pick(&[8, 1, 7, 16, 33, 64]));
    let layout = drawn_layout(draw, rows);
    let shape = (rows, [heads, inputs, outputs, rest], layout);
    case(dtype, draw.id(), draw.values(), format, shape, Values::HeavyTailed)
}

fn case(
    dtype: DType,
    id: String,
    mut random: Random,
    format: WeightFormat,
    (rows, [heads, inputs, outputs, rest], layout): (usize, [usize; 4], Layout),
    values: Values,
) -> Case {
    let inputs = columns_of(format, inputs);
    let x = random.tensor(dtype, &[rows, heads * (inputs + rest)], values);
    let size = 1.0 / (inputs as f64).sqrt();
    let (weight, elements) = random_weight(&mut random, format, [heads * outputs, inputs], size);
    let op = HeadLinear { dtype: random.pick(&[dtype, DType::F32]), heads: heads as u32 };
    let elements_of_x = x.values();
    let head = |index: usize| {
        let start = index * (inputs + rest);
        let own = &elements[index % heads * outputs * inputs..][..outputs * inputs];
        let products = linear::linear(&elements_of_x[start..][..inputs], own, None, [1, outputs, inputs]);
        let copied = x.bits[start + inputs..][..rest].iter().map(|bits| element(dtype, *bits, op.dtype));
        products.into_iter().map(Element::Real).chain(copied).collect::<Vec<_>>()
    };
    let gate = Gate { inner: format.is_quantised().then_some(dtype), exponential: false };
    let expected = Expected::new((0..rows * heads).flat_map(head).collect());
    let expected = expected.gated(gate).laid(other(layout, 5), heads * (outputs + rest));
    Case::new(id, CallCase::new(op, vec![Operand::laid(x, layout), Operand::weight(weight)], vec![expected]))
}
