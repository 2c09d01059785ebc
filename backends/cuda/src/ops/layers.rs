//! The layers of a decoder in one launch, for one token: `decoder/layers.cu`.
//!
//! Programs do not know of it. When calls are captured as a graph, runs of them that are whole layers (query, key and value;
//! attention; output; both halves of the MLP) are found here and launched as one kernel, which does what they would have done
//! one after the other, but for results that no other call of the graph reads: those are not written.
//!
//! Small models gain most, as their layers take longer by themselves than their weights take to be read.

mod shape;

pub use shape::Shape;

use super::{
    Machine,
    band::{norm_defines, norm_words},
    chain::{Behind, Chain},
    linear::weight_type,
    operand, type_name,
};
use crate::{
    context::{Context, OWN_TIMEOUT},
    kernels::Work,
    launch::{Bound, EXTENTS, Frame, Parameters, Step, distinct},
    memory::CudaBuffer,
    stream::CudaStream,
};
use dsrun_core::{
    DType, Result, WeightFormat,
    device::{BufferSlice, MemoryKind, Stream},
    kernels::CallDesc,
    op::{AttentionMask, GateLayout, Op, PagedAttention, RopePairing},
};
use shape::{LAYER_WORDS, MAX_HEAD, MAX_LAYERS, PRODUCTS};
use std::{ops::Range, sync::Arc};

/// Calls of a layer.
const CALLS: usize = 5;
/// 64-bit words of `struct Model`.
const MODEL_WORDS: usize = 32;

/// A bound call that may become a part of a layer.
#[derive(Debug)]
pub(crate) enum Part {
    Product(Box<Product>),
    Attention(Box<Attention>),
}

/// A product of one row with what is in front of it and behind it.
#[derive(Debug)]
pub(crate) struct Product {
    chain: Chain,
    /// The constants that the kernel of its own would have: layers agree on them.
    defines: Vec<(&'static str, String)>,
    format: WeightFormat,
    inputs: usize,
    outputs: usize,
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
/// Heads of queries, of keys, sizes and pairs.
const SIZES: Range<usize> = 7..12;
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
    size: usize,
    slots: usize,
    kv_heads: usize,
    /// Query heads of a KV head.
    group: usize,
    causal: bool,
    scale: f32,
    /// First query, queries, keys, and the table of pages with its columns, and the number of pages.
    sequence: [u64; 6],
    /// Where extents over tokens and sequences are.
    extents: [Vec<u64>; 2],
}

/// Where the extents of tensors are.
fn extents(bounds: &[&Bound]) -> Vec<u64> {
    bounds.iter().map(|bound| bound.extent).collect()
}

impl Part {
    /// What a bound call is in a layer, if it can be a part of one.
    pub(crate) fn of(call: &CallDesc, frame: &Frame, machine: &Machine) -> Result<Option<Self>> {
        if !(90..120).contains(&machine.capability) {
            return Ok(None);
        }
        match &call.op {
            Op::Region(region) => match Chain::parse(region) {
                Some(chain) => Ok(Product::of(chain, call, frame)?.map(Box::new).map(Self::Product)),
                None => Ok(None),
            },
            Op::PagedAttention(op) => Ok(Attention::of(op, call, frame)?.map(Box::new).map(Self::Attention)),
            _ => Ok(None),
        }
    }
}

impl Product {
    fn of(chain: Chain, call: &CallDesc, frame: &Frame) -> Result<Option<Self>> {
        let (x, described) = (operand(call, chain.x)?, weight_type(call, chain.weight)?);
        let takes = x.shape[0] == 1
            && matches!(x.dtype, DType::F16 | DType::BF16)
            && shape::takes(described.format, x.dtype, described.rows(), described.columns())
            && chain.product == x.dtype
            && !chain.norms_heads();
        if !takes {
            return Ok(None);
        }
        let weight = frame.weight(chain.weight)?;
        let mut defines = norm_defines(&chain, call)?;
        defines.extend(chain.defines(call)?);
        defines.push(("X", type_name(x.dtype)?.to_owned()));
        // Nothing is read before its turn that may change.
        Ok(weight.immutable.then_some(Self {
            chain,
            defines,
            format: described.format,
            inputs: described.columns(),
            outputs: described.rows(),
            x: frame.tensor(chain.x)?.address,
            weight: weight.address(),
            norm: norm_words(&chain, frame),
            epilogue: chain.epilogue(frame, true)?,
            extents: extents(&chain.bounds(frame)?),
        }))
    }

