//! `/v1/responses`: the fields that OpenAI's Responses API has, with its names and meanings.

use super::{StreamOptions, Usage};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::Error};
use serde_json::Value;

/// An input to respond to.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResponsesRequest {
    /// The model, by the name that /v1/models lists.
    #[serde(default)]
    pub(crate) model: Option<String>,
    /// A text of the user, or the items of a conversation.
    pub(crate) input: ResponsesInput,
    /// Instructions before the conversation. Those of an earlier response do not carry over.
    #[serde(default)]
    pub(crate) instructions: Option<String>,
    /// The response whose conversation goes on. It has to be stored.
    #[serde(default)]
    pub(crate) previous_response_id: Option<String>,
    /// Whether the conversation is kept, for `previous_response_id`; `true` if not given.
    #[serde(default)]
    pub(crate) store: Option<bool>,
    /// The most tokens of the answer; what fits into the context if not given.
    #[serde(default)]
    pub(crate) max_output_tokens: Option<usize>,
    /// Temperature: 0 takes the most likely token.
    #[serde(default)]
    pub(crate) temperature: Option<f32>,
    /// Keep the most likely tokens until their probabilities sum to this.
    #[serde(default)]
    pub(crate) top_p: Option<f32>,
    /// Whether the answer is streamed as server-sent events.
    #[serde(default)]
    pub(crate) stream: Option<bool>,
    /// It has no effect.
    #[serde(default)]
    pub(crate) stream_options: Option<StreamOptions>,
    /// The tools that the model may call.
    #[serde(default)]
    pub(crate) tools: Option<Vec<ResponsesTool>>,
    /// Whether the model has to call a tool.
    #[serde(default)]
    pub(crate) tool_choice: Option<ResponsesToolChoice>,
    /// Whether the model may call several tools in an answer.
    #[serde(default)]
    pub(crate) parallel_tool_calls: Option<bool>,
    /// The form of the answer.
    #[serde(default)]
    pub(crate) text: Option<TextConfig>,
    /// How much the model reasons.
    #[serde(default)]
    pub(crate) reasoning: Option<ReasoningConfig>,
    /// A text, secret for best effect: cached prompts are shared only with requests of the same salt.
    #[serde(default)]
    pub(crate) cache_salt: Option<String>,
    /// Given back with the response.
    #[serde(default)]
    pub(crate) metadata: Option<Value>,
    /// Only `disabled`: a conversation that is too long is refused. `auto` has no effect.
    #[serde(default)]
    pub(crate) truncation: Option<String>,
    /// Only `false`.
    #[serde(default)]
    pub(crate) background: Option<bool>,
    /// It has no effect.
    #[serde(default)]
    pub(crate) client_metadata: Option<Value>,
    /// It has no effect: a response has all that there is.
    #[serde(default)]
    pub(crate) include: Option<Vec<String>>,
    /// It has no effect: the server calls no tools.
    #[serde(default)]
    pub(crate) max_tool_calls: Option<usize>,
    /// It has no effect: prompts are cached always.
    #[serde(default)]
    pub(crate) prompt_cache_key: Option<String>,
    /// It has no effect.
    #[serde(default)]
    pub(crate) prompt_cache_retention: Option<String>,
    /// It has no effect.
    #[serde(default)]
    pub(crate) safety_identifier: Option<String>,
    /// It has no effect.
    #[serde(default)]
    pub(crate) service_tier: Option<String>,
    /// It has no effect.
    #[serde(default)]
    pub(crate) user: Option<String>,
}

impl ResponsesRequest {
    pub(crate) fn tools(&self) -> &[ResponsesTool] {
        self.tools.as_deref().unwrap_or_default()
    }
}

/// A text, or items.
#[derive(Clone, Debug, PartialEq, JsonSchema)]
#[schemars(untagged)]
pub(crate) enum ResponsesInput {
    Text(String),
    Items(Vec<InputItem>),
}

