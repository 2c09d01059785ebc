//! Error responses, in the form that OpenAI's clients read.

use super::api::messages::{MessagesError, MessagesErrorBody};
use axum::{
    body::Body,
    extract::rejection::PathRejection,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use schemars::JsonSchema;
use serde::Serialize;
use std::time::Duration;

/// The reason why a request was not served.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiError {
    status: StatusCode,
    /// Seconds after which to try again.
    retry_after: Option<u64>,
    detail: Detail,
}

/// The body of an error.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "Error")]
pub(crate) struct ErrorBody {
    error: Detail,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "ErrorDetail")]
struct Detail {
    /// What is wrong, and what to do about it.
    message: String,
    /// The kind of error.
    r#type: &'static str,
    /// The field that is wrong.
    param: Option<String>,
    /// The error's name, for programs.
    code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, code: Option<&'static str>, message: impl Into<String>) -> Self {
        let r#type = match status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let detail = Detail { message: message.into(), r#type, param: None, code };
        Self { status, retry_after: None, detail }
    }

    /// A field of the request is wrong.
    pub(crate) fn field(field: impl Into<String>, message: impl AsRef<str>) -> Self {
        let field = field.into();
        let mut error = Self::new(StatusCode::BAD_REQUEST, None, format!("{field}: {}", message.as_ref()));
        error.detail.param = Some(field);
        error
    }

    /// The same error under the name that another API has for the field.
    pub(crate) fn renamed(mut self, name: impl FnOnce(&str) -> String) -> Self {
        if let Some(field) = self.detail.param.take() {
            let new = name(&field);
            if let Some(rest) = self.detail.message.strip_prefix(&field) {
                self.detail.message = format!("{new}{rest}");
            }
            self.detail.param = Some(new);
        }
        self
    }

    /// The request is wrong as a whole.
    pub(crate) fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, None, message)
    }

    /// The body is larger than the limit.
    pub(crate) fn too_large(limit: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            Some("request_too_large"),
            format!("the body is larger than {limit} bytes"),
        )
    }

    /// The content type of the body is not JSON.
    pub(crate) fn not_json() -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Some("unsupported_media_type"),
            "the body must be JSON: send the header content-type: application/json",
        )
    }

    /// The body is compressed.
    pub(crate) fn encoded() -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Some("unsupported_content_encoding"),
            "the body must not be compressed: send it without the header content-encoding",
        )
    }

    /// The client did not send its request in time.
    pub(crate) fn slow_request(limit: Duration) -> Self {
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            Some("request_timeout"),
            format!("the body did not come within {} s", limit.as_secs()),
        )
    }

    /// The path does not exist.
    pub(crate) fn no_such_path(path: &str, hint: &str) -> Self {
        let message = format!("there is no {path}; {hint}");
        Self::new(StatusCode::NOT_FOUND, Some("unknown_url"), message)
    }

    /// The path exists, for another method.
    pub(crate) fn wrong_method() -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            Some("method_not_allowed"),
            "this path takes another method; /openapi.json lists it",
        )
    }

    /// The model is not served.
    pub(crate) fn no_such_model(asked: &str, served: &str) -> Self {
        let message = format!("the model {asked:?} is not served here; {served:?} is");
        let mut error = Self::new(StatusCode::NOT_FOUND, Some("model_not_found"), message);
        error.detail.param = Some("model".to_owned());
        error
    }

    /// No response of this id is stored.
    pub(crate) fn no_such_response(field: &str, id: &str) -> Self {
        let message = format!(
            "{field}: no response {id:?} is stored: it was not to be, or made room for later ones, or the server started anew"
        );
        let mut error = Self::new(StatusCode::NOT_FOUND, Some("response_not_found"), message);
        error.detail.param = Some(field.to_owned());
        error
    }

    /// The API key is missing or wrong.
    pub(crate) fn no_key() -> Self {
        Self::new(
            StatusCode::UNAUTHORIZED,
            Some("invalid_api_key"),
            "the API key is missing or wrong: send the header authorization: Bearer KEY",
        )
    }

    /// The API key may not do what the request asks for.
    pub(crate) fn not_allowed(message: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, Some("permission_denied"), message)
    }

    /// The priority is above what the API key allows.
    pub(crate) fn no_priority() -> Self {
        let mut error = Self::not_allowed("priority: above 0 is only for API keys with the right `priority`");
        error.detail.param = Some("priority".to_owned());
        error
    }

    /// The client exceeds its rate limit.
    pub(crate) fn too_often(wait: Duration) -> Self {
        let message = "too many requests of this client within a minute";
        Self::new(StatusCode::TOO_MANY_REQUESTS, Some("rate_limit_exceeded"), message).after(wait)
    }

    /// The requests that are being prepared have too many bytes.
    pub(crate) fn too_much_pending() -> Self {
        let message = "too much is being read and prepared: try again later";
        Self::new(StatusCode::TOO_MANY_REQUESTS, Some("queue_full"), message).after(Duration::from_secs(1))
    }

    /// Clients have not read too many bytes of responses.
    pub(crate) fn too_much_unsent() -> Self {
        let message = "too many bytes of responses wait to be read by their clients: try again later";
        Self::new(StatusCode::TOO_MANY_REQUESTS, Some("queue_full"), message).after(Duration::from_secs(1))
    }

    /// A part of a path is not text.
    pub(crate) fn not_a_path(rejection: &PathRejection) -> Self {
        Self::malformed(rejection.body_text())
    }

    /// A request has two hosts.
    pub(crate) fn two_hosts() -> Self {
        Self::malformed("the header `host` is given twice")
    }

    /// A prompt is longer than the context.
    pub(crate) fn too_long(field: &str, context: usize) -> Self {
        Self::field(
            field,
            format!("has more than {context} tokens, the most of a prompt and its answer together"),
        )
        .code("context_length_exceeded")
    }

    /// The `Host` or the `Origin` of a request is not one that the server answers.
    pub(crate) fn foreign(header: &str, value: &str) -> Self {
        let message = format!(
            "{header} {value:?} is not served: start the server with API keys, or allow the name with --allow-host \
             or the origin with --cors-origin"
        );
        Self::new(StatusCode::FORBIDDEN, Some("forbidden_origin"), message)
    }

    /// Too many requests are waiting.
    pub(crate) fn queue_full() -> Self {
        let message = "too many requests are waiting: try again later";
        Self::new(StatusCode::TOO_MANY_REQUESTS, Some("queue_full"), message).after(Duration::from_secs(1))
    }

    /// The server is starting or about to end.
    pub(crate) fn not_ready(why: &str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, Some("not_ready"), why).after(Duration::from_secs(1))
    }

    /// The answer took too long.
    pub(crate) fn too_slow(limit: Duration) -> Self {
        Self::new(
            StatusCode::GATEWAY_TIMEOUT,
            Some("timeout"),
            format!("the answer was not complete within {} s", limit.as_secs()),
        )
    }

    /// A defect of the server. The log has the details.
    pub(crate) fn internal() -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            Some("internal_error"),
            "the server failed at this request; its log has the details",
        )
    }

    /// Sets the error's name for programs.
    pub(crate) fn code(mut self, code: &'static str) -> Self {
        self.detail.code = Some(code);
        self
    }

    /// Sets the time to wait before another try.
    fn after(mut self, wait: Duration) -> Self {
        // Rounded up, because a request that comes too early is refused again.
        self.retry_after = Some(wait.as_secs_f64().ceil().max(1.0) as u64);
        self
    }

    /// The body, for errors in the middle of a stream.
    pub(crate) fn body(&self) -> ErrorBody {
        ErrorBody { error: self.detail.clone() }
    }

    /// What is wrong.
    pub(crate) fn message(&self) -> &str {
        &self.detail.message
    }

    /// The error's name, for programs.
    pub(crate) fn name(&self) -> &'static str {
        self.detail.code.unwrap_or(self.detail.r#type)
    }

    /// The body in the form of Anthropic's API.
    pub(crate) fn messages_body(&self) -> MessagesErrorBody {
        let r#type = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        MessagesErrorBody {
            r#type: "error",
            error: MessagesError { r#type, message: self.detail.message.clone() },
        }
    }

    /// The response in the form of Anthropic's API.
    pub(crate) fn into_messages_response(self) -> Response {
        let body = serde_json::to_vec(&self.messages_body()).unwrap_or_default();
        let mut response = self.into_response();
        *response.body_mut() = Body::from(body);
        response
    }

    /// The HTTP status.
    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    /// The error's name, or the kind of error.
    pub(crate) fn kind(&self) -> &'static str {
        self.detail.code.unwrap_or(self.detail.r#type)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        // The body consists of strings and numbers, so it can always be serialised.
        let body = serde_json::to_vec(&self.body()).unwrap_or_default();
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
