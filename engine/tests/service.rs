//! The service, which runs the engine on a thread of its own: the results for callers, and its end.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_engine::{
    EmbeddingRequest, EngineError, EngineOptions, EnginePlan, FinishReason, Request, TokenEvent,
    service::{Handle, Service, ServiceError, ServiceOptions, ServicePhase, TokenStream},
};
use dsrun_models::model::Model;
use dsrun_test_support::FrontDevice;
use rstest::rstest;
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use support::{
    engine, exact, fixtures, greedy,
    late::{Fault, LateDevice},
};

const TIMEOUT: Duration = Duration::from_secs(60);

fn model() -> Model {
    Model::open(fixtures().join("llama3")).unwrap()
}

fn options(requests: usize) -> EngineOptions {
    EngineOptions { ignore_end: true, ..exact(16, requests) }
}

fn service(requests: usize, queue: usize) -> Service {
    Service::start(
        engine(&model(), &options(requests)),
        &ServiceOptions { queue, ..ServiceOptions::default() },
    )
    .unwrap()
}

fn late_service(requests: usize, queue: usize) -> (Service, Arc<FrontDevice<LateDevice>>) {
    late_service_with(requests, &ServiceOptions { queue, ..ServiceOptions::default() })
}

fn late_service_with(requests: usize, service: &ServiceOptions) -> (Service, Arc<FrontDevice<LateDevice>>) {
    let (model, device) = (model(), LateDevice::open());
    let plan = EnginePlan::new(&model, &*device, &options(requests)).unwrap();
    let engine = plan.load(&model, device.clone(), &mut |_, _| {}).unwrap();
    (Service::start(engine, service).unwrap(), device)
}

fn prompts() -> Vec<Vec<u32>> {
    (0..6u32)
        .map(|prompt| (0..3 + prompt * 7).map(|index| (prompt * 31 + index * 17 + 5) % 96).collect())
        .collect()
}

fn request(prompt: &[u32], tokens: usize) -> Request {
    Request { max_tokens: Some(tokens), ..Request::new(prompt) }
}

/// All events of a stream.
fn collect(mut stream: TokenStream) -> Vec<Result<TokenEvent, ServiceError>> {
    std::iter::from_fn(|| stream.blocking_next()).collect()
}

fn tokens(stream: TokenStream) -> Vec<u32> {
    let events: Vec<TokenEvent> = collect(stream).into_iter().map(Result::unwrap).collect();
    assert_eq!(events.last().unwrap().finish, Some(FinishReason::Length));
    assert!(events[..events.len() - 1].iter().all(|event| event.finish.is_none()));
    events.into_iter().map(|event| event.token).collect()
}

/// Waits until the thread of the service has received everything sent so far, by running a short request.
fn settle(handle: &Handle) {
    drop(tokens(handle.submit(request(&[1], 1)).unwrap()));
}

#[test]
fn callers_on_many_threads_get_the_tokens_of_the_engine() {
    let alone = greedy(&mut engine(&model(), &options(1)), &prompts(), 10);
    let service = service(3, 100);
    thread::scope(|scope| {
        for (prompt, alone) in prompts().into_iter().zip(&alone) {
            let handle = service.handle();
            scope.spawn(move || {
                assert_eq!(&tokens(handle.submit(request(&prompt, 10)).unwrap()), alone);
            });
        }
    });
    let statistics = service.handle().statistics();
    assert_eq!((statistics.requests, statistics.generated_tokens), (6, 60));
    service.stop(TIMEOUT).unwrap();
}

#[test]
fn streams_are_polled_by_an_async_runtime() {
    let alone = greedy(&mut engine(&model(), &options(1)), &prompts(), 10);
    let service = service(3, 100);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let tasks: Vec<_> = prompts()
            .into_iter()
            .map(|prompt| {
                let mut stream = service.handle().submit(request(&prompt, 10)).unwrap();
                tokio::task::spawn(async move {
                    let mut tokens = Vec::new();
                    while let Some(event) = stream.next().await {
                        tokens.push(event.unwrap().token);
                    }
                    tokens
                })
            })
            .collect::<Vec<_>>();
        for (task, alone) in tasks.into_iter().zip(alone) {
            assert_eq!(task.await.unwrap(), alone);
        }
        service.handle().drain();
        service.handle().drained().await;
    });
    assert_eq!(service.handle().phase(), ServicePhase::Drained);
}

#[test]
fn dropping_a_stream_cancels_its_request() {
    let (service, device) = late_service(1, 100);
    let handle = service.handle();
    let held = device.hold();
    let first = handle.submit(request(&prompts()[0], 1000)).unwrap();
    let second = handle.submit(request(&prompts()[1], 1000)).unwrap();
    // One request runs and one waits when the streams are dropped.
    while device.ahead() == 0 {
        thread::yield_now();
    }
    drop((second, first));
    drop(held);
    settle(&handle);
    let statistics = handle.statistics();
    assert_eq!((statistics.cancelled, statistics.finished), (2, 1));
    assert_eq!((statistics.waiting, statistics.running, statistics.pages_in_use), (0, 0, 0));
}

