//! The ops a program is made of.
//!
//! An op is a small struct of attributes. What it computes, for which shapes and types and with which rounding, stands in
//! its documentation; [`Operation::infer`] checks a call and gives the types of its results; [`Operation::index_maps`] says
//! how its operands and results hang together, which is all that passes need to know.
//!
//! Conventions, for every op:
//!
//! - Activations are `[rows, features]`. Sizes in documents: `T` tokens of a step, `S` sequences of a step, `R` rows whose
//!   logits are wanted, `C` requests in the request table, `V` vocabulary, `H` hidden size, `D` head size, `P` pages of `B`
//!   slots.
//! - A first dimension may be bounded ([`crate::Size::Bounded`]): rows past its extent are neither read nor written.
//! - In every index operand -1 means skip, and an index outside what it points into is treated as -1: no content of an index
//!   operand makes an op touch memory that is not its own.
//! - Floats are f32, f16 or bf16. Sums are accumulated in f32 or better; results are rounded once, to nearest. A
//!   [`Region`] may leave inner roundings out, never add one.
//! - Tensors with a size of 0 are valid and nothing happens to them.

mod activation;
mod attention;
mod attributes;
mod cache;
mod collective;
mod elementwise;
mod embed;
mod index_map;
mod linear;
mod norm;
mod quant;
mod rope;
mod sampling;
mod signature;
mod step;

use crate::{Error, Result, region::Region, tensor::TensorType};
pub use activation::{Activation, GateLayout, GatedActivation, Nonlinearity};
pub use attention::{Attention, AttentionMask, AttentionPrepare, PagedAttention};
use attributes::attributes;
pub use attributes::{Attribute, AttributeInC, AttributeSpec, AttributeValue, Attributes, ChoiceInC};
pub use cache::{KvWrite, PageGather, PageScatter};
pub use collective::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, MeshAxis, Receive, ReduceScatter, Reduction, Send,
};
pub use elementwise::{Add, Cast, Columns};
pub use embed::{Embed, GatherRows};
pub use index_map::{Axis, DimensionKind, IndexMaps, IterationDimension};
pub use linear::Linear;
pub use norm::{LayerNorm, RmsNorm};
pub use quant::{LinearW8A8, QuantPerToken};
pub use rope::{Rope, RopePairing};
pub use sampling::{Argmax, LogitProcess, SAMPLING_COLUMNS, Sample, SamplingColumn};
pub use signature::{
    OperandKind, OperandSpec, OperandType, Operands, Profile, ResultSpec, Signature, TensorArgument,
};
use std::{fmt, sync::Arc};
pub use step::{CommitTokens, IN_PROMPT, PrepareStep};

/// What every op says about itself.
pub trait Operation: Attributes {
    /// Name, profile, operands and results.
    const SIGNATURE: &'static Signature;

    /// Checks operands that already fit the signature, and gives the types of the results.
    ///
    /// # Errors
    /// Names the operand or attribute that is wrong, and its field.
    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>>;

    /// The iteration space of the call, and how operands and results are laid over it.
    ///
    /// # Errors
    /// As [`Self::infer`].
    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps>;
}

macro_rules! primitives {
    ($($op:ident = $number:literal,)*) => {
        /// An op with its attributes.
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub enum Op {
            $(#[doc = concat!("See [`", stringify!($op), "`].")] $op($op),)*
            /// A fused op: a small program of its own.
            Region(Arc<Region>),
        }

        $(
            impl From<$op> for Op {
                fn from(op: $op) -> Self {
                    Self::$op(op)
                }
            }
        )*

        impl Op {
            /// The signatures of all primitives, in the order of the op table.
            pub const PRIMITIVES: &'static [&'static Signature] = &[$($op::SIGNATURE,)*];

            /// The numbers of all primitives in the C ABI, in the order of [`Self::PRIMITIVES`]. Numbers are never changed
            /// or used again.
            pub const NUMBERS: &'static [u32] = &[$($number,)*];

            /// The definitions of all primitives, in Markdown, in the order of [`Self::PRIMITIVES`].
            pub const DOCUMENTATION: &'static [&'static str] = &[$($op::DOCUMENTATION,)*];

            /// The attributes of all primitives, in the order of [`Self::PRIMITIVES`].
            pub const ATTRIBUTES: &'static [&'static [AttributeSpec]] = &[$($op::SPECS,)*];

            /// The number in the C ABI; [`Self::REGION_NUMBER`] for a region.
            pub fn number(&self) -> u32 {
                match self {
                    $(Self::$op(_) => $number,)*
                    Self::Region(_) => Self::REGION_NUMBER,
                }
            }

            /// The attributes as the words of the C ABI; none for a region.
            pub fn words(&self) -> Vec<u32> {
                match self {
                    $(Self::$op(op) => op.words(),)*
                    Self::Region(_) => Vec::new(),
                }
            }

            /// The primitive of this number with attributes read from words.
            ///
            /// # Errors
            /// If there is no such primitive, the number of words is another, or an attribute is wrong.
            pub fn from_words(number: u32, words: &[u32]) -> Result<Self> {
                match number {
                    $($number => {
                        $op::from_words(words).map(Self::$op).map_err(|error| error.in_op($op::SIGNATURE.name))
                    })*
                    _ => Err(Error::unsupported(format!("there is no op {number}"))),
                }
            }

            /// The signature; `None` for a region, whose operands are its own.
            pub fn signature(&self) -> Option<&'static Signature> {
                match self {
                    $(Self::$op(_) => Some($op::SIGNATURE),)*
                    Self::Region(_) => None,
                }
            }

            /// The attributes, by name and in order; none for a region.
            pub fn attributes(&self) -> Vec<(&'static str, AttributeValue)> {
                match self {
                    $(Self::$op(op) => op.attributes(),)*
                    Self::Region(_) => Vec::new(),
                }
            }

            /// The primitive of this name with attributes read from texts.
            ///
            /// # Errors
            /// If there is no such primitive, or an attribute is missing or wrong.
            pub fn from_texts(name: &str, take: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
                $(
                    if name == $op::SIGNATURE.name {
                        return $op::from_texts(take).map(Self::$op).map_err(|error| error.in_op(name));
                    }
                )*
                Err(Error::unsupported(format!("there is no op `{name}`")))
            }

            /// The names of the attributes of the primitive of this name; empty for an unknown one.
            pub fn attribute_names(name: &str) -> &'static [&'static str] {
                $(
                    if name == $op::SIGNATURE.name {
                        return $op::NAMES;
                    }
                )*
                &[]
            }

            /// Checks the operands of a call and gives the types of its results.
            ///
            /// # Errors
            /// Names op, argument and field.
            pub fn infer(&self, operands: &[Option<OperandType>]) -> Result<Vec<TensorType>> {
                let inferred = match self {
                    $(Self::$op(op) => Operands::new($op::SIGNATURE, operands).and_then(|operands| op.infer(&operands)),)*
                    Self::Region(region) => region.infer(operands),
                };
                inferred.map_err(|error| error.in_op(self.name()))
            }

            /// The iteration space of a call. A region is the result of fusion, and nothing fuses with it: it has none.
            ///
            /// # Errors
            /// As [`Self::infer`].
            pub fn index_maps(&self, operands: &[Option<OperandType>]) -> Result<IndexMaps> {
                let maps = match self {
                    $(Self::$op(op) => {
                        Operands::new($op::SIGNATURE, operands).and_then(|operands| {
                            op.infer(&operands)?;
                            op.index_maps(&operands)
                        })
                    })*
                    Self::Region(region) => region.index_maps(operands),
                };
                maps.map_err(|error| error.in_op(self.name()))
            }
        }
    };
}

