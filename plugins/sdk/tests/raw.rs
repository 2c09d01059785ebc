//! The tables of an exported backend with invalid parameters, which no host passes: every fault is an error that says what is
//! wrong, leaves outputs untouched, and leaves the device usable.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[allow(dead_code, reason = "the loopback tests use more of it")]
#[path = "support/tiny.rs"]
mod tiny;

#[path = "support/cc.rs"]
mod cc;

use dsrun_core::{Code, DType, Error, Result, op::Op};
use dsrun_plugin_sdk::{PluginBackend, backend_entry, raw::*, take_status};
use rstest::rstest;
use std::ptr;
use tiny::Tiny;

const ZERO_TENSOR: dsr_tensor_desc =
    dsr_tensor_desc { dtype: 0, rank: 0, shape: [0; 6], strides: [0; 6], flags: 0, reserved: 0 };
const ZERO_OPERAND: dsr_operand_desc = dsr_operand_desc {
    kind: DSR_OPERAND_ABSENT,
    reserved: 0,
    tensor: ZERO_TENSOR,
    weight: dsr_weight_type { format: 0, rank: 0, shape: [0; 6], reserved: [0; 2] },
};

fn tensor(rows: u64, columns: u64) -> dsr_tensor_desc {
    dsr_tensor_desc {
        dtype: 1,
        rank: 2,
        shape: [rows, columns, 0, 0, 0, 0],
        strides: [columns, 1, 0, 0, 0, 0],
        ..ZERO_TENSOR
    }
}

fn operand(tensor: dsr_tensor_desc) -> dsr_operand_desc {
    dsr_operand_desc { kind: DSR_OPERAND_TENSOR, tensor, ..ZERO_OPERAND }
}

/// A device of the tiny backend, and its raw tables.
struct Raw {
    api: dsr_plugin_api,
    device: *mut dsr_device,
    op: dsr_op_api,
    memory: dsr_memory_api,
    stream: dsr_stream_api,
}

impl Raw {
    fn new() -> Self {
        // SAFETY: this crate defines the entry.
        Self::of(&unsafe { PluginBackend::from_entry(backend_entry!(Tiny::new())) }.unwrap())
    }

    fn of(backend: &PluginBackend) -> Self {
        let api = *backend.raw_table();
        // SAFETY: the tables of a loaded plugin are valid forever, and `device` is writable.
        unsafe {
            let mut device = ptr::null_mut();
            take_status(api.device_open.unwrap()(api.backend, 0, ptr::null(), &raw mut device)).unwrap();
            Self { api, device, op: *api.op, memory: *api.memory, stream: *api.stream }
        }
    }

    fn query(&self, call: *const dsr_call_desc) -> Result<dsr_support> {
        // SAFETY: all bytes zero is a valid `dsr_support`.
        let mut support: dsr_support = unsafe { std::mem::zeroed() };
        support.struct_size = size_of::<dsr_support>() as u32;
        // SAFETY: our device; `call` is readable, and its faults are what the test is about.
        unsafe { take_status(self.op.query.unwrap()(self.device, call, &raw mut support)) }.map(|()| support)
    }

    fn plan(&self, call: *const dsr_call_desc) -> Result<*mut dsr_plan> {
        let mut plan = ptr::null_mut();
        // SAFETY: our device, and a writable `plan`; `call` is readable, and its faults are what the test is about.
        unsafe { take_status(self.op.plan.unwrap()(self.device, call, &raw mut plan)) }.map(|()| plan)
    }

    /// Binds an operand and a result, and frees the bound call.
    fn bind(&self, plan: *mut dsr_plan, operand: dsr_argument, result: dsr_argument) -> Result<()> {
        let arguments = dsr_arguments {
            struct_size: size_of::<dsr_arguments>() as u32,
            operand_count: 1,
            operands: &raw const operand,
            results: &raw const result,
            result_count: 1,
            flags: 0,
            workspace: NO_SLICE,
        };
        let mut call = ptr::null_mut();
        // SAFETY: our plan, arguments of our buffers, and a place for the call.
        unsafe {
            take_status(self.op.bind.unwrap()(plan, &raw const arguments, &raw mut call))?;
            self.op.call_free.unwrap()(call);
        }
        Ok(())
    }

    fn allocate(&self, bytes: u64, kind: u32) -> Result<*mut dsr_buffer> {
        let mut buffer = ptr::null_mut();
        // SAFETY: our device and a place for the buffer.
        unsafe {
            take_status(self.memory.allocate.unwrap()(self.device, bytes, kind, &raw mut buffer))
                .map(|()| buffer)
        }
    }

