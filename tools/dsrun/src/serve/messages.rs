//! `/v1/messages`: chat completions in the form of Anthropic's API.

mod conversation;

use super::{
    api::{
        Finish, Usage,
        chat::ChatChoice,
        messages::{
            AnswerBlock, BlockDelta, MessageAnswer, MessageEnd, MessageEvent, MessagesRequest, MessagesUsage,
            StopReason, TokenCount,
        },
    },
    app::{App, Loaded},
    body::read_json,
    chat::{CallPiece, Chat, has_effort},
    endpoint::{Completion, Header, complete},
    error::ApiError,
    generation::{Job, Piece},
    intake::Work,
};
use axum::{
    Json,
    body::Body,
    extract::State,
    http::Request,
    response::{IntoResponse, Response},
};
use conversation::chat_request;
use serde_json::{Map, Value};
use std::{mem::take, sync::Arc};

pub(crate) async fn messages(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    complete::<Messages>(app, request).await.unwrap_or_else(ApiError::into_messages_response)
}

/// Counts the tokens of a request without answering it.
pub(crate) async fn count_tokens(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    let count = async {
        let loaded = app.ready()?;
        let (mut request, turn): (MessagesRequest, _) = read_json(request, &app.intake).await?;
        app.check_model(request.model.as_deref())?;
        request.max_tokens = Some(1);
        let count = move |work: &Work| {
            let (job, _) = Messages::prepare(&request, &loaded, work)?;
            Ok(TokenCount { input_tokens: job.prompts.iter().map(Vec::len).sum() })
        };
        app.prepare(turn, count).await.map_err(|error: ApiError| error.renamed(Messages::field))
    };
    count.await.map_or_else(ApiError::into_messages_response, |count| Json(count).into_response())
}

/// The answer to one request.
struct Messages {
    chat: Chat,
    stops: Vec<String>,
    /// The block of a streamed answer that is open.
    open: Option<OpenBlock>,
    /// Blocks of a streamed answer that have begun.
    blocks: usize,
    end: Option<MessageEnd>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenBlock {
    Thinking,
    Text,
    ToolUse,
}

impl Messages {
    /// The events that close the open block, if one is open.
    fn close(&mut self) -> Vec<MessageEvent> {
        let index = self.blocks.saturating_sub(1);
        let Some(open) = self.open.take() else { return Vec::new() };
        let signature = (open == OpenBlock::Thinking).then_some(MessageEvent::ContentBlockDelta {
            index,
            delta: BlockDelta::Signature { signature: "" },
        });
        signature.into_iter().chain([MessageEvent::ContentBlockStop { index }]).collect()
    }

    /// The events that begin a block.
    fn begin(&mut self, block: OpenBlock, content_block: AnswerBlock) -> Vec<MessageEvent> {
        let mut events = self.close();
        self.open = Some(block);
        events.push(MessageEvent::ContentBlockStart { index: self.blocks, content_block });
        self.blocks += 1;
        events
    }

    /// The events of a piece of a text or of reasoning.
    fn written(&mut self, block: OpenBlock, piece: String) -> Vec<MessageEvent> {
        if piece.is_empty() {
            return Vec::new();
        }
        let (empty, delta) = match block {
            OpenBlock::Thinking => (
                AnswerBlock::Thinking { thinking: String::new(), signature: "" },
                BlockDelta::Thinking { thinking: piece },
            ),
            _ => (AnswerBlock::Text { text: String::new() }, BlockDelta::Text { text: piece }),
        };
        let mut events = if self.open == Some(block) { Vec::new() } else { self.begin(block, empty) };
        events.push(MessageEvent::ContentBlockDelta { index: self.blocks - 1, delta });
        events
    }

    /// The events of a piece of a call.
    fn called(&mut self, call: CallPiece) -> Vec<MessageEvent> {
        let mut events = Vec::new();
        if let Some((id, name)) = call.begins {
            let input = Value::Object(Map::new());
            events = self.begin(OpenBlock::ToolUse, AnswerBlock::ToolUse { id, name, input });
        }
        if !call.arguments.is_empty() {
            let delta = BlockDelta::InputJson { partial_json: call.arguments };
            events.push(MessageEvent::ContentBlockDelta { index: self.blocks.saturating_sub(1), delta });
        }
        events
    }
}

impl Completion for Messages {
    type Request = MessagesRequest;
    type Choice = ChatChoice;
    type Answer = MessageAnswer;
    type Event = MessageEvent;

    const ID_PREFIX: &'static str = "msg";
    const ENDS_WITH_DONE: bool = false;

    fn model(request: &MessagesRequest) -> Option<&str> {
        request.model.as_deref()
    }

    fn field(field: &str) -> String {
        if field == "stop" {
            return "stop_sequences".to_owned();
        }
        field.replacen(".function.parameters", ".input_schema", 1).replacen(".function.", ".", 1)
    }

