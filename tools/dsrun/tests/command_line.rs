//! Tests of the command line: output, messages and exit codes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/command.rs"]
mod command;

use command::{dsrun, json, run, tiny, with_tiny};
use std::{
    fs,
    path::{Path, PathBuf},
};

#[test]
fn help_names_every_command_and_fits_a_terminal() {
    let ran = run(dsrun(&["--help"]));
    assert_eq!(ran.code, Some(0));
    for command in [
        "generate", "chat", "pull", "models", "inspect", "plan", "logits", "backends", "doctor", "kernels",
        "bench", "eval", "quantize",
    ] {
        assert!(ran.out.contains(&format!("  {command} ")), "{command} is missing in\n{}", ran.out);
    }
    assert!(ran.out.lines().all(|line| line.chars().count() <= 100));
}

#[test]
fn unknown_flags_are_refused_with_exit_code_2() {
    for arguments in [
        &["--nonsense"][..],
        &["generate", "--nonsense", "x"],
        &["bench", "latency", "--batch", "0"],
        &["models", "--log", "a=b="],
    ] {
        let ran = run(dsrun(arguments));
        assert_eq!(ran.code, Some(2), "{arguments:?}");
        assert!(ran.out.is_empty() && ran.err.contains("error:"), "{}", ran.err);
    }
}

#[test]
fn text_goes_to_standard_output_and_everything_else_to_standard_error() {
    let ran = run(with_tiny("generate", &["--raw", "-n", "8", "the sky"]));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.out.ends_with('\n') && !ran.out.contains("tokens/s"), "{}", ran.out);
    assert!(ran.err.contains("KV cache") && ran.err.contains("tokens/s"), "{}", ran.err);
    let quiet = run(with_tiny("generate", &["--raw", "-n", "8", "-q", "the sky"]));
    assert_eq!((quiet.code, quiet.out, quiet.err.as_str()), (Some(0), ran.out, ""));
}

#[test]
fn a_cache_of_8_bits_is_chosen_by_flag_or_variable() {
    let arguments = ["--raw", "-n", "8", "the sky"];
    let flag = run(with_tiny("generate", &[&arguments[..], &["--kv-dtype", "int8"]].concat()));
    assert_eq!(flag.code, Some(0), "{}", flag.err);
    let variable = run(with_tiny("generate", &arguments).env("DSRUN_KV_DTYPE", "int8"));
    assert_eq!(variable.out, flag.out, "{}", variable.err);
    let wrong = run(with_tiny("generate", &[&arguments[..], &["--kv-dtype", "int4"]].concat()));
    assert!(wrong.code == Some(2) && wrong.err.contains("int8"), "{}", wrong.err);
}

#[test]
fn a_preset_is_not_a_model() {
    let named = |arguments: &[&str]| run(dsrun(arguments));
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("rounded");
    for arguments in [
        &["generate", "--model", "llama-1b", "x"][..],
        &["bench", "latency", "--model", "llama-1b"],
        &["inspect", "--model", "llama-1b"],
        &["pull", "llama-1b"],
        &["quantize", "llama-1b", "--policy", "w8a16", "-o", output.to_str().unwrap()],
    ] {
        let ran = named(arguments);
        assert_eq!(ran.code, Some(1), "{}", ran.err);
        assert!(ran.err.contains("`llama-1b` is a preset") && ran.err.contains("hint: "), "{}", ran.err);
    }
    assert!(named(&["bench", "latency", "--model", "llama-1b"]).err.contains("--weights random"));
    assert!(named(&["generate", "--model", "llama-0b", "x"]).err.contains("is not a model name"));
}

