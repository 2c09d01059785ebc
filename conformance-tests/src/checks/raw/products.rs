//! Products and draws through the tables: calls with a weight and calls with a workspace, which a sum has not.

use super::{COLUMNS, Outcome, ROWS, Raw, argument, arguments, kept, matrix, nothing, refused, zero};
use crate::subject::Subject;
use dsrun_core::{
    DType, Error, WeightFormat,
    op::{Op, SAMPLING_COLUMNS},
};
use dsrun_plugin_sdk::{raw::*, take_status};
use std::{ffi::c_void, ptr};

/// Rows of the weight: the outputs of the product.
const OUTPUTS: u64 = 3;

/// Hands out rows of zeros.
unsafe extern "C" fn zeros(
    context: *mut c_void,
    _: u64,
    count: u64,
    bytes: *mut *const c_void,
    length: *mut usize,
) -> *mut dsr_status {
    // SAFETY: the context is the vector that `Raw::pack` gives, longer than all rows; the others are the plugin's.
    unsafe {
        let rows = &*context.cast::<Rows>();
        bytes.write(rows.bytes.as_ptr().cast());
        length.write(rows.row * count as usize);
    }
    ptr::null_mut()
}

/// The bytes of all rows, and of one.
struct Rows {
    bytes: Vec<u8>,
    row: usize,
}

fn weight_type(dtype: DType, columns: u64) -> dsr_weight_type {
    let format = WeightFormat::Dense(dtype).number();
    dsr_weight_type { format, rank: 2, shape: [OUTPUTS, columns, 0, 0, 0, 0], reserved: [0; 2] }
}

impl Raw {
    fn pack(&self, weight_type: dsr_weight_type) -> Result<*mut dsr_weight, Error> {
        let row = weight_type.shape[1] as usize * self.dtype.bytes();
        let mut rows = Rows { bytes: vec![0; row * OUTPUTS as usize], row };
        let desc =
            dsr_weight_desc { struct_size: size_of::<dsr_weight_desc>() as u32, flags: 0, weight_type };
        let reader = dsr_row_reader {
            struct_size: size_of::<dsr_row_reader>() as u32,
            reserved: 0,
            context: (&raw mut rows).cast(),
            rows: Some(zeros),
        };
        let mut weight = nothing();
        let packed = call!(
            self.op,
            prepack(self.device, self.queue, &raw const desc, &raw const reader, &raw mut weight)
        );
        kept(&packed, weight, "the packed weight")?;
        packed.map(|()| weight)
    }

    fn bind(
        &self,
        plan: *mut dsr_plan,
        operands: &[dsr_argument],
        results: &[dsr_argument],
        workspace: dsr_slice,
    ) -> Result<(), Error> {
        let arguments = arguments(operands, results, workspace);
        let mut bound = nothing();
        let result = call!(self.op, bind(plan, &raw const arguments, &raw mut bound));
        kept(&result, bound, "the bound call")?;
        result.map(|()| free!(self.op, call_free, bound))
    }

    /// A workspace for a plan.
    fn workspace(&self, plan: *mut dsr_plan) -> Result<dsr_slice, Error> {
        // SAFETY: a function of the plugin's table and its plan.
        let bytes = self.op.plan_workspace.map_or(0, |workspace| unsafe { workspace(plan) });
        Ok(dsr_slice { buffer: self.allocate(bytes.max(1), DSR_MEMORY_DEVICE)?, offset: 0, bytes })
    }
}

fn tensor(tensor: dsr_tensor_desc) -> dsr_operand_desc {
    dsr_operand_desc { kind: DSR_OPERAND_TENSOR, tensor, ..zero() }
}

fn desc<A>(
    op: &str,
    attributes: &A,
    operands: &[dsr_operand_desc],
    results: &[dsr_tensor_desc],
) -> dsr_call_desc {
    let attributes_size = size_of::<A>() as u32;
    dsr_call_desc {
        struct_size: size_of::<dsr_call_desc>() as u32,
        op: Op::number_of(op).unwrap_or(0),
        attributes: if attributes_size == 0 { ptr::null() } else { (&raw const *attributes).cast() },
        operands: operands.as_ptr(),
        results: results.as_ptr(),
        attributes_size,
        operand_count: operands.len() as u32,
        result_count: results.len() as u32,
        ..zero()
    }
}

