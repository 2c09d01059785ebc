//! Quantisation of rows to group formats.

use super::group::{GroupBits, GroupFormat, GroupOffset};
use crate::{Error, Result};

/// The fractions of a group's range that the search tries. A smaller range clips outliers and makes the step finer.
const CLIPS: [f32; 9] = [1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7];

/// Adding and subtracting 1.5 * 2^23 rounds a number below 2^22 to the nearest integer, ties to even, because f32 values are
/// one apart there. Unlike `round_ties_even` this vectorises on every processor. The low bits of the sum are those of the integer in
/// two's complement, which spares a conversion that saturates.
const ROUND: f32 = 12_582_912.0;

/// The number of partial sums of squared errors, so that the sum vectorises.
const LANES: usize = 8;

/// The representable values of a group: `scale * (integer - zero) + minimum`.
#[derive(Clone, Copy, Debug)]
struct Grid {
    scale: f32,
    /// The scale, or infinity if the scale is 0, which makes `zero` the integer of every value.
    divisor: f32,
    zero: f32,
    minimum: f32,
    /// The smallest and largest integer.
    range: (f32, f32),
}

impl GroupFormat {
    /// Quantises a row to this format, rounding to nearest. Scales cover the range of each group, or, with `search`, the
    /// fraction of it with the least squared error. Integers of symmetric formats are within ±127 or ±7.
    ///
    /// # Errors
    /// If the length of `row` is not that of `values` in this format, or a value is not finite.
    pub fn quantise_row(self, values: &[f32], search: bool, row: &mut [u8]) -> Result<()> {
        let Some(parts) = self.row(values.len()).filter(|parts| parts.bytes == row.len()) else {
            let message = format!("a row of {} {self} elements is not {} bytes", values.len(), row.len());
            return Err(Error::invalid(message));
        };
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(Error::invalid(format!("element {at} of the row is {}, must be finite", values[at])));
        }
        row.fill(0);
        let per_group = parts.columns * self.bits.bits() / 8;
        for group in 0..parts.groups {
            let values = &values[group * parts.columns..][..parts.columns];
            let grid = self.best_grid(values, search);
            self.write_grid(grid, group, parts.offsets.start, row);
            let integers = &mut row[parts.integers.start + group * per_group..][..per_group];
            match self.bits {
                // The lower eight bits are the byte of signed and unsigned integers alike.
                GroupBits::Eight => {
                    for (byte, value) in integers.iter_mut().zip(values) {
                        *byte = grid.bits(*value) as u8;
                    }
                }
                GroupBits::Four => {
                    let shift = if self.offset == GroupOffset::Symmetric { 8 } else { 0 };
                    let nibble = |value: f32| (grid.bits(value) + shift) & 15;
                    for (byte, pair) in integers.iter_mut().zip(values.chunks_exact(2)) {
                        *byte = (nibble(pair[0]) | nibble(pair[1]) << 4) as u8;
                    }
                }
            }
        }
        Ok(())
    }

    /// The tried grid with the least squared error.
    fn best_grid(self, values: &[f32], search: bool) -> Grid {
        let first = values.first().copied().unwrap_or(0.0);
        let (low, high) =
            values.iter().fold((first, first), |(low, high), value| (low.min(*value), high.max(*value)));
        let whole = self.grid(low, high, 1.0);
        if !search {
            return whole;
        }
        let tried = CLIPS[1..].iter().map(|clip| self.grid(low, high, *clip));
        let mut best = (whole.error(values), whole);
        for grid in tried {
            let error = grid.error(values);
            if error < best.0 {
                best = (error, grid);
            }
        }
        best.1
    }

    /// The grid over the fraction `clip` of a range, with scale and offset rounded to their stored types.
    fn grid(self, low: f32, high: f32, clip: f32) -> Grid {
        let levels = (1u32 << self.bits.bits()) as f32 - 1.0;
        let largest = (levels - 1.0) / 2.0;
        let mut bytes = [0; 4];
        let mut stored = |value: f32| self.scale.write(value, &mut bytes[..self.scale.dtype().bytes()]);
        let grid = |scale: f32, zero: f32, minimum: f32, range: (f32, f32)| Grid {
            scale,
            divisor: if scale > 0.0 { scale } else { f32::INFINITY },
            zero,
            minimum,
            range,
        };
        match self.offset {
            GroupOffset::Symmetric => {
                let scale = stored(low.abs().max(high.abs()) * clip / largest);
                grid(scale, 0.0, 0.0, (-largest, largest))
            }
            GroupOffset::ZeroPoint => {
                // The range includes 0, so that an integer represents it exactly.
                let (low, high) = (low.min(0.0) * clip, high.max(0.0) * clip);
                let scale = stored((high - low) / levels);
                let zero =
                    if scale > 0.0 { (-low / scale).round_ties_even().clamp(0.0, levels) } else { 0.0 };
                grid(scale, zero, 0.0, (0.0, levels))
            }
            GroupOffset::Minimum => {
                let (middle, reach) = ((low + high) / 2.0, (high - low) / 2.0 * clip);
                let minimum = stored(middle - reach);
                let scale = stored((middle + reach - minimum) / levels);
                grid(scale, 0.0, minimum, (0.0, levels))
            }
        }
    }

    fn write_grid(self, grid: Grid, group: usize, offsets: usize, row: &mut [u8]) {
        let width = self.scale.dtype().bytes();
        self.scale.write(grid.scale, &mut row[group * width..][..width]);
        match self.offset {
            GroupOffset::Symmetric => {}
            GroupOffset::ZeroPoint => row[offsets + group] = grid.zero as u8,
            GroupOffset::Minimum => {
                self.scale.write(grid.minimum, &mut row[offsets + group * width..][..width]);
            }
        }
    }
}

