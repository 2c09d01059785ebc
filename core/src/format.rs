//! Storage formats of weights.
//!
//! Every format stores rows independently, so rows can be sliced, concatenated and permuted without decoding.

mod block;
mod group;
mod mxfp4;
mod quantise;
mod rounding;
mod simd;

use crate::{DType, Error, Result};
pub use block::{BlockFormat, six_bit_factors};
pub use group::{GroupBits, GroupFormat, GroupOffset, GroupRow, GroupSize, ScaleType};
use half::slice::HalfFloatSliceExt;
use std::{fmt, ops::Range};

/// The affine map from the integers of a group to their values: `scale * (q - zero) + minimum`. Zero or minimum is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Affine {
    /// The factor.
    pub scale: f32,
    /// The integer that stands for 0, at most 255.
    pub zero: f32,
    /// The value of integer 0.
    pub minimum: f32,
}

/// The storage format of a weight matrix, row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightFormat {
    /// Consecutive elements.
    Dense(DType),
    /// Blocks along the last dimension, as in GGUF files.
    Block(BlockFormat),
    /// Integers with a scale for each group of columns of a row.
    Group(GroupFormat),
}

impl WeightFormat {
    /// The base of the numbers of group formats, to which [`GroupFormat::number`] is added.
    pub const GROUPS: u32 = 0x200;

    /// The number of bytes of a row of `columns` elements; `None` if `columns` is not a whole number of blocks or groups, or
    /// the size overflows.
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

    /// The name that programs and messages use.
    pub fn name(self) -> String {
        self.to_string()
    }

    /// The number in the C ABI: that of the element type, 0x100 plus that of the block format, or [`Self::GROUPS`] plus
    /// [that of the group format](GroupFormat::number).
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

    /// Whether elements are integers that share scales.
    pub const fn is_quantised(self) -> bool {
        !matches!(self, Self::Dense(_))
    }

    /// Whether [`Self::quantise_row`] can round floats to this format.
    pub const fn can_quantise(self) -> bool {
        matches!(self, Self::Group(_) | Self::Block(BlockFormat::Mxfp4))
    }

    /// Rounds a row to this format, each element to nearest. With `search`, the scales are those of the least squared error that is
    /// found; else group formats cover the range of a group, and MXFP4 takes the exponent of its specification.
    ///
    /// # Errors
    /// If the format is neither a group format nor MXFP4, the length of `row` is not that of `values` in this format, or a value
    /// is not finite.
    pub fn quantise_row(self, values: &[f32], search: bool, row: &mut [u8]) -> Result<()> {
        match self {
            Self::Group(format) => format.quantise_row(values, search, row),
            Self::Block(BlockFormat::Mxfp4) => mxfp4::quantise_row(values, search, row),
            other => Err(Error::unsupported(format!("weights cannot be rounded to {other}"))),
        }
    }

