//! Helpers that the engine's tests share.
#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod late;
pub(crate) mod lowering;

use dsrun_core::{
    device::{Backend, Device, DeviceOptions},
    program::Program,
};
use dsrun_engine::{Engine, EngineOptions, EnginePlan, Precision, Request, SamplingOptions};
use dsrun_models::{model::Model, step::ProgramOptions};
use dsrun_test_support::Missing;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// The reference device.
pub(crate) fn device() -> Arc<dyn Device> {
    dsrun_cpu::CpuBackend::new().open(0, &DeviceOptions::default()).expect("a CPU is there")
}

/// The folder of the models' fixtures.
pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures")
}

/// An engine over a model, for tests.
pub(crate) fn engine(model: &Model, options: &EngineOptions) -> Engine {
    let device = device();
    let plan = EnginePlan::new(model, &*device, options).expect("the model is planned");
    plan.load(model, device, &mut |_, _| {}).expect("the model is loaded")
}

/// Everything in f32.
pub(crate) fn exact(step_tokens: usize, max_requests: usize) -> EngineOptions {
    EngineOptions {
        precision: Precision::F32,
        step_tokens,
        max_requests,
        block_size: 4,
        ..EngineOptions::default()
    }
}

/// A model of the fixtures: its GGUF file if it has one.
pub(crate) fn open(name: &str) -> Model {
    let gguf = fixtures().join(name).join("model.gguf");
    Model::open(if gguf.exists() { gguf } else { fixtures().join(name) }).expect("the fixture is a model")
}

/// Tokens for models whose weights are quantised.
pub(crate) const TOKENS: [u32; 24] =
    [5, 17, 3, 88, 41, 9, 60, 2, 33, 71, 14, 6, 90, 25, 48, 7, 11, 52, 38, 19, 64, 80, 1, 30];

/// The program of a fixture.
pub(crate) fn program(name: &str) -> Program {
    open(name).program(&ProgramOptions::default()).expect("the fixture has a program")
}

/// Checkpoints that do not quantise the inputs of products.
pub(crate) fn no_inputs(_: &str) -> bool {
    false
}

/// A model in every format of weights that files have: GGUF's, AWQ, GPTQ, FP8 and compressed-tensors.
pub(crate) const FORMATS: [&str; 19] = [
    "gguf/smollm2_q4_0",
    "gguf/smollm2_q4_1",
    "gguf/smollm2_q8_0",
    "gguf/gpt2_q8_0",
    "gguf/qwen2_q4_0",
    "quantised/awq",
    "quantised/compressed_w4a16",
    "quantised/compressed_w4a16_zero",
    "quantised/compressed_w8a16",
    "quantised/compressed_w8a16_zero",
    "quantised/compressed_w8a8",
    "quantised/compressed_fp8",
    "quantised/fp8_block",
    "quantised/gptq_4",
    "quantised/gptq_4_symmetric",
    "quantised/gptq_8_channel",
    "quantised/gptq_8_symmetric",
    "quantised/gptq_act_order",
    "quantised/k_quants",
];

/// Families with latent attention, experts, windows, learned positions, biases, one KV head.
pub(crate) const FAMILIES: [&str; 13] = [
    "deepseek_v2_groups",
    "deepseek_v3",
    "gemma3_wide",
    "glm4_moe",
    "gpt_oss",
    "granitemoeshared",
    "mixtral",
    "olmo3",
    "opt",
    "phi3_short",
    "phimoe",
    "qwen2_moe_sparse",
    "qwen2_window",
];

/// Prompts of different lengths.
pub(crate) fn prompts(model: &Model) -> Vec<Vec<u32>> {
    let vocabulary = model.config().vocabulary as u32;
    [9, 4, 13].map(|length| (0..length).map(|token| (token * 11 + length) % vocabulary).collect()).into()
}

