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

/// In the type of the file, whose quantised products round alike wherever a stage is.
#[test]
fn stages_generate_the_text_of_one_device() {
    let folder = tempfile::tempdir().unwrap();
    let shard = free_exchanges(folder.path());
    for dtype in ["f32", "keep"] {
        let generate = |flags: &[&str]| {
            let arguments = ["--raw", "--dtype", dtype, "--temperature", "0", "-n", "24"];
            with_tiny("generate", &arguments).arg("the sky").args(flags)
        };
        let one = run(generate(&[]));
        for flags in [&["--pp", "2"][..], &["--pp", "3"], &["--pp", "2", "--stages", "1"]] {
            let several = run(generate(flags));
            assert_eq!((several.code, &several.out), (Some(0), &one.out), "{flags:?}: {}", several.err);
            assert!(several.err.contains("stage 1 of"), "the memory plan names the stages: {}", several.err);
        }
        if dtype == "f32" {
            let both = ["--mesh", "tp=2,pp=2", "--threads", "4", "--shard"];
            let several = run(generate(&both).arg(&shard));
            assert_eq!((several.code, &several.out), (Some(0), &one.out), "{}", several.err);
        }
    }
    let inspected =
        with_tiny("inspect", &["--json", "--program", "--mesh", "tp=2,pp=2", "--shard"]).arg(&shard);
    let inspected = json(&run(inspected).out);
    assert_eq!(inspected["memory_of_ranks"].as_array().unwrap().len(), 4);
    let program = inspected["program"].as_str().unwrap();
    assert!(program.contains("axis=tensor") && program.contains("axis=pipeline"), "{program}");
}

#[test]
fn ranks_are_measured_as_one_device_is() {
    let folder = tempfile::tempdir().unwrap();
    let shard = free_exchanges(folder.path());
    let figures_of = |command: &[&str], axis: &str| {
        let ran = run(dsrun(command)
            .arg("--model")
            .arg(tiny())
            .args(["--dtype", "f32", axis, "2", "--json", "--shard"])
            .arg(&shard));
        assert_eq!(ran.code, Some(0), "{command:?}: {}", ran.err);
        json(&ran.out)
    };
    for command in [
        &["bench", "latency", "--prompt", "8", "--gen", "4", "--repeat", "1"][..],
        &["bench", "throughput", "--requests", "2", "--prompt", "8", "--gen", "4"],
        &["bench", "prefill", "--prompt", "8", "--repeat", "1"],
    ] {
        for axis in ["--tp", "--pp"] {
            assert_eq!(figures_of(command, axis)["ranks"], 2, "{command:?}");
        }
    }
    let text = folder.path().join("text");
    fs::write(&text, "the sky is blue today and the sun is warm ".repeat(8)).unwrap();
    let eval = ["eval", "perplexity", text.to_str().unwrap(), "--context", "16"];
    let [split, staged] = ["--tp", "--pp"].map(|axis| figures_of(&eval, axis)["mean_nll"].as_f64().unwrap());
    let one = run(dsrun(&eval).arg("--model").arg(tiny()).args(["--dtype", "f32", "--json"]));
    let one = json(&one.out)["mean_nll"].as_f64().unwrap();
    assert!((split - one).abs() < 1e-4, "{split} on two ranks, {one} on one");
    assert!((staged - one).abs() < 1e-4, "{staged} over two stages, {one} on one");
}

