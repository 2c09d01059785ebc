//! The layers of a decoder in one launch, for one token: `decoder/layers.cu`.
//!
//! Programs do not know of it. When calls are captured as a graph, runs of them that are whole layers (query, key and value;
//! attention; output; both halves of the MLP) are found here and launched as one kernel, which does what they would have done
//! one after the other, but for results that no other call of the graph reads: those are not written.
//!
//! Small models gain most, as their layers take longer by themselves than their weights take to be read.

mod kind;
mod shape;

pub(crate) use kind::foreseen;
pub use shape::Shape;

use super::{Machine, band::norm_words, linear::weight_type, type_name};
use crate::{
    context::{Context, OWN_TIMEOUT},
    kernels::Work,
    launch::{Bound, EXTENTS, Frame, Parameters, Step, distinct},
    memory::CudaBuffer,
    stream::CudaStream,
    weight::CudaWeight,
};
use dsrun_core::{
    DType, Result, WeightFormat,
    device::{BufferSlice, MemoryKind, Stream},
    kernels::CallDesc,
    op::{Embed, Op, PagedAttention},
};
use shape::{LAYER_WORDS, MAX_LAYERS, PRODUCTS};
use std::{ops::Range, sync::Arc};

/// Calls of a layer.
const CALLS: usize = 5;
/// 64-bit words of `struct Model`.
const MODEL_WORDS: usize = 40;

/// A bound call that may become a part of a layer.
#[derive(Debug)]
pub(crate) enum Part {
    Embedding(Box<Embedding>),
    Product(Box<Product>),
    Attention(Box<Attention>),
}

/// The token in front of the layers: a row of a table, maybe with one for its position.
#[derive(Debug)]
pub(crate) struct Embedding {
    /// `struct Embedding` of the kernel.
    words: [u64; 8],
    dtype: &'static str,
    columns: usize,
    y: u64,
    /// Where extents over its row are.
    extents: Vec<u64>,
}

/// A product of one row with what is in front of it and behind it, bound.
#[derive(Debug)]
pub(crate) struct Product {
    kind: kind::Product,
    x: u64,
    weight: u64,
    /// Gain, shift, epsilon and offset: `struct Norm` of the kernels.
    norm: [u64; 3],
    /// `struct Epilogue` of the kernels.
    epilogue: [u64; 26],
    /// Where extents over its row are.
    extents: Vec<u64>,
}

/// Places in the words of an epilogue.
const BIAS: usize = 1;
const RESULT: usize = 2;
const RESIDUAL: usize = 4;
const SCALARS: usize = 6;
const POSITIONS: usize = 12;
const FREQUENCIES: usize = 13;
const SCALES: usize = 14;
const PLACES: usize = 15;
const KEYS: usize = 18;
const VALUES: usize = 22;

/// Attention of one token.
#[derive(Debug)]
pub(crate) struct Attention {
    shape: AttentionShape,
    query: u64,
    /// Keys and values with their strides of page, head and slot.
    caches: [[u64; 4]; 2],
    y: u64,
}

/// What all layers agree on.
#[derive(Clone, Debug, PartialEq)]
struct AttentionShape {
    kind: kind::Attention,
    /// First query, queries, keys, and the table of pages with its columns, and the number of pages.
    sequence: [u64; 6],
    /// Where extents over tokens and sequences are.
    extents: [Vec<u64>; 2],
}

/// Where the extents of tensors are.
fn extents(bounds: &[&Bound]) -> Vec<u64> {
    bounds.iter().map(|bound| bound.extent).collect()
}

/// Whether there is such a kernel for a machine.
fn has_kernel(machine: &Machine) -> bool {
    (90..120).contains(&machine.capability)
}

impl Part {
    /// What a bound call is in a layer, if it can be a part of one.
    pub(crate) fn of(call: &CallDesc, frame: &Frame, machine: &Machine) -> Result<Option<Self>> {
        if !has_kernel(machine) {
            return Ok(None);
        }
        match &call.op {
            Op::Region(_) => Ok(Product::of(call, frame)?.map(Box::new).map(Self::Product)),
            Op::Embed(op) => Ok(Embedding::of(op, call, frame)?.map(Box::new).map(Self::Embedding)),
            Op::PagedAttention(op) => Ok(Attention::of(op, call, frame)?.map(Box::new).map(Self::Attention)),
            _ => Ok(None),
        }
    }
}

