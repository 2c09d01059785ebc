//! A builder of programs, which checks each call as it is added.

use super::{Call, Lane, Node, Origin, Program, Segment, SegmentKind, Value, ValueId, taken_name};
use crate::{
    Error, Result, WeightExpr, WeightType,
    op::{Op, OperandType},
    placement::Placements,
    tensor::{Size, TensorType},
};

/// Builds a [`Program`] and infers types along the way, so that each mistake is reported where it is made.
///
/// ```
/// # fn main() -> dsrun_core::Result<()> {
/// use dsrun_core::{DType, WeightExpr, WeightFormat, WeightType, TensorType, op, program::ProgramBuilder};
///
/// let mut program = ProgramBuilder::new("one layer");
/// let tokens = program.bounded("tokens");
/// let x = program.input("x", TensorType::new(DType::F32, [tokens, 4.into()]))?;
/// let dense = WeightType { format: WeightFormat::Dense(DType::F32), shape: vec![8, 4] };
/// let weight = program.weight("up", WeightExpr::tensor("up.weight"), dense)?;
/// let y = program.call(op::Linear { dtype: DType::F32 }, [Some(x), Some(weight), None])?;
/// let program = program.finish(&[y])?;
/// assert_eq!(program.value(y)?.tensor_type().unwrap().to_string(), "f32[?tokens, 8]");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ProgramBuilder {
    program: Program,
}

impl ProgramBuilder {
    /// An empty program with one segment of kind graph, `step`.
    pub fn new(name: impl Into<String>) -> Self {
        let segments = vec![Segment { name: "step".into(), kind: SegmentKind::Graph }];
        Self { program: Program { name: name.into(), segments, ..Program::default() } }
    }

    /// Declares a bounded size, whose extent is the next in the step's `extents` vector.
    pub fn bounded(&mut self, name: &str) -> Size {
        if !self.program.extents.iter().any(|extent| &**extent == name) {
            self.program.extents.push(name.into());
        }
        Size::bounded(name)
    }

    /// Begins a segment, to which later calls belong. Before the first call it replaces segments that would have calls.
    pub fn segment(&mut self, name: impl Into<String>, kind: SegmentKind) {
        if self.program.nodes.is_empty() {
            self.program
                .segments
                .retain(|segment| matches!(segment.kind, SegmentKind::Host | SegmentKind::Wait));
        }
        self.program.segments.push(Segment { name: name.into(), kind });
    }

    /// Declares an input, which the host uploads before each step.
    ///
    /// # Errors
    /// If the type is invalid or the name is used.
    pub fn input(&mut self, name: impl Into<String>, tensor: TensorType) -> Result<ValueId> {
        self.declare(name.into(), OperandType::Tensor(tensor), Origin::Input)
    }

    /// Declares a state, which persists from step to step and starts as zeros.
    ///
    /// # Errors
    /// If the type is invalid or the name is used.
    pub fn state(&mut self, name: impl Into<String>, tensor: TensorType) -> Result<ValueId> {
        self.declare(name.into(), OperandType::Tensor(tensor), Origin::State)
    }

    /// Declares a weight that the backend packs.
    ///
    /// # Errors
    /// If the type is invalid or the name is used.
    pub fn weight(
        &mut self,
        name: impl Into<String>,
        expr: WeightExpr,
        weight: WeightType,
    ) -> Result<ValueId> {
        self.declare(name.into(), OperandType::Weight(weight), Origin::Weight(expr))
    }

    /// Declares a weight that is a plain tensor: norm weights, biases, rotary frequencies.
    ///
    /// # Errors
    /// If the type is invalid or the name is used.
    pub fn vector(
        &mut self,
        name: impl Into<String>,
        expr: WeightExpr,
        tensor: TensorType,
    ) -> Result<ValueId> {
        self.declare(name.into(), OperandType::Tensor(tensor), Origin::Weight(expr))
    }

    fn declare(&mut self, name: String, value_type: OperandType, origin: Origin) -> Result<ValueId> {
        let value = Value { name, value_type, origin, placements: Placements::default() };
        let index = self.program.values.len();
        let taken = self.program.values.iter().any(|other| other.name == value.name);
        let checked = if taken { Err(taken_name(&value.name)) } else { self.program.validate_value(&value) };
        checked.map_err(|error| error.at(&value.name))?;
        self.program.values.push(value);
        Ok(ValueId::new(index))
    }

    /// Adds a call and returns its results.
    ///
    /// # Errors
    /// Names op, argument and field.
    pub fn calls(
        &mut self,
        op: impl Into<Op>,
        operands: impl IntoIterator<Item = Option<ValueId>>,
    ) -> Result<Vec<ValueId>> {
        let (op, operands): (Op, Vec<_>) = (op.into(), operands.into_iter().collect());
        let types = self.program.operand_types(&operands).map_err(|error| error.in_op(op.name()))?;
        let node = self.program.nodes.len();
        let mut results = Vec::new();
        for tensor in op.infer(&types)? {
            results.push(ValueId::new(self.program.values.len()));
            let value_type = OperandType::Tensor(tensor);
            let (name, origin, placements) = (String::new(), Origin::Node(node), Placements::default());
            self.program.values.push(Value { name, value_type, origin, placements });
        }
        let lane = Lane::usual(&op);
        let segment = self.program.segments.len().saturating_sub(1);
        self.program.nodes.push(Node {
            call: Call { op, operands, results: results.clone() },
            lane,
            segment,
        });
        Ok(results)
    }

    /// Adds a call and returns its first result.
    ///
    /// # Errors
    /// As [`Self::calls`], or if the op has no result.
    pub fn call(
        &mut self,
        op: impl Into<Op>,
        operands: impl IntoIterator<Item = Option<ValueId>>,
    ) -> Result<ValueId> {
        let op = op.into();
        // Checked first, so that a rejected call is not added.
        if op.signature().is_some_and(|signature| signature.results.is_empty()) {
            return Err(Error::invalid("has no result").in_op(op.name()));
        }
        let results = self.calls(op, operands)?;
        results.first().copied().ok_or_else(|| Error::internal("an op with results has returned none"))
    }

    /// The type of a value.
    ///
    /// # Errors
    /// If the program has no such value.
    pub fn value(&self, id: ValueId) -> Result<&Value> {
        self.program.value(id)
    }

    /// Finishes the program; the host reads `outputs` after a step.
    ///
    /// # Errors
    /// As [`Program::validate`].
    pub fn finish(mut self, outputs: &[ValueId]) -> Result<Program> {
        self.program.outputs = outputs.to_vec();
        self.program.validate()?;
        Ok(self.program)
    }
}
