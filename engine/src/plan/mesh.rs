//! Plans an engine whose model is split over several devices, one rank per device, in one process or several.

use super::{
    EnginePlan, FollowerPlan,
    bucket::FixedSizes,
    mesh_programs::mesh_programs,
    mesh_rank::{MeshRank, MeshShape},
    programs::{DeviceNumbers, StepPrograms},
    step_interface::is_encoder,
};
use crate::{
    error::{EngineError, Result},
    options::{EngineOptions, KvIn, Speculation},
    passes::shard::MeshCosts,
    processes::{Processes, facts},
    trace::Trace,
};
use dsrun_core::{
    Error,
    collective::{Collective, GroupId},
    device::Device,
    op::MeshAxis,
};
use dsrun_models::model::Model;
use std::{sync::Arc, thread, time::Duration};

/// The time in which all ranks have to join their group.
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);

/// The number of micro-batches per stage into which a prompt of a full step is divided. With 4 the pipeline bubble is below one
/// fifth (GPipe, Huang et al., 2019, section 2.3).
const PROMPT_MICRO_BATCHES: usize = 4;

impl EnginePlan {
    /// Plans an engine for a model that is split over devices: into the pipeline stages of [`EngineOptions::pipeline`], and each
    /// stage by tensor parallelism over its share of the devices. Device `i` is rank `i`; the returned plan is that of rank 0 and
    /// contains those of the others. With one device this is [`Self::new`].
    ///
    /// The ranks join their group, and nothing else is allocated.
    ///
    /// # Errors
    /// Same as [`Self::new`]; if a device has no collectives, or no split of the model fits into the memory of a rank.
    pub fn on_devices(model: &Model, devices: &[Arc<dyn Device>], options: &EngineOptions) -> Result<Self> {
        match devices {
            [only] if options.pipeline.count() == 1 => Self::new(model, &**only, options),
            _ => Self::on_ranks(model, devices, None, options),
        }
    }

    /// Plans an engine for a model that is split over the devices of several processes, each of which calls this with its own
    /// devices. Ranks are numbered from the first device of process 0 on. Process 0 [loads](Self::load) its plan, the others
    /// [follow](Self::follow).
    ///
    /// # Errors
    /// Same as [`Self::on_devices`]; if the processes differ in their version, their options or their model. All processes return
    /// an error.
    pub fn on_processes(
        model: &Model,
        devices: &[Arc<dyn Device>],
        processes: &Arc<Processes>,
        options: &EngineOptions,
    ) -> Result<Self> {
        let compared = facts(model, options).and_then(|facts| processes.agree(&facts));
        let plan = compared.and_then(|()| Self::on_ranks(model, devices, Some(processes), options));
        processes.checked(plan)
    }

    /// Plans the ranks of this process.
    fn on_ranks(
        model: &Model,
        devices: &[Arc<dyn Device>],
        processes: Option<&Arc<Processes>>,
        options: &EngineOptions,
    ) -> Result<Self> {
        let Some((_, others)) = devices.split_first() else {
            return Err(Error::invalid("is empty, must name at least one device").at("devices").into());
        };
        options.validate()?;
        let options = &options.for_model(model.config())?;
        if let Some(speculation @ Speculation::Draft { .. }) = options.speculation {
            let rule = "is not possible while the model is split over several devices";
            return Err(EngineError::option("speculate", speculation, rule));
        }
        if options.swap_tokens > 0 {
            let rule = "must be 0 while the model is split over several devices";
            return Err(EngineError::option("swap-tokens", options.swap_tokens, rule));
        }
        options.prefix_store.refuse("is not possible while the model is split over several devices")?;
        let own = RanksOfProcess {
            ranks: devices.len(),
            host: devices.iter().any(|device| device.properties().unified_memory),
            free: devices.iter().filter_map(|device| device.memory().free).min(),
        };
        let all = match processes {
            Some(processes) => processes.gather("comparing devices", &own)?,
            None => vec![own],
        };
        let shape = mesh_shape(all.iter().map(|process| process.ranks).sum(), options)?;
        let first = all.iter().take(processes.map_or(0, |processes| processes.process()));
        let first: usize = first.map(|process| process.ranks).sum();
        if shape.ranks() > 1 && model.config().encoder.is_some() {
            let rule = "must be 1: the model is an encoder, which runs on one device";
            return Err(EngineError::option("tp", shape.ranks(), rule));
        }
        let longest = model.config().context;
        let (_, fixed, limits) = Self::sizes(longest, options)?;
        let program = StepPrograms::quantized(model, &DeviceNumbers::of(&*devices[0])?, options)?;
        let host = all.iter().any(|process| process.host);
        let free = all.iter().filter_map(|process| process.free).min();
        // Layers that do not fit are streamed; each rank streams its own part from host memory, so free device memory is no
        // limit.
        let free = free.filter(|_| !options.keeps_weights_off_device());
        let costs = if host { MeshCosts::HOST } else { MeshCosts::ACCELERATORS };
        // Fewer pages are planned if needed, but at least enough for the whole context of one request. In host memory they do not count.
        let least = if options.kv_in == KvIn::Host { 0 } else { fixed.pages.min(fixed.blocks) };
        let smallest = FixedSizes { pages: least, ..fixed };
        let mut programs = mesh_programs(&program, shape, options, &costs, &limits.sizes(smallest), free)?;
        let places: Vec<usize> = all.iter().map(|process| process.ranks).collect();
        let mut meshes = join(devices, first, shape, processes, &places)?;
        // Launches of two engines that hold a device each would wait for their ranks on the other one until they give up.
        if options.engines_on_devices == 1 {
            meshes.iter_mut().for_each(|mesh| mesh.compare(&programs));
        }
        let mut plans = Vec::with_capacity(devices.len());
        for (mesh, device) in meshes.into_iter().zip(devices) {
            let program = std::mem::take(&mut programs[mesh.rank()]);
            let plan = Self::of_program(program, longest, &**device, options, Some(mesh))?;
            plans.push(plan.fit_to_memory(&**device)?);
        }
        // Ranks share one block table, so all use the number of pages of the rank with the fewest.
        let mut pages = plans.iter().map(|plan| plan.fixed.pages).min().unwrap_or(fixed.pages);
        if let Some(processes) = processes {
            pages = processes.gather("comparing memory", &pages)?.into_iter().min().unwrap_or(pages);
        }
        for (plan, device) in plans.iter_mut().zip(devices) {
            plan.fixed.pages = pages;
            plan.count_memory(&**device)?;
        }
        let mut plans = plans.into_iter();
        let mut own = plans.next().ok_or_else(|| Error::internal("the first rank has no plan"))?;
        let device = |(plan, device): (Self, &Arc<dyn Device>)| FollowerPlan { device: device.clone(), plan };
        own.followers = plans.zip(others).map(device).collect();
        own.processes = processes.cloned();
        let costs = options.shard.costs.as_ref().unwrap_or(&costs);
        own.step_tokens = Self::micro_batch_tokens(options, own.limits.tokens, own.fixed.requests, costs);
        Ok(own)
    }

