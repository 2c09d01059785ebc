//! The worker: opens the backend, and runs the requests on its standard input.
//!
//! A thread of its own reads standard input. When that is closed the process exits, whatever the backend is doing: a parent
//! that exits for any reason leaves no worker behind.

use super::{
    arguments::Worker,
    backend::{self, identity},
    message::{Event, MARK, Request},
    record::Record,
};
use crate::{
    checks::remember_process,
    subject::Subject,
    suite::{Item, groups},
};
use anyhow::{Context, Result};
use dsrun_core::device::{Backend, BufferSlice, MemoryKind};
use std::{
    io::{self, BufRead, Write},
    process,
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    thread,
    time::{Duration, Instant},
};

/// How long the backend's exit handlers may take before the process aborts.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs requests until standard input is closed.
pub(crate) fn run(arguments: &Worker, linked: &[Arc<dyn Backend>]) -> Result<()> {
    let requests = receive();
    remember_process();
    let subject = match backend::open(&arguments.target, linked) {
        Ok(subject) => subject,
        Err(error) => return send(&Event::Unusable(format!("{error:#}"))),
    };
    send(&Event::Ready(identity(&subject)))?;
    let claimed = &subject.device().properties().profiles;
    let profiles = backend::profiles(&arguments.target.profile, claimed);
    for request in requests {
        let items = match &request? {
            Request::Group { name, seed, drawn, skip } => {
                let group = groups().find(|group| group.name() == *name);
                let mut items =
                    group.with_context(|| format!("there is no group {name}"))?.items(*seed, *drawn);
                items.retain(|item| !skip.contains(&item.id));
                items
            }
            Request::Case { id } => match Item::find(id) {
                Some(item) => vec![item],
                None => {
                    send(&Event::Unknown)?;
                    continue;
                }
            },
        };
        for item in items {
            let (id, choices) = (item.id.clone(), item.choices.clone());
            send(&Event::Begin { id, choices, elements: item.elements() })?;
            let required = item.is_required(&subject, &profiles);
            let started = Instant::now();
            let report = item.run(&subject);
            let record = Record::of(&item, &report, required, started.elapsed().as_secs_f64());
            let failed = record.is_failure();
            send(&Event::End(Box::new(record)))?;
            if failed && !device_works(&subject) {
                return send(&Event::Lost);
            }
        }
        send(&Event::Done)?;
    }
    Ok(())
}

/// Reads requests until standard input is closed, then exits the process.
fn receive() -> Receiver<Result<Request>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let request = line.map_err(anyhow::Error::from).and_then(|line| Ok(serde_json::from_str(&line)?));
            if sender.send(request).is_err() {
                break;
            }
        }
        exit();
    });
    receiver
}

/// Exits the process, even if an exit handler of the backend hangs.
#[expect(clippy::exit, reason = "the parent is gone, and the backend may hang")]
fn exit() -> ! {
    thread::spawn(|| {
        thread::sleep(EXIT_TIMEOUT);
        process::abort();
    });
    process::exit(0)
}

/// Whether the device still works.
fn device_works(subject: &Subject) -> bool {
    let try_it = || -> dsrun_core::Result<()> {
        let buffer = subject.device().allocate(64, MemoryKind::Device)?;
        let mut stream = subject.device().stream()?;
        stream.upload(&[1; 64], &BufferSlice::whole(buffer))?;
        stream.synchronize("a test whether the device still works", Duration::from_secs(10))
    };
    try_it().is_ok()
}

/// Sends an event with a single write, so that output of the backend cannot end up inside the line.
fn send(event: &Event) -> Result<()> {
    let line = format!("\n{MARK}{}\n", serde_json::to_string(event)?);
    let mut output = io::stdout().lock();
    output.write_all(line.as_bytes())?;
    Ok(output.flush()?)
}