impl<'de> Deserialize<'de> for ResponsesInput {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let items = match Value::deserialize(deserializer)? {
            Value::String(text) => return Ok(Self::Text(text)),
            Value::Array(items) => items,
            _ => return Err(D::Error::custom("must be a text or a list of items")),
        };
        let item = |(index, mut item): (usize, Value)| {
            // A message may leave out its type.
            if let Some(fields) = item.as_object_mut().filter(|fields| fields.contains_key("role")) {
                fields.entry("type").or_insert_with(|| "message".into());
            }
            InputItem::deserialize(item).map_err(|error| D::Error::custom(format!("item {index}: {error}")))
        };
        items.into_iter().enumerate().map(item).collect::<Result<_, _>>().map(Self::Items)
    }
}

/// An item of a conversation.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum InputItem {
    Message {
        role: super::chat::Role,
        content: ItemContent,
        /// It has no effect.
        #[serde(default)]
        id: Option<String>,
        /// It has no effect.
        #[serde(default)]
        status: Option<String>,
        /// It has no effect.
        #[serde(default)]
        phase: Option<Value>,
    },
    /// A call of the assistant.
    FunctionCall {
        call_id: String,
        name: String,
        #[serde(default)]
        namespace: Option<String>,
        /// The arguments as JSON in a string.
        arguments: String,
        /// Clients send it back with an answer. It has no effect.
        #[serde(default)]
        parsed_arguments: Option<Value>,
        /// It has no effect.
        #[serde(default)]
        id: Option<String>,
        /// It has no effect.
        #[serde(default)]
        status: Option<String>,
    },
    /// The result of a call.
    FunctionCallOutput {
        call_id: String,
        output: ItemContent,
        /// It has no effect.
        #[serde(default)]
        id: Option<String>,
        /// It has no effect.
        #[serde(default)]
        status: Option<String>,
    },
    /// The assistant's reasoning.
    Reasoning {
        #[serde(default)]
        content: Option<Vec<ItemPart>>,
        #[serde(default)]
        summary: Option<Vec<ItemPart>>,
        /// It has no effect.
        #[serde(default)]
        encrypted_content: Option<String>,
        /// It has no effect.
        #[serde(default)]
        id: Option<String>,
        /// It has no effect.
        #[serde(default)]
        status: Option<String>,
    },
}

/// A text, in one or several parts.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "must be a text, or a list of parts of the types input_text, output_text and refusal; images and files are not \
                 supported"
)]
pub(crate) enum ItemContent {
    Text(String),
    Parts(Vec<ItemPart>),
}

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ItemPart {
    InputText {
        text: String,
    },
    OutputText {
        text: String,
        /// Clients send it back with an answer. It has no effect.
        #[serde(default)]
        annotations: Option<Value>,
        /// Clients send it back with an answer. It has no effect.
        #[serde(default)]
        logprobs: Option<Value>,
    },
    Text {
        text: String,
    },
    ReasoningText {
        text: String,
    },
    SummaryText {
        text: String,
    },
    Refusal {
        refusal: String,
    },
}

impl ItemPart {
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::InputText { text }
            | Self::OutputText { text, .. }
            | Self::Text { text }
            | Self::ReasoningText { text }
            | Self::SummaryText { text } => text,
            Self::Refusal { refusal } => refusal,
        }
    }
}

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ResponsesTool {
    /// A function that the client runs.
    Function(ResponsesFunction),
    /// Functions with a name in common.
    Namespace(ResponsesNamespace),
    /// A search by the server, which has none: the model is not shown the tool.
    #[serde(alias = "web_search_preview")]
    WebSearch {},
    /// Images by the server, which makes none: the model is not shown the tool.
    ImageGeneration {},
    /// A search for tools that are not shown at once. The model is shown all others, and not this one.
    ToolSearch {},
}

/// Functions that are called by the name of the namespace and their own.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResponsesNamespace {
    /// Of the same characters as a function's name.
    pub(crate) name: String,
    /// The model is not shown it.
    #[serde(default)]
    pub(crate) description: Option<String>,
    pub(crate) tools: Vec<NamespaceTool>,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum NamespaceTool {
    Function(ResponsesFunction),
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResponsesFunction {
    /// Letters, digits, `_`, `-` and `.`, at most 128, with the name of its namespace.
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) description: Option<String>,
    /// A JSON schema of the arguments.
    #[serde(default)]
    pub(crate) parameters: Option<Value>,
    /// Whether the arguments have to follow the schema.
    #[serde(default)]
    pub(crate) strict: Option<bool>,
    /// It has no effect: the model is shown every function at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) defer_loading: Option<bool>,
}

