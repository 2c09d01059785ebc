//! Quantisation: rounds the weights of products as a [`Policy`] says, and the activations of those that are to run on integers.
//!
//! A weight stays an expression over the file, which is rounded while it is read: nothing is held twice. `w8a8` turns
//! `linear(x, w)` into `linear_w8a8(quant_per_token(x), w)`; products of the same activations share their quantisation, and
//! [`fuse`](super::fuse) then takes it into the op before.
//!
//! With [`Policy::smooth`], outliers of activations are moved into the weights first ([`smooth`]), and [`choose`] finds a
//! format for every weight under a budget; both need a [`Calibration`].

mod calibration;
mod mixture;
mod policy;
mod smooth;

use super::{
    concatenate::weight_of,
    rewrite::{results, with_nodes},
};
pub use calibration::{Calibration, Channels};
use dsrun_core::{
    Error, Result, WeightExpr, WeightFormat, WeightType,
    op::{LinearW8A8, Op, OperandType, QuantPerToken},
    program::{Call, Node, Origin, Program, Value, ValueId},
};
pub use mixture::{Candidate, Choice, choose};
pub use policy::{Offset, Policy, Scheme};
pub use smooth::{ReadWeight, smooth};
use std::collections::{BTreeSet, HashMap, HashSet};

/// The name by which policies mean the weight that makes the logits, whatever its name in the program.
pub const HEAD: &str = "lm_head";

/// A weight that products read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProductWeight {
    /// The value in the program.
    pub id: ValueId,
    /// Its name there.
    pub name: String,
    /// Whether it makes the logits, or is looked up too: such a weight is left alone unless it is named.
    pub kept: bool,
    /// Whether it makes the logits.
    pub head: bool,
}

/// The weights of a program's products, in order.
pub fn product_weights(program: &Program) -> Vec<ProductWeight> {
    let uses = program.uses();
    let mut found: Vec<ProductWeight> = Vec::new();
    for node in &program.nodes {
        let Some(id) = weight_of(&node.call) else { continue };
        let value = &program.values[id.index()];
        if !matches!(value.origin, Origin::Weight(_)) || found.iter().any(|weight| weight.id == id) {
            continue;
        }
        let products = program.nodes.iter().filter(|node| weight_of(&node.call) == Some(id)).count();
        let result = program.values[node.call.results[0].index()].tensor_type();
        let rows = result.and_then(|tensor| tensor.shape.first()?.symbol());
        let head = rows == Some("rows");
        let kept = head || products != uses[id.index()];
        found.push(ProductWeight { id, name: value.name.clone(), kept, head });
    }
    found
}

/// Rewrites a program by a policy, smoothing aside.
///
/// A weight that the policy keeps is as its checkpoint means it to be: `quantises_inputs` says of a tensor of the file whether
/// the inputs of products with it are to be quantised ([`TensorSource::quantises_inputs`]).
///
/// # Errors
/// If a pattern of the policy names no weight, or a weight does not fit the format it is to have.
///
/// [`TensorSource::quantises_inputs`]: dsrun_models::weights::TensorSource::quantises_inputs
pub fn quantize(
    program: &Program,
    policy: &Policy,
    quantises_inputs: &dyn Fn(&str) -> bool,
) -> Result<Program> {
    let mut program = program.clone();
    let mut used: BTreeSet<&str> = BTreeSet::new();
    let mut activations: HashSet<ValueId> = HashSet::new();
    for weight in product_weights(&program) {
        let scheme = policy.scheme_of(&weight, &mut used).unwrap_or(Scheme::Keep);
        let value = &mut program.values[weight.id.index()];
        let in_weight = |error: Error| error.at(&weight.name);
        let columns = value.weight_type().map_or(0, WeightType::columns);
        let Some(format) = policy.format(scheme, columns).map_err(in_weight)? else {
            if made_for_integers(value, quantises_inputs) {
                activations.insert(weight.id);
            }
            continue;
        };
        let (Origin::Weight(expr), OperandType::Weight(weight_type)) =
            (&mut value.origin, &mut value.value_type)
        else {
            continue;
        };
        let of = Box::new(expr.clone());
        *expr = match format {
            WeightFormat::Dense(dtype) => WeightExpr::Cast { of, dtype },
            WeightFormat::Group(format) => WeightExpr::Quantise { of, format, search: policy.search },
            other => return Err(in_weight(Error::internal(format!("nothing is quantised to {other}")))),
        };
        weight_type.format = format;
        weight_type.bytes().map_err(in_weight)?;
        if scheme == Scheme::W8A8 {
            activations.insert(weight.id);
        }
    }
    if let Some(unused) = policy.weights.keys().find(|pattern| !used.contains(pattern.as_str())) {
        let message =
            format!("`{unused}` names no weight of a product; `dsrun inspect --program` lists them");
        return Err(Error::invalid(message).at("weights"));
    }
    quantize_activations(&mut program, &activations)
}

/// Whether products with a weight of the file are to be products of integers. They cannot be once it is cast or scaled.
fn made_for_integers(weight: &Value, quantises_inputs: &dyn Fn(&str) -> bool) -> bool {
    let Origin::Weight(expr) = &weight.origin else { return false };
    let tensors = expr.tensors();
    !tensors.is_empty()
        && tensors.into_iter().all(quantises_inputs)
        && weight.weight_type().is_some_and(
            |weight| matches!(weight.format, WeightFormat::Group(format) if format.is_channelwise_int8()),
        )
}

/// Makes products of integers of those with these weights.
fn quantize_activations(program: &mut Program, weights: &HashSet<ValueId>) -> Result<Program> {
    let mut shared: HashMap<(ValueId, usize), [ValueId; 2]> = HashMap::new();
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
        if !weights.contains(&weight) {
            nodes.push(node);
            continue;
        }
        let quantised = match shared.get(&(x, node.segment)) {
            Some(quantised) => *quantised,
            None => {
                let op = Op::from(QuantPerToken {});
                let made = results(program, &op, &[Some(x)])?;
                let [y, scales] = made[..] else {
                    return Err(Error::internal("quantisation has two results"));
                };
                nodes.push(Node { call: Call::new(op, vec![Some(x)], made), ..node.clone() });
                shared.insert((x, node.segment), [y, scales]);
                [y, scales]
            }
        };
        let operands = vec![Some(quantised[0]), Some(quantised[1]), Some(weight), bias];
        let call = Call::new(LinearW8A8 { dtype: linear.dtype }, operands, node.call.results.clone());
        nodes.push(Node { call, ..node });
    }
    with_nodes(program, nodes)
}

/// The activations that each product with a weight reads, before they are quantised: what a calibration observes, by the name
/// of the weight.
pub fn observed(program: &Program) -> Vec<(String, ValueId)> {
    let first = |node: &Node| node.call.operands.first().copied().flatten();
    let before = |x: ValueId| {
        let quantises = |node: &&Node| {
            matches!(node.call.op, Op::QuantPerToken(_)) && node.call.results.first() == Some(&x)
        };
        program.nodes.iter().find(quantises).map_or(Some(x), first)
    };
    let of = |node: &Node| {
        Some((program.values[weight_of(&node.call)?.index()].name.clone(), before(first(node)?)?))
    };
    program.nodes.iter().filter_map(of).collect()
}
