//! Drawing tokens.

use super::sampling::largest;
use crate::{
    floats::{FloatOutput, FloatsMut},
    kernel::Kernel,
    parallel::Worker,
    simd::{exp_shifted, sum_exp_shifted},
};
use dsrun_core::{
    Result,
    op::{Sample, SamplingColumn},
};
use dsrun_host::{Frame, Tensor};
use std::cmp::Ordering;

/// No Gumbel number is larger: `g` is largest for the smallest `v`, `2^-33`, and is `33 ln 2` there.
const LARGEST_GUMBEL: f64 = 22.9;

/// Tokens whose scores are bounded at a time.
const BLOCK: usize = 64;

impl Kernel for Sample {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (logits, requests) = (frame.input::<f32>(0)?, frame.input::<i32>(1)?);
        let (positions, parameters) = (frame.input::<i32>(2)?, frame.input::<f32>(3)?);
        let seeds = frame.input::<u32>(4)?;
        let (mut ids, mut log_probability) = (frame.output::<i32>(0)?, frame.output::<f32>(1)?);
        let capacity = parameters.rows.min(seeds.rows);
        let rows = [logits.rows, requests.rows, positions.rows, ids.rows, log_probability.rows];
        let rows = rows.into_iter().fold(usize::MAX, usize::min);

        // Threads put id and log probability side by side; they are sorted into the two results below.
        worker.outputs.resize(worker.outputs.len().max(2 * rows), 0.0);
        let drawn = FloatsMut::F32(&mut worker.outputs[..2 * rows]);
        let drawn = Tensor { data: drawn, shape: &[rows, 2], strides: &[2, 1], rows };
        let cost = logits.width().saturating_mul(8);
        drawn.fill_rows(&mut worker.team, rows, cost, |row, out, lane| {
            let logits = logits.row(row);
            let token = requests.index(row, capacity).and_then(|request| {
                let parameters = Parameters::new(parameters.row(request));
                let &[first, second] = seeds.row(request) else { return None };
                let [order] = lane.split([logits.len()]);
                let draw = Draw { logits, key: [first, second], position: positions.at(row) as u32 };
                draw.token(&parameters, bytemuck::cast_slice_mut(order))
            });
            let (id, log_probability) = match token {
                Some(token) => (token as i32, log_softmax(logits, token)),
                None => (-1, 0.0),
            };
            out.copy_from_slice(&[f32::from_bits(id as u32), log_probability]);
        });
        for (row, [id, log]) in worker.outputs.as_chunks::<2>().0.iter().take(rows).enumerate() {
            *ids.at_mut(row) = id.to_bits() as i32;
            *log_probability.at_mut(row) = *log;
        }
        Ok(())
    }
}

/// `ln softmax(logits)[token]`; NaN counts as minus infinity.
fn log_softmax(logits: &[f32], token: usize) -> f32 {
    let best = largest(logits).map_or(0.0, |(_, best)| best);
    (logits[token] - best) - sum_exp_shifted(logits, best).ln()
}

/// A request's filters.
#[derive(Clone, Copy, Debug)]
struct Parameters {
    temperature: f64,
    /// `None` keeps all.
    top_k: Option<usize>,
    /// `None` keeps all.
    top_p: Option<f64>,
    min_p: f64,
}

impl Parameters {
    fn new(row: &[f32]) -> Self {
        let column = |column: SamplingColumn| f64::from(row[column as usize]);
        let (top_k, top_p) = (column(SamplingColumn::TopK), column(SamplingColumn::TopP));
        Self {
            temperature: column(SamplingColumn::Temperature),
            // Casts saturate, and NaN becomes 0.
            top_k: Some(top_k as usize).filter(|k| *k > 0),
            top_p: Some(top_p).filter(|p| *p < 1.0),
            min_p: column(SamplingColumn::MinP),
        }
    }
}

/// One draw from a row of logits.
struct Draw<'a> {
    logits: &'a [f32],
    key: [u32; 2],
    position: u32,
}

