//! Forecasts, and the simulator of pipelines: its schedules are those of the engine, and its idle time is that of GPipe's law.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::{
    DType, WeightFormat,
    device::{Backend, Device, DeviceOptions},
};
use dsrun_engine::{
    EngineOptions, EnginePlan, KvIn, LaunchedStep, Request,
    passes::{partition::PipelineOptions, shard::MeshCosts},
    planner::{
        Bound, Forecast, Load, best_batch, forecast,
        hardware::Hardware,
        simulation::{SimulatedRequest, launched_steps, simulate},
        timeline::Timeline,
    },
};
use dsrun_models::model::Model;
use rstest::rstest;
use std::sync::Arc;
use support::{exact, fixtures};

/// Every step takes a slot on every stage.
fn slot(_: usize, _: &LaunchedStep) -> f64 {
    1.0
}

fn pipeline(stages: usize, options: EngineOptions) -> EngineOptions {
    EngineOptions { pipeline: PipelineOptions { stages, ..PipelineOptions::default() }, ..options }
}

/// The idle share of `steps` equal steps that follow each other through `stages` stages: (K - 1) / (M + K - 1).
fn gpipe(stages: usize, steps: usize) -> f64 {
    (stages - 1) as f64 / (steps + stages - 1) as f64
}

#[rstest]
fn a_prompt_in_many_micro_batches_idles_by_the_law_of_gpipe(
    #[values(2, 3, 4, 8)] stages: usize,
    #[values(1, 2, 7, 16, 64)] chunks: usize,
) {
    // A step of these tokens is divided into chunks of 64, four for each stage.
    let step_tokens = 4 * stages * 64;
    let context = Some(64 * 64 + 1);
    let options = pipeline(stages, EngineOptions { step_tokens, context, ..EngineOptions::default() });
    let request = SimulatedRequest { prompt: 64 * chunks, answer: 1 };
    let timeline = simulate(&[request], 1 << 16, &options, &MeshCosts::HOST, &slot).unwrap();
    assert_eq!(timeline.spans.len(), chunks * stages);
    assert!((timeline.bubble() - gpipe(stages, chunks)).abs() < 1e-9, "{}", timeline.bubble());
    // By GPipe's rule four micro-batches for each stage are enough.
    assert!(chunks < 4 * stages || timeline.bubble() < 0.2);
}

/// The pipeline fills and drains once for all tokens, and not for each.
#[rstest]
fn generation_idles_once_and_not_for_every_token(#[values(2, 3, 4)] stages: usize) {
    let requests = vec![SimulatedRequest { prompt: 1, answer: 50 }; 2 * stages];
    let options = EngineOptions { max_requests: 2 * stages, ..EngineOptions::default() };
    let timeline = |launch_ahead: bool, count: usize| {
        let options = pipeline(stages, EngineOptions { launch_ahead, ..options.clone() });
        simulate(&requests[..count], 1024, &options, &MeshCosts::HOST, &slot).unwrap().bubble()
    };
    let full = timeline(true, 2 * stages);
    assert!((full - gpipe(stages, 50 * stages)).abs() < 1e-9, "{full}");
    // With one step in flight, or one request, all stages but one wait.
    let rest = 1.0 - 1.0 / stages as f64;
    for idle in [timeline(false, 2 * stages), timeline(true, 1)] {
        assert!((idle - rest).abs() < 1e-9, "{idle}");
    }
}

/// The executor launches the steps of the simulator, in the same order and with as many tokens read before each. So the slots in which
/// its stages idle are those of the simulator.
#[rstest]
fn the_executor_keeps_the_schedule_of_the_simulator(
    #[values(2, 3)] stages: usize,
    #[values(true, false)] launch_ahead: bool,
) {
    let model = Model::open(fixtures().join("llama3")).unwrap();
    let lengths = [(9, 12), (1, 20), (30, 5), (4, 4), (2, 16)];
    let requests = lengths.map(|(prompt, answer)| SimulatedRequest { prompt, answer });
    let options = EngineOptions {
        ignore_end: true,
        prefix_cache: false,
        launch_ahead,
        context: Some(64),
        ..exact(8, 4)
    };
    let options = pipeline(stages, options);
    let device = || -> Arc<dyn Device> {
        let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
        dsrun_cpu::CpuBackend::new().open(0, &options).unwrap()
    };
    let devices: Vec<_> = (0..stages).map(|_| device()).collect();
    let plan = EnginePlan::on_devices(&model, &devices, &options).unwrap();
    let mut engine = plan.load(&model, devices[0].clone(), &mut |_, _| {}).unwrap();
    engine.record_steps().unwrap();
    for SimulatedRequest { prompt, answer } in requests {
        let prompt = (0..prompt as u32).map(|token| token % 7 + 1).collect();
        engine.submit(Request { prompt, max_tokens: Some(answer), ..Request::default() }).unwrap();
    }
    while !engine.is_idle() {
        engine.step().unwrap();
    }
    let steps = engine.take_steps();
    let simulated = launched_steps(&requests, model.config().context, &options, &MeshCosts::HOST).unwrap();
    assert_eq!(steps, simulated);
    let idle = |steps: &[LaunchedStep]| Timeline::replay(steps, stages, &slot).bubble();
    assert!(idle(&steps) == idle(&simulated) && (launch_ahead == (idle(&steps) < 0.45)), "{}", idle(&steps));
}

