//! Tests of required tool calls. The parsing of calls that a model makes by itself is tested in `tools`.

use super::support::{Setup, question, start, start_with, with};
use crate::serve::{
    api::chat::{Function, Tool},
    grammar::Grammar,
    tools::{Otherwise, ToolFormat},
};
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

/// The marks of DeepSeek's calls, and the arguments of one.
const BEGIN: &str = "<｜tool▁calls▁begin｜>";
const CALL: &str = "<｜tool▁call▁begin｜>";
const SEP: &str = "<｜tool▁sep｜>";
const DONE: &str = "<｜tool▁call▁end｜>";
const END: &str = "<｜tool▁calls▁end｜>";
const ROME: &str = "{\"city\":\"Rome\",\"unit\":\"C\"}";
const PLAIN_DEEPSEEK: ToolFormat = ToolFormat::DeepSeek { fenced: false };
const FENCED_DEEPSEEK: ToolFormat = ToolFormat::DeepSeek { fenced: true };

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
        // The first piece names the function, the others have parts of its arguments.
        assert!(deltas.len() > 3, "{deltas:?}");
        assert_eq!(
            (&deltas[0]["type"], &deltas[0]["function"]["name"]),
            (&json!("function"), &json!("get_weather"))
        );
        assert!(deltas[0]["id"].is_string());
        assert!(
            deltas[1..]
                .iter()
                .all(|delta| delta.get("id").is_none() && delta["function"].get("name").is_none())
        );
        assert!(deltas.iter().all(|delta| delta["index"] == 0));
        let arguments = deltas.iter().filter_map(|delta| delta["function"]["arguments"].as_str());
        assert_eq!(arguments.collect::<String>(), calls[0]["function"]["arguments"]);
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
async fn a_call_that_a_stop_string_cuts_off_is_none() {
    let server = start().await;
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    let request = with(required(&named, 0), json!({"stop": ["city"]}));
    let answer = server.served(CHAT, &request).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    let events = server.events(CHAT, &with(request, json!({"stream": true}))).await;
    assert_eq!(events.last().expect("an event")["choices"][0]["finish_reason"], "stop");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_required_call_that_the_limit_cuts_off_is_no_text() {
    let server = start().await;
    for max_tokens in 1..12 {
        let request = with(required(&json!("required"), 1), json!({"max_tokens": max_tokens}));
        let answer = server.served(CHAT, &request).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "length", "{choice}");
        assert!([json!(null), json!("")].contains(&choice["message"]["content"]), "{choice}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn arguments_are_objects() {
    let server = start().await;
    for parameters in [json!({"type": "array"}), json!({"type": "string"}), json!("x"), json!(5), json!([1])]
    {
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
        let (field, _) = server.refused(CHAT, &with(question("x", 4), json!({"tools": tools}))).await;
        assert_eq!(field, "tools[0].function.parameters", "{parameters}");
    }
    // Of several types the others are left out.
    let nullable = json!({"type": ["null", "object"], "properties": {}, "additionalProperties": false});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": nullable}});
    let fields = json!({"tools": [tool], "tool_choice": "required"});
    let answer = server.served(CHAT, &with(question("x", 60), fields)).await;
    let arguments = &answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"];
    assert_eq!(serde_json::from_str::<Value>(arguments.as_str().unwrap()).unwrap(), json!({}), "{answer}");
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
async fn strict_tools_leave_text_free() {
    let server = start().await;
    let mut strict = tools();
    strict[0]["function"]["strict"] = json!(true);
    let plain = server.served(CHAT, &with(question("x", 20), json!({"tools": tools()}))).await;
    let answer = server.served(CHAT, &with(question("x", 20), json!({"tools": strict}))).await;
    assert_eq!(answer["choices"][0]["message"], plain["choices"][0]["message"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn from_the_beginning_of_a_call_on_only_a_call_may_follow() {
    let server = start().await;
    let loaded = server.app.ready().expect("it is loaded");
    let tools: Vec<Tool> = serde_json::from_value(tools()).expect("tools");
    let functions: Vec<&Function> = tools.iter().map(|Tool::Function { function }| function).collect();
    let weather = |key: &str, unit: &str| {
        format!("{{\"name\": \"get_weather\", \"{key}\": {{\"city\":\"x\",\"unit\":\"{unit}\"}}}}")
    };
    let hermes = |unit: &str| format!("<tool_call>\n{}\n</tool_call>", weather("arguments", unit));
    let cases = [
        (ToolFormat::Hermes, "Hi <b> <tool".to_owned(), true),
        (ToolFormat::Hermes, format!("Let me see.\n{}", hermes("C")), true),
        (ToolFormat::Hermes, format!("{}\n{} Done.", hermes("C"), hermes("F")), true),
        (ToolFormat::Hermes, format!("Let me see.\n{}", hermes("K")), false),
        (ToolFormat::Hermes, "Hi <tool_call> is a mark".to_owned(), false),
        (ToolFormat::Json, "Hi {\"answer\": 4}".to_owned(), true),
        (ToolFormat::Json, weather("parameters", "C"), true),
        (ToolFormat::Json, "{\"answer\": 4}".to_owned(), false),
        (ToolFormat::List, "See [1]".to_owned(), true),
        (ToolFormat::List, format!("[{}]", weather("arguments", "F")), true),
        (ToolFormat::List, "[1]".to_owned(), false),
        (ToolFormat::Mistral, "See [TOOL".to_owned(), true),
        (
            ToolFormat::Mistral,
            format!("I look.[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]get_time[ARGS]{{}}"),
            true,
        ),
        (ToolFormat::Mistral, "[TOOL_CALLS]get_weather[ARGS]{\"city\":1".to_owned(), false),
        (ToolFormat::Mistral, "[TOOL_CALLS]get_rain".to_owned(), false),
        (
            PLAIN_DEEPSEEK,
            format!("I look.{BEGIN}{CALL}get_weather{SEP}{ROME}{DONE}\n{CALL}get_time{SEP}{{}}{DONE}{END}"),
            true,
        ),
        (PLAIN_DEEPSEEK, format!("{BEGIN}{CALL}get_weather{SEP}[1]"), false),
        (
            FENCED_DEEPSEEK,
            format!("{BEGIN}{CALL}function{SEP}get_weather\n```json\n{ROME}\n```{DONE}{END}"),
            true,
        ),
        (FENCED_DEEPSEEK, format!("{BEGIN}{CALL}get_weather"), false),
        (ToolFormat::Pythonic, "See [1]".to_owned(), true),
        (ToolFormat::Pythonic, "[get_weather(city=\"x\", unit=\"C\"), get_time()]".to_owned(), true),
        (ToolFormat::Pythonic, "[get_weather(city=\"x\")".to_owned(), false),
        (ToolFormat::Pythonic, "[get_weather(city=\"x\", unit=\"K\"".to_owned(), false),
    ];
    for (format, text, allowed) in cases {
        let grammar =
            format.grammar(&functions, true, &Otherwise::Text, loaded.tokenizer().expect("a tokenizer"));
        let grammar = Grammar::lark(grammar, &loaded, "tools").expect("a grammar");
        let mut constraint = grammar.constraint();
        // The model has a token for every byte.
        let follows = text.bytes().all(|byte| {
            let mut mask = vec![0; loaded.engine.limits().vocabulary.div_ceil(32)];
            constraint.allow(&mut mask).expect("the grammar goes on");
            let fits = mask[usize::from(byte) / 32] >> (byte % 32) & 1 == 1;
            fits && constraint.accept(byte.into()).is_ok()
        });
        assert_eq!(follows, allowed, "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_and_a_response_format_give_calls_or_that_format() {
    let server = start().await;
    let schema = json!({"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
        "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    let mut strict = tools();
    strict[0]["function"]["strict"] = json!(true);
    strict[1]["function"]["strict"] = json!(true);
    for seed in 0..4 {
        let fields = json!({"tools": strict, "response_format": format, "temperature": 1, "seed": seed,
            "max_tokens": 600, "ignore_eos": false, "parallel_tool_calls": false});
        let answer = server.served(CHAT, &with(question("x", 1), fields)).await;
        let choice = &answer["choices"][0];
        if choice["finish_reason"] == "tool_calls" {
            continue;
        }
        let text = choice["message"]["content"].as_str().expect("a text");
        let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert!(value["x"].is_boolean(), "{value}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_allowed_tools_are_called() {
    let server = start().await;
    let only_time = json!([{"type": "function", "function": {"name": "get_time"}}]);
    let choice = json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": only_time}});
    for seed in 0..3 {
        let answer = server.served(CHAT, &required(&choice, seed)).await;
        let calls = answer["choices"][0]["message"]["tool_calls"].as_array().expect("calls").clone();
        assert!(!calls.is_empty() && calls.iter().all(|call| check(call) == "get_time"), "{calls:?}");
    }
}

/// A template without tools, which refuses system messages and turns that do not alternate.
const PLAIN: &str = "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
    {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
    {{ message.role }}: {{ message.content }}\n{% endfor %}assistant:";

#[tokio::test(flavor = "multi_thread")]
async fn a_template_without_tools_gets_them_described() {
    let server = start_with(Setup { template: Some(PLAIN), ..Setup::default() }).await;
    let answer = server.served(CHAT, &required(&json!("required"), 1)).await;
    let message = &answer["choices"][0]["message"];
    let calls = message["tool_calls"].as_array().expect("calls").clone();
    assert!(!calls.is_empty());
    calls.iter().map(check).for_each(drop);
    let plain = server.served(CHAT, &question("What is the weather?", 1)).await;
    let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().expect("a number");
    assert!(tokens(&answer) > tokens(&plain) + 300, "the prompt describes the tools");
    // The calls and their results can be sent back.
    let mut messages = vec![json!({"role": "user", "content": "What is the weather?"}), message.clone()];
    messages.extend(
        calls.iter().map(|call| json!({"role": "tool", "tool_call_id": call["id"], "content": "Rain"})),
    );
    let further = with(question("", 4), json!({"messages": messages, "tools": tools()}));
    server.served(CHAT, &further).await;
}

/// The control tokens of gpt-oss, in the order of their ids from 259 on.
const HARMONY: &[&str] =
    &["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"];
const HARMONY_TEMPLATE: &str = "{# <|channel|> #}{% for message in messages %}<|start|>{{ message.role }}<|message|>\
    {{ message.thinking }}{{ message.content }}<|end|>{% endfor %}<|start|>assistant";

/// Models whose marks are control tokens, which are no text elsewhere.
#[rstest::rstest]
#[case::mistral(&["[TOOL_CALLS]", "[ARGS]"], "{# tools [TOOL_CALLS] [ARGS] #}{{ messages[0].content }}")]
#[case::mistral_plain(&[], "{# tools [TOOL_CALLS] [ARGS] #}{{ messages[0].content }}")]
#[case::deepseek(&[BEGIN, CALL, SEP, DONE, END], "{# tools <｜tool▁call▁begin｜> #}{{ messages[0].content }}")]
#[case::deepseek_v3(&[BEGIN, CALL], "{# tools <｜tool▁call▁begin｜> ```json #}{{ messages[0].content }}")]
#[case::pythonic(&[], "{# tools [func_name1(x=1)] #}{{ messages[0].content }}")]
#[case::harmony(HARMONY, HARMONY_TEMPLATE)]
#[tokio::test(flavor = "multi_thread")]
async fn required_calls_of_every_family_are_called_and_streamed(
    #[case] marks: &'static [&'static str],
    #[case] template: &'static str,
) {
    let server = start_with(Setup { marks, template: Some(template), ..Setup::default() }).await;
    for seed in 0..3 {
        // Without the letter `a`, and a message that follows it at once, a call is on the first channel.
        let bias = if marks == HARMONY { json!({"97": -100, "261": -100}) } else { json!({}) };
        let fields = json!({"logit_bias": bias, "parallel_tool_calls": false});
        let request = with(required(&json!("required"), seed), fields);
        let answer = server.served(CHAT, &request).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        let calls = choice["message"]["tool_calls"].as_array().expect("calls");
        assert_eq!(calls.len(), 1, "{choice}");
        let name = check(&calls[0]);
        assert_eq!(choice["message"]["content"], Value::Null, "{choice}");
        let events = server.events(CHAT, &with(request, json!({"stream": true}))).await;
        let deltas = || events.iter().filter_map(|event| event.pointer("/choices/0/delta/tool_calls/0"));
        let part = |field: &str| -> String {
            deltas().filter_map(|delta| delta["function"][field].as_str()).collect()
        };
        assert_eq!(
            (part("name"), part("arguments")),
            (name, calls[0]["function"]["arguments"].as_str().expect("a text").to_owned())
        );
        if calls[0]["function"]["name"] == "get_weather" {
            assert!(deltas().count() > 2, "{events:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_on_channels_have_reasoning_and_text() {
    let setup = || Setup { marks: HARMONY, template: Some(HARMONY_TEMPLATE), ..Setup::default() };
    let server = start_with(setup()).await;
    // A form is that of the answer, after reasoning.
    let format = json!({"type": "grammar", "syntax": "regex", "definition": "yes|no"});
    for seed in 0..3 {
        // Reasoning ends soon: the control token is likely.
        let fields = json!({"response_format": format, "temperature": 1, "seed": seed, "max_tokens": 600,
            "ignore_eos": false, "logit_bias": {"102": 1, "262": 9}});
        let answer = server.served(CHAT, &with(question("x", 1), fields.clone())).await;
        let message = &answer["choices"][0]["message"];
        let text = message["content"].as_str().expect("a text");
        assert!(text.ends_with("yes") || text.ends_with("no"), "{message}");
        assert!(!text.contains("<|"), "{message}");
        let events =
            server.events(CHAT, &with(with(question("x", 1), fields), json!({"stream": true}))).await;
        let part = |field: &str| -> String {
            events.iter().filter_map(|event| event["choices"][0]["delta"][field].as_str()).collect()
        };
        assert_eq!(part("content"), text);
        assert_eq!(part("reasoning_content"), message["reasoning_content"].as_str().unwrap_or_default());
    }
    // Reasoning is given back to the template under its name.
    let tokens = async |reasoning: &str| {
        let messages = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning": reasoning}]);
        let answer = server.served(CHAT, &with(question("", 1), json!({"messages": messages}))).await;
        answer["usage"]["prompt_tokens"].as_u64().expect("a number")
    };
    assert_eq!(tokens("123456").await, tokens("1").await + 5);
}
