//! `/v1/chat/completions`.

use super::{
    api::{
        Finish, ResponseFormat,
        chat::{
            AnswerMessage, CallType, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatLogprobs,
            ChatMessage, ChatRequest, ChatTokenLogprob, Delta, Function, FunctionCall, NamedTool, Role, Tool,
            ToolCall, ToolChoice, ToolMode,
        },
    },
    app::{App, Loaded},
    body::read_json,
    error::ApiError,
    events,
    generation::{Answers, Job, MAX_TOP, Piece},
    grammar::Grammar,
    text::Token,
    tools::{Part, ToolFormat, ToolParser},
};
use axum::{
    Json,
    body::Body,
    extract::State,
    http::Request,
    response::{IntoResponse, Response},
};
use dsrun_models::chat::{Message, RenderOptions};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The most tools of a request.
const MAX_TOOLS: usize = 128;
/// The most characters of a tool's name.
const MAX_NAME: usize = 64;

pub(crate) async fn chat(State(app): State<Arc<App>>, request: Request<Body>) -> Result<Response, ApiError> {
    let loaded = app.ready()?;
    let request: ChatRequest = read_json(request, app.limits.body).await?;
    app.check_model(&request.model)?;
    let prepared = loaded.clone();
    let (job, parsers) = app.blocking(move || prepare(&request, &prepared)).await?;
    let stream = job.generation.stream.then_some(job.generation.include_usage);
    let chat = Chat { id: events::id("chatcmpl"), created: events::now(), model: app.name.clone() };
    let answers = job.submit(&app, &loaded)?;
    match stream {
        Some(include_usage) => Ok(chat.stream(answers, parsers, include_usage)),
        None => chat.whole(answers, parsers).await,
    }
}

/// From a request to what is to be generated, and what reads calls in the answers.
fn prepare(request: &ChatRequest, loaded: &Loaded) -> Result<(Job, Vec<ToolParser>), ApiError> {
    let generation = request.generation();
    generation.check()?;
    let max_tokens = match (request.max_completion_tokens, request.max_tokens) {
        (Some(new), Some(old)) if new != old => {
            return Err(ApiError::field(
                "max_tokens",
                "differs from max_completion_tokens: give one of them",
            ));
        }
        (new, old) => new.or(old),
    };
    let logprobs = match (request.logprobs, request.top_logprobs) {
        (Some(true), top) => Some(top.unwrap_or(0)),
        (_, Some(_)) => return Err(ApiError::field("top_logprobs", "only together with logprobs")),
        (_, None) => None,
    };
    if logprobs > Some(MAX_TOP) {
        return Err(ApiError::field("top_logprobs", format!("must be at most {MAX_TOP}")));
    }
    let tools = Tools::of(request, loaded)?;
    let grammar = match (&generation.response_format, &tools) {
        (Some(format), None) => Grammar::of(format, loaded)?,
        (None | Some(ResponseFormat::Text), Some(tools)) => tools.grammar(loaded)?,
        (Some(_), Some(_)) => {
            return Err(ApiError::field(
                "response_format",
                "not together with tools, unless tool_choice is none",
            ));
        }
        (None, None) => None,
    };
    let variables = request.chat_template_kwargs.clone().unwrap_or_default();
    let prompt = encode(&request.messages, tools.as_ref().map(|tools| &*tools.all), variables, loaded)?;
    let parsers = tools.iter().flat_map(|tools| (0..generation.n).map(|_| tools.parser())).collect();
    Ok((Job { prompts: vec![prompt], generation, max_tokens, logprobs, grammar }, parsers))
}

/// A conversation as tokens, in the model's own form.
pub(crate) fn encode(
    messages: &[ChatMessage],
    tools: Option<&[Tool]>,
    variables: Map<String, Value>,
    loaded: &Loaded,
) -> Result<Vec<u32>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field("messages", "there must be at least one"));
    }
    let written = messages.iter().enumerate().map(|(index, message)| as_message(index, message));
    let options = RenderOptions {
        add_generation_prompt: true,
        // Tools are made of texts and JSON: they are always written.
        tools: tools.map(|tools| tools.iter().map(|tool| json!(tool)).collect()),
        variables,
        ..RenderOptions::default()
    };
    let tokenizer = loaded.tokenizer()?;
    let prompt = loaded
        .template()?
        .prompt(tokenizer, &written.collect::<Result<Vec<_>, _>>()?, &options)
        .map_err(|error| ApiError::field("messages", error.to_string()))?;
    prompt.encode(tokenizer).map_err(|error| ApiError::field("messages", error.to_string()))
}

