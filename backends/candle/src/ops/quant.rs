//! Quantisation of activations, and the linear layers over quantised activations.

use crate::{
    kernels::Kernel,
    tensor::{CPU, Result, floats, optional_vector, rows, store},
    weight::Weight,
};
use candle_core::{DType, Tensor};
use dsrun_core::op::{LinearA8, LinearW8A8, QuantPerGroup, QuantPerToken};
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
        let (y, scales) = quantised(&x)?;
        store(frame, 0, &y)?;
        store(frame, 1, &scales.squeeze(1)?)
    }
}

impl Kernel for QuantPerGroup {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, &[0], &[0, 1]);
        let x = floats(frame, 0, rows)?;
        let (width, group) = (x.dim(1)?, self.group as usize);
        if rows == 0 || width == 0 {
            return Ok(());
        }
        // Every group is a row of its own.
        let groups = width / group;
        let (y, scales) = quantised(&x.reshape((rows * groups, group))?)?;
        store(frame, 0, &y.reshape((rows, width))?)?;
        store(frame, 1, &scales.reshape((rows, groups))?)
    }
}

/// The integers `[M, K]` of rows that have at least one element, and their scales `[M, 1]`.
pub(super) fn quantised(x: &Tensor) -> Result<(Tensor, Tensor)> {
    // scales[m] = max_k |x[m, k]| / 127, with the division of f32
    let scales = x.abs()?.max_keepdim(1)?.broadcast_div(&Tensor::new(&[127f32], CPU)?)?;
    // y[m, k] = round(x[m, k] / scales[m]), ties to even, within 127; a row whose scale is 0 is all zeros
    let quotients = x.broadcast_div(&scales)?.flatten_all()?.to_vec1::<f32>()?;
    let rounded = quotients.into_iter().map(|quotient| quotient.round_ties_even().clamp(-127.0, 127.0));
    let rounded = Tensor::from_iter(rounded, CPU)?.reshape(x.dims())?;
    let zero = scales.eq(0.0)?.broadcast_as(x.dims())?;
    Ok((zero.where_cond(&rounded.zeros_like()?, &rounded)?, scales))
}

impl Kernel for LinearA8 {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, &[0, 1], &[0]);
        let (x, scales) = (frame.input::<i8>(0)?, floats(frame, 1, rows)?);
        let weight: &Weight = frame.weight(2)?;
        let (groups, group) = (scales.dim(1)?, self.group as usize);
        let x: Vec<f64> = (0..rows).flat_map(|row| x.row(row)).map(|byte| f64::from(*byte)).collect();
        let x = Tensor::from_vec(x, (rows, groups, group), CPU)?;
        // scales[m, k / group] * x[m, k], exact in f64
        let x = x.broadcast_mul(&scales.to_dtype(DType::F64)?.reshape((rows, groups, 1))?)?;
        // y[m, n] = sum_k scales[m, k / group] * x[m, k] * weight[n, k] + bias[n]
        let weight = weight.values()?.to_dtype(DType::F64)?;
        let mut y = x.reshape((rows, groups * group))?.matmul(&weight.t()?)?;
        if let Some(bias) = optional_vector(frame, 3)? {
            y = y.broadcast_add(&bias.to_dtype(DType::F64)?)?;
        }
        store(frame, 0, &y)
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
