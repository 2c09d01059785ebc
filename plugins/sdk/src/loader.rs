//! The loader, which makes a plugin a [`Backend`], and the wrappers of its objects.
//!
//! Children hold their parents (a bound call its plan, buffers and weights; all objects their device), so a plugin needs no
//! reference counts: each object is freed once, children first. A panic in a plugin poisons the object that was called: later
//! calls fail here and do not reach the plugin. Libraries are never unloaded, because objects, threads and thread-local
//! destructors of a plugin may outlive every handle.

mod device;
mod diagnose;
mod group;
mod kernels;
mod open_device;
mod plugin;
mod prepare;
mod stream;
mod tables;

use super::{encode, host, prefix, raw::*, status};
use device::PluginDevice;
use dsrun_core::{
    Code, Error, Result,
    device::{Backend, BackendInfo, Device, DeviceInfo, DeviceOptions, Finding},
};
use plugin::{Health, Plugin, call};
use std::{
    error::Error as _,
    path::{Path, PathBuf},
    ptr,
    sync::Arc,
};
use tables::Tables;

/// A plugin as a [`Backend`].
#[derive(Clone, Debug)]
pub struct PluginBackend {
    plugin: Arc<Plugin>,
    info: BackendInfo,
    library: Option<PathBuf>,
}

impl PluginBackend {
    /// Loads a plugin from a file.
    ///
    /// This runs code of the file. A manifest describes a plugin without running it: see [`crate::discovery`].
    ///
    /// # Errors
    /// [`Code::Unavailable`] if the file does not exist or the system cannot open it; [`Code::AbiMismatch`] if it is not a plugin,
    /// has another version, or lacks a required function; and the errors of the plugin. The message has the reason.
    pub fn load(path: &Path) -> Result<Self> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Self::load_absolute(&path).map_err(|error| error.at(&path.display().to_string()))
    }

    fn load_absolute(path: &Path) -> Result<Self> {
        if !path.is_file() {
            let what = if path.exists() { "is not a file" } else { "does not exist" };
            return Err(Error::new(Code::Unavailable, what));
        }
        let library = open_library(path)?;
        let entry = library.entry(DSR_ABI_MAJOR);
        // The library stays loaded even if the rest fails, because it may have started threads or registered destructors.
        let other = entry.is_none().then(|| (0..16).find(|major| library.entry(*major).is_some())).flatten();
        std::mem::forget(library);
        let Some(entry) = entry else {
            let message = match other {
                Some(major) => format!(
                    "speaks version {major} of the plugin ABI, this program {DSR_ABI_MAJOR}.{DSR_ABI_MINOR}: use a \
                     plugin built for this version"
                ),
                None => "is not a dsrun plugin: it has no symbol `dsrun_plugin_entry_v0`".to_owned(),
            };
            return Err(Error::new(Code::AbiMismatch, message));
        };
        // SAFETY: the symbol of this name is an entry function as `dsrun.h` declares it.
        let mut backend = unsafe { Self::enter(entry, host::loaded(path)) }?;
        backend.library = Some(path.to_owned());
        Ok(backend)
    }

    /// The backend behind an entry function in this program, such as [`backend_entry!`](crate::backend_entry) defines.
    ///
    /// # Errors
    /// As [`Self::load`].
    ///
    /// # Safety
    /// `entry` fulfils the contract of `dsrun.h`.
    pub unsafe fn from_entry(entry: dsr_plugin_entry) -> Result<Self> {
        // SAFETY: as the caller says.
        unsafe { Self::enter(entry, host::linked()) }
    }

    unsafe fn enter(entry: dsr_plugin_entry, host: &'static dsr_host_api) -> Result<Self> {
        let mut table: *const dsr_plugin_api = ptr::null();
        // SAFETY: the table of the host is valid forever, and `plugin` is writable. A plugin returns null or a status of the
        // host.
        unsafe {
            status::take(entry(host, &raw mut table))?;
        }
        // SAFETY: null, or a table that is valid forever, by the contract of the entry.
        let tables = unsafe { Tables::read(table) }?;
        // SAFETY: the texts are valid forever.
        let [name, version, description] = [tables.api.name, tables.api.version, tables.api.description]
            .map(|value| unsafe { prefix::text(value).into_owned() });
        if name.is_empty() {
            return Err(Error::new(Code::AbiMismatch, "the plugin has no name"));
        }
        let plugin = Arc::new(Plugin { tables, health: Health::default() });
        Ok(Self { plugin, info: BackendInfo { name, version, description }, library: None })
    }

    /// The file that the plugin was loaded from; `None` if it is linked into the program.
    pub fn library(&self) -> Option<&Path> {
        self.library.as_deref()
    }

    /// The table of the plugin, for tests of plugins. It bypasses the host: nothing is validated, and an object made through it
    /// must be freed through it.
    pub fn raw_table(&self) -> &dsr_plugin_api {
        &self.plugin.tables.api
    }
}