impl Draw<'_> {
    /// The token, or `None` if no token can be drawn. `order` is scratch memory, one number per logit.
    fn token(&self, parameters: &Parameters, order: &mut [u32]) -> Option<usize> {
        let (favourite, best) = largest(self.logits)?;
        if best == f32::NEG_INFINITY {
            return None;
        }
        if parameters.temperature <= 0.0 || parameters.temperature.is_nan() {
            return Some(favourite);
        }
        let scale = Scale { best: f64::from(best), temperature: parameters.temperature };
        let mut race = Race { draw: self, scale, leader: favourite, score: gumbel(self.uniform(favourite)) };
        let floor = parameters.min_p;
        let keeps = |logit: f32| floor <= 0.0 || floor.is_nan() || scale.relative(logit).exp() >= floor;
        if parameters.top_k.is_none_or(|k| k >= self.logits.len()) && parameters.top_p.is_none() {
            for (index, logits) in self.logits.chunks(BLOCK).enumerate() {
                race.enter_block(index * BLOCK, logits, keeps);
            }
        } else {
            for token in self.keep_likeliest(parameters, scale, order) {
                let token = *token as usize;
                if race.may_win(self.logits[token]) && keeps(self.logits[token]) {
                    race.enter(token);
                }
            }
        }
        Some(race.leader)
    }

    /// The tokens that `top_k` and `top_p` leave, moved to the front of `order`.
    fn keep_likeliest<'o>(&self, parameters: &Parameters, scale: Scale, order: &'o mut [u32]) -> &'o [u32] {
        let mut count = 0;
        for (token, logit) in self.logits.iter().enumerate() {
            if *logit > f32::NEG_INFINITY {
                order[count] = token as u32;
                count += 1;
            }
        }
        let order = &mut order[..count];
        let logit = |token: &u32| self.logits[*token as usize];
        let likelier =
            |a: &u32, b: &u32| logit(b).partial_cmp(&logit(a)).unwrap_or(Ordering::Equal).then(a.cmp(b));
        let left = parameters.top_k.unwrap_or(count).min(count);
        if left < count {
            order.select_nth_unstable_by(left, likelier);
        }
        let order = &mut order[..left];
        let Some(top_p) = parameters.top_p else { return order };
        let wanted = top_p * order.iter().map(|token| scale.relative(logit(token)).exp()).sum::<f64>();
        // A few tokens are usually enough, so only as many are sorted as it takes.
        let (mut sorted, mut sum) = (0, 0.0);
        while sorted < left {
            let next = (sorted * 4).max(64).min(left);
            if next < left {
                order[sorted..].select_nth_unstable_by(next - sorted, likelier);
            }
            order[sorted..next].sort_unstable_by(likelier);
            for index in sorted..next {
                sum += scale.relative(logit(&order[index])).exp();
                if sum >= wanted {
                    return &order[..=index];
                }
            }
            sorted = next;
        }
        order
    }

    /// The random number of a token, between 0 and 1.
    fn uniform(&self, token: usize) -> f64 {
        dsrun_host::uniform(self.key, token as u32, self.position)
    }
}

/// The Gumbel number made from a random number `v`.
fn gumbel(v: f64) -> f64 {
    -(-(-v).ln_1p()).ln()
}

/// Logits relative to the largest, over the temperature.
#[derive(Clone, Copy)]
struct Scale {
    best: f64,
    temperature: f64,
}

impl Scale {
    fn relative(&self, logit: f32) -> f64 {
        let logit = f64::from(logit);
        // Infinity minus infinity is NaN.
        if logit == self.best { 0.0 } else { (logit - self.best) / self.temperature }
    }
}

/// The search for the largest sum of logit and Gumbel number.
struct Race<'a> {
    draw: &'a Draw<'a>,
    scale: Scale,
    leader: usize,
    score: f64,
}

