//! A plugin's own tables, called as no host would.
//!
//! The host checks in front of a plugin, so none of this reaches one through [`crate::subject::Subject::device`]. It is held
//! to what `dsrun.h` says: answers stay within the size the caller states; a description or argument that is wrong is refused
//! (`validate_call` and `validate_arguments` do it for those who ask); on an error, what would be filled in is untouched. That
//! handles are live ones of the right kind is the caller's part, so these calls keep to it, but for handles of another
//! device of the plugin, which are live.

use super::bench::{Outcome, Stop, ensure, fail};
use crate::subject::Subject;
use dsrun_core::{Code, DType, Error, op::Op};
use dsrun_plugin_sdk::{NO_MESSAGE, raw::*, take_status};
use std::{mem, ptr};

/// Calls a function of a table and takes its status.
macro_rules! call {
    ($table:expr, $slot:ident($($argument:expr),* $(,)?)) => {
        match $table.$slot {
            // SAFETY: a function of the plugin's table; handles are live and its own; what is pointed to can be read or written
            // as far as it says, and what is wrong with it otherwise is what is tested. Statuses are taken once.
            Some(function) => unsafe { take_status(function($($argument),*)) },
            None => Err(Error::internal(concat!("the table has no `", stringify!($slot), "`"))),
        }
    };
}

/// Frees a handle.
macro_rules! free {
    ($table:expr, $slot:ident, $handle:expr) => {
        if let Some(function) = $table.$slot {
            // SAFETY: a live handle of the plugin, freed once.
            unsafe { function($handle) }
        }
    };
}

mod products;

pub(super) use products::{weights, workspaces};

/// All bytes zero.
fn zero<T: Zero>() -> T {
    // SAFETY: `Zero` says that it is valid.
    unsafe { mem::zeroed() }
}

/// A type of the ABI that is valid when all its bytes are zero.
///
/// # Safety
/// It is.
unsafe trait Zero {}

macro_rules! zero {
    ($($name:ident),*) => {$(
        // SAFETY: every type of the ABI is, and so it says in `dsrun_plugin_sdk::raw`.
        unsafe impl Zero for $name {}
    )*};
}

zero!(dsr_tensor_desc, dsr_operand_desc, dsr_call_desc, dsr_support, dsr_slice, dsr_argument, dsr_arguments);
zero!(dsr_memory_use);

/// What stands where a handle would be filled in.
fn nothing<T>() -> *mut T {
    ptr::dangling_mut()
}

/// An open device of a plugin.
struct Raw {
    api: dsr_plugin_api,
    memory: dsr_memory_api,
    stream: dsr_stream_api,
    op: dsr_op_api,
    device: *mut dsr_device,
    queue: *mut dsr_stream,
    dtype: DType,
}

impl Drop for Raw {
    fn drop(&mut self) {
        free!(self.stream, free, self.queue);
        free!(self.api, device_close, self.device);
    }
}

fn table<T: Copy>(pointer: *const T, name: &str) -> Result<T, Stop> {
    ensure(!pointer.is_null(), || format!("the plugin has no {name} table"))?;
    // SAFETY: not null, and valid for ever by the contract of the tables.
    Ok(unsafe { pointer.read() })
}

impl Raw {
    fn open(subject: &Subject) -> Result<Self, Stop> {
        let Some(api) = subject.raw_table().copied() else {
            return Err(Stop::Unsupported("the backend is no plugin, so it has no tables".into()));
        };
        let dtype = super::bench::floats(&**subject.device())[0];
        let (memory, stream) = (table(api.memory, "memory")?, table(api.stream, "stream")?);
        let op = table(api.op, "op")?;
        let mut device = ptr::null_mut();
        call!(api, device_open(api.backend, subject.index() as u32, ptr::null(), &raw mut device))?;
        let mut raw = Self { api, memory, stream, op, device, queue: ptr::null_mut(), dtype };
        let mut queue = ptr::null_mut();
        call!(raw.stream, create(raw.device, &raw mut queue))?;
        raw.queue = queue;
        Ok(raw)
    }

