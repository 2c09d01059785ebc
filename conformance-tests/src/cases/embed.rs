//! Cases of `embed` and `gather_rows`.

use super::{
    linear::{columns_of, drawn_weight, formats, goes_with},
    plane::drawn_layout,
    wanted::is_wanted,
};
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand},
    draw::Draw,
    oracle::{embed, weight},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType, WeightFormat,
    op::{Embed, GatherRows},
};

/// Label, tokens, rows of the table, features, first row of the table, and extent of each case.
type Shape = (&'static str, usize, usize, usize, u32, Option<usize>);

const SHAPES: &[Shape] = &[
    ("no_tokens", 0, 10, 32, 0, None),
    ("one_token", 1, 1, 32, 0, None),
    ("shard", 33, 50, 64, 20, None),
    ("many", 61, 257, 96, 0, None),
    ("extent", 9, 50, 64, 0, Some(5)),
    ("extent_of_nothing", 9, 50, 64, 0, Some(0)),
];

/// Cases for dense tables only, with so many tokens that a backend may assign one block to each row.
const MANY: &[Shape] = &[
    ("whole_rows", 515, 7, 290, 0, Some(513)),
    ("rows_8193", 8193, 3, 2, 0, None),
    ("rows_65537", 65_537, 3, 1, 0, None),
    ("table_65537", 300, 65_537, 2, 0, None),
    ("table_140000", 60, 140_000, 1, 0, None),
    ("columns_16385", 2, 3, 16_385, 0, None),
];

pub(super) fn embed(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for format in formats().into_iter().filter(|format| goes_with(*format, dtype)) {
        let many = if matches!(format, WeightFormat::Dense(_)) { MANY } else { &[] };
        for (number, shape) in SHAPES.iter().chain(many).enumerate() {
            let id = format!("embed_{format}/{dtype}/{}", shape.0);
            if !is_wanted(&id) {
                continue;
            }
            let random = Random::named(&id);
            // Unequal extents meet all operands.
            let with_positions = number % 2 == 1 || shape.0 == "extent";
            cases.push(embed_case(dtype, id, random, format, *shape, with_positions));
        }
    }
    cases
}

pub(super) fn drawn_embed(dtype: DType, draw: &mut Draw) -> Case {
    let there: Vec<WeightFormat> = [WeightFormat::Dense(dtype)]
        .into_iter()
        .chain(formats())
        .filter(|format| goes_with(*format, dtype))
        .collect();
    let format = draw.pick(&there);
    let tokens = draw.pick(&[1, 0, 2, 7, 16, 17, 61]);
    let (rows, columns): (usize, usize) =
        (draw.pick(&[1, 2, 7, 50, 257]), draw.pick(&[32, 1, 7, 64, 96, 127, 128, 160, 1024]));
    let first_row = draw.pick(&[0, 1, 20]);
    let extent = drawn_layout(draw, tokens).extent;
    let with_positions = draw.sometimes();
    let shape = ("", tokens, rows, columns, first_row, extent);
    embed_case(dtype, draw.id(), draw.values(), format, shape, with_positions)
}

fn embed_case(
    dtype: DType,
    id: String,
    mut random: Random,
    format: WeightFormat,
    (_, tokens, rows, columns, first_row, extent): Shape,
    with_positions: bool,
) -> Case {
    let columns = columns_of(format, columns);
    let table = drawn_weight(&mut random, format, [rows, columns], 0.5);
    let elements = weight::reals(&table.weight_type, &table.bytes);
    // Valid ids, mixed with -1, ids of other shards and ids of no shard.
    let last = first_row as i32 + rows as i32;
    let id_of = |random: &mut Random| match random.below(6) {
        0 => -1,
        1 => random.pick(&[last, first_row as i32 - 1, i32::MAX, i32::MIN, -2]),
        _ => first_row as i32 + random.below(rows) as i32,
    };
    let ids: Vec<i32> = (0..tokens).map(|_| id_of(&mut random)).collect();
    let positions = with_positions.then(|| {
        let position = |random: &mut Random| random.pick(&[0, 1, 2, 7, 13, 14, 15, 1000, -1, -2]);
        let positions: Vec<i32> = (0..tokens).map(|_| position(&mut random)).collect();
        let (dense, offset) = (WeightFormat::Dense(dtype), random.pick(&[0u32, 2, 300]));
        let rows = if offset < 16 { 16 } else { offset as usize + 14 };
        let table = drawn_weight(&mut random, dense, [rows, columns], 0.5);
        let elements = weight::reals(&table.weight_type, &table.bytes);
        (positions, table, elements, offset)
    });
    let reals = ids.iter().enumerate().flat_map(|(token, id)| {
        let position =
            positions.as_ref().map(|(all, _, table, offset)| (all[token], table.as_slice(), *offset));
        embed::embed(*id, &elements, first_row, position, columns)
    });
    let layout = Layout::default().with_extent(extent);
    let gap = random.pick(&[0, 8]);
    let expected = Expected::reals(reals).laid(Layout { gap, ..layout }, columns);
    let position_offset = positions.as_ref().map_or(0, |(.., offset)| *offset);
    let (positions, position_table) = match positions {
        Some((positions, table, ..)) => {
            (Operand::laid(Tensor::vector(&positions), layout), Operand::weight(table))
        }
        None => (None, None),
    };
    let ids = Operand::laid(Tensor::vector(&ids), layout);
    let operands = vec![ids, Operand::weight(table), positions, position_table];
    let op = Embed { dtype, first_row, position_offset };
    Case::new(id, CallCase::new(op, operands, vec![expected]))
}

/// Label, rows of the operand with their extent, rows to gather with their extent, and gap of each case.
type Gather = (&'static str, usize, Option<usize>, usize, Option<usize>, usize);

const GATHERS: &[Gather] = &[
    ("nothing_wanted", 5, None, 0, None, 0),
    ("one", 1, None, 1, None, 0),
    ("some", 61, None, 33, None, 0),
    ("strided", 12, None, 7, None, 9),
    ("bounded_rows", 12, Some(5), 20, None, 0),
    ("bounded_wants", 12, None, 20, Some(13), 3),
    ("all_bounded", 12, Some(0), 20, Some(0), 0),
    ("rows_1025", 1025, None, 1025, None, 0),
    ("rows_140000", 140_000, None, 60, None, 0),
];

pub(super) fn gather_rows(dtype: DType) -> Vec<Case> {
    let one = |gather: &Gather| {
        let id = format!("gather_rows/{dtype}/{}", gather.0);
        let random = Random::named(&id);
        gather_case(dtype, id, random, *gather, if gather.1 > 100_000 { 1 } else { 33 })
    };
    GATHERS.iter().map(one).collect()
}

pub(super) fn drawn_gather_rows(dtype: DType, draw: &mut Draw) -> Case {
    let (rows, wants) = (draw.pick(&[1, 2, 7, 12, 61]), draw.pick(&[1, 0, 2, 7, 20, 33]));
    let columns = draw.pick(&[1, 2, 7, 31, 32, 33, 257]);
    let (there, wanted) = (drawn_layout(draw, rows), drawn_layout(draw, wants));
    let gather = ("", rows, there.extent, wants, wanted.extent, there.gap);
    gather_case(dtype, draw.id(), draw.values(), gather, columns)
}

fn gather_case(
    dtype: DType,
    id: String,
    mut random: Random,
    (_, rows, real_rows, wants, real_wants, gap): Gather,
    columns: usize,
) -> Case {
    // Copies are exact to the bit, including NaN.
    let x = random.tensor(dtype, &[rows, columns], Values::Special).to_be_copied();
    let index = |random: &mut Random| match random.below(6) {
        0 => -1,
        1 => random.pick(&[-2, rows as i32, i32::MAX, i32::MIN]),
        _ => random.below(rows) as i32,
    };
    let indices: Vec<i32> = (0..wants).map(|_| index(&mut random)).collect();
    let mut elements = Vec::new();
    for source in embed::gather(&indices, real_rows.unwrap_or(rows)) {
        elements.extend((0..columns).map(|column| match source {
            Some(source) => Element::Bits(x.bits[source * columns + column]),
            None => Element::Untouched,
        }));
    }
    let wanted = Layout::default().with_extent(real_wants);
    let expected = Expected::new(elements).laid(Layout { gap, ..wanted }, columns);
    let operands = vec![
        Operand::laid(x, Layout::strided(gap, 1).with_extent(real_rows)),
        Operand::laid(Tensor::vector(&indices), wanted),
    ];
    Case::new(id, CallCase::new(GatherRows {}, operands, vec![expected]))
}
