//! Plans an engine whose model is split over several devices: one rank for each.

use super::{EnginePlan, bucket::FixedSizes, programs::StepPrograms};
use crate::{
    error::{EngineError, Result},
    options::{EngineOptions, Speculation},
    passes::shard::{MeshCosts, shard},
};
use dsrun_core::{
    Error,
    collective::{Collective, Comm},
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
        let Some((first, others)) = devices.split_first() else {
            return Err(Error::invalid("is empty, must name at least one device").at("devices").into());
        };
        if others.is_empty() {
            return Self::new(model, &**first, options);
        }
        options.validate()?;
        if let Some(speculation @ Speculation::Draft { .. }) = options.speculation {
            let rule = "is not possible while the model is split over several devices";
            return Err(EngineError::option("speculate", speculation, rule));
        }
        if options.swap_tokens > 0 {
            let rule = "must be 0 while the model is split over several devices";
            return Err(EngineError::option("swap-tokens", options.swap_tokens, rule));
        }
        let comms = join(devices)?;
        let longest = model.config().context;
        let (_, fixed, limits) = Self::sizes(longest, options)?;
        let program = StepPrograms::quantized(model, &**first, options)?;
        let host = devices.iter().any(|device| device.properties().unified_memory);
        let costs = if host { MeshCosts::HOST } else { MeshCosts::ACCELERATORS };
        let free = devices.iter().filter_map(|device| device.memory().free).min();
        // Fewer pages are planned if they do not fit, but one request has its whole context.
        let smallest = FixedSizes { pages: fixed.pages.min(fixed.blocks), ..fixed };
        let sharded = shard(&program, devices.len(), &options.shard, &costs, &limits.sizes(smallest), free)?;
        tracing::info!(
            ranks = devices.len(),
            bytes = sharded.memory,
            ?free,
            microseconds = sharded.cost_us,
            "split the model"
        );
        let mut plans = Vec::with_capacity(devices.len());
        for ((program, comm), device) in sharded.programs.into_iter().zip(comms).zip(devices) {
            let plan = Self::of_program(program, longest, &**device, options, Some(comm))?;
            plans.push(plan.fit_to_memory(&**device)?);
        }
        // Ranks share one block table, so the rank with the fewest pages decides.
        let pages = plans.iter().map(|plan| plan.fixed.pages).min().unwrap_or(fixed.pages);
        for (plan, device) in plans.iter_mut().zip(devices) {
            plan.fixed.pages = pages;
            plan.count_memory(&**device)?;
        }
        let mut plans = plans.into_iter();
        let mut own = plans.next().ok_or_else(|| Error::internal("rank 0 has no plan"))?;
        let device = |(plan, device): (Self, &Arc<dyn Device>)| FollowerPlan { device: device.clone(), plan };
        own.followers = plans.zip(others).map(device).collect();
        Ok(own)
    }

    /// The memory of each rank that will be allocated.
    pub fn memory_of_ranks(&self) -> impl Iterator<Item = &crate::MemoryPlan> {
        std::iter::once(&self.memory).chain(self.followers.iter().map(|follower| &follower.plan.memory))
    }
}

/// Joins the devices to a group, each as the rank of its place.
fn join(devices: &[Arc<dyn Device>]) -> Result<Vec<Arc<dyn Comm>>> {
    let ranks = devices.len();
    let collective = |rank: usize| -> Result<&dyn Collective, Error> {
        devices[rank].collective().ok_or_else(|| {
            Error::unsupported(format!(
                "{} runs no collectives, which a model split over {ranks} devices needs",
                devices[rank].properties().name
            ))
        })
    };
    let id = collective(0)?.group_id(None)?;
    let joined: Vec<Result<Arc<dyn Comm>, Error>> = thread::scope(|scope| {
        let join = |rank: usize| scope.spawn(move || collective(rank)?.join(&id, rank, ranks, JOIN_TIMEOUT));
        let threads: Vec<_> = (0..ranks).map(join).collect();
        let panicked = || Err(Error::internal("a rank panicked while it joined its group"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panicked())).collect()
    });
    Ok(joined.into_iter().collect::<Result<_, _>>()?)
}
