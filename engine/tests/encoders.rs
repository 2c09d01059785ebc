//! Encoders: hidden states and scores of texts that share steps, compared with f32 results of Hugging Face transformers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../models/tests/architectures/fixtures.rs"]
mod fixtures;
mod support;

use dsrun_candle::CandleBackend;
use dsrun_core::device::{Backend, Device, DeviceOptions};
use dsrun_engine::{
    EmbeddingRequest, Engine, EngineOptions, EnginePlan, Pooling, Precision, Request, RequestId, Speculation,
    service::{Service, ServiceOptions},
};
use dsrun_models::model::Model;
use rstest::rstest;
use safetensors::SafeTensors;
use serde::Deserialize;
use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use support::{device, exact, late::LateDevice, lowering::LoweringDevice};

/// Tolerance of hidden states, which are some units large: the fixtures are within 1e-5 of f64, and f32 sums differ by their order.
const TOLERANCE: f32 = 1e-4;

#[derive(Deserialize)]
struct Expected {
    file: String,
    sequences: Vec<Text>,
}

#[derive(Deserialize)]
struct Text {
    tokens: Vec<u32>,
    second: Option<usize>,
    hidden: String,
    scores: Option<String>,
}

impl Text {
    fn request(&self, pooling: Pooling) -> EmbeddingRequest {
        let (tokens, second) = (self.tokens.clone(), self.second);
        EmbeddingRequest { tokens, pooling, keep_length: true, second, priority: 0 }
    }
}

fn names() -> Vec<String> {
    let names = fixtures::encoder_names();
    assert!(names.len() >= 11, "fixtures are missing: {names:?}");
    names
}

