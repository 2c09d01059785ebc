//! Validation of calls and arguments, with a backend of heap memory whose kernels only count calls.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/fake.rs"]
mod fake;
#[path = "support/types.rs"]
mod types;

use dsrun_core::{
    BytesReader, Code, DType, Error, TensorDesc, WeightType,
    checked::CheckedPlan,
    collective::{Comm, host::HostComm},
    device::{Buffer, BufferSlice, Device, MemoryKind},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc, WeightDesc},
    op::{
        Add, AllGather, AllToAll, Argmax, Barrier, Broadcast, Cast, CommitTokens, Embed, GatherRows, Linear,
        MeshAxis, Op, OperandType, Receive, ReduceScatter, Reduction, RmsNorm, Send as SendOp,
    },
    region::well_known,
};
use fake::{Fake, Packed};
use rstest::rstest;
use std::sync::{Arc, atomic::Ordering};
use types::operand;

fn desc(text: &str) -> Option<OperandDesc> {
    Some(match operand(text)? {
        OperandType::Tensor(tensor) => {
            let bounded = tensor.shape.first().is_some_and(|size| size.known().is_none());
            let sizes: Vec<usize> = tensor.shape.iter().map(|size| size.known().unwrap_or(8)).collect();
            let desc = TensorDesc::dense(tensor.dtype, &sizes);
            OperandDesc::Tensor(if bounded { desc.with_extent() } else { desc })
        }
        OperandType::Weight(weight) => OperandDesc::Weight(weight),
    })
}

/// A description; `?t` is a bounded size of 8.
fn describe(op: impl Into<Op>, operands: &[&str], results: &[&str]) -> CallDesc {
    let results = results.iter().map(|text| match desc(text) {
        Some(OperandDesc::Tensor(tensor)) => tensor,
        other => panic!("{other:?} is no result"),
    });
    CallDesc {
        op: op.into(),
        operands: operands.iter().map(|text| desc(text)).collect(),
        results: results.collect(),
        comm: None,
    }
}

fn planned(device: &Fake, call: CallDesc) -> dsrun_core::Result<CheckedPlan> {
    CheckedPlan::new(device, call.validate()?)
}

const LINEAR: Linear = Linear { dtype: DType::F32 };

/// `linear` over a bounded `x` without bias, with `workspace` bytes of scratch memory.
fn linear(workspace: usize) -> (Fake, CheckedPlan) {
    let mut device = Fake::new();
    device.workspace = workspace;
    let call = describe(LINEAR, &["f32[?t, 64]", "weight q8_0[4, 64]", "_"], &["f32[?t, 4]"]);
    let plan = planned(&device, call).unwrap();
    (device, plan)
}

fn slice(buffer: &Arc<dyn Buffer>, offset: usize, bytes: usize) -> BufferSlice {
    BufferSlice::new(buffer.clone(), offset, bytes).unwrap()
}

fn tensor(slice: BufferSlice) -> Option<Argument> {
    Some(Argument::Tensor(Binding::new(slice)))
}

fn weight(text: &str) -> Option<Argument> {
    let Some(OperandType::Weight(weight)) = operand(text) else { panic!("{text}") };
    Some(Argument::Weight(Arc::new(Packed(weight))))
}

/// One buffer with `x` at 0 (2048 bytes), `y` at 2048 (128), the extent at 2176 (4), the workspace at 2192 (64), and
/// free space after it.
fn right(device: &Fake) -> (Arc<dyn Buffer>, Arguments) {
    let buffer = device.allocate(4096, MemoryKind::Device).unwrap();
    let extent = Some(slice(&buffer, 2176, 4));
    let x = Binding { slice: slice(&buffer, 0, 2048), extent: extent.clone() };
    let arguments = Arguments {
        operands: vec![Some(Argument::Tensor(x)), weight("weight q8_0[4, 64]"), None],
        results: vec![Binding { slice: slice(&buffer, 2048, 128), extent }],
        workspace: Some(slice(&buffer, 2192, 64)),
    };
    (buffer, arguments)
}

