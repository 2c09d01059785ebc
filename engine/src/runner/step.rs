//! Running steps: what is planned is launched, and its tokens are read when the step behind is under way.

use super::token_limits::likeliest;
use crate::engine::{Engine, Flight, LIMITED, STEP_TIMEOUT};
use crate::{
    error::{EngineError, Result},
    plan::allocate_shared,
    plan::{Bucket, CompiledStep, Layout, Shared, Site, sizes},
    request::{FinishReason, TokenEvent},
    runner::inputs::StepInputs,
    runner::readback::{IN_FLIGHT, LogitRows, Sampled},
    runner::request_table::Row,
    schedule::Key,
    speculation::Proposer,
    statistics::Phase,
};
use dsrun_core::Error;
use std::time::Instant;

/// What runs of a step without anything between: all of it, or piece by piece where hidden states are wanted or tokens are limited.
pub(crate) const RUNS: [&[&str]; 5] =
    [&["forward", "sample"], &["forward"], &["embed"], &["sample"], &[LIMITED]];

impl Engine {
    /// Runs requests on, and gives the tokens of one step: one of every request that generates, or of those whose prompt
    /// is processed, and behind it those of its draft that are right. A step may have none, while prompts are processed in
    /// chunks.
    ///
    /// The step behind is launched before the tokens are waited for, if the device is still at work and
    /// [`EngineOptions::launch_ahead`](crate::EngineOptions::launch_ahead) allows it.
    ///
    /// # Errors
    /// If the device failed. The requests that run are lost then.
    pub fn step(&mut self) -> Result<Vec<TokenEvent>> {
        // Now and not when tokens come: whoever asked for these is not kept waiting.
        self.propose()?;
        let in_flight = if self.plan.options.launch_ahead { IN_FLIGHT } else { 1 };
        // Those that wait would fall into two halves that take turns, and steps would be half as full.
        let ahead = |engine: &Self| engine.flights.is_empty() || !engine.scheduler.most_wait();
        while self.flights.len() < in_flight && ahead(self) && self.launch()? {
            // A device that computes while it is told to, or is that fast, has nothing to wait for: launching ahead would
            // only delay the tokens that are there.
            if self.flights.back().map(|flight| self.handover.arrived(&flight.parcel)).transpose()?
                == Some(true)
            {
                break;
            }
        }
        let Some(flight) = self.flights.pop_front() else {
            let message = "requests wait, and none of them can run";
            return if self.is_idle() { Ok(Vec::new()) } else { Err(Error::internal(message).into()) };
        };
        self.land(&flight)
    }

    /// Runs up to so many steps to their end, for whoever reads their tokens from the sequences.
    pub(crate) fn run_steps(&mut self, most: usize) -> Result<()> {
        let in_flight = if self.plan.options.launch_ahead { IN_FLIGHT } else { 1 };
        let mut left = most;
        loop {
            while left > 0 && self.flights.len() < in_flight && self.launch()? {
                left -= 1;
            }
            let Some(flight) = self.flights.pop_front() else { return Ok(()) };
            self.land(&flight)?;
        }
    }

    pub(crate) fn took(&mut self, phase: Phase, since: Instant) -> Instant {
        let now = Instant::now();
        self.statistics.phases[phase as usize].record(now - since);
        now
    }

