//! The norm at the start of a region.

use crate::ops::body::{BodyReader, made, value};
use dsrun_core::{
    op::{LayerNorm, RmsNorm},
    region::well_known::Norm as Norms,
};

/// A norm before another op, with the indices of its weight and bias operands.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) enum Norm {
    Rms(RmsNorm, usize),
    Layer(LayerNorm, Option<usize>, Option<usize>),
}

impl Norm {
    /// The operand with the weight.
    pub(in crate::ops) fn weight(&self) -> Option<usize> {
        match self {
            Self::Rms(_, weight) => Some(*weight),
            Self::Layer(_, weight, _) => *weight,
        }
    }

    /// The operand with the bias.
    pub(in crate::ops) fn bias(&self) -> Option<usize> {
        match self {
            Self::Rms(..) => None,
            Self::Layer(_, _, bias) => *bias,
        }
    }

    /// The attributes as bits, for comparison and as parameters: the kind, epsilon, and the weight offset.
    pub(in crate::ops) fn scalars(self) -> [u32; 3] {
        match self {
            Self::Rms(op, _) => [1, op.eps.to_bits(), op.weight_offset.to_bits()],
            Self::Layer(op, ..) => [2, op.eps.to_bits(), 0],
        }
    }

    /// Epsilon and the weight offset.
    pub(in crate::ops) fn eps_and_offset(self) -> (f32, f32) {
        match self {
            Self::Rms(op, _) => (op.eps, op.weight_offset),
            Self::Layer(op, ..) => (op.eps, 0.0),
        }
    }

    /// Reads a norm from the next call of a body, with its input and result. The outer `None` means that the next call is not a
    /// norm, the inner `None` that no kernel supports it.
    #[allow(
        clippy::option_option,
        reason = "no norm, and a norm that no kernel supports, are different results"
    )]
    pub(in crate::ops) fn read(reader: &mut BodyReader<'_>) -> Option<Option<(Self, usize, usize)>> {
        let (norm, call) = reader.take(Norms::of)?;
        let norm = match norm {
            Norms::Rms(op) => value(call, 1).map(|weight| Self::Rms(op, weight)),
            Norms::Layer(op) => Some(Self::Layer(op, value(call, 1), value(call, 2))),
        };
        Some((|| Some((norm?, value(call, 0)?, made(call, 0)?)))())
    }
}
