//! Encoding of descriptions for the C ABI, each together with the memory that it points to.

use super::{prefix, raw::*};
use dsrun_core::{
    Error, Result, TensorDesc, WeightType,
    device::{BufferSlice, DeviceOptions},
    kernels::{CallDesc, OperandDesc, WeightDesc},
    op::Op,
    region::Region,
};
use std::{fmt, ptr, time::Duration};

fn count(length: usize, what: &str) -> Result<u32> {
    u32::try_from(length)
        .map_err(|_| Error::invalid(format!("has {length} elements, which are too many")).at(what))
}

fn sizes(values: &[usize]) -> Result<[u64; DSR_MAX_RANK]> {
    let mut sizes = [0; DSR_MAX_RANK];
    if values.len() > DSR_MAX_RANK {
        let message = format!("has {} dimensions, at most {DSR_MAX_RANK}", values.len());
        return Err(Error::invalid(message).field("rank"));
    }
    for (size, value) in sizes.iter_mut().zip(values) {
        *size = *value as u64;
    }
    Ok(sizes)
}

pub(super) fn tensor(desc: &TensorDesc) -> Result<dsr_tensor_desc> {
    Ok(dsr_tensor_desc {
        dtype: desc.dtype as u32,
        rank: desc.shape.len() as u32,
        shape: sizes(&desc.shape)?,
        strides: sizes(&desc.strides)?,
        flags: if desc.bounded { DSR_TENSOR_BOUNDED } else { 0 },
        reserved: 0,
    })
}

pub(super) fn weight_type(weight: &WeightType) -> Result<dsr_weight_type> {
    Ok(dsr_weight_type {
        format: weight.format.number(),
        rank: weight.shape.len() as u32,
        shape: sizes(&weight.shape)?,
        reserved: [0; 2],
    })
}

fn operand(desc: Option<&OperandDesc>) -> Result<dsr_operand_desc> {
    let tensor_desc = dsr_tensor_desc {
        dtype: 0,
        rank: 0,
        shape: [0; DSR_MAX_RANK],
        strides: [0; DSR_MAX_RANK],
        flags: 0,
        reserved: 0,
    };
    let weight = dsr_weight_type { format: 0, rank: 0, shape: [0; DSR_MAX_RANK], reserved: [0; 2] };
    let absent = dsr_operand_desc { kind: DSR_OPERAND_ABSENT, reserved: 0, tensor: tensor_desc, weight };
    Ok(match desc {
        None => absent,
        Some(OperandDesc::Tensor(desc)) => {
            dsr_operand_desc { kind: DSR_OPERAND_TENSOR, tensor: tensor(desc)?, ..absent }
        }
        Some(OperandDesc::Weight(weight)) => {
            dsr_operand_desc { kind: DSR_OPERAND_WEIGHT, weight: weight_type(weight)?, ..absent }
        }
    })
}

/// A region, with the memory that its raw description points to.
struct RegionParts {
    raw: dsr_region,
    // `raw` and `calls` point to these, so they never change.
    _name: String,
    _calls: Vec<dsr_region_call>,
    _results: Vec<u32>,
    _numbers: Vec<[Vec<u32>; 3]>,
}

impl RegionParts {
    fn new(region: &Region) -> Result<Self> {
        let number = |value: &dsrun_core::program::ValueId| value.index() as u32;
        let parts = |call: &dsrun_core::program::Call| {
            let operand = |value: &Option<_>| value.as_ref().map_or(DSR_NO_VALUE, number);
            let operands: Vec<u32> = call.operands.iter().map(operand).collect();
            [call.op.words(), operands, call.results.iter().map(number).collect()]
        };
        let numbers: Vec<[Vec<u32>; 3]> = region.calls().iter().map(parts).collect();
        let call = |(call, [words, operands, results]): (&dsrun_core::program::Call, &[Vec<u32>; 3])| {
            Ok(dsr_region_call {
                op: call.op.number(),
                attributes_size: count(4 * words.len(), "attributes")?,
                attributes: words.as_ptr().cast(),
                operands: operands.as_ptr(),
                results: results.as_ptr(),
                operand_count: count(operands.len(), "operands")?,
                result_count: count(results.len(), "results")?,
            })
        };
        let calls = region.calls().iter().zip(&numbers).map(call).collect::<Result<Vec<_>>>()?;
        let results: Vec<u32> = region.results().iter().map(number).collect();
        let name = region.name().to_owned();
        let raw = dsr_region {
            operand_count: count(region.operands(), "operands")?,
            name: prefix::str_of(&name),
            calls: calls.as_ptr(),
            results: results.as_ptr(),
            call_count: count(calls.len(), "calls")?,
            result_count: count(results.len(), "results")?,
            ..prefix::zeroed()
        };
        Ok(Self { raw, _name: name, _calls: calls, _results: results, _numbers: numbers })
    }
}

