//! Being asked to end: SIGTERM and Ctrl-C.

use anyhow::{Context, Result};

/// Hears of signals from when it is made.
pub(super) struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// From here on signals do not end the program by themselves. Needs a runtime around it.
    #[cfg(unix)]
    pub(super) fn listen() -> Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let listen = |kind| signal(kind).context("signals cannot be caught");
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    /// From here on Ctrl-C does not end the program by itself. Needs a runtime around it.
    #[cfg(not(unix))]
    pub(super) fn listen() -> Result<Self> {
        Ok(Self {})
    }

    /// Waits for the next signal.
    #[cfg(unix)]
    pub(super) async fn asked(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Waits for the next Ctrl-C.
    #[cfg(not(unix))]
    pub(super) async fn asked(&mut self) {
        if let Err(error) = tokio::signal::ctrl_c().await {
            tracing::warn!(%error, "Ctrl-C cannot be caught");
            std::future::pending::<()>().await;
        }
    }
}
