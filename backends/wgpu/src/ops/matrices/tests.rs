//! Tests of the choice of kernels, and of their sources, which need no adapter.

use super::*;
use crate::ops::{
    linear::{self, Epilogue},
    sources::{check_sources, entries, spec, tensor},
};
use dsrun_core::{
    WeightFormat, WeightType,
    kernels::OperandDesc,
    op::{GateLayout, GatedActivation, Linear, Nonlinearity, RmsNorm, Rope, RopePairing},
    region::well_known::{Heads, MlpActivation},
};
use rstest::rstest;
fn weight(format: &str, shape: [usize; 2]) -> Option<OperandDesc> {
    let format = WeightFormat::from_name(format).unwrap();
    Some(OperandDesc::Weight(WeightType { format, shape: shape.to_vec() }))
}

/// A linear layer of `[rows, outputs, inputs]`.
fn call(dtype: DType, format: &str, [rows, outputs, inputs]: [usize; 3]) -> CallDesc {
    CallDesc {
        op: Linear { dtype }.into(),
        operands: vec![tensor(dtype, &[rows, inputs]), weight(format, [outputs, inputs]), None],
        results: vec![TensorDesc::dense(dtype, &[rows, outputs])],
        comm: None,
    }
}

const MATRICES_ALONE: &[&str] = &["linear_matrices"];
const AFTER_HALVES: &[&str] = &["halves_of_rows", "linear_matrices"];
const TILED: &[&str] = &["linear_many"];

#[rstest]
#[case::f16(DType::F16, "f16", [512, 96, 64], MATRICES_ALONE)]
#[case::half_a_long_step(DType::F16, "f16", [512, 96, 96], MATRICES_ALONE)]
#[case::half_a_long_step_of_groups(DType::F16, "q4_0", [64, 96, 96], MATRICES_ALONE)]
#[case::no_rows(DType::F16, "f16", [0, 96, 64], &["linear_few"])]
#[case::few_rows(DType::F16, "f16", [4, 96, 64], &["linear_few"])]
#[case::more_rows(DType::F16, "f16", [5, 96, 64], MATRICES_ALONE)]
#[case::few_rows_without_a_step(DType::F16, "f16", [8, 96, 72], &["linear_few"])]
#[case::part_of_a_step(DType::F16, "f16", [512, 96, 72], TILED)]
#[case::f32(DType::F32, "f32", [512, 96, 64], TILED)]
#[case::f32_activations(DType::F32, "f16", [512, 96, 64], TILED)]
#[case::bf16(DType::BF16, "bf16", [512, 96, 64], AFTER_HALVES)]
#[case::integers(DType::F16, "q4_0", [64, 96, 64], MATRICES_ALONE)]
#[case::minima(DType::BF16, "q4_1", [64, 96, 64], AFTER_HALVES)]
#[case::bytes(DType::F16, "q8_0", [512, 96, 64], MATRICES_ALONE)]
#[case::floats(DType::F16, "mxfp4", [512, 96, 64], MATRICES_ALONE)]
#[case::channels(DType::F16, "int8", [512, 96, 64], MATRICES_ALONE)]
fn products_of_many_rows_are_by_matrices(
    #[case] dtype: DType,
    #[case] format: &str,
    #[case] sizes: [usize; 3],
    #[case] expected: &[&str],
    #[values(Matrices::Cooperative, Matrices::Emulated)] matrices: Matrices,
) {
    let plan = linear::linear(&call(dtype, format, sizes), &spec(Some(matrices))).unwrap();
    assert_eq!(entries(&plan), expected);
    assert_eq!(plan.workspace > 0, expected.len() > 1);
    check_sources(&plan);
}

#[test]
fn adapters_without_matrices_use_tiles() {
    let plan = linear::linear(&call(DType::F16, "f16", [512, 96, 64]), &spec(None)).unwrap();
    assert_eq!(entries(&plan), TILED);
    check_sources(&plan);
}