/// A call, with the memory that its raw description points to.
pub(super) struct EncodedCall {
    raw: dsr_call_desc,
    // `raw` points to these, so they never change. The contents of vectors and boxes keep their addresses when this moves.
    _words: Vec<u32>,
    _operands: Vec<dsr_operand_desc>,
    _results: Vec<dsr_tensor_desc>,
    _region: Option<Box<RegionParts>>,
}

// SAFETY: the pointers are to the fields beside them, which are owned and never change.
unsafe impl Send for EncodedCall {}
// SAFETY: as above.
unsafe impl Sync for EncodedCall {}

impl fmt::Debug for EncodedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncodedCall").field("op", &self.raw.op).finish_non_exhaustive()
    }
}

impl EncodedCall {
    /// Encodes a call without its group.
    pub(super) fn new(call: &CallDesc) -> Result<Self> {
        let in_op = |error: Error| error.in_op(call.op.name());
        let at_operand = |(index, desc): (usize, &Option<OperandDesc>)| {
            operand(desc.as_ref()).map_err(|error| in_op(error.at(&call.operand_name(index))))
        };
        let at_result = |(index, desc): (usize, &TensorDesc)| {
            tensor(desc).map_err(|error| in_op(error.at(&call.result_name(index))))
        };
        let operands = call.operands.iter().enumerate().map(at_operand).collect::<Result<Vec<_>>>()?;
        let results = call.results.iter().enumerate().map(at_result).collect::<Result<Vec<_>>>()?;
        let words = call.op.words();
        let region = match &call.op {
            Op::Region(region) => Some(Box::new(RegionParts::new(region)?)),
            _ => None,
        };
        let raw = dsr_call_desc {
            op: call.op.number(),
            attributes: words.as_ptr().cast(),
            attributes_size: count(4 * words.len(), "attributes")?,
            operands: operands.as_ptr(),
            operand_count: count(operands.len(), "operands")?,
            results: results.as_ptr(),
            result_count: count(results.len(), "results")?,
            region: region.as_ref().map_or(ptr::null(), |region| &raw const region.raw),
            rank: count(call.comm.as_ref().map_or(0, |comm| comm.rank()), "rank")?,
            ranks: count(call.comm.as_ref().map_or(0, |comm| comm.ranks()), "ranks")?,
            ..prefix::zeroed()
        };
        Ok(Self { raw, _words: words, _operands: operands, _results: results, _region: region })
    }

    /// The raw description with a group.
    pub(super) fn with_group(&self, comm: *mut dsr_comm, transport: *const dsr_transport) -> dsr_call_desc {
        dsr_call_desc { comm, transport, ..self.raw }
    }
}

pub(super) fn weight_desc(weight: &WeightDesc) -> Result<dsr_weight_desc> {
    Ok(dsr_weight_desc {
        flags: if weight.immutable { DSR_WEIGHT_IMMUTABLE } else { 0 },
        weight_type: weight_type(&weight.weight_type)?,
        ..prefix::zeroed()
    })
}

/// The range without a buffer.
pub(super) const NO_SLICE: dsr_slice = dsr_slice { buffer: ptr::null_mut(), offset: 0, bytes: 0 };

pub(super) fn slice(buffer: *mut dsr_buffer, slice: &BufferSlice) -> dsr_slice {
    dsr_slice { buffer, offset: slice.offset as u64, bytes: slice.bytes as u64 }
}

/// # Errors
/// If the share is not above 0 and up to 1. In the ABI 0 means all, so it must not stand for an invalid share.
pub(super) fn options(options: &DeviceOptions) -> Result<dsr_device_options> {
    if let Some(share) = options.compute_share
        && !(share > 0.0 && share <= 1.0)
    {
        return Err(Error::invalid(format!("is {share}, must be above 0 and up to 1")).at("compute_share"));
    }
    Ok(dsr_device_options {
        compute_share: options.compute_share.unwrap_or(0.0),
        threads: options.threads.map_or(DSR_NONE, |threads| threads as u64),
        memory_limit: options.memory_limit.unwrap_or(DSR_NONE),
        flags: if options.batch_invariant { DSR_OPTION_BATCH_INVARIANT } else { 0 },
        ..prefix::zeroed()
    })
}

/// A timeout in nanoseconds; a longer one than fits becomes DSR_NONE.
pub(super) fn timeout(limit: Duration) -> u64 {
    u64::try_from(limit.as_nanos()).unwrap_or(DSR_NONE)
}
