//! Reads and checks everything in a GGUF file but the data of its tensors.
//!
//! ```text
//! "GGUF" | version u32 | tensors u64 | metadata keys u64
//! per key:    name | value type u32 | value
//! per tensor: name | dimensions u32 | sizes u64.. innermost first | type u32 | offset u64, from the start of the data
//! padding to the alignment, then the data
//! ```
//!
//! Numbers are little-endian; a text is its length as u64 and its bytes. Texts stay in the file: what is kept are
//! [`Span`]s, so a header of many entries takes little more memory than file.

use super::cursor::{Cursor, Span};
use super::error::GgufProblem;
use super::metadata::{Entry, FromValue, value};
use super::tensor_type::TensorType;
use crate::weights::quoted::Quoted;

/// The alignment of files that do not name one.
const DEFAULT_ALIGNMENT: usize = 32;
/// The most dimensions a tensor may have.
const MAX_RANK: usize = 4;

/// What the header says, checked.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) alignment: usize,
    /// Metadata in the order of the file.
    pub(super) entries: Vec<Entry>,
    /// Indices of `entries`, sorted by key.
    entries_by_key: Vec<usize>,
    /// Tensors in the order of the file.
    pub(super) tensors: Vec<TensorRecord>,
    /// Indices of `tensors`, sorted by name.
    tensors_by_name: Vec<usize>,
}

/// One tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct TensorRecord {
    pub(super) name: Span,
    rank: usize,
    /// Innermost first, as in the file.
    dimensions: [u64; MAX_RANK],
    pub(super) tensor_type: TensorType,
    /// From the start of the data.
    offset: u64,
    /// Where it is in the file; without a length if the type is unknown.
    pub(super) start: usize,
    pub(super) bytes: Option<usize>,
}

impl TensorRecord {
    /// Smallest record: length of an empty name, number of dimensions, one dimension, type, offset.
    const SMALLEST: usize = 8 + 4 + 8 + 4 + 8;

    /// The sizes as they are in the file, outermost first.
    fn raw_shape(&self) -> Vec<u64> {
        self.dimensions.iter().take(self.rank).rev().copied().collect()
    }

    /// The sizes, outermost first. They fit, because the number of elements does.
    pub(super) fn shape(&self) -> Vec<usize> {
        self.dimensions.iter().take(self.rank).rev().map(|size| *size as usize).collect()
    }

    fn read(cursor: &mut Cursor<'_>, index: usize) -> Result<Self, GgufProblem> {
        let name = cursor.text(&format_args!("the name of tensor {index}"))?;
        let text = name.text(cursor.all());
        let what = format_args!("the description of tensor {}", Quoted(text));
        let rank = cursor.u32(&what)?;
        if rank == 0 || rank as usize > MAX_RANK {
            return Err(GgufProblem::Rank { tensor: text.to_owned(), rank });
        }
        let rank = rank as usize;
        let mut dimensions = [1; MAX_RANK];
        for size in dimensions.iter_mut().take(rank) {
            *size = cursor.u64(&what)?;
        }
        let tensor_type = TensorType::from_number(cursor.u32(&what)?);
        let offset = cursor.u64(&what)?;
        let mut record = Self { name, rank, dimensions, tensor_type, offset, start: 0, bytes: None };
        if record.dimensions.contains(&0) {
            return Err(GgufProblem::ZeroDimension { tensor: text.to_owned(), shape: record.raw_shape() });
        }
        record.bytes = record.size(text)?;
        Ok(record)
    }

    /// Bytes of the data, if the type is known.
    fn size(&self, name: &str) -> Result<Option<usize>, GgufProblem> {
        let overflow = || GgufProblem::Overflow { tensor: name.to_owned(), shape: self.raw_shape() };
        // As tools elsewhere count in signed 64 bits, so do we: nothing real comes near.
        let elements = self.dimensions.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        let elements = elements.filter(|count| i64::try_from(*count).is_ok()).ok_or_else(overflow)?;
        let elements = usize::try_from(elements).map_err(|_| overflow())?;
        let Some((block, bytes)) = self.tensor_type.block() else { return Ok(None) };
        let columns = self.dimensions[0] as usize;
        if !columns.is_multiple_of(block) {
            return Err(GgufProblem::PartialBlock {
                tensor: name.to_owned(),
                columns,
                block,
                tensor_type: self.tensor_type.to_string(),
            });
        }
        (elements / block).checked_mul(bytes).map(Some).ok_or_else(overflow)
    }

    /// Finds the data in the file.
    fn locate(&mut self, bytes: &[u8], data: usize, alignment: usize) -> Result<(), GgufProblem> {
        let name = self.name.text(bytes);
        if !self.offset.is_multiple_of(alignment as u64) {
            return Err(GgufProblem::Misaligned { tensor: name.to_owned(), offset: self.offset, alignment });
        }
        let start = usize::try_from(self.offset).ok().and_then(|offset| data.checked_add(offset));
        let end = start.and_then(|start| start.checked_add(self.bytes.unwrap_or(0)));
        let inside = start.zip(end).filter(|(_, end)| *end <= bytes.len());
        let (start, _) = inside.ok_or_else(|| GgufProblem::Outside {
            tensor: name.to_owned(),
            offset: self.offset,
            bytes: self.bytes,
            data,
            file: bytes.len(),
        })?;
        self.start = start;
        Ok(())
    }
}

