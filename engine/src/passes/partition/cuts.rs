//! Finds the points where a program can be cut into stages, and the values that cross each.

use super::super::shard::MeshCosts;
use dsrun_core::{
    Error, Result,
    op::Op,
    program::{Origin, Program, ValueId},
};

/// Where a value that a stage has to send is made and used, as positions in the list of calls that are divided.
#[derive(Clone, Copy, Debug)]
struct Span {
    value: ValueId,
    made: usize,
    last_use: usize,
}

/// A program with the places at which it can be cut.
///
/// Only calls of the first segment that depend on a weight are divided among stages. Other calls of that segment are replicated
/// on every stage that needs them, and later segments run on the last stage.
#[derive(Debug)]
pub(super) struct Cuts<'a> {
    program: &'a Program,
    /// Whether each call runs on every stage that needs its results.
    replicated: Vec<bool>,
    /// For each call, its position among those that are divided.
    positions: Vec<Option<usize>>,
    spans: Vec<Span>,
    /// The positions before which a stage may begin.
    candidates: Vec<usize>,
}

impl<'a> Cuts<'a> {
    /// Finds the places where the fewest bytes cross.
    ///
    /// # Errors
    /// If a later stage would have to send an earlier one anything but sampled tokens.
    pub(super) fn new(program: &'a Program, costs: &MeshCosts) -> Result<Self> {
        let replicated = replicated_calls(program);
        let first = program.nodes.first().map_or(0, |node| node.segment);
        let mut count = 0;
        let mut position = |(index, replicated): (usize, &bool)| {
            let divided = !replicated && program.nodes[index].segment == first;
            count += usize::from(divided);
            divided.then(|| count - 1)
        };
        let positions: Vec<Option<usize>> = replicated.iter().enumerate().map(&mut position).collect();
        let mut cuts = Self { program, replicated, positions, spans: Vec::new(), candidates: Vec::new() };
        let states = cuts.states();
        cuts.check_feedback(&states)?;
        cuts.spans = cuts.spans_of_results(&states);
        let stays = cuts.spans_of_states(&states);
        let splits_state = |cut: usize| stays.iter().any(|(first, last)| *first < cut && cut <= *last);
        let possible = (1..count).filter(|cut| !splits_state(*cut) && cuts.can_cross(*cut));
        let bytes: Vec<(usize, f64)> = possible.map(|cut| (cut, cuts.crossing_bytes(cut, costs))).collect();
        let fewest = bytes.iter().map(|(_, bytes)| *bytes).fold(f64::INFINITY, f64::min);
        cuts.candidates =
            bytes.into_iter().filter(|(_, bytes)| *bytes <= fewest).map(|(cut, _)| cut).collect();
        Ok(cuts)
    }

