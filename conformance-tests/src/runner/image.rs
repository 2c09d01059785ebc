//! Tensors in device memory, with canaries around them and poison between their rows.

use crate::{case::Layout, tensor::Tensor};
use dsrun_core::{
    DType, Result, TensorDesc,
    device::{Buffer, BufferSlice, Device, MemoryKind, Stream},
    kernels::Binding,
};
use std::{ops::Range, sync::Arc};

/// The byte in front of and behind every tensor.
const CANARY: u8 = 0xA5;
/// The number of bytes behind every tensor.
const GUARD: usize = 64;

/// What a tensor holds before a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// The elements of the case. Memory that must not be read holds NaN, or an index out of range.
    Poisoned,
    /// The elements of the case. Memory that must not be read holds plausible values and valid indices, so that a device that
    /// treats NaN as zero or checks its indices does not hide that it has read them. Extents of all rows exceed the bound, and
    /// extents of no rows are negative.
    Plausible,
    /// Constant elements and another extent, which a later run must not remember.
    Decoy,
}

/// What a tensor is for. Poison of operands and results differs, because a device that copies the poison of an operand to a
/// result must not seem to have written nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Operand,
    Result,
}

/// The poison of an element that must not be read or has not been written: NaN for floats; for integers a number that is out
/// of range as an index, so that its use shows.
pub(crate) fn poison(dtype: DType, role: Role) -> u32 {
    let bits = match dtype {
        DType::F32 => [0x7FDE_AD00, 0xFFC0_BE50],
        DType::F16 => [0x7F5D, 0xFE35],
        DType::BF16 => [0x7FDE, 0xFFC5],
        DType::I8 | DType::U8 => [0x5B, 0x6C],
        _ => [0x5B5B_5B5B, 0x6C6C_6C6C],
    };
    bits[usize::from(role == Role::Result)]
}

/// What stands in place of poison in a run with plausible content: numbers near 1, and small integers.
fn plausible(dtype: DType, role: Role) -> u32 {
    let bits = match dtype {
        DType::F32 => [0x3F61_0000, 0x3F9D_0F00],
        DType::F16 => [0x3B08, 0x3CEA],
        DType::BF16 => [0x3F61, 0x3F9D],
        _ => [0, 1],
    };
    bits[usize::from(role == Role::Result)]
}

/// The element of a decoy: one half, and zero for integers, which is in the range of every index.
fn decoy(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0x3F00_0000,
        DType::F16 => 0x3800,
        DType::BF16 => 0x3F00,
        _ => 0,
    }
}

/// A tensor in device memory, and what it holds before a run.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) desc: TensorDesc,
    start: usize,
    length: usize,
    tensor: Tensor,
    role: Role,
    extent: Option<usize>,
    buffer: Arc<dyn Buffer>,
    extent_buffer: Option<Arc<dyn Buffer>>,
}

impl Image {
    /// Makes room for a tensor in new device memory.
    pub(crate) fn new(device: &dyn Device, tensor: &Tensor, layout: Layout, role: Role) -> Result<Self> {
        let desc = describe(tensor.dtype, &tensor.shape, layout);
        let alignment = device.properties().alignment.max(1);
        let unit = GUARD.div_ceil(alignment) * alignment;
        let (start, size) = (unit * (1 + layout.offset), desc.bytes()?);
        let length = start + size + GUARD;
        let extent_buffer = layout.extent.map(|_| device.allocate(4, MemoryKind::Device)).transpose()?;
        let buffer = device.allocate(length, MemoryKind::Device)?;
        let tensor = tensor.clone();
        Ok(Self { desc, start, length, tensor, role, extent: layout.extent, buffer, extent_buffer })
    }

    /// An image of a result, all of whose elements are poisoned.
    pub(crate) fn of_result(
        device: &dyn Device,
        dtype: DType,
        shape: &[usize],
        layout: Layout,
    ) -> Result<Self> {
        let tensor = Tensor { dtype, shape: shape.to_vec(), bits: Vec::new() };
        Self::new(device, &tensor, layout, Role::Result)
    }

    /// The bytes of the buffer for a content.
    pub(crate) fn bytes(&self, content: Content) -> Vec<u8> {
        let (dtype, element) = (self.desc.dtype, self.desc.dtype.bytes());
        let background = match content {
            Content::Poisoned | Content::Decoy => poison(dtype, self.role),
            Content::Plausible => plausible(dtype, self.role),
        };
        let mut bytes = vec![CANARY; self.length];
        let background = &background.to_le_bytes()[..element];
        for place in bytes[self.start..self.length - GUARD].chunks_exact_mut(element) {
            place.copy_from_slice(background);
        }
        let columns: usize = self.desc.shape.iter().skip(1).product();
        let rows = self.desc.shape.first().copied().unwrap_or(1);
        let written = match content {
            // Rows past the extent hold what the case drew for them.
            Content::Plausible | Content::Decoy => rows,
            Content::Poisoned => self.extent.map_or(rows, |extent| extent.min(rows)),
        };
        for (at, indices) in self.rows() {
            let row = self.tensor.bits.get(indices.start..indices.end.min(written * columns)).unwrap_or(&[]);
            for (place, bits) in bytes[at..].chunks_exact_mut(element).zip(row) {
                let bits = if content == Content::Decoy { decoy(dtype) } else { *bits };
                place.copy_from_slice(&bits.to_le_bytes()[..element]);
            }
        }
        bytes
    }

    /// The runs of elements without gaps: the byte at which each starts, and the indices of its elements.
    fn rows(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let width = self.desc.shape.last().copied().unwrap_or(1);
        let count: usize = self.desc.shape.iter().product();
        (0..count).step_by(width.max(1)).map(move |first| {
            (self.start + offset(&self.desc, first) * self.desc.dtype.bytes(), first..first + width)
        })
    }

