//! `dsrun serve`: serve a model over HTTP.

mod signals;

use crate::{
    arguments::{
        CacheDtype, DeviceArguments, DevicesArguments, Dtype, EngineArguments, ModelArguments, Serve,
        ServeSettings, SpeculationArguments, Weights, mesh, policy, shard_policy,
    },
    commands::print,
    devices::{Devices, launch, open_replica, open_replicas},
    serve::{Loaded, Replicas, Server, Supervisor, app},
    session::{
        engine_options,
        fit::{self, Given},
        load_plan, load_warm, open_draft, open_model,
    },
    terminal::Terminal,
};
use anyhow::{Context, Result, anyhow, bail};
use dsrun_engine::{
    EngineOptions,
    service::{Service, ServiceOptions},
};
use dsrun_models::chat::ChatTemplate;
use signals::Signals;
use std::{path::Path, sync::Arc};
use tokio::{runtime::Runtime, sync::oneshot};

/// The exit code after a second SIGTERM or Ctrl-C.
const INTERRUPTED: i32 = 130;

pub(crate) fn run(command: &Serve, terminal: &Terminal) -> Result<()> {
    let settings = ServeSettings::load(command.config.as_deref(), &command.settings)?;
    let runtime = Runtime::new().context("cannot start the threads of the server")?;
    let served = runtime.block_on(serve(settings, *terminal));
    // An engine that is being rebuilt is not waited for.
    runtime.shutdown_background();
    served
}

async fn serve(settings: ServeSettings, terminal: Terminal) -> Result<()> {
    let model = settings.model.clone().unwrap_or_else(|| dsrun_models::fetch::DEFAULT_MODEL.to_owned());
    let name = settings.served_model_name.clone().unwrap_or_else(|| served_name(&model));
    let app = Arc::new(app(&settings, name)?);
    let mut signals = Signals::listen()?;
    if launch(&devices(&settings)?)?.is_some_and(|launch| launch.process > 0) {
        return follow(settings, model, terminal, signals).await;
    }
    let server = Server::bind(app.clone(), &settings).await?;
    let url = server.url();
    terminal.note(&format!("listening at {url}, loading {model}"));

    // The server answers health checks while the model loads.
    let (stop, stopped) = oneshot::channel();
    let serving = tokio::spawn(server.run(async {
        // An error means that the sender is gone: then, too, the server ends.
        let _ = stopped.await;
    }));
    let loading = tokio::task::spawn_blocking(move || load(&settings, model, terminal));
    let (supervisor, loaded) = tokio::select! {
        loaded = loading => loaded.context("loading the model failed")??,
        () = signals.received() => quit(),
    };
    app.set_loaded(loaded);
    let loaded = app.loaded().context("the model is not loaded")?;
    print(&format!("ready at {url}"))?;

    tokio::select! {
        () = signals.received() => {}
        error = supervisor.clone().run(loaded) => return Err(error.into()),
    }
    terminal.note("finishing the running requests; a second signal aborts them");
    let _ = stop.send(());
    let finished = tokio::select! {
        finished = serving => finished.context("the server failed")?,
        () = signals.received() => quit(),
    };
    supervisor.stop()?;
    if !finished {
        bail!("requests were aborted: they ran longer than --drain-timeout");
    }
    Ok(())
}

/// Runs the ranks of this process until the leading one, which has the server, ends.
async fn follow(
    settings: ServeSettings,
    model: String,
    terminal: Terminal,
    mut signals: Signals,
) -> Result<()> {
    let following = tokio::task::spawn_blocking(move || load(&settings, model, terminal));
    tokio::select! {
        followed = following => followed.context("following the leading process failed")?.map(drop),
        // The first is for the leading process, which finishes the running requests.
        () = async { signals.received().await; signals.received().await } => quit(),
    }
}

