//! Storage formats of weights: what the bytes of a row stand for.
//!
//! Every format is made of rows that stand by themselves, so rows can be sliced, concatenated and permuted as they are.

mod block;
mod group;
mod quantise;

use crate::{DType, Error, Result};
pub use block::BlockFormat;
pub use group::{GroupBits, GroupFormat, GroupOffset, GroupRow, GroupSize, ScaleType};
use std::fmt;

/// What the integers of a group stand for: `q` for `scale * (q - zero) + minimum`. Zero or minimum is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Affine {
    /// What integers are multiplied by.
    pub scale: f32,
    /// The integer they are counted from, at most 255.
    pub zero: f32,
    /// The number they are counted from.
    pub minimum: f32,
}

/// How the elements of a weight matrix are stored, row after row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightFormat {
    /// One element after the other.
    Dense(DType),
    /// Blocks along the last dimension, as in GGUF files.
    Block(BlockFormat),
    /// Integers with a scale for each group of columns of a row.
    Group(GroupFormat),
}

impl WeightFormat {
    /// What is added to the [number](GroupFormat::number) of a group format.
    pub const GROUPS: u32 = 0x200;

    /// Bytes of one row of `columns` elements; `None` if `columns` is no whole number of blocks or groups, or the size
    /// overflows.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        match self {
            Self::Dense(dtype) => columns.checked_mul(dtype.bytes()),
            Self::Block(format) => {
                let whole = columns.is_multiple_of(format.elements());
                whole.then(|| (columns / format.elements()).checked_mul(format.bytes())).flatten()
            }
            Self::Group(format) => Some(format.row(columns)?.bytes),
        }
    }

    /// The name used in programs and messages.
    pub fn name(self) -> String {
        self.to_string()
    }

    /// The number in the C ABI: an element type's own number, 0x100 and a block format's number, or [`Self::GROUPS`] and the
    /// [fields of a group format](GroupFormat::number).
    pub const fn number(self) -> u32 {
        match self {
            Self::Dense(dtype) => dtype as u32,
            Self::Block(format) => 0x100 + format as u32,
            Self::Group(format) => Self::GROUPS + format.number(),
        }
    }

    /// The format of this number.
    pub fn from_number(number: u32) -> Option<Self> {
        if let Some(fields) = number.checked_sub(Self::GROUPS) {
            return GroupFormat::from_number(fields).map(Self::Group);
        }
        let block = BlockFormat::ALL.into_iter().map(Self::Block).find(|format| format.number() == number);
        block.or_else(|| DType::from_number(number).map(Self::Dense))
    }

    /// The format of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let block = BlockFormat::ALL.into_iter().find(|format| format.name() == name).map(Self::Block);
        let group = || GroupFormat::from_name(name).map(Self::Group);
        block.or_else(group).or_else(|| DType::from_name(name).map(Self::Dense))
    }

    /// Whether elements are integers with shared scales.
    pub const fn is_quantised(self) -> bool {
        !matches!(self, Self::Dense(_))
    }

    /// Decodes one row into f32. Integers are converted; f16 and bf16 are widened.
    ///
    /// # Errors
    /// If `row` is not exactly the bytes of `out.len()` elements.
    pub fn decode_row(self, row: &[u8], out: &mut [f32]) -> Result<()> {
        if self.row_bytes(out.len()) != Some(row.len()) {
            let message = format!("a row of {} {self} elements cannot be {} bytes", out.len(), row.len());
            return Err(Error::invalid(message));
        }
        match self {
            Self::Dense(dtype) => decode_dense(dtype, row, out),
            Self::Block(_) | Self::Group(_) => {
                let group = self.group(out.len());
                let mut integers = vec![0; out.len()];
                let mut scales = vec![Affine::default(); out.len().div_ceil(group)];
                self.unpack_row(row, &mut integers, &mut scales)?;
                let groups = out.chunks_mut(group).zip(integers.chunks(group)).zip(scales);
                for ((out, integers), Affine { scale, zero, minimum }) in groups {
                    for (value, q) in out.iter_mut().zip(integers) {
                        *value = scale * (f32::from(*q) - zero) + minimum;
                    }
                }
            }
        }
        Ok(())
    }

    /// Consecutive elements of a row of `columns` that share a scale and an offset; all of them if nothing is shared, at least 1.
    pub fn group(self, columns: usize) -> usize {
        match self {
            Self::Dense(_) => columns,
            Self::Block(format) => format.group(),
            Self::Group(format) => format.group.columns().unwrap_or(columns),
        }
        .max(1)
    }

    /// What the columns of a matrix of this format are a multiple of.
    pub fn granularity(self) -> usize {
        match self {
            Self::Dense(_) => 1,
            Self::Block(format) => format.elements(),
            Self::Group(format) => format.group.columns().unwrap_or(8 / format.bits.bits()),
        }
    }

    /// Takes one row of a quantised format apart: an integer for each element, and what each [group](Self::group) of them is
    /// scaled by and counted from.
    ///
    /// # Errors
    /// If the format is dense, `row` is not exactly the bytes of `integers.len()` elements, or `scales` has not one item for each
    /// group.
    pub fn unpack_row(self, row: &[u8], integers: &mut [u8], scales: &mut [Affine]) -> Result<()> {
        let columns = integers.len();
        if self.row_bytes(columns) != Some(row.len()) || scales.len() != columns.div_ceil(self.group(columns))
        {
            let (bytes, groups) = (row.len(), scales.len());
            let message =
                format!("a row of {columns} {self} elements is not {bytes} bytes and {groups} groups");
            return Err(Error::invalid(message));
        }
        match self {
            Self::Dense(dtype) => Err(Error::invalid(format!("a row of {dtype} has no scales"))),
            Self::Block(format) => {
                let elements = format.elements();
                let blocks = row.chunks_exact(format.bytes()).zip(integers.chunks_exact_mut(elements));
                let scales = scales.chunks_exact_mut(elements / format.group());
                for ((block, integers), scales) in blocks.zip(scales) {
                    format.unpack(block, integers, scales);
                }
                Ok(())
            }
            Self::Group(format) => {
                format.unpack(row, integers, scales);
                Ok(())
            }
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dense(dtype) => dtype.fmt(f),
            Self::Block(format) => f.write_str(format.name()),
            Self::Group(format) => format.fmt(f),
        }
    }
}

