//! Batching: concurrent requests do not change each other.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::device::{Backend, DeviceOptions};
use dsrun_engine::{
    CachePrecision, EngineError, EngineOptions, EnginePlan, FinishReason, Precision, Request, SamplingOptions,
};
use dsrun_models::model::Model;
use rstest::rstest;
use support::{difference, engine, exact, fixtures, greedy, logits, sampled};

fn model() -> Model {
    Model::open(fixtures().join("llama3")).unwrap()
}

fn prompts() -> Vec<Vec<u32>> {
    (0..6u32)
        .map(|prompt| (0..3 + prompt * 7).map(|index| (prompt * 31 + index * 17 + 5) % 96).collect())
        .collect()
}

fn endless(step_tokens: usize, max_requests: usize) -> EngineOptions {
    EngineOptions { ignore_end: true, ..exact(step_tokens, max_requests) }
}

#[rstest]
fn a_batch_gives_the_tokens_of_each_request_alone(
    #[values(1, 2, 4, 6)] requests: usize,
    #[values(6, 16, 256)] step: usize,
) {
    let model = model();
    let alone: Vec<Vec<u32>> = prompts()
        .iter()
        .map(|prompt| {
            greedy(&mut engine(&model, &endless(256, 1)), std::slice::from_ref(prompt), 12).remove(0)
        })
        .collect();
    assert_eq!(greedy(&mut engine(&model, &endless(step, requests)), &prompts(), 12), alone);
}

#[test]
fn sampling_depends_on_the_seed_and_not_on_the_batch() {
    let model = model();
    let sampling = SamplingOptions { temperature: 1.5, top_k: 40, seed: 7, ..SamplingOptions::default() };
    let alone: Vec<Vec<u32>> = prompts()
        .iter()
        .map(|prompt| {
            sampled(&mut engine(&model, &endless(256, 1)), std::slice::from_ref(prompt), 12, &sampling)
                .remove(0)
        })
        .collect();
    assert_eq!(sampled(&mut engine(&model, &endless(16, 3)), &prompts(), 12, &sampling), alone);
    let other = SamplingOptions { seed: 8, ..sampling };
    assert_ne!(sampled(&mut engine(&model, &endless(16, 3)), &prompts(), 12, &other), alone);
}

#[test]
fn a_reused_table_row_keeps_nothing_of_the_request_before() {
    let model = model();
    let mut engine = engine(&model, &endless(32, 2));
    let penalised =
        SamplingOptions { repetition_penalty: 5.0, frequency_penalty: 1.0, ..SamplingOptions::default() };
    let first = sampled(&mut engine, &prompts(), 12, &penalised);
    assert_eq!(sampled(&mut engine, &prompts(), 12, &penalised), first);
    assert_ne!(greedy(&mut engine, &prompts(), 12), first, "penalties change something");
}

#[test]
fn bf16_and_f16_stay_near_f32() {
    let model = model();
    let reference = logits(&mut engine(&model, &exact(64, 1)), &prompts()[5]);
    // Each of the three layers rounds a dozen times, by half a unit in the last place of values up to about ten.
    for (precision, unit) in [(Precision::F16, 2f32.powi(-11)), (Precision::Bf16, 2f32.powi(-8))] {
        let bound = 3.0 * 12.0 * unit * 10.0;
        let options = EngineOptions { precision, ..exact(64, 1) };
        let error = difference(&logits(&mut engine(&model, &options), &prompts()[5]), &reference);
        assert!(error > 0.0 && error < bound, "{precision:?} is off by {error}");
    }
}

#[test]
fn a_cache_of_16_bits_takes_half_the_memory_and_stays_near_f32() {
    let model = model();
    let mut reference = engine(&model, &exact(64, 1));
    let expected = logits(&mut reference, &prompts()[5]);
    // Each of the three layers rounds its keys and its values, of up to about ten, once.
    for (kv_precision, unit) in [(CachePrecision::F16, 2f32.powi(-11)), (CachePrecision::Bf16, 2f32.powi(-8))]
    {
        let options = EngineOptions { kv_precision, ..exact(64, 1) };
        let mut engine = engine(&model, &options);
        assert_eq!(engine.memory().kv_cache * 2, reference.memory().kv_cache);
        let error = difference(&logits(&mut engine, &prompts()[5]), &expected);
        assert!(error > 0.0 && error < 3.0 * 2.0 * unit * 10.0, "{kv_precision:?} is off by {error}");
    }
}

