//! Tests of models that are split over devices: text, figures and messages.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/command.rs"]
mod command;

use command::{dsrun, json, run, tiny, with_tiny};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A policy by which exchanges between ranks cost nothing, so that a model as small as the fixture is split.
fn free_exchanges(folder: &Path) -> PathBuf {
    let path = folder.join("shard.toml");
    let text = "[costs]\nmemory-bandwidth = 1e10\nlink-bandwidth = 1e15\nlatency-us = 0.0\ngather-latency-us = 0.0\n";
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn ranks_generate_the_text_of_one_device() {
    let folder = tempfile::tempdir().unwrap();
    let shard = free_exchanges(folder.path());
    let generate = |flags: &[&str]| {
        let arguments = ["--raw", "--dtype", "f32", "--temperature", "0", "-n", "24"];
        with_tiny("generate", &arguments).arg("the sky").args(flags)
    };
    let one = run(generate(&["--tp", "1"]));
    assert_eq!(one.code, Some(0), "{}", one.err);
    assert!(one.out.len() > 8 && !one.err.contains("rank"), "{} {}", one.out, one.err);
    for ranks in ["2", "3"] {
        let several = run(generate(&["--tp", ranks, "--threads", "2", "--shard"]).arg(&shard));
        assert_eq!((several.code, &several.out), (Some(0), &one.out), "{ranks} ranks: {}", several.err);
        assert!(several.err.contains("rank"), "the memory plan names the ranks: {}", several.err);
    }
    let speculating = run(generate(&["--tp", "2", "--speculate", "ngram", "--shard"]).arg(&shard));
    assert_eq!((speculating.code, &speculating.out), (Some(0), &one.out), "{}", speculating.err);

    let inspected = with_tiny("inspect", &["--json", "--program", "--tp", "3", "--shard"]).arg(&shard);
    let inspected = json(&run(inspected).out);
    assert_eq!(inspected["memory_of_ranks"].as_array().unwrap().len(), 3);
    assert!(inspected["program"].as_str().unwrap().contains("axis=tensor"), "the model is not split");
}

#[test]
fn ranks_are_measured_as_one_device_is() {
    let folder = tempfile::tempdir().unwrap();
    let shard = free_exchanges(folder.path());
    let figures = |command: &[&str]| {
        let ran = run(dsrun(command)
            .arg("--model")
            .arg(tiny())
            .args(["--dtype", "f32", "--tp", "2", "--json", "--shard"])
            .arg(&shard));
        assert_eq!(ran.code, Some(0), "{command:?}: {}", ran.err);
        json(&ran.out)
    };
    for command in [
        &["bench", "latency", "--prompt", "8", "--gen", "4", "--repeat", "1"][..],
        &["bench", "throughput", "--requests", "2", "--prompt", "8", "--gen", "4"],
        &["bench", "prefill", "--prompt", "8", "--repeat", "1"],
    ] {
        assert_eq!(figures(command)["ranks"], 2, "{command:?}");
    }
    let text = folder.path().join("text");
    fs::write(&text, "the sky is blue today and the sun is warm ".repeat(8)).unwrap();
    let eval = ["eval", "perplexity", text.to_str().unwrap(), "--context", "16"];
    let split = figures(&eval)["mean_nll"].as_f64().unwrap();
    let one = run(dsrun(&eval).arg("--model").arg(tiny()).args(["--dtype", "f32", "--json"]));
    let one = json(&one.out)["mean_nll"].as_f64().unwrap();
    assert!((split - one).abs() < 1e-4, "{split} on two ranks, {one} on one");
}

#[test]
fn devices_that_cannot_be_ranks_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let shard = free_exchanges(folder.path());
    let unknown = folder.path().join("unknown.toml");
    fs::write(&unknown, "[wieghts]\nembedding = \"rows\"\n").unwrap();
    let (shard, unknown) = (shard.to_str().unwrap(), unknown.to_str().unwrap());
    let tiny = tiny();
    let tiny = tiny.to_str().unwrap();
    let cases: &[(&[&str], i32, &str)] = &[
        (&["--tp", "0"], 2, "0 is not in 1..=64"),
        (&["--device", "0", "--devices", "0"], 2, "cannot be used with"),
        (&["--devices", "0,x"], 2, "--devices"),
        (&["--tp", "2", "--shard", unknown], 2, "wieghts"),
        (&["--devices", "0,0"], 1, "names device 0 twice"),
        (&["--devices", "0,1"], 1, "names device 1, but backend cpu has device 0 only"),
        (&["--devices", "0", "--tp", "2"], 1, "names 1 device, but --tp 2 needs 2"),
        (&["--device", "7", "--tp", "2"], 1, "device 7"),
        (&["--shard", shard], 1, "--shard decides how weights are split"),
        (&["--tp", "2", "--draft", tiny], 1, "--speculate draft is not possible"),
    ];
    for (flags, code, part) in cases {
        let ran = run(with_tiny("generate", flags).arg("x"));
        assert_eq!(ran.code, Some(*code), "{flags:?}: {}", ran.err);
        assert!(ran.err.contains("error:") && ran.err.contains(part), "{flags:?}: {}", ran.err);
        assert!(!ran.err.contains("panicked") && !ran.err.contains("KV cache"), "{flags:?}: {}", ran.err);
    }
    let ran = run(dsrun(&["bench", "kernels", "--tp", "2", "--model", tiny]));
    assert!(ran.code == Some(1) && ran.err.contains("bench kernels runs on one device"), "{}", ran.err);
}
