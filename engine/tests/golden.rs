//! The real SmolLM2: its results compared with those of an independent engine (see `data/`), and quantised with unquantised.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_engine::{
    CachePrecision, EngineOptions, Precision, SamplingOptions, Score, calibrate, passes::quantize::Policy,
};
use dsrun_models::tokenizer::EncodeOptions;
use dsrun_test_support::{TestResult, test_main};
use serde::Deserialize;
use std::sync::Arc;
use support::{assert_greedy, device, engine, exact, greedy, real_model};

test_main![
    f32_reproduces_logits_likelihoods_and_greedy_text,
    the_default_precision_stays_close_to_f32,
    a_cache_of_8_bits_stays_close_to_f32,
    four_sequences_in_one_batch_match_each_alone,
    equal_seeds_repeat_and_other_seeds_differ,
    quantised_weights_predict_a_text_about_as_well,
];

#[derive(Deserialize)]
struct Golden {
    prompt: String,
    tokens: Vec<u32>,
    mean_nll: f64,
    positions: Vec<Position>,
    greedy: Vec<u32>,
    greedy_margin: Vec<f64>,
}

#[derive(Deserialize)]
struct Position {
    index: usize,
    top: Vec<(u32, f32)>,
}

fn golden() -> Vec<Golden> {
    serde_json::from_str(include_str!("data/smollm2-135m-instruct-f32.json")).unwrap()
}

fn f32_reproduces_logits_likelihoods_and_greedy_text() -> TestResult {
    let model = real_model()?;
    let options = EngineOptions { precision: Precision::F32, max_requests: 2, ..EngineOptions::default() };
    let mut engine = engine(&model, &options);
    let mut largest_error = 0f32;
    for golden in golden() {
        let encode = EncodeOptions { add_special: true, parse_special: true };
        let tokens = model.tokenizer().unwrap().encode(&golden.prompt, encode).unwrap();
        assert_eq!(tokens, golden.tokens, "{:?}", golden.prompt);

        let wanted = |index: usize| golden.positions.iter().any(|position| position.index == index);
        let score = Score::of(&mut engine, &tokens, 49152, &wanted).unwrap();
        let nll = score.mean_nll.unwrap();
        assert!((nll - golden.mean_nll).abs() < 1e-4, "{:?}: {nll}, not {}", golden.prompt, golden.mean_nll);
        for (found, expected) in score.positions.iter().zip(&golden.positions) {
            assert_eq!(found.index, expected.index);
            for (token, logit) in &expected.top {
                let found = found.top.iter().find(|(id, _)| id == token).unwrap().1;
                largest_error = largest_error.max((found - logit).abs());
            }
        }
        assert!(largest_error < 5e-4, "{:?}: off by {largest_error}", golden.prompt);
    }
    let prompts: Vec<Vec<u32>> = golden().into_iter().map(|golden| golden.tokens).collect();
    let answers = greedy(&mut engine, &prompts, 64);
    for (answer, golden) in answers.iter().zip(golden()) {
        assert_greedy(answer, &golden.greedy, &golden.greedy_margin, f64::from(2.0 * largest_error));
    }
    Ok(())
}

fn the_default_precision_stays_close_to_f32() -> TestResult {
    let model = real_model()?;
    let mut engine = engine(&model, &EngineOptions::default());
    for golden in golden() {
        let score = Score::of(&mut engine, &golden.tokens, 1, &|_| true).unwrap();
        let nll = score.mean_nll.unwrap();
        assert!((nll - golden.mean_nll).abs() < 0.05, "{:?}: {nll}, not {}", golden.prompt, golden.mean_nll);
        for expected in &golden.positions {
            if expected.top[0].1 - expected.top[1].1 > 1.5 {
                assert_eq!(score.positions[expected.index].top[0].0, expected.top[0].0);
            }
        }
        // Teacher forcing: the likeliest token after each token of the reference answer.
        let whole: Vec<u32> = golden.tokens.iter().chain(&golden.greedy).copied().collect();
        let score = Score::of(&mut engine, &whole, 1, &|_| true).unwrap();
        for (index, (token, margin)) in golden.greedy.iter().zip(&golden.greedy_margin).enumerate() {
            let found = score.positions[golden.tokens.len() + index - 1].top[0].0;
            assert!(found == *token || *margin <= 1.5, "{:?}: token {index}", golden.prompt);
        }
    }
    Ok(())
}

