//! `/v1/messages`: the fields that Anthropic's API has, with its names and meanings.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A conversation to continue.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MessagesRequest {
    /// The model, by the name that /v1/models lists.
    #[serde(default)]
    pub(crate) model: Option<String>,
    /// The conversation so far.
    pub(crate) messages: Vec<InputMessage>,
    /// The most tokens of the answer. More than the context has room for is the same as what it has room for.
    #[serde(default)]
    pub(crate) max_tokens: Option<usize>,
    /// Instructions before the conversation.
    #[serde(default)]
    pub(crate) system: Option<Blocks>,
    /// Texts that end the answer. They are not part of it.
    #[serde(default)]
    pub(crate) stop_sequences: Option<Vec<String>>,
    /// Whether the answer is streamed as server-sent events.
    #[serde(default)]
    pub(crate) stream: Option<bool>,
    /// Temperature: 0 takes the most likely token.
    #[serde(default)]
    pub(crate) temperature: Option<f32>,
    /// Keep the most likely tokens until their probabilities sum to this.
    #[serde(default)]
    pub(crate) top_p: Option<f32>,
    /// Keep this many of the most likely tokens; 0 keeps all.
    #[serde(default)]
    pub(crate) top_k: Option<i64>,
    /// The tools that the model may call.
    #[serde(default)]
    pub(crate) tools: Option<Vec<CustomTool>>,
    /// Whether the model has to call a tool.
    #[serde(default)]
    pub(crate) tool_choice: Option<MessagesToolChoice>,
    /// Whether the model reasons, for chat templates that have `enable_thinking`.
    #[serde(default)]
    pub(crate) thinking: Option<Thinking>,
    /// The form of the answer, and how much the model reasons.
    #[serde(default)]
    pub(crate) output_config: Option<OutputConfig>,
    /// It has no effect: prompts are cached always.
    #[serde(default)]
    pub(crate) cache_control: Option<Value>,
    /// It has no effect: no part of the conversation is left out.
    #[serde(default)]
    pub(crate) context_management: Option<Value>,
    /// It has no effect.
    #[serde(default)]
    pub(crate) metadata: Option<Value>,
    /// It has no effect.
    #[serde(default)]
    pub(crate) service_tier: Option<Value>,
}

/// A message of the conversation.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct InputMessage {
    pub(crate) role: InputRole,
    pub(crate) content: Blocks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum InputRole {
    User,
    Assistant,
    System,
}

/// A text, or a list of blocks.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "must be a text, or a list of blocks of the types text, thinking, redacted_thinking, tool_use and tool_result; \
                 images and documents are not supported"
)]
pub(crate) enum Blocks {
    Text(String),
    List(Vec<Block>),
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Block {
    Text {
        text: String,
        /// It has no effect: prompts are cached always.
        #[serde(default)]
        cache_control: Option<Value>,
        /// Clients send it back with an answer. It has no effect.
        #[serde(default)]
        citations: Option<Value>,
    },
    /// The assistant's reasoning.
    Thinking {
        thinking: String,
        /// It has no effect.
        #[serde(default)]
        signature: Option<String>,
    },
    /// Reasoning that only its author can read. It is left out.
    RedactedThinking {
        #[serde(default)]
        data: Option<String>,
    },
    /// A call of the assistant.
    ToolUse {
        id: String,
        name: String,
        /// The arguments.
        #[serde(default)]
        input: Option<Value>,
        /// It has no effect: prompts are cached always.
        #[serde(default)]
        cache_control: Option<Value>,
        /// Clients send it back with an answer. It has no effect.
        #[serde(default)]
        caller: Option<Value>,
    },
    /// The result of a call.
    ToolResult {
        tool_use_id: String,
        #[serde(default)]
        content: Option<Blocks>,
        #[serde(default)]
        is_error: Option<bool>,
        /// It has no effect: prompts are cached always.
        #[serde(default)]
        cache_control: Option<Value>,
    },
}

/// A tool that the client runs.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CustomTool {
    /// `custom`, which it is if not given.
    #[serde(default)]
    pub(crate) r#type: Option<String>,
    /// Letters, digits, `_`, `-` and `.`, at most 128.
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) description: Option<String>,
    /// A JSON schema of the arguments.
    #[serde(default)]
    pub(crate) input_schema: Option<Value>,
    /// Whether the arguments have to follow the schema.
    #[serde(default)]
    pub(crate) strict: Option<bool>,
    /// It has no effect: prompts are cached always.
    #[serde(default)]
    pub(crate) cache_control: Option<Value>,
    /// It has no effect: every tool is shown to the model.
    #[serde(default)]
    pub(crate) defer_loading: Option<Value>,
    /// It has no effect: arguments are streamed always.
    #[serde(default)]
    pub(crate) eager_input_streaming: Option<Value>,
    /// It has no effect.
    #[serde(default)]
    pub(crate) allowed_callers: Option<Value>,
    /// It has no effect.
    #[serde(default)]
    pub(crate) input_examples: Option<Value>,
}

