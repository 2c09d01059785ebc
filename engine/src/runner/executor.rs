//! The device side of a runner: weights and states, and the steps that are compiled so far.

use super::{
    followers::{Command, Followers},
    inputs::StepInputs,
};
use crate::{
    error::Result,
    plan::{
        Bucket, CompiledStep, EnginePlan, ExecutionContext, Layout, PlanCache, Resident, SegmentSet,
        SharedMemory, StepInput, StepSegment, StepState, WeightRing,
    },
    processes::Processes,
};
use dsrun_core::{
    Error,
    device::{BufferSlice, Device, Stream},
};
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

/// The time after which a step counts as hung.
pub(crate) const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// The segment up to the logits.
pub(super) const FORWARD: SegmentSet = SegmentSet::new(&[StepSegment::Forward]);

/// All segments of a step that just samples.
pub(super) const FORWARD_AND_SAMPLE: SegmentSet =
    SegmentSet::new(&[StepSegment::Forward, StepSegment::Sample]);

/// The sets of segments that steps launch together: all of a step, or one by one if hidden states are read or tokens are limited.
const LAUNCHES: [SegmentSet; 5] = [
    FORWARD_AND_SAMPLE,
    FORWARD,
    SegmentSet::new(&[StepSegment::Embed]),
    SegmentSet::new(&[StepSegment::Sample]),
    SegmentSet::new(&[StepSegment::SampleLimited]),
];

/// A model on a device.
#[derive(Debug)]
pub(crate) struct Executor {
    /// The other ranks, if this is rank 0 of several.
    followers: Option<Followers>,
    /// Commands that other ranks have and this one has yet to run, if it [defers](Self::defer) them.
    deferred: Option<VecDeque<Command>>,
    /// The number of commands that were deferred so far.
    ordered: u64,
    // Dropped first: bound calls hold buffers and weights.
    steps: HashMap<Bucket, CompiledStep>,
    plans: PlanCache,
    stream: Box<dyn Stream>,
    resident: Resident,
    /// The slots that streamed layers pass through, if there are any.
    ring: Option<WeightRing>,
    shared: SharedMemory,
    /// The request table.
    table: BufferSlice,
    device: Arc<dyn Device>,
    plan: EnginePlan,
    compiled_steps: u64,
    /// The inputs of the next step. Kept from step to step for its memory.
    staging: Vec<u8>,
    /// The beginning of the steps' input buffer on the device.
    uploaded: Vec<u8>,
}

impl Executor {
    /// A model whose weights and states are on the device. `table` is the memory of its request table.
    pub(super) fn new(
        plan: EnginePlan,
        device: Arc<dyn Device>,
        stream: Box<dyn Stream>,
        resident: Resident,
        ring: Option<WeightRing>,
        shared: SharedMemory,
        table: BufferSlice,
    ) -> Self {
        Self {
            followers: None,
            deferred: None,
            ordered: 0,
            steps: HashMap::new(),
            plans: PlanCache::default(),
            stream,
            resident,
            ring,
            shared,
            table,
            device,
            plan,
            compiled_steps: 0,
            staging: Vec::new(),
            uploaded: Vec::new(),
        }
    }

    /// Has other ranks of this process do what this one does.
    pub(super) fn lead(&mut self, followers: Followers) {
        self.followers = Some(followers);
    }

    /// Has the ranks of other processes do what this one does.
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

    /// Has other ranks start with a command at once, while this one runs it only [when its results are needed](Self::run_until).
    ///
    /// The rank that schedules has the last stage of a pipeline. If it computed, or waited for the stage before its own, whenever it
    /// gives out a command, the other stages would wait for the next one.
    pub(super) fn defer(&mut self) {
        self.deferred = Some(VecDeque::new());
    }

    /// Whether commands are deferred.
    pub(super) fn defers(&self) -> bool {
        self.deferred.is_some()
    }

    /// The number of commands so far, for [`Self::run_until`].
    pub(super) fn ordered(&self) -> u64 {
        self.ordered
    }

