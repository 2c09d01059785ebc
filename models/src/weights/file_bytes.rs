//! The bytes of a file, mapped into memory, or of a buffer that stands in for one.

use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

/// The content of a model file.
#[derive(Debug)]
pub(crate) enum FileBytes {
    /// A read-only mapping: pages are read when they are touched and can be dropped again.
    Mapped(Mmap),
    /// A buffer in memory.
    Owned(Vec<u8>),
}

impl FileBytes {
    /// Maps a file.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        // Opening a pipe would wait for a writer, and a folder gives an obscure error only when it is mapped.
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() {
            let kind = if metadata.is_dir() { "a folder" } else { "a device or pipe" };
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("it is {kind}, not a file")));
        }
        if metadata.len() == 0 {
            return Ok(Self::Owned(Vec::new()));
        }
        // SAFETY: The mapping is shared and read-only. Another process may still change or shorten the file; what is
        // read from it is therefore only ever copied or decoded as plain bytes, and every text is checked each time it
        // is looked at, so changed content gives wrong numbers but no undefined behaviour on our side. A shortened
        // file kills the process (SIGBUS), as with every program that maps model files.
        let map = unsafe { Mmap::map(&File::open(path)?)? };
        Ok(Self::Mapped(map))
    }

    /// All bytes.
    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }

    /// Lets the system drop the pages of this range from the process. They are read again when touched again.
    pub(crate) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Self::Mapped(map) = self
            && range.start < range.end
            && range.end <= map.len()
        {
            // SAFETY: The mapping is shared, read-only and backed by a file, so dropped pages are read again with the
            // same content: memory that others have borrowed does not change.
            let advised = unsafe {
                map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    range.start,
                    range.end - range.start,
                )
            };
            if let Err(error) = advised {
                tracing::debug!(%error, "pages of a consumed weight could not be released");
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_bytes_survive_a_release() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let content: Vec<u8> = (0..100_000u32).map(|i| (i * 7) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let bytes = FileBytes::open(&path).unwrap();
        assert_eq!(bytes.as_slice(), content);
        bytes.release(5_000..95_000);
        bytes.release(99_999..100_001);
        assert_eq!(bytes.as_slice(), content);
    }

    #[test]
    fn folders_are_refused_and_empty_files_are_empty() {
        let folder = tempfile::tempdir().unwrap();
        assert!(FileBytes::open(folder.path()).unwrap_err().to_string().contains("a folder"));
        let path = folder.path().join("empty");
        std::fs::write(&path, []).unwrap();
        assert!(FileBytes::open(&path).unwrap().as_slice().is_empty());
    }
}
