//! Cases of `add`, `cast` and `columns`.

use super::plane::{Plane, drawn, planes, special_planes, threshold_planes};
use crate::{
    case::{CallCase, Case, Element, Expected, Operand},
    draw::Draw,
    oracle::{Real, elementwise},
    random::{Random, Values},
};
use dsrun_core::{
    DType,
    op::{Add, Cast, Columns},
};

const KINDS: &[Values] =
    &[Values::Uniform, Values::HeavyTailed, Values::LargeMean, Values::Subnormal, Values::Special];

pub(super) fn add(dtype: DType) -> Vec<Case> {
    let mut planes = planes("add", dtype, KINDS, |features| features);
    planes.extend(threshold_planes("add", dtype, |features| features));
    // What 0 multiplies is not skipped: it may be NaN or infinite.
    let zero = special_planes("add", dtype, |features| features).into_iter().next().map(|plane| {
        let id = format!("add/{dtype}/special_alpha_of_zero");
        let plane = Plane { random: Random::named(&id), id, values: Values::Special, number: 3, ..plane };
        add_case(dtype, plane, Some(0.0))
    });
    // Sums of numbers near the end of the range, whose parts are not multiplied by anything on the way.
    let large = special_planes("add", dtype, |features| features).into_iter().next().map(|plane| {
        let id = format!("add/{dtype}/special_large");
        let plane = Plane { random: Random::named(&id), id, values: Values::Large, number: 1, ..plane };
        add_case(dtype, plane, None)
    });
    planes.into_iter().map(|plane| add_case(dtype, plane, None)).chain(zero).chain(large).collect()
}

pub(super) fn drawn_add(dtype: DType, draw: &mut Draw) -> Case {
    add_case(dtype, drawn(draw, KINDS, |features| features), None)
}

fn add_case(dtype: DType, plane: Plane, alpha: Option<f32>) -> Case {
    let (mut random, columns, number) = (plane.random.clone(), plane.features, plane.number);
    let shape = [plane.rows, columns];
    let (a, b) = (random.tensor(dtype, &shape, plane.values), random.tensor(dtype, &shape, plane.values));
    // Unequal extents meet all operands.
    let c = (number % 2 == 1 || plane.id.ends_with("/extent"))
        .then(|| random.tensor(dtype, &shape, plane.values));
    // The bias may have another type than the other operands.
    let bias_type = if number % 8 == 2 { DType::F32 } else { dtype };
    let bias = (number % 4 >= 2).then(|| random.tensor(bias_type, &[columns], Values::Uniform));
    let alpha = alpha.unwrap_or_else(|| random.pick(&[1.0f32, 1.0, -0.5, 0.125]));
    let (av, bv) = (a.values(), b.values());
    let (cv, biases) = (c.as_ref().map(|c| c.values()), bias.as_ref().map(|bias| bias.values()));
    let element = |index: usize| {
        let c = cv.as_ref().map_or(0.0, |c| c[index]);
        let bias = biases.as_ref().map_or(0.0, |bias| bias[index % columns]);
        elementwise::add(av[index], bv[index], c, bias, f64::from(alpha))
    };
    let expected =
        Expected::reals((0..av.len()).map(element)).keeping_subnormals().laid(plane.other(5), columns);
    let operands = vec![
        Operand::laid(a, plane.layout),
        Operand::laid(b, plane.other(3)),
        c.and_then(|c| Operand::laid(c, plane.other(1))),
        bias.and_then(Operand::tensor),
    ];
    Case::new(plane.id, CallCase::new(Add { alpha }, operands, vec![expected]))
}

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

pub(super) fn cast(dtype: DType) -> Vec<Case> {
    let to = |to: DType| {
        let name = format!("cast_to_{to}");
        let mut planes = planes(&name, dtype, KINDS, |features| features);
        planes.extend(threshold_planes(&name, dtype, |features| features));
        planes.extend(special_planes(&name, dtype, |features| features));
        planes.into_iter().map(move |plane| cast_case(dtype, to, plane))
    };
    FLOATS.into_iter().flat_map(to).collect()
}

pub(super) fn drawn_cast(dtype: DType, draw: &mut Draw) -> Case {
    let to = draw.pick(&FLOATS);
    cast_case(dtype, to, drawn(draw, KINDS, |features| features))
}

fn cast_case(dtype: DType, to: DType, plane: Plane) -> Case {
    let mut random = plane.random.clone();
    // Heavy tails times 1000 exceed the range of f16.
    let factor = if plane.values == Values::HeavyTailed { 1000.0 } else { 1.0 };
    let x = random.scaled(dtype, &[plane.rows, plane.features], plane.values, factor);
    // A cast to the same type copies bits.
    let x = if to == dtype { x.to_be_copied() } else { x };
    let nan = Element::Real(Real::new(f64::NAN, 0.0));
    let element = |bits: &u32| elementwise::cast(dtype, *bits, to).map_or_else(|| nan.clone(), Element::Bits);
    let expected = Expected::new(x.read_bits().iter().map(element).collect());
    let expected = expected.laid(plane.other(5), plane.features);
    let operands = vec![Operand::laid(x, plane.layout)];
    Case::new(plane.id, CallCase::new(Cast { dtype: to }, operands, vec![expected]))
}

pub(super) fn columns(dtype: DType) -> Vec<Case> {
    let mut planes = planes("columns", dtype, KINDS, |features| features);
    let over = threshold_planes("columns", dtype, |features| features);
    let over = over.into_iter().chain(special_planes("columns", dtype, |features| features));
    planes.extend(over.map(|plane| Plane { number: 2, ..plane }));
    planes.into_iter().map(|plane| columns_case(dtype, plane)).collect()
}

pub(super) fn drawn_columns(dtype: DType, draw: &mut Draw) -> Case {
    columns_case(dtype, drawn(draw, KINDS, |features| features))
}

fn columns_case(dtype: DType, plane: Plane) -> Case {
    let (mut random, features) = (plane.random.clone(), plane.features);
    // Copies are exact to the bit, including NaN.
    let x = random.tensor(dtype, &[plane.rows, features], plane.values).to_be_copied();
    let (start, count) = match plane.number % 4 {
        0 => (0, features),
        1 => (features, 0),
        _ => {
            let start = random.below(features);
            (start, 1 + random.below(features - start))
        }
    };
    let bits = x.bits.chunks(features).flat_map(|row| &row[start..start + count]).copied();
    let expected = Expected::bits(bits).laid(plane.other(5), count);
    let op = Columns { start: start as u32, count: count as u32 };
    Case::new(plane.id, CallCase::new(op, vec![Operand::laid(x, plane.layout)], vec![expected]))
}
