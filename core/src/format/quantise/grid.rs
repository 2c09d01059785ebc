//! The values that a group can represent, and how far others are from them.

use super::super::group::{GroupFormat, GroupOffset};
use super::LANES;

/// Adding and subtracting 1.5 * 2^23 rounds a number below 2^22 to the nearest integer, ties to even, because f32 values are
/// one apart there. Unlike `round_ties_even` this vectorises on every processor. The low bits of the sum are those of the integer in
/// two's complement, which spares a conversion that saturates.
const ROUND: f32 = 12_582_912.0;

/// The representable values of a group: `scale * (integer - zero) + minimum`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    /// Which of `zero` and `minimum` may differ from 0.
    pub(super) offset: GroupOffset,
    /// The step, rounded to the type that stores it.
    pub(super) scale: f32,
    /// The zero point.
    pub(super) zero: f32,
    /// The minimum, rounded to the type that stores it.
    pub(super) minimum: f32,
    /// The smallest and largest integer.
    range: (f32, f32),
}

/// The grids over several fractions of the same range.
pub(super) struct Grids<const COUNT: usize> {
    offset: GroupOffset,
    scale: [f32; COUNT],
    zero: [f32; COUNT],
    minimum: [f32; COUNT],
    range: (f32, f32),
}

impl<const COUNT: usize> Grids<COUNT> {
    /// The grids over the fractions `clips` of a range, with scale and offset rounded to their stored types.
    #[inline(always)]
    pub(super) fn new(format: GroupFormat, low: f32, high: f32, clips: [f32; COUNT]) -> Self {
        let levels = (1u32 << format.bits.bits()) as f32 - 1.0;
        let largest = (levels - 1.0) / 2.0;
        let stored = |value: f32| format.scale.round(value);
        let zeros = [0.0; COUNT];
        let (mut scale, mut zero, mut minimum, mut range) = (zeros, zeros, zeros, (0.0, levels));
        match format.offset {
            GroupOffset::Symmetric => {
                range = (-largest, largest);
                let reach = low.abs().max(high.abs());
                scale.iter_mut().zip(clips).for_each(|(scale, clip)| *scale = stored(reach * clip / largest));
            }
            GroupOffset::ZeroPoint => {
                // The range includes 0, so that an integer represents it exactly.
                let (low, high) = (low.min(0.0), high.max(0.0));
                for ((scale, zero), clip) in scale.iter_mut().zip(&mut zero).zip(clips) {
                    *scale = stored((high * clip - low * clip) / levels);
                    let steps = (clamped(-(low * clip) / *scale, range) + ROUND) - ROUND;
                    *zero = if *scale > 0.0 { steps } else { 0.0 };
                }
            }
            GroupOffset::Minimum => {
                let (middle, half) = ((low + high) / 2.0, (high - low) / 2.0);
                for ((scale, minimum), clip) in scale.iter_mut().zip(&mut minimum).zip(clips) {
                    let reach = half * clip;
                    *minimum = stored(middle - reach);
                    *scale = stored((middle + reach - *minimum) / levels);
                }
            }
        }
        Self { offset: format.offset, scale, zero, minimum, range }
    }

    /// The grid over one of the fractions.
    #[inline(always)]
    pub(super) fn get(&self, index: usize) -> Grid {
        let (scale, zero, minimum) = (self.scale[index], self.zero[index], self.minimum[index]);
        Grid { offset: self.offset, scale, zero, minimum, range: self.range }
    }
}

impl Grid {
    /// A number whose lower bits are those of the integer nearest to a value.
    #[inline(always)]
    pub(super) fn bits(self, value: f32) -> u32 {
        // Without a step, `zero` is the integer of every value.
        let divisor = if self.scale > 0.0 { self.scale } else { f32::INFINITY };
        self.rounded((value - self.minimum) / divisor + self.zero).to_bits()
    }

    /// The sum of squared errors; infinite if the scale or minimum overflows its type.
    #[inline(always)]
    pub(super) fn error(self, values: &[f32]) -> f32 {
        let squares = if self.scale == 0.0 {
            sum(values, |value| (value - self.minimum).powi(2))
        } else {
            // Errors are measured in steps, which is fewer operations, none of them a division.
            let per_step = 1.0 / self.scale;
            let squares = match self.offset {
                GroupOffset::Symmetric => self.squares(values, |value| value * per_step),
                GroupOffset::ZeroPoint => self.squares(values, |value| value * per_step + self.zero),
                GroupOffset::Minimum => self.squares(values, |value| (value - self.minimum) * per_step),
            };
            squares * self.scale * self.scale
        };
        if squares.is_nan() { f32::INFINITY } else { squares }
    }

    /// The sum of squared errors in units of the squared step, given the number of steps of each value.
    #[inline(always)]
    fn squares(self, values: &[f32], steps: impl Fn(f32) -> f32) -> f32 {
        sum(values, |value| {
            let steps = steps(value);
            ((self.rounded(steps) - ROUND) - steps).powi(2)
        })
    }

    /// The integer nearest to a real number of steps, plus [`ROUND`].
    #[inline(always)]
    fn rounded(self, steps: f32) -> f32 {
        // Clamping before rounding gives the same result, and keeps the value small enough for `ROUND`.
        clamped(steps, self.range) + ROUND
    }
}

/// As `f32::clamp`, but without its check of the range, which is in the way of vectors.
#[inline(always)]
fn clamped(value: f32, (low, high): (f32, f32)) -> f32 {
    let value = if value < low { low } else { value };
    if value > high { high } else { value }
}

/// The sum over all values, in an order that vectorises.
#[inline(always)]
fn sum(values: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let (runs, rest) = values.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for run in runs {
        sums.iter_mut().zip(run).for_each(|(sum, value)| *sum += of(*value));
    }
    sums.iter().sum::<f32>() + rest.iter().map(|value| of(*value)).sum::<f32>()
}