#[track_caller]
fn assert_names(error: &Error, op: &str, argument: &str, field: Option<&str>) {
    assert_eq!(
        (error.op(), error.argument(), error.field_name()),
        (Some(op), Some(argument), field),
        "{error}"
    );
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
}

#[test]
fn valid_arguments_are_bound_and_run() {
    let (device, plan) = linear(64);
    let (_, arguments) = right(&device);
    assert_eq!(plan.workspace_bytes(), 64);
    assert_eq!(plan.call().op, LINEAR.into());
    let bound = plan.bind(&arguments).unwrap();
    let mut stream = device.stream().unwrap();
    for _ in 0..3 {
        bound.enqueue(&mut *stream).unwrap();
    }
    assert_eq!(device.ran.load(Ordering::Relaxed), 3);

    // More memory than needed, no extent for a bounded operand, and no workspace for a plan that needs none.
    let (device, plan) = linear(0);
    let (buffer, mut arguments) = right(&device);
    arguments.operands[0] = tensor(slice(&buffer, 0, 2048));
    arguments.results[0] = Binding::new(slice(&buffer, 2048, 2048));
    arguments.workspace = None;
    plan.bind(&arguments).unwrap();
}

type Memory = Arc<dyn Buffer>;

#[rstest]
#[case::x_too_short(|b: &Memory, a: &mut Arguments| a.operands[0] = tensor(slice(b, 0, 2047)), "x", Some("bytes"))]
#[case::y_too_short(|b: &Memory, a: &mut Arguments| a.results[0].slice = slice(b, 2048, 127), "y", Some("bytes"))]
#[case::workspace_too_short(|b: &Memory, a: &mut Arguments| a.workspace = Some(slice(b, 2192, 63)), "workspace", Some("bytes"))]
#[case::workspace_missing(|_: &Memory, a: &mut Arguments| a.workspace = None, "workspace", Some("bytes"))]
#[case::x_misaligned(|b: &Memory, a: &mut Arguments| a.operands[0] = tensor(slice(b, 8, 2048)), "x", Some("offset"))]
#[case::y_misaligned(|b: &Memory, a: &mut Arguments| a.results[0].slice = slice(b, 2056, 128), "y", Some("offset"))]
#[case::workspace_misaligned(|b: &Memory, a: &mut Arguments| a.workspace = Some(slice(b, 2200, 64)), "workspace", Some("offset"))]
#[case::x_outside(|b: &Memory, a: &mut Arguments| a.operands[0] = tensor(BufferSlice { buffer: b.clone(), offset: 2064, bytes: 2048 }), "x", Some("offset"))]
#[case::y_outside(|b: &Memory, a: &mut Arguments| a.results[0].slice = BufferSlice { buffer: b.clone(), offset: usize::MAX - 15, bytes: 128 }, "y", Some("offset"))]
#[case::workspace_outside(|b: &Memory, a: &mut Arguments| a.workspace = Some(BufferSlice { buffer: b.clone(), offset: 4080, bytes: 64 }), "workspace", Some("offset"))]
#[case::extent_too_short(|b: &Memory, a: &mut Arguments| a.results[0].extent = Some(slice(b, 2176, 3)), "y", Some("extent"))]
#[case::extent_misaligned(|b: &Memory, a: &mut Arguments| a.results[0].extent = Some(slice(b, 2178, 4)), "y", Some("extent"))]
#[case::extent_outside(|b: &Memory, a: &mut Arguments| a.results[0].extent = Some(BufferSlice { buffer: b.clone(), offset: 4096, bytes: 4 }), "y", Some("extent"))]
#[case::y_in_x(|b: &Memory, a: &mut Arguments| a.results[0].slice = slice(b, 1920, 128), "y", Some("slice"))]
#[case::y_in_workspace(|b: &Memory, a: &mut Arguments| a.workspace = Some(slice(b, 2160, 64)), "y", Some("slice"))]
#[case::y_in_its_extent(|b: &Memory, a: &mut Arguments| a.results[0].extent = Some(slice(b, 2172, 4)), "y", Some("slice"))]
#[case::workspace_in_x(|b: &Memory, a: &mut Arguments| a.workspace = Some(slice(b, 1024, 64)), "workspace", Some("slice"))]
#[case::workspace_in_an_extent(|b: &Memory, a: &mut Arguments| a.workspace = Some(slice(b, 2176, 64)), "workspace", Some("slice"))]
#[case::another_weight(|_: &Memory, a: &mut Arguments| a.operands[1] = weight("weight q4_0[4, 64]"), "weight", Some("weight_type"))]
#[case::another_shape(|_: &Memory, a: &mut Arguments| a.operands[1] = weight("weight q8_0[8, 32]"), "weight", Some("weight_type"))]
#[case::x_missing(|_: &Memory, a: &mut Arguments| a.operands[0] = None, "x", None)]
#[case::weight_missing(|_: &Memory, a: &mut Arguments| a.operands[1] = None, "weight", None)]
#[case::bias_extra(|b: &Memory, a: &mut Arguments| a.operands[2] = tensor(slice(b, 4000, 16)), "bias", None)]
#[case::tensor_for_weight(|b: &Memory, a: &mut Arguments| a.operands[1] = tensor(slice(b, 3072, 512)), "weight", None)]
#[case::weight_for_tensor(|_: &Memory, a: &mut Arguments| a.operands[0] = weight("weight q8_0[4, 64]"), "x", None)]
fn wrong_arguments_are_named(
    #[case] edit: impl FnOnce(&Memory, &mut Arguments),
    #[case] argument: &str,
    #[case] field: Option<&str>,
) {
    let (device, plan) = linear(64);
    let (buffer, mut arguments) = right(&device);
    edit(&buffer, &mut arguments);
    assert_names(&plan.bind(&arguments).unwrap_err(), "linear", argument, field);
    assert_eq!(device.ran.load(Ordering::Relaxed), 0);
}

