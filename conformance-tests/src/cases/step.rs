//! Cases of `prepare_step` and `commit_tokens`.

use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand},
    draw::Draw,
    oracle::step::{Planned, Requests, commit, prepare},
    random::Random,
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    op::{CommitTokens, IN_PROMPT, PrepareStep},
};

/// Label, requests, sequences, columns of the block table, slots per page and vocabulary size of each case.
const SHAPES: &[(&str, [usize; 5])] = &[
    ("no_sequences", [3, 0, 2, 4, 10]),
    ("one_sequence", [1, 1, 3, 16, 33]),
    ("pages_of_one", [5, 3, 40, 1, 50]),
    ("mixed", [9, 7, 4, 16, 257]),
    ("many", [64, 40, 5, 16, 100]),
    ("pages_run_out", [8, 8, 1, 4, 20]),
];

/// Shapes just over sizes that a byte or 16 bits count: requests, tokens of a vocabulary, pages and positions.
const THRESHOLDS: &[(&str, [usize; 5])] = &[
    ("requests_300", [300, 290, 2, 4, 9]),
    ("vocabulary_140000", [6, 6, 3, 16, 140_000]),
    ("pages_70000", [70, 5, 1000, 1, 10]),
    ("positions_150000", [3, 3, 5, 30_000, 20]),
];

/// What is special about the tensors of a case.
#[derive(Clone, Copy, Default)]
struct Variant {
    /// Rows behind those of all tokens.
    spare: usize,
    /// Whether there are extents.
    bounded: bool,
    /// The gap between the rows of every table; tables of one shape have gaps of their own.
    gap: usize,
    /// The number of tokens of the longest prompt.
    longest: usize,
    /// How many of the last prompt's tokens lie behind the end of the prompt ids.
    behind: usize,
    /// The extent of the request table; `None` for none. Requests behind it are treated as -1.
    requests: Option<usize>,
}

impl Variant {
    const PLAIN: Self = Self { spare: 0, bounded: false, gap: 0, longest: 20, behind: 0, requests: None };

    /// The layout of table `number` of a case.
    fn table(self, number: usize) -> Layout {
        Layout::strided(if self.gap > 0 { self.gap + number } else { 0 }, 0).with_extent(self.requests)
    }

    /// The layout of a vector with an entry for each request.
    fn vector(self) -> Layout {
        Layout::default().with_extent(self.requests)
    }
}

fn table(random: &mut Random, [capacity, _, blocks, block, vocabulary]: [usize; 5]) -> Requests {
    let mut free = random.shuffled(capacity * blocks).into_iter();
    let mut requests = Requests {
        block_table: Vec::new(),
        last_token: (0..capacity).map(|_| random.below(vocabulary) as i32).collect(),
        finished: (0..capacity).map(|_| i32::from(random.chance(0.2)) * random.pick(&[1, 7, -1])).collect(),
        length: Vec::new(),
        counts: Vec::new(),
    };
    for _ in 0..capacity {
        // Lengths at and near page boundaries.
        let pages = random.below(blocks + 1);
        let length = (pages * block + random.below(3)).saturating_sub(1);
        requests.length.push(length as i32);
        let there = (pages + random.below(2)).min(blocks);
        let page =
            |column: usize| if column < there { free.next().map_or(-1, |page| page as i32) } else { -1 };
        requests.block_table.push((0..blocks).map(page).collect());
        requests.counts.push(
            (0..vocabulary).map(|_| if random.chance(0.1) { random.below(4) as i32 } else { 0 }).collect(),
        );
    }
    requests
}

fn flat(rows: &[Vec<i32>]) -> Vec<i32> {
    rows.iter().flatten().copied().collect()
}

pub(super) fn prepare_step(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (label, shape) in SHAPES {
        // As many rows as tokens, more rows, and extents on all operands.
        for (variant, spare, bounded) in [("full", 0, false), ("padded", 5, false), ("extents", 5, true)] {
            let id = format!("prepare_step/{dtype}/{label}_{variant}");
            let random = Random::named(&id);
            cases.push(prepare_case(id, random, *shape, Variant { spare, bounded, ..Variant::PLAIN }));
        }
    }
    let mixed = [9, 7, 4, 16, 257];
    let further = [
        ("mixed_strided", mixed, Variant { gap: 3, ..Variant::PLAIN }),
        ("long_prompts", mixed, Variant { longest: 700, ..Variant::PLAIN }),
        ("prompt_runs_out", mixed, Variant { behind: 3, longest: 9, ..Variant::PLAIN }),
        ("requests_behind_the_extent", mixed, Variant { requests: Some(6), ..Variant::PLAIN }),
    ];
    let over =
        THRESHOLDS.iter().map(|(label, shape)| (*label, *shape, Variant { spare: 5, ..Variant::PLAIN }));
    for (label, shape, variant) in further.into_iter().chain(over) {
        let id = format!("prepare_step/{dtype}/{label}");
        let random = Random::named(&id);
        cases.push(prepare_case(id, random, shape, variant));
    }
    cases
}

