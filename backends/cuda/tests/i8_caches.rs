//! There are no kernels for KV caches of i8: calls with one are refused, whatever else they are.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dsrun_core::{
    Code, DType, TensorDesc,
    cache_row::cache_row_size,
    kernels::{CallDesc, OperandDesc},
    op::{AttentionMask, KvWrite, Op, PageGather, PagedAttention},
};
use dsrun_cuda::{DeviceSpec, kernel_specs};
use rstest::rstest;

const PAGED: PagedAttention = PagedAttention {
    query_heads: 4,
    kv_heads: 2,
    scale: 0.1,
    softcap: 0.0,
    window: 0,
    mask: AttentionMask::Causal,
    value_size: 0,
};

/// The operands of `op` with caches of a type whose rows have so many elements.
fn operands(op: &Op, dtype: DType, row: usize) -> Vec<Option<TensorDesc>> {
    let tensor = |dtype, shape: &[usize]| Some(TensorDesc::dense(dtype, shape));
    let (cache, integers) = (tensor(dtype, &[9, 2, 16, row]), |count| tensor(DType::I32, &[count]));
    match op {
        Op::KvWrite(_) => {
            let new = tensor(DType::F16, &[3, 2 * 64]);
            vec![cache.clone(), cache, new.clone(), new, integers(3)]
        }
        Op::PageGather(_) => vec![cache, integers(3)],
        _ => {
            let query = tensor(DType::F16, &[3, 4 * 64]);
            let table = tensor(DType::I32, &[2, 4]);
            let step = [integers(2), integers(2), integers(2), table, integers(0)];
            [query, cache.clone(), cache].into_iter().chain(step).chain([None, None, None]).collect()
        }
    }
}

#[rstest]
#[case::write(KvWrite {})]
#[case::gather(PageGather {})]
#[case::attention(PAGED)]
fn calls_are_refused(#[case] op: impl Into<Op>) {
    let (op, device) = (op.into(), DeviceSpec::usual(90, 132));
    let call = |dtype, row| {
        let operands: Vec<_> =
            operands(&op, dtype, row).into_iter().map(|tensor| tensor.map(OperandDesc::Tensor)).collect();
        let mut call = CallDesc { op: op.clone(), operands, results: Vec::new(), comm: None };
        let results = op.infer(&call.operand_types()).unwrap();
        let result = |shape: Vec<usize>, dtype| TensorDesc::dense(dtype, &shape);
        call.results =
            results.iter().map(|found| result(found.resolve(&|_| None).unwrap(), found.dtype)).collect();
        call.validate().unwrap()
    };
    assert!(kernel_specs(&call(DType::F16, 64), &device).is_ok());
    let error = kernel_specs(&call(DType::I8, cache_row_size(DType::I8, 64)), &device).unwrap_err();
    assert_eq!((error.code(), error.op()), (Code::Unsupported, Some(op.name())), "{error}");
    assert!(error.message().contains("CUDA"), "{error}");
}
