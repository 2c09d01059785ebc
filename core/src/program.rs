//! A model as a program of primitive ops.
//!
//! A program is a list of calls in an order in which they may run. Its values are tensors that live for one step, states
//! that live on (the KV cache, the request table), and weights. A state is a value like any other: an op that updates one
//! takes the old value and gives the new one in the same storage, and the old value is gone, so that every pass sees
//! each hazard as an ordinary use.
//!
//! Order: calls on one [`Lane`] run in the order they stand; across lanes a call waits for the values it uses. Calls
//! without results (sends, barriers) are ordered by their lane alone, so no extra ordering values are needed.

mod builder;
mod outline;
mod parse;
mod text;

use crate::{
    Error, Result, WeightExpr, WeightType,
    op::{Op, OperandType},
    placement::{Placement, Placements},
    tensor::{Size, TensorType},
};
pub use builder::ProgramBuilder;
use std::{collections::HashSet, fmt, sync::Arc};

/// The number of a value in its program or region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(u32);

impl ValueId {
    /// The value with this number. Programs have far fewer than `u32::MAX` values; larger numbers saturate and are no value.
    pub fn new(index: usize) -> Self {
        Self(u32::try_from(index).unwrap_or(u32::MAX))
    }

    /// The number.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// An op applied to values.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The op.
    pub op: Op,
    /// Its operands, in the order of the signature; `None` for those left out.
    pub operands: Vec<Option<ValueId>>,
    /// Its results, in the order of the signature.
    pub results: Vec<ValueId>,
}

impl Call {
    /// An op applied to values.
    pub fn new(op: impl Into<Op>, operands: Vec<Option<ValueId>>, results: Vec<ValueId>) -> Self {
        Self { op: op.into(), operands, results }
    }
}

/// The queue a call runs on. Lanes run side by side; each runs its calls in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Arithmetic.
    #[default]
    Compute,
    /// Moves between host, disk and device.
    Copy,
    /// Collectives.
    Communication,
}

impl Lane {
    /// Every lane.
    pub const ALL: [Self; 3] = [Self::Compute, Self::Copy, Self::Communication];

    /// The name used in program texts.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Copy => "copy",
            Self::Communication => "communication",
        }
    }
}

/// How a segment of a step is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SegmentKind {
    /// May be captured once per bucket and replayed.
    Graph,
    /// Enqueued call by call.
    Eager,
    /// Work on the host between device work (a grammar mask): no calls.
    Host,
    /// Waits for the host or another rank: no calls.
    Wait,
}

impl SegmentKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Graph, Self::Eager, Self::Host, Self::Wait];

    /// The name used in program texts.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Graph => "graph",
            Self::Eager => "eager",
            Self::Host => "host",
            Self::Wait => "wait",
        }
    }
}

/// A part of a step that is launched as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its name in messages and profiles.
    pub name: String,
    /// How it is run.
    pub kind: SegmentKind,
}

/// A call in a program, with where it runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The op and its values.
    pub call: Call,
    /// The queue it runs on.
    pub lane: Lane,
    /// The segment it belongs to.
    pub segment: usize,
}

/// What a value is made by.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// Uploaded by the host before each step.
    Input,
    /// Lives from step to step; zero at first.
    State,
    /// Read from the model file. The value's type says whether it is packed by the backend or a plain tensor.
    Weight(WeightExpr),
    /// A result of this node.
    Node(usize),
}

/// A value of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Its name; empty for intermediate results.
    pub name: String,
    /// Its type.
    pub value_type: OperandType,
    /// What it is made by.
    pub origin: Origin,
    /// Where its elements are, along each mesh axis.
    pub placements: Placements,
}

impl Value {
    /// The type, if it is a tensor.
    pub fn tensor_type(&self) -> Option<&TensorType> {
        match &self.value_type {
            OperandType::Tensor(tensor) => Some(tensor),
            OperandType::Weight(_) => None,
        }
    }

    /// The type, if it is a packed weight.
    pub fn weight_type(&self) -> Option<&WeightType> {
        match &self.value_type {
            OperandType::Tensor(_) => None,
            OperandType::Weight(weight) => Some(weight),
        }
    }
}

/// A model as a program of ops. See the [module documentation](self).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// The bounded sizes, in the order in which their extents stand in the step's `extents` vector.
    pub extents: Vec<Arc<str>>,
    /// The segments, in the order they are launched.
    pub segments: Vec<Segment>,
    /// All values.
    pub values: Vec<Value>,
    /// The calls, in an order in which they may run.
    pub nodes: Vec<Node>,
    /// The values the host reads after a step.
    pub outputs: Vec<ValueId>,
}

impl Program {
    /// The value of this number.
    ///
    /// # Errors
    /// If there is none.
    pub fn value(&self, id: ValueId) -> Result<&Value> {
        self.values.get(id.index()).ok_or_else(|| Error::invalid(format!("there is no value {id}")))
    }