#[test]
fn prompts_come_from_arguments_files_and_standard_input() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompt.txt");
    fs::write(&file, "the sky\n").unwrap();
    let arguments = ["--raw", "-n", "8", "-q", "--json"];
    let argument = json(&run(with_tiny("generate", &arguments).arg("the sky")).out);
    let from_file = json(&run(with_tiny("generate", &arguments).arg("--file").arg(&file)).out);
    let from_input = json(&run(with_tiny("generate", &arguments).arg("-").stdin("the sky\n")).out);
    for answer in [&argument, &from_file, &from_input] {
        assert_eq!(answer["tokens"], argument["tokens"]);
        assert!(answer["text"].is_string() && answer["timings"]["first_token_seconds"].is_number());
        assert!(["stop", "length"].contains(&answer["finish_reason"].as_str().unwrap()));
    }
}

#[test]
fn speculation_does_not_change_the_text() {
    let arguments = ["--raw", "--temperature", "0", "-n", "40", "--json", "the sky the sky the sky"];
    let [plain, speculating] = [&[][..], &["--speculate", "ngram"]]
        .map(|more| json(&run(with_tiny("generate", &arguments).args(more)).out));
    assert_eq!(plain["tokens"], speculating["tokens"]);
    let told =
        run(with_tiny("generate", &arguments[..5]).args(["--speculate", "ngram:3", "the sky the sky"]));
    assert!(told.err.contains("proposed tokens were accepted"), "{}", told.err);
    for wrong in ["ngram:0", "ngram:64", "ngram:many", "draft:0", "lookup"] {
        let ran = run(with_tiny("generate", &["--speculate", wrong, "x"]));
        assert_eq!(ran.code, Some(2), "{wrong}: {}", ran.err);
        assert!(ran.err.contains("--speculate") && ran.err.contains("`ngram:K`"), "{}", ran.err);
    }
}

#[test]
fn a_draft_model_proposes_tokens() {
    let arguments = ["--raw", "--temperature", "0", "-n", "40", "the sky"];
    let plain = json(&run(with_tiny("generate", &arguments).arg("--json")).out);
    for how in [&[][..], &["--speculate", "draft:2"]] {
        let draft = || with_tiny("generate", &arguments).arg("--draft").arg(tiny()).args(how);
        assert_eq!(json(&run(draft().arg("--json")).out)["tokens"], plain["tokens"]);
        let told = run(draft()).err;
        assert!(
            told.contains("proposed tokens were accepted") && told.contains("draft model's KV cache"),
            "{told}"
        );
    }
    for command in ["latency", "throughput"] {
        let ran = run(dsrun(&["bench", command, "--prompt", "8", "--gen", "24", "--json", "-q"])
            .args(if command == "throughput" { &["--requests", "2"][..] } else { &["--repeat", "1"] })
            .arg("--model")
            .arg(tiny())
            .arg("--draft")
            .arg(tiny()));
        let figures = json(&ran.out);
        let [proposed, accepted] =
            ["proposed_tokens", "accepted_tokens"].map(|name| figures[name].as_u64().unwrap());
        assert!(proposed > 0 && accepted == proposed, "{figures}");
    }
}

#[test]
fn an_unusable_draft_model_is_refused() {
    let refused = |arguments: &[&str], says: &str| {
        let ran = run(with_tiny("generate", arguments).arg("x"));
        assert_eq!(ran.code, Some(1), "{}", ran.err);
        assert!(ran.err.contains(says), "{}", ran.err);
    };
    refused(&["--speculate", "draft"], "name one with --draft");
    refused(&["--speculate", "ngram", "--draft", tiny().to_str().unwrap()], "leave one of them out");
    refused(&["--draft", "nowhere/model.gguf"], "the draft model nowhere/model.gguf");
    // The same file with another text for one token.
    let mut bytes = fs::read(tiny()).unwrap();
    let places: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(b"<|im_end|>")).collect();
    places.iter().for_each(|at| bytes[*at..*at + 10].copy_from_slice(b"<|im_fin|>"));
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.gguf");
    fs::write(&other, bytes).unwrap();
    refused(&["--draft", other.to_str().unwrap()], "its token 2 is \"<|im_fin|>\" instead of \"<|im_end|>\"");
}

