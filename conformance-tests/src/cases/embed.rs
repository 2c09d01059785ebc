//! `embed` and `gather_rows`.

use super::linear::random_weight;
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand},
    oracle::embed,
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    BlockFormat, DType, WeightFormat,
    op::{Embed, GatherRows},
};

/// Label, tokens, rows of the table, features, its first row, extent.
type Shape = (&'static str, usize, usize, usize, u32, Option<usize>);

const SHAPES: &[Shape] = &[
    ("no_tokens", 0, 10, 32, 0, None),
    ("one_token", 1, 1, 32, 0, None),
    ("shard", 33, 50, 64, 20, None),
    ("many", 61, 257, 96, 0, None),
    ("extent", 9, 50, 64, 0, Some(5)),
    ("extent_of_nothing", 9, 50, 64, 0, Some(0)),
];

const FORMATS: [WeightFormat; 6] = [
    WeightFormat::Dense(DType::F32),
    WeightFormat::Dense(DType::F16),
    WeightFormat::Dense(DType::BF16),
    WeightFormat::Block(BlockFormat::Q4_0),
    WeightFormat::Block(BlockFormat::Q4_1),
    WeightFormat::Block(BlockFormat::Q8_0),
];

pub(super) fn embed(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for format in FORMATS {
        if matches!(format, WeightFormat::Dense(stored) if stored != dtype && dtype != DType::F32) {
            continue;
        }
        for (number, (label, tokens, rows, columns, first_row, extent)) in SHAPES.iter().copied().enumerate()
        {
            let id = format!("embed_{format}/{dtype}/{label}");
            let mut random = Random::named(&id);
            let (table, elements) = random_weight(&mut random, format, [rows, columns], 0.5, dtype);
            // Real ids, and with them -1, ids of other shards and ids of no shard.
            let last = first_row as i32 + rows as i32;
            let id_of = |random: &mut Random| match random.below(6) {
                0 => -1,
                1 => random.pick(&[last, first_row as i32 - 1, i32::MAX, i32::MIN, -2]),
                _ => first_row as i32 + random.below(rows) as i32,
            };
            let ids: Vec<i32> = (0..tokens).map(|_| id_of(&mut random)).collect();
            let positions = (number % 2 == 1).then(|| {
                let position = |random: &mut Random| random.pick(&[0, 1, 2, 7, 13, 14, 15, 1000, -1, -2]);
                let positions: Vec<i32> = (0..tokens).map(|_| position(&mut random)).collect();
                let dense = WeightFormat::Dense(dtype);
                let (table, elements) = random_weight(&mut random, dense, [16, columns], 0.5, dtype);
                (positions, table, elements, random.pick(&[0u32, 2]))
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
            cases.push(Case::new(id, CallCase::new(op, operands, vec![expected])));
        }
    }
    cases
}

/// Label, rows there are, how many of them are real, rows wanted, how many of those are real, gap.
type Gather = (&'static str, usize, Option<usize>, usize, Option<usize>, usize);

const GATHERS: &[Gather] = &[
    ("nothing_wanted", 5, None, 0, None, 0),
    ("one", 1, None, 1, None, 0),
    ("some", 61, None, 33, None, 0),
    ("strided", 12, None, 7, None, 9),
    ("bounded_rows", 12, Some(5), 20, None, 0),
    ("bounded_wants", 12, None, 20, Some(13), 3),
    ("all_bounded", 12, Some(0), 20, Some(0), 0),
];

pub(super) fn gather_rows(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (label, rows, real_rows, wants, real_wants, gap) in GATHERS.iter().copied() {
        let id = format!("gather_rows/{dtype}/{label}");
        let (mut random, columns) = (Random::named(&id), 33);
        // Copies are exact to the bit, NaN included.
        let x = random.tensor(dtype, &[rows, columns], Values::Special);
        let index = |random: &mut Random| match random.below(5) {
            0 => random.pick(&[-1, -2, rows as i32, i32::MAX, i32::MIN]),
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
        cases.push(Case::new(id, CallCase::new(GatherRows {}, operands, vec![expected])));
    }
    cases
}
