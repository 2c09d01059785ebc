//! What tells runs of calls apart that a device may answer differently for.

use dsrun_core::{
    Result,
    program::{Node, Program, ValueId},
};
use std::{collections::HashMap, ops::Range};

/// Numbers that are equal for calls of the same op on values of the same types.
pub(super) fn classes(program: &Program) -> Result<Vec<u32>> {
    let mut known: HashMap<String, u32> = HashMap::new();
    let class = |node: &Node| {
        let operands = program.operand_types(&node.call.operands)?;
        let results: Vec<_> =
            node.call.results.iter().map(|id| program.values[id.index()].tensor_type()).collect();
        let next = known.len() as u32;
        Ok(*known.entry(format!("{} {operands:?} {results:?}", node.call.op)).or_insert(next))
    };
    program.nodes.iter().map(class).collect()
}

/// Numbers that are equal for runs of calls of the same [`classes`] that use each other's values in the same way and have the same
/// results.
pub(super) fn key(program: &Program, classes: &[u32], nodes: Range<usize>, uses: &[usize]) -> Vec<u32> {
    let mut numbers: HashMap<ValueId, u32> = HashMap::new();
    let mut key = Vec::new();
    for node in nodes.clone() {
        let call = &program.nodes[node].call;
        key.push(classes[node]);
        for id in call.operands.iter().copied().chain(call.results.iter().copied().map(Some)) {
            let next = numbers.len() as u32;
            key.push(id.map_or(u32::MAX, |id| *numbers.entry(id).or_insert(next)));
        }
    }
    let results = program.results_of(nodes, uses);
    key.extend(results.iter().filter_map(|id| numbers.get(id).copied()));
    key
}
