//! The comparison of a result with the expected one, by [its gate](crate::gate).

use crate::{
    case::{Element, Expected},
    float,
    gate::Gate,
    real::Real,
    tensor::is_subnormal,
};
use dsrun_core::{DType, device::Flushed};

/// The minimum number of elements for the gate on the mean.
const ENOUGH: usize = 64;

/// An element of a result with its error and limit.
#[derive(Clone, Debug, PartialEq)]
pub struct Worst {
    /// Its index in the result.
    pub index: Vec<usize>,
    /// The value of the device.
    pub found: f64,
    /// The value of the oracle.
    pub expected: f64,
    /// The largest allowed difference.
    pub limit: f64,
    /// Difference over limit: above 1 is wrong.
    pub ratio: f64,
}

/// The mean of squared relative errors of a result, and the largest allowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeanSquare {
    /// The mean.
    pub value: f64,
    /// The largest allowed mean.
    pub limit: f64,
}

/// The comparison of a result with the oracle.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdict {
    /// The float element with the largest ratio of error to limit.
    pub worst: Option<Worst>,
    /// The mean of squared relative errors, if enough elements were compared.
    pub mean_square: Option<MeanSquare>,
    /// Descriptions of what is wrong, each one a sentence; empty if the result is right.
    pub failures: Vec<String>,
}

/// What a device says of special numbers.
#[derive(Clone, Debug, Default)]
pub struct Numbers {
    /// Whether it is strict about NaN: [`dsrun_core::device::DeviceProperties::strict_nan`].
    pub strict_nan: bool,
    /// The types whose subnormal numbers it flushes.
    pub flushed: Flushed,
}

