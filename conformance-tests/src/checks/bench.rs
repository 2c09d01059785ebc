//! What the checks share: a device with a stream, tensors on it, and a call in a line.

use crate::{
    case::Weight,
    gate::Gate,
    oracle::{Real, float},
    runner::{Status, TIMEOUT},
    subject::Subject,
    tensor::{Tensor, read_bits},
};
use dsrun_core::{
    BytesReader, Code, DType, Error, TensorDesc,
    checked::{CheckedPlan, ValidCall},
    collective::Comm,
    device::{Buffer, BufferSlice, Device, DeviceOptions, MemoryKind, Stream},
    kernels::{
        Argument, Arguments, Binding, BoundCall, CallDesc, OperandDesc, PackedWeight, Support, WeightDesc,
    },
    op::{AttentionPrepare, Op},
};
use std::sync::Arc;

/// Why a check stops.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The device says it does not run something that the check needs.
    Unsupported(String),
    /// What is wrong.
    Failed(String),
}

/// How a check went.
pub(crate) type Outcome = Result<(), Stop>;

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        match error.code() {
            Code::Unsupported => Self::Unsupported(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// An outcome as the suite reports it.
pub(crate) fn status(outcome: Outcome) -> Status {
    match outcome {
        Ok(()) => Status::Passed,
        Err(Stop::Unsupported(reason)) => Status::Unsupported(reason),
        Err(Stop::Failed(failure)) => Status::Failed(vec![failure]),
    }
}

/// Fails a check with a message.
pub(crate) fn fail<T>(message: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Failed(message.into()))
}

/// Fails a check unless something holds.
pub(crate) fn ensure(holds: bool, message: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { fail(message()) }
}

/// Says what was being done when a check stopped.
pub(crate) trait During<T> {
    fn during(self, what: &str) -> Result<T, Stop>;
}

impl<T, E: Into<Stop>> During<T> for Result<T, E> {
    fn during(self, what: &str) -> Result<T, Stop> {
        self.map_err(|error| match error.into() {
            Stop::Unsupported(reason) => Stop::Unsupported(format!("{what}: {reason}")),
            Stop::Failed(failure) => Stop::Failed(format!("{what}: {failure}")),
        })
    }
}

/// A device with a stream.
pub(crate) struct Bench {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) stream: Box<dyn Stream>,
}

/// A dense tensor on the device, alone in its buffer.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) desc: TensorDesc,
    pub(crate) slice: BufferSlice,
}

/// An operand.
#[derive(Clone, Debug)]
pub(crate) enum Given {
    Absent,
    Tensor(Held),
    Weight(Arc<dyn PackedWeight>),
}

impl From<&Held> for Given {
    fn from(held: &Held) -> Self {
        Self::Tensor(held.clone())
    }
}

impl From<Held> for Given {
    fn from(held: Held) -> Self {
        Self::Tensor(held)
    }
}

/// A bound call and its results.
pub(crate) struct Bound {
    pub(crate) call: Box<dyn BoundCall>,
    pub(crate) results: Vec<Held>,
}

impl Held {
    pub(crate) fn binding(&self) -> Binding {
        Binding::new(self.slice.clone())
    }
}

impl Given {
    pub(crate) fn desc(&self) -> Option<OperandDesc> {
        match self {
            Self::Absent => None,
            Self::Tensor(held) => Some(OperandDesc::Tensor(held.desc.clone())),
            Self::Weight(weight) => Some(OperandDesc::Weight(weight.weight_type().clone())),
        }
    }

    pub(crate) fn argument(&self) -> Option<Argument> {
        match self {
            Self::Absent => None,
            Self::Tensor(held) => Some(Argument::Tensor(held.binding())),
            Self::Weight(weight) => Some(Argument::Weight(weight.clone())),
        }
    }
}

impl Bench {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Self, Stop> {
        Ok(Self { device: device.clone(), stream: device.stream()? })
    }

    /// Waits for everything enqueued so far.
    pub(crate) fn wait(&mut self) -> Outcome {
        Ok(self.stream.synchronize("a check of the conformance suite", TIMEOUT)?)
    }

    pub(crate) fn buffer(&self, bytes: usize) -> Result<Arc<dyn Buffer>, Stop> {
        Ok(self.device.allocate(bytes, MemoryKind::Device)?)
    }

    /// A piece of memory of its own. Its buffer is never empty: not every allocator has a place for nothing.
    fn slice(&self, bytes: usize) -> Result<BufferSlice, Stop> {
        Ok(BufferSlice::new(self.buffer(bytes.max(1))?, 0, bytes)?)
    }

    /// A tensor of bytes that are all ones: NaN for floats, -1 for integers.
    pub(crate) fn empty(&mut self, dtype: DType, shape: &[usize]) -> Result<Held, Stop> {
        let desc = TensorDesc::dense(dtype, shape);
        let slice = self.slice(desc.bytes()?)?;
        self.stream.fill(&slice, 0xFF)?;
        Ok(Held { desc, slice })
    }