/// A message as templates see it.
fn as_message(index: usize, message: &ChatMessage) -> Result<Message, ApiError> {
    let field = |name: &str| format!("messages[{index}].{name}");
    let mut other = Map::new();
    let texts = [
        ("name", &message.name),
        ("tool_call_id", &message.tool_call_id),
        ("reasoning_content", &message.reasoning_content),
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
            // Templates want the arguments as what they are, not as a text.
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
    } else if message.content.is_none() && message.refusal.is_none() {
        return Err(ApiError::field(field("content"), "must be given"));
    }
    let content =
        message.content.as_ref().map(super::api::chat::Content::text).or_else(|| message.refusal.clone());
    let content = Some(content.map_or_else(|| Value::from(""), Value::from));
    Ok(Message { role: message.role.name().to_owned(), content, other })
}

/// What the model may call, and whether it has to.
struct Tools {
    all: Vec<Tool>,
    format: ToolFormat,
    /// The indices of those of which one has to be called.
    required: Option<Vec<usize>>,
    several: bool,
}

impl Tools {
    /// The tools of a request, unless it has none or wants none called.
    fn of(request: &ChatRequest, loaded: &Loaded) -> Result<Option<Self>, ApiError> {
        let all = request.tools.clone().unwrap_or_default();
        let choice = request.tool_choice.clone();
        if all.is_empty() {
            return match choice {
                None | Some(ToolChoice::Mode(ToolMode::None | ToolMode::Auto)) => Ok(None),
                Some(_) => Err(ApiError::field("tool_choice", "there are no tools to call")),
            };
        }
        if all.len() > MAX_TOOLS {
            return Err(ApiError::field("tools", format!("at most {MAX_TOOLS}")));
        }
        for (index, Tool::Function { function }) in all.iter().enumerate() {
            check_name(index, &function.name)?;
        }
        let named = |name: &str| all.iter().position(|Tool::Function { function }| function.name == name);
        let required = match choice {
            Some(ToolChoice::Mode(ToolMode::None)) => return Ok(None),
            None | Some(ToolChoice::Mode(ToolMode::Auto)) => None,
            Some(ToolChoice::Mode(ToolMode::Required)) => Some((0..all.len()).collect()),
            Some(ToolChoice::Named(NamedTool::Function { function })) => {
                let unknown =
                    || ApiError::field("tool_choice", format!("there is no tool {:?}", function.name));
                Some(vec![named(&function.name).ok_or_else(unknown)?])
            }
        };
        if required.is_none()
            && let Some(index) =
                all.iter().position(|Tool::Function { function }| function.strict == Some(true))
        {
            let message = "arguments are held to the schema only where a call is required: set tool_choice";
            return Err(ApiError::field(format!("tools[{index}].function.strict"), message));
        }
        let format = loaded.tool_format()?.ok_or_else(|| {
            ApiError::field(
                "tools",
                "the model's chat template knows no tools; --chat-template gives it another",
            )
        })?;
        Ok(Some(Self { all, format, required, several: request.parallel_tool_calls.unwrap_or(true) }))
    }

    /// What keeps answers to calls, if calls are required.
    fn grammar(&self, loaded: &Loaded) -> Result<Option<Grammar>, ApiError> {
        let Some(required) = &self.required else { return Ok(None) };
        let functions: Vec<&Function> = required
            .iter()
            .map(|index| &self.all[*index])
            .map(|Tool::Function { function }| function)
            .collect();
        // Who names a tool wants it called once.
        let several = self.several && functions.len() > 1;
        Grammar::lark(self.format.grammar(&functions, several), loaded, "tools").map(Some)
    }

    fn parser(&self) -> ToolParser {
        let names = self.all.iter().map(|Tool::Function { function }| function.name.clone()).collect();
        let limit = if self.several { usize::MAX } else { 1 };
        ToolParser::new(self.format, names, limit)
    }
}

fn check_name(index: usize, name: &str) -> Result<(), ApiError> {
    let allowed = |character: char| character.is_ascii_alphanumeric() || "_-.".contains(character);
    if (1..=MAX_NAME).contains(&name.len()) && name.chars().all(allowed) {
        return Ok(());
    }
    let rule = format!("must be 1 to {MAX_NAME} letters, digits, _, - or .");
    Err(ApiError::field(format!("tools[{index}].function.name"), rule))
}

/// What all parts of a response say about it.
struct Chat {
    id: String,
    created: u64,
    model: String,
}

/// One choice as its pieces come: text and calls told apart.
struct Reader {
    parser: Option<ToolParser>,
    calls: usize,
}

/// What a piece brings.
#[derive(Default)]
struct News {
    text: String,
    calls: Vec<ToolCall>,
}

