//! FP8: `weight` in bytes that are floats (E4M3: a sign, four bits of exponent, three of significand, no infinities), and
//! `weight_scale` or `weight_scale_inv`, by which they are multiplied: one for the matrix, for each output, or for each block of outputs and
//! inputs.
//!
//! No format here has floats of 8 bits, so a matrix is decoded to bf16 as it is read.

use super::parts::{Parts, Result};
use crate::{safetensors_file::SafetensorsFiles, weights::slice_rows};
use dsrun_core::{DType, Error, ScaleType, WeightFormat, WeightType};
use half::bf16;

/// The type of such tensors in files.
pub(super) const DTYPE: &str = "F8_E4M3";

/// Tensors with scales of inputs, which are multiplied as they are here, and of results.
const OTHER_PARTS: [&str; 3] = ["input_scale", "activation_scale", "output_scale"];

/// A matrix `[outputs, inputs]` of 8-bit floats.
#[derive(Debug)]
pub(super) struct Float8 {
    elements: String,
    scales: String,
    scale: ScaleType,
    /// Outputs and inputs that share a scale.
    block: [usize; 2],
    other_parts: Vec<String>,
    /// What it is decoded to.
    pub(super) weight_type: WeightType,
}

impl Float8 {
    /// Finds the parts of a module, and checks that they fit together. `block` is the size of blocks that the configuration names.
    pub(super) fn new(parts: Parts<'_>, block: Option<[usize; 2]>) -> Result<Self> {
        let [outputs, inputs] = parts.matrix("weight", DTYPE)?;
        let name = ["weight_scale_inv", "weight_scale"].into_iter().find(|name| parts.find(name).is_some());
        let name = name.ok_or("it has no weight_scale")?;
        let shape = parts.find(name).map_or(&[][..], |tensor| tensor.shape);
        let fits = |[rows, columns]: [usize; 2]| {
            shape == [outputs.div_ceil(rows.max(1)), inputs.div_ceil(columns.max(1))]
        };
        let block = match *shape {
            [] | [1] => [outputs, inputs],
            [1, 1] if block.is_none() => [outputs, inputs],
            [rows] if rows == outputs => [1, inputs],
            [rows, 1] if rows == outputs && block.is_none() => [1, inputs],
            _ => block.filter(|block| fits(*block)).ok_or_else(|| {
                let blocks = block.map_or("the configuration names no blocks".to_owned(), |[rows, columns]| {
                    format!("blocks are of {rows} x {columns}")
                });
                format!("{name} has shape {shape:?}, which does not fit {outputs} outputs and {inputs} inputs; {blocks}")
            })?,
        };
        let weight_type =
            WeightType { format: WeightFormat::Dense(DType::BF16), shape: vec![outputs, inputs] };
        weight_type.elements().and(weight_type.bytes()).map_err(|error| error.to_string())?;
        let others = OTHER_PARTS.into_iter().filter_map(|part| parts.find(part));
        Ok(Self {
            elements: parts.name("weight"),
            scales: parts.name(name),
            scale: parts.scale_type(name)?,
            block,
            other_parts: others.map(|tensor| tensor.name.to_owned()).collect(),
            weight_type,
        })
    }

    /// The tensors that belong to the matrix.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &str> {
        [&self.elements, &self.scales].into_iter().chain(&self.other_parts).map(String::as_str)
    }

    /// Rows `first .. first + count`, decoded.
    pub(super) fn rows(
        &self,
        files: &SafetensorsFiles,
        first: usize,
        count: usize,
    ) -> dsrun_core::Result<Vec<u8>> {
        let inputs = self.weight_type.columns();
        let data = |name: &str| {
            files.data(name).ok_or_else(|| Error::internal("a matrix of 8-bit floats lost a part").at(name))
        };
        let as_bytes = WeightType {
            format: WeightFormat::Dense(DType::U8),
            shape: vec![self.weight_type.rows(), inputs],
        };
        let elements = slice_rows(&as_bytes, data(&self.elements)?, first, count)?;
        let [outputs_of_block, inputs_of_block] = self.block;
        let columns = inputs.div_ceil(inputs_of_block);
        let scales = data(&self.scales)?;
        let width = self.scale.dtype().bytes();
        let mut of_row = vec![0.0; columns];
        let mut out = Vec::with_capacity(elements.len() * 2);
        for (row, elements) in (first..).zip(elements.chunks_exact(inputs)) {
            let start = row / outputs_of_block * columns * width;
            WeightFormat::Dense(self.scale.dtype())
                .decode_row(&scales[start..start + columns * width], &mut of_row)?;
            for (elements, scale) in elements.chunks(inputs_of_block).zip(&of_row) {
                for element in elements {
                    // Rounded to f32, if the scale has more than 20 bits, and then to bf16.
                    let value = scale * VALUES[usize::from(*element)];
                    out.extend_from_slice(&bf16::from_f32(value).to_le_bytes());
                }
            }
        }
        Ok(out)
    }
}

/// The value of each byte.
static VALUES: [f32; 256] = values();

const fn values() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        values[byte] = value(byte as u32);
        byte += 1;
    }
    values
}

const fn value(byte: u32) -> f32 {
    let (sign, exponent, fraction) = (byte >> 7 << 31, byte >> 3 & 15, byte & 7);
    let bits = match (exponent, fraction) {
        (15, 7) => f32::NAN.to_bits(),
        // Multiples of 2^-9.
        (0, _) => (fraction as f32 / 512.0).to_bits(),
        _ => (exponent + 127 - 7) << 23 | fraction << 20,
    };
    f32::from_bits(sign | bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_floats_of_four_and_three_bits() {
        let found = [0x00, 0x80, 0x01, 0x07, 0x08, 0x38, 0xB9, 0x7E, 0xFE].map(|byte| VALUES[byte]);
        let expected = [0.0, -0.0, 0.001_953_125, 0.013_671_875, 0.015_625, 1.0, -1.125, 448.0, -448.0]
            .map(f32::to_bits);
        assert_eq!(found.map(f32::to_bits), expected);
        assert!(VALUES[0x7F].is_nan() && VALUES[0xFF].is_nan());
        assert_eq!(VALUES.iter().filter(|value| value.is_nan()).count(), 2);
        assert!(VALUES[..0x7F].is_sorted());
    }
}