#[test]
fn logits_have_the_fields_for_comparing_engines() {
    let ran =
        run(with_tiny("logits", &["--tokens", "5,6,7,8", "--top", "3", "--json", "-q", "--dtype", "f32"]));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let score = json(&ran.out);
    assert_eq!(score["tokens"], serde_json::json!([5, 6, 7, 8]));
    assert!(score["mean_nll"].is_number());
    assert_eq!(score["positions"].as_array().unwrap().len(), 4);
    assert_eq!(score["positions"][2]["index"], 2);
    assert_eq!(score["positions"][2]["top"].as_array().unwrap().len(), 3);
    let some = run(with_tiny("logits", &["--tokens", "5,6,7,8", "--at", "1,3", "--json", "-q"]));
    let indices: Vec<_> =
        json(&some.out)["positions"].as_array().unwrap().iter().map(|p| p["index"].clone()).collect();
    assert_eq!(indices, [1, 3]);
    let outside = run(with_tiny("logits", &["--tokens", "5,6", "--at", "2", "-q"]));
    assert_eq!(outside.code, Some(1));
    assert!(outside.err.contains("no position 2"), "{}", outside.err);
}

#[test]
fn perplexity_is_measured_over_windows() {
    let text = "the sky is blue and the sea is green, said the man who had seen neither of them. ".repeat(8);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    fs::write(&file, &text).unwrap();
    let file = file.to_str().unwrap();
    let measure = |arguments: &[&str]| {
        let ran = run(dsrun(&["eval", "perplexity", file, "--json", "-q", "--dtype", "f32", "--model"])
            .arg(tiny())
            .args(arguments));
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        json(&ran.out)
    };
    let figures = measure(&["--context", "32", "--chunks", "3"]);
    assert_eq!([&figures["windows"], &figures["predictions"], &figures["stride"]], [3, 45, 32]);
    let number = |field: &str| figures[field].as_f64().unwrap();
    assert!((number("mean_nll").exp() - number("perplexity")).abs() < 1e-9 * number("perplexity"));
    assert!(number("standard_error") > 0.0);
    // With a stride of the context less one, every prediction of a window counts: the mean that `logits` prints.
    let figures = measure(&["--context", "32", "--chunks", "1", "--stride", "31"]);
    let logits = run(with_tiny("logits", &["--json", "-q", "--dtype", "f32", "--prompt", &text[..162]]));
    let tokens = json(&logits.out)["tokens"].as_array().unwrap()[..32].to_vec();
    let ids = tokens.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let logits = json(&run(with_tiny("logits", &["--json", "-q", "--dtype", "f32", "--tokens", &ids])).out);
    let difference = figures["mean_nll"].as_f64().unwrap() - logits["mean_nll"].as_f64().unwrap();
    assert!(difference.abs() < 1e-12, "{difference}");
    assert_eq!(figures["predictions"], 31);

    for (arguments, message) in [
        (["--context", "20000"], "fewer than a window of 20000"),
        (["--stride", "512"], "--stride is 512"),
        (["--chunks", "0"], "at least 1"),
    ] {
        let ran = run(dsrun(&["eval", "perplexity", file, "-q", "--model"]).arg(tiny()).args(arguments));
        assert_ne!(ran.code, Some(0));
        assert!(ran.err.contains(message), "{}", ran.err);
    }
}

