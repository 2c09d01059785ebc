//! The fused op, which a body of primitives defines.
//!
//! Because the body defines the result, a region needs no formula and can always be lowered: a device with a kernel for the
//! body runs the region natively, any other runs the primitives. Regions with the same body are equal, whatever their names.

pub mod well_known;

use crate::{
    Error, Result,
    op::{IndexMaps, MeshAxis, OperandType},
    program::{Call, ValueId},
    tensor::TensorType,
};
use std::fmt;

/// A fused op.
///
/// Values of the body are numbered: the operands first, then the results of each call in order. This numbering and the order of
/// calls are the canonical form, which [`Region::encoding`] writes as text.
#[derive(Clone, Debug)]
pub struct Region {
    name: String,
    operands: usize,
    calls: Vec<Call>,
    results: Vec<ValueId>,
}

impl PartialEq for Region {
    fn eq(&self, other: &Self) -> bool {
        // The canonical text, unlike the fields, distinguishes 0 from -0, and makes a NaN attribute equal to itself.
        self.encoding() == other.encoding()
    }
}

impl Region {
    /// The maximum number of operands of a region, enough for all weights of a model of a hundred layers.
    pub const MAX_OPERANDS: usize = 4096;

    /// A region with `operands` operands and the body `calls`, whose results are the values `results` of the body.
    ///
    /// The name is for messages; it does not affect what the region computes.
    ///
    /// # Errors
    /// If the body is empty, has a region or a call with the wrong number of operands or results, is not numbered canonically,
    /// uses a value before its definition or after its update, does not use an operand, updates an operand without returning
    /// its new value, has a result that it does not define or that is listed twice, or has collectives over several axes.
    pub fn new(
        name: impl Into<String>,
        operands: usize,
        calls: Vec<Call>,
        results: Vec<ValueId>,
    ) -> Result<Self> {
        let region = Self { name: name.into(), operands, calls, results };
        region.check().map_err(|error| error.in_op(&region.name))?;
        Ok(region)
    }

    fn check(&self) -> Result<()> {
        if self.calls.is_empty() || self.results.is_empty() {
            return Err(Error::invalid("a region needs a body and a result"));
        }
        if self.operands > Self::MAX_OPERANDS {
            return Err(Error::invalid(format!(
                "{} operands, at most {}",
                self.operands,
                Self::MAX_OPERANDS
            )));
        }
        let mut used = vec![false; self.operands];
        let mut gone = vec![false; self.operands];
        let mut defined = self.operands;
        for (index, call) in self.calls.iter().enumerate() {
            let Some(signature) = call.op.signature() else {
                return Err(Error::invalid(format!("call {index} of the body is a region")));
            };
            // The checks below and inference rely on these numbers.
            let (operands, results) = (signature.operands.len(), signature.results.len());
            if (call.operands.len(), call.results.len()) != (operands, results) {
                let found = format!("{} operands and {} results", call.operands.len(), call.results.len());
                let message =
                    format!("call {index} has {found}, {} has {operands} and {results}", signature.name);
                return Err(Error::invalid(message));
            }
            for value in call.operands.iter().flatten() {
                if value.index() >= defined {
                    return Err(Error::invalid(format!("call {index} uses {value} before it is defined")));
                }
                if gone[value.index()] {
                    return Err(Error::invalid(format!("call {index} uses {value} after it was updated")));
                }
                if let Some(used) = used.get_mut(value.index()) {
                    *used = true;
                }
            }
            for value in &call.results {
                if value.index() != defined {
                    return Err(Error::invalid(format!(
                        "call {index} defines {value} where %{defined} is next"
                    )));
                }
                defined += 1;
            }
            gone.resize(defined, false);
            let updated = signature.results.iter().filter_map(|result| call.operands[result.updates?]);
            for value in updated {
                if call.operands.iter().filter(|operand| **operand == Some(value)).count() > 1 {
                    let message =
                        format!("call {index} updates {value}, which is also another operand of the call");
                    return Err(Error::invalid(message));
                }
                gone[value.index()] = true;
            }
        }
        if let Some(outside) =
            self.results.iter().find(|value| !(self.operands..defined).contains(&value.index()))
        {
            return Err(Error::invalid(format!("result {outside} is not defined by the body")));
        }
        for (index, result) in self.results.iter().enumerate() {
            if gone[result.index()] || self.results[..index].contains(result) {
                return Err(Error::invalid(format!("result {result} was updated, or is listed twice")));
            }
        }
        let kept: Vec<_> = (0..self.results.len()).map(|index| self.updates(index)).collect();
        if let Some(lost) =
            (0..self.operands).find(|operand| gone[*operand] && !kept.contains(&Some(*operand)))
        {
            return Err(Error::invalid(format!(
                "operand %{lost} is updated, but its new value is not a result"
            )));
        }
        if let Some(unused) = used.iter().position(|used| !used) {
            return Err(Error::invalid(format!("operand %{unused} is not used")));
        }
        let mut axes = self.calls.iter().filter_map(|call| call.op.mesh_axis());
        if let Some(first) = axes.next()
            && let Some(other) = axes.find(|other| *other != first)
        {
            let message = format!("the body has collectives over {} and over {}", first.name(), other.name());
            return Err(Error::invalid(message));
        }
        Ok(())
    }

