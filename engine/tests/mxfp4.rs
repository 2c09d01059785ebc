//! Tests of rounding weights to MXFP4 at load.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::program::Program;
use dsrun_engine::{
    EngineOptions,
    passes::quantize::{Policy, Scheme, product_weights, quantize},
};
use dsrun_models::model::Model;
use rstest::rstest;
use support::{TOKENS, difference, engine, exact, fixtures, logits, no_inputs, open, program};

/// The element of MXFP4 nearest to a value that was divided by its scale; in the middle between two, the one with the even number.
fn nearest_element(value: f64) -> f64 {
    let elements = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let off = |index: &usize| (value.abs() - elements[*index]).abs();
    let order = |a: &usize, b: &usize| off(a).total_cmp(&off(b)).then((a % 2).cmp(&(b % 2)));
    elements[(0..8).min_by(order).unwrap()].copysign(value)
}

/// Rounds the elements of a block to MXFP4, with the exponent of least squared error among those near that of the largest.
fn round_block(block: &mut [f64]) {
    let largest = block.iter().fold(0f64, |largest, value| largest.max(value.abs()));
    let with = |exponent: i32| -> Vec<f64> {
        let scale = 2f64.powi(exponent);
        block.iter().map(|value| nearest_element(value / scale) * scale).collect()
    };
    let error = |rounded: &Vec<f64>| -> f64 {
        rounded.iter().zip(block.iter()).map(|(rounded, value)| (rounded - value).powi(2)).sum()
    };
    let exponent = largest.log2().floor() as i32 - 2;
    let candidates = [exponent, exponent + 1, exponent - 1].map(with);
    let best = candidates.into_iter().min_by(|a, b| error(a).total_cmp(&error(b))).unwrap();
    block.copy_from_slice(&best);
}

/// A fixture whose experts were rounded to MXFP4 in its file, which holds them as floats. The inputs of a matrix are the last
/// dimension of its tensor, or the one before.
fn with_rounded_experts(name: &str, transposed: bool) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(fixtures().join(name).join("config.json"), folder.path().join("config.json")).unwrap();
    let bytes = std::fs::read(fixtures().join(name).join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let rounded = |tensor: &safetensors::tensor::TensorView<'_>| -> Vec<u8> {
        let elements = tensor.data().as_chunks::<2>().0.iter();
        let mut values: Vec<f64> = elements
            .map(|bytes| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16)))
            .collect();
        let outputs = if transposed { *tensor.shape().last().unwrap() } else { 1 };
        let mut block = [0.0; 32];
        for blocks in values.chunks_exact_mut(32 * outputs) {
            for output in 0..outputs {
                let places = || (output..32 * outputs).step_by(outputs);
                block.iter_mut().zip(places()).for_each(|(value, place)| *value = blocks[place]);
                round_block(&mut block);
                block.iter().zip(places()).for_each(|(value, place)| blocks[place] = *value);
            }
        }
        values.into_iter().flat_map(|value| (value as f32).to_le_bytes()).collect()
    };
    let tensors = file.tensors().into_iter().map(|(name, tensor)| {
        let is_expert = name.contains("experts") && !name.ends_with("bias");
        let (dtype, data) = match is_expert {
            true => (safetensors::Dtype::F32, rounded(&tensor)),
            false => (tensor.dtype(), tensor.data().to_vec()),
        };
        (name, dtype, tensor.shape().to_vec(), data)
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    let model = Model::open(folder.path()).unwrap();
    (folder, model)
}

/// A policy of `mxfp4` rounds the matrices of experts, and nothing else.
#[rstest]
#[case("mixtral", false)]
#[case("gpt_oss", true)]
fn mxfp4_gives_the_logits_of_experts_that_were_rounded_by_hand(#[case] name: &str, #[case] transposed: bool) {
    let (_folder, by_hand) = with_rounded_experts(name, transposed);
    let expected = logits(&mut engine(&by_hand, &exact(16, 1)), &TOKENS);
    let rounding = EngineOptions { quantize: Some(Policy::of(Scheme::Mxfp4)), ..exact(16, 1) };
    let found = logits(&mut engine(&open(name), &rounding), &TOKENS);
    let error = difference(&found, &expected);
    assert!(error < 1e-5, "{name}: {error:.2e}");
    let plain = logits(&mut engine(&open(name), &exact(16, 1)), &TOKENS);
    assert!(difference(&found, &plain) > 1e-3, "{name}: nothing was rounded");

    let rounded = quantize(&program(name), &Policy::of(Scheme::Mxfp4), &no_inputs).unwrap();
    for weight in product_weights(&rounded) {
        let format = rounded.values[weight.id.index()].weight_type().unwrap().format.to_string();
        assert_eq!(format, if weight.expert { "mxfp4" } else { "bf16" }, "{}", weight.name);
    }
    assert_eq!(rounded.to_string().parse::<Program>().unwrap(), rounded);
}

#[test]
fn mxfp4_keeps_experts_that_have_it_and_refuses_models_without_experts() {
    let stored = program("gpt_oss_mxfp4");
    assert_eq!(quantize(&stored, &Policy::of(Scheme::Mxfp4), &no_inputs).unwrap(), stored);
    let refusal = |name: &str| {
        quantize(&program(name), &Policy::of(Scheme::Mxfp4), &no_inputs).unwrap_err().to_string()
    };
    let error = refusal("llama3");
    assert!(error.contains("rounds the weights of experts, and this model has none"), "{error}");
    let error = refusal("qwen3_moe");
    assert!(error.contains("rows of 16 columns cannot be stored as mxfp4"), "{error}");
    // Other weights have the format if a pattern names them.
    let policy = Policy::from_toml("[weights]\nlayers = \"mxfp4\"\n").unwrap();
    let rounded = quantize(&program("llama3"), &policy, &no_inputs).unwrap();
    let of_layers = product_weights(&rounded).into_iter().filter(|weight| !weight.head);
    for weight in of_layers {
        let format = rounded.values[weight.id.index()].weight_type().unwrap().format;
        assert_eq!(format.to_string(), "mxfp4", "{}", weight.name);
    }
}
