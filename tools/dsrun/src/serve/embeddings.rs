//! `/v1/embeddings`.

use super::{
    api::embeddings::{
        Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage, EncodingFormat, Pooling, Vector,
    },
    app::{App, Loaded},
    body::read_json,
    error::ApiError,
    intake::Work,
    metrics::OpenAnswer,
    prompts::encode,
    traces::RequestTrace,
};
use axum::{Json, body::Body, extract::State, http::Request};
use base64::{Engine, prelude::BASE64_STANDARD};
use dsrun_models::sentence_transformers::{ShorterVectors, TextPooling};
use futures_util::{StreamExt, TryStreamExt, stream};
use std::{sync::Arc, time::Instant};
use tokio::time::timeout_at;

/// The most texts of a request. OpenAI's number.
pub(super) const MAX_INPUTS: usize = 2048;
/// The most texts of a request that wait or run at a time, so that a large request does not fill the queue.
const SIDE_BY_SIDE: usize = 32;

/// The pooling that the files of the model ask for; the mean if they do not say.
pub(super) fn own_pooling(loaded: &Loaded) -> dsrun_engine::Pooling {
    match loaded.model.embedding().map(|own| own.pooling) {
        None | Some(TextPooling::Mean) => dsrun_engine::Pooling::Mean,
        Some(TextPooling::First) => dsrun_engine::Pooling::First,
        Some(TextPooling::Last) => dsrun_engine::Pooling::Last,
    }
}

/// Computes the vectors or scores of texts.
///
/// # Errors
/// If one of the texts is not possible, the queue is full, or the answer takes too long.
pub(super) async fn compute(
    app: &App,
    loaded: &Loaded,
    inputs: Vec<dsrun_engine::EmbeddingRequest>,
    started: Instant,
) -> Result<Vec<Vec<f32>>, ApiError> {
    // What is wrong with one text is found before any of them is processed, and they are admitted together.
    let limits = loaded.engine.limits();
    for input in &inputs {
        let checked = limits.check_embedding(input);
        checked.map_err(|error| {
            ApiError::from_engine(&error).renamed(|field| field.replacen("prompt", "input", 1))
        })?;
    }
    let tokens: usize = inputs.iter().map(|input| input.tokens.len()).sum();
    RequestTrace::current().set("gen_ai.usage.input_tokens", i64::try_from(tokens).ok());
    let admission = loaded.engine.admit().map_err(|error| app.refused(&error))?;
    // Dropped before its end if the client disconnects; the pending embeddings are then cancelled.
    let mut answer = OpenAnswer::new(app.metrics.clone());
    let vector = |request| admission.embed(&loaded.engine, request);
    let vectors = stream::iter(inputs.into_iter().map(vector)).buffered(SIDE_BY_SIDE).try_collect::<Vec<_>>();
    let limit = app.answer_timeout;
    let vectors = timeout_at((started + limit).into(), vectors).await;
    answer.end();
    let vectors = vectors.map_err(|_| ApiError::too_slow(limit))?.map_err(|error| app.refused(&error))?;
    app.metrics.embeddings.add(vectors.len() as u64);
    app.metrics.answer.record(started.elapsed());
    Ok(vectors)
}

/// The length of vectors that a request asks for, if it is less than the model's.
///
/// # Errors
/// If the model has no vectors of this length.
fn shorter_vectors(loaded: &Loaded, length: usize) -> Result<Option<usize>, ApiError> {
    let whole = loaded.model.config().hidden;
    let message = match loaded.model.shorter_vectors() {
        _ if length == whole => return Ok(None),
        shorter if (1..whole).contains(&length) && shorter.has(length) => return Ok(Some(length)),
        ShorterVectors::None => {
            format!("the model's vectors have {whole} elements; it was not trained for others")
        }
        ShorterVectors::All => format!("must be from 1 to {whole}"),
        ShorterVectors::Of(lengths) => format!("must be {whole}, or one of {lengths:?}"),
    };
    Err(ApiError::field("dimensions", message))
}

/// Keeps the first elements of a vector, scaled to length 1 if it `normalizes`.
fn shorten(vector: &mut Vec<f32>, length: usize, normalizes: bool) {
    vector.truncate(length);
    let norm = vector.iter().map(|value| value * value).sum::<f32>().sqrt();
    if normalizes && norm > 0.0 {
        vector.iter_mut().for_each(|value| *value /= norm);
    }
}

pub(crate) async fn embeddings(
    State(app): State<Arc<App>>,
    request: Request<Body>,
) -> Result<Json<EmbeddingList>, ApiError> {
    let loaded = app.ready()?;
    let client = app.client(&request)?;
    let (request, turn): (EmbeddingRequest, _) = read_json(request, &app.intake).await?;
    app.check_model(request.model.as_deref())?;
    RequestTrace::current().operation("embeddings", &app.name);
    let started = Instant::now();
    if app.strict_fields && request.user.is_some() {
        return Err(ApiError::field("user", "has no effect here, which --strict-fields refuses"));
    }
    let EmbeddingRequest { input, encoding_format, dimensions, pooling, normalize, priority, .. } = request;
    let shorter = dimensions.map(|length| shorter_vectors(&loaded, length)).transpose()?.flatten();
    app.keys.check_priority(client, priority.unwrap_or(0))?;
    let tokenizer = loaded.clone();
    // Texts to embed are data: control tokens in them are plain text.
    let prepare = move |work: &Work| encode(&input, &tokenizer, "input", false, MAX_INPUTS, work);
    let inputs = app.prepare(turn, prepare).await?;
    if inputs.is_empty() {
        return Err(ApiError::field("input", "is empty: there is nothing to embed"));
    }
    if inputs.len() > MAX_INPUTS {
        return Err(ApiError::field("input", format!("at most {MAX_INPUTS} texts")));
    }
    if let Some(empty) = inputs.iter().position(Vec::is_empty) {
        return Err(ApiError::field(format!("input[{empty}]"), "is empty: there is nothing to embed"));
    }
    let pooling = match pooling {
        None => own_pooling(&loaded),
        Some(Pooling::Mean) => dsrun_engine::Pooling::Mean,
        Some(Pooling::Last) => dsrun_engine::Pooling::Last,
        Some(Pooling::Cls) => dsrun_engine::Pooling::First,
    };
    // Models whose files do not say get vectors of length 1.
    let normalizes = normalize.unwrap_or_else(|| loaded.model.embedding().is_none_or(|own| own.normalize));
    let prompt_tokens = inputs.iter().map(Vec::len).sum();
    let request = |tokens| dsrun_engine::EmbeddingRequest {
        tokens,
        pooling,
        // A part of a vector has another length than the whole.
        keep_length: !normalizes || shorter.is_some(),
        second: None,
        priority: priority.unwrap_or(0),
    };
    let inputs = inputs.into_iter().map(request).collect();
    let mut vectors = compute(&app, &loaded, inputs, started).await?;
    if let Some(length) = shorter {
        vectors.iter_mut().for_each(|vector| shorten(vector, length, normalizes));
    }
    let written = |(index, vector): (usize, Vec<f32>)| {
        let embedding = match encoding_format.unwrap_or_default() {
            EncodingFormat::Float => Vector::Numbers(vector),
            EncodingFormat::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                Vector::Base64(BASE64_STANDARD.encode(bytes))
            }
        };
        Embedding { object: "embedding", index, embedding }
    };
    Ok(Json(EmbeddingList {
        object: "list",
        model: app.name.clone(),
        data: vectors.into_iter().enumerate().map(written).collect(),
        usage: EmbeddingUsage { prompt_tokens, total_tokens: prompt_tokens },
    }))
}
