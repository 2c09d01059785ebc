//! Deep-Fusion: groups calls into regions that the device has fused kernels for.
//!
//! The pass has no list of patterns. It tries runs of consecutive calls, keeps those that a rule allows, and asks the device
//! about each. Of all partitions of a program into calls and native regions it takes the one with the fewest calls; on ties the
//! one that moves the fewest bytes between calls, then the one that recomputes least.
//!
//! It runs in two steps:
//!
//! - [`fuse`], once for a program: the [tile rule](tiles) allows calls whose tiles depend on one tile of their producer, so any
//!   device gains by fusing them, whatever the size of the step. Projections of the same activations are concatenated first,
//!   but only where the calls that split the result become part of a region; otherwise concatenation would gain nothing.
//! - [`Merger`], for the sizes of each step: [neighbours](neighbours) that use each other's results become larger regions. The pass
//!   repeats on its own result until the device supports no larger regions. So a whole layer, all layers with the embedding, or
//!   the end of sampling become one launch where a device has a kernel for them, and the program shows it.
//!
//! Source: Aminabadi et al., "DeepSpeed Inference" (2022), section III-B.

mod key;
mod merger;
mod neighbours;
mod runs;
mod tiles;

use super::{
    concatenate::{Group, concatenate, groups, weight_of},
    rewrite::with_nodes,
};
use dsrun_core::{
    Result,
    program::{Call, Node, Origin, Program, ValueId},
};
use merger::Answers;
pub use merger::Merger;
use runs::Runs;
use std::{collections::HashSet, ops::Range};
use tiles::{TileRun, Tiles};

/// Says whether a device has a kernel for a call, whose operands and results are values of the program.
pub type Native<'a> = dyn FnMut(&Program, &Call) -> Result<bool> + 'a;

/// Replaces runs of calls by the largest legal regions that `native` supports.
///
/// # Errors
/// The errors of `native`; [`dsrun_core::Code::Internal`] if the result is no valid program.
pub fn fuse(program: &Program, native: &mut Native<'_>) -> Result<Program> {
    let groups = groups(program);
    let mut refused: HashSet<&str> = HashSet::new();
    loop {
        let wanted = |group: &Group| !refused.contains(group.name(program));
        let left: Vec<&Group> = groups.iter().filter(|group| wanted(group)).collect();
        let joined = if left.is_empty() { program.clone() } else { concatenate(program, &groups, &wanted)? };
        let tiles = joined.nodes.iter().map(|node| Tiles::of(&joined, node)).collect::<Result<Vec<_>>>()?;
        let uses = joined.uses();
        let runs = Runs::new(&joined, &uses, || TileRun::new(&joined, &tiles))?;
        let once = vec![0; runs.sizes().len()];
        let parts = partition(&joined, &uses, &runs, &once, &Answers::default(), native)?;
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

/// A run of neighbouring calls that may become a region.
trait Run {
    /// Adds the next call, if the rule allows it. After a refusal, every later call is refused.
    fn join(&mut self, node: usize) -> bool;

    /// Whether the run may end after the last call. `uses` counts the readers of each value.
    fn may_end(&self, uses: &[usize]) -> bool;

    /// The number of calls that are recomputed for every tile of another call.
    fn recomputed(&self) -> usize;
}

/// One element of a partition: an unchanged call, or a region that replaces several.
#[derive(Clone, Debug)]
struct Part {
    nodes: Range<usize>,
    region: Option<Call>,
}

/// Whether the result of the product with this weight is read only inside the product's own region.
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

/// The program with each run of calls replaced by its region.
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

/// The cost of a partition of a program; less is better, and the first field counts most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    calls: usize,
    /// Bytes of intermediate results that calls read and write, per row of the step.
    bytes: usize,
    /// Calls that are recomputed for every tile of another call.
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

/// Partitions a program into calls and native regions at the least cost. `uses` counts the readers of each value, and `sizes` numbers the
/// sizes of the step, by the sets of sizes that runs depend on. Layers repeat, so `answers` are kept: the device is asked once about equal
/// runs at equal sizes.
fn partition(
    program: &Program,
    uses: &[usize],
    runs: &Runs,
    sizes: &[usize],
    answers: &Answers,
    native: &mut Native<'_>,
) -> Result<Vec<Part>> {
    // Dynamic programming from the last call to the first: the best partition of the calls from each one on.
    let mut best: Vec<(Cost, Option<Part>)> = vec![(Cost::default(), None); program.nodes.len() + 1];
    for first in (0..program.nodes.len()).rev() {
        let single = &program.nodes[first].call;
        let cost = Cost { calls: 1, bytes: traffic(program, single), recomputed: 0 };
        let mut chosen = (cost + best[first + 1].0, Part { nodes: first..first + 1, region: None });
        for run in runs.beginning_at(first) {
            let question = (run.key, sizes[run.sizes]);
            let known = answers.get(question);
            if known == Some(false) {
                continue;
            }
            let Some(call) = program.outline(first..run.end, uses) else { continue };
            let cost = Cost { calls: 1, bytes: traffic(program, &call), recomputed: run.recomputed };
            let total = cost + best[run.end].0;
            if total >= chosen.0 {
                continue;
            }
            let answer = match known {
                Some(answer) => answer,
                None => native(program, &call)?,
            };
            if known.is_none() {
                answers.keep(question, answer);
            }
            if answer {
                chosen = (total, Part { nodes: first..run.end, region: Some(call) });
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

/// The bytes of intermediate results that a call reads and writes, per row of the step: unknown sizes count as one.
/// Operands that are updated in place are not counted.
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
