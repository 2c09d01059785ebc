//! The executor: a model's weights and states on one device, and the steps compiled for them.

use super::{
    followers::{Command, Followers},
    inputs::StepInputs,
};
use crate::{
    error::Result,
    plan::{
        Bucket, CacheRing, CompiledStep, DiskReads, EnginePlan, ExecutionContext, Layout, PlanCache,
        Resident, Rings, SegmentSet, SharedMemory, StepInput, StepPages, StepSegment, StepState, WeightRing,
        reads_caches_in_place,
    },
    processes::Processes,
    trace::{RankTrace, SpanKind},
};
use dsrun_core::{
    Code, Error,
    device::{BufferSlice, Device, Stream},
};
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

/// The time after which a step is considered hung.
pub(crate) const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// The segment that computes the logits.
pub(super) const FORWARD: SegmentSet = SegmentSet::new(&[StepSegment::Forward]);

/// The segments of a step that samples without token limits and returns no hidden states.
pub(super) const FORWARD_AND_SAMPLE: SegmentSet =
    SegmentSet::new(&[StepSegment::Forward, StepSegment::Sample]);

/// The sets of segments that are launched together: the whole step, or segment by segment if the host reads hidden states or
/// uploads a token mask in between.
const LAUNCHES: [SegmentSet; 5] = [
    FORWARD_AND_SAMPLE,
    FORWARD,
    SegmentSet::new(&[StepSegment::Embed]),
    SegmentSet::new(&[StepSegment::Sample]),
    SegmentSet::new(&[StepSegment::SampleLimited]),
];

/// Runs the steps of a model on one device, and forwards each command to the other ranks.
#[derive(Debug)]
pub(crate) struct Executor {
    /// The other ranks, if this is rank 0 of several.
    followers: Option<Followers>,
    /// Commands that were sent to the other ranks but not run here yet, if this rank [defers](Self::defer) them.
    deferred: Option<VecDeque<Command>>,
    /// The total number of commands deferred so far, those that have run included.
    issued: u64,
    // Declared before the buffers and weights that bound calls refer to, so that it is dropped first.
    steps: HashMap<Bucket, CompiledStep>,
    plans: PlanCache,
    stream: Box<dyn Stream>,
    resident: Resident,
    /// The ring buffer of device slots for streamed layers, if any layer is streamed.
    ring: Option<WeightRing>,
    /// The slots on the device for keys and values in host memory, if there are any.
    caches: Option<CacheRing>,
    /// The pages of the step whose inputs are uploaded.
    pages: StepPages,
    /// Bytes that steps were expected to read in host memory.
    read_in_place: u64,
    shared: SharedMemory,
    /// The request table.
    table: BufferSlice,
    device: Arc<dyn Device>,
    plan: EnginePlan,
    compiled_steps: u64,
    /// The inputs of the next step. Reused to avoid an allocation per step.
    staging: Vec<u8>,
    /// What the start of the input buffer on the device holds; empty if unknown.
    uploaded: Vec<u8>,
    /// Records what is run, if the plan has a trace.
    trace: Option<RankTrace>,
}

impl Executor {
    /// Makes an executor for weights and states that are on the device. `table` is the memory of the request table.
    pub(super) fn new(
        plan: EnginePlan,
        device: Arc<dyn Device>,
        stream: Box<dyn Stream>,
        resident: Resident,
        (ring, caches): (Option<WeightRing>, Option<CacheRing>),
        shared: SharedMemory,
        table: BufferSlice,
    ) -> Self {
        let mesh = plan.programs.mesh();
        let (rank, stage) = mesh.map_or((0, 0), |mesh| (mesh.rank(), mesh.stage()));
        let trace = plan.trace.clone().map(|trace| RankTrace::new(trace, device.clone(), rank, stage));
        Self {
            followers: None,
            deferred: None,
            issued: 0,
            steps: HashMap::new(),
            plans: PlanCache::default(),
            stream,
            resident,
            ring,
            caches,
            pages: StepPages::default(),
            read_in_place: 0,
            shared,
            table,
            device,
            plan,
            compiled_steps: 0,
            staging: Vec::new(),
            uploaded: Vec::new(),
            trace,
        }
    }

