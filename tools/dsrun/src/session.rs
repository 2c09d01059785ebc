//! The way from arguments to a loaded model, which all commands share.

pub(crate) mod fit;

use crate::{
    arguments::{
        DeviceArguments, Dtype, EngineArguments, ModelArguments, SamplingArguments, SpeculationArguments,
        Weights,
    },
    devices::{Devices, Followed},
    find_backend::find_backend,
    interrupt,
    terminal::{FetchBar, Terminal},
};
use anyhow::{Context, Result, anyhow, bail};
use dsrun_core::{Code, DType, WeightFormat, device::Device};
use dsrun_engine::{
    Engine, EngineOptions, EnginePlan, GenerateOptions, HostCacheForecast, Pipeline, Precision, PrefixStore,
    SamplingOptions, Speculation, StreamForecast, calibrate, calibration_sequences,
    passes::quantize::Calibration,
};
use dsrun_models::{
    fetch::{DEFAULT_MODEL, FetchError, FetchOptions, ModelFiles, resolve},
    model::Model,
    presets::Preset,
};
use std::{sync::Arc, thread::available_parallelism, time::Instant};

/// The preset with the shape of the default model.
const DEFAULT_PRESET: &str = "smollm2-135m";
/// The seed of random weights.
const RANDOM_SEED: u64 = 0;

/// An offline device: the backend compiles kernels for a device that this machine does not have.
pub(crate) fn describe_device(arguments: &DeviceArguments, name: &str) -> Result<Arc<dyn Device>> {
    let backend = find_backend(arguments.backend.as_deref())?;
    let described = backend.describe(name).map_err(|error| match error.code() {
        Code::Unsupported => {
            anyhow!("{}\nhint: choose a backend that compiles kernels ahead with --backend", error.message())
        }
        _ => error.into(),
    });
    described.with_context(|| format!("cannot build for {name} with backend {}", backend.info().name))
}

/// Opens the model that the arguments name, and fetches it first where the cache lacks it.
///
/// Random weights are generated in the type of `--dtype`, bf16 by default.
pub(crate) fn open_model(arguments: &ModelArguments, dtype: Dtype, terminal: &Terminal) -> Result<Model> {
    if arguments.weights == Weights::Random {
        let dtype = Precision::from(dtype).dtype().unwrap_or(DType::BF16);
        let name = if arguments.model == DEFAULT_MODEL { DEFAULT_PRESET } else { &arguments.model };
        return Ok(Model::random_named(name, RANDOM_SEED, WeightFormat::Dense(dtype))?);
    }
    let hint = "--weights random generates weights to measure with";
    Ok(Model::from_files(&find_files(&arguments.model, arguments.offline, hint, terminal)?)?)
}

/// Finds the files of a model, and fetches them if the cache lacks them. `hint` is for users who name a preset, which has no
/// files.
pub(crate) fn find_files(name: &str, offline: bool, hint: &str, terminal: &Terminal) -> Result<ModelFiles> {
    let mut options = FetchOptions::from_env()?;
    options.offline |= offline;
    resolve(name, &options, &mut FetchBar::new(terminal)).map_err(|error| match error {
        FetchError::Name { .. } if Preset::from_name(name).is_some() => {
            anyhow!("`{name}` is a preset: the sizes of a model, without its weights\nhint: {hint}")
        }
        error => error.into(),
    })
}

/// Opens the draft model if speculation uses one. Its weights have the same source as those of the target model, which may not be
/// split over devices.
pub(crate) fn open_draft(
    arguments: &SpeculationArguments,
    model: &ModelArguments,
    dtype: Dtype,
    devices: &Devices,
    terminal: &Terminal,
) -> Result<Option<Arc<Model>>> {
    let drafts = matches!(arguments.speculation(), Some(Speculation::Draft { .. }));
    if drafts && (devices.ranks().len() > 1 || devices.processes().is_some()) {
        bail!(
            "--speculate draft is not possible while the model is split over several ranks\nhint: use --speculate ngram, or leave \
             --tp and --devices out"
        );
    }
    let Some(name) = &arguments.draft else {
        if drafts {
            bail!(
                "--speculate draft needs a draft model\nhint: name one with --draft, much smaller and with the same tokenizer"
            );
        }
        return Ok(None);
    };
    if !drafts {
        bail!(
            "--draft names a draft model, but --speculate chooses another way to propose tokens\nhint: leave one of them out"
        );
    }
    let own = ModelArguments { model: name.clone(), weights: model.weights, offline: model.offline };
    let opened = open_model(&own, dtype, terminal).with_context(|| format!("the draft model {name}"))?;
    Ok(Some(Arc::new(opened)))
}

