//! The store of pages: full pages of the KV cache that are kept outside the device for later requests.
//!
//! Full pages never change, so each is copied out at most once for each tier:
//!
//! | tier | gets a page | loses it |
//! |---|---|---|
//! | host memory | when the device needs its place for another page | when its limit is reached |
//! | folder | as soon as it is full of tokens, so that a process that is killed has lost nothing | when its limit is reached, or it is damaged |
//!
//! One thread waits for copies from the device, another one writes and reads files, so that a slow disk delays no copy. The scheduler
//! asks for pages and goes on with other requests until they are there.

use super::{
    host_tier::{HostTier, PageBytes},
    page_folder::PageFolder,
    page_key::PageKey,
};
use dsrun_core::{Code, Error};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// The most bytes that are fetched at a time. Longer prefixes are fetched piece by piece, so that host memory is bounded.
const FETCH_BYTES: usize = 256 << 20;
/// The most bytes that wait to be written to the folder. Pages beyond that are not written.
const BACKLOG_BYTES: usize = 1 << 30;
/// How long a request waits for pages. After that they are computed.
const FETCH_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the end of an engine waits for pages to be written.
const END_TIMEOUT: Duration = Duration::from_secs(30);
/// Threads that read pages of a fetch. Solid-state disks need several reads in flight to reach their rate.
const READERS: usize = 4;

/// A place where pages are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Tier {
    /// Host memory.
    Host,
    /// The folder.
    Folder,
}

/// A page that was fetched.
#[derive(Clone, Debug)]
pub(crate) struct StoredPage {
    /// Its bytes.
    pub(crate) bytes: PageBytes,
    /// Where it was.
    pub(crate) tier: Tier,
}

/// Counts of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoreCounts {
    /// Bytes of the pages in host memory.
    pub(crate) host_bytes: u64,
    /// Pages that were written to the folder.
    pub(crate) written: u64,
    /// Pages in the folder that could not be used.
    pub(crate) damaged: u64,
}

/// Waits for copies from the device, and returns the bytes of each page.
pub(crate) type Incoming = Box<dyn FnOnce() -> Result<Vec<PageBytes>, Error> + Send>;

/// The store of pages, and the threads that work for it.
#[derive(Debug)]
pub(crate) struct PageStore {
    shared: Arc<Shared>,
    /// `None` once no more pages are taken.
    queues: Mutex<Option<Queues>>,
    /// Closed when the threads have ended.
    ended: Mutex<Receiver<()>>,
}

/// What the threads are to do.
#[derive(Debug)]
struct Queues {
    copies: Sender<Copies>,
    files: Sender<FileJob>,
}

/// Pages that are being copied from the device.
struct Copies {
    pages: Vec<(PageKey, Tier)>,
    incoming: Incoming,
}

/// What the thread for files does.
#[derive(Debug)]
enum FileJob {
    Write(PageKey),
    Fetch(Vec<PageKey>, Sender<Vec<StoredPage>>),
}

#[derive(Debug)]
struct Shared {
    page_bytes: usize,
    folder: Option<PageFolder>,
    /// Whether pages may still be written to the folder.
    writes: AtomicBool,
    /// Whether the store has failed, so that it takes and gives no more pages.
    off: AtomicBool,
    written: AtomicU64,
    state: Mutex<State>,
    /// Notified when copies from the device have arrived.
    arrived: Condvar,
}

#[derive(Debug)]
struct State {
    host: HostTier,
    /// Pages whose copy from the device has not been waited for.
    incoming: HashSet<(PageKey, Tier)>,
    /// Pages that are still to be written to the folder.
    unwritten: HashMap<PageKey, PageBytes>,
}

/// Pages that are being fetched.
#[derive(Debug)]
pub(crate) struct Fetch {
    receiver: Receiver<Vec<StoredPage>>,
    begun: Instant,
    found: Option<Vec<StoredPage>>,
}

impl Fetch {
    /// The pages, if they are there: as many as could be read, from the first on.
    pub(crate) fn poll(&mut self) -> Option<Vec<StoredPage>> {
        self.receive(Duration::ZERO);
        self.found.take()
    }

    /// Waits until the pages are there.
    pub(crate) fn wait(&mut self) {
        self.receive(FETCH_TIMEOUT);
    }

