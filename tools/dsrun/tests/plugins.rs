//! Tests of plugins: the report of `dsrun backends --explain`, the error for a missing plugin, and generation by the backend in
//! C.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "the libraries and manifests are for Linux"))]

#[path = "../../../conformance-tests/tests/support/example_c.rs"]
mod example_c;

use dsrun_plugin_sdk::raw::{DSR_ABI_MAJOR, DSR_ABI_MINOR};
use dsrun_test_support::{Missing, Requirement, TestResult, compile_c_library, model, test_main};
use snapbox::cmd::{Command, cargo_bin};
use std::{
    fs,
    path::{Path, PathBuf},
};

#[cfg(target_os = "linux")]
test_main![
    every_broken_plugin_is_named_and_the_others_work,
    the_error_for_a_missing_backend_lists_the_searched_places,
    the_plugin_of_the_highest_rank_that_finds_a_device_is_the_default,
    the_backend_in_c_generates,
    the_backend_in_c_generates_from_the_real_model,
    wgpu_generates_the_tokens_of_the_reference,
    ranks_on_one_adapter_generate_the_tokens_of_one_rank,
    bench_abi_measures_every_available_interface,
    kernels_are_built_for_an_absent_device,
];

#[cfg(not(target_os = "linux"))]
fn main() {}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// `dsrun` with a plugin folder, and without those of the user.
fn dsrun(folder: &Path, arguments: &[&str]) -> Command {
    Command::new(cargo_bin!("dsrun"))
        .args(arguments)
        .env("DSRUN_BACKEND_PATH", folder)
        .env("XDG_DATA_HOME", "/does/not/exist")
        .env("HF_HUB_OFFLINE", "1")
        .env("NO_COLOR", "1")
        .env_remove("DSRUN_LOG")
        .env_remove("DSRUN_BACKEND_FILES")
}

/// Code, standard output, standard error.
fn run(command: Command) -> (Option<i32>, String, String) {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Compiles the plugin of core's tests with these definitions.
fn compile(folder: &Path, name: &str, definitions: &[&str]) {
    let mut arguments: Vec<String> = definitions.iter().map(|definition| format!("-D{definition}")).collect();
    arguments.push(format!("-DNAME=\"{name}\""));
    arguments.push(format!("-I{}", root().join("plugins/sdk/include").display()));
    arguments.push(root().join("plugins/sdk/tests/support/plugin.c").display().to_string());
    compile_c_library(&folder.join(format!("lib{name}.so")), arguments);
}

fn manifest(folder: &Path, name: &str, minor: u32) {
    let text = format!(
        "manifest_version = 1\nname = \"{name}\"\nversion = \"0.0.1\"\n[abi]\nmajor = {DSR_ABI_MAJOR}\nminor = {minor}\n[library]\n\
         linux_amd64 = \"lib{name}.so\"\nlinux_arm64 = \"lib{name}.so\"\n"
    );
    fs::write(folder.join(format!("{name}.dsrun.toml")), text).unwrap();
}

fn every_broken_plugin_is_named_and_the_others_work() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    compile(path, "good", &[]);
    // Wrong by its manifest, and wrong behind a manifest that says otherwise.
    compile(path, "newer", &["MINOR=9"]);
    compile(path, "liar", &["MINOR=9"]);
    compile(path, "plain", &["NO_ENTRY"]);
    compile(path, "panics", &["PANICS_WHEN_LISTED"]);
    compile(path, "flagged", &["FLAGS=DSR_PLUGIN_ABORTS_ON_PANIC"]);
    compile(path, "aborts", &["ABORTS_WHEN_LISTED"]);
    fs::write(path.join("libtext.so"), "this is no library").unwrap();
    for name in ["aborts", "flagged", "good", "liar", "panics", "plain", "text"] {
        manifest(path, name, DSR_ABI_MINOR.into());
    }
    manifest(path, "newer", 9);

    let expected = [
        // Another ABI version.
        ("newer", "0.9"),
        ("liar", "0.9"),
        // A library that is not a plugin.
        ("plain", "is not a dsrun plugin"),
        // A library that cannot be opened.
        ("text", "cannot be opened"),
        // A plugin that panics while it is listed.
        ("panics", "an uncaught exception"),
        // A plugin built with panic=abort.
        ("flagged", "panic = \"abort\""),
        // A plugin that ends the process.
        ("aborts", "signal: 6"),
        ("aborts", "about to end the process"),
    ];
    let (code, text, errors) = run(dsrun(path, &["backends", "--explain"]));
    assert_eq!(code, Some(0), "{errors}");
    let lines: Vec<&str> = text.lines().collect();
    for (name, part) in expected {
        let named = lines.iter().any(|line| line.trim().starts_with(name) && line.contains(part));
        assert!(named, "no line says {part:?} of {name}\n{text}");
    }
    assert!(
        lines.iter().any(|line| line.starts_with("  good: device 0: ") && line.ends_with("libgood.so")),
        "{text}"
    );
    assert!(lines[0].ends_with(", the default"), "{text}");

    let (_, json, _) = run(dsrun(path, &["backends", "--explain", "--json"]));
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    let loaded = value["loaded"].as_array().unwrap();
    let of = |name: &str| loaded.iter().find(|plugin| plugin["name"] == name).unwrap();
    assert_eq!(of("good")["devices"].as_array().unwrap().len(), 1);
    assert!(of("aborts")["error"].as_str().unwrap().contains("signal: 6"));

    // Listing runs no code of plugins and trusts every manifest.
    let (code, text, _) = run(dsrun(path, &["backends"]));
    assert_eq!(code, Some(0));
    assert!(text.contains("aborts 0.0.1 (plugin): ") && !text.contains("signal"), "{text}");
}

