//! Speculation: answers match those without speculation and take fewer steps.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::{
    DType, WeightFormat,
    device::{Backend, Device, DeviceOptions},
};
use dsrun_engine::{
    Constraint, ConstraintError, Engine, EngineError, EngineOptions, EnginePlan, FinishReason,
    GenerateOptions, Pipeline, Prompt, Request, RequestId, SamplingOptions, Speculation, TokenEvent,
};
use dsrun_models::model::Model;
use rstest::rstest;
use std::{collections::HashMap, path::PathBuf, sync::Arc};
use support::{device, exact, fixtures, late::LateDevice};

const TOKENS: usize = 80;

/// A model whose answers repeat themselves now and then.
fn model() -> Model {
    Model::open(fixtures().join("qwen2_5")).unwrap()
}

/// A source of proposed tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Ngram,
    /// A draft model equal to the target model: always right.
    Own,
    /// A draft model with other random weights and half the context: hardly ever right.
    Other,
}

impl Source {
    /// The draft model of the source, if it has one.
    fn draft(self) -> Option<Arc<Model>> {
        let mut config = model().config().clone();
        config.context /= 2;
        let other = || Model::random("another", config, 1, WeightFormat::Dense(DType::F32)).unwrap();
        match self {
            Self::Ngram => None,
            Self::Own => Some(Arc::new(model())),
            Self::Other => Some(Arc::new(other())),
        }
    }
}

fn engine(device: Arc<dyn Device>, options: &EngineOptions) -> Engine {
    engine_with(device, Source::Ngram, options)
}

/// An engine whose proposals come from the source, if it speculates.
fn engine_with(device: Arc<dyn Device>, source: Source, options: &EngineOptions) -> Engine {
    drafting(&model(), source.draft(), device, options)
}

fn drafting(
    model: &Model,
    draft: Option<Arc<Model>>,
    device: Arc<dyn Device>,
    options: &EngineOptions,
) -> Engine {
    let plan = match draft {
        None => EnginePlan::new(model, &*device, options).unwrap(),
        Some(draft) => {
            let speculation = options.speculation.map(|how| Speculation::Draft { tokens: how.tokens() });
            let options = EngineOptions { speculation, ..options.clone() };
            EnginePlan::with_draft(model, &draft, &*device, &options).unwrap()
        }
    };
    plan.load(model, device, &mut |_, _| {}).unwrap()
}

fn some_device(late: bool) -> Arc<dyn Device> {
    if late { LateDevice::open() } else { device() }
}

/// Options with a number of proposed tokens; 0 turns speculation off.
fn options(tokens: usize, requests: usize) -> EngineOptions {
    let speculation = (tokens > 0).then_some(Speculation::Ngram { tokens });
    EngineOptions { speculation, ignore_end: true, context: Some(128), ..exact(32, requests) }
}

/// A prompt that repeats itself.
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
    assert_nothing_held(engine);
    assert!(engine.take_failures().is_empty());
    ids.iter().map(|id| events.remove(id).unwrap_or_default()).collect()
}

fn assert_nothing_held(engine: &Engine) {
    assert_eq!(engine.pages_in_use(), 0);
    assert_eq!(engine.draft_statistics().map_or(0, |draft| draft.pages_in_use), 0);
}

fn tokens(events: &[TokenEvent]) -> Vec<u32> {
    events.iter().map(|event| event.token).collect()
}

/// The answers to some requests without speculation, each alone.
fn alone(requests: impl IntoIterator<Item = Request>) -> Vec<Vec<TokenEvent>> {
    let mut engine = engine(device(), &options(0, 1));
    requests.into_iter().map(|request| run(&mut engine, vec![request]).remove(0)).collect()
}

