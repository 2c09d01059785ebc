//! Tests of `/v1/messages`.

use super::support::{MODEL, Setup, question, start, start_with, with};
use hyper::Method;
use serde_json::{Value, json};

const MESSAGES: &str = "/v1/messages";

fn message(text: &str, max_tokens: usize) -> Value {
    json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
    })
}

fn tools() -> Value {
    json!([{
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": false,
        },
        "cache_control": {"type": "ephemeral"},
    }])
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_that_of_a_chat_completion() {
    let server = start().await;
    let chat = with(question("Hello", 8), json!({"ignore_eos": false}));
    let chat = server.served("/v1/chat/completions", &chat).await;
    let answer = server.served(MESSAGES, &message("Hello", 8)).await;
    assert_eq!(
        (&answer["type"], &answer["role"], &answer["model"]),
        (&json!("message"), &json!("assistant"), &json!(MODEL))
    );
    let text = &chat["choices"][0]["message"]["content"];
    assert_eq!(answer["content"], json!([{"type": "text", "text": text}]));
    let length = chat["choices"][0]["finish_reason"] == "length";
    assert_eq!(answer["stop_reason"], if length { "max_tokens" } else { "end_turn" });
    let usage = &answer["usage"];
    let input = usage["input_tokens"].as_u64().expect("a number")
        + usage["cache_read_input_tokens"].as_u64().expect("a number");
    assert_eq!(input, chat["usage"]["prompt_tokens"].as_u64().expect("a number"));
    assert_eq!(usage["output_tokens"], chat["usage"]["completion_tokens"]);

    let count = server.served("/v1/messages/count_tokens", &message("Hello", 1)).await;
    assert_eq!(count["input_tokens"].as_u64(), Some(input));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_the_events_of_the_answer() {
    let server = start().await;
    let whole = server.served(MESSAGES, &message("Hello", 8)).await;
    let events = server.named_events(MESSAGES, &with(message("Hello", 8), json!({"stream": true}))).await;
    let names: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    assert_eq!(events[0]["message"]["content"], json!([]));
    let text = events.iter().filter_map(|event| event["delta"]["text"].as_str());
    assert_eq!(text.collect::<String>(), whole["content"][0]["text"]);
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], whole["stop_reason"]);
    assert_eq!(end["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_are_called_and_their_results_come_back() {
    let server = start().await;
    let fields =
        json!({"tools": tools(), "tool_choice": {"type": "any"}, "max_tokens": 400, "temperature": 1});
    let request = with(message("What is the weather?", 1), fields);
    let answer = server.served(MESSAGES, &request).await;
    assert_eq!(answer["stop_reason"], "tool_use", "{answer}");
    let call = &answer["content"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("tool_use"), &json!("get_weather")));
    assert!(call["input"]["city"].is_string());

    let messages = json!([
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "Rain"}]},
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
        ]},
    ]);
    let further =
        json!({"messages": messages, "tools": tools(), "system": [{"type": "text", "text": "Be brief."}]});
    server.served(MESSAGES, &with(message("", 4), further)).await;

    let events = server.named_events(MESSAGES, &with(request, json!({"stream": true}))).await;
    let begins = events.iter().find(|event| event["type"] == "content_block_start").expect("a block");
    assert_eq!(
        (&begins["content_block"]["type"], &begins["content_block"]["input"]),
        (&json!("tool_use"), &json!({}))
    );
    let pieces: Vec<&str> =
        events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert!(pieces.len() > 3, "{pieces:?}");
    let arguments: Value = serde_json::from_str(&pieces.concat()).expect("JSON");
    assert!(arguments["city"].is_string());
    assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "tool_use");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stop_sequence_that_ended_an_answer_is_named() {
    let server = start().await;
    let whole = server.served(MESSAGES, &message("Hello", 30)).await;
    let text = whole["content"][0]["text"].as_str().expect("a text").to_owned();
    let stop = text.chars().nth(5).expect("a longer text").to_string();
    let request = with(message("Hello", 30), json!({"stop_sequences": ["no such text", stop]}));
    let answer = server.served(MESSAGES, &request).await;
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
}

