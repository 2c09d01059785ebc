//! The softmax of attention, a run of keys at a time.
//!
//! A state keeps the largest score so far, `m`, and the sum of `exp(score - m)`; the caller keeps the sum of values with
//! the same weights. When a larger score comes, both are scaled down. In the end values are divided by weights.

use crate::simd;

/// The parameters that turn dot products into scores.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scores {
    pub(super) scale: f32,
    pub(super) softcap: f32,
    /// Whether ALiBi uses the size of the distance, not its sign.
    pub(super) distance_is_absolute: bool,
}

impl Scores {
    /// Turns the dot products of a query and successive keys into scores. `ahead` is how far the query is ahead of the first
    /// key.
    pub(super) fn adjust(&self, slope: Option<f32>, ahead: i64, out: &mut [f32]) {
        simd::scale(out, self.scale);
        if self.softcap > 0.0 {
            out.iter_mut().for_each(|score| *score = self.softcap * (*score / self.softcap).tanh());
        }
        if let Some(slope) = slope {
            for (index, score) in out.iter_mut().enumerate() {
                let distance = ahead - index as i64;
                let distance = if self.distance_is_absolute { distance.abs() } else { distance };
                *score -= slope * distance as f32;
            }
        }
    }
}

/// The running softmax of one query head.
#[derive(Clone, Copy, Debug)]
pub(super) struct State {
    largest: f32,
    /// Sum of the weights, relative to `exp(largest)`.
    weights: f32,
    /// Keys seen; only whether it is 0 matters.
    seen: f32,
}

impl State {
    /// Floats a state is stored in.
    pub(super) const FLOATS: usize = 3;

    /// The state before any key, with an optional sink: a score with no value.
    pub(super) fn new(sink: Option<f32>) -> Self {
        match sink {
            None | Some(f32::NEG_INFINITY) => Self { largest: f32::NEG_INFINITY, weights: 0.0, seen: 0.0 },
            Some(sink) if sink.is_nan() => Self { largest: f32::NEG_INFINITY, weights: f32::NAN, seen: 0.0 },
            Some(sink) => Self { largest: sink, weights: 1.0, seen: 0.0 },
        }
    }

    pub(super) fn load(states: &[f32], index: usize) -> Self {
        let [largest, weights, seen] = states.as_chunks::<{ Self::FLOATS }>().0[index];
        Self { largest, weights, seen }
    }

    pub(super) fn store(self, states: &mut [f32], index: usize) {
        states.as_chunks_mut::<{ Self::FLOATS }>().0[index] = [self.largest, self.weights, self.seen];
    }

    /// Adds a run of keys: turns their scores into weights, and scales `sums`, the weighted sum of values, so that the values
    /// of the run can be added to it.
    pub(super) fn absorb(&mut self, scores: &mut [f32], sums: &mut [f32]) {
        // The maximum passes NaN over; it comes back with the weights below.
        let largest = self.largest.max(simd::largest(scores));
        self.seen = 1.0;
        if largest == f32::NEG_INFINITY {
            // Weights relative to minus infinity would be NaN; a later, larger score gives these keys a weight of 0.
            scores.iter_mut().for_each(|score| *score = if score.is_nan() { f32::NAN } else { 0.0 });
            self.weights += scores.iter().sum::<f32>();
        } else {
            self.raise(largest, sums);
            self.weights += simd::exp_shifted(scores, largest);
        }
    }

    /// Adds another state, with its weighted sum of values.
    pub(super) fn merge(&mut self, mut other: Self, sums: &mut [f32], other_sums: &mut [f32]) {
        if other.seen == 0.0 {
            return;
        }
        let largest = self.largest.max(other.largest);
        if largest > f32::NEG_INFINITY {
            self.raise(largest, sums);
            other.raise(largest, other_sums);
        }
        self.seen = 1.0;
        self.weights += other.weights;
        sums.iter_mut().zip(other_sums).for_each(|(sum, other)| *sum += *other);
    }

    /// Makes weights and sums relative to a larger score.
    fn raise(&mut self, largest: f32, sums: &mut [f32]) {
        if largest > self.largest && self.largest > f32::NEG_INFINITY {
            let factor = (self.largest - largest).exp();
            self.weights *= factor;
            simd::scale(sums, factor);
        }
        self.largest = largest;
    }

    /// The result, from the weighted sum of one element of the values.
    pub(super) fn weigh(&self, sum: f32) -> f32 {
        if self.seen == 0.0 { 0.0 } else { sum / self.weights }
    }

