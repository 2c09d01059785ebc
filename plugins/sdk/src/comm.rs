//! Groups of ranks across the ABI. A plugin without a collective library uses the transport of the host.

use super::{decode, host_table::HostTable, prefix, raw::*, status};
use dsrun_core::{
    DType, Error, Result,
    collective::{
        Comm,
        host::{HostComm, HostTransport},
    },
    op::Reduction,
};
use std::{any::Any, ffi::c_void, fmt, ptr, sync::Arc};

/// A group that has only a rank and a size, for validating a description.
#[derive(Debug)]
pub(super) struct RanksOnly {
    rank: usize,
    ranks: usize,
}

impl RanksOnly {
    pub(super) fn comm(call: &dsr_call_desc) -> Result<Arc<dyn Comm>> {
        Ok(Arc::new(Self { rank: call.rank as usize, ranks: call.ranks as usize }))
    }
}

impl Comm for RanksOnly {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn status(&self) -> Result<()> {
        Ok(())
    }

    fn abort(&self, _: &str) {}
}

/// The host's side of a transport: a [`HostComm`] as a function table.
pub(super) struct OfferedTransport {
    raw: dsr_transport,
    _comm: Arc<dyn Comm>,
}

// SAFETY: the context of the table is the group beside it, which is kept alive and may be used from any thread.
unsafe impl Send for OfferedTransport {}
// SAFETY: as above.
unsafe impl Sync for OfferedTransport {}

impl fmt::Debug for OfferedTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OfferedTransport").field(&self._comm).finish()
    }
}

impl OfferedTransport {
    /// # Errors
    /// If the group is not a [`HostComm`].
    pub(super) fn new(comm: Arc<dyn Comm>) -> Result<Box<Self>> {
        let number = |number: usize| {
            u32::try_from(number).map_err(|_| Error::invalid("has more ranks than the ABI can count"))
        };
        let any: &dyn Any = &*comm;
        let Some(host) = any.downcast_ref::<HostComm>() else {
            return Err(Error::invalid("is a group of another backend").at("comm"));
        };
        let raw = dsr_transport {
            rank: number(host.rank())?,
            ranks: number(host.ranks())?,
            context: ptr::from_ref(host).cast_mut().cast(),
            all_reduce: Some(all_reduce),
            reduce_scatter: Some(reduce_scatter),
            all_gather: Some(all_gather),
            all_to_all: Some(all_to_all),
            broadcast: Some(broadcast),
            barrier: Some(barrier),
            send: Some(send),
            receive: Some(receive),
            status: Some(transport_status),
            abort: Some(abort),
            ..prefix::zeroed()
        };
        Ok(Box::new(Self { raw, _comm: comm }))
    }

    pub(super) fn as_raw(&self) -> *const dsr_transport {
        &raw const self.raw
    }
}

/// Runs a function of the table on its group.
///
/// # Safety
/// `context` is that of the table, whose owner is alive.
unsafe fn with(context: *mut c_void, run: impl FnOnce(&HostComm) -> Result<()>) -> *mut dsr_status {
    status::returned(|| {
        // SAFETY: null, or the group that `OfferedTransport` keeps alive.
        let comm = unsafe { context.cast::<HostComm>().as_ref() };
        run(comm.ok_or_else(|| Error::invalid("is null").at("context"))?)
    })
}

fn reduction(number: u32) -> Result<Reduction> {
    let known = Reduction::ALL.iter().copied().find(|reduction| *reduction as u32 == number);
    known.ok_or_else(|| Error::unsupported(format!("is {number}, which is not a reduction")).at("reduction"))
}

unsafe extern "C" fn all_reduce(
    context: *mut c_void,
    bytes: *mut c_void,
    length: usize,
    dtype: u32,
    op: u32,
) -> *mut dsr_status {
    // SAFETY: the caller passes the context of the table and memory of the stated length.
    unsafe {
        with(context, |comm| {
            let bytes = prefix::bytes_mut(bytes.cast(), length, "bytes")?;
            comm.all_reduce(bytes, decode::dtype(dtype)?, reduction(op)?)
        })
    }
}