impl Grid {
    /// The integer nearest to a real number of steps, plus [`ROUND`].
    #[inline]
    fn rounded(self, steps: f32) -> f32 {
        // Clamping before rounding gives the same result, and keeps the value small enough for `ROUND`.
        steps.clamp(self.range.0, self.range.1) + ROUND
    }

    /// A number whose lower bits are those of the integer nearest to a value.
    #[inline]
    fn bits(self, value: f32) -> u32 {
        self.rounded((value - self.minimum) / self.divisor + self.zero).to_bits()
    }

    /// The sum of squared errors; infinite if the scale or minimum overflows its type.
    fn error(self, values: &[f32]) -> f32 {
        let squares = match self.scale {
            0.0 => sum(values, |value| (value - self.minimum).powi(2)),
            scale => {
                // Errors are measured in steps, which is fewer operations, none of them a division.
                let per_step = 1.0 / scale;
                let squares = sum(values, |value| {
                    let steps = (value - self.minimum) * per_step + self.zero;
                    ((self.rounded(steps) - ROUND) - steps).powi(2)
                });
                squares * scale * scale
            }
        };
        if squares.is_nan() { f32::INFINITY } else { squares }
    }
}

/// The sum over all values, in an order that vectorises.
#[inline]
fn sum(values: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let (runs, rest) = values.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for run in runs {
        sums.iter_mut().zip(run).for_each(|(sum, value)| *sum += of(*value));
    }
    sums.iter().sum::<f32>() + rest.iter().map(|value| of(*value)).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::super::{GroupFormat, WeightFormat};

    fn values(count: usize) -> Vec<f32> {
        let mut state = 7u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.4
        };
        (0..count).map(|_| next() * next() * next()).collect()
    }

    fn round_trip(format: GroupFormat, values: &[f32], search: bool) -> Vec<f32> {
        let format_of_weight = WeightFormat::Group(format);
        let mut row = vec![0xAA; format_of_weight.row_bytes(values.len()).unwrap()];
        format.quantise_row(values, search, &mut row).unwrap();
        let mut out = vec![0.0; values.len()];
        format_of_weight.decode_row(&row, &mut out).unwrap();
        out
    }

    fn error(values: &[f32], found: &[f32]) -> f32 {
        values.iter().zip(found).map(|(value, found)| (value - found).powi(2)).sum()
    }

    #[test]
    fn every_format_is_within_half_a_step() {
        let values = values(256);
        let (low, high) =
            values.iter().fold((0f32, 0f32), |(low, high), value| (low.min(*value), high.max(*value)));
        for format in GroupFormat::all() {
            let steps = ((1 << format.bits.bits()) - 2) as f32;
            // Rounding changes a stored scale or minimum by up to 2^-9 of the range; a minimum shifts the whole grid.
            let limit = 2.0 * low.abs().max(high) * (0.5 / steps + 2f32.powi(-8));
            let found = round_trip(format, &values, false);
            for (value, found) in values.iter().zip(&found) {
                assert!((value - found).abs() <= limit, "{format}: {found} for {value}");
            }
            let searched = error(&values, &round_trip(format, &values, true));
            assert!(searched <= error(&values, &found) * 1.0001, "{format}: searching makes it worse");
        }
    }

    #[test]
    fn values_on_the_grid_are_exact() {
        for (name, scale) in [("int4g32", 7), ("int8", 127), ("int4g32z", 15), ("int8g32m_f16", 255)] {
            let format = GroupFormat::from_name(name).unwrap();
            let signed = matches!(name, "int4g32" | "int8");
            let values: Vec<f32> = (0..32)
                .map(|index| match (index % 7, signed) {
                    (0, true) => -scale,
                    (0, false) => 0,
                    (1, _) => scale,
                    (other, _) => other,
                })
                .map(|integer| integer as f32 * 0.25)
                .collect();
            assert_eq!(round_trip(format, &values, true), values, "{name}");
        }
    }

    #[test]
    fn rows_of_one_value_stay_near_it() {
        for format in GroupFormat::all() {
            assert_eq!(round_trip(format, &[0.0; 128], true), [0.0; 128], "{format}");
            let ones = round_trip(format, &[1.0; 128], true);
            assert!(ones.iter().all(|one| (one - 1.0).abs() < 0.01), "{format}: {}", ones[0]);
        }
    }

    #[test]
    fn rows_of_the_wrong_length_or_with_nan_are_refused() {
        let mut row = [0; 32];
        let error = GroupFormat::INT8.quantise_row(&[1.0, f32::NAN], false, &mut row).unwrap_err();
        assert!(error.to_string().contains("element 1 of the row is NaN"), "{error}");
        assert!(GroupFormat::INT8.quantise_row(&[1.0; 17], false, &mut row).is_err());
    }
}
