//! GET requests to a hub, blocking, with the rules that a token needs.
//!
//! Redirects are followed here and not by the HTTP library, for two reasons. The hub puts what it knows about
//! a file (commit, digest, size) on its own answer, which redirects to a content network; and the token may
//! go to the hub's own origin only, whatever a redirect says.

use std::sync::Arc;
use std::time::Duration;

use ureq::http::Uri;
use ureq::http::header::{AUTHORIZATION, CONTENT_RANGE, HeaderMap, LOCATION, RANGE};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

use super::error::{Failure, FetchError};
use super::options::{FetchOptions, Token};

const MAX_REDIRECTS: usize = 10;
/// A time to answer that covers a hub busy with finding the file; separate from the pause allowed inside a
/// transfer.
const RESPONSE_PATIENCE: u32 = 2;

/// Talks to one hub.
pub(crate) struct Client {
    agent: Agent,
    /// Without a slash at the end.
    endpoint: String,
    origin: Origin,
    token: Option<Token>,
}

/// The parts of an address that decide who receives a request.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Origin {
    scheme: String,
    host: String,
    port: u16,
}

/// An answer with status 200 or 206.
pub(crate) struct Reply {
    pub(crate) body: Body,
    /// Position of the first byte, for an answer to a range request that was honoured.
    pub(crate) start: u64,
    /// Length of the whole file.
    pub(crate) total: Option<u64>,
    pub(crate) hub: HubHeaders,
}

/// What the hub itself says about a file, before it redirects elsewhere.
#[derive(Debug, Clone, Default)]
pub(crate) struct HubHeaders {
    /// `X-Repo-Commit`.
    pub(crate) commit: Option<String>,
    /// `X-Linked-Etag` where it is a sha256, which it is for files in large-file storage.
    pub(crate) sha256: Option<String>,
    /// `X-Linked-Size`.
    pub(crate) bytes: Option<u64>,
}

