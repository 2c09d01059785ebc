//! The Hugging Face hub: what a repository holds, which files of it are a model, and getting them.
//!
//! One request lists the repository at a revision, with the size of every file and the sha256 of the large
//! ones; the files are then requested at the commit it named, so they belong together even if the branch
//! moves meanwhile. A file that arrived whole is recorded at once; a later fetch of the same commit keeps it.
//!
//! **Why not the crate `hf-hub`.** Version 1.0 brings about 165 more crates (an async runtime, QUIC, a
//! database, a second crypto library that is built from C), does not compare plain downloads with the
//! published sha256 and cannot go on with a broken one. Version 0.5 is small, but sends the token to whatever
//! host the hub redirects to, and checks neither length nor digest. `ureq` brings about 20 crates and leaves
//! redirects to us; what we need of the hub's protocol is in this file and in `http`.

use std::collections::VecDeque;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use serde::Deserialize;

use super::cache::{Entry, Manifest};
use super::error::{Failure, Stop};
use super::files::{self, COMPANIONS, CONFIG, INDEX, ModelFiles, SINGLE, Source};
use super::http::{Client, Reply, encode, is_sha256, protocol};
use super::name::{HubName, ModelName, has_extension, has_weight_type, is_weight_type};
use super::options::FetchOptions;
use super::progress::{Progress, during};
use super::staging::{CHUNK, Expected, Staged};
use crate::gguf::parts::PartName;
use crate::sentence_transformers::{CACHED_POOLING, POOLING};

const MAX_LISTING_BYTES: u64 = 64 << 20;
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The answer of the hub about a repository.
#[derive(Debug, Deserialize)]
struct Listing {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Debug, Clone, Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<LargeFile>,
}

#[derive(Debug, Clone, Deserialize)]
struct LargeFile {
    sha256: Option<String>,
}

/// Fetches `repository` into `entry`, whose lock the caller holds.
pub(crate) fn fetch(
    repository: &HubName,
    options: &FetchOptions,
    entry: &Entry,
    name: &ModelName,
    progress: &mut dyn Progress,
) -> Result<(), Stop> {
    let client = Client::new(options)?;
    let hub = Hub { client, repository, options };
    let listing = hub.listing()?;
    let mut queue: VecDeque<Sibling> = choose(&listing, repository)?.into();

    let source = format!("{} commit {}", hub.page(), listing.sha);
    let mut manifest = Manifest::new(name, source, &listing.sha);
    manifest.files = entry.resumable(&listing.sha);
    let kept: Vec<String> = manifest.files.iter().map(|record| record.name.clone()).collect();
    // What belongs to another commit must not be mixed in.
    entry.keep_only(&kept);
    if !kept.is_empty() {
        entry.save(&manifest)?;
    }

    while let Some(file) = queue.pop_front() {
        let local = local_name(&file.rfilename);
        if !kept.iter().any(|kept| kept == local) {
            let sha256 = hub.download(&file, &listing.sha, &entry.directory, progress)?;
            manifest.files.push(entry.record(local, sha256)?);
            entry.save(&manifest)?;
        }
        if file.rfilename == INDEX {
            queue.extend(hub.shards(&entry.directory.join(INDEX), &listing)?);
        }
    }
    manifest.complete = true;
    entry.save(&manifest)?;
    Ok(())
}

/// Finds `repository` in the cache of the Python library `huggingface_hub`. The reason is for the list of
/// attempts.
pub(crate) fn in_python_cache(repository: &HubName, name: &str, cache: &Path) -> Result<ModelFiles, String> {
    let folder = cache.join(format!("models--{}--{}", repository.owner, repository.name));
    if !folder.is_dir() {
        return Err("not there".into());
    }
    // A branch or tag is a file that holds a commit; a commit is a folder by itself.
    let commit = match std::fs::read_to_string(folder.join("refs").join(&repository.revision)) {
        Ok(commit) => commit.trim().to_owned(),
        Err(_) => repository.revision.clone(),
    };
    if !is_commit(&commit) {
        return Err(format!("revision {} is not there", repository.revision));
    }
    let snapshot = folder.join("snapshots").join(&commit);
    match &repository.file {
        Some(wanted) if is_weight_type(wanted) => {
            let paths = ggufs_below(&snapshot);
            let names: Vec<&str> = paths.iter().map(String::as_str).collect();
            files::from_file(name, &snapshot.join(of_type(&names, wanted)?), Source::HubCache)
        }
        Some(file) if snapshot.join(file).is_file() => {
            files::from_file(name, &snapshot.join(file), Source::HubCache)
        }
        Some(file) => Err(format!("{file} is not there")),
        None if snapshot.is_dir() => files::from_directory(name, &snapshot, Source::HubCache),
        None => Err(format!("revision {} is not there", repository.revision)),
    }
}

