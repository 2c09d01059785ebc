//! A plugin as a [`Backend`]: the loader, and the wrappers around its tables.
//!
//! Children hold their parents (a bound call its plan, buffers and weights; everything its device), so a plugin needs no counts
//! of its own: everything it makes is freed once, children first. A plugin that reports a panic poisons the object it was
//! called on: later calls are refused here and do not reach it. Libraries stay loaded for ever, because objects, threads and
//! thread-local destructors of a plugin may outlive any handle.

mod device;
mod diagnose;
mod group;
mod kernels;
mod prepare;
mod stream;
mod tables;

use super::{encode, host, prefix, prefix::Prefixed, raw::*, status};
use device::PluginDevice;
use dsrun_core::{
    Code, Error, Result,
    device::{Backend, BackendInfo, Device, DeviceInfo, DeviceOptions, Finding},
};
use std::{
    error::Error as _,
    fmt,
    path::{Path, PathBuf},
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};
use tables::Tables;

/// A plugin as a [`Backend`].
#[derive(Clone, Debug)]
pub struct PluginBackend {
    plugin: Arc<Plugin>,
    info: BackendInfo,
    library: Option<PathBuf>,
}

/// A plugin's tables, and whether it panicked.
pub(super) struct Plugin {
    tables: Tables,
    health: Health,
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plugin").finish_non_exhaustive()
    }
}

// SAFETY: the contract of the tables: they are valid for ever and their functions may be called from any thread.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

impl Plugin {
    /// The table of an extension; none if the plugin does not have it.
    ///
    /// # Errors
    /// If the plugin panicked before, or the table is none.
    fn extension<T: Prefixed>(&self, name: &str) -> Result<Option<T>> {
        self.health.check("plugin")?;
        let Some(get_extension) = self.tables.api.get_extension else { return Ok(None) };
        // SAFETY: the plugin's function, with its own backend and a text that lives meanwhile.
        let table = unsafe { get_extension(self.tables.api.backend, prefix::str_of(name)) };
        if table.is_null() {
            return Ok(None);
        }
        // SAFETY: an extension of a name is always the same table, which callers name by `T`, and valid for ever.
        unsafe { prefix::read(table.cast::<T>()) }.map(Some)
    }
}

/// Whether an object may still be used: a panic leaves it in a state that nobody knows.
#[derive(Debug, Default)]
pub(super) struct Health(AtomicBool);

impl Health {
    /// Makes a call on the object, unless a panic happened in it before.
    fn call(&self, what: &str, run: impl FnOnce() -> Result<*mut dsr_status>) -> Result<()> {
        self.check(what)?;
        // SAFETY: a plugin returns success or a status it got from the host, and keeps none.
        let result = run().and_then(|status| unsafe { status::take(status) });
        if matches!(&result, Err(error) if error.code() == Code::Panic) {
            self.0.store(true, Ordering::Relaxed);
        }
        result
    }

    fn check(&self, what: &str) -> Result<()> {
        if !self.0.load(Ordering::Relaxed) {
            return Ok(());
        }
        let message = format!("the {what} cannot be used any more, because the backend panicked in it");
        Err(Error::new(Code::Panic, message))
    }
}

/// A handle of a plugin.
pub(super) struct Raw<T>(NonNull<T>);

// SAFETY: the contract of the tables: objects may move between threads; those that are used by one thread at a time are
// wrapped in types that are not `Sync` or take `&mut self`.
unsafe impl<T> Send for Raw<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Raw<T> {}

impl<T> fmt::Debug for Raw<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Pointer::fmt(&self.0, f)
    }
}

impl<T> Raw<T> {
    /// What a plugin has made.
    ///
    /// # Errors
    /// If it says it succeeded and gave nothing.
    fn new(pointer: *mut T, what: &str) -> Result<Self> {
        let made = NonNull::new(pointer).map(Self);
        made.ok_or_else(|| Error::internal(format!("the plugin succeeded, but gave no {what}")))
    }

    fn get(&self) -> *mut T {
        self.0.as_ptr()
    }
}

/// Calls a function of a plugin's table.
macro_rules! call {
    ($table:expr, $slot:ident($($argument:expr),* $(,)?)) => {{
        let function = $table.$slot.ok_or_else(|| $crate::loader::missing(stringify!($slot)))?;
        // SAFETY: a function of the plugin's table, with arguments as `dsrun.h` wants them: live handles of this plugin,
        // structs that say their size, and memory that is borrowed meanwhile.
        unsafe { function($($argument),*) }
    }};
}

/// Frees an object with a function of a plugin's table, which reports no error.
macro_rules! free {
    ($table:expr, $slot:ident, $handle:expr) => {
        if let Some(function) = $table.$slot {
            // SAFETY: a live handle of this plugin, used no more: this is its owner's drop.
            unsafe { function($handle.get()) }
        }
    };
}

use {call, free};

fn missing(slot: &str) -> Error {
    Error::internal(format!("the plugin has no `{slot}`"))
}