    /// Brings a tensor to the device.
    pub(crate) fn put(&mut self, tensor: &Tensor) -> Result<Held, Stop> {
        let held = self.empty(tensor.dtype, &tensor.shape)?;
        self.set(&held, tensor)?;
        Ok(held)
    }

    /// Brings a tensor to the device, as an operand.
    pub(crate) fn give(&mut self, tensor: &Tensor) -> Result<Given, Stop> {
        self.put(tensor).map(Given::Tensor)
    }

    /// Gives a tensor on the device other elements.
    pub(crate) fn set(&mut self, held: &Held, tensor: &Tensor) -> Outcome {
        Ok(self.stream.upload(&tensor.bytes(), &held.slice)?)
    }

    /// Reads a tensor back, when everything enqueued so far is done.
    pub(crate) fn get(&mut self, held: &Held) -> Result<Tensor, Stop> {
        let mut bytes = vec![0; held.slice.bytes];
        self.stream.download(&held.slice, &mut bytes, "a check reads a tensor", TIMEOUT)?;
        let size = held.desc.dtype.bytes();
        let bits = (0..bytes.len() / size).map(|index| read_bits(&bytes, index * size, size)).collect();
        Ok(Tensor { dtype: held.desc.dtype, shape: held.desc.shape.clone(), bits })
    }

    /// Packs a weight.
    pub(crate) fn pack(&mut self, weight: &Weight) -> Result<Given, Stop> {
        let desc = WeightDesc { weight_type: weight.weight_type.clone(), immutable: true };
        let mut reader = BytesReader::new(weight.weight_type.clone(), weight.bytes.as_slice())?;
        Ok(Given::Weight(self.device.kernels().prepack(&mut *self.stream, &desc, &mut reader)?))
    }

    /// A call on these operands.
    pub(crate) fn describe(
        &self,
        op: &Op,
        operands: &[Given],
        comm: Option<Arc<dyn Comm>>,
    ) -> Result<ValidCall, Stop> {
        describe(op.clone(), operands.iter().map(Given::desc).collect(), comm)
    }

    /// What the device says of a call.
    pub(crate) fn support(&self, op: &Op, operands: &[Given]) -> Result<Support, Stop> {
        self.support_over(op, operands, None)
    }

    pub(crate) fn support_over(
        &self,
        op: &Op,
        operands: &[Given],
        comm: Option<Arc<dyn Comm>>,
    ) -> Result<Support, Stop> {
        Ok(self.device.kernels().query(&self.describe(op, operands, comm)?)?)
    }

    pub(crate) fn plan(&self, op: impl Into<Op>, operands: &[Given]) -> Result<CheckedPlan, Stop> {
        self.plan_over(op, operands, None)
    }

    pub(crate) fn plan_over(
        &self,
        op: impl Into<Op>,
        operands: &[Given],
        comm: Option<Arc<dyn Comm>>,
    ) -> Result<CheckedPlan, Stop> {
        Ok(CheckedPlan::new(&*self.device, self.describe(&op.into(), operands, comm)?)?)
    }

    /// Scratch memory of so many bytes, filled with something.
    pub(crate) fn workspace(&mut self, bytes: usize) -> Result<BufferSlice, Stop> {
        let slice = self.slice(bytes)?;
        self.stream.fill(&slice, 0x7F)?;
        Ok(slice)
    }

    /// Binds a plan to operands, new results and new scratch memory.
    pub(crate) fn bind(&mut self, plan: &CheckedPlan, operands: &[Given]) -> Result<Bound, Stop> {
        let workspace = self.workspace(plan.workspace_bytes())?;
        self.bind_with(plan, operands, workspace)
    }

    /// Binds a plan to operands, new results and this scratch memory.
    pub(crate) fn bind_with(
        &mut self,
        plan: &CheckedPlan,
        operands: &[Given],
        workspace: BufferSlice,
    ) -> Result<Bound, Stop> {
        let mut results = Vec::new();
        for (index, desc) in plan.call().results.iter().enumerate() {
            let updated = plan.call().op.updates(index).and_then(|operand| operands.get(operand));
            results.push(match updated {
                Some(Given::Tensor(held)) => held.clone(),
                _ => self.empty(desc.dtype, &desc.shape)?,
            });
        }
        let call = plan.bind(&Arguments {
            operands: operands.iter().map(Given::argument).collect(),
            results: results.iter().map(Held::binding).collect(),
            workspace: Some(workspace),
        })?;
        Ok(Bound { call, results })
    }

    /// Enqueues a bound call.
    pub(crate) fn enqueue(&mut self, bound: &Bound) -> Outcome {
        Ok(bound.call.enqueue(&mut *self.stream)?)
    }

