//! Penalties on logits, and the largest element of a row.

use crate::{
    floats::{FloatFrame, FloatOutput, FloatRows},
    kernel::Kernel,
    parallel::Worker,
};
use dsrun_core::{
    Result,
    op::{Argmax, IN_PROMPT, LogitProcess, SamplingColumn},
};
use dsrun_host::Frame;

impl Kernel for LogitProcess {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (logits, requests) = (frame.floats(0)?, frame.input::<i32>(1)?);
        let (parameters, counts) = (frame.input::<f32>(2)?, frame.input::<i32>(3)?);
        let bias = frame.has(4).then(|| frame.input::<f32>(4)).transpose()?;
        let mask = frame.has(5).then(|| frame.input::<u32>(5)).transpose()?;
        let mut capacity = parameters.rows.min(counts.rows);
        if let Some(bias) = &bias {
            capacity = capacity.min(bias.rows);
        }
        let mut rows = logits.rows.min(requests.rows);
        if let Some(mask) = &mask {
            rows = rows.min(mask.rows);
        }
        let wanted = |row: usize| requests.index(row, capacity).is_some();
        frame.floats_mut(0)?.fill_rows_if(&mut worker.team, rows, 4, wanted, |row, out, _| {
            let Some(request) = requests.index(row, capacity) else { return };
            logits.data.widen(logits.row_start(row), out);
            let parameter = |column: SamplingColumn| parameters.row(request)[column as usize];
            let repetition = parameter(SamplingColumn::RepetitionPenalty);
            let presence = parameter(SamplingColumn::PresencePenalty);
            let frequency = parameter(SamplingColumn::FrequencyPenalty);
            if (repetition, presence, frequency) != (1.0, 0.0, 0.0) {
                for (x, count) in out.iter_mut().zip(counts.row(request)) {
                    if *count == 0 {
                        continue;
                    }
                    *x = if *x > 0.0 { *x / repetition } else { *x * repetition };
                    let generated = *count & (IN_PROMPT - 1);
                    if generated > 0 {
                        *x = *x - frequency * generated as f32 - presence;
                    }
                }
            }
            if let Some(bias) = &bias {
                out.iter_mut().zip(bias.row(request)).for_each(|(x, bias)| *x += bias);
            }
            if let Some(mask) = &mask {
                for (values, word) in out.chunks_mut(32).zip(mask.row(row)) {
                    for (bit, x) in values.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *x = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        });
        Ok(())
    }
}

/// Index and value of the largest element, the first of equal ones; NaN counts as minus infinity. `None` if there is
/// nothing but NaN.
pub(super) fn largest(values: &[f32]) -> Option<(usize, f32)> {
    // The largest of each group first, which needs no branches; then where it is.
    let group =
        |values: &[f32]| values.iter().fold(f32::NEG_INFINITY, |best, x| if *x > best { *x } else { best });
    let mut best = f32::NEG_INFINITY;
    let mut best_start = 0;
    for (index, values) in values.chunks(256).enumerate() {
        let (groups, rest) = values.as_chunks::<16>();
        let mut lanes = [f32::NEG_INFINITY; 16];
        for values in groups {
            for (lane, value) in lanes.iter_mut().zip(values) {
                *lane = if *value > *lane { *value } else { *lane };
            }
        }
        let here = group(&lanes).max(group(rest));
        if here > best {
            (best, best_start) = (here, index * 256);
        }
    }
    if best == f32::NEG_INFINITY {
        // Minus infinity everywhere, or NaN, which counts as that: the first of equal ones is element 0.
        let any_number = values.iter().any(|value| !value.is_nan());
        return any_number.then_some((0, best));
    }
    let offset = values[best_start..].iter().position(|value| *value == best)?;
    Some((best_start + offset, best))
}

impl Kernel for Argmax {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (x, mut ids) = (frame.floats(0)?, frame.output::<i32>(0)?);
        for row in 0..x.rows.min(ids.rows) {
            let [scratch] = worker.team.lane().split([x.row_scratch()]);
            let best = largest(x.row(row, scratch));
            *ids.at_mut(row) = best.and_then(|(index, _)| i32::try_from(index).ok()).unwrap_or(-1);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(&[], None)]
    #[case(&[f32::NAN, f32::NAN], None)]
    #[case(&[f32::NAN, f32::NEG_INFINITY], Some(0))]
    #[case(&[f32::NEG_INFINITY, f32::NAN], Some(0))]
    #[case(&[1.0, 3.0, f32::NAN, 3.0], Some(1))]
    #[case(&[-0.0, 0.0], Some(0))]
    #[case(&[1.0, f32::INFINITY], Some(1))]
    fn largest_is_the_first_of_equals(#[case] values: &[f32], #[case] expected: Option<usize>) {
        assert_eq!(largest(values).map(|(index, _)| index), expected);
    }

    #[rstest]
    fn largest_is_found_anywhere(#[values(0, 15, 16, 255, 256, 700, 999)] place: usize) {
        let mut values: Vec<f32> = (0..1000).map(|index| (index % 7) as f32).collect();
        values[place] = 10.0;
        values[999] = 10.0;
        assert_eq!(largest(&values), Some((place, 10.0)));
    }
}
