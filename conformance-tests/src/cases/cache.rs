//! Cases of `kv_write` and of the ops that copy pages.

use super::plane::drawn_layout;
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand},
    draw::Draw,
    oracle::{Real, cache, elementwise, float},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    cache_row::cache_row_size,
    op::{KvWrite, LatentWrite, PageGather, PageScatter},
};

/// Label; pages, heads, slots per page, key size, value size; tokens, extent and gap of each case.
type Write = (&'static str, [usize; 5], usize, Option<usize>, usize);

const WRITES: &[Write] = &[
    ("no_tokens", [2, 2, 16, 8, 8], 0, None, 0),
    ("one_token", [1, 1, 1, 1, 1], 1, None, 0),
    ("decode", [9, 3, 16, 64, 64], 7, None, 0),
    ("prompt", [5, 2, 16, 80, 80], 61, None, 0),
    ("unlike_sizes", [4, 2, 8, 24, 5], 9, None, 0),
    ("strided", [4, 2, 8, 16, 16], 9, None, 8),
    ("extent", [4, 2, 8, 16, 16], 9, Some(6), 3),
    ("extent_of_nothing", [4, 2, 8, 16, 16], 9, Some(0), 0),
    ("tokens_1025", [70, 1, 16, 2, 2], 1025, None, 0),
    ("slots_65537", [65_537, 1, 1, 1, 1], 40, None, 0),
    ("heads_257", [2, 257, 2, 2, 2], 3, None, 0),
    ("sizes_100_and_116", [3, 9, 4, 100, 116], 7, None, 0),
    ("more_tokens_than_pages", [3, 2, 300, 4, 4], 410, None, 8),
    ("tokens_8193", [33, 1, 256, 1, 1], 8193, None, 0),
    (SPECIAL, [4, 2, 8, 24, 16], 19, None, 3),
];

/// The label of the case with rows of special values.
const SPECIAL: &str = "special_rows";

/// More cases of i8 caches, whose rows are quantised.
const QUANTISED_WRITES: &[Write] = &[
    ("head_128", [3, 2, 16, 128, 128], 20, None, 0),
    ("head_256", [2, 1, 16, 256, 256], 9, Some(8), 5),
    (ZEROS, [4, 2, 8, 64, 64], 19, None, 0),
    (SUBNORMALS, [4, 2, 8, 24, 16], 19, None, 0),
];

/// The labels of cases with rows of zeros, some of them whole, and with rows of subnormal numbers, whose scales are subnormal or 0.
const ZEROS: &str = "zero_rows";
const SUBNORMALS: &str = "subnormal_rows";

pub(super) fn kv_write(dtype: DType) -> Vec<Case> {
    let (f32, of_f32) = (DType::F32, "kv_write_of_f32");
    // Keys and values of another type than the cache are rounded, or quantised.
    let (types, more): (Vec<(DType, &str)>, _) = match dtype {
        DType::I8 => {
            let halves = [(DType::F16, "kv_write_of_f16"), (DType::BF16, "kv_write_of_bf16")];
            ([(f32, "kv_write")].into_iter().chain(halves).collect(), QUANTISED_WRITES)
        }
        DType::F32 => (vec![(f32, "kv_write")], &[][..]),
        _ => (vec![(dtype, "kv_write"), (f32, of_f32)], &[][..]),
    };
    let of = |(from, name): (DType, &str)| {
        let one = |write: &Write| {
            let id = format!("{name}/{dtype}/{}", write.0);
            let random = Random::named(&id);
            write_case([from, dtype], id, random, *write)
        };
        WRITES.iter().chain(more).map(one).collect::<Vec<_>>()
    };
    types.into_iter().flat_map(of).collect()
}

pub(super) fn drawn_kv_write(dtype: DType, draw: &mut Draw) -> Case {
    let halves = [DType::F32, DType::F16, DType::BF16];
    let from = if dtype == DType::I8 { draw.pick(&halves) } else { draw.pick(&[dtype, DType::F32]) };
    let (tokens, pages) = (draw.pick(&[1, 0, 2, 7, 16, 17, 61]), draw.pick(&[1, 2, 7, 9]));
    let (heads, block) = (draw.pick(&[1, 2, 3]), draw.pick(&[1, 4, 7, 8, 16, 32]));
    let key_size = draw.pick(&[1, 5, 8, 64, 80, 128]);
    let value_size = draw.pick(&[key_size, 1, 24, 64]);
    let layout = drawn_layout(draw, tokens);
    let write = ("", [pages, heads, block, key_size, value_size], tokens, layout.extent, layout.gap);
    write_case([from, dtype], draw.id(), draw.values(), write)
}

/// A case of `kv_write` with keys and values of the first type and a cache of the second.
fn write_case([from, dtype]: [DType; 2], id: String, mut random: Random, write: Write) -> Case {
    let (label, [pages, heads, block, key_size, value_size], tokens, extent, gap) = write;
    let slots = slots_of(&mut random, [pages, block], tokens);
    let (mut operands, mut results) = (Vec::new(), Vec::new());
    let mut rows = Vec::new();
    // Tensors of one shape have strides of their own all the same.
    let apart = |number: usize| if gap > 0 { gap + number } else { 0 };
    for (number, size) in [key_size, value_size].into_iter().enumerate() {
        let shape = [pages, heads, block, cache_row_size(dtype, size)];
        let before = cache_tensor(&mut random, dtype, &shape);
        let new = new_rows(&mut random, label, [from, dtype], [tokens, heads * size]);
        let values = new.values();
        let mut elements = vec![Element::Untouched; before.bits.len()];
        for (token, slot) in slots.iter().enumerate().take(extent.unwrap_or(tokens)) {
            let Some((page, place)) = cache::place(*slot, pages, block) else { continue };
            for head in 0..heads {
                let (first, at) =
                    ((token * heads + head) * size, cache::element(shape, page, head, place, 0));
                if dtype == DType::I8 {
                    // Both divisions are those of f32, so that bytes and scales are exact.
                    let row = cache::quantised_row(&values[first..][..size]);
                    let row = row.into_iter();
                    let row =
                        row.map(|byte| byte.map_or(Element::Anything, |byte| Element::Bits(byte.into())));
                    elements.splice(at..at + shape[3], row);
                } else {
                    let row = new.bits[first..][..size].iter().map(|bits| element(from, *bits, dtype));
                    elements.splice(at..at + size, row);
                }
            }
        }
        operands.push(Operand::laid(before, Layout::strided(apart(number), 1)));
        results.push(Expected::new(elements));
        rows.push(Operand::laid(new, Layout::strided(apart(2 + number), 0).with_extent(extent)));
    }
    operands.extend(rows);
    operands.push(Operand::laid(Tensor::vector(&slots), Layout::default().with_extent(extent)));
    Case::new(id, CallCase::new(KvWrite {}, operands, results))
}

pub(super) fn latent_write(dtype: DType) -> Vec<Case> {
    let rounded = (dtype != DType::F32).then_some((DType::F32, "latent_write_of_f32"));
    let of = |(from, name): (DType, &str)| {
        let one = |write: &Write| {
            let id = format!("{name}/{dtype}/{}", write.0);
            let random = Random::named(&id);
            latent_case([from, dtype], id, random, *write)
        };
        WRITES.iter().map(one).collect::<Vec<_>>()
    };
    [(dtype, "latent_write")].into_iter().chain(rounded).flat_map(of).collect()
}

pub(super) fn drawn_latent_write(dtype: DType, draw: &mut Draw) -> Case {
    let from = draw.pick(&[dtype, DType::F32]);
    let (tokens, pages) = (draw.pick(&[1, 0, 2, 7, 16, 17, 61]), draw.pick(&[1, 2, 7, 9]));
    let (heads, block) = (draw.pick(&[1, 2, 3]), draw.pick(&[1, 4, 7, 8, 16, 32]));
    let (value_size, rest) = (draw.pick(&[64, 1, 5, 8, 128, 512]), draw.pick(&[8, 1, 24, 64]));
    let layout = drawn_layout(draw, tokens);
    let write = ("", [pages, heads, block, value_size, rest], tokens, layout.extent, layout.gap);
    latent_case([from, dtype], draw.id(), draw.values(), write)
}

/// A case of `latent_write` with rows of the first type and a cache of the second.
fn latent_case([from, dtype]: [DType; 2], id: String, mut random: Random, write: Write) -> Case {
    let (label, [pages, heads, block, value_size, rest], tokens, extent, gap) = write;
    let slots = slots_of(&mut random, [pages, block], tokens);
    let shape = [pages, heads, block, value_size + rest];
    let before = random.tensor(dtype, &shape, Values::Special);
    let mut elements = vec![Element::Untouched; before.bits.len()];
    let mut operands = vec![Operand::laid(before, Layout::strided(gap, 1))];
    for (offset, size) in [(0, value_size), (value_size, rest)] {
        let new = new_rows(&mut random, label, [from, dtype], [tokens, heads * size]);
        for (token, slot) in slots.iter().enumerate().take(extent.unwrap_or(tokens)) {
            let Some((page, place)) = cache::place(*slot, pages, block) else { continue };
            for (column, bits) in new.bits[token * heads * size..][..heads * size].iter().enumerate() {
                let at = cache::element(shape, page, column / size, place, offset + column % size);
                elements[at] = element(from, *bits, dtype);
            }
        }
        operands.push(Operand::laid(new, Layout::strided(gap, 0).with_extent(extent)));
    }
    operands.push(Operand::laid(Tensor::vector(&slots), Layout::default().with_extent(extent)));
    Case::new(id, CallCase::new(LatentWrite {}, operands, vec![Expected::new(elements)]))
}

/// Rows of the first type to be written to a cache of the second.
fn new_rows(random: &mut Random, label: &str, [from, dtype]: [DType; 2], shape: [usize; 2]) -> Tensor {
    let values = match label {
        SPECIAL => Values::Special,
        ZEROS => Values::Zeros,
        SUBNORMALS => Values::Subnormal,
        _ => Values::HeavyTailed,
    };
    let mut new = random.tensor(from, &shape, values);
    if label == ZEROS {
        // Every third row has a single number.
        let width = shape[1].max(1);
        for row in new.bits.chunks_exact_mut(width).step_by(3) {
            row[random.below(width)] = float::bits(from, random.normal());
        }
    }
    if from == dtype { new.to_be_copied() } else { new }
}

/// A cache with content of its own: floats with infinities and NaN, or any bytes.
fn cache_tensor(random: &mut Random, dtype: DType, shape: &[usize]) -> Tensor {
    if dtype != DType::I8 {
        return random.tensor(dtype, shape, Values::Special);
    }
    let bits = (0..shape.iter().product()).map(|_| random.below(256) as u32).collect();
    Tensor { dtype, shape: shape.to_vec(), bits }
}

/// The slots of tokens in a cache of so many pages of so many slots: every one at most once, mixed with -1 and slots out of
/// range.
fn slots_of(random: &mut Random, [pages, block]: [usize; 2], tokens: usize) -> Vec<i32> {
    let free = random.shuffled(pages * block);
    let slot = |token: usize, random: &mut Random| match random.below(6) {
        0 => random.pick(&[-1, -2, (pages * block) as i32, i32::MAX, i32::MIN]),
        _ => free.get(token).map_or(-1, |slot| *slot as i32),
    };
    (0..tokens).map(|token| slot(token, random)).collect()
}

/// A copy that converts to another type.
pub(super) fn element(from: DType, bits: u32, to: DType) -> Element {
    let nan = Element::Real(Real::new(f64::NAN, 0.0));
    elementwise::cast(from, bits, to).map_or(nan, Element::Bits)
}

/// Label, shape of the cache, number of copied pages, extent and gap of each case.
type Move = (&'static str, [usize; 4], usize, Option<usize>, usize);

const MOVES: &[Move] = &[
    ("nothing", [3, 2, 4, 8], 0, None, 0),
    ("one_element", [2, 1, 1, 1], 1, None, 0),
    ("some", [16, 3, 16, 20], 7, None, 0),
    ("many", [61, 2, 8, 7], 29, None, 0),
    ("strided", [12, 2, 4, 8], 5, None, 4),
    ("extent", [12, 2, 4, 8], 6, Some(4), 0),
    ("extent_of_nothing", [12, 2, 4, 8], 6, Some(0), 0),
    ("pages_1025", [1100, 1, 1, 2], 1025, None, 0),
    ("pages_65537", [65_537, 1, 1, 1], 30, None, 0),
    ("page_of_65536", [3, 8, 64, 129], 2, None, 0),
    ("heads_17", [4, 17, 3, 20], 3, None, 0),
    (TWICE, [7, 2, 3, 5], 9, None, 0),
];

/// The label of the case in which a page is gathered more than once.
const TWICE: &str = "twice";

/// The cases of an op that copies pages.
fn cases_of(name: &str, dtype: DType, make: fn(DType, String, Random, Move) -> Case) -> Vec<Case> {
    let one = |moved: &Move| {
        let id = format!("{name}/{dtype}/{}", moved.0);
        let random = Random::named(&id);
        make(dtype, id, random, *moved)
    };
    MOVES.iter().map(one).collect()
}

fn drawn_move(draw: &mut Draw) -> Move {
    let count = draw.pick(&[1, 0, 2, 7, 16, 29]);
    let shape = [
        draw.pick(&[2, 3, 7, 16, 61]),
        draw.pick(&[1, 2, 3]),
        draw.pick(&[1, 4, 7, 16]),
        draw.pick(&[1, 2, 7, 8, 20, 64, 128]),
    ];
    let layout = drawn_layout(draw, count);
    ("", shape, count, layout.extent, layout.gap)
}

/// Random distinct pages, mixed with -1 and pages out of range.
fn pages(random: &mut Random, there: usize, count: usize) -> Vec<i32> {
    let order = random.shuffled(there);
    let page = |index: usize, random: &mut Random| match random.below(5) {
        0 => random.pick(&[-1, -2, there as i32, i32::MAX, i32::MIN]),
        _ => order.get(index).map_or(-1, |page| *page as i32),
    };
    (0..count).map(|index| page(index, random)).collect()
}

pub(super) fn page_gather(dtype: DType) -> Vec<Case> {
    cases_of("page_gather", dtype, page_gather_case)
}

pub(super) fn drawn_page_gather(dtype: DType, draw: &mut Draw) -> Case {
    page_gather_case(dtype, draw.id(), draw.values(), drawn_move(draw))
}

fn page_gather_case(
    dtype: DType,
    id: String,
    mut random: Random,
    (label, shape, count, extent, gap): Move,
) -> Case {
    let cache = cache_tensor(&mut random, dtype, &shape).to_be_copied();
    let mut wanted = pages(&mut random, shape[0], count);
    if label == TWICE {
        wanted.fill(2);
        wanted[4] = 5;
    }
    let size: usize = shape[1..].iter().product();
    let row = |index: &i32| match cache::page(*index, shape[0]) {
        Some(page) => cache.bits[page * size..][..size].iter().copied().map(Element::Bits).collect(),
        None => vec![Element::Untouched; size],
    };
    let elements = wanted.iter().flat_map(row).collect();
    let layout = Layout::default().with_extent(extent);
    let expected = Expected::new(elements).laid(Layout { gap, ..layout }, size);
    let operands =
        vec![Operand::laid(cache, Layout::strided(gap, 0)), Operand::laid(Tensor::vector(&wanted), layout)];
    Case::new(id, CallCase::new(PageGather {}, operands, vec![expected]))
}

pub(super) fn page_scatter(dtype: DType) -> Vec<Case> {
    cases_of("page_scatter", dtype, page_scatter_case)
}

pub(super) fn drawn_page_scatter(dtype: DType, draw: &mut Draw) -> Case {
    page_scatter_case(dtype, draw.id(), draw.values(), drawn_move(draw))
}

fn page_scatter_case(
    dtype: DType,
    id: String,
    mut random: Random,
    (_, shape, count, extent, gap): Move,
) -> Case {
    let before = cache_tensor(&mut random, dtype, &shape);
    let size: usize = shape[1..].iter().product();
    let x = cache_tensor(&mut random, dtype, &[count, size]).to_be_copied();
    let places = pages(&mut random, shape[0], count);
    let mut elements = vec![Element::Untouched; before.bits.len()];
    for (row, index) in places.iter().enumerate().take(extent.unwrap_or(count)) {
        let Some(page) = cache::page(*index, shape[0]) else { continue };
        for index in 0..size {
            elements[page * size + index] = Element::Bits(x.bits[row * size + index]);
        }
    }
    let layout = Layout::default().with_extent(extent);
    let operands = vec![
        Operand::laid(before, Layout::strided(gap, 1)),
        Operand::laid(x, Layout { gap, ..layout }),
        Operand::laid(Tensor::vector(&places), layout),
    ];
    Case::new(id, CallCase::new(PageScatter {}, operands, vec![Expected::new(elements)]))
}