    fn allocate(&self, bytes: u64, kind: u32) -> Result<*mut dsr_buffer, Error> {
        let mut buffer = nothing();
        let result = call!(self.memory, allocate(self.device, bytes, kind, &raw mut buffer));
        kept(&result, buffer, "the buffer of an allocation")?;
        result.map(|()| buffer)
    }

    fn used(&self) -> Result<u64, Error> {
        let mut memory = dsr_memory_use { struct_size: size_of::<dsr_memory_use>() as u32, ..zero() };
        call!(self.memory, memory_use(self.device, &raw mut memory))?;
        Ok(memory.used)
    }

    fn query(&self, call: *const dsr_call_desc) -> Result<dsr_support, Error> {
        let mut support = dsr_support { struct_size: size_of::<dsr_support>() as u32, ..zero() };
        call!(self.op, query(self.device, call, &raw mut support))?;
        Ok(support)
    }

    fn plan(&self, call: *const dsr_call_desc) -> Result<*mut dsr_plan, Error> {
        let mut plan = nothing();
        let result = call!(self.op, plan(self.device, call, &raw mut plan));
        kept(&result, plan, "the plan")?;
        result.map(|()| plan)
    }

    /// Runs `1 + 2` and reads it back.
    fn sum_is_right(&self) -> Outcome {
        let sum = SumCall::new(self.dtype);
        let desc = sum.desc();
        let bytes = sum.bytes();
        let plan = self.plan(&raw const desc)?;
        let buffers = [self.allocate(bytes, DSR_MEMORY_DEVICE)?, self.allocate(bytes, DSR_MEMORY_DEVICE)?];
        let result = self.allocate(bytes, DSR_MEMORY_DEVICE)?;
        // SAFETY: a function of the plugin's table and its plan.
        let needed = self.op.plan_workspace.map_or(0, |workspace| unsafe { workspace(plan) });
        let scratch = self.allocate(needed.max(1), DSR_MEMORY_DEVICE)?;
        for (buffer, value) in buffers.iter().zip([1.0, 2.0]) {
            let slice = dsr_slice { buffer: *buffer, offset: 0, bytes };
            let source = sum.filled(value);
            call!(self.stream, upload(self.queue, source.as_ptr().cast(), source.len(), &raw const slice))?;
        }
        let operands = [argument(buffers[0], 0, bytes), argument(buffers[1], 0, bytes), zero(), zero()];
        let results = [argument(result, 0, bytes)];
        let arguments =
            arguments(&operands, &results, dsr_slice { buffer: scratch, offset: 0, bytes: needed });
        let mut bound = ptr::null_mut();
        call!(self.op, bind(plan, &raw const arguments, &raw mut bound))?;
        call!(self.op, enqueue(bound, self.queue))?;
        let slice = dsr_slice { buffer: result, offset: 0, bytes };
        let mut found = vec![0u8; bytes as usize];
        let what = dsr_str { data: c"a sum".as_ptr(), length: 5 };
        call!(
            self.stream,
            download(
                self.queue,
                &raw const slice,
                found.as_mut_ptr().cast(),
                found.len(),
                what,
                crate::runner::TIMEOUT.as_nanos() as u64
            )
        )?;
        free!(self.op, call_free, bound);
        free!(self.op, plan_free, plan);
        for buffer in [buffers[0], buffers[1], result, scratch] {
            free!(self.memory, free, buffer);
        }
        ensure(found == sum.filled(3.0), || "afterwards the device adds up wrongly".into())
    }
}

/// Fails if a call that failed has filled something in all the same.
fn kept<T>(result: &Result<(), Error>, handle: *mut T, what: &str) -> Result<(), Error> {
    match result {
        Err(error) if handle != nothing() => {
            Err(Error::internal(format!("{what} was filled in, though the call failed: {error}")))
        }
        Ok(()) if handle.is_null() || handle == nothing() => {
            Err(Error::internal(format!("{what} was not filled in, though the call succeeded")))
        }
        _ => Ok(()),
    }
}

/// What a valid sum of two matrices points to.
struct SumCall {
    alpha: f32,
    operands: [dsr_operand_desc; 4],
    results: [dsr_tensor_desc; 1],
}

const ROWS: u64 = 2;
const COLUMNS: u64 = 64;