    /// Plans, binds and enqueues a call, and gives its results.
    pub(crate) fn run(&mut self, op: impl Into<Op>, operands: &[Given]) -> Result<Vec<Held>, Stop> {
        let plan = self.plan(op, operands)?;
        let bound = self.bind(&plan, operands)?;
        self.enqueue(&bound)?;
        Ok(bound.results)
    }

    /// The same, of an op with one result.
    pub(crate) fn one(&mut self, op: impl Into<Op>, operands: &[Given]) -> Result<Held, Stop> {
        let mut results = self.run(op, operands)?;
        match results.pop() {
            Some(result) if results.is_empty() => Ok(result),
            _ => fail("an op with one result was expected"),
        }
    }

    /// The work list of a step's attention calls, from start, query length and length of each sequence.
    pub(crate) fn work_list(&mut self, lengths: &[Given]) -> Result<Given, Stop> {
        let descs: Vec<_> = lengths.iter().map(Given::desc).collect();
        let words = work_words(&*self.device, descs)?;
        self.one(AttentionPrepare { words }, lengths).map(Given::Tensor)
    }
}

/// A call with dense results.
pub(crate) fn describe(
    op: Op,
    operands: Vec<Option<OperandDesc>>,
    comm: Option<Arc<dyn Comm>>,
) -> Result<ValidCall, Stop> {
    let mut call = CallDesc { op, operands, results: Vec::new(), comm };
    for (index, inferred) in call.op.infer(&call.operand_types())?.iter().enumerate() {
        let updated = call.op.updates(index).and_then(|operand| call.tensor(operand)).cloned();
        let shape = inferred.resolve(&|_| None)?;
        call.results.push(updated.unwrap_or_else(|| TensorDesc::dense(inferred.dtype, &shape)));
    }
    Ok(call.validate()?)
}

/// How long the device wants the work list for lengths of these types.
pub(crate) fn work_words(device: &dyn Device, lengths: Vec<Option<OperandDesc>>) -> Result<u32, Stop> {
    let call = describe(AttentionPrepare { words: 0 }.into(), lengths, None)?;
    let words = device.kernels().query(&call)?.work_words;
    u32::try_from(words).map_err(|_| Stop::Failed(format!("the device wants a work list of {words} words")))
}

/// Another handle of the device under test.
pub(crate) fn open(subject: &Subject, options: &DeviceOptions) -> dsrun_core::Result<Arc<dyn Device>> {
    subject.backend().open(subject.index(), options)
}

/// The float types that the device takes.
pub(crate) fn floats(device: &dyn Device) -> Vec<DType> {
    let all = [DType::F32, DType::F16, DType::BF16];
    all.into_iter().filter(|dtype| device.properties().dtypes.contains(dtype)).collect()
}

/// Rows `first .. first + count` of a tensor.
pub(crate) fn rows(tensor: &Tensor, first: usize, count: usize) -> Tensor {
    let width: usize = tensor.shape[1..].iter().product();
    let mut shape = tensor.shape.clone();
    shape[0] = count;
    Tensor { dtype: tensor.dtype, shape, bits: tensor.bits[first * width..][..count * width].to_vec() }
}

/// Tensors behind each other.
pub(crate) fn stack(tensors: &[Tensor]) -> Tensor {
    let mut all = Tensor { bits: Vec::new(), ..tensors[0].clone() };
    all.shape[0] = tensors.iter().map(|tensor| tensor.shape[0]).sum();
    all.bits = tensors.iter().flat_map(|tensor| tensor.bits.iter().copied()).collect();
    all
}

/// Fails unless two answers are the same to the bit.
pub(crate) fn same_bits(what: &str, found: &Tensor, expected: &Tensor) -> Outcome {
    if found.bits.len() != expected.bits.len() {
        return fail(format!("{what}: {} elements instead of {}", found.bits.len(), expected.bits.len()));
    }
    let Some(at) = (0..found.bits.len()).find(|at| found.bits[*at] != expected.bits[*at]) else {
        return Ok(());
    };
    let value = |tensor: &Tensor| float::value(tensor.dtype, tensor.bits[at]);
    fail(format!("{what}: element {at} is {:e}, not {:e} to the bit", value(found), value(expected)))
}

/// Fails unless both answers are as near to what they must be as the gate asks, and so no further from each other than
/// twice that.
pub(crate) fn near(what: &str, gate: Gate, reals: &[Real], answers: &[(&str, &Tensor)]) -> Outcome {
    for (name, answer) in answers {
        ensure(answer.bits.len() == reals.len(), || format!("{what}: {name} has another size"))?;
        for (at, (bits, real)) in answer.bits.iter().zip(reals).enumerate() {
            let (value, limit) = (float::value(answer.dtype, *bits), gate.limit(answer.dtype, *real));
            let error = (value - real.value).abs();
            ensure(error <= limit, || {
                format!("{what}: element {at} of {name} is {value:e}, must be {:e} ± {limit:.1e}", real.value)
            })?;
        }
    }
    Ok(())
}