/// Compares answers: tokens, reasons for their end, and log-probabilities, which may differ in their last bits because batches
/// of another size sum in another order.
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
fn speculation_does_not_change_answers(
    #[values(Source::Ngram, Source::Own, Source::Other)] source: Source,
    #[values(false, true)] late: bool,
    #[values(1, 4, 7)] tokens: usize,
    #[values(1, 3, 5)] at_once: usize,
    #[values(0.0, 0.2, 1.3)] temperature: f32,
) {
    let request = |index: u32| {
        let sampling = SamplingOptions { temperature, seed: index.into(), ..SamplingOptions::default() };
        Request { sampling, ..request(index) }
    };
    let mut engine = engine_with(some_device(late), source, &options(tokens, at_once));
    for round in 0..2 {
        let answers = run(&mut engine, (0..5).map(request).collect());
        for (answer, expected) in answers.iter().zip(alone((0..5).map(request))) {
            assert_eq!(answer.len(), TOKENS, "round {round}");
            assert_same(answer, &expected);
        }
    }
    let statistics = engine.statistics();
    let (proposed, accepted) = (statistics.proposed_tokens, statistics.accepted_tokens);
    assert!(accepted <= proposed);
    assert_eq!(statistics.generated_tokens, 2 * 5 * TOKENS as u64);
    match source {
        // At a high temperature answers seldom repeat themselves.
        Source::Ngram => assert!(temperature > 1.0 || accepted > 40, "{statistics:?}"),
        // Equal seeds sample equal tokens, so the draft is right at any temperature, except where batches of another size
        // differ in the last bits of a sum.
        Source::Own => assert!(proposed > 300 && accepted * 100 >= proposed * 99, "{statistics:?}"),
        // A draft model that is often wrong is asked seldom.
        Source::Other => assert!((30..400).contains(&proposed), "{statistics:?}"),
    }
}

#[rstest]
fn every_accepted_token_saves_a_step(#[values(Source::Ngram, Source::Own)] source: Source) {
    let mut engine = engine_with(device(), source, &options(7, 1));
    let answer = run(&mut engine, vec![request(0)]).remove(0);
    let statistics = engine.statistics();
    assert_eq!(answer.len() as u64, statistics.steps + statistics.accepted_tokens);
    // The prompt gives one token, and with a draft that is always right each step gives 8.
    assert!(source == Source::Ngram || statistics.steps == 1 + 79u64.div_ceil(8), "{statistics:?}");
    assert!(statistics.accepted_tokens > 10, "{statistics:?}");
    assert!(statistics.proposed_tokens >= statistics.accepted_tokens);
}