unsafe extern "C" fn reduce_scatter(
    context: *mut c_void,
    source: *const c_void,
    destination: *mut c_void,
    length: usize,
    dtype: u32,
    op: u32,
) -> *mut dsr_status {
    // SAFETY: as in `all_reduce`.
    unsafe {
        with(context, |comm| {
            let all =
                length.checked_mul(comm.ranks()).ok_or_else(|| Error::invalid("overflows").at("length"))?;
            let source = prefix::bytes(source.cast(), all, "source")?;
            let destination = prefix::bytes_mut(destination.cast(), length, "destination")?;
            comm.reduce_scatter(source, destination, decode::dtype(dtype)?, reduction(op)?)
        })
    }
}

unsafe extern "C" fn all_gather(
    context: *mut c_void,
    source: *const c_void,
    destination: *mut c_void,
    length: usize,
) -> *mut dsr_status {
    // SAFETY: as in `all_reduce`.
    unsafe {
        with(context, |comm| {
            let all =
                length.checked_mul(comm.ranks()).ok_or_else(|| Error::invalid("overflows").at("length"))?;
            let parts = comm.all_gather(prefix::bytes(source.cast(), length, "source")?)?;
            let mut rest = prefix::bytes_mut(destination.cast(), all, "destination")?;
            for part in parts {
                let (share, next) = rest
                    .split_at_mut_checked(part.len())
                    .ok_or_else(|| Error::invalid("differs between ranks").at("length"))?;
                share.copy_from_slice(&part);
                rest = next;
            }
            Ok(())
        })
    }
}

unsafe extern "C" fn all_to_all(
    context: *mut c_void,
    source: *const c_void,
    destination: *mut c_void,
    length: usize,
) -> *mut dsr_status {
    // SAFETY: as in `all_reduce`.
    unsafe {
        with(context, |comm| {
            let source = prefix::bytes(source.cast(), length, "source")?;
            comm.all_to_all(source, prefix::bytes_mut(destination.cast(), length, "destination")?)
        })
    }
}

unsafe extern "C" fn broadcast(
    context: *mut c_void,
    bytes: *mut c_void,
    length: usize,
    root: u32,
) -> *mut dsr_status {
    // SAFETY: as in `all_reduce`.
    unsafe {
        with(context, |comm| comm.broadcast(prefix::bytes_mut(bytes.cast(), length, "bytes")?, root as usize))
    }
}

unsafe extern "C" fn barrier(context: *mut c_void) -> *mut dsr_status {
    // SAFETY: the caller passes the context of the table.
    unsafe { with(context, HostComm::barrier) }
}

unsafe extern "C" fn send(
    context: *mut c_void,
    bytes: *const c_void,
    length: usize,
    peer: u32,
) -> *mut dsr_status {
    // SAFETY: as in `all_reduce`.
    unsafe { with(context, |comm| comm.send(prefix::bytes(bytes.cast(), length, "bytes")?, peer as usize)) }
}

unsafe extern "C" fn receive(
    context: *mut c_void,
    bytes: *mut c_void,
    length: usize,
    peer: u32,
) -> *mut dsr_status {
    // SAFETY: as in `all_reduce`.
    unsafe {
        with(context, |comm| comm.receive(prefix::bytes_mut(bytes.cast(), length, "bytes")?, peer as usize))
    }
}

unsafe extern "C" fn transport_status(context: *mut c_void) -> *mut dsr_status {
    // SAFETY: the caller passes the context of the table.
    unsafe { with(context, Comm::status) }
}

unsafe extern "C" fn abort(context: *mut c_void, reason: dsr_str) {
    // SAFETY: the caller passes the context of the table and a readable text.
    let status = unsafe {
        with(context, |comm| {
            comm.abort(&prefix::text(reason));
            Ok(())
        })
    };
    // SAFETY: just made here.
    drop(unsafe { status::take(status) });
}