    /// The logarithm of the sum of exponentials of all scores.
    pub(super) fn log_sum_exp(&self) -> f32 {
        if self.seen == 0.0 { f32::NEG_INFINITY } else { self.largest + self.weights.ln() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(state: &mut State, scores: &[f32], values: &[f32], sums: &mut [f32; 1]) {
        let mut weights = scores.to_vec();
        state.absorb(&mut weights, sums);
        sums[0] += weights.iter().zip(values).map(|(weight, value)| weight * value).sum::<f32>();
    }

    #[test]
    fn merging_states_is_adding_their_keys() {
        let infinity = f32::INFINITY;
        let runs: [&[f32]; 7] =
            [&[], &[1.0, 5.0], &[-2.0], &[8.0, 3.0], &[-infinity], &[-infinity, 2.0], &[f32::NAN]];
        for sink in [None, Some(2.0)] {
            for a in runs {
                for b in runs {
                    let states = [(a, 1.0, sink), (b, 10.0, None)].map(|(scores, value, sink)| {
                        let (mut state, mut sums) = (State::new(sink), [0.0]);
                        if !scores.is_empty() {
                            add(&mut state, scores, &vec![value; scores.len()], &mut sums);
                        }
                        (state, sums)
                    });
                    let [(mut merged, mut sums), (other, mut other_sums)] = states;
                    merged.merge(other, &mut sums, &mut other_sums);
                    let (mut state, mut expected) = (State::new(sink), [0.0]);
                    for (scores, value) in [(a, 1.0), (b, 10.0)] {
                        if !scores.is_empty() {
                            add(&mut state, scores, &vec![value; scores.len()], &mut expected);
                        }
                    }
                    let found = [merged.weigh(sums[0]), merged.log_sum_exp()];
                    let expected = [state.weigh(expected[0]), state.log_sum_exp()];
                    for (found, expected) in found.into_iter().zip(expected) {
                        let same = found == expected || (found - expected).abs() < 1e-5;
                        assert!(
                            same || found.is_nan() && expected.is_nan(),
                            "{a:?} {b:?}: {found} {expected}"
                        );
                    }
                }
            }
        }
    }

    /// Runs of scores for keys with values 1, 2, 3, ..: the weighted mean and the logarithm of the sum.
    fn attend(sink: Option<f32>, runs: &[&[f32]]) -> (f32, f32) {
        let (mut state, mut sums, mut value) = (State::new(sink), [0.0], 0.0);
        for run in runs {
            let values: Vec<f32> = run
                .iter()
                .map(|_| {
                    value += 1.0;
                    value
                })
                .collect();
            add(&mut state, run, &values, &mut sums);
        }
        (state.weigh(sums[0]), state.log_sum_exp())
    }

    #[test]
    fn runs_add_up_to_the_whole() {
        let whole = attend(None, &[&[1.0, 5.0, -2.0, 8.0]]);
        for runs in [&[&[1.0, 5.0][..], &[-2.0, 8.0]][..], &[&[1.0], &[5.0], &[-2.0], &[8.0]]] {
            let (mean, log_sum) = attend(None, runs);
            assert!((mean - whole.0).abs() < 1e-6 && (log_sum - whole.1).abs() < 1e-6);
        }
        let weights = [1f32, 5.0, -2.0, 8.0].map(f32::exp);
        let sum: f32 = weights.iter().sum();
        let mean =
            weights.iter().zip([1.0, 2.0, 3.0, 4.0]).map(|(weight, value)| weight * value).sum::<f32>() / sum;
        assert!((whole.0 - mean).abs() < 1e-6 && (whole.1 - sum.ln()).abs() < 1e-6);
    }

    #[test]
    fn the_edges_are_those_of_the_formula() {
        let infinity = f32::INFINITY;
        assert_eq!(attend(None, &[]), (0.0, -infinity));
        assert_eq!(attend(Some(3.0), &[]), (0.0, -infinity));
        // A score of minus infinity has no weight, if there is any other.
        assert_eq!(attend(None, &[&[-infinity], &[2.0], &[-infinity]]), (2.0, 2.0));
        assert!(attend(None, &[&[-infinity]]).0.is_nan());
        assert!(attend(None, &[&[f32::NAN], &[1.0]]).0.is_nan());
        // A sink as large as the only score takes half.
        let (mean, log_sum) = attend(Some(2.0), &[&[2.0]]);
        assert!((mean - 0.5).abs() < 1e-6 && (log_sum - (2.0 + 2f32.ln())).abs() < 1e-6);
    }
}
