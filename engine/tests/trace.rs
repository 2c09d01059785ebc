//! Traces of what each rank runs, and the simulator's predictions held against them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::{
    BlockFormat, WeightFormat,
    device::{Backend, Device, DeviceOptions},
};
use dsrun_engine::{
    Engine, EngineOptions, EnginePlan, LaunchedStep, Precision, Request, SpanKind, Trace, TraceSpan,
    passes::{
        partition::PipelineOptions,
        shard::{MeshCosts, ShardPolicy},
    },
    planner::{
        simulation::{SimulatedRequest, launched_steps},
        timeline::Timeline,
    },
};
use dsrun_models::model::Model;
use rstest::rstest;
use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};
use support::{exact, open};

/// An engine over a mesh, whose ranks record a trace.
fn traced(model: &Model, [tp, pp]: [usize; 2], options: &EngineOptions) -> (Engine, Arc<Trace>) {
    let device = |_| -> Arc<dyn Device> {
        let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
        dsrun_cpu::CpuBackend::new().open(0, &options).unwrap()
    };
    let devices: Vec<_> = (0..tp * pp).map(device).collect();
    // Exchanges count as free, so that models as small as the fixtures are split.
    let costs =
        MeshCosts { latency_us: 0.0, gather_latency_us: 0.0, link_bandwidth: 1e15, ..MeshCosts::HOST };
    let options = EngineOptions {
        shard: ShardPolicy { costs: Some(costs), ..ShardPolicy::default() },
        pipeline: PipelineOptions { stages: pp, ..PipelineOptions::default() },
        ignore_end: true,
        prefix_cache: false,
        ..options.clone()
    };
    let mut plan = EnginePlan::on_devices(model, &devices, &options).unwrap();
    let trace = Arc::new(Trace::default());
    plan.trace(&trace);
    (plan.load(model, devices[0].clone(), &mut |_, _| {}).unwrap(), trace)
}

fn run(engine: &mut Engine, requests: &[SimulatedRequest]) {
    for SimulatedRequest { prompt, answer } in requests {
        let prompt = (0..*prompt as u32).map(|token| token % 7 + 1).collect();
        engine.submit(Request { prompt, max_tokens: Some(*answer), ..Request::default() }).unwrap();
    }
    while !engine.is_idle() {
        engine.step().unwrap();
    }
}

const REQUESTS: [SimulatedRequest; 3] = [
    SimulatedRequest { prompt: 9, answer: 5 },
    SimulatedRequest { prompt: 20, answer: 3 },
    SimulatedRequest { prompt: 2, answer: 7 },
];

#[rstest]
fn every_rank_records_its_steps_and_collectives(#[values([1, 1], [3, 1], [1, 2], [2, 2])] mesh: [usize; 2]) {
    let [tp, pp] = mesh;
    let (mut engine, trace) = traced(&open("llama3"), mesh, &exact(8, 3));
    run(&mut engine, &REQUESTS);
    engine.record_steps().unwrap();
    engine.record_trace(true).unwrap();
    run(&mut engine, &REQUESTS);
    engine.record_trace(false).unwrap();
    let steps = engine.take_steps();
    run(&mut engine, &REQUESTS);
    drop(engine);
    let spans = trace.spans();
    for rank in 0..tp * pp {
        let own = |kind: SpanKind| spans.iter().filter(move |span| span.rank == rank && span.kind == kind);
        let found: BTreeSet<(usize, usize)> =
            own(SpanKind::Step).map(|span| (span.step, span.tokens)).collect();
        let launched: BTreeSet<_> = steps.iter().map(|step| step.tokens).enumerate().collect();
        assert_eq!(found, launched, "rank {rank} of {mesh:?}");
        let stage = own(SpanKind::Step).next().unwrap().stage;
        assert!(own(SpanKind::Step).all(|span| span.stage == stage && span.start_us <= span.end_us));
        let names: BTreeSet<&str> = own(SpanKind::Collective).map(|span| span.name).collect();
        assert_eq!(names.contains("all_reduce"), tp > 1, "rank {rank} of {mesh:?}: {names:?}");
        assert_eq!(names.contains("receive"), stage > 0, "rank {rank} of {mesh:?}: {names:?}");
        assert_eq!(names.contains("send"), stage + 1 < pp, "rank {rank} of {mesh:?}: {names:?}");
        let contains = |step: &TraceSpan, span: &TraceSpan| {
            step.step == span.step && step.start_us <= span.start_us && span.end_us <= step.end_us
        };
        for span in own(SpanKind::Collective) {
            assert!(own(SpanKind::Step).any(|step| contains(step, span)), "{span:?} is in no step");
        }
    }
    let text = trace.chrome();
    assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{text}");
}