    fn open_stream(&self) -> *mut dsr_stream {
        let mut stream = ptr::null_mut();
        // SAFETY: our device and a place for the stream.
        unsafe { take_status(self.stream.create.unwrap()(self.device, &raw mut stream)) }.unwrap();
        stream
    }
}

/// The targets of the pointers of a valid `cast`.
struct CastCall {
    dtype: u32,
    operands: [dsr_operand_desc; 1],
    results: [dsr_tensor_desc; 1],
}

impl CastCall {
    fn new() -> Self {
        Self { dtype: DType::F32 as u32, operands: [operand(tensor(2, 4))], results: [tensor(2, 4)] }
    }

    fn desc(&self) -> dsr_call_desc {
        dsr_call_desc {
            struct_size: size_of::<dsr_call_desc>() as u32,
            op: Op::number_of("cast").unwrap(),
            attributes: (&raw const self.dtype).cast(),
            operands: self.operands.as_ptr(),
            results: self.results.as_ptr(),
            attributes_size: 4,
            operand_count: 1,
            result_count: 1,
            flags: 0,
            region: ptr::null(),
            comm: ptr::null_mut(),
            transport: ptr::null(),
            rank: 0,
            ranks: 0,
        }
    }
}

fn place(error: &Error) -> (Option<&str>, Option<&str>, Option<&str>) {
    (error.op(), error.argument(), error.field_name())
}

/// A change that makes a call invalid.
enum Change {
    Desc(fn(&mut dsr_call_desc)),
    Call(fn(&mut CastCall)),
}

#[rstest]
#[case::short(Change::Desc(|desc| desc.struct_size = 8), (Some("cast"), Some("attributes"), None), "0 words, must be 1")]
#[case::no_op(Change::Desc(|desc| desc.op = 0), (None, None, None), "no op 0")]
#[case::shorter(Change::Desc(|desc| desc.struct_size = 3), (None, Some("dsr_call_desc"), Some("struct_size")), "is 3")]
#[case::unknown_op(Change::Desc(|desc| desc.op = 999), (None, None, None), "no op 999")]
#[case::null_attributes(Change::Desc(|desc| desc.attributes = ptr::null()), (Some("cast"), Some("attributes"), None), "null")]
#[case::too_few_words(Change::Desc(|desc| desc.attributes_size = 0), (Some("cast"), Some("attributes"), None), "0 words, must be 1")]
#[case::half_a_word(Change::Desc(|desc| desc.attributes_size = 6), (Some("cast"), Some("attributes"), Some("attributes_size")), "is 6")]
#[case::no_operands(Change::Desc(|desc| desc.operand_count = 0), (Some("cast"), None, Some("operands")), "0 operands")]
#[case::too_many_operands(Change::Desc(|desc| desc.operand_count = u32::MAX), (Some("cast"), Some("operands"), None), "at most")]
#[case::null_operands(Change::Desc(|desc| desc.operands = ptr::null()), (Some("cast"), Some("operands"), None), "null")]
#[case::null_results(Change::Desc(|desc| desc.results = ptr::null()), (Some("cast"), Some("results"), None), "null")]
#[case::unknown_flags(Change::Desc(|desc| desc.flags = 4), (Some("cast"), Some("flags"), None), "0x4")]
#[case::unknown_kind(Change::Call(|call| call.operands[0].kind = 9), (Some("cast"), Some("x"), Some("kind")), "9")]
#[case::unknown_dtype(Change::Call(|call| call.operands[0].tensor.dtype = 99), (Some("cast"), Some("x"), Some("dtype")), "99")]
#[case::unknown_tensor_flag(Change::Call(|call| call.results[0].flags = 2), (Some("cast"), Some("y"), Some("flags")), "0x2")]
#[case::rank_7(Change::Call(|call| call.operands[0].tensor.rank = 7), (Some("cast"), Some("x"), Some("rank")), "7 dimensions")]
#[case::overflow(
    Change::Call(|call| call.operands[0].tensor = tensor(1 << 40, 1 << 40)), (Some("cast"), Some("x"), Some("shape")), "overflow"
)]
#[case::negative_shape(
    Change::Call(|call| call.operands[0].tensor.shape[0] = -1i64 as u64), (Some("cast"), Some("x"), Some("shape")), "overflow"
)]
#[case::overlapping_rows(
    Change::Call(|call| call.operands[0].tensor.strides[0] = 1), (Some("cast"), Some("x"), Some("strides[0]")), "stride 1"
)]
#[case::other_result(Change::Call(|call| call.results[0] = tensor(2, 5)), (Some("cast"), Some("y"), Some("shape")), "must be f32[2, 4]")]
#[case::attribute_without_a_meaning(Change::Call(|call| call.dtype = 99), (Some("cast"), Some("dtype"), None), "99")]
#[case::null_transport_of_a_collective(
    Change::Desc(|desc| {
        (desc.op, desc.operand_count, desc.result_count) = (Op::number_of("barrier").unwrap(), 0, 0);
    }),
    (Some("barrier"), Some("comm"), None),
    "needs the ranks"
)]
#[case::region_without_a_body(Change::Desc(|desc| desc.op = Op::REGION_NUMBER), (None, Some("dsr_region"), None), "null")]
fn wrong_calls_are_refused(
    #[case] change: Change,
    #[case] expected: (Option<&str>, Option<&str>, Option<&str>),
    #[case] part: &str,
) {
    let (raw, mut call) = (Raw::new(), CastCall::new());
    let mut desc = call.desc();
    match change {
        Change::Desc(change) => change(&mut desc),
        Change::Call(change) => {
            change(&mut call);
            desc = call.desc();
        }
    }
    let error = raw.query(&raw const desc).unwrap_err();
    assert_eq!(place(&error), expected, "{error}");
    assert!(error.message().contains(part), "{error}");

    let mut plan = ptr::dangling_mut::<dsr_plan>();
    // SAFETY: our device, the same description, and a place for the plan.
    let planned = unsafe { take_status(raw.op.plan.unwrap()(raw.device, &raw const desc, &raw mut plan)) };
    assert_eq!(planned.unwrap_err(), error);
    assert_eq!(plan, ptr::dangling_mut(), "the output is untouched");
    let good = CastCall::new();
    let good = good.desc();
    assert_eq!(raw.query(&raw const good).unwrap().flags & DSR_SUPPORT_NATIVE, DSR_SUPPORT_NATIVE);
}

