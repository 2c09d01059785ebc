//! Programs that `Program::validate` and `ProgramBuilder` refuse.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/types.rs"]
mod types;

use dsrun_core::{
    DType, Result, Size, TensorType, WeightExpr,
    op::{Add, Argmax, Barrier, Broadcast, Cast, Embed, GatherRows, MeshAxis, OperandType, RmsNorm, Send},
    placement::Placement,
    program::{Lane, Origin, Program, ProgramBuilder, Segment, SegmentKind, Value, ValueId},
};
use rstest::rstest;
use types::operand;

fn tensor(text: &str) -> TensorType {
    match operand(text) {
        Some(OperandType::Tensor(tensor)) => tensor,
        other => panic!("{other:?} is no tensor"),
    }
}

fn id(index: usize) -> ValueId {
    ValueId::new(index)
}

const NORM: RmsNorm = RmsNorm { eps: 1e-5, weight_offset: 0.0 };
/// An op that updates its one operand in place.
const UPDATE: Broadcast = Broadcast { axis: MeshAxis::Tensor, root: 0 };

/// A program of ten values, six nodes and three segments, whose node 2 updates the state %3 to %6.
fn sample() -> Program {
    let build = || -> Result<Program> {
        let mut program = ProgramBuilder::new("sample");
        program.bounded("t");
        let ids = program.input("ids", tensor("i32[?t]"))?;
        let Some(OperandType::Weight(embed)) = operand("weight f32[32, 8]") else { panic!() };
        let embed = program.weight("embed", WeightExpr::tensor("embed"), embed)?;
        let norm = program.vector("norm", WeightExpr::tensor("norm"), tensor("f32[8]"))?;
        let state = program.state("memory", tensor("f32[4, 8]"))?;
        let op = Embed { dtype: DType::F32, first_row: 0, position_offset: 0 };
        let x = program.call(op, [Some(ids), Some(embed), None, None])?;
        let normed = program.call(NORM, [Some(x), Some(norm)])?;
        let updated = program.call(UPDATE, [Some(state)])?;
        let rows = program.call(GatherRows {}, [Some(updated), Some(ids)])?;
        let sum = program.call(Add { alpha: 1.0 }, [Some(normed), Some(rows), None, None])?;
        program.segment("mask", SegmentKind::Host);
        program.segment("sample", SegmentKind::Eager);
        let tokens = program.call(Argmax {}, [Some(sum)])?;
        program.finish(&[tokens, updated])
    };
    build().unwrap()
}

#[test]
fn the_sample_is_valid() {
    let program = sample();
    assert_eq!((program.values.len(), program.nodes.len(), program.segments.len()), (10, 6, 3));
    program.validate().unwrap();
    assert_eq!(program.symbols().iter().map(|name| &**name).collect::<Vec<_>>(), ["t"]);
    assert_eq!(
        program.values_from(|origin| *origin == Origin::State).map(|(id, _)| id).collect::<Vec<_>>(),
        [id(3)]
    );
}

#[rstest]
#[case::use_before_definition(|p: &mut Program| p.nodes[1].call.operands[0] = Some(id(8)),
    "node 1 (rms_norm): uses %8 before it is defined")]
#[case::nodes_swapped(|p: &mut Program| p.nodes.swap(0, 1), "node 0 (rms_norm): uses %4 before it is defined")]
#[case::use_after_update(|p: &mut Program| p.nodes[3].call.operands[0] = Some(id(3)),
    "node 3 (gather_rows): uses %3 after it was updated")]
#[case::no_such_operand(|p: &mut Program| p.nodes[3].call.operands[0] = Some(id(99)), "value %99 does not exist")]
#[case::no_such_result(|p: &mut Program| p.nodes[3].call.results[0] = id(usize::MAX), "value %4294967295 does not exist")]
#[case::defined_twice(|p: &mut Program| p.nodes[1].call.results[0] = id(4), "node 1 (rms_norm): %4 is also defined elsewhere")]
#[case::result_is_an_input(|p: &mut Program| p.nodes[0].call.results[0] = id(0), "%0 is also defined elsewhere")]
#[case::result_of_no_node(|p: &mut Program| { p.values.push(Value { origin: Origin::Node(9), ..p.values[4].clone() }) },
    "%10 is not the result of any node")]
