//! Tests of quantisation: the rewritten programs, smoothing, mixed precision, and the error of rounded models.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test that cannot go on has failed, and measured errors are printed"
)]

mod support;

use dsrun_core::{
    DType, GroupFormat, WeightExpr, WeightFormat, WeightReader,
    op::Op,
    program::{Call, Node, Origin, Program, ValueId},
};
use dsrun_engine::{
    EngineOptions, EnginePlan, Precision, calibrate, log_probability, mixed_precision,
    passes::{
        fuse,
        quantize::{
            Calibration, Candidate, Policy, Scheme, choose, product_weights, quantize, quantize_inputs,
            smooth,
        },
    },
    sensitivity,
};
use dsrun_models::{config::DecoderConfig, model::Model, step::ProgramOptions, weights::ExprReader};
use rstest::rstest;
use std::{collections::BTreeMap, path::Path, sync::Arc};
use support::{TOKENS, device, difference, engine, exact, fixtures, logits, no_inputs, open, program};

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
    let quantised = quantize(&plain, &Policy::of(Scheme::W8A8), &no_inputs).unwrap();
    let products = product_weights(&plain);
    let kept = products.iter().filter(|weight| weight.kept).count();
    assert_eq!(kept, 1, "the weight of the logits is kept");
    assert_eq!(count(&quantised, "linear"), 1);
    assert_eq!(count(&quantised, "linear_w8a8"), products.len() - 1);
    // Per layer: queries, keys and values; the output; the MLP's first half; its second.
    assert_eq!(count(&quantised, "quant_per_token"), 2 * 4);
    assert_eq!(quantised.to_string().parse::<Program>().unwrap(), quantised);
}

/// The inputs of products with quantised weights are quantised once for all products that share them; those of dense weights and of
/// routers are not.
#[rstest]
#[case("gguf/smollm2_q4_1", None)]
#[case("gguf/qwen2_q8_0", None)]
#[case("llama3", Some(Scheme::W4A16))]
#[case("qwen3_moe", Some(Scheme::W8A16))]
fn inputs_are_quantised_where_weights_are(#[case] name: &str, #[case] scheme: Option<Scheme>) {
    let plain = open(name).program(&ProgramOptions::default()).unwrap();
    let policy = scheme.map(Policy::of).unwrap_or_default();
    let rounded = quantize(&plain, &policy, &no_inputs).unwrap();
    let found = quantize_inputs(&rounded).unwrap();
    let suits = |program: &Program, node: &Node, operand: usize| {
        let weight = program.values[node.call.operands[operand].unwrap().index()].weight_type().unwrap();
        weight.format.is_quantised() && weight.columns().is_multiple_of(32)
    };
    assert!(count(&found, "linear_a8") >= 4, "{:?}", names(&found));
    for node in &found.nodes {
        match node.call.op.name() {
            "linear" => assert!(!suits(&found, node, 1), "{}", node.call.op),
            "linear_a8" => assert!(suits(&found, node, 2), "{}", node.call.op),
            _ => {}
        }
    }
    let linear = |program: &Program, op: &str| count(program, op);
    assert_eq!(linear(&found, "linear") + linear(&found, "linear_a8"), linear(&rounded, "linear"));
    let inputs: std::collections::HashSet<_> = found
        .nodes
        .iter()
        .filter(|node| node.call.op.name() == "linear_a8")
        .map(|node| node.call.operands[0])
        .collect();
    assert_eq!(inputs.len(), count(&found, "quant_per_group"), "every quantisation is shared");
    if scheme.is_some() {
        assert_eq!(
            quantize_inputs(&plain).unwrap(),
            plain,
            "weights that are not quantised stay as they are"
        );
    }
}

