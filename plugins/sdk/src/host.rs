//! The function table of the host: errors, texts, log and validation.

use super::{comm::RanksOnly, decode, prefix, raw::*, status};
use dsrun_core::{
    Error, Result, WeightType,
    checked::{BindLimits, ValidCall},
    device::{Buffer, MemoryKind},
    kernels::PackedWeight,
};
use std::{
    collections::HashMap,
    ffi::c_void,
    path::Path,
    ptr,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The number of validated calls that plugins keep.
static LIVE_CALLS: AtomicUsize = AtomicUsize::new(0);

/// The objects of this host that exist now. A plugin that frees what it owns leaves these numbers as they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveObjects {
    /// Errors that were made, and neither returned nor freed.
    pub errors: usize,
    /// Calls that `validate_call` has kept for plugins.
    pub calls: usize,
}

impl LiveObjects {
    /// The numbers now. Other threads that use plugins change them.
    pub fn now() -> Self {
        Self { errors: status::LIVE.load(Ordering::Relaxed), calls: LIVE_CALLS.load(Ordering::Relaxed) }
    }
}

/// The target of a `dsr_host` pointer.
struct Host {
    /// The file that the plugin was loaded from; empty if it is linked into the program.
    library: String,
}

/// The table for a plugin that is linked into the program.
pub(super) fn linked() -> &'static dsr_host_api {
    static LINKED: LazyLock<&'static SharedTable> = LazyLock::new(|| leak(String::new()));
    &LINKED.0
}

/// The table for a plugin that is loaded from a file. It is never freed, because the plugin is never unloaded.
pub(super) fn loaded(library: &Path) -> &'static dsr_host_api {
    &leak(library.to_string_lossy().into_owned()).0
}

struct SharedTable(dsr_host_api);

// SAFETY: the table and the `Host` that it points to never change.
unsafe impl Send for SharedTable {}
// SAFETY: as above.
unsafe impl Sync for SharedTable {}

fn leak(library: String) -> &'static SharedTable {
    let host: &'static Host = Box::leak(Box::new(Host { library }));
    Box::leak(Box::new(SharedTable(dsr_host_api {
        abi_major: DSR_ABI_MAJOR,
        abi_minor: DSR_ABI_MINOR,
        host: ptr::from_ref(host).cast_mut().cast(),
        library_path: prefix::str_of(&host.library),
        status_new: Some(status_new),
        status_get: Some(status_get),
        status_free: Some(status_free),
        text_set: Some(text_set),
        log: Some(log),
        validate_call: Some(validate_call),
        validate_arguments: Some(validate_arguments),
        checked_call_free: Some(checked_call_free),
        get_extension: Some(get_extension),
        ..prefix::zeroed()
    })))
}

/// The receiver of a text that a plugin sets.
#[derive(Default)]
pub(super) struct TextSink(String);

impl TextSink {
    pub(super) fn as_raw(&mut self) -> *mut dsr_text {
        ptr::from_mut(self).cast()
    }

    pub(super) fn into_text(self) -> String {
        self.0
    }
}

unsafe extern "C" fn status_new(_: *mut dsr_host, error: *const dsr_error) -> *mut dsr_status {
    let made = status::catch(|| {
        // SAFETY: a plugin passes a `dsr_error` with readable texts.
        unsafe { Ok(status::from_description(&prefix::read(error)?)) }
    });
    status::into_raw(made.unwrap_or_else(|error| error))
}

unsafe extern "C" fn status_get(_: *mut dsr_host, raw: *const dsr_status, error: *mut dsr_error) {
    let wrote = status::catch(|| {
        // SAFETY: a plugin passes a `dsr_error` to fill in, and null or an error that the host made and that is not freed.
        unsafe {
            prefix::read(error)?;
            let described = match raw.cast::<Error>().as_ref() {
                Some(known) => status::describe(known),
                None => prefix::zeroed(),
            };
            prefix::write(error, &described);
        }
        Ok(())
    });
    if let Err(error) = wrote {
        tracing::error!("a plugin reads an error into an invalid struct: {error}");
    }
}

unsafe extern "C" fn status_free(_: *mut dsr_host, raw: *mut dsr_status) {
    // SAFETY: a plugin frees an error that the host made and that the plugin owns.
    drop(unsafe { status::take(raw) });
}

unsafe extern "C" fn text_set(_: *mut dsr_host, text: *mut dsr_text, value: dsr_str) {
    // SAFETY: null, or the receiver that the plugin was given for the call it is in; `value` is readable.
    unsafe {
        if let Some(sink) = text.cast::<TextSink>().as_mut() {
            sink.0 = prefix::text(value).into_owned();
        }
    }
}

