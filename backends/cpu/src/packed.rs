//! Packed weight matrices, and their product with activations.
//!
//! Weights stay quantised, interleaved ([`panel`]), and are decoded to f32 in registers as they are used ([`tile`]);
//! activations are f32 and exact. Products of quantised activations are sums of integers ([`integers`]). Kernels are written once
//! over a handful of vector operations ([`crate::lanes`]), for AVX2, AVX-512, NEON and plain Rust, chosen when the program runs.
//!
//! All sizes of batch run on these kernels, so that sums do not depend on the batch; the book's design record 8 compares them
//! with a general matrix product. For one row the product is as fast as memory, or as decoding where that takes longer: on two
//! cores of a Zen 4 server with AVX-512, 34 GB/s of f32 weights, 42 of bf16, 36 of q8_0, 26 of q4_1.
//!
//! A row's result does not depend on the other rows of the batch, nor on the number of threads, to the bit. It may differ
//! in the last bits between processors with and without fused multiply-add.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(not(target_arch = "x86_64"))]
#[path = "packed/no_amx.rs"]
mod amx;
mod format;
mod integers;
mod panel;
mod product;
pub(crate) mod rows;
pub(crate) mod temporary;
#[cfg(test)]
mod tests;
mod tile;

use crate::lanes::{InstructionSet, WIDTH};
use dsrun_core::{
    Affine, Code, Error, Result, WeightFormat, WeightReader, WeightType,
    kernels::{PackedLayout, PackedWeight, WeightDesc},
};
use dsrun_host::PackedMemory;
use format::{PanelFormat, common_zero, with_block, with_integers};
pub(crate) use integers::QuantisedRow;
use memmap2::MmapMut;
use panel::{
    BF16, Block, Bytes, F16, F32, FromBytes, FromIntegers, Int8, Nibbles, Q4_0, Q4_1, Q4K, Q6K, Q8_0,
};
use product::{Job, Output, Product};
use rayon::prelude::*;
use std::{fmt, ops::Range};

/// Bytes that are read from a weight at a time, unless a panel has more.
const PIECE_BYTES: usize = 4 << 20;

/// A weight matrix `[outputs, inputs]` in panels.
pub(crate) struct PackedMatrix {
    weight_type: WeightType,
    shape: PanelShape,
    storage: Storage,
}

/// The memory of a packed matrix: its panels, back to back, and the scale of each row if blocks hold no scales.
enum Storage {
    Own {
        /// Begins at a page, so that no vector is split between two cache lines.
        panels: MmapMut,
        scales: Vec<f32>,
    },
    /// Memory that others write to between calls, with the scales behind the panels.
    Adopted(PackedMemory),
}

/// Rows of a matrix, the activations that they are multiplied with, and the results.
pub(crate) struct RowRange<'a> {
    pub(crate) rows: Range<usize>,
    /// Rows of [`PackedMatrix::padded_inputs`] elements, zeros behind the last input.
    pub(crate) x: &'a [f32],
    /// As many rows as `x`, with a column for every row of [`PackedMatrix::covered`].
    pub(crate) out: &'a mut [f32],
}

/// The format and size of the panels of a matrix.
#[derive(Clone, Copy, Debug)]
struct PanelShape {
    format: PanelFormat,
    outputs: usize,
    inputs: usize,
    /// Bytes of a row before packing.
    source_bytes: usize,
    /// Bytes of a row of a panel.
    row_bytes: usize,
    /// Bytes of all panels.
    panel_bytes: usize,
    /// Bytes of all panels and of the scales of rows.
    bytes: usize,
}

impl PanelShape {
    fn new(weight: &WeightType) -> Result<Self> {
        let format = PanelFormat::new(weight.format, weight.columns())?;
        let (outputs, inputs) = (weight.rows(), weight.columns());
        weight.elements()?;
        let source_bytes = weight.row_bytes()?;
        let too_large = || {
            let message =
                format!("{:?} {} elements do not fit an address space", weight.shape, weight.format);
            Error::invalid(message).at("weight").field("shape")
        };
        let block_bytes = with_block!(format, B => size_of::<B>() / WIDTH);
        let length = with_block!(format, B => B::LENGTH);
        let row_bytes = inputs.div_ceil(length).checked_mul(block_bytes).ok_or_else(too_large)?;
        let rows = outputs.checked_next_multiple_of(WIDTH);
        let panel_bytes = rows.and_then(|rows| rows.checked_mul(row_bytes)).ok_or_else(too_large)?;
        let scales =
            if format == PanelFormat::Int8 { outputs.checked_mul(size_of::<f32>()) } else { Some(0) };
        let bytes = scales.and_then(|scales| scales.checked_add(panel_bytes));
        let bytes = bytes.filter(|bytes| *bytes <= isize::MAX as usize);
        Ok(Self {
            format,
            outputs,
            inputs,
            source_bytes,
            row_bytes,
            panel_bytes,
            bytes: bytes.ok_or_else(too_large)?,
        })
    }
}

