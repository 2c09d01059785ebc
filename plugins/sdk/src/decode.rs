//! Decoding of descriptions and arguments from the C ABI to the types of core. A decoded call is also validated.

use super::{prefix, raw::*};
use dsrun_core::{
    DType, Error, Result, TensorDesc, WeightFormat, WeightType,
    checked::ValidCall,
    collective::Comm,
    device::{Buffer, BufferSlice, DeviceOptions, MemoryKind},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc, PackedWeight, WeightDesc},
    op::Op,
    program::{Call, ValueId},
    region::Region,
};
use std::{ffi::c_void, sync::Arc, time::Duration};

/// The maximum number of calls in the body of a region, and of results of a call.
const MAX_CALLS: usize = 4096;
/// The maximum number of attribute words, more than any op has.
const MAX_WORDS: usize = 256;

pub(super) fn dtype(number: u32) -> Result<DType> {
    DType::from_number(number).ok_or_else(|| {
        Error::unsupported(format!("is {number}, which is not an element type")).field("dtype")
    })
}

fn sizes(shape: &[u64], rank: u32) -> Result<Vec<usize>> {
    let shape = shape.get(..rank as usize).ok_or_else(|| {
        Error::invalid(format!("has {rank} dimensions, at most {DSR_MAX_RANK}")).field("rank")
    })?;
    let one = |(index, size): (usize, &u64)| {
        let wrong =
            |_| Error::invalid(format!("is {size}, which overflows")).field(format!("shape[{index}]"));
        usize::try_from(*size).map_err(wrong)
    };
    shape.iter().enumerate().map(one).collect()
}

pub(super) fn tensor(raw: &dsr_tensor_desc) -> Result<TensorDesc> {
    if raw.flags & !DSR_TENSOR_BOUNDED != 0 {
        return Err(Error::unsupported(format!("is {:#x}, which has unknown bits", raw.flags)).field("flags"));
    }
    Ok(TensorDesc {
        dtype: dtype(raw.dtype)?,
        shape: sizes(&raw.shape, raw.rank)?,
        strides: sizes(&raw.strides, raw.rank)?,
        bounded: raw.flags & DSR_TENSOR_BOUNDED != 0,
    })
}

pub(super) fn weight_type(raw: &dsr_weight_type) -> Result<WeightType> {
    let unknown =
        || Error::unsupported(format!("is {}, which is not a weight format", raw.format)).field("format");
    Ok(WeightType {
        format: WeightFormat::from_number(raw.format).ok_or_else(unknown)?,
        shape: sizes(&raw.shape, raw.rank)?,
    })
}

fn operand(raw: &dsr_operand_desc) -> Result<Option<OperandDesc>> {
    match raw.kind {
        DSR_OPERAND_ABSENT => Ok(None),
        DSR_OPERAND_TENSOR => tensor(&raw.tensor).map(OperandDesc::Tensor).map(Some),
        DSR_OPERAND_WEIGHT => weight_type(&raw.weight).map(OperandDesc::Weight).map(Some),
        kind => Err(Error::unsupported(format!("is {kind}, which is not a kind of operand")).field("kind")),
    }
}

/// # Safety
/// `attributes` is readable for `size` bytes.
unsafe fn primitive(op: u32, attributes: *const c_void, size: u32) -> Result<Op> {
    let name = Op::signature_of(op).map_or("op", |signature| signature.name);
    if !size.is_multiple_of(4) {
        let message = format!("is {size}, must be a multiple of 4");
        return Err(Error::invalid(message).at("attributes").field("attributes_size").in_op(name));
    }
    // SAFETY: as the caller says; attributes are words.
    let words = unsafe { prefix::array(attributes.cast(), size as usize / 4, MAX_WORDS, "attributes") };
    Op::from_words(op, words.map_err(|error| error.in_op(name))?)
}

