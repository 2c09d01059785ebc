//! Planning and running ops.
//!
//! A call goes through four stages, each more specific and less expensive to repeat:
//!
//! | stage | does |
//! |---|---|
//! | [`Kernels::query`] | says whether the device runs the call, and with which resources; cheap |
//! | [`Kernels::plan`] | compiles, tunes and allocates; may take long |
//! | [`Plan::bind`] | fixes buffers and weights |
//! | [`BoundCall::enqueue`] | puts the call on a stream; neither allocates nor waits |

use crate::{
    DType, Error, Result, WeightReader, WeightType,
    cache_row::cache_row_size,
    checked::{ValidArguments, ValidCall},
    collective::Comm,
    device::{BufferSlice, Stream},
    op::{KvWrite, Op, OperandKind, OperandType},
    tensor::TensorDesc,
};
use std::{any::Any, fmt::Debug, sync::Arc};

/// An operand as a backend plans for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperandDesc {
    /// A tensor; a call may bind fewer rows if it is bounded.
    Tensor(TensorDesc),
    /// A packed weight made from this type.
    Weight(WeightType),
}

/// A call as a backend plans for it: an op with the largest operands and results it will be bound to.
#[derive(Clone, Debug)]
pub struct CallDesc {
    /// The op.
    pub op: Op,
    /// Its operands, in the order of the signature; `None` for an absent operand.
    pub operands: Vec<Option<OperandDesc>>,
    /// Its results, in the order of the signature. A result that updates an operand has the same description.
    pub results: Vec<TensorDesc>,
    /// The group a collective runs over; `None` for other ops.
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

    /// Refuses KV caches of i8, for backends that have no kernels for them.
    ///
    /// # Errors
    /// Names the backend, the op and the cache.
    pub fn refuse_i8_caches(&self, backend: &str) -> Result<()> {
        let is_i8 = |index: usize| self.tensor(index).is_some_and(|tensor| tensor.dtype == DType::I8);
        let Some(index) = caches(&self.op).into_iter().find(|index| is_i8(*index)) else { return Ok(()) };
        let message = format!("is i8, and {backend} has no kernels for i8 KV caches");
        Err(Error::unsupported(message).in_op(self.op.name()).at(&self.operand_name(index)).field("dtype"))
    }

    /// The tensor operand at `index`, if there is one.
    pub fn tensor(&self, index: usize) -> Option<&TensorDesc> {
        match self.operands.get(index)?.as_ref()? {
            OperandDesc::Tensor(tensor) => Some(tensor),
            OperandDesc::Weight(_) => None,
        }
    }
}

/// The operands of an op, or of a region, that are KV caches.
fn caches(op: &Op) -> Vec<usize> {
    if let Some(signature) = op.signature() {
        let operands = signature.operands.iter().enumerate();
        return operands
            .filter(|(_, spec)| spec.kind == OperandKind::Cache)
            .map(|(index, _)| index)
            .collect();
    }
    let Op::Region(region) = op else { return Vec::new() };
    let calls = region.calls().iter();
    let values = calls.flat_map(|call| caches(&call.op).into_iter().filter_map(|index| call.operands[index]));
    // Other values are results of calls before, made of these.
    values.map(|value| value.index()).filter(|index| *index < region.operands()).collect()
}

/// A device's answer to whether it has kernels for KV caches of an element type: that for a `kv_write` of one head of 64 elements.
///
/// # Errors
/// If the query fails.
pub fn cache_support(kernels: &dyn Kernels, dtype: DType) -> Result<Support> {
    const HEAD: usize = 64;
    let tensor = |dtype, shape: &[usize]| TensorDesc::dense(dtype, shape);
    let cache = tensor(dtype, &[1, 1, 16, cache_row_size(dtype, HEAD)]);
    let row = tensor(DType::F32, &[1, HEAD]);
    let operands = [cache.clone(), cache.clone(), row.clone(), row, tensor(DType::I32, &[1])];
    let operands = operands.into_iter().map(|operand| Some(OperandDesc::Tensor(operand))).collect();
    let call = CallDesc { op: KvWrite {}.into(), operands, results: vec![cache.clone(), cache], comm: None };
    kernels.query(&call.validate()?)
}

/// A device's answer to whether and how it runs a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Support {
    /// Whether the device runs the call.
    pub native: bool,
    /// Why the device does not run it: which op, element type, shape or feature is missing. Empty if native.
    pub reason: String,
    /// Bytes of scratch memory that a call needs.
    pub workspace_bytes: usize,
    /// Bytes of memory that a plan or its bound calls hold until they are dropped.
    pub persistent_bytes: usize,
    /// For `attention_prepare`: the length that the device needs for its work list.
    pub work_words: usize,
    /// Whether a graph may capture the call.
    pub capture_safe: bool,
    /// Whether each row's result is bit-identical whatever other rows are in the batch and however many there are, also in calls of
    /// other sizes that say the same.
    pub batch_invariant: bool,
}

impl Support {
    /// A native answer: no scratch memory, safe to capture, batch-invariant.
    pub fn native() -> Self {
        Self { native: true, capture_safe: true, batch_invariant: true, ..Self::default() }
    }

    /// The answer that the device does not run the call, with the reason.
    pub fn no(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), ..Self::default() }
    }
}

/// The description of a weight to pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightDesc {
    /// The shape and storage format of the rows to pack.
    pub weight_type: WeightType,
    /// Whether the weight is never written again. Only then may a kernel prefetch it before the previous kernel has finished.
    pub immutable: bool,
}

