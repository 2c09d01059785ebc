//! All layers of a decoder for one token in one launch (megakernel): `decoder/layers.cu`.
//!
//! The region is everything from a token's embedding to the final norm: optionally the embedding, then for each layer the norm
//! with query, key and value; attention; output projection with residual; the first half of the MLP; the second half with
//! residual. Its results are the key and value caches of all layers and the hidden state after the last one. Intermediate
//! results are in the launch's own memory and are never written to tensors.
//!
//! Layers that are split over ranks sum the results of attention and MLP over them; the launches of the ranks then exchange parts of
//! these results while they run.
//!
//! Small models gain most: their layers take longer to launch than their weights take to read.

mod body;
mod experts;
mod pacing;
mod params;
mod product;
mod ranks;
mod shape;

use super::{
    KernelPlan,
    experts::RouterVectors,
    frame::Frame,
    gemm::fused_linear::Norm,
    only, operand,
    params::{EXTENTS, ExtentParams, Strides, distinct},
    type_name, weight_type,
};
use crate::{
    arch::DeviceSpec,
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, Parameters},
    },
};
use body::{Attention, Body, Embedding, Layer};
use dsrun_core::{DType, Error, Result, WeightFormat, kernels::CallDesc, op::Op, region::Region};
pub(crate) use params::params_header;
use product::PRODUCTS;
use ranks::Ranks;
use shape::{Shape, TileConfig};

/// The source of the kernel.
const UNIT: &str = "decoder/layers.cu";

/// The error for decoder layers that the kernel does not support.
fn refused(why: impl std::fmt::Display) -> Error {
    Error::unsupported(format!("CUDA cannot run these decoder layers in one launch: {why}"))
}

/// The plan of a region of decoder layers as one launch; `None` if its body is something else.
///
/// # Errors
/// If it is such a body, but the kernel does not support its sizes or types.
pub(super) fn plan(region: &Region, call: &CallDesc, device: &DeviceSpec) -> Result<Option<KernelPlan>> {
    let Some(body) = Body::read(region) else { return Ok(None) };
    if !device.custom_gemm || !device.has_large_sms() {
        return Err(refused("the GPU has no cooperative launch with bulk copies"));
    }
    if device.shared {
        return Err(refused("it needs a whole GPU, which kernels of another rank share"));
    }
    let (ranks, shape) = (Ranks::of(&body, call)?, Shape::of(&body, call)?);
    let tiles = shape.tiles(device).ok_or_else(|| refused("they do not fit its blocks"))?;
    if let Some(embedding) = &body.embedding {
        check_embedding(embedding, &shape, call)?;
    }
    let memory = Memory::new(&shape, &tiles);
    let (persistent, spec, device) = (memory.end, shape.spec(&tiles), *device);
    let question = format!("pacing of {} layers of {spec}", shape.layers);
    Ok(Some(KernelPlan {
        kernels: vec![spec],
        workspace: 0,
        persistent,
        batch_invariant: true,
        launches: Box::new(move |frame, functions, context| {
            let at = |offset: usize| frame.persistent + offset as u64;
            // The sentinel: a word of all ones marks a result that is not written yet.
            context.fill(at(memory.exchange), memory.table, 0xff)?;
            let table =
                body.layers.iter().map(|layer| table_entry(layer, frame)).collect::<Result<Vec<_>>>()?;
            context.write(at(memory.table), &table)?;
            if shape.has_extras() {
                let extras: Vec<_> =
                    body.layers.iter().map(|layer| extra_entry(&body, layer, frame)).collect();
                context.write(at(memory.extra_table), &extras)?;
            }
            let experts: Vec<_> = body.layers.iter().map(|layer| expert_entry(layer, frame)).collect();
            if let Some(experts) = experts.into_iter().collect::<Option<Vec<_>>>() {
                context.write(at(memory.expert_table), &experts.into_iter().collect::<Result<Vec<_>>>()?)?;
            }
            let (mut model, function) = (model(&body, &memory, frame)?, only(functions)?);
            if let Some(ranks) = &ranks {
                model.ranks = ranks.params()?;
            }
            let launch = |model: &params::Model, extents: [Vec<u64>; 2]| {
                let [tokens, sequences] = extents.map(|counts| ExtentParams::new(1, counts));
                let parameters =
                    Parameters::default().structure(&tokens).structure(&sequences).structure(model);
                LaunchOp::kernel(function, [tiles.blocks, 1, 1], tiles.threads(), parameters)
            };
            model.pacing = match tiles.held {
                Some(slots) => pacing::unlimited(slots),
                None => {
                    let measured = |model: &params::Model| launch(model, [Vec::new(), Vec::new()]);
                    let bytes = shape.hidden * shape.dtype.bytes();
                    let ranks = ranks.as_ref().map_or(1, Ranks::count);
                    pacing::tuned(context, &device, &question, &model, [bytes, ranks], &measured)
                }
            };
            Ok(launch(&model, extents(&body, frame)?).into_iter().collect())
        }),
    }))
}

