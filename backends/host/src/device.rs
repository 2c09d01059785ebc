//! The one device of a host backend, and what a handle on it owns.

use crate::{
    graph::HostGraphs,
    kernels::{Compute, HostKernels},
    memory::{ALIGNMENT, Account, HostBuffer},
    stream::{HostEvent, HostStream},
};
use dsrun_core::{
    Code, DType, Error, Result,
    collective::{Collective, host::HostCollective},
    device::{
        Buffer, Device, DeviceInfo, DeviceOptions, DeviceProperties, Event, MemoryKind, MemoryUse, Stream,
    },
    graph::Graphs,
    kernels::Kernels,
    op::Profile,
};
use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::available_parallelism,
};

/// The most threads a handle may ask for.
const MAX_THREADS: usize = 1024;

/// The host as a device of a backend.
pub fn device_info() -> DeviceInfo {
    DeviceInfo { index: 0, name: device_name(), memory_bytes: host_memory() }
}

/// Opens the host as device `index` of `backend`; `compute` is given the number of threads.
///
/// # Errors
/// If the index is not 0, or an option makes no sense.
pub fn open<C: Compute>(
    backend: &str,
    index: usize,
    options: &DeviceOptions,
    compute: impl FnOnce(usize) -> C,
) -> Result<Arc<dyn Device>> {
    if index != 0 {
        return Err(Error::invalid(format!("is {index}, but {backend} has device 0 only")).at("device"));
    }
    let host = Arc::new(Host::new(backend, options)?);
    let compute = compute(host.pool.current_num_threads());
    Ok(Arc::new(HostDevice::new(host, compute)))
}

fn cores() -> usize {
    available_parallelism().map_or(1, usize::from)
}

fn device_name() -> String {
    format!("CPU ({}, {} cores)", std::env::consts::ARCH, cores())
}

/// The host's memory in bytes, as far as the system says.
fn host_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let installed = kibibytes.checked_mul(1024)?;
    // A container may have less than the machine.
    let granted = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let granted = granted.and_then(|text| text.trim().parse().ok()).unwrap_or(u64::MAX);
    Some(installed.min(granted))
}

/// What a device handle, its buffers and its calls share.
pub struct Host {
    pub(crate) account: Arc<Account>,
    /// The threads that kernels may use.
    pub pool: rayon::ThreadPool,
    /// Holding it is the right to touch the memory of this handle's buffers.
    turn: Mutex<()>,
}

impl Host {
    fn new(backend: &str, options: &DeviceOptions) -> Result<Self> {
        let threads = threads(options)?;
        let backend = backend.to_owned();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(move |index| format!("dsrun-{backend}-{index}"))
            .build()
            .map_err(|error| {
                Error::new(Code::Unavailable, format!("cannot start {threads} threads: {error}"))
            })?;
        let account = Account::new(options.memory_limit.or_else(host_memory));
        tracing::debug!(threads, memory = ?account.free(), "opened the CPU");
        Ok(Self { account, pool, turn: Mutex::new(()) })
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
    Ok(((threads as f32 * share).ceil() as usize).clamp(1, threads))
}

/// An open device.
#[derive(Debug)]
struct HostDevice<C> {
    host: Arc<Host>,
    properties: DeviceProperties,
    kernels: HostKernels<C>,
    collective: HostCollective,
    graphs: HostGraphs,
}

impl<C: Compute> HostDevice<C> {
    fn new(host: Arc<Host>, compute: C) -> Self {
        let properties = DeviceProperties {
            name: device_name(),
            memory_bytes: host_memory().unwrap_or(0),
            alignment: ALIGNMENT,
            dtypes: vec![DType::F32, DType::BF16, DType::F16],
            profiles: vec![Profile::LlmCore1, Profile::LlmQuant1, Profile::LlmDist1],
            strict_nan: true,
            unified_memory: true,
        };
        let (kernels, graphs) = (HostKernels::new(host.clone(), compute), HostGraphs::new(host.clone()));
        Self { host, properties, kernels, collective: HostCollective, graphs }
    }
}

impl<C: Compute> Device for HostDevice<C> {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        MemoryUse { used: self.host.account.used(), free: self.host.account.free() }
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        Ok(Arc::new(HostBuffer::new(self.host.clone(), bytes, kind)?))
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(HostStream::new(self.host.clone())))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(HostEvent::default()))
    }

    fn kernels(&self) -> &dyn Kernels {
        &self.kernels
    }

    fn collective(&self) -> Option<&dyn Collective> {
        Some(&self.collective)
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        Some(&self.graphs)
    }
}
