//! The state that all requests share.

use super::{
    access::{ApiKeys, ClientId, RateLimit},
    budget::Budget,
    error::ApiError,
    grammar::Grammars,
    intake::{Intake, Turn, Work},
    metrics::Metrics,
    origins::Origins,
    replicas::{EngineHealth, Replicas},
    response_store::ResponseStore,
    tools::ToolFormat,
    traces::Traces,
    unsent::Unsent,
};
use crate::arguments::AccessLog;
use axum::http::Request;
use dsrun_engine::{SamplingOptions, service::ServiceError};
use dsrun_models::{chat::ChatTemplate, model::Model, tokenizer::Tokenizer};
use sha2::{Digest, Sha256};
use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The most bytes of the `logit_bias` of all requests together. A vocabulary of 128,000 tokens takes 1 MiB.
const ALL_BIASES: usize = 32 << 20;

/// The state that all requests share.
#[derive(Debug)]
pub(crate) struct App {
    /// The model's name, for clients.
    pub(crate) name: String,
    /// The longest time from a request to the end of its answer.
    pub(crate) answer_timeout: Duration,
    pub(crate) intake: Intake,
    pub(crate) origins: Origins,
    /// Whether fields without effect are refused.
    pub(crate) strict_fields: bool,
    pub(crate) access_log: AccessLog,
    /// Traces of requests, if a collector gets them.
    pub(crate) traces: Option<Traces>,
    pub(crate) keys: ApiKeys,
    pub(crate) rate: Option<RateLimit>,
    pub(crate) metrics: Arc<Metrics>,
    /// Responses whose conversations may be continued.
    pub(crate) responses: Arc<ResponseStore>,
    /// Responses that clients have not read yet.
    pub(crate) unsent: Arc<Unsent>,
    loaded: OnceLock<Arc<Loaded>>,
    draining: AtomicBool,
}

/// The sampling options of requests that leave some out.
#[derive(Debug)]
pub(crate) struct SamplingDefaults {
    /// For requests that choose one of temperature, top-k, top-p and min-p.
    pub(crate) chosen: SamplingOptions,
    /// For requests that choose none of them.
    pub(crate) unchosen: SamplingOptions,
}

impl SamplingDefaults {
    /// The defaults for a model.
    pub(crate) fn of(model: &Model) -> Self {
        Self {
            chosen: SamplingOptions::suggested(model, true),
            unchosen: SamplingOptions::suggested(model, false),
        }
    }
}

/// A loaded model with its engines.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) model: Arc<Model>,
    pub(crate) engine: Replicas,
    pub(crate) grammars: Grammars,
    /// The bytes of the `logit_bias` of all requests.
    pub(crate) biases: Arc<Budget>,
    /// The chat template that replaces the model's own.
    pub(crate) template: Option<ChatTemplate>,
    /// The time of loading, in seconds since 1970.
    pub(crate) created: u64,
    pub(crate) sampling: SamplingDefaults,
    /// Equal for servers of equal version and configuration.
    pub(crate) fingerprint: Arc<str>,
}

impl App {
    /// The state of a server before its model is loaded.
    pub(crate) fn new(
        name: String,
        intake: Intake,
        answer_timeout: Duration,
        keys: ApiKeys,
        rate: Option<RateLimit>,
    ) -> Self {
        Self {
            name,
            answer_timeout,
            intake,
            origins: Origins::default(),
            strict_fields: false,
            access_log: AccessLog::Off,
            traces: None,
            keys,
            rate,
            metrics: Arc::default(),
            responses: Arc::new(ResponseStore::new(0)),
            unsent: Unsent::new(usize::MAX, answer_timeout),
            loaded: OnceLock::new(),
            draining: AtomicBool::new(false),
        }
    }

    /// Sets the loaded model, after which requests are served.
    pub(crate) fn set_loaded(&self, loaded: Loaded) {
        // It is called once; a second model would be a defect and is dropped.
        let _ = self.loaded.set(Arc::new(loaded));
    }