/// The kernel of layers whose results are summed over ranks, of any backend.
///
/// # Errors
/// If the call is something else, or the kernel does not support its sizes or types.
pub(super) fn summed_specs(call: &CallDesc, device: &DeviceSpec) -> Result<Vec<KernelSpec>> {
    let body = if let Op::Region(region) = &call.op { Body::read(region) } else { None };
    let Some(body) = body.filter(|body| body.first().summed) else {
        return Err(refused("the call has no layers whose results are summed over ranks"));
    };
    let shape = Shape::of(&body, call)?;
    let tiles = shape.tiles(device).ok_or_else(|| refused("they do not fit its blocks"))?;
    Ok(vec![shape.spec(&tiles)])
}

/// Byte offsets in the launch's own memory.
#[derive(Clone, Copy)]
struct Memory {
    exchange: usize,
    /// The exchange of attention splits.
    partial: usize,
    table: usize,
    extra_table: usize,
    expert_table: usize,
    /// The counter of finished blocks.
    done: usize,
    end: usize,
}

impl Memory {
    fn new(shape: &Shape, tiles: &TileConfig) -> Self {
        let (exchange, partial) = shape.exchange(tiles);
        let round = |bytes: usize| bytes.next_multiple_of(256);
        let partial_at = round(exchange * shape.layers + shape.final_exchange());
        let table = partial_at + round(partial * shape.layers);
        let extra_table = table + round(shape.layers * size_of::<params::Layer>());
        let extras = if shape.has_extras() { shape.layers * size_of::<params::ExtraLayer>() } else { 0 };
        let expert_table = extra_table + round(extras);
        let experts = shape.experts.map_or(0, |_| shape.layers * size_of::<params::ExpertLayer>());
        let done = expert_table + round(experts);
        let end = done + 256;
        Self { exchange: 0, partial: partial_at, table, extra_table, expert_table, done, end }
    }
}

/// Refuses embedding tables that the kernel does not support: they must have the activations' type and no row padding.
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

/// The entry of a layer in the layer table.
fn table_entry(layer: &Layer, frame: &Frame) -> Result<params::Layer> {
    let mut entry = params::Layer::default();
    for (index, product) in layer.products().into_iter().enumerate() {
        entry.weights[index] = frame.weight(product.weight)?.address();
        entry.biases[index] = product.bias.map_or(0, |bias| frame.address(bias));
    }
    let address = |value: Option<usize>| value.map_or(0, |value| frame.address(value));
    for (index, norm) in [layer.input.norm, layer.up.norm].into_iter().enumerate() {
        entry.norm_weights[index] = address(norm.and_then(|norm| norm.weight()));
        entry.norm_biases[index] = address(norm.and_then(|norm| norm.bias()));
    }
    if let Some(norms) = layer.heads.norms {
        entry.head_norms = norms.map(|(_, weight)| frame.address(weight));
    }
    let [keys, values] = layer.heads.caches;
    (entry.keys, entry.values) = (frame.tensor(keys)?.address, frame.tensor(values)?.address);
    Ok(entry)
}

/// The entry of a layer in the table of additional operands.
fn extra_entry(body: &Body, layer: &Layer, frame: &Frame) -> params::ExtraLayer {
    let address = |norm: &Norm| norm.weight().map_or(0, |weight| frame.address(weight));
    let post_norms = layer.post_norms.as_ref().map_or([0; 2], |norms| norms.each_ref().map(address));
    let sinks = layer.attention.sinks.map_or(0, |sinks| frame.address(sinks));
    params::ExtraLayer { post_norms, sinks, kind: body.kind_of(layer) as i64 }
}

