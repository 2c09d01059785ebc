//! Quantisation: what becomes of programs, that smoothing changes nothing, and how far rounded models are from their own.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test that cannot go on has failed, and says why it skips"
)]

mod support;

use dsrun_core::{
    GroupFormat, WeightExpr, WeightReader,
    op::Op,
    program::{Call, Origin, Program},
};
use dsrun_engine::{
    EngineOptions, EnginePlan, calibrate,
    passes::{
        fuse,
        quantize::{
            Calibration, Candidate, Policy, Scheme, choose, product_weights, quantize, smooth, weight_error,
        },
    },
};
use dsrun_models::{model::Model, step::ProgramOptions, weights::ExprReader};
use rstest::rstest;
use std::{collections::BTreeMap, sync::Arc};
use support::{device, difference, engine, exact, fixtures, logits};

const TOKENS: [u32; 24] =
    [5, 17, 3, 88, 41, 9, 60, 2, 33, 71, 14, 6, 90, 25, 48, 7, 11, 52, 38, 19, 64, 80, 1, 30];

fn model(name: &str) -> Model {
    Model::open(fixtures().join(name)).unwrap()
}

fn program(name: &str) -> Program {
    model(name).program(&ProgramOptions::default()).unwrap()
}

fn names(program: &Program) -> Vec<&str> {
    program.nodes.iter().map(|node| node.call.op.name()).collect()
}

fn count(program: &Program, op: &str) -> usize {
    names(program).into_iter().filter(|name| *name == op).count()
}

fn quantised(text: &str) -> EngineOptions {
    EngineOptions { quantize: Some(Policy::from_toml(text).unwrap()), ..exact(16, 1) }
}

#[rstest]
fn products_of_the_same_activations_share_their_quantisation(
    #[values("llama3", "gpt2", "opt", "qwen3")] name: &str,
) {
    let plain = program(name);
    let quantised = quantize(&plain, &Policy::of(Scheme::W8A8)).unwrap();
    let products = product_weights(&plain);
    let kept = products.iter().filter(|weight| weight.kept).count();
    assert_eq!(kept, 1, "the weight that makes the logits is kept");
    assert_eq!(count(&quantised, "linear"), 1);
    assert_eq!(count(&quantised, "linear_w8a8"), products.len() - 1);
    // Per layer: queries, keys and values; the output; the MLP's first half; its second.
    assert_eq!(count(&quantised, "quant_per_token"), 2 * 4);
    assert_eq!(quantised.to_string().parse::<Program>().unwrap(), quantised);
}

/// Activations are quantised in the op that makes them, and products of them keep what stands behind them.
#[rstest]
#[case("llama3", "gated_activation")]
#[case("gpt2", "activation")]
fn fusion_takes_quantisation_in(#[case] name: &str, #[case] activation: &str) {
    let known = [
        "norm_quant",
        "gated_activation_quant",
        "activation_quant",
        "linear_w8a8_add",
        "linear_w8a8_activation",
    ];
    let quantised = quantize(&program(name), &Policy::of(Scheme::W8A8)).unwrap();
    let mut native = |_: &Program, call: &Call| Ok(known.contains(&call.op.name()));
    let fused = fuse(&quantised, &mut native).unwrap();
    assert_eq!(count(&fused, "norm_quant"), 4, "{:?}", names(&fused));
    assert_eq!(count(&fused, "linear_w8a8_add"), 4);
    // Of an activation between two products, one side takes it in: the fewest bytes move if the first does.
    let taken = count(&fused, "linear_w8a8_activation") + count(&fused, &format!("{activation}_quant"));
    assert_eq!(taken, 2, "{:?}", names(&fused));

    // A device that has kernels for everything runs norm, quantisation, one product, rotation and cache as one.
    let fused = fuse(&quantised, &mut |_: &Program, _: &Call| Ok(true)).unwrap();
    let whole = |call: &&Call| match &call.op {
        Op::Region(region) => {
            let body: Vec<&str> = region.calls().iter().map(|call| call.op.name()).collect();
            body.contains(&"quant_per_token") && body.contains(&"linear_w8a8") && body.contains(&"kv_write")
        }
        _ => false,
    };
    let calls = fused.nodes.iter().map(|node| &node.call);
    assert_eq!(calls.filter(whole).count(), 2, "{:?}", names(&fused));
}

