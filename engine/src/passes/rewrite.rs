//! What passes that replace calls have in common.

use dsrun_core::{
    Result,
    program::{Node, Origin, Program, ValueId},
};

/// How many calls use each value, outputs of the program counted as a call each.
pub(super) fn uses(program: &Program) -> Vec<usize> {
    let mut uses = vec![0; program.values.len()];
    let operands = program.nodes.iter().flat_map(|node| node.call.operands.iter().flatten());
    for id in operands.chain(&program.outputs) {
        uses[id.index()] += 1;
    }
    uses
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