    /// Enqueues the next step, if there is anything to do.
    fn launch(&mut self) -> Result<bool> {
        let start = Instant::now();
        let mut plan = std::mem::take(&mut self.step_plan);
        self.scheduler.plan(&mut plan);
        self.step_plan = plan;
        self.apply_plan()?;
        if self.step_plan.parts.is_empty() {
            return Ok(false);
        }
        let mut inputs = std::mem::take(&mut self.inputs);
        inputs.clear();
        let mut requests = Vec::with_capacity(self.step_plan.parts.len());
        let mut chunks = Vec::new();
        for part in &self.step_plan.parts {
            let sequence = self.scheduler.get(part.key);
            let sequence = sequence.ok_or_else(|| Error::internal("a part of a step has no request"))?;
            let chunk = sequence.item.chunk(part, inputs.tokens());
            match part.from {
                Some(from) => {
                    let known = from..from + part.tokens - part.proposed();
                    inputs.bring_tokens(sequence.slot, &sequence.tokens[known]);
                    inputs.bring_more(&sequence.draft[..part.proposed()]);
                }
                None => inputs.bring_last(sequence.slot),
            }
            if let Some(chunk) = chunk {
                chunks.push(chunk);
            } else {
                inputs.sample_last(sequence.slot, part.samples);
                requests.extend(std::iter::repeat_n(part.key, part.samples));
            }
            self.table.advance(sequence.slot, part.tokens);
        }
        let start = self.took(Phase::Schedule, start);
        let bucket = self.begin(&inputs)?;
        self.inputs = inputs;
        let wants_logits = |key: &Key| self.scheduler.get(*key).is_some_and(|sequence| sequence.item.top > 0);
        let logits: Vec<usize> = (0..requests.len()).filter(|row| wants_logits(&requests[*row])).collect();
        let limited = self.is_limited(&requests);
        if chunks.is_empty() && !limited && !requests.is_empty() {
            // Nothing comes between.
            self.run(bucket, &["forward", "sample"])?;
        } else {
            self.run(bucket, &["forward"])?;
            self.send_hidden(bucket, &chunks)?;
            if limited {
                // Made and brought while the device is at work.
                self.make_mask(&requests);
                let place = self.steps[&bucket].input("mask")?;
                let place = self.shared.inputs.slice(place.start, place.len())?;
                self.upload_mask(&place)?;
                self.run(bucket, &[LIMITED])?;
            } else if !requests.is_empty() {
                self.run(bucket, &["sample"])?;
            }
        }
        let [processed, ids, log_probability] = match limited {
            true => ["limited_processed", "limited_ids", "limited_log_probability"],
            false => ["processed", "ids", "log_probability"],
        };
        let step = &self.steps[&bucket];
        let results = [step.output(ids)?, step.output(log_probability)?];
        let row_bytes = self.vocabulary * size_of::<f32>();
        let rows = LogitRows { logits: step.output(processed)?, row_bytes, rows: &logits };
        let parcel = self.handover.send(&*self.device, &mut *self.stream, results, requests.len(), rows)?;
        self.flights.push_back(Flight { parcel, requests, logits, chunks });
        self.statistics.steps += 1;
        self.took(Phase::Launch, start);
        Ok(true)
    }

    /// Does what has to be done before the step that is planned: moves pages, and brings the request table up to date.
    fn apply_plan(&mut self) -> Result<()> {
        let plan = std::mem::take(&mut self.step_plan);
        if let Some(swap) = &mut self.swap {
            swap.swap(&mut *self.stream, &plan.swap_out, &plan.swap_in)?;
        }
        for (key, length) in &plan.placed {
            let Some(sequence) = self.scheduler.get(*key).filter(|sequence| sequence.runs()) else {
                continue;
            };
            let (slot, sampling) = (sequence.slot, &sequence.item.sampling);
            self.table.place(slot, Row { length: *length, pages: &sequence.pages, sampling });
            if sampling.penalises() {
                // Tokens of the prompt that it brings itself are counted by the device.
                let known = sequence.shared || sequence.generated() > 0 || *length > 0;
                let tokens: &[i32] = if known { &sequence.tokens } else { &[] };
                let (prompt, generated) = tokens.split_at(sequence.prompt.min(tokens.len()));
                let (prompt, generated) = (prompt.to_vec(), generated.to_vec());
                self.set_counts(slot, &prompt, &generated)?;
            }
            self.set_bias(slot, *key)?;
        }
        for (key, from) in &plan.grown {
            let Some(sequence) = self.scheduler.get(*key).filter(|sequence| sequence.runs()) else {
                continue;
            };
            self.table.grow(sequence.slot, &sequence.pages, *from);
        }
        for part in &plan.parts {
            if let (Some(from), Some(sequence)) = (part.from, self.scheduler.get(part.key)) {
                self.table.rewind(sequence.slot, from);
            }
        }
        self.step_plan = plan;
        self.table.upload(&mut *self.stream)
    }