#[test]
fn a_full_queue_is_busy_and_reports_how_many_wait() {
    let (service, device) = late_service(1, 2);
    let handle = service.handle();
    let mut running = handle.submit(request(&[1], 1000)).unwrap();
    running.blocking_next().unwrap().unwrap();
    // Statistics are published between steps: with its second token, the first request has left the queue.
    running.blocking_next().unwrap().unwrap();
    let held = device.hold();
    let waiting: Vec<TokenStream> = (0..2).map(|_| handle.submit(request(&[1], 1)).unwrap()).collect();
    let error = handle.submit(request(&[1], 1)).unwrap_err();
    assert!(matches!(error, ServiceError::Busy { waiting: 2, limit: 2 }), "{error}");
    drop(held);
    drop(running);
    assert!(waiting.into_iter().all(|stream| tokens(stream).len() == 1));
    settle(&handle);
}

#[test]
fn a_stream_tells_when_its_request_began_and_not_before() {
    let service = service(1, 10);
    let submitted = Instant::now();
    // A prompt of more than one step, so that it begins before there is a token.
    let long: Vec<u32> = (0..50).map(|index| index % 96).collect();
    let mut first = service.handle().submit(request(&long, 10)).unwrap();
    let mut second = service.handle().submit(request(&[1], 1)).unwrap();
    let token = first.blocking_next().unwrap().unwrap();
    let (first_began, first_token) = (first.begun().unwrap(), Instant::now());
    assert!(submitted <= first_began && first_began < first_token && token.finish.is_none());
    let end = Instant::now() + TIMEOUT;
    let mut waiting = service.handle().submit(request(&[2], 1)).unwrap();
    assert_eq!(waiting.begun(), None, "the engine runs one request at a time");
    tokens(first);
    second.blocking_next().unwrap().unwrap();
    let second_began = second.begun().unwrap();
    assert!(first_began < second_began, "it waited for the first");
    waiting.blocking_next().unwrap().unwrap();
    assert!(second_began < waiting.begun().unwrap() && Instant::now() < end);
}

#[test]
fn an_invalid_request_is_refused_at_once() {
    let service = service(1, 2);
    let handle = service.handle();
    let refused = |request: Request| match handle.submit(request).unwrap_err() {
        ServiceError::Request(error) => error,
        error => panic!("{error}"),
    };
    assert!(matches!(*refused(Request::default()), EngineError::EmptyPrompt));
    assert!(matches!(*refused(request(&[96], 1)), EngineError::NoSuchToken { token: 96, .. }));
    settle(&handle);
}

#[test]
fn draining_finishes_accepted_requests_and_refuses_new_ones() {
    let service = service(1, 100);
    let handle = service.handle();
    let streams: Vec<TokenStream> =
        prompts().iter().map(|prompt| handle.submit(request(prompt, 8)).unwrap()).collect();
    handle.drain();
    assert!(matches!(handle.submit(request(&[1], 1)), Err(ServiceError::Draining)));
    assert!(streams.into_iter().all(|stream| tokens(stream).len() == 8));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(handle.drained());
    assert_eq!(handle.phase(), ServicePhase::Drained);
    service.stop(TIMEOUT).unwrap();
    assert_eq!(handle.phase(), ServicePhase::Stopped);
}

#[test]
fn stopping_ends_every_stream() {
    let service = service(1, 100);
    let handle = service.handle();
    // One request runs at a time, for more than a hundred steps: the last cannot have ended by itself.
    let streams: Vec<TokenStream> = (0..100).map(|_| handle.submit(request(&[1], 1000)).unwrap()).collect();
    service.stop(TIMEOUT).unwrap();
    let last = streams.into_iter().filter_map(|stream| collect(stream).pop()).next_back().unwrap();
    assert!(matches!(last, Err(ServiceError::Stopped)));
    assert!(matches!(handle.submit(request(&[1], 1)), Err(ServiceError::Stopped)));
    assert!(handle.failure().is_none());
}

