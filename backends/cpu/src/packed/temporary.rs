//! Panels that live for one call: the keys and values of attention.
//!
//! A panel is sixteen lanes wide, as those of weights are. Keys are transposed, so that a lane is a key; of values a lane is
//! a column. They are widened to f32 once, for all the rows that are multiplied with them.

use super::{
    panel::F32,
    tile::{Source, Tile},
};
use crate::{
    floats::Floats,
    lanes::{InstructionSet, Lanes, Task, WIDTH},
};
use dsrun_core::cache_row::CACHE_GROUP;
use half::{bf16, f16};

/// The start of a row that is not in memory; it reads as zeros.
pub(crate) const NOWHERE: usize = usize::MAX;

/// A type of numbers, sixteen of which are loaded at a time.
pub(super) trait Number: Copy {
    /// A square of sixteen rows and sixteen of their elements.
    type Square<L: Lanes>: Copy;

    /// Whether numbers are multiplied by scales.
    const SCALED: bool;

    fn load<L: Lanes>(lanes: L, from: &[Self; WIDTH], scale: f32) -> L::Float;
    /// Elements `16 column ..` of sixteen rows, times the scales of the rows.
    fn square<L: Lanes>(
        lanes: L,
        rows: &[(&[Self], *const Self); WIDTH],
        column: usize,
        scales: &[f32; WIDTH],
    ) -> Self::Square<L>;
    /// Elements `4 part ..` of the rows of a square, a vector for each element.
    fn columns<L: Lanes>(lanes: L, square: &Self::Square<L>, part: usize) -> [L::Float; 4];
}

impl Number for i8 {
    /// Words of four bytes, and the scales of the rows.
    type Square<L: Lanes> = ([L::Bits; 4], L::Float);

    const SCALED: bool = true;

    #[inline(always)]
    fn load<L: Lanes>(lanes: L, from: &[Self; WIDTH], scale: f32) -> L::Float {
        lanes.mul(lanes.load_i8(from), lanes.splat(scale))
    }

    /// Bytes are transposed before they are widened: a quarter of the work.
    #[inline(always)]
    fn square<L: Lanes>(
        lanes: L,
        rows: &[(&[Self], *const Self); WIDTH],
        column: usize,
        scales: &[f32; WIDTH],
    ) -> Self::Square<L> {
        let mut bytes = [&[0; WIDTH]; WIDTH];
        for index in 0..WIDTH {
            let (row, ahead) = rows[index];
            prefetch(lanes, ahead, column);
            if let Some(row) = row.as_chunks::<WIDTH>().0.get(column) {
                bytes[index] = row;
            }
        }
        (lanes.transpose_words(bytes), lanes.load(scales))
    }

    #[inline(always)]
    fn columns<L: Lanes>(lanes: L, square: &Self::Square<L>, part: usize) -> [L::Float; 4] {
        let (words, scales) = (square.0[part], square.1);
        [
            lanes.mul(lanes.signed_byte::<24>(words), scales),
            lanes.mul(lanes.signed_byte::<16>(words), scales),
            lanes.mul(lanes.signed_byte::<8>(words), scales),
            lanes.mul(lanes.signed_byte::<0>(words), scales),
        ]
    }
}

/// Implements [`Number`] for a type of floats, which are widened before they are transposed.
macro_rules! float_number {
    ($type:ty, |$lanes:ident, $from:ident| $load:expr) => {
        impl Number for $type {
            type Square<L: Lanes> = [L::Float; WIDTH];

            const SCALED: bool = false;

            #[inline(always)]
            fn load<L: Lanes>($lanes: L, $from: &[Self; WIDTH], _: f32) -> L::Float {
                $load
            }

            #[inline(always)]
            fn square<L: Lanes>(
                lanes: L,
                rows: &[(&[Self], *const Self); WIDTH],
                column: usize,
                _: &[f32; WIDTH],
            ) -> Self::Square<L> {
                let mut vectors = [lanes.splat(0.0); WIDTH];
                for index in 0..WIDTH {
                    let (row, ahead) = rows[index];
                    prefetch(lanes, ahead, column);
                    if let Some(numbers) = row.as_chunks::<WIDTH>().0.get(column) {
                        vectors[index] = Self::load(lanes, numbers, 1.0);
                    }
                }
                lanes.transpose(vectors)
            }

            #[inline(always)]
            fn columns<L: Lanes>(_: L, square: &Self::Square<L>, part: usize) -> [L::Float; 4] {
                [square[4 * part], square[4 * part + 1], square[4 * part + 2], square[4 * part + 3]]
            }
        }
    };
}