/// Rounding inputs to 8 bits moves logits, by far less than rounding the weights did.
#[rstest]
fn rounded_inputs_move_logits_a_little(
    #[values("gguf/smollm2_q4_1", "gguf/smollm2_q4_0", "gguf/qwen2_q8_0", "gguf/olmo2_q8_0")] name: &str,
) {
    let options =
        |exact| EngineOptions { exact, max_requests: 1, step_tokens: 32, ..EngineOptions::default() };
    let exactly = logits(&mut engine(&open(name), &options(true)), &TOKENS);
    let rounded = logits(&mut engine(&open(name), &options(false)), &TOKENS);
    let error = squared(&rounded, &exactly);
    eprintln!("{name}: {error:.2e}");
    assert!(error > 1e-9, "{name}: inputs are not rounded");
    // Each input is off by at most 1/254 of the largest of 32: about 1e-5 of the square of a product, through two layers.
    assert!(error < 1e-3, "{name}: {error}");
}

/// Fusion merges the quantisation of activations with their producer, and products keep their epilogues.
#[rstest]
#[case("llama3", "gated_activation")]
#[case("gpt2", "activation")]
fn fusion_merges_quantisation_with_the_op_before(#[case] name: &str, #[case] activation: &str) {
    let known = [
        "norm_quant",
        "gated_activation_quant",
        "activation_quant",
        "linear_w8a8_add",
        "linear_w8a8_activation",
    ];
    let quantised = quantize(&program(name), &Policy::of(Scheme::W8A8), &no_inputs).unwrap();
    let mut native = |_: &Program, call: &Call| Ok(known.contains(&call.op.name()));
    let fused = fuse(&quantised, &mut native).unwrap();
    assert_eq!(count(&fused, "norm_quant"), 4, "{:?}", names(&fused));
    assert_eq!(count(&fused, "linear_w8a8_add"), 4);
    // An activation between two products is fused with one of them: the fewest bytes move if it is the first.
    let fused_activations =
        count(&fused, "linear_w8a8_activation") + count(&fused, &format!("{activation}_quant"));
    assert_eq!(fused_activations, 2, "{:?}", names(&fused));

    // A device with kernels for every region runs quantisation, product, rotation and cache write as one, and the norm too,
    // except for the norm of the first layer, which is fused with the embedding.
    let fused = fuse(&quantised, &mut |_: &Program, _: &Call| Ok(true)).unwrap();
    let holding = |wanted: &[&str]| {
        let holds = |node: &&Node| match &node.call.op {
            Op::Region(region) => {
                wanted.iter().all(|op| region.calls().iter().any(|call| call.op.name() == *op))
            }
            _ => false,
        };
        fused.nodes.iter().filter(holds).count()
    };
    assert_eq!(holding(&["linear_w8a8", "kv_write"]), 2, "{:?}", names(&fused));
    assert_eq!(holding(&["quant_per_token", "linear_w8a8"]), 2 * 4 - 1, "{:?}", names(&fused));
    assert_eq!(holding(&["embed", "quant_per_token"]), 1, "{:?}", names(&fused));
}

#[test]
fn a_policy_sets_the_formats_of_the_weights_it_names() {
    let text = "default = \"w8a16\"\n[weights]\nlm_head = \"f16\"\n\"layers.0\" = \"int4g32z_f16\"\n\"layers.0.down\" = \"keep\"\n";
    let quantised = quantize(&program("llama3"), &Policy::from_toml(text).unwrap(), &no_inputs).unwrap();
    let format = |name: &str| {
        let value = quantised.values.iter().find(|value| value.name == name).unwrap();
        value.weight_type().unwrap().format.to_string()
    };
    assert_eq!(format("layers.0.query"), "int4g32z_f16");
    assert_eq!(format("layers.0.down"), "bf16", "as the file has it");
    assert_eq!(format("layers.1.up"), "int8");
    let head = product_weights(&quantised).into_iter().find(|weight| weight.head).unwrap();
    assert_eq!(format(&head.name), "f16");

    let unknown = Policy::from_toml("[weights]\nlayers.7 = \"w8a16\"\n").unwrap();
    let error = quantize(&program("llama3"), &unknown, &no_inputs).unwrap_err().to_string();
    assert!(error.contains("`layers.7` matches no weight of a matrix product"), "{error}");
}

