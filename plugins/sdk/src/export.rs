//! The export of a Rust [`Backend`] as the C tables of a plugin.
//!
//! Every function of the tables is a shim that decodes and validates its parameters, calls the trait, and converts an error or
//! panic to a status of the host. It validates because anyone may call the tables. The handle of an object points to a box
//! with a tag, by which null and foreign handles are detected.

mod device;
mod diagnose;
mod group;
mod log;
mod op;
mod prepare;
mod stream;

use super::{prefix, raw::*, status};
use dsrun_core::{Code, Error, Result, device::Backend};
use std::{
    ptr,
    sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, TryLockError},
};

/// Exports a backend from a dynamic library as the symbol of a plugin.
///
/// The expression makes the backend, and may use `?` on results of dsrun-core. It runs once, when the plugin is loaded.
///
/// Use this in a crate whose only type is `cdylib`, because two backends that are linked into one program would define the
/// same symbol. To call a linked backend through its tables, use [`backend_entry!`].
///
/// ```ignore
/// dsrun_plugin_sdk::export_backend!(MyBackend::new());
/// ```
///
/// [`backend_entry!`]: crate::backend_entry
#[macro_export]
macro_rules! export_backend {
    ($backend:expr) => {
        /// The entry of this plugin.
        ///
        /// # Safety
        /// The caller fulfils the contract of `dsrun.h`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn dsrun_plugin_entry_v0(
            host: *const $crate::raw::dsr_host_api,
            plugin: *mut *const $crate::raw::dsr_plugin_api,
        ) -> *mut $crate::raw::dsr_status {
            static EXPORT: $crate::Export = $crate::Export::new(
                || {
                    let backend: $crate::dsrun_core::Result<_> = (|| ::core::result::Result::Ok($backend))();
                    ::core::result::Result::Ok(::std::sync::Arc::new(backend?))
                },
                cfg!(panic = "abort"),
            );
            // SAFETY: as the caller says.
            unsafe { EXPORT.enter_library(host, plugin) }
        }
    };
}

/// Defines the entry function of a backend that is linked into the program, for [`PluginBackend::from_entry`]. It has the
/// tables of a plugin without a library and without a symbol.
///
/// [`PluginBackend::from_entry`]: crate::PluginBackend::from_entry
#[macro_export]
macro_rules! backend_entry {
    ($backend:expr) => {{
        unsafe extern "C" fn entry(
            host: *const $crate::raw::dsr_host_api,
            plugin: *mut *const $crate::raw::dsr_plugin_api,
        ) -> *mut $crate::raw::dsr_status {
            static EXPORT: $crate::Export = $crate::Export::new(
                || {
                    let backend: $crate::dsrun_core::Result<_> = (|| ::core::result::Result::Ok($backend))();
                    ::core::result::Result::Ok(::std::sync::Arc::new(backend?))
                },
                cfg!(panic = "abort"),
            );
            // SAFETY: as the caller says.
            unsafe { EXPORT.enter(host, plugin) }
        }
        entry as $crate::raw::dsr_plugin_entry
    }};
}

/// The host of this copy of the crate. Every plugin has its own copy; a program that uses its own backends through the tables is
/// its own host.
static HOST: OnceLock<HostTable> = OnceLock::new();

/// The table for a host of another version, which has only the version of this crate.
struct VersionOnly(dsr_plugin_api);

// SAFETY: the table never changes, and its pointers are null.
unsafe impl Send for VersionOnly {}
// SAFETY: as above.
unsafe impl Sync for VersionOnly {}

static VERSION_ONLY: LazyLock<VersionOnly> = LazyLock::new(|| {
    VersionOnly(dsr_plugin_api { abi_major: DSR_ABI_MAJOR, abi_minor: DSR_ABI_MINOR, ..prefix::zeroed() })
});

/// The functions of the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostTable {
    host: *mut dsr_host,
    status_new: unsafe extern "C" fn(*mut dsr_host, *const dsr_error) -> *mut dsr_status,
    status_get: unsafe extern "C" fn(*mut dsr_host, *const dsr_status, *mut dsr_error),
    status_free: unsafe extern "C" fn(*mut dsr_host, *mut dsr_status),
    text_set: unsafe extern "C" fn(*mut dsr_host, *mut dsr_text, dsr_str),
    log: unsafe extern "C" fn(*mut dsr_host, u32, dsr_str),
}

// SAFETY: the functions are valid forever, and any thread may call them with the pointer beside them.
unsafe impl Send for HostTable {}
// SAFETY: as above.
unsafe impl Sync for HostTable {}

impl HostTable {
    /// The functions of a host of this version; `None` if the host has another version.
    ///
    /// # Safety
    /// The pointer is null or to a host's table.
    unsafe fn read(pointer: *const dsr_host_api) -> Option<Self> {
        // SAFETY: as the caller says.
        let table = unsafe { prefix::read(pointer) }.ok()?;
        if (table.abi_major, table.abi_minor) != (DSR_ABI_MAJOR, DSR_ABI_MINOR) {
            return None;
        }
        Some(Self {
            host: table.host,
            status_new: table.status_new?,
            status_get: table.status_get?,
            status_free: table.status_free?,
            text_set: table.text_set?,
            log: table.log?,
        })
    }

