//! An on-disk cache of the driver's compiled pipelines, so that later processes need not compile them again.

use sha2::{Digest, Sha256};
use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};
use wgpu::{Adapter, Device, Features, PipelineCache, PipelineCacheDescriptor};

/// A driver's pipeline cache, which is written to disk when the device handle is dropped.
pub(crate) struct DiskCache {
    cache: PipelineCache,
    path: PathBuf,
    added: AtomicUsize,
}

impl DiskCache {
    /// Reads the cache of this adapter and driver; `None` if the driver does not support caches, or no folder is known.
    pub(crate) fn open(device: &Device, adapter: &Adapter, features: Features) -> Option<Self> {
        if !features.contains(Features::PIPELINE_CACHE) {
            return None;
        }
        let path = folder()?.join(wgpu::util::pipeline_cache_key(&adapter.get_info())?);
        let data = read(&path);
        let descriptor =
            PipelineCacheDescriptor { label: Some("dsrun"), data: data.as_deref(), fallback: true };
        // SAFETY: the file holds what `get_data` of the same adapter and driver returned, as the key in its name says, and its
        // checksum is right; wgpu checks its header before the driver sees it.
        let cache = unsafe { device.create_pipeline_cache(&descriptor) };
        Some(Self { cache, path, added: AtomicUsize::new(0) })
    }

    /// The cache, for making pipelines.
    pub(crate) fn cache(&self) -> &PipelineCache {
        &self.cache
    }

    /// Records that a pipeline was created with the cache.
    pub(crate) fn note(&self) {
        self.added.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for DiskCache {
    fn drop(&mut self) {
        if *self.added.get_mut() == 0 {
            return;
        }
        let Some(data) = self.cache.get_data() else { return };
        if let Err(error) = write(&self.path, &data) {
            tracing::debug!(path = %self.path.display(), %error, "the pipeline cache could not be written");
        }
    }
}

/// Bytes of the checksum at the start of the file.
const CHECKSUM: usize = 32;

/// The content of the file, if it is whole.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    let (checksum, data) = bytes.split_at_checked(CHECKSUM)?;
    (Sha256::digest(data).as_slice() == checksum).then(|| data.to_vec())
}

/// Replaces the file as a whole, so that a process that reads it at the same time sees the old or the new content.
fn write(path: &Path, data: &[u8]) -> std::io::Result<()> {
    let temporary = path.with_extension(format!("{}.partial", std::process::id()));
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(&temporary, [Sha256::digest(data).as_slice(), data].concat())?;
    std::fs::rename(&temporary, path)
}

/// The folder of the cache: below `DSRUN_CACHE`, or else the user's cache folder.
fn folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let root = variable("DSRUN_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|root| root.join("dsrun")))
        .or_else(|| variable("HOME").map(|root| root.join(".cache").join("dsrun")))
        .or_else(|| variable("LOCALAPPDATA").map(|root| root.join("dsrun")));
    Some(root?.join("pipelines"))
}
