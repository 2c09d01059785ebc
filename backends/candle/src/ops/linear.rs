//! Linear layers.

use crate::{
    kernels::Kernel,
    tensor::{CPU, Result, floats, optional_vector, rows, store},
    weight::Weight,
};
use candle_core::Tensor;
use dsrun_core::{
    kernels::PackedWeight,
    op::{HeadLinear, Linear},
};
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

impl Kernel for HeadLinear {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, &[0], &[0]);
        let (heads, weight): (usize, &Weight) = (self.heads as usize, frame.weight(1)?);
        let (inputs, outputs) = (weight.weight_type().columns(), weight.weight_type().rows() / heads);
        let x = floats(frame, 0, rows)?;
        let x = x.reshape((rows, heads, x.dim(1)? / heads))?;
        let head = |head: usize| -> Result<Tensor> {
            let x = x.narrow(1, head, 1)?.squeeze(1)?;
            let own = Tensor::arange((head * outputs) as u32, ((head + 1) * outputs) as u32, CPU)?;
            // y[t, h, n] = sum_k x[t, h, k] * weight[h, n, k], and behind it the rest of the head
            let y = x.narrow(1, 0, inputs)?.contiguous()?.matmul(&weight.rows(&own)?.t()?)?;
            let rest = x.dim(1)? - inputs;
            Ok(if rest > 0 { Tensor::cat(&[y, x.narrow(1, inputs, rest)?], 1)? } else { y })
        };
        let heads = (0..heads).map(head).collect::<Result<Vec<_>>>()?;
        store(frame, 0, &Tensor::cat(&heads, 1)?)
    }
}
