//! Runs `dsrun` as a user does, apart from the network and the user's files.

#![allow(dead_code, reason = "every test file uses some of it")]

use snapbox::cmd::{Command, cargo_bin};
use std::path::PathBuf;

/// A tiny GGUF model with a tokenizer.
pub(crate) fn tiny() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/tests/fixtures/gguf/smollm2_q4_1/model.gguf")
}

/// `dsrun` without network access and without the user's files.
pub(crate) fn dsrun(arguments: &[&str]) -> Command {
    let nowhere = std::env::temp_dir().join("dsrun-tests-no-cache");
    Command::new(cargo_bin!("dsrun"))
        .args(arguments)
        .env("HF_HUB_OFFLINE", "1")
        .env("DSRUN_CACHE", nowhere.join("cache"))
        .env("HF_HOME", nowhere.join("hub"))
        .env("NO_COLOR", "1")
        .env_remove("DSRUN_LOG")
}

pub(crate) fn with_tiny(command: &str, arguments: &[&str]) -> Command {
    dsrun(&[command]).arg("--model").arg(tiny()).args(arguments)
}

pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

pub(crate) fn run(command: Command) -> Ran {
    let output = command.output().expect("dsrun starts");
    let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

pub(crate) fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
}
