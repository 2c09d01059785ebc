//! The backend in C with one fault each: every fault of `mutants/c` is caught by the case or check that claims to catch it, and
//! every harmless variant there passes its ops.
//!
//! A fault is a change of the text of `plugins/example-c/src`, so whoever changes that text may have to change the fault.
//! `cargo test -p dsrun-conformance --test c_faults -- attention` runs those whose name has `attention` in it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dsrun_test_support::compile_c_library;
use libtest_mimic::{Arguments, Failed, Trial};
use serde::Deserialize;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// A file of `mutants/c`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Faults {
    #[serde(default)]
    fault: Vec<Fault>,
    #[serde(default)]
    harmless: Vec<Harmless>,
}

/// A wrong variant of the file of C that its own file is called after.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fault {
    name: String,
    /// The text to be replaced, which is there once.
    from: String,
    to: String,
    /// The id of the case or check that claims to catch it.
    caught_by: String,
}

/// A right variant.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Harmless {
    name: String,
    about: String,
    changes: Vec<Change>,
    /// What it must pass: ops, and ids of checks.
    passes: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    file: String,
    from: String,
    to: String,
}

fn main() {
    let mut trials = Vec::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("mutants/c");
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for file in files {
        let stem = file.file_stem().unwrap().to_string_lossy().into_owned();
        let Faults { fault, harmless } = toml::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let names: BTreeSet<&str> = fault.iter().map(|fault| fault.name.as_str()).collect();
        assert_eq!(names.len(), fault.len(), "{} has a name twice", file.display());
        trials.extend(fault.into_iter().map(|fault| {
            let file = format!("{stem}.c");
            Trial::test(format!("{stem}::{}", fault.name), move || is_caught(&file, &fault))
        }));
        trials.extend(
            harmless.into_iter().map(|harmless| {
                Trial::test(format!("harmless::{}", harmless.name), move || passes(&harmless))
            }),
        );
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// The folder of the sources.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugins/example-c/src")
}

/// What the linker and the compiler are told beside the sources. Warnings are those of a fault.
fn flags() -> [PathBuf; 4] {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugins/sdk/include");
    ["-O1".into(), "-w".into(), "-I".into(), include]
}

/// The files of C as they are, compiled once: name and object.
fn objects() -> &'static [(String, PathBuf)] {
    static OBJECTS: OnceLock<Vec<(String, PathBuf)>> = OnceLock::new();
    OBJECTS.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("c_faults");
        fs::create_dir_all(&folder).unwrap();
        let files = fs::read_dir(sources()).unwrap().map(|entry| entry.unwrap().path());
        let compile = |file: PathBuf| {
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            let object = folder.join(&name).with_extension("o");
            compile_c_library(&object, flags().into_iter().chain(["-c".into(), file]));
            (name, object)
        };
        files.filter(|file| file.extension().is_some_and(|extension| extension == "c")).map(compile).collect()
    })
}

/// The text with one change.
fn changed(text: &str, from: &str, to: &str) -> Result<String, Failed> {
    match text.matches(from).count() {
        1 => Ok(text.replace(from, to)),
        count => Err(format!("the text to replace is there {count} times: {from}").into()),
    }
}

/// Compiles the backend with changed files, of which the others may be headers.
fn compile(folder: &Path, changes: &[(&str, &str, &str)]) -> Result<PathBuf, Failed> {
    for (file, from, to) in changes {
        let path = folder.join(file);
        let text = fs::read_to_string(if path.exists() { path.clone() } else { sources().join(file) })?;
        fs::write(path, changed(&text, from, to)?)?;
    }
    let touched: BTreeSet<&str> = changes.iter().map(|(file, ..)| *file).collect();
    // A header is part of every file.
    let all = touched.iter().any(|file| file.ends_with(".h"));
    let inputs = objects().iter().map(|(name, object)| {
        let own = folder.join(name);
        match (own.exists(), all) {
            (true, _) => own,
            (false, true) => {
                fs::copy(sources().join(name), &own).unwrap();
                own
            }
            (false, false) => object.clone(),
        }
    });
    let library = folder.join("libchanged.so");
    let arguments = flags().into_iter().chain(["-I".into(), folder.to_owned(), "-I".into(), sources()]);
    compile_c_library(&library, arguments.chain(inputs).chain(["-lm".into()]));
    Ok(library)
}

/// Runs the program on a library.
fn run(library: &Path, options: &[&str]) -> Result<Value, Failed> {
    let results = library.with_extension("json");
    let output = Command::new(env!("CARGO_BIN_EXE_dsrun-conformance"))
        .arg("run")
        .arg(library)
        .args(["--profile", "llm-core-1", "--jobs", "1", "--json"])
        .arg(&results)
        .args(options)
        .output()?;
    let text = fs::read_to_string(&results).map_err(|error| {
        let printed = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        format!("no results: {error}\n{}{}", printed[0], printed[1])
    })?;
    Ok(serde_json::from_str(&text)?)
}

fn is_caught(file: &str, fault: &Fault) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let library = compile(folder.path(), &[(file, &fault.from, &fault.to)])?;
    let results = run(&library, &["--case", &fault.caught_by])?;
    match results["cases"][0]["status"].as_str() {
        Some("fail" | "crash" | "timeout") => Ok(()),
        other => Err(format!("{} does not catch it: {other:?}", fault.caught_by).into()),
    }
}

fn passes(harmless: &Harmless) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let changes: Vec<(&str, &str, &str)> =
        harmless.changes.iter().map(|change| (&*change.file, &*change.from, &*change.to)).collect();
    let library = compile(folder.path(), &changes)?;
    let (checks, ops): (Vec<&str>, Vec<&str>) =
        harmless.passes.iter().map(String::as_str).partition(|name| name.contains('/'));
    let mut wrong: Vec<String> = Vec::new();
    for (option, names) in [("--op", ops), ("--case", checks)] {
        if names.is_empty() {
            continue;
        }
        let results = run(&library, &[&[option][..], &names].concat())?;
        let cases = results["cases"].as_array().ok_or("no cases")?;
        let failed =
            cases.iter().filter(|case| !matches!(case["status"].as_str(), Some("pass" | "unsupported")));
        wrong.extend(failed.map(|case| format!("{}: {}", case["id"], case["messages"])));
    }
    if wrong.is_empty() {
        return Ok(());
    }
    wrong.truncate(5);
    Err(format!("a backend that {} fails:\n{}", harmless.about, wrong.join("\n")).into())
}
