//! `/v1/chat/completions`.

mod described_tools;
mod prompt;
#[cfg(test)]
mod replayed;
mod requested_tools;

use super::{
    api::{
        Finish, Form, Usage,
        chat::{
            AnswerMessage, CallType, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatLogprobs,
            ChatRequest, ChatTokenLogprob, Delta, FunctionCall, FunctionDelta, Role, ToolCall, ToolCallDelta,
        },
    },
    app::{App, Loaded},
    endpoint::{Completion, Header, complete},
    error::ApiError,
    events,
    generation::{Job, MAX_TOP, Piece},
    grammar::{self, Grammar},
    intake::Work,
    reasoning::{Marks, ReasoningSplitter},
    text::Token,
    tools::{Part, ToolFormat, ToolParser},
};
use axum::{body::Body, extract::State, http::Request, response::Response};
use dsrun_models::tokenizer::Tokenizer;
pub(crate) use prompt::{Encoded, Ending, encode};
use requested_tools::RequestedTools;
use std::sync::Arc;

pub(crate) async fn chat(State(app): State<Arc<App>>, request: Request<Body>) -> Result<Response, ApiError> {
    complete::<Chat>(app, request).await
}

/// The answers to one request.
pub(super) struct Chat {
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
    /// Whether an answer has nothing but tool calls and reasoning.
    only_calls: bool,
    /// Tool calls so far.
    calls: usize,
    /// The arguments of the last of them, as far as they are there.
    arguments: String,
    /// Whether the event with the role was sent.
    introduced: bool,
}

/// The content of a piece.
#[derive(Default)]
pub(super) struct Content {
    pub(super) reasoning: String,
    pub(super) text: String,
    pub(super) calls: Vec<CallPiece>,
    pub(super) finish: Option<Finish>,
}

/// A piece of a call.
pub(super) struct CallPiece {
    /// The index of the call in its answer.
    index: usize,
    /// The id and the name of the function, if the call begins.
    pub(super) begins: Option<(String, String)>,
    /// The next part of the arguments.
    pub(super) arguments: String,
}

impl Chat {
    /// Reads a piece of an answer.
    pub(super) fn read(&mut self, piece: &Piece) -> Content {
        self.readers[piece.index].read(piece)
    }
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
                    let mut rest = parser.finish();
                    // The beginning of a call that the limit on tokens cut off.
                    rest.retain(|part| !(self.only_calls && matches!(part, Part::Text(_))));
                    parts.extend(rest);
                }
                for part in parts {
                    match part {
                        Part::Text(text) => content.text.push_str(&text),
                        Part::Reasoning(text) => content.reasoning.push_str(&text),
                        Part::Begins { name } => {
                            self.arguments.clear();
                            let begins = Some((events::id("call"), name));
                            let (index, arguments) = (self.calls, String::new());
                            content.calls.push(CallPiece { index, begins, arguments });
                            self.calls += 1;
                        }
                        Part::Arguments(text) => {
                            self.arguments.push_str(&text);
                            match content.calls.last_mut() {
                                Some(call) => call.arguments.push_str(&text),
                                None => {
                                    let index = self.calls.saturating_sub(1);
                                    content.calls.push(CallPiece { index, begins: None, arguments: text });
                                }
                            }
                        }
                    }
                }
            }
        }
        content.finish = piece.finish.map(|finish| match finish {
            // A stop string may have cut a call off.
            Finish::Stop if self.calls > 0 && (piece.stop.is_none() || is_json(&self.arguments)) => {
                Finish::ToolCalls
            }
            finish => finish,
        });
        content
    }
}

