//! Writes the program of one stage.

use super::{cuts::Cuts, rank_of_stage};
use dsrun_core::{
    Error, Result, TensorType,
    op::{MeshAxis, OperandType, Receive, Send},
    program::{Origin, Program, ProgramBuilder, ValueId},
};
use std::collections::HashMap;

/// Writes the program of stage `stage` of `stages`, whose divided calls lie between two cuts; `None` is the beginning or the end of the program.
///
/// # Errors
/// If the result is not a valid program.
pub(super) fn stage_program(
    cuts: &Cuts<'_>,
    [begin, end]: [Option<usize>; 2],
    stage: usize,
    stages: usize,
) -> Result<Program> {
    let source = cuts.program();
    let mut own = vec![false; source.nodes.len()];
    for (index, own) in own.iter_mut().enumerate().filter(|(index, _)| !cuts.is_replicated(*index)) {
        let position = cuts.position(index);
        *own = begin.is_none_or(|begin| position >= begin) && end.is_none_or(|end| position < end);
    }
    add_replicated(cuts, &mut own);
    let builder = ProgramBuilder::new(source.name.clone());
    let mut writer = Writer { source, builder, values: HashMap::new(), stage, stages };
    for extent in &source.extents {
        writer.builder.bounded(extent);
    }
    for (id, value) in source.values_from(|origin| *origin == Origin::Input) {
        if let Some(tensor) = value.tensor_type() {
            let input = writer.builder.input(value.name.clone(), tensor.clone())?;
            writer.values.insert(id, input);
        }
    }
    let mut incoming: Vec<ValueId> = begin.map_or_else(Vec::new, |cut| cuts.crossing(cut).collect());
    let (mut segment, mut left) = (None, 0);
    for (index, node) in source.nodes.iter().enumerate().filter(|(index, _)| own[*index]) {
        if segment != Some(node.segment) {
            let known = &source.segments[node.segment];
            writer.builder.segment(known.name.clone(), known.kind);
            segment = Some(node.segment);
        }
        // Replicated calls need no received values, so they run before the first receive.
        if !cuts.is_replicated(index) {
            for id in incoming.drain(..) {
                writer.receive(id)?;
            }
            left += 1;
        }
        writer.copy(index)?;
    }
    if left == 0 {
        return Err(Error::internal("a stage has no calls"));
    }
    for id in end.into_iter().flat_map(|cut| cuts.crossing(cut)) {
        let (axis, value) = (MeshAxis::Pipeline, writer.value(id)?);
        writer.builder.calls(Send { axis, peer: peer(stage + 1, stages)? }, [Some(value)])?;
    }
    if end.is_none() {
        // The caches of other stages are not outputs of this stage.
        let outputs = source.outputs.iter().filter_map(|id| writer.values.get(id).copied());
        let outputs: Vec<ValueId> = outputs.collect();
        return writer.builder.finish(&outputs);
    }
    // The host reads results of the last stage only. The outputs of other stages are the states that they update, so that no
    // update is removed as dead code.
    let mut program = writer.builder.finish(&[])?;
    program.outputs = updated_states(&program);
    program.validate()?;
    Ok(program)
}

/// The last value of each state that a program updates.
fn updated_states(program: &Program) -> Vec<ValueId> {
    let mut updated = Vec::new();
    for call in program.nodes.iter().map(|node| &node.call) {
        for (index, result) in call.results.iter().enumerate() {
            let before = call.op.updates(index).and_then(|operand| call.operands[operand]);
            let Some(before) = before else { continue };
            let known = updated.iter().position(|id| *id == before);
            if known.is_some() || program.values[before.index()].origin == Origin::State {
                known.map(|place| updated.remove(place));
                updated.push(*result);
            }
        }
    }
    updated
}

/// Adds the calls that run on every stage that needs their results to the calls of a stage.
fn add_replicated(cuts: &Cuts<'_>, own: &mut [bool]) {
    let source = cuts.program();
    for index in (0..own.len()).rev().filter(|index| cuts.is_replicated(*index)).collect::<Vec<_>>() {
        let results = &source.nodes[index].call.results;
        let needs = |(reader, own): (usize, &bool)| {
            *own && source.nodes[reader].call.operands.iter().flatten().any(|id| results.contains(id))
        };
        own[index] = own.iter().enumerate().skip(index + 1).any(needs);
    }
}

/// The rank of a stage in the group of the pipeline axis.
fn peer(stage: usize, stages: usize) -> Result<u32> {
    u32::try_from(rank_of_stage(stage, stages))
        .map_err(|_| Error::invalid(format!("{stage} is out of range")).at("stages"))
}

/// The program of a stage while it is written.
struct Writer<'a> {
    source: &'a Program,
    builder: ProgramBuilder,
    /// The values of the stage's program, by those of the whole program.
    values: HashMap<ValueId, ValueId>,
    stage: usize,
    stages: usize,
}

impl Writer<'_> {
    fn value(&self, id: ValueId) -> Result<ValueId> {
        let value = self.values.get(&id).copied();
        value.ok_or_else(|| Error::internal(format!("stage {} has no value {id}", self.stage)))
    }

    /// Receives a value from the stage before this one, into memory that the stage keeps for it.
    fn receive(&mut self, id: ValueId) -> Result<()> {
        let lost = || Error::internal(format!("{id} is not a tensor"));
        let tensor = self.source.value(id)?.tensor_type().cloned().ok_or_else(lost)?;
        let buffer = self.builder.state(format!("received.{}", id.index()), tensor)?;
        let before = self.stage.checked_sub(1).ok_or_else(|| Error::internal("the first stage receives"))?;
        let receive = Receive { axis: MeshAxis::Pipeline, peer: peer(before, self.stages)? };
        let received = self.builder.call(receive, [Some(buffer)])?;
        self.values.insert(id, received);
        Ok(())
    }

    /// Copies a call, with the weights and states that it is the first to read.
    fn copy(&mut self, index: usize) -> Result<()> {
        let call = &self.source.nodes[index].call;
        let mut operands = Vec::with_capacity(call.operands.len());
        for id in &call.operands {
            operands.push(id.map(|id| self.declared(id)).transpose()?);
        }
        let results = self.builder.calls(call.op.clone(), operands)?;
        self.values.extend(call.results.iter().copied().zip(results));
        Ok(())
    }

    fn declared(&mut self, id: ValueId) -> Result<ValueId> {
        if let Some(known) = self.values.get(&id) {
            return Ok(*known);
        }
        let value = self.source.value(id)?;
        let name = value.name.clone();
        let declared = match (&value.origin, &value.value_type) {
            (Origin::Weight(expr), OperandType::Weight(weight)) => {
                self.builder.weight(name, expr.clone(), weight.clone())?
            }
            (Origin::Weight(expr), OperandType::Tensor(tensor)) => {
                self.builder.vector(name, expr.clone(), tensor.clone())?
            }
            (Origin::State, OperandType::Tensor(TensorType { dtype, shape })) => {
                self.builder.state(name, TensorType { dtype: *dtype, shape: shape.clone() })?
            }
            _ => return Err(Error::internal(format!("stage {} does not receive {id}", self.stage))),
        };
        self.values.insert(id, declared);
        Ok(declared)
    }
}
