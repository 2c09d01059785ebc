//! Rebuilds engines that fail while another one serves.

use super::app::Loaded;
use anyhow::{Result, bail};
use dsrun_engine::service::{Handle, Service, ServiceError};
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::{
    task::{JoinSet, spawn_blocking},
    time::sleep,
};

/// The time limit for an engine to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause after the first attempt to rebuild an engine that did not help. Each pause is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause between attempts to rebuild an engine.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Loads the engine with an index.
type Rebuild = Box<dyn Fn(usize) -> Result<Service> + Send + Sync>;

/// Owns the engines of a server.
pub(crate) struct Supervisor {
    services: Mutex<Vec<Option<Service>>>,
    rebuild: Rebuild,
}

impl fmt::Debug for Supervisor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Supervisor").field("services", &self.services).finish_non_exhaustive()
    }
}

impl Supervisor {
    /// Owns these engines. `rebuild` loads the engine with an index anew; it may block.
    pub(crate) fn new(services: Vec<Service>, rebuild: Rebuild) -> Arc<Self> {
        Arc::new(Self { services: Mutex::new(services.into_iter().map(Some).collect()), rebuild })
    }

    /// The engines.
    pub(crate) fn handles(&self) -> Vec<Handle> {
        let services = self.services.lock().unwrap_or_else(PoisonError::into_inner);
        services.iter().flatten().map(Service::handle).collect()
    }

    /// Rebuilds engines that fail, until none is left that works. Returns the reason why the last one ended.
    pub(crate) async fn run(self: Arc<Self>, loaded: Arc<Loaded>) -> ServiceError {
        let mut engines: JoinSet<ServiceError> = JoinSet::new();
        for index in 0..loaded.engine.count() {
            engines.spawn(self.clone().keep(index, loaded.clone()));
        }
        // A task that panics leaves its engine as it is.
        while let Some(ended) = engines.join_next().await {
            if let Ok(reason) = ended {
                return reason;
            }
        }
        ServiceError::Stopped
    }

    /// Rebuilds one engine whenever it fails, until all have ended.
    async fn keep(self: Arc<Self>, index: usize, loaded: Arc<Loaded>) -> ServiceError {
        let mut pause = Duration::ZERO;
        loop {
            let started = Instant::now();
            let engine = loaded.engine.engine(index);
            engine.stopped().await;
            let Some(failure) = engine.failure() else { return ServiceError::Stopped };
            loaded.engine.count_failure();
            if loaded.engine.all_ended() {
                return failure;
            }
            tracing::error!(engine = index, error = %failure, "an engine left rotation and is rebuilt");
            if started.elapsed() > LONGEST_PAUSE {
                pause = Duration::ZERO;
            }
            loop {
                sleep(pause).await;
                pause = (2 * pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
                let supervisor = self.clone();
                // A panic counts as a failure.
                let rebuilt = spawn_blocking(move || supervisor.rebuild(index)).await;
                match rebuilt.map_err(anyhow::Error::from).flatten() {
                    Ok(engine) => {
                        loaded.engine.replace(index, engine);
                        tracing::info!(engine = index, "an engine was rebuilt and is in rotation");
                        break;
                    }
                    Err(error) => {
                        tracing::error!(
                            engine = index,
                            error = format!("{error:#}"),
                            ?pause,
                            "an engine cannot be rebuilt"
                        );
                    }
                }
            }
        }
    }

    /// Drops an engine that has failed, whose memory is then free, and loads it anew.
    fn rebuild(&self, index: usize) -> Result<Handle> {
        let services = || self.services.lock().unwrap_or_else(PoisonError::into_inner);
        // There are none after the end of the server.
        let failed = services().get_mut(index).and_then(Option::take);
        if let Some(Err(error)) = failed.map(|service| service.stop(STOP_TIMEOUT)) {
            tracing::error!(engine = index, %error, "a failed engine leaks its memory");
        }
        let service = (self.rebuild)(index)?;
        let engine = service.handle();
        match services().get_mut(index) {
            Some(place) => *place = Some(service),
            None => bail!("the server has ended"),
        }
        Ok(engine)
    }

    /// Stops all engines.
    ///
    /// # Errors
    /// If one does not end in time.
    pub(crate) fn stop(&self) -> Result<(), ServiceError> {
        let services = std::mem::take(&mut *self.services.lock().unwrap_or_else(PoisonError::into_inner));
        services.into_iter().flatten().try_for_each(|service| service.stop(STOP_TIMEOUT))
    }
}
