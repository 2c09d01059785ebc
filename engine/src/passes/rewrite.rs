//! Helpers of the passes that replace calls.

use dsrun_core::{
    Result, TensorType,
    op::{Op, OperandType},
    placement::Placements,
    program::{Node, Origin, Program, Value, ValueId},
};

/// Adds the results of a new call to the values of a program. [`with_nodes`] sets which call makes them.
///
/// # Errors
/// Same as [`Op::infer`].
pub(super) fn add_results(
    program: &mut Program,
    op: &Op,
    operands: &[Option<ValueId>],
) -> Result<Vec<ValueId>> {
    let types = program.operand_types(operands)?;
    Ok(op.infer(&types)?.into_iter().map(|tensor| add_result(program, tensor)).collect())
}

/// Adds one result of a new call to the values of a program.
pub(super) fn add_result(program: &mut Program, tensor: TensorType) -> ValueId {
    let id = ValueId::new(program.values.len());
    program.values.push(Value {
        name: String::new(),
        value_type: OperandType::Tensor(tensor),
        origin: Origin::Node(0),
        placements: Placements::default(),
    });
    id
}

/// The operand index of the weight of a matrix product; the bias is the next operand. `None` for other ops.
pub(super) fn weight_operand(op: &Op) -> Option<usize> {
    match op {
        Op::Linear(_) => Some(1),
        Op::LinearW8A8(_) | Op::LinearA8(_) => Some(2),
        _ => None,
    }
}

/// Replaces the calls of a program. Results that no call computes any more and weights that no call reads are removed; the
/// other values keep their order and are renumbered.
///
/// # Errors
/// If the result is not a valid program.
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
