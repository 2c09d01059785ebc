//! Tests of keys, rate limits and TLS.

use super::support::{PATIENCE, Setup, completion, start_with};
use crate::client::Client;
use hyper::Method;
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
