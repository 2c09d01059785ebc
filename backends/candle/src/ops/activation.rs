//! Elementwise activation functions, plain and gated.

use crate::{
    kernels::Kernel,
    tensor::{Result, floats, optional_vector, rows, store},
};
use candle_core::Tensor;
use dsrun_core::op::{Activation, GateLayout, GatedActivation, Nonlinearity};
use dsrun_host::Frame;
use std::f64::consts::{FRAC_2_PI, SQRT_2};

/// `f(x)`.
fn apply(function: Nonlinearity, x: &Tensor) -> Result<Tensor> {
    Ok(match function {
        // max(x, 0), of which candle's `relu` makes 0 for NaN
        Nonlinearity::Relu => x.maximum(0.0)?,
        // x / (1 + exp(-x))
        Nonlinearity::Silu => (x / (x.neg()?.exp()? + 1.0)?)?,
        // x / 2 * (1 + erf(x / sqrt(2)))
        Nonlinearity::GeluErf => ((x / 2.0)? * ((x / SQRT_2)?.erf()? + 1.0)?)?,
        // x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
        Nonlinearity::GeluTanh => {
            let cubic = (x + ((x.sqr()? * x)? * 0.044_715)?)?;
            ((x / 2.0)? * ((cubic * FRAC_2_PI.sqrt())?.tanh()? + 1.0)?)?
        }
        // x / (1 + exp(-1.702 x))
        Nonlinearity::QuickGelu => (x / ((x * -1.702)?.exp()? + 1.0)?)?,
        Nonlinearity::Tanh => x.tanh()?,
    })
}

/// `min(x, limit)`; 0 means no limit. NaN stays.
fn limited_above(x: Tensor, limit: f32) -> Result<Tensor> {
    Ok(if limit > 0.0 { x.minimum(f64::from(limit))? } else { x })
}

/// `clamp(x, -limit, limit)`; 0 means no limit. NaN stays.
fn limited(x: Tensor, limit: f32) -> Result<Tensor> {
    let x = limited_above(x, limit)?;
    Ok(if limit > 0.0 { x.maximum(-f64::from(limit))? } else { x })
}

impl Kernel for Activation {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let mut x = floats(frame, 0, rows(frame, &[0], &[0]))?;
        if let Some(bias) = optional_vector(frame, 1)? {
            x = x.broadcast_add(&bias)?;
        }
        // y = f(min(x + bias, limit))
        store(frame, 0, &apply(self.function, &limited_above(x, self.limit)?)?)
    }
}

impl Kernel for GatedActivation {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let rows = rows(frame, if frame.has(1) { &[0, 1] } else { &[0] }, &[0]);
        let gate = floats(frame, 0, rows)?;
        // Both halves in the order of a packed row: gates first, or interleaved.
        let mut packed = match self.layout {
            GateLayout::Separate => Tensor::cat(&[gate, floats(frame, 1, rows)?], 1)?,
            GateLayout::Concatenated | GateLayout::Interleaved => gate,
        };
        if let Some(bias) = optional_vector(frame, 2)? {
            packed = packed.broadcast_add(&bias)?;
        }
        let width = packed.dim(1)? / 2;
        let (gate, up) = match self.layout {
            GateLayout::Separate | GateLayout::Concatenated => {
                (packed.narrow(1, 0, width)?, packed.narrow(1, width, width)?)
            }
            GateLayout::Interleaved => {
                let pairs = packed.reshape((rows, width, 2))?;
                (pairs.narrow(2, 0, 1)?.squeeze(2)?, pairs.narrow(2, 1, 1)?.squeeze(2)?)
            }
        };
        // y = f(min(g + bias_g, limit)) * (clamp(u + bias_u, -limit, limit) + up_offset)
        let gate = apply(self.function, &limited_above(gate, self.limit)?)?;
        let up = (limited(up, self.limit)? + f64::from(self.up_offset))?;
        store(frame, 0, &(gate * up)?)
    }
}
