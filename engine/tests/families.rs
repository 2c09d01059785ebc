//! Every supported architecture and switch, compared with f32 logits of Hugging Face transformers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_engine::{EngineOptions, Precision};
use dsrun_models::model::Model;
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};
use support::{assert_greedy, difference, engine, exact, fixtures, greedy, logits};

/// Tolerance of the logits, which are some units large: the fixtures are within 1e-5 of f64, and f32 sums differ by their order.
const TOLERANCE: f32 = 1e-4;

#[derive(Deserialize)]
struct Expected {
    logits_file: String,
    sequences: Vec<Sequence>,
}

#[derive(Deserialize)]
struct Sequence {
    tokens: Vec<u32>,
    logits: String,
    continuation: Continuation,
}

#[derive(Deserialize)]
struct Continuation {
    tokens: Vec<u32>,
    margins: Vec<f64>,
}

#[derive(Deserialize)]
struct Flip {
    pointer: String,
    value: serde_json::Value,
    effect: String,
}

/// The folders of the fixtures.
fn folders() -> Vec<PathBuf> {
    let inside = |folder: PathBuf| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let all =
        [fixtures(), fixtures().join("gguf"), fixtures().join("quantised")].into_iter().flat_map(inside);
    let mut folders: Vec<PathBuf> = all.filter(|path| path.join("expected.json").exists()).collect();
    folders.sort();
    assert!(folders.len() >= 65, "fixtures are missing");
    folders
}

fn open(folder: &Path) -> Model {
    let gguf = folder.join("model.gguf");
    let path = if gguf.exists() { gguf } else { folder.to_owned() };
    Model::open(path).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
}