    /// Waits for the tokens of a step and tells whose they are.
    fn land(&mut self, flight: &Flight) -> Result<Vec<TokenEvent>> {
        let start = Instant::now();
        let sampled = self.handover.receive(&flight.parcel, &mut *self.stream, STEP_TIMEOUT)?;
        let start = self.took(Phase::Wait, start);
        self.pool(flight.parcel.slot(), &flight.chunks)?;
        let mut events = Vec::with_capacity(sampled.len());
        let mut row = 0;
        for rows in flight.requests.chunk_by(|a, b| a == b) {
            let sampled = &sampled[row..row + rows.len()];
            self.take(flight, row, sampled, &mut events)?;
            row += rows.len();
        }
        for event in events.iter().filter(|event| event.finish.is_some()) {
            self.end(event.request);
            self.statistics.finished += 1;
        }
        self.statistics.generated_tokens += events.len() as u64;
        self.count();
        self.took(Phase::Deliver, start);
        Ok(events)
    }

    /// Takes the tokens of a request, sampled from rows of a step from `row` on, as far as they are right and until it ends.
    fn take(
        &mut self,
        flight: &Flight,
        row: usize,
        sampled: &[Sampled],
        events: &mut Vec<TokenEvent>,
    ) -> Result<()> {
        let key = flight.requests[row];
        let right = self.scheduler.took(key, sampled.iter().map(|(id, _)| *id));
        let before = events.len();
        for (offset, (id, log_probability)) in sampled[..right].iter().copied().enumerate() {
            let Some(sequence) = self.scheduler.get_mut(key) else { break };
            let generated = sequence.generated() - right + offset + 1;
            let item = &mut sequence.item;
            let (request, top) = (item.id, item.top);
            let Ok(token) = u32::try_from(id) else {
                self.fail(request, EngineError::NoToken);
                break;
            };
            let finish = if item.ends_with(token, &self.stop_ids) {
                Some(FinishReason::Stop)
            } else {
                (generated >= item.limit).then_some(FinishReason::Length)
            };
            let accepted = match &mut item.constraint {
                Some(constraint) if finish.is_none() => constraint.accept(token),
                _ => Ok(()),
            };
            if let Err(error) = accepted {
                self.fail(request, error.into());
                break;
            }
            let mut likely = Vec::new();
            if let (true, Ok(place)) = (top > 0, flight.logits.binary_search(&(row + offset))) {
                let (bytes, stream) = (self.vocabulary * size_of::<f32>(), &mut *self.stream);
                let logits = self.handover.logits(&flight.parcel, place, bytes, stream, STEP_TIMEOUT)?;
                likely = likeliest(&logits, top, (token, log_probability));
            }
            events.push(TokenEvent { request, token, log_probability, top: likely, finish });
            if finish.is_some() {
                break;
            }
        }
        if right > 0 {
            let used = (events.len() - before).saturating_sub(1);
            self.speculate(key, sampled.len() - 1, used);
        }
        Ok(())
    }

    /// Learns how many of the tokens proposed for a request were right, and proposes more or asks for them.
    fn speculate(&mut self, key: Key, proposed: usize, right: usize) {
        self.statistics.proposed_tokens += proposed as u64;
        self.statistics.accepted_tokens += right as u64;
        let Some(sequence) = self.scheduler.get_mut(key) else { return };
        let generated = sequence.generated();
        let item = &mut sequence.item;
        match &mut item.proposer {
            Some(Proposer::Lookup(lookup)) if proposed > 0 => lookup.learn(proposed, right),
            Some(Proposer::Draft(length)) if proposed > 0 => length.learn(proposed, right),
            _ => {}
        }
        // Before that, a token that ends the answer may not be sampled, which differs from row to row.
        if generated < item.min_tokens {
            return;
        }
        match &mut item.proposer {
            Some(Proposer::Lookup(lookup)) => sequence.draft = lookup.propose(&sequence.tokens),
            Some(Proposer::Draft(length)) => {
                let tokens = length.next();
                self.drafter.iter_mut().filter(|_| tokens > 0).for_each(|drafter| drafter.want(key, tokens));
            }
            None => {}
        }
    }

