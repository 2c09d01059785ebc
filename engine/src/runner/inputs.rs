//! The inputs of a step: the requests that take part, their tokens, and which rows are output rows.

use crate::{
    error::Result,
    plan::{Bucket, InputLayout, StepInput, StepPages, StepSize},
};
use dsrun_core::Error;

/// The inputs of a step. Reused from step to step to avoid allocations.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct StepInputs {
    requests: Vec<i32>,
    lengths: Vec<i32>,
    sources: Vec<i32>,
    ids: Vec<i32>,
    rows: Vec<i32>,
    row_requests: Vec<i32>,
    commits: Vec<i32>,
    row_starts: Vec<i32>,
    row_lengths: Vec<i32>,
    positions: Vec<i32>,
    token_types: Vec<i32>,
    starts: Vec<i32>,
    /// The pages of the sequences, for steps that copy those in host memory.
    pages: StepPages,
    tokens: usize,
}

impl StepInputs {
    /// Removes all sequences.
    pub(crate) fn clear(&mut self) {
        let Self { requests, lengths, sources, ids, rows, row_requests, commits, .. } = self;
        let Self { row_starts, row_lengths, positions, token_types, starts, tokens, .. } = self;
        for list in [requests, lengths, sources, ids, rows, row_requests, commits] {
            list.clear();
        }
        for list in [row_starts, row_lengths, positions, token_types, starts] {
            list.clear();
        }
        *tokens = 0;
        self.pages.clear();
    }

    /// The number of tokens so far.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// The pages of the sequences.
    pub(super) fn pages(&self) -> &StepPages {
        &self.pages
    }

    /// Adds the pages of a sequence, with room for `block` tokens each, that gets `tokens` tokens after the first `before`. Only steps
    /// that copy pages in host memory need them.
    pub(crate) fn add_pages(&mut self, pages: &[i32], block: usize, before: usize, tokens: usize) {
        self.pages.add(pages, block, before, tokens);
    }

    /// Adds a sequence: the request in `slot` with the token that the device sampled last.
    pub(crate) fn push_last_token(&mut self, slot: usize) {
        self.push_sequence(slot, 1, -1);
    }

    /// Adds a sequence: the request in `slot` with these tokens.
    pub(crate) fn push_tokens(&mut self, slot: usize, tokens: &[i32]) {
        self.push_sequence(slot, tokens.len(), self.ids.len() as i32);
        self.ids.extend_from_slice(tokens);
    }

    /// Adds a sequence of an encoder: the request in `slot` with its whole text. Tokens from index `second` on belong to the
    /// second text of a pair and have token type 1, or 0 if the model has fewer than two token types (`types`).
    pub(crate) fn push_text(&mut self, slot: usize, tokens: &[i32], second: Option<usize>, types: usize) {
        self.starts.push(self.tokens as i32);
        self.positions.extend(0..tokens.len() as i32);
        let of_second = i32::from(types > 1);
        let token_type =
            |index: usize| if second.is_some_and(|second| index >= second) { of_second } else { 0 };
        self.token_types.extend((0..tokens.len()).map(token_type));
        self.push_tokens(slot, tokens);
    }

    /// Makes the first row of the last sequence the input of the classification head. Returns the index of the output row.
    pub(crate) fn classify_last(&mut self) -> usize {
        self.rows.extend(self.starts.last());
        self.rows.len() - 1
    }

    fn push_sequence(&mut self, slot: usize, tokens: usize, source: i32) {
        self.requests.push(slot as i32);
        self.lengths.push(tokens as i32);
        self.sources.push(source);
        self.row_starts.push(self.rows.len() as i32);
        self.row_lengths.push(0);
        self.tokens += tokens;
    }

    /// Appends proposed tokens to the last sequence.
    pub(crate) fn push_draft(&mut self, tokens: &[i32]) {
        self.ids.extend_from_slice(tokens);
        self.tokens += tokens.len();
        if let Some(length) = self.lengths.last_mut() {
            *length += tokens.len() as i32;
        }
    }

