//! Rotary position embedding.

use crate::{
    kernels::Kernel,
    tensor::{CPU, Result, floats, rows, store_rows, vector},
};
use candle_core::Tensor;
use dsrun_core::op::{Rope, RopePairing};
use dsrun_host::Frame;

impl Kernel for Rope {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, &[0, 1], &[0]);
        let (x, frequencies) = (floats(frame, 0, rows)?, vector(frame, 2)?);
        let positions = frame.input::<i32>(1)?;
        // Rows of position -1 are not written.
        let written: Vec<usize> = (0..rows).filter(|row| positions.at(*row) >= 0).collect();
        let (heads, pairs) = (self.heads as usize, frequencies.dim(0)?);
        if written.is_empty() || x.dim(1)? == 0 {
            return Ok(());
        }
        let positions: Vec<f32> = written.iter().map(|row| positions.at(*row) as f32).collect();
        let indices: Vec<u32> = written.iter().map(|row| *row as u32).collect();
        let x = x.index_select(&Tensor::new(indices, CPU)?, 0)?;
        let (count, size) = (written.len(), x.dim(1)? / heads);
        let x = x.reshape((count, heads, size))?;

        // a = positions[t] * inverse_frequencies[i], the same for all heads
        let angles = Tensor::from_vec(positions, (count, 1, 1), CPU)?.broadcast_mul(&frequencies)?;
        let (sine, cosine) = (angles.sin()?, angles.cos()?);
        let (turned, rest) = (x.narrow(2, 0, 2 * pairs)?, x.narrow(2, 2 * pairs, size - 2 * pairs)?);
        let (p, q) = match self.pairing {
            RopePairing::Halves => (turned.narrow(2, 0, pairs)?, turned.narrow(2, pairs, pairs)?),
            RopePairing::Neighbours => {
                let turned = turned.reshape((count, heads, pairs, 2))?;
                (turned.narrow(3, 0, 1)?.squeeze(3)?, turned.narrow(3, 1, 1)?.squeeze(3)?)
            }
        };
        // scale * (p cos a - q sin a, q cos a + p sin a)
        let scale = f64::from(self.scale);
        let first = ((p.broadcast_mul(&cosine)? - q.broadcast_mul(&sine)?)? * scale)?;
        let second = ((q.broadcast_mul(&cosine)? + p.broadcast_mul(&sine)?)? * scale)?;
        let turned = match self.pairing {
            RopePairing::Halves => Tensor::cat(&[first, second], 2)?,
            RopePairing::Neighbours => {
                Tensor::stack(&[first, second], 3)?.reshape((count, heads, 2 * pairs))?
            }
        };
        store_rows(frame, 0, &written, &Tensor::cat(&[turned, rest], 2)?)
    }
}
