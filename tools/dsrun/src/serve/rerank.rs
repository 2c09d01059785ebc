//! `/v1/rerank` and `/v1/score`: how well pairs of texts go together.
//!
//! A cross-encoder reads both texts as one and gives them a score. A model that embeds texts and has no such head gives the cosine of
//! the angle between their vectors.

use super::{
    api::{
        Texts,
        embeddings::EmbeddingUsage,
        rerank::{DocumentText, RankedDocument, RerankRequest, Reranking, Score, ScoreList, ScoreRequest},
    },
    app::{App, Loaded},
    body::read_json,
    embeddings::{MAX_INPUTS, compute, own_pooling},
    error::ApiError,
    intake::{Turn, Work},
    traces::RequestTrace,
};
use axum::{Json, body::Body, extract::State, http::Request};
use dsrun_engine::{EmbeddingRequest, Pooling};
use dsrun_models::tokenizer::EncodeOptions;
use std::{sync::Arc, time::Instant};

pub(crate) async fn rerank(
    State(app): State<Arc<App>>,
    request: Request<Body>,
) -> Result<Json<Reranking>, ApiError> {
    let loaded = app.ready()?;
    let client = app.client(&request)?;
    let (request, turn): (RerankRequest, _) = read_json(request, &app.intake).await?;
    app.check_model(request.model.as_deref())?;
    RequestTrace::current().operation("rerank", &app.name);
    let started = Instant::now();
    let RerankRequest { query, documents, top_n, return_documents, priority, .. } = request;
    app.keys.check_priority(client, priority.unwrap_or(0))?;
    if top_n == Some(0) {
        return Err(ApiError::field("top_n", "must be at least 1"));
    }
    let texts: Vec<String> = documents.iter().map(|document| document.text().to_owned()).collect();
    let pairs = Pairs { first: vec![query], second: texts.clone(), fields: ["query", "documents"] };
    let (scores, tokens) = scores(&app, &loaded, pairs, turn, priority, started).await?;
    let ranked = |(index, (relevance_score, text)): (usize, (f64, String))| {
        let document = return_documents.unwrap_or(true).then_some(DocumentText { text });
        RankedDocument { index, document, relevance_score }
    };
    let mut results: Vec<_> = scores.into_iter().zip(texts).enumerate().map(ranked).collect();
    // Documents of equal scores stay in the order of the request.
    results.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
    results.truncate(top_n.unwrap_or(usize::MAX));
    let usage = EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens };
    Ok(Json(Reranking { model: app.name.clone(), results, usage }))
}

pub(crate) async fn score(
    State(app): State<Arc<App>>,
    request: Request<Body>,
) -> Result<Json<ScoreList>, ApiError> {
    let loaded = app.ready()?;
    let client = app.client(&request)?;
    let (request, turn): (ScoreRequest, _) = read_json(request, &app.intake).await?;
    app.check_model(request.model.as_deref())?;
    RequestTrace::current().operation("score", &app.name);
    let started = Instant::now();
    let ScoreRequest { text_1, text_2, priority, .. } = request;
    app.keys.check_priority(client, priority.unwrap_or(0))?;
    let texts = |texts: Texts| texts.as_slice().to_vec();
    let pairs = Pairs { first: texts(text_1), second: texts(text_2), fields: ["text_1", "text_2"] };
    if pairs.first.len() != 1 && pairs.first.len() != pairs.second.len() {
        let message = format!(
            "has {} texts, must have one, or as many as text_2 ({})",
            pairs.first.len(),
            pairs.second.len()
        );
        return Err(ApiError::field("text_1", message));
    }
    let (scores, tokens) = scores(&app, &loaded, pairs, turn, priority, started).await?;
    let score = |(index, score)| Score { object: "score", index, score };
    Ok(Json(ScoreList {
        object: "list",
        model: app.name.clone(),
        data: scores.into_iter().enumerate().map(score).collect(),
        usage: EmbeddingUsage { prompt_tokens: tokens, total_tokens: tokens },
    }))
}

