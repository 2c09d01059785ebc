//! Products with the keys and values of attention as they are in memory, for few query heads: those of a token.
//!
//! A product adds up the same terms in the same order as one with panels ([`super::temporary`]), so that a row's result does not
//! depend on the rows beside it. But keys are transposed in registers, sixteen at a time, and neither keys nor values are written
//! anywhere: with few heads that would take longer than the products.

use super::temporary::{Elements, Number, Reader, Rows, prefetch, with_reader};
use crate::{
    floats::Floats,
    lanes::{InstructionSet, Lanes, Task, WIDTH},
};
use std::ops::Range;

/// The number of heads up to which products with rows are faster than making panels first.
pub(crate) const FEW_HEADS: usize = 8;

/// A factor for each of some rows of a tensor, or for each of their elements, for several heads.
pub(crate) struct RowProduct<'a> {
    pub(crate) rows: &'a Rows<'a>,
    /// The rows that take part. They are in memory.
    pub(crate) part: Range<usize>,
    /// The factors of a head after those of another.
    pub(crate) x: &'a [f32],
    pub(crate) x_stride: usize,
    pub(crate) heads: usize,
    /// Written in whole vectors.
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
}

impl RowProduct<'_> {
    /// `out[h][k] = sum_i x[h][i] rows[k][i]`, where `k` counts from the start of the part.
    pub(crate) fn dot(self, instructions: InstructionSet) {
        with_reader!(self.rows, |from| instructions.run_floats(Dot { from, of: self }));
    }

    /// `out[h][i] += sum_k x[h][k] rows[k][i]`, where `k` counts from the start of the part.
    pub(crate) fn add_weighted(self, instructions: InstructionSet) {
        with_reader!(self.rows, |from| instructions.run_floats(Weighted { from, of: self }));
    }
}

/// Calls a method with as many heads at once as the registers hold, until all are done.
macro_rules! for_heads {
    ($self:ident, $lanes:ident, $method:ident) => {{
        let mut head = 0;
        while head < $self.of.heads {
            let left = $self.of.heads - head;
            head += match if L::ROWS < FEW_HEADS { left.min(4) } else { left } {
                1 => $self.$method::<L, 1>($lanes, head),
                2 => $self.$method::<L, 2>($lanes, head),
                3 => $self.$method::<L, 3>($lanes, head),
                4..8 => $self.$method::<L, 4>($lanes, head),
                _ => $self.$method::<L, 8>($lanes, head),
            };
        }
    }};
}

struct Dot<'a, 'r, N> {
    from: Reader<'r, N>,
    of: RowProduct<'a>,
}

impl<N: Number> Task for Dot<'_, '_, N> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        for_heads!(self, lanes, heads);
    }
}

impl<N: Number> Dot<'_, '_, N> {
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "plain loops over arrays end up in registers")]
    fn heads<L: Lanes, const M: usize>(&mut self, lanes: L, head: usize) -> usize {
        let RowProduct { part, x, x_stride, out, out_stride, .. } = &mut self.of;
        let size = self.from.rows.size;
        let (whole, rest) = (size / WIDTH, size % WIDTH);
        let mut factors = [&x[..0]; M];
        for m in 0..M {
            factors[m] = &x[(head + m) * *x_stride..][..size];
        }
        for first in part.clone().step_by(WIDTH) {
            let rows = self.from.sixteen(first);
            let mut sums = [lanes.splat(0.0); M];
            for column in 0..whole {
                let square = self.from.square(lanes, &rows, first, column);
                for part in 0..4 {
                    let vectors = N::columns(lanes, &square, part);
                    for m in 0..M {
                        let Some(factors) = factors[m].as_chunks::<WIDTH>().0.get(column) else { continue };
                        for index in 0..4 {
                            sums[m] = lanes.mul_add(
                                vectors[index],
                                lanes.splat(factors[4 * part + index]),
                                sums[m],
                            );
                        }
                    }
                }
            }
            if rest > 0 {
                let vectors = self.from.transposed_tails(lanes, first);
                for m in 0..M {
                    for (vector, factor) in vectors.iter().zip(&factors[m][whole * WIDTH..]) {
                        sums[m] = lanes.mul_add(*vector, lanes.splat(*factor), sums[m]);
                    }
                }
            }
            for m in 0..M {
                let start = (head + m) * *out_stride + first - part.start;
                if let Some(out) = out[start..].first_chunk_mut() {
                    lanes.store(sums[m], out);
                }
            }
        }
        M
    }
}

