//! What an op looks like from outside: its operands, its results, and what it does to them.

use crate::{
    DType, Error, Result, WeightFormat, WeightType,
    tensor::{Size, TensorType},
};

/// The set of ops a backend promises to have. A backend names the profiles it supports; the conformance suite holds it
/// to them.
/// The numbers are fixed: they cross the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Profile {
    /// What dense transformer models need.
    LlmCore1 = 1,
    /// Quantised activations and weights.
    LlmQuant1 = 2,
    /// Mixture of experts.
    LlmMoe1 = 3,
    /// Collectives.
    LlmDist1 = 4,
}

impl Profile {
    /// Every profile, in the order of its number.
    pub const ALL: [Self; 4] = [Self::LlmCore1, Self::LlmQuant1, Self::LlmMoe1, Self::LlmDist1];

    /// The name used in documents and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::LlmCore1 => "llm-core-1",
            Self::LlmQuant1 => "llm-quant-1",
            Self::LlmMoe1 => "llm-moe-1",
            Self::LlmDist1 => "llm-dist-1",
        }
    }
}

/// What may stand in an operand's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandKind {
    /// A tensor of f32, f16 or bf16.
    Float,
    /// A tensor of f32.
    F32,
    /// A tensor of i32: indices, lengths, positions.
    I32,
    /// A tensor of u32: bit masks, seeds.
    U32,
    /// A tensor of i8: quantised values.
    I8,
    /// A tensor of any element type.
    Any,
    /// A weight the backend has packed; any weight format.
    Weight,
}

impl OperandKind {
    /// How the operand's type is written in the op table.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float => "float",
            Self::F32 => "f32",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I8 => "i8",
            Self::Any => "any",
            Self::Weight => "weight",
        }
    }

    fn admits(self, dtype: DType) -> bool {
        match self {
            Self::Float => dtype.is_float(),
            Self::F32 => dtype == DType::F32,
            Self::I32 => dtype == DType::I32,
            Self::U32 => dtype == DType::U32,
            Self::I8 => dtype == DType::I8,
            Self::Any => true,
            Self::Weight => false,
        }
    }
}

/// One operand of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperandSpec {
    /// Its name in messages and documents.
    pub name: &'static str,
    /// What may stand there.
    pub kind: OperandKind,
    /// Whether it may be left out.
    pub optional: bool,
}

/// One result of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResultSpec {
    /// Its name in messages and documents.
    pub name: &'static str,
    /// The operand whose storage the result takes over: the op updates it in place, and the operand's old value is gone.
    pub updates: Option<usize>,
}

/// What an op looks like from outside.
#[derive(Debug, PartialEq, Eq)]
pub struct Signature {
    /// The name, as programs and messages write it.
    pub name: &'static str,
    /// The profile that requires it.
    pub profile: Profile,
    /// What it computes, in a line.
    pub summary: &'static str,
    /// The operands, in order. New ones are only ever appended, and optional.
    pub operands: &'static [OperandSpec],
    /// The results, in order.
    pub results: &'static [ResultSpec],
}

/// A required operand.
pub(crate) const fn operand(name: &'static str, kind: OperandKind) -> OperandSpec {
    OperandSpec { name, kind, optional: false }
}

/// An operand that may be left out.
pub(crate) const fn optional(name: &'static str, kind: OperandKind) -> OperandSpec {
    OperandSpec { name, kind, optional: true }
}

/// A result in storage of its own.
pub(crate) const fn result(name: &'static str) -> ResultSpec {
    ResultSpec { name, updates: None }
}

/// A result that is operand `operand`, updated in place.
pub(crate) const fn updated(name: &'static str, operand: usize) -> ResultSpec {
    ResultSpec { name, updates: Some(operand) }
}

/// The type of an operand at a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperandType {
    /// A tensor.
    Tensor(TensorType),
    /// A packed weight.
    Weight(WeightType),
}

/// The operands of a call, checked against the signature, for shape inference.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    signature: &'static Signature,
    types: &'a [Option<OperandType>],
}

impl<'a> Operands<'a> {
    /// Checks number, presence and element types.
    ///
    /// # Errors
    /// Names the operand that is wrong.
    pub fn new(signature: &'static Signature, types: &'a [Option<OperandType>]) -> Result<Self> {
        if types.len() != signature.operands.len() {
            let message = format!("has {} operands, needs {}", types.len(), signature.operands.len());
            return Err(Error::invalid(message).field("operands"));
        }
        for (spec, operand) in signature.operands.iter().zip(types) {
            let wrong = |message: String| Err(Error::invalid(message).at(spec.name));
            match (operand, spec.kind) {
                (None, _) if spec.optional => {}
                (None, _) => return wrong("is missing".into()),
                (Some(OperandType::Weight(_)), OperandKind::Weight) => {}
                (Some(OperandType::Weight(_)), _) => {
                    return wrong("is a packed weight, must be a tensor".into());
                }
                (Some(OperandType::Tensor(_)), OperandKind::Weight) => {
                    return wrong("is a tensor, must be a packed weight".into());
                }
                (Some(OperandType::Tensor(tensor)), kind) => {
                    if !kind.admits(tensor.dtype) {
                        let message = format!("is {}, must be {}", tensor.dtype, kind.name());
                        return Err(Error::invalid(message).at(spec.name).field("dtype"));
                    }
                    if tensor.shape.len() > TensorType::MAX_RANK {
                        return wrong(format!("has {} dimensions", tensor.shape.len()));
                    }
                }
            }
        }
        Ok(Self { signature, types })
    }

