//! Weights in device memory.
//!
//! A weight is one buffer of words, or several if it is longer than a binding: each part is then packed as a separate weight with
//! some of the rows. Dense weights keep their element type; quantised weights become unsigned integers of 4 or 8 bits, or floats
//! of 4 bits, the first in the lowest bits. Rows are padded with zeros to 16 bytes. The rows of a quantised weight are followed
//! by two f32 for each group of each row: the scale, and the zero point or the minimum. Last come the [`half_scale`]s, one f32
//! for each row, unless the elements are f32 or f16.

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

/// The rows of a part are a multiple of this, so that the outputs of a unit are in one part.
const PART_ROWS: usize = 4;

/// The layout of a packed weight, or of a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) element: WeightElement,
    /// The first row of the weight that is in this part of it.
    pub(crate) first: usize,
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
    /// The first word of the [`half_scale`]s of the rows.
    pub(crate) half_scales: usize,
    pub(crate) bytes: usize,
}

impl Layout {
    /// The layout of some rows of this one; `None` if the size overflows.
    fn part(&self, first: usize, rows: usize) -> Option<Self> {
        let scales = rows.checked_mul(self.row_words)?;
        let half_scales = rows.checked_mul(self.groups.checked_mul(2)?)?.checked_add(scales)?;
        let words = half_scales.checked_add(if self.has_half_scales() { rows } else { 0 })?;
        Some(Self { first, rows, scales, half_scales, bytes: words.checked_mul(4)?, ..*self })
    }

    /// Whether each row has a [`half_scale`].
    pub(crate) fn has_half_scales(&self) -> bool {
        !matches!(self.element, WeightElement::F32 | WeightElement::F16)
    }

    /// Whether 16 bytes of a row may have elements of several groups.
    pub(crate) fn has_small_groups(&self) -> bool {
        self.groups > 1 && !self.group.is_multiple_of(4 * self.quads())
    }

    /// The quads of columns in 16 bytes of a row.
    pub(crate) fn quads(&self) -> usize {
        match self.element {
            WeightElement::F32 => 1,
            WeightElement::F16 | WeightElement::BF16 => 2,
            WeightElement::Integers { bits, .. } => 32 / bits as usize,
            WeightElement::Floats4 => 8,
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
        WeightFormat::Block(BlockFormat::Mxfp4) => Some(WeightElement::Floats4),
        WeightFormat::Block(BlockFormat::Q5_1 | BlockFormat::Q2_K | BlockFormat::Q5_K) => integers(8, true),
        _ => None,
    }
}

/// The layout of a weight in one part, however long that is.
///
/// # Errors
/// [`dsrun_core::Code::Unsupported`] if no kernel reads the format; an error if the size overflows.
fn layout(weight: &WeightType) -> Result<Layout> {
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
        WeightElement::Floats4 => 4,
    };
    let quantised = element.is_quantised();
    let group = weight.format.group(columns).max(1);
    let groups = if quantised { columns.div_ceil(group) } else { 0 };
    if quantised && groups > 1 && !group.is_multiple_of(4) {
        let message = format!("groups of {group} columns are not a multiple of 4");
        return Err(Error::unsupported(message).field("format"));
    }
    let row_words = columns.checked_mul(bits).and_then(|bits| bits.div_ceil(32).checked_next_multiple_of(4));
    let whole = row_words.and_then(|row_words| {
        let layout = Layout {
            element,
            first: 0,
            rows,
            columns,
            row_words,
            scales: 0,
            groups,
            group,
            half_scales: 0,
            bytes: 0,
        };
        layout.part(0, rows)
    });
    whole.ok_or_else(|| Error::invalid(format!("{:?} bytes overflow", weight.shape)).field("shape"))
}

