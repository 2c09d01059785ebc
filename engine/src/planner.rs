//! Predicts the performance of a model on devices that need not be present: the memory of each rank, the time of a step, and its
//! bottleneck.
//!
//! The forecast is made for the programs that would run: the model's program is divided by
//! [`partition`](crate::passes::partition) and [`shard`](mod@crate::passes::shard), and the time of each rank's calls is computed
//! by [`MeshCosts`], the cost model that the passes use. It is a lower bound (roofline): launch overhead and kernel inefficiency
//! come on top.
//!
//! | module | holds |
//! |---|---|
//! | `planner` | the forecast of a mesh, and of all meshes with a given number of devices |
//! | [`hardware`] | figures of devices |
//! | `step_cost` | the cost of a rank's program |
//! | [`streaming`] | weights that do not fit, and are copied from host memory in every step |
//! | [`simulation`] | a pipeline with the engine's scheduler and a virtual clock |
//! | [`timeline`] | the schedule of each stage over time, and its idle share |

pub mod hardware;
pub mod simulation;
mod step_cost;
pub mod streaming;
pub mod timeline;

use crate::{
    error::{EngineError, Result},
    options::{EngineOptions, KvIn},
    passes::{partition::PipelineOptions, shard::MeshCosts},
    plan::{DeviceNumbers, EnginePlan, FixedSizes, MeshShape, StepPrograms, mesh_programs},
};
use dsrun_core::{
    Code, DType, Error,
    op::OperandType,
    program::{Origin, Program},
};
use dsrun_models::model::Model;
use hardware::Hardware;
use simulation::{SimulatedRequest, simulate};
use step_cost::StepCost;
use streaming::{FullestRank, HostCache, StreamedWeights, stream_stages};
use timeline::Timeline;

/// The maximum number of ranks per stage in the meshes that are tried. Larger ones are seldom best, but can be requested
/// explicitly.
const MOST_TENSOR_RANKS: usize = 16;
/// The maximum number of requests that [`best_batch`] tries.
const MOST_REQUESTS: usize = 1024;

/// The requests that a forecast is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Load {
    /// Requests that generate side by side.
    pub requests: usize,
    /// Tokens of each request in the KV cache.
    pub context: usize,
    /// Tokens of a prompt.
    pub prompt: usize,
}

/// The bottleneck of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// Reading weights and KV cache.
    Memory,
    /// The operations of matrix products.
    Operations,
    /// The bytes that ranks exchange.
    LinkBandwidth,
    /// The latency of exchanges.
    LinkLatency,
    /// The choice of experts.
    Choices,
    /// Copies of weights from host memory, and reads of keys and values there.
    HostBandwidth,
}

/// The forecast for the ranks of a stage.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct StageForecast {
    /// Bytes of weights on the device of the fullest rank; if weights are streamed, the ring buffer that they are copied to included.
    pub weights: u64,
    /// Bytes of states of the fullest rank: KV cache, request table and receive buffers.
    pub states: u64,
    /// The weights that do not fit, if there is room to stream them.
    pub streamed: Option<StreamedWeights>,
    /// The keys and values that do not fit, if they may be in host memory.
    pub host_cache: Option<HostCache>,
    /// Microseconds of a decode step, communication included. Copies of weights overlap with the rest, reads in host memory do not.
    pub step_us: f64,
    /// Microseconds of memory-bound calls in a decode step.
    pub read_us: f64,
    /// Microseconds of compute-bound calls in a decode step.
    pub compute_us: f64,
    /// Microseconds of communication between ranks in a decode step.
    pub exchange_us: f64,
    /// Microseconds in which experts are chosen, and none of their weights can be read.
    pub choice_us: f64,
    /// Bytes that a rank reads in a decode step.
    pub read_bytes: u64,
    /// Microseconds of a step with a chunk of a prompt.
    pub chunk_us: f64,
    /// The bottleneck of the decode step.
    pub bound: Bound,
}

/// The forecast for a model on a mesh of devices.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Forecast {
    /// Ranks of each stage.
    pub tp: usize,
    /// Stages.
    pub pp: usize,
    /// The stages in their order.
    pub stages: Vec<StageForecast>,
    /// Whether all weights and states fit into the memory of a device; `None` if that is not known.
    pub fits: Option<bool>,
    /// Milliseconds between two tokens of a request.
    pub token_ms: f64,
    /// Tokens per second of all requests.
    pub tokens_per_second: f64,
    /// Milliseconds to the first token of a prompt when no other request runs.
    pub first_token_ms: f64,
    /// Tokens of a chunk of a prompt.
    pub chunk: usize,
    /// Requests of a micro-batch that generates.
    pub micro_batch: usize,
    /// Bytes that all ranks read per generated token.
    pub bytes_per_token: u64,
}

