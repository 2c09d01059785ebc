//! Copies hidden states and scores to the host, for embedding requests. These requests take part in the same steps as prompts,
//! together with generating requests, and sample nothing. In a step with such a request of a decoder, the segment `embed` runs
//! after the layers. For an encoder, the hidden states and the scores of its classification head are outputs of the forward
//! segment.

use super::{
    Runner,
    active_request::ActiveRequest,
    executor::{Executor, STEP_TIMEOUT},
    pooler::{Pooler, THREAD_VALUES},
    readback::read_pinned,
};
use crate::{
    error::Result,
    plan::{Bucket, SegmentSet, StepOutput, StepSegment},
    schedule::{ScheduledSequence, SequenceKey},
};
use dsrun_core::{
    DType, Error, Size, TensorType,
    device::{BufferSlice, Device, MemoryKind},
    program::Program,
};
use rayon::prelude::*;
use std::{borrow::Cow, ops::Range};

/// Rows of an output.
#[derive(Clone, Copy, Debug)]
struct RowType {
    dtype: DType,
    /// Elements of a row.
    width: usize,
}

impl RowType {
    /// The type of the rows of an output of a program, if it has the output.
    fn of(program: &Program, output: StepOutput) -> Result<Option<Self>> {
        let id = output.value(program);
        let tensor = id.map(|id| program.value(id)).transpose()?.and_then(|value| value.tensor_type());
        let row = |tensor: &TensorType| {
            Some(Self { dtype: tensor.dtype, width: tensor.shape.get(1).and_then(Size::known)? })
        };
        Ok(tensor.and_then(row))
    }

    fn bytes(self) -> usize {
        self.width * self.dtype.bytes()
    }
}

/// Pinned memory for the hidden states and scores of the steps in flight.
#[derive(Debug)]
pub(super) struct HiddenStates {
    /// Hidden states of a token.
    states: RowType,
    /// Scores of a text, if the model has a head for them.
    scores: Option<RowType>,
    /// The memory of each step in flight; grows with demand.
    memory: Vec<Option<BufferSlice>>,
}

/// Tokens of one request whose hidden states a step copies to the host. Scores of a request are represented as a chunk of its
/// first token.
#[derive(Debug)]
pub(super) struct HiddenChunk {
    key: SequenceKey,
    output: StepOutput,
    /// The tokens, by their index in the text.
    tokens: Range<usize>,
    /// The row of the output with the first of them.
    row: usize,
}

impl HiddenChunk {
    /// The chunk that a scheduled sequence contributes to its embedding; `None` if it is not an embedding request. `row` is the
    /// row of the sequence's first token in the step.
    pub(super) fn of(request: &ActiveRequest, part: &ScheduledSequence, row: usize) -> Option<Self> {
        let (pooler, from) = (request.pooler.as_ref()?, part.from?);
        let tokens = pooler.needed(from..from + part.tokens);
        Some(Self { key: part.key, output: StepOutput::Hidden, row: row + tokens.start - from, tokens })
    }

    /// The scores of a sequence, in this output row of the step.
    pub(super) fn scores(key: SequenceKey, row: usize) -> Self {
        Self { key, output: StepOutput::Scores, tokens: 0..1, row }
    }
}

impl HiddenStates {
    /// Memory for the hidden states of a program, for `depth` steps in flight.
    ///
    /// # Errors
    /// If the program has no hidden states.
    pub(super) fn new(program: &Program, depth: usize) -> Result<Self> {
        let states = RowType::of(program, StepOutput::Hidden)?;
        let states = states.ok_or_else(|| Error::internal("the program has no hidden states"))?;
        let scores = RowType::of(program, StepOutput::Scores)?;
        Ok(Self { states, scores, memory: vec![None; depth.max(1)] })
    }

    /// The number of scores that the model gives a text, if it has a head for them.
    pub(super) fn labels(&self) -> Option<usize> {
        self.scores.map(|scores| scores.width)
    }

    /// The type of the rows of a chunk.
    fn row(&self, chunk: &HiddenChunk) -> Result<RowType> {
        let row = if chunk.output == StepOutput::Scores { self.scores } else { Some(self.states) };
        Ok(row.ok_or_else(|| Error::internal("the program has no scores"))?)
    }

