//! Linear layers.

use crate::{
    kernels::Kernel,
    tensor::{Result, floats, optional_vector, rows, store},
    weight::Weight,
};
use dsrun_core::op::Linear;
use dsrun_host::Frame;

impl Kernel for Linear {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let x = floats(frame, 0, rows(frame, &[0], &[0]))?;
        let weight: &Weight = frame.weight(1)?;
        // y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n]
        let mut y = x.matmul(&weight.values()?.t()?)?;
        if let Some(bias) = optional_vector(frame, 2)? {
            y = y.broadcast_add(&bias)?;
        }
        store(frame, 0, &y)
    }
}
