//! Compiles kernels at run time with NVRTC, and caches the binaries on disk.
//!
//! The cache key of a binary is a hash of source, options, NVRTC's version and architecture. A truncated or changed file is
//! detected by its checksum and compiled again. If the cache cannot be written, kernels are compiled every time.

use crate::driver::{kernel_spec::KernelSpec, library::Library, source};
use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use dsrun_core::{Code, Error, Result};
use sha2::{Digest, Sha256};
use std::{
    env,
    ffi::{CStr, CString, c_char},
    fs,
    path::{Path, PathBuf},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

/// Bytes of a checksum.
const CHECKSUM: usize = 32;

/// The environment variable that adds line information to kernels, for sanitizers and profilers.
const LINE_INFO: &str = "DSRUN_CUDA_LINE_INFO";

/// The target architecture of kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Architecture {
    option: String,
    binary: bool,
}

impl Architecture {
    /// The best target for a compute capability (major times ten plus minor), given those that NVRTC supports: a binary
    /// if it is one of them, else PTX for the newest below it, which the driver compiles.
    pub fn choose(capability: u32, known: &[u32]) -> Option<Self> {
        if known.contains(&capability) {
            // Hopper-specific instructions need the `a` variant, whose binaries run on Hopper only.
            let suffix = if capability == 90 { "a" } else { "" };
            return Some(Self { option: format!("sm_{capability}{suffix}"), binary: true });
        }
        Self::portable(capability, known)
    }

    /// PTX for a compute capability, or for the newest below it that NVRTC supports; every newer device runs it, too.
    fn portable(capability: u32, known: &[u32]) -> Option<Self> {
        let newest = known.iter().filter(|known| **known <= capability).max()?;
        Some(Self { option: format!("compute_{newest}"), binary: false })
    }
}

/// The cache folder of binaries.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// A cache in this folder; `None` disables caching.
    pub fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    /// `kernels` below `$DSRUN_CACHE`, `$XDG_CACHE_HOME/dsrun` or `~/.cache/dsrun`, whichever is set first.
    pub fn of_user() -> Self {
        let folder = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = folder("DSRUN_CACHE")
            .or_else(|| folder("XDG_CACHE_HOME").map(|root| root.join("dsrun")))
            .or_else(|| folder("HOME").map(|root| root.join(".cache").join("dsrun")));
        Self::new(root.map(|root| root.join("kernels")))
    }

    fn read(&self, key: &str) -> Option<Vec<u8>> {
        let bytes = fs::read(self.folder.as_ref()?.join(key)).ok()?;
        let (checksum, image) = bytes.split_at_checked(CHECKSUM)?;
        (Sha256::digest(image).as_slice() == checksum).then(|| image.to_vec())
    }

    fn write(&self, key: &str, image: &[u8]) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let Some(folder) = &self.folder else { return };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let partial = folder.join(format!("{key}.{}.{number}.partial", std::process::id()));
        let bytes = [Sha256::digest(image).as_slice(), image].concat();
        let written = fs::create_dir_all(folder)
            .and_then(|()| fs::write(&partial, bytes))
            .and_then(|()| fs::rename(&partial, folder.join(key)));
        if let Err(error) = written {
            tracing::warn!(folder = %folder.display(), %error, "cannot cache a kernel: it will be compiled again next time");
            let _ = fs::remove_file(&partial);
        }
    }

    /// Where binaries are kept.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }
}

/// NVRTC for one architecture.
#[derive(Debug)]
pub struct Compiler {
    architecture: Architecture,
    version: (i32, i32),
    cache: Cache,
}

fn check(status: nvrtcResult, what: &str) -> Result<()> {
    match status {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        status => Err(Error::internal(format!("{what}: NVRTC says {status:?}"))),
    }
}

/// NVRTC's version, major and minor.
///
/// # Errors
/// [`Code::Unavailable`] if it is missing.
pub(crate) fn nvrtc_version() -> Result<(i32, i32)> {
    Library::Nvrtc.require()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: NVRTC is present; the pointers are to places of the right type.
    check(unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }, "asking for the version")?;
    Ok((major, minor))
}

