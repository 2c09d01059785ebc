//! Pages in a folder, one file each, that later runs and other processes find again.
//!
//! A file is written under another name, ending in `.partial`, and renamed when it is complete. It begins with a head: what it is, its
//! key, its length and a checksum of all. A file that does not fit its head is dropped, and its page is computed again.
//!
//! Nothing but the folder itself says which pages there are, so processes that share it need not know of each other. The time of
//! change of a file is that of its last use, a little earlier for pages further from the beginning of their text, so that the end of a
//! text is deleted before its beginning.

use super::{host_tier::PageBytes, page_key::PageKey};
use crate::{
    error::{EngineError, Result},
    memory::Bytes,
};
use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

/// What a file begins with.
const MAGIC: [u8; 8] = *b"dsrunkv\x01";
/// Bytes of the head: [`MAGIC`], the hash of the key, the number of bytes that follow the head, and the checksum.
const HEAD: usize = 8 + 32 + 8 + 4;
/// An unfinished file of this age was left by a process that ended.
const ABANDONED: Duration = Duration::from_secs(600);
/// Pages that were used together are this far apart, for [`fs::File::set_modified`].
const STEP: Duration = Duration::from_millis(100);

/// A folder of pages.
#[derive(Debug)]
pub(crate) struct PageFolder {
    /// The folder that the user gave, of which no more than `limit` bytes are used.
    folder: PathBuf,
    /// The folder of the model's pages in it.
    own: PathBuf,
    page_bytes: usize,
    limit: u64,
    /// Bytes of all pages in the folder when they were last counted, plus those written since; `None` before.
    used: Mutex<Option<u64>>,
    /// Files that were dropped because they did not fit their head.
    damaged: AtomicU64,
}

/// A file of the folder.
struct Entry {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl PageFolder {
    /// Opens or makes a folder. `model` is the key of the empty prefix.
    ///
    /// # Errors
    /// If files cannot be made in it.
    pub(crate) fn open(folder: &Path, model: &PageKey, page_bytes: usize, limit: u64) -> Result<Self> {
        if limit < (page_bytes + HEAD) as u64 {
            let rule = format!("must have room for a page of the KV cache, {}", Bytes(page_bytes as u64));
            return Err(EngineError::option("prefix-cache-size", Bytes(limit), rule));
        }
        let own = folder.join(&model.to_string()[..24]);
        let probe = own.join(unfinished("probe"));
        let made = fs::create_dir_all(&own)
            .and_then(|()| File::create(&probe))
            .map(drop)
            .and_then(|()| fs::remove_file(&probe));
        made.map_err(|error| {
            let rule = format!(
                "cannot be written to: {error}\nhint: name a folder that can, or leave the option out"
            );
            EngineError::option("prefix-cache", folder.display(), rule)
        })?;
        let folder = folder.to_owned();
        Ok(Self { folder, own, page_bytes, limit, used: Mutex::new(None), damaged: AtomicU64::new(0) })
    }

    /// The folder that the user gave.
    pub(crate) fn path(&self) -> &Path {
        &self.folder
    }

    /// Files that were dropped because they did not fit their head.
    pub(crate) fn damaged(&self) -> u64 {
        self.damaged.load(Ordering::Relaxed)
    }

    /// Whether there is a file for a page, which may prove damaged.
    pub(crate) fn has(&self, key: &PageKey) -> bool {
        self.file(key).exists()
    }

    /// A page; `None` if there is none, or the file is damaged, which deletes it.
    pub(crate) fn read(&self, key: &PageKey) -> Option<PageBytes> {
        let path = self.file(key);
        let read = File::open(&path).and_then(|file| self.read_page(file, key));
        let reason = match read {
            Ok(Ok(bytes)) => return Some(bytes),
            Ok(Err(reason)) => reason.to_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => error.to_string(),
        };
        let path = path.display();
        tracing::warn!(%path, reason, "a page of the prefix cache cannot be used and is computed again");
        self.damaged.fetch_add(1, Ordering::Relaxed);
        // If it cannot be removed, it is found damaged again.
        let _ = fs::remove_file(self.file(key));
        None
    }

    /// The content of a file, or why it cannot be used.
    fn read_page(
        &self,
        mut file: File,
        key: &PageKey,
    ) -> io::Result<std::result::Result<PageBytes, &'static str>> {
        // The length first, so that no file makes this allocate more than a page.
        if file.metadata()?.len() != (HEAD + self.page_bytes) as u64 {
            return Ok(Err("its length is not that of a page"));
        }
        let (mut found, mut bytes) = ([0; HEAD], vec![0; self.page_bytes]);
        file.read_exact(&mut found)?;
        file.read_exact(&mut bytes)?;
        Ok(if found == head(key, &bytes) { Ok(Arc::new(bytes)) } else { Err("its checksum does not fit") })
    }

