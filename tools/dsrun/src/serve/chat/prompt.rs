//! Conversations as tokens.

use super::{
    described_tools::{describe, without_system, write_calls},
    requested_tools::RequestedTools,
};
use crate::serve::{
    api::chat::{ChatMessage, Content, Role, Tool, ToolCall},
    app::Loaded,
    error::ApiError,
    intake::Work,
    reasoning::Marks,
};
use dsrun_models::chat::{ChatError, Message, RenderOptions};
use serde_json::{Map, Value, json};

/// The most messages of a request.
const MAX_MESSAGES: usize = 16_384;

/// The most JSON values in the tools, in the variables of the template and in the arguments of calls. For each, a template takes some
/// hundred bytes of memory.
const MAX_VALUES: usize = 100_000;

/// Marks the end of a message that goes on. Characters for private use, which no message is expected to have.
const END_MARK: &str = "\u{e00d}\u{e05e}\u{e0d0}";

/// The end of a conversation's prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The start of an answer.
    Answer,
    /// The end of the last message.
    Message,
    /// The text of the last message, which is an assistant's and goes on.
    Continued,
}

impl Ending {
    /// What the fields `add_generation_prompt` and `continue_final_message` say.
    ///
    /// # Errors
    /// If both are true.
    pub(crate) fn of(answer: Option<bool>, continued: Option<bool>) -> Result<Self, ApiError> {
        match (answer, continued.unwrap_or(false)) {
            (Some(true), true) => {
                let message = "not together with add_generation_prompt, which starts another message";
                Err(ApiError::field("continue_final_message", message))
            }
            (_, true) => Ok(Self::Continued),
            (Some(false), false) => Ok(Self::Message),
            (_, false) => Ok(Self::Answer),
        }
    }
}

/// A conversation as tokens.
pub(crate) struct Encoded {
    pub(crate) tokens: Vec<u32>,
    /// Whether the prompt ends with the mark that opens reasoning.
    pub(crate) reasons: bool,
}

/// Encodes a conversation with the model's chat template.
///
/// # Errors
/// Names the field that is wrong.
pub(crate) fn encode(
    messages: &[ChatMessage],
    tools: Option<&RequestedTools>,
    variables: Map<String, Value>,
    ending: Ending,
    loaded: &Loaded,
    work: &Work,
) -> Result<Encoded, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field("messages", "there must be at least one"));
    }
    let context = loaded.engine.limits().context;
    // Every message takes at least one token.
    if messages.len() > context.min(MAX_MESSAGES) {
        return Err(match messages.len() > context {
            true => ApiError::too_long("messages", context),
            false => ApiError::field("messages", format!("at most {MAX_MESSAGES}")),
        });
    }
    let names =
        ["messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"];
    let template = loaded.template()?;
    let reserved = |name: &&String| names.contains(&name.as_str()) || template.defines(name);
    if let Some(name) = variables.keys().find(reserved) {
        let message = "the server sets this variable of the chat template";
        return Err(ApiError::field(format!("chat_template_kwargs.{name}"), message));
    }
    check_values("chat_template_kwargs", variables.values().map(count_values))?;
    let schemas = tools
        .into_iter()
        .flat_map(RequestedTools::all)
        .filter_map(|Tool::Function { function }| function.parameters.as_ref());
    check_values("tools", schemas.map(count_values))?;
    let calls = messages.iter().flat_map(|message| message.tool_calls.iter().flatten());
    check_values("messages", calls.map(|call| most_values(&call.function.arguments)))?;
    let written = messages.iter().enumerate().map(|(index, message)| as_message(index, message));
    let mut written: Vec<Message> = written.collect::<Result<_, _>>()?;
    match loaded.tool_format()? {
        None => write_calls(&mut written),
        // The template has another name for it.
        Some(format) if format.has_channels() => written.iter_mut().for_each(|message| {
            let reasoning = message.other.get("reasoning_content").cloned();
            message.other.extend(reasoning.map(|text| ("thinking".to_owned(), text)));
        }),
        Some(_) => {}
    }
    let described = tools.filter(|tools| !tools.are_in_template());
    if let Some(tools) = described {
        describe(tools.all(), &mut written);
    }
    if ending == Ending::Continued {
        mark_end(&mut written)?;
    }
    let in_template = tools.filter(|tools| tools.are_in_template());
    let options = RenderOptions {
        add_generation_prompt: ending == Ending::Answer,
        // Tools consist of strings and JSON, so they can always be serialised.
        tools: in_template.map(|tools| tools.all().iter().map(|tool| json!(tool)).collect()),
        variables,
        ..RenderOptions::default()
    };
    let tokenizer = loaded.tokenizer()?;
    let mut prompt = template.prompt(tokenizer, &written, &options);
    // Some templates refuse system messages.
    if described.is_some()
        && matches!(prompt, Err(ChatError::Refused { .. }))
        && let Some(merged) = without_system(&written)
    {
        prompt = template.prompt(tokenizer, &merged, &options);
    }
    let mut prompt = prompt.map_err(|error| ApiError::field("messages", error.to_string()))?;
    if ending == Ending::Continued && !prompt.end_before(END_MARK) {
        let message = "the chat template does not write the end of the last message";
        return Err(ApiError::field("continue_final_message", message));
    }
    work.check()?;
    let tokens = prompt.encode_within(tokenizer, context);
    let tokens = tokens.map_err(|error| ApiError::field("messages", error.to_string()))?;
    let tokens = tokens.ok_or_else(|| ApiError::too_long("messages", context))?;
    Ok(Encoded { tokens, reasons: Marks::of(template).is_some_and(|marks| prompt.ends_with(marks.open)) })
}