#[rstest]
fn weights_of_experts_are_rounded_and_routers_kept(
    #[values("mixtral", "qwen2_moe", "gpt_oss", "glm4_moe")] name: &str,
    #[values(Scheme::W8A16, Scheme::W8A8)] scheme: Scheme,
) {
    let quantised = quantize(&program(name), &Policy::of(scheme), &no_inputs).unwrap();
    let format = |id: Option<ValueId>| quantised.values[id.unwrap().index()].weight_type().unwrap().format;
    let weights = |op: &str| -> Vec<WeightFormat> {
        let calls = quantised.nodes.iter().filter(|node| node.call.op.name() == op);
        calls.map(|node| format(node.call.operands[1])).collect()
    };
    let of_experts = weights("grouped_linear");
    assert!(!of_experts.is_empty() && of_experts.iter().all(|format| format.to_string() == "int8"));
    for route in quantised.nodes.iter().filter(|node| node.call.op.name() == "moe_route") {
        let makes =
            quantised.nodes.iter().find(|node| node.call.results[0] == route.call.operands[0].unwrap());
        assert!(matches!(format(makes.unwrap().call.operands[1]), WeightFormat::Dense(_)));
    }
}

#[rstest]
#[case("w8a16", 1e-9, 1e-4)]
#[case("w4a16", 1e-4, 5e-2)]
fn rounded_experts_move_logits_by_their_rounding(
    #[values("mixtral", "qwen3_moe")] name: &str,
    #[case] scheme: &str,
    #[case] least: f64,
    #[case] most: f64,
) {
    let text = format!("[weights]\n\"layers.*.expert_up\" = \"{scheme}\"\n");
    let error = relative_error(name, &quantised(&text));
    assert!((least..most).contains(&error), "{scheme}: {error:.3e}");
}

/// The mean squared difference of a quantised model's logits from the original ones, over the mean square of the latter.
fn relative_error(name: &str, options: &EngineOptions) -> f64 {
    let model = open(name);
    let expected = logits(&mut engine(&model, &exact(16, 1)), &TOKENS);
    let found = logits(&mut engine(&model, options), &TOKENS);
    squared(&found, &expected)
}

