//! Discovery in temporary folders: order, precedence, and broken plugins that do not affect others.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![cfg(unix)]

#[path = "support/cc.rs"]
mod cc;

use dsrun_core::{Code, device::Backend};
use dsrun_plugin_sdk::discovery::{Origin, PlaceOutcome, Places, Plugin, Report, State, discover};
use std::{
    fs,
    path::{Path, PathBuf},
};

fn platform() -> String {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!("{}_{architecture}", std::env::consts::OS)
}

/// Writes a manifest, and its library unless the test wants it to be missing.
fn manifest(folder: &Path, name: &str, library: &str, more: &str) -> PathBuf {
    let platform = platform();
    let text = format!(
        "manifest_version = 1\nname = \"{name}\"\nversion = \"0.0.1\"\n[abi]\nmajor = 0\nminor = 2\n[library]\n\
         {platform} = \"{library}\"\n{more}"
    );
    let path = folder.join(format!("{name}.dsrun.toml"));
    fs::write(&path, text).unwrap();
    path
}

fn in_folders(folders: &[&Path]) -> Report {
    let folders = folders.iter().map(|folder| (Origin::PathVariable, folder.to_path_buf())).collect();
    discover(&Places { files: Vec::new(), folders })
}

fn reason(plugin: &Plugin) -> &str {
    match &plugin.state {
        State::Broken(reason) => reason,
        other => panic!("{} is {other:?}", plugin.name),
    }
}

#[test]
fn manifests_precede_libraries_and_places_are_in_order() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // A library that a manifest names is not listed again; a library with the name of another manifest is shadowed.
    for folder in [&first, &second] {
        for library in
            ["libdsrun_backend_one.so", "libdsrun_backend_two.so", "libother.so", "libdsrun_backend_.so"]
        {
            fs::write(folder.path().join(library), "").unwrap();
        }
    }
    let one = manifest(first.path(), "one", "libdsrun_backend_one.so", "");
    let two = manifest(first.path(), "two", "libother.so", "");
    let report = in_folders(&[first.path(), second.path()]);
    let found: Vec<(&str, &Path, &State)> =
        report.plugins.iter().map(|plugin| (plugin.name.as_str(), plugin.file(), &plugin.state)).collect();
    let library =
        |folder: &tempfile::TempDir, name: &str| folder.path().join(format!("libdsrun_backend_{name}.so"));
    let (third, fourth, fifth) = (library(&first, "two"), library(&second, "one"), library(&second, "two"));
    assert_eq!(
        found,
        [
            ("one", one.as_path(), &State::Ready),
            ("two", two.as_path(), &State::Ready),
            ("two", third.as_path(), &State::Shadowed(two.clone())),
            ("one", fourth.as_path(), &State::Shadowed(one.clone())),
            ("two", fifth.as_path(), &State::Shadowed(two.clone())),
        ]
    );
    let outcomes: Vec<&PlaceOutcome> = report.places.iter().map(|place| &place.outcome).collect();
    assert_eq!(outcomes, [&PlaceOutcome::Searched(3), &PlaceOutcome::Searched(2)]);
}

#[test]
fn broken_plugins_are_reported_and_do_not_affect_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::write(path.join("libgood.so"), "").unwrap();
    fs::write(path.join("a-torn.dsrun.toml"), "manifest_version = ").unwrap();
    fs::write(path.join("b-bytes.dsrun.toml"), [0xFF, 0xFE]).unwrap();
    manifest(path, "c-keys", "libgood.so", "[colours]\nred = 1\n");
    manifest(path, "d-gone", "libgone.so", "");
    manifest(path, "e-needs", "libgood.so", "[requires]\nany_of = [\"libdsrun-nobody-has-this.so.1\"]\n");
    let newer = manifest(path, "f-newer", "libgood.so", "");
    fs::write(&newer, fs::read_to_string(&newer).unwrap().replace("minor = 2", "minor = 9")).unwrap();
    let other = manifest(path, "g-other", "libgood.so", "");
    fs::write(&other, fs::read_to_string(&other).unwrap().replace(&platform(), "plan9_mips")).unwrap();
    fs::create_dir(path.join("h-folder.dsrun.toml")).unwrap();
    manifest(
        path,
        "z-good",
        "libgood.so",
        "[requires]\nany_of = [\"libdsrun-nobody-has-this.so.1\", \"libc.so.6\"]\n",
    );

    let report = in_folders(&[path]);
    let expected = [
        ("a-torn", "not a manifest"),
        ("b-bytes", "cannot be read"),
        ("c-keys", "colours"),
        ("d-gone", "libgone.so"),
        ("e-needs", "libdsrun-nobody-has-this.so.1"),
        ("f-newer", "0.9"),
        ("g-other", "plan9_mips"),
        ("h-folder", "cannot be read"),
    ];
    for ((name, part), plugin) in expected.iter().zip(&report.plugins) {
        assert_eq!(plugin.name, *name);
        assert!(reason(plugin).contains(part), "{name}: {}", reason(plugin));
    }
    let ready: Vec<&str> = report.ready().map(|plugin| plugin.name.as_str()).collect();
    if cfg!(target_os = "linux") {
        assert_eq!(ready, ["z-good"], "any_of needs only one of several libraries");
    }
    let error = report.load("f-newer").unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("f-newer.dsrun.toml") && error.message().contains("0.9"), "{error}");
    let error = report.load("nobody").unwrap_err();
    assert!(
        error.message().contains("`nobody`") && error.message().contains(path.to_str().unwrap()),
        "{error}"
    );

    let text = report.to_string();
    for (name, part) in expected {
        assert!(text.contains(name) && text.contains(part), "{name} or {part} is missing in\n{text}");
    }
}

