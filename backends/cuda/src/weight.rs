//! Packed weights.
//!
//! Dense weights lie row after row, each padded with zeros to a multiple of 16 bytes: what vector loads and cuBLASLt both
//! read, so there is one copy. Block formats are taken apart into two planes, so that integers can be loaded 16 bytes at a
//! time: first all integers, row after row; then, from the next multiple of 256 bytes, the scales in the same order (for
//! `Q4_1` scale and minimum in turn).

use crate::{context::Context, memory::CudaBuffer, stream::CudaStream};
use dsrun_core::{
    BlockFormat, DType, Error, Result, WeightFormat, WeightReader, WeightType,
    device::{BufferSlice, MemoryKind, Stream},
    kernels::{PackedLayout, PackedWeight, WeightDesc},
};
use std::sync::Arc;

/// Bytes of rows packed at a time.
const SLAB: usize = 8 << 20;

/// Where things are in a packed weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Bytes from row to row of the elements, or of the integers.
    pub(crate) row_bytes: usize,
    /// Where the scales begin; the end of the elements for dense weights.
    pub(crate) scales: usize,
    /// Bytes of scales of a row.
    pub(crate) scale_bytes: usize,
    pub(crate) bytes: usize,
}

/// Bytes of integers and of scales in a block.
const fn parts(format: BlockFormat) -> Option<(usize, usize)> {
    match format {
        BlockFormat::Q4_0 => Some((16, 2)),
        BlockFormat::Q4_1 => Some((16, 4)),
        BlockFormat::Q8_0 => Some((32, 2)),
        _ => None,
    }
}

/// How a weight would be packed.
pub(crate) fn layout(weight: &WeightType) -> Result<Layout> {
    let unsupported = || {
        Error::unsupported(format!("CUDA cannot keep weights of format {}", weight.format)).field("format")
    };
    weight.bytes()?;
    let (rows, columns) = (weight.rows(), weight.columns());
    let too_large = || Error::invalid(format!("{:?} bytes overflow", weight.shape)).field("shape");
    let (row_bytes, scale_bytes) = match weight.format {
        WeightFormat::Dense(dtype) if dtype.is_float() => {
            let bytes =
                columns.checked_mul(dtype.bytes()).and_then(|bytes| bytes.checked_next_multiple_of(16));
            (bytes.ok_or_else(too_large)?, 0)
        }
        WeightFormat::Block(format) => {
            let (integers, scales) = parts(format).ok_or_else(unsupported)?;
            let blocks = columns / format.elements();
            (blocks * integers, blocks * scales)
        }
        _ => return Err(unsupported()),
    };
    let scales = rows.checked_mul(row_bytes).and_then(|bytes| bytes.checked_next_multiple_of(256));
    let scales = scales.ok_or_else(too_large)?;
    let bytes =
        rows.checked_mul(scale_bytes).and_then(|bytes| bytes.checked_add(scales)).ok_or_else(too_large)?;
    Ok(Layout { rows, columns, row_bytes, scales, scale_bytes, bytes })
}

/// What `prepack_query` answers.
pub(crate) fn packed_layout(weight: &WeightDesc) -> Result<PackedLayout> {
    let name = match weight.weight_type.format {
        WeightFormat::Dense(dtype) => format!("rows16-{dtype}"),
        format => format!("planes-{format}"),
    };
    Ok(PackedLayout { bytes: layout(&weight.weight_type)?.bytes, name })
}

/// The name of an element type or format in the kernels.
pub(crate) fn format_name(format: WeightFormat) -> Result<&'static str> {
    match format {
        WeightFormat::Dense(DType::F32) => Ok("FORMAT_F32"),
        WeightFormat::Dense(DType::F16) => Ok("FORMAT_F16"),
        WeightFormat::Dense(DType::BF16) => Ok("FORMAT_BF16"),
        WeightFormat::Block(BlockFormat::Q4_0) => Ok("FORMAT_Q4_0"),
        WeightFormat::Block(BlockFormat::Q4_1) => Ok("FORMAT_Q4_1"),
        WeightFormat::Block(BlockFormat::Q8_0) => Ok("FORMAT_Q8_0"),
        other => Err(Error::unsupported(format!("CUDA cannot keep weights of format {other}"))),
    }
}

/// A weight on the device.
#[derive(Debug)]
pub(crate) struct CudaWeight {
    weight_type: WeightType,
    pub(crate) layout: Layout,
    /// Whether it never changes again: only then may a kernel read it before its turn.
    pub(crate) immutable: bool,
    buffer: Arc<CudaBuffer>,
}

