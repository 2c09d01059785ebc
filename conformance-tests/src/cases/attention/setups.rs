//! Steps for the attention ops: edge cases and random ones.

use super::special::Special;
use crate::{case::Layout, cases::plane::drawn_layout, draw::Draw, random::Random};
use dsrun_core::op::AttentionMask;

/// The sequences of a step, and the attributes of its attention.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) label: &'static str,
    /// The number of new tokens and of all tokens, for each sequence.
    pub(super) sequences: Vec<(usize, usize)>,
    pub(super) query_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) key_size: usize,
    pub(super) value_size: usize,
    pub(super) block: usize,
    pub(super) window: usize,
    pub(super) softcap: f32,
    pub(super) mask: AttentionMask,
    pub(super) alibi: bool,
    pub(super) sinks: bool,
    /// The number of rows behind each sequence that belong to no sequence.
    pub(super) spare: usize,
    pub(super) layout: Layout,
    /// The extent of the sequences: how many are real; `None` for all.
    pub(super) real_sequences: Option<usize>,
    /// Whether there is one cache, and the value of a key is its first elements.
    pub(super) shared_values: bool,
    /// Whether the query, and with it the result, is f32 even if the cache is not.
    pub(super) wide_query: bool,
    /// The numbers out of the ordinary among the operands.
    pub(super) special: Special,
}

impl Setup {
    pub(super) fn new(
        label: &'static str,
        sequences: &[(usize, usize)],
        [query_heads, kv_heads, size]: [usize; 3],
    ) -> Self {
        Self {
            label,
            sequences: sequences.to_vec(),
            query_heads,
            kv_heads,
            key_size: size,
            value_size: size,
            block: 16,
            window: 0,
            softcap: 0.0,
            mask: AttentionMask::Causal,
            alibi: false,
            sinks: false,
            spare: 0,
            layout: Layout::default(),
            real_sequences: None,
            shared_values: false,
            wide_query: false,
            special: Special::default(),
        }
    }
}

/// A list of `count` sequences, each with its number of new and of all tokens.
fn many(count: usize, each: impl Fn(usize) -> (usize, usize)) -> Vec<(usize, usize)> {
    (0..count).map(each).collect()
}

