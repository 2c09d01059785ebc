//! Tests of the kernel for few rows, and of its source, which need no adapter.

use super::*;
use crate::ops::sources::{check_sources, spec, tensor};
use dsrun_core::{TensorDesc, WeightFormat, WeightType, op::Linear};
use rstest::rstest;

/// The dispatch of a linear layer of `[rows, outputs, inputs]`, whose rows may be fewer.
fn launch(dtype: DType, format: &str, [rows, outputs, inputs]: [usize; 3]) -> Launch {
    let weight =
        WeightType { format: WeightFormat::from_name(format).unwrap(), shape: vec![outputs, inputs] };
    let mut x = TensorDesc::dense(dtype, &[rows, inputs]);
    x.bounded = true;
    let call = CallDesc {
        op: Linear { dtype }.into(),
        operands: vec![
            Some(OperandDesc::Tensor(x)),
            Some(OperandDesc::Weight(weight)),
            tensor(dtype, &[outputs]),
        ],
        results: vec![TensorDesc::dense(dtype, &[rows, outputs])],
        comm: None,
    };
    let mut plan = linear(&call, &spec(None)).unwrap();
    check_sources(&plan);
    plan.launches.remove(0)
}

fn constant(launch: &Launch, name: &str) -> u32 {
    launch.shader.constants.iter().find(|(constant, _)| *constant == name).unwrap().1
}

#[rstest]
#[case::halves(DType::BF16, "bf16", [1, 96, 512], true)]
#[case::integers(DType::F16, "q4_0", [1, 96, 512], true)]
#[case::minima(DType::F16, "q4_1", [1, 96, 512], true)]
#[case::floats(DType::BF16, "mxfp4", [1, 96, 512], true)]
#[case::small_groups(DType::F16, "q6_k", [1, 96, 512], true)]
#[case::f32_inputs(DType::F32, "q8_0", [1, 96, 512], false)]
#[case::f32_weights(DType::F32, "f32", [1, 96, 512], false)]
#[case::an_odd_row(DType::F16, "f16", [1, 96, 30], false)]
#[case::two_rows(DType::F16, "f16", [2, 96, 512], false)]
fn a_single_row_is_read_eight_elements_at_a_time(
    #[case] dtype: DType,
    #[case] format: &str,
    #[case] sizes: [usize; 3],
    #[case] expected: bool,
) {
    assert_eq!(launch(dtype, format, sizes).shader.flags.contains(&"X_WORDS"), expected);
}

#[rstest]
#[case::four_bits(DType::F16, "int4g128_f16", [1, 4109, 256], Some((32, 2)))]
#[case::as_many_threads_as_vectors(DType::F16, "int4g128_f16", [1, 28_672, 8192], Some((256, 10)))]
#[case::few_outputs(DType::F16, "int4g128_f16", [1, 2048, 256], None)]
#[case::several_steps(DType::F16, "int4g128_f16", [1, 4109, 14_336], None)]
#[case::two_rows(DType::F16, "int4g128_f16", [2, 4109, 256], None)]
#[case::halves(DType::F16, "f16", [1, 4109, 256], None)]
fn workgroups_have_runs_of_units_where_inputs_take_long(
    #[case] dtype: DType,
    #[case] format: &str,
    #[case] sizes: [usize; 3],
    #[case] expected: Option<(u32, u32)>,
) {
    let launch = launch(dtype, format, sizes);
    let of_run = (constant(&launch, "THREADS"), constant(&launch, "UNITS"));
    assert_eq!(launch.shader.flags.contains(&"RUN").then_some(of_run), expected);
}

#[test]
fn only_row_counts_are_read_at_run_time() {
    let launch = launch(DType::F16, "f16", [1, 96, 512]);
    let names: Vec<&str> = launch.shader.params.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["x_extent"]);
    assert_eq!(launch.words, [u32::MAX], "no row count is bound yet");
    assert_eq!(launch.slots[0].extent, Some(0));
    assert!(launch.shader.source().contains("const P = Fixed("));
}

#[test]
fn every_adapter_has_memory_for_the_sums() {
    for (format, inputs) in
        [("f32", 1 << 20), ("bf16", 1 << 20), ("q8_0", 1 << 20), ("q4_0", 1 << 20), ("f16", 8)]
    {
        for rows in 1..=FEW_ROWS {
            let dtype = if format == "bf16" { DType::BF16 } else { DType::F16 };
            let launch = launch(dtype, format, [rows, 4, inputs]);
            // Also the sums of squares, with a norm.
            let bytes = 16 * (constant(&launch, "ROWS") + 1) * (constant(&launch, "THREADS") + 16);
            assert!(bytes <= 16 << 10, "{rows} rows of {inputs} {format} take {bytes} bytes");
        }
    }
}
