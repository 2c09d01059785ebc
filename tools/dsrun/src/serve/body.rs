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
use serde_json::Value;

/// The beginning of serde's message about a field that a type does not have.
const UNKNOWN_FIELD: &str = "unknown field";
/// Fields whose values belong to the client, where `null` is a value: schemas, arguments, and variables of templates.
const OF_CLIENTS: [&str; 8] = [
    "parameters",
    "input_schema",
    "schema",
    "guided_json",
    "json",
    "arguments",
    "parsed_arguments",
    "chat_template_kwargs",
];

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

/// Parses a body; the error names the field. `null` means the same as leaving a field out, also for fields that `T` does not have: SDKs
/// send the answers of other servers back with all their fields.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let error = match serde_path_to_error::deserialize(&mut json) {
        Ok(value) => {
            json.end().map_err(|error| ApiError::malformed(format!("the body is not JSON: {error}")))?;
            return Ok(value);
        }
        Err(error) => error,
    };
    let mut value: Value = serde_json::from_slice(body)
        .map_err(|_| ApiError::malformed(format!("the body is not JSON: {}", error.inner())))?;
    if !remove_nulls(&mut value) {
        return Err(refused(&error));
    }
    serde_path_to_error::deserialize(&value).map_err(|error| refused(&error))
}

/// Removes the fields that are `null`, but not in what belongs to the client. Returns whether there were any. The depth of values is
/// bounded by their parser.
fn remove_nulls(value: &mut Value) -> bool {
    match value {
        Value::Array(items) => items.iter_mut().fold(false, |any, item| remove_nulls(item) | any),
        Value::Object(fields) => {
            let count = fields.len();
            fields.retain(|_, value| !value.is_null());
            let removed = fields.len() < count;
            let is_call = fields.get("type").is_some_and(|kind| kind == "tool_use");
            let kept = |key: &str| OF_CLIENTS.contains(&key) || is_call && key == "input";
            let inner = fields.iter_mut().filter(|(key, _)| !kept(key));
            inner.fold(removed, |any, (_, value)| remove_nulls(value) | any)
        }
        _ => false,
    }
}

/// The error for a body that is JSON.
fn refused(error: &serde_path_to_error::Error<serde_json::Error>) -> ApiError {
    let (path, inner) = (error.path().to_string(), error.inner());
    if !inner.is_data() {
        return ApiError::field(path, "has a value of a wrong type");
    }
    let message = inner.to_string();
    // The field is a better location than line and column.
    let message = message.split(" at line ").next().unwrap_or_default();
    // Serde's own message lists all fields.
    if message.starts_with(UNKNOWN_FIELD) {
        return ApiError::field(path, "this server does not support this field");
    }
    for (prefix, rule) in [("missing field `", "must be given"), ("duplicate field `", "is given twice")] {
        if let Some(name) = message.strip_prefix(prefix).and_then(|rest| rest.split('`').next()) {
            let field = if path == "." { name.to_owned() } else { format!("{path}.{name}") };
            return ApiError::field(field, rule);
        }
    }
    let message = readable(message);
    if path == "." { ApiError::malformed(message) } else { ApiError::field(path, message) }
}

