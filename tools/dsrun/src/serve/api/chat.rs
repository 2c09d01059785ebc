//! `/v1/chat/completions`.

use super::{Finish, TokenLogprob, Usage, generation_request};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de::IgnoredAny};
use serde_json::{Map, Value};
use std::sync::Arc;

generation_request! {
    /// A conversation to continue.
    struct ChatRequest {
        /// The conversation so far.
        pub(crate) messages: Vec<ChatMessage>,
        /// The most tokens of an answer; what fits into the context if not given.
        #[serde(default)]
        pub(crate) max_completion_tokens: Option<usize>,
        /// The former name of `max_completion_tokens`.
        #[serde(default)]
        pub(crate) max_tokens: Option<usize>,
        /// Whether to report the probability of each token.
        #[serde(default)]
        pub(crate) logprobs: Option<bool>,
        /// The number of most likely tokens to report at each position, at most 20; only with `logprobs`.
        #[serde(default)]
        pub(crate) top_logprobs: Option<usize>,
        /// The tools that the model may call.
        #[serde(default)]
        pub(crate) tools: Option<Vec<Tool>>,
        /// Whether the model has to call a tool.
        #[serde(default)]
        pub(crate) tool_choice: Option<ToolChoice>,
        /// Whether the model may call several tools in an answer.
        #[serde(default)]
        pub(crate) parallel_tool_calls: Option<bool>,
        /// How much the model reasons, for chat templates that ask for it.
        #[serde(default)]
        pub(crate) reasoning_effort: Option<String>,
        /// The kinds of output: `["text"]`.
        #[serde(default)]
        pub(crate) modalities: Option<Vec<String>>,
        /// It has no effect.
        #[serde(default)]
        pub(crate) verbosity: Option<Value>,
        /// Whether the prompt ends with the start of an answer; yes if not given.
        #[serde(default)]
        pub(crate) add_generation_prompt: Option<bool>,
        /// Whether the answer goes on with the last message, which is an assistant's. It does not repeat that message.
        #[serde(default)]
        pub(crate) continue_final_message: Option<bool>,
        /// Further variables of the chat template, such as `enable_thinking`.
        #[serde(default)]
        pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
    }
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatMessage {
    pub(crate) role: Role,
    /// The text. A message that calls tools may have none.
    #[serde(default)]
    pub(crate) content: Option<Content>,
    /// The name of the participant.
    #[serde(default)]
    pub(crate) name: Option<String>,
    /// The tool calls of an assistant's message.
    #[serde(default)]
    pub(crate) tool_calls: Option<Vec<ToolCall>>,
    /// The call that a tool's message answers.
    #[serde(default)]
    pub(crate) tool_call_id: Option<String>,
    /// The assistant's reasoning before the message.
    #[serde(default)]
    pub(crate) reasoning_content: Option<String>,
    /// Another name of `reasoning_content`.
    #[serde(default)]
    pub(crate) reasoning: Option<String>,
    /// The assistant's reason for refusing; answers of this server have none.
    #[serde(default)]
    pub(crate) refusal: Option<String>,
    /// Sound: only `null`.
    #[serde(default)]
    pub(crate) audio: Option<Value>,
    /// The former form of `tool_calls`: only `null`.
    #[serde(default)]
    pub(crate) function_call: Option<Value>,
    /// Clients send it back with an answer. It has no effect.
    #[serde(default)]
    pub(crate) annotations: Option<Value>,
    /// Clients add it to an answer. It has no effect.
    #[serde(default)]
    pub(crate) provider_specific_fields: Option<Value>,
    /// Clients add it to an answer. It has no effect.
    #[serde(default)]
    pub(crate) reasoning_details: Option<Value>,
    /// Clients add it to an answer. It has no effect.
    #[serde(default)]
    pub(crate) thinking_blocks: Option<Value>,
    /// The parsed answer, which clients add to it. It has no effect.
    #[serde(default)]
    pub(crate) parsed: Option<Value>,
    /// It has no effect: prompts are cached always.
    #[serde(default)]
    pub(crate) cache_control: Option<Value>,
}

impl ChatMessage {
    /// A message without content.
    pub(crate) fn new(role: Role) -> Self {
        Self {
            role,
            content: None,
            name: None,
            tool_calls: None,
            tool_call_id: None,
            reasoning_content: None,
            reasoning: None,
            refusal: None,
            audio: None,
            function_call: None,
            annotations: None,
            provider_specific_fields: None,
            reasoning_details: None,
            thinking_blocks: None,
            parsed: None,
            cache_control: None,
        }
    }
}

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// The same as `system`.
    Developer,
    System,
    User,
    Assistant,
    Tool,
}

