//! A linear layer with the preceding norm and its epilogue: the regions of a decoder layer.
//!
//! A body is read as an optional norm, a linear layer, and an optional epilogue: a residual sum, an activation, or the split into
//! heads of queries, keys and values.

pub(in crate::ops) use crate::ops::norm::front::Norm;
use crate::ops::{
    body::{BodyReader, made, value},
    bound::Bound,
    frame::Frame,
};
use dsrun_core::{
    DType, Result,
    kernels::CallDesc,
    op::{Activation, Add, GateLayout, GatedActivation, Nonlinearity, Op, RmsNorm, Rope, RopePairing},
    program::Call,
    region::Region,
};
use std::ops::Range;

/// The rotary embedding of queries and keys, with the indices of its operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::ops) struct RopeParams {
    pub(in crate::ops) pairing: RopePairing,
    pub(in crate::ops) scales: [f32; 2],
    pub(in crate::ops) positions: usize,
    pub(in crate::ops) frequencies: usize,
}

/// An epilogue that splits a product into heads of queries, keys and values, and writes keys and values to the KV cache.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Heads {
    /// Norms of queries and keys, with their weight operands: of each head, or over all heads ([`NormSpan`]).
    pub(in crate::ops) norms: Option<[(RmsNorm, usize); 2]>,
    pub(in crate::ops) rope: Option<RopeParams>,
    /// The operands that are the caches of keys and values.
    pub(in crate::ops) caches: [usize; 2],
    /// The operand with the slots of the rows.
    pub(in crate::ops) slots: usize,
    /// Columns of queries, keys and values.
    pub(in crate::ops) columns: [usize; 3],
}

/// What the norms of queries and keys cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum NormSpan {
    EachHead,
    AllHeads,
}

/// The calls that follow a product in the same region.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) enum Epilogue {
    Nothing,
    /// The product is added to a residual, which is this operand.
    Sum(Add, usize),
    Activation(Activation),
    Gate(GatedActivation),
    Heads(Heads),
}

/// A linear layer with the preceding norm and its epilogue. Numbers are indices of the call's operands.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct FusedLinear {
    pub(in crate::ops) norm: Option<Norm>,
    pub(in crate::ops) x: usize,
    /// Scales of the rows of `x`, if activations are int8.
    pub(in crate::ops) scales: Option<usize>,
    pub(in crate::ops) weight: usize,
    pub(in crate::ops) bias: Option<usize>,
    /// Element type of the product.
    pub(in crate::ops) product: DType,
    pub(in crate::ops) epilogue: Epilogue,
}

impl Epilogue {
    /// Reads the epilogue of a product from the next calls of a body. Also returns the value ids of its results.
    fn read(reader: &mut BodyReader<'_>, product: usize) -> Option<(Self, Vec<usize>)> {
        if let Some(heads) = Heads::read(reader, product) {
            return heads;
        }
        let Some(call) = reader.peek() else { return Some((Self::Nothing, vec![product])) };
        let epilogue = match &call.op {
            Op::Add(op) if value(call, 1) == Some(product) && absent(call, 2..4) => {
                value(call, 0).map(|residual| Self::Sum(*op, residual))
            }
            Op::Activation(op) if value(call, 0) == Some(product) && absent(call, 1..2) => {
                Some(Self::Activation(*op))
            }
            Op::GatedActivation(op)
                if value(call, 0) == Some(product)
                    && absent(call, 1..3)
                    && op.up_offset == 0.0
                    && op.layout != GateLayout::Separate =>
            {
                Some(Self::Gate(*op))
            }
            _ => None,
        };
        let Some(epilogue) = epilogue else { return Some((Self::Nothing, vec![product])) };
        reader.take(|_| Some(()))?;
        Some((epilogue, vec![made(call, 0)?]))
    }
}

/// Whether these operands of a call are absent.
fn absent(call: &Call, operands: Range<usize>) -> bool {
    operands.into_iter().all(|index| value(call, index).is_none())
}

