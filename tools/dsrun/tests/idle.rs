//! An idle server takes no processor time: threads of the backend, the engine and the server sleep until there is work.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../src/serve/tests/model.rs"]
mod model;
#[path = "support/server.rs"]
mod server;

use server::Server;
use std::{fs, thread, time::Duration};

/// The processor time of a process, in hundredths of a second.
fn processor_time(process: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // The name in parentheses may contain spaces. After it, fields 12 and 13 are the time in the program and in the system.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum()
}

#[test]
fn no_thread_spins_after_requests() {
    let server = Server::start(&["--threads", "4"]);
    assert!(server.stream(64)().contains("[DONE]"));
    thread::sleep(Duration::from_secs(1));
    let before = processor_time(server.process.id());
    thread::sleep(Duration::from_secs(3));
    let taken = processor_time(server.process.id()) - before;
    // One thread that spins takes 300, or half of that where as many other threads want its processor.
    assert!(taken <= 20, "an idle server took {taken} hundredths of a second in 3 s");
}
