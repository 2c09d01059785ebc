//! Weights in device memory.
//!
//! A weight is one buffer of words. Rows of dense weights are kept in their element type; rows of quantised weights become
//! unsigned integers of 4 or 8 bits, the first in the lowest bits. Rows are padded with zeros to 16 bytes. Behind the rows of a
//! quantised weight follow two f32 for each group of each row: the scale, and the zero point or the minimum.

use crate::driver::{
    adapter::DeviceSpec, context::Context, memory::WgpuBuffer, shader::WeightElement, stream::WgpuStream,
};
use dsrun_core::{
    Affine, BlockFormat, DType, Error, GroupBits, GroupOffset, Result, WeightFormat, WeightReader,
    WeightType,
    device::{BufferSlice, MemoryKind, Stream},
    kernels::{PackedLayout, PackedWeight, WeightDesc},
};
use std::sync::Arc;

/// Source bytes of the rows that are packed at a time.
const SLAB: usize = 4 << 20;

/// The places of rows and scales in a packed weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) element: WeightElement,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Words from row to row.
    pub(crate) row_words: usize,
    /// The first word of the scales.
    pub(crate) scales: usize,
    /// Groups of a row, 0 for dense weights.
    pub(crate) groups: usize,
    /// Columns of a group.
    pub(crate) group: usize,
    pub(crate) bytes: usize,
}

impl Layout {
    /// The quads of columns in 16 bytes of a row.
    pub(crate) fn quads(&self) -> usize {
        match self.element {
            WeightElement::F32 => 1,
            WeightElement::F16 | WeightElement::BF16 => 2,
            WeightElement::Integers { bits, .. } => 32 / bits as usize,
        }
    }
}

fn element(format: WeightFormat) -> Option<WeightElement> {
    let integers = |bits, minimum| Some(WeightElement::Integers { bits, minimum });
    match format {
        WeightFormat::Dense(DType::F32) => Some(WeightElement::F32),
        WeightFormat::Dense(DType::F16) => Some(WeightElement::F16),
        WeightFormat::Dense(DType::BF16) => Some(WeightElement::BF16),
        WeightFormat::Group(format) => {
            let bits = if format.bits == GroupBits::Four { 4 } else { 8 };
            integers(bits, format.offset == GroupOffset::Minimum)
        }
        WeightFormat::Block(BlockFormat::Q4_0) => integers(4, false),
        WeightFormat::Block(BlockFormat::Q4_1 | BlockFormat::Q4_K) => integers(4, true),
        WeightFormat::Block(
            BlockFormat::Q5_0 | BlockFormat::Q8_0 | BlockFormat::Q3_K | BlockFormat::Q6_K,
        ) => integers(8, false),
        WeightFormat::Block(BlockFormat::Q5_1 | BlockFormat::Q2_K | BlockFormat::Q5_K) => integers(8, true),
        _ => None,
    }
}

/// The layout of a weight.
///
/// # Errors
/// [`dsrun_core::Code::Unsupported`] if no kernel reads the format; an error if the size overflows.
pub(crate) fn layout(weight: &WeightType) -> Result<Layout> {
    weight.bytes()?;
    let Some(element) = element(weight.format) else {
        let message = format!("this backend has no layout for weights of {}", weight.format);
        return Err(Error::unsupported(message).field("format"));
    };
    let (rows, columns) = (weight.rows(), weight.columns());
    let bits = match element {
        WeightElement::F32 => 32,
        WeightElement::F16 | WeightElement::BF16 => 16,
        WeightElement::Integers { bits, .. } => bits as usize,
    };
    let quantised = matches!(element, WeightElement::Integers { .. });
    let group = weight.format.group(columns).max(1);
    let groups = if quantised { columns.div_ceil(group) } else { 0 };
    if quantised && groups > 1 && !group.is_multiple_of(4) {
        let message = format!("groups of {group} columns are not a multiple of 4");
        return Err(Error::unsupported(message).field("format"));
    }
    let sizes = || {
        let row_words = columns.checked_mul(bits)?.div_ceil(32).checked_next_multiple_of(4)?;
        let scales = rows.checked_mul(row_words)?;
        let words = rows.checked_mul(groups.checked_mul(2)?)?.checked_add(scales)?;
        Some((row_words, scales, words.checked_mul(4)?))
    };
    let (row_words, scales, bytes) =
        sizes().ok_or_else(|| Error::invalid(format!("{:?} bytes overflow", weight.shape)).field("shape"))?;
    Ok(Layout { element, rows, columns, row_words, scales, groups, group, bytes })
}

