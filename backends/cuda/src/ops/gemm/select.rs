//! Selects the kernel family of a GEMM.

use crate::{
    arch::DeviceSpec,
    ops::gemm::{
        families::{
            batch_wgmma::BatchWgmma, cublaslt::CublasLt, decode_gemm::DecodeGemm, int8_mma::Int8Mma,
            int8_wgmma::Int8Wgmma, packed_gemm::PackedGemm, packed_plain::PackedPlain,
            packed_wgmma::PackedWgmma, skinny::Skinny, skinny_mma::SkinnyMma, stream::Stream,
            tile_wgmma::TileWgmma, tiled::Tiled,
        },
        family::{Description, Family},
        problem::Problem,
    },
};
use std::fmt::Write;

/// All families. The first one that supports a problem is the fastest for it.
const FAMILIES: [&dyn Family; 13] = [
    &BatchWgmma,
    &DecodeGemm,
    &PackedGemm,
    &TileWgmma,
    &Int8Wgmma,
    &Int8Mma,
    &PackedWgmma,
    &PackedPlain,
    &CublasLt,
    &Stream,
    &Skinny,
    &SkinnyMma,
    &Tiled,
];

/// The families of [`DeviceSpec::batch_invariant`]: in all numbers of rows they sum up a row in the same order. Each runs all numbers
/// of rows, but for the first two, which share them. Whether one supports a problem does not depend on anything else of the rows.
const INVARIANT: [&dyn Family; 7] =
    [&BatchWgmma, &TileWgmma, &Int8Wgmma, &Int8Mma, &PackedWgmma, &SkinnyMma, &Tiled];

/// The family that runs a problem in one launch; `None` if the norm or the epilogue needs a separate launch.
pub(super) fn select(problem: &Problem<'_>, device: &DeviceSpec) -> Option<&'static dyn Family> {
    let families: &[&dyn Family] = if device.batch_invariant { &INVARIANT } else { &FAMILIES };
    families.iter().copied().find(|family| family.supports(problem, device))
}

/// The table of families in Markdown, in the order in which they are tried, for `docs/src/crates/cuda.md`.
pub fn gemm_table() -> String {
    let mut table = "| kernel | rows | devices | operands | in the same launch | how |\n".to_owned();
    table += "|---|---|---|---|---|---|\n";
    for family in FAMILIES {
        let Description { kernel, rows, devices, operands, fused, method } = family.description();
        let _ = writeln!(table, "| `{kernel}` | {rows} | {devices} | {operands} | {fused} | {method} |");
    }
    table
}
