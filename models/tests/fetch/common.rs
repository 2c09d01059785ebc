//! What all tests of `fetch` share.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsrun_models::fetch::{FetchError, FetchOptions, Progress};

use crate::mock_hub::{MockServer, Repository};

/// The model that [`hub`] serves.
pub(crate) const ID: &str = "ann/tiny";

/// A hub that serves one model, and options that use it with the given cache.
pub(crate) fn hub(cache: &Path) -> (MockServer, FetchOptions) {
    let repository = Repository::model(ID);
    let hub = MockServer::start(move |request| repository.answer(request));
    let mut options = options(cache);
    options.hub_endpoint = hub.url();
    (hub, options)
}

/// Options that reach nothing outside a temporary folder, with short times.
pub(crate) fn options(cache: &Path) -> FetchOptions {
    let mut options = FetchOptions::new(cache);
    // Port 9 is "discard": nothing listens there, and it is not handed out to others.
    options.hub_endpoint = "http://127.0.0.1:9".into();
    options.python = vec![cache.join("there-is-no-python-here").into()];
    options.connect_timeout = Duration::from_secs(5);
    options.stall_timeout = Duration::from_secs(10);
    options.pip_stall_timeout = Duration::from_secs(10);
    options.lock_timeout = Duration::from_secs(30);
    options.retries = 2;
    options.retry_delay = Duration::from_millis(1);
    options
}

/// Remembers what it was told.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    pub(crate) steps: Vec<Step>,
}

#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) what: String,
    pub(crate) total: Option<u64>,
    pub(crate) last: u64,
    pub(crate) ended: bool,
}

impl Recorder {
    /// The step whose description contains `part`; all steps must have ended.
    pub(crate) fn step(&self, part: &str) -> &Step {
        assert!(self.steps.iter().all(|step| step.ended), "{self:?}");
        self.steps
            .iter()
            .find(|step| step.what.contains(part))
            .unwrap_or_else(|| panic!("no {part}: {self:?}"))
    }
}

impl Progress for Recorder {
    fn begin(&mut self, what: &str, total: Option<u64>) {
        assert!(self.steps.iter().all(|step| step.ended), "steps do not nest: {what}");
        self.steps.push(Step { what: what.to_owned(), total, last: 0, ended: false });
    }

    fn advance(&mut self, bytes: u64) {
        self.steps.last_mut().unwrap().last = bytes;
    }

    fn end(&mut self) {
        self.steps.last_mut().unwrap().ended = true;
    }
}

/// All files under a folder, relative to it and sorted, without lock files.
pub(crate) fn files_under(folder: &Path) -> Vec<String> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for item in fs::read_dir(folder).into_iter().flatten() {
            let path = item.unwrap().path();
            match path.is_dir() && !path.is_symlink() {
                true => walk(&path, found),
                false => found.push(path),
            }
        }
    }
    let mut found = Vec::new();
    walk(folder, &mut found);
    let mut names: Vec<String> = found
        .iter()
        .map(|path| path.strip_prefix(folder).unwrap().to_str().unwrap().replace('\\', "/"))
        .filter(|name| !name.ends_with(".lock"))
        .collect();
    names.sort();
    names
}

/// The text of an error, which must name everything in `parts`.
#[track_caller]
pub(crate) fn assert_says<T: std::fmt::Debug>(outcome: Result<T, FetchError>, parts: &[&str]) -> String {
    let message = outcome.unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "`{part}` is missing in:\n{message}");
    }
    message
}
