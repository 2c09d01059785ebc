//! NCCL, loaded when it is first needed, if it is new enough.
//!
//! Communicators are non-blocking: no function of NCCL waits for another rank, and every wait here has a timeout. The
//! declarations are those of `nccl.h` since 2.18, whose functions and structs have not changed their layout.

use crate::driver::{
    library::{Handle, open_by_name},
    raw::{Raw, RawStream},
};
use dsrun_core::{Code, DType, Error, Result, collective::GroupId, op::Reduction};
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fmt, ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

/// The name of the library.
pub(crate) const LIBRARY: &str = "libnccl.so.2";
/// The oldest version: 2.18.0.
const OLDEST: i32 = 21_800;
/// How long an operation may take to be enqueued. The first ones of a communicator connect ranks.
const ENQUEUE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an abort is waited for.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a dropped communicator may take to finish.
const FINISH_TIMEOUT: Duration = Duration::from_secs(5);
/// The number of bytes of an id.
const ID_BYTES: usize = 128;

/// `ncclResult_t`: success, and an operation that is not finished.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct UniqueId(pub(crate) [u8; ID_BYTES]);

impl From<GroupId> for UniqueId {
    fn from(id: GroupId) -> Self {
        Self(id.0)
    }
}

/// `ncclComm_t` points to it.
#[repr(C)]
struct OpaqueComm {
    _private: [u8; 0],
}

type RawComm = *mut OpaqueComm;

/// The prefix of `ncclConfig_t` as of 2.14. The struct contains its size, so later versions accept it and use defaults for later
/// fields.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// A field of later versions in former padding, set to "undefined", the default.
    cga_cluster_size: c_int,
}

impl Config {
    fn non_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_400,
            blocking: 0,
            cga_cluster_size: c_int::MIN,
        }
    }
}

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of NCCL that are used.
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// # Errors
            /// The name of a function that is missing.
            fn load(library: &Handle) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: NCCL declares the functions so.
                    $($name: *unsafe { library.get($symbol) }
                        .map_err(|_| stringify!($name))?,)*
                })
            }
        }
    };
}

functions! {
    get_unique_id: b"ncclGetUniqueId" (*mut UniqueId) -> c_int;
    init: b"ncclCommInitRankConfig" (*mut RawComm, c_int, UniqueId, c_int, *mut Config) -> c_int;
    async_error: b"ncclCommGetAsyncError" (RawComm, *mut c_int) -> c_int;
    finalize: b"ncclCommFinalize" (RawComm) -> c_int;
    destroy: b"ncclCommDestroy" (RawComm) -> c_int;
    abort: b"ncclCommAbort" (RawComm) -> c_int;
    error_string: b"ncclGetErrorString" (c_int) -> *const c_char;
    last_error: b"ncclGetLastError" (RawComm) -> *const c_char;
    group_start: b"ncclGroupStart" () -> c_int;
    group_end: b"ncclGroupEnd" () -> c_int;
    all_reduce: b"ncclAllReduce" (u64, u64, usize, c_int, c_int, RawComm, *mut c_void) -> c_int;
    all_gather: b"ncclAllGather" (u64, u64, usize, c_int, RawComm, *mut c_void) -> c_int;
    reduce_scatter: b"ncclReduceScatter" (u64, u64, usize, c_int, c_int, RawComm, *mut c_void) -> c_int;
    broadcast: b"ncclBroadcast" (u64, u64, usize, c_int, c_int, RawComm, *mut c_void) -> c_int;
    send: b"ncclSend" (u64, usize, c_int, c_int, RawComm, *mut c_void) -> c_int;
    receive: b"ncclRecv" (u64, usize, c_int, c_int, RawComm, *mut c_void) -> c_int;
}

/// The library. It stays open as long as any of its objects lives.
pub(crate) struct Nccl {
    functions: Functions,
    version: i32,
    _library: Handle,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({})", written(self.version))
    }
}

