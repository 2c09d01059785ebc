//! Linear layers of many rows by cooperative matrices, on adapters that have them.

use super::{
    launch::{CallPlan, Launch, Scratch, Value},
    linear::{FusedLinear, ROWS_AT_ONCE, UNIT},
    weight,
};
use crate::driver::{
    adapter::{DeviceSpec, Matrices},
    shader::{EMULATED, MATRICES, WeightElement},
};
use dsrun_core::{DType, Error, Result, TensorDesc, kernels::CallDesc};
use std::iter;

const SOURCE: &str = include_str!("../../kernels/matrices.wgsl");
const HALVES: &str = include_str!("../../kernels/halves.wgsl");

/// Rows and columns of a fragment, which a subgroup multiplies at once.
const FRAGMENT: usize = 16;
/// Threads of a subgroup.
pub(crate) const SUBGROUP: usize = 32;
/// The columns of the shortest step.
const SHORT_STEP: usize = 32;
/// Rows up to which a tile has all of them, on adapters with matrices and on those that emulate them.
const FEW_ROWS_OF_TILE: usize = 64;
const FEW_ROWS_OF_EMULATED: usize = 32;

/// The tile of a workgroup, and the part of it that each subgroup computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    rows: usize,
    outputs: usize,
    warp_rows: usize,
    warp_outputs: usize,
    /// Subgroups that have the same part, and divide the columns of a step.
    splits: usize,
    /// Columns that are staged in workgroup memory at once.
    step: usize,
    /// Steps that are loaded ahead, which divide the number of steps.
    ahead: usize,
}

/// Tiles of many rows and of few. Workgroups of the latter are few, and wait for their loads, so each asks for many columns at a time
/// and ahead. The sizes are those that were fastest on one GPU (docs/src/performance/wgpu.md).
const MANY: Tile =
    Tile { rows: 128, outputs: 128, warp_rows: 64, warp_outputs: 32, splits: 1, step: 64, ahead: 1 };
const FEW: Tile = Tile { outputs: 32, warp_outputs: 32, splits: 8, step: 256, ahead: 4, ..MANY };
/// Emulated tiles are small, because loops in place of matrices are long to compile.
const EMULATED_MANY: Tile =
    Tile { rows: 64, outputs: 32, warp_rows: 32, warp_outputs: 16, step: SHORT_STEP, ..MANY };
const EMULATED_FEW: Tile = Tile { outputs: 16, splits: 2, ahead: 2, ..EMULATED_MANY };

impl Tile {
    /// The tile for a number of rows and inputs, if there is one for the adapter: its step divides the inputs, and workgroup memory has
    /// room for it.
    fn of(rows: usize, inputs: usize, spec: &DeviceSpec) -> Option<Self> {
        let (many, few, most) = match spec.matrices? {
            Matrices::Emulated => (EMULATED_MANY, EMULATED_FEW, FEW_ROWS_OF_EMULATED),
            Matrices::Cooperative => (MANY, FEW, FEW_ROWS_OF_TILE),
        };
        let all = rows.next_multiple_of(FRAGMENT);
        let tile = if rows <= most { Self { rows: all, warp_rows: all, ..few } } else { many };
        let mut steps = iter::successors(Some(tile.step), |step| (*step > SHORT_STEP).then_some(step / 2));
        let fitting = |step: usize| {
            let splits = tile.splits.min(step / FRAGMENT);
            let ahead = (1..=tile.ahead).rev().find(|ahead| inputs.is_multiple_of(ahead * step))?;
            Some(Self { step, splits, ahead, ..tile }).filter(|tile| tile.fits(1, spec))
        };
        steps.find_map(fitting)
    }

    /// Whether workgroup memory has room for this number of tiles of both factors.
    fn fits(&self, buffers: usize, spec: &DeviceSpec) -> bool {
        self.shared_bytes(buffers) <= spec.limits.max_compute_workgroup_storage_size as usize
    }

    fn threads(&self) -> usize {
        self.rows / self.warp_rows * (self.outputs / self.warp_outputs) * self.splits * SUBGROUP
    }

    /// Bytes of workgroup memory with this number of tiles of both factors.
    fn shared_bytes(&self, buffers: usize) -> usize {
        let tiles = buffers * (self.rows + self.outputs) * (self.step + 8) * 2;
        tiles + self.threads() / SUBGROUP * FRAGMENT * 20 * 4 + 16
    }
}

/// Whether the products of a linear layer are computed by cooperative matrices: many rows of f16 or bf16, whose number of columns
/// is a multiple of a step, by a weight of the same element type or of groups that are not small.
pub(super) fn suits(
    fused: &FusedLinear,
    call: &CallDesc,
    spec: &DeviceSpec,
    parts: &[weight::Layout],
) -> bool {
    let Some(x) = call.tensor(0) else { return false };
    let (&[rows, inputs], &[stride, _]) = (x.shape.as_slice(), x.strides.as_slice()) else { return false };
    let whole_row = || call.tensor(1).is_some_and(|norm| norm.shape == [inputs]);
    // The kernel for few rows reads the weight once for so many.
    if rows <= ROWS_AT_ONCE {
        return false;
    }
    let aligned = inputs > 0 && stride.is_multiple_of(4) && Tile::of(rows, inputs, spec).is_some();
    let fits = |part: &weight::Layout| match (part.element, x.dtype) {
        (WeightElement::F16, DType::F16) | (WeightElement::BF16, DType::BF16) => true,
        (WeightElement::Integers { .. } | WeightElement::Floats4, DType::F16 | DType::BF16) => {
            !part.has_small_groups()
        }
        _ => false,
    };
    aligned && (fused.norm.is_none() || whole_row()) && parts.iter().all(fits)
}

