//! Checkpoints of GPTQ, AWQ and compressed-tensors: how their matrices are read, and what is refused. That the numbers are right
//! the engine's tests show, which run the same fixtures.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use dsrun_core::WeightExpr;
use dsrun_models::{model::Model, weights::ExprReader};
use rstest::rstest;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

const DOWN: &str = "model.layers.1.mlp.down_proj";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised").join(name)
}

/// Type, shape and bytes of each tensor.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Opens a copy of a fixture with its configuration and its tensors changed.
fn changed(name: &str, change: impl FnOnce(&mut Value, &mut Tensors)) -> Result<Model, String> {
    let folder = tempfile::tempdir().unwrap();
    let mut config = serde_json::from_slice(&fs::read(fixture(name).join("config.json")).unwrap()).unwrap();
    let bytes = fs::read(fixture(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let owned = |(name, view): (String, TensorView<'_>)| {
        (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    let mut tensors: Tensors = file.tensors().into_iter().map(owned).collect();
    change(&mut config, &mut tensors);
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    // The file is mapped: it stays readable when the folder is gone.
    Model::open(folder.path()).map_err(|error| error.to_string())
}

fn part(name: &str) -> String {
    format!("{DOWN}.{name}")
}

#[rstest]
#[case("gptq_4", "int4g32z_f16")]
#[case("gptq_4_symmetric", "int4g32_f16")]
#[case("gptq_8_channel", "int8z_f16")]
#[case("gptq_8_symmetric", "int8g32_f16")]
#[case("gptq_act_order", "f16")]
#[case("awq", "int4g32z_f16")]
#[case("compressed_w4a16", "int4g32_bf16")]
#[case("compressed_w4a16_zero", "int4g32z_f16")]
#[case("compressed_w8a16", "int8")]
#[case("compressed_w8a16_zero", "int8g32z_f16")]
#[case("compressed_w8a8", "int8_bf16")]
#[case("compressed_fp8", "bf16")]
#[case("fp8_block", "bf16")]
#[case("fp8_tensor", "bf16")]
fn matrices_have_the_format_of_the_file(#[case] name: &str, #[case] format: &str) {
    let model = Model::open(fixture(name)).unwrap();
    let weights = &**model.weights();
    let matrix = part("weight");
    let found = weights.tensor_type(&matrix).unwrap();
    assert_eq!((found.format.name().as_str(), found.shape.as_slice()), (format, &[64, 96][..]));
    assert_eq!(weights.quantises_inputs(&matrix), name == "compressed_w8a8");
    let parts = ["qweight", "_packed", "_scale", "_scale_inv"];
    assert!(!weights.names().iter().any(|name| parts.iter().any(|part| name.ends_with(part))));

    // Any run of rows is part of all rows.
    let all = weights.rows(&matrix, 0, 64).unwrap().into_owned();
    let row_bytes = found.row_bytes().unwrap();
    assert_eq!(all.len(), 64 * row_bytes);
    for (first, count) in [(0, 1), (5, 3), (7, 57), (63, 1), (64, 0), (9, 16)] {
        let rows = weights.rows(&matrix, first, count).unwrap();
        assert_eq!(*rows, all[first * row_bytes..][..count * row_bytes], "{first}..+{count}");
    }
    assert!(weights.rows(&matrix, 63, 2).is_err());
}

#[test]
fn larger_groups_are_read_as_several_of_the_largest_that_there_is() {
    // Two groups of 256 inputs, scaled by 1 and by 2.
    let model = changed("compressed_w4a16", |config, tensors| {
        config["intermediate_size"] = 512.into();
        let scale = |index: u16| half::bf16::from_f32(f32::from(index + 1)).to_le_bytes();
        let matrices = [("down_proj", 64, 512), ("gate_proj", 512, 64), ("up_proj", 512, 64)];
        for (layer, (projection, outputs, inputs)) in
            [0, 1].into_iter().flat_map(|layer| matrices.map(|m| (layer, m)))
        {
            let mut put = |part: &str, dtype, shape: Vec<usize>, bytes: Vec<u8>| {
                tensors
                    .insert(format!("model.layers.{layer}.mlp.{projection}.{part}"), (dtype, shape, bytes));
            };
            put("weight_packed", Dtype::I32, vec![outputs, inputs / 8], vec![0x99; outputs * inputs / 2]);
            let scales = (0..outputs * 2).flat_map(|index| scale(index as u16 % 2)).collect();
            put("weight_scale", Dtype::BF16, vec![outputs, 2], scales);
            let shape = [outputs as i64, inputs as i64].iter().flat_map(|size| size.to_le_bytes()).collect();
            put("weight_shape", Dtype::I64, vec![2], shape);
        }
    })
    .unwrap();
    let weights = &**model.weights();
    assert_eq!(weights.tensor_type(&part("weight")).unwrap().format.name(), "int4g128_bf16");
    let reader = ExprReader::new(weights, &WeightExpr::tensor(part("weight"))).unwrap();
    // A nibble of 9 is 1.
    let row = reader.decoded_rows(3, 1).unwrap();
    assert!(row[..256].iter().all(|value| *value == 1.0) && row[256..].iter().all(|value| *value == 2.0));
}

#[rstest]
#[case("gptq_4", "scales", "it has no scales")]
#[case("gptq_4", "qzeros", "it has no qzeros")]
#[case("awq", "qzeros", "it has no qzeros")]
#[case("compressed_w4a16", "weight_scale", "it has no weight_scale")]
#[case("compressed_w4a16", "weight_shape", "it has no weight_shape")]
#[case("compressed_fp8", "weight_scale", "it has no weight_scale")]
#[case("fp8_block", "weight_scale_inv", "it has no weight_scale")]
fn a_part_that_is_missing_is_named(#[case] name: &str, #[case] lost: &str, #[case] message: &str) {
    let error = changed(name, |_, tensors| drop(tensors.remove(&part(lost)))).unwrap_err();
    assert!(error.contains(DOWN) && error.contains(message), "{error}");
}

#[rstest]
#[case("gptq_4", "group_size", json!(64), "it has groups of 32 inputs, but group_size says 64")]
#[case("gptq_4", "bits", json!(8), "do not fit together at 8 bits")]
#[case("awq", "group_size", json!(-1), "it has groups of 32 inputs, but group_size says all inputs")]
#[case("awq", "version", json!("gemv"), "version")]
#[case("compressed_w4a16", "format", json!("marlin-24"), "format")]
#[case("fp8_block", "weight_block_size", json!([32, 40]), "which does not fit 96 outputs")]
#[case("fp8_block", "weight_block_size", json!([48]), "weight_block_size")]
#[case("fp8_block", "weight_block_size", json!([0, 40]), "weight_block_size")]
#[case("fp8_block", "weight_block_size", json!(null), "the configuration names no blocks")]
#[case("fp8_block", "fmt", json!("e5m2"), "fmt")]
#[case("fp8_block", "group_size", json!(32), "group_size")]
#[case("gptq_4", "quant_method", json!("quip"), "supported: gptq, awq, compressed-tensors")]
fn a_configuration_that_does_not_fit_is_refused(
    #[case] name: &str,
    #[case] field: &str,
    #[case] value: Value,
    #[case] message: &str,
) {
    let error = changed(name, |config, _| config["quantization_config"][field] = value).unwrap_err();
    assert!(error.contains(message), "{error}");
}

#[rstest]
#[case("gptq_4", "g_idx", Dtype::I32, vec![96], vec![7; 96 * 4], "names a group that is none of 3")]
#[case("gptq_4", "g_idx", Dtype::I32, vec![8], vec![0; 8 * 4], "g_idx is of 8 inputs, the matrix has 96")]
#[case("gptq_4", "scales", Dtype::F16, vec![5, 64], vec![0; 640], "do not fit together")]
#[case("gptq_4", "scales", Dtype::I8, vec![3, 64], vec![0; 192], "scales is I8, not a float")]
#[case("gptq_4", "qweight", Dtype::I32, vec![12, 8, 8], vec![0; 3072], "qweight has shape [12, 8, 8]")]
#[case("compressed_w4a16", "weight_shape", Dtype::I64, vec![2], vec![0xFF; 16], "weight_packed [64, 12] is not")]
#[case("compressed_w4a16", "weight_shape", Dtype::F32, vec![2], vec![0; 8], "weight_shape is F32")]
#[case("compressed_w4a16_zero", "weight_zero_point", Dtype::I8, vec![1, 3], vec![0; 3], "weight_zero_point is I8 [1, 3]")]
#[case("compressed_w8a8", "weight_scale", Dtype::BF16, vec![64, 3], vec![0; 384], "its inputs are quantised")]
#[case("compressed_w8a8", "weight_scale", Dtype::BF16, vec![64, 12], vec![0; 1536], "groups of 8 inputs cannot be used")]
#[case("compressed_w8a8", "weight_scale", Dtype::BF16, vec![64, 7], vec![0; 896], "not 7 whole groups")]
#[case("compressed_fp8", "weight_scale", Dtype::BF16, vec![64, 3], vec![0; 384], "weight_scale has shape [64, 3]")]
#[case("fp8_block", "weight_scale_inv", Dtype::F32, vec![2, 2], vec![0; 16], "blocks are of 48 x 40")]
#[case("fp8_block", "weight_scale_inv", Dtype::F32, vec![1, 1], vec![0; 4], "blocks are of 48 x 40")]
#[case("fp8_block", "weight_scale_inv", Dtype::I32, vec![2, 3], vec![0; 24], "weight_scale_inv is I32, not a float")]
fn parts_that_do_not_fit_are_refused(
    #[case] name: &str,
    #[case] part_name: &str,
    #[case] dtype: Dtype,
    #[case] shape: Vec<usize>,
    #[case] bytes: Vec<u8>,
    #[case] message: &str,
) {
    let error =
        changed(name, |_, tensors| drop(tensors.insert(part(part_name), (dtype, shape, bytes)))).unwrap_err();
    assert!(error.contains(DOWN) && error.contains(message), "{error}");
}

#[test]
fn zero_points_are_held_to_what_the_configuration_says() {
    let model = changed("gptq_4", |config, _| config["quantization_config"]["sym"] = true.into()).unwrap();
    let error = model.weights().rows(&part("weight"), 0, 64).unwrap_err().to_string();
    assert!(error.contains(DOWN) && error.contains("symmetric"), "{error}");
    // 255 and the one that was left off are more than a byte holds.
    let model = changed("gptq_8_symmetric", |config, tensors| {
        config["quantization_config"]["sym"] = false.into();
        tensors.get_mut(&part("qzeros")).unwrap().2.fill(0xFF);
    });
    let error = model.unwrap().weights().rows(&part("weight"), 0, 1).unwrap_err().to_string();
    assert!(error.contains("256, more than 255"), "{error}");
}

#[test]
fn biases_that_the_model_does_not_have_must_be_zero() {
    let biased = changed("gptq_4", |_, tensors| tensors.get_mut(&part("bias")).unwrap().2.fill(0x3C));
    let error = biased.unwrap_err();
    assert!(error.contains(&part("bias")) && error.contains("no such bias"), "{error}");
}

#[test]
fn without_the_configuration_the_tensors_are_no_part_of_a_model() {
    let error = changed("gptq_4", |config, _| {
        config.as_object_mut().unwrap().remove("quantization_config");
    })
    .unwrap_err();
    assert!(error.contains(&part("weight")) && error.contains("missing"), "{error}");
}