#[rstest]
#[case(Fault::Lost, "a test took the device away")]
#[case(Fault::Panic, "a test made this panic")]
fn a_failure_of_the_engine_reaches_every_stream(#[case] fault: Fault, #[case] message: &str) {
    let (service, device) = late_service(2, 100);
    let handle = service.handle();
    let mut held = device.hold();
    let streams: Vec<TokenStream> = (0..3).map(|_| handle.submit(request(&[1], 1000)).unwrap()).collect();
    *held = Some(fault);
    drop(held);
    for stream in streams {
        let error = collect(stream).pop().unwrap().unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(handle.stopped());
    assert!(handle.failure().unwrap().to_string().contains(message));
    assert!(handle.submit(request(&[1], 1)).unwrap_err().to_string().contains(message));
    service.stop(TIMEOUT).unwrap();
}

#[rstest]
#[case(Fault::Lost)]
#[case(Fault::Panic)]
fn requests_that_have_not_begun_when_the_engine_fails_run_elsewhere(#[case] fault: Fault) {
    let (service, device) = late_service(2, 100);
    let handle = service.handle();
    let mut begun: Vec<TokenStream> = (0..2).map(|_| handle.submit(request(&[1], 1000)).unwrap()).collect();
    for stream in &mut begun {
        stream.blocking_next().unwrap().unwrap();
    }
    let mut held = device.hold();
    let waiting = handle.submit(request(&prompts()[1], 10)).unwrap();
    let embedding = EmbeddingRequest { tokens: vec![1, 2], ..EmbeddingRequest::default() };
    let embedding = handle.embed(embedding).unwrap();
    *held = Some(fault);
    drop(held);
    for stream in begun {
        let error = collect(stream).pop().unwrap().unwrap_err();
        assert!(matches!(error, ServiceError::Failed { .. }), "{error}");
    }
    let error = collect(waiting).pop().unwrap().unwrap_err();
    assert!(matches!(error, ServiceError::NotBegun { .. }), "{error}");
    let error = embedding.blocking().unwrap_err();
    assert!(matches!(error, ServiceError::NotBegun { .. }), "{error}");
    // Another service takes the request although its queue is full and it drains.
    let other = Service::start(
        engine(&model(), &options(1)),
        &ServiceOptions { queue: 1, ..ServiceOptions::default() },
    )
    .unwrap();
    let running = other.handle().submit(request(&[1], 300)).unwrap();
    other.handle().drain();
    let moved = other.handle().take_over(request(&prompts()[1], 10)).unwrap();
    let alone = greedy(&mut engine(&model(), &options(1)), &prompts()[1..2], 10);
    assert_eq!(tokens(moved), alone[0]);
    drop(running);
}

#[test]
fn the_age_of_a_step_shows_that_the_device_hangs() {
    let (service, device) = late_service(1, 10);
    let handle = service.handle();
    assert_eq!(handle.step_age(), None);
    let held = device.hold();
    let stream = handle.submit(request(&[1], 5)).unwrap();
    let age = Duration::from_millis(20);
    let end = Instant::now() + TIMEOUT;
    while handle.step_age().is_none_or(|present| present < age) {
        assert!(Instant::now() < end, "the step has no age");
        thread::yield_now();
    }
    drop(held);
    assert_eq!(tokens(stream).len(), 5);
    settle(&handle);
    while handle.step_age().is_some() {
        assert!(Instant::now() < end, "an idle engine has a step");
        thread::yield_now();
    }
}

/// Options of a service that keeps few unread bytes, and a request with more.
fn unread() -> (ServiceOptions, Request) {
    let options = ServiceOptions { unread: 32 << 10, ..ServiceOptions::default() };
    (options, Request { top_log_probabilities: 40, ..request(&[1], 1000) })
}

/// Asserts that a stream had tokens and then ended because they were not taken.
fn assert_unread(stream: TokenStream) {
    let mut events = collect(stream);
    assert!(matches!(events.pop().unwrap().unwrap_err(), ServiceError::Unread { .. }));
    assert!(!events.is_empty() && events.iter().all(Result::is_ok));
}

#[test]
fn tokens_that_callers_do_not_take_are_bounded() {
    let (options, request) = unread();
    let service = Service::start(engine(&model(), &self::options(1)), &options).unwrap();
    let handle = service.handle();
    let stream = handle.submit(request.clone()).unwrap();
    let end = Instant::now() + TIMEOUT;
    while handle.unread_bytes() <= options.unread {
        assert!(Instant::now() < end, "{} bytes are unread", handle.unread_bytes());
        thread::yield_now();
    }
    let refused = handle.submit(request).unwrap_err();
    assert!(matches!(refused, ServiceError::Unread { limit: 32_768 }), "{refused}");
    while handle.statistics().running > 0 {
        assert!(Instant::now() < end, "the request of the caller that takes nothing goes on");
        thread::yield_now();
    }
    assert_unread(stream);
    settle(&handle);
    while handle.unread_bytes() > 0 {
        assert!(Instant::now() < end, "{} bytes are unread", handle.unread_bytes());
        thread::yield_now();
    }
}

#[test]
fn a_caller_that_takes_its_tokens_is_not_affected_by_others() {
    let (options, unread) = unread();
    let (service, device) = late_service_with(2, &options);
    let handle = service.handle();
    let held = device.hold();
    let unread = handle.submit(unread).unwrap();
    let read = handle.submit(request(&[2], 100)).unwrap();
    drop(held);
    assert_eq!(tokens(read).len(), 100);
    assert_unread(unread);
}
