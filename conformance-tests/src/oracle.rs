//! Every op once more, in plain scalar f64, one file per family, written from the op documents in `dsrun_core::op`.
//!
//! Nothing here is fast, and nothing is shared with a backend. Inputs are plain slices, already rounded to the type they
//! are stored in. A float result comes as a [`Real`]: the value and how large the numbers were that made it, because that,
//! and not the value, decides how large the error of honest f32 arithmetic may be.

pub mod activation;
pub mod attention;
pub mod cache;
pub mod chain;
pub mod collective;
pub mod elementwise;
pub mod embed;
pub mod float;
pub mod linear;
pub mod norm;
pub mod philox;
pub mod quant;
pub mod rope;
pub mod sampling;
pub mod step;
pub mod weight;

/// A float result and what its error scales with.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Real {
    /// The value in f64, not rounded.
    pub value: f64,
    /// Sum of the sizes of the terms that make the value: what errors of f32 arithmetic scale with. It survives when the
    /// terms cancel and the value is small.
    pub magnitude: f64,
    /// As `magnitude`, of the terms that the op's document allows to be rounded to a storage type on the way.
    pub inner: f64,
    /// Root of the sum of squares of those terms: what the error of rounding each of them scales with on average.
    pub spread: f64,
    /// How many terms are summed, for the growth of errors along long sums.
    pub terms: usize,
}

impl Real {
    /// A value of one or a few terms, nothing of it rounded on the way.
    pub fn new(value: f64, magnitude: f64) -> Self {
        Self::sum(value, magnitude, 1)
    }

    /// A sum of so many terms.
    pub fn sum(value: f64, magnitude: f64, terms: usize) -> Self {
        Self { value, magnitude, terms, ..Self::default() }
    }

    /// The same, with terms that may be rounded on the way: the sum of their sizes and the root of that of their squares.
    #[must_use]
    pub fn rounded_inside(self, inner: f64, spread: f64) -> Self {
        Self { inner, spread, ..self }
    }
}