fn matrix(dtype: DType, rows: u64, columns: u64) -> dsr_tensor_desc {
    dsr_tensor_desc {
        dtype: dtype as u32,
        rank: 2,
        shape: [rows, columns, 0, 0, 0, 0],
        strides: [columns, 1, 0, 0, 0, 0],
        ..zero()
    }
}

impl SumCall {
    fn new(dtype: DType) -> Self {
        let matrix = matrix(dtype, ROWS, COLUMNS);
        let operand = dsr_operand_desc { kind: DSR_OPERAND_TENSOR, tensor: matrix, ..zero() };
        Self { alpha: 1.0, operands: [operand, operand, zero(), zero()], results: [matrix] }
    }

    fn dtype(&self) -> DType {
        DType::from_number(self.results[0].dtype).unwrap_or(DType::F32)
    }

    fn bytes(&self) -> u64 {
        ROWS * COLUMNS * self.dtype().bytes() as u64
    }

    fn filled(&self, value: f64) -> Vec<u8> {
        let count = (ROWS * COLUMNS) as usize;
        crate::tensor::Tensor::floats(self.dtype(), &[count], &vec![value; count]).bytes()
    }

    fn desc(&self) -> dsr_call_desc {
        dsr_call_desc {
            struct_size: size_of::<dsr_call_desc>() as u32,
            op: Op::number_of("add").unwrap_or(0),
            attributes: (&raw const self.alpha).cast(),
            operands: self.operands.as_ptr(),
            results: self.results.as_ptr(),
            attributes_size: 4,
            operand_count: 4,
            result_count: 1,
            ..zero()
        }
    }
}

fn argument(buffer: *mut dsr_buffer, offset: u64, bytes: u64) -> dsr_argument {
    dsr_argument { kind: DSR_OPERAND_TENSOR, slice: dsr_slice { buffer, offset, bytes }, ..zero() }
}

fn arguments(operands: &[dsr_argument], results: &[dsr_argument], workspace: dsr_slice) -> dsr_arguments {
    dsr_arguments {
        struct_size: size_of::<dsr_arguments>() as u32,
        operand_count: operands.len() as u32,
        operands: operands.as_ptr(),
        results: results.as_ptr(),
        result_count: results.len() as u32,
        flags: 0,
        workspace,
    }
}

/// Fails unless something was refused for what it is, with a reason.
fn refused<T>(what: &str, result: Result<T, Error>, argument: Option<&str>) -> Outcome {
    let error = match result {
        Ok(_) => return fail(format!("{what} was accepted")),
        Err(error) => error,
    };
    ensure(!error.message().is_empty() && error.message() != NO_MESSAGE, || {
        format!("{what} is refused without a reason")
    })?;
    let codes = [Code::InvalidArgument, Code::Unsupported, Code::OutOfMemory];
    ensure(codes.contains(&error.code()), || {
        format!("{what} is refused as {}, which is not what it is: {error}", error.code().name())
    })?;
    ensure(argument.is_none() || error.argument() == argument, || {
        format!("{what}: `{}` is not named: {error}", argument.unwrap_or_default())
    })
}

/// Something wrong with a description: what, how, and which argument has to be named.
type Change = (&'static str, fn(&mut SumCall, &mut dsr_call_desc), Option<&'static str>);