#[case::output_was_updated(|p: &mut Program| p.outputs.push(id(3)), "output %3 is undefined or was updated")]
#[case::no_such_output(|p: &mut Program| p.outputs.push(id(99)), "output %99 is undefined or was updated")]
#[case::bounded_after_the_first(|p: &mut Program| set_type(p, 2, "f32[8, ?t]"), "%2: dimension 1 is bounded")]
#[case::bounded_without_extent(|p: &mut Program| p.extents.clear(), "%0: size ?t has no extent")]
#[case::extent_twice(|p: &mut Program| p.extents.push("t".into()), "extent t is listed twice")]
#[case::extent_without_name(|p: &mut Program| p.extents.push("".into()), "size name \"\" is invalid")]
#[case::size_that_text_cannot_name(|p: &mut Program| {
    p.values[2].value_type = OperandType::Tensor(TensorType::new(DType::F32, [Size::bucket("a, b")]));
}, "%2: size name \"a, b\" is invalid")]
#[case::too_many_dimensions(|p: &mut Program| set_type(p, 2, "f32[1, 1, 1, 1, 1, 1, 1]"), "%2: has 7 dimensions")]
#[case::in_a_host_segment(|p: &mut Program| p.nodes[5].segment = 1, "node 5 (argmax): is in a host segment")]
#[case::in_a_wait_segment(|p: &mut Program| p.segments[2].kind = SegmentKind::Wait, "is in a wait segment")]
#[case::in_no_segment(|p: &mut Program| p.nodes[5].segment = 3, "node 5 (argmax): segment 3 does not exist")]
#[case::segments_out_of_order(|p: &mut Program| p.nodes[1].segment = 2, "node 2 returns to segment 0")]
#[case::wrong_result_type(|p: &mut Program| set_type(p, 5, "f16[?t, 8]"), "node 1 (rms_norm): %5 is f32[?t, 8], not")]
#[case::wrong_result_size(|p: &mut Program| set_type(p, 9, "i32[4]"), "%9 is i32[?t], not")]
#[case::wrong_operand(|p: &mut Program| p.nodes[1].call.operands[1] = Some(id(4)),
    "rms_norm.weight.rank: has 2 dimensions, needs 1 (node 1)")]
#[case::too_few_results(|p: &mut Program| p.nodes[5].call.results.clear(), "node 5 (argmax): has 1 results, not 0")]
#[case::too_few_operands(|p: &mut Program| p.nodes[5].call.operands.clear(), "has 0 operands, needs 1 (node 5)")]
#[case::weight_updated(|p: &mut Program| p.values[3].origin = Origin::Weight(WeightExpr::tensor("memory")),
    "node 2 (broadcast): updates %3, which is a weight")]
#[case::name_used_twice(|p: &mut Program| p.values[2].name = "ids".into(), "%2: the name \"ids\" is used twice")]
#[case::no_name(|p: &mut Program| p.values[2].name.clear(), "%2: has no name")]
#[case::named_result(|p: &mut Program| p.values[5].name = "normed".into(), "%5: is a result")]
#[case::packed_input(|p: &mut Program| p.values[0].value_type = operand("weight f32[8, 8]").unwrap(),
    "%0: has a packed type, but is not a weight")]
#[case::half_a_block(|p: &mut Program| p.values[1].value_type = operand("weight q8_0[8, 33]").unwrap(),
    "%1.shape: 33 columns cannot be stored as q8_0")]