/// Plans an engine, with a draft model if there is one.
pub(crate) fn plan_engine(
    model: &Model,
    draft: Option<&Arc<Model>>,
    devices: &Devices,
    options: &EngineOptions,
) -> Result<EnginePlan> {
    let mut plan = match draft {
        Some(draft) => EnginePlan::with_draft(model, draft, &**devices.first(), options)?,
        None => {
            let (shard, pipeline) = (devices.shard().clone(), devices.pipeline().clone());
            let options = EngineOptions { shard, pipeline, ..options.clone() };
            match devices.processes() {
                Some(processes) => EnginePlan::on_processes(model, devices.ranks(), processes, &options)?,
                None => EnginePlan::on_devices(model, devices.ranks(), &options)?,
            }
        }
    };
    if let Some(trace) = devices.trace() {
        plan.trace(trace);
    }
    Ok(plan)
}

/// The tokens of a step if the user does not say, for a device with this much free memory of its own, if it has any. Such a device has the
/// operations for more than the 256 of others, and the activations of that many tokens are small beside 4 GiB.
pub(crate) fn default_step_tokens(free: Option<u64>) -> usize {
    let gibs = free.unwrap_or(0) >> 30;
    EngineOptions::default().step_tokens * (gibs / 4).clamp(1, 8) as usize
}

/// The free memory of a device that does not use the memory of the host.
fn free_memory(device: &dyn Device) -> Option<u64> {
    device.memory().free.filter(|_| !device.properties().unified_memory)
}

/// The engine options for up to `requests` concurrent requests on such devices.
pub(crate) fn engine_options(
    arguments: &EngineArguments,
    requests: usize,
    devices: &Devices,
) -> EngineOptions {
    let default = EngineOptions::default();
    EngineOptions {
        precision: arguments.dtype.into(),
        kv_precision: arguments.kv_dtype.into(),
        exact: arguments.exact,
        context: arguments.context,
        step_tokens: arguments
            .step_tokens
            .unwrap_or_else(|| default_step_tokens(free_memory(&**devices.first())).max(requests)),
        max_requests: requests,
        fuse: !arguments.no_fuse,
        launch_ahead: !arguments.no_launch_ahead,
        split_prompts: !arguments.prompts_first,
        graphs: !arguments.no_graphs,
        batch_invariant: devices.batch_invariant(),
        quantize: arguments.quantize.clone(),
        weights_in: arguments.weights_in.clone(),
        experts: arguments.experts,
        kv_in: arguments.kv_in,
        engines_on_devices: devices.engines(),
        host_memory: arguments.host_memory.map(|size| size.0),
        resident_layers: arguments.resident_layers,
        prefix_store: PrefixStore {
            host_bytes: arguments.prefix_cache_host.map_or(0, |size| size.0),
            folder: arguments.prefix_cache.clone(),
            folder_bytes: arguments
                .prefix_cache_size
                .map_or(PrefixStore::DEFAULT_FOLDER_BYTES, |size| size.0),
        },
        ..default
    }
}

/// Plans an engine, shows its memory plan, loads it, and makes a pipeline over it.
pub(crate) fn load(
    model: Model,
    draft: Option<&Arc<Model>>,
    devices: &Devices,
    options: &EngineOptions,
    terminal: &Terminal,
) -> Result<Pipeline> {
    let engine = load_engine(&model, draft, devices, options, terminal)?;
    Ok(Pipeline::with_engine(model, engine))
}

