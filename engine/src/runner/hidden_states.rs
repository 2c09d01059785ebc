//! Hidden states for embedding requests. These go through the same steps as prompts, beside requests that generate, and sample
//! nothing. In a step with such a request the segment `embed` runs after the layers, and the hidden states that are needed are
//! copied to the host.

use super::{
    Runner,
    active_request::ActiveRequest,
    executor::{Executor, STEP_TIMEOUT},
    readback::read_pinned,
};
use crate::{
    error::Result,
    plan::{Bucket, SegmentSet, StepOutput, StepSegment},
    schedule::{ScheduledSequence, SequenceKey},
};
use dsrun_core::{
    DType, Error, Size, WeightFormat,
    device::{BufferSlice, Device, MemoryKind},
    program::Program,
};
use std::ops::Range;

/// Pinned memory for the hidden states of the steps in flight.
#[derive(Debug)]
pub(super) struct HiddenStates {
    dtype: DType,
    /// Features of a token.
    width: usize,
    /// The memory of each step in flight; grows with demand.
    memory: Vec<Option<BufferSlice>>,
}

/// Tokens of one request whose hidden states a step copies to the host.
#[derive(Debug)]
pub(super) struct HiddenChunk {
    key: SequenceKey,
    /// The tokens, by their index in the text.
    tokens: Range<usize>,
    /// The row of the step with the first of them.
    row: usize,
}

impl HiddenChunk {
    /// The hidden states that a scheduled sequence contributes to its embedding; `None` if it is no embedding request. The first
    /// token of the sequence is in row `row` of the step.
    pub(super) fn of(request: &ActiveRequest, part: &ScheduledSequence, row: usize) -> Option<Self> {
        let (pooler, from) = (request.pooler.as_ref()?, part.from?);
        let tokens = pooler.needed(from..from + part.tokens);
        Some(Self { key: part.key, row: row + tokens.start - from, tokens })
    }
}

impl HiddenStates {
    /// Memory for the hidden states of a program, for `depth` steps in flight.
    ///
    /// # Errors
    /// If the program has no hidden states.
    pub(super) fn new(program: &Program, depth: usize) -> Result<Self> {
        let id = StepOutput::Hidden.value(program);
        let tensor = id.map(|id| program.value(id)).transpose()?.and_then(|value| value.tensor_type());
        let width =
            tensor.and_then(|tensor| Some((tensor.dtype, tensor.shape.get(1).and_then(Size::known)?)));
        let (dtype, width) = width.ok_or_else(|| Error::internal("the program has no hidden states"))?;
        Ok(Self { dtype, width, memory: vec![None; depth.max(1)] })
    }

    fn row_bytes(&self) -> usize {
        self.width * self.dtype.bytes()
    }

    /// Memory for the hidden states of this many tokens.
    fn reserve(&mut self, device: &dyn Device, slot: usize, tokens: usize) -> Result<BufferSlice> {
        let (bytes, memory) = (self.row_bytes(), &mut self.memory[slot]);
        let large_enough = memory.take().filter(|memory| memory.bytes >= tokens * bytes);
        let slice = match large_enough {
            Some(slice) => slice,
            None => {
                BufferSlice::whole(device.allocate(tokens.next_power_of_two() * bytes, MemoryKind::Pinned)?)
            }
        };
        *memory = Some(slice.clone());
        Ok(slice)
    }

    /// Runs the segment of hidden states and copies those of the chunks to the host, chunk after chunk. This has to happen before
    /// the step samples, because the memory of the hidden states is reused.
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
        let count = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        if count == 0 {
            return Ok(());
        }
        let bytes = self.row_bytes();
        let memory = self.reserve(&**executor.device(), slot, count)?;
        executor.launch(bucket, EMBED)?;
        executor.run_until(executor.ordered())?;
        let (step, _, stream) = executor.step(bucket)?;
        let hidden = step.output(StepOutput::Hidden)?;
        let mut place = 0;
        for chunk in chunks {
            let size = chunk.tokens.len() * bytes;
            if size > 0 {
                stream.copy(&hidden.slice(chunk.row * bytes, size)?, &memory.slice(place, size)?)?;
            }
            place += size;
        }
        Ok(())
    }
}

impl Runner {
    /// Pools the hidden states of a completed step, and ends the embedding requests that are complete.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn pool_hidden_states(&mut self, slot: usize, chunks: &[HiddenChunk]) -> Result<()> {
        let (bytes, width, dtype) = (self.hidden.row_bytes(), self.hidden.width, self.hidden.dtype);
        let mut place = 0;
        for chunk in chunks {
            let size = chunk.tokens.len() * bytes;
            place += size;
            let Some(sequence) = self.requests.scheduler_mut().get_mut(chunk.key) else { continue };
            let (id, Some(pooler)) = (sequence.item.id, &mut sequence.item.pooler) else { continue };
            if let (Some(memory), true) = (&self.hidden.memory[slot], size > 0) {
                let memory = memory.slice(place - size, size)?;
                let sent = read_pinned(&memory, self.executor.stream(), STEP_TIMEOUT)?;
                let mut states = vec![0.0; chunk.tokens.len() * width];
                WeightFormat::Dense(dtype).decode_row(&sent, &mut states)?;
                pooler.add(chunk.tokens.start, &states, width);
            }
            match pooler.embedding() {
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