float_number!(f32, |lanes, from| lanes.load(from));
float_number!(f16, |lanes, from| lanes.load_f16(bytemuck::cast_ref(from)));
float_number!(bf16, |lanes, from| lanes.load_bf16(bytemuck::cast_ref(from)));

/// Prefetches elements `16 column ..` of a row, unless those before them are in the same 64 bytes.
#[inline(always)]
pub(super) fn prefetch<L: Lanes, N>(lanes: L, row: *const N, column: usize) {
    let columns = 64 / (WIDTH * size_of::<N>()).min(64);
    if column.is_multiple_of(columns) {
        lanes.prefetch(row.wrapping_add(column * WIDTH).cast());
    }
}

/// The elements of a tensor of keys or values.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Elements<'a> {
    Floats(Floats<'a>),
    /// Signed bytes, each group of which is multiplied by a scale ([`Rows::scales`]).
    Bytes(&'a [i8]),
}

impl Elements<'_> {
    /// Elements from `start` on, as many as `out` takes; bytes are multiplied by `scale`.
    fn widen(&self, start: usize, scale: f32, out: &mut [f32]) {
        match self {
            Self::Floats(data) => data.widen(start, out),
            Self::Bytes(data) => {
                out.iter_mut().zip(&data[start..]).for_each(|(out, byte)| *out = f32::from(*byte) * scale);
            }
        }
    }
}

/// The places of a group's scales: one for each row that is packed or multiplied at a time, and a vector more, so that sixteen can be
/// loaded from any row on.
pub(crate) const SCALES: usize = 64 + WIDTH;

/// Calls a function with a [`Reader`] of some rows, whatever the type of their elements.
macro_rules! with_reader {
    ($rows:expr, |$from:ident| $body:expr) => {{
        let rows = $rows;
        match rows.data {
            Elements::Floats(Floats::F32(data)) => {
                let $from = Reader { rows, data };
                $body
            }
            Elements::Floats(Floats::F16(data)) => {
                let $from = Reader { rows, data };
                $body
            }
            Elements::Floats(Floats::BF16(data)) => {
                let $from = Reader { rows, data };
                $body
            }
            Elements::Bytes(data) => {
                let $from = Reader { rows, data };
                $body
            }
        }
    }};
}
pub(super) use with_reader;

/// Rows of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) data: Elements<'a>,
    /// Where each row starts, or [`NOWHERE`].
    pub(crate) starts: &'a [usize],
    /// Where rows start that are packed next; they are prefetched.
    pub(crate) ahead: &'a [usize],
    /// Elements of a row.
    pub(crate) size: usize,
    /// For rows of bytes, the scales of all rows for each group of elements.
    pub(crate) scales: &'a [[f32; SCALES]],
}

/// Floats of the panels that [`transpose_rows`] makes of `rows` rows.
pub(crate) fn transposed_floats(rows: usize, size: usize) -> usize {
    rows.next_multiple_of(WIDTH) * size
}

/// Floats of the panels that [`copy_rows`] makes of `rows` rows.
pub(crate) fn copied_floats(rows: usize, size: usize) -> usize {
    rows * size.next_multiple_of(WIDTH)
}

/// Makes panels whose lanes are the rows: panel `p` has a vector for each element of rows `16 p ..`.
pub(crate) fn transpose_rows(instructions: InstructionSet, rows: &Rows<'_>, panels: &mut [f32]) {
    pack::<true>(instructions, rows, panels);
}

/// Makes panels whose lanes are columns: panel `p` has a vector for each row, of its elements `16 p ..`.
pub(crate) fn copy_rows(instructions: InstructionSet, rows: &Rows<'_>, panels: &mut [f32]) {
    pack::<false>(instructions, rows, panels);
}

