//! Elementwise activation functions, plain and gated.

use crate::{
    floats::{FloatFrame, FloatOutput, FloatRows},
    kernel::Kernel,
    parallel::Worker,
    simd,
};
use dsrun_core::{
    Result,
    op::{Activation, GateLayout, GatedActivation, Nonlinearity},
};
use dsrun_host::Frame;
use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_PI};

/// The cost of an element in scalar operations: about that of an exponential.
const COST: usize = 16;

/// `out = f(x)`.
fn apply(function: Nonlinearity, x: &[f32], out: &mut [f32]) {
    let each =
        |out: &mut [f32], f: &dyn Fn(f32) -> f32| out.iter_mut().zip(x).for_each(|(out, x)| *out = f(*x));
    match function {
        // Not `max`, which would turn NaN into 0.
        Nonlinearity::Relu => each(out, &|x| if x < 0.0 { 0.0 } else { x }),
        Nonlinearity::Silu => simd::silu(x, out),
        Nonlinearity::GeluErf => each(out, &|x| 0.5 * x * (1.0 + libm::erff(x * FRAC_1_SQRT_2))),
        Nonlinearity::GeluTanh => {
            each(out, &|x| 0.5 * x * (1.0 + (FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x)).tanh()))
        }
        Nonlinearity::QuickGelu => each(out, &|x| x / (1.0 + (-1.702 * x).exp())),
        Nonlinearity::Tanh => each(out, &f32::tanh),
    }
}

/// `values = min(values, limit)`, NaN kept; 0 means no limit.
fn limit_above(values: &mut [f32], limit: f32) {
    if limit > 0.0 {
        values.iter_mut().for_each(|value| *value = if *value > limit { limit } else { *value });
    }
}

fn limit_below(values: &mut [f32], limit: f32) {
    if limit > 0.0 {
        values.iter_mut().for_each(|value| *value = if *value < -limit { -limit } else { *value });
    }
}

fn add(values: &mut [f32], bias: Option<&[f32]>) {
    if let Some(bias) = bias {
        values.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
    }
}

impl Kernel for Activation {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (x, bias) = (frame.floats(0)?, frame.optional_floats(1)?);
        let bias = bias.as_ref().map(|bias| bias.vector(&mut worker.vectors[0]));
        let width = x.width();
        frame.floats_mut(0)?.fill_rows(&mut worker.team, x.rows, COST, |row, out, lane| {
            let [input] = lane.split([width]);
            x.data.widen(x.row_start(row), input);
            add(input, bias);
            limit_above(input, self.limit);
            apply(self.function, input, out);
        });
        Ok(())
    }
}

impl Kernel for GatedActivation {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (gate, up, bias) = (frame.floats(0)?, frame.optional_floats(1)?, frame.optional_floats(2)?);
        let bias = bias.as_ref().map(|bias| bias.vector(&mut worker.vectors[0]));
        let y = frame.floats_mut(0)?;
        let width = y.width();
        let rows = up.as_ref().map_or(gate.rows, |up| gate.rows.min(up.rows));
        y.fill_rows(&mut worker.team, rows, COST, |row, out, lane| {
            let [gates, ups, packed] = lane.split([width, width, 2 * width]);
            let start = gate.row_start(row);
            // Bring both halves, biases added, into `gates` and `ups`.
            match (self.layout, &up) {
                (GateLayout::Interleaved, _) => {
                    gate.data.widen(start, packed);
                    add(packed, bias);
                    for ((gate, up), pair) in gates.iter_mut().zip(&mut *ups).zip(packed.as_chunks::<2>().0) {
                        [*gate, *up] = *pair;
                    }
                }
                (_, up) => {
                    gate.data.widen(start, gates);
                    match up {
                        Some(up) => up.data.widen(up.row_start(row), ups),
                        None => gate.data.widen(start + width, ups),
                    }
                    add(gates, bias.map(|bias| &bias[..width]));
                    add(ups, bias.map(|bias| &bias[width..]));
                }
            }
            limit_above(gates, self.limit);
            limit_above(ups, self.limit);
            limit_below(ups, self.limit);
            apply(self.function, gates, out);
            out.iter_mut().zip(ups).for_each(|(out, up)| *out *= *up + self.up_offset);
        });
        Ok(())
    }
}