impl Client {
    pub(crate) fn new(options: &FetchOptions) -> Result<Self, FetchError> {
        let wrong = |reason: &str| FetchError::Setting {
            variable: "HF_ENDPOINT",
            reason: format!("`{}` {reason}", without_secrets(&options.hub_endpoint)),
        };
        let endpoint = options.hub_endpoint.trim_end_matches('/').to_owned();
        let address: Uri = endpoint.parse().map_err(|_| wrong("is not an address"))?;
        let origin = Origin::of(&address).ok_or_else(|| wrong("does not start with http:// or https://"))?;
        if address.query().is_some() {
            return Err(wrong("has a query"));
        }
        let token = options.hub_token.clone().filter(|_| {
            let safe = origin.scheme == "https" || origin.is_loopback();
            if !safe {
                tracing::warn!(endpoint, "HF_TOKEN is not sent: the connection would not be encrypted");
            }
            safe
        });
        let tls = TlsConfig::builder()
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .root_certs(RootCerts::PlatformVerifier)
            .build();
        let mut config = Agent::config_builder()
            .tls_config(tls)
            .user_agent(concat!("dsrun/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_resolve(Some(options.connect_timeout))
            .timeout_connect(Some(options.connect_timeout))
            .timeout_recv_response(Some(options.stall_timeout.saturating_mul(RESPONSE_PATIENCE)))
            .timeout_per_read(Some(options.stall_timeout.max(Duration::from_millis(1))));
        if origin.is_loopback() {
            // A proxy's idea of this machine is another machine.
            config = config.proxy(None);
        }
        Ok(Self { agent: config.build().into(), endpoint, origin, token })
    }

    /// The address of a path on this hub. `path` must be percent-encoded.
    pub(crate) fn address(&self, path: &str) -> String {
        format!("{}/{path}", self.endpoint)
    }

    /// Requests `url`, from byte `start` on.
    pub(crate) fn get(&self, url: &str, start: u64, page: &str) -> Result<Reply, Failure> {
        let mut url: Uri = url.parse().map_err(|_| protocol(url, "the address is malformed"))?;
        let mut hub = HubHeaders::default();
        for _ in 0..=MAX_REDIRECTS {
            let shown = without_secrets(&url.to_string());
            let at_hub = Origin::of(&url).as_ref() == Some(&self.origin);
            let mut request = self.agent.get(&url);
            if start > 0 {
                request = request.header(RANGE, format!("bytes={start}-"));
            }
            let token = self.token.as_ref().filter(|_| at_hub);
            if let Some(token) = token {
                request = request.header(AUTHORIZATION, format!("Bearer {}", token.reveal()));
            }
            let reply = request.call().map_err(|error| network(&shown, &error))?;
            if at_hub {
                hub.update(reply.headers());
            }
            match reply.status().as_u16() {
                200 => {
                    let total = reply.body().content_length();
                    return Ok(Reply { total, start: 0, hub, body: reply.into_body() });
                }
                206 => {
                    let (first, total) = content_range(reply.headers()).ok_or_else(|| {
                        protocol(&shown, "a part was sent without saying which (Content-Range)")
                    })?;
                    return Ok(Reply { total, start: first, hub, body: reply.into_body() });
                }
                301 | 302 | 303 | 307 | 308 => {
                    let target = reply.headers().get(LOCATION).and_then(|target| target.to_str().ok());
                    let next = target
                        .and_then(|target| redirected(&url, target))
                        .ok_or_else(|| protocol(&shown, "a redirect without a usable target"))?;
                    url = next;
                }
                status @ (401 | 403) if at_hub => {
                    let page = page.to_owned();
                    return Err(Failure::Refused { url: shown, status, token_sent: token.is_some(), page });
                }
                status => return Err(Failure::Status { url: shown, status }),
            }
        }
        Err(protocol(&without_secrets(&url.to_string()), "too many redirects"))
    }
}

impl Origin {
    fn of(address: &Uri) -> Option<Self> {
        let scheme = address.scheme_str()?.to_ascii_lowercase();
        let default_port = match scheme.as_str() {
            "http" => 80,
            "https" => 443,
            _ => return None,
        };
        let host = address.host()?.to_ascii_lowercase();
        Some(Self { host, port: address.port_u16().unwrap_or(default_port), scheme })
    }

    fn is_loopback(&self) -> bool {
        let host = self.host.trim_matches(['[', ']']);
        host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

impl HubHeaders {
    fn update(&mut self, headers: &HeaderMap) {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        self.commit = text("x-repo-commit").or(self.commit.take());
        self.bytes = text("x-linked-size").and_then(|size| size.parse().ok()).or(self.bytes);
        let etag =
            text("x-linked-etag").map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_lowercase());
        self.sha256 = etag.filter(|etag| is_sha256(etag)).or(self.sha256.take());
    }
}

pub(crate) fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Encodes one path component.
pub(crate) fn encode(component: &str) -> String {
    component
        .bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

/// An address without user, password and query: fit for messages.
pub(crate) fn without_secrets(url: &str) -> String {
    let url = url.split(['?', '#']).next().unwrap_or_default();
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let host = authority.rsplit('@').next().unwrap_or_default();
            format!("{scheme}://{host}{path}")
        }
        None => url.to_owned(),
    }
}

pub(crate) fn protocol(url: &str, reason: &str) -> Failure {
    Failure::Protocol { url: url.to_owned(), reason: reason.to_owned() }
}

fn network(url: &str, error: &ureq::Error) -> Failure {
    Failure::Network { url: url.to_owned(), reason: error.to_string() }
}

/// The address that a `Location` header means, seen from `from`. An encrypted address never leads to an open
/// one.
fn redirected(from: &Uri, target: &str) -> Option<Uri> {
    let scheme = from.scheme_str()?;
    let authority = from.authority()?;
    let absolute = if target.contains("://") {
        target.to_owned()
    } else if target.starts_with("//") {
        format!("{scheme}:{target}")
    } else if target.starts_with('/') {
        format!("{scheme}://{authority}{target}")
    } else {
        let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{target}")
    };
    let address: Uri = absolute.split('#').next()?.parse().ok()?;
    let origin = Origin::of(&address)?;
    (scheme != "https" || origin.scheme == "https").then_some(address)
}

/// First byte and total length from `bytes 5-9/10`.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.trim().parse().ok()?, total.trim().parse().ok()))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("https://cdn.example/x?sig=1", Some("https://cdn.example/x?sig=1"))]
    #[case("//cdn.example/x", Some("https://cdn.example/x"))]
    #[case("/api/x", Some("https://hub.example:8443/api/x"))]
    #[case("other", Some("https://hub.example:8443/a/b/other"))]
    #[case("/x#part", Some("https://hub.example:8443/x"))]
    #[case("ftp://cdn.example/x", None)]
    #[case("http://cdn.example/x", None)]
    #[case("http://", None)]
    fn redirects_are_resolved(#[case] target: &str, #[case] expected: Option<&str>) {
        let from: Uri = "https://hub.example:8443/a/b/c".parse().unwrap();
        assert_eq!(redirected(&from, target).map(|uri| uri.to_string()).as_deref(), expected);
    }

    #[rstest]
    #[case("https://user:pass@hub.example/a?token=1#x", "https://hub.example/a")]
    #[case("http://hub.example", "http://hub.example")]
    #[case("nonsense?x", "nonsense")]
    fn addresses_are_shown_without_secrets(#[case] url: &str, #[case] shown: &str) {
        assert_eq!(without_secrets(url), shown);
    }

    #[rstest]
    #[case("bytes 5-9/10", Some((5, Some(10))))]
    #[case("bytes 5-9/*", Some((5, None)))]
    #[case("bytes */10", None)]
    #[case("5-9/10", None)]
    fn content_ranges_are_read(#[case] text: &str, #[case] expected: Option<(u64, Option<u64>)>) {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_RANGE, text.parse().unwrap());
        assert_eq!(content_range(&headers), expected);
    }

    #[rstest]
    #[case("ftp://hub.example")]
    #[case("hub.example")]
    #[case("")]
    #[case("https://hub.example?x=1")]
    #[case("https://us er:secret@hub")]
    fn bad_endpoints_are_refused(#[case] endpoint: &str) {
        let mut options = FetchOptions::new("unused");
        options.hub_endpoint = endpoint.into();
        let message = Client::new(&options).map(drop).unwrap_err().to_string();
        assert!(message.contains("HF_ENDPOINT") && !message.contains("secret"), "{message}");
    }

    #[rstest]
    #[case("https://hub.example", true)]
    #[case("http://127.0.0.1:1", true)]
    #[case("http://[::1]:1", true)]
    #[case("http://localhost", true)]
    #[case("http://hub.example", false)]
    fn the_token_needs_an_encrypted_or_local_connection(#[case] endpoint: &str, #[case] kept: bool) {
        let mut options = FetchOptions::new("unused");
        options.hub_endpoint = endpoint.into();
        options.hub_token = Some(Token::new("hf_x").unwrap());
        assert_eq!(Client::new(&options).unwrap().token.is_some(), kept);
    }

    #[test]
    fn components_are_encoded() {
        assert_eq!(encode("refs/pr/1 ä"), "refs%2Fpr%2F1%20%C3%A4");
    }
}