/// The layout of a packed weight.
///
/// # Errors
/// [`Code::Unsupported`] if its format cannot be packed; if its size overflows.
pub(crate) fn layout(desc: &WeightDesc) -> Result<PackedLayout> {
    let shape = PanelShape::new(&desc.weight_type)?;
    let name = format!("panel16-{}-3", desc.weight_type.format);
    Ok(PackedLayout { bytes: shape.bytes, name, relocatable: true, readable_when_pinned: true })
}

impl PackedMatrix {
    /// Reads a weight and packs it, a few rows at a time.
    ///
    /// # Errors
    /// As [`layout`]; those of the reader; [`Code::OutOfMemory`].
    pub(crate) fn pack(
        desc: &WeightDesc,
        rows: &mut dyn WeightReader,
        pool: &rayon::ThreadPool,
    ) -> Result<Self> {
        let shape = PanelShape::new(&desc.weight_type)?;
        if rows.weight_type() != &desc.weight_type {
            let message = format!("is {:?}, but its reader has {:?}", desc.weight_type, rows.weight_type());
            return Err(Error::invalid(message).at("weight"));
        }
        let mut panels = zeroed(shape.panel_bytes)?;
        let mut scales = vec![0.0; shape.outputs];
        if shape.panel_bytes > 0 {
            let target = Target { panels: &mut panels[..shape.panel_bytes], scales: &mut scales };
            let format = desc.weight_type.format;
            match shape.format {
                PanelFormat::F32 if !format.is_quantised() => {
                    target.fill(&shape, rows, pool, interleave::<F32>)?;
                }
                PanelFormat::F16 => target.fill(&shape, rows, pool, interleave::<F16>)?,
                PanelFormat::BF16 => target.fill(&shape, rows, pool, interleave::<BF16>)?,
                PanelFormat::Q4_0 => target.fill(&shape, rows, pool, interleave::<Q4_0>)?,
                PanelFormat::Q4_1 => target.fill(&shape, rows, pool, interleave::<Q4_1>)?,
                PanelFormat::Q4K => target.fill(&shape, rows, pool, interleave::<Q4K>)?,
                PanelFormat::Q6K => target.fill(&shape, rows, pool, interleave::<Q6K>)?,
                PanelFormat::Q8_0 => target.fill(&shape, rows, pool, interleave::<Q8_0>)?,
                PanelFormat::F32 => {
                    target.fill(&shape, rows, pool, interleave_integers::<F32>(&shape, format))?
                }
                PanelFormat::Nibbles => {
                    target.fill(&shape, rows, pool, interleave_integers::<Nibbles>(&shape, format))?;
                }
                PanelFormat::Bytes => {
                    target.fill(&shape, rows, pool, interleave_integers::<Bytes>(&shape, format))?
                }
                PanelFormat::Int8 => {
                    target.fill(&shape, rows, pool, interleave_integers::<Int8>(&shape, format))?
                }
            }
        }
        if shape.format != PanelFormat::Int8 {
            scales = Vec::new();
        }
        Ok(Self { weight_type: desc.weight_type.clone(), shape, storage: Storage::Own { panels, scales } })
    }

    /// A matrix whose packed bytes are in memory that is as long as its layout.
    ///
    /// # Errors
    /// As [`layout`].
    pub(crate) fn adopt(desc: &WeightDesc, memory: PackedMemory) -> Result<Self> {
        let shape = PanelShape::new(&desc.weight_type)?;
        Ok(Self { weight_type: desc.weight_type.clone(), shape, storage: Storage::Adopted(memory) })
    }

    /// Writes the packed bytes to `out`.
    ///
    /// # Errors
    /// If `out` is not as long as the layout.
    pub(crate) fn image(&self, out: &mut [u8]) -> Result<()> {
        if out.len() != self.shape.bytes {
            let message = format!("{} packed bytes do not fit {}", self.shape.bytes, out.len());
            return Err(Error::internal(message).at("weight"));
        }
        let (panels, scales) = out.split_at_mut(self.shape.panel_bytes);
        panels.copy_from_slice(self.panels());
        scales.copy_from_slice(bytemuck::cast_slice(self.scales()));
        Ok(())
    }