impl Compiler {
    /// A compiler for devices of a compute capability (major times ten plus minor).
    ///
    /// # Errors
    /// [`Code::Unavailable`] if NVRTC is missing or too old for the device.
    pub fn new(capability: u32, cache: Cache) -> Result<Self> {
        Self::with(capability, cache, Architecture::choose)
    }

    /// Same as [`Self::new`], for PTX, which newer devices run, too.
    pub(crate) fn portable(capability: u32, cache: Cache) -> Result<Self> {
        Self::with(capability, cache, Architecture::portable)
    }

    fn with(
        capability: u32,
        cache: Cache,
        choose: impl FnOnce(u32, &[u32]) -> Option<Architecture>,
    ) -> Result<Self> {
        let (major, minor) = nvrtc_version()?;
        let mut count = 0;
        // SAFETY: NVRTC is present; the pointers are to places of the right type, the array as long as NVRTC asks for.
        let known = unsafe {
            check(sys::nvrtcGetNumSupportedArchs(&raw mut count), "asking for architectures")?;
            let mut known = vec![0i32; usize::try_from(count).unwrap_or(0)];
            check(sys::nvrtcGetSupportedArchs(known.as_mut_ptr()), "asking for architectures")?;
            known
        };
        let known: Vec<u32> = known.into_iter().filter_map(|known| u32::try_from(known).ok()).collect();
        let architecture = choose(capability, &known).ok_or_else(|| {
            let message =
                format!("NVRTC {major}.{minor} builds for {known:?}, which is too new for {capability}");
            Error::new(Code::Unavailable, message)
        })?;
        Ok(Self { architecture, version: (major, minor), cache })
    }

    /// The binary of a kernel: from the cache, or built.
    ///
    /// # Errors
    /// If it does not compile; the error contains the compiler's log.
    pub fn build(&self, spec: &KernelSpec) -> Result<Vec<u8>> {
        let text = source::text(spec.unit)
            .ok_or_else(|| Error::internal(format!("there is no kernel source {}", spec.unit)))?;
        let mut options: Vec<String> = [
            format!("--gpu-architecture={}", self.architecture.option),
            "--std=c++17".into(),
            "--device-as-default-execution-space".into(),
            "-DNDEBUG".into(),
        ]
        .into();
        if env::var_os(LINE_INFO).is_some() {
            options.push("--generate-line-info".into());
        }
        options.extend(spec.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        let mut hash = Sha256::new();
        for part in options.iter().map(String::as_str).chain([text.as_str(), &format!("{:?}", self.version)])
        {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let key: String = hash.finalize().iter().take(20).map(|byte| format!("{byte:02x}")).collect();
        if let Some(image) = self.cache.read(&key) {
            return Ok(image);
        }
        let image = self.compile(spec, &text, &options)?;
        self.cache.write(&key, &image);
        Ok(image)
    }

    /// The cache key of a tuning result for this architecture, compiler and version of the source.
    fn answer_key(&self, unit: &str, question: &str) -> String {
        let mut hash = Sha256::new();
        let source = source::text(unit).unwrap_or_default();
        for part in [&self.architecture.option, &source, question, &format!("{:?}", self.version)] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let key: String = hash.finalize().iter().take(20).map(|byte| format!("{byte:02x}")).collect();
        format!("{key}.answer")
    }

    /// A cached tuning result for the kernels of a unit.
    pub(crate) fn recall(&self, unit: &str, question: &str) -> Option<String> {
        String::from_utf8(self.cache.read(&self.answer_key(unit, question))?).ok()
    }

    /// Caches a tuning result.
    pub(crate) fn remember(&self, unit: &str, question: &str, answer: &str) {
        self.cache.write(&self.answer_key(unit, question), answer.as_bytes());
    }

    fn compile(&self, spec: &KernelSpec, text: &str, options: &[String]) -> Result<Vec<u8>> {
        let terminated = |text: &str| {
            CString::new(text)
                .map_err(|_| Error::internal(format!("{spec} has a NUL byte in its source or options")))
        };
        let (text, name) = (terminated(text)?, terminated(spec.unit)?);
        let options = options.iter().map(|option| terminated(option)).collect::<Result<Vec<_>>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program: nvrtcProgram = ptr::null_mut();
        // SAFETY: texts are terminated and live through the call.
        let status = unsafe {
            let (none, names) = (ptr::null(), ptr::null());
            sys::nvrtcCreateProgram(&raw mut program, text.as_ptr(), name.as_ptr(), 0, none, names)
        };
        check(status, "making a program")?;
        let program = Program(program);
        let count = i32::try_from(options.len()).map_err(|_| Error::internal("too many options"))?;
        // SAFETY: the program is live, the options are terminated texts.
        let status = unsafe { sys::nvrtcCompileProgram(program.0, count, options.as_ptr()) };
        if status != nvrtcResult::NVRTC_SUCCESS {
            let message = format!(
                "{spec} does not compile for {}: {status:?}\n{}",
                self.architecture.option,
                program.log()
            );
            return Err(Error::internal(message));
        }
        program.image(self.architecture.binary)
    }
}

/// A program of NVRTC.
struct Program(nvrtcProgram);

impl Program {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is live; the text is as long as NVRTC asks for.
        unsafe {
            if sys::nvrtcGetProgramLogSize(self.0, &raw mut size) != nvrtcResult::NVRTC_SUCCESS {
                return "there is no log".into();
            }
            let mut log = vec![0u8; size.max(1)];
            if sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) != nvrtcResult::NVRTC_SUCCESS {
                return "there is no log".into();
            }
            CStr::from_bytes_until_nul(&log)
                .map_or_else(|_| String::new(), |log| log.to_string_lossy().into_owned())
        }
    }