#[rstest]
#[case(|_: &Memory, a: &mut Arguments| { a.operands.pop(); }, "2 operands and 1 results")]
#[case(|_: &Memory, a: &mut Arguments| a.operands.push(None), "4 operands and 1 results")]
#[case(|_: &Memory, a: &mut Arguments| a.results.clear(), "3 operands and 0 results")]
fn wrong_numbers_of_arguments_are_refused(
    #[case] edit: impl FnOnce(&Memory, &mut Arguments),
    #[case] message: &str,
) {
    let (device, plan) = linear(64);
    let (buffer, mut arguments) = right(&device);
    edit(&buffer, &mut arguments);
    let error = plan.bind(&arguments).unwrap_err();
    assert_eq!((error.op(), error.field_name()), (Some("linear"), Some("operands")));
    assert!(error.message().contains(message), "{error}");
}

#[test]
fn an_extent_needs_a_bounded_operand() {
    let device = Fake::new();
    let call = describe(GatherRows {}, &["f32[8, 4]", "i32[?t]"], &["f32[?t, 4]"]);
    let plan = planned(&device, call).unwrap();
    let buffer = device.allocate(1024, MemoryKind::Device).unwrap();
    let extent = Some(slice(&buffer, 512, 4));
    let bound = |offset, bytes, extent: &Option<BufferSlice>| Binding {
        slice: slice(&buffer, offset, bytes),
        extent: extent.clone(),
    };
    let with = |x_extent: &Option<BufferSlice>| Arguments {
        operands: vec![
            Some(Argument::Tensor(bound(0, 128, x_extent))),
            Some(Argument::Tensor(bound(128, 32, &extent))),
        ],
        results: vec![bound(256, 128, &extent)],
        workspace: None,
    };
    plan.bind(&with(&None)).unwrap();
    assert_names(&plan.bind(&with(&extent)).unwrap_err(), "gather_rows", "x", Some("extent"));
}

