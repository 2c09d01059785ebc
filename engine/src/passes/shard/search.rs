//! The search for the best strategy: dynamic programming over the calls of a program.
//!
//! A state is the form of every live value, that is, one that a later call reads. Replicated values are left out, so there are
//! few states: the residual is replicated, and only one or two values of a layer are split. For each state the strategies that
//! are Pareto-optimal in cost and memory are kept, so the result is the exact optimum within the memory limit.

use super::{
    choices::{Choice, Form, Mesh},
    splits::{Along, is_even, is_partition},
};
use dsrun_core::{
    Code, Error, Result,
    program::{Origin, ValueId},
};
use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
};

/// How ranks convert a value to another form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conversion {
    /// The value has the form already.
    None,
    /// Sums the partial sums of all ranks.
    AllReduce,
    /// Sums them, and each rank keeps a part.
    ReduceScatter,
    /// Joins the parts of all ranks.
    AllGather,
    /// Each rank takes its part of the whole value.
    Slice,
}

/// The forms of the values that later calls read. Results that are whole are left out; weights that several calls read have an
/// entry for each form in which they are held.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Live(Vec<(ValueId, Form)>);

impl Live {
    /// The form of a result.
    pub(super) fn form(&self, id: ValueId) -> Form {
        self.0.iter().find(|(own, _)| *own == id).map_or(Form::Whole, |(_, form)| *form)
    }

    fn holds(&self, id: ValueId, form: Form) -> bool {
        self.0.contains(&(id, form))
    }

    fn insert(&mut self, id: ValueId, form: Form) {
        let place = self.0.partition_point(|other| *other < (id, form));
        self.0.insert(place, (id, form));
    }

    /// Sets the form of a result.
    pub(super) fn set(&mut self, id: ValueId, form: Form) {
        self.0.retain(|(own, _)| *own != id);
        if form != Form::Whole {
            self.insert(id, form);
        }
    }
}

/// A strategy: the choice of each call, with its cost and the memory of the fullest rank.
#[derive(Clone, Debug)]
pub(super) struct Strategy {
    pub(super) choices: Vec<Choice>,
    /// Picoseconds of the step, the price of the memory included.
    pub(super) cost: u64,
    /// Bytes of weights and states.
    pub(super) memory: u64,
}

/// A strategy up to a call.
#[derive(Clone, Debug)]
struct Label {
    cost: u64,
    memory: u64,
    trail: Option<Rc<Trail>>,
}

/// The choices of a strategy, the last first.
#[derive(Debug)]
struct Trail {
    choice: usize,
    before: Option<Rc<Self>>,
}

/// The search over a program.
pub(super) struct Search<'a> {
    pub(super) mesh: Mesh<'a>,
    /// Resolves the sizes of states.
    pub(super) sizes: &'a dyn Fn(&str) -> Option<usize>,
    /// Bytes of weights and states that a rank may hold.
    pub(super) limit: Option<u64>,
    /// The calls that read each value.
    readers: Vec<Vec<usize>>,
    /// Whether a value must be replicated as soon as it is computed, because the host or another segment reads it.
    stays_whole: Vec<bool>,
}

impl<'a> Search<'a> {
    pub(super) fn new(mesh: Mesh<'a>, sizes: &'a dyn Fn(&str) -> Option<usize>, limit: Option<u64>) -> Self {
        let program = mesh.program;
        let mut readers = vec![Vec::new(); program.values.len()];
        for (index, node) in program.nodes.iter().enumerate() {
            for id in node.call.operands.iter().flatten() {
                readers[id.index()].push(index);
            }
        }
        // A state may stay split after its last update, since only its own rank reads it.
        let mut of_state: Vec<bool> =
            program.values.iter().map(|value| value.origin == Origin::State).collect();
        for node in &program.nodes {
            for (index, result) in node.call.results.iter().enumerate() {
                let updated = node.call.op.updates(index).and_then(|operand| node.call.operands[operand]);
                of_state[result.index()] = updated.is_some_and(|id| of_state[id.index()]);
            }
        }
        let stays_whole = program.values.iter().enumerate().map(|(index, value)| {
            let Origin::Node(producer) = value.origin else { return false };
            let segment = program.nodes[producer].segment;
            let elsewhere = readers[index].iter().any(|reader| program.nodes[*reader].segment != segment);
            !of_state[index] && (elsewhere || program.outputs.contains(&ValueId::new(index)))
        });
        let stays_whole = stays_whole.collect();
        Self { mesh, sizes, limit, readers, stays_whole }
    }

