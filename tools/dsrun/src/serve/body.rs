//! Reads the bodies of requests: bounded in size and time, strict about fields.

use super::{
    error::ApiError,
    intake::{Held, Intake, Turn},
};
use axum::{
    body::Body,
    http::{HeaderMap, Request, header},
};
use bytes::BytesMut;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

/// Reads the JSON body of a request, and waits for the request's turn to be prepared.
///
/// # Errors
/// If it is not JSON, is too large or too slow, lacks a field of `T`, or has one that `T` does not have; the error names the field.
pub(crate) async fn read_json<T: DeserializeOwned>(
    request: Request<Body>,
    intake: &Intake,
) -> Result<(T, Turn), ApiError> {
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    // This also keeps out web pages of other origins: browsers send this type only if the server allows it.
    if !content_type.is_some_and(is_json) {
        return Err(ApiError::not_json());
    }
    check_head(request.headers(), intake.limits.bytes)?;
    let (body, held) = read(request.into_body(), intake).await?;
    let turn = intake.turn(held).await?;
    Ok((parse(&body)?, turn))
}

/// Refuses a body that its headers declare as too large, or as compressed, before any of it is read.
fn check_head(headers: &HeaderMap, limit: usize) -> Result<(), ApiError> {
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
        && !encoding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity")
    {
        return Err(ApiError::encoded());
    }
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    // A length that is no number was refused with the head.
    if length.and_then(|length| length.trim().parse::<u64>().ok()).is_some_and(|length| length > limit as u64)
    {
        return Err(ApiError::too_large(limit));
    }
    Ok(())
}

fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/json")
}

async fn read(body: Body, intake: &Intake) -> Result<(BytesMut, Held), ApiError> {
    let limits = intake.limits;
    let mut held = intake.hold()?;
    let mut body = Limited::new(body, limits.bytes);
    let read = async {
        let mut bytes = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| match error.is::<LengthLimitError>() {
                true => ApiError::too_large(limits.bytes),
                false => ApiError::malformed(format!("the body ends early: {error}")),
            })?;
            if let Ok(data) = frame.into_data() {
                held.add(data.len())?;
                bytes.extend_from_slice(&data);
            }
        }
        Ok(bytes)
    };
    let bytes = tokio::time::timeout(limits.time, read).await;
    Ok((bytes.map_err(|_| ApiError::slow_request(limits.time))??, held))
}

/// Parses a body; the error names the field.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| refused(&error))?;
    json.end().map_err(|error| ApiError::malformed(format!("the body is not JSON: {error}")))?;
    Ok(value)
}

fn refused(error: &serde_path_to_error::Error<serde_json::Error>) -> ApiError {
    let (path, inner) = (error.path().to_string(), error.inner());
    if !inner.is_data() {
        return ApiError::malformed(format!("the body is not JSON: {inner}"));
    }
    let message = inner.to_string();
    // The field is a better location than line and column.
    let message = message.split(" at line ").next().unwrap_or_default();
    // Serde's own message lists all fields.
    if message.starts_with("unknown field") {
        return ApiError::field(path, "this server does not support this field");
    }
    if let Some(name) = message.strip_prefix("missing field `").and_then(|rest| rest.split('`').next()) {
        let field = if path == "." { name.to_owned() } else { format!("{path}.{name}") };
        return ApiError::field(field, "must be given");
    }
    if path == "." { ApiError::malformed(message) } else { ApiError::field(path, message) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only parsed")]
    struct Outer {
        items: Vec<Inner>,
        count: Option<u8>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only parsed")]
    struct Inner {
        name: String,
    }

    fn refusal(body: &[u8]) -> serde_json::Value {
        let error = parse::<Outer>(body).expect_err("it is refused");
        serde_json::to_value(error.body()).expect("errors are JSON")
    }

    #[rstest]
    #[case(r#"{"items": [], "audio": 1}"#, "audio")]
    #[case(r#"{"items": [{"name": "a"}, {"name": "b", "x": 1}]}"#, "items[1].x")]
    #[case(r#"{"items": [{}]}"#, "items[0].name")]
    #[case(r#"{}"#, "items")]
    #[case(r#"{"items": [], "count": 256}"#, "count")]
    #[case(r#"{"items": [], "count": "1"}"#, "count")]
    fn errors_name_the_field(#[case] body: &str, #[case] field: &str) {
        let refusal = refusal(body.as_bytes());
        assert_eq!(refusal["error"]["param"], field);
        let message = refusal["error"]["message"].as_str().expect("a message");
        assert!(message.starts_with(field), "{message}");
    }

    #[rstest]
    #[case(b"")]
    #[case(b"{")]
    #[case(b"{\"items\": []} {}")]
    #[case(b"{\"items\": [{\"name\": \"\xff\"}]}")]
    fn bodies_that_are_not_json_are_refused_as_such(#[case] body: &[u8]) {
        let refusal = refusal(body);
        assert_eq!(refusal["error"]["param"], serde_json::Value::Null);
        let message = refusal["error"]["message"].as_str().expect("a message");
        assert!(message.starts_with("the body is not JSON"), "{message}");
    }

    #[test]
    fn nesting_is_bounded() {
        let deep = format!("{{\"items\": {}", "[".repeat(1_000_000));
        assert!(parse::<Outer>(deep.as_bytes()).is_err());
        let deep = format!("{{\"v\": {}", "[".repeat(1_000_000));
        assert!(parse::<serde_json::Value>(deep.as_bytes()).is_err());
    }

    #[test]
    fn the_type_may_have_parameters() {
        assert!(is_json("application/json; charset=utf-8"));
        assert!(!is_json("text/plain"));
    }
}