    fn receive(&mut self, patience: Duration) {
        if self.found.is_some() {
            return;
        }
        let left = FETCH_TIMEOUT.saturating_sub(self.begun.elapsed());
        match self.receiver.recv_timeout(patience.min(left)) {
            Ok(found) => self.found = Some(found),
            Err(RecvTimeoutError::Disconnected) => self.found = Some(Vec::new()),
            Err(RecvTimeoutError::Timeout) if self.begun.elapsed() >= FETCH_TIMEOUT => {
                tracing::warn!(
                    "waited {FETCH_TIMEOUT:?} for pages of the prefix cache; they are computed instead"
                );
                self.found = Some(Vec::new());
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

impl PageStore {
    /// A store of pages of `page_bytes` bytes: up to `host_bytes` in host memory, and those of a folder.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub(crate) fn start(
        page_bytes: usize,
        host_bytes: u64,
        folder: Option<PageFolder>,
    ) -> Result<Self, Error> {
        let host = HostTier::new(host_bytes);
        let state = Mutex::new(State { host, incoming: HashSet::new(), unwritten: HashMap::new() });
        let (writes, off) = (AtomicBool::new(folder.is_some()), AtomicBool::new(false));
        let (written, arrived) = (AtomicU64::new(0), Condvar::new());
        let shared = Arc::new(Shared { page_bytes, folder, writes, off, written, state, arrived });
        let ((copies, copied), (files, jobs)) = (channel(), channel());
        let (end, ended) = channel::<()>();
        let (taker, filer, to_files) = (shared.clone(), shared.clone(), files.clone());
        spawn("dsrun-page-copies", move || taker.take_copies(&copied, &to_files))?;
        spawn("dsrun-page-files", move || {
            let _end = end;
            filer.work_on_files(&jobs);
        })?;
        let queues = Mutex::new(Some(Queues { copies, files }));
        Ok(Self { shared, queues, ended: Mutex::new(ended) })
    }

    /// Whether a tier is to get a page.
    pub(crate) fn lacks(&self, key: &PageKey, tier: Tier) -> bool {
        let shared = &*self.shared;
        let state = shared.state();
        let takes = match tier {
            Tier::Host => state.host.is_on() && !state.host.has(key),
            Tier::Folder => shared.writes.load(Ordering::Relaxed) && !state.unwritten.contains_key(key),
        };
        takes && !shared.off.load(Ordering::Relaxed) && !state.incoming.contains(&(*key, tier))
    }

    /// Takes pages that are being copied from the device. `incoming` is called on another thread.
    pub(crate) fn save(&self, pages: Vec<(PageKey, Tier)>, incoming: Incoming) {
        self.shared.state().incoming.extend(pages.iter().copied());
        self.send(|queues| queues.copies.send(Copies { pages, incoming }).is_ok());
    }

    /// Begins to fetch consecutive pages, as many as there are, or the first of them. `None` if there is not even the first.
    pub(crate) fn fetch(&self, keys: impl Iterator<Item = PageKey>) -> Option<Fetch> {
        if self.shared.off.load(Ordering::Relaxed) {
            return None;
        }
        let keys: Vec<PageKey> = keys.take((FETCH_BYTES / self.shared.page_bytes.max(1)).max(1)).collect();
        let first = keys.first()?;
        let known = self.shared.state().knows(first);
        if !known && !self.shared.folder.as_ref().is_some_and(|folder| folder.has(first)) {
            return None;
        }
        let (sender, receiver) = channel();
        self.send(|queues| queues.files.send(FileJob::Fetch(keys, sender)).is_ok());
        Some(Fetch { receiver, begun: Instant::now(), found: None })
    }

    /// The counts so far.
    pub(crate) fn counts(&self) -> StoreCounts {
        let shared = &*self.shared;
        StoreCounts {
            host_bytes: shared.state().host.used(),
            written: shared.written.load(Ordering::Relaxed),
            damaged: shared.folder.as_ref().map_or(0, PageFolder::damaged),
        }
    }

    /// Takes no more pages, and waits until those that it has are written.
    pub(crate) fn finish(&self) {
        drop(self.queues().take());
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(END_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!(
                "waited {END_TIMEOUT:?} for pages of the prefix cache to be written; the rest is lost"
            );
        }
    }

    fn queues(&self) -> MutexGuard<'_, Option<Queues>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, send: impl FnOnce(&Queues) -> bool) {
        if !self.queues().as_ref().is_some_and(send) {
            self.shared.turn_off("its threads have ended");
        }
    }
}

impl Drop for PageStore {
    fn drop(&mut self) {
        if self.queues().is_some() {
            self.finish();
        }
    }
}

/// Starts a thread that ends by itself.
fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let started = thread::Builder::new().name(name.to_owned()).spawn(work);
    let failed = |error| Error::new(Code::Unavailable, format!("cannot start the thread {name}: {error}"));
    started.map(drop).map_err(failed)
}

impl State {
    /// Whether a page is in memory, or about to be.
    fn knows(&self, key: &PageKey) -> bool {
        let incoming = |tier| self.incoming.contains(&(*key, tier));
        self.get(key).is_some() || incoming(Tier::Host) || incoming(Tier::Folder)
    }

    /// A page in memory.
    fn get(&self, key: &PageKey) -> Option<StoredPage> {
        let in_host = self.host.get(key).map(|bytes| StoredPage { bytes, tier: Tier::Host });
        in_host.or_else(|| {
            self.unwritten.get(key).map(|bytes| StoredPage { bytes: bytes.clone(), tier: Tier::Folder })
        })
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn turn_off(&self, reason: &str) {
        if !self.off.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                reason,
                "the prefix cache outside the device is off from now on; requests go on without it"
            );
        }
    }

    /// Does `work`; if that panics, the store is off.
    fn guard(&self, work: impl FnOnce()) {
        if catch_unwind(AssertUnwindSafe(work)).is_err() {
            self.turn_off("one of its threads panicked");
        }
    }