impl Embedding {
    fn of(op: &Embed, call: &CallDesc, frame: &Frame) -> Result<Option<Self>> {
        let (ids, table, y) = (frame.tensor(0)?, frame.weight(1)?, frame.result(0)?);
        let (positions, places) = (frame.optional(2), frame.optional_weight(3));
        let dtype = y.desc.dtype;
        // Rows without padding, of the activations' type, which never change.
        let takes = |index: usize, weight: &CudaWeight| {
            let format = weight_type(call, index).map(|described| described.format);
            format.is_ok_and(|format| format == WeightFormat::Dense(dtype))
                && weight.immutable
                && weight.layout.row_bytes == y.size(1) * dtype.bytes()
        };
        let taken = y.size(0) == 1
            && matches!(dtype, DType::F16 | DType::BF16)
            && takes(1, table)
            && places.is_none_or(|places| positions.is_some() && takes(3, places));
        let mut bounds = vec![ids, y];
        bounds.extend(positions);
        if !taken {
            return Ok(None);
        }
        Ok(Some(Self {
            words: [
                ids.address,
                u64::from(op.first_row),
                table.address(),
                table.layout.rows as u64,
                frame.address(2),
                u64::from(op.position_offset),
                places.map_or(0, |places| places.address()),
                places.map_or(0, |places| places.layout.rows as u64),
            ],
            dtype: type_name(dtype)?,
            columns: y.size(1),
            y: y.address,
            extents: distinct(extents(&bounds)),
        }))
    }

    /// What a call is, if it makes the token in front of layers, and just where they are computed.
    fn before<'a>(call: &'a Work, layers: &[Layer<'_>]) -> Option<&'a Self> {
        let Part::Embedding(embedding) = call.part.as_deref()? else { return None };
        let input = layers.first()?.products[0];
        let fits = embedding.y == input.x
            && embedding.columns == input.kind.inputs
            && embedding.dtype == input.kind.constant("X")
            && embedding.extents == token_extents(layers);
        fits.then_some(embedding)
    }
}

impl Product {
    fn of(call: &CallDesc, frame: &Frame) -> Result<Option<Self>> {
        let Some(kind) = kind::Product::of(call)? else { return Ok(None) };
        let chain = &kind.chain;
        let weight = frame.weight(chain.weight)?;
        // Nothing is read before its turn that may change.
        if !weight.immutable {
            return Ok(None);
        }
        Ok(Some(Self {
            x: frame.tensor(chain.x)?.address,
            weight: weight.address(),
            norm: norm_words(chain, frame),
            epilogue: chain.epilogue(frame, true)?,
            extents: extents(&chain.bounds(frame)?),
            kind,
        }))
    }
}

impl Attention {
    fn of(op: &PagedAttention, call: &CallDesc, frame: &Frame) -> Result<Option<Self>> {
        let Some(kind) = kind::Attention::of(op, call)? else { return Ok(None) };
        let (query, keys, values) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (start, length, total) = (frame.tensor(3)?, frame.tensor(4)?, frame.tensor(5)?);
        let (table, y, log) = (frame.tensor(6)?, frame.result(0)?, frame.result(1)?);
        let cache = |cache: &Bound| {
            let [page, head, slot] = super::cache::strides(cache);
            [cache.address, page, head, slot]
        };
        let sizes = [table.size(1) as u64, keys.size(0) as u64];
        let shape = AttentionShape {
            kind,
            sequence: [start.address, length.address, total.address, table.address, sizes[0], sizes[1]],
            extents: [extents(&[query, y, log]), extents(&[start, length, total, table])],
        };
        let caches = [cache(keys), cache(values)];
        Ok(Some(Self { shape, query: query.address, caches, y: y.address }))
    }
}

/// The memory a bound call reads and writes, but for weights.
#[derive(Debug)]
pub(crate) struct Traffic {
    pub(crate) reads: Vec<Range<u64>>,
    pub(crate) writes: Vec<Range<u64>>,
}

impl Traffic {
    pub(crate) fn of(frame: &Frame) -> Result<Self> {
        let range = |bound: &Bound| {
            let bytes = bound.desc.bytes()? as u64;
            Ok(bound.address..bound.address + bytes)
        };
        Ok(Self {
            reads: frame.tensors().map(range).collect::<Result<_>>()?,
            writes: frame.results.iter().map(range).collect::<Result<_>>()?,
        })
    }
}

/// Which of the calls of a step are layers, as ranges of whole layers, with what makes the token in front of them.
pub(crate) fn find(calls: &[Work], machine: &Machine) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut first = 0;
    while first + CALLS <= calls.len() {
        let Some(layer) = Layer::of(&calls[first..first + CALLS]) else {
            first += 1;
            continue;
        };
        let before = runs
            .last()
            .filter(|run| run.end == first)
            .and_then(|run| Layer::of(&calls[first - CALLS..run.end]));
        match (before, runs.last_mut()) {
            (Some(before), Some(run)) if before.leads_to(&layer) => run.end += CALLS,
            _ if layer.kind().shape().cut(machine).is_some() => runs.push(first..first + CALLS),
            _ => {
                first += 1;
                continue;
            }
        }
        first += CALLS;
    }
    // One layer is not worth a kernel of its own.
    runs.retain(|run| run.len() > CALLS && inner_results_are_left(calls, run));
    for run in &mut runs {
        let layers = Layer::all_of(&calls[run.clone()]);
        let before = run.start.checked_sub(1).map(|before| &calls[before]);
        if before.is_some_and(|call| Embedding::before(call, &layers).is_some()) {
            run.start -= 1;
        }
    }
    runs
}

