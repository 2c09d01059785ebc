//! Clients that send much and read nothing do not make the memory of a server grow.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../src/serve/tests/model.rs"]
mod model;
#[path = "support/server.rs"]
mod server;

use server::{KEY, PATIENCE, Server};
use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;

/// The most bytes that the peak may be above the memory of an idle server.
const GROWTH: u64 = 512 * MIB;

/// The most bytes that the memory may be above that of an idle server, once everything is over.
const REST: u64 = 128 * MIB;

/// The time in which memory is given back.
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(60);

#[test]
fn clients_that_leave_during_large_requests_do_not_fill_the_memory() {
    let server = Server::start(&[]);
    attacked(&server, |server| {
        // Below the limit of 4 MiB for a request.
        let body = format!(
            r#"{{"model": "tiny", "messages": [{{"role": "user", "content": "{}"}}]}}"#,
            "word ".repeat(800_000)
        );
        let request = post("/v1/chat/completions", &body);
        let sent = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..60 {
                scope.spawn(|| {
                    let mut connection = connect(server);
                    connection.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
                    // The server may refuse the request before it has read all of it.
                    if connection.write_all(request.as_bytes()).is_ok() {
                        sent.fetch_add(1, Ordering::Relaxed);
                    }
                    thread::sleep(Duration::from_secs(1));
                });
            }
        });
        assert!(sent.into_inner() > 0, "no request was sent");
    });
}

#[test]
fn large_stop_texts_for_many_answers_do_not_fill_the_memory() {
    let server = Server::start(&[]);
    attacked(&server, |server| {
        let body = format!(
            r#"{{"model": "tiny", "prompt": "ab", "n": 128, "max_tokens": 8, "stop": "{}"}}"#,
            "x".repeat(1_000_000)
        );
        let request = post("/v1/completions", &body);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let mut connection = connect(server);
                    let _ = connection.write_all(request.as_bytes());
                    let mut answer = Vec::new();
                    let _ = connection.read_to_end(&mut answer);
                    let answer = String::from_utf8_lossy(&answer);
                    assert!(answer.starts_with("HTTP/1.1 4"), "{answer}");
                });
            }
        });
    });
}

/// Checks that a server survives an attack, and the memory it has at the peak and afterwards.
fn attacked(server: &Server, attack: impl FnOnce(&Server)) {
    answers(server);
    let idle = memory(server, "VmRSS");
    attack(server);
    answers(server);
    let peak = memory(server, "VmHWM");
    let mib = |bytes: u64| bytes / MIB;
    assert!(peak <= idle + GROWTH, "it grew from {} to {} MiB", mib(idle), mib(peak));
    let end = Instant::now() + GIVEN_BACK_WITHIN;
    loop {
        let now = memory(server, "VmRSS");
        if now <= idle + REST {
            break;
        }
        assert!(Instant::now() < end, "it has {} MiB for {} MiB before", mib(now), mib(idle));
        thread::sleep(Duration::from_millis(100));
    }
    answers(server);
}

/// Waits until the server answers a request; its queue may be full for a while.
fn answers(server: &Server) {
    let end = Instant::now() + PATIENCE;
    loop {
        let answer = server.stream(3)();
        if answer.contains("data: [DONE]") {
            return;
        }
        assert!(answer.starts_with("HTTP/1.1 429") && Instant::now() < end, "{answer}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Bytes of memory of a server, by the name of a line of its status.
fn memory(server: &Server, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.process.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).unwrap();
    kib.parse::<u64>().unwrap() * 1024
}

fn connect(server: &Server) -> TcpStream {
    let connection = TcpStream::connect(server.url.strip_prefix("http://").unwrap()).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    connection
}

fn post(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {KEY}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}