/// # Safety
/// The pointer is null or to a region, all of it readable.
unsafe fn region(pointer: *const dsr_region) -> Result<Region> {
    // SAFETY: as the caller says.
    let (raw, name, calls, results) = unsafe {
        let raw = prefix::read(pointer)?;
        let calls = prefix::array(raw.calls, raw.call_count as usize, MAX_CALLS, "calls")?;
        let results = prefix::array(raw.results, raw.result_count as usize, MAX_CALLS, "results")?;
        (raw, prefix::text(raw.name).into_owned(), calls, results)
    };
    let ids = |values: &[u32]| values.iter().map(|value| ValueId::new(*value as usize)).collect();
    let mut body = Vec::with_capacity(calls.len());
    for call in calls {
        let most = Region::MAX_OPERANDS;
        // SAFETY: as above.
        let (op, operands, results) = unsafe {
            let op = primitive(call.op, call.attributes, call.attributes_size)?;
            let operands = prefix::array(call.operands, call.operand_count as usize, most, "operands")?;
            (op, operands, prefix::array(call.results, call.result_count as usize, most, "results")?)
        };
        let operand = |value: &u32| (*value != DSR_NO_VALUE).then(|| ValueId::new(*value as usize));
        body.push(Call::new(op, operands.iter().map(operand).collect(), ids(results)));
    }
    Region::new(name, raw.operand_count as usize, body, ids(results))
}

/// Decodes and validates a call; `comm` makes the group from the description if it has one.
///
/// # Errors
/// As [`CallDesc::validate`], or if the description cannot be read.
///
/// # Safety
/// The pointer is null or to a description, all of it readable.
pub(super) unsafe fn call(
    pointer: *const dsr_call_desc,
    comm: impl FnOnce(&dsr_call_desc) -> Result<Arc<dyn Comm>>,
) -> Result<ValidCall> {
    // SAFETY: as the caller says.
    let (raw, op) = unsafe {
        let raw = prefix::read(pointer)?;
        let op = match raw.op {
            Op::REGION_NUMBER => Op::Region(Arc::new(region(raw.region)?)),
            number => primitive(number, raw.attributes, raw.attributes_size)?,
        };
        (raw, op)
    };
    let in_op = |error: Error| error.in_op(op.name());
    if raw.flags != 0 {
        return Err(in_op(
            Error::unsupported(format!("is {:#x}, which has unknown bits", raw.flags)).at("flags"),
        ));
    }
    let most = Region::MAX_OPERANDS;
    // SAFETY: as the caller says.
    let (operands, results) = unsafe {
        let operands = prefix::array(raw.operands, raw.operand_count as usize, most, "operands");
        (operands, prefix::array(raw.results, raw.result_count as usize, MAX_CALLS, "results"))
    };
    let mut call = CallDesc { op: op.clone(), operands: Vec::new(), results: Vec::new(), comm: None };
    for (index, raw) in operands.map_err(in_op)?.iter().enumerate() {
        let operand = operand(raw).map_err(|error| in_op(error.at(&call.operand_name(index))))?;
        call.operands.push(operand);
    }
    for (index, raw) in results.map_err(in_op)?.iter().enumerate() {
        let result = tensor(raw).map_err(|error| in_op(error.at(&call.result_name(index))))?;
        call.results.push(result);
    }
    call.comm = match (raw.comm.is_null(), raw.transport.is_null()) {
        (true, true) => None,
        (false, false) => return Err(in_op(Error::invalid("is set together with transport").at("comm"))),
        _ => Some(comm(&raw).map_err(in_op)?),
    };
    call.validate()
}

/// # Errors
/// Names the field.
///
/// # Safety
/// The pointer is null or to a description, all of it readable.
pub(super) unsafe fn weight(pointer: *const dsr_weight_desc) -> Result<WeightDesc> {
    // SAFETY: as the caller says.
    let raw = unsafe { prefix::read(pointer)? };
    if raw.flags & !DSR_WEIGHT_IMMUTABLE != 0 {
        return Err(Error::unsupported(format!("is {:#x}, which has unknown bits", raw.flags)).field("flags"));
    }
    let weight_type = weight_type(&raw.weight_type)?;
    weight_type.bytes()?;
    Ok(WeightDesc { weight_type, immutable: raw.flags & DSR_WEIGHT_IMMUTABLE != 0 })
}

/// # Errors
/// If there is no such kind.
pub(super) fn memory_kind(number: u32) -> Result<MemoryKind> {
    match number {
        DSR_MEMORY_DEVICE => Ok(MemoryKind::Device),
        DSR_MEMORY_PINNED => Ok(MemoryKind::Pinned),
        _ => Err(Error::unsupported(format!("is {number}, which is not a kind of memory")).at("kind")),
    }
}