#[rstest]
fn answers_end_at_the_same_token(#[values(Source::Ngram, Source::Own)] source: Source) {
    let whole = tokens(&alone([request(0)])[0]);
    let mut engine = engine_with(device(), source, &options(7, 1));
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
fn stop_strings_end_an_answer_within_a_draft() {
    let model = || Model::open(gguf("smollm2_f32")).unwrap();
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
fn requests_verifiable_row_by_row_speculate(
    #[values(Source::Ngram, Source::Own)] source: Source,
    #[values(false, true)] late: bool,
) {
    let requests = || {
        let biased = Request { logit_bias: [(3, 4.0), (9, f32::NEG_INFINITY)].into(), ..request(0) };
        let told = Request { top_log_probabilities: 5, ..request(1) };
        let long = Request { min_tokens: 30, ..request(2) };
        // An end token that the minimum length forbids at first.
        let ends = vec![tokens(&alone([request(2)])[0])[3]];
        [biased, told, long, Request { min_tokens: 20, stop_ids: ends, ..request(2) }]
    };
    let mut engine = engine_with(some_device(late), source, &options(4, 3));
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

/// A constraint that allows every token.
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

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(Self)
    }
}

#[rstest]
fn requests_that_depend_on_previous_tokens_do_not_speculate(
    #[values(Source::Ngram, Source::Own)] source: Source,
    #[values(false, true)] late: bool,
) {
    let requests = || {
        let sampling = SamplingOptions { frequency_penalty: 0.4, ..SamplingOptions::default() };
        let penalised = Request { sampling, ..request(0) };
        [penalised, Request { constraint: Some(Box::new(Anything)), ..request(1) }]
    };
    let mut engine = engine_with(some_device(late), source, &options(4, 3));
    let answers = run(&mut engine, requests().into());
    assert_eq!(engine.statistics().proposed_tokens, 0);
    assert_eq!(engine.draft_statistics().map_or(0, |draft| draft.steps), 0);
    let others = run(&mut engine, requests().into_iter().chain([request(2)]).collect());
    assert!(engine.statistics().accepted_tokens > 0, "a concurrent request without them speculates");
    for (index, expected) in alone(requests().into_iter().chain([request(2)])).iter().enumerate() {
        assert_same(&others[index], expected);
        answers.get(index).into_iter().for_each(|answer| assert_same(answer, expected));
    }
}

#[test]
fn requests_that_wait_for_the_host_share_a_step() {
    // The requests arrive one after the other, while steps of the others are in flight.
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
fn a_cancelled_request_leaves_nothing_behind(
    #[values(Source::Ngram, Source::Own, Source::Other)] source: Source,
    #[values(false, true)] late: bool,
) {
    let expected = tokens(&alone([request(1)])[0]);
    // Pages for one request: the second waits for the first and reuses its pages.
    let options = EngineOptions { kv_tokens: Some(104), ..options(7, 2) };
    for after in [0, 1, 2, 3, 10, 20, 21, 22, 23, 40] {
        let mut engine = engine_with(some_device(late), source, &options);
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
        assert_nothing_held(&engine);
    }
}

#[test]
fn an_invalid_number_of_tokens_is_refused() {
    let model = model();
    for tokens in [0, Speculation::MAX_TOKENS + 1] {
        let speculation = Some(Speculation::Ngram { tokens });
        let options = EngineOptions { speculation, ..exact(32, 1) };
        let error = EnginePlan::new(&model, &*device(), &options).unwrap_err().to_string();
        assert!(error.contains("speculate") && error.contains("from 1 to 63"), "{error}");
    }
}

#[rstest]
fn preempted_requests_speculate_again(
    #[values(Source::Own, Source::Other)] source: Source,
    #[values(false, true)] late: bool,
    #[values(0, 256)] swap_tokens: usize,
) {
    // Pages for one and a half requests.
    let options = EngineOptions { kv_tokens: Some(192), swap_tokens, ..options(4, 4) };
    let mut engine = engine_with(some_device(late), source, &options);
    let answers = run(&mut engine, (0..5).map(request).collect());
    for (answer, expected) in answers.iter().zip(alone((0..5).map(request))) {
        assert_same(answer, &expected);
    }
    let statistics = engine.statistics();
    assert!(statistics.preemptions > 0 && statistics.proposed_tokens > 0, "{statistics:?}");
    assert!(source == Source::Other || statistics.accepted_tokens > 100, "{statistics:?}");
}

fn gguf(name: &str) -> PathBuf {
    fixtures().join("gguf").join(name).join("model.gguf")
}

/// The models of two files with the same weights, those of the second quantised to 4-bit blocks.
fn rounded() -> [Model; 2] {
    ["smollm2_f32", "smollm2_q4_0"].map(|name| Model::open(gguf(name)).unwrap())
}

#[rstest]
fn a_draft_continues_after_its_accepted_tokens(
    #[values(0.0, 0.7)] temperature: f32,
    #[values(1, 4, 6)] most: usize,
) {
    let [model, draft] = rounded();
    let request = |index: u32, more: &[u32], max_tokens: usize| {
        let sampling = SamplingOptions { temperature, seed: index.into(), ..SamplingOptions::default() };
        Request { sampling, max_tokens: Some(max_tokens), ..Request::new([&prompt(index), more].concat()) }
    };
    let mut plain = support::engine(&model, &options(0, 1));
    let mut guessing = support::engine(&draft, &options(0, 1));
    let mut engine = drafting(&model, Some(Arc::new(draft)), device(), &options(most, 1));
    for index in 0..4 {
        let whole = tokens(&run(&mut plain, vec![request(index, &[], TOKENS)])[0]);
        engine.submit(request(index, &[], TOKENS)).unwrap();
        let mut answer = Vec::new();
        while !engine.is_idle() {
            let (before, place) = (engine.statistics().clone(), answer.len());
            answer.extend(engine.step().unwrap().iter().map(|event| event.token));
            let after = engine.statistics();
            let count = (after.proposed_tokens - before.proposed_tokens) as usize;
            assert!(count <= most);
            if count > 0 {
                // The continuation by the draft model itself.
                let guess = run(&mut guessing, vec![request(index, &whole[..place], count)]).remove(0);
                let pairs = tokens(&guess).into_iter().zip(&whole[place..]);
                let right = pairs.take_while(|(guess, token)| guess == *token).count();
                assert_eq!(after.accepted_tokens - before.accepted_tokens, right as u64, "of {count}");
            }
        }
        assert_eq!(answer, whole);
    }
    let statistics = engine.statistics();
    let (proposed, accepted) = (statistics.proposed_tokens, statistics.accepted_tokens);
    assert!(accepted > 0 && accepted < proposed, "{accepted} of {proposed}");
}

#[test]
fn drafting_takes_at_most_one_step_per_token_even_for_a_long_prompt() {
    // With 8 tokens a step, the prompt takes several steps.
    let options = EngineOptions { step_tokens: 8, ..options(2, 2) };
    let long = || Request { max_tokens: Some(20), ..Request::new(prompt(9)) };
    let mut engine = engine_with(device(), Source::Own, &options);
    let ids = [request(0), long()].map(|request| engine.submit(request).unwrap());
    let (mut answers, mut before) = ([Vec::new(), Vec::new()], 0);
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            answers[usize::from(event.request == ids[1])].push(event.token);
        }
        let steps = engine.draft_statistics().unwrap().steps;
        assert!(steps <= before + 2, "{before} to {steps}");
        before = steps;
    }
    let expected = alone([request(0), long()]);
    assert_eq!(answers, [tokens(&expected[0]), tokens(&expected[1])]);
    assert!(engine.statistics().accepted_tokens > 0);
}

