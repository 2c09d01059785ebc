//! Quantisation: rounds the weights of matrix products as a [`Policy`] says, and the activations of integer products.
//!
//! A weight stays an expression over the file and is rounded as it is read, so no weight is in memory twice. `w8a8` turns
//! `linear(x, w)` into `linear_w8a8(quant_per_token(x), w)`. Products of the same activations share their quantisation, which
//! [`fuse`](super::fuse) then merges with the op before it. Expert weights are rounded too, but their products never quantise
//! activations. The router keeps its precision: an error in its logits would select another expert.
//!
//! [`quantize_inputs`] quantises the inputs of products whose weights are quantised already, in groups of [`INPUT_GROUP`], which
//! turns `linear(x, w)` into `linear_a8(quant_per_group(x), w)`.
//!
//! With [`Policy::smooth`], outliers of activations are first moved into the weights ([`smooth`]). [`choose`] finds a format for
//! every weight under a budget (mixed precision). Both need a [`Calibration`].

mod calibration;
mod format_choice;
mod policy;
mod smooth;

use super::{
    concatenate::weight_of,
    rewrite::{add_results, with_nodes},
};
pub use calibration::{Calibration, Channels};
use dsrun_core::{
    DType, Error, Result, WeightExpr, WeightFormat, WeightType,
    op::{LinearA8, LinearW8A8, Op, OperandType, QuantPerGroup, QuantPerToken},
    program::{Call, Node, Origin, Program, Value, ValueId},
};
pub use format_choice::{Candidate, Choice, choose};
pub(crate) use policy::matches_name;
pub use policy::{Offset, Policy, Scheme};
pub use smooth::{ReadWeight, smooth};
use std::collections::{BTreeSet, HashMap, HashSet};

/// The number of activations that share a scale in [`quantize_inputs`]: the smallest group of the weight formats of files. A scale
/// for each token would be too coarse for models with outliers in their activations.
pub const INPUT_GROUP: u32 = 32;

/// The name of the LM head's weight in policies, whatever its name in the program.
pub const HEAD: &str = "lm_head";

/// A weight of a matrix product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProductWeight {
    /// The weight's value in the program.
    pub id: ValueId,
    /// The weight's name in the program.
    pub name: String,
    /// Whether the weight is kept unless a policy names it: the LM head, a router of experts, or a weight that an embedding also
    /// reads.
    pub kept: bool,
    /// Whether it is the weight of the LM head.
    pub head: bool,
    /// Whether it is the weight of a router, whose products select experts.
    pub router: bool,
    /// Whether it is a weight of experts, of which each token is multiplied by those of some.
    pub expert: bool,
}

/// The weight of a matrix product; for a grouped product, that of all experts.
fn multiplied_by(call: &Call) -> Option<ValueId> {
    match call.op {
        Op::GroupedLinear(_) => call.operands.get(1).copied().flatten(),
        _ => weight_of(call),
    }
}

/// Lists the weights of a program's matrix products, in the order of the products.
pub fn product_weights(program: &Program) -> Vec<ProductWeight> {
    let uses = program.uses();
    let routes = |node: &&Node| matches!(node.call.op, Op::MoeRoute(_));
    let routed: HashSet<ValueId> =
        program.nodes.iter().filter(routes).filter_map(|node| node.call.operands[0]).collect();
    let mut found: Vec<ProductWeight> = Vec::new();
    for node in &program.nodes {
        let Some(id) = multiplied_by(&node.call) else { continue };
        let value = &program.values[id.index()];
        if !matches!(value.origin, Origin::Weight(_)) || found.iter().any(|weight| weight.id == id) {
            continue;
        }
        let products = program.nodes.iter().filter(|node| multiplied_by(&node.call) == Some(id)).count();
        let result = program.values[node.call.results[0].index()].tensor_type();
        let rows = result.and_then(|tensor| tensor.shape.first()?.symbol());
        let head = rows == Some("rows");
        let router = routed.contains(&node.call.results[0]);
        let expert = matches!(node.call.op, Op::GroupedLinear(_));
        let kept = head || router || products != uses[id.index()];
        found.push(ProductWeight { id, name: value.name.clone(), kept, head, router, expert });
    }
    found
}

