//! Cases with unequal extents: the rows of an op are those below the extents of all its operands and results.

use crate::case::{Case, Layout, Operand};
use dsrun_core::op::Op;

/// Variants of a case with extents: in each, one tensor keeps its extent, and all rows of the others that share its rows are valid.
/// The expected results are the same.
pub(crate) fn uneven(case: &Case) -> Vec<Case> {
    let [call] = case.calls.as_slice() else { return Vec::new() };
    // The tables of a step have several cases with extents, all others one.
    let end = match call.op {
        Op::CommitTokens(_) => "extent",
        Op::PrepareStep(_) => "/mixed_extents",
        _ => "/extent",
    };
    if !case.id.ends_with(end) {
        return Vec::new();
    }
    if matches!(call.op, Op::Region(_)) || call.op.mesh_axis().is_some() {
        return Vec::new();
    }
    let operands = call.operands.len();
    let extent_of = |index: usize| {
        let layout = match index.checked_sub(operands) {
            // The layout of an updated operand stands with the operand.
            Some(result) if call.op.updates(result).is_some() => None,
            Some(result) => call.results.get(result).map(|result| result.layout),
            None => match &call.operands[index] {
                Some(Operand::Tensor(input)) => Some(input.layout),
                _ => None,
            },
        };
        layout.and_then(|layout| layout.extent)
    };
    let bounded: Vec<usize> =
        (0..operands + call.results.len()).filter(|index| extent_of(*index).is_some()).collect();
    if bounded.len() < 2 {
        return Vec::new();
    }
    let Some(signature) = call.op.signature() else { return Vec::new() };
    let name = |index: usize| match index.checked_sub(operands) {
        None => signature.operands[index].name,
        Some(result) => signature.results[result].name,
    };
    let keeping = |kept: &usize| {
        let mut case = case.clone();
        case.id = format!("{}_of_{}", case.id, name(*kept));
        let [call] = case.calls.as_mut_slice() else { unreachable!("the case has one call") };
        let all = |layout: &mut Layout, rows: usize| layout.extent = layout.extent.map(|_| rows);
        // Tensors that share their rows have the same extent.
        let shares = |index: &usize| index != kept && extent_of(*index) == extent_of(*kept);
        for index in bounded.iter().copied().filter(shares) {
            match index.checked_sub(operands) {
                None => {
                    if let Some(Operand::Tensor(input)) = &mut call.operands[index] {
                        all(&mut input.layout, input.tensor.shape[0]);
                    }
                }
                // More rows than any result has.
                Some(result) => all(&mut call.results[result].layout, i32::MAX as usize / 2),
            }
        }
        case
    };
    // A device may write a key without a value, or a part of a latent, attend to a row that is no query, and group rows as it likes.
    // Rows of a step may lie behind the prompt ids.
    let is_kept = |index: &&usize| {
        !matches!(
            (&call.op, name(**index)),
            (Op::KvWrite(_) | Op::Attention(_), "key" | "value")
                | (Op::LatentWrite(_), "value" | "rest")
                | (Op::PrepareStep(_), "prompt_ids")
                | (_, "order")
        )
    };
    bounded.iter().filter(is_kept).map(keeping).collect()
}
