//! Regions: inference, lowering to the body, and refusal of invalid bodies.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/types.rs"]
mod types;

use dsrun_core::{
    DType,
    op::{
        Activation, Add, AllReduce, Axis, Broadcast, Cast, GateLayout, GatedActivation, LayerNorm, Linear,
        MeshAxis, Nonlinearity, Op, OperandType, PageScatter, Reduction, RmsNorm, Rope, RopePairing,
    },
    program::{Call, Lane, Node, Program, ProgramBuilder, ValueId},
    region::{
        Region,
        well_known::{self, AttentionInput, Heads, Norm},
    },
};
use rstest::rstest;
use std::sync::Arc;
use types::operand;

const ADD: Add = Add { alpha: 1.0 };
const NORM: RmsNorm = RmsNorm { eps: 1e-5, weight_offset: 0.0 };
const LAYER_NORM: LayerNorm = LayerNorm { eps: 1e-5 };
const ACTIVATION: Activation = Activation { function: Nonlinearity::GeluTanh, limit: 0.0 };
const ROPE: Rope = Rope { heads: 4, pairing: RopePairing::Halves, scale: 1.0 };
const ATTENTION_INPUT: AttentionInput =
    AttentionInput { norm: Norm::Rms(NORM), dtype: DType::F16, bias: true, heads: HEADS };
const HEADS: Heads = Heads {
    columns: [32, 16, 16],
    head_norms: Some([NORM, NORM]),
    ropes: Some([ROPE, Rope { heads: 2, ..ROPE }]),
};

fn gated(layout: GateLayout) -> GatedActivation {
    GatedActivation { function: Nonlinearity::Silu, layout, limit: 0.0, up_offset: 0.0 }
}

const SUM: AllReduce = AllReduce { axis: MeshAxis::Tensor, reduction: Reduction::Sum };
const CAST: Cast = Cast { dtype: DType::F16 };
/// An op that updates its one operand in place.
const UPDATE: Broadcast = Broadcast { axis: MeshAxis::Tensor, root: 0 };

/// The types of a call's results, as texts.
fn infer(op: &Op, operands: &[Option<OperandType>]) -> dsrun_core::Result<Vec<String>> {
    Ok(op.infer(operands)?.iter().map(ToString::to_string).collect())
}

fn ids<const N: usize>(indices: [usize; N]) -> Vec<ValueId> {
    indices.map(ValueId::new).into()
}

fn call<const N: usize, const M: usize>(
    op: impl Into<Op>,
    operands: [usize; N],
    results: [usize; M],
) -> Call {
    Call::new(op, operands.map(|index| Some(ValueId::new(index))).into(), ids(results))
}

fn add(operands: [usize; 2], result: usize) -> Call {
    let [a, b] = operands.map(|index| Some(ValueId::new(index)));
    Call::new(ADD, vec![a, b, None, None], ids([result]))
}

fn types<const N: usize>(texts: [&str; N]) -> Vec<Option<OperandType>> {
    texts.map(operand).into()
}

fn region_op(region: Region) -> Op {
    Op::Region(Arc::new(region))
}

#[test]
fn add_rms_norm_has_the_sum_and_the_norm() {
    let op = region_op(well_known::add_rms_norm(ADD, NORM).unwrap());
    assert_eq!(op.name(), "add_rms_norm");
    let right = types(["bf16[?t, 64]", "bf16[?t, 64]", "f32[64]"]);
    assert_eq!(infer(&op, &right).unwrap(), ["bf16[?t, 64]", "bf16[?t, 64]"]);
    let error = infer(&op, &types(["bf16[?t, 64]", "f16[?t, 64]", "f32[64]"])).unwrap_err();
    // The error names the innermost op.
    assert_eq!((error.op(), error.argument(), error.field_name()), (Some("add"), Some("b"), Some("dtype")));
    let error = infer(&op, &right[..2]).unwrap_err();
    assert_eq!((error.op(), error.field_name()), (Some("add_rms_norm"), Some("operands")));
}