#[test]
fn a_quantised_folder_is_a_model_and_is_never_overwritten() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("tiny-w8a16");
    let quantize =
        |policy: &str| run(dsrun(&["quantize", "--policy", policy, "-o"]).arg(&folder).arg(tiny()));
    // A failure leaves no files behind.
    let ran = quantize("int4g32m_f16");
    assert!(ran.code == Some(1) && ran.err.contains("has no minima"), "{}", ran.err);
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    let ran = quantize("w3a16");
    assert!(ran.code == Some(2) && ran.err.contains("w3a16"), "{}", ran.err);

    let ran = quantize("w8a16");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.out.contains("layer") && ran.out.contains("down") && ran.out.contains("int8"), "{}", ran.out);
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
    // The tiny model has more embedding than matrices, which the average counts.
    let bits = ran.out.split(" bits a weight").next().and_then(|text| text.rsplit(' ').next()).unwrap();
    assert!((8.0..33.0).contains(&bits.parse::<f64>().unwrap()), "{}", ran.out);
    let nll = |model: &PathBuf| {
        let ran = run(dsrun(&["logits", "--prompt", "the sky is", "--json", "-q", "--model"]).arg(model));
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        json(&ran.out)["mean_nll"].as_f64().unwrap()
    };
    let difference = (nll(&folder) - nll(&tiny())).abs();
    // Rounding to int8 is off by at most half a step of 127.
    assert!(difference > 0.0 && difference < 0.1, "{difference}");

    let ran = quantize("w8a16");
    assert!(ran.code == Some(1) && ran.err.contains("exists already"), "{}", ran.err);
}

#[test]
fn a_result_that_is_larger_than_its_source_is_said_so() {
    let parent = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models/tests/fixtures/gguf/smollm2_q4_1/model.gguf");
    let folder = parent.path().join("w8a16");
    let ran = run(dsrun(&["quantize", "--policy", "w8a16", "-o"]).arg(&folder).arg(source));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("more than the") && ran.err.contains("quantise the original"), "{}", ran.err);
}

#[test]
fn a_written_folder_keeps_its_quantised_activations() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("tiny-w8a8");
    let ran = run(dsrun(&["quantize", "--policy", "w8a8", "-o"]).arg(&folder).arg(tiny()));
    assert!(ran.code == Some(0) && ran.out.contains("int8 (w8a8)"), "{}{}", ran.out, ran.err);
    let ran = run(dsrun(&["inspect", "--program", "--model"]).arg(&folder));
    assert!(ran.code == Some(0) && ran.out.contains("linear_w8a8"), "{}{}", ran.out, ran.err);
}

#[test]
fn a_budget_gives_an_editable_policy() {
    let parent = tempfile::tempdir().unwrap();
    let quantize = |arguments: &[&str], output: &Path| {
        run(dsrun(&["quantize"]).args(arguments).arg("-o").arg(output).arg(tiny()))
    };
    let policy = parent.path().join("policy.toml");
    let ran = quantize(&["--budget", "5", "--policy-only"], &policy);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("bits a weight") && ran.err.contains("mixed precision"), "{}", ran.err);
    let text = fs::read_to_string(&policy).unwrap();
    assert!(text.starts_with("# Chosen for") && text.contains("\ndefault = \"int4g"), "{text}");
    let ran = quantize(&["--budget", "5", "--policy-only"], &policy);
    assert!(ran.code == Some(1) && ran.err.contains("exists already"), "{}", ran.err);

    // The folder contains its policy, and has the results of `--quantize` with that policy, except for the type of weights
    // that are not quantised.
    let folder = parent.path().join("tiny-mixed");
    let ran = quantize(&["--budget", "5"], &folder);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(fs::read_to_string(folder.join("dsrun-policy.toml")).unwrap(), text);
    let nll = |model: &Path, arguments: &[&str]| {
        let fixed = ["logits", "--prompt", "the sky is", "--json", "-q"];
        let ran = run(dsrun(&fixed).args(arguments).arg("--model").arg(model));
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        json(&ran.out)["mean_nll"].as_f64().unwrap()
    };
    let (written, loaded) = (nll(&folder, &[]), nll(&tiny(), &["--quantize", policy.to_str().unwrap()]));
    assert!((written - loaded).abs() < 1e-2, "{written} and {loaded}");
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 2);

    let nothing = parent.path().join("nothing");
    for (arguments, code, message) in [
        (&["--budget", "2"][..], 1, "the smallest formats take 4."),
        (&["--budget", "inf"], 1, "must be a number of bits"),
        (&["--budget", "5", "--policy", "w8a16"], 2, "cannot be used with"),
        (&["--policy", "w8a16", "--policy-only"], 2, "cannot be used with"),
        (&[], 2, "--policy"),
    ] {
        let ran = quantize(arguments, &nothing);
        assert!(ran.code == Some(code) && ran.err.contains(message), "{}", ran.err);
    }
    let ran = quantize(&["--policy", "w8a16"], &nothing.join("deeper"));
    assert!(ran.code == Some(1) && ran.err.contains("is not a folder"), "{}", ran.err);
}

