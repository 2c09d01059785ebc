//! Float tensors of any type, read and written as f32.

use crate::parallel::{Lane, Team};
use dsrun_core::{DType, Error, Result};
use dsrun_host::{Element, Frame, Tensor};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use std::{marker::PhantomData, ptr::NonNull};

/// Elements to read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl<'a> Floats<'a> {
    /// Elements `start .. start + count`: in place if they are f32, else widened into the front of `scratch`.
    pub(crate) fn range<'s>(&self, start: usize, count: usize, scratch: &'s mut [f32]) -> &'s [f32]
    where
        'a: 's,
    {
        match self {
            // An empty tensor has no place that `start` could be in.
            _ if count == 0 => &[],
            Self::F32(data) => &data[start..][..count],
            _ => {
                self.widen(start, &mut scratch[..count]);
                &scratch[..count]
            }
        }
    }

    /// Elements from `start` on, as many as `out` takes.
    pub(crate) fn widen(&self, start: usize, out: &mut [f32]) {
        match self {
            Self::F32(data) => out.copy_from_slice(&data[start..][..out.len()]),
            Self::F16(data) => data[start..][..out.len()].convert_to_f32_slice(out),
            Self::BF16(data) => {
                // The upper half of an f32; unlike the conversion of `half`, without a branch for NaN.
                let data = &data[start..][..out.len()];
                for (out, value) in out.iter_mut().zip(data) {
                    *out = f32::from_bits(u32::from(value.to_bits()) << 16);
                }
            }
        }
    }

    /// How much scratch memory [`Self::range`] needs for `count` elements.
    pub(crate) fn scratch(&self, count: usize) -> usize {
        if matches!(self, Self::F32(_)) { 0 } else { count }
    }
}

/// Access to the float tensors of a call.
pub(crate) trait FloatFrame {
    /// Operand `index`, of any float type.
    fn floats(&self, index: usize) -> Result<Tensor<'_, Floats<'_>>>;

    /// Operand `index` of any float type, if it was bound.
    fn optional_floats(&self, index: usize) -> Result<Option<Tensor<'_, Floats<'_>>>>;

    /// Result `index`, of any float type. Handed out once.
    fn floats_mut(&self, index: usize) -> Result<Tensor<'_, FloatsMut<'_>>>;
}

impl FloatFrame for Frame<'_> {
    fn floats(&self, index: usize) -> Result<Tensor<'_, Floats<'_>>> {
        Ok(match self.operand_dtype(index)? {
            DType::F32 => self.input(index)?.with(Floats::F32),
            DType::F16 => self.input(index)?.with(Floats::F16),
            DType::BF16 => self.input(index)?.with(Floats::BF16),
            other => return Err(Error::internal(format!("{other} is not a float type"))),
        })
    }

    fn optional_floats(&self, index: usize) -> Result<Option<Tensor<'_, Floats<'_>>>> {
        self.has(index).then(|| self.floats(index)).transpose()
    }

    fn floats_mut(&self, index: usize) -> Result<Tensor<'_, FloatsMut<'_>>> {
        Ok(match self.result_dtype(index)? {
            DType::F32 => self.output(index)?.with(FloatsMut::F32),
            DType::F16 => self.output(index)?.with(FloatsMut::F16),
            DType::BF16 => self.output(index)?.with(FloatsMut::BF16),
            other => return Err(Error::internal(format!("{other} is not a float type"))),
        })
    }
}

/// Rows of a float operand as f32.
pub(crate) trait FloatRows<'a> {
    /// Row `index` of a matrix.
    fn row<'s>(&self, index: usize, scratch: &'s mut [f32]) -> &'s [f32]
    where
        'a: 's;

    /// All of a vector.
    fn vector<'s>(&self, scratch: &'s mut Vec<f32>) -> &'s [f32]
    where
        'a: 's;

    /// How much scratch memory a row needs.
    fn row_scratch(&self) -> usize;
}

impl<'a> FloatRows<'a> for Tensor<'a, Floats<'a>> {
    fn row<'s>(&self, index: usize, scratch: &'s mut [f32]) -> &'s [f32]
    where
        'a: 's,
    {
        self.data.range(self.row_start(index), self.width(), scratch)
    }

    fn vector<'s>(&self, scratch: &'s mut Vec<f32>) -> &'s [f32]
    where
        'a: 's,
    {
        let needed = self.data.scratch(self.width());
        if scratch.len() < needed {
            scratch.resize(needed, 0.0);
        }
        self.data.range(0, self.width(), scratch)
    }

    fn row_scratch(&self) -> usize {
        self.data.scratch(self.width())
    }
}

/// Elements to write.
#[derive(Debug)]
pub(crate) enum FloatsMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    BF16(&'a mut [bf16]),
}

impl<'a> FloatsMut<'a> {
    /// Elements from `start` on become `values`, rounded to nearest.
    pub(crate) fn store(&mut self, start: usize, values: &[f32]) {
        match self {
            Self::F32(data) => data[start..][..values.len()].copy_from_slice(values),
            Self::F16(data) => data[start..][..values.len()].convert_from_f32_slice(values),
            Self::BF16(data) => data[start..][..values.len()].convert_from_f32_slice(values),
        }
    }

