//! The numbers and words that cross the C ABI. Changing one of them breaks every plugin; new ones are added at the end.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dsrun_core::{
    BlockFormat, Code, DType, GroupFormat, WeightFormat,
    device::MemoryKind,
    op::{
        Add, AllGather, AllReduce, AttentionMask, Embed, GateLayout, GatedActivation, MeshAxis, Nonlinearity,
        Op, PagedAttention, Profile, Reduction, Rope, RopePairing, Sample,
    },
};
use rstest::rstest;

#[test]
fn op_numbers_are_stable() {
    let numbers: Vec<(&str, u32)> =
        Op::PRIMITIVES.iter().zip(Op::NUMBERS).map(|(signature, number)| (signature.name, *number)).collect();
    let released = [
        ("embed", 1),
        ("rms_norm", 2),
        ("layer_norm", 3),
        ("linear", 4),
        ("activation", 6),
        ("gated_activation", 7),
        ("rope", 8),
        ("kv_write", 9),
        ("page_gather", 11),
        ("page_scatter", 12),
        ("attention_prepare", 13),
        ("paged_attention", 14),
        ("attention", 15),
        ("add", 16),
        ("cast", 17),
        ("gather_rows", 19),
        ("prepare_step", 20),
        ("logit_process", 21),
        ("argmax", 22),
        ("sample", 23),
        ("commit_tokens", 24),
        ("columns", 25),
        ("quant_per_token", 26),
        ("linear_w8a8", 27),
        ("moe_route", 28),
        ("moe_group", 29),
        ("grouped_linear", 30),
        ("moe_combine", 31),
        ("head_linear", 32),
        ("latent_write", 33),
        ("quant_per_group", 34),
        ("linear_a8", 35),
        ("all_reduce", 64),
        ("all_gather", 65),
        ("reduce_scatter", 66),
        ("all_to_all", 67),
        ("broadcast", 68),
        ("send", 69),
        ("receive", 70),
        ("barrier", 71),
    ];
    for known in released {
        assert!(numbers.contains(&known), "{known:?} is missing");
    }
    for (index, (name, number)) in numbers.iter().enumerate() {
        assert!(
            numbers[..index].iter().all(|(_, other)| other != number),
            "{name} has the number of another op"
        );
        assert!(*number != 0 && *number < Op::REGION_NUMBER, "{name}");
        assert!(!Op::RETIRED_NUMBERS.contains(number), "{name} has the number of a retired op");
        assert_eq!(Op::number_of(name), Some(*number));
        assert_eq!(Op::signature_of(*number).map(|signature| signature.name), Some(*name));
    }
    assert_eq!((Op::number_of("nothing"), Op::signature_of(0)), (None, None));
    assert_eq!(Op::RETIRED_NUMBERS, [5, 10, 18]);
    assert_eq!(Op::from_words(5, &[1, 0]).unwrap_err().message(), "there is no op 5");
}

#[test]
fn other_numbers_are_stable() {
    assert_eq!(DType::ALL.map(|dtype| dtype as u32), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(Profile::ALL.map(|profile| profile as u32), [1, 2, 3, 4, 5, 6]);
    assert_eq!(Code::ALL.map(|code| code as u32), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    assert_eq!([MemoryKind::Device as u32, MemoryKind::Pinned as u32], [1, 2]);
    let blocks = BlockFormat::ALL.map(WeightFormat::Block);
    assert_eq!(blocks.map(WeightFormat::number), std::array::from_fn(|index| 0x101 + index as u32));
    let groups = ["int4", "int8", "int4g128_f16", "int8g64m", "int4g32z_bf16"].map(WeightFormat::from_name);
    let groups = groups.map(|format| format.unwrap().number());
    assert_eq!(groups, [0x201, 0x241, 0x232, 0x269, 0x217]);
    assert_eq!(GroupFormat::all().count(), 72);
    for format in blocks.into_iter().chain(DType::ALL.map(WeightFormat::Dense)) {
        assert_eq!(WeightFormat::from_number(format.number()), Some(format));
    }
    assert_eq!([0, 8, 0x100, 0x1FF, 0x200, 0x240, 0x281].map(WeightFormat::from_number), [None; 7]);
}

#[rstest]
#[case(Embed { dtype: DType::BF16, first_row: 7, position_offset: u32::MAX }, &[3, 7, u32::MAX])]
#[case(AllGather { axis: MeshAxis::Tensor, ranks: 4, rows: true }, &[2, 4, 1])]
#[case(Add { alpha: -0.0 }, &[0x8000_0000])]
#[case(
    GatedActivation { function: Nonlinearity::GeluTanh, layout: GateLayout::Interleaved, limit: 1.0, up_offset: 1.0 },
    &[4, 3, 0x3F80_0000, 0x3F80_0000]
)]
#[case(Rope { heads: 9, pairing: RopePairing::Neighbours, scale: 2.0 }, &[9, 2, 0x4000_0000])]
#[case(AllReduce { axis: MeshAxis::Data, reduction: Reduction::Mean }, &[0, 4])]
#[case(
    PagedAttention { query_heads: 9, kv_heads: 3, scale: 1.0, softcap: 0.0, window: 4096, mask: AttentionMask::Explicit, value_size: 0 },
    &[9, 3, 0x3F80_0000, 0, 4096, 3, 0]
)]
#[case(Sample {}, &[])]
fn attributes_are_words(#[case] op: impl Into<Op>, #[case] words: &[u32]) {
    let op: Op = op.into();
    assert_eq!(op.words(), words);
    // The text is compared as well, because it distinguishes 0 from -0.
    let back = Op::from_words(op.number(), words).unwrap();
    assert_eq!((back.to_string(), back), (op.to_string(), op.clone()));

    let longer = [words, &[0]].concat();
    let error = Op::from_words(op.number(), &longer).unwrap_err();
    assert_eq!((error.op(), error.argument()), (Some(op.name()), Some("attributes")), "{error}");
    if let Some((_, shorter)) = words.split_last() {
        assert!(Op::from_words(op.number(), shorter).is_err());
    }
}

#[rstest]
#[case("embed", &[0, 0, 0], "dtype")]
#[case("all_gather", &[2, 4, 2], "rows")]
#[case("rope", &[1, 3, 0], "pairing")]
#[case("all_reduce", &[4, 1], "axis")]
fn invalid_words_are_refused(#[case] name: &str, #[case] words: &[u32], #[case] attribute: &str) {
    let error = Op::from_words(Op::number_of(name).unwrap(), words).unwrap_err();
    assert_eq!((error.op(), error.argument()), (Some(name), Some(attribute)), "{error}");
}