    /// Whether a result is whole as soon as it is made.
    pub(super) fn stays_whole(&self, id: ValueId) -> bool {
        self.stays_whole[id.index()]
    }

    /// The cheapest strategy within the memory limit. `admits` says which forms of weights the pins allow.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn best(&self, admits: &dyn Fn(ValueId, Form) -> bool) -> Result<Strategy> {
        let program = self.mesh.program;
        let mut all: Vec<Vec<Choice>> = Vec::with_capacity(program.nodes.len());
        let mut states: BTreeMap<Live, Vec<Label>> = BTreeMap::new();
        states.insert(Live::default(), vec![Label { cost: 0, memory: 0, trail: None }]);
        let mut bytes: HashMap<(ValueId, Form), u64> = HashMap::new();
        for (index, node) in program.nodes.iter().enumerate() {
            let mut choices = self.mesh.choices(&node.call)?;
            choices.retain(|choice| {
                let mut operands = node.call.operands.iter().zip(&choice.needs);
                operands.all(|(id, form)| id.is_none_or(|id| !self.mesh.is_weight(id) || admits(id, *form)))
            });
            let mut next: BTreeMap<Live, Vec<Label>> = BTreeMap::new();
            for (live, labels) in &states {
                for (number, choice) in choices.iter().enumerate() {
                    let step = self.step(index, live, choice, &mut bytes)?;
                    let Some((live, cost, memory)) = step else { continue };
                    for label in labels {
                        let label = Label {
                            cost: label.cost.saturating_add(cost),
                            memory: label.memory.saturating_add(memory),
                            trail: Some(Rc::new(Trail { choice: number, before: label.trail.clone() })),
                        };
                        keep(next.entry(live.clone()).or_default(), label);
                    }
                }
            }
            if next.is_empty() {
                let message = "no strategy is possible with the pinned forms of its weights";
                return Err(Error::invalid(message).in_op(&format!("node {index} ({})", node.call.op.name())));
            }
            if let Some(limit) = self.limit {
                let least = next.values().flatten().map(|label| label.memory).min().unwrap_or(0);
                next.values_mut().for_each(|labels| labels.retain(|label| label.memory <= limit));
                next.retain(|_, labels| !labels.is_empty());
                if next.is_empty() {
                    let ranks = self.mesh.splits.ranks();
                    let message = format!(
                        "each of {ranks} ranks needs at least {least} bytes for weights and KV cache, and {limit} are free; use \
                         more ranks, a smaller context or smaller weights; `dsrun plan` shows what more devices need"
                    );
                    return Err(Error::new(Code::OutOfMemory, message));
                }
            }
            all.push(choices);
            states = next;
        }
        let last = states.into_values().flatten().min_by_key(|label| (label.cost, label.memory));
        let Label { cost, memory, trail } =
            last.ok_or_else(|| Error::internal("the search ended in no state"))?;
        let mut choices = Vec::with_capacity(all.len());
        let mut rest = trail.as_deref();
        for of_call in all.iter().rev() {
            let trail = rest.ok_or_else(|| Error::internal("a strategy lacks a choice"))?;
            choices.extend(of_call.get(trail.choice).cloned());
            rest = trail.before.as_deref();
        }
        choices.reverse();
        Ok(Strategy { choices, cost, memory })
    }

    /// The state after a call, and the cost and memory that the call adds; `None` if the choice is not possible in the state.
    fn step(
        &self,
        index: usize,
        live: &Live,
        choice: &Choice,
        bytes: &mut HashMap<(ValueId, Form), u64>,
    ) -> Result<Option<(Live, u64, u64)>> {
        let call = &self.mesh.program.nodes[index].call;
        let (mut live, mut cost, mut memory) = (live.clone(), choice.time, 0u64);
        for (id, need) in call.operands.iter().zip(&choice.needs) {
            let Some(id) = id else { continue };
            match self.mesh.program.values[id.index()].origin {
                Origin::Input if *need != Form::Whole => return Ok(None),
                Origin::Input => {}
                Origin::State if *need != Form::Whole && self.readers[id.index()].len() > 1 => {
                    return Ok(None);
                }
                Origin::State | Origin::Weight(_) => {
                    let shared = self.readers[id.index()].len() > 1;
                    if shared && live.holds(*id, *need) {
                        continue;
                    }
                    let held = match bytes.get(&(*id, *need)) {
                        Some(known) => *known,
                        None => {
                            let held = self.mesh.resident_bytes(*id, *need, self.sizes)?;
                            bytes.insert((*id, *need), held);
                            held
                        }
                    };
                    memory = memory.saturating_add(held);
                    cost = cost.saturating_add(self.mesh.costs.hold(held));
                    if shared {
                        live.insert(*id, *need);
                    }
                }
                Origin::Node(_) => {
                    let form = live.form(*id);
                    let Some(conversion) = self.conversion(*id, form, *need) else { return Ok(None) };
                    cost = cost.saturating_add(self.conversion_cost(*id, conversion));
                    if !matches!(conversion, Conversion::None | Conversion::Slice) {
                        live.set(*id, *need);
                    }
                }
            }
        }
        for (id, form) in call.results.iter().zip(&choice.makes) {
            let mut form = *form;
            if self.stays_whole(*id) {
                let Some(conversion) = self.conversion(*id, form, Form::Whole) else { return Ok(None) };
                cost = cost.saturating_add(self.conversion_cost(*id, conversion));
                form = Form::Whole;
            }
            live.set(*id, form);
        }
        live.0.retain(|(id, _)| self.readers[id.index()].last().is_some_and(|last| *last > index));
        Ok(Some((live, cost, memory)))
    }

    /// How a value gets another form, if it can.
    pub(super) fn conversion(&self, id: ValueId, from: Form, to: Form) -> Option<Conversion> {
        if from == to {
            return Some(Conversion::None);
        }
        let tensor = self.mesh.program.values[id.index()].tensor_type()?;
        let (true, Some(width)) = (tensor.dtype.is_float(), tensor.shape.get(1)?.known()) else {
            return None;
        };
        let parts = |candidate: usize| self.mesh.splits.parts(Along::once(id, 1), candidate, width);
        match (from, to, tensor.shape.len()) {
            (Form::Partial, Form::Whole, 2) => Some(Conversion::AllReduce),
            (Form::Partial, Form::Split { dimension: 1, repeats: 1, candidate }, 2) => {
                let parts = parts(candidate);
                let fits = is_partition(&parts, width) && is_even(&parts) && is_unpadded(&parts);
                fits.then_some(Conversion::ReduceScatter)
            }
            (Form::Split { dimension: 1, repeats: 1, candidate }, Form::Whole, 2) => {
                let parts = parts(candidate);
                (is_partition(&parts, width) && is_even(&parts)).then_some(Conversion::AllGather)
            }
            (Form::Whole, Form::Split { dimension: 1, repeats: 1, candidate }, 2) => {
                is_unpadded(&parts(candidate)).then_some(Conversion::Slice)
            }
            _ => None,
        }
    }

    fn conversion_cost(&self, id: ValueId, conversion: Conversion) -> u64 {
        let (costs, ranks) = (self.mesh.costs, self.mesh.splits.ranks());
        let tensor = self.mesh.program.values[id.index()].tensor_type();
        let bytes = tensor.map_or(0.0, |tensor| costs.bytes(tensor));
        match conversion {
            Conversion::None => 0,
            Conversion::AllReduce => costs.all_reduce(bytes, ranks),
            Conversion::ReduceScatter | Conversion::AllGather => costs.gather(bytes, ranks),
            Conversion::Slice => costs.read(bytes),
        }
    }

    /// The operands of a call and their conversions; updates `live` as the search does.
    ///
    /// # Errors
    /// If the strategy needs a conversion that does not exist, which is a defect.
    pub(super) fn converted(&self, id: ValueId, need: Form, live: &mut Live) -> Result<Conversion> {
        let form = live.form(id);
        let conversion = self.conversion(id, form, need);
        let conversion = conversion.ok_or_else(|| Error::internal(format!("{id} cannot become {need:?}")))?;
        if !matches!(conversion, Conversion::None | Conversion::Slice) {
            live.set(id, need);
        }
        Ok(conversion)
    }
}

fn is_unpadded(parts: &[super::splits::Part]) -> bool {
    parts.iter().all(|part| part.length == part.range.len())
}

/// Adds a label unless an existing one is at least as good in both cost and memory; removes labels that it dominates.
fn keep(labels: &mut Vec<Label>, new: Label) {
    if labels.iter().any(|label| label.cost <= new.cost && label.memory <= new.memory) {
        return;
    }
    labels.retain(|label| label.cost < new.cost || label.memory < new.memory);
    labels.push(new);
}