/// Whether the model has to call a tool.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum MessagesToolChoice {
    /// The model decides.
    Auto {
        #[serde(default)]
        disable_parallel_tool_use: Option<bool>,
    },
    /// The model calls at least one tool.
    Any {
        #[serde(default)]
        disable_parallel_tool_use: Option<bool>,
    },
    /// The model calls this tool.
    Tool {
        name: String,
        #[serde(default)]
        disable_parallel_tool_use: Option<bool>,
    },
    /// The model calls no tool.
    None,
}

/// Whether the model reasons.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Thinking {
    Enabled {
        /// It has no effect: reasoning ends where the model ends it.
        #[serde(default)]
        budget_tokens: Option<usize>,
        /// It has no effect.
        #[serde(default)]
        display: Option<Value>,
    },
    /// The model decides.
    Adaptive {
        /// It has no effect.
        #[serde(default)]
        display: Option<Value>,
    },
    Disabled,
}

/// The form of the answer.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct OutputConfig {
    #[serde(default)]
    pub(crate) format: Option<OutputFormat>,
    /// How much the model reasons, for chat templates that have `reasoning_effort`.
    #[serde(default)]
    pub(crate) effort: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum OutputFormat {
    /// JSON that follows a schema.
    JsonSchema { schema: Value },
}

/// A complete answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct MessageAnswer {
    pub(crate) id: String,
    /// `message`.
    pub(crate) r#type: &'static str,
    /// `assistant`.
    pub(crate) role: &'static str,
    pub(crate) model: String,
    pub(crate) content: Vec<AnswerBlock>,
    pub(crate) stop_reason: Option<StopReason>,
    /// The stop sequence that ended the answer, if one did.
    pub(crate) stop_sequence: Option<String>,
    pub(crate) usage: MessagesUsage,
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum AnswerBlock {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
        /// Always empty.
        signature: &'static str,
    },
    ToolUse {
        id: String,
        name: String,
        input: Value,
    },
}

/// The reason why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StopReason {
    /// The model ended its answer.
    EndTurn,
    /// The limit on tokens or the end of the context was reached.
    MaxTokens,
    /// A stop sequence was generated.
    StopSequence,
    /// The model called tools.
    ToolUse,
}

/// The tokens that a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct MessagesUsage {
    /// Tokens of the prompt, but for those that were found in the cache.
    pub(crate) input_tokens: usize,
    pub(crate) output_tokens: usize,
    /// Tokens that were found in the cache, since an earlier prompt started with them.
    pub(crate) cache_read_input_tokens: usize,
    /// Always 0: prompts are cached without being asked to.
    pub(crate) cache_creation_input_tokens: usize,
}

/// The number of tokens of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct TokenCount {
    pub(crate) input_tokens: usize,
}

/// An event of a streamed answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum MessageEvent {
    MessageStart { message: MessageAnswer },
    ContentBlockStart { index: usize, content_block: AnswerBlock },
    ContentBlockDelta { index: usize, delta: BlockDelta },
    ContentBlockStop { index: usize },
    MessageDelta { delta: MessageEnd, usage: MessagesUsage },
    MessageStop,
    Error { error: MessagesError },
}

impl MessageEvent {
    /// The name of the event.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
            Self::Error { .. } => "error",
        }
    }
}

/// What an event adds to a block.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type")]
pub(crate) enum BlockDelta {
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "signature_delta")]
    Signature { signature: &'static str },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: String },
}

/// The end of a streamed answer.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct MessageEnd {
    pub(crate) stop_reason: Option<StopReason>,
    pub(crate) stop_sequence: Option<String>,
}

/// The body of an error.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct MessagesErrorBody {
    /// `error`.
    pub(crate) r#type: &'static str,
    pub(crate) error: MessagesError,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct MessagesError {
    /// The kind of error.
    pub(crate) r#type: &'static str,
    /// What is wrong, and what to do about it.
    pub(crate) message: String,
}