#[test]
fn a_timeline_is_drawn() {
    let options = pipeline(2, EngineOptions::default());
    let requests = [SimulatedRequest { prompt: 200, answer: 3 }];
    let timeline =
        simulate(&requests, 1024, &options, &MeshCosts::HOST, &|_, step| step.tokens as f64).unwrap();
    let svg = timeline.svg("ms");
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("<title>").count(), timeline.spans.len());
    assert!(svg.contains("stage 2") && !svg.contains("stage 3"));
    let error =
        simulate(&[SimulatedRequest { prompt: 0, answer: 3 }], 1024, &options, &MeshCosts::HOST, &slot)
            .unwrap_err();
    assert!(error.to_string().contains("must have a prompt and an answer"), "{error}");
}

fn model(preset: &str) -> Model {
    Model::random_named(preset, 0, WeightFormat::Dense(DType::BF16)).unwrap()
}

fn forecasts(preset: &str, devices: usize, requests: usize) -> Vec<Forecast> {
    let (hardware, load) = (Hardware::named("h100").unwrap(), Load { requests, context: 1024, prompt: 512 });
    forecast(&model(preset), devices, None, &hardware, &EngineOptions::default(), load).unwrap()
}

fn mesh(all: &[Forecast], tp: usize, pp: usize) -> &Forecast {
    all.iter().find(|forecast| (forecast.tp, forecast.pp) == (tp, pp)).unwrap()
}

#[test]
fn forecasts_follow_from_bytes_and_bandwidth() {
    let one = &forecasts("llama-8b", 1, 1)[0];
    // All weights but the embedding are read for a token: 15 GB of 16.
    let weights = one.stages[0].weights;
    assert!((15.9e9..16.2e9).contains(&(weights as f64)), "{weights}");
    assert!((14.9e9..15.6e9).contains(&(one.bytes_per_token as f64)), "{}", one.bytes_per_token);
    let floor = one.bytes_per_token as f64 / (0.89 * 3.35e12) * 1e3;
    assert!((one.token_ms - floor).abs() < 0.02 * floor, "{} of {floor}", one.token_ms);
    assert_eq!((one.fits, one.stages[0].bound), (Some(true), Bound::Memory));

    let four = forecasts("llama-8b", 4, 1);
    assert_eq!(four.len(), 3, "tp 1, 2 and 4");
    let [tp, both, pp] = [(4, 1), (2, 2), (1, 4)].map(|(tp, pp)| mesh(&four, tp, pp));
    // One request is faster by tensor parallelism only, and stages add their transfers.
    assert!(tp.token_ms < both.token_ms && both.token_ms < one.token_ms && one.token_ms < pp.token_ms);
    assert!(four[0] == *tp && pp.token_ms < 1.02 * one.token_ms);
    assert!(pp.stages.iter().all(|stage| stage.weights < weights / 3));
    // A prompt in chunks goes through stages side by side.
    assert!(pp.first_token_ms < one.first_token_ms);

    // Prompts are bound by operations.
    let first = one.first_token_ms / 1e3;
    let operations = 2.0 * 512.0 * 7.0e9 / 9.89e14;
    assert!(first > operations && first < 2.0 * operations, "{first} for {operations}");
}

