//! The engine: takes requests, runs steps, gives tokens.

mod profile;

use crate::{
    blocks::PageAllocator,
    compile::{Bucket, CompiledStep, EXTENTS, Layout, PlanCache, Resident, Shared, sizes},
    error::{EngineError, Result},
    handover::{Handover, IN_FLIGHT, Parcel},
    load::{EnginePlan, allocate_shared},
    memory::MemoryPlan,
    request::{FinishReason, Request, RequestId, RequestIds, RequestLimits, TokenEvent},
    sampling::SamplingOptions,
    schedule::{Part, Sequence, Waiting, admit, next_step},
    statistics::{Phase, Statistics},
};
use dsrun_core::{
    Error,
    device::{BufferSlice, Device, Stream},
    program::{Program, ValueId},
};
pub use profile::CallFigures;
use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long a step may take before the device counts as hung.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// Rows of logits that are scored at a time.
const SCORE_ROWS: usize = 16;

/// A request that runs.
#[derive(Debug)]
struct Running {
    id: RequestId,
    generated: usize,
    limit: usize,
    stop_ids: Vec<u32>,
    ignore_end: bool,
}

/// A step under way.
#[derive(Debug)]
struct Flight {
    /// Its tokens.
    parcel: Parcel,
    /// Whose they are. A request that has ended meanwhile gets none.
    requests: Vec<RequestId>,
}

/// Runs a model on a device.
#[derive(Debug)]
pub struct Engine {
    // Dropped first: bound calls hold buffers and weights.
    steps: HashMap<Bucket, CompiledStep>,
    plans: PlanCache,
    stream: Box<dyn Stream>,
    resident: Resident,
    shared: Shared,
    device: Arc<dyn Device>,
    plan: EnginePlan,
    states: HashMap<String, BufferSlice>,
    staging: Vec<u8>,
    handover: Handover,
    /// Steps under way, the oldest first.
    flights: VecDeque<Flight>,
    pages: PageAllocator,
    free_slots: Vec<usize>,
    waiting: VecDeque<Waiting<(RequestId, Request)>>,
    running: Vec<Running>,
    statistics: Statistics,
    ids: RequestIds,
    /// In step with `running`.
    sequences: Vec<Sequence>,
    stop_ids: Vec<u32>,
    vocabulary: usize,
}

impl Engine {
    pub(crate) fn new(
        plan: EnginePlan,
        device: Arc<dyn Device>,
        stream: Box<dyn Stream>,
        resident: Resident,
        shared: Shared,
        stop_ids: Vec<u32>,
        vocabulary: usize,
    ) -> Result<Self> {
        let state = |(id, name): (ValueId, &String)| Some((name.clone(), resident.tensors.get(&id)?.clone()));
        let named = plan.program.values_from(|_| true).map(|(id, value)| (id, &value.name));
        let states = named.filter_map(state).collect();
        let mut engine = Self {
            steps: HashMap::new(),
            plans: PlanCache::default(),
            pages: PageAllocator::new(plan.fixed.pages),
            free_slots: (0..plan.fixed.requests).rev().collect(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            sequences: Vec::new(),
            staging: Vec::new(),
            handover: Handover::new(&*device, plan.limits.rows)?,
            flights: VecDeque::new(),
            statistics: Statistics { pages_total: plan.fixed.pages, ..Statistics::default() },
            ids: RequestIds::default(),
            stream,
            resident,
            shared,
            device,
            plan,
            states,
            stop_ids,
            vocabulary,
        };
        // What ends a request differs between requests, so the host decides, a step later than the device could.
        engine.upload("stop_ids", 0, &[-1i32])?;
        Ok(engine)
    }

    /// What was allocated.
    pub fn memory(&self) -> &MemoryPlan {
        self.plan.memory()
    }

    /// The program that runs, after all passes.
    pub fn program(&self) -> &Program {
        &self.plan.program
    }

    /// Tokens a request may have, prompt and answer together.
    pub fn context(&self) -> usize {
        self.plan.context
    }

    /// The device it runs on.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Tokens that end an answer.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Pages of the KV cache in use.
    pub fn pages_in_use(&self) -> usize {
        self.pages.total() - self.pages.free()
    }

    /// What a request has to keep to.
    pub fn limits(&self) -> RequestLimits {
        RequestLimits {
            context: self.plan.context,
            vocabulary: self.vocabulary,
            block_size: self.plan.options.block_size,
            pages: self.pages.total(),
        }
    }

    /// What was counted so far.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    pub(crate) fn ids(&self) -> &RequestIds {
        &self.ids
    }

