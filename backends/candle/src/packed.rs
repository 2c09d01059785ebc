//! Packed weight matrices, and their product with activations.
//!
//! Weights stay in their own format, interleaved ([`panel`]) but no larger, and are decoded to f32 in registers as they are
//! used ([`tile`]); activations are f32 and exact. Kernels are written once over a handful of vector operations
//! ([`lanes`]), for AVX2, AVX-512 and plain Rust, chosen when the program runs.
//!
//! All sizes of batch run on these kernels. A general matrix product over decoded tiles (`Tensor::matmul`) was measured
//! against them: even without the decoding it is level from 256 rows on, two thirds as fast at 24 and half at 12, and its
//! sums depend on the batch. For one row the product is as fast as memory, or as decoding where that takes longer: on two
//! cores of a Zen 4 server with AVX-512, 34 GB/s of f32 weights, 42 of bf16, 36 of q8_0, 26 of q4_1.
//!
//! A row's result does not depend on the other rows of the batch, nor on the number of threads, to the bit. It may differ
//! in the last bits between processors with and without fused multiply-add.

mod lanes;
mod panel;
mod product;
#[cfg(test)]
mod tests;
mod tile;

use dsrun_core::{
    BlockFormat, Code, DType, Error, Result, WeightFormat, WeightReader, WeightType,
    kernels::{PackedLayout, PackedWeight, WeightDesc},
};
use lanes::WIDTH;
use panel::{BF16, Block, F16, F32, Q4_0, Q4_1, Q8_0};
use product::{InstructionSet, Product};
use rayon::prelude::*;
use std::fmt;

/// Bytes that are read from a weight at a time, unless a panel has more.
const PIECE_BYTES: usize = 4 << 20;

/// A weight matrix `[outputs, inputs]` in panels.
pub(crate) struct PackedMatrix {
    weight_type: WeightType,
    shape: PanelShape,
    /// The panels, back to back.
    lines: Vec<Line>,
}

/// The unit of storage: a cache line, so that vectors are never split between two.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// The format of the panels of a matrix, and how large they are.
#[derive(Clone, Copy, Debug)]
struct PanelShape {
    format: PanelFormat,
    outputs: usize,
    inputs: usize,
    /// Bytes of a row before packing.
    row_bytes: usize,
    /// Bytes of all panels.
    bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PanelFormat {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q8_0,
}

/// Evaluates an expression with `$block` standing for the block type of a format.
macro_rules! with_block {
    ($format:expr, $block:ident => $body:expr) => {
        match $format {
            PanelFormat::F32 => {
                type $block = F32;
                $body
            }
            PanelFormat::F16 => {
                type $block = F16;
                $body
            }
            PanelFormat::BF16 => {
                type $block = BF16;
                $body
            }
            PanelFormat::Q4_0 => {
                type $block = Q4_0;
                $body
            }
            PanelFormat::Q4_1 => {
                type $block = Q4_1;
                $body
            }
            PanelFormat::Q8_0 => {
                type $block = Q8_0;
                $body
            }
        }
    };
}

impl PanelFormat {
    fn new(format: WeightFormat) -> Result<Self> {
        match format {
            WeightFormat::Dense(DType::F32) => Ok(Self::F32),
            WeightFormat::Dense(DType::F16) => Ok(Self::F16),
            WeightFormat::Dense(DType::BF16) => Ok(Self::BF16),
            WeightFormat::Block(BlockFormat::Q4_0) => Ok(Self::Q4_0),
            WeightFormat::Block(BlockFormat::Q4_1) => Ok(Self::Q4_1),
            WeightFormat::Block(BlockFormat::Q8_0) => Ok(Self::Q8_0),
            other => {
                let message = format!(
                    "weights stored as {other} cannot be packed; f32, f16, bf16, q4_0, q4_1, q8_0 can"
                );
                Err(Error::unsupported(message).at("weight").field("format"))
            }
        }
    }
}

impl PanelShape {
    fn new(weight: &WeightType) -> Result<Self> {
        let format = PanelFormat::new(weight.format)?;
        let (outputs, inputs) = (weight.rows(), weight.columns());
        weight.elements()?;
        let row_bytes = weight.row_bytes()?;
        let padded = outputs.checked_next_multiple_of(WIDTH).and_then(|rows| rows.checked_mul(row_bytes));
        let bytes = padded.filter(|bytes| *bytes <= isize::MAX as usize - size_of::<Line>());
        let bytes = bytes.ok_or_else(|| {
            let message =
                format!("{:?} {} elements do not fit an address space", weight.shape, weight.format);
            Error::invalid(message).at("weight").field("shape")
        })?;
        Ok(Self { format, outputs, inputs, row_bytes, bytes })
    }