/// The file has the steps of every rank, and each process writes its own.
#[test]
fn traces_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let (shard, path) = (free_exchanges(folder.path()), folder.path().join("trace.json"));
    let flags = ["--raw", "--dtype", "f32", "-n", "4", "--mesh", "tp=2,pp=2", "--threads", "2", "--shard"];
    let ran = run(with_tiny("generate", &flags).arg(&shard).arg("--trace").arg(&path).arg("the sky"));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let trace = json(&fs::read_to_string(&path).unwrap());
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..4 {
        let of_rank = |category: &str| {
            events.iter().filter(|event| event["tid"] == rank && event["cat"] == category).count()
        };
        assert!(of_rank("step") >= 4 && of_rank("collective") > 0, "rank {rank}: {trace}");
    }
    let bench = ["--prompt", "8", "--gen", "4", "--pp", "2"];
    for (command, flags) in [("latency", &["--repeat", "1"][..]), ("throughput", &["--requests", "2"])] {
        let path = folder.path().join(command);
        let ran = run(dsrun(&["bench", command, "--model"])
            .arg(tiny())
            .args(bench)
            .args(flags)
            .arg("--trace")
            .arg(&path));
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        assert!(fs::read_to_string(path).unwrap().contains("\"receive\""));
    }
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
        (&["--pp", "0"], 2, "0 is not in 1..=64"),
        (&["--mesh", "tp=2,pp"], 2, "is not an axis with a size"),
        (&["--mesh", "tp=2,dp=2"], 2, "there is no axis `dp`"),
        (&["--mesh", "tp=2,tp=2"], 2, "axis tp is named twice"),
        (&["--mesh", "tp=2", "--pp", "2"], 2, "cannot be used with"),
        (&["--devices", "0", "--pp", "2"], 1, "1 device cannot be divided into 2 stages"),
        (&["--pp", "2", "--stages", "1,2"], 1, "names 2 first layers, but 2 stages have 1"),
        (&["--pp", "2", "--stages", "9"], 1, "layer 9, which the model does not have"),
        (&["--pp", "40"], 1, "can be divided into at most"),
        (&["--micro-batches", "4"], 1, "only several stages work on micro-batches"),
        (
            &["--tp", "2", "--trace", "/nowhere/trace.json"],
            1,
            "--trace /nowhere/trace.json cannot be written",
        ),
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

#[test]
fn all_reduces_are_measured() {
    let bench = |flags: &[&str]| run(dsrun(&["bench", "all-reduce", "--backend", "cpu"]).args(flags));
    let flags = ["--tp", "3", "--size", "1KiB,64KiB", "--dtype", "f32", "--repeat", "2", "--json"];
    let ran = bench(&flags);
    let found = json(&ran.out);
    assert_eq!((&found["ranks"], &found["dtype"]), (&3.into(), &"f32".into()), "{}", ran.err);
    let sizes = found["sizes"].as_array().unwrap();
    let bytes: Vec<_> = sizes.iter().map(|size| size["bytes"].as_u64().unwrap()).collect();
    assert_eq!(bytes, [1024, 65536]);
    for size in sizes {
        let (micros, rate) = (&size["microseconds"], &size["bus_bytes_per_second"]);
        let (micros, rate) = (micros.as_f64().unwrap(), rate.as_f64().unwrap());
        // Every rank sends two thirds of its bytes twice.
        let sent = size["bytes"].as_f64().unwrap() * 4.0 / 3.0;
        assert!(micros > 0.0 && (rate * micros / 1e6 - sent).abs() < 1.0, "{size}");
    }
    let ran = bench(&["--tp", "2", "--size", "1KiB", "--repeat", "1"]);
    assert!(ran.code == Some(0) && ran.out.contains("on 2 ranks") && ran.out.contains("1024"), "{}", ran.out);
    let ran = bench(&["--tp", "2", "--size", "1KiB,20", "--check", "80"]);
    let right = "100 all-reduces of 1024 bytes: the right bits on all 2 ranks";
    assert!(ran.code == Some(0) && ran.out.contains(right) && ran.out.contains("of 20 bytes"), "{}", ran.out);
    let ran = bench(&["--tp", "2", "--size", "1KiB", "--check", "1", "--json"]);
    assert_eq!(json(&ran.out)[0]["all_reduces"], 50, "{}", ran.err);
    let ran = bench(&["--tp", "2", "--check", "1", "--repeat", "2"]);
    assert!(ran.code == Some(2) && ran.err.contains("cannot be used with"), "{}", ran.err);
    for (flags, part) in [
        (&["--tp", "1"][..], "needs several devices"),
        (&["--tp", "2", "--size", "3"], "3 is not a whole number of elements of bf16"),
        (&["--tp", "2", "--dtype", "keep"], "--dtype keep"),
        (&["--pp", "2"], "--pp has no effect"),
        (&["--tp", "2", "--micro-batches", "2"], "--micro-batches has no effect"),
    ] {
        let ran = bench(flags);
        assert!(ran.code == Some(1) && ran.err.contains(part), "{flags:?}: {}", ran.err);
    }
}