    fn get(&self, name: &'static str) -> Option<&'a OperandType> {
        let index = self.signature.operands.iter().position(|spec| spec.name == name)?;
        self.types.get(index)?.as_ref()
    }

    /// The tensor operand of this name, if it is there.
    pub fn optional(&self, name: &'static str) -> Option<TensorArgument<'a>> {
        match self.get(name)? {
            OperandType::Tensor(tensor_type) => Some(TensorArgument { name, tensor_type }),
            OperandType::Weight(_) => None,
        }
    }

    /// The tensor operand of this name.
    ///
    /// # Errors
    /// If it is not there.
    pub fn tensor(&self, name: &'static str) -> Result<TensorArgument<'a>> {
        self.optional(name).ok_or_else(|| Error::invalid("is missing").at(name))
    }

    /// The packed weight of this name, if it is there, as rows and columns.
    pub fn optional_weight(&self, name: &'static str) -> Result<Option<(usize, usize)>> {
        match self.get(name) {
            Some(OperandType::Weight(weight)) => match weight.shape.as_slice() {
                [rows, columns] => Ok(Some((*rows, *columns))),
                shape => {
                    Err(Error::invalid(format!("is {shape:?}, must be a matrix")).at(name).field("rank"))
                }
            },
            _ => Ok(None),
        }
    }

    /// The storage format of the packed weight of this name.
    ///
    /// # Errors
    /// If it is not there.
    pub fn weight_format(&self, name: &'static str) -> Result<WeightFormat> {
        match self.get(name) {
            Some(OperandType::Weight(weight)) => Ok(weight.format),
            _ => Err(Error::invalid("is missing").at(name)),
        }
    }

    /// The packed weight of this name as rows and columns.
    ///
    /// # Errors
    /// If it is not there or no matrix.
    pub fn weight(&self, name: &'static str) -> Result<(usize, usize)> {
        self.optional_weight(name)?.ok_or_else(|| Error::invalid("is missing").at(name))
    }
}

/// A tensor operand by name, with the checks that inference needs. Every error names operand and field.
#[derive(Clone, Copy, Debug)]
pub struct TensorArgument<'a> {
    name: &'static str,
    tensor_type: &'a TensorType,
}

impl<'a> TensorArgument<'a> {
    /// The element type.
    pub fn dtype(&self) -> DType {
        self.tensor_type.dtype
    }

    /// The type.
    pub fn tensor_type(&self) -> &'a TensorType {
        self.tensor_type
    }

    /// The sizes, if there are exactly `N`.
    ///
    /// # Errors
    /// If the rank is another.
    pub fn sizes<const N: usize>(&self) -> Result<&'a [Size; N]> {
        self.tensor_type.shape.as_slice().try_into().map_err(|_| {
            let message = format!("has {} dimensions, needs {N}", self.tensor_type.shape.len());
            Error::invalid(message).at(self.name).field("rank")
        })
    }

    /// Checks that dimension `index` is `size`, which is `what`.
    ///
    /// # Errors
    /// If it is another size.
    pub fn expect(&self, index: usize, size: &Size, what: &str) -> Result<()> {
        let found = self.tensor_type.shape.get(index);
        if found == Some(size) {
            return Ok(());
        }
        let found = found.map_or_else(|| "missing".to_owned(), ToString::to_string);
        let message = format!("is {found}, must be {size} ({what})");
        Err(Error::invalid(message).at(self.name).field(format!("shape[{index}]")))
    }

    /// Checks the whole shape.
    ///
    /// # Errors
    /// If the rank or a size is another.
    pub fn expect_shape<const N: usize>(&self, sizes: [&Size; N], what: &str) -> Result<()> {
        self.sizes::<N>()?;
        sizes.into_iter().enumerate().try_for_each(|(index, size)| self.expect(index, size, what))
    }

    /// Checks the element type.
    ///
    /// # Errors
    /// If it is another.
    pub fn expect_dtype(&self, dtype: DType, what: &str) -> Result<()> {
        if self.dtype() == dtype {
            return Ok(());
        }
        let message = format!("is {}, must be {dtype} ({what})", self.dtype());
        Err(Error::invalid(message).at(self.name).field("dtype"))
    }

    /// Dimension `index` as a number known when the program is built.
    ///
    /// # Errors
    /// If it is not known by then.
    pub fn known(&self, index: usize) -> Result<usize> {
        let size = self.tensor_type.shape.get(index);
        size.and_then(Size::known).ok_or_else(|| {
            let found = size.map_or_else(|| "missing".to_owned(), ToString::to_string);
            let message = format!("is {found}, must be a size known when the program is built");
            Error::invalid(message).at(self.name).field(format!("shape[{index}]"))
        })
    }
}