impl Forecast {
    /// The stage that takes the longest.
    pub fn slowest(&self) -> usize {
        let all = self.stages.iter().enumerate();
        all.max_by(|(_, a), (_, b)| a.step_us.total_cmp(&b.step_us)).map_or(0, |(stage, _)| stage)
    }

    /// The timeline of the load's requests, which all arrive at once and have answers of `answer` tokens. `longest` is the
    /// model's own context; the other arguments are those of the forecast.
    ///
    /// # Errors
    /// Same as [`simulation::simulate`].
    pub fn timeline(
        &self,
        longest: usize,
        hardware: &Hardware,
        options: &EngineOptions,
        load: Load,
        answer: usize,
    ) -> Result<Timeline> {
        let options = EngineOptions { pipeline: pipeline_of(options, self.pp), ..options_for(options, load) };
        let requests = vec![SimulatedRequest { prompt: load.prompt, answer }; load.requests];
        simulate(&requests, longest, &options, &hardware.costs, &|stage, step| {
            let Some(stage) = self.stages.get(stage) else { return 0.0 };
            let of_prompt = stage.chunk_us * step.tokens as f64 / self.chunk.max(1) as f64;
            if step.tokens <= self.micro_batch { stage.step_us } else { of_prompt.max(stage.step_us) }
        })
    }

    /// Bytes that the rank that streams most copies to its device in every step; 0 if all weights fit.
    pub fn streamed_bytes(&self) -> u64 {
        let streamed = self.stages.iter().filter_map(|stage| stage.streamed);
        streamed.map(|streamed| streamed.bytes).max().unwrap_or(0)
    }

    /// The number of requests below which a byte of device memory is worth more as KV cache than as a resident layer: as KV cache it
    /// lets more requests share the copies of a step. 0 if no weights are streamed.
    pub fn cache_threshold(&self, load: Load) -> f64 {
        let stages = self.stages.iter().filter_map(|stage| Some((stage.streamed?, stage.states)));
        let of_stage = |(streamed, states): (StreamedWeights, u64)| {
            streamed.layer_bytes as f64 * load.requests as f64 / states.max(1) as f64
        };
        stages.map(of_stage).fold(0.0, f64::max)
    }

    /// Bytes of weights and states of the fullest rank.
    pub fn memory(&self) -> u64 {
        self.stages.iter().map(|stage| stage.weights + stage.states).max().unwrap_or(0)
    }
}

/// Forecasts a model on every mesh of `devices` devices, the best first: meshes that fit into memory, then those that stream weights
/// from host memory, then others, each by the time between tokens. `mesh` restricts the forecast to one mesh, given as ranks per stage
/// and stages.
///
/// # Errors
/// If an option is out of range, the mesh does not match the devices, or the model cannot be divided that way.
pub fn forecast(
    model: &Model,
    devices: usize,
    mesh: Option<(usize, usize)>,
    hardware: &Hardware,
    options: &EngineOptions,
    load: Load,
) -> Result<Vec<Forecast>> {
    if devices == 0 {
        return Err(EngineError::option("devices", devices, "must be at least 1"));
    }
    if let Some((tp, pp)) = mesh.filter(|(tp, pp)| tp * pp != devices) {
        let rule = format!("must be tp times pp, which is {}", tp * pp);
        return Err(EngineError::option("devices", devices, rule));
    }
    let options = options_for(options, load);
    let preferred = hardware.dtype.unwrap_or(DType::BF16);
    let numbers = DeviceNumbers { preferred, has_f16: true, quantises_inputs: false, no_i8_cache: None };
    let program = StepPrograms::quantized(model, &numbers, &options)?;
    let all: Vec<(usize, usize)> = match mesh {
        Some(mesh) => vec![mesh],
        None => (1..=devices.min(MOST_TENSOR_RANKS))
            .filter(|tp| devices.is_multiple_of(*tp))
            .map(|tp| (tp, devices / tp))
            .collect(),
    };
    let (mut forecasts, mut refused) = (Vec::new(), None);
    for (tp, pp) in all {
        let shape = MeshShape { tensor: tp, pipeline: pp };
        match forecast_mesh(&program, model.config().context, shape, hardware, &options, load) {
            Ok(forecast) => forecasts.push(forecast),
            // No mesh makes such a context possible.
            Err(error @ EngineError::Option { option: "context", .. }) => return Err(error),
            // When all meshes are tried, impossible ones are skipped.
            Err(error) if mesh.is_none() => refused = Some((shape, error)),
            Err(error) => return Err(error),
        }
    }
    forecasts.sort_by(|a, b| {
        let order = |forecast: &Forecast| match forecast.fits {
            Some(false) if forecast.streamed_bytes() == 0 => 2,
            Some(false) => 1,
            _ => 0,
        };
        order(a).cmp(&order(b)).then(a.token_ms.total_cmp(&b.token_ms))
    });
    match (forecasts.is_empty(), refused) {
        (true, Some((MeshShape { tensor, pipeline }, error))) => {
            let rule = format!(
                "must be a number over which the model can be divided; the last mesh that was tried, tp={tensor},pp={pipeline}: {error}"
            );
            Err(EngineError::option("devices", devices, rule))
        }
        _ => Ok(forecasts),
    }
}

