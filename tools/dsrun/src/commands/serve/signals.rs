//! Receives the signals that end the server: SIGTERM and Ctrl-C.

#[cfg(unix)]
use anyhow::Context;
use anyhow::Result;

/// Receives signals from its creation on.
pub(super) struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// Catches SIGTERM and Ctrl-C, which no longer end the program. Requires a Tokio runtime.
    #[cfg(unix)]
    pub(super) fn listen() -> Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let listen = |kind| signal(kind).context("cannot catch signals");
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    /// Catches Ctrl-C, which no longer ends the program. Requires a Tokio runtime.
    #[cfg(not(unix))]
    pub(super) fn listen() -> Result<Self> {
        Ok(Self {})
    }

    /// Waits for the next signal.
    #[cfg(unix)]
    pub(super) async fn received(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Waits for the next Ctrl-C.
    #[cfg(not(unix))]
    pub(super) async fn received(&mut self) {
        if let Err(error) = tokio::signal::ctrl_c().await {
            tracing::warn!(%error, "cannot catch Ctrl-C");
            std::future::pending::<()>().await;
        }
    }
}
