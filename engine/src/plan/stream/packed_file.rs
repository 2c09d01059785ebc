//! The file that keeps the packed weights of streamed layers from run to run.
//!
//! It has a head of one block, then the layers, each at a multiple of the block size, then the contents: a checksum for each piece of
//! each weight. The head, which names the place of the contents and their checksum, is written last, and the file gets its name when
//! all of it is on the disk. A file that has its name is therefore complete; one that is still written is locked, and ends in
//! `.partial`.
//!
//! The name is a hash of all that the bytes depend on: the model's files, how weights are made of them, and the backend that packed
//! them. A file of another model or another version is never opened.

use super::streamed_layer::StreamedLayer;
use dsrun_core::{Code, Error, Result};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    ops::Range,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime},
};

/// Bytes of a block: reads that bypass the page cache begin and end at multiples of it, in the file and in memory.
pub(crate) const BLOCK: usize = 4096;
/// The most bytes of a read.
const PIECE: usize = 8 << 20;
/// What a file begins with.
const MAGIC: [u8; 8] = *b"dsrunpw\x01";
/// The time without progress after which another process that writes the same file counts as hung.
const WRITER_TIMEOUT: Duration = Duration::from_secs(120);

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Contents {
    layers: Vec<LayerContents>,
    /// Bytes in front of the contents.
    end: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct LayerContents {
    /// Where the layer begins in the file.
    offset: u64,
    pieces: Vec<Piece>,
}

/// Bytes of a layer that are read at once.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Piece {
    /// Within the layer; a multiple of [`BLOCK`], as is the length.
    start: u64,
    bytes: u64,
    checksum: u32,
}

impl Contents {
    /// Places layers one behind the other.
    fn new(layers: &[StreamedLayer]) -> Self {
        let mut end = BLOCK as u64;
        let mut place =
            |layer: &StreamedLayer| {
                let offset = end;
                end += layer.bytes.next_multiple_of(BLOCK) as u64;
                let weights = layer.weights.iter();
                let pieces = weights
                    .flat_map(|weight| pieces(weight.offset, weight.bytes))
                    .map(|range| Piece { start: range.start as u64, bytes: range.len() as u64, checksum: 0 });
                LayerContents { offset, pieces: pieces.collect() }
            };
        let layers = layers.iter().map(&mut place).collect();
        Self { layers, end }
    }

    /// The same without checksums.
    fn places(&self) -> Self {
        let mut places = self.clone();
        places.layers.iter_mut().flat_map(|layer| &mut layer.pieces).for_each(|piece| piece.checksum = 0);
        places
    }
}

/// The checksum of a piece: its data, and zeros to the end of its block.
fn checksum(data: &[u8], bytes: usize) -> u32 {
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(data);
    checksum.update(&vec![0; bytes - data.len()]);
    checksum.finalize()
}

/// The pieces of a weight at this place of its layer, the last of which reaches to the end of a block.
fn pieces(offset: usize, bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let end = offset + bytes.next_multiple_of(BLOCK);
    (offset..end).step_by(PIECE).map(move |start| start..end.min(start + PIECE))
}

/// A hash of all that packed bytes depend on.
#[derive(Debug)]
pub(crate) struct Identity(Sha256);

impl Identity {
    /// The identity of weights that this backend packs for this device from these files.
    pub(crate) fn new(packer: &str, source: &str) -> Self {
        let mut identity = Self(Sha256::new());
        identity.add(env!("CARGO_PKG_VERSION"));
        identity.add(packer);
        identity.add(source);
        identity
    }

    /// Adds a text that the bytes depend on.
    pub(crate) fn add(&mut self, text: &str) {
        self.add_bytes(text.as_bytes());
    }