/// The answer to a query for the layout of a weight.
///
/// # Errors
/// As [`layout`], or [`dsrun_core::Code::Unsupported`] if the weight is longer than a binding.
pub(crate) fn packed_layout(weight: &WeightDesc, spec: &DeviceSpec) -> Result<PackedLayout> {
    let bytes = layout(&weight.weight_type)?.bytes;
    let limit = spec.binding_bytes();
    if bytes > limit {
        let message = format!("takes {bytes} bytes, but the adapter binds at most {limit}");
        return Err(Error::unsupported(message).field("shape"));
    }
    Ok(PackedLayout { bytes, name: format!("words-{}", weight.weight_type.format), relocatable: false })
}

/// A weight in device memory.
#[derive(Debug)]
pub(crate) struct WgpuWeight {
    weight_type: WeightType,
    bytes: usize,
    pub(crate) buffer: Arc<WgpuBuffer>,
}

impl WgpuWeight {
    /// Reads a weight, packs its rows, and uploads them.
    ///
    /// # Errors
    /// As [`packed_layout`]; the errors of the reader; [`dsrun_core::Code::OutOfMemory`].
    pub(crate) fn pack(
        context: &Arc<Context>,
        stream: &mut WgpuStream,
        weight: &WeightDesc,
        reader: &mut dyn WeightReader,
    ) -> Result<Self> {
        let weight_type = &weight.weight_type;
        if reader.weight_type() != weight_type {
            let message = format!("the rows are {:?}, not {weight_type:?}", reader.weight_type());
            return Err(Error::invalid(message).at("rows"));
        }
        packed_layout(weight, &context.spec)?;
        let layout = layout(weight_type)?;
        let buffer = Arc::new(WgpuBuffer::new(context.clone(), layout.bytes, MemoryKind::Device)?);
        let row_bytes = weight_type.row_bytes()?;
        let step = (SLAB / row_bytes.max(1)).max(1);
        let (mut words, mut scales) = (Vec::new(), Vec::new());
        for first in (0..layout.rows).step_by(step) {
            let count = step.min(layout.rows - first);
            let rows = reader.rows(first, count)?;
            if rows.len() != count * row_bytes {
                let message =
                    format!("rows {first}..+{count} are {} bytes of {}", rows.len(), count * row_bytes);
                return Err(Error::invalid(message).at("rows"));
            }
            words.clear();
            scales.clear();
            for row in 0..count {
                let row = &rows[row * row_bytes..][..row_bytes];
                pack_row(weight_type.format, &layout, row, &mut words, &mut scales)?;
            }
            let mut upload = |bytes: &[u8], offset: usize| {
                let slice = BufferSlice::new(buffer.clone(), offset, bytes.len())?;
                stream.upload(bytes, &slice)
            };
            upload(&words, 4 * first * layout.row_words)?;
            upload(&scales, 4 * (layout.scales + first * layout.groups * 2))?;
        }
        Ok(Self { weight_type: weight_type.clone(), bytes: layout.bytes, buffer })
    }
}

/// Appends the words of a row, and the scales of its groups.
fn pack_row(
    format: WeightFormat,
    layout: &Layout,
    row: &[u8],
    words: &mut Vec<u8>,
    scales: &mut Vec<u8>,
) -> Result<()> {
    let end = words.len() + 4 * layout.row_words;
    if let WeightElement::Integers { bits, minimum } = layout.element {
        let mut integers = vec![0; layout.columns];
        let mut affine = vec![Affine::default(); layout.groups];
        format.unpack_row(row, &mut integers, &mut affine)?;
        match bits {
            4 => {
                let pair = |pair: &[u8]| pair[0] & 15 | pair.get(1).map_or(0, |second| second << 4);
                words.extend(integers.chunks(2).map(pair));
            }
            _ => words.extend_from_slice(&integers),
        }
        for Affine { scale, zero, minimum: lowest } in affine {
            let offset = if minimum { lowest } else { zero };
            scales.extend([scale, offset].into_iter().flat_map(f32::to_le_bytes));
        }
    } else {
        words.extend_from_slice(row);
    }
    words.resize(end, 0);
    Ok(())
}

impl PackedWeight for WgpuWeight {
    fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}