impl Role {
    /// The name in chat templates.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Developer | Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// A text, in one or several parts.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "must be a text, or a list of parts {\"type\": \"text\", \"text\": ..}; images and sound are not supported"
)]
pub(crate) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// A value that is accepted and dropped.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, JsonSchema)]
pub(crate) struct Unused(#[schemars(with = "Value")] IgnoredAny);

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Part {
    Text {
        text: String,
        /// Clients send it back with an answer. It has no effect.
        #[serde(default)]
        annotations: Option<Unused>,
        /// It has no effect: prompts are cached always.
        #[serde(default)]
        cache_control: Option<Unused>,
        /// The other fields of an answer, which the Agents SDK for JavaScript sends back in its text. They have no effect here: what
        /// counts is the message.
        #[serde(default)]
        role: Option<Unused>,
        #[serde(default)]
        refusal: Option<Unused>,
        #[serde(default)]
        audio: Option<Unused>,
        #[serde(default)]
        function_call: Option<Unused>,
        #[serde(default)]
        tool_calls: Option<Unused>,
        #[serde(default)]
        reasoning: Option<Unused>,
        #[serde(default)]
        reasoning_content: Option<Unused>,
    },
    /// The assistant's reason for refusing.
    Refusal { refusal: String },
}

impl Content {
    /// The bytes of the text.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Parts(parts) => parts
                .iter()
                .map(|part| match part {
                    Part::Text { text, .. } => text.len(),
                    Part::Refusal { refusal } => refusal.len(),
                })
                .sum(),
        }
    }

    /// The text as a whole.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Parts(parts) => parts
                .iter()
                .map(|part| match part {
                    Part::Text { text, .. } => text.as_str(),
                    Part::Refusal { refusal } => refusal,
                })
                .collect(),
        }
    }
}

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Tool {
    Function { function: Function },
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Function {
    /// Letters, digits, `_`, `-` and `.`, at most 128.
    pub(crate) name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) description: Option<String>,
    /// A JSON schema of the arguments; the function has no arguments if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parameters: Option<Value>,
    /// Whether the arguments have to follow the schema. They always do if a call is required.
    #[serde(default, skip_serializing)]
    pub(crate) strict: Option<bool>,
}

/// Whether the model has to call a tool.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "must be \"none\", \"auto\", \"required\", {\"type\": \"function\", \"function\": {\"name\": ..}} or \
                 {\"type\": \"allowed_tools\", \"allowed_tools\": {\"mode\": .., \"tools\": [..]}}"
)]
pub(crate) enum ToolChoice {
    Mode(ToolMode),
    Named(NamedTool),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ToolMode {
    /// The model calls no tool.
    None,
    /// The model decides.
    Auto,
    /// The model calls at least one tool.
    Required,
}

/// The tool that the model has to call.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum NamedTool {
    Function {
        function: FunctionName,
    },
    /// The tools of which the model may, or has to, call one.
    AllowedTools {
        allowed_tools: AllowedTools,
    },
}

/// Some of the tools.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AllowedTools {
    pub(crate) mode: AllowedMode,
    pub(crate) tools: Vec<NamedFunction>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AllowedMode {
    /// The model decides.
    Auto,
    /// The model calls at least one tool.
    Required,
}

/// A tool by its name.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum NamedFunction {
    Function { function: FunctionName },
}

#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct FunctionName {
    pub(crate) name: String,
}

/// A call that the model makes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolCall {
    /// Which of the calls of a streamed answer it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) index: Option<usize>,
    pub(crate) id: String,
    /// `function` if not given.
    #[serde(default)]
    pub(crate) r#type: CallType,
    pub(crate) function: FunctionCall,
    /// Clients add it to a call. It has no effect.
    #[serde(default, skip_serializing)]
    pub(crate) provider_specific_fields: Option<Value>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CallType {
    #[default]
    Function,
}

/// A function and its arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct FunctionCall {
    pub(crate) name: String,
    /// The arguments as JSON in a string.
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) arguments: String,
    /// The parsed arguments, which clients add to a call. They have no effect.
    #[serde(default, skip_serializing)]
    pub(crate) parsed_arguments: Option<Value>,
}

/// Reads `null` as the default value.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// A complete answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ChatCompletion {
    pub(crate) id: String,
    /// `chat.completion`.
    pub(crate) object: &'static str,
    /// In seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: Usage,
    /// Equal for answers of servers of equal version and configuration.
    pub(crate) system_fingerprint: Arc<str>,
}

impl ChatRequest {
    /// The given fields that have no effect.
    pub(crate) fn without_effect(&self) -> Vec<&'static str> {
        let mut fields = self.common_without_effect();
        fields.extend(self.modalities.as_ref().map(|_| "modalities"));
        fields.extend(self.verbosity.as_ref().map(|_| "verbosity"));
        fields
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: AnswerMessage,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<Finish>,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct AnswerMessage {
    pub(crate) role: Role,
    /// The text; `null` if the answer consists of tool calls only.
    pub(crate) content: Option<String>,
    /// The model's reasoning before its answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCall>,
    /// Never set.
    pub(crate) refusal: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatTokenLogprob>,
}

/// A token with its most likely alternatives.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ChatTokenLogprob {
    #[serde(flatten)]
    pub(crate) chosen: TokenLogprob,
    /// The most likely tokens at its position, the most likely first.
    pub(crate) top_logprobs: Vec<TokenLogprob>,
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ChatChunk {
    pub(crate) id: String,
    /// `chat.completion.chunk`.
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    /// One, or none in the last event, which tells the usage.
    pub(crate) choices: Vec<ChatChunkChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
    pub(crate) system_fingerprint: Arc<str>,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: usize,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<Finish>,
}

/// What a piece adds to a call: the first piece has its id and its name, the others have parts of its arguments.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ToolCallDelta {
    pub(crate) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) r#type: Option<CallType>,
    pub(crate) function: FunctionDelta,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) arguments: String,
}

/// What a piece adds to a message.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<Role>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    /// The model's reasoning before its answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCallDelta>,
}
