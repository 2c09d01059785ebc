//! Tests of models that are split over several processes, started as a launcher does.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/command.rs"]
mod command;

use dsrun_test_support::free_port;
use rstest::rstest;
use snapbox::cmd::cargo_bin;
use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The time limit of any wait. Reaching it means that a process hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// The time in which a process that stops has to be named.
const NAMED_WITHIN: Duration = Duration::from_secs(30);

/// The processes of a command, each with its own files for its output.
struct Processes {
    children: Vec<Child>,
    folder: tempfile::TempDir,
}

/// How a process ended.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Processes {
    /// Starts a command `count` times with the variables of torchrun. `flags` are those of each process.
    fn start<'a>(count: usize, arguments: &[&str], flags: impl Fn(usize) -> &'a [&'a str]) -> Self {
        Self::start_as("f32", count, arguments, flags)
    }

    /// Same as [`Self::start`], in this element type.
    fn start_as<'a>(
        dtype: &str,
        count: usize,
        arguments: &[&str],
        flags: impl Fn(usize) -> &'a [&'a str],
    ) -> Self {
        let port = free_port();
        let folder = tempfile::tempdir().unwrap();
        // Exchanges cost nothing, so that a model as small as the fixture is split.
        let costs = "[costs]\nmemory-bandwidth = 1e10\nlink-bandwidth = 1e15\nlatency-us = 0.0\ngather-latency-us = 0.0\n";
        let shard = folder.path().join("shard.toml");
        fs::write(&shard, costs).unwrap();
        let start = |process: usize| {
            let file = |name: &str| fs::File::create(folder.path().join(format!("{name}{process}"))).unwrap();
            Command::new(cargo_bin!("dsrun"))
                .args(arguments)
                .args(["--dtype", dtype, "--shard"])
                .arg(&shard)
                .args(flags(process))
                .env("HF_HUB_OFFLINE", "1")
                .env("NO_COLOR", "1")
                .envs([("RANK", process.to_string()), ("WORLD_SIZE", count.to_string())])
                .envs([("LOCAL_RANK", process.to_string()), ("LOCAL_WORLD_SIZE", count.to_string())])
                .envs([("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", port.to_string())])
                .stdin(Stdio::null())
                .stdout(file("out"))
                .stderr(file("err"))
                .spawn()
                .unwrap()
        };
        Self { children: (0..count).map(start).collect(), folder }
    }

    fn read(&self, name: &str, process: usize) -> String {
        fs::read_to_string(self.folder.path().join(format!("{name}{process}"))).unwrap()
    }

    /// Waits for a process to end.
    fn ended(&mut self, process: usize) -> Ended {
        let end = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.children[process].try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "process {process} hangs: {}", self.read("err", process));
            thread::sleep(Duration::from_millis(5));
        };
        Ended { code: status.code(), out: self.read("out", process), err: self.read("err", process) }
    }

    fn all_ended(&mut self) -> Vec<Ended> {
        (0..self.children.len()).map(|process| self.ended(process)).collect()
    }

    #[cfg(unix)]
    fn signal(&self, process: usize, name: &str) {
        let id = self.children[process].id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &id]).status().unwrap().success());
    }

    /// Waits until process 0 has written a text.
    fn wait_for(&self, output: &str, text: &str) {
        let end = Instant::now() + PATIENCE;
        while !self.read(output, 0).contains(text) {
            assert!(Instant::now() < end, "{text:?} does not come: {}", self.read("err", 0));
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.children {
            // It may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn tiny() -> String {
    command::tiny().to_str().unwrap().to_owned()
}

fn generate(model: &str) -> [&str; 9] {
    ["generate", "--model", model, "--raw", "--temperature", "0", "-n", "24", "the sky"]
}

#[rstest]
#[case(2, &[])]
#[case(3, &[])]
#[case(2, &["--tp", "4"])]
#[case(2, &["--pp", "2"])]
#[case(3, &["--pp", "3"])]
#[case(2, &["--mesh", "tp=2,pp=2"])]
#[case(4, &["--mesh", "tp=2,pp=2"])]
fn processes_generate_the_text_of_one(#[case] count: usize, #[case] flags: &[&str]) {
    let model = tiny();
    let one = command::run(command::dsrun(&generate(&model)).args(["--dtype", "f32"]));
    assert_eq!(one.code, Some(0), "{}", one.err);
    let ended = Processes::start(count, &generate(&model), |_| flags).all_ended();
    assert!(ended.iter().all(|process| process.code == Some(0)), "{ended:#?}");
    assert_eq!(ended[0].out, one.out);
    assert!(ended[1..].iter().all(|process| process.out.is_empty()), "only process 0 has results");
    let four_in_two = count == 2 && flags.last().is_some_and(|flag| ["4", "tp=2,pp=2"].contains(flag));
    let last = if four_in_two { "ranks 2 to 3".into() } else { format!("rank {}", count - 1) };
    assert!(ended[count - 1].err.contains(&last), "the plan names the ranks: {}", ended[count - 1].err);
}

/// The logits of every token after each of a few tokens, by token.
fn logits(output: &str) -> Vec<Vec<f64>> {
    let positions = command::json(output)["positions"].as_array().unwrap().clone();
    let row = |position: &serde_json::Value| {
        let mut row: Vec<(u64, f64)> = serde_json::from_value(position["top"].clone()).unwrap();
        row.sort_by_key(|(token, _)| *token);
        row.into_iter().map(|(_, logit)| logit).collect()
    };
    positions.iter().map(row).collect()
}

/// A model in every format of weights, and weights that are quantised when they are loaded.
#[rstest]
#[case("gguf/smollm2_q4_0", &[])]
#[case("gguf/smollm2_q4_1", &[])]
#[case("gguf/smollm2_q8_0", &[])]
#[case("quantised/awq", &[])]
#[case("quantised/compressed_w4a16_zero", &[])]
#[case("quantised/compressed_w8a16", &[])]
#[case("quantised/compressed_w8a8", &[])]
#[case("quantised/gptq_4", &[])]
#[case("quantised/gptq_8_symmetric", &[])]
#[case("quantised/gptq_act_order", &[])]
#[case("quantised/fp8_block", &[])]
#[case("quantised/k_quants", &[])]
#[case("mixtral", &["--quantize", "w4a16"])]
#[case("llama3", &["--quantize", "w8a16"])]
#[case("deepseek_v3", &[])]
#[case("gpt_oss", &[])]
fn processes_have_the_logits_of_one_in_every_format(#[case] name: &str, #[case] quantize: &[&str]) {
    let folder = command::tiny().ancestors().nth(3).unwrap().join(name);
    let gguf = folder.join("model.gguf");
    let model = if gguf.exists() { gguf } else { folder };
    let command = ["logits", "--tokens", "1,5,9,13,17,21,25", "--top", "96", "--json", "--model"];
    let arguments: Vec<&str> =
        command.into_iter().chain(model.to_str()).chain(quantize.iter().copied()).collect();
    let one = command::run(command::dsrun(&arguments));
    assert_eq!(one.code, Some(0), "{}", one.err);
    let expected = logits(&one.out);
    assert!(expected.iter().all(|row| row.len() == 96) && expected.len() == 7, "{}", one.out);
    for mesh in [&["--tp", "2"][..], &["--mesh", "tp=2,pp=2"]] {
        let ended = Processes::start_as("keep", 2, &arguments, |_| mesh).all_ended();
        assert!(ended.iter().all(|process| process.code == Some(0)), "{mesh:?}: {ended:#?}");
        let found = logits(&ended[0].out);
        let pairs = found.iter().flatten().zip(expected.iter().flatten());
        let error = pairs.map(|(found, expected)| (found - expected).abs()).fold(0.0, f64::max);
        assert!(error <= 1e-4, "{mesh:?}: off by {error}");
    }
}

/// A measurement that takes longer than any test.
fn endless(model: &str) -> [&str; 10] {
    ["bench", "latency", "--model", model, "--prompt", "8", "--gen", "100", "--repeat", "1000000"]
}

#[cfg(unix)]
#[rstest]
#[case("KILL", 1, &[])]
#[case("KILL", 0, &[])]
#[case("STOP", 2, &[])]
#[case("KILL", 1, &["--pp", "3"])]
#[case("KILL", 2, &["--pp", "3"])]
#[case("KILL", 0, &["--pp", "3"])]
#[case("STOP", 1, &["--pp", "3"])]
#[case("KILL", 3, &["--mesh", "tp=2,pp=2"])]
#[case("KILL", 1, &["--mesh", "tp=2,pp=2"])]
fn a_process_that_dies_or_stops_is_named(
    #[case] signal: &str,
    #[case] process: usize,
    #[case] flags: &[&str],
) {
    let model = tiny();
    let count = if flags.contains(&"--mesh") { 4 } else { 3 };
    let mut processes = Processes::start(count, &endless(&model), |_| flags);
    processes.wait_for("err", "run 3 of");
    processes.signal(process, signal);
    let start = Instant::now();
    for other in (0..count).filter(|other| *other != process) {
        let ended = processes.ended(other);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        // The devices know a rank, and processes the one that has it; here their numbers are equal.
        let named = ["process", "rank"].into_iter().any(|noun| {
            ["has ended", "has sent nothing"]
                .into_iter()
                .any(|what| ended.err.contains(&format!("{noun} {process} {what}")))
        });
        assert!(named && ended.err.contains("error:"), "{ended:?}");
    }
    assert!(start.elapsed() < NAMED_WITHIN, "it took {:?}", start.elapsed());
    if signal == "STOP" {
        // It goes on, and finds that the others have ended.
        processes.signal(process, "CONT");
        assert_eq!(processes.ended(process).code, Some(1));
    }
}

/// A server over two processes that is ready.
#[cfg(unix)]
fn server() -> Processes {
    let model = tiny();
    let processes = Processes::start(2, &["serve", &model, "--port", "0", "--no-warm-up"], |_| &[]);
    processes.wait_for("out", "ready at");
    processes
}

#[cfg(unix)]
#[test]
fn a_server_over_processes_answers_and_ends() {
    let mut processes = server();
    let url = processes.read("out", 0);
    let address = url.trim().strip_prefix("ready at http://").unwrap().to_owned();
    let body = r#"{"model": "model", "prompt": "the sky", "max_tokens": 8, "temperature": 0}"#;
    let mut connection = TcpStream::connect(&address).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        connection,
        "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("\"completion_tokens\":8"), "{answer}");
    // As launchers do, to all at once.
    processes.signal(1, "TERM");
    processes.signal(0, "TERM");
    assert!(
        processes.all_ended().iter().all(|process| process.code == Some(0)),
        "{:#?}",
        processes.all_ended()
    );
}

