//! The hosts that requests may name, and the web pages that may use the server.
//!
//! A web page of a stranger can reach a server on the visitor's own machine under a name of the page's own domain that resolves to a
//! loopback address (DNS rebinding); the browser then takes both for the same origin. The headers `Host` and `Origin` tell
//! such requests from others.

use super::{app::App, error::ApiError};
use anyhow::{Result, bail};
use axum::{
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::{net::IpAddr, sync::Arc};

/// Seconds for which browsers keep the answer to a preflight request.
const PREFLIGHT_AGE: HeaderValue = HeaderValue::from_static("600");

/// The hosts and origins that are served.
#[derive(Debug, Default)]
pub(crate) struct Origins {
    /// Whether `Host` and `Origin` are checked.
    checked: bool,
    /// Names besides the loopback ones, in lower case.
    hosts: Vec<String>,
    /// Origins of web pages that may use the server, in lower case.
    origins: Vec<String>,
    /// Whether the web pages of all origins may.
    any_origin: bool,
}

impl Origins {
    /// These hosts and origins. `open` says that only machine and network protect the server: it has no keys, and a loopback
    /// address.
    ///
    /// # Errors
    /// If a host or an origin is not one.
    pub(crate) fn new<'a>(
        open: bool,
        hosts: impl Iterator<Item = &'a String>,
        origins: impl Iterator<Item = &'a String>,
    ) -> Result<Self> {
        let hosts: Vec<String> = hosts.map(|host| host.trim().to_ascii_lowercase()).collect();
        if let Some(host) = hosts.iter().find(|host| host.is_empty() || host.contains(['/', ' '])) {
            bail!("--allow-host {host:?}: must be a name or an address, without a scheme and a path");
        }
        let mut origins: Vec<String> = origins.map(|origin| origin.trim().to_ascii_lowercase()).collect();
        let any_origin = origins.iter().any(|origin| origin == "*");
        origins.retain(|origin| origin != "*");
        if let Some(origin) = origins.iter().find(|origin| !is_origin(origin)) {
            bail!("--cors-origin {origin:?}: must be * or like https://example.org, without a path");
        }
        Ok(Self { checked: open || !hosts.is_empty(), hosts, origins, any_origin })
    }

    /// Checks the host and the origin of a request.
    fn check<T>(&self, request: &Request<T>) -> Result<(), ApiError> {
        let headers = request.headers();
        // Servers and proxies would disagree on which of them holds.
        if headers.get_all(header::HOST).iter().count() > 1 {
            return Err(ApiError::two_hosts());
        }
        let text =
            |name| headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        if !self.checked {
            return Ok(());
        }
        // Requests to proxies name it in the path, too. Only programs send requests without a host.
        let named = request.uri().authority().map(|authority| authority.as_str().to_owned());
        if let Some(host) = [named, text(header::HOST)].into_iter().flatten().find(|host| !self.knows(host)) {
            return Err(ApiError::foreign("the host", &host));
        }
        let Some(origin) = text(header::ORIGIN) else { return Ok(()) };
        let own = origin.split_once("://").is_some_and(|(_, authority)| self.knows(authority));
        if own || self.allows(&origin) { Ok(()) } else { Err(ApiError::foreign("the origin", &origin)) }
    }

    /// Whether a host with or without a port is a loopback name, or one of the given ones.
    fn knows(&self, authority: &str) -> bool {
        let authority = authority.to_ascii_lowercase();
        let host = without_port(&authority);
        is_loopback(host) || self.hosts.iter().any(|known| known == host || *known == authority)
    }

    /// Whether web pages of an origin may use the server.
    fn allows(&self, origin: &str) -> bool {
        self.any_origin || self.origins.iter().any(|known| known.eq_ignore_ascii_case(origin))
    }
}

fn is_origin(origin: &str) -> bool {
    origin.split_once("://").is_some_and(|(scheme, authority)| {
        !scheme.is_empty() && !authority.is_empty() && !authority.contains(['/', ' '])
    })
}

/// The host of `host:port`.
fn without_port(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    }
}