    /// The bytes of adopted memory.
    fn adopted(memory: &PackedMemory) -> &[u8] {
        // SAFETY: every method that reads elements runs in `Compute::run` or `Compute::image`, which hold the device's lock, and
        // keeps no reference beyond.
        unsafe { memory.bytes() }
    }

    fn panels(&self) -> &[u8] {
        let bytes = match &self.storage {
            Storage::Own { panels, .. } => &**panels,
            Storage::Adopted(memory) => Self::adopted(memory),
        };
        &bytes[..self.shape.panel_bytes]
    }

    /// The scale of each row; empty if blocks hold the scales.
    fn scales(&self) -> &[f32] {
        match &self.storage {
            Storage::Own { scales, .. } => scales,
            // Panels are a multiple of 16 bytes.
            Storage::Adopted(memory) => {
                bytemuck::cast_slice(&Self::adopted(memory)[self.shape.panel_bytes..])
            }
        }
    }

    /// `out[m, n] = sum_k x[m, k] * weight[n, k]` for dense `x` of `[rows, inputs]` and `out` of `[rows, outputs]`.
    ///
    /// Runs on the pool; cheapest when called from one of its threads.
    ///
    /// # Errors
    /// If `x` or `out` has another length.
    pub(crate) fn multiply(
        &self,
        x: &[f32],
        rows: usize,
        out: &mut [f32],
        pool: &rayon::ThreadPool,
    ) -> Result<()> {
        self.multiply_with(InstructionSet::best(), x, rows, out, pool)
    }

    fn multiply_with(
        &self,
        instructions: InstructionSet,
        x: &[f32],
        rows: usize,
        out: &mut [f32],
        pool: &rayon::ThreadPool,
    ) -> Result<()> {
        let PanelShape { outputs, inputs, .. } = self.shape;
        if rows.checked_mul(inputs) != Some(x.len()) || rows.checked_mul(outputs) != Some(out.len()) {
            let message = format!(
                "{rows} rows of {inputs} inputs and {outputs} outputs are not {} and {} elements",
                x.len(),
                out.len()
            );
            return Err(Error::invalid(message).in_op("linear"));
        }
        let rows = 0..outputs;
        if x.is_empty() || self.padded_inputs() == inputs {
            return self.multiply_ranges_with(instructions, vec![RowRange { rows, x, out }], pool);
        }
        // Only the last block of a row can be short. It is filled up with zeros, and so are the activations.
        let padded = self.padded_inputs();
        let mut wide = vec![0.0; x.len() / inputs * padded];
        for (wide, x) in wide.chunks_exact_mut(padded).zip(x.chunks_exact(inputs)) {
            wide[..inputs].copy_from_slice(x);
        }
        self.multiply_ranges_with(instructions, vec![RowRange { rows, x: &wide, out }], pool)
    }

    /// The inputs of whole blocks: the length of a row of activations of [`Self::multiply_ranges`].
    pub(crate) fn padded_inputs(&self) -> usize {
        self.shape.inputs.next_multiple_of(with_block!(self.shape.format, B => B::LENGTH))
    }

    /// The rows of all panels that hold some of these rows of the matrix.
    pub(crate) fn covered(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start / WIDTH * WIDTH..rows.end.next_multiple_of(WIDTH).min(self.shape.outputs)
    }

    /// Multiplies ranges of rows of the matrix, each with activations of its own. Ranges share the threads of the pool.
    ///
    /// # Errors
    /// If a range is outside, or its activations or results have another length.
    pub(crate) fn multiply_ranges(&self, ranges: Vec<RowRange<'_>>, pool: &rayon::ThreadPool) -> Result<()> {
        self.multiply_ranges_with(InstructionSet::best(), ranges, pool)
    }

