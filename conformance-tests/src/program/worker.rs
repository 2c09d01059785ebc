//! The child: opens the backend, and runs what its standard input asks for.
//!
//! Standard input is read by a thread of its own. When it ends, so does the process, whatever the backend is at: a parent
//! that is gone, for whatever reason, leaves nothing behind.

use super::{
    arguments::Worker,
    backend::{self, identity},
    message::{Event, MARK, Request},
    record::Record,
};
use crate::{
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

/// How long a process that should end may take to do so.
const FAREWELL: Duration = Duration::from_secs(2);

/// Runs until standard input ends.
pub(crate) fn run(arguments: &Worker, linked: &[Arc<dyn Backend>]) -> Result<()> {
    let requests = listen();
    let subject = match backend::open(&arguments.target, linked) {
        Ok(subject) => subject,
        Err(error) => return tell(&Event::Unusable(format!("{error:#}"))),
    };
    tell(&Event::Ready(identity(&subject)))?;
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
                    tell(&Event::Unknown)?;
                    continue;
                }
            },
        };
        for item in items {
            tell(&Event::Begin { id: item.id.clone(), choices: item.choices.clone() })?;
            let required = item.is_required(&subject, &profiles);
            let started = Instant::now();
            let report = item.run(&subject);
            let record = Record::of(&item, &report, required, started.elapsed().as_secs_f64());
            let failed = record.is_failure();
            tell(&Event::End(Box::new(record)))?;
            if failed && !is_well(&subject) {
                return tell(&Event::Lost);
            }
        }
        tell(&Event::Done)?;
    }
    Ok(())
}

/// Reads requests until there are no more, then ends the process.
fn listen() -> Receiver<Result<Request>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let request = line.map_err(anyhow::Error::from).and_then(|line| Ok(serde_json::from_str(&line)?));
            if sender.send(request).is_err() {
                break;
            }
        }
        leave();
    });
    receiver
}

/// Ends the process, even where the backend's own code for its end hangs.
#[expect(clippy::exit, reason = "nobody is left to work for, and the backend may hang")]
fn leave() -> ! {
    thread::spawn(|| {
        thread::sleep(FAREWELL);
        process::abort();
    });
    process::exit(0)
}

/// Whether the device still takes work.
fn is_well(subject: &Subject) -> bool {
    let try_it = || -> dsrun_core::Result<()> {
        let buffer = subject.device().allocate(64, MemoryKind::Device)?;
        let mut stream = subject.device().stream()?;
        stream.upload(&[1; 64], &BufferSlice::whole(buffer))?;
        stream.synchronize("whether the device still works", Duration::from_secs(10))
    };
    try_it().is_ok()
}

/// One write for one line, so that what the backend writes meanwhile does not tear it.
fn tell(event: &Event) -> Result<()> {
    let line = format!("\n{MARK}{}\n", serde_json::to_string(event)?);
    let mut output = io::stdout().lock();
    output.write_all(line.as_bytes())?;
    Ok(output.flush()?)
}
