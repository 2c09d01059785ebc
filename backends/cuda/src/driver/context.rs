//! The context that all objects of a device handle share.

mod peer_access;

use crate::driver::{
    compiler::{Cache, Compiler},
    cublaslt::CublasLt,
    fault::{self, WaitRecord},
    kernel_spec::KernelSpec,
    kernel_struct::KernelStruct,
    launch::Function,
    memory::{Size, shortage},
    raw::{Raw, RawEvent, RawStream},
    recent::Recent,
    rendezvous::Watched,
    source,
};
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUevent, CUmemoryPool, CUmodule, CUresult, CUstream};
use dsrun_core::{Code, Error, Result, device::MemoryAccount};
use std::{
    collections::HashMap,
    ffi::CString,
    fmt, ptr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// The timeout of waits that the backend makes itself: for memory to be cleared, for work before a free.
pub(crate) const OWN_TIMEOUT: Duration = Duration::from_secs(60);

/// How often a wait for collectives checks whether their group has failed.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The first driver that can capture programmatic dependent launches: 12.3.
const OVERLAPPING_DRIVER: i32 = 12_030;

type RawContext = Raw<sys::CUctx_st>;
type RawPool = Raw<sys::CUmemPoolHandle_st>;
type RawModule = Raw<sys::CUmod_st>;

/// A kernel, once it is loaded. The lock is held while it is compiled.
type KernelSlot = Arc<Mutex<Option<Arc<Function>>>>;

/// The CUDA context of a device handle, and the objects created in it. Lives until the last object of the handle is dropped.
pub(crate) struct Context {
    device: CUdevice,
    /// The GPU's name, part of the key of tuning results: they do not apply to other GPUs of the same architecture.
    name: String,
    /// The driver's version in its own encoding: 13000 is 13.0.
    pub(crate) driver: i32,
    raw: RawContext,
    /// The compute capability that kernels are built for.
    capability: u32,
    /// Whether `capability` is older than the device's own.
    older: bool,
    pub(crate) account: Arc<MemoryAccount>,
    pool: RawPool,
    /// The stream on which memory is allocated, cleared and freed, in order.
    memory_stream: RawStream,
    /// The streams that work may be running on. The lock is held while a stream is captured: see [`super::graph`].
    streams: Mutex<Vec<RawStream>>,
    fence: RawEvent,
    compiler: OnceLock<Result<Compiler>>,
    modules: Mutex<HashMap<KernelSpec, KernelSlot>>,
    loaded: Mutex<Vec<RawModule>>,
    blas: OnceLock<Result<CublasLt>>,
    lost: OnceLock<String>,
    /// The address of a flag in device memory: whether a kernel's wait for another rank has timed out.
    failed: OnceLock<u64>,
    waits: WaitRecord,
    /// The number of groups in which this handle shares its GPU with another rank.
    shared_by: AtomicUsize,
    /// The names of the last launches on any stream.
    pub(crate) recent: Recent,
}

impl Context {
    /// Opens a device. The driver must be present and initialised. Kernels are compiled for `capability`; `older` says that
    /// it is older than the device's own.
    pub(crate) fn open(
        index: usize,
        name: &str,
        capability: u32,
        older: bool,
        account: Arc<MemoryAccount>,
    ) -> Result<Arc<Self>> {
        let ordinal = i32::try_from(index).map_err(|_| Error::invalid("is no device").at("index"))?;
        let (mut device, mut driver, mut raw): (CUdevice, i32, CUcontext) = (0, 0, ptr::null_mut());
        let (mut pool, mut memory_stream): (CUmemoryPool, CUstream) = (ptr::null_mut(), ptr::null_mut());
        let mut fence: CUevent = ptr::null_mut();
        // SAFETY: plain data for which zero is a valid value in every field.
        let mut properties: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        properties.location.id = ordinal;
        let mut keep = u64::MAX;
        let keep_all = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: all pointers are to places of the right type that live through the calls, and the context that is made
        // current is the one just retained.
        unsafe {
            fault::check(sys::cuDriverGetVersion(&raw mut driver), "asking for the driver's version")?;
            fault::check(sys::cuDeviceGet(&raw mut device, ordinal), "opening the device")?;
            fault::check(sys::cuDevicePrimaryCtxRetain(&raw mut raw, device), "making a context")?;
            fault::check(sys::cuCtxSetCurrent(raw), "entering the context")?;
            fault::check(sys::cuMemPoolCreate(&raw mut pool, &raw const properties), "making a memory pool")?;
            let keep = (&raw mut keep).cast();
            fault::check(sys::cuMemPoolSetAttribute(pool, keep_all, keep), "setting up the memory pool")?;
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            fault::check(sys::cuStreamCreate(&raw mut memory_stream, flags), "making a stream")?;
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            fault::check(sys::cuEventCreate(&raw mut fence, flags), "making an event")?;
        }
        let waits = WaitRecord::new()?;
        Ok(Arc::new(Self {
            device,
            name: name.to_owned(),
            driver,
            raw: Raw(raw),
            capability,
            older,
            account,
            pool: Raw(pool),
            memory_stream: Raw(memory_stream),
            streams: Mutex::default(),
            fence: Raw(fence),
            compiler: OnceLock::new(),
            modules: Mutex::default(),
            loaded: Mutex::default(),
            blas: OnceLock::new(),
            lost: OnceLock::new(),
            failed: OnceLock::new(),
            waits,
            shared_by: AtomicUsize::new(0),
            recent: Recent::default(),
        }))
    }

    /// Whether the handle shares its GPU with another rank of a group.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared_by.load(Ordering::Relaxed) > 0
    }

    /// Records that a group in which the handle shares its GPU has been joined or left.
    pub(crate) fn note_shared(&self, joined: bool) {
        if joined {
            self.shared_by.fetch_add(1, Ordering::Relaxed);
        } else {
            self.shared_by.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Makes the context current for the calling thread; fails if the device is lost. Every entry point calls it once.
    pub(crate) fn enter(&self) -> Result<()> {
        if let Some(reason) = self.lost.get() {
            return Err(Error::new(Code::DeviceLost, format!("the device failed before: {reason}")));
        }
        self.enter_anyway()
    }

    /// Same as [`Self::enter`], but also for a lost device, for use in `drop`.
    pub(crate) fn enter_anyway(&self) -> Result<()> {
        // SAFETY: the context is retained as long as `self` lives.
        fault::check(unsafe { sys::cuCtxSetCurrent(self.raw.0) }, "entering the context")
    }

    /// Converts a status to a result; `what` names the operation in the error. Sticky faults are remembered.
    pub(crate) fn check(&self, status: CUresult, what: &str) -> Result<()> {
        if status == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let error = fault::error(status, what);
        if fault::stays(status) {
            // The fault is asynchronous and may come from earlier work, so the message names that, too.
            let message = format!("{}{}{}", error.message(), self.waits, self.recent);
            let _ = self.lost.set(message.clone());
            return Err(Error::new(error.code(), message));
        }
        if status != CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(error);
        }
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to places of the right type. Without a context that is entered there is no answer.
        let known = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) } == CUresult::CUDA_SUCCESS;
        if !known {
            return Err(error);
        }
        let shortage = shortage(self.account.used(), free as u64, total as u64);
        Err(Error::new(Code::OutOfMemory, format!("{}; {shortage}", error.message())))
    }

    /// Same as [`Self::check`], with a lazily computed description.
    pub(crate) fn check_with(&self, status: CUresult, what: impl FnOnce() -> String) -> Result<()> {
        if status == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        self.check(status, &what())
    }

    /// The device.
    pub(crate) fn device(&self) -> CUdevice {
        self.device
    }

    /// The flag that a kernel sets when its wait for another rank has timed out, which prevents later kernels from sending
    /// undefined results. Cleared here, for a new group of ranks.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub(crate) fn failed_word(&self) -> Result<u64> {
        self.enter()?;
        let address = match self.failed.get() {
            Some(address) => *address,
            None => {
                let mut address = 0;
                // SAFETY: the pointer is to a place of the right type.
                let status = unsafe { sys::cuMemAlloc_v2(&raw mut address, size_of::<u32>()) };
                self.check(status, "allocating a word for collectives")?;
                *self.failed.get_or_init(|| address)
            }
        };
        self.fill(address, size_of::<u32>(), 0).map(|()| address)
    }

    /// The streams of this handle. While the lock is held, no memory is freed and no stream is created or destroyed.
    pub(crate) fn streams(&self) -> MutexGuard<'_, Vec<RawStream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates zeroed memory, and waits until it is cleared.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64> {
        self.enter()?;
        let mut pointer = 0;
        let _streams = self.streams();
        let stream = self.memory_stream.0;
        // SAFETY: the pool and the stream live as long as `self`; the pointer is to a place of the right type.
        let mut status =
            unsafe { sys::cuMemAllocFromPoolAsync(&raw mut pointer, bytes, self.pool.0, stream) };
        if status == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            // Pending frees may return enough memory.
            self.poll(self.memory_stream, "memory to be freed", OWN_TIMEOUT)?;
            // SAFETY: as above.
            status = unsafe {
                sys::cuMemPoolTrimTo(self.pool.0, 0);
                sys::cuMemAllocFromPoolAsync(&raw mut pointer, bytes, self.pool.0, stream)
            };
        }
        self.check_with(status, || format!("allocating {}", Size(bytes as u64)))?;
        // SAFETY: the memory was just allocated on this stream and is `bytes` long.
        self.check(unsafe { sys::cuMemsetD8Async(pointer, 0, bytes, stream) }, "clearing memory")?;
        self.poll(self.memory_stream, "memory to be cleared", OWN_TIMEOUT)?;
        Ok(pointer)
    }

    /// Frees memory after all work enqueued so far on any stream of the handle.
    pub(crate) fn release(&self, pointer: u64) {
        let streams = self.streams();
        if self.enter_anyway().is_ok() {
            streams.iter().for_each(|stream| self.order_behind(*stream));
            // SAFETY: the memory was allocated from the pool and is freed once; all work that uses it is in front.
            unsafe { sys::cuMemFreeAsync(pointer, self.memory_stream.0) };
        }
    }

    /// Makes the memory stream wait for the work enqueued so far on `stream`.
    fn order_behind(&self, stream: RawStream) {
        // SAFETY: event and streams are live. If the device is lost this fails, and there is nothing to wait for.
        unsafe {
            sys::cuEventRecord(self.fence.0, stream.0);
            sys::cuStreamWaitEvent(self.memory_stream.0, self.fence.0, 0);
        }
    }

    /// Waits until all work on all streams is done, successfully or not.
    pub(crate) fn settle(&self) {
        let streams = self.streams();
        if self.enter_anyway().is_ok() {
            streams.iter().for_each(|stream| self.order_behind(*stream));
            let _ = self.poll(self.memory_stream, "work that uses pinned memory", OWN_TIMEOUT);
        }
    }

    /// Makes a stream.
    pub(crate) fn add_stream(&self) -> Result<RawStream> {
        self.enter()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointer is to a place of the right type.
        self.check(unsafe { sys::cuStreamCreate(&raw mut raw, flags) }, "making a stream")?;
        self.streams().push(Raw(raw));
        Ok(Raw(raw))
    }

    /// Destroys a stream. Memory freed later still waits for the work on it.
    pub(crate) fn remove_stream(&self, stream: RawStream) {
        let mut streams = self.streams();
        streams.retain(|other| other.0 != stream.0);
        if self.enter_anyway().is_ok() {
            self.order_behind(stream);
            // SAFETY: the stream is live and used no more.
            unsafe { sys::cuStreamDestroy_v2(stream.0) };
        }
    }

    /// Polls a stream until it is idle.
    pub(crate) fn poll(&self, stream: RawStream, what: &str, timeout: Duration) -> Result<()> {
        // SAFETY: the stream is live.
        self.wait_until(what, timeout, &Watched::default(), || unsafe { sys::cuStreamQuery(stream.0) })
    }

    /// Polls until the status is not "not ready": first without pause, then with short sleeps. If a group whose collectives are
    /// waited for fails, the wait ends with an error, even if their kernels have ended.
    pub(crate) fn wait_until(
        &self,
        what: &str,
        timeout: Duration,
        watched: &Watched,
        query: impl Fn() -> CUresult,
    ) -> Result<()> {
        let start = Instant::now();
        let mut checked = Duration::ZERO;
        loop {
            match query() {
                CUresult::CUDA_ERROR_NOT_READY => {}
                status => {
                    self.check_with(status, || format!("waiting for {what}"))?;
                    return watched.check();
                }
            }
            let waited = start.elapsed();
            if waited > checked + CHECK_INTERVAL {
                watched.check()?;
                checked = waited;
            }
            if waited > timeout {
                let message = format!("waited {waited:.1?} for {what}{}", self.recent);
                return Err(Error::new(Code::Timeout, message));
            }
            if waited > Duration::from_millis(2) {
                std::thread::sleep(Duration::from_micros(50));
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// The compiler, created when it is first needed.
    fn compiler(&self) -> Result<&Compiler> {
        let made = self.compiler.get_or_init(|| match self.older {
            false => Compiler::new(self.capability, Cache::of_user()),
            true => Compiler::portable(self.capability, Cache::of_user()),
        });
        made.as_ref().map_err(Clone::clone)
    }

    /// A cached tuning result for the kernels of a unit on a GPU of this name.
    pub(crate) fn recall(&self, unit: &str, question: &str) -> Option<String> {
        self.compiler().ok()?.recall(unit, &self.asked_of_card(question))
    }

    /// Caches a tuning result for the kernels of a unit on this GPU.
    pub(crate) fn remember(&self, unit: &str, question: &str, answer: &str) {
        if let Ok(compiler) = self.compiler() {
            compiler.remember(unit, &self.asked_of_card(question), answer);
        }
    }

    fn asked_of_card(&self, question: &str) -> String {
        format!("{}: {question}", self.name)
    }

    /// Copies structs to device memory, and waits for the copy.
    pub(crate) fn write<T: KernelStruct>(&self, pointer: u64, values: &[T]) -> Result<()> {
        self.enter()?;
        let (stream, bytes) = (self.memory_stream, size_of_val(values));
        // SAFETY: the caller owns the memory, which has room for the structs; they are plain data and live until the copy is done, as it
        // is waited for.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(pointer, values.as_ptr().cast(), bytes, stream.0) };
        self.check(status, "writing to device memory")?;
        self.poll(stream, "structs to be written to device memory", OWN_TIMEOUT)
    }

    /// Copies bytes within device memory, or from and to a device with [peer access](Self::reach), and waits for the copy.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.enter()?;
        let stream = self.memory_stream;
        // SAFETY: the caller owns both places, which are `bytes` long and live until the copy is done, as it is waited for.
        self.check(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.0) }, "copying to a device")?;
        self.poll(stream, "a copy to a device", OWN_TIMEOUT)
    }

    /// Copies bytes from the host to device memory, and waits for the copy.
    pub(crate) fn write_bytes(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        let stream = self.memory_stream;
        // SAFETY: the caller owns the memory, which is as long as the bytes; they live until the copy is done, as it is waited for.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), stream.0) };
        self.check(status, "writing to device memory")?;
        self.poll(stream, "bytes to be written to device memory", OWN_TIMEOUT)
    }

    /// Copies device memory to the host, and waits for the copy.
    pub(crate) fn read_bytes(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        self.enter()?;
        let stream = self.memory_stream;
        // SAFETY: as above.
        let status =
            unsafe { sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), stream.0) };
        self.check(status, "reading device memory")?;
        self.poll(stream, "bytes to be read from device memory", OWN_TIMEOUT)
    }

    /// Fills device memory with a byte, and waits for it.
    pub(crate) fn fill(&self, pointer: u64, bytes: usize, value: u8) -> Result<()> {
        self.enter()?;
        let stream = self.memory_stream;
        // SAFETY: the caller owns the memory, which is `bytes` long.
        self.check(unsafe { sys::cuMemsetD8Async(pointer, value, bytes, stream.0) }, "filling memory")?;
        self.poll(stream, "memory to be filled", OWN_TIMEOUT)
    }

    /// Times `work`: the shortest of `runs` runs in milliseconds, after a warm-up run. Other streams are not stopped, so
    /// call it before anything else runs.
    pub(crate) fn time(&self, runs: usize, work: impl Fn(RawStream) -> Result<()>) -> Result<f32> {
        let stream = self.add_stream()?;
        let mut events: [CUevent; 2] = [ptr::null_mut(); 2];
        let timed = (|| {
            for event in &mut events {
                // SAFETY: the pointer is to a place of the right type.
                self.check(unsafe { sys::cuEventCreate(event, 0) }, "making an event")?;
            }
            let mut best = f32::INFINITY;
            for run in 0..=runs {
                // SAFETY: events and stream are live.
                self.check(unsafe { sys::cuEventRecord(events[0], stream.0) }, "recording an event")?;
                work(stream)?;
                // SAFETY: as above.
                self.check(unsafe { sys::cuEventRecord(events[1], stream.0) }, "recording an event")?;
                self.poll(stream, "a kernel that is measured", OWN_TIMEOUT)?;
                let mut time = 0.0;
                // SAFETY: both events were reached; the pointer is to a place of the right type.
                let status = unsafe { sys::cuEventElapsedTime_v2(&raw mut time, events[0], events[1]) };
                self.check(status, "reading the time")?;
                if run > 0 {
                    best = best.min(time);
                }
            }
            Ok(best)
        })();
        for event in events.into_iter().filter(|event| !event.is_null()) {
            // SAFETY: the event is live and used no more.
            unsafe { sys::cuEventDestroy_v2(event) };
        }
        self.remove_stream(stream);
        timed
    }

    /// cuBLASLt, opened when it is first needed.
    pub(crate) fn blas(&self) -> Result<&CublasLt> {
        self.blas.get_or_init(CublasLt::new).as_ref().map_err(Clone::clone)
    }

    /// A kernel, compiled and loaded on first use.
    pub(crate) fn function(&self, spec: &KernelSpec) -> Result<Arc<Function>> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = modules.entry(spec.clone()).or_default().clone();
        drop(modules);
        // Each kernel has its own lock, so threads that need other kernels do not wait for this one.
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = &*slot {
            return Ok(function.clone());
        }
        self.enter()?;
        let image = self.compiler()?.build(spec)?;
        let name =
            CString::new(spec.entry).map_err(|_| Error::internal("a kernel's name contains a NUL byte"))?;
        let (mut module, mut function): (CUmodule, _) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the image is a binary, or terminated text, from NVRTC; pointers are to places of the right type.
        let status = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
        self.check_with(status, || format!("loading kernel {spec}"))?;
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).push(Raw(module));
        // SAFETY: as above; the module was just loaded.
        let status = unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
        self.check_with(status, || format!("finding kernel {spec}"))?;
        self.prepare(spec, function)?;
        self.tell_wait_record(spec, module)?;
        let overlaps = !spec.together
            && self.capability >= 90
            && self.driver >= OVERLAPPING_DRIVER
            && source::every_kernel_waits(spec.unit);
        let shared = u32::try_from(spec.shared).unwrap_or(u32::MAX);
        let raw = Raw(function);
        let function =
            Arc::new(Function { raw, name: spec.entry, shared, overlaps, together: spec.together });
        *slot = Some(function.clone());
        Ok(function)
    }
}

