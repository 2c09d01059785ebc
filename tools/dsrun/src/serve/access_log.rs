//! Ids of requests, and a line for each request in the access log.

use super::{app::App, connections::Peer};
use crate::arguments::AccessLog;
use axum::{
    body::Body,
    extract::State,
    http::{HeaderName, HeaderValue, Request},
    middleware::Next,
    response::Response,
};
use serde_json::{Value, json};
use std::{
    io::Write,
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The most bytes of an id that a client gives.
const MAX_ID: usize = 128;

/// Gives every request an id, which the response has, and logs the request when its response begins.
pub(super) async fn identify(State(app): State<Arc<App>>, request: Request<Body>, next: Next) -> Response {
    let started = Instant::now();
    let given = request.headers().get(&REQUEST_ID).filter(|id| is_valid(id)).cloned();
    let id = given.unwrap_or_else(|| {
        // It consists of letters and digits.
        let id = format!("req_{:032x}", rand::random::<u128>());
        HeaderValue::from_str(&id).unwrap_or(HeaderValue::from_static("req"))
    });
    let client = request.extensions().get::<Peer>().map(|Peer(peer)| peer.ip().to_string());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = next.run(request).await;
    if app.access_log != AccessLog::Off {
        let entry = json!({
            "time": SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            "id": id.to_str().unwrap_or_default(),
            "client": client,
            "method": method.as_str(),
            "path": path,
            "status": response.status().as_u16(),
            "milliseconds": started.elapsed().as_secs_f64() * 1000.0,
        });
        // A failure to write to standard error cannot be reported.
        let _ = writeln!(std::io::stderr().lock(), "{}", line(&entry, app.access_log));
    }
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// Whether an id of a client can be logged and sent back as it is.
fn is_valid(id: &HeaderValue) -> bool {
    (1..=MAX_ID).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
}

/// The line of a request.
fn line(entry: &Value, form: AccessLog) -> String {
    if form == AccessLog::Json {
        return entry.to_string();
    }
    let text = |key: &str| match &entry[key] {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        value => value.to_string(),
    };
    format!(
        "{:.3} {} {} {} {} {} {:.1} ms",
        entry["time"].as_f64().unwrap_or_default(),
        text("client"),
        text("id"),
        text("method"),
        // A path as JSON has no line breaks and no control characters.
        entry["path"],
        text("status"),
        entry["milliseconds"].as_f64().unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_one_line_whatever_its_path_is() {
        let entry = json!({"time": 1.5, "id": "a", "client": "::1", "method": "GET", "path": "/x\n\u{1b}y", "status": 404,
            "milliseconds": 2.25});
        assert_eq!(line(&entry, AccessLog::Text), "1.500 ::1 a GET \"/x\\n\\u001by\" 404 2.2 ms");
        assert_eq!(line(&entry, AccessLog::Json).lines().count(), 1);
    }

    #[test]
    fn ids_of_clients_are_visible_ascii() {
        let valid = |id: &str| HeaderValue::from_str(id).is_ok_and(|id| is_valid(&id));
        assert!(valid("abc-123") && !valid("a b") && !valid("") && !valid(&"x".repeat(129)));
    }
}