/// Compares a result with the expected one. `found` and `before` are the bits of its elements after and before the call.
pub fn judge(
    dtype: DType,
    shape: &[usize],
    expected: &Expected,
    found: &[u32],
    before: &[u32],
    numbers: &Numbers,
) -> Verdict {
    let mut verdict = Verdict::default();
    let mut wrong = Wrong::default();
    let (mut squares, mut noise, mut compared) = (0.0, 0.0, 0usize);
    let limit_of = |real: Real| match expected.keeps_subnormals {
        true => expected.gate.exact_limit(dtype, real),
        false => expected.gate.limit(dtype, real),
    };
    // Whether every step of an op may flush, where on another device none may, or only the last.
    let flushes_steps =
        [&numbers.flushed.operands, &numbers.flushed.results].iter().any(|types| types.contains(&DType::F32));
    let flushed_limit_of = |real: Real| match flushes_steps {
        true => expected.gate.flushed_limit(dtype, real),
        false => limit_of(real),
    };
    for (at, element) in expected.elements.iter().enumerate() {
        let (bits, value) = (found[at], float::value(dtype, found[at]));
        // Right for a device that flushes what this one says it may.
        let flushed = |wrong: bool| {
            let is_right = |element: &Element| match element {
                Element::Untouched => bits == before[at],
                Element::Anything => true,
                Element::Bits(right) => bits == *right,
                Element::OneOf(all) => all.contains(&bits),
                Element::Real(real) if real.value.is_nan() => !numbers.strict_nan || value.is_nan(),
                Element::Real(real) => {
                    let limit = flushed_limit_of(*real);
                    error_of(dtype, value, *real, limit) <= limit
                }
            };
            wrong
                && (flushes_steps && is_right(element)
                    || is_flushed(dtype, element, value, &numbers.flushed)
                    || expected.flushed.get(at).is_some_and(|other| {
                        is_right(other) || is_flushed(dtype, other, value, &numbers.flushed)
                    }))
        };
        // An element that is wrong and has not changed was not written.
        let is = || match bits == before[at] {
            true => format!("was not written and still is {}", show(dtype, bits)),
            false => format!("is {}", show(dtype, bits)),
        };
        match element {
            Element::Anything => {}
            Element::Untouched => {
                wrong.note(bits != before[at], at, || "was written, must be left alone".into())
            }
            Element::Bits(right) => {
                let differs = bits != *right;
                wrong.note(differs && !flushed(differs), at, || {
                    format!("{}, must be {}", is(), show(dtype, *right))
                });
            }
            Element::OneOf(all) => {
                let differs = !all.contains(&bits);
                wrong.note(differs && !flushed(differs), at, || {
                    let all: Vec<String> = all.iter().map(|bits| show(dtype, *bits)).collect();
                    format!("{}, must be one of {}", is(), all.join(", "))
                });
            }
            Element::Real(real) if real.value.is_nan() => {
                let differs = numbers.strict_nan && !value.is_nan();
                wrong.note(differs && !flushed(differs), at, || format!("{}, must be NaN", is()));
            }
            Element::Real(real) if real.value.is_infinite() => {
                let differs = value != real.value;
                wrong.note(differs && !flushed(differs), at, || format!("{}, must be {}", is(), real.value));
            }
            Element::Real(real) => {
                let limit = limit_of(*real);
                let error = error_of(dtype, value, *real, limit);
                let ratio = if error.is_nan() { f64::INFINITY } else { error / limit };
                // What is right because of a flush says nothing of other errors.
                let is_other = (flushes_steps && error > expected.gate.normal_limit(dtype, *real))
                    || is_flushed(dtype, element, value, &numbers.flushed)
                    || expected.flushed.get(at).is_some_and(|other| other != element);
                if is_other && flushed(true) {
                    continue;
                }
                if verdict.worst.as_ref().is_none_or(|worst| ratio > worst.ratio) {
                    let index = unravel(shape, at);
                    verdict.worst = Some(Worst { index, found: value, expected: real.value, limit, ratio });
                }
                wrong.note(ratio > 1.0, at, || {
                    let expected = real.value;
                    format!("{}, must be {expected:e} ± {limit:.1e} ({ratio:.3} times the limit away)", is())
                });
                let inner = expected.gate.inner.map_or(0.0, |_| real.spread);
                let scale = real.value.abs().max(real.magnitude / 64.0).max(inner);
                let scale = scale.max(float::smallest_normal(dtype));
                squares += (error / scale) * (error / scale);
                noise += (Gate::running_sum_noise(*real) / scale).powi(2);
                compared += 1;
            }
        }
    }
    if let Some((at, message)) = wrong.first {
        let all = expected.elements.len();
        let worst =
            verdict.worst.as_ref().filter(|worst| worst.ratio > 1.0 && worst.index != unravel(shape, at));
        let worst = worst.map_or_else(String::new, |worst| {
            let Worst { index, found, expected, ratio, .. } = worst;
            format!("; the worst is {index:?}: {found:e} for {expected:e}, {ratio:.3} times the limit away")
        });
        let index = unravel(shape, at);
        let note = index.first().and_then(|row| expected.notes.get(*row));
        let note = note.map_or_else(String::new, |note| format!(" (a row of {note})"));
        verdict.failures.push(format!(
            "{} of {all} elements are wrong; first {index:?}{note} {message}{worst}",
            wrong.count
        ));
    }
    if compared >= ENOUGH {
        let value = squares / compared as f64;
        let limit = expected.gate.mean_square_limit(dtype) + noise / compared as f64;
        verdict.mean_square = Some(MeanSquare { value, limit });
        if value > limit || value.is_nan() {
            verdict
                .failures
                .push(format!("the mean square of relative errors is {value:.2e}, at most {limit:.1e}"));
        }
    }
    if let Some(probabilities) = &expected.distribution {
        verdict.failures.extend(chi_square(probabilities, found).err());
    }
    verdict
}

/// The difference of a value from the expected one. A value near the end of the range may round to infinity.
fn error_of(dtype: DType, value: f64, real: Real, limit: f64) -> f64 {
    let overflows = value == f64::INFINITY.copysign(real.value);
    let in_reach = real.value.abs() + limit > float::largest(dtype);
    if value == real.value || (overflows && in_reach) { 0.0 } else { (value - real.value).abs() }
}