/// The forecast with the most tokens per second among those of 1, 2, 4 and so on requests, on one mesh, and its number of requests.
/// Requests are added while the mesh has room for their KV cache, at most 1024.
///
/// # Errors
/// Those of [`forecast`].
pub fn best_batch(
    model: &Model,
    mesh: (usize, usize),
    hardware: &Hardware,
    options: &EngineOptions,
    load: Load,
) -> Result<Option<(usize, Forecast)>> {
    let mut best: Option<(usize, Forecast)> = None;
    for requests in
        std::iter::successors(Some(1), |count| Some(count * 2)).take_while(|count| *count <= MOST_REQUESTS)
    {
        let load = Load { requests, ..load };
        let found = forecast(model, mesh.0 * mesh.1, Some(mesh), hardware, options, load)?;
        let Some(found) =
            found.into_iter().find(|found| found.fits != Some(false) || found.streamed_bytes() > 0)
        else {
            break;
        };
        if best.as_ref().is_none_or(|(_, best)| found.tokens_per_second > best.tokens_per_second) {
            best = Some((requests, found));
        }
    }
    Ok(best)
}

/// The options of an engine for a load.
fn options_for(options: &EngineOptions, load: Load) -> EngineOptions {
    EngineOptions {
        max_requests: load.requests,
        step_tokens: options.step_tokens.max(load.requests),
        context: Some(load.context),
        ..options.clone()
    }
}

/// How the options divide a model over so many stages.
fn pipeline_of(options: &EngineOptions, stages: usize) -> PipelineOptions {
    let micro_batches = options.pipeline.micro_batches.filter(|_| stages > 1);
    PipelineOptions { stages, micro_batches, ..options.pipeline.clone() }
}

