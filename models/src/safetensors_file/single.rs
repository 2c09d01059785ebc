//! One safetensors file.
//!
//! ```text
//! header length u64 | header: JSON, name -> type, shape, start and end | data
//! ```
//!
//! Types and the structure of the header are those of the `safetensors` crate. The checks are made here, in front of
//! it: the crate keeps the last of two tensors of one name, its errors rarely name the tensor, and the header goes
//! through copies many times its size.

use super::error::{Result, SafetensorsError, SafetensorsProblem};
use super::unique_map::{EntryValue, UniqueMap};
use crate::weights::file_bytes::FileBytes;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The longest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;
/// The most dimensions a tensor may have; the format sets no limit.
const MAX_RANK: usize = 16;
/// Bytes of the header's length.
const LENGTH: usize = 8;

/// A mapped file and its checked header.
#[derive(Debug)]
pub(super) struct SingleFile {
    path: PathBuf,
    bytes: FileBytes,
    /// Where the data starts.
    data: usize,
    tensors: Metadata,
    /// In the order of the data.
    pub(super) names: Vec<String>,
    pub(super) metadata: BTreeMap<String, String>,
}

impl SingleFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let bytes = FileBytes::open(path)
            .map_err(|error| SafetensorsError::new(path, SafetensorsProblem::Io(error)))?;
        Self::new(path, bytes)
    }

    pub(super) fn new(path: &Path, bytes: FileBytes) -> Result<Self> {
        let parsed = parse(bytes.as_slice()).map_err(|problem| SafetensorsError::new(path, problem))?;
        let (data, header) = parsed;
        let names = header.tensors.iter().map(|(name, _)| name.clone()).collect();
        let tensors = Metadata::new(None, header.tensors)
            .map_err(|error| SafetensorsError::new(path, SafetensorsProblem::Header(error.to_string())))?;
        Ok(Self { path: path.to_owned(), bytes, data, tensors, names, metadata: header.metadata })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Type and shape of a tensor.
    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.info(name)
    }

    /// Where a tensor is in the file.
    fn range(&self, info: &TensorInfo) -> Range<usize> {
        let (start, end) = info.data_offsets;
        self.data + start..self.data + end
    }

    /// The bytes of a tensor; inside the file, as was checked when it was opened.
    pub(super) fn bytes(&self, info: &TensorInfo) -> &[u8] {
        self.bytes.as_slice().get(self.range(info)).unwrap_or_default()
    }

    pub(super) fn release(&self, info: &TensorInfo) {
        self.bytes.release(self.range(info));
    }
}

struct Header {
    tensors: Vec<(String, TensorInfo)>,
    metadata: BTreeMap<String, String>,
}

/// Where the data starts, and the header, whose tensors come in the order of their data.
fn parse(bytes: &[u8]) -> Result<(usize, Header), SafetensorsProblem> {
    let (length, rest) =
        bytes.split_first_chunk::<LENGTH>().ok_or(SafetensorsProblem::TooShort(bytes.len()))?;
    let length = u64::from_le_bytes(*length);
    let too_long = || SafetensorsProblem::HeaderLength { length, left: rest.len() };
    let inside = usize::try_from(length).ok().filter(|_| length <= MAX_HEADER);
    let (header, data) = inside.and_then(|length| rest.split_at_checked(length)).ok_or_else(too_long)?;
    let header = read_header(header)?;
    let end = check(&header.tensors, data.len())?;
    if end != data.len() {
        return Err(SafetensorsProblem::LeftOver { end, data: data.len() });
    }
    Ok((LENGTH + length as usize, header))
}

/// An entry of the header.
enum Entry {
    /// Free texts, under `__metadata__`.
    Metadata(Option<UniqueMap<String>>),
    /// A tensor, under its name.
    Tensor(TensorInfo),
}

impl<'de> EntryValue<'de> for Entry {
    fn read<A: MapAccess<'de>>(key: &str, map: &mut A) -> Result<Self, A::Error> {
        if key == "__metadata__" {
            return map.next_value().map(Self::Metadata);
        }
        let Tensor { dtype, shape: Shape(shape), data_offsets } = map.next_value()?;
        Ok(Self::Tensor(TensorInfo { dtype, shape, data_offsets }))
    }
}

/// What [`TensorInfo`] holds, as it is read.
#[derive(Deserialize)]
struct Tensor {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (usize, usize),
}

/// The sizes of a tensor, refused when there are too many: a size takes far less room in a header than in memory.
struct Shape(Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Sizes)
    }
}

struct Sizes;

impl<'de> Visitor<'de> for Sizes {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a shape")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Shape, A::Error> {
        let mut sizes = Vec::new();
        while let Some(size) = sequence.next_element()? {
            if sizes.len() == MAX_RANK {
                return Err(A::Error::custom(format!("a shape has more than {MAX_RANK} dimensions")));
            }
            sizes.push(size);
        }
        Ok(Shape(sizes))
    }
}

fn read_header(header: &[u8]) -> Result<Header, SafetensorsProblem> {
    let entries: UniqueMap<Entry> =
        serde_json::from_slice(header).map_err(|error| SafetensorsProblem::Header(error.to_string()))?;
    let (mut tensors, mut metadata) = (Vec::new(), BTreeMap::new());
    for (name, entry) in entries.0 {
        match entry {
            Entry::Metadata(texts) => metadata.extend(texts.into_iter().flat_map(|texts| texts.0)),
            Entry::Tensor(info) => tensors.push((name, info)),
        }
    }
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    Ok(Header { tensors, metadata })
}

/// Checks that the tensors fill the data without gaps, and returns where the last one ends.
fn check(tensors: &[(String, TensorInfo)], data: usize) -> Result<usize, SafetensorsProblem> {
    let mut expected = 0;
    for (name, info) in tensors {
        let (start, end) = info.data_offsets;
        if start > end || end > data {
            return Err(SafetensorsProblem::Outside { tensor: name.clone(), offsets: (start, end), data });
        }
        if start != expected {
            return Err(SafetensorsProblem::NotContiguous { tensor: name.clone(), start, expected });
        }
        expected = end;
        let elements = info.shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        let bits = elements.and_then(|elements| elements.checked_mul(info.dtype.bitsize()));
        if bits != (end - start).checked_mul(8) {
            return Err(SafetensorsProblem::Size {
                tensor: name.clone(),
                shape: info.shape.clone(),
                dtype: info.dtype.to_string(),
                bytes: end - start,
            });
        }
    }
    Ok(expected)
}
