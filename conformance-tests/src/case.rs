//! A call with its inputs and what has to come out.

use crate::{gate::Gate, oracle::Real, tensor::Tensor};
use dsrun_core::{DType, WeightType, op::Op};

/// A case: one call, or for collectives one per rank.
#[derive(Clone, Debug)]
pub struct Case {
    /// Op, element type and what is special, as `op/dtype/label`. Names the case for ever.
    pub id: String,
    /// What each rank runs; one call for everything but collectives.
    pub calls: Vec<CallCase>,
    /// Whether every rank must get the same bits.
    pub alike: bool,
}

/// One call of a case.
#[derive(Clone, Debug)]
pub struct CallCase {
    /// The op.
    pub op: Op,
    /// Its operands, in the order of the signature.
    pub operands: Vec<Option<Operand>>,
    /// What its results must be, in the order of the signature.
    pub results: Vec<Expected>,
}

/// An operand of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operand {
    /// A tensor.
    Tensor(Input),
    /// A weight, to be packed by the device.
    Weight(Weight),
    /// The work list the device makes for the lengths in the operands named `query_start`, `query_length` and `kv_length`.
    WorkList,
}

/// A tensor operand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// The elements. Those of rows past the extent are replaced by poison before the device sees them.
    pub tensor: Tensor,
    /// How it lies in memory.
    pub layout: Layout,
}

/// How a tensor lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Elements between the rows of every dimension but the last.
    pub gap: usize,
    /// Units of the device's alignment, beyond the first, in front of the tensor.
    pub offset: usize,
    /// Whether a call may bind an extent.
    pub bounded: bool,
    /// How many rows are real; all if absent. Only if bounded.
    pub extent: Option<usize>,
}

/// A weight operand, in the bytes of its format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Shape and format.
    pub weight_type: WeightType,
    /// The rows.
    pub bytes: Vec<u8>,
    /// The element type of the activations it is used with.
    pub used_with: DType,
}

/// What a result must be.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Each element, row-major; empty if the result is the device's own business.
    pub elements: Vec<Element>,
    /// How far float elements may be off.
    pub gate: Gate,
    /// How the result lies in memory. A result that updates an operand lies where that does.
    pub layout: Layout,
    /// The probabilities that the elements, as ids, were drawn with.
    pub distribution: Option<Vec<f64>>,
}

/// What an element must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Element {
    /// What it was before the call.
    Untouched,
    /// The document says nothing.
    Anything,
    /// Exactly these bits.
    Bits(u32),
    /// Any of these bits.
    OneOf(Vec<u32>),
    /// This number, within the gate.
    Real(Real),
}

impl Case {
    /// A case of a single call.
    pub fn new(id: String, call: CallCase) -> Self {
        Self { id, calls: vec![call], alike: false }
    }
}

impl CallCase {
    /// A call.
    pub fn new(op: impl Into<Op>, operands: Vec<Option<Operand>>, results: Vec<Expected>) -> Self {
        Self { op: op.into(), operands, results }
    }
}

impl Layout {
    /// Rows with gaps between them, at an offset.
    pub const fn strided(gap: usize, offset: usize) -> Self {
        Self { gap, offset, bounded: false, extent: None }
    }

    /// The same, of which only the first rows are real.
    #[must_use]
    pub fn with_extent(self, extent: Option<usize>) -> Self {
        Self { bounded: self.bounded || extent.is_some(), extent, ..self }
    }

    /// How many of `rows` are real.
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
        Self { elements, gate: Gate::default(), layout: Layout::default(), distribution: None }
    }

    /// Results within the gate.
    pub fn reals(reals: impl IntoIterator<Item = Real>) -> Self {
        Self::new(reals.into_iter().map(Element::Real).collect())
    }

    /// Results that are copies or integers.
    pub fn bits(bits: impl IntoIterator<Item = u32>) -> Self {
        Self::new(bits.into_iter().map(Element::Bits).collect())
    }

    /// Integer results.
    pub fn integers(values: &[i32]) -> Self {
        Self::bits(values.iter().map(|value| *value as u32))
    }

    /// With a gate.
    #[must_use]
    pub fn gated(self, gate: Gate) -> Self {
        Self { gate, ..self }
    }

    /// With a layout. Rows past the extent must be left alone; a row is so many elements.
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
