//! Outlining: the region that stands for a run of calls. The opposite of lowering.

use super::{Call, Program, ValueId};
use crate::{
    op::Op,
    region::{Region, well_known},
};
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::Arc,
};

/// A value of a run: one of the program, or one inside the region that a call is.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    Program(ValueId),
    /// A value of the body of the region at this node.
    Inside(usize, ValueId),
}

/// A call of a run, whose regions are taken apart.
struct Primitive<'a> {
    op: &'a Op,
    operands: Vec<Option<Place>>,
    results: Vec<Place>,
}

/// The primitive calls of a node: its own, or those of its region.
fn primitives(program: &Program, node: usize) -> Vec<Primitive<'_>> {
    let outer = &program.nodes[node].call;
    let Op::Region(region) = &outer.op else {
        let operands = outer.operands.iter().map(|id| id.map(Place::Program)).collect();
        let results = outer.results.iter().copied().map(Place::Program).collect();
        return vec![Primitive { op: &outer.op, operands, results }];
    };
    let place = |id: ValueId| {
        let result = region.results().iter().position(|result| *result == id);
        match (outer.operands.get(id.index()), result.and_then(|result| outer.results.get(result))) {
            (Some(operand), _) if id.index() < region.operands() => operand.map(Place::Program),
            (_, Some(result)) => Some(Place::Program(*result)),
            _ => Some(Place::Inside(node, id)),
        }
    };
    let primitive = |call: &'_ Call| -> (Vec<Option<Place>>, Vec<Place>) {
        let operands = call.operands.iter().map(|id| id.and_then(place)).collect();
        (operands, call.results.iter().copied().filter_map(place).collect())
    };
    let calls = region.calls().iter().map(|call| {
        let (operands, results) = primitive(call);
        Primitive { op: &call.op, operands, results }
    });
    calls.collect()
}

fn region(program: &Program, nodes: Range<usize>, uses: &[usize]) -> Option<Call> {
    let calls: Vec<Primitive<'_>> = nodes.clone().flat_map(|node| primitives(program, node)).collect();
    let made: HashSet<Place> = calls.iter().flat_map(|call| &call.results).copied().collect();
    let (mut numbers, mut operands): (HashMap<Place, usize>, Vec<ValueId>) = Default::default();
    for place in calls.iter().flat_map(|call| call.operands.iter().flatten()) {
        if let (Place::Program(id), false, false) = (place, made.contains(place), numbers.contains_key(place))
        {
            numbers.insert(*place, operands.len());
            operands.push(*id);
        }
    }
    for place in calls.iter().flat_map(|call| &call.results) {
        let number = numbers.len();
        numbers.insert(*place, number);
    }
    let number = |place: &Place| numbers.get(place).copied().map(ValueId::new);
    let body = calls.iter().map(|call| {
        let operands = call.operands.iter().map(|place| place.as_ref().and_then(number)).collect();
        Call::new(call.op.clone(), operands, call.results.iter().filter_map(number).collect())
    });
    let results = program.results_of(nodes, uses);
    let mut order: Vec<(usize, ValueId)> =
        results.iter().filter_map(|id| Some((*numbers.get(&Place::Program(*id))?, *id))).collect();
    order.sort_unstable();
    let numbered = order.iter().map(|(number, _)| ValueId::new(*number)).collect();
    let region = Region::new(name(&calls), operands.len(), body.collect(), numbered).ok()?;
    let region = well_known::named(&region).unwrap_or(region);
    let results = order.into_iter().map(|(_, id)| id).collect();
    Some(Call::new(Op::Region(Arc::new(region)), operands.into_iter().map(Some).collect(), results))
}

/// The most ops that a region without a name of its own is named after.
const NAMED: usize = 6;

/// What a region is called in messages: the ops of its body, or the first and how many there are.
fn name(calls: &[Primitive<'_>]) -> String {
    let names: Vec<&str> = calls.iter().map(|call| call.op.name()).collect();
    match names.len() {
        0..=NAMED => names.join("+"),
        count => format!("{}+{} more", names[0], count - 1),
    }
}

impl Program {
    /// How many calls use each value; an output of the program counts as a use.
    pub fn uses(&self) -> Vec<usize> {
        let mut uses = vec![0; self.values.len()];
        let operands = self.nodes.iter().flat_map(|node| node.call.operands.iter().flatten());
        for id in operands.chain(&self.outputs) {
            uses[id.index()] += 1;
        }
        uses
    }

    /// The values that a run of calls makes and that anything outside of it uses, in the order in which they are made. `uses` is
    /// [`Self::uses`].
    pub fn results_of(&self, nodes: Range<usize>, uses: &[usize]) -> Vec<ValueId> {
        let calls = || self.nodes[nodes.clone()].iter().map(|node| &node.call);
        let mut inside: HashMap<ValueId, usize> = HashMap::new();
        for id in calls().flat_map(|call| call.operands.iter().flatten()) {
            *inside.entry(*id).or_default() += 1;
        }
        let used_outside = |id: &&ValueId| uses[id.index()] > inside.get(id).copied().unwrap_or(0);
        calls().flat_map(|call| &call.results).filter(used_outside).copied().collect()
    }

    /// The call of a region that stands for a run of calls; `None` if what they update in place is no result. Regions among them are
    /// taken apart, so that equal work is an equal region however it came about. Operands are numbered as they are first used, results
    /// stand as they are made: the canonical order. `uses` is [`Self::uses`].
    pub fn outline(&self, nodes: Range<usize>, uses: &[usize]) -> Option<Call> {
        region(self, nodes, uses)
    }
}
