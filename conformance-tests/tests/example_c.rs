//! Holds the backend in C, `plugins/example-c`, to profile `llm-core-1` in f32, and to the reference over a whole model.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/example_c.rs"]
mod example_c;
#[path = "support/whole_model.rs"]
mod whole_model;

use dsrun_conformance::{
    runner::Status,
    subject::Subject,
    suite::{DRAWN, Group, SEED, groups},
};
use dsrun_core::{DType, device::DeviceOptions, op::Profile};
use dsrun_models::model::Model;
use dsrun_plugin_sdk::PluginBackend;
use dsrun_test_support::{TestResult, model, test_main};
use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

test_main![
    it_passes_llm_core_1_in_f32,
    a_tiny_model_gives_the_same_tokens,
    the_real_model_gives_the_same_tokens,
];

/// The plugin, compiled once for all tests here.
fn plugin() -> PluginBackend {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("example-c");
    PluginBackend::load(LIBRARY.get_or_init(|| example_c::build(&folder))).unwrap()
}

fn it_passes_llm_core_1_in_f32() {
    let plugin = plugin();
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

fn agrees_with_the_reference(model: &Model) {
    whole_model::agrees_with_the_reference(model, &plugin());
}

fn a_tiny_model_gives_the_same_tokens() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/llama3");
    agrees_with_the_reference(&Model::open(fixture).unwrap());
}

fn the_real_model_gives_the_same_tokens() -> TestResult {
    agrees_with_the_reference(&Model::open(model()?).unwrap());
    Ok(())
}
