//! What a step is told: which requests take part with which tokens, and which rows are wanted.

use crate::{
    error::Result,
    plan::{Bucket, EXTENTS},
};
use dsrun_core::Error;
use dsrun_models::step::WANTED;
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
    wanted_starts: Vec<i32>,
    wanted_lengths: Vec<i32>,
    tokens: usize,
}

impl StepInputs {
    pub(crate) fn clear(&mut self) {
        let Self { requests, lengths, sources, ids, rows, row_requests, commits, .. } = self;
        let Self { wanted_starts, wanted_lengths, tokens, .. } = self;
        for list in
            [requests, lengths, sources, ids, rows, row_requests, commits, wanted_starts, wanted_lengths]
        {
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
        self.wanted_starts.push(self.rows.len() as i32);
        self.wanted_lengths.push(0);
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

    /// The rows of the last `count` tokens of the request that came last, the one in `slot`, are wanted, to sample a token behind
    /// each. If it is just one, that is the request's last token from then on; of several the host says so, when it has seen them.
    pub(crate) fn sample_last(&mut self, slot: usize, count: usize) {
        let commit = if count == 1 { slot as i32 } else { -1 };
        self.want_last(count, slot as i32, commit);
    }

    /// The logits of the last `count` tokens of the request that came last are wanted, and nothing is sampled.
    pub(crate) fn want_logits(&mut self, count: usize) {
        self.want_last(count, -1, -1);
    }

    /// Wanted are always the last tokens of a request, and once: [`prune_unused_rows`](crate::passes::prune_unused_rows) counts on it.
    fn want_last(&mut self, count: usize, request: i32, commit: i32) {
        self.rows.extend((self.tokens - count..self.tokens).map(|row| row as i32));
        self.row_requests.extend(std::iter::repeat_n(request, count));
        self.commits.extend(std::iter::repeat_n(commit, count));
        if let Some(length) = self.wanted_lengths.last_mut() {
            *length = count as i32;
        }
    }

    /// The bucket of the step.
    pub(crate) fn bucket(&self, limits: Bucket) -> Bucket {
        let (tokens, sequences, rows) = (self.tokens, self.requests.len(), self.rows.len());
        let limits = Bucket { rows: limits.rows.max(rows), ..limits };
        if tokens == rows || tokens == 1 {
            return Bucket::every(tokens, sequences, limits);
        }
        Bucket::fitting(tokens, sequences, rows, limits)
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
        write("commit_request", 0, &self.commits)?;
        write(WANTED[0], 0, &self.wanted_starts)?;
        write(WANTED[1], 0, &self.wanted_lengths)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that is staged, by name.
    fn staged(inputs: &StepInputs, name: &str, count: usize) -> Vec<i32> {
        let mut staging = vec![0xFF; 4096];
        let names = [
            EXTENTS,
            "step_request",
            "step_length",
            "step_source",
            "prompt_ids",
            "rows",
            "row_request",
            "commit_request",
            WANTED[0],
            WANTED[1],
        ];
        let place = |name: &str| {
            let start = names.iter().position(|known| *known == name).map(|index| index * 256);
            start.map(|start| start..start + 256).ok_or_else(|| Error::internal("no such input").into())
        };
        inputs.stage(&mut staging, &["tokens", "sequences", "rows"].map(Arc::from), &place).unwrap();
        let bytes = &staging[place(name).unwrap()];
        bytes.as_chunks().0.iter().take(count).map(|bytes| i32::from_le_bytes(*bytes)).collect()
    }

    #[test]
    fn wanted_rows_are_told_by_sequence() {
        let limits = Bucket { tokens: 64, sequences: 8, rows: 24, every: false };
        let mut inputs = StepInputs::default();
        // A chunk of a prompt, a request that generates, one with three tokens proposed, the end of a prompt, a text.
        inputs.bring_tokens(4, &[7; 9]);
        inputs.bring_last(2);
        inputs.sample_last(2, 1);
        inputs.bring_tokens(1, &[5]);
        inputs.bring_more(&[6, 7, 8]);
        inputs.sample_last(1, 4);
        inputs.bring_tokens(0, &[9; 6]);
        inputs.sample_last(0, 1);
        inputs.bring_tokens(3, &[1; 2]);
        assert_eq!(staged(&inputs, EXTENTS, 3), [22, 5, 6]);
        assert_eq!(staged(&inputs, "rows", 6), [9, 10, 11, 12, 13, 19]);
        assert_eq!(staged(&inputs, "row_request", 6), [2, 1, 1, 1, 1, 0]);
        assert_eq!(staged(&inputs, "commit_request", 6), [2, -1, -1, -1, -1, 0]);
        // Behind the last sequence is what pads: no rows.
        assert_eq!(staged(&inputs, WANTED[0], 6), [0, 0, 1, 5, 6, -1]);
        assert_eq!(staged(&inputs, WANTED[1], 6), [0, 1, 4, 1, 0, -1]);
        assert_eq!(inputs.bucket(limits), Bucket { tokens: 32, sequences: 8, rows: 8, every: false });

        inputs.clear();
        inputs.bring_tokens(4, &[7; 3]);
        assert_eq!(staged(&inputs, WANTED[1], 1), [0]);
        assert_eq!(inputs.bucket(limits), Bucket { tokens: 4, sequences: 1, rows: 1, every: false });
        inputs.bring_last(2);
        inputs.sample_last(2, 1);
        assert_eq!(inputs.bucket(limits), Bucket { tokens: 4, sequences: 2, rows: 1, every: false });

        // Every token is wanted, whatever brings it; a token by itself need not be.
        inputs.clear();
        inputs.bring_tokens(4, &[7; 3]);
        inputs.want_logits(3);
        inputs.bring_last(2);
        inputs.sample_last(2, 1);
        assert_eq!(inputs.bucket(limits), Bucket { tokens: 4, sequences: 2, rows: 4, every: true });
        inputs.clear();
        inputs.bring_tokens(4, &[7]);
        assert_eq!(inputs.bucket(limits), Bucket { tokens: 1, sequences: 1, rows: 1, every: true });
    }
}