#[rstest]
#[case(false, &["f16[?t, 64]", "f32[64]", "weight q4_0[96, 64]"])]
#[case(true, &["f16[?t, 64]", "f32[64]", "weight q4_0[96, 64]", "f32[96]"])]
fn norm_linear_has_the_result_of_the_layer(#[case] bias: bool, #[case] operands: &[&str]) {
    let op = region_op(well_known::norm_linear(NORM, DType::BF16, bias).unwrap());
    let mut operands: Vec<_> = operands.iter().map(|text| operand(text)).collect();
    assert_eq!(infer(&op, &operands).unwrap(), ["bf16[?t, 96]"]);

    let maps = op.index_maps(&operands).unwrap();
    let ranks: Vec<usize> = maps.operands.iter().map(Vec::len).collect();
    assert_eq!(ranks, [2, 1, 2, 1][..operands.len()]);
    assert!(maps.dimensions.is_empty() && maps.operands.iter().flatten().all(|axis| *axis == Axis::Gathered));

    operands[2] = operand("weight q4_0[96, 32]");
    let error = infer(&op, &operands).unwrap_err();
    assert_eq!(
        (error.op(), error.argument(), error.field_name()),
        (Some("linear"), Some("x"), Some("shape[1]"))
    );
    assert_eq!(op.index_maps(&operands).unwrap_err(), error);
}

#[rstest]
#[case::linear_add(well_known::linear_add(DType::F16, false, ADD),
    &["f16[?t, 32]", "weight q8_0[64, 32]", "f16[?t, 64]"], &["f16[?t, 64]"], &[None])]
#[case::linear_add_with_bias(well_known::linear_add(DType::F16, true, ADD),
    &["f16[?t, 32]", "weight q8_0[64, 32]", "f32[64]", "f16[?t, 64]"], &["f16[?t, 64]"], &[None])]
#[case::norm_linear_of_layer_norm(well_known::norm_linear(LAYER_NORM, DType::F32, true),
    &["f16[?t, 64]", "f32[64]", "f32[64]", "weight f16[96, 64]", "f32[96]"], &["f32[?t, 96]"], &[None])]
#[case::mlp_input(well_known::mlp_input(NORM, DType::BF16, false, gated(GateLayout::Concatenated)),
    &["bf16[?t, 64]", "f32[64]", "weight bf16[96, 64]"], &["bf16[?t, 48]"], &[None])]
#[case::mlp_input_without_gate(well_known::mlp_input(LAYER_NORM, DType::BF16, true, ACTIVATION),
    &["bf16[?t, 64]", "f32[64]", "f32[64]", "weight bf16[96, 64]", "f32[96]"], &["bf16[?t, 96]"], &[None])]
#[case::norm_quant(well_known::norm_quant(NORM), &["bf16[?t, 64]", "f32[64]"], &["i8[?t, 64]", "f32[?t]"], &[None, None])]
#[case::norm_quant_of_layer_norm(well_known::norm_quant(LAYER_NORM),
    &["f16[?t, 64]", "f32[64]", "f32[64]"], &["i8[?t, 64]", "f32[?t]"], &[None, None])]
#[case::gated_activation_quant(well_known::activation_quant(gated(GateLayout::Concatenated)),
    &["bf16[?t, 64]"], &["i8[?t, 32]", "f32[?t]"], &[None, None])]
#[case::gated_activation_quant_of_two(well_known::activation_quant(gated(GateLayout::Separate)),
    &["bf16[?t, 64]", "bf16[?t, 64]"], &["i8[?t, 64]", "f32[?t]"], &[None, None])]
#[case::activation_quant(well_known::activation_quant(ACTIVATION),
    &["bf16[?t, 64]"], &["i8[?t, 64]", "f32[?t]"], &[None, None])]
#[case::linear_w8a8_add(well_known::linear_w8a8_add(DType::F16, true, ADD),
    &["i8[?t, 32]", "f32[?t]", "weight int8[64, 32]", "f32[64]", "f16[?t, 64]"], &["f16[?t, 64]"], &[None])]
#[case::linear_all_reduce(well_known::linear_all_reduce(DType::BF16, true, SUM),
    &["bf16[?t, 32]", "weight bf16[64, 32]", "bf16[64]"], &["bf16[?t, 64]"], &[None])]
#[case::linear_all_reduce_add(well_known::linear_all_reduce_add(DType::BF16, false, SUM, ADD),
    &["bf16[?t, 32]", "weight bf16[64, 32]", "bf16[?t, 64]"], &["bf16[?t, 64]"], &[None])]
#[case::linear_w8a8_activation(well_known::linear_w8a8_activation(DType::F16, false, gated(GateLayout::Interleaved)),
    &["i8[?t, 32]", "f32[?t]", "weight int8_f16[64, 32]"], &["f16[?t, 32]"], &[None])]