/// Quantises a program by a policy, without smoothing.
///
/// A weight that the policy keeps is used as its checkpoint intends: `quantises_inputs` says of a tensor of the file whether
/// products with it quantise their inputs ([`TensorSource::quantises_inputs`]).
///
/// # Errors
/// If a pattern of the policy matches no weight, a weight does not fit its format, or the default is MXFP4 and the model has no
/// experts.
///
/// [`TensorSource::quantises_inputs`]: dsrun_models::weights::TensorSource::quantises_inputs
pub fn quantize(
    program: &Program,
    policy: &Policy,
    quantises_inputs: &dyn Fn(&str) -> bool,
) -> Result<Program> {
    let mut program = program.clone();
    let mut used: BTreeSet<&str> = BTreeSet::new();
    let mut activations: HashMap<ValueId, Scales> = HashMap::new();
    let weights = product_weights(&program);
    if policy.default == Scheme::Mxfp4 && !weights.iter().any(|weight| weight.expert) {
        return Err(Error::invalid(
            "`mxfp4` rounds the weights of experts, and this model has none: use w4a16, or name weights in a policy file, such as \
             `layers = \"mxfp4\"` under [weights]",
        ));
    }
    for weight in weights {
        let scheme = policy.scheme_of(&weight, &mut used).unwrap_or(Scheme::Keep);
        let value = &mut program.values[weight.id.index()];
        let in_weight = |error: Error| error.at(&weight.name);
        let columns = value.weight_type().map_or(0, WeightType::columns);
        let Some(format) = policy.format(scheme, columns).map_err(in_weight)? else {
            if made_for_integers(value, quantises_inputs) {
                activations.insert(weight.id, Scales::PerToken);
            }
            continue;
        };
        // A file's blocks of the same format would be rounded to themselves.
        if matches!(format, WeightFormat::Block(_))
            && value.weight_type().is_some_and(|stored| stored.format == format)
        {
            continue;
        }
        let (Origin::Weight(expr), OperandType::Weight(weight_type)) =
            (&mut value.origin, &mut value.value_type)
        else {
            continue;
        };
        let of = Box::new(expr.clone());
        *expr = match format {
            WeightFormat::Dense(dtype) => WeightExpr::Cast { of, dtype },
            format => WeightExpr::Quantise { of, format, search: policy.search },
        };
        weight_type.format = format;
        weight_type.bytes().map_err(in_weight)?;
        if scheme == Scheme::W8A8 {
            activations.insert(weight.id, Scales::PerToken);
        }
    }
    if let Some(unused) = policy.weights.keys().find(|pattern| !used.contains(pattern.as_str())) {
        let message = format!(
            "`{unused}` matches no weight of a matrix product; `dsrun inspect --program` lists the weights"
        );
        return Err(Error::invalid(message).at("weights"));
    }
    quantize_activations(&mut program, &activations)
}

/// Whether the checkpoint intends integer products with a weight. This is not possible if the weight is cast or scaled.
fn made_for_integers(weight: &Value, quantises_inputs: &dyn Fn(&str) -> bool) -> bool {
    let Origin::Weight(expr) = &weight.origin else { return false };
    let tensors = expr.tensors();
    !tensors.is_empty()
        && tensors.into_iter().all(quantises_inputs)
        && weight.weight_type().is_some_and(
            |weight| matches!(weight.format, WeightFormat::Group(format) if format.is_channelwise_int8()),
        )
}

