//! The path of a completion from its request to its answer. All kinds of completion share it; each says how its request is read and
//! how its answers are written.

use super::{
    access::ClientId,
    api::Usage,
    app::{App, Loaded},
    body::read_json,
    error::ApiError,
    events,
    generation::{Answers, Job, Piece},
    intake::{Turn, Work},
    traces::RequestTrace,
    unsent::Unsent,
};
use axum::{
    Json,
    body::Body,
    http::Request,
    response::{IntoResponse, Response, sse::Event},
};
use serde::{Serialize, de::DeserializeOwned};
use std::sync::Arc;

/// A kind of completion. A value holds what the answers to one request need.
pub(super) trait Completion: Send + Sized + 'static {
    /// The body of a request.
    type Request: Send + 'static;
    /// One choice of a complete answer.
    type Choice: Send;
    /// The body of a complete answer.
    type Answer: Serialize;
    /// An event of a streamed answer.
    type Event: Serialize;

    /// The beginning of response ids.
    const ID_PREFIX: &'static str;

    /// Whether a stream ends with `[DONE]`.
    const ENDS_WITH_DONE: bool = true;

    /// The name of the operation in traces.
    const OPERATION: &'static str = "chat";

    /// The model that a request asks for, if it does.
    fn model(request: &Self::Request) -> Option<&str>;

    /// The given fields of a request that have no effect.
    fn without_effect(request: &Self::Request, loaded: &Loaded) -> Vec<&'static str>;

    /// The name that this API has for a field of chats and completions, which errors name.
    fn field(field: &str) -> String {
        field.to_owned()
    }

    /// Checks a request, and turns it into a job.
    ///
    /// # Errors
    /// Names the field that is wrong.
    fn prepare(request: &Self::Request, loaded: &Loaded, work: &Work) -> Result<(Job, Self), ApiError>;

    /// A choice of a complete answer before its first piece.
    fn choice(&self, index: usize) -> Self::Choice;

    /// Adds a piece to its choice.
    fn add(&mut self, choice: &mut Self::Choice, piece: Piece);

    /// A complete answer.
    fn answer(self, header: Header, choices: Vec<Self::Choice>, usage: Usage) -> Self::Answer;

    /// The events before the first piece. The usage has the tokens of the prompt.
    fn opening(&mut self, header: &Header, usage: Usage) -> Vec<Self::Event> {
        let _ = (header, usage);
        Vec::new()
    }

    /// The events of a piece.
    fn events(&mut self, header: &Header, piece: Piece) -> Vec<Self::Event>;

    /// The events after the last piece. `include_usage` is what the request says about the usage.
    fn closing(&mut self, header: &Header, usage: Usage, include_usage: bool) -> Vec<Self::Event>;

    /// The events of an error in the middle of a stream, if they are not just its body.
    fn failed(&mut self, header: &Header, error: &ApiError) -> Option<Vec<Self::Event>> {
        let _ = (header, error);
        None
    }

    /// The name of an event, if events have names.
    fn event_name(event: &Self::Event) -> Option<&str> {
        let _ = event;
        None
    }
}

/// The fields that every part of a response has.
#[derive(Clone, Debug)]
pub(super) struct Header {
    pub(super) id: String,
    /// In seconds since 1970.
    pub(super) created: u64,
    pub(super) model: String,
    /// Equal for servers of equal version and configuration.
    pub(super) fingerprint: Arc<str>,
}

/// Serves a completion.
pub(super) async fn complete<C: Completion>(
    app: Arc<App>,
    request: Request<Body>,
) -> Result<Response, ApiError>
where
    C::Request: DeserializeOwned,
{
    let loaded = app.ready()?;
    let client = app.client(&request)?;
    let (request, turn): (C::Request, _) = read_json(request, &app.intake).await?;
    respond::<C>(app, loaded, client, request, turn).await
}

/// Responds to a request that was read.
pub(super) async fn respond<C: Completion>(
    app: Arc<App>,
    loaded: Arc<Loaded>,
    client: ClientId,
    request: C::Request,
    turn: Turn,
) -> Result<Response, ApiError> {
    app.check_model(C::model(&request))?;
    RequestTrace::current().operation(C::OPERATION, &app.name);
    let without_effect = C::without_effect(&request, &loaded);
    if let Some(field) = without_effect.first() {
        if app.strict_fields {
            return Err(ApiError::field(*field, "has no effect here, which --strict-fields refuses"));
        }
        tracing::info!(fields = ?without_effect, "a request has fields without effect");
    }
    let for_job = loaded.clone();
    let renamed = |error: ApiError| error.renamed(C::field);
    let prepared = app.prepare(turn, move |work| C::prepare(&request, &for_job, work)).await;
    let (job, completion) = prepared.map_err(renamed)?;
    app.keys.check_priority(client, job.generation.priority)?;
    let header = Header {
        id: events::id(C::ID_PREFIX),
        created: events::now(),
        model: app.name.clone(),
        fingerprint: loaded.fingerprint.clone(),
    };
    RequestTrace::current().set("gen_ai.response.id", Some(header.id.clone()));
    let (choices, generation) = (job.choices(), &job.generation);
    let stream = generation.stream.then_some(generation.include_usage);
    let answers = job.submit(&app, &loaded).map_err(renamed)?;
    match stream {
        Some(include_usage) => Ok(streamed(completion, header, answers, include_usage)),
        None => whole(completion, header, answers, choices, &app.unsent).await,
    }
}

/// Responds with the complete answers.
///
/// # Errors
/// If the engine fails, or all answers that are not sent yet have too many bytes.
async fn whole<C: Completion>(
    mut completion: C,
    header: Header,
    mut answers: Answers,
    count: usize,
    unsent: &Unsent,
) -> Result<Response, ApiError> {
    let mut held = unsent.start();
    let mut choices: Vec<C::Choice> = (0..count).map(|index| completion.choice(index)).collect();
    while let Some(piece) = answers.next().await {
        let piece = piece?;
        if !held.add(piece.bytes()) {
            return Err(ApiError::too_much_unsent());
        }
        let index = piece.index;
        completion.add(&mut choices[index], piece);
    }
    Ok(Json(completion.answer(header, choices, answers.usage())).into_response())
}

/// Responds with the answers piece by piece.
fn streamed<C: Completion>(completion: C, header: Header, answers: Answers, include_usage: bool) -> Response {
    events::stream(answers, Streamed { completion, header, include_usage })
}

/// Writes the events of a completion.
struct Streamed<C> {
    completion: C,
    header: Header,
    include_usage: bool,
}

impl<C: Completion> events::Script for Streamed<C> {
    const ENDS_WITH_DONE: bool = C::ENDS_WITH_DONE;

    fn open(&mut self, usage: Usage) -> Vec<Event> {
        written::<C>(&self.completion.opening(&self.header, usage))
    }

    fn piece(&mut self, piece: Piece) -> Vec<Event> {
        written::<C>(&self.completion.events(&self.header, piece))
    }

    fn close(&mut self, usage: Usage) -> Vec<Event> {
        written::<C>(&self.completion.closing(&self.header, usage, self.include_usage))
    }

    fn fail(&mut self, error: &ApiError) -> Vec<Event> {
        match self.completion.failed(&self.header, error) {
            Some(events) => written::<C>(&events),
            None => vec![events::event(None, &error.body())],
        }
    }
}

fn written<C: Completion>(events: &[C::Event]) -> Vec<Event> {
    events.iter().map(|event| events::event(C::event_name(event), event)).collect()
}