impl PluginBackend {
    /// Loads a plugin from a file.
    ///
    /// This runs code of that file. A manifest says what can be known before: see [`crate::discovery`].
    ///
    /// # Errors
    /// [`Code::Unavailable`] if there is no such file or it cannot be opened (with the loader's reason), [`Code::AbiMismatch`]
    /// if it is no plugin, one of another version (with both), or one whose tables lack something (with what), and whatever
    /// the plugin says.
    pub fn load(path: &Path) -> Result<Self> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Self::load_absolute(&path).map_err(|error| error.at(&path.display().to_string()))
    }

    fn load_absolute(path: &Path) -> Result<Self> {
        if !path.is_file() {
            let what = if path.exists() { "is no file" } else { "does not exist" };
            return Err(Error::new(Code::Unavailable, what));
        }
        let library = open_library(path)?;
        let entry = library.entry(DSR_ABI_MAJOR);
        // Whether or not this works out: threads and destructors of the library may be anywhere by now.
        let other = entry.is_none().then(|| (0..16).find(|major| library.entry(*major).is_some())).flatten();
        std::mem::forget(library);
        let Some(entry) = entry else {
            let message = match other {
                Some(major) => format!(
                    "speaks version {major} of the plugin ABI, this program {DSR_ABI_MAJOR}.{DSR_ABI_MINOR}: use a \
                     plugin built for this version"
                ),
                None => "is no dsrun plugin: it has no symbol `dsrun_plugin_entry_v0`".to_owned(),
            };
            return Err(Error::new(Code::AbiMismatch, message));
        };
        // SAFETY: a symbol of this name is an entry function as `dsrun.h` declares it.
        let mut backend = unsafe { Self::enter(entry, host::loaded(path)) }?;
        backend.library = Some(path.to_owned());
        Ok(backend)
    }

    /// The backend behind an entry function in this program: what [`backend_entry!`](crate::backend_entry) makes.
    ///
    /// # Errors
    /// As [`Self::load`].
    ///
    /// # Safety
    /// `entry` keeps to `dsrun.h`.
    pub unsafe fn from_entry(entry: dsr_plugin_entry) -> Result<Self> {
        // SAFETY: the caller says so.
        unsafe { Self::enter(entry, host::linked()) }
    }

    unsafe fn enter(entry: dsr_plugin_entry, host: &'static dsr_host_api) -> Result<Self> {
        let mut table: *const dsr_plugin_api = ptr::null();
        // SAFETY: the host's table is valid for ever, and there is a place for the plugin's. A plugin returns success or a
        // status it got from the host.
        unsafe {
            status::take(entry(host, &raw mut table))?;
        }
        // SAFETY: null, or a table that is valid for ever, as the entry promises.
        let tables = unsafe { Tables::read(table) }?;
        // SAFETY: texts that are valid for ever.
        let [name, version, description] = [tables.api.name, tables.api.version, tables.api.description]
            .map(|value| unsafe { prefix::text(value).into_owned() });
        if name.is_empty() {
            return Err(Error::new(Code::AbiMismatch, "the plugin has no name"));
        }
        let plugin = Arc::new(Plugin { tables, health: Health::default() });
        Ok(Self { plugin, info: BackendInfo { name, version, description }, library: None })
    }

    /// The file it was loaded from; `None` if it is linked into the program.
    pub fn library(&self) -> Option<&Path> {
        self.library.as_deref()
    }

    /// The plugin's own table, for those who test plugins. The host's side of the ABI is not in front of it: nothing is
    /// checked, and an object made through it must be freed through it.
    pub fn raw_table(&self) -> &dsr_plugin_api {
        &self.plugin.tables.api
    }
}

/// What an error of the host's is, for those who test plugins through their raw tables.
///
/// # Errors
/// That error; null is success.
///
/// # Safety
/// `status` is null or was returned by a plugin that [`PluginBackend`] has loaded, and is used no more.
pub unsafe fn take_status(status: *mut dsr_status) -> Result<()> {
    // SAFETY: a plugin gets its statuses from the host, which is this copy of the crate.
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
            let subject = "the plugin's own diagnosis".to_owned();
            vec![Finding { subject, present: false, detail: error.to_string() }]
        })
    }
}

/// A library that was just opened.
struct Library(platform::Library);

impl Library {
    fn entry(&self, major: u16) -> Option<dsr_plugin_entry> {
        let name = format!("dsrun_plugin_entry_v{major}");
        // SAFETY: a symbol of this name is a function; it is called only if the version is ours.
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
    // NOW: a symbol that is missing is an error here, and does not end the process later.
    // SAFETY: loading runs the library's initialisers: the user has chosen to use it.
    unsafe { Opened::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        .map(Library)
        .map_err(|error| cannot_open(&error))
}

#[cfg(windows)]
fn open_library(path: &Path) -> Result<Library> {
    // SAFETY: loading runs the library's initialisers: the user has chosen to use it.
    unsafe { platform::Library::new(path) }.map(Library).map_err(|error| cannot_open(&error))
}

fn cannot_open(error: &libloading::Error) -> Error {
    Error::new(Code::Unavailable, format!("cannot be opened: {}", reason_of(error)))
}

/// The loader's own words: the error alone only says which function failed.
fn reason_of(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// Whether the system's loader finds a library by its bare name.
///
/// # Errors
/// Why it cannot be opened.
pub(crate) fn find_library(name: &str) -> Result<(), String> {
    // SAFETY: a library of the system that a plugin needs; the plugin would open it next.
    let opened = unsafe { platform::Library::new(name) }.map_err(|error| reason_of(&error))?;
    std::mem::forget(opened);
    Ok(())
}
