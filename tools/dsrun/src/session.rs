//! From arguments to a loaded model: the steps every command shares.

use crate::{
    arguments::{
        DeviceArguments, Dtype, EngineArguments, ModelArguments, SamplingArguments, SpeculationArguments,
        Weights,
    },
    find_backend::find_backend,
    terminal::{FetchBar, Terminal},
};
use anyhow::{Context, Result, anyhow, bail};
use dsrun_core::{
    Code, DType, WeightFormat,
    device::{Device, DeviceOptions},
    registry::Registry,
};
use dsrun_engine::{
    Engine, EngineOptions, EnginePlan, GenerateOptions, Pipeline, Precision, Speculation, calibrate,
    calibration_sequences, passes::quantize::Calibration,
};
use dsrun_models::{
    fetch::{FetchError, FetchOptions, ModelFiles, resolve},
    model::Model,
    presets::Preset,
};
use std::{sync::Arc, thread::available_parallelism, time::Instant};

/// The seed of random weights.
const RANDOM_SEED: u64 = 0;

/// The backends of this program.
pub(crate) fn registry() -> Result<Registry> {
    let mut registry = Registry::new();
    registry.register(Arc::new(dsrun_candle::CandleBackend::new()))?;
    Ok(registry)
}

/// Opens the device that was asked for.
pub(crate) fn open_device(arguments: &DeviceArguments) -> Result<Arc<dyn Device>> {
    let backend = find_backend(arguments.backend.as_deref())?;
    let options = DeviceOptions { threads: arguments.threads.map(usize::from), ..DeviceOptions::default() };
    let device = backend.open(arguments.device, &options);
    device.with_context(|| {
        format!("cannot open device {} of backend {}", arguments.device, backend.info().name)
    })
}

/// A device that is not here, for which the backend builds what it needs.
pub(crate) fn describe_device(arguments: &DeviceArguments, name: &str) -> Result<Arc<dyn Device>> {
    let backend = find_backend(arguments.backend.as_deref())?;
    let described = backend.describe(name).map_err(|error| match error.code() {
        Code::Unsupported => {
            anyhow!(
                "{}\nhint: --backend names one; those that compile for their devices can",
                error.message()
            )
        }
        _ => error.into(),
    });
    described.with_context(|| format!("cannot build for {name} with backend {}", backend.info().name))
}

/// Finds, fetches if need be, and opens the model that was asked for. Random weights are made in the type they are kept in:
/// bf16 unless asked otherwise.
pub(crate) fn open_model(arguments: &ModelArguments, dtype: Dtype, terminal: &Terminal) -> Result<Model> {
    if arguments.weights == Weights::Random {
        let dtype = Precision::from(dtype).dtype().unwrap_or(DType::BF16);
        return Ok(Model::random_named(&arguments.model, RANDOM_SEED, WeightFormat::Dense(dtype))?);
    }
    let hint = "--weights random makes some up, to measure with";
    Ok(Model::from_files(&find_files(&arguments.model, arguments.offline, hint, terminal)?)?)
}

/// Finds the files of a model, and fetches them if need be. `hint` is for who names a preset, which has none.
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

/// Opens the second model that is to propose tokens, if there is to be one. It comes from where the first comes from.
pub(crate) fn open_draft(
    arguments: &SpeculationArguments,
    model: &ModelArguments,
    dtype: Dtype,
    terminal: &Terminal,
) -> Result<Option<Arc<Model>>> {
    let drafts = matches!(arguments.speculation(), Some(Speculation::Draft { .. }));
    let Some(name) = &arguments.draft else {
        if drafts {
            bail!(
                "--speculate draft needs a second model\nhint: --draft names one, much smaller and with the same tokenizer"
            );
        }
        return Ok(None);
    };
    if !drafts {
        bail!(
            "--draft names a second model, but --speculate asks for something else\nhint: leave one of them out"
        );
    }
    let own = ModelArguments { model: name.clone(), weights: model.weights, offline: model.offline };
    let opened = open_model(&own, dtype, terminal).with_context(|| format!("the draft model {name}"))?;
    Ok(Some(Arc::new(opened)))
}

/// Plans an engine, with the second model if there is one.
pub(crate) fn plan_engine(
    model: &Model,
    draft: Option<&Arc<Model>>,
    device: &dyn Device,
    options: &EngineOptions,
) -> Result<EnginePlan> {
    Ok(match draft {
        Some(draft) => EnginePlan::with_draft(model, draft, device, options)?,
        None => EnginePlan::new(model, device, options)?,
    })
}