    /// Records what the ranks of this process run in `trace`, while [`Engine::record_trace`](crate::Engine::record_trace) has
    /// switched recording on.
    pub fn trace(&mut self, trace: &Arc<Trace>) {
        self.trace = Some(trace.clone());
        self.followers.iter_mut().for_each(|follower| follower.plan.trace(trace));
    }

    /// The number of ranks that the model is split over, those of other processes included.
    pub fn ranks(&self) -> usize {
        self.programs.mesh().map_or(1, MeshRank::ranks)
    }

    /// The first rank of this process.
    pub fn first_rank(&self) -> usize {
        self.programs.mesh().map_or(0, MeshRank::rank)
    }

    /// Whether the model is an encoder, which generates no tokens.
    pub(crate) fn is_encoder(&self) -> bool {
        is_encoder(self.program())
    }

    /// The number of stages that the layers are divided into.
    pub fn stages(&self) -> usize {
        self.programs.mesh().map_or(1, MeshRank::stages)
    }

    /// Whether the first rank of the plan has the last stage, which samples.
    pub(crate) fn is_last_stage(&self) -> bool {
        self.programs.mesh().is_none_or(|mesh| mesh.stage() + 1 == mesh.stages())
    }

    /// The number of micro-batches into which generating requests are divided: one for each stage, unless the options fix it.
    pub(crate) fn micro_batches(options: &EngineOptions) -> usize {
        let pipeline = &options.pipeline;
        if options.launch_ahead { pipeline.micro_batches.unwrap_or_else(|| pipeline.count()) } else { 1 }
    }

    /// The maximum number of steps in flight. With several stages there is one for each stage and for each micro-batch, otherwise
    /// there are two.
    pub(crate) fn steps_in_flight(options: &EngineOptions) -> usize {
        match (options.launch_ahead, options.pipeline.count()) {
            (false, _) => 1,
            (true, 1) => 2,
            (true, stages) => stages.max(Self::micro_batches(options)),
        }
    }

    /// The maximum number of tokens of a step, of at most `tokens`, for up to `requests` requests. With several stages, prompts are
    /// divided into micro-batches to fill the pipeline. Unless the options fix their number, they stay large enough to be
    /// compute-bound.
    pub(crate) fn micro_batch_tokens(
        options: &EngineOptions,
        tokens: usize,
        requests: usize,
        costs: &MeshCosts,
    ) -> usize {
        let stages = options.pipeline.count();
        if stages == 1 || !options.launch_ahead {
            return tokens;
        }
        if let Some(count) = options.pipeline.micro_batches {
            return (tokens / count).max(requests.div_ceil(count));
        }
        let least = costs.balanced_tokens().min(tokens).max(requests);
        (tokens / (PROMPT_MICRO_BATCHES * stages)).max(least)
    }