/// The mean time of steps on each stage, by the number of their tokens.
fn times(measured: &Timeline) -> HashMap<(usize, usize), f64> {
    let mut all: HashMap<(usize, usize), Vec<f64>> = HashMap::new();
    for span in &measured.spans {
        all.entry((span.stage, span.tokens)).or_default().push(span.end - span.start);
    }
    all.into_iter().map(|(key, times)| (key, times.iter().sum::<f64>() / times.len() as f64)).collect()
}

/// The simulator knows the mean time of each kind of step, and predicts in which of them stages idle. A machine that is busy with
/// other work delays stages at random, so one of several runs has to agree.
#[rstest]
#[case(2, 3)]
#[case(3, 2)]
#[case(3, 4)]
#[ignore = "compares times: on a quiet machine, cargo test -p dsrun-engine --test trace -- --ignored"]
fn the_simulator_predicts_the_bubble_of_the_executor(#[case] stages: usize, #[case] count: usize) {
    const RUNS: usize = 6;
    // Steps of milliseconds, beside which the host's work is short.
    let model = Model::random_named("smollm2-135m", 0, WeightFormat::Block(BlockFormat::Q4_1)).unwrap();
    let options = EngineOptions {
        precision: Precision::Keep,
        context: Some(128),
        step_tokens: 8,
        max_requests: count,
        ..EngineOptions::default()
    };
    let (mut engine, trace) = traced(&model, [1, stages], &options);
    let requests: Vec<_> =
        (0..count).map(|index| SimulatedRequest { prompt: 6 + index, answer: 4 + index }).collect();
    run(&mut engine, &requests);
    let plan = EngineOptions {
        pipeline: PipelineOptions { stages, ..PipelineOptions::default() },
        prefix_cache: false,
        ..options
    };
    let costs = MeshCosts { latency_us: 0.0, gather_latency_us: 0.0, ..MeshCosts::HOST };
    let steps = launched_steps(&requests, model.config().context, &plan, &costs).unwrap();
    let mut differences = Vec::new();
    for _ in 0..RUNS {
        let before = trace.spans().len();
        engine.record_trace(true).unwrap();
        run(&mut engine, &requests);
        engine.record_trace(false).unwrap();
        // The other ranks finish their part after this one.
        run(&mut engine, &requests[..1]);
        assert!(trace.spans().len() > before);
        let measured = Timeline::of_trace(&trace);
        trace.clear();
        assert_eq!(measured.spans.len(), steps.len() * stages, "every step is on every stage");
        let times = times(&measured);
        let time = |stage: usize, step: &LaunchedStep| times[&(stage, step.tokens)];
        let predicted = Timeline::replay(&steps, stages, &time);
        let [bubble, expected] = [&measured, &predicted].map(Timeline::bubble);
        assert!(bubble > 0.1 && expected > 0.1, "{bubble} and {expected}");
        let difference = (bubble / expected - 1.0).abs();
        if difference <= 0.1 {
            return;
        }
        differences.push((bubble, expected));
    }
    panic!("measured and predicted bubbles differ by more than a tenth in every run: {differences:?}");
}