/// The name of a model for clients; that of a file is its name without the folder.
fn served_name(model: &str) -> String {
    let path = Path::new(model);
    let file = path.exists().then(|| path.canonicalize().ok()).flatten();
    let name = file.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    name.unwrap_or(model).trim_end_matches(".gguf").to_owned()
}

/// Loads the model and starts the engines.
fn load(settings: &ServeSettings, model: String, terminal: Terminal) -> Result<(Arc<Supervisor>, Loaded)> {
    if settings.prefix_cache_size.is_some() && settings.prefix_cache.is_none() {
        bail!(
            "prefix-cache-size limits a folder, and prefix-cache names none\nhint: add --prefix-cache FOLDER"
        );
    }
    let dtype = settings.dtype.unwrap_or(Dtype::Keep);
    let replicas = usize::from(settings.replicas.unwrap_or(1));
    // The devices come first, so that a missing backend does not cost a download.
    let arguments = devices(settings)?;
    let devices = open_replicas(&arguments, replicas, &terminal)?;
    let first = devices.first().context("there is no device")?;
    let named = ModelArguments {
        model,
        weights: settings.weights.unwrap_or(Weights::File),
        offline: settings.offline.unwrap_or(false),
    };
    let model = Arc::new(open_model(&named, dtype, &terminal)?);
    let speculation = SpeculationArguments { speculate: settings.speculate, draft: settings.draft.clone() };
    let draft = open_draft(&speculation, &named, dtype, first, &terminal)?;
    let template = settings.chat_template.as_deref().map(|path| read_template(path, &model)).transpose()?;
    let engine = EngineArguments {
        dtype,
        kv_dtype: settings.kv_dtype.unwrap_or(CacheDtype::Keep),
        exact: settings.exact.unwrap_or(false),
        context: settings.context,
        step_tokens: None,
        no_fuse: settings.no_fuse.unwrap_or(false),
        no_launch_ahead: settings.no_launch_ahead.unwrap_or(false),
        prompts_first: settings.prompts_first.unwrap_or(false),
        no_graphs: settings.no_graphs.unwrap_or(false),
        quantize: settings
            .quantize
            .as_deref()
            .map(policy)
            .transpose()
            .map_err(|error| anyhow!("--quantize: {error}"))?,
        weights_in: settings.weights_in.clone().unwrap_or_default(),
        experts: settings.experts.unwrap_or_default(),
        kv_in: settings.kv_in.unwrap_or_default(),
        host_memory: settings.host_memory,
        resident_layers: settings.resident_layers,
        prefix_cache_host: settings.prefix_cache_host,
        prefix_cache: settings.prefix_cache.clone(),
        prefix_cache_size: settings.prefix_cache_size,
    };
    let options = EngineOptions {
        swap_tokens: settings.swap_tokens.unwrap_or(0),
        replicas: usize::from(settings.replicas.unwrap_or(1)),
        prefix_cache: !settings.no_prefix_cache.unwrap_or(false),
        speculation: speculation.speculation(),
        ..engine_options(&engine, 1, first)
    };
    let given =
        Given { context: settings.context, requests: settings.max_requests, kv_tokens: settings.kv_tokens };
    let chosen = fit::choose(&model, draft.as_ref(), first, &options, given)?;
    let (tune_step, step_tokens) = settings.step(chosen.requests);
    let options = EngineOptions {
        context: chosen.context,
        rope_context: chosen.rope_context,
        max_requests: chosen.requests,
        kv_tokens: chosen.kv_tokens,
        tune_step,
        step_tokens: step_tokens.unwrap_or_else(|| options.step_tokens.max(chosen.requests)),
        ..options
    };
    let service =
        ServiceOptions { queue: settings.queue(), unread: settings.unsent_limit() / replicas.max(1) };
    let warm = !settings.no_warm_up.unwrap_or(false);
    let (shared, note) = (model.clone(), chosen.note);
    let start = move |devices: &Devices| {
        let plan = fit::plan_chosen(&shared, draft.as_ref(), devices, &options, note.as_deref(), &terminal)?;
        let engine = if warm {
            load_warm(plan, &shared, devices, &terminal)?
        } else {
            load_plan(plan, &shared, devices, &terminal)?
        };
        Ok(Service::start(engine, &service)?)
    };
    let services = devices.iter().map(&start).collect::<Result<Vec<_>>>()?;
    // The device of a failed engine may be lost, so it is opened anew.
    let rebuild = move |index| start(&open_replica(&arguments, replicas, index, &terminal)?);
    let supervisor = Supervisor::new(services, Box::new(rebuild));
    let replicas =
        Replicas::new(supervisor.handles(), settings.step_timeout()).context("there is no engine")?;
    Ok((supervisor, Loaded::new(model, replicas, template)))
}

