//! Plans an engine whose model is split over several devices, in one process or in several: one rank for each.

use super::{EnginePlan, bucket::FixedSizes, programs::StepPrograms};
use crate::{
    error::{EngineError, Result},
    options::{EngineOptions, Speculation, WeightsIn},
    passes::shard::{MeshCosts, shard},
    processes::{Processes, facts},
};
use dsrun_core::{
    Error,
    collective::{Collective, Comm, GroupId},
    device::Device,
};
use dsrun_models::model::Model;
use std::{sync::Arc, thread, time::Duration};

/// The time in which all ranks have to join their group.
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);

/// The plan of a rank other than 0.
#[derive(Debug)]
pub(crate) struct FollowerPlan {
    /// The rank's own device.
    pub(crate) device: Arc<dyn Device>,
    /// The rank's own programs and memory.
    pub(crate) plan: EnginePlan,
}

impl EnginePlan {
    /// Plans an engine for a model that is split over devices, by tensor parallelism. The devices are ranks in this order; the
    /// plan is that of rank 0 and holds those of the others. With one device this is [`Self::new`].
    ///
    /// The ranks join their group, and nothing else is allocated.
    ///
    /// # Errors
    /// As [`Self::new`]; if a device has no collectives, or no split of the model fits into the memory of a rank.
    pub fn on_devices(model: &Model, devices: &[Arc<dyn Device>], options: &EngineOptions) -> Result<Self> {
        match devices {
            [only] => Self::new(model, &**only, options),
            _ => Self::on_ranks(model, devices, None, options),
        }
    }

    /// Plans an engine for a model that is split over the devices of several processes, each of which calls this with its own
    /// devices. Ranks are numbered from the first device of process 0 on. Process 0 [loads](Self::load) its plan, the others
    /// [follow](Self::follow).
    ///
    /// # Errors
    /// As [`Self::on_devices`]; if the processes differ in their version, their options or their model. All processes get an error.
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
        if let Some(speculation @ Speculation::Draft { .. }) = options.speculation {
            let rule = "is not possible while the model is split over several devices";
            return Err(EngineError::option("speculate", speculation, rule));
        }
        if options.swap_tokens > 0 {
            let rule = "must be 0 while the model is split over several devices";
            return Err(EngineError::option("swap-tokens", options.swap_tokens, rule));
        }
        let own = RanksOfProcess {
            ranks: devices.len(),
            host: devices.iter().any(|device| device.properties().unified_memory),
            free: devices.iter().filter_map(|device| device.memory().free).min(),
        };
        let all = match processes {
            Some(processes) => processes.gather("comparing devices", &own)?,
            None => vec![own],
        };
        let ranks = all.iter().map(|process| process.ranks).sum();
        let first = all.iter().take(processes.map_or(0, |processes| processes.process()));
        let first = first.map(|process| process.ranks).sum();
        let comms = join(devices, first, ranks, processes)?;
        let longest = model.config().context;
        let (_, fixed, limits) = Self::sizes(longest, options)?;
        let program = StepPrograms::quantized(model, &*devices[0], options)?;
        let host = all.iter().any(|process| process.host);
        let free = all.iter().filter_map(|process| process.free).min();
        // Layers that do not fit are streamed, each rank's from its own share of the host's memory.
        let free = free.filter(|_| options.weights_in != WeightsIn::Host);
        let costs = if host { MeshCosts::HOST } else { MeshCosts::ACCELERATORS };
        // Fewer pages are planned if they do not fit, but one request has its whole context.
        let smallest = FixedSizes { pages: fixed.pages.min(fixed.blocks), ..fixed };
        let sharded = shard(&program, ranks, &options.shard, &costs, &limits.sizes(smallest), free)?;
        tracing::info!(
            ranks,
            bytes = sharded.memory,
            ?free,
            microseconds = sharded.cost_us,
            "split the model"
        );
        let mut plans = Vec::with_capacity(devices.len());
        let programs = sharded.programs.into_iter().skip(first);
        for ((program, comm), device) in programs.zip(comms).zip(devices) {
            let plan = Self::of_program(program, longest, &**device, options, Some(comm))?;
            plans.push(plan.fit_to_memory(&**device)?);
        }
        // Ranks share one block table, so the rank with the fewest pages decides.
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
        Ok(own)
    }

    /// The number of ranks that the model is split over, those of other processes included.
    pub fn ranks(&self) -> usize {
        self.programs.comm().map_or(1, |comm| comm.ranks())
    }

    /// The first rank of this process.
    pub fn first_rank(&self) -> usize {
        self.programs.comm().map_or(0, |comm| comm.rank())
    }

    /// The memory of each rank of this process that will be allocated.
    pub fn memory_of_ranks(&self) -> impl Iterator<Item = &crate::MemoryPlan> {
        std::iter::once(&self.memory).chain(self.followers.iter().map(|follower| &follower.plan.memory))
    }
}

/// What processes have to know about each other's ranks.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
struct RanksOfProcess {
    ranks: usize,
    /// Whether a rank computes in the memory of the host.
    host: bool,
    /// The bytes that are free on the rank that has the fewest.
    free: Option<u64>,
}

/// Joins the devices to a group of `ranks` ranks, from rank `first` on.
fn join(
    devices: &[Arc<dyn Device>],
    first: usize,
    ranks: usize,
    processes: Option<&Arc<Processes>>,
) -> Result<Vec<Arc<dyn Comm>>> {
    let collective = |device: usize| -> Result<&dyn Collective, Error> {
        devices[device].collective().ok_or_else(|| {
            Error::unsupported(format!(
                "{} runs no collectives, which a model split over {ranks} devices needs",
                devices[device].properties().name
            ))
        })
    };
    let id = match processes {
        None => collective(0)?.group_id(None)?,
        Some(processes) => {
            // Process 0 has rank 0 and makes the id.
            let made = processes.leads().then(|| collective(0)?.group_id(Some(processes.address())));
            let made = made.transpose()?.map_or_else(Vec::new, |id| id.0.to_vec());
            let all = processes.gather("joining the ranks", &made)?;
            let id = all.first().and_then(|id| id.first_chunk());
            GroupId(*id.ok_or_else(|| Error::internal("process 0 has made no group"))?)
        }
    };
    let joined: Vec<Result<Arc<dyn Comm>, Error>> = thread::scope(|scope| {
        let join =
            |device| scope.spawn(move || collective(device)?.join(&id, first + device, ranks, JOIN_TIMEOUT));
        let threads: Vec<_> = (0..devices.len()).map(join).collect();
        let panicked = || Err(Error::internal("a rank panicked while it joined its group"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    });
    Ok(joined.into_iter().collect::<Result<_, _>>()?)
}
