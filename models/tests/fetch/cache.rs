//! The cache folder: damage, leftovers, paths, and names that try to leave it.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use dsrun_models::fetch::{ModelFiles, Silent, Source, WeightFiles, list_cached, remove, resolve};
use rstest::rstest;

use crate::common::{ID, assert_says, files_under, hub, options};
use crate::mock_hub::weights;

/// Damage done to a cached model, which must be noticed and mended.
#[rstest]
#[case::cut(|file: &Path| fs::write(file, weights(1000)).unwrap())]
#[case::cut_without_trace(|file: &Path| {
    let modified = fs::metadata(file).unwrap().modified().unwrap();
    fs::write(file, weights(1000)).unwrap();
    fs::File::options().write(true).open(file).unwrap().set_modified(modified).unwrap();
})]
#[case::emptied(|file: &Path| fs::write(file, b"").unwrap())]
#[case::removed(|file: &Path| fs::remove_file(file).unwrap())]
#[case::changed(|file: &Path| {
    let mut content = fs::read(file).unwrap();
    content[300_000] ^= 1;
    fs::write(file, content).unwrap();
    set_modified(file, 60);
})]
#[case::no_manifest(|file: &Path| fs::remove_file(file.with_file_name("manifest.json")).unwrap())]
#[case::cut_manifest(|file: &Path| fs::write(file.with_file_name("manifest.json"), b"{\"version\": 1").unwrap())]
#[case::newer_manifest(|file: &Path| {
    let path = file.with_file_name("manifest.json");
    let text = fs::read_to_string(&path).unwrap().replace("\"version\": 1", "\"version\": 99");
    fs::write(path, text).unwrap();
})]
#[case::straying_manifest(|file: &Path| {
    fs::copy(file.with_file_name("tokenizer.json"), file.parent().unwrap().join("../../tokenizer.json")).unwrap();
    let path = file.with_file_name("manifest.json");
    let text = fs::read_to_string(&path).unwrap().replace("\"tokenizer.json\"", "\"../../tokenizer.json\"");
    fs::write(path, text).unwrap();
})]
fn damage_is_noticed_and_mended(#[case] damage: fn(&Path)) {
    let cache = tempfile::tempdir().unwrap();
    let (_hub, mut options) = hub(cache.path());
    let model = resolve(ID, &options, &mut Silent).unwrap();
    let file = model.directory.join("model.safetensors");
    damage(&file);
    options.offline = true;
    assert_says(resolve(ID, &options, &mut Silent), &["cache ", "offline"]);
    options.offline = false;
    assert_eq!(resolve(ID, &options, &mut Silent).unwrap().source, Source::Hub);
    assert_eq!(fs::read(&file).unwrap(), weights(600_000));
    assert_eq!(resolve(ID, &options, &mut Silent).unwrap().source, Source::Cache);
}

fn set_modified(file: &Path, seconds_ahead: u64) {
    let time = SystemTime::now() + Duration::from_secs(seconds_ahead);
    fs::File::options().write(true).open(file).unwrap().set_modified(time).unwrap();
}

#[test]
fn a_file_that_was_only_touched_still_counts() {
    let cache = tempfile::tempdir().unwrap();
    let (_hub, options) = hub(cache.path());
    let model = resolve(ID, &options, &mut Silent).unwrap();
    set_modified(&model.directory.join("model.safetensors"), 60);
    assert_eq!(resolve(ID, &options, &mut Silent).unwrap().source, Source::Cache);
}

#[test]
fn what_a_killed_process_left_is_swept_and_never_used() {
    let cache = tempfile::tempdir().unwrap();
    let (_hub, options) = hub(cache.path());
    let entry = cache.path().join("models/ann--tiny");
    fs::create_dir_all(entry.join(".staging-1-0-pip/deep")).unwrap();
    fs::write(entry.join(".staging-1-0-pip/deep/x"), b"x").unwrap();
    fs::write(entry.join(".staging-1-1-model.safetensors"), weights(600_000)).unwrap();
    fs::write(entry.join("model.safetensors"), b"not recorded").unwrap();
    fs::write(entry.join("config.json"), b"{}").unwrap();
    assert!(!list_cached(&options).unwrap()[0].complete);
    let model = resolve(ID, &options, &mut Silent).unwrap();
    assert_eq!(model.source, Source::Hub);
    assert_eq!(fs::read(entry.join("model.safetensors")).unwrap(), weights(600_000));
    assert!(files_under(&entry).iter().all(|file| !file.contains(".staging-")));
}