/// Whether the model has to call a tool.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "must be \"none\", \"auto\", \"required\", {\"type\": \"function\", \"name\": ..} or \
                 {\"type\": \"allowed_tools\", \"mode\": .., \"tools\": [..]}"
)]
pub(crate) enum ResponsesToolChoice {
    Mode(super::chat::ToolMode),
    Named(ResponsesNamedTool),
}

#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ResponsesNamedTool {
    /// The tool that the model has to call.
    Function {
        name: String,
        #[serde(default)]
        namespace: Option<String>,
    },
    /// The tools of which the model may, or has to, call one.
    AllowedTools { mode: super::chat::AllowedMode, tools: Vec<ResponsesToolName> },
}

/// A tool by its name.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ResponsesToolName {
    Function {
        name: String,
        #[serde(default)]
        namespace: Option<String>,
    },
}

/// The form of the answer.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TextConfig {
    #[serde(default)]
    pub(crate) format: Option<TextFormat>,
    /// It has no effect.
    #[serde(default)]
    pub(crate) verbosity: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum TextFormat {
    /// Plain text.
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that follows a schema.
    JsonSchema {
        name: String,
        #[serde(default)]
        description: Option<String>,
        schema: Value,
        /// Accepted for compatibility: answers always follow the schema.
        #[serde(default)]
        strict: Option<bool>,
    },
}

/// How much the model reasons.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReasoningConfig {
    /// For chat templates that have `reasoning_effort`.
    #[serde(default)]
    pub(crate) effort: Option<String>,
    /// It has no effect: a response has the whole reasoning.
    #[serde(default)]
    pub(crate) summary: Option<String>,
    /// It has no effect.
    #[serde(default)]
    pub(crate) generate_summary: Option<String>,
}

/// A response.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ResponseObject {
    pub(crate) id: String,
    /// `response`.
    pub(crate) object: &'static str,
    /// In seconds since 1970.
    pub(crate) created_at: u64,
    pub(crate) status: Status,
    pub(crate) error: Option<Value>,
    /// Why the response is incomplete.
    pub(crate) incomplete_details: Option<Value>,
    pub(crate) instructions: Option<String>,
    pub(crate) max_output_tokens: Option<usize>,
    pub(crate) metadata: Value,
    pub(crate) model: String,
    pub(crate) output: Vec<OutputItem>,
    pub(crate) parallel_tool_calls: bool,
    pub(crate) previous_response_id: Option<String>,
    pub(crate) reasoning: Value,
    pub(crate) store: bool,
    pub(crate) temperature: Option<f32>,
    pub(crate) text: Value,
    pub(crate) tool_choice: Value,
    pub(crate) tools: Vec<ResponsesTool>,
    pub(crate) top_p: Option<f32>,
    /// `disabled`.
    pub(crate) truncation: &'static str,
    pub(crate) usage: Option<ResponsesUsage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    InProgress,
    Completed,
    /// A limit ended it.
    Incomplete,
    Failed,
}

/// An item of a response.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum OutputItem {
    Message {
        id: String,
        status: Status,
        role: super::chat::Role,
        content: Vec<OutputPart>,
    },
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        arguments: String,
        status: Status,
    },
    Reasoning {
        id: String,
        summary: Vec<Value>,
        content: Vec<OutputPart>,
        status: Status,
    },
}

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum OutputPart {
    OutputText { text: String, annotations: Vec<Value>, logprobs: Vec<Value> },
    ReasoningText { text: String },
}

/// The tokens that a request used.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ResponsesUsage {
    pub(crate) input_tokens: usize,
    pub(crate) input_tokens_details: super::PromptTokensDetails,
    pub(crate) output_tokens: usize,
    pub(crate) output_tokens_details: OutputTokensDetails,
    pub(crate) total_tokens: usize,
}

/// More about the tokens of answers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct OutputTokensDetails {
    /// Pieces of the answer that were reasoning.
    pub(crate) reasoning_tokens: usize,
}

impl ResponsesUsage {
    pub(crate) fn new(usage: Usage, reasoning_tokens: usize) -> Self {
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: usage.prompt_tokens_details,
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputTokensDetails { reasoning_tokens },
            total_tokens: usage.total_tokens,
        }
    }
}
