//! `/openapi.json`: the API for programs, made from the types of requests and responses.

use super::{
    api::{
        chat::{ChatChunk, ChatCompletion, ChatRequest},
        completions::{Completion, CompletionRequest},
        embeddings::{EmbeddingList, EmbeddingRequest},
        messages::{MessageAnswer, MessageEvent, MessagesRequest, TokenCount},
        models::{ModelCard, ModelList},
        rerank::{RerankRequest, Reranking, ScoreList, ScoreRequest},
        responses::{ResponseObject, ResponsesRequest},
        tokens::{DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse},
    },
    error::ErrorBody,
};
use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use schemars::{JsonSchema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};
use std::sync::OnceLock;

/// The place of the schemas in the document.
const SCHEMAS: &str = "#/components/schemas";

pub(crate) async fn openapi() -> Response {
    static DOCUMENT: OnceLock<String> = OnceLock::new();
    let document = DOCUMENT.get_or_init(|| document().to_string());
    ([(header::CONTENT_TYPE, "application/json")], document.as_str()).into_response()
}

/// An operation of a path.
struct Operation {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    request: Option<Value>,
    /// The content type and the schema of each kind of response.
    answers: Vec<(&'static str, Value)>,
    /// Whether an API key is needed, if the server has any.
    guarded: bool,
}

/// The whole document, in OpenAPI 3.1.
fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = SCHEMAS.trim_start_matches('#').to_owned().into();
        settings.meta_schema = None;
    });
    let mut schemas = settings.into_generator();
    let error = reference::<ErrorBody>(&mut schemas);
    let mut paths = Map::new();
    for operation in operations(&mut schemas) {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method] = described(&operation, &error);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "dsrun",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "An OpenAI-compatible server. Fields that are not listed here are refused.",
            "license": {"name": "MIT OR Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas.take_definitions(true),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    })
}

