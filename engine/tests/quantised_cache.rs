//! A KV cache of 8 bits: near f32, and the same whatever becomes of its pages.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::{DType, cache_row::cache_row_size};
use dsrun_engine::{CachePrecision, Engine, EngineOptions, EnginePlan, Speculation};
use dsrun_models::model::Model;
use rstest::rstest;
use std::sync::Arc;
use support::{device, engine, exact, greedy, logits, open, prompts};

fn quantised(step_tokens: usize, max_requests: usize) -> EngineOptions {
    let kv_precision = CachePrecision::Int8;
    EngineOptions { kv_precision, ignore_end: true, ..exact(step_tokens, max_requests) }
}

/// The tokens of each prompt alone.
fn alone(model: &Model, count: usize) -> Vec<Vec<u32>> {
    let one = |prompt| greedy(&mut engine(model, &quantised(64, 1)), &[prompt], count).remove(0);
    prompts(model).into_iter().map(one).collect()
}

/// Each key and value is rounded by at most half of the 127th part of the largest of its group: on average by a few thousandths of that, and
/// again in each layer. So the error of most positions is below 2% of their largest logit, and that of every position below 5%. A router
/// that is near a tie may choose another expert, whose answer differs by more: of mixtures of experts only most positions are compared.
#[rstest]
fn its_logits_stay_near_those_of_f32(
    #[values("llama3", "qwen2_window", "gemma3", "olmo3", "gpt_oss", "mixtral")] name: &str,
) {
    let model = open(name);
    let config = model.config();
    let (mut reference, mut small) = (engine(&model, &exact(64, 1)), engine(&model, &quantised(64, 1)));
    let (of_f32, row) = (4 * config.head_dim, cache_row_size(DType::I8, config.head_dim));
    assert_eq!(small.memory().kv_cache * of_f32 as u64, reference.memory().kv_cache * row as u64);
    let mut errors = Vec::new();
    for prompt in prompts(&model) {
        let (found, expected) = (logits(&mut small, &prompt), logits(&mut reference, &prompt));
        errors.extend(found.iter().zip(&expected).map(|(found, expected)| {
            let off = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            off / expected.iter().map(|logit| logit.abs()).fold(0.0, f32::max)
        }));
    }
    errors.sort_by(f32::total_cmp);
    let (median, largest) = (errors[errors.len() / 2], errors[errors.len() - 1]);
    assert!(median > 0.0 && median < 0.02, "{name}: {errors:?}");
    assert!(largest < 0.05 || ["gpt_oss", "mixtral"].contains(&name), "{name}: {errors:?}");
}

#[rstest]
fn chunks_and_batches_do_not_change_answers(#[values(3, 16)] step: usize, #[values(1, 3)] requests: usize) {
    let model = open("llama3");
    assert_eq!(
        greedy(&mut engine(&model, &quantised(step, requests)), &prompts(&model), 12),
        alone(&model, 12)
    );
}

#[rstest]
fn swapped_pages_come_back(#[values(0, 32)] swap_tokens: usize, #[values(false, true)] prefix_cache: bool) {
    let model = open("llama3");
    // Room for about two of three answers.
    let options = EngineOptions {
        context: Some(32),
        kv_tokens: Some(36),
        swap_tokens,
        prefix_cache,
        ..quantised(8, 3)
    };
    let mut engine = engine(&model, &options);
    assert_eq!(greedy(&mut engine, &prompts(&model), 16), alone(&model, 16));
    let statistics = engine.statistics();
    assert!(statistics.preemptions > 0, "{statistics:?}");
}

#[test]
fn a_prefix_is_reused() {
    let model = open("llama3");
    let mut engine = engine(&model, &quantised(16, 1));
    let expected = alone(&model, 12);
    for _ in 0..2 {
        assert_eq!(greedy(&mut engine, &prompts(&model), 12), expected);
    }
    assert!(engine.statistics().prefix_hit_tokens > 0, "{:?}", engine.statistics());
}

#[rstest]
#[case::ngram(Speculation::Ngram { tokens: 4 })]
#[case::draft(Speculation::Draft { tokens: 3 })]
fn speculation_does_not_change_answers(#[case] speculation: Speculation) {
    let model = open("llama3");
    let options = EngineOptions { speculation: Some(speculation), ..quantised(32, 3) };
    let draft = matches!(speculation, Speculation::Draft { .. }).then(|| Arc::new(open("llama3")));
    let device = device();
    let mut engine: Engine = match draft {
        None => engine(&model, &options),
        Some(draft) => {
            let plan = EnginePlan::with_draft(&model, &draft, &*device, &options).unwrap();
            plan.load(&model, device, &mut |_, _| {}).unwrap()
        }
    };
    assert_eq!(greedy(&mut engine, &prompts(&model), 16), alone(&model, 16));
}

#[test]
fn latent_attention_refuses_it() {
    let error = EnginePlan::new(&open("deepseek_v3"), &*device(), &quantised(16, 1)).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("kv-dtype is int8") && message.contains("latent attention"), "{message}");
}