/// Whether a text is a whole JSON value.
fn is_json(text: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

impl Completion for Chat {
    type Request = ChatRequest;
    type Choice = ChatChoice;
    type Answer = ChatCompletion;
    type Event = ChatChunk;

    const ID_PREFIX: &'static str = "chatcmpl";

    fn model(request: &ChatRequest) -> Option<&str> {
        request.model.as_deref()
    }

    fn without_effect(request: &ChatRequest, loaded: &Loaded) -> Vec<&'static str> {
        let mut fields = request.without_effect();
        let no_effort = request.reasoning_effort.is_some() && !has_effort(loaded);
        fields.extend(no_effort.then_some("reasoning_effort"));
        fields
    }

    fn prepare(request: &ChatRequest, loaded: &Loaded, work: &Work) -> Result<(Job, Self), ApiError> {
        let generation = request.generation()?;
        generation.check()?;
        let (max_tokens, logprobs) = (max_tokens(request)?, logprobs(request)?);
        let tools = RequestedTools::of(request, loaded)?;
        let tool_format = loaded.tool_format()?;
        let channels = tool_format.filter(|format| format.has_channels());
        let grammar = match (&generation.form, &tools) {
            (format, Some(tools)) => tools.grammar(format.as_ref(), loaded)?,
            (Some(format), None) => grammar_of(format, channels, loaded)?,
            (None, None) => None,
        };
        if request.modalities.as_ref().is_some_and(|kinds| kinds.iter().any(|kind| kind != "text")) {
            return Err(ApiError::field("modalities", "answers are text: only [\"text\"]"));
        }
        let mut variables = request.chat_template_kwargs.clone().unwrap_or_default();
        if let Some(effort) = request.reasoning_effort.as_ref().filter(|_| has_effort(loaded)) {
            variables.entry("reasoning_effort").or_insert_with(|| effort.as_str().into());
        }
        let ending = Ending::of(request.add_generation_prompt, request.continue_final_message)?;
        let Encoded { tokens: prompt, reasons } =
            encode(&request.messages, tools.as_ref(), variables, ending, loaded, work)?;
        // A form has no room for reasoning, unless the prompt opens it. Where a tool may be called, the model may open it.
        let reasoning = channels.is_none() && (reasons || tools.is_some() || grammar.is_none());
        let marks = Marks::of(loaded.template()?).filter(|_| reasoning);
        let grammar = match (grammar, marks) {
            (Some(grammar), Some(marks)) => Some(grammar.after_reasoning(marks, reasons, loaded)?),
            (grammar, _) => grammar,
        };
        let parser = || match (&tools, channels) {
            (Some(tools), _) => Some(tools.parser()),
            (None, Some(format)) => Some(ToolParser::new(format, Vec::new(), 0)),
            (None, None) => None,
        };
        let reader = || Reader {
            splitter: marks.map(|marks| ReasoningSplitter::new(marks, reasons)),
            parser: parser(),
            only_calls: tools.as_ref().is_some_and(RequestedTools::requires_call),
            ..Reader::default()
        };
        let readers = (0..generation.n).map(|_| reader()).collect();
        // Control tokens that a reader needs are part of the text.
        let written = marks.iter().flat_map(|marks| [marks.open, marks.close]);
        let format = if tools.is_some() { tool_format } else { channels };
        let written = written.chain(format.map(ToolFormat::marks).unwrap_or_default());
        let shown = shown_tokens(loaded.tokenizer()?, written);
        let job = Job { prompts: vec![prompt], generation, max_tokens, logprobs, grammar, shown };
        Ok((job, Self { readers }))
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
        for CallPiece { begins, arguments, .. } in content.calls {
            if let Some((id, name)) = begins {
                message.tool_calls.push(ToolCall {
                    index: None,
                    id,
                    r#type: CallType::Function,
                    function: FunctionCall { name, arguments: String::new(), parsed_arguments: None },
                    provider_specific_fields: None,
                });
            }
            if let Some(call) = message.tool_calls.last_mut() {
                call.function.arguments.push_str(&arguments);
            }
        }
        if !piece.tokens.is_empty() {
            choice.logprobs.get_or_insert_default().content.extend(piece.tokens.into_iter().map(logprob));
        }
        choice.finish_reason = content.finish;
        if choice.finish_reason.is_some() && !message.tool_calls.is_empty() {
            message.content = message.content.take().filter(|text| !text.is_empty());
        }
    }

    fn answer(self, header: Header, choices: Vec<ChatChoice>, usage: Usage) -> ChatCompletion {
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
        for CallPiece { index, begins, arguments } in content.calls {
            let (id, name) = begins.unzip();
            let r#type = id.is_some().then_some(CallType::Function);
            let call = ToolCallDelta { index, id, r#type, function: FunctionDelta { name, arguments } };
            add(Delta { tool_calls: vec![call], ..Delta::default() }, None, None);
        }
        if content.finish.is_some() {
            add(Delta::default(), None, content.finish);
        }
        chunks
    }

    fn closing(&mut self, header: &Header, usage: Usage, include_usage: bool) -> Vec<ChatChunk> {
        include_usage.then(|| chunk(header, Vec::new(), Some(usage))).into_iter().collect()
    }
}

/// Whether the chat template has the variable `reasoning_effort`.
pub(super) fn has_effort(loaded: &Loaded) -> bool {
    loaded.template().is_ok_and(|template| template.mentions("reasoning_effort"))
}

/// The grammar of a form without tools. On channels, it is the answer that follows the form.
fn grammar_of(
    form: &Form,
    channels: Option<ToolFormat>,
    loaded: &Loaded,
) -> Result<Option<Grammar>, ApiError> {
    let Some(format) = channels else { return Grammar::of(form, loaded) };
    let Some(rule) = grammar::rule(form)? else { return Ok(None) };
    match format.form(&rule, loaded.tokenizer()?) {
        Some(grammar) => Grammar::lark(grammar, loaded, &form.field).map(Some),
        None => Grammar::of(form, loaded),
    }
}

/// The control tokens among the marks, with their texts.
fn shown_tokens(tokenizer: &Tokenizer, marks: impl Iterator<Item = &'static str>) -> Arc<[(u32, String)]> {
    let token = |mark: &str| {
        let id = tokenizer.token_to_id(mark).filter(|id| tokenizer.is_special(*id))?;
        Some((id, mark.to_owned()))
    };
    marks.filter_map(token).collect()
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
        // Some clients always send it.
        (_, Some(0)) => None,
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
