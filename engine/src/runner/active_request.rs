//! The runner's data of a request that has not ended.

use super::pooler::Pooler;
use crate::{
    request::{Constraint, Request, RequestId},
    sampling::SamplingOptions,
};
use std::sync::Arc;

/// A request that has not ended.
#[derive(Debug)]
pub(crate) struct ActiveRequest {
    /// Its id.
    pub(crate) id: RequestId,
    /// The maximum number of tokens to generate.
    pub(crate) limit: usize,
    /// How tokens are chosen.
    pub(crate) sampling: SamplingOptions,
    /// Tokens that end the answer, besides the model's own.
    stop_ids: Vec<u32>,
    /// Whether the model's own end tokens do not end the answer.
    ignore_end: bool,
    /// The minimum number of tokens to generate.
    pub(crate) min_tokens: usize,
    /// The bias on the logits of tokens.
    pub(crate) bias: Arc<[(u32, f32)]>,
    /// How many of the most likely tokens to report.
    pub(crate) top: usize,
    /// Limits which requests share its cached prefixes.
    pub(crate) cache_salt: Option<String>,
    /// Restricts the tokens of the answer.
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    /// Pools the hidden states of an embedding request.
    pub(crate) pooler: Option<Pooler>,
    /// The first token of the second part of its text.
    pub(crate) second: Option<usize>,
    /// Whether tokens may be proposed for it.
    pub(crate) speculates: bool,
}

impl ActiveRequest {
    /// A request that generates up to `limit` tokens.
    pub(crate) fn new(id: RequestId, limit: usize, request: Request, speculates: bool) -> Self {
        let Request {
            sampling,
            stop_ids,
            ignore_end,
            min_tokens,
            logit_bias,
            top_log_probabilities,
            cache_salt,
            constraint,
            ..
        } = request;
        Self {
            id,
            limit,
            sampling,
            stop_ids,
            ignore_end,
            min_tokens,
            bias: logit_bias,
            top: top_log_probabilities,
            cache_salt,
            constraint,
            pooler: None,
            second: None,
            speculates,
        }
    }

    /// An embedding request.
    pub(crate) fn embedding(id: RequestId, pooler: Pooler, second: Option<usize>) -> Self {
        Self { pooler: Some(pooler), second, ..Self::new(id, 1, Request::default(), false) }
    }

    /// A request for the draft model with the same sampling options, but without end tokens.
    pub(crate) fn draft(&self, id: RequestId, vocabulary: usize) -> Self {
        let request = Request {
            sampling: self.sampling.clone(),
            ignore_end: true,
            logit_bias: self
                .bias
                .iter()
                .filter(|(token, _)| (*token as usize) < vocabulary)
                .copied()
                .collect(),
            ..Request::default()
        };
        Self::new(id, usize::MAX, request, false)
    }

    /// The tokens that end it, given those of the model.
    pub(crate) fn end_tokens<'a>(&'a self, model: &'a [u32]) -> impl Iterator<Item = u32> + 'a {
        let model = if self.ignore_end { &[] } else { model };
        self.stop_ids.iter().chain(model).copied()
    }

    /// Whether a token ends it, given the end tokens of the model.
    pub(crate) fn ends_with(&self, token: u32, model: &[u32]) -> bool {
        self.stop_ids.contains(&token) || (!self.ignore_end && model.contains(&token))
    }
}
