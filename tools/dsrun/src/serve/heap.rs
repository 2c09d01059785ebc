//! Gives memory that requests no longer use back to the system.

use super::metrics::Metrics;
use std::{sync::Arc, time::Duration};

/// The interval at which memory is given back, if there were requests.
const INTERVAL: Duration = Duration::from_secs(5);

/// Gives memory back from time to time. Never ends.
pub(super) async fn keep_small(metrics: Arc<Metrics>) {
    let mut seen = metrics.requests();
    loop {
        tokio::time::sleep(INTERVAL).await;
        let requests = metrics.requests();
        if std::mem::replace(&mut seen, requests) != requests {
            // A panic is not possible, and memory that stays is harmless.
            let _ = tokio::task::spawn_blocking(give_back).await;
        }
    }
}

/// Returns the free pages of the heap. The allocator of glibc keeps those between pages that are in use: after many small values, such
/// as those of a large JSON body, hundreds of megabytes.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn give_back() {
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> std::ffi::c_int;
    }
    // SAFETY: It takes the locks of the allocator, and changes no memory that is in use.
    unsafe { malloc_trim(0) };
}

/// Other allocators return pages themselves.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn give_back() {}
