//! Tests of models that are split over several processes, started as a launcher does.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "support/command.rs"]
mod command;

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

/// A port that nothing listens at now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Processes {
    /// Starts a command `count` times with the variables of torchrun. `flags` are those of each process.
    fn start<'a>(count: usize, arguments: &[&str], flags: impl Fn(usize) -> &'a [&'a str]) -> Self {
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
                .args(["--dtype", "f32", "--shard"])
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