fn decode_dense(dtype: DType, row: &[u8], out: &mut [f32]) {
    let elements = row.chunks_exact(dtype.bytes());
    for (value, bytes) in out.iter_mut().zip(elements) {
        *value = match (dtype, bytes) {
            (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (DType::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
            (DType::BF16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
            (DType::I32, &[a, b, c, d]) => i32::from_le_bytes([a, b, c, d]) as f32,
            (DType::U32, &[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]) as f32,
            (DType::I8, &[a]) => f32::from(a as i8),
            (_, &[a]) => f32::from(a),
            _ => 0.0,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_round_trip() {
        let dense = DType::ALL.into_iter().map(WeightFormat::Dense);
        let blocks = BlockFormat::ALL.into_iter().map(WeightFormat::Block);
        let groups = GroupFormat::all().map(WeightFormat::Group);
        for format in dense.chain(blocks).chain(groups) {
            assert_eq!(WeightFormat::from_name(&format.name()), Some(format));
            assert_eq!(WeightFormat::from_number(format.number()), Some(format));
        }
        assert_eq!(["q9", "int3", "int8g16", "int4x"].map(WeightFormat::from_name), [None; 4]);
    }

    #[test]
    fn row_bytes_refuse_partial_blocks_and_overflow() {
        let q4_1 = WeightFormat::Block(BlockFormat::Q4_1);
        assert_eq!(q4_1.row_bytes(64), Some(40));
        assert_eq!(q4_1.row_bytes(33), None);
        assert_eq!(WeightFormat::Block(BlockFormat::Q6_K).row_bytes(512), Some(420));
        assert_eq!(WeightFormat::Dense(DType::F32).row_bytes(usize::MAX), None);
    }

    #[test]
    fn rows_of_the_wrong_length_are_refused() {
        let error = WeightFormat::Dense(DType::F16).decode_row(&[0; 3], &mut [0.0; 2]).unwrap_err();
        assert!(error.to_string().contains("3 bytes"), "{error}");
        let error = WeightFormat::Group(GroupFormat::INT8).decode_row(&[0; 20], &mut [0.0; 4]).unwrap_err();
        assert!(error.to_string().contains("4 int8 elements cannot be 20 bytes"), "{error}");
    }
}
