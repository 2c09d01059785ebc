//! What a step is told: which requests take part with which tokens, and which rows are wanted.

use crate::{
    compile::{Bucket, EXTENTS},
    error::Result,
};
use dsrun_core::Error;
use std::{ops::Range, sync::Arc};

/// The inputs of a step. Kept from step to step for its memory.
#[derive(Debug, Default)]
pub(crate) struct StepInputs {
    requests: Vec<i32>,
    lengths: Vec<i32>,
    sources: Vec<i32>,
    ids: Vec<i32>,
    rows: Vec<i32>,
    row_requests: Vec<i32>,
    commits: Vec<i32>,
    tokens: usize,
}

impl StepInputs {
    pub(crate) fn clear(&mut self) {
        let Self { requests, lengths, sources, ids, rows, row_requests, commits, tokens } = self;
        for list in [requests, lengths, sources, ids, rows, row_requests, commits] {
            list.clear();
        }
        *tokens = 0;
    }

    /// Tokens so far.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// The request in `slot` brings the token that the device sampled last.
    pub(crate) fn bring_last(&mut self, slot: usize) {
        self.bring(slot, 1, -1);
    }

    /// The request in `slot` brings these tokens.
    pub(crate) fn bring_tokens(&mut self, slot: usize, tokens: &[i32]) {
        self.bring(slot, tokens.len(), self.ids.len() as i32);
        self.ids.extend_from_slice(tokens);
    }

    fn bring(&mut self, slot: usize, tokens: usize, source: i32) {
        self.requests.push(slot as i32);
        self.lengths.push(tokens as i32);
        self.sources.push(source);
        self.tokens += tokens;
    }

    /// The request that came last brings these tokens too.
    pub(crate) fn bring_more(&mut self, tokens: &[i32]) {
        self.ids.extend_from_slice(tokens);
        self.tokens += tokens.len();
        if let Some(length) = self.lengths.last_mut() {
            *length += tokens.len() as i32;
        }
    }

    /// The rows of the last `count` tokens so far are wanted, to sample a token behind each for the request in `slot`. If it is
    /// just one, that is the request's last token from then on; of several the host says so, when it has seen them.
    pub(crate) fn sample_last(&mut self, slot: usize, count: usize) {
        let commit = if count == 1 { slot as i32 } else { -1 };
        (self.tokens - count..self.tokens).for_each(|row| self.want(row, slot as i32, commit));
    }

    /// The logits of a row are wanted, and nothing is sampled.
    pub(crate) fn want_logits(&mut self, row: usize) {
        self.want(row, -1, -1);
    }

    fn want(&mut self, row: usize, request: i32, commit: i32) {
        self.rows.push(row as i32);
        self.row_requests.push(request);
        self.commits.push(commit);
    }

    /// The bucket of the step.
    pub(crate) fn bucket(&self, limits: Bucket) -> Bucket {
        let limits = Bucket { rows: limits.rows.max(self.rows.len()), ..limits };
        Bucket::fitting(self.tokens, self.requests.len(), self.rows.len(), limits)
    }

    /// Writes them into the staging memory of a step's inputs: `place` says where each stands.
    ///
    /// # Errors
    /// If an input does not fit its place.
    pub(crate) fn stage(
        &self,
        staging: &mut [u8],
        extents: &[Arc<str>],
        place: &dyn Fn(&str) -> Result<Range<usize>>,
    ) -> Result<()> {
        let mut write = |name: &str, offset: usize, values: &[i32]| -> Result<()> {
            let bytes: &[u8] = bytemuck::cast_slice(values);
            let place = staging.get_mut(place(name)?).and_then(|place| place.get_mut(offset..));
            let place = place.and_then(|place| place.get_mut(..bytes.len()));
            place
                .ok_or_else(|| Error::internal(format!("{name} does not fit its input")))?
                .copy_from_slice(bytes);
            Ok(())
        };
        for (index, name) in extents.iter().enumerate() {
            let extent = match &**name {
                "tokens" => self.tokens,
                "sequences" => self.requests.len(),
                "rows" => self.rows.len(),
                _ => 0,
            };
            write(EXTENTS, index * size_of::<i32>(), &[extent as i32])?;
        }
        write("step_request", 0, &self.requests)?;
        write("step_length", 0, &self.lengths)?;
        write("step_source", 0, &self.sources)?;
        write("prompt_ids", 0, &self.ids)?;
        write("rows", 0, &self.rows)?;
        write("row_request", 0, &self.row_requests)?;
        write("commit_request", 0, &self.commits)
    }
}