const CHANGES: &[Change] = &[
    ("a description too short for any", |_, desc| desc.struct_size = 3, Some("dsr_call_desc")),
    ("a description that ends before its operands", |_, desc| desc.struct_size = 16, None),
    ("op 0", |_, desc| desc.op = 0, None),
    ("op 999", |_, desc| desc.op = 999, None),
    ("a region without a body", |_, desc| desc.op = Op::REGION_NUMBER, None),
    ("null attributes", |_, desc| desc.attributes = ptr::null(), Some("attributes")),
    ("no attributes", |_, desc| desc.attributes_size = 0, Some("attributes")),
    ("half a word of attributes", |_, desc| desc.attributes_size = 6, Some("attributes")),
    ("an attribute that is NaN", |call, _| call.alpha = f32::NAN, Some("alpha")),
    ("no operands", |_, desc| desc.operand_count = 0, None),
    ("one operand too few", |_, desc| desc.operand_count = 3, None),
    ("more operands than any op has", |_, desc| desc.operand_count = u32::MAX, None),
    ("null operands", |_, desc| desc.operands = ptr::null(), Some("operands")),
    ("no results", |_, desc| desc.result_count = 0, None),
    ("null results", |_, desc| desc.results = ptr::null(), Some("results")),
    ("unknown flags of a call", |_, desc| desc.flags = 4, None),
    ("an operand of no kind", |call, _| call.operands[0].kind = 9, Some("a")),
    ("an operand that is missing", |call, _| call.operands[1].kind = DSR_OPERAND_ABSENT, Some("b")),
    ("a weight in place of a tensor", |call, _| call.operands[0].kind = DSR_OPERAND_WEIGHT, Some("a")),
    ("element type 0", |call, _| call.operands[0].tensor.dtype = 0, Some("a")),
    ("element type 99", |call, _| call.operands[0].tensor.dtype = 99, Some("a")),
    ("an element type that the op does not take", |call, _| call.operands[0].tensor.dtype = 4, Some("a")),
    ("unknown flags of a tensor", |call, _| call.results[0].flags = 2, Some("y")),
    ("seven dimensions", |call, _| call.operands[0].tensor.rank = 7, Some("a")),
    ("four thousand million dimensions", |call, _| call.operands[0].tensor.rank = u32::MAX, Some("a")),
    ("2^80 elements", |call, _| call.operands[0].tensor = matrix(DType::F32, 1 << 40, 1 << 40), Some("a")),
    ("2^62 rows", |call, _| call.operands[0].tensor.shape[0] = 1 << 62, Some("a")),
    ("a negative size", |call, _| call.operands[0].tensor.shape[0] = -1i64 as u64, Some("a")),
    ("rows on top of each other", |call, _| call.operands[0].tensor.strides[0] = 1, Some("a")),
    ("a last dimension with gaps", |call, _| call.operands[0].tensor.strides[1] = 2, Some("a")),
    ("operands of unlike shapes", |call, _| call.operands[1].tensor.shape[0] = 1, Some("b")),
    ("a result of another shape", |call, _| call.results[0].shape[0] = 1, Some("y")),
    ("a result of another type", |call, _| call.results[0].dtype = DType::I32 as u32, Some("y")),
];

/// Descriptions that are wrong, to query and to plan alike.
pub(super) fn descriptions(subject: &Subject) -> Outcome {
    let raw = Raw::open(subject)?;
    for (what, change, argument) in CHANGES {
        let mut call = SumCall::new(raw.dtype);
        // A change to what is pointed to must be seen by the description, and one to the description must stand.
        change(&mut call, &mut zero());
        let mut desc = call.desc();
        change(&mut SumCall::new(raw.dtype), &mut desc);
        refused(&format!("a query for {what}"), raw.query(&raw const desc), *argument)?;
        refused(&format!("a plan for {what}"), raw.plan(&raw const desc), *argument)?;
    }
    refused("a query for null", raw.query(ptr::null()), None)?;
    refused("a plan for null", raw.plan(ptr::null()), None)?;
    raw.sum_is_right()
}