#[cfg(unix)]
#[test]
fn a_server_that_is_idle_ends_when_a_process_does() {
    let mut processes = server();
    processes.signal(1, "KILL");
    let ended = processes.ended(0);
    assert!(ended.code == Some(1) && ended.err.contains("process 1 has ended"), "{ended:?}");
}

#[test]
fn processes_that_differ_are_told_what_differs() {
    let model = tiny();
    let flags = |process| if process == 1 { &["--context", "64"][..] } else { &["--context", "32"] };
    for ended in Processes::start(2, &generate(&model), flags).all_ended() {
        assert_eq!(ended.code, Some(1));
        assert!(ended.err.contains("option context is 32 on process 0, but 64 on process 1"), "{ended:?}");
    }
    // The same architecture with other weights.
    let other = model.replace("smollm2_q4_1", "smollm2_q4_0");
    let flags = [["--model", &model], ["--model", &other]];
    let arguments = ["generate", "--raw", "-n", "8", "the sky"];
    for ended in Processes::start(2, &arguments, |process| &flags[process]).all_ended() {
        assert_eq!(ended.code, Some(1));
        assert!(ended.err.contains("the model is") && ended.err.contains("on process 1"), "{ended:?}");
    }
}

/// What one process finds wrong on its machine ends the others at once, with the reason.
#[rstest]
#[case(&[], &["--backend", "nonesuch"], "nonesuch")]
#[case(&[], &["--device", "7"], "device 7")]
#[case(&["--tp", "2"], &["--tp", "4"], "the mesh is --tp 2 on process 0, but --tp 4 on process 1")]
#[case(&[], &["--backend", "candle"], "backend")]
#[case(&["--model", "MODEL"], &["--model", "/nowhere/model.gguf"], "/nowhere/model.gguf")]
fn what_one_process_lacks_ends_all(#[case] first: &[&str], #[case] second: &[&str], #[case] part: &str) {
    let model = tiny();
    let flags = [first, second].map(|flags| {
        let named = flags.contains(&"--model");
        let flags = flags.iter().map(|flag| if *flag == "MODEL" { &model } else { *flag });
        flags.chain(["--model", &model].into_iter().filter(|_| !named)).collect::<Vec<&str>>()
    });
    let start = Instant::now();
    let arguments = ["generate", "--raw", "-n", "8", "the sky"];
    let all = Processes::start(2, &arguments, |process| &flags[process]).all_ended();
    for ended in &all {
        assert_eq!(ended.code, Some(1), "{all:#?}");
        assert!(ended.err.contains("error:") && ended.err.contains(part), "{all:#?}");
    }
    assert!(start.elapsed() < NAMED_WITHIN, "it took {:?}", start.elapsed());
}