    /// Enqueues the forward pass of a step.
    pub(crate) fn forward(&mut self, inputs: &StepInputs) -> Result<Bucket> {
        let bucket = self.begin(inputs)?;
        self.run(bucket, &["forward"])?;
        Ok(bucket)
    }

    /// Enqueues segments of a step that has begun.
    pub(crate) fn run(&mut self, bucket: Bucket, segments: &[&str]) -> Result<()> {
        let step = self.steps.get_mut(&bucket).ok_or_else(|| Error::internal("the step was not compiled"))?;
        let program = self.plan.program_of(bucket);
        let site = Site { program, resident: &self.resident, shared: &self.shared };
        step.enqueue(segments, &site, &*self.device, &mut *self.stream)
    }

    /// Makes sure that the step for these inputs is compiled, and brings them to the device.
    fn begin(&mut self, inputs: &StepInputs) -> Result<Bucket> {
        let bucket = inputs.bucket(self.plan.limits);
        self.begin_as(bucket, inputs)?;
        Ok(bucket)
    }

    /// As [`Self::begin`], for the step of a bucket that has room for the inputs.
    pub(crate) fn begin_as(&mut self, bucket: Bucket, inputs: &StepInputs) -> Result<()> {
        self.compile(bucket)?;
        let step = self.steps.get(&bucket).ok_or_else(|| Error::internal("the step was not compiled"))?;
        // The mask is the last input, and brought by itself where it is read.
        let bytes = step.input("mask")?.start;
        self.staging.clear();
        self.staging.resize(bytes, 0xFF); // -1 everywhere
        inputs.stage(&mut self.staging, &self.plan.program.extents, &|name| step.input(name))?;
        // From step to step of the same requests, each with its next token, nothing changes. Only masks are written behind it.
        if self.staging != self.brought {
            // What an upload that fails leaves there is not known.
            self.brought.clear();
            self.stream.upload(&self.staging, &self.shared.inputs.slice(0, self.staging.len())?)?;
            std::mem::swap(&mut self.staging, &mut self.brought);
        }
        Ok(())
    }

    /// Makes sure a bucket is compiled, and that the shared memory is large enough for it.
    fn compile(&mut self, bucket: Bucket) -> Result<()> {
        if self.steps.contains_key(&bucket) {
            return Ok(());
        }
        let (program, sizes) = (self.plan.program_of(bucket), sizes(bucket, self.plan.fixed));
        let mut layout = Layout::new(program, &*self.device, &sizes, bucket.every)?;
        let Shared { inputs, arena, workspace } = &self.shared;
        let there = [inputs.bytes, arena.bytes, workspace.bytes];
        if layout.shared_bytes().iter().zip(&there).any(|(needed, there)| needed > there) {
            // Steps are bound to the memory they share, so they go with it, once none is under way.
            self.stream.synchronize("the steps under way", STEP_TIMEOUT)?;
            self.steps.clear();
            self.brought.clear();
            // Of each no less than before: what one step needs more of, another may need less of.
            layout.cover(there);
            self.shared = allocate_shared(&*self.device, &layout)?;
        }
        let site = Site { program, resident: &self.resident, shared: &self.shared };
        let (capture, start) = (self.plan.options.graphs, Instant::now());
        let step = CompiledStep::new(layout, &site, &*self.device, &mut self.plans, capture)?;
        let (calls, plans) = (step.calls(), self.plans.len());
        tracing::debug!(?bucket, calls, plans, took = ?start.elapsed(), "compiled a step");
        self.statistics.compiled_steps += 1;
        self.steps.insert(bucket, step);
        Ok(())
    }
}