fn operations(schemas: &mut SchemaGenerator) -> Vec<Operation> {
    let (json, events) = ("application/json", "text/event-stream");
    let status =
        json!({"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]});
    let mut posts = vec![
        Operation {
            method: "post",
            path: "/v1/chat/completions",
            summary: "Continues a conversation.",
            request: Some(reference::<ChatRequest>(schemas)),
            answers: vec![
                (json, reference::<ChatCompletion>(schemas)),
                (events, reference::<ChatChunk>(schemas)),
            ],
            guarded: true,
        },
        Operation {
            method: "post",
            path: "/v1/completions",
            summary: "Continues a text.",
            request: Some(reference::<CompletionRequest>(schemas)),
            answers: vec![
                (json, reference::<Completion>(schemas)),
                (events, reference::<Completion>(schemas)),
            ],
            guarded: true,
        },
        Operation {
            method: "post",
            path: "/v1/messages",
            summary: "Continues a conversation, in the form of Anthropic's API.",
            request: Some(reference::<MessagesRequest>(schemas)),
            answers: vec![
                (json, reference::<MessageAnswer>(schemas)),
                (events, reference::<MessageEvent>(schemas)),
            ],
            guarded: true,
        },
        Operation {
            method: "post",
            path: "/v1/messages/count_tokens",
            summary: "Counts the tokens of a conversation.",
            request: Some(reference::<MessagesRequest>(schemas)),
            answers: vec![(json, reference::<TokenCount>(schemas))],
            guarded: true,
        },
        Operation {
            method: "post",
            path: "/v1/responses",
            summary: "Responds to an input, and stores the conversation.",
            request: Some(reference::<ResponsesRequest>(schemas)),
            answers: vec![
                (json, reference::<ResponseObject>(schemas)),
                (
                    events,
                    json!({"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}),
                ),
            ],
            guarded: true,
        },
        Operation {
            method: "delete",
            path: "/v1/responses/{id}",
            summary: "Forgets a stored response.",
            request: None,
            answers: vec![(json, json!({"type": "object"}))],
            guarded: true,
        },
        Operation {
            method: "post",
            path: "/v1/embeddings",
            summary: "Embeds texts.",
            request: Some(reference::<EmbeddingRequest>(schemas)),
            answers: vec![(json, reference::<EmbeddingList>(schemas))],
            guarded: true,
        },
        Operation {
            method: "post",
            path: "/v1/rerank",
            summary: "Orders documents by their relevance to a query.",
            request: Some(reference::<RerankRequest>(schemas)),
            answers: vec![(json, reference::<Reranking>(schemas))],
            guarded: true,
        },
        Operation {
            method: "post",
            path: "/v1/score",
            summary: "Scores pairs of texts.",
            request: Some(reference::<ScoreRequest>(schemas)),
            answers: vec![(json, reference::<ScoreList>(schemas))],
            guarded: true,
        },
        Operation {
            method: "post",
            path: "/tokenize",
            summary: "Turns a text or a conversation into tokens.",
            request: Some(reference::<TokenizeRequest>(schemas)),
            answers: vec![(json, reference::<TokenizeResponse>(schemas))],
            guarded: true,
        },
        Operation {
            method: "post",
            path: "/detokenize",
            summary: "Turns tokens into text.",
            request: Some(reference::<DetokenizeRequest>(schemas)),
            answers: vec![(json, reference::<DetokenizeResponse>(schemas))],
            guarded: true,
        },
    ];
    let text = || json!({"type": "string"});
    let gets = [
        ("/v1/models", "Lists the model.", json, reference::<ModelList>(schemas), true),
        ("/v1/models/{model}", "Describes the model.", json, reference::<ModelCard>(schemas), true),
        (
            "/v1/responses/{id}",
            "Returns a stored response.",
            json,
            reference::<ResponseObject>(schemas),
            true,
        ),
        ("/metrics", "Metrics for Prometheus.", "text/plain", text(), true),
        (
            "/version",
            "The version of the server.",
            json,
            json!({"type": "object", "properties": {"version": {"type": "string"}}, "required": ["version"]}),
            false,
        ),
        ("/health", "The same as `/health/ready`.", json, status.clone(), false),
        ("/health/live", "Whether the process is alive.", json, status.clone(), false),
        ("/health/ready", "Whether requests are served.", json, status, false),
        ("/openapi.json", "This document.", json, json!({"type": "object"}), false),
    ];
    posts.extend(gets.map(|(path, summary, kind, schema, guarded)| Operation {
        method: "get",
        path,
        summary,
        request: None,
        answers: vec![(kind, schema)],
        guarded,
    }));
    posts
}

fn reference<T: JsonSchema>(schemas: &mut SchemaGenerator) -> Value {
    schemas.subschema_for::<T>().to_value()
}

fn described(operation: &Operation, error: &Value) -> Value {
    let content: Map<String, Value> = operation
        .answers
        .iter()
        .map(|(kind, schema)| ((*kind).to_owned(), json!({"schema": schema})))
        .collect();
    let failed =
        json!({"description": "What went wrong.", "content": {"application/json": {"schema": error}}});
    let mut described = json!({
        "summary": operation.summary,
        "responses": {"200": {"description": operation.summary, "content": content}, "4XX": failed, "5XX": failed},
    });
    if let Some(schema) = &operation.request {
        described["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    let parameter = operation.path.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    if let Some((name, _)) = parameter {
        described["parameters"] =
            json!([{"name": name, "in": "path", "required": true, "schema": {"type": "string"}}]);
    }
    if operation.guarded {
        // The empty requirement is for servers without keys.
        described["security"] = json!([{"key": []}, {}]);
    }
    described
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every `$ref` in a value.
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|value| references(value, found));
            }
            Value::Array(items) => items.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_has_a_schema() {
        let document = document();
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.len() > 20, "{found:?}");
        for reference in found {
            let pointer = reference.strip_prefix('#').expect("within the document");
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
    }

    #[test]
    fn schemas_of_requests_list_their_fields_and_allow_no_others() {
        let document = document();
        let chat = &document["components"]["schemas"]["ChatRequest"];
        assert_eq!(chat["additionalProperties"], false);
        assert_eq!(chat["required"], json!(["messages"]));
        for field in ["temperature", "tools", "response_format", "stream_options"] {
            assert!(chat["properties"][field].is_object(), "{field}");
        }
    }
}
