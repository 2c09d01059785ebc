//! The run loop: launches a step, and reads its tokens while the next step runs.

use super::{
    RequestSequence, Runner,
    executor::{FORWARD, FORWARD_AND_SAMPLE, STEP_TIMEOUT},
    hidden_states::HiddenChunk,
    pooler::Pooler,
    readback::{LogitRows, PendingReadback, SampledRows, SampledToken},
    request_table::TableRow,
    top_tokens::top_tokens,
};
use crate::{
    error::{EngineError, Result},
    plan::{Bucket, EnginePlan, SegmentSet, StepOutput, StepSegment, StepState},
    request::{FinishReason, TokenEvent},
    schedule::{LaunchedStep, ScheduledStep, SequenceKey},
    statistics::Phase,
};
use dsrun_core::{Error, op::IN_PROMPT};
use std::time::Instant;

/// A step that is launched and not yet completed.
#[derive(Debug)]
pub(super) struct InFlightStep {
    /// The pending copy of its results to the host; `None` until [`Runner::send_results`] enqueues it.
    readback: Option<PendingReadback>,
    bucket: Bucket,
    outputs: SamplingOutputs,
    /// The executor's count of commands at the end of the step, see
    /// [`Executor::run_until`](super::executor::Executor::run_until).
    issued: u64,
    /// The sequence of each output row. Tokens of sequences that have ended since the launch are dropped.
    sequences: Vec<SequenceKey>,
    /// The output rows whose logits are copied to the host with the tokens.
    logit_rows: Vec<usize>,
    /// The hidden states that are copied to the host with the tokens.
    chunks: Vec<HiddenChunk>,
}

/// The number of tokens of a request's draft were accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DraftOutcome {
    /// The request's sequence.
    pub(crate) key: SequenceKey,
    /// The number of proposed tokens; 0 if there was no draft.
    pub(crate) proposed: usize,
    /// The number of proposed tokens that became part of the answer.
    pub(crate) accepted: usize,
}

/// The names of the outputs of one sampling segment.
#[derive(Clone, Copy, Debug)]
struct SamplingOutputs {
    segment: StepSegment,
    processed: StepOutput,
    ids: StepOutput,
    log_probabilities: StepOutput,
}

/// The outputs of the segment that samples from all tokens.
const UNLIMITED: SamplingOutputs = SamplingOutputs {
    segment: StepSegment::Sample,
    processed: StepOutput::Processed,
    ids: StepOutput::Ids,
    log_probabilities: StepOutput::LogProbabilities,
};

/// The outputs of the segment that applies a bias and a token mask first.
const LIMITED: SamplingOutputs = SamplingOutputs {
    segment: StepSegment::SampleLimited,
    processed: StepOutput::LimitedProcessed,
    ids: StepOutput::LimitedIds,
    log_probabilities: StepOutput::LimitedLogProbabilities,
};

impl Runner {
    /// Completes a step and returns its tokens: one of every request that generates or whose prompt is processed, and after it the
    /// accepted tokens of its draft. A step that processes chunks of prompts only has none.
    ///
    /// The next step is launched before the host waits for the tokens, if the device is still busy and
    /// [`EngineOptions::launch_ahead`](crate::EngineOptions::launch_ahead) allows it.
    ///
    /// # Errors
    /// If the device failed. The running requests are lost then.
    pub(crate) fn step(&mut self) -> Result<Vec<TokenEvent>> {
        let in_flight = EnginePlan::steps_in_flight(&self.plan().options);
        // Requests that wait for the host to read their tokens would split into two groups that alternate, each step half as
        // full. With several pipeline stages this is intended: each stage works on another group.
        let ahead = |runner: &Self| {
            let takes_turns = runner.plan().stages() > 1;
            runner.in_flight.is_empty() || takes_turns || !runner.requests.scheduler().most_wait_for_host()
        };
        while self.in_flight.len() < in_flight && ahead(self) && self.launch()? {
            // If the last step is already complete (the device runs synchronously, or is fast), launching another one would only
            // delay its tokens.
            let last = self.in_flight.back().and_then(|step| step.readback.as_ref());
            if last.map(|readback| self.readback.is_complete(readback)).transpose()? == Some(true) {
                break;
            }
        }
        let Some(mut step) = self.in_flight.pop_front() else {
            let message = "requests wait, and none of them can run";
            return if self.is_idle() { Ok(Vec::new()) } else { Err(Error::internal(message).into()) };
        };
        self.send_results(&mut step)?;
        self.complete(&step)
    }

