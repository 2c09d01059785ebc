//! Requests with constraints, logit biases, minimum lengths and top log-probabilities: each option has its effect, and
//! concurrent requests are unaffected.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use dsrun_core::device::Device;
use dsrun_engine::{
    Constraint, ConstraintError, Engine, EngineError, EngineOptions, EnginePlan, FinishReason, Request,
    RequestId, SamplingOptions, TokenEvent,
    service::{Service, ServiceError, ServiceOptions},
};
use dsrun_models::model::Model;
use rstest::rstest;
use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};
use support::{device, exact, fixtures, late::LateDevice};

const VOCABULARY: u32 = 96;

fn prompt(index: u32) -> Vec<u32> {
    (0..5 + index * 3).map(|position| (position * 17 + index * 31 + 5) % VOCABULARY).collect()
}

fn request(index: u32) -> Request {
    Request { max_tokens: Some(12), ignore_end: true, ..Request::new(prompt(index)) }
}

fn engine(device: Arc<dyn Device>, options: &EngineOptions) -> Engine {
    let model = Model::open(fixtures().join("llama3")).unwrap();
    let plan = EnginePlan::new(&model, &*device, options).unwrap();
    plan.load(&model, device, &mut |_, _| {}).unwrap()
}

fn some_device(late: bool) -> Arc<dyn Device> {
    if late { LateDevice::open() } else { device() }
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
    ids.iter().map(|id| events.remove(id).unwrap_or_default()).collect()
}

fn tokens(events: &[TokenEvent]) -> Vec<u32> {
    events.iter().map(|event| event.token).collect()
}

/// The greedy answers to `request(0..3)`, each alone.
fn alone() -> Vec<Vec<u32>> {
    let mut engine = engine(device(), &exact(32, 1));
    (0..3).map(|index| tokens(&run(&mut engine, vec![request(index)])[0])).collect()
}

/// A constraint that allows only the next token of a text, and any token after it.
#[derive(Clone, Debug)]
struct Text {
    text: Vec<u32>,
    taken: Vec<u32>,
    /// The position at which the constraint fails, if it does.
    fails_at: Option<usize>,
}