/// Quantises the inputs of the linear layers whose weights are quantised, in groups of [`INPUT_GROUP`], where columns are whole
/// groups. Routers keep their inputs.
///
/// # Errors
/// If the program is not valid.
pub fn quantize_inputs(program: &Program) -> Result<Program> {
    let mut program = program.clone();
    let is_suitable = |weight: &ProductWeight| {
        let weight_type = program.values[weight.id.index()].weight_type();
        !weight.router
            && weight_type.is_some_and(|weight| {
                weight.format.is_quantised() && weight.columns().is_multiple_of(INPUT_GROUP as usize)
            })
    };
    let weights = product_weights(&program).into_iter().filter(is_suitable);
    let weights = weights.map(|weight| (weight.id, Scales::PerGroup)).collect();
    quantize_activations(&mut program, &weights)
}

/// The activations that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Scales {
    /// Those of a token.
    PerToken,
    /// [`INPUT_GROUP`] neighbours.
    PerGroup,
}

impl Scales {
    /// The op that quantises activations.
    fn quantise(self) -> Op {
        match self {
            Self::PerToken => QuantPerToken {}.into(),
            Self::PerGroup => QuantPerGroup { group: INPUT_GROUP }.into(),
        }
    }

    /// The linear layer over quantised activations, with results of this type.
    fn linear(self, dtype: DType) -> Op {
        match self {
            Self::PerToken => LinearW8A8 { dtype }.into(),
            Self::PerGroup => LinearA8 { dtype, group: INPUT_GROUP }.into(),
        }
    }
}

/// Quantises the inputs of the linear layers with these weights.
fn quantize_activations(program: &mut Program, weights: &HashMap<ValueId, Scales>) -> Result<Program> {
    let mut shared: HashMap<(ValueId, usize, Scales), [ValueId; 2]> = HashMap::new();
    let mut nodes: Vec<Node> = Vec::with_capacity(program.nodes.len());
    for node in program.nodes.clone() {
        let Op::Linear(linear) = node.call.op else {
            nodes.push(node);
            continue;
        };
        let [Some(x), Some(weight), bias] = node.call.operands[..] else {
            nodes.push(node);
            continue;
        };
        let Some(scales) = weights.get(&weight).copied() else {
            nodes.push(node);
            continue;
        };
        let key = (x, node.segment, scales);
        let quantised = match shared.get(&key) {
            Some(quantised) => *quantised,
            None => {
                let op = scales.quantise();
                let results = add_results(program, &op, &[Some(x)])?;
                let [y, scales] = results[..] else {
                    let message = format!("{} has {} results, expected two", op.name(), results.len());
                    return Err(Error::internal(message));
                };
                nodes.push(Node { call: Call::new(op, vec![Some(x)], results), ..node.clone() });
                shared.insert(key, [y, scales]);
                [y, scales]
            }
        };
        let operands = vec![Some(quantised[0]), Some(quantised[1]), Some(weight), bias];
        let call = Call::new(scales.linear(linear.dtype), operands, node.call.results.clone());
        nodes.push(Node { call, ..node });
    }
    with_nodes(program, nodes)
}

/// The input activations of a product, before they are quantised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedActivations {
    /// The name of the product's weight.
    pub weight: String,
    /// The value of the activations in the program.
    pub id: ValueId,
    /// The columns of the weight. A row of the value may hold several rows of activations, one for each expert of the token.
    pub columns: usize,
}

/// The activations that a calibration observes, product by product.
pub fn observed_activations(program: &Program) -> Vec<ObservedActivations> {
    let first = |node: &Node| node.call.operands.first().copied().flatten();
    let before = |x: ValueId| {
        let quantises = |node: &&Node| {
            matches!(node.call.op, Op::QuantPerToken(_) | Op::QuantPerGroup(_))
                && node.call.results.first() == Some(&x)
        };
        program.nodes.iter().find(quantises).map_or(Some(x), first)
    };
    let of = |node: &Node| {
        let weight = &program.values[multiplied_by(&node.call)?.index()];
        let columns = weight.weight_type()?.columns();
        Some(ObservedActivations { weight: weight.name.clone(), id: before(first(node)?)?, columns })
    };
    program.nodes.iter().filter_map(of).collect()
}