/// The sum of squared differences over the sum of the expected squares.
fn squared(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f64 {
    let pairs =
        || found.iter().flatten().zip(expected.iter().flatten()).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    pairs().map(|(a, b)| (a - b).powi(2)).sum::<f64>() / pairs().map(|(_, b)| b * b).sum::<f64>()
}

/// The errors of transformers with layers rounded by `data/rounded.py`, by model and scheme.
fn rounded() -> BTreeMap<String, BTreeMap<String, f64>> {
    serde_json::from_str(include_str!("data/rounded.json")).unwrap()
}

#[rstest]
fn errors_of_rounded_models_agree_with_transformers(#[values("llama3", "gpt2", "opt")] name: &str) {
    for (way, expected) in &rounded()[name] {
        let found = relative_error(name, &quantised(&format!("default = \"{way}\"")));
        // The integers are the same; only sums have another order.
        assert!((found / expected - 1.0).abs() < 0.01, "{way}: {found:.3e}, not {expected:.3e}");
    }
}

fn calibration(model: &Model) -> Calibration {
    calibrate(model, device(), &[TOKENS.to_vec()]).unwrap()
}

#[rstest]
fn calibration_observes_every_product(#[values("llama3", "gpt2", "mixtral")] name: &str) {
    let model = open(name);
    let seen = calibration(&model);
    for weight in product_weights(&program(name)) {
        let channels = &seen.products[&weight.name];
        let value = program(name).values[weight.id.index()].clone();
        assert_eq!(channels.largest.len(), value.weight_type().unwrap().columns(), "{}", weight.name);
        let rows = match weight.name.as_str() {
            // Only the last row is an output row.
            _ if weight.head => 1,
            // Each token has two experts, whose activations differ.
            name if name.ends_with("expert_down") => 2 * TOKENS.len(),
            _ => TOKENS.len(),
        };
        assert_eq!(channels.rows, rows, "{}", weight.name);
        assert!(channels.largest.iter().any(|largest| *largest > 0.0));
        let bound = channels.largest.iter().zip(channels.mean_squares());
        assert!(bound.into_iter().all(|(largest, mean)| mean <= f64::from(largest * largest) * 1.0001));
    }
}

/// Smoothing divides a channel in front of a product and multiplies the weight by the same factor. If one of them were missing,
/// the logits would be far off.
#[rstest]
fn smoothing_keeps_the_model(#[values("llama3", "gpt2", "opt", "qwen2")] name: &str) {
    let model = open(name);
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
    // At least the norms of each layer and the products that read them: queries, keys, values, the first half of the MLP.
    assert!(scaled.count() >= 2 * (2 + 4));

    let options = EngineOptions { quantize: Some(policy), calibration: Some(Arc::new(seen)), ..exact(16, 1) };
    // Random weights have no outliers, so smoothing just rounds differently: the error is 0.8 to 1.2 times as large. Factors on
    // one side only would change products by the size of the factors.
    let plain = EngineOptions { quantize: Some(Policy::of(Scheme::W8A8)), ..exact(16, 1) };
    let (smoothed, plain) = (relative_error(name, &options), relative_error(name, &plain));
    eprintln!("{name}: {smoothed:.2e} smoothed, {plain:.2e} without smoothing");
    assert!(smoothed < 2.0 * plain, "{smoothed:.2e} smoothed, {plain:.2e} without smoothing");
    let missing = EngineOptions { calibration: None, ..options };
    let error = EnginePlan::new(&model, &*device(), &missing).unwrap_err().to_string();
    assert!(error.contains("its activations were not observed"), "{error}");
}

#[test]
fn the_same_policy_gives_the_same_logits_fused_or_not() {
    let model = open("llama3");
    let options = quantised("default = \"w8a8\"");
    let fused = logits(&mut engine(&model, &options), &TOKENS);
    let plain = logits(&mut engine(&model, &EngineOptions { fuse: false, ..options }), &TOKENS);
    // Integer sums are exact, in one product or in three.
    assert!(difference(&fused, &plain) < 1e-5, "{}", difference(&fused, &plain));
}

/// A generator of repeatable, approximately normal noise.
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

/// Layers whose activations differ by a factor of a thousand, and outliers in every fourth weight, as in large models.
#[test]
fn mixed_precision_beats_a_uniform_format_on_outliers() {
    let mut noise = Noise(11);
    let (rows, columns) = (8, 2048);
    let formats = ["int4g128_f16", "int4g64_f16", "int4g32_f16", "int8g128_f16", "int8g64_f16"]
        .map(|name| GroupFormat::from_name(name).unwrap());
    let mut candidates = BTreeMap::new();
    for layer in 0..32 {
        let mut values: Vec<f32> = (0..rows * columns).map(|_| noise.normal() * 0.02).collect();
        if layer % 4 == 0 {
            values.iter_mut().step_by(97).for_each(|value| *value *= 20.0);
        }
        let size = 10f64.powf(f64::from(layer % 16) / 5.0);
        let energy: Vec<f64> = (0..columns).map(|_| f64::from(noise.normal()).powi(2) * size).collect();
        let of = |format| Candidate::of_rows(&values, &energy, format, true).unwrap();
        candidates.insert(format!("layers.{layer}"), formats.map(of).to_vec());
    }
    for (uniform, at_most) in formats.iter().zip([1.0, 0.65, 0.45]) {
        let everywhere = candidates.values().flatten().filter(|candidate| candidate.format == *uniform);
        let (budget, error) = everywhere.fold((0, 0.0), |sum, of| (sum.0 + of.bytes, sum.1 + of.error));
        let chosen = choose(&candidates, budget).unwrap();
        assert!(chosen.iter().map(|choice| choice.chosen.bytes).sum::<u64>() <= budget);
        let mixed: f64 = chosen.iter().map(|choice| choice.chosen.error).sum();
        // Measured: 0.612 and 0.425 of the uniform error; at the size of the smallest format there is no choice.
        eprintln!("{uniform}: {error:.4e}, mixed precision {mixed:.4e}: {:.3} of it", mixed / error);
        assert!(mixed <= at_most * error, "{uniform}: {mixed} of {error}");
    }
}

/// Logarithms of probabilities.
fn logarithms(logits: &[Vec<f32>]) -> Vec<Vec<f64>> {
    let of = |row: &Vec<f32>| (0..).zip(row).map(|(token, _)| log_probability(row, token)).collect();
    logits.iter().map(of).collect()
}

/// The Kullback-Leibler divergence of the found probabilities from the expected ones, averaged over the rows.
fn divergence(expected: &[Vec<f32>], found: &[Vec<f32>]) -> f64 {
    let (expected, found) = (logarithms(expected), logarithms(found));
    let pairs = expected.iter().flatten().zip(found.iter().flatten());
    pairs.map(|(p, q)| p.exp() * (p - q)).sum::<f64>() / expected.len() as f64
}

/// The sensitivity to one weight, measured by repeating a part of the pass, must equal the divergence of a model with that weight
/// rounded.
#[rstest]
fn sensitivities_equal_the_divergence_of_models_with_one_rounded_weight(
    #[values("llama3", "gpt2", "qwen3")] name: &str,
) {
    let model = open(name);
    let expected = logits(&mut engine(&model, &exact(64, 1)), &TOKENS);
    let seen = sensitivity(&model, device(), &TOKENS, &mut |_, _| {}).unwrap();
    let weights: Vec<_> = product_weights(&program(name)).into_iter().filter(|weight| !weight.kept).collect();
    assert_eq!(seen.len(), weights.len());
    for weight in weights {
        let found = seen[&weight.name];
        let policy = format!("[weights]\n\"{}\" = \"{}\"\n", weight.name, found.format);
        let options = EngineOptions { fuse: false, ..quantised(&policy) };
        let shown = divergence(&expected, &logits(&mut engine(&model, &options), &TOKENS));
        assert!(shown > 0.0);
        // The steps differ in size, so sums have another order.
        let off = (found.divergence / shown - 1.0).abs();
        assert!(off < 0.02, "{}: {:.4e}, not {shown:.4e}", weight.name, found.divergence);
    }
}

/// The gate of mixed precision: at equal size it is closer to the model than a uniform format, on tokens that were not used for
/// the choice.
#[test]
fn mixed_precision_is_closer_to_the_model_than_a_uniform_format() {
    let config = r#"{"model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 256,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": false}"#;
    let config = DecoderConfig::from_json_bytes(config.as_bytes()).unwrap();
    let model = Model::random("random", config, 5, WeightFormat::Dense(DType::F32)).unwrap();
    let mut state = 1u32;
    let mut tokens = |count: usize| -> Vec<u32> {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 24
        };
        (0..count).map(|_| next()).collect()
    };
    let (chosen_by, held_out) = (tokens(96), tokens(192));
    let seen = calibrate(&model, device(), std::slice::from_ref(&chosen_by)).unwrap();
    let moved = sensitivity(&model, device(), &chosen_by, &mut |_, _| {}).unwrap();
    let run = |quantize: Option<Policy>| {
        logits(&mut engine(&model, &EngineOptions { quantize, ..exact(192, 1) }), &held_out)
    };
    let expected = run(None);
    for (name, bits) in [("int4g64_f16", 4.25), ("int4g32_f16", 4.5)] {
        let uniform = Policy::of(Scheme::Group(GroupFormat::from_name(name).unwrap()));
        let mixed = mixed_precision(&model, &seen, &moved, bits, &mut |_, _| {}).unwrap();
        assert!(mixed.figures.bits <= bits);
        let same = mixed.uniform.iter().find(|(format, _)| format.to_string() == name).unwrap().1;
        assert!((same.bits - bits).abs() < 1e-9);
        let (found, uniform) =
            (divergence(&expected, &run(Some(mixed.policy))), divergence(&expected, &run(Some(uniform))));
        eprintln!(
            "{name}: {uniform:.5} nats per token, {:.5} expected; mixed precision: {found:.5}, {:.5} expected",
            same.divergence, mixed.figures.divergence
        );
        assert!(found < uniform, "{name}: {found} of {uniform}");
    }
}

