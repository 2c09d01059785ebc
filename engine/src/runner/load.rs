//! Loads a model: allocates the planned memory, and loads the weights onto the device.

use super::{
    Runner,
    executor::Executor,
    followers::{Followers, follow_leader},
    hidden_states::HiddenStates,
    inputs::StepInputs,
    readback::Readback,
    request_table::RequestTable,
    requests::Requests,
    token_limits::TokenLimits,
};
use crate::{
    error::{EngineError, Result},
    kv_cache::{PageFolder, PageKey, PageLane, PageMover, PageStore, SwapSpace},
    options::PrefixStore,
    plan::{
        CacheRing, EnginePlan, FollowerPlan, HostCaches, Identity, MeshRank, PlanCache, Resident,
        SharedMemory, StepState, WeightImages, WeightRing, cache_desc, is_cache, state_bytes, weight_desc,
    },
    processes::Processes,
    schedule::{Capacity, ScheduledStep, Scheduler},
    statistics::Statistics,
};
use dsrun_core::{
    Code, Error, TensorDesc, WeightFormat, WeightReader,
    device::{BufferSlice, Device, MemoryKind, Stream},
    op::OperandType,
    program::Origin,
};
use dsrun_models::{
    model::Model,
    weights::{ExprReader, TensorSource},
};
use std::{collections::VecDeque, sync::Arc, thread, time::Duration};

/// The time after which loading the weights is considered hung.
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);
/// Bytes of a row of a tensor that are part of the identity of pages.
const SAMPLE: usize = 4096;

impl Runner {
    /// Loads the ranks of this process, and runs the commands of process 0 on them until it drops its engine.
    ///
    /// # Errors
    /// The errors of reading the model and of the devices, and those of the other processes.
    pub(crate) fn follow(
        mut plan: EnginePlan,
        model: &Model,
        device: Arc<dyn Device>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let processes = plan.processes.take();
        let processes = processes.ok_or_else(|| Error::internal("the plan is for a single process"))?;
        let (executor, _) = load_ranks(plan, model, device, Some(&processes), progress)?;
        follow_leader(executor, &processes)
    }

