//! Plans an engine before anything is allocated: the programs of its steps, the sizes that steps are compiled for, and the
//! memory they take.
//!
//! | module | holds |
//! |---|---|
//! | [`EnginePlan`] | the plan of an engine |
//! | `programs` | a model's program after all passes, for each kind of step |
//! | `bucket` | the sizes that steps are compiled for |
//! | `cache_room` | how much KV cache fits beside the weights, before an engine is planned |
//! | `step_interface` | the names of a program's segments, inputs, outputs and states |
//! | `calls` | descriptions of calls and weights for a device |
//! | `layout` | the storage plan of a step |
//! | `staged_pages` | pages of the KV cache on their way between the device and the host |
//! | `memory`, `traffic` | bytes that are allocated, bytes and products of a step |
//! | `stream` | layers whose weights stay in host memory or on disk and are copied to the device for each step |
//! | `host_caches`, `host_cache_forecast` | keys and values that stay in host memory, and the time in which generation reads them |
//! | `cache_ring` | the slots on the device that their pages are copied to |
//! | `draft_plan`, `draft_vocabulary` | the memory and compatibility of a draft model |
//! | `execution_context`, `compiled_step`, `plan_cache` | a step bound to device memory |
//! | `mesh`, `mesh_rank`, `mesh_programs` | a model that is split over several devices: the mesh, the position of each rank in it, and the program of each rank |
//! | `compile_ahead` | builds the kernels of every step before the first request |

mod batch_invariance;
mod bucket;
mod cache_ring;
mod cache_room;
mod calls;
pub(crate) mod chosen_experts;
mod compile_ahead;
mod compiled_step;
mod draft_plan;
mod draft_vocabulary;
mod execution_context;
mod host_cache_forecast;
mod host_caches;
mod layout;
mod memory;
mod mesh;
mod mesh_programs;
mod mesh_rank;
mod plan_cache;
mod programs;
mod staged_pages;
mod step_interface;
mod stream;
mod traffic;

use crate::{
    error::{EngineError, Result},
    memory::{Bytes, MemoryPlan},
    options::{EngineOptions, ExpertsIn, KvIn, Speculation, WeightsIn},
    processes::Processes,
    trace::Trace,
};
pub(crate) use bucket::{Bucket, FixedSizes};
pub(crate) use cache_ring::{CacheRing, StepPages};
pub use cache_room::CacheRoom;
pub(crate) use calls::{is_cache, state_bytes, weight_desc};
pub(crate) use compiled_step::{CompiledStep, Rings};
use dsrun_core::{device::Device, host_memory, program::Program};
use dsrun_models::model::Model;
pub(crate) use execution_context::{ExecutionContext, Resident, SharedMemory, ValueStorage};
pub use host_cache_forecast::HostCacheForecast;
pub(crate) use host_caches::{CacheLayers, CachePage, HostCaches, reads_caches_in_place};
pub(crate) use layout::{InputLayout, Layout, SharedSizes};
pub(crate) use memory::cache_desc;
pub(crate) use mesh_programs::mesh_programs;
pub(crate) use mesh_rank::{MeshRank, MeshShape};
pub(crate) use plan_cache::{PlanCache, plan_key};
pub(crate) use programs::{DeviceNumbers, StepPrograms};
use rayon::prelude::*;
pub(crate) use staged_pages::{PAGE_BATCH, STAGING_AREAS, StagedPages};
use std::sync::Arc;
pub(crate) use step_interface::{SegmentSet, StepInput, StepOutput, StepSegment, StepSize, StepState};
use stream::StreamedStep;
pub(crate) use stream::{DiskReads, Identity, StreamPlan, StreamableLayers, WeightImages, WeightRing};
pub use stream::{LinkRates, StreamForecast};
pub use traffic::StepTraffic;

/// If the KV cache takes all remaining memory, one part in this many of the device's free memory is left free.
const SPARE: u64 = 20;

