//! Reads GGUF files: metadata, vocabulary and tensors, mapped into memory.
//!
//! Versions 2 and 3, little-endian. The whole header is checked when a file is opened, in memory proportional to it;
//! the data of tensors is read when rows are asked for. Tensors of types that cannot be used are listed all the same
//! and are an error only when a weight is made of one.
//!
//! The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod cursor;
mod error;
mod header;
mod metadata;
pub(crate) mod parts;
mod tensor_type;
mod vocabulary;

use crate::weights::file_bytes::FileBytes;
use crate::weights::slice_rows;
use crate::weights::{TensorSource, fingerprint_of_files};
use dsrun_core::WeightType;
use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

pub use error::{GgufError, GgufProblem, Result};
pub use metadata::{ArrayValue, FromValue, Metadata, Value, ValueType};
pub use tensor_type::TensorType;

use header::{Header, TensorRecord};

/// An open GGUF file.
pub struct GgufFile {
    path: PathBuf,
    bytes: FileBytes,
    header: Header,
}

/// What a GGUF file says about one of its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor<'a> {
    /// The name.
    pub name: &'a str,
    /// The sizes, outermost first (the file has them the other way round).
    pub shape: Vec<usize>,
    /// The type, which need not be one that can be used.
    pub tensor_type: TensorType,
    /// Where the data starts in the file.
    pub offset: usize,
    /// How long the data is; `None` if the type is unknown.
    pub bytes: Option<usize>,
}

impl GgufFile {
    /// Maps a file into memory and checks its header.
    ///
    /// # Errors
    /// If the file cannot be read, is no GGUF file of a supported version, or contradicts itself.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = FileBytes::open(path).map_err(|error| GgufError::new(path, GgufProblem::Io(error)))?;
        Self::new(path, bytes)
    }

    /// Reads a file that is in memory. Messages call it `path`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_bytes(path: impl AsRef<Path>, bytes: Vec<u8>) -> Result<Self> {
        Self::new(path.as_ref(), FileBytes::Owned(bytes))
    }

    fn new(path: &Path, bytes: FileBytes) -> Result<Self> {
        let header = Header::read(bytes.as_slice()).map_err(|problem| GgufError::new(path, problem))?;
        Ok(Self { path: path.to_owned(), bytes, header })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// What the offsets of tensors are multiples of.
    pub fn alignment(&self) -> usize {
        self.header.alignment
    }

    /// The metadata.
    pub fn metadata(&self) -> Metadata<'_> {
        Metadata { file: self }
    }

    /// All tensors, in the order of the file.
    pub fn tensors(&self) -> impl Iterator<Item = GgufTensor<'_>> {
        self.header.tensors.iter().map(|record| self.describe_tensor(record))
    }

    /// The tensor of this name, if there is one.
    pub fn tensor(&self, name: &str) -> Option<GgufTensor<'_>> {
        self.header.tensor(self.bytes.as_slice(), name).map(|record| self.describe_tensor(record))
    }

    fn describe_tensor(&self, record: &TensorRecord) -> GgufTensor<'_> {
        GgufTensor {
            name: record.name.text(self.bytes.as_slice()),
            shape: record.shape(),
            tensor_type: record.tensor_type,
            offset: record.start,
            bytes: record.bytes,
        }
    }

    /// A tensor that weights can be made of: its type and its bytes.
    fn weight(&self, name: &str) -> Result<(WeightType, &[u8])> {
        let problem = |problem| GgufError::new(&self.path, problem);
        let file = self.bytes.as_slice();
        let record = self.header.tensor(file, name);
        let record = record.ok_or_else(|| problem(GgufProblem::MissingTensor(name.to_owned())))?;
        let usable = record.tensor_type.weight_format().zip(record.bytes);
        let (format, bytes) = usable.ok_or_else(|| {
            let tensor_type = record.tensor_type.to_string();
            problem(GgufProblem::UnsupportedType { tensor: name.to_owned(), tensor_type })
        })?;
        // Inside the file: checked when it was opened.
        let data = file.get(record.start..).and_then(|rest| rest.get(..bytes)).unwrap_or_default();
        Ok((WeightType { format, shape: record.shape() }, data))
    }
}

impl fmt::Debug for GgufFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (keys, tensors) = (self.header.entries.len(), self.header.tensors.len());
        f.debug_struct("GgufFile")
            .field("path", &self.path)
            .field("keys", &keys)
            .field("tensors", &tensors)
            .finish()
    }
}

impl TensorSource for GgufFile {
    fn describe(&self) -> String {
        self.path.display().to_string()
    }

    fn names(&self) -> Vec<&str> {
        self.header.tensors.iter().map(|tensor| tensor.name.text(self.bytes.as_slice())).collect()
    }

    fn tensor_type(&self, name: &str) -> dsrun_core::Result<WeightType> {
        Ok(self.weight(name)?.0)
    }

    fn rows(&self, name: &str, first: usize, count: usize) -> dsrun_core::Result<Cow<'_, [u8]>> {
        let (weight_type, bytes) = self.weight(name)?;
        slice_rows(&weight_type, bytes, first, count).map(Cow::Borrowed).map_err(|error| error.at(name))
    }

    fn fingerprint(&self) -> Option<String> {
        fingerprint_of_files([self.path()])
    }

    fn release(&self, name: &str) {
        if let Some(record) = self.header.tensor(self.bytes.as_slice(), name) {
            self.bytes.release(record.start..record.start + record.bytes.unwrap_or(0));
        }
    }
}