impl Heads {
    /// Reads the split of a product into heads, and the value ids of the query and both caches. The outer `None` means that the
    /// next call does not take columns of the product, the inner `None` that no kernel supports the heads.
    #[allow(
        clippy::option_option,
        reason = "no heads, and heads that no kernel supports, are different results"
    )]
    fn read(reader: &mut BodyReader<'_>, product: usize) -> Option<Option<(Epilogue, Vec<usize>)>> {
        let first = reader.peek()?;
        let columns = matches!(first.op, Op::Columns(_)) && value(first, 0) == Some(product);
        columns.then(|| Self::read_columns(reader, product))
    }

    fn read_columns(reader: &mut BodyReader<'_>, product: usize) -> Option<(Epilogue, Vec<usize>)> {
        let mut columns = [0; 3];
        let mut values = [product; 3];
        let mut start = 0;
        for (count, part) in columns.iter_mut().zip(&mut values) {
            let (op, call) = reader.take(|op| if let Op::Columns(op) = op { Some(*op) } else { None })?;
            if value(call, 0) != Some(product) || op.start as usize != start {
                return None;
            }
            *count = op.count as usize;
            *part = made(call, 0)?;
            start += *count;
        }
        let [mut query, mut key, values] = values;
        let rms = |op: &Op| if let Op::RmsNorm(op) = op { Some(*op) } else { None };
        let mut norms = None;
        if let Some((first, call)) = reader.take(rms) {
            let (second, other) = reader.take(rms)?;
            if (value(call, 0), value(other, 0)) != (Some(query), Some(key)) {
                return None;
            }
            norms = Some([(first, value(call, 1)?), (second, value(other, 1)?)]);
            (query, key) = (made(call, 0)?, made(other, 0)?);
        }
        let rotation = |op: &Op| if let Op::Rope(op) = op { Some(*op) } else { None };
        let mut rope = None;
        if let Some((first, call)) = reader.take(rotation) {
            let (second, other): (Rope, _) = reader.take(rotation)?;
            let alike = (1..3).all(|index| value(call, index) == value(other, index));
            if (value(call, 0), value(other, 0)) != (Some(query), Some(key))
                || !alike
                || first.pairing != second.pairing
            {
                return None;
            }
            rope = Some(RopeParams {
                pairing: first.pairing,
                scales: [first.scale, second.scale],
                positions: value(call, 1)?,
                frequencies: value(call, 2)?,
            });
            (query, key) = (made(call, 0)?, made(other, 0)?);
        }
        let (_, call) = reader.take(|op| matches!(op, Op::KvWrite(_)).then_some(()))?;
        if (value(call, 2), value(call, 3)) != (Some(key), Some(values)) {
            return None;
        }
        let caches = [value(call, 0)?, value(call, 1)?];
        let slots = value(call, 4)?;
        let results = vec![query, made(call, 0)?, made(call, 1)?];
        Some((Epilogue::Heads(Self { norms, rope, caches, slots, columns }), results))
    }
}

impl FusedLinear {
    /// A plain linear layer, with operands `x`, `weight`, `bias`.
    pub(super) fn of_linear(call: &CallDesc, product: DType) -> Self {
        let bias = call.tensor(2).map(|_| 2);
        Self { norm: None, x: 0, scales: None, weight: 1, bias, product, epilogue: Epilogue::Nothing }
    }

    /// A plain int8 linear layer, with operands `x`, `scales`, `weight`, `bias`.
    pub(super) fn of_linear_w8a8(call: &CallDesc, product: DType) -> Self {
        let bias = call.tensor(3).map(|_| 3);
        Self { norm: None, x: 0, scales: Some(1), weight: 2, bias, product, epilogue: Epilogue::Nothing }
    }