unsafe extern "C" fn log(host: *mut dsr_host, level: u32, message: dsr_str) {
    let logged = status::catch(|| {
        // SAFETY: null, or the host pointer of the table, which is never freed; `message` is readable.
        let (host, message) = unsafe { (host.cast::<Host>().as_ref(), prefix::text(message)) };
        let plugin = host.map_or("", |host| &host.library);
        match level {
            0 | DSR_LOG_ERROR => tracing::error!(plugin, "{message}"),
            DSR_LOG_WARN => tracing::warn!(plugin, "{message}"),
            DSR_LOG_INFO => tracing::info!(plugin, "{message}"),
            DSR_LOG_DEBUG => tracing::debug!(plugin, "{message}"),
            _ => tracing::trace!(plugin, "{message}"),
        }
        Ok(())
    });
    // A panic of the subscriber cannot be reported anywhere.
    drop(logged);
}

unsafe extern "C" fn get_extension(_: *mut dsr_host, _: dsr_str) -> *const c_void {
    // The host has no extensions yet.
    ptr::null()
}

unsafe extern "C" fn validate_call(
    _: *mut dsr_host,
    call: *const dsr_call_desc,
    kept: *mut *mut dsr_checked_call,
) -> *mut dsr_status {
    status::returned(|| {
        // SAFETY: a plugin passes the description that it was given.
        let call = unsafe { decode::call(call, RanksOnly::comm) }?;
        if kept.is_null() {
            return Ok(());
        }
        prefix::check_out(kept, "kept")?;
        // SAFETY: an output parameter of the plugin.
        unsafe { prefix::put(kept, "kept", Box::into_raw(Box::new(call)).cast())? };
        LIVE_CALLS.fetch_add(1, Ordering::Relaxed);
        Ok(())
    })
}

unsafe extern "C" fn validate_arguments(
    _: *mut dsr_host,
    call: *const dsr_checked_call,
    arguments: *const dsr_arguments,
    limits: *const dsr_bind_limits,
) -> *mut dsr_status {
    status::returned(|| {
        // SAFETY: a plugin passes null or a copy that `validate_call` made and that is not freed, and its own limits.
        let (call, limits) = unsafe { (call.cast::<ValidCall>().as_ref(), prefix::read(limits)?) };
        let call = call.ok_or_else(|| Error::invalid("is null").at("call"))?;
        let mut known = KnownObjects { limits, buffers: HashMap::new() };
        // SAFETY: a plugin passes the arguments that it was given.
        let arguments = unsafe { decode::arguments(arguments, call, &mut known) }?;
        let workspace_bytes = prefix::size(limits.workspace_bytes, "workspace")?;
        call.check_arguments(&arguments, BindLimits { alignment: limits.alignment as usize, workspace_bytes })
    })
}

unsafe extern "C" fn checked_call_free(_: *mut dsr_host, call: *mut dsr_checked_call) {
    if !call.is_null() {
        LIVE_CALLS.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: a plugin frees a copy that `validate_call` made, once.
        drop(unsafe { Box::from_raw(call.cast::<ValidCall>()) });
    }
}

/// The buffers and weights of a plugin, as its `dsr_bind_limits` describe them.
struct KnownObjects {
    limits: dsr_bind_limits,
    /// One object for each handle, so that aliasing is detected.
    buffers: HashMap<*mut dsr_buffer, Arc<dyn Buffer>>,
}

impl decode::Objects for KnownObjects {
    fn buffer(&mut self, handle: *mut dsr_buffer) -> Result<Arc<dyn Buffer>> {
        if let Some(known) = self.buffers.get(&handle) {
            return Ok(known.clone());
        }
        let length = self.limits.buffer_bytes.map_or(DSR_NONE, |bytes| {
            // SAFETY: a function of the plugin with its context.
            unsafe { bytes(self.limits.context, handle) }
        });
        if length == DSR_NONE {
            return Err(Error::invalid("is not a buffer of this backend").field("buffer"));
        }
        let buffer: Arc<dyn Buffer> = Arc::new(ElsewhereBuffer(prefix::size(length, "buffer")?));
        self.buffers.insert(handle, buffer.clone());
        Ok(buffer)
    }

    fn weight(&mut self, handle: *mut dsr_weight) -> Result<Arc<dyn PackedWeight>> {
        let mut weight_type =
            dsr_weight_type { format: 0, rank: 0, shape: [0; DSR_MAX_RANK], reserved: [0; 2] };
        let known = self.limits.weight_type.is_some_and(|ask| {
            // SAFETY: a function of the plugin with its context and a writable type.
            unsafe { ask(self.limits.context, handle, &raw mut weight_type) != 0 }
        });
        if !known {
            return Err(Error::invalid("is not a weight of this backend").field("weight"));
        }
        Ok(Arc::new(ElsewhereWeight(decode::weight_type(&weight_type)?)))
    }
}

#[derive(Debug)]
struct ElsewhereBuffer(usize);

impl Buffer for ElsewhereBuffer {
    fn bytes(&self) -> usize {
        self.0
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Device
    }
}

#[derive(Debug)]
struct ElsewhereWeight(WeightType);

impl PackedWeight for ElsewhereWeight {
    fn weight_type(&self) -> &WeightType {
        &self.0
    }

    fn bytes(&self) -> usize {
        0
    }
}