#[case::overflowing_weight(|p: &mut Program| {
    p.values[1].value_type = operand("weight f32[9223372036854775807, 4, 8]").unwrap();
}, "%1.shape: [9223372036854775807, 4, 8] bytes overflow")]
#[case::sharded_over_a_missing_dimension(|p: &mut Program| {
    p.values[3].placements.set(MeshAxis::Tensor, Placement::Sharded(2));
}, "%3: is sharded(2) over tensor, but has 2 dimensions")]
fn broken_programs_are_refused(#[case] edit: impl FnOnce(&mut Program), #[case] message: &str) {
    let mut program = sample();
    edit(&mut program);
    let error = program.validate().unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

fn set_type(program: &mut Program, index: usize, text: &str) {
    program.values[index].value_type = operand(text).unwrap();
}

/// A call that updates two operands in place cannot have one value for both.
#[test]
fn an_updated_operand_occurs_once_in_its_call() {
    let mut program = ProgramBuilder::new("twice");
    let cache = program.state("cache", tensor("f32[4, 2, 8, 4]")).unwrap();
    let rows = program.input("rows", tensor("f32[3, 8]")).unwrap();
    let slots = program.input("slots", tensor("i32[3]")).unwrap();
    let operands = [cache, cache, rows, rows, slots].map(Some);
    program.calls(dsrun_core::op::KvWrite {}, operands).unwrap();
    let error = program.finish(&[]).unwrap_err().to_string();
    assert!(error.contains("updates %0, which is also another operand"), "{error}");
}

#[test]
fn the_builder_reports_mistakes_at_the_call() {
    let mut program = ProgramBuilder::new("mistakes");
    let x = program.input("x", tensor("f32[4, 8]")).unwrap();
    assert_eq!(program.input("x", tensor("f32[4]")).unwrap_err().argument(), Some("x"));
    assert_eq!(program.state("", tensor("f32[4]")).unwrap_err().message(), "has no name");
    let error = program.input("y", tensor("f32[?t]")).unwrap_err();
    assert_eq!((error.argument(), error.message()), (Some("y"), "size ?t has no extent"));
    let error = program.call(NORM, [Some(x), Some(x)]).unwrap_err();
    assert_eq!(
        (error.op(), error.argument(), error.field_name()),
        (Some("rms_norm"), Some("weight"), Some("rank"))
    );
    let error = program.call(NORM, [Some(x), Some(id(7))]).unwrap_err();
    assert_eq!((error.op(), error.message()), (Some("rms_norm"), "value %7 does not exist"));

    // The program has none of the refused calls, nor the call without the requested result.
    let send = Send { axis: MeshAxis::Pipeline, peer: 1 };
    assert_eq!(program.call(send, [Some(x)]).unwrap_err().op(), Some("send"));
    let program = program.finish(&[x]).unwrap();
    assert_eq!((program.nodes.len(), program.values.len()), (0, 1));
}

#[test]
fn the_builder_validates_the_whole_program() {
    let mut program = ProgramBuilder::new("gone");
    let x = program.state("x", tensor("f32[4, 8]")).unwrap();
    program.call(UPDATE, [Some(x)]).unwrap();
    program.call(UPDATE, [Some(x)]).unwrap();
    let error = program.finish(&[]).unwrap_err();
    assert_eq!((error.op(), error.message()), (Some("node 1 (broadcast)"), "uses %0 after it was updated"));

    let mut program = ProgramBuilder::new("host");
    program.segment("mask", SegmentKind::Host);
    program.calls(Barrier { axis: MeshAxis::Data }, []).unwrap();
    assert!(program.finish(&[]).unwrap_err().message().contains("host segment"));
}

#[test]
fn collectives_run_on_the_communication_lane() {
    let mut program = ProgramBuilder::new("lanes");
    let x = program.state("x", tensor("f32[4, 8]")).unwrap();
    program.calls(Send { axis: MeshAxis::Pipeline, peer: 1 }, [Some(x)]).unwrap();
    program.calls(Cast { dtype: DType::F16 }, [Some(x)]).unwrap();
    let lanes: Vec<Lane> = program.finish(&[]).unwrap().nodes.iter().map(|node| node.lane).collect();
    assert_eq!(lanes, [Lane::Communication, Lane::Compute]);
}

/// The first declared segment replaces the default segment; segments of host work are kept.
#[test]
fn only_host_segments_are_kept_before_the_first_call() {
    let mut program = ProgramBuilder::new("segments");
    program.segment("wait", SegmentKind::Wait);
    program.segment("eager", SegmentKind::Eager);
    program.segment("graph", SegmentKind::Graph);
    let x = program.state("x", tensor("f32[4, 8]")).unwrap();
    let x = program.call(Cast { dtype: DType::F16 }, [Some(x)]).unwrap();
    program.segment("after", SegmentKind::Eager);
    let program = program.finish(&[x]).unwrap();
    let kinds = [("wait", SegmentKind::Wait), ("graph", SegmentKind::Graph), ("after", SegmentKind::Eager)];
    let expected = kinds.map(|(name, kind)| Segment { name: name.into(), kind });
    assert_eq!(program.segments, expected);
    assert_eq!(program.nodes[0].segment, 1);
}
