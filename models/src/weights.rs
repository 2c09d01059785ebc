//! Weights: where they come from, and how expressions over them are read.
//!
//! A [`TensorSource`] is anything that has named tensors: a GGUF file, safetensors files, or [`RandomSource`], which
//! makes them up. An [`ExprReader`] evaluates a [`WeightExpr`](dsrun_core::WeightExpr) over a source a few rows at a
//! time and is what a backend's `prepack` is given.

pub(crate) mod file_bytes;
pub(crate) mod quoted;

mod convert;
mod expr_reader;
mod random;

use dsrun_core::{Error, Result, WeightType};
use std::borrow::Cow;

pub use expr_reader::ExprReader;
pub use random::{Distribution, RandomSource, RandomTensor};

/// Named tensors whose rows can be read in any order.
///
/// Sources are shared by all ranks of a process, each of which reads only its part.
pub trait TensorSource: Send + Sync {
    /// What the source is, for messages: the path of a file, for example.
    fn describe(&self) -> String;

    /// The names of all tensors.
    fn names(&self) -> Vec<&str>;

    /// Shape and storage format of a tensor.
    ///
    /// # Errors
    /// If there is no such tensor, or its type is none that weights can have.
    fn tensor_type(&self, name: &str) -> Result<WeightType>;

    /// The bytes of rows `first .. first + count` of a tensor. All dimensions but the last are rows; a vector is one.
    ///
    /// # Errors
    /// As [`Self::tensor_type`], and if the rows are outside.
    fn rows(&self, name: &str, first: usize, count: usize) -> Result<Cow<'_, [u8]>>;

    /// Whether the inputs of products with this tensor are to be quantised to 8 bits, each row by itself
    /// ([`dsrun_core::op::QuantPerToken`]): the checkpoint was made for that.
    fn quantises_inputs(&self, name: &str) -> bool {
        let _ = name;
        false
    }

    /// A text that changes whenever a tensor may have changed: the files, their lengths and when they were last written. `None` if the
    /// source cannot tell; then nothing that is made of its tensors is kept for another run.
    fn fingerprint(&self) -> Option<String> {
        None
    }

    /// Says that a tensor will not be read again soon, so that memory that mirrors the file can be given back. It may
    /// be read all the same, only slower.
    fn release(&self, name: &str) {
        let _ = name;
    }
}

/// The [fingerprint](TensorSource::fingerprint) of files; `None` if the system does not say when one was written.
pub(crate) fn fingerprint_of_files<'a>(
    files: impl IntoIterator<Item = &'a std::path::Path>,
) -> Option<String> {
    let one = |path: &std::path::Path| {
        let path = path.canonicalize().ok()?;
        let file = path.metadata().ok()?;
        let written = file.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
        Some(format!("{} {} {}\n", path.display(), file.len(), written.as_nanos()))
    };
    files.into_iter().map(one).collect()
}

/// The bytes that rows `first .. first + count` take within a tensor of this type.
fn row_range(weight: &WeightType, first: usize, count: usize) -> Result<std::ops::Range<usize>> {
    let end = first.checked_add(count).filter(|end| *end <= weight.rows()).ok_or_else(|| {
        Error::invalid(format!("rows {first}..{first}+{count} of {} asked for", weight.rows()))
    })?;
    // The end is inside the tensor, whose size is known not to overflow, if it can be computed at all.
    let row_bytes = weight.row_bytes()?;
    let bytes = end.checked_mul(row_bytes).ok_or_else(|| Error::invalid("rows overflow").field("shape"))?;
    Ok(first * row_bytes..bytes)
}

/// Rows of a tensor whose bytes are all there.
pub(crate) fn slice_rows<'a>(
    weight: &WeightType,
    bytes: &'a [u8],
    first: usize,
    count: usize,
) -> Result<&'a [u8]> {
    let range = row_range(weight, first, count)?;
    bytes.get(range).ok_or_else(|| Error::internal("a tensor is shorter than its shape says"))
}
