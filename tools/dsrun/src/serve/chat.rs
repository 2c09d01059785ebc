//! `/v1/chat/completions`.

mod described_tools;
mod prompt;
mod requested_tools;

use super::{
    api::{
        Finish, Usage,
        chat::{
            AnswerMessage, CallType, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatLogprobs,
            ChatRequest, ChatTokenLogprob, Delta, FunctionCall, Role, ToolCall,
        },
    },
    app::{App, Loaded},
    endpoint::{Completion, Header, complete},
    error::ApiError,
    events,
    generation::{Job, MAX_TOP, Piece},
    grammar::Grammar,
    intake::Work,
    reasoning::{Marks, ReasoningSplitter},
    text::Token,
    tools::{Part, ToolParser},
};
use axum::{body::Body, extract::State, http::Request, response::Response};
pub(crate) use prompt::{Encoded, encode};
use requested_tools::RequestedTools;
use std::sync::Arc;

pub(crate) async fn chat(State(app): State<Arc<App>>, request: Request<Body>) -> Result<Response, ApiError> {
    complete::<Chat>(app, request).await
}

/// The answers to one request.
struct Chat {
    /// The reader of each choice.
    readers: Vec<Reader>,
}

/// Reads one choice piece by piece, and tells text and tool calls apart.
#[derive(Default)]
struct Reader {
    /// Finds reasoning, if the chat template has marks for it.
    splitter: Option<ReasoningSplitter>,
    /// Finds tool calls, if the request has tools.
    parser: Option<ToolParser>,
    /// Tool calls so far.
    calls: usize,
    /// Whether the event with the role was sent.
    introduced: bool,
}

/// The content of a piece.
#[derive(Default)]
struct Content {
    reasoning: String,
    text: String,
    calls: Vec<ToolCall>,
    finish: Option<Finish>,
}

impl Reader {
    fn read(&mut self, piece: &Piece) -> Content {
        let mut content = Content::default();
        let mut piece_text = piece.text.clone();
        if let Some(splitter) = &mut self.splitter {
            let mut split = splitter.push(&piece.text);
            if piece.finish.is_some() {
                let rest = splitter.finish();
                split.reasoning.push_str(&rest.reasoning);
                split.text.push_str(&rest.text);
            }
            (content.reasoning, piece_text) = (split.reasoning, split.text);
        }
        match &mut self.parser {
            None => content.text = piece_text,
            Some(parser) => {
                let mut parts = parser.push(&piece_text);
                if piece.finish.is_some() {
                    parts.extend(parser.finish());
                }
                for part in parts {
                    match part {
                        Part::Text(text) => content.text.push_str(&text),
                        Part::Call { name, arguments } => {
                            content.calls.push(ToolCall {
                                index: Some(self.calls),
                                id: events::id("call"),
                                r#type: CallType::Function,
                                function: FunctionCall { name, arguments, parsed_arguments: None },
                                provider_specific_fields: None,
                            });
                            self.calls += 1;
                        }
                    }
                }
            }
        }
        content.finish = piece.finish.map(|finish| match finish {
            Finish::Stop if self.calls > 0 => Finish::ToolCalls,
            finish => finish,
        });
        content
    }
}

impl Completion for Chat {
    type Request = ChatRequest;
    type Choice = ChatChoice;
    type Answer = ChatCompletion;
    type Event = ChatChunk;

    const ID_PREFIX: &'static str = "chatcmpl";

    fn model(request: &ChatRequest) -> &str {
        &request.model
    }