fn pack<const TRANSPOSE: bool>(instructions: InstructionSet, rows: &Rows<'_>, panels: &mut [f32]) {
    let panels = panels.as_chunks_mut::<WIDTH>().0;
    with_reader!(rows, |from| instructions.run_floats(Pack::<_, TRANSPOSE> { from, panels }));
}

struct Pack<'a, N, const TRANSPOSE: bool> {
    from: Reader<'a, N>,
    panels: &'a mut [[f32; WIDTH]],
}

/// The rows of a tensor of one type.
pub(super) struct Reader<'a, N> {
    pub(super) rows: &'a Rows<'a>,
    /// The elements of their tensor.
    pub(super) data: &'a [N],
}

impl<'a, N: Number> Reader<'a, N> {
    /// A row, which is empty if its start is [`NOWHERE`], and the address of a row to prefetch.
    #[inline(always)]
    pub(super) fn row(&self, index: usize) -> (&'a [N], *const N) {
        let start = *self.rows.starts.get(index).unwrap_or(&NOWHERE);
        let row = if start == NOWHERE { &[] } else { &self.data[start..][..self.rows.size] };
        // Any address may be prefetched.
        (row, self.data.as_ptr().wrapping_add(*self.rows.ahead.get(index).unwrap_or(&0)))
    }

    /// The scale of elements `16 column ..` of a row; 1 for floats.
    #[inline(always)]
    pub(super) fn scale(&self, index: usize, column: usize) -> f32 {
        if !N::SCALED {
            return 1.0;
        }
        self.rows
            .scales
            .get(column * WIDTH / CACHE_GROUP)
            .and_then(|scales| scales.get(index))
            .copied()
            .unwrap_or(0.0)
    }

    /// Elements `16 column ..` of sixteen rows from `first` on; zeros for rows that are empty.
    #[inline(always)]
    pub(super) fn square<L: Lanes>(
        &self,
        lanes: L,
        rows: &[(&'a [N], *const N); WIDTH],
        first: usize,
        column: usize,
    ) -> N::Square<L> {
        let mut scales = &[1.0; WIDTH];
        if N::SCALED {
            let group = self.rows.scales.get(column * WIDTH / CACHE_GROUP);
            if let Some(found) = group.and_then(|group| group.get(first..)?.first_chunk()) {
                scales = found;
            }
        }
        N::square(lanes, rows, column, scales)
    }

    /// Sixteen rows from `first` on, as [`Self::row`].
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "plain loops over arrays end up in registers")]
    pub(super) fn sixteen(&self, first: usize) -> [(&'a [N], *const N); WIDTH] {
        let mut rows = [self.row(first); WIDTH];
        for index in 1..WIDTH {
            rows[index] = self.row(first + index);
        }
        rows
    }

    /// The elements of sixteen rows behind the last whole vector, a vector for each element.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "plain loops over arrays end up in registers")]
    pub(super) fn transposed_tails<L: Lanes>(&self, lanes: L, first: usize) -> [L::Float; WIDTH] {
        let mut vectors = [lanes.splat(0.0); WIDTH];
        for index in 0..WIDTH {
            vectors[index] = self.tail(lanes, first + index);
        }
        lanes.transpose(vectors)
    }

    /// The last elements of a row, fewer than a vector, with zeros after them.
    #[inline(always)]
    pub(super) fn tail<L: Lanes>(&self, lanes: L, index: usize) -> L::Float {
        let (start, count) = (self.rows.starts.get(index).unwrap_or(&NOWHERE), self.rows.size % WIDTH);
        let mut last = [0.0; WIDTH];
        if *start != NOWHERE {
            // They are of one group.
            let scale = self.scale(index, self.rows.size / WIDTH);
            self.rows.data.widen(start + self.rows.size - count, scale, &mut last[..count]);
        }
        lanes.load(&last)
    }
}

impl<N: Number, const TRANSPOSE: bool> Task for Pack<'_, N, TRANSPOSE> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { from, panels } = self;
        let (count, size) = (from.rows.starts.len(), from.rows.size);
        let (whole, rest) = (size / WIDTH, size % WIDTH);
        if TRANSPOSE {
            for (panel, first) in (0..count).step_by(WIDTH).enumerate() {
                let out = &mut panels[panel * size..][..size];
                let (out, last) = out.split_at_mut(size - rest);
                let rows = from.sixteen(first);
                for (column, out) in out.as_chunks_mut::<WIDTH>().0.iter_mut().enumerate() {
                    let square = from.square(lanes, &rows, first, column);
                    for (part, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                        let vectors = N::columns(lanes, &square, part);
                        for index in 0..4 {
                            lanes.store(vectors[index], &mut out[index]);
                        }
                    }
                }
                if !last.is_empty() {
                    for (out, vector) in last.iter_mut().zip(from.transposed_tails(lanes, first)) {
                        lanes.store(vector, out);
                    }
                }
            }
        } else {
            for index in 0..count {
                let (row, ahead) = from.row(index);
                let numbers = row.as_chunks::<WIDTH>().0;
                for column in 0..whole {
                    prefetch(lanes, ahead, column);
                    let vector = match numbers.get(column) {
                        Some(numbers) => N::load(lanes, numbers, from.scale(index, column)),
                        None => lanes.splat(0.0),
                    };
                    lanes.store(vector, &mut panels[column * count + index]);
                }
                if rest > 0 {
                    lanes.store(from.tail(lanes, index), &mut panels[whole * count + index]);
                }
            }
        }
    }
}