/// An engine that is planned but not loaded: its programs, its sizes and its memory.
#[derive(Debug)]
pub struct EnginePlan {
    pub(crate) programs: StepPrograms,
    pub(crate) options: EngineOptions,
    pub(crate) context: usize,
    pub(crate) fixed: FixedSizes,
    /// The largest step.
    pub(crate) limits: Bucket,
    /// The maximum number of tokens of a step with prompts; at most `limits.tokens`.
    pub(crate) step_tokens: usize,
    /// Sizes of the shared memory, sufficient for every step within the limits.
    pub(crate) shared: SharedSizes,
    memory: MemoryPlan,
    /// The layers whose weights are streamed from host memory.
    pub(crate) stream: Option<StreamPlan>,
    /// The layers whose keys and values are in host memory.
    pub(crate) host_caches: Option<HostCaches>,
    pub(crate) draft: Option<DraftPlan>,
    /// The plans of the other ranks of this process, if the model is split over several devices. `self` is the plan of the first
    /// rank.
    pub(crate) followers: Vec<FollowerPlan>,
    /// The processes that run the ranks, if there are several processes.
    pub(crate) processes: Option<Arc<Processes>>,
    /// Where the rank records what it runs, if it does.
    pub(crate) trace: Option<Arc<Trace>>,
}

/// The plan of a draft model.
#[derive(Debug)]
pub(crate) struct DraftPlan {
    /// The draft model.
    pub(crate) model: Arc<Model>,
    /// The plan of its own engine.
    pub(crate) plan: Box<EnginePlan>,
    /// The maximum number of tokens it proposes at a time.
    pub(crate) tokens: usize,
}

/// The plan of a rank other than 0.
#[derive(Debug)]
pub(crate) struct FollowerPlan {
    /// The rank's own device.
    pub(crate) device: Arc<dyn Device>,
    /// The rank's own programs and memory.
    pub(crate) plan: EnginePlan,
}

impl EnginePlan {
    /// Plans an engine for a model on a device. Allocates nothing.
    ///
    /// # Errors
    /// If an option is out of range, or the device does not support one of the model's ops.
    pub fn new(model: &Model, device: &dyn Device, options: &EngineOptions) -> Result<Self> {
        options.validate()?;
        let options = &options.for_model(model.config())?;
        if let Some(speculation @ Speculation::Draft { .. }) = options.speculation {
            let rule = "needs a draft model, and none is given";
            return Err(EngineError::option("speculate", speculation, rule));
        }
        Self::without_memory(model, device, options)?.fit_to_memory(device)
    }

    /// Plans everything but the memory, with the number of KV cache pages that the options ask for.
    fn without_memory(model: &Model, device: &dyn Device, options: &EngineOptions) -> Result<Self> {
        let program = StepPrograms::quantized(model, &DeviceNumbers::of(device)?, options)?;
        Self::of_program(program, model.config().context, device, options, None)
    }

    /// Plans everything but the memory for a quantised program. With `mesh` it is the program of one rank, whose
    /// collectives run over the groups of the mesh.
    fn of_program(
        program: Program,
        longest: usize,
        device: &dyn Device,
        options: &EngineOptions,
        mesh: Option<MeshRank>,
    ) -> Result<Self> {
        let (context, fixed, limits) = Self::sizes(longest, options)?;
        let programs = StepPrograms::build(program, device, options, limits, fixed, mesh)?;
        let (options, memory) = (options.clone(), MemoryPlan::default());
        let mut plan = Self {
            programs,
            options,
            context,
            fixed,
            limits,
            step_tokens: limits.tokens,
            shared: SharedSizes::default(),
            memory,
            stream: None,
            host_caches: None,
            draft: None,
            followers: Vec::new(),
            processes: None,
            trace: None,
        };
        plan.check_batch_invariance(device)?;
        plan.size_shared_memory(device)?;
        Ok(plan)
    }