/// Converts a status to the error of the host and frees it, for tests of plugins through their raw tables.
///
/// # Errors
/// The error of the status; null is success.
///
/// # Safety
/// `status` is null or was returned by a plugin that [`PluginBackend`] has loaded, and is not used afterwards.
pub unsafe fn take_status(status: *mut dsr_status) -> Result<()> {
    // SAFETY: the statuses of a plugin come from the host, which is this copy of the crate.
    unsafe { status::take(status) }
}

impl Backend for PluginBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let Plugin { tables, health } = &*self.plugin;
        let mut count = 0;
        health.call("plugin", || Ok(call!(tables.api, device_count(tables.api.backend, &raw mut count))))?;
        let one = |position| {
            let mut name = host::TextSink::default();
            let mut info =
                dsr_device_info { memory_bytes: DSR_NONE, name: name.as_raw(), ..prefix::zeroed() };
            let arguments = (tables.api.backend, position, &raw mut info);
            health.call("plugin", || {
                Ok(call!(tables.api, device_info(arguments.0, arguments.1, arguments.2)))
            })?;
            Ok(DeviceInfo {
                index: info.index as usize,
                name: name.into_text(),
                memory_bytes: (info.memory_bytes != DSR_NONE).then_some(info.memory_bytes),
            })
        };
        (0..count).map(one).collect()
    }

    fn open(&self, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>> {
        let no_device = |_| Error::invalid(format!("there is no device {index}")).at("index");
        let index = u32::try_from(index).map_err(no_device)?;
        Ok(Arc::new(PluginDevice::open(&self.plugin, index, &encode::options(options)?)?))
    }

    fn describe(&self, name: &str) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(prepare::describe(&self.plugin, name)?))
    }

    fn diagnose(&self) -> Vec<Finding> {
        diagnose::findings(&self.plugin).unwrap_or_else(|error| {
            let subject = "diagnosis of the plugin".to_owned();
            vec![Finding { subject, present: false, detail: error.to_string() }]
        })
    }
}

/// A newly opened library.
struct Library(platform::Library);

impl Library {
    fn entry(&self, major: u16) -> Option<dsr_plugin_entry> {
        let name = format!("dsrun_plugin_entry_v{major}");
        // SAFETY: the symbol of this name is a function; it is called only if the version matches.
        let symbol = unsafe { self.0.get::<dsr_plugin_entry>(name.as_bytes()) };
        symbol.ok().map(|symbol| *symbol)
    }
}

#[cfg(unix)]
use libloading::os::unix as platform;
#[cfg(windows)]
use libloading::os::windows as platform;

#[cfg(unix)]
fn open_library(path: &Path) -> Result<Library> {
    use platform::{Library as Opened, RTLD_LOCAL, RTLD_NOW};
    // NOW: a missing symbol is an error here instead of ending the process later.
    // SAFETY: loading runs the initialisers of the library, which the user has chosen to use.
    unsafe { Opened::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        .map(Library)
        .map_err(|error| cannot_open(&error))
}

#[cfg(windows)]
fn open_library(path: &Path) -> Result<Library> {
    // SAFETY: loading runs the initialisers of the library, which the user has chosen to use.
    unsafe { platform::Library::new(path) }.map(Library).map_err(|error| cannot_open(&error))
}

fn cannot_open(error: &libloading::Error) -> Error {
    Error::new(Code::Unavailable, format!("cannot be opened: {}", reason_of(error)))
}

/// The message of the system's loader; the error itself only names the function that failed.
fn reason_of(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// Whether the system's loader finds a library by its bare name.
///
/// # Errors
/// The reason why it cannot be opened.
pub(crate) fn find_library(name: &str) -> Result<(), String> {
    // SAFETY: a library of the system that a plugin needs and would open itself.
    let opened = unsafe { platform::Library::new(name) }.map_err(|error| reason_of(&error))?;
    std::mem::forget(opened);
    Ok(())
}
