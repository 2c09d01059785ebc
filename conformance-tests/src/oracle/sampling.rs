//! Oracle of `logit_process`, `argmax` and `sample`.

use super::{Real, philox::philox4x32_10};
use dsrun_core::op::IN_PROMPT;
use std::fmt;

/// The penalties of a request.
#[derive(Clone, Copy, Debug)]
pub struct Penalties {
    /// The repetition penalty, which divides positive and multiplies negative logits of seen tokens.
    pub repetition: f64,
    /// The presence penalty, which is subtracted once.
    pub presence: f64,
    /// The frequency penalty, which is subtracted for every occurrence.
    pub frequency: f64,
}

/// A processed logit. `count` is how often the request has the token.
pub fn process(logit: f64, count: i32, penalties: Penalties, bias: f64, allowed: bool) -> Real {
    if !allowed {
        return Real::new(f64::NEG_INFINITY, 0.0);
    }
    let generated = f64::from(count & (IN_PROMPT - 1));
    let seen = count != 0;
    let scaled = match seen {
        true if logit > 0.0 => logit / penalties.repetition,
        true => logit * penalties.repetition,
        false => logit,
    };
    let presence = if generated > 0.0 { penalties.presence } else { 0.0 };
    let frequency = penalties.frequency * generated;
    let magnitude = scaled.abs() + frequency.abs() + presence.abs() + bias.abs();
    Real::sum(scaled - frequency - presence + bias, magnitude, 4)
}

/// The index of the largest element, the lowest on ties, NaN counting as minus infinity; -1 if all are NaN.
pub fn argmax(x: &[f64]) -> i32 {
    if x.iter().all(|x| x.is_nan()) {
        return -1;
    }
    let size = |x: f64| if x.is_nan() { f64::NEG_INFINITY } else { x };
    (1..x.len()).fold(0, |best, index| if size(x[index]) > size(x[best]) { index } else { best }) as i32
}

/// The sampling parameters of a row.
#[derive(Clone, Copy, Debug)]
pub struct Filters {
    /// The temperature; 0 means greedy.
    pub temperature: f64,
    /// 0 means all.
    pub top_k: usize,
    /// 1 means all.
    pub top_p: f64,
    /// 0 means all.
    pub min_p: f64,
}

impl fmt::Display for Filters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { temperature, top_k, top_p, min_p } = self;
        write!(f, "temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p {min_p}")
    }
}

/// The tokens that a row may draw.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// The token that wins, or -1 if no token can be drawn; then all others that may win in f32 arithmetic.
    pub ids: Vec<i32>,
    /// `ln softmax(logits)[id]` of each of these tokens, without temperature and filters.
    pub log_probabilities: Vec<Real>,
}

/// The Gumbel noise of a token, `-ln(e)` with `e = -ln(1 - v)`, and the error of its f32 evaluation.
///
/// `v` has a relative error of one rounding, 2^-24, which gives `e` an error of `2^-24 v / (1 - v)`. Near `v = 1` this error is
/// large, but there the noise is lowest, and such a token almost never wins. Each logarithm adds an error.
pub fn gumbel(seed: [u32; 2], position: i32, token: u32) -> (f64, f64) {
    let word = philox4x32_10(seed, [token, position as u32, 0, 0])[0];
    let v = (f64::from(word) + 0.5) / 2f64.powi(32);
    let exponential = -(-v).ln_1p();
    let noise = -exponential.ln();
    let passed_on = 2f64.powi(-23) * v / ((1.0 - v) * exponential);
    (noise, passed_on + 2f64.powi(-21) * (1.0 + noise.abs()))
}

/// The order in which filters rank tokens: by logit, the largest first, then by id; without tokens that are never drawn.
fn ranking(logits: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> =
        (0..logits.len()).filter(|token| logits[*token] > f64::NEG_INFINITY).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    order
}

/// The largest difference of two f32 evaluations of `logit / temperature`.
fn tolerance(scaled: f64) -> f64 {
    scaled.abs() * 2f64.powi(-22)
}