    /// Bytes of a panel.
    fn panel_bytes(&self) -> usize {
        self.row_bytes * WIDTH
    }
}

/// How a weight would be kept.
///
/// # Errors
/// [`Code::Unsupported`] if its format cannot be packed; if its size overflows.
pub(crate) fn layout(desc: &WeightDesc) -> Result<PackedLayout> {
    let shape = PanelShape::new(&desc.weight_type)?;
    Ok(PackedLayout { bytes: shape.bytes, name: format!("panel16-{}-1", desc.weight_type.format) })
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
        let mut lines = zeroed_lines(shape.bytes)?;
        if shape.bytes > 0 {
            let bytes = &mut bytemuck::cast_slice_mut(&mut lines)[..shape.bytes];
            with_block!(shape.format, B => pack_panels::<B>(&shape, rows, bytes, pool))?;
        }
        Ok(Self { weight_type: desc.weight_type.clone(), shape, lines })
    }

    /// `out[m, n] = sum_k x[m, k] * weight[n, k]` for dense `x` of `[rows, inputs]` and `out` of `[rows, outputs]`.
    ///
    /// Runs on the pool; cheapest when called from one of its threads.
    ///
    /// # Errors
    /// If `x` or `out` is not as long as that.
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
        let PanelShape { format, outputs, inputs, .. } = self.shape;
        if rows.checked_mul(inputs) != Some(x.len()) || rows.checked_mul(outputs) != Some(out.len()) {
            let message = format!(
                "{rows} rows of {inputs} inputs and {outputs} outputs are not {} and {} elements",
                x.len(),
                out.len()
            );
            return Err(Error::invalid(message).in_op("linear"));
        }
        if x.is_empty() || out.is_empty() {
            out.fill(0.0);
            return Ok(());
        }
        with_block!(format, B => {
            Product { blocks: self.blocks::<B>(), outputs, inputs, x, rows }.run(instructions, out, pool);
        });
        Ok(())
    }

    /// Decodes one row of the matrix into the front of `out`, for embeddings. A row that is not there is zeros.
    pub(crate) fn row(&self, index: usize, out: &mut [f32]) {
        out.fill(0.0);
        if index < self.shape.outputs && self.shape.inputs > 0 {
            with_block!(self.shape.format, B => {
                let per_panel = self.shape.inputs / B::LENGTH;
                let panel = &self.blocks::<B>()[index / WIDTH * per_panel..][..per_panel];
                for (block, out) in panel.iter().zip(out.chunks_mut(B::LENGTH)) {
                    for (element, out) in out.iter_mut().enumerate() {
                        *out = block.element(index % WIDTH, element);
                    }
                }
            });
        }
    }

    fn blocks<B: Block>(&self) -> &[B] {
        bytemuck::cast_slice(&bytemuck::cast_slice::<Line, u8>(&self.lines)[..self.shape.bytes])
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

fn zeroed_lines(bytes: usize) -> Result<Vec<Line>> {
    let count = bytes.div_ceil(size_of::<Line>());
    let mut lines = Vec::new();
    lines.try_reserve_exact(count).map_err(|_| {
        Error::new(Code::OutOfMemory, format!("no {bytes} bytes of host memory for a weight"))
    })?;
    lines.resize(count, Line([0; 64]));
    Ok(lines)
}

/// Reads as many panels at a time as make a piece, and interleaves them in parallel.
fn pack_panels<B: Block>(
    shape: &PanelShape,
    rows: &mut dyn WeightReader,
    bytes: &mut [u8],
    pool: &rayon::ThreadPool,
) -> Result<()> {
    let panel_bytes = shape.panel_bytes();
    let panels_at_once = (PIECE_BYTES / panel_bytes).max(1);
    for (index, piece) in bytes.chunks_mut(panel_bytes * panels_at_once).enumerate() {
        let first = index * panels_at_once * WIDTH;
        let count = (shape.outputs - first).min(panels_at_once * WIDTH);
        let source = rows.rows(first, count)?;
        if source.len() != count * shape.row_bytes {
            let message =
                format!("rows {first}..+{count} are {} bytes of {}", source.len(), count * shape.row_bytes);
            return Err(Error::invalid(message).at("weight"));
        }
        pool.install(|| {
            let panels = piece.par_chunks_mut(panel_bytes).zip(source.par_chunks(panel_bytes));
            panels.for_each(|(panel, rows)| {
                pack_panel::<B>(bytemuck::cast_slice_mut(panel), rows, shape.row_bytes)
            });
        });
    }
    Ok(())
}

/// Interleaves up to sixteen rows; what is missing stays zero.
fn pack_panel<B: Block>(panel: &mut [B], rows: &[u8], row_bytes: usize) {
    let block_bytes = size_of::<B>() / WIDTH;
    for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
        for (block, bytes) in panel.iter_mut().zip(row.chunks_exact(block_bytes)) {
            block.set_row(lane, bytes);
        }
    }
}
