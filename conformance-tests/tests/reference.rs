//! Holds the default backend to the reference over whole models.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/whole_model.rs"]
mod whole_model;

use dsrun_cpu::CpuBackend;
use dsrun_models::model::Model;
use rstest::rstest;
use std::path::Path;

#[rstest]
fn the_default_gives_the_tokens_of_the_reference(
    #[values("gpt2", "llama3", "mistral", "opt", "qwen3", "quantised/gptq_4", "quantised/compressed_w8a16")]
    fixture: &str,
) {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures");
    whole_model::agrees_with_the_reference(&Model::open(fixtures.join(fixture)).unwrap(), &CpuBackend::new());
}