/// The GGUF files of a folder and of the folders in it, as relative paths.
fn ggufs_below(folder: &Path) -> Vec<String> {
    let list = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let outer = list(folder);
    let inner: Vec<PathBuf> = outer.iter().filter(|path| path.is_dir()).flat_map(|path| list(path)).collect();
    let mut found: Vec<String> = outer
        .iter()
        .chain(&inner)
        .filter_map(|path| Some(path.strip_prefix(folder).ok()?.to_str()?.to_owned()))
        .filter(|path| has_extension(path, "gguf"))
        .collect();
    found.sort();
    found
}

struct Hub<'a> {
    client: Client,
    repository: &'a HubName,
    options: &'a FetchOptions,
}

impl Hub<'_> {
    /// The page where people look at the model.
    fn page(&self) -> String {
        super::http::without_secrets(&self.client.address(&self.repository.repository()))
    }

    fn listing(&self) -> Result<Listing, Failure> {
        let HubName { owner, name, revision, .. } = self.repository;
        let path = format!("api/models/{owner}/{name}/revision/{}?blobs=true", encode(revision));
        let url = self.client.address(&path);
        let mut retry = Retry::new(self.options);
        let text = loop {
            let text = self.client.get(&url, 0, &self.page()).map_err(Trouble::from).and_then(|reply| {
                let mut text = Vec::new();
                let mut body = reply.body.into_reader().take(MAX_LISTING_BYTES + 1);
                match body.read_to_end(&mut text) {
                    Ok(_) => Ok(text),
                    Err(error) => Err(Trouble::Passing(protocol(&self.page(), &error.to_string()))),
                }
            });
            match text {
                Ok(text) => break text,
                Err(trouble) => retry.after(trouble, 0)?,
            }
        };
        let broken = |reason: String| protocol(&self.page(), &format!("the list of files {reason}"));
        if text.len() as u64 > MAX_LISTING_BYTES {
            return Err(broken(format!("is longer than {MAX_LISTING_BYTES} bytes")));
        }
        let listing: Listing =
            serde_json::from_slice(&text).map_err(|error| broken(format!("cannot be read: {error}")))?;
        // The commit becomes part of addresses.
        if !is_commit(&listing.sha) {
            return Err(broken("names no commit".into()));
        }
        Ok(listing)
    }

    /// The shards that a downloaded index names, as the listing describes them.
    fn shards(&self, index: &Path, listing: &Listing) -> Result<Vec<Sibling>, Failure> {
        let unusable = |reason: String| Failure::Unusable(format!("{}: {reason}", self.page()));
        let text = std::fs::read(index).map_err(|error| unusable(format!("{INDEX}: {error}")))?;
        let shards = files::shards(&text).map_err(unusable)?;
        shards
            .iter()
            .map(|shard| {
                find(listing, shard)
                    .cloned()
                    .ok_or_else(|| unusable(format!("{INDEX} names {shard}, which the repository lacks")))
            })
            .collect()
    }

    /// Downloads one file. The answer is its sha256.
    fn download(
        &self,
        file: &Sibling,
        commit: &str,
        directory: &Path,
        progress: &mut dyn Progress,
    ) -> Result<String, Stop> {
        let HubName { owner, name, .. } = self.repository;
        let path: Vec<String> = file.rfilename.split('/').map(encode).collect();
        let url = self.client.address(&format!("{owner}/{name}/resolve/{commit}/{}", path.join("/")));
        let mut expected = Expected {
            bytes: file.size,
            sha256: file.lfs.as_ref().and_then(|lfs| lfs.sha256.clone()).filter(|sha256| is_sha256(sha256)),
        };
        let mut staged = Staged::create(directory, local_name(&file.rfilename))?;
        let what = format!("downloading {}", file.rfilename);
        during(progress, &what, file.size, |progress| {
            let mut retry = Retry::new(self.options);
            loop {
                match self.transfer(&url, commit, &mut staged, &mut expected, progress) {
                    Ok(()) => return Ok(()),
                    Err(Interruption::Trouble(trouble)) => retry.after(trouble, staged.written())?,
                    Err(Interruption::Stop(stop)) => return Err(stop),
                }
            }
        })?;
        staged.finish(&expected)
    }

    /// One request for what is still missing of a file.
    fn transfer(
        &self,
        url: &str,
        commit: &str,
        staged: &mut Staged,
        expected: &mut Expected,
        progress: &mut dyn Progress,
    ) -> Result<(), Interruption> {
        // A whole file whose connection broke at the very end needs no other request (and would get status
        // 416).
        if staged.written() > 0 && expected.bytes == Some(staged.written()) {
            return Ok(());
        }
        let Reply { body, start, total, hub } = self.client.get(url, staged.written(), &self.page())?;
        if let Some(other) = hub.commit.filter(|other| other != commit) {
            let reason = format!("the hub sent commit `{}` instead of {commit}", other.escape_debug());
            return Err(Interruption::from(protocol(url, &reason)));
        }
        expected.sha256 = expected.sha256.take().or(hub.sha256);
        expected.bytes = expected.bytes.or(hub.bytes).or(total);
        let Some(bytes) = expected.bytes else {
            return Err(Interruption::from(protocol(url, "the server did not say how long the file is")));
        };
        if start != staged.written() {
            // The server sent another part than asked for, or everything: begin again.
            staged.restart().map_err(Stop::from)?;
            if start != 0 {
                let failure = protocol(url, "the server sent another part of the file than was asked for");
                return Err(Interruption::Trouble(Trouble::Passing(failure)));
            }
        }
        let mut body = body.into_reader();
        let mut chunk = vec![0; CHUNK];
        let truncated = |received| {
            let file = url.rsplit('/').next().unwrap_or_default().to_owned();
            Interruption::Trouble(Trouble::Passing(Failure::Truncated { file, received, expected: bytes }))
        };
        loop {
            let count = match body.read(&mut chunk) {
                Ok(0) if staged.written() == bytes => return Ok(()),
                Ok(0) => return Err(truncated(staged.written())),
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::debug!(url, %error, "transfer interrupted");
                    return Err(truncated(staged.written()));
                }
            };
            if staged.written() + count as u64 > bytes {
                let reason = format!("the server sent more than the {bytes} bytes that the file has");
                return Err(Interruption::from(protocol(url, &reason)));
            }
            staged.write(&chunk[..count]).map_err(Stop::from)?;
            progress.advance(staged.written());
        }
    }
}