    /// Forwards every command to the other ranks of this process from now on.
    pub(super) fn lead(&mut self, followers: Followers) {
        self.followers = Some(followers);
    }

    /// Forwards every command to the ranks of the other processes, too.
    ///
    /// # Errors
    /// If the rank has no group, or a thread cannot be started.
    pub(super) fn lead_processes(&mut self, processes: Arc<Processes>) -> Result<()> {
        let followers = match self.followers.take() {
            Some(followers) => followers,
            None => {
                let mesh = self.plan.programs.mesh().cloned();
                let mesh = mesh.ok_or_else(|| Error::internal("a rank has no place in the mesh"))?;
                Followers::start(mesh, Vec::new())?
            }
        };
        self.followers.insert(followers).add_processes(processes)
    }

    /// Defers commands on this rank from now on: the other ranks start a command at once, this one runs it [when its results are
    /// needed](Self::run_until).
    ///
    /// The rank that schedules also runs the last pipeline stage. If it ran each command before it issued the next one, the
    /// earlier stages would be idle meanwhile.
    pub(super) fn defer(&mut self) {
        self.deferred = Some(VecDeque::new());
    }

    /// Whether this rank defers its commands.
    pub(super) fn defers(&self) -> bool {
        self.deferred.is_some()
    }

    /// The total number of deferred commands so far, for [`Self::run_until`].
    pub(super) fn issued(&self) -> u64 {
        self.issued
    }

    /// Runs deferred commands in order, until the first `issued` of them have run.
    ///
    /// # Errors
    /// If this device or another rank failed.
    pub(super) fn run_until(&mut self, issued: u64) -> Result<()> {
        while let Some(deferred) = &mut self.deferred
            && self.issued - deferred.len() as u64 != issued
            && let Some(command) = deferred.pop_front()
        {
            self.run(&command)?;
        }
        Ok(())
    }

    /// # Errors
    /// The error of the rank that failed first.
    pub(crate) fn check_ranks(&self) -> Result<()> {
        self.followers.as_ref().map_or(Ok(()), Followers::check)
    }

    /// Makes every wait for another rank fail with `reason`.
    pub(super) fn abort(&self, reason: &str) {
        match &self.followers {
            Some(followers) => followers.abort(reason),
            None => self.plan.programs.mesh().into_iter().for_each(|mesh| mesh.abort(reason)),
        }
    }

    /// Ends every wait of the other ranks for this one, which cannot go on.
    pub(crate) fn abandon(&self, reason: &str) {
        if let Some(followers) = &self.followers {
            followers.root_cause(Error::new(Code::Panic, reason).into());
        }
    }

    /// Whether the model is split over several devices.
    pub(crate) fn is_split(&self) -> bool {
        self.followers.is_some()
    }

    /// Sends a command to the other ranks, and runs it here or defers it.
    ///
    /// # Errors
    /// If a device failed, or refuses a step.
    pub(super) fn issue(&mut self, command: Command) -> Result<()> {
        if let Some(followers) = &self.followers {
            followers.send(&command)?;
        }
        if let Some(deferred) = &mut self.deferred {
            deferred.push_back(command);
            self.issued += 1;
            return Ok(());
        }
        self.run(&command)
    }

    /// Runs a command on this rank.
    fn run(&mut self, command: &Command) -> Result<()> {
        let done = match command {
            Command::Begin(bucket, inputs) => self.stage_inputs(*bucket, inputs),
            Command::Launch(bucket, segments) => self.enqueue(*bucket, *segments),
            Command::StateRow(state, row, bytes) => self.write_state_row(*state, *row, bytes),
            Command::ClearRow(state, row, bytes) => self.zero_state_row(*state, *row, *bytes),
            Command::Mask(bucket, mask) => self.write_mask(*bucket, mask),
            Command::Table(offset, bytes) => self.write_table(*offset, bytes),
            Command::Trace(on) => self.switch_trace(*on),
        };
        self.with_root_cause(done)
    }

