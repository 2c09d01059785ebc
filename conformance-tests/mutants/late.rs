//! A device that runs work late, made of one that runs it at once: what a call or copy has written is taken back, and put in
//! place when its stream is waited for.

use crate::{tensor::bytes, wrap::Run};
use dsrun_core::{
    Result,
    device::{BufferSlice, Device, Event, Stream},
};
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// What a stream has written, and nobody sees yet.
struct Pending {
    stream: u64,
    /// The call that wrote it; 0 for a copy.
    call: usize,
    slice: BufferSlice,
    bytes: Vec<u8>,
}

static PENDING: Mutex<Vec<Pending>> = Mutex::new(Vec::new());

fn pending() -> MutexGuard<'static, Vec<Pending>> {
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes later, on a stream of this number.
pub(crate) fn postpone(number: u64, slice: &BufferSlice, bytes: Vec<u8>) {
    push(number, 0, slice, bytes);
}

fn push(stream: u64, call: usize, slice: &BufferSlice, bytes: Vec<u8>) {
    pending().push(Pending { stream, call, slice: slice.clone(), bytes });
}

/// Forgets what a call has written and nobody sees yet.
pub(crate) fn forget(call: usize) {
    pending().retain(|pending| pending.call != call);
}

/// Puts in place what a stream has written so far.
pub(crate) fn finish(number: u64, stream: &mut dyn Stream) -> Result<()> {
    let (own, others) = pending().drain(..).partition(|pending| pending.stream == number);
    *pending() = others;
    let own: Vec<Pending> = own;
    own.iter().try_for_each(|pending| stream.upload(&pending.bytes, &pending.slice))
}

/// Runs the `work` of a call, 0 for a copy, which writes `slices`, and takes back what it has written.
pub(crate) fn postponed(
    number: u64,
    call: usize,
    stream: &mut dyn Stream,
    slices: &[BufferSlice],
    work: impl FnOnce(&mut dyn Stream) -> Result<()>,
) -> Result<()> {
    finish(number, stream)?;
    let old: Vec<Vec<u8>> = slices.iter().map(|slice| bytes(stream, slice)).collect::<Result<_>>()?;
    work(stream)?;
    for (slice, old) in slices.iter().zip(old) {
        let new = bytes(stream, slice)?;
        stream.upload(&old, slice)?;
        push(number, call, slice, new);
    }
    Ok(())
}

/// A call that runs late.
pub(crate) fn call(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let slices: Vec<BufferSlice> = run.arguments.results.iter().map(|result| result.slice.clone()).collect();
    postponed(run.stream.get(), run.address(), stream, &slices, |stream| run.right(stream))
}

/// An event of a late device.
#[derive(Debug)]
pub(crate) struct LateEvent {
    pub(crate) inner: Arc<dyn Event>,
    pub(crate) device: Arc<dyn Device>,
    /// The stream that it was recorded on.
    pub(crate) recorded: AtomicU64,
    /// Whether it is reached before the work is done.
    pub(crate) early: bool,
}

impl LateEvent {
    fn finish(&self) -> Result<()> {
        if self.early {
            return Ok(());
        }
        finish(self.recorded.load(Ordering::SeqCst), &mut *self.device.stream()?)
    }
}

impl Event for LateEvent {
    fn reached(&self) -> Result<bool> {
        self.finish()?;
        self.inner.reached()
    }

    fn synchronize(&self, what: &str, timeout: Duration) -> Result<()> {
        self.finish()?;
        self.inner.synchronize(what, timeout)
    }

    fn elapsed_since(&self, earlier: &dyn Event) -> Result<Option<Duration>> {
        let any: &dyn std::any::Any = earlier;
        self.inner.elapsed_since(any.downcast_ref::<Self>().map_or(earlier, |earlier| &*earlier.inner))
    }
}