    /// Plans shared memory with room for every step.
    fn size_shared_memory(&mut self, device: &dyn Device) -> Result<()> {
        let (limits, fixed) = (self.limits, self.fixed);
        let layout = |bucket: Bucket| {
            let program = self.programs.merged(device, bucket, fixed)?;
            Layout::new(&program, device, bucket, fixed, self.programs.mesh())
        };
        // First-fit placement is not monotonic: a smaller step can need a larger arena than the largest step, so several
        // buckets are laid out.
        let is_large = |bucket: &Bucket| {
            bucket.sequences == limits.sequences && (bucket.all_rows || bucket.tokens == limits.tokens)
        };
        let all = Bucket::all(limits, self.options.rows_per_request());
        let mut buckets: Vec<Bucket> =
            all.into_iter().filter(is_large).filter(|bucket| *bucket != limits).collect();
        buckets.push(limits);
        let sizes = buckets.into_par_iter().map(|bucket| -> Result<_> { Ok(layout(bucket)?.shared) });
        self.shared = sizes.try_reduce(SharedSizes::default, |a, b| Ok(a.max(b)))?;
        Ok(())
    }

    /// The context, the sizes that all steps share, and the largest step.
    ///
    /// # Errors
    /// If an option is out of range.
    pub(crate) fn sizes(longest: usize, options: &EngineOptions) -> Result<(usize, FixedSizes, Bucket)> {
        let context = options.context(longest)?;
        let blocks = context.div_ceil(options.block_size);
        let pages = match options.kv_tokens {
            Some(kv_tokens) if kv_tokens < options.block_size => {
                let rule = format!("must hold at least one page of {}", options.block_size);
                return Err(EngineError::option("kv-tokens", kv_tokens, rule));
            }
            Some(kv_tokens) => kv_tokens / options.block_size,
            None => blocks.saturating_mul(options.max_requests),
        };
        let fixed = FixedSizes { requests: options.max_requests, blocks, pages, stop_ids: 1 };
        let limits = Bucket {
            tokens: options.step_tokens,
            sequences: options.max_requests,
            rows: (options.max_requests * options.rows_per_request()).min(options.step_tokens),
            all_rows: false,
        };
        Ok((context, fixed, limits))
    }

    /// Counts the memory. If it does not fit, plans keys and values in host memory if the options say so, then fewer pages of KV cache, or
    /// else streamed layers.
    fn fit_to_memory(mut self, device: &dyn Device) -> Result<Self> {
        self.count_memory(device)?;
        self.plan_host_caches(device)?;
        let pages = self.fixed.pages;
        if let (Some(missing), None) = (self.memory.missing(), self.options.kv_tokens) {
            let spare = self.memory.available.unwrap_or(0) / SPARE;
            self.plan_fewer_pages(missing + spare);
            self.count_memory(device)?;
        }
        let streams = match &self.options.weights_in {
            WeightsIn::Device => false,
            WeightsIn::Host | WeightsIn::Disk(_) => true,
            WeightsIn::Auto if self.options.keeps_weights_off_device() => true,
            WeightsIn::Auto => self.memory.missing().is_some() && !device.properties().unified_memory,
        };
        if streams && !self.stream_experts(device, pages)? {
            self.stream_layers(device, pages)?;
        }
        Ok(self)
    }