impl Header {
    pub(super) fn read(bytes: &[u8]) -> Result<Self, GgufProblem> {
        let mut cursor = Cursor::new(bytes, 0);
        let (version, tensor_count, key_count) = read_start(&mut cursor)?;

        let count = cursor.room_for(key_count, Entry::SMALLEST, &"metadata keys")?;
        let mut entries = Vec::with_capacity(count);
        for index in 0..count {
            entries.push(Entry::read(&mut cursor, bytes, index)?);
        }
        let entries_by_key = sorted(bytes, &entries, "metadata key", |entry| entry.key)?;

        let count = cursor.room_for(tensor_count, TensorRecord::SMALLEST, &"tensors")?;
        let mut tensors = Vec::with_capacity(count);
        for index in 0..count {
            tensors.push(TensorRecord::read(&mut cursor, index)?);
        }
        let tensors_by_name = sorted(bytes, &tensors, "tensor", |tensor| tensor.name)?;

        let mut header =
            Self { version, alignment: DEFAULT_ALIGNMENT, entries, entries_by_key, tensors, tensors_by_name };
        header.alignment = header.read_alignment(bytes)?;
        let data = cursor.at().checked_next_multiple_of(header.alignment).unwrap_or(usize::MAX);
        for tensor in &mut header.tensors {
            tensor.locate(bytes, data, header.alignment)?;
        }
        header.check_overlaps(bytes)?;
        Ok(header)
    }

    fn read_alignment(&self, bytes: &[u8]) -> Result<usize, GgufProblem> {
        const KEY: &str = "general.alignment";
        let Some(value) = self.entry(bytes, KEY).and_then(|entry| value(entry, bytes)) else {
            return Ok(DEFAULT_ALIGNMENT);
        };
        let alignment = u32::from_value(value).ok_or_else(|| GgufProblem::WrongType {
            key: KEY.to_owned(),
            expected: u32::EXPECTED,
            found: value.described(),
        })?;
        if !alignment.is_power_of_two() {
            return Err(GgufProblem::Alignment(alignment));
        }
        Ok(alignment as usize)
    }

    /// Two tensors with the same bytes mean a corrupt header: no writer shares them.
    fn check_overlaps(&self, bytes: &[u8]) -> Result<(), GgufProblem> {
        let mut by_start: Vec<&TensorRecord> = self.tensors.iter().collect();
        by_start.sort_by_key(|tensor| (tensor.start, tensor.bytes));
        for pair in by_start.windows(2) {
            if let [first, second] = pair
                && first.start + first.bytes.unwrap_or(0) > second.start
            {
                return Err(GgufProblem::Overlap {
                    first: first.name.text(bytes).to_owned(),
                    second: second.name.text(bytes).to_owned(),
                    offset: second.start,
                });
            }
        }
        Ok(())
    }

    /// The metadata entry of a key.
    pub(super) fn entry(&self, bytes: &[u8], key: &str) -> Option<&Entry> {
        find(bytes, &self.entries, &self.entries_by_key, key, |entry| entry.key)
    }

    /// The tensor of a name.
    pub(super) fn tensor(&self, bytes: &[u8], name: &str) -> Option<&TensorRecord> {
        find(bytes, &self.tensors, &self.tensors_by_name, name, |tensor| tensor.name)
    }
}

/// Version, number of tensors, number of metadata keys.
fn read_start(cursor: &mut Cursor<'_>) -> Result<(u32, u64, u64), GgufProblem> {
    let magic = cursor.take(4, &"the file header")?;
    if magic != b"GGUF" {
        let mut found = [0; 4];
        found.copy_from_slice(magic);
        return Err(GgufProblem::NotGguf(found));
    }
    let version = cursor.u32(&"the file header")?;
    match version {
        2 | 3 => {}
        _ if (1..=255).contains(&version.swap_bytes()) => {
            return Err(GgufProblem::BigEndian(version.swap_bytes()));
        }
        _ => return Err(GgufProblem::Version(version)),
    }
    Ok((version, cursor.u64(&"the file header")?, cursor.u64(&"the file header")?))
}

/// Indices of `items`, sorted by name; a name that comes twice is an error.
fn sorted<T>(
    bytes: &[u8],
    items: &[T],
    what: &'static str,
    name: impl Fn(&T) -> Span,
) -> Result<Vec<usize>, GgufProblem> {
    let mut indices: Vec<usize> = (0..items.len()).collect();
    let text = |index: &usize| items.get(*index).map(|item| name(item).bytes(bytes)).unwrap_or_default();
    indices.sort_unstable_by(|a, b| text(a).cmp(text(b)));
    for pair in indices.windows(2) {
        if let [a, b] = pair
            && text(a) == text(b)
        {
            return Err(GgufProblem::Duplicate { what, name: String::from_utf8_lossy(text(a)).into_owned() });
        }
    }
    Ok(indices)
}

/// The item of this name, by binary search.
fn find<'a, T>(
    bytes: &[u8],
    items: &'a [T],
    sorted: &[usize],
    wanted: &str,
    name: impl Fn(&T) -> Span,
) -> Option<&'a T> {
    let text = |index: usize| items.get(index).map(|item| name(item).bytes(bytes)).unwrap_or_default();
    let position = sorted.binary_search_by(|index| text(*index).cmp(wanted.as_bytes())).ok()?;
    items.get(*sorted.get(position)?)
}
