//! Where every value of a step is kept: inputs side by side, intermediate results in an arena by their lifetimes.

use super::{EXTENTS, describe};
use crate::error::Result;
use dsrun_core::{
    DType, Error,
    device::Device,
    kernels::CallDesc,
    op::{Op, OperandType},
    program::{Call, Node, Origin, Program, ValueId},
};
use dsrun_models::step::OUTPUTS;
use std::{collections::HashMap, ops::Range};

/// The storage plan of a program for one bucket. Making one allocates nothing on the device.
#[derive(Debug)]
pub(crate) struct Layout {
    /// What each node is planned as.
    pub(crate) calls: Vec<CallDesc>,
    /// Inputs by name, and the extents, as ranges of the input buffer.
    pub(crate) inputs: HashMap<String, Range<usize>>,
    /// Bytes of the input buffer.
    pub(crate) input_bytes: usize,
    /// Results in the arena, by the value that owns the storage.
    pub(crate) arena: HashMap<ValueId, Range<usize>>,
    /// Bytes of the arena.
    pub(crate) arena_bytes: usize,
    /// Scratch memory of the neediest op.
    pub(crate) workspace_bytes: usize,
    /// What the host reads afterwards, by name.
    pub(crate) outputs: Vec<(String, ValueId)>,
    /// For each value, the value whose storage it has: itself, the one it updates, or the one whose rows it is.
    roots: Vec<ValueId>,
    /// For each node, whether its result is its operand as it stands.
    stays: Vec<bool>,
}

impl Layout {
    /// Plans the storage of `program`. Results share memory as their lifetimes allow. `every` says that each token is wanted, or
    /// that there is just one: picking the wanted rows is nothing to do then.
    ///
    /// # Errors
    /// If a size has no value, or the device does not run a call.
    pub(crate) fn new(
        program: &Program,
        device: &dyn Device,
        sizes: &dyn Fn(&str) -> Option<usize>,
        every: bool,
    ) -> Result<Self> {
        Self::with_lifetimes(program, device, sizes, every, |roots| last_uses(program, roots))
    }

    /// Plans the storage of `program` so that every result stays: calls can then be run again out of their order.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(crate) fn keeping_all(
        program: &Program,
        device: &dyn Device,
        sizes: &dyn Fn(&str) -> Option<usize>,
        every: bool,
    ) -> Result<Self> {
        let forever = (0..program.values.len()).map(|index| (ValueId::new(index), usize::MAX)).collect();
        Self::with_lifetimes(program, device, sizes, every, |_| forever)
    }

    /// Makes the shared memory that this asks for large enough for another's.
    pub(crate) fn cover(&mut self, [inputs, arena, workspace]: [usize; 3]) {
        self.input_bytes = self.input_bytes.max(inputs);
        self.arena_bytes = self.arena_bytes.max(arena);
        self.workspace_bytes = self.workspace_bytes.max(workspace);
    }

    /// Bytes of inputs, arena and workspace.
    pub(crate) fn shared_bytes(&self) -> [usize; 3] {
        [self.input_bytes, self.arena_bytes, self.workspace_bytes]
    }

    fn with_lifetimes(
        program: &Program,
        device: &dyn Device,
        sizes: &dyn Fn(&str) -> Option<usize>,
        every: bool,
        last_uses: impl FnOnce(&[ValueId]) -> HashMap<ValueId, usize>,
    ) -> Result<Self> {
        let alignment = device.properties().alignment.max(4);
        let calls = describe(program, sizes)?;
        let mut workspace_bytes = 0;
        for call in &calls {
            let support = device.kernels().query(call)?;
            if !support.native {
                return Err(Error::unsupported(support.reason).in_op(call.op.name()).into());
            }
            workspace_bytes = workspace_bytes.max(support.workspace_bytes);
        }
        let picks = |node: &Node| every && picks_wanted_rows(program, &node.call);
        let stays: Vec<bool> = program.nodes.iter().map(picks).collect();
        let roots = roots(program, &stays);
        let last_uses = last_uses(&roots);
        let (inputs, input_bytes) = place_inputs(program, sizes, alignment)?;
        let (arena, arena_bytes) = place_results(program, &calls, &roots, &last_uses, alignment)?;
        let outputs =
            OUTPUTS.iter().zip(&program.outputs).map(|(name, id)| ((*name).to_owned(), *id)).collect();
        Ok(Self { calls, inputs, input_bytes, arena, arena_bytes, workspace_bytes, outputs, roots, stays })
    }

    /// Whether a node has something to do: where every row is wanted, those that are picked are where they are.
    pub(crate) fn runs(&self, node: usize) -> bool {
        self.stays.get(node) == Some(&false)
    }

    /// The value whose storage this one has.
    pub(crate) fn root(&self, id: ValueId) -> ValueId {
        self.roots.get(id.index()).copied().unwrap_or(id)
    }

    /// Which extent bounds the first dimension of a value.
    pub(crate) fn extent_index(&self, program: &Program, id: ValueId) -> Result<Option<usize>> {
        let OperandType::Tensor(tensor) = &program.value(id)?.value_type else { return Ok(None) };
        let Some(dsrun_core::Size::Bounded(name)) = tensor.shape.first() else { return Ok(None) };
        Ok(program.extents.iter().position(|extent| extent == name))
    }
}