    /// Keeps the keys and values of as few layers as possible in host memory, if the options ask for it. If device and host together are too
    /// small, plans fewer pages, unless their number was asked for.
    ///
    /// # Errors
    /// If the device does not take tensors in pinned memory, the model has no KV cache, or host memory is too small.
    fn plan_host_caches(&mut self, device: &dyn Device) -> Result<()> {
        if self.options.kv_in != KvIn::Host {
            return Ok(());
        }
        let refused = |why: &str| EngineError::option("kv-in", KvIn::Host, format!("is not possible: {why}"));
        if !device.properties().binds_pinned {
            return Err(refused("the backend does not take tensors in host memory"));
        }
        let layers = CacheLayers::of(self.programs.all_rows())?;
        let all = layers.count();
        if all == 0 {
            // A stage of a pipeline may have no attention.
            return if self.programs.mesh().is_some() {
                Ok(())
            } else {
                Err(refused("the model has no KV cache"))
            };
        }
        self.programs.keep_caches_apart(layers.numbers());
        self.size_shared_memory(device)?;
        self.count_memory(device)?;
        let most_resident = self.options.resident_layers.unwrap_or(all).min(all);
        if most_resident == all && self.memory.missing().is_none() {
            return Ok(());
        }
        let (asked, program) = (self.fixed.pages, self.programs.all_rows());
        let page = FixedSizes { pages: 1, ..self.fixed };
        let of_page: Vec<CachePage> = (all - most_resident..=all)
            .map(|in_host| {
                let (host, slots) = layers.split(in_host).bytes(program, self.limits, page)?;
                Ok(CachePage { in_host, device: (self.page_bytes() + slots).saturating_sub(host), host })
            })
            .collect::<Result<_>>()?;
        let beside = self.memory.total().saturating_sub(self.page_bytes().saturating_mul(asked as u64));
        let device_room = self.memory.available.map(|available| available - available / SPARE);
        let mut device_room = device_room.map_or(u64::MAX, |room| room.saturating_sub(beside));
        let mut host_room = self.host_room(device_room == 0).unwrap_or(u64::MAX);
        if let (true, Some(available)) = (device.properties().unified_memory, host_memory::available()) {
            // The device uses the memory of the host, so both share what is left.
            let left = available.saturating_sub(beside);
            host_room = host_room.min(left / 2);
            device_room = device_room.min(left - host_room);
        }
        let (in_host, pages) = CachePage::choose(&of_page, device_room, host_room, asked, self.fixed.blocks);
        self.host_caches = (in_host > 0).then(|| layers.split(in_host));
        if self.options.kv_tokens.is_none() {
            self.fixed.pages = pages;
        }
        self.count_memory(device)?;
        match self.memory.kv_host {
            needed if needed > host_room => Err(EngineError::HostCache { needed, available: host_room }),
            _ => Ok(()),
        }
    }

    /// The host memory that the KV cache of a rank may take, if the system reports it: half of what is available, beside weights that
    /// are in host memory whatever happens or because the device has no room for them (`weights_in_host`).
    fn host_room(&self, weights_in_host: bool) -> Option<u64> {
        let weights = match &self.options.weights_in {
            WeightsIn::Host => self.memory.weights,
            WeightsIn::Auto if weights_in_host => self.memory.weights,
            // Those on disk take half of what is left.
            _ => 0,
        };
        Some(host_memory::available()?.saturating_sub(weights) / 2 / self.engines_on_host())
    }

    /// The ranks and engines that share host memory.
    fn engines_on_host(&self) -> u64 {
        let ranks = self.programs.mesh().map_or(1, MeshRank::ranks);
        (ranks * self.options.replicas.max(1)) as u64
    }

    /// Plans streamed layers that consist of experts alone, with at most `pages` pages of KV cache. Returns whether the rest fits on the
    /// device; only then steps of few tokens read the experts that they choose in host memory.
    fn stream_experts(&mut self, device: &dyn Device, pages: usize) -> Result<bool> {
        let (experts, kept) = (self.options.experts, self.fixed.pages);
        let asked = experts == ExpertsIn::Host;
        let refused = |why: &str| EngineError::option("experts", experts, format!("is not possible: {why}"));
        // Experts on disk are read into buffers, layer by layer.
        let layers = match self.options.weights_in {
            WeightsIn::Disk(_) => None,
            _ => match StreamableLayers::of_experts(self.programs.all_rows(), device) {
                Ok(None) if asked => return Err(refused("the model has none")),
                Ok(layers) => layers,
                Err(error) if asked => return Err(refused(&error.to_string())),
                Err(_) => None,
            },
        };
        let Some(layers) = layers else { return Ok(false) };
        let fits = self.plan_streaming(device, &layers, pages)?;
        if !fits && asked {
            let missing = Bytes(self.memory.missing().unwrap_or(0));
            return Err(refused(&format!(
                "all other weights and the ring for experts need {missing} more device memory"
            )));
        }
        if !fits {
            (self.stream, self.fixed.pages) = (None, kept);
        }
        Ok(fits)
    }