fn a_cache_of_8_bits_stays_close_to_f32() -> TestResult {
    let model = real_model()?;
    let kv_precision = CachePrecision::Int8;
    let mut engine = engine(&model, &EngineOptions { kv_precision, ..EngineOptions::default() });
    for golden in golden() {
        // Teacher forcing over prompt and reference answer.
        let whole: Vec<u32> = golden.tokens.iter().chain(&golden.greedy).copied().collect();
        let score = Score::of(&mut engine, &whole, 1, &|_| true).unwrap();
        for (index, (token, margin)) in golden.greedy.iter().zip(&golden.greedy_margin).enumerate() {
            let found = score.positions[golden.tokens.len() + index - 1].top[0].0;
            assert!(found == *token || *margin <= 1.5, "{:?}: token {index}", golden.prompt);
        }
        let nll = Score::of(&mut engine, &golden.tokens, 1, &|_| true).unwrap().mean_nll.unwrap();
        assert!((nll - golden.mean_nll).abs() < 0.05, "{:?}: {nll}, not {}", golden.prompt, golden.mean_nll);
    }
    Ok(())
}

fn four_sequences_in_one_batch_match_each_alone() -> TestResult {
    let model = real_model()?;
    let prompts: Vec<Vec<u32>> = golden().into_iter().take(4).map(|golden| golden.tokens).collect();
    let options = |requests, step_tokens| EngineOptions {
        max_requests: requests,
        step_tokens,
        context: Some(256),
        ..EngineOptions::default()
    };
    let mut alone_engine = engine(&model, &options(1, 256));
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| greedy(&mut alone_engine, std::slice::from_ref(prompt), 32).remove(0))
        .collect();
    // Chunks of 16 tokens and batches sum in another order, so choices with small margins may differ.
    let together = greedy(&mut engine(&model, &options(4, 16)), &prompts, 32);
    for (index, (together, alone)) in together.iter().zip(&alone).enumerate() {
        if together == alone {
            continue;
        }
        let place =
            together.iter().zip(alone).position(|(a, b)| a != b).unwrap_or(alone.len().min(together.len()));
        let prefix: Vec<u32> = prompts[index].iter().chain(&alone[..place]).copied().collect();
        let score = Score::of(&mut alone_engine, &prefix, 2, &|at| at + 1 == prefix.len()).unwrap();
        let top = &score.positions[0].top;
        assert!(
            top[0].1 - top[1].1 < 1e-3,
            "prompt {index} differs at token {place} though it is no close call"
        );
    }
    Ok(())
}

fn equal_seeds_repeat_and_other_seeds_differ() -> TestResult {
    let model = real_model()?;
    let mut engine = engine(&model, &EngineOptions { context: Some(128), ..EngineOptions::default() });
    let prompt = golden()[0].tokens.clone();
    let mut draw = |seed| {
        let sampling = SamplingOptions { temperature: 1.0, top_p: 0.95, seed, ..SamplingOptions::default() };
        support::sampled(&mut engine, std::slice::from_ref(&prompt), 16, &sampling)
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
    Ok(())
}

/// The mean negative log-likelihood of the beginning of a book, which is the logarithm of the perplexity.
/// `docs/src/performance/quantisation.md` has the figures of whole texts.
fn quantised_weights_predict_a_text_about_as_well() -> TestResult {
    let model = real_model()?;
    let text = include_str!("../../models/tests/data/eighty_days.txt");
    let tokens = model.tokenizer().unwrap().encode(&text[..2000], EncodeOptions::default()).unwrap();
    let (seen, read) = (&tokens[..96], &tokens[96..288]);
    let calibration = Arc::new(calibrate(&model, device(), &[seen.to_vec()]).unwrap());
    let nll = |policy: Option<&str>| {
        let quantize = policy.map(|text| Policy::from_toml(text).unwrap());
        let options = EngineOptions { quantize, calibration: Some(calibration.clone()), ..exact(192, 1) };
        Score::of(&mut engine(&model, &options), read, 1, &|_| false).unwrap().mean_nll.unwrap()
    };
    let exact = nll(None);
    // Measured values with tolerances. With unquantised activations only the order of sums differs. With quantised ones a sum in
    // another order changes a rounding now and then, and from there on all roundings differ: 191 tokens then differ by 0.02 on
    // average.
    for (policy, expected, tolerance) in [
        ("default = \"w8a16\"", 0.0106, 0.001),
        ("default = \"w8a8\"\nsmooth = 0.5", -0.02, 0.04),
        ("default = \"w8a8\"", 0.052, 0.04),
    ] {
        let more = nll(Some(policy)) - exact;
        assert!((more - expected).abs() < tolerance, "{policy:?} is off by {more}");
    }
    Ok(())
}