/// Does as [`load`] does, with the context that suits the model and the memory unless one is given.
pub(crate) fn load_fitted(
    model: Model,
    draft: Option<&Arc<Model>>,
    devices: &Devices,
    options: EngineOptions,
    terminal: &Terminal,
) -> Result<Pipeline> {
    let plan = plan_fitted(&model, draft, devices, options, terminal)?;
    let engine = load_plan(plan, &model, devices, terminal)?;
    Ok(Pipeline::with_engine(model, engine))
}

/// Plans an engine for one request, with the context that suits the model and the memory unless one is given.
pub(crate) fn plan_fitted(
    model: &Model,
    draft: Option<&Arc<Model>>,
    devices: &Devices,
    options: EngineOptions,
    terminal: &Terminal,
) -> Result<EnginePlan> {
    let (options, note) = fit::for_one_request(model, draft, devices, options)?;
    fit::plan_chosen(model, draft, devices, &options, note.as_deref(), terminal)
}

/// Plans an engine, shows its memory plan, and loads it.
pub(crate) fn load_engine(
    model: &Model,
    draft: Option<&Arc<Model>>,
    devices: &Devices,
    options: &EngineOptions,
    terminal: &Terminal,
) -> Result<Engine> {
    let options = &calibrated(model, devices.first(), options, terminal)?;
    load_plan(plan_engine(model, draft, devices, options)?, model, devices, terminal)
}

/// Shows the memory plan of an engine and loads it.
pub(crate) fn load_plan(
    plan: EnginePlan,
    model: &Model,
    devices: &Devices,
    terminal: &Terminal,
) -> Result<Engine> {
    show_plan(&plan, devices, terminal)?;
    load_weights(plan, model, devices, terminal)
}

/// What is expected of steps whose weights, or keys and values, are in host memory.
#[derive(Debug, Default)]
pub(crate) struct Forecasts {
    pub(crate) streaming: Option<StreamForecast>,
    pub(crate) host_cache: Option<HostCacheForecast>,
}

impl Forecasts {
    /// Measures the link where it matters. There are none of a plan that does not fit, which loading refuses.
    pub(crate) fn of(plan: &EnginePlan, devices: &Devices) -> Result<Self> {
        if plan.memory_of_ranks().any(|memory| memory.missing().is_some()) {
            return Ok(Self::default());
        }
        let device = &**devices.first();
        Ok(Self {
            streaming: plan.forecast_streaming(device)?,
            host_cache: plan.forecast_host_cache(device)?,
        })
    }

    /// The forecasts as text for people.
    pub(crate) fn lines(&self) -> impl Iterator<Item = String> {
        let streaming = self.streaming.iter().map(ToString::to_string);
        streaming.chain(self.host_cache.iter().map(ToString::to_string))
    }
}

/// Shows the memory plan of an engine, and what is expected of steps that use the link to host memory.
pub(crate) fn show_plan(plan: &EnginePlan, devices: &Devices, terminal: &Terminal) -> Result<Forecasts> {
    terminal.note(&devices.memory(plan));
    let forecasts = Forecasts::of(plan, devices)?;
    forecasts.lines().for_each(|line| terminal.note(&line));
    Ok(forecasts)
}

