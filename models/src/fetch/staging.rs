//! Writing a file of the cache so that nobody ever sees half of it.
//!
//! Bytes go to a name of their own beside the target, are counted and hashed on the way, and become the
//! target by one rename, after they were found right and flushed to the disk. Whatever ends the work earlier
//! removes them.

use std::fs::{self, File};
use std::io::{Read, Seek as _, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest as _, Sha256};

use super::error::{Failure, FetchError, Stop};

/// How the name of everything unfinished starts.
pub(crate) const PREFIX: &str = ".staging-";

pub(crate) const CHUNK: usize = 256 * 1024;

/// A file on its way into a cache folder.
pub(crate) struct Staged {
    file: File,
    path: PathBuf,
    target: PathBuf,
    digest: Sha256,
    written: u64,
    finished: bool,
}

/// What is known beforehand about a file.
#[derive(Debug, Clone, Default)]
pub(crate) struct Expected {
    pub(crate) bytes: Option<u64>,
    /// Lower-case hex.
    pub(crate) sha256: Option<String>,
}

impl Staged {
    /// Opens a fresh temporary file for `directory/file`.
    pub(crate) fn create(directory: &Path, file: &str) -> Result<Self, FetchError> {
        let path = directory.join(unique_name(file));
        let handle = File::options()
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(|error| FetchError::cache("create", &path, error))?;
        Ok(Self {
            file: handle,
            path,
            target: directory.join(file),
            digest: Sha256::new(),
            written: 0,
            finished: false,
        })
    }

    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), FetchError> {
        // The message names the target: the temporary name would mean nothing to the reader.
        write_all(&mut self.file, bytes, &self.target)?;
        self.digest.update(bytes);
        self.written = self.written.saturating_add(bytes.len() as u64);
        Ok(())
    }

    /// Forgets what was written.
    pub(crate) fn restart(&mut self) -> Result<(), FetchError> {
        self.file
            .set_len(0)
            .and_then(|()| self.file.rewind())
            .map_err(|error| FetchError::cache("empty", &self.path, error))?;
        self.digest = Sha256::new();
        self.written = 0;
        Ok(())
    }

    /// Checks the bytes and gives them their name. The answer is their sha256.
    pub(crate) fn finish(mut self, expected: &Expected) -> Result<String, Stop> {
        let name = self.target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some(bytes) = expected.bytes.filter(|&bytes| bytes != self.written) {
            return Err(Failure::Truncated { file: name, received: self.written, expected: bytes }.into());
        }
        let actual = hex(&std::mem::take(&mut self.digest).finalize());
        if let Some(expected) = expected.sha256.as_ref().filter(|&sha256| *sha256 != actual) {
            return Err(Failure::Checksum { file: name, expected: expected.clone(), actual }.into());
        }
        self.file.sync_all().map_err(|error| FetchError::cache("write", &self.target, error))?;
        fs::rename(&self.path, &self.target)
            .map_err(|error| FetchError::cache("create", &self.target, error))?;
        self.finished = true;
        sync_directory(&self.target);
        Ok(actual)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.finished
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "could not remove an unfinished file");
        }
    }
}

/// Writes a small file whole or not at all.
pub(crate) fn write_whole(directory: &Path, file: &str, content: &[u8]) -> Result<(), FetchError> {
    let mut staged = Staged::create(directory, file)?;
    staged.write(content)?;
    match staged.finish(&Expected::default()) {
        Ok(_) => Ok(()),
        Err(Stop::Fatal(error)) => Err(error),
        // Nothing was expected of the content, so nothing about it can be wrong.
        Err(Stop::Failed(failure)) => {
            Err(FetchError::cache("write", &directory.join(file), std::io::Error::other(failure.to_string())))
        }
    }
}

/// A name in a cache folder that no other thread or process uses.
pub(crate) fn unique_name(purpose: &str) -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    // Containers that share a cache share process ids too; the clock tells them apart.
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let purpose: String = purpose.chars().take(80).collect();
    format!("{PREFIX}{}-{count}-{clock:x}-{purpose}", std::process::id())
}

/// The sha256 of a file, in hex.
pub(crate) fn hash_file(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let mut digest = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hex(&digest.finalize())),
            count => digest.update(&chunk[..count]),
        }
    }
}

fn write_all(file: &mut dyn Write, bytes: &[u8], target: &Path) -> Result<(), FetchError> {
    file.write_all(bytes).map_err(|error| FetchError::cache("write", target, error))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Makes a rename last through a power cut, on systems where folders can be flushed.
fn sync_directory(file: &Path) {
    if cfg!(unix)
        && let Some(directory) = file.parent()
        && let Err(error) = File::open(directory).and_then(|directory| directory.sync_all())
    {
        tracing::debug!(path = %directory.display(), %error, "could not flush the folder");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn names(directory: &Path) -> Vec<String> {
        fs::read_dir(directory)
            .unwrap()
            .map(|item| item.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn a_right_file_appears_whole() {
        let folder = tempfile::tempdir().unwrap();
        let mut staged = Staged::create(folder.path(), "f").unwrap();
        staged.write(b"lost").unwrap();
        staged.restart().unwrap();
        staged.write(b"ab").unwrap();
        staged.write(b"c").unwrap();
        assert!(!folder.path().join("f").exists());
        let expected = Expected { bytes: Some(3), sha256: Some(ABC.into()) };
        assert_eq!(staged.finish(&expected).unwrap(), ABC);
        assert_eq!(fs::read(folder.path().join("f")).unwrap(), b"abc");
        assert_eq!(hash_file(&folder.path().join("f")).unwrap(), ABC);
        assert_eq!(names(folder.path()), ["f"]);
    }

    #[test]
    fn a_wrong_or_abandoned_file_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        for expected in [
            Expected { bytes: Some(4), sha256: None },
            Expected { bytes: Some(3), sha256: Some(ABC.replace('b', "c")) },
        ] {
            let mut staged = Staged::create(folder.path(), "f").unwrap();
            staged.write(b"abc").unwrap();
            staged.finish(&expected).unwrap_err();
        }
        drop(Staged::create(folder.path(), "f").unwrap());
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_said_to_be_full() {
        let mut full = File::options().write(true).open("/dev/full").unwrap();
        let message = write_all(&mut full, b"x", Path::new("/cache/model.gguf")).unwrap_err().to_string();
        assert!(message.contains("/cache/model.gguf"), "{message}");
        assert!(message.contains("free some space") && message.contains("DSRUN_CACHE"), "{message}");
    }

    #[test]
    fn names_differ() {
        assert_ne!(unique_name("f"), unique_name("f"));
    }
}
