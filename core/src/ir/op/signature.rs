//! The signature of an op: its operands and results, and which operands it updates.

use crate::{
    DType, Error, Result, WeightFormat, WeightType,
    tensor::{Size, TensorType},
};

/// A named set of ops. A backend lists the profiles it supports, and the conformance suite checks that it has their ops. The
/// numbers are fixed because they cross the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Profile {
    /// The ops of dense transformer models.
    LlmCore1 = 1,
    /// The ops of models with quantised activations and weights.
    LlmQuant1 = 2,
    /// The ops of mixture-of-experts models.
    LlmMoe1 = 3,
    /// The collectives.
    LlmDist1 = 4,
    /// The ops of models with latent attention.
    LlmMla1 = 5,
    /// The ops of models with weights of any format and activations that are quantised in groups.
    LlmQuant2 = 6,
}

impl Profile {
    /// Every profile, in the order of its number.
    pub const ALL: [Self; 6] =
        [Self::LlmCore1, Self::LlmQuant1, Self::LlmMoe1, Self::LlmDist1, Self::LlmMla1, Self::LlmQuant2];

    /// The name that documents and the command line use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::LlmCore1 => "llm-core-1",
            Self::LlmQuant1 => "llm-quant-1",
            Self::LlmMoe1 => "llm-moe-1",
            Self::LlmDist1 => "llm-dist-1",
            Self::LlmMla1 => "llm-mla-1",
            Self::LlmQuant2 => "llm-quant-2",
        }
    }
}

/// The kinds of values that an operand accepts.
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
    /// A KV cache: a tensor of f32, f16 or bf16, or of i8 with scales in each row ([`crate::cache_row`]).
    Cache,
    /// A tensor of any element type.
    Any,
    /// A packed weight of any format.
    Weight,
}

impl OperandKind {
    /// The notation of the operand's type in the op table.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float => "float",
            Self::F32 => "f32",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I8 => "i8",
            Self::Cache => "float or i8",
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
            Self::Cache => dtype.is_float() || dtype == DType::I8,
            Self::Any => true,
            Self::Weight => false,
        }
    }
}

/// An operand in a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperandSpec {
    /// The name in messages and documents.
    pub name: &'static str,
    /// The values it accepts.
    pub kind: OperandKind,
    /// Whether it may be absent.
    pub optional: bool,
}

/// A result in a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResultSpec {
    /// The name in messages and documents.
    pub name: &'static str,
    /// The operand that the op updates in place to make this result. The old value of the operand no longer exists.
    pub updates: Option<usize>,
}

/// The signature of an op.
#[derive(Debug, PartialEq, Eq)]
pub struct Signature {
    /// The name that programs and messages use.
    pub name: &'static str,
    /// The profile that requires it.
    pub profile: Profile,
    /// A one-line description of what it computes.
    pub summary: &'static str,
    /// The operands, in order. A new operand is appended and optional.
    pub operands: &'static [OperandSpec],
    /// The results, in order.
    pub results: &'static [ResultSpec],
}

/// A required operand.
pub(crate) const fn operand(name: &'static str, kind: OperandKind) -> OperandSpec {
    OperandSpec { name, kind, optional: false }
}

/// An optional operand.
pub(crate) const fn optional(name: &'static str, kind: OperandKind) -> OperandSpec {
    OperandSpec { name, kind, optional: true }
}

/// A result with its own storage.
pub(crate) const fn result(name: &'static str) -> ResultSpec {
    ResultSpec { name, updates: None }
}

/// A result that updates operand `operand` in place.
pub(crate) const fn updated(name: &'static str, operand: usize) -> ResultSpec {
    ResultSpec { name, updates: Some(operand) }
}

/// The type of an operand of a call.
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
    /// Checks the number, presence and element types of operands.
    ///
    /// # Errors
    /// Names the operand at fault.
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

    /// The tensor operand of this name, if it is present.
    pub fn optional(&self, name: &'static str) -> Option<TensorArgument<'a>> {
        match self.get(name)? {
            OperandType::Tensor(tensor_type) => Some(TensorArgument { name, tensor_type }),
            OperandType::Weight(_) => None,
        }
    }

    /// The tensor operand of this name.
    ///
    /// # Errors
    /// If it is absent.
    pub fn tensor(&self, name: &'static str) -> Result<TensorArgument<'a>> {
        self.optional(name).ok_or_else(|| Error::invalid("is missing").at(name))
    }

    /// The rows and columns of the packed weight of this name, if it is present.
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
    /// If it is absent.
    pub fn weight_format(&self, name: &'static str) -> Result<WeightFormat> {
        match self.get(name) {
            Some(OperandType::Weight(weight)) => Ok(weight.format),
            _ => Err(Error::invalid("is missing").at(name)),
        }
    }

    /// The rows and columns of the packed weight of this name.
    ///
    /// # Errors
    /// If it is absent or not a matrix.
    pub fn weight(&self, name: &'static str) -> Result<(usize, usize)> {
        self.optional_weight(name)?.ok_or_else(|| Error::invalid("is missing").at(name))
    }
}

/// A named tensor operand with the checks of shape inference, whose errors name the operand and field.
#[derive(Clone, Copy, Debug)]
pub struct TensorArgument<'a> {
    name: &'static str,
    tensor_type: &'a TensorType,
}

impl<'a> TensorArgument<'a> {
    /// The name of the operand.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.tensor_type.dtype
    }

    /// The type.
    pub fn tensor_type(&self) -> &'a TensorType {
        self.tensor_type
    }

    /// The `N` sizes of the tensor.
    ///
    /// # Errors
    /// If the rank is not `N`.
    pub fn sizes<const N: usize>(&self) -> Result<&'a [Size; N]> {
        self.tensor_type.shape.as_slice().try_into().map_err(|_| {
            let message = format!("has {} dimensions, needs {N}", self.tensor_type.shape.len());
            Error::invalid(message).at(self.name).field("rank")
        })
    }

    /// Checks that dimension `index` has the size `size`; `what` says in the message where that size comes from.
    ///
    /// # Errors
    /// If the size differs.
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
    /// If the rank or a size differs.
    pub fn expect_shape<const N: usize>(&self, sizes: [&Size; N], what: &str) -> Result<()> {
        self.sizes::<N>()?;
        sizes.into_iter().enumerate().try_for_each(|(index, size)| self.expect(index, size, what))
    }

    /// Checks the element type.
    ///
    /// # Errors
    /// If it differs.
    pub fn expect_dtype(&self, dtype: DType, what: &str) -> Result<()> {
        if self.dtype() == dtype {
            return Ok(());
        }
        let message = format!("is {}, must be {dtype} ({what})", self.dtype());
        Err(Error::invalid(message).at(self.name).field("dtype"))
    }

    /// The size of dimension `index`, which must be known when the program is built.
    ///
    /// # Errors
    /// If the size is symbolic.
    pub fn known(&self, index: usize) -> Result<usize> {
        let size = self.tensor_type.shape.get(index);
        size.and_then(Size::known).ok_or_else(|| {
            let found = size.map_or_else(|| "missing".to_owned(), ToString::to_string);
            let message = format!("is {found}, must be a size known when the program is built");
            Error::invalid(message).at(self.name).field(format!("shape[{index}]"))
        })
    }
}