    fn without_effect(request: &MessagesRequest, loaded: &Loaded) -> Vec<&'static str> {
        let effort = request.output_config.as_ref().is_some_and(|config| config.effort.is_some());
        let given = [
            ("cache_control", request.cache_control.is_some()),
            ("context_management", request.context_management.is_some()),
            ("metadata", request.metadata.is_some()),
            ("output_config.effort", effort && !has_effort(loaded)),
            ("service_tier", request.service_tier.is_some()),
        ];
        given.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }

    fn prepare(request: &MessagesRequest, loaded: &Loaded, work: &Work) -> Result<(Job, Self), ApiError> {
        let most = request.max_tokens.ok_or_else(|| ApiError::field("max_tokens", "must be given"))?;
        let (mut job, chat) = Chat::prepare(&chat_request(request, loaded)?, loaded, work)?;
        // Clients ask for as many as a large model can write.
        job.max_tokens = Some(most).filter(|most| *most <= loaded.engine.limits().context);
        let stops = request.stop_sequences.clone().unwrap_or_default();
        Ok((job, Self { chat, stops, open: None, blocks: 0, end: None }))
    }

    fn choice(&self, index: usize) -> ChatChoice {
        self.chat.choice(index)
    }

    fn add(&mut self, choice: &mut ChatChoice, piece: Piece) {
        let stop = piece.stop;
        self.chat.add(choice, piece);
        self.end = choice.finish_reason.map(|finish| end(finish, stop, &self.stops));
    }

    fn answer(mut self, header: Header, choices: Vec<ChatChoice>, usage: Usage) -> MessageAnswer {
        let mut content = Vec::new();
        for choice in choices {
            let message = choice.message;
            let thinking = message.reasoning_content.filter(|text| !text.is_empty());
            content.extend(thinking.map(|thinking| AnswerBlock::Thinking { thinking, signature: "" }));
            let text = message.content.filter(|text| !text.is_empty());
            content.extend(text.map(|text| AnswerBlock::Text { text }));
            content.extend(message.tool_calls.into_iter().map(|call| {
                // Arguments that a limit cut off are no JSON.
                let input = serde_json::from_str(&call.function.arguments);
                let input = input.unwrap_or_else(|_| Value::Object(Map::new()));
                AnswerBlock::ToolUse { id: call.id, name: call.function.name, input }
            }));
        }
        message(&header, content, self.end.take(), usage)
    }

    fn opening(&mut self, header: &Header, usage: Usage) -> Vec<MessageEvent> {
        vec![MessageEvent::MessageStart { message: message(header, Vec::new(), None, usage) }]
    }

    fn events(&mut self, _: &Header, piece: Piece) -> Vec<MessageEvent> {
        let stop = piece.stop;
        let content = self.chat.read(&piece);
        let mut events = self.written(OpenBlock::Thinking, content.reasoning);
        events.extend(self.written(OpenBlock::Text, content.text));
        for call in content.calls {
            events.extend(self.called(call));
        }
        if let Some(finish) = content.finish {
            self.end = Some(end(finish, stop, &self.stops));
            events.extend(self.close());
        }
        events
    }

    fn closing(&mut self, _: &Header, used: Usage, _: bool) -> Vec<MessageEvent> {
        let delta = take(&mut self.end).unwrap_or(MessageEnd { stop_reason: None, stop_sequence: None });
        vec![MessageEvent::MessageDelta { delta, usage: usage(used) }, MessageEvent::MessageStop]
    }

    fn failed(&mut self, _: &Header, error: &ApiError) -> Option<Vec<MessageEvent>> {
        Some(vec![MessageEvent::Error { error: error.messages_body().error }])
    }

    fn event_name(event: &MessageEvent) -> Option<&str> {
        Some(event.name())
    }
}

/// An answer with this content.
fn message(
    header: &Header,
    content: Vec<AnswerBlock>,
    end: Option<MessageEnd>,
    used: Usage,
) -> MessageAnswer {
    let Header { id, model, .. } = header.clone();
    let (stop_reason, stop_sequence) = end.map_or((None, None), |end| (end.stop_reason, end.stop_sequence));
    let usage = usage(used);
    MessageAnswer {
        id,
        r#type: "message",
        role: "assistant",
        model,
        content,
        stop_reason,
        stop_sequence,
        usage,
    }
}

/// The end of an answer, by the stop sequence of this index if one ended it.
fn end(finish: Finish, stop: Option<usize>, stops: &[String]) -> MessageEnd {
    let stop_sequence = stop.and_then(|index| stops.get(index)).filter(|_| finish == Finish::Stop).cloned();
    let stop_reason = match finish {
        Finish::Length => StopReason::MaxTokens,
        Finish::ToolCalls => StopReason::ToolUse,
        Finish::Stop if stop_sequence.is_some() => StopReason::StopSequence,
        Finish::Stop => StopReason::EndTurn,
    };
    MessageEnd { stop_reason: Some(stop_reason), stop_sequence }
}

fn usage(usage: Usage) -> MessagesUsage {
    let cached = usage.prompt_tokens_details.cached_tokens;
    MessagesUsage {
        input_tokens: usage.prompt_tokens.saturating_sub(cached),
        output_tokens: usage.completion_tokens,
        cache_read_input_tokens: cached,
        cache_creation_input_tokens: 0,
    }
}