/// Refuses a field with too many JSON values.
fn check_values(field: &str, counts: impl Iterator<Item = usize>) -> Result<(), ApiError> {
    let count: usize = counts.sum();
    if count <= MAX_VALUES {
        return Ok(());
    }
    let message = format!("has {count} JSON values for the chat template, but may have at most {MAX_VALUES}");
    Err(ApiError::field(field, message))
}

/// The number of values in a value, itself included.
fn count_values(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count_values).sum(),
        Value::Object(fields) => fields.values().map(count_values).sum(),
        _ => 0,
    }
}

/// An upper bound on the number of values in a JSON text: each but the first follows one of these characters.
fn most_values(text: &str) -> usize {
    1 + text.bytes().filter(|byte| matches!(byte, b',' | b'[' | b':')).count()
}

/// Marks the end of the last message.
///
/// # Errors
/// If it is not an assistant's text.
fn mark_end(messages: &mut [Message]) -> Result<(), ApiError> {
    let last = messages.last_mut().filter(|last| last.role == Role::Assistant.name());
    match last.filter(|last| !last.other.contains_key("tool_calls")).map(|last| &mut last.content) {
        Some(Some(Value::String(text))) => {
            text.push_str(END_MARK);
            Ok(())
        }
        _ => {
            let message = "the last message must be an assistant's, and call no tools";
            Err(ApiError::field("continue_final_message", message))
        }
    }
}

/// A message in the form that chat templates read.
fn as_message(index: usize, message: &ChatMessage) -> Result<Message, ApiError> {
    let field = |name: &str| format!("messages[{index}].{name}");
    let unsupported = [
        ("audio", &message.audio, "sound is not supported"),
        ("function_call", &message.function_call, "use tool_calls instead"),
    ];
    // `null` is read as absent.
    if let Some((name, _, why)) = unsupported.into_iter().find(|(_, value, _)| value.is_some()) {
        return Err(ApiError::field(field(name), why));
    }
    let mut other = Map::new();
    let texts = [
        ("name", &message.name),
        ("tool_call_id", &message.tool_call_id),
        (
            "reasoning_content",
            if message.reasoning_content.is_some() { &message.reasoning_content } else { &message.reasoning },
        ),
    ];
    for (key, text) in texts {
        if let Some(text) = text {
            other.insert(key.to_owned(), text.as_str().into());
        }
    }
    if let Some(calls) = message.tool_calls.as_ref().filter(|calls| !calls.is_empty()) {
        if message.role != Role::Assistant {
            return Err(ApiError::field(field("tool_calls"), "only an assistant's message calls tools"));
        }
        let call = |call: &ToolCall| {
            // Templates read the arguments as an object, not as text.
            let arguments: Map<String, Value> = match call.function.arguments.trim() {
                "" => Map::new(),
                text => serde_json::from_str(text).map_err(|error| {
                    ApiError::field(field("tool_calls"), format!("the arguments are no JSON object: {error}"))
                })?,
            };
            let function = json!({"name": call.function.name, "arguments": arguments});
            Ok(json!({"id": call.id, "type": "function", "function": function}))
        };
        let calls: Vec<Value> = calls.iter().map(call).collect::<Result<_, ApiError>>()?;
        other.insert("tool_calls".to_owned(), calls.into());
    } else if message.content.is_none() && message.refusal.is_none() && message.role != Role::Assistant {
        return Err(ApiError::field(field("content"), "must be given"));
    }
    let content = message.content.as_ref().map(Content::text).or_else(|| message.refusal.clone());
    let content = Some(content.map_or_else(|| Value::from(""), Value::from));
    Ok(Message { role: message.role.name().to_owned(), content, other })
}