#[case::linear_w8a8_activation_without_gate(well_known::linear_w8a8_activation(DType::F32, true, ACTIVATION),
    &["i8[?t, 32]", "f32[?t]", "weight int8[64, 32]", "f32[64]"], &["f32[?t, 64]"], &[None])]
#[case::linear_w8a8_heads(well_known::linear_w8a8_heads(DType::F16, true, Heads { head_norms: None, ..HEADS }),
    &["i8[?t, 32]", "f32[?t]", "weight int8[64, 32]", "f32[64]", "i32[?t]", "f32[4]",
      "f16[$p, 2, 16, 8]", "f16[$p, 2, 16, 8]", "i32[?t]"],
    &["f16[?t, 32]", "f16[$p, 2, 16, 8]", "f16[$p, 2, 16, 8]"], &[None, Some(6), Some(7)])]
#[case::linear_w8a8_heads_with_norms_of_heads(well_known::linear_w8a8_heads(DType::F16, false, HEADS),
    &["i8[?t, 32]", "f32[?t]", "weight int8[64, 32]", "f32[8]", "f32[8]", "i32[?t]", "f32[4]",
      "f16[$p, 2, 16, 8]", "f16[$p, 2, 16, 8]", "i32[?t]"],
    &["f16[?t, 32]", "f16[$p, 2, 16, 8]", "f16[$p, 2, 16, 8]"], &[None, Some(7), Some(8)])]
#[case::attention_input(well_known::attention_input(AttentionInput {
        heads: Heads { head_norms: None, ..HEADS }, ..ATTENTION_INPUT
    }),
    &["f16[?t, 64]", "f32[64]", "weight q4_1[64, 64]", "f32[64]", "i32[?t]", "f32[4]",
      "f16[$p, 2, 16, 8]", "f16[$p, 2, 16, 8]", "i32[?t]"],
    &["f16[?t, 32]", "f16[$p, 2, 16, 8]", "f16[$p, 2, 16, 8]"], &[None, Some(6), Some(7)])]
#[case::attention_input_with_head_norms(well_known::attention_input(ATTENTION_INPUT),
    &["f16[?t, 64]", "f32[64]", "weight q4_1[64, 64]", "f32[64]", "f32[8]", "f32[8]", "i32[?t]", "f32[4]",
      "f16[$p, 2, 16, 8]", "f16[$p, 2, 16, 8]", "i32[?t]"],
    &["f16[?t, 32]", "f16[$p, 2, 16, 8]", "f16[$p, 2, 16, 8]"], &[None, Some(8), Some(9)])]
#[case::attention_input_without_rope(well_known::attention_input(AttentionInput {
        norm: LAYER_NORM.into(), bias: false, heads: Heads { head_norms: None, ropes: None, ..HEADS }, ..ATTENTION_INPUT
    }),
    &["f16[?t, 64]", "f32[64]", "f32[64]", "weight q4_1[64, 64]",
      "f16[$p, 2, 16, 8]", "f16[$p, 2, 16, 8]", "i32[?t]"],
    &["f16[?t, 32]", "f16[$p, 2, 16, 8]", "f16[$p, 2, 16, 8]"], &[None, Some(4), Some(5)])]
fn regions_of_a_layer_infer_their_results(
    #[case] region: dsrun_core::Result<Region>,
    #[case] operands: &[&str],
    #[case] results: &[&str],
    #[case] updates: &[Option<usize>],
) {
    let region = region.unwrap();
    let nameless = Region::new("", region.operands(), region.calls().to_vec(), region.results().to_vec());
    assert_eq!(well_known::named(&nameless.unwrap()).unwrap().name(), region.name());
    let op = region_op(region);
    let types: Vec<_> = operands.iter().map(|text| operand(text)).collect();
    assert_eq!(infer(&op, &types).unwrap(), results);
    let found: Vec<_> = (0..results.len()).map(|result| op.updates(result)).collect();
    assert_eq!(found, updates);
    // No operand may be absent.
    for index in 0..types.len() {
        let mut fewer = types.clone();
        fewer.remove(index);
        assert!(op.infer(&fewer).is_err(), "{} without operand {index}", op.name());
    }
}