    /// Takes a request. It runs as soon as a place in the request table and its pages are free.
    ///
    /// # Errors
    /// As [`RequestLimits::check`].
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let id = self.ids.next();
        self.submit_as(id, request)?;
        Ok(id)
    }

    /// Takes a request under a number from [`Self::ids`].
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub(crate) fn submit_as(&mut self, id: RequestId, request: Request) -> Result<()> {
        let limits = self.limits();
        limits.check(&request)?;
        self.statistics.requests += 1;
        self.waiting.push_back(Waiting { pages: limits.most_pages(&request), item: (id, request) });
        self.count();
        Ok(())
    }

    /// Notes what is held now.
    fn count(&mut self) {
        self.statistics.waiting = self.waiting.len();
        self.statistics.running = self.running.len();
        self.statistics.pages_in_use = self.pages_in_use();
    }

    /// Ends a request. Its pages are free at once: what is under way still writes to them, but before anything that is
    /// launched from here on.
    pub fn cancel(&mut self, id: RequestId) {
        let before = self.waiting.len() + self.running.len();
        self.end(id);
        let ended = before - self.waiting.len() - self.running.len();
        self.statistics.cancelled += ended as u64;
        self.count();
    }

    fn end(&mut self, id: RequestId) {
        self.waiting.retain(|waiting| waiting.item.0 != id);
        if let Some(index) = self.running.iter().position(|running| running.id == id) {
            self.release(index);
        }
    }

    fn release(&mut self, index: usize) {
        self.running.remove(index);
        let sequence = self.sequences.remove(index);
        self.pages.give(sequence.pages);
        self.free_slots.push(sequence.slot);
        if self.running.is_empty() {
            // What is under way is for nobody.
            self.flights.clear();
        }
    }

    /// Runs requests on, and gives the tokens of one step: one of every request that generates, or of those whose prompt
    /// is processed. A step may have none, while prompts are processed in chunks.
    ///
    /// The step behind is launched before the tokens are waited for, if the device is still at work and
    /// [`EngineOptions::launch_ahead`](crate::EngineOptions::launch_ahead) allows it.
    ///
    /// # Errors
    /// If the device failed. The requests that run are lost then.
    pub fn step(&mut self) -> Result<Vec<TokenEvent>> {
        let start = Instant::now();
        while let Some(((id, request), slot, pages)) =
            admit(&mut self.waiting, &mut self.free_slots, &mut self.pages)
        {
            let limit = self.limits().most_tokens(&request);
            self.statistics.prompt_tokens += request.prompt.len() as u64;
            self.start(slot, &pages, &request.sampling)?;
            let prompt = as_i32(&request.prompt).collect();
            let Request { stop_ids, ignore_end, .. } = request;
            self.running.push(Running { id, generated: 0, limit, stop_ids, ignore_end });
            self.sequences.push(Sequence { slot, prompt, processed: 0, left: limit, pages });
        }
        self.took(Phase::Schedule, start);
        let start = Instant::now();
        let in_flight = if self.plan.options.launch_ahead { IN_FLIGHT } else { 1 };
        while self.flights.len() < in_flight && self.launch()? {
            // A device that computes while it is told to, or is that fast, has nothing to wait for: launching ahead would
            // only delay the tokens that are there.
            if self.flights.back().map(|flight| self.handover.arrived(&flight.parcel)).transpose()?
                == Some(true)
            {
                break;
            }
        }
        self.took(Phase::Launch, start);
        match self.flights.pop_front() {
            Some(flight) => self.land(&flight),
            None => Ok(Vec::new()),
        }
    }

    fn took(&mut self, phase: Phase, start: Instant) {
        self.statistics.phases[phase as usize].record(start.elapsed());
    }

    /// Enqueues the next step, if there is anything to do.
    fn launch(&mut self) -> Result<bool> {
        let parts = next_step(&mut self.sequences, self.plan.limits.tokens);
        if parts.is_empty() {
            return Ok(false);
        }
        let samples = parts.iter().filter(|part| part.samples);
        let requests: Vec<RequestId> = samples.map(|part| self.running[part.sequence].id).collect();
        let bucket = self.run(&parts)?;
        self.statistics.steps += 1;
        let step = &self.steps[&bucket];
        if !requests.is_empty() {
            step.enqueue("sample", &mut *self.stream)?;
        }
        let results = [step.output("ids")?, step.output("log_probability")?];
        let parcel = self.handover.send(&mut *self.stream, results, requests.len())?;
        self.flights.push_back(Flight { parcel, requests });
        Ok(true)
    }

    /// Waits for the tokens of a step and tells whose they are.
    fn land(&mut self, flight: &Flight) -> Result<Vec<TokenEvent>> {
        let start = Instant::now();
        let sampled = self.handover.receive(&flight.parcel, &mut *self.stream, STEP_TIMEOUT)?;
        self.took(Phase::Wait, start);
        let start = Instant::now();
        let mut events = Vec::new();
        for (request, (id, log_probability)) in flight.requests.iter().zip(sampled) {
            let Some(running) = self.running.iter_mut().find(|running| running.id == *request) else {
                continue;
            };
            running.generated += 1;
            let token = u32::try_from(id).map_err(|_| {
                Error::internal("no token is left to sample: the model's logits are not numbers")
            })?;
            let ends = !running.ignore_end && self.stop_ids.contains(&token);
            let finish = if ends || running.stop_ids.contains(&token) {
                Some(FinishReason::Stop)
            } else {
                (running.generated >= running.limit).then_some(FinishReason::Length)
            };
            events.push(TokenEvent { request: *request, token, log_probability, top: Vec::new(), finish });
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

    /// The logits after each token of a sequence, given those before it: `each(position, logits)` is called in order.
    ///
    /// # Errors
    /// As [`Self::submit`] for the tokens; if requests are running; if the device failed.
    pub fn score(&mut self, tokens: &[u32], each: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        self.limits().check_prompt(tokens)?;
        if !self.is_idle() {
            return Err(Error::new(dsrun_core::Code::FailedPrecondition, "requests are running").into());
        }
        let pages = tokens.len().div_ceil(self.plan.options.block_size);
        let pages = self.pages.take(pages).ok_or(EngineError::PromptTooLong {
            tokens: tokens.len(),
            context: self.pages.total() * self.plan.options.block_size,
        })?;
        let scored = self.score_in(&pages, tokens, each);
        self.pages.give(pages);
        self.sequences.clear();
        scored
    }

    fn score_in(&mut self, pages: &[i32], tokens: &[u32], each: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        self.start(0, pages, &SamplingOptions::default())?;
        let prompt: Vec<i32> = as_i32(tokens).collect();
        self.sequences = vec![Sequence { slot: 0, prompt, processed: 0, left: 0, pages: Vec::new() }];
        let chunk = SCORE_ROWS.min(self.plan.limits.tokens);
        for start in (0..tokens.len()).step_by(chunk) {
            let count = chunk.min(tokens.len() - start);
            let part = Part { sequence: 0, tokens: count, from: Some(start), samples: false };
            let rows: Vec<(i32, i32)> = (0..count as i32).map(|row| (row, -1)).collect();
            let bucket = self.run_rows(&[part], &rows)?;
            let logits = self.steps[&bucket].output("logits")?;
            let logits = download::<4>(&mut *self.stream, logits, count * self.vocabulary)?;
            let logits: Vec<f32> = logits.into_iter().map(f32::from_le_bytes).collect();
            for (row, logits) in logits.chunks_exact(self.vocabulary).enumerate() {
                each(start + row, logits);
            }
        }
        Ok(())
    }

    /// Sets up a request's row of the request table.
    fn start(&mut self, slot: usize, pages: &[i32], sampling: &SamplingOptions) -> Result<()> {
        let blocks = self.plan.fixed.blocks;
        let mut table = vec![-1; blocks];
        table.iter_mut().zip(pages).for_each(|(entry, page)| *entry = *page);
        self.upload("block_table", slot * blocks, &table)?;
        self.upload("length", slot, &[0])?;
        self.upload("finished", slot, &[0])?;
        let row = sampling.row();
        self.upload("parameters", slot * row.len(), &row)?;
        self.upload("seeds", slot * 2, &sampling.seed_row())?;
        let counts = self.state("counts")?;
        let row_bytes = self.vocabulary * 4;
        self.stream.fill(&counts.slice(slot * row_bytes, row_bytes)?, 0)?;
        Ok(())
    }

    fn state(&self, name: &str) -> Result<BufferSlice> {
        let state = self.states.get(name).cloned();
        Ok(state.ok_or_else(|| Error::internal(format!("the program has no state `{name}`")))?)
    }

    /// Writes elements of a state, from element `start` on.
    fn upload<T: bytemuck::NoUninit>(&mut self, name: &str, start: usize, elements: &[T]) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        let slice = self.state(name)?.slice(start * size_of::<T>(), bytes.len())?;
        Ok(self.stream.upload(bytes, &slice)?)
    }

    /// Enqueues the forward pass of a step; wanted rows are the last of each part that samples.
    fn run(&mut self, parts: &[Part]) -> Result<Bucket> {
        let mut end = 0;
        let mut rows = Vec::new();
        for part in parts {
            end += part.tokens as i32;
            if part.samples {
                rows.push((end - 1, self.sequences[part.sequence].slot as i32));
            }
        }
        self.run_rows(parts, &rows)
    }

    /// Enqueues the forward pass of a step. `rows` are the wanted rows and the requests they are sampled for, -1 for none.
    fn run_rows(&mut self, parts: &[Part], rows: &[(i32, i32)]) -> Result<Bucket> {
        let tokens: usize = parts.iter().map(|part| part.tokens).sum();
        let limits = Bucket { rows: self.plan.limits.rows.max(rows.len()), ..self.plan.limits };
        let bucket = Bucket::fitting(tokens, parts.len(), rows.len(), limits);
        self.compile(bucket)?;
        let step = self.steps.get(&bucket).ok_or_else(|| Error::internal("the step was not compiled"))?;

        let extents = &self.plan.program.extents;
        let place = |name: &str| step.input(name);
        self.staging.clear();
        self.staging.resize(step.input_bytes(), 0xFF); // -1 everywhere
        stage(&mut self.staging, extents, &self.sequences, parts, rows, &place)?;
        self.stream.upload(&self.staging, &self.shared.inputs.slice(0, self.staging.len())?)?;
        step.enqueue("forward", &mut *self.stream)?;
        Ok(bucket)
    }

    /// Makes sure a bucket is compiled, and that the shared memory is large enough for it.
    fn compile(&mut self, bucket: Bucket) -> Result<()> {
        if self.steps.contains_key(&bucket) {
            return Ok(());
        }
        let sizes = sizes(bucket, self.plan.fixed);
        let layout = Layout::new(&self.plan.program, &*self.device, &sizes)?;
        let fits = layout.input_bytes <= self.shared.inputs.bytes
            && layout.arena_bytes <= self.shared.arena.bytes
            && layout.workspace_bytes <= self.shared.workspace.bytes;
        if !fits {
            // Steps are bound to the memory they share, so they go with it, once none is under way.
            self.stream.synchronize("the steps under way", STEP_TIMEOUT)?;
            self.steps.clear();
            self.shared = allocate_shared(&*self.device, &layout)?;
        }
        let step = CompiledStep::new(
            &self.plan.program,
            &layout,
            &*self.device,
            &mut *self.stream,
            &mut self.plans,
            &self.resident,
            &self.shared,
        )?;
        tracing::debug!(?bucket, calls = step.calls(), plans = self.plans.len(), "compiled a step");
        self.steps.insert(bucket, step);
        Ok(())
    }
}

