//! Outlining: replacing a run of calls by a region. The opposite of lowering.

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

/// A value in a run of calls: of the program, or inside the region of a node.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    Program(ValueId),
    /// A value in the body of the region at this node.
    Inside(usize, ValueId),
}

/// A primitive call in a run of calls.
struct Primitive<'a> {
    op: &'a Op,
    operands: Vec<Option<Place>>,
    results: Vec<Place>,
}

/// The primitive calls of a node: the calls of the body if it is a region, else its own.
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

/// The maximum number of ops in the name of a region that is not well known.
const NAMED: usize = 6;

/// The name of a region in messages: the ops of its body, or the first op and the number of others.
fn name(calls: &[Primitive<'_>]) -> String {
    let names: Vec<&str> = calls.iter().map(|call| call.op.name()).collect();
    match names.len() {
        0..=NAMED => names.join("+"),
        count => format!("{}+{} more", names[0], count - 1),
    }
}

impl Program {
    /// The number of uses of each value: as an operand of a call or an output of the program.
    pub fn uses(&self) -> Vec<usize> {
        let mut uses = vec![0; self.values.len()];
        let operands = self.nodes.iter().flat_map(|node| node.call.operands.iter().flatten());
        for id in operands.chain(&self.outputs) {
            uses[id.index()] += 1;
        }
        uses
    }

    /// The results of a run of calls that are used outside of it, in the order of their definitions. `uses` is [`Self::uses`].
    pub fn results_of(&self, nodes: Range<usize>, uses: &[usize]) -> Vec<ValueId> {
        let calls = || self.nodes[nodes.clone()].iter().map(|node| &node.call);
        let mut inside: HashMap<ValueId, usize> = HashMap::new();
        for id in calls().flat_map(|call| call.operands.iter().flatten()) {
            *inside.entry(*id).or_default() += 1;
        }
        let used_outside = |id: &&ValueId| uses[id.index()] > inside.get(id).copied().unwrap_or(0);
        calls().flat_map(|call| &call.results).filter(used_outside).copied().collect()
    }

    /// The call of a region that replaces a run of calls; `None` if an operand is updated in place and its new value is unused
    /// outside of the run. Regions in the run are flattened, so that equal work makes an equal region. Operands are in the order
    /// of their first uses, and results in the order of their definitions. `uses` is [`Self::uses`].
    pub fn outline(&self, nodes: Range<usize>, uses: &[usize]) -> Option<Call> {
        region(self, nodes, uses)
    }
}