#[test]
fn bits_of_a_weight_count_the_embedding_and_the_scales() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("tiny");
    let ran = run(dsrun(&["quantize", "--policy", "w8a16", "--json", "-q", "-o"]).arg(&folder).arg(tiny()));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    // 96 tokens, 32 wide, 2 layers: matrices with 256 rows and 9216 weights, and 2 vectors. One more vector at the end.
    let weights = 96 * 32 + 2 * (9216 + 2 * 32) + 32;
    // The embedding in 2 bytes, matrices in 1 with a scale of 4 a row and a shape of 16 each, vectors in 4.
    let bytes = 96 * 32 * 2 + 2 * (9216 + 256 * 4 + 7 * 16 + 2 * 32 * 4) + 32 * 4;
    let expected = f64::from(bytes * 8) / f64::from(weights);
    let report = json(&ran.out);
    assert_eq!(report["bytes"], bytes);
    let bits = report["bits_per_weight"].as_f64().unwrap();
    assert!((bits - expected).abs() < 1e-9, "{bits} instead of {expected}");
}

#[test]
fn inspect_shows_configuration_plan_tensors_and_program() {
    let ran = run(with_tiny("inspect", &["--tensors", "--program"]));
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    for part in [
        "family     llama",
        "sampling   temperature 0.6, top-k 0, top-p 0.95, min-p 0.1",
        "KV cache",
        "blk.0.attn_q.weight",
        "paged_attention{",
        "output %",
    ] {
        assert!(ran.out.contains(part), "{part} is missing in\n{}", ran.out);
    }
    let value = json(&run(with_tiny("inspect", &["--json", "--program"])).out);
    let program: dsrun_core::program::Program = value["program"].as_str().unwrap().parse().unwrap();
    assert_eq!(program.name, "llama");
    // The program of primitives, and the program fused for the device.
    assert!(!ran.out.contains("region \""), "{}", ran.out);
    let fused = run(with_tiny("inspect", &["--program", "--fused", "--exact"]));
    assert!(fused.out.contains("region \"norm_linear\""), "{}", fused.out);
    assert_eq!(run(with_tiny("inspect", &["--fused", "--exact"])).out, fused.out);
    assert!(
        run(with_tiny("inspect", &["--fused"])).out.contains("linear_a8"),
        "inputs are quantised by default"
    );
    assert!(!fused.out.contains("linear_a8"), "{}", fused.out);
    // The program of a step.
    let step = run(with_tiny("inspect", &["--program", "--step", "4", "--requests", "2", "--exact"]));
    assert!(step.out.contains("region \"norm_linear\""), "{}{}", step.out, step.err);
    let few = run(with_tiny("inspect", &["--program", "--step", "1", "--requests", "2"]));
    assert_eq!(few.code, Some(1));
    assert!(few.err.contains("step is 1 tokens of 2 requests: must be at most"), "{}", few.err);
}

#[test]
fn the_model_may_be_given_without_a_flag() {
    let tiny = tiny();
    let tiny = tiny.to_str().unwrap();
    let flag = run(dsrun(&["inspect", "--model", tiny, "--json"]));
    assert_eq!(json(&run(dsrun(&["inspect", tiny, "--json"])).out)["name"], json(&flag.out)["name"]);
    let logits = |arguments: &[&str]| run(dsrun(&[&["logits", "--tokens", "5,6"], arguments].concat()));
    assert_eq!(logits(&[tiny]).out, logits(&["--model", tiny]).out);
    assert_eq!(logits(&[tiny]).code, Some(0));
    assert!(run(dsrun(&["chat", "/no/such/model.gguf"])).err.contains("/no/such/model.gguf"));
}

