//! Keys of runs of calls: runs with equal keys get the same answer from a device.

use dsrun_core::{
    Result,
    program::{Node, Program, ValueId},
};
use std::{collections::HashMap, ops::Range};

/// Numbers the calls of a program: calls of the same op on values of the same types have equal numbers.
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

/// The key of a run: equal for runs of calls of the same [`classes`] with the same uses of each other's values and the same results.
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
