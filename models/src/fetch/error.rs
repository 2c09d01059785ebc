//! What can go wrong while fetching, said so that the reader knows what to do next.
//!
//! Two kinds are kept apart. A [`Failure`] belongs to one place (this cache, that server): the search goes on
//! with the next place and the failure is listed at the end. A [`FetchError`] ends the search, because no
//! other place could help: a name that is no name, or a cache folder that cannot be written.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a model could not be fetched, listed or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The text is neither an existing path nor a well-formed model name.
    #[error(
        "`{name}` is not a model name: {reason}\nhint: give a path, `smollm2`, or `owner/name`, \
         `owner/name@revision`, `owner/name:file.gguf`, `owner/name:Q4_K_M` of a model on the Hugging Face hub"
    )]
    Name {
        /// The text as given, shortened when very long.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The text is a path, but no model can be read there.
    #[error("no model at {}: {reason}", path.display())]
    Local {
        /// The path as given.
        path: PathBuf,
        /// What is missing or in the way.
        reason: String,
    },
    /// Every place was tried.
    #[error("model `{name}` could not be fetched; tried, in this order:{}\nhint: {hint}", list(attempts))]
    Unavailable {
        /// The model's name.
        name: String,
        /// The places, in the order tried.
        attempts: Vec<Attempt>,
        /// What the user can do.
        hint: String,
    },
    /// A file or folder of the cache could not be read or written.
    #[error("cannot {action} {}: {source}\nhint: {hint}", path.display())]
    Cache {
        /// What was being done, as a verb: `create folder`, `write`, `rename`.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
        /// What the user can do.
        hint: String,
    },
    /// Another process holds the model's lock and did not let go in time.
    #[error(
        "another process{holder} has been fetching `{name}` for more than {waited:.0?} (it holds {})\n\
         hint: wait for it, or end it and try again", lock.display()
    )]
    Locked {
        /// The model's name.
        name: String,
        /// The lock file.
        lock: PathBuf,
        /// ` (process 123)` where known, else empty.
        holder: String,
        /// How long was waited.
        waited: Duration,
    },
    /// `remove` was asked for a model that the cache does not hold.
    #[error("`{name}` is not in the cache ({} does not exist)", path.display())]
    NotCached {
        /// The model's name.
        name: String,
        /// The folder it would be in.
        path: PathBuf,
    },
    /// An environment variable holds something that cannot be used. Secret values are never repeated.
    #[error("the environment variable {variable} cannot be used: {reason}")]
    Setting {
        /// The variable.
        variable: &'static str,
        /// What is wrong with its value.
        reason: String,
    },
    /// No variable says where the cache is and there is no home folder.
    #[error(
        "no folder for the model cache: neither DSRUN_CACHE, XDG_CACHE_HOME nor HOME is set\nhint: set DSRUN_CACHE"
    )]
    NoCacheFolder,
}

/// One place that was tried, and why it did not serve.
#[derive(Debug)]
pub struct Attempt {
    /// The place, named for people: `cache /home/ann/.cache/dsrun/models/smollm2`.
    pub place: String,
    /// Why it did not serve.
    pub failure: Failure,
}

/// Why one place did not serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// Nothing of that name is there.
    #[error("{0}")]
    Absent(String),
    /// The place needs the network, which the caller has forbidden.
    #[error("not tried: offline (--offline or HF_HUB_OFFLINE)")]
    Offline,
    /// The server could not be reached, or stopped answering.
    #[error("{url}: {reason}")]
    Network {
        /// The address, without its query (signed addresses carry secrets there).
        url: String,
        /// The transport's message.
        reason: String,
    },
    /// The server wants a token, or refuses the one it got.
    #[error(
        "{url}: access refused (HTTP {status}): {}; if the model is gated, accept its terms at {page}", 
        if *token_sent { "HF_TOKEN was sent and is not allowed to read it" }
        else { "the model does not exist, is private, or is gated, and no HF_TOKEN was sent" }
    )]
    Refused {
        /// The address.
        url: String,
        /// 401 or 403.
        status: u16,
        /// Whether the request carried a token.
        token_sent: bool,
        /// The model's page, where terms are accepted.
        page: String,
    },
    /// Any other answer that is not the file.
    #[error("{url}: the server answered HTTP {status}{}", if *status == 404 { " (not found)" } else { "" })]
    Status {
        /// The address.
        url: String,
        /// The status.
        status: u16,
    },
    /// The answer is not what the protocol promises.
    #[error("{url}: {reason}")]
    Protocol {
        /// The address.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The transfer ended early, again after every retry.
    #[error("{file}: the transfer ended after {received} of {expected} bytes")]
    Truncated {
        /// The file.
        file: String,
        /// Bytes that came.
        received: u64,
        /// Bytes that should have come.
        expected: u64,
    },
    /// The bytes are not the published ones. They were thrown away.
    #[error("{file}: sha256 is {actual}, but {expected} is published; the copy was thrown away")]
    Checksum {
        /// The file.
        file: String,
        /// The published digest, in hex.
        expected: String,
        /// The digest of what came, in hex.
        actual: String,
    },
    /// The place has something under that name that dsrun cannot use.
    #[error("{0}")]
    Unusable(String),
    /// Python or pip did not do what was asked.
    #[error("{0}")]
    Pip(String),
}

/// The end of one place's work: either the search goes on, or it cannot.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stop {
    #[error(transparent)]
    Failed(#[from] Failure),
    #[error(transparent)]
    Fatal(#[from] FetchError),
}

impl FetchError {
    /// An error about the cache, with advice that fits what the system said.
    pub(crate) fn cache(action: &'static str, path: &Path, source: io::Error) -> Self {
        let hint = match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "free some space, or set DSRUN_CACHE to a folder on a larger disk".to_owned()
            }
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => match file_in_the_way(path) {
                Some(file) => format!(
                    "{} is a file where a folder is needed: move it away, or set DSRUN_CACHE to another folder",
                    file.display()
                ),
                None => "set DSRUN_CACHE to another folder".to_owned(),
            },
            _ => "set DSRUN_CACHE to a folder that you can write to".to_owned(),
        };
        Self::Cache { action, path: path.to_owned(), source, hint }
    }

    pub(crate) fn name(name: &str, reason: impl Into<String>) -> Self {
        const SHOWN: usize = 120;
        let mut shown: String = name.chars().take(SHOWN).flat_map(char::escape_debug).collect();
        if name.chars().nth(SHOWN).is_some() {
            shown.push_str("...");
        }
        Self::Name { name: shown, reason: reason.into() }
    }
}

/// The nearest ancestor of `path` (or `path` itself) that exists and is not a folder.
fn file_in_the_way(path: &Path) -> Option<&Path> {
    path.ancestors().find(|ancestor| ancestor.is_file())
}

fn list(attempts: &[Attempt]) -> String {
    let mut text = String::new();
    for (index, Attempt { place, failure }) in attempts.iter().enumerate() {
        // Writing to a String cannot fail.
        let _ = write!(text, "\n  {}. {place}: {failure}", index + 1);
    }
    text
}