    /// Plans streamed layers, with at most `pages` pages of KV cache.
    fn stream_layers(&mut self, device: &dyn Device, pages: usize) -> Result<()> {
        let on_disk = matches!(self.options.weights_in, WeightsIn::Disk(_));
        match StreamableLayers::new(self.programs.all_rows(), device, on_disk) {
            Ok(layers) => self.plan_streaming(device, &layers, pages).map(|_| ()),
            Err(error) if self.options.weights_in.is_off_device() => Err(EngineError::option(
                "weights-in",
                &self.options.weights_in,
                format!("is not possible: {error}"),
            )),
            // It does not fit either way; loading reports this.
            Err(_) => self.count_memory(device),
        }
    }

    /// Plans fewer pages of KV cache to save `bytes`. Requests then share the pages, and later ones are pre-empted when none is
    /// left.
    fn plan_fewer_pages(&mut self, bytes: u64) {
        // The model has no cache: fewer pages would save nothing.
        if self.page_bytes() == 0 {
            return;
        }
        let page = self.page_bytes();
        let fewer = usize::try_from(bytes.div_ceil(page)).unwrap_or(usize::MAX);
        self.fixed.pages = self.fixed.pages.saturating_sub(fewer).max(self.fixed.blocks);
    }

    /// Plans the KV cache first, with at most `pages` pages, then the ring buffer for streamed layers, and keeps as many layers on the
    /// device as fit beside them. Returns whether at least the ring fits.
    fn plan_streaming(
        &mut self,
        device: &dyn Device,
        layers: &StreamableLayers,
        pages: usize,
    ) -> Result<bool> {
        (self.stream, self.fixed.pages) = (None, pages);
        self.programs.keep_layers_apart(layers.numbers(), layers.most_tokens_in_place());
        self.size_shared_memory(device)?;
        self.count_memory(device)?;
        let counts = layers.slot_counts();
        let best = counts.first().copied().unwrap_or(1);
        let budget = self.memory.available.map(|available| available - available / SPARE);
        let beside = |plan: &Self| plan.memory.total().saturating_sub(layers.bytes());
        // Two slots are enough to overlap copies with computation. More would take memory from the KV cache of the requested
        // number of requests.
        let least = layers.all(best.min(2)).device_bytes();
        let lacking = budget.map_or(0, |budget| (beside(self) + least).saturating_sub(budget));
        if lacking > 0 && self.options.kv_tokens.is_none() {
            self.plan_fewer_pages(lacking);
            self.count_memory(device)?;
        }
        // If the device does not report its free memory, only the minimum is planned.
        let room = budget.map_or(least, |budget| budget.saturating_sub(beside(self)));
        let most_resident = self.options.resident_layers.unwrap_or(usize::MAX);
        let chosen = counts.iter().find_map(|slots| layers.choose(*slots, room, most_resident));
        let fits = chosen.is_some();
        // Even the minimum does not fit; loading reports this.
        let stream = chosen.unwrap_or_else(|| layers.all(1));
        self.stream = Some(match &self.options.weights_in {
            WeightsIn::Disk(folder) => stream.with_disk(folder, self.host_memory())?,
            _ => stream,
        });
        self.count_memory(device)?;
        Ok(fits)
    }

    /// The host memory that streamed weights of a rank may take: what the options say, else half of what is available.
    fn host_memory(&self) -> Option<u64> {
        let left =
            || Some(host_memory::available()?.saturating_sub(self.memory.kv_host * self.engines_on_host()));
        self.options.host_memory.or_else(|| Some(left()? / 2 / self.engines_on_host()))
    }

    /// Counts the memory, that of a draft model included.
    fn count_memory(&mut self, device: &dyn Device) -> Result<()> {
        let Self { limits, fixed, shared, .. } = *self;
        let program = self.programs.all_rows();
        self.memory = memory::count_memory(program, device, shared, limits, fixed, &self.options)?;
        if let Some(stream) = &self.stream {
            self.memory.weights = self.memory.weights.saturating_sub(stream.packed_bytes());
            (self.memory.ring, self.memory.streamed) = (stream.ring_bytes(), stream.streamed_bytes());
            (self.memory.host, self.memory.disk) = (stream.host_bytes(), stream.disk_bytes());
        }
        if let Some(caches) = &self.host_caches {
            (self.memory.kv_host, self.memory.kv_slots) = caches.bytes(program, limits, fixed)?;
            self.memory.kv_cache = self.memory.kv_cache.saturating_sub(self.memory.kv_host);
        }
        if let Some(DraftPlan { plan, .. }) = &mut self.draft {
            let most = plan.fixed.blocks.saturating_mul(plan.fixed.requests);
            plan.fixed.pages = self.fixed.pages.min(most);
            plan.count_memory(device)?;
            // Both models share the available memory, so it is checked once, for both.
            plan.memory.available = None;
            self.memory.draft = Some(Box::new(plan.memory.clone()));
        }
        Ok(())
    }

