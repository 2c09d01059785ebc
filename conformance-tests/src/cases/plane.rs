//! Planes, which are activation matrices `[rows, features]`: their shapes, layouts and values.

use super::wanted::is_wanted;
use crate::{
    case::Layout,
    draw::Draw,
    random::{Random, Values},
};
use dsrun_core::DType;

/// An activation matrix, the first operand of a case.
#[derive(Clone, Debug)]
pub(super) struct Plane {
    /// The id of the case.
    pub(super) id: String,
    pub(super) rows: usize,
    pub(super) features: usize,
    pub(super) layout: Layout,
    pub(super) values: Values,
    /// The random stream of the case.
    pub(super) random: Random,
    /// The index of the case, for tables that vary attributes from case to case.
    pub(super) number: usize,
}

impl Plane {
    /// The layout of a further tensor of the case: the same extent, at another offset.
    pub(super) fn other(&self, gap: usize) -> Layout {
        Layout {
            gap: if self.layout.gap > 0 { gap } else { 0 },
            offset: self.layout.offset + 1,
            ..self.layout
        }
    }
}

const fn bounded(extent: Option<usize>) -> Layout {
    Layout { gap: 0, offset: 0, bounded: true, extent }
}

const fn strided(gap: usize, offset: usize) -> Layout {
    Layout { gap, offset, bounded: false, extent: None }
}

/// The shapes that every op is tested with. 31 to 33, 127 to 129 and 1023 are near tile sizes; 61 and 257 are primes.
const EDGES: &[(&str, usize, usize, Layout)] = &[
    ("no_rows", 0, 64, strided(0, 0)),
    ("one_element", 1, 1, strided(0, 0)),
    ("one_row", 1, 64, strided(0, 0)),
    ("seven", 7, 7, strided(0, 1)),
    ("below_a_tile", 31, 31, strided(0, 0)),
    ("a_tile", 32, 128, strided(0, 0)),
    ("above_a_tile", 33, 129, strided(0, 0)),
    ("prime", 61, 257, strided(0, 3)),
    ("wide", 2, 4099, strided(0, 0)),
    ("strided", 5, 48, strided(16, 0)),
    ("strided_oddly", 9, 33, strided(7, 2)),
    ("bounded_full", 6, 40, bounded(None)),
    ("extent", 6, 40, bounded(Some(4))),
    ("extent_of_one", 33, 65, bounded(Some(1))),
    ("extent_of_nothing", 6, 40, bounded(Some(0))),
    ("extent_of_all", 6, 40, bounded(Some(6))),
    ("strided_extent", 12, 40, Layout { gap: 24, offset: 1, bounded: true, extent: Some(11) }),
    // So long that a backend may split a row of a product over several multiprocessors.
    ("long_row", 1, 4096, strided(0, 0)),
];

/// The planes of the fixed list: edge cases and random ones. `features` adapts a number of features to the op.
pub(super) fn planes(
    op: &str,
    dtype: DType,
    kinds: &[Values],
    features: impl Fn(usize) -> usize,
) -> Vec<Plane> {
    let mut planes = Vec::new();
    for (number, (label, rows, wanted, layout)) in EDGES.iter().enumerate() {
        let id = format!("{op}/{dtype}/{label}");
        let (random, values) = (Random::named(&id), kinds[number % kinds.len()]);
        let features = features(*wanted);
        planes.push(Plane { id, rows: *rows, features, layout: *layout, values, random, number });
    }
    for values in kinds {
        for index in 0..2 {
            let id = format!("{op}/{dtype}/random_{}_{index}", format!("{values:?}").to_lowercase());
            let mut random = Random::named(&id);
            let (rows, features) = (1 + random.below(40), features(1 + random.below(300)));
            let layout = Layout::strided(random.pick(&[0, 1, 8, 13]), random.below(4));
            let extent = random.chance(0.5).then(|| random.below(rows + 1));
            let (layout, number) = (layout.with_extent(extent), planes.len());
            planes.push(Plane { id, rows, features, layout, values: *values, random, number });
        }
    }
    planes.retain(|plane| is_wanted(&plane.id));
    planes
}

