//! Sizes and types of the values in a program.

use crate::{DType, Error, Result};
use std::{fmt, sync::Arc};

/// The size of a tensor dimension in a program. Sizes are the same in every step; extents may differ.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Size {
    /// A size known when the program is built.
    Static(usize),
    /// A size chosen when the program is compiled for a bucket (`$name` in text). All of its elements are valid.
    Bucket(Arc<str>),
    /// A size chosen for a bucket of which only the first rows are valid (`?name` in text). Their number is an i32 in device
    /// memory, the extent; ops neither read nor write rows beyond it. Only a first dimension may be bounded.
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

    /// The number, if the size is known when the program is built.
    pub fn known(&self) -> Option<usize> {
        match self {
            Self::Static(size) => Some(*size),
            Self::Bucket(_) | Self::Bounded(_) => None,
        }
    }

    /// The name, if the size is chosen later.
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
    /// The sizes, outermost first; at most [`TensorType::MAX_RANK`] of them.
    pub shape: Vec<Size>,
}

impl TensorType {
    /// The maximum number of dimensions of a tensor.
    pub const MAX_RANK: usize = 6;

    /// A tensor type with these sizes.
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

/// A tensor as a backend plans for it: with the largest sizes that it will have, and strides in elements.
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

    /// The number of elements.
    ///
    /// # Errors
    /// If the product overflows.
    pub fn elements(&self) -> Result<usize> {
        let product = self.shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        product.ok_or_else(|| Error::invalid(format!("{:?} elements overflow", self.shape)).field("shape"))
    }

    /// The number of bytes from the first element to the end of the last, including gaps between rows.
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

    /// Whether rows follow one another without gaps.
    pub fn is_dense(&self) -> bool {
        self.strides == Self::dense(self.dtype, &self.shape).strides
    }

    /// Checks what every tensor must fulfil: the rank, one stride for each size, a contiguous last dimension, rows that do
    /// not overlap, and a byte size that does not overflow.
    ///
    /// # Errors
    /// Names the field at fault.
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
                let message = format!(
                    "stride {stride} of dimension {dimension} must be at least {needed}, and 1 if last"
                );
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
    fn dense_tensors_have_row_major_strides() {
        let desc = TensorDesc::dense(DType::F16, &[3, 4, 5]);
        assert_eq!(desc.strides, [20, 5, 1]);
        assert_eq!(desc.bytes().unwrap(), 120);
        assert!(desc.is_dense());
        assert!(desc.validate().is_ok());
    }

    #[test]
    fn bytes_of_strided_rows_include_the_gaps_between_them() {
        let desc = TensorDesc { strides: vec![10, 1], ..TensorDesc::dense(DType::F32, &[3, 4]) };
        assert_eq!(desc.bytes().unwrap(), (20 + 4) * 4);
        assert!(!desc.is_dense());
        assert!(desc.validate().is_ok());
    }

    #[rstest]
    #[case::overlapping_rows(&[3, 4], &[3, 1], "strides[0]")]
    #[case::strided_last_dimension(&[3, 4], &[8, 2], "strides[1]")]
    #[case::too_few_strides(&[3, 4], &[1], "strides")]
    #[case::overflow(&[usize::MAX, 4], &[4, 1], "shape")]
    #[case::too_many_dimensions(&[1; 7], &[1; 7], "rank")]
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
