//! Weights in device memory.
//!
//! A weight is one buffer of words, or several if it is longer than a binding: each part is then packed as a separate weight with
//! some of the rows. Dense weights keep their element type; quantised weights become unsigned integers of 4 or 8 bits, or floats
//! of 4 bits, the first in the lowest bits. Rows are padded with zeros to 16 bytes. The rows of a quantised weight are followed
//! by two f32 for each group of each row: the scale, and the zero point or the minimum.

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
    pub(crate) bytes: usize,
}

impl Layout {
    /// The layout of some rows of this one; `None` if the size overflows.
    fn part(&self, first: usize, rows: usize) -> Option<Self> {
        let scales = rows.checked_mul(self.row_words)?;
        let words = rows.checked_mul(self.groups.checked_mul(2)?)?.checked_add(scales)?;
        Some(Self { first, rows, scales, bytes: words.checked_mul(4)?, ..*self })
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
        let layout =
            Layout { element, first: 0, rows, columns, row_words, scales: 0, groups, group, bytes: 0 };
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
    let row_bytes = 4 * (whole.row_words + 2 * whole.groups);
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
    Ok(PackedLayout { bytes, name: format!("words-{}", weight.weight_type.format), relocatable: false })
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
    let (mut words, mut scales) = (Vec::new(), Vec::new());
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
        for row in 0..count {
            pack_row(format, layout, &rows[row * row_bytes..][..row_bytes], &mut words, &mut scales)?;
        }
        let mut upload = |bytes: &[u8], offset: usize| {
            let slice = BufferSlice::new(buffer.clone(), offset, bytes.len())?;
            stream.upload(bytes, &slice)
        };
        upload(&words, 4 * first * layout.row_words)?;
        upload(&scales, 4 * (layout.scales + first * layout.groups * 2))?;
    }
    Ok(())
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
        let minimum = matches!(layout.element, WeightElement::Integers { minimum: true, .. });
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