fn drawn_shape(draw: &mut Draw) -> [usize; 5] {
    let capacity = draw.pick(&[1, 2, 7, 16, 64]);
    let sequences = draw.below(capacity + 1);
    [
        capacity,
        sequences,
        draw.pick(&[1, 2, 4, 7, 40]),
        draw.pick(&[16, 1, 4, 7]),
        draw.pick(&[10, 1, 33, 257]),
    ]
}

pub(super) fn drawn_prepare_step(_: DType, draw: &mut Draw) -> Case {
    let shape = drawn_shape(draw);
    let spare = draw.pick(&[0, 5]);
    let bounded = spare > 0 && draw.sometimes();
    prepare_case(draw.id(), draw.values(), shape, Variant { spare, bounded, ..Variant::PLAIN })
}

fn prepare_case(id: String, mut random: Random, shape: [usize; 5], variant: Variant) -> Case {
    let Variant { spare, bounded, longest, behind, .. } = variant;
    let [capacity, sequences, blocks, block, vocabulary] = shape;
    let before = table(&mut random, shape);
    let order = random.shuffled(capacity);
    let mut plan: Vec<Planned> = Vec::new();
    let (mut tokens, mut prompt) = (0usize, 0usize);
    for request in order.into_iter().take(sequences) {
        let length = if random.chance(0.5) { 1 } else { 1 + random.below(longest) };
        let is_prompt = length > 1 || random.chance(0.3);
        plan.push(Planned {
            request: request as i32,
            length: length as i32,
            source: if is_prompt { prompt as i32 } else { -1 },
        });
        tokens += length;
        prompt += if is_prompt { length } else { 0 };
    }
    // The prompt whose tokens come last begins so late that some of them lie behind the end.
    if let Some(last) =
        plan.iter_mut().filter(|planned| planned.source >= 0).max_by_key(|planned| planned.source)
    {
        let all = (tokens + spare) as i32;
        if behind > 0 {
            last.source = all - (last.length - behind as i32).max(0);
        }
    }
    // Padded sequences come last.
    let padded = if spare > 0 { 2 } else { 0 };
    plan.extend(vec![Planned { request: -1, length: 0, source: -1 }; padded]);
    let (real, all) = (tokens + if bounded { 2 } else { spare }, tokens + spare);
    let prompt_ids: Vec<i32> = (0..all).map(|_| random.below(vocabulary) as i32).collect();
    let row = |random: &mut Random| if random.chance(0.2) { -1 } else { random.below(tokens.max(1)) as i32 };
    let rows: Vec<i32> = (0..sequences + 3).map(|_| row(&mut random)).collect();
    let mut after = before.clone();
    let asked = plan.clone();
    for planned in &mut plan {
        if variant.requests.is_some_and(|real| planned.request >= real as i32) {
            *planned = Planned { request: -1, length: 0, source: -1 };
        }
    }
    let step = prepare(&mut after, &plan, &prompt_ids, &rows, all, block);

    let extent = |real: usize| Layout::default().with_extent(bounded.then_some(real));
    let (per_token, per_sequence, per_row) =
        (extent(real), extent(plan.len() - padded / 2), extent(rows.len() - 1));
    let is_finished =
        |planned: &Planned| planned.request >= 0 && before.finished[planned.request as usize] != 0;
    // The start of a sequence without rows and the pages of a finished one are not defined.
    let start = |(planned, start): (&Planned, &i32)| match is_finished(planned) || planned.request < 0 {
        true => Element::Anything,
        false => Element::Bits(*start as u32),
    };
    let pages = |(planned, table): (&Planned, &Vec<i32>)| -> Vec<Element> {
        let open = is_finished(planned);
        let one = |page: &i32| {
            if open { Element::OneOf(vec![*page as u32, u32::MAX]) } else { Element::Bits(*page as u32) }
        };
        table.iter().map(one).collect()
    };
    let results = vec![
        Expected::integers(&step.ids).laid(per_token, 1),
        Expected::integers(&step.positions).laid(per_token, 1),
        Expected::integers(&step.slots).laid(per_token, 1),
        Expected::new(plan.iter().zip(&step.query_start).map(start).collect()).laid(per_sequence, 1),
        Expected::integers(&step.query_length).laid(per_sequence, 1),
        Expected::integers(&step.kv_length).laid(per_sequence, 1),
        Expected::new(plan.iter().zip(&step.tables).flat_map(pages).collect())
            .laid(Layout { gap: variant.table(1).gap, ..per_sequence }, blocks),
        Expected::integers(&step.row_positions).laid(per_row, 1),
        Expected::integers(&after.length).laid(variant.vector(), 1),
        Expected::integers(&flat(&after.counts)).laid(variant.vector(), vocabulary),
    ];
    let vector = |all: Vec<i32>, layout: Layout| Operand::laid(Tensor::vector(&all), layout);
    let operands = vec![
        vector(asked.iter().map(|planned| planned.request).collect(), per_sequence),
        vector(asked.iter().map(|planned| planned.length).collect(), per_sequence),
        vector(asked.iter().map(|planned| planned.source).collect(), per_sequence),
        vector(prompt_ids, per_token),
        vector(rows, per_row),
        Operand::laid(Tensor::integers(&[capacity, blocks], &flat(&before.block_table)), variant.table(0)),
        vector(before.last_token.clone(), variant.vector()),
        vector(before.finished.clone(), variant.vector()),
        vector(before.length.clone(), variant.vector()),
        Operand::laid(Tensor::integers(&[capacity, vocabulary], &flat(&before.counts)), variant.table(2)),
    ];
    Case::new(id, CallCase::new(PrepareStep { block_size: block as u32 }, operands, results))
}