// The numbers are fixed: they cross the C ABI. A new op gets one that is neither here nor in `Op::RETIRED_NUMBERS`.
primitives! {
    Embed = 1,
    RmsNorm = 2,
    LayerNorm = 3,
    Linear = 4,
    Activation = 6,
    GatedActivation = 7,
    Rope = 8,
    KvWrite = 9,
    PageGather = 11,
    PageScatter = 12,
    AttentionPrepare = 13,
    PagedAttention = 14,
    Attention = 15,
    Add = 16,
    Cast = 17,
    GatherRows = 19,
    PrepareStep = 20,
    LogitProcess = 21,
    Argmax = 22,
    Sample = 23,
    CommitTokens = 24,
    Columns = 25,
    QuantPerToken = 26,
    LinearW8A8 = 27,
    AllReduce = 64,
    AllGather = 65,
    ReduceScatter = 66,
    AllToAll = 67,
    Broadcast = 68,
    Send = 69,
    Receive = 70,
    Barrier = 71,
}

impl Op {
    /// Numbers of ops that no longer exist. They are never given to another op.
    pub const RETIRED_NUMBERS: &'static [u32] = &[5, 10, 18];

    /// The number of every region in the C ABI; the body says which op it is.
    pub const REGION_NUMBER: u32 = 0x1_0000;

    /// The number in the C ABI of the primitive of this name.
    pub fn number_of(name: &str) -> Option<u32> {
        let index = Self::PRIMITIVES.iter().position(|signature| signature.name == name)?;
        Self::NUMBERS.get(index).copied()
    }

    /// The signature of the primitive with this number in the C ABI.
    pub fn signature_of(number: u32) -> Option<&'static Signature> {
        let index = Self::NUMBERS.iter().position(|known| *known == number)?;
        Self::PRIMITIVES.get(index).copied()
    }

    /// The name, as programs and messages write it.
    pub fn name(&self) -> &str {
        match self {
            Self::Region(region) => region.name(),
            primitive => primitive.signature().map_or("region", |signature| signature.name),
        }
    }

    /// The operand whose storage result `index` takes over, if the op updates one in place.
    pub fn updates(&self, index: usize) -> Option<usize> {
        match self {
            Self::Region(region) => region.updates(index),
            primitive => primitive.signature()?.results.get(index)?.updates,
        }
    }

    /// The mesh axis, if the op is a collective.
    pub fn mesh_axis(&self) -> Option<MeshAxis> {
        match self {
            Self::AllReduce(op) => Some(op.axis),
            Self::AllGather(op) => Some(op.axis),
            Self::ReduceScatter(op) => Some(op.axis),
            Self::AllToAll(op) => Some(op.axis),
            Self::Broadcast(op) => Some(op.axis),
            Self::Send(op) => Some(op.axis),
            Self::Receive(op) => Some(op.axis),
            Self::Barrier(op) => Some(op.axis),
            _ => None,
        }
    }
}

impl fmt::Display for Op {
    /// Name and attributes, as in the text of a program; a region prints its body.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Region(region) = self {
            return region.fmt(f);
        }
        f.write_str(self.name())?;
        let attributes = self.attributes();
        if attributes.is_empty() {
            return Ok(());
        }
        f.write_str("{")?;
        for (index, (name, value)) in attributes.iter().enumerate() {
            write!(f, "{}{name}={value}", if index == 0 { "" } else { ", " })?;
        }
        f.write_str("}")
    }
}