    /// Says that pages were used.
    pub(crate) fn touch(&self, keys: &[PageKey]) {
        let now = SystemTime::now();
        for key in keys {
            // Only the order of deletion depends on it.
            let _ = File::options()
                .append(true)
                .open(self.file(key))
                .and_then(|file| file.set_modified(time(now, key)));
        }
    }

    /// Writes a page, and deletes the least recently used pages if there are too many.
    ///
    /// # Errors
    /// If the disk is full, or fails.
    pub(crate) fn write(&self, key: &PageKey, bytes: &[u8]) -> io::Result<()> {
        let path = self.file(key);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let partial = path.with_file_name(unfinished(&key.to_string()));
        let write = || {
            let mut file = File::create(&partial)?;
            file.write_all(&head(key, bytes))?;
            file.write_all(bytes)?;
            file.set_modified(time(SystemTime::now(), key))?;
            // Not synchronised with the disk: after a power failure the checksum shows what is missing.
            fs::rename(&partial, &path)
        };
        if let Err(error) = write() {
            let _ = fs::remove_file(&partial);
            return Err(error);
        }
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let total = match *used {
            Some(used) => used + (HEAD + bytes.len()) as u64,
            None => self.entries().iter().map(|entry| entry.bytes).sum(),
        };
        *used = Some(if total > self.limit { self.delete_oldest() } else { total });
        Ok(())
    }

    /// Deletes the least recently used pages of all models until a tenth of the limit is free. Returns the bytes that are left.
    fn delete_oldest(&self) -> u64 {
        let mut entries = self.entries();
        entries.sort_by_key(|entry| entry.used);
        let mut left: u64 = entries.iter().map(|entry| entry.bytes).sum();
        for Entry { path, bytes, .. } in entries {
            if left <= self.limit - self.limit / 10 {
                break;
            }
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %path.display(), %error, "an old page of the prefix cache cannot be deleted");
                }
                // Another process may have deleted it.
                _ => left -= bytes,
            }
        }
        left
    }

    /// The pages of all models. Deletes what processes that ended have left unfinished.
    fn entries(&self) -> Vec<Entry> {
        let mut entries = Vec::new();
        let names = |path: &Path| {
            let listed =
                fs::read_dir(path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
            listed.collect::<Vec<_>>()
        };
        let is_hex = |path: &Path, digits| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.len() == digits && name.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        let models = names(&self.folder).into_iter().filter(|path| is_hex(path, 24));
        let folders = models.flat_map(|path| names(&path)).filter(|path| is_hex(path, 2));
        for path in folders.flat_map(|path| names(&path)) {
            let Ok(metadata) = fs::metadata(&path) else { continue };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("page") => entries.push(Entry { path, bytes: metadata.len(), used }),
                Some("partial") if used.elapsed().is_ok_and(|age| age > ABANDONED) => {
                    let _ = fs::remove_file(&path);
                }
                _ => {}
            }
        }
        entries
    }

    fn file(&self, key: &PageKey) -> PathBuf {
        let name = key.to_string();
        self.own.join(&name[..2]).join(format!("{name}.page"))
    }
}

