//! Quantisation of rows to group formats.

mod grid;

use super::group::{GroupBits, GroupFormat, GroupOffset, GroupRow};
use super::simd::dispatched;
use crate::{Error, Result};
use grid::{Grid, Grids};

/// The number of fractions of a group's range that the search tries.
const TRIED: usize = 9;

/// The fractions of a group's range that the search tries, and 1 up to a whole number of vectors. A smaller range clips outliers
/// and makes the step finer.
const CLIPS: [f32; TRIED.next_multiple_of(LANES)] =
    [1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];

/// The number of elements that are computed at a time.
const LANES: usize = 8;

/// The number of integers that are packed at a time.
const PACKED: usize = 32;

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
        if !all_finite(values)
            && let Some(at) = values.iter().position(|value| !value.is_finite())
        {
            return Err(Error::invalid(format!("element {at} of the row is {}, must be finite", values[at])));
        }
        row.fill(0);
        encode(self, values, search, &parts, row);
        Ok(())
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

dispatched! {
    /// Whether no value is infinite or NaN.
    fn all_finite(values: &[f32]) -> bool = all_finite_body;
    /// Writes a row of finite values into `row`, which is zero.
    fn encode(format: GroupFormat, values: &[f32], search: bool, parts: &GroupRow, row: &mut [u8]) = encode_body;
}

#[inline(always)]
fn all_finite_body(values: &[f32]) -> bool {
    // Without an early exit, so that it vectorises.
    values.iter().fold(true, |all, value| all & value.is_finite())
}

#[inline(always)]
fn encode_body(format: GroupFormat, values: &[f32], search: bool, parts: &GroupRow, row: &mut [u8]) {
    let per_group = parts.columns * format.bits.bits() / 8;
    for group in 0..parts.groups {
        let values = &values[group * parts.columns..][..parts.columns];
        let grid = best_grid(format, values, search);
        format.write_grid(grid, group, parts.offsets.start, row);
        let integers = &mut row[parts.integers.start + group * per_group..][..per_group];
        match format.bits {
            GroupBits::Eight => write_bytes(grid, values, integers),
            GroupBits::Four => write_nibbles(grid, values, integers),
        }
    }
}

/// The tried grid with the least squared error.
#[inline(always)]
fn best_grid(format: GroupFormat, values: &[f32], search: bool) -> Grid {
    let (low, high) = range(values);
    if !search {
        return Grids::new(format, low, high, [1.0]).get(0);
    }
    let grids = Grids::new(format, low, high, CLIPS);
    // All errors before the first comparison, so that the processor computes several at a time.
    let mut errors = [0.0; TRIED];
    errors.iter_mut().enumerate().for_each(|(index, error)| *error = grids.get(index).error(values));
    let mut best = 0;
    for index in 1..TRIED {
        best = if errors[index] < errors[best] { index } else { best };
    }
    grids.get(best)
}

/// The smallest and the largest value; zeros if there are none.
#[inline(always)]
fn range(values: &[f32]) -> (f32, f32) {
    // Of equal values, which zeros of both signs are, the first counts.
    let low = reduced(values, |a, b| if b < a { b } else { a });
    (low, reduced(values, |a, b| if b > a { b } else { a }))
}

/// The one value that is left if of every two one is chosen; 0 if there are none.
#[inline(always)]
fn reduced(values: &[f32], choose: impl Fn(f32, f32) -> f32) -> f32 {
    let first = values.first().copied().unwrap_or(0.0);
    let (runs, rest) = values.as_chunks::<LANES>();
    let mut lanes = [first; LANES];
    for run in runs {
        lanes.iter_mut().zip(run).for_each(|(lane, value)| *lane = choose(*lane, *value));
    }
    lanes.iter().chain(rest).fold(first, |chosen, value| choose(chosen, *value))
}

/// Writes integers of 8 bits.
#[inline(always)]
fn write_bytes(grid: Grid, values: &[f32], integers: &mut [u8]) {
    // The lower eight bits are the byte of signed and unsigned integers alike.
    integers.iter_mut().zip(values).for_each(|(byte, value)| *byte = grid.bits(*value) as u8);
}

/// Writes integers of 4 bits, two in a byte.
#[inline(always)]
fn write_nibbles(grid: Grid, values: &[f32], integers: &mut [u8]) {
    // Flipping the highest of four bits adds 8.
    let sign = if grid.offset == GroupOffset::Symmetric { 8 } else { 0 };
    let (runs, rest) = values.as_chunks::<PACKED>();
    let (packed, packed_rest) = integers.as_chunks_mut::<{ PACKED / 2 }>();
    for (packed, run) in packed.iter_mut().zip(runs) {
        let mut nibbles = [0u8; PACKED];
        nibbles.iter_mut().zip(run).for_each(|(nibble, value)| *nibble = grid.bits(*value) as u8);
        for (byte, pair) in packed.iter_mut().zip(nibbles.as_chunks().0) {
            let pair = u16::from_le_bytes(*pair) ^ (sign * 0x101);
            *byte = (pair & 15 | pair >> 4 & 0xF0) as u8;
        }
    }
    for (byte, pair) in packed_rest.iter_mut().zip(rest.as_chunks::<2>().0) {
        let nibble = |value: f32| (grid.bits(value) ^ u32::from(sign)) & 15;
        *byte = (nibble(pair[0]) | nibble(pair[1]) << 4) as u8;
    }
}

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
