//! The export of a Rust [`Backend`] as the C tables of a plugin.
//!
//! Every function of the tables is a shim that decodes and validates its parameters, calls the trait, and converts an error or
//! panic to a status of the host. It validates because anyone may call the tables. The handle of an object points to a box
//! with a tag, by which null and foreign handles are detected.

mod device;
mod diagnose;
mod group;
mod log;
mod objects;
mod op;
mod prepare;
mod stream;
mod table;

use super::{
    host_table::{HOST, HostTable, returned},
    prefix,
    raw::*,
};
use dsrun_core::{Code, Error, Result, device::Backend};
use std::{
    ptr,
    sync::{Arc, LazyLock, Mutex},
};
use table::Made;

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

/// The table for a host of another version, which has only the version of this crate.
struct VersionOnly(dsr_plugin_api);

// SAFETY: the table never changes, and its pointers are null.
unsafe impl Send for VersionOnly {}
// SAFETY: as above.
unsafe impl Sync for VersionOnly {}

static VERSION_ONLY: LazyLock<VersionOnly> = LazyLock::new(|| {
    VersionOnly(dsr_plugin_api { abi_major: DSR_ABI_MAJOR, abi_minor: DSR_ABI_MINOR, ..prefix::zeroed() })
});

/// A backend to export, which [`export_backend!`](crate::export_backend) and [`backend_entry!`](crate::backend_entry) define.
#[derive(Debug)]
pub struct Export {
    make: fn() -> Result<Arc<dyn Backend>>,
    aborts_on_panic: bool,
    made: Mutex<Option<&'static Made>>,
}

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