    /// Reads a region whose whole body is a fused linear layer; its operands are those of the region.
    pub(in crate::ops) fn of_region(region: &Region) -> Option<Self> {
        let mut reader = BodyReader::new(region);
        let (fused, results) = Self::read(&mut reader)?;
        let whole = reader.is_done() && region.results().iter().map(|value| value.index()).eq(results);
        (whole && fused.values().all(|value| value < region.operands())).then_some(fused)
    }

    /// Reads the longest fused linear layer from the next calls of a body, and the value ids of its results. Its operands may be
    /// any values of the body.
    pub(in crate::ops) fn read(reader: &mut BodyReader<'_>) -> Option<(Self, Vec<usize>)> {
        let norm = match Norm::read(reader) {
            Some(norm) => Some(norm?),
            None => None,
        };
        // The element type of the product, and whether its activations are quantised.
        let ((dtype, quantised), call) = reader.take(|op| match op {
            Op::Linear(op) => Some((op.dtype, false)),
            Op::LinearW8A8(op) if norm.is_none() => Some((op.dtype, true)),
            _ => None,
        })?;
        let x = value(call, 0)?;
        let (norm, x) = match norm {
            Some((norm, input, normed)) if normed == x => (Some(norm), input),
            Some(_) => return None,
            None => (None, x),
        };
        let scales = if quantised { Some(value(call, 1)?) } else { None };
        let weight = 1 + usize::from(quantised);
        let (weight, bias) = (value(call, weight)?, value(call, weight + 1));
        let (epilogue, results) = Epilogue::read(reader, made(call, 0)?)?;
        Some((Self { norm, x, scales, weight, bias, product: dtype, epilogue }, results))
    }

    /// The scale of the product in a residual sum, and the limit and the offset of an activation: `alpha`, `limit` and `up_offset`
    /// of the kernels.
    pub(in crate::ops) fn scalars(&self) -> [f32; 3] {
        match self.epilogue {
            Epilogue::Nothing | Epilogue::Heads(_) => [0.0; 3],
            Epilogue::Sum(op, _) => [op.alpha, 0.0, 0.0],
            Epilogue::Activation(op) => [0.0, op.limit, 0.0],
            Epilogue::Gate(op) => [0.0, op.limit, op.up_offset],
        }
    }

    /// The number of its activation function; the identity if it has none.
    pub(in crate::ops) fn function(&self) -> u32 {
        match self.epilogue {
            Epilogue::Activation(op) => op.function as u32,
            Epilogue::Gate(op) => op.function as u32,
            _ => Nonlinearity::Relu as u32,
        }
    }

    /// The values that it reads.
    fn values(&self) -> impl Iterator<Item = usize> {
        let mut values = vec![self.x, self.weight];
        values.extend(self.scales.into_iter().chain(self.bias));
        values.extend(self.norm.into_iter().flat_map(|norm| [norm.weight(), norm.bias()]).flatten());
        match self.epilogue {
            Epilogue::Nothing | Epilogue::Activation(_) | Epilogue::Gate(_) => {}
            Epilogue::Sum(_, residual) => values.push(residual),
            Epilogue::Heads(heads) => {
                values.extend(heads.norms.into_iter().flatten().map(|(_, weight)| weight));
                values.extend(heads.rope.into_iter().flat_map(|rope| [rope.positions, rope.frequencies]));
                values.extend(heads.caches.into_iter().chain([heads.slots]));
            }
        }
        values.into_iter()
    }

    /// The operands over rows, whose extents bound the rows of the product.
    pub(super) fn row_operands<'a>(&self, frame: &'a Frame) -> Result<Vec<&'a Bound>> {
        let mut operands = vec![self.x];
        operands.extend(self.scales);
        match self.epilogue {
            Epilogue::Sum(_, residual) => operands.push(residual),
            Epilogue::Heads(heads) => {
                operands.push(heads.slots);
                operands.extend(heads.rope.map(|rope| rope.positions));
            }
            _ => {}
        }
        operands.into_iter().map(|index| frame.tensor(index)).collect()
    }
}