/// A version in its usual notation.
pub(crate) fn written(version: i32) -> String {
    // Up to 2.8 the major version was multiplied by 1000, not 10000.
    let (major, rest) = if version < 10_000 {
        (version / 1000, version % 1000)
    } else {
        (version / 10_000, version % 10_000)
    };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

/// The version of a library.
///
/// # Errors
/// If it is not NCCL.
pub(crate) fn version_of(library: &Handle) -> Result<i32> {
    let mut version = 0;
    // SAFETY: NCCL declares the function so.
    let get_version = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion") };
    let status = match get_version {
        // SAFETY: the pointer is to a place of the right type.
        Ok(get_version) => unsafe { get_version(&raw mut version) },
        Err(_) => {
            return Err(Error::new(Code::Unavailable, format!("{LIBRARY} has no function ncclGetVersion")));
        }
    };
    if status != SUCCESS {
        let message = format!("{LIBRARY} does not tell its version: error {status}");
        return Err(Error::new(Code::Unavailable, message));
    }
    Ok(version)
}

impl Nccl {
    /// Opens NCCL where CUDA's libraries are looked for.
    ///
    /// # Errors
    /// [`Code::Unavailable`] if it is missing, too old or incomplete; says where it was searched, and what to do.
    pub(crate) fn open() -> Result<Arc<Self>> {
        Self::open_named(LIBRARY)
    }

    fn open_named(name: &str) -> Result<Arc<Self>> {
        let missing = |reason| {
            let message = format!(
                "{name} is missing: NCCL, which exchanges data between GPUs; install it, or `pip install nvidia-nccl-cu13`. {reason}"
            );
            Error::new(Code::Unavailable, message)
        };
        Self::of(open_by_name(name).map_err(missing)?)
    }

    fn of(library: Handle) -> Result<Arc<Self>> {
        let version = version_of(&library)?;
        if version < OLDEST {
            let message = format!(
                "{LIBRARY} is NCCL {}, but {} or newer is needed; `pip install nvidia-nccl-cu13`, and name its folder in \
                 DSRUN_CUDA_LIBRARIES",
                written(version),
                written(OLDEST)
            );
            return Err(Error::new(Code::Unavailable, message));
        }
        let functions = Functions::load(&library).map_err(|name| {
            let message = format!("{LIBRARY} is NCCL {}, but lacks its function {name}", written(version));
            Error::new(Code::Unavailable, message)
        })?;
        Ok(Arc::new(Self { functions, version, _library: library }))
    }

    /// The version in its own encoding: 22809 is 2.28.9.
    pub(crate) fn version(&self) -> i32 {
        self.version
    }

    /// The id of a new communicator.
    ///
    /// # Errors
    /// If NCCL fails.
    pub(crate) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: the pointer is to a place of the right type.
        let status = unsafe { (self.functions.get_unique_id)(&raw mut id) };
        self.check(status, ptr::null_mut(), "making an id").map(|()| id)
    }

    fn check(&self, status: c_int, comm: RawComm, what: &str) -> Result<()> {
        match status {
            SUCCESS | IN_PROGRESS => Ok(()),
            status => Err(self.error(status, comm, what)),
        }
    }

    fn error(&self, status: c_int, comm: RawComm, what: &str) -> Error {
        // SAFETY: NCCL returns null or terminated texts, which are read at once; it accepts a null communicator.
        let (text, last) =
            unsafe { ((self.functions.error_string)(status), (self.functions.last_error)(comm)) };
        let read = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: as above.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned(),
        };
        let (text, last) = (read(text), read(last));
        let detail = if last.is_empty() { String::new() } else { format!("; {last}") };
        let message = format!("NCCL {}: {what}: {text} ({status}){detail}", written(self.version));
        Error::new(Code::Communication, message)
    }
}

/// A rank's communicator.
pub(crate) struct NcclComm {
    nccl: Arc<Nccl>,
    /// None once it was aborted.
    comm: Mutex<Option<Raw<OpaqueComm>>>,
}

impl fmt::Debug for NcclComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclComm({:?})", self.nccl)
    }
}