/// Forecasts are within a tenth of what was measured behind 512 tokens: `docs/src/parallelism.md` has the figures. H100, and some H200,
/// were measured with builds whose all-reduces are all between launches, which take longer.
#[test]
fn forecasts_are_close_to_measured_times() {
    let between_launches = Some(Hardware::named("a100").unwrap().costs.latency_us);
    let load = Load { requests: 1, context: 1024, prompt: 512 };
    for (preset, device, tp, measured, latency_us) in [
        ("llama-8b", "h200", 1, 3.64, None),
        ("llama-8b", "h200", 2, 2.05, None),
        ("llama-70b", "h200", 2, 16.8, None),
        ("qwen3-32b", "h200", 2, 8.19, None),
        ("llama-1b", "h200", 2, 0.44, None),
        ("llama-8b", "h200", 4, 1.32, None),
        ("llama-70b", "h200", 4, 9.08, None),
        ("qwen3-32b", "h200", 4, 4.71, None),
        ("llama-1b", "h200", 4, 0.32, None),
        ("qwen3-30b-a3b", "h200", 1, 2.34, None),
        ("qwen3-30b-a3b", "h200", 2, 1.84, None),
        ("qwen3-30b-a3b", "h200", 4, 1.50, None),
        ("mixtral-8x7b", "h200", 1, 6.25, None),
        ("mixtral-8x7b", "h200", 2, 3.52, None),
        ("mixtral-8x7b", "h200", 4, 2.09, None),
        ("llama-8b", "h100", 1, 5.04, None),
        ("llama-8b", "h200", 2, 2.56, between_launches),
        ("llama-8b", "h200", 4, 1.79, between_launches),
        ("llama-70b", "h200", 2, 17.74, between_launches),
        ("llama-70b", "h200", 4, 10.40, between_launches),
        ("qwen3-32b", "h200", 2, 9.54, between_launches),
        ("llama-1b", "h200", 2, 0.70, between_launches),
        ("llama-8b", "h100", 2, 3.27, between_launches),
        ("llama-70b", "h100", 2, 24.65, between_launches),
        ("qwen3-32b", "h100", 2, 12.5, between_launches),
        ("llama-1b", "h100", 2, 0.80, between_launches),
    ] {
        let mut hardware = Hardware::named(device).unwrap();
        hardware.costs.latency_us = latency_us.unwrap_or(hardware.costs.latency_us);
        let options = EngineOptions::default();
        let found = &forecast(&model(preset), tp, Some((tp, 1)), &hardware, &options, load).unwrap()[0];
        let error = (found.token_ms / measured - 1.0).abs();
        assert!(error < 0.1, "{preset} on {tp} {device}: {} ms, measured {measured}", found.token_ms);
    }
}

/// Weights that do not fit are copied in every step, and the copies of a step serve all its requests.
#[test]
fn weights_that_do_not_fit_are_streamed() {
    let one = &forecasts("llama-70b", 1, 1)[0];
    let hardware = Hardware::named("h100").unwrap();
    let (memory, streamed) = (hardware.memory.unwrap(), one.streamed_bytes());
    assert!(one.fits == Some(false) && one.memory() <= memory, "{one:?}");
    // 141 GB of weights, and two slots of 1.7 GB; layers are whole, and the number of streamed ones is even.
    assert!((60_000_000_000..70_000_000_000).contains(&streamed), "{streamed}");
    let copies = streamed as f64 / hardware.host_bandwidth * 1e3;
    assert!((one.token_ms - copies).abs() < 1e-6 * copies, "{} of {copies}", one.token_ms);
    assert_eq!(one.stages[0].bound, Bound::HostBandwidth);
    assert!(one.first_token_ms >= copies);

    let (load, options) = (Load { requests: 1, context: 1024, prompt: 512 }, EngineOptions::default());
    let small = Hardware { memory: Some(8_000_000_000), ..hardware.clone() };
    let model = model("llama-8b");
    let (requests, most) = best_batch(&model, (1, 1), &small, &options, load).unwrap().unwrap();
    let alone = &forecast(&model, 1, None, &small, &options, load).unwrap()[0];
    // A request's cache takes 134 MB, so that 32 leave room for the ring, the embedding and the head, and 64 do not.
    assert_eq!(requests, 32);
    assert!(most.tokens_per_second > 20.0 * alone.tokens_per_second && most.memory() <= 8_000_000_000);
    // 14 GB of layers are worth as much as the cache of about 104 requests.
    let threshold = alone.cache_threshold(load);
    assert!((95.0..115.0).contains(&threshold), "{threshold}");

    // Too small for a layer, its cache, and what stays.
    let tiny = Hardware { memory: Some(2_000_000_000), ..hardware };
    let none = &forecast(&model, 1, None, &tiny, &options, load).unwrap()[0];
    assert_eq!((none.fits, none.streamed_bytes(), none.stages[0].streamed), (Some(false), 0, None));
    assert!(best_batch(&model, (1, 1), &tiny, &options, load).unwrap().is_none());
    // Beside the KV cache of 12 layers there is room for a ring, beside that of 20 there is not: so no stage streams.
    let uneven = PipelineOptions { first_layers: vec![20], ..PipelineOptions::default() };
    let (options, load) =
        (EngineOptions { pipeline: uneven, ..EngineOptions::default() }, Load { requests: 64, ..load });
    let full = Hardware { memory: Some(6_500_000_000), ..tiny };
    let both = forecast(&model, 2, Some((1, 2)), &full, &options, load).unwrap();
    let stages = &both[0].stages;
    assert!(both[0].fits == Some(false) && stages.iter().all(|stage| stage.streamed.is_none()), "{stages:?}");
    assert!(stages.iter().map(|stage| stage.weights).sum::<u64>() > 15_900_000_000, "{stages:?}");
    let full = Hardware { memory: Some(7_500_000_000), ..full };
    let both = forecast(&model, 2, Some((1, 2)), &full, &options, load).unwrap();
    assert!(both[0].stages.iter().all(|stage| stage.streamed.is_some()), "{both:?}");
}

