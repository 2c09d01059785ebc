//! Element types of tensors.

use std::fmt;

/// The type of one element of a tensor. The numbers are fixed because they cross the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 1,
    /// IEEE 754 binary16.
    F16 = 2,
    /// The upper 16 bits of a binary32.
    BF16 = 3,
    /// Signed 32-bit integer, for indices and lengths.
    I32 = 4,
    /// Unsigned 32-bit integer, for bit masks and random seeds.
    U32 = 5,
    /// Signed 8-bit integer, for quantised values.
    I8 = 6,
    /// Unsigned 8-bit integer, for raw bytes.
    U8 = 7,
}

impl DType {
    /// Every element type, in the order of its number.
    pub const ALL: [Self; 7] = [Self::F32, Self::F16, Self::BF16, Self::I32, Self::U32, Self::I8, Self::U8];

    /// The number of bytes of an element.
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

    /// The name that programs, messages and configuration use.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
            assert_eq!(DType::from_number(dtype as u32), Some(dtype));
        }
    }
}
