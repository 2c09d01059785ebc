//! A model as a program of primitive ops.
//!
//! A program is a list of calls in an order in which they may run. Its values are tensors that live for one step, states
//! that persist between steps (the KV cache, the request table), and weights. An op that updates a state consumes its old
//! value and defines a new one in the same storage, so that passes see every hazard as an ordinary use.
//!
//! Calls on one [`Lane`] run in the order of the list; across lanes a call waits for the values it uses. The lane alone orders
//! calls without results (sends, barriers).

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

/// The index of a value in its program or region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(u32);

impl ValueId {
    /// The value at this index. Larger indices than `u32::MAX` saturate; no program has that many values.
    pub fn new(index: usize) -> Self {
        Self(u32::try_from(index).unwrap_or(u32::MAX))
    }

    /// The index.
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

/// The queue that a call runs on. Lanes run concurrently; each runs its calls in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Computation.
    #[default]
    Compute,
    /// Copies between host, disk and device.
    Copy,
    /// Collectives.
    Communication,
}

impl Lane {
    /// Every lane.
    pub const ALL: [Self; 3] = [Self::Compute, Self::Copy, Self::Communication];

    /// The lane of a call of this op unless a pass chooses another one: collectives overlap with computation, but a region with
    /// collectives in its body is one with the computation.
    pub fn usual(op: &Op) -> Self {
        match op {
            Op::Region(_) => Self::Compute,
            op if op.mesh_axis().is_some() => Self::Communication,
            _ => Self::Compute,
        }
    }

    /// The name in program texts.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Copy => "copy",
            Self::Communication => "communication",
        }
    }
}

/// How the engine runs a segment of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SegmentKind {
    /// Captured once per bucket and replayed.
    Graph,
    /// Enqueued call by call.
    Eager,
    /// Host work between device work, such as a grammar mask. It has no calls.
    Host,
    /// A wait for the host or another rank. It has no calls.
    Wait,
}

impl SegmentKind {
    /// Every kind of segment.
    pub const ALL: [Self; 4] = [Self::Graph, Self::Eager, Self::Host, Self::Wait];

    /// The name in program texts.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Graph => "graph",
            Self::Eager => "eager",
            Self::Host => "host",
            Self::Wait => "wait",
        }
    }
}

/// A part of a step that is launched as a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The name in messages and profiles.
    pub name: String,
    /// How it runs.
    pub kind: SegmentKind,
}

/// A call in a program, with its lane and segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The op, operands and results.
    pub call: Call,
    /// The queue that it runs on.
    pub lane: Lane,
    /// The segment that it belongs to.
    pub segment: usize,
}

/// The origin of a value.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// An input that the host uploads before each step.
    Input,
    /// A state, which persists from step to step and starts as zeros.
    State,
    /// A weight of the model file. The value's type says whether the backend packs it or it is a plain tensor.
    Weight(WeightExpr),
    /// A result of the node at this index.
    Node(usize),
}

/// A value of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// The name; empty for results.
    pub name: String,
    /// The type.
    pub value_type: OperandType,
    /// The origin.
    pub origin: Origin,
    /// The distribution over each mesh axis.
    pub placements: Placements,
}

impl Value {
    /// The type, if the value is a tensor.
    pub fn tensor_type(&self) -> Option<&TensorType> {
        match &self.value_type {
            OperandType::Tensor(tensor) => Some(tensor),
            OperandType::Weight(_) => None,
        }
    }

    /// The type, if the value is a packed weight.
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
    /// The name.
    pub name: String,
    /// The bounded sizes, in the order of their extents in the step's `extents` vector.
    pub extents: Vec<Arc<str>>,
    /// The segments, in launch order.
    pub segments: Vec<Segment>,
    /// All values.
    pub values: Vec<Value>,
    /// The calls, in an order in which they may run.
    pub nodes: Vec<Node>,
    /// The values that the host reads after a step.
    pub outputs: Vec<ValueId>,
}

impl Program {
    /// The value with this id.
    ///
    /// # Errors
    /// If the program has no such value.
    pub fn value(&self, id: ValueId) -> Result<&Value> {
        self.values.get(id.index()).ok_or_else(|| Error::invalid(format!("value {id} does not exist")))
    }