/// Structs of a later version are read as far as they are known; answers to an earlier one end where it ends.
pub(super) fn sizes(subject: &Subject) -> Outcome {
    #[repr(C)]
    struct Longer<T> {
        known: T,
        unknown: [u64; 8],
    }
    let raw = Raw::open(subject)?;
    let call = SumCall::new(raw.dtype);
    for size in [size_of::<Longer<dsr_call_desc>>() as u32, u32::MAX] {
        let known = dsr_call_desc { struct_size: size, ..call.desc() };
        let longer = Longer { known, unknown: [u64::MAX; 8] };
        let support = raw.query(&raw const longer.known)?;
        ensure(support.flags & DSR_SUPPORT_NATIVE != 0, || {
            format!("a call described in {size} bytes, of which not all are known, is not run")
        })?;
        ensure(longer.unknown == [u64::MAX; 8], || "a description was written to".into())?;
    }
    let desc = call.desc();
    for size in [8u32, 16, 24, 32, size_of::<dsr_support>() as u32, size_of::<Longer<dsr_support>>() as u32] {
        let blank = dsr_support {
            struct_size: size,
            flags: 0x5555_5555,
            workspace_bytes: u64::MAX - 7,
            persistent_bytes: u64::MAX - 7,
            work_words: u64::MAX - 7,
            reason: ptr::null_mut(),
        };
        let mut answer = Longer { known: blank, unknown: [u64::MAX - 7; 8] };
        call!(raw.op, query(raw.device, &raw const desc, &raw mut answer.known))?;
        let Longer { known, unknown } = answer;
        ensure(known.struct_size == size, || "the size of an answer was changed".into())?;
        ensure(known.flags & DSR_SUPPORT_NATIVE != 0 && known.flags != 0x5555_5555, || {
            format!("an answer of {size} bytes was not filled in")
        })?;
        let fields = [(16, known.workspace_bytes), (24, known.persistent_bytes), (32, known.work_words)];
        for (end, value) in fields {
            ensure(end <= size || value == u64::MAX - 7, || {
                format!("an answer of {size} bytes was written to behind its end")
            })?;
            ensure(end > size || value != u64::MAX - 7, || {
                format!("an answer of {size} bytes was not filled in up to its end")
            })?;
        }
        ensure(unknown == [u64::MAX - 7; 8], || "an answer was written to behind all that is known".into())?;
    }
    raw.sum_is_right()
}

/// Arguments that do not fit what was planned, and ranges that are not inside their buffer.
pub(super) fn arguments_of_calls(subject: &Subject) -> Outcome {
    let (raw, other) = (Raw::open(subject)?, Raw::open(subject)?);
    let sum = SumCall::new(raw.dtype);
    let (desc, bytes) = (sum.desc(), sum.bytes());
    let plan = raw.plan(&raw const desc)?;
    // SAFETY: a function of the plugin's table and its plan.
    let needed = raw.op.plan_workspace.map_or(0, |workspace| unsafe { workspace(plan) });
    let alignment = subject.device().properties().alignment as u64;
    let buffer = || raw.allocate(bytes + 2 * alignment, DSR_MEMORY_DEVICE);
    let (a, b, y) = (buffer()?, buffer()?, buffer()?);
    let scratch = raw.allocate(needed.max(1), DSR_MEMORY_DEVICE)?;
    let theirs = other.allocate(bytes, DSR_MEMORY_DEVICE)?;
    let workspace = dsr_slice { buffer: scratch, offset: 0, bytes: needed };
    let bind = |operands: &[dsr_argument], results: &[dsr_argument], workspace| {
        let arguments = arguments(operands, results, workspace);
        let mut bound = nothing();
        let result = call!(raw.op, bind(plan, &raw const arguments, &raw mut bound));
        kept(&result, bound, "the bound call")?;
        result.map(|()| free!(raw.op, call_free, bound))
    };
    let good = [argument(a, 0, bytes), argument(b, 0, bytes), zero(), zero()];
    let result = argument(y, 0, bytes);
    bind(&good, &[result], workspace)?;
    let with = |first: dsr_argument| [first, good[1], good[2], good[3]];
    let null = ptr::null_mut();
    let wrong = [
        ("an operand a byte too short", argument(a, 0, bytes - 1)),
        ("an operand that is not inside its buffer", argument(a, 3 * alignment, bytes)),
        ("an operand at an offset that overflows", argument(a, 0u64.wrapping_sub(alignment), bytes)),
        ("an operand in no buffer", argument(null, 0, bytes)),
        ("an operand that is left out", zero()),
        ("an operand of no kind", dsr_argument { kind: 9, ..good[0] }),
        ("a weight in place of a tensor", dsr_argument { kind: DSR_OPERAND_WEIGHT, ..good[0] }),
        (
            "an extent where none was planned",
            dsr_argument { extent: dsr_slice { buffer: b, offset: 0, bytes: 4 }, ..good[0] },
        ),
    ];
    for (what, first) in wrong {
        refused(what, bind(&with(first), &[result], workspace), Some("a"))?;
    }
    if alignment > 1 {
        let odd = argument(a, alignment / 2, bytes);
        refused("an operand that is not aligned", bind(&with(odd), &[result], workspace), Some("a"))?;
    }
    refused(
        "an operand of another device",
        bind(&with(argument(theirs, 0, bytes)), &[result], workspace),
        None,
    )?;
    refused("a result of another device", bind(&good, &[argument(theirs, 0, bytes)], workspace), None)?;
    refused("a result in the place of an operand", bind(&good, &[good[0]], workspace), Some("y"))?;
    refused("a result a byte too short", bind(&good, &[argument(y, 0, bytes - 1)], workspace), Some("y"))?;
    refused("three operands for four", bind(&good[..3], &[result], workspace), None)?;
    refused("no result", bind(&good, &[], workspace), None)?;
    if needed > 0 {
        let short = dsr_slice { bytes: needed - 1, ..workspace };
        refused("a workspace a byte too short", bind(&good, &[result], short), Some("workspace"))?;
    }
    let mut bound = nothing();
    let null = call!(raw.op, bind(plan, ptr::null(), &raw mut bound));
    kept(&null, bound, "the bound call")?;
    refused("no arguments", null, None)?;

    let slice = |buffer, offset, bytes| dsr_slice { buffer, offset, bytes };
    let whole = bytes + 2 * alignment;
    let outside = [
        ("of no buffer", slice(ptr::null_mut(), 0, 8)),
        ("of a buffer of another device", slice(theirs, 0, 8)),
        ("that ends behind its buffer", slice(a, 1, whole)),
        ("that starts behind its buffer", slice(a, whole + 1, 0)),
        ("that overflows", slice(a, u64::MAX, 2)),
        ("of 2^62 bytes", slice(a, 0, 1 << 62)),
    ];
    let good = slice(b, 0, 8);
    for (what, range) in outside {
        let filled = call!(raw.stream, fill(raw.queue, &raw const range, 1));
        refused(&format!("filling a range {what}"), filled, None)?;
        let copied = call!(raw.stream, copy(raw.queue, &raw const good, &raw const range));
        refused(&format!("a copy to a range {what}"), copied, None)?;
        let copied = call!(raw.stream, copy(raw.queue, &raw const range, &raw const good));
        refused(&format!("a copy from a range {what}"), copied, None)?;
    }
    refused("filling with 256", call!(raw.stream, fill(raw.queue, &raw const good, 256)), None)?;
    free!(raw.op, plan_free, plan);
    for buffer in [a, b, y, scratch] {
        free!(raw.memory, free, buffer);
    }
    free!(other.memory, free, theirs);
    other.sum_is_right()?;
    raw.sum_is_right()
}