fn the_plugin_of_the_highest_rank_that_finds_a_device_is_the_default() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let model = root().join("models/tests/fixtures/gguf/smollm2_q4_1/model.gguf");
    let generate = |more: &[&str]| {
        let command = dsrun(path, &["generate", "--temperature", "0", "-n", "4", "--raw", "--model"]);
        run(command.arg(&model).args(more).arg("x"))
    };
    let (code, expected, errors) = generate(&[]);
    assert!(code == Some(0) && !errors.contains("because it finds"), "{errors}");

    // Two plugins come before it, but the first cannot list its devices, and the second has no rank.
    example_c::build(path);
    compile(path, "panics", &["PANICS_WHEN_LISTED"]);
    compile(path, "unranked", &[]);
    manifest(path, "panics", DSR_ABI_MINOR.into());
    manifest(path, "unranked", DSR_ABI_MINOR.into());
    let rank = |name: &str, text: &str, rank: u32| {
        let ranked = text.replacen("[abi]", &format!("default_rank = {rank}\n[abi]"), 1);
        fs::write(path.join(format!("{name}.dsrun.toml")), ranked).unwrap();
    };
    rank("panics", &fs::read_to_string(path.join("panics.dsrun.toml")).unwrap(), 2);
    let example = fs::read_to_string(root().join("plugins/example-c/example-c.dsrun.toml")).unwrap();
    rank("example-c", &example, 1);
    let (code, text, errors) = generate(&[]);
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("backend example-c, because it finds a device"), "{errors}");
    assert_eq!(text, expected);
    let (_, text, _) = run(dsrun(path, &["backends"]));
    assert!(text.contains("example-c 0.1.0 (plugin, the default where it finds a device)"), "{text}");

    // A backend that is named is the one that runs.
    let (code, _, errors) = generate(&["--backend", "cpu"]);
    assert!(code == Some(0) && !errors.contains("because it finds"), "{errors}");
}

