//! Embeddings: compared with transformers, and concurrent with other requests.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::device::Device;
use dsrun_engine::{
    EmbeddingRequest, Engine, EngineError, EngineOptions, EnginePlan, Pooling, Precision, Request, RequestId,
    service::{Service, ServiceError, ServiceOptions},
};
use dsrun_models::model::Model;
use rstest::rstest;
use serde::Deserialize;
use std::{collections::HashMap, sync::Arc, time::Duration};
use support::{device, exact, fixtures, greedy, late::LateDevice, lowering::LoweringDevice};

#[derive(Deserialize)]
struct Text {
    tokens: Vec<u32>,
    mean: Vec<f32>,
    last: Vec<f32>,
}

/// The texts and vectors that `data/embeddings.py` wrote.
fn texts(model: &str) -> Vec<Text> {
    let mut all: HashMap<String, Vec<Text>> =
        serde_json::from_str(include_str!("data/embeddings.json")).unwrap();
    all.remove(model).unwrap()
}

/// A request for each pooling of each text, with the expected vector.
fn requests(texts: &[Text]) -> Vec<(EmbeddingRequest, &[f32])> {
    let both = |text| {
        let Text { tokens, mean, last }: &Text = text;
        [(Pooling::Mean, mean), (Pooling::Last, last)].map(|(pooling, vector)| {
            (
                EmbeddingRequest { tokens: tokens.clone(), pooling, ..EmbeddingRequest::default() },
                vector.as_slice(),
            )
        })
    };
    texts.iter().flat_map(both).collect()
}

fn load(model: &str, device: Arc<dyn Device>, options: &EngineOptions) -> Engine {
    let model = Model::open(fixtures().join(model)).unwrap();
    let plan = EnginePlan::new(&model, &*device, options).unwrap();
    plan.load(&model, device, &mut |_, _| {}).unwrap()
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn run(engine: &mut Engine, requests: Vec<EmbeddingRequest>) -> Vec<Vec<f32>> {
    let ids: Vec<RequestId> =
        requests.into_iter().map(|request| engine.submit_embedding(request).unwrap()).collect();
    let mut vectors = HashMap::new();
    while !engine.is_idle() {
        assert!(engine.step().unwrap().is_empty(), "embedding requests have no token events");
        vectors.extend(engine.take_embeddings());
    }
    assert_eq!(engine.pages_in_use(), 0);
    ids.iter().map(|id| vectors.remove(id).unwrap()).collect()
}

/// Tolerance for values of the order of 0.1 summed in another order: 6e-8 per rounding, over some dozens of roundings.
const CLOSE: f32 = 5e-6;

#[rstest]
fn vectors_match_those_of_transformers(
    #[values("llama3", "mistral", "qwen3", "gpt2", "opt", "opt_350m")] model: &str,
    #[values(4, 64)] step_tokens: usize,
    #[values(false, true)] fused: bool,
) {
    let texts = texts(model);
    let device: Arc<dyn Device> = if fused { LoweringDevice::open() } else { device() };
    let mut engine = load(model, device, &exact(step_tokens, 3));
    let (requests, expected): (Vec<_>, Vec<_>) = requests(&texts).into_iter().unzip();
    for (found, expected) in run(&mut engine, requests).iter().zip(expected) {
        let error = difference(found, expected);
        assert!(error < CLOSE, "{error}");
        let length = found.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        assert!((length - 1.0).abs() < 1e-6);
    }
}

#[test]
fn bf16_vectors_are_close_to_f32_vectors() {
    let options = EngineOptions { precision: Precision::Bf16, ..exact(16, 2) };
    let mut engine = load("llama3", device(), &options);
    let texts = texts("llama3");
    let (requests, expected): (Vec<_>, Vec<_>) = requests(&texts).into_iter().unzip();
    for (found, expected) in run(&mut engine, requests).iter().zip(expected) {
        let cosine: f32 = found.iter().zip(expected).map(|(a, b)| a * b).sum();
        // bf16 has 8 significant bits: a rounding is off by up to 1/512, and two layers have some dozens of roundings.
        assert!(cosine > 0.999, "{cosine}");
    }
}

/// Generation, embedding and pre-emption at once: every request gets the result that it gets alone.
#[rstest]
#[case::plenty(4000, 0)]
#[case::few_pages(40, 0)]
#[case::swapped(40, 40)]
fn embeddings_and_generation_do_not_change_each_other(
    #[case] kv_tokens: usize,
    #[case] swap_tokens: usize,
    #[values(false, true)] late: bool,
) {
    let texts = texts("llama3");
    let prompts: Vec<Vec<u32>> = (0..4u32)
        .map(|prompt| (0..3 + prompt * 3).map(|index| (prompt * 31 + index * 17 + 5) % 96).collect())
        .collect();
    let options = EngineOptions {
        kv_tokens: Some(kv_tokens),
        swap_tokens,
        context: Some(36),
        ignore_end: true,
        ..exact(6, 4)
    };
    let alone = greedy(&mut load("llama3", device(), &options), &prompts, 12);
    let device: Arc<dyn Device> = if late { LateDevice::open() } else { device() };
    let mut engine = load("llama3", device, &options);
    let mut answers: HashMap<RequestId, (usize, Vec<u32>)> = HashMap::new();
    let mut expected = HashMap::new();
    for round in 0..3 {
        for (index, prompt) in prompts.iter().enumerate() {
            let request = Request { prompt: prompt.clone(), max_tokens: Some(12), ..Request::default() };
            answers.insert(engine.submit(request).unwrap(), (index, Vec::new()));
        }
        for (request, vector) in requests(&texts) {
            // Texts of later rounds have a higher priority.
            let request = EmbeddingRequest { priority: round, ..request };
            expected.insert(engine.submit_embedding(request).unwrap(), vector);
        }
        // A request that is cancelled while it runs.
        let tokens = vec![7; 30];
        let gone =
            engine.submit_embedding(EmbeddingRequest { tokens, ..EmbeddingRequest::default() }).unwrap();
        for _ in 0..4 {
            engine.step().unwrap().into_iter().for_each(|event| {
                answers.get_mut(&event.request).unwrap().1.push(event.token);
            });
        }
        engine.cancel(gone);
    }
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            answers.get_mut(&event.request).unwrap().1.push(event.token);
        }
    }
    assert_eq!(engine.pages_in_use(), 0);
    for (index, tokens) in answers.into_values() {
        assert_eq!(tokens, alone[index]);
    }
    let vectors = engine.take_embeddings();
    assert_eq!(vectors.len(), expected.len());
    for (id, vector) in vectors {
        let error = difference(&vector, expected[&id]);
        assert!(error < CLOSE, "{error}");
    }
    assert!(engine.statistics().preemptions > 0);
}

