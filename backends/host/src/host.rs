//! What a device handle, its buffers and its calls share: threads, an account of memory, and a lock.

use dsrun_core::{
    Code, Error, Result,
    device::{DeviceOptions, MemoryAccount},
};
use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::available_parallelism,
};

/// The maximum number of threads of a handle.
const MAX_THREADS: usize = 1024;

/// What a device handle, its buffers and its calls share.
pub struct Host {
    pub(crate) account: Arc<MemoryAccount>,
    /// Counts pinned memory, to which the limit of the handle does not apply because it is not device memory.
    pub(crate) pinned: Arc<MemoryAccount>,
    /// The threads that kernels may use.
    pub pool: rayon::ThreadPool,
    /// Must be held to access the memory of this handle's buffers.
    turn: Mutex<()>,
}

impl Host {
    pub(crate) fn new(backend: &str, options: &DeviceOptions) -> Result<Self> {
        let threads = threads(options)?;
        let backend = backend.to_owned();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(move |index| format!("dsrun-{backend}-{index}"))
            .build()
            .map_err(|error| {
                Error::new(Code::Unavailable, format!("cannot start {threads} threads: {error}"))
            })?;
        let account = MemoryAccount::new(options.memory_limit.or_else(host_memory));
        tracing::debug!(threads, memory = ?account.free(), "opened the CPU");
        Ok(Self { account, pinned: MemoryAccount::new(host_memory()), pool, turn: Mutex::new(()) })
    }

    /// Waits for this handle's turn: see the [crate documentation](crate).
    pub(crate) fn lock(&self) -> MutexGuard<'_, ()> {
        // The lock guards no state of its own that a panic could have broken.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("account", &self.account).finish_non_exhaustive()
    }
}

/// The threads of a handle: those asked for, times its share of the device.
fn threads(options: &DeviceOptions) -> Result<usize> {
    let threads = options.threads.unwrap_or_else(|| cores().min(MAX_THREADS));
    if !(1..=MAX_THREADS).contains(&threads) {
        return Err(Error::invalid(format!("is {threads}, must be 1 to {MAX_THREADS}")).at("threads"));
    }
    let share = options.compute_share.unwrap_or(1.0);
    if !(share > 0.0 && share <= 1.0) {
        return Err(Error::invalid(format!("is {share}, must be above 0 and up to 1")).at("compute_share"));
    }
    // Rounded down, so that handles that share the device never have more threads than it.
    Ok(((threads as f32 * share) as usize).clamp(1, threads))
}

/// The processors that this process may use.
pub(crate) fn cores() -> usize {
    available_parallelism().map_or(1, usize::from)
}

/// The host's memory in bytes, as far as the system says.
pub(crate) fn host_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let installed = kibibytes.checked_mul(1024)?;
    // A container may have less than the machine.
    let granted = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let granted = granted.and_then(|text| text.trim().parse().ok()).unwrap_or(u64::MAX);
    Some(installed.min(granted))
}
