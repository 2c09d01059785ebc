//! What passes that replace calls have in common.

use dsrun_core::{
    Result, TensorType,
    op::{Op, OperandType},
    placement::Placements,
    program::{Node, Origin, Program, Value, ValueId},
};

/// New values: the results of a call that is to be added. [`with_nodes`] says which call makes them.
///
/// # Errors
/// As [`Op::infer`].
pub(super) fn results(program: &mut Program, op: &Op, operands: &[Option<ValueId>]) -> Result<Vec<ValueId>> {
    let types = program.operand_types(operands)?;
    Ok(op.infer(&types)?.into_iter().map(|tensor| result(program, tensor)).collect())
}

/// A new value: one result of a call that is to be added.
pub(super) fn result(program: &mut Program, tensor: TensorType) -> ValueId {
    let id = ValueId::new(program.values.len());
    program.values.push(Value {
        name: String::new(),
        value_type: OperandType::Tensor(tensor),
        origin: Origin::Node(0),
        placements: Placements::default(),
    });
    id
}

/// Where a product with a weight has its weight; the bias stands behind it.
pub(super) fn weight_operand(op: &Op) -> Option<usize> {
    match op {
        Op::Linear(_) => Some(1),
        Op::LinearW8A8(_) => Some(2),
        _ => None,
    }
}

/// The program with these calls instead of its own. Results that no call makes any more, and weights that none uses, are
/// gone; the other values are numbered anew, in the order they had.
///
/// # Errors
/// If the new calls make no valid program.
pub(super) fn with_nodes(program: &Program, nodes: Vec<Node>) -> Result<Program> {
    let mut kept = vec![false; program.values.len()];
    for (value, kept) in program.values.iter().zip(&mut kept) {
        *kept = matches!(value.origin, Origin::Input | Origin::State);
    }
    for node in &nodes {
        for id in node.call.operands.iter().flatten().chain(&node.call.results) {
            kept[id.index()] = true;
        }
    }
    let mut next = 0;
    let numbers: Vec<ValueId> = kept
        .iter()
        .map(|kept| {
            let number = ValueId::new(next);
            next += usize::from(*kept);
            number
        })
        .collect();
    let renumbered = |id: &ValueId| numbers[id.index()];
    let kept_values = program.values.iter().zip(&kept).filter(|(_, kept)| **kept);
    let mut rewritten = Program {
        values: kept_values.map(|(value, _)| value.clone()).collect(),
        nodes: Vec::with_capacity(nodes.len()),
        outputs: program.outputs.iter().map(renumbered).collect(),
        ..program.clone()
    };
    for (index, mut node) in nodes.into_iter().enumerate() {
        node.call.operands.iter_mut().flatten().for_each(|id| *id = renumbered(id));
        node.call.results.iter_mut().for_each(|id| *id = renumbered(id));
        for result in &node.call.results {
            rewritten.values[result.index()].origin = Origin::Node(index);
        }
        rewritten.nodes.push(node);
    }
    rewritten.validate()?;
    Ok(rewritten)
}