impl Constraint for Text {
    fn allow(&mut self, tokens: &mut [u32]) -> Result<(), ConstraintError> {
        if self.fails_at == Some(self.taken.len()) {
            return Err(ConstraintError("a test wants it to".into()));
        }
        match self.text.get(self.taken.len()) {
            Some(token) => tokens[*token as usize / 32] |= 1 << (token % 32),
            None => tokens.fill(u32::MAX),
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.taken.push(token);
        Ok(())
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

fn text(text: &[u32], fails_at: Option<usize>) -> Option<Box<dyn Constraint>> {
    Some(Box::new(Text { text: text.to_vec(), taken: Vec::new(), fails_at }))
}

#[rstest]
fn a_constraint_limits_its_request_alone(
    #[values(false, true)] late: bool,
    #[values(64, 2000)] kv_tokens: usize,
) {
    let options = EngineOptions { kv_tokens: Some(kv_tokens), context: Some(40), ..exact(32, 3) };
    let mut engine = engine(some_device(late), &options);
    let words = [7, 95, 0, 64, 31, 32];
    let constrained = Request { constraint: text(&words, None), ..request(1) };
    let answers = run(&mut engine, vec![request(0), constrained, request(2)]);
    let alone = alone();
    assert_eq!((tokens(&answers[0]), tokens(&answers[2])), (alone[0].clone(), alone[2].clone()));
    assert_eq!(tokens(&answers[1])[..words.len()], words);
    assert_eq!(answers[1].len(), 12);
    // The only allowed token has probability 1.
    assert!(answers[1][..words.len()].iter().all(|event| event.log_probability.abs() < 1e-6));
}

/// A constraint that allows every token, but only once as many constraints as it asks for run at the same time.
#[derive(Clone, Debug)]
struct Together {
    /// The number of constraints that have begun in this step.
    begun: Arc<(Mutex<usize>, Condvar)>,
    wanted: usize,
}

impl Constraint for Together {
    fn allow(&mut self, tokens: &mut [u32]) -> Result<(), ConstraintError> {
        let (count, changed) = &*self.begun;
        let mut begun = count.lock().unwrap();
        *begun += 1;
        changed.notify_all();
        let (_begun, waited) =
            changed.wait_timeout_while(begun, Duration::from_secs(20), |begun| *begun < self.wanted).unwrap();
        tokens.fill(u32::MAX);
        if waited.timed_out() { Err(ConstraintError("it ran alone".into())) } else { Ok(()) }
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[test]
fn constraints_of_several_requests_run_at_the_same_time() {
    // The threads that they share; with one only, they run one after the other.
    let wanted = rayon::current_num_threads().min(2);
    let begun = Arc::new((Mutex::new(0), Condvar::new()));
    let constrained = |index: u32| {
        let constraint: Box<dyn Constraint> = Box::new(Together { begun: begun.clone(), wanted });
        Request { constraint: Some(constraint), max_tokens: Some(1), ..request(index) }
    };
    let mut engine = engine(device(), &exact(32, 3));
    let answers = run(&mut engine, (0..3).map(constrained).collect());
    assert!(engine.take_failures().is_empty());
    let alone = alone();
    let first = |answers: &[Vec<u32>]| answers.iter().map(|answer| answer[0]).collect::<Vec<_>>();
    assert_eq!(first(&answers.iter().map(|events| tokens(events)).collect::<Vec<_>>()), first(&alone));
}

#[rstest]
#[case::refuses(Some(2), &[3, 4, 5])]
#[case::allows_nothing(None, &[3, 4])]
fn a_failing_constraint_ends_its_request_alone(
    #[case] fails_at: Option<usize>,
    #[case] words: &[u32],
    #[values(false, true)] late: bool,
) {
    #[derive(Clone, Debug)]
    struct Nothing(Text);
    impl Constraint for Nothing {
        fn allow(&mut self, tokens: &mut [u32]) -> Result<(), ConstraintError> {
            if self.0.taken.len() < self.0.text.len() { self.0.allow(tokens) } else { Ok(()) }
        }
        fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
            self.0.accept(token)
        }
        fn clone_box(&self) -> Box<dyn Constraint> {
            Box::new(self.clone())
        }
    }
    let mut engine = engine(some_device(late), &exact(32, 3));
    let constraint: Box<dyn Constraint> =
        Box::new(Nothing(Text { text: words.to_vec(), taken: Vec::new(), fails_at }));
    let failing = Request { constraint: Some(constraint), ..request(1) };
    let answers = run(&mut engine, vec![request(0), failing, request(2)]);
    let failures = engine.take_failures();
    assert!(matches!(&failures[..], [(_, EngineError::Constraint(_))]), "{failures:?}");
    let alone = alone();
    assert_eq!((tokens(&answers[0]), tokens(&answers[2])), (alone[0].clone(), alone[2].clone()));
    assert_eq!(tokens(&answers[1]), words[..2]);
}

#[test]
fn the_service_reports_constraints_that_fail_or_panic() {
    #[derive(Debug)]
    struct Panics;
    impl Constraint for Panics {
        fn allow(&mut self, _: &mut [u32]) -> Result<(), ConstraintError> {
            panic!("a constraint of a test")
        }
        fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
            Ok(())
        }
        fn clone_box(&self) -> Box<dyn Constraint> {
            Box::new(Self)
        }
    }
    let service = Service::start(engine(device(), &exact(32, 3)), &ServiceOptions::default()).unwrap();
    let handle = service.handle();
    let mut failing = handle.submit(Request { constraint: text(&[3], Some(1)), ..request(0) }).unwrap();
    assert_eq!(failing.blocking_next().unwrap().unwrap().token, 3);
    let error = failing.blocking_next().unwrap().unwrap_err();
    assert!(
        matches!(&error, ServiceError::Request(error) if error.to_string().contains("a test wants it to"))
    );
    assert!(failing.blocking_next().is_none());
    let mut panics = handle.submit(Request { constraint: Some(Box::new(Panics)), ..request(0) }).unwrap();
    let error = panics.blocking_next().unwrap().unwrap_err();
    assert!(error.to_string().contains("a constraint of a test"), "{error}");
    service.stop(Duration::from_secs(60)).unwrap();
}

#[rstest]
fn a_logit_bias_changes_its_request_alone(#[values(false, true)] late: bool) {
    let mut engine = engine(some_device(late), &exact(32, 3));
    let alone = alone();
    let wanted = Request { logit_bias: [(40, 1e4)].into(), ..request(1) };
    let answers = run(&mut engine, vec![request(0), wanted, request(2)]);
    assert_eq!(tokens(&answers[1]), [40; 12]);
    assert_eq!((tokens(&answers[0]), tokens(&answers[2])), (alone[0].clone(), alone[2].clone()));
    // More requests than table rows, one of them with another bias.
    let forbidden = alone[1].iter().map(|token| (*token, f32::NEG_INFINITY)).collect();
    let other = Request { logit_bias: forbidden, ..request(1) };
    let answers = run(&mut engine, vec![other, request(0), request(1), request(2)]);
    assert!(tokens(&answers[0]).iter().all(|token| !alone[1].contains(token)));
    assert_eq!(answers[1..].iter().map(|events| tokens(events)).collect::<Vec<_>>(), alone);
}

#[rstest]
fn an_answer_has_at_least_min_tokens(#[values(false, true)] late: bool) {
    let mut engine = engine(some_device(late), &exact(32, 3));
    let alone = alone();
    let stop = alone[0][2];
    let first = alone[0].iter().position(|token| *token == stop).unwrap();
    let ends = |min_tokens| Request { stop_ids: vec![stop], min_tokens, ..request(0) };
    let answers = run(&mut engine, vec![ends(0), ends(6), request(2)]);
    assert_eq!(tokens(&answers[0]), alone[0][..=first]);
    assert_eq!(answers[0].last().unwrap().finish, Some(FinishReason::Stop));
    assert_eq!(tokens(&answers[1])[..first], alone[0][..first]);
    assert!(answers[1].len() > 6 && !tokens(&answers[1])[..6].contains(&stop));
    assert_eq!(tokens(&answers[2]), alone[2]);
}

#[rstest]
fn top_log_probabilities_match_the_logits(#[values(false, true)] late: bool) {
    let mut engine = engine(some_device(late), &exact(32, 3));
    let alone = alone();
    let wants = |index, top| Request { top_log_probabilities: top, ..request(index) };
    let answers = run(&mut engine, vec![wants(0, 5), wants(1, 0), wants(2, 2)]);
    for (index, (events, top)) in answers.iter().zip([5, 0, 2]).enumerate() {
        assert_eq!(tokens(events), alone[index]);
        let text: Vec<u32> = prompt(index as u32).into_iter().chain(tokens(events)).collect();
        let logits = support::logits(&mut engine, &text);
        for (step, event) in events.iter().enumerate() {
            let logits = &logits[prompt(index as u32).len() - 1 + step];
            let mut order: Vec<u32> = (0..VOCABULARY).collect();
            order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            assert_eq!(event.top.len(), top);
            for ((token, log_probability), expected) in event.top.iter().zip(&order) {
                assert_eq!(token, expected);
                let expected = dsrun_engine::log_probability(logits, *token);
                // The same logits, summed in f32 on the device.
                assert!((f64::from(*log_probability) - expected).abs() < 1e-4);
            }
        }
    }
}

#[test]
fn invalid_options_are_refused_by_name() {
    let mut engine = engine(device(), &exact(32, 1));
    let mut refused = |request: Request| engine.submit(request).unwrap_err().to_string();
    let sampling = SamplingOptions { top_p: 0.0, ..SamplingOptions::default() };
    for (request, name) in [
        (Request { min_tokens: 13, ..request(0) }, "min-tokens"),
        (Request { top_log_probabilities: 65, ..request(0) }, "top-logprobs"),
        (Request { logit_bias: [(96, 1.0)].into(), ..request(0) }, "token 96"),
        (Request { logit_bias: [(9, f32::NAN)].into(), ..request(0) }, "logit-bias"),
        (Request { logit_bias: [(9, f32::INFINITY)].into(), ..request(0) }, "logit-bias"),
        (Request { sampling, ..request(0) }, "top-p"),
    ] {
        let error = refused(request);
        assert!(error.starts_with(name), "{error}");
    }
}
