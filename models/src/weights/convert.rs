//! Rows between storage formats, by way of f32.

use dsrun_core::{DType, Error, Result, WeightFormat};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Decodes rows of one format and encodes them in another, with buffers that are used again for each row.
#[derive(Debug, Default)]
pub(super) struct Converter {
    values: Vec<f32>,
    f16s: Vec<f16>,
    bf16s: Vec<bf16>,
}

impl Converter {
    /// The elements of one row. Half precision goes through `half`'s slices, which use the processor's conversions.
    pub(super) fn decode(&mut self, format: WeightFormat, row: &[u8], columns: usize) -> Result<&mut [f32]> {
        self.values.resize(columns, 0.0);
        if format == WeightFormat::Dense(DType::F16) && Some(row.len()) == columns.checked_mul(2) {
            self.f16s.clear();
            self.f16s.extend(row.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes)));
            self.f16s.convert_to_f32_slice(&mut self.values);
        } else {
            format.decode_row(row, &mut self.values)?;
        }
        Ok(&mut self.values)
    }

    /// Writes one row, rounded to `target` (to nearest, ties to even); `out` is as long as that row.
    ///
    /// A value that is finite and would become infinite is an error: it would silently break the model.
    pub(super) fn convert(
        &mut self,
        (format, row): (WeightFormat, &[u8]),
        columns: usize,
        factor: Option<f32>,
        target: DType,
        out: &mut [u8],
    ) -> Result<()> {
        self.decode(format, row, columns)?;
        if let Some(factor) = factor {
            self.values.iter_mut().for_each(|value| *value *= factor);
        }
        let values = self.values.as_slice();
        match target {
            DType::F32 => put(out, values.iter().map(|value| value.to_le_bytes())),
            DType::F16 => {
                // The first value that rounds up to infinity lies half a step beyond the largest finite one, 65504.
                if let Some(value) = values.iter().find(|value| value.is_finite() && value.abs() >= 65520.0) {
                    return Err(too_large(*value, target));
                }
                self.f16s.resize(columns, f16::ZERO);
                self.f16s.convert_from_f32_slice(values);
                put(out, self.f16s.iter().map(|value| value.to_le_bytes()));
            }
            DType::BF16 => {
                self.bf16s.resize(columns, bf16::ZERO);
                self.bf16s.convert_from_f32_slice(values);
                let pairs = || self.bf16s.iter().zip(values);
                if let Some((_, value)) =
                    pairs().find(|(rounded, value)| rounded.is_infinite() && value.is_finite())
                {
                    return Err(too_large(*value, target));
                }
                put(out, self.bf16s.iter().map(|value| value.to_le_bytes()));
            }
            other => return Err(Error::unsupported(format!("weights cannot be cast to {other}"))),
        }
        Ok(())
    }
}

fn put<const N: usize>(out: &mut [u8], elements: impl Iterator<Item = [u8; N]>) {
    out.as_chunks_mut().0.iter_mut().zip(elements).for_each(|(out, element)| *out = element);
}

fn too_large(value: f32, target: DType) -> Error {
    Error::invalid(format!("the weight holds {value}, which {target} cannot; choose a wider dtype"))
}