/// Pairs of texts.
struct Pairs {
    /// The first text of each pair, or the one that all pairs share.
    first: Vec<String>,
    second: Vec<String>,
    /// The fields that they stand in, for errors.
    fields: [&'static str; 2],
}

/// Scores pairs of texts. Returns the scores, and the number of tokens that were processed.
async fn scores(
    app: &App,
    loaded: &Arc<Loaded>,
    pairs: Pairs,
    turn: Turn,
    priority: Option<i32>,
    started: Instant,
) -> Result<(Vec<f64>, usize), ApiError> {
    if pairs.second.is_empty() {
        return Err(ApiError::field(pairs.fields[1], "is empty: there is nothing to score"));
    }
    if pairs.second.len() > MAX_INPUTS {
        return Err(ApiError::field(pairs.fields[1], format!("at most {MAX_INPUTS} texts")));
    }
    let head = scoring(loaded)?;
    let (shares, count) = (pairs.first.len() == 1, pairs.second.len());
    let priority = priority.unwrap_or(0);
    let preparing = loaded.clone();
    let prepare = move |work: &Work| encode(&preparing, &pairs, head, priority, work);
    let inputs = app.prepare(turn, prepare).await?;
    let tokens = inputs.iter().map(|input| input.tokens.len()).sum();
    let vectors = compute(app, loaded, inputs, started).await?;
    let scores = match head {
        Scoring::Head { sigmoid } => vectors
            .iter()
            .map(|scores| f64::from(scores.first().copied().unwrap_or(f32::NAN)))
            .map(|score| if sigmoid { 1.0 / (1.0 + (-score).exp()) } else { score })
            .collect(),
        Scoring::Cosine => {
            let (first, second) = vectors.split_at(vectors.len() - count);
            let first = |index: usize| &first[if shares { 0 } else { index }];
            let product = |(index, second): (usize, &Vec<f32>)| {
                first(index).iter().zip(second).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            second.iter().enumerate().map(product).collect()
        }
    };
    Ok((scores, tokens))
}

/// How a model scores a pair of texts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scoring {
    /// By its head, which reads both as one text.
    Head {
        /// Whether the score is the sigmoid of what the head computes.
        sigmoid: bool,
    },
    /// By the cosine of the angle between their vectors.
    Cosine,
}

/// Returns how the model scores pairs.
///
/// # Errors
/// If it is no model for that.
fn scoring(loaded: &Loaded) -> Result<Scoring, ApiError> {
    match loaded.model.config().encoder {
        Some(encoder) => match encoder.classifier {
            Some(classifier) if classifier.labels == 1 => Ok(Scoring::Head { sigmoid: classifier.sigmoid }),
            Some(classifier) => Err(ApiError::field(
                "model",
                format!("has a head of {} labels; pairs are scored by models with one", classifier.labels),
            )),
            None => Ok(Scoring::Cosine),
        },
        None if loaded.model.embedding().is_some() => Ok(Scoring::Cosine),
        None => Err(ApiError::field(
            "model",
            "is a decoder that was not trained to embed or to score texts; load a cross-encoder, or an embedding model",
        )),
    }
}

/// Encodes pairs: as one text each, or as texts of their own, the first ones before the second ones.
fn encode(
    loaded: &Loaded,
    pairs: &Pairs,
    head: Scoring,
    priority: i32,
    work: &Work,
) -> Result<Vec<EmbeddingRequest>, ApiError> {
    let (tokenizer, context) = (loaded.tokenizer()?, loaded.engine.limits().context);
    // Texts to score are data: control tokens in them are plain text.
    let options = |add_special| EncodeOptions { add_special, parse_special: false };
    let [first_field, second_field] = pairs.fields;
    let encoded = |text: &String, field: &str, add_special: bool| {
        work.check()?;
        let tokens = tokenizer.encode_within(text, options(add_special), context);
        let tokens = tokens.map_err(|error| ApiError::field(field, error.to_string()))?;
        tokens.filter(|tokens| tokens.len() <= context).ok_or_else(|| ApiError::too_long(field, context))
    };
    if head == Scoring::Cosine {
        let pooling = own_pooling(loaded);
        let request = |(text, field): (&String, &str)| {
            let tokens = encoded(text, field, true)?;
            Ok(EmbeddingRequest { tokens, pooling, keep_length: false, second: None, priority })
        };
        let first = pairs.first.iter().map(|text| (text, first_field));
        return first.chain(pairs.second.iter().map(|text| (text, second_field))).map(request).collect();
    }
    // Of a text that is far too long only the beginning is encoded.
    for text in &pairs.first {
        encoded(text, first_field, false)?;
    }
    let pair = |(index, second): (usize, &String)| {
        encoded(second, second_field, false)?;
        let first = if pairs.first.len() == 1 { &pairs.first[0] } else { &pairs.first[index] };
        let (tokens, second) = tokenizer
            .encode_pair([first, second], options(true))
            .map_err(|error| ApiError::field(second_field, error.to_string()))?;
        if tokens.len() > context {
            return Err(ApiError::too_long(second_field, context));
        }
        Ok(EmbeddingRequest { tokens, pooling: Pooling::Scores, keep_length: true, second, priority })
    };
    pairs.second.iter().enumerate().map(pair).collect()
}