/// An operation on device memory, by its addresses and the number of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Reduces `from` of all ranks.
    AllReduce(Reduction),
    /// Concatenates `count` elements of each rank.
    AllGather,
    /// Keeps `count` elements of the result.
    ReduceScatter(Reduction),
    /// Exchanges blocks of `count` elements with this many ranks.
    AllToAll(usize),
    /// Copies the elements of this rank to all others.
    Broadcast(usize),
    /// Sends `from` to a rank.
    Send(usize),
    /// Receives `to` of a rank.
    Receive(usize),
}

/// An operation of a communicator with its memory.
#[derive(Clone, Debug)]
pub(crate) struct NcclCall {
    pub(crate) comm: Arc<NcclComm>,
    pub(crate) operation: Operation,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
}

/// The number of a type in `ncclDataType_t`.
fn number(dtype: DType) -> Result<c_int> {
    Ok(match dtype {
        DType::I8 => 0,
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::BF16 => 9,
        other => return Err(Error::unsupported(format!("NCCL has no elements of {other}"))),
    })
}

/// The number of a reduction in `ncclRedOp_t`.
fn reduction_number(reduction: Reduction) -> c_int {
    match reduction {
        Reduction::Sum => 0,
        Reduction::Max => 2,
        Reduction::Min => 3,
        Reduction::Mean => 4,
    }
}

fn rank_number(rank: usize) -> c_int {
    c_int::try_from(rank).unwrap_or(c_int::MAX)
}

impl NcclComm {
    /// Creates the communicator of a rank, on the device whose context is current, and waits until all ranks have joined.
    ///
    /// # Errors
    /// If NCCL fails, or the ranks are not connected within `timeout`.
    pub(crate) fn join(
        nccl: &Arc<Nccl>,
        id: UniqueId,
        rank: usize,
        ranks: usize,
        timeout: Duration,
    ) -> Result<Self> {
        let (mut comm, mut config) = (ptr::null_mut(), Config::non_blocking());
        let what = format!("connecting rank {rank} of {ranks}");
        let (number, count) = (rank_number(rank), rank_number(ranks));
        // SAFETY: the pointers are to places of the right type; NCCL copies the configuration.
        let status = unsafe { (nccl.functions.init)(&raw mut comm, count, id, number, &raw mut config) };
        let made = Self { nccl: nccl.clone(), comm: Mutex::new((!comm.is_null()).then_some(Raw(comm))) };
        let connected = nccl.check(status, comm, &what).and_then(|()| made.settle(&what, timeout));
        if let Err(error) = connected {
            made.abort();
            return Err(error);
        }
        Ok(made)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Raw<OpaqueComm>>> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no operation is in progress on the host. The communicator may be aborted meanwhile.
    fn settle(&self, what: &str, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            match self.state(what)? {
                SUCCESS => return Ok(()),
                _ if start.elapsed() > timeout => {
                    let message =
                        format!("NCCL {}: {what} took longer than {timeout:.1?}", written(self.nccl.version));
                    return Err(Error::new(Code::Timeout, message));
                }
                _ if start.elapsed() < Duration::from_millis(1) => thread::yield_now(),
                _ => thread::sleep(Duration::from_micros(200)),
            }
        }
    }

    /// The asynchronous state: success, or in progress.
    fn state(&self, what: &str) -> Result<c_int> {
        let locked = self.lock();
        let Some(Raw(comm)) = *locked else { return Err(aborted()) };
        let mut state = SUCCESS;
        // SAFETY: the communicator is live as long as it is locked; the pointer is to a place of the right type.
        let status = unsafe { (self.nccl.functions.async_error)(comm, &raw mut state) };
        self.nccl.check(status, comm, what)?;
        self.nccl.check(state, comm, what).map(|()| state)
    }

    /// Reports whether an operation failed after it was enqueued.
    ///
    /// # Errors
    /// The error of that operation.
    pub(crate) fn status(&self) -> Result<()> {
        self.state("a collective").map(drop)
    }

