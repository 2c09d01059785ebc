//! Weights, decoded to numbers that tensors can hold.

use crate::tensor::{CPU, Result};
use candle_core::Tensor;
use dsrun_core::{
    Affine, Code, Error, WeightFormat, WeightReader, WeightType,
    kernels::{PackedLayout, PackedWeight},
};

/// Rows that are read from a weight at a time.
const ROWS_AT_ONCE: usize = 256;

/// A weight matrix `[outputs, inputs]`.
#[derive(Debug)]
pub(crate) struct Weight {
    weight_type: WeightType,
    bytes: usize,
    /// The elements, or the integers of signed bytes with one scale for each row.
    numbers: Tensor,
    /// The scales `[outputs, 1]` of such integers.
    scales: Option<Tensor>,
}

impl Weight {
    /// The layout of a weight of this type: f32, as the format's formula says.
    pub(crate) fn layout(weight: &WeightType) -> dsrun_core::Result<PackedLayout> {
        let unsupported = match weight.format {
            WeightFormat::Dense(dtype) => !dtype.is_float(),
            _ => false,
        };
        if unsupported {
            let message = format!("weights stored as {} are not floats", weight.format);
            return Err(Error::unsupported(message).at("weight").field("format"));
        }
        weight.bytes()?;
        let scales = if keeps_integers(weight.format) { weight.rows() } else { 0 };
        let numbers = weight.elements()?.checked_add(scales).and_then(|numbers| numbers.checked_mul(4));
        let bytes = numbers.filter(|bytes| *bytes <= isize::MAX as usize).ok_or_else(|| {
            let message = format!("{:?} elements do not fit an address space", weight.shape);
            Error::invalid(message).at("weight").field("shape")
        })?;
        Ok(PackedLayout {
            bytes,
            name: format!("f32-{}", weight.format),
            relocatable: false,
            readable_when_pinned: false,
        })
    }

    /// Reads a weight and decodes it.
    pub(crate) fn decode(
        weight_type: &WeightType,
        reader: &mut dyn WeightReader,
    ) -> dsrun_core::Result<Self> {
        let bytes = Self::layout(weight_type)?.bytes;
        if reader.weight_type() != weight_type {
            let message = format!("is {weight_type:?}, but its reader has {:?}", reader.weight_type());
            return Err(Error::invalid(message).at("weight"));
        }
        let (rows, columns) = (weight_type.rows(), weight_type.columns());
        let row_bytes = weight_type.row_bytes()?;
        let (mut numbers, mut scales) = (Vec::new(), Vec::new());
        numbers.try_reserve_exact(rows * columns).map_err(|_| {
            Error::new(Code::OutOfMemory, format!("no {bytes} bytes of host memory for a weight"))
        })?;
        for first in (0..rows).step_by(ROWS_AT_ONCE) {
            let count = ROWS_AT_ONCE.min(rows - first);
            let source = reader.rows(first, count)?;
            if source.len() != count * row_bytes {
                let message =
                    format!("rows {first}..+{count} are {} bytes of {}", source.len(), count * row_bytes);
                return Err(Error::invalid(message).at("weight"));
            }
            for row in 0..count {
                let row = &source[row * row_bytes..][..row_bytes];
                decode_row(weight_type.format, row, columns, &mut numbers, &mut scales)?;
            }
        }
        let tensors = || -> Result<_> {
            let numbers = Tensor::from_vec(numbers, (rows, columns), CPU)?;
            let scales = keeps_integers(weight_type.format).then(|| Tensor::from_vec(scales, (rows, 1), CPU));
            Ok((numbers, scales.transpose()?))
        };
        let (numbers, scales) = tensors()?;
        Ok(Self { weight_type: weight_type.clone(), bytes, numbers, scales })
    }

    /// The elements `[outputs, inputs]`.
    pub(crate) fn values(&self) -> Result<Tensor> {
        Ok(match &self.scales {
            None => self.numbers.clone(),
            Some(scales) => self.numbers.broadcast_mul(scales)?,
        })
    }

    /// The elements of the rows that `indices` names.
    pub(crate) fn rows(&self, indices: &Tensor) -> Result<Tensor> {
        let numbers = self.numbers.index_select(indices, 0)?;
        Ok(match &self.scales {
            None => numbers,
            Some(scales) => numbers.broadcast_mul(&scales.index_select(indices, 0)?)?,
        })
    }

    /// Integers `[outputs, inputs]` and scales `[outputs, 1]`, of a weight of signed bytes with one scale for each row.
    pub(crate) fn integers(&self) -> Result<(&Tensor, &Tensor)> {
        let scales = self.scales.as_ref();
        let scales = scales
            .ok_or_else(|| Error::internal(format!("{} has no scales of rows", self.weight_type.format)))?;
        Ok((&self.numbers, scales))
    }
}

/// Whether a weight of this format stays integers, which `linear_w8a8` multiplies by.
fn keeps_integers(format: WeightFormat) -> bool {
    matches!(format, WeightFormat::Group(format) if format.is_channelwise_int8())
}

/// Appends the numbers of a row, and its scale if the row stays integers.
fn decode_row(
    format: WeightFormat,
    row: &[u8],
    columns: usize,
    numbers: &mut Vec<f32>,
    scales: &mut Vec<f32>,
) -> dsrun_core::Result<()> {
    if keeps_integers(format) {
        let (mut integers, mut affine) = (vec![0; columns], [Affine::default()]);
        let groups = columns.div_ceil(format.group(columns));
        format.unpack_row(row, &mut integers, &mut affine[..groups])?;
        numbers.extend(integers.into_iter().map(|integer| f32::from(integer) - affine[0].zero));
        scales.push(affine[0].scale);
    } else {
        let start = numbers.len();
        numbers.resize(start + columns, 0.0);
        format.decode_row(row, &mut numbers[start..])?;
    }
    Ok(())
}

impl PackedWeight for Weight {
    fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}