    /// Decodes one row into f32. Integers are converted; f16 and bf16 are widened.
    ///
    /// # Errors
    /// If `row` is not exactly the bytes of `out.len()` elements.
    pub fn decode_row(self, row: &[u8], out: &mut [f32]) -> Result<()> {
        if self.row_bytes(out.len()) != Some(row.len()) {
            let message = format!("a row of {} {self} elements is not {} bytes", out.len(), row.len());
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

    /// The number of consecutive elements of a row of `columns` that share a scale; `columns` if none do, but at least 1.
    pub fn group(self, columns: usize) -> usize {
        match self {
            Self::Dense(_) => columns,
            Self::Block(format) => format.group(),
            Self::Group(format) => format.group.columns().unwrap_or(columns),
        }
        .max(1)
    }

    /// The divisor of the number of columns of every matrix of this format.
    pub fn granularity(self) -> usize {
        match self {
            Self::Dense(_) => 1,
            Self::Block(format) => format.elements(),
            Self::Group(format) => format.group.columns().unwrap_or(8 / format.bits.bits()),
        }
    }

    /// Whether these columns of a row of `columns` can be stored in this format without decoding: they begin and end at blocks or
    /// groups.
    pub fn holds_columns(self, columns: usize, part: Range<usize>) -> bool {
        let unit = self.granularity();
        part.start.is_multiple_of(unit)
            && part.end.is_multiple_of(unit)
            && part.start <= part.end
            && part.end <= columns
    }

    /// Appends the columns `part` of a row of `columns` as a row of their own, in the same format and without decoding.
    ///
    /// # Errors
    /// If the format does not [hold](Self::holds_columns) the columns, or `row` is not exactly the bytes of the row.
    pub fn copy_columns(
        self,
        row: &[u8],
        columns: usize,
        part: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let Range { start, end } = part;
        let refused = || {
            let bytes = row.len();
            Error::invalid(format!(
                "columns {start}..{end} of {bytes} bytes of {columns} {self} elements cannot be copied"
            ))
        };
        if self.row_bytes(columns) != Some(row.len()) || !self.holds_columns(columns, start..end) {
            return Err(refused());
        }
        match self {
            Self::Dense(_) | Self::Block(_) => {
                let range = self.row_bytes(start).zip(self.row_bytes(end));
                let bytes = range.and_then(|(start, end)| row.get(start..end));
                out.extend_from_slice(bytes.ok_or_else(refused)?);
            }
            Self::Group(format) => format.copy_columns(row, columns, start..end, out).ok_or_else(refused)?,
        }
        Ok(())
    }

    /// Unpacks a row of a quantised format to the integer of each element and the map of each [group](Self::group).
    ///
    /// # Errors
    /// If the format is dense, `row` is not exactly the bytes of `integers.len()` elements, or the length of `scales` is not
    /// the number of groups.
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
            Self::Dense(dtype) => Err(Error::invalid(format!("rows of {dtype} have no scales"))),
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
    match dtype {
        DType::F32 => decode_each(row, out, f32::from_le_bytes),
        DType::F16 => decode_f16(row, out),
        DType::BF16 => {
            decode_each(row, out, |bytes| half::bf16::from_le_bytes(bytes).to_f32());
        }
        DType::I32 => decode_each(row, out, |bytes| i32::from_le_bytes(bytes) as f32),
        DType::U32 => decode_each(row, out, |bytes| u32::from_le_bytes(bytes) as f32),
        DType::I8 => decode_each(row, out, |[byte]| f32::from(byte as i8)),
        _ => decode_each(row, out, |[byte]| f32::from(byte)),
    }
}

/// Many numbers at a time, for which `half` has the processor's instruction.
fn decode_f16(row: &[u8], out: &mut [f32]) {
    const AT_ONCE: usize = 64;
    let mut halves = [half::f16::ZERO; AT_ONCE];
    for (out, bytes) in out.chunks_mut(AT_ONCE).zip(row.chunks(2 * AT_ONCE)) {
        let halves = &mut halves[..out.len()];
        let each = halves.iter_mut().zip(bytes.as_chunks().0);
        each.for_each(|(half, bytes)| *half = half::f16::from_le_bytes(*bytes));
        halves.convert_to_f32_slice(out);
    }
}

fn decode_each<const BYTES: usize>(row: &[u8], out: &mut [f32], decode: impl Fn([u8; BYTES]) -> f32) {
    out.iter_mut().zip(row.as_chunks().0).for_each(|(value, bytes)| *value = decode(*bytes));
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
    fn copied_columns_have_the_values_of_the_row() {
        let groups = ["int8", "int4_f16", "int8g32z", "int4g32m_bf16", "int4g64z_f16", "int8g64_f16"];
        let formats = groups.map(|name| GroupFormat::from_name(name).unwrap());
        let columns = 256;
        let values: Vec<f32> = (0..columns).map(|index| ((index * 37 % 101) as f32 - 40.0) / 9.0).collect();
        for format in formats {
            let mut row = vec![0; format.row(columns).unwrap().bytes];
            format.quantise_row(&values, false, &mut row).unwrap();
            let whole = WeightFormat::Group(format);
            let mut decoded = vec![0.0; columns];
            whole.decode_row(&row, &mut decoded).unwrap();
            for part in [0..64, 64..256, 128..192, 64..64] {
                let mut copied = Vec::new();
                whole.copy_columns(&row, columns, part.clone(), &mut copied).unwrap();
                let mut out = vec![f32::NAN; part.len()];
                whole.decode_row(&copied, &mut out).unwrap();
                assert_eq!(out, decoded[part], "{format}");
            }
        }
        let q8_0 = WeightFormat::Block(BlockFormat::Q8_0);
        let row: Vec<u8> = (0..q8_0.row_bytes(96).unwrap()).map(|byte| byte as u8).collect();
        let mut copied = Vec::new();
        q8_0.copy_columns(&row, 96, 32..96, &mut copied).unwrap();
        assert_eq!(copied, row[q8_0.row_bytes(32).unwrap()..]);
        assert!(q8_0.copy_columns(&row, 96, 16..96, &mut copied).is_err());
        assert!(q8_0.copy_columns(&row[1..], 96, 32..96, &mut copied).is_err());
    }

    #[test]
    fn rows_of_the_wrong_length_are_refused() {
        let error = WeightFormat::Dense(DType::F16).decode_row(&[0; 3], &mut [0.0; 2]).unwrap_err();
        assert!(error.to_string().contains("3 bytes"), "{error}");
        let error = WeightFormat::Group(GroupFormat::INT8).decode_row(&[0; 20], &mut [0.0; 4]).unwrap_err();
        assert!(error.to_string().contains("4 int8 elements is not 20 bytes"), "{error}");
    }
}