    /// Aborts all operations, on another thread, because NCCL may block. Waits for that thread, but not for long: if
    /// another process has ended, this can take NCCL longer than anyone waits. A process that exits meanwhile may crash in libraries
    /// that are being unloaded, unless it exits without that.
    pub(crate) fn abort(&self) {
        let Some(comm) = self.lock().take() else { return };
        let nccl = self.nccl.clone();
        let (sender, ended) = mpsc::channel();
        let end = move || {
            let Raw(comm) = { comm };
            // SAFETY: the communicator was taken, so nothing else uses it.
            unsafe { (nccl.functions.abort)(comm) };
            let _ = sender.send(());
        };
        match thread::Builder::new().name("dsrun-nccl-abort".into()).spawn(end) {
            Ok(_) if ended.recv_timeout(ABORT_TIMEOUT).is_ok() => {}
            Ok(_) => tracing::warn!("NCCL takes long to abort a communicator, which is left to it"),
            Err(error) => {
                tracing::error!(%error, "cannot start the thread that ends a communicator, which is leaked");
            }
        }
    }
}

fn aborted() -> Error {
    Error::new(Code::Communication, "the group was aborted")
}

impl NcclCall {
    /// Enqueues the operation on a stream.
    ///
    /// # Errors
    /// If the communicator was aborted or has failed.
    pub(crate) fn enqueue(&self, stream: RawStream) -> Result<()> {
        let Self { comm: owner, operation, from, to, count, dtype } = self;
        let (functions, nccl) = (&owner.nccl.functions, &owner.nccl);
        let locked = owner.lock();
        let Some(Raw(comm)) = *locked else { return Err(aborted()) };
        let (count, number, stream) = (*count, number(*dtype)?, stream.0.cast());
        let (from, to) = (*from, *to);
        // SAFETY: the communicator is live as long as it is locked. The addresses are those of bound operands with room for the
        // elements, which live until the stream's work is done.
        let status = unsafe {
            match *operation {
                Operation::AllReduce(reduction) => {
                    (functions.all_reduce)(from, to, count, number, reduction_number(reduction), comm, stream)
                }
                Operation::AllGather => (functions.all_gather)(from, to, count, number, comm, stream),
                Operation::ReduceScatter(reduction) => {
                    let reduction = reduction_number(reduction);
                    (functions.reduce_scatter)(from, to, count, number, reduction, comm, stream)
                }
                Operation::Broadcast(root) => {
                    (functions.broadcast)(from, to, count, number, rank_number(root), comm, stream)
                }
                Operation::Send(peer) => {
                    (functions.send)(from, count, number, rank_number(peer), comm, stream)
                }
                Operation::Receive(peer) => {
                    (functions.receive)(to, count, number, rank_number(peer), comm, stream)
                }
                Operation::AllToAll(ranks) => {
                    let begun = (functions.group_start)();
                    let block = (count * dtype.bytes()) as u64;
                    let exchange = |rank: usize| {
                        let (place, peer) = (rank as u64 * block, rank_number(rank));
                        let sent = (functions.send)(from + place, count, number, peer, comm, stream);
                        let received = (functions.receive)(to + place, count, number, peer, comm, stream);
                        [sent, received]
                    };
                    let failed = |status: &c_int| !matches!(*status, SUCCESS | IN_PROGRESS);
                    let worst = (0..ranks).flat_map(exchange).find(failed);
                    let ended = (functions.group_end)();
                    worst.or(Some(begun).filter(failed)).unwrap_or(ended)
                }
            }
        };
        let what = format!("enqueueing {operation:?}");
        nccl.check(status, comm, &what)?;
        drop(locked);
        if status == IN_PROGRESS { owner.settle(&what, ENQUEUE_TIMEOUT) } else { Ok(()) }
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        let Some(Raw(comm)) = *self.lock() else { return };
        // SAFETY: the communicator is live, and this is its last owner.
        let status = unsafe { (self.nccl.functions.finalize)(comm) };
        let finished = self.nccl.check(status, comm, "leaving a group");
        match finished.and_then(|()| self.settle("leaving a group", FINISH_TIMEOUT)) {
            // SAFETY: as above; it is used no more.
            Ok(()) => drop(unsafe { (self.nccl.functions.destroy)(comm) }),
            Err(error) => {
                tracing::debug!(%error, "a communicator did not finish and is aborted");
                self.abort();
            }
        }
    }
}

#[cfg(test)]
mod tests;
