//! Cases of `logit_process`, `argmax` and `sample`.

use super::{
    plane::{Plane, drawn, drawn_layout, planes, special_planes, threshold_planes},
    wanted::is_wanted,
};
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand},
    draw::Draw,
    gate::Gate,
    oracle::sampling::{self, Filters, Penalties},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    op::{Argmax, IN_PROMPT, LogitProcess, SAMPLING_COLUMNS, Sample, SamplingColumn},
};

/// The sampling parameters of a request.
fn parameters(filters: Filters, penalties: Penalties) -> [f64; SAMPLING_COLUMNS] {
    let mut row = [0.0; SAMPLING_COLUMNS];
    let mut set = |column: SamplingColumn, value: f64| row[column as usize] = value;
    set(SamplingColumn::Temperature, filters.temperature);
    set(SamplingColumn::TopK, filters.top_k as f64);
    set(SamplingColumn::TopP, filters.top_p);
    set(SamplingColumn::MinP, filters.min_p);
    set(SamplingColumn::RepetitionPenalty, penalties.repetition);
    set(SamplingColumn::PresencePenalty, penalties.presence);
    set(SamplingColumn::FrequencyPenalty, penalties.frequency);
    row
}

const GREEDY: Filters = Filters { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
const PLAIN: Filters = Filters { temperature: 1.0, ..GREEDY };
const NO_PENALTIES: Penalties = Penalties { repetition: 1.0, presence: 0.0, frequency: 0.0 };

/// The layout of a table of requests beside a tensor with this one: if that has gaps, with gaps of another size.
fn gaps(beside: Layout, more: usize) -> Layout {
    Layout::strided(if beside.gap > 0 { beside.gap + 4 * more } else { 0 }, 0)
}

/// The requests of the rows in random order, some of them -1.
fn requests(random: &mut Random, rows: usize, capacity: usize) -> Vec<i32> {
    // In a long batch, whole tiles in the middle are padding.
    let padding = |row: usize| row % 7 == 4 || (rows == 70 && (16..50).contains(&row));
    (0..rows).map(|row| if padding(row) { -1 } else { random.below(capacity) as i32 }).collect()
}

pub(super) fn logit_process(dtype: DType) -> Vec<Case> {
    let mut planes = planes("logit_process", dtype, &Values::USUAL, |features| features);
    planes.extend(special_planes("logit_process", dtype, |features| features));
    planes.extend(threshold_planes("logit_process", dtype, |features| features));
    planes.into_iter().map(|plane| process_case(dtype, plane)).collect()
}

pub(super) fn drawn_logit_process(dtype: DType, draw: &mut Draw) -> Case {
    process_case(dtype, drawn(draw, &Values::USUAL, |features| features))
}

fn process_case(dtype: DType, plane: Plane) -> Case {
    let (mut random, rows, vocabulary) = (plane.random.clone(), plane.rows, plane.features);
    // Special values, unequal extents and vocabularies of all sizes meet all operands.
    let with_all = ["special_", "columns_", "/extent"].iter().any(|part| plane.id.contains(part));
    let capacity = 1 + random.below(9);
    let logits = random.tensor(dtype, &[rows, vocabulary], plane.values);
    let requests = requests(&mut random, rows, capacity);
    // All values are exact in f32, so that device and oracle use the same numbers.
    let penalties: Vec<Penalties> = (0..capacity)
        .map(|_| Penalties {
            repetition: random.pick(&[1.0, 1.25, 2.0, 0.5]),
            presence: random.pick(&[0.0, 0.5, -0.25]),
            frequency: random.pick(&[0.0, 0.125, -0.5]),
        })
        .collect();
    let table: Vec<f64> = penalties.iter().flat_map(|penalties| parameters(PLAIN, *penalties)).collect();
    // In some cases tokens were generated more often than a byte or 16 bits can count.
    let most = if plane.id.contains("special_") || plane.id.contains("columns_") { 100_000 } else { 5 };
    let count = |random: &mut Random| match random.below(4) {
        0 => random.below(most) as i32,
        1 => IN_PROMPT,
        2 => IN_PROMPT | random.below(most) as i32,
        _ => 0,
    };
    let counts: Vec<i32> = (0..capacity * vocabulary).map(|_| count(&mut random)).collect();
    let bias = (with_all || plane.number % 2 == 1).then(|| {
        let value =
            |random: &mut Random| if random.chance(0.1) { f64::NEG_INFINITY } else { random.normal() };
        let all: Vec<f64> = (0..capacity * vocabulary).map(|_| value(&mut random)).collect();
        Tensor::floats(DType::F32, &[capacity, vocabulary], &all)
    });
    let words = vocabulary.div_ceil(32);
    let mask = (with_all || !plane.number.is_multiple_of(3)).then(|| {
        let all: Vec<u32> = (0..rows * words).map(|_| random.bits() as u32).collect();
        Tensor::words(&[rows, words], &all)
    });
    let (values, biases) = (logits.values(), bias.as_ref().map(|bias| bias.values()));
    let element = |index: usize| {
        let (row, token) = (index / vocabulary, index % vocabulary);
        let Ok(request) = usize::try_from(requests[row]) else { return Element::Untouched };
        let allowed =
            mask.as_ref().is_none_or(|mask| mask.bits[row * words + token / 32] >> (token % 32) & 1 == 1);
        let entry = request * vocabulary + token;
        let bias = biases.as_ref().map_or(0.0, |bias| bias[entry]);
        Element::Real(sampling::process(values[index], counts[entry], penalties[request], bias, allowed))
    };
    let expected = Expected::new((0..values.len()).map(element).collect()).laid(plane.other(5), vocabulary);
    let vector = Layout { gap: 0, ..plane.layout };
    let gaps = |more: usize| gaps(plane.layout, more);
    let operands = vec![
        Operand::laid(logits, plane.layout),
        Operand::laid(Tensor::vector(&requests), vector),
        Operand::laid(Tensor::floats(DType::F32, &[capacity, SAMPLING_COLUMNS], &table), gaps(1)),
        Operand::laid(Tensor::integers(&[capacity, vocabulary], &counts), gaps(0)),
        bias.and_then(|bias| Operand::laid(bias, gaps(2))),
        mask.and_then(|mask| Operand::laid(mask, plane.layout)),
    ];
    Case::new(plane.id, CallCase::new(LogitProcess {}, operands, vec![expected]))
}

const KINDS: &[Values] =
    &[Values::Uniform, Values::HeavyTailed, Values::LargeMean, Values::Special, Values::Subnormal];

pub(super) fn drawn_argmax(dtype: DType, draw: &mut Draw) -> Case {
    argmax_plane(dtype, drawn(draw, KINDS, |features| features))
}

fn argmax_plane(dtype: DType, plane: Plane) -> Case {
    let mut random = plane.random.clone();
    let mut x = random.tensor(dtype, &[plane.rows, plane.features], plane.values);
    // Every third row repeats its values, so that the maximum occurs more than once.
    for row in x.bits.chunks_mut(plane.features).step_by(3) {
        let half = row.len() / 2;
        let (first, second) = row.split_at_mut(half);
        second[..half].copy_from_slice(first);
    }
    argmax_case(plane.id, &x, plane.features, plane.layout)
}

pub(super) fn argmax(dtype: DType) -> Vec<Case> {
    let mut planes = planes("argmax", dtype, KINDS, |features| features);
    planes.extend(threshold_planes("argmax", dtype, |features| features));
    let mut cases: Vec<Case> = planes.into_iter().map(|plane| argmax_plane(dtype, plane)).collect();
    let rows: [[f64; 3]; 6] = [
        [f64::NAN; 3],
        [f64::NEG_INFINITY; 3],
        [f64::NAN, f64::NEG_INFINITY, f64::NAN],
        [f64::NAN, 1.0, f64::INFINITY],
        [f64::INFINITY, f64::NAN, f64::INFINITY],
        [-0.0, 0.0, 0.0],
    ];
    let x = Tensor::floats(dtype, &[6, 3], rows.as_flattened());
    cases.push(argmax_case(format!("argmax/{dtype}/edges_of_the_numbers"), &x, 3, Layout::default()));
    let x = Tensor::floats(dtype, &[4, 1], &[f64::NAN, f64::NEG_INFINITY, -1.0, f64::INFINITY]);
    cases.push(argmax_case(format!("argmax/{dtype}/edges_in_one_column"), &x, 1, Layout::default()));
    let id = format!("argmax/{dtype}/special_subnormals");
    let tiny = Random::named(&id).scaled(dtype, &[13, 61], Values::Subnormal, 0.2);
    cases.push(argmax_case(id, &tiny, 61, Layout::default()));
    // More columns than 17 bits count, as in the largest vocabularies.
    let id = format!("argmax/{dtype}/columns_262145");
    let mut long = Random::named(&id).tensor(dtype, &[1, 262_145], Values::Uniform);
    long.bits[262_143] = crate::oracle::float::bits(dtype, 2.0);
    cases.push(argmax_case(id, &long, 262_145, Layout::default()));
    let empty = Tensor::floats(dtype, &[3, 0], &[]);
    cases.push(argmax_case(format!("argmax/{dtype}/empty_rows"), &empty, 0, Layout::default()));
    cases
}

fn argmax_case(id: String, x: &Tensor, columns: usize, layout: Layout) -> Case {
    let values = x.values();
    let row = |row: usize| {
        let row = &values[row * columns..][..columns];
        let id = sampling::argmax(row);
        // In a row of NaN and minus infinity only, either index is right.
        let lowest = row.iter().position(|x| *x == f64::NEG_INFINITY);
        match lowest {
            Some(lowest) if row.iter().all(|x| x.is_nan() || *x == f64::NEG_INFINITY) => {
                Element::OneOf(vec![id as u32, lowest as u32])
            }
            _ => Element::Bits(id as u32),
        }
    };
    let expected = Expected::new((0..x.shape[0]).map(row).collect()).laid(Layout { gap: 0, ..layout }, 1);
    Case::new(id, CallCase::new(Argmax {}, vec![Operand::laid(x.clone(), layout)], vec![expected]))
}

/// The inputs of a batch that is sampled.
struct Batch {
    id: String,
    vocabulary: usize,
    layout: Layout,
    logits: Tensor,
    requests: Vec<i32>,
    positions: Vec<i32>,
    filters: Vec<Filters>,
    seeds: Vec<u32>,
    distribution: Option<Vec<f64>>,
}

impl Batch {
    fn case(self) -> Case {
        let values = self.logits.values();
        let (mut ids, mut log_probabilities) = (Vec::new(), Vec::new());
        let mut notes = vec!["padding".to_owned(); self.requests.len()];
        for (row, request) in self.requests.iter().enumerate() {
            let Ok(request) = usize::try_from(*request) else {
                ids.push(Element::Bits(-1i32 as u32));
                log_probabilities.push(Element::Bits(0));
                continue;
            };
            let seed = [self.seeds[2 * request], self.seeds[2 * request + 1]];
            let logits = &values[row * self.vocabulary..][..self.vocabulary];
            let draw = sampling::sample(logits, self.filters[request], seed, self.positions[row]);
            notes[row] = self.filters[request].to_string();
            // If several tokens may win, the log-probability depends on which of them does.
            let [id] = draw.ids[..] else {
                ids.push(Element::OneOf(draw.ids.iter().map(|id| *id as u32).collect()));
                log_probabilities.push(Element::Anything);
                continue;
            };
            ids.push(Element::Bits(id as u32));
            log_probabilities.push(Element::Real(draw.log_probabilities[0]));
        }
        let vector = Layout { gap: 0, ..self.layout };
        let gate = Gate { inner: None, exponential: true };
        let results = vec![
            Expected {
                distribution: self.distribution,
                notes: notes.clone(),
                ..Expected::new(ids).laid(vector, 1)
            },
            Expected { notes, ..Expected::new(log_probabilities).gated(gate).laid(vector, 1) },
        ];
        let capacity = self.filters.len();
        let table: Vec<f64> =
            self.filters.iter().flat_map(|filters| parameters(*filters, NO_PENALTIES)).collect();
        let operands = vec![
            Operand::laid(self.logits, self.layout),
            Operand::laid(Tensor::vector(&self.requests), vector),
            Operand::laid(Tensor::vector(&self.positions), vector),
            Operand::laid(
                Tensor::floats(DType::F32, &[capacity, SAMPLING_COLUMNS], &table),
                gaps(self.layout, 1),
            ),
            Operand::laid(Tensor::words(&[capacity, 2], &self.seeds), gaps(self.layout, 2)),
        ];
        Case::new(self.id, CallCase::new(Sample {}, operands, results))
    }
}

/// The filters of the cases; all numbers are exact in f32.
const FILTERS: &[(&str, Filters)] = &[
    ("greedy", GREEDY),
    ("plain", PLAIN),
    ("cold", Filters { temperature: 0.25, ..PLAIN }),
    ("hot", Filters { temperature: 2.5, ..PLAIN }),
    ("top_k", Filters { top_k: 5, ..PLAIN }),
    ("top_k_of_one", Filters { top_k: 1, ..PLAIN }),
    ("top_k_of_all", Filters { top_k: 100_000, ..PLAIN }),
    ("top_p", Filters { top_p: 0.75, ..PLAIN }),
    ("top_p_of_little", Filters { top_p: 0.0625, ..PLAIN }),
    ("min_p", Filters { min_p: 0.125, ..PLAIN }),
    ("all", Filters { temperature: 0.75, top_k: 20, top_p: 0.875, min_p: 0.03125 }),
];

/// Filters off the beaten track, each alone and all of them side by side; all numbers are exact in f32.
const UNUSUAL_FILTERS: &[(&str, Filters)] = &[
    ("freezing", Filters { temperature: 0.05078125, ..PLAIN }),
    ("boiling", Filters { temperature: 50.0, ..PLAIN }),
    ("top_k_of_257", Filters { top_k: 257, ..PLAIN }),
    ("top_k_of_700", Filters { top_k: 700, ..PLAIN }),
    ("cold_top_k_of_300", Filters { temperature: 0.0625, top_k: 300, ..PLAIN }),
    ("top_p_of_most", Filters { top_p: 0.9990234375, ..PLAIN }),
    ("cold_top_p", Filters { temperature: 0.125, top_p: 0.5, ..PLAIN }),
    ("hot_top_p", Filters { temperature: 3.0, top_p: 0.9375, ..PLAIN }),
    ("min_p_of_half", Filters { min_p: 0.5, ..PLAIN }),
    ("min_p_of_little", Filters { min_p: 0.001953125, ..PLAIN }),
    ("hot_min_p", Filters { temperature: 4.0, min_p: 0.25, ..PLAIN }),
    ("top_k_and_min_p", Filters { top_k: 300, min_p: 0.0078125, ..PLAIN }),
    ("top_k_and_top_p", Filters { top_k: 300, top_p: 0.75, ..PLAIN }),
    ("coldest", Filters { temperature: 0.0009765625, ..PLAIN }),
    ("top_p_of_nothing", Filters { top_p: 0.0, ..PLAIN }),
];

/// Label, rows and vocabulary size of cases with unusual filters, and of those just over sizes at which kernels change.
const UNUSUAL_ROWS: &[(&str, usize, usize)] =
    &[("few", 9, 1009), ("wide", 2, 32_003), ("vocabulary_257", 5, 257), ("vocabulary_8193", 2, 8193)];

/// Label, rows and vocabulary size of each case.
const ROWS: &[(&str, usize, usize)] = &[
    ("no_rows", 0, 32),
    ("one_token", 3, 1),
    ("odd", 33, 31),
    ("tile", 17, 128),
    ("prime", 13, 1009),
    ("wide", 3, 32_003),
];

pub(super) fn sample(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (label, rows, vocabulary) in ROWS.iter().copied() {
        for (filter, filters) in FILTERS {
            let id = format!("sample_{filter}/{dtype}/{label}");
            if !is_wanted(&id) {
                continue;
            }
            let mut random = Random::named(&id);
            let logits = random.scaled(dtype, &[rows, vocabulary], Values::Uniform, 6.0);
            let layout = Layout::strided(random.pick(&[0, 8]), 0);
            cases.push(mixed(id, &mut random, logits, layout, &[*filters]));
        }
        // A batch with all filters, rows past the extent, special values and ties.
        for (values, extent) in
            [(Values::HeavyTailed, None), (Values::Special, Some(rows / 2)), (Values::Uniform, Some(0))]
        {
            let id = format!("sample_mixed_{}/{dtype}/{label}", format!("{values:?}").to_lowercase());
            if !is_wanted(&id) {
                continue;
            }
            let mut random = Random::named(&id);
            let mut logits = random.tensor(dtype, &[rows, vocabulary], values);
            for bits in &mut logits.bits {
                let value = f32::from_bits(*bits);
                // The result for +inf is not defined. Multiples of 1/4 make ties.
                let value = if value == f32::INFINITY { 2.0 } else { (value * 4.0).round() / 4.0 };
                *bits = value.to_bits();
            }
            let filters: Vec<Filters> = FILTERS.iter().map(|(_, filters)| *filters).collect();
            cases.push(mixed(id, &mut random, logits, Layout::default().with_extent(extent), &filters));
        }
    }
    for (label, rows, vocabulary) in UNUSUAL_ROWS.iter().copied() {
        for (filter, filters) in UNUSUAL_FILTERS {
            let id = format!("sample_{filter}/{dtype}/{label}");
            if !is_wanted(&id) {
                continue;
            }
            let mut random = Random::named(&id);
            let logits = random.scaled(dtype, &[rows, vocabulary], Values::Uniform, 6.0);
            cases.push(mixed(id, &mut random, logits, Layout::default(), &[*filters]));
        }
    }
    let unusual: Vec<Filters> = UNUSUAL_FILTERS.iter().map(|(_, filters)| *filters).collect();
    for (label, rows, vocabulary) in
        [("padded_in_the_middle", 70, 257), ("vocabulary_65537", 3, 65_537), ("rows_1025", 1025, 7)]
    {
        let id = format!("sample_unusual/{dtype}/{label}");
        if !is_wanted(&id) {
            continue;
        }
        let mut random = Random::named(&id);
        let logits = random.scaled(dtype, &[rows, vocabulary], Values::Uniform, 6.0);
        cases.push(mixed(id, &mut random, logits, Layout::default(), &unusual));
    }
    cases.push(hopeless(dtype));
    cases.push(late_tokens(dtype));
    // The one case whose tensors have their extents one by one.
    let id = format!("sample_mixed/{dtype}/extent");
    let mut random = Random::named(&id);
    let logits = random.scaled(dtype, &[12, 61], Values::Uniform, 6.0);
    let layout = Layout::strided(3, 1).with_extent(Some(7));
    cases.push(mixed(id, &mut random, logits, layout, &[GREEDY, PLAIN, Filters { top_k: 7, ..PLAIN }]));
    // Tokens that are nearly as likely as each other, so that those just inside and just outside a filter are drawn.
    // Of 700 tokens min-p keeps about 320.
    let both = Filters { top_k: 700, min_p: 0.96875, ..PLAIN };
    for (label, filters) in [
        ("top_k_of_257", UNUSUAL_FILTERS[2].1),
        ("top_k_of_700", UNUSUAL_FILTERS[3].1),
        ("top_k_and_min_p", both),
    ] {
        let id = format!("sample_{label}/{dtype}/flat");
        if !is_wanted(&id) {
            continue;
        }
        let mut random = Random::named(&id);
        let logits = random.scaled(dtype, &[400, 1009], Values::Uniform, 0.05);
        cases.push(mixed(id, &mut random, logits, Layout::default(), &[filters]));
    }
    cases.extend(
        FILTERS
            .iter()
            .filter(|(_, filters)| filters.temperature > 0.0)
            .map(|(label, filters)| (format!("sample_distribution/{dtype}/{label}"), *filters))
            .filter(|(id, _)| is_wanted(id))
            .map(|(id, filters)| chi_square(id, filters)),
    );
    cases
}

pub(super) fn drawn_sample(dtype: DType, draw: &mut Draw) -> Case {
    let (rows, vocabulary) =
        (draw.pick(&[1, 0, 2, 7, 17, 33]), draw.pick(&[2, 1, 7, 31, 32, 33, 128, 257, 1009]));
    let layout = Layout { offset: 0, ..drawn_layout(draw, rows) };
    let filters: Vec<Filters> = match draw.below(FILTERS.len() + 1) {
        0 => vec![PLAIN],
        all if all == FILTERS.len() => FILTERS.iter().map(|(_, filters)| *filters).collect(),
        one => vec![FILTERS[one].1],
    };
    let (values, factor) = (draw.pick(&[Values::Uniform, Values::HeavyTailed]), draw.pick(&[6.0, 0.5]));
    let mut random = draw.values();
    let logits = random.scaled(dtype, &[rows, vocabulary], values, factor);
    mixed(draw.id(), &mut random, logits, layout, &filters)
}

fn mixed(id: String, random: &mut Random, logits: Tensor, layout: Layout, filters: &[Filters]) -> Case {
    let (rows, vocabulary) = (logits.shape[0], logits.shape[1]);
    let capacity = filters.len();
    let batch = Batch {
        id,
        vocabulary,
        layout,
        requests: requests(random, rows, capacity),
        // Near ones, and any at all.
        positions: (0..rows)
            .map(|row| if row % 3 == 1 { (random.bits() >> 33) as i32 } else { random.below(100_000) as i32 })
            .collect(),
        filters: filters.to_vec(),
        seeds: (0..2 * capacity).map(|_| random.bits() as u32).collect(),
        logits,
        distribution: None,
    };
    batch.case()
}

/// Rows in which only tokens beyond 17 bits can be drawn.
fn late_tokens(dtype: DType) -> Case {
    const FIRST: usize = (1 << 17) + 5;
    let id = format!("sample_plain/{dtype}/late_tokens");
    let mut random = Random::named(&id);
    let mut logits = random.scaled(dtype, &[6, FIRST + 40], Values::Uniform, 2.0);
    for row in logits.bits.chunks_mut(FIRST + 40) {
        row[..FIRST].fill(f32::NEG_INFINITY.to_bits());
    }
    mixed(id, &mut random, logits, Layout::default(), &[PLAIN])
}

/// Rows without a token that can be drawn, and with exactly one.
fn hopeless(dtype: DType) -> Case {
    let (nothing, nan) = (f64::NEG_INFINITY, f64::NAN);
    let rows = [[nothing; 4], [nan; 4], [nan, nothing, nan, nothing], [nothing, -3.0, nan, nothing]];
    let logits: Vec<f64> = rows.iter().chain(&rows).flatten().copied().collect();
    let all = Filters { top_k: 3, top_p: 0.5, min_p: 0.5, ..PLAIN };
    let batch = Batch {
        id: format!("sample/{dtype}/nothing_to_draw"),
        vocabulary: 4,
        layout: Layout::default(),
        logits: Tensor::floats(dtype, &[8, 4], &logits),
        requests: vec![0, 0, 0, 0, 1, 1, 1, 1],
        positions: vec![0; 8],
        filters: vec![PLAIN, all],
        seeds: vec![1, 2, 3, 4],
        distribution: None,
    };
    batch.case()
}

/// A hundred thousand draws from equal rows of logits, which differ in their positions only.
fn chi_square(id: String, filters: Filters) -> Case {
    const DRAWS: usize = 100_000;
    let mut random = Random::named(&id);
    let row = random.scaled(DType::F32, &[16], Values::Uniform, 2.0);
    let values = row.values();
    let kept = sampling::filter(&values, filters);
    let weight = |token: usize| (values[token] / filters.temperature).exp();
    let total: f64 = kept.iter().map(|(token, _)| weight(*token)).sum();
    let mut distribution = vec![0.0; 16];
    kept.iter().for_each(|(token, _)| distribution[*token] = weight(*token) / total);
    let batch = Batch {
        id,
        vocabulary: 16,
        layout: Layout::default(),
        logits: Tensor { dtype: DType::F32, shape: vec![DRAWS, 16], bits: row.bits.repeat(DRAWS) },
        requests: vec![0; DRAWS],
        positions: (0..DRAWS as i32).collect(),
        filters: vec![filters],
        seeds: vec![random.bits() as u32, random.bits() as u32],
        distribution: Some(distribution),
    };
    batch.case()
}
