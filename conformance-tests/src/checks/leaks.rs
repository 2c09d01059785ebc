//! What objects leave behind when they are dropped: objects of the host, and memory of the process.

use super::{
    accounts::in_worker,
    bench::{Bench, Given, Outcome, Stop, ensure, floats},
    claims, memory, raw, weights,
};
use crate::{cases::drawn_weight, random::Random, subject::Subject, tensor::Tensor};
use dsrun_core::{WeightFormat, op::Add};
use dsrun_plugin_sdk::LiveObjects;
use std::{
    fs,
    time::{Duration, Instant},
};

/// In a process with other threads, what they make and free would be counted too.
fn needs_worker() -> Outcome {
    ensure(in_worker(), String::new)
        .map_err(|_| Stop::Unsupported("this is counted only in a process of its own".into()))
}

/// A plugin frees the calls that the host keeps for it, and the errors that it does not return.
pub(super) fn host_objects(subject: &Subject) -> Outcome {
    needs_worker()?;
    if subject.raw_table().is_none() {
        return Err(Stop::Unsupported("the backend is no plugin, so the host makes nothing for it".into()));
    }
    let round = || -> Outcome {
        let mut bench = Bench::new(subject.device())?;
        memory::everything(&mut bench)?;
        // These make many calls that are refused. Whether they are is for other checks to say.
        for provoke in [raw::descriptions, raw::arguments_of_calls, raw::resources, weights::broken_readers] {
            drop(provoke(subject));
        }
        drop(claims::no_means_no(subject));
        Ok(())
    };
    // What a plugin makes once and keeps is made in the first round.
    round()?;
    let before = LiveObjects::now();
    round()?;
    let after = LiveObjects::now();
    ensure(after.calls <= before.calls, || {
        let more = after.calls - before.calls;
        format!(
            "{more} calls that `validate_call` has kept for the plugin were not freed with `checked_call_free`"
        )
    })?;
    ensure(after.errors <= before.errors, || {
        let more = after.errors - before.errors;
        format!("{more} errors of the host were neither returned nor freed with `status_free`")
    })
}

/// How often something is made and dropped, unless that takes too long.
const ROUNDS: usize = 50_000;
const TIME: Duration = Duration::from_millis(300);
/// Growth of the process that is not yet a leak, and per round: the smallest piece of an allocator has 32 bytes.
const TOLERATED: usize = 1 << 16;
const TOLERATED_EACH: usize = 24;
/// Repetitions before the first measurement, which fill the caches of allocators and use up what they have kept.
const WARM_UP: usize = 3;
/// What is kept once does not make the process grow again and again. A leak does.
const MEASUREMENTS: usize = 4;

/// The resident memory of this process in bytes; `None` where the system does not show it.
fn resident() -> Option<usize> {
    // The pages are counted for this file. The sum in `/proc/self/status` may be off by hundreds of kilobytes, because processors
    // report to it now and then.
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Rss:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? * 1024)
}

/// What is made and dropped thousands of times leaves nothing in the memory of the process.
pub(super) fn process(subject: &Subject) -> Outcome {
    needs_worker()?;
    if resident().is_none() {
        return Err(Stop::Unsupported("the system does not show the memory of a process".into()));
    }
    let mut bench = Bench::new(subject.device())?;
    let dtype = floats(&*bench.device)[0];
    let one = Tensor::floats(dtype, &[2, 64], &[1.0; 128]);
    let operands = [bench.give(&one)?, bench.give(&one)?, Given::Absent, Given::Absent];
    let plan = bench.plan(Add { alpha: 1.0 }, &operands)?;
    let weight = drawn_weight(&mut Random::named("leaks"), WeightFormat::Dense(dtype), [2, 64], 0.1);
    type Make<'a> = &'a mut dyn FnMut(&mut Bench) -> Outcome;
    let kinds: [(&str, Make<'_>); 7] = [
        ("buffers", &mut |bench| bench.buffer(64).map(drop)),
        ("events", &mut |bench| {
            let event = bench.device.event()?;
            Ok(bench.stream.record(&*event)?)
        }),
        ("streams", &mut |bench| {
            drop(bench.device.stream()?);
            Ok(())
        }),
        ("plans", &mut |bench| bench.plan(Add { alpha: 1.0 }, &operands).map(drop)),
        ("bound calls", &mut |bench| bench.bind(&plan, &operands).map(drop)),
        ("packed weights", &mut |bench| match bench.pack(&weight) {
            Err(Stop::Unsupported(_)) => Ok(()),
            other => other.map(drop),
        }),
        // What an allocator takes from the system in whole pages. Last, as some keep so much.
        ("buffers of a mebibyte", &mut |bench| bench.buffer(1 << 20).map(drop)),
    ];
    for (what, make) in kinds {
        for _ in 0..WARM_UP {
            repeat(&mut bench, make, ROUNDS)?;
        }
        for measurement in 1.. {
            let before = resident().unwrap_or(0);
            let rounds = repeat(&mut bench, make, ROUNDS)?;
            let grown = resident().unwrap_or(0).saturating_sub(before);
            if grown <= TOLERATED.max(TOLERATED_EACH * rounds) {
                break;
            }
            ensure(measurement < MEASUREMENTS, || {
                format!(
                    "every time that {rounds} {what} are made and dropped, the process has {grown} bytes more, \
                     {MEASUREMENTS} times in a row"
                )
            })?;
        }
    }
    Ok(())
}

/// Makes something again and again, and returns how often.
fn repeat(
    bench: &mut Bench,
    make: &mut dyn FnMut(&mut Bench) -> Outcome,
    rounds: usize,
) -> Result<usize, Stop> {
    let started = Instant::now();
    for round in 0..rounds {
        make(bench)?;
        if round % 256 == 255 {
            bench.wait()?;
            if started.elapsed() > TIME {
                return Ok(round + 1);
            }
        }
    }
    bench.wait()?;
    Ok(rounds)
}