/// What can end a request: trouble that may pass, and the rest.
enum Trouble {
    Passing(Failure),
    Lasting(Failure),
}

enum Interruption {
    Trouble(Trouble),
    Stop(Stop),
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Network { .. } | Failure::Truncated { .. } => Self::Passing(failure),
            // 408 and 429 ask for patience, 416 means our part is longer than the file: all are worth another
            // try.
            Failure::Status { status: 408 | 416 | 429 | 500..=599, .. } => Self::Passing(failure),
            _ => Self::Lasting(failure),
        }
    }
}

impl From<Failure> for Interruption {
    fn from(failure: Failure) -> Self {
        Self::Trouble(failure.into())
    }
}

impl From<Stop> for Interruption {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

/// Counts tries without headway, so that a long transfer over a bad line ends well and a dead one ends soon.
struct Retry {
    left: u32,
    allowed: u32,
    pause: Duration,
    first_pause: Duration,
    furthest: u64,
}

impl Retry {
    fn new(options: &FetchOptions) -> Self {
        Self {
            left: options.retries,
            allowed: options.retries,
            pause: options.retry_delay,
            first_pause: options.retry_delay,
            furthest: 0,
        }
    }

    /// Pauses before the next try, or gives the trouble back when there is none.
    fn after(&mut self, trouble: Trouble, reached: u64) -> Result<(), Failure> {
        let failure = match trouble {
            Trouble::Lasting(failure) => return Err(failure),
            Trouble::Passing(failure) => failure,
        };
        // Compared with the furthest point, not the last one: a server that starts over each time gets
        // nowhere.
        if reached > self.furthest {
            self.furthest = reached;
            self.left = self.allowed;
            self.pause = self.first_pause;
        }
        if self.left == 0 {
            return Err(failure);
        }
        self.left -= 1;
        tracing::debug!(%failure, pause = ?self.pause, "trying again");
        thread::sleep(self.pause);
        self.pause = self.pause.saturating_mul(2).min(LONGEST_PAUSE);
        Ok(())
    }
}

/// The files of a repository that make up the model.
fn choose(listing: &Listing, repository: &HubName) -> Result<Vec<Sibling>, Failure> {
    let ggufs: Vec<&str> = listing
        .siblings
        .iter()
        .map(|file| file.rfilename.as_str())
        .filter(|file| has_extension(file, "gguf"))
        .collect();
    let choices = || {
        const SHOWN: usize = 20;
        let more = if ggufs.len() > SHOWN { ", .." } else { "" };
        format!("{}{more}", ggufs.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", "))
    };
    if let Some(file) = &repository.file {
        let file = &match is_weight_type(file) {
            true => of_type(&ggufs, file)
                .map_err(|reason| Failure::Absent(format!("{reason}; it has {}", choices())))?,
            false => file.clone(),
        };
        return match find(listing, file) {
            Some(file) => all_parts(listing, file),
            None if ggufs.is_empty() => Err(Failure::Absent(format!(
                "{file} is not in the repository, and neither is any other .gguf file"
            ))),
            None => Err(Failure::Absent(format!("{file} is not in the repository; it has {}", choices()))),
        };
    }
    let weights = match find(listing, SINGLE).or_else(|| find(listing, INDEX)) {
        Some(weights) => weights.clone(),
        None => {
            return Err(Failure::Unusable(if ggufs.is_empty() {
                format!(
                    "the repository has neither {SINGLE}, {INDEX} nor a .gguf file: dsrun reads no other format"
                )
            } else {
                format!(
                    "the repository has GGUF files only: name one as {repository}:FILE or {repository}:TYPE (such as Q4_K_M), \
                     out of {}",
                    choices()
                )
            }));
        }
    };
    let Some(config) = find(listing, CONFIG) else {
        return Err(Failure::Unusable(format!("the repository has no {CONFIG}")));
    };
    // Small files first: what is wrong with a model shows in them, before gigabytes were spent.
    let mut chosen = vec![config.clone()];
    chosen.extend(COMPANIONS.iter().filter_map(|file| find(listing, file)).cloned());
    chosen.push(weights);
    Ok(chosen)
}