    /// Makes a status of the host from an error.
    fn error(&self, error: &Error) -> *mut dsr_status {
        let description = status::describe(error);
        // SAFETY: a function of the host, and a description that lives during the call.
        unsafe { (self.status_new)(self.host, &raw const description) }
    }

    /// Converts a status of the host and frees it.
    ///
    /// # Errors
    /// The error of the status.
    pub(super) fn take(&self, raw: *mut dsr_status) -> Result<()> {
        if raw.is_null() {
            return Ok(());
        }
        let mut description: dsr_error = prefix::zeroed();
        // SAFETY: functions of the host, its status, which is not used afterwards, and a description whose texts live until the
        // status is freed.
        Err(unsafe {
            (self.status_get)(self.host, raw, &raw mut description);
            let error = status::from_description(&description);
            (self.status_free)(self.host, raw);
            error
        })
    }

    fn set_text(&self, text: *mut dsr_text, value: &str) {
        // SAFETY: a function of the host, its receiver, and a text that lives during the call.
        unsafe { (self.text_set)(self.host, text, prefix::str_of(value)) };
    }

    fn log(&self, level: u32, message: &str) {
        // SAFETY: a function of the host, and a text that lives during the call.
        unsafe { (self.log)(self.host, level, prefix::str_of(message)) };
    }
}

/// A backend to export, which [`export_backend!`](crate::export_backend) and [`backend_entry!`](crate::backend_entry) define.
#[derive(Debug)]
pub struct Export {
    make: fn() -> Result<Arc<dyn Backend>>,
    aborts_on_panic: bool,
    made: Mutex<Option<&'static Made>>,
}

/// An exported backend, which is made once and never dropped.
#[derive(Debug)]
struct Made {
    backend: Arc<dyn Backend>,
    api: dsr_plugin_api,
}

// SAFETY: the targets of the pointers never change and are never freed.
unsafe impl Send for Made {}
// SAFETY: as above.
unsafe impl Sync for Made {}

impl Export {
    /// A backend that `make` makes on first use. `aborts_on_panic` is whether the library is built with `panic = "abort"`.
    pub const fn new(make: fn() -> Result<Arc<dyn Backend>>, aborts_on_panic: bool) -> Self {
        Self { make, aborts_on_panic, made: Mutex::new(None) }
    }

    /// The entry function of a backend in the same program as its host.
    ///
    /// # Safety
    /// As `dsr_plugin_entry` in `dsrun.h`: `host` is a table that is valid forever, and `plugin` is writable.
    pub unsafe fn enter(
        &'static self,
        host: *const dsr_host_api,
        plugin: *mut *const dsr_plugin_api,
    ) -> *mut dsr_status {
        // SAFETY: as the caller says.
        unsafe { self.enter_with(host, plugin, |_| {}) }
    }

    /// The entry function of a library, whose panics and `tracing` events go to the log of the host.
    ///
    /// # Safety
    /// As [`Self::enter`].
    pub unsafe fn enter_library(
        &'static self,
        host: *const dsr_host_api,
        plugin: *mut *const dsr_plugin_api,
    ) -> *mut dsr_status {
        // A library has its own copy of the standard library, so this hook affects only the library.
        let install = |host: HostTable| {
            let say =
                move |panic: &std::panic::PanicHookInfo<'_>| host.log(DSR_LOG_ERROR, &panic.to_string());
            std::panic::set_hook(Box::new(say));
            // A library that has set its own subscriber keeps it.
            let _ = tracing::subscriber::set_global_default(log::ToHost(host));
        };
        // SAFETY: as the caller says.
        unsafe { self.enter_with(host, plugin, install) }
    }

    unsafe fn enter_with(
        &'static self,
        host: *const dsr_host_api,
        plugin: *mut *const dsr_plugin_api,
        install: impl FnOnce(HostTable),
    ) -> *mut dsr_status {
        // SAFETY: as the caller says.
        let Some(host) = (unsafe { HostTable::read(host) }) else {
            // Functions of a table of another version must not be called, not even to make an error. The host reads the version
            // from the table set here.
            if prefix::check_out(plugin, "plugin").is_ok() {
                // SAFETY: not null, and writable as the caller says.
                unsafe { plugin.write(&raw const VERSION_ONLY.0) };
            }
            return ptr::null_mut();
        };
        if HOST.get_or_init(|| host).status_new as usize != host.status_new as usize {
            let message = "the library already serves another host in this process";
            return host.error(&Error::new(Code::FailedPrecondition, message));
        }
        install(host);
        returned(|| {
            prefix::check_out(plugin, "plugin")?;
            let made = self.made()?;
            // SAFETY: `plugin` is writable, as the caller says.
            unsafe { prefix::put(plugin, "plugin", &raw const made.api) }
        })
    }

