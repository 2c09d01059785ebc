//! Named regions, which passes make and backends have kernels for.
//!
//! Absent operands are omitted, and later ones move up. A constructor fails only if its attributes are incompatible; types are
//! checked when the region is called.

use super::Region;
use crate::{
    DType, Error, Result,
    op::{
        Activation, Add, AllReduce, Columns, GateLayout, GatedActivation, KvWrite, LayerNorm, Linear,
        LinearW8A8, Op, QuantPerToken, RmsNorm, Rope,
    },
    program::{Call, ValueId},
};

/// The norm at the beginning of a region.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// A root-mean-square norm, with a weight.
    Rms(RmsNorm),
    /// A layer norm, with a weight and a bias.
    Layer(LayerNorm),
}

impl From<RmsNorm> for Norm {
    fn from(norm: RmsNorm) -> Self {
        Self::Rms(norm)
    }
}

impl From<LayerNorm> for Norm {
    fn from(norm: LayerNorm) -> Self {
        Self::Layer(norm)
    }
}

impl Norm {
    /// The norm of an op, if the op is one.
    pub fn of(op: &Op) -> Option<Self> {
        match op {
            Op::RmsNorm(norm) => Some(Self::Rms(*norm)),
            Op::LayerNorm(norm) => Some(Self::Layer(*norm)),
            _ => None,
        }
    }

    /// The number of operands after `x`.
    pub fn vectors(self) -> usize {
        match self {
            Self::Rms(_) => 1,
            Self::Layer(_) => 2,
        }
    }
}

/// The activation between the two projections of an MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MlpActivation {
    /// A plain activation of each feature.
    Plain(Activation),
    /// A gated activation whose halves are in one product; the layout is not `separate`.
    Gated(GatedActivation),
}

impl From<Activation> for MlpActivation {
    fn from(activation: Activation) -> Self {
        Self::Plain(activation)
    }
}

impl From<GatedActivation> for MlpActivation {
    fn from(activation: GatedActivation) -> Self {
        Self::Gated(activation)
    }
}

/// A builder of bodies, which numbers the operands first, then the results of each call.
struct Body {
    operands: usize,
    next: usize,
    calls: Vec<Call>,
}

impl Body {
    /// An empty body with operands `0 .. operands`.
    fn new(operands: usize) -> Self {
        Self { operands, next: operands, calls: Vec::new() }
    }

    /// Adds a call, and returns the number of its first result.
    fn call<const N: usize>(&mut self, op: impl Into<Op>, operands: [Option<usize>; N]) -> usize {
        let op = op.into();
        let results = op.signature().map_or(1, |signature| signature.results.len());
        let first = self.next;
        self.next += results;
        let operands = operands.map(|operand| operand.map(ValueId::new)).into();
        self.calls.push(Call::new(op, operands, (first..self.next).map(ValueId::new).collect()));
        first
    }

    /// Adds the norm of operand 0, whose weight and bias are the operands after it.
    fn norm(&mut self, norm: Norm) -> usize {
        match norm {
            Norm::Rms(norm) => self.call(norm, [Some(0), Some(1)]),
            Norm::Layer(norm) => self.call(norm, [Some(0), Some(1), Some(2)]),
        }
    }

    /// Adds the linear layer of `x`, whose weight and bias are the operands from `weight` on.
    fn linear(&mut self, dtype: DType, x: usize, weight: usize, bias: bool) -> usize {
        self.call(Linear { dtype }, [Some(x), Some(weight), bias.then_some(weight + 1)])
    }

    /// Adds the linear layer of quantised `x`, whose scales are the value after it, and whose weight and bias are the operands
    /// from `x + 2` on.
    fn linear_w8a8(&mut self, dtype: DType, x: usize, bias: bool) -> usize {
        self.call(LinearW8A8 { dtype }, [Some(x), Some(x + 1), Some(x + 2), bias.then_some(x + 3)])
    }

    /// Adds the activation after the first projection of an MLP.
    fn activated(&mut self, activation: MlpActivation, product: usize, region: &str) -> Result<usize> {
        match activation {
            MlpActivation::Plain(activation) => Ok(self.call(activation, [Some(product), None])),
            MlpActivation::Gated(activation) if activation.layout == GateLayout::Separate => {
                Err(Error::invalid("is separate, but the halves must be in one product")
                    .at("layout")
                    .in_op(region))
            }
            MlpActivation::Gated(activation) => Ok(self.call(activation, [Some(product), None, None])),
        }
    }

    /// Adds the quantisation of `x`, whose scales are the value after the result.
    fn quantised(&mut self, x: usize) -> usize {
        self.call(QuantPerToken {}, [Some(x)])
    }

