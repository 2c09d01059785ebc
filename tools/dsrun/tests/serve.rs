//! Tests of `dsrun serve` as a process: a browser, load, and signals.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../src/serve/tests/model.rs"]
mod model;
#[path = "support/server.rs"]
mod server;

use dsrun_test_support::{TestResult, browser, test_main};
use server::{KEY, PATIENCE, Server, script, succeeded};
use snapbox::cmd::cargo_bin;
use std::{
    io::{Read, Write},
    net::TcpStream,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

test_main![
    the_page_works_in_a_browser,
    a_ready_server_has_compiled_all_steps_unless_warm_up_is_off,
    a_collector_that_is_not_there_is_logged_once,
    requests_are_logged_in_the_chosen_form,
    fields_without_effect_are_named_in_the_log,
    #[cfg(unix)]
    a_soak_with_disconnects_gets_correct_answers,
    #[cfg(unix)]
    a_soak_with_a_draft_model_gets_correct_answers,
    #[cfg(unix)]
    sigterm_under_load_lets_every_stream_finish,
    #[cfg(unix)]
    requests_longer_than_the_drain_timeout_are_aborted,
    #[cfg(unix)]
    a_second_signal_ends_the_server_at_once,
];

fn the_page_works_in_a_browser() -> TestResult {
    let browser = browser()?;
    let server = Server::start(&[]);
    let mut command = Command::new("python3");
    command.arg(script("browser.py")).arg(&browser).args([&server.url, KEY]);
    succeeded(&command.output().unwrap());
    Ok(())
}

fn a_ready_server_has_compiled_all_steps_unless_warm_up_is_off() {
    let compiled = |server: &Server| metric(server, "dsrun_compiled_steps_total");
    let warm = Server::start(&["--max-requests", "4"]);
    let before = compiled(&warm);
    assert!(before > 0.0);
    let answers: Vec<_> = (1..7).map(|count| thread::spawn(warm.stream(20 * count))).collect();
    for answer in answers {
        assert!(answer.join().unwrap().contains("data: [DONE]"));
    }
    assert_eq!(compiled(&warm), before);
    let cold = Server::start(&["--no-warm-up", "--tune-step=false"]);
    assert_eq!(compiled(&cold), 0.0);
    assert!(cold.stream(3)().contains("data: [DONE]"));
    assert!(compiled(&cold) > 0.0);
}

fn a_collector_that_is_not_there_is_logged_once() {
    // A port that was free a moment ago.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = Command::new(cargo_bin!("dsrun"));
    command.env("OTEL_BSP_SCHEDULE_DELAY", "10").stderr(Stdio::piped());
    let mut server = Server::start_as(
        &["--otlp-endpoint", &format!("http://{address}"), "--max-requests", "4"],
        &mut command,
    );
    for _ in 0..20 {
        assert!(server.stream(3)().contains("data: [DONE]"));
        thread::sleep(Duration::from_millis(20));
    }
    let mut errors = server.process.stderr.take().unwrap();
    let _ = server.process.kill();
    let mut log = String::new();
    errors.read_to_string(&mut log).unwrap();
    assert_eq!(log.matches("traces cannot be sent").count(), 1, "{log}");
    assert!(log.contains(&address.to_string()) && log.contains("refused"), "{log}");
}

fn requests_are_logged_in_the_chosen_form() {
    for form in ["json", "text", "off"] {
        let mut command = Command::new(cargo_bin!("dsrun"));
        let mut server = Server::start_as(&["--access-log", form], command.stderr(Stdio::piped()));
        assert!(server.stream(3)().contains("data: [DONE]"));
        let mut errors = server.process.stderr.take().unwrap();
        let _ = server.process.kill();
        let mut log = String::new();
        errors.read_to_string(&mut log).unwrap();
        let mut lines = log.lines().filter(|line| line.contains("/v1/completions"));
        let line = lines.next();
        assert_eq!((line.is_some(), lines.next()), (form != "off", None), "{form}: {log}");
        if form == "json" {
            let entry: serde_json::Value = serde_json::from_str(line.unwrap()).unwrap();
            assert_eq!((&entry["method"], &entry["status"]), (&"POST".into(), &200.into()), "{entry}");
            assert!(entry["id"].as_str().unwrap().starts_with("req_"), "{entry}");
        } else if let Some(line) = line {
            assert!(line.contains("POST") && line.contains(" 200 ") && line.contains("req_"), "{line}");
        }
    }
}

fn fields_without_effect_are_named_in_the_log() {
    let chat = r#""messages": [{"role": "user", "content": "a"}], "max_tokens": 1"#;
    let input = r#""input": "a", "max_output_tokens": 1"#;
    let common = ["metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"];
    for (path, request, names) in [
        ("/v1/chat/completions", chat, &common[..]),
        ("/v1/completions", r#""prompt": "a", "max_tokens": 1"#, &common),
        ("/v1/responses", input, &["prompt_cache_key", "safety_identifier", "service_tier", "user"]),
        ("/v1/messages", chat, &["metadata", "service_tier"]),
    ] {
        let mut command = Command::new(cargo_bin!("dsrun"));
        command.env("DSRUN_LOG", "info").stderr(Stdio::piped());
        let flags = ["--access-log", "off", "--no-warm-up", "--tune-step=false"];
        let mut server = Server::start_as(&flags, &mut command);
        let field = |name: &&str| match *name {
            "metadata" => format!(r#""{name}": {{}}"#),
            "store" => format!(r#""{name}": true"#),
            _ => format!(r#""{name}": "auto""#),
        };
        let fields: Vec<String> = names.iter().map(field).collect();
        for body in [request.to_owned(), format!("{request}, {}", fields.join(", "))] {
            let answer = post(&server, path, &format!(r#"{{"model": "tiny", {body}}}"#));
            assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        }
        let mut errors = server.process.stderr.take().unwrap();
        let _ = server.process.kill();
        let mut log = String::new();
        errors.read_to_string(&mut log).unwrap();
        let lines: Vec<&str> = log.lines().filter(|line| line.contains("without effect")).collect();
        assert_eq!(lines.len(), 1, "{path}: {log}");
        for name in names {
            assert_eq!(log.matches(&format!("\"{name}\"")).count(), 1, "{path}, {name}: {log}");
        }
    }
}

#[cfg(unix)]
fn a_soak_with_disconnects_gets_correct_answers() {
    let mut server = Server::start(&[&CROWDED[..], &["--batch-invariant"]].concat());
    soak(&server, &["--bits"]);
    server.signal("TERM");
    assert_eq!(server.ended(), Some(0));
}

#[cfg(unix)]
fn a_soak_with_a_draft_model_gets_correct_answers() {
    let draft = model::tiny();
    let config = draft.path().join("serve.toml");
    std::fs::write(&config, format!("speculate = \"draft:3\"\ndraft = {:?}\n", draft.path())).unwrap();
    let mut server = Server::start(&[&CROWDED[..], &["--config", config.to_str().unwrap()]].concat());
    soak(&server, &["--token-ids", "--vocabulary", "90"]);
    // The draft model is the model itself, so it is right except for tokens beyond the end of an answer.
    let [proposed, accepted] =
        ["dsrun_proposed_tokens_total", "dsrun_accepted_tokens_total"].map(|name| metric(&server, name));
    assert!(proposed > 100.0 && accepted > 0.5 * proposed, "{accepted} of {proposed}");
    server.signal("TERM");
    assert_eq!(server.ended(), Some(0));
}

/// Pages for about two of eight answers, so that requests are pre-empted all the time.
const CROWDED: [&str; 7] =
    ["--max-requests", "8", "--kv-tokens", "320", "--context", "192", "--no-prefix-cache"];

/// Runs a soak with many clients, some of which disconnect.
fn soak(server: &Server, arguments: &[&str]) {
    let output = Command::new(cargo_bin!("dsrun"))
        .args(["--quiet", "bench", "soak", &server.url, "--api-key", KEY, "--json"])
        .args(["--clients", "24", "--seconds", "5", "--leave", "0.3"])
        .args(["--questions", "8", "--prompt", "uniform:2-10", "--gen", "uniform:16-64"])
        .args(arguments)
        .output()
        .unwrap();
    succeeded(&output);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |name: &str| report[name].as_f64().unwrap();
    assert_eq!((number("wrong"), number("failed"), number("blocks_in_use")), (0.0, 0.0, 0.0), "{report}");
    assert!(number("equal") > 0.0 && number("left") > 0.0, "{report}");
    assert!(number("preemptions") > 0.0 && number("cancelled") > 0.0, "{report}");
}

#[cfg(unix)]
fn sigterm_under_load_lets_every_stream_finish() {
    let mut server = Server::start(&["--max-requests", "4"]);
    // More requests than the server runs at once: some still wait when the signal comes.
    let streams: Vec<_> = (0..8).map(|_| thread::spawn(server.stream(600))).collect();
    // A request that arrives behind the signal is refused, so all of them have to be there.
    wait_for_metric(&server, "dsrun_submitted_total", 8.0);
    wait_for_tokens(&server);
    server.signal("TERM");
    for stream in streams {
        let answer = stream.join().unwrap();
        assert!(answer.contains("\"completion_tokens\":600"), "{answer}");
        assert!(answer.contains("data: [DONE]"), "{answer}");
    }
    assert_eq!(server.ended(), Some(0));
    let mut rest = String::new();
    server.output.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "", "only the URL goes to standard output");
}

#[cfg(unix)]
fn requests_longer_than_the_drain_timeout_are_aborted() {
    let mut server = Server::start(&["--drain-timeout", "0"]);
    let stream = thread::spawn(server.stream(4000));
    wait_for_tokens(&server);
    server.signal("TERM");
    assert_eq!(server.ended(), Some(1));
    assert!(!stream.join().unwrap().contains("[DONE]"));
}

#[cfg(unix)]
fn a_second_signal_ends_the_server_at_once() {
    let mut server = Server::start(&["--drain-timeout", "3600", "--request-timeout", "3600"]);
    let streams: Vec<_> = (0..32).map(|_| thread::spawn(server.stream(4000))).collect();
    wait_for_tokens(&server);
    server.signal("INT");
    while metrics(&server, "/health/ready").starts_with("HTTP/1.1 200") {
        thread::sleep(Duration::from_millis(1));
    }
    server.signal("INT");
    assert_eq!(server.ended(), Some(130));
    drop(streams);
}

/// Waits until the server has generated something.
fn wait_for_tokens(server: &Server) {
    let end = Instant::now() + PATIENCE;
    while metrics(server, "/metrics").contains("\ndsrun_generated_tokens_total 0\n") {
        assert!(Instant::now() < end, "no token comes");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until a metric has at least the value `least`.
fn wait_for_metric(server: &Server, name: &str, least: f64) {
    let end = Instant::now() + PATIENCE;
    while metric(server, name) < least {
        assert!(Instant::now() < end, "{name} does not reach {least}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn metrics(server: &Server, path: &str) -> String {
    sent(server, &format!("GET {path}"), "")
}

fn post(server: &Server, path: &str, body: &str) -> String {
    sent(server, &format!("POST {path}"), body)
}

/// The answer to a request with its head.
fn sent(server: &Server, what: &str, body: &str) -> String {
    let mut connection = TcpStream::connect(server.url.strip_prefix("http://").unwrap()).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        connection,
        "{what} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {KEY}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut text = String::new();
    connection.read_to_string(&mut text).unwrap();
    text
}

/// The value of a metric.
fn metric(server: &Server, name: &str) -> f64 {
    let metrics = metrics(server, "/metrics");
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} is missing in\n{metrics}")).parse().unwrap()
}
