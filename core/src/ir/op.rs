//! The ops a program is made of.
//!
//! An op is a small struct of attributes. Its documentation defines what it computes, for which shapes and types, and with
//! which rounding; [`Operation::infer`] checks a call and gives the types of its results; [`Operation::index_maps`] relates
//! operands and results to an iteration space, from which passes decide what can be fused and sharded.
//!
//! Conventions, for every op:
//!
//! - Activations are `[rows, features]`. Size names: `T` tokens of a step, `S` sequences of a step, `R` rows whose logits are
//!   computed, `C` requests in the request table, `V` vocabulary, `H` hidden size, `D` head size, `P` pages of `B` slots.
//! - A first dimension may be bounded ([`crate::Size::Bounded`]): rows past its extent are neither read nor written. An extent above
//!   the bound counts as the bound, a negative one as 0. Where tensors of a call share their rows, the rows below all of their
//!   extents are valid. Keys and values have the same extent.
//! - In every index operand -1 means skip, and an index out of range is treated as -1: no content of an index operand makes
//!   an op access memory outside its operands and results.
//! - Floats are f32, f16 or bf16. Sums are accumulated in f32 or better; results are rounded once, to nearest. A
//!   [`Region`] may omit inner roundings, but not add any. The order of a sum is free: one running sum of f32 is right. A device
//!   keeps subnormal numbers, unless it lists their type in [`crate::device::Flushed`].
//! - Tensors with a size of 0 are valid; ops do nothing to them.

mod activation;
mod attention;
mod attributes;
mod cache;
mod collective;
mod elementwise;
mod embed;
mod index_map;
mod latent;
mod linear;
mod moe;
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
pub use latent::{HeadLinear, LatentWrite};
pub use linear::Linear;
pub use moe::{GroupScore, GroupedLinear, MoeCombine, MoeGroup, MoeRoute, RouterNorm, RouterScore};
pub use norm::{LayerNorm, RmsNorm};
pub use quant::{LinearA8, LinearW8A8, QuantPerGroup, QuantPerToken};
pub use rope::{Rope, RopePairing};
pub use sampling::{Argmax, LogitProcess, SAMPLING_COLUMNS, Sample, SamplingColumn};
pub use signature::{
    OperandKind, OperandSpec, OperandType, Operands, Profile, ResultSpec, Signature, TensorArgument,
};
use std::{fmt, sync::Arc};
pub use step::{CommitTokens, IN_PROMPT, PrepareStep};

/// The interface of every primitive op: its signature, shape inference and index maps.
pub trait Operation: Attributes {
    /// The name, profile, operands and results.
    const SIGNATURE: &'static Signature;

    /// Infers the types of the results from operands that fit the signature, and checks shapes and attributes.
    ///
    /// # Errors
    /// Names the operand or attribute at fault, and its field.
    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>>;

    /// The iteration space of the call, and the map of each operand and result onto it.
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
            /// A fused op, defined by a body of primitives.
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

            /// The numbers of all primitives in the C ABI, in the order of [`Self::PRIMITIVES`]. Numbers are neither changed
            /// nor reused.
            pub const NUMBERS: &'static [u32] = &[$($number,)*];

            /// The definitions of all primitives, in Markdown, in the order of [`Self::PRIMITIVES`].
            pub const DOCUMENTATION: &'static [&'static str] = &[$($op::DOCUMENTATION,)*];

            /// The attributes of all primitives, in the order of [`Self::PRIMITIVES`].
            pub const ATTRIBUTES: &'static [&'static [AttributeSpec]] = &[$($op::SPECS,)*];

            /// The number of the op in the C ABI; [`Self::REGION_NUMBER`] for a region.
            pub fn number(&self) -> u32 {
                match self {
                    $(Self::$op(_) => $number,)*
                    Self::Region(_) => Self::REGION_NUMBER,
                }
            }

            /// The attributes as the words of the C ABI; empty for a region.
            pub fn words(&self) -> Vec<u32> {
                match self {
                    $(Self::$op(op) => op.words(),)*
                    Self::Region(_) => Vec::new(),
                }
            }

            /// Decodes the primitive of this number from the words of its attributes.
            ///
            /// # Errors
            /// If there is no such primitive, the number of words is wrong, or an attribute is invalid.
            pub fn from_words(number: u32, words: &[u32]) -> Result<Self> {
                match number {
                    $($number => {
                        $op::from_words(words).map(Self::$op).map_err(|error| error.in_op($op::SIGNATURE.name))
                    })*
                    _ => Err(Error::unsupported(format!("there is no op {number}"))),
                }
            }

            /// The signature; `None` for a region, whose body defines its operands.
            pub fn signature(&self) -> Option<&'static Signature> {
                match self {
                    $(Self::$op(_) => Some($op::SIGNATURE),)*
                    Self::Region(_) => None,
                }
            }

            /// The names and values of the attributes, in order; empty for a region.
            pub fn attributes(&self) -> Vec<(&'static str, AttributeValue)> {
                match self {
                    $(Self::$op(op) => op.attributes(),)*
                    Self::Region(_) => Vec::new(),
                }
            }

            /// Parses the primitive of this name; `take` gives the text of an attribute.
            ///
            /// # Errors
            /// If there is no such primitive, or an attribute is missing or invalid.
            pub fn from_texts(name: &str, take: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
                $(
                    if name == $op::SIGNATURE.name {
                        return $op::from_texts(take).map(Self::$op).map_err(|error| error.in_op(name));
                    }
                )*
                Err(Error::unsupported(format!("there is no op `{name}`")))
            }

            /// The attribute names of the primitive of this name; empty if there is no such primitive.
            pub fn attribute_names(name: &str) -> &'static [&'static str] {
                $(
                    if name == $op::SIGNATURE.name {
                        return $op::NAMES;
                    }
                )*
                &[]
            }

            /// Infers the types of the results of a call, and checks its operands.
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

            /// The iteration space of a call. For a region every dimension is opaque, because nothing fuses with a region.
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

// The numbers are fixed because they cross the C ABI. A new op takes a number that is neither here nor in `Op::RETIRED_NUMBERS`.
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
    MoeRoute = 28,
    MoeGroup = 29,
    GroupedLinear = 30,
    MoeCombine = 31,
    HeadLinear = 32,
    LatentWrite = 33,
    QuantPerGroup = 34,
    LinearA8 = 35,
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
    /// The numbers of removed ops, which no other op may take.
    pub const RETIRED_NUMBERS: &'static [u32] = &[5, 10, 18];

    /// The number of every region in the C ABI; the body defines what it computes.
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

    /// The name that programs and messages use.
    pub fn name(&self) -> &str {
        match self {
            Self::Region(region) => region.name(),
            primitive => primitive.signature().map_or("region", |signature| signature.name),
        }
    }

    /// The profile that requires the op with these attributes; `None` for a region.
    pub fn profile(&self) -> Option<Profile> {
        match self {
            Self::PagedAttention(op) if op.value_size > 0 => Some(Profile::LlmMla1),
            op => Some(op.signature()?.profile),
        }
    }

    /// The operand that result `index` updates in place, if any.
    pub fn updates(&self, index: usize) -> Option<usize> {
        match self {
            Self::Region(region) => region.updates(index),
            primitive => primitive.signature()?.results.get(index)?.updates,
        }
    }

    /// The mesh axis, if the op is a collective, or a region with collectives.
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
            Self::Region(region) => region.mesh_axis(),
            _ => None,
        }
    }
}

impl fmt::Display for Op {
    /// Writes the name and attributes as in the text of a program, and a region with its body.
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