    fn image(&self, binary: bool) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program is live and compiled; the image is as long as NVRTC asks for.
        unsafe {
            let status = match binary {
                true => sys::nvrtcGetCUBINSize(self.0, &raw mut size),
                false => sys::nvrtcGetPTXSize(self.0, &raw mut size),
            };
            check(status, "asking for the size of a binary")?;
            let mut image = vec![0u8; size];
            let status = match binary {
                true => sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast()),
                false => sys::nvrtcGetPTX(self.0, image.as_mut_ptr().cast()),
            };
            check(status, "asking for a binary")?;
            Ok(image)
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is live and dropped once.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(90, Some(("sm_90a", true)))]
    #[case(80, Some(("sm_80", true)))]
    #[case(121, Some(("compute_120", false)))]
    #[case(70, None)]
    fn architecture_is_the_best_there_is(#[case] capability: u32, #[case] expected: Option<(&str, bool)>) {
        let chosen = Architecture::choose(capability, &[75, 80, 90, 100, 120]);
        assert_eq!(chosen.as_ref().map(|chosen| (chosen.option.as_str(), chosen.binary)), expected);
    }

    #[rstest]
    #[case(80, Some("compute_80"))]
    #[case(86, Some("compute_80"))]
    #[case(70, None)]
    fn what_newer_devices_run_is_no_binary(#[case] capability: u32, #[case] expected: Option<&str>) {
        let chosen = Architecture::portable(capability, &[75, 80, 90]);
        assert!(chosen.as_ref().is_none_or(|chosen| !chosen.binary));
        assert_eq!(chosen.as_ref().map(|chosen| chosen.option.as_str()), expected);
    }

    #[test]
    fn a_damaged_file_is_no_hit() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(folder.path().join("kernels")));
        assert_eq!(cache.read("key"), None);
        cache.write("key", b"image");
        assert_eq!(cache.read("key").as_deref(), Some(&b"image"[..]));
        let path = folder.path().join("kernels").join("key");
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        assert_eq!(cache.read("key"), None);
        fs::write(&path, b"short").unwrap();
        assert_eq!(cache.read("key"), None);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        let cache = Cache::new(Some(file));
        cache.write("key", b"image");
        assert_eq!(cache.read("key"), None);
    }

    #[test]
    fn every_unit_opens_with_what_it_is() {
        for (name, own) in source::units() {
            assert!(own.starts_with("/*\n * "), "{name} has no comment at the top");
            let whole = source::text(name).unwrap();
            let end = format!("\n#line 1 \"{name}\"\n{own}");
            assert!(whole.ends_with(&end) && whole.len() > end.len(), "{name} is put together wrongly");
        }
        assert_eq!(source::text("missing.cu"), None);
    }
}