    /// The types of a list of operands.
    ///
    /// # Errors
    /// If the program has no such value.
    pub fn operand_types(&self, operands: &[Option<ValueId>]) -> Result<Vec<Option<OperandType>>> {
        let one = |id: &Option<ValueId>| id.map(|id| Ok(self.value(id)?.value_type.clone())).transpose();
        operands.iter().map(one).collect()
    }

    /// The values whose origin satisfies the predicate, in order.
    pub fn values_from<'a>(
        &'a self,
        mut admits: impl FnMut(&Origin) -> bool + 'a,
    ) -> impl Iterator<Item = (ValueId, &'a Value)> {
        let all = self.values.iter().enumerate().map(|(index, value)| (ValueId::new(index), value));
        all.filter(move |(_, value)| admits(&value.origin))
    }

    /// The names of all bucket and bounded sizes, without duplicates.
    pub fn symbols(&self) -> Vec<Arc<str>> {
        let mut seen = HashSet::new();
        let shapes = self.values.iter().filter_map(Value::tensor_type).flat_map(|tensor| &tensor.shape);
        let names = shapes.filter_map(|size| match size {
            Size::Bucket(name) | Size::Bounded(name) => Some(name.clone()),
            Size::Static(_) => None,
        });
        names.filter(|name| seen.insert(name.clone())).collect()
    }

    /// Replaces each region for which `keep` is false by its body.
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

    /// Checks the invariants of a program: each value is defined once, before its uses; types are those of inference; an
    /// updated value has no later use; bounded sizes are first dimensions and have an extent; segments are in order, and
    /// only those that run calls have calls; placements name dimensions that exist.
    ///
    /// # Errors
    /// Names the node or value at fault.
    pub fn validate(&self) -> Result<()> {
        let mut names = HashSet::new();
        for (index, name) in self.extents.iter().enumerate() {
            check_size_name(name)?;
            if self.extents[..index].contains(name) {
                return Err(Error::invalid(format!("extent {name} is listed twice")));
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
                return Err(Error::invalid(format!(
                    "node {index} returns to segment {} after a later one",
                    node.segment
                )));
            }
            segment = node.segment;
        }
        for output in &self.outputs {
            let available = defined.get(output.index()).copied().unwrap_or(false) && !gone[output.index()];
            if !available {
                return Err(Error::invalid(format!("output {output} is undefined or was updated")));
            }
        }
        if let Some(index) = defined.iter().position(|defined| !defined) {
            return Err(Error::invalid(format!("%{index} is not the result of any node")));
        }
        Ok(())
    }

    fn validate_value(&self, value: &Value) -> Result<()> {
        let named = !matches!(value.origin, Origin::Node(_));
        if named == value.name.is_empty() {
            let message = if named { "has no name" } else { "is a result, which must have no name" };
            return Err(Error::invalid(message));
        }
        let rank = match &value.value_type {
            OperandType::Weight(weight) => {
                if !matches!(value.origin, Origin::Weight(_)) {
                    return Err(Error::invalid("has a packed type, but is not a weight"));
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
                            "dimension {dimension} is bounded, but only the first may be"
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
                    "is {placement} over {}, but has {rank} dimensions",
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
                return Err(Error::invalid(format!("is in a {} segment, which has no calls", kind.name())));
            }
            None => return Err(Error::invalid(format!("segment {} does not exist", node.segment))),
        }
        let types = self.operand_types(&node.call.operands)?;
        for id in node.call.operands.iter().flatten() {
            if !defined[id.index()] {
                return Err(Error::invalid(format!("uses {id} before it is defined")));
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
                return Err(Error::invalid(format!("{id} is also defined elsewhere")));
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
                        "updates {updated}, which is also another operand of the call"
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
    Error::invalid(format!("the name {name:?} is used twice"))
}

/// Checks that a size name is a word, because program texts write it without quotes.
fn check_size_name(name: &str) -> Result<()> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '+');
    if !name.is_empty() && name.chars().all(is_part) {
        return Ok(());
    }
    Err(Error::invalid(format!("size name {name:?} is invalid; use letters, digits, `_`, `.`, `-` and `+`")))
}
