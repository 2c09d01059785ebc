//! What calls are in a layer, as far as their descriptions tell: enough to know the kernel, before anything is bound.

use super::{
    CALLS,
    shape::{self, MAX_HEAD, PRODUCTS, Shape},
};
use crate::{
    ops::{
        Machine,
        band::norm_defines,
        chain::{Behind, Chain},
        linear::weight_type,
        operand, type_name,
    },
    spec::KernelSpec,
};
use dsrun_core::{
    DType, Result, WeightFormat,
    kernels::CallDesc,
    op::{AttentionMask, GateLayout, Op, PagedAttention, RopePairing},
};

/// A product of one row with what is in front of it and behind it.
#[derive(Debug)]
pub(super) struct Product {
    pub(super) chain: Chain,
    /// The constants that the kernel of its own would have: layers agree on them.
    pub(super) defines: Vec<(&'static str, String)>,
    pub(super) format: WeightFormat,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// Heads of queries and of keys, sizes of a head's key and value, and pairs that are turned.
    heads: Option<[usize; 5]>,
}

impl Product {
    /// What a call is, if it can be a product of a layer.
    pub(super) fn of(call: &CallDesc) -> Result<Option<Self>> {
        let Op::Region(region) = &call.op else { return Ok(None) };
        let Some(chain) = Chain::parse(region) else { return Ok(None) };
        let (x, described) = (operand(call, chain.x)?, weight_type(call, chain.weight)?);
        let takes = x.shape[0] == 1
            && matches!(x.dtype, DType::F16 | DType::BF16)
            && shape::takes(described.format, x.dtype, described.rows(), described.columns())
            && chain.product == x.dtype
            && !chain.norms_heads();
        if !takes {
            return Ok(None);
        }
        let mut defines = norm_defines(&chain, call)?;
        defines.extend(chain.defines(call)?);
        defines.push(("X", type_name(x.dtype)?.to_owned()));
        let (format, inputs, outputs) = (described.format, described.columns(), described.rows());
        Ok(Some(Self { heads: chain.heads(call)?, chain, defines, format, inputs, outputs }))
    }

    /// The value of one of its constants.
    pub(super) fn constant(&self, name: &str) -> &str {
        self.defines.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value)
    }

    /// Whether another product is made in the same way.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.defines == other.defines
            && self.format == other.format
            && (self.inputs, self.outputs, self.heads) == (other.inputs, other.outputs, other.heads)
    }
}

/// Attention of one token.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Attention {
    size: usize,
    slots: usize,
    kv_heads: usize,
    /// Query heads of a KV head.
    group: usize,
    causal: bool,
    pub(super) scale: f32,
}

impl Attention {
    /// What a call is, if it can be the attention of a layer.
    pub(super) fn of(op: &PagedAttention, call: &CallDesc) -> Result<Option<Self>> {
        let (query, keys, values) = (operand(call, 0)?, operand(call, 1)?, operand(call, 2)?);
        let start = operand(call, 3)?;
        let whole = [keys, values]
            .iter()
            .all(|cache| cache.strides[..3].iter().all(|stride| stride.is_multiple_of(8)));
        let (slots, size) = (keys.shape[2], keys.shape[3]);
        let takes = query.shape[0] == 1
            && start.shape[0] == 1
            && query.dtype == keys.dtype
            && op.window == 0
            && op.softcap <= 0.0
            && op.mask != AttentionMask::Explicit
            && (8..10).all(|index| call.operands.get(index).is_none_or(Option::is_none))
            && values.shape[3] == size
            && (16..=MAX_HEAD).contains(&size)
            && size.is_multiple_of(16)
            && whole
            && slots > 0
            && slots.is_multiple_of(16)
            && op.kv_heads > 0
            && op.query_heads.is_multiple_of(op.kv_heads);
        Ok(takes.then(|| Self {
            size,
            slots,
            kv_heads: op.kv_heads as usize,
            group: (op.query_heads / op.kv_heads) as usize,
            causal: op.mask == AttentionMask::Causal,
            scale: op.scale,
        }))
    }
}

/// The parts of a layer: query, key and value; output; the first half of the MLP; the second.
#[derive(Clone, Copy)]
pub(super) struct Layer<'a> {
    pub(super) products: [&'a Product; PRODUCTS],
    pub(super) attention: &'a Attention,
}

impl Layer<'_> {
    /// Whether the kernel does what such calls do, if each reads what the one before left.
    pub(super) fn is_sound(&self) -> bool {
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
        let Attention { size, kv_heads, group, .. } = *self.attention;
        let heads = input.heads.is_some_and(|[own_heads, own_kv_heads, key, value, pairs]| {
            (own_heads, own_kv_heads, key, value) == (kv_heads * group, kv_heads, size, size)
                && 2 * pairs <= size
                && pairs.is_multiple_of(8)
        });
        let sizes = (output.inputs, up.inputs, input.inputs)
            == (kv_heads * group * size, input.inputs, output.outputs)
            && down.outputs == input.inputs
            && [input, output, up, down].iter().all(|product| product.outputs > 0);
        kinds && normed && types && heads && sizes
    }

    /// What all layers like it have in common.
    pub(super) fn shape(&self) -> Shape {
        let [input, _, up, down] = self.products;
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
            kv_heads: self.attention.kv_heads,
            group: self.attention.group,
            head: self.attention.size,
            pairs: input.heads.map_or(0, |[.., pairs]| pairs),
            slots: self.attention.slots,
            causal: self.attention.causal,
        }
    }
}

/// What a call is in a layer.
enum Part {
    Product(Box<Product>),
    Attention(Attention),
}

/// The kernels that a graph of such calls would have for its layers. Weights count as such that never change, and each call as
/// one that reads what the one before left: a kernel too many costs the time to build it.
pub(crate) fn foreseen(calls: &[CallDesc], machine: &Machine) -> Vec<KernelSpec> {
    if !machine.skinny || !super::has_kernel(machine) {
        return Vec::new();
    }
    let part = |call: &CallDesc| match &call.op {
        Op::PagedAttention(op) => Attention::of(op, call).ok().flatten().map(Part::Attention),
        _ => Product::of(call).ok().flatten().map(Box::new).map(Part::Product),
    };
    let parts: Vec<Option<Part>> = calls.iter().map(part).collect();
    let shape = |parts: &[Option<Part>]| match parts {
        [
            Some(Part::Product(input)),
            Some(Part::Attention(attention)),
            Some(Part::Product(output)),
            Some(Part::Product(up)),
            Some(Part::Product(down)),
        ] => {
            let layer = Layer { products: [input, output, up, down].map(|product| &**product), attention };
            layer.is_sound().then(|| layer.shape())
        }
        _ => None,
    };
    let mut kernels = Vec::new();
    // One layer is not worth a kernel of its own.
    for two in parts.windows(2 * CALLS) {
        let (first, second) = (shape(&two[..CALLS]), shape(&two[CALLS..]));
        let kernel =
            first.filter(|first| second.as_ref() == Some(first)).and_then(|shape| shape.kernel(machine));
        kernels.extend(kernel.filter(|kernel| !kernels.contains(kernel)));
    }
    kernels
}
