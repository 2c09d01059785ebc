//! The program as users meet it: exit status, what it prints and writes, and what it does with backends that misbehave.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/built.rs"]
mod built;

use rstest::rstest;
use serde_json::Value;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// The program with the CPU backend.
fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_dsrun-conformance"))
}

/// The program with backends that misbehave.
fn misbehaving() -> Command {
    Command::new(built::example("misbehaving", &format!("misbehaving{}", env::consts::EXE_SUFFIX)))
}

struct Ran {
    status: Option<i32>,
    output: String,
    errors: String,
}

fn run(command: &mut Command) -> Ran {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran { status: status.code(), output: text(stdout), errors: text(stderr) }
}

/// Runs with `--json`, and gives the status and the results.
fn results(command: &mut Command) -> (Ran, Value) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results.json");
    let ran = run(command.arg("--json").arg(&file));
    let text =
        fs::read_to_string(&file).unwrap_or_else(|_| panic!("no results: {}{}", ran.output, ran.errors));
    (ran, serde_json::from_str(&text).unwrap())
}

fn case<'a>(results: &'a Value, id: &str) -> &'a Value {
    let cases = results["cases"].as_array().unwrap();
    cases.iter().find(|case| case["id"] == id).unwrap_or_else(|| panic!("{id} was not run"))
}

#[test]
fn a_right_backend_passes() {
    let (ran, results) = results(program().args(["run", "cpu", "--op", "cast", "add"]));
    assert_eq!((ran.status, ran.errors.as_str()), (Some(0), ""), "{}", ran.output);
    assert!(ran.output.ends_with("PASSED\n"), "{}", ran.output);
    assert_eq!((&results["schema"], &results["passed"]), (&1.into(), &true.into()));
    assert_eq!(results["backend"]["name"], "cpu");
    assert_eq!(results["backend"]["library"], Value::Null);
    assert_eq!(
        results["profiles"],
        serde_json::json!([
            "llm-core-1",
            "llm-quant-1",
            "llm-moe-1",
            "llm-dist-1",
            "llm-mla-1",
            "llm-quant-2"
        ])
    );
    let cases = results["cases"].as_array().unwrap();
    assert_eq!(results["counts"]["pass"], cases.len());
    assert!(cases.iter().any(|case| case["id"].as_str().unwrap().starts_with("add/bf16/property-")));
    let prime = case(&results, "add/f32/prime");
    assert_eq!(
        (&prime["op"], &prime["dtype"], &prime["status"]),
        (&"add".into(), &"f32".into(), &"pass".into())
    );
    assert!(prime["worst"]["ratio"].as_f64().unwrap() <= 1.0);
    assert!(prime["mean_square"]["value"].as_f64() <= prime["mean_square"]["limit"].as_f64());
}