    fn without_effect(request: &ChatRequest) -> Vec<&'static str> {
        request.without_effect()
    }

    fn prepare(request: &ChatRequest, loaded: &Loaded, work: &Work) -> Result<(Job, Self), ApiError> {
        let generation = request.generation()?;
        generation.check()?;
        let (max_tokens, logprobs) = (max_tokens(request)?, logprobs(request)?);
        let tools = RequestedTools::of(request, loaded)?;
        let grammar = match (&generation.response_format, &tools) {
            (format, Some(tools)) => tools.grammar(format.as_ref(), loaded)?,
            (Some(format), None) => Grammar::of(format, loaded)?,
            (None, None) => None,
        };
        if request.modalities.as_ref().is_some_and(|kinds| kinds.iter().any(|kind| kind != "text")) {
            return Err(ApiError::field("modalities", "answers are text: only [\"text\"]"));
        }
        let mut variables = request.chat_template_kwargs.clone().unwrap_or_default();
        if let Some(effort) = &request.reasoning_effort {
            match loaded.template()?.mentions("reasoning_effort") {
                true => drop(variables.entry("reasoning_effort").or_insert_with(|| effort.as_str().into())),
                false => {
                    tracing::info!("the chat template has no reasoning_effort, which has no effect then")
                }
            }
        }
        let Encoded { tokens: prompt, reasons } =
            encode(&request.messages, tools.as_ref(), variables, loaded, work)?;
        // An answer that a grammar restricts from its start on does not reason.
        let marks = Marks::of(loaded.template()?).filter(|_| reasons || grammar.is_none());
        let reader = || Reader {
            splitter: marks.map(|marks| ReasoningSplitter::new(marks, reasons)),
            parser: tools.as_ref().map(RequestedTools::parser),
            ..Reader::default()
        };
        let readers = (0..generation.n).map(|_| reader()).collect();
        Ok((Job { prompts: vec![prompt], generation, max_tokens, logprobs, grammar }, Self { readers }))
    }

    fn choice(&self, index: usize) -> ChatChoice {
        let message = AnswerMessage {
            role: Role::Assistant,
            content: None,
            reasoning_content: None,
            tool_calls: Vec::new(),
            refusal: None,
        };
        ChatChoice { index, message, logprobs: None, finish_reason: None }
    }

    fn add(&mut self, choice: &mut ChatChoice, piece: Piece) {
        let content = self.readers[piece.index].read(&piece);
        let message = &mut choice.message;
        message.content.get_or_insert_default().push_str(&content.text);
        if !content.reasoning.is_empty() {
            message.reasoning_content.get_or_insert_default().push_str(&content.reasoning);
        }
        message.tool_calls.extend(content.calls.into_iter().map(|call| ToolCall { index: None, ..call }));
        if !piece.tokens.is_empty() {
            choice.logprobs.get_or_insert_default().content.extend(piece.tokens.into_iter().map(logprob));
        }
        choice.finish_reason = content.finish;
        if choice.finish_reason.is_some() && !message.tool_calls.is_empty() {
            message.content = message.content.take().filter(|text| !text.is_empty());
        }
    }

    fn answer(header: Header, choices: Vec<ChatChoice>, usage: Usage) -> ChatCompletion {
        let Header { id, created, model, fingerprint } = header;
        let system_fingerprint = fingerprint;
        ChatCompletion { id, object: "chat.completion", created, model, choices, usage, system_fingerprint }
    }

    fn events(&mut self, header: &Header, piece: Piece) -> Vec<ChatChunk> {
        let index = piece.index;
        let reader = &mut self.readers[index];
        let content = reader.read(&piece);
        let mut chunks = Vec::new();
        let mut add = |delta, logprobs, finish_reason| {
            let choice = ChatChunkChoice { index, delta, logprobs, finish_reason };
            chunks.push(chunk(header, vec![choice], None));
        };
        if !std::mem::replace(&mut reader.introduced, true) {
            let content = Some(String::new());
            let delta = Delta { role: Some(Role::Assistant), content, ..Delta::default() };
            add(delta, None, None);
        }
        let logprobs = (!piece.tokens.is_empty())
            .then(|| ChatLogprobs { content: piece.tokens.into_iter().map(logprob).collect() });
        if !content.reasoning.is_empty() {
            add(Delta { reasoning_content: Some(content.reasoning), ..Delta::default() }, None, None);
        }
        if !content.text.is_empty() || logprobs.is_some() {
            add(Delta { content: Some(content.text), ..Delta::default() }, logprobs, None);
        }
        if !content.calls.is_empty() {
            add(Delta { tool_calls: content.calls, ..Delta::default() }, None, None);
        }
        if content.finish.is_some() {
            add(Delta::default(), None, content.finish);
        }
        chunks
    }

    fn usage_event(header: &Header, usage: Usage) -> ChatChunk {
        chunk(header, Vec::new(), Some(usage))
    }
}

/// The most tokens of an answer, by either of its names.
fn max_tokens(request: &ChatRequest) -> Result<Option<usize>, ApiError> {
    match (request.max_completion_tokens, request.max_tokens) {
        (Some(new), Some(old)) if new != old => {
            Err(ApiError::field("max_tokens", "differs from max_completion_tokens: give one of them"))
        }
        (new, old) => Ok(new.or(old)),
    }
}

/// The number of top tokens to report with their probabilities; `None` to report no probabilities.
fn logprobs(request: &ChatRequest) -> Result<Option<usize>, ApiError> {
    let logprobs = match (request.logprobs, request.top_logprobs) {
        (Some(true), top) => Some(top.unwrap_or(0)),
        (_, Some(_)) => return Err(ApiError::field("top_logprobs", "only together with logprobs")),
        (_, None) => None,
    };
    if logprobs > Some(MAX_TOP) {
        return Err(ApiError::field("top_logprobs", format!("must be at most {MAX_TOP}")));
    }
    Ok(logprobs)
}

fn chunk(header: &Header, choices: Vec<ChatChunkChoice>, usage: Option<Usage>) -> ChatChunk {
    let Header { id, created, model, fingerprint: system_fingerprint } = header.clone();
    ChatChunk { id, object: "chat.completion.chunk", created, model, choices, usage, system_fingerprint }
}

fn logprob(token: Token) -> ChatTokenLogprob {
    ChatTokenLogprob { chosen: token.chosen, top_logprobs: token.top }
}