/// Whether a call picks the wanted rows. If there is a single token, which is not wanted, nothing behind it reads a row.
fn picks_wanted_rows(program: &Program, call: &Call) -> bool {
    let rows = call.operands.get(1).copied().flatten().and_then(|rows| program.values.get(rows.index()));
    matches!(call.op, Op::GatherRows(_))
        && rows.is_some_and(|rows| rows.origin == Origin::Input && rows.name == "rows")
}

/// Follows updates, and rows that stay where they are, back to the value that owns the storage.
fn roots(program: &Program, stays: &[bool]) -> Vec<ValueId> {
    let mut roots: Vec<ValueId> = (0..program.values.len()).map(ValueId::new).collect();
    for (node, stays) in program.nodes.iter().zip(stays) {
        for (index, result) in node.call.results.iter().enumerate() {
            let source = if *stays { Some(0) } else { node.call.op.updates(index) };
            let operand = source.and_then(|operand| *node.call.operands.get(operand)?);
            if let Some(operand) = operand {
                roots[result.index()] = roots[operand.index()];
            }
        }
    }
    roots
}

/// Extents and inputs, one behind the other, so that one upload brings them all.
fn place_inputs(
    program: &Program,
    sizes: &dyn Fn(&str) -> Option<usize>,
    alignment: usize,
) -> Result<(HashMap<String, Range<usize>>, usize)> {
    let mut inputs = HashMap::new();
    let mut end = program.extents.len() * DType::I32.bytes();
    inputs.insert(EXTENTS.to_owned(), 0..end);
    for (_, value) in program.values_from(|origin| *origin == Origin::Input) {
        let Some(tensor) = value.tensor_type() else { continue };
        let bytes = tensor.resolve(sizes)?.iter().product::<usize>() * tensor.dtype.bytes();
        let start = end.next_multiple_of(alignment);
        end = start + bytes;
        inputs.insert(value.name.clone(), start..end);
    }
    Ok((inputs, end))
}

/// For each value that owns storage, the last call that uses it.
fn last_uses(program: &Program, roots: &[ValueId]) -> HashMap<ValueId, usize> {
    let mut last_uses: HashMap<ValueId, usize> = HashMap::new();
    for (index, node) in program.nodes.iter().enumerate() {
        let used = node.call.operands.iter().flatten().chain(&node.call.results);
        for id in used {
            last_uses.insert(roots[id.index()], index);
        }
    }
    // The host has an output copied behind its segment, before anything else runs.
    for output in &program.outputs {
        let Some(Origin::Node(node)) = program.values.get(output.index()).map(|value| &value.origin) else {
            continue;
        };
        let segment = program.nodes.get(*node).map(|node| node.segment);
        let end = program.nodes.iter().rposition(|other| Some(other.segment) == segment);
        let last_use = last_uses.entry(roots[output.index()]).or_default();
        *last_use = (*last_use).max(end.unwrap_or(usize::MAX));
    }
    last_uses
}

/// Places results first-fit by their lifetimes: a result may take the place of another that no later call uses.
fn place_results(
    program: &Program,
    calls: &[CallDesc],
    roots: &[ValueId],
    last_uses: &HashMap<ValueId, usize>,
    alignment: usize,
) -> Result<(HashMap<ValueId, Range<usize>>, usize)> {
    let mut placed: HashMap<ValueId, Range<usize>> = HashMap::new();
    let mut live: Vec<(Range<usize>, usize)> = Vec::new();
    let mut end = 0;
    for (index, (node, call)) in program.nodes.iter().zip(calls).enumerate() {
        live.retain(|(_, last)| *last >= index);
        for (result, desc) in node.call.results.iter().zip(&call.results) {
            let root = roots[result.index()];
            if root != *result {
                continue;
            }
            // Even an empty result gets a byte of its own, so that no two results share storage.
            let bytes = desc.bytes()?.max(1).next_multiple_of(alignment);
            live.sort_by_key(|(range, _)| range.start);
            let mut start = 0;
            for (range, _) in &live {
                if start + bytes <= range.start {
                    break;
                }
                start = start.max(range.end);
            }
            let range = start..start + bytes;
            end = end.max(range.end);
            live.push((range.clone(), last_uses.get(&root).copied().unwrap_or(index)));
            placed.insert(root, range);
        }
    }
    Ok((placed, end))
}