/// Memory there is not, of kinds there are not, and devices there are not.
pub(super) fn resources(subject: &Subject) -> Outcome {
    let raw = Raw::open(subject)?;
    let before = raw.used()?;
    for bytes in [1 << 62, u64::MAX, i64::MAX as u64] {
        let allocated = raw.allocate(bytes, DSR_MEMORY_DEVICE);
        let code = allocated.as_ref().err().map(Error::code);
        refused(&format!("an allocation of {bytes} bytes"), allocated, None)?;
        ensure(code == Some(Code::OutOfMemory), || {
            format!("{bytes} bytes are refused, but not as out of memory")
        })?;
    }
    for kind in [0, 3, 77, u32::MAX] {
        refused(&format!("memory of kind {kind}"), raw.allocate(64, kind), None)?;
    }
    ensure(raw.used()? == before, || "memory is held after allocations that failed".into())?;
    let mut count = 0;
    call!(raw.api, device_count(raw.api.backend, &raw mut count))?;
    // A plugin may give its devices other numbers than their positions, so the one behind the last may be there.
    let behind =
        subject.backend().devices()?.iter().all(|listed| listed.index != count as usize).then_some(count);
    for index in [Some(u32::MAX - 1), behind].into_iter().flatten() {
        let mut device = nothing();
        let opened = call!(raw.api, device_open(raw.api.backend, index, ptr::null(), &raw mut device));
        kept(&opened, device, "the device")?;
        refused(&format!("device {index}, which is not there"), opened, None)?;
    }
    raw.sum_is_right()
}