#[test]
fn the_known_prefix_of_a_longer_description_is_read() {
    #[repr(C)]
    struct Longer {
        known: dsr_call_desc,
        unknown: [u64; 8],
    }
    let call = CastCall::new();
    for size in [size_of::<Longer>() as u32, u32::MAX] {
        let longer =
            Longer { known: dsr_call_desc { struct_size: size, ..call.desc() }, unknown: [u64::MAX; 8] };
        assert_eq!(Raw::new().query(&raw const longer.known).unwrap().flags & DSR_SUPPORT_NATIVE, 1);
        assert_eq!(longer.unknown, [u64::MAX; 8]);
    }
}

#[test]
fn answers_are_cut_to_the_size_of_the_caller() {
    let (raw, call) = (Raw::new(), CastCall::new());
    let desc = call.desc();
    let mut support = dsr_support {
        struct_size: 8,
        flags: 0,
        workspace_bytes: 77,
        persistent_bytes: 77,
        work_words: 77,
        reason: ptr::null_mut(),
    };
    // SAFETY: our device, a description, and a struct to fill in, whose stated size is shorter than it is.
    unsafe { take_status(raw.op.query.unwrap()(raw.device, &raw const desc, &raw mut support)) }.unwrap();
    assert_eq!((support.struct_size, support.workspace_bytes, support.work_words), (8, 77, 77));
    assert_eq!(support.flags & DSR_SUPPORT_NATIVE, DSR_SUPPORT_NATIVE);
    // SAFETY: null is refused.
    let refused = unsafe { take_status(raw.op.query.unwrap()(raw.device, &raw const desc, ptr::null_mut())) };
    assert_eq!(refused.unwrap_err().argument(), Some("dsr_support"));
}

