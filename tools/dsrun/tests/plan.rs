//! Tests of `dsrun plan`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/command.rs"]
mod command;

use command::{dsrun, json, run, tiny};
use std::fs;

#[test]
fn meshes_of_absent_devices_are_compared() {
    let ran = run(dsrun(&["plan", "llama-8b", "--devices", "4", "--batch", "8", "--json"]));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let plan = json(&ran.out);
    assert_eq!((&plan["device"], &plan["devices"]), (&"h100".into(), &4.into()));
    let forecasts = plan["forecasts"].as_array().unwrap();
    let mesh = |forecast: &serde_json::Value| (forecast["tp"].as_u64(), forecast["pp"].as_u64());
    let mut meshes: Vec<_> = forecasts.iter().map(mesh).collect();
    let times: Vec<f64> = forecasts.iter().map(|forecast| forecast["token_ms"].as_f64().unwrap()).collect();
    assert!(times.is_sorted() && times[0] > 0.0, "the fastest comes first: {times:?}");
    meshes.sort();
    assert_eq!(meshes, [(Some(1), Some(4)), (Some(2), Some(2)), (Some(4), Some(1))]);
    assert!(forecasts.iter().all(|forecast| forecast["fits"] == true));

    // A slower link slows ranks of a layer more than stages.
    let slow = ["--link-bandwidth", "1", "--latency-us", "100"];
    let ran = run(dsrun(&["plan", "llama-8b", "--devices", "4", "--batch", "8", "--json"]).args(slow));
    assert_eq!(json(&ran.out)["forecasts"][0]["tp"], 1, "{}", ran.out);
}

#[test]
fn a_plan_says_what_bounds_it_and_draws_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timeline.svg");
    let flags = ["--mesh", "tp=1,pp=2", "--batch", "4", "--context", "64", "--explain", "--timeline"];
    let ran = run(dsrun(&["plan"]).arg(tiny()).args(flags).arg(&path));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    for part in ["tp=1,pp=2", "stage 2 of 2", "bound by", "the slowest", "stages idle for"] {
        assert!(ran.out.contains(part), "{part}: {}", ran.out);
    }
    assert!(fs::read_to_string(path).unwrap().starts_with("<svg"));
    let ran = run(dsrun(&["plan", "llama-70b", "--device", "rtx-4090", "--memory", "4"]));
    assert!(ran.code == Some(0) && ran.out.contains("does not fit"), "{}", ran.out);
    assert!(ran.err.contains("use more --devices"), "{}", ran.err);
    // Where there is room for a ring of layers, it streams.
    let flags = ["--device", "rtx-4090", "--host-bandwidth", "20", "--explain"];
    let ran = run(dsrun(&["plan", "llama-8b", "--memory", "8"]).args(flags));
    for part in
        ["streams", "copied from host memory", "at 20 GB/s", "most tokens", "bound by the link", "w4a16"]
    {
        assert!(ran.code == Some(0) && ran.out.contains(part), "{part}: {}", ran.out);
    }
    // Where the KV cache may be in host memory, the weights fit.
    let flags = ["--batch", "64", "--context", "4096", "--kv-in"];
    let plan = |place| run(dsrun(&["plan", "llama-8b", "--memory", "24"]).args(flags).arg(place));
    let [device, host] = ["device", "host"].map(plan);
    assert!(device.out.contains("streams") || device.out.contains("does not fit"), "{}", device.out);
    assert!(host.code == Some(0) && host.out.contains("is in host memory"), "{} {}", host.out, host.err);
    assert!(!host.out.contains("streams") && !host.out.contains("does not fit"), "{}", host.out);
}

/// The network between hosts slows ranks of a stage that it separates, and hardly a pipeline.
#[test]
fn hosts_are_taken_into_account() {
    let forecast = |mesh: &str, flags: &[&str]| {
        let ran = run(dsrun(&["plan", "llama-1b", "--mesh", mesh, "--context", "256", "--json"]).args(flags));
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        json(&ran.out)["forecasts"][0]["token_ms"].as_f64().unwrap()
    };
    let two_hosts = ["--per-host", "4", "--network-bandwidth", "10", "--network-latency-us", "50"];
    for (mesh, slower) in [("tp=8,pp=1", true), ("tp=4,pp=2", false), ("tp=4,pp=1", false)] {
        let (one, two) = (forecast(mesh, &[]), forecast(mesh, &two_hosts));
        assert_eq!(two > 1.3 * one, slower, "{mesh}: {one} and {two} ms");
        assert_eq!(two > one, mesh != "tp=4,pp=1", "{mesh}: {one} and {two} ms");
    }
    // More ranks than the meshes that are tried by themselves.
    assert!(forecast("tp=32,pp=1", &[]) > 0.0);
}

/// Few micro-batches leave stages idle, and many read all weights again and again.
#[test]
fn numbers_of_micro_batches_are_compared() {
    let flags =
        ["--batch", "16", "--context", "512", "--prompt", "256", "--step-tokens", "4096", "--explain"];
    let ran = run(dsrun(&["plan", "llama-1b", "--mesh", "tp=1,pp=4"]).args(flags));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let slowdown = |name: &str| -> f64 {
        let line =
            ran.out.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{}", ran.out));
        line.split_once('(').unwrap().1.split_once('x').unwrap().0.parse().unwrap()
    };
    assert_eq!(slowdown("many micro-batches for prompts"), 1.0);
    assert!(slowdown("16 micro-batches for both") > 1.5, "{}", ran.out);
    assert!(slowdown("4 micro-batches for both") > 0.9, "{}", ran.out);
}

#[test]
fn plans_that_are_not_possible_are_refused() {
    let tiny = tiny();
    for (flags, code, part) in [
        (&["--device", "h9000"][..], 1, "there are no figures of a device `h9000`"),
        (&["--memory-bandwidth", "0"], 1, "--memory-bandwidth is 0, but must be positive"),
        (&["--devices", "3", "--mesh", "tp=2,pp=2"], 1, "must be tp times pp, which is 4"),
        (&["--mesh", "tp=1,pp=60"], 1, "can be divided into at most"),
        (&["--devices", "0"], 2, "must be at least 1"),
        (&["--context", "8", "--prompt", "9"], 1, "longer than the context"),
        (&["--context", "99999999"], 1, "context is 99999999: must be from 1 to"),
        (&["--devices", "4096"], 1, "the last mesh that was tried, tp="),
        (&["--micro-batches", "3"], 1, "--micro-batches is for the stages of a pipeline"),
        (&["--network-bandwidth", "9"], 2, "--per-host"),
        (&["--per-host", "2", "--network-bandwidth", "0"], 1, "--network-bandwidth is 0"),
        (&["--mesh", "tp=9999"], 2, "must be from 1 to 1024"),
        (&["--mesh", "tp=1,pp=2", "--micro-batches", "9999"], 1, "must be from 1 to 1024"),
    ] {
        let ran = run(dsrun(&["plan"]).arg(&tiny).args(flags));
        assert_eq!(ran.code, Some(code), "{flags:?}: {}", ran.err);
        assert!(ran.err.contains("error:") && ran.err.contains(part), "{flags:?}: {}", ran.err);
    }
}
