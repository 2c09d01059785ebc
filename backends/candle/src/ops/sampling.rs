//! Penalties on logits, and the largest element of a row.

use crate::{
    kernels::Kernel,
    tensor::{CPU, Result, floats, rows, store, store_rows},
};
use candle_core::{DType, Tensor};
use dsrun_core::op::{Argmax, IN_PROMPT, LogitProcess, SamplingColumn};
use dsrun_host::Frame;

impl Kernel for LogitProcess {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, if frame.has(5) { &[0, 1, 5] } else { &[0, 1] }, &[0]);
        let (logits, requests) = (floats(frame, 0, rows)?, frame.input::<i32>(1)?);
        let (parameters, counts) = (frame.input::<f32>(2)?, frame.input::<i32>(3)?);
        let bias = frame.has(4).then(|| frame.input::<f32>(4)).transpose()?;
        let mask = frame.has(5).then(|| frame.input::<u32>(5)).transpose()?;
        let capacity =
            parameters.rows.min(counts.rows).min(bias.as_ref().map_or(usize::MAX, |bias| bias.rows));
        let width = logits.dim(1)?;
        let (mut written, mut processed) = (Vec::new(), Vec::new());
        for row in 0..rows {
            // Rows of request -1 are not written.
            let Some(request) = requests.index(row, capacity) else { continue };
            let parameter = |column: SamplingColumn| -> Result<Tensor> {
                Ok(Tensor::new(&[parameters.row(request)[column as usize]], CPU)?)
            };
            let counts = counts.row(request);
            let seen = Tensor::from_iter(counts.iter().map(|count| u8::from(*count != 0)), CPU)?;
            let n = Tensor::from_iter(counts.iter().map(|count| (count & (IN_PROMPT - 1)) as f32), CPU)?;

            let x = logits.get(row)?;
            let p = parameter(SamplingColumn::RepetitionPenalty)?;
            let penalised = x.gt(0.0)?.where_cond(&x.broadcast_div(&p)?, &x.broadcast_mul(&p)?)?;
            let mut x = seen.where_cond(&penalised, &x)?;
            x = (x - n.broadcast_mul(&parameter(SamplingColumn::FrequencyPenalty)?)?)?;
            let presence = parameter(SamplingColumn::PresencePenalty)?;
            x = n.gt(0.0)?.where_cond(&x.broadcast_sub(&presence)?, &x)?;
            if let Some(bias) = &bias {
                x = (x + Tensor::new(bias.row(request), CPU)?)?;
            }
            if let Some(mask) = &mask {
                let words = mask.row(row);
                let allowed = (0..width).map(|token| (words[token / 32] >> (token % 32) & 1) as u8);
                let nothing = Tensor::full(f32::NEG_INFINITY, width, CPU)?;
                x = Tensor::from_iter(allowed, CPU)?.where_cond(&x, &nothing)?;
            }
            written.push(row);
            processed.push(x);
        }
        if written.is_empty() {
            return Ok(());
        }
        store_rows(frame, 0, &written, &Tensor::stack(&processed, 0)?)
    }
}

impl Kernel for Argmax {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, &[0], &[0]);
        let x = floats(frame, 0, rows)?;
        if rows == 0 || x.dim(1)? == 0 {
            return store(frame, 0, &Tensor::full(-1i64, rows, CPU)?);
        }
        // NaN counts as minus infinity; candle's argmax takes the first of equal elements.
        let number = x.eq(&x)?;
        let nothing = Tensor::full(f32::NEG_INFINITY, x.shape(), CPU)?;
        let ids = number.where_cond(&x, &nothing)?.argmax(1)?.to_dtype(DType::I64)?;
        let any = number.max(1)?;
        store(frame, 0, &any.where_cond(&ids, &Tensor::full(-1i64, rows, CPU)?)?)
    }
}