#[test]
fn null_and_foreign_handles_are_refused() {
    let raw = Raw::new();
    let buffer = raw.allocate(64, DSR_MEMORY_DEVICE).unwrap();
    let stream = raw.open_stream();
    let fill = raw.stream.fill.unwrap();
    let slice = |buffer, offset, bytes| dsr_slice { buffer, offset, bytes };
    let mut foreign = [0u64; 8];
    let foreign = foreign.as_mut_ptr();
    // SAFETY: every pointer is null, ours, or to readable memory; the ranges are what the test is about.
    let refused = |stream: *mut dsr_stream, slice: dsr_slice, byte| unsafe {
        take_status(fill(stream, &raw const slice, byte)).unwrap_err()
    };
    let good = slice(buffer, 0, 64);
    let cases = [
        (refused(ptr::null_mut(), good, 0), Some("stream"), None, "is null"),
        (refused(foreign.cast(), good, 0), Some("stream"), None, "not a stream of this backend"),
        (refused(buffer.cast(), good, 0), Some("stream"), None, "not a stream of this backend"),
        (refused(stream, slice(ptr::null_mut(), 0, 64), 0), Some("destination"), Some("buffer"), "is null"),
        (
            refused(stream, slice(foreign.cast(), 0, 64), 0),
            Some("buffer"),
            None,
            "not a buffer of this backend",
        ),
        (
            refused(stream, slice(stream.cast(), 0, 64), 0),
            Some("buffer"),
            None,
            "not a buffer of this backend",
        ),
        (refused(stream, slice(buffer, 1, 64), 0), Some("destination"), Some("offset"), "exceed a buffer"),
        (
            refused(stream, slice(buffer, u64::MAX, 2), 0),
            Some("destination"),
            Some("offset"),
            "exceed a buffer",
        ),
        (refused(stream, good, 256), Some("byte"), None, "below 256"),
    ];
    for (error, argument, field, part) in cases {
        assert_eq!((error.argument(), error.field_name()), (argument, field), "{error}");
        assert!(error.message().contains(part), "{error}");
    }
    // SAFETY: our stream and buffer. Null and foreign handles are ignored.
    unsafe {
        take_status(fill(stream, ptr::null(), 0)).unwrap_err();
        take_status(fill(stream, &raw const good, 1)).unwrap();
        raw.memory.free.unwrap()(ptr::null_mut());
        raw.memory.free.unwrap()(foreign.cast());
        raw.memory.free.unwrap()(buffer);
        raw.stream.free.unwrap()(stream);
        raw.api.device_close.unwrap()(raw.device);
    }
}

#[test]
fn impossible_allocations_are_errors() {
    let raw = Raw::new();
    assert_eq!(raw.allocate(1 << 62, DSR_MEMORY_DEVICE).unwrap_err().code(), Code::OutOfMemory);
    let error = raw.allocate(64, 77).unwrap_err();
    assert_eq!((error.code(), error.argument()), (Code::Unsupported, Some("kind")));
    // SAFETY: our device; a null output is refused before anything is made.
    let refused = unsafe {
        take_status(raw.memory.allocate.unwrap()(raw.device, 64, DSR_MEMORY_DEVICE, ptr::null_mut()))
    };
    assert_eq!(refused.unwrap_err().argument(), Some("buffer"));
    assert!(raw.allocate(64, DSR_MEMORY_PINNED).is_ok());
}

const NO_SLICE: dsr_slice = dsr_slice { buffer: ptr::null_mut(), offset: 0, bytes: 0 };

fn argument(buffer: *mut dsr_buffer, offset: u64, bytes: u64) -> dsr_argument {
    dsr_argument {
        kind: DSR_OPERAND_TENSOR,
        reserved: 0,
        slice: dsr_slice { buffer, offset, bytes },
        extent: NO_SLICE,
        weight: ptr::null_mut(),
    }
}

#[test]
fn arguments_are_validated_when_they_are_bound() {
    let raw = Raw::new();
    let call = CastCall::new();
    let desc = call.desc();
    let plan = raw.plan(&raw const desc).unwrap();
    let buffer = raw.allocate(64, DSR_MEMORY_DEVICE).unwrap();
    let at = |offset, bytes| argument(buffer, offset, bytes);
    assert_eq!(raw.bind(plan, at(0, 32), at(32, 32)), Ok(()));
    let weight = dsr_argument { kind: DSR_OPERAND_WEIGHT, ..at(0, 32) };
    let extent = dsr_argument { extent: dsr_slice { buffer, offset: 32, bytes: 4 }, ..at(0, 32) };
    for (operand, result, argument, field) in [
        (at(0, 31), at(32, 32), "x", Some("bytes")),
        (at(2, 32), at(32, 32), "x", Some("offset")),
        (at(60, 32), at(32, 32), "x", Some("offset")),
        (at(0, 32), at(28, 32), "y", Some("slice")),
        (weight, at(32, 32), "x", Some("weight")),
        (at(0, 32), weight, "y", Some("kind")),
        (extent, at(32, 32), "x", Some("extent")),
        (dsr_argument { kind: DSR_OPERAND_ABSENT, ..at(0, 32) }, at(32, 32), "x", None),
    ] {
        let error = raw.bind(plan, operand, result).unwrap_err();
        assert_eq!(place(&error), (Some("cast"), Some(argument), field), "{error}");
    }
    // SAFETY: our plan and buffer, once.
    unsafe {
        raw.op.plan_free.unwrap()(plan);
        raw.memory.free.unwrap()(buffer);
        raw.api.device_close.unwrap()(raw.device);
    }
}