/// Forecasts a model on one mesh.
fn forecast_mesh(
    program: &Program,
    longest: usize,
    shape: MeshShape,
    hardware: &Hardware,
    options: &EngineOptions,
    load: Load,
) -> Result<Forecast> {
    let (tp, pp) = (shape.tensor, shape.pipeline);
    let options = EngineOptions { pipeline: pipeline_of(options, pp), ..options.clone() };
    let (_, fixed, limits) = EnginePlan::sizes(longest, &options)?;
    let sizes = limits.sizes(fixed);
    let micro_batches = EnginePlan::micro_batches(&options).min(load.requests).max(1);
    let generating = load.requests.div_ceil(micro_batches);
    let costs = MeshCosts {
        tokens: generating,
        sequences: generating,
        context: load.context,
        ..hardware.costs.clone()
    };
    // All stages have their ranks on as many hosts, or nearly so.
    let costs = hardware.link(&costs, 0..tp);
    let programs = match mesh_programs(program, shape, &options, &costs, &sizes, hardware.memory) {
        // A mesh that does not fit into memory is still forecast.
        Err(EngineError::Hal(error)) if error.code() == Code::OutOfMemory => {
            mesh_programs(program, shape, &options, &costs, &sizes, None)?
        }
        programs => programs?,
    };
    // The programs of the ranks of each stage, in stage order.
    let ranks_of = |stage: usize| (0..shape.ranks()).filter(move |rank| shape.stage(*rank) == stage);
    let price = |stage: usize, tokens: usize, sequences: usize, context: usize| {
        let step = MeshCosts { tokens, sequences, context, ..hardware.costs.clone() };
        let within = hardware.link(&step, ranks_of(stage));
        // Each rank sends to the one in the same place of the next stage.
        let next = ranks_of(stage).zip(ranks_of(stage + 1)).find(|(from, to)| {
            let pair = [*from, *to];
            hardware.network.is_some_and(|network| network.separates(pair.into_iter()))
        });
        let sends = hardware.link(&step, next.into_iter().flat_map(|(from, to)| [from, to]));
        let all = ranks_of(stage)
            .map(|rank| StepCost::of(&programs[rank], &within, &sends, tp, hardware.choice_us));
        let all = all.collect::<Result<Vec<_>, Error>>()?;
        let slowest = all.into_iter().max_by(|a, b| a.total_us().total_cmp(&b.total_us()));
        slowest.ok_or_else(|| Error::internal("a stage has no ranks"))
    };
    let mut stages = Vec::with_capacity(pp);
    let fullest = |stage: usize| -> Result<FullestRank<'_>> {
        let all = ranks_of(stage).map(|rank| {
            let [weights, states] = held(&programs[rank], &sizes)?;
            Ok(FullestRank { program: &programs[rank], weights, states })
        });
        let all = all.collect::<Result<Vec<_>>>()?;
        let fullest = all.into_iter().max_by_key(|rank| rank.weights + rank.states);
        fullest.ok_or_else(|| Error::internal("a stage has no ranks").into())
    };
    let mut fullest = (0..pp).map(fullest).collect::<Result<Vec<_>>>()?;
    let in_host = fullest.iter_mut().map(|rank| match options.kv_in {
        KvIn::Device => Ok(None),
        KvIn::Host => rank.move_caches(hardware, limits, fixed),
    });
    let in_host = in_host.collect::<Result<Vec<_>>>()?;
    let streams = stream_stages(&fullest, generating, hardware)?;
    for (stage, ((rank, streamed), host_cache)) in fullest.iter().zip(streams).zip(in_host).enumerate() {
        let cost = price(stage, generating, generating, load.context)?;
        let share = generating as f64 / load.requests.max(1) as f64;
        let cache_us = host_cache.map_or(0.0, |cache| cache.read_us * share);
        let copy_us = streamed.map_or(0.0, |(streamed, _)| streamed.copy_us) + cache_us;
        stages.push(StageForecast {
            weights: streamed.map_or(rank.weights, |(_, on_device)| on_device),
            states: rank.states,
            streamed: streamed.map(|(streamed, _)| streamed),
            host_cache,
            step_us: cache_us
                + streamed.map_or(cost.total_us(), |(streamed, _)| streamed.step_us(cost.total_us())),
            read_us: cost.read_us,
            compute_us: cost.compute_us,
            exchange_us: cost.exchange_us(),
            choice_us: cost.choice_us,
            read_bytes: cost.bytes as u64,
            chunk_us: 0.0,
            bound: if copy_us > cost.total_us() { Bound::HostBandwidth } else { cost.bound() },
        });
    }
    let through: f64 = stages.iter().map(|stage| stage.step_us).sum();
    let slowest = stages.iter().map(|stage| stage.step_us).fold(0.0, f64::max);
    // The time between two tokens of a request: its micro-batch passes through all stages, and all micro-batches pass through the
    // slowest stage.
    let token_us = through.max(slowest * micro_batches as f64);
    let chunk = chunk_of_prompt(load.prompt, fixed, &options, &costs);
    let chunks = load.prompt.div_ceil(chunk).max(1);
    let chunk = load.prompt.div_ceil(chunks).max(1);
    for (stage, own) in stages.iter_mut().enumerate() {
        let copy_us = own.streamed.map_or(0.0, |streamed| streamed.prompt_copy_us);
        own.chunk_us = price(stage, chunk, 1, load.prompt / 2)?.total_us().max(copy_us);
    }
    let slowest_chunk = stages.iter().map(|stage| stage.chunk_us).fold(0.0, f64::max);
    let through_us: f64 = stages.iter().map(|stage| stage.chunk_us).sum();
    let first_token_us = through_us + slowest_chunk * (chunks - 1) as f64;
    let bytes: u64 = stages.iter().map(|stage| stage.read_bytes).sum();
    Ok(Forecast {
        tp,
        pp,
        fits: hardware.memory.map(|memory| fullest.iter().all(|rank| rank.fits(memory))),
        token_ms: token_us / 1e3,
        tokens_per_second: load.requests as f64 / (token_us / 1e6),
        first_token_ms: first_token_us / 1e3,
        chunk,
        micro_batch: generating,
        bytes_per_token: bytes * (tp * micro_batches) as u64 / load.requests.max(1) as u64,
        stages,
    })
}

/// The number of tokens in a prefill chunk.
fn chunk_of_prompt(prompt: usize, fixed: FixedSizes, options: &EngineOptions, costs: &MeshCosts) -> usize {
    EnginePlan::micro_batch_tokens(options, options.step_tokens, fixed.requests, costs).min(prompt).max(1)
}

/// The bytes of weights and of states that a rank holds.
fn held(program: &Program, sizes: &dyn Fn(&str) -> Option<usize>) -> Result<[u64; 2], Error> {
    let mut held = [0, 0];
    for value in &program.values {
        let place = match value.origin {
            Origin::Weight(_) => 0,
            Origin::State => 1,
            Origin::Input | Origin::Node(_) => continue,
        };
        held[place] += match &value.value_type {
            OperandType::Weight(weight) => weight.bytes()?,
            OperandType::Tensor(tensor) => tensor
                .resolve(sizes)?
                .iter()
                .fold(tensor.dtype.bytes(), |all, size| all.saturating_mul(*size)),
        } as u64;
    }
    Ok(held)
}
