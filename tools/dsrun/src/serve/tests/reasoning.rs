//! Tests of reasoning: it is split from the answer, and comes before what a form or a tool constrains.

use super::support::{Setup, question, start, start_with, with};
use crate::serve::{
    api::chat::{Function, Tool},
    grammar::Grammar,
    reasoning::Marks,
    tools::{Otherwise, ToolFormat},
};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// A template that opens reasoning, as those of some reasoning models do.
const REASONS: &str = "{% for message in messages %}{{ message.content }}{% endfor %}<think>\n{# </think> #}";

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_is_split_from_the_answer() {
    let server = start_with(Setup { template: Some(REASONS), ..Setup::default() }).await;
    let answer = server.served(CHAT, &question("x", 30)).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], "");
    let reasoning = message["reasoning_content"].as_str().expect("the reasoning has no end");
    let events = server.events(CHAT, &with(question("x", 30), json!({"stream": true}))).await;
    let streamed: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["reasoning_content"].as_str())
        .collect();
    assert_eq!(streamed, reasoning);
    assert!(
        start().await.served(CHAT, &question("x", 3)).await["choices"][0]["message"]
            .get("reasoning_content")
            .is_none()
    );
}

/// The token that closes reasoning, in a model that has one for it.
const CLOSE: u32 = 259;

/// A form whose answers are short.
fn form() -> Value {
    let schema = json!({"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]});
    json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_form_is_that_of_the_answer_after_reasoning() {
    let setup = Setup { template: Some(REASONS), marks: &["</think>"], ..Setup::default() };
    let server = start_with(setup).await;
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let constrained =
        [json!({"response_format": form()}), json!({"tools": tools, "tool_choice": "required"})];
    for fields in constrained {
        // The model reasons until its limit, and about anything.
        let thinks = with(question("x", 30), fields.clone());
        let answer = server.served(CHAT, &thinks).await;
        let message = &answer["choices"][0]["message"];
        assert_eq!((&message["content"], message.get("tool_calls")), (&json!(""), None), "{message}");
        let reasoning = message["reasoning_content"].as_str().expect("it reasons");
        assert!(reasoning.len() >= 20 && !reasoning.contains('{'), "{reasoning}");
        // It ends its reasoning at once, and the answer has its form.
        let ends = json!({"logit_bias": {CLOSE.to_string(): 100}, "ignore_eos": false, "max_tokens": 300,
            "parallel_tool_calls": false});
        let answer = server.served(CHAT, &with(thinks, ends)).await;
        let message = &answer["choices"][0]["message"];
        assert_eq!(message.get("reasoning_content"), None, "{message}");
        match message["content"].as_str() {
            Some(text) => {
                let value: Value =
                    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
                assert!(value["x"].is_boolean() && value.as_object().is_some_and(|object| object.len() == 1));
            }
            None => assert_eq!(message["tool_calls"][0]["function"]["name"], "f", "{message}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_grammar_begins_where_reasoning_ends() {
    let server = start().await;
    let loaded = server.app.ready().expect("it is loaded");
    let marks = Marks { open: "<think>", close: "</think>" };
    let tools: Vec<Tool> =
        serde_json::from_value(json!([{"type": "function", "function": {"name": "f"}}])).expect("tools");
    let functions: Vec<&Function> = tools.iter().map(|Tool::Function { function }| function).collect();
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    let strict = |otherwise| {
        ToolFormat::Hermes.grammar(&functions, true, &otherwise, loaded.tokenizer().expect("there is one"))
    };
    // Whether the prompt opened reasoning, whether a call is required, the answer, and whether it is allowed.
    let cases = [
        (true, true, format!("hm <tool_call> {{</think>{call}"), true),
        (true, true, "hm</think>Hello".to_owned(), false),
        (true, false, format!("hm <tool_call> no</think>Hello {call}"), true),
        (true, false, "</think>Hello <tool_call> no".to_owned(), false),
        (false, false, format!(" <think>hm <tool_call> no</think>Hello {call}"), true),
        (false, false, format!("Hello <think> {call}"), true),
        (false, false, "Hello <think> <tool_call> no".to_owned(), false),
        (false, true, call.to_owned(), true),
        (false, true, "<think>".to_owned(), false),
    ];
    for (open, required, answer, allowed) in cases {
        let grammar = strict(if required { Otherwise::Nothing } else { Otherwise::Text });
        let grammar = Grammar::lark(grammar, &loaded, "tools").expect("a grammar");
        let grammar = grammar.after_reasoning(marks, open, &loaded).expect("there is a tokenizer");
        let mut constraint = grammar.constraint();
        let words = loaded.engine.limits().vocabulary.div_ceil(32);
        let mut masks = Vec::new();
        // The model has a token for every byte.
        let follows = answer.bytes().all(|byte| {
            let mut mask = vec![0; words];
            constraint.allow(&mut mask).expect("the grammar goes on");
            let fits = mask[usize::from(byte) / 32] >> (byte % 32) & 1 == 1;
            masks.push(mask);
            fits && constraint.clone_box().accept(byte.into()).is_ok()
                && constraint.accept(byte.into()).is_ok()
        });
        assert_eq!(follows, allowed, "{answer}");
        // Reasoning does not end the answer, and has no control tokens.
        assert!(!open || masks[0][256 / 32] == 0, "{answer}");
    }
}
