//! A server for tests, with helpers for requests.

use super::{encoder, model};
use crate::{
    arguments::ServeSettings,
    client::Client,
    serve::{Loaded, Replicas, Server, Supervisor, access::ApiKeys, app::App, server},
};
use dsrun_core::device::{Backend, Device, DeviceOptions};
use dsrun_engine::{
    EngineOptions, EnginePlan,
    service::{Service, ServiceError, ServiceOptions},
};
use dsrun_models::{chat::ChatTemplate, model::Model};
use dsrun_test_support::faulty_device::FaultyDevice;
use hyper::Method;
use serde_json::{Value, json};
use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};
use tempfile::TempDir;
use tokio::{sync::oneshot, task::JoinHandle};

/// The time limit of any wait in a test. Reaching it means that the server hangs.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// The served name of the model.
pub(super) const MODEL: &str = "tiny";

/// A server that runs in this process.
pub(super) struct Running {
    pub(super) app: Arc<App>,
    pub(super) client: Client,
    pub(super) url: String,
    /// Ends the server when it is sent or dropped.
    pub(super) stop: Option<oneshot::Sender<()>>,
    /// Whether all requests finished, once the server has ended.
    pub(super) ended: JoinHandle<bool>,
    /// Rebuilds engines; ends once none is left that works.
    pub(super) supervising: JoinHandle<ServiceError>,
    /// The engines.
    supervisor: Arc<Supervisor>,
}

/// The setup of a test server.
pub(super) struct Setup {
    pub(super) settings: ServeSettings,
    pub(super) engine: EngineOptions,
    pub(super) keys: Vec<&'static str>,
    pub(super) replicas: usize,
    /// The devices of the first engines; the others, and those that are rebuilt, have devices without faults.
    pub(super) devices: Vec<Arc<FaultyDevice>>,
    /// Further control tokens of the model.
    pub(super) marks: &'static [&'static str],
    /// A chat template instead of the model's own.
    pub(super) template: Option<&'static str>,
    /// An encoder instead of the tiny model, by the name of its fixture.
    pub(super) encoder: Option<&'static str>,
}

impl Default for Setup {
    fn default() -> Self {
        let settings = ServeSettings { port: Some(0), drain_timeout: Some(30), ..ServeSettings::default() };
        let engine = EngineOptions {
            max_requests: 4,
            step_tokens: 64,
            context: Some(model::CONTEXT),
            kv_tokens: Some(3 * model::CONTEXT),
            ..EngineOptions::default()
        };
        Self {
            settings,
            engine,
            keys: Vec::new(),
            replicas: 1,
            devices: Vec::new(),
            marks: &[],
            template: None,
            encoder: None,
        }
    }
}

/// The tiny model, loaded once.
pub(super) fn tiny() -> Arc<Model> {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(model::tiny);
    Arc::new(Model::open(folder.path()).expect("the tiny model is a model"))
}

/// The tiny model with further control tokens.
fn model(marks: &[&str]) -> Arc<Model> {
    if marks.is_empty() {
        return tiny();
    }
    opened(model::tiny_with(marks))
}

/// The model in a folder, which stays until the process ends: its weights are mapped, or read later.
fn opened(folder: TempDir) -> Arc<Model> {
    let model = Arc::new(Model::open(folder.path()).expect("the model is a model"));
    std::mem::forget(folder);
    model
}

/// Starts a server of the tiny model.
pub(super) async fn start() -> Running {
    start_with(Setup::default()).await
}

pub(super) async fn start_with(setup: Setup) -> Running {
    let keys = ApiKeys::new(setup.keys.iter().copied()).expect("keys");
    let app = server::app_with_keys(&setup.settings, MODEL.to_owned(), keys).expect("the settings are valid");
    let app = Arc::new(app);
    let device = |index: usize| match setup.devices.get(index) {
        Some(device) => device.clone(),
        None => cpu(),
    };
    let model = match setup.encoder {
        Some(name) => opened(encoder::encoder(name)),
        None => model(setup.marks),
    };
    let engine = setup.engine.clone();
    let service = ServiceOptions { queue: setup.settings.queue(), unread: setup.settings.unsent_limit() };
    let services = (0..setup.replicas).map(|index| load(&model, &setup.engine, &service, device(index)));
    let shared = model.clone();
    let again = service.clone();
    let rebuild = Box::new(move |_| Ok(load(&shared, &engine, &again, cpu())));
    let supervisor = Supervisor::new(services.collect(), rebuild);
    let replicas = Replicas::new(supervisor.handles(), setup.settings.step_timeout());
    let replicas = replicas.expect("there is an engine");
    let template = setup.template.map(|source| ChatTemplate::new(source, &[]).expect("a template"));
    app.set_loaded(Loaded::new(model, replicas, template));
    let supervising = tokio::spawn(supervisor.clone().run(app.loaded().expect("it is loaded")));
    let server = Server::bind(app.clone(), &setup.settings).await.expect("a port is free");
    let url = server.url();
    let (stop, stopped) = oneshot::channel();
    let ended = tokio::spawn(server.run(async {
        let _ = stopped.await;
    }));
    let client =
        Client::new(&url, setup.keys.first().and_then(|key| key.split(' ').next()).map(str::to_owned))
            .expect("a URL");
    Running { app, client, url, stop: Some(stop), ended, supervising, supervisor }
}

