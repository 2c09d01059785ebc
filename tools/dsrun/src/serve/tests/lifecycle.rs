//! Tests of disconnects, full queues, draining, panics and replicas.

use super::support::{MODEL, PATIENCE, Running, Setup, completion, start, start_with, with};
use crate::{
    arguments::ServeSettings,
    serve::{Server, routes::around, server},
};
use axum::{Router, routing::get};
use hyper::Method;
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};

/// A completion that takes a long time.
fn long(max_tokens: usize) -> Value {
    with(completion("ab", max_tokens), json!({"stream": true, "stream_options": {"include_usage": true}}))
}

async fn status(server: &Running, path: &str) -> u16 {
    server.client.send(Method::GET, path, None).await.expect("an answer").status().as_u16()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnect_cancels_the_request() {
    let server = start().await;
    let mut events = server.client.stream("/v1/completions", &long(4000)).await.expect("it starts");
    events.next().await.expect("a piece");
    assert_eq!(server.metric("dsrun_answers_open").await, 1.0);
    drop(events);
    server.reaches("dsrun_cancelled_total", 1.0).await;
    server.reaches("dsrun_kv_blocks_in_use", 0.0).await;
    server.reaches("dsrun_disconnects_total", 1.0).await;
    server.reaches("dsrun_answers_open", 0.0).await;
    // The same without a stream: the client disconnects while it waits.
    let request = completion("ab", 4000);
    let waiting = server.client.send(Method::POST, "/v1/completions", Some(&request));
    tokio::select! {
        answer = waiting => panic!("4000 tokens take longer: {answer:?}"),
        () = server.reaches("dsrun_answers_open", 1.0) => {}
    }
    server.reaches("dsrun_disconnects_total", 2.0).await;
    server.reaches("dsrun_kv_blocks_in_use", 0.0).await;
    // The same for embeddings.
    let texts = vec!["a".repeat(4000); 64];
    let request = json!({"model": MODEL, "input": texts});
    let waiting = server.client.send(Method::POST, "/v1/embeddings", Some(&request));
    tokio::select! {
        answer = waiting => panic!("64 texts take longer: {answer:?}"),
        () = server.reaches("dsrun_answers_open", 1.0) => {}
    }
    server.reaches("dsrun_disconnects_total", 3.0).await;
    server.reaches("dsrun_requests_running", 0.0).await;
    server.reaches("dsrun_kv_blocks_in_use", 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_answers_with_retry_after() {
    let mut setup = Setup::default();
    setup.engine.max_requests = 1;
    setup.settings.queue = Some(1);
    let server = start_with(setup).await;
    let mut running = server.client.stream("/v1/completions", &long(4000)).await.expect("it starts");
    running.next().await.expect("a piece");
    let _waiting = server.client.stream("/v1/completions", &long(4000)).await.expect("it waits");
    let request = completion("a", 1);
    let response =
        server.client.send(Method::POST, "/v1/completions", Some(&request)).await.expect("an answer");
    assert_eq!(response.status(), 429);
    assert_eq!(response.headers()["retry-after"], "1");
    drop(running);
    server.reaches("dsrun_requests_waiting", 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_has_a_time_limit() {
    let mut setup = Setup::default();
    setup.settings.request_timeout = Some(1);
    let server = start_with(setup).await;
    let (status, body) = server.post("/v1/completions", &completion("ab", 4000)).await;
    assert_eq!((status, &body["error"]["code"]), (504, &json!("timeout")));
    server.reaches("dsrun_kv_blocks_in_use", 0.0).await;
    let mut events = server.client.stream("/v1/completions", &long(4000)).await.expect("it starts");
    let error = loop {
        match events.next().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("4000 tokens take longer than a second"),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("was not complete within 1 s"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_finishes_running_requests_and_accepts_no_more() {
    let mut server = start().await;
    let mut events = server.client.stream("/v1/completions", &long(400)).await.expect("it starts");
    events.next().await.expect("a piece");
    assert_eq!(status(&server, "/health/ready").await, 200);
    drop(server.stop.take());
    let not_ready = async {
        while status(&server, "/health/ready").await != 503 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(status(&server, "/health/live").await, 200);
        let (status, body) = server.post("/v1/completions", &completion("a", 1)).await;
        assert_eq!((status, &body["error"]["code"]), (503, &json!("not_ready")));
    };
    tokio::time::timeout(PATIENCE, not_ready).await.expect("it becomes unready while the answer runs");
    let mut usage = None;
    while let Some(event) = events.next().await.expect("the answer goes on to its end") {
        usage = event.get("usage").cloned().or(usage);
    }
    assert_eq!(usage.expect("a usage")["completion_tokens"], 400);
    assert!(server.end().await, "all finished");
}

/// A request of many texts is admitted as a whole: neither a queue that fills nor draining breaks it in the middle.
#[tokio::test(flavor = "multi_thread")]
async fn embeddings_of_many_texts_are_admitted_as_a_whole() {
    let mut setup = Setup::default();
    setup.engine.max_requests = 2;
    setup.settings.queue = Some(4);
    let mut server = start_with(setup).await;
    let texts: Vec<String> = (0..200).map(|index| format!("{index}{}", "a".repeat(200))).collect();
    let request = json!({"model": MODEL, "input": texts});
    let client = server.client.clone();
    let asked = tokio::spawn(async move {
        let response = client.send(Method::POST, "/v1/embeddings", Some(&request)).await.expect("an answer");
        let status = response.status().as_u16();
        let body = axum::body::to_bytes(axum::body::Body::new(response.into_body()), usize::MAX).await;
        (status, serde_json::from_slice::<Value>(&body.expect("a body")).expect("JSON"))
    });
    server.reaches("dsrun_answers_open", 1.0).await;
    let (status, body) = server.post("/v1/completions", &completion("a", 1)).await;
    assert!(status == 200 || (status, &body["error"]["code"]) == (429, &json!("queue_full")), "{body}");
    drop(server.stop.take());
    let (status, body) = tokio::time::timeout(PATIENCE, asked).await.expect("it ends").expect("no panic");
    assert_eq!(status, 200, "{body}");
    assert_eq!(body["data"].as_array().map(Vec::len), Some(200));
    assert!(server.end().await, "all finished");
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_aborts_requests_at_its_time_limit() {
    let mut setup = Setup::default();
    setup.settings.drain_timeout = Some(0);
    let server = start_with(setup).await;
    let mut events = server.client.stream("/v1/completions", &long(4000)).await.expect("it starts");
    events.next().await.expect("a piece");
    assert!(!server.end().await, "the answer was aborted");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_health_is_answered_while_the_model_loads() {
    let settings = ServeSettings { port: Some(0), ..ServeSettings::default() };
    let app = Arc::new(server::app(&settings, "none".to_owned()).expect("an app"));
    let listening = Server::bind(app, &settings).await.expect("a port");
    let client = crate::client::Client::new(&listening.url(), None).expect("a URL");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let ended = tokio::spawn(listening.run(async {
        let _ = stopped.await;
    }));
    let status =
        async |path| client.send(Method::GET, path, None).await.expect("an answer").status().as_u16();
    assert_eq!(status("/health/live").await, 200);
    assert_eq!(status("/health/ready").await, 503);
    assert_eq!(status("/v1/models").await, 503);
    assert_eq!(status("/metrics").await, 200);
    drop(stop);
    assert!(tokio::time::timeout(PATIENCE, ended).await.expect("it ends").expect("without a panic"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_ends_only_its_request() {
    use tower::ServiceExt;
    let settings = ServeSettings::default();
    let app = Arc::new(server::app(&settings, "none".to_owned()).expect("an app"));
    let routes = Router::new().route("/panic", get(async || -> &'static str { panic!("on purpose") }));
    let router = around(app.clone(), routes.route("/fine", get(async || "fine")));
    for _ in 0..2 {
        let ask = |path: &str| {
            let request = axum::http::Request::get(path).body(axum::body::Body::empty()).expect("a request");
            router.clone().oneshot(request)
        };
        assert_eq!(ask("/panic").await.expect("an answer").status(), 500);
        assert_eq!(ask("/fine").await.expect("an answer").status(), 200);
    }
    assert!(app.metrics.text(0, 0, None).contains("\ndsrun_panics_total 2\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_of_blocking_work_ends_only_its_request() {
    let server = start().await;
    let intake = &server.app.intake;
    let turn = intake.turn(intake.hold().expect("there is room")).await.expect("nobody else waits");
    let failed: Result<(), _> = server.app.prepare(turn, |_| panic!("on purpose")).await;
    assert_eq!(failed.expect_err("it panicked").status(), 500);
    server.served("/v1/completions", &completion("a", 1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_share_requests_by_prefix() {
    let server = start_with(Setup { replicas: 2, ..Setup::default() }).await;
    let alone = start().await;
    let prompts: Vec<String> =
        (b'a'..=b'h').map(|letter| char::from(letter).to_string().repeat(200)).collect();
    let request = with(completion("", 8), json!({"prompt": prompts}));
    // All engines give the same answers.
    let expected = alone.served("/v1/completions", &request).await;
    assert_eq!(server.served("/v1/completions", &request).await["choices"], expected["choices"]);
    assert_eq!(server.metric("dsrun_prefix_hit_tokens_total").await, 0.0);
    // In a second round, each engine finds its prompts in its prefix cache: whole blocks, without the last token.
    assert_eq!(server.served("/v1/completions", &request).await["choices"], expected["choices"]);
    assert_eq!(server.metric("dsrun_prefix_hit_tokens_total").await, 8.0 * 192.0);
    assert_eq!(server.metric("dsrun_finished_total").await, 16.0);
}
