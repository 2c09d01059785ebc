//! Engines whose model is split over several ranks, compared with one device.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::device::{Backend, Device, DeviceOptions};
use dsrun_engine::{
    CachePrecision, Engine, EngineOptions, EnginePlan, Precision, Request, SamplingOptions,
    passes::{
        quantize::Policy,
        shard::{MeshCosts, ShardPolicy},
    },
};
use dsrun_models::model::Model;
use dsrun_test_support::{
    TestResult,
    faulty_device::{Fault, FaultyDevice, Operation},
    test_main,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use support::{
    FAMILIES, FORMATS, assert_greedy, compare_likely, difference, engine, exact, greedy, logits, margins,
    open, prompts, real_model, sampled,
};

test_main![
    logits_and_greedy_text_are_those_of_one_device,
    quantised_files_have_the_text_of_one_device,
    every_family_has_the_text_of_one_device,
    weights_that_are_quantised_have_the_text_of_one_device,
    a_cache_of_8_bits_is_split_between_heads,
    likely_tokens_and_shared_prefixes_are_those_of_one_device,
    equal_seeds_draw_the_tokens_of_one_device,
    requests_come_and_go,
    the_real_model_is_split_over_heads_that_do_not_divide,
    options_that_need_one_device_are_refused,
    a_rank_that_fails_or_panics_is_named,
];

/// Tolerance of the logits, as for one device: f32 sums differ by their order.
const TOLERANCE: f32 = 1e-4;

/// The same with a cache of 8 bits.
const CACHE_TOLERANCE: f32 = 0.02;

fn devices(ranks: usize) -> Vec<Arc<dyn Device>> {
    let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
    (0..ranks).map(|_| dsrun_cpu::CpuBackend::new().open(0, &options).unwrap()).collect()
}

/// Exchanges count as free, so that models as small as the fixtures are split.
fn free_exchanges() -> ShardPolicy {
    let costs =
        MeshCosts { latency_us: 0.0, gather_latency_us: 0.0, link_bandwidth: 1e15, ..MeshCosts::HOST };
    ShardPolicy { costs: Some(costs), ..ShardPolicy::default() }
}

/// An engine over ranks.
fn split(model: &Model, ranks: usize, options: &EngineOptions) -> Engine {
    let devices = devices(ranks);
    let options = EngineOptions { shard: free_exchanges(), ..options.clone() };
    let plan = EnginePlan::on_devices(model, &devices, &options).unwrap();
    assert!(plan.program().to_string().contains("axis=tensor"), "the model is not split");
    assert_eq!(plan.memory_of_ranks().count(), ranks);
    plan.load(model, devices[0].clone(), &mut |_, _| {}).unwrap()
}

/// Compares logits and greedy text of ranks with those of one device.
fn compare(name: &str, options: &EngineOptions) {
    let model = open(name);
    let mut one = engine(&model, options);
    let prompts = prompts(&model);
    let expected = greedy(&mut one, &prompts, 12);
    for ranks in [2, 3, 4] {
        let mut several = split(&model, ranks, options);
        for prompt in &prompts {
            let error = difference(&logits(&mut several, prompt), &logits(&mut one, prompt));
            assert!(error <= TOLERANCE, "{name} on {ranks} ranks: off by {error}");
        }
        let found = greedy(&mut several, &prompts, 12);
        for ((found, expected), prompt) in found.iter().zip(&expected).zip(&prompts) {
            let margins = margins(&mut one, prompt, expected);
            assert_greedy(found, expected, &margins, f64::from(2.0 * TOLERANCE));
        }
    }
}

fn logits_and_greedy_text_are_those_of_one_device() -> TestResult {
    for name in ["llama3", "gpt2", "qwen3", "gemma3", "smollm2"] {
        compare(name, &EngineOptions { ignore_end: true, ..exact(7, 3) });
    }
    Ok(())
}

fn quantised_files_have_the_text_of_one_device() -> TestResult {
    for name in FORMATS {
        compare(name, &EngineOptions { precision: Precision::Keep, ignore_end: true, ..exact(7, 3) });
    }
    Ok(())
}

fn every_family_has_the_text_of_one_device() -> TestResult {
    for name in FAMILIES {
        compare(name, &EngineOptions { ignore_end: true, ..exact(7, 3) });
    }
    Ok(())
}

/// Quantised when the model is loaded.
fn weights_that_are_quantised_have_the_text_of_one_device() -> TestResult {
    for scheme in ["w8a16", "w4a16"] {
        let quantize = Some(Policy::of(scheme.parse().unwrap()));
        compare("llama3", &EngineOptions { quantize, ignore_end: true, ..exact(7, 3) });
    }
    Ok(())
}

/// Each rank has whole rows of the cache, with their scales. Sums in another order may round a key or a value to the next integer, a
/// 127th part of the largest of its group.
fn a_cache_of_8_bits_is_split_between_heads() -> TestResult {
    let model = open("llama3");
    let kv_precision = CachePrecision::Int8;
    let options = EngineOptions { kv_precision, ignore_end: true, ..exact(7, 3) };
    let (mut one, mut several) = (engine(&model, &options), split(&model, 2, &options));
    let prompts = prompts(&model);
    let expected = greedy(&mut one, &prompts, 12);
    for prompt in &prompts {
        let error = difference(&logits(&mut several, prompt), &logits(&mut one, prompt));
        assert!(error <= CACHE_TOLERANCE, "off by {error}");
    }
    for ((found, expected), prompt) in greedy(&mut several, &prompts, 12).iter().zip(&expected).zip(&prompts)
    {
        let margins = margins(&mut one, prompt, expected);
        assert_greedy(found, expected, &margins, f64::from(2.0 * CACHE_TOLERANCE));
    }
    Ok(())
}

/// Log probabilities of several tokens, and pages of a prompt that an earlier request has computed.
fn likely_tokens_and_shared_prefixes_are_those_of_one_device() -> TestResult {
    let model = open("llama3");
    let options = EngineOptions { ignore_end: true, ..exact(16, 3) };
    let (mut one, mut several) = (engine(&model, &options), split(&model, 3, &options));
    compare_likely(&mut one, &mut several, TOLERANCE);
    Ok(())
}

fn equal_seeds_draw_the_tokens_of_one_device() -> TestResult {
    let model = open("llama3");
    let options = EngineOptions { ignore_end: true, ..exact(16, 3) };
    let sampling = SamplingOptions {
        temperature: 0.9,
        top_k: 20,
        seed: 7,
        repetition_penalty: 1.2,
        ..Default::default()
    };
    let expected = sampled(&mut engine(&model, &options), &prompts(&model), 16, &sampling);
    assert_eq!(sampled(&mut split(&model, 2, &options), &prompts(&model), 16, &sampling), expected);
    Ok(())
}

/// Requests that are cancelled, limited by a bias, or embedded leave ranks in step.
fn requests_come_and_go() -> TestResult {
    let model = open("llama3");
    let options = EngineOptions { ignore_end: true, ..exact(16, 3) };
    let mut several = split(&model, 3, &options);
    several.warm_up(&mut |_, _| {}).unwrap();
    let prompt = prompts(&model).swap_remove(0);
    let first = several.submit(Request { prompt: prompt.clone(), ..Request::default() }).unwrap();
    several.step().unwrap();
    several.cancel(first);
    let biased = Request { prompt, logit_bias: [(5, 1e4)].into(), max_tokens: Some(3), ..Request::default() };
    several.submit(biased).unwrap();
    let mut tokens = Vec::new();
    while !several.is_idle() {
        tokens.extend(several.step().unwrap().into_iter().map(|event| event.token));
    }
    assert_eq!(tokens, [5, 5, 5]);
    Ok(())
}

/// 9 query heads and 3 KV heads.
fn the_real_model_is_split_over_heads_that_do_not_divide() -> TestResult {
    let model = real_model()?;
    let options = EngineOptions { precision: Precision::F32, context: Some(256), ..EngineOptions::default() };
    let prompt: Vec<u32> = (0..24).map(|token| 100 + token * 37).collect();
    let mut one = engine(&model, &options);
    let expected = logits(&mut one, &prompt);
    let text = greedy(&mut one, std::slice::from_ref(&prompt), 16).swap_remove(0);
    let margins = margins(&mut one, &prompt, &text);
    for ranks in [2, 4] {
        let mut several = split(&model, ranks, &options);
        let error = difference(&logits(&mut several, &prompt), &expected);
        assert!(error < 5e-4, "{ranks} ranks: off by {error}");
        let found = greedy(&mut several, std::slice::from_ref(&prompt), 16);
        assert_greedy(&found[0], &text, &margins, 1e-3);
    }
    Ok(())
}

fn options_that_need_one_device_are_refused() -> TestResult {
    let model = open("llama3");
    let refused = |options: EngineOptions| {
        EnginePlan::on_devices(&model, &devices(2), &options).unwrap_err().to_string()
    };
    let message = refused(EngineOptions { swap_tokens: 64, ..exact(16, 1) });
    assert!(message.contains("swap-tokens is 64"), "{message}");
    let message = EnginePlan::on_devices(&model, &[], &exact(16, 1)).unwrap_err().to_string();
    assert!(message.contains("at least one device"), "{message}");
    Ok(())
}

/// The engine reports the rank and its reason at once, and its threads end.
fn a_rank_that_fails_or_panics_is_named() -> TestResult {
    let model = open("llama3");
    for (fault, reason) in
        [(Fault::Lost, "took the device away"), (Fault::Panic, "panicked: a test made Plan panic")]
    {
        let broken = FaultyDevice::new(devices(1).remove(0));
        let mut all = devices(3);
        all[1] = broken.clone();
        let options = EngineOptions { shard: free_exchanges(), ..exact(16, 1) };
        let plan = EnginePlan::on_devices(&model, &all, &options).unwrap();
        let mut engine = plan.load(&model, all[0].clone(), &mut |_, _| {}).unwrap();
        broken.arm(Operation::Plan, 1, fault);
        engine.submit(Request { prompt: vec![1, 2, 3], ..Request::default() }).unwrap();
        let start = Instant::now();
        let error = engine.step().unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains(reason), "{error}");
        drop(engine);
        assert!(start.elapsed() < Duration::from_secs(30), "the ranks ended after {:?}", start.elapsed());
    }
    Ok(())
}