/// The tokens that the filters keep, in the order of the ranking, each with whether it is certainly kept. Tokens so close to a
/// bound that f32 arithmetic may keep or drop them are listed as uncertain.
pub fn filter(logits: &[f64], filters: Filters) -> Vec<(usize, bool)> {
    let order = ranking(logits);
    let scaled: Vec<f64> = order.iter().map(|token| logits[*token] / filters.temperature).collect();
    let count = if filters.top_k == 0 { order.len() } else { filters.top_k.min(order.len()) };
    // Equal logits are equal in f32 too, and their order is certain. Unequal ones may become equal by the division.
    let doubtful =
        |a: usize, b: usize| scaled[a] != scaled[b] && (scaled[a] - scaled[b]).abs() <= tolerance(scaled[a]);
    let mut kept: Vec<(usize, bool)> = (0..order.len())
        .filter(|rank| *rank < count || doubtful(*rank, count - 1))
        .map(|rank| (rank, rank < count && (count == order.len() || !doubtful(rank, count))))
        .collect();
    let largest = scaled.first().copied().unwrap_or(0.0);
    let total: f64 = scaled[..count].iter().map(|x| (x - largest).exp()).sum();
    let probability = |rank: usize| (scaled[rank] - largest).exp() / total;
    // The error of a sum of probabilities, each with the error of its exponent and exponential.
    let slack = |rank: usize| {
        (count as f64).sqrt() * 2f64.powi(-23)
            + 2f64.powi(-20)
            + 2.0 * tolerance(scaled[rank]).max(tolerance(largest))
    };
    if filters.top_p < 1.0 {
        let mut before = 0.0;
        kept.retain_mut(|(rank, sure)| {
            let (reached, doubt) = (before, slack(*rank));
            before += probability(*rank);
            *sure &= *rank == 0 || reached < filters.top_p - doubt;
            *rank == 0 || reached < filters.top_p + doubt
        });
    }
    if filters.min_p > 0.0 {
        kept.retain_mut(|(rank, sure)| {
            let (share, doubt) = ((scaled[*rank] - largest).exp(), slack(*rank));
            *sure &= *rank == 0 || share >= filters.min_p * (1.0 + doubt);
            *rank == 0 || share >= filters.min_p * (1.0 - doubt)
        });
    }
    kept.into_iter().map(|(rank, sure)| (order[rank], sure)).collect()
}

/// The token that a row draws.
pub fn sample(logits: &[f64], filters: Filters, seed: [u32; 2], position: i32) -> Draw {
    if filters.temperature == 0.0 {
        let mut ids = vec![argmax(logits)];
        if ranking(logits).is_empty() {
            // Argmax returns a token even if all logits are minus infinity; such a token is never drawn.
            ids = vec![-1, ids[0]];
            ids.dedup();
        }
        return Draw::new(ids, logits);
    }
    let kept = filter(logits, filters);
    let scores: Vec<(usize, bool, f64, f64)> = kept
        .into_iter()
        .map(|(token, sure)| {
            let scaled = logits[token] / filters.temperature;
            let (noise, error) = gumbel(seed, position, token as u32);
            (token, sure, scaled + noise, error + tolerance(scaled) + 2f64.powi(-23) * (scaled + noise).abs())
        })
        .collect();
    let bar = scores.iter().filter(|(_, sure, ..)| *sure).map(|(_, _, score, error)| score - error);
    let bar = bar.fold(f64::NEG_INFINITY, f64::max);
    let mut able: Vec<_> = scores.into_iter().filter(|(_, _, score, error)| score + error >= bar).collect();
    able.sort_by(|a, b| b.2.total_cmp(&a.2));
    let ids = able.into_iter().map(|(token, ..)| token as i32).collect::<Vec<_>>();
    Draw::new(if ids.is_empty() { vec![-1] } else { ids }, logits)
}