/// The dispatches of a linear layer that [`suits`]: one that converts the rows, unless they can be read as they are, and one per
/// part of the weight. `finish` adds the operands of the epilogue to those; `units` are the units of a part.
pub(super) fn plan(
    fused: &FusedLinear,
    call: &CallDesc,
    spec: &DeviceSpec,
    parts: &[weight::Layout],
    units: impl Fn(&weight::Layout) -> usize,
    finish: impl Fn(Launch) -> Result<Launch>,
) -> Result<CallPlan> {
    let Some(x) = call.tensor(0) else { return Err(Error::internal("linear has no x")) };
    let (&[rows, inputs], &[stride, _]) = (x.shape.as_slice(), x.strides.as_slice()) else {
        return Err(Error::internal("x of linear is not a matrix"));
    };
    let mut plan = CallPlan::default();
    let direct = fused.norm.is_none() && x.dtype == DType::F16 && stride.is_multiple_of(8);
    let scaled = x.dtype == DType::BF16;
    let mut scratch = |dtype: DType, columns: usize| -> Result<Scratch> {
        let desc = TensorDesc { bounded: x.bounded, ..TensorDesc::dense(dtype, &[rows, columns]) };
        let offset = plan.workspace.next_multiple_of(spec.alignment);
        plan.workspace = (offset + desc.bytes()?).next_multiple_of(16);
        Ok(Scratch { desc, offset, rows_of: 0 })
    };
    let halves = scratch(DType::F16, inputs)?;
    let scales = scratch(DType::F32, 1)?;
    if direct {
        plan.workspace = 0;
    } else {
        let mut launch =
            Launch::new(HALVES, "halves_of_rows").reducing(true).groups(rows).vectors("x", call, 0)?;
        launch = launch.scratch("halves", &halves, true)?.size("inputs", inputs)?;
        if let Some(norm) = &fused.norm {
            launch = launch.vectors("norm_weight", call, 1)?.param("eps", Value::F32(norm.eps));
            launch = launch.param("weight_offset", Value::F32(norm.weight_offset)).flag("NORM", true);
        }
        if scaled {
            launch = launch.scratch("x_scales", &scales, false)?.flag("SCALED", true);
        }
        plan.launches.push(launch);
    }
    let tile =
        Tile::of(rows, inputs, spec).ok_or_else(|| Error::internal("no tile suits the linear layer"))?;
    let double = tile.fits(2, spec);
    for (index, part) in parts.iter().enumerate() {
        let units = units(part);
        let groups = units.div_ceil(tile.outputs / UNIT).saturating_mul(rows.div_ceil(tile.rows));
        let mut launch = Launch::new(super::linear::SOURCE, "linear_matrices").groups(groups);
        launch.shader.parts.push(SOURCE);
        launch = if direct { launch.vectors("x", call, 0)? } else { launch.scratch("x", &halves, true)? };
        launch = launch.words().weight_part("w", fused.weight, index, Some(part))?.writable();
        launch = launch.operand("bias", call, fused.bias.unwrap_or(usize::MAX))?;
        if scaled {
            launch = launch.scratch("x_scales", &scales, false)?.flag("X_SCALED", true);
        }
        let vectors = tile.step / (UNIT * part.quads());
        let partial = !(tile.outputs * vectors).is_multiple_of(tile.threads());
        let constants = [
            ("TILE_ROWS", tile.rows),
            ("TILE_OUTPUTS", tile.outputs),
            ("ROW_FRAGMENTS", tile.warp_rows / FRAGMENT),
            ("OUTPUT_FRAGMENTS", tile.warp_outputs / FRAGMENT),
            ("THREADS", tile.threads()),
            ("STEP", tile.step),
            ("AHEAD", tile.ahead),
            ("SPLITS", tile.splits),
            ("SPLIT_FRAGMENTS", tile.step / FRAGMENT / tile.splits),
            ("BUFFERS", 1 + usize::from(double)),
            ("X_LOADS", tile.rows * (tile.step / 8) / tile.threads()),
            ("W_LOADS", (tile.outputs * vectors).div_ceil(tile.threads())),
            ("W_QUADS", part.quads()),
        ];
        launch.shader.constants.extend(constants.map(|(name, value)| (name, value as u32)));
        launch =
            launch.size("inputs", inputs)?.size("first_unit", part.first / UNIT)?.size("units", units)?;
        launch = launch.flag(MATRICES, true).flag(EMULATED, spec.matrices == Some(Matrices::Emulated));
        launch = launch
            .flag("SCALED", part.element != WeightElement::F16)
            .flag("DOUBLE", double)
            .flag("PARTIAL", partial);
        plan.launches.push(finish(launch)?);
    }
    Ok(plan)
}

#[cfg(test)]
mod tests;
