//! Results of the oracle that are floats.

/// A float result, with the sizes that its error scales with.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Real {
    /// The value in f64, without rounding.
    pub value: f64,
    /// The sum of the absolute values of all terms. Errors of f32 arithmetic scale with it, even if the terms cancel and the
    /// value is small.
    pub magnitude: f64,
    /// The same sum over the terms that the op's documentation allows to be rounded to a storage type.
    pub inner: f64,
    /// The root of the sum of squares of those terms, with which the error of rounding each of them scales on average.
    pub spread: f64,
    /// The number of terms, for the growth of errors in long sums.
    pub terms: usize,
    /// How far the partial sums go, where that is not told by the value: those of a mean that is taken off again.
    pub partial: f64,
    /// What a number on the way is multiplied by, if that is more than 1: the value loses that much of one that is flushed.
    pub gain: f64,
}

impl Real {
    /// A value of few terms without inner rounding.
    pub fn new(value: f64, magnitude: f64) -> Self {
        Self::sum(value, magnitude, 1)
    }

    /// Sets the number of terms.
    pub fn sum(value: f64, magnitude: f64, terms: usize) -> Self {
        Self { value, magnitude, terms, ..Self::default() }
    }

    /// Sets how far the partial sums go.
    #[must_use]
    pub fn by_way_of(self, partial: f64) -> Self {
        Self { partial, ..self }
    }

    /// Sets what a number on the way is multiplied by.
    #[must_use]
    pub fn multiplied(self, gain: f64) -> Self {
        Self { gain, ..self }
    }

    /// Sets the sums over terms that may be rounded: of absolute values, and the root of that of squares.
    #[must_use]
    pub fn rounded_inside(self, inner: f64, spread: f64) -> Self {
        Self { inner, spread, ..self }
    }
}
