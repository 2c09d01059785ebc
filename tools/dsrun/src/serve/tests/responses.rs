//! Tests of `/v1/responses`.

use super::support::{MODEL, Setup, question, start, start_with, with};
use hyper::Method;
use serde_json::{Value, json};

const RESPONSES: &str = "/v1/responses";

fn input(input: &Value, max_tokens: usize) -> Value {
    json!({"model": MODEL, "input": input, "max_output_tokens": max_tokens, "temperature": 0})
}

fn tools() -> Value {
    json!([{
        "type": "function",
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": false,
        },
        "strict": true,
    }])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_is_that_of_a_chat_completion() {
    let server = start().await;
    let chat = with(question("Hello", 8), json!({"ignore_eos": false}));
    let chat = server.served("/v1/chat/completions", &chat).await;
    let response = server.served(RESPONSES, &input(&json!("Hello"), 8)).await;
    let item = &response["output"][0];
    assert_eq!((&item["type"], &item["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(item["content"][0]["type"], "output_text");
    assert_eq!(item["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    let length = chat["choices"][0]["finish_reason"] == "length";
    assert_eq!(response["status"], if length { "incomplete" } else { "completed" });
    assert_eq!(response["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(response["usage"]["output_tokens"], chat["usage"]["completion_tokens"]);
    // The same as a list of items, in several forms.
    for items in [
        json!([{"role": "user", "content": "Hello"}]),
        json!([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]),
    ] {
        let same = server.served(RESPONSES, &input(&items, 8)).await;
        assert_eq!(same["output"][0]["content"], item["content"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_the_events_of_the_response() {
    let server = start().await;
    let whole = server.served(RESPONSES, &input(&json!("Hello"), 8)).await;
    let events =
        server.named_events(RESPONSES, &with(input(&json!("Hello"), 8), json!({"stream": true}))).await;
    let names: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    assert_eq!(
        names[..4],
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added"
        ]
    );
    let end = names.len() - 4;
    assert_eq!(
        names[end..end + 3],
        ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    );
    let numbers: Vec<u64> = events.iter().filter_map(|event| event["sequence_number"].as_u64()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(text, whole["output"][0]["content"][0]["text"]);
    let last = &events[events.len() - 1]["response"];
    assert_eq!(
        (&last["status"], &last["usage"]["output_tokens"]),
        (&whole["status"], &whole["usage"]["output_tokens"])
    );
    assert_eq!(last["output"][0]["content"], whole["output"][0]["content"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_goes_on_from_a_stored_response() {
    let server = start().await;
    let first = server
        .served(RESPONSES, &with(input(&json!("Hello"), 6), json!({"instructions": "Be brief."})))
        .await;
    let further = with(input(&json!("More"), 4), json!({"previous_response_id": first["id"]}));
    let second = server.served(RESPONSES, &further).await;
    // The instructions of the first request do not carry over.
    let items = json!([
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first["output"][0]["content"]},
        {"role": "user", "content": "More"},
    ]);
    let same = server.served(RESPONSES, &input(&items, 4)).await;
    assert_eq!(second["output"][0]["content"], same["output"][0]["content"]);
    assert_eq!(second["usage"]["input_tokens"], same["usage"]["input_tokens"]);
    assert_eq!(second["previous_response_id"], first["id"]);

    let path = format!("{RESPONSES}/{}", first["id"].as_str().expect("an id"));
    assert_eq!(server.client.json(&path).await.expect("it is stored"), first);
    let deleted = server.client.send(Method::DELETE, &path, None).await.expect("an answer");
    assert_eq!(deleted.status(), 200);
    assert_eq!(server.refused(RESPONSES, &further).await.0, "previous_response_id");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_to_be_stored_is_not() {
    let server = start().await;
    let first = server.served(RESPONSES, &with(input(&json!("Hello"), 2), json!({"store": false}))).await;
    let further = with(input(&json!("More"), 2), json!({"previous_response_id": first["id"]}));
    assert_eq!(server.refused(RESPONSES, &further).await.0, "previous_response_id");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_is_bounded_and_forgets_the_oldest() {
    let mut setup = Setup::default();
    setup.settings.response_store = Some(12_000);
    let server = start_with(setup).await;
    let mut ids = Vec::new();
    for _ in 0..8 {
        ids.push(server.served(RESPONSES, &input(&json!("Hello"), 2)).await["id"].clone());
    }
    let further = |id: &Value| with(input(&json!("More"), 2), json!({"previous_response_id": id}));
    server.served(RESPONSES, &further(&ids[7])).await;
    assert_eq!(server.refused(RESPONSES, &further(&ids[0])).await.0, "previous_response_id");
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_are_called_and_their_results_come_back() {
    let server = start().await;
    let fields =
        json!({"tools": tools(), "tool_choice": "required", "parallel_tool_calls": false, "temperature": 1});
    let request = with(input(&json!("What is the weather?"), 400), fields);
    let response = server.served(RESPONSES, &request).await;
    let call = &response["output"][0];
    assert_eq!(
        (&call["type"], &call["name"]),
        (&json!("function_call"), &json!("get_weather")),
        "{response}"
    );
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().expect("a text")).expect("JSON");
    assert!(arguments["city"].is_string());

    let result = json!([{"type": "function_call_output", "call_id": call["call_id"], "output": "Rain"}]);
    let further = json!({"previous_response_id": response["id"], "tools": tools()});
    server.served(RESPONSES, &with(input(&result, 4), further)).await;
    let items = json!([
        {"role": "user", "content": "What is the weather?"},
        {"type": "reasoning", "id": "rs", "summary": []},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "Rain"}]},
    ]);
    server.served(RESPONSES, &with(input(&items, 4), json!({"tools": tools()}))).await;

    let events = server.named_events(RESPONSES, &with(request, json!({"stream": true}))).await;
    let deltas = events.iter().filter(|event| event["type"] == "response.function_call_arguments.delta");
    let deltas: Vec<&str> = deltas.filter_map(|event| event["delta"].as_str()).collect();
    assert!(deltas.len() > 3, "{deltas:?}");
    let done =
        events.iter().find(|event| event["type"] == "response.function_call_arguments.done").expect("an end");
    assert_eq!(done["arguments"], deltas.concat());
}

/// As Codex has them: functions in a namespace, and tools that a provider's servers would run.
#[tokio::test(flavor = "multi_thread")]
async fn functions_of_a_namespace_are_called_by_its_name_and_theirs() {
    let server = start().await;
    let weather = tools()[0].clone();
    let deferred = json!({"type": "function", "name": "get_time", "defer_loading": true});
    let tools = json!([
        {"type": "web_search"}, {"type": "image_generation"}, {"type": "tool_search"}, deferred,
        {"type": "namespace", "name": "city", "description": "Cities", "tools": [weather]},
    ]);
    let chosen = json!({"type": "function", "name": "get_weather", "namespace": "city"});
    let body = with(input(&json!("Hello"), 200), json!({"tools": tools, "tool_choice": chosen}));
    let response = server.served(RESPONSES, &body).await;
    let call = &response["output"][0];
    assert_eq!([&call["type"], &call["namespace"], &call["name"]], ["function_call", "city", "get_weather"]);
    assert_eq!((&response["tool_choice"], &response["tools"][4]["name"]), (&chosen, &json!("city")));
    // To the model its name is that of both.
    let events = server.named_events(RESPONSES, &with(body.clone(), json!({"stream": true}))).await;
    let added = events.iter().find(|event| event["type"] == "response.output_item.added").unwrap();
    assert_eq!([&added["item"]["namespace"], &added["item"]["name"]], ["city", "get_weather"]);
    let mut named = weather;
    named["name"] = "city.get_weather".into();
    let both = json!([{"type": "function", "name": "get_time"}, named]);
    let chosen = json!({"type": "function", "name": "city.get_weather"});
    let plain = with(input(&json!("Hello"), 200), json!({"tools": both, "tool_choice": chosen}));
    let plain = server.served(RESPONSES, &plain).await;
    assert_eq!(plain["output"][0]["name"], "city.get_weather");
    assert_eq!(plain["output"][0]["arguments"], call["arguments"]);
    // The conversation goes on with the call as the client has it.
    let items = json!([{"role": "user", "content": "Hello"}, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}]);
    server.served(RESPONSES, &with(input(&items, 2), json!({"tools": tools}))).await;
    let mut wrong = tools.clone();
    wrong[4]["tools"][0]["name"] = "get weather".into();
    let (field, _) = server.refused(RESPONSES, &with(input(&json!("x"), 1), json!({"tools": wrong}))).await;
    assert_eq!(field, "tools[4].tools[0].name");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_follows_a_format() {
    let server = start().await;
    let schema = json!({"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
        "additionalProperties": false});
    let text = json!({"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": true}});
    let response = server.served(RESPONSES, &with(input(&json!("x"), 200), json!({"text": text}))).await;
    let text = response["output"][0]["content"][0]["text"].as_str().expect("a text");
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert!(value["x"].is_boolean());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_supported_is_refused() {
    let server = start().await;
    for (fields, part) in [
        (json!({"background": true}), "background"),
        (json!({"truncation": "some"}), "truncation"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "item 0"),
        (json!({"tools": [{"type": "mcp", "server_label": "x"}]}), "mcp"),
        (json!({"speed": 1}), "speed"),
    ] {
        let (field, message) = server.refused(RESPONSES, &with(input(&json!("x"), 1), fields)).await;
        assert!(field.contains(part) || message.contains(part), "{field}: {message}");
    }
    let tool = json!({"type": "function", "name": "f", "parameters": {"type": "array"}});
    let format = json!({"format": {"type": "json_schema", "name": "s", "schema": {"$ref": "#"}}});
    for (fields, expected) in [
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"input": []}), "input"),
        (json!({"tools": [tool]}), "tools[0].parameters"),
        (json!({"text": format}), "text.format"),
    ] {
        let (field, message) = server.refused(RESPONSES, &with(input(&json!("x"), 1), fields)).await;
        assert_eq!(field, expected, "{message}");
    }
    // As Python's SDK dumps items that it has parsed.
    let items = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "x", "parsed": null}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "parsed_arguments": {}, "async_": null},
        {"type": "function_call_output", "call_id": "c", "output": "y"},
    ]);
    server.served(RESPONSES, &json!({"input": items, "max_output_tokens": 2})).await;
    let with_search = json!({"tools": [{"type": "web_search", "search_context_size": "low"}], "include": ["reasoning.encrypted_content"],
        "client_metadata": {}, "prompt_cache_key": "k"});
    server.served(RESPONSES, &with(input(&json!("x"), 2), with_search)).await;
}