    /// Samples a token after each of the last `count` tokens of the last sequence, which is the request in `slot`. A single
    /// sampled token becomes the request's last token on the device; of several (speculation), the host decides later which ones
    /// are accepted.
    pub(crate) fn sample_last(&mut self, slot: usize, count: usize) {
        let commit = if count == 1 { slot as i32 } else { -1 };
        self.push_rows(count, slot as i32, commit);
    }

    /// Computes the logits of the last `count` tokens of the last sequence, and samples nothing.
    pub(crate) fn request_logits(&mut self, count: usize) {
        self.push_rows(count, -1, -1);
    }

    /// Output rows must be the last tokens of a sequence, added once: [`prune_unused_rows`](crate::passes::prune_unused_rows)
    /// relies on this.
    fn push_rows(&mut self, count: usize, request: i32, commit: i32) {
        self.rows.extend((self.tokens - count..self.tokens).map(|row| row as i32));
        self.row_requests.extend(std::iter::repeat_n(request, count));
        self.commits.extend(std::iter::repeat_n(commit, count));
        if let Some(length) = self.row_lengths.last_mut() {
            *length = count as i32;
        }
    }

    /// The bucket of the step.
    pub(crate) fn bucket(&self, limits: Bucket) -> Bucket {
        let rows = self.rows.len();
        // A scoring step has more output rows than decode steps may have.
        let limits = Bucket { rows: limits.rows.max(rows), ..limits };
        Bucket::for_step(self.tokens, self.requests.len(), rows, limits)
    }