    /// Adds bytes that the bytes depend on.
    pub(crate) fn add_bytes(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    /// The hash.
    pub(crate) fn hash(self) -> [u8; 32] {
        self.0.finalize().into()
    }

    /// The name of the file.
    fn file_name(self) -> String {
        let digits = self.hash().iter().take(12).map(|byte| format!("{byte:02x}")).collect::<String>();
        format!("{digits}.packed")
    }
}

/// A complete file.
#[derive(Debug)]
pub(crate) struct PackedFile {
    path: PathBuf,
    file: File,
    contents: Contents,
}

/// A file that is being written.
#[derive(Debug)]
pub(crate) struct PackedFileWriter {
    path: PathBuf,
    partial: PathBuf,
    file: File,
    contents: Contents,
    finished: bool,
}

/// A file that is there, or is to be written.
#[derive(Debug)]
pub(crate) enum Opened {
    /// It is complete.
    Complete(PackedFile),
    /// It is not there, or is damaged.
    Missing(PackedFileWriter),
}

impl PackedFile {
    /// Opens the file of these layers in a folder, or begins to write it. If another process writes it, waits until it is there.
    ///
    /// # Errors
    /// If the folder cannot be written to, has too little room, or another process writes the file and makes no progress.
    pub(crate) fn open(folder: &Path, identity: Identity, layers: &[StreamedLayer]) -> Result<Opened> {
        let failed = |error| cannot("be made", folder, &error);
        fs::create_dir_all(folder).map_err(failed)?;
        let path = folder.join(identity.file_name());
        let expected = Contents::new(layers);
        let start = Instant::now();
        loop {
            match Self::read(&path, &expected) {
                Ok(file) => return Ok(Opened::Complete(file)),
                Err(Unusable::Missing) => {}
                Err(Unusable::Damaged(reason)) => {
                    tracing::warn!(path = %path.display(), reason, "a file of packed weights cannot be used and is written again");
                }
                Err(Unusable::Io(error)) => return Err(cannot("be read", &path, &error)),
            }
            if let Some(writer) = PackedFileWriter::begin(&path, &expected)? {
                return Ok(Opened::Missing(writer));
            }
            let partial = partial(&path);
            let idle = fs::metadata(&partial).and_then(|file| file.modified()).ok();
            let idle = idle.and_then(|time| SystemTime::now().duration_since(time).ok());
            if idle.unwrap_or_else(|| start.elapsed()).min(start.elapsed()) > WRITER_TIMEOUT {
                let message = format!(
                    "waited {WRITER_TIMEOUT:?} for another process that writes {} and makes no progress",
                    partial.display()
                );
                return Err(Error::new(Code::Timeout, message));
            }
            thread::sleep(Duration::from_millis(200));
        }
    }

    fn read(path: &Path, expected: &Contents) -> std::result::Result<Self, Unusable> {
        let file = match open_direct(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Unusable::Missing),
            file => file.map_err(Unusable::Io)?,
        };
        let damaged = |reason| Err(Unusable::Damaged(reason));
        // The head and the contents are small: they are read through the page cache.
        let plain = File::open(path).map_err(Unusable::Io)?;
        let length = plain.metadata().map_err(Unusable::Io)?.len();
        let Some(size) = length.checked_sub(expected.end).filter(|size| *size > 0) else {
            return damaged("it is too short");
        };
        let mut head = [0; HEAD];
        read_at(&plain, &mut head, 0).map_err(Unusable::Io)?;
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
        read_at(&plain, &mut bytes, expected.end).map_err(Unusable::Io)?;
        if head != self::head(expected.end, &bytes) {
            return damaged("its head does not fit its contents");
        }
        match postcard::from_bytes::<Contents>(&bytes) {
            Ok(contents) if contents.places() == *expected => {
                Ok(Self { path: path.to_owned(), file, contents })
            }
            _ => damaged("its contents are those of other layers"),
        }
    }

    /// Where the file is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The number of pieces of a layer.
    pub(crate) fn pieces(&self, layer: usize) -> usize {
        self.contents.layers[layer].pieces.len()
    }

