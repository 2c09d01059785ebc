//! A client for OpenAI-compatible servers, for benchmarks of servers and for tests of this server.

mod events;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
pub(crate) use events::Events;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, Response, StatusCode, Uri, body::Incoming, header};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;
use std::time::Duration;
use tokio::time::timeout;

/// The time limit for answers that take a server no work: its models, its metrics.
const TEXT_TIMEOUT: Duration = Duration::from_secs(30);

/// A client of any server, by HTTP or HTTPS. Clones share connections.
pub(crate) type HttpsClient = HttpClient<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// A client of any server, which trusts the certificates that the system trusts.
///
/// # Errors
/// If the system's certificates cannot be used.
pub(crate) fn https_client() -> Result<HttpsClient> {
    let connector = HttpsConnectorBuilder::new()
        .with_provider_and_platform_verifier(rustls::crypto::ring::default_provider())
        .context("the system's certificates cannot be used")?
        .https_or_http()
        .enable_http1()
        .build();
    Ok(HttpClient::builder(TokioExecutor::new()).build(connector))
}

/// A client of one server. Clones share connections.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    http: HttpsClient,
    /// The base URL without a trailing slash and without `/v1`.
    base: String,
    key: Option<String>,
}

impl Client {
    /// A client of the server at `url`, which may end in `/v1`.
    pub(crate) fn new(url: &str, key: Option<String>) -> Result<Self> {
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let parsed: Uri = base.parse().with_context(|| format!("{url} is not a URL"))?;
        if !matches!(parsed.scheme_str(), Some("http" | "https")) || parsed.host().is_none() {
            bail!("{url} is not the URL of a server\nhint: a URL such as http://localhost:8000");
        }
        Ok(Self { http: https_client()?, base, key })
    }

    /// Sends a request, and returns the response whatever its status.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Response<Incoming>> {
        let url = format!("{}{path}", self.base);
        let mut request = Request::builder().method(method).uri(&url);
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let body = body.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        let request = request.body(Full::from(body)).context("the request cannot be written")?;
        self.http.request(request).await.with_context(|| format!("{url} cannot be reached"))
    }

    /// Gets the text at a path, within [`TEXT_TIMEOUT`].
    pub(crate) async fn text(&self, path: &str) -> Result<String> {
        let response = async {
            let response = self.send(Method::GET, path, None).await?;
            Ok::<_, anyhow::Error>((response.status(), read(response).await?))
        };
        let late = || format!("{}{path} did not answer within {} s", self.base, TEXT_TIMEOUT.as_secs());
        let (status, text) = timeout(TEXT_TIMEOUT, response).await.with_context(late)??;
        if status.is_success() { Ok(text) } else { bail!("{path}: {}", failure(status, &text)) }
    }

    /// Gets the JSON at a path.
    pub(crate) async fn json(&self, path: &str) -> Result<Value> {
        serde_json::from_str(&self.text(path).await?)
            .with_context(|| format!("the answer of {path} is not JSON"))
    }

    /// Posts JSON, and returns the events of the response.
    pub(crate) async fn stream(&self, path: &str, body: &Value) -> Result<Events> {
        let response = self.send(Method::POST, path, Some(body)).await?;
        let status = response.status();
        if !status.is_success() {
            bail!("{}", failure(status, &read(response).await?));
        }
        Ok(Events::new(response.into_body()))
    }
}

async fn read(response: Response<Incoming>) -> Result<String> {
    let bytes = response.into_body().collect().await.context("the response breaks off")?.to_bytes();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The error message of a response: the one in its JSON if it has the usual form, else its text.
fn failure(status: StatusCode, text: &str) -> String {
    let json: Value = serde_json::from_str(text).unwrap_or_default();
    let message = json.pointer("/error/message").and_then(Value::as_str).unwrap_or(text);
    format!("{status}: {}", message.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_url_may_end_in_v1() {
        let client = Client::new("http://localhost:8000/v1/", None).expect("a URL");
        assert_eq!(client.base, "http://localhost:8000");
        assert!(Client::new("localhost:8000", None).is_err());
        assert!(Client::new("file:///tmp", None).is_err());
    }

    #[test]
    fn failures_have_the_message_of_the_server() {
        let text = r#"{"error": {"message": "no such model"}}"#;
        assert_eq!(failure(StatusCode::NOT_FOUND, text), "404 Not Found: no such model");
        assert_eq!(failure(StatusCode::BAD_GATEWAY, "gone\n"), "502 Bad Gateway: gone");
    }
}
