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
    let ran = run(dsrun(&["plan", "llama-70b", "--device", "rtx-4090", "--devices", "2"]));
    assert!(ran.code == Some(0) && ran.out.contains("does not fit"), "{}", ran.out);
    assert!(ran.err.contains("use more --devices"), "{}", ran.err);
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
    ] {
        let ran = run(dsrun(&["plan"]).arg(&tiny).args(flags));
        assert_eq!(ran.code, Some(code), "{flags:?}: {}", ran.err);
        assert!(ran.err.contains("error:") && ran.err.contains(part), "{flags:?}: {}", ran.err);
    }
}