    /// The same elements, to be written by several threads.
    pub(crate) fn share(self) -> SharedFloats<'a> {
        fn parts<T>(data: &mut [T]) -> (NonNull<u8>, usize) {
            (NonNull::from(&mut *data).cast(), data.len())
        }
        let (kind, (pointer, length)) = match self {
            Self::F32(data) => (Kind::F32, parts(data)),
            Self::F16(data) => (Kind::F16, parts(data)),
            Self::BF16(data) => (Kind::BF16, parts(data)),
        };
        SharedFloats { pointer, length, kind, lifetime: PhantomData }
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    F32,
    F16,
    BF16,
}

/// Elements that several threads write, each its own.
#[derive(Debug)]
pub(crate) struct SharedFloats<'a> {
    pointer: NonNull<u8>,
    length: usize,
    kind: Kind,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: it is a mutable slice whose only use, `write`, makes its caller keep threads apart.
unsafe impl Sync for SharedFloats<'_> {}

impl SharedFloats<'_> {
    /// Lets `fill` set elements `start .. start + count`: in place if they are f32, else in the lane's row, from which they
    /// are rounded. `fill` sets all of them.
    ///
    /// # Panics
    /// If they are outside.
    ///
    /// # Safety
    /// Until this returns, no other thread may write any of these elements.
    pub(crate) unsafe fn write(
        &self,
        start: usize,
        count: usize,
        lane: &mut Lane,
        fill: impl FnOnce(&mut [f32], &mut Lane),
    ) {
        assert!(start <= self.length && count <= self.length - start, "a range of elements is outside");
        match self.kind {
            // SAFETY: the elements were f32 when shared; the range is inside, and the caller's alone.
            Kind::F32 => fill(unsafe { self.range(start, count) }, lane),
            Kind::F16 => {
                // SAFETY: as above, with f16.
                let out = unsafe { self.range::<f16>(start, count) };
                rounded(count, lane, fill, |values| out.convert_from_f32_slice(values));
            }
            Kind::BF16 => {
                // SAFETY: as above, with bf16.
                let out = unsafe { self.range::<bf16>(start, count) };
                rounded(count, lane, fill, |values| out.convert_from_f32_slice(values));
            }
        }
    }

    /// # Safety
    /// `T` must be the elements' type, the range inside, and no one else may use it while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "the whole point; callers keep ranges apart")]
    unsafe fn range<T: Element>(&self, start: usize, count: usize) -> &mut [T] {
        // SAFETY: the slice this was made from was valid, mutable and of this type; the rest is the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast::<T>().as_ptr().add(start), count) }
    }
}

/// Runs `fill` on a row of f32 and passes it on.
fn rounded(
    count: usize,
    lane: &mut Lane,
    fill: impl FnOnce(&mut [f32], &mut Lane),
    store: impl FnOnce(&[f32]),
) {
    let mut row = lane.take_row(count);
    fill(&mut row[..count], lane);
    store(&row[..count]);
    lane.put_row(row);
}

/// Writing a float result by several threads.
pub(crate) trait FloatOutput<'a>: Sized {
    /// The same tensor, to be written by several threads.
    fn share(self) -> Tensor<'a, SharedFloats<'a>>;

    /// Lets `fill` set rows `0..rows` of a matrix, on all threads if that is worth it. `cost` is the cost of an element in
    /// scalar operations.
    fn fill_rows(
        self,
        team: &mut Team<'_>,
        rows: usize,
        cost: usize,
        fill: impl Fn(usize, &mut [f32], &mut Lane) + Sync,
    ) {
        self.fill_rows_if(team, rows, cost, |_| true, fill);
    }

    /// As [`Self::fill_rows`], but leaves rows alone that are not `wanted`.
    fn fill_rows_if(
        self,
        team: &mut Team<'_>,
        rows: usize,
        cost: usize,
        wanted: impl Fn(usize) -> bool + Sync,
        fill: impl Fn(usize, &mut [f32], &mut Lane) + Sync,
    );
}

impl<'a> FloatOutput<'a> for Tensor<'a, FloatsMut<'a>> {
    fn share(self) -> Tensor<'a, SharedFloats<'a>> {
        self.with(FloatsMut::share)
    }

    fn fill_rows_if(
        self,
        team: &mut Team<'_>,
        rows: usize,
        cost: usize,
        wanted: impl Fn(usize) -> bool + Sync,
        fill: impl Fn(usize, &mut [f32], &mut Lane) + Sync,
    ) {
        let (rows, width) = (rows.min(self.rows), self.width());
        if width == 0 {
            return;
        }
        let out = self.share();
        team.for_each(rows, width.saturating_mul(cost), |row, lane| {
            if wanted(row) {
                // SAFETY: `for_each` gives each row to one call, and rows do not overlap: descriptions are checked for
                // that (`TensorDesc::validate`).
                unsafe {
                    out.data.write(out.row_start(row), width, lane, |values, lane| fill(row, values, lane))
                };
            }
        });
    }
}
