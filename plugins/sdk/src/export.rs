//! A Rust [`Backend`] as a plugin: its C tables.
//!
//! Every function of the tables is a shim of the same form: it reads what it is given, calls the trait, and turns an error or
//! a panic into a status of the host. Descriptions and arguments are checked as core checks them, because a table may be
//! called by anyone. An object of the backend is handed out as a box behind a tag, by which null and foreign handles are told.

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

/// Exports a backend from a dynamic library, as the one symbol a plugin has.
///
/// The expression gives the backend, and may use `?` on results of this crate. It runs once, when the plugin is loaded.
///
/// Use this in a crate whose only type is `cdylib`: two backends that are both linked into one program would otherwise
/// collide, for the symbol has one name. To reach a linked backend through its tables, use [`backend_entry!`].
///
/// ```ignore
/// dsrun_core::export_backend!(MyBackend::new());
/// ```
///
/// [`backend_entry!`]: crate::backend_entry
#[macro_export]
macro_rules! export_backend {
    ($backend:expr) => {
        /// The entry of this plugin.
        ///
        /// # Safety
        /// For a loader that keeps to `dsrun.h`.
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
            // SAFETY: passed on.
            unsafe { EXPORT.enter_library(host, plugin) }
        }
    };
}

/// The entry of a backend that is linked into the program, for [`PluginBackend::from_entry`]: the same tables as a plugin's,
/// without a library and without a symbol.
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
            // SAFETY: passed on.
            unsafe { EXPORT.enter(host, plugin) }
        }
        entry as $crate::raw::dsr_plugin_entry
    }};
}

/// The host that this copy of the crate serves: every plugin has its own copy, and a program that loads itself through the
/// tables is its own host.
static HOST: OnceLock<HostTable> = OnceLock::new();

/// What a host of another version is given: a table that says which version this is, and has nothing.
struct VersionOnly(dsr_plugin_api);

// SAFETY: never changes, and points to nothing.
unsafe impl Send for VersionOnly {}
// SAFETY: as above.
unsafe impl Sync for VersionOnly {}

static VERSION_ONLY: LazyLock<VersionOnly> = LazyLock::new(|| {
    VersionOnly(dsr_plugin_api { abi_major: DSR_ABI_MAJOR, abi_minor: DSR_ABI_MINOR, ..prefix::zeroed() })
});

/// The host's functions.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostTable {
    host: *mut dsr_host,
    status_new: unsafe extern "C" fn(*mut dsr_host, *const dsr_error) -> *mut dsr_status,
    status_get: unsafe extern "C" fn(*mut dsr_host, *const dsr_status, *mut dsr_error),
    status_free: unsafe extern "C" fn(*mut dsr_host, *mut dsr_status),
    text_set: unsafe extern "C" fn(*mut dsr_host, *mut dsr_text, dsr_str),
    log: unsafe extern "C" fn(*mut dsr_host, u32, dsr_str),
}

// SAFETY: the functions may be called from any thread, for ever, with the pointer that comes with them.
unsafe impl Send for HostTable {}
// SAFETY: as above.
unsafe impl Sync for HostTable {}

impl HostTable {
    /// The functions of a host of our version.
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

    /// Hands an error to the host.
    fn error(&self, error: &Error) -> *mut dsr_status {
        let description = status::describe(error);
        // SAFETY: the host's function, with a description that lives meanwhile.
        unsafe { (self.status_new)(self.host, &raw const description) }
    }

    /// Takes an error of the host.
    ///
    /// # Errors
    /// That error.
    pub(super) fn take(&self, raw: *mut dsr_status) -> Result<()> {
        if raw.is_null() {
            return Ok(());
        }
        let mut description: dsr_error = prefix::zeroed();
        // SAFETY: the host's functions, its status, which is used no more, and a description whose texts live until it is freed.
        Err(unsafe {
            (self.status_get)(self.host, raw, &raw mut description);
            let error = status::from_description(&description);
            (self.status_free)(self.host, raw);
            error
        })
    }