    /// Allocates the planned memory and loads the weights onto the device. `progress` receives the bytes of weights loaded so
    /// far.
    ///
    /// # Errors
    /// The errors of reading the model and of the device.
    pub(crate) fn load(
        mut plan: EnginePlan,
        model: &Model,
        device: Arc<dyn Device>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self> {
        let processes = plan.processes.take();
        let loaded = load_ranks(plan, model, device.clone(), processes.as_ref(), progress)?;
        let (mut executor, table) = loaded;
        if let Some(processes) = processes {
            executor.lead_processes(processes)?;
        }
        if executor.plan().stages() > 1 {
            executor.defer();
        }
        let plan = executor.plan();
        let stop_ids = if plan.options.ignore_end { Vec::new() } else { model.eos().to_vec() };
        let vocabulary = model.config().vocabulary;

        let capacity = Capacity {
            tokens: plan.step_tokens,
            slots: plan.fixed.requests,
            pages: plan.fixed.pages,
            block_size: plan.options.block_size,
            host_pages: plan.options.host_pages(),
            keep_prefixes: plan.options.prefix_cache,
            prompts_first: !plan.options.split_prompts,
            tokens_from_host: plan.stages() > 1,
            micro_batches: EnginePlan::micro_batches(&plan.options),
        };
        let depth = EnginePlan::steps_in_flight(&plan.options);
        let (mover, store) = make_mover(plan, &**model.weights(), &*device, executor.resident())?;
        let mut runner = Self {
            mover,
            requests: Requests::new(Scheduler::with_store(capacity, store), stop_ids, vocabulary),
            table,
            token_limits: TokenLimits::new(plan.fixed.requests, vocabulary),
            readback: Readback::new(&*device, plan.limits.rows, depth)?,
            hidden: HiddenStates::new(plan.program(), depth)?,
            token_types: model.config().encoder.map_or(0, |encoder| encoder.token_types),
            in_flight: VecDeque::new(),
            draft_outcomes: Vec::new(),
            launched: None,
            completed: 0,
            statistics: Statistics { pages_total: plan.fixed.pages, ..Statistics::default() },
            scheduled: ScheduledStep::default(),
            inputs: StepInputs::default(),
            executor,
        };
        if runner.plan().options.tune_step {
            runner.tune_step()?;
        }
        Ok(runner)
    }
}

/// Loads the ranks of this process, and waits until all processes have loaded theirs. Returns the executor of the first rank,
/// which forwards its commands to the others.
fn load_ranks(
    mut plan: EnginePlan,
    model: &Model,
    device: Arc<dyn Device>,
    processes: Option<&Arc<Processes>>,
    progress: &mut dyn FnMut(u64),
) -> Result<(Executor, RequestTable)> {
    let followers = std::mem::take(&mut plan.followers);
    let mesh = plan.programs.mesh().cloned();
    let (own, others) = thread::scope(|scope| {
        let load = |follower: FollowerPlan| {
            scope.spawn(|| load_rank(follower.plan, model, follower.device, &mut |_| {}))
        };
        let threads: Vec<_> = followers.into_iter().map(load).collect();
        let own = load_rank(plan, model, device, progress);
        let panicked = || Err(Error::internal("a rank panicked while it loaded its weights").into());
        let others: Vec<_> =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect();
        (own, others)
    });
    let first = mesh.as_ref().map_or(0, MeshRank::rank);
    let loaded = own.and_then(|own| {
        let in_rank = |(index, other): (usize, Result<_>)| {
            other.map_err(|error: EngineError| {
                let message = format!("rank {} cannot load its weights: {error}", first + 1 + index);
                EngineError::from(Error::new(Code::Communication, message))
            })
        };
        Ok((own, others.into_iter().enumerate().map(in_rank).collect::<Result<Vec<_>>>()?))
    });
    let ((mut executor, table), others) = match processes {
        None => loaded?,
        Some(processes) => {
            let loaded = processes.checked(loaded)?;
            processes.gather("loading the weights", &())?;
            loaded
        }
    };
    if let (Some(mesh), false) = (mesh, others.is_empty()) {
        let others = others.into_iter().map(|(executor, _)| executor);
        executor.lead(Followers::start(mesh, others.collect())?);
    }
    Ok((executor, table))
}

/// Allocates the planned memory of a rank, and loads its weights onto its device.
fn load_rank(
    plan: EnginePlan,
    model: &Model,
    device: Arc<dyn Device>,
    progress: &mut dyn FnMut(u64),
) -> Result<(Executor, RequestTable)> {
    let mut stream = device.stream()?;
    let shared = SharedMemory::allocate(&*device, plan.shared)?;
    let mut resident = Resident::default();
    let table = RequestTable::new(&*device, plan.fixed)?;
    let in_host = plan.host_caches.as_ref().map(HostCaches::numbers).unwrap_or_default();
    for (_, value) in plan.program().values_from(|origin| *origin == Origin::State) {
        let bytes = state_bytes(value, plan.limits, plan.fixed)?;
        let memory = match table.state(&value.name, bytes)? {
            Some(memory) => memory,
            None => {
                let in_host = in_host.contains_key(&value.name);
                let kind = if in_host { MemoryKind::Pinned } else { MemoryKind::Device };
                BufferSlice::whole(device.allocate(bytes.max(1), kind)?)
            }
        };
        resident.tensors.insert(value.name.clone(), memory);
    }
    let mut caches = None;
    if let Some(host) = &plan.host_caches {
        let (made, in_slots) = CacheRing::new(host, plan.fixed.pages, &resident.tensors, &*device)?;
        resident.cache_slots = in_slots;
        caches = Some(made);
    }
    let source = &**model.weights();
    let mut images = None;
    if let Some(streamed) = &plan.stream {
        let identity =
            || weights_identity(&plan, source, &*device, ("weights-in", plan.options.weights_in.to_string()));
        images = Some(WeightImages::new(streamed, &identity, &*device)?);
    }
    load_weights(&plan, source, &*device, &mut *stream, &mut resident, images.as_mut(), progress)?;
    stream.synchronize("loading the weights", LOAD_TIMEOUT)?;
    let mut ring = None;
    if let (Some(stream), Some(images)) = (&plan.stream, images) {
        let (made, adopted) = WeightRing::new(stream, images, &*device)?;
        resident.weights.extend(adopted.in_slots);
        resident.in_place = adopted.in_place;
        ring = Some(made);
    }
    // Requests have different end tokens, so the host detects the end of an answer, one step later than the device could.
    if plan.is_last_stage() && !plan.is_encoder() {
        stream.upload(&(-1i32).to_le_bytes(), resident.state(StepState::StopIds)?)?;
    }
    let memory = table.memory().clone();
    Ok((Executor::new(plan, device, stream, resident, (ring, caches), shared, memory), table))
}

/// A store of pages, with the key of the empty prefix.
type KeyedStore = (PageKey, Arc<PageStore>);

/// Prepares to move pages of the KV cache to the host and back, if the options ask for it. The store of pages comes with the key of the
/// empty prefix.
fn make_mover(
    plan: &EnginePlan,
    source: &dyn TensorSource,
    device: &dyn Device,
    resident: &Resident,
) -> Result<(Option<PageMover>, Option<KeyedStore>)> {
    let options = &plan.options;
    let mut caches = Vec::new();
    for (_, value) in plan.program().values_from(|origin| *origin == Origin::State) {
        if let Some(memory) = resident.tensors.get(&value.name).filter(|_| is_cache(value)) {
            caches.push((cache_desc(value, plan.limits, plan.fixed)?, memory.clone()));
        }
    }
    if !options.moves_pages() || caches.is_empty() {
        return Ok((None, None));
    }
    let lane = PageLane::new(device, &mut PlanCache::default(), &caches)?;
    let swap = match options.host_pages() {
        0 => None,
        host_pages => Some(SwapSpace::new(device, &lane, host_pages)?),
    };
    let mut store = None;
    if options.prefix_store.is_on() {
        let PrefixStore { host_bytes, folder, folder_bytes } = &options.prefix_store;
        let page_bytes = lane.layout().page_bytes();
        let model = PageKey::root(match folder {
            Some(_) => page_identity(plan, source, device, &caches)?.hash(),
            // Host memory keeps pages of this engine only.
            None => [0; 32],
        });
        let open = |folder| PageFolder::open(folder, &model, page_bytes, *folder_bytes);
        let folder = folder.as_deref().map(open).transpose()?;
        store = Some((model, Arc::new(PageStore::start(page_bytes, *host_bytes, folder)?)));
    }
    let shared = store.as_ref().map(|(_, store)| store.clone());
    Ok((Some(PageMover::new(device, lane, swap, shared)?), store))
}

/// The identity of pages of the KV cache: what keys and values depend on besides tokens.
///
/// # Errors
/// If the source cannot tell when its tensors change.
fn page_identity(
    plan: &EnginePlan,
    source: &dyn TensorSource,
    device: &dyn Device,
    caches: &[(TensorDesc, BufferSlice)],
) -> Result<Identity> {
    let mut identity = weights_identity(plan, source, device, plan.options.prefix_store.option())?;
    identity.add("pages of the KV cache");
    // A file may be replaced by one of the same length and time of change, so some of each tensor is part of it.
    for name in source.names() {
        let rows = source.tensor_type(name).map_or(0, |weight| weight.rows());
        for row in [0, rows / 2].into_iter().filter(|row| *row < rows) {
            let bytes = source.rows(name, row, 1)?;
            identity.add_bytes(&bytes[..bytes.len().min(SAMPLE)]);
        }
        source.release(name);
    }
    for node in &plan.program().nodes {
        identity.add(&format!("{:?}", node.call));
    }
    for (cache, _) in caches {
        // The number of pages depends on the memory; what is in a page does not.
        identity.add(&format!("{:?} {:?}", cache.dtype, &cache.shape[1..]));
    }
    Ok(identity)
}

/// The identity of a rank's packed weights: the same for each start with the same model, backend and options, and for no other.
/// `option` is the one that needs it, and its value.
///
/// # Errors
/// If the source cannot tell when its tensors change.
fn weights_identity(
    plan: &EnginePlan,
    source: &dyn TensorSource,
    device: &dyn Device,
    (option, value): (&'static str, String),
) -> Result<Identity> {
    let fingerprint = source.fingerprint().ok_or_else(|| {
        let rule = format!("is not possible: nothing tells when the tensors of {} change", source.describe());
        EngineError::option(option, value, rule)
    })?;
    let mut identity = Identity::new(&device.properties().name, &fingerprint);
    for (_, value) in plan.program().values_from(|origin| matches!(origin, Origin::Weight(_))) {
        let (Origin::Weight(expr), OperandType::Weight(weight)) = (&value.origin, &value.value_type) else {
            continue;
        };
        let layout = device.kernels().prepack_query(&weight_desc(weight))?;
        identity.add(&value.name);
        identity.add(&format!("{expr:?} {weight:?} {layout:?}"));
    }
    Ok(identity)
}

fn load_weights(
    plan: &EnginePlan,
    source: &dyn TensorSource,
    device: &dyn Device,
    stream: &mut dyn Stream,
    resident: &mut Resident,
    mut images: Option<&mut WeightImages>,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let program = plan.program();
    let mut loaded = 0;
    progress(0);
    for (_, value) in program.values_from(|origin| matches!(origin, Origin::Weight(_))) {
        let Origin::Weight(expr) = &value.origin else { continue };
        let in_weight = |error: Error| error.at(&value.name);
        let reader = ExprReader::new(source, expr).map_err(in_weight)?;
        match &value.value_type {
            OperandType::Weight(weight) => {
                let written = images.as_deref_mut().zip(plan.stream.as_ref());
                if let Some(bytes) =
                    written.and_then(|(images, streamed)| images.written(streamed, &value.name))
                {
                    loaded += bytes;
                    progress(loaded);
                    continue;
                }
                let mut reader = reader.stored_as(weight.format).map_err(in_weight)?;
                let desc = weight_desc(weight);
                let packed = device.kernels().prepack(stream, &desc, &mut reader).map_err(in_weight)?;
                loaded += packed.bytes() as u64;
                let streamed = images.as_deref_mut().filter(|images| images.has(&value.name));
                match streamed.zip(plan.stream.as_ref()) {
                    Some((images, streamed)) => {
                        images.store(streamed, &value.name, &packed, device, stream)?
                    }
                    None => drop(resident.weights.insert(value.name.clone(), packed)),
                }
                reader.release();
            }
            OperandType::Tensor(tensor) => {
                let mut reader = reader.stored_as(WeightFormat::Dense(tensor.dtype)).map_err(in_weight)?;
                let rows = reader.weight_type().rows();
                let bytes = reader.rows(0, rows).map_err(in_weight)?;
                let slice = BufferSlice::whole(device.allocate(bytes.len().max(1), MemoryKind::Device)?);
                stream.upload(&bytes, &slice.slice(0, bytes.len())?)?;
                loaded += bytes.len() as u64;
                resident.tensors.insert(value.name.clone(), slice);
            }
        }
        progress(loaded);
    }
    Ok(())
}
