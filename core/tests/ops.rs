//! Tests of every primitive over one table of valid calls: inference, refusal of each wrong operand and attribute, and
//! iteration spaces that fit the shapes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/calls.rs"]
mod calls;
#[path = "support/misfits.rs"]
mod misfits;
#[path = "support/types.rs"]
mod types;

use calls::{
    ACTIVATION, ALL_REDUCE, ATTENTION, AXIS, COLUMNS, COMBINE, Case, EMBED, GATED, GATHER, GROUP, GROUPED,
    HEAD_LINEAR, PAGED, RMS_NORM, ROPE, ROUTE, SCATTER, valid,
};
use dsrun_core::{
    Code, DType, Error, Size,
    op::{
        Activation, Add, AllGather, AllReduce, AllToAll, Argmax, Attention, AttentionMask, AttributeValue,
        Axis, Cast, Columns, DimensionKind, Embed, GateLayout, GatedActivation, GroupedLinear, HeadLinear,
        LayerNorm, Linear, LinearA8, LinearW8A8, MoeCombine, MoeGroup, MoeRoute, Op, OperandKind,
        OperandType, PageGather, PagedAttention, PrepareStep, QuantPerGroup, ReduceScatter, Reduction,
        RmsNorm, Rope, RouterScore,
    },
};
use misfits::MISFITS;
use rstest::rstest;
use std::collections::HashSet;
use types::operand;

/// The types of a call's results, as texts.
fn infer(op: &Op, operands: &[Option<OperandType>]) -> dsrun_core::Result<Vec<String>> {
    Ok(op.infer(operands)?.iter().map(ToString::to_string).collect())
}

/// The first valid call of an op.
fn case_of(name: &str) -> Case {
    valid().into_iter().find(|case| case.name() == name).unwrap()
}

/// The first valid call of an op that has this operand, and the index of the operand.
fn case_with(name: &str, operand: &str) -> (Case, usize) {
    let with = |case: Case| {
        let specs = case.op.signature().unwrap().operands;
        let index = specs.iter().position(|spec| spec.name == operand).unwrap();
        case.operands[index].is_some().then_some((case, index))
    };
    valid().into_iter().filter(|case| case.name() == name).find_map(with).unwrap()
}

/// Asserts that an error names op, argument and field.
#[track_caller]
fn assert_names(error: &Error, op: &str, argument: &str, field: Option<&str>) {
    let found = (error.op(), error.argument(), error.field_name());
    assert_eq!(found, (Some(op), Some(argument), field), "{error}");
    assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    assert!(!error.message().is_empty());
}

#[test]
fn the_table_has_every_primitive_and_every_operand() {
    let cases = valid();
    let names: HashSet<&str> = cases.iter().map(Case::name).collect();
    assert_eq!(names.len(), Op::PRIMITIVES.len(), "two primitives have one name, or one has no case");
    for signature in Op::PRIMITIVES {
        assert!(names.contains(signature.name), "{} has no valid call", signature.name);
        let first = case_of(signature.name);
        let exclusive = ["gated_activation", "moe_route"].contains(&signature.name);
        let full = first.operands.iter().all(Option::is_some) || exclusive;
        assert!(full, "the first call of {} does not have all operands", signature.name);
    }
}

#[test]
fn valid_calls_infer_the_documented_results() {
    for case in valid() {
        assert_eq!(infer(&case.op, &case.operands).unwrap(), case.results, "{}", case.op);
        assert_eq!(case.op.signature().unwrap().results.len(), case.results.len(), "{}", case.op);
    }
}

#[test]
fn signatures_are_consistent() {
    for case in valid() {
        let signature = case.op.signature().unwrap();
        for (index, result) in signature.results.iter().enumerate() {
            assert_eq!(case.op.updates(index), result.updates);
            let Some(updated) = result.updates else { continue };
            // An update in place cannot change the type.
            let Some(OperandType::Tensor(tensor)) = &case.operands[updated] else { panic!("{}", case.op) };
            assert_eq!(tensor.to_string(), case.results[index], "{}", case.op);
        }
        let names: HashSet<&str> = signature.operands.iter().map(|operand| operand.name).collect();
        assert_eq!(names.len(), signature.operands.len(), "{}", signature.name);
    }
}

