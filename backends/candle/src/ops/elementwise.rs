//! Elementwise sums, casts, and slices of columns.

use crate::{
    kernels::Kernel,
    tensor::{Result, floats, operand, optional_vector, rows, store},
};
use dsrun_core::op::{Add, Cast, Columns};
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

impl Kernel for Columns {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let x = operand(frame, 0, rows(frame, &[0], &[0]))?;
        // y[t, j] = x[t, start + j]
        store(frame, 0, &x.narrow(1, self.start as usize, self.count as usize)?)
    }
}
