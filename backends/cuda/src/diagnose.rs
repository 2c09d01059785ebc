//! Diagnostics: which parts of CUDA the backend finds on a machine.

use crate::driver::{
    compiler::{Cache, nvrtc_version},
    library::{Library, open_by_name},
    nccl::{LIBRARY, version_of, written},
};
use cudarc::driver::sys;
use dsrun_core::device::Finding;
use std::fs;

/// A finding for each library that is used, and for the kernel cache.
pub(crate) fn findings() -> Vec<Finding> {
    vec![
        library(Library::Driver, "driver", || {
            let mut version = 0;
            // SAFETY: the driver is present; the pointer is to a place of the right type.
            unsafe { sys::cuDriverGetVersion(&raw mut version) };
            format!("for CUDA {}.{}", version / 1000, version % 1000 / 10)
        }),
        library(Library::Nvrtc, "NVRTC", || match nvrtc_version() {
            Ok((major, minor)) => format!("{major}.{minor}"),
            Err(error) => error.to_string(),
        }),
        library(Library::CublasLt, "cuBLASLt", || {
            // SAFETY: cuBLASLt is present.
            let version = unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() };
            format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
        }),
        nccl(),
        kernels(&Cache::of_user()),
    ]
}

fn library(library: Library, subject: &str, version: impl Fn() -> String) -> Finding {
    let (present, detail) = match library.require() {
        Ok(()) => (true, format!("{}{}", version(), origin(&format!("lib{}", library.name())))),
        Err(error) => (false, error.message().to_owned()),
    };
    Finding { subject: subject.to_owned(), present, detail }
}

/// NCCL is needed for several GPUs only, and is not loaded otherwise.
fn nccl() -> Finding {
    let subject = "NCCL".to_owned();
    let library = match open_by_name(LIBRARY) {
        Ok(library) => library,
        Err(reason) => {
            let detail = format!("needed for several GPUs only: {reason}");
            return Finding { subject, present: false, detail };
        }
    };
    let detail = match version_of(&library) {
        Ok(version) => format!("{}{}", written(version), origin("libnccl")),
        Err(error) => return Finding { subject, present: false, detail: error.message().to_owned() },
    };
    Finding { subject, present: true, detail }
}

fn kernels(cache: &Cache) -> Finding {
    let subject = "kernel cache".to_owned();
    let Some(folder) = cache.folder() else {
        let detail =
            "none: neither DSRUN_CACHE, XDG_CACHE_HOME nor HOME is set, so kernels are built anew each time";
        return Finding { subject, present: false, detail: detail.to_owned() };
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes: Vec<u64> =
        entries.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).collect();
    let size = bytes.iter().sum::<u64>() as f64 / 1e6;
    let detail = format!("{} kernels, {size:.1} MB in {}", bytes.len(), folder.display());
    Finding { subject, present: true, detail }
}

/// The file that a library of this name was loaded from, from the process's memory map.
fn origin(name: &str) -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut paths = maps.lines().filter_map(|line| line.find('/').map(|start| &line[start..]));
    let is_it = |path: &&str| {
        let file = path.rsplit('/').next().unwrap_or_default();
        file.strip_prefix(name).is_some_and(|rest| rest.starts_with(".so"))
    };
    paths.find(is_it).map(|path| format!(", {path}")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_library_is_accounted_for_whether_it_is_there_or_not() {
        let findings = findings();
        let subjects: Vec<&str> = findings.iter().map(|finding| finding.subject.as_str()).collect();
        assert_eq!(subjects, ["driver", "NVRTC", "cuBLASLt", "NCCL", "kernel cache"]);
        for (finding, library) in findings.iter().zip(Library::ALL) {
            assert_eq!(finding.present, library.is_present(), "{finding:?}");
        }
        for finding in findings.iter().take(4) {
            let says_where = finding.present || finding.detail.contains("LD_LIBRARY_PATH");
            assert!(says_where, "{finding:?}");
        }
    }

    #[test]
    fn the_origin_of_a_library_is_its_file() {
        assert!(origin("libc").ends_with("libc.so.6"), "{}", origin("libc"));
        assert_eq!(origin("libno-such-library"), "");
    }
}