fn the_error_for_a_missing_backend_lists_the_searched_places() {
    let folder = tempfile::tempdir().unwrap();
    let generate = |name| run(dsrun(folder.path(), &["generate", "--backend", name, "x"]));
    let (code, _, errors) = generate("abacus");
    assert_eq!(code, Some(1));
    assert!(errors.contains("no backend `abacus`"), "{errors}");
    assert!(errors.contains(&folder.path().display().to_string()), "{errors}");
    assert!(errors.contains("copy the plugin's library"), "{errors}");
    // For a plugin of this repository, the error has the command that installs it for this program.
    let (code, _, errors) = generate("example-c");
    assert_eq!(code, Some(1));
    let prefix = cargo_bin!("dsrun").ancestors().nth(2).unwrap().canonicalize().unwrap();
    let command = format!("cd {} && cargo xtask install --prefix {}", root().display(), prefix.display());
    assert!(errors.contains(&command), "{command} is not in\n{errors}");
}

/// So many greedy tokens of a model, or the error.
fn try_tokens(model: &Path, count: usize, backend: &[&str]) -> Result<serde_json::Value, String> {
    let command =
        dsrun(Path::new("/does/not/exist"), &["generate", "--json", "-q", "--temperature", "0", "-n"]);
    let command = command.arg(count.to_string()).args(["--dtype", "f32", "--raw", "--model"]).arg(model);
    let (code, text, errors) = run(command.args(backend).arg("The sky is blue because"));
    if code != Some(0) {
        return Err(errors);
    }
    let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["tokens"].as_array().map(Vec::len), Some(count), "{answer}");
    Ok(answer["tokens"].clone())
}

fn tokens(model: &Path, backend: &[&str]) -> serde_json::Value {
    try_tokens(model, 24, backend).unwrap()
}

fn the_backend_in_c_matches_the_default(model: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let library = example_c::build(folder);
    fs::copy(root().join("plugins/example-c/example-c.dsrun.toml"), folder.join("example-c.dsrun.toml"))
        .unwrap();
    let expected = tokens(model, &[]);
    assert_eq!(tokens(model, &["--backend", library.to_str().unwrap()]), expected);
}

fn the_backend_in_c_generates() {
    the_backend_in_c_matches_the_default(&root().join("models/tests/fixtures/gguf/smollm2_q4_1/model.gguf"));
}

fn the_backend_in_c_generates_from_the_real_model() -> TestResult {
    the_backend_in_c_matches_the_default(&model()?);
    Ok(())
}

/// The library of a plugin of this repository, if it is built.
fn built(name: &str) -> Result<PathBuf, Missing> {
    let library = cargo_bin!("dsrun").parent().unwrap().join(format!("libdsrun_backend_{name}.so"));
    if library.is_file() {
        return Ok(library);
    }
    let reason = format!("{} does not exist; `cargo build --workspace` builds it", library.display());
    Err(Missing::circumstance(reason))
}

fn wgpu_generates_the_tokens_of_the_reference() -> TestResult {
    let (model, wgpu, candle) = (model()?, built("wgpu")?, built("candle")?);
    let found = try_tokens(&model, 16, &["--backend", wgpu.to_str().unwrap()]);
    if found.as_ref().is_err_and(|errors| errors.contains("no adapter of Vulkan")) {
        return Err(Requirement::Adapter
            .missing("wgpu finds no adapter")
            .with_detail(found.unwrap_err().trim()));
    }
    let expected = try_tokens(&model, 16, &["--backend", candle.to_str().unwrap()]);
    assert_eq!(found.unwrap(), expected.unwrap());
    Ok(())
}

fn ranks_on_one_adapter_generate_the_tokens_of_one_rank() -> TestResult {
    let (model, wgpu) = (model()?, built("wgpu")?);
    let generated = |more: &[&str]| {
        let arguments = [["--backend", wgpu.to_str().unwrap()].as_slice(), more].concat();
        try_tokens(&model, 8, &arguments)
    };
    let one = generated(&[]);
    if one.as_ref().is_err_and(|errors| errors.contains("no adapter of Vulkan")) {
        return Err(Requirement::Adapter
            .missing("wgpu finds no adapter")
            .with_detail(one.unwrap_err().trim()));
    }
    assert_eq!(generated(&["--tp", "2", "--share-device"]).unwrap(), one.unwrap());
    Ok(())
}