#[test]
fn nothing_is_drafted_without_room_in_the_step() {
    // As many requests as a step has tokens leave no room for proposals.
    let options = EngineOptions { step_tokens: 4, ..options(4, 4) };
    let mut engine = engine_with(device(), Source::Own, &options);
    let short = |index: u32| Request { max_tokens: Some(8), ..Request::new(vec![index + 1, 5, 7]) };
    let mut ids = Vec::new();
    for index in 0..4 {
        ids.push(engine.submit(short(index)).unwrap());
    }
    let mut together = 0;
    while !engine.is_idle() {
        let events = engine.step().unwrap();
        together += usize::from(ids.iter().all(|id| events.iter().any(|event| event.request == *id)));
        ids.retain(|id| !events.iter().any(|event| event.request == *id && event.finish.is_some()));
        if ids.len() < 4 {
            break;
        }
    }
    assert!(together > 4);
    assert_eq!(engine.statistics().proposed_tokens, 0);
}

#[test]
fn the_draft_model_reuses_cached_prefixes() {
    let mut engine = engine_with(device(), Source::Own, &options(4, 1));
    for _ in 0..2 {
        run(&mut engine, vec![request(8)]);
    }
    let hits = engine.draft_statistics().unwrap().prefix_hit_tokens;
    assert!(hits as usize >= prompt(8).len() - 8, "{hits}");
}

#[test]
fn the_draft_model_is_part_of_the_memory_plan() {
    let (device, model) = (device(), model());
    let options = EngineOptions { speculation: Some(Speculation::Draft { tokens: 4 }), ..options(0, 3) };
    for (source, share) in [(Source::Own, 1), (Source::Other, 2)] {
        let draft = source.draft().unwrap();
        let plan = EnginePlan::with_draft(&model, &draft, &*device, &options).unwrap();
        let (memory, own) = (plan.memory(), plan.memory().draft.as_ref().unwrap());
        assert_eq!((own.kv_tokens * share, own.kv_cache * share), (memory.kv_tokens, memory.kv_cache));
        let parts =
            memory.weights + memory.kv_cache + memory.requests + memory.activations + memory.workspace;
        assert_eq!(memory.total(), parts + own.total());
        assert!(memory.to_string().contains("draft model's KV cache"), "{memory}");
    }
}