/// # Errors
/// If a number is out of range, or a flag is unknown.
pub(super) fn options(raw: &dsr_device_options) -> Result<DeviceOptions> {
    if raw.flags & !DSR_OPTION_BATCH_INVARIANT != 0 {
        let message = format!("are {:#x}, of which some are unknown", raw.flags);
        return Err(Error::unsupported(message).at("options").field("flags"));
    }
    let threads = (raw.threads != DSR_NONE).then(|| prefix::size(raw.threads, "threads")).transpose()?;
    Ok(DeviceOptions {
        threads,
        memory_limit: (raw.memory_limit != DSR_NONE).then_some(raw.memory_limit),
        compute_share: (raw.compute_share != 0.0).then_some(raw.compute_share),
        batch_invariant: raw.flags & DSR_OPTION_BATCH_INVARIANT != 0,
    })
}

/// A timeout; DSR_NONE is the longest duration.
pub(super) fn timeout(nanoseconds: u64) -> Duration {
    if nanoseconds == DSR_NONE { Duration::MAX } else { Duration::from_nanos(nanoseconds) }
}

/// Finds the objects behind handles.
pub(super) trait Objects {
    /// The buffer behind a handle that is not null.
    fn buffer(&mut self, handle: *mut dsr_buffer) -> Result<Arc<dyn Buffer>>;

    /// The weight behind a handle that is not null.
    fn weight(&mut self, handle: *mut dsr_weight) -> Result<Arc<dyn PackedWeight>>;
}

pub(super) fn slice(raw: &dsr_slice, objects: &mut dyn Objects) -> Result<BufferSlice> {
    if raw.buffer.is_null() {
        return Err(Error::invalid("is null").field("buffer"));
    }
    let (offset, bytes) = (prefix::size(raw.offset, "offset")?, prefix::size(raw.bytes, "bytes")?);
    Ok(BufferSlice { buffer: objects.buffer(raw.buffer)?, offset, bytes })
}

fn binding(raw: &dsr_argument, objects: &mut dyn Objects) -> Result<Binding> {
    let extent = (!raw.extent.buffer.is_null()).then(|| slice(&raw.extent, objects)).transpose()?;
    Ok(Binding { slice: slice(&raw.slice, objects)?, extent })
}

fn argument(raw: &dsr_argument, objects: &mut dyn Objects) -> Result<Option<Argument>> {
    match raw.kind {
        DSR_OPERAND_ABSENT => Ok(None),
        DSR_OPERAND_TENSOR => binding(raw, objects).map(Argument::Tensor).map(Some),
        DSR_OPERAND_WEIGHT if raw.weight.is_null() => Err(Error::invalid("is null").field("weight")),
        DSR_OPERAND_WEIGHT => objects.weight(raw.weight).map(Argument::Weight).map(Some),
        kind => Err(Error::unsupported(format!("is {kind}, which is not a kind of operand")).field("kind")),
    }
}

/// Decodes the arguments of a bind without validating them: ranges may exceed their buffers.
///
/// # Errors
/// Names op and argument.
///
/// # Safety
/// The pointer is null or to arguments, all of them readable.
pub(super) unsafe fn arguments(
    pointer: *const dsr_arguments,
    call: &CallDesc,
    objects: &mut dyn Objects,
) -> Result<Arguments> {
    let in_op = |error: Error| error.in_op(call.op.name());
    // SAFETY: as the caller says.
    let (raw, operands, results) = unsafe {
        let raw = prefix::read(pointer).map_err(in_op)?;
        let most = Region::MAX_OPERANDS;
        let operands = prefix::array(raw.operands, raw.operand_count as usize, most, "operands");
        let results = prefix::array(raw.results, raw.result_count as usize, MAX_CALLS, "results");
        (raw, operands.map_err(in_op)?, results.map_err(in_op)?)
    };
    let mut arguments = Arguments { operands: Vec::new(), results: Vec::new(), workspace: None };
    for (index, raw) in operands.iter().enumerate() {
        let operand = argument(raw, objects).map_err(|error| in_op(error.at(&call.operand_name(index))))?;
        arguments.operands.push(operand);
    }
    for (index, raw) in results.iter().enumerate() {
        let at = |error: Error| in_op(error.at(&call.result_name(index)));
        if raw.kind != DSR_OPERAND_TENSOR {
            return Err(at(Error::invalid("is not a tensor").field("kind")));
        }
        arguments.results.push(binding(raw, objects).map_err(at)?);
    }
    if !raw.workspace.buffer.is_null() {
        arguments.workspace =
            Some(slice(&raw.workspace, objects).map_err(|error| in_op(error.at("workspace")))?);
    }
    Ok(arguments)
}
