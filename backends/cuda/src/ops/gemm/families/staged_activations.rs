//! Activations that every block normalises and keeps in shared memory: the constants and the parameters of
//! `linear/activations.cuh`.

use crate::ops::{
    frame::Frame,
    gemm::{
        fused_linear::{FusedLinear, Norm},
        problem::Problem,
    },
    operand, type_name,
};
use dsrun_core::Result;

/// The maximum number of rows that every block normalises by itself.
pub(super) const NORMED_ROWS: usize = 8;

/// Whether blocks can normalise the rows of a problem, or there is no norm.
pub(super) fn takes_norm(problem: &Problem<'_>) -> bool {
    problem.fused.norm.is_none() || (problem.norms_whole_rows() && problem.rows() <= NORMED_ROWS)
}

/// Bytes between rows in shared memory: 64 more than a multiple of 128, so that neighbouring rows are in different banks.
pub(super) fn pitch(bytes: usize) -> usize {
    if bytes % 128 == 64 { bytes } else { bytes.next_multiple_of(128) + 64 }
}

/// Vectors of a row that each thread of a block of `warps` warps keeps in registers for the norm; 0 if that would be more than
/// `most`.
pub(super) fn own_vectors([rows, inputs]: [usize; 2], warps: usize, most: usize) -> usize {
    // The warps are divided evenly among the rows.
    let warps = (warps / rows.next_power_of_two()).max(1);
    let own = inputs.div_ceil(8 * warps * 32);
    if own <= most { own } else { 0 }
}

/// The constants of the bias and the norm.
pub(super) fn norm_defines(problem: &Problem<'_>) -> Result<Vec<(&'static str, String)>> {
    let name = |index: Option<usize>| match index {
        Some(index) => operand(problem.call, index).and_then(|tensor| type_name(tensor.dtype)),
        None => Ok("f32"),
    };
    let norm = match problem.fused.norm {
        None => 0,
        Some(Norm::Rms(..)) => 1,
        Some(Norm::Layer(..)) => 2,
    };
    let (weight, bias) = problem.fused.norm.map_or((None, None), |norm| (norm.weight(), norm.bias()));
    Ok([
        ("BIAS", problem.bias_name()?.to_owned()),
        ("G", name(weight)?.to_owned()),
        ("SHIFT", name(bias)?.to_owned()),
        ("NORM", norm.to_string()),
    ]
    .into())
}

/// `struct Norm` of the kernels.
pub(super) fn norm_words(fused: &FusedLinear, frame: &Frame) -> [u64; 3] {
    let optional = |index: Option<usize>| index.map_or(0, |index| frame.address(index));
    let Some(norm) = fused.norm else { return [0; 3] };
    let (eps, weight_offset) = norm.eps_and_offset();
    let scalars = u64::from(eps.to_bits()) | u64::from(weight_offset.to_bits()) << 32;
    [optional(norm.weight()), optional(norm.bias()), scalars]
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(32)]
    #[case(512)]
    #[case(1600)]
    #[case(4096)]
    fn neighbouring_rows_start_half_a_line_apart(#[case] columns: usize) {
        assert!(pitch(columns * 2) >= columns * 2 && pitch(columns * 2) % 128 == 64);
    }
}