    /// Takes copies from the device until there will be no more.
    fn take_copies(&self, copies: &Receiver<Copies>, files: &Sender<FileJob>) {
        while let Ok(Copies { pages, incoming }) = copies.recv() {
            let mut copied = Ok(Vec::new());
            self.guard(|| copied = incoming());
            let mut state = self.state();
            state.incoming.retain(|page| !pages.contains(page));
            match copied {
                Ok(bytes) => {
                    let pages = pages.into_iter().zip(bytes);
                    pages.for_each(|((key, tier), bytes)| self.put(&mut state, files, key, tier, bytes));
                }
                Err(error) => self.turn_off(&error.to_string()),
            }
            drop(state);
            self.arrived.notify_all();
        }
    }

    /// Gives a page to a tier.
    fn put(&self, state: &mut State, files: &Sender<FileJob>, key: PageKey, tier: Tier, bytes: PageBytes) {
        match tier {
            Tier::Host => state.host.insert(key, bytes),
            Tier::Folder if state.unwritten.len() * self.page_bytes < BACKLOG_BYTES => {
                state.unwritten.insert(key, bytes);
                if files.send(FileJob::Write(key)).is_err() {
                    self.turn_off("its thread for files has ended");
                }
            }
            Tier::Folder => tracing::debug!(%key, "too many pages wait to be written: this one is not"),
        }
    }

    /// Reads and writes files until there will be no more to do. Requests wait for reads, so these go first.
    fn work_on_files(&self, jobs: &Receiver<FileJob>) {
        let mut unwritten = VecDeque::new();
        loop {
            let job = match unwritten.is_empty() {
                true => match jobs.recv() {
                    Ok(job) => Some(job),
                    Err(_) => return,
                },
                false => jobs.try_recv().ok(),
            };
            match job {
                Some(FileJob::Write(key)) => unwritten.push_back(key),
                Some(FileJob::Fetch(keys, sender)) => self.guard(|| self.read(&keys, &sender)),
                None => {
                    let next = unwritten.pop_front();
                    self.guard(|| next.iter().for_each(|key| self.write(key)));
                }
            }
        }
    }

    /// Writes a page to the folder, unless it is there.
    fn write(&self, key: &PageKey) {
        let bytes = self.state().unwritten.get(key).cloned();
        if let (Some(bytes), Some(folder), true) = (bytes, &self.folder, self.writes.load(Ordering::Relaxed))
            && !folder.has(key)
        {
            match folder.write(key, &bytes) {
                Ok(()) => {
                    self.written.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => self.stop_writing(folder, &error),
            }
        }
        self.state().unwritten.remove(key);
    }

    fn stop_writing(&self, folder: &PageFolder, error: &io::Error) {
        if self.writes.swap(false, Ordering::Relaxed) {
            let path = folder.path().display();
            tracing::warn!(%path, %error, "a page of the prefix cache cannot be written: no more pages are, until the next start");
        }
    }

    /// Reads pages up to the first that is not there.
    fn read(&self, keys: &[PageKey], sender: &Sender<Vec<StoredPage>>) {
        let is_incoming = |state: &mut State| {
            keys.iter().any(|key| {
                [Tier::Host, Tier::Folder].iter().any(|tier| state.incoming.contains(&(*key, *tier)))
            })
        };
        let state = self.arrived.wait_timeout_while(self.state(), FETCH_TIMEOUT, is_incoming);
        let (state, _) = state.unwrap_or_else(PoisonError::into_inner);
        let found: Vec<Mutex<Option<StoredPage>>> =
            keys.iter().map(|key| Mutex::new(state.get(key))).collect();
        drop(state);
        let locked = |page: usize| found[page].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(folder) = &self.folder {
            let absent: Vec<usize> = (0..keys.len()).filter(|page| locked(*page).is_none()).collect();
            let (next, end) = (AtomicUsize::new(0), AtomicUsize::new(keys.len()));
            let read = || {
                while let Some(page) = absent.get(next.fetch_add(1, Ordering::Relaxed)).copied()
                    && page < end.load(Ordering::Relaxed)
                {
                    match folder.read(&keys[page]) {
                        Some(bytes) => *locked(page) = Some(StoredPage { bytes, tier: Tier::Folder }),
                        None => {
                            end.fetch_min(page, Ordering::Relaxed);
                        }
                    }
                }
            };
            thread::scope(|scope| {
                (1..READERS.min(absent.len())).for_each(|_| drop(scope.spawn(read)));
                read();
            });
        }
        let pages: Vec<StoredPage> = (0..keys.len()).map_while(|page| locked(page).take()).collect();
        let used = &keys[..pages.len()];
        let mut state = self.state();
        // The beginning last, so that the end is dropped first.
        used.iter().rev().for_each(|key| state.host.touch(key));
        drop(state);
        // Nobody may wait any more.
        let _ = sender.send(pages);
        if let Some(folder) = &self.folder {
            folder.touch(used);
        }
    }
}

impl std::fmt::Debug for Copies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Copies").field(&self.pages).finish()
    }
}
