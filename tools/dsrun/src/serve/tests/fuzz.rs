//! Fuzz targets of the server: its door, the bodies of requests, and what constrains answers.
//!
//! `dsrun_test_support::fuzz` says how to run them for longer, guided by coverage.

use super::support::{MODEL, PATIENCE, Running, start};
use crate::serve::{api::ResponseFormat, grammar::Grammar};
use dsrun_test_support::fuzz::{Fuzzer, Random, edit_json};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    runtime::{Builder, Runtime},
};

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Sends bytes and returns what the server answers. If it `ends` the sending side, the server does not wait for more, and cancels
/// requests in progress, whose client seems to have left.
async fn exchange(server: &Running, bytes: &[u8], ends: bool) -> String {
    let address = server.url.strip_prefix("http://").expect("a URL");
    let talk = async {
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        // The server may close before it has read everything.
        let _ = stream.write_all(bytes).await;
        if ends {
            let _ = stream.shutdown().await;
        }
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        answer
    };
    let answer =
        tokio::time::timeout(PATIENCE, talk).await.expect("the server answers, or closes the connection");
    String::from_utf8_lossy(&answer).into_owned()
}

/// The status and, of a refusal, its message.
fn outcome(answer: &str) -> String {
    let status = answer.lines().next().unwrap_or_default();
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let error: Value = serde_json::from_str(body).unwrap_or(Value::Null);
    format!("{status} {}", error["error"]["message"])
}

/// The server is as before: no request has panicked, and it answers.
async fn check(server: &Running) {
    assert_eq!(server.metric("dsrun_panics_total").await, 0.0, "a request panics");
}

fn post(path: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Bytes as they come from the network.
#[test]
fn http_door() {
    let runtime = runtime();
    let server = runtime.block_on(start());
    let body = format!(r#"{{"model":"{MODEL}","prompt":"a","max_tokens":1}}"#);
    let seeds = [
        post("/v1/completions", body.as_bytes()),
        b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer x\r\n\r\nGET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".to_vec(),
        format!("POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json; charset=utf-8\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\nx-request-id: a\r\ntraceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len()).into_bytes(),
        b"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:1\r\norigin: http://localhost:3000\r\naccess-control-request-method: POST\r\nconnection: close\r\n\r\n".to_vec(),
    ];
    let words = [
        "\r\n",
        "\r\n\r\n",
        ": ",
        "host: evil.example\r\n",
        "content-length: 5\r\n",
        "content-length: 18446744073709551616\r\n",
        "transfer-encoding: chunked\r\n",
        "transfer-encoding: gzip, chunked\r\n",
        "content-encoding: gzip\r\n",
        "ffffffffffffffff\r\n",
        "GET ",
        "POST ",
        "HEAD ",
        "DELETE ",
        "CONNECT ",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        " HTTP/1.0\r\n",
        "upgrade: websocket\r\n",
        "/v1/responses/x",
        "/v1/models/%00%ff",
        "/../",
        "//",
        "?a=b",
        "\0",
        "\u{ff}",
        "x-api-key: \r\n",
        "origin: null\r\n",
        "range: bytes=0-\r\n",
    ];
    let target = |bytes: &[u8]| {
        runtime.block_on(async {
            let answer = exchange(&server, bytes, true).await;
            check(&server).await;
            outcome(&answer)
        })
    };
    Fuzzer::new("http_door").seeds(seeds).words(words).inputs(1500).run(target);
    assert!(runtime.block_on(server.end()));
}

/// Bodies of all kinds of requests. An input is a path, a line break and a body.
#[test]
fn bodies() {
    let runtime = runtime();
    let server = runtime.block_on(start());
    let tool = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}, "strict": true}});
    let seeds: Vec<(&str, Value)> = vec![
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}}]}, {"role": "tool", "tool_call_id": "c", "content": "1"}],
            "tools": [tool], "tool_choice": "auto", "max_tokens": 3, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "n": 2, "stop": ["x"], "logit_bias": {"97": -1}, "logprobs": true, "top_logprobs": 3, "seed": 1, "stream": true, "stream_options": {"include_usage": true}, "chat_template_kwargs": {"x": [1]}, "cache_salt": "s", "priority": 1}),
        ),
        (
            "/v1/completions",
            json!({"prompt": ["a", "b"], "max_tokens": 2, "echo": true, "logprobs": 2, "n": 2, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1, "min_tokens": 1, "stop_token_ids": [97], "return_token_ids": true, "ignore_eos": true}),
        ),
        (
            "/v1/completions",
            json!({"prompt": [[1, 2], [3]], "max_tokens": 1, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}}),
        ),
        (
            "/v1/embeddings",
            json!({"input": ["a", "b"], "encoding_format": "base64", "pooling": "last", "normalize": false, "dimensions": 8}),
        ),
        (
            "/v1/responses",
            json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "1"}], "instructions": "i", "max_output_tokens": 2, "store": true, "text": {"format": {"type": "text"}}}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 2, "system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]}], "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
        ),
        (
            "/v1/rerank",
            json!({"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": true}),
        ),
        (
            "/tokenize",
            json!({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": true, "return_token_strs": true}),
        ),
        ("/detokenize", json!({"tokens": [97, 98]})),
    ];
    let mut words: Vec<String> = [
        "model",
        MODEL,
        "response_format",
        "json_object",
        "grammar",
        "regex",
        "lark",
        "structured_outputs",
        "guided_json",
        "continue_final_message",
        "reasoning_effort",
        "none",
        "required",
        "user",
        "assistant",
        "developer",
        "refusal",
        "image_url",
        "previous_response_id",
        "stop_sequences",
        "thinking",
    ]
    .map(str::to_owned)
    .to_vec();
    words.extend(
        seeds
            .iter()
            .flat_map(|(_, body)| body.as_object().into_iter().flat_map(|fields| fields.keys().cloned())),
    );
    let inputs: Vec<Vec<u8>> =
        seeds.iter().map(|(path, body)| format!("{path}\n{body}").into_bytes()).collect();
    let part = |input: &[u8]| {
        let end = input.iter().position(|byte| *byte == b'\n').unwrap_or(input.len());
        (input[..end].to_vec(), input.get(end + 1..).unwrap_or_default().to_vec())
    };
    let edit = |random: &mut Random, input: &mut Vec<u8>, other: &[u8]| {
        let ((path, mut body), (_, donor)) = (part(input), part(other));
        edit_json(random, &mut body, &donor, &words);
        *input = [&path[..], b"\n", &body].concat();
    };
    let target = |input: &[u8]| {
        let (path, body) = part(input);
        let Some(path) = str::from_utf8(&path)
            .ok()
            .filter(|path| path.starts_with('/') && path.is_ascii() && !path.contains([' ', '\r']))
        else {
            return "no path".to_owned();
        };
        runtime.block_on(async {
            let answer = exchange(&server, &post(path, &body), false).await;
            assert!(answer.starts_with("HTTP/1.1 "), "no answer: {answer}");
            assert!(!answer.starts_with("HTTP/1.1 5"), "{answer}");
            check(&server).await;
            outcome(&answer)
        })
    };
    Fuzzer::new("bodies").seeds(inputs).words(&words).edit(edit).inputs(1500).run(target);
    runtime.block_on(server.reaches("dsrun_kv_blocks_in_use", 0.0));
    assert!(runtime.block_on(server.end()));
}

