//! Tools for models whose chat template knows none: the system message describes them, and calls and results are written as text.

use crate::serve::api::chat::Tool;
use dsrun_models::chat::Message;
use serde_json::{Value, json};

/// Describes tools in the system message of a conversation, which is added if there is none.
pub(super) fn describe(tools: &[Tool], messages: &mut Vec<Message>) {
    let mut text = "You can call functions. Their descriptions are:\n<tools>\n".to_owned();
    for tool in tools {
        // Tools consist of strings and JSON, so they can always be serialised.
        text.push_str(&json!(tool).to_string());
        text.push('\n');
    }
    text.push_str(
        "</tools>\nTo call a function, answer with its name and its arguments as JSON in this form, once for each call:\n\
         <tool_call>\n{\"name\": \"the name\", \"arguments\": {}}\n</tool_call>\n\
         The result of a call comes back in this form:\n<tool_response>\nthe result\n</tool_response>\n\
         Call functions only where they help; answer in text otherwise.",
    );
    match messages.first_mut().filter(|message| message.role == "system") {
        Some(system) => append(system, &text),
        None => messages.insert(0, Message::new("system", text)),
    }
}

/// Writes calls and their results as text.
pub(super) fn write_calls(messages: &mut Vec<Message>) {
    let mut written: Vec<Message> = Vec::new();
    let mut after_result = false;
    for mut message in messages.drain(..) {
        if let Some(Value::Array(calls)) = message.other.shift_remove("tool_calls") {
            for call in calls {
                let call =
                    json!({"name": call["function"]["name"], "arguments": call["function"]["arguments"]});
                append(&mut message, &format!("<tool_call>\n{call}\n</tool_call>"));
            }
        }
        let result = message.role == "tool";
        if result {
            let content = message.content.as_ref().and_then(Value::as_str).unwrap_or_default();
            let text = format!("<tool_response>\n{content}\n</tool_response>");
            match written.last_mut().filter(|_| after_result) {
                // Results of several calls are one turn, because turns alternate in many templates.
                Some(before) => append(before, &text),
                None => written.push(Message::new("user", text)),
            }
        } else {
            written.push(message);
        }
        after_result = result;
    }
    *messages = written;
}

/// Moves the system message into the first message of the user, for templates that know no system message.
pub(super) fn without_system(messages: &[Message]) -> Option<Vec<Message>> {
    let [system, user, rest @ ..] = messages else { return None };
    if system.role != "system" || user.role != "user" {
        return None;
    }
    let mut first = system.clone();
    first.role.clone_from(&user.role);
    append(&mut first, user.content.as_ref().and_then(Value::as_str)?);
    Some([&[first], rest].concat())
}

/// Adds a paragraph to a message.
fn append(message: &mut Message, text: &str) {
    let before = message.content.as_ref().and_then(Value::as_str).unwrap_or_default();
    let between = if before.is_empty() { "" } else { "\n\n" };
    message.content = Some(format!("{before}{between}{text}").into());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(messages: &[Message]) -> Vec<(&str, &str)> {
        messages
            .iter()
            .map(|message| {
                (message.role.as_str(), message.content.as_ref().and_then(Value::as_str).unwrap_or("none"))
            })
            .collect()
    }

    #[test]
    fn calls_and_results_become_text() {
        let mut messages: Vec<Message> = serde_json::from_value(json!([
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
            ]},
            {"role": "tool", "content": "one", "tool_call_id": "1"},
            {"role": "tool", "content": "two", "tool_call_id": "2"},
            {"role": "assistant", "content": "done"},
        ]))
        .expect("messages");
        write_calls(&mut messages);
        assert_eq!(
            texts(&messages),
            [
                ("user", "q"),
                (
                    "assistant",
                    "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"x\":1}}\n</tool_call>\n\n\
                     <tool_call>\n{\"name\":\"g\",\"arguments\":{}}\n</tool_call>"
                ),
                ("user", "<tool_response>\none\n</tool_response>\n\n<tool_response>\ntwo\n</tool_response>"),
                ("assistant", "done"),
            ]
        );
    }

    #[test]
    fn tools_are_described_once_in_the_first_message() {
        let tools: Vec<Tool> =
            serde_json::from_value(json!([{"type": "function", "function": {"name": "f"}}])).expect("tools");
        let mut messages = vec![Message::new("system", "Be brief."), Message::new("user", "q")];
        describe(&tools, &mut messages);
        let (role, text) = texts(&messages)[0];
        assert!(
            role == "system" && text.starts_with("Be brief.\n\nYou can call") && text.contains("\"f\""),
            "{text}"
        );
        let merged = without_system(&messages).expect("there is a system message");
        assert!(texts(&merged)[0].0 == "user" && texts(&merged)[0].1.ends_with("\n\nq"));
        let mut alone = vec![Message::new("user", "q")];
        describe(&tools, &mut alone);
        assert_eq!(alone.len(), 2);
    }
}
