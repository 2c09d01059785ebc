//! Quantisation of activations, and the linear layer over quantised activations.

use crate::{
    kernels::Kernel,
    tensor::{CPU, Result, floats, optional_vector, rows, store},
    weight::Weight,
};
use candle_core::{DType, Tensor};
use dsrun_core::op::{LinearW8A8, QuantPerToken};
use dsrun_host::Frame;

impl Kernel for QuantPerToken {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, &[0], &[0, 1]);
        let x = floats(frame, 0, rows)?;
        let width = x.dim(1)?;
        if rows == 0 {
            return Ok(());
        }
        if width == 0 {
            return store(frame, 1, &Tensor::zeros(rows, DType::F32, CPU)?);
        }
        // scales[m] = max_k |x[m, k]| / 127, with the division of f32
        let scales = x.abs()?.max_keepdim(1)?.broadcast_div(&Tensor::new(&[127f32], CPU)?)?;
        // y[m, k] = round(x[m, k] / scales[m]), ties to even, within 127; a row whose scale is 0 is all zeros
        let quotients = x.broadcast_div(&scales)?.flatten_all()?.to_vec1::<f32>()?;
        let rounded = quotients.into_iter().map(|quotient| quotient.round_ties_even().clamp(-127.0, 127.0));
        let rounded = Tensor::from_iter(rounded, CPU)?.reshape((rows, width))?;
        let zero = scales.eq(0.0)?.broadcast_as((rows, width))?;
        store(frame, 0, &zero.where_cond(&rounded.zeros_like()?, &rounded)?)?;
        store(frame, 1, &scales.squeeze(1)?)
    }
}

impl Kernel for LinearW8A8 {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, &[0, 1], &[0]);
        let (x, scales) = (frame.input::<i8>(0)?, floats(frame, 1, rows)?);
        let weight: &Weight = frame.weight(2)?;
        let (integers, weight_scales) = weight.integers()?;
        let x: Vec<f64> = (0..rows).flat_map(|row| x.row(row)).map(|byte| f64::from(*byte)).collect();
        let x = Tensor::from_vec(x, (rows, integers.dim(1)?), CPU)?;
        // f64 holds every sum of products of bytes exactly: it is below 2^31.
        let sums = x.matmul(&integers.to_dtype(DType::F64)?.t()?)?;
        // y[m, n] = scales[m] * s[n] * sum_k x[m, k] * q[n, k] + bias[n]
        let scales = scales.to_dtype(DType::F64)?.reshape((rows, 1))?;
        let mut y = sums.broadcast_mul(&scales)?.broadcast_mul(&weight_scales.to_dtype(DType::F64)?.t()?)?;
        if let Some(bias) = optional_vector(frame, 3)? {
            y = y.broadcast_add(&bias.to_dtype(DType::F64)?)?;
        }
        store(frame, 0, &y)
    }
}
