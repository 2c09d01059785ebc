//! Sending spans over HTTP.

use crate::client::{HttpsClient, https_client};
use anyhow::{Context, Result, bail};
use async_trait::async_trait;
use http_body_util::{BodyExt, Full, Limited};
use hyper::Uri;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{
    ExporterBuildError, OTEL_EXPORTER_OTLP_TIMEOUT, OTEL_EXPORTER_OTLP_TRACES_TIMEOUT, Protocol,
    SpanExporter, WithExportConfig, WithHttpConfig,
};
use std::{
    env,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use tokio::{runtime::Handle, time::timeout};

/// The time limit for sending a batch of spans. OpenTelemetry's number.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The most bytes of a collector's answer.
const MOST_ANSWER: usize = 1 << 20;

/// An exporter of spans to a URL.
///
/// # Errors
/// If the URL is none.
pub(super) fn exporter(url: &str) -> Result<SpanExporter> {
    let parsed: Option<Uri> = url.parse().ok();
    let is_server = |url: Uri| matches!(url.scheme_str(), Some("http" | "https")) && url.host().is_some();
    if !parsed.is_some_and(is_server) {
        bail!("{url} is not the URL of a collector\nhint: a URL such as http://localhost:4318");
    }
    let variable = |name| env::var(name).ok()?.parse().ok().map(Duration::from_millis);
    let given = variable(OTEL_EXPORTER_OTLP_TRACES_TIMEOUT).or_else(|| variable(OTEL_EXPORTER_OTLP_TIMEOUT));
    let transport = Transport {
        http: https_client()?,
        runtime: Handle::try_current().context("traces are sent by a server")?,
        limit: given.unwrap_or(TIMEOUT),
        failing: AtomicBool::new(false),
    };
    let builder = SpanExporter::builder().with_http().with_http_client(transport);
    let builder = builder.with_endpoint(url).with_protocol(Protocol::HttpBinary);
    builder.build().map_err(|error: ExporterBuildError| anyhow::anyhow!("traces cannot be sent: {error}"))
}

/// Sends batches of spans, and logs the first failure of several.
#[derive(Debug)]
struct Transport {
    http: HttpsClient,
    /// The runtime whose threads send: the thread that calls is none of them.
    runtime: Handle,
    limit: Duration,
    /// Whether the last batch could not be sent.
    failing: AtomicBool,
}

#[async_trait]
impl HttpClient for Transport {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let url = request.uri().clone();
        let (http, limit) = (self.http.clone(), self.limit);
        let sent = self.runtime.spawn(async move {
            timeout(limit, send(&http, request))
                .await
                .unwrap_or_else(|_| Err(format!("no answer within {} ms", limit.as_millis()).into()))
        });
        let outcome = sent.await?;
        let failure = match &outcome {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(format!("it answered {}", response.status())),
            Err(error) => Some(error.to_string()),
        };
        let failed = self.failing.swap(failure.is_some(), Ordering::Relaxed);
        match failure {
            Some(error) if !failed => {
                tracing::warn!(%url, error, "traces cannot be sent; they are dropped until the collector takes them");
            }
            None if failed => tracing::warn!(%url, "the collector takes traces again"),
            _ => {}
        }
        outcome
    }
}

async fn send(http: &HttpsClient, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let response = http.request(request.map(Full::new)).await.map_err(|error| {
        // The reason is a source of the error, whose own message is just that it failed.
        anyhow::Error::new(error).chain().last().map(ToString::to_string).unwrap_or_default()
    })?;
    let (head, body) = response.into_parts();
    let body = Limited::new(body, MOST_ANSWER).collect().await?.to_bytes();
    Ok(Response::from_parts(head, body))
}