    /// Bytes on the device of a page of the KV cache, that of a draft model included.
    fn page_bytes(&self) -> u64 {
        let draft = self.draft.as_ref().map_or(0, |draft| draft.plan.page_bytes());
        (self.memory.kv_cache + self.memory.kv_slots) / self.fixed.pages.max(1) as u64 + draft
    }

    /// Measures the rates of copies, and predicts the time of a step; `None` if all weights stay on the device.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn forecast_streaming(&self, device: &dyn Device) -> Result<Option<StreamForecast>> {
        let Some(stream) = &self.stream else { return Ok(None) };
        let (context, requests) = (self.context, self.options.max_requests);
        let kv_requests = (self.fixed.pages / self.fixed.blocks.max(1)).clamp(1, requests.max(1));
        let (alone, together) = (self.step_traffic(device, 1)?, self.step_traffic(device, kv_requests)?);
        let (kv_per_token, host_kv_per_token) = (alone.kv_per_token, self.host_kv_per_token());
        let weights = [alone.weights, together.weights];
        let step = StreamedStep { weights, kv_per_token, host_kv_per_token, context, requests, kv_requests };
        Ok(Some(StreamForecast::new(stream, step, LinkRates::measure(device)?)))
    }

    /// Whether the steps of a bucket read the weights of streamed layers in host memory.
    pub(crate) fn reads_in_place(&self, bucket: Bucket) -> bool {
        self.stream.as_ref().is_some_and(|stream| stream.reads_in_place(bucket.tokens))
    }

    /// Whether the steps of a bucket copy pages of the KV cache from host memory, on any rank.
    pub(crate) fn copies_caches(&self, bucket: Bucket) -> bool {
        self.options.kv_in == KvIn::Host && !reads_caches_in_place(bucket)
    }

    /// The memory that will be allocated.
    pub fn memory(&self) -> &MemoryPlan {
        &self.memory
    }

    /// The program, after all passes, of steps in which every row is an output row, that is, of decode-only steps.
    pub fn program(&self) -> &Program {
        self.programs.all_rows()
    }

    /// The program of all other steps, which computes the end of the last layer for the output rows only. It is made from
    /// [`Self::program`] by [`prune_unused_rows`](crate::passes::prune_unused_rows) and has the same weights and states.
    pub fn pruned(&self) -> &Program {
        self.programs.pruned()
    }

    /// The program of a step of `tokens` tokens of `requests` requests, each of which samples one token. Its calls are those that
    /// the device runs: it is made from [`Self::program`] or [`Self::pruned`] by a [`Merger`](crate::passes::Merger), for the sizes
    /// that the step is rounded up to.
    ///
    /// # Errors
    /// If there are more tokens or requests than a step may have, or fewer tokens than requests; the errors of the device.
    pub fn step_program(&self, device: &dyn Device, tokens: usize, requests: usize) -> Result<Arc<Program>> {
        let Bucket { tokens: most_tokens, sequences: most_requests, .. } = self.limits;
        if tokens > most_tokens || requests > most_requests || tokens < requests {
            return Err(EngineError::Option {
                option: "step",
                value: format!("{tokens} tokens of {requests} requests"),
                rule: format!(
                    "must be at most {most_tokens} tokens and {most_requests} requests, with a token for each"
                ),
            });
        }
        self.programs.merged(device, Bucket::for_step(tokens, requests, requests, self.limits), self.fixed)
    }

    /// Tokens a request may have, prompt and answer together.
    pub fn context(&self) -> usize {
        self.context
    }
}
