//! Recognises decoder layers in the body of a region.

use super::experts::Experts;
use crate::ops::{
    body::{BodyReader, made, value},
    gemm::fused_linear::{Epilogue, FusedLinear, Heads, Norm, RopeParams},
};
use dsrun_core::{
    op::{Add, AllReduce, AttentionMask, Embed, GateLayout, Op, PagedAttention, Reduction},
    program::Call,
    region::Region,
};

/// Decoder layers, with the embedding if the body begins with it. Numbers are value ids of the body: operands of the region, or
/// intermediate values.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) embedding: Option<Embedding>,
    /// The layers; at least one.
    pub(super) layers: Vec<Layer>,
    /// The kinds of attention of the layers, each once.
    pub(super) kinds: Vec<Kind>,
    /// The hidden state before the first layer: an operand, or the result of the embedding.
    pub(super) x: usize,
    /// The index of the region's result that is the hidden state after the last layer.
    pub(super) result: usize,
}

/// An embedding lookup, optionally added to a position embedding, and to itself.
#[derive(Debug)]
pub(super) struct Embedding {
    pub(super) ids: usize,
    pub(super) table: usize,
    /// Positions, and their table.
    pub(super) positions: Option<(usize, usize)>,
    pub(super) op: Embed,
    /// The factor with which the embedding is added to itself.
    pub(super) alpha: f32,
}

/// A layer.
#[derive(Debug)]
pub(super) struct Layer {
    /// Norm with query, key and value.
    pub(super) input: FusedLinear,
    pub(super) heads: Heads,
    pub(super) attention: Attention,
    /// Output projection with residual.
    output: FusedLinear,
    /// The first half of the MLP, with its norm.
    pub(super) up: FusedLinear,
    /// The second half, with residual.
    down: FusedLinear,
    /// If the MLP is a mixture of experts, its router; both halves of the MLP are then those of all experts.
    pub(super) experts: Option<Experts>,
    /// The norms of the results of attention and MLP, before they are added to the residual.
    pub(super) post_norms: Option<[Norm; 2]>,
    /// Whether these results are summed over ranks first.
    pub(super) summed: bool,
    /// Whether the MLP is beside attention: its norm takes the token in front of the layer, and both results are added to that.
    pub(super) parallel: bool,
}

/// What the attention of a layer may share with some of the others only: window, scale and rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Kind {
    pub(super) op: PagedAttention,
    pub(super) rope: Option<RopeParams>,
}

/// The operand of `paged_attention` that is its sinks.
const SINKS: usize = 9;

/// Attention over pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    pub(super) op: PagedAttention,
    pub(super) start: usize,
    pub(super) length: usize,
    pub(super) total: usize,
    pub(super) table: usize,
    pub(super) sinks: Option<usize>,
}