fn expected(folder: &Path) -> (Expected, Vec<Vec<Vec<f32>>>) {
    let expected: Expected =
        serde_json::from_slice(&fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let bytes = fs::read(folder.join(&expected.logits_file)).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let rows = |sequence: &Sequence| {
        let tensor = tensors.tensor(&sequence.logits).unwrap();
        let values: Vec<f32> =
            tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        values.chunks_exact(tensor.shape()[1]).map(<[f32]>::to_vec).collect()
    };
    let logits = expected.sequences.iter().map(rows).collect();
    (expected, logits)
}

#[test]
fn whole_and_chunked_prompts_have_the_reference_logits() {
    for folder in folders() {
        let model = open(&folder);
        let (expected, reference) = expected(&folder);
        for step_tokens in [64, 5, 1] {
            let mut engine = engine(&model, &exact(step_tokens, 1));
            for (sequence, reference) in expected.sequences.iter().zip(&reference) {
                let error = difference(&logits(&mut engine, &sequence.tokens), reference);
                assert!(error <= TOLERANCE, "{}, steps of {step_tokens}: off by {error}", folder.display());
            }
        }
    }
}

#[test]
fn unfused_programs_have_the_reference_logits() {
    for folder in folders() {
        let model = open(&folder);
        let (expected, reference) = expected(&folder);
        let mut engine = engine(&model, &EngineOptions { fuse: false, ..exact(64, 1) });
        for (sequence, reference) in expected.sequences.iter().zip(&reference) {
            let error = difference(&logits(&mut engine, &sequence.tokens), reference);
            assert!(error <= TOLERANCE, "{}: off by {error}", folder.display());
        }
    }
}

#[test]
fn quantised_matrices_are_multiplied_in_their_stored_format() {
    let is_quantised = |folder: &&PathBuf| {
        folder.parent().is_some_and(|all| all.ends_with("quantised")) || folder.ends_with("gpt_oss_mxfp4")
    };
    for folder in folders().iter().filter(is_quantised) {
        let model = open(folder);
        let (expected, reference) = expected(folder);
        let mut engine = engine(&model, &EngineOptions { precision: Precision::Keep, ..exact(64, 1) });
        let stored = engine.program().to_string();
        let integers = ["int4g", "int8", "q2_k", "mxfp4"].iter().any(|format| stored.contains(format));
        let decoded = ["gptq_act_order", "fp8_block", "fp8_tensor", "compressed_fp8"];
        assert_eq!(integers, !decoded.iter().any(|name| folder.ends_with(name)), "{}", folder.display());
        for (sequence, reference) in expected.sequences.iter().zip(&reference) {
            let error = difference(&logits(&mut engine, &sequence.tokens), reference);
            assert!(error <= TOLERANCE, "{}: off by {error}", folder.display());
        }
    }
}

#[test]
fn decoding_matches_the_reference() {
    for folder in folders() {
        let model = open(&folder);
        let (expected, _) = expected(&folder);
        for step_tokens in [64, 7] {
            let mut options = exact(step_tokens, 2);
            options.ignore_end = true;
            let mut engine = engine(&model, &options);
            let prompts: Vec<Vec<u32>> = expected.sequences.iter().map(|s| s.tokens.clone()).collect();
            let answers = greedy(&mut engine, &prompts, expected.sequences[0].continuation.tokens.len());
            for (answer, sequence) in answers.iter().zip(&expected.sequences) {
                let continuation = &sequence.continuation;
                let margin = f64::from(2.0 * TOLERANCE);
                assert_greedy(answer, &continuation.tokens, &continuation.margins, margin);
            }
        }
    }
}

#[test]
fn flipping_a_relevant_switch_changes_the_logits() {
    let text = fs::read(fixtures().join("switches.json")).unwrap();
    let switches: BTreeMap<String, Vec<Flip>> = serde_json::from_slice(&text).unwrap();
    let (mut changed, mut unchanged) = (0, 0);
    // Encoders have no logits; the tests of `encoders.rs` flip their switches.
    for (name, flips) in switches.iter().filter(|(name, _)| !name.starts_with("encoders/")) {
        let folder = fixtures().join(name);
        let (expected, reference) = expected(&folder);
        for flip in flips.iter().filter(|flip| flip.effect != "error") {
            let copy = copy_with(&folder, flip);
            // A refused value counts as a change, because it does not give the logits of the fixture either.
            let found = Model::open(copy.path()).ok().and_then(|model| {
                let device = support::device();
                let plan = dsrun_engine::EnginePlan::new(&model, &*device, &exact(64, 1)).ok()?;
                let mut engine = plan.load(&model, device, &mut |_, _| {}).ok()?;
                let tokens = &expected.sequences[0].tokens;
                let mut rows = Vec::new();
                engine.score(tokens, &mut |_, logits| rows.push(logits.to_vec())).ok()?;
                Some(rows)
            });
            let same = found.is_some_and(|found| {
                found[0].len() == reference[0][0].len() && difference(&found, &reference[0]) <= TOLERANCE
            });
            let place = format!("{name}: {} = {}", flip.pointer, flip.value);
            match flip.effect.as_str() {
                "changes" => {
                    assert!(!same, "{place} should change the logits");
                    changed += 1;
                }
                _ => unchanged += usize::from(same),
            }
        }
    }
    assert!(changed >= 200, "only {changed} switches were flipped");
    assert!(unchanged >= 200, "only {unchanged} harmless fields left the logits as they were");
}

/// A copy of a fixture with one field of its configuration changed.
fn copy_with(folder: &Path, flip: &Flip) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    let config = copy.path().join("config.json");
    let mut value: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let (parent, key) = flip.pointer.rsplit_once('/').unwrap();
    value.pointer_mut(parent).unwrap()[key] = flip.value.clone();
    fs::write(&config, value.to_string()).unwrap();
    copy
}

/// Memory may allow a context that is shorter than that which LongRoPE was chosen for.
#[test]
fn frequencies_of_long_rope_follow_their_own_context() {
    let model = open(&fixtures().join("phi3_long"));
    let run = |context: Option<usize>, rope_context: Option<usize>| {
        let options = EngineOptions { context, rope_context, ..exact(16, 1) };
        logits(&mut engine(&model, &options), &[3, 14, 15, 92, 65, 35, 89, 79])
    };
    // The model's limit is 128 tokens, its original context 16.
    let whole = run(None, None);
    assert_eq!(difference(&run(Some(16), Some(128)), &whole), 0.0);
    let short = run(Some(16), None);
    assert!(difference(&short, &whole) > 1e-2);
    assert_eq!(difference(&run(None, Some(16)), &short), 0.0);
}
