//! A backend against the reference over a whole model, in f32.

use dsrun_candle::CandleBackend;
use dsrun_core::device::{Backend, Device, DeviceOptions};
use dsrun_engine::{Engine, EngineOptions, EnginePlan, Precision, Request, SamplingOptions};
use dsrun_models::model::Model;
use std::sync::Arc;

/// The longest text, of a prompt and its answer; some models of the tests end earlier.
const CONTEXT: usize = 96;

fn engine(model: &Model, backend: &dyn Backend) -> Engine {
    let device: Arc<dyn Device> = backend.open(0, &DeviceOptions::default()).unwrap();
    let options = EngineOptions {
        precision: Precision::F32,
        max_requests: 2,
        step_tokens: 16,
        context: Some(CONTEXT.min(model.config().context)),
        ..EngineOptions::default()
    };
    let plan = EnginePlan::new(model, &*device, &options).unwrap();
    plan.load(model, device, &mut |_, _| {}).unwrap()
}

/// Greedy tokens of two prompts side by side, and all logits of a text.
fn answers(model: &Model, backend: &dyn Backend) -> (Vec<Vec<u32>>, Vec<f32>) {
    let mut engine = engine(model, backend);
    let vocabulary = model.config().vocabulary as u32;
    let prompt = |length: u32, step: u32| (0..length).map(|index| (index * step + 11) % vocabulary).collect();
    let prompts: [Vec<u32>; 2] = [prompt(40, 37), prompt(7, 101)];
    let mut logits = Vec::new();
    engine.score(&prompts[0], &mut |_, row| logits.extend_from_slice(row)).unwrap();
    let submitted = prompts.map(|prompt| {
        let left = model.config().context - prompt.len();
        let request = Request {
            prompt,
            sampling: SamplingOptions::default(),
            max_tokens: Some(left.min(24)),
            ..Request::default()
        };
        engine.submit(request).unwrap()
    });
    let mut tokens = vec![Vec::new(); submitted.len()];
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            let request = submitted.iter().position(|id| *id == event.request).unwrap();
            tokens[request].push(event.token);
        }
    }
    (tokens, logits)
}

/// Checks a backend against the reference. Two f32 backends differ by the order of their sums, through all layers: logits by
/// at most 1e-4 of the largest, tokens not at all on these prompts.
pub(crate) fn agrees_with_the_reference(model: &Model, backend: &dyn Backend) {
    let (expected, expected_logits) = answers(model, &CandleBackend::new());
    let (tokens, logits) = answers(model, backend);
    assert_eq!(tokens, expected);
    let largest = expected_logits.iter().fold(0f32, |largest, logit| largest.max(logit.abs()));
    assert_eq!(logits.len(), expected_logits.len());
    for (index, (logit, expected)) in logits.iter().zip(&expected_logits).enumerate() {
        // Written so that NaN fails.
        let close = (logit - expected).abs() <= 1e-4 * largest;
        assert!(close, "logit {index} is {logit} instead of {expected}, and the largest {largest}");
    }
}