    /// The bytes of a layer that a piece has.
    pub(crate) fn range(&self, layer: usize, piece: usize) -> Range<usize> {
        let piece = &self.contents.layers[layer].pieces[piece];
        // They are those of a layer in memory.
        piece.start as usize..(piece.start + piece.bytes) as usize
    }

    /// Whether the file has these packed bytes of a weight at this place of a layer.
    pub(crate) fn has(&self, layer: usize, offset: usize, bytes: &[u8]) -> bool {
        pieces(offset, bytes.len()).all(|range| {
            let data = &bytes[range.start - offset..bytes.len().min(range.end - offset)];
            let checksum = checksum(data, range.len());
            let mut known = self.contents.layers[layer].pieces.iter();
            known.any(|piece| piece.start == range.start as u64 && piece.checksum == checksum)
        })
    }

    /// Reads a piece into memory of its length, and compares its checksum.
    ///
    /// # Errors
    /// If it cannot be read, or has changed since it was written.
    pub(crate) fn read_piece(&self, layer: usize, piece: usize, into: &mut [u8]) -> Result<()> {
        let LayerContents { offset, pieces } = &self.contents.layers[layer];
        let piece = &pieces[piece];
        let at = offset + piece.start;
        read_at(&self.file, into, at).map_err(|error| cannot("be read", &self.path, &error))?;
        if crc32fast::hash(into) != piece.checksum {
            let message = format!(
                "bytes {at} to {} of {}, packed weights of streamed layer {}, have changed since they were written\nhint: delete the \
                 file, and it is written again at the next start; if this comes again, the disk is failing",
                at + piece.bytes,
                self.path.display(),
                layer + 1
            );
            return Err(Error::new(Code::Unavailable, message));
        }
        Ok(())
    }
}

impl PackedFileWriter {
    /// Begins to write a file; `None` if another process does.
    fn begin(path: &Path, contents: &Contents) -> Result<Option<Self>> {
        let partial = partial(path);
        let failed = |error| cannot("be written", &partial, &error);
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).open(&partial).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        // Before the lock was free, another process may have finished this file and given it its name.
        if !is_at(&file, &partial) {
            return Ok(None);
        }
        file.set_len(0).map_err(failed)?;
        check_room(&partial, contents.end)?;
        let (path, contents) = (path.to_owned(), contents.clone());
        Ok(Some(Self { path, partial, file, contents, finished: false }))
    }

    /// Writes the packed bytes of a weight to its place in its layer.
    ///
    /// # Errors
    /// If the disk is full, or fails.
    pub(crate) fn write(&mut self, layer: usize, offset: usize, bytes: &[u8]) -> Result<()> {
        let LayerContents { offset: first, pieces: known } = &mut self.contents.layers[layer];
        for range in pieces(offset, bytes.len()) {
            let end = bytes.len().min(range.end - offset);
            let data = &bytes[range.start - offset..end];
            let padding = vec![0; range.len() - data.len()];
            let at = *first + range.start as u64;
            let written = write_at(&self.file, data, at)
                .and_then(|()| write_at(&self.file, &padding, at + data.len() as u64));
            written.map_err(|error| cannot("be written", &self.partial, &error))?;
            let missing = || Error::internal("a packed weight has no place in its file");
            let piece =
                known.iter_mut().find(|piece| piece.start == range.start as u64).ok_or_else(missing)?;
            piece.checksum = checksum(data, range.len());
        }
        Ok(())
    }

    /// Writes the contents and the head, and gives the file its name once all is on the disk.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(crate) fn finish(mut self) -> Result<PackedFile> {
        let failed = |error| cannot("be written", &self.partial, &error);
        let contents = postcard::to_allocvec(&self.contents)
            .map_err(|error| Error::internal(format!("the contents of packed weights: {error}")))?;
        write_at(&self.file, &contents, self.contents.end).map_err(failed)?;
        write_at(&self.file, &head(self.contents.end, &contents), 0).map_err(failed)?;
        self.file.sync_all().map_err(failed)?;
        fs::rename(&self.partial, &self.path).map_err(failed)?;
        self.finished = true;
        let file = open_direct(&self.path).map_err(|error| cannot("be read", &self.path, &error))?;
        Ok(PackedFile { path: self.path.clone(), file, contents: self.contents.clone() })
    }
}