#[test]
fn attributes_round_trip_as_text_and_none_has_a_default() {
    for case in valid() {
        let attributes = case.op.attributes();
        let names: Vec<&str> = attributes.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, Op::attribute_names(case.name()));
        let text_of = |wanted: &str| Some(attributes.iter().find(|(name, _)| *name == wanted)?.1.to_string());
        assert_eq!(Op::from_texts(case.name(), &text_of).unwrap(), case.op);
        for attribute in names {
            let missing = |name: &str| text_of(name).filter(|_| name != attribute);
            assert_names(&Op::from_texts(case.name(), &missing).unwrap_err(), case.name(), attribute, None);
            let wrong = |name: &str| if name == attribute { Some("no_value".into()) } else { text_of(name) };
            assert_names(&Op::from_texts(case.name(), &wrong).unwrap_err(), case.name(), attribute, None);
        }
    }
    assert_eq!(Op::from_texts("no_op", &|_| None).unwrap_err().code(), Code::Unsupported);
}

#[test]
fn missing_operands_are_named() {
    for case in valid() {
        for (index, spec) in case.op.signature().unwrap().operands.iter().enumerate() {
            if !spec.optional {
                let error = infer(&case.op, &case.with(index, None)).unwrap_err();
                assert_names(&error, case.name(), spec.name, None);
            }
        }
        let mut operands = case.operands.clone();
        operands.push(None);
        let error = infer(&case.op, &operands).unwrap_err();
        assert_eq!((error.op(), error.field_name()), (Some(case.name()), Some("operands")), "{error}");
    }
}

#[test]
fn operands_of_the_wrong_type_are_named() {
    for case in valid() {
        for (index, spec) in case.op.signature().unwrap().operands.iter().enumerate() {
            let Some(right) = &case.operands[index] else { continue };
            let (wrong, field) = match (right, spec.kind) {
                (OperandType::Tensor(right), kind) => {
                    let dtype = match kind {
                        OperandKind::Float | OperandKind::Cache => DType::I32,
                        OperandKind::F32 => DType::F16,
                        OperandKind::I32 => DType::U32,
                        OperandKind::U32 | OperandKind::I8 => DType::I32,
                        OperandKind::Any | OperandKind::Weight => right.dtype,
                    };
                    let mut tensor = right.clone();
                    tensor.dtype = dtype;
                    let wrong = if kind == OperandKind::Any {
                        operand("weight f32[8, 8]").unwrap()
                    } else {
                        OperandType::Tensor(tensor)
                    };
                    (wrong, (kind != OperandKind::Any).then_some("dtype"))
                }
                (OperandType::Weight(_), _) => (operand("f32[100, 64]").unwrap(), None),
            };
            let error = infer(&case.op, &case.with(index, Some(wrong))).unwrap_err();
            assert_names(&error, case.name(), spec.name, field);
        }
    }
}

#[test]
fn operands_of_the_wrong_rank_are_named() {
    for case in valid() {
        for (index, spec) in case.op.signature().unwrap().operands.iter().enumerate() {
            for longer in [true, false] {
                let mut wrong = match &case.operands[index] {
                    Some(right) => right.clone(),
                    None => continue,
                };
                match &mut wrong {
                    OperandType::Tensor(tensor) if longer => tensor.shape.push(2.into()),
                    OperandType::Tensor(tensor) => drop(tensor.shape.pop()),
                    OperandType::Weight(weight) if longer => weight.shape.push(32),
                    OperandType::Weight(weight) => drop(weight.shape.pop()),
                }
                let error = infer(&case.op, &case.with(index, Some(wrong))).unwrap_err();
                assert_names(&error, case.name(), spec.name, Some("rank"));
            }
        }
    }
    let error = infer(&Argmax {}.into(), &[operand("f32[1, 1, 1, 1, 1, 1, 1]")]).unwrap_err();
    assert_names(&error, "argmax", "x", None);
}

#[test]
fn operands_that_do_not_fit_are_named() {
    for (op, name, instead, argument, field) in MISFITS {
        let (case, index) = case_with(op, name);
        let Err(error) = infer(&case.op, &case.with(index, operand(instead))) else {
            panic!("{op} takes {instead} as {name}");
        };
        assert_names(&error, op, argument, Some(field));
    }
}