fn is_loopback(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    if host == "localhost" || host.ends_with(".localhost") {
        return true;
    }
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Refuses requests of foreign hosts and origins, answers preflight requests, and tells browsers which pages may read answers.
pub(super) async fn guard(State(app): State<Arc<App>>, request: Request<Body>, next: Next) -> Response {
    if let Err(error) = app.origins.check(&request) {
        return error.into_response();
    }
    let origin = request.headers().get(header::ORIGIN).cloned();
    let allowed = origin.filter(|origin| origin.to_str().is_ok_and(|origin| app.origins.allows(origin)));
    let asks = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &allowed {
        Some(_) if asks => preflight(request.headers()),
        _ => next.run(request).await,
    };
    if let Some(origin) = allowed {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.append(header::VARY, HeaderValue::from_static("origin"));
        headers.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static("retry-after, x-request-id"),
        );
    }
    response
}

/// Allows a browser to send a request with the headers that it asks for.
fn preflight(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE"));
    if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_AGE);
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn origins(open: bool, hosts: &[&str], origins: &[&str]) -> Result<Origins> {
        let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        Origins::new(open, owned(hosts).iter(), owned(origins).iter())
    }

    fn request(path: &str, host: &str, origin: Option<&str>) -> Request<()> {
        let request = Request::builder().uri(path).header(header::HOST, host);
        let request =
            origin.into_iter().fold(request, |request, origin| request.header(header::ORIGIN, origin));
        request.body(()).expect("a request")
    }

    #[rstest]
    #[case("localhost:8000", None, true)]
    #[case("LOCALHOST", None, true)]
    #[case("app.localhost:1", None, true)]
    #[case("127.0.0.1:8000", Some("http://127.0.0.1:8000"), true)]
    #[case("127.8.9.1", None, true)]
    #[case("[::1]:8000", Some("http://[::1]:8000"), true)]
    #[case("proxy.example:443", Some("https://proxy.example"), true)]
    #[case("evil.example:8000", None, false)]
    #[case("localhost.evil.example", None, false)]
    #[case("evil.example:localhost", None, false)]
    #[case("localhost:8000", Some("http://evil.example"), false)]
    #[case("localhost:8000", Some("null"), false)]
    #[case("localhost:8000", Some("https://pages.example"), true)]
    #[case("192.168.1.7:8000", None, false)]
    fn only_loopback_names_and_given_ones_are_served(
        #[case] host: &str,
        #[case] origin: Option<&str>,
        #[case] served: bool,
    ) {
        let known = origins(true, &["proxy.example"], &["https://pages.example"]).expect("they are valid");
        assert_eq!(known.check(&request("/health", host, origin)).is_ok(), served);
        let unchecked = origins(false, &[], &[]).expect("they are valid");
        assert!(unchecked.check(&request("/health", host, origin)).is_ok());
    }

    #[test]
    fn a_named_host_is_enough_to_have_hosts_checked() {
        let known = origins(false, &["proxy.example"], &[]).expect("they are valid");
        assert!(known.check(&request("/health", "evil.example", None)).is_err());
    }

    #[test]
    fn a_host_in_the_path_is_checked_and_two_hosts_are_refused() {
        let known = origins(true, &[], &[]).expect("they are valid");
        assert!(known.check(&request("http://localhost:8000/health", "localhost:8000", None)).is_ok());
        assert!(known.check(&request("http://evil.example/health", "localhost:8000", None)).is_err());
        let mut two = request("/health", "localhost", None);
        two.headers_mut().append(header::HOST, HeaderValue::from_static("evil.example"));
        assert!(known.check(&two).is_err());
    }

    #[rstest]
    #[case(&["https://proxy.example"], &[])]
    #[case(&[""], &[])]
    #[case(&[], &["pages.example"])]
    #[case(&[], &["https://pages.example/path"])]
    fn hosts_and_origins_have_to_be_valid(#[case] hosts: &[&str], #[case] pages: &[&str]) {
        assert!(origins(true, hosts, pages).is_err());
    }
}
