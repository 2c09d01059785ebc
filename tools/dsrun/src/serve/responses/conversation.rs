//! From the fields of OpenAI's Responses API to those of a chat completion, and from an answer back to a message.

use super::tools::{self, full_name};
use crate::serve::{
    api::{
        chat::{CallType, ChatMessage, ChatRequest, Content, FunctionCall, Role, ToolCall},
        responses::{
            InputItem, ItemContent, ItemPart, OutputItem, OutputPart, ResponsesInput, ResponsesRequest,
            TextFormat,
        },
    },
    error::ApiError,
};
use serde_json::{Map, Value, json};

/// The request as a chat completion. Its messages are the conversation without the instructions, which are not stored.
///
/// # Errors
/// Names the field that is wrong.
pub(super) fn chat_request(
    request: &ResponsesRequest,
    conversation: &[ChatMessage],
) -> Result<ChatRequest, ApiError> {
    let mut fields = Map::new();
    let mut give = |name: &str, value: Option<Value>| {
        fields.extend(value.map(|value| (name.to_owned(), value)));
    };
    give("model", request.model.clone().map(Value::from));
    give("messages", Some(json!([])));
    give("stream", request.stream.map(Value::from));
    give("max_completion_tokens", request.max_output_tokens.map(Value::from));
    give("temperature", request.temperature.map(Value::from));
    give("top_p", request.top_p.map(Value::from));
    give("cache_salt", request.cache_salt.clone().map(Value::from));
    give("parallel_tool_calls", request.parallel_tool_calls.map(Value::from));
    let effort = request.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_ref());
    give("reasoning_effort", effort.map(|effort| json!(effort)));
    let format = request.text.as_ref().and_then(|text| text.format.as_ref());
    give("response_format", format.map(response_format));
    let mut chat: ChatRequest = serde_json::from_value(Value::Object(fields))
        .map_err(|error| ApiError::malformed(error.to_string()))?;
    let instructions = request.instructions.as_ref().filter(|text| !text.is_empty());
    let instructions = instructions.map(|text| said(Role::System, text.clone()));
    chat.messages = instructions.into_iter().chain(conversation.iter().cloned()).collect();
    let shown = tools::shown(request.tools());
    chat.tools = (!shown.is_empty()).then_some(shown);
    chat.tool_choice = request.tool_choice.as_ref().map(tools::choice);
    Ok(chat)
}

fn response_format(format: &TextFormat) -> Value {
    match format {
        TextFormat::Text => json!({"type": "text"}),
        TextFormat::JsonObject => json!({"type": "json_object"}),
        TextFormat::JsonSchema { name, schema, .. } => {
            json!({"type": "json_schema", "json_schema": {"name": name, "schema": schema}})
        }
    }
}

/// Adds the items of an input to a conversation. Reasoning and calls of one turn become one message.
pub(super) fn add_input(input: &ResponsesInput, conversation: &mut Vec<ChatMessage>) {
    let items = match input {
        ResponsesInput::Text(text) => {
            conversation.push(said(Role::User, text.clone()));
            return;
        }
        ResponsesInput::Items(items) => items,
    };
    // The message of the assistant that further items of its turn are added to.
    let mut turn: Option<ChatMessage> = None;
    for item in items {
        match item {
            InputItem::Message { role: Role::Assistant, content, .. } => {
                // A second text begins a new message, and so does a text after calls.
                let done = |message: &ChatMessage| message.content.is_some() || message.tool_calls.is_some();
                if turn.as_ref().is_some_and(done) {
                    conversation.extend(turn.take());
                }
                let message = turn.get_or_insert_with(|| ChatMessage::new(Role::Assistant));
                message.content = Some(Content::Text(text(content)));
            }
            InputItem::FunctionCall { call_id, name, namespace, arguments, .. } => {
                let message = turn.get_or_insert_with(|| ChatMessage::new(Role::Assistant));
                let call = call(call_id, full_name(namespace.as_deref(), name), arguments);
                message.tool_calls.get_or_insert_default().push(call);
            }
            InputItem::Reasoning { content, summary, .. } => {
                let reasoned = content.as_ref().filter(|parts| !parts.is_empty()).or(summary.as_ref());
                let reasoned: String = reasoned.into_iter().flatten().map(ItemPart::text).collect();
                conversation.extend(turn.take().filter(is_said));
                if !reasoned.is_empty() {
                    let message = ChatMessage::new(Role::Assistant);
                    turn = Some(ChatMessage { reasoning_content: Some(reasoned), ..message });
                }
            }
            InputItem::Message { role, content, .. } => {
                conversation.extend(turn.take().filter(is_said));
                conversation.push(said(*role, text(content)));
            }
            InputItem::FunctionCallOutput { call_id, output, .. } => {
                conversation.extend(turn.take().filter(is_said));
                let result = said(Role::Tool, text(output));
                conversation.push(ChatMessage { tool_call_id: Some(call_id.clone()), ..result });
            }
        }
    }
    conversation.extend(turn.filter(is_said));
}

/// Whether a message has more than reasoning.
fn is_said(message: &ChatMessage) -> bool {
    message.content.is_some() || message.tool_calls.is_some()
}

/// The message of the items of a response.
pub(super) fn answer_message(output: &[OutputItem]) -> ChatMessage {
    let mut message = ChatMessage::new(Role::Assistant);
    let text = |parts: &[OutputPart]| -> String {
        let parts = parts.iter().map(|part| match part {
            OutputPart::OutputText { text, .. } | OutputPart::ReasoningText { text } => text.as_str(),
        });
        parts.collect()
    };
    for item in output {
        match item {
            OutputItem::Message { content, .. } => message.content = Some(Content::Text(text(content))),
            OutputItem::Reasoning { content, .. } => message.reasoning_content = Some(text(content)),
            OutputItem::FunctionCall { call_id, name, namespace, arguments, .. } => {
                let call = call(call_id, full_name(namespace.as_deref(), name), arguments);
                message.tool_calls.get_or_insert_default().push(call);
            }
        }
    }
    if !is_said(&message) {
        message.content = Some(Content::Text(String::new()));
    }
    message
}

fn call(id: &str, name: String, arguments: &str) -> ToolCall {
    let arguments = arguments.to_owned();
    ToolCall {
        index: None,
        id: id.to_owned(),
        r#type: CallType::Function,
        function: FunctionCall { name, arguments, parsed_arguments: None },
        provider_specific_fields: None,
    }
}

fn said(role: Role, text: String) -> ChatMessage {
    ChatMessage { content: Some(Content::Text(text)), ..ChatMessage::new(role) }
}

fn text(content: &ItemContent) -> String {
    match content {
        ItemContent::Text(text) => text.clone(),
        ItemContent::Parts(parts) => parts.iter().map(ItemPart::text).collect(),
    }
}