/// The plugin's side of a transport: a function table as a [`HostTransport`].
pub(super) struct GivenTransport {
    raw: dsr_transport,
    host: HostTable,
}

// SAFETY: the table is valid as long as the plan that holds this, and may move between threads.
unsafe impl Send for GivenTransport {}
// SAFETY: the transport of the host is the `HostComm` of `OfferedTransport`, which does its own locking.
unsafe impl Sync for GivenTransport {}

impl fmt::Debug for GivenTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GivenTransport(rank {} of {})", self.raw.rank, self.raw.ranks)
    }
}

impl GivenTransport {
    /// A group over the transport in a description.
    ///
    /// # Errors
    /// If the table cannot be read, or lacks a function.
    ///
    /// # Safety
    /// `pointer` is null or to a transport that is valid as long as the result.
    pub(super) unsafe fn comm(pointer: *const dsr_transport, host: HostTable) -> Result<Arc<dyn Comm>> {
        // SAFETY: as the caller says.
        let raw = unsafe { prefix::read(pointer) }?;
        let (rank, ranks) = (raw.rank as usize, raw.ranks as usize);
        Ok(Arc::new(HostComm::over(Box::new(Self { raw, host }), rank, ranks)?))
    }
}

/// Calls a function of the table.
macro_rules! given {
    ($self:ident.$function:ident($($argument:expr),*)) => {{
        let function = $self.raw.$function.ok_or_else(|| {
            Error::unsupported(concat!("the transport of the host has no ", stringify!($function)))
        })?;
        // SAFETY: a function of the host with its context, and memory that is borrowed during the call.
        let status = unsafe { function($self.raw.context $(, $argument)*) };
        $self.host.take(status)
    }};
}

impl HostTransport for GivenTransport {
    fn all_reduce(&self, bytes: &mut [u8], dtype: DType, reduction: Reduction) -> Result<()> {
        given!(self.all_reduce(bytes.as_mut_ptr().cast(), bytes.len(), dtype as u32, reduction as u32))
    }

    fn reduce_scatter(
        &self,
        source: &[u8],
        destination: &mut [u8],
        dtype: DType,
        reduction: Reduction,
    ) -> Result<()> {
        // `HostComm` has checked that `source` is as long as all shares.
        let (length, dtype, reduction) = (destination.len(), dtype as u32, reduction as u32);
        let (source, destination) = (source.as_ptr().cast(), destination.as_mut_ptr().cast());
        given!(self.reduce_scatter(source, destination, length, dtype, reduction))
    }

    fn all_gather(&self, source: &[u8], destination: &mut [u8]) -> Result<()> {
        given!(self.all_gather(source.as_ptr().cast(), destination.as_mut_ptr().cast(), source.len()))
    }

    fn all_to_all(&self, source: &[u8], destination: &mut [u8]) -> Result<()> {
        given!(self.all_to_all(source.as_ptr().cast(), destination.as_mut_ptr().cast(), source.len()))
    }

    fn broadcast(&self, bytes: &mut [u8], root: usize) -> Result<()> {
        given!(self.broadcast(bytes.as_mut_ptr().cast(), bytes.len(), root as u32))
    }

    fn barrier(&self) -> Result<()> {
        given!(self.barrier())
    }

    fn send(&self, bytes: &[u8], peer: usize) -> Result<()> {
        given!(self.send(bytes.as_ptr().cast(), bytes.len(), peer as u32))
    }

    fn receive(&self, bytes: &mut [u8], peer: usize) -> Result<()> {
        given!(self.receive(bytes.as_mut_ptr().cast(), bytes.len(), peer as u32))
    }

    fn status(&self) -> Result<()> {
        given!(self.status())
    }

    fn abort(&self, reason: &str) {
        if let Some(abort) = self.raw.abort {
            // SAFETY: a function of the host with its context, and a text that lives during the call.
            unsafe { abort(self.raw.context, prefix::str_of(reason)) };
        }
    }
}