/// `commit_tokens` updates three operands: each result must be bound to the range of its operand.
#[rstest]
#[case::valid([512, 768, 1024], 0, None)]
#[case::own_storage([256, 768, 1024], 0, Some("last_token"))]
#[case::swapped([768, 512, 1024], 0, Some("last_token"))]
#[case::longer_than_the_operand([512, 768, 1024], 16, Some("last_token"))]
#[case::last_elsewhere([512, 768, 1040], 0, Some("counts"))]
fn results_that_update_are_bound_to_their_operands(
    #[case] offsets: [usize; 3],
    #[case] extra: usize,
    #[case] argument: Option<&str>,
) {
    let device = Fake::new();
    let (table, counts) = ("i32[4]", "i32[4, 5]");
    let operands = ["i32[2]", "i32[2]", "i32[2]", table, table, counts];
    let call = describe(CommitTokens {}, &operands, &[table, table, counts]);
    let plan = planned(&device, call).unwrap();
    let buffer = device.allocate(2048, MemoryKind::Device).unwrap();
    let at = [(0, 8), (16, 8), (32, 8), (512, 16), (768, 16), (1024, 80)];
    let [first, second, third] = offsets;
    let results = [(first, 16 + extra), (second, 16), (third, 80)];
    let arguments = Arguments {
        operands: at.iter().map(|(offset, bytes)| tensor(slice(&buffer, *offset, *bytes))).collect(),
        results: results
            .iter()
            .map(|(offset, bytes)| Binding::new(slice(&buffer, *offset, *bytes)))
            .collect(),
        workspace: None,
    };
    match (plan.bind(&arguments), argument) {
        (bound, None) => drop(bound.unwrap()),
        (bound, Some(argument)) => {
            assert_names(&bound.unwrap_err(), "commit_tokens", argument, Some("slice"))
        }
    }
}

/// Updated operands share memory neither with each other nor with operands that are read.
#[rstest]
#[case::two_updated_in_one_range([0, 16, 32, 512, 512, 1024], "last_token", "finished")]
#[case::also_read([512, 16, 32, 512, 768, 1024], "last_token", "requests")]
#[case::read_from_within([0, 16, 1088, 512, 768, 1024], "counts", "stop_ids")]
fn updated_operands_share_no_memory(#[case] offsets: [usize; 6], #[case] argument: &str, #[case] with: &str) {
    let device = Fake::new();
    let (table, counts) = ("i32[4]", "i32[4, 5]");
    let operands = ["i32[2]", "i32[2]", "i32[2]", table, table, counts];
    let plan = planned(&device, describe(CommitTokens {}, &operands, &[table, table, counts])).unwrap();
    let buffer = device.allocate(2048, MemoryKind::Device).unwrap();
    let sizes = [8, 8, 8, 16, 16, 80];
    let slices: Vec<_> =
        offsets.iter().zip(sizes).map(|(offset, bytes)| slice(&buffer, *offset, bytes)).collect();
    let arguments = Arguments {
        operands: slices.iter().cloned().map(tensor).collect(),
        results: slices[3..].iter().cloned().map(Binding::new).collect(),
        workspace: None,
    };
    let error = plan.bind(&arguments).unwrap_err();
    assert_names(&error, "commit_tokens", argument, Some("slice"));
    assert!(error.message().contains(with), "{error}");
}

#[test]
fn results_may_not_share_storage() {
    let device = Fake::new();
    let region =
        well_known::add_rms_norm(Add { alpha: 1.0 }, RmsNorm { eps: 0.0, weight_offset: 0.0 }).unwrap();
    let plane = "f32[2, 4]";
    let op = Op::Region(Arc::new(region));
    let plan = planned(&device, describe(op, &[plane, plane, "f32[4]"], &[plane, plane])).unwrap();
    let buffer = device.allocate(512, MemoryKind::Device).unwrap();
    let bind = |sum, normed| {
        let at = |offset: usize, bytes| slice(&buffer, offset, bytes);
        plan.bind(&Arguments {
            operands: vec![tensor(at(0, 32)), tensor(at(32, 32)), tensor(at(64, 16))],
            results: vec![Binding::new(at(sum, 32)), Binding::new(at(normed, 32))],
            workspace: None,
        })
    };
    bind(128, 160).unwrap();
    // Operands of a region have no names, so messages number them.
    assert_names(&bind(128, 144).unwrap_err(), "add_rms_norm", "result 0", Some("slice"));
    let error = bind(128, 32).unwrap_err();
    assert_names(&error, "add_rms_norm", "result 1", Some("slice"));
    assert!(error.message().contains("operand 1"), "{error}");
}