#[test]
fn a_plugin_is_loaded_by_path_and_its_file_is_told() {
    let file = format!("{}cpu_plugin{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX);
    let library = built::example("cpu_plugin", &file);
    let (ran, results) =
        results(program().arg("run").arg(&library).args(["--op", "cast", "check", "--jobs", "1"]));
    assert_eq!(ran.status, Some(0), "{}{}", ran.output, ran.errors);
    assert_eq!(results["backend"]["library"]["path"], library.to_str().unwrap());
    let digest = results["backend"]["library"]["sha256"].as_str().unwrap();
    assert!(digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{digest}");
    assert_eq!(case(&results, "check/device_listing")["status"], "pass");
}

#[test]
fn a_wrong_element_is_told_with_the_simplest_case_and_its_command() {
    let (ran, results) = results(misbehaving().args(["run", "wrong", "--op", "cast"]));
    assert_eq!(ran.status, Some(1));
    assert!(ran.output.ends_with("FAILED\n"), "{}", ran.output);
    assert_eq!(case(&results, "cast_to_f32/f32/seven")["status"], "pass");
    assert_eq!(case(&results, "cast_to_f32/f32/prime")["status"], "fail");
    let cases = results["cases"].as_array().unwrap();
    // The first type to cast to shows it, and 61 features are the fewest that do: seven simpler numbers come before 61.
    let simplest: Vec<&str> = cases.iter().filter_map(|case| case["simplest"]["id"].as_str()).collect();
    assert!(!simplest.is_empty() && simplest.iter().all(|id| id.ends_with("@0.7")), "{simplest:?}");
    let found = cases.iter().find(|case| case["simplest"]["id"].is_string()).unwrap();
    let replay = found["replay"].as_str().unwrap();
    assert!(ran.output.contains(replay), "{}", ran.output);
    // Of the fixed cases, the smallest that fails is shown first.
    let smallest = case(&results, "cast_to_f32/f32/one_row")["replay"].as_str().unwrap();
    assert!(ran.output.contains(&format!("replay: {smallest}")), "{}", ran.output);
    let words: Vec<&str> = replay.split(' ').collect();
    let again = run(Command::new(words[0]).args(&words[1..]));
    assert_eq!(again.status, Some(1), "{}{}", again.output, again.errors);
    assert!(again.output.contains(&format!("FAIL {}", simplest[0])), "{}", again.output);
}

#[test]
fn the_suite_goes_on_behind_a_case_that_crashes() {
    let (ran, results) = results(misbehaving().args(["run", "crashes", "--op", "cast"]));
    assert_eq!(ran.status, Some(1));
    let crashed = case(&results, "cast_to_f32/f32/prime");
    assert_eq!(crashed["status"], "crash");
    let messages = crashed["messages"].to_string();
    assert!(messages.contains("sixty-one is too many"), "{messages}");
    assert!(cfg!(not(unix)) || messages.contains("SIGABRT"), "{messages}");
    // The one behind it, and all of another group.
    assert_eq!(case(&results, "cast_to_f32/f32/wide")["status"], "pass");
    assert_eq!(case(&results, "cast_to_f32/bf16/wide")["status"], "pass");
    let (_, whole) = self::results(misbehaving().args(["run", "noisy", "--op", "cast"]));
    assert_eq!(whole["cases"].as_array().unwrap().len(), results["cases"].as_array().unwrap().len());
}

#[test]
fn a_group_that_crashes_throughout_is_left() {
    let (ran, results) = results(misbehaving().args(["run", "always-crashes", "--op", "commit_tokens"]));
    assert_eq!(ran.status, Some(1));
    assert_eq!(results["counts"]["crash"], 11);
    let left = case(&results, "commit_tokens/i32/not_run");
    assert!(left["replay"].as_str().unwrap().ends_with(" --op commit_tokens"));
    assert_eq!(
        left["messages"][0],
        "the rest of commit_tokens/i32 was not run: 10 of its cases ended in `crash`"
    );
}

#[test]
fn a_case_that_hangs_is_ended_and_the_next_one_runs() {
    let cases = ["--case", "cast_to_f32/f32/prime", "cast_to_f32/f32/seven", "--timeout", "10"];
    let (ran, results) = results(misbehaving().args(["run", "hangs"]).args(cases));
    assert_eq!(ran.status, Some(1));
    assert_eq!(case(&results, "cast_to_f32/f32/prime")["status"], "timeout");
    assert_eq!(case(&results, "cast_to_f32/f32/seven")["status"], "pass");
}

#[test]
fn a_panic_is_a_failure() {
    let (ran, results) = results(misbehaving().args(["run", "panics", "--case", "cast_to_f32/f32/prime"]));
    assert_eq!(ran.status, Some(1));
    let panicked = case(&results, "cast_to_f32/f32/prime");
    assert_eq!(panicked["status"], "fail");
    assert_eq!(panicked["messages"][0], "panicked: sixty-one is too many");
}

#[rstest]
#[case::asked_for("cast_to_f32/f32/prime", "llm-core-1", 1)]
#[case::not_asked_for("barrier/i32/over_1", "llm-core-1", 0)]
#[case::optional("add_rms_norm/f32/prime", "llm-core-1", 0)]
fn what_is_not_supported_is_a_failure_where_the_profile_asks_for_it(
    #[case] id: &str,
    #[case] profile: &str,
    #[case] status: i32,
) {
    let (ran, results) = results(misbehaving().args(["run", "declines", "--profile", profile, "--case", id]));
    assert_eq!(ran.status, Some(status), "{}", ran.output);
    assert_eq!(case(&results, id)["status"], "unsupported");
}

#[test]
fn what_a_backend_prints_does_not_matter() {
    let ran = run(misbehaving().args(["run", "noisy", "--op", "cast"]));
    assert_eq!(ran.status, Some(0), "{}{}", ran.output, ran.errors);
}

#[rstest]
#[case::dies(&["run", "dies-opening"], &["crashed", "the driver is not to my taste"])]
#[case::refuses(&["run", "cannot-open"], &["the device is on holiday"])]
#[case::no_such_name(&["run", "nowhere"], &["no backend `nowhere`", "wrong"])]
#[case::no_such_file(&["run", "./nowhere.so"], &["nowhere.so"])]
#[case::no_library(&["run", "./Cargo.toml"], &["Cargo.toml", "cannot be opened"])]
#[case::no_such_device(&["run", "wrong", "--device", "99"], &["99"])]
#[case::no_such_case(&["run", "wrong", "--case", "cast_to_f32/f32/nowhere"], &["no case cast_to_f32/f32/nowhere"])]
#[case::no_such_op(&["run", "wrong", "--op", "nowhere"], &["nowhere"])]
#[case::no_such_profile(&["run", "wrong", "--profile", "llm-9"], &["llm-9", "llm-core-1"])]
#[case::no_waivers(&["run", "wrong", "--waivers", "nowhere.toml"], &["nowhere.toml"])]
#[case::no_such_option(&["run", "wrong", "--quickly"], &["--quickly"])]
#[case::nothing(&[], &["Usage"])]
fn what_cannot_be_run_is_said(#[case] arguments: &[&str], #[case] says: &[&str]) {
    let ran = run(misbehaving().args(arguments));
    assert_eq!(ran.status, Some(2), "{}{}", ran.output, ran.errors);
    assert_eq!(ran.output, "");
    for what in says {
        assert!(ran.errors.contains(what), "{}", ran.errors);
    }
}

fn waivers(folder: &Path, expires: &str) -> PathBuf {
    let file = folder.join("waivers.toml");
    let text = format!(
        "[[waiver]]\ncases = [\"cast_to_f32/f32/prime\"]\nreason = \"as agreed\"\nexpires = \"{expires}\"\n"
    );
    fs::write(&file, text).unwrap();
    file
}

#[rstest]
#[case::holds("crashes", "2999-12-31", "waived", 0)]
#[case::expired("crashes", "2020-12-31", "crash", 1)]
#[case::not_needed("wrong", "2999-12-31", "fail", 1)]
fn waivers_hold_while_they_are_needed(
    #[case] backend: &str,
    #[case] expires: &str,
    #[case] expected: &str,
    #[case] status: i32,
) {
    let folder = tempfile::tempdir().unwrap();
    let file = waivers(folder.path(), expires);
    let mut command = if backend == "crashes" { misbehaving() } else { program() };
    let backend = if backend == "crashes" { backend } else { "cpu" };
    command.args(["run", backend, "--case", "cast_to_f32/f32/prime", "--waivers"]).arg(file);
    let (ran, results) = results(&mut command);
    assert_eq!(ran.status, Some(status), "{}", ran.output);
    let case = case(&results, "cast_to_f32/f32/prime");
    assert_eq!(case["status"], expected);
    match expected {
        "waived" => assert_eq!(case["waiver"]["reason"], "as agreed"),
        "fail" => assert_eq!(case["messages"][0], "waiver no longer needed: as agreed"),
        _ => assert!(case["messages"].to_string().contains("expired on 2020-12-31"), "{case}"),
    }
}

#[test]
fn an_unknown_key_in_the_waivers_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = waivers(folder.path(), "2999-12-31");
    fs::write(&file, fs::read_to_string(&file).unwrap() + "forever = true\n").unwrap();
    let ran = run(program().args(["run", "cpu", "--case", "cast_to_f32/f32/prime", "--waivers"]).arg(&file));
    assert_eq!(ran.status, Some(2));
    assert!(ran.errors.contains("forever"), "{}", ran.errors);
}

#[test]
fn junit_is_xml_and_counts_what_the_results_count() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("junit.xml");
    let (_, results) = results(misbehaving().args(["run", "crashes", "--op", "cast", "--junit"]).arg(&file));
    let xml = fs::read_to_string(&file).unwrap();
    let document = roxmltree::Document::parse(&xml).unwrap();
    let root = document.root_element();
    let cases = results["cases"].as_array().unwrap();
    assert_eq!(root.attribute("tests"), Some(cases.len().to_string().as_str()));
    assert_eq!(root.attribute("errors").map(str::to_owned), Some(results["counts"]["crash"].to_string()));
    let of = |tag: &'static str| document.descendants().filter(move |node| node.has_tag_name(tag));
    assert_eq!(of("testcase").count(), cases.len());
    assert_eq!(of("error").count().to_string(), results["counts"]["crash"].to_string());
    let error = of("error").next().unwrap();
    assert!(error.text().unwrap().contains("sixty-one is too many"));
}