#[test]
fn a_log_in_a_file_has_no_colours() {
    let ran = run(with_tiny("generate", &["--raw", "-n", "1", "--log", "debug", "a"]).env("NO_COLOR", ""));
    assert!(ran.err.contains("DEBUG") && !ran.err.contains('\x1b'), "{}", ran.err);
}

#[test]
fn a_prompt_is_not_nothing() {
    let ran = run(with_tiny("generate", &["-q"]).stdin(""));
    assert_eq!(ran.code, Some(1));
    assert!(ran.err.contains("standard input is empty"), "{}", ran.err);
}

#[test]
fn fused_and_primitive_programs_give_the_same_text() {
    let arguments = ["--raw", "-n", "12", "-q", "--dtype", "f32", "the sky"];
    let fused = run(with_tiny("generate", &arguments));
    let plain = run(with_tiny("generate", &[&["--no-fuse"][..], &arguments].concat()));
    assert_eq!((fused.code, plain.code), (Some(0), Some(0)), "{}{}", fused.err, plain.err);
    assert_eq!(fused.out, plain.out);
}

#[test]
fn backends_are_listed_with_their_devices() {
    let value = json(&run(dsrun(&["backends", "--json"])).out);
    assert!(!value["linked"][0]["devices"].as_array().unwrap().is_empty());
    let name = value["linked"][0]["name"].as_str().unwrap();
    assert!(run(dsrun(&["backends"])).out.contains(&format!("{name} ")));
    let ran = run(with_tiny("generate", &["--backend", "abacus", "x"]));
    assert_eq!(ran.code, Some(1));
    assert!(ran.err.contains("no backend `abacus`") && ran.err.contains(name), "{}", ran.err);
    assert!(ran.err.contains("backends --explain"), "{}", ran.err);
    let explained = run(dsrun(&["backends", "--explain"]));
    assert!(explained.code == Some(0) && explained.out.contains("backends.d"), "{}", explained.out);
    // No heading without content.
    assert!(!explained.out.contains(":\nplugins") && !explained.out.ends_with(":\n"), "{}", explained.out);
}

#[test]
fn doctor_reports_on_every_backend_despite_a_broken_one() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libdsrun_backend_broken.so");
    fs::write(&library, "no library").unwrap();
    let doctor =
        |arguments: &[&str]| run(dsrun(&["doctor"]).args(arguments).env("DSRUN_BACKEND_FILES", &library));
    let ran = doctor(&["--json"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let report = json(&ran.out);
    let backends = report["backends"].as_array().unwrap();
    let works = |name: &str| {
        let found = backends.iter().find(|backend| backend["name"] == name);
        found.map(|backend| (backend["default"] == true, backend["works"] == true))
    };
    assert_eq!((works("cpu"), works("broken")), (Some((true, true)), Some((false, false))), "{report:#}");
    assert!(report["ok"] == true && !backends[0]["findings"].as_array().unwrap().is_empty());
    let text = doctor(&[]).out;
    assert!(text.contains("the default: works") && text.contains("does not work"), "{text}");

    let asked = doctor(&["--backend", library.to_str().unwrap()]);
    assert_eq!(asked.code, Some(1));
    assert!(asked.out.contains("does not work") && asked.err.contains("error: backend"), "{}", asked.err);
    let missing = doctor(&["--json", "--backend", "nosuch"]);
    assert_eq!((missing.code, json(&missing.out)["ok"].as_bool()), (Some(1), Some(false)));
}

#[test]
fn kernels_are_built_ahead_of_time() {
    let arguments = ["--weights", "random", "--model", "gpt2", "--jobs", "2", "--step-tokens", "8"];
    let ran = run(dsrun(&["kernels", "build"]).args(arguments));
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), ""), "{}", ran.err);
    assert!(ran.err.contains("distinct calls are ready"), "{}", ran.err);
}