/// The name of an unfinished file, which no other process or thread uses.
fn unfinished(name: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{name}.{}-{}.partial", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// When a page counts as used that is used now.
fn time(now: SystemTime, key: &PageKey) -> SystemTime {
    now.checked_sub(STEP * key.depth()).unwrap_or(now)
}

/// The head of a file.
fn head(key: &PageKey, bytes: &[u8]) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(&MAGIC);
    head[8..40].copy_from_slice(key.hash());
    head[40..48].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&head[..48]);
    checksum.update(bytes);
    head[48..].copy_from_slice(&checksum.finalize().to_le_bytes());
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 100;

    fn open(folder: &Path, model: u8, limit: u64) -> PageFolder {
        PageFolder::open(folder, &PageKey::root([model; 32]), BYTES, limit).unwrap()
    }

    fn keys(model: u8, count: i32) -> Vec<PageKey> {
        let mut key = PageKey::root([model; 32]);
        (0..count)
            .map(|token| {
                key = key.after(&[token]);
                key
            })
            .collect()
    }

    fn page(content: u8) -> Vec<u8> {
        vec![content; BYTES]
    }

    #[test]
    fn a_page_is_found_again_by_its_own_model_only() {
        let folder = tempfile::tempdir().unwrap();
        let key = keys(1, 1)[0];
        open(folder.path(), 1, 1000).write(&key, &page(7)).unwrap();
        let again = open(folder.path(), 1, 1000);
        assert!(again.has(&key) && again.read(&key).is_some_and(|found| *found == page(7)));
        assert!(again.read(&keys(1, 2)[1]).is_none());
        let other = open(folder.path(), 2, 1000);
        assert!(!other.has(&key) && other.read(&key).is_none());
        assert_eq!((again.damaged(), other.damaged()), (0, 0));
    }

    #[test]
    fn every_changed_byte_and_every_other_length_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let (pages, key) = (open(folder.path(), 1, 1000), keys(1, 1)[0]);
        pages.write(&key, &page(7)).unwrap();
        let path = pages.file(&key);
        let sound = fs::read(&path).unwrap();
        let changed = (0..sound.len()).flat_map(|index| {
            [1u8, 0x80, 0xFF].map(|bits| {
                let mut bytes = sound.clone();
                bytes[index] ^= bits;
                bytes
            })
        });
        let shorter = (0..sound.len()).map(|length| sound[..length].to_vec());
        let longer = std::iter::once([&sound[..], &[0]].concat());
        let mut count = 0;
        for bytes in changed.chain(shorter).chain(longer) {
            fs::write(&path, bytes).unwrap();
            count += 1;
            assert!(pages.read(&key).is_none() && !path.exists(), "file {count}");
        }
        assert_eq!(pages.damaged(), count);
        // The sound page of another prefix does not become that of this one.
        let other = keys(1, 2)[1];
        pages.write(&other, &page(8)).unwrap();
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(pages.file(&other), &path).unwrap();
        assert!(pages.read(&key).is_none());
    }

    #[test]
    fn the_least_recently_used_pages_of_all_models_are_deleted_and_the_end_of_a_text_first() {
        let folder = tempfile::tempdir().unwrap();
        let size = (HEAD + BYTES) as u64;
        let (old, own) = (keys(1, 2), keys(2, 8));
        let mut time = SystemTime::now() - Duration::from_secs(3600);
        let first = open(folder.path(), 1, 10 * size);
        for key in &old {
            first.write(key, &page(1)).unwrap();
            File::options().append(true).open(first.file(key)).unwrap().set_modified(time).unwrap();
            time += Duration::from_secs(1);
        }
        let pages = open(folder.path(), 2, 10 * size);
        let stranger = folder.path().join("notes.txt");
        fs::write(&stranger, vec![0; 10_000]).unwrap();
        for key in &own {
            pages.write(key, &page(2)).unwrap();
        }
        assert!(first.has(&old[0]), "ten pages fit");
        pages.touch(&own);
        first.touch(&old[1..]);
        pages.write(&keys(3, 1)[0], &page(3)).unwrap();
        assert!(!first.has(&old[0]), "the oldest");
        let left: Vec<bool> = own.iter().map(|key| pages.has(key)).collect();
        assert_eq!(left, [true, true, true, true, true, true, true, false], "and the end of the text");
        assert!(first.has(&old[1]) && stranger.exists());
    }

    #[test]
    fn what_a_process_that_was_killed_left_is_removed_and_never_read() {
        let folder = tempfile::tempdir().unwrap();
        let (pages, keys) = (open(folder.path(), 1, 1000), keys(1, 2));
        pages.write(&keys[1], &page(7)).unwrap();
        let own = pages.file(&keys[0]);
        fs::create_dir_all(own.parent().unwrap()).unwrap();
        let [old, new] = ["old", "new"].map(|name| own.with_file_name(unfinished(name)));
        for path in [&old, &new] {
            fs::write(path, [1; 50]).unwrap();
        }
        File::options()
            .append(true)
            .open(&old)
            .unwrap()
            .set_modified(SystemTime::now() - 2 * ABANDONED)
            .unwrap();
        let again = open(folder.path(), 1, 1000);
        assert!(!again.has(&keys[0]));
        again.write(&keys[0], &page(8)).unwrap();
        assert!(!old.exists() && new.exists());
        assert_eq!(again.damaged(), 0);
    }

    #[test]
    fn a_folder_that_cannot_be_made_and_a_limit_below_a_page_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, []).unwrap();
        let model = PageKey::root([1; 32]);
        let message = PageFolder::open(&file.join("x"), &model, BYTES, 1000).unwrap_err().to_string();
        assert!(message.contains("file/x") && message.contains("cannot be written to"), "{message}");
        let message = PageFolder::open(folder.path(), &model, BYTES, 20).unwrap_err().to_string();
        assert!(message.starts_with("prefix-cache-size is 20 B"), "{message}");
    }
}