#[test]
fn the_page_of_results_names_what_failed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results.md");
    let ran = run(misbehaving().args(["run", "crashes", "--op", "cast", "--markdown"]).arg(&file));
    assert_eq!(ran.status, Some(1), "{}", ran.errors);
    let page = fs::read_to_string(&file).unwrap();
    assert!(page.starts_with("**Failed.** "), "{page}");
    assert!(page.contains("\n| `cast` | "), "{page}");
    assert!(page.contains("\n- `cast_to_f32/f32/prime` (crash): the process ended by signal 6"), "{page}");
}

#[test]
fn a_seed_changes_what_is_drawn_and_nothing_else() {
    let list = |seed: &[&str]| -> Vec<String> {
        let ran = run(program().args(["list", "--op", "cast"]).args(seed));
        assert_eq!(ran.status, Some(0), "{}", ran.errors);
        ran.output.lines().map(str::to_owned).collect()
    };
    let (first, again, other) = (list(&[]), list(&["--seed", "1"]), list(&["--seed", "2"]));
    assert_eq!(first, again);
    let drawn =
        |ids: &[String]| ids.iter().filter(|id| id.contains("property-")).cloned().collect::<Vec<_>>();
    let fixed =
        |ids: &[String]| ids.iter().filter(|id| !id.contains("property-")).cloned().collect::<Vec<_>>();
    assert_eq!(fixed(&first), fixed(&other));
    assert!(drawn(&first).iter().all(|id| !drawn(&other).contains(id)));
    // A case that was drawn with another seed is run by its id alone.
    let ran = run(program().args(["run", "cpu", "--case", &drawn(&other)[0]]));
    assert_eq!(ran.status, Some(0), "{}{}", ran.output, ran.errors);
}

