//! Launching ahead: a step that is launched before the host has read the tokens of the previous step does not change the
//! tokens.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_engine::{Engine, EngineOptions, EnginePlan, FinishReason, Request, SamplingOptions, TokenEvent};
use dsrun_models::model::Model;
use dsrun_test_support::FrontDevice;
use rstest::rstest;
use std::sync::Arc;
use support::{exact, fixtures, late::LateDevice, logits, sampled};

fn model() -> Model {
    Model::open(fixtures().join("llama3")).unwrap()
}

fn prompts() -> Vec<Vec<u32>> {
    (0..5u32)
        .map(|prompt| (0..2 + prompt * 6).map(|index| (prompt * 31 + index * 17 + 5) % 96).collect())
        .collect()
}

fn late_engine(model: &Model, options: &EngineOptions) -> (Engine, Arc<FrontDevice<LateDevice>>) {
    let device = LateDevice::open();
    let plan = EnginePlan::new(model, &*device, options).unwrap();
    (plan.load(model, device.clone(), &mut |_, _| {}).unwrap(), device)
}

#[rstest]
fn launching_ahead_does_not_change_tokens(
    #[values(1, 2, 3)] requests: usize,
    #[values(6, 64)] step: usize,
    #[values(false, true)] ignore_end: bool,
) {
    let model = model();
    let sampling =
        SamplingOptions { temperature: 1.3, seed: 3, repetition_penalty: 1.2, ..Default::default() };
    let run = |launch_ahead: bool| {
        let options = EngineOptions { launch_ahead, ignore_end, ..exact(step, requests) };
        let (mut engine, device) = late_engine(&model, &options);
        let tokens = sampled(&mut engine, &prompts(), 20, &sampling);
        let scores = logits(&mut engine, &prompts()[4]);
        (tokens, sampled(&mut engine, &prompts(), 20, &sampling), scores, device.ahead())
    };
    let (together, one_by_one) = (run(true), run(false));
    assert!(together.3 > 10 && one_by_one.3 == 0, "{} and {} steps ahead", together.3, one_by_one.3);
    assert_eq!((&together.0, &together.1), (&one_by_one.0, &one_by_one.1));
    assert_eq!(together.0, together.1);
    let ended = together.0.iter().any(|answer| answer.len() < 20);
    assert_eq!(ended, !ignore_end, "an end token is found while the next step is in flight");
    assert_eq!(together.2, one_by_one.2);
}

#[test]
fn a_synchronous_device_is_not_launched_ahead() {
    // The reference device computes synchronously, so that each step returns its own token.
    let mut engine = support::engine(&model(), &EngineOptions { ignore_end: true, ..exact(64, 1) });
    let request = Request {
        prompt: vec![1, 2, 3],
        sampling: SamplingOptions::default(),
        max_tokens: Some(3),
        ..Request::default()
    };
    engine.submit(request).unwrap();
    assert_eq!(engine.step().unwrap().len(), 1);
}

#[test]
fn steps_of_the_same_requests_upload_nothing_and_copy_once() {
    let options = EngineOptions { ignore_end: true, block_size: 64, ..exact(64, 2) };
    let (mut engine, device) = late_engine(&model(), &options);
    for prompt in [vec![1, 2, 3], vec![4, 5]] {
        engine.submit(Request { prompt, max_tokens: Some(30), ..Request::default() }).unwrap();
    }
    let mut events = Vec::new();
    let mut steps = |engine: &mut Engine, count: usize| {
        (0..count).for_each(|_| events.extend(engine.step().unwrap()));
        device.transfers()
    };
    let [uploads, copies] = steps(&mut engine, 5);
    // Both requests keep their table rows and already have their pages.
    assert_eq!(steps(&mut engine, 20), [uploads, copies + 20]);
    while !engine.is_idle() {
        steps(&mut engine, 1);
    }
    assert_eq!(events.len(), 60);
}

#[test]
fn a_request_cancelled_in_flight_gives_no_more_tokens_and_frees_its_pages() {
    let model = model();
    // One table row and pages for one request: the second reuses memory that a step in flight still writes to.
    let options = EngineOptions { ignore_end: true, kv_tokens: Some(32), context: Some(32), ..exact(64, 1) };
    let request = |prompt: &[u32]| Request {
        prompt: prompt.to_vec(),
        sampling: SamplingOptions::default(),
        max_tokens: Some(20),
        ..Request::default()
    };
    let (first, second) = ([3u32, 1, 4, 1, 5], [9u32, 2, 6]);
    let alone: Vec<u32> = {
        let (mut engine, _) = late_engine(&model, &options);
        sampled(&mut engine, &[second.to_vec()], 20, &SamplingOptions::default()).remove(0)
    };
    for after in 1..6 {
        let (mut engine, device) = late_engine(&model, &options);
        let a = engine.submit(request(&first)).unwrap();
        let b = engine.submit(request(&second)).unwrap();
        let mut events: Vec<TokenEvent> = Vec::new();
        for _ in 0..after {
            events.extend(engine.step().unwrap());
        }
        assert!(events.iter().all(|event| event.request == a) && events.len() == after);
        engine.cancel(a);
        let mut tokens = Vec::new();
        while !engine.is_idle() {
            for event in engine.step().unwrap() {
                assert_eq!(event.request, b, "a cancelled request gives tokens");
                tokens.push(event.token);
                assert_eq!(event.finish.is_some(), tokens.len() == 20);
                assert!(matches!(event.finish, None | Some(FinishReason::Length)));
            }
        }
        assert_eq!(tokens, alone, "cancelled after {after} steps");
        assert_eq!(engine.pages_in_use(), 0);
        assert!(device.ahead() > 0);
    }
}
