//! Cases of linear layers whose products are summed over ranks, each of which has a part of the inputs.

use super::{
    region::{Layer, op, rounded},
    wanted::is_wanted,
};
use crate::{
    case::{CallCase, Case, Expected, Layout, Operand},
    draw::Draw,
    oracle::{Real, chain},
    random::{Random, Values},
};
use dsrun_core::{
    DType, WeightFormat,
    op::{Add, AllReduce, MeshAxis, Reduction},
    region::well_known,
};

/// A linear layer over ranks: each has as many rows, inputs and outputs.
struct Layers {
    id: String,
    random: Random,
    ranks: usize,
    rows: usize,
    inputs: usize,
    outputs: usize,
    layout: Layout,
    bias: bool,
    values: Values,
}

/// Label, ranks, rows, inputs of a rank, outputs, layout, and whether there is a bias.
type Shape = (&'static str, usize, usize, usize, usize, Layout, bool);

/// Products of more than 128 rows may be summed tile by tile, with tiles of up to 256 rows and outputs. The last has more of them than a
/// device computes at once.
const SHAPES: &[Shape] = &[
    ("nothing_over_2", 2, 0, 16, 8, Layout::strided(0, 0), false),
    ("few_over_2", 2, 7, 32, 33, Layout::strided(3, 1), true),
    ("a_tile_over_2", 2, 129, 64, 8, Layout::strided(0, 0), false),
    ("tiles_over_1", 1, 140, 16, 264, Layout::strided(0, 0), false),
    ("tiles_over_2", 2, 300, 40, 520, Layout::strided(8, 0), false),
    ("tiles_over_3", 3, 700, 16, 264, Layout::strided(0, 0), false),
    ("tiles_over_4", 4, 1030, 8, 136, Layout::strided(16, 0), false),
    ("biased_over_2", 2, 150, 16, 264, Layout::strided(0, 0), true),
    ("extent_over_2", 2, 270, 24, 528, Layout { gap: 8, offset: 0, bounded: true, extent: Some(140) }, false),
    (
        "extent_of_nothing_over_2",
        2,
        270,
        24,
        40,
        Layout { gap: 0, offset: 0, bounded: true, extent: Some(0) },
        false,
    ),
    ("turns_over_2", 2, 520, 8, 4216, Layout::strided(0, 0), false),
];

pub(super) fn linear_all_reduce(dtype: DType) -> Vec<Case> {
    cases("linear_all_reduce", dtype, false)
}

pub(super) fn linear_all_reduce_add(dtype: DType) -> Vec<Case> {
    cases("linear_all_reduce_add", dtype, true)
}

/// With `added`, sums are added to a residual.
fn cases(op: &str, dtype: DType, added: bool) -> Vec<Case> {
    let layers = |(number, shape): (usize, &Shape)| {
        let (label, ranks, rows, inputs, outputs, layout, bias) = *shape;
        let id = format!("{op}/{dtype}/{label}");
        let (random, values) = (Random::named(&id), Values::USUAL[number % 3]);
        Layers { id, random, ranks, rows, inputs, outputs, layout, bias, values }
    };
    let wanted = SHAPES.iter().enumerate().map(layers).filter(|layers| is_wanted(&layers.id));
    wanted.map(|layers| case(dtype, layers, added)).collect()
}

pub(super) fn drawn_linear_all_reduce(dtype: DType, draw: &mut Draw) -> Case {
    let layers = Layers::drawn(draw);
    case(dtype, layers, false)
}

pub(super) fn drawn_linear_all_reduce_add(dtype: DType, draw: &mut Draw) -> Case {
    let layers = Layers::drawn(draw);
    case(dtype, layers, true)
}

impl Layers {
    fn drawn(draw: &mut Draw) -> Self {
        Self {
            id: draw.id(),
            random: draw.values(),
            ranks: draw.pick(&[2, 1, 3, 4]),
            rows: draw.pick(&[1, 0, 7, 33, 129, 150, 257]),
            inputs: draw.pick(&[8, 1, 16, 33, 64]),
            outputs: draw.pick(&[8, 1, 33, 136, 264, 520]),
            layout: Layout::strided(draw.pick(&[0, 3, 8]), draw.below(3)),
            bias: draw.sometimes(),
            values: draw.pick(&Values::USUAL),
        }
    }
}

fn case(dtype: DType, layers: Layers, added: bool) -> Case {
    let Layers { id, mut random, ranks, rows, inputs, outputs, layout, bias, values } = layers;
    let mut sums = vec![Real::default(); rows * outputs];
    let mut calls = Vec::new();
    let residual = added.then(|| random.tensor(dtype, &[rows, outputs], Values::HeavyTailed));
    let alpha = random.pick(&[1.0f32, -0.5]);
    for _ in 0..ranks {
        let x = random.tensor(dtype, &[rows, inputs], values);
        let layer =
            Layer::random(&mut random, WeightFormat::Dense(dtype), [outputs, inputs], bias.then_some(dtype));
        let parts = x.values();
        let parts = parts.chunks(inputs).flat_map(|row| {
            let row: Vec<Real> = row.iter().copied().map(chain::exact).collect();
            layer.of(&row)
        });
        for (sum, part) in sums.iter_mut().zip(parts) {
            *sum = chain::sum(*sum, chain::stored(part));
        }
        let operands = [Operand::laid(x, layout)].into_iter().chain(layer.operands());
        let residual = residual.iter().map(|residual| Operand::laid(residual.clone(), layout));
        calls.push(operands.chain(residual).collect::<Vec<_>>());
    }
    // Each hop may round the sum so far, as in `oracle::collective::reduce`.
    let hops = if ranks > 1 { ranks as f64 / 2.0 } else { 0.0 };
    let sums = sums.into_iter().map(|sum| {
        let hopped = hops * sum.magnitude;
        sum.rounded_inside(sum.inner + hopped, sum.spread.hypot(hopped))
    });
    let reals: Vec<Real> = match &residual {
        None => sums.collect(),
        Some(residual) => {
            let both = sums.zip(residual.values());
            both.map(|(sum, residual)| chain::add(residual, chain::stored(sum), f64::from(alpha))).collect()
        }
    };
    let expected = Expected::reals(reals).gated(rounded(dtype)).laid(layout, outputs);
    let reduce = AllReduce { axis: MeshAxis::Tensor, reduction: Reduction::Sum };
    let call = |operands| {
        let region = match added {
            false => well_known::linear_all_reduce(dtype, bias, reduce),
            true => well_known::linear_all_reduce_add(dtype, bias, reduce, Add { alpha }),
        };
        CallCase::new(op(region), operands, vec![expected.clone()])
    };
    Case { calls: calls.into_iter().map(call).collect(), id, alike: true }
}