    fn set_text(&self, text: *mut dsr_text, value: &str) {
        // SAFETY: the host's function, the sink it gave, and a text that lives meanwhile.
        unsafe { (self.text_set)(self.host, text, prefix::str_of(value)) };
    }

    fn log(&self, level: u32, message: &str) {
        // SAFETY: the host's function and a text that lives meanwhile.
        unsafe { (self.log)(self.host, level, prefix::str_of(message)) };
    }
}

/// A backend to be exported. Made by [`export_backend!`](crate::export_backend) and [`backend_entry!`](crate::backend_entry).
#[derive(Debug)]
pub struct Export {
    make: fn() -> Result<Arc<dyn Backend>>,
    aborts_on_panic: bool,
    made: Mutex<Option<&'static Made>>,
}

/// An exported backend: made once, kept for ever.
#[derive(Debug)]
struct Made {
    backend: Arc<dyn Backend>,
    api: dsr_plugin_api,
}

// SAFETY: the pointers are to what is never changed or freed.
unsafe impl Send for Made {}
// SAFETY: as above.
unsafe impl Sync for Made {}

impl Export {
    /// A backend that `make` will give. `aborts_on_panic` is whether the library was built so that a panic ends the process.
    pub const fn new(make: fn() -> Result<Arc<dyn Backend>>, aborts_on_panic: bool) -> Self {
        Self { make, aborts_on_panic, made: Mutex::new(None) }
    }

    /// The entry function of a backend in the same program as its host.
    ///
    /// # Safety
    /// As `dsr_plugin_entry` in `dsrun.h`: `host` is a table that is valid for ever, `plugin` is writable.
    pub unsafe fn enter(
        &'static self,
        host: *const dsr_host_api,
        plugin: *mut *const dsr_plugin_api,
    ) -> *mut dsr_status {
        // SAFETY: passed on.
        unsafe { self.enter_with(host, plugin, |_| {}) }
    }

    /// The entry function of a library: panics in it, and what it logs through `tracing`, are also logged by the host.
    ///
    /// # Safety
    /// As [`Self::enter`].
    pub unsafe fn enter_library(
        &'static self,
        host: *const dsr_host_api,
        plugin: *mut *const dsr_plugin_api,
    ) -> *mut dsr_status {
        // A library has its own copy of the standard library, whose hook is nobody else's.
        let install = |host: HostTable| {
            let say =
                move |panic: &std::panic::PanicHookInfo<'_>| host.log(DSR_LOG_ERROR, &panic.to_string());
            std::panic::set_hook(Box::new(say));
            // A library that has set up a log of its own keeps it.
            let _ = tracing::subscriber::set_global_default(log::ToHost(host));
        };
        // SAFETY: passed on.
        unsafe { self.enter_with(host, plugin, install) }
    }

