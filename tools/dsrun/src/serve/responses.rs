//! `/v1/responses`: chat completions in the form of OpenAI's Responses API, with conversations that the server keeps.

mod conversation;
mod tools;

use super::{
    access::ClientId,
    api::{
        Finish, Usage,
        chat::{ChatMessage, Role},
        responses::{
            OutputItem, OutputPart, ResponseObject, ResponsesRequest, ResponsesTool, ResponsesUsage, Status,
            TextFormat,
        },
    },
    app::{App, Loaded},
    body::read_json,
    chat::{CallPiece, Chat, Content, has_effort},
    endpoint::{Completion, Header, respond},
    error::ApiError,
    events,
    generation::{Job, Piece},
    intake::Work,
    response_store::{ResponseStore, StoredResponse},
};
use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, State, rejection::PathRejection},
    http::Request,
    response::Response,
};
use conversation::{add_input, answer_message, chat_request};
use serde_json::{Map, Value, json};
use std::{mem::take, sync::Arc};

/// A request with the conversation that it continues.
struct Continued {
    request: ResponsesRequest,
    /// The conversation before the input of the request.
    before: Vec<ChatMessage>,
    store: Arc<ResponseStore>,
    client: ClientId,
}

pub(crate) async fn responses(
    State(app): State<Arc<App>>,
    Extension(client): Extension<ClientId>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let loaded = app.ready()?;
    let (request, turn): (ResponsesRequest, _) = read_json(request, &app.intake).await?;
    let mut before = Vec::new();
    if let Some(id) = &request.previous_response_id {
        let stored = app.responses.get(client, id);
        let stored = stored.ok_or_else(|| ApiError::no_such_response("previous_response_id", id))?;
        before.clone_from(&stored.conversation);
    }
    let request = Continued { request, before, store: app.responses.clone(), client };
    respond::<Responses>(app, loaded, client, request, turn).await
}

/// Returns a stored response.
pub(crate) async fn stored(
    State(app): State<Arc<App>>,
    Extension(client): Extension<ClientId>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ResponseObject>, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::not_a_path(&rejection))?;
    let stored = app.responses.get(client, &id);
    stored.map(|stored| Json(stored.response.clone())).ok_or_else(|| ApiError::no_such_response("id", &id))
}

/// Forgets a stored response.
pub(crate) async fn forget(
    State(app): State<Arc<App>>,
    Extension(client): Extension<ClientId>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::not_a_path(&rejection))?;
    match app.responses.delete(client, &id) {
        true => Ok(Json(json!({"id": id, "object": "response", "deleted": true}))),
        false => Err(ApiError::no_such_response("id", &id)),
    }
}

/// The answer to one request.
struct Responses {
    chat: Chat,
    request: ResponsesRequest,
    store: Arc<ResponseStore>,
    client: ClientId,
    /// The conversation, the input included.
    conversation: Vec<ChatMessage>,
    /// Items of the answer; the last one may still grow.
    output: Vec<OutputItem>,
    /// Whether the last item may still grow.
    open: bool,
    finish: Option<Finish>,
    /// Pieces of the answer that were reasoning.
    reasoning_tokens: usize,
    /// Events so far.
    sequence: usize,
}

impl Responses {
    /// An event of this type with these fields.
    fn event(&mut self, kind: &str, fields: Value) -> Value {
        let mut event = Map::new();
        event.insert("type".to_owned(), kind.into());
        event.insert("sequence_number".to_owned(), self.sequence.into());
        self.sequence += 1;
        if let Value::Object(fields) = fields {
            event.extend(fields);
        }
        Value::Object(event)
    }