#[test]
fn a_different_body_is_not_well_known() {
    let named = |calls: Vec<Call>, results: Vec<ValueId>| {
        well_known::named(&Region::new("linear_add", 3, calls, results).unwrap()).is_some()
    };
    let linear = Call::new(
        Linear { dtype: DType::F32 },
        [Some(0), Some(1), None].map(|id| id.map(ValueId::new)).into(),
        ids([3]),
    );
    assert!(named(vec![linear.clone(), add([2, 3], 4)], ids([4])));
    assert!(!named(vec![linear.clone(), add([3, 2], 4)], ids([4])), "the operands of the sum are swapped");
    assert!(
        !named(vec![linear, add([2, 3], 4)], ids([3, 4])),
        "the result of the linear layer is a result of the region"
    );
}

#[test]
fn incompatible_attributes_are_refused() {
    let error = well_known::mlp_input(NORM, DType::F32, false, gated(GateLayout::Separate)).unwrap_err();
    assert_eq!((error.op(), error.argument()), (Some("mlp_input"), Some("layout")), "{error}");
    let separate = well_known::linear_w8a8_activation(DType::F32, false, gated(GateLayout::Separate));
    let error = separate.unwrap_err();
    assert_eq!((error.op(), error.argument()), (Some("linear_w8a8_activation"), Some("layout")), "{error}");
    let heads = Heads { columns: [u32::MAX, 1, 1], ..HEADS };
    let error = well_known::attention_input(AttentionInput { heads, ..ATTENTION_INPUT }).unwrap_err();
    assert_eq!((error.op(), error.argument()), (Some("attention_input"), Some("columns")), "{error}");
    let error = well_known::linear_w8a8_heads(DType::F32, false, heads).unwrap_err();
    assert_eq!((error.op(), error.argument()), (Some("linear_w8a8_heads"), Some("columns")), "{error}");
}

/// A program of two regions and a primitive; with `fused` false the same program of primitives only.
fn program(fused: bool) -> Program {
    let mut program = ProgramBuilder::new("layer");
    program.bounded("t");
    let tensor = |text| match operand(text) {
        Some(OperandType::Tensor(tensor)) => tensor,
        _ => panic!(),
    };
    let a = program.input("a", tensor("f32[?t, 64]")).unwrap();
    let b = program.input("b", tensor("f32[?t, 64]")).unwrap();
    let norm = program.state("norm", tensor("f32[64]")).unwrap();
    let Some(OperandType::Weight(weight)) = operand("weight f32[96, 64]") else { panic!() };
    let weight = program.weight("up", dsrun_core::WeightExpr::tensor("up"), weight).unwrap();
    let (sum, normed) = if fused {
        let region = region_op(well_known::add_rms_norm(ADD, NORM).unwrap());
        let results = program.calls(region, [a, b, norm].map(Some)).unwrap();
        (results[0], results[1])
    } else {
        let sum = program.call(ADD, [Some(a), Some(b), None, None]).unwrap();
        (sum, program.call(NORM, [sum, norm].map(Some)).unwrap())
    };
    let scaled = program.call(Add { alpha: 0.5 }, [Some(sum), Some(normed), None, None]).unwrap();
    let y = if fused {
        let region = region_op(well_known::norm_linear(NORM, DType::F16, false).unwrap());
        program.call(region, [scaled, norm, weight].map(Some)).unwrap()
    } else {
        let normed = program.call(NORM, [scaled, norm].map(Some)).unwrap();
        program.call(Linear { dtype: DType::F16 }, [Some(normed), Some(weight), None]).unwrap()
    };
    program.finish(&[y, sum]).unwrap()
}

fn types_of(program: &Program, ids: &[ValueId]) -> Vec<OperandType> {
    ids.iter().map(|id| program.value(*id).unwrap().value_type.clone()).collect()
}

#[test]
fn lowering_replaces_regions_by_primitives() {
    let (fused, primitive) = (program(true), program(false));
    assert_eq!((fused.nodes.len(), primitive.nodes.len()), (3, 5));
    let lowered = fused.lower_regions(&mut |_| Ok(false)).unwrap();
    lowered.validate().unwrap();
    let ops = |program: &Program| program.nodes.iter().map(|node| node.call.op.clone()).collect::<Vec<_>>();
    assert_eq!(ops(&lowered), ops(&primitive));
    for (lowered_node, node) in lowered.nodes.iter().zip(&primitive.nodes) {
        let found = types_of(&lowered, &lowered_node.call.results);
        assert_eq!(found, types_of(&primitive, &node.call.results));
        assert_eq!(lowered_node.call.operands.len(), node.call.operands.len());
    }
    // Values keep their numbers, so that ids from before lowering stay valid.
    assert_eq!(lowered.outputs, fused.outputs);
    for (value, before) in lowered.values.iter().zip(&fused.values) {
        assert_eq!(
            (&value.name, &value.value_type, value.placements),
            (&before.name, &before.value_type, before.placements)
        );
    }
    assert_eq!(lowered.values.len(), fused.values.len() + 1, "lowering adds the one value inside a region");
    assert_eq!(lowered.to_string().parse::<Program>().unwrap(), lowered);
}

