//! Real encoders: all-MiniLM-L6-v2 and an ALBERT, compared with transformers. `data/real_encoders.py` prepares them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_engine::{EmbeddingRequest, Engine, EnginePlan, Pooling, RequestId};
use dsrun_models::{
    model::Model,
    sentence_transformers::{TextEmbedding, TextPooling},
    tokenizer::EncodeOptions,
};
use dsrun_test_support::{TestResult, encoders, test_main};
use serde::Deserialize;
use std::collections::HashMap;
use support::{device, exact};

test_main![
    sentences_have_the_vectors_of_sentence_transformers,
    an_albert_has_the_hidden_states_of_transformers
];

/// Vectors have to equal those of transformers within this.
const TOLERANCE: f32 = 1e-4;

#[derive(Deserialize)]
struct Expected {
    minilm: Vec<Sentence>,
    albert: Vec<Reaction>,
}

#[derive(Deserialize)]
struct Sentence {
    text: String,
    tokens: Vec<u32>,
    vector: Vec<f32>,
}

#[derive(Deserialize)]
struct Reaction {
    tokens: Vec<u32>,
    first: Vec<f32>,
    mean: Vec<f32>,
}

fn expected() -> Expected {
    serde_json::from_str(include_str!("data/real_encoders.json")).unwrap()
}

fn engine(model: &Model) -> Engine {
    let device = device();
    let plan = EnginePlan::new(model, &*device, &exact(64, 4)).unwrap();
    plan.load(model, device, &mut |_, _| {}).unwrap()
}

fn run(engine: &mut Engine, requests: Vec<EmbeddingRequest>) -> Vec<Vec<f32>> {
    let ids: Vec<RequestId> =
        requests.into_iter().map(|request| engine.submit_embedding(request).unwrap()).collect();
    let mut vectors = HashMap::new();
    while !engine.is_idle() {
        engine.step().unwrap();
        vectors.extend(engine.take_embeddings());
    }
    ids.iter().map(|id| vectors.remove(id).unwrap()).collect()
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn sentences_have_the_vectors_of_sentence_transformers() -> TestResult {
    let model = Model::open(encoders()?.join("minilm")).unwrap();
    assert_eq!(model.embedding(), Some(TextEmbedding { pooling: TextPooling::Mean, normalize: true }));
    let tokenizer = model.tokenizer().unwrap();
    let sentences = expected().minilm;
    let request = |sentence: &Sentence| {
        let options = EncodeOptions { add_special: true, parse_special: false };
        let tokens = tokenizer.encode(&sentence.text, options).unwrap();
        assert_eq!(tokens, sentence.tokens, "{}", sentence.text);
        EmbeddingRequest { tokens, pooling: Pooling::Mean, ..EmbeddingRequest::default() }
    };
    let requests = sentences.iter().map(request).collect();
    let vectors = run(&mut engine(&model), requests);
    for (vector, sentence) in vectors.iter().zip(&sentences) {
        let error = difference(vector, &sentence.vector);
        assert!(error < TOLERANCE, "{}: {error}", sentence.text);
    }
    Ok(())
}

fn an_albert_has_the_hidden_states_of_transformers() -> TestResult {
    let model = Model::open(encoders()?.join("albert")).unwrap();
    let mut engine = engine(&model);
    for reaction in expected().albert {
        let request = |pooling| EmbeddingRequest {
            tokens: reaction.tokens.clone(),
            pooling,
            keep_length: true,
            ..EmbeddingRequest::default()
        };
        let vectors = run(&mut engine, vec![request(Pooling::First), request(Pooling::Mean)]);
        for (vector, expected) in vectors.iter().zip([&reaction.first, &reaction.mean]) {
            let error = difference(vector, expected);
            assert!(error < TOLERANCE, "{} tokens: {error}", reaction.tokens.len());
        }
    }
    Ok(())
}