/// Whether no call behind a run reads what only its last call should have left.
fn inner_results_are_left(calls: &[Work], run: &Range<usize>) -> bool {
    let Some((last, inner)) = calls[run.clone()].split_last() else { return true };
    let Some(kept) = last.traffic.writes.first() else { return false };
    // Caches are results of the first calls of layers, and are written.
    let caches: Vec<u64> = calls[run.clone()]
        .iter()
        .filter_map(|call| match call.part.as_deref()? {
            Part::Attention(attention) => Some(attention.caches.map(|cache| cache[0])),
            _ => None,
        })
        .flatten()
        .collect();
    let mut unwritten: Vec<Range<u64>> = inner.iter().flat_map(|call| call.traffic.writes.clone()).collect();
    unwritten.retain(|range| !caches.contains(&range.start));
    let mut unwritten = without(&unwritten, kept);
    for call in &calls[run.end..] {
        let reads = &call.traffic.reads;
        if unwritten
            .iter()
            .any(|range| reads.iter().any(|read| read.start < range.end && range.start < read.end))
        {
            return false;
        }
        for write in &call.traffic.writes {
            unwritten = without(&unwritten, write);
        }
    }
    true
}

/// Ranges less what another takes of them.
fn without(ranges: &[Range<u64>], taken: &Range<u64>) -> Vec<Range<u64>> {
    let pieces =
        |range: &Range<u64>| [range.start..range.end.min(taken.start), range.start.max(taken.end)..range.end];
    ranges.iter().flat_map(pieces).filter(|piece| piece.start < piece.end).collect()
}

/// Where the extents over the token of layers are.
fn token_extents(layers: &[Layer<'_>]) -> Vec<u64> {
    let of_products = layers.iter().flat_map(|layer| layer.products).flat_map(|product| &product.extents);
    let of_attention = layers.iter().flat_map(|layer| &layer.attention.shape.extents[0]);
    distinct(of_products.chain(of_attention).copied().collect())
}

/// The parts of a layer, in the order of their calls.
struct Layer<'a> {
    /// Query, key and value; output; the first half of the MLP; the second.
    products: [&'a Product; PRODUCTS],
    attention: &'a Attention,
}

impl<'a> Layer<'a> {
    fn of(calls: &'a [Work]) -> Option<Self> {
        let product = |index: usize| match calls.get(index)?.part.as_deref()? {
            Part::Product(product) => Some(&**product),
            _ => None,
        };
        let Part::Attention(attention) = calls.get(1)?.part.as_deref()? else { return None };
        let layer = Self { products: [product(0)?, product(2)?, product(3)?, product(4)?], attention };
        layer.is_sound().then_some(layer)
    }

    /// What the calls are, as far as their descriptions tell.
    fn kind(&self) -> kind::Layer<'_> {
        let products = self.products.map(|product| &product.kind);
        kind::Layer { products, attention: &self.attention.shape.kind }
    }

    /// Whole layers.
    fn all_of(calls: &'a [Work]) -> Vec<Self> {
        calls.chunks(CALLS).filter_map(Self::of).collect()
    }

    /// Whether the kernel does what the calls do.
    fn is_sound(&self) -> bool {
        let [input, output, up, down] = self.products;
        // Each reads what the one before left, and residuals are what was read first, not something that came in their place.
        let [query, middle, inner, _] = self.products.map(|product| product.epilogue[RESULT]);
        let flow = self.attention.query == query
            && [KEYS, VALUES].map(|at| input.epilogue[at..at + 4].to_vec())
                == self.attention.caches.map(|cache| cache.to_vec())
            && output.x == self.attention.y
            && (up.x, down.x) == (middle, inner)
            && (output.epilogue[RESIDUAL], down.epilogue[RESIDUAL]) == (input.x, middle)
            && ![query, self.attention.y].contains(&input.x)
            && inner != middle;
        self.kind().is_sound() && flow
    }

    /// Whether another layer can follow in the same launch.
    fn leads_to(&self, next: &Self) -> bool {
        let same = |one: &Product, other: &Product| {
            one.kind.is_like(&other.kind)
                && one.norm[2] == other.norm[2]
                && one.epilogue[SCALARS..KEYS] == other.epilogue[SCALARS..KEYS]
                && one.epilogue[KEYS + 1..VALUES] == other.epilogue[KEYS + 1..VALUES]
                && one.epilogue[VALUES + 1..] == other.epilogue[VALUES + 1..]
        };
        next.products[0].x == self.products[3].epilogue[RESULT]
            && self.attention.shape == next.attention.shape
            && self.products.iter().zip(next.products).all(|(one, other)| same(one, other))
    }

    /// `struct Layer`.
    fn words(&self) -> [u64; LAYER_WORDS] {
        let [input, _, up, _] = self.products;
        let mut words = [0; LAYER_WORDS];
        for (index, product) in self.products.iter().enumerate() {
            words[index] = product.weight;
            words[PRODUCTS + index] = product.epilogue[BIAS];
        }
        words[8..].copy_from_slice(&[
            input.norm[0],
            up.norm[0],
            input.norm[1],
            up.norm[1],
            self.attention.caches[0][0],
            self.attention.caches[1][0],
        ]);
        words
    }
}

