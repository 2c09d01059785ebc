//! Cases with unequal extents: the rows of an op are those below the extents of all its operands and results.

use crate::case::{Case, Layout, Operand};
use dsrun_core::op::Op;

/// Variants of a case whose tensors all have one extent: in each, one tensor keeps it, and all rows of the others are valid. The
/// expected results are the same.
pub(crate) fn uneven(case: &Case) -> Vec<Case> {
    let ([call], true) = (case.calls.as_slice(), case.id.ends_with("/extent")) else { return Vec::new() };
    if matches!(call.op, Op::Region(_)) || call.op.mesh_axis().is_some() {
        return Vec::new();
    }
    let operands = call.operands.len();
    let is_bounded = |index: usize| {
        let layout = match index.checked_sub(operands) {
            // The layout of an updated operand stands with the operand.
            Some(result) if call.op.updates(result).is_some() => None,
            Some(result) => call.results.get(result).map(|result| result.layout),
            None => match &call.operands[index] {
                Some(Operand::Tensor(input)) => Some(input.layout),
                _ => None,
            },
        };
        layout.is_some_and(|layout| layout.extent.is_some())
    };
    let bounded: Vec<usize> = (0..operands + call.results.len()).filter(|index| is_bounded(*index)).collect();
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
        for index in bounded.iter().copied().filter(|index| index != kept) {
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
    let is_kept = |index: &&usize| {
        !matches!(
            (&call.op, name(**index)),
            (Op::KvWrite(_) | Op::Attention(_), "key" | "value")
                | (Op::LatentWrite(_), "value" | "rest")
                | (_, "order")
        )
    };
    bounded.iter().filter(is_kept).map(keeping).collect()
}