/// Tensors of size 0 have no memory, so their ranges overlap nothing.
#[test]
fn empty_tensors_overlap_nothing() {
    let device = Fake::new();
    let plan = planned(&device, describe(GatherRows {}, &["f32[8, 4]", "i32[0]"], &["f32[0, 4]"])).unwrap();
    let buffer = device.allocate(128, MemoryKind::Device).unwrap();
    let arguments = Arguments {
        operands: vec![tensor(slice(&buffer, 0, 128)), tensor(slice(&buffer, 16, 0))],
        results: vec![Binding::new(slice(&buffer, 16, 0))],
        workspace: None,
    };
    plan.bind(&arguments).unwrap();
}

#[test]
fn slices_stay_inside_their_buffer_and_overlap_if_they_share_a_byte() {
    let device = Fake::new();
    let [one, two] = [(), ()].map(|()| device.allocate(64, MemoryKind::Device).unwrap());
    for (offset, bytes) in [(0, 65), (65, 0), (1, 64), (usize::MAX, 2)] {
        assert!(BufferSlice::new(one.clone(), offset, bytes).is_err(), "{bytes} at {offset}");
    }
    let middle = slice(&one, 16, 32);
    assert_eq!((middle.slice(8, 24).unwrap().offset, middle.slice(32, 0).unwrap().offset), (24, 48));
    for (offset, bytes) in [(0, 33), (33, 0), (8, 25), (usize::MAX, 1)] {
        assert!(middle.slice(offset, bytes).is_err(), "{bytes} at {offset}");
    }
    for (offset, bytes, overlaps) in
        [(0, 16, false), (0, 17, true), (47, 1, true), (48, 16, false), (20, 0, false)]
    {
        assert_eq!(middle.overlaps(&slice(&one, offset, bytes)), overlaps, "{bytes} at {offset}");
        assert_eq!(slice(&one, offset, bytes).overlaps(&middle), overlaps, "{bytes} at {offset}");
        assert!(!middle.overlaps(&slice(&two, offset, bytes)));
    }
    assert!(middle.same(&slice(&one, 16, 32)) && !middle.same(&slice(&two, 16, 32)));
    assert_eq!(BufferSlice::whole(one).bytes, 64);
}

#[test]
fn unsupported_calls_carry_the_reason_of_the_device() {
    let device = Fake::new();
    let error = planned(&device, describe(Argmax {}, &["f32[2, 8]"], &["i32[2]"])).unwrap_err();
    assert_eq!((error.code(), error.op()), (Code::Unsupported, Some("argmax")));
    assert_eq!(error.message(), "rows of more than 4 elements");
    let cast = describe(Cast { dtype: DType::F16 }, &["f32[2, 8]"], &["f16[2, 8]"]);
    let error = planned(&device, cast).unwrap_err();
    assert_eq!((error.code(), error.op()), (Code::OutOfMemory, Some("cast")));
}

#[test]
fn weights_are_packed_and_bound() {
    let (device, plan) = linear(64);
    let weight_type =
        WeightType { format: dsrun_core::WeightFormat::from_name("q8_0").unwrap(), shape: vec![4, 64] };
    let desc = WeightDesc { weight_type: weight_type.clone(), immutable: true };
    assert_eq!(device.kernels().prepack_query(&desc).unwrap().bytes, 4 * 68);
    let mut rows = BytesReader::new(weight_type, vec![0; 4 * 68]).unwrap();
    let packed = device.kernels().prepack(&mut *device.stream().unwrap(), &desc, &mut rows).unwrap();
    let (_, mut arguments) = right(&device);
    arguments.operands[1] = Some(Argument::Weight(packed));
    plan.bind(&arguments).unwrap();
}

