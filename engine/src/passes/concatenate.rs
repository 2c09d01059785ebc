//! Merges linear layers with the same input into one matrix product over their concatenated weights.
//!
//! [`Columns`] splits the result again, unless the merged layers are the gate and up projections of a gated activation, which
//! reads both halves from the merged result. The concatenated weights and biases are expressions over the file, evaluated when
//! they are loaded, so no weight is held twice.

use super::rewrite::{add_results, weight_operand, with_nodes};
use dsrun_core::{
    Error, Result, TensorType, WeightExpr, WeightType,
    op::{Columns, GateLayout, GatedActivation, Op, OperandType},
    program::{Call, Node, Origin, Program, Value, ValueId},
};
use std::collections::HashSet;

/// Linear layers that can be merged.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// The indices of their calls, in order.
    nodes: Vec<usize>,
    /// The gated activation that is the only reader of both results of a group of two.
    gate: Option<usize>,
}

impl Group {
    /// The name of the group's first weight, which identifies the group in every version of the program.
    pub(super) fn name<'a>(&self, program: &'a Program) -> &'a str {
        let first = self.nodes.first().and_then(|node| weight_of(&program.nodes[*node].call));
        first.map_or("", |weight| &program.values[weight.index()].name)
    }

    /// The name of the concatenated weight.
    pub(super) fn joined_name(&self, program: &Program) -> String {
        let weights = self.nodes.iter().filter_map(|node| weight_of(&program.nodes[*node].call));
        joined_name(weights.map(|id| &program.values[id.index()]))
    }
}

/// The weight of a matrix product.
pub(super) fn weight_of(call: &Call) -> Option<ValueId> {
    call.operands.get(weight_operand(&call.op)?).copied().flatten()
}

fn joined_name<'a>(values: impl Iterator<Item = &'a Value>) -> String {
    values.map(|value| value.name.as_str()).collect::<Vec<_>>().join("+")
}

/// Finds the groups of a program: pairs that a gated activation reads, and otherwise layers that follow each other. Where an MLP is
/// beside attention, the layers of both read the same input, but run at different times.
pub(super) fn groups(program: &Program) -> Vec<Group> {
    let uses = program.uses();
    let mut alike_nodes: Vec<Vec<usize>> = Vec::new();
    for index in 0..program.nodes.len() {
        if !can_join(program, &uses, index) {
            continue;
        }
        let joins = |nodes: &&mut Vec<usize>| {
            alike(program, nodes[0], index) && program.nodes[nodes[0]].segment == program.nodes[index].segment
        };
        match alike_nodes.iter_mut().find(joins) {
            Some(nodes) => nodes.push(index),
            None => alike_nodes.push(vec![index]),
        }
    }
    alike_nodes.iter().flat_map(|nodes| split(program, &uses, nodes)).collect()
}

/// Splits equal layers into groups.
fn split(program: &Program, uses: &[usize], nodes: &[usize]) -> Vec<Group> {
    let mut groups = Vec::new();
    let mut rest = nodes.to_vec();
    for (index, first) in nodes.iter().enumerate() {
        let gated = nodes[index + 1..].iter().find_map(|second| {
            let pair = vec![*first, *second];
            gate(program, uses, &pair).map(|gate| Group { nodes: pair, gate: Some(gate) })
        });
        if let Some(group) = gated {
            rest.retain(|node| !group.nodes.contains(node));
            groups.push(group);
        }
    }
    let following = rest.chunk_by(|a, b| a + 1 == *b).filter(|nodes| nodes.len() > 1);
    groups.extend(following.map(|nodes| Group { nodes: nodes.to_vec(), gate: None }));
    groups
}

/// Whether a node is a linear layer that is the only reader of its weight and bias, which come from the file.
fn can_join(program: &Program, uses: &[usize], index: usize) -> bool {
    let call = &program.nodes[index].call;
    let Some(weight) = weight_operand(&call.op) else { return false };
    let [weight, bias] = [weight, weight + 1].map(|operand| call.operands.get(operand).copied().flatten());
    let own =
        |id: ValueId| matches!(program.values[id.index()].origin, Origin::Weight(_)) && uses[id.index()] == 1;
    weight.is_some_and(own) && bias.is_none_or(own)
}

/// Whether two linear layers have the same input and are equal except for their number of outputs.
fn alike(program: &Program, a: usize, b: usize) -> bool {
    let (a, b) = (&program.nodes[a], &program.nodes[b]);
    let Some(place) = weight_operand(&a.call.op).filter(|_| a.call.op == b.call.op) else { return false };
    let [weight, bias] = [place, place + 1].map(|operand| {
        let value = |node: &Node| node.call.operands[operand].map(|id| &program.values[id.index()]);
        (value(a), value(b))
    });
    let weights = match weight {
        (Some(a), Some(b)) => {
            let formats = a.weight_type().zip(b.weight_type());
            formats.is_some_and(|(a, b)| a.format == b.format && a.columns() == b.columns())
                && a.placements == b.placements
        }
        _ => false,
    };
    let biases = match bias {
        (None, None) => true,
        (Some(a), Some(b)) => {
            let dtypes = a.tensor_type().zip(b.tensor_type());
            dtypes.is_some_and(|(a, b)| a.dtype == b.dtype) && a.placements == b.placements
        }
        _ => false,
    };
    // The operands before the weight: activations, and their scales if they are quantised.
    a.call.operands[..place] == b.call.operands[..place] && weights && biases
}

