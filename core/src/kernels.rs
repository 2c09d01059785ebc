//! Planning and running ops.
//!
//! `query` says whether and how, cheaply; `plan` compiles, tunes and allocates; `bind` fixes the arguments and checks them,
//! once; `enqueue` runs the bound call and costs nothing worth measuring: it neither allocates nor waits.

use crate::{
    Result, WeightReader, WeightType,
    checked::{ValidArguments, ValidCall},
    collective::Comm,
    device::{BufferSlice, Stream},
    op::{Op, OperandType},
    tensor::TensorDesc,
};
use std::{any::Any, fmt::Debug, sync::Arc};

/// An operand as a backend plans for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperandDesc {
    /// A tensor of at most these sizes.
    Tensor(TensorDesc),
    /// A packed weight made from this type.
    Weight(WeightType),
}

/// A call as a backend plans for it: an op and the largest operands and results that come.
#[derive(Clone, Debug)]
pub struct CallDesc {
    /// The op.
    pub op: Op,
    /// Its operands, in the order of the signature; `None` for those left out.
    pub operands: Vec<Option<OperandDesc>>,
    /// Its results, in the order of the signature. A result that updates an operand is described like it.
    pub results: Vec<TensorDesc>,
    /// The ranks a collective runs over.
    pub comm: Option<Arc<dyn Comm>>,
}

impl CallDesc {
    /// The operand types, for shape inference.
    pub fn operand_types(&self) -> Vec<Option<OperandType>> {
        let one = |operand: &OperandDesc| match operand {
            OperandDesc::Tensor(tensor) => OperandType::Tensor(tensor.tensor_type()),
            OperandDesc::Weight(weight) => OperandType::Weight(weight.clone()),
        };
        self.operands.iter().map(|operand| operand.as_ref().map(one)).collect()
    }

    /// The name of operand `index`, for messages.
    pub fn operand_name(&self, index: usize) -> String {
        let spec = self.op.signature().and_then(|signature| signature.operands.get(index));
        spec.map_or_else(|| format!("operand {index}"), |spec| spec.name.to_owned())
    }

    /// The name of result `index`, for messages.
    pub fn result_name(&self, index: usize) -> String {
        let spec = self.op.signature().and_then(|signature| signature.results.get(index));
        spec.map_or_else(|| format!("result {index}"), |spec| spec.name.to_owned())
    }

    /// The tensor operand at `index`, if there is one.
    pub fn tensor(&self, index: usize) -> Option<&TensorDesc> {
        match self.operands.get(index)?.as_ref()? {
            OperandDesc::Tensor(tensor) => Some(tensor),
            OperandDesc::Weight(_) => None,
        }
    }
}

/// Whether and how a device runs a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Support {
    /// Whether it runs it itself.
    pub native: bool,
    /// If not, why not: which op, element type, shape or feature.
    pub reason: String,
    /// Scratch memory a call needs.
    pub workspace_bytes: usize,
    /// Memory the plan will hold as long as it lives.
    pub persistent_bytes: usize,
    /// For `attention_prepare`: how long the device wants its work list.
    pub work_words: usize,
    /// Whether the call may be captured.
    pub capture_safe: bool,
    /// Whether a row's result does not depend on which other rows are in the batch, to the bit.
    pub batch_invariant: bool,
}

impl Support {
    /// The device runs it, without scratch memory, and a row's result depends on that row alone.
    pub fn native() -> Self {
        Self { native: true, capture_safe: true, batch_invariant: true, ..Self::default() }
    }

    /// The device does not run it.
    pub fn no(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), ..Self::default() }
    }
}

/// A weight to be packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightDesc {
    /// Shape and format it comes in.
    pub weight_type: WeightType,
    /// Whether it never changes again: only then may a kernel read it before its predecessor has finished.
    pub immutable: bool,
}

/// How a device would keep a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedLayout {
    /// Bytes on the device.
    pub bytes: usize,
    /// A name for the layout, private to the backend and its version: packed bytes may be kept under it.
    pub name: String,
}

/// A weight in a device's own layout. Freed when the last handle is dropped and all work that uses it is done.
pub trait PackedWeight: Any + Send + Sync + Debug {
    /// Shape and format it was packed from.
    fn weight_type(&self) -> &WeightType;

    /// Bytes it holds on the device.
    fn bytes(&self) -> usize;
}

/// What an operand is bound to.
#[derive(Clone, Debug)]
pub enum Argument {
    /// A tensor's storage.
    Tensor(Binding),
    /// A packed weight.
    Weight(Arc<dyn PackedWeight>),
}

/// A tensor's storage.
#[derive(Clone, Debug)]
pub struct Binding {
    /// Where its elements are; at least as long as the description says.
    pub slice: BufferSlice,
    /// An i32 on the device: how many rows of the first dimension are real. Only if the description says it is bounded;
    /// without it all rows are real.
    pub extent: Option<BufferSlice>,
}

impl Binding {
    /// Storage whose rows are all real.
    pub fn new(slice: BufferSlice) -> Self {
        Self { slice, extent: None }
    }
}

/// What a call is bound to.
#[derive(Clone, Debug)]
pub struct Arguments {
    /// One per operand of the description; `None` for those left out.
    pub operands: Vec<Option<Argument>>,
    /// One per result; a result that updates an operand is bound to the same storage.
    pub results: Vec<Binding>,
    /// Scratch memory, at least as long as the plan asks for.
    pub workspace: Option<BufferSlice>,
}

/// What a device computes.
pub trait Kernels: Send + Sync {
    /// Whether and how the device runs a call. Cheap.
    ///
    /// # Errors
    /// Only if the device failed: that it does not run the call is an answer.
    fn query(&self, call: &ValidCall) -> Result<Support>;

    /// How the device would keep a weight. Cheap.
    ///
    /// # Errors
    /// [`crate::Code::Unsupported`] if it cannot keep this format.
    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout>;

    /// Brings a weight to the device, in the layout that [`Self::prepack_query`] named. Rows may be asked for in any order
    /// and number.
    ///
    /// # Errors
    /// As [`Self::prepack_query`]; those of the reader; [`crate::Code::OutOfMemory`].
    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>>;

    /// Prepares a call that [`Self::query`] answers natively. May take long.
    ///
    /// # Errors
    /// [`crate::Code::Unsupported`] if it is not native; those of compilation and allocation.
    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>>;
}

/// A prepared call, shared by all layers with equal descriptions. It never changes.
pub trait Plan: Send + Sync + Debug {
    /// Scratch memory a bound call needs.
    fn workspace_bytes(&self) -> usize {
        0
    }

    /// Fixes the arguments of the call.
    ///
    /// # Errors
    /// If a buffer or weight is another backend's.
    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>>;
}

/// A call ready to run. Keeps its plan, buffers and weights alive.
pub trait BoundCall: Any + Send + Debug {
    /// Enqueues the call. Never allocates, never waits.
    ///
    /// # Errors
    /// If the stream is another backend's, or a fault of the device is already known.
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()>;
}
