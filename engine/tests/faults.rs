//! A device whose n-th call of a kind fails, for every n: no answer is wrong, nobody waits forever, and no memory stays behind.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::{Code, device::Device};
use dsrun_engine::{
    EmbeddingRequest, EngineOptions, EnginePlan, KvIn, Request,
    service::{Service, ServiceError, ServiceOptions, TokenStream},
};
use dsrun_models::model::Model;
use dsrun_test_support::faulty_device::{Fault, FaultyDevice, Operation};
use rstest::rstest;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};
use support::{device, exact, open};

/// The time limit of one run. Reaching it means that somebody waits forever.
const PATIENCE: Duration = Duration::from_secs(60);

/// Tokens of each answer.
const TOKENS: usize = 6;

/// Room for about two of three answers, so that requests are pre-empted, and swapped to host memory.
fn options() -> EngineOptions {
    EngineOptions { ignore_end: true, context: Some(32), kv_tokens: Some(36), swap_tokens: 32, ..exact(8, 3) }
}

/// The same with all keys and values in host memory, and steps that copy them: with more than 16 tokens.
fn options_in_host() -> EngineOptions {
    EngineOptions { kv_in: KvIn::Host, resident_layers: Some(0), step_tokens: 20, ..options() }
}

/// What a run gave: each answer or its error, and the embedding or its error.
#[derive(Debug, PartialEq)]
struct Outcome {
    answers: Vec<Result<Vec<u32>, String>>,
    embedding: Result<Vec<u32>, String>,
}

fn answer(mut stream: TokenStream) -> Result<Vec<u32>, String> {
    let mut tokens = Vec::new();
    while let Some(event) = stream.blocking_next() {
        tokens.push(event.map_err(|error: ServiceError| error.to_string())?.token);
    }
    assert_eq!(tokens.len(), TOKENS, "an answer ends early without an error");
    Ok(tokens)
}

/// Loads the model and serves three answers and an embedding; the error if it does not load.
fn serve(model: &Model, device: Arc<dyn Device>, options: &EngineOptions) -> Result<Outcome, String> {
    let plan = EnginePlan::new(model, &*device, options).map_err(|error| error.to_string())?;
    let engine = plan.load(model, device, &mut |_, _| {}).map_err(|error| error.to_string())?;
    let service = Service::start(engine, &ServiceOptions::default()).unwrap();
    let handle = service.handle();
    let request = |index: u32| Request {
        max_tokens: Some(TOKENS),
        ..Request::new((0..5 + 4 * index).map(|token| (token * 7 + index) % 96).collect::<Vec<u32>>())
    };
    let asked: Vec<_> = (0..3).map(|index| handle.submit(request(index))).collect();
    let embedded = handle.embed(EmbeddingRequest { tokens: vec![3, 1, 4], ..EmbeddingRequest::default() });
    let answers = asked.into_iter().map(|asked| answer(asked.map_err(|error| error.to_string())?));
    let answers = answers.collect();
    let embedding = embedded.and_then(|embedded| embedded.blocking());
    let bits = |vector: Vec<f32>| vector.into_iter().map(f32::to_bits).collect();
    let embedding = embedding.map(bits).map_err(|error| error.to_string());
    service.stop(PATIENCE).unwrap();
    Ok(Outcome { answers, embedding })
}

/// The same with a time limit. A panic while the model is loaded is an error like others.
fn serve_in_time(device: &Arc<FaultyDevice>, options: &EngineOptions) -> Result<Outcome, String> {
    let (sender, receiver) = mpsc::channel();
    let (device, options): (Arc<dyn Device>, _) = (device.clone(), options.clone());
    thread::spawn(move || {
        let served = catch_unwind(AssertUnwindSafe(|| serve(&open("llama3"), device, &options)));
        let _ = sender.send(served.unwrap_or_else(|_| Err("it panicked".to_owned())));
    });
    receiver.recv_timeout(PATIENCE).expect("a run does not end")
}

#[rstest]
#[case::error(Fault::Error(Code::OutOfMemory))]
#[case::lost(Fault::Lost)]
#[case::panic(Fault::Panic)]
fn a_fault_anywhere_gives_an_error_or_the_right_answer(
    #[case] fault: Fault,
    #[values(
        Operation::Allocate,
        Operation::Create,
        Operation::Upload,
        Operation::Copy,
        Operation::Record,
        Operation::Wait,
        Operation::Prepack,
        Operation::Plan,
        Operation::Bind,
        Operation::Launch
    )]
    operation: Operation,
) {
    check_faults(fault, operation, &options());
}

/// What differs with a KV cache in host memory: its allocation, copies of pages, and the events that order them.
#[rstest]
fn a_fault_with_a_cache_in_host_memory_gives_an_error_or_the_right_answer(
    #[values(Operation::Allocate, Operation::Create, Operation::Copy, Operation::Record, Operation::Launch)]
    operation: Operation,
) {
    check_faults(Fault::Error(Code::OutOfMemory), operation, &options_in_host());
}

fn check_faults(fault: Fault, operation: Operation, options: &EngineOptions) {
    let sound = FaultyDevice::new(device());
    let expected = serve_in_time(&sound, options).expect("without a fault it is served");
    assert!(expected.answers.iter().all(Result::is_ok) && expected.embedding.is_ok(), "{expected:?}");
    let count = sound.count(operation);
    assert!(count > 0, "the run has no {operation:?}");
    // Every call up to a number, then ever fewer of them: a run repeats the same step.
    let calls = (1..=count).filter(|nth| *nth <= 16 || *nth % (nth / 8) == 0 || nth + 4 > count);
    for nth in calls {
        let device = FaultyDevice::new(device());
        device.arm(operation, nth, fault);
        let found = serve_in_time(&device, options);
        assert!(device.has_failed(), "{operation:?} {nth} of {count} does not come");
        if let Ok(found) = found {
            for (found, expected) in found.answers.iter().zip(&expected.answers) {
                assert!(
                    found.is_err() || found == expected,
                    "{operation:?} {nth}: {found:?}, not {expected:?}"
                );
            }
            let (found, expected) = (&found.embedding, &expected.embedding);
            assert!(found.is_err() || found == expected, "{operation:?} {nth}: another embedding");
        }
        assert_eq!(device.memory().used, 0, "{operation:?} {nth} of {count}: memory stays behind");
    }
}
