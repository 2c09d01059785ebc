//! The suite is itself tested: every mutant is caught by the case or check that claims to catch it, as a result and not as the
//! end of the suite, and a backend without a fault passes all of those.
//!
//! `cargo test -p dsrun-conformance --test mutants -- page` runs those whose name has `page` in it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/built.rs"]
mod built;
#[path = "../mutants/table.rs"]
mod table;

use dsrun_conformance::checks::CHECKS;
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::Value;
use std::{collections::BTreeSet, env, fs, path::Path, process::Command};
use table::{FAULTLESS, MUTANTS, Mutant};

fn main() {
    // The longest first: the others run beside it.
    let mut trials = vec![Trial::test("without_a_fault", without_a_fault)];
    trials.extend(MUTANTS.iter().map(|mutant| Trial::test(mutant.name, || is_caught(mutant))));
    trials.push(Trial::test("every_check_catches_one", every_check_catches_one));
    trials.push(Trial::test("the_book_shows_them_all", the_book_shows_them_all));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Runs cases on a mutant: the program's exit status, and its results.
fn run(mutant: &str, cases: &BTreeSet<&str>, seconds: u64) -> Result<(Option<i32>, Value), Failed> {
    let file = format!("{}mutants{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX);
    let folder = tempfile::tempdir()?;
    let results = folder.path().join("results.json");
    let output = Command::new(env!("CARGO_BIN_EXE_dsrun-conformance"))
        .env("DSRUN_MUTANT", mutant)
        .arg("run")
        .arg(built::example("mutants", &file))
        .args(["--jobs", "1", "--timeout", &seconds.to_string(), "--json"])
        .arg(&results)
        .arg("--case")
        .args(cases)
        .output()?;
    let text = fs::read_to_string(&results).map_err(|error| {
        let printed = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        format!("no results: {error}\n{}{}", printed[0], printed[1])
    })?;
    Ok((output.status.code(), serde_json::from_str(&text)?))
}

fn is_caught(mutant: &Mutant) -> Result<(), Failed> {
    let (expected, seconds) = match mutant.name {
        "aborts" => ("crash", 60),
        "hangs" => ("timeout", 2),
        _ => ("fail", 60),
    };
    let (status, results) = run(mutant.name, &BTreeSet::from([mutant.caught_by]), seconds)?;
    let case = results["cases"].as_array().and_then(|cases| match cases.as_slice() {
        [case] => Some(case),
        _ => None,
    });
    let case = case.ok_or("not one case was run")?;
    if (case["id"].as_str(), case["status"].as_str(), status)
        == (Some(mutant.caught_by), Some(expected), Some(1))
    {
        return Ok(());
    }
    Err(format!("{} is not caught by {}: exit status {status:?}, {case:#}", mutant.fault, mutant.caught_by)
        .into())
}

fn without_a_fault() -> Result<(), Failed> {
    let all: BTreeSet<&str> = MUTANTS.iter().map(|mutant| mutant.caught_by).collect();
    let (status, results) = run(FAULTLESS, &all, 240)?;
    let cases = results["cases"].as_array().ok_or("no cases")?;
    if status == Some(0) && cases.len() == all.len() && results["passed"] == true {
        return Ok(());
    }
    let wrong: Vec<&Value> = cases.iter().filter(|case| case["status"] != "pass").collect();
    Err(format!("exit status {status:?}, {} of {} cases, {wrong:#?}", cases.len(), all.len()).into())
}

/// Checks that no plugin can fail, because the host stands in front of it: it refuses the objects of others, and keeps parents alive
/// longer than their children. They are for backends that are linked in.
const OF_LINKED_BACKENDS: [&str; 2] = ["faults_foreign", "threads_drop_order"];

/// A check that catches nothing may be one that cannot fail.
fn every_check_catches_one() -> Result<(), Failed> {
    let of_c = caught_in_c()?;
    let all = MUTANTS.iter().map(|mutant| mutant.caught_by).chain(of_c.iter().map(String::as_str));
    let claimed: BTreeSet<&str> = all.filter_map(|id| id.strip_prefix("check/")).collect();
    let idle: BTreeSet<&str> =
        CHECKS.iter().map(|check| check.id).filter(|id| !claimed.contains(id)).collect();
    if idle == BTreeSet::from(OF_LINKED_BACKENDS) {
        return Ok(());
    }
    let idle: Vec<&str> = idle.into_iter().collect();
    Err(format!("the checks that no mutant is caught by are {}", idle.join(", ")).into())
}

/// What catches the faults of the backend in C, which the test `c_faults` runs.
fn caught_in_c() -> Result<Vec<String>, Failed> {
    let mut all = Vec::new();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("mutants/c"))? {
        let file: toml::Table = fs::read_to_string(entry?.path())?.parse()?;
        let faults = file.get("fault").and_then(toml::Value::as_array);
        let ids = faults.into_iter().flatten().filter_map(|fault| fault.get("caught_by")?.as_str());
        all.extend(ids.map(str::to_owned));
    }
    Ok(all)
}

/// The table in the book is this table.
fn the_book_shows_them_all() -> Result<(), Failed> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/crates/conformance.md");
    let page = fs::read_to_string(page)?;
    let row = |mutant: &Mutant| format!("| `{}` | {} | `{}` |", mutant.name, mutant.fault, mutant.caught_by);
    let expected: Vec<String> = MUTANTS.iter().map(row).collect();
    let shown = page.lines().skip_while(|line| !line.starts_with("| mutant |")).skip(2);
    let shown: Vec<&str> = shown.take_while(|line| line.starts_with('|')).collect();
    if shown == expected {
        return Ok(());
    }
    Err(format!("the table of docs/src/crates/conformance.md must be\n{}", expected.join("\n")).into())
}
