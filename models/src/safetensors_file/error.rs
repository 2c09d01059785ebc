//! What can be wrong with safetensors files, or with what is asked of them.

use crate::weights::quoted::Quoted;
use std::fmt;
use std::path::{Path, PathBuf};

/// Shorthand for results of this module.
pub type Result<T, E = SafetensorsError> = std::result::Result<T, E>;

/// A safetensors file or index that cannot be used, or something that it does not have.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct SafetensorsError {
    path: PathBuf,
    problem: Box<SafetensorsProblem>,
}

impl SafetensorsError {
    pub(super) fn new(path: &Path, problem: SafetensorsProblem) -> Self {
        Self { path: path.to_owned(), problem: Box::new(problem) }
    }

    /// The file: a safetensors file, an index, or a folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is wrong.
    pub fn problem(&self) -> &SafetensorsProblem {
        &self.problem
    }
}

impl From<SafetensorsError> for dsrun_core::Error {
    fn from(error: SafetensorsError) -> Self {
        match *error.problem {
            SafetensorsProblem::UnsupportedType { .. } => Self::unsupported(error.to_string()),
            SafetensorsProblem::Io(_) => Self::new(dsrun_core::Code::Unavailable, error.to_string()),
            _ => Self::invalid(error.to_string()),
        }
    }
}

/// What is wrong with a safetensors file, or with the index of several. Names are as in the file.
#[derive(Debug)]
#[non_exhaustive]
pub enum SafetensorsProblem {
    /// The system cannot read it.
    Io(std::io::Error),
    /// A folder has neither an index nor a file of the usual name.
    NothingThere,
    /// The file is too short to have a header.
    TooShort(usize),
    /// The header is longer than the rest of the file, or than any real header.
    HeaderLength {
        /// The length it says it has.
        length: u64,
        /// How much there is.
        left: usize,
    },
    /// The header is not JSON of the right form; what the parser says.
    Header(String),
    /// A tensor is not inside the file, or its end comes before its start.
    Outside {
        /// The tensor.
        tensor: String,
        /// Where it starts and ends, from the start of the data.
        offsets: (usize, usize),
        /// How long the data is.
        data: usize,
    },
    /// The shape of a tensor does not make the bytes it has.
    Size {
        /// The tensor.
        tensor: String,
        /// The shape.
        shape: Vec<usize>,
        /// The name of the type.
        dtype: String,
        /// How many bytes it has.
        bytes: usize,
    },
    /// A tensor does not start where the one before it ends.
    NotContiguous {
        /// The tensor.
        tensor: String,
        /// Where it starts, from the start of the data.
        start: usize,
        /// Where the one before ends.
        expected: usize,
    },
    /// There is data after the last tensor.
    LeftOver {
        /// Where the last tensor ends, from the start of the data.
        end: usize,
        /// How long the data is.
        data: usize,
    },
    /// The index is not JSON of the right form; what the parser says.
    Index(String),
    /// The index names a shard that is no plain file name.
    ShardName {
        /// The name.
        shard: String,
        /// A tensor that is said to be in it.
        tensor: String,
    },
    /// The index names a shard that is not there.
    MissingShard {
        /// The name.
        shard: String,
        /// A tensor that is said to be in it.
        tensor: String,
    },
    /// The index says that a tensor is in a shard, which it is not.
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: String,
    },
    /// Two shards have a tensor of one name.
    InTwoShards {
        /// The tensor.
        tensor: String,
        /// One shard.
        first: String,
        /// The other shard.
        second: String,
    },
    /// There is no such tensor.
    MissingTensor(String),
    /// The tensor is there, but has no elements.
    Empty {
        /// The tensor.
        tensor: String,
        /// The shape.
        shape: Vec<usize>,
    },
    /// The tensor is there, but weights of its type cannot be used.
    UnsupportedType {
        /// The tensor.
        tensor: String,
        /// The name of the type.
        dtype: String,
    },
}

impl fmt::Display for SafetensorsProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "cannot be read: {error}"),
            Self::NothingThere => {
                write!(f, "has neither model.safetensors nor model.safetensors.index.json")
            }
            Self::TooShort(length) => {
                write!(f, "is no safetensors file: {length} bytes are too few for the length of a header")
            }
            Self::HeaderLength { length, left } => {
                write!(
                    f,
                    "says that its header has {length} bytes, but {left} follow and at most 100000000 are "
                )?;
                write!(f, "allowed; it is no safetensors file, or cut short")
            }
            Self::Header(message) => write!(f, "has an invalid header: {message}"),
            Self::Outside { tensor, offsets: (start, end), data } => {
                let name = Quoted(tensor);
                write!(
                    f,
                    "tensor {name} at data offsets {start}..{end} is outside the {data} bytes of data; "
                )?;
                write!(f, "the file is cut short or corrupt")
            }
            Self::Size { tensor, shape, dtype, bytes } => {
                write!(
                    f,
                    "tensor {} of shape {shape:?} and type {dtype} cannot have {bytes} bytes",
                    Quoted(tensor)
                )
            }
            Self::NotContiguous { tensor, start, expected } => {
                let name = Quoted(tensor);
                write!(
                    f,
                    "tensor {name} starts at data offset {start}, but the one before it ends at {expected}"
                )
            }
            Self::LeftOver { end, data } => {
                write!(f, "its tensors end at data offset {end}, but it has {data} bytes of data")
            }
            Self::Index(message) => write!(f, "is no valid index of safetensors files: {message}"),
            Self::ShardName { shard, tensor } => {
                let (shard, tensor) = (Quoted(shard), Quoted(tensor));
                write!(
                    f,
                    "tensor {tensor} is said to be in {shard}, which is not the name of a file in the same folder"
                )
            }
            Self::MissingShard { shard, tensor } => {
                let (shard, tensor) = (Quoted(shard), Quoted(tensor));
                write!(
                    f,
                    "file {shard}, which should hold tensor {tensor}, is missing; fetch the model again"
                )
            }
            Self::NotInShard { tensor, shard } => {
                let (shard, tensor) = (Quoted(shard), Quoted(tensor));
                write!(
                    f,
                    "tensor {tensor} should be in {shard}, but is not; the files are of different versions"
                )
            }
            Self::InTwoShards { tensor, first, second } => {
                let (first, second) = (Quoted(first), Quoted(second));
                write!(f, "tensor {} is in {first} and in {second}", Quoted(tensor))
            }
            Self::MissingTensor(name) => write!(f, "has no tensor {}", Quoted(name)),
            Self::Empty { tensor, shape } => {
                write!(f, "tensor {} of shape {shape:?} has no elements", Quoted(tensor))
            }
            Self::UnsupportedType { tensor, dtype } => {
                write!(f, "tensor {} has type {dtype}, which cannot be used; ", Quoted(tensor))?;
                write!(f, "F32, F16, BF16, I32, U32, I8 and U8 can")
            }
        }
    }
}