#[test]
fn lowering_keeps_selected_regions() {
    let fused = program(true);
    let mut is_norm_linear = |node: &Node| Ok(node.call.op.name() == "norm_linear");
    let lowered = fused.lower_regions(&mut is_norm_linear).unwrap();
    let names: Vec<&str> = lowered.nodes.iter().map(|node| node.call.op.name()).collect();
    assert_eq!(names, ["add", "rms_norm", "add", "norm_linear"]);
    assert_eq!(fused.lower_regions(&mut |_| Ok(true)).unwrap(), fused);
    let error = fused.lower_regions(&mut |_| Err(dsrun_core::Error::internal("lost"))).unwrap_err();
    assert_eq!(error.message(), "lost");
}

/// A region is a collective if its body has one.
#[test]
fn the_axis_of_a_region_is_that_of_its_collectives() {
    let summed = vec![add([0, 1], 2), call(SUM, [2], [3]), add([0, 3], 4)];
    let summed = region_op(Region::new("summed", 2, summed, ids([4])).unwrap());
    assert_eq!(summed.mesh_axis(), Some(MeshAxis::Tensor));
    assert_eq!(Lane::usual(&summed), Lane::Compute);
    let plain = region_op(Region::new("plain", 2, vec![add([0, 1], 2)], ids([2])).unwrap());
    assert_eq!(plain.mesh_axis(), None);
}

#[test]
fn equality_ignores_names() {
    let calls = vec![add([0, 1], 2), call(CAST, [2], [3])];
    let region = |name: &str| Region::new(name, 2, calls.clone(), ids([3])).unwrap();
    assert_eq!(region("one"), region("two"));
    assert_eq!(region("one").encoding(), region("two").encoding());
    let encoding = "(2) { %2 = add{alpha=1.0}(%0, %1, _, _); %3 = cast{dtype=f16}(%2); return %3 }";
    assert_eq!(region("one").encoding(), encoding);
    assert_eq!(region("one").to_string(), format!("region \"one\" {encoding}"));
}

/// Different bodies have different encodings, and equality agrees with the encoding.
#[test]
fn different_bodies_are_different() {
    let signed = |alpha: f32| {
        let calls = vec![Call::new(Add { alpha }, add([0, 1], 2).operands, ids([2]))];
        Region::new("", 2, calls, ids([2])).unwrap()
    };
    let two = |results| Region::new("", 2, vec![add([0, 1], 2), add([0, 2], 3)], results).unwrap();
    let regions = [
        signed(1.0),
        signed(0.0),
        signed(-0.0),
        signed(f32::NAN),
        Region::new("", 2, vec![add([1, 0], 2)], ids([2])).unwrap(),
        two(ids([2, 3])),
        two(ids([3, 2])),
        two(ids([3])),
    ];
    for (i, a) in regions.iter().enumerate() {
        for (j, b) in regions.iter().enumerate() {
            assert_eq!(a == b, i == j, "{a} and {b}");
            assert_eq!(a.encoding() == b.encoding(), i == j);
        }
    }
}

#[rstest]
#[case::empty(2, vec![], vec![0], "needs a body")]
#[case::no_result(2, vec![add([0, 1], 2)], vec![], "needs a body and a result")]
#[case::nested(2, vec![Call::new(region_op(well_known::add_rms_norm(ADD, NORM).unwrap()), vec![], vec![])], vec![2],
    "call 0 of the body is a region")]