    /// Whether this is the only rank, so that commands need not be recorded for others.
    fn is_only_rank(&self) -> bool {
        self.followers.is_none()
    }

    /// Replaces an error by that of the rank that failed first, and stops all ranks.
    fn with_root_cause<T>(&self, result: Result<T>) -> Result<T> {
        match &self.followers {
            Some(followers) => result.map_err(|error| followers.root_cause(error)),
            None => result,
        }
    }

    /// The plan that the model was loaded by.
    pub(crate) fn plan(&self) -> &EnginePlan {
        &self.plan
    }

    /// The device.
    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The stream that all work is enqueued on.
    pub(crate) fn stream(&mut self) -> &mut dyn Stream {
        &mut *self.stream
    }

    /// The device, its stream, and the cache of kernel plans.
    pub(crate) fn device_stream_plans(&mut self) -> (&dyn Device, &mut dyn Stream, &mut PlanCache) {
        (&*self.device, &mut *self.stream, &mut self.plans)
    }

    /// Weights and states on the device.
    pub(crate) fn resident(&self) -> &Resident {
        &self.resident
    }

    /// Bytes of weights that were copied from host memory so far, or are about to be, and those of experts that steps were expected to
    /// read there.
    pub(crate) fn streamed_bytes(&self) -> u64 {
        self.ring.as_ref().map_or(0, WeightRing::copied) + self.read_in_place
    }

    /// Bytes of KV cache that were copied from host memory so far, or are about to be.
    pub(crate) fn cache_bytes(&self) -> u64 {
        self.caches.as_ref().map_or(0, CacheRing::copied)
    }

    /// What was read from disk so far, if streamed layers are read from it.
    pub(crate) fn disk(&self) -> Option<DiskReads> {
        self.ring.as_ref().and_then(WeightRing::disk)
    }

    /// The number of steps that were compiled so far.
    pub(crate) fn compiled_steps(&self) -> u64 {
        self.compiled_steps
    }

    /// Runs the deferred commands, then waits for all enqueued work. `what` names the work in a timeout error.
    ///
    /// # Errors
    /// If the device failed, or does not finish in time.
    pub(crate) fn synchronize(&mut self, what: &str) -> Result<()> {
        self.run_until(self.issued)?;
        Ok(self.stream.synchronize(what, STEP_TIMEOUT)?)
    }

