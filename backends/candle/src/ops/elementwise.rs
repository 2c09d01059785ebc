//! Sums, casts, fills and runs of columns.

use crate::{
    kernels::Kernel,
    tensor::{CPU, Result, floats, operand, optional_vector, rows, store},
};
use candle_core::Tensor;
use dsrun_core::op::{Add, Cast, Columns, Fill};
use dsrun_host::Frame;

impl Kernel for Add {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, if frame.has(2) { &[0, 1, 2] } else { &[0, 1] }, &[0]);
        let (a, mut b) = (floats(frame, 0, rows)?, floats(frame, 1, rows)?);
        if let Some(bias) = optional_vector(frame, 3)? {
            b = b.broadcast_add(&bias)?;
        }
        // y = a + alpha * (b + bias) + c
        let mut y = (a + (b * f64::from(self.alpha))?)?;
        if frame.has(2) {
            y = (y + floats(frame, 2, rows)?)?;
        }
        store(frame, 0, &y)
    }
}

impl Kernel for Cast {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        // Storing rounds.
        store(frame, 0, &operand(frame, 0, rows(frame, &[0], &[0]))?)
    }
}

impl Kernel for Fill {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let mut shape = frame.result_shape(0)?.to_vec();
        shape[0] = frame.result_rows(0);
        store(frame, 0, &Tensor::full(self.value, shape, CPU)?)
    }
}

impl Kernel for Columns {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let x = operand(frame, 0, rows(frame, &[0], &[0]))?;
        // y[t, j] = x[t, start + j]
        store(frame, 0, &x.narrow(1, self.start as usize, self.count as usize)?)
    }
}