impl Body {
    /// Reads a body; `None` unless it consists of whole layers, whose results are the caches and the last hidden state.
    ///
    /// The operands of each call are checked to be values of the layer or operands of the region, so no value has another use.
    pub(super) fn read(region: &Region) -> Option<Self> {
        let mut reader = BodyReader::new(region);
        let (embedding, first) = match Embedding::read(&mut reader) {
            Some((embedding, x)) => (Some(embedding), x),
            None => (None, value(reader.peek()?, 0)?),
        };
        let (mut layers, mut results, mut x) = (Vec::new(), Vec::new(), first);
        while !reader.is_done() {
            let (layer, caches, y) = Layer::read(&mut reader, x)?;
            layers.push(layer);
            results.extend(caches);
            x = y;
        }
        results.push(x);
        let found: Vec<usize> = region.results().iter().map(|value| value.index()).collect();
        let only_these = found.len() == results.len() && results.iter().all(|value| found.contains(value));
        let result = found.iter().position(|value| *value == x)?;
        let mut kinds: Vec<Kind> = Vec::new();
        for kind in layers.iter().map(Layer::kind) {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        let mut positions = kinds.iter().filter_map(|kind| kind.rope).map(|rope| rope.positions);
        let same_positions = positions.next().is_none_or(|first| positions.all(|other| other == first));
        let alike = same_positions && layers.iter().all(|layer| layer.is_like(&layers[0]));
        let mut operands: Vec<usize> = layers.iter().flat_map(Layer::operands).collect();
        match &embedding {
            Some(embedding) => operands.extend(embedding.operands()),
            None => operands.push(first),
        }
        let outside = operands.into_iter().all(|value| value < region.operands());
        (only_these && alike && outside && !layers.is_empty()).then_some(Self {
            embedding,
            layers,
            kinds,
            x: first,
            result,
        })
    }

    /// The first layer; all others have the same shapes, and the same attributes but for the kind of attention.
    pub(super) fn first(&self) -> &Layer {
        &self.layers[0]
    }

    /// The index of a layer's kind of attention.
    pub(super) fn kind_of(&self, layer: &Layer) -> usize {
        self.kinds.iter().position(|kind| *kind == layer.kind()).unwrap_or(0)
    }
}

/// Reads the sum of two values without further operands, and returns them and the result.
fn read_add(reader: &mut BodyReader<'_>) -> Option<(Add, [usize; 2], usize)> {
    let (add, call) = reader.take(|op| if let Op::Add(op) = op { Some(*op) } else { None })?;
    let plain = (2..call.operands.len()).all(|index| value(call, index).is_none());
    plain.then_some((add, [value(call, 0)?, value(call, 1)?], made(call, 0)?))
}

impl Embedding {
    /// Reads an embedding, and returns its result.
    fn read(reader: &mut BodyReader<'_>) -> Option<(Self, usize)> {
        let (op, call) = reader.take(|op| if let Op::Embed(op) = op { Some(*op) } else { None })?;
        let positions = value(call, 2).zip(value(call, 3));
        let (ids, table, mut x, mut alpha) = (value(call, 0)?, value(call, 1)?, made(call, 0)?, 0.0);
        let mut behind = *reader;
        if let Some((add, operands, sum)) = read_add(&mut behind)
            && operands == [x, x]
        {
            (x, alpha, *reader) = (sum, add.alpha, behind);
        }
        Some((Self { ids, table, positions, op, alpha }, x))
    }

    fn operands(&self) -> impl Iterator<Item = usize> {
        let positions = self.positions.into_iter().flat_map(|(positions, table)| [positions, table]);
        [self.ids, self.table].into_iter().chain(positions)
    }
}

impl Layer {
    /// Reads a layer with input `x`; returns its caches and its result.
    fn read(reader: &mut BodyReader<'_>, x: usize) -> Option<(Self, [usize; 2], usize)> {
        // The norm in front of attention may also be that of an MLP beside it.
        let normed = Norm::read(&mut { *reader }).flatten().map(|(_, _, normed)| normed);
        let (input, results) = FusedLinear::read(reader)?;
        let (&[query, keys, values], Epilogue::Heads(heads)) = (&results[..], input.epilogue) else {
            return None;
        };
        let (attention, attended) = Attention::read(reader, [query, keys, values])?;
        let mut beside = *reader;
        let behind = match BehindAttention::read_parallel(&mut beside, attended, x, &input, normed) {
            Some(behind) => {
                *reader = beside;
                behind
            }
            None => BehindAttention::read(reader, attended, x)?,
        };
        let BehindAttention { output, up, down, experts, post_norms, summed, parallel, result } = behind;
        let normed = match [&input, &up].map(|product| product.norm.is_some()) {
            [true, true] => true,
            [false, false] => post_norms.is_some(),
            _ => false,
        };
        let quantised = [&input, &output, &up, &down].iter().any(|product| product.scales.is_some());
        let taken = normed && !quantised && input.x == x;
        let layer = Self { input, heads, attention, output, up, down, experts, post_norms, summed, parallel };
        taken.then_some((layer, [keys, values], result))
    }

    /// The kind of its attention.
    pub(super) fn kind(&self) -> Kind {
        Kind { op: self.attention.op, rope: self.heads.rope }
    }

    /// The products: query, key and value; output; both halves of the MLP.
    pub(super) fn products(&self) -> [&FusedLinear; 4] {
        [&self.input, &self.output, &self.up, &self.down]
    }

    /// The operands besides the hidden state.
    fn operands(&self) -> Vec<usize> {
        let Attention { start, length, total, table, sinks, .. } = self.attention;
        let mut operands = vec![start, length, total, table, self.heads.slots];
        operands.extend(sinks);
        operands.extend(self.heads.caches);
        operands.extend(self.heads.rope.into_iter().flat_map(|rope| [rope.positions, rope.frequencies]));
        operands.extend(self.heads.norms.into_iter().flatten().map(|(_, weight)| weight));
        for product in self.products() {
            operands.push(product.weight);
            operands.extend(product.bias);
            operands.extend(product.norm.into_iter().flat_map(|norm| [norm.weight(), norm.bias()]).flatten());
        }
        operands.extend(self.experts.iter().flat_map(Experts::operands));
        operands
            .extend(self.post_norms.iter().flatten().flat_map(|norm| [norm.weight(), norm.bias()]).flatten());
        operands
    }