    /// The backend, made on first use. After a failure the next call tries again.
    fn made(&self) -> Result<&'static Made> {
        let panicked = |_| Error::new(Code::Panic, "the constructor of the backend has panicked");
        let mut slot = self.made.lock().map_err(panicked)?;
        if let Some(made) = *slot {
            return Ok(made);
        }
        let backend = (self.make)()?;
        let api = device::plugin_api(&backend, self.aborts_on_panic);
        let made: &'static mut Made = Box::leak(Box::new(Made { backend, api }));
        let handle = ptr::from_mut(made).cast();
        made.api.backend = handle;
        *slot = Some(made);
        Ok(made)
    }
}

/// Runs a shim and converts its result to the status that the shim returns.
fn returned(run: impl FnOnce() -> Result<()>) -> *mut dsr_status {
    match (status::catch(run), HOST.get()) {
        (Ok(()), _) => ptr::null_mut(),
        (Err(error), Some(host)) => host.error(&error),
        // Only a known host gets a table with functions.
        (Err(_), None) => unreachable!("a function of a plugin is called before its entry"),
    }
}

/// The host, for shims, which run only after the entry.
fn host() -> Result<HostTable> {
    HOST.get().copied().ok_or_else(|| Error::internal("no host has entered this plugin"))
}

/// Runs a shim that returns a value; an error is logged, and `fallback` returned.
fn value_or<T>(fallback: T, run: impl FnOnce() -> Result<T>) -> T {
    status::catch(run).unwrap_or_else(|error| {
        if let Ok(host) = host() {
            host.log(DSR_LOG_ERROR, &error.to_string());
        }
        fallback
    })
}

/// A type of objects with handles.
trait Object: Sized {
    /// The C type that the handle points to.
    type Raw;
    /// Distinguishes the types.
    const KIND: usize;
    /// The name in errors.
    const NAME: &'static str;
}

/// The target of a handle.
#[repr(C)]
struct Handle<T> {
    tag: usize,
    object: T,
}

/// Its address differs between copies of the crate, so that handles of other plugins are detected.
static TAG: [u8; 32] = [0; 32];

fn tag<T: Object>() -> usize {
    (&raw const TAG as usize).wrapping_add(T::KIND)
}

/// Makes the handle of an object.
fn hand_out<T: Object>(object: T) -> *mut T::Raw {
    Box::into_raw(Box::new(Handle { tag: tag::<T>(), object })).cast()
}

/// The object behind a handle.
///
/// # Errors
/// If the handle is null, or has the tag of another type or another copy of the crate.
///
/// # Safety
/// A pointer that is not null is readable for a word; if that word is our tag, it came from [`hand_out`], and is not freed
/// during `'a`.
unsafe fn object<'a, T: Object>(handle: *const T::Raw) -> Result<&'a T> {
    let handle = handle.cast::<Handle<T>>();
    if handle.is_null() {
        return Err(Error::invalid("is null").at(T::NAME));
    }
    // SAFETY: readable for a word, as the caller says.
    if !handle.is_aligned() || unsafe { handle.cast::<usize>().read() } != tag::<T>() {
        return Err(Error::invalid(format!("is not a {} of this backend", T::NAME)).at(T::NAME));
    }
    // SAFETY: it has our tag, so the caller says that it is ours and lives.
    Ok(unsafe { &(*handle).object })
}

/// Drops the object behind a handle. Null and foreign handles are ignored.
///
/// # Safety
/// As [`object`], and the handle is not used afterwards.
unsafe fn give_back<T: Object>(raw: *mut T::Raw) {
    if raw.is_null() {
        return;
    }
    value_or((), || {
        // SAFETY: the caller's obligations are the same.
        unsafe { object::<T>(raw) }?;
        let handle = raw.cast::<Handle<T>>();
        // SAFETY: it has our tag and is not used afterwards. Clearing the tag detects a second free if the memory is not reused;
        // the write is volatile so that it is not optimised away.
        let owned = unsafe {
            handle.cast::<usize>().write_volatile(0);
            Box::from_raw(handle)
        };
        drop(owned);
        Ok(())
    });
}

/// Exclusive access to an object that one thread at a time may use.
///
/// # Errors
/// If another thread uses it at the same time, or a call on it has panicked.
fn exclusive<'a, T>(object: &'a Mutex<T>, name: &str) -> Result<MutexGuard<'a, T>> {
    object.try_lock().map_err(|error| match error {
        TryLockError::Poisoned(_) => {
            Error::new(Code::Panic, "cannot be used, because a call on it has panicked").at(name)
        }
        TryLockError::WouldBlock => {
            Error::new(Code::FailedPrecondition, "is in use by another thread").at(name)
        }
    })
}
