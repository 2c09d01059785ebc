//! `cargo xtask ci`: the steps, the loop that runs them, and the summary.
//!
//! Cheap steps come first, tests last. `clippy` and `rustdoc` share the metadata that `cargo check` makes of the
//! dependencies, `build` and `test` share the output of `cargo build`; all use the `dev` profile. This only works if
//! all steps enable the same features of every dependency, which development dependencies change. So each step
//! requests targets that need development dependencies; this is the only reason for `--examples` in `rustdoc`.
//! Otherwise cargo would compile half of the dependencies twice.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::workspace::{Workspace, cargo};
use crate::{
    backend_names, commits, dependency_rule, documentation, fuzz, guide, install, licences, rooms, template,
};

/// A step of the CI.
struct Step {
    /// The name for `--only`.
    name: &'static str,
    action: Action,
}

enum Action {
    /// Run cargo.
    Cargo { arguments: &'static [&'static str], environment: &'static [(&'static str, &'static str)] },
    /// Run a check of this program, which returns a summary of what it checked.
    Check { what: &'static str, run: fn(&Workspace) -> Result<String> },
}

const STEPS: &[Step] = &[
    cargo_step("fmt", &["fmt", "--all", "--check"]),
    check_step(
        "dependencies",
        "packages depend only on packages of rooms that they may use",
        dependency_rule::check,
    ),
    check_step("backend-names", "no backend is named outside its room", backend_names::check),
    check_step("rooms", "files and rooms import in order, and no file is too long", rooms::check),
    check_step("commits", "subjects of commits are `module: imperative`", commits::check),
    check_step("licences", "licences and sources of all dependencies", licences::check),
    check_step("docs", "every link of the documentation has a target", documentation::check),
    cargo_step("clippy", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    Step {
        name: "rustdoc",
        action: Action::Cargo {
            arguments: &["doc", "--workspace", "--no-deps", "--lib", "--bins", "--examples"],
            environment: &[("RUSTDOCFLAGS", "-D warnings")],
        },
    },
    cargo_step("build", &["build", "--workspace", "--all-targets"]),
    // Also part of `test`, but useful alone for authors of C backends. `--workspace` keeps the same features.
    cargo_step("header", &["test", "--workspace", "--test", "header"]),
    // All failures of one run are worth more than an early end.
    cargo_step("test", &["test", "--workspace", "--no-fail-fast"]),
    check_step("fuzz", "the readers, by inputs that are guided by coverage", fuzz::check),
    check_step("install", "an installed program finds and loads the installed plugins", install::check),
    check_step("guide", "the commands of the chapter on writing a backend work as printed", guide::check),
    check_step("template", "a copy of the template for backends in Rust compiles", template::check),
];

const fn cargo_step(name: &'static str, arguments: &'static [&'static str]) -> Step {
    Step { name, action: Action::Cargo { arguments, environment: &[] } }
}

const fn check_step(name: &'static str, what: &'static str, run: fn(&Workspace) -> Result<String>) -> Step {
    Step { name, action: Action::Check { what, run } }
}

impl Step {
    /// The command that runs only this step.
    fn command(&self) -> String {
        match &self.action {
            Action::Check { .. } => format!("cargo xtask ci --only {}", self.name),
            Action::Cargo { arguments, environment } => {
                let environment = environment.iter().map(|(name, value)| format!("{name}=\"{value}\" "));
                environment.collect::<String>() + "cargo " + &arguments.join(" ")
            }
        }
    }

    fn run(&self, root: &Path, workspace: &Result<Workspace>) -> Result<()> {
        match &self.action {
            Action::Check { run, .. } => {
                let workspace = workspace.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))?;
                println!("{}", run(workspace)?);
                Ok(())
            }
            Action::Cargo { arguments, environment } => {
                let mut child = cargo()
                    .args(*arguments)
                    .envs(environment.iter().copied())
                    .current_dir(root)
                    .stdout(Stdio::piped())
                    .spawn()
                    .context("cargo could not be started")?;
                let mut failed = Vec::new();
                for line in BufReader::new(child.stdout.take().context("cargo has no output")?).split(b'\n') {
                    let line = line.context("the output of cargo could not be read")?;
                    let line = String::from_utf8_lossy(&line);
                    println!("{line}");
                    failed.extend(failed_test(&line).map(|name| format!("\n  test {name}")));
                }
                let status = child.wait().context("cargo could not be awaited")?;
                if !status.success() {
                    bail!("cargo ended with {status}{}", failed.concat());
                }
                Ok(())
            }
        }
    }
}

/// The name of the test that failed, if a line of output says that one did.
fn failed_test(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix("FAILED")?.trim_end().strip_suffix("...").map(str::trim_end)
}

/// The result of one step.
struct Outcome {
    step: &'static Step,
    /// Why the step failed, if it did.
    failure: Option<String>,
    time: Duration,
}

/// Prints the steps.
pub(crate) fn list() {
    for step in STEPS {
        let what = match &step.action {
            Action::Check { what, .. } => (*what).to_owned(),
            Action::Cargo { .. } => step.command(),
        };
        println!("{:<14} {what}", step.name);
    }
}

/// Runs the steps named in `only`, in the usual order, or all steps if it is empty. A failure does not stop
/// later steps. Returns whether all passed.
pub(crate) fn run(only: &[String]) -> Result<bool> {
    let steps = select(only)?;
    let workspace = Workspace::load();
    let root = match &workspace {
        Ok(workspace) => workspace.root().to_path_buf(),
        // If the manifest is broken, the checks fail with the reason, and cargo's own steps explain it best.
        Err(_) => std::env::current_dir().context("there is no current directory")?,
    };
    let outcomes: Vec<Outcome> = steps
        .into_iter()
        .map(|step| {
            println!("\n=== {}: {}", step.name, step.command());
            let start = Instant::now();
            let failure = step.run(&root, &workspace).err().map(|error| format!("{error:#}"));
            let time = start.elapsed();
            if let Some(failure) = &failure {
                println!("{failure}");
                println!("=== {} FAILED; rerun with: {}", step.name, step.command());
            }
            Outcome { step, failure, time }
        })
        .collect();
    print!("\n{}", summary(&outcomes));
    Ok(outcomes.iter().all(|outcome| outcome.failure.is_none()))
}

fn select(only: &[String]) -> Result<Vec<&'static Step>> {
    if let Some(unknown) = only.iter().find(|name| STEPS.iter().all(|step| step.name != **name)) {
        let names: Vec<_> = STEPS.iter().map(|step| step.name).collect();
        bail!("no step is named `{unknown}`; there are {}", names.join(", "));
    }
    Ok(STEPS.iter().filter(|step| only.is_empty() || only.iter().any(|name| name == step.name)).collect())
}

