//! Reads the parts of a GGUF header one after the other, none of them beyond the end.

use super::error::{GgufProblem, Result};
use std::fmt;

/// A run of bytes of the file: where it starts and how long it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Span {
    /// The text there. It was found to be UTF-8 when the file was opened; should another process have changed the file
    /// since, it reads as empty.
    pub(super) fn text(self, bytes: &[u8]) -> &str {
        std::str::from_utf8(self.bytes(bytes)).unwrap_or_default()
    }

    /// The bytes there.
    pub(super) fn bytes(self, bytes: &[u8]) -> &[u8] {
        bytes.get(self.start..).and_then(|rest| rest.get(..self.len)).unwrap_or_default()
    }
}

/// A position in the file.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// A cursor at `at`, which may be the end.
    pub(super) fn new(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at: at.min(bytes.len()) }
    }

    /// The whole file.
    pub(super) fn all(&self) -> &'a [u8] {
        self.bytes
    }

    /// The position.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// How many bytes there are from here on.
    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `len` bytes, which are part of `what`.
    pub(super) fn take(&mut self, len: u64, what: &dyn fmt::Display) -> Result<&'a [u8], GgufProblem> {
        let taken = usize::try_from(len).ok().and_then(|len| self.bytes[self.at..].get(..len));
        let taken = taken.ok_or_else(|| GgufProblem::Truncated {
            what: what.to_string(),
            offset: self.at,
            needed: len,
            left: self.left(),
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &dyn fmt::Display) -> Result<[u8; N], GgufProblem> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    /// A number of four bytes.
    pub(super) fn u32(&mut self, what: &dyn fmt::Display) -> Result<u32, GgufProblem> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// A number of eight bytes.
    pub(super) fn u64(&mut self, what: &dyn fmt::Display) -> Result<u64, GgufProblem> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A text with its length in front.
    pub(super) fn text(&mut self, what: &dyn fmt::Display) -> Result<Span, GgufProblem> {
        let length = self.u64(&format_args!("the length of {what}"))?;
        let start = self.at;
        let text = self.take(length, what)?;
        match std::str::from_utf8(text) {
            Ok(_) => Ok(Span { start, len: text.len() }),
            Err(_) => Err(GgufProblem::Utf8 { what: what.to_string(), offset: start }),
        }
    }

    /// Checks that `count` things of at least `smallest` bytes each can follow, before anything is allocated for them.
    pub(super) fn room_for(
        &self,
        count: u64,
        smallest: usize,
        what: &dyn fmt::Display,
    ) -> Result<usize, GgufProblem> {
        let fits = usize::try_from(count).ok().filter(|count| *count <= self.left() / smallest.max(1));
        fits.ok_or_else(|| GgufProblem::Count {
            what: what.to_string(),
            count,
            offset: self.at,
            left: self.left(),
        })
    }
}
