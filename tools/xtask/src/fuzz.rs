//! The step `fuzz`: the fuzz targets of the readers, guided by coverage, for some seconds each.
//!
//! For packages of the workspace cargo calls this program in place of the compiler (`RUSTC_WORKSPACE_WRAPPER`), which adds coverage
//! counters to the packages that the targets test. All other dependencies are those of the other steps. `tools/test-support/src/fuzz.rs`
//! says how to run these and more targets for hours.

use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::workspace::{Workspace, cargo};

/// The variable that makes this program stand in for the compiler.
const COMPILER: &str = "DSRUN_XTASK_COMPILER";
/// The crates that get counters: the readers and their targets.
const COUNTED: [&str; 3] = ["dsrun_core", "dsrun_models", "fuzz"];
/// Counters of every edge of the control flow, which need no nightly compiler.
const COUNTERS: [&str; 3] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=3",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
];
/// Seconds for each target.
const SECONDS: &str = "8";

/// Runs the compiler for cargo, if cargo has called this program for that. Returns whether it succeeded.
pub(crate) fn compile() -> Option<Result<bool>> {
    env::var_os(COMPILER)?;
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    Some(compile_with(&arguments))
}

/// The compiler, and its arguments.
fn compile_with(arguments: &[OsString]) -> Result<bool> {
    let (compiler, arguments) = arguments.split_first().context("cargo names no compiler")?;
    let counted = arguments
        .windows(2)
        .any(|pair| pair[0] == "--crate-name" && COUNTED.iter().any(|name| pair[1] == *name));
    let counters: &[&str] = if counted { &COUNTERS } else { &[] };
    let status = Command::new(compiler).args(arguments).args(counters).status();
    Ok(status.with_context(|| format!("{} could not be started", compiler.display()))?.success())
}

/// The step of `cargo xtask ci`.
pub(crate) fn check(workspace: &Workspace) -> Result<String> {
    let own = env::current_exe().context("this program does not know its path")?;
    // Where a step before has built this program again, Linux says so of the old one; the new one is at the same path.
    let own = own.to_string_lossy().trim_end_matches(" (deleted)").to_owned();
    // Counters belong to the process, so targets run one after the other.
    let mut child = cargo()
        .args(["test", "--workspace", "--test", "fuzz", "--", "--test-threads", "1", "--nocapture"])
        .env("RUSTC_WORKSPACE_WRAPPER", own)
        .env(COMPILER, "1")
        .env("DSRUN_FUZZ_SECONDS", SECONDS)
        // The same inputs every time, as far as the time allows: a change fails for what it does, not by chance.
        .env("DSRUN_FUZZ_SEED", "1")
        .current_dir(workspace.root())
        .stderr(Stdio::piped())
        .spawn()
        .context("cargo could not be started")?;
    let mut edges = Vec::new();
    for line in BufReader::new(child.stderr.take().context("cargo has no output")?).lines() {
        let line = line.context("the output of cargo could not be read")?;
        eprintln!("{line}");
        edges.extend(edges_reached(&line));
    }
    let status = child.wait().context("cargo could not be awaited")?;
    ensure!(status.success(), "cargo ended with {status}");
    ensure!(
        !edges.is_empty() && !edges.contains(&0),
        "targets ran without coverage counters: they reached {edges:?} edges"
    );
    Ok(format!("{} targets for {SECONDS} s each, without a finding", edges.len()))
}

/// The number of edges in the report of a target.
fn edges_reached(line: &str) -> Option<u64> {
    line.strip_suffix(" edges reached")?.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_have_edges() {
        assert_eq!(edges_reached("safetensors: 75642 inputs, 20000 kept, 16551 edges reached"), Some(16551));
        assert_eq!(edges_reached("safetensors: 75642 inputs"), None);
    }
}
