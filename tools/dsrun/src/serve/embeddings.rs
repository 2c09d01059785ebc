//! `/v1/embeddings`.

use super::{
    api::embeddings::{
        Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage, EncodingFormat, Pooling, Vector,
    },
    app::App,
    body::read_json,
    error::ApiError,
    intake::Work,
    metrics::OpenAnswer,
    prompts::encode,
};
use axum::{Json, body::Body, extract::State, http::Request};
use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::{StreamExt, TryStreamExt, stream};
use std::{sync::Arc, time::Instant};
use tokio::time::timeout_at;

/// The most texts of a request. OpenAI's number.
const MAX_INPUTS: usize = 2048;
/// The most texts of a request that wait or run at a time, so that a large request does not fill the queue.
const SIDE_BY_SIDE: usize = 32;

pub(crate) async fn embeddings(
    State(app): State<Arc<App>>,
    request: Request<Body>,
) -> Result<Json<EmbeddingList>, ApiError> {
    let loaded = app.ready()?;
    let (request, turn): (EmbeddingRequest, _) = read_json(request, &app.intake).await?;
    app.check_model(&request.model)?;
    let started = Instant::now();
    if app.strict_fields && request.user.is_some() {
        return Err(ApiError::field("user", "has no effect here, which --strict-fields refuses"));
    }
    let EmbeddingRequest { input, encoding_format, pooling, priority, .. } = request;
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
    let pooling = match pooling.unwrap_or_default() {
        Pooling::Mean => dsrun_engine::Pooling::Mean,
        Pooling::Last => dsrun_engine::Pooling::Last,
    };
    let prompt_tokens = inputs.iter().map(Vec::len).sum();
    let request =
        |tokens| dsrun_engine::EmbeddingRequest { tokens, pooling, priority: priority.unwrap_or(0) };
    // What is wrong with one text is found before any of them is processed, and they are admitted together.
    let inputs: Vec<_> = inputs.into_iter().map(request).collect();
    let limits = loaded.engine.limits();
    for input in &inputs {
        limits.check_embedding(input).map_err(|error| ApiError::from_engine(&error))?;
    }
    let admission = loaded.engine.admit().map_err(|error| app.refused(&error))?;
    // Dropped before its end if the client disconnects; the pending embeddings are then cancelled.
    let mut answer = OpenAnswer::new(app.metrics.clone());
    let vector = |request| {
        let pending = admission.embed(&loaded.engine, request);
        async move { pending?.await }
    };
    let vectors = stream::iter(inputs.into_iter().map(vector)).buffered(SIDE_BY_SIDE).try_collect::<Vec<_>>();
    let limit = app.answer_timeout;
    let vectors = timeout_at((started + limit).into(), vectors).await;
    answer.end();
    let vectors = vectors.map_err(|_| ApiError::too_slow(limit))?.map_err(|error| app.refused(&error))?;
    app.metrics.embeddings.add(vectors.len() as u64);
    app.metrics.answer.record(started.elapsed());
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