/// Does as [`load_plan`] does, and compiles the steps of all sizes.
pub(crate) fn load_warm(
    plan: EnginePlan,
    model: &Model,
    devices: &Devices,
    terminal: &Terminal,
) -> Result<Engine> {
    show_plan(&plan, devices, terminal)?;
    let start = Instant::now();
    // A plan that does not fit is refused by loading: no kernels are built for it.
    if plan.memory_of_ranks().all(|memory| memory.missing().is_none()) {
        build_kernels(&plan, &**devices.first(), None, terminal)?;
    }
    let built = start.elapsed();
    let mut engine = load_weights(plan, model, devices, terminal)?;
    let start = Instant::now();
    let bar = terminal.counter("warming up");
    let steps = engine.warm_up(&mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    let seconds = (built + start.elapsed()).as_secs_f64();
    terminal.note(&format!(
        "steps of up to {} tokens; {} step variants compiled in {seconds:.1} s",
        engine.step_tokens(),
        steps?
    ));
    Ok(engine)
}

/// Builds the kernels of a plan ahead with `jobs` threads, by default one per processor. Returns the number of distinct calls.
pub(crate) fn build_kernels(
    plan: &EnginePlan,
    device: &dyn Device,
    jobs: Option<usize>,
    terminal: &Terminal,
) -> Result<usize> {
    let jobs = jobs.unwrap_or_else(|| available_parallelism().map_or(1, usize::from));
    let bar = terminal.counter("building kernels");
    let calls = plan.compile_ahead(device, jobs, &|done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    Ok(calls?)
}

/// Loads the weights of a model to its devices. A process that follows another does not return before that has ended, and then with
/// the error [`Followed`].
pub(crate) fn load_weights(
    plan: EnginePlan,
    model: &Model,
    devices: &Devices,
    terminal: &Terminal,
) -> Result<Engine> {
    let bar = terminal.bar("loading", Some(plan.memory().all_weights()));
    if devices.follow() {
        interrupt::leave_to_leader()?;
        let device = devices.first().clone();
        plan.follow(model, device, &mut |loaded, all| {
            bar.set_position(loaded);
            if loaded == all {
                bar.finish_and_clear();
            }
        })?;
        return Err(Followed.into());
    }
    let engine = plan.load(model, devices.first().clone(), &mut |loaded, _| bar.set_position(loaded));
    bar.finish_and_clear();
    Ok(engine?)
}

/// Tokens of a calibration sequence.
const CALIBRATION_TOKENS: usize = 256;

/// The options, completed with a calibration where the quantisation policy smooths activations.
pub(crate) fn calibrated(
    model: &Model,
    device: &Arc<dyn Device>,
    options: &EngineOptions,
    terminal: &Terminal,
) -> Result<EngineOptions> {
    let mut options = options.clone();
    let smooths = options.quantize.as_ref().is_some_and(|policy| policy.smooth.is_some());
    if smooths && options.calibration.is_none() {
        options.calibration = Some(Arc::new(calibration(model, device, terminal)?));
    }
    Ok(options)
}

/// Calibrates a model: runs a short text and observes the activations.
pub(crate) fn calibration(
    model: &Model,
    device: &Arc<dyn Device>,
    terminal: &Terminal,
) -> Result<Calibration> {
    terminal.note("calibrating: observing the activations of a short text");
    let sequences = calibration_sequences(model, CALIBRATION_TOKENS.min(model.config().context))?;
    Ok(calibrate(model, device.clone(), &sequences)?)
}

/// The generation options: those that the model suggests, overridden by the arguments.
pub(crate) fn generate_options(model: &Model, arguments: &SamplingArguments) -> Result<GenerateOptions> {
    let mut options = GenerateOptions::suggested(model);
    let chosen = arguments.temperature.is_some()
        || arguments.top_k.is_some()
        || arguments.top_p.is_some()
        || arguments.min_p.is_some();
    options.sampling = SamplingOptions::suggested(model, chosen);
    let sampling = &mut options.sampling;
    sampling.temperature = arguments.temperature.unwrap_or(sampling.temperature);
    sampling.top_k = arguments.top_k.unwrap_or(sampling.top_k);
    sampling.top_p = arguments.top_p.unwrap_or(sampling.top_p);
    sampling.min_p = arguments.min_p.unwrap_or(sampling.min_p);
    sampling.repetition_penalty = arguments.repetition_penalty.unwrap_or(sampling.repetition_penalty);
    sampling.presence_penalty = arguments.presence_penalty.unwrap_or(sampling.presence_penalty);
    sampling.frequency_penalty = arguments.frequency_penalty.unwrap_or(sampling.frequency_penalty);
    sampling.seed = arguments.seed;
    sampling.validate()?;
    options.max_tokens = arguments.max_tokens.or(options.max_tokens);
    options.stop.extend(arguments.stop.iter().cloned());
    if options.stop.iter().any(String::is_empty) {
        anyhow::bail!("a stop string is empty\nhint: leave --stop out");
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_devices_take_more_tokens_in_a_step() {
        for (gibs, tokens) in
            [(None, 256), (Some(3), 256), (Some(9), 512), (Some(20), 1280), (Some(140), 2048)]
        {
            assert_eq!(default_step_tokens(gibs.map(|gibs: u64| gibs << 30)), tokens, "{gibs:?}");
        }
    }
}