#[rstest]
#[case::much(48 << 10, [512, 96, 64], Some(64))]
#[case::half_a_step(48 << 10, [512, 96, 96], Some(32))]
#[case::little(32 << 10, [512, 96, 64], Some(32))]
#[case::too_little(16 << 10, [512, 96, 64], None)]
#[case::too_little_for_many_rows_only(20 << 10, [64, 96, 64], Some(64))]
#[case::little_for_fewer_rows(16 << 10, [64, 96, 64], Some(32))]
#[case::wide_steps_of_few_rows(48 << 10, [16, 96, 512], Some(256))]
#[case::shorter_steps_of_more_rows(48 << 10, [64, 96, 512], Some(128))]
fn steps_fit_into_workgroup_memory(
    #[case] bytes: u32,
    #[case] sizes: [usize; 3],
    #[case] expected: Option<u32>,
) {
    let mut spec = spec(Some(Matrices::Cooperative));
    spec.limits.max_compute_workgroup_storage_size = bytes;
    let plan = linear::linear(&call(DType::F16, "f16", sizes), &spec).unwrap();
    let constants = &plan.launches[0].shader.constants;
    let step = constants.iter().find(|(name, _)| *name == "STEP").map(|(_, step)| *step);
    assert_eq!(step, expected, "{:?}", entries(&plan));
    check_sources(&plan);
}

#[test]
fn parts_of_a_weight_share_the_converted_rows() {
    let limited = DeviceSpec { part_bytes: 8 * 64 * 2, ..spec(Some(Matrices::Cooperative)) };
    let plan = linear::linear(&call(DType::BF16, "bf16", [512, 16, 64]), &limited).unwrap();
    assert!(plan.launches.len() > 2, "{:?}", entries(&plan));
    assert_eq!(entries(&plan)[..2], *AFTER_HALVES);
}

#[rstest]
#[case(DType::F16, "f16")]
#[case(DType::BF16, "int4g32_bf16")]
fn epilogues_run_after_matrices(
    #[case] dtype: DType,
    #[case] format: &str,
    #[values(0, 1, 2, 3)] epilogue: usize,
) {
    let norm = RmsNorm { eps: 1e-5, weight_offset: 0.0 };
    let [rows, outputs, inputs] = [300, 96, 64];
    let mut call = call(dtype, format, [rows, outputs, inputs]);
    call.operands.truncate(2);
    call.operands.insert(1, tensor(dtype, &[inputs]));
    let epilogue = match epilogue {
        0 => Epilogue::Store,
        1 => {
            call.operands.push(tensor(dtype, &[rows, outputs]));
            Epilogue::Add { residual: 3, alpha: 1.0 }
        }
        2 => {
            call.results = vec![TensorDesc::dense(dtype, &[rows, outputs / 2])];
            Epilogue::Activate(MlpActivation::Gated(GatedActivation {
                function: Nonlinearity::Silu,
                layout: GateLayout::Concatenated,
                limit: 0.0,
                up_offset: 0.0,
            }))
        }
        _ => {
            let rope = |heads| Rope { heads, pairing: RopePairing::Halves, scale: 1.0 };
            let positions = [tensor(DType::I32, &[rows, 1]), tensor(DType::F32, &[8])];
            let cache = || TensorDesc::dense(dtype, &[4, 2, 16, 16]);
            let caches = [Some(OperandDesc::Tensor(cache())), Some(OperandDesc::Tensor(cache()))];
            call.operands.extend(positions.into_iter().chain(caches));
            call.operands.push(tensor(DType::I32, &[rows, 1]));
            call.results = vec![TensorDesc::dense(dtype, &[rows, 32]), cache(), cache()];
            let heads = Heads { columns: [32; 3], head_norms: None, ropes: Some([rope(2), rope(2)]) };
            Epilogue::Heads { heads, first: 3 }
        }
    };
    let fused = FusedLinear { norm: Some(norm), weight: 2, bias: None, epilogue };
    let plan = linear::plan(&fused, &call, &spec(Some(Matrices::Cooperative))).unwrap();
    assert_eq!(entries(&plan), AFTER_HALVES);
    check_sources(&plan);
}