/// The number of lines of a failure that the summary repeats.
const MOST_LINES: usize = 40;

/// One line per step; for a failed step also the command to rerun it and why it failed.
fn summary(outcomes: &[Outcome]) -> String {
    let mut text = String::from("=== summary\n");
    for Outcome { step, failure, time } in outcomes {
        let result = if failure.is_none() { "ok" } else { "FAILED" };
        text += &format!("{:<14} {result:<8} {:>8.1} s", step.name, time.as_secs_f64());
        if let Some(failure) = failure {
            text += &format!("   rerun: {}", step.command());
            for line in failure.lines().take(MOST_LINES) {
                text += &format!("\n    {line}");
            }
        }
        text.push('\n');
    }
    let total: Duration = outcomes.iter().map(|outcome| outcome.time).sum();
    let failed = outcomes.iter().filter(|outcome| outcome.failure.is_some()).count();
    let result = if failed == 0 { "ok".to_owned() } else { format!("{failed} failed") };
    text + &format!("{:<14} {result:<8} {:>8.1} s\n", "total", total.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(steps: &[&Step]) -> Vec<&'static str> {
        steps.iter().map(|step| step.name).collect()
    }

    #[test]
    fn no_selection_means_all_and_a_selection_keeps_the_order() {
        assert_eq!(select(&[]).unwrap().len(), STEPS.len());
        assert_eq!(names(&select(&["test".into(), "fmt".into()]).unwrap()), ["fmt", "test"]);
    }

    #[test]
    fn an_unknown_step_is_refused_with_the_names_there_are() {
        let message = select(&["lint".into()]).err().unwrap().to_string();
        assert!(message.contains("`lint`") && message.contains("clippy"), "{message}");
    }

    #[test]
    fn step_names_are_unique() {
        for (index, step) in STEPS.iter().enumerate() {
            assert!(STEPS[..index].iter().all(|earlier| earlier.name != step.name), "{}", step.name);
        }
    }

    #[test]
    fn commands_can_be_pasted_into_a_shell() {
        let command = |name: &str| STEPS.iter().find(|step| step.name == name).unwrap().command();
        assert_eq!(command("test"), "cargo test --workspace --no-fail-fast");
        assert_eq!(
            command("rustdoc"),
            "RUSTDOCFLAGS=\"-D warnings\" cargo doc --workspace --no-deps --lib --bins --examples"
        );
        assert_eq!(command("licences"), "cargo xtask ci --only licences");
    }

    #[test]
    fn the_summary_says_what_failed_and_how_to_rerun_it() {
        let steps = select(&["fmt".into(), "test".into()]).unwrap();
        let outcomes = [
            Outcome { step: steps[0], failure: None, time: Duration::from_millis(1500) },
            Outcome {
                step: steps[1],
                failure: Some("cargo ended\n  test a_test".into()),
                time: Duration::from_secs(3),
            },
        ];
        let text = summary(&outcomes);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("fmt") && lines[1].ends_with("1.5 s"), "{text}");
        assert!(
            lines[2].contains("FAILED") && lines[2].ends_with("rerun: cargo test --workspace --no-fail-fast"),
            "{text}"
        );
        assert_eq!(lines[3..5], ["    cargo ended", "      test a_test"]);
        assert!(lines[5].contains("1 failed") && lines[5].ends_with("4.5 s"), "{text}");
    }

    #[test]
    fn failed_tests_are_found_in_the_output_of_both_harnesses() {
        assert_eq!(failed_test("test a::b ... FAILED"), Some("a::b"));
        assert_eq!(failed_test("test a_test            ... FAILED"), Some("a_test"));
        assert_eq!(failed_test("test a::b ... ok"), None);
        assert_eq!(failed_test("test result: FAILED. 1 passed"), None);
    }
}