#[test]
fn invalid_requests_are_refused_with_the_reason() {
    let model = model();
    let options = EngineOptions { context: Some(16), kv_tokens: Some(12), ..exact(8, 1) };
    let mut engine = engine(&model, &options);
    let mut submit = |prompt: Vec<u32>, max_tokens| {
        engine
            .submit(Request {
                prompt,
                sampling: SamplingOptions::default(),
                max_tokens,
                ..Request::default()
            })
            .map(drop)
    };
    assert!(matches!(submit(vec![], None), Err(EngineError::EmptyPrompt)));
    assert!(matches!(submit(vec![96], None), Err(EngineError::NoSuchToken { token: 96, vocabulary: 96 })));
    assert!(matches!(submit(vec![1; 17], None), Err(EngineError::PromptTooLong { tokens: 17, context: 16 })));
    assert!(matches!(submit(vec![1; 4], Some(0)), Err(EngineError::Option { option: "max-tokens", .. })));
    let error = submit(vec![1; 10], None).unwrap_err().to_string();
    assert!(error.contains("kv-tokens is 12") && error.contains("16 tokens"), "{error}");
    assert!(submit(vec![1; 10], Some(3)).is_ok());
}

#[test]
fn a_model_that_does_not_fit_is_refused_before_anything_is_allocated() {
    let model = model();
    let much_cache = EngineOptions { kv_tokens: Some(100_000), ..exact(64, 1) };
    for (options, limit, remedy) in
        [(exact(64, 1), 100_000, "--dtype bf16"), (much_cache, 1_000_000, "--context")]
    {
        let limited = DeviceOptions { memory_limit: Some(limit), ..DeviceOptions::default() };
        let device = dsrun_cpu::CpuBackend::new().open(0, &limited).unwrap();
        let plan = EnginePlan::new(&model, &*device, &options).unwrap();
        let missing = plan.memory().total() - limit;
        let error =
            plan.load(&model, device.clone(), &mut |_, _| panic!("nothing may be loaded")).unwrap_err();
        assert!(
            matches!(error, EngineError::DoesNotFit { missing: found, .. } if found == missing),
            "{error}"
        );
        assert!(error.to_string().contains(remedy), "{error}");
        assert_eq!(device.memory().used, 0);
    }
}

#[test]
fn answers_end_at_the_context() {
    let model = model();
    let options = EngineOptions { context: Some(16), ..endless(8, 1) };
    let mut engine = engine(&model, &options);
    let request = Request {
        prompt: vec![1; 10],
        sampling: SamplingOptions::default(),
        max_tokens: None,
        ..Request::default()
    };
    engine.submit(request).unwrap();
    let mut events = Vec::new();
    while !engine.is_idle() {
        events.extend(engine.step().unwrap());
    }
    // Ten tokens of the prompt, six more in the context, and a last one whose keys and values are not stored.
    assert_eq!(events.len(), 7);
    assert_eq!(events.last().unwrap().finish, Some(FinishReason::Length));
    assert!(events[..6].iter().all(|event| event.finish.is_none()));
}

#[test]
fn cancelling_frees_pages_at_once() {
    let model = model();
    let mut engine = engine(&model, &endless(16, 2));
    let request = |tokens: u32| Request {
        prompt: (0..tokens).collect(),
        sampling: SamplingOptions::default(),
        max_tokens: Some(20),
        ..Request::default()
    };
    let (a, b, c) = (
        engine.submit(request(30)).unwrap(),
        engine.submit(request(5)).unwrap(),
        engine.submit(request(5)).unwrap(),
    );
    engine.step().unwrap();
    let before = engine.pages_in_use();
    engine.cancel(a);
    assert!(engine.pages_in_use() < before);
    engine.cancel(c);
    let mut seen = Vec::new();
    while !engine.is_idle() {
        seen.extend(engine.step().unwrap().into_iter().map(|event| event.request));
    }
    assert!(seen.iter().all(|id| *id == b) && !seen.is_empty());
    assert_eq!(engine.pages_in_use(), 0);
}