pub(super) fn commit_tokens(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (label, shape) in SHAPES {
        for (variant, stops, bounded) in [("plain", 0, false), ("stops", 3, false), ("extent", 40, true)] {
            let id = format!("commit_tokens/{dtype}/{label}_{variant}");
            let random = Random::named(&id);
            cases.push(commit_case(id, random, *shape, stops, Variant { bounded, ..Variant::PLAIN }));
        }
    }
    let mixed = [9, 7, 4, 16, 257];
    let further = [
        ("mixed_strided", mixed, Variant { gap: 5, ..Variant::PLAIN }),
        ("requests_behind_the_extent", mixed, Variant { requests: Some(6), ..Variant::PLAIN }),
    ];
    let over = THRESHOLDS.iter().map(|(label, shape)| (*label, *shape, Variant::PLAIN));
    for (label, shape, variant) in further.into_iter().chain(over) {
        let id = format!("commit_tokens/{dtype}/{label}");
        let random = Random::named(&id);
        cases.push(commit_case(id, random, shape, 70, variant));
    }
    cases
}

pub(super) fn drawn_commit_tokens(_: DType, draw: &mut Draw) -> Case {
    let (shape, stops) = (drawn_shape(draw), draw.pick(&[0, 1, 3, 40]));
    let bounded = draw.sometimes();
    commit_case(draw.id(), draw.values(), shape, stops, Variant { bounded, ..Variant::PLAIN })
}

fn commit_case(
    id: String,
    mut random: Random,
    shape: [usize; 5],
    stops: usize,
    Variant { bounded, gap, requests: real, .. }: Variant,
) -> Case {
    let [capacity, _, _, _, vocabulary] = shape;
    let mut before = table(&mut random, shape);
    // No request occurs twice; some rows are skipped because of their request, some because of their token.
    let rows: Vec<(i32, i32)> = random
        .shuffled(capacity + 3)
        .into_iter()
        .map(|request| {
            let id = if random.chance(0.2) { -1 } else { random.below(vocabulary) as i32 };
            (if request < capacity { request as i32 } else { -1 }, id)
        })
        .collect();
    let stop = |random: &mut Random| if random.chance(0.3) { -1 } else { random.below(vocabulary) as i32 };
    let stop_ids: Vec<i32> = (0..stops).map(|_| stop(&mut random)).collect();
    let extent = bounded.then_some(rows.len() / 2);
    // Every other token that is counted stands in the prompt too.
    // Some stand at the end of what a byte or 16 bits count, and one at the largest count, where it stays.
    let counted = |(request, id): &&(i32, i32)| *request >= 0 && *id >= 0;
    for (number, (request, id)) in rows.iter().filter(counted).enumerate() {
        let count = &mut before.counts[*request as usize][*id as usize];
        if number % 4 == 3 {
            *count = [255, 65_535, IN_PROMPT - 2, IN_PROMPT - 1][number / 4 % 4];
        }
        if number.is_multiple_of(2) || number % 16 == 15 {
            *count |= IN_PROMPT;
        }
    }
    let mut after = before.clone();
    let there = |(request, id): &(i32, i32)| match real {
        Some(real) if *request >= real as i32 => (-1, *id),
        _ => (*request, *id),
    };
    let valid: Vec<(i32, i32)> = rows[..extent.unwrap_or(rows.len())].iter().map(there).collect();
    commit(&mut after, &valid, &stop_ids);
    let layout = Layout::default().with_extent(extent);
    let per_request = Layout::default().with_extent(real);
    let (requests, ids): (Vec<i32>, Vec<i32>) = rows.into_iter().unzip();
    let operands = vec![
        Operand::laid(Tensor::vector(&requests), layout),
        Operand::laid(Tensor::vector(&ids), layout),
        Operand::tensor(Tensor::vector(&stop_ids)),
        Operand::laid(Tensor::vector(&before.last_token), per_request),
        Operand::laid(Tensor::vector(&before.finished), per_request),
        Operand::laid(
            Tensor::integers(&[capacity, vocabulary], &flat(&before.counts)),
            Layout { gap, ..per_request },
        ),
    ];
    let results = vec![
        Expected::integers(&after.last_token).laid(per_request, 1),
        Expected::integers(&after.finished).laid(per_request, 1),
        Expected::integers(&flat(&after.counts)).laid(per_request, vocabulary),
    ];
    Case::new(id, CallCase::new(CommitTokens {}, operands, results))
}
