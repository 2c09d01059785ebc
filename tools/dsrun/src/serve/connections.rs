//! Connections: accepted up to a limit, with a time limit on everything that a client can be slow at, and drained at the end.

use super::metrics::Metrics;
use axum::{Router, body::Body};
use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::{GracefulShutdown, Watcher},
};
use std::{future::Future, io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

/// The most bytes of a request's head, and of the buffers of a connection.
const BUFFER: usize = 64 * 1024;

/// The time to wait when the system has no file descriptors left.
const BREATHER: Duration = Duration::from_millis(50);

/// The response to connections above the limit.
const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n\
    content-type: application/json\r\ncontent-length: 114\r\n\r\n\
    {\"error\":{\"message\":\"too many connections: try again later\",\"type\":\"server_error\",\"param\":null,\"code\":\"too_busy\"}}";

/// The limits of connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionLimits {
    /// The most connections at a time.
    pub(crate) connections: usize,
    /// The longest time to wait for the head of a request, also on a connection that is kept alive, and for TLS.
    pub(crate) header: Duration,
    /// The longest time that a client may take to read a piece of the answer.
    pub(crate) write: Duration,
}

/// The address that a request comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// The state that all connections share.
struct Shared {
    router: Router,
    limits: ConnectionLimits,
    metrics: Arc<Metrics>,
    tls: Option<TlsAcceptor>,
}

/// Serves connections until `stop`, then lets running requests finish until `give_up`. Returns whether all of them finished.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    tls: Option<TlsAcceptor>,
    limits: ConnectionLimits,
    metrics: Arc<Metrics>,
    stop: impl Future<Output = ()>,
    give_up: impl Future<Output = ()>,
) -> bool {
    let permits = Arc::new(Semaphore::new(limits.connections));
    let shared = Arc::new(Shared { router, limits, metrics, tls });
    let graceful = GracefulShutdown::new();
    let mut stop = pin!(stop);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // The client has disconnected already, or no file descriptors are left. Both are temporary.
                tracing::debug!(%error, "a connection was not accepted");
                if !is_of_client(&error) {
                    tokio::time::sleep(BREATHER).await;
                }
                continue;
            }
        };
        let Ok(permit) = permits.clone().try_acquire_owned() else {
            shared.metrics.connections_refused.add(1);
            refuse(&stream, shared.tls.is_some());
            continue;
        };
        let (shared, watcher) = (shared.clone(), graceful.watcher());
        tokio::spawn(async move {
            let _permit = permit;
            let _open = shared.metrics.connections_open.hold();
            connection(stream, peer, &shared, watcher).await;
        });
    }
    drop(listener);
    tokio::select! {
        () = graceful.shutdown() => true,
        () = give_up => false,
    }
}

/// Whether a failed connection concerns this client only.
fn is_of_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// Responds to a connection above the limit, if that is possible without waiting.
fn refuse(stream: &TcpStream, encrypted: bool) {
    if !encrypted {
        let _ = stream.try_write(FULL);
    }
}

async fn connection(stream: TcpStream, peer: SocketAddr, shared: &Arc<Shared>, watcher: Watcher) {
    // Tokens are small and should be sent at once.
    let _ = stream.set_nodelay(true);
    let Some(tls) = &shared.tls else { return http(stream, peer, shared, watcher).await };
    match tokio::time::timeout(shared.limits.header, tls.accept(stream)).await {
        Ok(Ok(stream)) => http(stream, peer, shared, watcher).await,
        Ok(Err(error)) => tracing::debug!(%peer, %error, "the TLS handshake failed"),
        Err(_) => tracing::debug!(%peer, "the TLS handshake took too long"),
    }
}

async fn http(
    stream: impl AsyncRead + AsyncWrite + 'static,
    peer: SocketAddr,
    shared: &Arc<Shared>,
    watcher: Watcher,
) {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(shared.limits.write));
    let stream = Box::pin(stream);
    let router = shared.router.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Peer(peer));
        router.clone().oneshot(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(shared.limits.header)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%peer, %error, "a connection ends early");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_content_length_of_the_refusal_is_right() {
        let text = std::str::from_utf8(FULL).expect("text");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
        assert!(head.contains(&format!("content-length: {}", body.len())), "{}", body.len());
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok());
    }
}
