//! Tests of structured output. The model generates random letters, so that only the grammar can enforce a format.

use super::{
    super::api::ResponseFormat,
    support::{completion, question, start, with},
};
use rstest::rstest;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// The fields of a request whose answers depend on the seed and end by themselves.
fn drawn(seed: u64, format: &Value) -> Value {
    json!({"temperature": 1, "seed": seed, "ignore_eos": false, "max_tokens": 600, "response_format": format})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reference_that_leads_back_to_itself_is_named() {
    let server = start().await;
    let schema =
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    let (field, message) = server.refused(CHAT, &with(question("x", 1), drawn(0, &format))).await;
    assert_eq!(field, "response_format");
    assert!(
        message.contains("leads back to itself") && message.contains("#/$defs/a -> #/$defs/b"),
        "{message}"
    );
    let tools =
        json!([{"type": "function", "function": {"name": "f", "parameters": schema, "strict": true}}]);
    let (field, message) = server.refused(CHAT, &with(question("x", 1), json!({"tools": tools}))).await;
    assert_eq!(field, "tools");
    assert!(message.contains("f: the reference leads back"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_follow_a_schema_whole_and_streamed() {
    let server = start().await;
    let schema = json!({
        "$defs": {"size": {"enum": ["small", "large"]}},
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "count": {"type": "integer", "minimum": 3, "maximum": 40},
            "sizes": {"type": "array", "items": {"$ref": "#/$defs/size"}, "maxItems": 3},
        },
        "required": ["name", "count", "sizes"],
        "additionalProperties": false,
    });
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": true}});
    for seed in 0..4 {
        let request = with(question("A thing", 1), drawn(seed, &format));
        let answer = server.served(CHAT, &request).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "stop");
        let text = choice["message"]["content"].as_str().expect("a text");
        let thing: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let keys: Vec<&String> = thing.as_object().expect("an object").keys().collect();
        assert_eq!(keys, ["name", "count", "sizes"]);
        assert!((3..=40).contains(&thing["count"].as_i64().expect("a number")), "{thing}");
        assert!(thing["name"].as_str().expect("a name").chars().count() <= 10, "{thing}");
        let sizes = thing["sizes"].as_array().expect("a list");
        assert!(sizes.len() <= 3 && sizes.iter().all(|size| size == "small" || size == "large"), "{thing}");
        let events = server.events(CHAT, &with(request, json!({"stream": true}))).await;
        let streamed: String =
            events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(streamed, text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_probability_of_an_excluded_token_is_a_number() {
    let server = start().await;
    let format = json!({"type": "grammar", "syntax": "regex", "definition": "[ab]{6}"});
    let fields = with(drawn(1, &format), json!({"logprobs": true, "top_logprobs": 20}));
    let answer = server.served(CHAT, &with(question("x", 1), fields)).await;
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().expect("tokens").clone();
    let tops = tokens.iter().flat_map(|token| token["top_logprobs"].as_array().expect("a list"));
    let values: Vec<f64> =
        tops.map(|top| top["logprob"].as_f64().unwrap_or_else(|| panic!("{top} has no number"))).collect();
    assert!(values.iter().any(|value| *value == -9999.0), "{values:?}");
}

#[rstest]
#[case::regex("regex", "[a-f]{4}-[0-9]{2}", |text: &str| {
    text.len() == 7 && text[..4].bytes().all(|byte| (b'a'..=b'f').contains(&byte)) && text[5..].parse::<u8>().is_ok()
})]
#[case::lark("lark", "start: word (\",\" word)*\nword: \"yes\" | \"no\"", |text: &str| {
    text.split(',').all(|word| word == "yes" || word == "no")
})]
#[tokio::test(flavor = "multi_thread")]
async fn answers_follow_a_grammar(
    #[case] syntax: &str,
    #[case] definition: &str,
    #[case] fits: fn(&str) -> bool,
) {
    let server = start().await;
    let format = json!({"type": "grammar", "syntax": syntax, "definition": definition});
    for seed in 0..4 {
        let request = with(completion("ab", 1), drawn(seed, &format));
        let answer = server.served(COMPLETIONS, &with(request, json!({"n": 2}))).await;
        for choice in answer["choices"].as_array().expect("choices") {
            let text = choice["text"].as_str().expect("a text");
            assert!(fits(text), "{text:?}");
            assert_eq!(choice["finish_reason"], "stop");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_json_object_is_json() {
    let server = start().await;
    let request = with(question("An object", 1), drawn(1, &json!({"type": "json_object"})));
    // Without a schema an object may have any length: an answer that is cut off is the start of an object.
    let answer = server.served(CHAT, &with(request, json!({"max_tokens": 40}))).await;
    let text = answer["choices"][0]["message"]["content"].as_str().expect("a text");
    assert!(text.trim_start().starts_with('{'), "{text}");
    if answer["choices"][0]["finish_reason"] == "stop" {
        assert!(serde_json::from_str::<Value>(text).expect("it is JSON").is_object());
    }
}

#[rstest]
#[case::schema(json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "no such type"}}}))]
#[case::unsatisfiable(json!({"type": "json_schema", "json_schema": {"name": "s", "schema": false}}))]
#[case::regex(json!({"type": "grammar", "syntax": "regex", "definition": "["}))]
#[case::lark(json!({"type": "grammar", "syntax": "lark", "definition": "start: nothing"}))]
#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_format_is_refused(#[case] format: Value) {
    let server = start().await;
    let request = with(completion("ab", 8), json!({"response_format": format}));
    let (field, message) = server.refused(COMPLETIONS, &request).await;
    assert_eq!(field, "response_format", "{message}");
    assert!(message.len() < 2000, "{message}");
    server.served(COMPLETIONS, &completion("ab", 1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deeply_nested_schema_is_followed() {
    let server = start().await;
    let format =
        json!({"type": "grammar", "syntax": "regex", "definition": "((a{1,1000}){1,1000}){1,1000}b"});
    let request = with(completion("ab", 8), json!({"response_format": format, "logit_bias": {"97": 100}}));
    assert_eq!(server.served(COMPLETIONS, &request).await["choices"][0]["text"], "aaaaaaaa");
}

/// A schema inside so many others.
fn nested(depth: usize) -> Value {
    (0..depth).fold(
        json!({"type": "integer"}),
        |inner, _| json!({"type": "object", "properties": {"a": inner}, "required": ["a"]}),
    )
}

#[rstest]
#[case::deep(nested(40))]
#[case::of_itself(json!({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}))]
#[case::endless(json!({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}, "$ref": "#/$defs/a"}))]
#[case::wide(json!({"enum": (0..20_000).map(|index| format!("value {index}")).collect::<Vec<_>>()}))]
#[case::many_fields(json!({"type": "object", "properties":
    (0..2_000).map(|index| (format!("field{index}"), json!({"type": "string"}))).collect::<serde_json::Map<_, _>>()}))]
#[case::long_list(json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}))]
#[case::long_text(json!({"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000}))]
#[case::pattern(json!({"type": "string", "pattern": "^((a|aa|aaa)*){1,50}b{1000}$"}))]
#[case::product(json!({"allOf": (0..24).map(|bit| json!({"anyOf": [
    {"properties": {format!("a{bit}"): {"type": "integer"}}}, {"properties": {format!("b{bit}"): {"type": "string"}}}
]})).collect::<Vec<_>>()}))]
#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_schema_does_not_harm_the_server(#[case] schema: Value) {
    let server = start().await;
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    let request = with(completion("ab", 8), json!({"response_format": format}));
    // The schema is followed or refused by name, or its answer is aborted, within the time limit.
    let (status, body) = server.post(COMPLETIONS, &request).await;
    match status {
        200 => assert!(body["choices"][0]["text"].is_string(), "{body}"),
        _ => assert_eq!(status, 400, "{body}"),
    }
    assert_eq!(server.metric("dsrun_panics_total").await, 0.0);
    server.reaches("dsrun_kv_blocks_in_use", 0.0).await;
    server.served(COMPLETIONS, &completion("a", 1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_are_those_of_the_text() {
    let server = start().await;
    let request = with(question("Hello", 12), json!({"logprobs": true, "top_logprobs": 4}));
    let answer = server.served(CHAT, &request).await;
    let choice = &answer["choices"][0];
    let tokens = choice["logprobs"]["content"].as_array().expect("tokens");
    assert_eq!(tokens.len(), 12);
    let text: String = tokens.iter().filter_map(|token| token["token"].as_str()).collect();
    assert_eq!(choice["message"]["content"], text);
    for token in tokens {
        let top = token["top_logprobs"].as_array().expect("the likeliest");
        assert_eq!(top.len(), 4);
        assert_eq!(top[0]["token"], token["token"], "greedy takes the likeliest");
        let logprobs: Vec<f64> = top.iter().filter_map(|other| other["logprob"].as_f64()).collect();
        assert!(logprobs.is_sorted_by(|a, b| a >= b) && logprobs[0] <= 0.0, "{logprobs:?}");
        assert_eq!(token["logprob"], logprobs[0]);
    }
    let events = server.events(CHAT, &with(request, json!({"stream": true}))).await;
    let streamed: Vec<&Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .collect();
    assert_eq!(streamed, tokens.iter().collect::<Vec<_>>());

    let answer = server.served(COMPLETIONS, &with(completion("ab", 6), json!({"logprobs": 2}))).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    for field in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[field].as_array().map(Vec::len), Some(6), "{field}");
    }
    assert_eq!(logprobs["text_offset"][3], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_bias_forces_its_token() {
    let server = start().await;
    let request = with(completion("ab", 5), json!({"logit_bias": {"113": 100}}));
    assert_eq!(server.served(COMPLETIONS, &request).await["choices"][0]["text"], "qqqqq");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_token_waits_for_the_minimum_length() {
    let server = start().await;
    // Token 256 ends answers and is the likeliest token.
    let fields = json!({"logit_bias": {"256": 100}, "ignore_eos": false});
    let ended = server.served(COMPLETIONS, &with(completion("ab", 9), fields.clone())).await;
    assert_eq!(ended["usage"]["completion_tokens"], 1);
    assert_eq!(
        (&ended["choices"][0]["text"], &ended["choices"][0]["finish_reason"]),
        (&json!(""), &json!("stop"))
    );
    let longer = with(with(completion("ab", 9), fields), json!({"min_tokens": 5}));
    assert_eq!(server.served(COMPLETIONS, &longer).await["usage"]["completion_tokens"], 6);
}

/// Rules that each use the next one, of which the compiler enters all before it leaves any.
fn chain(rules: usize) -> String {
    let rule = |index: usize| format!("r{index}: \"a\" r{} | \"b\"\n", (index + 1) % rules);
    format!("start: r0\n{}", (0..rules).map(rule).collect::<String>())
}

/// Properties that may all be absent.
fn properties(count: usize) -> serde_json::Map<String, Value> {
    (0..count).map(|index| (format!("p{index}"), json!({}))).collect()
}

#[rstest]
#[case::rules(json!({"type": "grammar", "syntax": "lark", "definition": chain(9_000)}))]
#[case::more_rules(json!({"type": "grammar", "syntax": "lark", "definition": chain(30_000)}))]
#[case::terminals(json!({"type": "grammar", "syntax": "lark", "definition":
    format!("start: T0\n{}T9000: \"a\"\n", (0..9_000).map(|index| format!("T{index}: T{} \"x\"\n", index + 1)).collect::<String>())}))]
