//! Tensors in host memory, as the bits of their elements.

use crate::float;
use dsrun_core::DType;
use std::cell::Cell;

thread_local! {
    /// The float types whose subnormal numbers [`Tensor::values`] takes for zero: bit n stands for type n.
    static FLUSHED: Cell<u64> = const { Cell::new(0) };
}

/// Makes expectations for a device that takes subnormal operands of these types for zero: the oracle gets them as zeros.
pub fn with_flushed_operands<T>(dtypes: &[DType], make: impl FnOnce() -> T) -> T {
    let before = FLUSHED.replace(dtypes.iter().fold(0, |mask, dtype| mask | 1 << *dtype as u32));
    let made = make();
    FLUSHED.set(before);
    made
}

/// Whether an element is subnormal.
pub fn is_subnormal(dtype: DType, bits: u32) -> bool {
    let value = float::value(dtype, bits);
    dtype.is_float() && value != 0.0 && value.abs() < float::smallest_normal(dtype)
}

/// A dense tensor: one word per element, holding the element's bits in its low end.
///
/// Values are rounded to the element type when a tensor is made, so that oracle and device start from the same numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The element type.
    pub dtype: DType,
    /// The sizes, outermost first.
    pub shape: Vec<usize>,
    /// The elements, row-major.
    pub bits: Vec<u32>,
}

impl Tensor {
    /// The same numbers with what copies must keep: every NaN has a sign and payload of its own, and some of the other elements
    /// are subnormal or zero of either sign.
    #[must_use]
    pub fn to_be_copied(mut self) -> Self {
        // The bits of a number: sign, quiet NaN, and the mask of its payload.
        let (sign, quiet, payload) = match self.dtype {
            DType::F32 => (31, 0x7FC0_0000, 0x3F_FFFF),
            DType::F16 => (15, 0x7E00, 0x1FF),
            DType::BF16 => (15, 0x7FC0, 0x3F),
            _ => return self,
        };
        for (at, bits) in self.bits.iter_mut().enumerate() {
            let number = at as u32;
            let negative = (number & 1) << sign;
            *bits = match at % 13 {
                _ if float::value(self.dtype, *bits).is_nan() => {
                    quiet | number.wrapping_mul(0x9E37_79B1) & payload | negative
                }
                5 => negative,
                8 => (1 + number % 100) | negative,
                _ => *bits,
            };
        }
        self
    }

    /// A float tensor of values rounded to the element type.
    pub fn floats(dtype: DType, shape: &[usize], values: &[f64]) -> Self {
        let bits = values.iter().map(|value| float::bits(dtype, *value)).collect();
        Self { dtype, shape: shape.to_vec(), bits }
    }

    /// An i32 tensor.
    pub fn integers(shape: &[usize], values: &[i32]) -> Self {
        Self {
            dtype: DType::I32,
            shape: shape.to_vec(),
            bits: values.iter().map(|value| *value as u32).collect(),
        }
    }

    /// A vector of i32.
    pub fn vector(values: &[i32]) -> Self {
        Self::integers(&[values.len()], values)
    }

    /// A u32 tensor.
    pub fn words(shape: &[usize], values: &[u32]) -> Self {
        Self { dtype: DType::U32, shape: shape.to_vec(), bits: values.to_vec() }
    }

    /// A tensor whose elements all have these bits.
    pub fn filled(dtype: DType, shape: &[usize], bits: u32) -> Self {
        Self { dtype, shape: shape.to_vec(), bits: vec![bits; shape.iter().product()] }
    }

    /// The elements as numbers, as the oracle gets them.
    pub fn values(&self) -> Vec<f64> {
        self.read_bits().into_iter().map(|bits| float::value(self.dtype, bits)).collect()
    }

    /// The bits of the elements, as the oracle gets them: see [`with_flushed_operands`].
    pub fn read_bits(&self) -> Vec<u32> {
        let flushed = self.dtype.is_float() && FLUSHED.get() >> self.dtype as u32 & 1 == 1;
        let sign = 1u32 << (8 * self.dtype.bytes() - 1);
        let read = |bits: &u32| if is_subnormal(self.dtype, *bits) { bits & sign } else { *bits };
        if flushed { self.bits.iter().map(read).collect() } else { self.bits.clone() }
    }

    /// Whether an element is subnormal and of one of these types.
    pub fn has_subnormals(&self, dtypes: &[DType]) -> bool {
        dtypes.contains(&self.dtype) && self.bits.iter().any(|bits| is_subnormal(self.dtype, *bits))
    }

    /// The elements of an i32 tensor.
    pub fn signed(&self) -> Vec<i32> {
        self.bits.iter().map(|bits| *bits as i32).collect()
    }

    /// The elements as bytes, little-endian, without gaps.
    pub fn bytes(&self) -> Vec<u8> {
        let size = self.dtype.bytes();
        let mut bytes = Vec::with_capacity(self.bits.len() * size);
        for bits in &self.bits {
            bytes.extend_from_slice(&bits.to_le_bytes()[..size]);
        }
        bytes
    }
}

/// Reads an element of `size` bytes.
pub(crate) fn read_bits(bytes: &[u8], at: usize, size: usize) -> u32 {
    bytes[at..at + size].iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_to_the_element_type() {
        let tensor = Tensor::floats(DType::BF16, &[2], &[1.0 + 1.0 / 512.0, -3.0]);
        assert_eq!(tensor.values(), [1.0, -3.0]);
        assert_eq!(tensor.bytes(), [0x80, 0x3F, 0x40, 0xC0]);
        assert_eq!(read_bits(&tensor.bytes(), 2, 2), tensor.bits[1]);
    }

    #[test]
    fn integers_keep_their_sign() {
        let tensor = Tensor::vector(&[-1, 7]);
        assert_eq!(tensor.signed(), [-1, 7]);
        assert_eq!(tensor.values(), [-1.0, 7.0]);
    }
}