    /// The mesh axis of the collectives of the body, if it has any.
    pub fn mesh_axis(&self) -> Option<MeshAxis> {
        self.calls.iter().find_map(|call| call.op.mesh_axis())
    }

    /// The name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of operands.
    pub fn operands(&self) -> usize {
        self.operands
    }

    /// The body, in order.
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// The values of the body that are results.
    pub fn results(&self) -> &[ValueId] {
        &self.results
    }

    /// The types of all values of the body, operands first; `None` where `operands` has `None`.
    ///
    /// # Errors
    /// As [`infer`](crate::op::Op::infer) of the calls of the body.
    pub fn value_types(&self, operands: &[Option<OperandType>]) -> Result<Vec<Option<OperandType>>> {
        if operands.len() != self.operands {
            let message = format!("has {} operands, needs {}", operands.len(), self.operands);
            return Err(Error::invalid(message).field("operands"));
        }
        let mut types = operands.to_vec();
        for call in &self.calls {
            let call_types: Vec<_> = call
                .operands
                .iter()
                .map(|value| value.and_then(|value| types[value.index()].clone()))
                .collect();
            types.extend(
                call.op.infer(&call_types)?.into_iter().map(|result| Some(OperandType::Tensor(result))),
            );
        }
        Ok(types)
    }

    pub(crate) fn infer(&self, operands: &[Option<OperandType>]) -> Result<Vec<TensorType>> {
        let types = self.value_types(operands)?;
        let result = |value: &ValueId| match types.get(value.index()) {
            Some(Some(OperandType::Tensor(tensor))) => Ok(tensor.clone()),
            _ => Err(Error::internal(format!("result {value} of a region has no type"))),
        };
        self.results.iter().map(result).collect()
    }

    pub(crate) fn index_maps(&self, operands: &[Option<OperandType>]) -> Result<IndexMaps> {
        let rank = |operand: &Option<OperandType>| match operand {
            Some(OperandType::Tensor(tensor)) => tensor.shape.len(),
            Some(OperandType::Weight(weight)) => weight.shape.len(),
            None => 0,
        };
        let results: Vec<usize> = self.infer(operands)?.iter().map(|result| result.shape.len()).collect();
        Ok(IndexMaps::opaque(operands.iter().map(rank), &results))
    }

    /// The operand that result `index` updates in place, through any number of calls of the body.
    pub fn updates(&self, index: usize) -> Option<usize> {
        let mut value = *self.results.get(index)?;
        while value.index() >= self.operands {
            let (call, result) = self.calls.iter().find_map(|call| {
                let result = call.results.iter().position(|result| *result == value)?;
                Some((call, result))
            })?;
            value = (*call.operands.get(call.op.updates(result)?)?)?;
        }
        Some(value.index())
    }

    /// The canonical text of the body without the name, which is equal for equal regions.
    pub fn encoding(&self) -> String {
        let results: Vec<String> = self.results.iter().map(ToString::to_string).collect();
        let calls: Vec<String> = self.calls.iter().map(|call| format!("{call}; ")).collect();
        format!("({}) {{ {}return {} }}", self.operands, calls.concat(), results.join(", "))
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "region {:?} {}", self.name, self.encoding())
    }
}
