//! The runs of calls of a program that may become regions.

use super::{Run, key::Keys};
use dsrun_core::{
    Result, Size,
    op::OperandType,
    program::{Node, Program},
};
use std::{collections::HashMap, sync::Arc};

/// The runs that a rule allows, by their first calls. They do not depend on the sizes of a step.
#[derive(Debug)]
pub(super) struct Runs {
    /// The runs from each call on, the shorter ones first.
    from: Vec<Vec<Candidate>>,
    /// The distinct sets of sizes that runs depend on.
    sizes: Vec<SizeSet>,
}

/// For each of the program's symbols, whether a run has values with that size.
pub(super) type SizeSet = Vec<bool>;

/// A run of two calls or more that may become a region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// The call after its last one.
    pub(super) end: usize,
    /// Equal for runs that get the same answer from a device at the same sizes.
    pub(super) key: usize,
    /// The number of its set of sizes in [`Runs::sizes`].
    pub(super) sizes: usize,
    /// The number of calls that are recomputed for every tile of another call.
    pub(super) recomputed: usize,
}

impl Runs {
    /// Lists the runs that the rule allows; `begin` makes an empty run. `uses` counts the readers of each value.
    ///
    /// # Errors
    /// If a call has an operand that the program does not define.
    pub(super) fn new<R: Run>(program: &Program, uses: &[usize], begin: impl Fn() -> R) -> Result<Self> {
        let mut keys = Keys::new(program, uses)?;
        let symbols = program.symbols();
        let own: Vec<SizeSet> =
            program.nodes.iter().map(|node| sizes_of(program, node, &symbols)).collect::<Result<_>>()?;
        let mut sets: HashMap<SizeSet, usize> = HashMap::new();
        let mut from = Vec::with_capacity(program.nodes.len());
        for first in 0..program.nodes.len() {
            let (mut run, mut keyed) = (begin(), keys.begin());
            let (mut set, mut runs) = (SizeSet::new(), Vec::new());
            for (index, sizes) in own.iter().enumerate().skip(first) {
                if !run.join(index) {
                    break;
                }
                keys.extend(&mut keyed, index);
                set.resize(sizes.len(), false);
                set.iter_mut().zip(sizes).for_each(|(any, own)| *any |= own);
                let end = index + 1;
                if end - first < 2 || !run.may_end(uses) {
                    continue;
                }
                let next = sets.len();
                let sizes = *sets.entry(set.clone()).or_insert(next);
                runs.push(Candidate { end, key: keyed.key, sizes, recomputed: run.recomputed() });
            }
            from.push(runs);
        }
        let mut sizes: Vec<(SizeSet, usize)> = sets.into_iter().collect();
        sizes.sort_by_key(|(_, number)| *number);
        Ok(Self { from, sizes: sizes.into_iter().map(|(set, _)| set).collect() })
    }

    /// The runs from a call on, the shorter ones first.
    pub(super) fn beginning_at(&self, first: usize) -> &[Candidate] {
        &self.from[first]
    }

    /// The distinct sets of sizes that runs depend on.
    pub(super) fn sizes(&self) -> &[SizeSet] {
        &self.sizes
    }
}

/// The sizes of the values of a call.
fn sizes_of(program: &Program, node: &Node, symbols: &[Arc<str>]) -> Result<SizeSet> {
    let operands = program.operand_types(&node.call.operands)?;
    let results = program.operand_types(&node.call.results.iter().copied().map(Some).collect::<Vec<_>>())?;
    let tensors = operands.iter().chain(&results).flatten().filter_map(|value| match value {
        OperandType::Tensor(tensor) => Some(&tensor.shape),
        OperandType::Weight(_) => None,
    });
    let names: Vec<_> = tensors
        .flatten()
        .filter_map(|size| match size {
            Size::Bucket(name) | Size::Bounded(name) => Some(name),
            Size::Static(_) => None,
        })
        .collect();
    Ok(symbols.iter().map(|symbol| names.contains(&symbol)).collect())
}
