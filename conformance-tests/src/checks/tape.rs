//! Calls that use each other's results, to be bound one by one or as the region that they are together.

use super::bench::{Bench, Bound, Given, Stop};
use dsrun_core::{
    collective::Comm,
    op::Op,
    program::{Call, ValueId},
    region::Region,
};
use std::{collections::HashMap, sync::Arc};

/// The number of a value on a tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Value(usize);

impl Value {
    /// Where the value stands among those that [`Tape::bind_each`] gives.
    pub(crate) fn number(self) -> usize {
        self.0
    }
}

/// Calls in order, on values that are given or made by calls before.
#[derive(Debug, Default)]
pub(crate) struct Tape {
    /// What is given; `None` for what calls make.
    values: Vec<Option<Given>>,
    calls: Vec<(Op, Vec<Option<Value>>, Vec<Value>)>,
    /// The ranks that collectives are over.
    comm: Option<Arc<dyn Comm>>,
}

impl Tape {
    /// An empty tape, whose collectives are over these ranks.
    pub(crate) fn over(comm: Option<Arc<dyn Comm>>) -> Self {
        Self { comm, ..Self::default() }
    }

    /// The ranks of a call.
    fn comm_of(&self, op: &Op) -> Option<Arc<dyn Comm>> {
        op.mesh_axis().and(self.comm.clone())
    }

    /// A value that is there before the calls run; `None` if it is absent.
    pub(crate) fn give(&mut self, given: impl Into<Given>) -> Option<Value> {
        match given.into() {
            Given::Absent => None,
            given => {
                self.values.push(Some(given));
                Some(Value(self.values.len() - 1))
            }
        }
    }

    /// Adds a call of a primitive, and gives its results.
    pub(crate) fn call(
        &mut self,
        op: impl Into<Op>,
        operands: impl IntoIterator<Item = Option<Value>>,
    ) -> Vec<Value> {
        let op = op.into();
        let count = op.signature().map_or(0, |signature| signature.results.len());
        let first = self.values.len();
        self.values.resize(first + count, None);
        let results: Vec<Value> = (first..first + count).map(Value).collect();
        self.calls.push((op, operands.into_iter().collect(), results.clone()));
        results
    }

    /// Binds each call by itself. Gives the calls, and where every value is.
    pub(crate) fn bind_each(&self, bench: &mut Bench) -> Result<(Vec<Bound>, Vec<Given>), Stop> {
        let mut places: Vec<Given> =
            self.values.iter().map(|value| value.clone().unwrap_or(Given::Absent)).collect();
        let mut all = Vec::new();
        for (op, operands, results) in &self.calls {
            let operands: Vec<Given> = operands
                .iter()
                .map(|value| value.map_or(Given::Absent, |Value(number)| places[number].clone()))
                .collect();
            let plan = bench.plan_over(op.clone(), &operands, self.comm_of(op))?;
            let bound = bench.bind(&plan, &operands)?;
            for (Value(number), held) in results.iter().zip(&bound.results) {
                places[*number] = held.into();
            }
            all.push(bound);
        }
        Ok((all, places))
    }

    /// Binds all calls as one, whose results are these values: the call of a region.
    ///
    /// # Errors
    /// [`Stop::Unsupported`] if the device does not run the region itself.
    pub(crate) fn bind_region(
        &self,
        bench: &mut Bench,
        name: &str,
        results: &[Value],
    ) -> Result<Bound, Stop> {
        let (op, operands) = self.ask(bench, name, results)?;
        let comm = self.comm_of(&op);
        let plan = bench.plan_over(op, &operands, comm)?;
        bench.bind(&plan, &operands)
    }

    /// Asks whether the device runs all calls as one, and gives the op of the region and its operands.
    ///
    /// # Errors
    /// [`Stop::Unsupported`] if it does not.
    pub(crate) fn ask(&self, bench: &Bench, name: &str, results: &[Value]) -> Result<(Op, Vec<Given>), Stop> {
        let (region, operands) = self.region(name, results)?;
        let op = Op::Region(region.into());
        let support = bench.support_over(&op, &operands, self.comm_of(&op))?;
        if !support.native {
            return Err(Stop::Unsupported(format!("{name}: {}", support.reason)));
        }
        Ok((op, operands))
    }

    /// The region, and its operands in their order: as they are first used.
    fn region(&self, name: &str, results: &[Value]) -> Result<(Region, Vec<Given>), Stop> {
        let (mut numbers, mut operands): (HashMap<Value, usize>, Vec<Given>) = Default::default();
        for value in self.calls.iter().flat_map(|(_, operands, _)| operands.iter().flatten()) {
            if let (Some(given), false) = (&self.values[value.0], numbers.contains_key(value)) {
                numbers.insert(*value, operands.len());
                operands.push(given.clone());
            }
        }
        for value in self.calls.iter().flat_map(|(_, _, results)| results) {
            numbers.insert(*value, numbers.len());
        }
        let number = |value: &Value| ValueId::new(numbers.get(value).copied().unwrap_or(usize::MAX));
        let calls = self.calls.iter().map(|(op, operands, results)| {
            let operands = operands.iter().map(|value| value.as_ref().map(number)).collect();
            Call::new(op.clone(), operands, results.iter().map(number).collect())
        });
        let region = Region::new(name, operands.len(), calls.collect(), results.iter().map(number).collect());
        Ok((region?, operands))
    }
}