/// Tokens, and the logits that transformers computes for them.
fn reference(folder: &Path, kind: &str) -> Vec<(Vec<u32>, Vec<Vec<f32>>)> {
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: String| {
        let tensor = file.tensor(&name).unwrap();
        (tensor.data().as_chunks::<4>().0.to_vec(), tensor.shape().last().copied().unwrap())
    };
    let sequence = |number: usize| {
        let tokens = words(format!("tokens_{number}")).0.into_iter().map(u32::from_le_bytes).collect();
        let (logits, vocabulary) = words(format!("{kind}_{number}"));
        let logits: Vec<f32> = logits.into_iter().map(f32::from_le_bytes).collect();
        (tokens, logits.chunks_exact(vocabulary).map(<[f32]>::to_vec).collect())
    };
    [0, 1].into_iter().map(sequence).collect()
}

#[rstest]
fn a_checkpoint_for_integer_products_runs_on_them(
    #[values(true, false)] fuse: bool,
    #[values(64, 5)] step: usize,
) {
    let folder = fixtures().join("quantised/compressed_w8a8");
    let model = Model::open(&folder).unwrap();
    let mut engine = engine(&model, &EngineOptions { precision: Precision::Keep, fuse, ..exact(step, 1) });
    for (tokens, expected) in reference(&folder, "symmetric") {
        // Nearly all integers are the same. Where a float sum ends close to the border between two of them, its order decides which
        // it becomes, so that a few may be apart by one. All that rounding does is 1.47e-3 and 5.2e-4 (relative, squared), which is
        // how far logits without rounded inputs are off. One integer apart does 1.7e-6; three may be.
        let error = squared(&logits(&mut engine, &tokens), &expected);
        assert!(error < 5.2e-6, "off by {error:.2e}");
    }
    // compressed-tensors itself divides by 127.5: other integers, with errors of their own. Without rounding, logits are off from
    // those of one by 1.47e-3 and 5.2e-4 (relative, squared) and from those of the other by 1.63e-3 and 5.8e-4, so that the two
    // cannot be further apart than twice the sums.
    for ((tokens, expected), limit) in reference(&folder, "logits").into_iter().zip([6.2e-3, 2.2e-3]) {
        let error = squared(&logits(&mut engine, &tokens), &expected);
        assert!(error < limit, "off by {error:.2e}");
    }
}

#[test]
fn a_policy_takes_precedence_over_the_checkpoint() {
    let model = Model::open(fixtures().join("quantised/compressed_w8a8")).unwrap();
    let products = |options: &EngineOptions| {
        let plan =
            EnginePlan::new(&model, &*device(), &EngineOptions { fuse: false, ..options.clone() }).unwrap();
        count(plan.program(), "linear_w8a8")
    };
    let keep = EngineOptions { precision: Precision::Keep, ..exact(16, 1) };
    assert_eq!(products(&keep), 2 * 7);
    let some =
        Policy::from_toml("[weights]\n\"layers.*.down\" = \"w8a16\"\n\"layers.0.up\" = \"f32\"\n").unwrap();
    assert_eq!(products(&EngineOptions { quantize: Some(some), ..keep }), 2 * 7 - 3);
    // Decoded weights have no integer products.
    assert_eq!(products(&exact(16, 1)), 0);
    // Calibration observes the inputs before they are rounded.
    let seen = calibration(&model);
    assert_eq!(seen.products.len(), 2 * 7 + 1);
    assert!(seen.products.values().all(|channels| channels.rows > 0));
}
