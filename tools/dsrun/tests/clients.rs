//! `dsrun serve` with the clients that people use, unchanged: each runs its script in `clients`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../src/serve/tests/model.rs"]
mod model;
#[path = "support/server.rs"]
mod server;

use dsrun_test_support::{NodePackages, TestResult, node, python, test_main};
use serde_json::Value;
use server::{KEY, Server, script, succeeded};
use snapbox::cmd::cargo_bin;
use std::{fs, path::Path, process::Command};

test_main![
    openai_in_python,
    openai_in_javascript,
    reasoning_in_python,
    reasoning_in_javascript,
    anthropic_in_python,
    anthropic_in_javascript,
    litellm,
    langchain,
    pydantic_ai,
    the_agents_sdk_in_python,
    the_agents_sdk_in_javascript,
    instructor,
    the_ai_sdk,
];

/// A template of a model that reasons first, and knows no tools.
const REASONS: &str = "{% for message in messages %}{{ message.content }}{% endfor %}<think>\n{# </think> #}";

/// Runs a script with the server's URL, a key and the model's name; some parts of it, if any are named.
fn run(program: &Path, script: &Path, server: &Server, parts: &[&str]) {
    let mut command = Command::new(program);
    command.arg(script).args([&server.url, KEY, "tiny"]).args(parts);
    // Nothing is written beside the scripts, and LiteLLM uses the prices that it comes with.
    command.env("PYTHONDONTWRITEBYTECODE", "1").env("LITELLM_LOCAL_MODEL_COST_MAP", "True");
    succeeded(&command.output().unwrap());
}

/// A server of a model whose answers end.
fn server() -> Server {
    Server::start_with(model::tiny_that_ends(), &[], &mut Command::new(cargo_bin!("dsrun")))
}

/// A server of a model that reasons before it answers.
fn server_that_reasons() -> Server {
    let folder = model::tiny_with(&["</think>"]);
    let path = folder.path().join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["chat_template"] = REASONS.into();
    fs::write(path, config.to_string()).unwrap();
    Server::start_with(folder, &[], &mut Command::new(cargo_bin!("dsrun")))
}

fn in_python(name: &str) -> TestResult {
    run(&python()?, &script(name), &server(), &[]);
    Ok(())
}

fn in_javascript(name: &str) -> TestResult {
    in_javascript_with(name, server, &[])
}

fn in_javascript_with(name: &str, server: fn() -> Server, parts: &[&str]) -> TestResult {
    let NodePackages { program, folder } = node()?;
    // Modules look for packages beside themselves.
    let beside = tempfile::Builder::new().prefix("scripts-").tempdir_in(folder).unwrap();
    for file in ["shared.mjs", name] {
        fs::copy(script(file), beside.path().join(file)).unwrap();
    }
    run(&program, &beside.path().join(name), &server(), parts);
    Ok(())
}

fn openai_in_python() -> TestResult {
    // Its script asks for long answers.
    run(&python()?, &script("openai_client.py"), &Server::start(&[]), &[]);
    Ok(())
}

fn openai_in_javascript() -> TestResult {
    in_javascript("openai_client.mjs")
}

fn reasoning_in_python() -> TestResult {
    run(&python()?, &script("openai_client.py"), &server_that_reasons(), &["reasoning"]);
    Ok(())
}

fn reasoning_in_javascript() -> TestResult {
    in_javascript_with("openai_client.mjs", server_that_reasons, &["reasoning"])
}

fn anthropic_in_python() -> TestResult {
    in_python("anthropic_client.py")
}

fn anthropic_in_javascript() -> TestResult {
    in_javascript("anthropic_client.mjs")
}

fn litellm() -> TestResult {
    in_python("litellm_client.py")
}

fn langchain() -> TestResult {
    in_python("langchain_client.py")
}

fn pydantic_ai() -> TestResult {
    in_python("pydantic_ai_client.py")
}

fn the_agents_sdk_in_python() -> TestResult {
    in_python("agents_client.py")
}

fn the_agents_sdk_in_javascript() -> TestResult {
    in_javascript("agents_client.mjs")
}

fn instructor() -> TestResult {
    in_python("instructor_client.py")
}

fn the_ai_sdk() -> TestResult {
    in_javascript("ai_sdk_client.mjs")
}
