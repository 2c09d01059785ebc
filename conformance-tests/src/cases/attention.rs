//! Cases of `attention_prepare`, `paged_attention` and `attention`.

mod setups;
mod special;

use super::wanted::is_wanted;
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand},
    draw::Draw,
    gate::Gate,
    oracle::{
        Real,
        attention::{Scoring, Seen, Visibility, attend, is_defined},
        cache,
    },
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    cache_row::cache_row_size,
    op::{Attention, AttentionMask, AttentionPrepare, PagedAttention},
};
use setups::{Setup, drawn_setup, random_setups, setups, thresholds, unpaged_thresholds};
use special::{Place, special_setups};

/// The tensors of a step.
struct Batch {
    tokens: usize,
    start: Vec<usize>,
    pages: usize,
    /// The number of columns of the block table.
    columns: usize,
    table: Vec<i32>,
    scale: f32,
    alibi: Option<Tensor>,
    sinks: Option<Tensor>,
    bits: Option<Tensor>,
}

impl Batch {
    fn new(setup: &Setup, random: &mut Random) -> Self {
        let mut tokens = 0;
        let mut start = Vec::new();
        for (new, _) in &setup.sequences {
            start.push(tokens);
            tokens += new + setup.spare;
        }
        let needs = |all: usize| all.div_ceil(setup.block);
        let used: usize = setup.sequences.iter().map(|(_, all)| needs(*all)).sum();
        // Two pages are unused, and one column of the block table, unless there is one sequence.
        let pages = used + 2;
        let spare = usize::from(setup.sequences.len() != 1);
        let columns = setup.sequences.iter().map(|(_, all)| needs(*all)).max().unwrap_or(0) + spare;
        let mut free = random.shuffled(pages).into_iter();
        let mut table = Vec::new();
        for (new, all) in &setup.sequences {
            for column in 0..columns {
                // Pages outside the windows of all queries have been freed.
                let first_seen =
                    if setup.window == 0 { 0 } else { (all + 1).saturating_sub(new + setup.window) };
                let is_free = column >= needs(*all) || (column + 1) * setup.block <= first_seen;
                table.push(if is_free { -1 } else { free.next().map_or(-1, |page| page as i32) });
            }
        }
        let heads = setup.query_heads;
        let alibi = setup.alibi.then(|| {
            let slopes: Vec<f64> =
                (0..heads).map(|head| 2f64.powf(-8.0 * (head + 1) as f64 / heads as f64)).collect();
            Tensor::floats(DType::F32, &[heads], &slopes)
        });
        // Among four sinks or more, one outweighs all keys, and one has no weight.
        let sinks = setup.sinks.then(|| {
            let mut sinks = random.tensor(DType::F32, &[heads], Values::HeavyTailed);
            if heads >= 4 {
                sinks.bits[0] = 60f32.to_bits();
                sinks.bits[1] = f32::NEG_INFINITY.to_bits();
            }
            sinks
        });
        let longest = setup.sequences.iter().map(|(new, _)| *new).max().unwrap_or(0);
        let bits = (setup.mask == AttentionMask::Explicit).then(|| {
            let words = longest.div_ceil(32);
            // Some rows are zero: in a sequence without earlier tokens such a query sees no key.
            let word = |random: &mut Random, row: usize| if row % 4 == 1 { 0 } else { random.bits() as u32 };
            let all: Vec<u32> = (0..tokens * words).map(|index| word(random, index / words)).collect();
            Tensor::words(&[tokens, words], &all)
        });
        // Not the usual scale in most steps, which a backend might take for granted.
        let scale = (setup.key_size as f32).sqrt().recip() * random.pick(&[1.0, 0.75, 1.5, -0.5]);
        Self { tokens, start, pages, columns, table, scale, alibi, sinks, bits }
    }

    fn scoring(&self, setup: &Setup, head: usize) -> Scoring {
        let of = |vector: &Option<Tensor>| vector.as_ref().map(|vector| vector.values()[head]);
        Scoring {
            scale: f64::from(self.scale),
            softcap: f64::from(setup.softcap),
            slope: of(&self.alibi).unwrap_or(0.0),
            sink: of(&self.sinks),
        }
    }