/// Grammars, regular expressions and schemas, each followed for some tokens. An input is the JSON of a response format.
#[test]
fn grammars() {
    let runtime = runtime();
    let server = runtime.block_on(start());
    let loaded = server.app.loaded().expect("it is loaded");
    let schema = |schema: Value| {
        json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}).to_string()
    };
    let grammar = |syntax: &str, definition: &str| {
        json!({"type": "grammar", "syntax": syntax, "definition": definition}).to_string()
    };
    let seeds = [
        schema(
            json!({"type": "object", "properties": {"a": {"type": "string", "minLength": 1, "maxLength": 9, "pattern": "^a+$"}, "b": {"type": "array", "items": {"$ref": "#/$defs/c"}, "minItems": 1, "maxItems": 3}}, "required": ["a"], "additionalProperties": false, "$defs": {"c": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 99, "multipleOf": 3}, {"const": "x"}, {"enum": [1, null, "y"]}]}}}),
        ),
        schema(
            json!({"allOf": [{"type": "object", "patternProperties": {"^x": {"type": "boolean"}}}, {"oneOf": [{"required": ["x"]}, {"not": {"type": "null"}}]}], "if": {"type": "number"}, "then": {"exclusiveMinimum": 0.5}, "else": {"format": "date-time"}, "prefixItems": [{}, true]}),
        ),
        grammar("regex", "(a|b)*c{2,5}[^\\d\\s]\\p{L}?(?i:x)"),
        grammar(
            "lark",
            "start: a b* \"x\"? | %json {\"type\": \"object\"}\na: /[a-z]+/ | \"(\" a \")\"\nb[max_tokens=3]: A\nA: \"a\"i \"b\"..\"d\" ~ 2..4\n%ignore /\\s+/",
        ),
        json!({"type": "json_object"}).to_string(),
    ];
    let words = [
        "{1,1000}",
        "(a*)*",
        "(.*){50}",
        "|",
        "start",
        "%regex",
        "%json",
        "%ignore",
        "%import common.WS",
        "~ 1..100000",
        "<|im_end|>",
        "$ref",
        "#",
        "#/$defs/c",
        "anyOf",
        "allOf",
        "oneOf",
        "not",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "enum",
        "const",
        "x-guidance",
        "items",
        "format",
        "uuid",
        "type",
        "string",
        "number",
        "integer",
        "\\b",
        "(?=a)",
        "\\u{10ffff}",
        "[",
        "&",
        "~",
    ];
    let target = |input: &[u8]| {
        let format: ResponseFormat = match serde_json::from_slice(input) {
            Ok(format) => format,
            Err(error) => return error.to_string(),
        };
        let grammar = match Grammar::of(&format.into(), &loaded) {
            Ok(Some(grammar)) => grammar,
            Ok(None) => return "plain".to_owned(),
            Err(error) => return error.message().to_owned(),
        };
        let mut constraint = grammar.constraint();
        let size = loaded.engine.limits().vocabulary;
        for step in 0..8usize {
            let mut mask = vec![0u32; size.div_ceil(32)];
            if let Err(error) = constraint.allow(&mut mask) {
                return error.to_string();
            }
            let allowed: Vec<u32> = (0..size as u32)
                .filter(|token| mask[*token as usize / 32] >> (token % 32) & 1 == 1)
                .collect();
            let Some(token) = allowed.get((input.len() * 7 + step * 13) % allowed.len().max(1)) else {
                return "stuck".to_owned();
            };
            // A token that is allowed is accepted.
            if let Err(error) = constraint.accept(*token) {
                return error.to_string();
            }
        }
        "followed".to_owned()
    };
    Fuzzer::new("grammars").seeds(seeds).words(words).json().inputs(1000).run(target);
    assert!(runtime.block_on(server.end()));
}