/// A device's layout for a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedLayout {
    /// Bytes on the device.
    pub bytes: usize,
    /// The name of the layout, private to the backend and its version. Packed bytes may be cached under it.
    pub name: String,
    /// Whether packed bytes can be moved: whether [`Kernels::copy_packed`] and [`Kernels::adopt`] take weights of this layout.
    pub relocatable: bool,
    /// Whether kernels also read packed bytes in pinned memory: whether [`Kernels::adopt`] takes ranges of it.
    pub readable_when_pinned: bool,
}

/// A weight in a device's layout. It is freed when the last handle is dropped and all work that uses it is done.
pub trait PackedWeight: Any + Send + Sync + Debug {
    /// The shape and format it was packed from.
    fn weight_type(&self) -> &WeightType;

    /// The number of bytes it holds on the device.
    fn bytes(&self) -> usize;
}

/// The argument of an operand.
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
    /// The range that holds its elements, at least [`TensorDesc::bytes`] long.
    pub slice: BufferSlice,
    /// An i32 in device memory: the number of valid rows of the first dimension. Only bounded tensors may have one; without
    /// it all rows are valid.
    pub extent: Option<BufferSlice>,
}

impl Binding {
    /// Storage without an extent.
    pub fn new(slice: BufferSlice) -> Self {
        Self { slice, extent: None }
    }
}

/// The arguments of a call.
#[derive(Clone, Debug)]
pub struct Arguments {
    /// One for each operand of the description; `None` for an absent operand.
    pub operands: Vec<Option<Argument>>,
    /// One for each result. A result that updates an operand is bound to the same storage.
    pub results: Vec<Binding>,
    /// Scratch memory of at least [`Plan::workspace_bytes`].
    pub workspace: Option<BufferSlice>,
}

/// The kernels of a device.
pub trait Kernels: Send + Sync {
    /// Says whether and how the device runs a call. This is cheap.
    ///
    /// # Errors
    /// If the device failed. That the device does not run the call is an answer and not an error.
    fn query(&self, call: &ValidCall) -> Result<Support>;

    /// Says which layout the device would give a weight. This is cheap.
    ///
    /// # Errors
    /// [`crate::Code::Unsupported`] if the device cannot hold this format.
    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout>;

    /// Packs a weight into device memory, in the layout of [`Self::prepack_query`]. It may read the rows in any order, and
    /// more than once.
    ///
    /// # Errors
    /// As [`Self::prepack_query`]; the errors of the reader; [`crate::Code::OutOfMemory`].
    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>>;

    /// Enqueues a copy of a weight's packed bytes to a range as long as the [layout](PackedLayout), in device or pinned memory.
    ///
    /// # Errors
    /// [`crate::Code::Unsupported`] if the layout is not relocatable; if the stream, the weight or the range belongs to another
    /// backend, or the range has another length.
    fn copy_packed(
        &self,
        _stream: &mut dyn Stream,
        _weight: &Arc<dyn PackedWeight>,
        _destination: &BufferSlice,
    ) -> Result<()> {
        Err(not_relocatable())
    }

    /// Makes a packed weight of a range of memory that holds packed bytes of the same description whenever a call uses the weight. It
    /// enqueues and allocates nothing. The range is device memory, or pinned memory if the [layout](PackedLayout) is
    /// [readable there](PackedLayout::readable_when_pinned). It is as long as the layout and starts at a multiple of
    /// [`crate::device::DeviceProperties::alignment`]; the weight keeps its buffer alive.
    ///
    /// The bytes may be replaced between calls that use the weight, so the description is usually not immutable.
    ///
    /// # Errors
    /// [`crate::Code::Unsupported`] if the layout is not relocatable; if the range is not such memory of this backend, is
    /// misaligned or has another length.
    fn adopt(&self, _weight: &WeightDesc, _memory: &BufferSlice) -> Result<Arc<dyn PackedWeight>> {
        Err(not_relocatable())
    }

    /// Compiles, tunes and allocates for a call that [`Self::query`] calls native. This may take long.
    ///
    /// # Errors
    /// [`crate::Code::Unsupported`] if the call is not native; the errors of compilation and allocation.
    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>>;
}

fn not_relocatable() -> Error {
    Error::unsupported("the backend cannot move packed weights; keep all weights on the device")
}

/// Checks a range that packed bytes of a weight are copied to, or adopted from.
///
/// # Errors
/// If it is not as long as the layout, or does not start at a multiple of `alignment`.
pub fn check_packed_range(layout: &PackedLayout, range: &BufferSlice, alignment: usize) -> Result<()> {
    if range.bytes != layout.bytes {
        let message = format!("is {} bytes, but the packed weight has {}", range.bytes, layout.bytes);
        return Err(Error::invalid(message).at("range").field("bytes"));
    }
    if !range.offset.is_multiple_of(alignment.max(1)) {
        let message = format!("is {}, must be a multiple of {alignment}", range.offset);
        return Err(Error::invalid(message).at("range").field("offset"));
    }
    Ok(())
}

/// A planned call, shared by all layers with equal descriptions. It is immutable.
pub trait Plan: Send + Sync + Debug {
    /// Bytes of scratch memory that a bound call needs.
    fn workspace_bytes(&self) -> usize {
        0
    }

    /// Binds the call to its arguments.
    ///
    /// # Errors
    /// If a buffer or weight belongs to another backend.
    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>>;
}

/// A call with its arguments, ready to run. It keeps its plan, buffers and weights alive. It may be dropped while what it has
/// enqueued is pending, which runs to its end all the same.
pub trait BoundCall: Any + Send + Debug {
    /// Enqueues the call. It neither allocates nor waits.
    ///
    /// # Errors
    /// If the stream belongs to another backend, or the device is known to have failed.
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()>;
}