/// A template that opens reasoning, as those of some reasoning models do.
const REASONS: &str = "{% for message in messages %}{{ message.content }}{% endfor %}<think>\n{# </think> #}";

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_is_a_block_of_its_own() {
    let server = start_with(Setup { template: Some(REASONS), ..Setup::default() }).await;
    let answer = server.served(MESSAGES, &message("x", 12)).await;
    assert_eq!(answer["content"][0]["type"], "thinking", "{answer}");
    let events = server.named_events(MESSAGES, &with(message("x", 12), json!({"stream": true}))).await;
    let thinking = events.iter().filter_map(|event| event["delta"]["thinking"].as_str());
    assert_eq!(thinking.collect::<String>(), answer["content"][0]["thinking"]);
    assert!(events.iter().any(|event| event["delta"]["type"] == "signature_delta"));
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_ask_for_more_than_fits_and_send_fields_without_effect() {
    let server = start().await;
    let fields = json!({"max_tokens": 32000, "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["e", "a", " "], "tools": [], "context_management": {"edits": []}});
    server.served(MESSAGES, &with(message("Hello", 1), fields)).await;
}

/// As Python's SDK dumps the blocks of an answer: fields that this server does not know are null.
#[tokio::test(flavor = "multi_thread")]
async fn answers_come_back_with_all_fields_of_a_client() {
    let server = start().await;
    let dumped = json!([
        {"type": "text", "text": "a", "citations": null, "parsed": null},
        {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": null}, "caller": null, "toolset_name": null},
    ]);
    let result = json!([{"type": "tool_result", "tool_use_id": "t1", "content": "Rain", "is_error": null, "extra": null}]);
    let messages = json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": dumped},
        {"role": "user", "content": result},
    ]);
    let request = json!({"messages": messages, "max_tokens": 4, "tools": tools()});
    server.served(MESSAGES, &request).await;
    assert!(server.served("/v1/messages/count_tokens", &request).await["input_tokens"].is_u64());
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_the_form_of_the_api() {
    let server = start_with(Setup { keys: vec!["secret"], ..Setup::default() }).await;
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    let hosted = json!([{"type": "web_search_20250305", "name": "web_search"}]);
    for (request, kind, part) in [
        (json!({"model": "other", "messages": [], "max_tokens": 1}), "not_found_error", "other"),
        (
            json!({"model": MODEL, "messages": [{"role": "user", "content": "x"}]}),
            "invalid_request_error",
            "max_tokens",
        ),
        (with(message("x", 1), json!({"messages": image})), "invalid_request_error", "images"),
        (with(message("x", 1), json!({"tools": hosted})), "invalid_request_error", "tools[0].type"),
        (with(message("x", 1), json!({"speed": 1})), "invalid_request_error", "speed"),
        (with(message("x", 1), json!({"stop_sequences": [""]})), "invalid_request_error", "stop_sequences: "),
        (
            with(message("x", 1), json!({"tools": [{"name": "f", "input_schema": {"type": "array"}}]})),
            "invalid_request_error",
            "tools[0].input_schema: ",
        ),
    ] {
        let (status, body) = server.post(MESSAGES, &request).await;
        assert!((400..500).contains(&status), "{status}");
        assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)), "{body}");
        assert!(body["error"]["message"].as_str().is_some_and(|message| message.contains(part)), "{body}");
    }
    let (status, body) = server.post("/v1/messages/batches", &json!({})).await;
    assert_eq!((status, &body["error"]["type"]), (404, &json!("not_found_error")), "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_may_come_in_its_own_header() {
    let server = start_with(Setup { keys: vec!["secret"], ..Setup::default() }).await;
    let body = message("Hello", 2).to_string();
    for (key, expected) in [("secret", 200), ("wrong", 401)] {
        let request = hyper::Request::builder()
            .method(Method::POST)
            .uri(format!("{}{MESSAGES}", server.url))
            .header("content-type", "application/json")
            .header("x-api-key", key)
            .header("anthropic-version", "2023-06-01");
        let request = request.body(body.clone()).expect("a request");
        let client =
            hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new()).build_http();
        let response = client.request(request).await.expect("a response");
        assert_eq!(response.status().as_u16(), expected);
    }
}