impl Draw {
    fn new(ids: Vec<i32>, logits: &[f64]) -> Self {
        let real: Vec<f64> = logits.iter().copied().filter(|logit| !logit.is_nan()).collect();
        let largest = real.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_sum = largest + real.iter().map(|logit| (logit - largest).exp()).sum::<f64>().ln();
        let one = |id: &i32| match usize::try_from(*id) {
            Ok(token) => {
                let magnitude = logits[token].abs() + largest.abs() + log_sum.abs() + 1.0;
                Real::sum(logits[token] - log_sum, magnitude, logits.len())
            }
            Err(_) => Real::default(),
        };
        Self { log_probabilities: ids.iter().map(one).collect(), ids }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const OFF: Penalties = Penalties { repetition: 1.0, presence: 0.0, frequency: 0.0 };

    #[rstest]
    #[case::untouched(3.0, 0, Penalties { repetition: 2.0, presence: 5.0, frequency: 5.0 }, 0.0, 3.0)]
    #[case::in_prompt(3.0, IN_PROMPT, Penalties { repetition: 2.0, presence: 5.0, frequency: 5.0 }, 0.0, 1.5)]
    #[case::negative(-3.0, 1, Penalties { repetition: 2.0, ..OFF }, 0.0, -6.0)]
    #[case::twice(3.0, IN_PROMPT | 2, Penalties { repetition: 1.5, presence: 0.5, frequency: 0.25 }, 10.0, 11.0)]
    #[case::biased(3.0, 0, OFF, f64::NEG_INFINITY, f64::NEG_INFINITY)]
    fn processing_by_hand(
        #[case] logit: f64,
        #[case] count: i32,
        #[case] penalties: Penalties,
        #[case] bias: f64,
        #[case] expected: f64,
    ) {
        assert_eq!(process(logit, count, penalties, bias, true).value, expected);
        assert_eq!(process(logit, count, penalties, bias, false).value, f64::NEG_INFINITY);
    }

    #[rstest]
    #[case(&[1.0, 3.0, 3.0], 1)]
    #[case(&[f64::NAN, -5.0], 1)]
    #[case(&[f64::NAN, f64::NAN], -1)]
    #[case(&[f64::NEG_INFINITY, f64::NEG_INFINITY], 0)]
    #[case(&[], -1)]
    fn argmax_by_hand(#[case] x: &[f64], #[case] expected: i32) {
        assert_eq!(argmax(x), expected);
    }

    const ALL: Filters = Filters { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

    /// Logits with the probabilities 0.1, 0.4, 0.2 and 0.3.
    fn logits() -> Vec<f64> {
        [0.1f64, 0.4, 0.2, 0.3].map(f64::ln).to_vec()
    }

    #[rstest]
    #[case::all(ALL, &[1, 3, 2, 0])]
    #[case::two(Filters { top_k: 2, ..ALL }, &[1, 3])]
    #[case::more_than_there_are(Filters { top_k: 9, ..ALL }, &[1, 3, 2, 0])]
    #[case::nucleus(Filters { top_p: 0.65, ..ALL }, &[1, 3])]
    #[case::nucleus_of_one(Filters { top_p: 0.39, ..ALL }, &[1])]
    // The three largest have a total of 0.9, of which 0.4 and 0.3 are 7/9.
    #[case::nucleus_after_top_k(Filters { top_k: 3, top_p: 0.75, ..ALL }, &[1, 3])]
    #[case::at_least_half_as_likely(Filters { min_p: 0.51, ..ALL }, &[1, 3])]
    // Halving the temperature squares the probabilities: 1, 16, 4, 9 of 30.
    #[case::temperature(Filters { temperature: 0.5, top_p: 0.8, ..ALL }, &[1, 3])]
    fn filters_by_hand(#[case] filters: Filters, #[case] expected: &[usize]) {
        let kept: Vec<usize> = filter(&logits(), filters).into_iter().map(|(token, _)| token).collect();
        assert_eq!(kept, expected);
    }

    #[test]
    fn a_token_on_the_bound_is_in_doubt() {
        let kept = filter(&logits(), Filters { top_p: 0.7, ..ALL });
        assert_eq!(kept, [(1, true), (3, true), (2, false)]);
    }

    #[test]
    fn equal_logits_are_kept_by_id_without_doubt() {
        assert_eq!(filter(&[1.0, 1.0, 1.0], Filters { top_k: 2, ..ALL }), [(0, true), (1, true)]);
    }

    #[test]
    fn the_noise_is_that_of_the_first_word() {
        // The first word of the known answer for key 0 and counter 0 is 0x6627e8d5.
        let v = (f64::from(0x6627_e8d5u32) + 0.5) / 2f64.powi(32);
        let (noise, error) = gumbel([0, 0], 0, 0);
        assert!((noise + (-(1.0 - v).ln()).ln()).abs() < 1e-12);
        assert!(error < 1e-5);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let mut counts = [0usize; 4];
        for position in 0..20_000 {
            let draw = sample(&logits(), ALL, [7, 9], position);
            counts[draw.ids[0] as usize] += 1;
        }
        for (count, probability) in counts.into_iter().zip([0.1, 0.4, 0.2, 0.3]) {
            // Five standard deviations of at most sqrt(20000 / 4).
            assert!((count as f64 - 20_000.0 * probability).abs() < 5.0 * 70.8, "{counts:?}");
        }
    }

    #[test]
    fn greedy_and_empty_rows() {
        let greedy = Filters { temperature: 0.0, ..ALL };
        let draw = sample(&logits(), greedy, [0, 0], 0);
        assert_eq!(draw.ids, [1]);
        assert!((draw.log_probabilities[0].value - 0.4f64.ln()).abs() < 1e-12);
        assert_eq!(sample(&[f64::NAN, f64::NEG_INFINITY], ALL, [0, 0], 0).ids, [-1]);
        assert_eq!(sample(&[f64::NAN, 0.0], ALL, [0, 0], 0).ids, [1]);
    }
}
