//! What the stored elements of a weight stand for.

use super::float;
use dsrun_core::{BlockFormat, DType, WeightFormat, WeightType};

/// The elements of a weight, row after row, by the formulas of [`BlockFormat`].
pub fn decode(weight_type: &WeightType, bytes: &[u8]) -> Vec<f64> {
    match weight_type.format {
        WeightFormat::Dense(dtype) => {
            let word =
                |bytes: &[u8]| bytes.iter().rev().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte));
            bytes.chunks(dtype.bytes()).map(|element| float::value(dtype, word(element))).collect()
        }
        WeightFormat::Block(format) => {
            bytes.chunks(format.bytes()).flat_map(|bytes| block(format, bytes)).collect()
        }
        other => unreachable!("the suite makes no weights of format {other}"),
    }
}

fn half(bytes: &[u8], at: usize) -> f64 {
    float::value(DType::F16, u32::from(bytes[at]) | u32::from(bytes[at + 1]) << 8)
}

fn block(format: BlockFormat, bytes: &[u8]) -> Vec<f64> {
    let d = half(bytes, 0);
    let nibble = |first: usize, element: usize| {
        let byte = bytes[first + element % 16];
        f64::from(if element < 16 { byte & 15 } else { byte >> 4 })
    };
    let element = |index: usize| match format {
        BlockFormat::Q4_0 => d * (nibble(2, index) - 8.0),
        BlockFormat::Q4_1 => d * nibble(4, index) + half(bytes, 2),
        BlockFormat::Q8_0 => d * f64::from(bytes[2 + index] as i8),
        other => unreachable!("the suite makes no blocks of format {}", other.name()),
    };
    (0..32).map(element).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_of(format: BlockFormat, bytes: &[u8]) -> Vec<f64> {
        decode(&WeightType { format: WeightFormat::Block(format), shape: vec![1, 32] }, bytes)
    }

    #[test]
    fn blocks_by_hand() {
        // f16: 0x3800 is 0.5, 0xBC00 is -1.
        let mut bytes = vec![0x00, 0x38];
        bytes.extend([0x9A; 16]);
        let values = block_of(BlockFormat::Q4_0, &bytes);
        assert_eq!((values[0], values[15], values[16], values[31]), (1.0, 1.0, 0.5, 0.5));

        let mut bytes = vec![0x00, 0x38, 0x00, 0xBC];
        bytes.extend([0x30; 16]);
        let values = block_of(BlockFormat::Q4_1, &bytes);
        assert_eq!((values[3], values[20]), (-1.0, 0.5));

        let mut bytes = vec![0x00, 0x38];
        bytes.extend((0..32).map(|index| (index - 16i8) as u8));
        let values = block_of(BlockFormat::Q8_0, &bytes);
        assert_eq!((values[0], values[16], values[31]), (-8.0, 0.0, 7.5));
    }

    #[test]
    fn dense_by_hand() {
        let weight_type = WeightType { format: WeightFormat::Dense(DType::BF16), shape: vec![1, 2] };
        assert_eq!(decode(&weight_type, &[0x80, 0x3F, 0x00, 0xC0]), [1.0, -2.0]);
    }
}