#[test]
fn sums_that_could_overflow_are_refused() {
    let call = |inputs: usize| {
        let [x, weight] = [format!("i8[?t, {inputs}]"), format!("weight int8[96, {inputs}]")];
        let operands = [x.as_str(), "f32[?t]", &weight, "_"].map(operand);
        infer(&LinearW8A8 { dtype: DType::F32 }.into(), &operands)
    };
    assert!(call(LinearW8A8::MAX_INPUTS).is_ok());
    let error = call(LinearW8A8::MAX_INPUTS + 1).unwrap_err();
    assert_names(&error, "linear_w8a8", "weight", Some("shape[1]"));
}

/// Changes every size of every valid call. Either the call stays valid, or the error names an operand that has a row in the
/// table of misfits.
#[test]
fn every_size_that_is_not_free_has_a_misfit() {
    for case in valid() {
        let signature = case.op.signature().unwrap();
        let attributes = Op::attribute_names(signature.name);
        for (index, spec) in signature.operands.iter().enumerate() {
            let Some(right) = &case.operands[index] else { continue };
            let rank = match right {
                OperandType::Tensor(tensor) => tensor.shape.len(),
                OperandType::Weight(weight) => weight.shape.len(),
            };
            for dimension in 0..rank {
                let mut wrong = right.clone();
                match &mut wrong {
                    OperandType::Tensor(tensor) => {
                        let size = &mut tensor.shape[dimension];
                        *size =
                            size.known().map_or_else(|| Size::bucket("other"), |size| Size::Static(size + 1));
                    }
                    OperandType::Weight(weight) => weight.shape[dimension] += 32,
                }
                let Err(error) = infer(&case.op, &case.with(index, Some(wrong))) else { continue };
                assert_eq!(error.op(), Some(signature.name));
                let argument = error.argument().unwrap();
                let of_operand = signature.operands.iter().any(|operand| operand.name == argument)
                    && error.field_name().is_some_and(|field| field.starts_with("shape["));
                assert!(of_operand || attributes.contains(&argument), "{error}");
                let listed =
                    MISFITS.iter().any(|(op, operand, ..)| (*op, *operand) == (signature.name, spec.name));
                assert!(
                    listed,
                    "the table of misfits has no row for {}.{}: {error}",
                    signature.name, spec.name
                );
            }
        }
    }
}