fn edit_x(call: &mut CallDesc, edit: impl FnOnce(&mut TensorDesc)) {
    let Some(Some(OperandDesc::Tensor(x))) = call.operands.first_mut() else { panic!() };
    edit(x);
}

#[rstest]
#[case::operand_without_strides(|c: &mut CallDesc| edit_x(c, |x| x.strides.clear()), "x", Some("strides"))]
#[case::overlapping_rows(|c: &mut CallDesc| edit_x(c, |x| x.strides[0] = 63), "x", Some("strides[0]"))]
#[case::gaps_in_rows(|c: &mut CallDesc| edit_x(c, |x| x.strides = vec![128, 2]), "x", Some("strides[1]"))]
#[case::too_large(|c: &mut CallDesc| edit_x(c, |x| x.shape[0] = usize::MAX), "x", Some("shape"))]
#[case::wrong_operand(|c: &mut CallDesc| edit_x(c, |x| *x = TensorDesc::dense(DType::F32, &[8, 63])), "x", Some("shape[1]"))]
#[case::wrong_type(|c: &mut CallDesc| edit_x(c, |x| x.dtype = DType::I32), "x", Some("dtype"))]
#[case::missing(|c: &mut CallDesc| c.operands[0] = None, "x", None)]
#[case::half_a_block(|c: &mut CallDesc| c.operands[1] = desc("weight q8_0[4, 65]"), "weight", Some("shape"))]
#[case::overflowing_weight(|c: &mut CallDesc| c.operands[1] = desc("weight f32[9223372036854775807, 4, 64]"), "weight", Some("shape"))]
#[case::result_dtype(|c: &mut CallDesc| c.results[0].dtype = DType::F16, "y", Some("dtype"))]
#[case::result_shape(|c: &mut CallDesc| c.results[0] = TensorDesc::dense(DType::F32, &[8, 5]), "y", Some("shape"))]
#[case::result_strides(|c: &mut CallDesc| c.results[0].strides = vec![3, 1], "y", Some("strides[0]"))]
#[case::result_scalar_with_extent(|c: &mut CallDesc| c.results[0] = TensorDesc::dense(DType::F32, &[]).with_extent(), "y", Some("bounded"))]
#[case::group_without_collective(|c: &mut CallDesc| c.comm = Some(rank(0, 2)), "comm", None)]
fn wrong_descriptions_are_named(
    #[case] edit: impl FnOnce(&mut CallDesc),
    #[case] argument: &str,
    #[case] field: Option<&str>,
) {
    let mut call = describe(LINEAR, &["f32[?t, 64]", "weight q8_0[4, 64]", "_"], &["f32[?t, 4]"]);
    call.clone().validate().unwrap();
    edit(&mut call);
    assert_names(&call.validate().unwrap_err(), "linear", argument, field);
}

#[test]
fn wrong_numbers_of_operands_and_results_are_refused() {
    let call = describe(LINEAR, &["f32[8, 64]", "weight q8_0[4, 64]"], &["f32[8, 4]"]);
    assert_eq!(call.validate().unwrap_err().field_name(), Some("operands"));
    let call = describe(LINEAR, &["f32[8, 64]", "weight q8_0[4, 64]", "_"], &[]);
    let error = call.validate().unwrap_err();
    assert_eq!((error.op(), error.field_name()), (Some("linear"), Some("results")));
}

#[test]
fn operands_may_be_strided_and_updated_results_have_their_strides() {
    let wide = || TensorDesc { strides: vec![16, 1], ..TensorDesc::dense(DType::F32, &[4, 8]) };
    let mut call = describe(Broadcast { axis: AXIS, root: 0 }, &["f32[4, 8]"], &["f32[4, 8]"]);
    call.comm = Some(rank(0, 1));
    call.operands[0] = Some(OperandDesc::Tensor(wide()));
    assert_names(&call.clone().validate().unwrap_err(), "broadcast", "y", Some("strides"));
    call.results[0] = wide();

    let device = Fake::new();
    let plan = planned(&device, call).unwrap();
    let buffer = device.allocate(256, MemoryKind::Device).unwrap();
    let bind = |bytes| {
        let all = slice(&buffer, 0, bytes);
        plan.bind(&Arguments {
            operands: vec![tensor(all.clone())],
            results: vec![Binding::new(all)],
            workspace: None,
        })
    };
    // The gap after the last row is not needed.
    bind(224).unwrap();
    assert_names(&bind(223).unwrap_err(), "broadcast", "x", Some("bytes"));
}