    /// Runs deferred commands in their order, up to the first `ordered` of all.
    ///
    /// # Errors
    /// If the device failed, or another rank.
    pub(super) fn run_until(&mut self, ordered: u64) -> Result<()> {
        while let Some(deferred) = &mut self.deferred
            && self.ordered - deferred.len() as u64 != ordered
            && let Some(command) = deferred.pop_front()
        {
            self.run(&command)?;
        }
        Ok(())
    }

    /// # Errors
    /// That of the rank that failed first.
    pub(crate) fn check_ranks(&self) -> Result<()> {
        self.followers.as_ref().map_or(Ok(()), Followers::check)
    }

    /// Ends every wait for another rank.
    pub(super) fn abort(&self, reason: &str) {
        match &self.followers {
            Some(followers) => followers.abort(reason),
            None => self.plan.programs.mesh().into_iter().for_each(|mesh| mesh.abort(reason)),
        }
    }

    /// Whether the model is split over several devices.
    pub(crate) fn is_split(&self) -> bool {
        self.followers.is_some()
    }

    /// Has the other ranks run a command, and runs it.
    ///
    /// # Errors
    /// If a device failed, or refuses a step.
    pub(super) fn order(&mut self, command: Command) -> Result<()> {
        if let Some(followers) = &self.followers {
            followers.send(&command)?;
        }
        if let Some(deferred) = &mut self.deferred {
            deferred.push_back(command);
            self.ordered += 1;
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
        };
        self.explained(done)
    }

    /// Whether this rank is the only one, which needs no commands.
    fn is_alone(&self) -> bool {
        self.followers.is_none()
    }

    /// The error of the rank that failed first; the other ranks end.
    fn explained<T>(&self, result: Result<T>) -> Result<T> {
        match &self.followers {
            Some(followers) => result.map_err(|error| followers.explained(error)),
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

    /// Bytes of weights that were copied from host memory so far, or are about to be.
    pub(crate) fn streamed_bytes(&self) -> u64 {
        self.ring.as_ref().map_or(0, WeightRing::copied)
    }

    /// The number of steps that were compiled so far.
    pub(crate) fn compiled_steps(&self) -> u64 {
        self.compiled_steps
    }

    /// Waits for all enqueued work, and runs deferred commands before. `what` names it in the error of a timeout.
    ///
    /// # Errors
    /// If the device failed, or does not finish in time.
    pub(crate) fn synchronize(&mut self, what: &str) -> Result<()> {
        self.run_until(self.ordered)?;
        Ok(self.stream.synchronize(what, STEP_TIMEOUT)?)
    }

    /// Uploads a row of a state of `bytes.len()` bytes a row.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn upload_state_row(&mut self, state: StepState, row: usize, bytes: &[u8]) -> Result<()> {
        match self.is_alone() {
            true => self.write_state_row(state, row, bytes),
            false => self.order(Command::StateRow(state, row, bytes.to_vec())),
        }
    }

    fn write_state_row(&mut self, state: StepState, row: usize, bytes: &[u8]) -> Result<()> {
        let Some(slice) = self.state(state)? else { return Ok(()) };
        Ok(self.stream.upload(bytes, &slice.slice(row * bytes.len(), bytes.len())?)?)
    }

    /// The memory of a state; `None` if it is one of another stage of the pipeline.
    fn state(&self, state: StepState) -> Result<Option<BufferSlice>> {
        let elsewhere = self.plan.stages() > 1 && !self.resident.tensors.contains_key(state.name());
        Ok(if elsewhere { None } else { Some(self.resident.state(state)?.clone()) })
    }

    /// Zeroes a row of a state of `bytes` bytes a row.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn clear_state_row(&mut self, state: StepState, row: usize, bytes: usize) -> Result<()> {
        self.order(Command::ClearRow(state, row, bytes))
    }

    fn zero_state_row(&mut self, state: StepState, row: usize, bytes: usize) -> Result<()> {
        let Some(slice) = self.state(state)? else { return Ok(()) };
        Ok(self.stream.fill(&slice.slice(row * bytes, bytes)?, 0)?)
    }

