//! The types that tensors of GGUF files have.

use dsrun_core::{BlockFormat, DType, WeightFormat};
use std::fmt;

/// Number, name, elements per block and bytes per block of every type that has been in use. Numbers that are missing
/// here have been withdrawn.
const KNOWN: [(u32, &str, usize, usize); 33] = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
];

/// The type of a tensor, by its number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorType(u32);

impl TensorType {
    /// The type of this number, which need not be a known one.
    pub const fn from_number(number: u32) -> Self {
        Self(number)
    }

    /// The number in the file.
    pub const fn number(self) -> u32 {
        self.0
    }

    fn known(self) -> Option<&'static (u32, &'static str, usize, usize)> {
        KNOWN.iter().find(|(number, ..)| *number == self.0)
    }

    /// The name that GGUF tools use, if the type is known.
    pub fn name(self) -> Option<&'static str> {
        self.known().map(|(_, name, ..)| *name)
    }

    /// Elements and bytes of a block, if the type is known; types without blocks have one element.
    pub fn block(self) -> Option<(usize, usize)> {
        self.known().map(|(_, _, elements, bytes)| (*elements, *bytes))
    }

    /// How weights of this type are stored, if they can be used.
    pub const fn weight_format(self) -> Option<WeightFormat> {
        match self.0 {
            0 => Some(WeightFormat::Dense(DType::F32)),
            1 => Some(WeightFormat::Dense(DType::F16)),
            2 => Some(WeightFormat::Block(BlockFormat::Q4_0)),
            3 => Some(WeightFormat::Block(BlockFormat::Q4_1)),
            6 => Some(WeightFormat::Block(BlockFormat::Q5_0)),
            7 => Some(WeightFormat::Block(BlockFormat::Q5_1)),
            8 => Some(WeightFormat::Block(BlockFormat::Q8_0)),
            10 => Some(WeightFormat::Block(BlockFormat::Q2_K)),
            11 => Some(WeightFormat::Block(BlockFormat::Q3_K)),
            12 => Some(WeightFormat::Block(BlockFormat::Q4_K)),
            13 => Some(WeightFormat::Block(BlockFormat::Q5_K)),
            14 => Some(WeightFormat::Block(BlockFormat::Q6_K)),
            30 => Some(WeightFormat::Dense(DType::BF16)),
            39 => Some(WeightFormat::Block(BlockFormat::Mxfp4)),
            _ => None,
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "number {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_agree_with_the_formats_of_core() {
        let mut usable = 0;
        for (number, name, elements, bytes) in KNOWN {
            let Some(format) = TensorType(number).weight_format() else { continue };
            assert_eq!(format.name().to_uppercase(), name);
            assert_eq!(format.row_bytes(elements), Some(bytes));
            usable += 1;
        }
        assert_eq!(usable, 14);
    }

    #[test]
    fn unknown_types_show_their_number() {
        assert_eq!(TensorType(77).to_string(), "number 77");
        assert_eq!(TensorType(14).to_string(), "Q6_K");
    }
}
