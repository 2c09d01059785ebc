//! Tests of bounds on the memory that clients make the server hold.

use super::{
    hostile::{connect, post, raw, rest},
    support::{MODEL, PATIENCE, Setup, completion, start, start_with, with},
};
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const COMPLETIONS: &str = "/v1/completions";

/// The choices of a request share its biases, which are counted as long as it runs.
#[tokio::test(flavor = "multi_thread")]
async fn biases_are_counted_once_for_all_choices() {
    let server = start().await;
    let biases: Map<String, Value> = (0..200).map(|token| (token.to_string(), json!(-1))).collect();
    let request = with(completion("ab", 4000), json!({"logit_bias": biases, "n": 100, "stream": true}));
    let mut stream = connect(&server).await;
    stream.write_all(&post(COMPLETIONS, request.to_string().as_bytes())).await.expect("it is sent");
    server.reaches("dsrun_answers_open", 1.0).await;
    let held = || server.app.loaded().expect("a model").biases.held();
    assert_eq!(held(), 200 * size_of::<(u32, f32)>());
    drop(stream);
    server.reaches("dsrun_answers_open", 0.0).await;
    assert_eq!(held(), 0);
    // The same token in many ways of writing.
    let biases: Map<String, Value> =
        (1..2000).map(|zeros| ("0".repeat(zeros % 99) + &zeros.to_string(), json!(1))).collect();
    let refused = server.refused(COMPLETIONS, &with(completion("a", 1), json!({"logit_bias": biases}))).await;
    assert_eq!(refused.0, "logit_bias", "{}", refused.1);
}

/// Answers that are not streamed grow in memory.
#[tokio::test(flavor = "multi_thread")]
async fn answers_that_are_not_complete_are_bounded() {
    let mut setup = Setup::default();
    setup.settings.unsent_limit = Some(1 << 20);
    let server = start_with(setup).await;
    let chat = json!({
        "model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 500, "n": 4, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 20,
    });
    let (status, body) = server.post("/v1/chat/completions", &chat).await;
    assert_eq!((status, &body["error"]["code"]), (429, &"queue_full".into()));
    server.reaches("dsrun_unsent_response_bytes", 0.0).await;
    server.served("/v1/chat/completions", &with(chat, json!({"n": 1, "top_logprobs": 1}))).await;
}

/// The engine does not wait for a client that does not read, so that tokens pile up.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_are_not_read_are_bounded() {
    let mut setup = Setup::default();
    setup.settings.unsent_limit = Some(1 << 20);
    let server = start_with(setup).await;
    let request = json!({
        "model": MODEL, "prompt": "ab", "max_tokens": 4000, "n": 24, "ignore_eos": true, "stream": true, "logprobs": 5,
    });
    let mut stream = connect(&server).await;
    stream.write_all(&post(COMPLETIONS, request.to_string().as_bytes())).await.expect("it is sent");
    let refused = async {
        while server.post(COMPLETIONS, &completion("a", 1)).await.0 != 429 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, refused).await.expect("unread tokens are bounded");
    server.reaches("dsrun_kv_blocks_in_use", 0.0).await;
    assert!(server.metric("dsrun_unsent_response_bytes").await < f64::from(3 << 20));
    let answer = rest(&mut stream).await;
    assert!(answer.contains("queue_full") && !answer.contains("[DONE]"), "the stream ends with an error");
    server.reaches("dsrun_unsent_response_bytes", 0.0).await;
    server.served(COMPLETIONS, &completion("a", 1)).await;
}

/// Pieces that wait to be read do not end the time limit.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_read_slowly_ends_in_time() {
    let mut setup = Setup::default();
    setup.settings.request_timeout = Some(2);
    let server = start_with(setup).await;
    let request = json!({
        "model": MODEL, "prompt": "ab", "max_tokens": 1000, "n": 24, "ignore_eos": true, "stream": true, "logprobs": 5,
    });
    let started = Instant::now();
    let mut stream = connect(&server).await;
    stream.write_all(&post(COMPLETIONS, request.to_string().as_bytes())).await.expect("it is sent");
    tokio::time::sleep_until((started + Duration::from_millis(2100)).into()).await;
    let answer = rest(&mut stream).await;
    assert!(
        answer.contains("\"timeout\"") && !answer.contains("[DONE]"),
        "{}",
        &answer[answer.len().saturating_sub(500)..]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_response_that_is_read_slowly_ends_in_time() {
    let mut setup = Setup::default();
    setup.settings.request_timeout = Some(3);
    let server = start_with(setup).await;
    let large = json!({"prompt": "a".repeat(1_300_000), "return_token_strs": true}).to_string();
    let mut stream = connect(&server).await;
    stream.write_all(&post("/tokenize", large.as_bytes())).await.expect("it is sent");
    let mut start = [0; 12];
    let read = tokio::time::timeout(PATIENCE, stream.read_exact(&mut start)).await;
    read.expect("an answer").expect("an answer");
    assert_eq!(start, *b"HTTP/1.1 200");
    tokio::time::sleep(Duration::from_millis(3100)).await;
    let answer = rest(&mut stream).await;
    assert!(!answer.ends_with('}'), "all {} bytes were sent", answer.len());
    server.reaches("dsrun_unsent_response_bytes", 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_that_is_not_utf8_is_refused_as_json() {
    let server = start().await;
    for path in ["/v1/models/%ff", "/v1/responses/%ff"] {
        let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        let answer = raw(&server, head.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("invalid_request_error"), "{answer}");
    }
}