    /// Adds the calls after the projection of queries, keys and values, whose operands are those from `first` on. Returns the query
    /// and the caches.
    fn heads(&mut self, heads: Heads, product: usize, first: usize, region: &str) -> Result<[usize; 3]> {
        let positions = first + if heads.head_norms.is_some() { 2 } else { 0 };
        let caches = positions + if heads.ropes.is_some() { 2 } else { 0 };
        let mut parts = [0; 3];
        let mut start = 0u32;
        for (part, count) in parts.iter_mut().zip(heads.columns) {
            *part = self.call(Columns { start, count }, [Some(product)]);
            start = start
                .checked_add(count)
                .ok_or_else(|| Error::invalid("exceed 32 bits").at("columns").in_op(region))?;
        }
        let [mut query, mut key, value] = parts;
        if let Some([query_norm, key_norm]) = heads.head_norms {
            query = self.call(query_norm, [query, first].map(Some));
            key = self.call(key_norm, [key, first + 1].map(Some));
        }
        if let Some([query_rope, key_rope]) = heads.ropes {
            query = self.call(query_rope, [query, positions, positions + 1].map(Some));
            key = self.call(key_rope, [key, positions, positions + 1].map(Some));
        }
        let written = self.call(KvWrite {}, [caches, caches + 1, key, value, caches + 2].map(Some));
        Ok([query, written, written + 1])
    }

    fn finish<const N: usize>(self, name: &str, results: [usize; N]) -> Result<Region> {
        Region::new(name, self.operands, self.calls, results.map(ValueId::new).into())
    }
}

/// Residual sum and norm: operands `a, b, weight`; results `r = add(a, b)`, `y = rms_norm(r, weight)`.
///
/// The norm may read the sum before it is rounded.
///
/// # Errors
/// Never, because the body is valid.
pub fn add_rms_norm(add: Add, norm: RmsNorm) -> Result<Region> {
    let mut body = Body::new(3);
    let sum = body.call(add, [Some(0), Some(1), None, None]);
    let normed = body.call(norm, [Some(sum), Some(2)]);
    body.finish("add_rms_norm", [sum, normed])
}

/// Norm and linear layer: operands `x, norm_weight, norm_bias?, weight, bias?`; result `y`.
///
/// # Errors
/// Never, because the body is valid.
pub fn norm_linear(norm: impl Into<Norm>, dtype: DType, bias: bool) -> Result<Region> {
    let norm = norm.into();
    let weight = 1 + norm.vectors();
    let mut body = Body::new(weight + 1 + usize::from(bias));
    let normed = body.norm(norm);
    let y = body.linear(dtype, normed, weight, bias);
    body.finish("norm_linear", [y])
}

/// Linear layer and residual sum: operands `x, weight, bias?, residual`; result `add(residual, linear(x, weight, bias))`.
///
/// # Errors
/// Never, because the body is valid.
pub fn linear_add(dtype: DType, bias: bool, add: Add) -> Result<Region> {
    let residual = 2 + usize::from(bias);
    let mut body = Body::new(residual + 1);
    let y = body.linear(dtype, 0, 1, bias);
    let sum = body.call(add, [Some(residual), Some(y), None, None]);
    body.finish("linear_add", [sum])
}

/// Linear layer whose inputs are divided among ranks, and the reduction of its products: operands `x, weight, bias?`; result
/// `all_reduce(linear(x, weight, bias))`.
///
/// Products may be added before they are rounded.
///
/// # Errors
/// Never, because the body is valid.
pub fn linear_all_reduce(dtype: DType, bias: bool, reduce: AllReduce) -> Result<Region> {
    let mut body = Body::new(2 + usize::from(bias));
    let y = body.linear(dtype, 0, 1, bias);
    let reduced = body.call(reduce, [Some(y)]);
    body.finish("linear_all_reduce", [reduced])
}

/// As [`linear_all_reduce`], and a residual sum: operands `x, weight, bias?, residual`; result `add(residual, all_reduce(linear(x,
/// weight, bias)))`.
///
/// # Errors
/// Never, because the body is valid.
pub fn linear_all_reduce_add(dtype: DType, bias: bool, reduce: AllReduce, add: Add) -> Result<Region> {
    let residual = 2 + usize::from(bias);
    let mut body = Body::new(residual + 1);
    let y = body.linear(dtype, 0, 1, bias);
    let reduced = body.call(reduce, [Some(y)]);
    let sum = body.call(add, [Some(residual), Some(reduced), None, None]);
    body.finish("linear_all_reduce_add", [sum])
}