#[case::references(json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#/$defs/a0", "$defs":
    (0..9_000).map(|index| (format!("a{index}"), json!({"type": "array", "items": {"$ref": format!("#/$defs/a{}", (index + 1) % 9_000)}})))
        .collect::<serde_json::Map<_, _>>()}}}))]
#[case::properties(json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": properties(4_900)}}}))]
#[case::more_properties(json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": properties(40_000)}}}))]
#[case::required(json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object",
    "required": (0..60_000).map(|index| format!("p{index}")).collect::<Vec<_>>()}}}))]
#[case::properties_in_a_grammar(json!({"type": "grammar", "syntax": "lark",
    "definition": format!("start: %json {}", json!({"type": "object", "properties": properties(9_900)}))}))]
#[case::long_regex(json!({"type": "grammar", "syntax": "regex", "definition": "a".repeat(1_100_000)}))]
#[case::long_schema(json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": "x".repeat(1_100_000)}}}))]
#[tokio::test(flavor = "multi_thread")]
async fn a_deep_or_long_grammar_does_not_end_the_server(#[case] format: Value) {
    let server = start().await;
    let request = with(completion("ab", 3), json!({"response_format": format}));
    let (status, body) = server.post(COMPLETIONS, &request).await;
    // It is refused, or the first token of the answer takes more than the parser's limits.
    let message = body["error"]["message"].as_str().unwrap_or_default();
    let named = body["error"]["param"] == "response_format" || message.contains("constraint on the answer");
    assert!(status == 200 || (status == 400 && named), "{status}: {body}");
    let sources = &server.app.loaded().expect("it is loaded").grammars;
    assert_eq!(sources.held(), 0, "a grammar stays behind");
    server.served(COMPLETIONS, &completion("a", 1)).await;
}

/// A large grammar takes memory once, and not for each answer that waits; more of them than fit are refused.
#[tokio::test(flavor = "multi_thread")]
async fn the_grammars_of_requests_are_bounded_together() {
    let server = start().await;
    let large = format!("({})*", (0..110_000).map(|index| format!("w{index}")).collect::<Vec<_>>().join("|"));
    let format = json!({"type": "grammar", "syntax": "regex", "definition": large});
    let loaded = server.app.loaded().expect("it is loaded");
    let format: ResponseFormat = serde_json::from_value(format).expect("a format");
    let form = format.into();
    let mut held = Vec::new();
    let refused = loop {
        match crate::serve::grammar::Grammar::of(&form, &loaded) {
            Ok(grammar) => held.push(grammar),
            Err(error) => break error,
        }
        assert!(held.len() < 100, "there is no bound");
    };
    assert_eq!((refused.status().as_u16(), held.len() > 1), (429, true), "{refused:?}");
    let answers: Vec<_> = held.iter().flatten().map(crate::serve::grammar::Grammar::constraint).collect();
    drop(held);
    assert!(loaded.grammars.held() > 0, "answers hold their grammar");
    drop(answers);
    assert_eq!(loaded.grammars.held(), 0);
}