    /// The value of one of its constants.
    fn constant(&self, name: &str) -> &str {
        self.defines.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value)
    }
}

impl Attention {
    fn of(op: &PagedAttention, call: &CallDesc, frame: &Frame) -> Result<Option<Self>> {
        let (query, keys, values) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (start, length, total) = (frame.tensor(3)?, frame.tensor(4)?, frame.tensor(5)?);
        let (table, y, log) = (frame.tensor(6)?, frame.result(0)?, frame.result(1)?);
        let size = keys.size(3);
        let whole = |tensor: &Bound| (0..3).all(|dimension| tensor.stride(dimension).is_multiple_of(8));
        let takes = query.size(0) == 1
            && start.size(0) == 1
            && query.desc.dtype == operand(call, 1)?.dtype
            && op.window == 0
            && op.softcap <= 0.0
            && op.mask != AttentionMask::Explicit
            && (8..10).all(|index| frame.address(index) == 0)
            && values.size(3) == size
            && (16..=MAX_HEAD).contains(&size)
            && size.is_multiple_of(16)
            && whole(keys)
            && whole(values)
            && keys.size(2) > 0
            && keys.size(2).is_multiple_of(16)
            && op.kv_heads > 0
            && op.query_heads.is_multiple_of(op.kv_heads);
        if !takes {
            return Ok(None);
        }
        let cache = |cache: &Bound| {
            let [page, head, slot] = super::cache::strides(cache);
            [cache.address, page, head, slot]
        };
        let sizes = [table.size(1) as u64, keys.size(0) as u64];
        let shape = AttentionShape {
            size,
            slots: keys.size(2),
            kv_heads: op.kv_heads as usize,
            group: (op.query_heads / op.kv_heads) as usize,
            causal: op.mask == AttentionMask::Causal,
            scale: op.scale,
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

/// Which of the calls of a step are layers, as ranges of whole layers.
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
            _ if layer.shape().cut(machine).is_some() => runs.push(first..first + CALLS),
            _ => {
                first += 1;
                continue;
            }
        }
        first += CALLS;
    }
    // One layer is not worth a kernel of its own.
    runs.retain(|run| run.len() > CALLS && inner_results_are_left(calls, run));
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
            Part::Product(_) => None,
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
            Part::Attention(_) => None,
        };
        let Part::Attention(attention) = calls.get(1)?.part.as_deref()? else { return None };
        let layer = Self { products: [product(0)?, product(2)?, product(3)?, product(4)?], attention };
        layer.is_sound().then_some(layer)
    }

    /// Whether the kernel does what the calls do.
    fn is_sound(&self) -> bool {
        let [input, output, up, down] = self.products;
        let kinds = match [input.chain.behind, output.chain.behind, up.chain.behind, down.chain.behind] {
            [Behind::Heads(heads), Behind::Sum(..), Behind::Gate(gate), Behind::Sum(..)] => {
                gate.layout == GateLayout::Concatenated
                    && heads.turn.is_none_or(|turn| turn.pairing == RopePairing::Halves)
            }
            [Behind::Heads(heads), Behind::Sum(..), Behind::Activation(_), Behind::Sum(..)] => {
                heads.turn.is_none_or(|turn| turn.pairing == RopePairing::Halves)
            }
            _ => false,
        };
        let normed = self.products.map(|product| product.chain.norm.is_some()) == [true, false, true, false];
        let alike = |name: &str| {
            self.products.windows(2).all(|pair| pair[0].constant(name) == pair[1].constant(name))
        };
        let types = self.products.iter().all(|product| product.format == input.format)
            && alike("X")
            && alike("Y")
            && alike("BIAS")
            && input.constant("X") == input.constant("Y")
            && input.constant("CACHE") == input.constant("X")
            && ["G", "SHIFT", "NORM"].iter().all(|name| input.constant(name) == up.constant(name));
        let shape = &self.attention.shape;
        let query = (shape.kv_heads * shape.group * shape.size) as u64;
        let size = shape.size as u64;
        let pairs = input.epilogue[SIZES.end - 1];
        let sizes = input.epilogue[SIZES.start] * size == query
            && input.epilogue[SIZES.start + 1] == shape.kv_heads as u64
            && input.epilogue[SIZES.start + 2..SIZES.end - 1] == [size, size]
            && 2 * pairs <= size
            && pairs.is_multiple_of(8)
            && (output.inputs as u64, up.inputs, input.inputs) == (query, input.inputs, output.outputs)
            && down.outputs == input.inputs
            && [input, output, up, down].iter().all(|product| product.outputs > 0);
        // Each reads what the one before left, and residuals are what was read first, not something that came in their place.
        let results = self.products.map(|product| product.epilogue[RESULT]);
        let [query, middle, inner, _] = results;
        let flow = self.attention.query == query
            && [KEYS, VALUES].map(|at| input.epilogue[at..at + 4].to_vec())
                == self.attention.caches.map(|cache| cache.to_vec())
            && output.x == self.attention.y
            && (up.x, down.x) == (middle, inner)
            && (output.epilogue[RESIDUAL], down.epilogue[RESIDUAL]) == (input.x, middle)
            && ![query, self.attention.y].contains(&input.x)
            && inner != middle;
        kinds && normed && types && sizes && flow
    }

    /// Whether another layer can follow in the same launch.
    fn leads_to(&self, next: &Self) -> bool {
        let same = |one: &Product, other: &Product| {
            one.defines == other.defines
                && one.format == other.format
                && (one.inputs, one.outputs, one.norm[2]) == (other.inputs, other.outputs, other.norm[2])
                && one.epilogue[SCALARS..KEYS] == other.epilogue[SCALARS..KEYS]
                && one.epilogue[KEYS + 1..VALUES] == other.epilogue[KEYS + 1..VALUES]
                && one.epilogue[VALUES + 1..] == other.epilogue[VALUES + 1..]
        };
        next.products[0].x == self.products[3].epilogue[RESULT]
            && self.attention.shape == next.attention.shape
            && self.products.iter().zip(next.products).all(|(one, other)| same(one, other))
    }

    /// What all layers of the launch have in common.
    fn shape(&self) -> Shape {
        let [input, _, up, down] = self.products;
        let shape = &self.attention.shape;
        let copied = |product: &Product, names: &[&'static str]| -> Vec<(&'static str, String)> {
            names.iter().map(|name| (*name, product.constant(name).to_owned())).collect()
        };
        let mut constants = copied(input, &["X", "G", "SHIFT", "BIAS", "NORM", "ROPE"]);
        constants.extend(copied(up, &["FUNCTION"]));
        Shape {
            constants,
            format: input.format,
            gated: matches!(up.chain.behind, Behind::Gate(_)),
            hidden: input.inputs,
            inner: down.inputs,
            kv_heads: shape.kv_heads,
            group: shape.group,
            head: shape.size,
            pairs: input.epilogue[SIZES.end - 1] as usize,
            slots: shape.slots,
            causal: shape.causal,
        }
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
        let layers: Vec<Layer<'_>> = calls.chunks(CALLS).filter_map(Layer::of).collect();
        let (Some(first), Some(last)) = (layers.first(), layers.last()) else { return Ok(None) };
        let common = first.shape();
        let Some(cut) = common.cut(&context.machine).filter(|_| layers.len() <= MAX_LAYERS) else {
            return Ok(None);
        };
        let shape = &first.attention.shape;
        let of_products = layers.iter().flat_map(|layer| layer.products).flat_map(|product| &product.extents);
        let tokens = distinct(of_products.chain(&shape.extents[0]).copied().collect());
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
        words[16] = u64::from(shape.scale.to_bits());
        words[17..21].copy_from_slice(&[heads[POSITIONS], heads[FREQUENCIES], heads[PLACES], count]);
        words[21..24].copy_from_slice(&heads[KEYS + 1..VALUES]);
        words[24..27].copy_from_slice(&heads[VALUES + 1..]);
        words[27..].copy_from_slice(&[start, length, keys, pages, columns]);
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
