//! Oracle of `paged_attention` and `attention`: one query head over the keys it sees.
//!
//! Propagation of errors: a score is a dot product with an f32 error; softmax turns an absolute error `e` of a score into a relative
//! error `e` of its weight, and through the sum into one of every other weight. So with `m_i` the magnitude of score `i`
//! and `w_i` its weight, the result `sum_i w_i v_i` has the magnitude `sum_i w_i |v_i| (1 + m_i + sum_j w_j m_j)`: the
//! first-order effect of all these errors. The only inner rounding that the documentation allows is that of the weights to
//! the type of the cache; its terms are `w_i |v_i|`.

use super::Real;
use dsrun_core::op::AttentionMask;

/// The parameters that all keys of a query head share.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scoring {
    /// The factor of every score.
    pub scale: f64,
    /// The bound of the scores; 0 means no bound.
    pub softcap: f64,
    /// The ALiBi slope; 0 means no ALiBi.
    pub slope: f64,
    /// The score of the attention sink, which has no value vector.
    pub sink: Option<f64>,
}

/// A key that a query sees.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// The query position minus the key position; its absolute value if the mask is bidirectional.
    pub distance: f64,
    /// The key.
    pub key: &'a [f64],
    /// The value.
    pub value: &'a [f64],
}

/// The result of a query head and the logarithm of the sum of the exponentials of its scores.
pub fn attend(scoring: Scoring, query: &[f64], seen: &[Seen<'_>], value_size: usize) -> (Vec<Real>, Real) {
    if seen.is_empty() {
        return (vec![Real::default(); value_size], Real::new(f64::NEG_INFINITY, 0.0));
    }
    let mut scores: Vec<(f64, f64)> = seen.iter().map(|seen| score(scoring, query, seen)).collect();
    // The weight of a score of minus infinity is 0, without an error.
    for (score, error) in &mut scores {
        *error = if *score == f64::NEG_INFINITY { 0.0 } else { *error };
    }
    // The difference of a score and a sink that is the largest is rounded like a score of that size.
    let size = |sink: f64| if sink == f64::NEG_INFINITY { 0.0 } else { sink.abs() };
    scores.extend(scoring.sink.map(|sink| (sink, size(sink))));
    let largest = scores.iter().map(|(score, _)| *score).fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = scores.iter().map(|(score, _)| (score - largest).exp()).sum();
    let weights: Vec<f64> = scores.iter().map(|(score, _)| (score - largest).exp() / total).collect();
    let mean_error: f64 =
        weights.iter().zip(&scores).map(|(weight, (_, magnitude))| weight * magnitude).sum();
    // A dot product has a term for each element of the query; the sum over keys has one for each key.
    let terms = query.len().max(seen.len());
    let mut reals = vec![Real::sum(0.0, 0.0, terms); value_size];
    for ((seen, weight), (_, error)) in seen.iter().zip(&weights).zip(&scores) {
        for (real, value) in reals.iter_mut().zip(seen.value) {
            let term = weight * value;
            real.value += term;
            real.inner += term.abs();
            real.spread += term * term;
            real.magnitude += term.abs() * (1.0 + error + mean_error);
        }
    }
    for real in &mut reals {
        real.spread = real.spread.sqrt();
    }
    let log_sum_exp = largest + total.ln();
    let log_magnitude = mean_error + largest.abs() + log_sum_exp.abs() + 1.0;
    (reals, Real::sum(log_sum_exp, log_magnitude, terms))
}

/// Whether the softmax of a query's scores is defined: none is plus infinity, and not all are minus infinity. NaN is defined: it
/// makes all of the result NaN.
pub fn is_defined(scoring: Scoring, query: &[f64], seen: &[Seen<'_>]) -> bool {
    let scores = seen.iter().map(|seen| score(scoring, query, seen).0).chain(scoring.sink);
    let (mut is_empty, mut largest) = (true, f64::NEG_INFINITY);
    for score in scores {
        if score.is_nan() {
            return true;
        }
        (is_empty, largest) = (false, largest.max(score));
    }
    is_empty || largest.is_finite()
}

/// A score and its magnitude, in units of f32 roundings of 1.
fn score(scoring: Scoring, query: &[f64], seen: &Seen<'_>) -> (f64, f64) {
    let product: f64 = query.iter().zip(seen.key).map(|(q, k)| q * k).sum();
    let mut magnitude =
        scoring.scale.abs() * query.iter().zip(seen.key).map(|(q, k)| (q * k).abs()).sum::<f64>();
    let mut score = scoring.scale * product;
    if scoring.softcap > 0.0 {
        score = scoring.softcap * (score / scoring.softcap).tanh();
        // tanh is computed from exponentials with an error of up to 2^-20 (see the gates): 2 of the 8 roundings that the gate
        // allows for every unit of magnitude.
        magnitude += 2.0 * score.abs();
    }
    let bias = scoring.slope * seen.distance;
    (score - bias, magnitude + bias.abs())
}

/// The visibility of keys for the queries of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct Visibility {
    /// The mask.
    pub mask: AttentionMask,
    /// The size of the window; 0 means that there is none.
    pub window: usize,
    /// The number of tokens, including new ones.
    pub kv_length: usize,
    /// The number of new tokens.
    pub query_length: usize,
    /// Whether the window bounds both sides, as in `attention`, which has no cache.
    pub two_sided: bool,
}

impl Visibility {
    /// Whether new token `query` sees key `key`. `bit` returns the bit of the explicit mask for a new token.
    pub fn sees(&self, query: usize, key: usize, bit: impl Fn(usize) -> bool) -> bool {
        let [keys, queries, query, window, at] =
            [self.kv_length, self.query_length, query, self.window, key].map(|number| number as i64);
        let before = keys - queries;
        let position = before + query;
        let masked = match self.mask {
            AttentionMask::Causal => at <= position,
            AttentionMask::Bidirectional => true,
            AttentionMask::Explicit => usize::try_from(at - before).map_or(true, bit),
        };
        let near = at + window > position && (!self.two_sided || at < position + window);
        masked && (self.window == 0 || near)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn values(reals: &[Real]) -> Vec<f64> {
        reals.iter().map(|real| (real.value * 1e9).round() / 1e9).collect()
    }

    const VALUES: [[f64; 1]; 2] = [[10.0], [20.0]];

    fn two_keys(keys: &[[f64; 2]; 2]) -> Vec<Seen<'_>> {
        let one =
            |index: usize| Seen { distance: 1.0 - index as f64, key: &keys[index], value: &VALUES[index] };
        (0..2).map(one).collect()
    }

    #[test]
    fn two_keys_by_hand() {
        // Scores 0 and ln 3: weights 1/4 and 3/4.
        let keys = [[0.0, 7.0], [3f64.ln(), 7.0]];
        let scoring = Scoring { scale: 1.0, ..Scoring::default() };
        let (y, lse) = attend(scoring, &[1.0, 0.0], &two_keys(&keys), 1);
        assert_eq!(values(&y), [17.5]);
        assert!((lse.value - 4f64.ln()).abs() < 1e-12);
        assert!((y[0].inner - 17.5).abs() < 1e-9);
    }

    #[test]
    fn scale_alibi_softcap_and_sinks_by_hand() {
        let equal = [[2.0, 0.0], [2.0, 0.0]];
        // ALiBi of slope ln 3 subtracts ln 3 from the score of the older key: weights 1/4 and 3/4.
        let alibi = Scoring { scale: 0.5, slope: 3f64.ln(), ..Scoring::default() };
        let (y, _) = attend(alibi, &[1.0, 0.0], &two_keys(&equal), 1);
        assert_eq!(values(&y), [17.5]);
        // A sink with the score of both keys takes a third of the weight.
        let sink = Scoring { scale: 0.5, sink: Some(1.0), ..Scoring::default() };
        let (y, lse) = attend(sink, &[1.0, 0.0], &two_keys(&equal), 1);
        assert_eq!(values(&y), [10.0]);
        assert!((lse.value - (1.0 + 3f64.ln())).abs() < 1e-12);
        // Softcap: 2 tanh(4 / 2) for the second key, 0 for the first.
        let cap = Scoring { scale: 1.0, softcap: 2.0, ..Scoring::default() };
        let (_, lse) = attend(cap, &[1.0, 0.0], &two_keys(&[[0.0, 0.0], [4.0, 0.0]]), 1);
        let capped = 2.0 * 0.964_027_580_075_816_9; // tanh 2
        assert!((lse.value - (1.0 + f64::exp(capped)).ln()).abs() < 1e-12);
    }

    #[test]
    fn nothing_seen_gives_zeros_and_minus_infinity() {
        let (y, lse) = attend(Scoring::default(), &[1.0], &[], 3);
        assert_eq!(values(&y), [0.0; 3]);
        assert_eq!(lse.value, f64::NEG_INFINITY);
    }

    #[rstest]
    // Two new tokens, at positions 3 and 4 of a sequence of 5.
    #[case::causal(AttentionMask::Causal, 0, false, [vec![0, 1, 2, 3], vec![0, 1, 2, 3, 4]])]
    #[case::window(AttentionMask::Causal, 2, false, [vec![2, 3], vec![3, 4]])]
    #[case::bidirectional(AttentionMask::Bidirectional, 0, false, [vec![0, 1, 2, 3, 4], vec![0, 1, 2, 3, 4]])]
    #[case::two_sided(AttentionMask::Bidirectional, 1, true, [vec![3], vec![4]])]
    // The bits let token 0 see token 1 only, and token 1 see no new token.
    #[case::explicit(AttentionMask::Explicit, 0, false, [vec![0, 1, 2, 4], vec![0, 1, 2]])]
    #[case::explicit_window(AttentionMask::Explicit, 3, false, [vec![1, 2, 4], vec![2]])]
    fn visibility(
        #[case] mask: AttentionMask,
        #[case] window: usize,
        #[case] two_sided: bool,
        #[case] expected: [Vec<usize>; 2],
    ) {
        let visibility = Visibility { mask, window, kv_length: 5, query_length: 2, two_sided };
        for (query, expected) in expected.iter().enumerate() {
            let seen: Vec<usize> =
                (0..5).filter(|key| visibility.sees(query, *key, |bit| query == 0 && bit == 1)).collect();
            assert_eq!(seen, *expected);
        }
    }
}