/// Rows times panels: `out[r][16 p + lane] = sum_i x[r][i] panels[p][first + i][lane]`.
pub(crate) struct PanelProduct<'a> {
    /// Vectors of sixteen, panel after panel.
    pub(crate) panels: &'a [f32],
    pub(crate) panel_count: usize,
    /// Vectors of a panel.
    pub(crate) stride: usize,
    /// The first vector of a panel that takes part.
    pub(crate) first: usize,
    /// Vectors of a panel that take part.
    pub(crate) inputs: usize,
    pub(crate) x: &'a [f32],
    pub(crate) x_stride: usize,
    pub(crate) rows: usize,
    /// Written in whole vectors.
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
    /// Whether the sums are added to `out`.
    pub(crate) add: bool,
}

impl PanelProduct<'_> {
    /// Computes the product. The result of a row does not depend on the rows beside it.
    pub(crate) fn run(self, instructions: InstructionSet) {
        instructions.run_floats(self);
    }

    #[inline(always)]
    fn rows<L: Lanes, const M: usize>(&mut self, lanes: L, row: usize) -> usize {
        let panels = self.panel_count;
        let mut panel = 0;
        // As many sums as fit the registers.
        while L::ROWS / M >= 4 && panel + 4 <= panels {
            self.tile::<L, M, 4>(lanes, row, panel);
            panel += 4;
        }
        while L::ROWS / M >= 2 && panel + 2 <= panels {
            self.tile::<L, M, 2>(lanes, row, panel);
            panel += 2;
        }
        while panel < panels {
            self.tile::<L, M, 1>(lanes, row, panel);
            panel += 1;
        }
        M
    }

    #[inline(always)]
    fn tile<L: Lanes, const M: usize, const P: usize>(&mut self, lanes: L, row: usize, panel: usize) {
        let blocks: &[F32] = bytemuck::cast_slice(&self.panels[..self.panels.len() / WIDTH * WIDTH]);
        let panels: [&[F32]; P] =
            std::array::from_fn(|index| &blocks[(panel + index) * self.stride + self.first..][..self.inputs]);
        let x: [&[f32]; M] =
            std::array::from_fn(|index| &self.x[(row + index) * self.x_stride..][..self.inputs]);
        let sums = Tile { panels, x, source: Source::Decoded }.sums(lanes);
        for index in 0..P {
            for m in 0..M {
                let start = (row + m) * self.out_stride + (panel + index) * WIDTH;
                let Some(out) = self.out[start..].first_chunk_mut() else { continue };
                let mut sums = sums[index][m];
                if self.add {
                    // A product by one rounds nothing, so that this is an addition.
                    sums = lanes.mul_add(sums, lanes.splat(1.0), lanes.load(out));
                }
                lanes.store(sums, out);
            }
        }
    }
}