    pub(super) fn program(&self) -> &'a Program {
        self.program
    }

    /// The positions before which a stage may begin.
    pub(super) fn candidates(&self) -> &[usize] {
        &self.candidates
    }

    /// Whether a call runs on every stage that needs its results.
    pub(super) fn is_replicated(&self, call: usize) -> bool {
        self.replicated[call]
    }

    /// The position of a call among the divided calls; past the last one if it belongs to a later segment.
    pub(super) fn position(&self, call: usize) -> usize {
        self.positions[call].unwrap_or(usize::MAX)
    }

    /// The piece between neighbouring cuts that a call belongs to; `None` if it is replicated.
    pub(super) fn piece_of_call(&self, call: usize) -> Option<usize> {
        let position = self.position(call);
        (!self.replicated[call]).then(|| self.candidates.partition_point(|cut| *cut <= position))
    }

    /// The values that stages after a cut need from stages before it.
    pub(super) fn crossing(&self, cut: usize) -> impl Iterator<Item = ValueId> + '_ {
        self.spans.iter().filter(move |span| span.made < cut && cut <= span.last_use).map(|span| span.value)
    }

    /// The bytes of these values in a step.
    pub(super) fn crossing_bytes(&self, cut: usize, costs: &MeshCosts) -> f64 {
        let tensors = self.crossing(cut).filter_map(|id| self.program.values[id.index()].tensor_type());
        tensors.map(|tensor| costs.bytes(tensor)).sum()
    }

    /// The first piece of the stage that begins with a layer.
    ///
    /// # Errors
    /// If no weight or state of the program belongs to that layer, or no cut separates it from the layer before it.
    pub(super) fn piece_of_layer(&self, layer: usize) -> Result<usize> {
        let calls_of = |layer: usize| {
            let prefix = format!("layers.{layer}.");
            let of_layer = move |index: &usize| {
                let operands = self.program.nodes[*index].call.operands.iter().flatten();
                operands.map(|id| &self.program.values[id.index()].name).any(|name| name.starts_with(&prefix))
            };
            (0..self.program.nodes.len()).filter(of_layer).filter_map(|index| self.positions[index])
        };
        let begin = calls_of(layer).min().ok_or_else(|| {
            Error::invalid(format!("begins a stage with layer {layer}, which the model does not have"))
                .at("stages")
        })?;
        let end = layer.checked_sub(1).and_then(|before| calls_of(before).max());
        let fits = |cut: &usize| *cut <= begin && end.is_none_or(|end| *cut > end);
        let cut = self.candidates.iter().rposition(fits).ok_or_else(|| {
            Error::invalid(format!("begins a stage with layer {layer}, where the program cannot be cut"))
                .at("stages")
        })?;
        Ok(cut + 1)
    }

    /// The state that each value is or updates.
    fn states(&self) -> Vec<Option<ValueId>> {
        let mut states: Vec<Option<ValueId>> = (self.program.values.iter().enumerate())
            .map(|(index, value)| (value.origin == Origin::State).then(|| ValueId::new(index)))
            .collect();
        for node in &self.program.nodes {
            for (index, result) in node.call.results.iter().enumerate() {
                let updated = node.call.op.updates(index).and_then(|operand| node.call.operands[operand]);
                states[result.index()] = updated.and_then(|id| states[id.index()]);
            }
        }
        states
    }

    /// Checks that nothing but sampled tokens would have to flow back to a call that runs on every stage.
    fn check_feedback(&self, states: &[Option<ValueId>]) -> Result<()> {
        let state = |id: &ValueId| states[id.index()];
        for (index, node) in self.program.nodes.iter().enumerate() {
            if self.replicated[index] || matches!(node.call.op, Op::CommitTokens(_)) {
                continue;
            }
            for updated in node.call.results.iter().filter_map(state) {
                let mut readers = self.program.nodes.iter().zip(&self.replicated).filter(|(_, own)| **own);
                if readers.any(|(reader, _)| {
                    reader.call.operands.iter().flatten().any(|id| state(id) == Some(updated))
                }) {
                    let name = &self.program.values[updated.index()].name;
                    let message = format!("state `{name}` is updated on one stage and read on every stage");
                    return Err(Error::unsupported(message).in_op(node.call.op.name()));
                }
            }
        }
        Ok(())
    }

    /// Where the results of divided calls are made and used. The new value of a state stays on the stage of the state.
    fn spans_of_results(&self, states: &[Option<ValueId>]) -> Vec<Span> {
        let mut last_uses: Vec<Option<usize>> = vec![None; self.program.values.len()];
        for (index, node) in self.program.nodes.iter().enumerate() {
            for id in node.call.operands.iter().flatten() {
                let last = &mut last_uses[id.index()];
                *last = (*last).max(Some(self.position(index)));
            }
        }
        for output in &self.program.outputs {
            last_uses[output.index()] = Some(usize::MAX);
        }
        let mut spans = Vec::new();
        for (index, node) in self.program.nodes.iter().enumerate() {
            let Some(made) = self.positions[index] else { continue };
            for id in node.call.results.iter().filter(|id| states[id.index()].is_none()) {
                spans.extend(last_uses[id.index()].map(|last_use| Span { value: *id, made, last_use }));
            }
        }
        spans
    }

    /// For each state that divided calls update, its first and last use: one stage must contain both.
    fn spans_of_states(&self, states: &[Option<ValueId>]) -> Vec<(usize, usize)> {
        let mut spans = std::collections::BTreeMap::new();
        let mut updated = std::collections::BTreeSet::new();
        for (index, node) in
            self.program.nodes.iter().enumerate().filter(|(index, _)| !self.replicated[*index])
        {
            let position = self.position(index);
            let touched = node.call.operands.iter().flatten().chain(&node.call.results);
            for state in touched.filter_map(|id| states[id.index()]) {
                let (first, last) = spans.entry(state).or_insert((position, position));
                (*first, *last) = ((*first).min(position), (*last).max(position));
            }
            updated.extend(node.call.results.iter().filter_map(|id| states[id.index()]));
        }
        spans.into_iter().filter(|(state, _)| updated.contains(state)).map(|(_, span)| span).collect()
    }

    /// Whether every value that crosses a cut can be sent, and there is one.
    fn can_cross(&self, cut: usize) -> bool {
        let is_plane = |id: ValueId| {
            let tensor = self.program.values[id.index()].tensor_type();
            tensor.is_some_and(|tensor| tensor.shape.len() == 2 && tensor.shape[1].known().is_some())
        };
        let mut crossing = self.crossing(cut).peekable();
        crossing.peek().is_some() && crossing.all(is_plane)
    }
}

/// For each call, whether it depends on no weight: neither by an operand of its own nor by the results that it reads.
fn replicated_calls(program: &Program) -> Vec<bool> {
    let mut replicated: Vec<bool> = Vec::with_capacity(program.nodes.len());
    for node in &program.nodes {
        let depends_on_none = |id: &ValueId| match &program.values[id.index()].origin {
            Origin::Input | Origin::State => true,
            Origin::Weight(_) => false,
            Origin::Node(producer) => replicated.get(*producer).copied().unwrap_or(false),
        };
        let own = node.call.operands.iter().flatten().all(depends_on_none);
        replicated.push(own);
    }
    replicated
}