/// One number of a weight differs.
#[test]
fn models_that_differ_in_one_byte_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny();
    let mut bytes = fs::read(&model).unwrap();
    let last = bytes.len() - 40;
    bytes[last] ^= 1;
    let other = folder.path().join("model.gguf");
    fs::write(&other, bytes).unwrap();
    let other = other.to_str().unwrap();
    let flags = [["--model", &model], ["--model", other]];
    let arguments = ["generate", "--raw", "-n", "8", "the sky"];
    for ended in Processes::start(2, &arguments, |process| &flags[process]).all_ended() {
        assert_eq!(ended.code, Some(1));
        assert!(ended.err.contains("the model is") && ended.err.contains("on process 1"), "{ended:?}");
    }
}

/// A process believes that there are more processes. Every process is told, whichever came first.
#[rstest]
#[case([("0", "2"), ("1", "3")])]
#[case([("1", "3"), ("0", "2")])]
fn processes_that_are_counted_differently_are_refused(#[case] processes: [(&str, &str); 2]) {
    let (model, port) = (tiny(), free_port().to_string());
    let start = |(process, count): (&str, &str)| {
        let mut command = Command::new(cargo_bin!("dsrun"));
        command.args(generate(&model)).env("HF_HUB_OFFLINE", "1").stdin(Stdio::null());
        command.envs([("RANK", process), ("WORLD_SIZE", count)]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for child in processes.map(start) {
        let ended = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{said}");
        assert!(said.contains("error:") && said.contains("joins a group of"), "{said}");
    }
}

#[test]
fn processes_that_cannot_start_say_why() {
    let model = tiny();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    for (variables, flags, part) in [
        (&[("RANK", "0"), ("WORLD_SIZE", "2")][..], &["--launcher", "torchrun"][..], "MASTER_ADDR"),
        (&[], &["--rendezvous", "here:1"], "this is the only one"),
        (&[("RANK", "5")], &["--launcher", "open-mpi"], "OMPI_COMM_WORLD_RANK"),
    ] {
        let ran = command::run(command::dsrun(&generate(&model)).args(flags).envs(variables.iter().copied()));
        assert_eq!(ran.code, Some(1), "{flags:?}: {}", ran.err);
        assert!(
            ran.err.contains("error:") && ran.err.contains(part) && ran.err.contains("hint:"),
            "{}",
            ran.err
        );
    }
    let port = taken.local_addr().unwrap().port().to_string();
    let several = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    for (flags, part) in [
        (&[][..], "because another program does"),
        (&["--tp", "3"], "--tp 3 cannot be divided among 2 processes"),
        (&["--pp", "3"], "--pp 3 cannot be divided among 2 processes"),
    ] {
        let ran = command::run(command::dsrun(&generate(&model)).args(flags).envs(several));
        assert_eq!(ran.code, Some(1), "{flags:?}: {}", ran.err);
        assert!(ran.err.contains("error:") && ran.err.contains(part), "{}", ran.err);
    }
}
