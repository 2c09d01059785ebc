//! Tests of tile configurations.

use super::*;
use dsrun_core::BlockFormat;
use rstest::rstest;

const DEVICE: DeviceSpec = DeviceSpec::usual(90, 132);

/// Hidden, inner, KV heads, query heads of each, elements of a head, whether the MLP is gated.
fn shape([hidden, inner, kv_heads, group, head]: [usize; 5], gated: bool) -> Shape {
    let (pairs, slots) = (if gated { head / 2 } else { 0 }, 16);
    let turned = if gated { "1" } else { "0" };
    let constants = vec![("X", "bf16".to_owned()), ("ROPE", turned.to_owned())];
    let format = WeightFormat::Dense(DType::BF16);
    Shape {
        layers: 32,
        dtype: DType::BF16,
        constants,
        format,
        dense_attention: false,
        gated,
        hidden,
        inner,
        experts: None,
        kv_heads,
        group,
        head,
        pairs,
        slots,
        causal: true,
        kinds: 1,
        post_norms: false,
        sinks: false,
        parallel: false,
        neighbours: false,
        ranks: 1,
    }
}

#[rstest]
#[case::smollm2([576, 1536, 3, 3, 64], true)]
#[case::gpt2_xl([1600, 6400, 25, 1, 64], false)]
#[case::gpt2([768, 3072, 12, 1, 64], false)]
#[case::llama_1b([2048, 8192, 8, 4, 64], true)]
#[case::llama_8b([4096, 14_336, 8, 4, 128], true)]
#[case::heads_of_80([2560, 10_240, 32, 1, 80], false)]
#[case::heads_of_96([3072, 8192, 32, 1, 96], true)]
#[case::opt_13b([5120, 20_480, 40, 1, 128], false)]
#[case::llama_13b([5120, 13_824, 40, 1, 128], true)]
#[case::one_head_of_keys([2048, 8192, 1, 16, 128], true)]
#[case::rows_of_odd_length([1600, 4160, 25, 1, 64], false)]
#[case::narrow([64, 128, 1, 1, 64], true)]
#[case::gemma3_1b([1152, 6912, 1, 4, 256], true)]
#[case::gemma3_4b([2560, 10_240, 4, 2, 256], true)]
#[case::groups_of_16_large_heads([3072, 8192, 2, 16, 256], true)]
fn cuts_fit_and_cover_all_inputs(
    #[case] sizes: [usize; 5],
    #[case] gated: bool,
    #[values(false, true)] gemma: bool,
) {
    let shape = Shape { kinds: 1 + usize::from(gemma), post_norms: gemma, ..shape(sizes, gated) };
    let cut = shape.tiles(&DEVICE).unwrap();
    assert!(cut.shared <= DEVICE.shared_memory(), "{cut:?}");
    assert!(cut.blocks <= DEVICE.sm_count.min(shape.products()[2].tiles(cut.runs[2])), "{cut:?}");
    assert!(shape.kv_heads * cut.splits <= cut.blocks, "{cut:?}");
    for ((product, run), teams) in shape.products().iter().zip(&cut.runs).zip(&cut.teams) {
        assert!(run.bytes(None) <= cut.slot && cut.slot <= 33 << 10, "{cut:?}");
        assert!(product.outputs.is_multiple_of(product.runs * run.outputs), "{cut:?}");
        assert!(*teams == 1 || run.inputs == product.inputs, "{cut:?}");
        assert!(
            [run.inputs, product.inputs].iter().all(|inputs| inputs.is_multiple_of(512 / run.outputs)),
            "{cut:?}"
        );
    }
}