struct Weighted<'a, 'r, N> {
    from: Reader<'r, N>,
    of: RowProduct<'a>,
}

impl<N: Number> Task for Weighted<'_, '_, N> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        for_heads!(self, lanes, heads);
    }
}

impl<N: Number> Weighted<'_, '_, N> {
    #[inline(always)]
    fn heads<L: Lanes, const M: usize>(&mut self, lanes: L, head: usize) -> usize {
        let size = self.from.rows.size;
        let (whole, rest) = (size / WIDTH, size % WIDTH);
        let mut column = 0;
        // As many sums as fit the registers.
        while L::ROWS / M >= 3 && column + 4 <= whole {
            self.columns::<L, M, 4>(lanes, head, column);
            column += 4;
        }
        while column + 2 <= whole {
            self.columns::<L, M, 2>(lanes, head, column);
            column += 2;
        }
        while column < whole {
            self.columns::<L, M, 1>(lanes, head, column);
            column += 1;
        }
        if rest > 0 {
            self.last_columns::<L, M>(lanes, head, whole);
        }
        M
    }

    /// The sums of `C` vectors of columns.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "plain loops over arrays end up in registers")]
    fn columns<L: Lanes, const M: usize, const C: usize>(&mut self, lanes: L, head: usize, first: usize) {
        let RowProduct { part, x, x_stride, .. } = &self.of;
        let mut factors = [&x[..0]; M];
        for m in 0..M {
            factors[m] = &x[(head + m) * x_stride..][..part.len()];
        }
        let mut sums = [[lanes.splat(0.0); C]; M];
        for (index, number) in part.clone().enumerate() {
            let (row, ahead) = self.from.row(number);
            let mut vectors = [lanes.splat(0.0); C];
            for c in 0..C {
                prefetch(lanes, ahead, first + c);
                if let Some(numbers) = row.as_chunks::<WIDTH>().0.get(first + c) {
                    vectors[c] = N::load(lanes, numbers, self.from.scale(number, first + c));
                }
            }
            for m in 0..M {
                let factor = lanes.splat(factors[m][index]);
                for c in 0..C {
                    sums[m][c] = lanes.mul_add(vectors[c], factor, sums[m][c]);
                }
            }
        }
        for m in 0..M {
            for c in 0..C {
                self.add(lanes, head + m, first + c, sums[m][c]);
            }
        }
    }

    /// The sums of the columns after the last whole vector.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "plain loops over arrays end up in registers")]
    fn last_columns<L: Lanes, const M: usize>(&mut self, lanes: L, head: usize, column: usize) {
        let RowProduct { part, x, x_stride, .. } = &self.of;
        let mut sums = [lanes.splat(0.0); M];
        for (index, row) in part.clone().enumerate() {
            let vector = self.from.tail(lanes, row);
            for m in 0..M {
                let factor = x[(head + m) * x_stride + index];
                sums[m] = lanes.mul_add(vector, lanes.splat(factor), sums[m]);
            }
        }
        for m in 0..M {
            self.add(lanes, head + m, column, sums[m]);
        }
    }

