//! Tokens that are proposed and checked: answers are those without, in fewer steps, whatever ends them.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test that cannot go on has failed, and says why it skips"
)]

mod support;

use dsrun_core::device::Device;
use dsrun_engine::{
    Constraint, ConstraintError, Engine, EngineOptions, EnginePlan, FinishReason, GenerateOptions, Pipeline,
    Prompt, Request, RequestId, SamplingOptions, Speculation, TokenEvent,
};
use dsrun_models::model::Model;
use rstest::rstest;
use std::{collections::HashMap, sync::Arc};
use support::{device, exact, fixtures, late::LateDevice};

const TOKENS: usize = 80;

/// A model whose answers repeat themselves now and then.
fn model() -> Model {
    Model::open(fixtures().join("qwen2_5")).unwrap()
}

fn engine(device: Arc<dyn Device>, options: &EngineOptions) -> Engine {
    let model = model();
    let plan = EnginePlan::new(&model, &*device, options).unwrap();
    plan.load(&model, device, &mut |_, _| {}).unwrap()
}

fn some_device(late: bool) -> Arc<dyn Device> {
    if late { LateDevice::open() } else { device() }
}

/// So many tokens proposed at a time; 0 is none.
fn options(tokens: usize, requests: usize) -> EngineOptions {
    let speculation = (tokens > 0).then_some(Speculation::Ngram { tokens });
    EngineOptions { speculation, ignore_end: true, context: Some(128), ..exact(32, requests) }
}

/// A text that says the same again and again.
fn prompt(index: u32) -> Vec<u32> {
    (0..16 + index * 5).map(|position| (position % (4 + index) * 17 + index * 31 + 5) % 96).collect()
}

fn request(index: u32) -> Request {
    Request { max_tokens: Some(TOKENS), ..Request::new(prompt(index)) }
}

fn run(engine: &mut Engine, requests: Vec<Request>) -> Vec<Vec<TokenEvent>> {
    let ids: Vec<RequestId> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut events: HashMap<RequestId, Vec<TokenEvent>> = HashMap::new();
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            events.entry(event.request).or_default().push(event);
        }
    }
    assert_eq!(engine.pages_in_use(), 0);
    assert!(engine.take_failures().is_empty());
    ids.iter().map(|id| events.remove(id).unwrap_or_default()).collect()
}

fn tokens(events: &[TokenEvent]) -> Vec<u32> {
    events.iter().map(|event| event.token).collect()
}

/// The answers to some requests without speculation, each alone.
fn alone(requests: impl IntoIterator<Item = Request>) -> Vec<Vec<TokenEvent>> {
    let mut engine = engine(device(), &options(0, 1));
    requests.into_iter().map(|request| run(&mut engine, vec![request]).remove(0)).collect()
}

/// Compares answers: tokens, how they end, and what is said of them. Probabilities may differ in their last bits, since the same
/// sums are taken in batches of another size.
fn assert_same(found: &[TokenEvent], expected: &[TokenEvent]) {
    assert_eq!(tokens(found), tokens(expected));
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.finish, expected.finish);
        assert!((found.log_probability - expected.log_probability).abs() < 1e-4);
        let likely = |event: &TokenEvent| event.top.iter().map(|(token, _)| *token).collect::<Vec<_>>();
        assert_eq!(likely(found), likely(expected));
    }
}

#[rstest]
fn answers_are_the_same(
    #[values(false, true)] late: bool,
    #[values(1, 4, 7)] tokens: usize,
    #[values(1, 3, 5)] at_once: usize,
    #[values(0.0, 0.2, 1.3)] temperature: f32,
) {
    let request = |index: u32| {
        let sampling = SamplingOptions { temperature, seed: index.into(), ..SamplingOptions::default() };
        Request { sampling, ..request(index) }
    };
    let mut engine = engine(some_device(late), &options(tokens, at_once));
    for round in 0..2 {
        let answers = run(&mut engine, (0..5).map(request).collect());
        for (answer, expected) in answers.iter().zip(alone((0..5).map(request))) {
            assert_eq!(answer.len(), TOKENS, "round {round}");
            assert_same(answer, &expected);
        }
    }
    let statistics = engine.statistics();
    assert!(statistics.accepted_tokens <= statistics.proposed_tokens);
    assert_eq!(statistics.generated_tokens, 2 * 5 * TOKENS as u64);
    // What is drawn at random seldom repeats itself.
    assert!(temperature > 1.0 || statistics.accepted_tokens > 40, "{statistics:?}");
}