    /// The bit of the explicit mask that says whether row `row` sees new token `token`.
    fn bit(&self, row: usize, token: usize) -> bool {
        self.bits.as_ref().is_some_and(|bits| {
            let words = bits.shape[1];
            token / 32 < words && bits.bits[row * words + token / 32] >> (token % 32) & 1 == 1
        })
    }
}

/// A cache with NaN in all slots that hold no token. The rows of an i8 cache are quantised from numbers that f16 has.
fn cache_of(
    setup: &Setup,
    batch: &Batch,
    random: &mut Random,
    dtype: DType,
    (place, size): (Place, usize),
    values: Values,
) -> Tensor {
    let shape = [batch.pages, setup.kv_heads, setup.block, size];
    let drawn = if dtype == DType::I8 { DType::F16 } else { dtype };
    let mut all = vec![f64::NAN; shape.iter().product()];
    for (sequence, (_, length)) in setup.sequences.iter().enumerate() {
        for key in 0..*length {
            let page = batch.table[sequence * batch.columns + key / setup.block];
            let Ok(page) = usize::try_from(page) else { continue };
            for head in 0..setup.kv_heads {
                for index in 0..size {
                    let at = cache::element(shape, page, head, key % setup.block, index);
                    all[at] = random.value(drawn, values);
                }
            }
        }
    }
    setup.special.change_cache(place, setup, batch, &mut all, size);
    let cache = Tensor::floats(drawn, &shape, &all);
    if dtype == DType::I8 { quantised(&cache) } else { cache }
}

/// An i8 cache of the elements of another. Bytes that are not defined are as far from zero as they can be, and beside scales of NaN.
fn quantised(cache: &Tensor) -> Tensor {
    let (mut shape, values) = (cache.shape.clone(), cache.values());
    let size = shape[3];
    shape[3] = cache_row_size(DType::I8, size);
    let rows = values.chunks(size.max(1)).flat_map(cache::quantised_row);
    let bits = rows.map(|byte| u32::from(byte.unwrap_or(0x80))).collect();
    Tensor { dtype: DType::I8, shape, bits }
}

pub(super) fn paged(dtype: DType) -> Vec<Case> {
    let mut all = setups();
    all.extend(random_setups(&mut Random::named(&format!("paged_attention/{dtype}"))));
    all.extend(thresholds());
    all.extend(special_setups(dtype));
    // Values that are part of their keys are never in i8.
    all.retain(|setup| dtype != DType::I8 || !setup.shared_values);
    let all = all.into_iter().enumerate();
    let one = |(number, setup): (usize, Setup)| {
        let id = format!("paged_attention/{dtype}/{}", setup.label);
        let random = Random::named(&id);
        is_wanted(&id).then(|| paged_case(dtype, id, random, &setup, Values::USUAL[number % 3]))
    };
    all.filter_map(one).collect()
}

pub(super) fn drawn_paged(dtype: DType, draw: &mut Draw) -> Case {
    use AttentionMask::{Bidirectional, Causal, Explicit};
    let mask = draw.pick(&[Causal, Bidirectional, Explicit]);
    let value_size = draw.pick(&[None, Some(24)]);
    let wide_query = draw.sometimes();
    let setup = drawn_setup(draw);
    let shared_values = dtype != DType::I8 && draw.sometimes();
    let value_size = value_size.unwrap_or(setup.value_size);
    let value_size = if shared_values { value_size.min(setup.key_size) } else { value_size };
    let setup = Setup { mask, wide_query, value_size, shared_values, ..setup };
    let values = draw.pick(&Values::USUAL);
    paged_case(dtype, draw.id(), draw.values(), &setup, values)
}