/// The entry of a layer in the table of expert layers; `None` if it has no experts.
fn expert_entry(layer: &Layer, frame: &Frame) -> Option<Result<params::ExpertLayer>> {
    let experts = layer.experts?;
    let weight = |index: usize| Ok(frame.weight(index)?.address());
    let address = |vector: Option<usize>| vector.map_or(0, |vector| frame.address(vector));
    let [bias, selection_bias, scale] = experts.vectors.map(address);
    let entry = || {
        Ok(params::ExpertLayer {
            router: weight(experts.router)?,
            second: weight(experts.second)?,
            router_bias: address(experts.router_bias),
            second_bias: address(experts.second_bias),
            vectors: RouterVectors { bias, selection_bias, scale },
        })
    };
    Some(entry())
}

/// The parameters that all layers share.
fn model(body: &Body, memory: &Memory, frame: &Frame) -> Result<params::Model> {
    let at = |offset: usize| frame.persistent + offset as u64;
    let first = body.first();
    let (heads, attention) = (first.heads, &first.attention);
    let post_norms =
        first.post_norms.map_or([None; 4], |[output, down]| [None, Some(output), None, Some(down)]);
    let mut products = [params::Product::default(); PRODUCTS];
    for ((params, product), post_norm) in products.iter_mut().zip(first.products()).zip(post_norms) {
        let [alpha, limit, up_offset] = product.scalars();
        let norm = product.norm.or(post_norm);
        let (eps, weight_offset) = norm.map_or((0.0, 0.0), |norm| norm.eps_and_offset());
        *params = params::Product { eps, weight_offset, alpha, limit, up_offset };
    }
    let mut kinds = [params::AttentionKind::default(); params::KINDS];
    for (params, kind) in kinds.iter_mut().zip(&body.kinds) {
        let [query_scale, key_scale] = kind.rope.map_or([1.0; 2], |rope| rope.scales);
        *params = params::AttentionKind {
            frequencies: kind.rope.map_or(0, |rope| frame.address(rope.frequencies)),
            query_scale,
            key_scale,
            score_scale: kind.op.scale,
            window: i32::try_from(kind.op.window).unwrap_or(0),
        };
    }
    let y = frame.result(body.result)?;
    let (keys, values) = (frame.tensor(heads.caches[0])?, frame.tensor(heads.caches[1])?);
    let rope = body.kinds.iter().find_map(|kind| kind.rope);
    let norms = heads.norms.map(|norms| norms.map(|(norm, _)| norm));
    let mut model = params::Model {
        products,
        head_eps: norms.map_or([0.0; 2], |norms| norms.map(|norm| norm.eps)),
        head_offsets: norms.map_or([0.0; 2], |norms| norms.map(|norm| norm.weight_offset)),
        table: at(memory.table),
        layers: body.layers.len() as i64,
        // If the launch embeds the token itself, its hidden state is stored in the result, which is not written before the end of
        // the last layer.
        x: if body.embedding.is_some() { y.address } else { frame.address(body.x) },
        y: y.address,
        exchange: at(memory.exchange),
        partial: at(memory.partial),
        done: at(memory.done),
        kinds,
        softcap: attention.op.softcap,
        positions: rope.map_or(0, |rope| frame.address(rope.positions)),
        slots: frame.address(heads.slots),
        pages: keys.size(0) as i64,
        key_strides: Strides::of(keys),
        value_strides: Strides::of(values),
        query_start: frame.address(attention.start),
        query_length: frame.address(attention.length),
        kv_length: frame.address(attention.total),
        block_table: frame.address(attention.table),
        block_table_columns: frame.tensor(attention.table)?.size(1) as i64,
        extra_table: at(memory.extra_table),
        expert_table: at(memory.expert_table),
        rule: first.experts.and_then(|experts| Some(experts.kernel()?.rule)).unwrap_or_default(),
        ..params::Model::default()
    };
    if let Some(embedding) = &body.embedding {
        let rows = frame.weight(embedding.table)?;
        model.embedding = params::Embedding {
            ids: frame.address(embedding.ids),
            first_row: i64::from(embedding.op.first_row),
            rows: rows.address(),
            row_count: rows.layout.rows as i64,
            position_offset: i64::from(embedding.op.position_offset),
            alpha: embedding.alpha,
            ..params::Embedding::default()
        };
        if let Some((positions, table)) = embedding.positions {
            let table = frame.weight(table)?;
            model.embedding.positions = frame.address(positions);
            model.embedding.position_rows = table.address();
            model.embedding.position_row_count = table.layout.rows as i64;
        }
    }
    Ok(model)
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