pub(super) fn setups() -> Vec<Setup> {
    use AttentionMask::{Bidirectional, Explicit};
    let mixed: &[(usize, usize)] = &[(1, 33), (5, 5), (3, 19), (1, 1), (7, 40)];
    let prompts: &[(usize, usize)] = &[(1, 33), (100, 150), (0, 0), (3, 19), (17, 200), (1, 1), (16, 16)];
    let new = Setup::new;
    vec![
        new("no_sequences", &[], [2, 1, 16]),
        new("one_token", &[(1, 1)], [1, 1, 64]),
        new("decode_at_page_bounds", &[(1, 15), (1, 16), (1, 17), (1, 32)], [3, 3, 64]),
        new("prompts_at_page_bounds", &[(15, 15), (16, 16), (17, 17)], [2, 2, 64]),
        new("group_of_three", mixed, [9, 3, 64]),
        new("group_of_four_head_80", mixed, [8, 2, 80]),
        new("group_of_eight_head_96", mixed, [8, 1, 96]),
        new("head_128", &[(1, 70), (2, 2)], [4, 4, 128]),
        new("head_256", &[(2, 9)], [2, 1, 256]),
        new("odd_head", mixed, [3, 1, 5]),
        new("long", &[(1, 2100), (2, 1025)], [2, 1, 32]),
        // More sequences than a device has resident blocks, so that blocks loop; without prompts and with some. The heads are
        // small, because all cases of a group are made before one runs.
        new(
            "many_tokens",
            &many(540, |number| (1, if number == 99 { 300 } else { 1 + number % 16 })),
            [4, 4, 8],
        ),
        new(
            "many_tokens_uneven",
            &many(540, |number| (1, if number == 99 { 4200 } else { 1 + number % 16 })),
            [4, 4, 8],
        ),
        new(
            "many_tokens_uneven_groups_of_nine",
            &many(540, |number| (1, if number == 99 { 4200 } else { 1 + number % 16 })),
            [36, 4, 72],
        ),
        Setup {
            alibi: true,
            sinks: true,
            window: 11,
            softcap: 3.0,
            ..new(
                "many_tokens_uneven_everything",
                &many(540, |number| (1, if number == 99 { 4200 } else { 1 + number % 40 })),
                [8, 4, 16],
            )
        },
        new(
            "many_beside_prompts_uneven",
            &many(710, |number| match number {
                99 => (1, 4200),
                _ => (if number % 70 == 9 { 16 } else { 1 }, 16),
            }),
            [3, 3, 8],
        ),
        new(
            "many_beside_prompts",
            &many(710, |number| (if number % 70 == 9 { 16 } else { 1 }, 16)),
            [3, 3, 8],
        ),
        Setup { value_size: 24, ..new("unlike_sizes", mixed, [4, 2, 16]) },
        Setup { block: 1, ..new("pages_of_one", &[(1, 7), (4, 4)], [2, 1, 16]) },
        Setup { block: 7, ..new("odd_pages", mixed, [2, 1, 16]) },
        Setup { window: 8, ..new("window", mixed, [4, 2, 32]) },
        Setup { window: 1, ..new("window_of_one", mixed, [4, 2, 32]) },
        Setup { window: 1000, ..new("window_of_all", mixed, [4, 2, 32]) },
        Setup { softcap: 5.0, ..new("softcap", mixed, [4, 2, 32]) },
        Setup { alibi: true, ..new("alibi", mixed, [4, 2, 32]) },
        Setup { sinks: true, ..new("sinks", mixed, [4, 2, 32]) },
        Setup { alibi: true, sinks: true, window: 8, softcap: 3.0, ..new("everything", mixed, [6, 2, 32]) },
        Setup { mask: Bidirectional, ..new("bidirectional", mixed, [4, 2, 32]) },
        Setup { mask: Explicit, ..new("explicit", &[(40, 57), (1, 9), (7, 7)], [4, 2, 32]) },
        Setup { mask: Explicit, window: 4, ..new("explicit_window", &[(33, 50), (5, 5)], [2, 1, 32]) },
        Setup { mask: Explicit, sinks: true, ..new("explicit_sinks", &[(5, 5), (3, 20)], [2, 1, 32]) },
        Setup { spare: 2, ..new("rows_of_no_sequence", &[(1, 33), (0, 0), (3, 19), (0, 0)], [4, 2, 32]) },
        Setup { layout: Layout::strided(16, 1), ..new("strided", mixed, [4, 2, 32]) },
        Setup { layout: Layout::strided(3, 0), ..new("strided_oddly", mixed, [4, 2, 32]) },
        Setup { wide_query: true, ..new("f32_query", mixed, [4, 2, 32]) },
        Setup {
            spare: 3,
            layout: Layout { gap: 0, offset: 0, bounded: true, extent: Some(17) },
            ..new("extent", mixed, [4, 2, 32])
        },
        Setup {
            real_sequences: Some(3),
            layout: Layout { gap: 0, offset: 0, bounded: true, extent: Some(9) },
            ..new("sequence_extent", mixed, [4, 2, 32])
        },
        // Sequences long enough for prefill kernels, with single tokens between them.
        new("prompt", &[(150, 200)], [2, 1, 128]),
        new("prompts_and_tokens", prompts, [4, 2, 64]),
        // Queries for only some of the tokens, or for none.
        new("queries_of_some", &[(0, 33), (1, 40), (0, 7), (3, 19), (0, 0), (1, 1), (0, 16)], [4, 2, 32]),
        new("queries_of_some_prompts", &[(0, 70), (20, 90), (1, 33), (0, 5), (2, 18)], [4, 2, 64]),
        new("queries_of_none", &[(0, 33), (0, 1)], [4, 2, 32]),
        new(
            "queries_of_many_uneven",
            &many(720, |number| {
                (usize::from(number % 4 != 1), if number == 99 { 4200 } else { 1 + number % 16 })
            }),
            [4, 4, 8],
        ),
        new("queries_before_the_first_key", &[(1, 0), (3, 1), (2, 9), (20, 3), (1, 4)], [4, 2, 32]),
        new(
            "many_queries_before_the_first_key",
            &many(540, |number| (1, if number == 99 { 4200 } else { number % 3 })),
            [4, 4, 8],
        ),
        // One sequence with few tokens, in a call planned for many rows.
        Setup { spare: 70, ..new("one_token_of_many_rows", &[(1, 200)], [4, 2, 64]) },
        Setup { spare: 70, ..new("few_tokens_of_many_rows", &[(5, 140)], [8, 2, 128]) },
        Setup { spare: 70, ..new("no_token_of_many_rows", &[(0, 33)], [4, 2, 64]) },
        Setup {
            spare: 70,
            alibi: true,
            sinks: true,
            ..new("one_row_of_many_everything", &[(1, 1)], [4, 2, 64])
        },
        new("prompts_of_whole_tiles", &[(128, 128), (64, 256), (16, 128)], [4, 1, 64]),
        new("prompts_head_80", &[(40, 77), (1, 9), (17, 17)], [6, 2, 80]),
        new("prompts_head_96", &[(40, 77), (1, 9), (17, 17)], [7, 1, 96]),
        new("prompts_head_256", &[(40, 77), (1, 9), (17, 17)], [2, 1, 256]),
        Setup { value_size: 128, ..new("prompts_unlike_sizes", prompts, [2, 2, 96]) },
        Setup { block: 7, ..new("prompts_odd_pages", prompts, [2, 1, 64]) },
        Setup { block: 128, ..new("prompts_large_pages", prompts, [2, 1, 64]) },
        Setup { window: 30, ..new("prompts_window", prompts, [4, 2, 64]) },
        Setup {
            softcap: 4.0,
            alibi: true,
            sinks: true,
            window: 140,
            ..new("prompts_everything", prompts, [2, 1, 64])
        },
        Setup { mask: Bidirectional, ..new("prompts_bidirectional", prompts, [4, 2, 64]) },
        Setup { mask: Explicit, sinks: true, ..new("prompts_explicit", prompts, [2, 1, 64]) },
        Setup { layout: Layout::strided(16, 1), ..new("prompts_strided", prompts, [4, 2, 128]) },
        Setup { layout: Layout::strided(3, 0), ..new("prompts_strided_oddly", prompts, [4, 2, 64]) },
        Setup {
            spare: 3,
            layout: Layout { gap: 0, offset: 0, bounded: true, extent: Some(100) },
            ..new("prompts_extent", prompts, [4, 2, 64])
        },
        Setup {
            real_sequences: Some(2),
            layout: Layout { gap: 0, offset: 0, bounded: true, extent: Some(101) },
            ..new("prompts_sequence_extent", prompts, [4, 2, 64])
        },
        // One cache, whose keys begin with their values.
        Setup { value_size: 16, shared_values: true, ..new("shared_values", mixed, [4, 2, 24]) },
        Setup { value_size: 32, shared_values: true, ..new("shared_values_whole", mixed, [4, 1, 32]) },
        Setup {
            value_size: 512,
            shared_values: true,
            ..new("shared_values_576", &[(1, 33), (3, 5)], [8, 1, 576])
        },
        // Just enough keys that some kernels split them, heads that fill tiles of several sizes, and a prompt.
        Setup {
            value_size: 512,
            shared_values: true,
            ..new("shared_values_576_long", &[(1, 260), (1, 2)], [8, 1, 576])
        },
        Setup {
            value_size: 512,
            shared_values: true,
            sinks: true,
            ..new("shared_values_576_many_heads", &[(1, 40)], [40, 1, 576])
        },
        Setup {
            value_size: 512,
            shared_values: true,
            window: 12,
            ..new("shared_values_576_prompts", &[(9, 40), (1, 33), (0, 0)], [20, 1, 576])
        },
        Setup {
            value_size: 64,
            shared_values: true,
            window: 30,
            sinks: true,
            layout: Layout::strided(16, 1),
            ..new("shared_values_prompts", prompts, [8, 1, 80])
        },
        Setup {
            real_sequences: Some(0),
            layout: Layout { gap: 0, offset: 0, bounded: true, extent: Some(0) },
            ..new("extent_of_nothing", mixed, [4, 2, 32])
        },
    ]
}