impl Drop for PackedFileWriter {
    fn drop(&mut self) {
        if !self.finished
            && let Err(error) = fs::remove_file(&self.partial)
        {
            tracing::warn!(path = %self.partial.display(), %error, "an unfinished file cannot be removed");
        }
    }
}

/// Why a file cannot be used.
enum Unusable {
    Missing,
    Damaged(&'static str),
    Io(io::Error),
}

/// Bytes of a head.
const HEAD: usize = 32;

/// The head of a file: what it begins with, the place, length and checksum of the contents.
fn head(end: u64, contents: &[u8]) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    let mut rest = &mut head[..];
    let parts: [&[u8]; 4] = [
        &MAGIC,
        &end.to_le_bytes(),
        &(contents.len() as u64).to_le_bytes(),
        &crc32fast::hash(contents).to_le_bytes(),
    ];
    for part in parts {
        // There is room for all of them.
        let _ = rest.write(part);
    }
    head
}

fn partial(path: &Path) -> PathBuf {
    path.with_extension("packed.partial")
}

fn cannot(what: &str, path: &Path, error: &io::Error) -> Error {
    let hint = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "\nhint: free space, or give --weights-in disk:FOLDER a folder on another disk"
        }
        _ => "",
    };
    Error::new(Code::Unavailable, format!("{} cannot {what}: {error}{hint}", path.display()))
}

/// Whether a path still names an open file.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let (opened, named) = (file.metadata(), fs::metadata(path));
    opened
        .ok()
        .zip(named.ok())
        .is_some_and(|(opened, named)| (opened.dev(), opened.ino()) == (named.dev(), named.ino()))
}

#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}

/// # Errors
/// If the disk has less room than a file takes, as far as the system says.
#[cfg(unix)]
fn check_room(path: &Path, bytes: u64) -> Result<()> {
    let Ok(disk) = rustix::fs::statvfs(path) else { return Ok(()) };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if bytes <= free {
        return Ok(());
    }
    let message = format!(
        "{} would take {}, but its disk has {} free\nhint: free space, or give --weights-in disk:FOLDER a folder on another disk",
        path.display(),
        crate::memory::Bytes(bytes),
        crate::memory::Bytes(free)
    );
    Err(Error::new(Code::Unavailable, message))
}

#[cfg(not(unix))]
fn check_room(_: &Path, _: u64) -> Result<()> {
    Ok(())
}

/// Opens a file for reads that bypass the page cache, which would hold nothing that is read again soon; through it where the file
/// system does not offer that.
fn open_direct(path: &Path) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::OpenOptionsExt;
        let flags = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap_or(0);
        match OpenOptions::new().read(true).custom_flags(flags).open(path) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
            opened => return opened,
        }
    }
    File::open(path)
}

#[cfg(unix)]
fn read_at(file: &File, into: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, at)
}

#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, at)
}

#[cfg(windows)]
fn read_at(file: &File, mut into: &mut [u8], mut at: u64) -> io::Result<()> {
    while !into.is_empty() {
        let read = std::os::windows::fs::FileExt::seek_read(file, into, at)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (into, at) = (&mut into[read..], at + read as u64);
    }
    Ok(())
}

#[cfg(windows)]
fn write_at(file: &File, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = std::os::windows::fs::FileExt::seek_write(file, bytes, at)?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        (bytes, at) = (&bytes[written..], at + written as u64);
    }
    Ok(())
}