/// The layouts of the parts of a weight, in the order of their rows: one, unless it is longer than a binding.
///
/// # Errors
/// As [`layout`]; [`dsrun_core::Code::Unsupported`] if a few rows are longer than a binding.
pub(crate) fn parts(weight: &WeightType, spec: &DeviceSpec) -> Result<Vec<Layout>> {
    let whole = layout(weight)?;
    if whole.bytes <= spec.part_bytes {
        return Ok(vec![whole]);
    }
    let limit = spec.binding_bytes();
    let row_bytes = 4 * (whole.row_words + 2 * whole.groups + usize::from(whole.has_half_scales()));
    let rows = (spec.part_bytes / row_bytes / PART_ROWS * PART_ROWS).max(PART_ROWS);
    if PART_ROWS * row_bytes > limit {
        let message = format!(
            "{PART_ROWS} rows take {} bytes, the adapter binds at most {limit}",
            PART_ROWS * row_bytes
        );
        return Err(Error::unsupported(message).field("shape"));
    }
    let part = |first: usize| {
        let part = whole.part(first, rows.min(whole.rows - first));
        part.ok_or_else(|| Error::internal("a part of a weight overflows"))
    };
    (0..whole.rows).step_by(rows).map(part).collect()
}

/// The answer to a query for the layout of a weight.
///
/// # Errors
/// As [`parts`].
pub(crate) fn packed_layout(weight: &WeightDesc, spec: &DeviceSpec) -> Result<PackedLayout> {
    let bytes = parts(&weight.weight_type, spec)?.iter().map(|part| part.bytes).sum();
    Ok(PackedLayout {
        bytes,
        name: format!("words-{}", weight.weight_type.format),
        relocatable: false,
        readable_when_pinned: false,
    })
}

/// A weight in device memory.
#[derive(Debug)]
pub(crate) struct WgpuWeight {
    weight_type: WeightType,
    bytes: usize,
    /// The buffer of each of its [`parts`].
    pub(crate) buffers: Vec<Arc<WgpuBuffer>>,
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
        let parts = parts(weight_type, &context.spec)?;
        let mut buffers = Vec::new();
        for part in &parts {
            let buffer = Arc::new(WgpuBuffer::new(context.clone(), part.bytes, MemoryKind::Device)?);
            pack_part(stream, &buffer, part, reader)?;
            buffers.push(buffer);
        }
        let bytes = parts.iter().map(|part| part.bytes).sum();
        Ok(Self { weight_type: weight_type.clone(), bytes, buffers })
    }
}

/// Reads the rows of a part of a weight, packs and uploads them.
fn pack_part(
    stream: &mut WgpuStream,
    buffer: &Arc<WgpuBuffer>,
    layout: &Layout,
    reader: &mut dyn WeightReader,
) -> Result<()> {
    let format = reader.weight_type().format;
    let row_bytes = reader.weight_type().row_bytes()?;
    let step = (SLAB / row_bytes.max(1)).max(1);
    let (mut words, mut scales, mut half_scales) = (Vec::new(), Vec::new(), Vec::new());
    for first in (0..layout.rows).step_by(step) {
        let count = step.min(layout.rows - first);
        let rows = reader.rows(layout.first + first, count)?;
        if rows.len() != count * row_bytes {
            let message = format!(
                "rows {}..+{count} are {} bytes of {}",
                layout.first + first,
                rows.len(),
                count * row_bytes
            );
            return Err(Error::invalid(message).at("rows"));
        }
        words.clear();
        scales.clear();
        half_scales.clear();
        for row in 0..count {
            let largest =
                pack_row(format, layout, &rows[row * row_bytes..][..row_bytes], &mut words, &mut scales)?;
            if layout.has_half_scales() {
                half_scales.extend(half_scale(largest).to_le_bytes());
            }
        }
        let mut upload = |bytes: &[u8], offset: usize| {
            // Not every layout has scales, and then their offset may be beyond the buffer.
            if bytes.is_empty() {
                return Ok(());
            }
            let slice = BufferSlice::new(buffer.clone(), offset, bytes.len())?;
            stream.upload(bytes, &slice)
        };
        upload(&words, 4 * first * layout.row_words)?;
        upload(&scales, 4 * (layout.scales + first * layout.groups * 2))?;
        upload(&half_scales, 4 * (layout.half_scales + first))?;
    }
    Ok(())
}