    /// Refuses requests from here on; running ones are finished.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        if let Some(loaded) = self.loaded.get() {
            loaded.engine.drain();
        }
    }

    /// The engines, once the model is loaded.
    pub(crate) fn engine(&self) -> Option<&Replicas> {
        self.loaded.get().map(|loaded| &loaded.engine)
    }

    /// The model with its engines, once it is loaded.
    pub(crate) fn loaded(&self) -> Option<Arc<Loaded>> {
        self.loaded.get().cloned()
    }

    /// The state of the engines, if the server answers requests in time.
    ///
    /// # Errors
    /// As [`Self::ready`], and if a step of every engine takes too long.
    pub(crate) fn health(&self) -> Result<Vec<EngineHealth>, ApiError> {
        let health = self.ready()?.engine.health();
        if health.iter().any(|engine| engine.serving) {
            return Ok(health);
        }
        let age = health.iter().filter_map(|engine| engine.step_age).min().unwrap_or_default();
        Err(ApiError::not_ready(&format!("no engine has completed a step for {} s", age.as_secs())))
    }

    /// The loaded model.
    ///
    /// # Errors
    /// While the model is being loaded, when the server is about to end, and if all engines have stopped.
    pub(crate) fn ready(&self) -> Result<Arc<Loaded>, ApiError> {
        if self.draining.load(Ordering::SeqCst) {
            return Err(ApiError::not_ready("the server is about to end"));
        }
        let loaded = self.loaded.get().ok_or_else(|| ApiError::not_ready("the model is being loaded"))?;
        if loaded.engine.is_running() {
            Ok(loaded.clone())
        } else {
            Err(ApiError::not_ready("the engine has stopped"))
        }
    }

    /// The client of a request, which the check of API keys has identified.
    ///
    /// # Errors
    /// If the keys were not checked, which is a defect.
    pub(crate) fn client<T>(&self, request: &Request<T>) -> Result<ClientId, ApiError> {
        request.extensions().get().copied().ok_or_else(ApiError::internal)
    }

    /// Checks that a request asks for the model that is served, if it asks for one.
    pub(crate) fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(asked) if asked != self.name => Err(ApiError::no_such_model(asked, &self.name)),
            _ => Ok(()),
        }
    }

    /// The response to a client when the engine refuses or does not finish a request.
    pub(crate) fn refused(&self, error: &ServiceError) -> ApiError {
        match error {
            ServiceError::Busy { .. } => ApiError::queue_full(),
            ServiceError::Unread { .. } => ApiError::too_much_unsent(),
            ServiceError::Draining | ServiceError::Stopped => {
                ApiError::not_ready("the server is about to end")
            }
            ServiceError::Request(error) => ApiError::from_engine(error),
            ServiceError::NotBegun { .. } => ApiError::not_ready("the engine has failed"),
            error => {
                tracing::error!(%error, "a request failed");
                ApiError::internal()
            }
        }
    }

    /// Prepares a request on a thread that may block. The turn lasts until the work ends, also if the client leaves before.
    pub(crate) async fn prepare<T: Send + 'static>(
        &self,
        turn: Turn,
        prepare: impl FnOnce(&Work) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let work = Work::default();
        let _client = work.client();
        let work = move || {
            let _turn = turn;
            work.check()?;
            prepare(&work)
        };
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
            self.metrics.panics.add(1);
            tracing::error!(%error, "a request failed");
            Err(ApiError::internal())
        })
    }
}

/// The fingerprint of a version of the server with a model and limits.
fn fingerprint(model: &Model, engine: &Replicas) -> Arc<str> {
    let text = format!("{} {} {:?}", env!("CARGO_PKG_VERSION"), model.name(), engine.limits());
    let digest = Sha256::digest(text.as_bytes());
    let hex: String = digest.iter().take(5).map(|byte| format!("{byte:02x}")).collect();
    format!("fp_{hex}").into()
}

impl Loaded {
    /// A model that is loaded now.
    pub(crate) fn new(model: Arc<Model>, engine: Replicas, template: Option<ChatTemplate>) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let fingerprint = fingerprint(&model, &engine);
        let sampling = SamplingDefaults::of(&model);
        let (grammars, biases) = (Grammars::default(), Budget::new(ALL_BIASES));
        Self { model, engine, grammars, biases, template, created, sampling, fingerprint }
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// If the model has no tokenizer.
    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer, ApiError> {
        let none = "the model has no tokenizer: send tokens instead of text, to /v1/completions";
        self.model.tokenizer().ok_or_else(|| ApiError::malformed(none))
    }

    /// The chat template.
    ///
    /// # Errors
    /// If the model has no chat template.
    pub(crate) fn template(&self) -> Result<&ChatTemplate, ApiError> {
        match &self.template {
            Some(template) => Ok(template),
            None => {
                self.model.chat_template().map_err(|error| ApiError::field("messages", error.to_string()))
            }
        }
    }

    /// The format of the model's tool calls, if its chat template supports tools.
    ///
    /// # Errors
    /// If the model has no chat template.
    pub(crate) fn tool_format(&self) -> Result<Option<ToolFormat>, ApiError> {
        Ok(ToolFormat::of(self.template()?))
    }
}