#[test]
fn both_caches_shrink_if_memory_is_short() {
    let (model, draft) = (model(), Source::Own.draft().unwrap());
    let options = EngineOptions { speculation: Some(Speculation::Draft { tokens: 4 }), ..options(0, 8) };
    let open = |memory_limit| {
        let limited = DeviceOptions { memory_limit, ..DeviceOptions::default() };
        dsrun_cpu::CpuBackend::new().open(0, &limited).unwrap()
    };
    let plan = |device: &dyn Device| EnginePlan::with_draft(&model, &draft, device, &options).unwrap();
    let whole = plan(&*open(None)).memory().clone();
    let device = open(Some(whole.total() - whole.kv_cache));
    let plan = plan(&*device);
    let (memory, own) = (plan.memory().clone(), plan.memory().draft.clone().unwrap());
    assert_eq!(memory.missing(), None, "{memory}");
    assert_eq!(memory.kv_tokens, own.kv_tokens);
    assert!(memory.kv_tokens * 4 > whole.kv_tokens && memory.kv_tokens * 2 <= whole.kv_tokens, "{memory}");
    let mut engine = plan.load(&model, device, &mut |_, _| {}).unwrap();
    let answers = run(&mut engine, (0..8).map(request).collect());
    for (answer, expected) in answers.iter().zip(alone((0..8).map(request))) {
        assert_same(answer, &expected);
    }
    let statistics = engine.statistics();
    assert!(statistics.accepted_tokens * 100 >= statistics.proposed_tokens * 99, "{statistics:?}");
}

#[test]
fn an_incompatible_draft_model_is_refused() {
    let (device, model) = (device(), Arc::new(model()));
    let plan = |draft: &Arc<Model>, speculation| {
        let options = EngineOptions { speculation, ..exact(32, 1) };
        EnginePlan::with_draft(&model, draft, &*device, &options).unwrap_err().to_string()
    };
    let draft = Some(Speculation::Draft { tokens: 4 });
    for wrong in [None, Some(Speculation::Ngram { tokens: 4 })] {
        let error = plan(&model, wrong);
        assert!(error.contains("speculate") && error.contains("must be `draft`"), "{error}");
    }
    let options = EngineOptions { speculation: draft, ..exact(32, 1) };
    let error = EnginePlan::new(&model, &*device, &options).unwrap_err().to_string();
    assert!(error.contains("draft:4") && error.contains("needs a draft model"), "{error}");

    let mut config = model.config().clone();
    config.vocabulary += 1;
    let larger = Model::random("larger", config, 1, WeightFormat::Dense(DType::F32)).unwrap();
    let error = plan(&Arc::new(larger), draft);
    assert!(error.contains("it has 97 tokens instead of 96"), "{error}");
    assert!(error.contains("larger cannot propose") && error.contains("the same tokenizer"), "{error}");
}

#[test]
fn a_draft_model_with_other_tokens_is_refused() {
    let [model, same] = rounded();
    let options = EngineOptions { speculation: Some(Speculation::Draft { tokens: 4 }), ..exact(32, 1) };
    let plan = |draft| EnginePlan::with_draft(&model, &Arc::new(draft), &*device(), &options);
    assert!(plan(same).is_ok());
    // The same file with another text for one token.
    let mut bytes = std::fs::read(gguf("smollm2_q4_0")).unwrap();
    let places: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(b"<|im_end|>")).collect();
    places.iter().for_each(|at| bytes[*at..*at + 10].copy_from_slice(b"<|im_fin|>"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other.gguf");
    std::fs::write(&path, bytes).unwrap();
    let error = plan(Model::open(path).unwrap()).unwrap_err();
    let reason = r#"its token 2 is "<|im_fin|>" instead of "<|im_end|>""#;
    assert!(matches!(&error, EngineError::Draft { reason: found, .. } if found == reason), "{error}");
}