    /// Whether another layer differs only in its weights, its caches and the kind of its attention.
    fn is_like(&self, other: &Self) -> bool {
        let attention = |layer: &Self| {
            let Attention { op, start, length, total, table, sinks } = layer.attention;
            (PagedAttention { scale: 0.0, window: 0, ..op }, [start, length, total, table], sinks.is_some())
        };
        let post_norms = |layer: &Self| layer.post_norms.map(|norms| norms.map(Norm::scalars));
        let norms = |layer: &Self| {
            layer
                .heads
                .norms
                .map(|norms| norms.map(|(norm, _)| [norm.eps, norm.weight_offset].map(f32::to_bits)))
        };
        let heads = |layer: &Self| (layer.heads.columns, layer.heads.slots, norms(layer));
        let experts = |layer: &Self| {
            let rule = |experts: Experts| (experts.route, experts.count, experts.logits);
            let vectors = |experts: Experts| experts.all_vectors().map(|vector| vector.is_some());
            layer.experts.map(|experts| (rule(experts), vectors(experts)))
        };
        let products = self.products().into_iter().zip(other.products());
        let alike = |(a, b): (&FusedLinear, &FusedLinear)| {
            a.scalars() == b.scalars()
                && a.norm.map(Norm::scalars) == b.norm.map(Norm::scalars)
                && a.bias.is_some() == b.bias.is_some()
                && std::mem::discriminant(&a.epilogue) == std::mem::discriminant(&b.epilogue)
                && a.function() == b.function()
        };
        attention(self) == attention(other)
            && post_norms(self) == post_norms(other)
            && (self.summed, self.parallel) == (other.summed, other.parallel)
            && heads(self) == heads(other)
            && experts(self) == experts(other)
            && products.into_iter().all(alike)
    }
}

/// The calls of a layer behind its attention.
struct BehindAttention {
    output: FusedLinear,
    up: FusedLinear,
    down: FusedLinear,
    experts: Option<Experts>,
    post_norms: Option<[Norm; 2]>,
    summed: bool,
    parallel: bool,
    /// The layer's result.
    result: usize,
}

impl BehindAttention {
    /// Reads the sum of the result of attention and the token `x`, and an MLP of this sum.
    fn read(reader: &mut BodyReader<'_>, attended: usize, x: usize) -> Option<Self> {
        let Sum { product: output, norm: output_norm, summed, result: middle } =
            Sum::read(reader, attended, x)?;
        let mut dense = *reader;
        let (up, down, down_norm, down_summed, experts, result) = match Self::read_mlp(&mut dense, middle) {
            Some((up, Sum { product, norm, summed, result })) => {
                *reader = dense;
                (up, product, norm, summed, None, result)
            }
            None => {
                let (up, down, experts, summed, result) = Experts::read(reader, middle)?;
                (up, down, None, summed, experts, result)
            }
        };
        let post_norms = match (output_norm, down_norm) {
            (Some(output), Some(down)) => Some([output, down]),
            (None, None) => None,
            _ => return None,
        };
        let taken = up.x == middle && summed == down_summed;
        let parallel = false;
        taken.then_some(Self { output, up, down, experts, post_norms, summed, parallel, result })
    }

    /// Reads both halves of an MLP with input `middle`.
    fn read_mlp(reader: &mut BodyReader<'_>, middle: usize) -> Option<(FusedLinear, Sum)> {
        let (up, results) = FusedLinear::read(reader)?;
        let down = Sum::read(reader, *results.first()?, middle)?;
        is_activated(&up).then_some((up, down))
    }

