//! Layers of a decoder in one launch, for one token: `decoder/layers.cu`.
//!
//! The region is all that happens to a token between its embedding and the final norm: optionally the embedding, then for each
//! layer norm with query, key and value; attention; output projection with residual; the first half of the MLP; the second half
//! with residual. Its results are the key and value caches of all layers and the token after the last one. Intermediate results
//! live in memory that the launch keeps for itself and are never written to tensors.
//!
//! Small models gain most, as their layers take longer as launches of their own than their weights take to be read.

mod body;
mod shape;

use super::{
    KernelPlan, cache, frame::Frame, gemm::decode_gemm::norm_words, only, operand, type_name, weight_type,
};
use crate::{
    arch::DeviceSpec,
    driver::launch::{EXTENTS, LaunchOp, Parameters, distinct},
};
use body::{Attention, Body, Embedding, Layer};
use dsrun_core::{DType, Error, Result, WeightFormat, kernels::CallDesc, region::Region};
use shape::{LAYER_WORDS, PRODUCTS, Shape, TileConfig};

/// 64-bit words of `struct Model`.
const MODEL_WORDS: usize = 40;

/// The error for layers of a decoder that the kernel does not take.
fn refused(why: impl std::fmt::Display) -> Error {
    Error::unsupported(format!("CUDA cannot run these decoder layers in one launch: {why}"))
}

/// How a region is run as layers of a decoder in one launch; `None` if its body is something else.
///
/// # Errors
/// If it is such a body, but the kernel does not take its sizes or types.
pub(super) fn plan(region: &Region, call: &CallDesc, device: &DeviceSpec) -> Result<Option<KernelPlan>> {
    let Some(body) = Body::read(region) else { return Ok(None) };
    if !device.custom_gemm || !(90..120).contains(&device.capability) {
        return Err(refused("the GPU has no cooperative launch with bulk copies"));
    }
    let shape = Shape::of(&body, call)?;
    let tiles = shape.tiles(device).ok_or_else(|| refused("they do not fit its blocks"))?;
    if let Some(embedding) = &body.embedding {
        check_embedding(embedding, &shape, call)?;
    }
    let memory = Memory::new(&shape, &tiles);
    let (persistent, kernels) = (memory.end, vec![shape.spec(&tiles)]);
    Ok(Some(KernelPlan {
        kernels,
        workspace: 0,
        persistent,
        batch_invariant: true,
        launches: Box::new(move |frame, functions, context| {
            let at = |offset: usize| frame.persistent + offset as u64;
            // A word of all ones stands for a result that is not there yet.
            context.fill(at(memory.exchange), memory.table, 0xff)?;
            let table =
                body.layers.iter().map(|layer| layer_words(layer, frame)).collect::<Result<Vec<_>>>()?;
            let table: Vec<u8> = table.into_iter().flatten().flat_map(u64::to_le_bytes).collect();
            context.write(at(memory.table), &table)?;
            let model = model_words(&body, &memory, frame)?;
            let [tokens, sequences] = extents(&body, frame)?;
            let parameters = Parameters::default().extents(1, tokens).extents(1, sequences).words(model);
            let grid = [tiles.blocks, 1, 1];
            Ok(LaunchOp::kernel(only(functions)?, grid, tiles.threads(), parameters).into_iter().collect())
        }),
    }))
}

/// Where things are in the memory that a launch keeps for itself, as byte offsets.
#[derive(Clone, Copy)]
struct Memory {
    exchange: usize,
    /// Splits of attention.
    partial: usize,
    table: usize,
    /// The counter of blocks that are done.
    done: usize,
    end: usize,
}

impl Memory {
    fn new(shape: &Shape, tiles: &TileConfig) -> Self {
        let (exchange, partial) = shape.exchange(tiles);
        let round = |bytes: usize| bytes.next_multiple_of(256);
        let partial_at = round(exchange * shape.layers);
        let table = partial_at + round(partial * shape.layers);
        let done = table + round(shape.layers * LAYER_WORDS * 8);
        Self { exchange: 0, partial: partial_at, table, done, end: done + 256 }
    }
}

/// Refuses tables that the kernel does not look a token up in: they must have the activations' type and rows without padding.
fn check_embedding(embedding: &Embedding, shape: &Shape, call: &CallDesc) -> Result<()> {
    for table in [Some(embedding.table), embedding.positions.map(|(_, table)| table)].into_iter().flatten() {
        let weight = weight_type(call, table)?;
        let plain = weight.format == WeightFormat::Dense(shape.dtype)
            && weight.columns() == shape.hidden
            && (shape.hidden * shape.dtype.bytes()).is_multiple_of(16);
        if !plain {
            return Err(refused(format!(
                "the embedding is {weight}, must be {} of {}",
                shape.dtype, shape.hidden
            )));
        }
    }
    Ok(())
}

fn float_bits(low: f32, high: f32) -> u64 {
    u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32
}