/// Weights of no known format, of another type than was planned, and none at all.
pub(in crate::checks) fn weights(subject: &Subject) -> Outcome {
    let raw = Raw::open(subject)?;
    let (dtype, right) = (raw.dtype as u32, weight_type(raw.dtype, COLUMNS));
    let (x, y) = (matrix(raw.dtype, ROWS, COLUMNS), matrix(raw.dtype, ROWS, OUTPUTS));
    let operands =
        |weight| [tensor(x), dsr_operand_desc { kind: DSR_OPERAND_WEIGHT, weight, ..zero() }, zero()];
    let changes: [(&str, dsr_weight_type); 4] = [
        ("a weight of an unknown format", dsr_weight_type { format: 0xABCD, ..right }),
        ("a weight of no dimensions", dsr_weight_type { rank: 0, ..right }),
        ("a weight of seven dimensions", dsr_weight_type { rank: 7, ..right }),
        ("a weight of other columns", weight_type(raw.dtype, COLUMNS / 2)),
    ];
    let results = [y];
    for (what, changed) in changes {
        let operands = operands(changed);
        let desc = desc("linear", &dtype, &operands, &results);
        // The shapes contradict each other, so the error may name either operand.
        let named = (changed.shape == right.shape).then_some("weight");
        refused(&format!("a query for {what}"), raw.query(&raw const desc), named)?;
        refused(&format!("a plan for {what}"), raw.plan(&raw const desc), named)?;
    }
    let operands = operands(right);
    let desc = desc("linear", &dtype, &operands, &results);
    let plan = raw.plan(&raw const desc)?;
    let workspace = raw.workspace(plan)?;
    let size = raw.dtype.bytes() as u64;
    let (bytes, result_bytes) = (ROWS * COLUMNS * size, ROWS * OUTPUTS * size);
    let (from, to) =
        (raw.allocate(bytes, DSR_MEMORY_DEVICE)?, raw.allocate(result_bytes, DSR_MEMORY_DEVICE)?);
    let good = raw.pack(right)?;
    let unlike = raw.pack(weight_type(raw.dtype, COLUMNS / 2))?;
    let bind = |weight| {
        let packed = dsr_argument { kind: DSR_OPERAND_WEIGHT, weight, ..zero() };
        raw.bind(
            plan,
            &[argument(from, 0, bytes), packed, zero()],
            &[argument(to, 0, result_bytes)],
            workspace,
        )
    };
    bind(good)?;
    refused("a weight of other columns than was planned", bind(unlike), Some("weight"))?;
    refused("no weight", bind(ptr::null_mut()), Some("weight"))?;
    free!(raw.op, plan_free, plan);
    for weight in [good, unlike] {
        free!(raw.op, weight_free, weight);
    }
    for buffer in [from, to, workspace.buffer] {
        free!(raw.memory, free, buffer);
    }
    raw.sum_is_right()
}

/// A workspace that is too short, missing, at an odd offset or of another device, for a draw of tokens, which needs one on most
/// devices.
pub(in crate::checks) fn workspaces(subject: &Subject) -> Outcome {
    const VOCABULARY: u64 = 4096;
    let (raw, other) = (Raw::open(subject)?, Raw::open(subject)?);
    let vector = |dtype: DType| dsr_tensor_desc {
        dtype: dtype as u32,
        rank: 1,
        shape: [ROWS, 0, 0, 0, 0, 0],
        strides: [1, 0, 0, 0, 0, 0],
        ..zero()
    };
    let tensors = [
        matrix(DType::F32, ROWS, VOCABULARY),
        vector(DType::I32),
        vector(DType::I32),
        matrix(DType::F32, 1, SAMPLING_COLUMNS as u64),
        matrix(DType::U32, 1, 2),
    ];
    let (operands, results) = (tensors.map(tensor), [vector(DType::I32), vector(DType::F32)]);
    let desc = desc("sample", &(), &operands, &results);
    let plan = raw.plan(&raw const desc)?;
    let workspace = raw.workspace(plan)?;
    let place = |tensor: &dsr_tensor_desc| {
        let bytes = 4 * tensor.shape.iter().take(tensor.rank as usize).product::<u64>();
        Ok::<_, Error>(argument(raw.allocate(bytes, DSR_MEMORY_DEVICE)?, 0, bytes))
    };
    let from = tensors.iter().map(place).collect::<Result<Vec<_>, _>>()?;
    let to = results.iter().map(place).collect::<Result<Vec<_>, _>>()?;
    raw.bind(plan, &from, &to, workspace)?;
    let theirs = other.allocate(workspace.bytes.max(1), DSR_MEMORY_DEVICE)?;
    if workspace.bytes > 0 {
        let wrong = [
            ("a workspace a byte too short", dsr_slice { bytes: workspace.bytes - 1, ..workspace }),
            ("no workspace", zero()),
            ("a workspace behind its buffer", dsr_slice { offset: 1 << 40, ..workspace }),
            ("a workspace of another device", dsr_slice { buffer: theirs, ..workspace }),
        ];
        for (what, wrong) in wrong {
            refused(what, raw.bind(plan, &from, &to, wrong), Some("workspace"))?;
        }
    }
    free!(raw.op, plan_free, plan);
    for placed in from.iter().chain(&to) {
        free!(raw.memory, free, placed.slice.buffer);
    }
    free!(raw.memory, free, workspace.buffer);
    free!(other.memory, free, theirs);
    other.sum_is_right()?;
    raw.sum_is_right()
}
