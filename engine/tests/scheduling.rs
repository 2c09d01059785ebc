//! Scheduling of many requests with few pages: each request gets the tokens that it gets alone.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::device::Device;
use dsrun_engine::{
    Engine, EngineOptions, EnginePlan, Request, RequestId, SamplingOptions, Speculation, TokenEvent,
};
use dsrun_models::model::Model;
use rstest::rstest;
use std::{collections::HashMap, sync::Arc};
use support::{device, exact, fixtures, late::LateDevice};

const TOKENS: usize = 24;

/// A model whose answers repeat themselves now and then.
fn model() -> Model {
    Model::open(fixtures().join("qwen2_5")).unwrap()
}

/// Twelve prompts with three shared prefixes.
fn prompts() -> Vec<Vec<u32>> {
    let prompt = |index: u32| {
        let (family, own) = (index % 3, index / 3);
        let shared = (0..4 + family * 9).map(move |position| (position * 13 + family * 29 + 5) % 96);
        shared.chain((0..1 + own * 3).map(move |position| (position * 7 + own * 31 + 1) % 96)).collect()
    };
    (0..12).map(prompt).collect()
}

/// Various sampling options, so that seeds, penalties and counts of tokens matter.
fn sampling(index: usize) -> SamplingOptions {
    match index % 3 {
        0 => SamplingOptions::default(),
        1 => SamplingOptions { temperature: 1.4, seed: index as u64, ..SamplingOptions::default() },
        _ => SamplingOptions {
            temperature: 0.7,
            repetition_penalty: 1.5,
            frequency_penalty: 0.3,
            presence_penalty: 0.2,
            seed: index as u64,
            ..SamplingOptions::default()
        },
    }
}

fn request(index: usize, prompt: &[u32]) -> Request {
    Request { sampling: sampling(index), max_tokens: Some(TOKENS), ..Request::new(prompt) }
}

fn options(requests: usize) -> EngineOptions {
    EngineOptions { ignore_end: true, context: Some(64), ..exact(16, requests) }
}

fn engine(device: Arc<dyn Device>, options: &EngineOptions) -> Engine {
    let model = model();
    let plan = EnginePlan::new(&model, &*device, options).unwrap();
    plan.load(&model, device, &mut |_, _| {}).unwrap()
}

/// The answers to all prompts in one run. Checks that all pages are free afterwards.
fn answers(engine: &mut Engine) -> Vec<Vec<u32>> {
    let prompts = prompts();
    let submit = |(index, prompt): (usize, &Vec<u32>)| engine.submit(request(index, prompt)).unwrap();
    let ids: Vec<RequestId> = prompts.iter().enumerate().map(submit).collect();
    let mut answers: HashMap<RequestId, Vec<u32>> = HashMap::new();
    while !engine.is_idle() {
        for TokenEvent { request, token, finish, .. } in engine.step().unwrap() {
            let answer = answers.entry(request).or_default();
            answer.push(token);
            assert_eq!(finish.is_some(), answer.len() == TOKENS);
        }
    }
    assert_eq!(engine.pages_in_use(), 0);
    ids.iter().map(|id| answers.remove(id).unwrap()).collect()
}

/// The answer to each prompt by an engine with this request alone and without a prefix cache.
fn alone() -> Vec<Vec<u32>> {
    let options = EngineOptions { prefix_cache: false, ..options(1) };
    let mut engine = engine(device(), &options);
    let mut answer = |(index, prompt): (usize, &Vec<u32>)| {
        engine.submit(request(index, prompt)).unwrap();
        let mut tokens = Vec::new();
        while !engine.is_idle() {
            tokens.extend(engine.step().unwrap().into_iter().map(|event| event.token));
        }
        tokens
    };
    prompts().iter().enumerate().map(&mut answer).collect()
}

