//! Copies and fills that wgpu has no commands for: of ranges that are not whole words, and within one buffer.

use super::{
    context::Context,
    shader::{Element, ParamType, Shader, Tensor},
    stream::{Dispatch, WgpuStream},
};
use dsrun_core::Result;
use wgpu::{
    BindGroupDescriptor, BindGroupEntry, BindingResource, Buffer, BufferBinding, BufferDescriptor,
    BufferSize, BufferUsages,
};

const SOURCE: &str = include_str!("../../kernels/bytes.wgsl");

/// Threads of a workgroup.
const THREADS: usize = 64;

/// A new device buffer with these bytes, padded to whole words.
pub(super) fn words_of(context: &Context, bytes: &[u8]) -> Result<(Buffer, Vec<u8>)> {
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(256), 0);
    let descriptor = BufferDescriptor {
        label: Some("upload"),
        size: padded.len() as u64,
        usage: BufferUsages::STORAGE | BufferUsages::COPY_DST,
        mapped_at_creation: false,
    };
    let what = format!("allocating {} bytes to upload", padded.len());
    let buffer = context.scoped(&what, || context.device.create_buffer(&descriptor))?;
    Ok((buffer, padded))
}

/// Copies a range of bytes. The ranges do not overlap.
pub(super) fn copy_bytes(
    context: &Context,
    stream: &mut WgpuStream,
    (from, start): (&Buffer, usize),
    (to, at): (&Buffer, usize),
    bytes: usize,
) -> Result<()> {
    for (first, count) in pieces(context, bytes) {
        move_bytes(context, stream, Some((from, start + first)), (to, at + first), count, 0)?;
    }
    Ok(())
}

/// Sets every byte of a range.
pub(super) fn fill_bytes(
    context: &Context,
    stream: &mut WgpuStream,
    (to, at): (&Buffer, usize),
    bytes: usize,
    byte: u8,
) -> Result<()> {
    for (first, count) in pieces(context, bytes) {
        move_bytes(context, stream, None, (to, at + first), count, byte)?;
    }
    Ok(())
}

/// Splits a range into pieces that fit into a binding, including the alignment of its start.
fn pieces(context: &Context, bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let longest = (context.spec.binding_bytes() / 2).clamp(1 << 16, 1 << 28);
    (0..bytes).step_by(longest).map(move |first| (first, longest.min(bytes - first)))
}

/// A binding that contains a range, and the number of its bytes before the range.
fn binding<'a>(
    context: &Context,
    buffer: &'a Buffer,
    offset: usize,
    bytes: usize,
) -> (BindingResource<'a>, usize) {
    let skip = offset % context.spec.alignment;
    let size = BufferSize::new((skip + bytes).next_multiple_of(4) as u64);
    (BindingResource::Buffer(BufferBinding { buffer, offset: (offset - skip) as u64, size }), skip)
}

fn move_bytes(
    context: &Context,
    stream: &mut WgpuStream,
    from: Option<(&Buffer, usize)>,
    (to, at): (&Buffer, usize),
    bytes: usize,
    byte: u8,
) -> Result<()> {
    let tensor = |name| Tensor {
        name,
        element: Element::U32,
        vectors: false,
        read_only: false,
        present: true,
        bounded: false,
    };
    let names = ["source_start", "start", "count", "fill", "source_rows", "target_rows"];
    let shader = Shader {
        parts: vec![SOURCE],
        entry: "move_bytes",
        tensors: vec![tensor("source"), tensor("target")],
        fixed: Vec::new(),
        params: names.map(|name| (name.to_owned(), ParamType::U32)).to_vec(),
        overrides: Vec::new(),
        constants: Vec::new(),
        flags: if from.is_some() { vec!["COPY"] } else { Vec::new() },
    };
    let pipeline = context.pipelines.get(context, &shader, &[])?;
    let (source, source_start) = match from {
        Some((buffer, offset)) => binding(context, buffer, offset, bytes),
        None => (context.stand_in.as_entire_binding(), 0),
    };
    let (target, start) = binding(context, to, at, bytes);
    let fill = u32::from_ne_bytes([byte; 4]);
    let params = context.uniform(&[source_start as u32, start as u32, bytes as u32, fill, 0, 0])?;
    let entries = [source, target, params.as_entire_binding()];
    let entries: Vec<BindGroupEntry<'_>> = entries
        .into_iter()
        .zip(0..)
        .map(|(resource, binding)| BindGroupEntry { binding, resource })
        .collect();
    let descriptor = BindGroupDescriptor { label: None, layout: &pipeline.layout, entries: &entries };
    let bindings = context.scoped("binding a copy", || context.device.create_bind_group(&descriptor))?;
    let words = (start % 4 + bytes).div_ceil(4);
    let groups = context.grid(words.div_ceil(THREADS) as u64)?;
    stream.dispatch(&[Dispatch { pipeline, bindings, groups }])
}