fn paged_case(dtype: DType, id: String, mut random: Random, setup: &Setup, values: Values) -> Case {
    let batch = Batch::new(setup, &mut random);
    let (heads, group) = (setup.query_heads, setup.query_heads / setup.kv_heads);
    let query_type = match dtype {
        _ if setup.wide_query => DType::F32,
        DType::I8 => random.pick(&[DType::F32, DType::F16, DType::BF16]),
        _ => dtype,
    };
    let query = special::query(&mut random, query_type, setup, &batch);
    let kinds = [special::keys(&setup.special), setup.special.values(values)];
    let keys = cache_of(setup, &batch, &mut random, dtype, (Place::Key, setup.key_size), kinds[0]);
    let cached = (!setup.shared_values)
        .then(|| cache_of(setup, &batch, &mut random, dtype, (Place::Value, setup.value_size), kinds[1]));
    let stride = if setup.shared_values { setup.key_size } else { setup.value_size };
    let (query_values, key_values) = (query.values(), cache::elements(&keys));
    let value_values = cache::elements(cached.as_ref().unwrap_or(&keys));
    let mut y = vec![Element::Untouched; batch.tokens * heads * setup.value_size];
    let mut log_sum_exp = vec![Element::Untouched; batch.tokens * heads];
    let real = setup.real_sequences.unwrap_or(setup.sequences.len());
    for (sequence, (new, length)) in setup.sequences.iter().enumerate().take(real) {
        let visibility = Visibility {
            mask: setup.mask,
            window: setup.window,
            kv_length: *length,
            query_length: *new,
            two_sided: false,
        };
        for (token, head) in (0..*new).flat_map(|token| (0..heads).map(move |head| (token, head))) {
            let row = batch.start[sequence] + token;
            let position = *length as f64 - *new as f64 + token as f64;
            let seen_key = |key: usize| {
                let page = batch.table[sequence * batch.columns + key / setup.block] as usize;
                let at = |size: usize| {
                    let shape = [batch.pages, setup.kv_heads, setup.block, size];
                    cache::element(shape, page, head / group, key % setup.block, 0)
                };
                Seen {
                    distance: position - key as f64,
                    key: &key_values[at(setup.key_size)..][..setup.key_size],
                    value: &value_values[at(stride)..][..setup.value_size],
                }
            };
            let keys = (0..*length).filter(|key| visibility.sees(token, *key, |other| batch.bit(row, other)));
            let seen: Vec<Seen<'_>> = keys.map(seen_key).collect();
            let query = &query_values[(row * heads + head) * setup.key_size..][..setup.key_size];
            let (reals, log) = attend(batch.scoring(setup, head), query, &seen, setup.value_size);
            let scoring = batch.scoring(setup, head);
            let is_defined = is_defined(scoring, query, &seen);
            let real = |real| if is_defined { Element::Real(real) } else { Element::Anything };
            // With sinks the documentation does not define the result of a query that sees no key.
            let unclear = seen.is_empty() && setup.sinks;
            log_sum_exp[row * heads + head] = if unclear { Element::Anything } else { real(log) };
            for (index, value) in reals.into_iter().enumerate() {
                y[(row * heads + head) * setup.value_size + index] = real(value);
            }
        }
    }
    let rows = setup.layout;
    // The bounds for a given i8 cache are those of an f32 cache: an element is the product of two numbers of f32, one more rounding of
    // terms for which the gate has eight, and weights are not rounded to the type of such a cache.
    let gate = Gate { inner: (dtype != DType::I8).then_some(dtype), exponential: true };
    let results = vec![
        Expected::new(y).gated(gate).laid(Layout { offset: 1, ..rows }, heads * setup.value_size),
        Expected::new(log_sum_exp).gated(Gate { inner: None, ..gate }).laid(rows, heads),
    ];
    let per_sequence = Layout::default().with_extent(setup.real_sequences);
    let vector = |all: Vec<usize>| {
        let all: Vec<i32> = all.into_iter().map(|value| value as i32).collect();
        Operand::laid(Tensor::vector(&all), per_sequence)
    };
    let table = Tensor::integers(&[setup.sequences.len(), batch.columns], &batch.table);
    // Tensors of one shape have strides of their own all the same.
    let gaps = Layout::strided(rows.gap, 0);
    let wider = Layout { gap: if rows.gap > 0 { rows.gap + 8 } else { 0 }, ..rows };
    let operands = vec![
        Operand::laid(query, rows),
        Operand::laid(keys, gaps),
        cached.and_then(|cached| Operand::laid(cached, Layout::strided(wider.gap, 0))),
        vector(batch.start.clone()),
        vector(setup.sequences.iter().map(|(new, _)| *new).collect()),
        vector(setup.sequences.iter().map(|(_, length)| *length).collect()),
        Operand::laid(table, Layout { gap: rows.gap, ..per_sequence }),
        Some(Operand::WorkList),
        batch.alibi.clone().and_then(Operand::tensor),
        batch.sinks.clone().and_then(Operand::tensor),
        batch.bits.clone().and_then(|bits| Operand::laid(bits, rows)),
    ];
    let op = PagedAttention {
        query_heads: heads as u32,
        kv_heads: setup.kv_heads as u32,
        scale: batch.scale,
        softcap: setup.softcap,
        window: setup.window as u32,
        mask: setup.mask,
        value_size: if setup.shared_values { setup.value_size as u32 } else { 0 },
    };
    Case::new(id, CallCase::new(op, operands, results))
}