/// How the engine is set up for `requests` at a time.
pub(crate) fn engine_options(arguments: &EngineArguments, requests: usize) -> EngineOptions {
    let default = EngineOptions::default();
    EngineOptions {
        precision: arguments.dtype.into(),
        context: arguments.context,
        step_tokens: arguments.step_tokens.unwrap_or_else(|| default.step_tokens.max(requests)),
        max_requests: requests,
        fuse: !arguments.no_fuse,
        launch_ahead: !arguments.no_launch_ahead,
        split_prompts: !arguments.prompts_first,
        graphs: !arguments.no_graphs,
        quantize: arguments.quantize.clone(),
        ..default
    }
}

/// A pipeline over an engine that is planned, shown and loaded.
pub(crate) fn load(
    model: Model,
    draft: Option<&Arc<Model>>,
    device: Arc<dyn Device>,
    options: &EngineOptions,
    terminal: &Terminal,
) -> Result<Pipeline> {
    let engine = load_engine(&model, draft, device, options, terminal)?;
    Ok(Pipeline::with_engine(model, engine))
}

/// Plans an engine, shows the plan, and loads it.
pub(crate) fn load_engine(
    model: &Model,
    draft: Option<&Arc<Model>>,
    device: Arc<dyn Device>,
    options: &EngineOptions,
    terminal: &Terminal,
) -> Result<Engine> {
    let options = &calibrated(model, &device, options, terminal)?;
    load_plan(plan_engine(model, draft, &*device, options)?, model, device, terminal)
}

/// Loads an engine that is planned, and shows the plan.
pub(crate) fn load_plan(
    plan: EnginePlan,
    model: &Model,
    device: Arc<dyn Device>,
    terminal: &Terminal,
) -> Result<Engine> {
    show_memory(&plan, &*device, terminal);
    bring(plan, model, device, terminal)
}

/// As [`load_plan`], with the steps of all sizes compiled.
pub(crate) fn load_warm(
    plan: EnginePlan,
    model: &Model,
    device: Arc<dyn Device>,
    terminal: &Terminal,
) -> Result<Engine> {
    show_memory(&plan, &*device, terminal);
    let start = Instant::now();
    // What does not fit is told at once.
    if plan.memory().missing().is_none() {
        build_kernels(&plan, &*device, None, terminal)?;
    }
    let built = start.elapsed();
    let mut engine = bring(plan, model, device, terminal)?;
    let start = Instant::now();
    let bar = terminal.counter("warming up");
    let steps = engine.warm_up(&mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    let seconds = (built + start.elapsed()).as_secs_f64();
    terminal.note(&format!(
        "steps of up to {} tokens; {} kinds of them are compiled after {seconds:.1} s",
        engine.step_tokens(),
        steps?
    ));
    Ok(engine)
}

/// Has a backend build what it keeps for a plan, by `jobs` threads or as many as there are processors. Gives the kinds of call.
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

fn show_memory(plan: &EnginePlan, device: &dyn Device, terminal: &Terminal) {
    terminal.note(&format!("memory on {}:\n{}", device.properties().name, plan.memory()));
}

/// Brings a model to its device.
fn bring(plan: EnginePlan, model: &Model, device: Arc<dyn Device>, terminal: &Terminal) -> Result<Engine> {
    let bar = terminal.bar("loading", Some(plan.memory().all_weights()));
    let engine = plan.load(model, device, &mut |loaded, _| bar.set_position(loaded));
    bar.finish_and_clear();
    Ok(engine?)
}

/// Tokens of a sequence to calibrate with.
const CALIBRATION_TOKENS: usize = 256;

/// The options, with what a policy that smooths has to know of the activations.
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

/// What a short text shows of a model's activations.
pub(crate) fn calibration(
    model: &Model,
    device: &Arc<dyn Device>,
    terminal: &Terminal,
) -> Result<Calibration> {
    terminal.note("calibrating: a short text shows what the activations are like");
    let sequences = calibration_sequences(model, CALIBRATION_TOKENS.min(model.config().context))?;
    Ok(calibrate(model, device.clone(), &sequences)?)
}

/// How answers are generated: as the model suggests, but for what was asked.
pub(crate) fn generate_options(model: &Model, arguments: &SamplingArguments) -> Result<GenerateOptions> {
    let mut options = GenerateOptions::suggested(model);
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
        anyhow::bail!("a stop text is empty\nhint: leave --stop out");
    }
    Ok(options)
}
