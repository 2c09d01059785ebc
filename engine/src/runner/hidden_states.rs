//! Requests for vectors: they go through the same steps as prompts, beside requests that generate, and sample nothing. Behind
//! the layers of a step with such a request the segment `embed` runs, and the hidden states that are needed are sent to the host.

use crate::engine::{Engine, Running, STEP_TIMEOUT, as_i32};
use crate::{
    error::Result,
    plan::Bucket,
    request::RequestId,
    runner::pooler::{EmbeddingRequest, Pooler, Pooling},
    runner::readback::{IN_FLIGHT, read},
    sampling::SamplingOptions,
    schedule::{Entry, Key, Part},
};
use dsrun_core::{
    DType, Error, Size, WeightFormat,
    device::{BufferSlice, Device, MemoryKind},
    program::Program,
};
use dsrun_models::step::OUTPUTS;
use std::ops::Range;

/// The segment of a program that makes hidden states for vectors, and its output.
const EMBED: [&str; 2] = ["embed", "hidden"];

/// Pinned memory for the hidden states of the steps in flight.
#[derive(Debug)]
pub(crate) struct HiddenStates {
    dtype: DType,
    /// Features of a token.
    width: usize,
    /// Of each step in flight; grows as it is needed.
    memory: [Option<BufferSlice>; IN_FLIGHT],
}

/// Tokens of a text whose hidden states a step sends.
#[derive(Debug)]
pub(crate) struct Chunk {
    key: Key,
    /// Which tokens of the text.
    tokens: Range<usize>,
    /// The row of the step that the first of them has.
    row: usize,
}

impl HiddenStates {
    /// Those of a program.
    pub(crate) fn new(program: &Program) -> Result<Self> {
        let index = OUTPUTS.iter().position(|name| *name == EMBED[1]);
        let id = index.and_then(|index| program.outputs.get(index));
        let tensor = id.map(|id| program.value(*id)).transpose()?.and_then(|value| value.tensor_type());
        let width =
            tensor.and_then(|tensor| Some((tensor.dtype, tensor.shape.get(1).and_then(Size::known)?)));
        let (dtype, width) = width.ok_or_else(|| Error::internal("the program has no hidden states"))?;
        Ok(Self { dtype, width, memory: [const { None }; IN_FLIGHT] })
    }

    fn row_bytes(&self) -> usize {
        self.width * self.dtype.bytes()
    }

    /// Memory for the hidden states of so many tokens.
    fn room(&mut self, device: &dyn Device, slot: usize, tokens: usize) -> Result<BufferSlice> {
        let (bytes, memory) = (self.row_bytes(), &mut self.memory[slot]);
        let large = memory.take().filter(|memory| memory.bytes >= tokens * bytes);
        let slice = match large {
            Some(slice) => slice,
            None => {
                BufferSlice::whole(device.allocate(tokens.next_power_of_two() * bytes, MemoryKind::Pinned)?)
            }
        };
        *memory = Some(slice.clone());
        Ok(slice)
    }
}

impl Running {
    /// A request that sums up hidden states.
    fn pooling(id: RequestId, pooler: Pooler) -> Self {
        Self {
            id,
            limit: 1,
            sampling: SamplingOptions::default(),
            stop_ids: Vec::new(),
            ignore_end: false,
            min_tokens: 0,
            bias: Vec::new(),
            top: 0,
            constraint: None,
            pooler: Some(pooler),
            proposer: None,
        }
    }

    /// What a part of a step brings to its vector, if it is a request for one. The part's first token has the row `row`.
    pub(crate) fn chunk(&self, part: &Part, row: usize) -> Option<Chunk> {
        let (pooler, from) = (self.pooler.as_ref()?, part.from?);
        let tokens = pooler.wanted(from..from + part.tokens);
        Some(Chunk { key: part.key, row: row + tokens.start - from, tokens })
    }
}

impl Engine {
    /// Takes a request for a vector, which [`Self::take_embeddings`] gives when it is there. Its tokens are computed like those
    /// of prompts, so it may share steps, and pages, with other requests. A text may be as long as the context.
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub fn submit_embedding(&mut self, request: EmbeddingRequest) -> Result<RequestId> {
        let id = self.ids.next();
        self.submit_embedding_as(id, request)?;
        Ok(id)
    }

    /// Takes a request for a vector under a number from [`Self::ids`].
    ///
    /// # Errors
    /// As [`Self::submit_embedding`].
    pub(crate) fn submit_embedding_as(&mut self, id: RequestId, request: EmbeddingRequest) -> Result<()> {
        self.limits().check_embedding(&request)?;
        let EmbeddingRequest { tokens, pooling, priority } = request;
        let key = self.scheduler.add(Entry {
            prompt: as_i32(&tokens).collect(),
            limit: 1,
            priority,
            waits: false,
            // The hidden states of tokens in the cache are gone.
            whole: pooling == Pooling::Mean,
            guesses: false,
            item: Running::pooling(id, Pooler::new(tokens.len(), pooling)),
        });
        self.keys.insert(id, key);
        self.statistics.requests += 1;
        self.count();
        Ok(())
    }

    /// Vectors that have come since this was last asked, of length 1.
    pub fn take_embeddings(&mut self) -> Vec<(RequestId, Vec<f32>)> {
        std::mem::take(&mut self.embeddings)
    }

    /// Sends the hidden states of a step's chunks to the host, one chunk behind the other. Before anything is sampled, since
    /// they have their place only as long.
    pub(crate) fn send_hidden(&mut self, bucket: Bucket, chunks: &[Chunk]) -> Result<()> {
        let count = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        if count == 0 {
            return Ok(());
        }
        let [segment, output] = EMBED;
        let bytes = self.hidden.row_bytes();
        let memory = self.hidden.room(&*self.device, self.handover.next_slot(), count)?;
        self.run(bucket, &[segment])?;
        let hidden = self.steps[&bucket].output(output)?;
        let mut place = 0;
        for chunk in chunks {
            let size = chunk.tokens.len() * bytes;
            if size > 0 {
                self.stream.copy(&hidden.slice(chunk.row * bytes, size)?, &memory.slice(place, size)?)?;
            }
            place += size;
        }
        Ok(())
    }

    /// Pools the hidden states of a step, which have arrived, and ends the requests that are complete.
    pub(crate) fn pool(&mut self, slot: usize, chunks: &[Chunk]) -> Result<()> {
        let (bytes, width, dtype) = (self.hidden.row_bytes(), self.hidden.width, self.hidden.dtype);
        let mut place = 0;
        for chunk in chunks {
            let size = chunk.tokens.len() * bytes;
            place += size;
            let Some(sequence) = self.scheduler.get_mut(chunk.key) else { continue };
            let (id, Some(pooler)) = (sequence.item.id, &mut sequence.item.pooler) else { continue };
            if let (Some(memory), true) = (&self.hidden.memory[slot], size > 0) {
                let sent = read(&memory.slice(place - size, size)?, &mut *self.stream, STEP_TIMEOUT)?;
                let mut states = vec![0.0; chunk.tokens.len() * width];
                WeightFormat::Dense(dtype).decode_row(&sent, &mut states)?;
                pooler.take(chunk.tokens.start, &states, width);
            }
            match pooler.vector() {
                None => {}
                Some(Ok(vector)) => {
                    self.embeddings.push((id, vector));
                    self.end(id);
                    self.statistics.finished += 1;
                }
                Some(Err(error)) => self.fail(id, error),
            }
        }
        Ok(())
    }
}
