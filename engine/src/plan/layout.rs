//! Plans the memory of a step: inputs contiguous in one buffer, intermediate results in an arena by lifetime.

use super::{
    bucket::{Bucket, FixedSizes},
    calls::describe,
    mesh_rank::MeshRank,
    step_interface::{StepInput, StepOutput, StepSegment, StepSize},
};
use crate::error::Result;
use dsrun_core::{
    DType, Error, Size,
    checked::ValidCall,
    device::Device,
    op::{Op, OperandType},
    program::{Call, Node, Origin, Program, ValueId},
};
use std::{collections::HashMap, ops::Range, sync::Arc};

/// A program with its storage planned for one bucket. Making one allocates nothing on the device.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The program of the bucket's steps.
    pub(crate) program: Arc<Program>,
    /// The description that each node is planned from.
    pub(crate) calls: Vec<ValidCall>,
    /// The offsets of the inputs.
    pub(crate) inputs: InputLayout,
    /// Bytes of the memory that steps share.
    pub(crate) shared: SharedSizes,
    /// The segments of the program.
    segments: Vec<StepSegment>,
    /// The byte ranges of results in the arena, by the value that owns the storage.
    arena: HashMap<ValueId, Range<usize>>,
    /// For each value, the value whose storage it uses: itself, the value it updates in place, or the operand of a gather that is
    /// skipped.
    storage_owners: Vec<ValueId>,
    /// For each node, whether it is skipped because its result is its operand unchanged.
    in_place: Vec<bool>,
}

/// Bytes of the memory that all steps share, since steps run one at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SharedSizes {
    /// Inputs of a step.
    pub(crate) inputs: usize,
    /// Intermediate results and outputs.
    pub(crate) arena: usize,
    /// Scratch memory of the op that needs the most.
    pub(crate) workspace: usize,
}

impl SharedSizes {
    /// The elementwise maximum.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            inputs: self.inputs.max(other.inputs),
            arena: self.arena.max(other.arena),
            workspace: self.workspace.max(other.workspace),
        }
    }

    /// Whether every size is at least that of `other`.
    pub(crate) fn covers(self, other: Self) -> bool {
        self.max(other) == self
    }
}

impl Layout {
    /// Plans the storage of `program` for a bucket. Results whose lifetimes do not overlap may share memory. Collectives
    /// run over the groups of `mesh`.
    ///
    /// # Errors
    /// If a size has no value, or the device does not support a call.
    pub(crate) fn new(
        program: &Arc<Program>,
        device: &dyn Device,
        bucket: Bucket,
        fixed: FixedSizes,
        mesh: Option<&MeshRank>,
    ) -> Result<Self> {
        Self::with_lifetimes(program, device, bucket, fixed, mesh, |owners| last_uses(program, owners))
    }

    /// Plans the storage of `program` so that every result is kept: calls can then be run again in any order.
    ///
    /// # Errors
    /// Same as [`Self::new`].
    pub(crate) fn keeping_all(
        program: &Arc<Program>,
        device: &dyn Device,
        bucket: Bucket,
        fixed: FixedSizes,
    ) -> Result<Self> {
        let forever = (0..program.values.len()).map(|index| (ValueId::new(index), usize::MAX)).collect();
        Self::with_lifetimes(program, device, bucket, fixed, None, |_| forever)
    }