#[rstest]
#[case::the_cache_itself("cache", "cache is a file where a folder is needed")]
#[case::the_models("cache/models", "models is a file where a folder is needed")]
#[case::the_entry("cache/models/ann--tiny", "ann--tiny is a file where a folder is needed")]
fn a_file_in_the_way_is_named(#[case] file: &str, #[case] part: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(file);
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, b"I was here first").unwrap();
    let (hub, options) = hub(&folder.path().join("cache"));
    assert_says(resolve(ID, &options, &mut Silent), &["cannot create folder", part, "DSRUN_CACHE"]);
    assert_eq!(hub.requests().len(), 0);
    assert_eq!(fs::read(&file).unwrap(), b"I was here first");
}

#[rstest]
#[case("..")]
#[case("../outside")]
#[case("/etc")]
#[case("ann/..")]
#[case("ann--tiny/../..")]
#[case("ann/tiny@../../..")]
#[case("")]
#[case(".")]
#[case("a\\b")]
fn remove_takes_names_only(#[case] name: &str) {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("outside")).unwrap();
    fs::write(folder.path().join("outside/precious"), b"x").unwrap();
    let options = options(&folder.path().join("cache"));
    fs::create_dir_all(folder.path().join("cache/models/ann--tiny")).unwrap();
    assert_says(remove(name, &options, &mut Silent), &["is not a model name"]);
    assert_eq!(files_under(folder.path()), ["outside/precious"]);
    assert!(folder.path().join("cache/models/ann--tiny").exists());
}

#[test]
fn what_cannot_be_read_is_listed_and_can_be_removed() {
    let cache = tempfile::tempdir().unwrap();
    let options = options(cache.path());
    assert_eq!(list_cached(&options).unwrap(), []);
    let odd = cache.path().join("models/odd folder");
    fs::create_dir_all(&odd).unwrap();
    fs::write(odd.join("x.gguf"), b"12345").unwrap();
    let listed = list_cached(&options).unwrap();
    assert_eq!((listed[0].name.as_str(), listed[0].bytes, listed[0].complete), ("odd folder", 5, false));
    remove("odd folder", &options, &mut Silent).unwrap();
    assert!(!odd.exists());
}

#[test]
fn a_manifest_cannot_pass_itself_off_as_another_model() {
    let cache = tempfile::tempdir().unwrap();
    let (_hub, options) = hub(cache.path());
    let model = resolve(ID, &options, &mut Silent).unwrap();
    fs::rename(&model.directory, cache.path().join("models/moved")).unwrap();
    assert_eq!(list_cached(&options).unwrap()[0].name, "moved");
}

fn local(name: &Path) -> Result<ModelFiles, dsrun_models::fetch::FetchError> {
    resolve(name.to_str().unwrap(), &options(&name.join("no-cache")), &mut Silent)
}

#[test]
fn paths_come_first() {
    let folder = tempfile::tempdir().unwrap();
    let gguf = folder.path().join("m.gguf");
    fs::write(&gguf, b"GGUF").unwrap();
    let model = local(&gguf).unwrap();
    assert_eq!((model.source, model.weights), (Source::Path, WeightFiles::Gguf(vec![gguf.clone()])));
    assert_eq!(local(folder.path()).unwrap().weights, WeightFiles::Gguf(vec![gguf]));
}

#[rstest]
#[case(&["pytorch_model.bin", "config.json"], "pytorch_model.bin has weights as a pickle of PyTorch: convert them")]
#[case(&["model.onnx"], "model.onnx has weights as ONNX")]
#[case(&["adapter_config.json", "adapter_model.safetensors"], "adapter (LoRA): merge it")]
#[case(
    &["config.json", "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"],
    "2 .safetensors files, but model.safetensors.index.json, which lists them, is missing"
)]
fn a_folder_with_weights_that_are_not_read_says_which(#[case] files: &[&str], #[case] reason: &str) {
    let folder = tempfile::tempdir().unwrap();
    for file in files {
        fs::write(folder.path().join(file), b"x").unwrap();
    }
    assert_says(local(folder.path()), &["no model at", reason]);
}

#[rstest]
#[case("missing.gguf", "there is no such file")]
#[case("empty", "neither model.safetensors")]
#[case("notes.txt", "only .gguf and .safetensors")]
fn a_path_without_a_model_says_why_and_looks_no_further(#[case] file: &str, #[case] part: &str) {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("empty")).unwrap();
    fs::write(folder.path().join("notes.txt"), b"x").unwrap();
    let message = assert_says(local(&folder.path().join(file)), &["no model at", file, part]);
    assert!(!message.contains("hub"), "{message}");
}