/// The settings of the devices, as the other commands have them.
fn devices(settings: &ServeSettings) -> Result<DevicesArguments> {
    let shard = settings.shard.as_deref().map(shard_policy).transpose();
    let axes = settings.mesh.as_deref().map(mesh).transpose();
    if settings.mesh.is_some() && (settings.tp.is_some() || settings.pp.is_some()) {
        bail!(
            "mesh has tp and pp in one\nhint: leave tp and pp out of the configuration and the flags, or mesh"
        );
    }
    Ok(DevicesArguments {
        batch_invariant: settings.batch_invariant.unwrap_or(false),
        device: DeviceArguments {
            backend: settings.backend.clone(),
            device: settings.device.unwrap_or(0),
            threads: settings.threads,
            gpu_memory: settings.gpu_memory,
        },
        tp: settings.tp,
        pp: settings.pp,
        mesh: axes.map_err(|error| anyhow!("--mesh: {error}"))?,
        stages: settings.stages.clone().unwrap_or_default(),
        micro_batches: None,
        devices: settings.devices.clone().unwrap_or_default(),
        share_device: false,
        shard: shard.map_err(|error| anyhow!("--shard: {error}"))?,
        launcher: settings.launcher.unwrap_or_default(),
        rendezvous: settings.rendezvous.clone(),
    })
}

fn read_template(path: &Path, model: &dsrun_models::model::Model) -> Result<ChatTemplate> {
    let source = std::fs::read_to_string(path)
        .with_context(|| format!("the chat template {} cannot be read", path.display()))?;
    let token = |id: Option<u32>| Some(model.tokenizer()?.id_to_token(id?)?.to_owned());
    let tokens = [
        ("bos_token", token(model.tokenizer().and_then(|tokenizer| tokenizer.bos()))),
        ("eos_token", token(model.tokenizer().and_then(|tokenizer| tokenizer.eos()))),
    ];
    let tokens: Vec<(String, String)> =
        tokens.into_iter().filter_map(|(name, token)| Some((name.to_owned(), token?))).collect();
    ChatTemplate::new(&source, &tokens).with_context(|| format!("in {}", path.display()))
}

/// Ends the program without waiting for the running requests.
#[expect(clippy::exit, reason = "the user asks a second time, and running requests are not waited for")]
fn quit() -> ! {
    std::process::exit(INTERRUPTED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_several_engines_is_opened_anew_with_its_own_devices() {
        let settings = ServeSettings {
            backend: Some("cpu".to_owned()),
            threads: Some(2),
            tp: Some(2),
            ..ServeSettings::default()
        };
        let (arguments, terminal) = (devices(&settings).expect("they are valid"), Terminal::new(true));
        let all = open_replicas(&arguments, 2, &terminal).expect("they are opened");
        let again = open_replica(&arguments, 2, 1, &terminal).expect("it is opened");
        assert_eq!((all.len(), again.ranks().len()), (2, 2));
        assert_eq!(again.engines(), all[1].engines());
        let properties = |devices: &Devices| devices.first().properties().clone();
        assert_eq!(properties(&again), properties(&all[1]));
    }
}