/// Whether a zero stands for a subnormal number that the device says it flushes. A copy has the type of its operand.
fn is_flushed(dtype: DType, element: &Element, value: f64, flushed: &Flushed) -> bool {
    let results = flushed.results.contains(&dtype);
    let copies = results || flushed.operands.contains(&dtype);
    value == 0.0
        && match element {
            Element::Real(real) => {
                results && real.value != 0.0 && real.value.abs() <= float::smallest_normal(dtype)
            }
            Element::Bits(bits) => copies && is_subnormal(dtype, *bits),
            Element::OneOf(all) => copies && all.iter().any(|bits| is_subnormal(dtype, *bits)),
            Element::Untouched | Element::Anything => false,
        }
}

/// The first wrong element and how many there are.
#[derive(Default)]
struct Wrong {
    count: usize,
    first: Option<(usize, String)>,
}

impl Wrong {
    fn note(&mut self, is_wrong: bool, at: usize, message: impl FnOnce() -> String) {
        if is_wrong {
            self.count += 1;
            self.first.get_or_insert_with(|| (at, message()));
        }
    }
}

fn show(dtype: DType, bits: u32) -> String {
    let value = float::value(dtype, bits);
    if dtype.is_float() { format!("{value:e} (bits {bits:#x})") } else { format!("{value}") }
}

/// The index of an element of a dense tensor.
fn unravel(shape: &[usize], at: usize) -> Vec<usize> {
    let mut rest = at;
    let mut index: Vec<usize> = shape
        .iter()
        .rev()
        .map(|size| {
            let i = rest % size;
            rest /= size;
            i
        })
        .collect();
    index.reverse();
    index
}

/// Pearson's test of the hypothesis that ids were drawn with these probabilities, at a level of about one in a million. The
/// seeds are fixed, so that the result is the same in every run.
fn chi_square(probabilities: &[f64], ids: &[u32]) -> Result<(), String> {
    let mut counts = vec![0usize; probabilities.len()];
    for id in ids {
        match counts.get_mut(*id as usize) {
            Some(count) => *count += 1,
            None => return Err(format!("{} was drawn, which is not a token", *id as i32)),
        }
    }
    let total = ids.len() as f64;
    let mut statistic = 0.0;
    for (token, (count, probability)) in counts.iter().zip(probabilities).enumerate() {
        let mean = total * probability;
        if *probability == 0.0 {
            if *count > 0 {
                return Err(format!("token {token} was drawn {count} times, though the filters exclude it"));
            }
            continue;
        }
        statistic += (*count as f64 - mean) * (*count as f64 - mean) / mean;
    }
    let freedom = probabilities.iter().filter(|probability| **probability > 0.0).count().saturating_sub(1);
    let limit = chi_square_limit(freedom);
    if statistic <= limit {
        return Ok(());
    }
    Err(format!(
        "draws do not follow the probabilities: chi-square {statistic:.1} over {freedom}, at most {limit:.1}"
    ))
}

