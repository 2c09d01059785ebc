//! Recognises decoder layers in the body of a region.

use super::experts::Experts;
use crate::ops::{
    body::{BodyReader, made, value},
    gemm::fused_linear::{Epilogue, FusedLinear, Heads, Norm},
};
use dsrun_core::{
    op::{AttentionMask, Embed, GateLayout, Op, PagedAttention, RopePairing},
    region::Region,
};

/// Decoder layers, with the embedding if the body begins with it. Numbers are value ids of the body: operands of the region, or
/// intermediate values.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) embedding: Option<Embedding>,
    /// The layers; at least one.
    pub(super) layers: Vec<Layer>,
    /// The hidden state before the first layer: an operand, or the result of the embedding.
    pub(super) x: usize,
    /// The index of the region's result that is the hidden state after the last layer.
    pub(super) result: usize,
}

/// An embedding lookup, optionally added to a position embedding.
#[derive(Debug)]
pub(super) struct Embedding {
    pub(super) ids: usize,
    pub(super) table: usize,
    /// Positions, and their table.
    pub(super) positions: Option<(usize, usize)>,
    pub(super) op: Embed,
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
}

/// Attention over pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Attention {
    pub(super) op: PagedAttention,
    pub(super) start: usize,
    pub(super) length: usize,
    pub(super) total: usize,
    pub(super) table: usize,
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
        let alike = layers.iter().all(|layer| layer.is_like(&layers[0]));
        let mut operands: Vec<usize> = layers.iter().flat_map(Layer::operands).collect();
        match &embedding {
            Some(embedding) => operands.extend(embedding.operands()),
            None => operands.push(first),
        }
        let outside = operands.into_iter().all(|value| value < region.operands());
        (only_these && alike && outside && !layers.is_empty()).then_some(Self {
            embedding,
            layers,
            x: first,
            result,
        })
    }

    /// The first layer; all others have the same shapes and attributes.
    pub(super) fn first(&self) -> &Layer {
        &self.layers[0]
    }
}

impl Embedding {
    /// Reads an embedding, and returns its result.
    fn read(reader: &mut BodyReader<'_>) -> Option<(Self, usize)> {
        let (op, call) = reader.take(|op| if let Op::Embed(op) = op { Some(*op) } else { None })?;
        let positions = value(call, 2).zip(value(call, 3));
        Some((Self { ids: value(call, 0)?, table: value(call, 1)?, positions, op }, made(call, 0)?))
    }

    fn operands(&self) -> impl Iterator<Item = usize> {
        let positions = self.positions.into_iter().flat_map(|(positions, table)| [positions, table]);
        [self.ids, self.table].into_iter().chain(positions)
    }
}

impl Layer {
    /// Reads a layer with input `x`; returns its caches and its result.
    fn read(reader: &mut BodyReader<'_>, x: usize) -> Option<(Self, [usize; 2], usize)> {
        let (input, results) = FusedLinear::read(reader)?;
        let (&[query, keys, values], Epilogue::Heads(heads)) = (&results[..], input.epilogue) else {
            return None;
        };
        let (attention, attended) = Attention::read(reader, [query, keys, values])?;
        let (output, middle) = Self::read_sum(reader, attended, x)?;
        let mut dense = *reader;
        let (up, down, experts, y) = match Self::read_mlp(&mut dense, middle) {
            Some((up, down, y)) => {
                *reader = dense;
                (up, down, None, y)
            }
            None => Experts::read(reader, middle)?,
        };
        let normed = input.norm.is_some() && up.norm.is_some();
        let rotated = heads.rope.is_none_or(|rope| rope.pairing == RopePairing::Halves);
        let quantised = [&input, &output, &up, &down].iter().any(|product| product.scales.is_some());
        let flows = (input.x, up.x) == (x, middle);
        let taken = normed && rotated && !quantised && flows;
        taken.then_some((Self { input, heads, attention, output, up, down, experts }, [keys, values], y))
    }

    /// Reads both halves of an MLP with input `middle`, and returns its result.
    fn read_mlp(reader: &mut BodyReader<'_>, middle: usize) -> Option<(FusedLinear, FusedLinear, usize)> {
        let (up, results) = FusedLinear::read(reader)?;
        let (down, y) = Self::read_sum(reader, *results.first()?, middle)?;
        let activated = match up.epilogue {
            Epilogue::Gate(op) => op.layout == GateLayout::Concatenated,
            Epilogue::Activation(_) => true,
            _ => false,
        };
        activated.then_some((up, down, y))
    }

    /// Reads a product of `x` that is added to `residual`, and returns its result.
    fn read_sum(reader: &mut BodyReader<'_>, x: usize, residual: usize) -> Option<(FusedLinear, usize)> {
        let (product, results) = FusedLinear::read(reader)?;
        let added = matches!(product.epilogue, Epilogue::Sum(_, other) if other == residual);
        (product.x == x && added && product.norm.is_none()).then_some((product, *results.first()?))
    }

    /// The products: query, key and value; output; both halves of the MLP.
    pub(super) fn products(&self) -> [&FusedLinear; 4] {
        [&self.input, &self.output, &self.up, &self.down]
    }

    /// The operands besides the hidden state.
    fn operands(&self) -> Vec<usize> {
        let Attention { start, length, total, table, .. } = self.attention;
        let mut operands = vec![start, length, total, table, self.heads.slots];
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
    }

    /// Whether another layer differs only in its weights and caches.
    fn is_like(&self, other: &Self) -> bool {
        let rope =
            |layer: &Self| layer.heads.rope.map(|rope| (rope.scales, rope.positions, rope.frequencies));
        let norms = |layer: &Self| {
            layer
                .heads
                .norms
                .map(|norms| norms.map(|(norm, _)| [norm.eps, norm.weight_offset].map(f32::to_bits)))
        };
        let heads = |layer: &Self| (layer.heads.columns, layer.heads.slots, norms(layer));
        let experts = |layer: &Self| {
            let rule = |experts: Experts| (experts.route, experts.count, experts.logits);
            layer.experts.map(|experts| (rule(experts), experts.vectors.map(|vector| vector.is_some())))
        };
        let products = self.products().into_iter().zip(other.products());
        let alike = |(a, b): (&FusedLinear, &FusedLinear)| {
            a.scalars() == b.scalars()
                && a.norm.map(Norm::scalars) == b.norm.map(Norm::scalars)
                && a.bias.is_some() == b.bias.is_some()
                && std::mem::discriminant(&a.epilogue) == std::mem::discriminant(&b.epilogue)
                && a.function() == b.function()
        };
        self.attention == other.attention
            && rope(self) == rope(other)
            && heads(self) == heads(other)
            && experts(self) == experts(other)
            && products.into_iter().all(alike)
    }
}

impl Attention {
    /// Reads attention with this query and these caches, and returns its result.
    fn read(reader: &mut BodyReader<'_>, operands: [usize; 3]) -> Option<(Self, usize)> {
        let (op, call) = reader.take(|op| if let Op::PagedAttention(op) = op { Some(*op) } else { None })?;
        let over_these = (0..3).all(|index| value(call, index) == Some(operands[index]));
        let plain = op.window == 0 && op.softcap <= 0.0 && op.mask != AttentionMask::Explicit;
        let optional = (8..call.operands.len()).any(|index| value(call, index).is_some());
        if !over_these || !plain || optional {
            return None;
        }
        let [start, length, total, table] =
            [value(call, 3)?, value(call, 4)?, value(call, 5)?, value(call, 6)?];
        Some((Self { op, start, length, total, table }, made(call, 0)?))
    }
}