    unsafe fn enter_with(
        &'static self,
        host: *const dsr_host_api,
        plugin: *mut *const dsr_plugin_api,
        install: impl FnOnce(HostTable),
    ) -> *mut dsr_status {
        // SAFETY: the caller says that the table can be read.
        let Some(host) = (unsafe { HostTable::read(host) }) else {
            // The rest of a table of another version may mean anything, and without one nobody can be told why. The host sees
            // the version here, or no table.
            if prefix::check_out(plugin, "plugin").is_ok() {
                // SAFETY: not null, and writable as the caller says.
                unsafe { plugin.write(&raw const VERSION_ONLY.0) };
            }
            return ptr::null_mut();
        };
        if HOST.get_or_init(|| host).status_new as usize != host.status_new as usize {
            let message = "the library serves another host in this process already";
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

    /// The backend, made when it is first asked for. One that could not be made is tried again.
    fn made(&self) -> Result<&'static Made> {
        let panicked = |_| Error::new(Code::Panic, "the backend panicked while it was made");
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

/// A result as the functions of the tables return it.
fn returned(run: impl FnOnce() -> Result<()>) -> *mut dsr_status {
    match (status::catch(run), HOST.get()) {
        (Ok(()), _) => ptr::null_mut(),
        (Err(error), Some(host)) => host.error(&error),
        // A table with functions is only given to a host that is known.
        (Err(_), None) => unreachable!("a function of a plugin runs before its entry"),
    }
}

/// The host, for what is only reached through the tables.
fn host() -> Result<HostTable> {
    HOST.get().copied().ok_or_else(|| Error::internal("no host has entered this plugin"))
}

/// A function of the tables that returns a value and cannot report an error.
fn value_or<T>(fallback: T, run: impl FnOnce() -> Result<T>) -> T {
    status::catch(run).unwrap_or_else(|error| {
        if let Ok(host) = host() {
            host.log(DSR_LOG_ERROR, &error.to_string());
        }
        fallback
    })
}

/// A type whose values are handed out.
trait Object: Sized {
    /// What the handle points to, in C.
    type Raw;
    /// Tells the types apart.
    const KIND: usize;
    /// Its name in errors.
    const NAME: &'static str;
}

/// What a handle points to.
#[repr(C)]
struct Handle<T> {
    tag: usize,
    object: T,
}

/// Its address is this copy of the crate's own, so that handles of other plugins are told.
static TAG: [u8; 32] = [0; 32];

fn tag<T: Object>() -> usize {
    (&raw const TAG as usize).wrapping_add(T::KIND)
}

/// Hands an object out.
fn hand_out<T: Object>(object: T) -> *mut T::Raw {
    Box::into_raw(Box::new(Handle { tag: tag::<T>(), object })).cast()
}

/// The object of a handle.
///
/// # Errors
/// If it is null, or not of this kind or this backend, as far as that can be told.
///
/// # Safety
/// A pointer that is not null is readable for a word; if that word is our tag, it came from [`hand_out`], and is not given
/// back as long as `'a`.
unsafe fn object<'a, T: Object>(handle: *const T::Raw) -> Result<&'a T> {
    let handle = handle.cast::<Handle<T>>();
    if handle.is_null() {
        return Err(Error::invalid("is null").at(T::NAME));
    }
    // SAFETY: readable for a word, as the caller says.
    if !handle.is_aligned() || unsafe { handle.cast::<usize>().read() } != tag::<T>() {
        return Err(Error::invalid(format!("is no {} of this backend", T::NAME)).at(T::NAME));
    }
    // SAFETY: it has our tag, so the caller says that it is ours and lives.
    Ok(unsafe { &(*handle).object })
}

/// Drops the object of a handle. Null and foreign handles are left alone.
///
/// # Safety
/// As [`object`], and nobody uses the handle afterwards.
unsafe fn give_back<T: Object>(raw: *mut T::Raw) {
    if raw.is_null() {
        return;
    }
    value_or((), || {
        // SAFETY: the caller's promise is the same.
        unsafe { object::<T>(raw) }?;
        let handle = raw.cast::<Handle<T>>();
        // SAFETY: it has our tag and is used no more. The tag is wiped so that a second free is told from a first one, if the
        // memory was not used again; volatile, so that the store is not dropped with the box.
        let owned = unsafe {
            handle.cast::<usize>().write_volatile(0);
            Box::from_raw(handle)
        };
        drop(owned);
        Ok(())
    });
}

/// The one thread that uses an object now.
///
/// # Errors
/// If another does at the same time, or a panic happened in it before.
fn exclusive<'a, T>(object: &'a Mutex<T>, name: &str) -> Result<MutexGuard<'a, T>> {
    object.try_lock().map_err(|error| match error {
        TryLockError::Poisoned(_) => {
            Error::new(Code::Panic, "panicked before and cannot be used any more").at(name)
        }
        TryLockError::WouldBlock => {
            Error::new(Code::FailedPrecondition, "is used by another thread at the same time").at(name)
        }
    })
}
