//! Shapes and layouts for ops over planes `[rows, features]`.

use crate::{
    case::Layout,
    draw::Draw,
    random::{Random, Values},
};
use dsrun_core::DType;

/// A plane to run an op on.
#[derive(Clone, Debug)]
pub(super) struct Plane {
    /// Identifier of the case.
    pub(super) id: String,
    pub(super) rows: usize,
    pub(super) features: usize,
    pub(super) layout: Layout,
    pub(super) values: Values,
    /// A stream of its own.
    pub(super) random: Random,
    /// Counts up, for tables that vary something from plane to plane.
    pub(super) number: usize,
}

impl Plane {
    /// The layout of another tensor of the plane: the same rows are real, but it lies elsewhere.
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

/// The edges every op over planes is run on. 31 to 33, 127 to 129 and 1023 are around tile sizes; 61 and 257 are primes.
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
    // So long that a backend may share the row of a product among several parts of the device.
    ("long_row", 1, 4096, strided(0, 0)),
];

/// The edges and some random planes. `features` fits a number of features to the op.
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
    planes
}

/// Rows to draw from: around the sizes of tiles, and a prime.
pub(super) const ROWS: &[usize] = &[1, 0, 2, 7, 15, 16, 17, 31, 32, 33, 61, 129];
/// Features to draw from, the largest beyond what one block of threads does at a time.
pub(super) const FEATURES: &[usize] = &[1, 2, 7, 16, 31, 32, 33, 61, 127, 128, 129, 257, 1023, 4099];
/// The most elements of a drawn plane: enough for every size above in one dimension.
const ELEMENTS: usize = 1 << 14;

/// A drawn layout for so many rows.
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

/// A drawn plane. `features` fits a number of features to the op.
pub(super) fn drawn(draw: &mut Draw, kinds: &[Values], features: impl Fn(usize) -> usize) -> Plane {
    let features = features(draw.pick(FEATURES));
    let rows = draw.pick(ROWS).min(ELEMENTS / features);
    let layout = drawn_layout(draw, rows);
    let (values, number) = (draw.pick(kinds), draw.below(24));
    Plane { id: draw.id(), rows, features, layout, values, random: draw.values(), number }
}