    /// Uploads row `row` of a state whose rows have `bytes.len()` bytes.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn upload_state_row(&mut self, state: StepState, row: usize, bytes: &[u8]) -> Result<()> {
        match self.is_only_rank() {
            true => self.write_state_row(state, row, bytes),
            false => self.issue(Command::StateRow(state, row, bytes.to_vec())),
        }
    }

    fn write_state_row(&mut self, state: StepState, row: usize, bytes: &[u8]) -> Result<()> {
        let Some(slice) = self.state(state)? else { return Ok(()) };
        Ok(self.stream.upload(bytes, &slice.slice(row * bytes.len(), bytes.len())?)?)
    }

    /// The memory of a state; `None` if another pipeline stage holds it.
    fn state(&self, state: StepState) -> Result<Option<BufferSlice>> {
        let elsewhere = self.plan.stages() > 1 && !self.resident.tensors.contains_key(state.name());
        Ok(if elsewhere { None } else { Some(self.resident.state(state)?.clone()) })
    }

    /// Zeroes row `row` of a state whose rows have `bytes` bytes.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn clear_state_row(&mut self, state: StepState, row: usize, bytes: usize) -> Result<()> {
        self.issue(Command::ClearRow(state, row, bytes))
    }

    fn zero_state_row(&mut self, state: StepState, row: usize, bytes: usize) -> Result<()> {
        let Some(slice) = self.state(state)? else { return Ok(()) };
        Ok(self.stream.fill(&slice.slice(row * bytes, bytes)?, 0)?)
    }

    /// Writes bytes to the request table on the device, starting at byte `offset`.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn upload_table(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        match self.is_only_rank() {
            true => self.write_table(offset, bytes),
            false => self.issue(Command::Table(offset, bytes.to_vec())),
        }
    }

    fn write_table(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        Ok(self.stream.upload(bytes, &self.table.slice(offset, bytes.len())?)?)
    }

    /// Starts or stops recording on all ranks, if the plan has a trace.
    ///
    /// # Errors
    /// If a device failed.
    pub(super) fn record_trace(&mut self, on: bool) -> Result<()> {
        if self.trace.is_none() {
            return Ok(());
        }
        self.issue(Command::Trace(on))?;
        self.run_until(self.issued)
    }

    fn switch_trace(&mut self, on: bool) -> Result<()> {
        // Ranks of other processes have no trace unless their users asked for one.
        let Some(trace) = &self.trace else { return Ok(()) };
        self.stream.synchronize("the steps in flight", STEP_TIMEOUT)?;
        trace.switch(on, &mut *self.stream)
    }

    /// Enqueues the forward pass of a step with these inputs. Returns the step's bucket.
    ///
    /// # Errors
    /// If the device failed, or refuses the step.
    pub(crate) fn forward(&mut self, inputs: &StepInputs) -> Result<Bucket> {
        let bucket = inputs.bucket(self.plan.limits);
        self.begin(bucket, inputs)?;
        self.launch(bucket, FORWARD)?;
        self.run_until(self.issued)?;
        Ok(bucket)
    }

    /// Compiles the step of a bucket if needed, and uploads its inputs, which must fit the bucket.
    ///
    /// # Errors
    /// If the device failed, or refuses the step.
    pub(super) fn begin(&mut self, bucket: Bucket, inputs: &StepInputs) -> Result<()> {
        match self.is_only_rank() {
            true => self.stage_inputs(bucket, inputs),
            false => self.issue(Command::Begin(bucket, Box::new(inputs.clone()))),
        }
    }

    fn stage_inputs(&mut self, bucket: Bucket, inputs: &StepInputs) -> Result<()> {
        self.compile(bucket)?;
        if let Some(trace) = &self.trace {
            trace.begin_step(inputs.tokens());
        }
        let step = self.steps.get(&bucket).ok_or_else(not_compiled)?;
        self.pages.clone_from(inputs.pages());
        // The mask is the last input and is uploaded separately, right before it is read. Encoders have no mask.
        let bytes = step.inputs().find(StepInput::Mask).map_or(step.inputs().bytes, |mask| mask.start);
        self.staging.clear();
        self.staging.resize(bytes, 0xFF); // -1 everywhere
        inputs.stage(&mut self.staging, step.inputs())?;
        // Consecutive decode steps of the same requests have equal inputs, and only masks are written after these, so the upload
        // can be skipped.
        if self.staging != self.uploaded {
            // If the upload fails, the content of the buffer is unknown.
            self.uploaded.clear();
            self.stream.upload(&self.staging, &self.shared.inputs.slice(0, self.staging.len())?)?;
            std::mem::swap(&mut self.staging, &mut self.uploaded);
        }
        Ok(())
    }

    /// Enqueues segments of a step whose inputs are uploaded.
    ///
    /// # Errors
    /// If the device failed, or cannot bind the segments when they run for the first time.
    pub(super) fn launch(&mut self, bucket: Bucket, segments: SegmentSet) -> Result<()> {
        self.issue(Command::Launch(bucket, segments))
    }

    fn enqueue(&mut self, bucket: Bucket, segments: SegmentSet) -> Result<()> {
        let step = self.steps.get_mut(&bucket).ok_or_else(not_compiled)?;
        let in_place = self.plan.reads_in_place(bucket);
        if in_place && segments.contains(StepSegment::Forward) {
            self.read_in_place +=
                self.plan.stream.as_ref().map_or(0, |stream| stream.link_bytes(bucket.tokens));
        }
        let caches_in_place = reads_caches_in_place(bucket);
        let context = ExecutionContext {
            resident: &self.resident,
            weights_in_place: in_place,
            caches_in_place,
            shared: &self.shared,
        };
        let mut rings = Rings {
            weights: self.ring.as_mut().filter(|_| !in_place),
            caches: self.caches.as_mut().filter(|_| !caches_in_place),
        };
        if let Some(caches) = rings.caches.as_mut().filter(|_| segments.contains(StepSegment::Forward)) {
            caches.begin(&self.pages, &mut *self.stream)?;
        }
        let device = &*self.device;
        let launch = |stream: &mut dyn Stream| step.enqueue(segments, context, device, stream, rings);
        match &self.trace {
            Some(trace) => trace.span(SpanKind::Step, segments.label(), &mut *self.stream, launch),
            None => launch(&mut *self.stream),
        }
    }

    /// A compiled step, with the device and the stream to read its outputs.
    ///
    /// # Errors
    /// If the step is not compiled, which is a defect.
    pub(crate) fn step(&mut self, bucket: Bucket) -> Result<(&CompiledStep, &dyn Device, &mut dyn Stream)> {
        let step = self.steps.get(&bucket).ok_or_else(not_compiled)?;
        Ok((step, &*self.device, &mut *self.stream))
    }

    /// Uploads the mask of a step.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn upload_mask(&mut self, bucket: Bucket, mask: &[u32]) -> Result<()> {
        self.issue(Command::Mask(bucket, mask.to_vec()))
    }

    fn write_mask(&mut self, bucket: Bucket, mask: &[u32]) -> Result<()> {
        let step = self.steps.get(&bucket).ok_or_else(not_compiled)?;
        let start = step.inputs().range(StepInput::Mask)?.start;
        let bytes: &[u8] = bytemuck::cast_slice(mask);
        Ok(self.stream.upload(bytes, &self.shared.inputs.slice(start, bytes.len())?)?)
    }

    /// Whether the step of a bucket is compiled.
    pub(super) fn has_step(&self, bucket: Bucket) -> bool {
        self.steps.contains_key(&bucket)
    }

    /// Launches every segment of a step once with extents of 0, so that no request is changed.
    ///
    /// # Errors
    /// If the device failed, or refuses the step.
    pub(super) fn launch_empty(&mut self, bucket: Bucket) -> Result<()> {
        self.begin(bucket, &StepInputs::default())?;
        let launches = if self.plan.is_encoder() { &[FORWARD][..] } else { &LAUNCHES };
        launches.iter().try_for_each(|segments| self.launch(bucket, *segments))?;
        self.synchronize("an empty step")
    }

    /// Compiles the step of a bucket if needed, and grows the shared memory if it is too small.
    fn compile(&mut self, bucket: Bucket) -> Result<()> {
        if self.steps.contains_key(&bucket) {
            return Ok(());
        }
        let program = self.plan.programs.merged(&*self.device, bucket, self.plan.fixed)?;
        let layout = {
            let (fixed, mesh) = (self.plan.fixed, self.plan.programs.mesh());
            Layout::new(&program, &*self.device, bucket, fixed, mesh)?
        };
        let allocated = self.shared.sizes();
        if !allocated.covers(layout.shared) {
            // Compiled steps are bound to the old shared memory, so they are dropped too, after all steps in flight have ended.
            self.stream.synchronize("the steps in flight", STEP_TIMEOUT)?;
            self.steps.clear();
            self.uploaded.clear();
            self.shared = SharedMemory::allocate(&*self.device, allocated.max(layout.shared))?;
        }
        let in_place = self.plan.reads_in_place(bucket);
        let context = ExecutionContext {
            resident: &self.resident,
            weights_in_place: in_place,
            caches_in_place: reads_caches_in_place(bucket),
            shared: &self.shared,
        };
        let (capture, start) = (self.plan.options.graphs, Instant::now());
        let trace = self.trace.clone();
        let step = CompiledStep::new(layout, context, &*self.device, &mut self.plans, capture, trace)?;
        let (calls, plans) = (step.calls(), self.plans.len());
        tracing::debug!(?bucket, calls, plans, elapsed = ?start.elapsed(), "compiled a step");
        self.compiled_steps += 1;
        self.steps.insert(bucket, step);
        Ok(())
    }
}

fn not_compiled() -> Error {
    Error::internal("the step is not compiled")
}