/// Planes of special values: infinity and NaN in rare places, zeros of both signs, and subnormal numbers.
pub(super) fn special_planes(op: &str, dtype: DType, features: impl Fn(usize) -> usize) -> Vec<Plane> {
    let kinds = [("rare", Values::Rare), ("zeros", Values::Zeros), ("subnormals", Values::Subnormal)];
    let one = |(number, (label, values)): (usize, (&str, Values))| {
        let id = format!("{op}/{dtype}/special_{label}");
        let (random, layout) = (Random::named(&id), strided(3 * number, 1));
        Plane { id, rows: 23, features: features(37), layout, values, random, number }
    };
    kinds.into_iter().enumerate().map(one).collect()
}

/// The planes of the fixed list for a region, and one with NaN in rare places, which must reach the results of its rows and no
/// other, as it does in the body. Infinity is left to the primitives: what follows from it depends on roundings inside.
pub(super) fn region_planes(op: &str, dtype: DType, features: impl Fn(usize) -> usize) -> Vec<Plane> {
    let id = format!("{op}/{dtype}/special_nan");
    let (random, layout, values) = (Random::named(&id), strided(8, 1), Values::Nan);
    // The attributes of this number are dense weights with a bias.
    let special = Plane { id, rows: 23, features: features(37), layout, values, random, number: 9 };
    planes(op, dtype, &Values::USUAL, features).into_iter().chain([special]).collect()
}

/// Planes just over sizes at which kernels change: 16 and 32 bits of an index, the threads of a block, the blocks of a grid. They
/// are narrow, and so cheap.
const THRESHOLDS: &[(&str, usize, usize)] = &[
    ("rows_257", 257, 3),
    ("rows_513", 513, 2),
    ("rows_1025", 1025, 2),
    ("rows_8193", 8193, 1),
    ("rows_16385", 16_385, 1),
    ("rows_65537", 65_537, 1),
    ("columns_513", 2, 513),
    ("columns_1025", 2, 1025),
    ("columns_8193", 2, 8193),
    ("columns_16385", 1, 16_385),
    ("columns_65537", 1, 65_537),
];

/// The planes of [`THRESHOLDS`].
pub(super) fn threshold_planes(op: &str, dtype: DType, features: impl Fn(usize) -> usize) -> Vec<Plane> {
    let one = |(number, (label, rows, wanted)): (usize, &(&str, usize, usize))| {
        let id = format!("{op}/{dtype}/{label}");
        let (random, layout) = (Random::named(&id), strided(0, 0));
        let (rows, features, values) = (*rows, features(*wanted), Values::Uniform);
        // Every other attribute, so that optional operands come and go.
        Plane { id, rows, features, layout, values, random, number: 2 * number + 1 }
    };
    THRESHOLDS.iter().enumerate().map(one).collect()
}

/// Numbers of rows of random cases: near tile sizes, and a prime.
pub(super) const ROWS: &[usize] = &[1, 0, 2, 7, 15, 16, 17, 31, 32, 33, 61, 129];
/// Numbers of features of random cases; the largest exceed what a block of threads handles at once.
pub(super) const FEATURES: &[usize] = &[1, 2, 7, 16, 31, 32, 33, 61, 127, 128, 129, 257, 1023, 4099];
/// The maximum number of elements of a random case: enough for the largest size above in one dimension.
const ELEMENTS: usize = 1 << 14;

/// The layout of a random case with `rows` rows.
pub(super) fn drawn_layout(draw: &mut Draw, rows: usize) -> Layout {
    let (gap, offset) = (draw.pick(&[0, 8, 1, 13]), draw.below(4));
    let extent = match draw.below(6) {
        0 | 1 => None,
        2 => Some(rows),
        3 => Some(rows / 2),
        4 => Some(rows.min(1)),
        _ => Some(0),
    };
    let bounded = extent.is_none() && draw.sometimes();
    Layout { bounded, ..Layout::strided(gap, offset) }.with_extent(extent)
}

/// The plane of a random case. `features` adapts a number of features to the op.
pub(super) fn drawn(draw: &mut Draw, kinds: &[Values], features: impl Fn(usize) -> usize) -> Plane {
    let features = features(draw.pick(FEATURES));
    let rows = draw.pick(ROWS).min(ELEMENTS / features);
    let layout = drawn_layout(draw, rows);
    let (values, number) = (draw.pick(kinds), draw.below(24));
    Plane { id: draw.id(), rows, features, layout, values, random: draw.values(), number }
}
