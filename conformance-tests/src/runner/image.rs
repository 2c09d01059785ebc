//! Tensors in device memory, with canaries around them and poison between their rows.

use crate::{
    case::Layout,
    tensor::{Tensor, read_bits, write_bits},
};
use dsrun_core::{
    DType, Result, TensorDesc,
    device::{Buffer, BufferSlice, Device, MemoryKind, Stream},
    kernels::Binding,
};
use std::sync::Arc;

/// The byte in front of and behind every tensor.
const CANARY: u8 = 0xA5;
/// The number of bytes behind every tensor.
const GUARD: usize = 64;

/// The poison of an element that must not be read or has not been written: NaN for floats; for integers a number that is out
/// of range as an index, so that its use shows.
pub(crate) fn poison(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0x7FDE_AD00,
        DType::F16 => 0x7F5D,
        DType::BF16 => 0x7FDE,
        DType::I8 | DType::U8 => 0x5B,
        _ => 0x5B5B_5B5B,
    }
}

/// A tensor in device memory, and its initial bytes.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) desc: TensorDesc,
    start: usize,
    initial: Vec<u8>,
    buffer: Arc<dyn Buffer>,
    extent: Option<Arc<dyn Buffer>>,
}

impl Image {
    /// Lays a tensor out in new device memory. Elements of rows past the extent are poisoned.
    pub(crate) fn new(
        device: &dyn Device,
        stream: &mut dyn Stream,
        tensor: &Tensor,
        layout: Layout,
    ) -> Result<Self> {
        let desc = describe(tensor.dtype, &tensor.shape, layout);
        let alignment = device.properties().alignment.max(1);
        let unit = GUARD.div_ceil(alignment) * alignment;
        let (start, size) = (unit * (1 + layout.offset), desc.bytes()?);
        let element = tensor.dtype.bytes();
        let mut initial = vec![CANARY; start + size + GUARD];
        for at in (start..start + size).step_by(element) {
            write_bits(&mut initial, at, element, poison(tensor.dtype));
        }
        let columns: usize = tensor.shape.iter().skip(1).product();
        let rows = layout.real_rows(tensor.shape.first().copied().unwrap_or(1));
        for (index, bits) in tensor.bits.iter().enumerate().take(rows * columns) {
            write_bits(&mut initial, start + offset(&desc, index) * element, element, *bits);
        }
        let extent = match layout.extent {
            Some(extent) => {
                let buffer = device.allocate(4, MemoryKind::Device)?;
                stream.upload(&(extent as i32).to_le_bytes(), &BufferSlice::whole(buffer.clone()))?;
                Some(buffer)
            }
            None => None,
        };
        let buffer = device.allocate(initial.len(), MemoryKind::Device)?;
        Ok(Self { desc, start, initial, buffer, extent })
    }

    /// Uploads the initial bytes.
    pub(crate) fn upload(&self, stream: &mut dyn Stream) -> Result<()> {
        stream.upload(&self.initial, &BufferSlice::whole(self.buffer.clone()))
    }

    /// The binding for a call.
    pub(crate) fn binding(&self) -> Result<Binding> {
        let slice = BufferSlice::new(self.buffer.clone(), self.start, self.desc.bytes()?)?;
        Ok(Binding { slice, extent: self.extent.clone().map(BufferSlice::whole) })
    }

    /// Reads all bytes back, including those around the tensor.
    pub(crate) fn download(&self, stream: &mut dyn Stream) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.initial.len()];
        let slice = BufferSlice::whole(self.buffer.clone());
        stream.download(&slice, &mut bytes, "the conformance suite reads a tensor", super::TIMEOUT)?;
        Ok(bytes)
    }

    /// The initial bytes.
    pub(crate) fn initial(&self) -> &[u8] {
        &self.initial
    }

    /// The bits of the elements, from bytes that [`Self::download`] returned.
    pub(crate) fn elements(&self, bytes: &[u8]) -> Vec<u32> {
        let (element, count) = (self.desc.dtype.bytes(), self.desc.shape.iter().product());
        (0..count)
            .map(|index| read_bits(bytes, self.start + offset(&self.desc, index) * element, element))
            .collect()
    }

    /// Describes the first change of a byte outside the elements.
    pub(crate) fn outside(&self, bytes: &[u8]) -> Option<String> {
        let mut expected = self.initial.clone();
        let element = self.desc.dtype.bytes();
        for (index, bits) in self.elements(bytes).into_iter().enumerate() {
            write_bits(&mut expected, self.start + offset(&self.desc, index) * element, element, bits);
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