    /// The types of a list of operands.
    ///
    /// # Errors
    /// If a value is not there.
    pub fn operand_types(&self, operands: &[Option<ValueId>]) -> Result<Vec<Option<OperandType>>> {
        let one = |id: &Option<ValueId>| id.map(|id| Ok(self.value(id)?.value_type.clone())).transpose();
        operands.iter().map(one).collect()
    }

    /// The values whose origin the predicate admits, in order.
    pub fn values_from<'a>(
        &'a self,
        mut admits: impl FnMut(&Origin) -> bool + 'a,
    ) -> impl Iterator<Item = (ValueId, &'a Value)> {
        let all = self.values.iter().enumerate().map(|(index, value)| (ValueId::new(index), value));
        all.filter(move |(_, value)| admits(&value.origin))
    }

    /// The names of all bucket and bounded sizes, without repeats.
    pub fn symbols(&self) -> Vec<Arc<str>> {
        let mut seen = HashSet::new();
        let shapes = self.values.iter().filter_map(Value::tensor_type).flat_map(|tensor| &tensor.shape);
        let names = shapes.filter_map(|size| match size {
            Size::Bucket(name) | Size::Bounded(name) => Some(name.clone()),
            Size::Static(_) => None,
        });
        names.filter(|name| seen.insert(name.clone())).collect()
    }

    /// Replaces every region for which `keep` is false by its body.
    ///
    /// # Errors
    /// If a region does not fit its operands.
    pub fn lower_regions(&self, keep: &mut dyn FnMut(&Node) -> Result<bool>) -> Result<Self> {
        let mut lowered = Self { nodes: Vec::new(), ..self.clone() };
        for node in &self.nodes {
            let Op::Region(region) = &node.call.op else {
                lowered.push_node(node.clone());
                continue;
            };
            if keep(node)? {
                lowered.push_node(node.clone());
                continue;
            }
            let operand_types = self.operand_types(&node.call.operands)?;
            let types = region.value_types(&operand_types)?;
            let mut ids: Vec<Option<ValueId>> = node.call.operands.clone();
            for (index, value_type) in types.into_iter().enumerate().skip(region.operands()) {
                let result = region.results().iter().position(|result| result.index() == index);
                let id = match result.and_then(|result| node.call.results.get(result)) {
                    Some(id) => *id,
                    None => {
                        let value_type =
                            value_type.ok_or_else(|| Error::internal("a region's value has no type"))?;
                        let id = ValueId::new(lowered.values.len());
                        let placements = Placements::default();
                        let origin = Origin::Node(0);
                        lowered.values.push(Value { name: String::new(), value_type, origin, placements });
                        id
                    }
                };
                ids.push(Some(id));
            }
            let outer = |id: &ValueId| ids.get(id.index()).copied().flatten();
            for call in region.calls() {
                let operands = call.operands.iter().map(|id| id.as_ref().and_then(outer)).collect();
                let results = call.results.iter().filter_map(outer).collect();
                lowered
                    .push_node(Node { call: Call::new(call.op.clone(), operands, results), ..node.clone() });
            }
        }
        lowered.validate()?;
        Ok(lowered)
    }

    fn push_node(&mut self, node: Node) {
        let index = self.nodes.len();
        for result in &node.call.results {
            if let Some(value) = self.values.get_mut(result.index()) {
                value.origin = Origin::Node(index);
            }
        }
        self.nodes.push(node);
    }

    /// Checks everything a program promises: values are there before they are used and made once; types are what
    /// inference says; an updated value is not used afterwards; bounded sizes are first dimensions and have an extent;
    /// segments are in order and only those that run calls have any; placements name dimensions that exist.
    ///
    /// # Errors
    /// Names the node or value that is wrong.
    pub fn validate(&self) -> Result<()> {
        let mut names = HashSet::new();
        for (index, name) in self.extents.iter().enumerate() {
            check_size_name(name)?;
            if self.extents[..index].contains(name) {
                return Err(Error::invalid(format!("extent {name} stands twice")));
            }
        }
        for (index, value) in self.values.iter().enumerate() {
            let taken = !value.name.is_empty() && !names.insert(value.name.as_str());
            let checked = if taken { Err(taken_name(&value.name)) } else { self.validate_value(value) };
            checked.map_err(|error| error.at(&format!("%{index}")))?;
        }
        let mut defined: Vec<bool> =
            self.values.iter().map(|value| !matches!(value.origin, Origin::Node(_))).collect();
        let mut gone = vec![false; self.values.len()];
        let mut segment = 0;
        for (index, node) in self.nodes.iter().enumerate() {
            self.validate_node(index, node, &mut defined, &mut gone)
                .map_err(|error| error.in_op(&format!("node {index} ({})", node.call.op.name())))?;
            if node.segment < segment {
                return Err(Error::invalid(format!("node {index} goes back to segment {}", node.segment)));
            }
            segment = node.segment;
        }
        for output in &self.outputs {
            let available = defined.get(output.index()).copied().unwrap_or(false) && !gone[output.index()];
            if !available {
                return Err(Error::invalid(format!("output {output} is not there at the end")));
            }
        }
        if let Some(index) = defined.iter().position(|defined| !defined) {
            return Err(Error::invalid(format!("%{index} is made by no node")));
        }
        Ok(())
    }

    fn validate_value(&self, value: &Value) -> Result<()> {
        let named = !matches!(value.origin, Origin::Node(_));
        if named == value.name.is_empty() {
            let message = if named { "has no name" } else { "is a result: those have no name" };
            return Err(Error::invalid(message));
        }
        let rank = match &value.value_type {
            OperandType::Weight(weight) => {
                if !matches!(value.origin, Origin::Weight(_)) {
                    return Err(Error::invalid("only weights are packed"));
                }
                weight.bytes()?;
                weight.shape.len()
            }
            OperandType::Tensor(tensor) => {
                if tensor.shape.len() > TensorType::MAX_RANK {
                    return Err(Error::invalid(format!("has {} dimensions", tensor.shape.len())));
                }
                for (dimension, size) in tensor.shape.iter().enumerate() {
                    size.symbol().map_or(Ok(()), check_size_name)?;
                    let Size::Bounded(name) = size else { continue };
                    if dimension != 0 {
                        return Err(Error::invalid(format!(
                            "dimension {dimension} is bounded: only the first may be"
                        )));
                    }
                    if !self.extents.contains(name) {
                        return Err(Error::invalid(format!("size ?{name} has no extent")));
                    }
                }
                tensor.shape.len()
            }
        };
        for (axis, placement) in value.placements.placed() {
            if matches!(placement, Placement::Sharded(dimension) if dimension >= rank) {
                return Err(Error::invalid(format!(
                    "is {placement} along {}, but has {rank} dimensions",
                    axis.name()
                )));
            }
        }
        Ok(())
    }

    fn validate_node(
        &self,
        index: usize,
        node: &Node,
        defined: &mut [bool],
        gone: &mut [bool],
    ) -> Result<()> {
        let segment = self.segments.get(node.segment);
        match segment.map(|segment| segment.kind) {
            Some(SegmentKind::Graph | SegmentKind::Eager) => {}
            Some(kind) => {
                return Err(Error::invalid(format!("is in a {} segment, which runs no calls", kind.name())));
            }
            None => return Err(Error::invalid(format!("there is no segment {}", node.segment))),
        }
        let types = self.operand_types(&node.call.operands)?;
        for id in node.call.operands.iter().flatten() {
            if !defined[id.index()] {
                return Err(Error::invalid(format!("uses {id} before it is there")));
            }
            if gone[id.index()] {
                return Err(Error::invalid(format!("uses {id} after it was updated")));
            }
        }
        let inferred = node.call.op.infer(&types).map_err(|error| error.note(&format!("node {index}")))?;
        if inferred.len() != node.call.results.len() {
            return Err(Error::invalid(format!(
                "has {} results, not {}",
                inferred.len(),
                node.call.results.len()
            )));
        }
        for (result, (id, inferred)) in node.call.results.iter().zip(inferred).enumerate() {
            let value = self.value(*id)?;
            if value.origin != Origin::Node(index) || defined[id.index()] {
                return Err(Error::invalid(format!("{id} is made elsewhere")));
            }
            if value.tensor_type() != Some(&inferred) {
                return Err(Error::invalid(format!("{id} is {inferred}, not {:?}", value.value_type)));
            }
            if let Some(updated) =
                node.call.op.updates(result).and_then(|operand| node.call.operands[operand])
            {
                if matches!(self.value(updated)?.origin, Origin::Weight(_)) {
                    return Err(Error::invalid(format!("updates {updated}, which is a weight")));
                }
                if node.call.operands.iter().filter(|operand| **operand == Some(updated)).count() > 1 {
                    return Err(Error::invalid(format!(
                        "updates {updated}, which is also another operand of it"
                    )));
                }
                gone[updated.index()] = true;
            }
            defined[id.index()] = true;
        }
        Ok(())
    }
}

fn taken_name(name: &str) -> Error {
    Error::invalid(format!("the name {name:?} is taken"))
}

/// Size names stand unquoted in a program's text, so they are words there.
fn check_size_name(name: &str) -> Result<()> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '+');
    if !name.is_empty() && name.chars().all(is_part) {
        return Ok(());
    }
    Err(Error::invalid(format!("{name:?} is no name of a size: letters, digits, `_`, `.`, `-` and `+`")))
}
