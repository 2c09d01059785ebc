//! KV caches of i8: the sizes of their rows, and who refuses them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dsrun_core::{
    Code, DType, TensorDesc,
    cache_row::{cache_head_size, cache_row_size},
    kernels::{CallDesc, OperandDesc},
    op::{AttentionMask, KvWrite, LatentWrite, Linear, Op, PageGather, PagedAttention},
    program::{Call, ValueId},
    region::Region,
};
use rstest::rstest;

#[test]
fn a_row_of_i8_ends_with_its_scales() {
    for (size, row) in [(0, 0), (1, 5), (32, 36), (33, 41), (64, 72), (80, 92), (576, 648)] {
        assert_eq!((cache_row_size(DType::F16, size), cache_row_size(DType::I8, size)), (size, row));
        assert_eq!(
            (cache_head_size(DType::BF16, size), cache_head_size(DType::I8, row)),
            (Some(size), Some(size))
        );
    }
    for row in [1, 4, 37, 40] {
        assert_eq!(cache_head_size(DType::I8, row), None);
    }
}

/// A call with these operands, whose results are those of the op.
fn call(op: impl Into<Op>, operands: &[(DType, &[usize])]) -> CallDesc {
    let tensor =
        |(dtype, shape): &(DType, &[usize])| Some(OperandDesc::Tensor(TensorDesc::dense(*dtype, shape)));
    let op = op.into();
    let mut call =
        CallDesc { op, operands: operands.iter().map(tensor).collect(), results: Vec::new(), comm: None };
    if let Ok(results) = call.op.infer(&call.operand_types()) {
        let of = |shape: Vec<usize>, dtype| TensorDesc::dense(dtype, &shape);
        call.results =
            results.iter().map(|result| of(result.resolve(&|_| None).unwrap(), result.dtype)).collect();
    }
    call
}

const ROWS: (DType, &[usize]) = (DType::F32, &[3, 2 * 8]);
const SLOTS: (DType, &[usize]) = (DType::I32, &[3]);

fn write(dtype: DType, row: usize) -> CallDesc {
    let shape = [5, 2, 16, row];
    call(KvWrite {}, &[(dtype, &shape), (dtype, &shape), ROWS, ROWS, SLOTS])
}

#[test]
fn rows_are_as_long_as_heads_and_scales() {
    assert!(write(DType::I8, 12).validate().is_ok());
    assert!(write(DType::F16, 8).validate().is_ok());
    for (row, argument) in [(8, "key"), (13, "key"), (3, "key_cache")] {
        let error = write(DType::I8, row).validate().unwrap_err();
        assert_eq!((error.op(), error.argument()), (Some("kv_write"), Some(argument)), "{error}");
    }
    assert!(write(DType::U8, 12).validate().is_err());
}

#[test]
fn latents_are_floats() {
    let cache: (DType, &[usize]) = (DType::I8, &[5, 1, 16, 12]);
    let rows: (DType, &[usize]) = (DType::F32, &[3, 4]);
    let error = call(LatentWrite {}, &[cache, rows, rows, SLOTS]).validate().unwrap_err();
    assert_eq!((error.argument(), error.field_name()), (Some("cache"), Some("dtype")), "{error}");
    let op = PagedAttention {
        query_heads: 1,
        kv_heads: 1,
        scale: 1.0,
        softcap: 0.0,
        window: 0,
        mask: AttentionMask::Causal,
        value_size: 4,
    };
    let query: (DType, &[usize]) = (DType::F32, &[3, 8]);
    let one: (DType, &[usize]) = (DType::I32, &[1]);
    let mut attention = call(op, &[query, cache, one, one, one, (DType::I32, &[1, 1]), one]);
    attention.operands.insert(2, None);
    attention.operands.extend([None, None, None]);
    let error = attention.validate().unwrap_err();
    assert_eq!((error.argument(), error.field_name()), (Some("key_cache"), Some("dtype")), "{error}");
}

fn region() -> Op {
    let values = |all: &[usize]| all.iter().map(|index| Some(ValueId::new(*index))).collect();
    let linear = Call {
        op: Linear { dtype: DType::F32 }.into(),
        operands: vec![Some(ValueId::new(0)), Some(ValueId::new(1)), None],
        results: vec![ValueId::new(5)],
    };
    let write = Call {
        op: KvWrite {}.into(),
        operands: values(&[2, 3, 5, 5, 4]),
        results: vec![ValueId::new(6), ValueId::new(7)],
    };
    Op::Region(
        Region::new("keys", 5, vec![linear, write], vec![ValueId::new(6), ValueId::new(7)]).unwrap().into(),
    )
}

#[rstest]
#[case::primitive(write(DType::I8, 12), Some("kv_write"))]
#[case::floats(write(DType::F16, 8), None)]
#[case::pages(call(PageGather {}, &[(DType::I8, &[5, 2, 16, 12]), SLOTS]), Some("page_gather"))]
#[case::region(
    call(region(), &[ROWS, ROWS, (DType::I8, &[5, 2, 16, 12]), (DType::I8, &[5, 2, 16, 12]), SLOTS]),
    Some("region")
)]
#[case::region_of_floats(
    call(region(), &[(DType::I8, &[3, 16]), ROWS, (DType::F16, &[5, 2, 16, 8]), (DType::F16, &[5, 2, 16, 8]), SLOTS]),
    None
)]
fn a_backend_without_kernels_refuses_them(#[case] call: CallDesc, #[case] refused: Option<&str>) {
    let outcome = call.refuse_i8_caches("Toaster");
    assert_eq!(outcome.is_err(), refused.is_some());
    if let Err(error) = outcome {
        assert_eq!(error.code(), Code::Unsupported);
        assert!(error.message().contains("Toaster"), "{error}");
        assert_eq!(error.op().is_some(), refused.is_some());
    }
}