    fn multiply_ranges_with(
        &self,
        instructions: InstructionSet,
        mut ranges: Vec<RowRange<'_>>,
        pool: &rayon::ThreadPool,
    ) -> Result<()> {
        let PanelShape { format, outputs, .. } = self.shape;
        let inputs = self.padded_inputs();
        for RowRange { rows, x, out } in &ranges {
            let covered = self.covered(rows).len();
            let fits = rows.start <= rows.end
                && rows.end <= outputs
                && x.len().is_multiple_of(inputs.max(1))
                && (inputs == 0 || x.len() / inputs * covered == out.len());
            if !fits {
                let message = format!(
                    "rows {rows:?} of {outputs} with {inputs} inputs do not fit {} activations and {} results",
                    x.len(),
                    out.len()
                );
                return Err(Error::invalid(message).in_op("linear"));
            }
        }
        ranges.retain_mut(|range| {
            let empty = range.x.is_empty() || range.out.is_empty();
            if empty {
                range.out.fill(0.0);
            }
            !empty
        });
        with_block!(format, B => {
            let (blocks, per_panel) = (self.blocks::<B>(), inputs / B::LENGTH);
            let jobs = ranges.iter_mut().map(|RowRange { rows, x, out }| {
                let covered = self.covered(rows);
                let (first, outputs) = (covered.start / WIDTH * per_panel, covered.len());
                let rows = x.len() / inputs;
                let product = Product { blocks: &blocks[first..], outputs, inputs, x, rows };
                Job { product, out: Output::new(out, outputs) }
            });
            product::run_all(&jobs.collect::<Vec<_>>(), instructions, pool);
        });
        for RowRange { rows, out, .. } in &mut ranges {
            self.scale_outputs(self.covered(rows), out);
        }
        Ok(())
    }

    /// Whether [`Self::multiply_integers`] takes activations with a scale for each `group` inputs.
    pub(crate) fn multiplies_integers(&self, group: usize) -> bool {
        let inputs = self.shape.inputs;
        with_integers!(self.shape.format, B => integers::accepts::<B>(group, inputs), else false)
    }

    /// `out[m, n] = sum_k scale[m, k / group] * x[m, k] * weight[n, k]` for `out` of `[rows, outputs]`: sums of products of integers
    /// are exact within a block of the weight, or within a group of the activations if the weight has one scale for each row.
    ///
    /// # Errors
    /// If the weight has another format ([`Self::multiplies_integers`]), or a row or `out` another length.
    pub(crate) fn multiply_integers(
        &self,
        rows: &[QuantisedRow<'_>],
        out: &mut [f32],
        pool: &rayon::ThreadPool,
    ) -> Result<()> {
        self.multiply_integers_with(InstructionSet::best(), rows, out, pool)
    }

    fn multiply_integers_with(
        &self,
        instructions: InstructionSet,
        rows: &[QuantisedRow<'_>],
        out: &mut [f32],
        pool: &rayon::ThreadPool,
    ) -> Result<()> {
        let PanelShape { format, outputs, inputs, .. } = self.shape;
        let groups = rows.first().map_or(1, |row| row.scales.len()).max(1);
        let fits = rows.len().checked_mul(outputs) == Some(out.len())
            && rows.iter().all(|row| row.integers.len() == inputs && row.scales.len() == groups)
            && (rows.is_empty() || inputs == 0 || self.multiplies_integers(inputs / groups));
        if !fits {
            let message = format!(
                "{} quantised rows with {groups} scales each do not fit a {:?} weight of {} and {} results",
                rows.len(),
                self.weight_type.shape,
                self.weight_type.format,
                out.len()
            );
            return Err(Error::invalid(message));
        }
        with_integers!(
            format,
            B => integers::multiply::<B>(instructions, self.blocks(), common_zero(self.weight_type.format), outputs, rows, out, pool),
            else out.fill(0.0)
        );
        self.scale_outputs(0..outputs, out);
        Ok(())
    }

    /// Multiplies outputs of these rows of the matrix with the scales that stand outside of the blocks, if any.
    fn scale_outputs(&self, rows: Range<usize>, out: &mut [f32]) {
        if !self.scales().is_empty() && !rows.is_empty() {
            let scales = &self.scales()[rows];
            for row in out.chunks_exact_mut(scales.len()) {
                row.iter_mut().zip(scales).for_each(|(sum, scale)| *sum *= scale);
            }
        }
    }

    /// Decodes one row of the matrix into the front of `out`, for embeddings. A row outside the matrix is zeros.
    pub(crate) fn row(&self, index: usize, out: &mut [f32]) {
        out.fill(0.0);
        let count = out.len().min(self.shape.inputs);
        let out = &mut out[..count];
        if index < self.shape.outputs && self.shape.inputs > 0 {
            with_block!(self.shape.format, B => {
                let per_panel = self.shape.inputs.div_ceil(B::LENGTH);
                let panel = &self.blocks::<B>()[index / WIDTH * per_panel..][..per_panel];
                for (block, out) in panel.iter().zip(out.chunks_mut(B::LENGTH)) {
                    for (element, out) in out.iter_mut().enumerate() {
                        *out = block.element(index % WIDTH, element);
                    }
                }
            });
            if let Some(scale) = self.scales().get(index) {
                out.iter_mut().for_each(|element| *element *= scale);
            }
        }
    }

    fn blocks<B: Block>(&self) -> &[B] {
        bytemuck::cast_slice(self.panels())
    }
}

impl PackedWeight for PackedMatrix {
    fn weight_type(&self) -> &WeightType {
        &self.weight_type
    }

    fn bytes(&self) -> usize {
        self.shape.bytes
    }
}

impl fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PackedMatrix").field("weight_type", &self.weight_type).finish_non_exhaustive()
    }
}