/// The value that chi-square exceeds about once in a million, by the cube-root approximation of Wilson and Hilferty (1931).
/// For few degrees of freedom it is a little wide, which does no harm: what is wrong with draws is far beyond.
fn chi_square_limit(freedom: usize) -> f64 {
    if freedom == 0 {
        return 1e-9;
    }
    let (freedom, deviations) = (freedom as f64, 4.753);
    let spread = 2.0 / (9.0 * freedom);
    freedom * (1.0 - spread + deviations * spread.sqrt()).powi(3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn verdict(dtype: DType, elements: Vec<Element>, found: &[f64]) -> Verdict {
        let bits: Vec<u32> = found.iter().map(|value| float::bits(dtype, *value)).collect();
        let numbers = Numbers { strict_nan: true, ..Numbers::default() };
        // Nothing is as it was before.
        let before: Vec<u32> = bits.iter().map(|bits| !bits).collect();
        judge(dtype, &[bits.len()], &Expected::new(elements), &bits, &before, &numbers)
    }

    fn passes(dtype: DType, real: Real, found: f64) -> bool {
        verdict(dtype, vec![Element::Real(real)], &[found]).failures.is_empty()
    }

    #[rstest]
    #[case::one_rounding_up(DType::F16, 1.0 + 2f64.powi(-10), true)]
    #[case::two_steps(DType::F16, 1.0 + 2f64.powi(-9), false)]
    #[case::one_bf16_step(DType::BF16, 1.0 + 2f64.powi(-7), true)]
    #[case::f32_noise(DType::F32, 1.0 + 2f64.powi(-22), true)]
    #[case::tf32(DType::F32, 1.0 + 2f64.powi(-12), false)]
    #[case::nan(DType::F32, f64::NAN, false)]
    #[case::infinite(DType::F32, f64::INFINITY, false)]
    fn one_element(#[case] dtype: DType, #[case] found: f64, #[case] right: bool) {
        assert_eq!(passes(dtype, Real::new(1.0, 1.0), found), right);
    }

    #[test]
    fn cancelling_terms_leave_room_and_their_absence_takes_it() {
        assert!(passes(DType::F32, Real::new(1e-6, 1.0), 1.2e-6));
        assert!(!passes(DType::F32, Real::new(1e-6, 1e-6), 1.2e-6));
    }

    #[test]
    fn special_values_are_exact() {
        assert!(passes(DType::F16, Real::new(f64::NEG_INFINITY, 0.0), f64::NEG_INFINITY));
        assert!(!passes(DType::F16, Real::new(f64::NEG_INFINITY, 0.0), -65504.0));
        assert!(passes(DType::F16, Real::new(f64::NAN, 0.0), f64::NAN));
        assert!(!passes(DType::F16, Real::new(f64::NAN, 0.0), 0.0));
        // 65519 rounds to the largest value, and by a hair to infinity.
        assert!(passes(DType::F16, Real::new(65_519.0, 65_519.0), f64::INFINITY));
        assert!(!passes(DType::F16, Real::new(60_000.0, 60_000.0), f64::INFINITY));
        assert!(!passes(DType::F16, Real::new(65_519.0, 65_519.0), f64::NEG_INFINITY));
    }

    #[test]
    fn a_bias_of_all_elements_is_caught_where_each_alone_would_pass() {
        let one = Real::new(1.5, 1.5);
        let elements = vec![Element::Real(one); ENOUGH];
        let off = 1.5 + 2f64.powi(-10);
        assert!(passes(DType::F16, one, off));
        let verdict = verdict(DType::F16, elements, &[off; ENOUGH]);
        assert!(verdict.failures.iter().any(|failure| failure.contains("mean square")), "{verdict:?}");
    }

    #[test]
    fn an_addition_may_lose_subnormal_terms_only_on_a_device_that_says_so() {
        let elements = vec![Element::Real(Real::new(3.5e-38, 3.5e-38)), Element::Real(Real::new(1.0, 1.0))];
        let expected = Expected::new(elements).keeping_subnormals();
        let judged = |found: [f64; 2], flushed: &Flushed| {
            let bits = found.map(|value| float::bits(DType::F32, value));
            let numbers = Numbers { strict_nan: true, flushed: flushed.clone() };
            judge(DType::F32, &[2], &expected, &bits, &[0; 2], &numbers).failures.is_empty()
        };
        let flushing = Flushed { operands: vec![DType::F32], results: Vec::new() };
        let halves = Flushed { operands: vec![DType::F16], results: Vec::new() };
        let lost = [2.8e-38, 1.0];
        assert!(judged(lost, &flushing));
        assert!(!judged(lost, &halves));
        assert!(!judged(lost, &Flushed::default()));
        assert!(!judged([-9.0e-38, 1.0], &flushing));
        assert!(!judged([3.5e-38, 1.0001], &flushing));
    }

    #[test]
    fn a_flushed_step_is_multiplied_and_not_averaged() {
        // 64 elements that lose a subnormal step, which is then multiplied by 30.
        let lost = 0.9e-38;
        let real = |gain: f64| Real::new(gain * lost, gain * lost).multiplied(gain);
        let judged = |real: Real, found: f64, flushed: &Flushed| {
            let expected = Expected::new(vec![Element::Real(real); ENOUGH]);
            let bits = [float::bits(DType::F32, found); ENOUGH];
            let numbers = Numbers { strict_nan: true, flushed: flushed.clone() };
            judge(DType::F32, &[ENOUGH], &expected, &bits, &[0; ENOUGH], &numbers).failures.is_empty()
        };
        let flushing = Flushed { operands: Vec::new(), results: vec![DType::F32] };
        assert!(judged(real(30.0), 0.0, &flushing) && !judged(real(30.0), 0.0, &Flushed::default()));
        assert!(!judged(real(30.0), -900.0 * lost, &flushing));
        assert!(!judged(Real { gain: 1.0, ..real(30.0) }, 0.0, &flushing));
        // The mean still sees errors of elements that lose nothing.
        assert!(!judged(Real::new(1.0, 100.0), 1.0 + 5e-5, &flushing));
    }

    #[test]
    fn a_sum_may_lose_each_subnormal_term_only_on_a_device_that_says_so() {
        let value = 8.0 * 1.1e-38;
        let expected = Expected::new(vec![Element::Real(Real::sum(value, value, 8))]);
        let judged = |found: f64, flushed: &Flushed| {
            let bits = [float::bits(DType::F32, found)];
            let numbers = Numbers { strict_nan: true, flushed: flushed.clone() };
            judge(DType::F32, &[1], &expected, &bits, &[0x7fff_ffff], &numbers).failures.is_empty()
        };
        let flushing = Flushed { operands: vec![DType::F32], results: Vec::new() };
        assert!(judged(0.0, &flushing) && !judged(-2.0e-38, &flushing));
        assert!(!judged(0.0, &Flushed::default()));
    }

    #[test]
    fn bits_choices_and_untouched_elements() {
        let elements =
            vec![Element::Bits(5), Element::OneOf(vec![1, 2]), Element::Anything, Element::Untouched];
        let expected = Expected::new(elements);
        let judge = |found: [u32; 4]| {
            judge(DType::I32, &[2, 2], &expected, &found, &[9; 4], &Numbers::default()).failures
        };
        assert!(judge([5, 2, 77, 9]).is_empty());
        assert!(judge([5, 3, 0, 9])[0].contains("first [0, 1] is 3, must be one of 1, 2"));
        assert!(judge([4, 1, 0, 8])[0].contains("2 of 4"));
    }

    #[test]
    fn chi_square_tells_fair_from_loaded() {
        let ids = |counts: [u32; 3]| -> Vec<u32> {
            counts.into_iter().enumerate().flat_map(|(id, count)| vec![id as u32; count as usize]).collect()
        };
        assert!(chi_square(&[0.5, 0.3, 0.2], &ids([5050, 2950, 2000])).is_ok());
        assert!(chi_square(&[0.5, 0.3, 0.2], &ids([5300, 2900, 1800])).is_err());
        assert!(chi_square(&[0.5, 0.5, 0.0], &ids([5000, 5000, 1])).is_err());
    }

    #[rstest]
    #[case(2)]
    #[case(4)]
    #[case(16)]
    fn chi_square_exceeds_its_limit_about_once_in_a_million(#[case] freedom: usize) {
        // For an even number of degrees of freedom the tail is exp(-x / 2) * sum_i (x / 2)^i / i!, i below half of them.
        let half = chi_square_limit(freedom) / 2.0;
        let (mut term, mut sum) = (1.0, 0.0);
        for index in 0..freedom / 2 {
            sum += term;
            term *= half / (index + 1) as f64;
        }
        let tail = (-half).exp() * sum;
        assert!((2e-7..1.5e-6).contains(&tail), "{tail:e}");
    }
}
