//! Finds the repeating layers of a program.
//!
//! The search tries every kind of call as an anchor that occurs once per layer. Calls are of one kind if they have the same op
//! and packed weights of the same shapes; formats may differ, because files mix them from layer to layer. A layer extends from
//! its anchor backwards and forwards as far as the calls around neighbouring anchors agree. Of all anchors that give layers of
//! equal calls and about even size, the one is taken that leaves the fewest bytes outside the layers, then the one with the
//! smallest largest layer.

use super::super::step_interface::StepSegment;
use dsrun_core::{
    Result, WeightType,
    program::{Origin, Program, ValueId},
};
use std::{collections::HashMap, ops::Range};

/// The largest layer may be at most this ratio times the mean.
const UNEVEN: (u64, u64) = (3, 2);

/// The packed weights of a layer, in the order in which calls use them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layer {
    pub(super) weights: Vec<ValueId>,
}

/// A call with packed weights that no other call uses.
struct WeightCall {
    kind: String,
    weights: Vec<ValueId>,
    bytes: u64,
}

/// The repeating layers of a program, in order; none if nothing repeats. `bytes` says how large a packed weight is.
///
/// # Errors
/// The errors of `bytes`.
pub(super) fn layers(program: &Program, bytes: &dyn Fn(&WeightType) -> Result<usize>) -> Result<Vec<Layer>> {
    let calls = weight_calls(program, bytes)?;
    let all: u64 = calls.iter().map(|call| call.bytes).sum();
    let mut places: HashMap<&str, Vec<usize>> = HashMap::new();
    for (place, call) in calls.iter().enumerate() {
        places.entry(&call.kind).or_default().push(place);
    }
    let candidate = |starts: &Vec<usize>| {
        let (first, second) = (*starts.first()?, *starts.get(1)?);
        let same = |(a, b): &(usize, usize)| calls[*a].kind == calls[*b].kind;
        // The first layer begins at the same call as the second one; earlier calls belong to no layer.
        let back = (0..first).rev().zip((first..second).rev()).take_while(same).count();
        let starts: Vec<usize> = starts.iter().map(|start| start - back).collect();
        let (last, before) = (*starts.last()?, *starts.iter().rev().nth(1)?);
        // The last layer has the same calls as the layer before it; later calls belong to no layer.
        let end = last + (before..last).zip(last..calls.len()).take_while(same).count();
        let ends = starts.iter().skip(1).copied().chain([end]);
        let ranges: Vec<_> = starts.iter().copied().zip(ends).map(|(start, end)| start..end).collect();
        let alike = |range: &Range<usize>| {
            range.len() == ranges[0].len() && range.clone().zip(ranges[0].clone()).all(|pair| same(&pair))
        };
        let varied = !ranges.iter().all(alike);
        let sizes =
            ranges.iter().map(|range| calls[range.clone()].iter().map(|call| call.bytes).sum::<u64>());
        let (inside, largest) =
            sizes.fold((0, 0), |(sum, most): (u64, u64), size| (sum + size, most.max(size)));
        let uneven = largest * ranges.len() as u64 * UNEVEN.1 > inside * UNEVEN.0;
        Some(((uneven, varied, all - inside + 2 * largest, starts[0]), ranges))
    };
    let best = places.values().filter_map(candidate).min_by_key(|(cost, _)| *cost);
    let layer = |range: Range<usize>| Layer {
        weights: calls[range].iter().flat_map(|call| call.weights.iter().copied()).collect(),
    };
    Ok(best.map_or_else(Vec::new, |(_, ranges)| ranges.into_iter().map(layer).collect()))
}

/// The calls of the forward segment with packed weights of their own.
fn weight_calls(program: &Program, bytes: &dyn Fn(&WeightType) -> Result<usize>) -> Result<Vec<WeightCall>> {
    let uses = program.uses();
    let mut calls = Vec::new();
    for node in &program.nodes {
        let segment = program.segments.get(node.segment).map(|segment| segment.name.as_str());
        if segment != Some(StepSegment::Forward.name()) {
            continue;
        }
        let mut call = WeightCall { kind: node.call.op.name().to_owned(), weights: Vec::new(), bytes: 0 };
        for id in node.call.operands.iter().flatten() {
            let value = program.value(*id)?;
            let (Origin::Weight(_), Some(weight)) = (&value.origin, value.weight_type()) else { continue };
            // A weight that several calls use, such as a tied embedding, belongs to no layer.
            if uses.get(id.index()) == Some(&1) {
                call.kind += &format!(" {:?}", weight.shape);
                call.weights.push(*id);
                call.bytes += bytes(weight)? as u64;
            }
        }
        if !call.weights.is_empty() {
            calls.push(call);
        }
    }
    Ok(calls)
}