    /// Writes the inputs to the staging memory of a step, as its layout says.
    ///
    /// # Errors
    /// If an input is larger than its space in the layout.
    pub(crate) fn stage(&self, staging: &mut [u8], layout: &InputLayout) -> Result<()> {
        for (index, size) in layout.extents.iter().enumerate() {
            let extent = match size {
                StepSize::Tokens => self.tokens,
                StepSize::Sequences => self.requests.len(),
                StepSize::Rows => self.rows.len(),
                StepSize::Requests | StepSize::Blocks | StepSize::Pages | StepSize::StopIds => 0,
            };
            let place = index * size_of::<i32>();
            let place = staging.get_mut(place..place + size_of::<i32>());
            place
                .ok_or_else(|| Error::internal("the extents are larger than the input buffer"))?
                .copy_from_slice(&(extent as i32).to_ne_bytes());
        }
        let inputs = [
            (StepInput::Requests, &self.requests),
            (StepInput::Lengths, &self.lengths),
            (StepInput::Sources, &self.sources),
            (StepInput::PromptIds, &self.ids),
            (StepInput::Rows, &self.rows),
            (StepInput::RowRequests, &self.row_requests),
            (StepInput::CommitRequests, &self.commits),
            (StepInput::RowStarts, &self.row_starts),
            (StepInput::RowLengths, &self.row_lengths),
            (StepInput::Positions, &self.positions),
            (StepInput::TokenTypes, &self.token_types),
            (StepInput::Starts, &self.starts),
        ];
        for (input, values) in inputs {
            // Encoders and decoders have different inputs, so some are missing.
            let Some(range) = layout.find(input) else { continue };
            let bytes: &[u8] = bytemuck::cast_slice(values);
            let place = staging.get_mut(range).and_then(|place| place.get_mut(..bytes.len()));
            let too_large = || {
                let (name, count) = (input.name(), values.len());
                Error::internal(format!("{count} values do not fit input `{name}` of the step"))
            };
            place.ok_or_else(too_large)?.copy_from_slice(bytes);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsrun_core::{
        DType, Size, TensorType,
        program::{Program, ProgramBuilder},
    };

    /// A program with the extents and inputs of a decoder, each input of 64 elements at most.
    fn program() -> Program {
        let mut program = ProgramBuilder::new("inputs");
        for extent in ["tokens", "sequences", "rows"] {
            program.bounded(extent);
        }
        for input in StepInput::ALL {
            program.input(input.name(), TensorType::new(DType::I32, [Size::Static(64)])).unwrap();
        }
        program.finish(&[]).unwrap()
    }

    /// The first elements of what is staged for an input.
    fn staged(inputs: &StepInputs, input: StepInput, count: usize) -> Vec<i32> {
        let layout = InputLayout::new(&program(), &|_| None, 4).unwrap();
        let mut staging = vec![0xFF; layout.bytes];
        inputs.stage(&mut staging, &layout).unwrap();
        elements(&staging[layout.range(input).unwrap()], count)
    }

    /// The extents that are staged.
    fn extents(inputs: &StepInputs) -> Vec<i32> {
        let layout = InputLayout::new(&program(), &|_| None, 4).unwrap();
        let mut staging = vec![0xFF; layout.bytes];
        inputs.stage(&mut staging, &layout).unwrap();
        elements(&staging, 3)
    }

    fn elements(bytes: &[u8], count: usize) -> Vec<i32> {
        bytes.as_chunks().0.iter().take(count).map(|bytes| i32::from_le_bytes(*bytes)).collect()
    }

    #[test]
    fn output_rows_are_staged_by_sequence() {
        let limits = Bucket { tokens: 64, sequences: 8, rows: 24, all_rows: false };
        let mut inputs = StepInputs::default();
        // A chunk of a prompt, a request that generates, one with three proposed tokens, the end of a prompt, a text to embed.
        inputs.push_tokens(4, &[7; 9]);
        inputs.push_last_token(2);
        inputs.sample_last(2, 1);
        inputs.push_tokens(1, &[5]);
        inputs.push_draft(&[6, 7, 8]);
        inputs.sample_last(1, 4);
        inputs.push_tokens(0, &[9; 6]);
        inputs.sample_last(0, 1);
        inputs.push_tokens(3, &[1; 2]);
        assert_eq!(extents(&inputs), [22, 5, 6]);
        assert_eq!(staged(&inputs, StepInput::Rows, 6), [9, 10, 11, 12, 13, 19]);
        assert_eq!(staged(&inputs, StepInput::RowRequests, 6), [2, 1, 1, 1, 1, 0]);
        assert_eq!(staged(&inputs, StepInput::CommitRequests, 6), [2, -1, -1, -1, -1, 0]);
        // Sequences that pad the step have no rows.
        assert_eq!(staged(&inputs, StepInput::RowStarts, 6), [0, 0, 1, 5, 6, -1]);
        assert_eq!(staged(&inputs, StepInput::RowLengths, 6), [0, 1, 4, 1, 0, -1]);
        assert_eq!(inputs.bucket(limits), Bucket { tokens: 32, sequences: 8, rows: 8, all_rows: false });

        inputs.clear();
        inputs.push_tokens(4, &[7; 3]);
        assert_eq!(staged(&inputs, StepInput::RowLengths, 1), [0]);
        assert_eq!(inputs.bucket(limits), Bucket { tokens: 4, sequences: 1, rows: 1, all_rows: false });
        inputs.push_last_token(2);
        inputs.sample_last(2, 1);
        assert_eq!(inputs.bucket(limits), Bucket { tokens: 4, sequences: 2, rows: 1, all_rows: false });

        // A step of output rows only; a single token counts as one whether it is an output row or not.
        inputs.clear();
        inputs.push_tokens(4, &[7; 3]);
        inputs.request_logits(3);
        inputs.push_last_token(2);
        inputs.sample_last(2, 1);
        assert_eq!(inputs.bucket(limits), Bucket { tokens: 4, sequences: 2, rows: 4, all_rows: true });
        inputs.clear();
        inputs.push_tokens(4, &[7]);
        assert_eq!(inputs.bucket(limits), Bucket { tokens: 1, sequences: 1, rows: 1, all_rows: true });
    }
}
