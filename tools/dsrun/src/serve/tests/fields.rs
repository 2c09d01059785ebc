//! Tests of fields that clients send: `null`, answers sent back, fields without effect, and those of vLLM.

use super::support::{MODEL, Setup, completion, question, start, start_with, with};
use serde_json::{Map, Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// The fields of a request in `/openapi.json` that need not be given.
async fn optional_fields(server: &super::support::Running, schema: &str) -> Vec<String> {
    let document = server.client.json("/openapi.json").await.expect("a document");
    let schema = &document["components"]["schemas"][schema];
    let required = schema["required"].as_array().expect("a list").clone();
    let fields = schema["properties"].as_object().expect("an object").keys().cloned();
    fields.filter(|field| !required.contains(&json!(field))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn null_means_absent() {
    let server = start().await;
    for (path, schema, request) in [
        (CHAT, "ChatRequest", question("Hello", 4)),
        (COMPLETIONS, "CompletionRequest", completion("ab", 4)),
        ("/v1/embeddings", "EmbeddingRequest", json!({"model": MODEL, "input": "a"})),
    ] {
        let fields = optional_fields(&server, schema).await;
        let given = request.as_object().expect("an object").clone();
        let nulls: Map<String, Value> = fields
            .into_iter()
            .filter(|field| !given.contains_key(field))
            .map(|field| (field, Value::Null))
            .collect();
        assert!(nulls.len() > 2, "{nulls:?}");
        let plain = server.served(path, &request).await;
        let with_nulls = server.served(path, &with(request, Value::Object(nulls))).await;
        for part in ["choices", "data"] {
            assert_eq!(plain[part], with_nulls[part], "{path}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_as_clients_dump_it_can_be_sent_back() {
    let server = start().await;
    let answers = [
        // OpenAI's SDK.
        json!({"role": "assistant", "content": "Hi", "refusal": null, "annotations": [], "audio": null,
            "function_call": null, "tool_calls": null, "parsed": null}),
        // LiteLLM.
        json!({"role": "assistant", "content": "Hi", "tool_calls": null, "function_call": null,
            "provider_specific_fields": {"refusal": null}, "annotations": null, "thinking_blocks": []}),
        // vLLM and reasoning models.
        json!({"role": "assistant", "content": "Hi", "reasoning": "hm", "reasoning_content": null}),
        json!({"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "index": 0,
            "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}]}),
        json!({"role": "assistant", "content": null, "tool_calls": [{"id": "c",
            "function": {"name": "f", "arguments": null}}]}),
        json!({"role": "assistant", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}},
            {"type": "refusal", "refusal": "no"}]}),
        // The Agents SDK for JavaScript, which has all of the answer in its text.
        json!({"role": "assistant", "content": [{"type": "text", "text": "Hi", "role": "assistant", "refusal": null,
            "annotations": [], "audio": null, "function_call": null, "tool_calls": [], "reasoning_content": "hm"}]}),
        // An answer that ended before it had any text.
        json!({"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": []}),
    ];
    for answer in answers {
        let messages =
            json!([{"role": "user", "content": "Hello"}, answer, {"role": "user", "content": "More"}]);
        server.served(CHAT, &with(question("", 2), json!({"messages": messages}))).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_without_effect_are_accepted_unless_fields_are_strict() {
    let fields = json!({
        "store": true,
        "metadata": {"run": "1"},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "verbosity": "low",
        "modalities": ["text"],
        "best_of": 1,
        "cache_prompt": true,
        "skip_special_tokens": true,
        "spaces_between_special_tokens": true,
        "user": "u",
        "reasoning_effort": "low",
    });
    let server = start().await;
    let plain = server.served(CHAT, &question("Hello", 4)).await;
    let with_fields = with(question("Hello", 4), fields.clone());
    assert_eq!(server.served(CHAT, &with_fields).await["choices"], plain["choices"]);
    let options = json!({"stream": true, "stream_options": {"include_usage": true, "include_obfuscation": false,
        "continuous_usage_stats": false}});
    assert!(!server.events(CHAT, &with(question("Hello", 4), options)).await.is_empty());
    server.served(CHAT, &with(question("x", 1), json!({"top_logprobs": 0}))).await;
    assert_eq!(server.refused(CHAT, &with(question("x", 1), json!({"best_of": 2}))).await.0, "best_of");
    let shown = with(question("x", 1), json!({"skip_special_tokens": false}));
    assert_eq!(server.refused(CHAT, &shown).await.0, "skip_special_tokens");

    let mut setup = Setup::default();
    setup.settings.strict_fields = Some(true);
    let strict = start_with(setup).await;
    for (name, value) in fields.as_object().expect("an object") {
        let request = with(question("Hello", 4), json!({name: value}));
        assert_eq!(strict.refused(CHAT, &request).await.0, *name);
    }
    strict.served(CHAT, &question("Hello", 4)).await;
    let effort = json!({"model": MODEL, "input": "Hello", "reasoning": {"effort": "low"}});
    assert_eq!(strict.refused("/v1/responses", &effort).await.0, "reasoning.effort");
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_that_are_not_known_may_be_null_and_the_model_may_be_left_out() {
    let server = start().await;
    let plain = server.served(CHAT, &question("Hello", 4)).await;
    let fields = json!({"model": null, "functions": null, "prediction": null, "web_search_options": null});
    assert_eq!(server.served(CHAT, &with(question("Hello", 4), fields)).await["choices"], plain["choices"]);
    let mut request = question("Hello", 4);
    let message = &mut request["messages"][0];
    message["weight"] = Value::Null;
    assert_eq!(server.served(CHAT, &request).await["choices"], plain["choices"]);
    assert_eq!(server.refused(CHAT, &with(request, json!({"functions": []}))).await.0, "functions");
    for (path, request) in
        [(COMPLETIONS, json!({"prompt": "a", "max_tokens": 1})), ("/v1/embeddings", json!({"input": "a"}))]
    {
        assert_eq!(server.served(path, &request).await["model"], MODEL);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_assistants_message_goes_on_where_it_ends() {
    let server = start().await;
    let message = |role: &str, text: &str| json!({"role": role, "content": text});
    let messages = json!([message("user", "Count"), message("assistant", "one two<|im_end|>")]);
    let tokens = |fields: Value| {
        let request = with(json!({"messages": messages}), fields);
        let server = &server;
        async move { server.served("/tokenize", &request).await["tokens"].clone() }
    };
    let text = |tokens: Value| {
        let server = &server;
        async move { server.served("/detokenize", &json!({"tokens": tokens})).await["prompt"].clone() }
    };
    let continued = tokens(json!({"continue_final_message": true})).await;
    assert_eq!(
        text(continued.clone()).await,
        "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\none two<|im_end|>"
    );
    // The mark in the message is text, so that the message has not ended.
    assert_ne!(continued.as_array().and_then(|tokens| tokens.last()), Some(&json!(256)));
    let whole = tokens(json!({"add_generation_prompt": false})).await;
    assert_eq!(
        text(whole).await,
        "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\none two<|im_end|><|im_end|>\n"
    );
    // The answer is the one to the same tokens as a prompt.
    let limits = json!({"max_tokens": 6, "temperature": 0, "ignore_eos": true});
    let prompt = with(json!({"prompt": continued}), limits.clone());
    let expected = server.served(COMPLETIONS, &prompt).await["choices"][0]["text"].clone();
    let request = with(json!({"messages": messages, "continue_final_message": true}), limits);
    let answer = server.served(CHAT, &request).await;
    assert_eq!(answer["choices"][0]["message"]["content"], expected);
    // So it is in Anthropic's API.
    let request = json!({"model": MODEL, "max_tokens": 6, "temperature": 0, "messages": messages});
    let anthropic = server.served("/v1/messages", &request).await;
    assert!(
        expected
            .as_str()
            .is_some_and(|text| text.starts_with(anthropic["content"][0]["text"].as_str().expect("a text"))),
        "{anthropic}"
    );
    let used = |name: &str| anthropic["usage"][name].as_u64().unwrap_or(0);
    let read = used("input_tokens") + used("cache_read_input_tokens");
    assert_eq!(Some(read), prompt["prompt"].as_array().map(|tokens| tokens.len() as u64));

    let both = json!({"continue_final_message": true, "add_generation_prompt": true});
    assert_eq!(server.refused(CHAT, &with(request.clone(), both)).await.0, "continue_final_message");
    let of_user = with(question("a", 1), json!({"continue_final_message": true}));
    assert_eq!(server.refused(CHAT, &of_user).await.0, "continue_final_message");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_other_servers_are_understood() {
    let server = start().await;
    assert_eq!(
        server.client.json("/version").await.expect("a version")["version"],
        env!("CARGO_PKG_VERSION")
    );
    let model = &server.client.json("/v1/models").await.expect("a list")["data"][0];
    assert_eq!((&model["root"], &model["parent"]), (&json!(MODEL), &Value::Null));
    let tokens = server.served("/tokenize", &json!({"prompt": "a b", "return_token_strs": true})).await;
    assert_eq!(tokens["token_strs"], json!(["a", "\u{120}", "b"]));
    let penalty = |name: &str| with(completion("aaaa", 8), json!({name: 1.9}));
    let ours = server.served(COMPLETIONS, &penalty("repetition_penalty")).await;
    assert_eq!(server.served(COMPLETIONS, &penalty("repeat_penalty")).await["choices"], ours["choices"]);
    let fields = json!({"prompt": "a", "n_predict": 2, "cache_prompt": true, "ignore_eos": true});
    assert_eq!(server.served(COMPLETIONS, &fields).await["usage"]["completion_tokens"], 2);
    for (path, hint) in [
        ("/chat/completions", "/v1/chat/completions: the base URL of OpenAI's clients ends in /v1"),
        ("/v1/v1/messages", "/v1/messages: leave /v1 out of the base URL"),
        ("/v1/chat/completions/", "/v1/chat/completions, without a slash"),
        ("/nothing", "/openapi.json"),
        ("/v1/nothing", "/openapi.json"),
    ] {
        let (_, message) = server.refused(path, &json!({})).await;
        assert!(message.contains(hint), "{message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_tokens_end_an_answer_before_them() {
    let server = start().await;
    let ids = with(completion("ab", 12), json!({"return_token_ids": true}));
    let whole = server.served(COMPLETIONS, &ids).await;
    let tokens: Vec<u64> = whole["choices"][0]["token_ids"]
        .as_array()
        .expect("tokens")
        .iter()
        .filter_map(Value::as_u64)
        .collect();
    let stop = tokens[6];
    let expected = tokens.iter().position(|token| *token == stop).expect("it is there");
    let answer = server.served(COMPLETIONS, &with(ids, json!({"stop_token_ids": [stop]}))).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["choices"][0]["token_ids"], json!(tokens[..expected]));
    // Tokens of the model are a character each.
    let text = |answer: &Value| answer["choices"][0]["text"].as_str().expect("text").to_owned();
    assert_eq!(text(&answer), text(&whole)[..expected]);
}

/// Whether a text has a form.
type Follows<'a> = &'a dyn Fn(&str) -> bool;

#[tokio::test(flavor = "multi_thread")]
async fn the_form_of_an_answer_may_be_given_as_in_vllm() {
    let server = start().await;
    let schema = json!({"type": "object", "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["x"], "additionalProperties": false});
    let is_choice = |text: &str| text == "yes \"no\"" || text == "maybe";
    let is_number = |text: &str| {
        let inner = text.strip_prefix('(').and_then(|rest| rest.strip_suffix(')'));
        inner.and_then(|number| number.parse().ok()).is_some_and(|number: u32| number < 3000)
    };
    let is_object = |text: &str| {
        serde_json::from_str::<Value>(text)
            .is_ok_and(|value| value["x"].as_i64().is_some_and(|x| (0..10).contains(&x)))
    };
    let is_letters = |text: &str| text.len() == 3 && text.bytes().all(|byte| (b'a'..=b'c').contains(&byte));
    let cases: [(Value, Follows); 9] = [
        (json!({"structured_outputs": {"choice": ["yes \"no\"", "maybe"]}}), &is_choice),
        (json!({"guided_choice": ["yes \"no\"", "maybe"]}), &is_choice),
        (json!({"guided_choice": (0..3000).map(|n| format!("({n})")).collect::<Vec<_>>()}), &is_number),
        (json!({"structured_outputs": {"json": schema}}), &is_object),
        (json!({"guided_json": schema.to_string()}), &is_object),
        (json!({"structured_outputs": {"regex": "[a-c]{3}"}}), &is_letters),
        (json!({"guided_regex": "[a-c]{3}", "response_format": {"type": "text"}}), &is_letters),
        (json!({"structured_outputs": {"grammar": "start: /[a-c]{3}/"}}), &is_letters),
        (json!({"guided_grammar": "start: /[a-c]{3}/"}), &is_letters),
    ];
    for (fields, follows) in cases {
        let request = with(question("x", 100), json!({"temperature": 1, "seed": 1, "ignore_eos": false}));
        let answer = server.served(CHAT, &with(request, fields.clone())).await;
        let text = answer["choices"][0]["message"]["content"].as_str().expect("a text");
        assert!(follows(text), "{fields}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_counts_cached_tokens_and_answers_have_a_fingerprint() {
    let server = start().await;
    let request = completion(&"a".repeat(200), 2);
    let first = server.served(COMPLETIONS, &request).await;
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let again = server.served(COMPLETIONS, &with(request, json!({"n": 2}))).await;
    // Whole blocks of 16 tokens, without the last token.
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 192);
    assert_eq!(first["system_fingerprint"], again["system_fingerprint"]);
    assert!(first["system_fingerprint"].as_str().is_some_and(|print| print.starts_with("fp_")));
    let health = server.client.json("/health").await.expect("it is healthy");
    assert_eq!(health["status"], "ready");
}