#[test]
fn a_policy_reaches_the_weights_it_names() {
    let text = "default = \"w8a16\"\n[weights]\nlm_head = \"bf16\"\nlayers.0 = \"int4g32z_f16\"\nlayers.0.down = \"keep\"\n";
    let quantised = quantize(&program("llama3"), &Policy::from_toml(text).unwrap()).unwrap();
    let format = |name: &str| {
        let value = quantised.values.iter().find(|value| value.name == name).unwrap();
        value.weight_type().unwrap().format.to_string()
    };
    assert_eq!(format("layers.0.query"), "int4g32z_f16");
    assert_eq!(format("layers.0.down"), "f32");
    assert_eq!(format("layers.1.up"), "int8");
    let head = product_weights(&quantised).into_iter().find(|weight| weight.head).unwrap();
    assert_eq!(format(&head.name), "bf16");

    let unknown = Policy::from_toml("[weights]\nlayers.7 = \"w8a16\"\n").unwrap();
    let error = quantize(&program("llama3"), &unknown).unwrap_err().to_string();
    assert!(error.contains("`layers.7` names no weight of a product"), "{error}");
}

/// The mean squared difference of logits from those of the model as it is, over the mean square of the latter.
fn relative_error(name: &str, options: &EngineOptions) -> f64 {
    let model = model(name);
    let expected = logits(&mut engine(&model, &exact(16, 1)), &TOKENS);
    let found = logits(&mut engine(&model, options), &TOKENS);
    let pairs =
        || expected.iter().flatten().zip(found.iter().flatten()).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    pairs().map(|(a, b)| (a - b).powi(2)).sum::<f64>() / pairs().map(|(a, _)| a * a).sum::<f64>()
}

#[rstest]
fn rounded_models_stay_near_their_own(#[values("llama3", "gpt2", "opt")] name: &str) {
    // One rounding of an 8-bit integer is off by 1 / 254 of the largest at most, a few times less on average, and errors of a few
    // layers add up; the limits are ten times what random weights show, and a scale applied twice or not at all is far beyond.
    assert!(relative_error(name, &quantised("default = \"w8a16\"")) < 1e-3);
    assert!(relative_error(name, &quantised("default = \"w8a8\"")) < 4e-3);
    assert!(relative_error(name, &quantised("default = \"int4g32_f16\"")) < 0.3);
}

fn calibration(model: &Model) -> Calibration {
    calibrate(model, device(), &[TOKENS.to_vec()]).unwrap()
}

#[rstest]
fn calibration_sees_every_product(#[values("llama3", "gpt2")] name: &str) {
    let model = model(name);
    let seen = calibration(&model);
    for weight in product_weights(&program(name)) {
        let channels = &seen.products[&weight.name];
        let value = program(name).values[weight.id.index()].clone();
        assert_eq!(channels.largest.len(), value.weight_type().unwrap().columns(), "{}", weight.name);
        // Only the last row's logits are wanted.
        assert_eq!(channels.rows, if weight.head { 1 } else { TOKENS.len() }, "{}", weight.name);
        assert!(channels.largest.iter().any(|largest| *largest > 0.0));
        let bound = channels.largest.iter().zip(channels.mean_squares());
        assert!(bound.into_iter().all(|(largest, mean)| mean <= f64::from(largest * largest) * 1.0001));
    }
}