#[test]
fn each_token_accepted_saves_a_step() {
    let mut engine = engine(device(), &options(7, 1));
    let answer = run(&mut engine, vec![request(0)]).remove(0);
    let statistics = engine.statistics();
    assert_eq!(answer.len() as u64, statistics.steps + statistics.accepted_tokens);
    assert!(statistics.accepted_tokens > 10, "{statistics:?}");
    assert!(statistics.proposed_tokens >= statistics.accepted_tokens);
}

#[test]
fn an_answer_ends_where_it_would_have_ended() {
    let whole = tokens(&alone([request(0)])[0]);
    let mut engine = engine(device(), &options(7, 1));
    for length in 1..=TOKENS {
        let request = Request { max_tokens: Some(length), ..request(0) };
        let answer = run(&mut engine, vec![request]).remove(0);
        assert_eq!(tokens(&answer), whole[..length]);
        let ends: Vec<_> = answer.iter().map(|event| event.finish).collect();
        assert_eq!(ends[length - 1], Some(FinishReason::Length));
        assert!(ends[..length - 1].iter().all(Option::is_none));
    }
    for stop in &whole {
        let first = whole.iter().position(|token| token == stop).unwrap();
        let request = Request { stop_ids: vec![*stop], ..request(0) };
        let answer = run(&mut engine, vec![request]).remove(0);
        assert_eq!(tokens(&answer), whole[..=first]);
        assert_eq!(answer[first].finish, Some(FinishReason::Stop));
    }
    assert!(engine.statistics().accepted_tokens > 0);
}

#[test]
fn stop_texts_end_an_answer_within_a_draft() {
    let model = || Model::open(fixtures().join("gguf/smollm2_f32/model.gguf")).unwrap();
    let pipeline = |tokens| {
        let model = model();
        let engine = support::engine(&model, &options(tokens, 1));
        Pipeline::with_engine(model, engine)
    };
    let (mut plain, mut speculating) = (pipeline(0), pipeline(7));
    let prompt = Prompt::Tokens(prompt(1));
    let whole =
        GenerateOptions { sampling: SamplingOptions::default(), max_tokens: Some(TOKENS), stop: vec![] };
    let text = plain.generate(&prompt, &whole).unwrap().text;
    let places: Vec<usize> = text.char_indices().map(|(place, _)| place).collect();
    let mut ended = 0;
    for (start, end) in places.iter().zip(&places[4.min(places.len())..]) {
        let options = GenerateOptions { stop: vec![text[*start..*end].to_owned()], ..whole.clone() };
        let [expected, found] =
            [&mut plain, &mut speculating].map(|pipeline| pipeline.generate(&prompt, &options).unwrap());
        assert_eq!((found.text, &found.tokens), (expected.text, &expected.tokens));
        assert_eq!(found.finish_reason, expected.finish_reason);
        ended += usize::from(found.finish_reason == FinishReason::Stop);
    }
    assert!(ended > 10, "{text:?}");
    assert!(speculating.engine().statistics().accepted_tokens > 0);
}

