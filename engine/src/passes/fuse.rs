//! Deep-Fusion: groups calls whose tiles depend on one producer tile into regions the device has kernels for.
//!
//! The pass knows no pattern. It looks at runs of calls that stand behind one another, keeps those that [the rule](rule)
//! admits, and asks the device about each. Of all ways to cut a program into calls and native regions it takes the one
//! with the fewest calls; among those the one that moves the fewest bytes between calls; among those the one that computes
//! least twice. Projections of the same activations are made one in front of it, as far as a region takes them in: taken
//! apart by calls of their own they would gain nothing.
//!
//! Source: Aminabadi et al., "DeepSpeed Inference" (2022), section III-B.

mod rule;

use super::{
    concatenate::{Group, concatenate, groups, weight_of},
    rewrite::{uses, with_nodes},
};
use dsrun_core::{
    Result,
    op::Op,
    program::{Call, Node, Origin, Program, ValueId},
    region::{Region, well_known},
};
use rule::{Run, Tiles};
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::Arc,
};

/// Says whether a device has a kernel for a call, whose operands and results are values of the program.
pub type Native<'a> = dyn FnMut(&Program, &Call) -> Result<bool> + 'a;

/// Replaces runs of calls by the largest legal regions that `native` admits.
///
/// # Errors
/// Those of `native`; [`dsrun_core::Code::Internal`] if the result is no valid program.
pub fn fuse(program: &Program, native: &mut Native<'_>) -> Result<Program> {
    let groups = groups(program);
    let mut refused: HashSet<&str> = HashSet::new();
    loop {
        let wanted = |group: &Group| !refused.contains(group.name(program));
        let left: Vec<&Group> = groups.iter().filter(|group| wanted(group)).collect();
        let joined = if left.is_empty() { program.clone() } else { concatenate(program, &groups, &wanted)? };
        let parts = partition(&joined, native)?;
        let alone: Vec<&str> = left
            .iter()
            .filter(|group| !taken_in(&joined, &parts, &group.joined_name(program)))
            .map(|group| group.name(program))
            .collect();
        if alone.is_empty() {
            return replace(&joined, parts);
        }
        refused.extend(alone);
    }
}

/// A part of a program: one call as it stands, or a region in the place of several.
#[derive(Clone, Debug)]
struct Part {
    nodes: Range<usize>,
    region: Option<Call>,
}

/// Whether the product with this weight is used only by the region that makes it.
fn taken_in(program: &Program, parts: &[Part], weight: &str) -> bool {
    let makes =
        |node: &Node| weight_of(&node.call).is_some_and(|id| program.values[id.index()].name == weight);
    let Some(index) = program.nodes.iter().position(makes) else { return false };
    let product = program.nodes[index].call.results[0];
    let home = parts.iter().find(|part| part.nodes.contains(&index));
    home.is_some_and(|part| {
        let mut users = program.nodes.iter().enumerate();
        users.all(|(user, node)| !node.call.operands.contains(&Some(product)) || part.nodes.contains(&user))
    })
}

/// The program with regions in the places of their calls.
fn replace(program: &Program, parts: Vec<Part>) -> Result<Program> {
    if parts.iter().all(|part| part.region.is_none()) {
        return Ok(program.clone());
    }
    let node = |part: Part| {
        let first = &program.nodes[part.nodes.start];
        part.region.map_or_else(|| first.clone(), |call| Node { call, ..first.clone() })
    };
    with_nodes(program, parts.into_iter().map(node).collect())
}

/// What a way to cut a program costs; less is better, the first field counts most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    calls: usize,
    /// Bytes of intermediate results that calls read and write, per row of the step.
    bytes: usize,
    /// Calls that are computed anew in every tile of another.
    recomputed: usize,
}

impl std::ops::Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            calls: self.calls + other.calls,
            bytes: self.bytes + other.bytes,
            recomputed: self.recomputed + other.recomputed,
        }
    }
}