    /// The response as far as it is known.
    fn response(&self, header: &Header, status: Status, usage: Option<Usage>) -> ResponseObject {
        let request = &self.request;
        let incomplete = status == Status::Incomplete;
        let format = request.text.as_ref().and_then(|text| text.format.as_ref());
        let format = match format {
            None | Some(TextFormat::Text) => json!({"type": "text"}),
            Some(TextFormat::JsonObject) => json!({"type": "json_object"}),
            Some(TextFormat::JsonSchema { name, schema, .. }) => {
                json!({"type": "json_schema", "name": name, "schema": schema, "strict": true})
            }
        };
        let effort = request.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_ref());
        ResponseObject {
            id: header.id.clone(),
            object: "response",
            created_at: header.created,
            status,
            error: None,
            incomplete_details: incomplete.then(|| json!({"reason": "max_output_tokens"})),
            instructions: request.instructions.clone(),
            max_output_tokens: request.max_output_tokens,
            metadata: request.metadata.clone().unwrap_or_else(|| json!({})),
            model: header.model.clone(),
            output: self.output.clone(),
            parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
            previous_response_id: request.previous_response_id.clone(),
            reasoning: json!({"effort": effort, "summary": null}),
            store: request.store.unwrap_or(true),
            temperature: request.temperature,
            text: json!({"format": format}),
            tool_choice: tools::given_choice(request.tool_choice.as_ref()),
            tools: request.tools.clone().unwrap_or_default(),
            top_p: request.top_p,
            truncation: "disabled",
            usage: usage.map(|usage| ResponsesUsage::new(usage, self.reasoning_tokens)),
        }
    }

    /// Ends the answer, and stores it if it is to be.
    fn finished(&mut self, header: &Header, usage: Usage) -> ResponseObject {
        let status = match self.finish {
            Some(Finish::Length) => Status::Incomplete,
            _ => Status::Completed,
        };
        let response = self.response(header, status, Some(usage));
        if response.store {
            let mut conversation = take(&mut self.conversation);
            conversation.push(answer_message(&self.output));
            self.store.keep(self.client, StoredResponse { conversation, response: response.clone() });
        }
        response
    }

    /// The index of the last item.
    fn last(&self) -> usize {
        self.output.len().saturating_sub(1)
    }

    /// Begins an item.
    fn begin(&mut self, item: OutputItem) -> Vec<Value> {
        let mut events = self.close();
        let (index, id) = (self.output.len(), item_id(&item).to_owned());
        // An item begins without its parts.
        events.push(
            self.event("response.output_item.added", json!({"output_index": index, "item": opened(&item)})),
        );
        if let Some(part) = first_part(&item) {
            let part = json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
            events.push(self.event("response.content_part.added", part));
        }
        self.output.push(item);
        self.open = true;
        events
    }

    /// Ends the last item, if it is open.
    fn close(&mut self) -> Vec<Value> {
        if !take(&mut self.open) {
            return Vec::new();
        }
        let index = self.last();
        let incomplete = self.finish == Some(Finish::Length);
        let ended = if incomplete { Status::Incomplete } else { Status::Completed };
        let Some(item) = self.output.last_mut() else { return Vec::new() };
        match item {
            OutputItem::Message { status, .. }
            | OutputItem::FunctionCall { status, .. }
            | OutputItem::Reasoning { status, .. } => *status = ended,
        }
        let item = item.clone();
        let id = item_id(&item).to_owned();
        let mut events = Vec::new();
        match &item {
            OutputItem::FunctionCall { name, arguments, .. } => {
                let done =
                    json!({"item_id": id, "output_index": index, "name": name, "arguments": arguments});
                events.push(self.event("response.function_call_arguments.done", done));
            }
            OutputItem::Message { content, .. } | OutputItem::Reasoning { content, .. } => {
                for part in content {
                    let (kind, text) = match part {
                        OutputPart::OutputText { text, .. } => ("response.output_text.done", text),
                        OutputPart::ReasoningText { text } => ("response.reasoning_text.done", text),
                    };
                    let mut done =
                        json!({"item_id": id, "output_index": index, "content_index": 0, "text": text});
                    if matches!(part, OutputPart::OutputText { .. }) {
                        done["logprobs"] = json!([]);
                    }
                    events.push(self.event(kind, done));
                    let done =
                        json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
                    events.push(self.event("response.content_part.done", done));
                }
            }
        }
        events.push(self.event("response.output_item.done", json!({"output_index": index, "item": item})));
        events
    }

    /// Adds a piece of the answer to its items.
    fn take_in(&mut self, content: Content) -> Vec<Value> {
        let mut events = Vec::new();
        if !content.reasoning.is_empty() {
            self.reasoning_tokens += 1;
            if !(self.open && matches!(self.output.last(), Some(OutputItem::Reasoning { .. }))) {
                let (id, content) =
                    (events::id("rs"), vec![OutputPart::ReasoningText { text: String::new() }]);
                let status = Status::InProgress;
                events.extend(self.begin(OutputItem::Reasoning { id, summary: Vec::new(), content, status }));
            }
            events.push(self.grow("response.reasoning_text.delta", &content.reasoning));
        }
        if !content.text.is_empty() {
            if !(self.open && matches!(self.output.last(), Some(OutputItem::Message { .. }))) {
                events.extend(self.begin(text_item()));
            }
            events.push(self.grow("response.output_text.delta", &content.text));
        }
        for CallPiece { begins, arguments, .. } in content.calls {
            if let Some((call_id, name)) = begins {
                let (id, status) = (events::id("fc"), Status::InProgress);
                let arguments = String::new();
                let (namespace, name) = tools::parts_of_name(self.request.tools(), &name);
                let call = OutputItem::FunctionCall { id, call_id, name, namespace, arguments, status };
                events.extend(self.begin(call));
            }
            if !arguments.is_empty() {
                events.push(self.grow("response.function_call_arguments.delta", &arguments));
            }
        }
        if content.finish.is_some() {
            self.finish = content.finish;
            // An answer without any text is one of an empty text.
            if self.output.is_empty() {
                events.extend(self.begin(text_item()));
            }
            events.extend(self.close());
        }
        events
    }

    /// Adds text to the last item, and returns the event of this type.
    fn grow(&mut self, kind: &str, delta: &str) -> Value {
        let index = self.last();
        let mut fields = json!({"output_index": index, "delta": delta});
        if let Some(item) = self.output.last_mut() {
            fields["item_id"] = item_id(item).into();
            match item {
                OutputItem::FunctionCall { arguments, .. } => arguments.push_str(delta),
                OutputItem::Message { content, .. } | OutputItem::Reasoning { content, .. } => {
                    fields["content_index"] = 0.into();
                    if let Some(OutputPart::OutputText { text, .. } | OutputPart::ReasoningText { text }) =
                        content.last_mut()
                    {
                        text.push_str(delta);
                    }
                }
            }
        }
        if kind == "response.output_text.delta" {
            fields["logprobs"] = json!([]);
        }
        self.event(kind, fields)
    }
}