impl Context {
    /// Sets the shared memory attributes of a kernel.
    fn prepare(&self, spec: &KernelSpec, function: sys::CUfunction) -> Result<()> {
        use sys::CUfunction_attribute as Attribute;
        let set = |attribute, value: i32| {
            // SAFETY: the function was just loaded.
            let status = unsafe { sys::cuFuncSetAttribute(function, attribute, value) };
            self.check_with(status, || format!("setting up kernel {spec}"))
        };
        if spec.shared > 0 {
            let bytes = i32::try_from(spec.shared).unwrap_or(i32::MAX);
            set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)?;
        }
        if self.capability >= 90 {
            // An SM changes its split of L1 and shared memory only when it is empty. Kernels that overlap must therefore
            // use the same split, and kernels that stream weights need the maximum of shared memory.
            set(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)?;
        }
        Ok(())
    }
}

impl Context {
    /// Sets the address where the kernels of a module record a wait that timed out, if they wait for other blocks.
    fn tell_wait_record(&self, spec: &KernelSpec, module: CUmodule) -> Result<()> {
        if !source::includes(spec.unit, "waits.cuh") {
            return Ok(());
        }
        let (mut variable, mut bytes) = (0, 0);
        // SAFETY: the module was just loaded; the pointers are to places of the right type, the name is terminated.
        let found = unsafe {
            sys::cuModuleGetGlobal_v2(&raw mut variable, &raw mut bytes, module, c"wait_record".as_ptr())
        };
        // The compiler leaves the variable out if no kernel of the module uses it.
        if found == CUresult::CUDA_ERROR_NOT_FOUND {
            return Ok(());
        }
        self.check_with(found, || format!("setting up kernel {spec}"))?;
        let pointer = self.waits.pointer;
        // SAFETY: the variable holds one pointer.
        let status = unsafe { sys::cuMemcpyHtoD_v2(variable, (&raw const pointer).cast(), size_of::<u64>()) };
        self.check_with(status, || format!("setting up kernel {spec}"))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.enter_anyway().is_err() {
            return;
        }
        let _ = self.poll(self.memory_stream, "memory to be freed", OWN_TIMEOUT);
        // SAFETY: nothing of this handle is left: every object keeps the context alive.
        unsafe {
            for module in self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner) {
                sys::cuModuleUnload(module.0);
            }
            sys::cuEventDestroy_v2(self.fence.0);
            sys::cuStreamDestroy_v2(self.memory_stream.0);
            sys::cuMemPoolDestroy(self.pool.0);
            self.blas.take();
            self.waits.free();
            if let Some(address) = self.failed.take() {
                sys::cuMemFree_v2(address);
            }
            sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("device", &self.device)
            .field("capability", &self.capability)
            .finish_non_exhaustive()
    }
}
