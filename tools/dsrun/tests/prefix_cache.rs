//! Tests of the prefix cache in a folder, from run to run.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/command.rs"]
mod command;

use command::{Ran, dsrun, run, tiny, with_tiny};
use snapbox::cmd::cargo_bin;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

fn prompt() -> String {
    "The sea was calm and the sky was blue, and the boat went on. ".repeat(3)
}

/// A greedy answer with a prefix cache in this folder, if there is one.
fn generate(folder: Option<&Path>) -> Ran {
    let flags = ["--raw", "-n", "8", "--temperature", "0"];
    let mut command = with_tiny("generate", &flags);
    if let Some(folder) = folder {
        command = command.arg("--prefix-cache").arg(folder);
    }
    let ran = run(command.arg(prompt()));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    ran
}

/// The files in a folder, in its folders too.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

#[test]
fn a_second_run_reads_what_the_first_has_written_and_damage_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let expected = generate(None).out;
    assert_eq!(generate(Some(folder.path())).out, expected);
    let written = files(folder.path());
    assert!(written.len() > 4, "{written:?}");
    let again = generate(Some(folder.path()));
    assert!(again.out == expected && !again.err.contains("cannot be used"), "{}", again.err);
    for path in &written {
        let mut bytes = fs::read(path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(path, bytes).unwrap();
    }
    let damaged = generate(Some(folder.path()));
    assert!(damaged.out == expected && damaged.err.contains("cannot be used"), "{}", damaged.err);
    // A page that is found damaged is written again; those behind it are found damaged by later runs.
    let repaired = written.iter().any(|_| {
        let ran = generate(Some(folder.path()));
        assert_eq!(ran.out, expected);
        !ran.err.contains("cannot be used")
    });
    assert!(repaired && files(folder.path()) == written);
}

#[test]
fn a_run_that_is_killed_leaves_nothing_that_harms() {
    let folder = tempfile::tempdir().unwrap();
    let expected = generate(None).out;
    let mut killed = Command::new(cargo_bin!("dsrun"))
        .args(["generate", "--raw", "-n", "20", "--temperature", "0", "--model"])
        .arg(tiny())
        .arg("--prefix-cache")
        .arg(folder.path())
        .arg(prompt())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while files(folder.path()).is_empty() && start.elapsed() < Duration::from_secs(120) {
        thread::sleep(Duration::from_millis(2));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(!files(folder.path()).is_empty());
    for _ in 0..2 {
        let ran = generate(Some(folder.path()));
        assert!(ran.out == expected && !ran.err.contains("cannot be used"), "{}", ran.err);
    }
}

/// A limit on the size of files stands for a full disk: the first write of a page fails.
#[cfg(unix)]
#[test]
fn a_full_disk_ends_writing_with_one_warning_and_no_request() {
    let folder = tempfile::tempdir().unwrap();
    let expected = generate(None).out;
    let output = Command::new("sh")
        .args(["-c", r#"trap "" XFSZ; ulimit -f 0; exec "$@""#, "sh"])
        .arg(cargo_bin!("dsrun"))
        .args(["generate", "--raw", "-n", "8", "--temperature", "0", "--model"])
        .arg(tiny())
        .arg("--prefix-cache")
        .arg(folder.path())
        .arg(prompt())
        .output()
        .unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{errors}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    assert_eq!(errors.matches("a page of the prefix cache cannot be written").count(), 1, "{errors}");
    assert_eq!(files(folder.path()), Vec::<PathBuf>::new());
}

#[test]
fn a_size_without_a_folder_is_refused() {
    let ran = run(dsrun(&["generate", "--prefix-cache-size", "1GB", "x"]));
    assert!(ran.code == Some(2) && ran.err.contains("--prefix-cache <FOLDER>"), "{}", ran.err);
    let ran = run(with_tiny("serve", &["--prefix-cache-size", "1GB"]));
    assert!(ran.code != Some(0) && ran.err.contains("add --prefix-cache FOLDER"), "{}", ran.err);
}