/// A device without faults.
pub(super) fn cpu() -> Arc<dyn Device> {
    dsrun_cpu::CpuBackend::new().open(0, &DeviceOptions::default()).expect("a CPU is there")
}

fn load(
    model: &Model,
    options: &EngineOptions,
    service: &ServiceOptions,
    device: Arc<dyn Device>,
) -> Service {
    let plan = EnginePlan::new(model, &*device, options).expect("the model is planned");
    let engine = plan.load(model, device, &mut |_, _| {}).expect("the model is loaded");
    Service::start(engine, service).expect("a thread is there")
}

impl Drop for Running {
    fn drop(&mut self) {
        self.supervising.abort();
        let _ = self.supervisor.stop();
    }
}

impl Running {
    /// Posts JSON, and returns status and body.
    pub(super) async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let answer = self.client.send(Method::POST, path, Some(body));
        let response =
            tokio::time::timeout(PATIENCE, answer).await.expect("the server answers").expect("it is there");
        let status = response.status().as_u16();
        let body = axum::body::to_bytes(axum::body::Body::new(response.into_body()), usize::MAX)
            .await
            .expect("a body");
        (status, serde_json::from_slice(&body).expect("the body is JSON"))
    }

    /// Posts JSON that the server has to accept.
    pub(super) async fn served(&self, path: &str, body: &Value) -> Value {
        let (status, body) = self.post(path, body).await;
        assert_eq!(status, 200, "{body}");
        body
    }

    /// Posts JSON that the server has to refuse, and returns the field and the message.
    pub(super) async fn refused(&self, path: &str, body: &Value) -> (String, String) {
        let (status, body) = self.post(path, body).await;
        assert!((400..500).contains(&status), "{status}: {body}");
        let error = &body["error"];
        assert!(error["type"].is_string(), "{body}");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (text(&error["param"]), text(&error["message"]))
    }

    /// All events of a stream.
    pub(super) async fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let read = async {
            let mut events = self.client.stream(path, body).await.expect("the stream starts");
            let mut all = Vec::new();
            while let Some(event) = events.next().await.expect("the stream goes on") {
                all.push(event);
            }
            all
        };
        tokio::time::timeout(PATIENCE, read).await.expect("the stream ends")
    }

    /// All events of a stream whose events have names, which are those of their types.
    pub(super) async fn named_events(&self, path: &str, body: &Value) -> Vec<Value> {
        let read = async {
            let response = self.client.send(Method::POST, path, Some(body)).await.expect("the stream starts");
            assert_eq!(response.status(), 200);
            let body = axum::body::Body::new(response.into_body());
            axum::body::to_bytes(body, usize::MAX).await.expect("the stream ends")
        };
        let bytes = tokio::time::timeout(PATIENCE, read).await.expect("the stream ends in time");
        let text = String::from_utf8(bytes.to_vec()).expect("a text");
        let event = |block: &str| {
            let (name, data) = block.split_once('\n').expect("a name and data");
            let data = data.strip_prefix("data: ").expect("data");
            let event: Value = serde_json::from_str(data).expect("JSON");
            assert_eq!(name.strip_prefix("event: "), event["type"].as_str(), "{block}");
            event
        };
        text.split("\n\n").filter(|block| !block.is_empty()).map(event).collect()
    }

    /// The value of a metric.
    pub(super) async fn metric(&self, name: &str) -> f64 {
        let text = self.client.text("/metrics").await.expect("there are metrics");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} is missing in\n{text}")).parse().expect("a number")
    }

    /// Waits until a metric has a value.
    pub(super) async fn reaches(&self, name: &str, value: f64) {
        let wait = async {
            while self.metric(name).await != value {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, wait)
            .await
            .unwrap_or_else(|_| panic!("{name} does not become {value}"));
    }

    /// Ends the server, and returns whether all requests finished.
    pub(super) async fn end(mut self) -> bool {
        drop(self.stop.take());
        let ended = tokio::time::timeout(PATIENCE, &mut self.ended).await;
        ended.expect("the server ends").expect("it does not panic")
    }
}

/// A greedy completion of a prompt.
pub(super) fn completion(prompt: &str, max_tokens: usize) -> Value {
    json!({"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

/// A greedy answer to a question.
pub(super) fn question(text: &str, max_tokens: usize) -> Value {
    json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": true,
    })
}

/// A request with further fields.
pub(super) fn with(mut request: Value, fields: Value) -> Value {
    let (Some(request_fields), Value::Object(fields)) = (request.as_object_mut(), fields) else {
        panic!("requests are objects");
    };
    request_fields.extend(fields);
    request
}