#[rstest]
fn answers_match_those_given_alone_with_any_number_of_pages(
    #[values(false, true)] late: bool,
    #[values(false, true)] prefix_cache: bool,
    #[values(0, 40, 1000)] swap_tokens: usize,
    #[values(64, 100, 2000)] kv_tokens: usize,
    #[values(None, Some(Speculation::Ngram { tokens: 5 }))] speculation: Option<Speculation>,
) {
    let options =
        EngineOptions { kv_tokens: Some(kv_tokens), swap_tokens, prefix_cache, speculation, ..options(6) };
    let device = if late { LateDevice::open() } else { device() };
    let mut engine = engine(device, &options);
    let alone = alone();
    for round in 0..2 {
        assert_eq!(answers(&mut engine), alone, "round {round}");
    }
    let statistics = engine.statistics();
    assert_eq!(statistics.preemptions > 0, kv_tokens < 2000, "{statistics:?}");
    assert_eq!(statistics.prefix_hit_tokens > 0, prefix_cache, "{statistics:?}");
    assert_eq!(statistics.accepted_tokens > 0, speculation.is_some(), "{statistics:?}");
    assert_eq!((statistics.finished, statistics.generated_tokens), (24, 24 * TOKENS as u64));
}

#[test]
fn a_cached_prompt_is_not_computed_again() {
    let mut engine = engine(device(), &EngineOptions { kv_tokens: Some(2000), ..options(1) });
    let first = answers(&mut engine);
    let before = engine.statistics().clone();
    assert_eq!(answers(&mut engine), first);
    let after = engine.statistics();
    let prompts = prompts();
    let full = |prompt: &Vec<u32>| (prompt.len() - 1) / 4 * 4;
    let known: usize = prompts.iter().map(full).sum();
    assert_eq!(after.prefix_hit_tokens - before.prefix_hit_tokens, known as u64);
    let steps =
        |chunks: &dyn Fn(&Vec<u32>) -> usize| prompts.iter().map(|prompt| chunks(prompt) + TOKENS - 1).sum();
    let second: usize = steps(&|_| 1);
    assert_eq!(after.steps - before.steps, second as u64);
}

#[test]
fn prompts_are_shared_by_requests_of_the_same_salt_only() {
    let prompt = &prompts()[11];
    let mut engine = engine(device(), &EngineOptions { kv_tokens: Some(2000), ..options(1) });
    let known = ((prompt.len() - 1) / 4 * 4) as u64;
    for (salt, found) in [(Some("a"), 0), (None, 0), (Some("b"), 0), (Some("a"), known), (None, known)] {
        let before = engine.statistics().prefix_hit_tokens;
        let cache_salt = salt.map(str::to_owned);
        engine
            .submit(Request { cache_salt, max_tokens: Some(2), ..Request::new(prompt.as_slice()) })
            .unwrap();
        while !engine.is_idle() {
            engine.step().unwrap();
        }
        assert_eq!(engine.statistics().prefix_hit_tokens - before, found, "{salt:?}");
    }
}

#[test]
fn several_answers_to_one_prompt_share_its_pages() {
    let prompt = &prompts()[11];
    let answer = |seed: u64| Request {
        sampling: SamplingOptions { temperature: 1.2, seed, ..SamplingOptions::default() },
        max_tokens: Some(1),
        ..Request::new(prompt.as_slice())
    };
    let mut engine = engine(device(), &EngineOptions { step_tokens: 256, ..options(4) });
    for seed in 0..4 {
        engine.submit(answer(seed)).unwrap();
    }
    let shared = (prompt.len() - 1) / 4;
    assert_eq!(engine.step().unwrap().len(), 4);
    assert_eq!(engine.statistics().prefix_hit_tokens, (3 * shared * 4) as u64);
    assert_eq!(engine.statistics().steps, 1);
}

#[test]
fn a_cancelled_request_releases_its_pages_to_waiting_requests() {
    // Pages for one request: the second waits for the first.
    let options = EngineOptions { kv_tokens: Some(64), ..options(2) };
    for after in 0..8 {
        let mut engine = engine(LateDevice::open(), &options);
        let (prompts, alone) = (prompts(), alone());
        let long = Request { max_tokens: Some(50), ..Request::new(vec![3; 14]) };
        let first = engine.submit(long).unwrap();
        let second = engine.submit(request(10, &prompts[10])).unwrap();
        let mut tokens = Vec::new();
        for step in 0.. {
            if step == after {
                engine.cancel(first);
            }
            if engine.is_idle() {
                break;
            }
            let events = engine.step().unwrap().into_iter();
            tokens.extend(events.filter(|event| event.request == second).map(|event| event.token));
        }
        assert_eq!(tokens, alone[10], "cancelled after {after} steps");
        assert_eq!(engine.pages_in_use(), 0);
        assert_eq!(engine.statistics().cancelled, 1);
    }
}