/// The margins between the two largest logits after each token of an answer.
pub(crate) fn margins(engine: &mut Engine, prompt: &[u32], answer: &[u32]) -> Vec<f64> {
    let whole: Vec<u32> = prompt.iter().chain(answer).copied().collect();
    let rows = logits(engine, &whole[..whole.len() - 1]);
    let margin = |row: &Vec<f32>| {
        let mut sorted = row.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        f64::from(sorted[0] - sorted[1])
    };
    rows[prompt.len() - 1..].iter().map(margin).collect()
}

/// Greedy tokens of several prompts that run side by side.
pub(crate) fn greedy(engine: &mut Engine, prompts: &[Vec<u32>], count: usize) -> Vec<Vec<u32>> {
    sampled(engine, prompts, count, &SamplingOptions::default())
}

/// Tokens of several prompts that run side by side.
pub(crate) fn sampled(
    engine: &mut Engine,
    prompts: &[Vec<u32>],
    count: usize,
    sampling: &SamplingOptions,
) -> Vec<Vec<u32>> {
    let ids: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let request = Request {
                prompt: prompt.clone(),
                sampling: sampling.clone(),
                max_tokens: Some(count),
                ..Request::default()
            };
            engine.submit(request).expect("the request is taken")
        })
        .collect();
    let mut answers = vec![Vec::new(); prompts.len()];
    while !engine.is_idle() {
        for event in engine.step().expect("the step runs") {
            let index = ids.iter().position(|id| *id == event.request).expect("the request is ours");
            answers[index].push(event.token);
        }
    }
    assert_eq!(engine.pages_in_use(), 0, "pages were not given back");
    answers
}

/// Compares the tokens of an answer, the likeliest tokens at each place, and the number of prompt tokens that were found in the
/// prefix cache.
pub(crate) fn compare_likely(one: &mut Engine, several: &mut Engine, tolerance: f32) {
    let prompt: Vec<u32> = (0..13).map(|token| token * 5 % 40).collect();
    let answer = |engine: &mut Engine, end: u32| {
        let prompt: Vec<u32> = prompt.iter().copied().chain([end]).collect();
        let request = Request { prompt, top_log_probabilities: 3, max_tokens: Some(6), ..Request::default() };
        engine.submit(request).expect("the request is taken");
        let mut events = Vec::new();
        while !engine.is_idle() {
            events.extend(engine.step().expect("the step runs"));
        }
        events
    };
    for (end, shares) in [(41, false), (42, true)] {
        let [expected, found] = [answer(one, end), answer(several, end)];
        assert_eq!((expected.len(), found.len()), (6, 6));
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!((found.token, found.cached), (expected.token, expected.cached));
            assert_eq!(found.cached > 0, shares, "a prompt begins like an earlier one");
            assert_eq!(found.top.len(), 3);
            for ((id, own), (same, other)) in found.top.iter().zip(&expected.top) {
                assert!(id == same && (own - other).abs() <= 2.0 * tolerance, "{found:?} for {expected:?}");
            }
        }
    }
}

/// Logits after each token.
pub(crate) fn logits(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    engine
        .score(tokens, &mut |position, logits| {
            assert_eq!(position, rows.len());
            rows.push(logits.to_vec());
        })
        .expect("the tokens are scored");
    rows
}

/// The largest difference of two lists of rows.
pub(crate) fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(b).flat_map(|(a, b)| {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b)
    });
    pairs
        .map(|(a, b)| if a.is_nan() || b.is_nan() { f32::INFINITY } else { (a - b).abs() })
        .fold(0.0, f32::max)
}

/// Compares greedy tokens with those expected, up to the first choice that is closer than the logit error could turn.
pub(crate) fn assert_greedy(found: &[u32], expected: &[u32], margins: &[f64], smallest_margin: f64) {
    for (index, ((found, expected), margin)) in found.iter().zip(expected).zip(margins).enumerate() {
        if *margin <= smallest_margin {
            return;
        }
        assert_eq!(found, expected, "token {index}, whose margin is {margin}");
    }
}

/// The real model.
pub(crate) fn real_model() -> Result<Model, Missing> {
    Ok(Model::open(dsrun_test_support::model()?).expect("DSRUN_TEST_MODEL is a model"))
}