/// The GGUF file whose name has this type of weights; of several parts, the first.
fn of_type(ggufs: &[&str], wanted: &str) -> Result<String, String> {
    let is_first = |path: &&&str| {
        let file = path.rsplit('/').next().unwrap_or(path);
        // Projectors of images are files of their own beside the model.
        !file.starts_with("mmproj") && PartName::parse(file).is_none_or(|part| part.number == 1)
    };
    let found: Vec<&str> =
        ggufs.iter().filter(|file| has_weight_type(file, wanted)).filter(is_first).copied().collect();
    match found.as_slice() {
        [file] => Ok((*file).to_owned()),
        [] => Err(format!("no .gguf file of the repository has weights of type {wanted}")),
        [..] => Err(format!(
            "{} files have weights of type {wanted}: name one of them, out of {}",
            found.len(),
            found.join(", ")
        )),
    }
}

/// A file, or all parts that belong to it.
fn all_parts(listing: &Listing, file: &Sibling) -> Result<Vec<Sibling>, Failure> {
    let (folder, name) = match file.rfilename.rsplit_once('/') {
        Some((folder, name)) => (format!("{folder}/"), name),
        None => (String::new(), file.rfilename.as_str()),
    };
    let Some(part) = PartName::parse(name) else { return Ok(vec![file.clone()]) };
    let find_part = |part: String| {
        let path = format!("{folder}{part}");
        let missing = || Failure::Absent(format!("{path}, a part of the model, is not in the repository"));
        find(listing, &path).cloned().ok_or_else(missing)
    };
    part.all().map(find_part).collect()
}

fn find<'a>(listing: &'a Listing, file: &str) -> Option<&'a Sibling> {
    listing.siblings.iter().find(|sibling| sibling.rfilename == file)
}

/// The name in our cache: folders of the repository are left out. Of two files of a model that have the same
/// name, one gets another.
fn local_name(file: &str) -> &str {
    if file == POOLING {
        return CACHED_POOLING;
    }
    file.rsplit('/').next().unwrap_or(file)
}

fn is_commit(text: &str) -> bool {
    (7..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The folder of the Python cache, for messages.
pub(crate) fn python_cache_folder(repository: &HubName, cache: &Path) -> PathBuf {
    cache.join(format!("models--{}--{}", repository.owner, repository.name))
}
