//! Packed weights.
//!
//! Dense weights are row-major, with rows padded with zeros to a multiple of 16 bytes, a layout for both vector loads and
//! cuBLASLt, so one copy is enough. Quantised weights, group-wise or GGUF blocks, become integers of 4 or 8 bits with the scales
//! and offsets of their groups: see [`packing`].

mod packing;

pub(crate) use packing::{Offset, Packing, UNIT};

use crate::driver::{
    context::Context,
    memory::{ALIGNMENT, CudaBuffer},
    stream::CudaStream,
};
use dsrun_core::{
    DType, Error, Result, WeightFormat, WeightReader, WeightType,
    device::{BufferSlice, MemoryKind, Stream},
    kernels::{PackedLayout, PackedWeight, WeightDesc, check_packed_range},
};
use std::sync::Arc;

/// Bytes of rows packed at a time.
const SLAB: usize = 8 << 20;

/// The layout of a packed weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Bytes from row to row of dense weights; from 8 rows to the next of integers.
    pub(crate) row_bytes: usize,
    /// The offset of the scales and offsets of groups; the end of the elements for dense weights.
    pub(crate) scales: usize,
    /// Bytes of the scales and offsets of 8 rows.
    pub(crate) scale_bytes: usize,
    pub(crate) bytes: usize,
    /// How integers are packed; `None` for dense weights.
    pub(crate) packing: Option<Packing>,
}

/// The layout of a packed weight of this type.
pub(crate) fn layout(weight: &WeightType) -> Result<Layout> {
    weight.bytes()?;
    let (rows, columns) = (weight.rows(), weight.columns());
    let too_large = || Error::invalid(format!("{:?} bytes overflow", weight.shape)).field("shape");
    let packing = Packing::of(weight.format);
    let (units, row_bytes, scale_bytes) = match (weight.format, packing) {
        (WeightFormat::Dense(dtype), _) if dtype.is_float() => {
            let bytes =
                columns.checked_mul(dtype.bytes()).and_then(|bytes| bytes.checked_next_multiple_of(16));
            (rows, bytes.ok_or_else(too_large)?, 0)
        }
        (_, Some(packing)) => {
            let bytes = packing.unit_bytes(columns).ok_or_else(too_large)?;
            (rows.div_ceil(UNIT), bytes, packing.number_bytes(columns).ok_or_else(too_large)?)
        }
        (format, None) => {
            let message = format!("CUDA cannot keep weights of format {format}");
            return Err(Error::unsupported(message).field("format"));
        }
    };
    let scales = units.checked_mul(row_bytes).and_then(|bytes| bytes.checked_next_multiple_of(256));
    let scales = scales.ok_or_else(too_large)?;
    let bytes =
        units.checked_mul(scale_bytes).and_then(|bytes| bytes.checked_add(scales)).ok_or_else(too_large)?;
    Ok(Layout { rows, columns, row_bytes, scales, scale_bytes, bytes, packing })
}

/// The answer of `prepack_query`.
pub(crate) fn packed_layout(weight: &WeightDesc) -> Result<PackedLayout> {
    let name = match weight.weight_type.format {
        WeightFormat::Dense(dtype) => format!("rows16-{dtype}"),
        format => format!("units8-{format}"),
    };
    Ok(PackedLayout {
        bytes: layout(&weight.weight_type)?.bytes,
        name,
        relocatable: true,
        readable_when_pinned: true,
    })
}

/// The kernels' name of a weight format: `FORMAT` of `linear/weight.cuh`.
pub(crate) fn format_name(format: WeightFormat) -> Result<String> {
    match (format, Packing::of(format)) {
        (WeightFormat::Dense(DType::F32), _) => Ok("FORMAT_F32".into()),
        (WeightFormat::Dense(DType::F16), _) => Ok("FORMAT_F16".into()),
        (WeightFormat::Dense(DType::BF16), _) => Ok("FORMAT_BF16".into()),
        (_, Some(packing)) => Ok(packing.number().to_string()),
        (other, None) => Err(Error::unsupported(format!("CUDA cannot keep weights of format {other}"))),
    }
}

