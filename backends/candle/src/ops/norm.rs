//! Norms over the features of a row.

use crate::{
    kernels::Kernel,
    tensor::{Result, floats, optional_vector, rows, store, vector},
};
use dsrun_core::op::{LayerNorm, RmsNorm};
use dsrun_host::Frame;

impl Kernel for RmsNorm {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, &[0], &[0]);
        let (x, weight) = (floats(frame, 0, rows)?, vector(frame, 1)?);
        let (width, group) = (x.dim(1)?, weight.dim(0)?);
        if rows == 0 || width == 0 {
            return Ok(());
        }
        // x * rsqrt(mean(x^2) + eps) * (weight + weight_offset), group by group
        let x = x.reshape((rows, width / group, group))?;
        let deviation = (x.sqr()?.mean_keepdim(2)? + f64::from(self.eps))?.sqrt()?;
        let weight = (weight + f64::from(self.weight_offset))?;
        let y = x.broadcast_div(&deviation)?.broadcast_mul(&weight)?;
        store(frame, 0, &y.reshape((rows, width))?)
    }
}

impl Kernel for LayerNorm {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, &[0], &[0]);
        let x = floats(frame, 0, rows)?;
        if rows == 0 || x.dim(1)? == 0 {
            return Ok(());
        }
        // (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias
        let centred = x.broadcast_sub(&x.mean_keepdim(1)?)?;
        let deviation = (centred.sqr()?.mean_keepdim(1)? + f64::from(self.eps))?.sqrt()?;
        let mut y = centred.broadcast_div(&deviation)?;
        if let Some(weight) = optional_vector(frame, 1)? {
            y = y.broadcast_mul(&weight)?;
        }
        if let Some(bias) = optional_vector(frame, 2)? {
            y = y.broadcast_add(&bias)?;
        }
        store(frame, 0, &y)
    }
}