    fn with_lifetimes(
        program: &Arc<Program>,
        device: &dyn Device,
        bucket: Bucket,
        fixed: FixedSizes,
        mesh: Option<&MeshRank>,
        last_uses: impl FnOnce(&[ValueId]) -> HashMap<ValueId, usize>,
    ) -> Result<Self> {
        let sizes = bucket.sizes(fixed);
        let alignment = device.properties().alignment.max(4);
        let calls = describe(program, &sizes, mesh)?;
        let mut workspace = 0;
        for call in &calls {
            let support = device.kernels().query(call)?;
            if !support.native {
                return Err(Error::unsupported(support.reason).in_op(call.op.name()).into());
            }
            workspace = workspace.max(support.workspace_bytes);
        }
        let gathers_in_place = |node: &Node| bucket.all_rows && gathers_output_rows(program, &node.call);
        let in_place: Vec<bool> = program.nodes.iter().map(gathers_in_place).collect();
        let storage_owners = storage_owners(program, &in_place);
        let last_uses = last_uses(&storage_owners);
        let inputs = InputLayout::new(program, &sizes, alignment)?;
        let (arena, arena_bytes) = place_results(program, &calls, &storage_owners, &last_uses, alignment)?;
        let shared = SharedSizes { inputs: inputs.bytes, arena: arena_bytes, workspace };
        let segments = program.segments.iter().map(|segment| {
            let name = &segment.name;
            let unknown =
                || Error::internal(format!("the engine does not run segment `{name}` of the program"));
            StepSegment::from_name(name).ok_or_else(unknown)
        });
        let segments = segments.collect::<Result<_, _>>()?;
        let program = program.clone();
        Ok(Self { program, calls, inputs, shared, segments, arena, storage_owners, in_place })
    }

    /// Whether a node has to run. In a step where every row is an output row, the gather of output rows is skipped.
    pub(crate) fn runs(&self, node: usize) -> bool {
        self.in_place.get(node) == Some(&false)
    }

    /// The segment of the program with this index.
    ///
    /// # Errors
    /// If the program has fewer segments.
    pub(crate) fn segment(&self, index: usize) -> Result<StepSegment> {
        let segment = self.segments.get(index).copied();
        Ok(segment.ok_or_else(|| Error::internal(format!("the program has no segment {index}")))?)
    }

    /// The value of an output.
    ///
    /// # Errors
    /// If the program does not have the output.
    pub(crate) fn output(&self, output: StepOutput) -> Result<ValueId> {
        let value = output.value(&self.program);
        Ok(value.ok_or_else(|| Error::internal(format!("the program has no output `{}`", output.name())))?)
    }

    /// The value whose storage this one uses.
    pub(super) fn storage_owner(&self, id: ValueId) -> ValueId {
        self.storage_owners.get(id.index()).copied().unwrap_or(id)
    }

    /// The byte range of a result in the arena, if the value owns storage there.
    pub(super) fn arena_range(&self, id: ValueId) -> Option<Range<usize>> {
        self.arena.get(&id).cloned()
    }

    /// The byte range in the input buffer of the extent of a value's first dimension, if the dimension is bounded.
    pub(super) fn extent_range(&self, id: ValueId) -> Result<Option<Range<usize>>> {
        let OperandType::Tensor(tensor) = &self.program.value(id)?.value_type else { return Ok(None) };
        let Some(Size::Bounded(name)) = tensor.shape.first() else { return Ok(None) };
        let index = self.program.extents.iter().position(|extent| extent == name);
        Ok(index.map(|index| index * DType::I32.bytes()..(index + 1) * DType::I32.bytes()))
    }
}

/// The layout of the input buffer, which one upload fills: a step's extents and inputs.
#[derive(Debug)]
pub(crate) struct InputLayout {
    /// The sizes whose extents are stored first, in this order, as i32.
    pub(crate) extents: Vec<StepSize>,
    /// Bytes of the input buffer.
    pub(crate) bytes: usize,
    ranges: [Option<Range<usize>>; StepInput::ALL.len()],
}

impl InputLayout {
    /// Lays out the extents and then the inputs of a program, in the order of the program.
    ///
    /// # Errors
    /// If the engine does not know an extent or input, or a size has no value.
    pub(crate) fn new(
        program: &Program,
        sizes: &dyn Fn(&str) -> Option<usize>,
        alignment: usize,
    ) -> Result<Self> {
        let extent = |name: &Arc<str>| {
            let unknown =
                || Error::internal(format!("the engine does not fill extent `{name}` of the program"));
            StepSize::from_name(name).ok_or_else(unknown)
        };
        let extents: Vec<StepSize> = program.extents.iter().map(extent).collect::<Result<_, _>>()?;
        let mut end = extents.len() * DType::I32.bytes();
        let mut ranges = [const { None }; StepInput::ALL.len()];
        for (_, value) in program.values_from(|origin| *origin == Origin::Input) {
            let Some(tensor) = value.tensor_type() else { continue };
            let name = &value.name;
            let input = StepInput::from_name(name).ok_or_else(|| {
                Error::internal(format!("the engine does not fill input `{name}` of the program"))
            })?;
            let bytes = tensor.resolve(sizes)?.iter().product::<usize>() * tensor.dtype.bytes();
            let start = end.next_multiple_of(alignment);
            end = start + bytes;
            ranges[input as usize] = Some(start..end);
        }
        Ok(Self { extents, bytes: end, ranges })
    }