fn bench_abi_measures_every_available_interface() {
    let model = root().join("models/tests/fixtures/gguf/smollm2_q4_1/model.gguf");
    let bench = || {
        let arguments = ["bench", "abi", "--steps", "4", "--repeat", "1", "--threads", "1", "-q", "--json"];
        dsrun(Path::new("/does/not/exist"), &arguments).arg("--model").arg(&model)
    };
    let (code, text, errors) = run(bench());
    assert_eq!(code, Some(0), "{errors}");
    let figures: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ways = figures["ways"].as_array().unwrap();
    let names: Vec<_> = ways.iter().map(|way| way["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["linked", "loopback"]);
    assert!(
        ways.iter().all(|way| way["median"].as_f64().unwrap() > 0.0 && figures["steps"] == 4),
        "{figures}"
    );
    // A plugin of another backend is refused.
    let folder = tempfile::tempdir().unwrap();
    let library = example_c::build(folder.path());
    let (code, _, errors) = run(bench().arg("--plugin").arg(library));
    assert_eq!(code, Some(1));
    assert!(errors.contains("the plugin is `example-c`"), "{errors}");
}

/// The plugin for CUDA, after it has built kernels into `cache`.
fn cuda(cache: &Path) -> Result<PathBuf, Missing> {
    let library = built("cuda")?;
    let (code, _, errors) = run(build_ahead(&library, cache, "h200", &["--no-fuse"]));
    if code != Some(0) && errors.contains("nvrtc") {
        return Err(Requirement::Nvrtc.missing("the library cannot be loaded").with_detail(errors.trim()));
    }
    assert_eq!(code, Some(0), "{errors}");
    Ok(library)
}

/// `dsrun kernels build` for steps of one token on an absent device.
fn build_ahead(library: &Path, cache: &Path, device: &str, more: &[&str]) -> Command {
    let model = ["--weights", "random", "--model", "smollm2-135m", "--dtype", "bf16", "--context", "64"];
    dsrun(Path::new("/does/not/exist"), &["kernels", "build", "--step-tokens", "1", "--jobs", "2"])
        .args(model)
        .args(["--for", device, "--backend"])
        .arg(library)
        .args(more)
        .env("DSRUN_CACHE", cache)
}

/// The files of a kernel cache, and a test for kernel names in them.
fn kernels(cache: &Path) -> (Vec<PathBuf>, impl Fn(&str) -> bool) {
    let mut files: Vec<PathBuf> =
        fs::read_dir(cache.join("kernels")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let binaries: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    let holds = move |name: &str| {
        let section = format!("\0.text.{name}\0");
        binaries.iter().any(|binary| binary.windows(section.len()).any(|part| part == section.as_bytes()))
    };
    (files, holds)
}

fn kernels_are_built_for_an_absent_device() -> TestResult {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path();
    let library = cuda(cache)?;
    let (without, holds) = kernels(cache);
    assert!(holds("prepare_step") && !holds("layers") && !holds("next_token"), "{without:?}");

    let (code, out, errors) = run(build_ahead(&library, cache, "h200", &[]));
    assert_eq!((code, out.as_str()), (Some(0), ""), "{errors}");
    assert!(errors.contains("distinct calls are built for H200"), "{errors}");
    let (built, holds) = kernels(cache);
    assert!(holds("layers") && holds("next_token"), "the kernels of merged calls: {built:?}");

    // The same device by its architecture.
    let (code, _, errors) = run(build_ahead(&library, cache, "sm_90a:132", &[]));
    assert_eq!((code, kernels(cache).0), (Some(0), built), "{errors}");

    let (code, _, errors) = run(build_ahead(&library, cache, "sm_90a", &[]));
    assert_eq!(code, Some(1));
    assert!(errors.contains("such as sm_90a:132, or name one of") && errors.contains("h200"), "{errors}");
    let (code, _, errors) = run(build_ahead(Path::new("cpu"), cache, "h200", &[]));
    assert_eq!(code, Some(1));
    assert!(errors.contains("cannot compile ahead of time"), "{errors}");
    Ok(())
}
