//! `/v1/rerank` and `/v1/score`.

use super::support::{MODEL, Running, Setup, start, start_with, with};
use dsrun_engine::EngineOptions;
use serde_json::{Value, json};

const RERANK: &str = "/v1/rerank";
const SCORE: &str = "/v1/score";

async fn start_encoder(name: &'static str) -> Running {
    let engine = EngineOptions { max_requests: 4, ..EngineOptions::default() };
    start_with(Setup { engine, encoder: Some(name), ..Setup::default() }).await
}

fn scores(answer: &Value) -> Vec<f64> {
    let items = answer["data"].as_array().expect("a list");
    items.iter().map(|item| item["score"].as_f64().expect("a number")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cross_encoder_orders_documents_by_the_scores_of_pairs() {
    let server = start_encoder("albert_classifier").await;
    let documents = ["c d", "e f g", "a b c", "z"];
    let request = json!({"model": MODEL, "text_1": "a b", "text_2": documents});
    let answer = server.served(SCORE, &request).await;
    let found = scores(&answer);
    assert_eq!(found.len(), documents.len());
    // A pair has the tokens of both texts and three of its own.
    assert_eq!(answer["usage"]["prompt_tokens"], (2 + 2 + 3) + (2 + 3 + 3) + (2 + 3 + 3) + (2 + 1 + 3));
    assert!(found.windows(2).any(|pair| (pair[0] - pair[1]).abs() > 1e-6), "{found:?}");
    // As many first texts as second ones.
    let single = json!({"model": MODEL, "text_1": ["a b", "a b"], "text_2": [documents[2], documents[0]]});
    let single = scores(&server.served(SCORE, &single).await);
    assert!((single[0] - found[2]).abs() < 1e-5 && (single[1] - found[0]).abs() < 1e-5, "{single:?}");

    let request = json!({"model": MODEL, "query": "a b", "documents": documents, "top_n": 3});
    let ranked = server.served(RERANK, &request).await;
    let results = ranked["results"].as_array().expect("a list");
    assert_eq!(results.len(), 3);
    let mut order: Vec<usize> = (0..documents.len()).collect();
    order.sort_by(|a, b| found[*b].total_cmp(&found[*a]));
    for (result, index) in results.iter().zip(order) {
        assert_eq!(
            (&result["index"], &result["document"]["text"]),
            (&json!(index), &json!(documents[index]))
        );
        let score = result["relevance_score"].as_f64().expect("a number");
        assert!((score - found[index]).abs() < 1e-5, "{score}");
    }
    let short = with(request, json!({"return_documents": false, "documents": [{"text": "c"}]}));
    let ranked = server.served(RERANK, &short).await;
    assert!(ranked["results"][0].get("document").is_none(), "{ranked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_embedding_model_scores_by_the_angle_of_vectors() {
    let server = start_encoder("bert").await;
    let request = json!({"model": MODEL, "text_1": "a b c", "text_2": ["a b c", "x y"]});
    let found = scores(&server.served(SCORE, &request).await);
    assert!((found[0] - 1.0).abs() < 1e-5 && found[1] < 0.9999, "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_scored_is_refused() {
    let server = start_encoder("albert_classifier").await;
    let request = json!({"model": MODEL, "query": "a", "documents": ["b"]});
    for (change, field) in [
        (json!({"documents": []}), "documents"),
        (json!({"top_n": 0}), "top_n"),
        (json!({"documents": ["a ".repeat(500)]}), "documents"),
        (json!({"query": "a ".repeat(500)}), "query"),
    ] {
        let (found, message) = server.refused(RERANK, &with(request.clone(), change.clone())).await;
        assert_eq!(found, field, "{message}");
    }
    let uneven = json!({"model": MODEL, "text_1": ["a", "b"], "text_2": ["a", "b", "c"]});
    assert_eq!(server.refused(SCORE, &uneven).await.0, "text_1");
    let (field, message) = server.refused("/v1/completions", &json!({"model": MODEL, "prompt": "a"})).await;
    assert!(message.contains("encoder"), "{field}: {message}");

    let decoder = start().await;
    let (field, message) = decoder.refused(RERANK, &request).await;
    assert_eq!(field, "model");
    assert!(message.contains("decoder"), "{message}");
}