/// What a channel is divided by in front of a product its weight is multiplied by: were one of them forgotten, logits would be
/// far off.
#[rstest]
fn smoothing_keeps_the_model(#[values("llama3", "gpt2", "opt", "qwen2")] name: &str) {
    let model = model(name);
    let policy = Policy { smooth: Some(0.5), ..Policy::of(Scheme::W8A8) };
    let read = |expr: &WeightExpr| {
        let reader = ExprReader::new(&**model.weights(), expr)?;
        reader.decoded_rows(0, reader.weight_type().rows())
    };
    let seen = calibration(&model);
    let smoothed = smooth(&program(name), &policy, &seen, &read).unwrap();
    let scaled = smoothed.values.iter().filter(
        |value| matches!(&value.origin, Origin::Weight(expr) if expr.to_string().contains("factors(")),
    );
    // The norms of each layer, and what reads them: queries, keys and values, and the MLP's first half, at least.
    assert!(scaled.count() >= 2 * (2 + 4));

    let options = EngineOptions { quantize: Some(policy), calibration: Some(Arc::new(seen)), ..exact(16, 1) };
    assert!(relative_error(name, &options) < 4e-3);
    let missing = EngineOptions { calibration: None, ..options };
    let error = EnginePlan::new(&model, &*device(), &missing).unwrap_err().to_string();
    assert!(error.contains("its activations were not observed"), "{error}");
}

#[test]
fn the_same_policy_gives_the_same_logits_fused_or_not() {
    let model = model("llama3");
    let options = quantised("default = \"w8a8\"");
    let fused = logits(&mut engine(&model, &options), &TOKENS);
    let plain = logits(&mut engine(&model, &EngineOptions { fuse: false, ..options }), &TOKENS);
    assert!(difference(&fused, &plain) < 1e-2, "{}", difference(&fused, &plain));
}

/// A generator of repeatable noise, about normal.
struct Noise(u64);

impl Noise {
    fn normal(&mut self) -> f32 {
        let mut unit = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1u64 << 24) as f32
        };
        (0..12).map(|_| unit()).sum::<f32>() - 6.0
    }
}

/// The formats a mixture may choose from.
fn formats() -> Vec<GroupFormat> {
    ["int4g128_f16", "int4g64_f16", "int4g32_f16", "int8g128_f16", "int8g64_f16"]
        .into_iter()
        .filter_map(GroupFormat::from_name)
        .collect()
}

/// The sum of errors of all weights, uniformly in `int4g64_f16`, and in a mixture of the same size.
fn uniform_and_mixture(weights: &BTreeMap<String, (Vec<f32>, Vec<f64>)>) -> (f64, f64) {
    let candidates: BTreeMap<String, Vec<Candidate>> = weights
        .iter()
        .map(|(name, (values, energy))| {
            let of = |format| weight_error(values, energy, format, true).unwrap();
            (name.clone(), formats().into_iter().map(of).collect())
        })
        .collect();
    let uniform: Vec<&Candidate> = candidates
        .values()
        .map(|all| all.iter().find(|candidate| candidate.format.to_string() == "int4g64_f16").unwrap())
        .collect();
    let budget: u64 = uniform.iter().map(|candidate| candidate.bytes).sum();
    let chosen = choose(&candidates, budget).unwrap();
    assert!(chosen.iter().map(|choice| choice.chosen.bytes).sum::<u64>() <= budget);
    let error = chosen.iter().map(|choice| choice.chosen.error).sum();
    (uniform.iter().map(|candidate| candidate.error).sum(), error)
}

/// Layers whose activations differ a thousandfold, and every fourth weight with outliers, as large models have them.
#[test]
fn a_mixture_beats_four_bits_everywhere_on_outliers() {
    let mut noise = Noise(11);
    let (rows, columns) = (48, 512);
    let mut weights = BTreeMap::new();
    for layer in 0..16 {
        let mut values: Vec<f32> = (0..rows * columns).map(|_| noise.normal() * 0.02).collect();
        if layer % 4 == 0 {
            values.iter_mut().step_by(97).for_each(|value| *value *= 20.0);
        }
        let size = 10f64.powi(layer % 4);
        let energy = (0..columns).map(|_| f64::from(noise.normal()).powi(2) * size).collect();
        weights.insert(format!("layers.{layer}"), (values, energy));
    }
    let (uniform, mixture) = uniform_and_mixture(&weights);
    eprintln!("uniform {uniform:.4e}, mixture {mixture:.4e}: {:.2} of it", mixture / uniform);
    assert!(mixture < 0.75 * uniform, "{mixture} of {uniform}");
}
