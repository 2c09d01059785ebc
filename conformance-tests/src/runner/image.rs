//! The bytes of a tensor in a buffer, with what stands around and between its elements.

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

/// In front of and behind every tensor.
const CANARY: u8 = 0xA5;
/// Bytes behind every tensor.
const GUARD: usize = 64;

/// The poison of an element that must not be read or is not written yet: NaN for floats; for integers a number that is no
/// index of anything, so that using it shows.
pub(crate) fn poison(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0x7FDE_AD00,
        DType::F16 => 0x7F5D,
        DType::BF16 => 0x7FDE,
        DType::I8 | DType::U8 => 0x5B,
        _ => 0x5B5B_5B5B,
    }
}

/// A tensor in device memory, and the bytes it started from.
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

    /// Brings the bytes it starts from to the device.
    pub(crate) fn upload(&self, stream: &mut dyn Stream) -> Result<()> {
        stream.upload(&self.initial, &BufferSlice::whole(self.buffer.clone()))
    }

    /// What a call is bound to.
    pub(crate) fn binding(&self) -> Result<Binding> {
        let slice = BufferSlice::new(self.buffer.clone(), self.start, self.desc.bytes()?)?;
        Ok(Binding { slice, extent: self.extent.clone().map(BufferSlice::whole) })
    }

    /// Reads all bytes back, those around the tensor included.
    pub(crate) fn download(&self, stream: &mut dyn Stream) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.initial.len()];
        let slice = BufferSlice::whole(self.buffer.clone());
        stream.download(&slice, &mut bytes, "the conformance suite reads a tensor", super::TIMEOUT)?;
        Ok(bytes)
    }

    /// The bytes it started from.
    pub(crate) fn initial(&self) -> &[u8] {
        &self.initial
    }

    /// The bits of the elements in bytes as [`Self::download`] gives them.
    pub(crate) fn elements(&self, bytes: &[u8]) -> Vec<u32> {
        let (element, count) = (self.desc.dtype.bytes(), self.desc.shape.iter().product());
        (0..count)
            .map(|index| read_bits(bytes, self.start + offset(&self.desc, index) * element, element))
            .collect()
    }

    /// Says where bytes outside the elements have changed, if any have.
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

/// Where element `index` is, in elements.
fn offset(desc: &TensorDesc, index: usize) -> usize {
    let mut rest = index;
    desc.shape.iter().zip(&desc.strides).rev().fold(0, |offset, (size, stride)| {
        let here = rest % size;
        rest /= size;
        offset + here * stride
    })
}

/// Scratch memory between canaries.
#[derive(Debug)]
pub(crate) struct Scratch {
    start: usize,
    bytes: usize,
    buffer: Arc<dyn Buffer>,
}

impl Scratch {
    /// Exactly so many bytes.
    pub(crate) fn new(device: &dyn Device, bytes: usize) -> Result<Self> {
        let alignment = device.properties().alignment.max(1);
        let start = GUARD.div_ceil(alignment) * alignment;
        Ok(Self { start, bytes, buffer: device.allocate(start + bytes + GUARD, MemoryKind::Device)? })
    }

    /// Fills it with `byte`, and what is around it with canaries.
    pub(crate) fn fill(&self, stream: &mut dyn Stream, byte: u8) -> Result<()> {
        let mut image = vec![CANARY; self.start + self.bytes + GUARD];
        image[self.start..self.start + self.bytes].fill(byte);
        stream.upload(&image, &BufferSlice::whole(self.buffer.clone()))
    }

    /// The memory.
    pub(crate) fn slice(&self) -> Result<BufferSlice> {
        BufferSlice::new(self.buffer.clone(), self.start, self.bytes)
    }

    /// Whether the canaries are still there.
    pub(crate) fn intact(&self, stream: &mut dyn Stream) -> Result<bool> {
        let mut image = vec![0; self.start + self.bytes + GUARD];
        let slice = BufferSlice::whole(self.buffer.clone());
        stream.download(&slice, &mut image, "the conformance suite reads the workspace", super::TIMEOUT)?;
        let around = image[..self.start].iter().chain(&image[self.start + self.bytes..]);
        Ok(around.into_iter().all(|byte| *byte == CANARY))
    }
}