impl Reader {
    fn read(&mut self, piece: &Piece) -> News {
        let Some(parser) = &mut self.parser else {
            return News { text: piece.text.clone(), calls: Vec::new() };
        };
        let mut parts = parser.push(&piece.text);
        if piece.finish.is_some() {
            parts.extend(parser.finish());
        }
        let mut news = News::default();
        for part in parts {
            match part {
                Part::Text(text) => news.text.push_str(&text),
                Part::Call { name, arguments } => {
                    news.calls.push(ToolCall {
                        index: Some(self.calls),
                        id: events::id("call"),
                        r#type: CallType::Function,
                        function: FunctionCall { name, arguments },
                    });
                    self.calls += 1;
                }
            }
        }
        news
    }

    /// Why the choice ended, in the end.
    fn finish(&self, finish: Finish) -> Finish {
        if finish == Finish::Stop && self.calls > 0 { Finish::ToolCalls } else { finish }
    }
}

fn readers(parsers: Vec<ToolParser>) -> impl FnMut(usize) -> Reader {
    let mut parsers = parsers.into_iter().map(Some).collect::<Vec<_>>();
    move |index| Reader { parser: parsers.get_mut(index).and_then(Option::take), calls: 0 }
}

impl Chat {
    /// The answers as a whole.
    async fn whole(self, mut answers: Answers, parsers: Vec<ToolParser>) -> Result<Response, ApiError> {
        let mut reader_of = readers(parsers);
        let mut readers = Vec::new();
        let mut choices: Vec<ChatChoice> = Vec::new();
        while let Some(piece) = answers.next().await {
            let piece = piece?;
            while choices.len() <= piece.index {
                readers.push(reader_of(choices.len()));
                choices.push(ChatChoice {
                    index: choices.len(),
                    message: AnswerMessage {
                        role: Role::Assistant,
                        content: None,
                        tool_calls: Vec::new(),
                        refusal: None,
                    },
                    logprobs: None,
                    finish_reason: None,
                });
            }
            let (choice, reader) = (&mut choices[piece.index], &mut readers[piece.index]);
            let news = reader.read(&piece);
            choice.message.content.get_or_insert_default().push_str(&news.text);
            choice
                .message
                .tool_calls
                .extend(news.calls.into_iter().map(|call| ToolCall { index: None, ..call }));
            if !piece.tokens.is_empty() {
                choice.logprobs.get_or_insert_default().content.extend(piece.tokens.into_iter().map(logprob));
            }
            choice.finish_reason = piece.finish.map(|finish| reader.finish(finish));
            let message = &mut choice.message;
            if choice.finish_reason.is_some() && !message.tool_calls.is_empty() {
                message.content = message.content.take().filter(|text| !text.is_empty());
            }
        }
        let completion = ChatCompletion {
            id: self.id,
            object: "chat.completion",
            created: self.created,
            model: self.model,
            choices,
            usage: answers.usage(),
        };
        Ok(Json(completion).into_response())
    }

    /// The answers piece by piece.
    fn stream(self, answers: Answers, parsers: Vec<ToolParser>, include_usage: bool) -> Response {
        let mut reader_of = readers(parsers);
        let mut readers: Vec<Reader> = Vec::new();
        let mut introduced: Vec<bool> = Vec::new();
        let chunk = move |choices, usage| ChatChunk {
            id: self.id.clone(),
            object: "chat.completion.chunk",
            created: self.created,
            model: self.model.clone(),
            choices,
            usage,
        };
        events::stream(answers, include_usage, move |news| {
            let piece = match news {
                events::News::Usage(usage) => return vec![chunk(Vec::new(), Some(usage))],
                events::News::Piece(piece) => piece,
            };
            while readers.len() <= piece.index {
                readers.push(reader_of(readers.len()));
                introduced.push(false);
            }
            let reader = &mut readers[piece.index];
            let news = reader.read(&piece);
            let finish_reason = piece.finish.map(|finish| reader.finish(finish));
            let index = piece.index;
            let mut chunks = Vec::new();
            let mut add = |delta, logprobs, finish_reason| {
                let choice = ChatChunkChoice { index, delta, logprobs, finish_reason };
                chunks.push(chunk(vec![choice], None));
            };
            if !std::mem::replace(&mut introduced[index], true) {
                let delta = Delta {
                    role: Some(Role::Assistant),
                    content: Some(String::new()),
                    tool_calls: Vec::new(),
                };
                add(delta, None, None);
            }
            let logprobs = (!piece.tokens.is_empty())
                .then(|| ChatLogprobs { content: piece.tokens.into_iter().map(logprob).collect() });
            if !news.text.is_empty() || logprobs.is_some() {
                add(Delta { content: Some(news.text), ..Delta::default() }, logprobs, None);
            }
            if !news.calls.is_empty() {
                add(Delta { tool_calls: news.calls, ..Delta::default() }, None, None);
            }
            if finish_reason.is_some() {
                add(Delta::default(), None, finish_reason);
            }
            chunks
        })
    }
}

fn logprob(token: Token) -> ChatTokenLogprob {
    ChatTokenLogprob { chosen: token.chosen, top_logprobs: token.top }
}
