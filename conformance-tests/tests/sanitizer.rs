//! The cases that `tools/sanitize` runs reach every kernel that the suite reaches, for every element type. This needs no device: the
//! kernels are those that the CUDA backend plans for an H200, given descriptions of the calls.

#![allow(clippy::unwrap_used, reason = "a test, with helpers outside of test functions")]

use dsrun_conformance::{
    case::{CallCase, Case, Layout, Operand},
    cases::TABLES,
    draw::DrawnId,
    suite::{CHECK, Item},
};
use dsrun_core::{
    Code, DType, TensorDesc,
    checked::ValidCall,
    kernels::{CallDesc, OperandDesc},
    op::{Op, Profile},
};
use dsrun_cuda::{DeviceSpec, kernel_specs};
use rstest::rstest;
use std::collections::{BTreeMap, BTreeSet};

const H200: DeviceSpec = DeviceSpec::usual(90, 132);

const LIST: &str = include_str!("../../tools/sanitize/cases.txt");

fn describe(dtype: DType, shape: &[usize], layout: Layout) -> TensorDesc {
    let mut desc = TensorDesc::dense(dtype, shape);
    for dimension in (1..shape.len()).rev() {
        desc.strides[dimension - 1] = desc.strides[dimension] * shape[dimension].max(1) + layout.gap;
    }
    desc.bounded = layout.bounded;
    desc
}

fn call_of(case: &CallCase) -> ValidCall {
    let operand = |operand: &Operand| match operand {
        Operand::Tensor(input) => {
            OperandDesc::Tensor(describe(input.tensor.dtype, &input.tensor.shape, input.layout))
        }
        Operand::Weight(weight) => OperandDesc::Weight(weight.weight_type.clone()),
        // The device determines its size.
        Operand::WorkList => OperandDesc::Tensor(TensorDesc::dense(DType::I32, &[0])),
    };
    let operands = case.operands.iter().map(|it| it.as_ref().map(operand)).collect();
    let mut call = CallDesc { op: case.op.clone(), operands, results: Vec::new(), comm: None };
    for (index, inferred) in call.op.infer(&call.operand_types()).unwrap().iter().enumerate() {
        let updated = call.op.updates(index).and_then(|operand| call.tensor(operand).cloned());
        let layout = case.results.get(index).map(|expected| expected.layout).unwrap_or_default();
        let shape = inferred.resolve(&|_| None).unwrap();
        call.results.push(updated.unwrap_or_else(|| describe(inferred.dtype, &shape, layout)));
    }
    call.validate().unwrap()
}

/// The kernels that a case launches; none for a region that the backend leaves to the calls of its body, nor for what CUDA does not have:
/// ops whose activations are quantised in groups, and KV caches of i8.
fn kernels_of(case: &Case) -> BTreeSet<&'static str> {
    let calls = case.calls.iter().filter(|call| !matches!(call.op, Op::AttentionPrepare(_)));
    let specs = |call: &CallCase| {
        let call = call_of(call);
        match kernel_specs(&call, &H200) {
            Err(error) if error.code() == Code::Unsupported && may_be_refused(&call) => Vec::new(),
            specs => specs.unwrap(),
        }
    };
    calls.flat_map(specs).map(|spec| spec.entry).collect()
}

fn may_be_refused(call: &ValidCall) -> bool {
    matches!(call.op, Op::Region(_))
        || call.op.profile() == Some(Profile::LlmQuant2)
        || call.refuse_i8_caches("CUDA").is_err()
}

#[test]
fn the_list_names_cases() {
    for (id, _) in LIST.lines().map(|line| line.split_once(' ').unwrap()) {
        assert!(Item::find(id).is_some(), "there is no case {id}");
    }
}

/// One test for each element type, so that they run side by side.
#[rstest]
fn every_kernel_has_a_case_for_every_element_type(
    #[values(DType::F32, DType::F16, DType::BF16, DType::I32, DType::I8, DType::U8, DType::U32)] dtype: DType,
) {
    let name = dtype.to_string();
    let is_of_type = |id: &str| id.split('/').any(|part| part == name);
    let listed: BTreeMap<&str, BTreeSet<&str>> = LIST
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .filter(|(id, _)| !id.starts_with(CHECK) && is_of_type(id))
        .map(|(id, kernels)| (id, kernels.split(',').collect()))
        .collect();
    let mut unknown: BTreeSet<&str> = listed.keys().copied().collect();
    let (mut reached, mut covered) = (BTreeSet::new(), BTreeSet::new());
    // Kernels of ranks wait for each other, which a sanitizer that runs one kernel at a time does not allow.
    let is_of_ranks = |case: &Case| case.calls.iter().any(|call| call.op.mesh_axis().is_some());
    for table in TABLES.iter().filter(|table| table.dtypes.contains(&dtype)) {
        let drawn = listed.keys().filter_map(|id| DrawnId::parse(id)).filter_map(|id| table.draw(id));
        let cases = (table.cases)(dtype).into_iter().map(|case| (case, true));
        for (case, fixed) in cases.chain(drawn.map(|(case, _)| (case, false))) {
            if !is_of_type(&case.id) || is_of_ranks(&case) {
                continue;
            }
            let kernels = kernels_of(&case);
            if let Some(claimed) = listed.get(case.id.as_str()) {
                assert_eq!(claimed, &kernels, "{}", case.id);
                covered.extend(kernels.iter().copied());
                unknown.remove(case.id.as_str());
            }
            reached.extend(kernels.into_iter().filter(|_| fixed));
        }
    }
    assert!(unknown.is_empty(), "no cases: {unknown:?}");
    let missing: Vec<_> = reached.difference(&covered).collect();
    assert!(missing.is_empty(), "without a case on the list: {missing:?}");
    assert!(!dtype.is_float() || covered.len() > 40, "{} kernels", covered.len());
}
