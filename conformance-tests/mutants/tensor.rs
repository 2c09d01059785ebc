//! The elements of bound tensors, read and written through a stream.

use dsrun_core::{
    DType, Result, TensorDesc,
    device::{BufferSlice, Stream},
    kernels::Binding,
};
use half::{bf16, f16};
use std::time::Duration;

/// Reads bytes.
pub(crate) fn bytes(stream: &mut dyn Stream, slice: &BufferSlice) -> Result<Vec<u8>> {
    let mut bytes = vec![0; slice.bytes];
    stream.download(slice, &mut bytes, "a mutant reads", Duration::from_secs(30))?;
    Ok(bytes)
}

/// Where element `index` of a tensor starts, in bytes.
fn place(desc: &TensorDesc, index: usize) -> usize {
    let mut rest = index;
    let elements = desc.shape.iter().zip(&desc.strides).rev().fold(0, |offset, (size, stride)| {
        let here = rest % size;
        rest /= size;
        offset + here * stride
    });
    elements * desc.dtype.bytes()
}

/// A tensor of a call, copied to the host and back.
#[derive(Clone, Debug)]
pub(crate) struct Copied {
    pub(crate) desc: TensorDesc,
    slice: BufferSlice,
    bytes: Vec<u8>,
}

impl Copied {
    pub(crate) fn read(stream: &mut dyn Stream, desc: &TensorDesc, binding: &Binding) -> Result<Self> {
        let slice = binding.slice.slice(0, desc.bytes()?)?;
        Ok(Self { desc: desc.clone(), bytes: bytes(stream, &slice)?, slice })
    }

    pub(crate) fn write(&self, stream: &mut dyn Stream) -> Result<()> {
        stream.upload(&self.bytes, &self.slice)
    }

    /// How many elements there are.
    pub(crate) fn count(&self) -> usize {
        self.desc.shape.iter().product()
    }

    /// Elements of a row of the first dimension.
    pub(crate) fn width(&self) -> usize {
        self.desc.shape.iter().skip(1).product()
    }

    pub(crate) fn bits(&self, index: usize) -> u32 {
        let at = place(&self.desc, index);
        self.bytes[at..][..self.desc.dtype.bytes()]
            .iter()
            .rev()
            .fold(0, |bits, byte| bits << 8 | u32::from(*byte))
    }

    pub(crate) fn set_bits(&mut self, index: usize, bits: u32) {
        let (at, size) = (place(&self.desc, index), self.desc.dtype.bytes());
        self.bytes[at..][..size].copy_from_slice(&bits.to_le_bytes()[..size]);
    }

    pub(crate) fn integer(&self, index: usize) -> i32 {
        self.bits(index) as i32
    }

    pub(crate) fn float(&self, index: usize) -> f32 {
        match self.desc.dtype {
            DType::F16 => f16::from_bits(self.bits(index) as u16).to_f32(),
            DType::BF16 => bf16::from_bits(self.bits(index) as u16).to_f32(),
            _ => f32::from_bits(self.bits(index)),
        }
    }

    pub(crate) fn set_float(&mut self, index: usize, value: f32) {
        let bits = match self.desc.dtype {
            DType::F16 => u32::from(f16::from_f32(value).to_bits()),
            DType::BF16 => u32::from(bf16::from_f32(value).to_bits()),
            _ => value.to_bits(),
        };
        self.set_bits(index, bits);
    }

    /// Changes every integer.
    pub(crate) fn map(&mut self, change: impl Fn(usize, i32) -> i32) {
        (0..self.count()).for_each(|index| self.set_bits(index, change(index, self.integer(index)) as u32));
    }
}