/// The children of a process, whichever of its threads started them.
#[cfg(target_os = "linux")]
fn children(process: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let texts = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let all: Vec<String> = texts.collect();
    all.iter().flat_map(|text| text.split_whitespace()).filter_map(|id| id.parse().ok()).collect()
}

#[test]
#[cfg(target_os = "linux")]
fn a_parent_that_is_killed_leaves_no_child_behind() {
    use std::{
        process::Stdio,
        thread,
        time::{Duration, Instant},
    };
    let mut parent = misbehaving()
        .args(["run", "hangs", "--case", "cast_to_f32/f32/prime"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    let wait = |what: &str, done: &dyn Fn() -> bool| {
        while !done() {
            assert!(Instant::now() < deadline, "{what} did not happen");
            thread::sleep(Duration::from_millis(20));
        }
    };
    let id = parent.id();
    wait("a child", &|| !children(id).is_empty());
    let started = children(id);
    parent.kill().unwrap();
    parent.wait().unwrap();
    let is_gone = |child: &u32| {
        // An orphan that has ended may stay in the table until somebody asks for it.
        let state = fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        state.rsplit(')').next().is_none_or(|rest| rest.trim().is_empty() || rest.trim().starts_with('Z'))
    };
    wait("the end of the child", &|| started.iter().all(is_gone));
}
