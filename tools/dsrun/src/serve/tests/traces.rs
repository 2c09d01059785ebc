//! Tests of traces, with a collector in the test.

use super::support::{PATIENCE, Setup, completion, question, start_with, with};
use crate::arguments::ServeSettings;
use axum::{Router, body::Bytes, routing::post};
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::any_value::Value as AttributeValue,
    trace::v1::{Span, span::SpanKind},
};
use prost::Message;
use serde_json::json;
use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::TcpStream,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::net::TcpListener;

/// The trace and the span that a client's request belongs to.
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// A collector that keeps the spans it gets.
struct Collector {
    url: String,
    spans: Arc<Mutex<Vec<Span>>>,
}

impl Collector {
    async fn start() -> Self {
        let spans: Arc<Mutex<Vec<Span>>> = Arc::default();
        let kept = spans.clone();
        let receive = move |body: Bytes| async move {
            let batch = ExportTraceServiceRequest::decode(body).expect("a batch of spans");
            for resource in batch.resource_spans {
                let about = resource.resource.expect("spans have a resource");
                let service = about.attributes.iter().find(|attribute| attribute.key == "service.name");
                assert!(service.is_some(), "{about:?}");
                let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
                kept.lock().expect("no test panicked").extend(spans);
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let router = Router::new().route("/v1/traces", post(receive));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, spans }
    }

    fn spans(&self) -> Vec<Span> {
        std::mem::take(&mut *self.spans.lock().expect("no test panicked"))
    }
}

fn traced(endpoint: &str) -> Setup {
    let settings = ServeSettings { otlp_endpoint: Some(endpoint.to_owned()), ..Setup::default().settings };
    Setup { settings, ..Setup::default() }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The attributes of a span, as text.
fn attributes(span: &Span) -> BTreeMap<&str, String> {
    let text = |value: &AttributeValue| match value {
        AttributeValue::StringValue(text) => text.clone(),
        AttributeValue::IntValue(number) => number.to_string(),
        AttributeValue::DoubleValue(number) => number.to_string(),
        other => format!("{other:?}"),
    };
    let attribute = |attribute: &'_ opentelemetry_proto::tonic::common::v1::KeyValue| {
        attribute.value.as_ref().and_then(|value| value.value.as_ref()).map(text).unwrap_or_default()
    };
    span.attributes.iter().map(|given| (given.key.as_str(), attribute(given))).collect()
}

/// Sends a request with a header `traceparent`, and returns the response.
fn send(url: &str, path: &str, body: &str) -> String {
    let mut connection = TcpStream::connect(url.trim_start_matches("http://")).expect("it listens");
    connection.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    write!(
        connection,
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntraceparent: 00-{TRACE}-{PARENT}-01\r\n\
         x-request-id: mine\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .expect("it is sent");
    let mut answer = String::new();
    connection.read_to_string(&mut answer).expect("an answer");
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_and_the_parts_of_its_answers_are_spans_of_the_clients_trace() {
    let collector = Collector::start().await;
    let server = start_with(traced(&collector.url)).await;
    let fields = json!({"n": 2, "stream": true, "seed": 7, "top_k": 3, "temperature": 0.5});
    let body = with(question("secret words", 5), fields).to_string();
    let url = server.url.clone();
    let answer = tokio::task::spawn_blocking(move || send(&url, "/v1/chat/completions", &body)).await;
    assert!(answer.expect("it does not panic").contains("[DONE]"));
    assert!(server.end().await);

    let spans = collector.spans();
    assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE), "{spans:?}");
    assert!(!format!("{spans:?}").contains("secret"), "spans have no texts of prompts");
    let (whole, parts): (Vec<&Span>, Vec<&Span>) =
        spans.iter().partition(|span| span.kind == SpanKind::Server as i32);
    let [whole] = whole[..] else { panic!("one request: {whole:?}") };
    assert_eq!((whole.name.as_str(), hex(&whole.parent_span_id)), ("chat tiny", PARENT.to_owned()));
    let about = attributes(whole);
    let prompt: u64 = about["gen_ai.usage.input_tokens"].parse().expect("a number");
    assert!(prompt > 10);
    for (key, value) in [
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.provider.name", "dsrun"),
        ("gen_ai.request.model", "tiny"),
        ("gen_ai.response.model", "tiny"),
        ("gen_ai.request.max_tokens", "5"),
        ("gen_ai.request.choice.count", "2"),
        ("gen_ai.request.seed", "7"),
        ("gen_ai.request.top_k", "3"),
        ("gen_ai.request.temperature", "0.5"),
        ("gen_ai.usage.output_tokens", "10"),
        ("http.request.method", "POST"),
        ("http.route", "/v1/chat/completions"),
        ("http.response.status_code", "200"),
        ("dsrun.request.id", "mine"),
    ] {
        assert_eq!(about.get(key).map(String::as_str), Some(value), "{key} in {about:?}");
    }
    assert!(about["gen_ai.response.id"].starts_with("chatcmpl-"), "{about:?}");
    assert_eq!(about["gen_ai.response.finish_reasons"].matches("length").count(), 2, "{about:?}");
    assert!(!about.contains_key("error.type"), "{about:?}");

    assert_eq!(parts.len(), 6, "three parts of two choices: {parts:?}");
    for choice in ["0", "1"] {
        let part = |name: &str| {
            let part = parts
                .iter()
                .find(|span| span.name == name && attributes(span)["dsrun.choice.index"] == choice);
            let part = part.unwrap_or_else(|| panic!("{name} of {choice} in {parts:?}"));
            assert_eq!(part.parent_span_id, whole.span_id);
            (part.start_time_unix_nano, part.end_time_unix_nano)
        };
        let (queue, prefill, decode) = (part("queue"), part("prefill"), part("decode"));
        assert!(whole.start_time_unix_nano <= queue.0 && queue.0 <= queue.1);
        assert!(queue.1 == prefill.0 && prefill.0 < prefill.1);
        assert!(prefill.1 == decode.0 && decode.0 < decode.1 && decode.1 <= whole.end_time_unix_nano);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_are_refused_or_left_are_traced_as_such_and_reads_are_not() {
    let collector = Collector::start().await;
    let server = start_with(traced(&collector.url)).await;
    server.refused("/v1/completions", &json!({"model": "tiny", "prompt": "a", "speed": 9})).await;
    server.refused("/v1/nothing/secret", &json!({})).await;
    server.served("/v1/embeddings", &json!({"model": "tiny", "input": ["ab", "abc"]})).await;
    server.metric("dsrun_answers_open").await;
    let long = with(completion("ab", 4000), json!({"stream": true}));
    let mut events = server.client.stream("/v1/completions", &long).await.expect("it starts");
    events.next().await.expect("a piece");
    drop(events);
    server.reaches("dsrun_disconnects_total", 1.0).await;
    assert!(server.end().await);
    let spans = collector.spans();
    let spans: Vec<_> = spans.iter().filter(|span| span.kind == SpanKind::Server as i32).collect();
    let outcome = |span: &&Span| {
        let about = attributes(span);
        let value = |key: &str| about.get(key).cloned().unwrap_or_default();
        (span.name.clone(), value("http.response.status_code"), value("error.type"))
    };
    let mut outcomes: Vec<_> = spans.iter().map(outcome).collect();
    outcomes.sort();
    let expected = [
        ("POST", "404", "404"),
        ("POST /v1/completions", "400", "400"),
        ("embeddings tiny", "200", ""),
        ("text_completion tiny", "200", "client_disconnected"),
    ];
    let expected = expected.map(|(name, status, error)| (name.into(), status.into(), error.into()));
    assert_eq!(outcomes, expected);
    let embedded = spans.iter().find(|span| span.name == "embeddings tiny").expect("it is there");
    assert_eq!(attributes(embedded)["gen_ai.usage.input_tokens"], "5");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_never_answers_delays_no_request_and_no_end() {
    // It accepts connections, and neither reads nor answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let url = format!("http://{}", silent.local_addr().expect("an address"));
    let server = start_with(traced(&url)).await;
    // More spans than the queue holds.
    for _ in 0..8 {
        let many = with(completion("ab", 1), json!({"n": 128}));
        let answer = server.served("/v1/completions", &many).await;
        assert_eq!(answer["choices"].as_array().map(Vec::len), Some(128));
    }
    let ended = tokio::time::timeout(Duration::from_secs(30), server.end()).await;
    assert!(ended.expect("the end does not wait for the collector"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_no_url_is_refused() {
    for endpoint in ["localhost:4318", "ftp://localhost", "http://", "a b"] {
        let error = crate::serve::traces::Traces::start(Some(endpoint)).expect_err(endpoint);
        assert!(error.to_string().contains("hint: a URL such as"), "{endpoint}: {error}");
    }
}