#[rstest]
#[case::llama_1b([2048, 8192, 8, 4, 64], true, "int4g128_f16")]
#[case::llama_1b_of_bytes([2048, 8192, 8, 4, 64], true, "int8")]
#[case::heads_of_their_own([768, 3072, 12, 1, 64], false, "int4g128_f16")]
#[case::narrow([256, 256, 4, 1, 64], true, "int8")]
#[case::long_rows([4096, 14_336, 8, 4, 128], true, "int4g128_f16")]
#[case::qwen2_5_05b([896, 4864, 2, 7, 64], true, "int4g128_f16")]
#[case::deepseek_coder_13b([2048, 5504, 16, 1, 128], true, "int8")]
#[case::qwen2_5_72b([8192, 29_568, 8, 8, 128], true, "int4g128_f16")]
#[case::qwen2_5_72b_of_bytes([8192, 29_568, 8, 8, 128], true, "int8")]
fn cuts_of_integers_fit_and_come_out_even(
    #[case] sizes: [usize; 5],
    #[case] gated: bool,
    #[case] format: &str,
) {
    let shape = Shape { format: WeightFormat::from_name(format).unwrap(), ..shape(sizes, gated) };
    let (cut, packing) = (shape.tiles(&DEVICE).unwrap(), packing(shape.format));
    assert!(packing.is_some() && cut.shared <= DEVICE.shared_memory(), "{cut:?}");
    assert!(cut.blocks <= DEVICE.sm_count.min(shape.products()[2].tiles(cut.runs[2])), "{cut:?}");
    for (product, run) in shape.products().iter().zip(&cut.runs) {
        assert!(run.bytes(packing) <= cut.slot && cut.slot <= 33 << 10, "{cut:?}");
        assert!(product.outputs.is_multiple_of(product.runs * run.outputs), "{cut:?}");
        // Only the last slot of a row ends with half a step.
        let step = if run.inputs < product.inputs { STEP } else { STEP / 2 };
        assert!(run.inputs.is_multiple_of(step) && product.inputs.is_multiple_of(STEP / 2), "{cut:?}");
        // Units are neighbours only where they are whole, and a warp finishes 8 outputs.
        assert!(
            [8, 16].contains(&run.outputs) && (run.outputs == 8 || run.inputs == product.inputs),
            "{cut:?}"
        );
    }
    // What is turned together is in one tile.
    assert!((shape.head / 2).is_multiple_of(cut.runs[0].outputs), "{cut:?}");
}

#[rstest]
#[case::qwen3_30b([2048, 768, 4, 8, 128], [128, 8])]
#[case::mixtral([4096, 14_336, 8, 4, 128], [8, 2])]
#[case::one_large_expert([128, 14_336, 1, 2, 64], [8, 1])]
#[case::many_small_experts([1024, 64, 4, 4, 64], [256, 6])]
fn slots_hold_inputs_of_one_expert(#[case] sizes: [usize; 5], #[case] counts: [usize; 2]) {
    let [count, chosen] = counts;
    let experts = Some(Choice { count, chosen, rounded: false, words: 2 * (count + chosen) + 1 });
    let inner = sizes[1];
    let shape = Shape { experts, inner: chosen * inner, ..shape(sizes, true) };
    let cut = shape.tiles(&DEVICE).unwrap();
    assert!(cut.shared <= DEVICE.shared_memory() && cut.runs.len() == PRODUCTS + 1, "{cut:?}");
    assert!(cut.runs.iter().all(|run| run.bytes(None) <= cut.slot), "{cut:?}");
    let [_, _, up, down, router] = cut.runs[..] else { panic!("{cut:?}") };
    assert!(inner.is_multiple_of(up.outputs) && inner.is_multiple_of(down.inputs), "{cut:?}");
    assert!(count.is_multiple_of(router.outputs), "{cut:?}");
}

#[test]
fn rows_of_dense_experts_that_fill_several_slots_are_refused() {
    // Runs of fewer than 8 rows need a multiple of 128 inputs. 8 rows of 2880 take 46 KB, and a slot has 32 KB at most.
    let experts = Some(Choice { count: 32, chosen: 4, rounded: false, words: 73 });
    let dense = Shape { experts, inner: 4 * 2880, ..shape([2880, 2880, 8, 8, 64], true) };
    assert!(dense.tiles(&DEVICE).is_none());
    let format = WeightFormat::Block(BlockFormat::Mxfp4);
    let floats = Shape { format, dense_attention: true, ..dense };
    let cut = floats.tiles(&DEVICE).unwrap();
    assert_eq!([cut.runs[2].inputs, cut.runs[3].inputs], [2944; 2], "{cut:?}");
}

#[test]
fn what_other_formats_hold_is_left_to_launches_of_their_own() {
    let dense = |dtype, rows, columns| takes(WeightFormat::Dense(dtype), DType::F16, [rows, columns], false);
    assert!(dense(DType::F16, 16, 64) && !dense(DType::BF16, 16, 64));
    assert!(!dense(DType::F16, 8, 64) && !dense(DType::F16, 16, 32));
    for (name, taken) in
        [("int4g128_f16", true), ("int8", true), ("int4g32_f16", false), ("int4g128z_f16", false)]
    {
        let format = WeightFormat::from_name(name).unwrap();
        let takes = |columns, of_experts| takes(format, DType::BF16, [16, columns], of_experts);
        assert_eq!([takes(128, false), takes(384, false), takes(256, true)], [taken; 3], "{name}");
        assert!(!takes(64, false) && !takes(128, true), "{name}");
    }
}
