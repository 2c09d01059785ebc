//! Callers on several threads do whatever they may at random times, while the service drains, stops or fails: every request ends with
//! its right answer or with an error, what was accepted is finished, and nothing stays behind.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::Code;
use dsrun_engine::{
    EmbeddingRequest, EngineOptions, EnginePlan, Request,
    service::{Handle, Service, ServiceError, ServiceOptions, ServicePhase},
};
use dsrun_models::model::Model;
use dsrun_test_support::{
    faulty_device::{Fault, FaultyDevice, Operation},
    fuzz::Random,
};
use rstest::rstest;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};
use support::{device, exact, open};

/// The time limit of a round. Reaching it means that somebody waits forever.
const PATIENCE: Duration = Duration::from_secs(60);
const CALLERS: u64 = 3;
const ACTIONS: usize = 10;
const QUEUE: usize = 5;
const ROUNDS: u64 = 12;
/// Prompts, which share beginnings.
const PROMPTS: usize = 4;

/// What ends a round, after a random number of actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Drain,
    Stop,
    Drop,
    Failure,
    Panic,
}

fn prompt(index: usize) -> Vec<u32> {
    (0..3 + 5 * index).map(|token| (token * 7 % 96) as u32).collect()
}

fn tokens(index: usize) -> usize {
    2 + 3 * index
}

fn options() -> EngineOptions {
    // Room for about two requests, so that requests wait and are pre-empted.
    EngineOptions { ignore_end: true, context: Some(32), kv_tokens: Some(40), ..exact(8, 2) }
}

fn request(index: usize) -> Request {
    Request { max_tokens: Some(tokens(index)), ..Request::new(prompt(index)) }
}

fn embedding(index: usize) -> EmbeddingRequest {
    EmbeddingRequest { tokens: prompt(index), ..EmbeddingRequest::default() }
}

/// The answers and embeddings of an idle service.
#[derive(Debug, Default)]
struct Expected {
    answers: Vec<Vec<u32>>,
    embeddings: Vec<Vec<f32>>,
}

fn start(model: &Model, device: Arc<FaultyDevice>) -> Service {
    let plan = EnginePlan::new(model, &*device, &options()).unwrap();
    let engine = plan.load(model, device, &mut |_, _| {}).unwrap();
    Service::start(engine, &ServiceOptions { queue: QUEUE, ..ServiceOptions::default() }).unwrap()
}

/// All tokens of a request.
fn answer(handle: &Handle, index: usize) -> Result<Vec<u32>, ServiceError> {
    let mut stream = handle.submit(request(index))?;
    let mut tokens = Vec::new();
    while let Some(event) = stream.blocking_next() {
        tokens.push(event.map_err(|error| accepted(error, handle))?.token);
    }
    Ok(tokens)
}

/// Checks the error of a request that was accepted.
fn accepted(error: ServiceError, handle: &Handle) -> ServiceError {
    assert!(
        !matches!(error, ServiceError::Busy { .. } | ServiceError::Draining),
        "an accepted request is refused: {error}"
    );
    assert_eq!(handle.phase(), ServicePhase::Stopped, "an accepted request ends with {error}");
    error
}

/// One action of a caller.
fn act(handle: &Handle, random: &mut Random, expected: &Expected) {
    let index = random.below(PROMPTS);
    let outcome = match random.below(6) {
        0 | 1 => answer(handle, index).map(|tokens| assert_eq!(tokens, expected.answers[index])),
        2 => handle.submit(request(index)).map(|mut stream| {
            for token in &expected.answers[index][..random.below(3)] {
                match stream.blocking_next() {
                    Some(Ok(event)) => assert_eq!(event.token, *token),
                    Some(Err(error)) => drop(accepted(error, handle)),
                    None => break,
                }
            }
        }),
        3 => handle.embed(embedding(index)).and_then(|pending| {
            let vector = pending.blocking().map_err(|error| accepted(error, handle))?;
            assert_eq!(vector, expected.embeddings[index]);
            Ok(())
        }),
        4 => handle.embed(embedding(index)).map(drop),
        _ => handle.admit().and_then(|admission| {
            for index in [index, (index + 1) % PROMPTS] {
                let pending = admission.embed(embedding(index)).map_err(|error| accepted(error, handle))?;
                let vector = pending.blocking().map_err(|error| accepted(error, handle))?;
                assert_eq!(vector, expected.embeddings[index]);
            }
            Ok(())
        }),
    };
    if let Err(ServiceError::Request(error)) = outcome {
        panic!("a valid request is refused: {error}");
    }
    let statistics = handle.statistics();
    assert!(statistics.running <= 2 && statistics.waiting <= QUEUE + 2 * CALLERS as usize, "{statistics:?}");
}

fn round(model: &Model, expected: &Expected, end: End, seed: u64) {
    let device = FaultyDevice::new(device());
    let mut service = Some(start(model, device.clone()));
    let handle = service.iter().map(Service::handle).next().unwrap();
    let mut random = Random::new(seed);
    let after = random.below(CALLERS as usize * ACTIONS);
    let done = AtomicUsize::new(0);
    thread::scope(|scope| {
        for caller in 0..CALLERS {
            let (handle, done) = (handle.clone(), &done);
            scope.spawn(move || {
                let mut random = Random::new(seed << 8 | caller);
                for _ in 0..ACTIONS {
                    act(&handle, &mut random, expected);
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        while done.load(Ordering::Relaxed) < after {
            thread::yield_now();
        }
        match end {
            End::Drain => {
                handle.drain();
                let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                runtime.block_on(handle.drained());
            }
            End::Stop => service.take().unwrap().stop(PATIENCE).unwrap(),
            End::Drop => drop(service.take()),
            End::Failure => device.arm(Operation::Launch, 1 + random.below(40), Fault::Error(Code::Internal)),
            End::Panic => device.arm(Operation::Upload, 1 + random.below(10), Fault::Panic),
        }
    });
    drop(service);
    // All callers are done, or were told that the service has ended.
    let statistics = handle.statistics();
    if end == End::Drain {
        assert_eq!(
            (statistics.waiting, statistics.running, statistics.pages_in_use),
            (0, 0, 0),
            "{statistics:?}"
        );
    }
    drop(handle);
    assert_eq!(dsrun_core::device::Device::memory(&*device).used, 0, "memory stays behind");
}

#[rstest]
fn every_request_ends_whatever_callers_do(
    #[values(End::Drain, End::Stop, End::Drop, End::Failure, End::Panic)] end: End,
) {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let model = open("llama3");
        let service = start(&model, FaultyDevice::new(device()));
        let handle = service.handle();
        let expected = Expected {
            answers: (0..PROMPTS).map(|index| answer(&handle, index).unwrap()).collect(),
            embeddings: (0..PROMPTS)
                .map(|index| handle.embed(embedding(index)).unwrap().blocking().unwrap())
                .collect(),
        };
        drop((handle, service));
        for seed in 0..ROUNDS {
            round(&model, &expected, end, seed);
            if sender.send(seed).is_err() {
                return;
            }
        }
    });
    for seed in 0..ROUNDS {
        assert_eq!(receiver.recv_timeout(PATIENCE), Ok(seed), "{end:?}: the round hangs or fails");
    }
}