/// The texts of a fixture, with their requests and the vectors that these have to give.
fn requests(folder: &Path) -> Vec<(EmbeddingRequest, Vec<f32>)> {
    let expected: Expected =
        serde_json::from_slice(&fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let bytes = fs::read(folder.join(&expected.file)).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let values = |name: &str| -> Vec<f32> {
        let data = tensors.tensor(name).unwrap().data();
        data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let mut requests = Vec::new();
    for text in &expected.sequences {
        let hidden = values(&text.hidden);
        let width = hidden.len() / text.tokens.len();
        let rows: Vec<&[f32]> = hidden.chunks_exact(width).collect();
        let mean = |column: usize| {
            let sum: f64 = rows.iter().map(|row| f64::from(row[column])).sum();
            (sum / rows.len() as f64) as f32
        };
        requests.push((text.request(Pooling::Mean), (0..width).map(mean).collect()));
        requests.push((text.request(Pooling::First), rows[0].to_vec()));
        requests.push((text.request(Pooling::Last), rows[rows.len() - 1].to_vec()));
        if let Some(scores) = &text.scores {
            requests.push((text.request(Pooling::Scores), values(scores)));
        }
    }
    requests
}

fn load(folder: &Path, device: Arc<dyn Device>, options: &EngineOptions) -> Engine {
    let model = Model::open(folder).unwrap();
    let plan = EnginePlan::new(&model, &*device, options).unwrap();
    plan.load(&model, device, &mut |_, _| {}).unwrap()
}

fn run(engine: &mut Engine, requests: impl IntoIterator<Item = EmbeddingRequest>) -> Vec<Vec<f32>> {
    let ids: Vec<RequestId> =
        requests.into_iter().map(|request| engine.submit_embedding(request).unwrap()).collect();
    let mut vectors = HashMap::new();
    while !engine.is_idle() {
        assert!(engine.step().unwrap().is_empty(), "embedding requests have no token events");
        vectors.extend(engine.take_embeddings());
    }
    assert!(engine.take_failures().is_empty());
    assert_eq!(engine.pages_in_use(), 0);
    ids.iter().map(|id| vectors.remove(id).unwrap()).collect()
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The largest distance between what an engine computes and what it should.
fn worst(engine: &mut Engine, requests: &[(EmbeddingRequest, Vec<f32>)]) -> f32 {
    let found = run(engine, requests.iter().map(|(request, _)| request.clone()));
    found.iter().zip(requests).map(|(found, (_, expected))| difference(found, expected)).fold(0.0, f32::max)
}

fn candle() -> Arc<dyn Device> {
    CandleBackend::new().open(0, &DeviceOptions::default()).unwrap()
}

/// Texts one by one, and as many to a step as there is room for.
#[rstest]
#[case::cpu(device)]
#[case::candle(candle)]
#[case::fused(|| LoweringDevice::open() as Arc<dyn Device>)]
#[case::late(|| LateDevice::open() as Arc<dyn Device>)]
fn results_match_those_of_transformers(
    #[case] open: fn() -> Arc<dyn Device>,
    #[values(1, 6)] side_by_side: usize,
) {
    for name in names() {
        let folder = fixtures::folder(&name);
        let mut engine = load(&folder, open(), &exact(40, side_by_side));
        let error = worst(&mut engine, &requests(&folder));
        assert!(error < TOLERANCE, "{name}: {error}");
    }
}

/// A change of a field that matters is seen in the results, or refused; one that does not matter changes nothing.
#[test]
fn flipping_a_switch_does_what_it_does_in_transformers() {
    #[derive(Deserialize)]
    struct Flip {
        pointer: String,
        value: serde_json::Value,
        effect: String,
        max_abs_difference: Option<f32>,
    }
    let text = fs::read(fixtures::root().join("switches.json")).unwrap();
    let switches: HashMap<String, Vec<Flip>> = serde_json::from_slice(&text).unwrap();
    let mut flipped = 0;
    for (name, flips) in switches.iter().filter(|(name, _)| name.starts_with("encoders/")) {
        let requests = requests(&fixtures::folder(name));
        for flip in flips {
            let mut config = fixtures::config(name);
            let (parent, field) = flip.pointer.rsplit_once('/').unwrap();
            config.pointer_mut(parent).unwrap()[field] = flip.value.clone();
            let copy = fixtures::with_config(name, &config);
            let place = format!("{name}: {} = {}", flip.pointer, flip.value);
            if flip.effect == "error" {
                assert!(Model::open(copy.path()).is_err(), "{place} should be refused");
                continue;
            }
            let error = worst(&mut load(copy.path(), device(), &exact(64, 4)), &requests);
            match flip.max_abs_difference.filter(|difference| *difference > 0.0) {
                None => assert!(error < TOLERANCE, "{place} should change nothing, not {error}"),
                Some(_) => assert!(error > 5.0 * TOLERANCE, "{place} should change the results, not {error}"),
            }
            flipped += 1;
        }
    }
    assert!(flipped >= 35, "only {flipped} switches were flipped");
}

#[test]
fn embeddings_are_scaled_to_length_1_and_scores_are_not() {
    let folder = fixtures::folder("encoders/bert_classifier");
    let mut engine = load(&folder, device(), &exact(64, 4));
    for (request, expected) in requests(&folder) {
        let scores = request.pooling == Pooling::Scores;
        let vector = run(&mut engine, [EmbeddingRequest { keep_length: false, ..request }]).remove(0);
        let length = expected.iter().map(|value| value * value).sum::<f32>().sqrt();
        let scale = if scores { 1.0 } else { length };
        let expected: Vec<f32> = expected.iter().map(|value| value / scale).collect();
        assert!(difference(&vector, &expected) < TOLERANCE);
    }
    assert_eq!(engine.limits().labels, Some(3));
}

/// A step has whole texts, however small steps should be.
#[test]
fn texts_are_not_split_and_prefixes_are_not_reused() {
    let folder = fixtures::folder("encoders/modernbert");
    let options = EngineOptions { kv_tokens: Some(8), swap_tokens: 8, ..exact(4, 2) };
    let mut engine = load(&folder, device(), &options);
    assert_eq!(engine.step_tokens(), 64);
    assert_eq!(engine.memory().kv_cache, 0);
    for _ in 0..2 {
        assert!(worst(&mut engine, &requests(&folder)) < TOLERANCE);
    }
    assert_eq!(engine.statistics().prefix_hit_tokens, 0);
    assert_eq!(engine.statistics().preemptions, 0);
}

#[test]
fn a_warmed_up_engine_compiles_no_step_later() {
    let folder = fixtures::folder("encoders/albert_classifier");
    let mut engine = load(&folder, device(), &exact(48, 3));
    let steps = engine.warm_up(&mut |_, _| {}).unwrap() as u64;
    assert_eq!(engine.statistics().compiled_steps.max(steps), steps);
    let before = engine.program().to_string();
    assert!(worst(&mut engine, &requests(&folder)) < TOLERANCE);
    assert_eq!((engine.statistics().compiled_steps, engine.program().to_string()), (steps, before));
}

#[test]
fn a_service_embeds_and_refuses_to_generate() {
    let folder = fixtures::folder("encoders/distilbert");
    let service = Service::start(load(&folder, device(), &exact(64, 2)), &ServiceOptions::default()).unwrap();
    let handle = service.handle();
    for (request, expected) in requests(&folder) {
        assert!(difference(&handle.embed(request).unwrap().blocking().unwrap(), &expected) < TOLERANCE);
    }
    let refused = handle.submit(Request::new(vec![1, 2])).unwrap_err().to_string();
    assert!(refused.contains("no head that predicts tokens") && refused.contains("encoder"), "{refused}");
    let scores =
        EmbeddingRequest { tokens: vec![1], pooling: Pooling::Scores, ..EmbeddingRequest::default() };
    let refused = handle.embed(scores).unwrap_err().to_string();
    assert!(refused.contains("no classification head") && refused.contains("cross-encoder"), "{refused}");
    // One token more than the table has positions.
    let long = EmbeddingRequest { tokens: vec![1; 49], ..EmbeddingRequest::default() };
    let refused = handle.embed(long).unwrap_err().to_string();
    assert!(refused.contains("49 tokens") && refused.contains("holds 48"), "{refused}");
    let parts = EmbeddingRequest { tokens: vec![1, 2], second: Some(2), ..EmbeddingRequest::default() };
    assert!(handle.embed(parts).unwrap_err().to_string().contains("second is 2"));
    service.stop(Duration::from_secs(60)).unwrap();
}

#[test]
fn what_only_decoders_can_do_is_refused() {
    let folder = fixtures::folder("encoders/bert");
    let mut engine = load(&folder, device(), &exact(64, 2));
    let refused = engine.score(&[1, 2], &mut |_, _| {}).unwrap_err().to_string();
    assert!(refused.contains("encoder"), "{refused}");
    let model = Model::open(&folder).unwrap();
    let speculates = EngineOptions { speculation: Some(Speculation::Ngram { tokens: 2 }), ..exact(64, 2) };
    let refused = EnginePlan::new(&model, &*device(), &speculates).unwrap_err().to_string();
    assert!(refused.contains("encoder"), "{refused}");
    // A decoder tells the parts of a text apart by its template, and has no scores.
    let mut decoder = load(&fixtures::folder("qwen3"), device(), &exact(64, 2));
    let parts = EmbeddingRequest { tokens: vec![1, 2], second: Some(1), ..EmbeddingRequest::default() };
    assert!(decoder.submit_embedding(parts).unwrap_err().to_string().contains("not an encoder"));
    let scores =
        EmbeddingRequest { tokens: vec![1], pooling: Pooling::Scores, ..EmbeddingRequest::default() };
    assert!(decoder.submit_embedding(scores).unwrap_err().to_string().contains("classification head"));
}

#[test]
fn half_precision_is_close() {
    let folder: PathBuf = fixtures::folder("encoders/modernbert_classifier");
    let options = EngineOptions { precision: Precision::Bf16, ..exact(64, 4) };
    let mut engine = load(&folder, device(), &options);
    for (request, expected) in requests(&folder) {
        let vector = run(&mut engine, [request]).remove(0);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let cosine = dot(&vector, &expected) / (dot(&vector, &vector) * dot(&expected, &expected)).sqrt();
        // bf16 has 8 significant bits: a rounding is off by up to 1/512, and four layers have some dozens of roundings.
        assert!(cosine > 0.99, "{cosine}");
    }
}
