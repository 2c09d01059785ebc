//! Paths with their handlers, and the layers around every request.

use super::{
    access::METRICS,
    access_log,
    api::{
        models::{ModelCard, ModelList},
        tokens::{DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse},
    },
    app::App,
    body::read_json,
    chat::{self, Ending, chat},
    completions::completions,
    connections::Peer,
    embeddings::embeddings,
    error::ApiError,
    intake::Work,
    messages::{count_tokens, messages},
    openapi::openapi,
    origins, page,
    replicas::{EngineHealth, Replicas},
    rerank::{rerank, score},
    responses::{forget, responses, stored},
    traces::trace,
    unsent,
};
use axum::{
    Extension, Json, Router,
    body::Body,
    extract::{MatchedPath, Path, State, rejection::PathRejection},
    http::{Method, Request, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use dsrun_models::tokenizer::EncodeOptions;
use serde_json::json;
use std::{any::Any, sync::Arc, time::Instant};
use tower_http::catch_panic::CatchPanicLayer;

/// Paths that clients ask for without `/v1` when their base URL lacks it.
const BELOW_V1: [&str; 8] = [
    "/chat/completions",
    "/completions",
    "/embeddings",
    "/models",
    "/responses",
    "/messages",
    "/rerank",
    "/score",
];

/// The router of the whole server.
pub(crate) fn router(app: Arc<App>) -> Router {
    // These paths need an API key, if the server has any.
    let guarded = Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/v1/responses", post(responses))
        .route("/v1/responses/{id}", get(stored).delete(forget))
        .route("/v1/embeddings", post(embeddings))
        .route("/v1/rerank", post(rerank))
        .route("/v2/rerank", post(rerank))
        .route("/rerank", post(rerank))
        .route("/v1/score", post(score))
        .route("/score", post(score))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route(METRICS, get(metrics))
        .route_layer(from_fn_with_state(app.clone(), guard));
    let mut open = Router::new()
        .route("/health/live", get(live))
        .route("/health/ready", get(ready))
        .route("/health", get(ready))
        .route("/version", get(version))
        .route("/openapi.json", get(openapi))
        .route("/", get(page::html))
        .route("/page.css", get(page::style));
    for (path, text) in page::SCRIPTS {
        open = open.route(path, get(move || async move { page::script(text) }));
    }
    around(app, guarded.merge(open))
}

/// Adds the layers around every request: requests are counted, and a panic ends its own request only.
pub(super) fn around(app: Arc<App>, routes: Router<Arc<App>>) -> Router {
    let panicked = {
        let metrics = app.metrics.clone();
        move |panic: Box<dyn Any + Send>| {
            metrics.panics.add(1);
            let message = panic.downcast_ref::<&str>().copied();
            let message =
                message.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or_default();
            tracing::error!(message, "a request ended in a panic");
            ApiError::internal().into_response()
        }
    };
    routes
        .fallback(|request: Request<Body>| async move {
            let path = request.uri().path();
            in_form_of(path, ApiError::no_such_path(path, &meant(path)))
        })
        .method_not_allowed_fallback(|request: Request<Body>| async move {
            in_form_of(request.uri().path(), ApiError::wrong_method())
        })
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(app.unsent.clone(), unsent::bound))
        .layer(from_fn_with_state(app.clone(), origins::guard))
        .layer(from_fn_with_state(app.clone(), count))
        .layer(from_fn_with_state(app.clone(), access_log::identify))
        .layer(from_fn_with_state(app.clone(), trace))
        .with_state(app)
}

/// An error about a path, in the form of the API that the path is of.
fn in_form_of(path: &str, error: ApiError) -> Response {
    if path.starts_with("/v1/messages") { error.into_messages_response() } else { error.into_response() }
}

/// A hint at the path that a client with a wrong base URL means.
fn meant(path: &str) -> String {
    let bare = path.trim_end_matches('/');
    if BELOW_V1.contains(&bare) {
        return format!("there is /v1{bare}: the base URL of OpenAI's clients ends in /v1");
    }
    match bare.strip_prefix("/v1").filter(|rest| rest.starts_with("/v1/") || BELOW_V1.contains(rest)) {
        Some(rest) if rest.starts_with("/v1/") => format!("there is {rest}: leave /v1 out of the base URL"),
        Some(_) => format!("there is {bare}, without a slash at the end"),
        None => "/openapi.json lists the paths".to_owned(),
    }
}

/// Checks the API key and the rate limit.
async fn guard(
    State(app): State<Arc<App>>,
    Extension(Peer(peer)): Extension<Peer>,
    mut request: Request<Body>,
    next: Next,
) -> Result<Response, ApiError> {
    let client = app.keys.identify(request.headers(), peer.ip())?;
    app.keys.check_path(client, request.uri().path())?;
    // The page and monitoring read often, which costs little: only work is limited.
    if let Some(rate) = app.rate.as_ref().filter(|_| request.method() == Method::POST) {
        rate.count(client, Instant::now())?;
    }
    request.extensions_mut().insert(client);
    Ok(next.run(request).await)
}

/// Counts requests. Unknown paths count as one path.
async fn count(State(app): State<Arc<App>>, request: Request<Body>, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let response = next.run(request).await;
    app.metrics.count_request(path.as_deref().unwrap_or("other"), response.status().as_u16());
    response
}

async fn live() -> Json<serde_json::Value> {
    Json(json!({"status": "live"}))
}

async fn version() -> Json<serde_json::Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn ready(State(app): State<Arc<App>>) -> Result<Json<serde_json::Value>, ApiError> {
    let engine = |health: &EngineHealth| json!({"serving": health.serving, "step_seconds": health.step_age.unwrap_or_default().as_secs_f64()});
    let engines: Vec<_> = app.health()?.iter().map(engine).collect();
    Ok(Json(json!({"status": "ready", "engines": engines})))
}

async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let unsent = app.unsent.bytes() + app.engine().map_or(0, Replicas::unread_bytes);
    let text = app.metrics.text(app.intake.pending_bytes(), unsent, app.engine());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

fn card(app: &App) -> Result<ModelCard, ApiError> {
    let loaded = app.ready()?;
    Ok(ModelCard {
        id: app.name.clone(),
        object: "model",
        created: loaded.created,
        owned_by: "dsrun",
        root: app.name.clone(),
        parent: None,
        max_model_len: loaded.engine.limits().context,
    })
}

async fn models(State(app): State<Arc<App>>) -> Result<Json<ModelList>, ApiError> {
    Ok(Json(ModelList { object: "list", data: vec![card(&app)?] }))
}

async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelCard>, ApiError> {
    let Path(name) = name.map_err(|rejection| ApiError::not_a_path(&rejection))?;
    app.check_model(Some(&name))?;
    Ok(Json(card(&app)?))
}

async fn tokenize(
    State(app): State<Arc<App>>,
    request: Request<Body>,
) -> Result<Json<TokenizeResponse>, ApiError> {
    let loaded = app.ready()?;
    let (request, turn): (TokenizeRequest, _) = read_json(request, &app.intake).await?;
    app.check_model(request.model.as_deref())?;
    let prepare = move |work: &Work| {
        let tokens = match (&request.prompt, &request.messages) {
            (Some(text), None) => {
                let add_special = request.add_special_tokens.unwrap_or(true);
                let options = EncodeOptions { add_special, parse_special: true };
                let tokens = loaded.tokenizer()?.encode(text, options);
                tokens.map_err(|error| ApiError::field("prompt", error.to_string()))?
            }
            (None, Some(_)) if request.add_special_tokens.is_some() => {
                let message = "the chat template decides for messages: give it only together with prompt";
                return Err(ApiError::field("add_special_tokens", message));
            }
            (None, Some(messages)) => {
                let ending = Ending::of(request.add_generation_prompt, request.continue_final_message)?;
                let variables = request.chat_template_kwargs.clone().unwrap_or_default();
                chat::encode(messages, None, variables, ending, &loaded, work)?.tokens
            }
            _ => return Err(ApiError::field("prompt", "give either prompt or messages")),
        };
        let max_model_len = loaded.engine.limits().context;
        let token_strs = match request.return_token_strs {
            Some(true) => {
                let tokenizer = loaded.tokenizer()?;
                let text = |id: &u32| tokenizer.id_to_token(*id).unwrap_or_default().to_owned();
                Some(tokens.iter().map(text).collect())
            }
            _ => None,
        };
        Ok(TokenizeResponse { count: tokens.len(), tokens, max_model_len, token_strs })
    };
    app.prepare(turn, prepare).await.map(Json)
}

async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request<Body>,
) -> Result<Json<DetokenizeResponse>, ApiError> {
    let loaded = app.ready()?;
    let (request, turn): (DetokenizeRequest, _) = read_json(request, &app.intake).await?;
    app.check_model(request.model.as_deref())?;
    let prepare = move |_: &Work| {
        let text = loaded.tokenizer()?.decode(&request.tokens, false);
        let prompt = text.map_err(|error| ApiError::field("tokens", error.to_string()))?;
        Ok(DetokenizeResponse { prompt })
    };
    app.prepare(turn, prepare).await.map(Json)
}
