//! Tests of the choice of kernels, and of their sources, which need no adapter.

use super::*;
use crate::ops::sources::{check_sources, entries, spec, tensor};
use rstest::rstest;

/// Paged attention of `rows` rows of `sequences` sequences, with heads of these sizes.
fn call(dtype: DType, [rows, sequences]: [usize; 2], sizes: [usize; 2], mask: AttentionMask) -> CallDesc {
    let [key_size, value_size] = sizes;
    let op = PagedAttention {
        query_heads: 4,
        kv_heads: 2,
        scale: 1.0,
        softcap: 0.0,
        window: 0,
        mask,
        value_size: 0,
    };
    let vector = || tensor(DType::I32, &[sequences]);
    let bits = (mask == AttentionMask::Explicit).then(|| tensor(DType::U32, &[rows, 1])).flatten();
    let operands = vec![
        tensor(dtype, &[rows, 4 * key_size]),
        tensor(dtype, &[8, 2, 16, key_size]),
        tensor(dtype, &[8, 2, 16, value_size]),
        vector(),
        vector(),
        vector(),
        tensor(DType::I32, &[sequences, 4]),
        None,
        None,
        None,
        bits,
    ];
    let y = TensorDesc::dense(dtype, &[rows, 4 * value_size]);
    let results = vec![y, TensorDesc::dense(DType::F32, &[rows, 4])];
    CallDesc { op: op.into(), operands, results, comm: None }
}

/// Attention of `rows` rows within `sequences` sequences, with heads of these sizes.
fn within(dtype: DType, [rows, sequences]: [usize; 2], sizes: [usize; 2], mask: AttentionMask) -> CallDesc {
    let [key_size, value_size] = sizes;
    let op = Attention { query_heads: 4, kv_heads: 2, scale: 1.0, softcap: 0.0, window: 8, mask };
    let operands = vec![
        tensor(dtype, &[rows, 4 * key_size]),
        tensor(dtype, &[rows, 2 * key_size]),
        tensor(dtype, &[rows, 2 * value_size]),
        tensor(DType::I32, &[sequences]),
        tensor(DType::I32, &[sequences]),
        tensor(DType::F32, &[4]),
    ];
    let y = TensorDesc::dense(dtype, &[rows, 4 * value_size]);
    CallDesc { op: op.into(), operands, results: vec![y], comm: None }
}

const BY_ROWS: &[&str] = &["attention"];
const MATRICES_ALONE: &[&str] = &["attention_matrices"];
const TILES_ALONE: &[&str] = &["attention_tiled"];

#[rstest]
#[case::f16(DType::F16, [64, 1], [128, 128], MATRICES_ALONE)]
#[case::unlike_sizes(DType::F16, [64, 1], [96, 64], MATRICES_ALONE)]
#[case::several(DType::F16, [64, 3], [64, 64], &["attention_matrices", "attention"])]
#[case::half_a_fragment(DType::F16, [64, 1], [80, 80], TILES_ALONE)]
#[case::bf16(DType::BF16, [64, 1], [128, 128], TILES_ALONE)]
#[case::bf16_of_several(DType::BF16, [64, 3], [128, 128], &["attention_tiled", "attention"])]
#[case::large_heads(DType::F16, [64, 1], [256, 256], TILES_ALONE)]
#[case::odd_heads(DType::F16, [64, 1], [10, 10], BY_ROWS)]
#[case::generation(DType::F16, [64, 64], [128, 128], BY_ROWS)]
#[case::few_rows(DType::F16, [15, 1], [128, 128], BY_ROWS)]
fn many_rows_are_in_tiles(
    #[case] dtype: DType,
    #[case] sizes: [usize; 2],
    #[case] head: [usize; 2],
    #[case] expected: &[&str],
    #[values(Matrices::Cooperative, Matrices::Emulated)] matrices: Matrices,
    #[values(call, within)] of: fn(DType, [usize; 2], [usize; 2], AttentionMask) -> CallDesc,
    #[values(AttentionMask::Causal, AttentionMask::Bidirectional)] mask: AttentionMask,
) {
    let plan = crate::ops::plan(&of(dtype, sizes, head, mask), &spec(Some(matrices))).unwrap();
    assert_eq!(entries(&plan), expected);
    check_sources(&plan);
}

#[rstest]
#[case::no_matrices(AttentionMask::Causal, None, 48 << 10, TILES_ALONE)]
#[case::little_memory(AttentionMask::Causal, Some(Matrices::Cooperative), 32 << 10, TILES_ALONE)]
#[case::least_memory(AttentionMask::Causal, Some(Matrices::Cooperative), 16 << 10, BY_ROWS)]
#[case::both_sides(AttentionMask::Bidirectional, Some(Matrices::Cooperative), 48 << 10, MATRICES_ALONE)]
#[case::explicit(AttentionMask::Explicit, Some(Matrices::Cooperative), 48 << 10, BY_ROWS)]
fn tiles_suit_the_adapter_and_the_mask(
    #[case] mask: AttentionMask,
    #[case] matrices: Option<Matrices>,
    #[case] bytes: u32,
    #[case] expected: &[&str],
) {
    let mut spec = spec(matrices);
    spec.limits.max_compute_workgroup_storage_size = bytes;
    let plan = crate::ops::plan(&call(DType::F16, [64, 1], [128, 128], mask), &spec).unwrap();
    assert_eq!(entries(&plan), expected);
    check_sources(&plan);
}