#[test]
fn priority_orders_the_plugins_of_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("lib.so"), "").unwrap();
    for (name, priority) in [("a", 1), ("b", 100), ("c", 1)] {
        let path = manifest(folder.path(), name, "lib.so", "");
        let text = format!("priority = {priority}\n{}", fs::read_to_string(&path).unwrap());
        fs::write(&path, text).unwrap();
    }
    let report = in_folders(&[folder.path()]);
    let names: Vec<&str> = report.plugins.iter().map(|plugin| plugin.name.as_str()).collect();
    assert_eq!(names, ["b", "a", "c"]);
}

#[test]
fn skipped_places_have_a_reason() {
    let report = discover(&Places {
        files: vec![(Origin::FilesVariable, "x.so".into()), (Origin::FilesVariable, "/none.so".into())],
        folders: vec![
            (Origin::PathVariable, "plugins".into()),
            (Origin::PathVariable, "".into()),
            (Origin::System, "/does/not/exist".into()),
            (Origin::System, "/etc/hostname".into()),
        ],
    });
    let outcomes: Vec<&PlaceOutcome> = report.places.iter().map(|place| &place.outcome).collect();
    let refused =
        |outcome: &PlaceOutcome| matches!(outcome, PlaceOutcome::Failed(why) if why.contains("relative"));
    assert!(refused(outcomes[0]) && refused(outcomes[2]) && refused(outcomes[3]), "{outcomes:?}");
    assert_eq!((outcomes[1], outcomes[4]), (&PlaceOutcome::Absent, &PlaceOutcome::Absent));
    assert!(matches!(outcomes[5], PlaceOutcome::Failed(_) | PlaceOutcome::Absent), "{outcomes:?}");
    assert!(report.plugins.is_empty());
}

#[test]
fn a_library_given_by_path_has_the_manifest_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libx.so");
    fs::write(&library, "").unwrap();
    let named = || {
        let files = vec![(Origin::Argument, library.clone())];
        discover(&Places { files, folders: Vec::new() }).plugins.remove(0)
    };
    let plugin = named();
    assert_eq!((plugin.name.as_str(), plugin.manifest), ("x", None));
    let manifest = manifest(folder.path(), "beside", "libx.so", "");
    let plugin = named();
    assert_eq!((plugin.name.as_str(), plugin.manifest), ("beside", Some(manifest)));
}

#[test]
fn probing_reports_which_plugins_work() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let build = |file: &str, definitions: &[&str]| cc::plugin(path, file, definitions);
    build("libgood.so", &["NAME=\"good\""]);
    build("libold.so", &["MINOR=9"]);
    build("libpanics.so", &["NAME=\"panics\"", "PANICS_WHEN_LISTED"]);
    build("libaborts.so", &["NAME=\"aborts\"", "FLAGS=DSR_PLUGIN_ABORTS_ON_PANIC"]);
    build("libplain.so", &["NO_ENTRY"]);
    build("libliar.so", &["NAME=\"somebody-else\""]);
    fs::write(path.join("libtext.so"), "text").unwrap();
    for name in ["aborts", "good", "liar", "old", "panics", "plain", "text"] {
        manifest(path, name, &format!("lib{name}.so"), "");
    }
    let report = in_folders(&[path]);
    assert!(
        report.plugins.iter().all(|plugin| plugin.state == State::Ready),
        "discovery runs no code\n{report}"
    );
    assert_eq!(report.load("good").unwrap().info().name, "good");

    let expected = [
        ("aborts", Err("panic = \"abort\"")),
        ("good", Ok(1)),
        ("liar", Err("`somebody-else`")),
        ("old", Err("0.9")),
        ("panics", Err("an uncaught exception")),
        ("plain", Err("not a dsrun plugin")),
        ("text", Err("cannot be opened")),
    ];
    let probes = report.probe();
    assert_eq!(probes.len(), expected.len());
    for (probe, (name, outcome)) in probes.iter().zip(expected) {
        assert_eq!(probe.name, name);
        match (&probe.devices, outcome) {
            (Ok(devices), Ok(count)) => assert_eq!(devices.len(), count),
            (Err(error), Err(part)) => assert!(error.contains(part), "{name}: {error}"),
            (found, _) => panic!("{name}: {found:?}"),
        }
    }
}

#[test]
fn a_library_given_by_path_must_have_the_name_in_its_file_name() {
    let folder = tempfile::tempdir().unwrap();
    let build = |file: &str| cc::plugin(folder.path(), file, &["NAME=\"mine\""]);
    let plain = build("my_thing.so");
    let named = build("libdsrun_backend_yours.so");
    let load = |file: &Path| {
        let report = discover(&Places { files: vec![(Origin::Argument, file.into())], ..Places::default() });
        report.plugins[0].load()
    };
    assert_eq!(load(&plain).unwrap().info().name, "mine");
    assert!(load(&named).unwrap_err().to_string().contains("has the name `mine`"));
}
