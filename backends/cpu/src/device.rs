//! The backend, its one device, and what a handle on it owns.

use crate::{
    graph::HostGraphs,
    kernels::HostKernels,
    memory::{ALIGNMENT, Account, HostBuffer},
    parallel::Scratch,
    stream::{HostEvent, HostStream},
};
use dsrun_core::{
    Code, DType, Error, Result,
    collective::{Collective, host::HostCollective},
    device::{
        Backend, BackendInfo, Buffer, Device, DeviceInfo, DeviceOptions, DeviceProperties, Event, Finding,
        MemoryKind, MemoryUse, Stream,
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

/// The most threads a handle may ask for; more is taken for a mistake.
const MAX_THREADS: usize = 1024;

/// The CPU backend.
#[derive(Debug)]
pub struct CpuBackend {
    info: BackendInfo,
}

impl CpuBackend {
    /// The backend. It needs nothing but the host.
    pub fn new() -> Self {
        let info = BackendInfo {
            name: "cpu".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            description: "The CPU: packed weights and SIMD kernels".into(),
        };
        Self { info }
    }
}

impl Default for CpuBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for CpuBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![DeviceInfo { index: 0, name: device_name(), memory_bytes: host_memory() }])
    }

    fn open(&self, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>> {
        if index != 0 {
            return Err(Error::invalid(format!("is {index}, but the CPU is device 0")).at("device"));
        }
        Ok(Arc::new(HostDevice::open(options)?))
    }

    fn diagnose(&self) -> Vec<Finding> {
        let threads = available_parallelism().map_or(1, usize::from);
        let vectors = crate::simd::instruction_sets().map(|(name, present)| Finding {
            subject: name.to_owned(),
            present,
            detail: if present { "used" } else { "the processor does not have it" }.to_owned(),
        });
        let threads = Finding {
            subject: "threads".to_owned(),
            present: true,
            detail: format!("{threads}, unless asked otherwise"),
        };
        std::iter::once(threads).chain(vectors).collect()
    }
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
pub(crate) struct Core {
    pub(crate) account: Arc<Account>,
    pub(crate) pool: rayon::ThreadPool,
    /// Holding it is the right to touch the memory of this handle's buffers.
    scratch: Mutex<Scratch>,
}

impl Core {
    /// Waits for this device's turn: see the [crate documentation](crate).
    pub(crate) fn lock(&self) -> MutexGuard<'_, Scratch> {
        // Scratch memory has no state that a panic could have broken.
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("account", &self.account).finish_non_exhaustive()
    }
}

/// An open device.
#[derive(Debug)]
pub(crate) struct HostDevice {
    properties: DeviceProperties,
    kernels: HostKernels,
    core: Arc<Core>,
    collective: HostCollective,
    graphs: HostGraphs,
}

impl HostDevice {
    fn open(options: &DeviceOptions) -> Result<Self> {
        let threads = threads(options)?;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("dsrun-cpu-{index}"))
            .build()
            .map_err(|error| {
                Error::new(Code::Unavailable, format!("cannot start {threads} threads: {error}"))
            })?;
        let memory = host_memory();
        let account = Account::new(options.memory_limit.or(memory));
        let scratch = Mutex::new(Scratch::new(threads));
        let core = Arc::new(Core { account, pool, scratch });
        let properties = DeviceProperties {
            name: device_name(),
            memory_bytes: memory.unwrap_or(0),
            alignment: ALIGNMENT,
            dtypes: vec![DType::F32, DType::BF16, DType::F16],
            profiles: vec![Profile::LlmCore1, Profile::LlmQuant1, Profile::LlmDist1],
            strict_nan: true,
            unified_memory: true,
        };
        tracing::debug!(threads, memory = ?core.account.free(), "opened the CPU");
        let (kernels, graphs) = (HostKernels::new(core.clone()), HostGraphs::new(core.clone()));
        Ok(Self { properties, kernels, graphs, core, collective: HostCollective })
    }
}

/// How many threads a handle gets: those asked for, times its share of the device.
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

impl Device for HostDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        MemoryUse { used: self.core.account.used(), free: self.core.account.free() }
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        Ok(Arc::new(HostBuffer::new(self.core.clone(), bytes, kind)?))
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(HostStream::new(self.core.clone())))
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
