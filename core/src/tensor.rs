//! Sizes and types of the values in a program.

use crate::{DType, Error, Result};
use std::{fmt, sync::Arc};

/// A size of a tensor in a program. Shapes never change from step to step; extents do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Size {
    /// Known when the program is built.
    Static(usize),
    /// Chosen when the program is compiled for a bucket (`$name` in text): every element is there.
    Bucket(Arc<str>),
    /// Chosen like a bucket, but only the first elements are real (`?name` in text): how many is an i32 in device memory,
    /// its extent. Rows past it are not read, written, routed, sent or sampled. Only a first dimension may be bounded.
    Bounded(Arc<str>),
}

impl Size {
    /// A bucket size of this name.
    pub fn bucket(name: &str) -> Self {
        Self::Bucket(name.into())
    }

    /// A bounded size of this name.
    pub fn bounded(name: &str) -> Self {
        Self::Bounded(name.into())
    }

    /// The number, if it is known when the program is built.
    pub fn known(&self) -> Option<usize> {
        match self {
            Self::Static(size) => Some(*size),
            Self::Bucket(_) | Self::Bounded(_) => None,
        }
    }

    /// The name, if it is chosen later.
    pub fn symbol(&self) -> Option<&str> {
        match self {
            Self::Static(_) => None,
            Self::Bucket(name) | Self::Bounded(name) => Some(name),
        }
    }
}

impl From<usize> for Size {
    fn from(size: usize) -> Self {
        Self::Static(size)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Static(size) => write!(f, "{size}"),
            Self::Bucket(name) => write!(f, "${name}"),
            Self::Bounded(name) => write!(f, "?{name}"),
        }
    }
}

/// Element type and sizes of a tensor in a program. Tensors of a program are dense and row-major.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// The element type.
    pub dtype: DType,
    /// The sizes, outermost first; at most [`TensorType::MAX_RANK`].
    pub shape: Vec<Size>,
}

impl TensorType {
    /// The most dimensions a tensor may have.
    pub const MAX_RANK: usize = 6;

    /// A tensor type from anything that makes sizes.
    pub fn new(dtype: DType, shape: impl IntoIterator<Item = impl Into<Size>>) -> Self {
        Self { dtype, shape: shape.into_iter().map(Into::into).collect() }
    }

    /// The sizes as numbers.
    ///
    /// # Errors
    /// If `resolve` does not know a symbol.
    pub fn resolve(&self, resolve: &dyn Fn(&str) -> Option<usize>) -> Result<Vec<usize>> {
        let one = |size: &Size| match size {
            Size::Static(size) => Ok(*size),
            Size::Bucket(name) | Size::Bounded(name) => {
                resolve(name).ok_or_else(|| Error::invalid(format!("size `{name}` has no value")))
            }
        };
        self.shape.iter().map(one).collect()
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (index, size) in self.shape.iter().enumerate() {
            write!(f, "{}{size}", if index == 0 { "" } else { ", " })?;
        }
        f.write_str("]")
    }
}

/// A tensor as a backend plans for it: sizes are the largest that come, strides are in elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorDesc {
    /// The element type.
    pub dtype: DType,
    /// The sizes, outermost first.
    pub shape: Vec<usize>,
    /// Distance between neighbours of each dimension, in elements. The last dimension is contiguous (stride 1).
    pub strides: Vec<usize>,
    /// Whether a call may bind an extent that makes the first dimension shorter.
    pub bounded: bool,
}

impl TensorDesc {
    /// A dense row-major tensor.
    pub fn dense(dtype: DType, shape: &[usize]) -> Self {
        let mut strides = vec![1usize; shape.len()];
        for dimension in (1..shape.len()).rev() {
            strides[dimension - 1] = strides[dimension].saturating_mul(shape[dimension]);
        }
        Self { dtype, shape: shape.to_vec(), strides, bounded: false }
    }

    /// The same tensor with a first dimension whose extent a call may bind.
    #[must_use]
    pub fn with_extent(mut self) -> Self {
        self.bounded = true;
        self
    }

    /// Elements, counted without gaps.
    ///
    /// # Errors
    /// If the product overflows.
    pub fn elements(&self) -> Result<usize> {
        let product = self.shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        product.ok_or_else(|| Error::invalid(format!("{:?} elements overflow", self.shape)).field("shape"))
    }