fn rank(rank: usize, ranks: usize) -> Arc<dyn Comm> {
    Arc::new(HostComm::group(ranks).unwrap().swap_remove(rank))
}

const AXIS: MeshAxis = MeshAxis::Tensor;

/// The attributes of a collective size its buffers, so they must fit its group.
#[rstest]
#[case::gather(AllGather { axis: AXIS, ranks: 4, rows: false }, "f32[8, 8]", Some("f32[8, 32]"), 0, 2, Some("ranks"))]
#[case::valid_gather(AllGather { axis: AXIS, ranks: 2, rows: false }, "f32[8, 8]", Some("f32[8, 16]"), 0, 2, None)]
#[case::scatter(ReduceScatter { axis: AXIS, ranks: 2, rows: false, reduction: Reduction::Sum }, "f32[8, 8]", Some("f32[8, 4]"), 1, 4, Some("ranks"))]
#[case::exchange(AllToAll { axis: AXIS, ranks: 1 }, "f32[8, 8]", Some("f32[8, 8]"), 0, 2, Some("ranks"))]
#[case::root(Broadcast { axis: AXIS, root: 2 }, "f32[8, 8]", Some("f32[8, 8]"), 0, 2, Some("root"))]
#[case::valid_root(Broadcast { axis: AXIS, root: 1 }, "f32[8, 8]", Some("f32[8, 8]"), 1, 2, None)]
#[case::peer(SendOp { axis: AXIS, peer: 2 }, "f32[8, 8]", None, 0, 2, Some("peer"))]
#[case::peer_is_itself(Receive { axis: AXIS, peer: 1 }, "f32[8, 8]", Some("f32[8, 8]"), 1, 2, Some("peer"))]
#[case::valid_peer(SendOp { axis: AXIS, peer: 0 }, "f32[8, 8]", None, 1, 2, None)]
fn attributes_of_collectives_fit_their_group(
    #[case] op: impl Into<Op>,
    #[case] x: &str,
    #[case] y: Option<&str>,
    #[case] own: usize,
    #[case] ranks: usize,
    #[case] argument: Option<&str>,
) {
    let mut call = describe(op, &[x], y.as_slice());
    let name = call.op.name().to_owned();
    assert_names(&call.clone().validate().unwrap_err(), &name, "comm", None);
    call.comm = Some(rank(own, ranks));
    match (call.validate(), argument) {
        (Ok(_), None) => {}
        (found, Some(argument)) => assert_names(&found.unwrap_err(), &name, argument, None),
        (Err(error), None) => panic!("{error}"),
    }
}

#[test]
fn a_barrier_needs_a_group() {
    let mut call = describe(Barrier { axis: AXIS }, &[], &[]);
    assert_names(&call.clone().validate().unwrap_err(), "barrier", "comm", None);
    call.comm = Some(rank(0, 1));
    planned(&Fake::new(), call)
        .unwrap()
        .bind(&Arguments { operands: vec![], results: vec![], workspace: None })
        .unwrap();
}

#[test]
fn optional_operands_are_described_as_absent() {
    let op = Embed { dtype: DType::F32, first_row: 0, position_offset: 0 };
    let call =
        describe(op, &["i32[?t]", "weight q8_0[4, 64]", "_", "_"], &["f32[?t, 64]"]).validate().unwrap();
    assert_eq!(
        (call.operand_name(1), call.operand_name(9), call.result_name(0)),
        ("table".into(), "operand 9".into(), "y".into())
    );
    assert!(call.tensor(0).is_some() && call.tensor(1).is_none() && call.tensor(2).is_none());
}