impl Race<'_> {
    /// Whether any Gumbel number could put a token with this logit in front.
    fn may_win(&self, logit: f32) -> bool {
        self.scale.relative(logit) + LARGEST_GUMBEL >= self.score
    }

    /// Enters the tokens from `first` on, whose logits these are, except those that cannot win.
    ///
    /// A token at `x` beats a score `b` if `g > b - x`, that is, if `-ln(1 - v) < exp(x - b)`; and `v` is below
    /// `-ln(1 - v)`. So most tokens are out after one vectorised exponential and one comparison.
    fn enter_block(&mut self, first: usize, logits: &[f32], keeps: impl Fn(f32) -> bool) {
        let mut bounds = [0f32; BLOCK];
        let bounds = &mut bounds[..logits.len()];
        for (bound, logit) in bounds.iter_mut().zip(logits) {
            *bound = self.scale.relative(*logit) as f32;
        }
        exp_shifted(bounds, self.score as f32);
        for (offset, (bound, logit)) in bounds.iter().zip(logits).enumerate() {
            // The estimate is good to far better than a thousandth. NaN and minus infinity fail the comparison.
            let bound = f64::from(*bound) * 1.001;
            if bound < 1e-10 || *logit == f32::NEG_INFINITY || logit.is_nan() {
                continue;
            }
            let v = self.draw.uniform(first + offset);
            if v <= bound && keeps(*logit) {
                self.enter_with(first + offset, v);
            }
        }
    }

    fn enter(&mut self, token: usize) {
        self.enter_with(token, self.draw.uniform(token));
    }

    fn enter_with(&mut self, token: usize, v: f64) {
        let score = self.scale.relative(self.draw.logits[token]) + gumbel(v);
        if score > self.score || (score == self.score && token < self.leader) {
            (self.leader, self.score) = (token, score);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn logits(count: usize) -> Vec<f32> {
        (0..count).map(|index| ((index * 7919) % 1009) as f32 / 100.0).collect()
    }

    /// The same draw by sorting everything and trying every token.
    fn by_definition(draw: &Draw<'_>, parameters: &Parameters) -> Option<usize> {
        let x = |token: &usize| f64::from(draw.logits[*token]) / parameters.temperature;
        let mut order: Vec<usize> = (0..draw.logits.len()).collect();
        order.sort_by(|a, b| x(b).total_cmp(&x(a)).then(a.cmp(b)));
        order.truncate(parameters.top_k.unwrap_or(order.len()));
        let sum: f64 = order.iter().map(|token| x(token).exp()).sum();
        let p = |token: &usize| x(token).exp() / sum;
        if let Some(top_p) = parameters.top_p {
            let mut reached = 0.0;
            let count = order.iter().take_while(|token| {
                let before = reached;
                reached += p(token);
                before < top_p
            });
            let count = count.count().max(1);
            order.truncate(count);
        }
        let largest = p(&order[0]);
        order.retain(|token| p(token) >= parameters.min_p * largest);
        order
            .into_iter()
            .max_by(|a, b| (x(a) + gumbel(draw.uniform(*a))).total_cmp(&(x(b) + gumbel(draw.uniform(*b)))))
    }

    #[rstest]
    fn shortcuts_draw_the_same_as_the_definition(
        #[values(0.3, 1.0, 5.0)] temperature: f64,
        #[values(None, Some(1), Some(40), Some(5000))] top_k: Option<usize>,
        #[values(None, Some(0.0), Some(0.5), Some(0.97))] top_p: Option<f64>,
        #[values(0.0, 0.2)] min_p: f64,
    ) {
        let logits = logits(1000);
        let parameters = Parameters { temperature, top_k, top_p, min_p };
        let mut order = vec![0; logits.len()];
        for position in 0..50 {
            let draw = Draw { logits: &logits, key: [1, 2], position };
            assert_eq!(draw.token(&parameters, &mut order), by_definition(&draw, &parameters), "{position}");
        }
    }

    #[rstest]
    #[case(&[], None)]
    #[case(&[f32::NEG_INFINITY, f32::NAN], None)]
    #[case(&[f32::NAN, 2.0, f32::NEG_INFINITY], Some(1))]
    #[case(&[1.0, f32::INFINITY], Some(1))]
    fn nan_and_minus_infinity_are_never_drawn(
        #[case] logits: &[f32],
        #[case] expected: Option<usize>,
        #[values(0.0, 1.0, f64::NAN)] temperature: f64,
        #[values(None, Some(0.5))] top_p: Option<f64>,
    ) {
        let parameters = Parameters { temperature, top_k: None, top_p, min_p: 0.0 };
        let draw = Draw { logits, key: [0; 2], position: 0 };
        assert_eq!(draw.token(&parameters, &mut vec![0; logits.len()]), expected);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let logits = [0.0, 2f32.ln(), 5f32.ln()];
        let parameters = Parameters { temperature: 1.0, top_k: None, top_p: None, min_p: 0.0 };
        let mut drawn = [0; 3];
        for position in 0..8000 {
            let draw = Draw { logits: &logits, key: [7, 9], position };
            drawn[draw.token(&parameters, &mut [0; 3]).unwrap()] += 1;
        }
        // 1, 2 and 5 of 8 thousand; four standard deviations are below 180.
        for (drawn, expected) in drawn.into_iter().zip([1000i32, 2000, 5000]) {
            assert!((drawn - expected).abs() < 180, "{drawn} of {expected}");
        }
    }
}