/// Memory of zeros for panels. It is in large pages where the system has them, so that reading weights needs fewer translations of
/// addresses; and its pages are first touched by the threads that fill them.
fn zeroed(bytes: usize) -> Result<MmapMut> {
    // No mapping is empty.
    let memory = MmapMut::map_anon(bytes.max(1)).map_err(|error| {
        Error::new(Code::OutOfMemory, format!("no {bytes} bytes of host memory for a weight: {error}"))
    })?;
    // A kernel without large pages refuses, and does without.
    #[cfg(target_os = "linux")]
    memory.advise(memmap2::Advice::HugePage).ok();
    Ok(memory)
}

/// The memory a matrix is packed into.
struct Target<'a> {
    panels: &'a mut [u8],
    /// One for each row.
    scales: &'a mut [f32],
}

impl Target<'_> {
    /// Reads about [`PIECE_BYTES`] of panels at a time and fills them in parallel: `fill` is given a panel, the rows it is made of,
    /// and their scales.
    fn fill<B: Block>(
        self,
        shape: &PanelShape,
        rows: &mut dyn WeightReader,
        pool: &rayon::ThreadPool,
        fill: impl Fn(&mut [B], std::slice::ChunksExact<'_, u8>, &mut [f32]) + Sync,
    ) -> Result<()> {
        let (panel_bytes, row_bytes) = (shape.row_bytes * WIDTH, shape.source_bytes);
        let panels_at_once = (PIECE_BYTES / panel_bytes).max(1);
        let rows_at_once = panels_at_once * WIDTH;
        let pieces =
            self.panels.chunks_mut(panel_bytes * panels_at_once).zip(self.scales.chunks_mut(rows_at_once));
        for (index, (piece, scales)) in pieces.enumerate() {
            let (first, count) = (index * rows_at_once, scales.len());
            let source = rows.rows(first, count)?;
            if source.len() != count * row_bytes {
                let message =
                    format!("rows {first}..+{count} are {} bytes of {}", source.len(), count * row_bytes);
                return Err(Error::invalid(message).at("weight"));
            }
            pool.install(|| {
                let panels = piece.par_chunks_mut(panel_bytes);
                let panels =
                    panels.zip(source.par_chunks(row_bytes * WIDTH)).zip(scales.par_chunks_mut(WIDTH));
                panels.for_each(|((panel, rows), scales)| {
                    fill(bytemuck::cast_slice_mut(panel), rows.chunks_exact(row_bytes), scales);
                });
            });
        }
        Ok(())
    }
}

/// Interleaves up to sixteen rows; missing rows stay zero.
fn interleave<B: FromBytes>(panel: &mut [B], rows: std::slice::ChunksExact<'_, u8>, _: &mut [f32]) {
    for (lane, row) in rows.enumerate() {
        for (block, bytes) in panel.iter_mut().zip(row.chunks_exact(B::BYTES)) {
            block.set_row(lane, bytes);
        }
    }
}

/// Interleaves up to sixteen rows of a weight format without a block type, and gives the scale of the first group of each.
fn interleave_integers<B: FromIntegers>(
    shape: &PanelShape,
    format: WeightFormat,
) -> impl Fn(&mut [B], std::slice::ChunksExact<'_, u8>, &mut [f32]) + Sync {
    let (inputs, group) = (shape.inputs, format.group(shape.inputs));
    move |panel, rows, scales| {
        // Integers past the end of a row meet activations of zero.
        let mut integers = vec![0; inputs.next_multiple_of(B::LENGTH)];
        let mut affines = vec![Affine::default(); inputs.div_ceil(group)];
        for (lane, (row, scale)) in rows.zip(scales).enumerate() {
            let unpacked = format.unpack_row(row, &mut integers[..inputs], &mut affines);
            debug_assert!(unpacked.is_ok(), "rows are as long as their format says: {unpacked:?}");
            *scale = affines.first().map_or(0.0, |affine| affine.scale);
            for (index, block) in panel.iter_mut().enumerate() {
                let first = index * B::LENGTH;
                block.set_integers(lane, &integers[first..first + B::LENGTH], affines[first / group]);
            }
        }
    }
}