pub(super) fn unpaged(dtype: DType) -> Vec<Case> {
    let lengths = |setup: &mut Setup| {
        // Special numbers are in tokens of any index.
        let all_are_new = !setup.special.strewn.is_empty();
        let length = |(new, all): (usize, usize)| if all_are_new { all } else { new };
        setup.sequences.iter_mut().for_each(|both| *both = (length(*both), length(*both)));
        if dtype != DType::F32 && setup.mask != AttentionMask::Bidirectional {
            setup.special.leave_values();
        }
    };
    let mut all = setups();
    all.extend(unpaged_thresholds());
    all.extend(random_setups(&mut Random::named(&format!("attention/{dtype}"))));
    all.extend(special_setups(dtype));
    let mut cases = Vec::new();
    for (number, mut setup) in all.into_iter().enumerate() {
        if setup.mask == AttentionMask::Explicit || setup.wide_query || setup.shared_values {
            continue;
        }
        setup.sinks = false;
        if setup.label == "long" {
            setup.sequences = vec![(150, 150), (1, 1)];
        }
        lengths(&mut setup);
        let id = format!("attention/{dtype}/{}", setup.label);
        let random = Random::named(&id);
        if is_wanted(&id) {
            let values = Values::USUAL[number % 3];
            cases.push(unpaged_case(dtype, id.clone(), random.clone(), &setup, values));
        }
        // Encoders are bidirectional, and so are their windows and distances.
        if matches!(
            setup.label,
            "window" | "alibi" | "everything" | "odd_head" | "window_of_one" | "prompts_window"
        ) {
            let both = Setup { mask: AttentionMask::Bidirectional, ..setup };
            let id = id + "_bidirectional";
            if is_wanted(&id) {
                cases.push(unpaged_case(dtype, id, random, &both, Values::Uniform));
            }
        }
    }
    cases
}

pub(super) fn drawn_unpaged(dtype: DType, draw: &mut Draw) -> Case {
    let mask = draw.pick(&[AttentionMask::Causal, AttentionMask::Bidirectional]);
    let mut setup = Setup { mask, ..drawn_setup(draw) };
    setup.sinks = false;
    setup.sequences.iter_mut().for_each(|(new, all)| *all = *new);
    let values = draw.pick(&Values::USUAL);
    unpaged_case(dtype, draw.id(), draw.values(), &setup, values)
}