/// Steps just over sizes at which kernels change. Heads are small, and so the steps are cheap.
pub(super) fn thresholds() -> Vec<Setup> {
    use AttentionMask::{Bidirectional, Explicit};
    let new = Setup::new;
    vec![
        new("sequences_1025", &many(1025, |number| (1, 1 + number % 3)), [1, 1, 4]),
        new("sequences_8193", &many(8193, |number| (1, 1 + number % 2)), [1, 1, 2]),
        new("heads_257", &[(2, 5), (1, 3)], [257, 257, 4]),
        Setup { sinks: true, ..new("group_of_128", &[(2, 5), (1, 33)], [128, 1, 4]) },
        new("keys_8193", &[(1, 8193)], [2, 1, 4]),
        new("keys_16385", &[(1, 16_385), (1, 2)], [1, 1, 4]),
        new("keys_65537", &[(1, 65_537)], [1, 1, 2]),
        Setup { block: 1, ..new("pages_16385", &[(1, 16_385)], [1, 1, 4]) },
        Setup { block: 1, ..new("pages_40000", &[(1, 40_000)], [1, 1, 2]) },
        Setup { window: 9000, ..new("window_9000", &[(2, 10_000)], [1, 1, 4]) },
        Setup { block: 300, ..new("pages_of_300", &[(3, 700), (2, 299), (1, 301)], [2, 1, 4]) },
        Setup {
            mask: Explicit,
            layout: Layout::strided(3, 0),
            ..new("explicit_300", &[(300, 310), (2, 40), (67, 67)], [2, 1, 4])
        },
        Setup { mask: Explicit, window: 7, ..new("explicit_wider_window", &[(40, 50), (9, 9)], [4, 2, 16]) },
        Setup {
            mask: Bidirectional,
            window: 7,
            ..new("bidirectional_window", &[(40, 50), (9, 9)], [4, 2, 16])
        },
    ]
}

