//! The server from its start to its end.

use super::{
    access::{ApiKeys, RateLimit},
    app::App,
    connections::{self, ConnectionLimits},
    heap,
    intake::{BodyLimits, Intake},
    origins::Origins,
    response_store::ResponseStore,
    routes::router,
    traces::Traces,
    unsent::Unsent,
};
use crate::arguments::ServeSettings;
use anyhow::{Context, Result, anyhow};
use std::{future::Future, io::ErrorKind, net::SocketAddr, path::Path, sync::Arc, time::Duration};
use tokio::{
    net::TcpListener,
    sync::oneshot,
    time::{Instant, sleep_until, timeout_at},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};

/// The environment variable with API keys.
const KEYS: &str = "DSRUN_API_KEYS";

/// The state that all requests to a server of these settings share.
///
/// # Errors
/// If the API keys cannot be read.
pub(crate) fn app(settings: &ServeSettings, name: String) -> Result<App> {
    let list = match std::env::var(KEYS) {
        Ok(list) => Some(list),
        Err(std::env::VarError::NotPresent) => None,
        Err(error) => return Err(error).context(KEYS),
    };
    let given = settings.api_key.as_deref().unwrap_or_default();
    app_with_keys(settings, name, ApiKeys::load(settings.api_key_file.as_deref(), list.as_deref(), given)?)
}

/// As [`app`], with these API keys.
///
/// # Errors
/// If a host, an origin or the collector's URL of the settings is not one.
pub(super) fn app_with_keys(settings: &ServeSettings, name: String, keys: ApiKeys) -> Result<App> {
    let bodies = BodyLimits {
        bytes: settings.body_limit(),
        pending: settings.pending_limit(),
        time: settings.body_timeout(),
    };
    let answer_timeout = settings.request_timeout();
    let intake = Intake::new(bodies, answer_timeout);
    let open = keys.is_empty() && settings.address().ip().is_loopback();
    let origins =
        Origins::new(open, settings.allow_host.iter().flatten(), settings.cors_origin.iter().flatten())?;
    let rate = settings.requests_per_minute.map(RateLimit::new);
    let mut app = App::new(name, intake, answer_timeout, keys, rate);
    app.origins = origins;
    app.access_log = settings.access_log.unwrap_or_default();
    app.traces = Traces::start(settings.otlp_endpoint.as_deref())?;
    app.responses = Arc::new(ResponseStore::new(settings.response_store()));
    app.unsent = Unsent::new(settings.unsent_limit(), answer_timeout);
    app.strict_fields = settings.strict_fields.unwrap_or(false);
    Ok(app)
}

/// A listening server.
pub(crate) struct Server {
    app: Arc<App>,
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
    limits: ConnectionLimits,
    drain: Duration,
}

impl Server {
    /// Starts to listen. No request is served before [`Self::run`], and only health checks before the model is loaded.
    ///
    /// # Errors
    /// If the address is taken, or the certificate cannot be used.
    pub(crate) async fn bind(app: Arc<App>, settings: &ServeSettings) -> Result<Self> {
        let tls = match (&settings.tls_cert, &settings.tls_key) {
            (Some(certificate), Some(key)) => Some(acceptor(certificate, key)?),
            _ => None,
        };
        let address = settings.address();
        let listener = TcpListener::bind(address).await.map_err(|error| {
            let hint = match error.kind() {
                ErrorKind::AddrInUse => "\nhint: --port names another, or 0 for any that is free",
                ErrorKind::AddrNotAvailable => {
                    "\nhint: --host is an address of this machine, or 0.0.0.0 for all of them"
                }
                ErrorKind::PermissionDenied => {
                    "\nhint: ports below 1024 take a privilege; --port names another"
                }
                _ => "",
            };
            anyhow!("cannot listen at {address}: {error}{hint}")
        })?;
        let address =
            listener.local_addr().context("the system does not report the address of the listener")?;
        let limits = ConnectionLimits {
            connections: settings.connections(),
            header: settings.header_timeout(),
            write: settings.write_timeout(),
        };
        Ok(Self { app, listener, address, tls, limits, drain: settings.drain_timeout() })
    }

    /// The address that it listens at.
    pub(crate) fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// Serves until `stop`. Then it accepts no more requests, and lets running ones finish within the time to drain; health checks are
    /// still answered. Returns whether all requests finished.
    pub(crate) async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> bool {
        let (drained_sender, drained) = oneshot::channel();
        let (app, drain) = (self.app.clone(), self.drain);
        let control = tokio::spawn(async move {
            stop.await;
            app.drain();
            let deadline = Instant::now() + drain;
            if let Some(engine) = app.engine() {
                // Their connections show whether they finished.
                let _ = timeout_at(deadline, engine.drained()).await;
            }
            let _ = drained_sender.send(());
            sleep_until(deadline).await;
        });
        let give_up = control.abort_handle();
        let trimming = tokio::spawn(heap::keep_small(self.app.metrics.clone()));
        let stop = async {
            // If the task panicked, the server has to end nevertheless.
            let _ = drained.await;
        };
        let deadline = async {
            let _ = control.await;
        };
        let finished = connections::serve(
            self.listener,
            router(self.app.clone()),
            self.tls,
            self.limits,
            self.app.metrics.clone(),
            stop,
            deadline,
        )
        .await;
        give_up.abort();
        trimming.abort();
        if let Some(traces) = &self.app.traces {
            traces.end().await;
        }
        finished
    }
}

fn acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor> {
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(|| format!("the certificate {} cannot be read", certificate.display()))?;
    let key = PrivateKeyDer::from_pem_file(key)
        .with_context(|| format!("the private key {} cannot be read", key.display()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|config| config.with_no_client_auth().with_single_cert(chain, key))
        .context("the certificate and its key cannot be used")?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}