#[rstest]
fn what_can_be_checked_row_by_row_speculates(#[values(false, true)] late: bool) {
    let requests = || {
        let biased = Request { logit_bias: vec![(3, 4.0), (9, f32::NEG_INFINITY)], ..request(0) };
        let told = Request { top_log_probabilities: 5, ..request(1) };
        let long = Request { min_tokens: 30, ..request(2) };
        // What would end it may not come at first.
        let ends = vec![tokens(&alone([request(2)])[0])[3]];
        [biased, told, long, Request { min_tokens: 20, stop_ids: ends, ..request(2) }]
    };
    let mut engine = engine(some_device(late), &options(4, 3));
    let answers = run(&mut engine, requests().into());
    for (answer, expected) in answers.iter().zip(alone(requests())) {
        assert_same(answer, &expected);
    }
    assert!(engine.statistics().accepted_tokens > 0);
    for request in requests().into_iter().take(3) {
        let before = engine.statistics().proposed_tokens;
        run(&mut engine, vec![request]);
        assert!(engine.statistics().proposed_tokens > before);
    }
}

/// Allows everything.
#[derive(Debug)]
struct Anything;

impl Constraint for Anything {
    fn allow(&mut self, tokens: &mut [u32]) -> Result<(), ConstraintError> {
        tokens.fill(u32::MAX);
        Ok(())
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        Ok(())
    }
}

#[rstest]
fn what_depends_on_the_tokens_before_does_not(#[values(false, true)] late: bool) {
    let requests = || {
        let sampling = SamplingOptions { frequency_penalty: 0.4, ..SamplingOptions::default() };
        let penalised = Request { sampling, ..request(0) };
        [penalised, Request { constraint: Some(Box::new(Anything)), ..request(1) }]
    };
    let mut engine = engine(some_device(late), &options(4, 3));
    let answers = run(&mut engine, requests().into());
    assert_eq!(engine.statistics().proposed_tokens, 0);
    let others = run(&mut engine, requests().into_iter().chain([request(2)]).collect());
    assert!(engine.statistics().accepted_tokens > 0, "one that does runs beside them");
    for (index, expected) in alone(requests().into_iter().chain([request(2)])).iter().enumerate() {
        assert_same(&others[index], expected);
        answers.get(index).into_iter().for_each(|answer| assert_same(answer, expected));
    }
}

#[test]
fn those_that_all_wait_for_the_host_go_together() {
    // They come one after the other, so each would meet the others' steps under way.
    let steps = |device: Arc<dyn Device>| {
        let mut engine = engine(device, &options(0, 4));
        for index in 0..4 {
            let constraint: Option<Box<dyn Constraint>> = Some(Box::new(Anything));
            engine.submit(Request { constraint, ..request(index) }).unwrap();
            engine.step().unwrap();
        }
        while !engine.is_idle() {
            engine.step().unwrap();
        }
        engine.statistics().steps
    };
    assert_eq!(steps(some_device(true)), steps(some_device(false)));
}

#[rstest]
fn one_that_is_cancelled_leaves_nothing_behind(#[values(false, true)] late: bool) {
    let expected = tokens(&alone([request(1)])[0]);
    // Pages for one: the second waits for the first, and takes its pages over.
    let options = EngineOptions { kv_tokens: Some(104), ..options(7, 2) };
    for after in [0, 1, 2, 3, 10, 20, 21, 22, 23, 40] {
        let mut engine = engine(some_device(late), &options);
        let first = engine.submit(request(0)).unwrap();
        let second = engine.submit(request(1)).unwrap();
        let mut answer = Vec::new();
        for step in 0.. {
            if step == after {
                engine.cancel(first);
            }
            if engine.is_idle() {
                break;
            }
            let events = engine.step().unwrap().into_iter();
            assert!(step < after || events.clone().all(|event| event.request == second));
            answer.extend(events.filter(|event| event.request == second).map(|event| event.token));
        }
        assert_eq!(answer, expected, "cancelled after {after} steps");
        assert_eq!(engine.pages_in_use(), 0);
    }
}

#[test]
fn a_number_of_tokens_out_of_range_is_refused() {
    let model = model();
    for tokens in [0, Speculation::MOST_TOKENS + 1] {
        let speculation = Some(Speculation::Ngram { tokens });
        let options = EngineOptions { speculation, ..exact(32, 1) };
        let error = EnginePlan::new(&model, &*device(), &options).unwrap_err().to_string();
        assert!(error.contains("speculate") && error.contains("from 1 to 63"), "{error}");
    }
}