/// The same for attention without a cache.
pub(super) fn unpaged_thresholds() -> Vec<Setup> {
    use AttentionMask::Bidirectional;
    let new = Setup::new;
    vec![
        new("sequences_1300", &many(1300, |number| (1 + number % 3, 1 + number % 3)), [1, 1, 4]),
        new("heads_257", &[(2, 2), (1, 1)], [257, 257, 4]),
        Setup { alibi: true, mask: Bidirectional, ..new("tokens_1300", &[(1300, 1300), (2, 2)], [1, 1, 2]) },
        Setup {
            softcap: 3.0,
            mask: Bidirectional,
            ..new("softcap_both_ways", &[(20, 20), (2, 2)], [2, 2, 8])
        },
        Setup {
            layout: Layout::strided(8, 1),
            ..new("heads_of_three_groups", &[(9, 9), (4, 4)], [12, 3, 16])
        },
    ]
}

/// Random steps of the fixed list.
pub(super) fn random_setups(random: &mut Random) -> Vec<Setup> {
    const LABELS: [&str; 6] = ["random_0", "random_1", "random_2", "random_3", "random_4", "random_5"];
    let mut one = |label| {
        let sequences: Vec<(usize, usize)> = (0..1 + random.below(6))
            .map(|_| {
                let new = random.below(9);
                if new == 0 { (0, 0) } else { (new, new + random.below(50)) }
            })
            .collect();
        let (kv_heads, group) = (1 + random.below(3), random.pick(&[1, 2, 3, 4, 8]));
        let sizes = [kv_heads * group, kv_heads, random.pick(&[8, 16, 24, 64, 80])];
        Setup {
            block: random.pick(&[4, 8, 16]),
            window: random.pick(&[0, 0, 5, 17]),
            softcap: random.pick(&[0.0, 0.0, 8.0]),
            alibi: random.chance(0.3),
            sinks: random.chance(0.3),
            spare: random.below(3),
            layout: Layout::strided(random.pick(&[0, 8]), random.below(2)),
            ..Setup::new(label, &sequences, sizes)
        }
    };
    LABELS.into_iter().map(&mut one).collect()
}

/// A step of a random case.
pub(super) fn drawn_setup(draw: &mut Draw) -> Setup {
    let count = draw.pick(&[1, 0, 2, 3, 5]);
    let block = draw.pick(&[16, 1, 4, 7, 8, 32]);
    let one = |draw: &mut Draw| {
        let new = draw.pick(&[1, 0, 2, 7, block - 1, block, block + 1, 31]);
        let before = draw.pick(&[0, 1, 2, 7, block - 1, block, block + 1, 2 * block, 61, 129]);
        (new, new + before)
    };
    let sequences: Vec<(usize, usize)> = (0..count).map(|_| one(draw)).collect();
    let (kv_heads, group) = (draw.pick(&[1, 2, 3]), draw.pick(&[1, 2, 3, 4, 8]));
    let size = draw.pick(&[16, 5, 32, 64, 80, 96, 128]);
    let tokens: usize = sequences.iter().map(|(new, _)| new).sum();
    let rows = drawn_layout(draw, tokens);
    Setup {
        block,
        window: draw.pick(&[0, 1, 5, 17, 1000]),
        softcap: draw.pick(&[0.0, 8.0]),
        alibi: draw.sometimes(),
        sinks: draw.sometimes(),
        spare: draw.below(3),
        // Extents cut off whole sequences; they are in the list of edge cases.
        layout: Layout { extent: None, ..rows },
        ..Setup::new("", &sequences, [kv_heads * group, kv_heads, size])
    }
}
