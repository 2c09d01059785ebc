//! Traces of requests for an OpenTelemetry collector.
//!
//! A request has a span from its head to the end of its answer, with the attributes of the semantic conventions for generative AI. Each
//! of its choices has up to three child spans: `queue` until the first step with it begins, `prefill` until its first token, and
//! `decode` until its last. Spans have no texts of prompts or answers.
//!
//! A thread of its own sends spans from a queue of bounded length. While the collector cannot be reached, spans are dropped, and
//! requests are served as ever.

mod choice;
mod export;

use super::app::App;
use anyhow::{Result, bail};
use axum::{
    body::Body,
    extract::{MatchedPath, State},
    http::{Method, Request},
    middleware::Next,
    response::Response,
};
pub(super) use choice::ChoiceTrace;
use opentelemetry::{
    Array, Context, KeyValue, StringValue, Value,
    propagation::TextMapPropagator,
    trace::{Span as _, SpanKind, Status, TraceContextExt, Tracer as _, TracerProvider as _},
};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::{
    Resource,
    propagation::TraceContextPropagator,
    trace::{SdkTracer, SdkTracerProvider, Span},
};
use std::{
    borrow::Cow,
    env,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

/// The longest time to send the last spans when the server ends.
const LAST_SPANS: Duration = Duration::from_secs(5);
/// The path of traces below the URL of a collector.
const PATH: &str = "/v1/traces";

tokio::task_local! {
    static CURRENT: RequestTrace;
}

/// Makes spans of requests and sends them.
#[derive(Debug)]
pub(crate) struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Traces {
    /// Traces for the collector at the URL `endpoint`, or at the one of the environment variables `OTEL_EXPORTER_OTLP_ENDPOINT` and
    /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`; `None` if there is no URL, or `OTEL_SDK_DISABLED` or `OTEL_TRACES_EXPORTER` says so.
    ///
    /// # Errors
    /// If the URL is none, or the environment asks for another protocol.
    pub(crate) fn start(endpoint: Option<&str>) -> Result<Option<Self>> {
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.trim().is_empty());
        let general = variable("OTEL_EXPORTER_OTLP_ENDPOINT");
        let given = endpoint.map(str::to_owned).or(general).map(|base| with_path(&base));
        let own = variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").filter(|_| endpoint.is_none());
        let Some(url) = own.or(given) else { return Ok(None) };
        let disabled = variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        match variable("OTEL_TRACES_EXPORTER").as_deref() {
            _ if disabled => return Ok(None),
            Some("none") => return Ok(None),
            Some("otlp") | None => {}
            Some(other) => bail!("OTEL_TRACES_EXPORTER is {other:?}, but must be otlp or none"),
        }
        for name in ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"] {
            if let Some(protocol) = variable(name) {
                if protocol != "http/protobuf" {
                    bail!(
                        "{name} is {protocol:?}, but traces are sent by http/protobuf\nhint: collectors take that at port 4318"
                    );
                }
                break;
            }
        }
        let resource = Resource::builder();
        let named = variable("OTEL_SERVICE_NAME").is_some()
            || variable("OTEL_RESOURCE_ATTRIBUTES").is_some_and(|list| list.contains("service.name="));
        let resource = if named { resource } else { resource.with_service_name("dsrun") };
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.with_attribute(version).build())
            .with_batch_exporter(export::exporter(&url)?)
            .build();
        let tracer = provider.tracer("dsrun");
        Ok(Some(Self { provider, tracer }))
    }

    /// Sends the spans that are left; waits for that no longer than [`LAST_SPANS`].
    pub(super) async fn end(&self) {
        let provider = self.provider.clone();
        // The exporter has logged a failure.
        let _ = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(LAST_SPANS).is_ok()).await;
    }

    /// Begins the trace of a request, as part of the trace that its header `traceparent` names.
    fn begin(&self, request: &Request<Body>) -> RequestTrace {
        let path = request.uri().path().to_owned();
        let route = request.extensions().get::<MatchedPath>().map(|route| route.as_str().to_owned());
        // Names of spans are few: unknown paths have none.
        let name = route.as_ref().map_or(Cow::Borrowed("POST"), |route| format!("POST {route}").into());
        let remote = TraceContextPropagator::new()
            .extract_with_context(&Context::new(), &HeaderExtractor(request.headers()));
        let (instant, time) = (Instant::now(), SystemTime::now());
        let mut attributes =
            vec![KeyValue::new("http.request.method", "POST"), KeyValue::new("url.path", path)];
        attributes.extend(route.map(|route| KeyValue::new("http.route", route)));
        let builder = self.tracer.span_builder(name).with_kind(SpanKind::Server);
        let builder = builder.with_start_time(time).with_attributes(attributes);
        let span = builder.start_with_context(&self.tracer, &remote);
        let context = Context::new().with_remote_span_context(span.span_context().clone());
        let tracer = self.tracer.clone();
        RequestTrace(Some(Arc::new(Open { tracer, context, span: Mutex::new(span), instant, time })))
    }
}

/// The URL of traces at a collector.
fn with_path(base: &str) -> String {
    let base = base.trim().trim_end_matches('/');
    if base.ends_with(PATH) { base.to_owned() } else { format!("{base}{PATH}") }
}

/// The trace of a request; nothing if requests are not traced. The span of the request ends when the last clone is dropped.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestTrace(Option<Arc<Open>>);

#[derive(Debug)]
struct Open {
    tracer: SdkTracer,
    /// The parent of child spans.
    context: Context,
    span: Mutex<Span>,
    /// The same point in time by both clocks.
    instant: Instant,
    time: SystemTime,
}

impl RequestTrace {
    /// The trace of the request that the present task serves.
    pub(super) fn current() -> Self {
        CURRENT.try_with(Clone::clone).unwrap_or_default()
    }

    /// Names the span of the request after what it asks the model for.
    pub(super) fn operation(&self, operation: &'static str, model: &str) {
        if let Some(open) = &self.0 {
            let mut span = open.span();
            span.update_name(format!("{operation} {model}"));
            span.set_attribute(KeyValue::new("gen_ai.operation.name", operation));
            span.set_attribute(KeyValue::new("gen_ai.provider.name", "dsrun"));
            span.set_attribute(KeyValue::new("gen_ai.request.model", model.to_owned()));
            span.set_attribute(KeyValue::new("gen_ai.response.model", model.to_owned()));
        }
    }

    /// Sets an attribute, if there is a value.
    pub(super) fn set(&self, key: &'static str, value: Option<impl Into<Value>>) {
        if let (Some(open), Some(value)) = (&self.0, value) {
            open.span().set_attribute(KeyValue::new(key, value));
        }
    }

    /// Sets an attribute whose value is a list of texts.
    pub(super) fn set_list(&self, key: &'static str, texts: Vec<&'static str>) {
        let texts: Vec<StringValue> = texts.into_iter().map(StringValue::from).collect();
        self.set(key, Some(Value::Array(Array::String(texts))));
    }

    /// Sets the kind of the error that the request ended with. It is the server's fault, or not.
    pub(super) fn fail(&self, kind: impl Into<Value>, servers_fault: bool) {
        self.set("error.type", Some(kind));
        if let (Some(open), true) = (&self.0, servers_fault) {
            open.span().set_status(Status::error(""));
        }
    }
}

impl Open {
    fn span(&self) -> std::sync::MutexGuard<'_, Span> {
        self.span.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time of day at an instant.
    fn time(&self, at: Instant) -> SystemTime {
        self.time + at.saturating_duration_since(self.instant)
    }

    /// Records a part of the request that is over.
    fn part(&self, name: &'static str, from: Instant, to: Instant, attributes: Vec<KeyValue>) {
        let builder = self.tracer.span_builder(name).with_start_time(self.time(from));
        let mut span = builder.with_attributes(attributes).start_with_context(&self.tracer, &self.context);
        span.end_with_timestamp(self.time(to));
    }
}

/// Traces requests that ask for work, if requests are traced.
pub(super) async fn trace(State(app): State<Arc<App>>, request: Request<Body>, next: Next) -> Response {
    let Some(traces) = app.traces.as_ref().filter(|_| request.method() == Method::POST) else {
        return next.run(request).await;
    };
    let trace = traces.begin(&request);
    let response = CURRENT.scope(trace.clone(), next.run(request)).await;
    let status = response.status();
    trace.set("http.response.status_code", Some(i64::from(status.as_u16())));
    let id = response.headers().get("x-request-id").and_then(|id| id.to_str().ok());
    trace.set("dsrun.request.id", id.map(str::to_owned));
    if !status.is_success() {
        trace.fail(status.as_u16().to_string(), status.is_server_error());
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_named_with_or_without_the_path_of_traces() {
        let url = "http://localhost:4318/v1/traces";
        for base in ["http://localhost:4318", "http://localhost:4318/", url] {
            assert_eq!(with_path(base), url);
        }
    }
}