/// Writes what a step is told into the staging memory of its inputs: `place` says where each stands.
fn stage(
    staging: &mut [u8],
    extents: &[Arc<str>],
    sequences: &[Sequence],
    parts: &[Part],
    rows: &[(i32, i32)],
    place: &dyn Fn(&str) -> Result<Range<usize>>,
) -> Result<()> {
    let tokens: usize = parts.iter().map(|part| part.tokens).sum();
    let extent = |name: &Arc<str>| match &**name {
        "tokens" => tokens as i32,
        "sequences" => parts.len() as i32,
        "rows" => rows.len() as i32,
        _ => 0,
    };
    let extents: Vec<i32> = extents.iter().map(extent).collect();
    let mut ids = Vec::with_capacity(tokens);
    let mut columns = [Vec::new(), Vec::new(), Vec::new()];
    for part in parts {
        let sequence = &sequences[part.sequence];
        let source = part.from.map_or(-1, |_| ids.len() as i32);
        if let Some(from) = part.from {
            ids.extend_from_slice(&sequence.prompt[from..from + part.tokens]);
        }
        columns[0].push(sequence.slot as i32);
        columns[1].push(part.tokens as i32);
        columns[2].push(source);
    }
    let [requests, lengths, sources] = columns;
    let (row_indices, row_requests): (Vec<i32>, Vec<i32>) = rows.iter().copied().unzip();
    for (name, values) in [
        (EXTENTS, &extents),
        ("step_request", &requests),
        ("step_length", &lengths),
        ("step_source", &sources),
        ("prompt_ids", &ids),
        ("rows", &row_indices),
        ("row_request", &row_requests),
    ] {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let place = staging.get_mut(place(name)?).and_then(|place| place.get_mut(..bytes.len()));
        place
            .ok_or_else(|| Error::internal(format!("{name} does not fit its input")))?
            .copy_from_slice(bytes);
    }
    Ok(())
}

fn as_i32(tokens: &[u32]) -> impl Iterator<Item = i32> + '_ {
    // Tokens were checked against the vocabulary, which is far below `i32::MAX`.
    tokens.iter().map(|token| *token as i32)
}

/// The first `count` elements of an output.
fn download<const N: usize>(
    stream: &mut dyn Stream,
    output: &BufferSlice,
    count: usize,
) -> Result<Vec<[u8; N]>> {
    let mut bytes = vec![0; count * N];
    stream.download(&output.slice(0, bytes.len())?, &mut bytes, "the results of a step", STEP_TIMEOUT)?;
    Ok(bytes.as_chunks::<N>().0.to_vec())
}