/// A launch of layers, and the memory that is its own.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) step: Step,
    _memory: Arc<CudaBuffer>,
}

impl Launch {
    /// Sets up the launch of a run that [`find`] found.
    pub(crate) fn new(
        calls: &[Work],
        context: &Arc<Context>,
        stream: &mut CudaStream,
    ) -> Result<Option<Self>> {
        let (before, calls) = calls.split_at(calls.len() % CALLS);
        let layers = Layer::all_of(calls);
        let (Some(first), Some(last)) = (layers.first(), layers.last()) else { return Ok(None) };
        let common = first.kind().shape();
        let Some(cut) = common.cut(&context.machine).filter(|_| layers.len() <= MAX_LAYERS) else {
            return Ok(None);
        };
        let shape = &first.attention.shape;
        let embedding = before.first().and_then(|call| Embedding::before(call, &layers));
        let tokens = token_extents(&layers);
        let sequences = distinct(shape.extents[1].clone());
        if tokens.len().max(sequences.len()) > EXTENTS {
            return Ok(None);
        }
        let function = context.function(&common.spec(&cut))?;

        let (exchange, partial) = common.exchange(&cut);
        let table: Vec<u8> = layers.iter().flat_map(Layer::words).flat_map(u64::to_le_bytes).collect();
        let pieces = [exchange * layers.len(), partial * layers.len(), table.len(), 4];
        let mut starts = [0; 5];
        for (index, bytes) in pieces.into_iter().enumerate() {
            starts[index + 1] = starts[index] + bytes.next_multiple_of(256);
        }
        let memory = Arc::new(CudaBuffer::new(context.clone(), starts[4], MemoryKind::Device)?);
        // All ones stand for what is not there yet.
        context.fill(memory.pointer, starts[2], 0xff)?;
        let slice = BufferSlice { buffer: memory.clone(), offset: starts[2], bytes: table.len() };
        stream.upload(&table, &slice)?;
        // The graph may be launched on any stream.
        stream.synchronize("the table of layers", OWN_TIMEOUT)?;

        let at = |index: usize| memory.pointer + starts[index] as u64;
        let [start, length, keys, pages, columns, count] = shape.sequence;
        let input = first.products[0];
        let heads = &input.epilogue;
        let mut words = [0; MODEL_WORDS];
        for (index, product) in first.products.iter().enumerate() {
            words[2 * index] = product.norm[2];
            words[2 * index + 1] = product.epilogue[SCALARS];
        }
        words[8..16].copy_from_slice(&[
            at(2),
            layers.len() as u64,
            input.x,
            last.products[3].epilogue[RESULT],
            at(0),
            at(1),
            at(3),
            heads[SCALES],
        ]);
        words[16] = u64::from(shape.kind.scale.to_bits());
        words[17..21].copy_from_slice(&[heads[POSITIONS], heads[FREQUENCIES], heads[PLACES], count]);
        words[21..24].copy_from_slice(&heads[KEYS + 1..VALUES]);
        words[24..27].copy_from_slice(&heads[VALUES + 1..]);
        words[27..32].copy_from_slice(&[start, length, keys, pages, columns]);
        if let Some(embedding) = embedding {
            words[32..].copy_from_slice(&embedding.words);
        }
        let parameters = Parameters::default().extents(1, tokens).extents(1, sequences).words(words);
        let step = Step::kernel(&function, [cut.blocks, 1, 1], cut.threads(), parameters);
        Ok(step.map(|step| Self { step, _memory: memory }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_of_ranges_is_gone() {
        let ranges = [0..10, 20..30, 40..50];
        assert_eq!(without(&ranges, &(5..45)), [0..5, 45..50]);
        assert_eq!(without(&ranges, &(22..24)), [0..10, 20..22, 24..30, 40..50]);
        assert_eq!(without(&ranges, &(30..40)), ranges);
    }
}