    /// Uploads bytes of the request table, from `offset` on.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn upload_table(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        match self.is_alone() {
            true => self.write_table(offset, bytes),
            false => self.order(Command::Table(offset, bytes.to_vec())),
        }
    }

    fn write_table(&mut self, offset: usize, bytes: &[u8]) -> Result<()> {
        Ok(self.stream.upload(bytes, &self.table.slice(offset, bytes.len())?)?)
    }

    /// Runs the layers of a step with these inputs, up to the logits. Returns the step's bucket.
    ///
    /// # Errors
    /// If the device failed, or refuses the step.
    pub(crate) fn forward(&mut self, inputs: &StepInputs) -> Result<Bucket> {
        let bucket = inputs.bucket(self.plan.limits);
        self.begin(bucket, inputs)?;
        self.launch(bucket, FORWARD)?;
        self.run_until(self.ordered)?;
        Ok(bucket)
    }

    /// Compiles the step of a bucket if need be, and uploads its inputs, for which the bucket must have room.
    ///
    /// # Errors
    /// If the device failed, or refuses the step.
    pub(super) fn begin(&mut self, bucket: Bucket, inputs: &StepInputs) -> Result<()> {
        match self.is_alone() {
            true => self.stage_inputs(bucket, inputs),
            false => self.order(Command::Begin(bucket, Box::new(inputs.clone()))),
        }
    }

    fn stage_inputs(&mut self, bucket: Bucket, inputs: &StepInputs) -> Result<()> {
        self.compile(bucket)?;
        let step = self.steps.get(&bucket).ok_or_else(not_compiled)?;
        // The mask is the last input, and is uploaded where it is read. Encoders have none.
        let bytes = step.inputs().find(StepInput::Mask).map_or(step.inputs().bytes, |mask| mask.start);
        self.staging.clear();
        self.staging.resize(bytes, 0xFF); // -1 everywhere
        inputs.stage(&mut self.staging, step.inputs())?;
        // Successive steps of the same requests, each with its next token, have equal inputs. Only masks are written behind them.
        if self.staging != self.uploaded {
            // If the upload fails, the content of the buffer is unknown.
            self.uploaded.clear();
            self.stream.upload(&self.staging, &self.shared.inputs.slice(0, self.staging.len())?)?;
            std::mem::swap(&mut self.staging, &mut self.uploaded);
        }
        Ok(())
    }

    /// Enqueues segments of a step that has begun.
    ///
    /// # Errors
    /// If the device failed, or refuses the segments the first time.
    pub(super) fn launch(&mut self, bucket: Bucket, segments: SegmentSet) -> Result<()> {
        self.order(Command::Launch(bucket, segments))
    }

    fn enqueue(&mut self, bucket: Bucket, segments: SegmentSet) -> Result<()> {
        let step = self.steps.get_mut(&bucket).ok_or_else(not_compiled)?;
        let context = ExecutionContext { resident: &self.resident, shared: &self.shared };
        step.enqueue(segments, context, &*self.device, &mut *self.stream, self.ring.as_mut())
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
        self.order(Command::Mask(bucket, mask.to_vec()))
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

    /// Launches every segment of a step once, with extents of 0, so that it touches no request.
    ///
    /// # Errors
    /// If the device failed, or refuses the step.
    pub(super) fn launch_empty(&mut self, bucket: Bucket) -> Result<()> {
        self.begin(bucket, &StepInputs::default())?;
        let launches = if self.plan.is_encoder() { &[FORWARD][..] } else { &LAUNCHES };
        launches.iter().try_for_each(|segments| self.launch(bucket, *segments))?;
        self.synchronize("an empty step")
    }

    /// Compiles the step of a bucket if need be, and makes sure that the shared memory has room for it.
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
            // Compiled steps are bound to the memory they share, so they are dropped with it, once none is in flight.
            self.stream.synchronize("the steps in flight", STEP_TIMEOUT)?;
            self.steps.clear();
            self.uploaded.clear();
            self.shared = SharedMemory::allocate(&*self.device, allocated.max(layout.shared))?;
        }
        let context = ExecutionContext { resident: &self.resident, shared: &self.shared };
        let (capture, start) = (self.plan.options.graphs, Instant::now());
        let step = CompiledStep::new(layout, context, &*self.device, &mut self.plans, capture)?;
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