#[test]
fn prompts_reuse_pages_of_embedded_texts_and_mean_pooling_reuses_none() {
    let mut engine = load("llama3", device(), &exact(64, 2));
    let text = texts("llama3").pop().unwrap();
    let request =
        |pooling| EmbeddingRequest { tokens: text.tokens.clone(), pooling, ..EmbeddingRequest::default() };
    run(&mut engine, vec![request(Pooling::Mean)]);
    run(&mut engine, vec![request(Pooling::Mean)]);
    assert_eq!(engine.statistics().prefix_hit_tokens, 0);
    let last = run(&mut engine, vec![request(Pooling::Last)]);
    // 23 tokens are five pages of 4 tokens and a partial page.
    assert_eq!(engine.statistics().prefix_hit_tokens, 20);
    assert!(difference(&last[0], &text.last) < CLOSE);
}

#[test]
fn the_service_returns_vectors_and_errors() {
    let engine = load("llama3", device(), &exact(8, 2));
    let service = Service::start(engine, &ServiceOptions::default()).unwrap();
    let handle = service.handle();
    let texts = texts("llama3");
    let pending: Vec<_> = requests(&texts)
        .into_iter()
        .map(|(request, vector)| (handle.embed(request).unwrap(), vector))
        .collect();
    for (pending, expected) in pending {
        assert!(difference(&pending.blocking().unwrap(), expected) < CLOSE);
    }
    let empty = handle.embed(EmbeddingRequest::default()).unwrap_err();
    assert!(matches!(&empty, ServiceError::Request(error) if matches!(**error, EngineError::EmptyPrompt)));
    let unknown = EmbeddingRequest { tokens: vec![96], ..EmbeddingRequest::default() };
    assert!(handle.embed(unknown).unwrap_err().to_string().contains("token 96"));
    let long =
        EmbeddingRequest { tokens: vec![1; handle.limits().context + 1], ..EmbeddingRequest::default() };
    assert!(handle.embed(long).unwrap_err().to_string().contains("the context holds"));
    // Dropping the receiver cancels the request.
    let tokens = vec![1; handle.limits().context];
    drop(handle.embed(EmbeddingRequest { tokens: tokens.clone(), ..EmbeddingRequest::default() }).unwrap());
    let waits = handle.embed(EmbeddingRequest { tokens, ..EmbeddingRequest::default() }).unwrap();
    service.stop(Duration::from_secs(60)).unwrap();
    assert!(matches!(waits.blocking(), Ok(_) | Err(ServiceError::Stopped)));
    assert!(matches!(handle.embed(EmbeddingRequest::default()), Err(ServiceError::Stopped)));
}
