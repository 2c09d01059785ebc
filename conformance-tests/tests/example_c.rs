//! Holds the backend in C, `plugins/example-c`, to profile `llm-core-1` in f32, and to the reference over a whole model.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test that cannot go on has failed, and says why it skips"
)]

#[path = "support/example_c.rs"]
mod example_c;

use dsrun_conformance::{
    runner::Status,
    subject::Subject,
    suite::{DRAWN, Group, SEED, groups},
};
use dsrun_core::{
    DType,
    abi::PluginBackend,
    device::{Backend, Device, DeviceOptions},
    op::Profile,
};
use dsrun_cpu::CpuBackend;
use dsrun_engine::{Engine, EngineOptions, EnginePlan, Precision, Request, SamplingOptions};
use dsrun_models::model::Model;
use std::{
    env,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

/// The plugin; `None` if there is no C compiler. Compiled once for all tests here.
fn plugin() -> Option<PluginBackend> {
    static LIBRARY: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("example-c");
    let library = LIBRARY.get_or_init(|| example_c::build(&folder)).as_ref()?;
    Some(PluginBackend::load(library).unwrap())
}

#[test]
fn it_passes_llm_core_1_in_f32() {
    let Some(plugin) = plugin() else { return };
    let subject = Subject::plugin(plugin, 0, DeviceOptions::default()).unwrap();
    let profile = [Profile::LlmCore1];
    assert!(subject.claims(profile[0]) && subject.takes(DType::F32));
    let (mut passed, mut failed) = (0, Vec::new());
    // Those that are not required, such as weights in blocks, run too, and must be right where they are supported.
    let taken = |group: &Group| group.dtype().is_none_or(|dtype| subject.takes(dtype));
    for group in groups().filter(|group| group.belongs_to(&profile) && taken(group)) {
        for item in group.items(SEED, DRAWN) {
            let report = item.run(&subject);
            match report.status {
                Status::Passed => passed += 1,
                Status::Unsupported(_) if !item.is_required(&subject, &profile) => {}
                _ => failed.push(report.to_string()),
            }
        }
    }
    failed.truncate(20);
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(passed > 400, "only {passed} cases ran");
}

fn engine(model: &Model, backend: &dyn Backend) -> Engine {
    let device: Arc<dyn Device> = backend.open(0, &DeviceOptions::default()).unwrap();
    let options = EngineOptions {
        precision: Precision::F32,
        max_requests: 2,
        step_tokens: 16,
        context: Some(96),
        ..EngineOptions::default()
    };
    let plan = EnginePlan::new(model, &*device, &options).unwrap();
    plan.load(model, device, &mut |_, _| {}).unwrap()
}

/// Greedy tokens of two prompts side by side, and all logits of a text.
fn answers(model: &Model, backend: &dyn Backend) -> (Vec<Vec<u32>>, Vec<f32>) {
    let mut engine = engine(model, backend);
    let vocabulary = model.config().vocabulary as u32;
    let prompt = |length: u32, step: u32| (0..length).map(|index| (index * step + 11) % vocabulary).collect();
    let prompts: [Vec<u32>; 2] = [prompt(40, 37), prompt(7, 101)];
    let mut logits = Vec::new();
    engine.score(&prompts[0], &mut |_, row| logits.extend_from_slice(row)).unwrap();
    let submitted = prompts.map(|prompt| {
        let request = Request {
            prompt,
            sampling: SamplingOptions::default(),
            max_tokens: Some(24),
            ..Request::default()
        };
        engine.submit(request).unwrap()
    });
    let mut tokens = vec![Vec::new(); submitted.len()];
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            let request = submitted.iter().position(|id| *id == event.request).unwrap();
            tokens[request].push(event.token);
        }
    }
    (tokens, logits)
}

/// Two f32 backends differ by the order of their sums: logits by a hundred-thousandth of their size, tokens not at all
/// on these prompts.
fn agrees_with_the_reference(model: &Model) {
    let Some(plugin) = plugin() else { return };
    let (expected, expected_logits) = answers(model, &CpuBackend::new());
    let (tokens, logits) = answers(model, &plugin);
    assert_eq!(tokens, expected);
    let largest = expected_logits.iter().fold(0f32, |largest, logit| largest.max(logit.abs()));
    let off = logits.iter().zip(&expected_logits).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(off <= 1e-4 * largest, "logits of up to {largest} are off by {off}");
}

#[test]
fn a_tiny_model_gives_the_same_tokens() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/llama3");
    agrees_with_the_reference(&Model::open(fixture).unwrap());
}

#[test]
fn the_real_model_gives_the_same_tokens() {
    let Some(path) = env::var_os("DSRUN_TEST_MODEL") else {
        eprintln!("skipped: DSRUN_TEST_MODEL does not name a model (dsrun pull fetches one)");
        return;
    };
    agrees_with_the_reference(&Model::open(path).unwrap());
}
