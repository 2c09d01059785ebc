//! The definition of quantisation, one value at a time: what the fast form must compute bit for bit.

use super::super::{GroupBits, GroupFormat, GroupOffset};

/// The representable values of a group: `scale * (integer - zero) + minimum`.
#[derive(Clone, Copy)]
struct Grid {
    scale: f32,
    zero: f32,
    minimum: f32,
    range: (f32, f32),
}

/// Quantises a row of finite values.
pub(super) fn quantise_row(format: GroupFormat, values: &[f32], search: bool) -> Vec<u8> {
    let parts = format.row(values.len()).unwrap();
    let mut row = vec![0; parts.bytes];
    let width = format.scale.dtype().bytes();
    for (group, values) in values.chunks(parts.columns).enumerate() {
        let grid = best_grid(format, values, search);
        format.scale.write(grid.scale, &mut row[group * width..][..width]);
        let offset = parts.offsets.start;
        match format.offset {
            GroupOffset::Symmetric => {}
            GroupOffset::ZeroPoint => row[offset + group] = grid.zero as u8,
            GroupOffset::Minimum => {
                format.scale.write(grid.minimum, &mut row[offset + group * width..][..width]);
            }
        }
        for (index, value) in values.iter().enumerate() {
            let at = group * parts.columns + index;
            let divisor = if grid.scale > 0.0 { grid.scale } else { f32::INFINITY };
            let steps = (value - grid.minimum) / divisor + grid.zero;
            let integer = steps.clamp(grid.range.0, grid.range.1).round_ties_even() as i32;
            match format.bits {
                GroupBits::Eight => row[parts.integers.start + at] = integer as u8,
                GroupBits::Four => {
                    let nibble = if format.offset == GroupOffset::Symmetric { integer + 8 } else { integer };
                    row[parts.integers.start + at / 2] |= (nibble as u8 & 15) << (4 * (at % 2));
                }
            }
        }
    }
    row
}

fn best_grid(format: GroupFormat, values: &[f32], search: bool) -> Grid {
    let (low, high) =
        values.iter().fold((values[0], values[0]), |(low, high), value| (low.min(*value), high.max(*value)));
    let whole = grid(format, low, high, 1.0);
    if !search {
        return whole;
    }
    let mut best = (error(whole, values), whole);
    for clip in [0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7] {
        let grid = grid(format, low, high, clip);
        let error = error(grid, values);
        if error < best.0 {
            best = (error, grid);
        }
    }
    best.1
}

fn grid(format: GroupFormat, low: f32, high: f32, clip: f32) -> Grid {
    let levels = if format.bits == GroupBits::Four { 15.0 } else { 255.0 };
    let largest = (levels - 1.0) / 2.0;
    let mut bytes = [0; 4];
    let mut stored = |value: f32| {
        let bytes = &mut bytes[..format.scale.dtype().bytes()];
        format.scale.write(value, bytes);
        format.scale.read(bytes)
    };
    match format.offset {
        GroupOffset::Symmetric => {
            let scale = stored(low.abs().max(high.abs()) * clip / largest);
            Grid { scale, zero: 0.0, minimum: 0.0, range: (-largest, largest) }
        }
        GroupOffset::ZeroPoint => {
            let (low, high) = (low.min(0.0) * clip, high.max(0.0) * clip);
            let scale = stored((high - low) / levels);
            let zero = if scale > 0.0 { (-low / scale).round_ties_even().clamp(0.0, levels) } else { 0.0 };
            Grid { scale, zero, minimum: 0.0, range: (0.0, levels) }
        }
        GroupOffset::Minimum => {
            let (middle, reach) = ((low + high) / 2.0, (high - low) / 2.0 * clip);
            let minimum = stored(middle - reach);
            let scale = stored((middle + reach - minimum) / levels);
            Grid { scale, zero: 0.0, minimum, range: (0.0, levels) }
        }
    }
}

/// The sum of squared errors, in eight partial sums.
fn error(grid: Grid, values: &[f32]) -> f32 {
    let square = |value: f32| match grid.scale {
        0.0 => (value - grid.minimum).powi(2),
        scale => {
            let steps = (value - grid.minimum) * (1.0 / scale) + grid.zero;
            (steps.clamp(grid.range.0, grid.range.1).round_ties_even() - steps).powi(2)
        }
    };
    let (runs, rest) = values.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for run in runs {
        sums.iter_mut().zip(run).for_each(|(sum, value)| *sum += square(*value));
    }
    let squares = sums.iter().sum::<f32>() + rest.iter().map(|value| square(*value)).sum::<f32>();
    let error = if grid.scale == 0.0 { squares } else { squares * grid.scale * grid.scale };
    if error.is_nan() { f32::INFINITY } else { error }
}