/// The power of two by which the elements of a row are multiplied before they become f16, so that the largest, of this
/// magnitude, is at least 2^13 and less than 2^14: bf16 and scales have a larger range than f16.
fn half_scale(largest: f32) -> f32 {
    let exponent = (largest.to_bits() >> 23 & 0xFF) as i32 - 127;
    if largest == 0.0 || exponent == 128 { 1.0 } else { 2f32.powi((13 - exponent).clamp(-126, 126)) }
}

/// Appends the words of a row, and the scales of its groups. Returns the largest magnitude of its elements, if they have a
/// [`half_scale`].
fn pack_row(
    format: WeightFormat,
    layout: &Layout,
    row: &[u8],
    words: &mut Vec<u8>,
    scales: &mut Vec<u8>,
) -> Result<f32> {
    let end = words.len() + 4 * layout.row_words;
    let mut largest = 0f32;
    if layout.element.is_quantised() {
        let mut integers = vec![0; layout.columns];
        let mut affine = vec![Affine::default(); layout.groups];
        format.unpack_row(row, &mut integers, &mut affine)?;
        if layout.element == WeightElement::Floats4 {
            for (group, affine) in integers.chunks_mut(layout.group).zip(&affine) {
                group
                    .iter_mut()
                    .for_each(|integer| *integer = float4(i32::from(*integer) - affine.zero as i32));
            }
        }
        match layout.element {
            WeightElement::Integers { bits: 8, .. } => words.extend_from_slice(&integers),
            _ => {
                let pair = |pair: &[u8]| pair[0] & 15 | pair.get(1).map_or(0, |second| second << 4);
                words.extend(integers.chunks(2).map(pair));
            }
        }
        let (minimum, greatest) = match layout.element {
            WeightElement::Integers { bits, minimum } => (minimum, ((1 << bits) - 1) as f32),
            _ => (false, 0.0),
        };
        for Affine { scale, zero, minimum: lowest } in affine {
            let offset = if minimum { lowest } else { zero };
            scales.extend([scale, offset].into_iter().flat_map(f32::to_le_bytes));
            let ends = match layout.element {
                WeightElement::Floats4 => [12.0 * scale; 2],
                _ if minimum => [lowest, scale * greatest + lowest],
                _ => [scale * zero, scale * (greatest - zero)],
            };
            largest = ends.into_iter().map(f32::abs).fold(largest, f32::max);
        }
    } else {
        words.extend_from_slice(row);
        if layout.element == WeightElement::BF16 {
            let magnitude = |pair: &[u8]| u16::from_le_bytes([pair[0], pair[1]]) & 0x7FFF;
            let bits = row.chunks_exact(2).map(magnitude).max().unwrap_or(0);
            largest = f32::from_bits(u32::from(bits) << 16);
        }
    }
    words.resize(end, 0);
    Ok(largest)
}

/// Encodes half of `doubled` as a 4-bit float: a sign, two bits of exponent and one of significand. Numbers that it cannot
/// represent become the largest.
fn float4(doubled: i32) -> u8 {
    const DOUBLED: [u32; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
    let code = DOUBLED.iter().position(|value| *value >= doubled.unsigned_abs()).unwrap_or(7) as u8;
    code | if doubled < 0 { 8 } else { 0 }
}

impl PackedWeight for WgpuWeight {
    fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_scales_make_the_largest_element_large() {
        for largest in [1.0f32, 0.02, 65504.0, 3e38, 1e-30] {
            let scale = half_scale(largest);
            assert_eq!(scale.to_bits() & 0x007F_FFFF, 0, "{scale} must be a power of two");
            let scaled = scale * largest;
            assert!((8192.0..16384.0).contains(&scaled), "{largest} becomes {scaled}");
        }
        assert_eq!([0.0, f32::INFINITY, f32::NAN].map(half_scale), [1.0; 3]);
        // The scale of a subnormal number and its inverse are normal.
        assert_eq!(half_scale(1e-40), 2f32.powi(126));
    }
}