    /// Reads a product of the result of attention, an MLP of the token `x`, and the sum of both results and the token. The MLP has a norm
    /// of its own, or shares that of `input`, whose result is `normed`.
    fn read_parallel(
        reader: &mut BodyReader<'_>,
        attended: usize,
        x: usize,
        input: &FusedLinear,
        normed: Option<usize>,
    ) -> Option<Self> {
        let (output, of_attention) = FusedLinear::read(reader)?;
        let (mut up, inner) = FusedLinear::read(reader)?;
        if up.norm.is_none() && Some(up.x) == normed {
            (up.norm, up.x) = (input.norm, input.x);
        }
        let (mut down, of_mlp) = FusedLinear::read(reader)?;
        let (add, call) = reader.take(|op| if let Op::Add(op) = op { Some(*op) } else { None })?;
        let added = [0, 1, 2].map(|index| value(call, index));
        let plain = [&output, &down]
            .iter()
            .all(|product| product.norm.is_none() && matches!(product.epilogue, Epilogue::Nothing));
        let flows = (output.x, up.x, down.x) == (attended, x, *inner.first()?)
            && added == [Some(x), of_attention.first().copied(), of_mlp.first().copied()]
            && value(call, 3).is_none();
        down.epilogue = Epilogue::Sum(add, x);
        let taken = plain && flows && is_activated(&up);
        let (experts, post_norms, summed, parallel) = (None, None, false, true);
        let result = made(call, 0)?;
        taken.then_some(Self { output, up, down, experts, post_norms, summed, parallel, result })
    }
}

/// Whether a product is the first half of an MLP.
fn is_activated(up: &FusedLinear) -> bool {
    match up.epilogue {
        Epilogue::Gate(op) => op.layout == GateLayout::Concatenated,
        Epilogue::Activation(_) => true,
        _ => false,
    }
}

/// A product, optionally with the sum of its result over ranks and the norm of that, and the residual sum.
struct Sum {
    product: FusedLinear,
    summed: bool,
    norm: Option<Norm>,
    result: usize,
}

impl Sum {
    /// Reads a product of `x` that is added to `residual`. The epilogue of the product is the residual sum, even if something is
    /// between them.
    fn read(reader: &mut BodyReader<'_>, x: usize, residual: usize) -> Option<Self> {
        let (mut product, results) = FusedLinear::read(reader)?;
        let (mut norm, mut summed, mut result) = (None, false, *results.first()?);
        if let Epilogue::Nothing = product.epilogue {
            if let Some(sum) = read_sum_over_ranks(reader, result) {
                (summed, result) = (true, sum);
            }
            let mut behind = *reader;
            if let Some((read, of, normed)) = Norm::read(&mut behind).flatten() {
                if of != result {
                    return None;
                }
                (norm, result, *reader) = (Some(read), normed, behind);
            }
            let (add, operands, sum) = read_add(reader)?;
            if operands[1] != result || !summed && norm.is_none() {
                return None;
            }
            product.epilogue = Epilogue::Sum(add, operands[0]);
            result = sum;
        }
        let added = matches!(product.epilogue, Epilogue::Sum(_, other) if other == residual);
        (product.x == x && added && product.norm.is_none()).then_some(Self { product, summed, norm, result })
    }
}

/// Reads the sum of `x` over the ranks of a group, and returns it.
pub(super) fn read_sum_over_ranks(reader: &mut BodyReader<'_>, x: usize) -> Option<usize> {
    let of_x = |call: &Call| value(call, 0) == Some(x);
    let next = reader.peek().filter(|call| of_x(call))?;
    matches!(next.op, Op::AllReduce(AllReduce { reduction: Reduction::Sum, .. })).then_some(())?;
    let ((), call) = reader.take(|_| Some(()))?;
    made(call, 0)
}

impl Attention {
    /// Reads attention with this query and these caches, and returns its result.
    fn read(reader: &mut BodyReader<'_>, operands: [usize; 3]) -> Option<(Self, usize)> {
        let (op, call) = reader.take(|op| if let Op::PagedAttention(op) = op { Some(*op) } else { None })?;
        let over_these = (0..3).all(|index| value(call, index) == Some(operands[index]));
        let plain =
            op.mask == AttentionMask::Causal || op.mask == AttentionMask::Bidirectional && op.window == 0;
        let mut others = (8..call.operands.len()).filter(|index| *index != SINKS);
        if !over_these || !plain || others.any(|index| value(call, index).is_some()) {
            return None;
        }
        let [start, length, total, table] =
            [value(call, 3)?, value(call, 4)?, value(call, 5)?, value(call, 6)?];
        Some((Self { op, start, length, total, table, sinks: value(call, SINKS) }, made(call, 0)?))
    }
}
