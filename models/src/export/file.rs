//! A safetensors file whose tensors are known before their bytes are.

use super::{ExportError, Result, io_error};
use dsrun_core::DType;
use serde_json::{Map, Value, json};
use std::{
    collections::HashMap,
    fs::File,
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

/// The element type of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    /// One that weights have too.
    Of(DType),
    /// Whole numbers of 64 bits.
    I64,
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Self::Of(dtype) => dtype.bytes(),
            Self::I64 => 8,
        }
    }

    fn name(self) -> String {
        match self {
            Self::Of(dtype) => dtype.name().to_uppercase(),
            Self::I64 => "I64".to_owned(),
        }
    }
}

/// A tensor to be written.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) name: String,
    pub(super) element: Element,
    pub(super) shape: Vec<usize>,
}

impl Stored {
    /// Its bytes. (The sizes are those of a weight that is known to fit.)
    pub(super) fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.element.bytes() as u64
    }
}

/// Writes tensors, in any order and in pieces.
pub(super) struct SafetensorsWriter {
    path: PathBuf,
    file: File,
    /// Where each tensor starts in the file.
    starts: HashMap<String, u64>,
    bytes: u64,
}

impl SafetensorsWriter {
    /// Creates a file with a header for these tensors.
    pub(super) fn create(path: &Path, tensors: &[Stored]) -> Result<Self> {
        // Widest elements first, so that each tensor is aligned: readers map the file.
        let mut order: Vec<&Stored> = tensors.iter().collect();
        order.sort_by_key(|tensor| std::cmp::Reverse(tensor.element.bytes()));
        let mut header = Map::new();
        header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
        let mut at = 0;
        let mut starts = HashMap::new();
        for tensor in order {
            let end = at + tensor.bytes();
            let entry = json!({
                "dtype": tensor.element.name(), "shape": tensor.shape, "data_offsets": [at, end],
            });
            header.insert(tensor.name.clone(), entry);
            starts.insert(tensor.name.clone(), at);
            at = end;
        }
        let mut header = Value::Object(header).to_string();
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        let data = 8 + header.len() as u64;
        starts.values_mut().for_each(|start| *start += data);

        let mut file = File::create_new(path).map_err(io_error(path))?;
        let head = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        file.write_all(&head).and_then(|()| file.set_len(data + at)).map_err(io_error(path))?;
        Ok(Self { path: path.to_owned(), file, starts, bytes: at })
    }

    /// Bytes of all tensors.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes bytes of a tensor, from `at` on; gives how many.
    pub(super) fn put(&mut self, tensor: &str, at: u64, bytes: &[u8]) -> Result<u64> {
        let start = self.starts.get(tensor).copied().ok_or_else(|| {
            ExportError::Weight(dsrun_core::Error::internal(format!("{tensor} is not in the header")))
        })?;
        let written = self.file.seek(SeekFrom::Start(start + at)).and_then(|_| self.file.write_all(bytes));
        written.map_err(io_error(&self.path))?;
        Ok(bytes.len() as u64)
    }

    /// Makes sure that all is on the disk.
    pub(super) fn finish(self) -> Result<()> {
        self.file.sync_all().map_err(io_error(&self.path))
    }
}