/// The first half of an MLP: operands `x, norm_weight, norm_bias?, weight, bias?`; result `activated`. The halves of a gated
/// activation are in one product.
///
/// # Errors
/// If the layout of a gated activation is `separate`.
pub fn mlp_input(
    norm: impl Into<Norm>,
    dtype: DType,
    bias: bool,
    activation: impl Into<MlpActivation>,
) -> Result<Region> {
    let norm = norm.into();
    let weight = 1 + norm.vectors();
    let mut body = Body::new(weight + 1 + usize::from(bias));
    let normed = body.norm(norm);
    let product = body.linear(dtype, normed, weight, bias);
    let activated = body.activated(activation.into(), product, "mlp_input")?;
    body.finish("mlp_input", [activated])
}

/// Norm and quantisation for the linear layers after it: operands `x, norm_weight, norm_bias?`; results `y, scales`.
///
/// # Errors
/// Never, because the body is valid.
pub fn norm_quant(norm: impl Into<Norm>) -> Result<Region> {
    let norm = norm.into();
    let mut body = Body::new(1 + norm.vectors());
    let normed = body.norm(norm);
    let quantised = body.quantised(normed);
    body.finish("norm_quant", [quantised, quantised + 1])
}

/// The activation of an MLP, quantised for the linear layer after it: operands `x`, or `gate, up` if they are separate; results
/// `y, scales`.
///
/// # Errors
/// Never, because the body is valid.
pub fn activation_quant(activation: impl Into<MlpActivation>) -> Result<Region> {
    let activation = activation.into();
    let separate = matches!(activation, MlpActivation::Gated(gated) if gated.layout == GateLayout::Separate);
    let mut body = Body::new(1 + usize::from(separate));
    let (name, activated) = match activation {
        MlpActivation::Plain(activation) => ("activation_quant", body.call(activation, [Some(0), None])),
        MlpActivation::Gated(activation) => {
            ("gated_activation_quant", body.call(activation, [Some(0), separate.then_some(1), None]))
        }
    };
    let quantised = body.quantised(activated);
    body.finish(name, [quantised, quantised + 1])
}

/// As [`linear_add`] over quantised activations: operands `x, scales, weight, bias?, residual`; result `add(residual,
/// linear_w8a8(x, scales, weight, bias))`.
///
/// # Errors
/// Never, because the body is valid.
pub fn linear_w8a8_add(dtype: DType, bias: bool, add: Add) -> Result<Region> {
    let residual = 3 + usize::from(bias);
    let mut body = Body::new(residual + 1);
    let y = body.linear_w8a8(dtype, 0, bias);
    let sum = body.call(add, [Some(residual), Some(y), None, None]);
    body.finish("linear_w8a8_add", [sum])
}

/// The first projection of an MLP over quantised activations, and its activation: operands `x, scales, weight, bias?`; result
/// `activated`. The halves of a gated activation are in one product.
///
/// # Errors
/// If the layout of a gated activation is `separate`.
pub fn linear_w8a8_activation(
    dtype: DType,
    bias: bool,
    activation: impl Into<MlpActivation>,
) -> Result<Region> {
    let mut body = Body::new(3 + usize::from(bias));
    let product = body.linear_w8a8(dtype, 0, bias);
    let activated = body.activated(activation.into(), product, "linear_w8a8_activation")?;
    body.finish("linear_w8a8_activation", [activated])
}

/// The queries, keys and values in the result of one projection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// The columns of queries, keys and values, in this order: heads times head size.
    pub columns: [u32; 3],
    /// The norm of each head of queries and keys.
    pub head_norms: Option<[RmsNorm; 2]>,
    /// The rotary embedding of queries and keys.
    pub ropes: Option<[Rope; 2]>,
}

impl Heads {
    /// The number of their operands: `(query_norm, key_norm)?, (positions, inverse_frequencies)?, key_cache, value_cache, slots`.
    fn operands(&self) -> usize {
        3 + [self.head_norms.is_some(), self.ropes.is_some()]
            .map(|pair| 2 * usize::from(pair))
            .iter()
            .sum::<usize>()
    }

    /// Recognises the ops that [`Body::heads`] adds.
    fn of(ops: &[&Op]) -> Option<Self> {
        let [Op::Columns(query), Op::Columns(key), Op::Columns(value), between @ .., Op::KvWrite(_)] = ops
        else {
            return None;
        };
        let (head_norms, ropes) = match between {
            [] => (None, None),
            [Op::RmsNorm(query), Op::RmsNorm(key)] => (Some([*query, *key]), None),
            [Op::Rope(query), Op::Rope(key)] => (None, Some([*query, *key])),
            [Op::RmsNorm(query_norm), Op::RmsNorm(key_norm), Op::Rope(query_rope), Op::Rope(key_rope)] => {
                (Some([*query_norm, *key_norm]), Some([*query_rope, *key_rope]))
            }
            _ => return None,
        };
        Some(Self { columns: [query.count, key.count, value.count], head_norms, ropes })
    }
}