/// A weight on the device.
#[derive(Debug)]
pub(crate) struct CudaWeight {
    weight_type: WeightType,
    pub(crate) layout: Layout,
    /// Whether it is never written again: only then may a kernel read it before the preceding kernel has finished.
    pub(crate) immutable: bool,
    buffer: Arc<CudaBuffer>,
    /// The offset in the buffer.
    offset: usize,
}

impl CudaWeight {
    /// Reads, packs and uploads rows, a slab at a time.
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
        // Whole units at a time.
        let step = (SLAB / source_bytes.max(1)).max(1).next_multiple_of(UNIT);
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
            if let Some(packing) = layout.packing {
                packing.pack(&weight.weight_type, &rows, &mut elements, &mut scales)?;
                upload(&elements, first / UNIT * layout.row_bytes)?;
                upload(&scales, layout.scales + first / UNIT * layout.scale_bytes)?;
            } else if source_bytes == layout.row_bytes {
                upload(&rows, first * layout.row_bytes)?;
            } else {
                elements.clear();
                pad(&rows, source_bytes, layout.row_bytes, &mut elements);
                upload(&elements, first * layout.row_bytes)?;
            }
            first += count;
        }
        let immutable = weight.immutable;
        Ok(Self { weight_type: weight.weight_type.clone(), layout, immutable, buffer, offset: 0 })
    }

    /// A weight whose packed bytes are in a range of device or pinned memory. Kernels read pinned memory over the bus.
    pub(crate) fn adopt(context: &Arc<Context>, weight: &WeightDesc, memory: &BufferSlice) -> Result<Self> {
        check_packed_range(&packed_layout(weight)?, memory, ALIGNMENT)?;
        let (buffer, _) = CudaBuffer::locate(memory, context).map_err(|error| error.at("memory"))?;
        let (layout, immutable) = (layout(&weight.weight_type)?, weight.immutable);
        let weight_type = weight.weight_type.clone();
        Ok(Self { weight_type, layout, immutable, buffer, offset: memory.offset })
    }

    /// Enqueues a copy of the packed bytes.
    pub(crate) fn copy_to(&self, stream: &mut CudaStream, destination: &BufferSlice) -> Result<()> {
        let source =
            BufferSlice { buffer: self.buffer.clone(), offset: self.offset, bytes: self.layout.bytes };
        stream.copy(&source, destination)
    }

    /// The address of its elements or integers.
    pub(crate) fn address(&self) -> u64 {
        self.buffer.pointer + self.offset as u64
    }

    /// The address of its scales.
    pub(crate) fn scales(&self) -> u64 {
        self.address() + self.layout.scales as u64
    }
}

fn pad(rows: &[u8], source: usize, padded: usize, out: &mut Vec<u8>) {
    for row in rows.chunks_exact(source.max(1)) {
        out.extend_from_slice(row);
        out.resize(out.len() + padded - source, 0);
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
    use dsrun_core::BlockFormat;

    #[test]
    fn dense_rows_are_padded_and_integers_lie_in_units() {
        let weight = |format, columns| WeightType { format, shape: vec![3, columns] };
        let dense = layout(&weight(WeightFormat::Dense(DType::BF16), 5)).unwrap();
        assert_eq!((dense.row_bytes, dense.scale_bytes, dense.bytes), (16, 0, 256));
        // One unit of 8 rows: 128 columns of 4 bits, and numbers of 8 groups of 32 for the 256 columns of a piece.
        let blocks = layout(&weight(WeightFormat::Block(BlockFormat::Q4_1), 64)).unwrap();
        assert_eq!((blocks.row_bytes, blocks.scales, blocks.scale_bytes), (512, 512, 8 * 8 * 4));
        assert!(layout(&weight(WeightFormat::Dense(DType::I32), 4)).is_err());
        let mut out = Vec::new();
        pad(&[1, 2, 3, 4], 2, 3, &mut out);
        assert_eq!(out, [1, 2, 0, 3, 4, 0]);
    }
}