    /// Memory for this many bytes.
    fn reserve(&mut self, device: &dyn Device, slot: usize, bytes: usize) -> Result<BufferSlice> {
        let memory = &mut self.memory[slot];
        let large_enough = memory.take().filter(|memory| memory.bytes >= bytes);
        let slice = match large_enough {
            Some(slice) => slice,
            None => BufferSlice::whole(device.allocate(bytes.next_power_of_two(), MemoryKind::Pinned)?),
        };
        *memory = Some(slice.clone());
        Ok(slice)
    }

    /// Launches the segment that computes the hidden states, if there is one, and copies the rows of each chunk to the host. This
    /// must be enqueued before the sampling segment, which reuses the memory of the hidden states.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn send(
        &mut self,
        executor: &mut Executor,
        bucket: Bucket,
        slot: usize,
        chunks: &[HiddenChunk],
    ) -> Result<()> {
        const EMBED: SegmentSet = SegmentSet::new(&[StepSegment::Embed]);
        // Rows of texts that are neighbours in the step are copied at once.
        let mut runs: Vec<(StepOutput, Range<usize>)> = Vec::new();
        for chunk in chunks {
            let row = self.row(chunk)?.bytes();
            let range = chunk.row * row..(chunk.row + chunk.tokens.len()) * row;
            match runs.last_mut() {
                Some((output, run)) if *output == chunk.output && run.end == range.start => {
                    run.end = range.end
                }
                _ => runs.push((chunk.output, range)),
            }
        }
        let bytes = runs.iter().map(|(_, run)| run.len()).sum();
        if bytes == 0 {
            return Ok(());
        }
        let memory = self.reserve(&**executor.device(), slot, bytes)?;
        if !executor.plan().is_encoder() {
            executor.launch(bucket, EMBED)?;
        }
        executor.run_until(executor.issued())?;
        let (step, _, stream) = executor.step(bucket)?;
        let mut place = 0;
        for (output, run) in runs.into_iter().filter(|(_, run)| !run.is_empty()) {
            let rows = step.output(output)?.slice(run.start, run.len())?;
            stream.copy(&rows, &memory.slice(place, run.len())?)?;
            place += run.len();
        }
        Ok(())
    }
}

impl Runner {
    /// Pools the hidden states of a completed step, and ends the embedding requests that are done. Threads pool texts side by side.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn pool_hidden_states(&mut self, slot: usize, chunks: &[HiddenChunk]) -> Result<()> {
        let (mut sent, mut texts) = (Vec::with_capacity(chunks.len()), Vec::with_capacity(chunks.len()));
        let mut place = 0;
        for chunk in chunks {
            let row = self.hidden.row(chunk)?;
            let size = chunk.tokens.len() * row.bytes();
            place += size;
            let sequence = self.requests.scheduler_mut().get_mut(chunk.key);
            let Some(pooler) = sequence.and_then(|sequence| sequence.item.pooler.take()) else { continue };
            let memory = self.hidden.memory[slot].as_ref().filter(|_| size > 0);
            sent.push(memory.map(|memory| memory.slice(place - size, size)).transpose()?);
            texts.push((chunk, row, pooler));
        }
        let mut states: Vec<Cow<'_, [u8]>> = Vec::with_capacity(sent.len());
        for memory in &sent {
            states.push(match memory {
                Some(memory) => read_pinned(memory, self.executor.stream(), STEP_TIMEOUT)?,
                None => Cow::default(),
            });
        }
        let pool =
            |((chunk, row, pooler), states): (&mut (&HiddenChunk, RowType, Pooler), &Cow<'_, [u8]>)| {
                pooler.add(chunk.tokens.start, states, row.dtype, row.width)
            };
        if place < 2 * THREAD_VALUES * self.hidden.states.dtype.bytes() {
            texts.iter_mut().zip(&states).try_for_each(pool)?;
        } else {
            texts.par_iter_mut().zip(&states).try_for_each(pool)?;
        }
        for (chunk, _, pooler) in texts {
            let embedding = pooler.embedding();
            let Some(sequence) = self.requests.scheduler_mut().get_mut(chunk.key) else { continue };
            let id = sequence.item.id;
            sequence.item.pooler = Some(pooler);
            match embedding {
                None => {}
                Some(Ok(embedding)) => {
                    self.requests.add_embedding(id, embedding);
                    self.end(id);
                    self.statistics.finished += 1;
                }
                Some(Err(error)) => self.fail(id, error),
            }
        }
        Ok(())
    }
}