#[test]
fn bench_latency_reports_every_figure() {
    let ran = run(with_tiny("bench", &[]));
    assert_eq!(ran.code, Some(2), "bench needs to be told what to measure");
    let bench = |prompt| {
        let sizes = ["--prompt", prompt, "--gen", "4", "--batch", "2", "--repeat", "1"];
        let bench = dsrun(&[&["bench", "latency", "-q", "--json"], &sizes[..]].concat());
        json(&run(bench.arg("--model").arg(tiny())).out)
    };
    let figures = bench("6");
    for field in ["ms_per_token", "first_token_seconds", "bytes_per_step", "share_of_bandwidth"] {
        assert!(figures[field].as_f64().is_some_and(|value| value > 0.0), "{field}: {figures}");
    }
    let bytes = |figures: &serde_json::Value| figures["bytes_per_step"].as_u64().unwrap();
    assert!(bytes(&bench("16")) > bytes(&figures), "keys and values are counted");
}

#[test]
fn bench_prefill_reports_each_length() {
    let bench =
        dsrun(&["bench", "prefill", "--prompt", "5,9", "--batch", "2", "--repeat", "1", "-q", "--json"]);
    let figures = json(&run(bench.arg("--model").arg(tiny())).out);
    assert_eq!(figures["step_tokens"], 18);
    for (prompt, tokens) in figures["prompts"].as_array().unwrap().iter().zip([5, 9]) {
        assert_eq!(prompt["tokens"], tokens);
        for field in ["seconds", "tokens_per_second", "operations_per_second"] {
            assert!(prompt[field].as_f64().is_some_and(|value| value > 0.0), "{field}: {figures}");
        }
    }
    assert_eq!(figures["pause_seconds"], 0);
    let paused = ["bench", "prefill", "--prompt", "5", "--pause", "1", "--repeat", "1", "-q"];
    let text = run(dsrun(&paused).arg("--model").arg(tiny())).out;
    assert!(text.contains("median of 1, pauses of 1 s"), "{text}");
}

#[test]
fn bench_prefill_measures_the_texts_of_an_encoder() {
    let bert = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tests/fixtures/encoders/bert");
    let bench = ["bench", "prefill", "--prompt", "7", "--batch", "3", "--repeat", "1", "-q", "--model", bert];
    let text = run(dsrun(&bench)).out;
    assert!(text.contains("tokens       vector"), "{text}");
    let figures = json(&run(dsrun(&bench).arg("--json")).out);
    assert_eq!((&figures["encoder"], &figures["prompts"][0]["tokens"]), (&true.into(), &7.into()));
    assert!(figures["prompts"][0]["operations_per_second"].as_f64().unwrap() > 0.0, "{figures}");
}

