//! Tests of required tool calls. The parsing of calls that a model makes by itself is tested in `tools`.

use super::support::{question, start, with};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn tools() -> Value {
    json!([
        {"type": "function", "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "$defs": {"unit": {"enum": ["C", "F"]}},
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"$ref": "#/$defs/unit"}},
                "required": ["city", "unit"],
                "additionalProperties": false,
            },
        }},
        {"type": "function", "function": {"name": "get_time"}},
    ])
}

/// A question whose answer has to be a call.
fn required(choice: &Value, seed: u64) -> Value {
    let fields = json!({
        "tools": tools(), "tool_choice": choice, "temperature": 1, "seed": seed, "ignore_eos": false, "max_tokens": 600,
    });
    with(question("What is the weather?", 1), fields)
}

fn check(call: &Value) -> String {
    let name = call["function"]["name"].as_str().expect("a name").to_owned();
    let arguments = call["function"]["arguments"].as_str().expect("a text");
    let arguments: Value = serde_json::from_str(arguments).expect("JSON");
    match name.as_str() {
        "get_weather" => {
            assert!(arguments["city"].is_string() && (arguments["unit"] == "C" || arguments["unit"] == "F"));
        }
        "get_time" => assert_eq!(arguments, json!({})),
        other => panic!("there is no tool {other}"),
    }
    assert_eq!(call["type"], "function");
    assert!(call["id"].as_str().is_some_and(|id| id.starts_with("call")));
    name
}

#[tokio::test(flavor = "multi_thread")]
async fn a_named_tool_is_called_once_whole_and_streamed() {
    let server = start().await;
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    for seed in 0..3 {
        let answer = server.served(CHAT, &required(&named, seed)).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        assert_eq!(choice["message"]["content"], Value::Null);
        let calls = choice["message"]["tool_calls"].as_array().expect("calls");
        assert_eq!(calls.iter().map(check).collect::<Vec<_>>(), ["get_weather"]);
        assert_eq!(calls[0].get("index"), None);

        let events = server.events(CHAT, &with(required(&named, seed), json!({"stream": true}))).await;
        let deltas: Vec<&Value> =
            events.iter().filter_map(|event| event.pointer("/choices/0/delta/tool_calls/0")).collect();
        assert_eq!(deltas.len(), 1);
        assert_eq!((&deltas[0]["index"], &deltas[0]["function"]), (&json!(0), &calls[0]["function"]));
        let content = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
        assert_eq!(content.collect::<String>(), "");
        assert_eq!(events.last().expect("an event")["choices"][0]["finish_reason"], "tool_calls");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_required_call_calls_one_tool_without_parallel_calls() {
    let server = start().await;
    for seed in 0..4 {
        let request = with(required(&json!("required"), seed), json!({"parallel_tool_calls": false, "n": 2}));
        let answer = server.served(CHAT, &request).await;
        for choice in answer["choices"].as_array().expect("choices") {
            let calls = choice["message"]["tool_calls"].as_array().expect("calls");
            assert_eq!(calls.iter().map(check).count(), 1, "{choice}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_and_their_results_are_accepted_as_messages() {
    let server = start().await;
    let answer = server.served(CHAT, &required(&json!("required"), 5)).await;
    let message = &answer["choices"][0]["message"];
    let id = &message["tool_calls"][0]["id"];
    let messages = json!([
        {"role": "user", "content": "What is the weather?"},
        message,
        {"role": "tool", "tool_call_id": id, "content": "Rain"},
    ]);
    let further = with(question("", 4), json!({"messages": messages, "tools": tools()}));
    assert!(server.served(CHAT, &further).await["choices"][0]["message"]["content"].is_string());
    let broken = json!([{"role": "assistant", "tool_calls": [
        {"id": "call-1", "type": "function", "function": {"name": "get_time", "arguments": "{"}},
    ]}]);
    let (field, _) = server.refused(CHAT, &with(question("", 4), json!({"messages": broken}))).await;
    assert_eq!(field, "messages[0].tool_calls");
}

#[tokio::test(flavor = "multi_thread")]
async fn strict_arguments_need_a_required_call() {
    let server = start().await;
    let strict = json!([{"type": "function", "function": {"name": "f", "strict": true}}]);
    let (field, _) = server.refused(CHAT, &with(question("x", 1), json!({"tools": strict}))).await;
    assert_eq!(field, "tools[0].function.strict");
}
