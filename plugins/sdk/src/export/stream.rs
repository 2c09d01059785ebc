//! Shims of streams and events.

use super::{
    objects::{Object, Ours, give_back, hand_out, object, with_stream},
    table::table,
};
use crate::{decode, host_table::returned, prefix, raw::*};
use dsrun_core::{
    Result,
    device::{BufferSlice, Device, Event, Stream},
};
use std::{
    ffi::c_void,
    sync::{Arc, Mutex},
};

impl Object for Arc<dyn Event> {
    type Raw = dsr_event;
    const KIND: usize = 4;
    const NAME: &'static str = "event";
}

pub(super) const STREAM: dsr_stream_api =
    table!(dsr_stream_api { create, free, upload, download, copy, fill, record, wait, synchronize });

pub(super) const EVENT: dsr_event_api = {
    use events::*;
    table!(dsr_event_api { create, free, reached, synchronize, elapsed })
};

/// Decodes a range and checks that it lies inside its buffer.
///
/// # Safety
/// The pointer is null or to a range whose buffer is ours.
pub(super) unsafe fn range(raw: *const dsr_slice, name: &str) -> Result<BufferSlice> {
    prefix::check_out(raw.cast_mut(), name)?;
    // SAFETY: not null and readable, as the caller says.
    let slice = decode::slice(&unsafe { raw.read() }, &mut Ours).map_err(|error| error.at(name))?;
    BufferSlice::new(slice.buffer, slice.offset, slice.bytes).map_err(|error| error.at(name))
}

unsafe extern "C" fn create(device: *mut dsr_device, stream: *mut *mut dsr_stream) -> *mut dsr_status {
    returned(|| {
        prefix::check_out(stream, "stream")?;
        // SAFETY: the caller passes our device and a place for the stream.
        unsafe {
            let made = object::<Arc<dyn Device>>(device)?.stream()?;
            prefix::put(stream, "stream", hand_out(Mutex::new(made)))
        }
    })
}

unsafe extern "C" fn free(stream: *mut dsr_stream) {
    // SAFETY: the caller passes our stream, once.
    unsafe { give_back::<Mutex<Box<dyn Stream>>>(stream) }
}

unsafe extern "C" fn upload(
    stream: *mut dsr_stream,
    source: *const c_void,
    length: usize,
    destination: *const dsr_slice,
) -> *mut dsr_status {
    // SAFETY: the caller passes our stream, a range of our buffers and memory of the stated length.
    returned(|| unsafe {
        let (source, destination) =
            (prefix::bytes(source.cast(), length, "source")?, range(destination, "destination")?);
        with_stream(stream, |stream| stream.upload(source, &destination))
    })
}

unsafe extern "C" fn download(
    stream: *mut dsr_stream,
    source: *const dsr_slice,
    destination: *mut c_void,
    length: usize,
    what: dsr_str,
    timeout_nanoseconds: u64,
) -> *mut dsr_status {
    // SAFETY: as in `upload`.
    returned(|| unsafe {
        let source = range(source, "source")?;
        let destination = prefix::bytes_mut(destination.cast(), length, "destination")?;
        let (what, timeout) = (prefix::text(what), decode::timeout(timeout_nanoseconds));
        with_stream(stream, |stream| stream.download(&source, destination, &what, timeout))
    })
}

unsafe extern "C" fn copy(
    stream: *mut dsr_stream,
    source: *const dsr_slice,
    destination: *const dsr_slice,
) -> *mut dsr_status {
    // SAFETY: as in `upload`.
    returned(|| unsafe {
        let (source, destination) = (range(source, "source")?, range(destination, "destination")?);
        with_stream(stream, |stream| stream.copy(&source, &destination))
    })
}

unsafe extern "C" fn fill(
    stream: *mut dsr_stream,
    destination: *const dsr_slice,
    byte: u32,
) -> *mut dsr_status {
    // SAFETY: as in `upload`.
    returned(|| unsafe {
        let destination = range(destination, "destination")?;
        let wrong = |_| dsrun_core::Error::invalid(format!("is {byte}, must be below 256")).at("byte");
        let byte = u8::try_from(byte).map_err(wrong)?;
        with_stream(stream, |stream| stream.fill(&destination, byte))
    })
}

unsafe extern "C" fn record(stream: *mut dsr_stream, event: *mut dsr_event) -> *mut dsr_status {
    // SAFETY: the caller passes our stream and event.
    returned(|| unsafe {
        let event = object::<Arc<dyn Event>>(event)?;
        with_stream(stream, |stream| stream.record(&**event))
    })
}

unsafe extern "C" fn wait(stream: *mut dsr_stream, event: *mut dsr_event) -> *mut dsr_status {
    // SAFETY: the caller passes our stream and event.
    returned(|| unsafe {
        let event = object::<Arc<dyn Event>>(event)?;
        with_stream(stream, |stream| stream.wait(&**event))
    })
}

unsafe extern "C" fn synchronize(
    stream: *mut dsr_stream,
    what: dsr_str,
    timeout_nanoseconds: u64,
) -> *mut dsr_status {
    // SAFETY: the caller passes our stream and a text.
    returned(|| unsafe {
        let (what, timeout) = (prefix::text(what), decode::timeout(timeout_nanoseconds));
        with_stream(stream, |stream| stream.synchronize(&what, timeout))
    })
}

/// Shims of events, in a module because some have the names of shims of streams.
mod events {
    use super::*;

    pub(super) unsafe extern "C" fn create(
        device: *mut dsr_device,
        event: *mut *mut dsr_event,
    ) -> *mut dsr_status {
        returned(|| {
            prefix::check_out(event, "event")?;
            // SAFETY: the caller passes our device and a place for the event.
            unsafe {
                let made = object::<Arc<dyn Device>>(device)?.event()?;
                prefix::put(event, "event", hand_out(made))
            }
        })
    }

    pub(super) unsafe extern "C" fn free(event: *mut dsr_event) {
        // SAFETY: the caller passes our event, once.
        unsafe { give_back::<Arc<dyn Event>>(event) }
    }

    pub(super) unsafe extern "C" fn reached(event: *mut dsr_event, reached: *mut u32) -> *mut dsr_status {
        // SAFETY: the caller passes our event and a place for the answer.
        returned(|| unsafe {
            prefix::check_out(reached, "reached")?;
            let answer = object::<Arc<dyn Event>>(event)?.reached()?;
            prefix::put(reached, "reached", u32::from(answer))
        })
    }

    pub(super) unsafe extern "C" fn synchronize(
        event: *mut dsr_event,
        what: dsr_str,
        timeout_nanoseconds: u64,
    ) -> *mut dsr_status {
        // SAFETY: the caller passes our event and a text.
        returned(|| unsafe {
            let timeout = decode::timeout(timeout_nanoseconds);
            object::<Arc<dyn Event>>(event)?.synchronize(&prefix::text(what), timeout)
        })
    }

    pub(super) unsafe extern "C" fn elapsed(
        event: *mut dsr_event,
        earlier: *mut dsr_event,
        nanoseconds: *mut u64,
    ) -> *mut dsr_status {
        // SAFETY: the caller passes our events and a place for the answer.
        returned(|| unsafe {
            prefix::check_out(nanoseconds, "nanoseconds")?;
            let (event, earlier) = (object::<Arc<dyn Event>>(event)?, object::<Arc<dyn Event>>(earlier)?);
            let elapsed = event.elapsed_since(&**earlier)?;
            prefix::put(nanoseconds, "nanoseconds", elapsed.map_or(DSR_NONE, crate::encode::timeout))
        })
    }
}