/// Cuts a program into calls and native regions at the least cost.
fn partition(program: &Program, native: &mut Native<'_>) -> Result<Vec<Part>> {
    let uses = uses(program);
    let tiles = program.nodes.iter().map(|node| Tiles::of(program, node)).collect::<Result<Vec<_>>>()?;
    // From the last call to the first: the best way to cut what begins there.
    let mut best: Vec<(Cost, Option<Part>)> = vec![(Cost::default(), None); program.nodes.len() + 1];
    for first in (0..program.nodes.len()).rev() {
        let single = &program.nodes[first].call;
        let cost = Cost { calls: 1, bytes: traffic(program, single), recomputed: 0 };
        let mut chosen = (cost + best[first + 1].0, Part { nodes: first..first + 1, region: None });
        let mut run = Run::new(program, &tiles);
        for index in first..program.nodes.len() {
            let end = index + 1;
            if !run.join(index) {
                break;
            }
            if end - first < 2 || !run.closed(&uses) {
                continue;
            }
            let Some(call) = region(program, first..end, &uses) else { continue };
            let cost = Cost { calls: 1, bytes: traffic(program, &call), recomputed: run.recomputed() };
            let total = cost + best[end].0;
            if total < chosen.0 && native(program, &call)? {
                chosen = (total, Part { nodes: first..end, region: Some(call) });
            }
        }
        best[first] = (chosen.0, Some(chosen.1));
    }
    let mut parts = Vec::new();
    let mut at = 0;
    while let Some((_, Some(part))) = best.get(at) {
        at = part.nodes.end;
        parts.push(part.clone());
    }
    Ok(parts)
}

/// The bytes of intermediate results that a call reads and writes, per row of the step: sizes that are not known yet count
/// as one. What is updated in place is not moved.
fn traffic(program: &Program, call: &Call) -> usize {
    let bytes = |id: &ValueId| {
        let value = &program.values[id.index()];
        let tensor = value.tensor_type().filter(|_| matches!(value.origin, Origin::Node(_)));
        tensor.map_or(0, |tensor| {
            tensor.shape.iter().filter_map(dsrun_core::Size::known).product::<usize>() * tensor.dtype.bytes()
        })
    };
    let updated: Vec<usize> = (0..call.results.len()).filter_map(|result| call.op.updates(result)).collect();
    let operands = call.operands.iter().enumerate().filter(|(index, _)| !updated.contains(index));
    let read: usize = operands.filter_map(|(_, id)| id.as_ref()).map(bytes).sum();
    let results = call.results.iter().enumerate().filter(|(index, _)| call.op.updates(*index).is_none());
    read + results.map(|(_, id)| bytes(id)).sum::<usize>()
}

/// The region of a run of calls; `None` if what they update is lost. Operands are numbered as they are first used, results
/// stand as they are made: the canonical order.
fn region(program: &Program, nodes: Range<usize>, uses: &[usize]) -> Option<Call> {
    let calls = || program.nodes[nodes.clone()].iter().map(|node| &node.call);
    let made: HashSet<ValueId> = calls().flat_map(|call| &call.results).copied().collect();
    let mut inside: HashMap<ValueId, usize> = HashMap::new();
    let (mut numbers, mut operands): (HashMap<ValueId, usize>, Vec<ValueId>) = Default::default();
    for id in calls().flat_map(|call| call.operands.iter().flatten()) {
        if made.contains(id) {
            *inside.entry(*id).or_default() += 1;
        } else if !numbers.contains_key(id) {
            numbers.insert(*id, operands.len());
            operands.push(*id);
        }
    }
    for id in calls().flat_map(|call| &call.results) {
        let number = numbers.len();
        numbers.insert(*id, number);
    }
    let renamed = |id: &ValueId| numbers.get(id).copied().map(ValueId::new);
    let body = calls().map(|call| {
        let operands = call.operands.iter().map(|id| id.as_ref().and_then(renamed)).collect();
        Call::new(call.op.clone(), operands, call.results.iter().filter_map(renamed).collect())
    });
    let is_result = |id: &&ValueId| uses[id.index()] > inside.get(id).copied().unwrap_or(0);
    let results: Vec<ValueId> = calls().flat_map(|call| &call.results).filter(is_result).copied().collect();
    let names: Vec<&str> = calls().map(|call| call.op.name()).collect();
    let renamed_results = results.iter().filter_map(renamed).collect();
    let region = Region::new(names.join("+"), operands.len(), body.collect(), renamed_results).ok()?;
    let region = well_known::named(&region).unwrap_or(region);
    Some(Call::new(Op::Region(Arc::new(region)), operands.into_iter().map(Some).collect(), results))
}