    /// Bytes from the first to behind the last element, gaps between rows included.
    ///
    /// # Errors
    /// If the product overflows.
    pub fn bytes(&self) -> Result<usize> {
        if self.shape.contains(&0) {
            return Ok(0);
        }
        let last =
            self.shape.iter().zip(&self.strides).try_fold(0usize, |offset, (size, stride)| {
                offset.checked_add((size - 1).checked_mul(*stride)?)
            });
        last.and_then(|last| last.checked_add(1)?.checked_mul(self.dtype.bytes()))
            .ok_or_else(|| Error::invalid(format!("{:?} bytes overflow", self.shape)).field("shape"))
    }

    /// Whether there are no gaps between rows.
    pub fn is_dense(&self) -> bool {
        self.strides == Self::dense(self.dtype, &self.shape).strides
    }

    /// Checks what holds for every tensor: the rank, one stride for each size, a contiguous last dimension, rows that do
    /// not overlap, and a byte size that does not overflow.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn validate(&self) -> Result<()> {
        if self.shape.len() > TensorType::MAX_RANK {
            let message = format!("has {} dimensions, at most {}", self.shape.len(), TensorType::MAX_RANK);
            return Err(Error::invalid(message).field("rank"));
        }
        if self.strides.len() != self.shape.len() {
            let message = format!("{} strides for {} dimensions", self.strides.len(), self.shape.len());
            return Err(Error::invalid(message).field("strides"));
        }
        if self.bounded && self.shape.is_empty() {
            return Err(Error::invalid("a scalar has no dimension to bound").field("bounded"));
        }
        self.elements()?;
        self.bytes()?;
        let mut needed = 1usize;
        for dimension in (0..self.shape.len()).rev() {
            let (size, stride) = (self.shape[dimension], self.strides[dimension]);
            let contiguous = dimension + 1 < self.shape.len() || stride == 1;
            if size > 1 && (stride < needed || !contiguous) {
                let message =
                    format!("stride {stride} of dimension {dimension} is below {needed} or not 1 at the end");
                return Err(Error::invalid(message).field(format!("strides[{dimension}]")));
            }
            if size > 1 {
                needed = stride.saturating_mul(size);
            }
        }
        Ok(())
    }

    /// The type with static sizes, for shape inference.
    pub fn tensor_type(&self) -> TensorType {
        TensorType::new(self.dtype, self.shape.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[test]
    fn dense_strides_and_bytes() {
        let desc = TensorDesc::dense(DType::F16, &[3, 4, 5]);
        assert_eq!(desc.strides, [20, 5, 1]);
        assert_eq!(desc.bytes().unwrap(), 120);
        assert!(desc.is_dense());
        assert!(desc.validate().is_ok());
    }

    #[test]
    fn strided_rows_count_their_gaps_but_the_last() {
        let desc = TensorDesc { strides: vec![10, 1], ..TensorDesc::dense(DType::F32, &[3, 4]) };
        assert_eq!(desc.bytes().unwrap(), (20 + 4) * 4);
        assert!(!desc.is_dense());
        assert!(desc.validate().is_ok());
    }

    #[rstest]
    #[case::overlapping_rows(&[3, 4], &[3, 1], "strides[0]")]
    #[case::gaps_in_the_last(&[3, 4], &[8, 2], "strides[1]")]
    #[case::too_few_strides(&[3, 4], &[1], "strides")]
    #[case::overflow(&[usize::MAX, 4], &[4, 1], "shape")]
    #[case::too_many(&[1; 7], &[1; 7], "rank")]
    fn malformed_tensors_are_refused(
        #[case] shape: &[usize],
        #[case] strides: &[usize],
        #[case] field: &str,
    ) {
        let desc = TensorDesc {
            dtype: DType::F32,
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            bounded: false,
        };
        assert_eq!(desc.validate().unwrap_err().field_name(), Some(field));
    }

    #[test]
    fn zero_sized_tensors_are_valid_and_empty() {
        let desc = TensorDesc::dense(DType::F32, &[0, 576]);
        assert!(desc.validate().is_ok());
        assert_eq!(desc.bytes().unwrap(), 0);
    }
}