#[case::use_before_definition(2, vec![add([0, 3], 2), add([1, 0], 3)], vec![3], "call 0 uses %3 before it is defined")]
#[case::use_of_own_result(2, vec![add([0, 1], 2), add([3, 1], 3)], vec![3], "call 1 uses %3 before it is defined")]
#[case::not_numbered_in_order(2, vec![add([0, 1], 3)], vec![3], "defines %3 where %2 is next")]
#[case::defined_twice(2, vec![add([0, 1], 2), add([0, 1], 2)], vec![2], "defines %2 where %3 is next")]
#[case::result_is_an_operand(2, vec![add([0, 1], 2)], vec![1], "result %1 is not defined by the body")]
#[case::undefined_result(2, vec![add([0, 1], 2)], vec![3], "result %3 is not defined by the body")]
#[case::result_twice(2, vec![add([0, 1], 2)], vec![2, 2], "result %2 was updated, or is listed twice")]
#[case::unused(3, vec![add([0, 1], 3)], vec![3], "operand %2 is not used")]
#[case::too_many(4097, vec![add([0, 1], 4097)], vec![4097], "4097 operands, at most 4096")]
#[case::absurdly_many(usize::MAX, vec![add([0, 1], 2)], vec![2], "at most 4096")]
#[case::too_few_operands(2, vec![call(ADD, [0, 1], [2])], vec![2], "call 0 has 2 operands and 1 results")]
#[case::too_many_results(1, vec![call(CAST, [0], [1, 2]), call(CAST, [2], [3])], vec![3], "cast has 1 and 1")]
#[case::too_few_results(1, vec![call(CAST, [0], []), call(CAST, [0], [1])], vec![1], "1 operands and 0 results")]
#[case::use_after_update(1, vec![call(UPDATE, [0], [1]), call(CAST, [0], [2])], vec![1, 2],
    "call 1 uses %0 after it was updated")]
#[case::result_was_updated(2, vec![add([0, 1], 2), call(UPDATE, [2], [3])], vec![2, 3], "result %2 was updated")]
#[case::two_axes(1, vec![call(SUM, [0], [1]), call(AllReduce { axis: MeshAxis::Expert, ..SUM }, [1], [2])], vec![2],
    "the body has collectives over tensor and over expert")]
#[case::update_is_lost(2, vec![call(UPDATE, [0], [2]), add([1, 2], 3)], vec![3],
    "operand %0 is updated, but its new value is not a result")]
fn invalid_bodies_are_refused(
    #[case] operands: usize,
    #[case] calls: Vec<Call>,
    #[case] results: Vec<usize>,
    #[case] message: &str,
) {
    let results = results.into_iter().map(ValueId::new).collect();
    let error = Region::new("bad", operands, calls, results).unwrap_err();
    assert_eq!(error.op(), Some("bad"));
    assert!(error.message().contains(message), "{error}");
}

#[test]
fn an_updated_operand_occurs_once_in_its_call() {
    let write = call(dsrun_core::op::KvWrite {}, [0, 0, 1, 1, 2], [3, 4]);
    let error = Region::new("twice", 3, vec![write], ids([3, 4])).unwrap_err();
    assert!(error.message().contains("updates %0, which is also another operand"), "{error}");
}

#[test]
fn updates_are_followed_through_the_body() {
    // %0 cache, %1 rows, %2 pages, %3 a, %4 b; the cache is updated twice, the sum has its own storage.
    let calls = vec![
        call(PageScatter {}, [0, 1, 2], [5]),
        add([3, 4], 6),
        call(PageScatter {}, [5, 1, 2], [7]),
        call(UPDATE, [6], [8]),
    ];
    let op = region_op(Region::new("chain", 5, calls, ids([8, 7])).unwrap());
    assert_eq!((op.updates(0), op.updates(1), op.updates(2)), (None, Some(0), None));

    let mut program = ProgramBuilder::new("chain");
    let mut declare = |name: &str, text| match operand(text) {
        Some(OperandType::Tensor(tensor)) => program.state(name, tensor).unwrap(),
        _ => panic!(),
    };
    let cache = declare("cache", "f16[4, 2, 8, 4]");
    let (rows, pages) = (declare("rows", "f16[3, 64]"), declare("pages", "i32[3]"));
    let a = declare("a", "f32[4, 8]");
    let results = program.calls(op, [cache, rows, pages, a, a].map(Some)).unwrap();
    let fused = program.finish(&results).unwrap();
    let lowered = fused.lower_regions(&mut |_| Ok(false)).unwrap();
    assert_eq!(lowered.outputs, results);

    // The region updates the cache as its body does, so neither program may use the old value afterwards.
    for mut program in [fused, lowered] {
        program.outputs.push(cache);
        let error = program.validate().unwrap_err();
        assert!(error.message().contains("output %0 is undefined or was updated"), "{error}");
    }
}