    /// The extent for a content, if the tensor has one.
    fn extent(&self, content: Content) -> Option<i32> {
        let rows = self.desc.shape.first().copied().unwrap_or(1);
        let beyond = |extent: usize| match extent {
            0 => -3,
            extent if extent >= rows => extent as i32 + 5,
            extent => extent as i32,
        };
        self.extent.map(|extent| match content {
            Content::Poisoned => extent as i32,
            Content::Plausible => beyond(extent),
            Content::Decoy if extent < rows => rows as i32,
            Content::Decoy => 0,
        })
    }

    /// Uploads a content, and returns the bytes of the buffer.
    pub(crate) fn upload(&self, stream: &mut dyn Stream, content: Content) -> Result<Vec<u8>> {
        let bytes = self.bytes(content);
        stream.upload(&bytes, &BufferSlice::whole(self.buffer.clone()))?;
        if let Some((extent, buffer)) = self.extent(content).zip(self.extent_buffer.clone()) {
            stream.upload(&extent.to_le_bytes(), &BufferSlice::whole(buffer))?;
        }
        Ok(bytes)
    }

    /// The binding for a call.
    pub(crate) fn binding(&self) -> Result<Binding> {
        let slice = BufferSlice::new(self.buffer.clone(), self.start, self.desc.bytes()?)?;
        Ok(Binding { slice, extent: self.extent_buffer.clone().map(BufferSlice::whole) })
    }

    /// Reads all bytes back, including those around the tensor.
    pub(crate) fn download(&self, stream: &mut dyn Stream) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.length];
        let slice = BufferSlice::whole(self.buffer.clone());
        stream.download(&slice, &mut bytes, "the conformance suite reads a tensor", super::TIMEOUT)?;
        Ok(bytes)
    }

    /// The bits of the elements, from bytes that [`Self::download`] returned.
    pub(crate) fn elements(&self, bytes: &[u8]) -> Vec<u32> {
        let element = self.desc.dtype.bytes();
        let of_row = |(at, indices): (usize, Range<usize>)| {
            let row = bytes[at..at + indices.len() * element].chunks_exact(element);
            row.map(|place| place.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte)))
        };
        self.rows().flat_map(of_row).collect()
    }

    /// Describes the first byte outside the elements that differs from `before`.
    pub(crate) fn outside(&self, bytes: &[u8], before: &[u8]) -> Option<String> {
        let mut expected = before.to_vec();
        for (at, indices) in self.rows() {
            let row = at..at + indices.len() * self.desc.dtype.bytes();
            expected[row.clone()].copy_from_slice(&bytes[row]);
        }
        if bytes == expected {
            return None;
        }
        let at = bytes.iter().zip(&expected).position(|(found, expected)| found != expected)?;
        let size = expected.len() - GUARD - self.start;
        Some(if at < self.start {
            format!("{} bytes in front of it were overwritten", self.start - at)
        } else if at >= self.start + size {
            format!("memory {} bytes behind its end was overwritten", at - self.start - size)
        } else {
            format!("the gap between rows at byte {} was overwritten", at - self.start)
        })
    }
}

/// The description of a tensor with a layout.
pub(crate) fn describe(dtype: DType, shape: &[usize], layout: Layout) -> TensorDesc {
    let mut desc = TensorDesc::dense(dtype, shape);
    for dimension in (1..shape.len()).rev() {
        desc.strides[dimension - 1] = desc.strides[dimension] * shape[dimension].max(1) + layout.gap;
    }
    desc.bounded = layout.bounded;
    desc
}

/// The offset of element `index`, in elements.
fn offset(desc: &TensorDesc, index: usize) -> usize {
    let mut rest = index;
    desc.shape.iter().zip(&desc.strides).rev().fold(0, |offset, (size, stride)| {
        let here = rest % size;
        rest /= size;
        offset + here * stride
    })
}

/// Workspace between canaries.
#[derive(Debug)]
pub(crate) struct Scratch {
    start: usize,
    bytes: usize,
    buffer: Arc<dyn Buffer>,
}

impl Scratch {
    /// Allocates a workspace of exactly `bytes` bytes.
    pub(crate) fn new(device: &dyn Device, bytes: usize) -> Result<Self> {
        let alignment = device.properties().alignment.max(1);
        let start = GUARD.div_ceil(alignment) * alignment;
        Ok(Self { start, bytes, buffer: device.allocate(start + bytes + GUARD, MemoryKind::Device)? })
    }

    /// Fills the workspace with `byte`, and the memory around it with canaries.
    pub(crate) fn fill(&self, stream: &mut dyn Stream, byte: u8) -> Result<()> {
        let mut image = vec![CANARY; self.start + self.bytes + GUARD];
        image[self.start..self.start + self.bytes].fill(byte);
        stream.upload(&image, &BufferSlice::whole(self.buffer.clone()))
    }

    /// The workspace without the canaries.
    pub(crate) fn slice(&self) -> Result<BufferSlice> {
        BufferSlice::new(self.buffer.clone(), self.start, self.bytes)
    }

    /// Whether the canaries are unchanged.
    pub(crate) fn intact(&self, stream: &mut dyn Stream) -> Result<bool> {
        let mut image = vec![0; self.start + self.bytes + GUARD];
        let slice = BufferSlice::whole(self.buffer.clone());
        stream.download(&slice, &mut image, "the conformance suite reads the workspace", super::TIMEOUT)?;
        let around = image[..self.start].iter().chain(&image[self.start + self.bytes..]);
        Ok(around.into_iter().all(|byte| *byte == CANARY))
    }
}