/// Keys and values that do not fit are read in host memory, after the weights and not beside them.
#[test]
fn a_cache_that_does_not_fit_is_read_in_host_memory() {
    let hardware = Hardware { memory: Some(24_000_000_000), ..Hardware::named("h200").unwrap() };
    let load = Load { requests: 64, context: 4096, prompt: 512 };
    let model = model("llama-8b");
    let on_device = EngineOptions::default();
    let in_host = EngineOptions { kv_in: KvIn::Host, ..on_device.clone() };
    let forecast =
        |hardware: &Hardware, options| forecast(&model, 1, None, hardware, options, load).unwrap().remove(0);
    let found = forecast(&hardware, &in_host);
    let cache = found.stages[0].host_cache.unwrap();
    assert_eq!((found.fits, found.streamed_bytes()), (Some(true), 0), "{found:?}");
    assert!(found.memory() <= 24_000_000_000 && found.memory() > 21_000_000_000, "{found:?}");
    // Each of 32 layers has 1.07 GB; 16 GB of weights and two slots of a layer leave room for five of them.
    assert_eq!((cache.layers, cache.bytes), (27, 27 << 30), "{cache:?}");
    let read_ms = cache.bytes as f64 / hardware.host_bandwidth * 1e3;
    let unlimited = forecast(&Hardware { memory: None, ..hardware.clone() }, &on_device);
    assert!((found.token_ms - read_ms - unlimited.token_ms).abs() < 1e-6, "{found:?} {unlimited:?}");
    assert_eq!(found.stages[0].bound, Bound::HostBandwidth);
    // What fits stays on the device.
    let large = Hardware { memory: Some(80_000_000_000), ..hardware };
    assert_eq!(forecast(&large, &in_host), forecast(&large, &on_device));
}

#[test]
fn a_model_that_does_not_fit_says_so() {
    let two = forecasts("llama-70b", 2, 1);
    assert!(two.iter().all(|forecast| forecast.fits == Some(true)), "{two:?}");
    // An engine that finds too little memory names the command that says what is needed.
    let tiny = Model::open(fixtures().join("llama3")).unwrap();
    let small = DeviceOptions { memory_limit: Some(1 << 16), ..DeviceOptions::default() };
    let device: Arc<dyn Device> = dsrun_cpu::CpuBackend::new().open(0, &small).unwrap();
    let plan = EnginePlan::new(&tiny, &*device, &exact(16, 1)).unwrap();
    let error = plan.load(&tiny, device, &mut |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("does not fit") && error.contains("`dsrun plan`"), "{error}");

    let hardware = Hardware::named("h100").unwrap();
    let load = Load { requests: 1, context: 1024, prompt: 512 };
    for (devices, mesh, part) in
        [(3, Some((2, 2)), "must be tp times pp, which is 4"), (0, None, "must be at least 1")]
    {
        let error = forecast(&model("llama-1b"), devices, mesh, &hardware, &EngineOptions::default(), load);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert!(Hardware::named("h9000").is_none());
    assert!(Hardware::names().iter().all(|name| Hardware::named(name).is_some()));
}
