//! Element types of tensors and storage formats of weights.

use std::fmt;

/// The type of one element of a tensor. The numbers are fixed: they cross the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 1,
    /// IEEE 754 binary16.
    F16 = 2,
    /// The upper half of a binary32.
    BF16 = 3,
    /// Signed 32-bit integer: every index and length operand.
    I32 = 4,
    /// Unsigned 32-bit integer: bit masks and random seeds.
    U32 = 5,
    /// Signed 8-bit integer: quantised values.
    I8 = 6,
    /// Unsigned 8-bit integer: raw bytes.
    U8 = 7,
}

impl DType {
    /// Every element type, in the order of its number.
    pub const ALL: [Self; 7] = [Self::F32, Self::F16, Self::BF16, Self::I32, Self::U32, Self::I8, Self::U8];

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::I8 | Self::U8 => 1,
        }
    }

    /// Whether this is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }

    /// The name used in programs, messages and configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I8 => "i8",
            Self::U8 => "u8",
        }
    }

    /// The element type of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// The element type with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| *dtype as u32 == number)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A block format of GGUF files: `block` consecutive elements of a row share scales. The numbers are fixed: they cross
/// the C ABI.
///
/// With `d` and `m` little-endian f16 and `q` the stored integers, an element is:
///
/// | format | bytes per block of 32 | element |
/// |---|---|---|
/// | `Q4_0` | `d`, 16 bytes of nibbles | `d * (q - 8)` |
/// | `Q4_1` | `d`, `m`, 16 bytes of nibbles | `d * q + m` |
/// | `Q8_0` | `d`, 32 signed bytes | `d * q` |
///
/// Nibble `i` of the low halves is element `i`, of the high halves element `i + 16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum BlockFormat {
    /// Four bits, symmetric around 8.
    Q4_0 = 1,
    /// Four bits with a minimum.
    Q4_1 = 2,
    /// Eight bits, symmetric.
    Q8_0 = 3,
}

impl BlockFormat {
    /// Every block format, in the order of its number.
    pub const ALL: [Self; 3] = [Self::Q4_0, Self::Q4_1, Self::Q8_0];

    /// Elements of one block.
    pub const fn elements(self) -> usize {
        32
    }

    /// Bytes of one block.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
        }
    }

    /// The name used in programs and messages, as GGUF tools write it in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q8_0 => "q8_0",
        }
    }

    /// Decodes one block: `block` is [`Self::bytes`] long and `out` is [`Self::elements`] long.
    fn decode(self, block: &[u8], out: &mut [f32]) {
        let half = |at: usize| {
            block.get(at..at + 2).map_or(0.0, |b| half::f16::from_le_bytes([b[0], b[1]]).to_f32())
        };
        let scale = half(0);
        match self {
            Self::Q8_0 => {
                for (value, quant) in out.iter_mut().zip(&block[2..]) {
                    *value = scale * f32::from(*quant as i8);
                }
            }
            Self::Q4_0 | Self::Q4_1 => {
                let (nibbles, offset, zero) =
                    if self == Self::Q4_0 { (&block[2..], 0.0, 8.0) } else { (&block[4..], half(2), 0.0) };
                let (low, high) = out.split_at_mut(16);
                for ((byte, low), high) in nibbles.iter().zip(low).zip(high) {
                    *low = scale * (f32::from(byte & 15) - zero) + offset;
                    *high = scale * (f32::from(byte >> 4) - zero) + offset;
                }
            }
        }
    }
}

/// How the elements of a weight matrix are stored, row after row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightFormat {
    /// One element after the other.
    Dense(DType),
    /// Blocks along the last dimension, as in GGUF files.
    Block(BlockFormat),
}