/// Attribute values that have the right type but are refused, with the argument and field that the error names.
fn refused_attributes() -> Vec<(&'static str, Op, &'static str, Option<&'static str>)> {
    let mut refused: Vec<(&'static str, Op, &'static str, Option<&'static str>)> = Vec::new();
    let mut add = |attribute, op: Op| refused.push((attribute, op, attribute, None));
    add("dtype", Embed { dtype: DType::I32, ..EMBED }.into());
    add("dtype", LinearW8A8 { dtype: DType::I8 }.into());
    add("dtype", LinearA8 { dtype: DType::I8, group: 32 }.into());
    add("group", LinearA8 { dtype: DType::F32, group: 0 }.into());
    add("group", QuantPerGroup { group: 0 }.into());
    for eps in [-1e-5, f32::NAN, f32::INFINITY] {
        add("eps", RmsNorm { eps, ..RMS_NORM }.into());
        add("eps", LayerNorm { eps }.into());
    }
    add("weight_offset", RmsNorm { weight_offset: f32::NAN, ..RMS_NORM }.into());
    add("dtype", Linear { dtype: DType::U8 }.into());
    add("dtype", Cast { dtype: DType::U32 }.into());
    for limit in [-1.0, f32::NAN, f32::INFINITY] {
        add("limit", Activation { limit, ..ACTIVATION }.into());
        add("limit", GatedActivation { limit, ..GATED }.into());
    }
    for up_offset in [f32::NAN, f32::INFINITY] {
        add("up_offset", GatedActivation { up_offset, ..GATED }.into());
    }
    for top_k in [0, 9] {
        add("top_k", MoeRoute { top_k, ..ROUTE }.into());
    }
    for groups in [0, 3] {
        add("groups", MoeRoute { groups, ..ROUTE }.into());
    }
    for top_groups in [0, 5] {
        add("top_groups", MoeRoute { top_groups, ..ROUTE }.into());
    }
    // The experts of one group are too few.
    add("top_groups", MoeRoute { top_k: 3, top_groups: 1, ..ROUTE }.into());
    for bad in [-1.0, f32::NAN, f32::INFINITY] {
        add("eps", MoeRoute { eps: bad, ..ROUTE }.into());
        add("threshold", MoeRoute { threshold: bad, ..ROUTE }.into());
    }
    add("scale", MoeRoute { scale: f32::NAN, ..ROUTE }.into());
    for count in [0, u32::MAX] {
        add("count", MoeGroup { count, ..GROUP }.into());
        add("count", GroupedLinear { count, ..GROUPED }.into());
        add("count", MoeCombine { count, ..COMBINE }.into());
    }
    let first_expert = i32::MAX as u32;
    add("first_expert", MoeGroup { first_expert, ..GROUP }.into());
    add("first_expert", GroupedLinear { first_expert, ..GROUPED }.into());
    add("first_expert", MoeCombine { first_expert, ..COMBINE }.into());
    add("dtype", GroupedLinear { dtype: DType::I8, ..GROUPED }.into());
    for heads in [0, 5, u32::MAX] {
        add("heads", Rope { heads, ..ROPE }.into());
        add("query_heads", PagedAttention { query_heads: heads, ..PAGED }.into());
        add("heads", HeadLinear { heads: if heads == 5 { 3 } else { heads }, ..HEAD_LINEAR }.into());
        add("query_heads", Attention { query_heads: heads, ..ATTENTION }.into());
    }
    for (scale, softcap) in [(f32::NAN, 0.0), (f32::INFINITY, 0.0)] {
        add("scale", Rope { scale, ..ROPE }.into());
        add("scale", PagedAttention { scale, softcap, ..PAGED }.into());
        add("scale", Attention { scale, softcap, ..ATTENTION }.into());
    }
    for softcap in [-1.0, f32::NAN, f32::INFINITY] {
        add("softcap", PagedAttention { softcap, ..PAGED }.into());
        add("softcap", Attention { softcap, ..ATTENTION }.into());
    }
    add("dtype", HeadLinear { dtype: DType::I8, ..HEAD_LINEAR }.into());
    add("mask", Attention { mask: AttentionMask::Explicit, ..ATTENTION }.into());
    add("alpha", Add { alpha: f32::NAN }.into());
    add("start", Columns { start: 65, ..COLUMNS }.into());
    add("count", Columns { count: 13, ..COLUMNS }.into());
    add("start", Columns { start: u32::MAX, count: 2 }.into());
    add("block_size", PrepareStep { block_size: 0 }.into());
    add("ranks", AllGather { ranks: 0, ..GATHER }.into());
    add("ranks", ReduceScatter { ranks: 0, ..SCATTER }.into());
    add("ranks", AllToAll { axis: AXIS, ranks: 0 }.into());

    // Some errors name the operand that the attribute does not fit.
    let mut add = |attribute, op: Op, argument, field| refused.push((attribute, op, argument, field));
    let paged = |kv_heads| PagedAttention { kv_heads, ..PAGED };
    add("kv_heads", paged(0).into(), "query_heads", None);
    add("kv_heads", paged(4).into(), "key_cache", Some("shape[1]"));
    add("mask", PagedAttention { mask: AttentionMask::Causal, ..PAGED }.into(), "mask_bits", None);
    add("value_size", PagedAttention { value_size: 4, ..PAGED }.into(), "value_cache", None);
    let attention = |kv_heads| Attention { kv_heads, ..ATTENTION };
    add("kv_heads", attention(0).into(), "query_heads", None);
    add("kv_heads", attention(1).into(), "query", Some("shape[1]"));
    let packed = |layout| GatedActivation { layout, ..GATED };
    add("layout", packed(GateLayout::Concatenated).into(), "up", None);
    add("layout", packed(GateLayout::Interleaved).into(), "up", None);
    for score in [RouterScore::SoftmaxOfSelected, RouterScore::SparseMixer] {
        add("score", MoeRoute { score, ..ROUTE }.into(), "selection_bias", None);
    }
    add("rows", AllGather { rows: true, ..GATHER }.into(), "x", Some("shape[0]"));
    add("rows", ReduceScatter { rows: true, ..SCATTER }.into(), "x", Some("shape[0]"));
    add("ranks", ReduceScatter { ranks: 3, ..SCATTER }.into(), "x", Some("shape[1]"));
    add("ranks", AllToAll { axis: AXIS, ranks: 3 }.into(), "x", Some("shape[0]"));
    refused
}

#[test]
fn refused_attribute_values_are_named() {
    for (_, op, argument, field) in refused_attributes() {
        let case = case_of(op.name());
        let Err(error) = infer(&op, &case.operands) else { panic!("{op} is not refused") };
        assert_names(&error, case.name(), argument, field);
    }
}

/// Each number among the attributes has refused values, unless every value is meaningful.
#[test]
fn every_attribute_with_wrong_values_has_one() {
    const ALWAYS_RIGHT: &[(&str, &str)] = &[
        ("embed", "first_row"),
        ("embed", "position_offset"),
        ("attention_prepare", "words"),
        ("paged_attention", "window"),
        ("attention", "window"),
        // They are checked against the group when the call is validated.
        ("broadcast", "root"),
        ("send", "peer"),
        ("receive", "peer"),
    ];
    let refused = refused_attributes();
    for signature in Op::PRIMITIVES {
        for (attribute, value) in case_of(signature.name).op.attributes() {
            if matches!(value, AttributeValue::Choice(_) | AttributeValue::Flag(_)) {
                continue;
            }
            let listed =
                refused.iter().any(|(name, op, ..)| op.name() == signature.name && *name == attribute);
            let free = ALWAYS_RIGHT.contains(&(signature.name, attribute));
            assert!(listed != free, "{}.{attribute}", signature.name);
        }
    }
}

#[rstest]
#[case::positions_alone(EMBED, &["i32[3]", "weight f32[9, 8]", "i32[3]", "_"], "position_table")]
#[case::position_table_alone(EMBED, &["i32[3]", "weight f32[9, 8]", "_", "weight f32[9, 8]"], "positions")]
#[case::no_up_half(GATED, &["f32[3, 8]", "_", "_"], "up")]
#[case::order_alone(GROUPED, &["f32[3, 8]", "weight f32[16, 8]", "i32[3, 2]", "_", "i32[3, 2]", "_"], "starts")]
#[case::starts_alone(GROUPED, &["f32[3, 8]", "weight f32[16, 8]", "i32[3, 2]", "_", "_", "i32[9]"], "order")]
#[case::no_mask(PAGED, &["f32[3, 8]", "f32[9, 2, 4, 2]", "f32[9, 2, 4, 2]", "i32[1]", "i32[1]", "i32[1]", "i32[1, 1]", "i32[0]", "_", "_", "_"], "mask_bits")]
#[case::no_value_cache(PAGED, &["f32[3, 8]", "f32[9, 2, 4, 2]", "_", "i32[1]", "i32[1]", "i32[1]", "i32[1, 1]", "i32[0]", "_", "_", "u32[3, 1]"], "value_cache")]
#[case::long_values(
    PagedAttention { value_size: 3, ..PAGED },
    &["f32[3, 8]", "f32[9, 2, 4, 2]", "_", "i32[1]", "i32[1]", "i32[1]", "i32[1, 1]", "i32[0]", "_", "_", "u32[3, 1]"],
    "value_size"
)]
fn optional_operands_that_need_each_other_are_missed(
    #[case] op: impl Into<Op>,
    #[case] operands: &[&str],
    #[case] argument: &str,
) {
    let op = op.into();
    let operands: Vec<_> = operands.iter().map(|text| operand(text)).collect();
    assert_names(&infer(&op, &operands).unwrap_err(), op.name(), argument, None);
}