    /// The stage of each rank of this process, counted from 0.
    pub fn stage_of_ranks(&self) -> impl Iterator<Item = usize> {
        let stage = |plan: &Self| plan.programs.mesh().map_or(0, MeshRank::stage);
        std::iter::once(stage(self)).chain(self.followers.iter().map(move |follower| stage(&follower.plan)))
    }

    /// The memory of each rank of this process that will be allocated.
    pub fn memory_of_ranks(&self) -> impl Iterator<Item = &crate::MemoryPlan> {
        std::iter::once(&self.memory).chain(self.followers.iter().map(|follower| &follower.plan.memory))
    }
}

/// What processes exchange about their ranks.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
struct RanksOfProcess {
    ranks: usize,
    /// Whether a rank's device uses host memory.
    host: bool,
    /// The bytes that are free on the rank that has the fewest.
    free: Option<u64>,
}

/// The mesh shape for this number of ranks.
///
/// # Errors
/// If the ranks are not a multiple of the stages.
fn mesh_shape(ranks: usize, options: &EngineOptions) -> Result<MeshShape> {
    let pipeline = options.pipeline.count();
    if ranks == 0 || !ranks.is_multiple_of(pipeline) {
        let rule = format!("must divide the number of ranks, which is {ranks}");
        return Err(EngineError::option("pp", pipeline, rule));
    }
    Ok(MeshShape { tensor: ranks / pipeline, pipeline })
}

/// A group of ranks along an axis of the mesh.
#[derive(Debug)]
struct Group {
    axis: MeshAxis,
    /// Its members, in the order of the group.
    ranks: Vec<usize>,
}

/// All groups of a mesh, in the order in which every rank joins its own.
fn groups(shape: MeshShape) -> Vec<Group> {
    let mut groups = Vec::new();
    for axis in shape.axes() {
        let of_first = |rank: usize| {
            let ranks = shape.group(axis, rank);
            (ranks.first() == Some(&rank)).then_some(Group { axis, ranks })
        };
        groups.extend((0..shape.ranks()).filter_map(of_first));
    }
    groups
}

/// Joins the devices to the groups of the mesh as the ranks `first`, `first + 1`, ... `places` is the number of ranks of each
/// process.
fn join(
    devices: &[Arc<dyn Device>],
    first: usize,
    shape: MeshShape,
    processes: Option<&Arc<Processes>>,
    places: &[usize],
) -> Result<Vec<MeshRank>> {
    let collective = |device: usize| -> Result<&dyn Collective, Error> {
        devices[device].collective().ok_or_else(|| {
            Error::unsupported(format!(
                "{} runs no collectives, which a model split over {} devices needs",
                devices[device].properties().name,
                shape.ranks()
            ))
        })
    };
    let groups = groups(shape);
    let own = first..first + devices.len();
    // The process of a group's first rank creates the group's id.
    let make = |group: &Group| -> Result<Vec<u8>, Error> {
        let maker = group.ranks[0];
        if !own.contains(&maker) {
            return Ok(Vec::new());
        }
        let elsewhere = group.ranks.iter().any(|rank| !own.contains(rank));
        let host = processes.filter(|_| elsewhere).map(|processes| processes.address());
        Ok(collective(maker - first)?.group_id(host)?.0.to_vec())
    };
    let made = groups.iter().map(make).collect::<Result<Vec<_>, _>>()?;
    let all = match processes {
        None => vec![made],
        Some(processes) => processes.gather("joining the ranks", &made)?,
    };
    let starts = places.iter().scan(0, |start, ranks| Some(std::mem::replace(start, *start + ranks)));
    let starts: Vec<usize> = starts.collect();
    let id = |(index, group): (usize, &Group)| {
        let process = starts.partition_point(|start| *start <= group.ranks[0]).saturating_sub(1);
        let id = all.get(process).and_then(|ids| ids.get(index)?.first_chunk());
        let unmade = || Error::internal(format!("process {process} has created no group"));
        id.copied().map(GroupId).ok_or_else(unmade)
    };
    let ids = groups.iter().enumerate().map(id).collect::<Result<Vec<_>, _>>()?;
    let join = |device: usize| -> Result<MeshRank, Error> {
        let rank = first + device;
        let mut mesh = MeshRank::new(rank, shape);
        for (group, id) in groups.iter().zip(&ids) {
            let Some(place) = group.ranks.iter().position(|member| *member == rank) else { continue };
            let comm = collective(device)?.join(id, place, group.ranks.len(), JOIN_TIMEOUT)?;
            mesh.add(group.axis, comm);
        }
        Ok(mesh)
    };
    let joined: Vec<Result<MeshRank, Error>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..devices.len()).map(|device| scope.spawn(move || join(device))).collect();
        let panicked = || Err(Error::internal("a rank panicked while it joined its group"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    });
    Ok(joined.into_iter().collect::<Result<_, _>>()?)
}
