//! From the fields of Anthropic's API to those of a chat completion.

use crate::serve::{
    api::{
        chat::{
            CallType, ChatMessage, ChatRequest, Content, Function, FunctionCall, FunctionName, NamedTool,
            Role, Tool, ToolCall, ToolChoice, ToolMode,
        },
        messages::{
            Block, Blocks, CustomTool, InputMessage, InputRole, MessagesRequest, MessagesToolChoice,
            OutputFormat, Thinking,
        },
    },
    app::Loaded,
    error::ApiError,
};
use serde_json::{Map, Value, json};

/// The request as a chat completion, without its limit on tokens.
///
/// # Errors
/// Names the field that is wrong.
pub(super) fn chat_request(request: &MessagesRequest, loaded: &Loaded) -> Result<ChatRequest, ApiError> {
    let mut fields = Map::new();
    let mut give = |name: &str, value: Option<Value>| {
        fields.extend(value.map(|value| (name.to_owned(), value)));
    };
    give("model", request.model.clone().map(Value::from));
    give("messages", Some(json!([])));
    give("stream", request.stream.map(Value::from));
    give("stop", request.stop_sequences.as_ref().filter(|stops| !stops.is_empty()).map(|stops| json!(stops)));
    give("temperature", request.temperature.map(Value::from));
    give("top_p", request.top_p.map(Value::from));
    give("top_k", request.top_k.map(Value::from));
    let thinks = request.thinking.as_ref().map(|thinking| !matches!(thinking, Thinking::Disabled));
    if let Some(thinks) =
        thinks.filter(|_| loaded.template().is_ok_and(|template| template.mentions("enable_thinking")))
    {
        give("chat_template_kwargs", Some(json!({"enable_thinking": thinks})));
    }
    if let Some(config) = &request.output_config {
        give("reasoning_effort", config.effort.as_ref().map(|effort| json!(effort)));
        give("response_format", config.format.as_ref().map(|OutputFormat::JsonSchema { schema }| {
            json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})
        }));
    }
    let mut chat: ChatRequest = serde_json::from_value(Value::Object(fields))
        .map_err(|error| ApiError::malformed(error.to_string()))?;
    chat.messages = conversation(request);
    // An answer of Anthropic's API goes on with the last message if that is the assistant's.
    let last = chat.messages.last().filter(|last| last.role == Role::Assistant && last.tool_calls.is_none());
    chat.continue_final_message = last.map(|last| last.content.is_some());
    chat.tools =
        request.tools.as_ref().map(|tools| all_tools(tools)).transpose()?.filter(|tools| !tools.is_empty());
    let (choice, single) = match &request.tool_choice {
        None => (None, None),
        Some(MessagesToolChoice::None) => (Some(ToolChoice::Mode(ToolMode::None)), None),
        Some(MessagesToolChoice::Auto { disable_parallel_tool_use }) => {
            (Some(ToolChoice::Mode(ToolMode::Auto)), *disable_parallel_tool_use)
        }
        Some(MessagesToolChoice::Any { disable_parallel_tool_use }) => {
            (Some(ToolChoice::Mode(ToolMode::Required)), *disable_parallel_tool_use)
        }
        Some(MessagesToolChoice::Tool { name, disable_parallel_tool_use }) => {
            let function = FunctionName { name: name.clone() };
            (Some(ToolChoice::Named(NamedTool::Function { function })), *disable_parallel_tool_use)
        }
    };
    (chat.tool_choice, chat.parallel_tool_calls) = (choice, single.map(|single| !single));
    Ok(chat)
}

fn all_tools(tools: &[CustomTool]) -> Result<Vec<Tool>, ApiError> {
    let tool = |(index, tool): (usize, &CustomTool)| {
        if tool.r#type.as_deref().is_some_and(|kind| kind != "custom") {
            let message = "is a tool that Anthropic's servers run: only custom tools, which the client runs";
            return Err(ApiError::field(format!("tools[{index}].type"), message));
        }
        let CustomTool { name, description, input_schema, strict, .. } = tool.clone();
        Ok(Tool::Function { function: Function { name, description, parameters: input_schema, strict } })
    };
    tools.iter().enumerate().map(tool).collect()
}

/// The messages of a request, with its instructions in front.
fn conversation(request: &MessagesRequest) -> Vec<ChatMessage> {
    let system = request.system.as_ref().map(text).filter(|text| !text.is_empty());
    let mut messages: Vec<ChatMessage> = system.map(|text| said(Role::System, text)).into_iter().collect();
    for InputMessage { role, content } in &request.messages {
        match role {
            InputRole::System => messages.push(said(Role::System, text(content))),
            InputRole::User => add_user(content, &mut messages),
            InputRole::Assistant => messages.push(assistant(content)),
        }
    }
    messages
}

/// Adds a message of the user: results of calls are messages of their own, in front of what the user says.
fn add_user(content: &Blocks, messages: &mut Vec<ChatMessage>) {
    let mut results = 0;
    if let Blocks::List(blocks) = content {
        for block in blocks {
            let Block::ToolResult { tool_use_id, content, is_error, .. } = block else { continue };
            let mut result = content.as_ref().map(text).unwrap_or_default();
            if *is_error == Some(true) {
                result = format!("Error: {result}");
            }
            let message = said(Role::Tool, result);
            messages.push(ChatMessage { tool_call_id: Some(tool_use_id.clone()), ..message });
            results += 1;
        }
    }
    let text = text(content);
    if !text.is_empty() || results == 0 {
        messages.push(said(Role::User, text));
    }
}

fn assistant(content: &Blocks) -> ChatMessage {
    let mut message = said(Role::Assistant, text(content));
    let Blocks::List(blocks) = content else { return message };
    let mut calls = Vec::new();
    let mut reasoning = Vec::new();
    for block in blocks {
        match block {
            Block::Thinking { thinking, .. } => reasoning.push(thinking.as_str()),
            Block::ToolUse { id, name, input, .. } => {
                let arguments = input.as_ref().map_or_else(|| "{}".to_owned(), Value::to_string);
                calls.push(ToolCall {
                    index: None,
                    id: id.clone(),
                    r#type: CallType::Function,
                    function: FunctionCall { name: name.clone(), arguments, parsed_arguments: None },
                    provider_specific_fields: None,
                });
            }
            _ => {}
        }
    }
    message.reasoning_content = (!reasoning.is_empty()).then(|| reasoning.join("\n"));
    message.tool_calls = (!calls.is_empty()).then_some(calls);
    message
}

fn said(role: Role, text: String) -> ChatMessage {
    ChatMessage { content: Some(Content::Text(text)), ..ChatMessage::new(role) }
}

/// The texts of blocks, each on lines of its own.
fn text(blocks: &Blocks) -> String {
    match blocks {
        Blocks::Text(text) => text.clone(),
        Blocks::List(blocks) => {
            let texts = blocks.iter().filter_map(|block| match block {
                Block::Text { text, .. } => Some(text.as_str()),
                _ => None,
            });
            texts.collect::<Vec<_>>().join("\n")
        }
    }
}
