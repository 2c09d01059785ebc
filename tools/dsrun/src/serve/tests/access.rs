//! Tests of keys, rate limits and TLS.

use super::support::{PATIENCE, Running, Setup, completion, start, start_with, with};
use crate::client::Client;
use hyper::Method;
use serde_json::json;
use std::sync::Arc;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::ServerName},
};

#[tokio::test(flavor = "multi_thread")]
async fn requests_without_a_valid_key_are_refused() {
    let server = start_with(Setup { keys: vec!["secret"], ..Setup::default() }).await;
    server.served("/v1/completions", &completion("a", 2)).await;
    for key in [None, Some("wrong".to_owned())] {
        let stranger = Client::new(&server.url, key).expect("a URL");
        for path in ["/v1/models", "/metrics"] {
            let response = stranger.send(Method::GET, path, None).await.expect("an answer");
            assert_eq!(response.status(), 401);
            assert_eq!(response.headers()["www-authenticate"], "Bearer");
        }
        let response = stranger.send(Method::GET, "/health/ready", None).await.expect("an answer");
        assert_eq!(response.status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_limited_request_has_a_retry_after_header() {
    let mut setup = Setup::default();
    setup.settings.requests_per_minute = Some(2);
    let server = start_with(setup).await;
    for _ in 0..2 {
        server.served("/v1/completions", &completion("a", 1)).await;
    }
    let request = completion("a", 1);
    let response =
        server.client.send(Method::POST, "/v1/completions", Some(&request)).await.expect("an answer");
    assert_eq!(response.status(), 429);
    // Reading, which the page and monitoring do often, is not limited.
    for path in ["/metrics", "/v1/models"] {
        let response = server.client.send(Method::GET, path, None).await.expect("an answer");
        assert_eq!(response.status(), 200);
    }
    let wait: u64 = response.headers()["retry-after"].to_str().expect("text").parse().expect("a number");
    assert!((1..=30).contains(&wait), "{wait}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_enables_tls() {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("cert.pem"), own.cert.pem()).expect("it is written");
    std::fs::write(path("key.pem"), own.signing_key.serialize_pem()).expect("it is written");
    let mut setup = Setup::default();
    setup.settings.tls_cert = Some(path("cert.pem"));
    setup.settings.tls_key = Some(path("key.pem"));
    let server = start_with(setup).await;
    let address = server.url.strip_prefix("https://").expect("it is encrypted").to_owned();

    let mut roots = RootCertStore::empty();
    roots.add(own.cert.der().clone()).expect("a certificate");
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let talk = async {
        let stream = TcpStream::connect(&address).await.expect("a connection");
        let name = ServerName::try_from("localhost").expect("a name");
        let mut stream =
            TlsConnector::from(Arc::new(config)).connect(name, stream).await.expect("the certificate fits");
        stream
            .write_all(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await
            .expect("it is sent");
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        // A plain-text request is not TLS: the connection is closed.
        let mut plain = TcpStream::connect(&address).await.expect("a connection");
        plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("it is sent");
        let mut answer = Vec::new();
        let _ = plain.read_to_end(&mut answer).await;
        assert!(!answer.starts_with(b"HTTP"));
    };
    tokio::time::timeout(PATIENCE, talk).await.expect("both connections end");
}

/// Sends a request with these headers, and returns the head of the answer.
async fn head(server: &Running, method: &str, headers: &str) -> String {
    let address = server.url.strip_prefix("http://").expect("a URL");
    let request = format!("{method} /v1/models HTTP/1.1\r\n{headers}\r\nconnection: close\r\n\r\n");
    let talk = async {
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        stream.write_all(request.as_bytes()).await.expect("it is sent");
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        answer.split("\r\n\r\n").next().unwrap_or_default().to_ascii_lowercase()
    };
    tokio::time::timeout(PATIENCE, talk).await.expect("the connection ends")
}

#[tokio::test(flavor = "multi_thread")]
async fn without_keys_only_loopback_names_are_served() {
    let server = start().await;
    for (headers, status) in [
        ("host: localhost:8000", "200"),
        ("host: 127.0.0.1", "200"),
        ("host: [::1]:8000\r\norigin: http://localhost:3000", "200"),
        ("host: evil.example:8000", "403"),
        ("host: localhost\r\norigin: http://evil.example", "403"),
        ("host: localhost\r\norigin: null", "403"),
    ] {
        let answer = head(&server, "GET", headers).await;
        assert!(answer.starts_with(&format!("http/1.1 {status}")), "{headers}: {answer}");
        assert!(!answer.contains("access-control"), "{answer}");
    }
    let with_keys = start_with(Setup { keys: vec!["secret"], ..Setup::default() }).await;
    let answer = head(&with_keys, "GET", "host: example.org\r\nauthorization: Bearer secret").await;
    assert!(answer.starts_with("http/1.1 200"), "{answer}");
    let mut setup = Setup::default();
    setup.settings.allow_host = Some(vec!["Proxy.example".into()]);
    let behind_proxy = start_with(setup).await;
    assert!(head(&behind_proxy, "GET", "host: proxy.example:80").await.starts_with("http/1.1 200"));
}

#[tokio::test(flavor = "multi_thread")]
async fn web_pages_of_allowed_origins_may_use_the_server() {
    let mut setup = Setup { keys: vec!["secret"], ..Setup::default() };
    setup.settings.cors_origin = Some(vec!["https://pages.example".into()]);
    let server = start_with(setup).await;
    let ask = "access-control-request-method: POST\r\naccess-control-request-headers: authorization, x-stainless-os";
    let answer =
        head(&server, "OPTIONS", &format!("host: h\r\norigin: https://pages.example\r\n{ask}")).await;
    assert!(answer.starts_with("http/1.1 204"), "{answer}");
    for line in [
        "access-control-allow-origin: https://pages.example",
        "access-control-allow-methods: get, post",
        "access-control-allow-headers: authorization, x-stainless-os",
        "vary: origin",
    ] {
        assert!(answer.contains(line), "{line} is missing in {answer}");
    }
    let answer =
        head(&server, "OPTIONS", &format!("host: h\r\norigin: https://other.example\r\n{ask}")).await;
    assert!(answer.starts_with("http/1.1 4") && !answer.contains("access-control-allow"), "{answer}");
    let get = "host: h\r\norigin: https://pages.example\r\nauthorization: Bearer secret";
    let answer = head(&server, "GET", get).await;
    assert!(answer.starts_with("http/1.1 200"), "{answer}");
    assert!(answer.contains("access-control-allow-origin: https://pages.example"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_response_has_the_id_of_its_request() {
    let server = start().await;
    let answer = head(&server, "GET", "host: localhost\r\nx-request-id: mine-1").await;
    assert!(answer.contains("\r\nx-request-id: mine-1"), "{answer}");
    for headers in ["host: localhost", "host: evil.example", "host: localhost\r\nx-request-id: not valid"] {
        let answer = head(&server, "GET", headers).await;
        assert!(answer.contains("\r\nx-request-id: req_"), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_keys_with_the_right_set_a_priority() {
    let server = start_with(Setup { keys: vec!["plain", "first priority"], ..Setup::default() }).await;
    let priority = |priority: i32| with(completion("a", 1), json!({"priority": priority}));
    for low in [0, -5] {
        server.served("/v1/completions", &priority(low)).await;
    }
    let texts = json!({"model": "tiny", "input": "a", "priority": 1});
    for (path, request) in [("/v1/completions", &priority(1)), ("/v1/embeddings", &texts)] {
        let (status, body) = server.post(path, request).await;
        assert_eq!((status, &body["error"]["param"]), (403, &json!("priority")), "{body}");
        let first = Client::new(&server.url, Some("first".to_owned())).expect("a URL");
        let answer = first.send(Method::POST, path, Some(request)).await.expect("an answer");
        assert_eq!(answer.status(), 200);
    }
    // Where nobody needs a key, everybody may.
    start().await.served("/v1/completions", &priority(1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_may_have_a_key_of_their_own() {
    let server = start_with(Setup { keys: vec!["plain", "watch metrics"], ..Setup::default() }).await;
    for (key, path, status) in [
        ("plain", "/metrics", 403),
        ("plain", "/v1/models", 200),
        ("watch", "/metrics", 200),
        ("watch", "/v1/models", 403),
        ("nobody", "/metrics", 401),
    ] {
        let client = Client::new(&server.url, Some(key.to_owned())).expect("a URL");
        let answer = client.send(Method::GET, path, None).await.expect("an answer");
        assert_eq!(answer.status(), status, "{key} {path}");
    }
}

/// A salt keeps a prompt from the cache of others.
#[tokio::test(flavor = "multi_thread")]
async fn cached_prompts_are_shared_by_requests_of_the_same_salt() {
    let server = start().await;
    let prompt = "a".repeat(200);
    for (salt, cached) in
        [(json!("x"), 0), (json!("y"), 0), (json!(null), 0), (json!("x"), 192), (json!(null), 192)]
    {
        let request = with(completion(&prompt, 2), json!({"cache_salt": salt}));
        let answer = server.served("/v1/completions", &request).await;
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], cached, "{salt}");
    }
    let request = json!({"model": "tiny", "input": prompt, "max_output_tokens": 2, "cache_salt": "z"});
    for cached in [false, true] {
        let answer = server.served("/v1/responses", &request).await;
        let tokens = answer["usage"]["input_tokens_details"]["cached_tokens"].as_u64().expect("a number");
        assert_eq!(tokens > 0, cached, "{answer}");
    }
    for (path, request) in [
        ("/v1/completions", with(completion("a", 1), json!({"cache_salt": ""}))),
        ("/v1/responses", with(request, json!({"cache_salt": ""}))),
    ] {
        assert_eq!(server.refused(path, &request).await.0, "cache_salt");
    }
}