fn unpaged_case(dtype: DType, id: String, mut random: Random, setup: &Setup, values: Values) -> Case {
    let batch = Batch::new(setup, &mut random);
    let (heads, group) = (setup.query_heads, setup.query_heads / setup.kv_heads);
    let query = special::query(&mut random, dtype, setup, &batch);
    let (key_width, value_width) = (setup.kv_heads * setup.key_size, setup.kv_heads * setup.value_size);
    let special = &setup.special;
    let mut key = random.tensor(dtype, &[batch.tokens, key_width], special::keys(special));
    let mut value = random.tensor(dtype, &[batch.tokens, value_width], special.values(values));
    special.change_rows(Place::Key, setup, &batch, &mut key, setup.key_size);
    special.change_rows(Place::Value, setup, &batch, &mut value, setup.value_size);
    // Rows that belong to no sequence must not be read.
    for row in 0..batch.tokens {
        let of = |(start, (new, _)): (&usize, &(usize, usize))| (*start..start + new).contains(&row);
        if !batch.start.iter().zip(&setup.sequences).any(of) {
            key.bits[row * key_width..][..key_width].fill(crate::oracle::float::bits(dtype, f64::NAN));
            value.bits[row * value_width..][..value_width].fill(crate::oracle::float::bits(dtype, f64::NAN));
        }
    }
    let (query_values, key_values, value_values) = (query.values(), key.values(), value.values());
    let mut y = vec![Element::Untouched; batch.tokens * heads * setup.value_size];
    let two_sided = setup.mask == AttentionMask::Bidirectional;
    let real = setup.real_sequences.unwrap_or(setup.sequences.len());
    for (sequence, (length, _)) in setup.sequences.iter().enumerate().take(real) {
        let visibility = Visibility {
            mask: setup.mask,
            window: setup.window,
            kv_length: *length,
            query_length: *length,
            two_sided,
        };
        for (token, head) in (0..*length).flat_map(|token| (0..heads).map(move |head| (token, head))) {
            let row = batch.start[sequence] + token;
            let seen_key = |key: usize| {
                let (row, head) = (batch.start[sequence] + key, head / group);
                let distance = token as f64 - key as f64;
                Seen {
                    distance: if two_sided { distance.abs() } else { distance },
                    key: &key_values[row * key_width + head * setup.key_size..][..setup.key_size],
                    value: &value_values[row * value_width + head * setup.value_size..][..setup.value_size],
                }
            };
            let keys = (0..*length).filter(|key| visibility.sees(token, *key, |_| false));
            let seen: Vec<Seen<'_>> = keys.map(seen_key).collect();
            let query = &query_values[(row * heads + head) * setup.key_size..][..setup.key_size];
            let scoring = batch.scoring(setup, head);
            let (reals, _): (Vec<Real>, Real) = attend(scoring, query, &seen, setup.value_size);
            let is_defined = is_defined(scoring, query, &seen);
            for (index, real) in reals.into_iter().enumerate() {
                let element = if is_defined { Element::Real(real) } else { Element::Anything };
                y[(row * heads + head) * setup.value_size + index] = element;
            }
        }
    }
    let rows = setup.layout;
    let gate = Gate { inner: Some(dtype), exponential: true };
    let expected = Expected::new(y).gated(gate).laid(Layout { offset: 1, ..rows }, heads * setup.value_size);
    let per_sequence = Layout::default().with_extent(setup.real_sequences);
    let vector = |all: Vec<usize>| {
        let all: Vec<i32> = all.into_iter().map(|value| value as i32).collect();
        Operand::laid(Tensor::vector(&all), per_sequence)
    };
    let operands = vec![
        Operand::laid(query, rows),
        Operand::laid(key, rows),
        Operand::laid(value, Layout { gap: if rows.gap > 0 { rows.gap + 8 } else { 0 }, ..rows }),
        vector(batch.start.clone()),
        vector(setup.sequences.iter().map(|(new, _)| *new).collect()),
        batch.alibi.clone().and_then(Operand::tensor),
    ];
    let op = Attention {
        query_heads: heads as u32,
        kv_heads: setup.kv_heads as u32,
        scale: batch.scale,
        softcap: setup.softcap,
        window: setup.window as u32,
        mask: setup.mask,
    };
    Case::new(id, CallCase::new(op, operands, vec![expected]))
}

/// The format of the work list is up to the device. These cases test that making it writes nothing else and gives the same bits
/// every time; cases of `paged_attention` test that the list is right.
pub(super) fn prepare(dtype: DType) -> Vec<Case> {
    let one = |setup: Setup| {
        let id = format!("attention_prepare/{dtype}/{}", setup.label);
        let random = Random::named(&id);
        prepare_case(id, random, &setup)
    };
    setups().into_iter().map(one).collect()
}

pub(super) fn drawn_prepare(_: DType, draw: &mut Draw) -> Case {
    let setup = drawn_setup(draw);
    prepare_case(draw.id(), draw.values(), &setup)
}

fn prepare_case(id: String, mut random: Random, setup: &Setup) -> Case {
    let batch = Batch::new(setup, &mut random);
    let layout = Layout::default().with_extent(setup.real_sequences);
    let vector = |all: Vec<usize>| {
        let all: Vec<i32> = all.into_iter().map(|value| value as i32).collect();
        Operand::laid(Tensor::vector(&all), layout)
    };
    let operands = vec![
        vector(batch.start.clone()),
        vector(setup.sequences.iter().map(|(new, _)| *new).collect()),
        vector(setup.sequences.iter().map(|(_, length)| *length).collect()),
    ];
    let op = AttentionPrepare { words: 0 };
    Case::new(id, CallCase::new(op, operands, vec![Expected::new(Vec::new())]))
}