#[rstest]
#[case(GatedActivation { layout: GateLayout::Concatenated, ..GATED }, "f32[?t, 15]", "gate", Some("shape[1]"))]
#[case(AllReduce { reduction: Reduction::Mean, ..ALL_REDUCE }, "i32[?t, 8]", "reduction", None)]
#[case(ReduceScatter { reduction: Reduction::Mean, ..SCATTER }, "u8[?t, 8]", "reduction", None)]
#[case(AllGather { ranks: u32::MAX, ..GATHER }, "u8[?t, 18446744073709551615]", "x", Some("shape"))]
fn attributes_that_do_not_fit_an_operand_are_named(
    #[case] op: impl Into<Op>,
    #[case] x: &str,
    #[case] argument: &str,
    #[case] field: Option<&str>,
) {
    let op = op.into();
    let mut operands = vec![None; op.signature().unwrap().operands.len()];
    operands[0] = operand(x);
    assert_names(&infer(&op, &operands).unwrap_err(), op.name(), argument, field);
}

#[test]
fn sizes_that_overflow_are_refused() {
    let huge = format!("f32[1, {0}, {0}, 2]", 1u64 << 40);
    let error = infer(&PageGather {}.into(), &[operand(&huge), operand("i32[1]")]).unwrap_err();
    assert_names(&error, "page_gather", "cache", Some("shape"));
    let gate = format!("f32[1, {}]", usize::MAX);
    let operands = [operand(&gate), operand(&gate), operand("f32[2]")];
    assert_names(&infer(&GATED.into(), &operands).unwrap_err(), "gated_activation", "gate", Some("shape[1]"));
}