/// A message of serde about a wrong type without the names of Rust's types.
fn readable(message: &str) -> String {
    // A list is read as the fields of an object in their order.
    if message.starts_with("invalid length ") {
        return "must be an object".to_owned();
    }
    let kinds = ["invalid type: ", "invalid value: "];
    let rest = kinds.iter().find_map(|kind| message.strip_prefix(kind));
    let Some((given, expected)) = rest.and_then(|rest| rest.rsplit_once(", expected ")) else {
        return message.to_owned();
    };
    let given = given.strip_prefix("floating point ").unwrap_or(given);
    let expected = match expected {
        "usize" | "u64" => "a whole number, 0 or more",
        "u32" => "a whole number from 0 to 4294967295",
        "i64" => "a whole number from -9223372036854775808 to 9223372036854775807",
        "i32" => "a whole number from -2147483648 to 2147483647",
        "isize" | "i16" | "i8" => "a whole number",
        "u16" => "a whole number from 0 to 65535",
        "u8" => "a whole number from 0 to 255",
        "f64" | "f32" => "a number",
        "a sequence" => "a list",
        "a map" => "an object",
        "a string" => "a text",
        "a boolean" => "true or false",
        other if other.starts_with("struct ") || other.starts_with("internally tagged enum ") => "an object",
        other => other,
    };
    format!("is {given}, but must be {expected}")
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

    fn refusal(body: &[u8]) -> Value {
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

    #[test]
    fn a_field_that_is_unknown_may_be_null() {
        let body =
            br#"{"items": [{"name": "a", "x": null}], "audio": null, "functions": null, "count": null}"#;
        assert_eq!(parse::<Outer>(body).expect("null means absent").items.len(), 1);
        let refusal = refusal(br#"{"items": [{"name": "a", "x": null}], "audio": null, "speed": 9}"#);
        assert_eq!(refusal["error"]["param"], "speed");
        let many: String = (0..10_000).map(|index| format!(", \"f{index}\": null")).collect();
        assert!(parse::<Outer>(format!("{{\"items\": []{many}}}").as_bytes()).is_ok());
    }

    #[test]
    fn null_stays_where_it_is_a_value() {
        let mut body = serde_json::json!({
            "a": null,
            "tools": [{"parameters": {"properties": {"x": {"default": null}}}, "strict": null}],
            "messages": [{"content": [
                {"type": "tool_use", "input": {"x": null}, "caller": null},
                {"type": "text", "text": "t", "parsed": null},
            ]}],
        });
        assert!(remove_nulls(&mut body));
        let expected = serde_json::json!({
            "tools": [{"parameters": {"properties": {"x": {"default": null}}}}],
            "messages": [{"content": [
                {"type": "tool_use", "input": {"x": null}},
                {"type": "text", "text": "t"},
            ]}],
        });
        assert_eq!(body, expected);
        assert!(!remove_nulls(&mut body));
    }

    #[rstest]
    #[case(r#"{"items": [], "count": 1.5}"#, "count: is `1.5`, but must be a whole number from 0 to 255")]
    #[case(
        r#"{"items": [], "count": "1"}"#,
        "count: is string \"1\", but must be a whole number from 0 to 255"
    )]
    #[case(
        r#"{"items": [], "count": -1}"#,
        "count: is integer `-1`, but must be a whole number from 0 to 255"
    )]
    #[case(r#"{"items": "a"}"#, "items: is string \"a\", but must be a list")]
    #[case(r#"{"items": ["a"]}"#, "items[0]: is string \"a\", but must be an object")]
    #[case(r#"{"items": [], "items": []}"#, "items: is given twice")]
    #[case(r#"[]"#, "must be an object")]
    fn errors_about_types_are_in_plain_words(#[case] body: &str, #[case] message: &str) {
        let refusal = refusal(body.as_bytes());
        let given = refusal["error"]["message"].as_str().expect("a message");
        assert!(given.contains(message), "{given}");
    }

    #[rstest]
    #[case(b"")]
    #[case(b"{")]
    #[case(b"{\"items\": []} {}")]
    #[case(b"{\"items\": [{\"name\": \"\xff\"}]}")]
    fn bodies_that_are_not_json_are_refused_as_such(#[case] body: &[u8]) {
        let refusal = refusal(body);
        assert_eq!(refusal["error"]["param"], Value::Null);
        let message = refusal["error"]["message"].as_str().expect("a message");
        assert!(message.starts_with("the body is not JSON"), "{message}");
    }

    #[test]
    fn nesting_is_bounded() {
        let deep = format!("{{\"items\": {}", "[".repeat(1_000_000));
        assert!(parse::<Outer>(deep.as_bytes()).is_err());
        let deep = format!("{{\"v\": {}", "[".repeat(1_000_000));
        assert!(parse::<Value>(deep.as_bytes()).is_err());
    }

    #[test]
    fn the_type_may_have_parameters() {
        assert!(is_json("application/json; charset=utf-8"));
        assert!(!is_json("text/plain"));
    }
}