#[test]
fn bench_kernels_reports_every_distinct_call() {
    let bench = |more: &[&str]| {
        let fixed = ["bench", "kernels", "--batch", "2", "--past", "20", "--repeat", "1", "-q"];
        run(dsrun(&[&fixed[..], more].concat()).arg("--model").arg(tiny()))
    };
    let ran = bench(&["--json", "--no-fuse"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let figures = json(&ran.out);
    let kernels = figures["kernels"].as_array().unwrap();
    let names: Vec<&str> = kernels.iter().map(|kernel| kernel["op"].as_str().unwrap()).collect();
    for name in [
        "prepare_step",
        "embed",
        "quant_per_group",
        "linear_a8",
        "rope",
        "kv_write",
        "paged_attention",
        "sample",
    ] {
        assert!(names.contains(&name), "{name} is missing among {names:?}");
    }
    let calls: u64 = kernels.iter().map(|kernel| kernel["count"].as_u64().unwrap()).sum();
    assert_eq!(figures["calls_per_step"], calls);
    for kernel in kernels {
        for field in ["seconds", "bytes", "floor_seconds", "share_of_floor"] {
            assert!(kernel[field].as_f64().is_some_and(|value| value > 0.0), "{field}: {kernel}");
        }
    }
    let table = bench(&[]);
    assert!(table.out.contains("share") && table.out.contains("a step: "), "{}", table.out);
    assert!(bench(&["--context", "20"]).err.contains("--past is 20"));
}

#[test]
fn errors_name_the_wrong_argument() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken.gguf");
    let bytes = fs::read(tiny()).unwrap();
    fs::write(&broken, &bytes[..bytes.len() / 2]).unwrap();
    let binary = folder.path().join("prompt.bin");
    fs::write(&binary, b"ab\xff").unwrap();
    let (broken, binary) = (broken.to_str().unwrap(), binary.to_str().unwrap());
    let tiny = tiny();
    let tiny = tiny.to_str().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["generate", "--model", broken, "x"], "broken.gguf"),
        (&["generate", "--model", "/no/such/model.gguf", "x"], "/no/such/model.gguf"),
        (&["generate", "--model", "owner/nothing", "x"], "offline"),
        (&["generate", "--model", tiny, "--file", binary], "not UTF-8"),
        (&["generate", "--model", tiny, "--file", "/no/such/prompt"], "/no/such/prompt"),
        (&["generate", "--model", tiny, "--temperature", "-1", "x"], "temperature"),
        (&["generate", "--model", tiny, "--weights", "random", "x"], "is a GGUF file; random weights take"),
        (&["generate", "--model", tiny, "--context", "1000000", "x"], "context"),
        (
            &["generate", "--model", tiny, "--raw", "--context", "4", "the sky is blue today"],
            "the context holds 4",
        ),
        (&["generate", "--model", tiny, "--device", "7", "x"], "device 7"),
        (&["generate", "--model", tiny, "--backend", "./nowhere.so", "x"], "nowhere.so"),
        (&["generate", "--model", tiny, "--backend", binary, "x"], "prompt.bin"),
        (&["generate", "--model", tiny, "--stop", "", "x"], "stop string is empty"),
        (&["generate", "--model", tiny, "--host-memory", "1GB", "x"], "needs --weights-in disk:FOLDER"),
        (&["logits", "--model", tiny, "--tokens", "5,4096"], "4096"),
        (&["models", "remove", "../escape"], "../escape"),
        // A folder that is there is never said not to be.
        (&["inspect", "--model", "unfinished"], "no model at unfinished: model.safetensors.index.json names"),
        (&["serve", "unfinished"], "which is missing"),
        // An address for documentation, which no machine has.
        (&["serve", "--host", "203.0.113.1", "--port", "0"], "hint: --host is an address of this machine"),
        (&["inspect", "malformed"], "malformed/config.json: it is not valid JSON"),
    ];
    for folder in ["unfinished", "malformed"].map(|name| folder.path().join(name)) {
        fs::create_dir(&folder).unwrap();
        let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors"}}"#;
        fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
        fs::write(folder.join("config.json"), "{").unwrap();
        if folder.ends_with("malformed") {
            fs::write(folder.join("model-00001-of-00002.safetensors"), "x").unwrap();
        }
    }
    for (arguments, part) in cases {
        let ran = run(dsrun(arguments).current_dir(folder.path()));
        assert_eq!(ran.code, Some(1), "{arguments:?}: {}", ran.err);
        assert_eq!(
            ran.err.matches("it is not valid JSON").count(),
            usize::from(part.contains("JSON")),
            "{}",
            ran.err
        );
        assert!(ran.err.contains("error:") && ran.err.contains(part), "{arguments:?}: {}", ran.err);
        assert!(!ran.err.contains("panicked"), "{arguments:?}: {}", ran.err);
    }
}