#[test]
fn a_higher_priority_goes_first_and_all_requests_are_answered() {
    let mut engine = engine(LateDevice::open(), &options(2));
    let (prompts, alone) = (prompts(), alone());
    let low: Vec<RequestId> =
        (0..3).map(|index| engine.submit(request(index, &prompts[index])).unwrap()).collect();
    let mut order = Vec::new();
    let mut answers: HashMap<RequestId, Vec<u32>> = HashMap::new();
    let mut high = None;
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            answers.entry(event.request).or_default().push(event.token);
            order.extend(event.finish.map(|_| event.request));
        }
        if high.is_none() {
            let urgent = Request { priority: 1, ..request(3, &prompts[3]) };
            high = Some(engine.submit(urgent).unwrap());
        }
    }
    let high = high.unwrap();
    let place = |id: RequestId| order.iter().position(|ended| *ended == id).unwrap();
    assert!(place(high) < place(low[1]), "the last running request is pre-empted for it");
    assert!(engine.statistics().preemptions > 0);
    for (index, id) in low.into_iter().chain([high]).enumerate() {
        assert_eq!(answers[&id], alone[index]);
    }
}

#[test]
fn tuned_steps_are_between_the_requests_and_the_limit() {
    let options = EngineOptions { step_tokens: 64, tune_step: true, ..options(4) };
    let mut tuned = engine(device(), &options);
    assert!((4..=64).contains(&tuned.step_tokens()));
    assert_eq!(answers(&mut tuned), alone());
}

/// A warm engine, a cold one, and the number of steps that the warm one has compiled.
fn warm_and_cold(options: &EngineOptions, draft: bool) -> (Engine, Engine, u64) {
    let model = Arc::new(model());
    let load = || {
        let device = LateDevice::open();
        let plan = match draft {
            true => EnginePlan::with_draft(&model, &model, &*device, options),
            false => EnginePlan::new(&model, &*device, options),
        };
        plan.unwrap().load(&model, device, &mut |_, _| {}).unwrap()
    };
    let mut warm = load();
    let mut heard = Vec::new();
    let kinds = warm.warm_up(&mut |done, total| heard.push((done, total))).unwrap();
    heard.dedup();
    assert_eq!(heard, (0..=kinds).map(|done| (done, kinds)).collect::<Vec<_>>());
    let compiled = compiled(&warm);
    assert_eq!(compiled, kinds as u64);
    (warm, load(), compiled)
}

/// The number of compiled steps, including those of a draft model.
fn compiled(engine: &Engine) -> u64 {
    let draft = engine.draft_statistics().map_or(0, |draft| draft.compiled_steps);
    engine.statistics().compiled_steps + draft
}

#[rstest]
#[case(None)]
#[case(Some(Speculation::Ngram { tokens: 3 }))]
#[case(Some(Speculation::Draft { tokens: 3 }))]
fn a_warm_engine_compiles_nothing_for_requests(#[case] speculation: Option<Speculation>) {
    let options = EngineOptions { speculation, swap_tokens: 64, ..options(5) };
    let draft = matches!(speculation, Some(Speculation::Draft { .. }));
    let (mut warm, mut cold, kinds) = warm_and_cold(&options, draft);
    assert_eq!(answers(&mut warm), answers(&mut cold));
    assert_eq!(compiled(&warm), kinds, "a step was compiled while requests ran");
    assert!((1..=kinds).contains(&compiled(&cold)));
    warm.submit(request(0, &prompts()[0])).unwrap();
    assert!(warm.warm_up(&mut |_, _| {}).is_err(), "requests are running");
}
