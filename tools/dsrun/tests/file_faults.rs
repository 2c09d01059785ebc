//! The n-th read, open or write of a command's files fails, for every n: the command says which file and ends, or its answer is the
//! same as without the fault. It never hangs, panics, or leaves a half-written file in the place of a whole one.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/command.rs"]
mod command;

use command::{dsrun, tiny};
use dsrun_test_support::compile_c_library;
use rstest::rstest;
use snapbox::cmd::Command;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
    time::Duration,
};
use tempfile::TempDir;

/// Commands end after a few seconds; one that takes this long hangs.
const TIMEOUT: Duration = Duration::from_secs(120);
/// More calls than any command here makes.
const MOST: usize = 400;

/// The library that makes calls fail.
static FAULTS: LazyLock<(TempDir, PathBuf)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libfile_faults.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/file_faults.c");
    compile_c_library(&library, [source.as_os_str(), "-ldl".as_ref()]);
    (folder, library)
});

/// What a command did while one call failed.
struct Faulted {
    code: Option<i32>,
    out: String,
    err: String,
    /// The call and its file, if the command made so many.
    fault: Option<(String, PathBuf)>,
}

/// Runs a command whose call number `at` of a kind fails on a file below a folder.
fn faulted(command: Command, folder: &Path, kind: &str, at: usize) -> Faulted {
    let log = tempfile::NamedTempFile::new().unwrap();
    let output = command
        .env("LD_PRELOAD", &FAULTS.1)
        .env("FILE_FAULTS_UNDER", folder)
        .env("FILE_FAULTS_KIND", kind)
        .env("FILE_FAULTS_AT", at.to_string())
        .env("FILE_FAULTS_LOG", log.path())
        .timeout(TIMEOUT)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let fault = fs::read_to_string(log.path()).unwrap();
    let fault = fault.trim_end().split_once(' ').map(|(call, path)| (call.to_owned(), path.into()));
    Faulted { code: output.status.code(), out: text(output.stdout), err: text(output.stderr), fault }
}

/// Fails each call of a kind in turn, until the command makes no more of them; how many it made. `check` sees each run that ended
/// well or not.
fn each_fault(
    command: impl Fn() -> Command,
    folder: &Path,
    kind: &str,
    expected: &str,
    mut check: impl FnMut(&Faulted),
) -> usize {
    for at in 1..MOST {
        let run = faulted(command(), folder, kind, at);
        let Some((call, path)) = &run.fault else {
            assert_eq!((run.code, run.out.as_str()), (Some(0), expected), "{}", run.err);
            return at - 1;
        };
        let what = format!("{call} number {at} of {} failed: {:?}\n{}", path.display(), run.code, run.err);
        match run.code {
            Some(0) => assert_eq!(run.out, expected, "{what}"),
            Some(code) => {
                assert!(code < 100, "{what}");
                let mut places = path.ancestors().take_while(|place| place.starts_with(folder));
                let is_named = places.any(|place| run.err.contains(&*place.to_string_lossy()));
                assert!(run.err.contains("error: ") && is_named, "{what}");
            }
            None => panic!("{what}"),
        }
        check(&run);
    }
    panic!("more than {MOST} calls");
}

/// A folder with copies of the files of a fixture.
fn copied(fixture: &str) -> (TempDir, PathBuf) {
    let (kept, folder) = empty();
    for entry in fs::read_dir(tiny().parent().unwrap().join("../..").join(fixture)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    (kept, folder)
}

/// An empty folder, by the path that the system says its files have.
fn empty() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().canonicalize().unwrap();
    (folder, path)
}

