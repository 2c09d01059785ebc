//! A case: a call with its inputs and expected results.

use crate::{gate::Gate, real::Real, tensor::Tensor};
use dsrun_core::{DType, WeightType, op::Op};

/// One call, or for collectives one call per rank.
#[derive(Clone, Debug)]
pub struct Case {
    /// Op, element type and a label, as `op/dtype/label`. The id of a case never changes.
    pub id: String,
    /// The call of each rank; a single call unless the op is a collective.
    pub calls: Vec<CallCase>,
    /// Whether all ranks must get the same bits.
    pub alike: bool,
}

/// One call of a case.
#[derive(Clone, Debug)]
pub struct CallCase {
    /// The op.
    pub op: Op,
    /// The operands, in the order of the signature.
    pub operands: Vec<Option<Operand>>,
    /// The expected results, in the order of the signature.
    pub results: Vec<Expected>,
}

/// An operand of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operand {
    /// A tensor.
    Tensor(Input),
    /// A weight, which the device packs.
    Weight(Weight),
    /// The work list that the device makes from the operands `query_start`, `query_length` and `kv_length`.
    WorkList,
}

/// A tensor operand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// The elements. Rows past the extent are replaced by poison before the device gets them.
    pub tensor: Tensor,
    /// The layout in memory.
    pub layout: Layout,
}

/// The layout of a tensor in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Number of elements between the rows of every dimension but the last.
    pub gap: usize,
    /// Offset of the tensor from the start of its buffer, in units of the device's alignment, beyond the first unit.
    pub offset: usize,
    /// Whether a call may bind an extent.
    pub bounded: bool,
    /// Number of rows that are real, for a bounded tensor; `None` for all.
    pub extent: Option<usize>,
}

/// A weight operand, as bytes of its format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// The shape and format.
    pub weight_type: WeightType,
    /// The bytes of all rows.
    pub bytes: Vec<u8>,
}

/// An expected result.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The expectation of each element, row-major; empty if the format of the result is up to the device.
    pub elements: Vec<Element>,
    /// The expectations of a device that takes subnormal operands for zero; empty if they are the same.
    pub flushed: Vec<Element>,
    /// What a failure says of the row it is in; empty if there is nothing to say.
    pub notes: Vec<String>,
    /// The allowed error of float elements.
    pub gate: Gate,
    /// Whether the op keeps subnormal numbers on the way too, as copies and additions do.
    pub keeps_subnormals: bool,
    /// The layout in memory. A result that updates an operand has the layout of that operand.
    pub layout: Layout,
    /// The probabilities of the tokens, for results that are sampled token ids.
    pub distribution: Option<Vec<f64>>,
}

/// The expectation of an element.
#[derive(Clone, Debug, PartialEq)]
pub enum Element {
    /// The element keeps the value it had before the call.
    Untouched,
    /// The value is not defined.
    Anything,
    /// Exactly these bits.
    Bits(u32),
    /// Any of these bits.
    OneOf(Vec<u32>),
    /// This number, within the gate.
    Real(Real),
}

impl Case {
    /// The case for a device that takes subnormal operands of some types for zero: `other` is the same case with expectations
    /// for those zeros.
    #[must_use]
    pub fn or_flushed(mut self, other: Self) -> Self {
        for (call, other) in self.calls.iter_mut().zip(other.calls) {
            for (result, other) in call.results.iter_mut().zip(other.results) {
                result.flushed = other.elements;
            }
        }
        self
    }

    /// Whether a tensor operand has subnormal numbers of these types.
    pub fn has_subnormals(&self, dtypes: &[DType]) -> bool {
        self.calls.iter().flat_map(|call| &call.operands).any(|operand| match operand {
            Some(Operand::Tensor(input)) => input.tensor.has_subnormals(dtypes),
            _ => false,
        })
    }

    /// A case of a single call.
    pub fn new(id: String, call: CallCase) -> Self {
        Self { id, calls: vec![call], alike: false }
    }
}

impl CallCase {
    /// A call of `op`.
    pub fn new(op: impl Into<Op>, operands: Vec<Option<Operand>>, results: Vec<Expected>) -> Self {
        Self { op: op.into(), operands, results }
    }

    /// The number of elements of all operands and results.
    pub fn elements(&self) -> usize {
        let of = |operand: &Operand| match operand {
            Operand::Tensor(input) => input.tensor.bits.len(),
            Operand::Weight(weight) => weight.weight_type.elements().unwrap_or(usize::MAX),
            Operand::WorkList => 0,
        };
        let operands = self.operands.iter().flatten().map(of);
        operands.chain(self.results.iter().map(|result| result.elements.len())).fold(0, usize::saturating_add)
    }
}

impl Layout {
    /// Rows with gaps between them, at an offset.
    pub const fn strided(gap: usize, offset: usize) -> Self {
        Self { gap, offset, bounded: false, extent: None }
    }

    /// The same layout with an extent: only the first rows are real.
    #[must_use]
    pub fn with_extent(self, extent: Option<usize>) -> Self {
        Self { bounded: self.bounded || extent.is_some(), extent, ..self }
    }

    /// The number of real rows of a tensor of `rows` rows.
    pub fn real_rows(&self, rows: usize) -> usize {
        self.extent.map_or(rows, |extent| extent.min(rows))
    }
}

impl Operand {
    /// A dense tensor.
    pub fn tensor(tensor: Tensor) -> Option<Self> {
        Self::laid(tensor, Layout::default())
    }

    /// A tensor with a layout.
    pub fn laid(tensor: Tensor, layout: Layout) -> Option<Self> {
        Some(Self::Tensor(Input { tensor, layout }))
    }

    /// A weight.
    pub fn weight(weight: Weight) -> Option<Self> {
        Some(Self::Weight(weight))
    }
}

impl Expected {
    /// A dense result without inner rounding.
    pub fn new(elements: Vec<Element>) -> Self {
        Self {
            elements,
            flushed: Vec::new(),
            notes: Vec::new(),
            gate: Gate::default(),
            keeps_subnormals: false,
            layout: Layout::default(),
            distribution: None,
        }
    }

    /// Float results, compared within the gate.
    pub fn reals(reals: impl IntoIterator<Item = Real>) -> Self {
        Self::new(reals.into_iter().map(Element::Real).collect())
    }

    /// Results that must be exact: copies and integers.
    pub fn bits(bits: impl IntoIterator<Item = u32>) -> Self {
        Self::new(bits.into_iter().map(Element::Bits).collect())
    }

    /// Integer results.
    pub fn integers(values: &[i32]) -> Self {
        Self::bits(values.iter().map(|value| *value as u32))
    }

    /// Asks for subnormal results that are exact to a few steps.
    #[must_use]
    pub fn keeping_subnormals(self) -> Self {
        Self { keeps_subnormals: true, ..self }
    }

    /// Sets the gate.
    #[must_use]
    pub fn gated(self, gate: Gate) -> Self {
        Self { gate, ..self }
    }

    /// Sets the layout. Rows past the extent must be untouched; a row has `row` elements.
    #[must_use]
    pub fn laid(mut self, layout: Layout, row: usize) -> Self {
        if let Some(extent) = layout.extent {
            self.elements
                .iter_mut()
                .skip(extent.saturating_mul(row))
                .for_each(|element| *element = Element::Untouched);
        }
        Self { layout, ..self }
    }
}