    /// The byte range of an input, if the program has it.
    pub(crate) fn find(&self, input: StepInput) -> Option<Range<usize>> {
        self.ranges[input as usize].clone()
    }

    /// The byte range of an input.
    ///
    /// # Errors
    /// If the program does not have the input.
    pub(crate) fn range(&self, input: StepInput) -> Result<Range<usize>> {
        let range = self.find(input);
        Ok(range.ok_or_else(|| Error::internal(format!("the program has no input `{}`", input.name())))?)
    }
}

/// Whether a call gathers the output rows. It can be skipped in a step of one token, too: if that token is not an output row, no
/// later call reads its result.
fn gathers_output_rows(program: &Program, call: &Call) -> bool {
    let rows = call.operands.get(1).copied().flatten().and_then(|rows| program.values.get(rows.index()));
    matches!(call.op, Op::GatherRows(_))
        && rows.is_some_and(|rows| rows.origin == Origin::Input && rows.name == StepInput::Rows.name())
}

/// Follows in-place updates and skipped gathers back to the value that owns the storage.
fn storage_owners(program: &Program, in_place: &[bool]) -> Vec<ValueId> {
    let mut owners: Vec<ValueId> = (0..program.values.len()).map(ValueId::new).collect();
    for (node, in_place) in program.nodes.iter().zip(in_place) {
        for (index, result) in node.call.results.iter().enumerate() {
            let source = if *in_place { Some(0) } else { node.call.op.updates(index) };
            let operand = source.and_then(|operand| *node.call.operands.get(operand)?);
            if let Some(operand) = operand {
                owners[result.index()] = owners[operand.index()];
            }
        }
    }
    owners
}

/// The last call that uses each value that owns storage.
fn last_uses(program: &Program, owners: &[ValueId]) -> HashMap<ValueId, usize> {
    let mut last_uses: HashMap<ValueId, usize> = HashMap::new();
    for (index, node) in program.nodes.iter().enumerate() {
        let used = node.call.operands.iter().flatten().chain(&node.call.results);
        for id in used {
            last_uses.insert(owners[id.index()], index);
        }
    }
    // The host copies an output after its segment and before the next one.
    for output in &program.outputs {
        let Some(Origin::Node(node)) = program.values.get(output.index()).map(|value| &value.origin) else {
            continue;
        };
        let segment = program.nodes.get(*node).map(|node| node.segment);
        let end = program.nodes.iter().rposition(|other| Some(other.segment) == segment);
        let last_use = last_uses.entry(owners[output.index()]).or_default();
        *last_use = (*last_use).max(end.unwrap_or(usize::MAX));
    }
    last_uses
}

/// First-fit allocation by lifetime: a result may reuse the memory of another one that no later call uses.
fn place_results(
    program: &Program,
    calls: &[ValidCall],
    owners: &[ValueId],
    last_uses: &HashMap<ValueId, usize>,
    alignment: usize,
) -> Result<(HashMap<ValueId, Range<usize>>, usize)> {
    let mut placed: HashMap<ValueId, Range<usize>> = HashMap::new();
    let mut live: Vec<(Range<usize>, usize)> = Vec::new();
    let mut end = 0;
    for (index, (node, call)) in program.nodes.iter().zip(calls).enumerate() {
        live.retain(|(_, last)| *last >= index);
        for (result, desc) in node.call.results.iter().zip(&call.results) {
            let owner = owners[result.index()];
            if owner != *result {
                continue;
            }
            // Even an empty result gets one byte, so that no two live results have the same address.
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
            live.push((range.clone(), last_uses.get(&owner).copied().unwrap_or(index)));
            placed.insert(owner, range);
        }
    }
    Ok((placed, end))
}
