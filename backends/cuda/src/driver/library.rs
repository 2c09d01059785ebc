//! Finds CUDA's libraries.
//!
//! `cudarc` panics when a library is missing, so no function of a library may be called before it was found here.
//! Libraries are searched by name, as by the system's loader. Those in the folders of `DSRUN_CUDA_LIBRARIES` (separated
//! by `:`, on Windows by `;`) are opened first, for example NVRTC from a Python package.

use dsrun_core::{Code, Error, Result};
#[cfg(unix)]
pub(crate) use libloading::os::unix::Library as Handle;
#[cfg(windows)]
pub(crate) use libloading::os::windows::Library as Handle;
use std::{
    env, fmt,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
};

/// One of CUDA's libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// The driver.
    Driver,
    /// The run-time compiler.
    Nvrtc,
    /// Matrix products.
    CublasLt,
}

impl Library {
    /// Every library, in the order they are needed.
    pub const ALL: [Self; 3] = [Self::Driver, Self::Nvrtc, Self::CublasLt];

    /// The file name without prefix and suffix.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Driver => "cuda",
            Self::Nvrtc => "nvrtc",
            Self::CublasLt => "cublasLt",
        }
    }

    const fn purpose(self) -> &'static str {
        match self {
            Self::Driver => "the NVIDIA driver; install it, or run on a machine with a GPU",
            Self::Nvrtc => {
                "the run-time compiler NVRTC, which builds the kernels; install CUDA's, or `pip install nvidia-cuda-nvrtc`"
            }
            Self::CublasLt => {
                "cuBLASLt, which multiplies large matrices; install CUDA's, or `pip install nvidia-cublas`"
            }
        }
    }

    /// Whether it can be opened. The result is cached.
    pub fn is_present(self) -> bool {
        static PRESENT: [OnceLock<bool>; 3] = [OnceLock::new(), OnceLock::new(), OnceLock::new()];
        *PRESENT[self as usize].get_or_init(|| {
            preload();
            // SAFETY: opening these libraries runs their initialisers, which are NVIDIA's and made for it.
            unsafe {
                match self {
                    Self::Driver => cudarc::driver::sys::is_culib_present(),
                    Self::Nvrtc => cudarc::nvrtc::sys::is_culib_present(),
                    Self::CublasLt => cudarc::cublaslt::sys::is_culib_present(),
                }
            }
        })
    }

    /// Checks that it is present.
    ///
    /// # Errors
    /// [`Code::Unavailable`]: names the library, its purpose, and where it was searched.
    pub fn require(self) -> Result<()> {
        if self.is_present() {
            return Ok(());
        }
        // Names that contain a number of bits belong to other systems.
        let mut names = cudarc::get_lib_name_candidates(self.name());
        names.retain(|name| !name.contains("64"));
        let message = format!("{self} is missing: {}. {}", self.purpose(), looked_for(&names.join(", ")));
        Err(Error::new(Code::Unavailable, message))
    }
}

/// A sentence that says where libraries of these names were searched.
fn looked_for(names: &str) -> String {
    let paths = env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = env::var(FOLDERS).unwrap_or_default();
    format!(
        "Looked for {names} where the system's loader looks, with LD_LIBRARY_PATH={paths:?} and {FOLDERS}={folders:?}"
    )
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lib{}", self.name())
    }
}

/// The variable that names folders to open libraries from.
const FOLDERS: &str = "DSRUN_CUDA_LIBRARIES";

/// Opens a library from the folders of `DSRUN_CUDA_LIBRARIES`, or by the system's loader.
///
/// # Errors
/// Why it cannot be opened, and where it was searched.
pub(crate) fn open_by_name(name: &str) -> Result<Handle, String> {
    let folders = env::var_os(FOLDERS).unwrap_or_default();
    let candidates = env::split_paths(&folders).map(|folder| folder.join(name)).filter(|path| path.exists());
    let path = candidates.into_iter().next().unwrap_or_else(|| PathBuf::from(name));
    // SAFETY: opening it runs its initialisers, which are made for that.
    unsafe { open(&path, false) }.map_err(|error| {
        let reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        format!("{reason}. {}", looked_for(name))
    })
}

/// Opens a library. `global` lets libraries that are opened later use its symbols; on Windows they find it by name.
///
/// # Safety
/// Its initialisers are sound.
unsafe fn open(path: &Path, global: bool) -> Result<Handle, libloading::Error> {
    #[cfg(unix)]
    {
        use libloading::os::unix::{RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
        let scope = if global { RTLD_GLOBAL } else { RTLD_LOCAL };
        // SAFETY: by the caller's promise.
        unsafe { Handle::open(Some(path), RTLD_NOW | scope) }
    }
    #[cfg(windows)]
    {
        let _ = global;
        // SAFETY: by the caller's promise.
        unsafe { Handle::new(path) }
    }
}

/// The starts of the names of the libraries that may be opened from folders, in the order they need each other.
const PRELOADED: [&str; 3] = if cfg!(windows) {
    ["nvrtc-builtins64_", "nvrtc64_", "cublasLt64_"]
} else {
    ["libnvrtc-builtins.so", "libnvrtc.so", "libcublasLt.so"]
};

/// Opens the libraries in the folders of `DSRUN_CUDA_LIBRARIES`: NVRTC's builtins before NVRTC, which finds them only by name.
fn preload() {
    static OPENED: Mutex<Option<Vec<Handle>>> = Mutex::new(None);
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if opened.is_some() {
        return;
    }
    let folders: Vec<PathBuf> =
        env::var_os(FOLDERS).map(|all| env::split_paths(&all).collect()).unwrap_or_default();
    let mut handles = Vec::new();
    for prefix in PRELOADED {
        for folder in &folders {
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)) {
                // SAFETY: the user names these folders to have their libraries opened.
                match unsafe { open(&entry.path(), true) } {
                    Ok(handle) => handles.push(handle),
                    Err(error) => {
                        tracing::warn!(path = %entry.path().display(), %error, "cannot open a library")
                    }
                }
            }
        }
    }
    *opened = Some(handles);
}