fn files_in(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn generate(model: &Path) -> Command {
    dsrun(&["generate", "--raw", "-q", "-n", "4", "--backend", "cpu", "Hello", "--model"]).arg(model)
}

#[rstest]
fn a_model_that_cannot_be_read_is_an_error(#[values("open", "read")] kind: &str) {
    let (_kept, folder) = copied("gguf/smollm2_q4_1");
    let command = || generate(&folder.join("model.gguf"));
    let expected = faulted(command(), &folder, "none", 1);
    assert!(!expected.out.is_empty(), "{}", expected.err);
    assert!(each_fault(command, &folder, kind, &expected.out, |_| {}) > 0);
}

#[rstest]
#[case::gguf("gguf/smollm2_q4_1", "model.gguf", "out.gguf")]
#[case::safetensors("smollm2", "", "out")]
fn a_model_that_cannot_be_quantised_leaves_nothing(
    #[case] fixture: &str,
    #[case] model: &str,
    #[case] output: &str,
    #[values("open", "read", "write")] kind: &str,
) {
    let (_kept, folder) = copied(fixture);
    let (_kept, written) = empty();
    let command = || {
        let arguments = ["quantize", "--policy", "w8a16", "-q"];
        dsrun(&arguments).arg(folder.join(model)).arg("--output").arg(written.join(output))
    };
    // All files that were written, with their contents, which are then removed.
    let take = || -> Vec<(PathBuf, Vec<u8>)> {
        let folders = files_in(&written).into_iter();
        let mut files: Vec<PathBuf> =
            folders.flat_map(|path| if path.is_dir() { files_in(&path) } else { vec![path] }).collect();
        files.sort();
        let files = files.into_iter().map(|file| (file.clone(), fs::read(&file).unwrap())).collect();
        fs::remove_dir_all(&written).unwrap();
        fs::create_dir(&written).unwrap();
        files
    };
    let expected = faulted(command(), &written, "none", 1);
    assert_eq!(expected.code, Some(0), "{}", expected.err);
    let whole = take();
    assert!(!whole.is_empty());
    let under = if kind == "read" { &folder } else { &written };
    let calls = each_fault(command, under, kind, &expected.out, |run| {
        let files = take();
        let is_right = if run.code == Some(0) { files == whole } else { files.is_empty() };
        let names: Vec<_> = files.iter().map(|(name, _)| name).collect();
        assert!(is_right, "{:?} left {names:?}\n{}", run.fault, run.err);
    });
    assert!(calls > 0);
}

#[rstest]
fn weights_on_disk_that_fail_are_an_error(#[values("open", "read", "write")] kind: &str) {
    let (_kept, folder) = copied("gguf/exaone4_bf16");
    let (_kept, packed) = empty();
    let model = folder.join("model.gguf");
    let place = format!("disk:{}", packed.display());
    let command = || {
        generate(&model).args(["--weights-in", &place, "--resident-layers", "0", "--host-memory", "57KiB"])
    };
    let expected = faulted(command(), &packed, "none", 1);
    assert_eq!(expected.code, Some(0), "{}", expected.err);
    let remove = || files_in(&packed).iter().for_each(|file| fs::remove_file(file).unwrap());
    remove();
    assert!(each_fault(command, &packed, kind, &expected.out, |_| remove()) > 0);
}

#[rstest]
fn a_prefix_cache_that_fails_costs_no_answer(
    #[values("open", "read", "write")] kind: &str,
    #[values(false, true)] is_warm: bool,
) {
    let (_kept, folder) = copied("gguf/smollm2_q4_1");
    let (_kept, cache) = empty();
    let command = || {
        let command = dsrun(&["generate", "--raw", "-q", "-n", "4", "--backend", "cpu"]);
        let command = command.arg("--model").arg(folder.join("model.gguf")).arg("--prefix-cache").arg(&cache);
        // Longer than two pages.
        command.arg("Hello ".repeat(12))
    };
    let expected = faulted(command(), &cache, "none", 1);
    assert_eq!(expected.code, Some(0), "{}", expected.err);
    let prepare = || {
        fs::remove_dir_all(&cache).unwrap();
        fs::create_dir(&cache).unwrap();
        if is_warm {
            assert_eq!(faulted(command(), &cache, "none", 1).out, expected.out);
        }
    };
    prepare();
    let calls = each_fault(command, &cache, kind, &expected.out, |run| {
        // At the start, the folder is tried, and one that cannot be written is refused.
        let (_, path) = run.fault.as_ref().unwrap();
        let is_probe = path.file_name().unwrap().to_string_lossy().starts_with("probe.");
        assert!(run.code == Some(0) || is_probe, "{:?}\n{}", run.fault, run.err);
        prepare();
    });
    // Only a warm cache is read, and only a cold one written.
    assert_eq!(calls > 0, kind == "open" || (kind == "read") == is_warm);
}