impl WeightFormat {
    /// Bytes of one row of `columns` elements; `None` if `columns` is no whole number of blocks or the size overflows.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        match self {
            Self::Dense(dtype) => columns.checked_mul(dtype.bytes()),
            Self::Block(format) => {
                let whole = columns.is_multiple_of(format.elements());
                whole.then(|| (columns / format.elements()).checked_mul(format.bytes())).flatten()
            }
        }
    }

    /// The name used in programs and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dense(dtype) => dtype.name(),
            Self::Block(format) => format.name(),
        }
    }

    /// The number in the C ABI: an element type's own number, or 256 and a block format's number.
    pub const fn number(self) -> u32 {
        match self {
            Self::Dense(dtype) => dtype as u32,
            Self::Block(format) => 0x100 + format as u32,
        }
    }

    /// The format of this number.
    pub fn from_number(number: u32) -> Option<Self> {
        let block = BlockFormat::ALL.into_iter().map(Self::Block).find(|format| format.number() == number);
        block.or_else(|| DType::from_number(number).map(Self::Dense))
    }

    /// The format of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let block = BlockFormat::ALL.into_iter().find(|format| format.name() == name).map(Self::Block);
        block.or_else(|| DType::from_name(name).map(Self::Dense))
    }

    /// Whether an element costs less than 16 bits.
    pub const fn is_quantised(self) -> bool {
        matches!(self, Self::Block(_))
    }

    /// Decodes one row into f32. Integers are converted; f16 and bf16 are widened.
    ///
    /// # Errors
    /// If `row` is not exactly the bytes of `out.len()` elements.
    pub fn decode_row(self, row: &[u8], out: &mut [f32]) -> crate::Result<()> {
        if self.row_bytes(out.len()) != Some(row.len()) {
            let message =
                format!("a row of {} {} elements cannot be {} bytes", out.len(), self.name(), row.len());
            return Err(crate::Error::invalid(message));
        }
        match self {
            Self::Dense(dtype) => decode_dense(dtype, row, out),
            Self::Block(format) => {
                for (block, out) in
                    row.chunks_exact(format.bytes()).zip(out.chunks_exact_mut(format.elements()))
                {
                    format.decode(block, out);
                }
            }
        }
        Ok(())
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
        for dtype in DType::ALL {
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
            assert_eq!(DType::from_number(dtype as u32), Some(dtype));
        }
        for format in BlockFormat::ALL {
            assert_eq!(WeightFormat::from_name(format.name()), Some(WeightFormat::Block(format)));
        }
        assert_eq!(WeightFormat::from_name("q9"), None);
    }

    #[test]
    fn row_bytes_refuse_partial_blocks_and_overflow() {
        let q4_1 = WeightFormat::Block(BlockFormat::Q4_1);
        assert_eq!(q4_1.row_bytes(64), Some(40));
        assert_eq!(q4_1.row_bytes(33), None);
        assert_eq!(WeightFormat::Dense(DType::F32).row_bytes(usize::MAX), None);
    }

    #[test]
    fn blocks_decode_by_their_formula() {
        let mut block = vec![0u8; 20];
        block[..2].copy_from_slice(&half::f16::from_f32(0.5).to_le_bytes());
        block[2..4].copy_from_slice(&half::f16::from_f32(-1.0).to_le_bytes());
        block[4] = 0xF3; // element 0 is 3, element 16 is 15
        let mut out = [0.0; 32];
        BlockFormat::Q4_1.decode(&block, &mut out);
        assert_eq!((out[0], out[16], out[1]), (0.5, 6.5, -1.0));

        let mut block = vec![0u8; 34];
        block[..2].copy_from_slice(&half::f16::from_f32(2.0).to_le_bytes());
        block[33] = 0x80;
        BlockFormat::Q8_0.decode(&block, &mut out);
        assert_eq!((out[0], out[31]), (0.0, -256.0));

        let mut block = vec![0x88u8; 18];
        block[..2].copy_from_slice(&half::f16::from_f32(2.0).to_le_bytes());
        block[2] = 0x0F;
        BlockFormat::Q4_0.decode(&block, &mut out);
        assert_eq!((out[0], out[16], out[5]), (14.0, -16.0, 0.0));
    }

    #[test]
    fn rows_of_the_wrong_length_are_refused() {
        let error = WeightFormat::Dense(DType::F16).decode_row(&[0; 3], &mut [0.0; 2]).unwrap_err();
        assert!(error.to_string().contains("3 bytes"), "{error}");
    }
}
