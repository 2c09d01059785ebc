//! Drawing tokens.

use crate::{
    kernels::Kernel,
    tensor::{CPU, Result, rows, store},
};
use candle_core::Tensor;
use dsrun_core::op::{Sample, SamplingColumn};
use dsrun_host::{Frame, uniform};

impl Kernel for Sample {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let (logits, requests) = (frame.input::<f32>(0)?, frame.input::<i32>(1)?);
        let (positions, parameters) = (frame.input::<i32>(2)?, frame.input::<f32>(3)?);
        let seeds = frame.input::<u32>(4)?;
        let capacity = parameters.rows.min(seeds.rows);
        let (mut ids, mut log_probabilities) = (Vec::new(), Vec::new());
        for row in 0..rows(frame, &[0, 1, 2], &[0, 1]) {
            let logits = logits.row(row);
            let token = requests.index(row, capacity).and_then(|request| {
                let filters = Filters::new(parameters.row(request));
                let &[first, second] = seeds.row(request) else { return None };
                draw(logits, &filters, [first, second], positions.at(row) as u32)
            });
            ids.push(token.map_or(-1, |token| token as i64));
            log_probabilities.push(token.map_or(0.0, |token| log_softmax(logits, token) as f32));
        }
        let rows = ids.len();
        store(frame, 0, &Tensor::from_vec(ids, rows, CPU)?)?;
        store(frame, 1, &Tensor::from_vec(log_probabilities, rows, CPU)?)
    }
}

/// A request's temperature and filters.
#[derive(Clone, Copy, Debug)]
struct Filters {
    temperature: f64,
    top_k: usize,
    top_p: f64,
    min_p: f64,
}

impl Filters {
    fn new(parameters: &[f32]) -> Self {
        let column = |column: SamplingColumn| f64::from(parameters[column as usize]);
        Self {
            temperature: column(SamplingColumn::Temperature),
            // Casts saturate, and NaN becomes 0.
            top_k: column(SamplingColumn::TopK) as usize,
            top_p: column(SamplingColumn::TopP),
            min_p: column(SamplingColumn::MinP),
        }
    }
}

/// The token drawn from a row of logits; `None` if no token is left.
fn draw(logits: &[f32], filters: &Filters, seed: [u32; 2], position: u32) -> Option<usize> {
    let logit = |token: usize| f64::from(logits[token]);
    // Largest first, lower ids first among equals; NaN and minus infinity are never drawn.
    let mut kept: Vec<usize> = (0..logits.len()).filter(|token| logits[*token] > f32::NEG_INFINITY).collect();
    kept.sort_by(|a, b| logit(*b).total_cmp(&logit(*a)).then(a.cmp(b)));
    let largest = logit(*kept.first()?);
    if filters.temperature <= 0.0 || filters.temperature.is_nan() {
        return kept.first().copied();
    }
    // x relative to the largest, which takes nothing from the differences; infinity less infinity is no number.
    let x = |token: usize| {
        if logit(token) == largest { 0.0 } else { (logit(token) - largest) / filters.temperature }
    };
    if filters.top_k > 0 {
        kept.truncate(filters.top_k);
    }
    if filters.top_p < 1.0 {
        let wanted = filters.top_p * kept.iter().map(|token| x(*token).exp()).sum::<f64>();
        let mut sum = 0.0;
        let reached = kept.iter().position(|token| {
            sum += x(*token).exp();
            sum >= wanted
        });
        kept.truncate(reached.map_or(kept.len(), |index| index + 1));
    }
    if filters.min_p > 0.0 {
        let likeliest = kept[0];
        kept.retain(|token| *token == likeliest || x(*token).exp() >= filters.min_p);
    }
    let score = |token: usize| x(token) + gumbel(uniform(seed, token as u32, position));
    let scored = kept.into_iter().map(|token| (token, score(token)));
    scored.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0))).map(|(token, _)| token)
}

/// The Gumbel number `-ln(-ln(1 - v))` of a random number `v`.
fn gumbel(v: f64) -> f64 {
    -(-(-v).ln_1p()).ln()
}

/// `ln softmax(logits)[token]`; NaN counts as minus infinity.
fn log_softmax(logits: &[f32], token: usize) -> f64 {
    let numbers = || logits.iter().filter(|logit| !logit.is_nan()).map(|logit| f64::from(*logit));
    let largest = numbers().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = numbers().map(|logit| (logit - largest).exp()).sum();
    f64::from(logits[token]) - largest - sum.ln()
}