impl Task for PanelProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let mut row = 0;
        while row < self.rows {
            row += match (self.rows - row).min(L::ROWS) {
                1 => self.rows::<L, 1>(lanes, row),
                2 => self.rows::<L, 2>(lanes, row),
                3 => self.rows::<L, 3>(lanes, row),
                4 | 5 => self.rows::<L, 4>(lanes, row),
                6 | 7 => self.rows::<L, 6>(lanes, row),
                8..12 => self.rows::<L, 8>(lanes, row),
                _ => self.rows::<L, 12>(lanes, row),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn number(index: usize) -> f32 {
        ((index * 37) % 64) as f32 / 32.0 - 1.0
    }

    /// Products of transposed and of copied rows, some of which have no place, for every set of instructions and type.
    #[rstest]
    fn products_are_those_of_the_formula(
        #[values(1, 16, 40)] count: usize,
        #[values(1, 16, 80, 100)] size: usize,
        #[values(1, 3, 17)] rows: usize,
    ) {
        let data: Vec<f32> = (0..count * (size + 3)).map(number).collect();
        let starts: Vec<_> =
            (0..count).map(|row| if row % 7 == 5 { NOWHERE } else { row * (size + 3) }).collect();
        let value = |row: usize, column: usize| match starts[row] {
            NOWHERE => 0.0,
            start => data[start + column],
        };
        let halves: Vec<f16> = data.iter().map(|value| f16::from_f32(*value)).collect();
        let brains: Vec<bf16> = data.iter().map(|value| bf16::from_f32(*value)).collect();
        // Thirty-seconds, as integers.
        let bytes: Vec<i8> = data.iter().map(|value| (value * 32.0) as i8).collect();
        // The numbers are exact in all types.
        let floats = [Floats::F32(&data), Floats::F16(&halves), Floats::BF16(&brains)];
        let scales = [[1.0 / 32.0; SCALES]; 4];
        for data in floats.map(Elements::Floats).into_iter().chain([Elements::Bytes(&bytes)]) {
            for instructions in InstructionSet::available() {
                let packed = Rows { data, starts: &starts, ahead: &starts, size, scales: &scales };
                let x: Vec<f32> = (0..rows * size).map(|index| number(index + 5)).collect();
                let mut panels = vec![f32::NAN; transposed_floats(count, size)];
                transpose_rows(instructions, &packed, &mut panels);
                let out_stride = count.next_multiple_of(WIDTH);
                let mut out = vec![f32::NAN; rows * out_stride];
                let (stride, panels) = (size, &panels[..]);
                PanelProduct {
                    panels,
                    panel_count: count.div_ceil(WIDTH),
                    stride,
                    first: 0,
                    inputs: size,
                    x: &x,
                    x_stride: size,
                    rows,
                    out: &mut out,
                    out_stride,
                    add: false,
                }
                .run(instructions);
                for row in 0..rows {
                    for key in 0..count {
                        let exact: f32 = (0..size).map(|i| x[row * size + i] * value(key, i)).sum();
                        assert!((out[row * out_stride + key] - exact).abs() < 1e-4, "{row} {key}");
                    }
                }

                let x: Vec<f32> = (0..rows * count).map(|index| number(index + 9)).collect();
                let mut panels = vec![f32::NAN; copied_floats(count, size)];
                copy_rows(instructions, &packed, &mut panels);
                let out_stride = size.next_multiple_of(WIDTH);
                let mut out = vec![1.0; rows * out_stride];
                // All rows but the first.
                let (panels, x) = (&panels[..], &x[..]);
                PanelProduct {
                    panels,
                    panel_count: size.div_ceil(WIDTH),
                    stride: count,
                    first: 1,
                    inputs: count - 1,
                    x: &x[1..],
                    x_stride: count,
                    rows,
                    out: &mut out,
                    out_stride,
                    add: true,
                }
                .run(instructions);
                for row in 0..rows {
                    for column in 0..size {
                        let exact: f32 = (1..count).map(|i| x[row * count + i] * value(i, column)).sum();
                        assert!(
                            (out[row * out_stride + column] - 1.0 - exact).abs() < 1e-4,
                            "{row} {column}"
                        );
                    }
                }
            }
        }
    }
}