/// The gated activation that reads the results of two layers as separate operands and is their only reader.
fn gate(program: &Program, uses: &[usize], nodes: &[usize]) -> Option<usize> {
    let [first, second] = nodes else { return None };
    let [gate, up] = [first, second].map(|node| program.nodes[*node].call.results.first().copied());
    let widths =
        [gate?, up?].map(|id| program.values[id.index()].tensor_type().map(|tensor| &tensor.shape[1]));
    if uses[gate?.index()] != 1 || uses[up?.index()] != 1 || widths[0] != widths[1] {
        return None;
    }
    program.nodes.iter().position(|node| {
        matches!(node.call.op, Op::GatedActivation(GatedActivation { layout: GateLayout::Separate, .. }))
            && node.call.operands.get(..2) == Some(&[gate, up])
    })
}

/// Merges the layers of each group for which `wanted` is true.
///
/// # Errors
/// If a merged layer has more columns than an op can express.
pub(super) fn concatenate(
    program: &Program,
    groups: &[Group],
    wanted: &dyn Fn(&Group) -> bool,
) -> Result<Program> {
    let mut program = program.clone();
    let mut taken: HashSet<usize> = HashSet::new();
    // The calls that replace a call, by its index.
    let mut replacements: Vec<Option<Vec<Call>>> = vec![None; program.nodes.len()];
    for group in groups.iter().filter(|group| wanted(group)) {
        let calls = join(&mut program, group)?;
        taken.extend(&group.nodes);
        if let (Some(gate), Some(first)) = (group.gate, calls.first()) {
            let product = first.results[0];
            let call = &mut program.nodes[gate].call;
            if let Op::GatedActivation(activation) = &mut call.op {
                activation.layout = GateLayout::Concatenated;
            }
            (call.operands[0], call.operands[1]) = (Some(product), None);
        }
        replacements[group.nodes[0]] = Some(calls);
    }
    let mut nodes = Vec::with_capacity(program.nodes.len());
    for (index, node) in program.nodes.iter().enumerate() {
        match replacements[index].take() {
            Some(calls) => nodes.extend(calls.into_iter().map(|call| Node { call, ..node.clone() })),
            None if taken.contains(&index) => {}
            None => nodes.push(node.clone()),
        }
    }
    with_nodes(&program, nodes)
}

/// The calls that replace those of a group: the product, and the calls that split its result. Adds their values to the program.
fn join(program: &mut Program, group: &Group) -> Result<Vec<Call>> {
    let parts: Vec<Call> = group.nodes.iter().map(|node| program.nodes[*node].call.clone()).collect();
    let Some(first) = parts.first() else { return Ok(Vec::new()) };
    let of = |operand: usize| parts.iter().filter_map(|call| call.operands[operand]).collect::<Vec<_>>();
    let Some(place) = weight_operand(&first.op) else { return Ok(Vec::new()) };
    let weight = concat(program, &of(place));
    let biases = of(place + 1);
    let bias = if biases.is_empty() { None } else { concat(program, &biases) };
    let operands = [&first.operands[..place], &[weight, bias]].concat();
    let product = add_results(program, &first.op, &operands)?;
    let [product] = product[..] else {
        return Err(Error::internal(format!(
            "{} has {} results, expected one",
            first.op.name(),
            product.len()
        )));
    };
    let mut calls = vec![Call::new(first.op.clone(), operands, vec![product])];
    if group.gate.is_none() {
        let mut start = 0u32;
        for part in &parts {
            let tensor = program.value(part.results[0])?.tensor_type();
            let count = tensor.and_then(|tensor| tensor.shape.get(1)?.known()).unwrap_or(0);
            let count = u32::try_from(count).map_err(|_| {
                Error::invalid(format!("a layer of {count} outputs is too wide to concatenate"))
            })?;
            calls.push(Call::new(Columns { start, count }, vec![Some(product)], part.results.clone()));
            start = start.saturating_add(count);
        }
    }
    Ok(calls)
}

/// Adds a value to the program: the concatenation of these weights or vectors along their rows.
fn concat(program: &mut Program, ids: &[ValueId]) -> Option<ValueId> {
    let values: Vec<&Value> = ids.iter().map(|id| &program.values[id.index()]).collect();
    let name = joined_name(values.iter().copied());
    let expr = |value: &&Value| match &value.origin {
        Origin::Weight(expr) => Some(expr.clone()),
        _ => None,
    };
    let parts = values.iter().map(expr).collect::<Option<Vec<_>>>()?;
    let value_type = match &values.first()?.value_type {
        OperandType::Weight(weight) => {
            let rows = values.iter().filter_map(|value| value.weight_type()).map(WeightType::rows).sum();
            OperandType::Weight(WeightType { format: weight.format, shape: vec![rows, weight.columns()] })
        }
        OperandType::Tensor(tensor) => {
            let sizes = values.iter().filter_map(|value| value.tensor_type()?.shape.first()?.known());
            OperandType::Tensor(TensorType::new(tensor.dtype, [sizes.sum::<usize>()]))
        }
    };
    let placements = values.first()?.placements;
    let origin = Origin::Weight(WeightExpr::Concat { parts, dimension: 0 });
    let id = ValueId::new(program.values.len());
    program.values.push(Value { name, value_type, origin, placements });
    Some(id)
}
