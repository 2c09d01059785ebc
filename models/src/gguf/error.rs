//! What can be wrong with a GGUF file, or with what is asked of it.

use crate::weights::quoted::Quoted;
use std::fmt;
use std::path::{Path, PathBuf};

/// Shorthand for results of this module.
pub type Result<T, E = GgufError> = std::result::Result<T, E>;

/// A GGUF file that cannot be used, or something that it does not have.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct GgufError {
    path: PathBuf,
    problem: Box<GgufProblem>,
}

impl GgufError {
    pub(super) fn new(path: &Path, problem: GgufProblem) -> Self {
        Self { path: path.to_owned(), problem: Box::new(problem) }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is wrong.
    pub fn problem(&self) -> &GgufProblem {
        &self.problem
    }
}

impl From<GgufError> for dsrun_core::Error {
    fn from(error: GgufError) -> Self {
        match *error.problem {
            GgufProblem::UnsupportedType { .. } | GgufProblem::Version(_) | GgufProblem::BigEndian(_) => {
                Self::unsupported(error.to_string())
            }
            GgufProblem::Io(_) => Self::new(dsrun_core::Code::Unavailable, error.to_string()),
            _ => Self::invalid(error.to_string()),
        }
    }
}

/// What is wrong with a GGUF file. Names of keys and tensors are as in the file; offsets count from its first byte.
#[derive(Debug)]
#[non_exhaustive]
pub enum GgufProblem {
    /// The system cannot read it.
    Io(std::io::Error),
    /// It is something else.
    NotGguf([u8; 4]),
    /// It was written for big-endian machines; the version it would have.
    BigEndian(u32),
    /// Its version is too old or too new.
    Version(u32),
    /// It ends too early.
    Truncated {
        /// What is cut off.
        what: String,
        /// Where that starts.
        offset: usize,
        /// How long it should be.
        needed: u64,
        /// How much there is.
        left: usize,
    },
    /// The header counts more things than fit into the file.
    Count {
        /// Which things.
        what: String,
        /// How many are said to come.
        count: u64,
        /// Where the first would be.
        offset: usize,
        /// How many bytes there are from there on.
        left: usize,
    },
    /// A text is not UTF-8.
    Utf8 {
        /// Which text.
        what: String,
        /// Where it starts.
        offset: usize,
    },
    /// Two keys or tensors have one name.
    Duplicate {
        /// `metadata key` or `tensor`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A metadata value has a type that does not exist.
    ValueType {
        /// The key.
        key: String,
        /// The number of the type.
        number: u32,
        /// Where the number is.
        offset: usize,
    },
    /// An array holds arrays.
    NestedArray {
        /// The key.
        key: String,
    },
    /// A truth value is neither 0 nor 1.
    Bool {
        /// The key.
        key: String,
        /// The value.
        value: u8,
        /// Where it is.
        offset: usize,
    },
    /// `general.alignment` is not a power of two.
    Alignment(u32),
    /// A tensor has no dimensions or too many.
    Rank {
        /// The tensor.
        tensor: String,
        /// How many dimensions.
        rank: u32,
    },
    /// A dimension is 0.
    ZeroDimension {
        /// The tensor.
        tensor: String,
        /// The shape, outermost first.
        shape: Vec<u64>,
    },
    /// The size of a tensor overflows.
    Overflow {
        /// The tensor.
        tensor: String,
        /// The shape, outermost first.
        shape: Vec<u64>,
    },
    /// A row is no whole number of blocks.
    PartialBlock {
        /// The tensor.
        tensor: String,
        /// Elements of a row.
        columns: usize,
        /// Elements of a block.
        block: usize,
        /// The name of the type.
        tensor_type: String,
    },
    /// A tensor does not start at a multiple of the alignment.
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Where it starts, from the start of the data.
        offset: u64,
        /// The alignment.
        alignment: usize,
    },
    /// A tensor is not inside the file.
    Outside {
        /// The tensor.
        tensor: String,
        /// Where it starts, from the start of the data.
        offset: u64,
        /// How long it is; unknown if its type is.
        bytes: Option<usize>,
        /// Where the data starts in the file.
        data: usize,
        /// How long the file is.
        file: usize,
    },
    /// Two tensors share bytes.
    Overlap {
        /// The first tensor.
        first: String,
        /// The second tensor.
        second: String,
        /// Where the second starts in the file.
        offset: usize,
    },
    /// There is no such tensor.
    MissingTensor(String),
    /// It does not belong to the other files of the model.
    Parts(String),
    /// The tensor is there, but weights of its type cannot be used.
    UnsupportedType {
        /// The tensor.
        tensor: String,
        /// The name of the type.
        tensor_type: String,
    },
    /// There is no such metadata key.
    MissingKey(String),
    /// The value of a metadata key is not of the type that is needed.
    WrongType {
        /// The key.
        key: String,
        /// What is needed.
        expected: &'static str,
        /// The value and its type.
        found: String,
    },
}

impl fmt::Display for GgufProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "cannot be read: {error}"),
            Self::NotGguf(found) => {
                write!(f, "is not a GGUF file: it starts with \"{}\", not \"GGUF\"", found.escape_ascii())
            }
            Self::BigEndian(version) => {
                write!(
                    f,
                    "is a big-endian GGUF file (version {version}); only little-endian files can be read"
                )
            }
            Self::Version(1) => write!(f, "has GGUF version 1, which is obsolete; convert the model anew"),
            Self::Version(version) => write!(f, "has GGUF version {version}; versions 2 and 3 can be read"),
            Self::Truncated { what, offset, needed, left } => {
                write!(f, "ends inside {what}: {needed} bytes at offset {offset} needed, {left} left")?;
                write!(f, "; the file is cut short or corrupt")
            }
            Self::Count { what, count, offset, left } => {
                write!(
                    f,
                    "says that {count} {what} follow offset {offset}, which do not fit into the {left} bytes left"
                )
            }
            Self::Utf8 { what, offset } => write!(f, "{what} at offset {offset} is not valid UTF-8"),
            Self::Duplicate { what, name } => write!(f, "{what} {} comes twice", Quoted(name)),
            Self::ValueType { key, number, offset } => {
                write!(f, "metadata key {} has unknown value type {number} at offset {offset}", Quoted(key))
            }
            Self::NestedArray { key } => {
                write!(f, "metadata key {} is an array of arrays, which is not supported", Quoted(key))
            }
            Self::Bool { key, value, offset } => {
                write!(
                    f,
                    "metadata key {} has truth value {value} at offset {offset}, not 0 or 1",
                    Quoted(key)
                )
            }
            Self::Alignment(value) => {
                write!(f, "metadata key `general.alignment` is {value}, but must be a power of two")
            }
            Self::Rank { tensor, rank } => {
                write!(f, "tensor {} has {rank} dimensions; 1 to 4 are possible", Quoted(tensor))
            }
            Self::ZeroDimension { tensor, shape } => {
                write!(f, "tensor {} of shape {shape:?} has a dimension of size 0", Quoted(tensor))
            }
            Self::Overflow { tensor, shape } => {
                write!(f, "the size of tensor {} of shape {shape:?} overflows", Quoted(tensor))
            }
            Self::PartialBlock { tensor, columns, block, tensor_type } => {
                write!(f, "tensor {} has rows of {columns} elements, ", Quoted(tensor))?;
                write!(f, "which are no whole number of {tensor_type} blocks of {block}")
            }
            Self::Misaligned { tensor, offset, alignment } => {
                let name = Quoted(tensor);
                write!(
                    f,
                    "tensor {name} has data offset {offset}, which is not a multiple of alignment {alignment}"
                )
            }
            Self::Outside { tensor, offset, bytes, data, file } => {
                write!(f, "tensor {}", Quoted(tensor))?;
                if let Some(bytes) = bytes {
                    write!(f, " of {bytes} bytes")?;
                }
                write!(
                    f,
                    " at data offset {offset} is outside the file of {file} bytes, whose data starts at {data}"
                )?;
                write!(f, "; the file is cut short or corrupt")
            }
            Self::Overlap { first, second, offset } => {
                let (first, second) = (Quoted(first), Quoted(second));
                write!(f, "tensor {second} at offset {offset} lies on top of tensor {first}")
            }
            Self::MissingTensor(name) => write!(f, "has no tensor {}", Quoted(name)),
            Self::Parts(message) => f.write_str(message),
            Self::UnsupportedType { tensor, tensor_type } => {
                write!(f, "tensor {} has type {tensor_type}, which cannot be used; ", Quoted(tensor))?;
                write!(f, "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K and MXFP4 can")
            }
            Self::MissingKey(key) => write!(f, "has no metadata key {}", Quoted(key)),
            Self::WrongType { key, expected, found } => {
                write!(f, "metadata key {} is {found}, but must be {expected}", Quoted(key))
            }
        }
    }
}