impl Completion for Responses {
    type Request = Continued;
    type Choice = ();
    type Answer = ResponseObject;
    type Event = Value;

    const ID_PREFIX: &'static str = "resp";
    const ENDS_WITH_DONE: bool = false;

    fn model(continued: &Continued) -> Option<&str> {
        continued.request.model.as_deref()
    }

    fn field(field: &str) -> String {
        if field.starts_with("messages") {
            return "input".to_owned();
        }
        let names =
            [("max_tokens", "max_output_tokens"), ("response_format", "text.format"), (".function.", ".")];
        names.into_iter().fold(field.to_owned(), |field, (from, to)| field.replacen(from, to, 1))
    }

    fn without_effect(Continued { request, .. }: &Continued, loaded: &Loaded) -> Vec<&'static str> {
        let tools = || request.tools().iter();
        let deferred =
            tools::functions(request.tools()).any(|(_, function, _)| function.defer_loading == Some(true));
        let is_described = |tool: &ResponsesTool| matches!(tool, ResponsesTool::Namespace(namespace) if namespace.description.is_some());
        let effort = request.reasoning.as_ref().is_some_and(|reasoning| reasoning.effort.is_some());
        let given = [
            ("client_metadata", request.client_metadata.is_some()),
            ("include", request.include.as_ref().is_some_and(|include| !include.is_empty())),
            ("max_tool_calls", request.max_tool_calls.is_some()),
            ("prompt_cache_key", request.prompt_cache_key.is_some()),
            ("prompt_cache_retention", request.prompt_cache_retention.is_some()),
            ("reasoning.effort", effort && !has_effort(loaded)),
            ("safety_identifier", request.safety_identifier.is_some()),
            ("service_tier", request.service_tier.is_some()),
            ("stream_options", request.stream_options.is_some()),
            ("text.verbosity", request.text.as_ref().is_some_and(|text| text.verbosity.is_some())),
            ("tools.defer_loading", deferred),
            ("tools.namespace.description", tools().any(is_described)),
            ("tools.image_generation", tools().any(|tool| matches!(tool, ResponsesTool::ImageGeneration {}))),
            ("tools.tool_search", tools().any(|tool| matches!(tool, ResponsesTool::ToolSearch {}))),
            ("tools.web_search", tools().any(|tool| matches!(tool, ResponsesTool::WebSearch {}))),
            ("truncation", request.truncation.as_deref() == Some("auto")),
            ("user", request.user.is_some()),
        ];
        given.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }

    fn prepare(continued: &Continued, loaded: &Loaded, work: &Work) -> Result<(Job, Self), ApiError> {
        let request = &continued.request;
        if request.background == Some(true) {
            return Err(ApiError::field(
                "background",
                "is not supported: leave it out, and stream the answer",
            ));
        }
        if let Some(other) = request.truncation.as_deref().filter(|how| !["auto", "disabled"].contains(how)) {
            return Err(ApiError::field(
                "truncation",
                format!("{other:?}: must be \"disabled\" or \"auto\""),
            ));
        }
        let mut conversation = continued.before.clone();
        add_input(&request.input, &mut conversation);
        let given = request.tools();
        let prepared = Chat::prepare(&chat_request(request, &conversation)?, loaded, work);
        let (job, chat) =
            prepared.map_err(|error| error.renamed(|field| tools::field_of_request(given, field)))?;
        let completion = Self {
            chat,
            request: request.clone(),
            store: continued.store.clone(),
            client: continued.client,
            conversation,
            output: Vec::new(),
            open: false,
            finish: None,
            reasoning_tokens: 0,
            sequence: 0,
        };
        Ok((job, completion))
    }

    fn choice(&self, _: usize) {}

    fn add(&mut self, _: &mut (), piece: Piece) {
        let content = self.chat.read(&piece);
        self.take_in(content);
    }

    fn answer(mut self, header: Header, _: Vec<()>, usage: Usage) -> ResponseObject {
        self.finished(&header, usage)
    }

    fn opening(&mut self, header: &Header, _: Usage) -> Vec<Value> {
        let response = json!({"response": self.response(header, Status::InProgress, None)});
        ["response.created", "response.in_progress"].map(|kind| self.event(kind, response.clone())).into()
    }

    fn events(&mut self, _: &Header, piece: Piece) -> Vec<Value> {
        let content = self.chat.read(&piece);
        self.take_in(content)
    }

    fn closing(&mut self, header: &Header, usage: Usage, _: bool) -> Vec<Value> {
        let response = self.finished(header, usage);
        let kind = match response.status {
            Status::Incomplete => "response.incomplete",
            _ => "response.completed",
        };
        vec![self.event(kind, json!({"response": response}))]
    }

    fn failed(&mut self, header: &Header, error: &ApiError) -> Option<Vec<Value>> {
        let mut response = self.response(header, Status::Failed, None);
        response.error = Some(json!({"code": error.name(), "message": error.message()}));
        Some(vec![self.event("response.failed", json!({"response": response}))])
    }

    fn event_name(event: &Value) -> Option<&str> {
        event["type"].as_str()
    }
}

/// An empty text.
fn text_item() -> OutputItem {
    let part = OutputPart::OutputText { text: String::new(), annotations: Vec::new(), logprobs: Vec::new() };
    let (id, content) = (events::id("msg"), vec![part]);
    OutputItem::Message { id, status: Status::InProgress, role: Role::Assistant, content }
}

fn item_id(item: &OutputItem) -> &str {
    match item {
        OutputItem::Message { id, .. }
        | OutputItem::FunctionCall { id, .. }
        | OutputItem::Reasoning { id, .. } => id,
    }
}

/// An item before its first part.
fn opened(item: &OutputItem) -> OutputItem {
    let mut item = item.clone();
    if let OutputItem::Message { content, .. } | OutputItem::Reasoning { content, .. } = &mut item {
        content.clear();
    }
    item
}

fn first_part(item: &OutputItem) -> Option<&OutputPart> {
    match item {
        OutputItem::Message { content, .. } | OutputItem::Reasoning { content, .. } => content.first(),
        OutputItem::FunctionCall { .. } => None,
    }
}