#[test]
fn a_plugin_in_c_validates_with_the_functions_of_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let library = cc::plugin(folder.path(), "checks.so", &[]);
    let raw = Raw::of(&PluginBackend::load(&library).unwrap());
    let mut call = CastCall::new();
    let desc = call.desc();
    let plan = raw.plan(&raw const desc).unwrap();
    call.results[0] = tensor(2, 5);
    let wrong = call.desc();
    for refused in [raw.query(&raw const wrong).unwrap_err(), raw.plan(&raw const wrong).unwrap_err()] {
        assert_eq!(place(&refused), (Some("cast"), Some("y"), Some("shape")), "{refused}");
    }

    let buffer = raw.allocate(256, DSR_MEMORY_DEVICE).unwrap();
    let foreign = raw.allocate(8192, DSR_MEMORY_DEVICE).unwrap();
    let at = |offset, bytes| argument(buffer, offset, bytes);
    let y = at(64, 32);
    assert_eq!(raw.bind(plan, at(0, 32), y).unwrap_err().message(), "valid, but this device runs nothing");
    for (operand, argument, field) in [
        (at(0, 31), "x", "bytes"),
        (at(8, 32), "x", "offset"),
        (at(0, 300), "x", "offset"),
        (at(64, 32), "y", "slice"),
        (argument(foreign, 0, 32), "x", "buffer"),
    ] {
        let error = raw.bind(plan, operand, y).unwrap_err();
        assert_eq!(place(&error), (Some("cast"), Some(argument), Some(field)), "{error}");
    }
}

#[test]
fn a_stream_refuses_a_second_thread_at_the_same_time() {
    struct Shared(*mut dsr_stream, *mut dsr_buffer);
    // SAFETY: a stream refuses the second thread, which is what the test is about.
    unsafe impl Sync for Shared {}
    let raw = Raw::new();
    let fill = raw.stream.fill.unwrap();
    let shared = Shared(raw.open_stream(), raw.allocate(1 << 20, DSR_MEMORY_DEVICE).unwrap());
    let shared = &shared;
    let errors: Vec<Error> = std::thread::scope(|scope| {
        let hammer = move || {
            let slice = dsr_slice { buffer: shared.1, offset: 0, bytes: 1 << 20 };
            // SAFETY: our stream and buffer.
            (0..200)
                .filter_map(|_| unsafe { take_status(fill(shared.0, &raw const slice, 1)) }.err())
                .collect()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(hammer)).collect();
        threads.into_iter().flat_map(|thread| -> Vec<Error> { thread.join().unwrap() }).collect()
    });
    for error in errors {
        assert_eq!((error.code(), error.argument()), (Code::FailedPrecondition, Some("stream")), "{error}");
    }
    let slice = dsr_slice { buffer: shared.1, offset: 0, bytes: 4 };
    // SAFETY: our stream and buffer, now used by one thread.
    unsafe { take_status(fill(shared.0, &raw const slice, 1)) }.unwrap();
}

#[test]
fn a_host_of_another_version_gets_only_the_version() {
    let entry = backend_entry!(Tiny::new());
    // SAFETY: all bytes zero is a valid table.
    let mut host: dsr_host_api = unsafe { std::mem::zeroed() };
    host.struct_size = size_of::<dsr_host_api>() as u32;
    for (major, minor) in [(DSR_ABI_MAJOR, DSR_ABI_MINOR + 1), (DSR_ABI_MAJOR + 1, DSR_ABI_MINOR)] {
        (host.abi_major, host.abi_minor) = (major, minor);
        let mut table = ptr::null();
        // SAFETY: a readable table, and a writable output.
        let status = unsafe { entry(&raw const host, &raw mut table) };
        assert!(status.is_null());
        // SAFETY: the entry has set it.
        let table = unsafe { *table };
        assert_eq!((table.abi_major, table.abi_minor), (DSR_ABI_MAJOR, DSR_ABI_MINOR));
        assert!(table.device_open.is_none() && table.op.is_null());
    }
}
