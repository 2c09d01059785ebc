//! The CPU backend three ways: linked in, through its own C tables, and as a loaded plugin. All must agree to the bit.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/built.rs"]
mod built;

use dsrun_core::device::{Backend, Device, DeviceOptions};
use dsrun_cpu::CpuBackend;
use dsrun_engine::{Engine, EngineOptions, EnginePlan, Request, SamplingOptions};
use dsrun_models::model::Model;
use dsrun_plugin_sdk::{PluginBackend, backend_entry};
use dsrun_test_support::{TestResult, model, test_main};
use std::{
    env,
    path::{Path, PathBuf},
    sync::Arc,
};

test_main![a_tiny_model_is_the_same_to_the_bit, the_real_model_is_the_same_to_the_bit];

fn library() -> PathBuf {
    let file = format!("{}cpu_plugin{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX);
    built::example("cpu_plugin", &file)
}

/// The same backend, reached in three ways.
fn devices() -> Vec<(&'static str, Arc<dyn Device>)> {
    // SAFETY: the entry is that of a backend of this very build.
    let loopback = unsafe { PluginBackend::from_entry(backend_entry!(CpuBackend::new())) };
    let plugin = PluginBackend::load(&library());
    let open = |backend: &dyn Backend| backend.open(0, &DeviceOptions::default()).expect("a CPU is there");
    vec![
        ("linked", open(&CpuBackend::new())),
        ("loopback", open(&loopback.expect("the tables are in order"))),
        ("plugin", open(&plugin.expect("the plugin loads"))),
    ]
}

fn engine(model: &Model, device: Arc<dyn Device>) -> Engine {
    let options =
        EngineOptions { max_requests: 2, step_tokens: 16, context: Some(96), ..EngineOptions::default() };
    let plan = EnginePlan::new(model, &*device, &options).expect("the model is planned");
    plan.load(model, device, &mut |_, _| {}).expect("the model is loaded")
}

/// Bits of all logits of a text, and tokens of two requests side by side, one of them sampled.
fn answers(model: &Model, device: Arc<dyn Device>) -> (Vec<u32>, Vec<(u64, u32)>) {
    let mut engine = engine(model, device);
    let vocabulary = model.config().vocabulary as u32;
    let prompt: Vec<u32> = (0..40).map(|index| (index * 37 + 11) % vocabulary).collect();
    let mut bits = Vec::new();
    engine
        .score(&prompt, &mut |_, logits| bits.extend(logits.iter().map(|logit| logit.to_bits())))
        .expect("the text is scored");
    let sampled = SamplingOptions { temperature: 1.0, top_p: 0.9, seed: 3, ..SamplingOptions::default() };
    let mut ids = Vec::new();
    for sampling in [SamplingOptions::default(), sampled] {
        let request =
            Request { prompt: prompt.clone(), sampling, max_tokens: Some(24), ..Request::default() };
        ids.push(engine.submit(request).expect("the request is taken"));
    }
    let mut tokens = Vec::new();
    while !engine.is_idle() {
        for event in engine.step().expect("the step runs") {
            let request = ids.iter().position(|id| *id == event.request).expect("the request is ours");
            tokens.push((request as u64, event.token));
        }
    }
    (bits, tokens)
}

fn all_agree(model: &Model) {
    let mut expected = None;
    for (name, device) in devices() {
        let found = answers(model, device);
        let expected = expected.get_or_insert_with(|| found.clone());
        assert_eq!(found.1, expected.1, "tokens of {name}");
        assert!(found.0 == expected.0, "logits of {name} differ");
    }
}

fn a_tiny_model_is_the_same_to_the_bit() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/llama3");
    all_agree(&Model::open(fixture).expect("the fixture opens"));
}

fn the_real_model_is_the_same_to_the_bit() -> TestResult {
    all_agree(&Model::open(model()?).expect("DSRUN_TEST_MODEL is a model"));
    Ok(())
}
