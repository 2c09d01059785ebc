//! Engines whose layers are divided into the stages of a pipeline, compared with one device.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::device::{Backend, Device, DeviceOptions};
use dsrun_engine::{
    EmbeddingRequest, Engine, EngineOptions, EnginePlan, Precision, Request, SamplingOptions, Speculation,
    passes::{
        partition::PipelineOptions,
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
    open, prompts, sampled,
};

test_main![
    logits_and_greedy_text_are_those_of_one_device,
    quantised_files_have_the_text_of_one_device,
    every_family_has_the_text_of_one_device,
    fixed_micro_batches_have_the_text_of_one_device,
    likely_tokens_and_shared_prefixes_are_those_of_one_device,
    one_step_in_flight_has_the_same_text,
    equal_seeds_draw_the_tokens_of_one_device,
    speculation_and_embeddings_run_over_stages,
    requests_come_and_go,
    meshes_that_do_not_fit_are_refused,
    a_rank_that_fails_or_panics_is_named,
];

/// Tolerance of the logits, as for one device: f32 sums differ by their order where ranks divide them.
const TOLERANCE: f32 = 1e-4;

fn devices(ranks: usize) -> Vec<Arc<dyn Device>> {
    let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
    (0..ranks).map(|_| dsrun_cpu::CpuBackend::new().open(0, &options).unwrap()).collect()
}

/// The options with so many stages. Exchanges count as free, so that models as small as the fixtures are split.
fn staged(stages: usize, options: &EngineOptions) -> EngineOptions {
    let costs =
        MeshCosts { latency_us: 0.0, gather_latency_us: 0.0, link_bandwidth: 1e15, ..MeshCosts::HOST };
    EngineOptions {
        shard: ShardPolicy { costs: Some(costs), ..ShardPolicy::default() },
        pipeline: PipelineOptions { stages, ..PipelineOptions::default() },
        ..options.clone()
    }
}

/// An engine over a mesh of stages and of ranks within each.
fn split(model: &Model, [tp, pp]: [usize; 2], options: &EngineOptions) -> Engine {
    let devices = devices(tp * pp);
    let plan = EnginePlan::on_devices(model, &devices, &staged(pp, options)).unwrap();
    let program = plan.program().to_string();
    assert!(program.contains("axis=pipeline"), "the model is not divided");
    assert_eq!(program.contains("axis=tensor"), tp > 1, "{tp} ranks in a stage");
    assert_eq!((plan.stages(), plan.memory_of_ranks().count()), (pp, tp * pp));
    plan.load(model, devices[0].clone(), &mut |_, _| {}).unwrap()
}

/// Compares logits and greedy text of meshes with those of one device.
fn compare(name: &str, meshes: &[[usize; 2]], options: &EngineOptions) {
    let model = open(name);
    let mut one = engine(&model, options);
    let prompts = prompts(&model);
    let expected = greedy(&mut one, &prompts, 12);
    for mesh in meshes {
        let mut several = split(&model, *mesh, options);
        for prompt in &prompts {
            let error = difference(&logits(&mut several, prompt), &logits(&mut one, prompt));
            assert!(error <= TOLERANCE, "{name} on {mesh:?}: off by {error}");
        }
        let found = greedy(&mut several, &prompts, 12);
        for ((found, expected), prompt) in found.iter().zip(&expected).zip(&prompts) {
            let margins = margins(&mut one, prompt, expected);
            assert_greedy(found, expected, &margins, f64::from(2.0 * TOLERANCE));
        }
    }
}

const MESHES: [[usize; 2]; 3] = [[1, 2], [1, 3], [2, 2]];

fn logits_and_greedy_text_are_those_of_one_device() -> TestResult {
    for name in ["llama3", "gpt2", "qwen3", "gemma3", "smollm2"] {
        compare(name, &MESHES, &EngineOptions { ignore_end: true, ..exact(7, 3) });
    }
    compare("llama3", &[[3, 2], [2, 3]], &EngineOptions { ignore_end: true, ..exact(16, 3) });
    Ok(())
}

fn quantised_files_have_the_text_of_one_device() -> TestResult {
    for name in FORMATS {
        let options = EngineOptions { precision: Precision::Keep, ignore_end: true, ..exact(7, 3) };
        compare(name, &MESHES, &options);
    }
    Ok(())
}

fn every_family_has_the_text_of_one_device() -> TestResult {
    for name in FAMILIES {
        compare(name, &MESHES, &EngineOptions { ignore_end: true, ..exact(7, 3) });
    }
    Ok(())
}

/// Any number of micro-batches, fewer or more than stages and requests, has the same text.
fn fixed_micro_batches_have_the_text_of_one_device() -> TestResult {
    let model = open("llama3");
    let options = EngineOptions { ignore_end: true, ..exact(16, 3) };
    let expected = greedy(&mut engine(&model, &options), &prompts(&model), 12);
    for count in [1, 2, 3, 8] {
        let mut options = staged(2, &options);
        options.pipeline.micro_batches = Some(count);
        let devices = devices(2);
        let plan = EnginePlan::on_devices(&model, &devices, &options).unwrap();
        let mut several = plan.load(&model, devices[0].clone(), &mut |_, _| {}).unwrap();
        assert_eq!(greedy(&mut several, &prompts(&model), 12), expected, "{count} micro-batches");
    }
    Ok(())
}

/// Log probabilities of several tokens, and pages of a prompt that an earlier request has computed.
fn likely_tokens_and_shared_prefixes_are_those_of_one_device() -> TestResult {
    let model = open("llama3");
    let options = EngineOptions { ignore_end: true, ..exact(16, 3) };
    let (mut one, mut several) = (engine(&model, &options), split(&model, [2, 2], &options));
    compare_likely(&mut one, &mut several, TOLERANCE);
    Ok(())
}

fn one_step_in_flight_has_the_same_text() -> TestResult {
    compare("llama3", &[[1, 3]], &EngineOptions { ignore_end: true, launch_ahead: false, ..exact(7, 3) });
    Ok(())
}

/// Penalties count tokens that the host sends again as tokens that were generated.
fn equal_seeds_draw_the_tokens_of_one_device() -> TestResult {
    let model = open("llama3");
    let options = EngineOptions { ignore_end: true, ..exact(16, 3) };
    let sampling = SamplingOptions {
        temperature: 0.9,
        top_k: 20,
        seed: 7,
        repetition_penalty: 1.2,
        presence_penalty: 0.4,
        frequency_penalty: 0.3,
        ..Default::default()
    };
    let expected = sampled(&mut engine(&model, &options), &prompts(&model), 16, &sampling);
    for stages in [2, 3] {
        let mut several = split(&model, [1, stages], &options);
        assert_eq!(sampled(&mut several, &prompts(&model), 16, &sampling), expected, "{stages} stages");
    }
    Ok(())
}

fn speculation_and_embeddings_run_over_stages() -> TestResult {
    let model = open("llama3");
    let options = EngineOptions { ignore_end: true, ..exact(16, 3) };
    let mut one = engine(&model, &options);
    let repeating: Vec<u32> = (0..24).map(|token| token % 4 + 3).collect();
    let prompts = vec![repeating.clone(), repeating[..9].to_vec()];
    let expected = greedy(&mut one, &prompts, 24);
    let speculation = Some(Speculation::Ngram { tokens: 4 });
    let mut several = split(&model, [1, 2], &EngineOptions { speculation, ..options.clone() });
    assert_eq!(greedy(&mut several, &prompts, 24), expected);

    let embedding = |engine: &mut Engine| {
        let request = EmbeddingRequest { tokens: repeating.clone(), ..EmbeddingRequest::default() };
        engine.submit_embedding(request).unwrap();
        // Beside requests that generate.
        engine.submit(Request { prompt: vec![1, 2], max_tokens: Some(4), ..Request::default() }).unwrap();
        let mut found = Vec::new();
        while !engine.is_idle() {
            engine.step().unwrap();
            found.extend(engine.take_embeddings());
        }
        found.swap_remove(0).1
    };
    let expected = embedding(&mut one);
    for (found, expected) in embedding(&mut several).into_iter().zip(expected) {
        assert!((found - expected).abs() <= TOLERANCE, "{found} for {expected}");
    }
    Ok(())
}

/// Requests that are cancelled, limited by a bias, or warmed up for leave stages in step.
fn requests_come_and_go() -> TestResult {
    let model = open("llama3");
    let options = EngineOptions { ignore_end: true, ..exact(16, 3) };
    let mut several = split(&model, [1, 3], &options);
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

fn meshes_that_do_not_fit_are_refused() -> TestResult {
    let model = open("llama3");
    let refused = |ranks: usize, pipeline: PipelineOptions| {
        let options = EngineOptions { pipeline, ..exact(16, 1) };
        EnginePlan::on_devices(&model, &devices(ranks), &options).unwrap_err().to_string()
    };
    let stages = |stages: usize, first_layers: &[usize]| PipelineOptions {
        stages,
        first_layers: first_layers.to_vec(),
        ..PipelineOptions::default()
    };
    let micro_batches = |stages: usize, count: usize| PipelineOptions {
        stages,
        micro_batches: Some(count),
        ..PipelineOptions::default()
    };
    for (message, part) in [
        (refused(3, stages(2, &[])), "pp is 2: must divide the number of ranks, which is 3"),
        (refused(1, stages(2, &[])), "pp is 2: must divide the number of ranks, which is 1"),
        (refused(40, stages(40, &[])), "can be divided into at most"),
        (refused(2, stages(2, &[99])), "layer 99, which the model does not have"),
        (refused(3, stages(3, &[1])), "names 1 first layers, but 3 stages have 2"),
        (refused(3, stages(3, &[1, 1])), "must be above 0 and increase"),
        (refused(2, micro_batches(2, 0)), "is 0, must be from 1 to"),
        (refused(2, micro_batches(1, 4)), "only several stages work on micro-batches"),
    ] {
        assert!(message.contains(part), "{message}");
    }
    Ok(())
}

/// The engine reports the rank and its reason at once, and its threads end.
fn a_rank_that_fails_or_panics_is_named() -> TestResult {
    let model = open("llama3");
    for (fault, reason) in
        [(Fault::Lost, "took the device away"), (Fault::Panic, "panicked: a test made Plan panic")]
    {
        for broken_rank in [1, 3] {
            let broken = FaultyDevice::new(devices(1).remove(0));
            let mut all = devices(4);
            all[broken_rank] = broken.clone();
            let plan = EnginePlan::on_devices(&model, &all, &staged(2, &exact(16, 1))).unwrap();
            let mut engine = plan.load(&model, all[0].clone(), &mut |_, _| {}).unwrap();
            broken.arm(Operation::Plan, 1, fault);
            engine.submit(Request { prompt: vec![1, 2, 3], ..Request::default() }).unwrap();
            let start = Instant::now();
            let error = engine.step().unwrap_err().to_string();
            assert!(error.contains(&format!("rank {broken_rank}")) && error.contains(reason), "{error}");
            drop(engine);
            assert!(start.elapsed() < Duration::from_secs(30), "the ranks ended after {:?}", start.elapsed());
        }
    }
    Ok(())
}