/// The product of a list of iteration dimensions; `None` if one of several is unknown.
fn product(sizes: &[Size]) -> Option<Size> {
    match sizes {
        [size] => Some(size.clone()),
        many => many.iter().map(Size::known).product::<Option<usize>>().map(Size::Static),
    }
}

#[test]
fn index_maps_fit_the_shapes() {
    for case in valid() {
        let op = &case.op;
        let maps = op.index_maps(&case.operands).unwrap();
        let results = op.infer(&case.operands).unwrap();
        assert_eq!((maps.operands.len(), maps.results.len()), (case.operands.len(), results.len()), "{op}");

        let shape = |operand: &Option<OperandType>| match operand {
            Some(OperandType::Tensor(tensor)) => tensor.shape.clone(),
            Some(OperandType::Weight(weight)) => weight.shape.iter().map(|size| (*size).into()).collect(),
            None => Vec::new(),
        };
        let operand_shapes = case.operands.iter().map(shape);
        let shapes = operand_shapes.chain(results.iter().map(|result| result.shape.clone()));
        for (index, (shape, axes)) in shapes.zip(maps.operands.iter().chain(&maps.results)).enumerate() {
            assert_eq!(shape.len(), axes.len(), "{op}, map {index}");
            for (size, axis) in shape.iter().zip(axes) {
                if let Axis::From { dimension, start } = axis {
                    let end = maps.dimensions[*dimension].size.known().unwrap() + start;
                    assert!(end <= size.known().unwrap(), "{op}, map {index}");
                }
                let Axis::Of(dimensions) = axis else { continue };
                let sizes: Vec<Size> =
                    dimensions.iter().map(|dimension| maps.dimensions[*dimension].size.clone()).collect();
                assert_eq!(product(&sizes).as_ref(), Some(size), "{op}, map {index}");
            }
        }

        let mut in_results: HashSet<usize> = HashSet::new();
        for axis in maps.results.iter().flatten() {
            if let Axis::Of(dimensions) = axis {
                in_results.extend(*dimensions);
            }
        }
        // A dimension that is scattered through indices is not an axis of the result.
        let scatters = maps.results.iter().flatten().any(|axis| *axis == Axis::Gathered);
        for (index, dimension) in maps.dimensions.iter().enumerate() {
            match dimension.kind {
                DimensionKind::Reduced => assert!(!in_results.contains(&index), "{op}: {dimension:?}"),
                DimensionKind::Parallel | DimensionKind::Whole => {
                    assert!(in_results.contains(&index) || scatters, "{op}: {dimension:?}");
                }
            }
        }
    }
}

#[test]
fn index_maps_refuse_what_inference_refuses() {
    for (op, name, instead, ..) in MISFITS {
        let (case, index) = case_with(op, name);
        let operands = case.with(index, operand(instead));
        assert_eq!(case.op.index_maps(&operands).unwrap_err(), case.op.infer(&operands).unwrap_err());
    }
}