/// The calls between the input of a decoder layer and its attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionInput {
    /// The norm of the layer input.
    pub norm: Norm,
    /// The element type of the projections.
    pub dtype: DType,
    /// Whether the projections have biases.
    pub bias: bool,
    /// The queries, keys and values of the projections.
    pub heads: Heads,
}

/// The calls between the input of a decoder layer and its attention: norm, one projection of queries, keys and values, norms of
/// heads, rotary embedding, and the cache write.
///
/// Operands `x, norm_weight, norm_bias?, weight, bias?, (query_norm, key_norm)?, (positions, inverse_frequencies)?,
/// key_cache, value_cache, slots`; results `query, key_cache, value_cache`, the caches updated in place.
///
/// # Errors
/// If the number of columns exceeds 32 bits.
pub fn attention_input(input: AttentionInput) -> Result<Region> {
    let weight = 1 + input.norm.vectors();
    let own = weight + 1 + usize::from(input.bias);
    let mut body = Body::new(own + input.heads.operands());
    let normed = body.norm(input.norm);
    let product = body.linear(input.dtype, normed, weight, input.bias);
    let results = body.heads(input.heads, product, own, "attention_input")?;
    body.finish("attention_input", results)
}

/// Queries, keys and values over quantised activations: one projection, norms of heads, rotary embedding, and the cache write.
///
/// Operands `x, scales, weight, bias?, (query_norm, key_norm)?, (positions, inverse_frequencies)?, key_cache, value_cache, slots`;
/// results `query, key_cache, value_cache`, the caches updated in place.
///
/// # Errors
/// If the number of columns exceeds 32 bits.
pub fn linear_w8a8_heads(dtype: DType, bias: bool, heads: Heads) -> Result<Region> {
    let own = 3 + usize::from(bias);
    let mut body = Body::new(own + heads.operands());
    let product = body.linear_w8a8(dtype, 0, bias);
    let results = body.heads(heads, product, own, "linear_w8a8_heads")?;
    body.finish("linear_w8a8_heads", results)
}

/// The named region with the body of `region`, if there is one.
pub fn named(region: &Region) -> Option<Region> {
    let ops: Vec<&Op> = region.calls().iter().map(|call| &call.op).collect();
    let has =
        |call: usize, operand: usize| region.calls()[call].operands.get(operand).is_some_and(Option::is_some);
    let bias = |call: usize| has(call, 2);
    let known = match ops.as_slice() {
        [Op::Activation(activation), Op::QuantPerToken(_)] => activation_quant(*activation),
        [Op::GatedActivation(activation), Op::QuantPerToken(_)] => activation_quant(*activation),
        [norm, Op::QuantPerToken(_)] => norm_quant(Norm::of(norm)?),
        [Op::LinearW8A8(linear), Op::Add(add)] => linear_w8a8_add(linear.dtype, has(0, 3), *add),
        [Op::LinearW8A8(linear), Op::Activation(activation)] => {
            linear_w8a8_activation(linear.dtype, has(0, 3), *activation)
        }
        [Op::LinearW8A8(linear), Op::GatedActivation(activation)] => {
            linear_w8a8_activation(linear.dtype, has(0, 3), *activation)
        }
        [Op::Add(add), Op::RmsNorm(norm)] => add_rms_norm(*add, *norm),
        [Op::Linear(linear), Op::Add(add)] => linear_add(linear.dtype, bias(0), *add),
        [Op::Linear(linear), Op::AllReduce(reduce)] => linear_all_reduce(linear.dtype, bias(0), *reduce),
        [Op::Linear(linear), Op::AllReduce(reduce), Op::Add(add)] => {
            linear_all_reduce_add(linear.dtype, bias(0), *reduce, *add)
        }
        [norm, Op::Linear(linear)] => norm_linear(Norm::of(norm)?, linear.dtype, bias(1)),
        [norm, Op::Linear(linear), Op::Activation(activation)] => {
            mlp_input(Norm::of(norm)?, linear.dtype, bias(1), *activation)
        }
        [norm, Op::Linear(linear), Op::GatedActivation(activation)] => {
            mlp_input(Norm::of(norm)?, linear.dtype, bias(1), *activation)
        }
        [Op::LinearW8A8(linear), heads @ ..] => linear_w8a8_heads(linear.dtype, has(0, 3), Heads::of(heads)?),
        [norm, Op::Linear(linear), heads @ ..] => attention_input(AttentionInput {
            norm: Norm::of(norm)?,
            dtype: linear.dtype,
            bias: bias(1),
            heads: Heads::of(heads)?,
        }),
        _ => return None,
    };
    known.ok().filter(|known| known == region)
}