/// `struct Layer`.
fn layer_words(layer: &Layer, frame: &Frame) -> Result<[u64; LAYER_WORDS]> {
    let mut words = [0; LAYER_WORDS];
    for (index, product) in layer.products().into_iter().enumerate() {
        words[index] = frame.weight(product.weight)?.address();
        words[PRODUCTS + index] = product.bias.map_or(0, |bias| frame.address(bias));
    }
    let [input, _, up, _] = layer.products().map(|product| norm_words(product, frame));
    let [keys, values] = layer.heads.caches;
    words[8..].copy_from_slice(&[
        input[0],
        up[0],
        input[1],
        up[1],
        frame.tensor(keys)?.address,
        frame.tensor(values)?.address,
    ]);
    Ok(words)
}

/// `struct Model`.
fn model_words(body: &Body, memory: &Memory, frame: &Frame) -> Result<[u64; MODEL_WORDS]> {
    let at = |offset: usize| frame.persistent + offset as u64;
    let first = body.first();
    let (heads, attention) = (first.heads, &first.attention);
    let mut words = [0; MODEL_WORDS];
    for (index, product) in first.products().into_iter().enumerate() {
        let [alpha, limit] = product.scalars();
        words[2 * index] = norm_words(product, frame)[2];
        words[2 * index + 1] = float_bits(alpha, limit);
    }
    let rope = heads.rope;
    let y = frame.result(body.result)?;
    // A token that the launch embeds itself is kept where its result goes, which nothing writes before the last layer ends.
    let x = if body.embedding.is_some() { y.address } else { frame.address(body.x) };
    words[8..16].copy_from_slice(&[
        at(memory.table),
        body.layers.len() as u64,
        x,
        y.address,
        at(memory.exchange),
        at(memory.partial),
        at(memory.done),
        rope.map_or(0, |rope| float_bits(rope.scales[0], rope.scales[1])),
    ]);
    words[16] = u64::from(attention.op.scale.to_bits());
    let (keys, values) = (frame.tensor(heads.caches[0])?, frame.tensor(heads.caches[1])?);
    words[17..21].copy_from_slice(&[
        rope.map_or(0, |rope| frame.address(rope.positions)),
        rope.map_or(0, |rope| frame.address(rope.frequencies)),
        frame.address(heads.slots),
        keys.size(0) as u64,
    ]);
    words[21..24].copy_from_slice(&cache::strides(keys));
    words[24..27].copy_from_slice(&cache::strides(values));
    let Attention { start, length, total, table, .. } = *attention;
    let columns = frame.tensor(table)?.size(1) as u64;
    words[27..32].copy_from_slice(&[
        frame.address(start),
        frame.address(length),
        frame.address(total),
        frame.address(table),
        columns,
    ]);
    if let Some(embedding) = &body.embedding {
        let rows = frame.weight(embedding.table)?;
        words[32..36].copy_from_slice(&[
            frame.address(embedding.ids),
            u64::from(embedding.op.first_row),
            rows.address(),
            rows.layout.rows as u64,
        ]);
        if let Some((positions, table)) = embedding.positions {
            let table = frame.weight(table)?;
            words[36..].copy_from_slice(&[
                frame.address(positions),
                u64::from(embedding.op.position_offset),
                table.address(),
                table.layout.rows as u64,
            ]);
        }
    }
    Ok(words)
}

/// The addresses of the extents over the token, and over its sequence.
fn extents(body: &Body, frame: &Frame) -> Result<[Vec<u64>; 2]> {
    let extent = |value: usize| frame.optional(value).map_or(0, |bound| bound.extent);
    let mut tokens = vec![frame.result(body.result)?.extent];
    match &body.embedding {
        Some(embedding) => {
            tokens.push(extent(embedding.ids));
            tokens.extend(embedding.positions.map(|(positions, _)| extent(positions)));
        }
        None => tokens.push(extent(body.x)),
    }
    for layer in &body.layers {
        tokens.push(extent(layer.heads.slots));
        tokens.extend(layer.heads.rope.map(|rope| extent(rope.positions)));
    }
    let Attention { start, length, total, table, .. } = body.first().attention;
    let sequences = [start, length, total, table].map(extent).to_vec();
    let both = [distinct(tokens), distinct(sequences)];
    if both.iter().any(|extents| extents.len() > EXTENTS) {
        return Err(refused(format!("there are more than {EXTENTS} extents over a token or its sequence")));
    }
    Ok(both)
}

/// The element type of an operand that is a tensor.
fn dtype_of(call: &CallDesc, value: usize) -> Result<DType> {
    Ok(operand(call, value)?.dtype)
}

/// The name of an operand's element type; that of f32 where it is left out.
fn name_of(call: &CallDesc, value: Option<usize>) -> Result<&'static str> {
    value.map_or(Ok("f32"), |value| type_name(dtype_of(call, value)?))
}