    #[inline(always)]
    fn add<L: Lanes>(&mut self, lanes: L, head: usize, column: usize, sums: L::Float) {
        let out = &mut self.of.out[head * self.of.out_stride + column * WIDTH..];
        if let Some(out) = out.first_chunk_mut() {
            // A product by one rounds nothing, so that this is an addition.
            lanes.store(lanes.mul_add(sums, lanes.splat(1.0), lanes.load(out)), out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::temporary::{
            PanelProduct, SCALES, copied_floats, copy_rows, transpose_rows, transposed_floats,
        },
        *,
    };
    use half::{bf16, f16};
    use rstest::rstest;

    fn number(index: usize) -> f32 {
        ((index * 37) % 64) as f32 / 32.0 - 1.01
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[rstest]
    fn results_are_those_of_panels_to_the_bit(
        #[values(1, 16, 41, 64)] count: usize,
        #[values(8, 16, 64, 80, 100)] size: usize,
        #[values(1, 2, 3, 5, 8)] heads: usize,
    ) {
        let data: Vec<f32> = (0..count * (size + 3)).map(number).collect();
        let starts: Vec<usize> = (0..count).map(|row| row * (size + 3)).collect();
        let halves: Vec<f16> = data.iter().map(|value| f16::from_f32(*value)).collect();
        let brains: Vec<bf16> = data.iter().map(|value| bf16::from_f32(*value)).collect();
        let part = count / 5..count;
        let scales: [[f32; SCALES]; 4] =
            std::array::from_fn(|group| std::array::from_fn(|row| 0.01 + number(17 * group + row).abs()));
        let bytes: Vec<i8> = data.iter().map(|value| (value * 127.0) as i8).collect();
        let floats = [Floats::F32(&data), Floats::F16(&halves), Floats::BF16(&brains)].map(Elements::Floats);
        for data in floats.into_iter().chain([Elements::Bytes(&bytes)]) {
            for instructions in InstructionSet::available() {
                let all = Rows { data, starts: &starts, ahead: &starts, size, scales: &scales };
                let (rows, length) = (&all, part.len());

                let x: Vec<f32> = (0..heads * size).map(|index| number(index + 5)).collect();
                let (x, x_stride) = (&x[..], size);
                let mut panels = vec![f32::NAN; transposed_floats(count, size)];
                transpose_rows(instructions, rows, &mut panels);
                let out_stride = count.next_multiple_of(WIDTH) + WIDTH;
                let (mut found, mut expected) =
                    (vec![0.0; heads * out_stride], vec![0.0; heads * out_stride]);
                let (part, out) = (part.clone(), &mut found[..]);
                RowProduct { rows, part: part.clone(), x, x_stride, heads, out, out_stride }
                    .dot(instructions);
                let panels = &panels[..];
                PanelProduct {
                    panels,
                    panel_count: count.div_ceil(WIDTH),
                    stride: size,
                    first: 0,
                    inputs: size,
                    x,
                    x_stride,
                    rows: heads,
                    out: &mut expected,
                    out_stride,
                    add: false,
                }
                .run(instructions);
                for head in 0..heads {
                    let (found, expected) = (&found[head * out_stride..], &expected[head * out_stride..]);
                    assert_eq!(
                        bits(&found[..length]),
                        bits(&expected[part.clone()]),
                        "{instructions:?} {head}"
                    );
                }

                let x: Vec<f32> = (0..heads * length).map(|index| number(index + 9)).collect();
                let (x, x_stride) = (&x[..], length);
                let mut panels = vec![f32::NAN; copied_floats(count, size)];
                copy_rows(instructions, rows, &mut panels);
                let out_stride = size.next_multiple_of(WIDTH);
                let (mut found, mut expected) =
                    (vec![0.3; heads * out_stride], vec![0.3; heads * out_stride]);
                let out = &mut found[..];
                RowProduct { rows, part: part.clone(), x, x_stride, heads, out, out_stride }
                    .add_weighted(instructions);
                PanelProduct {
                    panels: &panels,
                    panel_count: out_stride / WIDTH,
                    stride: count,
                    first: part.start,
                    inputs: length,
                    x,
                    x_stride,
                    rows: heads,
                    out: &mut expected,
                    out_stride,
                    add: true,
                }
                .run(instructions);
                assert_eq!(bits(&found), bits(&expected), "{instructions:?}");
            }
        }
    }
}
