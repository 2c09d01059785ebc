//! One fetch of a model at a time, across processes.
//!
//! The lock is the operating system's, on an empty file beside the model's folder; it ends with the process
//! that holds it, so there are no stale locks to clear. The lock only saves work: were it to fail (some
//! network file systems have none), two processes would download twice, each under names of its own, and the
//! later rename would win.

use std::fs::{File, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::error::FetchError;
use super::progress::{Progress, during};

const POLL: Duration = Duration::from_millis(50);

/// Held until dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    // Closing the file releases the lock.
    _file: File,
    /// False where the file system has no locks.
    pub(crate) exclusive: bool,
}

impl Lock {
    /// Takes the lock file at `path`, waiting up to `timeout` for another holder. `name` is the model, for
    /// messages.
    pub(crate) fn acquire(
        path: &Path,
        name: &str,
        timeout: Duration,
        progress: &mut dyn Progress,
    ) -> Result<Self, FetchError> {
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|error| FetchError::cache("open lock file", path, error))?;
        if let Some(exclusive) = try_lock(&file, path)? {
            sign(&mut file);
            return Ok(Self { _file: file, exclusive });
        }
        let started = Instant::now();
        let holder = holder(&mut file);
        let what = format!("waiting for another process{holder} that is fetching {name}");
        during(progress, &what, None, |_| {
            loop {
                if started.elapsed() >= timeout {
                    return Err(FetchError::Locked {
                        name: name.to_owned(),
                        lock: path.to_owned(),
                        holder: holder.clone(),
                        waited: timeout,
                    });
                }
                thread::sleep(POLL);
                if let Some(exclusive) = try_lock(&file, path)? {
                    sign(&mut file);
                    return Ok(Self { _file: file, exclusive });
                }
            }
        })
    }
}

/// `Some(true)` when taken, `Some(false)` when the file system cannot lock, `None` when another holds it.
fn try_lock(file: &File, path: &Path) -> Result<Option<bool>, FetchError> {
    match file.try_lock() {
        Ok(()) => Ok(Some(true)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Interrupted => Ok(None),
        Err(TryLockError::Error(error)) => {
            tracing::warn!(path = %path.display(), %error, "this file system has no locks; going on without");
            Ok(Some(false))
        }
    }
}

/// Leaves the process id for whoever waits. Only a courtesy, so trouble is ignored.
fn sign(file: &mut File) {
    let _ =
        file.set_len(0).and_then(|()| file.rewind()).and_then(|()| write!(file, "{}", std::process::id()));
}

fn holder(file: &mut File) -> String {
    let mut text = String::new();
    match file.take(20).read_to_string(&mut text) {
        Ok(_) => text.parse::<u32>().map_or_else(|_| String::new(), |id| format!(" (process {id})")),
        Err(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::progress::Silent;
    use super::*;

    #[test]
    fn a_second_holder_waits_and_then_says_for_whom() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = Lock::acquire(&path, "m", Duration::ZERO, &mut Silent).unwrap();
        let message =
            Lock::acquire(&path, "m", Duration::from_millis(60), &mut Silent).unwrap_err().to_string();
        assert!(message.contains(&format!("process {}", std::process::id())), "{message}");
        assert!(message.contains("lock"), "{message}");
        let waiting = thread::spawn({
            let path = path.clone();
            move || Lock::acquire(&path, "m", Duration::from_secs(20), &mut Silent).map(drop)
        });
        drop(held);
        waiting.join().unwrap().unwrap();
    }
}