impl CudaWeight {
    /// Reads rows and brings them to the device, a slab at a time.
    pub(crate) fn pack(
        context: &Arc<Context>,
        stream: &mut CudaStream,
        weight: &WeightDesc,
        reader: &mut dyn WeightReader,
    ) -> Result<Self> {
        if reader.weight_type() != &weight.weight_type {
            let message = format!("the rows are {:?}, not {:?}", reader.weight_type(), weight.weight_type);
            return Err(Error::invalid(message).at("rows"));
        }
        let layout = layout(&weight.weight_type)?;
        let buffer = Arc::new(CudaBuffer::new(context.clone(), layout.bytes, MemoryKind::Device)?);
        let source_bytes = weight.weight_type.row_bytes()?;
        let step = (SLAB / layout.row_bytes.max(1)).max(1);
        let (mut elements, mut scales) = (Vec::new(), Vec::new());
        let mut first = 0;
        while first < layout.rows {
            let count = step.min(layout.rows - first);
            let rows = reader.rows(first, count)?;
            if rows.len() != count * source_bytes {
                return Err(Error::invalid(format!("{} bytes read for {count} rows", rows.len())).at("rows"));
            }
            let mut upload = |bytes: &[u8], offset: usize| {
                let slice = BufferSlice { buffer: buffer.clone(), offset, bytes: bytes.len() };
                stream.upload(bytes, &slice)
            };
            if source_bytes == layout.row_bytes && layout.scale_bytes == 0 {
                upload(&rows, first * layout.row_bytes)?;
            } else {
                elements.clear();
                scales.clear();
                match weight.weight_type.format {
                    WeightFormat::Block(format) => split(format, &rows, &mut elements, &mut scales),
                    _ => pad(&rows, source_bytes, layout.row_bytes, &mut elements),
                }
                upload(&elements, first * layout.row_bytes)?;
                upload(&scales, layout.scales + first * layout.scale_bytes)?;
            }
            first += count;
        }
        let immutable = weight.immutable;
        Ok(Self { weight_type: weight.weight_type.clone(), layout, immutable, buffer })
    }

    /// Where its elements, or integers, are.
    pub(crate) fn address(&self) -> u64 {
        self.buffer.pointer
    }

    /// Where its scales are.
    pub(crate) fn scales(&self) -> u64 {
        self.buffer.pointer + self.layout.scales as u64
    }
}

fn pad(rows: &[u8], source: usize, padded: usize, out: &mut Vec<u8>) {
    for row in rows.chunks_exact(source.max(1)) {
        out.extend_from_slice(row);
        out.resize(out.len() + padded - source, 0);
    }
}

fn split(format: BlockFormat, rows: &[u8], integers: &mut Vec<u8>, scales: &mut Vec<u8>) {
    let Some((_, scale_bytes)) = parts(format) else { return };
    for block in rows.chunks_exact(format.bytes()) {
        let (scale, integer) = block.split_at(scale_bytes);
        scales.extend_from_slice(scale);
        integers.extend_from_slice(integer);
    }
}

impl PackedWeight for CudaWeight {
    fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    fn bytes(&self) -> usize {
        self.layout.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_rows_are_padded_and_blocks_taken_apart() {
        let weight = |format, columns| WeightType { format, shape: vec![3, columns] };
        let dense = layout(&weight(WeightFormat::Dense(DType::BF16), 5)).unwrap();
        assert_eq!((dense.row_bytes, dense.scale_bytes, dense.bytes), (16, 0, 256));
        let blocks = layout(&weight(WeightFormat::Block(BlockFormat::Q4_1), 64)).unwrap();
        assert_eq!((blocks.row_bytes, blocks.scales, blocks.scale_bytes, blocks.bytes), (32, 256, 8, 280));
        assert!(layout(&weight(WeightFormat::Dense(DType::I32), 4)).is_err());

        let mut out = Vec::new();
        pad(&[1, 2, 3, 4], 2, 3, &mut out);
        assert_eq!(out, [1, 2, 0, 3, 4, 0]);
        let (mut integers, mut scales) = (Vec::new(), Vec::new());
        let block: Vec<u8> = (0..18).collect();
        split(BlockFormat::Q4_0, &block, &mut integers, &mut scales);
        assert_eq!((scales.as_slice(), integers.len(), integers[0]), (&[0, 1][..], 16, 2));
    }
}