    /// Launches and completes up to `most` steps. The caller reads the tokens from the sequences.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn run_steps(&mut self, most: usize) -> Result<()> {
        let in_flight = EnginePlan::steps_in_flight(&self.plan().options);
        let mut left = most;
        loop {
            while left > 0 && self.in_flight.len() < in_flight && self.launch()? {
                left -= 1;
            }
            let Some(mut step) = self.in_flight.pop_front() else { return Ok(()) };
            self.send_results(&mut step)?;
            self.complete(&step)?;
        }
    }

    /// Takes the draft outcomes of the steps that were completed since the last call.
    pub(crate) fn take_draft_outcomes(&mut self) -> Vec<DraftOutcome> {
        std::mem::take(&mut self.draft_outcomes)
    }

    /// Schedules and enqueues the next step. Returns whether there was anything to run.
    fn launch(&mut self) -> Result<bool> {
        loop {
            let start = Instant::now();
            let mut scheduled = std::mem::take(&mut self.scheduled);
            self.requests.scheduler_mut().plan(&mut scheduled);
            let launched = self.launch_scheduled(&scheduled, start);
            self.scheduled = scheduled;
            if launched? {
                return Ok(true);
            }
            // If there is nothing else to do, wait for pages that the next request is to reuse.
            if !(self.in_flight.is_empty() && self.requests.scheduler_mut().wait_for_pages()) {
                return Ok(false);
            }
        }
    }

    fn launch_scheduled(&mut self, scheduled: &ScheduledStep, start: Instant) -> Result<bool> {
        self.apply_changes(scheduled)?;
        if scheduled.sequences.is_empty() {
            return Ok(false);
        }
        let (sequences, chunks) = self.collect_inputs(scheduled)?;
        if !chunks.is_empty() {
            // Launching this step also copies its hidden states, so the deferred steps before it must run first.
            self.send_all_results()?;
        }
        let start = self.record_phase(Phase::Schedule, start);
        let bucket = self.inputs.bucket(self.plan().limits);
        if self.plan().copies_caches(bucket) {
            self.collect_pages(scheduled);
        }
        self.executor.begin(bucket, &self.inputs)?;
        let wants_logits = |row: &usize| {
            let sequence = self.requests.scheduler().get(sequences[*row]);
            sequence.is_some_and(|sequence| sequence.item.top > 0)
        };
        let logit_rows: Vec<usize> = (0..sequences.len()).filter(wants_logits).collect();
        let outputs = self.launch_segments(bucket, &sequences, &chunks)?;
        let issued = self.executor.issued();
        let mut step =
            InFlightStep { readback: None, bucket, outputs, issued, sequences, logit_rows, chunks };
        if !self.executor.defers() || !step.chunks.is_empty() {
            self.send_results(&mut step)?;
        }
        self.in_flight.push_back(step);
        if let Some(launched) = &mut self.launched {
            let (tokens, sequences) = (scheduled.tokens, scheduled.sequences.len());
            launched.push(LaunchedStep { tokens, sequences, completed: self.completed });
        }
        self.statistics.steps += 1;
        self.record_phase(Phase::Launch, start);
        Ok(true)
    }

    /// Enqueues the copy of a step's results to the host, unless that was already done. Commands of the step that this rank has
    /// deferred run first.
    fn send_results(&mut self, launched: &mut InFlightStep) -> Result<()> {
        if launched.readback.is_some() {
            return Ok(());
        }
        self.executor.run_until(launched.issued)?;
        let InFlightStep { bucket, outputs, sequences, logit_rows, .. } = launched;
        let row_bytes = self.requests.vocabulary() * size_of::<f32>();
        let encodes = self.executor.plan().is_encoder();
        let (step, device, stream) = self.executor.step(*bucket)?;
        let results = match encodes {
            // An encoder samples nothing.
            true => None,
            false => Some(SampledRows {
                ids: step.output(outputs.ids)?,
                log_probabilities: step.output(outputs.log_probabilities)?,
                count: sequences.len(),
                logits: LogitRows { logits: step.output(outputs.processed)?, row_bytes, rows: logit_rows },
            }),
        };
        launched.readback = Some(self.readback.send(device, stream, results)?);
        Ok(())
    }

    /// Calls [`Self::send_results`] for every step in flight.
    fn send_all_results(&mut self) -> Result<()> {
        let mut in_flight = std::mem::take(&mut self.in_flight);
        let sent = in_flight.iter_mut().try_for_each(|step| self.send_results(step));
        self.in_flight = in_flight;
        sent
    }

    /// Moves pages and updates the request table, as a scheduled step requires.
    fn apply_changes(&mut self, scheduled: &ScheduledStep) -> Result<()> {
        self.move_pages(&scheduled.moves)?;
        for (key, length) in &scheduled.placed {
            let sequence = self.requests.scheduler().get(*key);
            let Some(sequence) = sequence.filter(|sequence| sequence.runs()) else { continue };
            let (slot, request) = (sequence.slot, &sequence.item);
            let row = TableRow { length: *length, pages: &sequence.pages, sampling: &request.sampling };
            self.table.place(slot, row);
            if request.sampling.penalises() {
                let counts = token_counts(sequence, *length, self.requests.vocabulary());
                match counts {
                    Some(counts) => {
                        let counts = bytemuck::cast_slice(&counts);
                        self.executor.upload_state_row(StepState::Counts, slot, counts)?;
                    }
                    None => {
                        let bytes = self.requests.vocabulary() * size_of::<i32>();
                        self.executor.clear_state_row(StepState::Counts, slot, bytes)?;
                    }
                }
            }
            self.token_limits.set_bias(&mut self.executor, slot, &request.bias)?;
        }
        let running =
            |key: &SequenceKey| self.requests.scheduler().get(*key).filter(|sequence| sequence.runs());
        for (key, from) in &scheduled.grown {
            if let Some(sequence) = running(key) {
                self.table.set_pages(sequence.slot, &sequence.pages, *from);
            }
        }
        for part in &scheduled.sequences {
            if let (Some(from), Some(sequence)) = (part.from, self.requests.scheduler().get(part.key)) {
                self.table.rewind(sequence.slot, from);
            }
        }
        self.table.upload(&mut self.executor)
    }

    /// Collects the inputs of a scheduled step. Returns the sequence of each output row, and the hidden states to send.
    fn collect_inputs(&mut self, scheduled: &ScheduledStep) -> Result<(Vec<SequenceKey>, Vec<HiddenChunk>)> {
        let (encodes, types) = (self.plan().is_encoder(), self.token_types);
        let inputs = &mut self.inputs;
        inputs.clear();
        let mut sequences = Vec::with_capacity(scheduled.sequences.len());
        let mut chunks = Vec::new();
        for part in &scheduled.sequences {
            let sequence = self.requests.scheduler().get(part.key);
            let sequence = sequence.ok_or_else(|| Error::internal("a scheduled sequence has ended"))?;
            let mut chunk = HiddenChunk::of(&sequence.item, part, inputs.tokens());
            match part.from {
                Some(_) if encodes => {
                    if part.tokens != sequence.tokens.len() {
                        return Err(
                            Error::internal("the step of an encoder has only a part of a text").into()
                        );
                    }
                    inputs.push_text(sequence.slot, &sequence.tokens, sequence.item.second, types);
                    if sequence.item.pooler.as_ref().is_some_and(Pooler::takes_scores) {
                        chunk = Some(HiddenChunk::scores(part.key, inputs.classify_last()));
                    }
                }
                Some(from) => {
                    let known = from..from + part.tokens - part.proposed();
                    inputs.push_tokens(sequence.slot, &sequence.tokens[known]);
                    inputs.push_draft(&sequence.draft[..part.proposed()]);
                }
                None => inputs.push_last_token(sequence.slot),
            }
            if let Some(chunk) = chunk {
                chunks.push(chunk);
            } else {
                inputs.sample_last(sequence.slot, part.samples);
                sequences.extend(std::iter::repeat_n(part.key, part.samples));
            }
            self.table.advance(sequence.slot, part.tokens);
        }
        Ok((sequences, chunks))
    }

    /// Collects the pages of a scheduled step whose inputs are collected.
    fn collect_pages(&mut self, scheduled: &ScheduledStep) {
        let block = self.plan().options.block_size;
        for part in &scheduled.sequences {
            let Some(sequence) = self.requests.scheduler().get(part.key) else { continue };
            let before = self.table.length(sequence.slot).saturating_sub(part.tokens);
            self.inputs.add_pages(&sequence.pages, block, before, part.tokens);
        }
    }

    /// Enqueues the segments of a step. Returns the outputs of the sampling segment that it uses.
    fn launch_segments(
        &mut self,
        bucket: Bucket,
        sequences: &[SequenceKey],
        chunks: &[HiddenChunk],
    ) -> Result<SamplingOutputs> {
        let limited = self.token_limits.applies(&self.requests, sequences);
        let outputs = if limited { LIMITED } else { UNLIMITED };
        if chunks.is_empty() && !limited && !sequences.is_empty() {
            // The host has nothing to do between the segments, so they are launched together.
            self.executor.launch(bucket, FORWARD_AND_SAMPLE)?;
            return Ok(outputs);
        }
        self.executor.launch(bucket, FORWARD)?;
        self.hidden.send(&mut self.executor, bucket, self.readback.next_slot(), chunks)?;
        if limited {
            // The host computes the mask while the device runs the forward pass.
            for (id, error) in self.token_limits.make_mask(&mut self.requests, sequences) {
                self.fail(id, error);
            }
            self.executor.upload_mask(bucket, self.token_limits.mask())?;
        }
        if !sequences.is_empty() {
            self.executor.launch(bucket, SegmentSet::new(&[outputs.segment]))?;
        }
        Ok(outputs)
    }

    /// Waits for the tokens of a step and hands them to their requests.
    fn complete(&mut self, step: &InFlightStep) -> Result<Vec<TokenEvent>> {
        let start = Instant::now();
        let readback =
            step.readback.as_ref().ok_or_else(|| Error::internal("the results of the step were not sent"))?;
        let sampled = self.readback.receive(readback, self.executor.stream(), STEP_TIMEOUT)?;
        let start = self.record_phase(Phase::Wait, start);
        self.completed += 1;
        self.pool_hidden_states(readback.slot(), &step.chunks)?;
        let mut events = Vec::with_capacity(sampled.len());
        let mut row = 0;
        for rows in step.sequences.chunk_by(|a, b| a == b) {
            let sampled = &sampled[row..row + rows.len()];
            self.deliver(step, row, sampled, &mut events)?;
            row += rows.len();
        }
        for event in events.iter().filter(|event| event.finish.is_some()) {
            self.end(event.request);
            self.statistics.finished += 1;
        }
        self.statistics.generated_tokens += events.len() as u64;
        if self.is_idle() {
            // No step follows that would do so.
            self.save_pages()?;
        }
        self.count();
        self.record_phase(Phase::Deliver, start);
        Ok(events)
    }

    /// Delivers to a request the tokens sampled from its rows of a step, the first of which is `row`. Stops at the first rejected
    /// token, and at the token that ends the request.
    fn deliver(
        &mut self,
        step: &InFlightStep,
        row: usize,
        sampled: &[SampledToken],
        events: &mut Vec<TokenEvent>,
    ) -> Result<()> {
        let key = step.sequences[row];
        let ids = sampled.iter().map(|(id, _)| *id);
        let accepted = self.requests.scheduler_mut().accept_tokens(key, ids);
        let before = events.len();
        let vocabulary = self.requests.vocabulary();
        for (offset, (id, log_probability)) in sampled[..accepted].iter().copied().enumerate() {
            let (scheduler, model_ends) = self.requests.scheduler_and_stop_ids();
            let Some(sequence) = scheduler.get_mut(key) else { break };
            let generated = sequence.generated() - accepted + offset + 1;
            let cached = sequence.reused.min(sequence.prompt);
            let item = &mut sequence.item;
            let (request, top) = (item.id, item.top);
            // Where a logit is infinite, a token can be chosen, but its probability is not a number.
            let token = u32::try_from(id).ok().filter(|_| !log_probability.is_nan());
            let Some(token) = token else {
                self.fail(request, EngineError::NoToken);
                break;
            };
            let finish = if item.ends_with(token, model_ends) {
                Some(FinishReason::Stop)
            } else {
                (generated >= item.limit).then_some(FinishReason::Length)
            };
            let constrained = match &mut item.constraint {
                Some(constraint) if finish.is_none() => constraint.accept(token),
                _ => Ok(()),
            };
            if let Err(error) = constrained {
                self.fail(request, error.into());
                break;
            }
            let mut likely = Vec::new();
            if let (true, Ok(place), Some(readback)) =
                (top > 0, step.logit_rows.binary_search(&(row + offset)), &step.readback)
            {
                let (bytes, stream) = (vocabulary * size_of::<f32>(), self.executor.stream());
                let logits = self.readback.logits(readback, place, bytes, stream, STEP_TIMEOUT)?;
                likely = top_tokens(&logits, top, (token, log_probability));
            }
            events.push(TokenEvent { request, token, log_probability, top: likely, finish, cached });
            if finish.is_some() {
                break;
            }
        }
        if accepted > 0 {
            let (proposed, used) = (sampled.len() - 1, (events.len() - before).saturating_sub(1));
            self.statistics.proposed_tokens += proposed as u64;
            self.statistics.accepted_tokens += used as u64;
            let sequence = self.requests.scheduler().get(key);
            if sequence.is_some_and(|sequence| sequence.item.speculates) {
                self.draft_outcomes.push(DraftOutcome { key, proposed, accepted: used });
            }
        }
        Ok(())
    }
}

/// The token counts of a sequence for penalties; `None` if all are 0. A sequence has counts if it ran before, or reuses cached
/// pages of its prompt. The device counts the prompt tokens that it processes itself.
fn token_counts(sequence: &RequestSequence, length: usize, vocabulary: usize) -> Option<Vec<i32>> {
    if !(sequence.shares_pages || sequence.generated() > 0 || length > 0) {
        return None;
    }
    let (prompt, generated) = sequence.tokens.split_at(sequence.prompt);
    let mut counts = vec![0i32; vocabulary];
    for token in prompt {
        counts[*token as usize] |= IN_PROMPT;
    }
    for token in generated {
        counts[*token as usize] += 1;
    }
    Some(counts)
}
