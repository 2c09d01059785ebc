//! Engines that guarantee answers which do not depend on what else runs.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::{kernels::Support, op::Op};
use dsrun_engine::{Engine, EngineOptions, EnginePlan, Precision, Request, SamplingOptions, Speculation};
use dsrun_models::model::Model;
use dsrun_test_support::AnsweringDevice;
use rstest::rstest;
use std::collections::HashMap;
use support::{device, engine, exact, open};

fn prompts(model: &Model) -> Vec<Vec<u32>> {
    let vocabulary = model.config().vocabulary as u32;
    // The second half begins as the first does, so that prefixes are found in the cache.
    (0..10u32)
        .map(|prompt| {
            let begin = (0..3 + prompt % 5 * 7).map(|index| prompt % 5 * 31 + index * 17 + 5);
            begin.chain(prompt..prompt + 2).map(|token| token % vocabulary).collect()
        })
        .collect()
}

/// The tokens with the bits of their log-probabilities, of all prompts at once.
fn answers(engine: &mut Engine, prompts: &[Vec<u32>]) -> Vec<Vec<(u32, u32)>> {
    let sampling = SamplingOptions { temperature: 1.1, seed: 5, ..SamplingOptions::default() };
    let submit = |prompt: &Vec<u32>| {
        let request = Request {
            sampling: sampling.clone(),
            max_tokens: Some(12),
            ignore_end: true,
            ..Request::new(prompt.clone())
        };
        engine.submit(request).unwrap()
    };
    let ids: Vec<_> = prompts.iter().map(submit).collect();
    let mut answers: HashMap<_, Vec<(u32, u32)>> = HashMap::new();
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            answers.entry(event.request).or_default().push((event.token, event.log_probability.to_bits()));
        }
    }
    ids.iter().map(|id| answers.remove(id).unwrap()).collect()
}

/// Chunks of prompts, batches, cached prefixes, pre-emption and speculation change no bit.
#[rstest]
#[case::f32("llama3", Precision::F32)]
#[case::bf16("llama3", Precision::Bf16)]
#[case::blocks("gguf/smollm2_q4_1", Precision::Keep)]
#[case::layer_norm("gpt2", Precision::F16)]
#[case::window("gemma3", Precision::Bf16)]
#[case::experts("qwen3_moe", Precision::F32)]
fn answers_are_those_of_each_request_alone_to_the_bit(#[case] name: &str, #[case] precision: Precision) {
    let model = open(name);
    let options = |step_tokens, requests| EngineOptions {
        precision,
        batch_invariant: true,
        context: Some(48),
        ..exact(step_tokens, requests)
    };
    let prompts = prompts(&model);
    let alone: Vec<_> = prompts
        .iter()
        .map(|prompt| answers(&mut engine(&model, &options(64, 1)), std::slice::from_ref(prompt)).remove(0))
        .collect();
    for (step_tokens, requests) in [(7, 3), (16, 10), (256, 4)] {
        let mut engine = engine(&model, &options(step_tokens, requests));
        for _ in 0..2 {
            assert_eq!(answers(&mut engine, &prompts), alone, "{name}: {requests} in {step_tokens} tokens");
        }
        assert!(engine.statistics().prefix_hit_tokens > 0);
    }
    let crowded = EngineOptions { kv_tokens: Some(96), ..options(16, 6) };
    let mut crowded = engine(&model, &crowded);
    assert_eq!(answers(&mut crowded, &prompts), alone, "{name}: crowded");
    assert!(crowded.statistics().preemptions > 0);
    let speculation = Some(Speculation::Ngram { tokens: 4 });
    let mut speculates = engine(&model, &EngineOptions { speculation, ..options(64, 3) });
    assert_eq!(answers(&mut speculates, &prompts), alone, "{name}: speculation");
}

#[test]
fn a_device_without_the_guarantee_is_refused_with_the_ops() {
    let model = open("llama3");
    // Of products it says that their rows may depend on each other.
    let device = AnsweringDevice::open(device(), |kernels, call| {
        let support = kernels.query(call)?;
        let dependent = matches!(call.op, Op::Linear(_));
        Ok(Support { batch_invariant: support.batch_invariant && !dependent, ..support })
    });
    let plan = |batch_invariant| {
        EnginePlan::new(&model, &*device, &EngineOptions { batch_invariant, fuse: false, ..exact(16, 2) })
    };
    assert!(plan(false).is_ok());
    let error = plan(true).unwrap_err().to_string();
    assert!(error.contains("batch-invariant is true") && error.contains("a row of linear may"), "{error}");
}
